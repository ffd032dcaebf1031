"""fp8b: e4m3 numbers and one scale a block of G x G, as DeepSeek-V3 is published."""

import torch
import torch.nn.functional as F
from torch import Tensor

from formats.base import Format, Layout, Parts
from formats.fp8 import E4M3_MAX, e4m3_products
from formats.words import bytes_to_words, expand_groups, nonzero, words_to_bytes


class BlockFP8(Format):
    """codes e4m3; scale fp32 [..., out / G, in / G]: a block's largest magnitude over 448.

    The last block may have fewer than G rows. Where 128 does not divide the rows, G is smaller.
    """

    name = "fp8b"
    bits = 8
    group = 128
    kind = "fp8b"
    blocks = True

    def scale_layout(self, rows: tuple[int, ...], width: int, group: int) -> Layout:
        *lead, out = rows
        return {"scale": ((*lead, -(-out // group), width // group), torch.float32)}

    def pack(self, weight: Tensor, group: int) -> Parts:
        rows = F.pad(weight, (0, 0, 0, -weight.shape[-2] % group))
        blocks = rows.unflatten(-1, (-1, group)).unflatten(-3, (-1, group))
        # [..., out / G, G, in / G, G] -> [..., out / G, in / G]
        scale = nonzero(blocks.abs().amax((-3, -1)) / E4M3_MAX)
        row_scale = expand_rows(scale, weight.shape[-2], group)
        codes = weight / expand_groups(row_scale, weight.shape[-1])
        codes = codes.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return {"codes": bytes_to_words(codes, group), "scale": scale}

    def unpack(self, parts: Parts, group: int) -> Tensor:
        codes = words_to_bytes(parts["codes"], group).view(torch.float8_e4m3fn)
        row_scale = expand_rows(parts["scale"], codes.shape[-2], group)
        return codes.float() * expand_groups(row_scale, codes.shape[-1])

    def regroup(self, name: str, part: Tensor, group: int, smaller: int) -> Tensor:
        part = super().regroup(name, part, group, smaller)
        return part.repeat_interleave(group // smaller, -2) if name == "scale" else part

    def dot(self, x: Tensor, parts: Parts, group: int) -> Tensor:
        # x always in fp32: otherwise Inductor splits the sum over a row into two kernels.
        products = e4m3_products(x.float(), parts["codes"], group)
        scale = expand_rows(parts["scale"], products.shape[-2], group) * 2.0**8
        return (expand_groups(scale, products.shape[-1]) * products).sum(-1)


def expand_rows(scale: Tensor, out: int, group: int) -> Tensor:
    """Scales of blocks of G rows [..., out / G, groups] -> of each row [..., out, groups]."""
    *lead, blocks, groups = scale.shape
    rows = scale.unsqueeze(-2).expand(*lead, blocks, group, groups).flatten(-3, -2)
    return rows.narrow(-2, 0, out)
