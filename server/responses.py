"""OpenAI's Responses API: its requests become chats, answers become items and typed events.

A request has the whole conversation, or names the response that it follows. Instead of an item of a
recent answer it may have the item's id, as the Vercel AI SDK does. ItemStore has both.
"""

import json
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from server.errors import FIELD_MESSAGES, APIError
from server.plan import GenerationRequest, Limits, parse_body, plan_request
from server.response_store import ItemStore
from server.schema import (
    FAIL_FAST,
    ChatCompletionBody,
    LogprobCount,
    Seed,
    TokenLimit,
    chat_error,
    reasoning_text,
)
from server.structured import (
    OtherServersFields,
    StrictModel,
    StructuredFields,
    UnlessOne,
    Unsupported,
    report_unknown,
)
from server.tokenizing import TokenizerPool
from tokenizer import Tokenizer

Item = dict[str, Any]
# Fields of a chat that a request may have under the same name.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
SHARED = (*SAMPLING, *StructuredFields.model_fields, "parallel_tool_calls", "stream")
# Items of tools that OpenAI's servers run. Such items of a history say nothing to another model.
SERVERS_ITEMS = {
    *("web_search_call", "file_search_call", "computer_call", "computer_call_output"),
    *("code_interpreter_call", "image_generation_call", "mcp_call", "mcp_list_tools"),
    *("local_shell_call", "local_shell_call_output", "compaction"),
}
LOGPROBS = "message.output_text.logprobs"  # of `include`


class Reasoning(StrictModel):
    reported_as = "reasoning."

    effort: str | None = None


class TextSettings(StrictModel):
    reported_as = "text."

    format: Item = Field(default_factory=lambda: {"type": "text"})


class ResponsesBody(StructuredFields, OtherServersFields):
    """The body of POST /v1/responses."""

    reported_as = ""

    input: str | Annotated[list[Item], FAIL_FAST]
    previous_response_id: str | None = None
    conversation: Unsupported = None
    background: Unsupported = None
    prompt: Unsupported = None
    max_tokens: Unsupported = None
    max_completion_tokens: Unsupported = None
    n: UnlessOne = 1
    routing: Unsupported = None
    model: Any = None
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

    @model_validator(mode="after")
    def check_numbers(self) -> "ResponsesBody":
        """Refuse NaN and infinities, also as 1e999: the answer repeats these fields as JSON."""
        repeated = self.input, self.tools, self.tool_choice, self.text.format, self.metadata
        try:
            json.dumps(repeated, allow_nan=False)
        except ValueError:
            raise ValueError("a number is not finite, or too large for JSON: change it") from None
        return self

    def chat_body(self, store: ItemStore) -> ChatCompletionBody:
        """Return the same request as a chat. Raises APIError if that is invalid."""
        fields: Item = {name: getattr(self, name) for name in SHARED}
        tools, choice = self.chat_tools()
        items = store.conversation(self.previous_response_id) + self.own_items(store)
        fields |= {
            "messages": self.messages(items),
            "tools": tools,
            "tool_choice": choice,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
        }
        if self.text.format.get("type") != "text":
            if self.response_format.type != "text":
                raise APIError("response_format and text.format: send one", param="text")
            fields["response_format"] = self.text.format
            if (kind := self.text.format.get("type")) == "json_schema":
                fields["response_format"] = {"type": kind, "json_schema": self.text.format}
        try:
            return ChatCompletionBody.model_validate(fields)
        except ValidationError as error:
            names = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
            raise chat_error(error, names, {"messages": FIELD_MESSAGES["input"]}) from None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens are sent with their logprobs."""
        return LOGPROBS in self.include or self.top_logprobs > 0

    def own_items(self, store: ItemStore) -> list[Item]:
        """Return the items of this request, without references. Raises APIError."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        is_reference = [item.get("type") == "item_reference" for item in self.input]
        pairs = zip(self.input, is_reference, strict=True)
        return [store.find(item.get("id")) if named else item for item, named in pairs]

    def messages(self, items: list[Item]) -> list[Item]:
        """Return the conversation as a chat's messages. Raises APIError for unknown items."""
        found: list[Item] = []
        reasoning = ""  # before the assistant's next message or call
        if self.instructions:
            found.append({"role": "system", "content": self.instructions})
        for item in items:
            kind = item.get("type") or "message"
            if isinstance(kind, str) and kind in SERVERS_ITEMS:
                continue
            if kind == "reasoning":
                text = reasoning_text(item.get("content")) or reasoning_text(item.get("summary"))
                reasoning = "\n\n".join(filter(None, [reasoning, text]))
                continue
            if kind == "message":
                found.append({"role": item.get("role"), "content": item.get("content")})
                add_reasoning(found[-1], reasoning)
            elif kind == "function_call":
                add_call(found, item, reasoning)
            elif kind == "custom_tool_call":  # its input is plain text
                arguments = json.dumps({"input": item.get("input")})
                add_call(found, {**item, "arguments": arguments}, reasoning)
            elif kind in ("function_call_output", "custom_tool_call_output"):
                output = item.get("output", "")
                id = item.get("call_id", "")
                found.append({"role": "tool", "tool_call_id": id, "content": output})
            else:
                raise APIError(
                    f"input: items of type {kind!r:.40} are not supported", param="input"
                )
            reasoning = ""
        return found

    def chat_tools(self) -> tuple[list[Item], str | Item]:
        """Return the functions and `tool_choice` as a chat has them.

        Tools of other types (web_search, custom) are left out: nothing here runs them. So are those
        that `allowed_tools` does not name. Raises APIError.
        """
        functions = {}
        for tool in self.tools:
            if not isinstance(kind := tool.get("type"), str):
                raise APIError('tools: each needs a type, such as "function"', param="tools")
            if kind != "function":
                report_unknown([f"tools of type {kind}"])
                continue
            names = "name", "description", "parameters", "strict"
            functions[str(tool.get("name"))] = {name: tool.get(name) for name in names}
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            allowed, choice = allowed_functions(choice), choice.get("mode", "auto")
            functions = {name: functions[name] for name in functions if name in allowed}
        if isinstance(choice, dict):
            choice = {"type": choice.get("type"), "function": choice}
        found = [{"type": "function", "function": function} for function in functions.values()]
        return found, choice


def allowed_functions(choice: Item) -> set[str]:
    """Return the names of `allowed_tools`. Raises APIError."""
    tools = choice.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        reason = 'allowed_tools needs tools such as [{"type": "function", "name": ...}]'
        raise APIError(f"tool_choice: {reason}", param="tool_choice")
    return {str(tool.get("name")) for tool in tools if tool.get("type") == "function"}


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
