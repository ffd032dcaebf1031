"""Anthropic's Messages API: its requests become chats. server/message_blocks.py has the answers."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from runtime.sampling import MAX_CANDIDATES
from server.errors import FIELD_MESSAGES, APIError, ContextLengthError
from server.plan import GenerationRequest, Limits, parse_body, plan_request, prompt_errors
from server.schema import (
    FAIL_FAST,
    MAX_STOPS,
    WHOLE,
    ChatCompletionBody,
    StopTexts,
    TokenLimit,
    chat_error,
    part_text,
)
from server.structured import StrictModel, report_unknown
from server.tokenizing import TokenizerPool, vocabulary_of
from tokenizer import Tokenizer

Item = dict[str, Any]
Items = Annotated[list[Item], FAIL_FAST]
PATH = "/v1/messages"
# Status -> `type` of an error. Others are invalid requests, from 500 on errors of the server.
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
WRONG_MESSAGES = (
    'messages: it must be a list such as [{"role": "user", "content": "Hello"}], whose contents '
    "are strings or lists of blocks, and whose roles are user and assistant"
)
WRONG_FIELDS = {
    "messages": WRONG_MESSAGES,
    "system": "system must be a string, or a list of blocks of text",
    "tools": 'tools must be a list such as [{"name": ..., "description": ..., "input_schema": '
    "{...}}], with names of letters, digits and _.:/-",
    "tool_choice": 'tool_choice must be {"type": "auto"}, "any" or "none", or {"type": "tool", '
    '"name": ...}',
    "thinking": 'thinking must be {"type": "enabled"}, "adaptive" or "disabled"',
    "output_config": 'output_config must be an object such as {"effort": "low"}',
    "output_format": "output_format must be an object",
    "stop_sequences": f"stop_sequences must be a list of up to {MAX_STOPS} strings of 1 to 500 "
    "characters",
}
# Fields of a chat -> this API's, for errors.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Blocks about Anthropic's servers, beside the results of their tools (web_search_tool_result).
SERVERS_BLOCKS = {"redacted_thinking", "server_tool_use", "mcp_tool_use", "container_upload"}
EFFORTS = {"max": "high"}  # of this API -> OpenAI's, which ends at xhigh


class Thinking(StrictModel):
    """Whether the model thinks first. Budgets are not supported: `max_tokens` bounds both."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputConfig(StrictModel):
    reported_as = "output_config."

    effort: str | None = None
    format: Item | None = None


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False

    def of_chat(self) -> str | Item:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return CHOICES[self.type]


class PromptBody(StrictModel):
    """What a request and POST /v1/messages/count_tokens have in common."""

    reported_as = ""
    field_messages: ClassVar[dict[str, str]] = WRONG_FIELDS

    messages: Annotated[Items, Field(min_length=1)]
    model: str = ""
    system: str | Items = ""
    tools: Items = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking = Thinking(type="disabled")
    output_config: OutputConfig = OutputConfig()
    output_format: Item | None = None  # the older name of output_config.format
    # Ignored. They concern Anthropic's servers, or change nothing here.
    cache_control: Any = None
    context_management: Any = None
    metadata: Any = None
    service_tier: Any = None

    def chat_body(self, **options: Any) -> ChatCompletionBody:
        """Return the same request as a chat, with further fields. Raises APIError."""
        try:
            fields: Item = {"messages": self.chat_messages(), "tools": chat_tools(self.tools)}
        except ValueError as error:
            raise APIError(str(error), param="messages") from None
        thinks = self.thinking.type != "disabled"
        effort = self.output_config.effort
        fields |= options | {
            "tool_choice": self.tool_choice.of_chat() if fields["tools"] else "auto",
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            # Templates have either name.
            "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks},
            "reasoning_effort": EFFORTS.get(effort or "", effort),
            "continue_final_message": fields["messages"][-1]["role"] == "assistant" or None,
        }
        if found := self.output_config.format or self.output_format:
            fields["response_format"] = {"type": found.get("type"), "json_schema": found}
        try:
            return ChatCompletionBody.model_validate(fields)
        except ValidationError as error:
            raise chat_error(error, NAMES, WRONG_FIELDS) from None

    def chat_messages(self) -> list[Item]:
        """Return the conversation as a chat's messages. Raises ValueError."""
        found: list[Item] = []
        if system := blocks_text(self.system):
            found.append({"role": "system", "content": system})
        for role, blocks in self.turns():
            found += [assistant_message(blocks)] if role == "assistant" else others(role, blocks)
        if found[-1].get("tool_calls"):
            raise ValueError("messages: the last one calls a tool: send its tool_result, too")
        if found[-1] == {"role": "assistant", "content": ""}:  # nothing to continue
            del found[-1]
        if not found:
            raise ValueError(WRONG_MESSAGES)
        return found

    def turns(self) -> list[tuple[str, list]]:
        """Return the messages' roles and blocks. Those of a role that follow each other are one.

        Raises ValueError.
        """
        found: list[tuple[str, list]] = []
        for message in self.messages:
            role, content = message.get("role"), message.get("content")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if role not in ("user", "assistant", "system") or not isinstance(blocks, list):
                raise ValueError(WRONG_MESSAGES)
            if found and found[-1][0] == role:
                found[-1] = role, found[-1][1] + blocks
            else:
                found.append((role, blocks))
        return found


class MessagesBody(PromptBody):
    """The body of POST /v1/messages."""

    max_tokens: TokenLimit
    stream: bool = False
    stop_sequences: StopTexts = Field(default_factory=list)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: Annotated[int, Field(ge=-1, le=2**31), WHOLE] = MAX_CANDIDATES

    def request_body(self) -> ChatCompletionBody:
        """Return the same request as a chat. Raises APIError."""
        return self.chat_body(
            max_completion_tokens=self.max_tokens,
            stream=self.stream,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=min(self.top_k, MAX_CANDIDATES),
        )


# Messages -----------------------------------------------------------------------------------------


def blocks_text(content: Any) -> str:
    """Return texts as one, blocks with an empty line between. Raises ValueError for others."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(WRONG_MESSAGES)
    return "\n\n".join(filter(None, map(block_text, content)))


def block_text(block: Any) -> str:
    """Return the text of a block, under its title if it has one. Raises ValueError without text."""
    match block:
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            pass
        case {"type": "document", "source": {"type": "content", "content": content}} | {
            "type": "search_result",
            "content": content,
        }:
            text = blocks_text(content)
        case _:
            try:
                return part_text(block)
            except ValueError as error:
                is_general = str(error) == FIELD_MESSAGES["messages"]
                raise ValueError(WRONG_MESSAGES if is_general else str(error)) from None
    title = block.get("title")
    return f"{title}\n{text}" if isinstance(title, str) else text


def assistant_message(blocks: list) -> Item:
    """Return an answer of the history as a message. Raises ValueError."""
    message: Item = {"role": "assistant", "content": ""}
    thoughts, calls = [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(block.get("thinking"))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input", {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif not is_servers_block(kind):
            message["content"] += block_text(block)
    if calls:
        message["tool_calls"] = calls
    if found := [text for text in thoughts if text and isinstance(text, str)]:
        message["reasoning_content"] = "\n\n".join(found)
    return message


def is_servers_block(kind: Any) -> bool:
    """Whether a block concerns Anthropic's servers: their tools, and thoughts that only they read.

    Such blocks of a history say nothing to another model.
    """
    return isinstance(kind, str) and (kind in SERVERS_BLOCKS or kind.endswith("_tool_result"))


def others(role: str, blocks: list) -> list[Item]:
    """Return the messages of a user's turn: the results of tools, then its text."""
    found, texts = [], []
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            texts.append(block)
            continue
        content = blocks_text(block.get("content") or "")
        found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
    if texts or not found:
        found.append({"role": role, "content": blocks_text(texts)})
    return found


def chat_tools(tools: list[Item]) -> list[Item]:
    """Return tools as a chat has them. Those of Anthropic's servers are left out: none runs here.

    They have no schema, but a type such as web_search_20250305.
    """
    found = []
    for tool in tools:
        if "input_schema" not in tool and tool.get("type", "custom") != "custom":
            report_unknown([f"tools of type {tool['type']}"])
            continue
        function = {name: tool.get(name) for name in ("name", "description", "strict")}
        function["parameters"] = tool.get("input_schema")
        found.append({"type": "function", "function": function})
    return found


# Requests and errors ------------------------------------------------------------------------------


def read_message(
    body: bytes, tokenizer: Tokenizer | TokenizerPool, limits: Limits
) -> tuple[MessagesBody, GenerationRequest]:
    """Parse and validate a request's body. Raises APIError if it is invalid or unsupported."""
    fields = parse_body(MessagesBody, body)
    return fields, plan_request(fields.request_body(), tokenizer, limits, "messages")


def count_tokens(body: bytes, tokenizer: Tokenizer | TokenizerPool, max_seq_len: int) -> dict:
    """Return the answer to POST /v1/messages/count_tokens. Raises APIError."""
    chat = parse_body(PromptBody, body).chat_body()
    with prompt_errors("messages", max_seq_len):
        chat.calls(vocabulary_of(tokenizer))
        return {"input_tokens": len(chat.encode(tokenizer)[0][0])}


def error_body(error: APIError, request_id: str | None = None) -> dict:
    """Return the JSON object that Anthropic's clients expect."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    message = str(error)
    if isinstance(error, ContextLengthError):  # Claude Code knows it by this beginning
        counts = error.tokens and f"{error.tokens} tokens > {error.limit} maximum"
        message = f"prompt is too long: {counts or message}"
    found: dict[str, Any] = {
        "type": "error",
        "error": {"type": ERROR_TYPES.get(error.status, kind), "message": message},
    }
    return found | ({"request_id": request_id} if request_id else {})
