"""No value of any option gives a traceback: one line and exit code 2, or an answer."""

import argparse
import contextlib
import io
import os
import shutil
import socket
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import validate_repo_id
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import MixtralConfig, MixtralForCausalLM

import benchmark
import checkpoint
import convert_hf_checkpoint
import eval
import generate
import quantize
import serve
import server.app
from checkpoint import Checkpoint
from models.converter import convert
from scripts import compare_hf, download, plot_experts, study_offload

ROOT = Path(__file__).parents[1]
COMMANDS = (
    *(benchmark, checkpoint, convert_hf_checkpoint, eval, generate, quantize, serve),
    *(compare_hf, download, plot_experts, study_offload),
)
LONGEST = 520  # characters of an error: MAX_MESSAGE, "error: " and a newline; argparse adds a hint
ODD_NAMES = "a\nb", "a\x1b[31mb", "\udcff", "é\u2028", "x" * 300, "x" * 251 + ".png"
NASTY = (
    *("", " ", "-1", "0", "1", "2", "1.5", "nan", "inf", "-inf", "1e400", "9" * 5000, str(10**18)),
    *("0GB", "1e9GB", "9" * 5000 + "GB", "1" + "0" * 8 + "GB", "٣GB", "0,99", "1,,", "-", ".."),
    *(*ODD_NAMES, "fifo", "loop", "loop/a", "folder", "file", "file/a", "/dev/full", "new/a"),
    *("fifo.png", "loop.svg", "folder.png", "a\nb.png", "new/a.png", "model", "hf", "text"),
)
CONFIG = MixtralConfig(
    vocab_size=4096,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=64,
)
# Options that keep valid runs short. Those drawn come after them, and win.
SHORT = {
    benchmark: "--arch config.json --new_tokens 2 --repeats 1 --eager",
    checkpoint: "model",
    convert_hf_checkpoint: "--checkpoint_dir hf",
    eval: "--checkpoint_path model --text_file text",
    generate: "--checkpoint_path model --max_new_tokens 2",
    quantize: "--checkpoint_path model --mode int8",
    serve: "--checkpoint_path model --api_key k --port 0",
    compare_hf: "model --hf_dir hf --new_tokens 2",
    download: "--repo_id a/b --output_dir new",
    plot_experts: "--checkpoint_path model",
    study_offload: "--checkpoint_path model --text_file text --tokens 9",
}
LEFT_OUT = (
    "--help",
    "--interactive",
    "--compile",
    "--compile_prefill",
    "--tasks",
    "--sweep",
    "--peer",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with a small Mixtral in Hugging Face layout (hf), and converted (model)."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    MixtralForCausalLM(CONFIG).save_pretrained(folder / "hf")
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(generate.EMBEDDED / name, folder / "hf")
    convert(folder / "hf", folder / "model", progress=False)
    return folder


def fill(place: Path, models: Path) -> None:
    """Put the models, a text, and what is no file into a folder."""
    shutil.copytree(models, place, dirs_exist_ok=True)
    shutil.copy(models / "hf/config.json", place)
    (place / "folder.png").mkdir()
    (place / "folder").mkdir()
    (place / "file").write_text("[1]")
    (place / "text").write_text("def read_lines(path):\n    return path\n" * 4)
    for name in ("loop", "loop.svg"):
        (place / name).symlink_to(name)
    for name in ("fifo", "fifo.png"):
        os.mkfifo(place / name)


@pytest.fixture
def place(models, tmp_path, monkeypatch) -> Path:
    fill(tmp_path, models)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def alone(monkeypatch, few_threads):
    """No network, no torchrun, no server that stays; pictures without matplotlib."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(benchmark, "read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(server.app, "serve_session", lambda *_: None)
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, port, **kinds: resolve(host, port, flags=socket.AI_NUMERICHOST, **kinds),
    )
    monkeypatch.setattr(download.HfApi, "model_info", repository)
    monkeypatch.setattr(download, "snapshot_download", lambda *_, **__: None)
    monkeypatch.setattr(plot_experts, "draw", lambda r, l, path: plot_experts.save(Figure(), path))
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    for name in ("draw_curves", "draw_experts"):
        monkeypatch.setattr(study_offload, name, lambda *given: given[-1].write_bytes(b"picture"))


class Figure:
    def savefig(self, path: Path, format: str) -> None:
        path.write_bytes(b"picture")


def repository(self, repo_id: str, **_):
    """Stand in for HfApi.model_info: a repository of two files."""
    validate_repo_id(repo_id)
    names = "config.json", "model.safetensors"
    files = [types.SimpleNamespace(rfilename=name, size=10) for name in names]
    return types.SimpleNamespace(siblings=files, sha="0" * 40)


def run(command, *arguments) -> tuple[int, str, str]:
    """Run a command in this process -> exit code, stdout, stderr."""
    before, out, err = sys.argv, Stream(), Stream()
    sys.argv = [f"{command.__name__}.py", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = command.main()
            except SystemExit as end:
                code = end.code
        return code, out.text(), err.text()
    finally:
        sys.argv = before


class Stream(io.TextIOWrapper):
    """A stream as strict about characters as a terminal's."""

    def __init__(self, encoding: str = "utf-8"):
        super().__init__(io.BytesIO(), encoding, newline="")

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


def check_error(code: int, err: str) -> str:
    """Check that a command has failed with one line; return that."""
    assert code == 2, (code, err)
    assert err.startswith("error: ") and err.endswith("\n"), err
    assert err[:-1].isprintable(), err
    assert len(err) <= LONGEST + 50, err
    return err


def refused(command, *arguments) -> str:
    """Run a command that has to fail -> its line."""
    code, out, err = run(command, *arguments)
    assert out == ""
    return check_error(code, err)


def tree(place: Path) -> dict[str, int]:
    """Return every path below, and the time when it was changed."""
    return {str(path.relative_to(place)): path.lstat().st_mtime_ns for path in place.rglob("*")}


# Values of options --------------------------------------------------------------------------------


def options_of(command) -> list[argparse.Action]:
    actions = command.build_parser()._actions
    return [
        action
        for action in actions
        if action.option_strings and not set(LEFT_OUT) & set(action.option_strings)
    ]


@st.composite
def command_lines(draw, command) -> list[str]:
    """Draw options of a command with odd values."""
    arguments = SHORT[command].split()
    for action in draw(st.lists(st.sampled_from(options_of(command)), min_size=1, max_size=4)):
        name = action.option_strings[-1]
        if action.nargs == 0:
            arguments.append(name)
            continue
        values = st.sampled_from(NASTY)
        if action.choices:
            values |= st.sampled_from([str(choice) for choice in action.choices])
        arguments.append(f"{name}={draw(values)}")
    return arguments


def check_values(command, data, models: Path) -> None:
    arguments = data.draw(command_lines(command))
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "outer/place"
        place.mkdir(parents=True)
        fill(place, models)
        os.chdir(place)
        try:
            there = tree(Path(folder))
            code, _, err = run(command, *arguments)
            assert code in (0, 2) or (code == 1 and command is compare_hf), (code, err)
            if code == 2:
                check_error(code, err)
                after = tree(Path(folder))
                assert not after.keys() - there.keys()
                assert after == there or command is download  # it removes truncated files
            Checkpoint("model").verify(progress=False)
        finally:
            os.chdir(before)


RELAXED = dict(deadline=None, suppress_health_check=list(HealthCheck))
each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda m: m.__name__)


@each_command
@settings(max_examples=12, derandomize=True, database=None, **RELAXED)
@given(data=st.data())
def test_a_few_values(command, data, models):
    check_values(command, data, models)


@pytest.mark.slow
@each_command
@settings(max_examples=500, **RELAXED)
@given(data=st.data())
def test_many_values(command, data, models):
    check_values(command, data, models)
