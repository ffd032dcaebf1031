"""Tool calls: their formats, the incremental parsers, and the prompts that force a call.

The published chat templates are not here. Those of the tests are short, and follow the documented
layouts of the families: the parsers and the rendering depend on the layouts alone.
"""

import json
import random
import re

import pytest

from tool_calls.arguments import Schema, find_pointer, typed_value
from tool_calls.formats import (
    FORMATS,
    GemmaParser,
    GlmParser,
    GraniteParser,
    HarmonyParser,
    HermesParser,
    KimiParser,
    MiniMaxParser,
    MistralParser,
    PythonicParser,
    QwenCoderParser,
)
from tool_calls.lenient_json import Repair, parse_json
from tool_calls.parser import JSON_HEAD, MARK, CallPiece, TextPiece

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "place": {"type": "object"},
        "zip": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    },
}
SCHEMAS = {"weather": WEATHER, "now": {"type": "object", "properties": {}}}
CITY = {"city": 'Zürich "ZH" {x', "days": 3, "place": {"a": [1, {"b": None}]}}
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(CITY)}}}\n</tool_call>'
HERMES_NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CODER = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nZürich "ZH" {x\n</parameter>\n'
    "<parameter=days>\n3\n</parameter>\n"
    '<parameter=place>\n{"a": [1, {"b": null}]}\n</parameter>\n</function>\n</tool_call>'
)
CODER_NOW = "<function=now>\n</function>"
GLM = (
    '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich "ZH" {x</arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    '<arg_key>place</arg_key><arg_value>{"a": [1, {"b": null}]}</arg_value></tool_call>'
)
GLM_NOW = "<tool_call>now</tool_call>"
MISTRAL = f'[{{"name": "weather", "arguments": {json.dumps(CITY)}, "id": "abcdefghi"}}, '
MISTRAL_NEW = f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{json.dumps(CITY)}"
GEMMA = (
    '<|tool_call>call:weather{city:<|"|>Zürich "ZH" {x<|"|>,days:3,place:{a:[1,{b:null}]}}'
    "<tool_call|>"
)
GEMMA_NOW = "<|tool_call>call:now{}<tool_call|>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="weather">\n'
    '<parameter name="city">Zürich "ZH" {x</parameter>\n<parameter name="days">3</parameter>\n'
    '<parameter name="place">{"a": [1, {"b": null}]}</parameter>\n</invoke>\n'
)
MINIMAX_NOW = '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
KIMI_ARGUMENT = "<|tool_call_argument_begin|>"
KIMI = (
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0{KIMI_ARGUMENT}"
    f"{json.dumps(CITY)}<|tool_call_end|>"
)
KIMI_NOW = (
    f"<|tool_call_begin|>functions.now:1{KIMI_ARGUMENT}{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
PYTHONIC = (
    """<|tool_call_start|>[weather(city='Zürich "ZH" {x', days=3, place={'a': [1, {"b": None}]})"""
)
HARMONY = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.weather <|constrain|>json<|message|>{json.dumps(CITY)}"
)
HARMONY_NOW = (
    "<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
)


def marked(format, text: str) -> str:
    """Replace the format's markers by those of control tokens."""
    for name in format.tokens:
        text = text.replace(name, MARK + name)
    return text


def parse(format, pieces: list[str], marker=lambda name: name, **options):
    """Return the answer's text, its reasoning, and its calls as [name, arguments]."""
    parser = format(SCHEMAS, marker, options.get("single", False))
    found = [p for piece in pieces for p in parser.push(piece)]
    found += parser.flush(options.get("is_cut", True))
    calls: list[list] = []
    ids = set()
    for piece in found:
        if isinstance(piece, CallPiece):
            if piece.name is not None:
                assert piece.index == len(calls) and piece.id
                ids.add(piece.id)
                calls.append([piece.name, ""])
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.arguments
    assert len(ids) == len(calls)
    texts = [p for p in found if isinstance(p, TextPiece)]
    return (
        "".join(p.text for p in texts if not p.is_reasoning),
        "".join(p.text for p in texts if p.is_reasoning),
        calls,
    )


def cut(text: str, seed: int) -> list[str]:
    """Cut a text at random places; seed 0: at each character."""
    if seed == 0:
        return list(text)
    places = sorted(random.Random(seed).sample(range(len(text)), min(12, len(text))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


CASES = (
    (HermesParser, f"Let me see.\n\n{HERMES}\n{HERMES_NOW}"),
    (QwenCoderParser, f"Let me see.\n\n{CODER}\n{CODER_NOW}"),
    (GlmParser, f"Let me see.\n\n{GLM}\n{GLM_NOW}"),
    (MistralParser, f'Let me see.[TOOL_CALLS] {MISTRAL}{{"name": "now", "arguments": {{}}}}]'),
    (MistralParser, f"Let me see.{MISTRAL_NEW}[TOOL_CALLS]now[ARGS]{{}}"),
    (MistralParser, f"Let me see.[TOOL_CALLS]weather{json.dumps(CITY)}[TOOL_CALLS]now{{}}"),
    (GraniteParser, f'Let me see.<|tool_call|>{MISTRAL}{{"name": "now", "arguments": {{}}}}]'),
    (GemmaParser, f"Let me see.{GEMMA}{GEMMA_NOW}"),
    (MiniMaxParser, f"Let me see.\n\n{MINIMAX}{MINIMAX_NOW}"),
    (KimiParser, f"Let me see.{KIMI}{KIMI_NOW}"),
    (KimiParser, f"Let me see.{KIMI}{KIMI_NOW.replace('{}', '')}"),
    (PythonicParser, f"Let me see.{PYTHONIC}, now()]<|tool_call_end|>"),
    (PythonicParser, f"Let me see.{PYTHONIC}]<|tool_call_end|><|tool_call_start|>[now()]"),
    (PythonicParser, f'Let me see.<|tool_call_start|>{MISTRAL}{{"name": "now"}}]<|tool_call_end|>'),
)


@pytest.mark.parametrize("control", (False, True))
@pytest.mark.parametrize(("format", "answer"), CASES)
def test_text_and_calls_are_split_however_the_answer_is_cut(format, answer, control):
    marker = lambda name: name  # noqa: E731
    if control:
        answer, marker = marked(format, answer), lambda n: MARK + n if n in format.tokens else n
    for seed in range(12):
        text, _, calls = parse(format, cut(answer, seed), marker)
        assert text == "Let me see."
        assert [[name, json.loads(arguments)] for name, arguments in calls] == [
            ["weather", CITY],
            ["now", {}],
        ]
    _, _, calls = parse(format, [answer], marker, single=True)
    assert len(calls) == 1


def test_harmony_has_reasoning_calls_and_an_answer():
    answer = marked(HarmonyParser, HARMONY + HARMONY_NOW)
    final = marked(HarmonyParser, "<|start|>assistant<|channel|>final<|message|>It <|x|> rains.")
    for seed in range(12):
        text, reasoning, calls = parse(HarmonyParser, cut(answer + final, seed), MARK.__add__)
        assert (text, reasoning) == ("It <|x|> rains.", "Let me see.")
        assert [[n, json.loads(a)] for n, a in calls] == [["weather", CITY], ["now", {}]]


@pytest.mark.parametrize(
    ("answer", "text", "reasoning", "names"),
    (
        ("Yes.", "Yes.", "", []),
        ("to be", "to be", "", []),
        ("<|channel|>final<|constrain|>json<|message|>{}", "{}", "", []),
        ("<|channel|>analysis<|message|>so<|end|>Yes.", "Yes.", "so", []),
        ("<|channel|>analysis<|message|>so<|end|><|start|>assistantYes.", "Yes.", "so", []),
        ("<|channel|>analysis<|message|>so<|channel|>final<|message|>Yes.", "Yes.", "so", []),
        ("<|channel|>analysis<|channel|>final<|message|>Yes.", "Yes.", "", []),
        ("<|start|>assistant<|message|>Yes.<|end|>", "Yes.", "", []),
        ("Yes.<|end|><|start|>assistant<|channel|>analysis<|message|>so", "Yes.", "so", []),
        ("Yes.<|end|><|start|>assistant to=functions.now<|message|>{}", "Yes.", "", ["now"]),
        ("<|channel|>final<|message|>Yes.<|end|><|start|>assistant", "Yes.", "", []),
        (" to=functions.mcp/a:b<|channel|>commentary json<|message|>{}", "", "", ["mcp/a:b"]),
        ("<|channel|>commentary to=functions.now<|constrain|>json<|message|>{}", "", "", ["now"]),
        ("<|channel|>analysis to=now code<|message|>{}", "", "", ["now"]),
        ("<|channel|>analysis to=python code<|message|>1 + 1", "", "1 + 1", []),
    ),
)
def test_harmony_headers_of_any_kind(answer, text, reasoning, names):
    for seed in range(8):
        pieces = cut(marked(HarmonyParser, answer), seed)
        found = parse(HarmonyParser, pieces, MARK.__add__)
        assert found[:2] == (text, reasoning) and [name for name, _ in found[2]] == names


LOOKALIKES = (
    (HermesParser, "Use <tool_call> tags, a <tool_"),
    (HermesParser, '<tool_call>{"no": "name"}</tool_call> \n'),
    (HermesParser, "<tool_call>[1]</tool_call>"),
    (HermesParser, "  a < b <tool_call>\n"),
    (QwenCoderParser, "<tool_call> is a tag, <function= too, <function=a b>"),
    (GlmParser, "<tool_call> begins a call <tool_call>no such thing"),
    (MistralParser, "[TOOL_CALLS] is a marker, [TOOL_CALLS"),
    (MistralParser, '[TOOL_CALLS] [1, 2] and {"name": 3}'),
    (GraniteParser, "<|tool_call|> begins calls, <|tool_call|>[1], <|tool_"),
    (GemmaParser, "<|tool_call> calls, <|tool_call>call:me{maybe"),
    (MiniMaxParser, '<minimax:tool_call> is a tag, <invoke name= too, <invoke name="a b">'),
    (KimiParser, "<|tool_call_begin|> begins a call, <|tool_call_begin|>functions.now:1, <|tool_"),
    (PythonicParser, "<|tool_call_start|>[see (below)]<|tool_call_end|> and <|tool_call_start"),
)


@pytest.mark.parametrize(("format", "answer"), LOOKALIKES)
def test_text_that_only_looks_like_a_call_is_text(format, answer):
    for seed in range(8):
        assert parse(format, cut(answer, seed)) == (answer, "", [])


@pytest.mark.parametrize("text", ("Rom\n", "\nRom\n", " Rom", ""))
@pytest.mark.parametrize(
    ("format", "begin", "end"),
    (
        (QwenCoderParser, "<function=weather>\n<parameter=city>\n", "\n</parameter>\n</function>"),
        (
            MiniMaxParser,
            '<invoke name="weather">\n<parameter name="city">',
            "</parameter>\n</invoke>",
        ),
        (
            GlmParser,
            "<tool_call>weather<arg_key>city</arg_key><arg_value>",
            "</arg_value></tool_call>",
        ),
    ),
)
def test_a_value_between_tags_keeps_its_white_space(format, begin, end, text):
    for seed in range(3):
        _, _, ((name, arguments),) = parse(format, cut(begin + text + end, seed), is_cut=False)
        assert (name, json.loads(arguments)) == ("weather", {"city": text})


@pytest.mark.parametrize("format", FORMATS[1:])
def test_spelled_markers_are_text_if_the_markers_are_control_tokens(format):
    answer = next(answer for f, answer in CASES if f is format)
    answer = answer.replace("<function=", "<f=").replace("<invoke", "<i")  # openers without a token
    marker = lambda name: MARK + name if name in format.tokens else name  # noqa: E731
    for seed in range(4):
        assert parse(format, cut(answer, seed), marker) == (answer, "", [])


@pytest.mark.parametrize(("format", "answer"), CASES)
def test_a_cut_answer_never_fails(format, answer):
    """The text that ends inside of a call has the beginning of its arguments."""
    for end in range(len(answer)):
        text, _, calls = parse(format, cut(answer[:end], end))
        assert text.startswith("Let me see."[:end])
        assert len(calls) <= 2
        for name, arguments in calls[:-1]:
            assert name == "weather" and json.loads(arguments) == CITY


@pytest.mark.parametrize(
    ("format", "call"),
    (
        (QwenCoderParser, "<function=weather>\n<parameter=city>Rom</parameter>\n<parameter=da"),
        (GlmParser, "<tool_call>weather\n<arg_key>city</arg_key><arg_value>Rom</arg_value><arg_k"),
        (
            MiniMaxParser,
            '<invoke name="weather"><parameter name="city">Rom</parameter>\n<parameter na',
        ),
        (PythonicParser, "<|tool_call_start|>[weather(city='Rom', da"),
        (PythonicParser, "<|tool_call_start|>[weather(city='Rom', zip='0"),
    ),
)
def test_the_beginning_of_an_argument_is_no_text(format, call):
    assert parse(format, list(call)) == ("", "", [["weather", '{"city": "Rom"']])


def test_arguments_arrive_while_they_are_generated():
    parser = HermesParser(SCHEMAS, lambda name: name, False)
    begun = parser.push('<tool_call>{"name": "weather", "arguments": {"ci')
    assert [p.name or p.arguments for p in begun] == ["weather", '{"ci']
    assert [p.arguments for p in parser.push('ty": "Rom"')] == ['ty": "Rom"']


@pytest.mark.parametrize(
    ("call", "arguments"),
    (
        ('{"arguments": {"city": "Rom"}, "name": "weather"}', {"city": "Rom"}),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Rom\\"}"}', {"city": "Rom"}),
        ('{"name": "weather", "arguments": null}', {}),
        ('{"name": "weather"}', {}),
        ('{"name": "weather", "parameters": {"city": "}\\"</tool_call>"}}', None),
        ('{"name": "weather", "arguments": {"city": "Rom"}}}', {"city": "Rom"}),
        ('{"name": "weather", "arguments": {"city": "Rom"}, "id": 3}', {"city": "Rom"}),
    ),
)
def test_other_layouts_of_a_json_call(call, arguments):
    expected = {"city": '}"</tool_call>'} if arguments is None else arguments
    for seed in range(5):
        text, _, calls = parse(HermesParser, cut(f"<tool_call>{call}</tool_call> Done.", seed))
        assert text == "Done." and [[n, json.loads(a)] for n, a in calls] == [["weather", expected]]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    (
        ("string", "3", "3"),
        ("integer", "3", 3),
        ("boolean", "True", True),
        ("number", "many", "many"),
        (["string", "null"], "null", None),
        (None, '"a"', '"a"'),
        (None, "[1]", [1]),
    ),
)
def test_a_value_has_the_type_of_the_schema(kind, text, value):
    schemas = {"f": {"properties": {"x": {"type": kind} if kind else {}}}}
    parser = GlmParser(schemas, lambda name: name, False)
    call = f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>"
    pieces = parser.push(call) + parser.flush()
    assert json.loads("".join(p.arguments for p in pieces)) == {"x": value}


# Values by schema ---------------------------------------------------------------------------------

OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
DEFINITIONS = {
    "$defs": {
        "Zip": {"type": "string", "pattern": "^[0-9]+$"},
        "Count": {"type": "integer"},
        "a/b": {"enum": ["1", "2"]},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"$ref": "#/$defs/Tree"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    (
        (OPTIONAL, "12345", "12345"),
        (OPTIONAL, "true", "true"),
        (OPTIONAL, '{"a": 1}', '{"a": 1}'),
        (OPTIONAL, "null", None),
        (OPTIONAL, "None", None),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "1.10", "1.10"),
        ({"type": ["integer", "string"]}, "7", "7"),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "7", "7"),
        ({"type": "string", "nullable": True}, "7", "7"),
        ({"type": "STRING"}, "7", "7"),
        ({"minLength": 5}, "12345", "12345"),
        ({"enum": ["none", "auto"]}, "none", "none"),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": "5"}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"enum": ["auto"]}]}, "auto", "auto"),
        ({"anyOf": [{"type": "integer"}, {"enum": ["auto"]}]}, "5", 5),
        ({"$ref": "#/$defs/Zip"}, "01234", "01234"),
        ({"$ref": "#/$defs/Zip", "default": "0"}, "5", "5"),
        ({"allOf": [{"$ref": "#/$defs/Zip"}], "description": "a code"}, "5", "5"),
        ({"$ref": "#/$defs/a~1b"}, "2", "2"),
        ({"$ref": "#/$defs/Count"}, "5", 5),
        ({"$ref": "#/$defs/Missing"}, "[5]", [5]),
        ({"$ref": "#/$defs/Loop"}, "[5]", [5]),
        ({"$ref": "#/$defs/Tree"}, "[5]", [5]),
        ({"not": {"type": "string"}}, "7", 7),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, '"5"', 5),
        ({"type": "boolean"}, "True", True),
        ({"type": "object"}, "{'a': None, 'b': [1, 2}", {"a": None, "b": [1, 2]}),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, '["a"]', ["a"]),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": ["number", "null"]}, "Infinity", None),
        ({"type": "object"}, '{"a": 1e999}', {"a": "1e999"}),
        ({}, "-Infinity", "-Infinity"),
        ({}, "{'a': NaN}", "{'a': NaN}"),
        (True, "7", 7),
        (False, "7", 7),
        ({"type": 5, "enum": 3, "anyOf": {}, "$ref": [], "properties": 0}, "7", 7),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
    ),
)
def test_a_text_stays_a_text_if_the_schema_accepts_one(schema, text, value):
    found = typed_value(text, Schema(schema, DEFINITIONS))
    assert found == value and type(found) is type(value)


# Calls with faults --------------------------------------------------------------------------------

ROME = ["weather", {"city": "Rom"}]
ROME_3 = ["weather", {"city": "Rom", "days": 3}]
NOW = ["now", {}]
ROME_CODER = "<tool_call>\n<function=weather>\n<parameter=city>\nRom"
ROME_GLM = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rom"
ROME_MINIMAX = '<minimax:tool_call><invoke name="weather"><parameter name="city">Rom'
ROME_PYTHON = "<|tool_call_start|>[weather(city='Rom"
TAGS = "</parameter>, <parameter=x>, </function>, </arg_value>, <arg_key>k</arg_key>, </tool_call>!"
FAULTS = {
    HermesParser: (
        ('<tool_call>{"arguments": {"city": "Rom"}, "name": "weather"}</tool_call>', [ROME]),
        ('<tool_call>{"id": 1, "name": "weather", "args": {"city": "Rom"}}</tool_call>', [ROME]),
        ('<tool_call>{"name": "weather", "city": "Rom"}</tool_call>', [ROME]),
        ('<tool_call>{"weather": {"city": "Rom"}}</tool_call>', [ROME]),
        ('<tool_call>{"function": {"name": "now"}, "type": "function"}</tool_call>', [NOW]),
        ('<tool_call>{"name": "now", "arguments": }</tool_call>', [NOW]),
        (f'<tool_call>[{{"name": "now"}}, {HERMES_NOW[11:-12]}]</tool_call>', [NOW, NOW]),
        (f"<tool_call>{HERMES_NOW[11:-12]}\n{HERMES_NOW[11:-12]}</tool_call>", [NOW, NOW]),
        ("<tool_call>{'name': 'weather', 'arguments': {'city': 'Rom'}}</tool_call>", [ROME]),
        ("<tool_call>{name: weather, arguments: {city: Rom, days: 3}}</tool_call>", [ROME_3]),
        ('<tool_call>{"name" "weather", "arguments": {"city": "Rom"}}</tool_call>', [ROME]),
        ('<tool_call>{"name": "weather" "arguments": {"city": "Rom" "days": 3}}', [ROME_3]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Rom", "days": 3,},}', [ROME_3]),
        ('<tool_call>{"arguments": {"city": "Rom, "days": 3}, "name": "weather"', [ROME_3]),
        ('<tool_call>{"name": "weather", "arguments": {"city": Rom", days": 3}}', [ROME_3]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Rom', [ROME]),
        (f'<tool_call>{{"name": "weather", "arguments": {{"city": "Rom"{HERMES_NOW}', [ROME, NOW]),
        ('<tool_call>```json\n{"name": "weather", "arguments": {"city": "Rom"}}\n```', [ROME]),
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\\d", "zip": NaN, x: None}}',
            [["weather", {"city": "a\nb\\d", "zip": "NaN", "x": None}]],
        ),
        (
            '<tool_call>{"name": "weather", "arguments": {"u": http://a.b/c?d=1,2, "city": "Rom"}}',
            [["weather", {"u": "http://a.b/c?d=1,2", "city": "Rom"}]],
        ),
        (
            f'<tool_call>{{"name": "weather", "arguments": {{"city": "{TAGS}"}}}}</tool_call>',
            [["weather", {"city": TAGS}]],
        ),
    ),
    QwenCoderParser: (
        (f"{ROME_CODER}\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", [ROME_3]),
        (f"{ROME_CODER}</parameter> oops <parameter=days>3</function></tool_call>", [ROME_3]),
        (f"{ROME_CODER}\n<parameter=x>1</function>", [["weather", {"city": "Rom", "x": 1}]]),
        (f"{ROME_CODER}\n</function>\n</tool_call>", [ROME]),
        (f"{ROME_CODER}\n</tool_call>", [ROME]),
        (f"{ROME_CODER}\n</parameter>\n</tool_call>{CODER_NOW}", [ROME, NOW]),
        (f"{ROME_CODER}\n<tool_call>\n{CODER_NOW}", [ROME, NOW]),
        (ROME_CODER, [ROME]),
        ("<tool_call>\n<function=now", []),
        ("<tool_call>\n<function=now>\n", [NOW]),
        ("<function=weather\n<parameter=city\nRom</parameter></function>", [ROME]),
        ('<tool_call><function=weather>{"city": "Rom"}</function></tool_call>', [ROME]),
        ("<function='weather'><parameter=\"city\">Rom</parameter></function>", [ROME]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>', [ROME]),
        (
            f"{ROME_CODER}</parameter><parameter=zip>01234</parameter></function></tool_call>",
            [["weather", {"city": "Rom", "zip": "01234"}]],
        ),
        (
            f"{ROME_CODER[:-3]}{TAGS}\n</parameter>\n</function>\n</tool_call>",
            [["weather", {"city": TAGS}]],
        ),
    ),
    GlmParser: (
        (f"{ROME_GLM}<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>", [ROME_3]),
        (f"{ROME_GLM}</arg_value><arg_key>days<arg_value>3</tool_call>", [ROME_3]),
        (f"{ROME_GLM}</arg_value>{GLM_NOW}", [ROME, NOW]),
        (ROME_GLM, [ROME]),
        ("<tool_call>now", [NOW]),
        ('<tool_call>weather\n{"city": "Rom"}</tool_call>', [ROME]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>', [ROME]),
        (f"{ROME_GLM[:-3]}{TAGS}</arg_value></tool_call>", [["weather", {"city": TAGS}]]),
    ),
    MistralParser: (
        (
            '[TOOL_CALLS][{"arguments": {"city": "Rom"}, "name": "weather"}, {"name": "now"}]',
            [ROME, NOW],
        ),
        ("[TOOL_CALLS][{'name': 'weather', 'arguments': {'city': 'Rom'}}", [ROME]),
        ('[TOOL_CALLS]{"name": "weather", "arguments": {"city": "Rom"}}', [ROME]),
        ("[TOOL_CALLS]weather[ARGS]{'city': 'Rom', days: 3}", [ROME_3]),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Rom"}now[ARGS]{}, now[ARGS]{}', [ROME, NOW, NOW]),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Rom"[TOOL_CALLS]now[ARGS]', [ROME, NOW]),
    ),
    GemmaParser: (
        ("<|tool_call>call:weather{city='Rom',days=3}<tool_call|>", [ROME_3]),
        ('<|tool_call>call:weather{"city": "Rom", "days": 3}<tool_call|>', [ROME_3]),
        ('<|tool_call>call:weather{city:<|"|>Rom<|"|>days:3}<tool_call|>', [ROME_3]),
        ('<|tool_call>call:weather{city:Rom<|"|>,days:<|"|>3<|"|>', [ROME_3]),
        (f'<|tool_call>call:weather{{city:<|"|>Rom<|"|>{GEMMA_NOW}', [ROME, NOW]),
        ("<|tool_call>call:now<tool_call|>", [NOW]),
        ("<|tool_call>call:now{}call:now{},call:now{}<tool_call|>", [NOW, NOW, NOW]),
        ('<|tool_call>call:now{l:[<|"|>a<|"|><|"|>b<|"|>]}', [["now", {"l": ["a", "b"]}]]),
        ("<|tool_call>call:weather{zip:01,city:2}", [["weather", {"zip": "01", "city": "2"}]]),
        ("<|tool_call>call:weather{zip:1.10}", [["weather", {"zip": "1.10"}]]),
        ("<|tool_call>call:now{place:{x:[True]}}", [["now", {"place": {"x": [True]}}]]),
        (
            '<|tool_call>call:now{h:{<|"|>http://a<|"|>:<|"|>b<|"|>}}',
            [["now", {"h": {"http://a": "b"}}]],
        ),
        (
            "<|tool_call>call:now{u:http://a/b,c,r:['d',e]}",
            [["now", {"u": "http://a/b,c", "r": ["d", "e"]}]],
        ),
        (
            '<|tool_call>call:now{c:<|"|>f(<|"|>, <|"|>) <tool_call|><|"|>}<tool_call|>',
            [["now", {"c": 'f(", ") <tool_call|>'}]],
        ),
        ("<|tool_call>call:now{n:NaN}<tool_call|>", [["now", {"n": "NaN"}]]),
    ),
    MiniMaxParser: (
        (f'{ROME_MINIMAX}<parameter name="days">3</parameter></invoke>', [ROME_3]),
        (f"{ROME_MINIMAX}</parameter><parameter name=days>3</minimax:tool_call>", [ROME_3]),
        (f"{ROME_MINIMAX}</invoke></minimax:tool_call>", [ROME]),
        (f"{ROME_MINIMAX}</parameter></invoke>{MINIMAX_NOW}", [ROME, NOW]),
        (ROME_MINIMAX, [ROME]),
        ("<invoke name='weather'><parameter name='city'>Rom</parameter></invoke>", [ROME]),
        (
            '<minimax:tool_call>{"name": "weather", "arguments": {"city": "Rom"}}'
            "</minimax:tool_call>",
            [ROME],
        ),
        (
            f"{ROME_MINIMAX[:-3]}<invoke> & </param></parameter></invoke></minimax:tool_call>",
            [["weather", {"city": "<invoke> & </param>"}]],
        ),
    ),
    KimiParser: (
        (f'<|tool_call_begin|>weather{KIMI_ARGUMENT}{{"city": "Rom"}}', [ROME]),
        (f'<|tool_call_begin|>functions.weather:7 {KIMI_ARGUMENT} {{"city": "Rom"', [ROME]),
        (
            f"<|tool_call_begin|>functions.weather:0{KIMI_ARGUMENT}{{'city': 'Rom', days: 3}}"
            "<|tool_calls_section_end|>",
            [ROME_3],
        ),
        (
            "<|tool_calls_section_begin|>\n<|tool_call_begin|>weather"
            f'{KIMI_ARGUMENT}{{"city": "Rom"{KIMI_NOW}',
            [ROME, NOW],
        ),
    ),
    PythonicParser: (
        (f"{ROME_PYTHON}', days=3)]<|tool_call_end|>", [ROME_3]),
        (f"{ROME_PYTHON}', days=3)<|tool_call_end|>", [ROME_3]),
        (f"{ROME_PYTHON}', days=3]<|tool_call_end|>", [ROME_3]),
        (f"{ROME_PYTHON}', days=3", [ROME_3]),
        (f"{ROME_PYTHON}', 'days': '3',)]<|tool_call_end|>", [ROME_3]),
        (f"{ROME_PYTHON})]<|tool_call_end|>", [ROME]),
        (f"{ROME_PYTHON}", [ROME]),
        (f"{ROME_PYTHON}'), now()]<|tool_call_end|>", [ROME, NOW]),
        (
            f"{ROME_PYTHON}']<|tool_call_end|><|tool_call_start|>[now()]<|tool_call_end|>",
            [ROME, NOW],
        ),
        ("<|tool_call_start|>weather(city=Rom, days = 3)<|tool_call_end|>", [ROME_3]),
        ("<|tool_call_start|>[weather('Rom', 3)]<|tool_call_end|>", [ROME_3]),
        ("<|tool_call_start|>[weather({'city': 'Rom', 'days': 3})]<|tool_call_end|>", [ROME_3]),
        ("<|tool_call_start|>[weather(city=]<|tool_call_end|>", [["weather", {}]]),
        ("<|tool_call_start|>[now(oops oops)]<|tool_call_end|>", [NOW]),
        ('<|tool_call_start|>[{"name": "weather", "arguments": {"city": "Rom"}}]', [ROME]),
        ("<|tool_call_start|>[now(", [NOW]),
        (
            "<|tool_call_start|>[now(a=(1, 2), b=[1e999], c=NaN, d='')]",
            [["now", {"a": [1, 2], "b": ["1e999"], "c": "NaN", "d": ""}]],
        ),
        (
            "<|tool_call_start|>[weather(city='it's \\'so\\', \\u00fc(x)\\n', zip='01234')]",
            [["weather", {"city": "it's 'so', ü(x)\n", "zip": "01234"}]],
        ),
        (
            '<|tool_call_start|>[weather(city="""a "b")\nc""", zip=01234)]<|tool_call_end|>',
            [["weather", {"city": 'a "b")\nc', "zip": "01234"}]],
        ),
        (
            "<|tool_call_start|>[now(code='print('a')', d={'k': 'v]', \"l\": [True, None]})]",
            [["now", {"code": "print('a')", "d": {"k": "v]", "l": [True, None]}}]],
        ),
    ),
}
FAULT_CASES = [(format, *case) for format, cases in FAULTS.items() for case in cases]


@pytest.mark.parametrize("control", (False, True))
@pytest.mark.parametrize(("format", "answer", "expected"), FAULT_CASES)
def test_a_call_with_faults_stays_a_call(format, answer, expected, control):
    marker = lambda name: name  # noqa: E731
    text = "" if expected else answer
    if control:
        answer, marker = marked(format, answer), lambda n: MARK + n if n in format.tokens else n
    for pieces in ([answer], list(answer)):
        found, _, calls = parse(format, pieces, marker, is_cut=False)
        assert found == text
        assert [[name, json.loads(arguments)] for name, arguments in calls] == expected


@pytest.mark.parametrize(
    ("answer", "text", "calls"),
    (
        ("Hello", "Hello", []),
        ("<|end|>Hello", "Hello", []),
        ("assist", "assist", []),
        ("<|channel|>final<|constrain|>json<|message|>{}<|return|>", "{}", []),
        (" to=functions.now<|channel|>commentary json<|message|><|call|>", "", [NOW]),
        ("<|channel|>commentary to=now<|message|>{", "", [NOW]),
        ("<|channel|>commentary to=functions.now<|message|>{'a': 1}", "", [["now", {"a": 1}]]),
        ("<|channel|>commentary to=functions.now<|message|>print(1)", "", [["now", "print(1)"]]),
    ),
)
def test_harmony_answers_with_faults(answer, text, calls):
    answer = marked(HarmonyParser, answer)
    for pieces in ([answer], list(answer)):
        found, _, parsed = parse(HarmonyParser, pieces, MARK.__add__, is_cut=False)
        assert (found, [[n, json.loads(a)] for n, a in parsed]) == (text, calls)


@pytest.mark.parametrize(("format", "answer"), LOOKALIKES)
def test_a_control_token_that_begins_no_call_is_its_own_text(format, answer):
    for seed in range(3):
        pieces = cut(marked(format, answer), seed)
        assert parse(format, pieces, MARK.__add__) == (answer, "", [])


PIECES = [
    *"{}[](),:=\"'<>\\é\0",
    *(
        "</",
        "\\u12",
        "\\ud83d",
        "\\ude00",
        "-0.5",
        "1e999",
        "NaN",
        "True",
        "weather",
        "now",
        "city",
        '"name": "now", ',
    ),
    *('{"name": "now"}', "call:", "call:weather{", "to=functions.weather", "```json", "<function="),
    *("<parameter=city>", "</parameter>", "<function=now>", "</function>", "http://a/b?c=1,2"),
    *('<parameter name="city">', '<invoke name="now">', "</invoke>", "now(", "city='", "days=3, "),
]


def test_no_answer_raises_or_leaks_and_every_cut_gives_the_same():
    rng = random.Random(0)
    cases = [*CASES, (HarmonyParser, HARMONY + HARMONY_NOW)]
    for _ in range(800):
        format, answer = rng.choice(cases)
        control = format is HarmonyParser or rng.random() < 0.5
        marker = lambda n: MARK + n if control and n in format.tokens else n  # noqa: B023, E731
        answer = marked(format, answer) if control else answer
        pieces = [*PIECES, MARK, *map(marker, format.tokens)]
        for _ in range(rng.randrange(5)):
            at, end = sorted(rng.randrange(len(answer) + 1) for _ in range(2))
            end = min(end, at + rng.choice((0, 1, 3, 30)))
            answer = answer[:at] + rng.choice(["", " ", *pieces]) + answer[end:]
        is_cut = rng.random() < 0.3
        found = parse(format, [answer], marker, is_cut=is_cut)
        assert MARK not in repr(found) and "ufdd1" not in repr(found)
        for seed in (0, rng.random()):
            assert parse(format, cut(answer, seed), marker, is_cut=is_cut) == found, answer
        text, _, calls = found
        if not calls and format is not HarmonyParser:
            assert text == answer.replace(MARK, "")
        for _, arguments in () if is_cut else calls:
            assert parse_json(arguments) is not None, answer
            assert str(parse_json(arguments)).encode(), answer  # no half of a surrogate pair


@pytest.mark.parametrize("fence", ("```json\n", "```", " ```\n[", "```js", "``", "```python\n"))
@pytest.mark.parametrize("is_cut", (False, True))
def test_a_call_in_a_fence_is_streamed_as_others_are(fence, is_cut):
    """A cut answer was text if it came in pieces, and a call if it came at once."""
    answer = f'<tool_call>{fence}{{"name": "weather", "arguments": {{"city": "Rom"'
    whole = parse(HermesParser, [answer], is_cut=is_cut)
    for seed in range(8):
        assert parse(HermesParser, cut(answer, seed), is_cut=is_cut) == whole
    if JSON_HEAD.match(answer, len("<tool_call>")):
        parser = HermesParser(SCHEMAS, str, False)
        pieces = [piece for letter in answer for piece in parser.push(letter)]
        assert "".join(piece.arguments for piece in pieces) == '{"city": "Rom"'


@pytest.mark.parametrize(
    "text", ("", "{", "[", '"', "{'", "{a", '{"a', "}{", "[1,", "{a:1,,b", "{:}")
)
def test_a_repair_gives_json(text):
    for whole in (text, text * 3, f"{text} x {text}"):
        json.loads(Repair(whole).json())


@pytest.mark.parametrize("digits", (400, 5000))
@pytest.mark.parametrize(("format", "answer"), CASES)
def test_whole_numbers_of_any_size_are_no_failure(format, answer, digits):
    """From 309 digits on a number has no float, and above 4,300 Python reads none."""
    number = "9" * digits
    text, _, calls = parse(format, [re.sub(r"\b3\b", number, answer)])
    assert text == "Let me see." and [name for name, _ in calls] == ["weather", "now"]
    assert number in calls[0][1]


def test_a_pointer_has_any_text():
    schema = {"allOf": [{"type": "string"}, {}]}
    assert find_pointer(schema, "#/allOf/0", None) == {"type": "string"}
    for step in ("0" * 5000, "9" * 5000, "-1", "+0", "3", "\u0660"):
        assert find_pointer(schema, f"#/allOf/{step}", None) is None
