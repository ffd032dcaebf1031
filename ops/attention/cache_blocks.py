"""Blocks of a KV cache, plain or int8, as the kernel of grouped-query attention reads them.

An int8 cache is read as int16: a unit is two neighbors of a head, the even one in its lower byte.
Products of even and of odd numbers are separate. Single bytes would be read one by one from shared
memory, where tensor cores want two positions of a value side by side: 1.5 times the instructions.

Letters: M rows of a tile, C head dim, WIDTH: C, or C / 2 units of an int8 cache.
"""

from ops.attention.heads import int8_codes, int8_scale
from ops.attention.softmax import dot, weigh
from ops.launch import jit, tl
from ops.products.units import shift_right, signed_bytes


@jit
def load_block(
    entries, scales, begin, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr
):
    """Load keys or values [BLOCK, WIDTH] from position `begin`, and their scales [BLOCK].

    From position `end` on both are 0. Without scales (None) they are 1.0: Triton 3.6 returns no
    None within a tuple. RING: slots of a ring, 0 if the cache is none.
    """
    key = begin + tl.arange(0, BLOCK)
    slot = key
    if RING > 0:
        slot = begin % RING + tl.arange(0, BLOCK)
        slot = tl.where(slot < RING, slot, slot - RING)
        if RING % 16 == 0 and scales is not None:  # as `KernelSettings.align`: loaded as vectors
            slot = tl.max_contiguous(tl.multiple_of(slot, 16), 16)
    at = slot[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    block = tl.load(entries + at, mask=(key < end)[:, None], other=0)
    scale = 1.0
    if scales is not None:
        scale = tl.load(scales + slot, mask=key < end, other=0.0).to(tl.float32)
    return block, scale


@jit
def _operands(block, dtype: tl.constexpr, INT8: tl.constexpr):
    """Convert a block for a product: itself, or its even and its odd numbers."""
    if not INT8:
        return (block.to(dtype),)
    elif dtype == tl.bfloat16:
        return (signed_bytes(block), signed_bytes(shift_right(block, 8)))
    else:
        return ((block << 8 >> 8).to(dtype), (block >> 8).to(dtype))


@jit
def split_numbers(x, INT8: tl.constexpr):
    """Split [M, C] as products with an int8 cache need it: a tuple of one or two tensors."""
    if INT8:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        return (even, odd)
    else:
        return (x,)


@jit
def join_numbers(x, C: tl.constexpr):
    """Undo `split_numbers` -> [M, C]."""
    if len(x) == 2:
        return tl.reshape(tl.join(x[0], x[1]), [x[0].shape[0], C])
    else:
        return x[0]


@jit
def add_block(softmax, queries, keys, values, seen, SCALE: tl.constexpr, INT8: tl.constexpr):
    """Add a block of positions to a softmax: row_max [M], row_sum [M], accs [M, C].

    queries and accs are split as by `split_numbers`; keys and values as in `load_block`. seen:
    which positions a row sees. SCALE: a factor of scores that queries lack.
    """
    row_max, row_sum, accs = softmax
    dtype: tl.constexpr = queries[0].dtype
    k, v = _operands(keys[0], dtype, INT8), _operands(values[0], dtype, INT8)
    scores = dot(queries[0], tl.trans(k[0]))
    if INT8:
        scores = dot(queries[1], tl.trans(k[1]), scores)
        scores *= keys[1][None, :]
    if SCALE != 1.0:
        scores *= SCALE
    value_scale = values[1] if INT8 else None
    weights, rescale, row_max, row_sum = weigh(scores, row_max, row_sum, value_scale, seen, dtype)
    even = dot(weights, v[0], accs[0] * rescale)
    if INT8:
        odd = dot(weights, v[1], accs[1] * rescale)
        accs = (even, odd)
    else:
        accs = (even,)
    return row_max, row_sum, accs


@jit
def append(entries, scales, x, position, is_stored, C: tl.constexpr):
    """Store heads x [R, C] at positions [R, 1] of a cache; return them as they are read there."""
    if scales is not None:
        x = x.to(tl.float32)
        scale = int8_scale(tl.max(tl.abs(x), 1, keep_dims=True))
        codes, x = int8_codes(x, scale)  # as `formats.kv_cache.quantize_int8`
        even, odd = tl.split(tl.reshape(codes.to(tl.int16), [x.shape[0], C // 2, 2]))
        units = (even & 255) | (odd << 8)
        at = position * (C // 2) + tl.arange(0, C // 2)[None, :]
        tl.store(entries + at, units, mask=is_stored)
        tl.store(scales + position, scale, mask=is_stored)
    else:
        tl.store(entries + position * C + tl.arange(0, C)[None, :], x, mask=is_stored)
    return x
