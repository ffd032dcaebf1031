"""The items and events of an answer in OpenAI's Responses API."""

import itertools
import math
import secrets
import time
from collections.abc import Iterator
from typing import Any

from server.answers import (
    AnswerReader,
    Finished,
    GeneratedToken,
    TextDelta,
    logprob_entries,
    server_sent_event,
)
from server.errors import APIError
from server.plan import GenerationRequest
from server.response_store import ItemStore
from server.responses import Item, ResponsesBody
from tokenizer import Tokenizer
from tool_calls.parser import Piece, TextPiece


class ResponsesBuilder:
    """Builds the items and events of one answer, see server.answers.Builder."""

    def __init__(
        self,
        body: ResponsesBody,
        request: GenerationRequest,
        model_name: str,
        tokenizer: Tokenizer,
        store: ItemStore,
    ):
        self.body, self.model_name, self.store = body, model_name, store
        self.input = body.own_items(store)
        self.reader, self.tokenizer = AnswerReader(request, tokenizer), tokenizer
        self.tokens: list[GeneratedToken] = []  # tokens of the answer's text that no event has
        self.id, self.created = f"resp_{secrets.token_hex(24)}", int(time.time())
        self.items: list[Item] = []
        self.open: Item | None = None  # the item being written
        self.events = 0

    def completion(self, events: list[Finished]) -> dict:
        """Return the answer to a request without `stream`."""
        (event,) = events
        pieces = self.reader.whole(event.result)
        begin, end = message_span(event.result, pieces)
        self.tokens = [token for token in event.tokens if begin <= token.offset < end]
        for _ in self.add_pieces(pieces):
            pass
        status = self.status(event)
        for _ in self.close_item(status):
            pass
        return self.keep(self.response(status, event))

    def start(self) -> Iterator[bytes]:
        """Yield what a stream begins with."""
        for name in ("created", "in_progress"):
            yield self.event(f"response.{name}", response=self.response("in_progress"))

    def deltas(self, event: TextDelta) -> Iterator[bytes]:
        """Yield the events for new text."""
        self.tokens += [] if event.is_reasoning else event.tokens
        pieces = self.reader.read(event.text, event.is_reasoning)
        yield from self.add_pieces(pieces)
        if pieces and not is_message(pieces[-1]):
            self.tokens = []  # they belong to a call or to the reasoning

    def end(self, event: Finished) -> Iterator[bytes]:
        """Yield what a stream ends with."""
        self.tokens += event.tokens
        yield from self.add_pieces(self.reader.end(event.result))
        status = self.status(event)
        yield from self.close_item(status)
        response = self.keep(self.response(status, event))
        yield self.event(f"response.{status}", response=response)

    def error(self, error: APIError) -> bytes:
        """Return the end of a stream that fails."""
        response = self.response("failed") | {
            "error": {"code": error.code or "server_error", "message": str(error)}
        }
        return self.event("response.failed", response=response)

    def keep(self, response: dict) -> dict:
        """Return the finished response, and store it unless the request forbids that."""
        if self.body.store:
            self.store.add_response(response, self.input)
        return response

    def status(self, event: Finished) -> str:
        reason = self.reader.finish_reason(event.result["finish_reason"])
        return "incomplete" if reason == "length" else "completed"

    # Items ------------------------------------------------------------------------------------

    def add_pieces(self, pieces: list[Piece]) -> Iterator[bytes]:
        """Add pieces of the answer to its items; yield the events."""
        for piece in pieces:
            if isinstance(piece, TextPiece):
                kind = "reasoning" if piece.is_reasoning else "message"
                if self.open is None or self.open["type"] != kind:
                    yield from self.open_item(kind)
                yield self.add_text(piece.text)
                continue
            if piece.name is not None:
                fields = {"call_id": piece.id, "name": piece.name, "arguments": ""}
                yield from self.open_item("function_call", **fields)
            if piece.arguments and self.open:
                self.open["arguments"] += piece.arguments
                yield self.item_event("function_call_arguments.delta", delta=piece.arguments)

    def open_item(self, kind: str, **fields: Any) -> Iterator[bytes]:
        """Close the open item and begin another one."""
        yield from self.close_item("completed")
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: Item = {"id": f"{prefix}_{secrets.token_hex(24)}", "type": kind}
        if kind == "message":
            fields = {"role": "assistant", "content": []}
        elif kind == "reasoning":
            fields = {"summary": [], "content": []}
        self.open = item | {"status": "in_progress"} | fields
        self.items.append(self.open)
        yield self.event(
            "response.output_item.added", output_index=len(self.items) - 1, item=self.open
        )
        if kind != "function_call":
            part: Item = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self.open["content"].append(part)
            yield self.item_event("content_part.added", content_index=0, part=part)

    def add_text(self, text: str) -> bytes:
        assert self.open
        part = self.open["content"][0]
        part["text"] += text
        extra = {}
        if part["type"] == "output_text":
            extra["logprobs"] = self.take_logprobs()
            part["logprobs"] += extra["logprobs"]
        return self.item_event(f"{part['type']}.delta", content_index=0, delta=text, **extra)

    def take_logprobs(self) -> list[Item]:
        """Return the logprobs of the tokens in no event yet; none unless the request asks."""
        tokens, self.tokens = self.tokens, []
        if not self.body.wants_logprobs:
            return []
        return logprob_entries(tokens, self.body.top_logprobs, self.tokenizer)

    def close_item(self, status: str) -> Iterator[bytes]:
        """End the open item."""
        item = self.open
        if item is None:
            return
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            yield self.item_event("function_call_arguments.done", **fields)
        else:
            part = item["content"][0]
            extra = {}
            if part["type"] == "output_text":  # the last token may have no text
                part["logprobs"] += self.take_logprobs()
                extra["logprobs"] = part["logprobs"]
            yield self.item_event(
                f"{part['type']}.done", content_index=0, text=part["text"], **extra
            )
            yield self.item_event("content_part.done", content_index=0, part=part)
        item["status"] = status
        yield self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)
        self.open = None

    def item_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the open item."""
        assert self.open
        place = {"item_id": self.open["id"], "output_index": len(self.items) - 1}
        return self.event(f"response.{kind}", **place, **fields)

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return a server-sent event with the next sequence number."""
        value = {"type": kind, "sequence_number": self.events, **fields}
        self.events += 1
        return f"event: {kind}\n".encode() + server_sent_event(value)

    def response(self, status: str, event: Finished | None = None) -> dict:
        """Return the response object. event: the end of the answer, for a finished response."""
        body = self.body
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self.model_name,
            "output": self.items,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": self.body.store,
            "temperature": body.temperature,
            "text": {"format": body.text.format},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage(event.result) if event else None,
        }


def is_message(piece: Piece) -> bool:
    """Return whether a piece is text of the answer's message."""
    return isinstance(piece, TextPiece) and not piece.is_reasoning


def message_span(result: Item, pieces: list[Piece]) -> tuple[int, float]:
    """Return where the message begins and ends in an answer's text, in characters.

    The reasoning stands before it, calls after it.
    """
    begin, end = len(result.get("reasoning", "")), math.inf
    if not all(isinstance(piece, TextPiece) for piece in pieces):
        texts = itertools.takewhile(lambda piece: isinstance(piece, TextPiece), pieces)
        end = begin + sum(len(piece.text) for piece in texts if is_message(piece))
    return begin, end


def usage(result: dict) -> dict:
    """Return the token counts of an answer."""
    prompt_tokens, new_tokens = result["prompt_tokens"], result["new_tokens"]
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": result["cached_tokens"]},
        "output_tokens": new_tokens,
        "output_tokens_details": {"reasoning_tokens": result.get("reasoning_tokens", 0)},
        "total_tokens": prompt_tokens + new_tokens,
    }
