"""Sublayers' results as `join_tokens` adds them: messages of all ranks, and normed branches.

The reference of normed branches is `SandwichAddNorm` (models/layers/sandwich.py).
"""

from ops.launch import jit, tl
from ops.products.operands import load_x
from ops.ranks.mailbox import any_missing, numbers_of, receive


@jit
def receive_sum(memory, call, d, dtype: tl.constexpr, s: tl.constexpr):
    """Wait for the messages of all ranks -> their sum, fp32 [BLOCK].

    A program waits for a few words of each message before it reads them all: while many programs
    read all words again and again, L2 has less time for those that arrive.
    """
    m: tl.constexpr = s.messages
    rank = tl.arange(0, m.rows)[:, None]
    inbox = memory + rank * m.stride
    wanted = (rank < m.ranks) & (d < s.D)[None, :]
    if s.probes:
        probe = inbox + (tl.arange(0, s.probes) * (s.D // s.probes))[None, :]
        probes = (rank < m.ranks) & (tl.arange(0, s.probes) >= 0)[None, :]
        while any_missing(tl.load(probe, mask=probes, other=0, volatile=True), call, probes):
            pass
    return receive(inbox + d[None, :], call, wanted, dtype)


@jit
def _load_branch(branch, call, d, dtype: tl.constexpr, s: tl.constexpr):
    """Load a branch, fp32 [BLOCK]; with a call's number the sum of its messages."""
    if call is not None:
        return receive_sum(branch, call, d, dtype, s)
    else:
        return tl.load(branch + d, mask=d < s.D, other=0.0).to(tl.float32)


@jit
def load_branches(branch, call, added, scale, d, stride, dtype: tl.constexpr, s: tl.constexpr):
    """Load the branches at `branch` [D], `stride` apart -> the norm of the sum of their norms.

    call: they are messages of it; or None. scale: the last norm's weight. Also return 1 / RMS of
    that sum.
    """
    inside = d < s.D
    values = _load_branch(branch, call, d, dtype, s)
    if s.branches > 1:
        first = tl.load(added.branch_norms + d, mask=inside, other=0.0).to(tl.float32)
        values *= tl.rsqrt(tl.sum(values * values, 0) / s.D + s.eps) * first
        for n in tl.static_range(1, s.branches):
            branch += stride
            other = _load_branch(branch, call, d, dtype, s)
            weight = tl.load(added.branch_norms + n * s.D + d, mask=inside, other=0.0)
            factor = tl.rsqrt(tl.sum(other * other, 0) / s.D + s.eps)
            values += other * factor * weight.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / s.D + s.eps)
    return values * (factor * scale), factor


@jit
def load_quads(x, l: tl.constexpr, VOLATILE: tl.constexpr = False):
    """Load this program's quads of x in the order of a `QuantizedX`."""
    return load_x(x, tl.program_id(0), l, VOLATILE)


@jit
def load_branch_again(x, branch, norm, inverse, factor, l: tl.constexpr):
    """Load x and one branch in the order of a `QuantizedX` -> the sums, rounded.

    norm: the branch's, of which inverse is 1 / RMS. factor: of the sums.
    """
    raw, branches, scales = load_quads(x, l), load_quads(branch, l), load_quads(norm, l)
    return [
        _add_normed(raw[k], branches[k].to(tl.float32), scales[k], inverse, factor)
        for k in l.field_numbers
    ]


@jit
def _add_normed(x, branch, scale, inverse, factor):
    """Return x plus a branch, fp32, times scale and inverse; all that times factor, as x."""
    normed = branch * (inverse * scale.to(tl.float32))
    return ((x.to(tl.float32) + normed) * factor).to(x.dtype)


@jit
def _sum_field(messages, k: tl.constexpr, dtype: tl.constexpr, l: tl.constexpr):
    """Sum field k of all ranks' messages, as of `load_quads` -> fp32 [lanes, 4]."""
    total = tl.zeros([l.lanes, 4], tl.float32)
    for rank in tl.static_range(len(messages)):
        total += numbers_of(messages[rank][k], dtype)
    return total


@jit
def receive_again(memory, add, norm, inverse, factor, s: tl.constexpr, l: tl.constexpr):
    """Load the messages at `memory`, all received, in the order of `add` -> the sums with it.

    add: the residual as of `load_quads`. norm, inverse, factor: as of `load_branch_again`, or None.
    """
    dtype: tl.constexpr = add[0].dtype
    messages = ()
    for rank in tl.static_range(s.messages.ranks):
        messages = messages + (load_quads(memory + rank * s.messages.stride, l, True),)
    if norm is None:
        return [
            (add[k].to(tl.float32) + s.scale * _sum_field(messages, k, dtype, l)).to(dtype)
            for k in l.field_numbers
        ]
    else:
        scales = load_quads(norm, l)
        return [
            _add_normed(add[k], _sum_field(messages, k, dtype, l), scales[k], inverse, factor)
            for k in l.field_numbers
        ]
