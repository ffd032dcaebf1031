"""Which of our formats holds a type of a GGUF file, or several types, with the same numbers.

A weight of ours has one format, so that one kernel reads it: an expert's gate and up, for example.
If a file has its rows in several types, the narrowest format that holds all of them is taken.

Layouts of ggml-common.h. Blocks of 32: fp16 step; in Q4_1 and Q5_1 fp16 least; in Q5_0 and Q5_1 the
fifth bits, uint32; then codes, in the lower nibbles the first 16.
"""

from collections.abc import Callable, Collection
from functools import cache, partial

import torch
from torch import Tensor

from formats import FORMATS
from formats.gguf_blocks import IQ4, low_then_high

# Types of which the numbers are rounded again. They have 1 to 3 bits.
ROUNDED = (
    *("Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)
ROUNDED_TO = "q4_k"  # by themselves
# What may hold several types, by bits a weight
HOLDERS = "iq4_xs", "iq4_nl", "q4_0", "q4_k", "q4_1", "q5_k", "q5_1", "q6_k", "q8_0"


# Blocks of one type as blocks of another one ------------------------------------------------------


def with_least(blocks: Tensor, half: int) -> Tensor:
    """Q4_0 -> Q4_1, Q5_0 -> Q5_1: a least of -`half` steps, with which codes are not negative."""
    step = blocks[..., :2].contiguous().view(torch.float16)
    return torch.cat((blocks[..., :2], (step * -half).view(torch.uint8), blocks[..., 2:]), dim=-1)


def with_fifth_bits(blocks: Tensor, at: int, nbytes: int) -> Tensor:
    """Q4_K -> Q5_K, Q4_1 -> Q5_1: the fifth bits, `nbytes` from byte `at` on, are 0."""
    bits = blocks.new_zeros(*blocks.shape[:-1], nbytes)
    return torch.cat((blocks[..., :at], bits, blocks[..., at:]), dim=-1)


def as_q8_0(blocks: Tensor, numbers: tuple[int, ...]) -> Tensor:
    """A type whose numbers are a step times `numbers[code]` -> Q8_0."""
    codes = low_then_high(blocks[..., -16:])
    if blocks.shape[-1] == 22:  # Q5_0
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
        codes = codes | (blocks[..., 2:6].unsqueeze(-1) >> shifts & 1).flatten(-2) << 4
    table = torch.tensor(numbers, dtype=torch.int8, device=blocks.device).view(torch.uint8)
    return torch.cat((blocks[..., :2], table[codes.long()]), dim=-1)


# (type, format) -> bytes of a block, and the conversion to blocks of the format's own type
CONVERSIONS: dict[tuple[str, str], tuple[int, Callable[[Tensor], Tensor]]] = {
    ("Q4_0", "q4_1"): (18, partial(with_least, half=8)),
    ("Q5_0", "q5_1"): (22, partial(with_least, half=16)),
    ("Q4_1", "q5_1"): (20, partial(with_fifth_bits, at=4, nbytes=4)),
    ("Q4_0", "q5_1"): (18, lambda b: with_fifth_bits(with_least(b, 8), 4, 4)),
    ("Q4_K", "q5_k"): (144, partial(with_fifth_bits, at=16, nbytes=32)),
    ("Q4_0", "q8_0"): (18, partial(as_q8_0, numbers=tuple(range(-8, 8)))),
    ("Q5_0", "q8_0"): (22, partial(as_q8_0, numbers=tuple(range(-16, 16)))),
    ("IQ4_NL", "q8_0"): (18, partial(as_q8_0, numbers=IQ4)),
}


# Choice -------------------------------------------------------------------------------------------


@cache
def format_of(type: str) -> str | None:
    """Return the name of our format for a type of the file; None: it has none, or is plain."""
    found = (name for name, form in FORMATS.items() if getattr(form, "gguf_type", None) == type)
    return next(found, None)


def holds(name: str, type: str) -> bool:
    """Whether a format holds a type's numbers; those that are rounded again fit in any."""
    return format_of(type) == name or (type, name) in CONVERSIONS or type in ROUNDED


def format_for(types: Collection[str]) -> str | None:
    """Return the format for rows of these types; None: none holds all, or one is plain."""
    if all(type in ROUNDED for type in types):
        return ROUNDED_TO
    own = {format_of(type) for type in types}
    if len(own) == 1 and None not in own:
        return own.pop()
    return next((n for n in HOLDERS if all(holds(n, type) for type in types)), None)


def as_blocks_of(name: str, blocks: Tensor, type: str) -> Tensor:
    """Return rows of blocks, uint8 [..., bytes of a row], as those of a format that holds them."""
    if format_of(type) == name:
        return blocks
    nbytes, convert = CONVERSIONS[type, name]
    return convert(blocks.unflatten(-1, (-1, nbytes))).flatten(-2)
