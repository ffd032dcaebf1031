"""Windowed and full layers with RoPE of their own: base, scaling, and part of a head (Laguna)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from model import Attention, ModelArgs
from models.config import HFConfig, rotary_dim, unsupported
from models.layers.scaled_rope import (
    Llama3,
    ScaledRopeTransformer,
    scaled_rope_fields,
    scaled_rope_table,
)
from models.layers.windows import KINDS, WindowedArgs, WindowedFamily
from models.layers.yarn import RopeScaling, Yarn
from ops.declared import AttentionAdditions


@dataclass(frozen=True)
class LayerRope(RopeScaling):
    """RoPE of full layers. The last three are as in `ScaledRopeArgs`."""

    theta: float
    rotary_dim: int  # the first numbers of a head that are rotated
    rope_factor: float = 1.0
    llama3: Llama3 | None = None
    yarn: Yarn | None = None


@dataclass(frozen=True)
class LayerRopeArgs(WindowedArgs):
    rotary_dim: int | None = None  # numbers of a windowed layer's head that are rotated; None: all
    full_rope: LayerRope | None = None  # None: full layers have the RoPE of windowed ones

    def constraints(self) -> dict[str, bool]:
        fits = {
            name: not rotated or (rotated % 2 == 0 and self.head_dim % rotated == 0)
            for name, rotated in (
                ("rotary_dim", self.rotary_dim),
                ("full_rope", self.full_rope and self.full_rope.rotary_dim),
            )
        }
        return super().constraints() | fits

    @property
    def ropes(self) -> list[LayerRope]:
        """The RoPE of windowed layers, and that of full ones if it differs."""
        values = self.rope_factor, self.llama3, self.yarn
        window = LayerRope(self.rope_theta, self.rotary_dim or self.head_dim, *values)
        return [window] if self.full_rope is None else [window, self.full_rope]


class LayerRopeAttention(Attention):
    """Attention with or without a window, which reads its own columns of `Context.rope`."""

    def __init__(self, args: LayerRopeArgs, layer: int):
        super().__init__(args)
        self.window, ropes = args.window_of(layer), args.ropes
        number = len(ropes) - 1 if layer in args.full_layers else 0
        self.rotary_dim = ropes[number].rotary_dim
        self.rope_begin = number * 2 * args.head_dim

    def own_rope(self, rope: Tensor) -> Tensor:
        return rope.narrow(-1, self.rope_begin, 2 * self.heads[2])

    def keys_and_values(self, kv: Tensor, rope: Tensor) -> Tensor:
        return super().keys_and_values(kv, self.own_rope(rope))

    def queries(self, q: Tensor, rope: Tensor) -> Tensor:
        return super().queries(q, self.own_rope(rope))

    def fused_decode_settings(self) -> AttentionAdditions:
        return AttentionAdditions(rope_begin=self.rope_begin)


class LayerRopeTransformer(ScaledRopeTransformer):
    args: LayerRopeArgs

    def make_rope_table(self, length: int, device: torch.device) -> Tensor:
        """Return the windowed layers' columns, then those of full layers."""
        tables = []
        for rope in self.args.ropes:
            scaling = dict(rope_factor=rope.rope_factor, llama3=rope.llama3, yarn=rope.yarn)
            args = replace(self.args, rope_theta=rope.theta, **scaling)
            unrotated = args.head_dim - rope.rotary_dim
            tables.append(scaled_rope_table(args, rope.rotary_dim, length, device, unrotated))
        return torch.cat(tables, dim=-1)


# config.json --------------------------------------------------------------------------------------

TOP_LEVEL = "rope_theta", "original_max_position_embeddings", "rope_scaling"  # not read there


class LayerRopeFamily(WindowedFamily):
    """A family whose `rope_parameters` are a set for each kind of layer."""

    args_class: type[ModelArgs] = LayerRopeArgs
    layer_ropes: Mapping[str, dict]  # transformers' values of absent `rope_parameters`
    published_with_yarn = True

    def from_hf(self, config: dict) -> ModelArgs:
        args = cast(LayerRopeArgs, super().from_hf(self.with_rope(config, KINDS[0])))
        c = HFConfig(self.with_rope(config, KINDS[1]), self)
        rope = LayerRope(c.number("rope_theta"), rotary_dim(c), **scaled_rope_fields(c))
        return replace(args, full_rope=rope)

    def with_rope(self, config: dict, kind: str) -> dict:
        """Return the config with one kind's rope parameters as those of all layers.

        Raises ValueError if layers of this kind have none.
        """
        if "rope_scaling" in config:
            raise unsupported("rope_scaling", config["rope_scaling"], "rope_parameters are")
        sets, kinds = config.get("rope_parameters"), config.get("layer_types")
        sets = self.layer_ropes if sets is None else sets
        found = sets.get(kind) if isinstance(sets, Mapping) else None
        if found is None and kind not in (kinds if isinstance(kinds, list) else KINDS[1]):
            found = self.layer_ropes[kind]
        if not isinstance(found, Mapping):
            raise unsupported("rope_parameters", sets, f"a set for {kind} is needed")
        if found.get("rope_theta") is None:
            raise unsupported("rope_parameters", sets, f"rope_theta of {kind} needs a value")
        part = "partial_rotary_factor"
        if config.get(part) is not None and part not in found:
            raise unsupported(part, config[part], f"the set for {kind} has none")
        kept = {k: v for k, v in config.items() if k not in (part, *TOP_LEVEL)}
        return kept | {"rope_parameters": dict(found)}

    def arg_fields(self, c: HFConfig) -> dict:
        fields, rotated = super().arg_fields(c), rotary_dim(c)
        return fields | {"rotary_dim": rotated if rotated < c["head_dim"] else None}
