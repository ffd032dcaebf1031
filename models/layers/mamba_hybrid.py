"""Models in which few layers have attention and the others Mamba-2: Nemotron 3, Granite 4."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model import ModelArgs
from models.config import HFConfig
from models.family import Family, Shard
from models.gguf import MadeTable, Values, log_of_negative, made_of
from models.layers.mamba2 import MambaSizes, mamba_recipes
from models.layers.pending_state import PROMPT_CHUNK, RecurrentTransformer, snapshot_numbers
from models.tensors import Recipes
from ops.plain.rope import rope_table

# Names of a layer's kind, those of older files too.
ATTENTION, MAMBA = ("full_attention", "attention"), ("linear_attention", "mamba")
# What config.json has for step sizes without limits; the second as transformers 5 writes it.
NO_LIMITS = [0.0, float("inf")], [0.0, {"__float__": "Infinity"}], (0.0, float("inf"))


@dataclass(frozen=True)
class MambaArgs(ModelArgs):
    full_layers: tuple[int, ...] = ()  # blocks with attention; the others have Mamba-2
    mamba_heads: int = 128
    mamba_head_dim: int = 64
    mamba_groups: int = 1  # of heads, which share B and C
    mamba_state: int = 128  # numbers of a row of a head's state
    conv_width: int = 4

    def constraints(self) -> dict[str, bool]:
        return super().constraints() | {
            "mamba_groups": self.mamba_heads % self.mamba_groups == 0,
            "conv_width": self.conv_width > 1,
            "sliding_window": self.sliding_window is None,
        }

    @property
    def mamba_sizes(self) -> MambaSizes:
        return MambaSizes(
            self.mamba_heads,
            self.mamba_head_dim,
            self.mamba_groups,
            self.mamba_state,
            self.conv_width,
        )


class MambaTransformer(RecurrentTransformer):
    """A model whose attention has no RoPE."""

    args: MambaArgs

    def make_rope_table(self, length: int, device: torch.device) -> Tensor:
        """Return cosines of 1 and sines of 0: the kernels of attention rotate by nothing."""
        return rope_table(torch.empty(0, device=device), length, unrotated=self.args.head_dim)


class MambaFamily(Family):
    """What the families share. `mamba` is the prefix of a layer's published tensors."""

    mamba = "mamba."

    def check_mamba(self, c: HFConfig, heads: str, groups: str, width: str) -> None:
        """Refuse sizes that do not fit; the arguments are the family's keys."""
        if c.integer(heads) % c.integer(groups):
            c.refuse(heads, f"a multiple of {groups} = {c[groups]} is needed")
        if c.integer(width) < 2:
            c.refuse(width, "at least 2 is needed")
        limit = c.get("time_step_limit")
        if c.is_null("time_step_limit") or (limit is not None and limit not in NO_LIMITS):
            c.refuse("time_step_limit", "only 0 to infinity is")

    def attention_memory(self, args: MambaArgs, length: int) -> tuple[int, int]:
        """A prompt's chunk takes most, in fp32, then a sequence's snapshots."""
        sizes, tokens = args.mamba_sizes, min(length, PROMPT_CHUNK)
        H, P, _, N, _ = sizes
        rule = tokens * H * (4 * P + 3 * N + 4 * 64)  # x, B, C and scores of 64 tokens
        taken = snapshot_numbers(args, sizes, H * P * N)
        extra = 4 * tokens * sizes.channels + 2 * (rule + taken)
        return 2 * args.n_kv_head * args.head_dim, extra

    def mixer_recipes(self, args: MambaArgs, layer: int) -> Recipes:
        if layer in args.full_layers:
            return self.attention_recipes(args)
        return mamba_recipes(args.mamba_sizes, args.dim, self.mamba)

    # GGUF files ---------------------------------------------------------------------------------

    def gguf_layer(self, args: MambaArgs) -> MadeTable:
        theirs = self.mamba
        table = {
            "conv1d.weight": made_of("ssm_conv1d.weight", values=lambda t: t.unsqueeze(1)),
            "conv1d.bias": made_of("ssm_conv1d.bias"),
            "A_log": made_of("ssm_a", values=lambda t: log_of_negative(t).flatten()),
            "D": made_of("ssm_d", values=torch.flatten),
            "dt_bias": made_of("ssm_dt.bias"),
            "norm.weight": made_of("ssm_norm.weight", values=torch.flatten),
            "in_proj.weight": made_of("ssm_in.weight"),
            "out_proj.weight": made_of("ssm_out.weight"),
        }
        return super().gguf_layer(args) | {theirs + name: how for name, how in table.items()}

    def gguf_config(self, values: Values) -> dict:
        """The numbers of KV heads are an array, with 0 for layers without attention."""
        config = super().gguf_config(values)
        heads = values.get("attention.head_count_kv")
        if isinstance(heads, list) and heads:
            config["num_key_value_heads"] = max(heads)
        return config

    # Tensor parallelism ---------------------------------------------------------------------------

    # A group's B and C are replicated if there are fewer groups than ranks.
    kv_head_fields = "n_kv_head", "mamba_groups"

    sharded = ("mamba_heads",)

    def sharded_heads(self, args: MambaArgs) -> dict[str, int]:
        found = {"heads of Mamba-2": args.mamba_heads}
        # Ranks that share one group of several would have to sum its squares among them.
        return found | ({"groups of Mamba-2": args.mamba_groups} if args.mamba_groups > 1 else {})

    def shard_table(self, args: MambaArgs) -> dict[str, Shard]:
        H, P, G, N, _ = args.mamba_sizes
        values, group, head = (H, P), (G, N), (H, 1)
        return super().shard_table(args) | {
            "attention.wzx": Shard(0, (values, values, group, group)),
            "attention.wdt": Shard(0, (head,)),
            "attention.conv": Shard(0, (values, group, group)),
            "attention": Shard(0, (head,)),  # a_log, dt_bias and D
            "attention.norm": Shard(0, (values,)),
            "attention.wout": Shard(1, (values,)),
        }
