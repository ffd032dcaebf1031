"""What is particular to Qwen3-Next: its tensors' order, norms in fp32."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from chunks import prompt, run
from conftest import HYBRID, in_blocks
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import tp
from benchmarks.decode_speed import cache_in_use
from checkpoint import Checkpoint
from formats import FORMATS
from generate import load_model
from model import KVCache, Transformer
from models import ARCHITECTURES, build_model
from models.converter import convert
from models.layers.gated_delta_net import DeltaState
from models.layers.gated_hybrid import HybridArgs
from runtime.sampling import Sampling
from runtime.session import Session

GREEDY = Sampling(temperature=0)


@pytest.fixture
def model(make_family) -> Transformer:
    return load_model(make_family("qwen3_next").directory, "cpu")


# Arithmetic ---------------------------------------------------------------------------------------


def test_published_sizes():
    """The model card says 80 B in total; config.json and this model give 79.67 B."""
    args = ARCHITECTURES["Qwen3-Next-80B-A3B"]
    assert args.full_layers == tuple(range(3, 48, 4)) and args.rotary_dim == 64
    assert sum(p.numel() for p in build_model(args).parameters()) == 79_674_391_296


# Several processes --------------------------------------------------------------------------------


def test_key_heads_that_ranks_cannot_share_are_refused():
    sizes = dict(dim=64, n_layer=1, n_head=8, n_kv_head=2, head_dim=16, intermediate=64)
    sizes |= dict(n_expert=4, n_active=2, vocab_size=160, max_position=64, qk_norm="head")
    args = HybridArgs("qwen3_next", **sizes, rotary_dim=4, delta_key_heads=2, delta_value_heads=8)
    why = tp.shard_refusal(args, {}, 4, "tensor")
    assert why.endswith("2 (key heads of Gated DeltaNet) cannot be divided by 4: start 1, 2")
    assert tp.shard_refusal(args, {}, 2, "tensor") is None
    local = tp.local_args(args, 2, "tensor")
    assert (local.delta_key_heads, local.delta_value_heads, local.n_head) == (1, 4, 4)


# Conversion ---------------------------------------------------------------------------------------


def by_key_head(t: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Split each key head's rows into its parts -> each part of all heads."""
    heads = t.unflatten(0, (2, -1)).split(sizes, dim=1)
    return [part.flatten(0, 1) for part in heads]


@pytest.mark.parametrize("fused", (False, True))
def test_tensors_are_reordered(make_family, tmp_path, fused):
    peer = make_family("qwen3_next").peer
    peer.save_pretrained(tmp_path, save_original_format=not fused)
    ours, theirs = Checkpoint(convert(tmp_path, dtype="fp32", progress=False)), peer.state_dict()
    q, k, v, z = by_key_head(
        theirs["model.layers.2.linear_attn.in_proj_qkvz.weight"], (16, 16, 48, 48)
    )
    b, a = by_key_head(theirs["model.layers.2.linear_attn.in_proj_ba.weight"], (2, 2))
    assert torch.equal(ours.read("layers.2.attention.wqkvz.weight"), torch.cat((q, k, v, z)))
    assert torch.equal(ours.read("layers.2.attention.wba.weight"), torch.cat((b, a)))
    heads = theirs["model.layers.3.self_attn.q_proj.weight"].unflatten(0, (4, 2, 32))
    wqkv = ours.read("layers.3.attention.wqkv.weight")
    assert torch.equal(wqkv[:128], heads[:, 0].flatten(0, 1))
    assert torch.equal(wqkv[-128:], heads[:, 1].flatten(0, 1))
    conv = theirs["model.layers.0.linear_attn.conv1d.weight"].squeeze(1)
    assert torch.equal(ours.read("layers.0.attention.conv.weight"), conv)
    w13 = theirs["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(ours.read("layers.0.ffn.experts.w13.weight"), w13)


def test_norms_and_decay_stay_in_fp32(make_family, tmp_path):
    """1 + w of a bf16 w needs more digits than bf16 has."""
    source = make_family("qwen3_next").peer
    peer = Qwen3NextForCausalLM(source.config)
    peer.load_state_dict(source.state_dict())
    peer.bfloat16().save_pretrained(tmp_path)
    directory, theirs = convert(tmp_path, progress=False), peer.state_dict()
    ours = Checkpoint(directory)
    renamed = {
        "norm.weight": "model.norm.weight",
        "layers.0.attention_norm.weight": "model.layers.0.input_layernorm.weight",
        "layers.1.ffn_norm.weight": "model.layers.1.post_attention_layernorm.weight",
        "layers.3.attention.q_norm.weight": "model.layers.3.self_attn.q_norm.weight",
        "layers.3.attention.k_norm.weight": "model.layers.3.self_attn.k_norm.weight",
    }
    for name, original in renamed.items():
        assert torch.equal(ours.read(name), 1 + theirs[original].float()), name
    in_fp32 = {name for name, (_, dtype) in ours.tensors.items() if dtype == torch.float32}
    assert in_fp32 >= {*renamed, "layers.0.attention.a_log"}
    assert "layers.0.attention.norm.weight" not in in_fp32  # published with its 1
    for dtype in (None, torch.float16):
        model = load_model(directory, "cpu", dtype)
        kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
        assert kept == in_fp32
        states = model.setup_cache(1, 32)
        assert states[3].kv.dtype == (dtype or torch.bfloat16)
        assert states[0].state.dtype == torch.float32
        assert states[0].window.dtype == (dtype or torch.bfloat16)
        assert run(model, prompt(9)).isfinite().all()


def test_mtp_tensors_are_left_out(make_family, tmp_path, capsys):
    shutil.copytree(make_family("qwen3_next").hf_directory, tmp_path / "hf")
    for path in (tmp_path / "hf").glob("model_*"):
        shutil.rmtree(path)
    mtp = {"mtp.fc.weight": torch.zeros(4), "mtp.norm.weight": torch.ones(4)}
    add_tensors(tmp_path / "hf", mtp)
    output = convert(tmp_path / "hf", dtype="fp32")
    assert capsys.readouterr().err.count("left out, as they are not run: mtp.* (2 tensors)\n") == 1
    reference = Checkpoint(make_family("qwen3_next").directory)
    assert Checkpoint(output).tensors == reference.tensors


def add_tensors(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Add a file with tensors to a Hugging Face directory."""
    save_file(tensors, directory / "more.safetensors")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(tensors, "more.safetensors")
    index.write_text(json.dumps(content))


# FP8 as published ---------------------------------------------------------------------------------

IN_BLOCKS = HYBRID | dict(
    hidden_size=256,
    vocab_size=160,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=128,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
    max_position_embeddings=256,
)
KEPT = "conv1d", "in_proj_ba", "mlp.gate.", "shared_expert_gate", "embed", "lm_head", "norm"


def test_published_fp8_is_kept(tmp_path):
    torch.manual_seed(0)
    peer = Qwen3NextForCausalLM(Qwen3NextConfig(**IN_BLOCKS)).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.normal_(0, 0.1).add_(-2.0 if name.endswith("A_log") else 0.0)
    peer.bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    state = peer.float().state_dict()
    for name, tensor in list(tensors.items()):
        if tensor.dim() == 2 and not any(part in name for part in KEPT):
            codes, scale = in_blocks(tensor.float())
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scale
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    fp8 |= {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    directory = convert(tmp_path, dtype="fp32", progress=False)
    modules = Checkpoint(directory).format["modules"]
    paths = "attention.wqkvz", "attention.wout", "ffn.experts.w13", "ffn.shared.w2"
    assert {f"layers.0.{path}" for path in paths} <= modules.keys()
    assert "layers.3.attention.wqkv" in modules and "layers.0.attention.wba" not in modules
    model = load_model(directory, "cpu")
    # Whole blocks of rows moved: those of a key head's q, k, v and z, of a head's query and gate.
    codes, scale = in_blocks(state["model.layers.0.linear_attn.in_proj_qkvz.weight"])
    published = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    wqkvz = FORMATS["fp8b"].unpack(model.layers[0].attention.wqkvz.parts(), 128)
    parts = by_key_head(published, (128, 128, 256, 256))
    torch.testing.assert_close(wqkvz, torch.cat(parts))
    codes, scale = in_blocks(state["model.layers.3.self_attn.q_proj.weight"])
    published = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    wqkv = FORMATS["fp8b"].unpack(model.layers[3].attention.wqkv.parts(), 128)
    heads = published.unflatten(0, (2, 2, 128))
    torch.testing.assert_close(wqkv[:256], heads[:, 0].flatten(0, 1))
    torch.testing.assert_close(wqkv[-256:], heads[:, 1].flatten(0, 1))
    model.setup_cache(1, 64)
    assert run(model, prompt(20)).isfinite().all()


def test_a_token_reads_a_recurrent_state_once_and_a_cache_up_to_its_position(model):
    session = Session(model, 100)
    near, far = (cache_in_use(session, position) for position in (10, 20))
    deltas = [state for state in session.states if isinstance(state, DeltaState)]
    states = sum(state.state.nbytes + state.window.nbytes for state in deltas)
    cache = next(state for state in session.states if isinstance(state, KVCache))
    assert 0 < near - states == (far - states) // 2 == 10 * cache.nbytes // session.cache_len
