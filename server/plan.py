"""Plans the answers that the decoder generates for a request."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from chat_template import whole_characters
from runtime.sampling import Sampling
from server.calls import CallSettings
from server.constraints import FieldError
from server.errors import APIError, ContextLengthError, error_field, error_message
from server.schema import ChatCompletionBody, CompletionBody
from server.tokenizing import (
    PromptTooLongError,
    TokenizerPool,
    TokenizerUnavailableError,
    vocabulary_of,
)
from tokenizer import Tokenizer

BodyType = TypeVar("BodyType", bound=BaseModel)


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
    continues: str | None = None  # the part that the prompt ends inside of: TextSettings
    reasons: bool = True  # with `reply`: the grammar begins after the reasoning block, if any
    min_tokens: int = 0  # among these no end token is chosen
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
        with suppress(UnicodeDecodeError):
            whole = whole_characters(text := body.decode())
            if whole != text:
                return parse_body(model, whole.encode())
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
    with prompt_errors(name, length):
        prompts, reply = fields.encode(tokenizer)
        calls = plan_calls(fields, vocabulary, limits)
    common: dict[str, Any] = {
        "stop": fields.stop + (calls.stop(vocabulary) if calls else []),
        "reply": reply,
        "continues": fields.continued() if reply else None,
        "watch": fields.logprob_count() is not None or fields.routing,
        "grammar": plan_grammar(fields, limits, calls, vocabulary),
        "min_tokens": fields.min_tokens,
        "seeded": "seed" in fields.model_fields_set,
        **(calls.generation_fields(vocabulary) if calls else {}),
    }
    try:
        first = fields.sampling(limits.vocab_size)
    except ValueError as error:
        raise APIError(str(error), param="logit_bias") from None
    generations = []
    for ids in prompts:
        if not ids:  # a template may leave all messages out, a tokenizer all characters
            raise APIError(f"the {name} resulted in no tokens: give other text", param=name)
        if (last := max(ids, default=0)) >= limits.vocab_size:
            reason = f"the {name} has token {last}; the model's end at {limits.vocab_size - 1}"
            raise APIError(reason, param=name)
        new_tokens = plan_length(len(ids), fields.requested_tokens(), length, name)
        for _ in range(fields.n):
            sampling = first.with_seed(fields.seed + len(generations))
            generations.append(Generation(ids, new_tokens, sampling, **common))
    return GenerationRequest(fields, generations, calls)


@contextmanager
def prompt_errors(name: str | None, length: int) -> Iterator[None]:
    """Within, errors of encoding a prompt are raised as APIError.

    name: of the field that has the prompt. length: of the context.
    """
    try:
        yield
    except ValidationError:  # a ValueError, whose text has several lines
        raise
    except TokenizerUnavailableError as error:
        raise APIError(str(error), 503) from None
    except PromptTooLongError as error:
        reason = f"This model's maximum context length is {length} tokens. However, {error}"
        raise ContextLengthError(reason, name, None, length) from None
    except FieldError as error:
        raise APIError(str(error), param=error.param) from None
    except ValueError as error:
        raise APIError(str(error), param=name) from None


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


def plan_grammar(
    fields: CompletionBody | ChatCompletionBody,
    limits: Limits,
    calls: CallSettings | None,
    tokenizer: Tokenizer,
) -> str | None:
    """Return the grammar of a request's answers. Raises APIError if it is not supported.

    With tools an answer may be calls instead; a forced call has a grammar of its own, or none.
    """
    restriction = fields.restriction()
    if restriction is None or (calls and calls.is_forced):
        return None
    try:
        grammar = restriction.make_grammar()
        if calls:
            grammar = calls.beside(grammar, tokenizer)
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
        raise ContextLengthError(
            f"This model's maximum context length is {max_seq_len} tokens. However, your {name} "
            f"resulted in {prompt_tokens} tokens, and an answer needs at least one. Please reduce "
            f"the length of the {name}.",
            name,
            prompt_tokens,
            max_seq_len,
        )
    return min(requested or available, available)
