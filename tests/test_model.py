"""The model against transformers, against itself along other paths, and against a naive loop."""

import dataclasses
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from attention import BLOCK, Chunk, attend, attend_blocks, attend_chunk, blocks_in_use, rope_table
from families import args_from_hf
from generate import load_model
from model import Experts, Transformer, top_k
from quantize import apply, plan
from session import Sampling, Session
from shapes import ARCHITECTURES


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def prompt(length: int = 40, batch: int = 1) -> torch.Tensor:
    return torch.randint(160, (batch, length), generator=torch.Generator().manual_seed(1))


def all_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    """One pass over [B, Q] tokens from position 0 -> [B, Q, V]."""
    model.setup_cache(tokens.shape[0], 64)
    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), all_positions=True)


@pytest.mark.parametrize("layout", ("current", "hub"))
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, layout, make_family):
    family = make_family(name, layout)
    want = family.peer(prompt()).logits
    assert relative(all_logits(load_model(family.directory, "cpu"), prompt()), want) < 1e-4


@pytest.mark.parametrize("layout", ("current", "hub"))
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(name, layout, make_family):
    family = make_family(name, layout)
    want = family.peer.generate(
        prompt(), attention_mask=torch.ones_like(prompt()), max_new_tokens=48, do_sample=False, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    session = Session(load_model(family.directory, "cpu"), 128)
    got = list(session.stream(prompt()[0].tolist(), 48, Sampling(temperature=0)))
    assert got == want[0, 40:].tolist() and len(got) == 48


def test_prefill_equals_token_by_token(family):
    model, tokens = load_model(family.directory, "cpu"), prompt()
    whole = all_logits(model, tokens)
    model.setup_cache(1, 64)
    steps = [model(tokens[:, i : i + 1], torch.tensor([[i]])) for i in range(tokens.shape[1])]
    assert relative(torch.stack(steps, dim=1), whole) < 1e-5


def test_prefill_in_two_parts_equals_one(family):
    model, tokens = load_model(family.directory, "cpu"), prompt()
    whole = all_logits(model, tokens)
    model.setup_cache(1, 64)
    parts = [model(tokens[:, a:b], torch.arange(a, b).unsqueeze(0), all_positions=True) for a, b in ((0, 23), (23, 40))]
    assert relative(torch.cat(parts, dim=1), whole) < 1e-5


@pytest.mark.parametrize("ends", ((40,), (23, 40), (1, 2, 17, 39, 40)))
def test_a_prompt_in_chunks_equals_one_pass(family, ends):
    model, tokens = load_model(family.directory, "cpu"), prompt()
    whole = all_logits(model, tokens)
    model.setup_cache(3, 64)
    parts = [
        model(tokens[:, start:end], Chunk(torch.tensor([1]), end), all_positions=True)
        for start, end in itertools.pairwise((0, *ends))
    ]
    assert relative(torch.cat(parts, dim=1), whole) < 1e-5
    assert not any(block.attention.cache.kv[:, ::2].any() for block in model.layers)  # of the other sequences


def attention_case(B: int, Q: int, S: int, K: int, G: int, window: int | None):
    """Queries at positions of their own, keys, values, and the bias that says what each sees."""
    generator = torch.Generator().manual_seed(B + 3 * Q + 5 * S)
    q = torch.randn(B, Q, K * G, 16, generator=generator)
    k, v = torch.randn(2, B, K, S, 16, generator=generator)
    first = torch.randint(S - Q + 1, (B, 1), generator=generator)
    positions = first + torch.arange(Q)
    distance = positions.unsqueeze(-1) - torch.arange(S)
    visible = (distance >= 0) & (distance < (window or S))
    return q, k, v, positions, torch.where(visible, 0.0, float("-inf"))


@given(Q=st.integers(1, 40), more=st.integers(0, 40), K=st.integers(1, 3), G=st.integers(1, 3),
       window=st.none() | st.integers(1, 90))  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_chunk_attends_as_a_mask_says(Q, more, K, G, window):
    S = Q + more
    q, k, v, *_ = attention_case(1, Q, S, K, G, window)
    distance = torch.arange(more, S).unsqueeze(1) - torch.arange(S)
    bias = torch.where((distance >= 0) & (distance < (window or S)), 0.0, float("-inf"))
    torch.testing.assert_close(attend_chunk(q[0], k[0], v[0], window, None), attend(q, k, v, bias[None])[0])


@given(B=st.integers(1, 3), Q=st.integers(1, 5), blocks=st.integers(1, 5), window=st.none() | st.integers(1, 700))
@settings(max_examples=25, deadline=None)
def test_the_blocks_in_use_hold_what_is_seen_and_little_more(B, Q, blocks, window):
    S = blocks * BLOCK
    q, k, v, positions, bias = attention_case(B, Q, S, 2, 2, window)
    count, order = blocks_in_use(positions, S, window)
    for row in range(B):
        read = order[row, 0, 0, : count[row, 0, 0]]
        inside = torch.zeros(S // BLOCK, dtype=torch.bool).index_fill(0, read.long(), True)
        seen = (bias[row] == 0).any(0).view(-1, BLOCK).any(1)
        assert len(read) == inside.sum() == seen.sum() and torch.equal(inside, seen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow where it is not compiled
        got = attend_blocks(q, k, v, positions, (count, order), window, None)
    torch.testing.assert_close(got, attend(q, k, v, bias), rtol=1e-4, atol=1e-5)


def attended_with_sinks(q, k, v, bias, sinks) -> torch.Tensor:
    """Softmax over positions and the head's sink, which takes its share of nothing; in fp64."""
    groups = q.shape[2] // k.shape[1]
    k, v = (t.double().repeat_interleave(groups, 1) for t in (k, v))  # [B, H, S, C]
    scores = q.double().transpose(1, 2) @ k.mT * q.shape[-1] ** -0.5 + bias.double().unsqueeze(1)
    scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(*scores.shape[:-1], 1)), dim=-1)
    return (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2)


@given(B=st.integers(1, 3), Q=st.integers(1, 5), blocks=st.integers(1, 3), K=st.integers(1, 3), G=st.integers(1, 3),
       window=st.none() | st.integers(1, 300), size=st.sampled_from((0.1, 3.0, 30.0)))  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_every_way_to_attend_knows_sinks(B, Q, blocks, K, G, window, size):
    S = blocks * BLOCK
    q, k, v, positions, bias = attention_case(B, Q, S, K, G, window)
    sinks = torch.randn(K * G, generator=torch.Generator().manual_seed(S)) * size
    want = attended_with_sinks(q, k, v, bias, sinks).float()
    torch.testing.assert_close(attend(q, k, v, bias, sinks), want, rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow where it is not compiled
        got = attend_blocks(q, k, v, positions, blocks_in_use(positions, S, window), window, sinks)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for row in range(B):
        end = int(positions[row, -1]) + 1
        got = attend_chunk(q[row], k[row, :, :end], v[row, :, :end], window, sinks)
        torch.testing.assert_close(got, want[row], rtol=1e-4, atol=1e-5)
    assert (attend(q, k, v, bias, sinks - 1e4) - attend(q, k, v, bias)).abs().max() < 1e-5  # a sink may have no share


@pytest.mark.parametrize("window", (100, 600))
def test_sinks_take_a_prompt_no_scores_in_memory(window):
    Q, S, H, K, C = 128, 640, 16, 2, 16
    q, k, v = torch.randn(Q, H, C), torch.randn(K, S, C), torch.randn(K, S, C)
    with LargestTensor(q, k, v) as largest:
        attend_chunk(q, k, v, window, torch.randn(H))
    assert largest.elements <= max(
        Q * H * (C + 8), K * (S + 1) * (C + 8), Q * (S + 1)
    )  # the last is a mask of all heads
    with LargestTensor(q, k, v) as naive:
        q.transpose(0, 1) @ k.repeat_interleave(H // K, 0).mT
    assert naive.elements == H * Q * S


@pytest.mark.parametrize(
    "rope",
    (
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False, "rope_theta": 1.5e5},
        {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 0.5},
        {"factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 0.9, "rope_theta": 1e6},
        {"factor": 2.0, "original_max_position_embeddings": 7},  # no pair turns often enough
    ),
)
def test_yarn_is_that_of_transformers(rope):
    rope = {"rope_type": "yarn", "rope_theta": 1e4} | rope
    config = GptOssConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=dict(rope))
    frequencies, attention = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    args = args_from_hf(config.to_dict())
    got = rope_table(args, 4096, torch.device("cpu"))
    angles = torch.outer(torch.arange(4096).float(), frequencies)
    want = torch.cat((angles.cos(), angles.cos(), -angles.sin(), angles.sin()), dim=-1) * attention
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)  # of angles up to 4096, in fp32
    assert args.yarn.attention == pytest.approx(attention) and (got[1] - want[1]).abs().max() < 1e-6


def test_sequences_of_a_batch_keep_their_own_positions(family):
    """Two prompts of different lengths, padded at the end, then a step each at its own position."""
    model, tokens, lengths = load_model(family.directory, "cpu"), prompt(20, batch=2), (20, 13)
    model.setup_cache(2, 64)
    positions = torch.arange(20).expand(2, 20)
    first = model(tokens, positions, last=torch.tensor([n - 1 for n in lengths]))
    chosen = first.argmax(-1, keepdim=True)
    second = model(chosen, torch.tensor([[n] for n in lengths]))
    for row, length in enumerate(lengths):
        alone = all_logits(model, torch.cat((tokens[row : row + 1, :length], chosen[row : row + 1]), dim=1))
        assert relative(first[row], alone[0, -2]) < 1e-5
        assert relative(second[row], alone[0, -1]) < 1e-5


def test_last_gives_the_logits_of_that_position_only(family):
    model, tokens = load_model(family.directory, "cpu"), prompt()
    whole = all_logits(model, tokens)
    model.setup_cache(1, 64)
    one = model(tokens, torch.arange(40).unsqueeze(0), last=torch.tensor([17]))
    assert one.shape == (1, 160) and one.dtype == torch.float32
    assert relative(one, whole[:, 17]) < 1e-6
    model.setup_cache(1, 64)
    assert relative(model(tokens, torch.arange(40).unsqueeze(0)), whole[:, -1]) < 1e-6


def test_both_expert_paths_agree(family, monkeypatch):
    tokens, results = prompt(), []
    for limit in (0, 64):  # always grouped, always gathered
        monkeypatch.setattr(Experts, "gather_tokens", limit)
        results.append(all_logits(load_model(family.directory, "cpu"), tokens))
    assert relative(*results) < 1e-5


def test_routing_is_that_of_transformers(family):
    tokens = prompt()
    model = load_model(family.directory, "cpu")
    model.setup_cache(1, 64)
    _, indices, weights = model(tokens, torch.arange(40).unsqueeze(0), return_routing=True)
    sparse = [block for block in model.layers if hasattr(block.ffn, "experts")]
    assert indices.shape == weights.shape == (len(sparse), 40, model.args.n_active)
    routers = [module for module in family.peer.modules() if type(module).__name__.endswith("Router")]
    peer = []
    hooks = [router.register_forward_hook(lambda *call: peer.append(call[-1][1:])) for router in routers]
    family.peer(tokens)
    for hook in hooks:
        hook.remove()
    assert len(peer) == len(sparse)
    for ours, our_weights, (their_weights, theirs) in zip(indices, weights, peer, strict=True):
        order, their_order = ours.argsort(), theirs.argsort()
        assert torch.equal(ours.gather(1, order), theirs.gather(1, their_order))
        torch.testing.assert_close(our_weights.gather(1, order), their_weights.gather(1, their_order))
    if model.args.norm_topk:
        torch.testing.assert_close(weights.sum(-1), torch.full((len(sparse), 40), model.args.routed_scale))


def naive_experts(experts: Experts, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert, in fp64."""
    w13, w2 = experts.w13.weight.double(), experts.w2.weight.double()
    b13, b2 = (0 * w[:, :, 0] if m.bias is None else m.bias.double() for w, m in ((w13, experts.w13), (w2, experts.w2)))
    rows = []
    for token, chosen, scale in zip(x.double(), indices, weights.double(), strict=True):
        y = torch.zeros_like(token)
        for expert, weight in zip(chosen.tolist(), scale, strict=True):
            gate, up = (w13[expert] @ token + b13[expert]).chunk(2)
            hidden = F.silu(gate) * up
            if experts.w13.clamp:
                gate = torch.minimum(gate, torch.tensor(1.5))
                hidden = gate / (1 + (-1.7 * gate).exp()) * (1 + torch.minimum(up.abs(), torch.tensor(1.5)) * up.sign())
            y += weight * (w2[expert] @ hidden + b2[expert])
        rows.append(y)
    return torch.stack(rows)


@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(1, 40), E=st.integers(1, 12), D=st.integers(1, 6), I=st.integers(1, 6), data=st.data(),
    seed=st.integers(0, 2**20), biased=st.booleans(), limit=st.sampled_from((None, 1.5)),
)  # fmt: skip
def test_experts_equal_a_naive_loop(T, E, D, I, data, seed, biased, limit):
    """D and I in units of 8: a grouped product wants rows of whole 16 bytes."""
    A = data.draw(st.integers(1, E))
    args = dataclasses.replace(
        ARCHITECTURES["Mixtral-8x7B"],
        dim=8 * D,
        intermediate=8 * I,
        n_expert=E,
        n_active=A,
        n_layer=1,
        expert_bias=biased,
        swiglu_limit=limit,
        swiglu_alpha=1.7,
    )
    generator = torch.Generator().manual_seed(seed)
    experts = Experts(args)
    for parameter in experts.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    x = torch.randn(T, 8 * D, generator=generator)
    # Some experts get every token and some none: the order is skewed.
    skew = torch.randn(E, generator=generator) * data.draw(st.sampled_from((0.0, 5.0)))
    indices = (torch.randn(T, E, generator=generator) + skew).topk(A).indices
    weights = torch.rand(T, A, generator=generator)
    want = naive_experts(experts, x, indices, weights)
    for product in (experts.gather, experts.group):
        torch.testing.assert_close(product(x, indices, weights).double(), want, rtol=1e-4, atol=1e-4)


@given(data=st.data(), E=st.integers(1, 130), T=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_top_k_is_topk(data, E, T):
    k = data.draw(st.integers(1, min(E, 10)))
    scores = torch.randn(T, E, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 2**20))))
    scores *= data.draw(st.sampled_from((1e-30, 1.0, 1e30)))
    values, indices = top_k(scores, k)
    want = scores.topk(k)
    assert torch.equal(torch.cat(values, dim=-1), want.values) and torch.equal(indices, want.indices)


def test_top_k_breaks_ties_by_the_first_index():
    for score in (0.2, 0.0, -3.0):
        assert top_k(torch.full((1, 5), score), 3)[1].tolist() == [[0, 1, 2]]


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of any operation's result, views of `known` tensors aside."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self.known, self.elements = {tensor.untyped_storage()._cdata for tensor in known}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                self.elements = max(self.elements, tensor.numel())
        return result


def test_a_long_prompt_never_gathers_weights():
    """Mixtral's real shapes and 4096 tokens on the meta device: nothing is larger than the hidden [T * A, 2I]."""
    args, tokens = ARCHITECTURES["Mixtral-8x7B"], 4096
    with torch.device("meta"):
        experts = Experts(args)
        x = torch.empty(tokens, args.dim)
        routing = torch.empty(tokens, args.n_active, dtype=torch.int64), torch.empty(tokens, args.n_active)
    with LargestTensor(*experts.parameters()) as grouped:
        experts(x, *routing)
    assert grouped.elements == tokens * args.n_active * 2 * args.intermediate
    with LargestTensor(*experts.parameters()) as gathered:  # the meter does see a gather
        experts.gather(x[:8], *(part[:8] for part in routing))
    assert gathered.elements == 8 * args.n_active * 2 * args.intermediate * args.dim


@pytest.mark.parametrize(
    ("arch", "gigabytes"),
    (("Mixtral-8x7B", 25.5), ("Qwen3-30B-A3B", 6.08), ("gpt-oss-20b", 7.217), ("gpt-oss-120b", 10.266)),
    ids=lambda value: str(value),
)
def test_bytes_per_token(arch, gigabytes):
    with torch.device("meta"):
        model = Transformer(ARCHITECTURES[arch]).to(torch.bfloat16)
    assert model.bytes_per_token() / 1e9 == pytest.approx(gigabytes, rel=2e-3)


@pytest.mark.parametrize(
    ("arch", "billions", "gibibytes"), (("gpt-oss-20b", 20.91, 12.8), ("gpt-oss-120b", 116.83, 60.8))
)
def test_gpt_oss_is_as_large_as_its_model_card_says(arch, billions, gibibytes):
    args = ARCHITECTURES[arch]
    with torch.device("meta"):
        model = Transformer(args).to(torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)
    apply(model, plan(args, "bf16", "mxfp4"))
    assert sum(p.nbytes for p in model.parameters()) / 2**30 == pytest.approx(gibibytes, abs=0.05)


@pytest.mark.parametrize(
    ("arch", "billions", "active"), (("DeepSeek-V2-Lite", 15.7, 2.4), ("DeepSeek-V3", 671.0, 36.6))
)
def test_deepseek_is_as_large_as_its_paper_says(arch, billions, active):
    """15.7B and 671B parameters, of which a token uses 2.4B and 37B; of the embedding that is a row."""
    with torch.device("meta"):
        model = Transformer(ARCHITECTURES[arch]).to(torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.05)
    assert model.bytes_per_token() / 2e9 == pytest.approx(active, abs=0.06)


def test_tied_embeddings_are_read_once(make_family):
    model = load_model(make_family("qwen3_moe").directory, "cpu")
    assert model.head.weight is model.embedding.weight
    args = model.args
    experts = sum(p.nbytes for name, p in model.named_parameters() if "experts" in name)
    everything = sum(p.nbytes for p in model.parameters())
    row = args.dim * 4
    assert model.bytes_per_token() == everything - experts * (args.n_expert - args.n_active) // args.n_expert + row


def test_equal_layers_hold_no_value_that_differs():
    """One compiled block must serve all: no Python attribute of a block may depend on its layer."""
    with torch.device("meta"):
        model = Transformer(ARCHITECTURES["OLMoE-1B-7B"])

    def plain(module):
        return {
            (name, key): value
            for name, part in module.named_modules()
            for key, value in vars(part).items()
            if isinstance(value, int | float | str | bool | tuple)
        }

    assert plain(model.layers[0]) == plain(model.layers[7])
