"""Decode attention over a short cache: RoPE, cache append and attention in one kernel.

Up to a few hundred positions a decode step waits for kernel launches, not for memory.
One kernel therefore does everything between the products `wqkv` and `wo`. With
programmatic dependent launch (PDL, Hopper and newer) it loads the cache while `wqkv` is
running.

Letters: B sequences, S positions of the cache, H query heads, K KV heads, G = H / K, C head dim, M
rows of a tile, at least G.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.launch import add_both, jit, supports_pdl, tl, triton

FEWEST_ROWS = 16  # that tensor cores multiply
WARPS = 8


@jit
def online_softmax(scores, row_max, row_sum):
    """Add one block of positions to a running softmax (Milakov & Gimelshein 2018, algorithm 3).

    scores [M, N] of the block; row_max, row_sum [M]: the maximum score and the sum of
    exp(score - row_max) so far. Return the block's weights [M, N], the factor [M] that
    rescales all accumulated so far, and the new row_max and row_sum. All scores of a row
    may be -inf.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp(scores - base[:, None])
    rescale = tl.exp(row_max - base)
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


@jit
def _weigh(
    scores,
    row_max,
    row_sum,
    value_scale,
    key,
    position,
    WINDOW: tl.constexpr,
    INT8: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add scores [M, BLOCK] of positions `key` to a softmax, as `online_softmax`.

    The weights that are returned are factors of values as they are stored, in INT8 with
    value_scale.
    """
    seen = (key < position) & (key > position - WINDOW)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    weights, rescale, row_max, row_sum = online_softmax(scores, row_max, row_sum)
    if INT8:
        weights *= value_scale[None, :]
    return weights.to(DTYPE), rescale[:, None], row_max, row_sum


@jit
def _finish_softmax(row_max, row_sum, acc, sink, HAS_SINKS: tl.constexpr):
    """Return acc [M, N] divided by the sum of weights [M], with that of the sink if there is one.

    sink: fp32, one number or [M].
    """
    if HAS_SINKS:
        largest = tl.maximum(row_max, sink)
        acc *= tl.exp(row_max - largest)[:, None]
        row_sum = row_sum * tl.exp(row_max - largest) + tl.exp(sink - largest)
    return acc / row_sum[:, None]


@jit
def _load_rotation(
    rope,
    sequence,
    c,
    C: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    ROPE_BEGIN: tl.constexpr,
):
    """Load RoPE of a sequence's token for the numbers c [M, C] of a head.

    Return c, the index of the number that RoPE pairs each with, its cosine and its
    signed sine.
    """
    partner = tl.where(c < ROTARY_DIM, (c + ROTARY_DIM // 2) % ROTARY_DIM, c)
    rope += sequence * ROPE_WIDTH + ROPE_BEGIN + c
    cos, sin = tl.load(rope), tl.load(rope + C)
    return c, partner, cos, sin


@jit
def _sum_squares(x, WIDTH: tl.constexpr):
    """Sum the squares of the WIDTH numbers at x -> fp32 [2048], whose sum is theirs."""
    number = tl.arange(0, 2048)
    squares = tl.zeros([2048], tl.float32)
    for begin in tl.static_range(0, WIDTH, 2048):
        some = tl.load(x + begin + number, mask=begin + number < WIDTH, other=0.0).to(tl.float32)
        squares += some * some
    return squares


@jit
def _inverse_rms(q, k, Q_WIDTH: tl.constexpr, K_WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Return 1 / RMS of the numbers at q, and of those at k. Warps exchange both sums at once."""
    squares = _sum_squares(q, Q_WIDTH), _sum_squares(k, K_WIDTH)
    of_q, of_k = tl.reduce(squares, 0, add_both)
    return tl.rsqrt(of_q / Q_WIDTH + EPS), tl.rsqrt(of_k / K_WIDTH + EPS)


@jit
def _load_head_norm(norm, rotation, HAS_NORM: tl.constexpr):
    """Load the norm's weight of a head for `_load_head`: for the numbers, and for their partners.

    rotation: as of `_load_rotation`.
    """
    c, partner, _, _ = rotation
    if HAS_NORM:
        return tl.load(norm + c), tl.load(norm + partner)
    else:
        return 1.0, 1.0


@jit
def _load_head(
    x,
    norm,
    rms,
    rotation,
    C: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    EPS: tl.constexpr,
    CLIP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FULL_NORM: tl.constexpr,
):
    """Load one head at x -> [M, C] fp32, after clip, RMS norm and RoPE.

    norm: as of `_load_head_norm`. With FULL_NORM the norm is over all heads, comes before the clip,
    and rms is its factor.
    """
    c, partner, cos, sin = rotation
    partner_x = x + partner
    if ROTARY_DIM % 16 == 0:
        # Triton cannot derive from `partner` that 8 neighbors are one aligned load of 16 bytes.
        partner_x = tl.max_contiguous(tl.multiple_of(partner_x, (1, 16)), (1, 8))
    partner_x = tl.load(partner_x).to(tl.float32)
    x = tl.load(x + c).to(tl.float32)
    if CLIP > 0 and not FULL_NORM:
        partner_x, x = tl.clamp(partner_x, -CLIP, CLIP), tl.clamp(x, -CLIP, CLIP)
    if HAS_NORM:
        if not FULL_NORM:
            rms = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / C + EPS)
        partner_x *= rms * norm[1].to(tl.float32)
        x *= rms * norm[0].to(tl.float32)
    if CLIP > 0 and FULL_NORM:
        partner_x, x = tl.clamp(partner_x, -CLIP, CLIP), tl.clamp(x, -CLIP, CLIP)
    return x * cos + partner_x * sin


@jit
def _load_value(
    x, c, C: tl.constexpr, EPS: tl.constexpr, CLIP: tl.constexpr, NORM_VALUES: tl.constexpr
):
    """Load one head at x -> [M, C], after clip or a norm without a weight."""
    value = tl.load(x + c)
    if NORM_VALUES:
        number = value.to(tl.float32)
        rms = tl.rsqrt(tl.sum(number * number, 1, keep_dims=True) / C + EPS)
        value = (number * rms).to(value.dtype)
    if CLIP > 0:
        value = tl.clamp(value.to(tl.float32), -CLIP, CLIP).to(value.dtype)
    return value


@jit
def _keep_layout(x):
    """Return x, fp32: the compiler keeps the layout in which x was computed.

    Else it computes norm and RoPE in the layout of a product's operand, of which each warp has all:
    spills, and 14 more barriers. Tests replace the assembly, which Triton's interpreter does not
    know.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
    )


@jit
def _load_block(cache, begin, end, C: tl.constexpr, BLOCK: tl.constexpr):
    """Load BLOCK keys or values [BLOCK, C] from position `begin`: 0 from `end` on."""
    position = begin + tl.arange(0, BLOCK)[:, None]
    return tl.load(cache + position * C + tl.arange(0, C)[None, :], mask=position < end, other=0.0)


@jit
def _add_block(
    row_max,
    row_sum,
    acc,
    queries,
    k,
    v,
    begin,
    position,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Add keys and values [BLOCK, C] from position `begin` to a softmax: row_max, row_sum, acc."""
    key = begin + tl.arange(0, k.shape[0])
    scores = tl.dot(queries, tl.trans(k), input_precision="tf32x3") * SCALE
    weights, rescale, row_max, row_sum = _weigh(
        scores, row_max, row_sum, None, key, position, WINDOW, False, v.dtype
    )
    acc = tl.dot(weights, v, acc=acc * rescale, input_precision="tf32x3")
    return row_max, row_sum, acc


# One function: its speed depends on the order of waits and loads. A reader should see that order
# whole.
@jit
def _attend_heads(
    qkv,
    rope,
    q_norm,
    k_norm,
    sinks,
    cache,
    y,
    sequence,
    kv_head,
    first,
    position,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    CLIP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FULL_NORM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    GATED: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    ROPE_BEGIN: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    LONG: tl.constexpr,
    V_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a program of `_attend_token`, in blocks of BLOCK positions.

    first: the first position that the token sees. LONG: not all positions may be in one block.
    """
    G: tl.constexpr = H // K
    row = tl.arange(0, M)
    head = kv_head * G + tl.minimum(row, G - 1)
    c = row[:, None] * 0 + tl.arange(0, C)[None, :]
    rotation = _load_rotation(rope, sequence, c, C, ROTARY_DIM, ROPE_WIDTH, ROPE_BEGIN)
    k = _load_block(cache, first, position, C, BLOCK)
    v = _load_block(cache + V_OFFSET, first, position, C, BLOCK)
    if FULL_NORM:
        q_norm, k_norm = q_norm + head[:, None] * C, k_norm + kv_head * C
    q_weight = _load_head_norm(q_norm, rotation, HAS_NORM)
    k_weight = _load_head_norm(k_norm, rotation, HAS_NORM)
    sink = tl.load(sinks + head).to(tl.float32) if HAS_SINKS else 0.0
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    FIRST_VALUE: tl.constexpr = H if KEYS_ARE_VALUES else H + K
    FIRST_GATE: tl.constexpr = FIRST_VALUE + K
    HEADS: tl.constexpr = FIRST_GATE + H if GATED else FIRST_GATE
    qkv += sequence * HEADS * C
    own_value = _load_value(qkv + (FIRST_VALUE + kv_head) * C, c, C, EPS, CLIP, NORM_VALUES)
    if GATED:
        gate = tl.load(qkv + (FIRST_GATE + head[:, None]) * C + c)
    q_rms, k_rms = 1.0, 1.0
    if FULL_NORM:
        q_rms, k_rms = _inverse_rms(qkv, qkv + H * C, H * C, K * C, EPS)
    own_k, own_q = qkv + (H + kv_head) * C, qkv + head[:, None] * C
    own_key = _load_head(
        own_k, k_weight, k_rms, rotation, C, ROTARY_DIM, EPS, CLIP, HAS_NORM, FULL_NORM
    )
    query = _load_head(
        own_q, q_weight, q_rms, rotation, C, ROTARY_DIM, EPS, CLIP, HAS_NORM, FULL_NORM
    )
    dtype: tl.constexpr = own_value.dtype
    queries, own_key = _keep_layout(query).to(dtype), _keep_layout(own_key).to(dtype)
    tl.store(cache + position * C + c, own_key, mask=row[:, None] == 0)
    tl.store(cache + V_OFFSET + position * C + c, own_value, mask=row[:, None] == 0)
    row_max = tl.sum(queries.to(tl.float32) * own_key.to(tl.float32), 1) * SCALE
    row_sum, acc = tl.full([M], 1.0, tl.float32), own_value.to(tl.float32)
    if LONG:
        for begin in range(first, position, BLOCK):
            row_max, row_sum, acc = _add_block(
                row_max, row_sum, acc, queries, k, v, begin, position, SCALE, WINDOW
            )
            if begin + BLOCK < position:
                k = _load_block(cache, begin + BLOCK, position, C, BLOCK)
                v = _load_block(cache + V_OFFSET, begin + BLOCK, position, C, BLOCK)
    else:
        row_max, row_sum, acc = _add_block(
            row_max, row_sum, acc, queries, k, v, first, position, SCALE, WINDOW
        )
    out = _finish_softmax(row_max, row_sum, acc, sink, HAS_SINKS)
    if GATED:
        out /= 1 + tl.exp(-gate.to(tl.float32))
    at = (sequence * H + head[:, None]) * C + c
    tl.store(y + at, out.to(y.dtype.element_ty), mask=row[:, None] < G)


# Grid [K, B]: a program computes the G query heads of one KV head of one sequence, as rows of a
# tile of tensor cores. It appends the token's key and value to the cache. It reads each older key
# and value once, and unpacks none.
#
# The softmax starts with the token's own position, and reads only earlier ones from the cache. The
# first block of these is loaded before the wait for qkv. Half a block is read if that has all
# positions: the products of the other half would take time for nothing.
@jit
def _attend_token(
    qkv,
    rope,
    q_norm,
    k_norm,
    sinks,
    positions,
    cache,
    y,
    S: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    CLIP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FULL_NORM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    GATED: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    ROPE_BEGIN: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    V_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(positions + sequence).to(tl.int32)
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW < S else 0
    cache += (sequence * K + kv_head) * S * C
    is_long = (position - first > BLOCK // 2).to(tl.int32)
    for LONG in tl.static_range(2):
        if is_long == LONG:
            _attend_heads(
                qkv,
                rope,
                q_norm,
                k_norm,
                sinks,
                cache,
                y,
                sequence,
                kv_head,
                first,
                position,
                H=H,
                K=K,
                C=C,
                ROTARY_DIM=ROTARY_DIM,
                SCALE=SCALE,
                EPS=EPS,
                CLIP=CLIP,
                WINDOW=WINDOW,
                HAS_NORM=HAS_NORM,
                FULL_NORM=FULL_NORM,
                HAS_SINKS=HAS_SINKS,
                NORM_VALUES=NORM_VALUES,
                KEYS_ARE_VALUES=KEYS_ARE_VALUES,
                GATED=GATED,
                ROPE_WIDTH=ROPE_WIDTH,
                ROPE_BEGIN=ROPE_BEGIN,
                M=M,
                V_OFFSET=V_OFFSET,
                PDL=PDL,
                BLOCK=BLOCK if LONG else BLOCK // 2,
                LONG=LONG,
            )


def choose_block(C: int, itemsize: int) -> int:
    """Return how many positions a program reads at once: as many as fit in registers.

    fp32 numbers are multiplied as three, which need registers, too.
    """
    width = C if itemsize == 2 else 4 * C
    return 256 if width <= 128 else 128 if width <= 256 else 32


def empty_output(qkv: Tensor, cache: Tensor, keys_are_values: bool, gated: bool) -> Tensor:
    """Return the output [B, Q, H * C] of attention with qkv [B, Q, ...], not yet written."""
    K, C = cache.shape[2], cache.shape[4]
    width = qkv.shape[-1] - (1 if keys_are_values else 2) * K * C
    return qkv.new_empty(*qkv.shape[:2], width // 2 if gated else width)


@torch.library.custom_op("moe_fast::attend_token", mutates_args=("cache",))
def attend_token(
    qkv: Tensor,
    rope: Tensor,
    positions: Tensor,
    cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    sinks: Tensor | None,
    rotary_dim: int,
    scale: float,
    eps: float,
    clip: float,
    window: int,
    norm_values: bool = False,
    keys_are_values: bool = False,
    rope_begin: int = 0,
    gated: bool = False,
    full_norm: bool = False,
) -> Tensor:
    """Attend with one token of each sequence, and append its key and value to the cache.

    qkv [B, 1, (H + 2 K) C] at positions [B, 1], cache [2, rows, K, S, C], of which the first B
    rows are used -> [B, 1, H * C].
    C is a power of two from 16 to 512. Order: clip to +-clip (0: none), RMS norm of each
    head (weights q_norm, k_norm [C], eps), RoPE of the first rotary_dim numbers (rope is
    `model.Context.rope`), scores times scale, softmax with sinks [H].

    norm_values: RMS norm of values too, without a weight. keys_are_values: qkv is
    [B, 1, (H + K) C], and values are its keys before norm and RoPE. rope_begin: the
    layer's first column of rope. gated: qkv ends with H more heads, whose sigmoid the output is
    multiplied by. full_norm: RMS norms over all heads of q and of k, before the clip, with weights
    [H * C] and [K * C].

    window: the number of positions that a token sees, its own included. Masked
    positions of the cache must be finite: they are multiplied by 0, and 0 * NaN is NaN.
    With PDL the kernel reads all but qkv while the previous kernel runs, which must not
    write them.
    """
    B, (K, S, C) = qkv.shape[0], cache.shape[2:]
    y = empty_output(qkv, cache, keys_are_values, gated)
    H, pdl = y.shape[-1] // C, supports_pdl(qkv)
    # The kernel needs a valid pointer for an absent tensor, which it then does not read.
    weights = (qkv if tensor is None else tensor for tensor in (q_norm, k_norm, sinks))
    shape = dict(S=S, H=H, K=K, C=C, ROTARY_DIM=rotary_dim, V_OFFSET=cache.stride(0))
    scores = dict(SCALE=scale, EPS=eps, CLIP=clip, WINDOW=window)
    flags = dict(HAS_NORM=q_norm is not None, HAS_SINKS=sinks is not None, PDL=pdl)
    flags |= dict(NORM_VALUES=norm_values, KEYS_ARE_VALUES=keys_are_values)
    flags |= dict(FULL_NORM=full_norm, GATED=gated)
    flags |= dict(ROPE_WIDTH=rope.shape[-1], ROPE_BEGIN=rope_begin)
    _attend_token[K, B](
        qkv.contiguous(),
        rope,
        *weights,
        positions,
        cache,
        y,
        **shape,
        **scores,
        **flags,
        M=max(FEWEST_ROWS, triton.next_power_of_2(H // K)),
        BLOCK=choose_block(C, cache.element_size()),
        launch_pdl=pdl,
        num_warps=WARPS,
    )
    return y


@attend_token.register_fake
def _(
    qkv,
    rope,
    positions,
    cache,
    q_norm,
    k_norm,
    sinks,
    rotary_dim,
    scale,
    eps,
    clip,
    window,
    norm_values=False,
    keys_are_values=False,
    rope_begin=0,
    gated=False,
    full_norm=False,
) -> Tensor:
    return empty_output(qkv, cache, keys_are_values, gated)
