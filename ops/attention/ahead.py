"""What the next kernel reads of a KV cache."""

from typing import NamedTuple

from torch import Tensor

from ops.attention.heads import prefetch
from ops.launch import jit, tl


class Ahead(NamedTuple):
    """What the next kernel reads of a KV cache: a product of one token prefetches it into L2."""

    cache: Tensor  # [2, rows, K, S, C], of which the first row is used
    positions: Tensor  # int64 [1]: the position, up to which the cache is in use


@jit
def prefetch_cache(ahead, s, MOST: tl.constexpr):
    """Prefetch the program's share of the cache: some positions of one head's keys or values."""
    regions: tl.constexpr = 2 * s.cache_heads
    region, share = tl.program_id(0) % regions, tl.program_id(0) // regions
    used = tl.minimum(tl.load(ahead.positions).to(tl.int32), s.cache_length)
    shares = tl.num_programs(0) // regions
    each = tl.minimum((used + shares - 1) // shares, MOST)
    begin = share * each
    count = tl.minimum(used - begin, each)
    if count > 0:
        row = region // s.cache_heads * s.cache_rows * s.cache_heads + region % s.cache_heads
        numbers = (row.to(tl.int64) * s.cache_length + begin) * s.cache_width
        size: tl.constexpr = s.cache_width * (ahead.cache.dtype.element_ty.primitive_bitwidth // 8)
        prefetch(ahead.cache + numbers, count * size)
