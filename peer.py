"""Hugging Face transformers at a model's shapes, with random weights, in the best of its settings: a peer to measure.

benchmark.py's `--peer hf`; transformers is imported only then.
"""

import argparse
import itertools
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor

import world
from answer import peak_bytes
from args import ModelArgs
from checkpoint import pick_device
from families import args_from_hf
from model import Transformer
from quantize import DTYPES
from session import Sampling
from shapes import free, random_prompt

PEER_TYPES = {"none": "mixtral", "head": "qwen3_moe", "full": "olmoe"}  # transformers' model_type for each qk_norm
PEER_SETTINGS = tuple(itertools.product(("static", "dynamic"), ("batched_mm", "grouped_mm", "eager")))  # cache, experts


def hf_config(args: ModelArgs) -> dict:
    """The config.json of a model with these args: the inverse of `args_from_hf`. ValueError where no model has them."""
    kind = "qwen2_moe" if args.shared_intermediate else PEER_TYPES[args.qk_norm]
    kind = "granitemoe" if args.attention_scale else "phimoe" if args.layer_norm else kind
    kind = "glm4_moe" if args.scoring == "sigmoid" else "gpt_oss" if args.attention_sinks else kind
    kind = {"sigmoid": "deepseek_v3", "softmax": "deepseek_v2"}[args.scoring] if args.kv_rank else kind
    config = {
        "model_type": kind, "vocab_size": args.vocab_size, "hidden_size": args.dim, "num_hidden_layers": args.n_layer,
        "num_attention_heads": args.n_head, "num_key_value_heads": args.n_kv_head, "head_dim": args.head_dim,
        "intermediate_size": args.dense_intermediate or args.intermediate, "moe_intermediate_size": args.intermediate,
        "num_local_experts" if kind in ("mixtral", "gpt_oss") else "num_experts": args.n_expert,
        "clip_qkv": args.clip_qkv,
        "num_experts_per_tok": args.n_active, "norm_topk_prob": args.norm_topk, "rms_norm_eps": args.norm_eps,
        "max_position_embeddings": args.max_position, "attention_bias": args.attention_bias,
        "qkv_bias": args.qkv_bias, "shared_expert_intermediate_size": args.shared_intermediate,
        "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta},
        "tie_word_embeddings": args.tied_embeddings, "mlp_only_layers": list(args.dense_layers),
        "use_sliding_window": args.sliding_window is not None, "sliding_window": args.sliding_window,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if kind in ("granitemoe", "phimoe", "glm4_moe", "deepseek_v2", "deepseek_v3"):
        for name in ("num_experts", "qkv_bias", "shared_expert_intermediate_size", "mlp_only_layers"):
            del config[name]
    rope = config["rope_parameters"]
    if kind == "granitemoe":
        config |= {
            "num_local_experts": args.n_expert, "attention_multiplier": args.attention_scale,
            "embedding_multiplier": args.embedding_scale, "residual_multiplier": args.residual_scale,
            "logits_scaling": 1 / args.logit_scale,
        }  # fmt: skip
    if kind == "phimoe":
        config |= {"num_local_experts": args.n_expert, "lm_head_bias": args.head_bias}
        config |= {"router_jitter_noise": args.mixer_eps}
    if args.rope_factors:
        factors, scale = list(args.rope_factors), args.rope_scale
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": args.max_position}
        rope |= {"short_factor": factors, "long_factor": factors, "short_mscale": scale, "long_mscale": scale}
    if kind == "glm4_moe" or args.kv_rank:
        config |= {
            "n_routed_experts": args.n_expert, "n_shared_experts": args.shared_intermediate // args.intermediate,
            "first_k_dense_replace": len(args.dense_layers), "routed_scaling_factor": args.routed_scale,
            "num_nextn_predict_layers": 0,
        }  # fmt: skip
    if kind == "glm4_moe":
        rope["partial_rotary_factor"] = (args.rotary_dim or args.head_dim) / args.head_dim
        config |= {"attention_bias": args.qkv_bias, "use_qk_norm": args.qk_norm == "head"}
    if args.kv_rank:
        config |= {
            "num_key_value_heads": args.n_head, "n_group": args.n_group, "topk_group": args.n_active_group,
            "kv_lora_rank": args.kv_rank, "q_lora_rank": args.q_rank,
            "qk_nope_head_dim": args.head_dim - args.rotary_dim, "qk_rope_head_dim": args.rotary_dim,
            "v_head_dim": args.value_dim, "head_dim": args.rotary_dim,
        }  # fmt: skip
        if kind == "deepseek_v2":
            config["topk_method"] = "greedy" if args.n_group == 1 else "group_limited_greedy"
    if kind == "gpt_oss":
        kinds = ["sliding_attention" if args.window(layer) else "full_attention" for layer in range(args.n_layer)]
        config |= {"layer_types": kinds, "swiglu_limit": args.swiglu_limit, "swiglu_alpha": args.swiglu_alpha}
    if yarn := args.yarn:
        rope |= {
            "rope_type": "yarn", "factor": yarn.factor, "original_max_position_embeddings": yarn.original,
            "beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow, "truncate": yarn.truncate,
            "attention_factor": yarn.attention,
        }  # fmt: skip
    if args.kv_rank and args.yarn and args.attention_scale:  # what its mscale_all_dim was
        magnitude = (args.attention_scale * args.head_dim**0.5) ** 0.5
        rope["mscale_all_dim"] = round((magnitude - 1) / (0.1 * math.log(args.yarn.factor)), 6)
    if args_from_hf(config) != args:
        raise ValueError(f"--peer hf: transformers' {kind} cannot have these args: leave --peer out")
    return config


def hf_model(args: ModelArgs, dtype: torch.dtype, device: torch.device | str):
    """transformers' model of these args, its weights begun anew on the device. ValueError where there is none."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError("--peer hf needs transformers: pip install 'transformers>=5.0,<6'") from None
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config(args)), dtype=dtype).eval()
    with torch.device("meta"):
        models = Transformer(args), model
    ours, theirs = (  # a bias of scores is none of transformers' parameters
        sum(parameter.numel() for name, parameter in m.named_parameters() if not name.endswith("score_bias"))
        for m in models
    )
    if ours != theirs:
        raise ValueError(f"--peer hf: its model has {theirs:,} weights where ours has {ours:,}: leave --peer out")
    return model


class _Clock(list):
    """A streamer for `generate`: the times at which the host has each token, after that of the prompt's."""

    def put(self, tokens: Tensor) -> None:
        self.append(time.perf_counter())

    def end(self) -> None: ...


def measure_peer(args: ModelArgs, options: argparse.Namespace) -> dict:
    """What `measure` measures, of transformers in each of PEER_SETTINGS; the figures are those of the fastest.

    Prompt, sampling and the reading of every token are those of `measure`; bf16 where the mode is not a dtype. One
    answer counts, after one to warm up; a static cache serves both, since a new one could be compiled for anew.
    A setting that fails is left out with a warning. Raises ValueError where all do.
    """
    device, dtype = pick_device(options.device), options.mode if options.mode in DTYPES else "bf16"
    model, found = hf_model(args, DTYPES[dtype], device), {}
    import transformers

    transformers.logging.set_verbosity_error()
    prompt = torch.tensor([random_prompt(args, options.prompt_len)], device=device)
    given = {"do_sample": True, "temperature": Sampling.temperature, "top_k": Sampling.top_k, "eos_token_id": None}
    given |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": options.new_tokens}
    for kind, experts in PEER_SETTINGS:
        compiled, cache = kind == "static" and device.type == "cuda", None  # by `generate` itself
        setting = f"{kind} cache, {'compiled, ' * compiled}{experts} experts"
        free(compiled)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            model.set_experts_implementation(experts)
            if kind == "static":
                cache = transformers.StaticCache(model.config, max_cache_len=options.prompt_len + options.new_tokens)
            for _ in range(2):
                if cache is not None:
                    cache.reset()
                clock, start = _Clock(), time.perf_counter()
                model.generate(prompt, past_key_values=cache, streamer=clock, **given)
            rate = (options.new_tokens - 1) / (clock[options.new_tokens] - clock[1])
        except Exception as error:  # whatever it is, the next setting may run
            print(f"warning: --peer hf: {setting} fails: {world.first_line(error)}: left out", file=sys.stderr)
            continue
        peak = peak_bytes(device) if device.type == "cuda" else None  # a process is born with its parent's
        found[setting] = {"tok_s": rate, "ttft_s": clock[1] - start, "peak_bytes": peak}
        print(f"transformers, {setting}: {rate:.1f} tokens/s", file=sys.stderr)
    if not found:
        raise ValueError("not one of its settings runs")
    with torch.device("meta"):
        size = Transformer(args).to(DTYPES[dtype]).bytes_per_token()
    best = max(found, key=lambda setting: found[setting]["tok_s"])
    rates = {setting: row["tok_s"] for setting, row in found.items()}
    return {"name": f"transformers {transformers.__version__}", "dtype": dtype, "bytes_per_token": size,
            "setting": best, **found[best], "settings": rates}  # fmt: skip


def peer(args: ModelArgs, options: argparse.Namespace) -> dict | None:
    """`measure_peer` in a process of its own: PyTorch's own compiler settings, and all of the memory.

    None, after a warning, if it fails: what was measured of ours is not lost.
    """
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(measure_peer, args, options).result()
    except Exception as error:
        print(f"warning: --peer hf: {world.first_line(error)}: no peer in this result", file=sys.stderr)
        return None
