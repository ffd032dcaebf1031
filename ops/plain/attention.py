"""Attention in plain PyTorch: one token, a few tokens over a long cache, a chunk of a prompt.

They are the reference of the kernels in ops/attention/gqa.py, and run where those do not.

Letters: B sequences, Q queries of each, S positions of keys, H query heads, K KV heads, C head dim.
`sinks` [H] are attention sinks: one more score per head, whose value is zero.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ops.inductor import custom_op
from ops.plain.ring import cache_slots, ring_positions

BLOCK = 128  # positions of a block, the unit in which `attend_blocks` reads a cache
# Up to this cache length, reading the whole cache is faster than finding the blocks in use.
SHORT_CACHE = 1024


class Mask(NamedTuple):
    """The cache positions that each query of a call attends to."""

    bias: Tensor  # [B, Q, S], 0 where a query attends, else -inf
    # The cache's blocks of BLOCK positions: how many are in use, int32 [B, 1, 1], and all block
    # indices, int32 [B, 1, 1, S / BLOCK], those in use first. None: read the whole cache.
    blocks: tuple[Tensor, Tensor] | None = None


def make_mask(positions: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Mask:
    """Return the mask of queries at positions [B, Q] of sequences of up to `length` positions.

    window: of the layers, whose caches are rings if it is shorter. dtype: of the bias.
    """
    slots, is_eager = cache_slots(length, window), not torch.compiler.is_compiling()
    is_ring, blocks = slots < length, None
    if positions.device.type == "cpu" and is_eager:
        length = int(positions.max()) + 1  # the host knows how much of the cache is in use
    if slots > SHORT_CACHE and slots % BLOCK == 0 and positions.is_cuda and not is_eager:
        blocks = blocks_in_use(positions, slots, window)
    keys = ring_positions(positions, slots, length) if is_ring else None
    return Mask(causal_bias(positions, length, window, dtype, keys), blocks)


def causal_bias(
    positions: Tensor,
    length: int,
    window: int | None,
    dtype: torch.dtype,
    keys: Tensor | None = None,
) -> Tensor:
    """Return each query's mask [B, Q, length]: 0 for the positions that it sees, else -inf.

    positions [B, Q]. window: the number of positions that a query sees, its own included. keys
    [B, N]: the positions of the keys, negative for none; the mask is [B, Q, N] then. None: from 0.
    """
    own = torch.arange(length, device=positions.device) if keys is None else keys.unsqueeze(1)
    visible = is_visible(positions.unsqueeze(-1), own, window)
    return torch.where(visible, 0.0, float("-inf")).to(dtype)


def is_visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Whether a query at one position sees the key at another: bool."""
    distance = query - key
    if window is None:
        return distance >= 0
    return (distance >= 0) & (distance < window) & (key >= 0)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Attend with queries q [B, Q, H, C] -> [B, Q, H * V].

    k [B, K, S, C], v [B, K, S, V], bias [B, Q, S] is added to the scores. Query heads are a
    [K, H / K] grid over the KV heads, so that keys and values broadcast and are never repeated in
    memory.
    """
    if q.shape[1] == 1:
        return attend_one(q, k, v, bias, sinks)
    (B, Q, H, C), K = q.shape, k.shape[1]
    # Fold B and K into one axis: H / K is then a head axis, along which keys have stride zero.
    q = q.view(B, Q, K, H // K, C).permute(0, 2, 3, 1, 4).flatten(0, 1)
    k, v = (t.flatten(0, 1).unsqueeze(1) for t in (k, v))
    if sinks is not None:
        q, k, v = append_sink(q, k, v, sinks.view(K, H // K, 1, 1).repeat(B, 1, 1, 1))
        bias = F.pad(bias, (1, 0))
    k, v = (t.expand(-1, H // K, -1, -1) for t in (k, v))
    bias = bias.unsqueeze(1).expand(-1, K, -1, -1).flatten(0, 1).unsqueeze(1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=C**-0.5)[..., :C]
    return y.unflatten(0, (B, K)).permute(0, 3, 1, 2, 4).reshape(B, Q, -1)


def attend_one(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """`attend` for one query of each sequence: products and a softmax that Inductor fuses."""
    (B, _, H, C), K = q.shape, k.shape[1]
    q = q.view(B, K, H // K, 1, C).float() * C**-0.5
    scores = (q * k.unsqueeze(2)).sum(-1) + bias.unsqueeze(1)  # [B, K, H / K, S]
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sinks = sinks.float().view(K, H // K, 1)
        largest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        parts = (scores - largest).exp()
        weights = parts / (parts.sum(-1, keepdim=True) + (sinks - largest).exp())
    return (weights.unsqueeze(-1) * v.unsqueeze(2).float()).sum(-2).to(v.dtype).view(B, 1, -1)


def append_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add each head's sink as a first key whose value is zero, because SDPA knows no sinks.

    q [..., Q, C], k and v [..., S, C], sinks [..., 1, 1] with q's other axes. Each head gets one
    more number: the sink in queries, sqrt(C) in the new key, zero in the other keys. With the scale
    C ** -0.5, which the caller passes to SDPA, the score is the sink. (Heads grow by 8 numbers:
    SDPA's kernels need rows of 16 bytes.)
    """
    C = q.shape[-1]
    q = torch.cat((q, F.pad(sinks.to(q.dtype), (0, 7)).expand(*q.shape[:-1], 8)), dim=-1)
    k, v = (F.pad(t, (0, 8, 1, 0)) for t in (k, v))
    k[..., 0, C] = C**0.5
    return q, k, v


def blocks_in_use(positions: Tensor, length: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Find the blocks of a cache that queries at rising positions [B, Q] see.

    length: slots of the cache, which may be a ring. Return `Mask.blocks`: the number of those
    blocks, int32 [B, 1, 1], and their indices, int32 [B, 1, 1, length / BLOCK], padded by any.
    """
    first = (positions[:, :1] - (window or length) + 1).clamp(min=0) // BLOCK  # [B, 1]
    order = (first + torch.arange(length // BLOCK, device=positions.device)) % (length // BLOCK)
    count = (positions[:, -1:] // BLOCK + 1 - first).clamp(max=length // BLOCK)
    return count.to(torch.int32).unsqueeze(-1), order.to(torch.int32)[:, None, None]


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    blocks: tuple[Tensor, Tensor],
    window: int | None,
    *,
    return_lse: bool = False,
):
    """Attend with few queries over a long cache, reading only the blocks in use -> as `attend`.

    Call it in compiled code only: eager FlexAttention computes all scores. blocks: from
    `blocks_in_use`. With a window the cache may be a ring. return_lse: return also the log-sum-exp
    of each query's scores, fp32 [B, H, Q].
    """
    slots, newest = k.shape[2], positions[:, -1]

    def visible(b: Tensor, h: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        if window is None or window >= slots:
            return is_visible(positions[b, query], slot, window)
        key = newest[b] - (newest[b] - slot) % slots  # `ring.slot_positions`
        return is_visible(positions[b, query], key, window)

    mask = BlockMask.from_kv_blocks(
        *blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible, seq_lengths=(q.shape[1], k.shape[2])
    )
    options = {"block_mask": mask, "enable_gqa": True}
    if q.shape[1] * (q.shape[2] // k.shape[1]) > BLOCK:
        # FlexAttention's kernel for decoding takes at most one block of query rows; else Inductor
        # fails with "No choices exist for backend". Its other kernel takes any number.
        options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    if not return_lse:
        return flex_attention(q.transpose(1, 2), k, v, **options).transpose(1, 2).flatten(2)
    aux = AuxRequest(lse=True)
    y, sums = flex_attention(q.transpose(1, 2), k, v, **options, return_aux=aux)
    return y.transpose(1, 2).flatten(2), sums.lse


def lower_right_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return SDPA's mask [queries, keys] by which the last query sees all keys."""
    if device.type == "cpu":
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    # Imported here, since it imports the compiler, which takes seconds. On a CPU SDPA would make
    # the mask above of it.
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(queries, keys)


@custom_op("moe_fast::attend_chunk")
def attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attend causally with a chunk of one prompt -> [Q, H * C].

    q [Q, H, C] are the last Q positions of k and v [K, S, C]. A custom operator, since SDPA takes a
    causal_lower_right bias only outside of compiled code.
    """
    Q, S, mask = len(q), k.shape[1], None
    if window is not None and window < S:  # drop positions that the first query does not see
        k, v = (t[:, max(0, S - Q - window + 1) :] for t in (k, v))
        if 2 * window < Q:
            return attend_window(q, k, v, window, sinks)
        mask = window_mask(Q, k.shape[1], window, q.device)
    q, k, v = q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    return attend_masked(q, k, v, mask, sinks)[0].transpose(0, 1).flatten(1).contiguous()


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """q [B, H, Q, C], k and v [B, K, S, C], the last Q positions of which are q's -> [B, H, Q, C].

    mask: bool [Q, S] or [B, 1, Q, S]; None: each query sees all positions up to its own.
    """
    Q, C = q.shape[-2:]
    if sinks is not None:
        q, k, v = append_sink(q, k, v, sinks.view(-1, 1, 1))
        mask = None if mask is None else F.pad(mask, (1, 0), value=True)
    if mask is None and 1 < Q < k.shape[2]:
        mask = lower_right_mask(Q, k.shape[2], q.device)
    is_causal = mask is None and Q > 1
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True, scale=C**-0.5
    )
    return y[..., :C]


def window_mask(Q: int, S: int, window: int, device: torch.device) -> Tensor:
    """Return which of S positions each of the last Q sees, of `window`, its own included."""
    distance = torch.arange(S - Q, S, device=device).unsqueeze(1) - torch.arange(S, device=device)
    return (distance >= 0) & (distance < window)


def attend_window(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None) -> Tensor:
    """`attend_chunk` of many more queries than a window has positions.

    Queries are divided into blocks as long as the window. A block sees itself and the positions of
    one more block before it: SDPA with one mask would multiply all queries with all keys.
    """
    (Q, H, C), blocks = q.shape, -(-q.shape[0] // window)
    # The first block's positions before k are padding, and so are the last block's own queries.
    rest, before = blocks * window - Q, window - (k.shape[1] - Q)
    q = F.pad(q, (0, 0, 0, 0, 0, rest)).view(blocks, window, H, C).transpose(1, 2)
    k, v = (F.pad(t, (0, 0, before, rest)).unfold(1, 2 * window, window) for t in (k, v))
    k, v = (t.permute(1, 0, 3, 2) for t in (k, v))  # [blocks, K, 2 * window, C]
    mask = window_mask(window, 2 * window, window, q.device).repeat(blocks, 1, 1, 1)
    mask[0, ..., :before] = False
    y = attend_masked(q, k, v, mask, sinks).transpose(1, 2).reshape(-1, H * C)
    return y[:Q].contiguous()


@attend_chunk.register_fake
def _(q: Tensor, *others) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def gate_heads(heads: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Multiply heads [..., H * C] by one of OUTPUT_GATES of a gate, [..., H * C] or [..., H]."""
    factor = gate.sigmoid() if activation == "sigmoid" else F.softplus(gate.float()).to(gate.dtype)
    if gate.shape[-1] == heads.shape[-1]:
        return heads * factor
    return (heads.unflatten(-1, (gate.shape[-1], -1)) * factor.unsqueeze(-1)).flatten(-2)
