"""From Hugging Face layout to ours, one layer at a time: 93 GB of Mixtral convert in 16 GB of memory.

    python convert_hf_checkpoint.py --checkpoint_dir DIR [--output_dir DIR] [--dtype bf16|fp16|fp32] [--force]

Reads safetensors only: `model.safetensors`, or shards with or without their index. What the model is stands in its
config.json, which `families.py` reads; which tensors make which of ours, in `recipes.py`. Everything that can be known
from the config and the files' headers is checked before a byte is written; values are checked for NaN and infinity as
they pass.
"""

import dataclasses
import math
import re
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from args import ModelArgs
from checkpoint import DTYPES, NAMES, Shard, Writer, is_checkpoint, read_json
from command import Parser
from families import args_from_hf, family_of, published_format
from packing import FORMATS
from recipes import SCALE, WHOLE, Recipe, block_recipes, is_finite, layer_recipes, part_shape, rest_recipes

DOWNLOAD = "python scripts/download.py --repo_id OWNER/NAME"  # what to run where something is not there
# Copied beside the weights as they are; the last is completed by `generation_config`.
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
PLAIN_DTYPES = torch.bfloat16, torch.float16, torch.float32
PACKABLE = ".wqkv.weight", ".wq.weight", ".wo.weight", ".w13.weight", ".w2.weight", "head.weight"  # may stay in fp8
UNPACKED = ".wkv"  # what becomes 16 bits then: latent attention multiplies with it along either axis


def weight_files(directory: Path) -> tuple[list[str], dict[str, str]]:
    """The safetensors files to read, and the index's map from tensor to file (empty without an index).

    As in transformers, `model.safetensors` comes before an index, and an index before a bare set of shards.
    """
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return ["model.safetensors"], {}
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or any(Path(str(file)).name != file for file in weight_map.values()):
            raise ValueError(f"{index} has no weight_map from tensors to files; fetch it again")
        files = sorted(set(weight_map.values()))
    else:
        weight_map = {}
        found = sorted(path.name for path in directory.glob("*.safetensors"))
        files = [name for name in found if name.startswith("model-")] or found
        if numbered := re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.safetensors)", files[0] if files else ""):
            before, after, count = numbered.groups()
            files = [f"{before}{i:05d}{after}" for i in range(1, int(count) + 1)]
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise ValueError(f"{directory}: {len(missing)} of {len(files)} shards missing; fetch {missing[0]} again")
    if files:
        return files, weight_map
    for path in sorted(directory.iterdir()):
        if path.suffix == ".gguf":
            raise ValueError(f"{directory} has {path.name}: GGUF is quantised already; fetch the original safetensors")
        if path.suffix in (".bin", ".pt", ".pth"):
            raise ValueError(f"{directory} has only {path.name}: pickle is never loaded; fetch the safetensors")
    raise ValueError(f"{directory} has no safetensors files; fetch them: {DOWNLOAD}")


class Sources:
    """The tensors of a Hugging Face directory under the names that the families share, whatever file they are in."""

    def __init__(self, directory: Path, renames: tuple[tuple[str, str], ...]):
        self.directory, self.renames = directory, renames
        self.unpacked: dict[str, int] = {}  # weights in fp8 that are read as numbers: the rows and columns of a block
        self.tensors: dict[str, tuple[Shard, str]] = {}  # shared name: the file, and the name in that file
        files, weight_map = weight_files(directory)
        shards = {file: Shard(directory / file) for file in files}
        for name, file in weight_map.items():
            if name not in shards[file].tensors:
                raise ValueError(f"{directory / file} lacks {name}, which the index puts there; fetch it again")
        for shard in shards.values():
            for original in shard.tensors:
                name = original
                for theirs, shared in renames:
                    name = name.replace(theirs, shared)
                if name in self.tensors:
                    both = f"{self.tensors[name][0].path.name} and {shard.path.name}"
                    raise ValueError(f"{directory}: {original} is there twice, in {both}; remove the stale file")
                if not name.endswith("rotary_emb.inv_freq"):  # old files hold this constant
                    self.tensors[name] = shard, original

    def drop_layers(self, first: int, count: int):
        """Leave so many layers out: those after the last, which predict further tokens for drafts."""
        beyond = tuple(f"model.layers.{layer}." for layer in range(first, first + count))
        self.tensors = {name: place for name, place in self.tensors.items() if not name.startswith(beyond)}

    def original(self, name: str) -> str:
        """The name as this directory's files would have it."""
        for theirs, shared in self.renames:
            name = name.replace(shared, theirs)
        return name

    def in_fp8(self, recipe: Recipe) -> bool:
        """Whether any tensor of the recipe is."""
        files = (self.tensors[name] for name in recipe.parts if name in self.tensors)
        return any(shard.tensors[original][1] == torch.float8_e4m3fn for shard, original in files)

    def read(self, name: str) -> Tensor:
        """The tensor, mapped from its file."""
        shard, original = self.tensors[name]
        tensor = shard.read(original)
        if name in self.unpacked:
            (rows, width), block = tensor.shape, self.unpacked[name]
            scale = self.read(name + SCALE).float().repeat_interleave(block, 0).repeat_interleave(block, 1)
            tensor = tensor.float() * scale[:rows, :width]
        return tensor

    def check(self, name: str, shape: tuple[int, ...], due: torch.dtype | None = None):
        """ValueError unless the tensor is there with this shape, of that dtype if it is none of PLAIN_DTYPES."""
        if name not in self.tensors:
            raise ValueError(f"{self.directory}: the tensor {self.original(name)} is missing; fetch its file again")
        shard, original = self.tensors[name]
        found, dtype = shard.tensors[original]
        if name in self.unpacked:
            due, block = torch.float8_e4m3fn, self.unpacked[name]
            self.check(name + SCALE, tuple(-(-n // block) for n in shape))
        if dtype not in (PLAIN_DTYPES if due in (None, *PLAIN_DTYPES) else (due,)):
            what = f"{shard.path}: {original} has dtype {str(dtype).removeprefix('torch.')}"
            if due == torch.float8_e4m3fn:
                raise ValueError(f"{what} beside others in fp8, of which one weight is made; fetch its file again")
            if due == torch.uint8:
                raise ValueError(f"{what} where uint8 belongs; fetch its file again")
            raise ValueError(
                f"{what}; only bf16, fp16 and fp32 are converted, and fp8 and mxfp4 where the config says so"
            )
        if found != shape:
            raise ValueError(f"{shard.path}: {original} has shape {list(found)} where config.json says {list(shape)}")


def plan(args: ModelArgs, sources: Sources, published: str | None = None) -> tuple[dict[str, dict[str, Recipe]], dict]:
    """The recipes by file, and the modules that stay in the published format, as a checkpoint's "format" has them.

    ValueError unless every tensor that the recipes need is there as they need it, and no other.
    """
    files, used, modules = {}, set(), {}

    def add(file: str, recipes: dict[str, Recipe]):
        files[file] = {}
        for ours, recipe in recipes.items():
            blocks = published and FORMATS[published].blocks and sources.in_fp8(recipe)
            if blocks and ours.endswith(UNPACKED):
                sources.unpacked |= dict.fromkeys(recipe.parts, FORMATS[published].group)
                used.update(name + SCALE for name in recipe.parts)
            blocks = blocks and ours.endswith(PACKABLE)
            files[file] |= block_recipes(ours, recipe, published, sources.original) if blocks else {ours: recipe}
        for ours, recipe in files[file].items():
            if ours.endswith(".codes"):
                spec = {"format": published, "group_size": FORMATS[published].group}
                modules[ours.removesuffix(".codes")] = spec
            for name, place in recipe.parts.items():
                sources.check(name, part_shape(recipe.shape, place), recipe.dtype)
            used.update(recipe.parts)

    for layer in range(args.n_layer):
        fused = f"model.layers.{layer}.mlp.experts.gate_up_proj" in sources.tensors
        add(f"layer_{layer:02d}.safetensors", layer_recipes(args, layer, fused, published == "mxfp4"))
    add("rest.safetensors", rest_recipes(args))
    if extra := sorted(sources.tensors.keys() - used):
        shard, original = sources.tensors[extra[0]]
        raise ValueError(f"{shard.path}: {original} (of {len(extra)}) has no place in the model of config.json")
    return files, modules


def assemble(recipe: Recipe, sources: Sources, dtype: torch.dtype) -> Tensor:
    """The tensor of ours, in `dtype` unless it has one, checked to be finite. Only what is changed takes memory."""
    dtype, tensor = recipe.dtype or dtype, None
    for name, place in recipe.parts.items():
        if place == WHOLE:
            tensor = part = sources.read(name).to(dtype)
        else:
            tensor = torch.empty(recipe.shape, dtype=dtype) if tensor is None else tensor
            part = tensor[place].copy_(sources.read(name))
        if not recipe.finite(part):
            if part.dtype in PLAIN_DTYPES and is_finite(sources.read(name)):
                raise ValueError(f"{sources.original(name)} overflows {NAMES[dtype]}; convert with --dtype bf16")
            raise ValueError(
                f"{sources.original(name.removesuffix(SCALE))} holds NaN or infinity; fetch its file again"
            )
    return recipe.make(tensor) if recipe.make else tensor


def settle_tie(args: ModelArgs, sources: Sources) -> ModelArgs:
    """For a config that ties the embeddings, and files with a head: dropped if it is the same, else nothing is tied."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    for name in (head, embedding):
        sources.check(name, (args.vocab_size, args.dim))
    a, b = sources.read(head), sources.read(embedding)
    if a.dtype != b.dtype or not torch.equal(a, b):
        return dataclasses.replace(args, tied_embeddings=False)  # as transformers has it
    del sources.tensors[head]
    return args


def generation_config(directory: Path, config: dict) -> dict:
    """generation_config.json, completed by the token ids that stand only in `config`: no stop id may be lost."""
    path = directory / "generation_config.json"
    given = read_json(path) if path.is_file() else {}
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None}
    return ids | {key: value for key, value in given.items() if value is not None}


def convert(
    checkpoint_dir: Path | str,
    output_dir: Path | str | None = None,
    dtype: str = "bf16",
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Converts a Hugging Face directory, and returns the new one: `output_dir`, or `checkpoint_dir/model_<dtype>`.

    What is published in a number format that we have keeps it, and gives the directory its name; dtype is of the rest.
    Raises ValueError, with one line and nothing left behind, for anything missing, damaged or not supported.
    """
    directory = Path(checkpoint_dir)
    if dtype not in ("bf16", "fp16", "fp32"):
        raise ValueError(f"dtype {dtype!r} is not one of bf16, fp16, fp32")
    if directory.is_file():
        what = "GGUF is quantised already" if directory.suffix == ".gguf" else "it is a file"
        raise ValueError(f"{directory}: {what}; give the directory of a Hugging Face checkpoint")
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory; fetch the model first: {DOWNLOAD}")
    if is_checkpoint(directory):
        raise ValueError(f"{directory} is converted already; use it: python generate.py --checkpoint_path {directory}")
    weight_files(directory)  # a directory without safetensors is told so, whatever else it lacks
    config = read_json(directory / "config.json")
    args, published, family = args_from_hf(config), published_format(config), family_of(config)
    config = family.defaults | config
    sources = Sources(directory, family.renames)
    sources.drop_layers(args.n_layer, config.get("num_nextn_predict_layers") or 0)
    if args.tied_embeddings and "lm_head.weight" in sources.tensors:
        args = settle_tie(args, sources)
    files, modules = plan(args, sources, published)
    format = {"name": published, "dtype": dtype, "modules": modules} if modules else {"name": dtype}
    output = Path(output_dir) if output_dir else directory / f"model_{format['name']}"
    torch_dtype = DTYPES[dtype][0]
    needed = sum(
        math.prod(recipe.shape) * (recipe.dtype or torch_dtype).itemsize
        for recipes in files.values()
        for recipe in recipes.values()
    )
    with Writer(output, dataclasses.asdict(args), format, force) as writer:
        writer.reserve(needed)
        for file, recipes in tqdm(files.items(), desc="convert", unit="layer", file=sys.stderr, disable=not progress):
            writer.write(file, {ours: assemble(recipe, sources, torch_dtype) for ours, recipe in recipes.items()})
        for path in (directory / name for name in SIDE_FILES):
            if path.is_file():
                writer.copy(path)
        writer.write_json("generation_config.json", generation_config(directory, config))
    return output


def build_parser() -> Parser:
    parser = Parser(
        "Convert a Hugging Face checkpoint for generate.py.",
        (
            "python convert_hf_checkpoint.py --checkpoint_dir checkpoints/OWNER/NAME",
            "python convert_hf_checkpoint.py --checkpoint_dir HF_DIR --dtype fp32 --output_dir DIR --force",
        ),
    )
    parser.add_argument("--checkpoint_dir", type=Path, required=True, help="config.json and *.safetensors are in it")
    parser.add_argument(
        "--output_dir", type=Path, help="default: model_<dtype, or format as published> in the checkpoint_dir"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    return parser


def main() -> int:
    """The command: see the top of this file."""
    options = build_parser().parse_args()
    start = time.perf_counter()
    try:
        output = convert(options.checkpoint_dir, options.output_dir, options.dtype, options.force)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in output.glob("*.safetensors")) / 1e9
    print(f"{size:.2f} GB in {seconds:.1f} s, {size / seconds:.2f} GB/s", file=sys.stderr)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
