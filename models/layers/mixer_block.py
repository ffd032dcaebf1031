"""A block of a mixer alone: models with one mixer or FFN a layer do not pair all of them."""

from torch import Tensor, nn

from model import AddNorm, Attention, Block, Context, ModelArgs, RMSNorm
from ops.declared import BlockAdditions


class NoFeedForward(nn.Module):
    """Stands where other blocks have an FFN."""


class MixerBlock(Block):
    """Attention, or what is in its place, after a norm and with a residual; no FFN."""

    def __init__(self, args: ModelArgs):
        nn.Module.__init__(self)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(args)
        self.ffn = NoFeedForward()
        self.add_attention, self.add_ffn = AddNorm(), AddNorm()

    def forward(self, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module):
        """As `Block.forward`, of which it is the first half."""
        x, normed = self.add_attention(x, self.attention(normed, context), next_norm)
        return x, normed, None, None

    def fused_decode_settings(self) -> BlockAdditions:
        return BlockAdditions(has_ffn=False)
