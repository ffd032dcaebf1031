"""Checkpoints that are published in fp8 with a scale for each block: kept as they are, and run as transformers does."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import FP8_CONFIG, in_blocks, save_in_fp8
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3MoeForCausalLM,
)

from checkpoint import Checkpoint
from convert_hf_checkpoint import convert
from eval import score_windows
from generate import load_model
from model import Experts
from offload import Offload
from packing import FORMATS
from quantize import bits_per_weight
from session import Sampling, Session

PROMPT = torch.randint(160, (1, 40), generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.usefixtures("few_threads")


@pytest.fixture(scope="module")
def converted(fp8_directory) -> Path:
    return convert(fp8_directory, dtype="fp32", progress=False)


@pytest.fixture(scope="module")
def peer(fp8_directory):
    return unpacked(fp8_directory, Qwen3MoeForCausalLM(FP8_CONFIG))


def unpacked(directory: Path, model: PreTrainedModel) -> PreTrainedModel:
    """transformers' model of the same codes times their scales (its own reading of such files wants a GPU)."""
    plain = {}
    for name, tensor in sorted(load_file(directory / "model.safetensors").items()):
        if not name.endswith("_scale_inv"):  # which come after their weights
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


def test_codes_and_scales_are_the_published_ones(fp8_directory, converted):
    theirs, ours = load_file(fp8_directory / "model.safetensors"), Checkpoint(converted)
    assert converted.name == "model_fp8b"
    assert (ours.format["name"], ours.format["dtype"]) == ("fp8b", "fp32")
    assert {path.split(".", 2)[-1] for path in ours.format["modules"]} == {
        "attention.wqkv", "attention.wo", "ffn.experts.w13", "ffn.experts.w2", "ffn.w13", "ffn.w2"
    }  # fmt: skip
    for n, prefix in enumerate(("model.layers.0.", "model.layers.1.", "model.layers.2.")):
        joined = {"attention.wqkv": [f"self_attn.{x}_proj" for x in "qkv"], "attention.wo": ["self_attn.o_proj"]}
        if n == 1:
            joined |= {"ffn.w13": ["mlp.gate_proj", "mlp.up_proj"], "ffn.w2": ["mlp.down_proj"]}
        else:
            joined |= {
                f"ffn.experts.{ours}/{e}": [f"mlp.experts.{e}.{x}_proj" for x in names]
                for ours, names in {"w13": ("gate", "up"), "w2": ("down",)}.items()
                for e in range(6)
            }
        for path, names in joined.items():
            path, _, expert = path.partition("/")
            parts = {leaf: ours.read(f"layers.{n}.{path}.{leaf}") for leaf in ("codes", "scale")}
            parts = {leaf: part[int(expert)] if expert else part for leaf, part in parts.items()}
            scale = torch.cat([theirs[f"{prefix}{name}.weight_scale_inv"] for name in names])
            codes = torch.cat([theirs[f"{prefix}{name}.weight"].view(torch.uint8) for name in names])
            assert torch.equal(parts["scale"], scale), path
            ones = {"codes": parts["codes"], "scale": torch.ones_like(scale)}
            assert torch.equal(FORMATS["fp8b"].unpack(ones, 128), codes.view(torch.float8_e4m3fn).float()), path
    assert bits_per_weight(ours)[0] == pytest.approx(8 + 32 / 128**2)


@pytest.mark.parametrize("gather_tokens", (0, 1, 64))
def test_logits_are_those_of_transformers(peer, converted, monkeypatch, gather_tokens):
    """Prompts by both expert paths."""
    monkeypatch.setattr(Experts, "gather_tokens", gather_tokens)
    assert relative(all_logits(load_model(converted, "cpu")), peer(PROMPT).logits) < 1e-4


def test_greedy_tokens_are_those_of_transformers(peer, converted):
    want = peer.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=48, do_sample=False, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    session = Session(load_model(converted, "cpu"), 128)
    got = list(session.stream(PROMPT[0].tolist(), 48, Sampling(temperature=0)))
    assert got == want[0, 40:].tolist() and len(got) == 48


def test_offloaded_it_is_the_same(converted):
    whole, few = (load_model(converted, "cpu", experts=experts) for experts in (None, Offload(gpu_experts=2)))
    assert torch.equal(all_logits(few), all_logits(whole))
    few.setup_cache(1, 64)
    whole.setup_cache(1, 64)
    assert torch.equal(few(PROMPT[:, :1], torch.zeros(1, 1).long()), whole(PROMPT[:, :1], torch.zeros(1, 1).long()))


def test_it_is_scored(converted, peer):
    ids = PROMPT[0].tolist()
    ((nats, _),) = score_windows(load_model(converted, "cpu"), [(ids, 39)], progress=False)
    want = torch.nn.functional.cross_entropy(peer(PROMPT).logits[0, :-1], PROMPT[0, 1:], reduction="sum")
    assert nats == pytest.approx(want.item(), rel=1e-4)


K_PROJ, SCALE = "model.layers.2.self_attn.k_proj.weight", "model.layers.0.mlp.experts.3.up_proj.weight_scale_inv"


def filling(name: str, value: float):
    return lambda tensors, config: tensors[name].view(-1)[:1].fill_(value)


def in_fp8(name: str):
    def change(tensors, config):
        tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(tensors[name].float())

    return change


def narrow_heads(tensors, config):
    """Heads of 32: keys of 64 rows end, and values begin, within a block."""
    config["head_dim"] = 32
    for name in [name for name in tensors if "self_attn" in name and not name.endswith("_inv")]:
        whole = tensors[name].float()
        if name.endswith("_norm.weight"):
            tensors[name] = whole[:32].clone()
        else:
            rows, columns = (256, 128) if "o_proj" in name else (len(whole) // 4, 256)
            tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(whole[:rows, :columns])


BAD = {  # what is changed, and the message
    "no scale": (lambda tensors, config: tensors.pop(SCALE), f"{SCALE} is missing"),
    "a scale for each row": (lambda tensors, config: tensors.update({SCALE: torch.ones(256, 2)}), r"shape \[256, 2\]"),
    "a scale without a weight in fp8": (lambda tensors, config: tensors.update(
        {"lm_head.weight_scale_inv": torch.ones(2, 2)}), "lm_head.weight_scale_inv .* has no place"),
    "one of three in bf16": (lambda tensors, config: tensors.update(
        {K_PROJ: torch.ones(256, 256).bfloat16()}), f"{K_PROJ} has dtype bfloat16 beside others in fp8"),
    "a router": (in_fp8("model.layers.0.mlp.gate.weight"), "mlp.gate.weight has dtype float8_e4m3fn"),
    "a config that does not say so": (lambda tensors, config: config.pop("quantization_config"), "dtype float8_e4m3fn"),
    "not a number": (filling(K_PROJ, float("nan")), f"{K_PROJ} holds NaN"),
    "an infinite scale": (filling(SCALE, float("inf")), "up_proj.weight holds NaN or infinity"),
    "heads that share a block": (narrow_heads, r"v_proj.weight \[64, 256\] has no place .* of 128, at row 192"),
}  # fmt: skip


def spoil(source: Path, target: Path, change) -> None:
    """A copy, changed."""
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_kept_is_named_and_nothing_written(fp8_directory, tmp_path, case):
    change, message = BAD[case]
    spoil(fp8_directory, tmp_path, change)
    with pytest.raises(ValueError, match=message) as error:
        convert(tmp_path, progress=False)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_published_head_in_fp8_is_kept_too(fp8_directory, tmp_path):
    """160 rows, the last block of which is not full; scales in bf16, as Qwen has them."""
    tensors = load_file(fp8_directory / "model.safetensors")
    in_fp8("lm_head.weight")(tensors, None)
    tensors = {name: t.bfloat16() if name.endswith("_inv") else t for name, t in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((fp8_directory / "config.json").read_text())
    opened = Checkpoint(convert(tmp_path, progress=False))
    scale = opened.read("head.scale")
    assert torch.equal(scale, tensors["lm_head.weight_scale_inv"].float()) and scale.shape == (2, 2)
    model = load_model(opened.directory, "cpu")
    rows = scale.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)
    assert torch.equal(model.head.unpack(), tensors["lm_head.weight"].float() * rows)
    assert all_logits(model).isfinite().all()


# DeepSeek-V3, whose rows are reordered within their blocks


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> tuple[Path, PreTrainedModel]:
    """As it is published, and transformers' model of the same numbers."""
    config = DeepseekV3Config(
        vocab_size=160, hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        q_lora_rank=128, kv_lora_rank=128, n_routed_experts=6, num_experts_per_tok=2, n_group=3, topk_group=2,
        moe_intermediate_size=256, intermediate_size=384, first_k_dense_replace=1, max_position_embeddings=256,
        num_mtp_layers=0,
    )  # fmt: skip
    torch.manual_seed(2)
    directory = save_in_fp8(DeepseekV3ForCausalLM(config), tmp_path_factory.mktemp("deepseek-fp8"))
    return directory, unpacked(directory, DeepseekV3ForCausalLM(config))


def test_deepseeks_codes_are_kept_but_for_what_makes_keys_and_values(deepseek, tmp_path):
    directory, peer = deepseek
    ours, theirs = (
        Checkpoint(convert(directory, tmp_path / "out", "fp32", progress=False)),
        load_file(directory / "model.safetensors"),
    )
    assert {path.split(".", 2)[-1] for path in ours.format["modules"]} == {
        "attention.wqkv", "attention.wq", "attention.wo", "ffn.experts.w13", "ffn.experts.w2", "ffn.w13", "ffn.w2",
        "ffn.shared.w13", "ffn.shared.w2",
    }  # fmt: skip
    prefix = "model.layers.1.self_attn."
    scale = torch.cat([theirs[f"{prefix}{name}.weight_scale_inv"] for name in ("q_a_proj", "kv_a_proj_with_mqa")])
    assert torch.equal(ours.read("layers.1.attention.wqkv.scale"), scale)
    state = peer.state_dict()
    assert torch.equal(ours.read("layers.1.attention.wkv").flatten(0, 1), state[f"{prefix}kv_b_proj.weight"])
    model = load_model(ours, "cpu")
    order = [h * 192 + n for h in range(4) for n in (*range(128), *range(128, 192, 2), *range(129, 192, 2))]
    assert torch.equal(model.layers[1].attention.wq.unpack(), state[f"{prefix}q_b_proj.weight"][order])
    assert relative(all_logits(model), peer(PROMPT).logits) < 1e-4
    model.setup_cache(1, 64)
    steps = [model(PROMPT[:, n : n + 1], torch.tensor([[n]])) for n in range(40)]
    assert relative(torch.stack(steps, dim=1), peer(PROMPT).logits) < 1e-4


KV_B = "model.layers.2.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda tensors, config: tensors.pop(f"{KV_B}_scale_inv"), f"{KV_B}_scale_inv is missing"),
        (lambda tensors, config: tensors.update({f"{KV_B}_scale_inv": torch.ones(8, 2)}), r"shape \[8, 2\]"),
        (filling(KV_B, float("nan")), f"{KV_B} holds NaN"),
        (filling(f"{KV_B}_scale_inv", float("inf")), f"{KV_B} holds NaN"),
        (lambda tensors, config: config.update(qk_nope_head_dim=96, qk_rope_head_dim=96), "rows would leave their"),
    ),
)
def test_what_deepseek_cannot_be_is_named(deepseek, tmp_path, change, message):
    spoil(deepseek[0], tmp_path, change)
    with pytest.raises(ValueError, match=message) as error:
        convert(tmp_path, progress=False)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
