"""Attention with a learned sink a head (gpt-oss, Flint)."""

from torch import Tensor

from model import Attention, Context, ModelArgs, new_parameter
from models.family import Shard
from models.layers.windows import WindowedArgs, WindowedFamily
from models.tensors import Recipes, copy_of
from ops.declared import AttentionAdditions
from ops.plain.attention import attend, attend_chunk


class SinkAttention(Attention):
    """Attention with a learned sink per head: one more score, whose value is zero."""

    def __init__(self, args: ModelArgs):
        super().__init__(args)
        self.sinks = new_parameter(args.n_head)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        if context.chunk:
            return attend_chunk(q[0], k, v, self.window, self.sinks).unsqueeze(0)
        H, K, C = self.heads
        mask = context.masks[self.window]
        if not (mask.blocks and self.cache.reads_blocks(q.shape[1] * H // K)):
            return attend(q, k, v, mask.bias, self.sinks)
        y, lse = self.cache.attend_blocks(q, k, v, context, self.window, return_lse=True)
        # The sink's share of the softmax is taken from all positions alike.
        share = (lse - self.sinks.float().unsqueeze(-1)).sigmoid()  # [B, H, Q]
        y = y.unflatten(-1, (H, C)) * share.transpose(1, 2).unsqueeze(-1)
        return y.to(q.dtype).flatten(2)

    def fused_decode_settings(self) -> AttentionAdditions:
        return AttentionAdditions(sinks=self.sinks)


class SinkFamily(WindowedFamily):
    def attention_recipes(self, args: WindowedArgs) -> Recipes:
        recipes = super().attention_recipes(args)
        return recipes | {"attention.sinks": copy_of("self_attn.sinks", args.n_head)}

    def shard_table(self, args: WindowedArgs) -> dict[str, Shard]:
        """Sinks are sharded with the heads."""
        return super().shard_table(args) | {"attention": Shard(0, ((args.n_head, 1),))}
