"""The chat page in headless Chromium, with a scripted server in place of a model."""

import json
import os
import re
from pathlib import Path

import pytest
from scripted_page import CONTINUED, ESCAPE, Page, content

from scripts.capture_page import wait_until
from server.page_files import PAGE_HEADERS

pytest_plugins = ("scripted_page",)

MARKDOWN = """# Sorting

Merge sort is **stable** and *fast*: see [its page](https://example.org/merge_(sort)).

1. Split the list
   - in two halves
   - of `n // 2` items
2. Merge them

```python
def merge(left, right):
    return sorted(left + right)  # <b>not bold</b>
```

| name | average | memory |
|:-----|:-------:|-------:|
| bubble | n^2 | 1 |
| merge | n log n | n |

> A quote
> of two lines

- [x] done
- [ ] open

A snake_case_name, ~~old~~ text, \\*no emphasis\\* and &lt;b&gt;.
"""
EVIL = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">
[a](javascript:window.hacked=3) [b](data:text/html,x) [c](//evil.example) <javascript:alert(1)>
![picture](https://example.org/x.png) https://example.org/?a=1&b=<b> [d](JaVaScRiPt:x)

```"><script>window.hacked=4</script>
</code></pre><script>window.hacked = 5</script>
```
| <svg onload=window.hacked=6> | x |
|---|---|
| <a href="javascript:window.hacked=7">x</a> | `<iframe src=javascript:window.hacked=8>` |
"""


# Text -----------------------------------------------------------------------------------------


def test_markdown_is_rendered_and_its_tokens_are_colored(page, serve):
    server = serve({"sort": content(MARKDOWN)})
    page.open(server)
    page.colors()
    page.ask("sort")
    assert page.texts(".answer h3") == ["Sorting"]
    assert page.texts(".answer strong") == ["stable"] and page.texts(".answer em") == ["fast"]
    assert page.texts(".answer ol > li > ul > li") == ["in two halves", "of n // 2 items"]
    assert page.texts(".answer pre code") == [
        "def merge(left, right):\n    return sorted(left + right)  # <b>not bold</b>"
    ]
    assert page.text(".code-head span") == "python"
    rows = page.run("return [...document.querySelectorAll('tr')].map(r => r.innerText.split('\t'))")
    assert rows[0] == ["name", "average", "memory"] and rows[2][1] == "n log n"
    assert page.run("return [...document.querySelectorAll('.task input')].map(e => e.checked)") == [
        True,
        False,
    ]
    assert page.texts(".answer > p")[-1] == "A snake_case_name, old text, *no emphasis* and <b>."
    links = page.run("""return [...document.querySelectorAll('.answer a')]
        .map(a => [a.textContent, a.href, a.rel, a.target])""")
    assert links == [
        ["its page", "https://example.org/merge_(sort)", "noopener noreferrer", "_blank"]
    ]
    colors = "return [...document.querySelectorAll('.token')].map(t => t.style.background)"
    before = page.run(colors)
    assert len(set(before)) > 10 and "merge" in "".join(page.texts("pre .token"))
    page.run("const l = document.getElementById('layer'); l.value = 3; l.onchange()")
    assert page.run(colors) != before
    page.click("#colors")
    transparent = "rgba(0, 0, 0, 0)"
    shown = "return getComputedStyle(document.querySelector('.token')).backgroundColor"
    assert page.run(shown) == transparent
    assert not page.errors()


def test_a_streamed_text_is_rendered_as_the_whole_text(page, serve):
    page.open(serve())
    same = page.run_async(
        """
        const {TextView} = await import('/page/render.js');
        const [hosts, texts] = [[0, 0].map(() => document.createElement('div')), arguments[0]];
        const different = [];
        for (const text of texts) {
            let source = '';
            const pieces = (start, length, shown) => [shown ?? source.slice(start, start + length)];
            const [streamed, whole] = hosts.map(host => new TextView(host, pieces));
            for (let end = 1; end < text.length; end++) {
                source = text.slice(0, end);
                streamed.update(source, {isPlain: false, isFinal: false});
            }
            source = text;
            streamed.update(source, {isPlain: false, isFinal: false});
            whole.update(source, {isPlain: false, isFinal: true});
            if (hosts[0].innerHTML !== hosts[1].innerHTML) different.push(text);
        }
        return different""",
        [MARKDOWN, EVIL, "a\n- b\n\n  c\n1. d\n```\ne", "x\n===\ny\n---\n> z"],
    )
    assert same == []


def test_long_strange_texts_do_not_block_the_page(page, serve):
    page.open(serve())
    size = 20_000
    strange = [
        "[",
        "*a ",
        "**a ",
        "> ",
        "`a``",
        "\\(",
        "|a",
        "- ",
        "x\n",
        "![a](",
        "<",
        "http://a(",
        "$a ",
        "$a$",
        "$$ ",
        "$$\n",
        "\\[\n",
        '```python\n""" \' f(',
    ]
    slowest = page.run_async(
        """
        const {TextView} = await import('/page/render.js');
        let slowest = 0;
        for (const source of arguments[0]) {
            const pieces = (start, length, shown) => [shown ?? source.slice(start, start + length)];
            const begin = performance.now();
            const view = new TextView(document.createElement('div'), pieces);
            view.update(source, {isPlain: false, isFinal: true});
            slowest = Math.max(slowest, performance.now() - begin);
        }
        return slowest""",
        [text * (size // len(text)) for text in strange],
    )
    assert slowest < 3000  # ms


def test_a_models_text_can_neither_run_nor_load_anything(page, serve):
    page.open(serve({"attack": content(EVIL)}, layers=2))
    page.ask("attack")
    assert page.run("return window.hacked ?? null") is None
    assert page.count("#log :is(script, img, svg, iframe, object, style)") == 0
    links = page.run(
        "return [...document.querySelectorAll('#log a')].map(a => [a.protocol, a.rel])"
    )
    assert links and all(link == ["https:", "noopener noreferrer"] for link in links)
    assert "<script>window.hacked = 1</script>" in page.text(".answer")
    assert "javascript:window.hacked=3" in page.text(".answer")
    loaded = page.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert all(name.startswith("http://127.0.0.1") for name in loaded)
    policy = PAGE_HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy


def test_plain_text_of_a_model_without_a_template_is_exact(page, serve):
    text = "    return __file__\n\n\n# *a*\n> b"
    server = serve({"def f():\n": content(text)}, chat_template=False)
    page.open(server)
    assert "continues your text" in page.text(".welcome h2") and page.count(".example") == 3
    page.ask("def f():\n")
    assert page.text(".answer") == text


def test_code_is_copied(page, serve):
    page.open(serve({"sort": content(MARKDOWN)}))
    page.ask("sort")
    page.run("navigator.clipboard.writeText = async text => { window.copied = text }")
    page.click(".code-head button")
    wait_until(lambda: page.text(".code-head button") == "Copied")
    assert page.run("return window.copied").startswith("def merge(left, right):\n    return")
    page.click(".assistant .tools button", "Copy")
    wait_until(lambda: page.run("return window.copied") == MARKDOWN)


def test_reasoning_is_folded(page, serve):
    reply = [{"reasoning_content": "I think of **two**."}, {"content": "Two."}]
    page.open(serve({"1 + 1": reply}))
    page.ask("1 + 1")
    assert page.text(".reasoning summary").startswith("Reasoning")
    assert page.run("return document.querySelector('.reasoning').open") is False
    assert page.text(".reasoning-text") == "I think of two." and page.text(".answer") == "Two."


def test_tool_calls_are_shown_and_answered(page, serve):
    start = {"index": 0, "id": "call_1", "type": "function"}
    calls = [
        {"tool_calls": [{**start, "function": {"name": "weather", "arguments": '{"city": '}}]},
        {
            "tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}],
            "finish": "tool_calls",
        },
    ]
    server = serve({"sun?": calls, "17 degrees": content("It is 17 degrees.")})
    page.open(server)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    page.run(f"document.getElementById('tools').value = {json.dumps(json.dumps(tools))}")
    page.ask("sun?")
    assert server.requests[0]["tools"] == tools
    assert page.text(".call code") == "weather"
    assert page.text(".call pre") == '{\n  "city": "Paris"\n}'
    page.run("document.querySelector('.result textarea').value = '17 degrees'")
    page.click(".result button")
    page.wait_for_the_end()
    call, result = server.requests[1]["messages"][-2:]
    assert call["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"city": "Paris"}',
    }
    assert result == {"role": "tool", "content": "17 degrees", "tool_call_id": "call_1"}
    assert page.texts(".answer")[-1] == "It is 17 degrees." and page.count(".result") == 0


# Conversations --------------------------------------------------------------------------------

SLOW = content("word " * 400, pause=0.02)


def test_each_answer_is_scrolled_to_unless_the_user_scrolls_up(page, serve):
    page.open(serve({"long": content("line  \n" * 80, pause=0.002)}), height=500)
    distance = """const l = document.getElementById('log');
        return l.scrollHeight - l.scrollTop - l.clientHeight"""
    for _ in range(2):
        page.ask("long")
        wait_until(lambda: page.run(distance) < 5)
    page.run("document.getElementById('log').scrollTop = 0")
    wait_until(lambda: not page.run("return document.getElementById('latest').hidden"))
    page.ask("long", wait=False)
    wait_until(lambda: page.count(".running .token") > 5)
    assert page.run(distance) < 40
    page.run("document.getElementById('log').scrollTop -= 200")
    page.wait_for_the_end()
    assert page.run(distance) > 100
    page.click("#latest")
    wait_until(lambda: page.run(distance) < 5)


def test_answers_go_on_while_other_chats_are_shown(page, serve):
    server = serve({"go": SLOW, "next": content("second")})
    page.open(server)
    page.ask("go", wait=False)
    wait_until(lambda: page.count(".token") > 3)
    page.click("#clear")
    assert page.count(".message") == 0 and page.text("#send") == "Send"
    assert page.count("#chats .live") == 1
    page.ask("next")
    assert page.texts(".answer") == ["second"] and server.disconnects == 0
    assert server.requests[1]["messages"] == [{"role": "user", "content": "next"}]
    page.click(".chat-title", "go")
    assert page.text("#send") == "Stop"
    shown = page.count(".token")
    wait_until(lambda: page.count(".token") > shown > 3)
    page.press(ESCAPE)
    wait_until(lambda: server.disconnects == 1)
    assert "Stopped after" in page.text(".assistant:last-child .note")
    assert page.count("#chats .live") == 0


def test_escape_stops_the_answer_and_continue_goes_on(page, serve):
    server = serve({"go": SLOW})
    page.open(server)
    page.ask("go", wait=False)
    wait_until(lambda: page.count(".token") > 3)
    page.press(ESCAPE)
    wait_until(lambda: server.disconnects == 1)
    assert page.text("#status").startswith("stopped after")
    tokens = int(page.text("#status").split()[2])
    assert page.text("#context_text") == f"at least {tokens} of 4,096 tokens"
    kept = page.text(".answer")
    server.replies = {CONTINUED: content("the end")}
    page.click(".note button", "Continue")
    page.wait_for_the_end()
    assert page.text(".answer").startswith(kept.rstrip()) and "the end" in page.text(".answer")
    request = server.requests[1]
    assert [message["role"] for message in request["messages"]] == ["user", "assistant"]
    assert request["messages"][1]["content"].rstrip() == kept.rstrip()
    assert (request["continue_final_message"], request["add_generation_prompt"]) == (True, False)


def test_the_context_of_an_answer_without_usage_is_a_bound(page, serve):
    server = serve({"a": content("b c"), "go": SLOW, "wait": [5]})
    page.open(server)
    assert page.text("#context_text") == "0 of 4,096 tokens"  # an empty chat
    page.ask("wait", wait=False)
    wait_until(lambda: server.requests)
    page.press(ESCAPE)
    assert page.run("return document.getElementById('context').hidden")
    page.ask("a")
    assert page.text("#context_text") == "12 of 4,096 tokens"
    page.ask("go", wait=False)
    wait_until(lambda: page.count(".message:last-child .token") > 3)
    page.press(ESCAPE)
    tokens = int(page.text("#status").split()[2])
    assert page.text("#context_text") == f"at least {12 + tokens} of 4,096 tokens"
    page.ask("a")
    assert page.text("#context_text") == "12 of 4,096 tokens"


JUNK = (None, 5, "x", True, [], {}, [None], {"a": None}, -1.5, [[]])
MESSAGES = (
    *JUNK,
    *({"role": role, "content": junk} for role in ("user", "assistant", "tool") for junk in JUNK),
    *(
        {"role": "assistant", "content": "kept", name: junk}
        for name in ("reasoning", "tool_calls", "finish", "error", "usage", "rate", "count", "heat")
        for junk in (*JUNK, [{"function": None}], {"layers": 1e9, "experts": 1e9}, {"total": "x"})
    ),
    *({"role": junk, "content": "x"} for junk in JUNK),
)


def test_a_damaged_store_does_not_break_the_page(page, serve):
    server = serve({"next": content("fine")})
    page.open(server)
    chat = {"id": "a", "title": "whole", "updated": 9e12, "system": "", "messages": []}
    heat = {"layers": 2, "experts": 3, "active": 1, "tokens": 4, "values": "*" * 16}
    answers = [*MESSAGES, {"role": "assistant", "content": "last", "heat": heat}]
    chats = {"null": chat | {"messages": [None]}, "all": chat | {"messages": answers}}
    chats |= {f"{name}{n}": chat | {name: junk} for name in chat for n, junk in enumerate(JUNK)}
    chats |= {f"junk{n}": junk for n, junk in enumerate(JUNK)}
    kept = {f"moe-fast:chat:{id}": json.dumps(value) for id, value in chats.items()}
    kept |= {"moe-fast:chat:torn": '{"id": "torn", "mess', "moe-fast:chat:": "{}"}
    for settings in (5, [], None, {"system": 5, "temperature": {}, "tools": 7, "format": "x"}):
        kept["moe-fast:settings"] = json.dumps(settings)
        script = f"for (const [k, v] of Object.entries({json.dumps(kept)})) localStorage[k] = v"
        page.run(script)
        page.reload(server, "#all")
    assert page.texts(".answer")[-1] == "last" and "kept" in page.texts(".answer")
    opened = page.run("""const chats = () => document.querySelectorAll('.chat');
        for (let n = 0; n < chats().length; n++) chats()[n].click();
        return chats().length""")
    assert opened == 4 * len(JUNK) + 3 + 2  # three of JUNK are lists, which `messages` may be
    for id in ("null", "junk0", "torn", "messages3", "all"):
        page.reload(server, f"#{id}")
        page.ask("next")
        assert page.texts(".answer")[-1] == "fine"
    sent = server.requests[-1]["messages"]
    assert all(isinstance(m["content"], str) and isinstance(m["role"], str) for m in sent)
    assert not [error for error in page.errors() if server.url in error]


def test_a_cut_answer_is_continued(page, serve):
    replies = {"a ": content("b b ", finish="length"), "b b ": content("c")}
    server = serve(replies, chat_template=False)
    page.open(server)
    assert page.run("return document.getElementById('max_tokens').value") == "200"
    page.ask("a ")
    assert page.text(".assistant:last-child .note span") == "Cut at 3 tokens."
    page.click(".note button", "Continue")
    page.wait_for_the_end()
    assert page.text(".answer") == "b b c" and page.text(".assistant:last-child .note") == ""
    assert [message["content"] for message in server.requests[1]["messages"]] == ["a ", "b b "]
    assert page.text(".tools .hint").startswith("4 tokens")
    assert page.text("#context_text") == "11 of 4,096 tokens"


def test_a_limit_beyond_the_context_is_dropped(page, serve):
    error = {"message": "the context is 4096 tokens", "code": "context_length_exceeded"}
    server = serve({"x": [(400, error), {"content": "y"}]})
    page.open(server)
    page.run("document.getElementById('max_tokens').value = 4000")
    page.ask("x")
    assert page.text(".answer") == "y" and page.text(".assistant:last-child .note") == ""
    assert [request.get("max_tokens") for request in server.requests] == [4000, None]


def test_edit_and_regenerate_replace_the_later_messages(page, serve):
    server = serve({"one": content("1"), "two": content("2"), "three": content("3")})
    page.open(server)
    page.ask("one")
    page.ask("two")
    page.click(".assistant .tools button", "Regenerate")
    page.wait_for_the_end()
    assert page.texts(".answer") == ["1", "2"] and len(server.requests[2]["messages"]) == 3
    page.press("\ue013")  # up: edits the last message
    wait_until(lambda: page.count("textarea.edit") == 1)
    page.press(ESCAPE)
    wait_until(lambda: page.count("textarea.edit") == 0)
    page.run("[...document.querySelectorAll('.user .tools button')][0].click()")
    page.run("document.querySelector('textarea.edit').value = 'three'")
    page.click(".user .tools button", "Send again")
    page.wait_for_the_end()
    assert page.texts(".said") == ["three"] and page.texts(".answer") == ["3"]
    assert server.requests[3]["messages"] == [{"role": "user", "content": "three"}]


def test_replaced_messages_can_be_brought_back(page, serve):
    server = serve({"one": content("1"), "two": content("2")})
    page.open(server)
    page.ask("one")
    page.ask("two")
    page.run("document.querySelector('.assistant .tools button:nth-child(2)').click()")
    page.wait_for_the_end()
    assert page.texts(".said") == ["one"]
    page.click("#toast button", "Undo")
    assert page.texts(".said") == ["one", "two"] and page.texts(".answer") == ["1", "2"]


def test_conversations_are_kept_renamed_and_deleted(page, serve):
    server = serve({"first": content("**1**"), "second": content("2")})
    page.open(server)
    page.ask("first")
    address = page.run("return location.hash")
    page.click("#clear")
    page.ask("second")
    page.reload(server, address)
    assert page.texts(".chat") == ["second", "first"]
    assert page.text(".answer strong") == "1"
    page.run("document.querySelector('[aria-label=\"Rename first\"]').click()")
    page.run("""const input = document.querySelector('#chats input'); input.value = 'A <b>';
        input.onkeydown({key: 'Enter', stopPropagation() {}})""")
    assert page.texts(".chat") == ["second", "A <b>"]
    page.run("document.querySelector('[aria-label=\"Delete A <b>\"]').click()")
    assert page.texts(".chat") == ["second"] and page.count(".message") == 0
    page.click("#toast button", "Undo")
    assert page.texts(".chat") == ["second", "A <b>"]


def test_the_system_prompt_and_settings_are_sent_and_kept(page, serve):
    server = serve({"x": content("y")})
    page.open(server)
    page.run("""const values = {system: 'Be brief.', temperature: 0.3, top_p: 0.5};
    for (const [id, value] of Object.entries(values)) {
        const input = document.getElementById(id);
        input.value = value;
        (input.oninput ?? input.onchange)();
    }""")
    page.ask("x")
    body = server.requests[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_p"], body["routing"]) == (0.3, 0.5, True)
    assert "max_tokens" not in body
    page.click("#open_settings")
    page.click("#settings header button")
    assert page.run("return document.getElementById('settings').open") is False
    page.reload(server)
    assert page.run("return document.getElementById('temperature').value") == "0.3"
    assert page.run("return document.getElementById('system').value") == "Be brief."


# Errors ---------------------------------------------------------------------------------------


def test_a_broken_connection_keeps_the_text(page, serve):
    server = serve({"x": [{"content": "some text"}, ConnectionError()]})
    page.open(server)
    page.ask("x")
    assert page.text(".answer") == "some text"
    assert "connection broke" in page.text(".assistant:last-child .note") and "Retry" in page.text(
        ".assistant:last-child .note"
    )
    server.replies[CONTINUED] = content(" and more")
    page.click(".note button", "Retry")
    page.wait_for_the_end()
    assert (
        page.text(".answer") == "some text and more"
        and page.text(".assistant:last-child .note") == ""
    )


def test_a_stopped_server_is_named_and_retried(page, serve):
    server = serve()
    page.open(server)
    server.close()
    page.ask("x")
    assert page.texts(".said") == ["x"]
    assert "server does not answer" in page.text(
        ".assistant:last-child .note"
    ) and "serve.py" in page.text(".assistant:last-child .note")
    assert "fetch" not in page.text("#log")
    again = serve({"x": content("here")}, port=server.port)
    page.click(".note button", "Retry")
    page.wait_for_the_end()
    assert page.texts(".answer") == ["here"] and len(again.requests) == 1


def test_a_failed_message_is_not_sent_again(page, serve):
    refusal = (400, {"message": "temperature 9: it must be from 0 to 2"})
    server = serve({"bad": [refusal], "good": content("yes")})
    page.open(server)
    page.ask("bad")
    assert page.text(".assistant:last-child .note span") == "temperature 9: it must be from 0 to 2"
    page.ask("good")
    assert page.texts(".said") == ["bad", "good"]
    assert server.requests[1]["messages"] == [{"role": "user", "content": "good"}]


# Experts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ((8, 8, 2), (48, 128, 8), (94, 512, 10)))
def test_experts_of_any_shape_fit_on_the_screen(page, serve, shape):
    layers, experts, active = shape
    server = serve(
        {"x": content("one two three four " * 6)}, layers=layers, experts=experts, active=active
    )
    page.open(server)
    page.click("#open_experts")
    page.ask("x")
    assert f"{layers} layers, " in page.text("#experts_scope")
    page.point(".answer .token:nth-of-type(3)")
    wait_until(lambda: page.run("return document.getElementById('card').offsetWidth") > 0)
    width, height, right, bottom = (
        page.run("""const b = document.getElementById('card').getBoundingClientRect();
        return [b.width, b.height, b.right, b.bottom]""")
    )
    assert width < 500 and height < 500 and right <= 1280 and bottom <= 800
    size = "const h = document.getElementById('heat'); return [h.clientWidth, h.clientHeight]"
    width, height = page.run(size)
    assert 250 < width < 640 and 100 < height < 500
    page.click("#enlarge")
    assert page.run(size)[0] > 1000


def test_the_heat_map_counts_tokens_and_finds_them(page, serve):
    words = "red green blue red red"
    server = serve({"x": content(words)})
    page.open(server)
    page.click("#open_experts")
    page.ask("x")
    tokens = re.findall(r"\s?\w+", words)
    chosen = [experts[2] for experts in server.routing(tokens)["experts"]]
    page.run("document.getElementById('heat').focus()")
    for key in ["\ue015"] * 3:  # down: the first press marks layer 0, expert 0
        page.press(key)
    used = sum(0 in experts for experts in chosen)
    assert page.text("#readout").startswith(f"Layer 2, expert 0: {used} of 5 tokens")
    expert = chosen[0][0]
    for _ in range(expert):
        page.press("\ue014")  # right
    assert page.text("#readout").startswith(f"Layer 2, expert {expert}:")
    page.press("\ue007")
    found = [token for token, experts in zip(tokens, chosen, strict=True) if expert in experts]
    assert page.texts(".token.found") == found
    assert page.run("return document.getElementById('layer').value") == "2"
    page.run("const p = document.getElementById('position'); p.value = 2; p.oninput()")
    assert page.text("#position_text") == '2 of 5: " green"'
    assert page.texts(".token.current") == [" green"]
    assert "2 tokens" in page.text("#experts_scope")


def test_the_map_fills_while_the_answer_streams(page, serve):
    page.open(serve({"go": SLOW}))
    page.click("#open_experts")
    page.ask("go", wait=False)
    counted = """return Number((/(\d+) tokens/.exec(
        document.getElementById('experts_scope').textContent) ?? [0, 0])[1])"""
    wait_until(lambda: page.run(counted) > 5)
    first = page.run(counted)
    wait_until(lambda: page.run(counted) > first)
    page.press(ESCAPE)


# Themes, widths, keyboard ---------------------------------------------------------------------


def test_dark_mode_follows_the_system_and_the_switch(page, serve):
    server = serve()
    page.open(server)
    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    page.emulate("dark")
    dark = page.run(background)
    assert dark != light
    choose = "const t = document.getElementById('theme'); t.value = '{}'; t.onchange()"
    page.run(choose.format("light"))
    assert page.run(background) == light
    page.emulate("light")
    page.run(choose.format("dark"))
    page.reload(server)
    assert page.run(background) == dark


@pytest.mark.parametrize("width", (375, 768, 1280, 2560))
def test_every_width_has_room(page, serve, width):
    long = "A" * 300 + "\n\n```\n" + "code " * 80 + "\n```\n\n|" + "cell|" * 30 + "\n|" + "-|" * 30
    page.open(serve({"x": content(MARKDOWN + long)}), width=width)
    page.ask("x")
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.run("return document.getElementById('log').scrollWidth") <= width
    text, send = page.run("""return ['text', 'send'].map(id =>
        document.getElementById(id).getBoundingClientRect().right)""")
    assert text <= send <= width
    if width < 800:
        page.click("#open_sidebar")
        left = "return document.getElementById('clear').getBoundingClientRect().left"
        wait_until(lambda: page.run(left) >= 0)
        page.press(ESCAPE)
        page.click("#open_experts")
        assert page.run("return document.getElementById('heat').clientWidth") > 250


def test_all_controls_have_names(page, serve):
    page.open(serve({"x": content(MARKDOWN)}))
    page.ask("x")
    unnamed = page.run("""return [...document.querySelectorAll('button, input, select, textarea')]
        .filter(e => !e.hidden)
        .filter(e => !(e.textContent.trim() && e.tagName === 'BUTTON') && !e.labels?.length
            && !e.getAttribute('aria-label')).map(e => e.outerHTML)""")
    assert unnamed == []


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_axe_finds_nothing_serious(page, serve, scheme):
    """MOE_FAST_AXE names the file axe.min.js of the npm package axe-core."""
    if not os.environ.get("MOE_FAST_AXE"):
        pytest.skip("set MOE_FAST_AXE to the path of axe.min.js: npm pack axe-core")
    axe = Path(os.environ["MOE_FAST_AXE"]).read_text()
    text = MARKDOWN + "\n\n$$\nx = \\frac{1}{2}\n$$\n\n" + "word " * 60
    reply = [{"reasoning_content": "I think."}, {"content": text}]
    server = serve({"x": [*reply, {"content": "", "finish": "length"}], "y": [ConnectionError()]})
    server.variables = ["enable_thinking", "reasoning_effort"]
    page.open(server)
    page.emulate(scheme)
    states = {"welcome": "return"}
    for dialog in ("settings", "shortcuts"):
        states[dialog] = f"document.getElementById('{dialog}').showModal()"
    for name, action in states.items():
        page.run(action)
        assert serious(page, axe) == [], name
        page.run("document.querySelector('dialog[open]')?.close()")
    page.ask("x")
    page.click(".assistant .tools button", "Regenerate")
    page.wait_for_the_end()
    page.run("document.querySelector('details').open = true")
    wait_until(lambda: page.count(".katex-html") and page.count("[class^=hl-]"))
    page.give_file("#pick_files", "notes.txt", "kept")
    wait_until(lambda: page.count("#files li") == 1)
    assert serious(page, axe) == [], "answer"
    page.colors()
    page.click("#open_experts")
    page.choose("#compare", "0")
    assert serious(page, axe) == [], "experts"
    page.click("#close_experts")
    page.click("#colors")
    page.ask("y")
    assert serious(page, axe) == [], "error"
    page.size(375, 700)
    assert serious(page, axe) == [], "phone"
    page.click("#open_sidebar")
    page.choose("#search", "word")
    assert serious(page, axe) == [], "chats on a phone"


def serious(page: Page, axe: str) -> list:
    """Return axe-core's serious and critical findings."""
    page.run(axe)
    found = page.run_async("return (await axe.run()).violations")
    return [
        (item["id"], [node["html"][:120] for node in item["nodes"]][:3])
        for item in found
        if item["impact"] in ("serious", "critical")
    ]
