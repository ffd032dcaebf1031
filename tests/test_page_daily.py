"""The chat page in daily use: drafts, versions, files, search, settings, formulas, shortcuts."""

import json
import re

import pytest
from scripted_page import CONTINUED, ESCAPE, content

from scripts.capture_page import wait_until

pytest_plugins = ("scripted_page",)
CONTROL, SHIFT = "\ue009", "\ue008"
SLOW = content("word " * 400, pause=0.02)
# The number of tokens in IndexedDB, of the answer of the first chat that was kept.
TRACED = """const traces = await import('/page/traces.js');
    const {messages} = JSON.parse(Object.entries(localStorage)
        .find(([key]) => key.startsWith('moe-fast:chat'))?.[1] ?? '{"messages": []}');
    window.name = messages[1]?.id ?? window.name;  // the window's name outlives a reload
    return (await traces.loadTrace(window.name))?.length ?? 0"""
CODE = "```python\ndef f(x):  # one\n    return 'two', 3\n```\n"
MATHS = r"""Roots of $ax^2 + b$ cost $5 and $6, or \(\vec{v}\).

$$
x = \frac{-b}{2a}

+ \unknown
$$

$$ y_1 * y_2 * z $$

[x](https://a.example) and \( \href{javascript:alert(1)}{a} \) and \( \includegraphics{b} \).
"""


# Answers and drafts -------------------------------------------------------------------------------


def test_colors_survive_a_reload(page, serve):
    server = serve({"x": [{"reasoning_content": "why not"}, {"content": "one **two** three"}]})
    page.open(server)
    page.colors()
    page.ask("x")
    shown = """return [...document.querySelectorAll('.token')]
        .map(token => [token.textContent, token.style.background])"""
    before, address = page.run(shown), page.run("return location.hash")
    assert len(before) > 5
    wait_until(lambda: page.run_async(TRACED) >= len(before))
    page.reload(server, address)
    wait_until(lambda: page.count(".token") == len(before))
    assert page.run(shown) == before
    assert page.run("return document.body.classList.contains('colored')")
    page.click("#clear")
    page.click(".chat-title", "x")
    wait_until(lambda: page.run(shown) == before)


def test_traces_of_deleted_chats_are_removed(page, serve):
    server = serve({"x": content("one two")})
    page.open(server)
    page.ask("x")
    wait_until(lambda: page.run_async(TRACED) == 2)
    page.run("document.querySelector('[aria-label=\"Delete x\"]').click()")
    page.reload(server)
    wait_until(lambda: page.run_async(TRACED) == 0)


@pytest.mark.parametrize("is_continued", (True, False))
def test_a_reload_during_an_answer_keeps_it(page, serve, is_continued):
    server = serve({"go": SLOW})
    page.open(server)
    page.ask("go", wait=False)
    wait_until(lambda: page.count(".token") > 5)
    page.reload(server, page.run("return location.hash"))
    assert page.text(".answer").startswith("word word")
    assert page.text(".note span").startswith("The page was closed after")
    wait_until(lambda: server.disconnects == 1)
    if is_continued:
        server.replies[CONTINUED] = content(" end")
        page.click(".note button", "Continue")
        page.wait_for_the_end()
        assert page.text(".answer").endswith("end") and page.text(".note") == ""


def test_a_browser_that_is_killed_loses_two_seconds_of_an_answer(page, serve):
    server = serve({"go": [{"content": "word " * 250, "pause": 0.02}]})
    page.open(server)
    page.run("addEventListener('pagehide', event => event.stopImmediatePropagation(), true)")
    page.ask("go", wait=False)
    wait_until(lambda: page.count(".token") > 150)
    saved = page.run("""return Object.entries(localStorage)
        .find(([key]) => key.startsWith('moe-fast:chat'))[1]""")
    answer = json.loads(saved)["messages"][1]
    assert answer["content"].count("word") > 20 and answer["finish"] == "stopped: closed"
    assert page.run_async(TRACED) > 20
    page.press(ESCAPE)


def test_each_chat_keeps_its_draft(page, serve):
    server = serve({"a": content("1"), "b": content("2")})
    page.open(server)
    page.ask("a")
    page.choose("#text", "not sent")
    page.give_file("#pick_files", "notes.txt", "kept")
    wait_until(lambda: page.texts("#files strong") == ["notes.txt"])
    page.click("#clear")
    assert page.run("return document.getElementById('text').value") == ""
    page.choose("#text", "for a new chat")
    page.click(".chat-title", "a")
    value = "return document.getElementById('text').value"
    assert page.run(value) == "not sent" and page.texts("#files strong") == ["notes.txt"]
    page.reload(server, page.run("return location.hash"))
    assert page.run(value) == "not sent" and page.texts("#files strong") == ["notes.txt"]
    page.click("#clear")
    assert page.run(value) == "for a new chat"
    page.ask("b")
    page.click("#clear")
    assert page.run(value) == ""  # what was sent is no draft


def test_versions_of_answers_and_questions(page, serve):
    server = serve({"one": content("1"), "two": content("2"), "uno": content("11")})
    page.open(server)
    page.ask("one")
    page.ask("two")
    server.replies["one"] = content("1b")
    page.run("document.querySelector('.assistant .tools button:nth-child(2)').click()")
    page.wait_for_the_end()
    assert page.texts(".answer") == ["1b"] and page.texts(".versions span") == ["2 of 2"]
    page.click("[aria-label='Version before']")
    assert page.texts(".answer") == ["1", "2"] and page.texts(".said") == ["one", "two"]
    page.run("document.querySelector('.user .tools button').click()")
    page.run("document.querySelector('textarea.edit').value = 'uno'")
    page.click(".user .tools button", "Send again")
    page.wait_for_the_end()
    assert page.texts(".said") == ["uno"] and page.texts(".answer") == ["11"]
    page.reload(server, page.run("return location.hash"))
    assert page.texts(".said") == ["uno"] and page.texts(".versions span") == ["2 of 2"]
    page.run("document.querySelector('.user [aria-label=\"Version before\"]').click()")
    assert page.texts(".answer") == ["1", "2"]
    page.run("document.querySelector('.assistant [aria-label=\"Version after\"]').click()")
    assert page.texts(".answer") == ["1b"]
    assert page.run("""return document.querySelector('.assistant [aria-label="Version after"]')
        .disabled""")


def test_a_failed_answer_is_no_version(page, serve):
    server = serve({"x": [(400, {"message": "no"}), {"content": "yes"}]})
    page.open(server)
    page.ask("x")
    page.click(".note button", "Retry")
    page.wait_for_the_end()
    assert page.texts(".answer") == ["yes"] and page.count(".versions") == 0


def test_statistics_are_under_each_answer(page, serve):
    server = serve({"x": [0.2, {"content": "one two three", "pause": 0.01}]})
    page.open(server)
    page.ask("x")
    line = page.text(".tools .hint")
    assert re.fullmatch(
        r"3 tokens at [\d.]+/s · first token after [23]\d\d ms · Scripted-MoE, int4 · "
        r"context 13 of 4,096",
        line,
    ), line
    page.reload(server, page.run("return location.hash"))
    assert page.text(".tools .hint") == line


# Files, search, transfer --------------------------------------------------------------------------


def test_text_files_are_attached(page, serve):
    server = serve({})
    page.open(server)
    page.give_file("#pick_files", "a.py", "x = '```'\n")
    wait_until(lambda: page.texts("#files .file-name") == ["a.py 1 line"])
    page.give_file("#pick_files", "b.bin", "\x00\x01")
    wait_until(lambda: "b.bin is not a text" in page.text("#toast"))
    page.give_file("#pick_files", "c.txt", "drop me")
    wait_until(lambda: page.count("#files li") == 2)
    page.click("[aria-label='Remove c.txt']")
    sent = "File a.py:\n````\nx = '```'\n````\n\nWhat is it?"
    server.replies[sent] = content("Python")
    page.ask("What is it?")
    assert server.requests[0]["messages"] == [{"role": "user", "content": sent}]
    assert page.count("#files li") == 0 and page.texts(".said") == ["What is it?"]
    assert page.texts(".sent-files pre") == ["x = '```'\n"]


def test_a_file_is_plain_text_for_a_model_without_a_template(page, serve):
    server = serve({"import os\n# more": content("x")}, chat_template=False)
    page.open(server)
    page.give_file("#pick_files", "a.py", "import os\n")
    wait_until(lambda: page.count("#files li") == 1)
    page.ask("# more")
    assert page.text(".answer") == "x"


def test_chats_are_searched(page, serve):
    server = serve(
        {"first": content("a long text about penguins and more"), "second": content("2")}
    )
    page.open(server)
    page.ask("first")
    page.click("#clear")
    page.ask("second")
    page.choose("#search", "PENGUIN")
    assert page.texts(".chat-title") == ["first"] and "about penguins" in page.text(".snippet")
    page.choose("#search", "irs")
    assert page.texts(".chat-title") == ["first"] and page.count(".snippet") == 0
    page.choose("#search", "PENGUIN")
    page.run("document.getElementById('search').focus()")
    page.press("\ue007")
    assert page.texts(".said") == ["first"]
    page.choose("#search", "nothing like it")
    assert page.count(".chat") == 0 and page.text("#no_chats") == "No chat has this text."
    page.press(ESCAPE)
    wait_until(lambda: page.count(".chat") == 2)


def test_chats_are_exported_and_imported(page, serve):
    server = serve({"one": content("1"), "two": content("2")})
    page.open(server)
    page.ask("one")
    page.click(".assistant .tools button", "Regenerate")
    page.wait_for_the_end()
    page.click("#clear")
    page.ask("two")
    page.catch_downloads()
    page.click("#export")
    page.run("document.querySelector('[aria-label=\"Export one\"]').click()")
    (name, text), (title, markdown) = page.downloads()
    assert name == "moe-fast-chats.json" and title == "one.md"
    assert markdown == "# one\n\n## You\n\none\n\n## Scripted-MoE\n\n1\n"
    page.open(server)  # the storage is empty
    page.give_file("#pick_import", "chats.json", text)
    wait_until(lambda: sorted(page.texts(".chat-title")) == ["one", "two"])
    page.click(".chat-title", "one")
    assert page.texts(".answer") == ["1"] and page.texts(".versions span") == ["2 of 2"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    page.give_file("#pick_import", "saved.json", json.dumps(messages))
    wait_until(lambda: page.texts(".said") == ["hi"])
    assert page.run("return document.getElementById('system').value") == "Be brief."


@pytest.mark.parametrize("text", ("{", "5", "[]", '{"chats": [{"messages": [{}]}]}', "null"))
def test_a_file_without_chats_is_refused(page, serve, text):
    page.open(serve())
    page.give_file("#pick_import", "x.json", text)
    wait_until(lambda: "give one that Export has written" in page.text("#toast"))
    assert page.count(".chat") == 0


# Settings -----------------------------------------------------------------------------------------


def test_sampling_settings_and_presets(page, serve):
    server = serve({"x": content("y")})
    page.open(server)
    for name, value in {"top_k": "40", "min_p": "0.1", "seed": "7", "temperature": "0.5"}.items():
        page.choose(f"#{name}", value)
    assert page.run("return document.getElementById('preset').value") == ""
    page.ask("x")
    sent = {name: server.requests[0][name] for name in ("top_k", "min_p", "seed", "temperature")}
    assert sent == {"top_k": 40, "min_p": 0.1, "seed": 7, "temperature": 0.5}
    page.click("#open_settings")
    page.choose("#preset_name", "Mine")
    page.run("document.getElementById('preset_name').focus()")
    page.press("\ue007")  # Enter
    assert page.run("return document.getElementById('settings').open")
    page.choose("#preset", "Greedy")
    value = "return ['temperature', 'top_k', 'min_p'].map(id => document.getElementById(id).value)"
    assert page.run(value) == ["0", "", ""]
    page.reload(server)
    assert page.run("return document.getElementById('preset').value") == "Greedy"
    page.choose("#preset", "Mine")
    assert page.run(value) == ["0.5", "40", "0.1"]
    page.click("#delete_preset")
    assert "Mine" not in page.texts("#preset option")


def test_thinking_and_effort_are_there_if_the_template_has_them(page, serve):
    server = serve({"x": content("y")})
    page.open(server)
    hidden = "return ['thinking', 'effort'].map(id => document.getElementById(id).hidden)"
    assert page.run(hidden) == [True, True]
    page.choose("#thinking", "on")  # chosen for another model
    page.ask("x")
    assert not {"chat_template_kwargs", "reasoning_effort"} & set(server.requests[0])
    server.variables = ["enable_thinking", "messages", "reasoning_effort"]
    page.reload(server)
    assert page.run(hidden) == [False, False]
    page.choose("#thinking", "off")
    page.choose("#effort", "high")
    page.ask("x")
    assert server.requests[1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert server.requests[1]["reasoning_effort"] == "high"
    page.choose("#thinking", "")
    page.choose("#effort", "")
    page.ask("x")
    assert not {"chat_template_kwargs", "reasoning_effort"} & set(server.requests[2])


# Formulas and code --------------------------------------------------------------------------------


def test_formulas_are_rendered(page, serve):
    page.open(serve({"x": content(MATHS), "y": content("plain")}))
    page.ask("y")
    loaded = "return performance.getEntriesByType('resource').map(e => e.name)"
    assert not [name for name in page.run(loaded) if "vendor" in name]
    page.ask("x")
    wait_until(lambda: page.count(".answer .katex-html") == 3)
    sources = page.texts(".formula:not(:has(.shown)) .source")
    assert len(sources) == 3 and "\\unknown" in sources[0] and "href" in sources[1]
    assert "cost $5 and $6, or" in page.run(
        "return document.querySelectorAll('.answer')[1].innerText"
    )
    assert (
        page.run("""return document.querySelector('.vlist svg, .overlay svg')
        .getBoundingClientRect().width""")
        > 2
    )
    assert page.count(".formula.display .katex-display") == 1
    assert page.run("return [...document.querySelectorAll('.answer a')].map(a => a.href)") == [
        "https://a.example/"
    ]
    assert page.count(".answer img") == 0
    page.colors()  # the tokens of the source have colors
    wait_until(
        lambda: page.run("""const f = document.querySelector('.formula:has(.shown)');
        return f.querySelector('.shown').offsetWidth === 0
            && f.querySelector('.source .token').offsetWidth > 0""")
    )
    assert not [error for error in page.errors() if "Refused" in error]


def test_streamed_formulas_and_code_are_rendered_as_the_whole_text(page, serve):
    page.open(serve({"x": content(MATHS + CODE)}))
    page.ask("x")
    wait_until(lambda: page.count(".katex-html") and page.count("[class^=hl-]"))
    different = page.run_async(
        """
        const {TextView} = await import('/page/render.js');
        return arguments[0].filter(text => {
            let source = '';
            const pieces = (start, length, shown) => [shown ?? source.slice(start, start + length)];
            const hosts = [0, 0].map(() => document.createElement('div'));
            const [streamed, whole] = hosts.map(host => new TextView(host, pieces));
            for (let end = 1; end <= text.length; end++) {
                source = text.slice(0, end);
                streamed.update(source, {isPlain: false, isFinal: false});
            }
            whole.update(source, {isPlain: false, isFinal: true});
            return hosts[0].innerHTML !== hosts[1].innerHTML
                || !hosts[0].querySelector('.formula, [class^=hl-]');
        })""",
        [MATHS, CODE, "a\n$$\nx\n\n- b", "- a\n  $$\n  x\n  $$\n- $b$", "> \\[\n> x\n> \\]\nc"],
    )
    assert different == []


def test_code_is_highlighted(page, serve):
    page.open(serve({"x": content(CODE + "\n```nolang\nif x\n```\n```c++\nint a;\n```")}))
    page.ask("x")
    wait_until(lambda: page.count("[class^=hl-]") > 3)
    assert page.texts("pre code")[0] == "def f(x):  # one\n    return 'two', 3"
    assert page.texts(".hl-keyword")[:2] == ["def", "return"]
    assert page.texts(".hl-comment") == ["# one"] and page.texts(".hl-string") == ["'two'"]
    assert page.texts(".hl-type") == ["int"]
    colors = """return ['keyword', 'string']
        .map(kind => getComputedStyle(document.querySelector('.hl-' + kind)).color)"""
    assert len(set(page.run(colors))) == 2
    page.colors()
    assert len(set(page.run(colors))) == 1  # ink, on the experts' colors


# Layout and keyboard ------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ("light", "dark"))
@pytest.mark.parametrize("width", (375, 1280))
def test_the_chat_has_the_width_and_the_header_one_row(page, serve, width, scheme):
    server = serve({"x": content("y " * 200)})
    server.variables = ["enable_thinking", "reasoning_effort"]
    page.open(server, width=width)
    page.emulate(scheme)
    page.ask("x")
    assert page.run("return document.getElementById('experts').hidden")
    tops = page.run("""return [...document.querySelectorAll('#center > header > *')]
        .map(e => e.getBoundingClientRect()).filter(b => b.width)
        .map(b => [Math.round(b.top + b.height / 2), b.right])""")
    assert max(top for top, _ in tops) - min(top for top, _ in tops) < 8
    assert max(right for _, right in tops) <= width
    center = page.run("return document.getElementById('center').getBoundingClientRect().width")
    assert center == (375 if width == 375 else 1280 - 264)
    tools = page.run("""return [...document.querySelectorAll('.box-tools > *')]
        .map(e => e.getBoundingClientRect().right)""")
    assert max(tools) <= width
    page.click("#open_experts")
    assert not page.run("return document.getElementById('experts').hidden")
    assert page.run("return document.documentElement.scrollWidth") <= width


def test_keyboard_shortcuts(page, serve):
    server = serve({"one": content("1"), "two": content("2")})
    page.open(server)
    page.ask("one")
    page.press(CONTROL, SHIFT, "o")
    wait_until(lambda: page.count(".message") == 0)
    page.ask("two")
    page.press(CONTROL, SHIFT, "\ue015")  # down: the older chat
    wait_until(lambda: page.texts(".said") == ["one"])
    page.press(CONTROL, SHIFT, "\ue013")
    wait_until(lambda: page.texts(".said") == ["two"])
    page.press(CONTROL, "k")
    assert page.run("return document.activeElement.id") == "search"
    page.press(CONTROL, SHIFT, "e")
    wait_until(lambda: not page.run("return document.getElementById('experts').hidden"))
    page.press(CONTROL, SHIFT, "l")
    assert page.run("return document.getElementById('colors').checked")
    page.run("navigator.clipboard.writeText = async text => { window.copied = text }")
    page.press(CONTROL, SHIFT, "y")
    wait_until(lambda: page.run("return window.copied") == "2")
    for key, dialog in ((",", "settings"), ("/", "shortcuts")):
        page.press(CONTROL, key)
        assert page.run(f"return document.getElementById('{dialog}').open")
        page.run(f"document.getElementById('{dialog}').close()")
    assert "search the chats" in page.texts("#shortcut_list dd")
