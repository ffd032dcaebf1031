"""Kolibri 1: windows, full layers without RoPE, sigmoid routing, norms around sublayers."""

from dataclasses import dataclass, replace

from torch import Tensor

from model import Block
from models.config import HFConfig
from models.layers.group_routing import SigmoidRoutedMoE
from models.layers.sandwich import SandwichAddNorm
from models.layers.scaled_rope import ScaledRopeTransformer
from models.layers.windows import WindowedArgs, WindowedFamily, leave_full_unrotated
from models.tensors import Recipes, copy_of
from ops.declared import ExpertAdditions


@dataclass(frozen=True)
class Kolibri1Args(WindowedArgs):
    shared_intermediate: int = 0  # intermediate dim of the shared expert; 0: none


class Kolibri1MoE(SigmoidRoutedMoE):
    """The bias is added to scores before the sigmoid, where others add it after."""

    def selection_scores(self, scores: Tensor) -> Tensor:
        return scores + self.score_bias

    def fused_decode_settings(self) -> ExpertAdditions | None:
        added = super().fused_decode_settings()
        if added is None or added.routing is None:
            return None
        return replace(added, routing=replace(added.routing, bias_before=True))


class Kolibri1Transformer(ScaledRopeTransformer):
    args: Kolibri1Args

    def make_block(self, args: Kolibri1Args, layer: int) -> Block:
        block = Block(args, layer)
        leave_full_unrotated(block, args, layer)
        block.ffn = Kolibri1MoE(args)
        block.add_attention = SandwichAddNorm(args.dim, args.norm_eps)
        block.add_ffn = SandwichAddNorm(args.dim, args.norm_eps)
        return block


class Kolibri1(WindowedFamily):
    name = "kolibri1"
    args_class = Kolibri1Args
    model_class = Kolibri1Transformer
    defaults = dict(
        vocab_size=128000,
        hidden_size=2560,
        num_hidden_layers=50,
        max_position_embeddings=262144,
        num_attention_heads=48,
        num_key_value_heads=4,
        head_dim=128,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        sliding_window=513,
        num_experts=384,
        num_experts_per_tok=6,
        norm_topk_prob=False,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    )
    field_of_key = {
        "norm_topk_prob": "norm_topk",
        "shared_expert_intermediate_size": "shared_intermediate",
    }
    fixed = {"qk_norm": "head"}
    only = {"attention_bias": False, "mlp_only_layers": [], "decoder_sparse_step": 1}
    has_score_bias = True
    renamed_tensors = (
        (".moe.router.expert_bias", ".mlp.gate.e_score_correction_bias"),
        (".post_attn_norm.", ".post_self_attn_layernorm."),
        (".post_ffn_norm.", ".post_mlp_layernorm."),
        (".mlp.shared_experts.", ".mlp.shared_expert."),
    )

    def usual_full(self, layer: int, n_layer: int) -> bool:
        return (layer + 1) % 5 == 0

    def window_fields(self, c: HFConfig) -> dict:
        if c["sliding_window"] is None:  # transformers would rotate full layers, but fails
            c.refuse("sliding_window", "a window is needed")
        return super().window_fields(c)

    def norm_recipes(self, args: Kolibri1Args) -> Recipes:
        names = {
            "add_attention.norm.weight": "post_self_attn_layernorm.weight",
            "add_ffn.norm.weight": "post_mlp_layernorm.weight",
        }
        after = {ours: copy_of(theirs, args.dim) for ours, theirs in names.items()}
        return super().norm_recipes(args) | after

    shapes = {"Kolibri-1-78B-A3.5B": {}}
