"""What is particular to Gemma 4: nested config, vision, two kinds of heads and of RoPE."""

import pytest
import torch
import torch.nn.functional as F
from chunks import all_logits, assert_compiled_is_eager, prompt
from conftest import randomize
from safetensors.torch import load_file
from test_families import GEMMA4
from transformers import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4VisionConfig,
)

from checkpoint import Checkpoint
from generate import load_model
from models import ARCHITECTURES, args_from_hf, build_model
from models.converter import convert
from models.gemma4 import GlobalAttention, WindowAttention
from models.layers.geglu import geglu
from models.layers.sandwich import Branches, SandwichAddNorm, UnitRMSNorm
from ops.products.fixed_join import NextNorm, fixed_join
from ops.products.join import Added

VISION = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    position_embedding_size=16,
)


@pytest.mark.parametrize("sizes", ((), (64, 64, 122)))
def test_a_long_prompt_matches_transformers(make_family, sizes):
    family, tokens = make_family("gemma4"), prompt(300)
    got = all_logits(family.directory, tokens, *sizes)
    torch.testing.assert_close(got, family.peer(tokens).logits, rtol=0, atol=1e-4)
    assert got.abs().max() > 2.5  # half of the soft cap, so that it matters


def test_a_bf16_model_is_as_near_as_transformers_is(make_family, tmp_path):
    """Both round differently; neither is further from fp32 than twice the other."""
    family, tokens = make_family("gemma4"), prompt(40)
    directory = convert(family.hf_directory, tmp_path / "bf16", dtype="bf16", progress=False)
    exact = family.peer(tokens).logits
    peer = Gemma4ForCausalLM.from_pretrained(family.hf_directory, dtype=torch.bfloat16).eval()
    theirs = (peer(tokens).logits.float() - exact).norm()
    assert (all_logits(directory, tokens) - exact).norm() < 2 * theirs


# The published layout -----------------------------------------------------------------------------


def test_the_text_part_of_a_model_with_vision(make_family, tmp_path, capsys):
    text = make_family("gemma4").peer
    config = Gemma4Config(
        text_config=text.config.to_dict(),
        vision_config=Gemma4VisionConfig(**VISION),
        audio_config=None,
    )
    torch.manual_seed(0)
    peer = Gemma4ForConditionalGeneration(config).eval()
    randomize(peer)
    peer.model.language_model.load_state_dict(text.model.state_dict())
    peer.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    vision = [name for name in names if "vision" in name]
    rest = {*names} - {*vision}
    assert vision and all(name.startswith("model.language_model.") for name in rest)
    directory = convert(tmp_path, dtype="fp32")
    log = capsys.readouterr().err
    assert log.count("left out, as they are not run: model.vision_tower.* (") == 1
    assert "model.embed_vision.* (1 tensors)\n" in log
    ours, alone = Checkpoint(directory), Checkpoint(make_family("gemma4").directory)
    assert ours.args == alone.args and ours.args["family"] == "gemma4_text"
    assert ours.tensors == alone.tensors
    assert all(torch.equal(ours.read(name), alone.read(name)) for name in ours.tensors)


def test_published_sizes():
    """25.2 B weights of text, as the model card says."""
    args = ARCHITECTURES["gemma-4-26B-A4B"]
    assert args.full_layers == (5, 11, 17, 23, 29) and args.global_rotary_dim == 128
    model = build_model(args)
    kinds = [type(block.attention) for block in model.layers]
    assert kinds == 5 * [*5 * [WindowAttention], GlobalAttention]
    head = model.head.weight.numel()  # tied
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert 25.1e9 < weights - (0 if model.head.weight is model.embedding.weight else head) < 25.3e9


ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6},
}


def rope_with(kind: str, **changes) -> dict:
    return {"rope_parameters": ROPE | {kind: ROPE[kind] | changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input = 256.*only 0 is"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input = 256"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers = 10"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp = True"),
        ({"enable_moe_block": False}, "enable_moe_block = False"),
        ({"attention_k_eq_v": False}, "attention_k_eq_v = False"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu'.*'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"num_experts": None}, "num_experts = None"),
        ({"top_k_experts": 129}, "top_k_experts = 129.*128 experts"),
        ({"moe_intermediate_size": 700}, "moe_intermediate_size = 700.*multiple of 8"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping = 0"),
        ({"global_head_dim": 384}, "global_head_dim = 384.*multiple of head_dim = 256"),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads = 3.*divide"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config = .*global layers"),
        ({"per_layer_config": [1]}, r"per_layer_config = \[1\]"),
        ({"layer_types": ["full_attention"]}, "layer_types = .*30 layers"),
        ({"layer_types": ["linear_attention"] * 30}, "layer_types = .*'sliding_attention' or"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters = .*a set for each"),
        (rope_with("full_attention", rope_type="yarn"), "full_attention.rope_type = 'yarn'"),
        (rope_with("full_attention", factor=8.0), "full_attention.factor = 8.0"),
        (rope_with("full_attention", rope_theta=0), "full_attention.rope_theta = 0"),
        (
            rope_with("full_attention", partial_rotary_factor=2.0),
            "full_attention.partial_rotary_factor = 2.0",
        ),
        (rope_with("sliding_attention", rope_type="linear"), "rope_type = 'linear'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config = 'hqq'"),
    ],
)
@pytest.mark.parametrize("nested", (False, True))
def test_a_value_is_refused_by_its_key(changes, message, nested):
    config = GEMMA4 | changes
    names = "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"
    config = {"text_config": config} if nested else config
    with pytest.raises(ValueError, match=message) as error:
        args_from_hf({"architectures": [names[nested]], **config})
    assert "\n" not in str(error.value)


def test_no_nested_config_is_refused_by_its_key():
    with pytest.raises(ValueError, match=r"text_config = \[1\]"):
        args_from_hf({"architectures": ["Gemma4ForConditionalGeneration"], "text_config": [1]})


# Layers -------------------------------------------------------------------------------------------


def test_layers_have_heads_and_caches_of_their_own(make_family):
    model = load_model(make_family("gemma4").directory, "cpu")
    states = model.setup_cache(2, 64)
    assert [state.kv.shape for state in states] == [(2, 2, K, 64, C) for K, C in SHAPES]
    assert model.windows == (16, None) and model.rope_table.shape == (64, 2 * (16 + 32))
    assert not any(name.endswith("wqkv") for name, _ in model.layers[2].named_modules())


SHAPES = (4, 16), (4, 16), (2, 32)


def test_the_experts_activation_is_no_swiglu():
    """So that no fused kernel that has SiLU in it is chosen (formats/packed.py)."""
    gate, up = torch.randn(2, 3, 8).unbind()
    expected = F.gelu(gate, approximate="tanh") * up
    assert torch.equal(geglu(gate, up), expected)


@pytest.mark.parametrize("branches", (1, 2))
@pytest.mark.parametrize("scaled", (False, True))
def test_the_fixed_kernel_computes_the_same_as_the_modules(branches, scaled):
    """Its plain form: tensor parallelism uses it on the CPU."""
    D, eps = 24, 1e-6
    add, norm = SandwichAddNorm(D, eps, branches, scaled), UnitRMSNorm(D, eps)
    for parameter in add.parameters():
        parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
    x, y, router = torch.randn(1, 5, D), torch.randn(branches, 1, 5, D), torch.randn(6, D)
    outputs = Branches(*(part.flatten(0, 1) for part in y)) if branches > 1 else y[0]
    total, normed = add(x, outputs, norm)
    weights = torch.stack([n.weight for n in add.branch_norms]) if branches > 1 else None
    added = Added(y=y, branch_norms=weights, norm=add.norm.weight, scalar=add.scalar)
    got = fixed_join(x, added, NextNorm(None, None, eps), router)
    for ours, expected in zip(got, (total, normed, normed[0] @ router.T), strict=True):
        torch.testing.assert_close(ours, expected)


# Running ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_tokens_are_the_same(make_family):
    """The decode step, and the prompt's pass with padding."""
    directory = make_family("gemma4").directory
    assert_compiled_is_eager(directory, prompt(70)[0].tolist())
