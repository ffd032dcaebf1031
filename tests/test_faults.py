"""Faults: any file operation may fail or be the last, and no option or file gives a traceback."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import tokenizers
from conftest import FAMILIES
from safetensors.torch import load_file, save_file

import benchmark
import checkpoint
import cli.command
import convert_hf_checkpoint
import generate
import quantize
import serve
from checkpoint import Checkpoint
from host.folders import model_folder, user_cache
from host.staging import recover
from scripts import plot_experts, study_offload
from tokenizer import load_tokenizer

fork = multiprocessing.get_context("fork")
EVENTS = ("open", "os.", "shutil.", "fcntl.")


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    """A small Mixtral in Hugging Face layout, with the embedded model's tokenizer."""
    directory = tmp_path_factory.mktemp("hf")
    FAMILIES["mixtral"]().save_pretrained(directory)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(Path(__file__).parents[1] / "checkpoints/tiny-moe" / name, directory)
    config = json.loads((directory / "config.json").read_text())
    vocabulary = 4096
    weights = load_file(directory / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name].repeat(-(-vocabulary // len(weights[name])), 1)[:vocabulary]
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": vocabulary}))
    return directory


@pytest.fixture(scope="module")
def converted(hf, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "model_bf16"
    assert run(convert_hf_checkpoint, "--checkpoint_dir", hf, "--output_dir", target) == 0
    return target


def run(module, *arguments) -> int:
    """Run a command in this process."""
    before = sys.argv
    sys.argv = [module.__name__, *map(str, arguments)]
    try:
        return module.main()
    except SystemExit as end:
        return end.code
    finally:
        sys.argv = before


def run_apart(work, *arguments) -> int:
    """Call work(*arguments) in a forked process -> its exit code, or minus its signal."""

    def body():
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os._exit(work(*arguments))

    process = fork.Process(target=body)
    process.start()
    process.join()
    return process.exitcode


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# Every file operation in turn ---------------------------------------------------------------------


def with_fault(folder: Path, step: int, kill: bool, command, *arguments) -> int:
    """Run a command whose file operation number `step` in `folder` fails, or is its last.

    Returns 100 if there are fewer operations.
    """
    seen = []

    def hook(event, arguments):
        if not event.startswith(EVENTS) or len(seen) >= step:
            return
        if any(str(folder) in str(argument) for argument in arguments):
            seen.append(event)
            if len(seen) == step:
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(28, "No space left on device", str(folder))

    sys.addaudithook(hook)
    code = run(command, *arguments)
    return code if len(seen) == step else 100


@pytest.mark.parametrize("kill", (False, True), ids=("fails", "is the last"))
@pytest.mark.parametrize("command", (convert_hf_checkpoint, quantize), ids=lambda m: m.__name__)
@pytest.mark.parametrize("force", (False, True))
@pytest.mark.slow
def test_any_file_operation(hf, converted, tmp_path, command, kill, force):
    """The target is then absent, or old and whole, or new and whole, and nothing else is left."""
    source = ("--checkpoint_dir", hf)
    if command is quantize:
        source = ("--checkpoint_path", converted, "--mode", "int8")
    for step in range(1, 500):
        folder = tmp_path / str(step)
        folder.mkdir()
        if force:
            shutil.copytree(converted, folder / "model", symlinks=True)
        arguments = (*source, "--output_dir", folder / "model", *(["--force"] if force else []))
        code = run_apart(with_fault, folder, step, kill, command, *arguments)
        assert code in ((-signal.SIGKILL, 100) if kill else (0, 2, 100)), step
        recover(folder)  # the next run calls it
        whole = (folder / "model").exists()
        assert names(folder) == (["model"] if whole else []), step
        assert whole or not force, step
        if whole:
            Checkpoint(folder / "model").verify(progress=False)
        shutil.rmtree(folder)
        if code == 100:
            break
    assert code == 100 and step > 20


def test_a_full_disk_in_the_middle(hf, tmp_path):
    """The smoke case of test_any_file_operation."""
    arguments = ("--checkpoint_dir", hf, "--output_dir", tmp_path / "model")
    code = run_apart(with_fault, tmp_path, 12, False, convert_hf_checkpoint, *arguments)
    assert code == 2 and names(tmp_path) == []


# --force ------------------------------------------------------------------------------------------


def tree(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    "name", ("hf/model.safetensors", "notes.txt", "model_int4/config.json", ".hidden")
)
def test_force_refuses_what_it_did_not_write(hf, converted, tmp_path, capsys, name):
    target = tmp_path / "target"
    shutil.copytree(converted, target)
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).write_text("the user's")
    before = tree(target)
    arguments = ("--checkpoint_dir", hf, "--output_dir", target, "--force")
    assert run(convert_hf_checkpoint, *arguments) == 2
    error = capsys.readouterr().err
    assert name.split("/")[0] in error and "not replaced" in error and error.count("\n") == 1
    assert tree(target) == before and names(tmp_path) == ["target"]


def test_force_keeps_a_source_inside_the_target(hf, converted, tmp_path, capsys):
    target = tmp_path / "target"
    shutil.copytree(converted, target)
    shutil.copytree(hf, target / "hf")
    before = tree(target)
    arguments = ("--checkpoint_dir", target / "hf", "--output_dir", target, "--force")
    assert run(convert_hf_checkpoint, *arguments) == 2
    shutil.copytree(converted, target / "model_bf16")
    arguments = ("--checkpoint_path", target / "model_bf16", "--output_dir", target)
    assert run(quantize, *arguments, "--mode", "int8", "--force") == 2
    shutil.rmtree(target / "model_bf16")
    assert tree(target) == before


def test_force_replaces_side_files_of_its_own(hf, converted, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(converted, target)
    arguments = ("--checkpoint_dir", hf, "--output_dir", target, "--force")
    assert run(convert_hf_checkpoint, *arguments) == 0
    assert names(tmp_path) == ["target"]
    Checkpoint(target).verify(progress=False)


# Checksums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key, value", (("n_head", 4), ("rope_theta", 5.0), ("norm_eps", 0.1)))
def test_edited_args_are_refused(converted, tmp_path, key, value):
    shutil.copytree(converted, tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    assert key in config["args"]
    config["args"][key] = value
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json differs from its checksum"):
        Checkpoint(tmp_path / "model")


def test_an_index_without_a_checksum_loads(converted, tmp_path):
    shutil.copytree(converted, tmp_path / "model")
    path = tmp_path / "model/index.json"
    index = json.loads(path.read_text())
    for key in ("config_crc32", "side_files"):
        del index[key]
    path.write_text(json.dumps(index))
    assert Checkpoint(tmp_path / "model").args


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_verify_finds_numbers_that_are_not_finite(converted, tmp_path, capsys, value):
    source = Checkpoint(converted)
    with checkpoint.Writer(tmp_path / "model", source.args, source.format) as writer:
        for file, tensors in source.by_file().items():
            read = {name: source.read(name) for name in tensors}
            if "layers.1.attention.wo.weight" in read:
                read["layers.1.attention.wo.weight"][3, 5] = value
            writer.write(file, read)
    assert run(checkpoint, tmp_path / "model") == 0
    capsys.readouterr()
    assert run(checkpoint, tmp_path / "model", "--verify") == 2
    error = capsys.readouterr().err
    assert "layers.1.attention.wo.weight" in error and error.count("error") == 1


# Odd files and environments -----------------------------------------------------------------------


def refusal(capsys, module, *arguments) -> str:
    """Run a command that must refuse -> its one line."""
    capsys.readouterr()
    assert run(module, *arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and lines[0].isprintable()
    return lines[0]


@pytest.mark.parametrize("name", ("config.json", "index.json", "rest.safetensors"))
def test_a_fifo_in_place_of_a_file_is_refused(converted, tmp_path, capsys, name):
    shutil.copytree(converted, tmp_path / "model")
    (tmp_path / "model" / name).unlink()
    os.mkfifo(tmp_path / "model" / name)
    refusal(capsys, checkpoint, tmp_path / "model")


@pytest.mark.parametrize("name", ("config.json", "index.json", "rest.safetensors"))
@pytest.mark.parametrize("kind", ("directory", "socket", "/dev/zero", "/dev/null", "loop"))
def test_an_odd_thing_in_place_of_a_file_is_refused(
    converted, tmp_path, monkeypatch, capsys, name, kind
):
    shutil.copytree(converted, tmp_path / "model")
    monkeypatch.chdir(tmp_path / "model")
    Path(name).unlink()
    if kind == "directory":
        Path(name).mkdir()
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(name)
    else:
        Path(name).symlink_to(name if kind == "loop" else kind)
    refusal(capsys, checkpoint, tmp_path / "model")


@pytest.mark.parametrize("name", ("config.json", "tokenizer.model", "tokenizer_config.json"))
def test_a_fifo_among_published_files_is_refused(hf, tmp_path, capsys, name):
    """Or left out, where a file may be missing."""
    shutil.copytree(hf, tmp_path / "hf")
    (tmp_path / "hf" / name).unlink()
    os.mkfifo(tmp_path / "hf" / name)
    arguments = "--checkpoint_dir", tmp_path / "hf", "--output_dir", tmp_path / "model"
    if name == "config.json":
        refusal(capsys, convert_hf_checkpoint, *arguments)
    else:
        assert run(convert_hf_checkpoint, *arguments) == 0
        assert not (tmp_path / "model" / name).exists()


@pytest.mark.parametrize("name", ("directory", "empty", "gone", "loop", "checkpoint"))
def test_the_target_of_a_link_is_never_replaced(hf, converted, tmp_path, capsys, name):
    """--force replaces the link; a link to nothing may be a disk that is not mounted."""
    place = tmp_path / "place"
    if name == "checkpoint":
        shutil.copytree(converted, place)
    elif name in ("directory", "empty"):
        place.mkdir()
        if name == "directory":
            (place / "notes").write_text("the user's")
    before = tree(place)
    (tmp_path / "out").symlink_to("out" if name == "loop" else place)
    arguments = "--checkpoint_dir", hf, "--output_dir", tmp_path / "out", "--force"
    refusal(capsys, convert_hf_checkpoint, *arguments[:-1])
    assert (tmp_path / "out").is_symlink()
    if name in ("empty", "checkpoint"):
        assert run(convert_hf_checkpoint, *arguments) == 0
        assert not (tmp_path / "out").is_symlink()
    else:
        refusal(capsys, convert_hf_checkpoint, *arguments)
        assert (tmp_path / "out").is_symlink()
    assert tree(place) == before and place.exists() == (name not in ("gone", "loop"))


def test_a_regex_that_panics_is_an_error_of_the_text(tmp_path):
    """A panic of Rust is no Exception; the regex backtracks beyond Oniguruma's limit."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}}
    split |= {"behavior": "Isolated", "invert": False}
    vocabulary = {"type": "BPE", "vocab": {"a": 0, "!": 1}, "merges": []}
    json_file = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": split}
    json_file |= {"post_processor": None, "decoder": None, "model": vocabulary}
    (tmp_path / "tokenizer.json").write_text(json.dumps(json_file))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("aa!") == [0, 0, 1]
    with pytest.raises(ValueError, match="the tokenizer fails on this text"):
        tokenizer.encode("a" * 40 + "!")


@pytest.mark.parametrize(
    "error",
    (
        MemoryError(),
        OSError(12, "Cannot allocate memory", "/x"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("unable to mmap 6442 bytes from file <x>: Cannot allocate memory (12)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
    ),
    ids=repr,
)
def test_a_limit_of_memory_is_one_line(capsys, error):
    @cli.command.command()
    def fails() -> int:
        raise error

    assert fails() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory (") and line.endswith("quantize.py --mode int4")


def test_an_error_of_the_system_that_pytorch_names_is_one_line(capsys):
    error = "unable to open file <x> in read-only mode: Too many open files (24)"

    @cli.command.command()
    def fails(message: str) -> int:
        raise RuntimeError(message)

    assert fails(error) == 2
    assert capsys.readouterr().err == f"error: {error}; raise the limit: ulimit -n 4096\n"
    for other in ("a shape: Too many open files (2)", "index out of range: 24 (24)"):
        with pytest.raises(RuntimeError, match="2"):
            fails(other)


@pytest.mark.parametrize("name", ("x" * 300, "a\nb\x1b[31m", "\udcff", "loop", "loop/x"))
def test_odd_names_are_one_line(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    refusal(capsys, checkpoint, name)
    refusal(capsys, generate, "--checkpoint_path", name)
    refusal(capsys, convert_hf_checkpoint, "--checkpoint_dir", name)
    assert names(tmp_path) == ["loop"]


@pytest.mark.parametrize("content", ("[1]", "null", '"x"', "[" * 100_000, "{", "\xff"))
def test_an_arch_that_is_no_config(tmp_path, capsys, content):
    (tmp_path / "arch.json").write_bytes(content.encode("latin-1"))
    assert "--arch" in refusal(capsys, benchmark, "--arch", tmp_path / "arch.json")


@pytest.mark.parametrize("value", ("", "x", "0", "-1", "2"))
def test_a_part_of_torchruns_environment(monkeypatch, capsys, value):
    monkeypatch.setenv("WORLD_SIZE", value)
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "start with torchrun" in refusal(capsys, generate, "--max_new_tokens", "1")


@pytest.mark.parametrize("rank", (2, 5))
def test_a_rank_beyond_the_ranks(monkeypatch, capsys, rank):
    """It would wait for ever."""
    for name, value in dict(WORLD_SIZE=2, RANK=rank, LOCAL_RANK=0, MASTER_PORT=29500).items():
        monkeypatch.setenv(name, str(value))
    assert f"RANK {rank} and WORLD_SIZE 2" in refusal(capsys, generate, "--max_new_tokens", "1")


@pytest.mark.slow
@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_ends_a_rank_that_waits_for_others(number):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = dict(WORLD_SIZE="2", RANK="1", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1")
    process = subprocess.Popen(
        [sys.executable, generate.__file__, "--max_new_tokens", "1"],
        env=os.environ | ranks | {"MASTER_PORT": str(port)},
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(12)  # imports, then the wait for rank 0
        process.send_signal(number)
        assert process.wait(10) == -number
    finally:
        process.kill()
        process.wait()


def test_names_that_are_not_utf8(hf, converted, tmp_path, capsys):
    """safetensors can neither write nor read below them."""
    for command, option in ((convert_hf_checkpoint, "dir"), (quantize, "path")):
        source = hf if option == "dir" else converted
        arguments = (f"--checkpoint_{option}", source, "--output_dir", tmp_path / "\udcff")
        mode = ("--mode", "int8") if command is quantize else ()
        assert "not UTF-8; rename it" in refusal(capsys, command, *arguments, *mode)
    assert names(tmp_path) == []
    shutil.copytree(converted, tmp_path / "\udcff")
    assert "not UTF-8; rename it" in refusal(capsys, checkpoint, tmp_path / "\udcff")


@pytest.mark.parametrize(
    "key, value",
    (
        *(("n_layer", 10**9), ("dim", 2**63), ("dim", 1 << 24), ("vocab_size", None)),
        *(("clip_qkv", 1e300), ("n_expert", 10**5), ("format", True), ("format", {})),
        ("family", {}),
    ),
)
def test_args_beyond_any_model(converted, tmp_path, capsys, key, value):
    """Nobody waits for such a model, also if the checkpoint has no checksums."""
    shutil.copytree(converted, tmp_path / "model")
    for file, keys in (("index.json", ("config_crc32",)), ("config.json", (key,))):
        path = tmp_path / "model" / file
        content = json.loads(path.read_text())
        place = content["args"] if file == "config.json" and key != "format" else content
        for name in keys:
            place.pop(name, None)
            if file == "config.json":
                place[name] = value
        path.write_text(json.dumps(content))
    refusal(capsys, generate, "--checkpoint_path", tmp_path / "model", "--max_new_tokens", "1")
    refusal(capsys, quantize, "--checkpoint_path", tmp_path / "model", "--mode", "int8")
    assert names(tmp_path) == ["model"]


def test_an_end_token_beyond_the_model_is_refused(converted, tmp_path, capsys):
    """The answer would never end, and `min_tokens` was status 500."""
    model = shutil.copytree(converted, tmp_path / "model_bf16")
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 99999]}')
    for module, options in ((generate, ("--prompt", "a")), (serve, ("--port", "0"))):
        assert run(module, "--checkpoint_path", model, "--device", "cpu", *options) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: eos_token_id or the tokenizer has the id 99999, beyond")


def test_a_tokenizer_of_another_model_is_refused(converted, tmp_path, capsys):
    model = shutil.copytree(converted, tmp_path / "model_bf16")
    (model / "tokenizer.model").unlink()
    vocabulary = {letter: 5000 for letter in "abdefghijklmnopqrstuvwxyz"} | {"c": 5099}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(str(model / "tokenizer.json"))
    given = "--checkpoint_path", model, "--device", "cpu"
    for module, options in (
        (generate, ("--prompt", "abc")),
        (plot_experts, ("--prompt", "abc", "--output", tmp_path / "a.svg")),
        (study_offload, ("--tokens", "9", "--output_dir", tmp_path / "study")),
    ):
        assert run(module, *given, *options) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: eos_token_id or the tokenizer has the id 5099, beyond")
    assert names(tmp_path) == ["model_bf16"]


@pytest.mark.parametrize(
    ("path", "name"),
    (("/models/OWNER/NAME/model_int4", "NAME"), ("/model", "model"), ("x", Path.cwd().name)),
)
def test_a_model_has_a_name_wherever_it_is_mounted(path, name):
    assert model_folder(Path(path)) == name


def test_a_user_without_a_home(tmp_path, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert user_cache() == tmp_path / f"moe-fast-{os.getuid()}"
    (tmp_path / f"moe-fast-{os.getuid()}").symlink_to(tmp_path)  # by another user
    with pytest.raises(ValueError, match="belongs to another user, or is a link"):
        user_cache()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "moe-fast"


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGHUP))
def test_a_signal_whose_exception_is_lost_ends_the_command(monkeypatch, number):
    """Destructors lose it, and callbacks from C, as PyTorch's compiler has them."""
    monkeypatch.setattr(cli.command, "RAISED_AGAIN", 0.05)
    kept = signal.getsignal(signal.SIGALRM)

    class Loses:
        def __del__(self):
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(number)

    @cli.command.command()
    def main() -> int:
        for _ in range(2):
            Loses()
        time.sleep(10)
        return 0

    begin = time.monotonic()
    assert main() == 128 + number and time.monotonic() - begin < 5
    assert signal.getsignal(signal.SIGALRM) == kept
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
def test_a_signal_leaves_nothing(hf, tmp_path, number):
    def interrupted() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
        enter = checkpoint.Writer.enter

        def signalled(self, *file):
            enter(self, *file)
            os.kill(os.getpid(), number)

        checkpoint.Writer.enter = signalled
        target = tmp_path / "model"
        return run(convert_hf_checkpoint, "--checkpoint_dir", hf, "--output_dir", target)

    assert run_apart(interrupted) == 128 + number and names(tmp_path) == []


@pytest.mark.parametrize("streams", (">&-", "2>&-", "> /dev/full", "> /dev/full 2>&1", ">&- 2>&-"))
@pytest.mark.slow
def test_closed_and_full_streams(streams):
    script = Path(generate.__file__)
    line = f"{sys.executable} {script} --max_new_tokens 2 --json {streams}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert ended.returncode == (0 if streams == "2>&-" else 2)
    assert "Traceback" not in ended.stderr + ended.stdout
    if "2>" not in streams:
        assert ended.stderr.splitlines()[-1].startswith("error: stdout: ")
