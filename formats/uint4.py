"""uint4: 4-bit integers, and a scale and a zero a group, as AWQ and GPTQ files have them."""

import torch
from torch import Tensor

from formats.base import Layout, Parts
from formats.hqq import HQQ
from formats.words import nonzero

TOP = 15  # the largest code


class UInt4(HQQ):
    """(code - zero) * scale, with codes 0 to 15; scale bf16 and zero uint8 [..., out, in / G].

    A zero may be 16: GPTQ files store zeros less 1.
    """

    has_solver = False
    head_format = "int8"

    def __init__(self):
        super().__init__("uint4", bits=4, group=128)

    def scale_layout(self, rows: tuple[int, ...], width: int, group: int) -> Layout:
        groups = (*rows, width // group)
        return {"scale": (groups, torch.bfloat16), "zero": (groups, torch.uint8)}

    def pack(self, weight: Tensor, group: int) -> Parts:
        """fp32 [..., out, in] -> parts, rounded to the nearest. A group's range includes 0."""
        grouped = weight.unflatten(-1, (-1, group))
        low = grouped.amin(-1, keepdim=True).clamp(max=0)
        high = grouped.amax(-1, keepdim=True).clamp(min=0)
        scale = nonzero(((high - low) / TOP).bfloat16())
        zero = (-low / scale.float()).round().clamp(0, TOP)
        codes = ((grouped / scale.float()).round() + zero).clamp(0, TOP).flatten(-2)
        parts = self.pack_codes(codes.to(torch.int32), group)
        return parts | {"scale": scale.squeeze(-1), "zero": zero.squeeze(-1).to(torch.uint8)}
