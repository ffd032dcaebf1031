"""Reasoning blocks: text in which a chat model thinks before it answers.

Three kinds are known: `<think> ... </think>` (ERNIE 4.5 has tags around the answer, too); Gemma 4's
`<|channel>thought ... <channel|>`; and gpt-oss's channels (harmony), of which `final` is the
answer. Markers are recognized by their token ids, so that text which only spells one is text.
"""

from collections.abc import Iterator, Sequence

REASONING, ANSWER = "reasoning", "answer"
OPEN, CLOSE = "<think>", "</think>"
RESPONSE = "<response>", "</response>"
GEMMA = "<|channel>", "<channel|>"
THOUGHT = "thought\n"  # the name of Gemma's channel
HARMONY = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
HARMONY_TOKENS = *HARMONY, "<|constrain|>", "<|call|>", "<|return|>"
ROLE, RECIPIENT = "assistant", "to="  # a harmony header has them as text
Parts = list[tuple[str, str]]  # kind, text


def make_splitter(
    tokenizer, prompt: Sequence[int], continues: str | None = None
) -> "Splitter | None":
    """Return what splits an answer to this prompt; None if the model has no reasoning blocks.

    tokenizer: a tokenizer.Tokenizer. Without tokens of its own, a model marks blocks by text, if
    its chat template does. continues: REASONING or ANSWER, if the prompt ends inside of one.
    """
    splitter = find_splitter(tokenizer, prompt)
    if splitter and continues:
        splitter.resume(continues)
    return splitter


def find_splitter(tokenizer, prompt: Sequence[int]) -> "Splitter | None":
    """Return what splits an answer that begins a message."""
    harmony = [tokenizer.token_id(name) for name in HARMONY]
    if None not in harmony:
        return HarmonySplitter(tokenizer, prompt, harmony)
    channel = tokenizer.token_id(GEMMA[0]), tokenizer.token_id(GEMMA[1])
    if None not in channel:
        return GemmaSplitter(tokenizer, prompt, channel)
    think = tokenizer.token_id(OPEN), tokenizer.token_id(CLOSE)
    response = tokenizer.token_id(RESPONSE[0]), tokenizer.token_id(RESPONSE[1])
    if None not in think + response:
        return ResponseSplitter(tokenizer, prompt, think, response)
    if None not in think:
        return ThinkSplitter(tokenizer, prompt, think)
    return TextSplitter(tokenizer, prompt) if tokenizer.template_has(CLOSE) else None


class Splitter:
    """Splits one answer. `kind` is that of the next text, `tokens` counts those of reasoning."""

    kind: str | None
    tokens = 0

    @property
    def opener(self) -> int | None:
        """The token that may open a block instead of the answer's first token; None: no token."""
        return None

    @property
    def may_answer(self) -> bool:
        """Whether the next token may belong to the answer."""
        return self.kind == ANSWER or self.opener is not None

    def resume(self, kind: str) -> None:
        """Begin inside of a part of this kind, which the prompt has begun."""

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
    A closing marker before any other text is an empty block (Laguna, GLM). White space around
    markers belongs to neither part.
    """

    closing = f"\n{CLOSE}\n\n"  # closes a block that the prompt has opened

    def __init__(self, tokenizer, prompt: Sequence[int]):
        self.kind = REASONING if self.is_opened(tokenizer, prompt) else None  # None: undecided
        self.held = ""  # may become a marker, or be white space before a part
        self.begun = False  # the current part has text

    @property
    def may_answer(self) -> bool:
        return self.kind != REASONING

    def resume(self, kind: str) -> None:
        self.kind, self.begun = kind, True

    def is_opened(self, tokenizer, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends inside of a block, as some templates do."""
        return tokenizer.decode(prompt[-4 * len(OPEN) :]).rstrip().endswith(OPEN)

    def split(self, token: int, text: str) -> Iterator[tuple[str, str]]:
        self.held += text
        if self.kind is None:
            start = self.held.lstrip()
            if start.startswith(OPEN):
                self.kind, self.held = REASONING, start.removeprefix(OPEN)
            elif start.startswith(CLOSE):
                self.kind, self.held = ANSWER, start.removeprefix(CLOSE)
            elif OPEN.startswith(start) or CLOSE.startswith(start):
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
        self.closed = False  # the prompt ends with a closed block: the model is not to reason
        super().__init__(tokenizer, prompt)

    @property
    def opener(self) -> int | None:
        return self.open if self.kind is None and not self.closed else None

    def is_opened(self, tokenizer, prompt: Sequence[int]) -> bool:
        last = len(prompt) - 1
        while last >= 0 and tokenizer.token_bytes(prompt[last]).isspace():
            last -= 1
        self.closed = last >= 0 and prompt[last] == self.close
        return last >= 0 and prompt[last] == self.open

    def split(self, token: int, text: str) -> Iterator[tuple[str, str]]:
        if token == self.open and self.kind is None:
            self.kind, self.held = REASONING, ""
        elif token == self.close and self.kind != ANSWER:
            yield from self.emit(text.removesuffix(CLOSE))  # U+FFFD of an incomplete character
            self.kind, self.begun = ANSWER, False
        elif self.kind is None and not (self.held + text).strip():
            self.held += text
        else:
            if self.kind is None:
                self.kind, self.begun = ANSWER, True
            text, self.held = self.held + text, ""
            yield from self.emit(text)


class ResponseSplitter(ThinkSplitter):
    """ERNIE 4.5 Thinking: `<think>` blocks, then the answer in `<response>` tags, by token ids.

    The tags, and the white space on both sides of each, belong to no part.
    """

    def __init__(
        self, tokenizer, prompt: Sequence[int], ids: tuple[int, int], tags: tuple[int, int]
    ):
        self.begin, self.end = tags
        self.in_tags, self.space = False, ""
        super().__init__(tokenizer, prompt, ids)

    def split(self, token: int, text: str) -> Iterator[tuple[str, str]]:
        if token == self.begin and self.kind != REASONING and not self.in_tags:
            self.kind, self.held, self.begun, self.in_tags = ANSWER, "", False, True
            return
        if token == self.end and self.in_tags:
            yield from self.emit(text.removesuffix(RESPONSE[1]))
            self.begun, self.in_tags, self.space = False, False, ""
            return
        for kind, piece in super().split(token, text):
            if self.in_tags:
                piece = self.space + piece
                self.space = piece[len(piece.rstrip()) :]
                piece = piece.rstrip()
            yield kind, piece

    def rest(self, text: str) -> Iterator[tuple[str, str]]:
        self.held, self.space = self.space + self.held, ""
        yield from super().rest(text)


class GemmaSplitter(ThinkSplitter):
    """Gemma 4: `<|channel>thought\\nTEXT<channel|>`, at any place of the answer."""

    closing = GEMMA[1]

    def __init__(self, tokenizer, prompt: Sequence[int], ids: tuple[int, int]):
        self.named = False  # the name of the open channel is complete
        self.call = tokenizer.token_id("<|tool_call>")
        super().__init__(tokenizer, prompt, ids)

    def resume(self, kind: str) -> None:
        super().resume(kind)
        self.named = True

    def is_opened(self, tokenizer, prompt: Sequence[int]) -> bool:
        end = list(prompt[-len(THOUGHT) - 1 :])
        name = end[end.index(self.open) + 1 :] if self.open in end else []
        self.named = tokenizer.decode(name) == THOUGHT  # the prompt has the channel's name, too
        return self.named or super().is_opened(tokenizer, prompt)

    def split(self, token: int, text: str) -> Iterator[tuple[str, str]]:
        if token == self.open:
            self.kind, self.held, self.begun, self.named = REASONING, "", False, False
        elif self.kind == REASONING and token in (self.close, self.call):
            yield from self.end_name(text.removesuffix(GEMMA[1]) if token == self.close else "")
            self.kind, self.begun = ANSWER, False
            if token == self.call:  # a call ends a block that was not closed
                yield from self.emit(text)
        elif token == self.close:
            return
        elif self.kind == REASONING and not self.named:
            self.held += text
            if not THOUGHT.startswith(self.held):
                yield from self.end_name("")
        else:
            yield from super().split(token, text)

    def end_name(self, text: str) -> Iterator[tuple[str, str]]:
        """End the channel's name; yield the text after it. Other names are text."""
        held, self.held, self.named = self.held, "", True
        rest = "" if THOUGHT.startswith(held) else held.removeprefix(THOUGHT)
        yield from self.emit(rest + text)

    def rest(self, text: str) -> Iterator[tuple[str, str]]:
        if self.kind == REASONING:
            yield from self.end_name(text)
        else:
            yield from super().rest(text)


class HarmonySplitter(Splitter):
    """gpt-oss: `<|channel|>NAME<|message|>TEXT<|end|><|start|>assistant<|channel|>...`."""

    def __init__(self, tokenizer, prompt: Sequence[int], ids: list[int]):
        self.names = {tokenizer.token_id(name): name for name in HARMONY_TOKENS}
        self.channel = ids[HARMONY.index("<|channel|>")]
        self.message = HarmonyMessage()
        begin = max((n for n, id in enumerate(prompt) if id == ids[0]), default=len(prompt))
        stream = tokenizer.stream()
        for id in prompt[begin:]:
            list(self.split(id, stream.push(id)))

    @property
    def kind(self) -> str | None:
        return self.message.kind

    @property
    def opener(self) -> int | None:
        return self.channel if self.message.has_role_alone else None

    def split(self, token: int, text: str) -> Iterator[tuple[str, str]]:
        if token in self.names:
            yield ANSWER, self.message.push_marker(self.names[token])
        else:
            yield from self.of_kind(self.message.push_text(text))

    def rest(self, text: str) -> Iterator[tuple[str, str]]:
        yield from self.of_kind(self.message.push_text(text))
        yield ANSWER, self.message.end()

    def of_kind(self, text: str) -> Iterator[tuple[str, str]]:
        yield self.kind or ANSWER, text


class HarmonyMessage:
    """The current message of a harmony answer, which may lack its header, or the channel in it.

    kind: that of its text; None in the header. recipient: whom it calls, with the text.
    """

    def __init__(self, kind: str | None = ANSWER):
        self.kind = kind
        self.recipient: str | None = None
        self.begin("<|end|>")

    def begin(self, marker: str) -> None:
        """Begin the header that this control token begins."""
        self.header = ""
        self.has_role, self.has_channel = marker == "<|start|>", marker == "<|channel|>"
        self.is_header = self.has_channel  # it cannot be text of an answer

    @property
    def has_role_alone(self) -> bool:
        """Whether the header has its role, and no more yet."""
        return self.kind is None and self.has_role and self.header == ROLE

    def push_marker(self, marker: str) -> str:
        """Take a control token of HARMONY_TOKENS; return text of an answer without a header."""
        answer = ""
        if marker == "<|message|>":
            if self.kind is None:
                self.end_header()
        elif marker == "<|constrain|>":
            self.header, self.is_header = self.header + " ", True
        else:
            before = self.header if marker == "<|channel|>" and self.kind is None else ""
            answer = "" if before else self.end()
            self.kind, self.recipient = None, self.find_recipient(before)
            self.begin(marker)
        return answer

    def push_text(self, text: str) -> str:
        """Take text; return that of the message, without its header."""
        if self.kind:
            return text
        self.header += text
        answer = None if self.is_header else answer_of_header(self.header, self.has_role)
        if answer:
            self.kind = ANSWER
        return answer or ""

    def end_header(self) -> None:
        name = self.header.split()[:1] if self.has_channel else ["final"]
        self.kind = ANSWER if name == ["final"] else REASONING
        self.recipient = self.find_recipient(self.header) or self.recipient

    def find_recipient(self, header: str) -> str | None:
        words = (word for word in header.split() if word.startswith(RECIPIENT))
        return next((word.removeprefix(RECIPIENT) for word in words), None)

    def end(self) -> str:
        """End the message; return text of an answer without a header that was held back."""
        if self.kind or self.is_header:
            return ""
        return answer_of_header(self.header, self.has_role, ended=True) or ""


def answer_of_header(text: str, has_role: bool, ended: bool = False) -> str | None:
    """Return the answer in the text where harmony has a header; None if it is a header.

    text: all of it without a channel, up to now. has_role: the text begins with the role. ended: no
    more text follows.
    """
    if has_role:
        if not text.startswith(ROLE):
            return None
        text = text.removeprefix(ROLE)
    text = text.lstrip()
    is_header = text.startswith(RECIPIENT) or (RECIPIENT.startswith(text) and not ended)
    return None if is_header else text


def held_prefix(text: str, marker: str) -> int:
    """Return how many last characters of the text may be the beginning of the marker."""
    tail = text[max(0, len(text) - len(marker) + 1) :]
    at = tail.find(marker[0])
    while at >= 0 and not marker.startswith(tail[at:]):
        at = tail.find(marker[0], at + 1)
    return len(tail) - at if at >= 0 else 0
