"""Models at published shapes with random weights made on the device: no checkpoint is needed."""

import dataclasses
import gc
import json
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor

from formats import FORMATS, PLAIN
from formats.base import Parts
from formats.quantizer import DTYPES, formats_of_mode, pack_weight, plan_format, scale_dtype
from model import ModelArgs
from models import ARCHITECTURES, CONFIGS, args_from_hf, build_model

SHARED = ".ffn.shared."  # Paths of shared experts' modules have it.
# A table of n-grams has 320 million rows, which would take minutes to make: rows repeat.
DISTINCT_ROWS = 1 << 20


def architecture(name: str) -> ModelArgs:
    """Return the args of `published_config`. Raises ValueError as that does."""
    return ARCHITECTURES.get(name) or args_from_hf(published_config(name))


def published_config(name: str) -> dict:
    """Return the config.json of a name in CONFIGS, or of a file.

    Raises ValueError for anything else.
    """
    if name in CONFIGS:
        return CONFIGS[name]
    if not Path(name).is_file():
        near = ", ".join(get_close_matches(name, CONFIGS, n=4, cutoff=0))
        why = "neither a config.json nor one of the names that `shapes` in models/*.py have"
        raise ValueError(f"--arch {name}: {why}. The nearest: {near}")
    try:
        config = json.loads(Path(name).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--arch {name}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"--arch {name}: it holds no JSON object; give a model's config.json")
    return config


def first_layers(args: ModelArgs, count: int) -> ModelArgs:
    """Return the args of the model's first layers alone."""
    layer_lists = {
        name: tuple(layer for layer in value if layer < count)
        for name, value in vars(args).items()
        if name.endswith("_layers")
    }
    if heads := getattr(args, "layer_heads", ()):
        layer_lists |= {"layer_heads": heads[:count], "n_head": max(heads[:count])}
    return dataclasses.replace(args, n_layer=count, **layer_lists)


class RandomWeights:
    """A source for `load_model`: every tensor normal, scaled to keep activations near one.

    format: a checkpoint's, as `plan_format` makes it; the weights are then packed as a
    checkpoint's would be (but rounded to nearest in the half-quadratic formats, which take as
    long to multiply with).
    """

    def __init__(self, args: ModelArgs, format: dict | None = None, seed: int = 0):
        self.args, self.seed = dataclasses.asdict(args), seed
        self.format = format or {"name": "bf16"}
        self.dtype = DTYPES[self.format.get("dtype", self.format["name"])]
        named = build_model(args).named_parameters()
        self.shapes = {name: parameter.shape for name, parameter in named}
        # The tensor made last, or all parts of the module packed last: it may be read in slices.
        self.made: tuple[str, dict[str, Tensor]] = "", {}

    def read(
        self,
        name: str,
        index: tuple[slice, ...] | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Return the tensor of that name, or its part `index`: the same for one seed and device.

        A part is cut from the whole tensor, so that all ranks together have one rank's model.
        """
        whole = self.whole(name, device)
        return whole if index is None else whole[index].clone()

    def whole(self, name: str, device: torch.device | str) -> Tensor:
        """Return the tensor of that name; keep it, with the other parts of a packed module."""
        path, leaf = name.rsplit(".", 1)
        spec = None if leaf == "bias" else self.format.get("modules", {}).get(path)
        key = path if spec else name
        if self.made[0] != key:
            self.made = "", {}  # not two at once
            packed = self.pack(path, spec, device) if spec else None
            self.made = key, packed or {leaf: self.plain(name, device)}
        return self.made[1][leaf]

    def pack(self, path: str, spec: dict, device: torch.device | str) -> Parts:
        """Make the parts of a packed module, rounded to nearest."""
        weight = f"{path}.weight"
        source = weight if weight in self.shapes else "embedding.weight"  # a tied head
        parts = pack_weight(self.distinct(source, device), spec, torch.device(device), iterations=0)
        shape, format = self.shapes[source], FORMATS[spec["format"]]
        layout = format.layout(shape, spec["group_size"], scale_dtype(spec))
        return {name: repeat_rows(part, layout[name][0][-2]) for name, part in parts.items()}

    def plain(self, name: str, device: torch.device | str) -> Tensor:
        """Make an unpacked tensor: norms are one, biases zero."""
        tensor, shape = self.distinct(name, device), self.shapes[name]
        return repeat_rows(tensor, shape[-2]) if len(shape) > 1 else tensor

    def distinct(self, name: str, device: torch.device | str) -> Tensor:
        """Make the first DISTINCT_ROWS rows of an unpacked tensor."""
        shape = self.shapes[name]
        if len(shape) == 1:
            fill = torch.zeros if name.endswith("bias") else torch.ones
            return fill(shape, dtype=self.dtype, device=device)
        seed = self.seed + list(self.shapes).index(name)
        generator = torch.Generator(device).manual_seed(seed)
        scale = 1.0 if name == "embedding.weight" else shape[-1] ** -0.5
        shape = *shape[:-2], min(shape[-2], DISTINCT_ROWS), shape[-1]
        tensor = torch.empty(shape, dtype=self.dtype, device=device)
        return tensor.normal_(0, scale, generator=generator)


def repeat_rows(tensor: Tensor, rows: int) -> Tensor:
    """Repeat the rows of a tensor [..., n, N] until there are `rows`."""
    have = tensor.shape[-2]
    if have == rows:
        return tensor
    return tensor.index_select(-2, torch.arange(rows, device=tensor.device) % have)


def number_format(mode: str, args: ModelArgs) -> dict:
    """Return a checkpoint's "format" for a --mode: a dtype, a format, or ATTENTION-EXPERTS.

    MODE+SHARED has shared experts as the mode SHARED has them. Raises ValueError for another one.
    """
    main, _, shared = mode.partition("+")
    if shared:
        format, own = number_format(main, args), number_format(shared, args).get("modules", {})
        others = format.get("modules", {})
        modules = {path: others[path] for path in others if SHARED not in path}
        modules |= {path: own[path] for path in own if SHARED in path}
        return format | {"modules": modules}
    if mode in DTYPES:
        return {"name": mode}
    attention, _, experts = mode.partition("-")
    if not {attention, experts or attention} <= {PLAIN, *FORMATS}:
        known = ", ".join((*DTYPES, *FORMATS))
        raise ValueError(f"--mode {mode}: it must be one of {known}, or ATTENTION-EXPERTS")
    names = (attention, experts) if experts else formats_of_mode(mode)
    return plan_format(build_model(args), *names)


def random_prompt(args: ModelArgs, length: int, seed: int = 0) -> list[int]:
    """Return `length` token ids, the same in every run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(args.vocab_size, (length,), generator=generator).tolist()


def free_memory(compiled: bool) -> None:
    """Give back the memory of models that are no longer used."""
    if compiled:
        torch.compiler.reset()
    gc.collect()  # a session and its steps refer to each other, and hold the model
    torch.cuda.empty_cache()  # nothing without a GPU
