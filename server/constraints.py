"""Constrained decoding: llguidance computes on the host which tokens a grammar allows next.

The host fills a row of the mask while the GPU runs the step. `runtime.logit_edits` describes the
bits, and applies the mask on the device.
"""

import json
import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from torch import Tensor

from runtime.logit_edits import ALL, mask_words
from runtime.reasoning import ANSWER, make_splitter
from tokenizer import Tokenizer
from tool_calls.arguments import KINDS, OTHER_NAMES, find_pointer

MAX_DEPTH = 64  # of nested JSON or brackets: llguidance recurses on the native stack
MAX_GRAMMAR_BYTES = 256 << 10
MAX_COMPILED = 32  # grammars kept
MAX_WHITESPACE = 20  # characters between JSON tokens: a model might write white space for ever
# Fuel bounds time: about 50k a ms for a grammar, 14k a ms for a step.
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
NAMED_SCHEMAS = {"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"}
PLAIN_VALUES = {"enum", "const", "default", "examples"}
CONTROL_NAME = re.compile(r"(<\|[^|<>]+\|>|</?[^<>\s]+>|\[/?[A-Z_]+\])")


class GrammarTokens:
    """A tokenizer as llguidance reads it, and the grammars compiled for it; one per model.

    tokenizer: a `tokenizer.Tokenizer`. vocab_size: rows of the model's embedding. Rows beyond the
    tokenizer's ids have no bytes, so no grammar allows them. Raises
    ValueError if the checkpoint names no end token.
    """

    def __init__(self, tokenizer, vocab_size: int):
        if not tokenizer.stop_ids:
            fix = "add eos_token_id to generation_config.json"
            raise ValueError(f"this checkpoint has no end token, which a grammar needs; {fix}")
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.library = LLTokenizer(
            _Vocabulary(tokenizer, vocab_size),
            n_vocab=vocab_size,
            eos_token=list(tokenizer.stop_ids),
        )
        self.compiled: dict[str, LLMatcher] = {}  # latest last
        self.lock = threading.Lock()

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a new matcher of a grammar. Raises ValueError if it is invalid or too large."""
        with self.lock:
            known = self.compiled.pop(grammar, None)
            if known is None:
                limits = LLParserLimits(**LIMITS)
                known = LLMatcher(self.library, grammar, log_level=0, limits=limits)
                raise_error(known, "the schema or grammar is not supported")
                known.compute_bitmask()  # the first step's; copies have what it computed
                raise_error(known, "the schema or grammar allows no text, or is too complex")
            self.compiled[grammar] = known
            if len(self.compiled) > MAX_COMPILED:
                del self.compiled[next(iter(self.compiled))]
            return known.deep_copy()


@lru_cache(maxsize=2)  # a tokenizer's bytes take up to a second
def grammar_tokens(tokenizer: Tokenizer, vocab_size: int) -> GrammarTokens:
    """Return the GrammarTokens of a model, made at the first call."""
    return GrammarTokens(tokenizer, vocab_size)


class FieldError(ValueError):
    """A mistake in a request. param: its field, such as tools[3].function.parameters."""

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


def raise_error(matcher: LLMatcher, cause: str) -> None:
    """Raise ValueError if a matcher has failed."""
    if matcher.is_error():
        raise ValueError(f"{cause} ({error_detail(matcher.get_error())}); simplify it")


def error_detail(text: str) -> str:
    """Return llguidance's error in one line, without the grammar that it quotes."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*(?:\d+ *\||\^)", line)]
    detail = " ".join(" ".join(lines).split())
    detail = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", detail)
    return re.sub(r"regex parse error: .*error: ", "regex: ", detail)[:200]


class _Vocabulary:
    """The attributes that LLTokenizer reads from a Python tokenizer."""

    def __init__(self, tokenizer, vocab_size: int):
        self.eos_token_id = tokenizer.stop_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        size = min(tokenizer.vocab_size, vocab_size)
        # A control token has no text: a grammar names it by its id, and text never matches it.
        self.special_token_ids = [id for id in range(size) if not self.tokens[id]]
        for id in self.special_token_ids:
            self.tokens[id] = f"<|control {id}|>".encode()
        self.is_tokenizer_wrapper = True
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._encode(text, bos=False)


class Constraint:
    """Follows one sequence through a grammar.

    grammar: from `json_object`, `json_schema`, `regex`, `lark` or `forced_calls`. started:
    False allows every token until it is set, for models that reason before they answer. Raises
    ValueError, one line, if the grammar is invalid or exceeds LIMITS.
    """

    def __init__(self, tokens: GrammarTokens, grammar: str, started: bool = True):
        self.tokens, self.started = tokens, started
        self._matcher = tokens.matcher(grammar)

    def mask(self, row: Tensor) -> None:
        """Write the allowed next tokens to `row`, contiguous int32 [W] in host memory.

        Raises ValueError if the step exceeds LIMITS.
        """
        words = mask_words(self.tokens.vocab_size)
        is_valid = row.shape == (words,) and row.dtype == torch.int32 and row.is_contiguous()
        assert is_valid and row.device.type == "cpu"
        if not self.started:
            row.fill_(ALL)
            return
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), 4 * words)
        raise_error(self._matcher, "the grammar is too complex")

    def advance(self, token: int) -> None:
        """Continue after `token`. Raises ValueError if the grammar does not allow it."""
        if self.started:
            self._matcher.consume_token(token)
            raise_error(self._matcher, f"the grammar does not allow token {token}")


class AnswerConstraint:
    """A Constraint that begins where a chat's answer begins, after its reasoning block.

    prompt: its token ids, which may open the block. Otherwise the first token decides: it opens the
    block, or is the grammar's first. continues: as in `make_splitter`.
    """

    def __init__(
        self,
        constraint: Constraint,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        continues: str | None = None,
    ):
        self.constraint, self.pieces = constraint, tokenizer.stream()
        self.splitter = make_splitter(tokenizer, prompt, continues)
        self.answers = False  # the grammar's first token has come, or has to come next
        self.update()

    def update(self) -> None:
        """Start the grammar if the next token may be its first one; else every token is allowed."""
        self.answers = self.splitter is None or self.splitter.kind == ANSWER
        self.constraint.started = self.answers or self.splitter.may_answer

    def mask(self, row: Tensor) -> None:
        self.constraint.mask(row)
        if not self.answers and (opener := self.splitter.opener) is not None:
            word, bit = divmod(opener, 32)
            row[word] |= 1 << bit if bit < 31 else -(1 << 31)

    def advance(self, token: int) -> None:
        if self.answers:
            self.constraint.advance(token)
        elif self.constraint.started and token != self.splitter.opener:
            self.answers = True
            self.constraint.advance(token)
        else:
            self.splitter.push(token, self.pieces.push(token))
            self.update()


def json_object() -> str:
    """Return the grammar of any JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: dict | bool, strict: bool = True) -> str:
    """Return the grammar of JSON that a schema accepts.

    strict: False ignores keywords that llguidance does not know, patterns that it does not support
    and references that lead nowhere; True raises ValueError for them.
    """
    return json.dumps({"grammars": [{"json_schema": _checked_schema(schema, strict)}]})


def regex(pattern: str) -> str:
    """Return the grammar of texts that match a regular expression as a whole. No backreferences."""
    _check_text(pattern)
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{_escape_slashes(pattern)}/"}]})


def lark(grammar: str) -> str:
    """Return the grammar written in llguidance's variant of Lark."""
    _check_text(grammar)
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})


def choice(texts: Sequence[str]) -> str:
    """Return the grammar of some texts. Raises ValueError."""
    return lark(f"start: {' | '.join(map(lark_text, texts))}")


def lark_text(text: str) -> str:
    """Return a text as a literal of Lark: JSON's, which also has DEL as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def lark_or_gbnf(grammar: str) -> str:
    """Return the grammar of a text in Lark or in llama.cpp's GBNF. Raises ValueError."""
    _check_text(grammar)
    try:
        return lark(any_to_lark(grammar))
    except (Exception, RecursionError) as error:  # the library's parser raises bare Exceptions
        detail = " ".join(str(error).split())[:200]
        raise ValueError(f"it is neither Lark nor GBNF ({detail})") from None


def answer_or_calls(
    tokenizer: Tokenizer, answer: str, openers: Sequence[str], tokens: Sequence[str]
) -> str:
    """Return the grammar of either an answer or tool calls; the calls follow no grammar.

    answer: its grammar. openers: markers, one of which begins the calls. tokens: markers within the
    calls that may be control tokens.
    """
    begin = " | ".join(marker(tokenizer, opener) for opener in openers)
    control = [symbol for name in tokens if (symbol := marker(tokenizer, name))[0] == "<"]
    rest = " | ".join(["TEXT", *control])
    # No space before a call: an answer could begin with it, and then become a call.
    calls = f"start: @answer | ({begin}) ({rest})*\nTEXT: /(.|\\n)+/\n"
    (grammar,) = json.loads(answer)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": calls}, {"name": "answer", **grammar}]})


def arguments_schema(schema: Any, number: int, strict: bool, other: dict | None = None) -> dict:
    """Return the schema of a tool's arguments, or `other` (any object) if it is not supported.

    Raises FieldError instead if `strict`.
    """
    try:
        checked = _checked_schema(schema, strict)
        error = _schema_error(json.dumps(checked))
    except ValueError as refused:
        error = str(refused)
    if not error:
        return checked
    if strict:
        param = f"tools[{number}].function.parameters"
        raise FieldError(f"{param}: the schema is not supported ({error}); simplify it", param)
    return _checked_schema(OBJECT if other is None else other, strict=False)


@lru_cache(maxsize=64)
def _schema_error(schema: str) -> str:
    """Return why llguidance does not support a schema, as JSON; "" if it does."""
    grammar = f'{{"grammars": [{{"json_schema": {schema}}}]}}'
    return error_detail(LLMatcher.validate_grammar(grammar))


OBJECT = {"type": "object"}


def marker(tokenizer, text: str, is_lenient: bool = False) -> str:
    """Return a marker as Lark: texts, and control tokens by id.

    is_lenient: new lines may be missing.
    """
    if is_lenient:
        parts = re.split("(\n)", text)
        return " ".join('"\\n"?' if part == "\n" else marker(tokenizer, part) for part in parts)
    symbols = []
    for part in filter(None, CONTROL_NAME.split(text)):
        id = tokenizer.token_id(part)
        is_control = id is not None and not tokenizer.token_bytes(id)
        symbols.append(f"<[{id}]>" if is_control else lark_text(part))
    return " ".join(symbols)


def _checked_schema(schema: dict | bool, strict: bool) -> dict:
    if not isinstance(schema, dict | bool):
        raise ValueError('a JSON schema must be an object; give one such as {"type": "object"}')
    _check_depth(schema)
    schema = dict(schema) if isinstance(schema, dict) else ({} if schema else {"not": {}})
    check_size(json.dumps(schema), "the schema is")
    if not strict and _schema_error(json.dumps(schema)):
        schema = _relaxed(schema, schema)
    schema["x-guidance"] = {
        "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}",
        "lenient": not strict,
    }
    return schema


def _relaxed(schema: Any, root: dict) -> Any:
    """Return a schema without what llguidance refuses: patterns, references that lead nowhere,
    nulls and other values that a keyword does not have, and names of types that JSON lacks. The
    root's type stays: without it the answer would have no format.
    """
    if isinstance(schema, list):
        return [_relaxed(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for keyword, value in schema.items():
        if keyword in NAMED_SCHEMAS:
            is_pattern = keyword == "patternProperties"
            named = value.items() if isinstance(value, dict) else ()
            found[keyword] = {
                name: _relaxed(part, root)
                for name, part in named
                if isinstance(part, dict | bool) and (not is_pattern or _is_pattern(name))
            }
        elif keyword == "type":
            known = _known_types(value)
            found |= {"type": value} if schema is root and not known else known
        elif keyword == "$ref":
            if find_pointer(root, str(value), None) is not None:
                found[keyword] = value
        elif keyword == "pattern":
            if _is_pattern(value):
                found[keyword] = value
        elif keyword not in PLAIN_VALUES and _holds_schemas(value):
            found[keyword] = _relaxed(value, root)
        elif not _schema_error(json.dumps({keyword: value})):
            found[keyword] = value
    return found


def _known_types(names: Any) -> dict:
    """Return the keyword `type` with JSON's names; none if one of them may be any type."""
    names = names if isinstance(names, list) else [names]
    lowered = [name.lower() for name in names if isinstance(name, str)]
    known = [OTHER_NAMES.get(name, name) for name in lowered]
    return {"type": known} if known and {name for name, _ in KINDS}.issuperset(known) else {}


def _holds_schemas(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(part, dict) for part in value)
    )


def _is_pattern(text: Any) -> bool:
    schema = {"type": "string", "pattern": text}
    return isinstance(text, str) and not _schema_error(json.dumps(schema))


def check_size(text: str, subject: str) -> None:
    if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"{subject} over {MAX_GRAMMAR_BYTES >> 10} KiB; shorten it")


def _check_depth(value) -> None:
    """Raise ValueError for JSON nested deeper than MAX_DEPTH, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise ValueError(f"the schema is nested deeper than {MAX_DEPTH} levels; flatten it")


def _check_text(text: str) -> None:
    check_size(text, "the grammar is")
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth > 2 * MAX_DEPTH:
            raise ValueError(f"the grammar has over {2 * MAX_DEPTH} open brackets; flatten it")


def _escape_slashes(pattern: str) -> str:
    """Return a pattern that can stand between slashes on one line."""
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"\\.|[/\n]", lambda found: escapes.get(found[0], found[0]), pattern, flags=re.S)
