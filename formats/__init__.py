"""Weight formats, one file each. docs/adding_a_format.md says how to add one."""

from formats.affine_blocks import Q4One, Q5One
from formats.base import PLAIN, Format
from formats.fp8 import FP8
from formats.fp8b import BlockFP8
from formats.gguf_blocks import IQ4NL, Q4Zero, Q8Zero
from formats.hqq import HQQ, HQQ3
from formats.int4 import Int4
from formats.int8 import Int8
from formats.k_quants import IQ4XS, Q4K, Q5K, Q6K
from formats.mxfp4 import MXFP4
from formats.nvfp4 import NVFP4
from formats.uint4 import UInt4

__all__ = ["FORMATS", "PLAIN", "Format"]

# A literal: cli/model_name.py reads the names from this file's text, without importing torch.
FORMATS: dict[str, Format] = {
    "int8": Int8(),
    "fp8": FP8(),
    "fp8b": BlockFP8(),
    "int4": Int4(),
    "uint4": UInt4(),
    "mxfp4": MXFP4(),
    "nvfp4": NVFP4(),
    "hqq4": HQQ("hqq4", bits=4, group=64),
    "hqq3": HQQ3(),
    "hqq2": HQQ("hqq2", bits=2, group=16),
    "q8_0": Q8Zero(),
    "q6_k": Q6K(),
    "q5_k": Q5K(),
    "q4_k": Q4K(),
    "q5_1": Q5One(),
    "q4_1": Q4One(),
    "q4_0": Q4Zero(),
    "iq4_nl": IQ4NL(),
    "iq4_xs": IQ4XS(),
}
