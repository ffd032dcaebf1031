"""What is particular to Qwen4-Exp: residual streams, an index of blocks, a table of n-grams."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chunks import all_logits, assert_compiled_is_eager, run_chunks
from conftest import COMMON, FAMILIES, HYBRID, in_blocks, randomize
from published_files import assert_text_is_the_same
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Qwen4ExpConfig,
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
    Qwen4ExpTextConfig,
)
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

from checkpoint import Checkpoint
from formats import FORMATS
from generate import load_model
from memory.plan import GB, Memory, ModelSizes, Setup, fit
from model import Transformer
from models import ARCHITECTURES, args_from_hf, build_model
from models.converter import convert
from models.layers.gated_delta_net import DeltaNet
from models.layers.hyper_connections import LastNorm, StreamNorm, Streams, SublayerMixer
from models.layers.indexed_attention import IndexedAttention
from models.layers.ngram_embedding import NgramBlock
from models.random_weights import number_format
from offload.plan import OffloadSettings
from runtime.kernel_choice import why_not_computed
from runtime.memory import Shortage
from runtime.sampling import Sampling
from runtime.session import Session
from runtime.speculation import Speculation

pytestmark = pytest.mark.usefixtures("few_threads")
GREEDY = Sampling(temperature=0)
PUBLISHED = "Qwen3.8-Flash-Next"
END = 2  # token that ends a text, before which no n-gram reaches
VISION = dict(
    depth=1,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    out_hidden_size=64,
    num_position_embeddings=16,
)


def text_config(**changes) -> dict:
    """Return the small model's config, with changes."""
    config = FAMILIES["qwen4_exp"]().config.to_dict()
    kept = {key: config[key] for key in (*COMMON, *HYBRID)}
    own = "hc_", "output_gate", "indexer_", "ple_", "heads_per", "ngram_", "make_", "split_"
    return kept | {key: config[key] for key in config if key.startswith(own)} | changes


def prompt(length: int, seed: int = 1, batch: int = 1) -> Tensor:
    """Draw tokens [batch, length], of which some end a text."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(160, (batch, length), generator=generator)
    ends = torch.rand(batch, length, generator=generator) < 0.1
    return torch.where(ends, END, tokens)


@pytest.fixture
def model(make_family) -> Transformer:
    return load_model(make_family("qwen4_exp").directory, "cpu")


# Against transformers -----------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", ((), (128,), (1, 2, 129, 160)))
@pytest.mark.parametrize("length", (40, 300))
def test_prompts_with_ends_of_texts_match_transformers(make_family, model, length, sizes):
    """The index chooses 2 of up to 75 blocks."""
    tokens = prompt(length)
    want = make_family("qwen4_exp").peer(tokens).logits
    got = run_chunks(model, tokens, *(n for n in sizes if n < length - sum(sizes)))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_a_long_prompt_token_by_token(make_family, model):
    tokens = prompt(80)
    want = make_family("qwen4_exp").peer(tokens).logits
    model.setup_cache(1, 128)
    steps = [model(tokens[:, n : n + 1], torch.tensor([[n]])) for n in range(80)]
    torch.testing.assert_close(torch.stack(steps, dim=1), want, rtol=0, atol=1e-4)


def test_a_padded_batch_matches_transformers(make_family, model):
    tokens, lengths = prompt(60, batch=3), torch.tensor([60, 37, 2])
    peer = make_family("qwen4_exp").peer
    model.setup_cache(3, 96)
    positions = torch.arange(60).expand(3, -1)
    got = model(tokens, positions, last=lengths - 1, all_positions=True)
    for row, n in enumerate(lengths.tolist()):
        want = peer(tokens[row : row + 1, :n]).logits[0]
        torch.testing.assert_close(got[row, :n], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("gate", (None, "silu", "sigmoid"))
def test_both_output_gates_match_transformers(tmp_path, gate):
    torch.manual_seed(0)
    config = Qwen4ExpTextConfig(**text_config(output_gate_type=gate, hc_count=4))
    peer = Qwen4ExpForCausalLM(config).eval()
    randomize(peer)
    peer.save_pretrained(tmp_path)
    tokens, directory = prompt(40), convert(tmp_path, dtype="fp32", progress=False)
    assert Checkpoint(directory).args["delta_gate"] == (gate or "silu")
    torch.testing.assert_close(
        all_logits(directory, tokens), peer(tokens).logits, rtol=0, atol=1e-4
    )


def test_a_mixer_is_transformers(model):
    """A mixer of a sublayer, and that before the head."""
    config = Qwen4ExpTextConfig(**text_config())
    x = torch.randn(2, 5, config.hc_count, config.hidden_size)
    for use_combine in (True, False):
        theirs = Qwen4ExpTextGatedResidual(config, use_combine)
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        names = ("down", "input_mix_weight_down"), ("up", "input_mix_weight_up")
        names += (("inject", "block_inject_weight"),) if use_combine else ()
        norm = LastNorm(model.args) if not use_combine else StreamNorm(model.args)
        mixer = SublayerMixer(model.args) if use_combine else norm.mixer
        norm.weight.data = theirs.hc_norm.weight.data.view_as(norm.weight) + 1
        for ours, name in names:
            getattr(mixer, ours).weight.data = getattr(theirs, name).weight.data
        want = theirs(x.flatten(2))
        if not use_combine:
            torch.testing.assert_close(norm(x), want)
            continue
        normed = norm(x)
        torch.testing.assert_close(mixer(normed), want[0])
        torch.testing.assert_close(Streams(x, mixer.parts(normed)).weights(), want[2])


def test_a_sublayers_output_is_added_with_each_streams_weight(model):
    block = model.layers[0]
    x, y = torch.randn(2, 3, 3, 64), torch.randn(6, 64)
    streams = Streams(x, torch.randn(2, 3, 3, 3))
    after, normed = block.add_ffn(streams, y, block.ffn_norm)
    want = x + 2 * (streams.parts.mean(-1, keepdim=True)).sigmoid() * y.view(2, 3, 1, 64)
    torch.testing.assert_close(after, want)
    torch.testing.assert_close(normed, block.ffn_norm(want))


# The published layout -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_vision() -> Qwen4ExpForConditionalGeneration:
    """The published architecture, with weights that matter."""
    torch.manual_seed(0)
    rope = HYBRID["rope_parameters"] | {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    config = Qwen4ExpConfig(text_config=text_config(rope_parameters=rope), vision_config=VISION)
    peer = Qwen4ExpForConditionalGeneration(config).eval()
    randomize(peer)
    return peer


def add_head(directory: Path) -> None:
    """Add some tensors of a head for multi-token prediction, as the published files have them."""
    tensors = load_file(directory / "model.safetensors")
    tensors |= {
        "mtp.fc_embedding.weight": torch.ones(64, 64),
        "mtp.fc_hidden.weight": torch.ones(1),
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("fused", (False, True))
def test_the_text_part_of_a_model_with_vision(with_vision, tmp_path, capsys, fused):
    """As published: a table in parts, experts one by one or in one tensor, constants, a head."""
    with_vision.save_pretrained(tmp_path, save_original_format=not fused)
    add_head(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    table = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
    assert {f"{table}.shard_{n}.weight" for n in range(4)} <= names or fused
    assert f"{table.rsplit('.', 1)[0]}.layer_multipliers" in names
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    directory = convert(tmp_path, dtype="fp32")
    log, count = capsys.readouterr().err, sum(name.startswith("model.visual.") for name in names)
    assert f"model.visual.* ({count} tensors), mtp.* (2 tensors)" in log
    tokens = prompt(60)
    want = with_vision(tokens).logits
    torch.testing.assert_close(all_logits(directory, tokens), want, rtol=0, atol=1e-4)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == END


def test_the_text_model_alone_gives_the_same(with_vision, tmp_path):
    text = Qwen4ExpForCausalLM(with_vision.config.text_config).eval()
    assert_text_is_the_same(with_vision, text, "qwen4_exp_text", tmp_path)


def test_published_fp8(tmp_path):
    """As Qwen publishes it: routed experts in blocks, the table with one scale, all else bf16."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, moe_intermediate_size=128, shared_expert_intermediate_size=128)
    peer = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**text_config(**sizes))).eval()
    randomize(peer)
    peer.bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain, scale = dict(tensors), torch.tensor([0.01], dtype=torch.bfloat16)
    for name, tensor in list(tensors.items()):
        if ".experts." in name:
            codes, scales = in_blocks(tensor.float())
            tensors |= {name: codes, f"{name}_scale_inv": scales}
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            plain[name] = codes.float() * wide[: tensor.shape[0], : tensor.shape[1]]
        if ".shard_" in name:
            tensors[name] = (tensor.float() / scale.float()).to(torch.float8_e4m3fn)
            plain[name] = tensors[name].float() * scale.float()
    tensors["model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale"] = scale
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    directory = convert(tmp_path, dtype="fp32", progress=False)
    modules = Checkpoint(directory).format["modules"]
    kinds = {path.split(".", 2)[2]: spec["format"] for path, spec in modules.items()}
    experts = {"ffn.experts.w13": "fp8b", "ffn.experts.w2": "fp8b"}
    assert kinds == experts | {"ngrams.table": "fp8"} and directory.name == "model_fp8b"
    target = tmp_path / "plain"
    target.mkdir()
    plain = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in plain.items()
    }
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    peer = Qwen4ExpForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokens = prompt(40)
    got, want = all_logits(directory, tokens), peer(tokens).logits
    assert (got - want).norm() < 1e-4 * want.norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hc_count": 1}, "hc_count = 1 .*at least 2"),
        ({"output_gate_type": "gelu"}, "output_gate_type = 'gelu' .*'silu' or 'sigmoid'"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads = 2 .*only 1"),
        ({"indexer_budget": 9}, "indexer_budget = 9 .*indexer_compress_ratio = 4"),
        ({"indexer_head_dim": 12}, "indexer_head_dim = 12 .*a multiple of 8"),
        ({"indexer_n_heads": None}, "indexer_n_heads = None"),
        ({"ple_layer_ids": [0]}, r"ple_layer_ids = \[0\] .*layers from 1 to 4"),
        ({"ple_layer_ids": [5]}, r"ple_layer_ids = \[5\] .*layers from 1 to 4"),
        ({"ple_layer_ids": [4]}, r"ple_layer_ids = \[4\] .*layer 4 has attention"),
        ({"ple_layer_ids": [True]}, r"ple_layer_ids = \[True\]"),
        ({"ple_embed_dim": 30}, "ple_embed_dim = 30 .*the 4 heads"),
        ({"ngram_size": 1}, "ngram_size = 1 .*at least 2"),
        ({"ngram_vocab_size_base": 0}, "ngram_vocab_size_base = 0"),
        ({"eos_token_id": None}, "eos_token_id = None .*ends a text"),
        ({"eos_token_id": [160]}, r"eos_token_id = \[160\] .*ends a text"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types = "),
    ],
)
def test_a_nested_value_is_refused_by_its_key(changes, message):
    text = Qwen4ExpTextConfig(**text_config()).to_dict() | changes
    config = {"architectures": ["Qwen4ExpForConditionalGeneration"], "text_config": text}
    with pytest.raises(ValueError, match=message) as error:
        args_from_hf(config)
    assert "\n" not in str(error.value)


def test_published_sizes():
    """Its files have 180.0 B numbers: 2.6 B of a head, 0.4 B of vision, 35 of hashes."""
    args = ARCHITECTURES[PUBLISHED]
    model = build_model(args)
    numbers = sum(p.numel() for p in model.parameters())
    assert numbers == 179_999_981_459 - 2_607_150_848 - 448_931_056 - 35
    kinds = [type(block.attention) for block in model.layers]
    assert (kinds.count(DeltaNet), kinds.count(IndexedAttention)) == (36, 12)
    assert [n for n, block in enumerate(model.layers) if isinstance(block, NgramBlock)] == [1]
    assert model.layers[1].ngrams.table.weight.numel() == 51_200_245_760


def test_published_hashes():
    """The numbers that the published file has beside its table."""
    ngrams = build_model(ARCHITECTURES[PUBLISHED]).layers[1].ngrams
    ngrams.allocate(1, 16, torch.empty(0))
    assert ngrams.multipliers.tolist() == [23703573157769, 20109073645365, 8052911324071]
    assert ngrams.primes[:3].tolist() == [20000003, 20000023, 20000033]
    assert ngrams.primes[-1] == 20000171 and ngrams.begins[-1] == 300001275


# Running ------------------------------------------------------------------------------------------


def test_a_prefix_is_used_again(make_family, model):
    """A prompt that goes on with another's tokens, and one that leaves it."""
    directory, tokens = make_family("qwen4_exp").directory, prompt(90)[0].tolist()
    other = [*tokens[:50], *prompt(20, seed=3)[0].tolist()]
    session = Session(model, 160)
    for ids in (tokens[:60], tokens, other):
        want = list(Session(load_model(directory, "cpu"), 160).stream(ids, 12, GREEDY))
        assert list(session.stream(ids, 12, GREEDY)) == want


@pytest.mark.parametrize("count", (pytest.param(1, marks=pytest.mark.slow), 4))
def test_drafts_change_no_token(make_family, model, count):
    """Refused drafts leave no trace in ids, in the index, and in states."""
    ids = prompt(30)[0].tolist() * 2
    plain = Session(load_model(make_family("qwen4_exp").directory, "cpu"), 160)
    speculation = Speculation(Session(model, 160), count)
    assert list(speculation.stream(ids, 24, GREEDY)) == list(plain.stream(ids, 24, GREEDY))
    assert speculation.drafted > speculation.accepted


@pytest.mark.slow
def test_compiled_tokens_are_the_same(make_family):
    directory = make_family("qwen4_exp").directory
    assert_compiled_is_eager(directory, prompt(70)[0].tolist())


def test_the_fused_kernels_compute_its_layers(make_family, model):
    """In bf16; why not, one line says."""
    assert why_not_computed(model) == "layer 0: no kernel for torch.float32 rows of 64 numbers"
    assert (
        why_not_computed(load_model(make_family("qwen4_exp").directory, "cpu", torch.bfloat16))
        is None
    )


def test_the_table_gets_8_bits_in_every_format():
    """Rows that are looked up are unpacked one by one."""
    args = ARCHITECTURES[PUBLISHED]
    for mode in ("int4", "fp8", "hqq3"):
        modules = number_format(mode, args)["modules"]
        assert modules["layers.1.ngrams.table"]["format"] == "fp8"
        assert modules["layers.0.attention_mixer.down"]["format"] in FORMATS
        assert not any(path.endswith((".inject", ".windex")) for path in modules)


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", (False, True))
def test_the_plan_counts_the_table_in_host_memory(offload):
    """Beside offloaded experts, for each rank, and not on the GPU."""
    args = ARCHITECTURES[PUBLISHED]
    setup = Setup(ModelSizes(args, number_format("int4", args), torch.bfloat16), 4096)
    sizes = setup.sizes
    assert sizes.tables == 320_001_536 * (160 + 2)  # codes, and a scale a row
    need = sizes.tables
    if offload:
        setup = replace(setup, offload=OffloadSettings(gpu_experts=64))
        need += sizes.experts.host_bytes
    plan = fit(setup, Memory(80 * GB, need))
    assert plan.length == 4096
    with pytest.raises(Shortage, match="host memory"):
        fit(setup, Memory(80 * GB, need - 1))
    assert sizes.weights < 67 * GB
    of_two = replace(setup, sizes=sizes.changed(ranks=2))
    with pytest.raises(Shortage, match=r"tables that stay .* need 103\.7 GB"):
        fit(of_two, Memory(80 * GB, 2 * sizes.tables - 1))


def test_a_cpu_reads_the_table_from_its_file():
    args = ARCHITECTURES[PUBLISHED]
    setup = Setup(ModelSizes(args, number_format("int4", args), torch.bfloat16), 1024)
    assert fit(replace(setup, mapped=True), Memory(None, 8 * GB)).length == 1024
    with pytest.raises(Shortage, match="tables that stay in host memory"):
        fit(setup, Memory(None, 8 * GB))
