"""Gated short convolution: a causal convolution over few positions in place of attention (LFM2).

The projection makes b, c and x of each token, N numbers each. The layer returns c * conv(b * x),
each channel by itself. The convolution sees the inputs b * x of the last W positions. The formula
is that of transformers' Lfm2ShortConv.

Letters: N channels, W the convolution's width, R slots of the ring.
"""

import torch
from torch import Tensor, nn

from model import Context, KVCache, Linear
from models.layers.pending_state import Convolution, call_place, count_real
from models.tensors import Recipes, conv_recipe, copy_of
from ops.attention.short_conv import NAME, short_conv
from ops.inductor import materialize
from ops.launch import can_launch
from ops.plain.ring import RING_SPARE, cache_slots, ring_of
from ops.plain.short_conv import causal_conv


class ConvCache(KVCache):
    """The convolution's inputs by position, [1, batch, 1, R, N], mostly a ring.

    A call's inputs before it are at the positions before its own. So refused drafts need no
    undoing: the next call overwrites them.
    """

    width: int  # W

    def append(self, x: Tensor, context: Context) -> Tensor:
        """Store the real tokens of x [B, Q, N]; return W - 1 inputs before them, then x."""
        (B, Q, _), ring, width = x.shape, self.kv[0, :, 0], self.width
        R, device = ring.shape[1], x.device
        rows, first = call_place(context, B, Q, device)
        rows = rows.unsqueeze(1)
        places = first + torch.arange(1 - width, 0, device=device)
        past = torch.where((places >= 0).unsqueeze(-1), ring[rows, places % R], 0.0)
        # Materialized, so that the ring is read before it is written. Without a past x may be a
        # slice, of which that is wrong.
        inputs = materialize(torch.cat((past, x), dim=1)) if width > 1 else x
        count = count_real(context, B, Q, device).unsqueeze(1)
        # The last R real tokens: earlier ones would share slots with them.
        index = torch.arange(min(Q, R), device=device) + (count - R).clamp(min=0)
        slots = (first + index) % R
        # From `inputs`: Inductor may move reads of the ring that the write does not need to after
        # it, and would then copy the ring.
        newest = inputs.gather(1, (index + width - 1).unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        write_rows(self, newest, rows, slots, index < count)
        return inputs


def write_rows(cache: KVCache, new: Tensor, rows: Tensor, slots: Tensor, exists: Tensor) -> None:
    """Write new [B, n, N] where it exists, bool [B, n], to slots [B, n] of rows [B, 1].

    The slots of a row differ. cache: [1, rows, 1, S, N]. It is indexed as a whole: Inductor copies
    all of a buffer of which a view is written.
    """
    place = slice(None), rows, slice(None), slots
    new, exists = new[:, :, None, None], exists[:, :, None, None, None]
    cache.kv[place] = torch.where(exists, new, cache.kv[place])


def allocate_inputs(batch: int, length: int, width: int, channels: int, like: Tensor) -> ConvCache:
    """Make a cache of the last W inputs [N] of `batch` sequences, as dtype and device of `like`.

    length: positions of a sequence. The cache is a ring if W is shorter.
    """
    slots = cache_slots(length, width)
    kind = ring_of(ConvCache) if slots < length else ConvCache
    cache = kind((batch, 1, slots, channels), like.dtype, like.device, parts=1)
    cache.width = width
    return cache


class ShortConv(nn.Module):
    """[B, Q, D] -> same, in place of an attention layer.

    args.conv_channels: N; args.conv_width: W; args.conv_bias: of all three.
    """

    window = None
    reads_masks = False
    projections = ("wbcx",), "wout"  # input and output; `core` is between them

    def __init__(self, args):
        super().__init__()
        N, self.width = args.conv_channels, args.conv_width
        self.wbcx = Linear(args.dim, 3 * N, bias=args.conv_bias)
        self.conv = Convolution(N, args.conv_width, args.conv_bias)
        self.wout = Linear(N, args.dim, bias=args.conv_bias)

    def allocate(
        self, batch: int, length: int, cache_class: type[KVCache], like: Tensor
    ) -> ConvCache:
        """Make this layer's state in the dtype and on the device of `like`, and return it."""
        self.cache = allocate_inputs(batch, length, self.width, len(self.conv.weight), like)
        return self.cache

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.wout(self.core(self.wbcx(x), context))

    def core(self, projected: Tensor, context: Context) -> Tensor:
        """b, c and x [B, Q, 3 N] -> [B, Q, N]: all between the projections.

        The kernel computes prompts in eager code, where each operation would be one.
        """
        if context.chunk is not None and self.has_kernel(projected):
            return self.fused_core(projected, context)
        b, c, x = projected.chunk(3, dim=-1)
        inputs = self.cache.append(b * x, context)
        # Materialized, or Inductor recomputes it in every row of the product.
        return materialize(c * causal_conv(inputs, self.conv.weight, self.conv.bias))

    def takes(self, projected: Tensor, context: Context) -> bool:
        """Whether `fused_core` takes this call: as in `runtime.fused_attention`."""
        is_few = projected.shape[1] <= RING_SPARE and context.chunk is None
        return is_few and can_launch(projected, NAME)

    def has_kernel(self, projected: Tensor) -> bool:
        """Whether `core` takes it for a prompt."""
        return not torch.compiler.is_compiling() and can_launch(projected, NAME)

    def fused_core(self, projected: Tensor, context: Context) -> Tensor:
        """`core` by one kernel."""
        weights = [self.conv.weight]
        weights += [] if self.conv.bias is None else [self.conv.bias]
        ring, place = self.cache.kv[0, :, 0], (context.positions, context.last)
        if context.chunk is not None:
            row, begin, past = context.chunk.row, context.chunk.end - projected.shape[1], None
            if count := min(begin, self.width - 1):
                places = torch.arange(begin - count, begin, device=ring.device)
                past = ring[row, places % ring.shape[1]]
            place = *place, row, past, begin
        return short_conv(projected, ring, weights, *place)


def short_conv_recipes(args) -> Recipes:
    """A layer's convolution and its projections."""
    N, D, W = args.conv_channels, args.dim, args.conv_width
    table = {
        "attention.wbcx.weight": copy_of("conv.in_proj.weight", 3 * N, D),
        "attention.conv.weight": conv_recipe("conv.conv.weight", N, W),
        "attention.wout.weight": copy_of("conv.out_proj.weight", D, N),
    }
    if args.conv_bias:
        table |= {
            "attention.wbcx.bias": copy_of("conv.in_proj.bias", 3 * N),
            "attention.conv.bias": copy_of("conv.conv.bias", N),
            "attention.wout.bias": copy_of("conv.out_proj.bias", D),
        }
    return table
