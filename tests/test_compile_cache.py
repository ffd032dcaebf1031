"""--compile_cache: compiled code in a folder, which another machine may get a copy of."""

import errno
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch._inductor.exc

import generate
from cli.command import command
from cli.options import add_compile_cache
from cli.parser import Parser
from host.compile_cache import use_compile_cache
from ops.inductor import CacheWarnings

ROOT = Path(__file__).parents[1]
# Decode two tokens, then print how many functions Inductor compiled, and found compiled.
SCRIPT = """
import json, sys
import generate
code = generate.main()
from torch._dynamo.utils import counters  # makes the default folder, if none is chosen yet
found = counters["inductor"]
print(json.dumps([code, found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]]))
"""


def run(*options: str, home: Path) -> list[int]:
    given = "--prompt", "a", "--max_new_tokens", "2", "--compile", *options
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHIND", "TRITON"))}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment | {"TMPDIR": str(home)},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_copy_of_the_folder_spares_all_compiling(tmp_path):
    first, second = tmp_path / "new" / "first", tmp_path / "second"
    homes = [tmp_path / name for name in ("a", "b")]
    for home in homes:
        home.mkdir()
    code, compiled, found = run("--compile_cache", str(first), home=homes[0])
    assert code == 0 and compiled > 2 and found == 0
    first.rename(second)  # as on another machine: nothing refers to the old place
    assert run("--compile_cache", str(second), home=homes[1]) == [0, 0, compiled]
    # Nothing stands below the name in /tmp that every user can take.
    assert not [path for home in homes for path in home.glob("torchinductor*")]


@pytest.mark.parametrize(
    ("options", "message"),
    (
        pytest.param(("--compile_cache", "new"), "add --compile", marks=pytest.mark.slow),
        (("--compile_cache", "file", "--compile"), "file"),
        pytest.param(("--compile_cache", "file/new", "--compile"), "file", marks=pytest.mark.slow),
    ),
)
def test_a_users_mistake_is_one_line(options, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--prompt", "a", *options])
    assert generate.main() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err and not (tmp_path / "new").exists()


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A home and a temporary directory; no environment variable names a cache."""
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    for folder in (home, temporary):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield home, temporary
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.pop(name, None)


def used() -> tuple[Path, Path]:
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), Path(os.environ["TRITON_CACHE_DIR"])


@pytest.mark.parametrize("home", ("plain", "Jane Doe", "it's", "$HOME", "a;b", "file", "jürgen"))
def test_the_default_is_a_folder_of_the_users_own(folders, monkeypatch, home):
    """A home that compilers do not take, or that cannot be written, is replaced."""
    place = folders[0] / home
    monkeypatch.setenv("HOME", str(place))
    if home == "file":
        place.write_text("")
    own = f"moe-fast-{os.getuid()}-compiled"
    expected = folders[1] / own
    if home in ("plain", "jürgen"):
        expected = place / ".cache/moe-fast/compiled"
    for mode in (None, 0o777):  # missing, then opened to all
        if mode:
            expected.chmod(mode)
            for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                monkeypatch.delenv(name)
        use_compile_cache(None)
        assert used() == (expected, expected / "triton")
        assert expected.stat().st_mode & 0o777 == 0o700


def test_the_environments_folders_are_kept(folders, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/given")
    use_compile_cache(None)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/given"
    use_compile_cache(tmp_path / "option")  # an option has precedence
    assert used() == (tmp_path / "option", tmp_path / "option/triton")


@pytest.mark.parametrize(
    "name", ("a b", "a\tb", "a'b", 'a"b', "$a", "a;b", "a&b", "(a)", "*", "a\nb")
)
def test_a_path_that_compilers_do_not_take_is_one_line(folders, name, capsys):
    main = command()(lambda: use_compile_cache(folders[0] / name))
    assert main() == 2 and not (folders[0] / name).exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "compilers do not take" in error


@pytest.mark.parametrize(
    ("change", "reason"),
    (
        (lambda folder: folder.chmod(0o700), ""),
        (lambda folder: folder.chmod(0o755), ""),
        (lambda folder: folder.chmod(0o775), "can be written by others"),
        (lambda folder: folder.chmod(0o777), "can be written by others"),
        (lambda folder: os.chown(folder, 12345, 12345), "belongs to another user"),
    ),
)
def test_a_folder_that_others_can_change_is_warned_about(folders, caplog, change, reason):
    folder = folders[0] / "cache"
    folder.mkdir()
    try:
        change(folder)
    except PermissionError:
        pytest.skip("only root can give a folder to another user")
    use_compile_cache(folder)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == (
        [f"--compile_cache {folder} {reason}, and its code is executed"] * bool(reason)
    )


def test_the_help_warns_of_others_folders():
    parser = Parser("x", ())
    add_compile_cache(parser)
    text = " ".join(parser.format_help().split())
    assert "the code in it is executed, so only use a folder that you trust" in text


@pytest.mark.parametrize(
    ("cause", "message"),
    (
        (OSError(errno.ENOSPC, "No space left on device"), "/cache: No space left on device; free"),
        (OSError(errno.EACCES, "Permission denied", "/cache/x"), "/cache/x: Permission denied;"),
        (torch._inductor.exc.CppCompileError(["g++", "a b"], "x\n" * 99), "remove /cache, which"),
        (
            torch._inductor.exc.CppCompileError(["g++"], "as: No space left on device\n" * 9),
            "/cache: No space left on device; free",
        ),
        (RuntimeError("bad magic\n" * 99), "leave out --compile"),
    ),
)
def test_a_failed_compilation_is_one_line(cause, message, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache")

    @command()
    def main() -> int:
        raise torch._inductor.exc.InductorError(cause, None)

    assert main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot compile") and message in error
    assert error.count("\n") == 1 and len(error) < 600
    monkeypatch.setenv("TORCHDYNAMO_VERBOSE", "1")
    with pytest.raises(torch._inductor.exc.InductorError):
        main()


def test_a_damaged_cache_is_reported_once(caplog):
    log = logging.getLogger("test.codecache")
    log.addFilter(CacheWarnings())
    for name in (
        "fx graph cache unable to load compiled graph",
        "fx graph unable to write to cache",
    ):
        try:
            raise EOFError(name)
        except EOFError:
            log.warning(name, exc_info=True)
    log.warning("another matter")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "is not used: it is damaged" in lines[0]
    assert caplog.records[0].exc_info is None and lines[1] == "another matter"


MOVE = """
import logging, os, sys
import torch
from ops.launch import KernelError, give_up, launch
from ops.step.rows import Move, _move
from tests.launched_code import launched_code
numbers = torch.zeros(2, 4, dtype=torch.int64)
for _ in sys.stdin:
    if child := os.fork():
        print("ended with", os.waitpid(child, 0)[1], flush=True)
        continue
    try:
        move = lambda: launch(_move, (2,), numbers, 0, 1, 8, settings=Move(8, False))
        print(*launched_code(move))
    except KernelError as error:
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        give_up("a use", error)
    sys.stdout.flush()
    os._exit(0)
"""


def test_damaged_files_of_a_kernel_are_named_with_the_fix(tmp_path):
    """A power loss leaves empty files. A plain form, which is slower, replaces the kernel then."""
    pytest.importorskip("triton", reason="ops/ needs triton")

    names = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    command = [sys.executable, "-c", MOVE]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | names, **pipes) as process:

        def launch_it() -> str:
            """Launch the kernel in a copy of a process that has imported all but launched none."""
            print(file=process.stdin, flush=True)
            line, end = process.stdout.readline(), process.stdout.readline()
            assert end == "ended with 0\n", line + end
            return line

        assert launch_it() == "_move\n" == launch_it()
        found = []
        for path in [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.cubin")]:
            whole = path.read_bytes()
            path.write_bytes(b"") if path.suffix == ".json" else path.unlink()
            found.append(launch_it())
            path.write_bytes(whole)
    fix = f"; remove {tmp_path}, which may be damaged\n"
    # Some versions of Triton compile again after some of these.
    assert all(line == "_move\n" or line.endswith(fix) for line in found)
    assert any(line.endswith(fix) for line in found)
