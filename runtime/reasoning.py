"""Reasoning blocks: text in which a chat model thinks before it answers.

Two kinds are known: `<think> ... </think>`, and gpt-oss's channels (harmony), of which `final` is
the answer. Markers are recognized by their token ids, so that text which only spells one is text.
"""

from collections.abc import Iterator, Sequence

REASONING, ANSWER = "reasoning", "answer"
OPEN, CLOSE = "<think>", "</think>"
HARMONY = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
Parts = list[tuple[str, str]]  # kind, text


def make_splitter(tokenizer, prompt: Sequence[int]) -> "Splitter | None":
    """Return what splits an answer to this prompt; None if the model has no reasoning blocks.

    tokenizer: a tokenizer.Tokenizer. Without tokens of its own, a model marks blocks by text, if
    its chat template does.
    """
    harmony = [tokenizer.token_id(name) for name in HARMONY]
    if None not in harmony:
        return HarmonySplitter(tokenizer, prompt, harmony)
    think = tokenizer.token_id(OPEN), tokenizer.token_id(CLOSE)
    if None not in think:
        return ThinkSplitter(tokenizer, prompt, think)
    return TextSplitter(tokenizer, prompt) if tokenizer.template_has(CLOSE) else None


class Splitter:
    """Splits one answer. `kind` is that of the next text, `tokens` counts those of reasoning."""

    kind: str | None
    tokens = 0

    def push(self, token: int, text: str) -> Parts:
        """Take the next token and the text that it completes; return the parts now certain."""
        before = self.kind
        parts = [(kind, piece) for kind, piece in self.split(token, text) if piece]
        self.tokens += REASONING in (before, self.kind)
        return parts

    def flush(self, text: str = "") -> Parts:
        """End the answer with this last text; return it with what was held back."""
        return [(kind, piece) for kind, piece in self.rest(text) if piece]

    def split(self, token: int, text: str) -> Iterator[tuple[str, str]]:
        raise NotImplementedError

    def rest(self, text: str) -> Iterator[tuple[str, str]]:
        raise NotImplementedError


class TextSplitter(Splitter):
    """`<think>` blocks by their text.

    A block begins in the prompt or before any other text; markers after it are part of the answer.
    White space around markers belongs to neither part.
    """

    def __init__(self, tokenizer, prompt: Sequence[int]):
        self.kind = REASONING if self.is_opened(tokenizer, prompt) else None  # None: undecided
        self.held = ""  # may become a marker, or be white space before a part
        self.begun = False  # the current part has text

    def is_opened(self, tokenizer, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends inside of a block, as some templates do."""
        return tokenizer.decode(prompt[-4 * len(OPEN) :]).rstrip().endswith(OPEN)

    def split(self, token: int, text: str) -> Iterator[tuple[str, str]]:
        self.held += text
        if self.kind is None:
            start = self.held.lstrip()
            if start.startswith(OPEN):
                self.kind, self.held = REASONING, start.removeprefix(OPEN)
            elif OPEN.startswith(start):
                return
            else:
                self.kind, self.begun = ANSWER, True  # with its own white space
        if self.kind == REASONING:
            thoughts, marker, self.held = self.held.partition(CLOSE)
            if not marker:
                certain = len(thoughts) - held_prefix(thoughts, CLOSE)
                thoughts, self.held = thoughts[:certain], thoughts[certain:]
            yield from self.emit(thoughts)
            if not marker:
                return
            self.kind, self.begun = ANSWER, False
        text, self.held = self.held, ""
        yield from self.emit(text)

    def emit(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield a piece of the current part, without white space before the part."""
        text = text if self.begun else text.lstrip()
        self.begun = self.begun or bool(text)
        yield self.kind or ANSWER, text

    def rest(self, text: str) -> Iterator[tuple[str, str]]:
        text, self.held = self.held + text, ""
        self.begun = self.begun or self.kind is None
        yield from self.emit(text)


class ThinkSplitter(TextSplitter):
    """The same by token ids."""

    def __init__(self, tokenizer, prompt: Sequence[int], ids: tuple[int, int]):
        self.open, self.close = ids
        super().__init__(tokenizer, prompt)

    def is_opened(self, tokenizer, prompt: Sequence[int]) -> bool:
        last = len(prompt) - 1
        while last >= 0 and tokenizer.token_bytes(prompt[last]).isspace():
            last -= 1
        return last >= 0 and prompt[last] == self.open

    def split(self, token: int, text: str) -> Iterator[tuple[str, str]]:
        if token == self.open and self.kind is None:
            self.kind, self.held = REASONING, ""
        elif token == self.close and self.kind == REASONING:
            yield from self.emit(text.removesuffix(CLOSE))  # U+FFFD of an incomplete character
            self.kind, self.begun = ANSWER, False
        elif self.kind is None and not (self.held + text).strip():
            self.held += text
        else:
            if self.kind is None:
                self.kind, self.begun = ANSWER, True
            text, self.held = self.held + text, ""
            yield from self.emit(text)


class HarmonySplitter(Splitter):
    """gpt-oss: `<|channel|>NAME<|message|>TEXT<|end|><|start|>assistant<|channel|>...`."""

    def __init__(self, tokenizer, prompt: Sequence[int], ids: list[int]):
        self.start, self.channel, self.message, self.end = ids
        self.kind, self.header, self.has_channel = ANSWER, "", False
        begin = max((n for n, id in enumerate(prompt) if id == self.start), default=len(prompt))
        stream = tokenizer.stream()
        for id in prompt[begin:]:
            list(self.split(id, stream.push(id)))

    def split(self, token: int, text: str) -> Iterator[tuple[str, str]]:
        if token in (self.start, self.channel, self.end):
            self.kind, self.header, self.has_channel = None, "", token == self.channel
        elif token == self.message and self.kind is None:
            name = self.header.split()[:1] if self.has_channel else ["final"]
            self.kind = ANSWER if name == ["final"] else REASONING
        elif self.kind is None:
            self.header += text
        else:
            yield self.kind, text

    def rest(self, text: str) -> Iterator[tuple[str, str]]:
        if self.kind:
            yield self.kind, text


def held_prefix(text: str, marker: str) -> int:
    """Return how many last characters of the text may be the beginning of the marker."""
    return max((n for n in range(1, len(marker)) if text.endswith(marker[:n])), default=0)
