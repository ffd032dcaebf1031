"""The tensors of a Hugging Face directory: which there are, and what they must be."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import FileRange, SafetensorsFile, read_json
from models.published_weights import PLAIN_DTYPES, Part
from models.quantization import MODELOPT_FILE
from models.tensors import Recipe

NOT_PLAIN = "; only bf16, fp16 and fp32 are converted, and fp8 and mxfp4 where the config says so"
WRONG_DTYPE = {  # keys: the dtype that is due
    torch.float8_e4m3fn: " beside others in fp8, of which one weight is made; fetch its file again",
    torch.uint8: " where uint8 belongs; fetch its file again",
}
BLOCK = 128  # rows and columns that share a scale of block FP8
SCALE = "_scale_inv"  # suffix of a block-FP8 weight's scales
# Suffixes of what follows from config.json.
CONSTANTS = (
    *("rotary_emb.inv_freq", ".ple_embedding.layer_multipliers"),
    *(".ple_embedding.ngram_heads_vocab_sizes", ".ple_embedding.ngram_heads_offsets"),
)


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
        self.parts: dict[str, Part] = {}  # what is made of several tensors, or converted
        # Shared name -> file, its name there
        self.tensors: dict[str, tuple[SafetensorsFile, str]] = {}
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
        if not name.endswith(CONSTANTS):
            self.tensors[name] = shard, original

    def name_block_scales(self) -> None:
        """Give scales of FP8 blocks, which compressed-tensors calls weight_scale, our name."""
        for name in [name for name in self.tensors if name.endswith(".weight_scale")]:
            weight, scale = self.found(name.removesuffix("_scale")), self.found(name)
            if not weight or not scale or weight[1] is not torch.float8_e4m3fn:
                continue
            blocks = tuple(-(-size // BLOCK) for size in weight[0])
            if scale[0] == blocks and max(weight[0], default=0) > BLOCK:
                self.tensors[name.removesuffix("_scale") + SCALE] = self.tensors.pop(name)

    def share_scales(self) -> None:
        """Give each part NAME.shard_N.weight of a table the scale NAME.weight_scale of all."""
        shared = set()
        for name in [name for name in self.tensors if ".shard_" in name]:
            whole, number = name.removesuffix(".weight").split(".shard_", 1)
            scale = f"{whole}.weight_scale"
            if name.endswith(".weight") and scale in self.tensors:
                self.tensors[f"{whole}.shard_{number}.weight_scale"] = self.tensors[scale]
                shared.add(scale)
        for scale in shared:
            del self.tensors[scale]

    def forget(self, suffixes: tuple[str, ...]) -> None:
        """Forget the tensors with these suffixes, which the model does not need."""
        for name in [name for name in self.tensors if name.endswith(suffixes)]:
            del self.tensors[name]

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

    def found(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return a published tensor's shape and dtype; None: there is no such tensor."""
        if name not in self.tensors:
            return None
        shard, original = self.tensors[name]
        return shard.tensors[original]

    def raw(self, name: str) -> Tensor:
        """Return the published tensor, mapped from its file."""
        shard, original = self.tensors[name]
        return shard.read(original)

    def refusal(self, name: str, what: str) -> ValueError:
        """Return the error for a published tensor."""
        original = self.original(name)
        if name not in self.tensors:
            return ValueError(f"{self.directory}: the tensor {original} {what}")
        return ValueError(f"{self.tensors[name][0].path}: {original} {what}")

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the published tensors that `read` reads."""
        if name in self.parts:
            return self.parts[name].sources
        return (name, name + SCALE) if name in self.dequantized else (name,)

    def read(self, name: str) -> Tensor:
        """Return the tensor, or the part of a name; a tensor alone is mapped from its file."""
        if name in self.parts:
            return self.parts[name].read().contiguous()
        tensor = self.raw(name)
        if name in self.dequantized:
            (rows, width), block = tensor.shape, self.dequantized[name]
            scale = self.read(name + SCALE).float()
            scale = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            tensor = tensor.float() * scale[:rows, :width]
        return tensor

    def origin(self, name: str) -> FileRange | None:
        """Return where a file has the numbers that `read` returns; None: nowhere."""
        if name in self.parts:
            return None
        shard, original = self.tensors[name]
        find = getattr(shard, "origin", None)
        return None if name in self.dequantized or find is None else find(original)

    def check(self, name: str, shape: tuple[int, ...], due: torch.dtype | None = None) -> None:
        """Raise ValueError unless the tensor has this shape and dtype `due` (None: any plain)."""
        if name in self.parts and self.parts[name].shape == shape:
            return  # its sources were checked when it was found
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


def read_config(directory: Path) -> dict:
    """Read config.json, with ModelOpt's own file where it says nothing itself."""
    config = read_json(directory / "config.json")
    beside = directory / MODELOPT_FILE
    if config.get("quantization_config") is None and beside.is_file():
        quantization = read_json(beside).get("quantization")
        quantization = quantization if isinstance(quantization, dict) else {}
        config["quantization_config"] = {"quant_method": "modelopt"} | quantization
    return config
