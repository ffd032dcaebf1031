"""benchmarks/turns.py: the turns of generate.py's chat and of serve.py, on a CPU."""

import re
import sys
from types import SimpleNamespace

import pytest

import generate
from benchmarks import turns
from runtime.graphs import GraphCache

SMALL = (
    *("--eager", "--device", "cpu", "--tokens", "20", "12", "--turns", "2", "--new_tokens", "4"),
    *("--max_seq_len", "256", "--reading", "0", "--idle", "0", "--long", "100"),
)


def run(monkeypatch, capfd, directory, *words: str) -> list[str]:
    """Run the command with the embedded model; return the lines of its output."""
    checkpoint = f"--checkpoint={directory}"
    monkeypatch.setattr(sys, "argv", ["turns.py", checkpoint, *SMALL, *words])
    turns.main()
    return capfd.readouterr().out.splitlines()


def test_turns_of_a_chat(monkeypatch, capfd, directory):
    def run_here(words: list[str], env: dict) -> SimpleNamespace:
        """Run this command's own process here, without the seconds that imports take."""
        monkeypatch.setattr(sys, "argv", words[1:])
        monkeypatch.setenv(turns.STARTED, env[turns.STARTED])
        return SimpleNamespace(returncode=turns.main() or 0)

    monkeypatch.setattr(turns, "subprocess", SimpleNamespace(run=run_here))
    # The command replaces these.
    for replaced, name in ((generate, "chat"), (GraphCache, "__call__")):
        monkeypatch.setattr(replaced, name, getattr(replaced, name))
    _, ready, *lines = run(monkeypatch, capfd, directory)
    assert re.fullmatch(r"chat: ready after [\d.]+ s", ready)
    found = [re.match(r"chat, (\d+) tokens: ([\d.]+) ms, eager, then ([\d.]+) ", x) for x in lines]
    assert [int(match[1]) for match in found] == [20, 20, 12, 12]
    assert all(float(match[2]) > 0 and float(match[3]) > 0 for match in found)


def test_turns_of_a_server(monkeypatch, capfd, directory):
    monkeypatch.setattr(turns, "SPEED", 8)
    _, ready, *lines = run(monkeypatch, capfd, directory, "--server")
    assert re.fullmatch(r"server: ready after [\d.]+ s", ready)
    kinds = [line.partition(": ")[0] for line in lines]
    turn_kinds = [
        f"server, {n} tokens, {w}"
        for w in ("turns", "turns beside another answer")
        for n in (20, 12)
    ]
    assert kinds == [
        *["server, 20 tokens, at once"] * 3,
        *turn_kinds,
        "server, 100 tokens beside another answer",
    ]
    for line in lines[3:7]:
        assert all(float(word) > 0 for word in re.search(r": ([\d.]+ [\d.]+) ms", line)[1].split())
    assert float(re.search(r"pause ([\d.]+) ms", lines[-1])[1]) > 0


def test_a_model_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["turns.py", "--checkpoint", "/nowhere"])
    with pytest.raises(SystemExit) as end:
        turns.main()
    assert end.value.code == 2 and "add --arch NAME" in capsys.readouterr().err


def test_how_a_prompt_of_several_chunks_ran():
    assert turns.slowest(["replayed", "captured"]) == "captured"
    assert turns.slowest(["replayed", "eager"]) == "eager"
    assert turns.slowest(["replayed", "replayed"]) == "replayed"
    assert turns.slowest([]) == "eager"


def test_speed_and_pauses_of_an_answer():
    times = [1.0, 3.0, 3.5, 5.0]
    assert turns.firsts([times]) == [2.0]
    assert turns.speed(times) == 1.0 and turns.speed(times[:2]) == 0
    assert turns.longest(times) == 1.5 and turns.longest(times[:2]) == 0
    other = turns.OtherAnswers("http://127.0.0.1:1", [1], 2)
    other.answers = [times, [6.0, 9.0, 9.25]]
    assert other.gaps(0, 10) == [0.5, 1.5, 0.25]  # not between answers
    assert other.gaps(4.0, 9.1) == [1.5, 0.25]


def test_texts_differ_from_their_first_tokens_on():
    first, again = turns.Tokens(4096), turns.Tokens(4096)
    taken = [first.take(20), first.take(12)]
    assert taken == [again.take(20), again.take(12)] and taken[0][:12] != taken[1]
