"""Hyper-connections: several residual streams in place of one (Zhu et al. 2025, Hyper-Connections).

A mixer makes a sublayer's input x of all streams. Each stream has a weight of what the sublayer's
output adds to it. Input and weights depend on the token.

    n = norm of each stream           x = mean over streams of sigmoid(up silu(down n / S)) n
    stream s += g_s sublayer(x)       g = 2 sigmoid(inject n / S)

S streams, r the rank of `down` and `up`. A residual is [B, Q, S, D]; a block hands on the streams
and their norms, as other blocks do with one.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import AddNorm, Block, Context, Linear, Transformer, new_parameter
from models.tensors import Recipes, copy_of
from ops.declared import BlockAdditions
from ops.inductor import materialize


class StreamNorm(nn.Module):
    """RMSNorm of each of S streams, each with weights of its own: [..., S, D] -> same."""

    fp32 = ("weight",)  # as in `ZeroCenteredRMSNorm`

    def __init__(self, args):
        super().__init__()
        self.weight = new_parameter(args.streams, args.dim)
        self.eps = args.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], None, self.eps)
        return (y * self.weight.float()).to(x.dtype)


class StreamMixer(nn.Module):
    """Normed streams [..., S, D] -> the input of a sublayer [..., D]."""

    def __init__(self, args):
        super().__init__()
        self.scale, width = 1 / args.streams, args.streams * args.dim
        self.down = Linear(width, args.stream_rank)
        self.up = Linear(args.stream_rank, width)

    def forward(self, normed: Tensor) -> Tensor:
        h = F.silu(self.down(normed.flatten(-2)) * self.scale)
        return self.combine(normed, self.up(materialize(h)))

    def combine(self, normed: Tensor, shares: Tensor) -> Tensor:
        """normed [..., S, D], the results of `up` [..., S D] -> [..., D]."""
        return materialize((shares.sigmoid().view_as(normed) * normed).mean(dim=-2))


class SublayerMixer(StreamMixer):
    """The same, and how much of the sublayer's output each stream gets."""

    def __init__(self, args):
        super().__init__(args)
        # Never packed: an error of it is one of the sublayer's whole output.
        self.inject = Linear(args.streams * args.dim, args.streams)

    def parts(self, normed: Tensor) -> Tensor:
        """normed [..., S, D] -> what makes each stream's weight, fp32 [..., S, S].

        Sums over the numbers of one stream, as those of the norm: Inductor has one kernel for all.
        """
        rows = self.inject.weight.unflatten(1, normed.shape[-2:])
        sums = [(normed.float() * row.float()).sum(dim=-1) for row in rows]
        return torch.stack(sums, dim=-2)


class LastNorm(StreamNorm):
    """The norm before the head: of the streams [..., S, D], mixed to [..., D]."""

    def __init__(self, args):
        super().__init__(args)
        self.mixer = StreamMixer(args)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(materialize(super().forward(x)))


class Streams(NamedTuple):
    """The residual while a sublayer runs."""

    x: Tensor  # [B, Q, S, D]
    parts: Tensor  # fp32 [B, Q, S, S], of the weights of the sublayer's output

    def weights(self) -> Tensor:
        """Return [B, Q, S]. Computed where the output is added: one kernel less."""
        sums = self.parts.sum(dim=-1) / self.x.shape[-2]
        return (2 * sums.sigmoid()).to(self.x.dtype)


class StreamAddNorm(AddNorm):
    """Adds a sublayer's output to each stream, and norms all streams."""

    def forward(self, x: Streams, y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """x, y [T, D] or [B, Q, D] -> the new streams and their norms, [B, Q, S, D]."""
        y = y.view(*x.x.shape[:2], 1, -1)
        return super().forward(x.x, x.weights().unsqueeze(-1) * y, norm)


class StreamBlock(Block):
    """A block between whose sublayers there are S streams."""

    def __init__(self, args, layer: int):
        super().__init__(args, layer)
        self.attention_norm, self.ffn_norm = StreamNorm(args), StreamNorm(args)
        self.attention_mixer, self.ffn_mixer = SublayerMixer(args), SublayerMixer(args)
        self.add_attention, self.add_ffn = StreamAddNorm(), StreamAddNorm()

    def attend(self, x: Tensor, normed: Tensor, context: Context) -> tuple[Streams, Tensor]:
        """Streams and their norms [B, Q, S, D] -> streams after attention, and the FFN's input."""
        x, normed = self.before_attention(x, normed, context)
        x, normed = self.before_ffn(x, self.attention(self.attention_mixer(normed), context))
        return x, self.ffn_mixer(normed)

    def before_attention(
        self, x: Tensor, normed: Tensor, context: Context
    ) -> tuple[Streams, Tensor]:
        """Streams and their norms [B, Q, S, D] -> streams, and the norms of them."""
        return Streams(x, self.attention_mixer.parts(normed)), normed

    def before_ffn(self, x: Streams, y: Tensor) -> tuple[Streams, Tensor]:
        """Add attention's output y [B, Q, D] -> streams, and their norms [B, Q, S, D]."""
        x, normed = self.add_attention(x, y, self.ffn_norm)
        return Streams(x, self.ffn_mixer.parts(normed)), normed

    def fused_decode_settings(self) -> BlockAdditions:
        return BlockAdditions(mixers=(self.attention_mixer, self.ffn_mixer))


class StreamTransformer(Transformer):
    """A model of StreamBlocks. The first residual has the embedding in all streams."""

    def __init__(self, args):
        super().__init__(args)
        self.norm, self.streams = LastNorm(args), args.streams

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens).unsqueeze(2).repeat(1, 1, self.streams, 1)


# Conversion ---------------------------------------------------------------------------------------


def mixer_recipes(args, ours: str, theirs: str, norm: str) -> Recipes:
    """Return the recipes of a mixer and the norm before it. Names: without `weight`."""
    S, D, r = args.streams, args.dim, args.stream_rank

    def per_stream(weight: Tensor) -> Tensor:
        return weight.view(S, D) + 1

    names = {"down": ("input_mix_weight_down", r, S * D), "up": ("input_mix_weight_up", S * D, r)}
    table = {
        f"{ours}.{name}.weight": copy_of(f"{theirs}.{other}.weight", *shape)
        for name, (other, *shape) in names.items()
    }
    return table | {
        f"{norm}.weight": copy_of(
            f"{theirs}.hc_norm.weight", S * D, transform=per_stream, dtype=torch.float32
        )
    }


def sublayer_recipes(args, ours: str, theirs: str, norm: str) -> Recipes:
    """The same for a sublayer, whose mixer has weights of its output, too."""
    S, D = args.streams, args.dim
    inject = copy_of(f"{theirs}.block_inject_weight.weight", S, S * D)
    return mixer_recipes(args, ours, theirs, norm) | {f"{ours}.inject.weight": inject}
