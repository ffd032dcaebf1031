"""Several processes: each rank's shard of the weights, and the same answer as one process's.

Every family runs in every format, with both kinds of parallelism, on 2 and on 4 processes (gloo).
One launch runs all cases of a number of ranks; see tp_worker.py. `make test` runs the cases of
QUICK on two ranks, `make test-all` the others.
"""

import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import tp_worker
from conftest import KINDS_OF_FAMILIES, smoke_diagonal
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import generate
import tp
from checkpoint import Checkpoint, Writer
from formats import FORMATS
from formats.quantizer import plan_format, quantize
from formats.regroup import Regrouping
from generate import embedded_checkpoint, load_model
from model import ExpertLinear, ModelArgs
from models import ARCHITECTURES, args_of_checkpoint, build_model
from models.afmoe import AfmoeArgs
from models.ernie4_5_moe import Ernie4_5MoeArgs
from models.family import Shard
from models.flint import FlintArgs
from models.gemma4 import Gemma4Args
from models.glm4_moe import Glm4MoeArgs
from models.gpt_oss import GptOssArgs
from models.granitemoehybrid import GraniteMoeHybridArgs
from models.kimi_linear import KimiLinearArgs
from models.kolibri1 import Kolibri1Args
from models.laguna import LagunaArgs
from models.latent_family import LatentArgs
from models.layers.gated_hybrid import HybridArgs
from models.layers.granite import GraniteMoeArgs
from models.layers.layer_rope import LayerRope, LayerRopeArgs
from models.layers.partial_rope import PartialRopeArgs
from models.layers.yarn import Yarn
from models.lfm2_moe import Lfm2MoeArgs
from models.nemotron_h import NemotronHArgs
from models.phimoe import PhimoeArgs
from models.qwen2_moe import Qwen2MoeArgs
from models.qwen4_exp import Qwen4ExpArgs
from models.random_weights import RandomWeights, number_format
from tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
SIZES = dict(
    dim=64,
    n_layer=2,
    n_head=8,
    head_dim=32,
    intermediate=256,
    vocab_size=160,
    max_position=256,
)
LATENT = SIZES | dict(head_dim=48, n_kv_head=1, kv_rank=48, value_dim=32, rotary_dim=16)
EIGHT_EXPERTS = dict(n_expert=8, n_active=2)
WINDOWED = SIZES | dict(n_expert=8, n_active=3, qk_norm="head", sliding_window=8, full_layers=(1,))
HYBRID = dict(
    **SIZES,
    n_expert=8,
    n_active=3,
    qk_norm="head",
    full_layers=(1,),
    rotary_dim=16,
    shared_intermediate=256,
    delta_key_heads=8,
    delta_value_heads=16,
    delta_key_dim=32,
    delta_value_dim=32,
)
# All families, with sizes that can be sharded over 4 ranks in every format; Mixtral has fewer KV
# heads than ranks.
FAMILIES = {
    "mixtral": ModelArgs("mixtral", **SIZES, **EIGHT_EXPERTS, n_kv_head=2, sliding_window=8),
    "qwen3_moe": ModelArgs(
        "qwen3_moe",
        **SIZES,
        n_kv_head=4,
        n_expert=16,
        n_active=4,
        qk_norm="head",
        attention_bias=True,
        tied_embeddings=True,
        dense_layers=(1,),
        dense_intermediate=512,
    ),
    "qwen2_moe": Qwen2MoeArgs(
        "qwen2_moe",
        **SIZES,
        n_kv_head=4,
        n_expert=8,
        n_active=3,
        norm_topk=False,
        qkv_bias=True,
        shared_intermediate=512,
    ),
    "qwen3_next": HybridArgs(
        "qwen3_next", **HYBRID, n_kv_head=2, dense_layers=(0,), dense_intermediate=512
    ),
    "qwen3_5_moe": HybridArgs("qwen3_5_moe_text", **HYBRID, n_kv_head=4),
    # An index that chooses two blocks of a prompt.
    "qwen4_exp": Qwen4ExpArgs(
        "qwen4_exp_text",
        **HYBRID,
        n_kv_head=2,
        delta_gate="sigmoid",
        streams=2,
        stream_rank=64,
        index_heads=8,
        index_dim=32,
        index_budget=8,
        ngram_layers=(0,),
        ngram_heads=2,
        ngram_dim=256,
        ngram_base=97,
    ),
    "gemma4": Gemma4Args(
        "gemma4",
        **SIZES,
        n_kv_head=4,
        n_expert=8,
        n_active=3,
        qk_norm="head",
        tied_embeddings=True,
        sliding_window=8,
        full_layers=(1,),
        global_head_dim=64,
        global_kv_head=2,
        global_rotary_dim=16,
        logit_softcap=5.0,
        shared_intermediate=512,
    ),
    "gpt_oss": GptOssArgs(
        "gpt_oss",
        **SIZES,
        **EIGHT_EXPERTS,
        n_kv_head=4,
        attention_bias=True,
        sliding_window=8,
        full_layers=(1,),
        swiglu_limit=1.0,
        yarn=Yarn(4.0, 64),
    ),
    "olmoe": ModelArgs(
        "olmoe",
        **SIZES,
        n_kv_head=8,
        n_expert=16,
        n_active=4,
        qk_norm="full",
        norm_topk=False,
        clip_qkv=0.5,
    ),
    "granitemoe": GraniteMoeArgs(
        "granitemoe",
        **SIZES,
        **EIGHT_EXPERTS,
        n_kv_head=4,
        tied_embeddings=True,
        embedding_scale=3.0,
        attention_scale=0.2,
        residual_scale=0.7,
        logit_scale=0.5,
    ),
    # A group of heads is shared by the ranks.
    "granitemoehybrid": GraniteMoeHybridArgs(
        "granitemoehybrid",
        **SIZES,
        **EIGHT_EXPERTS,
        n_kv_head=4,
        full_layers=(1,),
        shared_intermediate=256,
        residual_scale=0.7,
        mamba_heads=8,
        mamba_head_dim=32,
        mamba_state=32,
    ),
    # A mixer alone, one with experts without a gate, one with a dense FFN.
    "nemotron_h": NemotronHArgs(
        "nemotron_h",
        **SIZES | {"n_layer": 3},
        **EIGHT_EXPERTS,
        n_kv_head=4,
        full_layers=(2,),
        mixer_layers=(0,),
        dense_layers=(2,),
        dense_intermediate=512,
        shared_intermediate=512,
        routed_scale=1.5,
        mamba_heads=16,
        mamba_head_dim=32,
        mamba_groups=8,
        mamba_state=32,
    ),
    "phimoe": PhimoeArgs(
        "phimoe",
        **SIZES,
        **EIGHT_EXPERTS,
        n_kv_head=4,
        attention_bias=True,
        head_bias=True,
        mixer_eps=0.2,
        rope_factors=tuple(1 + n / 4 for n in range(16)),
        rope_scale=1.2,
    ),
    "deepseek_v2": LatentArgs(
        "deepseek_v2",
        **LATENT,
        n_expert=8,
        n_active=3,
        norm_topk=False,
        shared_intermediate=512,
        routed_scale=1.5,
        attention_scale=0.2,
        yarn=Yarn(4.0, 64),
        n_group=4,
        n_active_group=2,
        dense_layers=(0,),
        dense_intermediate=512,
    ),
    "deepseek_v3": LatentArgs(
        "deepseek_v3",
        **LATENT,
        n_expert=8,
        n_active=3,
        shared_intermediate=256,
        routed_scale=2.5,
        n_group=4,
        n_active_group=2,
        q_rank=128,
    ),
    "glm4_moe_lite": LatentArgs(
        "glm4_moe_lite",
        **LATENT,
        n_expert=8,
        n_active=3,
        shared_intermediate=256,
        routed_scale=1.8,
        q_rank=128,
        dense_layers=(0,),
        dense_intermediate=512,
    ),
    "glm4_moe": Glm4MoeArgs(
        "glm4_moe",
        **SIZES,
        n_kv_head=4,
        n_expert=8,
        n_active=3,
        qkv_bias=True,
        shared_intermediate=256,
        routed_scale=1.5,
        rotary_dim=16,
        dense_layers=(0,),
        dense_intermediate=512,
    ),
    "kimi_linear": KimiLinearArgs(
        "kimi_linear",
        **SIZES,
        n_kv_head=1,
        n_expert=8,
        n_active=3,
        shared_intermediate=256,
        routed_scale=1.5,
        rotary_dim=16,
        kv_rank=32,
        value_dim=32,
        full_layers=(1,),
        delta_heads=8,
        delta_dim=32,
        dense_layers=(0,),
        dense_intermediate=512,
    ),
    "lfm2_moe": Lfm2MoeArgs(
        "lfm2_moe",
        **SIZES,
        n_kv_head=4,
        n_expert=8,
        n_active=3,
        qk_norm="head",
        tied_embeddings=True,
        full_layers=(1,),
        conv_channels=256,
        conv_bias=True,
        routed_scale=1.5,
        dense_layers=(0,),
        dense_intermediate=512,
    ),
    "minimax_m2": PartialRopeArgs(
        "minimax_m2",
        **SIZES,
        n_kv_head=4,
        n_expert=8,
        n_active=3,
        qk_norm="full",
        rotary_dim=16,
    ),
    "ernie4_5_moe": Ernie4_5MoeArgs(
        "ernie4_5_moe",
        **SIZES,
        n_kv_head=4,
        n_expert=8,
        n_active=3,
        tied_embeddings=True,
        shared_intermediate=512,
        dense_layers=(0,),
        dense_intermediate=512,
    ),
    "afmoe": AfmoeArgs(
        "afmoe",
        **WINDOWED,
        n_kv_head=4,
        shared_intermediate=256,
        routed_scale=1.5,
        mup=True,
        dense_layers=(0,),
        dense_intermediate=512,
    ),
    "laguna": LagunaArgs(
        "laguna",
        **WINDOWED | dict(n_head=16),
        n_kv_head=4,
        layer_heads=(8, 16),
        full_rope=LayerRope(1e4, 16),
        shared_intermediate=256,
        routed_scale=1.5,
        dense_layers=(0,),
        dense_intermediate=512,
    ),
    "flint": FlintArgs("flint", **WINDOWED, n_kv_head=4, shared_intermediate=512),
    "mellum": LayerRopeArgs("mellum", **WINDOWED, n_kv_head=2, full_rope=LayerRope(1e6, 32)),
    "kolibri1": Kolibri1Args("kolibri1", **WINDOWED, n_kv_head=4, shared_intermediate=256),
}
# Blocks of 256 do not divide these small rows.
PLAIN_AND_PACKED = ("fp32", *(name for name in FORMATS if FORMATS[name].min_group <= 32))
# Gemma 4's experts have rows of 704, GLM-4.5-Air's dense layer of 10944: 11 and 171 groups of 64.
NARROW = {
    "narrow": dataclasses.replace(
        FAMILIES["glm4_moe"], intermediate=704, shared_intermediate=1408, dense_intermediate=1216
    )
}
NARROW_FORMATS = "int4", "fp8b"
# An eighth of these small rows is less than the 64 codes that 8-bit formats pack together.
FOR_8_RANKS = "fp32", "int4", "hqq2"
SLOW = pytest.mark.slow
COMPILED = ("olmoe", "fp32"), ("olmoe", "int8")  # with two all-reduces that are independent
OLMOE = [("olmoe", format, parallel) for format in ("fp32", "int4") for parallel in tp.PARALLEL]
CASES = [
    case
    if case.values[0] in (*KINDS_OF_FAMILIES, "olmoe")
    else pytest.param(*case.values, marks=SLOW)
    for case in smoke_diagonal(FAMILIES, PLAIN_AND_PACKED, tp.PARALLEL, also=OLMOE)
]
QUICK = {tuple(case.values) for case in CASES if not case.marks}
RANKS = (2, pytest.param(4, marks=pytest.mark.slow))


def random_tensor(name: str, shape: torch.Size) -> torch.Tensor:
    """Draw a weight that keeps activations near one; norms and biases are not constant either."""
    if len(shape) == 1:
        return (0.0 if name.endswith("bias") else 1.0) + 0.2 * torch.randn(shape)
    return torch.randn(shape) * shape[-1] ** -0.5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(family, format) -> a checkpoint, with one process's results in its folder `expected`."""
    folder = tmp_path_factory.mktemp("tp")

    def write(args: ModelArgs, target: Path) -> None:
        torch.manual_seed(1)
        named = build_model(args).named_parameters()
        tensors = {name: random_tensor(name, parameter.shape) for name, parameter in named}
        target.parent.mkdir()
        with Writer(target, dataclasses.asdict(args), {"name": "fp32"}) as writer:
            writer.write("all.safetensors", tensors)

    @cache
    def make(family: str, format: str) -> Path:
        args, target = (FAMILIES | NARROW)[family], folder / family / f"model_{format}"
        if format == "fp32":
            write(args, target)
        else:
            row, source = FORMATS[format], Checkpoint(make(family, "fp32"))
            group = None if row.has_own_group or family in NARROW else max(32, row.min_group)
            spec = plan_format(build_model(args), format, format, group_size=group, dtype="fp32")
            quantize(source, spec, build_model(args), target, iterations=0, progress=False)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # five times as fast for so small a model
        model = load_model(target, "cpu")
        expected = target / "expected"
        expected.mkdir()
        save_file({"logits": tp_worker.prompt_logits(model)}, expected / "logits.safetensors")
        if format == "fp32":
            (expected / "tokens.json").write_text(json.dumps(tp_worker.greedy_tokens(model)))
        torch.set_num_threads(threads)
        return target

    return make


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a child process, which gets one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def torchrun(ranks: int, *command: str, **options) -> subprocess.Popen:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc_per_node={ranks}", *map(str, command)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(launch, cwd=ROOT, env=environment(), **pipes, **options)


def run_ranks(ranks: int, module: str, *arguments: str | Path) -> subprocess.Popen:
    """Start a module's `main` on several ranks."""
    command = [sys.executable, ROOT / "tests" / "ranks.py", str(ranks), module, *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes)


def list_cases(ranks: int, quick: bool, checkpoints) -> dict[str, dict]:
    """Return the cases of one launch, by name."""
    formats = PLAIN_AND_PACKED if ranks < 8 else FOR_8_RANKS
    wanted = [*itertools.product(FAMILIES, formats, tp.PARALLEL)]
    if quick:
        wanted = [case for case in wanted if case in QUICK]
        wanted += itertools.product(NARROW, NARROW_FORMATS, tp.PARALLEL)
    cases = {}
    for family, format, parallel in wanted:
        case = {
            "checkpoint": str(checkpoints(family, format)),
            "parallel": parallel,
            "compiled": False,
            "greedy": format == "fp32",
        }
        cases[f"{family} {format} {parallel}"] = case
        compiles = (family, format) in COMPILED and ranks == 2 and not quick
        if compiles and parallel == "tensor":
            compiled = {**case, "compiled": True, "greedy": False}
            cases[f"{family} {format} compiled"] = compiled
    return cases


@pytest.fixture(scope="module")
def found(checkpoints, tmp_path_factory):
    """(ranks, case) -> the ranks' results.

    All cases of a number of ranks are one launch, but for the quick ones of two ranks.
    """

    @cache
    def launch(ranks: int, quick: bool) -> dict:
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        (folder / "cases.json").write_text(json.dumps(list_cases(ranks, quick, checkpoints)))
        process = run_ranks(ranks, "tp_worker", folder)
        _, errors = process.communicate(timeout=600)
        if process.returncode:  # cached: the next test does not launch it again
            return {"failed": errors}
        return json.loads((folder / "found.json").read_text())

    def case(ranks: int, name: str) -> dict:
        family, format, kind = name.split()
        quick = ranks == 2 and (family, format, kind) in QUICK
        quick = quick or family in NARROW
        cases = launch(ranks, quick)
        assert "failed" not in cases, cases["failed"][-4000:]
        return cases[name]

    return case


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("family", "format", "parallel"), CASES)
def test_ranks_answer_as_one_process(family, format, parallel, ranks, checkpoints, found):
    case = found(ranks, f"{family} {format} {parallel}")
    assert case["difference"] < 1e-4  # the logits' standard deviation is near one
    assert case["same_bits"]
    if format == "fp32":
        expected = checkpoints(family, format) / "expected" / "tokens.json"
        assert case["tokens"] == json.loads(expected.read_text())


@pytest.mark.parametrize("parallel", tp.PARALLEL)
@pytest.mark.parametrize("format", NARROW_FORMATS)
def test_ranks_whose_edges_lie_within_groups(format, parallel, checkpoints, found):
    modules = Checkpoint(checkpoints("narrow", format)).format["modules"].values()
    assert {spec["group_size"] for spec in modules} >= {64}
    test_ranks_answer_as_one_process("narrow", format, parallel, 2, checkpoints, found)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("family", "format", "parallel"), [case for case in CASES if case.values[0] == "mixtral"]
)
def test_eager_ranks_do_not_load_the_compiler(family, format, parallel, ranks, found):
    """Only the first family: some others' attention imports the compiler."""
    assert not found(ranks, f"{family} {format} {parallel}")["compiler"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", tp.PARALLEL)
@pytest.mark.parametrize("format", FOR_8_RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_ranks_answer_as_one_process(family, format, parallel, checkpoints, found):
    test_ranks_answer_as_one_process(family, format, parallel, 8, checkpoints, found)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "format"), COMPILED)
def test_compiled_ranks_answer_as_one_process(family, format, found):
    case = found(2, f"{family} {format} compiled")
    assert case["difference"] < 1e-4 and case["same_bits"]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("parallel", tp.PARALLEL)
@pytest.mark.parametrize("format", ("fp32", "int4"))
def test_a_rank_reads_only_its_own_shard(format, parallel, ranks, checkpoints, found):
    """1 / N of what is sharded, and all of the rest.

    OLMoE has eight of all heads, no biases, nothing tied.
    """
    source, due = Checkpoint(checkpoints("olmoe", format)), 0
    sharded = "wqkv", "wo", "w13", "w2", "head", "q_norm", "k_norm"
    for name in source.tensors:
        size, (shape, _) = source.nbytes(name), source.tensors[name]
        module = name.split(".")[-2]
        along_rows = module == "wo" or (module == "w2" and parallel == "tensor")
        whole = module not in sharded or (along_rows and shape[-1] == 1)
        due += size if whole else size // ranks
    case = found(ranks, f"olmoe {format} {parallel}")
    assert case["bytes_read"] == case["bytes_held"] == [due] * ranks
    # Little is replicated, even in so small a model.
    assert due < 1.25 * sum(map(source.nbytes, source.tensors)) / ranks


# Sharding -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    format=st.sampled_from(tuple(FORMATS)),
    ranks=st.sampled_from((2, 3, 4)),
    along_rows=st.booleans(),
    counts=st.lists(st.integers(1, 2), min_size=1, max_size=3),
    groups=st.integers(1, 2),
    experts=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_a_shard_of_a_packed_weight_is_the_packed_shard(
    format, ranks, along_rows, counts, groups, experts, seed
):
    """Sharded, then unpacked: the same numbers as unpacked, then sharded."""
    row = FORMATS[format]
    group = max(32, row.min_group)
    width = group * groups if along_rows or row.blocks else groups  # others are refused
    segments = tuple((n * ranks, width) for n in counts)
    length = sum(count * width for count, width in segments)
    shape = (experts, 3, length) if along_rows else (experts, length, 2 * group)
    torch.manual_seed(seed)
    weight, shard = torch.randn(shape), Shard(2 if along_rows else 1, segments)
    parts = row.pack(weight, group)
    whole = row.unpack(parts, group)
    for rank in range(ranks):
        local = {}
        for name, part in parts.items():
            slices = tp.shard_slices(part.shape, shard, rank, ranks)
            local[name] = torch.cat([part[index] for index in slices], dim=shard.axis)
        begin, expected = 0, []
        for count, width in segments:
            share = count * width // ranks
            expected.append(whole.narrow(shard.axis, begin + rank * share, share))
            begin += count * width
        assert torch.equal(row.unpack(local, group), torch.cat(expected, dim=shard.axis))


def test_neighboring_ranks_share_a_key_value_head():
    """2 heads of width 4 on 4 ranks: the first two ranks have the first."""
    shard = Shard(0, ((4, 4), (2, 4)))
    slices = [tp.shard_slices((24, 8), shard, rank, 4)[1] for rank in range(4)]
    rows = [(first.start, first.stop) for first, *_ in slices]
    assert rows == [(16, 20), (16, 20), (20, 24), (20, 24)]
    assert tp.local_args(FAMILIES["mixtral"], 4, "tensor").n_kv_head == 1


@pytest.mark.parametrize("parallel", tp.PARALLEL)
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_are_all_of_the_weights(family, parallel, checkpoints):
    """Each sharded tensor, concatenated over the ranks, has every number of the whole tensor.

    Biases after an all-reduce are on rank 0 alone.
    """
    args, source = FAMILIES[family], Checkpoint(checkpoints(family, "fp32"))
    shards = [tp.ModelShard(args, source.format, parallel, rank, 2) for rank in range(2)]
    summed = "wo.bias", "wout.bias", *(["w2.bias"] if parallel == "tensor" else [])
    for name, parameter in shards[0].model.named_parameters():
        tensors = [shard.read(source, name, "cpu") for shard in shards]
        tied = name == "head.weight" and args.tied_embeddings
        whole = source.read("embedding.weight" if tied else name)
        assert tensors[0].shape == tensors[1].shape == parameter.shape
        if name.endswith("wfgb.weight"):  # first the rows of low rank, which all heads share
            shared = 2 * args.delta_dim
            assert all(torch.equal(each[:shared], whole[:shared]) for each in tensors)
            tensors, whole = [each[shared:] for each in tensors], whole[shared:]
        latent = hasattr(args, "kv_rank") and name.endswith("wqkv.weight")
        latent = latent and int(name.split(".")[1]) in getattr(args, "full_layers", (0, 1))
        replicated = 0  # rows that all heads share
        if latent:
            replicated = args.kv_rank + args.rotary_dim
        elif getattr(args, "mamba_groups", 0) == 1 and ("wzx" in name or "conv" in name):
            replicated = 2 * args.mamba_state
        if replicated and tensors[0].shape != whole.shape:
            tensors[0], same = tensors[0].split((len(tensors[0]) - replicated, replicated))
            assert torch.equal(same, tensors[1][-replicated:])
        if name.endswith(summed):
            assert torch.equal(tensors[0] + tensors[1], whole)
        elif tensors[0].shape == whole.shape:
            assert torch.equal(tensors[0], whole) and torch.equal(tensors[1], whole)
        else:
            found = torch.cat(tensors).flatten().sort().values
            assert torch.equal(found, whole.flatten().sort().values)


# (architecture, mode, ranks, parallel, part of the message)
REFUSALS = {
    "heads": (
        "Mixtral-8x7B",
        "bf16",
        3,
        "tensor",
        "32 (query heads) cannot be divided by 3: start 1, 2, 4, 8, 16, 32",
    ),
    "vocabulary": (
        "TinyMistral-6x248M",
        "bf16",
        16,
        "tensor",
        "32005 (the vocabulary's size) cannot",
    ),
    "experts": (
        "Mixtral-8x7B",
        "bf16",
        16,
        "expert",
        "8 (experts) cannot be divided by 16: start 1, 2, 4, 8",
    ),
    "groups of 32": (
        "gpt-oss-20b",
        "mxfp4",
        4,
        "tensor",
        "720 numbers of a rank's rows or columns are no multiple of 32, the smallest group of "
        "mxfp4: start 1, 2",
    ),
    "heads of latent attention": (
        "DeepSeek-V2-Lite",
        "bf16",
        3,
        "tensor",
        "16 (query heads) cannot be divided by 3: start 1, 2, 4, 8, 16",
    ),
    "words": (
        "GLM-4.5-Air",
        "int8",
        32,
        "tensor",
        "342 numbers of a rank's rows or columns are no multiple of 4, the smallest group of int8: "
        "start 1, 2, 4, 8, 16",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_impossible_sharding_is_refused_with_a_fix(case):
    arch, mode, ranks, parallel, message = REFUSALS[case]
    args = ARCHITECTURES[arch]
    with pytest.raises(ValueError) as error:
        tp.ModelShard(args, number_format(mode, args), parallel, 0, ranks)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arch", "mode", "ranks", "groups"),
    [
        ("Qwen3-30B-A3B", "int4", 4, (128, 64)),  # an expert's 768: 192 each
        ("Qwen3-30B-A3B", "fp8b", 4, (64, 64)),  # and of gate and up
        ("gemma-4-26B-A4B", "int4", 4, (128, 16)),  # 704: 176 each
        ("DeepSeek-V2-Lite", "fp8b", 2, (64, 64)),  # 1408: 704 each
        ("Qwen1.5-MoE-A2.7B", "int8", 16, (16, 8)),  # 1408: 88 each
    ],
)
def test_shards_have_groups_that_divide_them(arch, mode, ranks, groups):
    args = ARCHITECTURES[arch]
    shard = tp.ModelShard(args, number_format(mode, args), "tensor", 0, ranks)
    ffn = shard.model.layers[-1].ffn
    assert (ffn.experts.w13.group, ffn.experts.w2.group) == groups
    if hasattr(ffn, "shared"):  # the fused kernels take them for more experts
        assert (ffn.shared.w13.group, ffn.shared.w2.group) == groups


@settings(max_examples=40, deadline=None)
@given(
    format=st.sampled_from(tuple(FORMATS)),
    ranks=st.sampled_from((2, 3, 4)),
    along_rows=st.booleans(),
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    times=st.integers(1, 3),
    gates=st.integers(0, 15),
    experts=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_a_shard_whose_edges_lie_within_groups(
    format, ranks, along_rows, counts, times, gates, experts, seed
):
    """Read, regrouped and unpacked: the same numbers as unpacked, then sharded."""
    row = FORMATS[format]
    least, width = max(16, row.min_group), 256 if row.min_group > 64 else 192
    segments = tuple((n * ranks, least * times) for n in counts)
    if gates and not along_rows:  # rows of a last block that is not full, beside whole blocks
        segments = (ranks, 256), (gates * ranks, 1)
    length = sum(count * size for count, size in segments)
    lead = (experts,) if experts else ()
    shape = (*lead, 5, length) if along_rows else (*lead, length, width)
    group = row.default_group(shape[-1])
    torch.manual_seed(seed)
    parts = row.pack(torch.randn(shape), group)
    whole, axis = row.unpack(parts, group), len(shape) - 1 - (not along_rows)
    spec, path = {"format": format, "group_size": group}, "ffn.experts.w" if experts else "ffn.w"
    shard = Shard(axis, segments)
    table = {f"{path}2": shard}
    local = tp.sharded_format({"modules": {f"{path}2": spec}}, table, ranks)["modules"]
    smaller = local[f"{path}2"]["group_size"]
    assert smaller % row.min_group == 0 and group % smaller == 0
    assert smaller == group or along_rows or not gates
    regrouping = Regrouping(row, shape, group, smaller)
    for rank in range(ranks):
        slices, mine = tp.shard_slices(shape, shard, rank, ranks), {}
        for name, part in parts.items():
            mine[name] = regrouping.read(part.__getitem__, name, slices, axis)
        want = torch.cat([whole[index] for index in slices], dim=axis)
        layout = row.layout(want.shape, smaller)
        assert {name: part.shape for name, part in mine.items()} == {
            name: torch.Size(size) for name, (size, _) in layout.items()
        }
        assert torch.equal(row.unpack(mine, smaller), want)


def test_other_ranks_experts_count_nothing(monkeypatch):
    """Results of all ranks' local experts add up to the whole's, for few tokens and for many.

    Rows that a grouped product leaves undefined are NaN here.
    """
    grouped = ExpertLinear.grouped

    def grouped_with_nan(self, x, group_ends):
        y = grouped(self, x, group_ends)
        defined = torch.arange(len(y)).unsqueeze(-1) < group_ends[-1]
        return torch.where(defined, y, float("nan"))

    monkeypatch.setattr(ExpertLinear, "grouped", grouped_with_nan)
    args, source = FAMILIES["olmoe"], RandomWeights(FAMILIES["olmoe"], {"name": "fp32"})
    whole = load_model(source, "cpu").layers[0].ffn
    for tokens in (1, 4, 40):
        x, total = torch.randn(tokens, args.dim), 0.0
        chosen = whole.route(whole.router(x))
        for rank in range(4):
            shard = tp.ModelShard(args, source.format, "expert", rank, 4)
            experts = shard.model.layers[0].ffn.experts
            for name, module in (("w13", experts.w13), ("w2", experts.w2)):
                tensor = shard.read(source, f"layers.0.ffn.experts.{name}.weight", "cpu")
                module.weight = torch.nn.Parameter(tensor, requires_grad=False)
            total = total + experts(x, *chosen)
        torch.testing.assert_close(total, whole.experts(x, *chosen), rtol=1e-4, atol=1e-5)


# Commands -----------------------------------------------------------------------------------------

ANSWER = "--max_new_tokens", "16", "--temperature", "0", "--dtype", "fp32", "--device", "cpu"
ANSWER += ("--ignore_eos",)
LONG_ANSWER = *ANSWER[2:], "--max_new_tokens", "2000"


@cache
def answer(*options: str) -> str:
    """Return the text of one process."""
    command = [sys.executable, "generate.py", *ANSWER, *map(str, options)]
    process = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    )
    return process.stdout


def free_port() -> str:
    with socket.socket() as socket_:
        socket_.bind(("127.0.0.1", 0))
        return str(socket_.getsockname()[1])


def start_ranks(*commands: list[str]) -> list[subprocess.Popen]:
    """Start a rank for each command, as torchrun would, but without an agent that watches them."""
    shared = {
        "WORLD_SIZE": str(len(commands)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = []
    for rank, command in enumerate(commands):
        variables = environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        line = [sys.executable, "generate.py", *command]
        processes.append(subprocess.Popen(line, cwd=ROOT, env=variables, **pipes))
    return processes


@pytest.mark.slow
def test_ranks_that_differ_are_refused_in_one_line():
    processes = start_ranks([*ANSWER], [*ANSWER, "--top_k", "7"])
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    message = "error: ranks 0 and 1 differ in --top_k, 200 and 7: start all alike"
    assert outputs[0][1].splitlines()[-1] == message  # before it, progress of a first conversion
    assert [out for out, _ in outputs] == ["", ""] and outputs[1][1] == ""


@pytest.mark.parametrize("start", ("forked", pytest.param("torchrun", marks=pytest.mark.slow)))
def test_two_ranks_give_the_same_text_and_only_rank_0_prints(start, monkeypatch, capsys):
    if start == "torchrun":
        process = torchrun(2, "generate.py", *ANSWER)
    else:
        process = run_ranks(2, "generate", *ANSWER)
    monkeypatch.setattr(sys, "argv", ["generate.py", *ANSWER])
    assert generate.main() == 0
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert out == capsys.readouterr().out
    assert errors.count("16 new tokens") == errors.count("tensor parallel on 2 ranks") == 1


def child_processes(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in children.split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a rank through /proc")
@pytest.mark.parametrize(
    "options", ((), pytest.param(("--device", "cuda", "--compile"), marks=pytest.mark.cuda))
)
def test_a_killed_rank_ends_the_others_with_one_line(options):
    """On GPUs the others hang in a captured kernel, which waits for the dead rank's message."""
    if options and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    process = torchrun(2, "generate.py", *LONG_ANSWER, *options)
    assert process.stdout.read(20)  # the answer has begun
    os.kill(child_processes(process.pid)[-1], signal.SIGKILL)
    start = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - start < 30 and process.returncode != 0
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, errors
    assert "another process of this run has ended" in errors


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_within_30_seconds():
    """No agent watches them; a stopped process keeps its connections, so only heartbeats stop."""
    first, second = start_ranks([*LONG_ANSWER], [*LONG_ANSWER])
    try:
        assert first.stdout.read(20)
        second.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        _, errors = first.communicate(timeout=60)
        assert time.monotonic() - start < 30 and first.returncode == 1
        message = "error: rank 1 sends no heartbeat: start all processes again"
        assert errors.splitlines()[-1] == message
    finally:
        second.kill()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """format -> the embedded model in it, each packed once."""

    @cache
    def make(format: str) -> Path:
        path = embedded_checkpoint()
        if format == "bf16":
            return path
        source = Checkpoint(path)
        args = args_of_checkpoint(source)
        group = None if FORMATS[format].has_own_group else 16 if format == "hqq2" else 32
        target = tmp_path_factory.mktemp("embedded") / format
        spec = plan_format(build_model(args), format, format, group_size=group)
        return quantize(source, spec, build_model(args), target, progress=False)

    return make


def check_same_text(path: Path, parallel: str, ranks: int, *options: str) -> None:
    """Ranks give the same text as one process, if the model can be sharded over them."""
    options = "--checkpoint_path", path, *options
    process = torchrun(ranks, "generate.py", *ANSWER, *options, "--parallel", parallel)
    out, errors = process.communicate(timeout=300)
    if process.returncode and "group size" in errors:
        pytest.skip(next(line for line in errors.splitlines() if line.startswith("error: ")))
    assert process.returncode == 0, errors
    assert out == answer(*options)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("parallel", tp.PARALLEL)
@pytest.mark.parametrize("format", ("bf16", *FORMATS))
def test_the_embedded_model_gives_the_same_text(format, parallel, ranks, embedded):
    prompts = "--prompt", "import os\n", "--prompt", "class A:"
    check_same_text(embedded(format), parallel, ranks, *prompts)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", tp.PARALLEL)
def test_compiled_ranks_give_the_same_text(parallel):
    """Everything is compiled: prompts of two lengths, sampling, one answer at a time."""
    prompts = "--prompt", "import os\n", "--prompt", "class A:\n    def __init__(self"
    options = *ANSWER, *prompts, "--batch_size", "1"
    compiled = "--compile", "--compile_prefill", "--parallel", parallel
    process = torchrun(2, "generate.py", *options, *compiled)
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert out == answer(*options)


@pytest.mark.cuda
@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("parallel", tp.PARALLEL)
@pytest.mark.parametrize("format", ("bf16", "int8", "hqq4"))
def test_gpus_give_the_same_text_as_one(format, parallel, ranks, embedded):
    """Compiled and captured, with the fastest all-reduce; in fp32, so that no near-tie differs."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    check_same_text(embedded(format), parallel, ranks, "--device", "cuda", "--compile")


def fused_answer(ranks: int, checkpoint: Path, folder: Path) -> tuple[dict, torch.Tensor]:
    """Run tp_fused_worker.py -> what it found, and logits [n, V]."""
    process = torchrun(ranks, ROOT / "tests" / "tp_fused_worker.py", folder, checkpoint)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    found = json.loads((folder / "found.json").read_text())
    assert found["runner"] == "FusedRunner"
    return found, load_file(folder / "logits.safetensors")["logits"]


@pytest.mark.cuda
@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("format", ("bf16", "int8", "int4"))
def test_fused_kernels_of_ranks_answer_as_one_gpu(format, ranks, embedded, tmp_path):
    """Their text may differ from one GPU's at a near-tie alone; all ranks have the same bits."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    ids = load_tokenizer(embedded_checkpoint()).encode("import os\n\n\ndef find_files(directory):")
    (tmp_path / "prompt.json").write_text(json.dumps(ids))
    one, want = fused_answer(1, embedded(format), tmp_path)
    first = one["answers"][0]
    (tmp_path / "forced.json").write_text(json.dumps(first))
    several, got = fused_answer(ranks, embedded(format), tmp_path)
    assert several["same_bits"] and several["sent"] and not one["sent"]
    for second in several["answers"]:
        pairs = enumerate(zip(first, second, strict=True))
        at = next((n for n, (a, b) in pairs if a != b), None)
        if at is not None:
            difference = want[at, first[at]] - want[at, second[at]]
            assert difference.abs() < 0.02 * want[at].abs().max()
    assert several["answers"][0] == several["answers"][1]
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 4e-2


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ("bf16", "fp32"))
def test_every_all_reduce_has_the_same_bits_on_all_gpus(dtype):
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs 2 GPUs")
    process = torchrun(ranks, "benchmarks/all_reduce.py", "--dtype", dtype, "--json")
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    found = json.loads(out.splitlines()[-1])
    rows = found["rows"] + found["joins"]
    cells = [cell for row in rows for cell in row.values() if isinstance(cell, dict)]
    assert found["joins"] and all(cell["same_bits"] for cell in cells)


@pytest.mark.slow
def test_two_hosts_are_two_agents():
    """Two torchrun agents on this machine, with one rank each, meet as two hosts would."""
    rendezvous = [
        "--nnodes=2",
        "--nproc_per_node=1",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint=127.0.0.1:{free_port()}",
    ]
    launch = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "generate.py", *ANSWER]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    agents = [subprocess.Popen(launch, cwd=ROOT, env=environment(), **pipes) for _ in range(2)]
    outputs = [agent.communicate(timeout=180) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sorted(out for out, _ in outputs) == ["", answer()]
