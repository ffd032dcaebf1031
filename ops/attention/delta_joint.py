"""Two to four tokens of the gated delta rule, read at once in registers.

One after the other each waits for the one before, 1.2 us on an H200. Letters and formulas:
ops/attention/delta.py, ops/plain/gated_delta.py.
"""

from ops.attention.delta_state import (
    as_tile,
    channel_pair,
    convolve,
    keep_inputs,
    like_state,
    norm_head,
    softplus,
    sum_past,
)
from ops.launch import jit, tl
from ops.products.planes import quantize_group, store_head


@jit
def decay_and_share(b, a, rate, bias):
    return tl.exp(-rate * softplus(a.to(tl.float32) + bias)), tl.sigmoid(b.to(tl.float32))


@jit
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@jit
def _read_together(old, tokens, s: tl.constexpr):
    """Return what each of up to four tokens reads from the state, a tuple. old: before the first.

    tokens: of each q and k, v, decay and share, as of `read_and_update`.

    Sums over rows are of `old`, and of q and k of two tokens: none waits for another token. Each
    token's correction then changes the reads of later ones, as it would change the state:
    q (decay S + k correction) = decay (q S) + (q . k) correction. Three products of q and k are
    summed beside one with the state, so that they have its layout.
    """
    keys, reads, products = (), (), ()
    for t in tl.static_range(s.joint):  # a token's products begin at t (t + 2)
        q, k = channel_pair(tokens[t][0], s)
        q, k = like_state(q, old, s), like_state(k, old, s)
        keys, reads, products = keys + (k,), reads + (k * old, q * old), products + (q * q,)
        for n in tl.static_range(t + 1):
            products = products + (k * keys[n], q * keys[n])
    for _ in tl.static_range(s.joint * (4 - s.joint)):
        products = products + (products[0],)
    k_reads, q_reads, sums = (), (), ()
    for n in tl.static_range(2 * s.joint):
        found = (reads[n], products[3 * n], products[3 * n + 1], products[3 * n + 2])
        found = tl.reduce(found, 0, _add_four, keep_dims=True)
        found = tl.reduce(found, 2, _add_four, keep_dims=True)
        sums = sums + found[1:]
        if n % 2 == 0:
            k_reads = k_reads + found[:1]
        else:
            q_reads = q_reads + found[:1]
    outs = ()
    for n in tl.static_range(s.joint):
        v, decay, share = tokens[n][1], tokens[n][2], tokens[n][3]
        q_factor = tl.rsqrt(sums[n * (n + 2)] + 1e-6) * s.key_dim**-0.5
        k_factor = tl.rsqrt(sums[n * (n + 4) + 1] + 1e-6)
        correction = (v - decay * k_factor * k_reads[0]) * (share * k_factor)
        later_k, later_q = (), ()
        for t in tl.static_range(n, s.joint):
            later_k = later_k + (
                decay * k_reads[t - n] + sums[t * (t + 2) + 1 + 2 * n] * correction,
            )
            later_q = later_q + (
                decay * q_reads[t - n] + sums[t * (t + 2) + 2 + 2 * n] * correction,
            )
        outs, k_reads, q_reads = outs + (q_factor * later_q[0],), later_k[1:], later_q[1:]
    return outs


@jit
def _add_and_max(a, b, c, d):
    return a + c, tl.maximum(b, d)


@jit
def _norm_to_planes(out, gate, s: tl.constexpr, DTYPE: tl.constexpr):
    """Do what `norm_head` does, for tokens [1, ...] -> integers of a group, and their unit."""
    out = out.to(DTYPE).to(tl.float32)
    value = out * gate
    sums = tl.reduce((out * out, tl.abs(value)), 3, _add_and_max, keep_dims=True)
    square, largest = tl.reduce(sums, 1, _add_and_max, keep_dims=True)
    whole, unit = quantize_group(value, largest)
    return whole, unit * tl.rsqrt(square / s.value_dim + s.eps)


@jit
def load_before(newest, values, taps, lane_row, s: tl.constexpr):
    """Load what `read_joint` takes of v's inputs before a call, which begin at `newest`.

    Return one of them for each lane row, and the convolution's sums over those before its token.
    """
    past = tl.load(newest + tl.minimum(lane_row, s.width - 2) * s.channels + values)
    total, token = 0.0, tl.minimum(lane_row, s.joint - 1)
    for n in tl.static_range(s.width - 1):
        x = newest + (token + n) * s.channels + values
        x = tl.load(x, mask=token + n < s.width - 1, other=0.0)
        total += as_tile(x, s).to(tl.float32) * taps[n]
    return past, total


@jit
def read_joint(
    qkv, found, y, old, past, taps, factors, places, kept, real, moves_keys, s: tl.constexpr
):
    """Do for the S tokens of `s.joint` what `delta._read_tokens` does one after the other.

    Lane rows, which have the same columns, divide the tokens' v, gates and results: those past the
    last token have it, too. Store the tokens' inputs, those of q and k if `moves_keys`. y: may be
    `Planes`. past: the inputs of q and k, those of `load_before`. kept: the window, then as of
    `delta._find_pending`. places: channels of q and k, of v, and lane rows.
    """
    STRIDE: tl.constexpr = s.heads * s.value_dim
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    keys, values, lane_row = places
    key_inputs, value_past, value_sum = past
    own = tl.minimum(lane_row, s.joint - 1)
    gates, tokens = (), ()
    for n in tl.static_range(s.joint):
        key_inputs = key_inputs + (tl.load(qkv + n * s.row + keys),)
        gates = gates + ((tl.load(found[0] + n * s.b_row), tl.load(found[1] + n * s.a_row)),)
    new = tl.load(qkv + own * s.row + values)
    for n in tl.static_range(s.width - 1):
        before = own + (n - s.width + 1)
        x = tl.load(qkv + before * s.row + values, mask=before >= 0, other=0.0)
        value_sum += as_tile(x, s).to(tl.float32) * taps[1][n]
    gate = as_tile(tl.load(found[2] + own * s.output_row + values), s).to(tl.float32)
    v = convolve(new, value_sum, taps[1], s)
    factor = tl.sigmoid(gate) if s.sigmoid_gate else tl.sigmoid(gate) * gate  # or SiLU
    for n in tl.static_range(s.joint):
        key_sum = sum_past(key_inputs[n:], taps[0], 0.0, s)
        qk = convolve(key_inputs[n + s.width - 1], key_sum, taps[0], s)
        decay, share = decay_and_share(gates[n][0], gates[n][1], factors[0], factors[1])
        of_token = tl.sum(tl.where(as_tile(lane_row, s) == n, v, 0.0), 2, keep_dims=True)
        tokens = tokens + ((qk, of_token, decay, share),)
    outs = _read_together(old, tokens, s)
    if real > 0:  # all threads have read the old ones
        for n in tl.static_range(s.joint):
            tl.store(kept[1] + n * s.gates, gates[n][0])
            tl.store(kept[2] + n * s.gates, gates[n][1])
        kept_values = kept[0] + lane_row * s.channels + values
        tl.store(kept_values, value_past, mask=lane_row < s.width - 1)
        tl.store(kept_values + (s.width - 1) * s.channels, new, mask=lane_row < s.joint)
        if moves_keys:
            keep_inputs(kept[0], key_inputs, None, keys, 0, None, s)
    out = outs[s.joint - 1]
    for n in tl.static_range(s.joint - 1):
        out = tl.where(as_tile(lane_row, s) == n, outs[n], out)
    if s.plane_tokens > 0:
        whole, unit = _norm_to_planes(out, factor * factors[2], s, DTYPE)
        unit = tl.broadcast_to(tl.where(real > 0, unit, 0.0), whole.shape)
        column = (values - s.first_value) % s.value_dim
        token, exists = tl.program_id(1) * s.joint + lane_row, lane_row + 0 * column < s.joint
        whole, unit = tl.reshape(whole, values.shape), tl.reshape(unit, values.shape)
        token += 0 * column
        store_head(whole, unit, y, tl.program_id(0), column, token, exists, s.plane_tokens)
    else:
        out = tl.reshape(norm_head(out, factor * factors[2], s, DTYPE), values.shape)
        out = tl.where(real > 0, out, 0.0)
        tl.store(y + lane_row * STRIDE, out.to(DTYPE), mask=lane_row < s.joint)
