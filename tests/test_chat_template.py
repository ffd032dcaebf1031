"""Chat templates: named ones, earlier calls and reasoning, in the layouts of published templates.

The templates are the tests' own. Their structures are those of published ones (docs/server.md).
"""

import json
from types import SimpleNamespace

import pytest
from test_reasoning import GEMMA_MARKERS, make_tokenizer
from transformers import AutoTokenizer

import chat_template
from chat_template import ChatTemplate
from checkpoint import Writer
from hub.client import wanted
from models.converter import Conversion
from server.errors import APIError
from server.plan import Limits, read_request
from server.tokenizing import chat_ids
from tokenizer import load_tokenizer

USER = {"role": "user", "content": "Hi"}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
WITH_TOOLS = "{{ tools | tojson }}" + PLAIN
NAMED = {"default": PLAIN, "tool_use": WITH_TOOLS, "rag": "{% rag %}"}
AS_LIST = [{"name": name, "template": source} for name, source in NAMED.items()]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def render(source: str, *messages: dict, control=(), **variables) -> str:
    """Return a template's text without marks."""
    template = ChatTemplate(source, {}, control)
    return template.render(messages, variables).replace("\ufdd0", "")


def call(arguments, name: str = "f") -> dict:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_what_an_answer_sets_is_not_known_after_it():
    """`{% generation %}` is a scope in transformers, too."""
    answer = "{% generation %}{% set a = 2 %}{{ a }}{{ b }}{% endgeneration %}"
    source = "{% set a = 1 %}{% set b = 3 %}" + answer + "{{ a }}"
    assert render(source, USER) == "231"
    assert render("{% for m in messages %}" + answer + "{{ loop.index }}{% endfor %}", USER) == "21"


LIST = "{% set l = range(9999) | list %}"
ENDLESS = {
    "loops": LIST + "{% for x in l %}{% for y in l %}{% endfor %}{% endfor %}",
    "their text": LIST + "{% for x in l %}{% for y in l %}x{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_rendering_that_would_not_end_is_an_error(source, monkeypatch):
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.1)
    with pytest.raises(ValueError, match=r"chat template: it did not end in 0\.1 s"):
        render(source, USER)


@pytest.mark.parametrize("product", ("'x' * 10 ** 10", "10 ** 10 * [1]"))
def test_a_product_beyond_the_memory_is_an_error(product):
    with pytest.raises(ValueError, match=r"chat template: 1 \* 10000000000 .* are too many"):
        render("{{ " + product + " }}", USER)


def test_loops_know_their_length_and_end():
    source = "{% for m in messages %}{{ loop.length }}{{ loop.last }}{% else %}none{% endfor %}"
    assert render(source, USER, USER) == "2False2True" and render(source) == "none"
    assert (
        render("{% for m in [[1], 2] recursive %}{{ m if m is number else loop(m) }}{% endfor %}")
        == "12"
    )
    assert render("{% for m in unknown %}x{% endfor %}{{ 2 * 3 }}{{ 'ab' * 2 }}") == "6abab"


# Names --------------------------------------------------------------------------------------------


def write_config(folder, template) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("source", "names"),
    (
        (
            "{% if enable_thinking is defined and enable_thinking %}x{% endif %}",
            {"enable_thinking"},
        ),
        (
            "{% if effort is not defined %}{% set effort = 'low' %}{% endif %}{{ effort }}",
            {"effort"},
        ),
        ("{% macro f(a) %}{{ a + thinking }}{% endmacro %}{{ f(1) }}", {"thinking"}),
        ("{% set own = 1 %}{{ own }}{{ bos_token }}", {"bos_token"}),
        ("{% damaged", set()),
    ),
)
def test_the_variables_of_a_template_are_found(source, names):
    assert ChatTemplate(source, {}, ()).variables == names


@pytest.mark.parametrize(
    ("in_config", "files"),
    [
        (AS_LIST, {}),
        (NAMED, {}),
        (None, {"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": "tools"}),
        (AS_LIST, {"chat_template.jinja": "file"}),
        (PLAIN, {}),
        ({"default": PLAIN}, {}),
    ],
)
def test_a_request_with_tools_takes_the_template_of_that_name(tmp_path, in_config, files):
    make_tokenizer(tmp_path)
    write_config(tmp_path, in_config)
    for file, source in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(source)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, TOOLS):
        options = {"tools": tools, "add_generation_prompt": True}
        expected = theirs.apply_chat_template([USER], tokenize=False, **options)
        assert ours.chat_text([USER], **options) == expected
    if "additional_chat_templates/tool_use.jinja" in files:
        path = tmp_path / "additional_chat_templates/tool_use.jinja"
        path.rename(tmp_path / "tool_use.jinja")  # as the conversion leaves it
        assert load_tokenizer(tmp_path).chat_text([USER], tools=TOOLS) == "tools"
        assert load_tokenizer(tmp_path).template_has("tools")


def test_named_templates_are_downloaded_and_converted(tmp_path):
    file = "additional_chat_templates/tool_use.jinja"
    assert file in wanted(["config.json", "model.safetensors", "tokenizer.json", file])
    make_tokenizer(tmp_path, template="plain")
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text("tools")
    with Writer(tmp_path / "converted", {}, {"name": "bf16"}) as writer:
        Conversion.write_side_files(
            SimpleNamespace(directory=tmp_path, config={}, tokenizer=None), writer
        )
    tokenizer = load_tokenizer(tmp_path / "converted")
    assert (tokenizer.chat_text([]), tokenizer.chat_text([], tools=[])) == ("plain", "tools")


@pytest.mark.parametrize(
    "template",
    [{"default": 5}, {"tool_use": [PLAIN]}, [{"name": "default", "template": {}}], 7, True],
)
def test_templates_of_other_types_are_refused(tmp_path, template):
    make_tokenizer(tmp_path)
    write_config(tmp_path, template)
    with pytest.raises(ValueError, match="chat_template must be a text or named texts"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "template", [{}, [], {"rag": PLAIN}, [{"name": ["default"], "template": PLAIN}, 5, {}], ""]
)
def test_templates_of_other_names_are_none(tmp_path, template):
    make_tokenizer(tmp_path)
    write_config(tmp_path, template)
    assert not load_tokenizer(tmp_path).has_chat_template


def test_a_damaged_template_is_named_when_the_tokenizer_is_checked(tmp_path):
    make_tokenizer(tmp_path)
    write_config(tmp_path, {"default": PLAIN, "tool_use": "{% if %}"})
    with pytest.raises(ValueError, match="the chat template is damaged"):
        load_tokenizer(tmp_path).check(1000)


# Calls --------------------------------------------------------------------------------------------

TEXT = '{"city": "Ulm & <b>", "n": [1, 2.50]}'


@pytest.mark.parametrize(
    ("expression", "want"),
    [
        ("'<sep>' + a + '<end>'", f"<sep>{TEXT}<end>"),  # DeepSeek-V3, -R1, -V3.1
        ("a", TEXT),
        ("'<' ~ a ~ '>'", f"<{TEXT}>"),
        ("a | string", TEXT),
        ("'%s' | format(a | trim)", TEXT),
        ("a | tojson", json.dumps(json.loads(TEXT), ensure_ascii=False)),
        ("a if a is string else a | tojson", json.dumps(json.loads(TEXT), ensure_ascii=False)),
        ("a.city ~ a['n'][0]", "Ulm & <b>1"),
        ("a is mapping and a is not string and a != {}", "True"),
        ("a.items() | list | length, a | items | list | length, a | length", "(2, 2, 2)"),
        ("a | dictsort | map('first') | join(',')", "city,n"),
        ("'city' in a and a.text is not defined and a._text is not defined", "True"),
    ],
)
@pytest.mark.parametrize("given", [TEXT, json.loads(TEXT)])
def test_arguments_are_an_object_and_its_text(expression, want, given):
    source = f"{{% set a = messages[0].tool_calls[0].function.arguments %}}{{{{ {expression} }}}}"
    message = {"role": "assistant", "content": None, "tool_calls": [call(given)]}
    if given != TEXT:  # an object has no text of the client's
        want = want.replace(TEXT, json.dumps(given, ensure_ascii=False))
    assert render(source, message) == want
    assert message["tool_calls"] == [call(given)]  # the caller's message is unchanged


def test_half_of_a_surrogate_pair_becomes_a_character():
    """Its escape is legal JSON, but no text in UTF-8."""
    given = r'{"a": "\ud83d \ud83d\ude00 \ude00\ud83d \\ud83d"}'
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a.a }}|{{ a }}"
    whole = r'{"a": "\ufffd \ud83d\ude00 \ufffd\ufffd \\ud83d"}'
    found = render(source, {"role": "assistant", "tool_calls": [call(given)]})
    assert found == "\ufffd \U0001f600 \ufffd\ufffd \\ud83d|" + whole


@pytest.mark.parametrize("given", ["", "no JSON", "[1]", "5", '{"a": 1', None, [1], "[" * 9999])
def test_arguments_that_are_no_object_stay(given):
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert render(source, {"role": "assistant", "tool_calls": [call(given)]}) == str(given)


@pytest.mark.parametrize("calls", [5, "x", [5], [{}], [{"function": 5}], [{"function": {}}], None])
def test_calls_of_any_shape_render_or_give_one_line(calls):
    source = "{{ messages[0].tool_calls }}"
    try:
        render(source, {"role": "assistant", "tool_calls": calls})
    except ValueError as error:
        assert str(error).startswith("chat template: ") and "\n" not in str(error)


@pytest.mark.parametrize(
    "expression", ["a.update({})", "a.clear()", "a.__init__({}, '')", "a + b.c"]
)
def test_a_template_cannot_change_or_escape_arguments(expression):
    source = f"{{% set a = messages[0].tool_calls[0].function.arguments %}}{{{{ {expression} }}}}"
    with pytest.raises(ValueError, match=r"^chat template: "):
        render(source, {"role": "assistant", "tool_calls": [call("{}")]})


def test_control_tokens_in_arguments_are_text(tmp_path):
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a }}|{{ a | tojson }}"
    tokenizer = make_tokenizer(tmp_path, ('<|"|>', "<|x|>"), special=True, template=source)
    for given in ('{"<|x|>": "<|\\"|><|x|>"}', {"<|x|>": '<|"|><|x|>'}):
        ids = tokenizer.chat([{"role": "assistant", "tool_calls": [call(given)]}])
        assert not {tokenizer.token_id('<|"|>'), tokenizer.token_id("<|x|>")} & set(ids)


@pytest.mark.parametrize(
    "condition",
    ["m['content'] is none", "not (m.content is not none)", "not m.content", "m.content != 'x'"],
)
def test_an_empty_content_beside_calls_is_none_where_the_template_asks_for_it(condition):
    """DeepSeek-V3 and -R1 render calls only where the content is none."""
    body = f"{{% if {condition} %}}{{{{ m.tool_calls[0].function.name }}}}{{% endif %}}"
    source = f"{{% for m in messages %}}{body}{{% endfor %}}"
    message = {"role": "assistant", "content": "", "tool_calls": [call("{}")]}
    assert render(source, message) == "f"
    assert render("{{ messages[0].content is none }}", USER | {"content": ""}) == "False"


def test_a_question_about_the_reasoning_is_none_about_the_content():
    """Qwen3's template asks whether the reasoning is none, then searches in the content."""
    source = (
        "{% for m in messages %}{% if m.reasoning_content is defined and "
        "m.reasoning_content is not none %}{{ m.reasoning_content }}"
        "{% elif '</think>' in m.content %}old{% endif %}"
        "{{ m.content.lstrip() }}{{ m.tool_calls[0].function.name }}{% endfor %}"
    )
    message = {"role": "assistant", "content": "", "tool_calls": [call("{}")]}
    assert render(source, message) == "f"
    assert render(source, message | {"reasoning_content": "so "}) == "so f"


def test_an_empty_content_stays_where_none_would_fail():
    """Ministral's template asks whether a content is none, and measures it elsewhere."""
    source = (
        "{% for m in messages %}{% if m.content is not none %}{{ m.content }}{% endif %}"
        "{{ m.content | length }}{{ m.tool_calls[0].function.name }}{% endfor %}"
    )
    message = {"role": "assistant", "content": "", "tool_calls": [call("{}")]}
    assert render(source, message) == "0f"
    with pytest.raises(ValueError, match=r"^chat template: no$"):
        render(source + "{{ raise_exception('no') }}", message)


def test_the_markers_of_written_calls_are_control_tokens(tmp_path):
    """A template that leaves calls out gets their text. Markers inside of it are text."""
    tokenizer = make_tokenizer(tmp_path, ("<|x|>", "<|y|>"), special=True, template=PLAIN)
    answer = {"role": "assistant", "content": "<|x|>", "written_calls": ("<|x|>", "<|y|>", "<|y|>")}
    for content in ("<|x|>", None):
        ids = tokenizer.chat([answer | {"content": content}])
        assert [ids.count(tokenizer.token_id(name)) for name in ("<|x|>", "<|y|>")] == [1, 1]
        assert ids[-1] == tokenizer.token_id("<|y|>")


# Reasoning ----------------------------------------------------------------------------------------


def test_a_prompt_of_no_tokens_is_refused(tmp_path):
    """Mistral's templates write a system message in the user's."""
    source = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    tokenizer = make_tokenizer(tmp_path, template=source)
    for content in ("x", ""):
        body = {"messages": [{"role": "system", "content": "Be short."}]}
        body["messages"] += [{"role": "user", "content": content}] * (content == "")
        with pytest.raises(APIError, match="the messages resulted in no tokens") as caught:
            read_request(json.dumps(body).encode(), True, tokenizer, Limits(99, 999))
        assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    "expression",
    [
        "m.reasoning_content",  # Qwen3, GLM
        "m.get('reasoning') or m.get('reasoning_content')",  # Gemma 4
        "m.thinking if 'thinking' in m else ''",  # gpt-oss
    ],
)
def test_a_template_finds_reasoning_under_its_own_name(given, expression):
    source = f"{{% for m in messages %}}{{{{ {expression} }}}};{{% endfor %}}"
    answer = {"role": "assistant", "content": "a"}
    assert render(source, answer | {given: "I need f."}) == "I need f.;"
    assert render(source, answer | {given: ""}).replace("None", "") == ";"


GEMMA = """\
{%- macro strip(text) -%}
{%- set ns = namespace(result='') -%}
{%- for part in text.split('<channel|>') -%}
{%- set ns.result = ns.result + (part.split('<|channel>')[0] if '<|channel>' in part else part) -%}
{%- endfor -%}{{- ns.result | trim -}}
{%- endmacro -%}
{%- for m in messages -%}
<|turn>{{ m.role }}\n{{ strip(m.content) if m.role == 'assistant' else m.content }}<turn|>
{%- endfor -%}<|turn>model\n"""


@pytest.mark.parametrize(
    "content",
    [
        "<|channel>thought\nThe user greets.\n<channel|>Hello!",
        "A<|channel>thought\nx<channel|>B<|channel>y<channel|>C",
        "Hello!<|channel>thought\ncut",
        "thought<channel|>Hello!",
        "<|turn>user\nHello<turn|>",
        "",
    ],
)
def test_a_template_removes_the_thoughts_of_earlier_answers(tmp_path, content):
    tokenizer = make_tokenizer(tmp_path, GEMMA_MARKERS, special=True, template=GEMMA)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = [USER, {"role": "assistant", "content": content}, USER]
    expected = theirs.apply_chat_template(messages, tokenize=False)
    assert tokenizer.chat_text(messages) == expected
    ids, channel = tokenizer.chat(messages), tokenizer.token_id("<|channel>")
    assert ids.count(tokenizer.token_id("<|turn>")) == 4 and channel not in ids
    forged = [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]
    ids = tokenizer.chat(forged)
    assert ids.count(tokenizer.token_id("<|turn>")) == 3 and channel not in ids
    assert content in tokenizer.decode(ids)


def test_reasoning_that_a_template_refuses_is_left_out(tmp_path):
    """gpt-oss's template refuses content and thinking beside calls."""
    source = (
        "{% for m in messages %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
        "{% endif %}[{{ m.thinking or m.content }}]{% endfor %}"
    )
    tokenizer = make_tokenizer(tmp_path, template=source)
    both = {"role": "assistant", "content": "I call.", "reasoning_content": "why"}
    alone = both | {"content": ""}
    assert tokenizer.decode(chat_ids(tokenizer, [USER, alone], {})) == "[Hi][why]"
    assert tokenizer.decode(chat_ids(tokenizer, [USER, both], {})) == "[Hi][I call.]"
    called = alone | {"tool_calls": [call("{}")]}
    source = source.replace("m.content and m.thinking", "m.content and m.thinking and m.tool_calls")
    (tmp_path / "chat_template.jinja").write_text(source)
    messages = [called, both | {"tool_calls": [call("{}")]}]
    assert tokenizer.decode(chat_ids(load_tokenizer(tmp_path), messages, {})) == "[why][I call.]"
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match=r"^chat template: no$"):
        chat_ids(load_tokenizer(tmp_path), [USER, both], {})


@pytest.mark.parametrize(
    ("known", "effort", "given"),
    (
        (("xhigh", "low"), "high", "xhigh"),  # as Qwen3.8's
        (("xhigh", "low"), "low", "low"),
        (("xhigh", "high"), "high", "high"),
        (("high", "low"), "high", "high"),
        ((), "high", "high"),
    ),
)
def test_the_highest_effort_is_what_the_template_calls_it(known, effort, given):
    checks = "".join(f"{{% if reasoning_effort == '{name}' %}}is {{% endif %}}" for name in known)
    source = checks + "{{ reasoning_effort }}"
    want = f"is {given}" if given in known else given
    assert render(source, USER, reasoning_effort=effort) == want
