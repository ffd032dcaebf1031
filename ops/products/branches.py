"""Results of sublayers that are normed before they are added to the residual.

The reference is `SandwichAddNorm` (models/layers/sandwich.py).
"""

from ops.launch import jit, tl
from ops.products.operands import load_x


@jit
def load_branches(added, scale, at, d, stride, s: tl.constexpr):
    """Load the branches at `at` [D], `stride` apart -> the norm of the sum of their norms.

    scale: the last norm's weight. Also return 1 / RMS of that sum.
    """
    inside = d < s.D
    branch = added.y + at + d
    values = tl.load(branch, mask=inside, other=0.0).to(tl.float32)
    if s.branches > 1:
        first = tl.load(added.branch_norms + d, mask=inside, other=0.0).to(tl.float32)
        values *= tl.rsqrt(tl.sum(values * values, 0) / s.D + s.eps) * first
        for n in tl.static_range(1, s.branches):
            branch += stride
            other = tl.load(branch, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(added.branch_norms + n * s.D + d, mask=inside, other=0.0)
            factor = tl.rsqrt(tl.sum(other * other, 0) / s.D + s.eps)
            values += other * factor * weight.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / s.D + s.eps)
    return values * (factor * scale), factor


@jit
def load_branch_again(x, branch, norm, inverse, factor, l: tl.constexpr):
    """Load x and one branch in the order of a `QuantizedX` -> the sums, rounded.

    norm: the branch's, of which inverse is 1 / RMS. factor: of the sums.
    """
    program, totals = tl.program_id(0), ()
    raw, branches = load_x(x, program, l), load_x(branch, program, l)
    scales = load_x(norm, program, l)
    dtype: tl.constexpr = raw[0].dtype
    for k in tl.static_range(l.fields):
        normed = branches[k].to(tl.float32) * (inverse * scales[k].to(tl.float32))
        totals = totals + (((raw[k].to(tl.float32) + normed) * factor).to(dtype),)
    return totals
