"""`benchmark.py --peer hf`: Hugging Face transformers with random weights, its best setting."""

import argparse
import itertools
import logging
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor

from cli.command import first_line
from cli.log import log_to_stderr
from formats.quantizer import DTYPES
from model import ModelArgs
from models import build_model, family_of
from models.config import nested_text_config
from models.random_weights import free_memory, published_config, random_prompt
from parallel.device import pick_device
from runtime.sampling import Sampling
from runtime.weights import bytes_per_token, peak_bytes

log = logging.getLogger("moe_fast")

# (cache, experts implementation)
SETTINGS = tuple(itertools.product(("static", "dynamic"), ("batched_mm", "grouped_mm", "eager")))


def hf_config(config: dict, args: ModelArgs):
    """Return transformers' config of the first layers of a config.json's model.

    args: of these layers. Raises ValueError if transformers' model differs.
    """
    from transformers import AutoConfig

    family = family_of(args)
    given = nested_text_config(config) | {"model_type": family.name}
    given.pop("quantization_config", None)
    whole, count = AutoConfig.for_model(**given), family.published_layers(args)
    given["num_hidden_layers"] = count
    for name, value in vars(whole).items():  # layer_types, also if the class has made it
        if isinstance(value, list) and len(value) == whole.num_hidden_layers:
            given[name] = value[:count]
    found = AutoConfig.for_model(**given)
    if family.from_hf(found.to_dict()) != args:
        raise ValueError(
            f"--peer hf: transformers' {family.name} cannot have these args: leave --peer out"
        )
    return found


def hf_model(config: dict, args: ModelArgs, dtype: torch.dtype, device: torch.device | str):
    """Return transformers' model. Raises ValueError if there is none.

    config, args: as for `hf_config`.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ValueError(
            "--peer hf needs transformers: pip install 'transformers>=5.0,<6'"
        ) from None
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(hf_config(config, args), dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # no answer is short; n-grams' hashes need one
    with torch.device("meta"):
        models = build_model(args), model
    # Transformers has most score_biases and Gemma 4's scalar as buffers; Flint's router has none.
    # Our router includes its scale.
    apart = "score_bias", "score_correction_bias", "expert_bias", ".scalar", "router.scale"
    ours, theirs = (
        sum(p.numel() for name, p in m.named_parameters() if not name.endswith(apart))
        for m in models
    )
    if ours != theirs:
        raise ValueError(
            f"--peer hf: its model has {theirs:,} weights where ours has {ours:,}: leave --peer out"
        )
    return model


class Clock(list):
    """A streamer for `generate`: the times at which the host has each token, the prompt's first."""

    def put(self, tokens: Tensor) -> None:
        self.append(time.perf_counter())

    def end(self) -> None: ...


def measure_setting(model, prompt: Tensor, setting: tuple[str, str], new_tokens: int) -> dict:
    """Return tok_s and ttft_s of the second of two answers.

    A static cache serves both, since a new one could be compiled for anew.
    """
    import transformers

    kind, experts = setting
    options = {
        "do_sample": True,
        "temperature": Sampling.temperature,
        "top_k": Sampling.top_k,
        "eos_token_id": None,
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": new_tokens,
    }
    model.set_experts_implementation(experts)
    cache = None
    if kind == "static":
        length = prompt.shape[1] + new_tokens
        cache = transformers.StaticCache(model.config, max_cache_len=length)
    for _ in range(2):
        if cache is not None:
            cache.reset()
        clock, start = Clock(), time.perf_counter()
        model.generate(prompt, past_key_values=cache, streamer=clock, **options)
    rate = (new_tokens - 1) / (clock[new_tokens] - clock[1])
    return {"tok_s": rate, "ttft_s": clock[1] - start}


def measure_peer(args: ModelArgs, options: argparse.Namespace) -> dict:
    """Measure transformers in each of SETTINGS; the figures are those of the fastest.

    Prompt, sampling and reading of every token are those of benchmark.py; bf16 if the mode is no
    dtype. A setting that fails is left out with a warning. Raises ValueError if all do.
    """
    import transformers

    device = pick_device(options.device)
    dtype = options.mode if options.mode in DTYPES else "bf16"
    config, found = published_config(options.arch), {}
    model = hf_model(config, args, DTYPES[dtype], device)
    transformers.logging.set_verbosity_error()
    prompt = torch.tensor([random_prompt(args, options.prompt_len)], device=device)
    for kind, experts in SETTINGS:
        compiled = kind == "static" and device.type == "cuda"  # by `generate` itself
        setting = f"{kind} cache, {'compiled, ' * compiled}{experts} experts"
        free_memory(compiled)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            row = measure_setting(model, prompt, (kind, experts), options.new_tokens)
        except Exception as error:  # whatever it is, the next setting may run
            log.warning(f"warning: --peer hf: {setting} fails: {first_line(error)}: left out")
            continue
        # A process starts with its parent's peak, so a CPU has no figure.
        row["peak_bytes"] = peak_bytes(device) if device.type == "cuda" else None
        found[setting] = row
        log.info(f"transformers, {setting}: {row['tok_s']:.1f} tokens/s")
    if not found:
        raise ValueError("not one of its settings runs")
    best = max(found, key=lambda setting: found[setting]["tok_s"])
    return {
        "name": f"transformers {transformers.__version__}",
        "dtype": dtype,
        "bytes_per_token": bytes_per_token(build_model(args).to(DTYPES[dtype])),
        "setting": best,
        **found[best],
        "settings": {setting: row["tok_s"] for setting, row in found.items()},
    }


def peer(args: ModelArgs, options: argparse.Namespace) -> dict | None:
    """`measure_peer` in its own process: PyTorch's own compiler settings, and all of the memory.

    None after a warning if it fails, so that our own figures are not lost.
    """
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), log_to_stderr) as pool:
            return pool.submit(measure_peer, args, options).result()
    except Exception as error:
        log.warning(f"warning: --peer hf: {first_line(error)}: no peer in this result")
        return None
