"""Exchange between the programs of a thread block cluster, through their shared memory.

A cluster is N programs that run at the same time on neighboring multiprocessors (Hopper and newer).
Each merges a share of all programs' results: it gets them by stores into its shared memory, which
take less than half of a kernel that merges results in the GPU's memory.

    address = open_cluster(...)   no program has ended, or will, before all have called `merge`
    softmax = merge(...)          -> the numbers of this program

Letters: N programs, M rows of a tile, R of them that are exchanged, C head dim, W = C / N.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from ops.launch import jit, tl


def buffer_code(size: int) -> str:
    """Return PTX that declares `size` bytes of shared memory, and tells the cluster of the start."""
    return (
        f"{{ .shared .align 16 .b8 exchange[{size}]; "
        "barrier.cluster.arrive.relaxed; mov.u32 $0, exchange; }"
    )


@jit
def open_cluster(zero, CODE: tl.constexpr):
    """Return the address of the program's buffer. zero: any number. CODE: of `buffer_code`."""
    return tl.inline_asm_elementwise(CODE, "=r,r", (zero,), dtype=tl.int32, is_pure=False, pack=1)


@jit
def _await_start(zero):
    """Wait until all programs of the cluster run: before, they have no shared memory."""
    code: tl.constexpr = "barrier.cluster.wait; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,r", (zero,), dtype=tl.int32, is_pure=False, pack=1)


@jit
def _exchange(zero):
    """Wait until all programs of the cluster have stored."""
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.u32 $0, 0;",
        "=r,r",
        (zero,),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _store(address, program, x, mask):
    """Store x, fp32, at addresses of programs of the cluster, where mask. All broadcast."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred here;
        .reg .u32 there;
        setp.ne.s32 here, $4, 0;
        mapa.shared::cluster.u32 there, $1, $2;
        @here st.shared::cluster.f32 [there], $3;
        mov.u32 $0, 0;
        }""",
        "=r,r,r,f,r",
        (address, program, x, mask.to(tl.int32)),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _load(address):
    """Load fp32 from this program's shared memory."""
    return tl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r", (address,), dtype=tl.float32, is_pure=False, pack=1
    )


@jit
def merge(softmax, buffer, rank, R: tl.constexpr, N: tl.constexpr):
    """Merge row_max [M], row_sum [M], acc [M, C] of N programs -> the same of W * R numbers.

    Each is [R * W, 1]. Number i is column rank * W + i % W of row i // W. rank: of this program.
    """
    row_max, row_sum, acc = softmax
    M: tl.constexpr = acc.shape[0]
    C: tl.constexpr = acc.shape[1]
    W: tl.constexpr = C // N
    SIZE: tl.constexpr = N * R * W
    row, c, n = tl.arange(0, M)[:, None], tl.arange(0, C)[None, :], tl.arange(0, N)[None, :]
    own = rank * R + row  # the row's place in a buffer
    _await_start(rank)
    _store(buffer + (own * W + c % W) * 4, c // W, acc, row < R)
    sums = buffer + (SIZE + own) * 4
    _store(sums, n, row_max[:, None], row < R)
    _store(sums + N * R * 4, n, row_sum[:, None], row < R)
    _exchange(rank)
    i = tl.arange(0, R * W)[:, None]
    at = n * R + i // W
    numbers = _load(buffer + (at * W + i % W) * 4)
    maxima = _load(buffer + (SIZE + at) * 4)
    totals = _load(buffer + (SIZE + N * R + at) * 4)
    largest = tl.max(maxima, 1)
    share = tl.exp(maxima - largest[:, None])
    total, acc = tl.sum(totals * share, 1), tl.sum(numbers * share, 1)
    return largest[:, None], total[:, None], acc[:, None]
