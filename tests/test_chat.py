"""The chat in a terminal: commands, several lines, history, saved conversations."""

import argparse
import base64
import io
import json
import os
import re
import shutil
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pexpect
import pytest

import cli.conversation
import cli.terminal
from cli.answer_printer import AnswerPrinter
from cli.chat import COMMANDS, Chat, greeting, read_requests, split_command
from cli.clipboard import copy_text
from cli.command import Terminated, suppress_ctrl_c
from cli.conversation import (
    Conversation,
    is_conversation,
    load_messages,
    load_tools,
    save_messages,
)
from cli.report import format_statistics, format_turn, in_bytes, in_seconds
from cli.terminal import LineReader, edit_text, read_message
from tool_calls.reading import CallReader

ROOT = Path(__file__).parents[1]
USER = {"role": "user", "content": "import os"}
ANSWER = {"role": "assistant", "content": "\nimport sys\u2026"}
SYSTEM = {"role": "system", "content": "Python"}
OPTIONS = "--interactive", "--temperature", "0", "--max_new_tokens", "6", "--ignore_eos"


# Messages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "messages"),
    (
        (["one", "two"], ["one", "two"]),
        (["one\\", "two\\", "three", "four"], ["one\ntwo\nthree", "four"]),
        (["one\\"], ["one"]),  # the input ends there
        (['"""one', "  two", '"""', "three"], ["one\n  two", "three"]),
        (['"""one two"""', "three"], ["one two", "three"]),
        (['"""', "one", '  two"""'], ["one\n  two"]),
        (['"""', "one"], ["one"]),  # the input ends inside
        (['x = """', "one"], ['x = """', "one"]),
    ),
)
def test_messages_of_several_lines(typed, messages):
    lines = iter(typed)
    found = []
    while (message := read_message(lambda prompt: next(lines, None))) is not None:
        found.append(message)
    assert found == messages


@pytest.mark.parametrize(
    ("typed", "found"),
    (
        ("/retry", ("/retry", "")),
        ("/retry ", ("/retry", "")),
        ("/system Be brief.\nAnd kind.", ("/system", "Be brief.\nAnd kind.")),
        ("/system", ("/system", "")),
        ("/save a b.json", ("/save", "a b.json")),
        (" /retry", ("", " /retry")),
        ("/usr/bin is a folder", ("", "/usr/bin is a folder")),
        ("a /retry", ("", "a /retry")),
        ("/", ("", "/")),
        ("/retry it", ("/help", "")),
        ("/sav x", ("/help", "")),
        ("/save", ("/help", "")),
    ),
)
def test_commands_and_text(typed, found):
    assert split_command(typed) == found


def test_a_conversation():
    conversation = Conversation("Python")
    assert conversation.messages == [SYSTEM] and conversation.retract() is None
    conversation.messages += [{"role": "user", "content": "import os"}, ANSWER]
    assert conversation.messages == [SYSTEM, USER, ANSWER]
    assert conversation.retract() == "import os" and conversation.messages == [SYSTEM]
    conversation.messages += [USER, ANSWER]
    conversation.set_system("C")
    assert conversation.messages == [{"role": "system", "content": "C"}]
    conversation.load([USER, ANSWER])
    conversation.reset()
    assert conversation.messages == []
    conversation.load([SYSTEM, USER, ANSWER])
    conversation.reset()
    assert conversation.messages == [SYSTEM]
    conversation.set_system("")
    assert conversation.messages == []


# Files --------------------------------------------------------------------------------------------


def test_a_conversation_is_saved_and_loaded(tmp_path):
    path = tmp_path / "chat.json"
    save_messages([SYSTEM, USER, ANSWER], path)
    assert load_messages(path) == json.loads(path.read_text()) == [SYSTEM, USER, ANSWER]
    save_messages([USER], path)
    assert load_messages(path) == [USER]
    save_messages([{**USER, "content": "\udc80"}], path)  # a byte of the terminal that is no text
    assert load_messages(path)[0]["content"] == "\ufffd", "no tokenizer takes the byte"
    assert list(tmp_path.iterdir()) == [path]


def test_a_conversation_that_no_disk_takes_is_one_line(tmp_path, monkeypatch):
    def full(path: Path, text: str) -> None:
        text.encode()
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(cli.conversation, "replace_text", full)
    for message in (USER, {**USER, "content": "\udc80"}):
        with pytest.raises(ValueError, match="No space left on device; free some space"):
            save_messages([message], tmp_path / "chat.json")


@pytest.mark.parametrize(
    ("data", "message"),
    (
        (b"{", "is not JSON"),
        (b"\xff", "is not UTF-8 text"),
        (b'{"messages": []}', "holds no conversation"),
        (b'[{"role": "tool", "content": "x"}]', "holds no conversation"),
        (b'[{"role": "user", "content": 1}]', "holds no conversation"),
        (b'[{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]', "holds no"),
        (b"[" * 100_000, "is not JSON"),
    ),
)
def test_bad_files_are_refused(tmp_path, data, message):
    path = tmp_path / "chat.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        load_messages(path)
    with pytest.raises(ValueError, match="holds no conversation: give another name"):
        save_messages([USER], path)
    assert path.read_bytes() == data


def test_places_that_are_no_file_are_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "none", tmp_path / "fifo", Path("a" * 300)):
        with pytest.raises(ValueError):
            load_messages(path)
    for path in (tmp_path, tmp_path / "no" / "x", tmp_path / "fifo", Path("a" * 300)):
        with pytest.raises(ValueError, match=f"^{path}"):
            save_messages([USER], path)
    assert not is_conversation({}) and is_conversation([])
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero"), tmp_path / "none"):
        with pytest.raises(ValueError):
            load_tools(path)
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ValueError, match="over 16 MiB"):
        load_tools(tmp_path / "large")


def test_files_are_utf8_in_any_locale(tmp_path, monkeypatch):
    """Latin-1 has é, and no €."""
    monkeypatch.setattr("io.text_encoding", lambda encoding, level=2: encoding or "latin-1")
    message = {"role": "user", "content": "é €\nand"}
    save_messages([message], tmp_path / "chat.json")
    assert load_messages(tmp_path / "chat.json") == [message]
    assert "é €" in (tmp_path / "chat.json").read_bytes().decode()
    monkeypatch.setenv("VISUAL", "sed -i s/and/end/")
    assert edit_text("é €\nand") == "é €\nend"


# Words --------------------------------------------------------------------------------------------


def test_figures_have_units():
    counts = (0, 49_152, 8.43e6, 99.96e6, 999e6, 1e9, 25.53e9, 463.2e9)
    shown = ["0 kB", "49 kB", "8.43 MB", "100 MB", "999 MB", "1 GB", "25.5 GB", "463 GB"]
    assert [in_bytes(count) for count in counts] == shown
    times = (2e-5, 0.0123, 0.9994, 0.99951, 1, 61.26)
    shown = ["0.02 ms", "12.3 ms", "999 ms", "1.0 s", "1.0 s", "61.3 s"]
    assert [in_seconds(seconds) for seconds in times] == shown
    result = {
        "prompt_tokens": 1204,
        "new_tokens": 200,
        "ttft_s": 0.0312,
        "prefill_tok_s": 38590.2,
        "decode_tok_s": 152.91,
        "bytes_per_token": 25_530_000_000,
        "gb_s": 3903.1,
        "peak_bytes": 96_200_000_000,
    }
    assert format_statistics(result) == (
        "1,204 prompt tokens at 38,590/s, first token after 31.2 ms, 200 new tokens at 152.9/s, "
        "reads 25.5 GB/token, 3,903 GB/s, peak memory 96.2 GB"
    )
    turn = format_turn(result, 1404, 4096)
    assert turn == "200 tokens at 152.9/s, context 1,404 of 4,096, first token after 31.2 ms"
    one = result | {"decode_tok_s": None, "gb_s": None, "prefill_tok_s": None, "new_tokens": 1}
    assert "None" not in format_statistics(one) and "1 token, context" in format_turn(one, 1, 2)
    copied = {"hit_ratio": 0.8512, "cpu_ratio": 0.13, "bytes_moved_per_token": 3e8}
    line = format_statistics(result | {"offload": copied, "speculation": {"tokens_per_pass": 2.5}})
    assert line.endswith(
        "2.50 tokens/pass, expert cache hits 85%, CPU multiplies 13%, copies 300 MB/token"
    )
    none = dict.fromkeys(copied)
    assert format_statistics(result | {"offload": none}) == format_statistics(result)


def test_the_greeting():
    line = "Qwen3-30B-A3B in int4, context of 4,096 tokens; /help lists commands, /exit ends"
    assert greeting("Qwen3-30B-A3B", "int4", 4096, True) == line
    assert greeting("tiny-moe-0123abcd", "bf16", 64, False).splitlines()[1].startswith("This model")


# A conversation with a stand-in for a model that has a template -----------------------------------


@dataclass(frozen=True)
class Seed:
    seed: int | None = None


class Parrot:
    """A session, a tokenizer and `generate` in one; answers with the number of the question."""

    max_seq_len, has_chat_template, stop_ids = 40, True, (0,)

    def __init__(self):
        self.asked, self.ids, self.seeds = [], [[1, 0]], []

    def chat(self, messages: list[dict]) -> list[int]:
        if messages[-1]["content"] == "bad":
            raise ValueError("the template says no")
        self.asked.append(messages)
        return [1] * sum(len(message["content"]) for message in messages)

    def encode(self, text: str, bos: bool = True) -> list[int]:
        return [1] * len(text)

    def generate(self, prompt, max_new_tokens, sampling, on_text, on_reasoning, **options) -> dict:
        self.seeds.append(sampling.seed)
        on_reasoning("hidden")
        on_text(str(len(self.asked)))
        return {
            "text": str(len(self.asked)),
            "prompt_tokens": len(prompt),
            "new_tokens": 1,
            "ttft_s": 1.5,
            "decode_tok_s": None,
        }


@pytest.fixture
def parrot() -> Parrot:
    return Parrot()


@pytest.fixture
def talk(parrot) -> Chat:
    options = argparse.Namespace(system="Python", max_new_tokens=5, stop=[], ignore_eos=False)
    return Chat(parrot.generate, parrot, parrot, options, Seed(7))


def test_a_chat_with_a_template(parrot, talk, capsys):
    talk.handle("", "one")
    talk.handle("", "two")
    system, one, two = SYSTEM, {**USER, "content": "one"}, {**USER, "content": "two"}
    first = {"role": "assistant", "content": "1"}
    assert parrot.asked == [[system, one], [system, one, first, two]]
    out, err = capsys.readouterr()
    assert out == "1\n2\n"
    folded, line = err.splitlines()[:2]
    assert folded == "reasoning, 1 token: /reasoning shows it"
    assert line == "1 token, context 10 of 40, first token after 1.5 s"
    talk.handle("/retry", "")
    assert parrot.asked[2] == parrot.asked[1] and parrot.seeds == [7, 7, 8]
    assert talk.conversation.messages[-1]["content"] == "3"
    kept = list(talk.conversation.messages)
    talk.handle("", "bad")
    talk.handle("", "x" * 40)
    assert talk.conversation.messages == kept
    err = capsys.readouterr().err
    assert "error: the template says no" in err
    assert "the message does not fit the context of 40 tokens: /reset starts anew" in err
    talk.handle("/system", "C")
    talk.handle("", "one")
    assert parrot.asked[-1] == [{"role": "system", "content": "C"}, one]
    talk.handle("/load", [one, {**first, "content": "9"}])
    talk.handle("/retry", "")
    assert parrot.asked[-1] == [one]
    talk.handle("/load", [{"role": "user", "content": "bad"}])
    talk.handle("/retry", "")
    assert talk.conversation.messages == [{"role": "user", "content": "bad"}]


def test_lines_of_windows_are_those_of_others(monkeypatch):
    lines = "\ufeff/system Be brief.", "one\\", "two", "three", '"""a', 'b"""', "/exit"
    for end in ("\n", "\r\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(end.join(lines) + end, newline=""))
        expected = [("/system", "Be brief."), ("", "one\ntwo"), ("", "three"), ("", "a\nb")]
        assert list(read_requests()) == expected


def test_bytes_that_are_no_text_reach_no_conversation(monkeypatch, capsys):
    """A conversation with them has no token ids any more: /system ended the chat."""
    lines = "/system a\udcff", "\udcff", "/edit \udcff", "/save \udcff.json", "/system b"
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert list(read_requests()) == [("/save", "\udcff.json"), ("/system", "b")]
    err = capsys.readouterr().err
    assert err.count("the text is not valid Unicode at character") == 3


@pytest.mark.parametrize("command", ("/load", "/tools", "/save"))
def test_a_home_that_is_not_there_is_one_line(talk, monkeypatch, capsys, command):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{command} ~nobody-here/x\n"))
    for name, given in read_requests():
        talk.handle(name, given)
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "nobody" in x]
    assert "there is no such home directory: give another path" in line


def test_reasoning_is_folded_and_can_be_shown(talk, capsys):
    talk.handle("/reasoning", "")
    assert capsys.readouterr().out == "the last answer has no reasoning\n"
    talk.handle("", "one")
    capsys.readouterr()
    talk.handle("/reasoning", "")
    assert capsys.readouterr().out == "hidden\n"


def test_a_terminal_counts_the_reasoning_in_one_line():
    shown = []
    printer = AnswerPrinter(lambda *texts, **options: shown.append("".join(texts)))
    printer.dims = True
    for piece in ("I ", "think."):
        printer.reasoning(piece)
    for piece in ("", "Yes", "."):
        printer.answer(piece)
    printer.end(False)
    assert [text.replace("\r\x1b[K", "<") for text in shown if text] == [
        "<\x1b[2mreasoning, 1 token ...\x1b[0m",
        "<\x1b[2mreasoning, 2 tokens ...\x1b[0m",
        "<\x1b[2mreasoning, 2 tokens: /reasoning shows it\x1b[0m",
        "Yes",
        ".",
    ]
    assert (printer.reasoned, printer.text) == ("I think.", "Yes.")


def test_the_last_message_is_edited(parrot, talk, capsys):
    talk.handle("/edit", "none")
    assert "no message to answer again" in capsys.readouterr().err
    talk.handle("", "one")
    talk.handle("", "two")
    talk.handle("/edit", "three")
    contents = [message["content"] for message in talk.conversation.messages]
    assert contents == ["Python", "one", "1", "three", "3"]
    talk.handle("/edit", "bad")  # the template refuses it
    assert [message["content"] for message in talk.conversation.messages] == contents
    assert talk.last_message() == "three"


TOOLS = [{"type": "function", "function": {"name": "sun", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "sun", "arguments": {"city": "Paris"}}\n</tool_call>'


class Caller(Parrot):
    """Calls a function twice, then answers."""

    max_seq_len = 4000

    def template_has(self, text: str) -> bool:
        return text == "<tool_call>"

    def token_id(self, name: str) -> None:
        return None

    def chat(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        self.tools = tools
        return super().chat(messages)

    def generate(self, prompt, *arguments, on_text, **options) -> dict:
        result = super().generate(prompt, *arguments, on_text=lambda text: None, **options)
        text = "Done." if self.asked[-1][-1]["role"] == "tool" else f"I call. {CALL}{CALL}"
        for letter in text:
            on_text(letter)
        return result | {"text": text, "finish_reason": "stop"}


def test_calls_are_shown_and_answered(capsys):
    caller = Caller()
    options = argparse.Namespace(system=None, max_new_tokens=5, stop=[], ignore_eos=False)
    talk = Chat(caller.generate, caller, caller, options, Seed(7), partial(CallReader, caller))
    talk.handle("/tools", TOOLS)
    assert "tools: sun" in capsys.readouterr().err
    talk.handle("", "sun?")
    out, err = capsys.readouterr()
    call = 'call sun {"city": "Paris"}'
    assert out == f"I call.\n{call}\n{call}\n"
    assert err.endswith("the next message is the result of sun\n")
    assert caller.tools == TOOLS
    talk.handle("", "17 degrees")
    assert len(caller.asked) == 1  # the other call has no result yet
    talk.handle("", "18 degrees")
    assert capsys.readouterr().out == "Done.\n"
    asked, answer, *results = caller.asked[1]
    assert asked["content"] == "sun?" and answer["content"] == "I call."
    ids = [call["id"] for call in answer["tool_calls"]]
    assert ids == ["call_1_0", "call_1_1"]
    expected = zip(ids, ("17 degrees", "18 degrees"), strict=True)
    assert [(r["tool_call_id"], r["content"]) for r in results] == list(expected)
    assert {result["name"] for result in results} == {"sun"}
    assert is_conversation(talk.conversation.messages)
    talk.handle("/load", talk.conversation.messages[:2])  # before the results
    assert "the next message is the result of sun" in capsys.readouterr().err
    talk.handle("/tools", [])
    assert talk.reader is None


def test_conversations_with_calls_are_saved(tmp_path):
    call = {"id": "a", "type": "function", "function": {"name": "sun", "arguments": "{}"}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "17"}
    save_messages([USER, asked, result], tmp_path / "chat.json")
    assert load_messages(tmp_path / "chat.json") == [USER, asked, result]
    for damaged in (
        [USER, result],
        [USER, asked, {**result, "tool_call_id": "b"}],
        [USER, asked, {**result, "tool_call_id": []}],
        [USER, {**asked, "tool_calls": [{**call, "function": {"name": 5, "arguments": ""}}]}],
        [USER, {**asked, "tool_calls": {}}],
    ):
        assert not is_conversation(damaged)


def test_each_call_has_a_result_of_its_own_whatever_its_id():
    call = {"id": "a", "type": "function", "function": {"name": "sun", "arguments": "{}"}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    conversation = Conversation()
    for _ in range(2):  # the second answer has the ids of the first
        conversation.messages += [USER, asked]
        for count in (2, 1, 0):
            assert conversation.open_calls() == [call] * count
            if count:
                conversation.add_result(call, "17")
    conversation.messages.append({**USER, "tool_calls": [call]})
    assert conversation.open_calls() == []


@pytest.mark.parametrize("text", ("{", "[]", "{}", '[{"name": 5}]', '[{"function": {}}]', "5"))
def test_files_without_functions_are_refused(tmp_path, text):
    (tmp_path / "tools.json").write_text(text)
    with pytest.raises(ValueError, match=r"tools\.json"):
        load_tools(tmp_path / "tools.json")


def test_functions_are_read_with_and_without_a_wrapper(tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([TOOLS[0], {"name": "rain"}, {"name": "snow", "parameters": None}]))
    assert [tool["function"]["name"] for tool in load_tools(path)] == ["sun", "rain", "snow"]
    assert load_tools(path)[1]["function"]["parameters"] == {"type": "object"}
    with pytest.raises(ValueError):
        load_tools(tmp_path / "none.json")


def test_a_message_of_several_lines_is_changed_in_the_editor(monkeypatch):
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", "sed -i s/one/two/")
    assert edit_text("one\nand") == "two\nand"
    monkeypatch.setenv("EDITOR", "false")
    with pytest.raises(ValueError, match="set EDITOR"):
        edit_text("one\nand")
    monkeypatch.delenv("EDITOR")
    with pytest.raises(ValueError, match="set EDITOR, or give /edit TEXT"):
        edit_text("one\nand")
    with pytest.raises(ValueError, match="/edit TEXT"):  # no terminal
        edit_text("one")
    assert edit_text(None) is None


def test_the_desktops_program_copies(monkeypatch, tmp_path):
    program = tmp_path / "xclip"
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/copied\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    assert copy_text("caf\u00e9") == "copied 4 characters"
    assert (tmp_path / "copied").read_text() == "caf\u00e9"
    program.unlink()
    monkeypatch.delenv("DISPLAY")
    assert "no clipboard here" in copy_text("x")


def test_other_ranks_print_and_write_nothing(talk, tmp_path, capsys):
    talk.silent = True
    for name, text in (("", "one"), ("/save", str(tmp_path / "x")), ("/retry", "")):
        talk.handle(name, text)
    assert capsys.readouterr() == ("", "") and not list(tmp_path.iterdir())


# Terminals ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("home")
    return {"XDG_CACHE_HOME": str(root / "cache"), "XDG_STATE_HOME": str(root / "state")}


def heed_hangups() -> None:
    """Let SIGHUP end this process, also where tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def start(folders, tmp_path):
    """Start a chat in a pseudo-terminal, wait for its first prompt."""
    children = []

    def spawn(*arguments: str) -> pexpect.spawn:
        environment = os.environ | folders | {"TERM": "dumb", "OMP_NUM_THREADS": "1"}
        line = [str(ROOT / "generate.py"), *OPTIONS, *arguments]
        child = pexpect.spawn(
            sys.executable,
            line,
            env=environment,
            cwd=tmp_path,
            timeout=120,
            encoding="utf-8",
            preexec_fn=heed_hangups,
        )
        child.setwinsize(50, 200)
        children.append(child)
        child.expect("\n> ")
        return child

    yield spawn
    for child in children:
        child.close(force=True)


def send(child: pexpect.spawn, line: str) -> str:
    """Type a line; return what is printed until the next prompt."""
    child.sendline(line)
    child.expect("\n> ")
    return child.before


def end_by(number: int, child: pexpect.spawn) -> None:
    """End a chat that waits for a message by a signal. Ctrl-C drops the message alone."""
    child.sendintr()
    child.expect("\n> ")
    child.kill(number)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 128 + number and "Traceback" not in child.before


@pytest.mark.slow
@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGHUP))
def test_a_signal_ends_a_chat_that_waits_for_a_message(number, start):
    """SIGTERM ends that of `test_a_template_folds_reasoning_and_takes_tools`, too."""
    end_by(number, start())


def test_a_signal_ends_a_chat_that_captures_or_edits(monkeypatch):
    for error in (Terminated(15), KeyboardInterrupt()):

        def fail(prompt: str, error=error) -> str:
            raise error

        monkeypatch.setattr("builtins.input", fail)
        monkeypatch.setattr(cli.terminal.sys.stdin, "isatty", lambda: True, raising=False)
        is_signal = isinstance(error, Terminated)
        with pytest.raises(Terminated) if is_signal else nullcontext():
            assert edit_text("one line") is None
        with pytest.raises(Terminated) if is_signal else nullcontext(), suppress_ctrl_c():
            raise error


def test_a_chat_in_a_terminal(start, folders, tmp_path):
    child = start()
    assert re.search(r"tiny-moe in bf16, context of 4,096 tokens; /help", child.before)
    assert "This model has no chat template: it only continues your text." in child.before
    assert "/system TEXT" in send(child, "/help")
    first = send(child, "import os")
    assert re.search(r"6 tokens at [\d.,]+/s, context \d+ of 4,096, first token after", first)
    assert "2 messages written to" in send(child, "/save chat.json")
    again = send(child, "/retry")
    answers = first.split("import os", 1)[1], again.split("/retry", 1)[1]
    assert answers[0].split("6 tokens")[0] == answers[1].split("6 tokens")[0]
    assert "peak memory" in send(child, "/stats")
    kept = load_messages(tmp_path / "chat.json")[1]["content"]
    code = base64.b64encode(kept.encode()).decode()
    assert f"\x1b]52;c;{code}\x07sent {len(kept)} characters" in send(child, "/copy")
    child.sendline("/edit")
    child.expect("import os")  # the message, to be changed
    assert "6 tokens at" in send(child, "\x01# \x05 and sys")
    assert "no reasoning" in send(child, "/reasoning")
    assert "No such file" in send(child, "/tools x.json")
    assert "No such file" in send(child, "/load nothing.json")
    assert "there is no command /zzz" in send(child, "/zzz")
    send(child, "/reset")
    assert "no message to answer" in send(child, "/retry")
    assert "2 messages" in send(child, "/load chat.json")
    assert [m["role"] for m in load_messages(tmp_path / "chat.json")] == ["user", "assistant"]
    child.sendline("/quit")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    history = Path(folders["XDG_STATE_HOME"]) / "moe-fast" / "chat_history"
    assert "import os\n" in history.read_text() and history.stat().st_mode & 0o777 == 0o600

    child = start()  # Up brings the last line of the chat before, Ctrl-A and Ctrl-K edit it
    child.send("\x1b[A")
    child.expect("/quit")
    child.send("\x01\x0bimport re\\\r")
    child.expect(r"\. ")
    child.send("import sy\t")
    child.send("s\r")
    child.expect("context")
    child.expect("\n> ")
    child.sendintr()
    child.expect("/exit ends")
    child.send("/res\t\r")  # completed to /reset
    child.expect("/reset")
    child.expect("\n> ")
    assert "no message to answer" in send(child, "/retry")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_a_template_folds_reasoning_and_takes_tools(start, directory, tmp_path):
    """The embedded model's text is reasoning: the template opens a block."""
    model = tmp_path / "model_bf16"
    shutil.copytree(directory, model)
    path = model / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>{# </think> #}"
    config = json.loads(path.read_text()) | {"chat_template": template}
    path.write_text(json.dumps(config))
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    child = start("--checkpoint_path", str(model))
    assert "no chat template" not in child.before
    assert "tools: sun" in send(child, "/tools tools.json")
    assert "has no functions" in send(child, "/tools model_bf16/config.json")
    shown = send(child, "import os")
    assert re.search(r"reasoning, \d tokens?: /reasoning shows it", shown)
    assert "6 tokens at" in shown and len(send(child, "/reasoning").splitlines()) > 1
    end_by(signal.SIGTERM, child)


def test_the_history_is_bounded_and_may_be_missing(tmp_path, monkeypatch, caplog):
    assert set(COMMANDS) >= {"/help", "/system", "/save", "/load", "/retry", "/stats", "/exit"}
    monkeypatch.setattr(cli.terminal, "readline", None)
    assert not LineReader(COMMANDS).edits
    pytest.importorskip("readline")
    monkeypatch.undo()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    reader = LineReader(COMMANDS)
    reader.open_history()
    assert reader.history is None and "history is not kept" in caplog.text
    assert cli.terminal.MAX_HISTORY == 1000
