"""No value of any option gives a traceback: exit code 0 or 2, one line, nothing written on 2."""

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import benchmark
import checkpoint
import convert_hf_checkpoint
import eval
import generate
import quantize
import serve
from cli.parser import Parser

COMMANDS = (benchmark, checkpoint, convert_hf_checkpoint, eval, generate, quantize, serve)
TEXTS = (
    *("", " ", "-1", "0", "1", "2", "1.5", "nan", "inf", "-inf", "1e400", "9" * 5000, "10" * 9),
    *("none", "a\nb", "a\x1b[31mb", "x" * 300, "\udcff", "\u2028", "a/b", "..", "/dev/full"),
    *("0GB", "1MB", "1e9GB", "9" * 5000 + "GB", "٣GB", "fifo", "loop", "folder", "file", "model"),
)
FAST = {  # so that what is valid ends soon
    generate: ["--max_new_tokens", "2", "--checkpoint_path", "model"],
    quantize: ["--checkpoint_path", "model", "--mode", "int8"],
    convert_hf_checkpoint: ["--checkpoint_dir", "folder"],
    checkpoint: ["model"],
    benchmark: ["--arch", "file"],
    eval: ["--checkpoint_path", "model", "--text_file", "folder"],
    serve: ["--port", "-1"],
}
# A valid value of these starts long work, or reads the terminal.
LEFT_OUT = {"--interactive", "--compile", "--compile_prefill", "--help", "-h", "--profile"}


@pytest.fixture(scope="module")
def place(make_family, tmp_path_factory) -> Path:
    """A folder with a model and several things that are no files."""
    place = tmp_path_factory.mktemp("place")
    (place / "model").symlink_to(make_family("mixtral").directory)
    (place / "folder").mkdir()
    (place / "file").write_text("[1]")
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "fifo")
    return place


def options_of(command) -> list[argparse.Action]:
    parser: Parser = command.build_parser()
    return [
        action
        for action in parser._actions
        if action.option_strings and not LEFT_OUT & set(action.option_strings)
    ]


def tree(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def run(command, arguments: list[str]) -> tuple[int, str]:
    """Run a command in this process -> exit code, stderr."""
    before, errors = sys.argv, io.StringIO()
    sys.argv = [f"{command.__name__}.py", *arguments]
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            return command.main(), errors.getvalue()
    except SystemExit as end:
        return end.code, errors.getvalue()
    finally:
        sys.argv = before


def check(command, data, place: Path, monkeypatch) -> None:
    """Draw options and values, run the command, and look at what it says and leaves."""
    monkeypatch.chdir(place)
    arguments = list(FAST[command])
    for action in data.draw(st.lists(st.sampled_from(options_of(command)), max_size=3)):
        arguments.append(action.option_strings[0])
        if action.nargs != 0:
            values = st.sampled_from(TEXTS)
            if action.choices:
                values |= st.sampled_from([str(choice) for choice in action.choices])
            arguments[-1] += f"={data.draw(values)}"
    before = tree(place)
    code, errors = run(command, arguments)
    assert code in (0, 2), (arguments, errors)
    if code == 2:
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and len(lines[0]) < 600, (arguments, errors)
        assert all(char.isprintable() or char == "\udcff" for char in lines[0]), arguments
        assert tree(place) == before, arguments


SETTINGS = dict(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda module: module.__name__)
@settings(max_examples=25, derandomize=True, **SETTINGS)
@given(data=st.data())
def test_a_few_values(command, data, place, monkeypatch):
    check(command, data, place, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda module: module.__name__)
@settings(max_examples=1000, **SETTINGS)
@given(data=st.data())
def test_many_values(command, data, place, monkeypatch):
    check(command, data, place, monkeypatch)
