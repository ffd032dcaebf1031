"""Checkpoints published in block FP8: kept as they are, and run as transformers runs them."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import FP8_SIZES, in_blocks, save_in_fp8
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from checkpoint import Checkpoint
from eval import score_windows
from formats import FORMATS
from formats.quantizer import bits_per_weight
from generate import load_model
from model import Experts
from models import args_of_checkpoint, build_model
from models.converter import convert
from offload.plan import OffloadSettings
from runtime.sampling import Sampling
from runtime.session import Session

PROMPT = torch.randint(160, (1, 40), generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.usefixtures("few_threads")


@pytest.fixture(scope="module")
def converted(fp8_directory) -> Path:
    return convert(fp8_directory, dtype="fp32", progress=False)


@pytest.fixture(scope="module")
def peer(fp8_directory):
    return dequantized(fp8_directory, Qwen3MoeForCausalLM(Qwen3MoeConfig(**FP8_SIZES)))


def dequantized(directory: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Return transformers' model of codes times scales. (Its own loading of FP8 needs a GPU.)"""
    plain = {}
    for name, tensor in sorted(load_file(directory / "model.safetensors").items()):
        if not name.endswith("_scale_inv"):  # sorted: scales come after their weights
            plain[name] = tensor.float()
        else:
            weight = plain[name.removesuffix("_scale_inv")]
            rows = tensor.repeat_interleave(128, 0)[: weight.shape[0]]
            weight *= rows.repeat_interleave(128, 1)[:, : weight.shape[1]]
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        save_file(plain, Path(directory) / "model.safetensors", metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def all_logits(model) -> Tensor:
    model.setup_cache(1, 64)
    return model(PROMPT, torch.arange(40)[None], all_positions=True)


def sources_of(layer: int) -> dict[str, list[str]]:
    """Map our modules of a layer (and "/expert") to the published weights that they hold."""
    sources = {
        "attention.wqkv": [f"self_attn.{name}_proj" for name in "qkv"],
        "attention.wo": ["self_attn.o_proj"],
    }
    if layer == 1:
        sources["ffn.w13"] = ["mlp.gate_proj", "mlp.up_proj"]
        sources["ffn.w2"] = ["mlp.down_proj"]
        return sources
    for expert in range(6):
        for ours, names in {"w13": ("gate", "up"), "w2": ("down",)}.items():
            theirs = [f"mlp.experts.{expert}.{name}_proj" for name in names]
            sources[f"ffn.experts.{ours}/{expert}"] = theirs
    return sources


def module_names(checkpoint: Checkpoint) -> set[str]:
    """Return the names of packed modules without their layer."""
    return {path.split(".", 2)[-1] for path in checkpoint.format["modules"]}


def test_codes_and_scales_are_the_published_ones(fp8_directory, converted):
    theirs, ours = load_file(fp8_directory / "model.safetensors"), Checkpoint(converted)
    assert converted.name == "model_fp8b"
    assert (ours.format["name"], ours.format["dtype"]) == ("fp8b", "fp32")
    assert module_names(ours) == {
        "attention.wqkv",
        "attention.wo",
        "ffn.experts.w13",
        "ffn.experts.w2",
        "ffn.w13",
        "ffn.w2",
    }
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        for path, names in sources_of(layer).items():
            path, _, expert = path.partition("/")
            parts = {
                leaf: ours.read(f"layers.{layer}.{path}.{leaf}") for leaf in ("codes", "scale")
            }
            parts = {leaf: part[int(expert)] if expert else part for leaf, part in parts.items()}
            scale = torch.cat([theirs[f"{prefix}{name}.weight_scale_inv"] for name in names])
            codes = torch.cat([theirs[f"{prefix}{name}.weight"] for name in names])
            assert torch.equal(parts["scale"], scale), path
            ones = {"codes": parts["codes"], "scale": torch.ones_like(scale)}
            assert torch.equal(FORMATS["fp8b"].unpack(ones, 128), codes.float()), path
    model = build_model(args_of_checkpoint(ours))
    assert bits_per_weight(ours, model)[0] == pytest.approx(8 + 32 / 128**2)


def test_compressed_tensors_has_the_same_blocks(fp8_directory, converted, tmp_path):
    """It calls the scales weight_scale."""

    def rename(tensors, config):
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name.removesuffix("_inv")] = tensors.pop(name)
        given = {"quant_method": "compressed-tensors", "format": "float-quantized"}
        config["quantization_config"] = given

    damaged_copy(fp8_directory, tmp_path, rename)
    ours = Checkpoint(convert(tmp_path, dtype="fp32", progress=False))
    theirs = Checkpoint(converted)
    assert (ours.format, ours.tensors) == (theirs.format, theirs.tensors)
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.tensors)


@pytest.mark.parametrize("gather_max_tokens", (0, 1, 64))
def test_logits_match_transformers(peer, converted, monkeypatch, gather_max_tokens):
    """Both expert paths."""
    monkeypatch.setattr(Experts, "gather_max_tokens", gather_max_tokens)
    assert relative(all_logits(load_model(converted, "cpu")), peer(PROMPT).logits) < 1e-4


def test_greedy_tokens_match_transformers(peer, converted):
    want = peer.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=48,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    session = Session(load_model(converted, "cpu"), 128)
    got = list(session.stream(PROMPT[0].tolist(), 48, Sampling(temperature=0)))
    assert got == want[0, 40:].tolist() and len(got) == 48


def test_offloading_changes_no_bit(converted):
    whole = load_model(converted, "cpu")
    offloaded = load_model(converted, "cpu", experts=OffloadSettings(gpu_experts=2))
    assert torch.equal(all_logits(offloaded), all_logits(whole))
    offloaded.setup_cache(1, 64)
    whole.setup_cache(1, 64)
    first = PROMPT[:, :1], torch.zeros(1, 1).long()
    assert torch.equal(offloaded(*first), whole(*first))


def test_score_windows_equals_cross_entropy(converted, peer):
    ids = PROMPT[0].tolist()
    ((nats, _),) = score_windows(load_model(converted, "cpu"), [(ids, 39)], progress=False)
    logits = peer(PROMPT).logits[0, :-1]
    want = torch.nn.functional.cross_entropy(logits, PROMPT[0, 1:], reduction="sum")
    assert nats == pytest.approx(want.item(), rel=1e-4)


K_PROJ = "model.layers.2.self_attn.k_proj.weight"
SCALE = "model.layers.0.mlp.experts.3.up_proj.weight_scale_inv"


def filling(name: str, value: float):
    return lambda tensors, config: tensors[name].view(-1)[:1].fill_(value)


def in_fp8(name: str):
    def change(tensors, config):
        tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(tensors[name].float())

    return change


def narrow_heads(tensors, config):
    """Cut heads to 32 numbers: the 64 rows of keys end within a block of 128."""
    config["head_dim"] = 32
    for name in [name for name in tensors if "self_attn" in name and not name.endswith("_inv")]:
        whole = tensors[name].float()
        if name.endswith("_norm.weight"):
            tensors[name] = whole[:32].clone()
        else:
            rows, columns = (256, 128) if "o_proj" in name else (len(whole) // 4, 256)
            tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(whole[:rows, :columns])


def with_tensor(name: str, tensor: Tensor):
    return lambda tensors, config: tensors.update({name: tensor})


# How the checkpoint is damaged, and the message.
BAD = {
    "no scale": (lambda tensors, config: tensors.pop(SCALE), f"{SCALE} is missing"),
    "a scale for each row": (with_tensor(SCALE, torch.ones(256, 2)), r"shape \[256, 2\]"),
    "a scale without a weight in fp8": (
        with_tensor("lm_head.weight_scale_inv", torch.ones(2, 2)),
        "lm_head.weight_scale_inv .* has no place",
    ),
    "one of three in bf16": (
        with_tensor(K_PROJ, torch.ones(256, 256).bfloat16()),
        f"{K_PROJ} has dtype bfloat16 beside others in fp8",
    ),
    "a router": (
        in_fp8("model.layers.0.mlp.gate.weight"),
        "mlp.gate.weight has dtype float8_e4m3fn",
    ),
    "a config without quantization_config": (
        lambda tensors, config: config.pop("quantization_config"),
        "dtype float8_e4m3fn",
    ),
    "not a number": (filling(K_PROJ, float("nan")), f"{K_PROJ} holds NaN"),
    "an infinite scale": (filling(SCALE, float("inf")), "up_proj.weight holds NaN or infinity"),
    "heads that share a block": (
        narrow_heads,
        r"v_proj.weight \[64, 256\] has no place .* of 128, at row 192",
    ),
}


def damaged_copy(source: Path, target: Path, change) -> None:
    """Write a changed copy of the checkpoint to `target`."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("case", BAD)
def test_bad_fp8_is_one_line_and_leaves_nothing(fp8_directory, tmp_path, case):
    change, message = BAD[case]
    damaged_copy(fp8_directory, tmp_path, change)
    with pytest.raises(ValueError, match=message) as error:
        convert(tmp_path, progress=False)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_published_fp8_head_is_kept(fp8_directory, tmp_path):
    """160 rows, so the last block is not full; scales in bf16, as Qwen publishes them."""
    tensors = load_file(fp8_directory / "model.safetensors")
    in_fp8("lm_head.weight")(tensors, None)
    for name in [name for name in tensors if name.endswith("_inv")]:
        tensors[name] = tensors[name].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((fp8_directory / "config.json").read_text())
    opened = Checkpoint(convert(tmp_path, progress=False))
    scale = opened.read("head.scale")
    assert torch.equal(scale, tensors["lm_head.weight_scale_inv"].float())
    assert scale.shape == (2, 2)
    model = load_model(opened.directory, "cpu")
    rows = scale.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)
    assert torch.equal(model.head.unpack(), tensors["lm_head.weight"].float() * rows)
    assert all_logits(model).isfinite().all()


# DeepSeek-V3: rows are reordered within their blocks ----------------------------------------------


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> tuple[Path, PreTrainedModel]:
    """A small DeepSeek-V3 in FP8 as published, and transformers' model of the same numbers."""
    config = DeepseekV3Config(
        vocab_size=160,
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=3,
        topk_group=2,
        moe_intermediate_size=256,
        intermediate_size=384,
        first_k_dense_replace=1,
        max_position_embeddings=256,
        num_mtp_layers=0,
    )
    torch.manual_seed(2)
    directory = save_in_fp8(DeepseekV3ForCausalLM(config), tmp_path_factory.mktemp("deepseek-fp8"))
    return directory, dequantized(directory, DeepseekV3ForCausalLM(config))


def test_deepseek_codes_are_kept_except_of_wkv(deepseek, tmp_path):
    directory, peer = deepseek
    ours = Checkpoint(convert(directory, tmp_path / "out", "fp32", progress=False))
    theirs = load_file(directory / "model.safetensors")
    assert module_names(ours) == {
        "attention.wqkv",
        "attention.wq",
        "attention.wo",
        "ffn.experts.w13",
        "ffn.experts.w2",
        "ffn.w13",
        "ffn.w2",
        "ffn.shared.w13",
        "ffn.shared.w2",
    }
    prefix = "model.layers.1.self_attn."
    sources = "q_a_proj", "kv_a_proj_with_mqa"
    scale = torch.cat([theirs[f"{prefix}{name}.weight_scale_inv"] for name in sources])
    assert torch.equal(ours.read("layers.1.attention.wqkv.scale"), scale)
    state = peer.state_dict()
    wkv = ours.read("layers.1.attention.wkv").flatten(0, 1)
    assert torch.equal(wkv, state[f"{prefix}kv_b_proj.weight"])
    model = load_model(ours, "cpu")
    order = [*range(128), *range(128, 192, 2), *range(129, 192, 2)]
    order = [192 * head + n for head in range(4) for n in order]
    wq = model.layers[1].attention.wq.unpack()
    assert torch.equal(wq, state[f"{prefix}q_b_proj.weight"][order])
    assert relative(all_logits(model), peer(PROMPT).logits) < 1e-4
    model.setup_cache(1, 64)
    steps = [model(PROMPT[:, n : n + 1], torch.tensor([[n]])) for n in range(40)]
    assert relative(torch.stack(steps, dim=1), peer(PROMPT).logits) < 1e-4


KV_B = "model.layers.2.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda tensors, config: tensors.pop(f"{KV_B}_scale_inv"), f"{KV_B}_scale_inv is missing"),
        (with_tensor(f"{KV_B}_scale_inv", torch.ones(8, 2)), r"shape \[8, 2\]"),
        (filling(KV_B, float("nan")), f"{KV_B} holds NaN"),
        (filling(f"{KV_B}_scale_inv", float("inf")), f"{KV_B} holds NaN"),
        (
            lambda tensors, config: config.update(
                qk_nope_head_dim=96, qk_rope_head_dim=96, head_dim=96
            ),
            "rows would leave their",
        ),
    ),
)
def test_bad_deepseek_fp8_is_one_line_and_leaves_nothing(deepseek, tmp_path, change, message):
    damaged_copy(deepseek[0], tmp_path, change)
    with pytest.raises(ValueError, match=message) as error:
        convert(tmp_path, progress=False)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
