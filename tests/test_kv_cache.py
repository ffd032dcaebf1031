"""The int8 KV cache: what it stores, what is read back from it, and what that does to answers and to perplexity."""

import json
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import benchmark
import eval
import generate
from attention import Chunk, KVCache
from eval import perplexity
from generate import EMBEDDED, load_model
from model import Transformer
from quantize import KV_CACHES, Int8KVCache, to_int8
from session import Sampling, Session

B, K, S, C = 3, 2, 24, 16
CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)
HELDOUT = (EMBEDDED / "heldout.txt").read_text()


pytestmark = pytest.mark.usefixtures("few_threads")


@pytest.fixture(scope="module")
def tiny(directory):
    """The embedded model in fp32."""
    return load_model(directory, "cpu", torch.float32)


def random_kv(*shape: int, seed: int = 0) -> Tensor:
    """Keys and values [B, Q, 2, K, C], each position and head at a scale of its own."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(*shape, 2, K, C, generator=generator)
    return kv * torch.randn(*shape, 2, K, 1, generator=generator).exp()


def caches(batch: int = B, dtype: torch.dtype = torch.float32) -> list[KVCache]:
    return [kind((batch, K, S, C), dtype, CPU) for kind in (KVCache, Int8KVCache)]


def chunk(row: int, end: int) -> Chunk:
    return Chunk(torch.tensor([row]), end)


def state(cache: Int8KVCache) -> Tensor:
    """Everything that it stores, [2, B, K, S, C + 1]."""
    return torch.cat((cache.kv.float(), cache.scale.kv.float()), dim=-1)


def relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


# What is stored -----------------------------------------------------------------------------------------------------


@given(
    width=st.integers(1, 130),
    exponents=st.lists(st.integers(-80, 80), min_size=1, max_size=5),
    outlier=st.floats(1, 1e4),
    zeros=st.floats(0, 1),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60, deadline=None)
def test_a_number_comes_back_within_half_a_step(width, exponents, outlier, zeros, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(exponents), width, generator=generator)
    x *= torch.rand(x.shape, generator=generator) >= zeros
    x[:, 0] *= outlier
    x *= torch.tensor(exponents).float().exp2().unsqueeze(-1)
    codes, scale = to_int8(x)
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.int8, torch.bfloat16, (len(exponents), 1))
    assert codes.min() >= -127
    scale, largest = scale.double(), x.abs().amax(-1, keepdim=True).double()
    assert ((codes * scale - x).abs() <= scale * (0.5 + 1e-6)).all()
    ok = (scale * 127 / largest - 1).abs() <= 2**-8
    assert (ok | (largest == 0)).all() and (scale[largest == 0] == 1).all()


def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other():
    x = random_kv(1, 1)[0, 0]  # [2, K, C]
    want = [part.clone() for part in to_int8(x)]
    x[0, 0, 3], x[1, 1, 5] = float("inf"), float("nan")
    codes, scale = to_int8(x)
    back = codes.float() * scale.float()
    assert not back[0, 0].isfinite().any() and not back[1, 1].isfinite().any()
    for part, same in zip((codes, scale), want, strict=True):
        assert torch.equal(part[0, 1], same[0, 1]) and torch.equal(part[1, 0], same[1, 0])


@pytest.mark.parametrize("head_dim", (64, 128))
def test_it_takes_half_the_bytes(head_dim):
    plain, int8 = (
        sum(t.nbytes for t in kind((B, K, S, head_dim), torch.bfloat16, CPU).buffers())
        for kind in (KVCache, Int8KVCache)
    )
    assert int8 / plain == (head_dim + 2) / (2 * head_dim)  # 0.508 where C is 128


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_what_is_read_is_near_what_was_written_in_the_models_dtype(dtype):
    kv, positions = random_kv(B, 4).to(dtype), torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8], [20, 21, 22, 23]])
    plain, int8 = caches(dtype=dtype)
    for got, want in zip(int8.update(positions, kv), plain.update(positions, kv), strict=True):
        assert got.dtype == want.dtype == dtype and got.shape == want.shape == (B, K, S, C)
        assert relative(got.float(), want.float()) < 0.01
    for got, want in zip(int8.extend(chunk(1, 9), kv[:1]), plain.extend(chunk(1, 9), kv[:1]), strict=True):
        assert got.dtype == want.dtype == dtype and got.shape == want.shape == (K, 9, C)
        assert relative(got.float(), want.float()) < 0.01


@pytest.mark.parametrize("batch", (1, B))
def test_a_chunk_writes_and_reads_what_single_tokens_do(batch):
    kv, (_, whole), (_, single) = random_kv(1, 9), caches(batch), caches(batch)
    row = batch - 1
    whole.extend(chunk(row, 4), kv[:, :4])
    from_chunk = whole.extend(chunk(row, 9), kv[:, 4:])
    for position in range(9):
        rows = torch.full((batch, 1), S - 1)  # where the other rows write does not matter here
        rows[row] = position
        from_update = single.update(rows, kv[:, position : position + 1].expand(batch, -1, -1, -1, -1))
    assert torch.equal(state(whole)[:, row, :, :9], state(single)[:, row, :, :9])
    for a, b in zip(from_chunk, from_update, strict=True):
        assert torch.equal(a, b[row, :, :9])


def test_rows_do_not_touch_each_other():
    _, cache = caches()
    cache.update(torch.tensor([[0], [1], [2]]), random_kv(B, 1))
    before = state(cache)
    cache.extend(chunk(1, 12), random_kv(1, 8, seed=1))
    changed = (state(cache) != before).any(-1).any(2).any(0)  # [B, S]
    assert changed.nonzero().tolist() == [[1, position] for position in range(4, 12)]
    before = state(cache)
    cache.update(torch.tensor([[23], [3], [0]]), random_kv(B, 1, seed=2))
    changed = (state(cache) != before).any(-1).any(2).any(0)
    assert changed.nonzero().tolist() == [[0, 23], [1, 3], [2, 0]]
    cache.clear()
    assert not state(cache).any()


# In a model ---------------------------------------------------------------------------------------------------------


def test_a_prompt_in_chunks_and_single_tokens_is_one_pass(family):
    """Up to the codes that a last digit of keys and values decides; and near the plain cache's logits."""
    model = load_model(family.directory, "cpu")
    tokens = torch.randint(160, (1, 40), generator=torch.Generator().manual_seed(1))

    def run(kind: type[KVCache], ends: list[int], single: int) -> Tensor:
        model.cache_kind = kind
        model.setup_cache(1, 64)
        logits, start = [], 0
        for end in ends:
            logits.append(model(tokens[:, start:end], chunk(0, end), all_positions=True)[0])
            start = end
        for position in range(start, start + single):
            logits.append(model(tokens[:, position : position + 1], torch.tensor([[position]])))
        return torch.cat(logits)

    def median(got: Tensor, want: Tensor) -> float:
        """Of the errors by position: a near-tie of the router sends a token to another expert."""
        return ((got - want).norm(dim=-1) / want.norm(dim=-1)).median().item()

    plain, whole = (run(kind, [40], 0) for kind in KV_CACHES.values())
    parts = run(Int8KVCache, [1, 16, 17, 30], 10)
    # SparseMixer's weights jump where an expert is no longer near enough to be weighed against.
    most = 0.05 if model.args.mixer_eps is None else 0.1
    assert median(parts, whole) < 1e-3 < median(whole, plain) < most


def test_greedy_answers_of_the_embedded_model(tiny, tokenizer):
    """Alone, in a batch and again after a reset: the same; and the plain cache's."""
    prompts = [tokenizer.encode(HELDOUT[at : at + 300]) for at in (0, 5000)]

    def answers(kind: type[KVCache], *prompts: list[int]) -> list[tuple[int, ...]]:
        tiny.cache_kind = kind
        session = Session(tiny, 256, batch=len(prompts), prefill_chunk=50)
        found = list(zip(*session.stream_all(prompts, 40, GREEDY), strict=True))
        for cache in session.caches:
            cache.kv.fill_(7)
            getattr(cache, "scale", cache).kv.fill_(float("inf") if kind is Int8KVCache else 7)
        session.reset()
        assert list(zip(*session.stream_all(prompts, 40, GREEDY), strict=True)) == found
        return found

    together = answers(Int8KVCache, *prompts)
    assert together == [answer for ids in prompts for answer in answers(Int8KVCache, ids)]
    assert together == answers(KVCache, *prompts)


def test_a_compiled_session_reads_it(make_family):
    model, ids = load_model(make_family("qwen3_moe").directory, "cpu"), [5, 17, 3, 99, 42, 8, 120]
    model.cache_kind = Int8KVCache
    eager = list(Session(model, 64).stream(ids, 24, GREEDY))
    assert list(Session(model, 64, compile=True).stream(ids, 24, GREEDY)) == eager


@pytest.mark.parametrize("size", (8000, pytest.param(len(HELDOUT), marks=pytest.mark.slow)))
def test_perplexity_is_the_plain_caches(tiny, tokenizer, size):
    found = []
    for tiny.cache_kind in KV_CACHES.values():
        found.append(perplexity(tiny, tokenizer, HELDOUT[:size], 2048, progress=False)["perplexity"])
    plain, int8 = found
    assert int8 != plain and int8 == pytest.approx(plain, rel=5e-3)


# Commands -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(directory, tmp_path, monkeypatch, capsys):
    """(room, --kv_cache or none) -> the JSON that its command prints, and the kinds of the caches that it set up."""
    (tmp_path / "text.txt").write_text(HELDOUT[:300])
    shape = {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "vocab_size": 96, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    arguments = {
        generate: ("--checkpoint_path", directory, "--max_new_tokens", 3),
        eval: ("--checkpoint_path", directory, "--text_file", tmp_path / "text.txt", "--seq_len", 64),
        benchmark: ("--arch", tmp_path / "config.json", "--eager", "--new_tokens", 2, "--repeats", 1),
    }
    kinds, setup = [], Transformer.setup_cache

    def spy(self, *given) -> None:
        setup(self, *given)
        kinds.append(type(self.layers[0].attention.cache))

    monkeypatch.setattr(Transformer, "setup_cache", spy)
    monkeypatch.setattr(benchmark, "read_bandwidth", lambda device: 1e10)

    def run(room, *option: str) -> tuple[dict, list]:
        line = [f"{room.__name__}.py", *map(str, arguments[room]), "--device", "cpu", "--json", *option]
        monkeypatch.setattr(sys, "argv", line)
        kinds.clear()
        assert room.main() == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1]), list(kinds)

    return run


@pytest.mark.parametrize("room", (generate, eval, benchmark), ids=lambda room: room.__name__)
def test_every_command_takes_it_and_says_so(room, command, monkeypatch, capsys):
    for option, name in (((), "plain"), (("--kv_cache", "int8"), "int8"), (("--kv_cache", "plain"), "plain")):
        result, kinds = command(room, *option)
        assert kinds == [KV_CACHES[name]]
        assert room is generate or result["kv_cache"] == name
    with pytest.raises(SystemExit) as refusal:
        command(room, "--kv_cache", "int4")
    out, err = capsys.readouterr()
    assert refusal.value.code == 2 and out == ""
    assert "--kv_cache" in err and all(name in err.splitlines()[-1] for name in ("int4", *KV_CACHES))
