"""Shapes of published models, and models at them with random weights made on the device: no checkpoint is needed."""

import dataclasses
import gc
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from args import ModelArgs, Yarn
from families import args_from_hf
from model import Transformer
from packing import FORMATS, PLAIN
from quantize import DTYPES, of_mode, pack_weight, plan

GPT_OSS_20B = ModelArgs(
    dim=2880, n_layer=24, n_head=64, n_kv_head=8, head_dim=64, intermediate=2880, n_expert=32, n_active=4,
    vocab_size=201088, max_position=131072, rope_theta=1.5e5, attention_bias=True, sliding_window=128,
    full_layers=tuple(range(1, 24, 2)), attention_sinks=True, router_bias=True, expert_bias=True, swiglu_limit=7.0,
    yarn=Yarn(32.0, 4096, truncate=False, attention=0.1 * math.log(32) + 1),
)  # fmt: skip
ARCHITECTURES = {
    "Mixtral-8x7B": ModelArgs(
        dim=4096, n_layer=32, n_head=32, n_kv_head=8, head_dim=128, intermediate=14336, n_expert=8, n_active=2,
        vocab_size=32000, max_position=32768, rope_theta=1e6,
    ),
    "Mixtral-8x22B": ModelArgs(
        dim=6144, n_layer=56, n_head=48, n_kv_head=8, head_dim=128, intermediate=16384, n_expert=8, n_active=2,
        vocab_size=32768, max_position=65536, rope_theta=1e6,
    ),
    "Qwen3-30B-A3B": ModelArgs(
        dim=2048, n_layer=48, n_head=32, n_kv_head=4, head_dim=128, intermediate=768, n_expert=128, n_active=8,
        vocab_size=151936, max_position=40960, rope_theta=1e6, norm_eps=1e-6, qk_norm="head",
    ),
    "OLMoE-1B-7B": ModelArgs(
        dim=2048, n_layer=16, n_head=16, n_kv_head=16, head_dim=128, intermediate=1024, n_expert=64, n_active=8,
        vocab_size=50304, max_position=4096, norm_topk=False, qk_norm="full",
    ),
    "Qwen1.5-MoE-A2.7B": ModelArgs(
        dim=2048, n_layer=24, n_head=16, n_kv_head=16, head_dim=128, intermediate=1408, n_expert=60, n_active=4,
        vocab_size=151936, max_position=8192, rope_theta=1e6, norm_eps=1e-6, norm_topk=False, qkv_bias=True,
        shared_intermediate=5632,
    ),
    "Granite-3.1-3b-a800m": ModelArgs(
        dim=1536, n_layer=32, n_head=24, n_kv_head=8, head_dim=64, intermediate=512, n_expert=40, n_active=8,
        vocab_size=49155, max_position=131072, rope_theta=1e7, norm_eps=1e-6, tied_embeddings=True,
        attention_scale=0.015625, embedding_scale=12.0, residual_scale=0.22, logit_scale=1 / 6,
    ),
    "Phi-3.5-MoE": ModelArgs(  # the factors of its rope change no time
        dim=4096, n_layer=32, n_head=32, n_kv_head=8, head_dim=128, intermediate=6400, n_expert=16, n_active=2,
        vocab_size=32064, max_position=4096, attention_bias=True, sliding_window=131072, layer_norm=True,
        head_bias=True, norm_topk=False, mixer_eps=0.01, rope_factors=(1.0,) * 64, rope_scale=1.243163121016122,
    ),
    "GLM-4.5-Air": ModelArgs(
        dim=4096, n_layer=46, n_head=96, n_kv_head=8, head_dim=128, intermediate=1408, n_expert=128, n_active=8,
        vocab_size=151552, max_position=131072, rope_theta=1e6, qkv_bias=True, dense_layers=(0,),
        dense_intermediate=10944, shared_intermediate=1408, shared_gated=False, scoring="sigmoid", rotary_dim=64,
    ),
    "DeepSeek-V2-Lite": ModelArgs(
        dim=2048, n_layer=27, n_head=16, n_kv_head=1, head_dim=192, intermediate=1408, n_expert=64, n_active=6,
        vocab_size=102400, max_position=163840, norm_eps=1e-6, norm_topk=False, dense_layers=(0,),
        dense_intermediate=10944, shared_intermediate=2816, shared_gated=False, rotary_dim=64,
        attention_scale=192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, yarn=Yarn(40.0, 4096), kv_rank=512, value_dim=128,
    ),
    "DeepSeek-V3": ModelArgs(
        dim=7168, n_layer=61, n_head=128, n_kv_head=1, head_dim=192, intermediate=2048, n_expert=256, n_active=8,
        vocab_size=129280, max_position=163840, norm_eps=1e-6, dense_layers=(0, 1, 2), dense_intermediate=18432,
        shared_intermediate=2048, shared_gated=False, scoring="sigmoid", routed_scale=2.5, rotary_dim=64,
        attention_scale=192**-0.5 * (0.1 * math.log(40) + 1) ** 2, yarn=Yarn(40.0, 4096), n_group=8, n_active_group=4,
        kv_rank=512, q_rank=1536, value_dim=128,
    ),
    "TinyMistral-6x248M": ModelArgs(
        dim=1024, n_layer=12, n_head=32, n_kv_head=8, head_dim=32, intermediate=4096, n_expert=6, n_active=2,
        vocab_size=32005, max_position=32768, norm_eps=1e-6,
    ),
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": dataclasses.replace(
        GPT_OSS_20B, n_layer=36, n_expert=128, full_layers=tuple(range(1, 36, 2))
    ),
}  # fmt: skip


def architecture(name: str) -> ModelArgs:
    """A name in ARCHITECTURES, or a Hugging Face config.json. Raises ValueError for anything else."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if not Path(name).is_file():
        raise ValueError(f"--arch {name}: neither a config.json nor one of {', '.join(ARCHITECTURES)}")
    try:
        return args_from_hf(json.loads(Path(name).read_text()))
    except json.JSONDecodeError as error:
        raise ValueError(f"--arch {name}: not valid JSON ({error})") from None


def first_layers(args: ModelArgs, count: int) -> ModelArgs:
    """The args of the model's first layers alone."""
    named = {name: tuple(n for n in getattr(args, name) if n < count) for name in ("dense_layers", "full_layers")}
    return dataclasses.replace(args, n_layer=count, **named)


class RandomWeights:
    """A source for `load_model` that makes every tensor on the device: normal, scaled to keep activations near one.

    format: a checkpoint's, as `quantize.plan` makes it; the weights are then packed as a checkpoint's would be (but
    rounded to nearest in the half-quadratic formats, which take as long to multiply with).
    """

    def __init__(self, args: ModelArgs, format: dict | None = None, seed: int = 0):
        self.args, self.format, self.seed = dataclasses.asdict(args), format or {"name": "bf16"}, seed
        self.dtype = DTYPES[self.format.get("dtype", self.format["name"])]
        with torch.device("meta"):
            self.shapes = {name: parameter.shape for name, parameter in Transformer(args).named_parameters()}
        self.packed: tuple[str, dict[str, Tensor]] = "", {}  # the module packed last, whose parts are read one by one
        self.made: tuple[str, Tensor | None] = "", None  # the tensor made last, which may be read in several slices

    def read(self, name: str, index: tuple[slice, ...] | None = None, device: torch.device | str = "cpu") -> Tensor:
        """The tensor of that name, or its part `index`, the same for the same seed and device.

        A part is cut from the whole tensor, so that all ranks together have the model that one would have.
        """
        whole = self._whole(name, device)
        return whole if index is None else whole[index].clone()

    def _whole(self, name: str, device: torch.device | str) -> Tensor:
        path, leaf = name.rsplit(".", 1)
        spec = self.format.get("modules", {}).get(path)
        if spec is None or leaf == "bias":
            if self.made[0] != name:
                self.made = "", None  # not two at once
                self.made = name, self._plain(name, device)
            return self.made[1]
        if self.packed[0] != path:
            whole = f"{path}.weight" if f"{path}.weight" in self.shapes else "embedding.weight"  # of a tied head
            self.packed = path, pack_weight(self._plain(whole, device), spec, torch.device(device), iterations=0)
        return self.packed[1][leaf]

    def _plain(self, name: str, device: torch.device | str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=self.dtype, device=device)
        generator = torch.Generator(device).manual_seed(self.seed + list(self.shapes).index(name))
        scale = 1.0 if name == "embedding.weight" else shape[-1] ** -0.5
        return torch.empty(shape, dtype=self.dtype, device=device).normal_(0, scale, generator=generator)


def number_format(mode: str, args: ModelArgs) -> dict:
    """--mode -> a checkpoint's "format": a dtype, a row of FORMATS, or ATTENTION-EXPERTS, such as hqq4-hqq2."""
    if mode in DTYPES:
        return {"name": mode}
    attention, _, experts = mode.partition("-")
    if not {attention, experts or attention} <= {PLAIN, *FORMATS}:
        raise ValueError(f"--mode {mode}: it must be one of {', '.join((*DTYPES, *FORMATS))}, or ATTENTION-EXPERTS")
    return plan(args, *((attention, experts) if experts else of_mode(mode)))


def random_prompt(args: ModelArgs, length: int, seed: int = 0) -> list[int]:
    """So many token ids, the same in every run."""
    return torch.randint(args.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def free(compiled: bool) -> None:
    """Give back the memory of models that are no longer used."""
    if compiled:
        torch.compiler.reset()
    gc.collect()  # a session and its steps refer to each other, and hold the model
    torch.cuda.empty_cache()  # nothing where there is no GPU
