"""Small random checkpoints of each family, saved by transformers, and their conversion; the embedded model."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from convert_hf_checkpoint import convert
from generate import EMBEDDED
from tokenizer import load_tokenizer

COMMON = dict(
    vocab_size=160, hidden_size=64, num_hidden_layers=3, num_attention_heads=8, max_position_embeddings=256,
    bos_token_id=1, eos_token_id=2, pad_token_id=None,
)  # fmt: skip
FAMILIES = {
    # A window shorter than the prompts of the tests, so that it matters.
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(
            **COMMON, intermediate_size=96, num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=2,
            sliding_window=16, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
    # A dense layer among sparse ones, biases, tied embeddings, head_dim other than dim / heads.
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **COMMON, intermediate_size=128, moe_intermediate_size=48, num_key_value_heads=4, head_dim=16,
            num_experts=16, num_experts_per_tok=4, norm_topk_prob=True, mlp_only_layers=[1], attention_bias=True,
            tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    ),
    # A shared expert, biases of queries, keys and values alone.
    "qwen2_moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **COMMON, intermediate_size=128, moe_intermediate_size=48, shared_expert_intermediate_size=80,
            num_key_value_heads=4, num_experts=12, num_experts_per_tok=3, mlp_only_layers=[0],
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    ),
    # A clip that cuts.
    "olmoe": lambda: OlmoeForCausalLM(
        OlmoeConfig(
            **COMMON, intermediate_size=48, num_key_value_heads=8, num_experts=16, num_experts_per_tok=4,
            norm_topk_prob=False, clip_qkv=0.5, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
}  # fmt: skip


@dataclass
class Family:
    name: str
    peer: PreTrainedModel  # in fp32, eval mode
    hf_directory: Path
    directory: Path  # converted to fp32


def use_hub_keys(config_file: Path) -> None:
    """Rewrite a config.json of transformers 5 with the keys that the hub's files have."""
    config = json.loads(config_file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "mixtral":
        config["head_dim"] = None
    if config["model_type"] == "qwen3_moe":
        config["rope_scaling"] = None
        config["decoder_sparse_step"] = 1
    config_file.write_text(json.dumps(config))


@pytest.fixture(scope="session")
def make_family(tmp_path_factory):
    """(family name, "current" or "hub" layout of its config) -> Family; each made once."""
    made = {}

    def make(name: str, layout: str = "current") -> Family:
        if (name, layout) not in made:
            torch.manual_seed(0)
            peer = FAMILIES[name]().eval()
            with torch.no_grad():
                for parameter_name, parameter in peer.named_parameters():
                    centre = 1.0 if parameter_name.endswith("norm.weight") else 0.0
                    parameter.copy_(centre + torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1))
            hf_directory = tmp_path_factory.mktemp(f"{name}-{layout}")
            peer.save_pretrained(hf_directory, max_shard_size="200KB")
            if layout == "hub":
                use_hub_keys(hf_directory / "config.json")
            directory = convert(hf_directory, dtype="fp32", progress=False)
            made[name, layout] = Family(name, peer, hf_directory, directory)
        return made[name, layout]

    return make


@pytest.fixture(scope="session", params=FAMILIES)
def family(request, make_family) -> Family:
    return make_family(request.param)


@pytest.fixture(scope="session")
def directory(tmp_path_factory) -> Path:
    """The embedded model, converted to bf16."""
    return convert(EMBEDDED, tmp_path_factory.mktemp("tiny-moe") / "model_bf16", progress=False)


@pytest.fixture(scope="session")
def tokenizer(directory):
    """The embedded model's."""
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def few_threads():
    """One thread: for tests of many small tensors, which several only slow down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
