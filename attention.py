"""Attention: the cache, rotary positions, the ways to attend, and the layers that are made of them.

Shapes are those of model.py.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

import attention_kernels
from args import ModelArgs
from layers import Linear, RMSNorm, operator, realise, scaled


def join_parts(y: Tensor, sums: Tensor, sinks: Tensor | None = None) -> Tensor:
    """What attention found in parts of the positions, as attention_kernels.py has it, fp32 -> [..., rows, C].

    y [..., parts, rows, C], sums [..., parts, rows, 2]: the largest score and the sum of exp(score less that). sinks
    [..., rows]: one score more, whose value is zero.
    """
    largest, total = sums.unbind(-1)
    most = largest.amax(-2, keepdim=True)
    if sinks is not None:
        most = torch.maximum(most, sinks.unsqueeze(-2))
    share = (largest - most).exp()
    total = (total * share).sum(-2)
    if sinks is not None:
        total = total + (sinks - most.squeeze(-2)).exp()
    return (y * share.unsqueeze(-1)).sum(-3) / total.unsqueeze(-1)


class KVCache(nn.Module):
    """Keys, then values, [2, B, K, S, C] of one layer, written in place at each sequence's own positions.

    Of latent attention [1, B, 1, S, C], and the 2 of what is given and handed back is 1 too.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, parts: int = 2):
        super().__init__()
        self.register_buffer("kv", torch.zeros(parts, *shape, dtype=dtype, device=device), persistent=False)

    def update(self, positions: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, Q], keys, then values [B, Q, 2, K, C] -> all keys, all values [B, K, S, C]."""
        sequence = torch.arange(positions.shape[0], device=positions.device).unsqueeze(1)
        self.kv[:, sequence, :, positions] = kv
        return self.kv.unbind()

    def extend(self, chunk: "Chunk", kv: Tensor) -> tuple[Tensor, Tensor]:
        """kv of a chunk [1, Q, 2, K, C] -> its sequence's keys and values up to the chunk's end [K, end, C]."""
        positions = torch.arange(chunk.end - kv.shape[1], chunk.end, device=kv.device)
        self.kv[:, chunk.row, :, positions] = kv[0]
        live = self.kv[:, :, :, : chunk.end]
        return (live if self.kv.shape[1] == 1 else live.index_select(1, chunk.row)).squeeze(1).unbind()

    def reads_blocks(self, queries: int) -> bool:
        """Whether attention of so many queries of a KV head can read some blocks of positions, and not the others."""
        return True

    def attend_blocks(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, blocks: tuple[Tensor, Tensor],
                      window: int | None, sinks: Tensor | None) -> Tensor:  # fmt: skip
        """`attend_blocks` of all that `update` gave; a cache that stores something else reads that."""
        return attend_blocks(q, k, v, positions, blocks, window, sinks)

    def attend_latent(self, q: Tensor, positions: Tensor, rank: int, scale: Tensor | None = None) -> Tensor:
        """q [B, Q, H, C] over what latent attention keeps -> [B, Q, H, rank]; only the blocks in use are read.

        scale: by which each position's numbers are to be multiplied, where a cache stores codes.
        """
        B, Q, H, _ = q.shape
        y = join_parts(*attention_kernels.attend_latent(q, self.kv, scale, positions, rank))  # [B, rows, rank]
        return y.narrow(1, 0, Q * H).reshape(B, Q, H, rank).to(q.dtype)

    def clear(self) -> None:
        """Forget everything: what is masked counts zero times its value, which has to be a number."""
        self.kv.zero_()


class Chunk(NamedTuple):
    """A stretch of one sequence, by which a prompt is computed: where it ends is known, so that it needs no mask."""

    row: Tensor  # of the cache, int64 [1]; no int, for which the compiler would make a case each of 0 and 1
    end: int  # the position after its last token; the others stand before that


class View(NamedTuple):
    """What queries see of a cache."""

    bias: Tensor  # [B, Q, S], 0 where a query may look and -inf elsewhere
    blocks: tuple[Tensor, Tensor] | None = None  # of BLOCK positions that hold what a sequence's queries may look at:
    # how many, int32 [B, 1, 1], and which come first, int32 [B, 1, 1, S / BLOCK]


def bias_of(positions: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """`View.bias` for queries at those positions [B, Q] of a cache of that length, seen through a window."""
    distance = positions.unsqueeze(-1) - torch.arange(length, device=positions.device)
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    return torch.where(visible, 0.0, float("-inf")).to(dtype)


class Context(NamedTuple):
    """What every block of one call shares. A chunk has no positions and views."""

    rope: Tensor  # [B, Q, 1, 2C], for each number of a head its cosine, then its signed sine, fp32
    chunk: Chunk | None = None
    positions: Tensor | None = None  # [B, Q]
    views: dict[int | None, View] | None = None  # by the layer's window


def rope_table(args: ModelArgs, length: int, device: torch.device) -> Tensor:
    """`Context.rope` of positions below `length`, fp32 [length, 2 C]. What of a head does not turn has cosine 1.

    Of latent attention [length, 2 rotary_dim], since what does not turn is apart there.
    """
    turning, yarn, scale = args.rotary_dim or args.head_dim, args.yarn, args.rope_scale
    frequencies = args.rope_theta ** -(torch.arange(0, turning, 2, device=device).float() / turning)
    if args.rope_factors:
        frequencies = frequencies / torch.tensor(args.rope_factors, device=device)
    if yarn:
        # Which pair turns so many times over the original positions. The blend is linear in pairs.
        first, last = (
            turning * math.log(yarn.original / (2 * math.pi * turns)) / (2 * math.log(args.rope_theta))
            for turns in (yarn.beta_fast, yarn.beta_slow)
        )
        if yarn.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, turning - 1)
        slow = ((torch.arange(turning // 2, device=device) - first) / (last - first or 1e-3)).clamp(0, 1)
        frequencies, scale = frequencies * (1 - slow + slow / yarn.factor), scale * yarn.attention
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    still = cos.new_zeros(length, 0 if args.kv_rank else args.head_dim - turning)
    return torch.cat((cos, cos, still + 1, -sin, sin, still), dim=-1)


def rotate(x: Tensor, rope: Tensor, turning: int) -> Tensor:
    """Rotary embedding (Su et al. 2021, equation 34) of x [B, Q, heads, C], paired half with half, in fp32.

    Of its first numbers, as many as are `turning`; others are multiplied by 1, and have a sine of 0.

    Said without joining two halves: the compiler makes room in memory for what is joined, but computes this where it is
    read.
    """
    cos, sin = rope.chunk(2, dim=-1)
    x = x.float()
    return x * cos + x.unflatten(-1, (-1, turning)).roll(turning // 2, dims=-1).flatten(-2) * sin


BLOCK = 128  # positions of a cache that are read together
FEW = 640  # up to this length one token's attention in one kernel is the faster one, or no slower
SHORT_CACHE = 1024  # up to this length it is faster to read a cache whole than to ask which blocks are in use


def with_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [..., Q, C], k and v [..., S, C], sinks [..., 1, 1], q's but for the last two axes -> with a sink as a key.

    That key stands before all others, and its value is zero. Its score is the head's sink: heads are longer by one
    number, which is the sink in queries and sqrt(C) in this key, zero in the others. (By eight, for kernels that want
    rows of whole 16 bytes.) So the library's attention, which knows no sinks, needs no mask for them. The caller gives
    it the scale of C.
    """
    C = q.shape[-1]
    q = torch.cat((q, F.pad(sinks.to(q.dtype), (0, 7)).expand(*q.shape[:-1], 8)), dim=-1)
    k, v = (F.pad(t, (0, 8, 1, 0)) for t in (k, v))
    k[..., 0, C] = C**0.5
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None = None) -> Tensor:
    """q [B, Q, H, C], k [B, K, S, C], v [B, K, S, any], bias [B, Q, S], sinks [H] -> [B, Q, H * any].

    Query heads are a [K, H / K] grid over the KV heads, so keys and values broadcast and are never repeated in memory.
    """
    (B, Q, H, C), K = q.shape, k.shape[1]
    if Q == 1:  # one query: products and softmax that Inductor fuses
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
    # B and K are folded into one axis: H / K is then a head axis along which keys and values have stride zero.
    q = q.view(B, Q, K, H // K, C).permute(0, 2, 3, 1, 4).flatten(0, 1)
    k, v = (t.flatten(0, 1).unsqueeze(1) for t in (k, v))
    if sinks is not None:
        q, k, v = with_sink(q, k, v, sinks.view(K, H // K, 1, 1).repeat(B, 1, 1, 1))
        bias = F.pad(bias, (1, 0))
    k, v = (t.expand(-1, H // K, -1, -1) for t in (k, v))
    bias = bias.unsqueeze(1).expand(-1, K, -1, -1).flatten(0, 1).unsqueeze(1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=C**-0.5)[..., :C]  # [B * K, H / K, Q, C]
    return y.unflatten(0, (B, K)).permute(0, 3, 1, 2, 4).reshape(B, Q, -1)


def blocks_in_use(positions: Tensor, length: int, window: int | None) -> tuple[Tensor, Tensor]:
    """`View.blocks` for queries at rising positions [B, Q] of a cache of that length."""
    first = (positions[:, :1] - (window or length) + 1).clamp(min=0) // BLOCK  # [B, 1]
    order = (first + torch.arange(length // BLOCK, device=positions.device)).clamp(max=length // BLOCK - 1)
    count = positions[:, -1:] // BLOCK + 1 - first
    return count.to(torch.int32).unsqueeze(-1), order.to(torch.int32)[:, None, None]


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, blocks: tuple[Tensor, Tensor],
                  window: int | None, sinks: Tensor | None) -> Tensor:  # fmt: skip
    """`attend` for few queries and a long cache, of which it reads only the blocks in use; to be compiled."""

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = positions[b, query] - key
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)

    mask = BlockMask.from_kv_blocks(
        *blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible, seq_lengths=(q.shape[1], k.shape[2])
    )
    options = {"block_mask": mask, "enable_gqa": True}
    if sinks is None:
        y = flex_attention(q.transpose(1, 2), k, v, **options)
    else:  # what a sink would have had of the sum takes its part from all others alike
        y, sums = flex_attention(q.transpose(1, 2), k, v, **options, return_aux=AuxRequest(lse=True))
        y = (y * (sums.lse - sinks.float().unsqueeze(-1)).sigmoid().unsqueeze(-1)).to(q.dtype)
    return y.transpose(1, 2).flatten(2)


@operator("moe_fast::attend_chunk")
def attend_chunk(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    """q [Q, H, C], of the last Q positions of k and v [K, S, C] -> [Q, H * C]; each query sees up to its own position.

    An operator of ours around the library's, which takes the masks of both kinds only where nothing is compiled.
    """
    (Q, _, C), S, mask = q.shape, k.shape[1], None
    if window is not None and window < S:  # what the first query cannot see is left out
        k, v = (t[:, max(0, S - Q - window + 1) :] for t in (k, v))
        distance = torch.arange(k.shape[1] - Q, k.shape[1], device=q.device).unsqueeze(1)
        distance = distance - torch.arange(k.shape[1], device=q.device)
        mask = (distance >= 0) & (distance < window)
    q, k, v = q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if sinks is not None:
        q, k, v = with_sink(q, k, v, sinks.view(-1, 1, 1))
        mask = None if mask is None else F.pad(mask, (1, 0), value=True)
    if mask is None and 1 < Q < k.shape[2]:
        # Imported here, because it brings the compiler with it.
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(Q, k.shape[2])
    options = {"is_causal": mask is None and Q > 1, "enable_gqa": True, "scale": C**-0.5}
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)[..., :C]
    return y[0].transpose(0, 1).flatten(1).contiguous()


@attend_chunk.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) over the layer's cache, rotary positions: [B, Q, D] -> same."""

    one_kernel = False  # may all that one token needs between the products be one kernel of ours?

    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        H, K, C = args.n_head, args.n_kv_head, args.head_dim
        self.wqkv = Linear(args.dim, (H + 2 * K) * C, bias=args.attention_bias or args.qkv_bias)
        self.wo = Linear(H * C, args.dim, bias=args.attention_bias)
        norms = {"none": (), "head": (C, C), "full": (H * C, K * C)}[args.qk_norm]
        self.q_norm, self.k_norm = (RMSNorm(n, args.norm_eps) for n in norms) if norms else (None, None)
        self.qk_norm, self.clip_qkv = args.qk_norm, args.clip_qkv
        self.heads, self.window, self.turning = (H, K, C), args.window(layer), args.rotary_dim or C
        self.sinks = nn.Parameter(torch.empty(H), requires_grad=False) if args.attention_sinks else None
        # Beside the C ** -0.5 that every product has.
        self.query_scale = 1.0 if args.attention_scale is None else args.attention_scale * C**0.5
        self.cache: KVCache | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        H, K, C = self.heads
        qkv = self.wqkv(x)
        if self.fits_one_kernel(x, context):
            return self.wo(self.attend_token(qkv, context))
        q, kv = qkv.split((H * C, 2 * K * C), dim=-1)
        # What is done to keys is done to values too, and dropped: so one kernel makes and writes both.
        kv, full, head = kv.unflatten(-1, (2, K * C)), self.qk_norm == "full", self.qk_norm == "head"
        # In memory: the compiler tunes a kernel that writes the cache badly, since it copies and times all of it.
        keys = realise(self.k_norm(kv)) if full else kv
        keys, values = (self.clip(t).unflatten(-1, (-1, C)) for t in (keys, kv))  # [B, Q, 2, K, C]
        keys = rotate(self.k_norm(keys) if head else keys, context.rope.unsqueeze(2), self.turning).to(values.dtype)
        kv = torch.where(torch.arange(2, device=x.device).view(2, 1, 1) == 0, keys, values)
        chunk, positions = context.chunk, context.positions
        k, v = self.cache.extend(chunk, kv) if chunk else self.cache.update(positions, kv)
        # Queries come after that, and are kept in memory: the compiler overlooks that the kernel after the one that
        # writes the cache has to wait for it before it reads the cache, so it must be one that does not.
        q = self.clip(self.q_norm(q) if full else q).unflatten(-1, (-1, C))  # [B, Q, H, C]
        q = rotate(self.q_norm(q) if head else q, context.rope, self.turning)
        q = realise(scaled(q, self.query_scale).to(kv.dtype))
        if chunk:
            y = attend_chunk(q[0], k, v, self.window, self.sinks).unsqueeze(0)
        elif (view := context.views[self.window]).blocks and self.cache.reads_blocks(q.shape[1] * H // K):
            y = self.cache.attend_blocks(q, k, v, positions, view.blocks, self.window, self.sinks)
        else:
            y = attend(q, k, v, view.bias, self.sinks)
        return self.wo(y)

    def fits_one_kernel(self, x: Tensor, context: Context) -> bool:
        """Whether `attend_token` is to be used: for one token of each sequence, compiled, a short plain cache."""
        if not self.one_kernel or context.chunk or x.shape[1] > 1 or not (x.is_cuda and torch.compiler.is_compiling()):
            return False
        C, view = self.heads[2], context.views[self.window]
        known = self.qk_norm != "full" and self.cache.kv.dtype == x.dtype and C & C - 1 == 0 and 16 <= C <= 256
        return known and view.blocks is None and min(self.window or math.inf, view.bias.shape[-1]) <= FEW

    def attend_token(self, qkv: Tensor, context: Context) -> Tensor:
        """What `wqkv` gives for one token of each sequence [B, 1, (H + 2 K) C] -> what `wo` gets, in one kernel."""
        weights, eps = (None, None), 0.0
        if self.q_norm is not None:
            weights, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
        scale, clip = self.query_scale * self.heads[2] ** -0.5, self.clip_qkv or 0.0
        return attention_kernels.attend_token(qkv, context.rope, context.positions, self.cache.kv, *weights, self.sinks,
                                              self.turning, scale, eps, clip, self.window or 1 << 30)  # fmt: skip

    def clip(self, x: Tensor) -> Tensor:
        return x if self.clip_qkv is None else x.clamp(-self.clip_qkv, self.clip_qkv)


def allow_one_kernel(model: nn.Module) -> None:
    """All that one token needs between the products of its `Attention` may be one kernel of ours from now on."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.one_kernel = True


HEADS = 16  # whose keys and values latent attention makes at a time, for a chunk


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2 2024, section 2.1): [B, Q, D] -> same.

    A head's keys and values are products `wkv` of r numbers of their position, which alone are in the cache, with one
    rotated key for all heads. Few queries go into the space of these numbers, where they all are one KV head's, and
    what is found comes back from there: a cache is read once, and as it is. For a chunk, whose queries are many, that
    would be 3.4 times the arithmetic, so it makes the keys and values, of a few heads at a time.
    """

    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        H, C, r, R = args.n_head, args.head_dim, args.kv_rank, args.rotary_dim
        self.wqkv = Linear(args.dim, (args.q_rank or H * C) + r + R)
        self.q_norm = RMSNorm(args.q_rank, 1e-6) if args.q_rank else None  # both have this, whatever args.norm_eps is
        self.wq = Linear(args.q_rank, H * C) if args.q_rank else None
        self.kv_norm = RMSNorm(r, 1e-6)
        self.wkv = nn.Parameter(torch.empty(H, C - R + args.value_dim, r), requires_grad=False)
        self.wo = Linear(H * args.value_dim, args.dim)
        self.sizes, self.scale = (H, C - R, R, r), args.attention_scale or C**-0.5
        self.cache: KVCache | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        H, N, R, r = self.sizes
        x, chunk, positions = self.wqkv(x), context.chunk, context.positions
        q, latent, key = x.split((x.shape[-1] - r - R, r, R), dim=-1)
        key = rotate(key.unsqueeze(2), context.rope, R).squeeze(2).to(x.dtype)
        kv = realise(torch.cat((self.kv_norm(latent), key), dim=-1)).unflatten(-1, (1, 1, -1))  # [B, Q, 1, 1, r + R]
        (kv,) = self.cache.extend(chunk, kv) if chunk else self.cache.update(positions, kv)
        q = (q if self.wq is None else self.wq(realise(self.q_norm(q)))).unflatten(-1, (H, -1))
        q, turned = q.split((N, R), dim=-1)
        turned = rotate(turned, context.rope, R).to(x.dtype)
        if chunk:
            y = self.attend_chunk(torch.cat((q, turned), dim=-1).squeeze(0), kv.squeeze(0)).unsqueeze(0)
            return self.wo(y)
        w_key, w_value = self.wkv.split((N, self.wkv.shape[1] - N), dim=1)
        q = torch.cat((torch.einsum("bqhn,hnr->bqhr", q, w_key), turned), dim=-1)
        q = realise(q * (self.scale * (r + R) ** 0.5))  # in memory, as in Attention
        v, view = kv.split((r, R), dim=-1)[0], context.views[None]
        if view.blocks and all(n >= 16 and n & n - 1 == 0 for n in (r, R)):  # for which there is the kernel
            y = self.cache.attend_latent(q, positions, r)
        else:
            y = attend(q, kv, v, view.bias).unflatten(-1, (H, r))
        y = torch.einsum("bqhr,hvr->bqhv", y, w_value)
        return self.wo(realise(y.flatten(2)))

    def attend_chunk(self, q: Tensor, kv: Tensor) -> Tensor:
        """q [Q, H, C], of the last Q positions of kv [S, r + R] -> [Q, H * value_dim]."""
        _, N, R, r = self.sizes
        parts, C, (latent, key) = [], q.shape[-1], kv.split((r, R), dim=-1)
        q = q * (self.scale * C**0.5)
        for few, w in zip(q.split(HEADS, dim=1), self.wkv.split(HEADS), strict=True):
            k, v = torch.einsum("sr,hnr->hsn", latent, w).split((N, w.shape[1] - N), dim=-1)
            k = torch.cat((k, key.expand(len(w), -1, -1)), dim=-1)
            # The library's fast kernels want values as long as keys.
            y = attend_chunk(few, k, F.pad(v, (0, C - v.shape[-1])), None, None)
            parts.append(y.unflatten(-1, (-1, C))[..., : v.shape[-1]].flatten(1))
        return torch.cat(parts, dim=-1)
