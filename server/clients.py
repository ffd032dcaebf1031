"""The receivers of answers: requests, and how the text of an answer is sent to them."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.session_steps import Details
from server.answers import Event, GeneratedToken, TextDelta
from server.plan import GenerationRequest


@dataclass(eq=False)
class QueuedRequest:
    """A request, and the function that sends events to its client."""

    request: GenerationRequest
    send: Callable[[Event], None]
    arrived: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    begun: int = 0  # answers that are decoded or have ended

    @property
    def answers_left(self) -> int:
        """The number of answers that have not begun."""
        return len(self.request.generations) - self.begun


class Client(NamedTuple):
    """The receiver of one answer: a request, and the answer's number in it."""

    queued: QueuedRequest
    index: int
    begun: float = 0.0  # time.monotonic()

    def send(self, event: Event) -> None:
        self.queued.send(event)

    @property
    def streams(self) -> bool:
        return self.queued.request.body.stream


class AnswerWriter:
    """Sends an answer's text as it is generated. Does nothing without a client."""

    def __init__(self, client: Client | None):
        self.client = client
        self.details: Details | None = None  # the next token's
        self.tokens: list[GeneratedToken] = []  # in no TextDelta yet
        self.sent = 0  # characters

    def add_token(self, id: int, offset: int) -> None:
        """Keep a token's Details, if they are recorded, until its text is sent."""
        if self.client and self.details:
            self.tokens.append(GeneratedToken(id, offset, self.details))

    def write_reasoning(self, text: str) -> None:
        self.write(text, is_reasoning=True)

    def write(self, text: str, *, is_reasoning: bool = False) -> None:
        """Send new text, if the request is a stream."""
        if self.client and self.client.streams and text:
            self.sent += len(text)
            tokens = self.take_tokens(self.sent)
            self.client.send(TextDelta(text, tokens, is_reasoning, self.client.index))

    def take_tokens(self, end: int | float) -> list[GeneratedToken]:
        """Remove and return the tokens that begin before character `end`."""
        taken = [token for token in self.tokens if token.offset < end]
        self.tokens = self.tokens[len(taken) :]
        return taken

    def rest(self, result: dict) -> list[GeneratedToken]:
        """Return the tokens not sent yet, without those of a stop string."""
        stopped = result["finish_reason"] == "stop"
        length = len(result.get("reasoning", "")) + len(result["text"])
        return self.take_tokens(length if stopped else math.inf)
