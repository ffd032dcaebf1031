"""Speed of converting a published checkpoint, beside `cp` of the same files on the same disk.

    python benchmarks/conversion.py --arch Qwen3.6-35B-A3B --layers 2 --repeats 3

Writes a model's first layers with random weights as they are published, each expert in tensors of
its own. Then copies and converts them in turn. Both are counted until the files have reached the
disk. Prints one JSON object: GB/s of what is read, and the conversion's anonymous memory.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.load_checkpoint import Peak
from cli.parser import Parser
from host.staging import flush_to_disk
from models import args_from_hf, family_of_config
from models.converter import convert
from models.family import PublishedLayout
from models.published_recipes import place_shape
from models.tensors import Recipes

CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "hub_configs.json"
SAMPLE = 1 << 25  # random numbers, which all tensors are parts of


def short_config(arch: str, layers: int, vocab: int) -> dict:
    """Return a published config.json with fewer layers and tokens."""
    config = json.loads(CONFIGS.read_text())[arch]
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": layers, "vocab_size": vocab}
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    for part in (config, text):
        for key in [key for key in part if key.endswith("token_id")]:
            del part[key]
    return config


def published_tensors(recipes: Recipes, sample: Tensor) -> dict[str, Tensor]:
    """Return the sources of recipes, random."""
    tensors = {}
    for recipe in recipes.values():
        for name, place in recipe.sources.items():
            shape = place_shape(recipe.shape, place)
            count = torch.Size(shape).numel()
            whole = sample.repeat(-(-count // len(sample))) if count > len(sample) else sample
            tensors[name] = whole[:count].view(shape)
    return tensors


def write_published(config: dict, folder: Path) -> None:
    """Write a published checkpoint: a file a layer, and one of the rest."""
    family, args = family_of_config(config), args_from_hf(config)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    layout = PublishedLayout(fused=False, packed=False)
    tables = [family.layer_recipes(args, layer, layout) for layer in range(args.n_layer)]
    tables.append(family.rest_recipes(args))
    sample = torch.randn(SAMPLE).bfloat16()
    for number, recipes in enumerate(tables, 1):
        path = folder / f"model-{number:05d}-of-{len(tables):05d}.safetensors"
        save_file({n: t.clone() for n, t in published_tensors(recipes, sample).items()}, path)
        flush_to_disk(path)


def timed(run: Callable[[Path], object], target: Path) -> float:
    """Return the seconds that `run` takes to write a directory; remove it."""
    start = time.perf_counter()
    run(target)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def copy_to_disk(source: Path, target: Path) -> None:
    """Do what `cp -r` does; wait until the files have reached the disk."""
    shutil.copytree(source, target)
    for path in target.iterdir():
        flush_to_disk(path)


def drop_from_cache(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measure(source: Path, folder: Path, repeats: int, cold: bool) -> dict:
    """Copy and convert in turn."""
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    runs: dict[str, list[float]] = {"cp": [], "convert": []}
    memory = []
    for _ in range(repeats):
        for name, seconds in runs.items():
            if cold:
                drop_from_cache(source)
            with Peak() as peak:
                if name == "cp":
                    took = timed(lambda target: copy_to_disk(source, target), folder / "copy")
                else:
                    took = timed(
                        lambda target: convert(source, target, progress=False), folder / "made"
                    )
                    memory.append(peak.bytes)
            seconds.append(took)
    speeds = {name: [round(size / s / 1e9, 3) for s in seconds] for name, seconds in runs.items()}
    ratios = [round(a / b, 2) for a, b in zip(speeds["convert"], speeds["cp"], strict=True)]
    return {"bytes": size, **speeds, "convert_over_cp": ratios, "anonymous_bytes": max(memory)}


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/conversion.py --arch Qwen3.6-35B-A3B --layers 2 --repeats 3",
            "python benchmarks/conversion.py --arch Mixtral-8x7B --layers 1",
        ),
    )
    parser.add_argument("--arch", default="Qwen3.6-35B-A3B")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the source from the page cache")
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    return parser


def main() -> None:
    options = build_parser().parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "published"
        write_published(short_config(options.arch, options.layers, options.vocab), source)
        result = measure(source, Path(folder), options.repeats, options.cold)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
