"""The next token of each row in three Triton kernels: `runtime.sampling.sample` and `step_to`.

    find_best    of each of GROUPS groups of the vocabulary, the KEPT tokens with the largest logits
    rank         the TOP largest of those, in order
    draw         top-k, top-p and min-p, the draw, and the step to the token
    post         the token, in host memory: 1 to 2 us. A copy between two steps costs 11 us on an
                 H200: the next graph waits for the copy engine, and that for the graph before

A token's key is its logit's ordered bits, then its complement: int64, so that keys are distinct and
the order of keys is the order of `shortlist`, ties included.

A group may have more of the top_k largest keys than it keeps. Then its last one is among them, and
`draw` searches the whole vocabulary instead: exact, but one program reads it top_k times.

Rows are sequences, or (ops/step/draft_check.py) the tokens of their passes. The T tokens of a
sequence's pass share controls and `seen`: token i has also seen the pass's tokens up to i.

A token that is drawn as a draft is also written to `Drafts`, with the distribution it is drawn
from. Logits may then be those of a part of the vocabulary; tokens are places in the part until
`_draw` looks their ids up.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ops.launch import await_previous, jit, launch, tl
from ops.products.routing import ordered_bits
from ops.sizes import cdiv, pow2

TOP = 256  # as many candidates as `sampling.MAX_CANDIDATES`
# A group has half of a token of the likeliest 256 on average, and 8 of them once in 10 million.
GROUPS, KEPT = 512, 8
RUN = 4  # neighbors in a group: neighboring tokens, such as digits, are often likely together
RANKED = 8  # keys whose rank a program counts


@dataclass(frozen=True)
class Draw:
    """Settings of the kernels. A row has GROUPS * KEPT keys in `best`."""

    V: int = 0  # logits of a row
    groups: int = 0
    run: int = RUN
    ranked: int = RANKED
    top: int = TOP
    chunk: int = 1024  # tokens of a step of the search in the whole vocabulary
    controls: int = 5  # a sequence's: temperature, top_k, top_p, min_p, penalty
    stream: int = 0  # its random numbers are those of another seed
    whole: int = 0  # the vocabulary, if the logits are those of a part
    drafts: int = 0  # that `Drafts` has
    keeps: bool = False  # their distributions, too
    greedy: bool = False  # a group has one key, and none is ranked

    vocabulary = property(lambda s: s.whole or s.V)
    cleared = property(lambda s: pow2(cdiv(s.vocabulary, s.groups)))  # of `q`, by a program
    # Tokens of a group, rounded up to a power of two.
    size = property(lambda s: pow2(cdiv(s.V, s.groups * s.run) * s.run))
    kept = property(lambda s: 1 if s.greedy else KEPT)  # keys of a group
    keys = property(lambda s: s.groups * s.kept)  # keys of a row in `best`
    listed = property(lambda s: s.groups if s.greedy else s.top)  # candidates of a draw
    # `_search` would write past `ordered` for more than TOP, and never end for more than V.
    max_top_k = property(lambda s: min(s.top, s.V))


class Drafts(NamedTuple):
    """Where drafts are written: N of them, each at `place`, which is then the next one's."""

    token: Tensor  # int64 [1, N]
    q: Tensor  # fp32 [N, V], the distributions that they were drawn from
    certainty: Tensor  # fp32 [N], the largest probabilities
    place: Tensor  # int64 [1]


@jit
def _edited_logits(source, token, inside):
    """Load logits, those of seen tokens penalized (`sampling.penalize`); NaN becomes inf.

    source: a row's logits and `seen`, its penalty, a pass's tokens or None, how many of them count,
    and the ids of the logits' tokens or None.
    """
    logits, seen, penalty, passed, count, ids = source
    x = tl.load(logits + token, mask=inside, other=0.0)
    if penalty != 1.0:
        number = token if ids is None else tl.load(ids + token, mask=inside, other=0)
        marked = tl.load(seen + number, mask=inside, other=0) != 0
        if passed is not None:
            for n in range(count):
                marked |= token == tl.load(passed + n)
        x = tl.where(marked, tl.where(x > 0.0, tl.math.div_rn(x, penalty), x * penalty), x)
    return tl.where(x == x, x, float("inf"))


@jit
def _key(bits, token):
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - token)


@jit
def _logit_of(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# Grid [GROUPS, B T], one warp a program: a group's KEPT largest keys, one maximum each. The first
# program clears what `_rank` writes, all of them the draft's `q`. each: T, if rows are the tokens
# [B, T] of passes, `passed`. sums: of one row, or None; the largest logit of each group, then the
# sum of exp(logit - largest). results: what `_rank` writes.
@jit(do_not_specialize=("each",))
def _find_best(
    logits,
    seen,
    passed,
    ids,
    drafts,
    sums,
    controls,
    best,
    results,
    each,
    s: tl.constexpr,
    PDL: tl.constexpr,
):
    TOP: tl.constexpr = s.top
    group, row = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, s.size)
    token = (at // s.run * s.groups + group) * s.run + at % s.run
    sequence, count = row, 0
    if passed is not None:
        sequence, count = row // each, row % each + 1
        passed += sequence * each
    penalty = tl.load(controls + sequence * s.controls + 4)
    await_previous(PDL)
    source = logits + row * s.V, seen + sequence * s.vocabulary, penalty, passed, count, ids
    x = _edited_logits(source, token, token < s.V)
    bits = tl.where(token < s.V, ordered_bits(x), -(2**31))
    best += row * s.kept * s.groups + group
    if sums is not None:
        x = tl.where(token < s.V, x, float("-inf"))
        most = tl.max(x, 0)
        tl.store(sums + group, most)
        part = tl.where(x > float("-inf"), tl.exp(x - most), 0.0)
        tl.store(sums + s.groups + group, tl.sum(part, 0))
    for n in tl.static_range(s.kept):
        largest = tl.max(bits, 0)
        first = tl.min(tl.where(bits == largest, token, 2**31 - 1), 0)
        tl.store(best + n * s.groups, _key(largest, first))
        bits = tl.where(token == first, -(2**31), bits)
    if not s.greedy:  # noqa: SIM102  (known at compile time)
        if group == 0:
            ordered, crowded = results
            tl.store(ordered + row * TOP + tl.arange(0, TOP), tl.full([TOP], -(2**63), tl.int64))
            tl.store(crowded + row, 0)
    if s.keeps:
        cell = group * s.cleared + tl.arange(0, s.cleared)
        q = drafts.q + tl.load(drafts.place) * s.vocabulary + cell
        tl.store(q, tl.zeros([s.cleared], tl.float32), mask=cell < s.vocabulary)


# Grid [KEPT * GROUPS / RANKED, B T]: RANKED keys are compared with all, but first with the largest
# of each group, which most keys are far below: then none of them is among the top_k. crowded: set
# if a group's last key is.
@jit(do_not_specialize=("each",))
def _rank(controls, best, ordered, crowded, each, s: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(1)
    sequence = row if each is None else row // each
    top_k = tl.minimum(tl.load(controls + sequence * s.controls + 1), s.max_top_k)
    best += row * s.keys
    at = tl.program_id(0) * s.ranked + tl.arange(0, s.ranked)
    await_previous(PDL)
    key = tl.load(best + at, cache_modifier=".cg")
    first = tl.load(best + tl.arange(0, s.groups), cache_modifier=".cg")
    if tl.min(tl.sum((first[None, :] > key[:, None]).to(tl.int32), 1), 0) < top_k:
        # All keys at once: in a loop each load would wait for the one before.
        other = tl.load(best + tl.arange(0, s.keys), cache_modifier=".cg")
        rank = tl.sum((other[None, :] > key[:, None]).to(tl.int32), 1)
        tl.store(ordered + row * s.top + rank, key, mask=rank < s.top)
        is_last = at >= s.keys - s.groups
        tl.store(crowded + row + 0 * at, 1, mask=is_last & (rank < top_k))


@jit
def _vocabulary_keys(source, start, s: tl.constexpr):
    """Return the keys of CHUNK tokens. source: as in `_edited_logits`."""
    token = start + tl.arange(0, s.chunk)
    x = _edited_logits(source, token, token < s.V)
    return tl.where(token < s.V, _key(ordered_bits(x), token), -(2**63))


@jit
def _scramble(x):
    """`sampling.scramble` of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def noise_key(seed, position, stream):
    """Return the key of a sequence's noise at a position, of which `uniform` makes numbers."""
    key = _scramble(seed.to(tl.uint64) ^ stream)
    return _scramble(key + position.to(tl.uint64) * 0x9E3779B97F4A7C15)


@jit
def uniform(key, index):
    """`sampling.uniform`. key: of `noise_key`."""
    bits = (_scramble(key ^ index.to(tl.uint64)) >> 32).to(tl.uint32)
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)


@jit
def exponential(key, index):
    """`sampling.exponential`: -log1p(-u). Triton has no log1p; that of the rounded 1 - u is
    corrected (Goldberg 1991, theorem 4)."""
    u = uniform(key, index)
    rest = 1.0 - u
    return tl.where(rest == 1.0, u, u * tl.log(rest) / tl.where(rest == 1.0, 1.0, rest - 1.0))


@jit
def _search(top_k, source, ordered, s: tl.constexpr):
    """Store the top_k largest keys of the whole vocabulary at `ordered`, a pass for each."""
    found = top_k.to(tl.int64) * 0 + (2**63 - 1)
    for n in range(top_k):
        largest = found * 0 - (2**63 - 1)
        for start in range(0, s.V, s.chunk):
            keys = _vocabulary_keys(source, start, s)
            largest = tl.maximum(largest, tl.max(tl.where(keys < found, keys, -(2**63)), 0))
        found = largest
        tl.store(ordered + n, found)
    tl.debug_barrier()


@jit
def load_controls(controls, s: tl.constexpr):
    """Return a row's temperature, top_k, top_p and min_p."""
    top_k = tl.minimum(tl.load(controls + 1), s.max_top_k)
    return tl.load(controls), top_k, tl.load(controls + 2), tl.load(controls + 3)


@jit
def weigh(source, rules, ordered, crowded, s: tl.constexpr):
    """Return TOP candidates, their weights, and whether the row's largest logit is finite.

    Weights are proportional to the probabilities; excluded candidates have 0. source: as of
    `_edited_logits`. rules: as in `load_controls`. ordered, crowded: of this row. Greedy: ordered
    has the largest key of each group, of which the largest alone is a candidate.
    """
    temperature, top_k, top_p, min_p = rules
    at = tl.arange(0, s.listed)
    key = tl.load(ordered + at, cache_modifier=".cg")
    if not s.greedy:  # noqa: SIM102  (known at compile time)
        if tl.load(crowded, cache_modifier=".cg") != 0:
            _search(top_k.to(tl.int32), source, ordered, s)
            key = tl.load(ordered + at, cache_modifier=".cg")
    logit, largest = _logit_of(key), _logit_of(tl.max(key, 0))
    if s.greedy:
        weight = tl.where(key == tl.max(key, 0), 1.0, 0.0)
    else:
        # Probabilities, as multiples of the largest one.
        weight = tl.where(at < top_k, tl.exp((logit - largest) / temperature), 0.0)
        if top_p < 1.0:
            before = tl.cumsum(weight, 0) - weight
            weight = tl.where(before < top_p * tl.sum(weight, 0), weight, 0.0)
        weight = tl.where(weight >= min_p, weight, 0.0)
    finite = tl.abs(largest) < float("inf")
    token = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    return token, weight, finite


@jit
def pick(score, candidates, finite, s: tl.constexpr):
    """Return the candidate with the largest score, the first of equal ones; NOT_FINITE: -1."""
    at = tl.arange(0, s.listed)
    first = tl.min(tl.where(score == tl.max(score, 0), at, s.listed), 0)
    number = tl.max(tl.where(at == tl.where(finite, first, 0), candidates, 0), 0)
    return tl.where(finite, number, -1).to(tl.int64)


# Grid [B].
@jit
def _draw(logits, state, ordered, crowded, ids, drafts, sums, s: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    seen = state.seen + row * s.vocabulary
    controls = state.controls + row * s.controls
    rules = load_controls(controls, s)
    source = logits + row * s.V, seen, tl.load(controls + 4), None, 0, ids
    place, tokens = tl.load(state.position + row), tl.load(state.last + row) + 1
    key = noise_key(tl.load(state.seeds + row), place, s.stream)
    await_previous(PDL)
    candidates, weight, finite = weigh(source, rules, ordered + row * s.listed, crowded + row, s)
    if ids is not None:
        candidates = tl.load(ids + candidates, mask=weight > 0.0, other=0).to(tl.int32)
    score = tl.where(weight > 0.0, weight / exponential(key, candidates), -1.0)
    number = pick(score, candidates, finite, s)
    tl.store(state.token + row, number)
    tl.store(state.position + row, place + tokens)
    tl.store(seen + tl.where(finite, number, s.vocabulary - 1), True)
    if drafts is not None:
        n = tl.load(drafts.place)
        tl.store(drafts.token + n, number)
        if s.keeps:
            p = tl.where(finite, weight / tl.sum(weight, 0), 0.0)
            tl.store(drafts.q + n * s.vocabulary + candidates, p, mask=p > 0.0)
            tl.store(drafts.certainty + n, tl.max(p, 0))
        if sums is not None:
            group = tl.arange(0, s.groups)
            most, part = tl.load(sums + group), tl.load(sums + s.groups + group)
            part = tl.where(part != 0.0, part * tl.exp(most - tl.max(most, 0)), 0.0)
            tl.store(drafts.certainty + n, 1.0 / tl.sum(part, 0))
        tl.debug_barrier()  # all threads have read the place
        tl.store(drafts.place, (n + 1) % s.drafts)


def draw_tokens(
    logits: Tensor,
    state: tuple,
    ids: Tensor | None = None,
    drafts: Drafts | None = None,
    greedy: bool = False,
    certain: bool = False,
    stream: int = 0,
) -> None:
    """Choose a token for each row of logits fp32 [B, V] and step to it, in place.

    state: a `sampling.StepState`. A top_k above TOP or V is taken as the smaller of the two, as in
    `shortlist`: a row that is idle, or of another step, may have any. ids int64 [V]: the logits'
    tokens, rising; None: all. drafts: of one sequence, its token is one of them, with its
    distribution and certainty. greedy: all rows are, and no distribution is kept; certain: but the
    certainty is, at temperature 1. stream: of the random numbers.
    """
    (B, V), (rows, whole) = logits.shape, state.seen.shape
    if rows != B or len(state.controls) != B or (whole if ids is None else len(ids)) != V:
        raise ValueError(f"logits {list(logits.shape)} with seen {list(state.seen.shape)}")
    if drafts is not None and B > 1:
        raise ValueError(f"drafts of {B} sequences: it must be one")
    size, count = 0 if ids is None else whole, 0 if drafts is None else drafts.token.shape[1]
    keeps = drafts is not None and not greedy
    s = Draw(*(V, GROUPS), stream=stream, whole=size, drafts=count, keeps=keeps, greedy=greedy)
    logits, sums = logits.contiguous(), None
    if certain and greedy:
        sums = logits.new_empty(2, s.groups)
    more = ids, drafts, sums
    largest = order_largest(logits, state.seen, None, state.controls, s, *more)
    launch(_draw, (B,), logits, state, *largest, *more, settings=s)


def order_largest(
    logits: Tensor,
    seen: Tensor,
    passed: Tensor | None,
    controls: Tensor,
    s: Draw,
    ids: Tensor | None = None,
    drafts: Drafts | None = None,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the keys of each row's TOP largest logits in order [R, TOP], and `crowded` [R].

    Greedy: twice the largest key of each group [R, GROUPS]. logits [R, V]. passed int64 [B, T]: the
    tokens of passes, R = B T; None: rows are sequences. ids and drafts: as in `draw_tokens`. sums:
    as of `_find_best`. Keys after the first top_k may be missing.
    """
    R, device, each = len(logits), logits.device, None if passed is None else passed.shape[1]
    best = torch.empty(R, s.keys, dtype=torch.int64, device=device)
    tokens = passed, ids, drafts, sums
    if s.greedy:
        found = controls, best, None, each
        launch(_find_best, (s.groups, R), logits, seen, *tokens, *found, settings=s, warps=1)
        return best, best
    ordered = torch.empty(R, TOP, dtype=torch.int64, device=device)
    crowded = torch.empty(R, dtype=torch.int32, device=device)
    found, largest = (controls, best), (ordered, crowded)
    given = logits, seen, *tokens, *found, largest, each
    launch(_find_best, (s.groups, R), *given, settings=s, warps=1)
    launch(_rank, (s.keys // RANKED, R), *found, *largest, each, settings=s)
    return largest


@dataclass(frozen=True)
class Post:
    """Settings of `_post`."""

    rows: int
    stride: int  # numbers of a slot

    block = property(lambda s: pow2(s.rows))


# Grid [1].
@jit
def _post(token, count, slots, s: tl.constexpr, PDL: tl.constexpr):
    row, n = tl.arange(0, s.block), tl.load(count)
    await_previous(PDL)
    newest = tl.load(token + row, mask=row < s.rows, other=0)
    tl.store(slots + (n & 1) * s.stride + row, newest, mask=row < s.rows)
    tl.debug_barrier()  # all threads have read the count
    tl.store(count, n + 1)


def post_tokens(token: Tensor, count: Tensor, slots: Tensor) -> None:
    """Copy token [rows, 1] to pinned slots [2, B], row count % 2; increment count. All int64."""
    settings = Post(len(token), slots.shape[1])
    launch(_post, (1,), token, count, slots, settings=settings, warps=1)
