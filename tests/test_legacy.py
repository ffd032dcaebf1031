"""Checkpoints that version one converted: their args name no family, and index.json has less.

data/version_one_args.json was written by version one: "small" has the args of conftest's families
as its converter stored them, "published" those of the models in data/hub_configs.json.
"""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoint
from generate import load_model
from models import ARCHITECTURES, args_from_json, family_of
from models.legacy import V1_DEFAULTS

V1_ARGS = json.loads((Path(__file__).parent / "data" / "version_one_args.json").read_text())
SMALL, PUBLISHED = V1_ARGS["small"], V1_ARGS["published"]


def as_version_one(directory: Path, target: Path, args: dict) -> Path:
    """Copy a checkpoint; give it version one's args, and no checksum of config.json."""
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"args": args}))
    index = json.loads((target / "index.json").read_text())
    index.pop("config_crc32", None)
    (target / "index.json").write_text(json.dumps(index))
    return target


def logits(model) -> torch.Tensor:
    tokens = torch.randint(160, (1, 40), generator=torch.Generator().manual_seed(1))
    model.setup_cache(1, 64)
    return model(tokens, torch.arange(40).unsqueeze(0), all_positions=True)


@pytest.mark.parametrize("name", SMALL)
def test_a_checkpoint_of_version_one_gives_the_same_logits(name, make_family, tmp_path):
    directory = make_family(name).directory
    assert len(SMALL[name]) == 47 and "family" not in SMALL[name]
    copy = as_version_one(directory, tmp_path / "copy", SMALL[name])
    Checkpoint(copy).verify(progress=False)
    model, old = load_model(directory, "cpu"), load_model(copy, "cpu")
    assert (old.args, type(old)) == (model.args, type(model)) and old.args.family == name
    torch.testing.assert_close(logits(old), logits(model), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PUBLISHED)
def test_args_of_published_models(name):
    assert args_from_json(PUBLISHED[name]) == ARCHITECTURES[name]


def test_every_field_of_version_one_is_known():
    """Each is a field of model.ModelArgs, or has a default in the legacy table."""
    shared = {field.name for field in fields(ARCHITECTURES["Mixtral-8x7B"])}
    for args in (*SMALL.values(), *PUBLISHED.values()):
        assert set(args) == (shared - {"family"}) | set(V1_DEFAULTS)


# Version one's args with changes -> words of the error.
IMPOSSIBLE = {
    "a scale of Granite in Mixtral": ("mixtral", {"embedding_scale": 2.0}, "embedding_scale = 2.0"),
    "YaRN in Mixtral": ("mixtral", {"yarn": {"factor": 8.0, "original": 64}}, "yarn = "),
    "biased experts in OLMoE": ("olmoe", {"expert_bias": True}, "expert_bias = True"),
    "a sparse mixer in Qwen3": ("qwen3_moe", {"mixer_eps": 0.01}, "mixer_eps = 0.01"),
    "groups of experts in GLM": ("glm4_moe", {"n_group": 4}, "n_group = 4"),
    "a gated shared expert in GLM": ("glm4_moe", {"shared_gated": "yes"}, "shared_gated = 'yes'"),
    "an ungated shared expert in Qwen2": (
        "qwen2_moe",
        {"shared_gated": False},
        "shared_gated = False",
    ),
    "sinks with latent attention": (
        "deepseek_v2",
        {"attention_sinks": True},
        "attention_sinks = True",
    ),
    "latent attention in Phi": ("phimoe", {"kv_rank": 32}, "layer_norm = True"),
    "sigmoid routing in Granite": ("granitemoe", {"scoring": "sigmoid"}, "attention_scale = 0.2"),
    "no SwiGLU limit in gpt-oss": ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit"),
    "an unknown field": ("mixtral", {"novelty": 1}, "novelty = 1"),
    "text as a number": ("mixtral", {"n_layer": "3"}, "n_layer cannot be '3'"),
    "more active experts than experts": ("mixtral", {"n_active": 7}, "n_active cannot be 7"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_args_are_refused_in_one_line(case):
    family, changes, words = IMPOSSIBLE[case]
    with pytest.raises(ValueError) as error:
        args_from_json(SMALL[family] | changes)
    message = str(error.value)
    assert words in message and "\n" not in message
    assert "another version" in message and "convert the model again" in message


@pytest.mark.parametrize("field", ("dim", "n_expert", "vocab_size"))
def test_missing_args_are_refused_in_one_line(field):
    args = {name: value for name, value in SMALL["mixtral"].items() if name != field}
    with pytest.raises(ValueError, match=rf"another version .*{field}") as error:
        args_from_json(args)
    assert "\n" not in str(error.value)


def test_args_with_a_family_are_todays(make_family):
    args = load_model(make_family("mixtral").directory, "cpu").args
    stored = Checkpoint(make_family("mixtral").directory).args
    assert args_from_json(stored) == args and family_of(args).name == "mixtral"
    with pytest.raises(ValueError, match=r"another version .*'llama' is not supported"):
        args_from_json(stored | {"family": "llama"})
