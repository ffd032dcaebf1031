"""The events of an answer, and the JSON of chats and completions."""

import json
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from runtime.session_steps import Details
from server.errors import APIError
from server.plan import GenerationRequest
from tokenizer import Tokenizer
from tool_calls.parser import CallPiece, Piece, TextPiece

# finish_reason of `generate` -> the API's. The time limit interrupts; None: the stream goes on.
FINISH_REASONS = {"stop": "stop", "length": "length", "interrupted": "length", None: None}


class GeneratedToken(NamedTuple):
    """A token whose Details were recorded."""

    id: int
    offset: int  # of its first character in the answer's text
    details: Details


@dataclass(frozen=True)
class TextDelta:
    """New text of a streamed answer or of its reasoning, and the tokens that begin in it."""

    text: str
    tokens: list[GeneratedToken]
    is_reasoning: bool = False
    index: int = 0  # which of the request's answers


@dataclass(frozen=True)
class Finished:
    """The end of an answer: the result of `generate`, and the tokens not in any TextDelta."""

    result: dict
    tokens: list[GeneratedToken]
    index: int = 0


Event = TextDelta | Finished | APIError


class Builder(Protocol):
    """Writes one request's answers in the form of an API."""

    def completion(self, events: list[Finished]) -> dict:
        """Return the answer to a request without `stream`."""

    def start(self) -> Iterator[bytes]:
        """Yield what a stream begins with."""

    def deltas(self, event: TextDelta) -> Iterator[bytes]:
        """Yield the chunks for new text of a stream."""

    def end(self, event: Finished) -> Iterator[bytes]:
        """Yield what an answer ends with, and after the last answer what the stream ends with."""

    def error(self, error: APIError) -> bytes:
        """Return the end of a stream that fails."""


class AnswerReader:
    """Splits an answer into text, reasoning and tool calls. `calls` counts the latter."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer):
        self.parser = request.calls.parser(tokenizer) if request.calls else None
        self.held = self.parser.take() if self.parser else []  # pieces of the prefix in the prompt
        self.is_named = bool(request.calls and request.calls.is_named)
        self.calls = 0

    def read(self, text: str, is_reasoning: bool = False) -> list[Piece]:
        """Take new text; return the pieces now certain."""
        if is_reasoning or self.parser is None:
            return self.count([TextPiece(text, is_reasoning)] if text else [])
        return self.count(self.parser.push(text))

    def end(self, result: dict) -> list[Piece]:
        """End the answer, whose result of `generate` this is; return the rest."""
        is_cut = result.get("finish_reason", "stop") != "stop"
        return self.count(self.parser.flush(is_cut) if self.parser else [])

    def whole(self, result: dict) -> list[Piece]:
        """Return the pieces of a whole answer."""
        reasoning = self.read(result.get("reasoning", ""), is_reasoning=True)
        return reasoning + self.read(result["text"]) + self.end(result)

    def count(self, pieces: list[Piece]) -> list[Piece]:
        pieces, self.held = self.held + pieces, []
        self.calls += sum(isinstance(p, CallPiece) and p.name is not None for p in pieces)
        return pieces

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the API's finish_reason for that of `generate`; for a named tool it is "stop"."""
        is_chosen = self.calls and not self.is_named
        return "tool_calls" if is_chosen and reason == "stop" else FINISH_REASONS[reason]


def join_pieces(pieces: list[Piece]) -> tuple[str, str, list[dict]]:
    """Return an answer's text, its reasoning, and its calls as OpenAI's API has them."""
    texts: dict[bool, str] = {False: "", True: ""}
    calls: list[dict] = []
    for piece in pieces:
        if isinstance(piece, TextPiece):
            texts[piece.is_reasoning] += piece.text
            continue
        if piece.name is not None:
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.id, "type": "function", "function": function})
        calls[-1]["function"]["arguments"] += piece.arguments
    return texts[False], texts[True], calls


def piece_delta(piece: Piece) -> dict:
    """Return the delta of a streamed chat for a piece of its answer."""
    if isinstance(piece, TextPiece):
        return {"reasoning_content" if piece.is_reasoning else "content": piece.text}
    call: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments}}
    if piece.name is not None:
        function = {"name": piece.name, "arguments": piece.arguments}
        call |= {"id": piece.id, "type": "function", "function": function}
    return {"tool_calls": [call]}


def logprob_entries(
    tokens: list[GeneratedToken], count: int, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return tokens with their logprobs and their `count` likeliest alternatives."""
    return [
        token_logprob(token.id, token.details.logprob, tokenizer)
        | {
            "top_logprobs": [
                token_logprob(*candidate, tokenizer) for candidate in token.details.top[:count]
            ]
        }
        for token in tokens
    ]


def token_logprob(id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return one token and its logprob; -9999 stands for -inf, which JSON lacks."""
    data = tokenizer.token_bytes(id)
    logprob = logprob if math.isfinite(logprob) else -9999.0
    return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": logprob}


class ResponseBuilder:
    """Builds the JSON objects of one request's answer."""

    def __init__(self, request: GenerationRequest, model_name: str, tokenizer: Tokenizer):
        self.request, self.body, self.tokenizer = request, request.body, tokenizer
        self.readers = defaultdict(lambda: AnswerReader(request, tokenizer))  # by answer
        # Tokens in no chunk yet, by answer.
        self.tokens: dict[int, list[GeneratedToken]] = defaultdict(list)
        self.ended: list[Finished] = []
        self.object, prefix = "text_completion", "cmpl"
        if self.body.chat:
            self.object, prefix = "chat.completion", "chatcmpl"
        self.header = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model_name,
        }

    def completion(self, events: list[Finished]) -> dict:
        """Return the answers to a request without `stream`."""
        choices = [self.whole_choice(event) for event in sorted(events, key=lambda e: e.index)]
        body = {"choices": choices, "usage": self.usage(events)}
        return self.header | {"object": self.object} | body

    def whole_choice(self, event: Finished) -> dict:
        """Return the choice with a whole answer."""
        reader, result = self.readers[event.index], event.result
        text, reasoning, calls = join_pieces(reader.whole(result))
        reason = reader.finish_reason(result["finish_reason"])
        if not self.body.chat:
            text = self.echo(event.index) + text
            return self.choice(event.tokens, reason, event.index, text=text)
        content = None if calls and not text else text
        message = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return self.choice(event.tokens, reason, event.index, message=message)

    def start(self) -> Iterator[bytes]:
        """Yield what a stream begins with."""
        for index in range(len(self.request.generations)):
            if self.body.chat:
                delta = {"role": "assistant", "content": ""}
                yield self.event([{"index": index, "delta": delta, "finish_reason": None}])
            elif text := self.echo(index):
                yield self.event([self.choice([], None, index, text=text)])

    def echo(self, index: int) -> str:
        """Return the prompt that a completion's text begins with, if the request asks for it."""
        if not self.body.echo:
            return ""
        prompt = self.body.prompt[index // self.body.n]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def deltas(self, event: TextDelta) -> Iterator[bytes]:
        """Yield the chunks for new text of a stream."""
        if self.request.calls is None:
            yield self.chunk(event)
            return
        self.tokens[event.index] += event.tokens
        for piece in self.readers[event.index].read(event.text, event.is_reasoning):
            yield self.piece_chunk(piece, event.index)

    def end(self, event: Finished) -> Iterator[bytes]:
        """Yield what an answer ends with, and after the last answer what the stream ends with."""
        reader = self.readers[event.index]
        for piece in reader.end(event.result):
            yield self.piece_chunk(piece, event.index)
        reason = reader.finish_reason(event.result["finish_reason"])
        tokens = self.take_tokens(event.index) + event.tokens
        empty: dict[str, Any] = {"delta": {}} if self.body.chat else {"text": ""}
        yield self.event([self.choice(tokens, reason, event.index, **empty)])
        self.ended.append(event)
        if len(self.ended) == len(self.request.generations):
            if self.body.stream_options.include_usage:
                yield self.event([], self.usage(self.ended))
            yield b"data: [DONE]\n\n"

    def error(self, error: APIError) -> bytes:
        """Return the end of a stream that fails."""
        return server_sent_event(error.body())

    def piece_chunk(self, piece: Piece, index: int) -> bytes:
        """Return a chunk of a streamed chat with tools."""
        delta = piece_delta(piece)
        return self.event([self.choice(self.take_tokens(index), None, index, delta=delta)])

    def take_tokens(self, index: int) -> list[GeneratedToken]:
        return self.tokens.pop(index, [])

    def chunk(self, event: TextDelta) -> bytes:
        """Return the chunk of a stream with new text."""
        new: dict[str, Any] = {"text": event.text}
        if self.body.chat:
            piece = TextPiece(event.text, event.is_reasoning)
            new = {"delta": piece_delta(piece) if event.text else {}}
        return self.event([self.choice(event.tokens, None, event.index, **new)])

    def event(self, choices: list[dict], usage: dict | None = None) -> bytes:
        """Return a chunk as a server-sent event."""
        kind = "chat.completion.chunk" if self.body.chat else self.object
        chunk = self.header | {"object": kind, "choices": choices}
        if self.body.stream_options.include_usage:
            chunk["usage"] = usage
        return server_sent_event(chunk)

    def choice(
        self, tokens: list[GeneratedToken], finish_reason: str | None, index: int, **content: Any
    ) -> dict:
        """Return a choice. content: its `text`, or a chat's `message` or `delta`."""
        choice = {"index": index, "finish_reason": finish_reason, "logprobs": None, **content}
        if self.body.logprob_count() is not None:
            choice["logprobs"] = self.logprobs(tokens)
        if self.body.routing:
            choice["moe_fast"] = self.routing(tokens)
        return choice

    def logprobs(self, tokens: list[GeneratedToken]) -> dict:
        """Return the tokens' logprobs in the shape of the request's API."""
        content = logprob_entries(tokens, self.body.logprob_count() or 0, self.tokenizer)
        if self.body.chat:
            return {"content": content, "refusal": None}
        return {
            "tokens": [entry["token"] for entry in content],
            "token_logprobs": [entry["logprob"] for entry in content],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in content
            ],
            "text_offset": [token.offset for token in tokens],
        }

    def routing(self, tokens: list[GeneratedToken]) -> dict:
        """Return the tokens' texts [T], experts [T][L][A] and weights [T][L][A]."""
        texts = [self.tokenizer.token_bytes(token.id) for token in tokens]
        return {
            "tokens": [text.decode(errors="replace") for text in texts],
            "experts": [token.details.experts for token in tokens],
            "weights": [
                [[round(weight, 4) for weight in layer] for layer in token.details.weights]
                for token in tokens
            ],
        }

    def usage(self, events: list[Finished]) -> dict:
        """Return the token counts of all answers. A prompt with several answers counts once."""
        results = {event.index: event.result for event in events}
        firsts = [results[index] for index in results if index % self.body.n == 0]
        prompt_tokens = sum(result["prompt_tokens"] for result in firsts)
        new_tokens = sum(result["new_tokens"] for result in results.values())
        details = {}
        if self.body.chat:
            reasoning = sum(result.get("reasoning_tokens", 0) for result in results.values())
            details = {"completion_tokens_details": {"reasoning_tokens": reasoning}}
        cached = sum(result["cached_tokens"] for result in firsts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            **details,
        }


def server_sent_event(value: dict) -> bytes:
    """Return JSON as one event of a text/event-stream."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"
