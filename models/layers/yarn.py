"""YaRN: RoPE of a model that was trained for shorter sequences (Peng et al. 2023)."""

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import get_args

import torch
from torch import Tensor

from model import is_valid
from models.config import HFConfig
from ops.plain.rope import rope_frequencies


@dataclass(frozen=True)
class RopeScaling:
    """Parameters of scaled RoPE. Raises ValueError for values that cannot be."""

    def __post_init__(self):
        read_records(self)
        for field in fields(self):
            if not is_valid(value := getattr(self, field.name), field.type):
                raise ValueError(f"{type(self).__name__.lower()}.{field.name} cannot be {value!r}")


def read_records(args) -> None:
    """Make each dict of a frozen dataclass the dataclass of its field's type: JSON has none."""
    for field in fields(args):
        kind = next(filter(is_dataclass, get_args(field.type)), None)
        if kind and isinstance(value := getattr(args, field.name), dict):
            object.__setattr__(args, field.name, kind(**value))


@dataclass(frozen=True)
class Yarn(RopeScaling):
    """Parameters of YaRN."""

    factor: float  # how much longer sequences became
    original: int  # positions the model was trained for first
    beta_fast: float = 32.0  # pairs with more rotations over `original` keep their frequency
    beta_slow: float = 1.0  # pairs with fewer get 1 / factor of it; between the two it is blended
    truncate: bool = True  # round the first and the last blended pair outwards
    attention: float = 1.0  # factor of cosines and sines, so scores have its square


def yarn_frequencies(yarn: Yarn, rotary_dim: int, theta: float, device: torch.device) -> Tensor:
    """Return the angle per position of each pair, fp32 [rotary_dim / 2] (Peng et al. 2023, 3.2)."""
    frequencies = rope_frequencies(rotary_dim, theta, device)
    # The pair that makes a given number of rotations over the original positions.
    first, last = (
        rotary_dim * math.log(yarn.original / (2 * math.pi * rotations)) / (2 * math.log(theta))
        for rotations in (yarn.beta_fast, yarn.beta_slow)
    )
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    pairs = torch.arange(rotary_dim // 2, device=device)
    slow = ((pairs - first) / (last - first or 1e-3)).clamp(0, 1)
    return frequencies * (1 - slow + slow / yarn.factor)


def read_yarn(c: HFConfig) -> Yarn:
    """Return YaRN's parameters.

    Cosines and sines are scaled by attention_factor, or by DeepSeek's two mscale keys, or as the
    paper suggests. A null or 0 is what transformers makes of it: null for factor is the ratio of
    the two lengths, null for truncate is false, null or 0 for a beta is its default.
    """
    if c.number("rope_theta") == 1:
        c.refuse("rope_theta", "YaRN needs frequencies that differ")
    original = c.integer("original_max_position_embeddings")
    if c.is_null("factor"):
        c["factor"] = c.integer("max_position_embeddings") / original
    factor = c.number("factor")
    scale = yarn_scale(factor)
    if c["mscale"] and c["mscale_all_dim"]:
        scale = yarn_scale(factor, c.number("mscale"))
        scale /= yarn_scale(factor, c.number("mscale_all_dim"))
    return Yarn(
        factor,
        original,
        c.number("beta_fast") if c["beta_fast"] else 32.0,
        c.number("beta_slow") if c["beta_slow"] else 1.0,
        False if c.is_null("truncate") else c.flag("truncate"),
        c.value("attention_factor", float | None) or scale,
    )


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return the scale of cosines and sines that the paper suggests (Peng et al. 2023, eq. 22)."""
    return max(1.0, 0.1 * mscale * math.log(factor) + 1)


def yarn_attention_scale(head_dim: int, factor: float, mscale: float) -> float:
    """Return DeepSeek's scale of attention scores, to which mscale_all_dim adds YaRN's."""
    return head_dim**-0.5 * yarn_scale(factor, mscale) ** 2
