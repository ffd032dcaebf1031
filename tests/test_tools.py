"""Tool calls: their formats, the incremental parsers, and the prompts that force a call.

The published chat templates are not here. Those of the tests are short, and follow the documented
layouts of the families: the parsers and the rendering depend on the layouts alone.
"""

import json
import random

import pytest

from server.tools import (
    FORMATS,
    MARK,
    CallPiece,
    GemmaParser,
    GlmParser,
    HarmonyParser,
    HermesParser,
    MistralParser,
    QwenCoderParser,
    TextPiece,
)

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "place": {"type": "object"},
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
    found = [p for piece in pieces for p in parser.push(piece)] + parser.flush()
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
    (GemmaParser, f"Let me see.{GEMMA}{GEMMA_NOW}"),
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
    (GemmaParser, "<|tool_call> calls, <|tool_call>call:me{maybe"),
)


@pytest.mark.parametrize(("format", "answer"), LOOKALIKES)
def test_text_that_only_looks_like_a_call_is_text(format, answer):
    for seed in range(8):
        assert parse(format, cut(answer, seed)) == (answer, "", [])


@pytest.mark.parametrize("format", FORMATS[1:])
def test_spelled_markers_are_text_if_the_markers_are_control_tokens(format):
    answer = next(answer for f, answer in CASES if f is format).replace("<function=", "<f=")
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
