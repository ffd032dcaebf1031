"""The benchmark's own workings, at a size for CPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmark import ARCHITECTURES, RandomWeights, architecture
from convert_hf_checkpoint import args_from_hf
from generate import load_model
from session import Sampling, Session

ROOT = Path(__file__).parents[1]
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32,
    "intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 300, "norm_topk_prob": True,
    "max_position_embeddings": 512,
}  # fmt: skip


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "benchmark.py", *arguments], capture_output=True, text=True, cwd=ROOT)


def test_the_known_shapes_are_those_of_the_hubs_configs():
    """Against the values of the published config.json files, through the conversion's own reading of them."""
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "max_position_embeddings": 32768}
    assert architecture("Mixtral-8x7B") == args_from_hf({**mixtral, "rope_theta": 1e6, "vocab_size": 32000})
    qwen = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128, "rope_theta": 1e6}
    qwen |= {"num_hidden_layers": 48, "max_position_embeddings": 40960, "norm_topk_prob": True}
    assert architecture("Qwen3-30B-A3B") == args_from_hf(qwen)
    olmoe = {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "intermediate_size": 1024}
    assert architecture("OLMoE-1B-7B") == args_from_hf(olmoe)


def test_random_weights_are_the_same_for_a_seed_and_keep_activations_sane():
    args = args_from_hf(CONFIG)
    first, second = (load_model(RandomWeights(args, {"name": "fp32"}, seed=3), "cpu") for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    first.setup_cache(1, 64)
    logits = first(torch.arange(20).unsqueeze(0), torch.arange(20).unsqueeze(0))
    assert logits.shape == (1, 300) and logits.isfinite().all() and 0.1 < logits.std() < 10
    assert len(set(Session(first, 64).stream([1, 2], 20, Sampling(seed=0)))) > 3


def test_json_has_the_fields_of_the_design(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    run = command("--arch", str(tmp_path / "config.json"), "--device", "cpu", "--eager", "--json", "--repeats", "2",
                  "--new_tokens", "5", "--layers", "1", "--mode", "fp32")  # fmt: skip
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    names = "arch mode gpu tok_s ms bytes_per_token gb_s read_gb_s fraction kernels_per_layer peak_bytes compile_s"
    assert set(names.split()) <= set(result)
    assert result["layers"] == 1 and len(result["tok_s_all"]) == 2
    assert result["fraction"] == pytest.approx(result["gb_s"] / result["read_gb_s"])
    assert result["gb_s"] == pytest.approx(result["bytes_per_token"] / result["ms"] / 1e6)


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    for arguments, words in (
        (("--arch", "Mixtral-9x9B"), ", ".join(ARCHITECTURES)),
        (("--arch", str(tmp_path / "config.json")), "JSON"),
        (("--arch", "Mixtral-8x7B", "--new_tokens", "1"), "--new_tokens 1"),
    ):
        run = command(*arguments)
        assert run.returncode == 2 and run.stdout == "" and len(run.stderr.splitlines()) == 1
        assert words in run.stderr
