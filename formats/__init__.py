"""Weight formats, one file each. docs/adding_a_format.md says how to add one."""

from formats.base import PLAIN, Format
from formats.fp8 import FP8
from formats.fp8b import BlockFP8
from formats.hqq import HQQ, HQQ3
from formats.int4 import Int4
from formats.int8 import Int8
from formats.mxfp4 import MXFP4

__all__ = ["FORMATS", "PLAIN", "Format"]

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Int8(),
        FP8(),
        BlockFP8(),
        Int4(),
        MXFP4(),
        HQQ("hqq4", bits=4, group=64),
        HQQ3(),
        HQQ("hqq2", bits=2, group=16),
    )
}
