"""Machine code for an H200 of the kernels that a call launches; needs no GPU."""

import os
import re
import types
from collections.abc import Callable
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.tools import disasm

from ops import launch

# Triton 3.6 reads no more than 4,096 instructions: addresses of four digits.
disasm.FLINE_RE = re.compile(disasm.FLINE_RE.pattern.replace("{4}", "{4,}"))


def launched_code(call: Callable[[], object]) -> dict[str, object]:
    """Return the compiled kernels that a call launches, by name. Nothing runs; PDL is used."""
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    pdl = mock.patch.object(launch, "gpu_has_pdl", lambda device: True)
    pretended = mock.patch.dict(os.environ, MOE_FAST_GPU="sm_90")
    with pdl, pretended, launch.compile_only() as recorded:
        call()
    return {kernel.__name__: code for kernel, code, _ in recorded}
