"""The API's request bodies as pydantic models, and the JSON of its answers."""

import json
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from runtime.reasoning import REASONING, TextSplitter, make_splitter
from runtime.sampling import MAX_CANDIDATES, TOP_LOGPROBS, Sampling
from runtime.session_steps import Details
from server import structured
from server.constraints import FieldError, forced_call
from server.structured import (
    OtherServersFields,
    StrictModel,
    StructuredFields,
    Unsupported,
)
from server.tokenizing import PromptTooLongError, TokenizerPool, TokenizerUnavailableError
from server.tools import (
    NAME,
    CallParser,
    CallPiece,
    Piece,
    TextPiece,
    control_markers,
    find_format,
    make_parser,
)
from tokenizer import Tokenizer

BodyType = TypeVar("BodyType", bound=BaseModel)
MAX_ANSWERS = 8  # the largest `n`
MAX_PROMPTS = 64  # a request
# Types of a message's parts -> what they are, in the plural.
UNSUPPORTED_PARTS = {
    "image": "images",
    "audio": "sounds",
    "video": "videos",
    "file": "files",
    "document": "files",
}
OWN_VARIABLES = {"messages", "tools", "add_generation_prompt"}  # a request cannot set these
# OpenAI's values of `reasoning_effort` that open models do not know.
REASONING_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as in OpenAI's API
MIN_TEMPERATURE = 1e-4  # below it, dividing logits by the temperature would overflow
# Of `generate` -> the API's. The time limit interrupts; None: the stream goes on.
FINISH_REASONS = {"stop": "stop", "length": "length", "interrupted": "length", None: None}


# Errors ---------------------------------------------------------------------------------------


class APIError(Exception):
    """An error response. status: of HTTP. code: for programs, such as "queue_full".

    param: the field of the request that is wrong.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        param: str | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}
        self.param = param

    def body(self) -> dict:
        """Return the JSON object that OpenAI's clients expect."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


# Messages for structured fields. `error_message` derives those of other fields.
FIELD_MESSAGES = {
    **structured.FIELD_MESSAGES,
    "stop": "stop must be a string of 1 to 500 characters, or a list of up to 4",
    "messages": 'messages must be a list such as [{"role": "user", "content": "Hello"}], '
    "whose roles and contents are strings",
    "prompt": "there is no prompt: give one string, or a list of token ids (whole numbers)",
    "tools": 'tools must be a list such as [{"type": "function", "function": {"name": ..., '
    '"description": ..., "parameters": {...}}}], with names of letters, digits and _.:/-',
    "tool_choice": 'tool_choice must be "none", "auto", "required", or '
    '{"type": "function", "function": {"name": ...}}',
    "logit_bias": "logit_bias must be an object of token ids and numbers from -100 to 100",
    "chat_template_kwargs": "chat_template_kwargs must be an object of names and values",
    "input": "input must be a string, or a list of messages, function calls and their outputs",
    "include": 'include must be a list of names such as "message.output_text.logprobs"',
    "tokens": "tokens must be a list of token ids (whole numbers)",
}
TYPE_RULES = {
    "bool_type": "true or false",
    "string_type": "a string",
    "model_type": "an object",
    "dict_type": "an object",
}


def error_message(error: ValidationError, model: type[BaseModel]) -> str:
    """Return a one-line message about the first error of a body. model: the body's class."""
    first = error.errors(include_url=False)[0]
    kind, path, value = first["type"], first["loc"], first["input"]
    if kind == "json_invalid":
        return f"the body is not JSON, or not valid Unicode ({first['ctx']['error']})"
    if kind == "value_error":
        return str(first["ctx"]["error"])
    if not path:
        return "the body must be a JSON object"
    if path[0] in FIELD_MESSAGES:
        return FIELD_MESSAGES[path[0]]
    rule = TYPE_RULES.get(kind) or limits_of(model, path[0])
    return f"{path[-1]} {value!r:.40}: it must be {rule}"


def error_field(error: ValidationError) -> str | None:
    """Return the name of the first wrong field, if there is one."""
    path = error.errors(include_url=False)[0]["loc"]
    return str(path[0]) if path else None


@cache
def limits_of(model: type[BaseModel], name: str) -> str:
    """Return the range of a numeric field, as text."""
    schema = model.model_json_schema()["properties"][name]
    schema = schema.get("anyOf", [schema])[0]
    kind = "a whole number " if schema["type"] == "integer" else ""
    low, high = whole_to_int(schema["minimum"]), whole_to_int(schema["maximum"])
    return f"{kind}from {low} to {high}"


# Requests -------------------------------------------------------------------------------------


def whole_to_int(value: Any) -> Any:
    """Return a whole float as an int: JSON does not distinguish 5 and 5.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def text_to_list(value: Any) -> Any:
    """Return a string as a list with that string."""
    return [value] if isinstance(value, str) else value


def list_prompts(prompt: str | list) -> list[str | list[int]]:
    """Return the prompts of a request as a list. Raises ValueError for too many."""
    if isinstance(prompt, str) or not prompt or type(prompt[0]) is int:
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise ValueError(f"{len(prompt)} prompts in one request: send up to {MAX_PROMPTS}")
    return prompt


WHOLE = BeforeValidator(whole_to_int)
AnswerCount = Annotated[int, Field(ge=1, le=MAX_ANSWERS), WHOLE]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenLimit = Annotated[int, Field(ge=1, le=2**31), WHOLE]
# One compiled step serves all top_k up to MAX_CANDIDATES; a larger one would compile another.
TopK = Annotated[int, Field(ge=-1, le=MAX_CANDIDATES), WHOLE]
LogprobCount = Annotated[int, Field(ge=0, le=TOP_LOGPROBS), WHOLE]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE]
StopText = Annotated[str, Field(min_length=1, max_length=500)]
StopTexts = Annotated[
    list[StopText], Field(max_length=4, fail_fast=True), BeforeValidator(text_to_list)
]
# fail_fast: a 4 MB body could hold a million errors, and pydantic keeps all of them.
FAIL_FAST = Field(fail_fast=True)
TokenIds = Annotated[list[int], FAIL_FAST]
Prompt = Annotated[
    str | TokenIds | Annotated[list[str], FAIL_FAST] | Annotated[list[TokenIds], FAIL_FAST],
    AfterValidator(list_prompts),
]
FunctionName = Annotated[str, Field(pattern=rf"^{NAME}$", max_length=128)]


class StreamOptions(StrictModel):
    reported_as = "stream_options."

    include_usage: bool = False


class Function(StrictModel):
    name: FunctionName
    description: str = ""
    strict: bool = False  # refuse a schema that is not supported, if this function is forced
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class NamedFunction(StrictModel):
    name: FunctionName


class NamedChoice(StrictModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class FunctionCall(StrictModel):
    name: str
    arguments: str | dict[str, Any] = ""

    def template_fields(self) -> dict:
        """Return the call for chat_template.with_arguments, which parses JSON text."""
        return {"name": self.name, "arguments": self.arguments or "{}"}


class ToolCall(StrictModel):
    id: str = ""
    function: FunctionCall


def join_parts(content: Any) -> Any:
    """Return a message's content as one string. Raises ValueError for parts that are not text."""
    return "".join(map(part_text, content)) if isinstance(content, list) else content


def part_text(part: Any) -> str:
    """Return the text of a part of a message. Raises ValueError if it has none."""
    kind = str(part.get("type", "text")) if isinstance(part, dict) else ""
    for name, plural in UNSUPPORTED_PARTS.items():
        if name in kind:
            raise ValueError(f"messages: {plural} are not supported: send text only")
    text = part.get("refusal" if kind == "refusal" else "text") if kind else None
    if not isinstance(text, str):
        raise ValueError(FIELD_MESSAGES["messages"])
    return text


def reasoning_text(value: Any) -> str:
    """Return a message's reasoning as one string; other values than texts are ignored."""
    parts = value if isinstance(value, list) else [value]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


ReasoningText = Annotated[str, BeforeValidator(reasoning_text)]


class Message(StrictModel):
    role: str
    content: Annotated[str, BeforeValidator(join_parts)] = ""
    refusal: str = ""  # in place of the content
    tool_calls: Annotated[list[ToolCall], FAIL_FAST] = Field(default_factory=list)
    reasoning_content: ReasoningText = ""  # the template decides whether the model sees it
    reasoning: ReasoningText = ""  # the same, under the name that some clients send
    tool_call_id: str = ""
    name: str = ""

    @model_validator(mode="after")
    def check_content(self) -> "Message":
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise ValueError(FIELD_MESSAGES["messages"])
        self.content = self.content or self.refusal
        return self


def template_messages(messages: list[Message], tokenizer: Tokenizer) -> list[dict]:
    """Return messages as a chat template expects them."""
    format, names, found = find_format(tokenizer), {}, []
    as_id = format.template_id if format else str
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "developer" and not tokenizer.template_has("developer"):
            fields["role"] = "system"
        reasoning = message.reasoning_content or message.reasoning
        if reasoning and message.role == "assistant":
            fields["reasoning_content"] = reasoning
        if message.tool_calls:
            calls = [(call.id, call.function.template_fields()) for call in message.tool_calls]
            names |= {id: function["name"] for id, function in calls}
            fields["tool_calls"] = [
                {"id": as_id(id), "type": "function", "function": call} for id, call in calls
            ]
        if message.role == "tool":
            fields["tool_call_id"] = as_id(message.tool_call_id)
            if name := message.name or names.get(message.tool_call_id):
                fields["name"] = name
        found.append(fields)
    return found


class GenerationBody(StructuredFields, OtherServersFields):
    """The fields of both kinds of request."""

    reported_as = ""
    chat: ClassVar[bool]
    prompt_name: ClassVar[str]  # the field that has the prompt

    functions: Unsupported = None
    echo: Unsupported = None
    suffix: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None
    logit_bias: dict[str, Bias] = Field(default_factory=dict)
    model: str = ""
    stream_options: StreamOptions = StreamOptions()
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    min_p: float = Field(0.0, ge=0, le=0.99)
    top_k: TopK = Sampling.top_k
    repetition_penalty: float = Field(1.0, ge=0.1, le=10)
    seed: Seed = Field(default_factory=lambda: secrets.randbits(62))
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    top_logprobs: LogprobCount = 0
    n: AnswerCount = 1
    best_of: AnswerCount = 1
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    stop: StopTexts = Field(default_factory=list)
    stream: bool = False
    routing: bool = False

    @model_validator(mode="after")
    def check_best_of(self) -> "GenerationBody":
        if self.best_of not in (1, self.n):
            raise ValueError(f"best_of {self.best_of}: all answers are returned, so it must be n")
        return self

    def sampling(self, vocab_size: int) -> Sampling:
        """Return the sampling options of the first answer; answer i has the i-th seed after it.

        A temperature below MIN_TEMPERATURE means greedy. Raises ValueError for a logit_bias of a
        token that the vocabulary lacks.
        """
        bias = {int(id): value for id, value in self.logit_bias.items() if id.isdecimal()}
        if len(bias) < len(self.logit_bias) or max(bias, default=0) >= vocab_size:
            raise ValueError(f"logit_bias: token ids must be from 0 to {vocab_size - 1}")
        return Sampling(
            temperature=0.0 if self.temperature < MIN_TEMPERATURE else self.temperature,
            # 0 and -1: off, as far as the sampler goes.
            top_k=self.top_k if self.top_k > 0 else MAX_CANDIDATES,
            top_p=max(self.top_p, 1e-6),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed % 2**63,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=bias,
        )


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    chat = False

    prompt_name = "prompt"

    prompt: Prompt
    max_tokens: TokenLimit = DEFAULT_COMPLETION_TOKENS
    logprobs: LogprobCount | None = None
    parse_special: bool = True  # llama.cpp's name; False: control tokens in a prompt are text

    def requested_tokens(self) -> int:
        return self.max_tokens

    def logprob_count(self) -> int | None:
        """Return the number of top logprobs per token; None: no logprobs at all."""
        return self.logprobs

    def encode(self, tokenizer: Tokenizer) -> tuple[list[list[int]], bool]:
        """Return each prompt's token ids, and False: the answers continue the prompts."""
        special = self.parse_special
        return [encode_prompt(prompt, tokenizer, special) for prompt in self.prompt], False

    def calls(self, tokenizer: Tokenizer) -> None:
        """Return None: a completion has no tool calls."""


class ChatCompletionBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    chat = True

    prompt_name = "messages"

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], FAIL_FAST] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    logprobs: bool = False

    @model_validator(mode="after")
    def check_logprobs(self) -> "ChatCompletionBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @model_validator(mode="after")
    def check_tools(self) -> "ChatCompletionBody":
        names = {tool.function.name for tool in self.tools}
        choice = self.tool_choice
        if isinstance(choice, NamedChoice) and choice.function.name not in names:
            raise ValueError(f"tool_choice names {choice.function.name!r:.80}, which is no tool")
        if choice == "required" and not names:
            raise ValueError('tool_choice "required" needs tools')
        if self.active_tools() and (restriction := self.restriction()):
            raise ValueError(
                f"{restriction.field} would forbid the calls of tools: send one of them, or "
                'tool_choice "none"'
            )
        return self

    def requested_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def logprob_count(self) -> int | None:
        """Return the number of top logprobs per token; None: no logprobs at all."""
        return self.top_logprobs if self.logprobs else None

    def encode(self, tokenizer: Tokenizer) -> tuple[list[list[int]], bool]:
        """Return the conversation's token ids, and whether the answer is a separate message.

        The answer continues the concatenated contents if there is no chat template.
        """
        vocabulary = vocabulary_of(tokenizer)
        messages = template_messages(self.messages, vocabulary)
        if not tokenizer.has_chat_template:
            text = "".join(message["content"] for message in messages)
            return [encode_prompt(text, tokenizer)], False
        ids = tokenizer.chat(messages, **self.template_variables())
        calls = self.calls(vocabulary)
        if calls and calls.prefix:
            splitter = make_splitter(vocabulary, ids)
            is_open = isinstance(splitter, TextSplitter) and splitter.kind == REASONING
            prefix = (splitter.closing if is_open else "") + calls.prefix
            ids = ids + tokenizer.encode(prefix, bos=False, special=True)
        return [ids], True

    def template_variables(self) -> dict[str, Any]:
        """Return the chat template's variables beside the messages."""
        variables = {k: v for k, v in self.chat_template_kwargs.items() if k not in OWN_VARIABLES}
        if self.reasoning_effort is not None:
            effort = REASONING_EFFORTS.get(self.reasoning_effort, self.reasoning_effort)
            variables = {"reasoning_effort": effort} | variables
            if self.reasoning_effort == "none":
                variables = {"enable_thinking": False} | variables
        if self.active_tools():
            variables["tools"] = [
                tool.model_dump(exclude={"function": {"strict"}}) for tool in self.active_tools()
            ]
        return variables

    def active_tools(self) -> list[Tool]:
        """Return the tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    def calls(self, tokenizer: Tokenizer) -> "CallSettings | None":
        """Return how the answer's tool calls are read; None without tools.

        Raises ValueError for a template without a known format of calls.
        """
        if not self.active_tools():
            return None
        format = find_format(tokenizer)
        if format is None:
            reason = "this model has no chat template with a known format of tool calls"
            raise FieldError(f"tools: {reason}; leave them out", "tools")
        schemas = {tool.function.name: tool.function.parameters for tool in self.tools}
        prefix, grammar, choice = "", None, self.tool_choice
        if choice != "auto":
            name = choice.function.name if isinstance(choice, NamedChoice) else None
            prefix, markers = format.prefix(name, tokenizer), format.json_markers(tokenizer)
            if markers:
                strict = {tool.function.name for tool in self.tools if tool.function.strict}
                grammar = forced_call(tokenizer, list(schemas.items()), markers, name, strict)
        is_named = isinstance(choice, NamedChoice)
        single = not self.parallel_tool_calls or is_named
        return CallSettings(format, schemas, prefix, single, grammar, is_named)


class CallSettings(NamedTuple):
    """How the tool calls of an answer are read."""

    format: type[CallParser]
    schemas: dict[str, dict]  # name -> JSON schema of the parameters
    prefix: str  # the answer's beginning, which the prompt ends with
    single: bool  # one call at most
    grammar: str | None = None  # a forced call's, after the prefix
    is_named: bool = False  # the request names the function

    def parser(self, tokenizer: Tokenizer) -> CallParser:
        """Return a parser of one answer."""
        return make_parser(self.format, tokenizer, self.schemas, self.prefix, single=self.single)

    def generation_fields(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the fields of Generation that calls need."""
        found = {
            "markers": control_markers(self.format, tokenizer),
            "split_reasoning": not self.format.splits_reasoning,
        }
        return found | ({"grammar": self.grammar, "reasons": False} if self.grammar else {})

    def stop(self, tokenizer: Tokenizer) -> list[str]:
        """Return the text that ends an answer with a single call, if the format has one."""
        if not self.single or not self.format.closer:
            return []
        marker = self.format.closer
        id = tokenizer.token_id(marker)
        return [control_markers(self.format, tokenizer).get(-1 if id is None else id, marker)]


def vocabulary_of(tokenizer: Tokenizer | TokenizerPool) -> Tokenizer:
    """Return the tokenizer of this process."""
    return tokenizer.vocabulary if isinstance(tokenizer, TokenizerPool) else tokenizer


def encode_prompt(
    prompt: str | list[int], tokenizer: Tokenizer | TokenizerPool, special: bool = False
) -> list[int]:
    """Return a prompt's token ids. Raises ValueError for an empty prompt and invalid ids.

    special: control tokens in a text become their ids.
    """
    if not prompt:
        raise ValueError(FIELD_MESSAGES["prompt"])
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, special=special)
    if min(prompt) < 0 or max(prompt) >= tokenizer.vocab_size:
        last = tokenizer.vocab_size - 1
        raise ValueError(f"token ids must be whole numbers from 0 to {last}")
    return prompt


@dataclass(frozen=True)
class Generation:
    """One answer of a request, as every rank needs it."""

    prompt_ids: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop: list[str]
    reply: bool  # the answer is a separate message, not a continuation of the prompt
    watch: bool  # record the Details of each token
    # {id: text} of control tokens that appear in the text: runtime.text.TextSettings.markers.
    markers: dict[int, str] = field(default_factory=dict)
    split_reasoning: bool = True  # with `reply`: split off reasoning blocks
    grammar: str | None = None  # that the answer follows, see server.constraints
    reasons: bool = True  # with `reply`: the grammar begins after the reasoning block, if any
    seeded: bool = False  # the request has a seed, which promises the same text at each run


class GenerationRequest(NamedTuple):
    """A validated request, and its answers: `n` for each prompt."""

    body: CompletionBody | ChatCompletionBody
    generations: list[Generation]
    calls: CallSettings | None = None


class Limits(NamedTuple):
    """What a request may ask for."""

    max_seq_len: int
    vocab_size: int  # rows of the model's embedding
    check_grammar: Callable[[str], Any] = lambda grammar: None  # raises ValueError


def read_request(
    body: bytes, chat: bool, tokenizer: Tokenizer | TokenizerPool, limits: Limits
) -> GenerationRequest:
    """Parse and validate a request's body. Raises APIError if it is invalid or unsupported."""
    fields = parse_body(ChatCompletionBody if chat else CompletionBody, body)
    return plan_request(fields, tokenizer, limits)


def parse_body(model: type[BodyType], body: bytes) -> BodyType:
    """Return a body as an instance of its class. Raises APIError if it is invalid."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise APIError(error_message(error, model), param=error_field(error)) from None


def plan_request(
    fields: CompletionBody | ChatCompletionBody,
    tokenizer: Tokenizer | TokenizerPool,
    limits: Limits,
    prompt_name: str | None = None,
) -> GenerationRequest:
    """Encode a request's prompts and set its lengths. Raises APIError if one is too long.

    prompt_name: of the field that has the prompt, for errors.
    """
    vocabulary, name = vocabulary_of(tokenizer), prompt_name or fields.prompt_name
    length = limits.max_seq_len
    try:
        prompts, reply = fields.encode(tokenizer)
        calls = plan_calls(fields, vocabulary, limits)
    except TokenizerUnavailableError as error:
        raise APIError(str(error), 503) from None
    except PromptTooLongError as error:
        reason = f"This model's maximum context length is {length} tokens. However, {error}"
        raise APIError(reason, code="context_length_exceeded", param=name) from None
    except FieldError as error:
        raise APIError(str(error), param=error.param) from None
    except ValueError as error:
        raise APIError(str(error), param=name) from None
    common: dict[str, Any] = {
        "stop": fields.stop + (calls.stop(vocabulary) if calls else []),
        "reply": reply,
        "watch": fields.logprob_count() is not None or fields.routing,
        "grammar": plan_grammar(fields, limits),
        "seeded": "seed" in fields.model_fields_set,
        **(calls.generation_fields(vocabulary) if calls else {}),
    }
    try:
        first = fields.sampling(limits.vocab_size)
    except ValueError as error:
        raise APIError(str(error), param="logit_bias") from None
    generations = []
    for ids in prompts:
        if (last := max(ids, default=0)) >= limits.vocab_size:
            reason = f"the {name} has token {last}; the model's end at {limits.vocab_size - 1}"
            raise APIError(reason, param=name)
        new_tokens = plan_length(len(ids), fields.requested_tokens(), length, name)
        for _ in range(fields.n):
            sampling = first.with_seed(fields.seed + len(generations))
            generations.append(Generation(ids, new_tokens, sampling, **common))
    return GenerationRequest(fields, generations, calls)


def plan_calls(
    fields: CompletionBody | ChatCompletionBody, tokenizer: Tokenizer, limits: Limits
) -> CallSettings | None:
    """Return how the answer's calls are read. Raises FieldError if tools are not supported."""
    try:
        calls = fields.calls(tokenizer)
        if calls and calls.grammar:
            limits.check_grammar(calls.grammar)
        return calls
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(f"tools: {error}", "tools") from None


def plan_grammar(fields: CompletionBody | ChatCompletionBody, limits: Limits) -> str | None:
    """Return the grammar of a request's answers. Raises APIError if it is not supported."""
    restriction = fields.restriction()
    if restriction is None:
        return None
    try:
        grammar = restriction.make_grammar()
        limits.check_grammar(grammar)
        return grammar
    except ValueError as error:
        param = restriction.field.partition(".")[0]
        raise APIError(f"{restriction.field}: {error}", param=param) from None


def plan_length(prompt_tokens: int, requested: int | None, max_seq_len: int, name: str) -> int:
    """Return the maximum of new tokens, at most those that fit. None requests all of them.

    name: the field of the prompt. Raises APIError for a prompt that leaves no token.
    """
    available = max_seq_len - prompt_tokens
    if available < 1:
        # OpenAI's wording, by which clients recognize the error and shorten the conversation.
        raise APIError(
            f"This model's maximum context length is {max_seq_len} tokens. However, your {name} "
            f"resulted in {prompt_tokens} tokens, and an answer needs at least one. Please reduce "
            f"the length of the {name}.",
            code="context_length_exceeded",
            param=name,
        )
    return min(requested or available, available)


# Answers --------------------------------------------------------------------------------------


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
        """Return the API's finish_reason for that of `generate`. A named tool's is "stop"."""
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
        choice = self.choice(text, event.tokens, reason, event.index)
        if self.body.chat:
            del choice["text"]
            content = None if calls and not text else text
            choice["message"] = {"role": "assistant", "content": content, "refusal": None}
            if reasoning:
                choice["message"]["reasoning_content"] = reasoning
            if calls:
                choice["message"]["tool_calls"] = calls
        return choice

    def start(self) -> Iterator[bytes]:
        """Yield what a stream begins with."""
        for index in range(len(self.request.generations) if self.body.chat else 0):
            delta = {"role": "assistant", "content": ""}
            yield self.event([{"index": index, "delta": delta, "finish_reason": None}])

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
        choice = self.choice("", tokens, reason, event.index)
        if self.body.chat:
            del choice["text"]
            choice["delta"] = {}
        yield self.event([choice])
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
        choice = self.choice("", self.take_tokens(index), None, index)
        del choice["text"]
        choice["delta"] = piece_delta(piece)
        return self.event([choice])

    def take_tokens(self, index: int) -> list[GeneratedToken]:
        return self.tokens.pop(index, [])

    def chunk(self, event: TextDelta) -> bytes:
        """Return the chunk of a stream with new text."""
        choice = self.choice(event.text, event.tokens, None, event.index)
        if self.body.chat:
            del choice["text"]
            key = "reasoning_content" if event.is_reasoning else "content"
            choice["delta"] = {key: event.text} if event.text else {}
        return self.event([choice])

    def event(self, choices: list[dict], usage: dict | None = None) -> bytes:
        """Return a chunk as a server-sent event."""
        kind = "chat.completion.chunk" if self.body.chat else self.object
        chunk = self.header | {"object": kind, "choices": choices}
        if self.body.stream_options.include_usage:
            chunk["usage"] = usage
        return server_sent_event(chunk)

    def choice(
        self, text: str, tokens: list[GeneratedToken], finish_reason: str | None, index: int
    ) -> dict:
        """Return a choice of a text completion. Chats move its `text` to another field."""
        choice = {"index": index, "finish_reason": finish_reason, "logprobs": None, "text": text}
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
