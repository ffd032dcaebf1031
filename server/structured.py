"""Fields of a request that restrict the answers' text: those of OpenAI's API and of other servers.

vLLM, SGLang and llama.cpp have fields of their own. A field that this server knows is honored or
refused: an answer that silently lacks its format breaks the program that asked for it.
"""

import json
import logging
from collections.abc import Callable
from functools import partial
from operator import eq, not_
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from cli.command import printable
from server import constraints

log = logging.getLogger("moe_fast")
MAX_REPORTED = 200  # names of unknown fields that are logged
REPORTED: set[str] = set()


class StrictModel(BaseModel):
    """Base class: strict types; null means the default; unknown fields are ignored.

    `reported_as`: the beginning of the unknown fields' names in the log; None: they are not logged.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    reported_as: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        found = {name: value for name, value in values.items() if value is not None}
        if cls.reported_as is not None:
            aliases = {field.alias for field in cls.model_fields.values()}
            unknown = found.keys() - cls.model_fields.keys() - aliases
            report_unknown([cls.reported_as + name for name in unknown])
        return found


def report_unknown(names: list[str]) -> None:
    """Log fields that are ignored, each name once in the life of this process."""
    new = sorted({printable(name)[:80] for name in names} - REPORTED)
    new = new[: MAX_REPORTED - len(REPORTED)]
    if new:
        REPORTED.update(new)
        log.info("ignored fields of requests (each is listed once): %s", ", ".join(new))


def refuse_unless(is_neutral: Callable[[Any], bool]) -> AfterValidator:
    """Return a validator of an unsupported parameter: it accepts values that change nothing."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if not is_neutral(value):
            raise ValueError(f"{info.field_name} is not supported: leave it out")
        return value

    return AfterValidator(check)


def drop_empty(value: Any) -> Any:
    """Return None for an empty text, which stands for no restriction."""
    return None if value == "" else value


Unsupported = Annotated[Any, refuse_unless(not_)]  # empty and false values are accepted
UnlessOne = Annotated[Any, refuse_unless(partial(eq, 1))]
UnlessMinusOne = Annotated[Any, refuse_unless(partial(eq, -1))]
UnlessTrue = Annotated[Any, refuse_unless(partial(eq, True))]
Text = Annotated[str, AfterValidator(drop_empty)]
Schema = Annotated[dict[str, Any] | str, AfterValidator(drop_empty)]  # str: as JSON
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]


class JsonSchema(StrictModel):
    """A schema that an answer has to follow."""

    model_config = ConfigDict(populate_by_name=True)

    name: str = ""
    strict: bool = False  # refuse keywords that are not supported
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(StrictModel):
    """The format of an answer. The schema stands in `json_schema`, or beside `type` (llama.cpp)."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    plain_schema: dict[str, Any] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def check_schema(self) -> "ResponseFormat":
        schemas = [s for s in (self.json_schema, self.plain_schema) if s is not None]
        if len(schemas) > (self.type != "text") or (self.type == "json_schema" and not schemas):
            raise ValueError(FIELD_MESSAGES["response_format"])
        return self

    def grammar(self) -> str:
        """Return the grammar of the answers, unless `type` is text. Raises ValueError."""
        if self.json_schema:
            return constraints.json_schema(self.json_schema.json_schema, self.json_schema.strict)
        if self.plain_schema is not None:
            return constraints.json_schema(self.plain_schema, strict=False)
        return constraints.json_object()


class StructuredOutputs(StrictModel):
    """vLLM's field."""

    model_config = ConfigDict(extra="forbid")

    json_text: Schema | None = Field(default=None, alias="json")  # pydantic's models have a `json`
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool = False
    structural_tag: Unsupported = None
    whitespace_pattern: Unsupported = None
    disable_any_whitespace: Unsupported = None
    disable_additional_properties: Unsupported = None
    disable_fallback: Any = None  # ignored: it chooses a backend, as others do


class Restriction(NamedTuple):
    """A field that restricts the answers, and how to make its grammar."""

    field: str
    make_grammar: Callable[[], str]  # raises ValueError


def schema_grammar(schema: dict | str) -> str:
    """Return the grammar of a JSON schema, an object or its text. Raises ValueError."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise ValueError("the text is no JSON schema: send the schema as an object") from None
    return constraints.json_schema(schema, strict=False)


MAKERS: dict[str, Callable[[Any], str]] = {
    "json": schema_grammar,
    "regex": constraints.regex,
    "choice": constraints.choice,
    "grammar": constraints.lark_or_gbnf,
}
# Names of other servers' fields -> what they hold. guided_*: vLLM. grammar, json_schema: llama.cpp.
# json_schema, regex, ebnf: SGLang.
FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
KINDS = {
    "json": "a JSON schema, an object",
    "regex": "a regular expression, a string",
    "choice": "a list of one string or more",
    "grammar": "a grammar in Lark or GBNF, a string",
}
FIELD_MESSAGES = {
    "response_format": 'response_format must be {"type": "text"}, {"type": "json_object"}, or '
    '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
    "structured_outputs": "structured_outputs must be an object with one of json, regex, choice, "
    "grammar and json_object",
    **{name: f"{name} must be {KINDS[kind]}" for name, kind in FIELDS.items()},
}


class StructuredFields(StrictModel):
    """The fields that restrict an answer. One of them may be given."""

    response_format: ResponseFormat = ResponseFormat(type="text")
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Unsupported = None
    structured_outputs: StructuredOutputs = StructuredOutputs()
    grammar: Text | None = None
    json_schema: Schema | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    structural_tag: Unsupported = None
    guided_decoding_backend: Any = None  # ignored: it changes no answer

    @model_validator(mode="after")
    def check_restrictions(self) -> "StructuredFields":
        names = [restriction.field for restriction in self.restrictions()]
        if len(names) > 1:
            raise ValueError(f"{names[0]} and {names[1]}: send one of them")
        return self

    def restrictions(self) -> list[Restriction]:
        """Return the fields that are given."""
        found = []
        if self.response_format.type != "text":
            found.append(Restriction("response_format", self.response_format.grammar))
        outputs = self.structured_outputs
        given = [(name, getattr(self, name), kind) for name, kind in FIELDS.items()]
        for kind, attribute in zip(
            MAKERS, ("json_text", "regex", "choice", "grammar"), strict=True
        ):
            given.append((f"structured_outputs.{kind}", getattr(outputs, attribute), kind))
        for name, value, kind in given:
            if value is not None:
                found.append(Restriction(name, partial(MAKERS[kind], value)))
        if outputs.json_object:
            found.append(Restriction("structured_outputs.json_object", constraints.json_object))
        return found

    def restriction(self) -> Restriction | None:
        """Return the field that restricts the answers, if one is given."""
        return next(iter(self.restrictions()), None)


class OtherServersFields(StrictModel):
    """Fields of vLLM, SGLang and llama.cpp that change an answer, and are refused.

    The value by which a field changes nothing is accepted: clients send it on their own.
    """

    # Which tokens are chosen.
    allowed_token_ids: Unsupported = None
    bad_words: Unsupported = None
    custom_logit_processor: Unsupported = None
    dry_multiplier: Unsupported = None
    dynatemp_range: Unsupported = None
    length_penalty: UnlessOne = 1
    logits_processors: Unsupported = None
    mirostat: Unsupported = None
    mirostat_mode: Unsupported = None
    repeat_penalty: UnlessOne = 1
    samplers: Unsupported = None
    tfs_z: UnlessOne = 1
    top_a: Unsupported = None
    top_n_sigma: UnlessMinusOne = -1
    typical_p: UnlessOne = 1
    use_beam_search: Unsupported = None
    xtc_probability: Unsupported = None
    # Where the answer ends.
    ignore_eos: Unsupported = None
    max_new_tokens: Unsupported = None
    min_tokens: Unsupported = None
    n_predict: UnlessMinusOne = -1
    stop_regex: Unsupported = None
    stop_token_ids: Unsupported = None
    # How the prompt is made, and the answer's text.
    add_generation_prompt: UnlessTrue = True
    chat_template: Unsupported = None
    continue_final_message: Unsupported = None
    documents: Unsupported = None
    include_stop_str_in_output: Unsupported = None
    skip_special_tokens: UnlessTrue = True
    truncate_prompt_tokens: Unsupported = None
    # Further parts of the response.
    n_probs: Unsupported = None
    prompt_logprobs: Unsupported = None
    return_token_ids: Unsupported = None
    return_tokens_as_token_ids: Unsupported = None
