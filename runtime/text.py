"""Text of a token stream: pieces as they become certain, stop texts, statistics."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from runtime.reasoning import ANSWER, REASONING, Parts, held_prefix, make_splitter


class TextStream:
    """The text of one sequence as its tokens arrive. `finish_reason` is set once it has ended."""

    def __init__(self, ids: Sequence[int], tokenizer, settings: "TextSettings"):
        """tokenizer: a tokenizer.Tokenizer. ids: the prompt."""
        self.prompt_tokens, self.settings = len(ids), settings
        self.stop_ids = () if settings.ignore_eos else tokenizer.stop_ids
        # Stop texts that are control tokens, which have no text in the answer.
        found = {tokenizer.token_id(text): text for text in settings.stop}
        self.stop_tokens = {
            id: text
            for id, text in found.items()
            if id is not None and not tokenizer.token_bytes(id)
        }
        is_new = settings.reply and not settings.continues
        self.pieces = tokenizer.stream(() if is_new else ids)
        self.splitter = None
        if settings.on_reasoning:
            self.splitter = make_splitter(tokenizer, ids, settings.continues)
        self.text, self.reasoning, self.shown = "", "", 0
        self.times: list[float] = []
        self.finish_reason: str | None = None
        self.stop_text: str | None = None  # the stop text that has ended it

    def push(self, token: int) -> None:
        """Add the next token and show the text that has become certain, unless it has ended."""
        if self.finish_reason:
            return
        self.times.append(time.perf_counter())
        if token in self.stop_ids or token in self.stop_tokens:
            self.end("stop")
            self.stop_text = self.stop_text or self.stop_tokens.get(token)
            return
        self.settings.on_token(token, len(self.reasoning) + len(self.text))
        text = self.settings.markers.get(token) or self.pieces.push(token)
        self.add(self.splitter.push(token, text) if self.splitter else [(ANSWER, text)])
        if self.cut_at_stop():
            self.end("stop")
        else:
            self.show(len(self.text) - held_back(self.text, self.settings.stop))

    def end(self, reason: str) -> None:
        """End for this reason, unless it has ended before."""
        if self.finish_reason is None:
            if self.stop_text is None:  # else what the splitter holds back follows the stop text
                rest = "" if reason == "stop" else self.pieces.flush()
                self.add(self.splitter.flush(rest) if self.splitter else [(ANSWER, rest)])
                reason = "stop" if self.cut_at_stop() else reason
            self.finish_reason = reason
            self.show(len(self.text))

    def cut_at_stop(self) -> bool:
        """Cut the answer before the first stop text, if it has one."""
        end = find_stop(self.text, self.settings.stop, self.shown)
        if end is None:
            return False
        self.stop_text = next(s for s in self.settings.stop if self.text.startswith(s, end))
        self.text = self.text[:end]
        return True

    def add(self, parts: Parts) -> None:
        """Add new text to the answer, or to its reasoning, which is shown at once."""
        for kind, text in parts:
            if kind == REASONING and self.settings.on_reasoning:
                self.reasoning += text
                self.settings.on_reasoning(text)
            else:
                self.text += text

    def show(self, certain: int) -> None:
        self.settings.on_text(self.text[self.shown : certain])
        self.shown = certain

    def result(self, start: float, prefilled: int, read: int | None) -> dict:
        """End the text; return it with its statistics.

        start: when generation began. prefilled: prompt tokens computed, of all sequences. read:
        bytes of weights that a pass reads for one token; None if it computes several.

        Returns text, prompt_tokens, new_tokens, finish_reason ("stop", "length" or "interrupted"),
        ttft_s (time to first token), prefill_tok_s, decode_tok_s and gb_s (None below two tokens).
        If reasoning is split off: also reasoning and reasoning_tokens.
        """
        self.end("length")
        count = len(self.times)
        ttft = self.times[0] - start if count else None
        seconds = self.times[-1] - self.times[0] if count else 0.0
        rate = (count - 1) / seconds if seconds else None
        split = {}
        if self.splitter:
            split = {"reasoning": self.reasoning, "reasoning_tokens": self.splitter.tokens}
        return {
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": count,
            "finish_reason": self.finish_reason,
            "ttft_s": ttft,
            "prefill_tok_s": ttft and prefilled / ttft,
            "decode_tok_s": rate,
            "gb_s": rate and read and read * rate / 1e9,
            **split,
        }


@dataclass(frozen=True)
class TextSettings:
    """When a text ends, and the callbacks that get it."""

    stop: Sequence[str]  # texts that end it, and are no part of it
    ignore_eos: bool
    reply: bool  # not a continuation of the prompt: drop the tokenizer's leading space
    on_text: Callable[[str], None]  # each piece, as soon as it is certain
    # Each token, and where it begins in the text, after the reasoning if that is split off.
    on_token: Callable[[int, int], None]
    # Each piece of reasoning, which is then no part of the text. None: do not split it off.
    on_reasoning: Callable[[str], None] | None = None
    # {id: text} of control tokens that appear in the text, which otherwise has none.
    markers: Mapping[int, str] = field(default_factory=dict)
    # REASONING or ANSWER (runtime.reasoning), if the prompt ends inside of one. None: of neither.
    continues: str | None = None


def check_stop(stop: Sequence[str]) -> None:
    """Raise ValueError for a stop text that every answer begins with, or that none can have."""
    if "" in stop:
        raise ValueError("--stop '' would end every answer before it begins: give it some text")
    for text in stop:
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError(f"--stop {text!r} is not valid Unicode: give it as UTF-8")


def find_stop(text: str, stop: Sequence[str], start: int) -> int | None:
    """Return where the first stop text begins. start: none begins before it.

    Without `start`, searching a long answer at each token would take longer than the token.
    """
    return min((at for s in stop if (at := text.find(s, start)) >= 0), default=None)


def held_back(text: str, stop: Sequence[str]) -> int:
    """Return how many last characters may be the beginning of a stop text."""
    return max((held_prefix(text, s) for s in stop), default=0)
