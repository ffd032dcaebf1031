"""Tokens that a step writes to host memory, as a Triton kernel.

A copy to the host between two steps costs 11 us on an H200: the next graph waits for the copy
engine, and that for the graph before. A kernel at the end of the step costs 1 to 2 us.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from torch import Tensor

from ops.launch import jit, supports_pdl, tl, triton


# Grid [1].
@jit
def _post(
    token, count, slots, PDL: tl.constexpr, ROWS: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr
):
    row, n = tl.arange(0, BLOCK), tl.load(count)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    newest = tl.load(token + row, mask=row < ROWS, other=0)
    tl.store(slots + (n & 1) * B + row, newest, mask=row < ROWS)
    tl.debug_barrier()  # all threads have read the count
    tl.store(count, n + 1)


def post_tokens(token: Tensor, count: Tensor, slots: Tensor, pdl: bool | None = None) -> None:
    """Copy token int64 [rows, 1] to slots [count % 2, : rows]; increment count int64 [1].

    slots int64 [2, B]: in pinned host memory. pdl: None launches with PDL where the GPU has it.
    """
    rows, pdl = len(token), supports_pdl(token) if pdl is None else pdl
    sizes = dict(ROWS=rows, B=slots.shape[1], BLOCK=triton.next_power_of_2(rows))
    _post[(1,)](token, count, slots, PDL=pdl, launch_pdl=pdl, num_warps=1, **sizes)
