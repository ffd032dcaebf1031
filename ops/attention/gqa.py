"""Grouped-query attention of a few tokens over a KV cache, in one kernel or two.

    attend_kernel    norms of q and k, RoPE, cache append, attention
    merge_kernel     merge of the parts, if a sequence may have several

A program attends with some query heads of one KV head, as rows of a tile of tensor cores. It reads
each older key and value once for all of them. Programs share the positions of a long sequence
(Flash-Decoding, Dao et al. 2023): `find_parts` chooses how many from the position, on the GPU. The
other programs end at once. A caller that knows a bound of the positions (`reach`) saves them, and
`merge_kernel`. Merging by the last program of a KV head to end takes longer than that kernel, and
so do thread block clusters, which exchange parts through shared memory (H100).

No program waits for another: each computes the keys and values of the call's own tokens itself, and
reads only earlier positions from the cache.

`attend_int8` is for compiled attention: q is normed and rotated, its own keys are in the cache.

Letters: B sequences, Q queries of each, S positions of the cache, H query heads, K KV heads,
G = H / K, C head dim, P parts of the positions, at most, M rows of a program (queries times heads).
"""

import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention.gqa_kernels import attend_kernel, merge_kernel
from ops.attention.softmax import MAX_PARTS, PROGRAMS, count_parts
from ops.gpu import gpu_of
from ops.inductor import custom_op
from ops.launch import check_shapes, fit, launch
from ops.sizes import pow2

FEWEST_ROWS = 16  # that tensor cores multiply
FEW_PARTS = 8  # up to which a part is one block, with one query of a plain cache (H100)
WARPS, MERGE_WARPS = 8, 2
MERGED_COLUMNS = 32  # numbers of a head that a program of `merge_kernel` merges
NO_WINDOW = 1 << 30
MAX_QUERIES = 64
MAX_HEAD = 256  # numbers of a head, for several queries: larger ones do not fit in registers
MAX_NUMBERS = 64 * 128  # queries of a head times its numbers: more do not fit in registers


@dataclass(frozen=True)
class AttentionSettings:
    """What a layer's attention computes, in this order.

    Clip q, k and v to +-clip (0: none); RMS norm of each head of q and k; RoPE of the first
    rotary_dim numbers; scores times scale; softmax over the last `window` positions.
    """

    heads: int
    kv_heads: int
    head_dim: int  # a power of two from 16 to 512
    rotary_dim: int
    scale: float
    eps: float = 0.0  # of norms
    clip: float = 0.0
    window: int = NO_WINDOW  # positions that a token sees, its own included
    full_norm: bool = False  # norms over all heads of q and of k, before the clip
    norm_values: bool = False  # RMS norm of values too, without a weight
    keys_are_values: bool = False  # qkv has no values: they are its keys before norm and RoPE
    gate: str = ""  # the output is multiplied by "sigmoid" or "softplus" of numbers after values
    head_gate: bool = False  # the gate has one number a head, else as many as a head
    rope_begin: int = 0  # the layer's first column of `model.Context.rope`

    group = property(lambda s: s.heads // s.kv_heads)
    # The first head of qkv that is a value, then the first number that is a gate.
    first_value = property(lambda s: s.heads if s.keys_are_values else s.heads + s.kv_heads)
    first_gate = property(lambda s: (s.first_value + s.kv_heads) * s.head_dim)
    # Numbers of a head's gate, then of a token in qkv.
    gate_width = property(lambda s: (1 if s.head_gate else s.head_dim) if s.gate else 0)
    projected = property(lambda s: s.first_gate + s.heads * s.gate_width)

    def encoded(self) -> str:
        """Return the settings as text: a custom operator takes no dataclass."""
        return json.dumps(astuple(self))


@cache
def decode_settings(text: str) -> AttentionSettings:
    return AttentionSettings(*json.loads(text))


class HeadWeights(NamedTuple):
    """Weights of a layer's heads, each of which may be absent."""

    q_norm: Tensor | None = None  # [C]; [H * C] with full_norm
    k_norm: Tensor | None = None  # [C]; [K * C] with full_norm
    sinks: Tensor | None = None  # [H]: a score more, whose value is 0


class Place(NamedTuple):
    """Where the call's tokens are stored."""

    positions: Tensor  # int64 [B, Q], consecutive
    last: Tensor | None = None  # int64 [B]: the last token that is stored; None: all are


class Stored(NamedTuple):
    """A KV cache [2, rows, K, S, C], of which the first B rows are used.

    scales: bf16 [2, rows, K, S, 1] of an int8 cache, whose entries are viewed as int16.
    """

    entries: Tensor
    scales: Tensor | None


class Results(NamedTuple):
    """What the kernels write. Parts of a program are [P, ROWS, C] and [P, ROWS, 2], in fp32."""

    y: Tensor | None  # [B, Q, H * C]
    partial: Tensor | None  # not yet divided by the sum of weights
    sums: Tensor | None  # the maximum score, and the sum of exp(score - maximum)


@dataclass(frozen=True)
class Tile:
    """How a program reads the positions."""

    block: int  # positions at once
    stages: int  # blocks in flight, and the one in use
    wide: bool = False  # read two blocks as one, where a part has more than one and up to two


@dataclass(frozen=True)
class KernelSettings:
    """Settings of the kernels: a layer's, and how its work is divided."""

    layer: AttentionSettings
    tile: Tile
    length: int  # S
    longest: int  # positions of a sequence after the call, at most
    entries: int  # heads times positions of the cache's keys: values follow
    queries: int  # Q
    rows: int  # M
    each: int  # query heads of a program
    parts: int  # P
    rope_width: int = 0
    int8: bool = False
    appends: bool = True  # q is raw, and its own keys are not yet in the cache
    one_part: int = 0  # positions up to which there is one part
    few_parts: int = MAX_PARTS  # up to which a part is one block

    splits = property(lambda s: -(-s.layer.group // s.each))  # programs a KV head and part
    pairs = property(lambda s: s.layer.kv_heads * s.splits)  # programs a sequence and part
    # Rows of a tile of the call's own tokens; with one query, the same token in all.
    own_rows = property(lambda s: max(FEWEST_ROWS, pow2(s.queries)) if s.queries > 1 else s.rows)
    stored_rows = property(lambda s: pow2(s.queries * s.each))  # rows of a program's parts
    # Numbers, or int16 units of an int8 cache, of a head.
    width = property(lambda s: s.layer.head_dim // 2 if s.int8 else s.layer.head_dim)
    padded_parts = property(lambda s: pow2(s.parts))
    bodies = property(lambda s: 2 if s.tile.wide else 1)  # sizes of blocks: compile-time cases

    @property
    def loops(self) -> bool:
        """Whether a program may have more than its first block, so that it has a loop."""
        own = 0 if self.appends else self.queries
        longest = min(self.longest, self.layer.window + self.align - 2 + own)
        return longest > self.tile.block * self.bodies

    # Slots of a cache in which position p may be in slot p % S, else 0.
    ring = property(lambda s: s.length if s.layer.window < s.length else 0)
    columns = property(lambda s: min(s.layer.head_dim, MERGED_COLUMNS))
    score_scale = property(lambda s: 1.0 if s.appends else s.layer.scale)  # that queries lack
    # A window begins at a multiple of this, so that int8 scales are loaded as vectors.
    align = property(lambda s: 16 if s.int8 else 1)


def choose_tiles(C: int, itemsize: int, Q: int) -> Iterator[Tile]:
    """Yield tiles for heads of this size, the fastest first; itemsize: of the cache (H200).

    One query of an int8 cache has smaller ones: more programs of a multiprocessor (H100).
    """
    block = min(128, max(16, (4096 if itemsize == 4 else 16384) // C))
    if Q == 1:
        if itemsize == 1 and C > 64:
            block = min(64, block)
        if itemsize == 2:
            yield Tile(block, 3, wide=True)
        yield Tile(block, 3)
    elif itemsize == 1:
        yield Tile(block, 3)
    while block >= 16:
        yield Tile(block, 2)
        block //= 2


def choose_rows(Q: int, G: int, C: int, is_one_part: bool) -> int:
    """Return M, for Q queries of some of the G query heads of a KV head.

    16 is one tile of a tensor core. Several queries in one part: a program with fewer heads has
    less to do, and there are enough idle processors. In several parts, fewer programs read the same
    keys from L2.
    """
    if Q == 1:
        return max(FEWEST_ROWS, pow2(G))
    one_head = max(FEWEST_ROWS, pow2(Q))
    if is_one_part or C > 128:
        return one_head
    return max(one_head, min(32, pow2(Q * G)))


def takes_queries(Q: int, C: int) -> bool:
    """Whether the kernels take this many queries of a sequence, with heads of C numbers."""
    if C & C - 1 or not 16 <= C <= 512:
        return False
    fits = pow2(Q) * C <= max(MAX_NUMBERS, 8 * C)
    return Q == 1 or (Q <= MAX_QUERIES and C <= MAX_HEAD and fits)


def one_part(Q: int, C: int, itemsize: int) -> int:
    """Return up to how many positions are worth kernels of one part, for heads of C numbers.

    itemsize: of the cache. They are one block, or two: a further one takes longer than a merge. An
    int8 cache takes longer to read than to merge (H100), so that one query has parts from the
    second block on: 0.
    """
    return 0 if itemsize == 1 and Q == 1 else 2 * next(choose_tiles(C, itemsize, Q)).block


def divide(
    qkv: Tensor, stored: Stored, layer: AttentionSettings, width: int, reach: int | None = None
) -> Iterator[KernelSettings]:
    """Yield settings, the fastest first. width: of RoPE's rows. reach: as in `attend_tokens`."""
    (B, Q), (rows, K, S, _) = qkv.shape[:2], stored.entries.shape[1:]
    longest = S if reach is None else min(S, reach)
    C, length, int8 = layer.head_dim, min(longest, layer.window), stored.scales is not None
    itemsize = 1 if int8 else stored.entries.element_size()
    M = choose_rows(Q, layer.group, C, length <= one_part(Q, C, itemsize))
    each = min(layer.group, M // Q)
    for tile in choose_tiles(C, itemsize, Q):
        if length <= tile.block or Q > 1:
            tile = replace(tile, wide=False)
        s = KernelSettings(
            *(layer, tile, S, longest, rows * K * S, Q, M, each, 1, width, int8),
            one_part=tile.block * (1 if Q == 1 and int8 else 2),
        )
        P = 1
        if length > s.one_part:
            # One query of a plain cache: a program takes half of a multiprocessor's shared memory
            # or more, and all programs should run at once.
            side_by_side = 1 if Q == 1 and not int8 else PROGRAMS
            P = count_parts(B * s.pairs, length, tile.block, qkv.device, side_by_side)
        # One query of an int8 cache: as many parts as multiprocessors are one block. More parts
        # take longer to merge than their programs save (H100).
        processors = gpu_of(qkv.device).multiprocessors
        few = min(MAX_PARTS, max(1, processors // (B * s.pairs))) if int8 else FEW_PARTS
        yield replace(s, parts=P, few_parts=MAX_PARTS if Q > 1 else few)


@custom_op("moe_fast::attend_tokens", mutates_args=("cache", "scales"))
def attend_tokens(
    qkv: Tensor,
    rope: Tensor,
    positions: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    sinks: Tensor | None,
    settings: str,
    reach: int | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """Attend with Q tokens of each sequence, and append their keys and values -> [B, Q, H * C].

    qkv [B, Q, (H + 2 K) C], or more or fewer heads by the settings (`AttentionSettings.encoded`),
    at consecutive positions [B, Q]; each token sees those before it. rope: `model.Context.rope`.
    cache and scales as in `Stored`, q_norm, k_norm and sinks as in `HeadWeights`. Padding is
    computed as any other token, and its keys and values are stored.

    reach: a bound of the positions: all that count are less. None: they may be any. Tokens from
    there on are stored, but what they attend to is undefined.
    last: int64 [B], each sequence's last token that is stored; None: all are. A cache with fewer
    positions than a sequence is a ring (ops/plain/ring.py), which padding must not overwrite.
    """
    (B, Q), layer = qkv.shape[:2], decode_settings(settings)
    K, C = layer.kv_heads, layer.head_dim
    rows, S = max(B, cache.shape[1]), cache.shape[3]  # further rows of the cache are not used
    check_shapes(
        qkv=(qkv, (B, Q, layer.projected)),
        positions=(positions, (B, Q)),
        cache=(cache, (2, rows, K, S, C)),
    )
    y = qkv.new_empty(B, Q, layer.heads * C)
    stored = Stored(cache if scales is None else cache.view(torch.int16), scales)
    weights, qkv = HeadWeights(q_norm, k_norm, sinks), qkv.contiguous()
    numbers = qkv.new_empty(0, dtype=torch.float32)
    args = qkv, rope, Place(positions, last), weights, stored
    divisions = divide(qkv, stored, layer, rope.shape[-1], reach)
    candidates = ((s, {"warps": WARPS}) for s in divisions)
    s, options = fit(attend_kernel, candidates, *args, Results(y, numbers, numbers))
    count = B * s.pairs * s.parts * s.stored_rows if s.parts > 1 else 0
    partial, sums = numbers.new_empty(count * C), numbers.new_empty(count * 2)
    results = Results(y, partial, sums)
    launch(attend_kernel, (s.pairs, B, s.parts), *args, results, settings=s, **options)
    if s.parts > 1:
        grid = layer.heads, C // s.columns, B * Q
        launch(merge_kernel, grid, qkv, positions, sinks, results, settings=s, warps=MERGE_WARPS)
    return y


@attend_tokens.register_fake
def _(
    qkv, rope, positions, cache, scales, q_norm, k_norm, sinks, settings, reach=None, last=None
) -> Tensor:
    layer = decode_settings(settings)
    return qkv.new_empty(*qkv.shape[:2], layer.heads * layer.head_dim)


@torch.library.custom_op("moe_fast::attend_int8", mutates_args=())
def attend_int8(
    q: Tensor, codes: Tensor, scales: Tensor, positions: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Attend with few queries of each sequence over an int8 cache, in P parts.

    q [B, Q, H, C] at consecutive positions [B, Q]; codes [2, B, K, S, C] and their scales
    [2, B, K, S, 1]. Return the arguments of `softmax.merge_partial`: fp32 y [B, K, P, M, C] and
    sums [B, K, P, M, 2]. Row query * G + h belongs to the h-th query head of the KV head; rows from
    Q * G on are undefined.
    """
    (B, Q, H, C), (rows, K, S) = q.shape, codes.shape[1:4]
    y, sums = empty_parts(q, codes)
    layer = AttentionSettings(H, K, C, 0, C**-0.5, window=window)
    stored, results = Stored(codes.view(torch.int16), scales), Results(None, y, sums)
    place = Place(positions.contiguous(), None)
    args = q.contiguous(), None, place, HeadWeights(), stored, results
    # Without PDL: the kernel waits for nothing.
    options = {"warps": 4 if H // K * Q <= 16 else 8, "pdl": False}
    M = max(FEWEST_ROWS, pow2(layer.group * Q))
    sizes = S, S, rows * K * S, Q, M, layer.group, y.shape[2]
    blocks = (128, 64, 32, 16) if M <= 64 else (64, 32, 16)  # more spill
    divisions = (
        KernelSettings(layer, Tile(block, 2), *sizes, int8=True, appends=False) for block in blocks
    )
    s, options = fit(attend_kernel, ((s, options) for s in divisions), *args)
    launch(attend_kernel, (K, B, y.shape[2]), *args, settings=s, **options)
    return y, sums


def empty_parts(q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of `attend_int8`, not yet written."""
    (B, Q, H, C), K = q.shape, codes.shape[2]
    P = max(1, int(PROGRAMS * gpu_of(q.device).multiprocessors) // (B * K))
    y = q.new_empty(B, K, P, pow2(H // K * Q), C, dtype=torch.float32)
    return y, y.new_empty(*y.shape[:-1], 2)


@attend_int8.register_fake
def _(q, codes, scales, positions, window) -> tuple[Tensor, Tensor]:
    return empty_parts(q, codes)
