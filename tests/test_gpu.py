"""What kernels use of a GPU: GPUs that are not here, and kernels that cannot run on one."""

import argparse
import copy
import logging

import pytest
import torch
from torch import Tensor

from formats import FORMATS
from formats.packed import GATED, ROWS, TOKEN, Request, choose, rows_by_expert, rows_kernel
from formats.quantizer import pack_weight
from model import Block, Transformer
from models import ARCHITECTURES, build_model
from models.random_weights import first_layers, number_format
from ops import gpu
from ops import launch as jit
from ops.attention.prompts import attends_prompt
from ops.gpu import KNOWN, OTHER_MAKER, gpu_of
from ops.launch import KernelError, fit, gpu_has_pdl, try_kernels
from ops.products import prompt
from runtime.fused_prompt import PromptRunner
from runtime.kernel_choice import why_not_fused
from runtime.runner import CompiledRunner, EagerRunner, run_block, without_broken_kernels
from tests.without_gpu import run_without_gpu

DEVICE = torch.device("cuda", 0)


class OnGpu(Tensor):
    """A tensor on the CPU that claims to be on a GPU."""

    is_cuda = True
    device = DEVICE


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(*shape, dtype=dtype).as_subclass(OnGpu)


@pytest.fixture
def become(monkeypatch):
    """Return a function that puts a GPU in place 0. No kernel is broken on it."""
    monkeypatch.setattr(jit, "broken", set())
    monkeypatch.setattr("runtime.runner.broken", jit.broken)
    return lambda gpu_there: monkeypatch.setitem(gpu.found, 0, gpu_there)


def properties(**values):
    return argparse.Namespace(**{"multi_processor_count": 110, "major": 9, "minor": 4} | values)


def test_an_amd_gpu_has_no_kernels(monkeypatch):
    """Its architecture, gfx942, passes for compute capability 9.4."""
    monkeypatch.setattr(gpu, "found", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties())
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found = gpu_of(DEVICE)
    assert found.multiprocessors == 110
    assert not any((found.runs_kernels, found.has_pdl))
    assert str(found) == "not an NVIDIA GPU"
    assert not jit.can_launch(on_gpu(1)) and not gpu_has_pdl(DEVICE)
    args = first_layers(ARCHITECTURES["Qwen3-30B-A3B"], 1)
    assert why_not_fused(build_model(args).to(torch.bfloat16), DEVICE)


@pytest.mark.parametrize(
    ("name", "major", "minor", "optin"),
    [(name, *known.capability, known.shared_memory) for name, known in KNOWN.items()],
)
def test_a_gpu_is_read_and_pretended(monkeypatch, name, major, minor, optin):
    real = properties(major=major, minor=minor, shared_memory_per_block_optin=optin)
    monkeypatch.setattr(gpu, "found", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: real)
    assert gpu_of(DEVICE) == KNOWN[name]._replace(multiprocessors=110)
    large = properties(major=9, minor=0, shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: large)
    monkeypatch.setattr(gpu, "found", {})
    monkeypatch.setenv("MOE_FAST_GPU", name)
    assert gpu_of(DEVICE) == KNOWN[name]._replace(multiprocessors=110)


def test_an_unknown_gpu_cannot_be_pretended(monkeypatch):
    monkeypatch.setenv("MOE_FAST_GPU", "sm_1")
    with pytest.raises(ValueError, match=r"MOE_FAST_GPU=sm_1: not one of sm_75, sm_80"):
        gpu_of(torch.device("cpu"))


@pytest.mark.parametrize("there", (OTHER_MAKER, KNOWN["sm_75"]))
@pytest.mark.parametrize("name", FORMATS)
def test_without_kernels_the_plain_form_multiplies(become, there, name):
    become(there)
    group = FORMATS[name].choose_group(256, None if FORMATS[name].has_own_group else 32)
    codes = torch.empty(
        FORMATS[name].layout((2, 64, 256), group)["codes"][0], dtype=torch.int32, device="meta"
    )
    for product in (TOKEN, GATED, ROWS):
        row = choose(Request(product, FORMATS[name], on_gpu(1, 256), codes, group))
        assert row.device == "any", (product, row.name)
    runner = EagerRunner(argparse.Namespace(norm=argparse.Namespace(weight=on_gpu(1))))
    # The host reads where each expert's rows end.
    assert runner.can_capture(1) and not runner.can_capture(2)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("rows", (8, 400, 4096))
def test_bf16_prompts_take_the_library_where_it_has_a_kernel(become, monkeypatch, name, rows):
    become(KNOWN[name])
    taken = []
    for owner, form in ((prompt, "grouped_gemm"), (prompt.F, "grouped_mm")):
        monkeypatch.setattr(owner, form, lambda *_, form=form, **__: taken.append(form))
    weight = on_gpu(1, 1, 1).expand(8, 28672, 4096)
    prompt.grouped_mm(on_gpu(1, 1).expand(rows, 4096), weight, torch.zeros(8))
    few, has_kernels = rows < 1024, KNOWN[name].runs_kernels
    by_library = not has_kernels or (name in ("sm_90", "sm_100") and not few)
    assert taken == ["grouped_mm" if by_library else "grouped_gemm"]


@pytest.mark.parametrize(
    ("weight", "rows", "fused", "kernel"),
    (
        # Rows of an expert; us of the kernel and of the library, with what is around it.
        ((128, 1536, 2048), 128, True, 282 < 408),  # w13 of Qwen3-30B-A3B
        ((128, 1536, 2048), 512, True, 816 < 867),
        ((128, 1536, 2048), 1024, True, 1547 < 1643),
        ((128, 2048, 768), 128, False, 150 < 203),  # w2
        ((128, 2048, 768), 512, False, 425 < 441),
        ((8, 28672, 4096), 50, True, 470 < 611),  # Mixtral 8x7B
        ((8, 28672, 4096), 256, True, 1038 < 977),
        ((8, 28672, 4096), 512, True, 1976 < 1602),
        ((8, 28672, 4096), 2048, True, 7712 < 5852),
        ((8, 4096, 14336), 50, False, 239 < 330),
        ((8, 4096, 14336), 256, False, 594 < 497),
        ((8, 4096, 14336), 2048, False, 4034 < 2886),
    ),
)
def test_the_faster_product_of_plain_weights_is_chosen(become, weight, rows, fused, kernel):
    """As measured on an H200 (docs/log/prompts.md)."""
    become(KNOWN["sm_90"])
    experts = on_gpu(1, 1, 1).expand(weight)
    assert prompt.prefers_kernel(on_gpu(1), rows * weight[0], experts, fused) == kernel


@pytest.mark.parametrize(
    ("Q", "S", "C", "window", "dtype", "hopper", "others"),
    (
        (200, 200, 128, None, torch.bfloat16, True, True),  # short
        (2048, 2048, 128, 128, torch.bfloat16, True, True),
        (2048, 2048, 128, None, torch.bfloat16, False, False),  # a length that comes again
        (2048, 4096, 128, None, torch.bfloat16, True, False),
        (200, 4096, 128, None, torch.bfloat16, True, False),
        (200, 4096, 256, None, torch.bfloat16, False, False),
        (3000, 3000, 256, None, torch.float16, True, False),
        (3000, 3000, 256, None, torch.float32, False, False),
        (9000, 9000, 128, None, torch.bfloat16, False, False),
        (9000, 9000, 80, 128, torch.bfloat16, False, False),
    ),
)
@pytest.mark.parametrize("name", KNOWN)
def test_a_chunks_attention_is_chosen(become, name, Q, S, C, window, dtype, hopper, others):
    become(KNOWN[name])
    q = on_gpu(1, dtype=dtype).expand(Q, 4, C)
    assert attends_prompt(q, S, window, None) == (hopper if name == "sm_90" else others)


# Kernels that cannot run --------------------------------------------------------------------------


def fail(*_, **options):
    raise KernelError("_grouped", "it needs more than there is")


def test_the_first_tiling_that_fits_is_taken(become):
    become(KNOWN["sm_86"])

    class Stub(jit.Kernel):
        def __init__(self):
            self.fitting, self.compiled, self.__name__ = {}, [], "_stub"
            self.arg_names = ["x", "s"]

        def compile_for(self, x, size: int, *, num_warps: int):
            self.compiled.append(size)
            if size == 4:
                raise KernelError("_stub", "PTXAS error")
            metadata = argparse.Namespace(shared=size << 14)
            return argparse.Namespace(metadata=metadata)

    kernel, candidates = Stub(), [(size, {"warps": 2}) for size in (16, 4, 6, 2)]
    for _ in range(2):  # the second time nothing is compiled
        assert fit(kernel, iter(candidates), on_gpu(1)) == (6, {"warps": 2})
    assert kernel.compiled == [16, 4, 6]
    with pytest.raises(KernelError, match="_stub: no tiling fits into 101376 bytes"):
        fit(kernel, [(20, {})], on_gpu(1))
    with pytest.raises(KernelError, match="_stub: PTXAS error"):
        fit(kernel, [(4, {})], on_gpu(1))


@pytest.mark.skipif(jit.triton is None, reason="needs Triton")
def test_a_kernels_source_is_read_once_when_it_is_needed(monkeypatch):
    read = []

    def make(self, function, **options):
        read.append(function.__name__)
        self.__name__, self.raw_src = function.__name__, ["def"]

    monkeypatch.setattr(jit.triton.JITFunction, "__init__", make)
    kernel = jit.Kernel(become)
    assert kernel.__doc__ == become.__doc__ and kernel.__module__ == __name__ and not read
    assert (kernel.__name__, kernel.raw_src) == ("become", ["def"]) and read == ["become"]
    with pytest.raises(AttributeError, match="no_such"):
        _ = kernel.no_such
    assert read == ["become"]
    assert not hasattr(copy.copy(kernel), "no_such")


def test_a_repeated_launch_is_the_one_that_triton_makes():
    found = run_without_gpu("launches_without_gpu.py")
    # Integers 48 and 2 need the code of 16 and 17; fp16 and fp32, and so on, code of their own.
    assert (found["cases"], found["first"], found["second"]) == (17, 15, 0), found
    assert found["by Triton"] == 17 and found["codes"] == 14 and found["same"], found
    assert (found["hooked"], found["after it"], found["not run"]) == (1, 0, [1, 1, 0]), found
    error = "Triton Error [CUDA]: "
    assert found["invalid argument"] == f"KernelError: _add: {error}invalid argument"
    illegal = "an illegal memory access"
    assert found[illegal] == f"RuntimeError: {error}{illegal}"
    assert "bytes of shared memory, of which there are 0" in found["a smaller GPU"]


def test_a_kernel_that_fails_is_replaced_once_and_logged_once(become, caplog):
    become(KNOWN["sm_86"])
    tried = []
    with caplog.at_level(logging.WARNING, "moe_fast"):
        for _ in range(3):
            assert try_kernels("use", lambda x: tried.append(x) or fail(), lambda x: -x, 5) == -5
    assert tried == [5]
    assert [record.message for record in caplog.records] == [
        "use: a plain form replaces kernels that cannot run here "
        "(_grouped: it needs more than there is)"
    ]


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].kind])
def test_packed_prompts_go_on_without_the_grouped_kernel(become, monkeypatch, name):
    """x is already in the order that the kernel reads."""
    become(KNOWN["sm_86"])
    monkeypatch.setattr("formats.packed.grouped_gemm", fail)
    group = FORMATS[name].choose_group(256, None if FORMATS[name].has_own_group else 64)
    spec = {"format": name, "group_size": group}
    parts = pack_weight(torch.randn(3, 32, 256), spec, torch.device("cpu"))
    x, ends = torch.randn(10, 256), torch.tensor([3, 3, 10])
    ordered = FORMATS[name].grouped_order(x, group)
    found = rows_kernel(ordered, ends, parts, FORMATS[name], group)
    torch.testing.assert_close(found, rows_by_expert(x, ends, parts, FORMATS[name], group))
    assert not EagerRunner(build_small()).can_capture(8)


def build_small() -> Transformer:
    return build_model(first_layers(ARCHITECTURES["TinyMistral-6x248M"], 1))


@pytest.mark.parametrize(
    "error", (KernelError("_multiply_sum", "PTXAS error"), RuntimeError("other"))
)
def test_a_block_begins_again_without_the_kernel(become, error):
    become(KNOWN["sm_86"])
    calls = []

    class Failing(Block):
        def __init__(self):
            torch.nn.Module.__init__(self)

        def forward(self, x, *_):
            calls.append(set(jit.broken))
            if "_multiply_sum" not in jit.broken:
                raise error
            return x

    runner = EagerRunner(build_small())
    if isinstance(error, KernelError):
        assert runner.block(Failing(), 7, None, None, None) == 7
        assert calls == [set(), {"_multiply_sum"}]
    else:
        with pytest.raises(RuntimeError, match="other"):
            runner.block(Failing(), 7, None, None, None)


def test_a_kernel_that_is_called_all_the_same_ends_the_call(become):
    become(KNOWN["sm_86"])
    with pytest.raises(KernelError):
        without_broken_kernels(fail)


def test_compiled_code_is_made_again_without_the_kernel(become):
    """Dynamo has to see that `broken` has changed."""
    become(KNOWN["sm_86"])

    @torch.library.custom_op("moe_fast_test::fails", mutates_args=())
    def fails(x: Tensor) -> Tensor:
        raise KernelError("_fails", "it does not compile")

    fails.register_fake(lambda x: torch.empty_like(x))

    class Choosing(torch.nn.Module):
        def forward(self, x, *_):
            return x + 1 if "_fails" in jit.broken else fails(x)

    runner = CompiledRunner(build_small())
    runner.compiled_block = runner.compile(run_block, backend="eager")
    found = runner.block(Choosing(), torch.ones(1, 1, 3), None, None, None)
    assert found.tolist() == [[[2, 2, 2]]]


def test_a_prompts_logits_go_on_without_the_heads_kernel(become, monkeypatch):
    become(KNOWN["sm_86"])
    monkeypatch.setattr("runtime.fused_prompt.can_launch", lambda x, name: name not in jit.broken)
    model, tried = build_small(), []
    weight = torch.randn(model.args.vocab_size, model.args.dim).half()
    model.head.weight = torch.nn.Parameter(weight, requires_grad=False)

    class Head:
        def of_normed(self, x):
            tried.append(x)
            raise KernelError("_multiply_sum", "PTXAS error")

    runner, normed = PromptRunner(model, {}, Head()), torch.randn(1, 4, model.args.dim).half()
    last = torch.tensor([2])
    for _ in range(2):
        torch.testing.assert_close(runner.logits(model, normed, last), model.logits(normed, last))
    assert len(tried) == 1 and tried[0].equal(normed[0, 2:3])


# Launches of all models ---------------------------------------------------------------------------


def check_launches(gpus: tuple[str, ...], cases: tuple[str, ...], quick: bool = False) -> set[str]:
    """Return the names of the kernels."""
    names: set[str] = set()
    found = run_without_gpu("gpu_launches.py", given={"gpus": gpus, "cases": cases, "quick": quick})
    for name in gpus:
        for case in cases:
            assert not found[name][case]["refused"], (name, case)
            kernels = found[name][case]["kernels"]
            assert kernels and max(kernels.values()) <= KNOWN[name].shared_memory, (name, case)
            names |= set(kernels)
    return names


@pytest.mark.slow
def test_launches_fit_a_smaller_gpu():
    """A prompt whose largest tiles take 145 KB on a Hopper GPU, and one token without PDL."""
    kernels = check_launches(("sm_86",), ("Qwen3.6-35B-A3B:int4",), quick=True)
    # A prompt takes in what is pending of a pass; passes have kernels of their own.
    assert {"_update_heads", "_begin_pass", "_check_drafts", "_accept"} < kernels
    assert {"_multiply_sum", "_multiply_each", "attend_kernel", "join_tokens"} < kernels


@pytest.mark.slow
def test_an_old_gpu_launches_nothing():
    given = {"gpus": ["sm_75"], "cases": ["Qwen3.6-35B-A3B:bf16"], "quick": True}
    found = run_without_gpu("gpu_launches.py", given=given)
    assert found["sm_75"]["Qwen3.6-35B-A3B:bf16"] == {"kernels": {}, "refused": {}}


MODES = "bf16", *FORMATS


# As the files UD-Q4_K_XL and Q4_K_M have their shared experts
MIXED = "Qwen3.6-35B-A3B:q4_k+q8_0", "GLM-4.5-Air:q5_k+q6_k", "Qwen1.5-MoE-A2.7B:q4_0+bf16"


@pytest.mark.slow
@pytest.mark.parametrize("case", MIXED)
def test_launches_of_shared_experts_in_another_format_fit(case):
    assert {"_multiply_each", "_multiply_tiles"} < check_launches(("sm_90",), (case,))


AMD_CASES = (
    "Qwen3-30B-A3B:bf16",
    "Qwen3-30B-A3B:int8",
    "Qwen3-30B-A3B:int4",
    "Mixtral-8x7B:hqq4",
    "gpt-oss-20b:mxfp4",
    "GLM-4.7-Flash:fp8",
    "Qwen3.6-35B-A3B:q4_k",
    "OLMoE-1B-7B:nvfp4",
)


@pytest.mark.slow
@pytest.mark.parametrize("gpu_name", ("gfx942", "gfx1100"))
@pytest.mark.parametrize("case", AMD_CASES)
def test_launches_compile_for_amd(gpu_name, case):
    """One token and a prompt, by Triton's own back end to machine code. None was run there."""
    pytest.importorskip("triton.backends.amd", reason="Triton without AMD's back end")
    kernels = check_launches((gpu_name,), (case,), quick=True)
    assert {"_multiply_sum", "_multiply_each", "join_tokens"} < kernels


@pytest.mark.slow
@pytest.mark.parametrize("gpu_name", ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"))
@pytest.mark.parametrize("case", [f"{name}:{mode}" for name in ARCHITECTURES for mode in MODES])
def test_launches_of_all_models_fit(gpu_name, case):
    name, mode = case.split(":")
    try:
        number_format(mode, ARCHITECTURES[name])
    except ValueError as error:
        pytest.skip(f"groups do not divide the model's rows: {error}")
    check_launches((gpu_name,), (case,))
