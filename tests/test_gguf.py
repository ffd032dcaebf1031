"""GGUF files: the container, every family against transformers, tokenizers, damage."""

import re
import resource
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from chunks import prompt
from conftest import FAMILIES, any_text, randomize
from gguf_checkpoint import add_value, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_files.container import TYPES, GGUFFile
from gguf_files.conversions import ROUNDED, as_blocks_of
from gguf_files.source import GGUFCheckpoint
from models import FAMILIES as OURS
from models.gguf import KEYS, YARN_KEYS
from runtime.loading import load_model
from runtime.sampling import Sampling
from runtime.session import Session

READ = (
    *("mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "gemma4", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"),
    *("olmoe", "qwen2_moe", "granitemoe", "lfm2_moe", "granitemoehybrid", "nemotron_h"),
    *("minimax_m2", "ernie4_5_moe", "afmoe", "kimi_linear"),
)
# What a file cannot say: gpt-oss's limit is a constant there, DeepSeek's two factors are one.
SAID = {
    "gpt_oss": {"swiglu_limit": 7.0},
    "olmoe": {"norm_topk_prob": False, "clip_qkv": None},
    "qwen2_moe": {"norm_topk_prob": False},
    "afmoe": {"layer_types": ["sliding_attention"] * 3, "num_shared_experts": 1},
    "lfm2_moe": {"conv_bias": False, "routed_scaling_factor": 1.0},
}

# Sizes of which K-quants have whole blocks.
WIDE = dict(
    vocab_size=160,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
FEW = dict(moe_intermediate_size=256, num_experts_per_tok=2)
HYBRID = dict(
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_value_head_dim=64,
    shared_expert_intermediate_size=256,
    num_experts=4,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
)
LATENT = dict(
    intermediate_size=256,
    kv_lora_rank=256,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    n_routed_experts=4,
    num_key_value_heads=8,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)
WIDE_CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(
        **WIDE, intermediate_size=256, num_key_value_heads=2, num_local_experts=4
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **WIDE | FEW, num_key_value_heads=4, head_dim=32, num_experts=4, norm_topk_prob=True
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **WIDE | FEW | HYBRID, linear_key_head_dim=64
    ),
    # A block of wout's columns is of the first value heads of both key heads, then the second ones.
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **WIDE | FEW | HYBRID, linear_key_head_dim=48
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **WIDE,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_key_value_heads=4,
        head_dim=32,
        global_head_dim=64,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **WIDE,
        intermediate_size=256,
        num_key_value_heads=4,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_parameters=FAMILIES["gpt_oss"]().config.rope_parameters,
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **WIDE | FEW | LATENT, q_lora_rank=None, n_shared_experts=1, first_k_dense_replace=1
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **WIDE | FEW | LATENT | {"n_routed_experts": 8},
        q_lora_rank=256,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
    ),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(
        **WIDE | FEW | LATENT, q_lora_rank=256, mlp_layer_types=["dense", "sparse"]
    ),
    "kimi_linear": lambda: transformers.KimiLinearConfig(
        **WIDE | {"num_experts_per_tok": 2, "num_hidden_layers": 2},
        intermediate_size=256,
        moe_intermediate_size=256,
        num_key_value_heads=8,
        kv_lora_rank=256,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        num_local_experts=4,
        linear_head_dim=64,
        linear_num_heads=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **WIDE | {"num_experts_per_tok": 2}, intermediate_size=256, num_experts=4
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **WIDE | FEW, num_key_value_heads=4, num_experts=4, shared_expert_intermediate_size=512
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(
        **WIDE,
        intermediate_size=256,
        num_key_value_heads=4,
        num_local_experts=4,
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **WIDE,
        intermediate_size=256,
        shared_intermediate_size=256,
        num_key_value_heads=4,
        num_local_experts=4,
        layer_types=["linear_attention", "full_attention"],
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=32,
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **WIDE | FEW | {"num_hidden_layers": 7},
        hybrid_override_pattern="MEM*EM-",
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=256,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=32,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=512,
        routed_scaling_factor=2.5,
        time_step_min=1e-30,
    ),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **WIDE | FEW,
        intermediate_size=256,
        num_key_value_heads=4,
        num_experts=4,
        num_dense_layers=1,
        layer_types=["full_attention", "conv"],
    ),
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        **WIDE | {"num_experts_per_tok": 2},
        intermediate_size=256,
        num_key_value_heads=4,
        head_dim=32,
        num_local_experts=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    ),
    "afmoe": lambda: transformers.AfmoeConfig(
        **WIDE | FEW,
        intermediate_size=256,
        num_key_value_heads=4,
        head_dim=32,
        sliding_window=16,
        num_experts=4,
        num_shared_experts=1,
        route_scale=1.5,
        mup_enabled=True,
    ),
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(
        **WIDE,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_key_value_heads=4,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=2,
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **WIDE | FEW,
        intermediate_size=256,
        num_key_value_heads=4,
        head_dim=32,
        n_routed_experts=4,
        attention_bias=True,
        use_qk_norm=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    ),
}


def mixed(name: str) -> str:
    """Return the types of a Q4_K_M file, and some more: values and down differ by layer."""
    first = ".0." in name
    for part, type in (
        ("_inp", "F32"),
        ("attn_v.", "Q6_K" if first else "Q4_K"),
        ("attn_gate.", "Q5_K"),
        ("ffn_down", "Q6_K" if first else "Q5_K"),
        ("ssm_out", "IQ4_XS"),
        ("attn_output", "Q8_0"),
        ("_b.", "Q8_0"),
        ("ssm_", "F16"),
        ("token_embd", "Q6_K"),
        ("output.", "Q6_K"),
        ("ffn_up", "IQ4_NL" if first else "Q4_K"),
    ):
        if part in name:
            return type
    return "Q4_K"


def small_peer(name: str):
    """Return transformers' model of conftest's sizes, of what a file can say."""
    torch.manual_seed(0)
    peer = FAMILIES[name]()
    config = peer.config
    for field, value in SAID.get(name, {}).items():
        setattr(config, field, value)
    if name == "deepseek_v3":
        config.rope_parameters |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    peer = type(peer)(config)
    randomize(peer.eval())
    return peer


def wide_peer(name: str):
    torch.manual_seed(0)
    peer = type(FAMILIES[name]())(WIDE_CONFIGS[name]())
    randomize(peer.eval())
    return peer


def check_logits(path: Path, peer) -> torch.nn.Module:
    """Compare fp32 logits with those of transformers; return our model."""
    model = load_model(GGUFCheckpoint(path), "cpu", torch.float32)
    want = peer(prompt()).logits
    model.setup_cache(1, 64)
    got = model(prompt(), torch.arange(40)[None], all_positions=True)
    assert (got - want).norm() / want.norm() < 1e-4
    return model


def check_text(model: torch.nn.Module, peer) -> None:
    """Compare greedy text with transformers'."""
    want = peer.generate(
        prompt(),
        attention_mask=torch.ones_like(prompt()),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    session = Session(model, 64)
    got = list(session.stream(prompt()[0].tolist(), 12, Sampling(temperature=0)))
    assert got == want[0, 40:].tolist()


def test_every_family_with_an_architecture_is_tested():
    assert {family.name for family in OURS.values() if family.gguf} == {
        {"qwen3_5_moe": "qwen3_5_moe_text", "gemma4": "gemma4_text"}.get(name, name)
        for name in READ
    }


@pytest.mark.parametrize("name", READ)
def test_names_are_those_of_the_package_gguf(name, tmp_path):
    """Values and tensors that the tests write, and a family reads, exist in llama.cpp."""
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", small_peer(name)))
    arch = file.values["general.architecture"]
    groups = (group for group in vars(gguf.Keys).values() if isinstance(group, type))
    keys = {key for group in groups for key in vars(group).values() if isinstance(key, str)}
    (family,) = {f for f in OURS.values() if f.gguf == arch and f.name.startswith(name)}
    read = {f"{{arch}}.{key}" for key in (KEYS | YARN_KEYS | dict(family.gguf_keys)).values()}
    assert read | {key.replace(f"{arch}.", "{arch}.") for key in file.values} <= keys
    (kind,) = (kind for kind, known in gguf.MODEL_ARCH_NAMES.items() if known == arch)
    stems = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[kind]}
    for tensor in file.tensors:
        stem = re.sub(r"^blk\.\d+\.", "blk.{bid}.", tensor)
        dense = re.search(r"\.ffn_(gate|up|down)\.weight", stem)  # Qwen's of llama.cpp have none
        assert stem in stems or stem.rpartition(".")[0] in stems or dense, tensor


@pytest.mark.parametrize("name", READ)
def test_logits_of_a_plain_file_match_transformers(name, tmp_path):
    peer = small_peer(name)
    types = {"ffn": "F16", "attn": "BF16"}
    path = write_gguf(
        tmp_path / "a.gguf", peer, lambda n: next((t for k, t in types.items() if k in n), "F32")
    )
    check_logits(path, peer)


@pytest.mark.parametrize("name", READ)
def test_logits_and_text_of_a_file_of_mixed_types_match_transformers(name, tmp_path):
    """q, k and v, or gate and up, are in several formats."""
    peer = wide_peer(name)
    path = write_gguf(tmp_path / "a.gguf", peer, mixed)
    check_text(check_logits(path, peer), peer)


def test_value_heads_by_place_keep_the_blocks_of_the_output(tmp_path):
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "a.gguf", wide_peer("qwen3_5_moe"), mixed))
    spec = {"format": "iq4_xs", "group_size": 256}
    assert checkpoint.format["modules"]["layers.0.attention.wout"] == spec


def test_weights_keep_the_published_numbers(tmp_path):
    """Each range of rows unpacks to the very numbers of the package `gguf`."""
    peer = wide_peer("qwen3_moe")
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "a.gguf", peer, mixed))
    assert {spec["format"] for spec in checkpoint.format["modules"].values()} == {
        *("q4_k", "q5_k", "q6_k", "q8_0", "iq4_nl")
    }
    assert checkpoint.format["rows"] == {
        "layers.0.attention.wqkv": [384, 128],
        "layers.0.ffn.experts.w13": [256, 256],
    }
    model = load_model(checkpoint, "cpu", torch.float32)
    state = peer.state_dict()
    values = model.layers[0].attention.wqkv[1].unpack()
    assert torch.equal(values, state["model.layers.0.self_attn.v_proj.weight"])
    down = model.layers[1].ffn.experts.w2.unpack()
    assert torch.equal(down, state["model.layers.1.mlp.experts.down_proj"])


@pytest.mark.parametrize("type", ["Q2_K", "Q3_K", "IQ2_XXS", "IQ3_XXS"])
def test_other_types_become_the_nearest_format(type, tmp_path, caplog):
    peer, types = wide_peer("qwen3_moe"), {"ffn_down": type}
    path = write_gguf(tmp_path / "a.gguf", peer, lambda name: types.get(name[6:14], "F32"))
    checkpoint = GGUFCheckpoint(path)
    nearest = {spec["format"] for spec in checkpoint.format["modules"].values()}
    assert f"rounded again: {type} as {nearest.pop()}" in caplog.text
    model = load_model(checkpoint, "cpu", torch.float32)
    want = peer.state_dict()["model.layers.0.mlp.experts.down_proj"]
    got = model.layers[0].ffn.experts.w2.unpack()
    assert (got - want).norm() / want.norm() < 0.08


@pytest.mark.parametrize("name", ("qwen3_moe", "glm4_moe_lite", "gpt_oss"))
def test_four_bit_floats_keep_their_scales(name, tmp_path):
    """NVFP4 has a scale of each tensor or expert beside it; MXFP4 has none."""
    peer = wide_peer(name)

    def types(tensor: str) -> str:
        if any(part in tensor for part in ("inp", "token_embd", "k_b.")):
            return "F32"
        return "MXFP4" if "attn_q" in tensor else "NVFP4"

    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "a.gguf", peer, types))
    formats = {spec["format"] for spec in checkpoint.format["modules"].values()}
    assert formats == {"nvfp4", "mxfp4"}
    check_logits(checkpoint.path, peer)


def test_blocks_of_32_with_a_least_keep_their_numbers(tmp_path, caplog):
    """llama.cpp writes Q5_0 where rows are no multiple of 256, as in Gemma 4's experts."""
    peer = small_peer("gemma4")
    types = {"attn_q.w": "Q5_0", "attn_k.w": "Q5_1", "ffn_gate": "Q5_0", "token_em": "Q5_0"}
    types |= {"attn_out": "Q4_1"}

    def type_of(name: str) -> str:
        return "F32" if "inp" in name else types.get(name.removeprefix("blk.0.")[:8], "F32")

    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "a.gguf", peer, type_of))
    assert checkpoint.format["modules"]["layers.0.ffn.experts.w13"]["format"] == "q5_1"
    assert checkpoint.format["modules"]["layers.0.attention.wo"]["format"] == "q4_1"
    assert "rounded" not in caplog.text
    model = load_model(checkpoint, "cpu", torch.float32)
    want = peer.state_dict()
    got = model.layers[0].ffn.experts.w13.unpack()
    assert torch.equal(got, want["model.layers.0.experts.gate_up_proj"])
    table = want["model.embed_tokens.weight"]
    assert torch.equal(model.embedding.weight, table) and torch.equal(model.head.unpack(), table)


GATE_AND_UP = {  # types of an expert's gate and up -> the format that holds both; None: none does
    ("Q4_K", "Q5_K"): "q5_k",
    ("Q4_0", "Q5_1"): "q5_1",
    ("IQ4_NL", "Q8_0"): "q8_0",
    ("Q3_K", "Q6_K"): "q6_k",
    ("IQ2_XXS", "Q2_K"): "q4_k",
    ("Q4_K", "Q6_K"): None,
    ("F16", "Q4_K"): None,
}


@pytest.mark.parametrize("types", GATE_AND_UP, ids=" ".join)
def test_gate_and_up_of_two_types_are_one_weight_if_a_format_holds_both(types, tmp_path, caplog):
    """Then the fused kernels run it, and only types of fewer than 4 bits are rounded again."""
    peer, (gate, up) = wide_peer("qwen3_moe"), types
    chosen = {"ffn_gate_exps": gate, "ffn_up_exps": up}
    path = write_gguf(tmp_path / "a.gguf", peer, lambda name: chosen.get(name[6:-7], "F32"))
    checkpoint, form = GGUFCheckpoint(path), GATE_AND_UP[types]
    found = {spec["format"] for spec in checkpoint.format["modules"].values()}
    assert bool(checkpoint.format["rows"]) == (form is None)
    assert found == {form} if form else form not in found
    if not any(type in ROUNDED for type in types):
        assert "rounded" not in caplog.text
        check_logits(path, peer)
    else:
        model = load_model(checkpoint, "cpu", torch.float32)
        want = peer.state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
        got = model.layers[0].ffn.experts.w13.unpack()
        assert (got - want).norm() / want.norm() < 0.08
        kept = [n for n, type in enumerate(types) if type not in ROUNDED]
        assert all(torch.equal(got.chunk(2, 1)[n], want.chunk(2, 1)[n]) for n in kept)


def test_experts_of_several_types_are_one_weight(tmp_path):
    """A file of 2023 has a tensor for each expert."""
    peer = wide_peer("mixtral")
    first = write_gguf(tmp_path / "a.gguf", peer, lambda n: "Q4_K" if "_exps" in n else "F32")
    file, writer = gguf.GGUFReader(first), gguf.GGUFWriter(tmp_path / "b.gguf", "llama")
    for field in file.fields.values():
        if field.name.startswith("llama."):
            add_value(writer, field.name, field.contents())
    for tensor in file.tensors:
        stem, kind = tensor.name.removesuffix("_exps.weight"), tensor.tensor_type
        if stem == tensor.name:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=kind)
            continue
        for e, blocks in enumerate(tensor.data):
            if e % 2:
                blocks = as_blocks_of("q5_k", torch.from_numpy(blocks.copy()), "Q4_K").numpy()
                kind = gguf.GGMLQuantizationType.Q5_K
            writer.add_tensor(f"{stem}.{e}.weight", blocks, raw_dtype=kind)
            kind = tensor.tensor_type
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GGUFCheckpoint(tmp_path / "b.gguf")
    assert checkpoint.format["modules"]["layers.0.ffn.experts.w2"]["format"] == "q5_k"
    check_logits(checkpoint.path, peer)


def test_types_that_cannot_be_run_are_refused_by_name(sound, tmp_path, monkeypatch):
    kind = find(sound, b"token_embd.weight") + 4 + 16
    damaged = with_bytes(sound, tmp_path / "a.gguf", kind, struct.pack("<I", 24))
    assert "tensors in I8, which cannot be run; take Q4_K_M" in refusal(damaged)
    unknown = with_bytes(sound, tmp_path / "c.gguf", kind, struct.pack("<I", 139))
    assert "the type 139, which is not known here; take a file in a type of" in refusal(unknown)
    monkeypatch.setattr("gguf_files.views.has_package", lambda: False)
    path = write_gguf(tmp_path / "b.gguf", wide_peer("qwen3_moe"), lambda name: "Q2_K")
    assert "in Q2_K, which take a package: pip install gguf" in refusal(path)


def test_a_split_file_is_read_from_any_part(tmp_path):
    peer = small_peer("qwen3_moe")
    first = write_gguf(tmp_path / "a.gguf", peer, split=20)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    check_logits(parts[1], peer)
    parts[0].rename(tmp_path / "b")
    parts[1].rename(parts[0])
    (tmp_path / "b").rename(parts[1])
    with pytest.raises(ValueError, match=f"{parts[0].name} is part 2 by its header"):
        GGUFCheckpoint(first)
    parts[1].unlink()
    with pytest.raises(ValueError, match=f"1 of its {len(parts)} parts are missing; fetch a-00002"):
        GGUFCheckpoint(first)


# Damage -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Return a small file with every kind of value."""
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_uint32("qwen3moe.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((4, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path) -> str:
    """Return the one line by which a file is refused; "" if it is not."""
    try:
        GGUFCheckpoint(path)
    except ValueError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return str(error)
    return ""


def with_bytes(path: Path, target: Path, at: int, data: bytes) -> Path:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(data)] = data
    target.write_bytes(whole)
    return target


HUGE = struct.pack("<Q", 1 << 60)
DAMAGES = {
    "wrong magic": (0, b"GGML", "does not begin with GGUF"),
    "version 1": (4, struct.pack("<I", 1), "version 1 is not supported"),
    "big-endian": (4, struct.pack(">I", 3), "big-endian"),
    "2^60 tensors": (8, HUGE, "beyond it"),
    "2^60 values": (16, HUGE, "beyond it"),
    "a key of 2^60 bytes": (24, HUGE, "absurd length"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line(damage, sound, tmp_path):
    at, data, why = DAMAGES[damage]
    assert why in refusal(with_bytes(sound, tmp_path / "a.gguf", at, data))


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert refusal(path).endswith("is a pointer of Git LFS: run git lfs pull in its folder")


def find(path: Path, text: bytes) -> int:
    return path.read_bytes().index(text) + len(text)


def test_damaged_tensors_and_arrays_are_one_line(sound, tmp_path):
    target = tmp_path / "a.gguf"
    array = find(sound, b"tokenizer.ggml.tokens") + 8  # after its type and its elements'
    assert "an array of" in refusal(with_bytes(sound, target, array, HUGE))
    axes = find(sound, b"token_embd.weight")
    assert "axes" in refusal(with_bytes(sound, target, axes, struct.pack("<I", 9)))
    assert "truncated" in refusal(with_bytes(sound, target, axes + 4, HUGE))
    assert "cannot be" in refusal(with_bytes(sound, target, axes + 4, b"\xff" * 8))
    kind, offset = axes + 4 + 16, axes + 4 + 16 + 4
    assert "not known here" in refusal(with_bytes(sound, target, kind, struct.pack("<I", 99)))
    beyond = with_bytes(sound, target, offset, struct.pack("<Q", 1 << 40))
    assert "truncated" in refusal(beyond)
    second = find(sound, b"blk.0.attn_q.weight") + 4 + 16 + 4
    assert "overlap" in refusal(with_bytes(sound, target, second, struct.pack("<Q", 32)))
    assert "not aligned" in refusal(with_bytes(sound, target, second, struct.pack("<Q", 33)))


@pytest.mark.parametrize("keep", [0, 3, 10, 30, 200, -1])
def test_a_truncated_file_is_one_line(keep, sound, tmp_path):
    target = tmp_path / "a.gguf"
    target.write_bytes(sound.read_bytes()[:keep])
    assert refusal(target)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_damage_is_more_than_a_line(sound, tmp_path_factory, data):
    """Random bytes anywhere raise ValueError alone, and take no memory."""
    whole = bytearray(sound.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        chunk = data.draw(st.sampled_from((b"\xff" * 8, b"\0" * 4, HUGE, b"\x01", b"\x7f")))
        whole[at : at + len(chunk)] = chunk
    target = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    target.write_bytes(whole)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal(target)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


ODD = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from((0, 1, 3, 2**31, 2**32 - 1)),
    st.floats(width=32),
    st.booleans(),
    any_text(max_size=8),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
)


class Files(dict):
    def __repr__(self):
        return "the small files"  # hypothesis shows it


@pytest.fixture(scope="module")
def small_files(tmp_path_factory) -> Files:
    """Return values and tensors of a small file of some families."""
    found = Files()
    for name in ("qwen3_moe", "qwen3_5_moe", "gemma4", "glm4_moe_lite", "gpt_oss"):
        path = write_gguf(tmp_path_factory.mktemp("odd") / "a.gguf", small_peer(name))
        file = GGUFFile(path)
        found[name] = file.values, {n: file.read(n).numpy().copy() for n in file.tensors}
    return found


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_odd_values_are_refused_in_one_line_or_run(small_files, tmp_path_factory, data):
    """Any value of any key, or a tensor that is missing."""
    values, tensors = small_files[data.draw(st.sampled_from(sorted(small_files)))]
    arch = values["general.architecture"]
    changed = dict(values) | {data.draw(st.sampled_from(sorted(values))): data.draw(ODD)}
    missing = data.draw(st.sampled_from([None, *tensors]))
    path = tmp_path_factory.getbasetemp() / "odd.gguf"
    writer = gguf.GGUFWriter(path, arch)
    for key, value in changed.items():
        value = value.tolist() if hasattr(value, "tolist") else value
        if key != "general.architecture":
            add_value(writer, key, value)
    for name, tensor in tensors.items():
        if name != missing:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refusal(path)


def test_types_are_those_of_gguf():
    for number, (name, block, nbytes) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (block, nbytes))


def test_opening_reads_no_tensor(sound):
    file = GGUFFile(sound)
    assert file.tensors["blk.0.attn_q.weight"].shape == (4, 32)
    assert file.read("blk.0.attn_q.weight").data_ptr() % 32 == file.parts[0].data.ctypes.data % 32


def test_another_architecture_is_refused_by_name(sound, tmp_path):
    at = find(sound, b"general.architecture") + 4 + 8
    assert "'qwen9moe'" in refusal(with_bytes(sound, tmp_path / "a.gguf", at, b"qwen9moe"))
    assert "lacks qwen3moe." in refusal(sound)
