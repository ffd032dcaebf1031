"""GGUF files in the commands and modes: text, ranks, offloading, folders of other programs."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from gguf_checkpoint import write_gguf
from test_gguf import check_logits, mixed, prompt, wide_peer
from test_gguf_tokenizer import TINY, sentencepiece_values
from transformers import MixtralForCausalLM

import quantize
import tp
from cli.model_name import ModelName, parse_model_name
from formats.row_ranges import RowRanges
from generate import embedded_checkpoint, generate, main
from gguf_files.locate import find_gguf
from gguf_files.opening import open_source
from gguf_files.source import GGUFCheckpoint
from hub.disk import stored_models
from hub.gguf_models import choose_file, prepare_gguf, quant_of
from models import args_of_checkpoint
from offload.plan import OffloadSettings
from runtime.loading import load_model
from runtime.sampling import Sampling
from runtime.session import Session
from tokenizer import load_tokenizer

TEXT = "def read_lines(path):\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """Return the embedded model as a GGUF file of F16 and Q8_0."""
    peer = MixtralForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    values = {
        key: value.tolist() if hasattr(value, "tolist") else value
        for key, value in sentencepiece_values(TINY).items()
    }
    path = tmp_path_factory.mktemp("tiny") / "tiny-moe-F16.gguf"
    return write_gguf(path, peer, lambda name: "F16", values)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def options(path: Path) -> list[str]:
    line = [str(ROOT / "generate.py"), "--checkpoint_path", str(path), "--prompt", TEXT]
    return [*line, "--temperature", "0", "--max_new_tokens", "24", "--dtype", "fp32", "--json"]


@pytest.fixture(scope="module")
def expected() -> str:
    """Return the greedy text of the converted embedded model."""
    path = embedded_checkpoint()
    session = Session(load_model(path, "cpu", torch.float32), 128)
    return generate(session, load_tokenizer(path), TEXT, 24, Sampling(temperature=0))["text"]


def test_the_command_writes_the_text_of_the_converted_model(
    tiny, expected, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", options(tiny))
    assert main() == 0
    assert json.loads(capsys.readouterr().out)["text"] == expected
    (folder,) = (tmp_path / "moe-fast" / "gguf").iterdir()
    assert folder.name.startswith("tiny-moe-F16-")
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert written < 200_000, "only the tokenizer is written"


@pytest.mark.slow
def test_two_ranks_write_the_same_text(tiny, expected, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = run(*launch, *options(tiny), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == expected


@pytest.mark.parametrize("name", ("qwen3_moe", "qwen3_5_moe"))
@pytest.mark.parametrize("parallel", tp.PARALLEL)
def test_ranks_read_their_rows_of_each_range(name, parallel, tmp_path):
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "a.gguf", wide_peer(name), mixed_halves))
    args, whole = args_of_checkpoint(checkpoint), load_model(checkpoint, "cpu", torch.float32)
    modules = dict(whole.named_modules())
    assert checkpoint.format["rows"]
    for rank in (0, 1):
        shard = tp.ModelShard(args, checkpoint.format, parallel, rank, 2)
        for path in checkpoint.format["rows"]:
            local = shard.model.get_submodule(path)
            for parameter, _ in local.named_parameters():
                tensor = shard.read(checkpoint, f"{path}.{parameter}", "cpu")
                owner, leaf = parameter.rpartition(".")[::2]
                assert tensor.shape == getattr(local.get_submodule(owner), leaf).shape
                setattr(local.get_submodule(owner), leaf, torch.nn.Parameter(tensor, False))
            full = weight(modules[path])
            parts = tp.shard_slices(full.shape, tp.shard_of(shard.table, path), rank, 2)
            assert torch.equal(weight(local), torch.cat([full[at] for at in parts], dim=-2))


def mixed_halves(name: str) -> str:
    """Return types of which two ranks can share rows and groups of rows."""
    down = "ffn_down" in name or "attn_output" in name or "ssm_out" in name
    return "Q8_0" if down else "F16" if "attn_v" in name else mixed(name)


def weight(module: torch.nn.Module) -> torch.Tensor:
    """Return the numbers of all ranges."""
    rows = [m.unpack() if hasattr(m, "unpack") else m.weight.float() for m in module]
    return torch.cat(rows, dim=-2)


def test_experts_of_mixed_files_are_offloaded(tmp_path):
    peer = wide_peer("qwen3_moe")
    path = write_gguf(tmp_path / "a.gguf", peer, mixed)
    model = load_model(
        GGUFCheckpoint(path), "cpu", torch.float32, experts=OffloadSettings(gpu_experts=2)
    )
    session, resident = (Session(m, 64) for m in (model, check_logits(path, peer)))
    ids, greedy = prompt()[0].tolist(), Sampling(temperature=0)
    assert list(session.stream(ids, 8, greedy)) == list(resident.stream(ids, 8, greedy))


def test_ranges_of_rows_compile(tmp_path):
    """A compiled block has the numbers of an eager one."""
    peer = wide_peer("qwen3_moe")
    model = check_logits(write_gguf(tmp_path / "a.gguf", peer, mixed), peer)
    attention = model.layers[0].attention.wqkv
    assert isinstance(attention, RowRanges)
    x = torch.randn(1, 1, 256)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), attention(x))


# Files of other programs --------------------------------------------------------------------------


def test_a_file_is_found_in_ollamas_folders(tiny, tmp_path):
    """By its blob, which has no suffix, and by the manifest that names it."""
    digest = hashlib.sha256(tiny.read_bytes()).hexdigest()
    blob = tmp_path / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir()
    blob.hardlink_to(tiny)
    manifest = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    manifest.parent.mkdir(parents=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    assert find_gguf(blob) == blob
    assert find_gguf(manifest) == blob
    assert open_source(manifest).path == blob
    blob.unlink()
    with pytest.raises(ValueError, match="pull the model again"):
        find_gguf(manifest)


def test_a_folder_with_one_model_is_that_model(tiny, tmp_path):
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    (tmp_path / "a-Q4_K_M.gguf").hardlink_to(tiny)
    assert find_gguf(tmp_path) == tmp_path / "a-Q4_K_M.gguf"
    (tmp_path / "a-Q8_0.gguf").hardlink_to(tiny)
    with pytest.raises(ValueError, match=r"has 2 GGUF files: name one of a-Q4_K_M.gguf, a-Q8_0"):
        find_gguf(tmp_path)
    assert find_gguf(tmp_path / "nothing") is None
    assert find_gguf(TINY) is None, "a folder with config.json is a checkpoint"


@pytest.mark.parametrize("named", ("a.gguf", "sha256-0", "."))
def test_quantize_refuses_a_file_however_it_is_named(named, tiny, tmp_path):
    file = tmp_path / (named if named != "." else "only.gguf")
    file.hardlink_to(tiny)
    line = ["--checkpoint_path", str(tmp_path / named), "--mode", "int4"]
    with pytest.raises(ValueError, match=f"{file} is a GGUF file, .*: python generate.py .*{file}"):
        quantize.run(quantize.build_parser().parse_args(line))


FILES = [
    "A-Q4_K_M.gguf",
    "A-UD-Q4_K_XL.gguf",
    "A-IQ4_XS.gguf",
    "mmproj-F16.gguf",
    "BF16/A-BF16-00001-of-00002.gguf",
    "BF16/A-BF16-00002-of-00002.gguf",
    "imatrix_unsloth.gguf",
]


def test_a_name_means_one_file_of_a_repository():
    sizes = dict.fromkeys(FILES, 1)
    assert [quant_of(file) for file in FILES[:5]] == [
        *("Q4_K_M", "UD-Q4_K_XL", "IQ4_XS", "F16", "BF16")
    ]
    for label, file in (("ud-q4_k_xl", FILES[1]), ("BF16", FILES[4]), (None, FILES[0])):
        name = parse_model_name("o/A-GGUF" + (f":{label}" if label else ""))
        assert choose_file(name, FILES, sizes) == file
    with pytest.raises(ValueError, match="no Q3_K_M; it must be one of BF16, IQ4_XS, Q4_K_M, UD-"):
        choose_file(parse_model_name("o/A-GGUF:Q3_K_M"), FILES, sizes)


@pytest.fixture
def own(monkeypatch, tmp_path) -> Path:
    """Return the folder of models; those of other programs are empty."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("MOE_FAST_CHECKPOINTS", str(tmp_path / "own"))
    return tmp_path / "own" / "someone" / "tiny-moe"


@pytest.mark.parametrize("folder", ("lmstudio", "hub"))
def test_a_model_of_another_programs_folder_is_not_downloaded(folder, tiny, tmp_path, own):
    places = {
        "lmstudio": ".lmstudio/models/o/A-GGUF",
        "hub": ".cache/huggingface/hub/models--o--A-GGUF/snapshots/abc",
    }
    path = tmp_path / places[folder] / "A-Q8_0.gguf"
    path.parent.mkdir(parents=True)
    path.hardlink_to(tiny)
    assert prepare_gguf(parse_model_name("o/A-GGUF:Q8_0"), None) == path
    assert prepare_gguf(parse_model_name("o/A-GGUF"), None) == path


def test_the_named_file_is_downloaded_and_found_again(hub, own, tiny):
    hub.files = {
        "A-Q8_0.gguf": tiny.read_bytes(),
        "A-Q4_K_M.gguf": b"GGUF another",
        "mmproj-F16.gguf": b"GGUF vision",
        "config.json": b"{}",
    }
    name = ModelName("someone/tiny-moe", "q8_0")
    path = prepare_gguf(name, None, progress=False)
    assert path == own / "A-Q8_0.gguf" and path.read_bytes() == tiny.read_bytes()
    assert [p.name for p in own.iterdir() if p.is_file()] == ["A-Q8_0.gguf"]
    asked = len(hub.requests)
    assert prepare_gguf(name, None) == path and len(hub.requests) == asked
    (stored,) = stored_models()
    assert (stored.family, stored.format, stored.bytes) == ("gguf", "download", path.stat().st_size)
    with pytest.raises(ValueError, match="there is no Q2_K; it must be one of Q4_K_M, Q8_0"):
        prepare_gguf(ModelName("someone/tiny-moe", "Q2_K"), None)
    hub.files = {"config.json": b"{}"}
    with pytest.raises(ValueError, match="holds no GGUF model; choose one"):
        prepare_gguf(ModelName("someone/tiny-moe", "Q2_K"), None)
