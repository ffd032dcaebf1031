"""Files of prompts: lines end at newlines alone, and every mistake names its option and line."""

import io
import json
import os
import sys

import pytest
from conftest import any_text
from hypothesis import given, settings
from hypothesis import strategies as st

from cli import prompts, terminal
from cli.prompts import read_prompts, read_prompts_file

SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"  # str.splitlines() cuts at these


def test_standard_input_is_a_prompt_without_a_byte_order_mark(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffone\r\n\ufefftwo", newline=""))
    assert read_prompts(["-"], None) == ["one\r\n\ufefftwo"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeff"))
    with pytest.raises(ValueError, match="the prompt is empty"):
        read_prompts(["-"], None)


class Endless(io.StringIO):
    """Standard input that repeats a line for ever, as `yes` does."""

    def __init__(self, line: str):
        super().__init__()
        self.line = line

    def read(self, size=-1):
        assert size > 0, "it would never end"
        return "x" * size

    def readline(self, size=-1):
        assert size > 0, "it would never end"
        return self.line or "x" * size


def test_standard_input_without_an_end_is_one_line(monkeypatch):
    monkeypatch.setattr(prompts, "MAX_STDIN", 1000)
    monkeypatch.setattr(terminal, "MAX_STDIN", 1000)
    monkeypatch.setattr(sys, "stdin", Endless(""))
    with pytest.raises(ValueError, match="stdin has over 0 million characters: give it less text"):
        read_prompts(["-"], None)
    for line in ("", "\\\n", '"""x\n'):
        monkeypatch.setattr(sys, "stdin", Endless(line))
        with pytest.raises(ValueError, match="give it less text"):
            next(terminal.read_messages())


@pytest.mark.parametrize("separator", SEPARATORS)
@pytest.mark.parametrize("end", ("\n", "\r\n"))
def test_only_newlines_end_a_prompt(tmp_path, separator, end):
    text = f"one{separator}two"
    plain, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_bytes(f"{text}{end}{end}three".encode())
    assert read_prompts_file(plain) == [text, "three"]
    lines.write_bytes((json.dumps(text, ensure_ascii=False) + end).encode())
    if separator >= " ":  # JSON allows no bare control characters
        assert read_prompts_file(lines) == [text]


def test_a_bom_is_skipped(tmp_path):
    for name, data in (("p.txt", b"\xef\xbb\xbfone\n"), ("p.jsonl", b'\xef\xbb\xbf"one"\n')):
        (tmp_path / name).write_bytes(data)
        assert read_prompts_file(tmp_path / name) == ["one"]


@pytest.mark.parametrize(
    "name, data, message",
    (
        ("p.txt", b"a\nb\xff\n", "line 2: it is not UTF-8"),
        ("p.jsonl", b'"a"\n{"prompt": 1}\n', "line 2 is neither"),
        ("p.jsonl", b'"a"\n\n[\n', "line 3 is not JSON"),
        ("p.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("p.txt", b"\n \r\n", "holds no prompt"),
    ),
)
def test_a_mistake_names_option_and_line(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"--prompts_file .*{message}") as error:
        read_prompts_file(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "p.txt")
    with pytest.raises(ValueError, match="not a regular file"):
        read_prompts_file(tmp_path / "p.txt")


@given(prompts=st.lists(any_text(min_size=1), min_size=1))
@settings(max_examples=200, deadline=None)
def test_json_lines_come_back(tmp_path_factory, prompts):
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    assert read_prompts_file(path) == prompts
