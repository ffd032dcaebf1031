"""RoPE over the first numbers of each head (GLM-4.5, MiniMax-M2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model import Block
from models.config import HFConfig, rotary_dim
from models.gguf import Values, partial_rotary
from models.layers.scaled_rope import (
    ScaledRopeArgs,
    ScaledRopeFamily,
    ScaledRopeTransformer,
    scaled_rope_table,
)


@dataclass(frozen=True)
class PartialRopeArgs(ScaledRopeArgs):
    rotary_dim: int | None = None  # the first numbers of a head that are rotated; None: all

    def constraints(self) -> dict[str, bool]:
        rotated = self.rotary_dim or 2
        fits = rotated % 2 == 0 and self.head_dim % rotated == 0
        return super().constraints() | {"rotary_dim": fits}

    @property
    def rotated(self) -> int:
        return self.rotary_dim or self.head_dim


class PartialRopeTransformer(ScaledRopeTransformer):
    args: PartialRopeArgs

    def make_block(self, args: PartialRopeArgs, layer: int) -> Block:
        block = Block(args, layer)
        block.attention.rotary_dim = args.rotated
        return block

    def make_rope_table(self, length: int, device: torch.device) -> Tensor:
        rotated, C = self.args.rotated, self.args.head_dim
        return scaled_rope_table(self.args, rotated, length, device, C - rotated)


class PartialRopeFamily(ScaledRopeFamily):
    nullable = ("partial_rotary_factor",)

    def arg_fields(self, c: HFConfig) -> dict:
        fields, rotated = super().arg_fields(c), rotary_dim(c)
        return fields | {"rotary_dim": rotated if rotated < c["head_dim"] else None}

    def gguf_config(self, values: Values) -> dict:
        return super().gguf_config(values) | partial_rotary(values)
