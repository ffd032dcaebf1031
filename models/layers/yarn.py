"""YaRN: RoPE of a model that was trained for shorter sequences (Peng et al. 2023)."""

import math
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from model import ModelArgs, is_valid
from models.config import HFConfig
from ops.rope import rope_frequencies, rope_table


@dataclass(frozen=True)
class Yarn:
    """Parameters of YaRN. Raises ValueError for values that cannot be."""

    factor: float  # how much longer sequences became
    original: int  # positions the model was trained for first
    beta_fast: float = 32.0  # pairs with more rotations over `original` keep their frequency
    beta_slow: float = 1.0  # pairs with fewer get 1 / factor of it; between the two it is blended
    truncate: bool = True  # round the first and the last blended pair outwards
    attention: float = 1.0  # factor of cosines and sines, so scores have its square

    def __post_init__(self):
        for field in fields(self):
            if not is_valid(value := getattr(self, field.name), field.type):
                raise ValueError(f"yarn.{field.name} cannot be {value!r}")


@dataclass(frozen=True)
class YarnArgs(ModelArgs):
    """Args of a family that may use YaRN. None: plain RoPE."""

    yarn: Yarn | None = None

    def __post_init__(self):
        if isinstance(self.yarn, dict):  # from JSON
            object.__setattr__(self, "yarn", Yarn(**self.yarn))
        super().__post_init__()


def yarn_rope_table(args: YarnArgs, rotary_dim: int, length: int, device: torch.device) -> Tensor:
    """Return cosines, then signed sines of all positions, fp32 [length, 2 rotary_dim]."""
    if args.yarn is None:
        return rope_table(rope_frequencies(rotary_dim, args.rope_theta, device), length)
    frequencies = yarn_frequencies(args.yarn, rotary_dim, args.rope_theta, device)
    return rope_table(frequencies, length, args.yarn.attention)


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


def read_yarn(c: HFConfig) -> Yarn | None:
    """Return YaRN's parameters, or None if config.json has plain RoPE.

    Cosines and sines are scaled by attention_factor, or by DeepSeek's two mscale keys, or as the
    paper suggests.
    """
    if c["rope_type"] != "yarn":
        return None
    factor = c.number("factor")
    scale = yarn_scale(factor)
    if c["mscale"] and c["mscale_all_dim"]:
        scale = yarn_scale(factor, c.number("mscale"))
        scale /= yarn_scale(factor, c.number("mscale_all_dim"))
    return Yarn(
        factor,
        c.integer("original_max_position_embeddings"),
        c.number("beta_fast"),
        c.number("beta_slow"),
        c.flag("truncate"),
        c.value("attention_factor", float | None) or scale,
    )


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return the scale of cosines and sines that the paper suggests (Peng et al. 2023, eq. 22)."""
    return max(1.0, 0.1 * mscale * math.log(factor) + 1)


def yarn_to_hf(yarn: Yarn) -> dict:
    """Return config.json's rope parameters: the inverse of `read_yarn`."""
    parameters = asdict(yarn) | {"rope_type": "yarn"}
    parameters["original_max_position_embeddings"] = parameters.pop("original")
    parameters["attention_factor"] = parameters.pop("attention")
    return parameters
