"""Chunks of the gated delta rule: functions of kernels for prompts and for a few tokens.

A chunk's tokens correct the state as one triangular system (Yang et al. 2024, Gated Delta Networks,
section 3.3). ops/plain/gated_delta.py has the formulas, the letters and the reference. The second
part is for a few tokens (ops/attention/delta.py): one chunk of ROWS, of which some are padding.
Their g and beta are 0, so they change nothing. A program has a whole head: it stores no systems.
"""

from ops.attention.delta_state import (
    convolve,
    keep_inputs,
    load_past,
    load_taps,
    norm_head,
    softplus,
    sum_past,
)
from ops.launch import jit, tl


@jit
def decay_between(total):
    """total [T], sums of g -> the decay of token i since token j <= i; 0 for later j: [T, T]."""
    i = tl.arange(0, total.shape[0])
    between = total[:, None] - total[None, :]
    return tl.exp(tl.where(i[:, None] >= i[None, :], between, float("-inf")))


@jit
def split_fp32(x):
    """Split fp32 into three bf16 that sum to it, but for its last bit."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@jit
def dot_split(x, parts, sums, PRECISION: tl.constexpr):
    """sums + x @ y. parts: those of y by `split_fp32` if x is bf16, else y alone."""
    if x.dtype == tl.bfloat16:
        if PRECISION == "tf32x3":
            sums = tl.dot(x, parts[2], sums)
        return tl.dot(x, parts[0], tl.dot(x, parts[1], sums))
    else:
        return tl.dot(x.to(tl.float32), parts[0], sums, input_precision=PRECISION)


@jit
def dot_fp32(x, y, sums, PRECISION: tl.constexpr):
    """sums + x @ y, of which one is fp32 and the other as stored.

    If that is bf16, products of bf16 are as exact as fp32, in half the time of tf32x3.
    """
    if x.dtype == tl.bfloat16:
        return dot_split(x, split_fp32(y), sums, PRECISION)
    elif y.dtype == tl.bfloat16:
        high, middle, low = split_fp32(x)
        if PRECISION == "tf32x3":
            sums = tl.dot(low, y, sums)
        return tl.dot(high, y, tl.dot(middle, y, sums))
    else:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), sums, input_precision=PRECISION)


@jit
def _join_blocks(inverse, system, apart, level, PRECISION: tl.constexpr):
    """Invert blocks of 2**(level + 1) tokens. inverse: of their halves. apart: token ^ token."""
    corner = tl.where(apart >> level == 1, system, 0.0)
    product = tl.dot(corner, inverse, input_precision=PRECISION)
    return inverse - tl.dot(inverse, product, input_precision=PRECISION)


@jit
def _invert_diagonal(system, PRECISION: tl.constexpr):
    """Invert the blocks of 16 tokens on the diagonal of I + system [T, T] -> [T, T]."""
    T: tl.constexpr = system.shape[0]
    N: tl.constexpr = T // 16
    n, i = tl.arange(0, N), tl.arange(0, 16)
    own = n[:, None, None, None] == n[None, None, :, None]
    blocks = tl.sum(tl.where(own, tl.reshape(system, [N, 16, N, 16]), 0.0), 2)
    apart = (i[:, None] ^ i[None, :])[None, :, :]
    inverse = tl.where(apart == 0, 1.0, tl.where(apart == 1, -blocks, 0.0))
    for level in tl.static_range(1, 4):
        inverse = _join_blocks(inverse, blocks, apart, level, PRECISION)
    return tl.reshape(tl.where(own, inverse[:, :, None, :], 0.0), [T, T])


@jit
def invert_unit_lower(
    system, LEVELS: tl.constexpr, PRECISION: tl.constexpr, UNROLLED: tl.constexpr = False
):
    """Invert I + system, which is strictly lower triangular [T, T], T = 2**LEVELS, 16 to 64.

    Join pairs of inverted blocks of 1, 2, 4, ... tokens: [[A, 0], [C, B]] has the inverse
    [[A', 0], [-B' C A', B']]. Powers of the system, which need fewer steps, grow without bound and
    cancel. UNROLLED: every warp has whole results of 16 tokens, and waits for no other. Else every
    warp has one block of 16 tokens, until these are joined.
    """
    i = tl.arange(0, system.shape[0])
    apart = i[:, None] ^ i[None, :]
    if UNROLLED:
        inverse = tl.where(apart == 0, 1.0, tl.where(apart == 1, -system, 0.0))
    else:
        inverse = _invert_diagonal(system, PRECISION)
    for level in tl.static_range(1 if UNROLLED else 4, LEVELS):
        inverse = _join_blocks(inverse, system, apart, level, PRECISION)
    return inverse


# A few tokens -------------------------------------------------------------------------------------


@jit
def _halves(x):
    """x [2 n, T] -> its first n rows, and the others."""
    x = tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]])
    return tl.split(tl.permute(x, (1, 2, 0)))


@jit
def _convolve_chunk(inputs, taps, COUNT: tl.constexpr, s: tl.constexpr):
    """Convolve COUNT tokens, and apply SiLU -> [n, ROWS], rounded as inputs; then zeros.

    inputs: of the W - 1 tokens before them, then theirs, [n] each.
    """
    tokens = ()
    for n in tl.static_range(s.rows):
        if n < COUNT:
            past = sum_past(inputs[n:], taps, 0.0, s)
            y = convolve(inputs[n + s.width - 1], past, taps, s).to(inputs[0].dtype)
        else:
            y = tl.zeros_like(inputs[0])
        tokens = tokens + (y,)
    # Joined so that a thread has all tokens of a channel: nothing moves. The last one joined is the
    # lowest bit of a token's number.
    for level in tl.static_range(s.levels):
        joined = ()
        for n in tl.static_range(s.rows >> (level + 1)):
            joined = joined + (tl.join(tokens[n], tokens[n + (s.rows >> (level + 1))]),)
        tokens = joined
    return tl.reshape(tokens[0], [inputs[0].shape[0], s.rows])


@jit
def _key_rows(x, s: tl.constexpr):
    """x [copies 2 Ck, T], channels as in `key_channels` -> q and k [T, Ck]."""
    if s.copies == 2:
        x, _ = _halves(x)
    q, k = _halves(x)
    return tl.trans(q), tl.trans(k)


@jit
def _value_rows(x):
    """x [2 Cv, T], all channels twice -> v [T, Cv], fp32."""
    v, _ = _halves(x)
    return tl.trans(v).to(tl.float32)


@jit
def _products(x, y, PRECISION: tl.constexpr):
    """x @ y^T [T, T], of numbers as stored."""
    if x.dtype == tl.bfloat16:
        return tl.dot(x, tl.trans(y))
    else:
        x, y = x.to(tl.float32), y.to(tl.float32)
        return tl.dot(x, tl.trans(y), input_precision=PRECISION)


@jit
def _inverse_norms(products):
    """Return 1 / the L2 norm of each row of x. products: x @ x^T [T, T], which has them exactly."""
    i = tl.arange(0, products.shape[0])
    squares = tl.where(i[:, None] == i[None, :], products, 0.0)
    return tl.rsqrt(tl.sum(squares, 1) + 1e-6), tl.rsqrt(tl.sum(squares, 0) + 1e-6)


@jit
def _solve(k, g, beta, s: tl.constexpr):
    """Return a chunk's sums of g [T], the factor 1 / |k| [T], decays and the inverse [T, T].

    k [T, Ck], not normalized. Decays [T, T] are those of `decay_between`, with the factor of the
    token that has written. The inverse has beta.
    """
    i, total = tl.arange(0, s.rows), tl.cumsum(g, 0)
    products = _products(k, k, s.precision)
    scale, column_scale = _inverse_norms(products)
    decay = decay_between(total) * column_scale[None, :]
    system = tl.where(i[:, None] > i[None, :], (beta * scale)[:, None] * products * decay, 0.0)
    inverse = invert_unit_lower(system, s.levels, s.precision, True)
    return total, scale, decay, inverse * beta[None, :]


@jit
def _read_state(q, k, v, g, beta, parts, s: tl.constexpr):
    """Return what a chunk reads from the state, [T, Cv]. parts: the state's, as in `dot_split`."""
    total, scale, decay, inverse = _solve(k, g, beta, s)
    zeros, since = tl.zeros([s.rows, s.value_dim], tl.float32), tl.exp(total)
    errors = v - (since * scale)[:, None] * dot_split(k, parts, zeros, s.precision)
    q_scale, _ = _inverse_norms(_products(q, q, s.precision))
    q_scale *= s.key_dim**-0.5
    y = (since * q_scale)[:, None] * dot_split(q, parts, zeros, s.precision)
    scores = q_scale[:, None] * _products(q, k, s.precision) * decay
    scores = tl.dot(scores, inverse, input_precision=s.precision)
    return tl.dot(scores, errors, y, input_precision=s.precision)


@jit
def _chunk_gates(b, a, rate, bias, real, s: tl.constexpr):
    """Return g and beta [ROWS] of a chunk; 0 after `real` tokens, which then change nothing."""
    b, a, is_real = b.to(tl.float32), a.to(tl.float32), tl.arange(0, s.rows) < real
    return tl.where(is_real, -rate * softplus(a + bias), 0.0), tl.where(is_real, tl.sigmoid(b), 0.0)


@jit
def prepare_few(old, newest, weights, first_value, s: tl.constexpr):
    """Return what `read_few` takes of the state and of values: all is read before the wait.

    Parts of the state, as in `dot_split`; channels of v, all twice: as many numbers as threads;
    their taps; their inputs before the call; the norm's weight. newest: where these inputs are.
    """
    # The tile's dimensions in the order of rows and columns: no number moves.
    state = tl.reshape(tl.permute(old, (0, 2, 1, 3)), [s.key_dim, s.value_dim])
    parts = split_fp32(state) if newest.dtype.element_ty == tl.bfloat16 else (state,)
    values = first_value + tl.arange(0, 2 * s.value_dim) % s.value_dim
    weight = tl.load(weights.norm + tl.arange(0, s.value_dim)[None, :]).to(tl.float32)
    taps, past = load_taps(weights.conv, values, s), load_past(newest, values, s)
    return parts, values, taps, past, weight


@jit
def _pending_tile(channels, tokens, s: tl.constexpr):
    """Return where a call's tokens have channels, in rows of qkv and of the window, and a mask."""
    row, channels = tl.arange(0, s.rows)[:, None], channels[None, :]
    exists = (row < tokens) & (channels >= 0)
    return row * s.row + channels, (row + s.width - 1) * s.channels + channels, exists


@jit
def read_few(qkv, found, y, few, own_keys, gates, kept, counts, moves_keys, s: tl.constexpr):
    """Store what the call's tokens read of a head, normalized, and make them the pending ones.

    found: as in `delta._find_gates`. few: of `prepare_few`. own_keys: channels of q and k, their
    taps, and their inputs before the call. gates: the decay's rate and bias. kept: the window,
    where the first pending token has b and a, and the first channel of v. counts: real tokens, and
    all. moves_keys: whether to store q's and k's inputs, too.
    """
    STRIDE: tl.constexpr = s.heads * s.value_dim
    DTYPE: tl.constexpr = y.dtype.element_ty
    parts, values, value_taps, value_past, weight = few
    keys, key_taps, key_past = own_keys
    window, pending_gates, first_value = kept
    real, tokens = counts
    key_inputs, value_inputs = key_past, value_past
    for n in tl.static_range(s.own):
        token, end = qkv + n * s.row, tl.where(n < tokens, s.channels, 0)
        key_inputs = key_inputs + (tl.load(token + keys, mask=keys < end, other=0.0),)
        value_inputs = value_inputs + (tl.load(token + values, mask=values < end, other=0.0),)
    token, columns = tl.arange(0, s.rows), tl.arange(0, s.value_dim)
    row, exists = token[:, None], token < tokens
    b = tl.load(found[0] + token * s.b_row, mask=exists, other=0.0)
    a = tl.load(found[1] + token * s.a_row, mask=exists, other=0.0)
    at_values, kept_values, are_values = _pending_tile(first_value + columns, tokens, s)
    at_keys, kept_keys, are_keys = _pending_tile(keys, tokens, s)
    at_gate = found[2] + (row * s.output_row + (first_value + columns)[None, :])
    gate = tl.load(at_gate, mask=are_values, other=0.0).to(tl.float32)
    value_tile = tl.load(qkv + at_values, mask=are_values)  # again: 16 bytes of a thread at once
    key_tile = tl.load(qkv + at_keys, mask=are_keys)
    g, beta = _chunk_gates(b, a, gates[0], gates[1], real, s)
    q, k = _key_rows(_convolve_chunk(key_inputs, key_taps, s.own, s), s)
    v = _value_rows(_convolve_chunk(value_inputs, value_taps, s.own, s))
    factor = tl.sigmoid(gate) if s.sigmoid_gate else tl.sigmoid(gate) * gate
    factor = tl.where(row < real, factor * weight, 0.0)
    if real > 0:  # in flight while the state is read
        tl.store(pending_gates[0] + token * s.gates, b, mask=exists)
        tl.store(pending_gates[1] + token * s.gates, a, mask=exists)
        is_first = tl.arange(0, 2 * s.value_dim) < s.value_dim
        keep_inputs(window, value_past, None, values, tokens, is_first, s)
        tl.store(window + kept_values, value_tile, mask=are_values)
        if moves_keys:
            keep_inputs(window, key_past, None, keys, tokens, None, s)
            tl.store(window + kept_keys, key_tile, mask=are_keys)
    out = norm_head(_read_state(q, k, v, g, beta, parts, s), factor, s, DTYPE)
    tl.store(y + row * STRIDE + columns[None, :], out.to(DTYPE), mask=row < tokens)
