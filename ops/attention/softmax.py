"""Softmax over parts of a cache, for the kernels of grouped-query and latent attention.

Kernels add blocks of positions to a running softmax. Several programs share the positions of a long
sequence (Flash-Decoding, Dao et al. 2023): how many is computed from its position, on the GPU.

Letters: M rows of a tile, N numbers of a row, S positions of the cache, P parts, at most.
"""

import torch
from torch import Tensor

from ops.gpu import gpu_of
from ops.launch import jit, tl

MAX_PARTS = 64
PROGRAMS = 2  # for each multiprocessor, at most, so that loads overlap arithmetic


@jit
def dot(x, y, acc=None):
    """Multiply on tensor cores and add acc; fp32 as three products of tf32 where there are such."""
    PRECISION: tl.constexpr = "tf32x3" if tl.target_info.is_cuda() else "ieee"
    return tl.dot(x, y, acc, input_precision=PRECISION)


@jit
def weigh(scores, row_max, row_sum, value_scale, seen, DTYPE: tl.constexpr):
    """Add scores [M, N] of one block to a running softmax, where `seen` ([1 or M, N]).

    Source: Milakov & Gimelshein 2018, algorithm 3. row_max, row_sum [M]: the maximum score and the
    sum of exp(score - row_max) so far. All scores of a row may be -inf. Return the weights as
    factors of the stored values (times value_scale [N], if not None), the factor [M, 1] that
    rescales all accumulated so far, and the new row_max and row_sum.
    """
    scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp(scores - base[:, None])
    rescale = tl.exp(row_max - base)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    if value_scale is not None:
        weights *= value_scale[None, :]
    return weights.to(DTYPE), rescale[:, None], new_max, row_sum


def count_parts(
    rows: int, length: int, part: int, device: torch.device, programs: int = PROGRAMS
) -> int:
    """Return P: parts of `part` positions, but no more programs than the GPU runs side by side.

    rows: programs of each part. length: positions that a token may see. programs: that a
    multiprocessor runs side by side.
    """
    processors = gpu_of(device).multiprocessors
    return max(1, min(-(-length // part), programs * processors // rows, MAX_PARTS))


def merge_partial(
    y: Tensor, sums: Tensor, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Merge attention over parts of the positions -> fp32 [..., rows, C].

    y [..., P, rows, C], not yet divided by the sum of weights. sums [..., P, rows, 2]: the maximum
    score and the sum of exp(score - maximum). A part without positions has -inf and 0.

    return_lse: return also the log-sum-exp of each row's scores [..., rows]. A sink s makes the
    result y * sigmoid(lse - s).
    """
    maximum, total = sums.unbind(-1)
    largest = maximum.amax(-2, keepdim=True)
    share = (maximum - largest).exp()
    total = (total * share).sum(-2)
    y = (y * share.unsqueeze(-1)).sum(-3) / total.unsqueeze(-1)
    return (y, largest.squeeze(-2) + total.log()) if return_lse else y
