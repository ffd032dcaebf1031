"""Groups that differ between tensors: every format fits every model, and computes the same.

128 does not divide the rows of Gemma 4's experts, of gpt-oss, and of the dense layers of
GLM-4.5-Air and DeepSeek-V2-Lite. tests/test_tp.py has groups that the edges of ranks cut.
"""

import dataclasses

import pytest
import torch
from conftest import smoke_diagonal
from torch import nn

from formats import FORMATS
from formats.packed import Packed
from formats.quantizer import describe_groups, formats_of_mode, plan_format
from generate import load_model
from model import ModelArgs
from models import ARCHITECTURES, build_model
from models.gemma4 import Gemma4Args
from models.glm4_moe import Glm4MoeArgs
from models.gpt_oss import GptOssArgs
from models.latent_family import LatentArgs
from models.layers.yarn import Yarn
from models.random_weights import RandomWeights, first_layers
from offload.plan import OffloadSettings

pytestmark = pytest.mark.usefixtures("few_threads")
SIZES = dict(
    dim=128,
    n_layer=2,
    n_head=4,
    head_dim=32,
    intermediate=192,
    n_expert=6,
    n_active=2,
    vocab_size=96,
    max_position=64,
)
MODELS = {
    "gemma4": Gemma4Args(
        "gemma4",
        **SIZES | dict(intermediate=704),
        n_kv_head=2,
        qk_norm="head",
        tied_embeddings=True,
        sliding_window=8,
        full_layers=(1,),
        global_head_dim=64,
        global_kv_head=2,
        global_rotary_dim=16,
        shared_intermediate=2112,
    ),
    "glm4_moe": Glm4MoeArgs(
        "glm4_moe",
        **SIZES | dict(intermediate=1408),
        n_kv_head=2,
        qkv_bias=True,
        shared_intermediate=1408,
        routed_scale=1.5,
        rotary_dim=16,
        dense_layers=(0,),
        dense_intermediate=10944,
    ),
    "deepseek_v2": LatentArgs(
        "deepseek_v2",
        **SIZES | dict(head_dim=48, intermediate=1408),
        n_kv_head=1,
        kv_rank=64,
        value_dim=32,
        rotary_dim=16,
        norm_topk=False,
        shared_intermediate=2816,
        attention_scale=0.2,
        yarn=Yarn(4.0, 64),
        dense_layers=(0,),
        dense_intermediate=10944,
    ),
    "gpt_oss": GptOssArgs(
        "gpt_oss",
        **SIZES | dict(dim=320, intermediate=320),  # 2880 / 9
        n_kv_head=1,
        attention_bias=True,
        sliding_window=8,
        full_layers=(1,),
        swiglu_limit=1.0,
        yarn=Yarn(4.0, 64),
    ),
    "pruned": ModelArgs(  # experts and their widths
        "qwen3_moe",
        **SIZES | dict(intermediate=608, n_expert=5),
        n_kv_head=2,
        qk_norm="head",
    ),
}
FOUR_BITS = {  # experts.w13, experts.w2, and what differs
    "gemma-4-26B-A4B": (128, 64, {"ffn.shared.w2": 64}),
    "GLM-4.5-Air": (128, 128, {"ffn.w2": 64}),
    "DeepSeek-V2-Lite": (128, 128, {"ffn.w2": 64}),
    "gpt-oss-20b": (64, 64, {"attention.wqkv": 64, "attention.wo": 128}),
    "Qwen3-30B-A3B": (128, 128, {}),
}


def plan(args: ModelArgs, mode: str) -> dict:
    return plan_format(build_model(args), *formats_of_mode(mode), dtype="fp32")


@pytest.mark.parametrize("name", FOUR_BITS)
def test_the_largest_group_that_divides_the_rows(name):
    w13, w2, others = FOUR_BITS[name]
    due = {"ffn.experts.w13": w13, "ffn.experts.w2": w2} | others
    args = first_layers(ARCHITECTURES[name], 4)
    for path, spec in plan(args, "int4")["modules"].items():
        leaf = path.split(".", 2)[-1]
        if path != "head":
            assert spec["group_size"] == due.get(leaf, 128), path


@pytest.mark.parametrize("mode", FORMATS)
def test_every_format_fits_every_model(mode):
    for args in ARCHITECTURES.values():
        assert plan(first_layers(args, 4), mode)["modules"], args


def test_sizes_of_groups_in_words():
    names = "gemma-4-26B-A4B", "Mixtral-8x7B"
    gemma, mixtral = (first_layers(ARCHITECTURES[name], 2) for name in names)
    found = describe_groups(plan(gemma, "int4"))
    assert found == "int4 in groups of 128; 64 in ffn.experts.w2, ffn.shared.w2"
    assert describe_groups(plan(mixtral, "int4")) == "int4 in groups of 128"
    assert describe_groups(plan(mixtral, "int8")) == describe_groups({"name": "bf16"}) == ""


def test_rows_that_no_group_divides():
    odd = dataclasses.replace(MODELS["pruned"], intermediate=604)
    with pytest.raises(ValueError, match=r"experts.w2 in int4: groups of 8 do not .* another form"):
        plan(odd, "int4")
    assert plan(odd, "int8")


@pytest.mark.parametrize(
    ("name", "mode"), smoke_diagonal(MODELS, ("int4", "fp8b", "hqq4", "hqq3", "hqq2"))
)
def test_a_model_computes_what_its_unpacked_weights_do(name, mode):
    """One token (gathered), a prompt (grouped), and with experts in slots."""
    args = MODELS[name]
    format = plan(args, mode)
    source = RandomWeights(args, format)
    packed = load_model(source, "cpu")
    groups = {m.group for m in packed.modules() if isinstance(m, Packed)}
    assert len(groups) > 1 or mode not in ("int4", "fp8b")
    plain = load_model(RandomWeights(args, {"name": "fp32"}), "cpu")
    for path, module in packed.named_modules():
        if isinstance(module, Packed):
            plain.get_submodule(path).weight = nn.Parameter(module.unpack(), requires_grad=False)
    slots = load_model(source, "cpu", experts=OffloadSettings(gpu_experts=args.n_active))
    logits = []
    for model in (packed, plain, slots):
        model.setup_cache(1, 40)
        tokens, found = torch.arange(3, 36)[None], []
        for begin, end in ((0, 32), (32, 33)):
            at = torch.arange(begin, end)[None]
            found.append(model(tokens[:, begin:end], at, all_positions=True))
        logits.append(torch.cat(found, 1))
    assert (logits[0] - logits[1]).norm() < 1e-4 * logits[1].norm()
    assert torch.equal(logits[0], logits[2])
