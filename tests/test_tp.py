"""Several processes: each rank's part of the weights, and the same answer as one process's.

One launch of 2 and one of 4 processes (gloo) runs every family in every format, cut both ways; see tp_worker.py.
"""

import dataclasses
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
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import tp
from args import ModelArgs, Yarn
from checkpoint import Checkpoint, Writer
from generate import embedded_checkpoint, load_model
from layers import weighted_sum
from model import ExpertLinear, Terms, Transformer
from packing import FORMATS
from quantize import plan, quantize
from shapes import ARCHITECTURES, RandomWeights, number_format

ROOT = Path(__file__).parents[1]
COMMON = dict(dim=64, n_layer=2, n_head=8, head_dim=32, intermediate=256, vocab_size=160, max_position=256)
# What sets the families of conftest.py apart, with sizes that can be cut by 4 in every format; Mixtral's two key-value
# heads are fewer than 4 ranks.
FAMILIES = {
    "mixtral": ModelArgs(**COMMON, n_kv_head=2, n_expert=8, n_active=2, sliding_window=8),
    "qwen3_moe": ModelArgs(
        **COMMON, n_kv_head=4, n_expert=16, n_active=4, qk_norm="head", attention_bias=True, tied_embeddings=True,
        dense_layers=(1,), dense_intermediate=512,
    ),
    "qwen2_moe": ModelArgs(
        **COMMON, n_kv_head=4, n_expert=8, n_active=3, norm_topk=False, qkv_bias=True, shared_intermediate=512
    ),
    "gpt_oss": ModelArgs(
        **COMMON, n_kv_head=4, n_expert=8, n_active=2, attention_bias=True, sliding_window=8, full_layers=(1,),
        attention_sinks=True, router_bias=True, expert_bias=True, swiglu_limit=1.0, yarn=Yarn(4.0, 64),
    ),
    "olmoe": ModelArgs(**COMMON, n_kv_head=8, n_expert=16, n_active=4, qk_norm="full", norm_topk=False, clip_qkv=0.5),
    "granitemoe": ModelArgs(
        **COMMON, n_kv_head=4, n_expert=8, n_active=2, tied_embeddings=True, embedding_scale=3.0, attention_scale=0.2,
        residual_scale=0.7, logit_scale=0.5,
    ),
    "phimoe": ModelArgs(
        **COMMON, n_kv_head=4, n_expert=8, n_active=2, attention_bias=True, layer_norm=True, head_bias=True,
        mixer_eps=0.2, rope_factors=tuple(1 + n / 4 for n in range(16)), rope_scale=1.2,
    ),
    "deepseek_v2": ModelArgs(
        **COMMON | dict(head_dim=48), n_kv_head=1, n_expert=8, n_active=3, norm_topk=False, shared_intermediate=512,
        shared_gated=False, routed_scale=1.5, rotary_dim=16, attention_scale=0.2, yarn=Yarn(4.0, 64), n_group=4,
        n_active_group=2, kv_rank=48, value_dim=32, dense_layers=(0,), dense_intermediate=512,
    ),
    "deepseek_v3": ModelArgs(
        **COMMON | dict(head_dim=48), n_kv_head=1, n_expert=8, n_active=3, shared_intermediate=256, shared_gated=False,
        scoring="sigmoid", routed_scale=2.5, rotary_dim=16, n_group=4, n_active_group=2, kv_rank=48, q_rank=128,
        value_dim=32,
    ),
    "glm4_moe": ModelArgs(
        **COMMON, n_kv_head=4, n_expert=8, n_active=3, qkv_bias=True, shared_intermediate=256, shared_gated=False,
        scoring="sigmoid", routed_scale=1.5, rotary_dim=16, dense_layers=(0,), dense_intermediate=512,
    ),
}  # fmt: skip
PLAIN_AND_PACKED = ("fp32", *FORMATS)
FOR_8 = "fp32", "int4", "hqq2"  # an eighth of these small rows is less than the 64 that 8-bit codes are packed in
COMPILED = ("olmoe", "fp32"), ("olmoe", "int8")  # with two sums that do not depend on each other


def random_tensor(name: str, shape: torch.Size) -> torch.Tensor:
    """Numbers that keep activations near one; norms and biases are no constants, so that a wrong part is noticed."""
    if len(shape) == 1:
        return (0.0 if name.endswith("bias") else 1.0) + 0.2 * torch.randn(shape)
    return torch.randn(shape) * shape[-1] ** -0.5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(family, format) -> a checkpoint, with what one process makes of it in its folder `expected`."""
    folder = tmp_path_factory.mktemp("tp")

    @cache
    def make(family: str, format: str) -> Path:
        args, target = FAMILIES[family], folder / family / f"model_{format}"
        if format != "fp32":
            group = None if FORMATS[format].per_row else max(32, FORMATS[format].least)
            spec = plan(args, format, format, group_size=group, dtype="fp32")
            quantize(make(family, "fp32"), spec, target, iterations=0, progress=False)
        else:
            torch.manual_seed(1)
            with torch.device("meta"):
                shapes = {name: tensor.shape for name, tensor in Transformer(args).named_parameters()}
            target.parent.mkdir()
            with Writer(target, dataclasses.asdict(args), {"name": "fp32"}) as writer:
                writer.write("all.safetensors", {name: random_tensor(name, shape) for name, shape in shapes.items()})
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so small a model is five times as fast in one
        model = load_model(target, "cpu")
        (target / "expected").mkdir()
        save_file({"logits": tp_worker.logits(model)}, target / "expected" / "logits.safetensors")
        if format == "fp32":
            (target / "expected" / "tokens.json").write_text(json.dumps(tp_worker.greedy(model)))
        torch.set_num_threads(threads)
        return target

    return make


def environment(**more: str) -> dict[str, str]:
    """For processes of ours; one thread each, or they stand in each other's way."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def torchrun(ranks: int, *command: str, **options) -> subprocess.Popen:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([*launch, *map(str, command)], cwd=ROOT, env=environment(), **pipes, **options)


@pytest.fixture(scope="module")
def found(checkpoints, tmp_path_factory):
    """Ranks -> what they found, by case; the processes are launched once."""

    @cache
    def launch(ranks: int) -> dict:
        folder, cases = tmp_path_factory.mktemp(f"ranks{ranks}"), {}
        for family in FAMILIES:
            for format in PLAIN_AND_PACKED if ranks < 8 else FOR_8:
                for parallel in tp.PARALLEL:
                    case = {"checkpoint": str(checkpoints(family, format)), "parallel": parallel, "compiled": False}
                    case["greedy"] = format == "fp32"
                    cases[f"{family} {format} {parallel}"] = case
                    if ranks == 2 and (family, format) in COMPILED and parallel == "tensor":
                        cases[f"{family} {format} compiled"] = {**case, "compiled": True, "greedy": False}
        (folder / "cases.json").write_text(json.dumps(cases))
        process = torchrun(ranks, ROOT / "tests" / "tp_worker.py", folder)
        _, errors = process.communicate(timeout=600)
        # What has failed is not launched again for the next test, but has no case.
        return json.loads((folder / "found.json").read_text()) if process.returncode == 0 else {"failed": errors}

    def case(ranks: int, name: str) -> dict:
        found = launch(ranks)
        assert "failed" not in found, found["failed"][-4000:]
        return found[name]

    return case


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("parallel", tp.PARALLEL)
@pytest.mark.parametrize("format", PLAIN_AND_PACKED)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_together_answer_as_one_process(family, format, parallel, ranks, checkpoints, found):
    case = found(ranks, f"{family} {format} {parallel}")
    assert case["difference"] < 1e-4  # of logits whose deviation is near one
    assert case["same_bits"]
    if format == "fp32":
        assert case["tokens"] == json.loads((checkpoints(family, format) / "expected" / "tokens.json").read_text())


@pytest.mark.parametrize("ranks", (2, 4))
def test_eager_ranks_do_not_load_the_compiler(ranks, found):
    """Those of the first family, that is; the attention of some others brings it with it."""
    assert not any(found(ranks, f"mixtral {format} tensor")["compiler"] for format in PLAIN_AND_PACKED)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", tp.PARALLEL)
@pytest.mark.parametrize("format", FOR_8)
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_ranks_answer_as_one_process(family, format, parallel, checkpoints, found):
    test_ranks_together_answer_as_one_process(family, format, parallel, 8, checkpoints, found)


@pytest.mark.parametrize(("family", "format"), COMPILED)
def test_compiled_ranks_answer_as_one_process(family, format, found):
    case = found(2, f"{family} {format} compiled")
    assert case["difference"] < 1e-4 and case["same_bits"]


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("parallel", tp.PARALLEL)
@pytest.mark.parametrize("format", ("fp32", "int4"))
def test_a_rank_reads_only_its_own_part(format, parallel, ranks, checkpoints, found):
    """OLMoE: eight of all heads, no biases, nothing tied. 1 / N of what is cut, and all of the rest."""
    source, due = Checkpoint(checkpoints("olmoe", format)), 0
    cut = "wqkv", "wo", "w13", "w2", "head", "q_norm", "k_norm"
    for name in source.tensors:
        size, (shape, _) = source.nbytes(name), source.tensors[name]
        module = name.split(".")[-2]
        along_rows = module == "wo" or (module == "w2" and parallel == "tensor")
        due += size // ranks if module in cut and not (along_rows and shape[-1] == 1) else size
    case = found(ranks, f"olmoe {format} {parallel}")
    assert case["bytes_read"] == case["bytes_held"] == [due] * ranks
    assert due < 1.25 * sum(map(source.nbytes, source.tensors)) / ranks  # little is whole, even in so small a model


# Cutting ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    format=st.sampled_from(tuple(FORMATS)), ranks=st.sampled_from((2, 3, 4)), along_rows=st.booleans(),
    segments=st.lists(st.integers(1, 2), min_size=1, max_size=3), groups=st.integers(1, 2), experts=st.integers(1, 3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_part_of_a_packed_weight_is_the_packed_part(format, ranks, along_rows, segments, groups, experts, seed):
    """Cut, then unpacked: the same numbers as unpacked, then cut."""
    row, group = FORMATS[format], 32
    unit = group * groups if along_rows or row.blocks else groups  # what is not whole blocks is refused before
    pieces = tuple((n * ranks, unit) for n in segments)
    length = sum(count * width for count, width in pieces)
    shape = (experts, 3, length) if along_rows else (experts, length, 2 * group)
    torch.manual_seed(seed)
    weight, axis = torch.randn(shape), 2 if along_rows else 1
    parts = row.pack(weight, group)
    whole = row.unpack(parts, group)
    for rank in range(ranks):
        local = {}
        for name, part in parts.items():
            slices = tp.cut(part.shape, axis, pieces, rank, ranks)
            local[name] = torch.cat([part[index] for index in slices], dim=axis)
        begin, expected = 0, []
        for count, width in pieces:
            share = count * width // ranks
            expected.append(whole.narrow(axis, begin + rank * share, share))
            begin += count * width
        assert torch.equal(row.unpack(local, group), torch.cat(expected, dim=axis))


def test_key_value_heads_are_shared_by_neighbouring_ranks():
    """2 heads of width 4 on 4 ranks: the first two ranks have the first."""
    slices = [tp.cut((24, 8), 0, ((4, 4), (2, 4)), rank, 4) for rank in range(4)]
    assert [(s[0].start, s[0].stop) for _, s in ((None, parts[1]) for parts in slices)] == [
        (16, 20), (16, 20), (20, 24), (20, 24)
    ]  # fmt: skip
    assert tp.local_args(FAMILIES["mixtral"], 4, "tensor").n_kv_head == 1


@pytest.mark.parametrize("parallel", tp.PARALLEL)
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_all_of_the_weights(family, parallel, checkpoints):
    """Each cut tensor, joined over the ranks, holds every number of the whole one; what is added up only rank 0 has."""
    source = Checkpoint(checkpoints(family, "fp32"))
    parts = [tp.Part(FAMILIES[family], source.format, parallel, rank, 2) for rank in range(2)]
    for name, parameter in parts[0].model.named_parameters():
        tensors = [part.read(source, name, "cpu") for part in parts]
        whole = source.read("embedding.weight" if name == "head.weight" and FAMILIES[family].tied_embeddings else name)
        assert tensors[0].shape == tensors[1].shape == parameter.shape
        if FAMILIES[family].kv_rank and name.endswith("wqkv.weight") and tensors[0].shape != whole.shape:
            tensors[0], same = tensors[0].split((len(tensors[0]) - (shared := FAMILIES[family].kept[-1]), shared))
            assert torch.equal(same, tensors[1][-shared:])  # what all heads are made of
        if name.endswith(("wo.bias", *(("w2.bias",) if parallel == "tensor" else ()))):
            assert torch.equal(tensors[0] + tensors[1], whole)
        elif tensors[0].shape == whole.shape:
            assert torch.equal(tensors[0], whole) and torch.equal(tensors[1], whole)
        else:
            assert torch.equal(torch.cat(tensors).flatten().sort().values, whole.flatten().sort().values)


REFUSALS = {
    "heads": ("Mixtral-8x7B", "bf16", 3, "tensor", "32 (query heads) cannot be divided by 3: start 1, 2, 4, 8, 16, 32"),
    "key-value heads": ("TinyMistral-6x248M", "bf16", 16, "tensor", "32005 (the vocabulary's size) cannot"),
    "experts": ("Mixtral-8x7B", "bf16", 16, "expert", "8 (experts) cannot be divided by 16: start 1, 2, 4, 8"),
    "groups": ("Qwen3-30B-A3B", "int4", 4, "tensor",
               "rows of 768, of which 192 are no multiple of the group size 128: start 1, 2, or quantize again with "
               "--group_size 64"),
    "blocks": ("Qwen3-30B-A3B", "fp8b", 4, "tensor",
               "192 rows of a rank are no multiple of the group size 128: start 1, 2, or quantize again with "
               "--group_size 64"),
    "groups of 32": ("gpt-oss-20b", "mxfp4", 4, "tensor", "720 are no multiple of the group size 32: start 1, 2"),
    "blocks of what all heads are made of": (
        "DeepSeek-V2-Lite", "fp8b-bf16", 2, "tensor", "attention.wqkv: 576 rows of a rank are no multiple of the group "
        "size 128: start 1, or quantize again with --group_size 64",
    ),
    "heads of latent attention": (
        "DeepSeek-V2-Lite", "bf16", 3, "tensor", "16 (query heads) cannot be divided by 3: start 1, 2, 4, 8, 16",
    ),
    "words": ("Qwen1.5-MoE-A2.7B", "int8", 16, "tensor", "88 are no multiple of the group size 16: start 1, 2, 4, 8"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_cut_is_refused_with_what_would_do(case):
    arch, mode, ranks, parallel, message = REFUSALS[case]
    args = ARCHITECTURES[arch]
    with pytest.raises(ValueError) as error:
        tp.Part(args, number_format(mode, args), parallel, 0, ranks)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_group_size_of_a_refusal_would_do():
    args = ARCHITECTURES["Qwen3-30B-A3B"]
    assert tp.refusal(args, plan(args, "int4", "int4", group_size=64), 4, "tensor") is None


def test_other_ranks_experts_count_nothing(monkeypatch):
    """The local experts' results add up to those of all, for few tokens and for many, whatever stands in rows that a
    grouped product leaves undefined."""
    grouped = ExpertLinear.grouped

    def undefined_rows(self, x, group_ends):
        y = grouped(self, x, group_ends)
        return torch.where(torch.arange(len(y)).unsqueeze(-1) < group_ends[-1], y, float("nan"))

    monkeypatch.setattr(ExpertLinear, "grouped", undefined_rows)
    args, source = FAMILIES["olmoe"], RandomWeights(FAMILIES["olmoe"], {"name": "fp32"})
    whole = load_model(source, "cpu").layers[0].ffn
    for tokens in (1, 4, 40):
        x, sums = torch.randn(tokens, args.dim), 0.0
        chosen = whole.route(whole.router(x))
        for rank in range(4):
            part = tp.Part(args, source.format, "expert", rank, 4)
            experts = part.model.layers[0].ffn.experts
            for name in ("w13", "w2"):
                tensor = part.read(source, f"layers.0.ffn.experts.{name}.weight", "cpu")
                setattr(getattr(experts, name), "weight", torch.nn.Parameter(tensor, requires_grad=False))  # noqa: B010
            found = experts(x, *chosen)
            sums = sums + (weighted_sum(*found) if isinstance(found, Terms) else found)
        torch.testing.assert_close(sums, whole.experts(x, *chosen), rtol=1e-4, atol=1e-5)


# Commands -----------------------------------------------------------------------------------------------------------

ANSWER = "--max_new_tokens", "40", "--temperature", "0", "--dtype", "fp32", "--device", "cpu", "--ignore_eos"


@cache
def answer(*options: str) -> str:
    command = [sys.executable, "generate.py", *ANSWER, *map(str, options)]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True).stdout


def free_port() -> str:
    with socket.socket() as socket_:
        socket_.bind(("127.0.0.1", 0))
        return str(socket_.getsockname()[1])


def ranks_by_hand(*commands: list[str]) -> list[subprocess.Popen]:
    """A process for each command, as torchrun would start them, with no one who looks after them."""
    shared = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [
        subprocess.Popen(
            [sys.executable, "generate.py", *command], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared),
        )
        for rank, command in enumerate(commands)
    ]  # fmt: skip


def test_ranks_that_differ_are_told_so_in_one_line():
    processes = ranks_by_hand([*ANSWER], [*ANSWER, "--top_k", "7"])
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert outputs[0][1].splitlines() == ["error: ranks 0 and 1 differ in --top_k, 200 and 7: start all alike"]
    assert [out for out, _ in outputs] == ["", ""] and outputs[1][1] == ""


def test_torchrun_gives_the_same_text_and_only_rank_0_prints():
    process = torchrun(2, "generate.py", *ANSWER)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert out == answer()
    assert errors.count("new 40 tokens") == errors.count("tensor parallel on 2 ranks") == 1


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a rank's process through /proc")
@pytest.mark.parametrize("options", ((), pytest.param(("--device", "cuda", "--compile"), marks=pytest.mark.cuda)))
def test_a_killed_rank_ends_the_others_with_a_line(options):
    """On GPUs those that are left wait in a recorded kernel for numbers that will not come."""
    if options and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    process = torchrun(2, "generate.py", *ANSWER[2:], "--max_new_tokens", "2000", *options)
    assert process.stdout.read(20)  # the answer has begun
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    start = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - start < 30 and process.returncode != 0
    assert len([line for line in errors.splitlines() if line.startswith("error: ")]) == 1, errors
    assert "another process of this run has ended" in errors


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_within_30_seconds():
    """No agent looks after these; the stopped process keeps its connections, so that only its silence tells."""
    first, second = ranks_by_hand(*[[*ANSWER[2:], "--max_new_tokens", "2000"]] * 2)
    try:
        assert first.stdout.read(20)
        second.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        _, errors = first.communicate(timeout=60)
        assert time.monotonic() - start < 30 and first.returncode == 1
        assert errors.splitlines()[-1] == "error: rank 1 gives no sign of life: start all processes again"
    finally:
        second.kill()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """A function: the embedded model in a format, packed once."""

    @cache
    def make(format: str) -> Path:
        path = embedded_checkpoint()
        if format == "bf16":
            return path
        args = ModelArgs(**Checkpoint(path).args)
        group = None if FORMATS[format].per_row else 16 if format == "hqq2" else 32
        target = tmp_path_factory.mktemp("embedded") / format
        return quantize(path, plan(args, format, format, group_size=group), target, progress=False)

    return make


def check_same_text(path: Path, parallel: str, ranks: int, *options: str) -> None:
    """That model says the same on so many ranks as alone, where it can be cut."""
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
def test_torchrun_gives_the_same_text_from_the_embedded_model(format, parallel, ranks, embedded):
    check_same_text(embedded(format), parallel, ranks, "--prompt", "import os\n", "--prompt", "class A:")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", tp.PARALLEL)
def test_compiled_ranks_give_the_same_text(parallel):
    """Everything compiled: prompts of two lengths, sampling, an answer at a time."""
    options = *ANSWER, "--prompt", "import os\n", "--prompt", "class A:\n    def __init__(self", "--batch_size", "1"
    process = torchrun(2, "generate.py", *options, "--compile", "--compile_prefill", "--parallel", parallel)
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert out == answer(*options)


@pytest.mark.cuda
@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("parallel", tp.PARALLEL)
@pytest.mark.parametrize("format", ("bf16", "int8", "hqq4"))
def test_gpus_give_the_same_text_as_one(format, parallel, ranks, embedded):
    """Compiled and recorded, sums through whatever was measured as fastest; in fp32, so that no near-tie differs."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    check_same_text(embedded(format), parallel, ranks, "--device", "cuda", "--compile")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ("bf16", "fp32"))
def test_every_sum_of_gpus_has_the_same_bits_on_all(dtype):
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs 2 GPUs")
    process = torchrun(ranks, "benchmarks/all_reduce.py", "--dtype", dtype, "--json")
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    found = json.loads(out.splitlines()[-1])
    cells = [cell for row in found["rows"] + found["joins"] for cell in row.values() if isinstance(cell, dict)]
    assert found["joins"] and all(cell["same_bits"] for cell in cells)


@pytest.mark.slow
def test_two_hosts_are_two_agents():
    """Two torchrun agents on this machine, one process each, that meet as two hosts would."""
    meeting = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *meeting, "generate.py", *ANSWER],
            cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    outputs = [agent.communicate(timeout=180) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sorted(out for out, _ in outputs) == ["", answer()]
