"""The whole model. (Interfaces fixed; bodies in progress.)"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelArgs:
    """Shape and variant of a model; JSON-serialisable with `dataclasses.asdict` (tuples become lists; __post_init__ turns them back)."""

    dim: int  # D
    n_layer: int  # L
    n_head: int  # H
    n_kv_head: int  # K
    head_dim: int  # C
    intermediate: int  # I, of one expert
    n_expert: int  # E
    n_active: int  # A
    vocab_size: int  # V
    max_position: int  # longest sequence the model was made for
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    norm_topk: bool = True  # the A routing weights are scaled to sum to one
    qk_norm: str = "none"  # "none", "head" (over C, Qwen3-MoE) or "full" (over H*C, OLMoE)
    clip_qkv: float | None = None
    attention_bias: bool = False
    tied_embeddings: bool = False
    sliding_window: int | None = None
    dense_layers: tuple[int, ...] = ()  # layers with one dense FFN in place of experts
    dense_intermediate: int = 0  # its I

    def __post_init__(self):
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
