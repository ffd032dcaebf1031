"""Which models runtime/fused_layer.py runs, and how shared experts are stacked on the others."""

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import FAMILIES, NOT_FUSED

import model
import tp
from formats import FORMATS
from formats.kv_cache import KV_CACHES
from model import ExpertLinear, Linear, MoE
from models import ARCHITECTURES
from models.layers.gated_attention import GatedAttention
from models.layers.shared_expert import SharedExpertMoE
from models.random_weights import RandomWeights, first_layers, number_format
from ops.declared import Activation, AttentionAdditions, ExpertAdditions, SumAdditions
from ops.gpu import KNOWN, OTHER_MAKER, found
from ops.products import dense, tilings
from ops.products.expert_tiles import choose_few
from ops.products.few_tokens import DenseSettings, FewTiles, choose_few_tiles, settings_of
from ops.products.weights import BITS, Weight, has_kernels, packed_weight, plain_weight
from runtime.fused_attention import FusedDecodeAttention, fuse_decode_attention, fused_attention
from runtime.fused_decode import PROMPT_CHUNKS, FusedRunner
from runtime.fused_head import fused_head
from runtime.fused_layer import FusedExperts, FusedLayer, NoExperts, fused_layers, stack
from runtime.kernel_choice import choose_runner, count_fused, describe_kernels, why_not_fused
from runtime.layer_kinds import kinds_of
from runtime.loading import check_decode_kernels, load_model
from runtime.plain_forms import changed_forms, digest_of
from runtime.runner import CompiledRunner

HOPPER = torch.device("cuda", 0)  # once `found` says so
REFUSED = {
    "Phi-3.5-MoE": "no kernels for .*, or its norm",  # LayerNorm
    "DeepSeek-V3": "no kernels for SigmoidRoutedMoE",  # groups of experts
}


def on_meta(name: str, mode: str):
    """Return the first layers of a published model, in bf16 beside the packed weights.

    Of six one has full attention where the others have not.
    """
    args = first_layers(ARCHITECTURES[name], 6)
    return tp.ModelShard(args, number_format(mode, args)).model.to(torch.bfloat16)


def describe_attention(layer: FusedLayer) -> tuple[type, list[int]]:
    """Return the kind of a layer's attention, and the widths of its projections."""
    attention = layer.attention
    return type(attention.attention), [weight.out for weight, _ in attention.inputs]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_published_models_have_kernels_in_every_format(name):
    modes = "bf16", "int8", "fp8", "fp8b", "int4", "uint4", "mxfp4", "nvfp4", "hqq4"
    for mode in (*modes, "hqq3", "hqq2"):
        model = on_meta(name, mode)
        sparse = [block for block in model.layers if isinstance(block.ffn, MoE)]
        if name in REFUSED:
            assert not set(sparse) & fused_layers(model).keys()
            with pytest.raises(ValueError, match=REFUSED[name]):
                FusedLayer(sparse[0])
        else:
            assert sparse and len(fused_layers(model)) == len(model.layers)
            before = [describe_attention(layer) for layer in fused_layers(model).values()]
            fuse_decode_attention(model)  # as `load_model` does for 4-bit weights
            after = [describe_attention(layer) for layer in fused_layers(model).values()]
            assert before == after


def as_on_hopper(monkeypatch) -> None:
    """Let a model on the meta device be chosen for as if it were on HOPPER."""
    choose = "runtime.kernel_choice.why_not_fused"
    monkeypatch.setattr(choose, lambda model, _: why_not_fused(model, HOPPER))


@pytest.mark.parametrize(
    ("name", "mode", "kinds"),
    (
        ("Qwen3-30B-A3B", "int4", [0, 0, 0, 0, 0, 0]),
        ("Qwen3-30B-A3B", "bf16-int8", [0, 0, 0, 0, 0, 0]),
        ("gpt-oss-20b", "mxfp4", [0, 1, 0, 1, 0, 1]),  # a window
        ("Qwen3.6-35B-A3B", "int4", [0, 0, 0, 1, 0, 0]),  # recurrent
        ("GLM-4.7-Flash", "int4", [0, 1, 1, 1, 1, 1]),  # dense
    ),
)
@pytest.mark.parametrize("length", (64, 4096))
def test_layers_of_a_kind_are_found(name, mode, kinds, length):
    model = on_meta(name, mode)
    model.setup_cache(1, length)
    assert kinds_of(fused_layers(model).values()) == kinds


@pytest.mark.parametrize("takes", (True, False))
def test_a_warm_up_launches_one_layer_of_each_kind(takes, monkeypatch):
    """Attention that the compiler makes runs in all of them: it may be compiled for each."""
    model, launched = on_meta("gpt-oss-20b", "mxfp4"), []
    fuse_decode_attention(model)
    model.setup_cache(1, 64)
    runner, x = FusedRunner(model), torch.empty(1, 1, model.args.dim, device="meta")
    runner.is_fused = True

    def forward(layer: FusedLayer, x: torch.Tensor, *_) -> tuple:
        launched.append(layer)
        return x, len(launched), len(launched)

    monkeypatch.setattr(FusedLayer, "forward", forward)
    monkeypatch.setattr(FusedRunner, "runs_layer", lambda *_: True)
    monkeypatch.setattr(FusedDecodeAttention, "takes", lambda *_: takes)

    def run() -> list:
        launched.clear()
        return [runner.block(block, x, x, None, model.norm)[2] for block in model.layers]

    for _ in range(2):
        with runner.warming_up():
            assert run() == ([1, 2, 1, 2, 1, 2] if takes else [1, 2, 3, 4, 5, 6])
        assert run() == [1, 2, 3, 4, 5, 6]


def test_what_differs_in_one_setting_is_of_another_kind():
    def layer(**values) -> SimpleNamespace:
        weight = torch.empty(8, 16, device="meta")
        fields = {"weight": weight, "eps": 1e-5, "sizes": (1, 2), "inner": SimpleNamespace(n=1)}
        return SimpleNamespace(**fields | values)

    lock = threading.Lock()  # an object that the comparison does not know
    others = (
        {"weight": torch.empty(8, 17, device="meta")},
        {"weight": torch.empty(16, 8, device="meta").T},
        {"weight": torch.empty(8, 16, device="meta", dtype=torch.bfloat16)},
        {"eps": 1e-6},
        {"eps": None},
        {"sizes": (1, 3)},
        {"sizes": [1, 2]},
        {"inner": SimpleNamespace(n=True)},
        {"more": 1},
        {"more": threading.Lock()},
        {"more": threading.Lock()},
        {"more": partial(layer, eps=1)},
        {"more": partial(layer, eps=2)},
    )
    layers = [layer(), layer(), layer(more=lock), layer(more=lock)]
    layers += [layer(**values) for values in others]
    itself = layer()
    itself.owner = itself
    layers.append(itself)
    assert kinds_of(layers) == [0, 0, 1, 1, *range(2, len(others) + 3)]


def test_kernels_are_described(monkeypatch):
    """The line at the start of a compiled session."""

    def describe(name, mode, gpu, **dtype):
        model = on_meta(name, mode, **dtype)
        monkeypatch.setitem(found, 0, gpu)
        as_on_hopper(monkeypatch)
        runner = FusedRunner if why_not_fused(model, HOPPER) is None else CompiledRunner
        return describe_kernels(model, runner)

    hopper, old = KNOWN["sm_90"], KNOWN["sm_75"]
    for gpu in KNOWN.values():  # Turing has no PTX for bf16, which the kernels contain
        has_kernels = gpu.capability >= (8, 0)
        assert describe("GLM-4.5-Air", "int4", gpu).startswith("fused") == has_kernels
    assert describe("GLM-4.5-Air", "bf16", hopper) == "fused (6 of 6 layers)"  # the first is dense
    assert describe("Qwen3-30B-A3B", "int4", old) == "Inductor (compute capability 7.5)"
    assert describe("Qwen3-30B-A3B", "int4", OTHER_MAKER) == "Inductor (not an NVIDIA GPU)"
    assert describe("Mixtral-8x7B", "hqq4-hqq2", hopper) == "fused (6 of 6 layers)"
    lfm2 = on_meta("LFM2-24B-A2B", "int4")
    assert choose_runner(lfm2, "auto") is FusedRunner
    lfm2.kernels_ran = False  # as a family's class says until a GPU has run its kernels
    assert choose_runner(lfm2, "auto") is CompiledRunner
    assert describe_kernels(lfm2, FusedRunner) == "fused (6 of 6 layers)"
    assert describe_kernels(lfm2, CompiledRunner) == "Inductor (no GPU has run its kernels)"
    for name in ("Trinity-Mini-26B-A3B", "gemma-4-26B-A4B"):
        on_ranks = shard_on_meta(name, "int4", "tensor")
        assert choose_runner(on_meta(name, "int4"), "auto") is FusedRunner
        # No GPUs have run the norms of Gemma 4's two branches.
        ran = CompiledRunner if name.startswith("gemma") else FusedRunner
        assert choose_runner(on_ranks, "auto") is ran
    assert describe_kernels(on_ranks, CompiledRunner) == "Inductor (no GPU has run its kernels)"
    assert count_fused(lfm2) == 0 and count_fused(on_meta("GLM-4.5-Air", "int4")) == 6
    assert count_fused(on_meta("DeepSeek-V3", "bf16")) == 0  # its dense layers alone have some
    streams = "Inductor: attention of 1, what is between sublayers"
    assert describe("Qwen3.8-Flash-Next", "int4", hopper) == f"fused (6 of 6 layers; {streams})"
    phi = describe("Phi-3.5-MoE", "bf16", hopper)
    assert phi == "Inductor (layer 0: no kernels for Attention, or its norm)"


@pytest.mark.parametrize("name", FAMILIES)
def test_small_models_have_kernels_but_for_those_known(name, make_family, monkeypatch):
    """The tests on a GPU choose by this which families they run."""
    monkeypatch.setitem(found, 0, KNOWN["sm_90"])
    small = load_model(make_family(name).directory, "cpu", torch.bfloat16)
    why = why_not_fused(small, HOPPER)
    assert why is None if name not in NOT_FUSED else NOT_FUSED[name] in why


def test_other_groups_and_devices_have_none():
    for kind, group in (("hqq2", 32), ("hqq3", 32), ("int4", 16), ("none", 64), (None, 64)):
        assert not has_kernels(kind, group)
        with pytest.raises(ValueError, match=f"no kernel for {kind} with groups of {group}"):
            packed_weight([torch.empty(8, 8)], kind, group)
    assert why_not_fused(on_meta("Qwen3-30B-A3B", "bf16"), torch.device("cpu")) == "no GPU"


AUTO = {
    ("Qwen3-30B-A3B", "int4"): FusedRunner,
    ("gpt-oss-20b", "mxfp4"): FusedRunner,
    ("Mixtral-8x7B", "bf16"): FusedRunner,
    ("Qwen3-30B-A3B", "hqq3"): FusedRunner,
    ("Mixtral-8x7B", "hqq4-hqq2"): FusedRunner,
    ("Phi-3.5-MoE", "bf16"): CompiledRunner,  # none for the model
}


@pytest.mark.parametrize(("name", "mode"), AUTO)
def test_auto_takes_the_kernels_that_there_are(name, mode, monkeypatch):
    model = on_meta(name, mode)
    assert choose_runner(model, "auto") is CompiledRunner  # not on a GPU
    monkeypatch.setitem(found, 0, KNOWN["sm_90"])
    as_on_hopper(monkeypatch)
    assert choose_runner(model, "auto") is AUTO[name, mode]
    assert choose_runner(model, "fused") is FusedRunner
    assert choose_runner(model, "inductor") is CompiledRunner


@pytest.mark.parametrize(
    ("name", "mode"),
    (("Qwen3-30B-A3B", "int4"), ("gpt-oss-20b", "mxfp4"), ("Mixtral-8x7B", "bf16")),
)
def test_a_prompts_chunk_takes_the_kernels(name, mode):
    layers = fused_layers(on_meta(name, mode)).values()
    for layer in layers:
        taken = [tokens for tokens in range(1, 100) if layer.experts.takes_tokens(tokens)]
        assert taken == list(range(1, PROMPT_CHUNKS[-1] + 1))
    assert layers


def shard_on_meta(name: str, mode: str, parallel: str, ranks: int = 2):
    """Return the first layers of one rank's shard, with its collectives."""
    args = first_layers(ARCHITECTURES[name], 6)
    shard = tp.ModelShard(args, number_format(mode, args), parallel, 0, ranks)
    shard.model.to(torch.bfloat16)
    shard.insert_collectives()
    return shard.model


TWO_RANKS = [
    name for name, args in ARCHITECTURES.items() if not tp.shard_problem(args, {}, 2, "tensor")
]


# Inductor's kernels mix streams: scores would differ between ranks, which could choose differently.
ONE_RANK = {"Qwen3.8-Flash-Next": "no kernels for another router"}


@pytest.mark.parametrize("name", TWO_RANKS)
@pytest.mark.parametrize("mode", ("bf16", "int4", "fp8b"))
def test_shards_have_the_kernels_of_the_whole_model(name, mode):
    """Also where a rank's rows are no whole groups of the checkpoint."""
    model, shard = on_meta(name, mode), shard_on_meta(name, mode, "tensor")
    layers, whole = fused_layers(shard), fused_layers(model)
    if name in ONE_RANK:
        with pytest.raises(ValueError, match=ONE_RANK[name]):
            FusedLayer(shard.layers[0])
        return
    assert len(layers) == len(whole)
    assert not any(layer.experts.takes_tokens(2) for layer in layers.values())
    whole_experts = fused_layers(shard_on_meta(name, "bf16", "expert")).values()
    assert all(isinstance(layer.experts, NoExperts) for layer in whole_experts)


def test_fused_kernels_of_ranks_are_refused_for_whole_experts_alone(monkeypatch):
    args = first_layers(ARCHITECTURES["Qwen3-30B-A3B"], 2)
    source = RandomWeights(args, number_format("int4", args))
    monkeypatch.setitem(found, 0, KNOWN["sm_90"])
    monkeypatch.setattr(tp.process_group, "size", lambda: 2)
    check_decode_kernels("fused", source, HOPPER, parallel="tensor")
    with pytest.raises(ValueError, match="--decode_kernels fused: these kernels do not compute"):
        check_decode_kernels("fused", source, HOPPER, parallel="expert")


@pytest.mark.parametrize(
    ("name", "cache", "queries", "length", "bounds"),
    (
        ("Qwen3-30B-A3B", "plain", 1, 32768, [256, None]),
        ("Qwen3-30B-A3B", "plain", 1, 256, [None]),
        ("Qwen3-30B-A3B", "plain", 4, 32768, [256, None]),
        ("Qwen3-30B-A3B", "int8", 1, 32768, [None]),
        ("Qwen3-30B-A3B", "int8", 4, 32768, [256, None]),
        ("gpt-oss-20b", "plain", 1, 4096, [256, None]),  # layers with a window have one part
        ("Qwen3.6-35B-A3B", "plain", 1, 4096, [128, None]),
        ("DeepSeek-V2-Lite", "plain", 1, 32768, [None]),  # latent attention
    ),
)
def test_steps_of_a_long_cache_have_a_bound_of_one_part(name, cache, queries, length, bounds):
    model = on_meta(name, "bf16")
    model.setup_cache(1, length, KV_CACHES[cache])
    assert FusedRunner(model).reaches(queries, length) == bounds


def test_norms_over_heads_of_other_ranks_have_none():
    attention = on_meta("OLMoE-1B-7B", "bf16").layers[0].attention
    assert FusedDecodeAttention(attention, AttentionAdditions()).supported
    attention.q_norm = tp.ShardedRMSNorm(attention.q_norm, 2)
    assert not FusedDecodeAttention(attention, AttentionAdditions()).supported


def test_a_subclass_that_says_nothing_has_none():
    """Also if it inherits what another class says, and changes what that computes."""

    class SmallerWeights(SharedExpertMoE):
        def route(self, scores):
            indices, weights = super().route(scores)
            return indices, weights / 2

    class OnlyMade(SharedExpertMoE):
        def __init__(self, args):
            super().__init__(args)

    (block, *_) = on_meta("Qwen3-30B-A3B", "bf16").layers
    args = SimpleNamespace(**vars(ARCHITECTURES["Qwen3-30B-A3B"]), shared_intermediate=0)
    for kind, is_fused in ((OnlyMade, True), (SmallerWeights, False)):
        with torch.device("meta"):
            block.ffn = kind(args).to(torch.bfloat16)
        if is_fused:
            FusedLayer(block)
        else:
            with pytest.raises(ValueError, match="no kernels for SmallerWeights"):
                FusedLayer(block)


def test_sums_of_normed_results_that_one_kernel_cannot_compute_are_refused():
    (block, *_) = on_meta("Kolibri-1-78B-A3.5B", "bf16").layers
    FusedLayer(block)
    block.ffn_norm.eps = 2 * block.add_attention.norm.eps
    with pytest.raises(ValueError, match="no kernels for norms of two epsilons"):
        FusedLayer(block)
    first, second = on_meta("gemma-4-26B-A4B", "bf16").layers[:2]
    FusedLayer(first)
    first.add_ffn = second.add_attention  # a sum without branches
    with pytest.raises(ValueError, match="no kernels for other branches"):
        FusedLayer(first)


def test_only_attention_without_a_core_of_its_own_has_the_kernel():
    """`projections` beside declared additions are other names of products, alone another core."""
    layers = [
        block.attention
        for arch in ("Mixtral-8x7B", "gemma-4-26B-A4B", "Qwen3.8-Flash-Next", "gpt-oss-20b")
        for block in on_meta(arch, "bf16").layers
    ]
    fused = {type(layer).__name__ for layer in layers if fused_attention(layer) is not layer}
    assert fused == {"Attention", "WindowAttention", "GlobalAttention", "SinkAttention"}
    assert {type(layer).__name__ for layer in layers} - fused == {"IndexedAttention", "DeltaNet"}


def test_a_misspelt_addition_fails():
    """A declaration of an unknown field or activation, or of another class's additions."""
    with pytest.raises(TypeError, match="query_scal"):
        AttentionAdditions(query_scal=2.0)
    with pytest.raises(ValueError, match="no kernel for the activation 'gelu': known are silu"):
        ExpertAdditions(activation=Activation("gelu"))
    (block, *_) = on_meta("Granite-3.1-3b-a800m", "bf16").layers
    FusedLayer(block)
    block.add_ffn.fused_decode_settings = lambda: AttentionAdditions(query_scale=0.5)
    with pytest.raises(TypeError, match=r"return ops\.declared\.SumAdditions"):
        FusedLayer(block)
    block.add_ffn.fused_decode_settings = lambda: SumAdditions(0.5)
    assert FusedLayer(block).experts.sum.scale == 0.5


@pytest.mark.parametrize("count", (1, 3))
def test_a_shared_expert_is_stacked_on_the_others(count):
    """Their sum is the shared expert's result; the experts' weights stay where modules see them."""
    E, D, I = 4, 16, 8
    w13, w2 = ExpertLinear(E, D, 2 * I), ExpertLinear(E, I, D)
    shared13, shared2 = Linear(D, 2 * I * count), Linear(I * count, D)
    for module in (w13, w2, shared13, shared2):
        module.weight.data = torch.randn_like(module.weight).bfloat16()
    kept, shared = w13.weight.clone(), (shared13.weight.clone(), shared2.weight.clone())
    all13 = stack(w13, shared13, plain_weight(w13.weight), count, 2)
    all2 = stack(w2, shared2, plain_weight(w2.weight), count)
    numbers13, numbers2 = (w.parts[0].view(torch.bfloat16) for w in (all13, all2))
    assert numbers13.shape == (E + count, 2 * I, D) and numbers2.shape == (E + count, D, I)
    assert w13.weight.equal(kept) and numbers13[:E].equal(kept)
    assert w13.weight.data_ptr() == numbers13.data_ptr()
    assert (shared13.weight.data_ptr() == numbers13[E].data_ptr()) == (count == 1)
    assert shared13.weight.equal(shared[0]) and shared2.weight.equal(shared[1])
    x = torch.randn(D).double()
    gate, up = (shared[0].double() @ x).chunk(2)
    want = shared[1].double() @ (gate * up)
    halves = [(numbers13[E + n].double() @ x).chunk(2) for n in range(count)]
    parts = [numbers2[E + n].double() @ (a * b) for n, (a, b) in enumerate(halves)]
    torch.testing.assert_close(sum(parts), want)


MIXES = (
    ("Qwen3.6-35B-A3B", "q4_k", "q8_0"),
    ("Qwen3.6-35B-A3B", "iq4_xs", "iq4_nl"),  # one kind, of other parts
    ("GLM-4.5-Air", "fp8", "int8"),
    ("GLM-4.5-Air", "q8_0", "bf16"),
    ("DeepSeek-V2-Lite", "int4", "mxfp4"),
)


def sparse_layers(model) -> list[FusedExperts]:
    layers = [layer.experts for layer in fused_layers(model).values()]
    return [experts for experts in layers if isinstance(experts, FusedExperts)]


@pytest.mark.parametrize(("name", "mode", "shared"), MIXES)
def test_a_shared_expert_in_another_format_has_kernels(name, mode, shared):
    """One in the format of the others is stacked on them; of its gate the router has a row."""
    alike, mixed = on_meta(name, mode), on_meta(name, f"{mode}+{shared}")
    assert len(fused_layers(mixed)) == len(fused_layers(alike)) > 0
    for experts in sparse_layers(alike):
        assert experts.apart is None and experts.routing.shared > 0
    for experts in sparse_layers(mixed):
        w13, w2 = experts.apart
        assert w13.out // 2 == w2.width and (w13.width, w2.out) == (w2.out, w13.width)
        assert experts.routing.shared == 0 and experts.takes_tokens(2)
        experts.prepare()
        assert len(experts.rows) - len(experts.router.weight) == (experts.gate is not None)
        assert experts.w13.parts[0].shape[0] == len(experts.router.weight)


@pytest.mark.parametrize("rows", ("w13", "w2"))
def test_a_shared_expert_with_one_weight_in_another_format_is_not_stacked(rows):
    alike, mixed = (on_meta("Qwen3.6-35B-A3B", mode) for mode in ("q4_k", "q4_k+q6_k"))
    for block, other in zip(alike.layers, mixed.layers, strict=True):
        setattr(block.ffn.shared, rows, getattr(other.ffn.shared, rows))
        kinds = [weight.kind for weight in FusedLayer(block).experts.apart]
        assert kinds == (["q6_k", "q4_k"] if rows == "w13" else ["q4_k", "q6_k"])


def test_a_shared_expert_in_another_format_is_refused_on_several_ranks():
    FusedLayer(shard_on_meta("Qwen3.6-35B-A3B", "int4", "tensor").layers[0])
    block = shard_on_meta("Qwen3.6-35B-A3B", "int4+q8_0", "tensor").layers[0]
    with pytest.raises(ValueError, match="unlike the others, on several ranks"):
        FusedLayer(block)


def test_a_shared_expert_of_a_width_of_its_own_is_not_stacked():
    """No multiple of the others'."""
    args = first_layers(ARCHITECTURES["Qwen3.6-35B-A3B"], 2)
    args = replace(args, shared_intermediate=args.intermediate * 3 // 2)
    model = tp.ModelShard(args, number_format("int8", args)).model.to(torch.bfloat16)
    layers = fused_layers(model).values()
    assert len(layers) == 2 and all(layer.experts.apart for layer in layers)


@pytest.mark.parametrize("tokens", (9, 12, 16))
def test_9_to_16_tokens_read_a_dense_weight_once(tokens, monkeypatch):
    """16 tokens only in bf16, whose programs of wo are as many as multiprocessors."""
    monkeypatch.setenv("MOE_FAST_GPU", "sm_90")
    for out, programs in ((2048, 128), (2880, 131), (5120, 320)):
        plain = plain_weight(torch.empty(out, 64, dtype=torch.bfloat16))
        tiles = choose_few_tiles(plain, tokens)
        assert tiles.tokens >= tokens and -(-out // tiles.rows) == programs, (out, tiles)
        parts = FORMATS["int8"].pack(torch.zeros(out, 64), 64)
        packed = packed_weight(list(parts.values()), "int8", 64)
        assert (choose_few_tiles(packed, tokens).tokens >= tokens) == (tokens < 16), out


@pytest.mark.parametrize("kind", ("bf16", "int8", "int4", "mxfp4"))
@pytest.mark.parametrize("tokens", (4, 8, 16))
def test_weights_in_flight_fit_in_registers(tokens, kind, monkeypatch):
    """Of rows of any length: more would be stored in memory, and loaded again."""
    monkeypatch.setenv("MOE_FAST_GPU", "sm_90")
    for width in (*range(256, 9000, 608), 10240, 10944, 12288, 16384, 32768):
        codes = torch.empty(4096, width * BITS[kind] // 32, dtype=torch.int32)
        weight = Weight((codes,), kind, {"mxfp4": 32, "bf16": 8}.get(kind, 64))
        tiles = choose_few_tiles(weight, tokens)
        fixed = settings_of(weight, tiles, tiles.tokens)
        s = DenseSettings(**fixed, blocks=1, all_tokens=tiles.tokens, stride=0, scale=1.0)
        lane = s.rows // 8 * s.vec * s.depth
        assert lane <= (64 if s.warps == 16 else 192), (width, tiles)
        assert s.steps % s.depth == 0
        # Enough in flight for a multiprocessor: it has a program of few rows, and more of others.
        if width >= 4096 and tokens <= 8 and kind != "int8":
            assert lane * s.warps * 32 * 4 >= 32 << 10, (width, tiles)


def test_the_table_has_tiles_of_several_tokens(monkeypatch):
    """A number of tokens takes those of the next power of two, if they divide it."""
    monkeypatch.setenv("MOE_FAST_GPU", "sm_90")
    table = {
        "bf16 dense of 8": {"2880x64": [32, 2, 4, 8, 1]},
        "bf16 dense of 16": {"2880x64": [32, 2, 4, 8, 1]},
        "bf16 tiles 2 of 8": {"2880x64": [16, 1, 2, 32, 1, 1, 64]},
        "bf16 2": {"2880x64": [2, 64, 1, 2]},
        "bf16 2 of 8": {"2880x64": [4, 32, 1, 1, 0, 96]},
    }
    monkeypatch.setattr(tilings, "measured", lambda: {"sm_90": table})
    weight = plain_weight(torch.empty(2880, 64 * 8, dtype=torch.bfloat16))
    measured = FewTiles(32, 2, 4, 8, 1)
    found = {tokens: choose_few_tiles(weight, tokens) == measured for tokens in (4, 5, 8, 12, 16)}
    assert found == {4: False, 5: True, 8: True, 12: False, 16: True}
    assert choose_few(weight, True, 8, 8) == FewTiles(16, 1, 2, 32, 1, loop=True, registers=64)
    assert choose_few(weight, False, 8, 8) == choose_few(weight, False, 8, 4)
    several = [tilings.choose_tiles(weight, 64, 2, tokens) for tokens in (1, 4, 7)]
    assert [tiles.lanes for tiles in several] == [64, 64, 32] and several[2].registers == 96


def test_three_tokens_of_wide_int4_are_on_tensor_cores_if_measured(monkeypatch):
    """As are a narrow product's four in its launch; other kinds, and more tokens, have two."""
    monkeypatch.setenv("MOE_FAST_GPU", "sm_90")

    def weight(kind: str, out: int) -> Weight:
        group = FORMATS[kind].choose_group(2048, None)
        parts = FORMATS[kind].pack(torch.zeros(1, 2048), group)
        parts = [part.expand(out, *part.shape[1:]) for part in parts.values()]
        return packed_weight(parts, FORMATS[kind].kind, group)

    found = {out: dense.most_in_registers(weight("int4", out)) for out in (2048, 9216, 16000)}
    assert found == {2048: 3, 9216: 2, 16000: 3}
    wide, narrow = weight("int4", 12288), plain_weight(torch.empty(64, 2048, dtype=torch.bfloat16))
    assert [dense.takes_beside(wide, narrow, T) for T in (1, 3, 4, 5)] == [True, True, True, False]
    assert not dense.takes_beside(weight("mxfp4", 12288), narrow, 4)


def test_a_heads_programs_share_x(monkeypatch):
    """64 rows of a program in 8 bits, 32 in GGUF's kinds; one token's programs stay."""
    monkeypatch.setenv("MOE_FAST_GPU", "sm_90")
    monkeypatch.setattr(tilings, "measured", dict)

    def weight(kind: str, out: int, width: int) -> Weight:
        format = FORMATS[kind]
        parts = format.pack(torch.zeros(1, width), format.choose_group(width, None))
        parts = [part.expand(out, *part.shape[1:]) for part in parts.values()]
        return packed_weight(parts, format.kind, format.choose_group(width, None))

    for kind, *rows in (("int8", 64, 16), ("q6_k", 32, 32), ("int4", 16, 16)):
        head, wide = weight(kind, 151936, 2048), weight(kind, 12288, 2048)
        assert [choose_few_tiles(each, 8).rows for each in (head, wide)] == rows
    assert dense.most_in_registers(weight("int8", 151936, 2048)) == 3
    assert dense.most_in_registers(weight("int8", 12288, 2048)) == 4
    assert tilings.choose_tiles(weight("q6_k", 151936, 2048), 64, 1).stay
    for other in (weight("q6_k", 20480, 32768), weight("q6_k", 4096, 2048)):  # long rows; few
        assert not tilings.choose_tiles(other, other.quads, 1).stay


@pytest.mark.parametrize("kind", ("int4", "q4_k", "q5_k", "q6_k", "mxfp4"))
def test_three_chunks_that_would_spill_are_one(kind, monkeypatch):
    """Bits above the codes take registers that three chunks need; of experts they are as before."""
    monkeypatch.setenv("MOE_FAST_GPU", "sm_90")
    monkeypatch.setattr(tilings, "measured", dict)
    group = FORMATS[kind].choose_group(2304, None)
    parts = FORMATS[kind].pack(torch.zeros(1, 2304), group)
    parts = [part.expand(64, *part.shape[1:]) for part in parts.values()]
    weight = packed_weight(parts, FORMATS[kind].kind, group)
    for tokens in (1, 3):
        tiles = [tilings.choose_tiles(weight, quads, 1, tokens) for quads in (72, 96, 160)]
        one = [(128, 1), (64, 2), (256, 1)]
        wide = one if kind in ("q5_k", "q6_k") else [(32, 3), (64, 2), (64, 3)]
        assert [(t.lanes, t.depth) for t in tiles] == wide and tiles[0].warps == wide[0][0] // 32
    of_experts = tilings.choose_tiles(weight, 72, 1, summed=True)
    assert (of_experts.lanes, of_experts.depth) == (32, 3)


def test_a_norm_is_refused_where_no_kernel_has_it():
    """Of more tokens than a program has in registers."""
    weight = plain_weight(torch.zeros(64, 64, dtype=torch.bfloat16))
    x, norm = torch.zeros(16, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="norm_apart"):
        norm = dense.Norm(norm, 1e-5)
        dense.dense_product(x, weight, norm, tiles=FewTiles(16, 2, 1, tokens=16))


# Forks --------------------------------------------------------------------------------------------


def other(*_):
    raise NotImplementedError


@pytest.mark.parametrize("name", ("MoE.route", "Attention.core", "Block.forward", "swiglu"))
def test_a_changed_function_of_the_core_leaves_the_kernels(name, monkeypatch):
    """Somebody edits model.py: the answer has to change, or the line at the start says why not."""
    monkeypatch.setitem(found, 0, KNOWN["sm_90"])
    fork = on_meta("Qwen3-30B-A3B", "bf16")
    assert why_not_fused(fork, HOPPER) is None
    *owner, function = name.split(".")
    monkeypatch.setattr(getattr(model, owner[0]) if owner else model, function, other)
    why = f"{name} in model.py changed: see runtime/plain_forms.py"
    assert why_not_fused(fork, HOPPER) == why


def test_the_core_is_the_one_that_the_kernels_were_tested_with():
    """After a change that they follow: `python -m runtime.plain_forms` prints the digests."""
    assert not changed_forms()


def test_comments_and_line_breaks_change_no_digest():
    one = 'def f(x):\n    """Add one."""\n    return g(x, 1)  # or more\n'
    same = "def f(x):\n    # The same.\n    return g(\n        x, 1\n    )\n"
    digests = [digest_of(code) for code in (one, same, same.replace("1", "2"))]
    assert digests[0] == digests[1] != digests[2]


class OtherForward(model.Attention):
    forward = other


class OtherCore(model.Attention):
    core = other


class OtherQueries(GatedAttention):
    queries = other


class OtherNorm(model.RMSNorm):
    forward = other


@pytest.mark.parametrize("path", ("attention_norm", "ffn_norm", "attention.q_norm"))
def test_a_subclass_of_a_norm_is_followed(path):
    fork = on_meta("Qwen3-30B-A3B", "bf16")
    block = fork.layers[0]
    block.get_submodule(path).__class__ = OtherNorm
    if path == "attention.q_norm":
        assert not fused_attention(block.attention).supported
    else:
        of_attention = "no kernels for Attention, or its norm"
        why = of_attention if path == "attention_norm" else "no kernels for OtherNorm"
        assert why_not_fused_layer(fork) == why


class OtherRoute(MoE):
    route = other


@pytest.mark.parametrize(
    ("kind", "has_layer", "kernel"),
    (
        (model.Attention, True, True),
        (OtherCore, True, False),  # compiled by Inductor, between the kernels
        (OtherForward, False, False),
        (OtherQueries, True, False),
        (GatedAttention, True, True),
    ),
)
def test_a_subclass_of_attention_is_followed(kind, has_layer, kernel):
    fork = on_meta("Qwen3-30B-A3B", "bf16")
    for block in fork.layers:
        block.attention.__class__ = kind
    layers = fused_layers(fork)
    assert len(layers) == (len(fork.layers) if has_layer else 0)
    kernels = [isinstance(x.attention.attention, FusedDecodeAttention) for x in layers.values()]
    assert kernels == [kernel] * len(layers)
    assert isinstance(fused_attention(fork.layers[0].attention), FusedDecodeAttention) == kernel


def test_a_subclass_of_moe_has_no_kernels():
    fork = on_meta("Qwen3-30B-A3B", "bf16")
    for block in fork.layers:
        block.ffn.__class__ = OtherRoute
    assert why_not_fused_layer(fork) == "no kernels for OtherRoute"


def why_not_fused_layer(fork) -> str:
    with pytest.raises(ValueError) as error:
        FusedLayer(fork.layers[0])
    return str(error.value)


def test_a_head_after_a_norm_without_kernels_has_one():
    model = on_meta("Qwen3.8-Flash-Next", "int4")
    head = fused_head(model)
    assert head.norm is None and head.weight.out == model.args.vocab_size
    assert fused_head(on_meta("Qwen3.6-35B-A3B", "int4")).norm is not None


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_computed_tiles_of_gate_and_up_do_not_limit_registers_of_long_rows(name):
    """Three chunks of x and more, held at once, spilled with 128 registers (Kolibri 1, Gemma 4)."""
    quads = ARCHITECTURES[name].dim // 32
    tiles = tilings.DEFAULTS["int4", 2].tiles(quads)
    assert tiles.registers == 0 or quads <= 2 * tiles.lanes
