"""Top-k without library kernels: of a router's few scores, and of a vocabulary's many logits.

Also argmax and running sums of a vocabulary's numbers, in blocks that a GPU computes side by side.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

RANK_KERNEL_MAX = 2048  # largest N for the O(N^2) rank kernel
BLOCK = 2048  # numbers of a row that are reduced at once


def top_k(scores: Tensor, k: int) -> tuple[list[Tensor], Tensor]:
    """Return the k largest of scores fp32 [T, E], descending, and their indices [T, k].

    The values are a list of k tensors [T, 1]. Ties go to the lower index.

    k unrolled rounds find one maximum each: Inductor fuses all of them, and what is computed from
    the values, into one kernel. (`torch.topk` is two library kernels, 8 us a layer on an H200.) A
    score's ordered bits and its index are packed into one int64, so that one maximum finds both.
    Eager code on a CPU sorts instead: one call in place of ten for each of k.
    """
    if scores.is_cpu and not torch.compiler.is_compiling():
        best, indices = scores.sort(dim=-1, descending=True, stable=True)
        return list(best[..., :k].split(1, dim=-1)), indices[..., :k].contiguous()
    last = scores.shape[-1] - 1
    bits = scores.contiguous().view(torch.int32)
    experts = torch.arange(scores.shape[-1], device=scores.device)
    keys = ordered_bits(bits).long() << 32 | (last - experts)
    values, indices = [], []
    for _ in range(k):
        key = keys.amax(dim=-1, keepdim=True)
        values.append(ordered_bits((key >> 32).to(torch.int32)).view(torch.float32))
        indices.append(last - (key & 0xFFFFFFFF))
        keys = torch.where(keys == key, torch.iinfo(torch.int64).min, keys)
    return values, torch.cat(indices, dim=-1)


def ordered_bits(bits: Tensor) -> Tensor:
    """Map the bits of fp32 numbers to int32 that have the numbers' order, or back.

    As integers, the bits of negative numbers have the reverse order, so they are flipped.
    """
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def largest_by_rank(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of values [B, N], descending, and their indices: both [B, k].

    All values are above -inf. For GPUs, where `torch.topk` is four passes and a sort (60 us for a
    vocabulary on an H200). The rank of a value is the number of larger ones: one sum over all
    pairs. If N is large, blocks of values are ranked by their maxima first. Each of the k largest
    values is in one of the k blocks with the largest maxima: the maximum of every block ranked
    before its own is larger.
    """
    N = values.shape[-1]
    if k > RANK_KERNEL_MAX // 4:
        return values.topk(k, dim=-1)
    if N > RANK_KERNEL_MAX:
        size = -(-N // RANK_KERNEL_MAX)
        padded = F.pad(values, (0, -N % size), value=float("-inf"))
        blocks = padded.unflatten(-1, (-1, size))
        _, first = largest_by_rank(blocks.amax(dim=-1), k)
        inside = blocks.gather(1, first.unsqueeze(-1).expand(-1, -1, size)).flatten(1)
        best, at = largest_by_rank(inside, k)
        return best, first.gather(1, at // size) * size + at % size
    index = torch.arange(N, device=values.device)
    ranks = torch.arange(k, device=values.device)
    this, other = values.unsqueeze(-1), values.unsqueeze(-2)
    tied = (other == this) & (index < index.unsqueeze(-1))
    rank = ((other > this) | tied).sum(dim=-1)
    indices = torch.where(rank.unsqueeze(-2) == ranks.unsqueeze(-1), index, 0).sum(dim=-1)
    return values.gather(1, indices), indices


def in_blocks(x: Tensor) -> Tensor:
    """x [B, N] -> [B, blocks, BLOCK]; the last number is repeated until the end."""
    N = x.shape[-1]
    # Not F.pad: Inductor would write its constants by a kernel that waits for none before it.
    index = torch.arange(N + -N % BLOCK, device=x.device).clamp(max=N - 1)
    return x[:, index].unflatten(-1, (-1, BLOCK))


def argmax(x: Tensor) -> Tensor:
    """x [B, N] -> the index of each row's largest number, int64 [B, 1].

    The first of equal ones; NaN is the largest. Inductor computes `torch.argmax` of a row by one
    program, which takes longer than all others of a step's end.
    """
    if x.shape[-1] <= BLOCK:
        return x.argmax(dim=-1, keepdim=True)
    blocks = in_blocks(x)
    block = blocks.amax(dim=-1).argmax(dim=-1, keepdim=True)
    return block * BLOCK + blocks.argmax(dim=-1).gather(-1, block)


def running_sum(x: Tensor) -> Tensor:
    """`x.cumsum(-1)` of x [B, N]: in blocks, then of the blocks' sums.

    Inductor sums one long row by a kernel that cannot also compute what follows: PyTorch 2.11 then
    fails with "NYI TritonSplitDimKernel reductions".
    """
    N = x.shape[-1]
    if N <= BLOCK:
        return x.cumsum(dim=-1)
    sums = in_blocks(x).cumsum(dim=-1)
    ends = sums[..., -1:]
    before = ends.cumsum(dim=1) - ends
    return (sums + before).flatten(1)[:, :N]
