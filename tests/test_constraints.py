"""Constrained decoding: random walks through grammars, masks, and hostile schemas."""

import json
import random
import re
import time

import jsonschema
import numpy as np
import pytest
import tokenizers
import torch
from test_reasoning import make_tokenizer

from runtime.logit_edits import mask_logits, mask_words
from server import constraints
from server.constraints import AnswerConstraint, Constraint, GrammarTokens
from server.forced_calls import forced_call
from tokenizer import load_tokenizer
from tool_calls.formats import FORMATS, PythonicParser
from tool_calls.parser import CallPiece

STRING, INTEGER = {"type": "string", "maxLength": 8}, {"type": "integer"}


def record(**properties) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = [
    record(name=STRING),
    record(a=INTEGER, b={"type": "boolean"}),
    {"enum": ["red", "green", "blüe"]},
    {"const": {"a": [1, None]}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "integer", "minimum": 3, "maximum": 250},
    {"type": "number", "minimum": 0, "maximum": 1},
    record(point=record(x={"type": "integer", "minimum": 0, "maximum": 9}, y=INTEGER)),
    {"$defs": {"item": record(id=INTEGER)}, "type": "array", "items": {"$ref": "#/$defs/item"},
     "minItems": 1, "maxItems": 3},
    {"$defs": {"n": record(next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})},
     "$ref": "#/$defs/n"},
    {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "null"}, record(é=STRING)]},
    record(文={"enum": ["日本", "中国", "😀"]}),
    {"type": ["string", "null"], "maxLength": 5},
    record(tags={"type": "array", "items": STRING, "maxItems": 2}),
    {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False},
    {"type": "array", "prefixItems": [INTEGER, {"type": "boolean"}], "items": False,
     "minItems": 2},
    {"allOf": [record(a=INTEGER)]},
    {"type": "null"},
]  # fmt: skip


@pytest.fixture(scope="module", params=["tiny-moe", "byte-level"])
def tokens(request, tmp_path_factory):
    if request.param == "tiny-moe":
        loaded = load_tokenizer("checkpoints/tiny-moe")
        return GrammarTokens(loaded, loaded.vocab_size + 37)
    return byte_level(tmp_path_factory.mktemp("byte"))


def byte_level(directory) -> GrammarTokens:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: id for id, c in enumerate([*alphabet, '{"', '":', "true", "tr", '"}'])}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<|end|>", "<|call|>"])
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    loaded = load_tokenizer(directory)
    return GrammarTokens(loaded, loaded.vocab_size + 3)


def allowed(constraint: Constraint | AnswerConstraint) -> list[int]:
    tokens = getattr(constraint, "constraint", constraint).tokens
    row = torch.full((mask_words(tokens.vocab_size),), -1, dtype=torch.int32)
    constraint.mask(row)
    bits = np.unpackbits(row.numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def may_end(constraint: Constraint) -> bool:
    """Whether a stop token is allowed next."""
    return constraint._matcher.is_accepting() or constraint._matcher.is_stopped()


def walk(constraint: Constraint, rng: random.Random, limit: int = 3000) -> str:
    """Return the text of random allowed tokens; end as soon as the grammar may, at odds of half."""
    tokenizer, ids = constraint.tokens.tokenizer, []
    for _ in range(limit):
        choices = allowed(constraint)
        assert choices and max(choices) < tokenizer.vocab_size
        stops = [id for id in choices if id in tokenizer.stop_ids]
        assert bool(stops) == may_end(constraint)
        if stops and (len(stops) == len(choices) or rng.random() < 0.5):
            return b"".join(map(tokenizer.token_bytes, ids)).decode()
        # Quotes and brackets close what random text would leave open for thousands of tokens.
        closing = [id for id in choices if tokenizer.token_bytes(id)[:1] in (b'"', b"}", b"]")]
        ids.append(rng.choice(closing if closing and rng.random() < 0.3 else choices))
        constraint.advance(ids[-1])
    raise AssertionError("the walk did not end")


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_random_walks_satisfy_the_schema(tokens, schema):
    grammar = constraints.json_schema(schema)
    for seed in range(2):
        text = walk(Constraint(tokens, grammar), random.Random(seed))
        jsonschema.validate(json.loads(text), schema)


def test_regex_and_lark_and_tool_calls(tokens):
    pattern = r"[a-c]{2}/\d+\.x"
    text = walk(Constraint(tokens, constraints.regex(pattern)), random.Random(0))
    assert re.fullmatch(pattern, text)
    for pattern in ("a\\\nb", "a\nb", r"a\nb", r"\\n/\/"):  # a new line, escaped or not
        text = walk(Constraint(tokens, constraints.regex(pattern)), random.Random(0))
        assert re.fullmatch(pattern, text)
    text = walk(Constraint(tokens, constraints.lark('start: "yes" | "no"')), random.Random(0))
    assert text in ("yes", "no")
    for text in ("\x7f", 'a\x00"\\\n\u2028\U0001f600'):
        assert walk(Constraint(tokens, constraints.choice([text])), random.Random(0)) == text
    tools = [("add", SCHEMAS[8]), ("stop", None)]
    markers = '", "arguments":', "}\n</tool_call>"
    for name in ("add", None):
        grammar = forced_call(tokens.tokenizer, tools, markers, name)
        text = walk(Constraint(tokens, grammar), random.Random(1)).removesuffix("\n</tool_call>")
        call = json.loads('{"name": "' + ('add", "arguments":' if name else "") + text)
        assert call["name"] == "add" or (not name and call["name"] == "stop")
        schema = SCHEMAS[8] if call["name"] == "add" else {"type": "object"}
        jsonschema.validate(call["arguments"], schema)


PLACE = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "days": {"$ref": "#/$defs/days"},
        "place": record(x={"type": "boolean"}),
    },
    "required": ["days"],
    "$defs": {"days": {"enum": [1, 3]}},
}


@pytest.mark.parametrize("format", [f for f in FORMATS if f.argument_tags()])
@pytest.mark.parametrize("name", ("weather", None))
def test_forced_calls_without_json_have_arguments_of_their_schema(tokens, format, name):
    tools = [("weather", PLACE), ("now", None)]
    tags, prefix = format.argument_tags(), format.prefix(name, tokens.tokenizer)
    grammar = forced_call(tokens.tokenizer, tools, tags, name)
    names = set()
    for seed in range(3):
        text = prefix + walk(Constraint(tokens, grammar), random.Random(seed))
        parser = format({tool: schema or {} for tool, schema in tools}, str, False)
        first, *rest = parser.push(text) + parser.flush(is_cut=False)
        assert all(isinstance(piece, CallPiece) and piece.index == 0 for piece in rest), text
        names.add(first.name)
        arguments = json.loads("".join(piece.arguments for piece in rest))
        jsonschema.validate(arguments, PLACE if first.name == "weather" else {"maxProperties": 0})
    assert names <= {"weather", "now"} and (name is None or names == {"weather"})


@pytest.mark.parametrize("format", [f for f in FORMATS if f.argument_tags()])
def test_texts_of_forced_calls_are_free_up_to_their_end(tokens, format):
    """Texts have no quotes between tags; arguments come in their schema's order."""
    tags, texts = format.argument_tags(), {"city": {"type": "string"}, "note": {}}
    schema = PLACE | {"properties": texts | PLACE["properties"], "required": ["city", "days"]}
    grammar = forced_call(tokens.tokenizer, [("f", schema)], tags, "f")

    def accepts(**arguments) -> bool:
        written = []
        for key, value in arguments.items():
            is_text = tags.is_text and isinstance(value, str)
            value = value if is_text else json.dumps(value)
            written.append(f"{tags.before}{key}{tags.between}{value}{tags.after}")
        return follows(tokens, grammar, tags.separator.join(written) + tags.end)

    assert accepts(city='a "b" </x>\n', days=3)
    assert accepts(city="", note="n", unit="F", days=1, place={"x": True})
    assert not accepts(city="Rom") and not accepts(days=3) and not accepts(days=3, city="Rom")
    assert not accepts(city="Rom", days=2) and not accepts(city="Rom", unit="K", days=1)
    assert not accepts(city="Rom", days=3, place={"x": 5}) and not accepts(city="R", days=3, z=1)


def follows(tokens, grammar: str, text: str) -> bool:
    """Whether a text follows a grammar as a whole."""
    constraint = Constraint(tokens, grammar)
    try:
        for id in tokens.tokenizer.encode(text, bos=False):
            constraint.advance(id)
    except ValueError:
        return False
    return may_end(constraint)


@pytest.mark.parametrize("format", [f for f in FORMATS if f.argument_tags()])
def test_values_of_forced_calls_may_be_pythons(tokens, format):
    """Templates of Qwen3-Coder and LFM2 write values so."""
    optional = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
    kinds = {"a": {"type": "boolean"}, "b": optional, "c": {"type": "integer"}}
    tags, schema = format.argument_tags(), {"type": "object", "properties": kinds}
    grammar = forced_call(tokens.tokenizer, [("f", schema)], tags, "f")

    def accepts(key: str, value: str) -> bool:
        text = f"{tags.before}{key}{tags.between}{value}{tags.after}{tags.end}"
        return follows(tokens, grammar, text)

    booleans = {"True", "False", "true", "false"}
    right = {"a": booleans, "b": booleans | {"None", "null"}, "c": {"5"}}
    for key, values in right.items():
        assert {value for value in right["b"] | right["c"] if accepts(key, value)} == values


@pytest.mark.parametrize(
    ("value", "is_right"),
    (
        ("'Rom'", True),
        ('"Rom"', True),
        ("'It's \"x\", \\'y\\', {1}\n'", True),
        ("''", True),
        ("Rom", False),
        ("'Rom", False),
        ("5", False),
    ),
)
def test_texts_of_forced_python_calls_have_any_quotes(tokens, value, is_right):
    text, unit = {"type": "string"}, {"enum": ["C", "F"]}
    schema = {"type": "object", "properties": {"city": text, "unit": unit}, "required": ["unit"]}
    tags = PythonicParser.argument_tags()
    grammar = forced_call(tokens.tokenizer, [("f", schema)], tags, "f")
    call = f"city={value}, unit='F'{tags.end}"
    assert follows(tokens, grammar, call) == is_right
    assert not follows(tokens, grammar, call.replace("'F'", "'K'"))
    if is_right:
        parser = PythonicParser({"f": schema}, str, False)
        pieces = parser.push(f"{PythonicParser.prefix('f', tokens.tokenizer)}{call}")
        found = json.loads("".join(p.arguments for p in pieces + parser.flush(is_cut=False)))
        assert found == {"city": value[1:-1].replace("\\'", "'"), "unit": "F"}


def test_mask_equals_trying_each_token(tmp_path):
    tokens = byte_level(tmp_path)
    grammar = constraints.json_schema(SCHEMAS[1])
    prefix = [tokens.tokenizer.token_id(c) for c in ['{"', "a", '":']]
    for length in range(len(prefix) + 1):
        accepted = []
        for id in range(tokens.vocab_size):
            constraint = Constraint(tokens, grammar)
            for token in prefix[:length]:
                constraint.advance(token)
            try:
                constraint.advance(id)
                accepted.append(id)
            except ValueError:
                pass
        constraint = Constraint(tokens, grammar)
        for token in prefix[:length]:
            constraint.advance(token)
        assert allowed(constraint) == accepted


def test_control_token_markers_and_a_late_start(tmp_path):
    tokens = byte_level(tmp_path)
    markers = "<|call|>", ""
    grammar = forced_call(tokens.tokenizer, [("tr", None)], markers, None)
    constraint = Constraint(tokens, grammar, started=False)
    constraint.advance(5)
    assert len(allowed(constraint)) == 32 * mask_words(tokens.vocab_size)
    constraint.started = True
    for token in ("t", "r"):
        id = tokens.tokenizer.token_id(token)
        assert id in allowed(constraint)
        constraint.advance(id)
    assert allowed(constraint) == [tokens.tokenizer.token_id("<|call|>")]


HARMONY = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
GEMMA = "<|channel>", "<channel|>"
THINK = "<think>", "</think>"


@pytest.mark.parametrize(
    ("markers", "prompt", "reasoning", "answers"),
    [
        (THINK, "?", "<think>so 1</think>", True),
        (THINK, "?<think>", "so 1</think>", False),
        (THINK, "?<think></think>", "", True),
        (GEMMA, "?", "<|channel>thought\nso 1<channel|>", True),
        (GEMMA, "?<|channel>thought\n", "so 1<channel|>", False),
        (GEMMA, "?<|channel>thought\n<channel|>", "", True),
        (HARMONY, "<|start|>assistant", "<|channel|>analysis<|message|>so 1<|end|><|start|>"
         "assistant<|channel|>final<|message|>", True),
        (HARMONY, "<|start|>assistant<|channel|>", "final<|message|>", False),
    ],
)  # fmt: skip
def test_the_grammar_begins_after_the_reasoning(tmp_path, markers, prompt, reasoning, answers):
    """The first token decides whether there is reasoning, if the prompt has not opened it."""
    tokenizer = make_tokenizer(tmp_path, markers, special=True)
    tokens = GrammarTokens(tokenizer, tokenizer.vocab_size)
    grammar = constraints.json_schema({"enum": [True, 7]})
    ids = tokenizer.encode(prompt, special=True)
    first = {tokenizer.encode(letter)[0] for letter in "t7"}

    def begin() -> AnswerConstraint:
        return AnswerConstraint(Constraint(tokens, grammar, started=False), tokenizer, ids)

    constraint = begin()
    opener = {tokenizer.encode(reasoning, special=True)[0]} if answers and reasoning else set()
    assert not answers or set(allowed(constraint)) == first | opener
    for id in tokenizer.encode(reasoning, special=True):
        assert id in allowed(constraint)
        constraint.advance(id)
    assert set(allowed(constraint)) == first
    for after in (constraint, begin()) if answers else (constraint,):
        for id in tokenizer.encode("true"):
            assert id in allowed(after)
            after.advance(id)
        assert set(allowed(after)) == set(tokenizer.stop_ids)


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "make",
    [
        lambda: constraints.json_schema(nested(100_000)),
        lambda: constraints.json_schema({"enum": [f"item {n}" for n in range(200_000)]}),
        lambda: constraints.json_schema({"type": "nonsense"}),
        lambda: constraints.json_schema({"$ref": "https://example.com/schema"}),
        lambda: constraints.json_schema([]),
        lambda: constraints.regex("(" * 100_000),
        lambda: constraints.lark("start: missing"),
        lambda: forced_call(None, [], ("", ""), None),
    ],
)
def test_hostile_grammars_are_refused_quickly(tokens, make):
    began = time.monotonic()
    with pytest.raises(ValueError) as caught:
        allowed(Constraint(tokens, make()))
    assert time.monotonic() - began < 5
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


LOOK_AHEAD = {"type": "string", "pattern": r"^(?!\.)[a-z]+$"}
UNSUPPORTED = (
    record(a=INTEGER, b=LOOK_AHEAD),
    record(a=INTEGER, b={"type": "string", "pattern": r"(x)\1"}),
    record(a=INTEGER, b={"type": "string", "pattern": "["}),
    record(a=INTEGER, b={"$ref": "#/$defs/missing"}),
    record(a=INTEGER, b={"$ref": "https://example.com/schema"}),
    record(a=INTEGER, b={"anyOf": [LOOK_AHEAD, {"type": "null"}]}),
    record(a=INTEGER, b={"type": "object", "patternProperties": {"^(?=x)": LOOK_AHEAD}}),
    record(a=INTEGER, pattern=LOOK_AHEAD) | {"examples": [{"$ref": "#/none"}]},
    # Types, nulls and values that JSON Schema lacks, as servers of tools write them.
    record(a=INTEGER, b={"type": "str", "description": None}),
    record(a={"type": "int"}, b={"type": "any"}, c={"type": ["String", "file"]}),
    record(a=INTEGER, b={"type": "object", "properties": None, "required": None}),
    record(a=INTEGER, b={"type": "array", "items": None}, c={"type": None}),
    record(a=INTEGER, b={"type": "string", "minLength": "5", "enum": []}),
    record(a=INTEGER, b={"type": "integer", "minimum": None, "maximum": "9"}),
    record(a=INTEGER, b={"type": "string", "required": True}) | {"$schema": "x"},
    record(a=INTEGER) | {"additionalProperties": None, "title": None},
)


@pytest.mark.parametrize("schema", UNSUPPORTED, ids=range(len(UNSUPPORTED)))
def test_unsupported_parts_of_a_schema_are_ignored_unless_it_is_strict(tokens, schema):
    """The rest still holds. With a tool, only one that is strict and forced is refused."""
    text = walk(Constraint(tokens, constraints.json_schema(schema, strict=False)), random.Random(0))
    assert isinstance(json.loads(text)["a"], int)
    with pytest.raises(ValueError, match="not supported") as caught:
        Constraint(tokens, constraints.json_schema(schema))
    assert "{" not in str(caught.value)
    tools = [("stop", None), ("mail", schema)]
    for name, strict in (("mail", ()), (None, {"mail"}), ("stop", {"mail"})):
        grammar = forced_call(tokens.tokenizer, tools, ("", ""), name, strict)
        Constraint(tokens, grammar)
    with pytest.raises(constraints.FieldError, match="not supported") as refused:
        forced_call(tokens.tokenizer, tools, ("", ""), "mail", {"mail"})
    assert refused.value.param == "tools[1].function.parameters"
    assert "start:" not in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    (
        {"properties": {"a": INTEGER}, "required": ["a"]},
        {"description": "no type"},
        {"$ref": "#/$defs/A", "$defs": {"A": record(a=INTEGER)}},
        {"anyOf": [record(a=INTEGER), {"type": "null"}]},
        {"type": ["object", "null"]},
        {"type": "dict", "properties": {"a": {"type": "int"}}, "required": ["a"]},
    ),
    ids=range(6),
)
def test_arguments_are_an_object_whatever_their_schema_leaves_out(tokens, schema):
    for seed in range(3):
        grammar = forced_call(tokens.tokenizer, [("f", schema)], ("", ""), "f")
        found = json.loads(walk(Constraint(tokens, grammar), random.Random(seed)))
        assert isinstance(found, dict) and isinstance(found.get("a", 0), int)


def test_a_tool_with_an_invalid_schema_takes_any_object(tokens):
    for schema in ({"type": "nonsense"}, {"properties": 5}, nested(100)):
        grammar = forced_call(tokens.tokenizer, [("f", schema)], ("", ""), "f")
        text = walk(Constraint(tokens, grammar), random.Random(0))
        assert isinstance(json.loads(text), dict)
        for tags in filter(None, (format.argument_tags() for format in FORMATS)):
            Constraint(tokens, forced_call(tokens.tokenizer, [("f", schema)], tags, "f"))


@pytest.mark.parametrize(
    "pattern", ["(((a{1,1000}){1,1000}){1,1000}){1,1000}", "(a+)+b", "(.*a){40}", "(a|aa)*c"]
)
def test_a_costly_regex_takes_bounded_time(tokens, pattern):
    """It may be served, since llguidance is lazy, or refused."""
    began = time.monotonic()
    try:
        constraint, rng = Constraint(tokens, constraints.regex(pattern)), random.Random(0)
        for _ in range(20):
            stops = tokens.tokenizer.stop_ids
            choices = [id for id in allowed(constraint) if id not in stops]
            if not choices:
                break
            constraint.advance(rng.choice(choices))
    except ValueError as error:
        assert "\n" not in str(error)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("vocab_size", [1, 32, 100])
def test_mask_logits_equals_numpy(vocab_size):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, vocab_size, generator=generator)
    shape = (3, mask_words(vocab_size))
    packed = torch.randint(-(2**31), 2**31, shape, generator=generator).int()
    bits = np.unpackbits(packed.numpy().view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    expected = np.where(bits == 1, logits.numpy(), -np.inf)
    assert np.array_equal(mask_logits(logits, packed).numpy(), expected)
