"""What Inductor generates for CUDA, without a GPU."""

import copy
import itertools
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import smoke_diagonal
from cuda_codegen import QUICK_FORMATS

from benchmarks.generated_code import compare
from benchmarks.inductor_code import normalize
from benchmarks.speed_check import CASES, TABLE, find_problems, format_table
from formats import FORMATS
from models import ARCHITECTURES

SLOW = {"Qwen3-30B-A3B", "DeepSeek-V3"}  # but for some of the former's packed weights
ARCHES = ("Mixtral-8x7B", "Qwen3-30B-A3B")
LATENT = {"DeepSeek-V2-Lite": 18, "DeepSeek-V3": 23}  # kernels of a block


def by_speed(*arches: str) -> list:
    """Return the architectures as pytest parameters, those whose cases are slow marked so."""
    return [pytest.param(arch, marks=pytest.mark.slow if arch in SLOW else ()) for arch in arches]


@cache
def run_cuda_codegen(kind: str) -> subprocess.CompletedProcess:
    """Run it in a process of its own, because it patches torch; once, even if it fails."""
    root = Path(__file__).parents[1]
    command = [sys.executable, root / "tests" / "cuda_codegen.py", kind]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def summaries(kind: str) -> dict[str, dict]:
    """Return the summary of each case, quick or slow."""
    pytest.importorskip("triton", reason="Inductor's CUDA code needs triton")
    run = run_cuda_codegen(kind)
    if run.returncode and re.match(r"(Import|Attribute)Error.*torch", run.stderr.splitlines()[-1]):
        pytest.skip(f"Inductor's private API has changed: {run.stderr.splitlines()[-1]}")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def generated(case: str) -> dict:
    """Return the summary of one case."""
    quick = summaries("quick")
    return quick[case] if case in quick else summaries("slow")[case]


@pytest.mark.parametrize("arch", by_speed(*ARCHES, "gpt-oss-20b", *LATENT))
def test_one_token_reads_its_experts_without_copying_them(arch):
    args, found = ARCHITECTURES[arch], generated(f"{arch} experts")
    assert found["extern"] == []
    # w13 with SwiGLU, w2, and the weighted sum, which in a block is part of the next kernel
    assert found["triton"] == 3
    assert found["largest_buffer"] == args.n_active * max(args.intermediate, args.dim)


@pytest.mark.parametrize("arch", by_speed(*ARCHES))
def test_the_assertion_fails_for_a_formulation_that_does_not_fuse(arch):
    args, found = ARCHITECTURES[arch], generated(f"{arch} library_products")
    assert found["extern"] != []
    gathered_weights = args.n_active * 2 * args.intermediate * args.dim
    assert found["largest_buffer"] >= gathered_weights


@pytest.mark.parametrize(
    ("arch", "mode"),
    [
        *smoke_diagonal(ARCHES, QUICK_FORMATS),
        *(
            pytest.param(arch, mode, marks=pytest.mark.slow)
            for arch, mode in itertools.product(ARCHES, FORMATS)
            if mode not in QUICK_FORMATS
        ),
    ],
)
def test_packed_weights_are_not_unpacked_to_memory(arch, mode):
    """No library call, and no buffer as large as one expert's packed weights."""
    args = ARCHITECTURES[arch]
    experts = generated(f"{arch} packed_experts {mode}")
    linear = generated(f"{arch} packed_linear {mode}")
    assert experts["extern"] == linear["extern"] == []
    assert experts["triton"] <= 8 and linear["triton"] <= 4
    # the outputs of w13 and w2
    assert experts["largest_buffer"] <= args.n_active * max(2 * args.intermediate, args.dim)
    assert linear["largest_buffer"] <= 4 * args.n_head * args.head_dim
    # Integer products where they pay: 8 bits in Mixtral's shapes. Fewer bits have a kernel.
    integer = mode == "int8" and arch == "Mixtral-8x7B"
    assert bool(experts["integer_products"]) == bool(linear["integer_products"]) == integer


def test_a_few_tokens_have_their_own_kernel_whatever_their_number():
    """In 4 bits. More tokens are a prompt."""
    few, many = generated("tokens 4"), generated("tokens 17")
    assert few["custom"] == ["dot4"] and few["triton"] == 0
    assert many["custom"] == ["grouped_packed"]


def test_what_comes_before_the_layers_is_one_kernel():
    """Embedding, RoPE and the masks of two windows; it waits for the kernel before it."""
    found = generated("gpt-oss-20b begin")
    assert found["triton"] == 1 and found["extern"] == found["early"] == []


def test_gpt_oss_reads_mxfp4_as_it_is():
    """The kernel for one token, then biases and SwiGLU; no buffer as large as an expert's codes."""
    args, found = ARCHITECTURES["gpt-oss-20b"], generated("gpt-oss-20b packed_experts mxfp4")
    assert found["extern"] == [] and found["triton"] <= 8
    assert found["largest_buffer"] <= args.n_active * 2 * args.intermediate  # the output of w13


@pytest.mark.parametrize(
    "arch", (*by_speed(*ARCHES), pytest.param("gpt-oss-20b", marks=pytest.mark.slow))
)
def test_a_block_is_few_kernels_and_copies_no_weight(arch):
    case = f"{arch} block" if arch == "gpt-oss-20b" else f"{arch} block KVCache"
    args, found = ARCHITECTURES[arch], generated(case)
    assert found["triton"] + len(found["extern"]) <= 14
    # The biases of gpt-oss do not turn products into library calls.
    assert arch != "gpt-oss-20b" or found["extern"] == []
    assert found["largest_buffer"] < args.dim * args.dim


@pytest.mark.parametrize("arch", by_speed(*LATENT))
@pytest.mark.parametrize("name", ("Int8KVCache", pytest.param("KVCache", marks=pytest.mark.slow)))
def test_latent_attention_reads_its_cache_as_it_is(name, arch):
    """The cache, plain or int8, is neither copied nor expanded to keys and values of heads."""
    args, found = ARCHITECTURES[arch], generated(f"{arch} block {name}")
    assert found["extern"] == [] and found["triton"] <= LATENT[arch]
    scores = args.n_head * 1024
    assert found["largest_buffer"] == max(scores, args.n_active * args.intermediate)
    assert found["rounded"] == (name == "Int8KVCache")


@pytest.mark.parametrize(
    "queries", (1, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 32)))
)
def test_few_queries_over_a_long_cache_have_a_kernel(queries):
    """Qwen3-30B-A3B has 8 query heads per KV head: 32 queries are more rows than a block has."""
    found = generated(f"long_attention {queries}")
    assert found["extern"] == [] and found["triton"] >= 3  # it was compiled: nothing was raised


def test_ranks_communicate_twice_a_block():
    """Two custom operators all-reduce, with residual, norm and the router's scores included.

    One more is all of attention between its products. The experts' weighted sum is a kernel.
    """
    found = generated("Mixtral-8x7B block of 2")
    assert found["custom"] == ["attend_tokens", "sum_and_join", "sum_and_join"]
    assert found["triton"] == 6 and not found["extern"]


@pytest.mark.slow
def test_norms_over_all_heads_communicate_twice_more():
    """They also prevent one operator for all of attention."""
    found = generated("OLMoE-1B-7B block of 2")
    assert found["custom"] == ["all_reduce", "all_reduce", "sum_and_join", "sum_and_join"]
    assert found["triton"] == 15 and not found["extern"]


@pytest.mark.slow
@pytest.mark.parametrize("cache_class", ("KVCache", "Int8KVCache"))
def test_a_step_reads_what_an_index_chooses(cache_class):
    """It copies no state, reads none before it is written, and has no library calls."""
    args, found = ARCHITECTURES["Qwen3.8-Flash-Next"], generated(f"indexed_attention {cache_class}")
    assert found["extern"] == found["early"] == []
    # The largest are the scores of all heads; in PyTorch 2.11 the chosen keys and values. A cache
    # of 32,768 positions would be 16 times as large.
    chosen = 2 * args.n_kv_head * args.head_dim * args.index_sizes.reach
    assert found["largest_buffer"] in (args.n_head * args.index_sizes.reach, chosen)
    assert found["triton"] <= 23


@pytest.mark.slow
@pytest.mark.parametrize("format", (None, "fp8"))
def test_a_step_looks_n_grams_up_without_a_copy(format):
    args, found = ARCHITECTURES["Qwen3.8-Flash-Next"], generated(f"ngrams {format}")
    assert found["extern"] == found["early"] == []
    # The convolution's inputs, of which the ring has 128
    assert found["largest_buffer"] == args.ngram_sizes.reach * args.streams * args.dim
    assert found["triton"] <= 12  # in PyTorch 2.13 it is 10


@pytest.mark.slow
def test_streams_are_mixed_in_two_kernels_beside_the_products():
    """Sum, norm and what makes the streams' weights; the mean over streams."""
    found = generated("between sublayers")
    assert found["triton"] == 2 and found["extern"] == found["early"] == []


@pytest.mark.parametrize(
    ("kind", "arch"),
    [("quick", ARCHES[0]), pytest.param("slow", ARCHES[1], marks=pytest.mark.slow)],
)
def test_no_kernel_reads_what_the_one_before_it_may_still_be_writing(kind, arch):
    found = summaries(kind)
    early = {case: found[case]["early"] for case in found if "Copied" not in case}
    wrong = early.pop(f"{arch} early_reader")
    assert "_tensor_constant" in wrong[0]  # the cache, read too early
    assert not any(early.values()), early


@pytest.mark.parametrize("arch", by_speed(*ARCHES))
@pytest.mark.parametrize("candidates", ("0", "all"))
def test_choosing_a_token_is_no_scan_of_a_long_row(arch, candidates):
    """PyTorch 2.11 fails to compile one that is fused with an argmax."""
    found = generated(f"{arch} sampling {candidates}")
    assert found["split_scans"] == 0 and found["extern"] == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_an_int8_cache_is_read_as_it_is_in_no_more_kernels(arch):
    """No buffer is as large as the keys of its 1024 positions."""
    args = ARCHITECTURES[arch]
    plain, int8 = (generated(f"{arch} block {name}") for name in ("KVCache", "Int8KVCache"))
    assert int8["extern"] == [] and int8["triton"] <= plain["triton"]
    assert int8["largest_buffer"] == args.n_head * 1024  # the scores
    assert int8["rounded"] == 1  # codes are made with the scale that is stored


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_the_assertion_fails_for_a_cache_that_is_copied(arch):
    args, copied = ARCHITECTURES[arch], generated(f"{arch} block CopiedKVCache")
    assert copied["largest_buffer"] == args.n_kv_head * 1024 * args.head_dim


# The tools that compare code and speed -----------------------------------------------------------

GENERATED = '''
triton_red_fused_mul_{n} = async_compile.triton("triton_red_fused_mul_{n}", """
@triton_heuristics.reduction(size_hints={{'x': 8}}, inductor_meta={{'kernel_name': 'x{n}', 'a': 1}})
@triton.jit
def triton_red_fused_mul_{n}(in_ptr0, out_ptr0):
    tmp{n} = tl.load(in_ptr0) * {factor}  # a comment
    tl.store(out_ptr0, tmp{n})
""", device_str="cuda")
def call(args):
    unused, arg{n}_1 = args
    args.clear()
    assert_size_stride(arg{n}_1, (8, ), (1, ), 'input')
    with torch.cuda._DeviceGuard(0):
        buf{n} = empty_strided_cuda((8, ), (1, ), torch.float32)
        triton_red_fused_mul_{n}.run(arg{n}_1, buf{n}, 8, stream=raw_stream0)
        del arg{n}_1
        return (buf{n}, )
'''


def test_normalized_code_keeps_what_runs_and_not_the_names():
    first, second = (normalize(GENERATED.format(n=n, factor=2)) for n in (0, 7))
    assert first == second
    assert "kernel_0.run(input0, buf0, 8)" in first and "input0: (8,), (1,)" in first
    assert "comment" not in first and "'a': 1" in first and "kernel_name" not in first
    assert normalize(GENERATED.format(n=0, factor=3)) != first


def test_two_dumps_are_compared_stage_by_stage(tmp_path, capsys):
    before, after = tmp_path / "before", tmp_path / "after"
    for folder, line in ((before, "a"), (after, "b")):
        folder.mkdir()
        (folder / "case.txt").write_text(f"=== begin\nx\n=== block\n{line}\nx\n")
    assert compare(before, before, ["case"], show_diff=False) == 0
    assert compare(before, after, ["case"], show_diff=True) == 1
    printed = capsys.readouterr().out
    assert "-1 +1" in printed and "+b" in printed and "1 stages differ" in printed


def test_speed_check_finds_what_is_slower_or_recompiles_more():
    table = json.loads(TABLE.read_text())
    assert [(row["arch"], row["mode"]) for row in table["rows"]] == list(CASES)
    now = copy.deepcopy(table)
    now["rows"][0]["tok_s"] *= 0.98
    assert find_problems(now, table) == []
    assert "-2.0%" in format_table(now, table)
    now["rows"][0]["tok_s"] *= 0.98
    now["rows"][1]["graphs"] += 1
    slower, more = find_problems(now, table)
    assert "Mixtral-8x7B int8 is 4.0% slower" in slower and "5 graphs instead of 4" in more
    now["rows"][0]["layers"] += 1  # of another depth: not compared
    assert len(find_problems(now, table)) == 1
    assert "new" in format_table(now, {})
