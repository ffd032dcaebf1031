"""A scripted server in place of a model, and headless Chromium that opens its page."""

import json
import random
import re
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from scripts.capture_page import Browser, wait_until
from server.page_files import PAGE_FILES, PAGE_HEADERS, page_type

ESCAPE = "\ue00c"  # a key of the W3C WebDriver protocol


class ScriptedServer:
    """Serves the page, and answers a chat by `replies[the last message]`.

    A reply is a list of deltas, dicts. Their texts are sent token by token. Other items: a number
    sleeps, an Exception breaks the connection, a tuple (status, error) refuses the request.
    """

    def __init__(self, layers=4, experts=8, active=2, chat_template=True, port=0):
        self.shape, self.chat_template = (layers, experts, active), chat_template
        self.replies: dict[str, list] = {}
        self.requests: list[dict] = []
        self.disconnects = 0
        self.context, self.variables = 4096, []
        handler = type("Handler", (Handler,), {"scripted": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def routing(self, tokens: list[str]) -> dict:
        """Return experts and weights that depend on the token and the layer alone."""
        layers, experts, active = self.shape
        found: dict[str, list] = {"tokens": tokens, "experts": [], "weights": []}
        for token in tokens:
            rows = []
            for layer in range(layers):
                draw = random.Random(f"{token} {layer}")
                favorites = random.Random(layer)
                power = favorites.uniform(0.6, 2.5)
                order = favorites.sample(range(experts), experts)
                chosen: list[int] = []
                while len(chosen) < active:
                    expert = order[int(experts * draw.random() ** power)]
                    chosen += [expert] if expert not in chosen else []
                weights = sorted((draw.random() ** 2 for _ in chosen), reverse=True)
                rows.append((chosen, [round(w / sum(weights), 4) for w in weights]))
            found["experts"].append([row[0] for row in rows])
            found["weights"].append([row[1] for row in rows])
        return found


CONTINUED = "(continued)"  # the key of a reply that continues the last message


class Handler(BaseHTTPRequestHandler):
    scripted: ScriptedServer

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        name = self.path.removeprefix("/page/").lstrip("/") or "index.html"
        if self.path == "/v1/models":
            model = {
                "id": "Scripted-MoE",
                "max_model_len": self.scripted.context,
                "chat_template": self.scripted.chat_template,
                "template_variables": self.scripted.variables,
                "format": "int4",
            }
            self.reply(200, json.dumps({"data": [model]}).encode(), "application/json")
        elif name in PAGE_FILES:
            self.reply(200, PAGE_FILES[name].read_bytes(), page_type(name), PAGE_HEADERS)
        else:
            self.reply(404, b"{}", "application/json")

    def reply(self, status: int, data: bytes, kind: str, headers: dict | None = None):
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": len(data)}.items():
            self.send_header(key, str(value))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.scripted.requests.append(body)
        asked = body["messages"][-1]["content"]
        reply = self.scripted.replies[CONTINUED if body.get("continue_final_message") else asked]
        if isinstance(reply, list) and reply and isinstance(reply[0], tuple):
            status, error = reply.pop(0)
            return self.reply(status, json.dumps({"error": error}).encode(), "application/json")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self.stream(reply)
        except (ConnectionError, TimeoutError):
            self.scripted.disconnects += 1

    def stream(self, reply: list):
        count, finish = 0, "stop"
        for item in reply:
            if isinstance(item, Exception):
                return
            if isinstance(item, int | float):
                time.sleep(item)
                continue
            finish = item.get("finish", finish)
            for delta, tokens in split_tokens(item):
                count += len(tokens)
                self.send({"delta": delta, "moe_fast": self.scripted.routing(tokens)})
                time.sleep(item.get("pause", 0))
        self.send({"delta": {}, "finish_reason": finish})
        usage = {"completion_tokens": count, "total_tokens": 10 + count}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, choice: dict):
        self.event({"choices": [{"index": 0, "finish_reason": None, **choice}]})

    def event(self, chunk: dict):
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()


def split_tokens(item: dict) -> list[tuple[dict, list[str]]]:
    """Return the deltas of a reply's item with their tokens."""
    for key in ("content", "reasoning_content"):
        if key in item:
            tokens = re.findall(r"\s?\w+|\s+|[^\w\s]", item[key])
            return [({key: token}, [token]) for token in tokens]
    return [({"tool_calls": item["tool_calls"]}, ["call"])] if "tool_calls" in item else []


# The page in the browser ----------------------------------------------------------------------


class Page(Browser):
    """A browser with the page's own actions."""

    def open(self, server: ScriptedServer, width=1280, height=800):
        self.size(width, height)
        self.emulate("light")
        self.send("url", url=server.url)
        self.run("localStorage.clear(); sessionStorage.clear()")
        self.reload(server)

    def reload(self, server: ScriptedServer, address: str = ""):
        self.send("url", url="about:blank")
        self.send("url", url=server.url + address)
        wait_until(lambda: self.text("#model") == "Scripted-MoE")

    def run_async(self, script: str, *arguments):
        """Run the body of an async function; `arguments` are its own."""
        body = f"""const done = arguments[arguments.length - 1];
            (async function() {{ {script} }}).apply(null, arguments)
                .then(done, error => done(String(error)))"""
        return self.send("execute/async", script=body, args=list(arguments))

    def cdp(self, command: str, **params):
        return self.send("goog/cdp/execute", cmd=command, params=params)

    def size(self, width: int, height: int):
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def emulate(self, scheme: str):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.cdp("Emulation.setEmulatedMedia", features=[feature])

    def colors(self):
        """Turn the colors of tokens on."""
        if not self.run("return document.getElementById('colors').checked"):
            self.click("#colors")

    def choose(self, selector: str, value: str):
        """Set the value of a field, as a user does."""
        self.run(f"""const field = document.querySelector({json.dumps(selector)});
            field.value = {json.dumps(value)};
            field.dispatchEvent(new Event('input'));
            field.dispatchEvent(new Event('change'))""")

    def give_file(self, selector: str, name: str, text: str):
        """Choose a file in a file input."""
        self.run(f"""const files = new DataTransfer();
            files.items.add(new File([{json.dumps(text)}], {json.dumps(name)}));
            const input = document.querySelector({json.dumps(selector)});
            input.files = files.files;
            input.dispatchEvent(new Event('change'))""")

    def downloads(self) -> list[list[str]]:
        """Return [name, text] of the files that were offered since `catch_downloads`."""
        return self.run_async("""return Promise.all(
            window.offered.map(async ([name, blob]) => [name, await blob.text()]))""")

    def catch_downloads(self):
        """Keep downloads in the page from here on."""
        self.run("""window.offered = [];
            const blobs = new Map();
            URL.createObjectURL = blob => {
                blobs.set('#' + blobs.size, blob);
                return '#' + (blobs.size - 1);
            };
            HTMLAnchorElement.prototype.click = function() {
                window.offered.push([this.download, blobs.get(this.getAttribute('href'))]);
            }""")

    def ask(self, text: str, wait=True):
        self.run(f"""document.getElementById('text').value = {json.dumps(text)};
            document.getElementById('form').requestSubmit()""")
        if wait:
            self.wait_for_the_end()

    def wait_for_the_end(self):
        wait_until(lambda: self.text("#send") == "Send")

    def press(self, *held: str):
        """Press a key, while those before it are held."""
        keys = [{"type": "keyDown", "value": key} for key in held]
        keys += [{"type": "keyUp", "value": key} for key in reversed(held)]
        self.send("actions", actions=[{"type": "key", "id": "keyboard", "actions": keys}])

    def point(self, selector: str):
        """Move the pointer to the middle of an element."""
        x, y = self.run(f"""const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{block: 'center'}});
            const b = e.getBoundingClientRect();
            return [Math.round(b.x + b.width / 2), Math.round(b.y + b.height / 2)]""")
        move = {"type": "pointerMove", "x": x, "y": y, "origin": "viewport"}
        self.send("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def click(self, selector: str, text: str | None = None):
        """Click the last visible element of a selector, or the last one with a text."""
        assert self.run(f"""const found = [...document.querySelectorAll({json.dumps(selector)})]
            .filter(e => {json.dumps(text)} === null || e.textContent === {json.dumps(text)});
            found.at(-1)?.click(); return found.length"""), (selector, text)

    def text(self, selector: str) -> str | None:
        return self.run(
            f"return document.querySelector({json.dumps(selector)})?.textContent ?? null"
        )

    def texts(self, selector: str) -> list[str]:
        return self.run(f"""return [...document.querySelectorAll({json.dumps(selector)})]
            .map(e => e.textContent)""")

    def count(self, selector: str) -> int:
        return self.run(f"return document.querySelectorAll({json.dumps(selector)}).length")

    def errors(self) -> list[str]:
        log = self.send("se/log", type="browser")
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if not all(map(shutil.which, ("chromedriver", "chromium"))):
        pytest.skip("the page's tests need chromium: apt-get install chromium-driver")
    page = Page(tmp_path_factory.mktemp("chromium"))
    yield page
    page.close()


@pytest.fixture
def serve():
    """Start scripted servers."""
    started: list[ScriptedServer] = []

    def make(replies: dict | None = None, **options) -> ScriptedServer:
        started.append(ScriptedServer(**options))
        started[-1].replies = replies or {}
        return started[-1]

    yield make
    for server in started:
        server.close()


def content(text: str, **options) -> list[dict]:
    return [{"content": text, **options}]
