"""The server with --speculate: answers are those without it, whenever they begin and end."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from local_server import LocalServer
from test_serve import LENGTH, PROMPT, Running

from cli.serve_options import build_parser, check_options
from generate import generate, load_model
from gguf_files.opening import open_source
from memory.commands import uses_head
from runtime.drafting_batch import DraftingBatch
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from serve import main as serve
from serve import open_speculation
from tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("few_threads")
REPEATED = PROMPT * 3  # lookups find the continuation
KINDS = {
    "lookup": ("--speculate", "lookup"),
    "auto": ("--speculate", "auto", "--draft_tokens", "3"),
    "one row": ("--speculate", "lookup", "--max_batch", "1"),
    "mtp": ("--speculate", "mtp", "--max_batch", "1", "--draft_tokens", "2"),
    "auto with a head": ("--speculate", "auto", "--max_batch", "1"),
}


@pytest.fixture(scope="module", params=KINDS)
def serving(request, hybrid_directory, few_threads):
    """A server of the hybrid model, and greedy answers of the same model without a server."""
    running = Running(hybrid_directory, options=KINDS[request.param])
    session = Session(load_model(hybrid_directory, "cpu", torch.float32), LENGTH)
    tokenizer = load_tokenizer(hybrid_directory)

    def alone(prompt: str, count: int, **options) -> dict:
        session.reset()
        return generate(session, tokenizer, prompt, count, Sampling(temperature=0), **options)

    yield running, alone
    running.close()


def greedy(running: LocalServer, prompt: str, count: int, **options):
    return running.complete(prompt, max_tokens=count, temperature=0, **options)


def test_streamed_and_whole_answers_are_those_of_plain_steps(serving):
    running, alone = serving
    before = running.metric("accepted_tokens_total")
    for prompt in (REPEATED, "class A:\n"):
        expected = alone(prompt, 16)
        whole = greedy(running, prompt, 16)
        parts = list(
            greedy(running, prompt, 16, stream=True, stream_options={"include_usage": True})
        )
        assert whole.choices[0].text == expected["text"]
        assert "".join(p.choices[0].text for p in parts if p.choices) == expected["text"]
        for usage in (whole.usage, parts[-1].usage):
            assert usage.completion_tokens == expected["new_tokens"]
    drafted, accepted = (running.metric(f"{name}_tokens_total") for name in ("drafted", "accepted"))
    # A controller may find that drafts do not pay: that depends on the clock.
    assert running.decoder.batch.speculation.auto or before < accepted
    assert accepted <= drafted


def test_a_stop_text_may_end_an_answer_anywhere_in_a_pass(serving):
    """The next turn goes on with the text up to it."""
    running, alone = serving
    text = alone(REPEATED, 24)["text"]
    for start in range(4, 24, 10):
        stop = text[start : start + 3]
        expected = alone(REPEATED, 24, stop=[stop])
        found = greedy(running, REPEATED, 24, stop=stop)
        assert found.choices[0].text == expected["text"] == text[: text.index(stop)]
        assert found.choices[0].finish_reason == "stop"
        assert found.usage.completion_tokens == expected["new_tokens"]
        after = REPEATED + found.choices[0].text + "\n# then"
        assert greedy(running, after, 5).choices[0].text == alone(after, 5)["text"]


def test_a_conversation_goes_on_after_passes(serving):
    running, alone = serving
    prompt = REPEATED
    for turn in range(3):
        found = greedy(running, prompt, 8)
        assert found.choices[0].text == alone(prompt, 8)["text"]
        assert turn == 0 or found.usage.prompt_tokens_details.cached_tokens > 0
        prompt += found.choices[0].text + f"\n# {turn}\n"


@pytest.mark.slow
def test_answers_side_by_side_and_interrupted_ones(serving):
    """Some clients leave after a few characters, some answers have a stop text, others are whole.

    Up to four at a time may share passes.
    """
    running, alone = serving
    prompts = [REPEATED, "def f(x):\n", "class A:\n" * 3, "import os\n"] * 2
    end = alone(prompts[2], 20)["text"][-5:]

    def ask(number: int) -> str:
        time.sleep(0.03 * number)
        if number % 4 == 1:
            with greedy(running, prompts[number], 60, stream=True) as stream:
                return next(iter(stream)).choices[0].text
        stop = [end] if number % 4 == 2 else None
        return greedy(running, prompts[number], 30 + number, stop=stop).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    for number, text in enumerate(found):
        expected = alone(prompts[number], 60 if number % 4 == 1 else 30 + number)["text"]
        if number % 4 == 2:
            expected = expected.split(end)[0]
        assert expected.startswith(text) if number % 4 == 1 else text == expected
    batch = running.decoder.batch
    rows = {rows for rows, _, _ in batch.speculation.steps}
    assert batch.speculation.auto or (max(rows) > 1) == (batch.max_batch > 1)


def test_a_seed_and_logprobs_leave_drafts_out(serving):
    """The same seed gives the same text; details are those of plain steps."""
    running, _ = serving
    before = running.metric("drafted_tokens_total")
    first, second = (running.complete(REPEATED, max_tokens=8, seed=3) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    found = greedy(running, REPEATED, 8, logprobs=2).choices[0]
    assert len(found.logprobs.tokens) == 8
    greedy(running, REPEATED, 8, frequency_penalty=0.5)
    assert running.metric("drafted_tokens_total") == before


def test_a_sampled_answer_without_a_seed_is_drafted_for(serving):
    running, _ = serving
    before = running.metric("drafted_tokens_total")
    for _ in range(3):
        found = running.complete(REPEATED, max_tokens=24, temperature=0.2)
        assert found.usage.completion_tokens == 24 or found.choices[0].finish_reason == "stop"
    is_auto = running.decoder.batch.speculation.auto
    assert is_auto or running.metric("drafted_tokens_total") > before


@pytest.mark.parametrize(
    ("options", "is_fast", "ranks", "kind"),
    (
        ("--compile", True, 1, "auto"),
        ("--compile", False, 1, None),  # Inductor compiles a part of passes, for seconds each
        ("--compile", True, 2, None),
        ("--compile --offload --gpu_memory 1GB", True, 1, None),
        ("--compile --speculate off", True, 1, None),
        ("--compile --speculate auto", False, 1, "auto"),
        ("--compile --speculate lookup", False, 2, "lookup"),
        ("", False, 1, "auto"),
        ("", False, 2, None),
    ),
)
def test_what_a_server_drafts_with(options, is_fast, ranks, kind, monkeypatch):
    made, options = [], build_parser().parse_args(options.split())
    check_options(options)
    monkeypatch.setattr("serve.process_group.size", lambda: ranks)
    monkeypatch.setattr("serve.speculate", lambda *given: made.append(given[-1]))
    session = SimpleNamespace(compiled=bool(options.compile), captures_fast=is_fast)
    open_speculation(options, None, session)
    assert made == ([kind] if kind else [])


@pytest.mark.parametrize("batch", ("1", "4"))
def test_a_compiled_server_drafts_by_lookups_alone(batch, hybrid_directory, monkeypatch):
    """By default. A head that is there takes memory, and Inductor compiles its passes."""
    monkeypatch.setattr(Session, "captures_fast", True)
    checkpoint = open_source(hybrid_directory)
    found = {}
    for given in ((), ("--speculate", "auto")):
        options = build_parser().parse_args(["--compile", "--max_batch", batch, *given])
        check_options(options)
        session = Session(
            load_model(checkpoint, "cpu"), 64, SessionOptions(int(batch), compile=True)
        )
        speculation = DraftingBatch(open_speculation(options, checkpoint, session)).speculation
        found[given] = uses_head(options, checkpoint), speculation.captures.waits
    assert found[()] == (False, True)
    assert found["--speculate", "auto"] == (batch == "1", batch != "1")


@pytest.mark.parametrize(
    ("options", "drafts"),
    (((), True), (("--speculate", "off"), False), (("--offload", "--gpu_memory", "1GB"), False)),
)
def test_the_default_drafts_without_offloading(directory, options, drafts):
    running = Running(directory, options=options)
    try:
        assert isinstance(running.decoder.batch, DraftingBatch) == drafts
        assert not drafts or running.decoder.batch.speculation.auto
    finally:
        running.close()


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (("--speculate", "mtp", "--max_batch", "2"), "--max_batch 2: with --speculate mtp it must"),
        (("--draft_tokens", "3"), "--draft_tokens needs a source of drafts: add --speculate"),
        (("--draft_tokens", "3", "--speculate", "off"), "--draft_tokens needs a source of drafts"),
    ),
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_options(build_parser().parse_args(options))


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (("--speculate", "lookup", "--draft_tokens", "16"), "error: --draft_tokens 16: it must be"),
        (("--speculate", "mtp"), "error: "),
        (("--speculate", "mtp", "--draft_tokens", "8"), "error: --draft_tokens 8: --speculate mtp"),
    ),
)
def test_a_model_that_cannot_draft_so_is_refused(directory, options, message, monkeypatch, capsys):
    """The error is one line, before weights are read; the exit code is 2."""
    arguments = "--checkpoint_path", str(directory), "--port", "0", "--device", "cpu"
    monkeypatch.setattr(sys, "argv", ["serve.py", *arguments, *options])
    monkeypatch.setattr("serve.open_session", None)
    assert serve() == 2
    out, errors = capsys.readouterr()
    assert out == "" and errors.startswith(message) and errors.count("\n") == 1
