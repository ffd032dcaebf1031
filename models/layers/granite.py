"""What Granite's families share: multipliers of the embedding, scores, residuals and logits."""

from dataclasses import dataclass

from torch import Tensor, nn

from model import AddNorm, Attention, Block
from models.config import HFConfig
from models.gguf import MadeTable, rotated_in_pairs
from models.layers.scaled_rope import ScaledRopeArgs, ScaledRopeFamily, ScaledRopeTransformer
from ops.declared import AttentionAdditions, SumAdditions
from ops.inductor import materialize


@dataclass(frozen=True)
class GraniteMoeArgs(ScaledRopeArgs):
    attention_scale: float | None = None  # of attention scores; None: C ** -0.5
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and experts add
    logit_scale: float = 1.0


class ScaledAttention(Attention):
    """Attention with a scale of its own."""

    def __init__(self, args: GraniteMoeArgs):
        super().__init__(args)
        scale = args.attention_scale
        # A factor of queries, beside the C ** -0.5 of every attention function.
        self.query_scale = 1.0 if scale is None else scale * args.head_dim**0.5

    def queries(self, q: Tensor, rope: Tensor) -> Tensor:
        q = super().queries(q, rope)
        return q if self.query_scale == 1 else q * self.query_scale

    def fused_decode_settings(self) -> AttentionAdditions:
        return AttentionAdditions(query_scale=self.query_scale)


class ScaledAddNorm(AddNorm):
    """x + scale * y, and its norm."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        x = materialize(x.add(y.view_as(x), alpha=self.scale))
        return x, materialize(norm(x))

    def fused_decode_settings(self) -> SumAdditions:
        return SumAdditions(self.scale)


class GraniteTransformer(ScaledRopeTransformer):
    args: GraniteMoeArgs

    def make_block(self, args: GraniteMoeArgs, layer: int) -> Block:
        block = Block(args, layer)
        block.attention = ScaledAttention(args)
        block.add_attention = ScaledAddNorm(args.residual_scale)
        block.add_ffn = ScaledAddNorm(args.residual_scale)
        return block

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens) * self.args.embedding_scale

    def logits(self, normed: Tensor, last: Tensor | None) -> Tensor:
        return super().logits(normed, last) * self.args.logit_scale


class GraniteFamily(ScaledRopeFamily):
    args_class: type[GraniteMoeArgs] = GraniteMoeArgs
    model_class: type[GraniteTransformer] = GraniteTransformer
    defaults = dict(
        vocab_size=32000,
        hidden_size=4096,
        num_hidden_layers=32,
        max_position_embeddings=2048,
        num_attention_heads=32,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        bos_token_id=1,
        eos_token_id=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=11008,
        embedding_multiplier=1.0,
        attention_multiplier=1.0,
        residual_multiplier=1.0,
        logits_scaling=1.0,
    )
    renamed_keys = {"num_local_experts": "num_experts"}
    nullable = "num_key_value_heads", "attention_multiplier"
    field_of_key = {
        "attention_bias": "attention_bias",
        "attention_multiplier": "attention_scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
    }
    renamed_tensors = (
        (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
        (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
        (".block_sparse_moe.router.layer.", ".mlp.gate."),
        # The next two as transformers 5 holds them in memory.
        (".block_sparse_moe.router.", ".mlp.gate."),
        (".block_sparse_moe.experts.", ".mlp.experts."),
    )

    gguf_keys = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }

    def gguf_layer(self, args: GraniteMoeArgs) -> MadeTable:
        return super().gguf_layer(args) | rotated_in_pairs(args.n_head, args.n_kv_head)

    def arg_fields(self, c: HFConfig) -> dict:
        return super().arg_fields(c) | {"logit_scale": 1 / c.number("logits_scaling")}
