"""The tensors of a Hugging Face directory: which there are, and what they must be."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import FileRange, SafetensorsFile
from models.tensors import Recipe

PLAIN_DTYPES = torch.bfloat16, torch.float16, torch.float32
NOT_PLAIN = "; only bf16, fp16 and fp32 are converted, and fp8 and mxfp4 where the config says so"
WRONG_DTYPE = {  # keys: the dtype that is due
    torch.float8_e4m3fn: " beside others in fp8, of which one weight is made; fetch its file again",
    torch.uint8: " where uint8 belongs; fetch its file again",
}
SCALE = "_scale_inv"  # suffix of a block-FP8 weight's scales


class PublishedTensors:
    """The tensors of a Hugging Face directory, under the names that families share.

    shards: file -> an object with the `path`, `tensors` and `read` of a SafetensorsFile, and with
    its `origin` if tensors are in a file as they are read.
    weight_map: tensor -> file, as the index says; {}: there is none.
    """

    def __init__(
        self,
        directory: Path,
        renames: tuple[tuple[str, str], ...],
        shards: Mapping[str, SafetensorsFile],
        weight_map: Mapping[str, str],
    ):
        self.directory, self.renames = directory, renames
        self.dequantized: dict[str, int] = {}  # FP8 weights read as numbers: size of their blocks
        self.tensors: dict[
            str, tuple[SafetensorsFile, str]
        ] = {}  # shared name -> file, its name there
        for name, file in weight_map.items():
            if name not in shards[file].tensors:
                raise ValueError(
                    f"{directory / file} lacks {name}, which the index puts there; fetch it again"
                )
        for shard in shards.values():
            for original in shard.tensors:
                self.add(shard, original)

    def add(self, shard: SafetensorsFile, original: str) -> None:
        """Enter one tensor under its shared name."""
        name = original
        for theirs, shared in self.renames:
            name = name.replace(theirs, shared)
        if name in self.tensors:
            both = f"{self.tensors[name][0].path.name} and {shard.path.name}"
            what = f"{original} is there twice, in {both}"
            raise ValueError(f"{self.directory}: {what}; remove the stale file")
        if not name.endswith("rotary_emb.inv_freq"):  # a constant in old files
            self.tensors[name] = shard, original

    def leave_out(self, prefixes: tuple[str, ...], used: Collection[str] = ()) -> str:
        """Leave out the tensors with these prefixes that are not `used`.

        Return how many there were of each, in words.
        """
        counts = dict.fromkeys(prefixes, 0)
        for name in self.tensors.keys() - used:
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
            if prefix is not None:
                counts[prefix] += 1
                del self.tensors[name]
        found = (f"{prefix}* ({count} tensors)" for prefix, count in counts.items() if count)
        return ", ".join(found)

    def original(self, name: str) -> str:
        """Return the name as this directory's files have it."""
        for theirs, shared in self.renames:
            name = name.replace(shared, theirs)
        return name

    def has_fp8(self, recipe: Recipe) -> bool:
        """Whether any source of the recipe is in FP8."""
        files = (self.tensors[name] for name in recipe.sources if name in self.tensors)
        fp8 = torch.float8_e4m3fn
        return any(shard.tensors[original][1] == fp8 for shard, original in files)

    def read(self, name: str) -> Tensor:
        """Return the tensor, mapped from its file."""
        shard, original = self.tensors[name]
        tensor = shard.read(original)
        if name in self.dequantized:
            (rows, width), block = tensor.shape, self.dequantized[name]
            scale = self.read(name + SCALE).float()
            scale = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            tensor = tensor.float() * scale[:rows, :width]
        return tensor

    def origin(self, name: str) -> FileRange | None:
        """Return where a file has the numbers that `read` returns; None: nowhere."""
        shard, original = self.tensors[name]
        find = getattr(shard, "origin", None)
        return None if name in self.dequantized or find is None else find(original)

    def check(self, name: str, shape: tuple[int, ...], due: torch.dtype | None = None) -> None:
        """Raise ValueError unless the tensor has this shape and dtype `due` (None: any plain)."""
        if name not in self.tensors:
            missing = f"the tensor {self.original(name)} is missing"
            raise ValueError(f"{self.directory}: {missing}; fetch its file again")
        shard, original = self.tensors[name]
        found, dtype = shard.tensors[original]
        if name in self.dequantized:
            due, block = torch.float8_e4m3fn, self.dequantized[name]
            self.check(name + SCALE, tuple(-(-n // block) for n in shape))
        if dtype not in (PLAIN_DTYPES if due in (None, *PLAIN_DTYPES) else (due,)):
            what = f"{shard.path}: {original} has dtype {str(dtype).removeprefix('torch.')}"
            raise ValueError(what + WRONG_DTYPE.get(due, NOT_PLAIN))
        if found != shape:
            raise ValueError(
                f"{shard.path}: {original} has shape {list(found)} where config.json says "
                f"{list(shape)}"
            )
