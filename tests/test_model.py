"""The model against transformers, against its own other paths, and against a naive loop."""

import dataclasses
import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from chunks import prompt
from conftest import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from formats.quantizer import pack_modules, plan_format
from generate import load_model
from model import Chunk, Context, Experts, KVCache, swiglu
from models import ARCHITECTURES, args_from_hf, build_model
from models.gpt_oss import BiasedExpertLinear, clamped_swiglu
from models.layers.sinks import SinkAttention
from ops.plain.attention import BLOCK, Mask, attend, attend_blocks, attend_chunk, blocks_in_use
from ops.plain.topk import top_k
from runtime.sampling import Sampling
from runtime.session import Session
from runtime.weights import bytes_per_token


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def all_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    """Run tokens [B, Q] from position 0 in one pass -> logits [B, Q, V]."""
    model.setup_cache(tokens.shape[0], 64)
    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), all_positions=True)


@pytest.mark.parametrize("layout", ("current", "hub"))
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_match_transformers(name, layout, make_family):
    family = make_family(name, layout)
    want = family.peer(prompt()).logits
    assert relative(all_logits(load_model(family.directory, "cpu"), prompt()), want) < 1e-4


@pytest.mark.parametrize("layout", ("current", "hub"))
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_match_transformers(name, layout, make_family):
    family = make_family(name, layout)
    want = family.peer.generate(
        prompt(),
        attention_mask=torch.ones_like(prompt()),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    session = Session(load_model(family.directory, "cpu"), 128)
    got = list(session.stream(prompt()[0].tolist(), 24, Sampling(temperature=0)))
    assert got == want[0, 40:].tolist() and len(got) == 24


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
    parts = [
        model(tokens[:, start:end], torch.arange(start, end).unsqueeze(0), all_positions=True)
        for start, end in ((0, 23), (23, 40))
    ]
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
    # The other rows of the cache are untouched.
    buffers = [buffer for state in model.states for buffer in state.buffers()]
    rows = [t if len(t) == 3 else t.transpose(0, 1) for t in buffers]  # a KV cache has keys first
    assert not any(t[::2].any() for t in rows)


def attention_case(B: int, Q: int, S: int, K: int, G: int, window: int | None):
    """Return random queries, keys, values, the queries' positions [B, Q], the bias [B, Q, S]."""
    generator = torch.Generator().manual_seed(B + 3 * Q + 5 * S)
    q = torch.randn(B, Q, K * G, 16, generator=generator)
    k, v = torch.randn(2, B, K, S, 16, generator=generator)
    first = torch.randint(S - Q + 1, (B, 1), generator=generator)
    positions = first + torch.arange(Q)
    distance = positions.unsqueeze(-1) - torch.arange(S)
    visible = (distance >= 0) & (distance < (window or S))
    return q, k, v, positions, torch.where(visible, 0.0, float("-inf"))


@given(
    Q=st.integers(1, 40),
    earlier=st.integers(0, 40),
    K=st.integers(1, 3),
    G=st.integers(1, 3),
    window=st.none() | st.integers(1, 90),
)
@settings(max_examples=40, deadline=None)
def test_attend_chunk_equals_attend_with_a_mask(Q, earlier, K, G, window):
    S = Q + earlier
    q, k, v, *_ = attention_case(1, Q, S, K, G, window)
    distance = torch.arange(earlier, S).unsqueeze(1) - torch.arange(S)
    bias = torch.where((distance >= 0) & (distance < (window or S)), 0.0, float("-inf"))
    got = attend_chunk(q[0], k[0], v[0], window, None)
    torch.testing.assert_close(got, attend(q, k, v, bias[None])[0])


@pytest.fixture(scope="module")
def plain_flex_attention():
    """Let flex_attention compute what it is given, for which it calls Dynamo: 0.7 s a call."""
    with mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
        yield


@pytest.mark.usefixtures("plain_flex_attention")
@given(
    B=st.integers(1, 3),
    Q=st.integers(1, 5),
    blocks=st.integers(1, 5),
    window=st.none() | st.integers(1, 700),
)
@settings(max_examples=6, deadline=None)
def test_blocks_in_use_are_those_with_visible_positions(B, Q, blocks, window):
    S = blocks * BLOCK
    q, k, v, positions, bias = attention_case(B, Q, S, 2, 2, window)
    count, order = blocks_in_use(positions, S, window)
    for row in range(B):
        read = order[row, 0, 0, : count[row, 0, 0]]
        inside = torch.zeros(S // BLOCK, dtype=torch.bool).index_fill(0, read.long(), True)
        seen = (bias[row] == 0).any(0).view(-1, BLOCK).any(1)
        assert len(read) == inside.sum() == seen.sum() and torch.equal(inside, seen)
    got = attend_blocks(q, k, v, positions, (count, order), window)
    torch.testing.assert_close(got, attend(q, k, v, bias), rtol=1e-4, atol=1e-5)


def naive_attention_with_sinks(q, k, v, bias, sinks) -> torch.Tensor:
    """Softmax over positions and the head's sink, whose value is zero, in fp64."""
    groups = q.shape[2] // k.shape[1]
    k, v = (t.double().repeat_interleave(groups, 1) for t in (k, v))  # [B, H, S, C]
    scores = q.double().transpose(1, 2) @ k.mT * q.shape[-1] ** -0.5 + bias.double().unsqueeze(1)
    scores = torch.cat(
        (scores, sinks.double().view(-1, 1, 1).expand(*scores.shape[:-1], 1)), dim=-1
    )
    return (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2)


def sink_attention(heads: int, kv_heads: int, window: int | None, sinks: torch.Tensor):
    """Return gpt-oss's attention layer with these sinks, heads of 16 and a one-block cache."""
    args = dataclasses.replace(
        ARCHITECTURES["gpt-oss-20b"],
        dim=16,
        n_head=heads,
        n_kv_head=kv_heads,
        head_dim=16,
        sliding_window=window,
        full_layers=(),
    )
    layer = SinkAttention(args)
    layer.window = window
    layer.sinks.copy_(sinks)
    layer.allocate(1, BLOCK, KVCache, sinks)
    return layer


@pytest.mark.usefixtures("plain_flex_attention")
@given(
    B=st.integers(1, 3),
    Q=st.integers(1, 5),
    blocks=st.integers(1, 3),
    K=st.integers(1, 3),
    G=st.integers(1, 3),
    window=st.none() | st.integers(1, 300),
    size=st.sampled_from((0.1, 3.0, 30.0)),
)
@settings(max_examples=6, deadline=None)
def test_every_attention_path_applies_sinks(B, Q, blocks, K, G, window, size):
    S = blocks * BLOCK
    q, k, v, positions, bias = attention_case(B, Q, S, K, G, window)
    sinks = torch.randn(K * G, generator=torch.Generator().manual_seed(S)) * size
    want = naive_attention_with_sinks(q, k, v, bias, sinks).float()
    torch.testing.assert_close(attend(q, k, v, bias, sinks), want, rtol=1e-4, atol=1e-5)
    layer = sink_attention(K * G, K, window, sinks)
    masks = {window: Mask(bias, blocks_in_use(positions, S, window))}
    got = layer.attend(q, k, v, Context(None, positions=positions, masks=masks))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for row in range(B):
        end = int(positions[row, -1]) + 1
        got = attend_chunk(q[row], k[row, :, :end], v[row, :, :end], window, sinks)
        torch.testing.assert_close(got, want[row], rtol=1e-4, atol=1e-5)
    # A sink with a very low score has no effect.
    assert (attend(q, k, v, bias, sinks - 1e4) - attend(q, k, v, bias)).abs().max() < 1e-5


@pytest.mark.parametrize("window", (100, 600))
def test_a_prompt_with_sinks_stores_no_scores(window):
    Q, S, H, K, C = 128, 640, 16, 2, 16
    q, k, v = torch.randn(Q, H, C), torch.randn(K, S, C), torch.randn(K, S, C)
    with LargestTensor(q, k, v) as largest:
        attend_chunk(q, k, v, window, torch.randn(H))
    mask = Q * (S + 1)  # shared by all heads
    assert largest.elements <= max(Q * H * (C + 8), K * (S + 1) * (C + 8), mask)
    with LargestTensor(q, k, v) as naive:
        q.transpose(0, 1) @ k.repeat_interleave(H // K, 0).mT
    assert naive.elements == H * Q * S


@pytest.mark.parametrize(
    "rope",
    (
        dict(factor=32.0, original=4096, truncate=False, rope_theta=1.5e5),
        dict(factor=40.0, original=4096, mscale=1.0, mscale_all_dim=0.7),
        dict(factor=8.0, original=64, beta_fast=4.0, beta_slow=0.5),
        dict(factor=4.0, original=32768, attention_factor=0.9, rope_theta=1e6),
        dict(factor=2.0, original=7),  # no pair makes enough rotations
    ),
)
def test_yarn_matches_transformers(rope):
    rope = {"rope_type": "yarn", "rope_theta": 1e4} | rope
    rope["original_max_position_embeddings"] = rope.pop("original")
    config = GptOssConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=dict(rope))
    frequencies, attention = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    args = args_from_hf(config.to_dict())
    got = build_model(args).make_rope_table(4096, torch.device("cpu"))
    angles = torch.outer(torch.arange(4096).float(), frequencies)
    want = torch.cat((angles.cos(), angles.cos(), -angles.sin(), angles.sin()), dim=-1) * attention
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)  # angles up to 4096, in fp32
    assert args.yarn.attention == pytest.approx(attention)
    assert (got[1] - want[1]).abs().max() < 1e-6


def test_sequences_of_a_batch_keep_their_own_positions(family):
    """Two prompts of different lengths, padded at the end, then a step each at its own position."""
    model, tokens, lengths = load_model(family.directory, "cpu"), prompt(20, batch=2), (20, 13)
    model.setup_cache(2, 64)
    positions = torch.arange(20).expand(2, 20)
    first = model(tokens, positions, last=torch.tensor([n - 1 for n in lengths]))
    chosen = first.argmax(-1, keepdim=True)
    second = model(chosen, torch.tensor([[n] for n in lengths]))
    for row, length in enumerate(lengths):
        sequence = torch.cat((tokens[row : row + 1, :length], chosen[row : row + 1]), dim=1)
        alone = all_logits(model, sequence)
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
        monkeypatch.setattr(Experts, "gather_max_tokens", limit)
        results.append(all_logits(load_model(family.directory, "cpu"), tokens))
    assert relative(*results) < 1e-5


def test_routing_matches_transformers(family):
    tokens = prompt()
    model = load_model(family.directory, "cpu")
    model.setup_cache(1, 64)
    _, indices, weights = model(tokens, torch.arange(40).unsqueeze(0), return_routing=True)
    sparse = [block for block in model.layers if hasattr(block.ffn, "experts")]
    assert indices.shape == weights.shape == (len(sparse), 40, model.args.n_active)
    peer, hooks = [], []
    for module in family.peer.modules():
        if type(module).__name__.endswith("Router"):
            hooks.append(module.register_forward_hook(lambda *call: peer.append(call[-1][1:])))
    family.peer(tokens)
    for hook in hooks:
        hook.remove()
    assert len(peer) == len(sparse)
    scale = getattr(family.peer.config, "moe_routed_scaling_factor", 1.0)  # of the experts' sum
    for ours, our_weights, (their_weights, theirs) in zip(indices, weights, peer, strict=True):
        order, their_order = ours.argsort(), theirs.argsort()
        assert torch.equal(ours.gather(1, order), theirs.gather(1, their_order))
        their_weights = their_weights.gather(1, their_order) * scale
        torch.testing.assert_close(our_weights.gather(1, order), their_weights)
    if model.args.norm_topk and family.name != "gemma4":  # whose experts have factors
        scale = getattr(model.args, "routed_scale", 1.0)
        torch.testing.assert_close(weights.sum(-1), torch.full((len(sparse), 40), scale))


def naive_experts(
    experts: Experts, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute each token's experts one by one, in fp64."""
    w13, w2 = experts.w13.weight.double(), experts.w2.weight.double()
    b13, b2 = (
        getattr(linear, "bias", torch.zeros(linear.weight.shape[:2])).double()
        for linear in (experts.w13, experts.w2)
    )
    limit = torch.tensor(1.5)
    rows = []
    for token, chosen, scale in zip(x.double(), indices, weights.double(), strict=True):
        y = torch.zeros_like(token)
        for expert, weight in zip(chosen.tolist(), scale, strict=True):
            gate, up = (w13[expert] @ token + b13[expert]).chunk(2)
            hidden = F.silu(gate) * up
            if experts.activation is not swiglu:
                gate = torch.minimum(gate, limit)
                clamped = torch.minimum(up.abs(), limit) * up.sign()
                hidden = gate / (1 + (-1.7 * gate).exp()) * (1 + clamped)
            y += weight * (w2[expert] @ hidden + b2[expert])
        rows.append(y)
    return torch.stack(rows)


def random_experts(args, biased: bool, limit: float | None, generator) -> Experts:
    """Return experts with random weights; biases and clamping are gpt-oss's."""
    experts = Experts(args)
    if biased:
        experts.w13 = BiasedExpertLinear(args.n_expert, args.dim, 2 * args.intermediate)
        experts.w2 = BiasedExpertLinear(args.n_expert, args.intermediate, args.dim)
    if limit:
        experts.activation = partial(clamped_swiglu, limit=limit, alpha=1.7)
    for parameter in experts.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return experts


@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(1, 40),
    E=st.integers(1, 12),
    D=st.integers(1, 6),
    I=st.integers(1, 6),
    data=st.data(),
    seed=st.integers(0, 2**20),
    biased=st.booleans(),
    limit=st.sampled_from((None, 1.5)),
)
def test_experts_equal_a_naive_loop(T, E, D, I, data, seed, biased, limit):
    """D and I are in units of 8: a grouped GEMM needs rows of whole 16 bytes."""
    A = data.draw(st.integers(1, E))
    args = dataclasses.replace(
        ARCHITECTURES["Mixtral-8x7B"],
        dim=8 * D,
        intermediate=8 * I,
        n_expert=E,
        n_active=A,
        n_layer=1,
    )
    generator = torch.Generator().manual_seed(seed)
    experts = random_experts(args, biased, limit, generator)
    x = torch.randn(T, 8 * D, generator=generator)
    # The order is skewed: some experts get every token and some get none.
    skew = torch.randn(E, generator=generator) * data.draw(st.sampled_from((0.0, 5.0)))
    indices = (torch.randn(T, E, generator=generator) + skew).topk(A).indices
    weights = torch.rand(T, A, generator=generator)
    want = naive_experts(experts, x, indices, weights)
    for limit in (0, T):  # grouped, gathered
        experts.gather_max_tokens = limit
        got = experts(x, indices, weights)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@given(data=st.data(), E=st.integers(1, 130), T=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_top_k_is_topk(data, E, T):
    k = data.draw(st.integers(1, min(E, 10)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    scores = torch.randn(T, E, generator=generator)
    scores *= data.draw(st.sampled_from((1e-30, 1.0, 1e30)))
    want = scores.topk(k)
    for compiled in (False, True):  # a sort, then what a GPU runs
        with mock.patch("torch.compiler.is_compiling", return_value=compiled):
            values, indices = top_k(scores, k)
        assert torch.equal(torch.cat(values, dim=-1), want.values)
        assert torch.equal(indices, want.indices) and indices.is_contiguous()


@pytest.mark.parametrize("compiled", (False, True))
def test_top_k_breaks_ties_by_the_lowest_index(compiled, monkeypatch):
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: compiled)
    for score in (0.2, 0.0, -3.0):
        assert top_k(torch.full((1, 5), score), 3)[1].tolist() == [[0, 1, 2]]


class LargestTensor(TorchDispatchMode):
    """Record the most elements of any operation's result, ignoring views of `known` tensors."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.elements = 0

    def is_view(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.known

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and not self.is_view(tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_a_long_prompt_never_gathers_weights():
    """Mixtral's real shapes, 4096 tokens: no tensor is larger than w13's output [T * A, 2 I]."""
    args, tokens = ARCHITECTURES["Mixtral-8x7B"], 4096
    with torch.device("meta"):
        experts = Experts(args)
        x = torch.empty(tokens, args.dim)
        indices = torch.empty(tokens, args.n_active, dtype=torch.int64)
        weights = torch.empty(tokens, args.n_active)
    with LargestTensor(*experts.parameters()) as grouped:
        experts(x, indices, weights)
    assert grouped.elements == tokens * args.n_active * 2 * args.intermediate
    with LargestTensor(*experts.parameters()) as gathered:  # the mode does see a gather
        experts.per_expert(x[:8], indices[:8])
    assert gathered.elements == 8 * args.n_active * 2 * args.intermediate * args.dim


@pytest.mark.parametrize(
    ("arch", "gigabytes"),
    (
        ("Mixtral-8x7B", 25.5),
        ("Qwen3-30B-A3B", 6.08),
        ("gpt-oss-20b", 7.217),
        ("gpt-oss-120b", 10.266),
    ),
    ids=lambda value: str(value),
)
def test_bytes_per_token(arch, gigabytes):
    model = build_model(ARCHITECTURES[arch]).to(torch.bfloat16)
    assert bytes_per_token(model) / 1e9 == pytest.approx(gigabytes, rel=2e-3)


@pytest.mark.parametrize(
    ("arch", "billions", "gibibytes"),
    (("gpt-oss-20b", 20.91, 12.8), ("gpt-oss-120b", 116.83, 60.8)),
)
def test_gpt_oss_has_the_size_on_its_model_card(arch, billions, gibibytes):
    model = build_model(ARCHITECTURES[arch]).to(torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)
    pack_modules(model, plan_format(model, "bf16", "mxfp4"))
    assert sum(p.nbytes for p in model.parameters()) / 2**30 == pytest.approx(gibibytes, abs=0.05)


@pytest.mark.parametrize(
    ("arch", "billions", "active"),
    (("DeepSeek-V2-Lite", 15.7, 2.4), ("DeepSeek-V3", 671.0, 36.6)),
)
def test_deepseek_has_the_size_in_its_paper(arch, billions, active):
    """15.7B and 671B parameters, 2.4B and 37B per token (one row of the embedding)."""
    model = build_model(ARCHITECTURES[arch]).to(torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.05)
    assert bytes_per_token(model) / 2e9 == pytest.approx(active, abs=0.06)


def test_tied_embeddings_are_read_once(make_family):
    model = load_model(make_family("qwen3_moe").directory, "cpu")
    assert model.head.weight is model.embedding.weight
    args = model.args
    experts = sum(p.nbytes for name, p in model.named_parameters() if "experts" in name)
    everything = sum(p.nbytes for p in model.parameters())
    row = args.dim * 4
    idle = experts * (args.n_expert - args.n_active) // args.n_expert
    assert bytes_per_token(model) == everything - idle + row


def test_equal_layers_have_equal_attributes():
    """One compiled block serves all layers: no Python attribute may depend on the layer."""
    model = build_model(ARCHITECTURES["OLMoE-1B-7B"])

    def plain(module):
        return {
            (name, key): value
            for name, part in module.named_modules()
            for key, value in vars(part).items()
            if isinstance(value, int | float | str | bool | tuple)
        }

    assert plain(model.layers[0]) == plain(model.layers[7])
