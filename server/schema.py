"""The API's request bodies as pydantic models, and the JSON of its answers."""

import json
import math
import secrets
import time
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from runtime.sampling import MAX_CANDIDATES, TOP_LOGPROBS, Sampling
from runtime.session import Details
from tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as in OpenAI's API
MIN_TEMPERATURE = 1e-4  # below it, dividing logits by the temperature would overflow
# Of `generate` -> the API's. The time limit interrupts; None: the stream goes on.
FINISH_REASONS = {"stop": "stop", "length": "length", "interrupted": "length", None: None}


# Errors ---------------------------------------------------------------------------------------


class APIError(Exception):
    """An error response. status: of HTTP. code: for programs, such as "queue_full"."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}

    def body(self) -> dict:
        """Return the JSON object that OpenAI's clients expect."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return {"error": error}


# Messages for structured fields. `error_message` derives those of other fields.
FIELD_MESSAGES = {
    "response_format": 'response_format must be {"type": "text"}: other formats are not supported',
    "stop": "stop must be a string of 1 to 500 characters, or a list of up to 4",
    "messages": 'messages must be a list such as [{"role": "user", "content": "Hello"}], '
    "whose roles and contents are strings",
    "prompt": "there is no prompt: give one string, or a list of token ids (whole numbers)",
}
TYPE_RULES = {
    "bool_type": "true or false",
    "string_type": "a string",
    "model_type": "an object",
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


@cache
def limits_of(model: type[BaseModel], name: str) -> str:
    """Return the range of a numeric field, as text."""
    schema = model.model_json_schema()["properties"][name]
    schema = schema.get("anyOf", [schema])[0]
    kind = "a whole number " if schema["type"] == "integer" else ""
    low, high = whole_to_int(schema["minimum"]), whole_to_int(schema["maximum"])
    if low == high:
        return f"{kind}{low}, since nothing else is supported"
    return f"{kind}from {low} to {high}"


# Requests -------------------------------------------------------------------------------------


def whole_to_int(value: Any) -> Any:
    """Return a whole float as an int: JSON does not distinguish 5 and 5.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def text_to_list(value: Any) -> Any:
    """Return a string as a list with that string."""
    return [value] if isinstance(value, str) else value


def refuse_if_set(value: Any, info: ValidationInfo) -> Any:
    """Raise ValueError for an unsupported parameter. Empty and false values are accepted."""
    if value:
        raise ValueError(f"{info.field_name} is not supported: leave it out")
    return value


def take_single_prompt(prompt: str | list) -> str | list[int]:
    """Unpack a list with one prompt. Raises ValueError for several prompts."""
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return prompt
    if len(prompt) > 1:
        raise ValueError(
            "several prompts in one request are not supported: send a request for each"
        )
    return prompt[0]


Unsupported = Annotated[Any, AfterValidator(refuse_if_set)]
WHOLE = BeforeValidator(whole_to_int)
One = Annotated[int, Field(ge=1, le=1), WHOLE]
TokenLimit = Annotated[int, Field(ge=1, le=2**31), WHOLE]
# One compiled step serves all top_k up to MAX_CANDIDATES; a larger one would compile another.
TopK = Annotated[int, Field(ge=1, le=MAX_CANDIDATES), WHOLE]
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
    AfterValidator(take_single_prompt),
]


class StrictModel(BaseModel):
    """Base class: strict types; null means the default; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(StrictModel):
    include_usage: bool = False


class ResponseFormat(StrictModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class TextPart(StrictModel):
    text: str


def join_parts(content: str | list[TextPart]) -> str:
    """Return a message's content as one string."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Message(StrictModel):
    role: str
    content: Annotated[
        str | Annotated[list[TextPart], FAIL_FAST],
        AfterValidator(join_parts),
    ]


class GenerationBody(StrictModel):
    """The fields of both kinds of request."""

    chat: ClassVar[bool]

    tools: Unsupported = None
    functions: Unsupported = None
    logit_bias: Unsupported = None
    echo: Unsupported = None
    suffix: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None
    response_format: ResponseFormat | None = None
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
    n: One = 1
    best_of: One = 1
    frequency_penalty: float = Field(0.0, ge=0, le=0)
    presence_penalty: float = Field(0.0, ge=0, le=0)
    stop: StopTexts = Field(default_factory=list)
    stream: bool = False
    routing: bool = False

    def sampling(self) -> Sampling:
        """Return the sampling options. A temperature below MIN_TEMPERATURE means greedy."""
        return Sampling(
            temperature=0.0 if self.temperature < MIN_TEMPERATURE else self.temperature,
            top_k=self.top_k,
            top_p=max(self.top_p, 1e-6),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed % 2**63,
        )


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    chat = False

    prompt: Prompt
    max_tokens: TokenLimit = DEFAULT_COMPLETION_TOKENS
    logprobs: LogprobCount | None = None

    def requested_tokens(self) -> int:
        return self.max_tokens

    def logprob_count(self) -> int | None:
        """Return the number of top logprobs per token; None: no logprobs at all."""
        return self.logprobs

    def encode(self, tokenizer: Tokenizer) -> tuple[list[int], bool]:
        """Return the prompt's token ids, and False: the answer continues the prompt."""
        return encode_prompt(self.prompt, tokenizer), False


class ChatCompletionBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    chat = True

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    logprobs: bool = False

    @model_validator(mode="after")
    def check_logprobs(self) -> "ChatCompletionBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    def requested_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def logprob_count(self) -> int | None:
        """Return the number of top logprobs per token; None: no logprobs at all."""
        return self.top_logprobs if self.logprobs else None

    def encode(self, tokenizer: Tokenizer) -> tuple[list[int], bool]:
        """Return the conversation's token ids, and whether the answer is a separate message.

        The answer continues the concatenated contents if there is no chat template.
        """
        messages = [message.model_dump() for message in self.messages]
        if tokenizer.has_chat_template:
            return tokenizer.chat(messages), True
        text = "".join(message["content"] for message in messages)
        return encode_prompt(text, tokenizer), False


def encode_prompt(prompt: str | list[int], tokenizer: Tokenizer) -> list[int]:
    """Return a prompt's token ids. Raises ValueError for an empty prompt and invalid ids."""
    if not prompt:
        raise ValueError(FIELD_MESSAGES["prompt"])
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if min(prompt) < 0 or max(prompt) >= tokenizer.vocab_size:
        last = tokenizer.vocab_size - 1
        raise ValueError(f"token ids must be whole numbers from 0 to {last}")
    return prompt


@dataclass(frozen=True)
class Generation:
    """The part of a request that every rank needs."""

    prompt_ids: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop: list[str]
    reply: bool  # the answer is a separate message, not a continuation of the prompt
    watch: bool  # record the Details of each token


class GenerationRequest(NamedTuple):
    """A validated request."""

    body: CompletionBody | ChatCompletionBody
    generation: Generation


def read_request(
    body: bytes, chat: bool, tokenizer: Tokenizer, max_seq_len: int
) -> GenerationRequest:
    """Parse and validate a request's body. Raises APIError if it is invalid or unsupported."""
    model = ChatCompletionBody if chat else CompletionBody
    try:
        fields = model.model_validate_json(body)
        prompt_ids, reply = fields.encode(tokenizer)
    except ValidationError as error:
        raise APIError(error_message(error, model)) from None
    except ValueError as error:
        raise APIError(str(error)) from None
    generation = Generation(
        prompt_ids=prompt_ids,
        max_new_tokens=plan_length(len(prompt_ids), fields.requested_tokens(), max_seq_len),
        sampling=fields.sampling(),
        stop=fields.stop,
        reply=reply,
        watch=fields.logprob_count() is not None or fields.routing,
    )
    return GenerationRequest(fields, generation)


def plan_length(prompt_tokens: int, requested: int | None, max_seq_len: int) -> int:
    """Return the maximum of new tokens; None requests all that fit. Raises APIError if too long."""
    available = max_seq_len - prompt_tokens
    needed = requested or 1
    if available < needed:
        shorter = f", or max_tokens to {available}" if available > 0 else ""
        raise APIError(
            f"the context is {max_seq_len} tokens, and {prompt_tokens} of the prompt and {needed} "
            f"asked for are {prompt_tokens + needed}: shorten the prompt{shorter}",
            code="context_length_exceeded",
        )
    return requested or available


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


@dataclass(frozen=True)
class Finished:
    """The end of an answer: the result of `generate`, and the tokens not in any TextDelta."""

    result: dict
    tokens: list[GeneratedToken]


Event = TextDelta | Finished | APIError


class ResponseBuilder:
    """Builds the JSON objects of one request's answer."""

    def __init__(self, request: GenerationRequest, model_name: str, tokenizer: Tokenizer):
        self.body, self.tokenizer = request.body, tokenizer
        self.object, prefix = "text_completion", "cmpl"
        if self.body.chat:
            self.object, prefix = "chat.completion", "chatcmpl"
        self.header = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model_name,
        }

    def completion(self, event: Finished) -> dict:
        """Return the answer to a request without `stream`."""
        choice = self.choice(event.result["text"], event.tokens, event.result["finish_reason"])
        if self.body.chat:
            text = choice.pop("text")
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            if reasoning := event.result.get("reasoning"):
                choice["message"]["reasoning_content"] = reasoning
        body = {"choices": [choice], "usage": self.usage(event.result)}
        return self.header | {"object": self.object} | body

    def chunk(
        self,
        text: str,
        tokens: list[GeneratedToken],
        finish_reason: str | None = None,
        *,
        is_reasoning: bool = False,
    ) -> bytes:
        """Return one chunk of a stream; the last one has a finish_reason."""
        choice = self.choice(text, tokens, finish_reason)
        if self.body.chat:
            del choice["text"]
            key = "reasoning_content" if is_reasoning else "content"
            choice["delta"] = {key: text} if text else {}
        return self.event([choice])

    def role_chunk(self) -> bytes:
        """Return the first chunk of a streamed chat."""
        delta = {"role": "assistant", "content": ""}
        return self.event([{"index": 0, "delta": delta, "finish_reason": None}])

    def usage_chunk(self, event: Finished) -> bytes:
        """Return the chunk after the last one, for requests with `include_usage`."""
        return self.event([], self.usage(event.result))

    def event(self, choices: list[dict], usage: dict | None = None) -> bytes:
        """Return a chunk as a server-sent event."""
        kind = "chat.completion.chunk" if self.body.chat else self.object
        chunk = self.header | {"object": kind, "choices": choices}
        if self.body.stream_options.include_usage:
            chunk["usage"] = usage
        return server_sent_event(chunk)

    def choice(self, text: str, tokens: list[GeneratedToken], finish_reason: str | None) -> dict:
        """Return a choice of a text completion. Chats move its `text` to another field."""
        reason = FINISH_REASONS[finish_reason]
        choice = {"index": 0, "finish_reason": reason, "logprobs": None, "text": text}
        if self.body.logprob_count() is not None:
            choice["logprobs"] = self.logprobs(tokens)
        if self.body.routing:
            choice["moe_fast"] = self.routing(tokens)
        return choice

    def logprobs(self, tokens: list[GeneratedToken]) -> dict:
        """Return the tokens' logprobs in the shape of the request's API."""
        content = []
        for token in tokens:
            logprob, top = token.details.logprob, token.details.top[: self.body.logprob_count()]
            entry = self.token_logprob(token.id, logprob)
            entry["top_logprobs"] = [self.token_logprob(*candidate) for candidate in top]
            content.append(entry)
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

    def token_logprob(self, id: int, logprob: float) -> dict:
        """Return one token and its logprob; -9999 stands for -inf, which JSON lacks."""
        data = self.tokenizer.token_bytes(id)
        logprob = logprob if math.isfinite(logprob) else -9999.0
        return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": logprob}

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

    def usage(self, result: dict) -> dict:
        prompt_tokens, new_tokens = result["prompt_tokens"], result["new_tokens"]
        details = {}
        if self.body.chat:
            reasoning = {"reasoning_tokens": result.get("reasoning_tokens", 0)}
            details = {"completion_tokens_details": reasoning}
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
            "prompt_tokens_details": {"cached_tokens": result["cached_tokens"]},
            **details,
        }


def server_sent_event(value: dict) -> bytes:
    """Return JSON as one event of a text/event-stream."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"
