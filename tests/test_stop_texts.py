"""Stop texts: an answer ends before the first, and looking for them takes no time that grows."""

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_reasoning import TEMPLATE, THINK, make_tokenizer

from runtime.reasoning import held_prefix
from runtime.text import TextSettings, TextStream

LETTERS = st.text("ab\n", max_size=20)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)
# Each token is one character.
TOKENIZER = SimpleNamespace(
    stop_ids=(),
    token_id=lambda text: None,
    stream=lambda ids: SimpleNamespace(push=chr, flush=lambda: ""),
)


def make_stream(stop, on_text=lambda text: None) -> TextStream:
    settings = TextSettings(stop, False, False, on_text, lambda token, begin: None)
    return TextStream((), TOKENIZER, settings)


@given(text=LETTERS, stop=STOPS)
def test_an_answer_is_cut_at_the_first_stop_text(text, stop):
    shown = []
    stream = make_stream(stop, shown.append)
    for count, letter in enumerate(text, 1):
        stream.push(ord(letter))
        begins = [text[:count].find(s) for s in stop]
        if begin := [at for at in begins if at >= 0]:
            assert stream.finish_reason == "stop"
            assert stream.text == "".join(shown) == text[: min(begin)]
            return
        assert stream.finish_reason is None
    stream.end("length")
    assert stream.text == "".join(shown) == text and stream.finish_reason == "length"


@pytest.mark.parametrize("ignore_eos", (False, True))
def test_a_stop_text_may_be_a_control_token(tmp_path, ignore_eos):
    """A prompt in a chat's format ends at its tokens, which models without a chat go on from."""
    tokenizer = make_tokenizer(tmp_path, THINK, template=TEMPLATE.format("<think>"))
    prompt = tokenizer.chat([{"role": "user", "content": "a"}])
    thoughts, stop = [], ["x", "<|end|>"]
    settings = TextSettings(stop, ignore_eos, True, print, print, thoughts.append)
    for answer, reasoning, text, found in (
        ("why</think>\n\nyes<|end|>more", "why", "yes", "<|end|>"),
        ("why</think>yes </th<|end|>more", "why", "yes </th", "<|end|>"),
        ("why<|end|>more", "why", "", "<|end|>"),
        ("why</think>ax<|end|>", "why", "a", "x"),
    ):
        stream = TextStream(prompt, tokenizer, settings)
        for token in tokenizer.encode(answer, special=True):
            stream.push(token)
        assert (stream.reasoning.strip(), stream.text.strip()) == (reasoning, text)
        assert (stream.finish_reason, stream.stop_text) == ("stop", found)


@given(text=LETTERS, marker=st.text("ab\n", min_size=1, max_size=6))
def test_the_longest_end_that_may_begin_a_marker_is_held(text, marker):
    found = [n for n in range(1, len(marker)) if text.endswith(marker[:n])]
    assert held_prefix(text, marker) == max(found, default=0)


def test_a_token_of_a_long_answer_takes_no_longer_with_stop_texts():
    stream = make_stream([chr(0x100 + n) + "x" * 499 for n in range(16)])
    stream.text = "x" * 1_000_000
    stream.shown = len(stream.text)
    begin = time.thread_time()
    for _ in range(1000):
        stream.push(ord("x"))
    assert time.thread_time() - begin < 1  # 2.7 s if all of the text is searched
    assert stream.text == "x" * 1_001_000
