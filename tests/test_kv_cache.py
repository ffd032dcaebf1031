"""The int8 KV cache: contents, answers, perplexity, commands."""

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
from eval import perplexity
from formats.kv_cache import KV_CACHES, Int8KVCache, quantize_int8
from generate import EMBEDDED, load_model
from model import Chunk, Context, KVCache, Transformer
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions

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
    """Return keys and values [B, Q, 2, K, C]; each position and head has its own scale."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(*shape, 2, K, C, generator=generator)
    return kv * torch.randn(*shape, 2, K, 1, generator=generator).exp()


def make_caches(batch: int = B, dtype: torch.dtype = torch.float32) -> list[KVCache]:
    """Return a plain and an int8 cache."""
    return [kind((batch, K, S, C), dtype, CPU) for kind in (KVCache, Int8KVCache)]


def at_positions(positions: list[list[int]] | Tensor) -> Context:
    """The context of a call on tokens at positions [B, Q]."""
    return Context(torch.empty(0), positions=torch.as_tensor(positions))


def make_chunk(row: int, end: int) -> Chunk:
    return Chunk(torch.tensor([row]), end)


def in_chunk(row: int, end: int) -> Context:
    """The context of a call on a chunk."""
    return Context(torch.empty(0), chunk=make_chunk(row, end))


def stored(cache: Int8KVCache) -> Tensor:
    """Return everything that the cache stores, [2, B, K, S, C + 1]."""
    return torch.cat((cache.kv.float(), cache.scale.float()), dim=-1)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


# Storage ------------------------------------------------------------------------------------------


@given(
    width=st.integers(1, 130),
    exponents=st.lists(st.integers(-80, 80), min_size=1, max_size=5),
    outlier=st.floats(1, 1e4),
    zeros=st.floats(0, 1),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60, deadline=None)
def test_rounding_errors_are_at_most_half_a_step(width, exponents, outlier, zeros, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(exponents), width, generator=generator)
    x *= torch.rand(x.shape, generator=generator) >= zeros
    x[:, 0] *= outlier
    x *= torch.tensor(exponents).float().exp2().unsqueeze(-1)
    codes, scale = quantize_int8(x)
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.bfloat16)
    assert scale.shape == (len(exponents), 1)
    assert codes.min() >= -127
    scale, largest = scale.double(), x.abs().amax(-1, keepdim=True).double()
    assert ((codes * scale - x).abs() <= scale * (0.5 + 1e-6)).all()
    close = (scale * 127 / largest - 1).abs() <= 2**-8
    assert (close | (largest == 0)).all() and (scale[largest == 0] == 1).all()


def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other():
    x = random_kv(1, 1)[0, 0]  # [2, K, C]
    before = [part.clone() for part in quantize_int8(x)]
    x[0, 0, 3], x[1, 1, 5] = float("inf"), float("nan")
    codes, scale = quantize_int8(x)
    dequantized = codes.float() * scale.float()
    assert not dequantized[0, 0].isfinite().any() and not dequantized[1, 1].isfinite().any()
    for part, same in zip((codes, scale), before, strict=True):
        assert torch.equal(part[0, 1], same[0, 1]) and torch.equal(part[1, 0], same[1, 0])


@pytest.mark.parametrize("head_dim", (64, 128))
def test_it_takes_half_the_bytes(head_dim):
    plain, int8 = (
        sum(t.nbytes for t in kind((B, K, S, head_dim), torch.bfloat16, CPU).buffers())
        for kind in (KVCache, Int8KVCache)
    )
    assert int8 / plain == (head_dim + 2) / (2 * head_dim)  # 0.508 at C = 128


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_append_returns_nearly_what_was_written_in_the_models_dtype(dtype):
    kv = random_kv(B, 4).to(dtype)
    context = at_positions([[0, 1, 2, 3], [5, 6, 7, 8], [20, 21, 22, 23]])
    plain, int8 = make_caches(dtype=dtype)
    for found, expected in zip(int8.append(kv, context), plain.append(kv, context), strict=True):
        assert found.dtype == expected.dtype == dtype
        assert found.shape == expected.shape == (B, K, S, C)
        assert relative_error(found.float(), expected.float()) < 0.01
    kv, context = kv[:1], in_chunk(1, 9)
    for found, expected in zip(int8.append(kv, context), plain.append(kv, context), strict=True):
        assert found.dtype == expected.dtype == dtype
        assert found.shape == expected.shape == (K, 9, C)
        assert relative_error(found.float(), expected.float()) < 0.01


@pytest.mark.parametrize("batch", (1, B))
def test_a_chunk_writes_and_reads_the_same_as_single_tokens(batch):
    kv, (_, whole), (_, single) = random_kv(1, 9), make_caches(batch), make_caches(batch)
    row = batch - 1
    whole.append(kv[:, :4], in_chunk(row, 4))
    of_chunk = whole.append(kv[:, 4:], in_chunk(row, 9))
    for position in range(9):
        positions = torch.full((batch, 1), S - 1)  # other rows may write anywhere
        positions[row] = position
        token = kv[:, position : position + 1].expand(batch, -1, -1, -1, -1)
        of_tokens = single.append(token, at_positions(positions))
    assert torch.equal(stored(whole)[:, row, :, :9], stored(single)[:, row, :, :9])
    for a, b in zip(of_chunk, of_tokens, strict=True):
        assert torch.equal(a, b[row, :, :9])


def test_rows_do_not_touch_each_other():
    _, cache = make_caches()
    cache.append(random_kv(B, 1), at_positions([[0], [1], [2]]))
    before = stored(cache)
    cache.append(random_kv(1, 8, seed=1), in_chunk(1, 12))
    changed = (stored(cache) != before).any(-1).any(2).any(0)  # [B, S]
    assert changed.nonzero().tolist() == [[1, position] for position in range(4, 12)]
    before = stored(cache)
    cache.append(random_kv(B, 1, seed=2), at_positions([[23], [3], [0]]))
    changed = (stored(cache) != before).any(-1).any(2).any(0)
    assert changed.nonzero().tolist() == [[0, 23], [1, 3], [2, 0]]
    cache.reset()
    assert not stored(cache).any()


# Models -------------------------------------------------------------------------------------------


def test_a_prompt_in_chunks_and_single_tokens_equals_one_call(family):
    """Up to codes that rounding of keys and values decides; and near the plain cache's logits."""
    model = load_model(family.directory, "cpu")
    tokens = torch.randint(160, (1, 40), generator=torch.Generator().manual_seed(1))

    def run(cache_class: type[KVCache], ends: list[int], single: int) -> Tensor:
        model.setup_cache(1, 64, cache_class)
        logits, start = [], 0
        for end in ends:
            part = tokens[:, start:end]
            logits.append(model(part, make_chunk(0, end), all_positions=True)[0])
            start = end
        for n in range(start, start + single):
            logits.append(model(tokens[:, n : n + 1], torch.tensor([[n]])))
        return torch.cat(logits)

    def median_error(found: Tensor, expected: Tensor) -> float:
        """Median over positions: a router's near-tie sends a token to another expert."""
        errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        return errors.median().item()

    plain, whole = (run(cache_class, [40], 0) for cache_class in KV_CACHES.values())
    parts = run(Int8KVCache, [1, 16, 17, 30], 10)
    # SparseMixer's weights jump when an expert falls out of its threshold.
    limit = 0.1 if model.args.family == "phimoe" else 0.05
    assert median_error(parts, whole) < 1e-5 < median_error(whole, plain) < limit


def test_greedy_answers_of_the_embedded_model(tiny, tokenizer):
    """Alone, in a batch, after a reset, and with the plain cache: the same."""
    prompts = [tokenizer.encode(HELDOUT[at : at + 300]) for at in (0, 5000)]

    def answers(cache_class: type[KVCache], *prompts: list[int]) -> list[tuple[int, ...]]:
        options = SessionOptions(batch=len(prompts), prefill_chunk=50, cache_class=cache_class)
        session = Session(tiny, 256, options)
        found = list(zip(*session.stream_all(prompts, 8, GREEDY), strict=True))
        for cache in session.states:
            cache.kv.fill_(7)
            scales = getattr(cache, "scale", cache.kv)
            scales.fill_(float("inf") if cache_class is Int8KVCache else 7)
        session.reset()
        assert list(zip(*session.stream_all(prompts, 8, GREEDY), strict=True)) == found
        return found

    together = answers(Int8KVCache, *prompts)
    assert together == [answer for ids in prompts for answer in answers(Int8KVCache, ids)]
    assert together == answers(KVCache, *prompts)


@pytest.mark.slow
def test_a_compiled_session_reads_it(make_family):
    model, ids = load_model(make_family("qwen3_moe").directory, "cpu"), [5, 17, 3, 99, 42, 8, 120]

    def answer(**options) -> list[int]:
        session = Session(model, 64, SessionOptions(cache_class=Int8KVCache, **options))
        return list(session.stream(ids, 24, GREEDY))

    eager = answer()
    assert answer(compile=True) == eager


@pytest.mark.parametrize("size", (5000, pytest.param(len(HELDOUT), marks=pytest.mark.slow)))
def test_perplexity_is_the_plain_caches(tiny, tokenizer, size):
    plain, int8 = (
        perplexity(tiny, tokenizer, HELDOUT[:size], 2048, cache_class=cache_class, progress=False)[
            "perplexity"
        ]
        for cache_class in KV_CACHES.values()
    )
    assert int8 != plain and int8 == pytest.approx(plain, rel=5e-3)


# Commands -----------------------------------------------------------------------------------------

SMALL_CONFIG = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


@pytest.fixture
def run_command(directory, tmp_path, monkeypatch, capsys):
    """(module, options) -> the JSON its command prints, and the classes of the caches it set up."""
    text, config = tmp_path / "text.txt", tmp_path / "config.json"
    text.write_text(HELDOUT[:300])
    config.write_text(json.dumps(SMALL_CONFIG))
    checkpoint = "--checkpoint_path", directory
    arguments = {
        generate: (*checkpoint, "--max_new_tokens", 3),
        eval: (*checkpoint, "--text_file", text, "--seq_len", 64),
        benchmark: ("--arch", config, "--eager", "--new_tokens", 2, "--repeats", 1),
    }
    classes, setup_cache = [], Transformer.setup_cache

    def spy(self, *given) -> list:
        states = setup_cache(self, *given)
        classes.append(type(self.layers[0].attention.cache))
        return states

    monkeypatch.setattr(Transformer, "setup_cache", spy)
    monkeypatch.setattr(benchmark, "read_bandwidth", lambda device: 1e10)

    def run(module, *option: str) -> tuple[dict, list]:
        common = "--device", "cpu", "--json"
        line = [f"{module.__name__}.py", *map(str, arguments[module]), *common, *option]
        monkeypatch.setattr(sys, "argv", line)
        classes.clear()
        assert module.main() == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1]), list(classes)

    return run


COMMANDS = generate, eval, benchmark


@pytest.mark.parametrize("module", COMMANDS, ids=lambda module: module.__name__)
def test_every_command_takes_and_reports_it(module, run_command, capsys):
    for option, name in (
        ((), "plain"),
        (("--kv_cache", "int8"), "int8"),
        (("--kv_cache", "plain"), "plain"),
    ):
        result, classes = run_command(module, *option)
        assert classes == [KV_CACHES[name]]
        assert module is generate or result["kv_cache"] == name
    with pytest.raises(SystemExit) as refusal:
        run_command(module, "--kv_cache", "int4")
    out, err = capsys.readouterr()
    assert refusal.value.code == 2 and out == ""
    message = err.splitlines()[-1]
    assert "--kv_cache" in err and all(name in message for name in ("int4", *KV_CACHES))
