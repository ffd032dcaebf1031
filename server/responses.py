"""OpenAI's Responses API: its requests become chats, answers become items and typed events.

A request has the whole conversation. Items of recent answers may stand in it by their ids, as the
Vercel AI SDK sends them: ItemStore has these.
"""

import json
import re
import threading
from typing import Annotated, Any

from pydantic import Field, ValidationError

from server.errors import FIELD_MESSAGES, APIError, error_field, error_message
from server.plan import GenerationRequest, Limits, parse_body, plan_request
from server.schema import (
    FAIL_FAST,
    ChatCompletionBody,
    LogprobCount,
    Seed,
    TokenLimit,
    reasoning_text,
)
from server.structured import (
    OtherServersFields,
    StrictModel,
    StructuredFields,
    UnlessOne,
    Unsupported,
)
from server.tokenizing import TokenizerPool
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
        reasoning = ""  # before the assistant's next message or call
        if self.instructions:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        for item in self.input:
            if item.get("type") == "item_reference":
                item = store.find(item.get("id"))
            kind = item.get("type", "message")
            if kind == "reasoning":
                text = reasoning_text(item.get("content")) or reasoning_text(item.get("summary"))
                reasoning = "\n\n".join(filter(None, [reasoning, text]))
                continue
            if kind == "message":
                found.append({"role": item.get("role"), "content": item.get("content")})
                add_reasoning(found[-1], reasoning)
            elif kind == "function_call":
                add_call(found, item, reasoning)
            elif kind == "function_call_output":
                output = item.get("output", "")
                id = item.get("call_id", "")
                found.append({"role": "tool", "tool_call_id": id, "content": output})
            else:
                raise APIError(
                    f"input: items of type {kind!r:.40} are not supported", param="input"
                )
            reasoning = ""
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


def add_call(messages: list[Item], item: Item, reasoning: str) -> None:
    """Add a function call to the assistant's last message, or as a message of its own."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)
    add_reasoning(messages[-1], reasoning)


def add_reasoning(message: Item, reasoning: str) -> None:
    """Add reasoning to an assistant's message, after that which it has."""
    texts = filter(None, [message.get("reasoning_content"), reasoning])
    if reasoning and message["role"] == "assistant":
        message["reasoning_content"] = "\n\n".join(texts)


def read_responses_request(
    body: bytes, tokenizer: Tokenizer | TokenizerPool, limits: Limits, store: ItemStore
) -> tuple[ResponsesBody, GenerationRequest]:
    """Parse and validate a request's body. Raises APIError if it is invalid or unsupported."""
    fields = parse_body(ResponsesBody, body)
    return fields, plan_request(fields.chat_body(store), tokenizer, limits, "input")
