"""OpenAI's Responses API: its requests become chats, answers become items and typed events.

A request has the whole conversation. Items of recent answers may stand in it by their ids, as the
Vercel AI SDK sends them: ItemStore has these.
"""

import itertools
import json
import math
import re
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, ValidationError

from server.schema import (
    FAIL_FAST,
    FIELD_MESSAGES,
    AnswerReader,
    APIError,
    ChatCompletionBody,
    Finished,
    GeneratedToken,
    GenerationRequest,
    Limits,
    LogprobCount,
    Seed,
    TextDelta,
    TokenLimit,
    error_field,
    error_message,
    logprob_entries,
    parse_body,
    plan_request,
    server_sent_event,
)
from server.structured import (
    OtherServersFields,
    StrictModel,
    StructuredFields,
    UnlessOne,
    Unsupported,
)
from server.tokenizing import TokenizerPool, TokenizerUnavailableError
from server.tools import Piece, TextPiece
from tokenizer import Tokenizer

Item = dict[str, Any]
STORED_BYTES = 16 << 20
# Fields of a chat that a request may have under the same name.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
SHARED = (*SAMPLING, *StructuredFields.model_fields, "parallel_tool_calls", "stream")
LOGPROBS = "message.output_text.logprobs"  # of `include`


class Reasoning(StrictModel):
    reported_as = "reasoning."

    effort: str | None = None


class TextSettings(StrictModel):
    reported_as = "text."

    format: Item = Field(default_factory=lambda: {"type": "text"})


class ItemStore:
    """The items of recent answers by id, at most `max_bytes` of them as JSON."""

    def __init__(self, max_bytes: int = STORED_BYTES):
        self.max_bytes, self.bytes = max_bytes, 0
        self.items: dict[str, tuple[Item, int]] = {}  # oldest first
        self.lock = threading.Lock()  # several threads read requests

    def add(self, items: list[Item]) -> None:
        """Keep items; forget the oldest."""
        with self.lock:
            for item in items:
                size = len(json.dumps(item))
                self.items[item["id"]] = item, size
                self.bytes += size
            while self.bytes > self.max_bytes:
                _, size = self.items.pop(next(iter(self.items)))
                self.bytes -= size

    def find(self, id: Any) -> Item:
        """Return an item. Raises APIError if it is not here."""
        with self.lock:
            found = self.items.get(id) if isinstance(id, str) else None
        if found is None:
            reason = f"input: the item {id!r:.80} is not stored here (any more): send it whole"
            raise APIError(f"{reason}, with store: false", param="input")
        return found[0]


class ResponsesBody(StructuredFields, OtherServersFields):
    """The body of POST /v1/responses."""

    reported_as = ""

    input: str | Annotated[list[Item], FAIL_FAST]
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    background: Unsupported = None
    prompt: Unsupported = None
    max_tokens: Unsupported = None
    max_completion_tokens: Unsupported = None
    n: UnlessOne = 1
    routing: Unsupported = None
    instructions: str | None = None
    tools: Annotated[list[Item], FAIL_FAST] = Field(default_factory=list)
    tool_choice: str | Item = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    text: TextSettings = TextSettings()
    max_output_tokens: TokenLimit | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    include: Annotated[list[str], FAIL_FAST] = Field(default_factory=list)
    top_logprobs: LogprobCount = 0
    # ChatCompletionBody checks these.
    min_p: Any = None
    top_k: Any = None
    stop: Any = None
    logit_bias: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    seed: Seed | None = None
    stream: bool = False
    store: bool = True
    metadata: Item = Field(default_factory=dict)

    def chat_body(self, store: ItemStore) -> ChatCompletionBody:
        """Return the same request as a chat. Raises APIError if that is invalid."""
        fields: Item = {name: getattr(self, name) for name in SHARED}
        fields |= {
            "messages": self.messages(store),
            "tools": [self.chat_tool(tool) for tool in self.tools],
            "tool_choice": self.chat_tool_choice(),
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
        }
        if self.text.format.get("type") != "text":
            if self.response_format.type != "text":
                raise APIError("response_format and text.format: send one", param="text")
            fields["response_format"] = self.chat_format()
        try:
            return ChatCompletionBody.model_validate(fields)
        except ValidationError as error:
            names = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
            field = error_field(error) or ""
            message = error_message(error, ChatCompletionBody)
            if message == FIELD_MESSAGES["messages"]:
                message = FIELD_MESSAGES["input"]
            message = re.sub("^messages:", "input:", message)
            raise APIError(message, param=names.get(field, field) or None) from None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens are sent with their logprobs."""
        return LOGPROBS in self.include or self.top_logprobs > 0

    def messages(self, store: ItemStore) -> list[Item]:
        """Return the conversation as a chat's messages. Raises APIError for unknown items."""
        found: list[Item] = []
        if self.instructions:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        for item in self.input:
            if item.get("type") == "item_reference":
                item = store.find(item.get("id"))
            kind = item.get("type", "message")
            if kind == "message":
                found.append({"role": item.get("role"), "content": item.get("content")})
            elif kind == "function_call":
                add_call(found, item)
            elif kind == "function_call_output":
                output = item.get("output", "")
                id = item.get("call_id", "")
                found.append({"role": "tool", "tool_call_id": id, "content": output})
            elif kind != "reasoning":  # a model's earlier reasoning is no part of its prompt
                raise APIError(
                    f"input: items of type {kind!r:.40} are not supported", param="input"
                )
        return found

    def chat_tool(self, tool: Item) -> Item:
        """Return a tool as a chat has it. Raises APIError for a tool of OpenAI's servers."""
        if tool.get("type") != "function":
            raise APIError(
                f"tools: the type {tool.get('type')!r:.40} is not supported, only 'function'",
                param="tools",
            )
        names = "name", "description", "parameters", "strict"
        return {"type": "function", "function": {name: tool.get(name) for name in names}}

    def chat_tool_choice(self) -> str | Item:
        if isinstance(self.tool_choice, str):
            return self.tool_choice
        return {"type": self.tool_choice.get("type"), "function": self.tool_choice}

    def chat_format(self) -> Item:
        kind = self.text.format.get("type")
        if kind != "json_schema":
            return self.text.format
        return {"type": kind, "json_schema": self.text.format}


def add_call(messages: list[Item], item: Item) -> None:
    """Add a function call to the assistant's last message, or as a message of its own."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def read_responses_request(
    body: bytes, tokenizer: Tokenizer | TokenizerPool, limits: Limits, store: ItemStore
) -> tuple[ResponsesBody, GenerationRequest]:
    """Parse and validate a request's body. Raises APIError if it is invalid or unsupported."""
    fields = parse_body(ResponsesBody, body)
    return fields, plan_request(fields.chat_body(store), tokenizer, limits, "input")


class ResponsesBuilder:
    """Builds the items and events of one answer, see server.schema.ResponseBuilder."""

    def __init__(
        self,
        body: ResponsesBody,
        request: GenerationRequest,
        model_name: str,
        tokenizer: Tokenizer,
        store: ItemStore,
    ):
        self.body, self.model_name, self.store = body, model_name, store
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
        self.keep_items()
        return self.response(status, event)

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
        self.keep_items()
        yield self.event(f"response.{status}", response=self.response(status, event))

    def error(self, error: APIError) -> bytes:
        """Return the end of a stream that fails."""
        response = self.response("failed") | {
            "error": {"code": error.code or "server_error", "message": str(error)}
        }
        return self.event("response.failed", response=response)

    def keep_items(self) -> None:
        if self.body.store:
            self.store.add(self.items)

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
            "previous_response_id": None,
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


# Tokens -------------------------------------------------------------------------------------------


class TokenizeBody(StrictModel):
    """The body of POST /tokenize: a prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: list[Item] | None = None
    tools: list[Item] = Field(default_factory=list)
    add_special_tokens: bool = True

    def encode(self, tokenizer: Tokenizer | TokenizerPool) -> list[int]:
        """Return the token ids. Raises ValueError."""
        if self.messages is not None:
            fields = {"messages": self.messages, "tools": self.tools}
            chat = ChatCompletionBody.model_validate(fields)
            return chat.encode(tokenizer)[0][0]
        if self.prompt is None:
            raise ValueError("give a prompt, or the messages of a chat")
        return tokenizer.encode(self.prompt, self.add_special_tokens)


class DetokenizeBody(StrictModel):
    """The body of POST /detokenize."""

    tokens: Annotated[list[int], FAIL_FAST]


def tokenize(body: bytes, tokenizer: TokenizerPool, max_seq_len: int) -> dict:
    """Return the answer to POST /tokenize. Raises APIError."""
    fields = parse_body(TokenizeBody, body)
    try:
        tokens = fields.encode(tokenizer)
    except ValidationError as error:
        raise APIError(error_message(error, ChatCompletionBody), param="messages") from None
    except TokenizerUnavailableError as error:
        raise APIError(str(error), 503) from None
    except ValueError as error:
        raise APIError(str(error)) from None
    return {"tokens": tokens, "count": len(tokens), "max_model_len": max_seq_len}


def detokenize(body: bytes, tokenizer: TokenizerPool, max_seq_len: int) -> dict:
    """Return the answer to POST /detokenize. Raises APIError."""
    fields = parse_body(DetokenizeBody, body)
    return {"prompt": tokenizer.vocabulary.decode(fields.tokens)}
