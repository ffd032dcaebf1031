"""Models of the Hub by name, against a local Hub: made while downloaded, listed, removed."""

import errno
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from conftest import HYBRID_CHECKPOINT
from hub_server import REPO, ROOT, TOKENIZER, environment
from published_files import LAYOUTS, write
from safetensors.torch import load_file, save

import eval
import generate
import quantize
import serve
from checkpoint import Checkpoint
from cli import model_name
from cli.model_name import ModelName, check_format, parse_model_name
from formats import FORMATS, PLAIN
from formats.quantizer import plan_format
from generate import EMBEDDED
from host.resumable import ResumableDirectory, partial_path
from hub import disk, shards
from hub import prepare as script
from hub.disk import stored_models
from hub.prepare import Settings, prepare
from models import args_of_checkpoint, build_model
from models.converter import convert

NAME = ModelName(REPO)
INT8 = ModelName(REPO, "int8")
QUIET = Settings(progress=False)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Run every test in a folder of its own; return the model's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOE_FAST_CHECKPOINTS", raising=False)
    return tmp_path / "checkpoints" / REPO


@pytest.fixture
def source(hub, make_family) -> Path:
    """Put a tiny model on the Hub, in ten shards; return its directory."""
    return put_on_hub(hub, make_family("mixtral").hf_directory)


def put_on_hub(hub, directory: Path) -> Path:
    files = (path for path in directory.iterdir() if path.is_file())
    files = {path.name: path.read_bytes() for path in files}
    hub.files = files if "tokenizer.model" in files else TOKENIZER | files
    return directory


@cache
def expected_of(source: Path, mode: str | None = None) -> Checkpoint:
    """Return `expected` of a directory that no test changes."""
    with TemporaryDirectory() as folder:
        return expected(source, Path(folder, "made"), mode)


def expected(source: Path, target: Path, mode: str | None = None) -> Checkpoint:
    """Convert and quantize a directory in two steps."""
    target.mkdir()
    plain = convert(source, target / "plain", progress=False)
    if mode is None:
        return Checkpoint(plain)
    opened = Checkpoint(plain)
    model = build_model(args_of_checkpoint(opened))
    format = plan_format(model, *script.roles(ModelName(REPO, mode)), dtype="bf16")
    model = build_model(args_of_checkpoint(opened))
    made = script.quantize(opened, format, model, target / "packed", progress=False)
    return Checkpoint(made)


def assert_same(made: Path, other: Checkpoint) -> None:
    """Compare two checkpoints: args, format, and the checksum of every file."""
    checkpoint = Checkpoint(made)
    checkpoint.verify(progress=False)
    assert (checkpoint.args, checkpoint.format) == (other.args, other.format)
    assert checkpoint.files == other.files


def downloads(hub) -> list[str]:
    """Return the weights that were downloaded, headers aside."""
    names = [name for method, name, part in hub.requests if method == "GET" and part is None]
    return [name for name in names if name.endswith(".safetensors")]


def weights(hub) -> list[str]:
    return sorted(name for name in hub.files if name.endswith(".safetensors"))


def command(module, monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, arguments)])
    return module.main()


def error_of(module, monkeypatch, capsys, *arguments) -> str:
    """Run a command that fails as a user's mistake does: one line, code 2; return the line."""
    capsys.readouterr()
    try:
        assert command(module, monkeypatch, *arguments) == 2
    except SystemExit as ended:
        assert ended.code == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert out == "" and len(lines) == 1 and err.rstrip().endswith(lines[0]), err
    return lines[0]


# Names --------------------------------------------------------------------------------------------


def test_formats_are_those_that_there_are():
    assert tuple(FORMATS) == model_name.format_names() and model_name.PLAIN == PLAIN
    assert {*model_name.PUBLISHED} <= {PLAIN, *FORMATS} - {"hqq4", "hqq3", "hqq2"}
    assert model_name.PUBLISHED[: len(model_name.UNRECORDED)] == model_name.UNRECORDED


@pytest.mark.parametrize(
    ("text", "parsed", "roles", "canonical"),
    (
        ("Qwen/Qwen3-30B-A3B", ("Qwen/Qwen3-30B-A3B", None), ("bf16", "bf16"), None),
        ("Qwen/Qwen3-30B-A3B:int4", ("Qwen/Qwen3-30B-A3B", "int4"), ("int4", "int4"), "int4"),
        ("a/b_1.c:hqq4-hqq2", ("a/b_1.c", "hqq4-hqq2"), ("hqq4", "hqq2"), "hqq4-hqq2"),
        ("a/b:int4-int4", ("a/b", "int4-int4"), ("int4", "int4"), "int4"),
        ("a/b:mxfp4", ("a/b", "mxfp4"), ("bf16", "mxfp4"), "mxfp4"),
        ("a/b:bf16-mxfp4", ("a/b", "bf16-mxfp4"), ("bf16", "mxfp4"), "mxfp4"),
    ),
)
def test_names(text, parsed, roles, canonical):
    name = parse_model_name(text)
    assert name == parsed and str(name) == text
    assert script.roles(name) == roles and script.canonical(name).format == canonical


@pytest.mark.parametrize(
    ("text", "name"),
    (
        ("https://huggingface.co/Qwen/Qwen3-30B-A3B", ("Qwen/Qwen3-30B-A3B", None)),
        ("https://huggingface.co/Qwen/Qwen3-30B-A3B/", ("Qwen/Qwen3-30B-A3B", None)),
        ("hf.co/unsloth/A-GGUF:Q4_K_M", ("unsloth/A-GGUF", "Q4_K_M")),
        ("huggingface.co/a/b:int4", ("a/b", "int4")),
        ("https://huggingface.co/a/b/tree/main", ("a/b", None)),
        ("https://huggingface.co/a/b/tree/main/?not-for-all-audiences=true#x", ("a/b", None)),
        ("https://huggingface.co/a/b?library=transformers", ("a/b", None)),
        ("https://huggingface.co/a/b#usage:1", ("a/b", None)),
    ),
)
def test_a_pages_address_is_a_name(text, name):
    assert parse_model_name(text) == name


def test_a_path_is_told_its_option(hub, monkeypatch, capsys):
    for text in ("./a/b", "/a/b", "~/a/b"):
        line = error_of(generate, monkeypatch, capsys, f"--model={text}")
        assert "or a path as --checkpoint_path" in line


@pytest.mark.parametrize(
    "text",
    (
        "name",
        "a/b/c",
        "https://huggingface.co/",
        "https://huggingface.co/a",
        "https://huggingface.co/a/b/tree/v1",  # another revision
        "https://huggingface.co/a/b/blob/main/x.gguf",
        "https://huggingface.co/a/b?show_file_info=x.gguf",
        "a/b/tree/main",
        "a/b?x",
        "https://x.y/a/b",
        "../x",
        "a/..",
        "a--b/c",
        "-a/b",
        "/etc/passwd",
        "a/b:",
        "a/b:x/y",
    ),
)
def test_other_names_are_refused(text, hub, monkeypatch, capsys):
    line = error_of(generate, monkeypatch, capsys, f"--model={text}")
    assert "give it as OWNER/NAME[:FORMAT]" in line or "after the colon" in line
    assert not hub.requests and not list(Path.cwd().iterdir())


def test_the_options_import_no_torch():
    code = (
        "import sys, cli.model_name, host.resumable, hub.disk, hub.manage; "
        "sys.exit(sorted({'torch', 'huggingface_hub'} & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# Making a model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "format"), (("mixtral", "int8"), ("mixtral", "int8-fp8"), ("qwen3_moe", None))
)
def test_it_is_what_convert_and_quantize_make(hub, make_family, folder, tmp_path, family, format):
    source = put_on_hub(hub, make_family(family).hf_directory)
    made = prepare(ModelName(REPO, format), QUIET)
    assert made.absolute() == folder / f"model_{format or 'bf16'}"
    assert_same(made, expected_of(source, format))
    assert downloads(hub) and sorted(downloads(hub)) == weights(hub)
    assert [path.name for path in folder.iterdir()] == [made.name]  # nothing else is left
    assert json.loads((made / "source.json").read_text())["commit"] == "c" * 40
    hub.requests.clear()
    assert prepare(ModelName(REPO, format), QUIET) == made and not hub.requests


def test_the_disk_never_holds_the_whole_download(hub, source, folder, monkeypatch, caplog):
    """And never more than the plan has found."""
    caplog.set_level(logging.INFO, "moe_fast")
    held, peaks, total = [], [], sum(len(hub.files[name]) for name in weights(hub))
    peak_bytes, write = script.Fetch.peak_bytes, script.Fetch.write

    def measured(self, *arguments):
        write(self, *arguments)
        held.append(sum(path.stat().st_size for path in folder.rglob("*.safetensors")))

    def recorded(self, written):
        peaks.append(peak_bytes(self, written))
        return peaks[-1]

    monkeypatch.setattr(script.Fetch, "write", measured)
    monkeypatch.setattr(script.Fetch, "peak_bytes", recorded)
    prepare(INT8, QUIET)
    assert len(held) == 4 and max(held) < total and max(held) <= peaks[0] < total
    (line,) = [record.getMessage() for record in caplog.records]
    assert "to download" in line and "to write as int8" in line and "are free" in line


def test_a_kept_download_serves_other_formats(hub, source, folder, tmp_path):
    prepare(INT8, QUIET._replace(keep_download=True))
    kept = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert kept == hub.files
    hub.requests.clear()
    made = prepare(ModelName(REPO, "fp8"), QUIET)
    assert not downloads(hub)
    assert_same(made, expected_of(source, "fp8"))
    assert {path.name for path in folder.iterdir() if path.is_file()} == set(kept)
    formats = {model.format for model in stored_models()}
    assert formats == {"int8", "fp8", "download"}


def test_a_kept_download_of_another_version_is_not_used(hub, source, folder, tmp_path):
    prepare(NAME, QUIET._replace(keep_download=True))
    old, new = folder / weights(hub)[2], tmp_path / "source"
    new.mkdir()
    tensors = {name: tensor * 2 for name, tensor in load_file(old).items()}
    hub.files[old.name] = save(tensors, {"format": "pt"})
    assert len(hub.files[old.name]) == old.stat().st_size
    for name, data in hub.files.items():
        (new / name).write_bytes(data)
    (folder / "model_bf16").rename(tmp_path / "aside")
    hub.requests.clear()
    assert_same(prepare(INT8, QUIET), expected(new, tmp_path / "other", "int8"))
    assert downloads(hub) == [old.name] and old.is_file()


def test_a_checkpoint_on_disk_is_quantized(hub, source, folder, tmp_path):
    """The published format serves the others, unless it is damaged."""
    prepare(NAME, QUIET)
    hub.requests.clear()
    assert_same(prepare(INT8, QUIET), expected_of(source, "int8"))
    with pytest.raises(ValueError, match=r"remove it first: generate\.py --remove"):
        prepare(INT8, QUIET._replace(revision="v1"))
    assert prepare(INT8, QUIET._replace(revision="c" * 40)) and not hub.requests


def test_a_quantized_checkpoint_is_not_the_published_one(hub, source, folder):
    prepare(INT8, QUIET)
    (folder / "model_int8").rename(folder / "model_fp8b")
    assert prepare(NAME, QUIET).name == "model_bf16"


def test_files_that_are_not_needed_stay_on_the_hub(hub, make_family, folder):
    """Here a shard of layers for multi-token prediction."""
    put_on_hub(hub, make_family("glm4_moe").hf_directory)
    config = json.loads(hub.files["config.json"]) | {"num_nextn_predict_layers": 1}
    index = json.loads(hub.files["model.safetensors.index.json"])
    index["weight_map"]["model.layers.3.x"] = "model-00011-of-00011.safetensors"
    extra = {"model.layers.3.x": torch.zeros(2)}
    hub.files |= {
        "config.json": json.dumps(config).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-00011-of-00011.safetensors": save(extra),
    }
    prepare(INT8, QUIET)
    assert sorted(downloads(hub)) == weights(hub)[:-1]


@pytest.mark.parametrize("mode", (pytest.param(None, marks=pytest.mark.slow), "int8"))
def test_a_head_for_multi_token_prediction(mode, hub, folder, tmp_path):
    put_on_hub(hub, HYBRID_CHECKPOINT)
    made = prepare(ModelName(REPO, mode), QUIET)
    assert_same(made, expected(HYBRID_CHECKPOINT, tmp_path / "other", mode))
    assert any(name.startswith("mtp.") for name in Checkpoint(made).tensors)


def test_a_head_beside_tied_embeddings(hub, make_family, folder, tmp_path):
    """The two are compared, so their files come first."""
    source = put_on_hub(hub, make_family("qwen3_moe").hf_directory)
    tensors = {}
    for path in source.glob("*.safetensors"):
        tensors |= load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    del hub.files["model.safetensors.index.json"]
    hub.files = {name: hub.files[name] for name in hub.files if "safetensors" not in name}
    hub.files |= {file: save({n: tensors[n] for n in part}) for file, part in files.items()}
    other = tmp_path / "source"
    other.mkdir()
    for name, data in hub.files.items():
        (other / name).write_bytes(data)
    assert_same(prepare(NAME, QUIET), expected(other, tmp_path / "other"))


# Interruptions ------------------------------------------------------------------------------------


def assert_resumes(hub, source, tmp_path, done: set[str]) -> None:
    """Run again: nothing of `done` is downloaded again, and the result is whole."""
    hub.requests.clear()
    made = prepare(INT8, QUIET)
    assert not done & set(downloads(hub)) and downloads(hub)
    assert_same(made, expected_of(source, "int8"))
    assert not partial_path(made).exists()


def test_a_download_that_breaks_off_is_resumed(hub, source, folder, tmp_path, monkeypatch, capsys):
    last = weights(hub)[7]
    hub.fail["GET", last] = 403, None
    monkeypatch.setattr(shards, "HEADERS_AT_ONCE", 1)
    monkeypatch.setattr(script, "read_headers", lambda *_: headers)
    hub_fail, hub.fail = hub.fail, {}
    repository = script.list_files(REPO, None)
    headers = shards.read_headers(repository, weights(hub), False)
    hub.fail = hub_fail
    hub.requests.clear()
    line = error_of(generate, monkeypatch, capsys, "--model", str(INT8))
    assert "HTTP status 403" in line and "/tmp" not in line
    done = set(downloads(hub)) - {last}
    (left,) = stored_models()
    assert len(done) >= 6 and (left.complete, left.format) == (False, "int8, incomplete")
    written = [path.name for path in partial_path(folder / "model_int8").rglob("layer_*")]
    assert "layer_00.safetensors" in written
    hub.fail.clear()
    hub.files["generation_config.json"] = b"{}"  # a new commit, with the same weights
    assert_resumes(hub, source, tmp_path, done)


@pytest.mark.parametrize(
    "number", (signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow))
)
def test_a_process_that_ends_is_resumed(hub, source, folder, tmp_path, number):
    hub.stall = weights(hub)[8]
    program = [sys.executable, ROOT / "generate.py", "--model", str(INT8), "--prepare_only"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(program, cwd=tmp_path, env=environment(hub, tmp_path), **pipes) as run:
        assert hub.stalled.wait(60)
        partial = partial_path(folder / "model_int8")
        with pytest.raises(ValueError, match="another process is working in"):
            prepare(INT8, QUIET)
        run.send_signal(number)
        out, err = run.communicate(timeout=30)
    done = set(downloads(hub)) - {hub.stall}
    hub.stall = None
    hub.release.set()
    assert out == "" and partial.is_dir() and "Traceback" not in err
    if number == signal.SIGINT:
        assert run.returncode == 130
        assert err.count("run the same command again to resume") == 1
    else:
        assert run.returncode == -number
    assert_resumes(hub, source, tmp_path, done)


def test_parts_of_another_version_are_not_used(hub, source, folder, tmp_path, monkeypatch):
    write, calls = script.Fetch.write, []

    def broken(self, writer, file, packing):
        calls.append(file)
        if len(calls) > 2:
            raise KeyboardInterrupt
        write(self, writer, file, packing)

    monkeypatch.setattr(script.Fetch, "write", broken)
    with pytest.raises(KeyboardInterrupt):
        prepare(INT8, QUIET)
    assert len(list(partial_path(folder / "model_int8").rglob("layer_*"))) == 2
    monkeypatch.setattr(script.Fetch, "write", write)
    other = tmp_path / "source"
    other.mkdir()
    for name, data in hub.files.items():
        tensors = data
        if name.endswith(".safetensors"):
            (other / name).write_bytes(data)
            tensors = save({k: v * 2 for k, v in load_file(other / name).items()})
        (other / name).write_bytes(tensors)
    put_on_hub(hub, other)
    assert_same(prepare(INT8, QUIET), expected(other, tmp_path / "other", "int8"))


def test_what_a_killed_process_was_writing_is_written_again(tmp_path):
    first = ResumableDirectory(tmp_path / "a" / "model_x", {"of": 1})
    (first.path / "one").write_text("1")
    first.add({"file": "one", "bytes": 1})
    (first.path / "two").write_text("2")
    first.close()
    again = ResumableDirectory(tmp_path / "a" / "model_x", {"of": 1})
    assert set(again.files) == {"one"} and [p.name for p in again.path.iterdir()] == ["one"]
    again.commit()
    again.close()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model_x"]
    other = ResumableDirectory(tmp_path / "b" / "model_x", {"of": 2})
    other.close()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "place", ("download", "layer", pytest.param("header", marks=pytest.mark.slow))
)
def test_what_an_interrupted_run_left_is_checked(
    hub, source, folder, tmp_path, monkeypatch, capsys, place
):
    """A file of the Hub, or a layer of ours, in which one bit has changed."""
    last = weights(hub)[7]
    hub.damaged[last] = 9
    line = error_of(generate, monkeypatch, capsys, "--model", str(INT8))
    assert f"{last} differs from the Hub's digest" in line and "/tmp" not in line
    hub.damaged.clear()
    partial = partial_path(folder / "model_int8")
    path = next(iter((partial / "downloads").glob("*.safetensors")))
    if place != "download":
        path = partial / "checkpoint/layer_00.safetensors"
    data, at = path.read_bytes(), 30 if place == "header" else -1
    flipped = bytearray(data)
    flipped[at] ^= 1
    path.write_bytes(flipped)
    hub.requests.clear()
    made = prepare(INT8, QUIET)
    assert_same(made, expected_of(source, "int8"))
    assert (path.name in downloads(hub)) == (place == "download")


@pytest.mark.parametrize("ours", (True, False))
def test_a_damaged_kept_download(hub, source, folder, tmp_path, ours):
    prepare(NAME, QUIET._replace(keep_download=True))
    shutil.rmtree(folder / "model_bf16")
    name = weights(hub)[3]
    damaged = bytearray(hub.files[name])
    damaged[-1] ^= 1
    (folder / name).write_bytes(damaged)
    if not ours:
        shutil.rmtree(folder / ".cache")
        with pytest.raises(ValueError, match=rf"{name} is there and is not the Hub's; move it"):
            prepare(INT8, QUIET)
        assert (folder / name).read_bytes() == damaged
        return
    hub.requests.clear()
    assert_same(prepare(INT8, QUIET), expected_of(source, "int8"))
    assert downloads(hub) == [name] and (folder / name).read_bytes() == hub.files[name]


# Errors -------------------------------------------------------------------------------------------


def assert_refused(hub, monkeypatch, capsys, model: str, *parts: str) -> None:
    """Check that a model is refused in one line, before its weights come, and leaves nothing."""
    line = error_of(generate, monkeypatch, capsys, "--model", model)
    assert all(part in line for part in parts), line
    assert not downloads(hub) and not list(Path.cwd().glob("**/*"))


def test_a_name_that_is_not_on_the_hub(hub, monkeypatch, capsys):
    assert_refused(hub, monkeypatch, capsys, "nobody/nothing:int8", "there is no repository nobody")


def test_an_architecture_that_is_not_supported(hub, source, monkeypatch, capsys):
    hub.files["config.json"] = b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
    assert_refused(hub, monkeypatch, capsys, REPO, "LlamaForCausalLM", "is not supported")
    assert {name for _, name, _ in hub.requests} == {"api", "config.json"}


def test_a_format_that_is_not_known(hub, source, monkeypatch, capsys):
    assert_refused(hub, monkeypatch, capsys, f"{REPO}:int5", "int5 is no number format", "int4")
    assert not hub.requests
    with pytest.raises(ValueError, match="int5 is no number format"):
        check_format(ModelName(REPO, "int8-int5"))


def test_a_format_that_cannot_be_made_is_refused_by_the_config_alone(
    hub, source, monkeypatch, capsys
):
    """The experts' rows of 64 numbers become 40: hqq2's groups are of 16."""
    config = json.loads((source / "config.json").read_text()) | {"intermediate_size": 40}
    hub.files["config.json"] = json.dumps(config).encode()
    message = "experts.w2 in hqq2: groups of 16 do not divide rows of 40"
    assert_refused(hub, monkeypatch, capsys, f"{REPO}:hqq2", message)
    assert {name for _, name, _ in hub.requests} == {"api", "config.json"}


def test_a_format_of_a_model_that_is_published_in_another(hub, make_family, monkeypatch, capsys):
    source = put_on_hub(hub, make_family("gpt_oss").hf_directory)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    tensors = {}
    for path in source.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[name] = tensor
                continue
            experts, width, rows = tensor.shape
            groups = experts, rows, width // 32
            tensors[f"{name}_blocks"] = torch.randint(256, (*groups, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full(groups, 124, dtype=torch.uint8)
    files = {"model.safetensors": save(tensors), "config.json": json.dumps(config).encode()}
    hub.files = TOKENIZER | files
    for format in ("int8", "bf16"):
        fix = f"is published in mxfp4, so it is quantized already: leave :{format} out"
        assert_refused(hub, monkeypatch, capsys, f"{REPO}:{format}", fix)
    assert prepare(NAME, QUIET).name == "model_mxfp4"
    assert prepare(ModelName(REPO, "mxfp4"), QUIET).name == "model_mxfp4"
    for format, fix in (("int8", "is quantized already (mxfp4)"), ("bf16", "leave :bf16 out")):
        line = error_of(generate, monkeypatch, capsys, "--model", f"{REPO}:{format}")
        assert fix in line


def test_a_published_4_bit_file_is_kept(hub, make_family, tmp_path):
    """Its tensors lie in two files, codes apart from scales. Another format of it is refused.

    Its format stands in ModelOpt's own file alone.
    """
    function, config, _ = LAYOUTS["ModelOpt NVFP4"]
    source = make_family("qwen3_moe", moe_intermediate_size=64, attention_bias=False).hf_directory
    quantized, plain = write(source, tmp_path, lambda name: function, config)
    tensors = load_file(quantized / "model.safetensors")
    parts = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale_2")}
    files = {"model-00001-of-00002.safetensors": parts}
    files["model-00002-of-00002.safetensors"] = {n: tensors[n] for n in tensors.keys() - parts}
    weight_map = {name: file for file, names in files.items() for name in names}
    hub.files = TOKENIZER | {name: save(found) for name, found in files.items()}
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    hub.files["config.json"] = (plain / "config.json").read_bytes()
    hub.files["hf_quant_config.json"] = json.dumps({"quantization": config}).encode()
    with pytest.raises(ValueError, match=r"is published in nvfp4, .* leave :int8 out"):
        prepare(ModelName(REPO, "int8"), QUIET)
    assert prepare(NAME, QUIET).name == "model_nvfp4"
    hub.files = {}
    assert prepare(NAME, QUIET).name == "model_nvfp4"
    record = NAME.checkpoint("nvfp4") / "source.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"published": "bf16"}))
    assert disk.find_checkpoint(NAME) is None


def test_a_damaged_header(hub, source, monkeypatch, capsys):
    hub.files[weights(hub)[3]] = b"not safetensors" * 9
    assert_refused(hub, monkeypatch, capsys, REPO, weights(hub)[3], "no header of a safetensors")


def test_a_missing_tensor(hub, source, monkeypatch, capsys):
    shard = weights(hub)[3]
    hub.files[shard] = save({})
    assert_refused(hub, monkeypatch, capsys, REPO, f"{REPO}/{shard} lacks")


def test_a_disk_that_is_too_small(hub, source, monkeypatch, capsys):
    monkeypatch.setattr(script, "free_space", lambda directory: 1000)
    fix = "free some space, or name another folder: MOE_FAST_CHECKPOINTS=DIR"
    assert_refused(hub, monkeypatch, capsys, REPO, "of disk and 1 kB are free", fix)


def test_a_disk_that_fills_up(hub, source, folder, tmp_path, monkeypatch, capsys):
    fetch_file, full = shards.fetch_file, weights(hub)[8]

    def failing(repository, name, *rest):
        if name == full:
            raise OSError(errno.ENOSPC, "No space left on device", "x")
        fetch_file(repository, name, *rest)

    monkeypatch.setattr(shards, "fetch_file", failing)
    line = error_of(generate, monkeypatch, capsys, "--model", str(INT8))
    assert "the disk is full; free some space, then run the same command again to resume" in line
    done = set(downloads(hub))
    monkeypatch.setattr(shards, "fetch_file", fetch_file)
    assert_resumes(hub, source, tmp_path, done)


def test_a_folder_that_cannot_be_written(hub, source, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOE_FAST_CHECKPOINTS", str(tmp_path / "file"))
    line = error_of(generate, monkeypatch, capsys, "--model", REPO)
    assert "cannot write" in line and "MOE_FAST_CHECKPOINTS=DIR" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("--model", REPO, "--checkpoint_path", "x"), "name two models: leave one of them out"),
        (("--revision", "v1"), "--revision is about a model of the Hub: add --model OWNER/NAME"),
        (("--keep_download",), "--keep_download is about a model of the Hub: add --model"),
        (("--prepare_only",), "--prepare_only needs a model: add --model OWNER/NAME"),
        (("--yes",), "--yes answers --remove: add --remove NAME"),
        (("--list", "--remove", REPO), "leave one of them out"),
        (("--model", REPO, "--revision", "v9"), "has no revision 'v9'"),
        (("--remove", REPO), "is not on disk in checkpoints; generate.py --list shows"),
    ),
)
def test_options_that_do_not_go_together(hub, arguments, message, monkeypatch, capsys):
    assert message in error_of(generate, monkeypatch, capsys, *arguments)


@pytest.mark.parametrize("module", (eval, quantize))
def test_other_commands_check_the_same_options(module, monkeypatch, capsys):
    both = "--model", REPO, "--checkpoint_path", "x"
    assert "name two models" in error_of(module, monkeypatch, capsys, *both)


# Commands -----------------------------------------------------------------------------------------


@pytest.fixture
def runnable(hub) -> None:
    """Put the embedded model on the Hub: it has a tokenizer."""
    put_on_hub(hub, EMBEDDED)


def test_every_command_takes_a_name(hub, runnable, folder, tmp_path, monkeypatch, capsys):
    run = "--prompt", "def f", "--max_new_tokens", 3, "--device", "cpu", "--json"
    assert command(generate, monkeypatch, "--model", str(INT8), *run) == 0
    assert json.loads(capsys.readouterr().out)["new_tokens"] == 3
    hub.requests.clear()
    (tmp_path / "text").write_text("import os\n" * 30)
    scored = "--text_file", tmp_path / "text", "--device", "cpu"
    assert command(eval, monkeypatch, "--model", str(INT8), *scored) == 0
    assert "perplexity" in capsys.readouterr().out
    options = serve.build_parser().parse_args(["--model", str(INT8), "--device", "cpu"])
    serve.check_options(options)
    *_, directory = serve.load(options, torch.device("cpu"))
    assert directory.absolute() == folder / "model_int8" and not hub.requests
    mixed = "--attention", "int8", "--experts", "int4", "--group_size", 32, "--device", "cpu"
    assert command(quantize, monkeypatch, "--model", REPO, *mixed) == 0
    assert capsys.readouterr().out.startswith(f"checkpoints/{REPO}/model_int8-int4-g32: ")
    assert "exists" in error_of(quantize, monkeypatch, capsys, "--model", REPO, *mixed)
    assert command(quantize, monkeypatch, "--model", REPO, *mixed, "--force") == 0
    capsys.readouterr()
    both = "--model", str(INT8), "--mode", "int4"
    assert "name two formats" in error_of(quantize, monkeypatch, capsys, *both)
    assert "nothing to quantize" in error_of(quantize, monkeypatch, capsys)


def test_list_and_remove(hub, source, folder, monkeypatch, capsys):
    assert command(generate, monkeypatch, "--list") == 0
    assert "no models in checkpoints; generate.py --model OWNER/NAME" in capsys.readouterr().err
    prepare(NAME, QUIET._replace(keep_download=True))
    prepare(INT8, QUIET)
    (folder / "notes.txt").write_text("the user's")
    assert command(generate, monkeypatch, "--list") == 0
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["model", "family", "format", "size"]
    assert [row[:3] for row in rows] == [
        [f"{REPO}:bf16", "mixtral", "bf16"],
        [str(INT8), "mixtral", "int8"],
        [REPO, "mixtral", "download"],
    ]
    kilobytes = [float(size) * {"kB": 1, "MB": 1000}[unit] for *_, size, unit in rows]
    assert min(kilobytes) > 200

    assert "add --yes" in error_of(generate, monkeypatch, capsys, "--remove", str(INT8))
    for answer, code in (("\n", 1), ("n\n", 1), ("y\n", 0)):
        terminal = io.StringIO(answer)
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", terminal)
        assert (folder / "model_int8").is_dir()
        assert command(generate, monkeypatch, "--remove", str(INT8)) == code
        asked = capsys.readouterr().err
        assert f"checkpoints/{REPO}/model_int8 (int8, " in asked and "[y/N]" in asked
    assert not (folder / "model_int8").exists() and (folder / "model_bf16").is_dir()

    mine = folder / "model_bf16" / "mine.txt"
    mine.write_text("the user's")
    line = error_of(generate, monkeypatch, capsys, "--remove", REPO, "--yes")
    assert "also holds mine.txt; move that away first" in line
    assert (folder / "config.json").is_file()  # nothing was removed
    mine.unlink()
    assert command(generate, monkeypatch, "--remove", REPO, "--yes") == 0
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert stored_models() == []


def test_remove_an_incomplete_model(hub, source, folder, monkeypatch, capsys):
    staged = ResumableDirectory(folder / "model_int8", {})
    (staged.path / "layer_00.safetensors").write_text("x")
    line = error_of(generate, monkeypatch, capsys, "--remove", str(INT8), "--yes")
    assert "another process is working in" in line
    staged.close()
    assert command(generate, monkeypatch, "--remove", str(INT8), "--yes") == 0
    assert not folder.exists()


def tree(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


LINKS = ("model_int8", ".model_int8.partial", ".cache", ".cache/huggingface", "")


@pytest.mark.parametrize("act", ("--model", "--remove"))
@pytest.mark.parametrize("name", LINKS)
def test_nothing_behind_a_link_is_removed(
    hub, source, folder, tmp_path, monkeypatch, capsys, name, act
):
    """Neither a checkpoint on another disk, nor a folder of the user that only looks like ours."""
    prepare(INT8, QUIET._replace(keep_download=True))
    if name == ".model_int8.partial":
        (folder / "model_int8").rename(tmp_path / "aside")
        (folder / name).mkdir()
        (folder / name / "mine").write_text("the user's")
    precious = tmp_path / "precious"
    (folder / name).rename(precious)
    (folder / name).symlink_to(precious)
    before = tree(precious)
    if act == "--model":
        assert prepare(INT8, QUIET).name == "model_int8"
        if name == ".model_int8.partial":
            assert not (folder / name).is_symlink()
    elif name == "":
        line = error_of(generate, monkeypatch, capsys, "--remove", REPO, "--yes")
        assert "is a link: its target is not removed; remove the link" in line
        assert (folder).is_symlink()
    else:
        assert command(generate, monkeypatch, "--remove", REPO, "--yes") == 0
        assert not (folder / "model_int8").exists()
        assert not (folder / name).is_symlink() or name.startswith(".cache")
    assert tree(precious) == before


DAMAGES = (
    *({"config.json": text} for text in ("", "[]", "{}", "[" * 100_000, '{"moe_fast": 1}')),
    *({"index.json": text} for text in ("", "3", "{", '{"files": 3, "side_files": [{}, 1]}')),
    *({"config.json": text} for text in ('{"moe_fast": 1, "args": {"family": {}}}', "fifo")),
    *({"index.json": text} for text in ("fifo", "zero", "directory", "loop")),
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: str(d)[:40])
def test_a_damaged_model_is_listed_and_removed(directory, folder, monkeypatch, capsys, damage):
    """It does not hide the others."""
    other = Path("checkpoints/other/model/model_bf16")
    for made in (folder / "model_int8", other):
        shutil.copytree(directory, made)
    for file, text in damage.items():
        path = folder / "model_int8" / file
        path.unlink()
        if text == "fifo":
            os.mkfifo(path)
        elif text == "directory":
            path.mkdir()
        elif text in ("zero", "loop"):
            path.symlink_to("/dev/zero" if text == "zero" else file)
        else:
            path.write_text(text)
    assert command(generate, monkeypatch, "--list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()][1:] == [
        "other/model:bf16",
        str(INT8),
    ]
    assert command(generate, monkeypatch, "--remove", str(INT8), "--yes") == 0
    assert not folder.exists() and other.is_dir()


def test_names_on_disk_drive_no_terminal(directory, folder, monkeypatch, capsys):
    shutil.copytree(directory, folder / "model_\x1b[31mred\n")
    config = {"moe_fast": 1, "args": {"family": "\x1b]0;title\x07", "\x1b[2J": "\x9b31m"}}
    (folder / "model_\x1b[31mred\n" / "config.json").write_text(json.dumps(config))
    (folder / ".model_\x1b[1m.partial").mkdir()
    assert command(generate, monkeypatch, "--list") == 0
    listed = capsys.readouterr().out
    assert command(generate, monkeypatch, "--remove", REPO, "--yes") == 0
    assert listed.count("\n") == 3 and listed.replace("\n", "").isprintable()
    assert capsys.readouterr().err.replace("\n", "").isprintable() and not folder.exists()


def test_prepare_only_prints_the_directory(hub, source, monkeypatch, capsys):
    for said in ("to download", "is there already; verifying it"):
        assert command(generate, monkeypatch, "--model", str(INT8), "--prepare_only") == 0
        out, err = capsys.readouterr()
        assert out == f"checkpoints/{REPO}/model_int8\n" and said in err


def test_one_rank_downloads(hub, source, monkeypatch):
    """Other ranks get the directory from rank 0."""
    options = generate.build_parser().parse_args(["--model", str(INT8)])
    there = prepare(INT8, QUIET)
    hub.requests.clear()
    monkeypatch.setattr(generate.process_group, "share", lambda make: there)
    opened = generate.open_model(SimpleNamespace(**vars(options)), torch.device("cpu"))
    assert opened.directory == there and not hub.requests
