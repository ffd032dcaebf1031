"""Heads as kernels of attention load and store them: norm, RoPE, clip, int8 codes.

Letters: M rows of a tile (heads, or tokens), C head dim. `s` has head_dim, eps, clip and the other
fields of `ops.attention.gqa.AttentionSettings`.
"""

from ops.launch import add_both, jit, tl


@jit
def load_rotation(rope, token, c, C: tl.constexpr, ROTARY_DIM: tl.constexpr, width, begin):
    """Load RoPE of a token, or of tokens [M, 1], for the numbers c [M, C] of a head.

    width: numbers of a row of `rope`, in which the layer's begin at `begin`; both constant.
    Return c, the index of the number that RoPE pairs each with, its cosine and its signed sine.
    Those of heads that are not rotated are 1.0 and 0.0.
    """
    if ROTARY_DIM > 0:
        partner = tl.where(c < ROTARY_DIM, (c + ROTARY_DIM // 2) % ROTARY_DIM, c)
        rope += token * width + begin + c
        return c, partner, tl.load(rope), tl.load(rope + C)
    else:
        return c, c, 1.0, 0.0


@jit
def load_head_norm(norm, rotation):
    """Load a head's norm weight for `load_head`: for the numbers, and for their partners.

    They are 1.0 without a norm (None): Triton 3.6 returns no None within a tuple.
    """
    c, partner, _, _ = rotation
    if norm is not None:
        return tl.load(norm + c), tl.load(norm + partner)
    else:
        return 1.0, 1.0


@jit
def load_head(x, weight, rms, rotation, s: tl.constexpr):
    """Load one head at x -> [M, C] fp32, after clip, RMS norm and RoPE.

    weight: as in `load_head_norm`; None: no norm. With s.full_norm the norm is over all heads and
    comes before the clip; rms is its factor.
    """
    c, partner, cos, sin = rotation
    partner_x = x + partner
    if s.rotary_dim % 16 == 0:
        # Triton cannot derive from `partner` that 8 neighbors are one aligned load of 16 bytes.
        partner_x = tl.max_contiguous(tl.multiple_of(partner_x, (1, 16)), (1, 8))
    partner_x = tl.load(partner_x).to(tl.float32)
    x = tl.load(x + c).to(tl.float32)
    if s.clip > 0 and not s.full_norm:
        partner_x, x = tl.clamp(partner_x, -s.clip, s.clip), tl.clamp(x, -s.clip, s.clip)
    if weight is not None:
        if not s.full_norm:
            rms = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / s.head_dim + s.eps)
        partner_x *= rms * weight[1].to(tl.float32)
        x *= rms * weight[0].to(tl.float32)
    if s.clip > 0 and s.full_norm:
        partner_x, x = tl.clamp(partner_x, -s.clip, s.clip), tl.clamp(x, -s.clip, s.clip)
    return x * cos + partner_x * sin


@jit
def load_value(x, c, s: tl.constexpr):
    """Load one head at x -> [M, C], after clip or a norm without a weight."""
    value = tl.load(x + c)
    if s.norm_values:
        number = value.to(tl.float32)
        rms = tl.rsqrt(tl.sum(number * number, 1, keep_dims=True) / s.head_dim + s.eps)
        value = (number * rms).to(value.dtype)
    if s.clip > 0:
        value = tl.clamp(value.to(tl.float32), -s.clip, s.clip).to(value.dtype)
    return value


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
def inverse_rms(q, k, Q_WIDTH: tl.constexpr, K_WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Return 1 / RMS of the numbers at q, and of those at k. Warps exchange both sums at once."""
    squares = _sum_squares(q, Q_WIDTH), _sum_squares(k, K_WIDTH)
    of_q, of_k = tl.reduce(squares, 0, add_both)
    return tl.rsqrt(of_q / Q_WIDTH + EPS), tl.rsqrt(of_k / K_WIDTH + EPS)


@jit
def inverse_rms_of_rows(x, is_row, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Return 1 / RMS [M, 1] of the WIDTH numbers at each pointer of x [M, 1], where is_row."""
    COLUMNS: tl.constexpr = 256  # of each row, that are read at once
    number = tl.arange(0, COLUMNS)[None, :]
    squares = tl.zeros([x.shape[0], COLUMNS], tl.float32)
    for begin in tl.static_range(0, WIDTH, COLUMNS):
        mask = is_row & (begin + number < WIDTH)
        some = tl.load(x + begin + number, mask=mask, other=0.0).to(tl.float32)
        squares += some * some
    return tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / WIDTH + EPS)


@jit
def keep_layout(x):
    """Return x, fp32: the compiler keeps the layout in which x was computed.

    Else it computes norm and RoPE in the layout of a product's operand, of which each warp has all:
    spills, and 14 more barriers. GPUs of other makers do without.
    """
    if tl.target_info.is_cuda():
        PTX: tl.constexpr = "mov.b32 $0, $1;"
        return tl.inline_asm_elementwise(PTX, "=f,f", [x], tl.float32, is_pure=False, pack=1)
    else:
        return x


@jit
def prefetch(address, size):
    """Prefetch `size` bytes at an address, both multiples of 16, into L2: one thread does."""
    PTX: tl.constexpr = """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }"""
    given = address.to(tl.int64), size
    tl.inline_asm_elementwise(PTX, "=r,l,r", given, tl.int32, is_pure=False, pack=1)


@jit
def to_bf16(x):
    """Round fp32 to bf16. Tests replace it: Triton's interpreter truncates."""
    return x.to(tl.bfloat16)


@jit
def int8_scale(largest):
    """Return the bf16 scale [R, 1] of rows with these largest magnitudes, as `quantize_int8`."""
    scale = to_bf16(tl.div_rn(largest, tl.full([largest.shape[0], 1], 127, tl.float32)))
    return tl.where(scale == 0, tl.full([largest.shape[0], 1], 1, tl.bfloat16), scale)


@jit
def int8_codes(x, scale):
    """Quantize fp32 x by a scale -> codes, codes * scale in fp32: NaN where x is not finite."""
    ratio = tl.clamp(tl.div_rn(x, scale.to(tl.float32)), -127.0, 127.0)
    codes = (ratio + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: the sum is rounded to an integer
    return codes, codes * scale.to(tl.float32) + (x - x)
