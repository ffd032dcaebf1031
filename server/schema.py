"""The API's request bodies as pydantic models, and the JSON of its answers."""

import re
import secrets
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from runtime.reasoning import ANSWER, REASONING, TextSplitter, make_splitter
from runtime.sampling import MAX_CANDIDATES, TOP_LOGPROBS, Sampling
from server.calls import CallSettings
from server.errors import FIELD_MESSAGES, APIError, error_field, error_message, whole_to_int
from server.fill_in import fill_in_prompt
from server.forced_calls import forced_call
from server.structured import (
    OtherServersFields,
    StrictModel,
    StructuredFields,
    Unsupported,
    refuse_unless,
)
from server.tokenizing import TokenizerPool, vocabulary_of
from tokenizer import Tokenizer
from tool_calls.formats import find_format
from tool_calls.generic import GENERIC, messages_with_tools
from tool_calls.parser import NAME
from tool_calls.reading import template_calls

MAX_ANSWERS = 8  # the largest `n`
MAX_PROMPTS = 64  # a request
MAX_STOPS = 16  # stop texts
# Types of a message's parts -> what they are, in the plural.
UNSUPPORTED_PARTS = {
    "image": "images",
    "audio": "sounds",
    "video": "videos",
    "file": "files",
    "document": "files",
}
# A request cannot set these variables of the template.
OWN_VARIABLES = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
# OpenAI's values of `reasoning_effort` that open models do not know.
REASONING_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as in OpenAI's API
MIN_TEMPERATURE = 1e-4  # below it, dividing logits by the temperature would overflow


def text_to_list(value: Any) -> Any:
    """Return a string as a list with that string."""
    return [value] if isinstance(value, str) else value


def all_to_none(value: Any) -> Any:
    """Return None for -1, by which llama.cpp's clients ask for as many tokens as fit."""
    return None if value == -1 else value


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
TokenCount = Annotated[int, Field(ge=0, le=2**31), WHOLE]
TokenLimit = Annotated[int, Field(ge=1, le=2**31), WHOLE]
TokensOrAll = Annotated[TokenLimit | None, BeforeValidator(all_to_none)]
# One compiled step serves all top_k up to MAX_CANDIDATES; a larger one would compile another.
TopK = Annotated[int, Field(ge=-1, le=MAX_CANDIDATES), WHOLE]
LogprobCount = Annotated[int, Field(ge=0, le=TOP_LOGPROBS), WHOLE]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE]
StopText = Annotated[str, Field(min_length=1, max_length=500)]
StopTexts = Annotated[
    list[StopText], Field(max_length=MAX_STOPS, fail_fast=True), BeforeValidator(text_to_list)
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


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedChoice], FAIL_FAST]


class AllowedChoice(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


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
    """Return a message's content as one string, each part in lines of its own, as in vLLM.

    Raises ValueError for parts that are not text.
    """
    if not isinstance(content, list):
        return content
    return "\n".join(filter(None, map(part_text, content)))


def part_text(part: Any) -> str:
    """Return the text of a part of a message. Raises ValueError if it has none."""
    kind = str(part.get("type", "text")) if isinstance(part, dict) else ""
    for name, plural in UNSUPPORTED_PARTS.items():
        if name in kind:
            raise ValueError(f"messages: {plural} are not supported: send text only")
    text = part.get("refusal" if kind == "refusal" else "text") if kind else None
    if not isinstance(text, str):
        is_known = kind in ("", "refusal") or kind.endswith("text")
        what = f"messages: {kind!r:.40} is not supported: send text only"
        raise ValueError(FIELD_MESSAGES["messages"] if is_known else what)
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
    function_call: Unsupported = None  # before tool_calls

    @property
    def thoughts(self) -> str:
        """The reasoning, under either name."""
        return self.reasoning_content or self.reasoning

    @model_validator(mode="after")
    def check_content(self) -> "Message":
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise ValueError(FIELD_MESSAGES["messages"])
        self.content = self.content or self.refusal
        return self


def template_messages(messages: list[Message], tokenizer: Tokenizer) -> list[dict]:
    """Return messages as a chat template expects them."""
    found = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "developer" and not tokenizer.template_has("developer"):
            fields["role"] = "system"
        if message.thoughts and message.role == "assistant":
            fields["reasoning_content"] = message.thoughts
        if message.tool_calls:
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.template_fields()}
                for call in message.tool_calls
            ]
        if message.role == "tool":
            fields["tool_call_id"] = message.tool_call_id
            if message.name:
                fields["name"] = message.name
        found.append(fields)
    return template_calls(found, find_format(tokenizer) or GENERIC, tokenizer)


class GenerationBody(StructuredFields, OtherServersFields):
    """The fields of both kinds of request."""

    reported_as = ""
    chat: ClassVar[bool]
    prompt_name: ClassVar[str]  # the field that has the prompt

    functions: Unsupported = None
    function_call: Annotated[Any, refuse_unless(("none", "auto").__contains__)] = "auto"
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
    max_tokens: TokensOrAll = None
    max_completion_tokens: TokensOrAll = None
    min_tokens: TokenCount = 0
    top_logprobs: LogprobCount = 0
    n: AnswerCount = 1
    best_of: AnswerCount = 1
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    stop: StopTexts = Field(default_factory=list)
    stream: bool = False
    routing: bool = False

    @model_validator(mode="before")
    @classmethod
    def drop_random_seed(cls, values: Any) -> Any:
        """Leave out a seed of -1, by which clients of llama.cpp and vLLM ask for any seed."""
        if isinstance(values, dict) and values.get("seed") == -1:
            return {name: value for name, value in values.items() if name != "seed"}
        return values

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
        given = self.logit_bias.items()
        bias = {int(id): value for id, value in given if re.fullmatch("[0-9]{1,18}", id)}
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
    max_tokens: TokensOrAll = DEFAULT_COMPLETION_TOKENS
    logprobs: LogprobCount | None = None
    echo: bool = False
    suffix: str = ""
    parse_special: bool = True  # llama.cpp's name; False: control tokens in a prompt are text

    @model_validator(mode="after")
    def check_prompt(self) -> "CompletionBody":
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: a prompt has none")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise ValueError("suffix needs a prompt that is a text")
        return self

    def requested_tokens(self) -> int | None:
        return self.max_tokens

    def logprob_count(self) -> int | None:
        """Return the number of top logprobs per token; None: no logprobs at all."""
        return self.logprobs

    def encode(self, tokenizer: Tokenizer) -> tuple[list[list[int]], bool]:
        """Return each prompt's token ids, and False: the answers continue the prompts."""
        special = self.parse_special
        if self.suffix:
            texts = [str(prompt) for prompt in self.prompt]
            return [fill_in_prompt(text, self.suffix, tokenizer) for text in texts], False
        return [encode_prompt(prompt, tokenizer, special) for prompt in self.prompt], False

    def calls(self, tokenizer: Tokenizer) -> None:
        """Return None: a completion has no tool calls."""

    def continued(self) -> None:
        """Return None: a completion's prompt has no messages."""


class ChatCompletionBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    chat = True

    prompt_name = "messages"

    echo: Unsupported = None
    suffix: Unsupported = None

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], FAIL_FAST] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    logprobs: bool = False
    continue_final_message: bool | None = None  # vLLM's name
    add_generation_prompt: bool = True  # False: continue the assistant's last message, too

    @model_validator(mode="after")
    def leave_out_tools(self) -> "ChatCompletionBody":
        """Leave out the tools that `allowed_tools` does not name; `tool_choice` is its mode."""
        if not isinstance(self.tool_choice, AllowedChoice):
            return self
        choice, names = self.tool_choice.allowed_tools, {tool.function.name for tool in self.tools}
        allowed = {tool.function.name for tool in choice.tools}
        if unknown := sorted(allowed - names):
            raise ValueError(f"tool_choice names {unknown[0]!r:.80}, which is no tool")
        self.tools = [tool for tool in self.tools if tool.function.name in allowed]
        self.tool_choice = choice.mode
        return self

    @model_validator(mode="after")
    def check_continuation(self) -> "ChatCompletionBody":
        last = self.messages[-1]
        if self.continue_final_message:
            if last.role != "assistant" or not (last.content or last.thoughts):
                raise ValueError("continue_final_message needs a last message of the assistant")
            if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
                raise ValueError("continue_final_message needs add_generation_prompt: false")
        if self.continued() and (last.tool_calls or self.is_forced()):
            raise ValueError("a message with tool calls cannot be continued, nor by a forced call")
        return self

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
        return self

    def requested_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def logprob_count(self) -> int | None:
        """Return the number of top logprobs per token; None: no logprobs at all."""
        return self.top_logprobs if self.logprobs else None

    def is_forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice not in ("none", "auto")

    def continued(self) -> str | None:
        """Return what the answer continues, REASONING or ANSWER; None: it is a new message."""
        last, wanted = self.messages[-1], self.continue_final_message
        if wanted is None:
            wanted = not self.add_generation_prompt
        if not wanted or last.role != "assistant" or not (last.content or last.thoughts):
            return None
        return ANSWER if last.content else REASONING

    def encode(self, tokenizer: Tokenizer) -> tuple[list[list[int]], bool]:
        """Return the conversation's token ids, and whether the answer is a separate message.

        The answer continues the concatenated contents if there is no chat template.
        """
        vocabulary = vocabulary_of(tokenizer)
        messages, tools = template_messages(self.messages, vocabulary), self.template_tools()
        # A template may know earlier calls, but not the tools.
        if find_format(vocabulary) is None and (tools or not vocabulary.template_has("tool")):
            messages = messages_with_tools(messages, [tool["function"] for tool in tools])
            tools = []
        reply = tokenizer.has_chat_template
        if reply:
            variables = self.template_variables() | ({"tools": tools} if tools else {})
            ids = tokenizer.chat(messages, **variables)
        else:
            separator = "\n\n" if self.active_tools() else ""
            text = separator.join(message["content"] for message in messages)
            if not text:
                raise ValueError("the messages have no text: give the model some to continue")
            ids = encode_prompt(text + separator * (not self.continued()), tokenizer)
        calls = self.calls(vocabulary)
        if calls and calls.prefix and not self.continued():
            splitter = make_splitter(vocabulary, ids)
            is_open = isinstance(splitter, TextSplitter) and splitter.kind == REASONING
            prefix = (splitter.closing if is_open and reply else "") + calls.prefix
            ids = ids + tokenizer.encode(prefix, bos=False, special=True)
        return [ids], reply

    def template_variables(self) -> dict[str, Any]:
        """Return the chat template's variables beside the messages and the tools."""
        variables = {k: v for k, v in self.chat_template_kwargs.items() if k not in OWN_VARIABLES}
        if self.continued():
            variables["continue_final_message"] = True
        elif not self.add_generation_prompt:
            variables["add_generation_prompt"] = False
        if self.reasoning_effort is not None:
            effort = REASONING_EFFORTS.get(self.reasoning_effort, self.reasoning_effort)
            variables = {"reasoning_effort": effort} | variables
            if self.reasoning_effort == "none":
                variables = {"enable_thinking": False, "thinking": False} | variables
        return variables

    def template_tools(self) -> list[dict]:
        """Return the tools as chat templates expect them."""
        strict = {"function": {"strict"}}
        return [tool.model_dump(exclude=strict) for tool in self.active_tools()]

    def active_tools(self) -> list[Tool]:
        """Return the tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    def calls(self, tokenizer: Tokenizer) -> "CallSettings | None":
        """Return how the answer's tool calls are read; None without tools."""
        if not self.active_tools():
            return None
        messages = [{"tool_calls": message.tool_calls} for message in self.messages]
        format = (find_format(tokenizer) or GENERIC).after(messages)
        schemas = {tool.function.name: tool.function.parameters for tool in self.tools}
        prefix, grammar, choice = "", None, self.tool_choice
        if kind := self.continued():
            prefix = format.resumed(kind)
        elif self.is_forced():
            name = choice.function.name if isinstance(choice, NamedChoice) else None
            prefix = format.prefix(name, tokenizer)
            if markers := format.json_markers(tokenizer) or format.argument_tags():
                strict = {tool.function.name for tool in self.tools if tool.function.strict}
                grammar = forced_call(tokenizer, list(schemas.items()), markers, name, strict)
        is_named = isinstance(choice, NamedChoice)
        single = not self.parallel_tool_calls or is_named
        return CallSettings(format, schemas, prefix, single, grammar, is_named, self.is_forced())


def chat_error(error: ValidationError, names: dict[str, str], messages: dict[str, str]) -> APIError:
    """Return the error of a chat's field as one of an API that has other fields.

    names: fields of a chat -> that API's. messages: by its names, in place of FIELD_MESSAGES.
    """
    field, message = error_field(error) or "", error_message(error, ChatCompletionBody)
    name = names.get(field, field)
    if message == FIELD_MESSAGES.get("messages"):
        message = messages["messages"]
    elif message == FIELD_MESSAGES.get(field):
        message = messages.get(name, message)
    message = re.sub(f"^{field}(?=[ :])", name, message) if field else message
    return APIError(message, param=name or None)


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
    return check_ids(prompt, tokenizer)


def check_ids(ids: list[int], tokenizer: Tokenizer | TokenizerPool) -> list[int]:
    """Return ids. Raises ValueError if one is no token."""
    last = tokenizer.vocab_size - 1
    if ids and not 0 <= min(ids) <= max(ids) <= last:
        raise ValueError(f"token ids must be whole numbers from 0 to {last}")
    return ids
