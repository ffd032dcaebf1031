"""What Inductor generates for CUDA, seen without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from packing import FORMATS
from shapes import ARCHITECTURES

ARCHES = ("Mixtral-8x7B", "Qwen3-30B-A3B")
LATENT = {"DeepSeek-V2-Lite": 18, "DeepSeek-V3": 23}  # kernels of a block


@pytest.fixture(scope="module")
def generated() -> dict:
    """Case -> kernels, library calls and largest buffer, from a process of its own (it patches torch.cuda)."""
    pytest.importorskip("triton", reason="Inductor's CUDA code needs triton")
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, root / "tests" / "cuda_codegen.py"], cwd=root, capture_output=True, text=True)
    if run.returncode and ("ImportError" in run.stderr or "AttributeError" in run.stderr):
        pytest.skip(f"Inductor's private API has changed: {run.stderr.splitlines()[-1]}")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("arch", (*ARCHES, "gpt-oss-20b", *LATENT))
def test_one_token_reads_its_experts_without_copying_them(arch, generated):
    args, found = ARCHITECTURES[arch], generated[f"{arch} experts"]
    assert found["extern"] == []
    assert found["triton"] == 3  # w13 with SwiGLU, w2, and the sum over A, which in a block is part of the next kernel
    assert found["largest_buffer"] == args.n_active * max(args.intermediate, args.dim)  # what w13 and w2 give


@pytest.mark.parametrize("arch", ARCHES)
def test_the_assertion_fails_for_a_formulation_that_does_not_fuse(arch, generated):
    args, found = ARCHITECTURES[arch], generated[f"{arch} library_products"]
    assert found["extern"] != []
    assert found["largest_buffer"] >= args.n_active * 2 * args.intermediate * args.dim  # the gathered weights


@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("arch", ARCHES)
def test_packed_weights_are_read_as_they_are(arch, mode, generated):
    """No library call, and no buffer as large as one expert's packed weights, let alone its unpacked ones."""
    args = ARCHITECTURES[arch]
    experts, linear = generated[f"{arch} packed_experts {mode}"], generated[f"{arch} packed_linear {mode}"]
    assert experts["extern"] == linear["extern"] == []
    assert experts["triton"] <= 8 and linear["triton"] <= 4
    assert experts["largest_buffer"] <= args.n_active * max(2 * args.intermediate, args.dim)  # what w13 and w2 give
    assert linear["largest_buffer"] <= 4 * args.n_head * args.head_dim
    # As bytes where it pays: of 8 bits Mixtral's matrices. Four bits have a kernel of ours, which does so too.
    by_bytes = mode in ("hqq3", "hqq2") or (mode == "int8" and arch == "Mixtral-8x7B")
    assert bool(experts["as_bytes"]) == bool(linear["as_bytes"]) == by_bytes


def test_gpt_oss_reads_mxfp4_as_it_is(generated):
    """The kernel for one token, then biases and SwiGLU; no buffer is as large as one expert's packed weights."""
    args, found = ARCHITECTURES["gpt-oss-20b"], generated["gpt-oss-20b packed_experts mxfp4"]
    assert found["extern"] == [] and found["triton"] <= 8
    assert found["largest_buffer"] <= args.n_active * 2 * args.intermediate  # what w13 gives


@pytest.mark.parametrize("arch", (*ARCHES, "gpt-oss-20b"))
def test_a_block_is_few_kernels_and_copies_no_weight(arch, generated):
    args, found = ARCHITECTURES[arch], generated[f"{arch} block"]
    assert found["triton"] + len(found["extern"]) <= 14
    assert arch != "gpt-oss-20b" or found["extern"] == []  # its biases do not make library calls of products
    assert found["largest_buffer"] < args.dim * args.dim


@pytest.mark.parametrize("arch", LATENT)
def test_latent_attention_reads_its_cache_as_it_is(arch, generated):
    """1024 positions of 576 numbers, none of which is copied or made into keys and values of heads, int8 or not."""
    args = ARCHITECTURES[arch]
    for kind in ("KVCache", "Int8KVCache"):
        found = generated[f"{arch} block {kind}"]
        assert found["extern"] == [] and found["triton"] <= LATENT[arch]
        assert found["largest_buffer"] == max(args.n_head * 1024, args.n_active * args.intermediate)  # scores
        assert found["rounded"] == (kind == "Int8KVCache")


def test_ranks_sum_twice_a_block(generated):
    """What ranks do together is two of our operators, the sum over A and the router's scores included; all between the
    attention's products is one more. OLMoE's norms over all heads are two sums more, and keep it apart."""
    found = [generated[f"{arch} block of 2"] for arch in ("Mixtral-8x7B", "OLMoE-1B-7B")]
    together = ["sum_and_join", "sum_and_join"]
    assert [case["ours"] for case in found] == [["attend_token", *together], ["all_reduce", "all_reduce", *together]]
    assert [case["triton"] for case in found] == [5, 14] and not any(case["extern"] for case in found)


def test_no_kernel_reads_what_the_one_before_it_may_still_be_writing(generated):
    early = {case: found["early"] for case, found in generated.items() if "Copied" not in case}
    wrong = [early.pop(f"{arch} early_reader") for arch in ARCHES]
    assert all(
        "_tensor_constant" in reads[0] for reads in wrong
    )  # the check finds the cache where it is read too early
    assert not any(early.values()), early


@pytest.mark.parametrize("arch", ARCHES)
def test_an_int8_cache_is_read_as_it_is_in_as_many_kernels(arch, generated):
    """No buffer is as large as the keys of its 1024 positions, which the cache to avoid does have."""
    args, plain = ARCHITECTURES[arch], generated[f"{arch} block KVCache"]
    int8, copied = (generated[f"{arch} block {name}"] for name in ("Int8KVCache", "CopiedKVCache"))
    assert int8["extern"] == [] and int8["triton"] <= plain["triton"]
    assert int8["largest_buffer"] == args.n_head * 1024  # the scores
    assert int8["rounded"] == 1  # codes are made with the scale that is stored
    assert copied["largest_buffer"] == args.n_kv_head * 1024 * args.head_dim
