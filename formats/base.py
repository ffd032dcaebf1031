"""What a weight format is: the base class of every file in formats/ that describes one.

A format stores a weight [..., out, in] as a few tensors, its parts. They keep the weight's rank and
the order of its axes, with size 1 where one value serves a whole row:

    codes   int32 [..., out, in * bits / 32], packed as in formats/words.py
    scale   [..., out, 1] of rows, [..., out, in / G] of groups, [..., out / G, in / G] of blocks

Further parts are the format's own; `layout` lists all. Codes are packed along `in` alone and within
groups, so a weight can be sharded along either axis, between groups or blocks.

docs/adding_a_format.md walks through one format and adds another.
"""

import torch
from torch import Tensor

from formats.words import interleave, pack_words, unpack_words
from ops.inductor import materialize

Parts = dict[str, Tensor]
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # part -> its shape and dtype

PLAIN = "bf16"  # in place of a format's name: the weight stays as it is


class Format:
    """One way to store a weight and to multiply with it. Subclasses set the attributes."""

    name: str
    bits: int  # per code
    group: int  # largest default of G, the numbers along `in` that are packed (and scaled) together
    kind: str | None = None  # how the kernels of ops/products/ decode it; None: they do not
    has_gemv = False  # ops.products.gemv multiplies it with one token
    has_solver = False  # `pack` takes the number of a solver's iterations
    per_row = False  # a row has one scale; a group is only the unit of packing
    fixed_group = False  # G is `group`, and no other
    blocks = False  # a group is of G rows too
    head_format = PLAIN  # format of the head, unless the user chooses one
    attention_format: str | None = None  # format of attention with --mode; None: this one
    narrow: str | None = None  # format of rows that G does not divide; None: they are refused
    gguf_type: str | None = None  # name of its blocks in GGUF files, which `from_blocks` reads
    block_bytes: int  # of each

    # What a format defines ------------------------------------------------------------------------

    def pack(self, weight: Tensor, group: int) -> Parts:
        """fp32 [..., out, in] -> parts."""
        raise NotImplementedError

    def unpack(self, parts: Parts, group: int) -> Tensor:
        """Dequantize: parts -> fp32 [..., out, in]. Invert `pack`, up to its rounding."""
        raise NotImplementedError

    def dot(self, x: Tensor, parts: Parts, group: int) -> Tensor:
        """x [..., in], parts of [..., out, in] -> fp32 [..., out]: the product for one token.

        Plain PyTorch, which Inductor fuses with the gather of the parts into one kernel. This form
        is correct for every format; override it with one that decodes in fewer instructions.
        """
        x = materialize(x)  # or Inductor recomputes SwiGLU in every row of the product
        return (self.unpack(parts, group) * x.unsqueeze(-2).float()).sum(-1)

    def from_blocks(self, blocks: Tensor) -> Parts:
        """Blocks of a GGUF file, uint8 [..., out, bytes of a row] -> parts, the same numbers.

        Raises ValueError for a row that is not of whole blocks.
        """
        size = self.block_bytes
        if blocks.shape[-1] % size:
            what = f"{self.gguf_type} blocks of {size}"
            raise ValueError(f"rows of {blocks.shape[-1]} bytes are not of whole {what}")
        return self.read(blocks.unflatten(-1, (-1, size)))

    def read(self, blocks: Tensor) -> Parts:
        """Whole blocks uint8 [..., out, blocks of a row, block_bytes] -> parts."""
        raise NotImplementedError

    def code_layout(self, rows: tuple[int, ...], width: int) -> Layout:
        """Return the layout of the codes of rows [*rows, width]."""
        return {"codes": ((*rows, width * self.bits // 32), torch.int32)}

    def scale_layout(self, rows: tuple[int, ...], width: int, group: int) -> Layout:
        """Return the layout of scales (and zeros) of rows [*rows, width]."""
        return {"scale": ((*rows, 1 if self.per_row else width // group), torch.bfloat16)}

    @property
    def min_group(self) -> int:
        """The smallest G: as many codes as a word has, if it may be smaller than `group`."""
        return self.group if self.fixed_group else 32 // self.bits

    @property
    def has_own_group(self) -> bool:
        """Whether G is the format's own, so that --group_size is refused."""
        return self.per_row or self.fixed_group

    @property
    def codes_per_word(self) -> int:
        """Codes in one word of `codes`."""
        return 32 // self.bits

    def uses_integer_products(self, x: Tensor, codes: Tensor) -> bool:
        """Whether `dot` multiplies bytes with integers made of x (`words.integer_products`).

        Then x is prepared by a kernel of its own, so a stacked product is better than two.
        """
        return False

    # What follows from that -----------------------------------------------------------------------

    def layout(self, shape: torch.Size, group: int, scale: torch.dtype | None = None) -> Layout:
        """Return shape and dtype of each part of a weight [..., out, in], in the parts' order.

        scale: the dtype of `scale`, if published scales have another one than ours.
        """
        *rows, width = shape
        layout = self.code_layout(rows, width) | self.scale_layout(rows, width, group)
        if scale is not None:
            layout["scale"] = layout["scale"][0], scale
        return layout

    def fits(self, width: int, group: int) -> bool:
        """Whether groups of this size divide rows of `width` numbers into whole words."""
        is_allowed = group == self.group if self.fixed_group else group % self.min_group == 0
        return is_allowed and width % group == 0

    def name_for(self, width: int) -> str:
        """Return the name of the format of rows of `width` numbers: this one, or `narrow`."""
        return self.narrow if self.narrow and width % self.group else self.name

    def choose_group(self, width: int, group: int | None) -> int:
        """Return the G for rows of `width` numbers; group: the one asked for, or None.

        Raises ValueError for a G that does not divide the rows into whole words.
        """
        if group is None:
            group = self.default_group(width)
        if type(group) is not int or group < 1 or not self.fits(width, group):
            raise ValueError(
                f"groups of {group} do not divide rows of {width} numbers into whole words"
            )
        return group

    def default_group(self, width: int) -> int:
        """Return the G to use for rows of `width` numbers: `group`, halved until it divides them.

        Large groups have few scales, and let kernels load more at once.
        """
        group = self.group
        while group % 2 == 0 and group // 2 >= self.min_group and not self.fits(width, group):
            group //= 2
        return group

    def regroup(self, name: str, part: Tensor, group: int, smaller: int) -> Tensor:
        """Return a part that has whole groups as the part of `smaller` ones, which divide them.

        No number changes: codes are put in another order, and scales are repeated.
        """
        if group == smaller:  # a format with a G of its own has no smaller groups
            return part
        if name == "codes":
            bits = 32 // self.codes_per_word
            return pack_words(unpack_words(part, bits, group), bits, smaller)
        (_, of_two_groups), _ = self.scale_layout((1,), 2 * group, group)[name]
        return part if of_two_groups == 1 else part.repeat_interleave(group // smaller, -1)

    def grouped_order(self, x: Tensor, group: int) -> Tensor:
        """Reorder x [..., in] along `in` as ops.products.prompt unpacks this format's weights.

        A word is two units of 16 bits. The kernel reads x for one field of neighboring units: the
        first fields of a row come first, then the second ones, and so on.
        """
        ordered = interleave(x, self.codes_per_word, group)
        return ordered.unflatten(-1, (-1, self.codes_per_word // 2)).transpose(-2, -1).flatten(-2)
