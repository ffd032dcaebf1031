"""No value of any option gives a traceback: one line and exit code 2, or an answer."""

import argparse
import contextlib
import copy
import io
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import zlib
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import MixtralConfig, MixtralForCausalLM

import benchmark
import checkpoint
import convert_hf_checkpoint
import eval
import generate
import hub.client
import quantize
import serve
import server.app
from checkpoint import Checkpoint
from models.converter import convert
from scripts import (
    compare_hf,
    download,
    plot_experts,
    plot_roofline,
    plot_timeline,
    study_offload,
)

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
    plot_roofline: "file",
    plot_timeline: "file",
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
    """No network, no torchrun, no server that stays; pictures are empty."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(benchmark, "read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(server.app, "serve_session", lambda *_: None)
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, port, **kinds: resolve(host, port, flags=socket.AI_NUMERICHOST, **kinds),
    )
    monkeypatch.setattr(HfApi, "model_info", repository)
    monkeypatch.setattr(hub.client, "snapshot_download", lambda *_, **__: None)
    draw = lambda records, layers, path: plot_experts.save_figure(Figure(), path)  # noqa: E731
    monkeypatch.setattr(plot_experts, "draw", draw)
    for name in ("draw_curves", "draw_experts"):
        monkeypatch.setattr(study_offload, name, lambda *given: given[-1].write_bytes(b"picture"))


class Figure:
    def savefig(self, path: Path, **_) -> None:
        path.write_bytes(b"picture")


def repository(self, repo_id: str, **_):
    """Stand in for HfApi.model_info: a repository of two files."""
    validate_repo_id(repo_id)
    names = "config.json", "model.safetensors"
    common = {"size": 10, "lfs": None, "blob_id": "0" * 40}
    files = [types.SimpleNamespace(rfilename=name, **common) for name in names]
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
            if command is not download:
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


# Values in config.json ----------------------------------------------------------------------------

CONFIGS = (  # a command, and the config.json that it reads
    *((command, "model") for command in (checkpoint, generate, eval, quantize, compare_hf)),
    *((command, "hf") for command in (convert_hf_checkpoint, compare_hf)),
    (benchmark, "."),
)
MORE = {checkpoint: ["--verify"]}  # beside SHORT
ODD_VALUES = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 8, 24, 64, 4097, 10**9, 2**63, -(10**18), 10**400),
    *(0.0, 0.5, 1.5, -2.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", "x", "1", "bf16", "int8", "a\nb\x1b[31m", "\ud800", "9" * 5000),
    *([], [0], [1, 1], [None], [[]], ["x"], {}, {"a": 1}, {"name": "int4", "modules": {}}),
)
MEMORY = 4 << 30  # bytes that a run may take beyond those of this process
SECONDS = 10  # that a run may take


def paths_of(value: object, path: tuple = ()) -> list[tuple]:
    """Return the keys and list positions that lead to each value in a JSON value."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [way for key, item in pairs for way in [(*path, key), *paths_of(item, (*path, key))]]
    return []


@st.composite
def edited_configs(draw, config: dict) -> dict:
    """Draw a config.json with other values under one to three of its keys, or without them."""
    config = copy.deepcopy(config)
    for _ in range(draw(st.integers(1, 3))):
        *path, key = draw(st.sampled_from(paths_of(config) or [("new",)]))
        place = config
        for step in path:
            place = place[step]
        if draw(st.integers(0, 9)) == 0:
            del place[key]
        else:
            place[key] = copy.deepcopy(draw(st.sampled_from(ODD_VALUES)))
    return config


@contextlib.contextmanager
def limits():
    """Within, a run that hangs fails, and one that asks for much memory gets no more."""

    def hangs(*_):
        raise AssertionError(f"it runs for more than {SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def check_config(command, owner: str, data, models: Path) -> None:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        fill(place, models)
        os.chdir(place)
        try:
            path = place / owner / "config.json"
            old = path.read_bytes()
            path.write_text(json.dumps(data.draw(edited_configs(json.loads(old)))))
            edited = path.read_bytes() != old
            if owner == "model" and (fresh := data.draw(st.booleans())):
                index = json.loads((place / "model/index.json").read_text())
                index["config_crc32"] = zlib.crc32(path.read_bytes())
                (place / "model/index.json").write_text(json.dumps(index))
            there = tree(place)
            with limits():
                code, _, err = run(command, *SHORT[command].split(), *MORE.get(command, ()))
            assert "Traceback" not in err
            assert code in (0, 2) or (code == 1 and command is compare_hf), (code, err)
            if owner == "model" and edited and not fresh:
                assert code == 2  # the checksum differs
            if code == 2:
                # Before it there may be progress, and what transformers warns of.
                check_error(code, err.replace("\r", "\n").splitlines()[-1] + "\n")
                assert tree(place) == there
        finally:
            os.chdir(before)


each_config = pytest.mark.parametrize(
    ("command", "owner"), CONFIGS, ids=lambda value: getattr(value, "__name__", value)
)


@each_config
@settings(max_examples=12, derandomize=True, database=None, **RELAXED)
@given(data=st.data())
def test_a_few_configs(command, owner, data, models):
    check_config(command, owner, data, models)


@pytest.mark.slow
@each_config
@settings(max_examples=500, **RELAXED)
@given(data=st.data())
def test_many_configs(command, owner, data, models):
    check_config(command, owner, data, models)


# Numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ("1000000000", str(10**18), "9" * 4000))
@pytest.mark.parametrize(
    ("command", "option"),
    (
        *((generate, name) for name in ("num_samples", "batch_size", "max_seq_len", "top_k x")),
        *((benchmark, name) for name in ("layers", "batch", "repeats", "prompt_len")),
        *((serve, name) for name in ("max_seq_len", "port")),
        (eval, "seq_len"),
        (quantize, "group_size"),
        (study_offload, "tokens"),
        (compare_hf, "new_tokens"),
    ),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_huge_counts_are_refused_before_loading(command, option, value, place, monkeypatch):
    name, _, optional = option.partition(" ")
    if hasattr(command, "load_model"):
        monkeypatch.setattr(command, "load_model", None)
    arguments = *SHORT[command].split(), f"--{name}={value}"
    if not optional and (command, name) != (study_offload, "tokens"):
        refused(command, *arguments)


def test_gpu_memory_of_many_digits(place):
    short = SHORT[generate].split()
    for size in ("9" * 5000 + "GB", "9" * 5000, "1." + "9" * 5000 + "MB", "1e400GB"):
        assert "--gpu_memory" in refused(generate, *short, "--offload", "--gpu_memory", size)


@pytest.mark.parametrize("layers", (10**9, -1, 0, 1.5, "9" * 5000))
def test_an_arch_of_many_layers(place, layers):
    config = json.loads(Path("config.json").read_text())
    Path("config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    refused(benchmark, *SHORT[benchmark].split())


# Files --------------------------------------------------------------------------------------------


def test_fifos_do_not_hang(place):
    for command, option in ((eval, "text_file"), (study_offload, "text_file")):
        assert "regular" in refused(command, *SHORT[command].split(), f"--{option}=fifo")
    refused(benchmark, "--arch", "fifo")
    refused(generate, *SHORT[generate].split(), "--profile", "fifo")
    refused(generate, *SHORT[generate].split(), "--prompts_file", "fifo")


@pytest.mark.parametrize("name", ("tokenizer.model", "config.json", "model.safetensors"))
def test_a_fifo_in_a_published_checkpoint(place, name):
    (place / "hf" / name).unlink()
    os.mkfifo(place / "hf" / name)
    if name != "tokenizer.model":  # it is then a checkpoint without a tokenizer
        refused(convert_hf_checkpoint, "--checkpoint_dir", "hf")
    shutil.rmtree("model")
    if name == "tokenizer.model":
        convert("hf", "model", progress=False)
        assert "neither" in refused(generate, "--checkpoint_path", "model")


def test_an_unreadable_directory(place):
    (place / "folder").chmod(0)
    if os.access("folder", os.R_OK):
        pytest.skip("root can read it")
    for command, option in ((generate, "path"), (eval, "path"), (convert_hf_checkpoint, "dir")):
        refused(command, *SHORT[command].split(), f"--checkpoint_{option}=folder")


@pytest.mark.parametrize(
    "name", ("folder", "file/a", "new/a", "loop", "fifo", "/dev/full", "a\nb", "9" * 300)
)
def test_a_profile_that_cannot_be_written(place, name):
    before = Path("/dev/full").is_char_device(), tree(place)
    assert "--profile" in refused(generate, *SHORT[generate].split(), "--profile", name)
    assert (Path("/dev/full").is_char_device(), tree(place)) == before


def test_names_of_tensors_cannot_drive_the_terminal(place):
    config = json.loads((place / "model/index.json").read_text())
    name = next(iter(config["tensors"]))
    config["tensors"]["\x1b]0;owned\x07\n\u202e"] = config["tensors"].pop(name)
    (place / "model/index.json").write_text(json.dumps(config))
    assert "\\x1b]0;owned\\x07 \\u202e" in refused(checkpoint, "model")


@pytest.mark.parametrize("value", (5, True, [], [5], {}, {"default": 5}, "{% for %}", "\ud800"))
def test_odd_chat_templates(place, value):
    path = place / "model/tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": value}))
    code, _, err = run(generate, *SHORT[generate].split(), "--system", "x")
    check_error(code, err)
    code, _, err = run(generate, *SHORT[generate].split())
    assert code == 0 or check_error(code, err)


def test_compare_hf_refuses_what_it_cannot_load(place):
    short = SHORT[compare_hf].split()
    weights = place / "hf/model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    assert "cannot load" in refused(compare_hf, *short)
    weights.rename(place / "hf/pytorch_model.bin")
    assert "cannot load" in refused(compare_hf, *short)
    weights.write_bytes(data)
    path = place / "hf/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": "nothing", "architectures": ["Nothing"]}))
    refused(compare_hf, *short)
    path.write_text("[1]")
    refused(compare_hf, *short)


@pytest.mark.parametrize("changes", ({"vocab_size": 99}, {"num_hidden_layers": 1}))
def test_compare_hf_refuses_another_model(place, changes):
    other = MixtralConfig(**CONFIG.to_dict() | changes)
    MixtralForCausalLM(other).save_pretrained(place / "hf")
    refused(compare_hf, *SHORT[compare_hf].split())


@pytest.mark.parametrize("value", ("nan", "-1", "-inf"))
def test_compare_hf_refuses_a_tolerance(place, value):
    assert "--tolerance" in refused(compare_hf, *SHORT[compare_hf].split(), f"--tolerance={value}")


# Signals and streams ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "owner", "name", "more"),
    (
        (checkpoint, Checkpoint, "verify", ["--verify"]),
        (benchmark, benchmark, "measure", []),
        (plot_experts, plot_experts, "record_routing", []),
        (study_offload, study_offload, "study", []),
        (plot_roofline, plot_roofline, "read_results", []),
        (eval, eval, "perplexity", []),
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ctrl_c_is_silent(place, monkeypatch, command, owner, name, more):
    monkeypatch.setattr(owner, name, lambda *_, **__: signal.raise_signal(signal.SIGINT))
    before = tree(place)
    code, out, err = run(command, *SHORT[command].split(), *more)
    assert (code, out) == (130, "") and "Traceback" not in err
    assert tree(place) == before


def test_ascii_streams(place, monkeypatch):
    """PYTHONIOENCODING=ascii, and a path that ASCII lacks."""
    (place / "model").rename(place / "modèle")
    monkeypatch.setattr(Stream.__init__, "__defaults__", ("ascii",))
    code, out, _ = run(checkpoint, "modèle")
    assert code == 0 and out.startswith("mod\\xe8le: ")
    assert refused(checkpoint, "né").startswith("error: n\\xe9 is not a directory")


@pytest.mark.parametrize("arguments", (("--prompt", "-"), ("--interactive",)))
def test_input_that_is_no_text(place, monkeypatch, arguments):
    """A chat goes on after it."""
    stdin = io.TextIOWrapper(io.BytesIO(b"a\xff\nimport os\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    code, out, err = run(generate, "--checkpoint_path", "model", "--max_new_tokens", 1, *arguments)
    assert "the text is not valid Unicode at character 1; give it as UTF-8" in err
    assert (code, bool(out)) == ((0, True) if "--interactive" in arguments else (2, False))


def start(line: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a shell line in an environment of its own; `python` is this one."""
    python = Path(sys.executable).parent
    environment = {"PATH": f"{python}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)} | environment
    options = dict(env=environment, capture_output=True, text=True, timeout=120)
    return subprocess.run(["bash", "-c", line], **options)


def test_a_working_directory_that_is_gone(tmp_path):
    ended = start(f"mkdir {tmp_path}/a; cd {tmp_path}/a; rmdir ../a; python {ROOT}/checkpoint.py x")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1  # MKL's own line, where it is
    assert "error" in ended.stderr.lower()


@pytest.mark.slow
def test_a_user_without_home_and_passwd_entry(tmp_path):
    """Without $HOME and $XDG_CACHE_HOME, of a user id that has no passwd entry."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    tmp_path.chmod(0o777)
    drop = "setpriv --reuid 54321 --regid 54321 --clear-groups"
    ended = start(
        f"cd /; {drop} {sys.executable} {ROOT}/generate.py --max_new_tokens 1 --json",
        TMPDIR=str(tmp_path),
    )
    if "Permission denied" in ended.stderr and "python" in ended.stderr:
        pytest.skip("other users cannot read this checkout")
    assert "Traceback" not in ended.stderr
    if ended.returncode:
        check_error(ended.returncode, ended.stderr)


PRINTS = [command for command in COMMANDS if command not in (serve, download, plot_experts)]
slow_ones = [pytest.param(c, marks=pytest.mark.slow) for c in PRINTS if c is not quantize]


@pytest.mark.parametrize("command", [quantize, *slow_ones], ids=lambda m: m.__name__)
def test_a_closed_stdout_is_an_error(place, command):
    script, before = Path(command.__file__), tree(place)
    ended = start(f"cd {place}; python {script} {SHORT[command]} >&-", HF_HUB_OFFLINE="1")
    assert ended.returncode == 2 and ended.stdout == ""
    line = ended.stderr.replace("\r", "\n").splitlines()[-1]
    assert line == "error: stdout: Bad file descriptor; redirect it to a file, or to /dev/null"
    assert tree(place) == before


@pytest.mark.slow
@pytest.mark.parametrize("script", ("checkpoint.py model --verify", f"eval.py {SHORT[eval]}"))
def test_no_stream_gives_a_traceback(place, script):
    for streams in (">&-", "2>&-", "> /dev/full", "2> /dev/full", "<&- >&- 2>&-", "| true"):
        ended = start(f"cd {place}; python {ROOT}/{script} {streams}; exit ${{PIPESTATUS[0]}}")
        assert ended.returncode in (0, 2, 141), (streams, ended)
        assert "Traceback" not in ended.stderr + ended.stdout
