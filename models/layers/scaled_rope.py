"""RoPE of models made for longer sequences than they were first trained for.

Linear scaling divides all positions by a factor (Chen et al. 2023). Llama 3's scaling divides the
frequencies of long wavelengths alone (Grattafiori et al. 2024, section 3.4.2). YaRN is in yarn.py.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model import ModelArgs, Transformer
from models.config import MAX_INTEGER, HFConfig
from models.family import Family
from models.layers.yarn import (
    RopeScaling,
    Yarn,
    read_records,
    read_yarn,
    yarn_frequencies,
)
from ops.plain.rope import rope_frequencies, rope_table

LLAMA3_KEYS = "factor", "low_freq_factor", "high_freq_factor"


@dataclass(frozen=True)
class Llama3(RopeScaling):
    """Parameters of Llama 3's scaling."""

    factor: float  # frequencies are divided by this below `low` turns over `original`
    original: int  # positions the model was trained for first
    low: float
    high: float  # frequencies of more turns stay; between the two they are blended


@dataclass(frozen=True)
class ScaledRopeArgs(ModelArgs):
    """Args of a family whose RoPE may be scaled: by one of the three at most."""

    rope_factor: float = 1.0  # linear scaling: positions are divided by this
    llama3: Llama3 | None = None
    yarn: Yarn | None = None

    def __post_init__(self):
        read_records(self)
        super().__post_init__()


class ScaledRopeTransformer(Transformer):
    def make_rope_table(self, length: int, device: torch.device) -> Tensor:
        return scaled_rope_table(self.args, self.args.head_dim, length, device)


def scaled_rope_table(
    args: ModelArgs, rotary_dim: int, length: int, device: torch.device, unrotated: int = 0
) -> Tensor:
    """Return `rope_table` with the scaling of args; of ModelArgs themselves, without any."""
    frequencies, scale = scaled_frequencies(args, rotary_dim, device)
    return rope_table(frequencies, length, scale, unrotated)


def scaled_frequencies(
    args: ModelArgs, rotary_dim: int, device: torch.device
) -> tuple[Tensor, float]:
    """Return the scaled `rope_frequencies` of args, and the factor of cosines and sines."""
    frequencies, scale = rope_frequencies(rotary_dim, args.rope_theta, device), 1.0
    if isinstance(args, ScaledRopeArgs):
        frequencies = frequencies / args.rope_factor
        if args.llama3:
            frequencies = llama3_frequencies(args.llama3, frequencies)
        if args.yarn:
            frequencies = yarn_frequencies(args.yarn, rotary_dim, args.rope_theta, device)
            scale = args.yarn.attention
    return frequencies, scale


def llama3_frequencies(llama3: Llama3, frequencies: Tensor) -> Tensor:
    """Return the scaled angles per position of each pair, fp32 [rotary_dim / 2]."""
    turns = llama3.original * frequencies / (2 * math.pi)
    kept = ((turns - llama3.low) / (llama3.high - llama3.low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / llama3.factor)


# config.json --------------------------------------------------------------------------------------


class ScaledRopeFamily(Family):
    """A family that reads all scalings that transformers computes alike for every model."""

    args_class: type[ModelArgs] = ScaledRopeArgs
    model_class: type[Transformer] = ScaledRopeTransformer
    rope_types = ("default", "linear", "llama3", "yarn")
    published_with_yarn = False  # then max_position_embeddings is that with YaRN

    def arg_fields(self, c: HFConfig) -> dict:
        fields = super().arg_fields(c) | scaled_rope_fields(c)
        if (yarn := fields.get("yarn")) and not self.published_with_yarn:
            # Model cards have users add YaRN for long texts, and leave max_position_embeddings.
            longest = min(int(yarn.factor * yarn.original), MAX_INTEGER)
            fields["max_position"] = max(fields["max_position"], longest)
        return fields


def scaled_rope_fields(c: HFConfig) -> dict:
    """Return the fields of ScaledRopeArgs that are not their defaults."""
    if c["rope_type"] == "linear":
        return {"rope_factor": c.number("factor")}
    if c["rope_type"] == "llama3":
        return {"llama3": read_llama3(c)}
    if c["rope_type"] == "yarn":
        return {"yarn": read_yarn(c)}
    return {}


def read_llama3(c: HFConfig) -> Llama3:
    if missing := [key for key in LLAMA3_KEYS if c[key] is None]:
        c.refuse("rope_type", f"it needs {missing[0]}")
    factor, low, high = map(c.number, LLAMA3_KEYS)
    if high <= low:
        c.refuse("high_freq_factor", f"more than low_freq_factor = {low} is needed")
    return Llama3(factor, c.integer("original_max_position_embeddings"), low, high)
