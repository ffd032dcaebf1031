"""Stop texts: an answer ends before the first, and looking for them takes no time that grows."""

import time
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from runtime.reasoning import held_prefix
from runtime.text import TextSettings, TextStream

LETTERS = st.text("ab\n", max_size=20)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)
# Each token is one character.
TOKENIZER = SimpleNamespace(
    stop_ids=(), stream=lambda ids: SimpleNamespace(push=chr, flush=lambda: "")
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
