"""Take the pictures of the chat page in docs/: python scripts/capture_page.py

It starts serve.py with the embedded model, opens the page in headless Chromium, answers one prompt,
and compares two files of generate.py --save_routing. It needs chromium and chromedriver:
apt-get install chromium-driver
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import argparse
import base64
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from benchmarks.server_load import server
from cli.command import command
from cli.parser import Parser

WIDTH, HEIGHT, PIXELS = 1360, 800, 1.25  # the window; device pixels of one of its pixels
PROMPT = "import os\n\n\ndef find_files(directory, suffix):\n"
PICTURES = {"chat.png": "light", "chat_dark.png": "dark"}
PHONE = "chat_phone.png", 390, 700  # a picture, the width and height of its window
COMPARED = "experts.png"
ROOT = Path(__file__).parents[1]
RECORDED = {  # file: prompt
    "code.json": "def read_lines(path):\n",
    "prose.json": '"""This module provides a class that ',
}


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Raise TimeoutError if a condition does not become true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the page did not get there")
        time.sleep(0.01)


class Browser:
    """Headless Chromium through its driver's own protocol (W3C WebDriver)."""

    def __init__(self, folder: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        null = subprocess.DEVNULL
        self.driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=null)
        self.url = f"http://127.0.0.1:{port}"
        wait_until(self.ready)
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=900,640"]
        options = {"args": [*arguments, f"--user-data-dir={folder}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self.send("session", capabilities={"alwaysMatch": wanted})
        self.url += "/session/" + session["sessionId"]

    def ready(self) -> bool:
        try:
            return httpx.get(self.url + "/status").json()["value"]["ready"]
        except httpx.TransportError:
            return False

    def send(self, command: str, **arguments):
        """Run a command of the protocol; return its value."""
        found = httpx.post(f"{self.url}/{command}", json=arguments, timeout=60).json()["value"]
        assert not (isinstance(found, dict) and "error" in found), found
        return found

    def run(self, script: str):
        """Run JavaScript in the page; return its value."""
        return self.send("execute/sync", script=script, args=[])

    def devtools(self, name: str, **parameters):
        """Run a command of Chrome's DevTools protocol."""
        return self.send("goog/cdp/execute", cmd=name, params=parameters)

    def screenshot(self) -> bytes:
        """Return the window as PNG."""
        value = httpx.get(self.url + "/screenshot", timeout=60).json()["value"]
        return base64.b64decode(value)

    def close(self):
        httpx.delete(self.url, timeout=20)
        self.driver.terminate()
        self.driver.wait(10)


def set_size(browser: Browser, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": PIXELS, "mobile": False}
    browser.devtools("Emulation.setDeviceMetricsOverride", **size)


def set_scheme(browser: Browser, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.devtools("Emulation.setEmulatedMedia", features=features)
    time.sleep(0.5)  # the colors fade


def capture(browser: Browser, url: str, folder: Path) -> list[Path]:
    """Answer PROMPT on the page with its experts open, and write the pictures."""
    set_size(browser, WIDTH, HEIGHT)
    browser.send("url", url=url)
    wait_until(lambda: browser.run("return document.title") != "moe-fast")
    browser.run(f"""const $ = id => document.getElementById(id);
        $('temperature').value = 0.7; $('max_tokens').value = 110; $('text').value = {PROMPT!r};
        $('form').requestSubmit();
        if ($('experts').hidden) $('open_experts').click();
        if (!$('colors').checked) $('colors').click();""")
    is_done = "return document.getElementById('send').textContent == 'Send'"
    wait_until(lambda: browser.run("return document.querySelectorAll('.token').length") > 20)
    wait_until(lambda: browser.run(is_done), 60)
    written = []
    for name, scheme in PICTURES.items():
        set_scheme(browser, scheme)
        (path := folder / name).write_bytes(browser.screenshot())
        written.append(path)
    set_scheme(browser, "light")
    return [*written, capture_phone(browser, folder)]


def capture_phone(browser: Browser, folder: Path) -> Path:
    """Write the picture of the page on a phone."""
    name, width, height = PHONE
    browser.run("document.getElementById('close_experts').click()")
    set_size(browser, width, height)
    time.sleep(0.5)
    (path := folder / name).write_bytes(browser.screenshot())
    set_size(browser, WIDTH, HEIGHT)
    return path


def record(folder: Path) -> list[Path]:
    """Write the routing of eight answers to each prompt."""
    for name, prompt in RECORDED.items():
        options = ["--prompt", prompt, "--num_samples", "8", "--seed", "1", "--ignore_eos"]
        command = [sys.executable, str(ROOT / "generate.py"), *options]
        subprocess.run([*command, "--save_routing", str(folder / name)], check=True)
    return [folder / name for name in RECORDED]


def compare(browser: Browser, files: list[Path], folder: Path) -> Path:
    """Open the first file, compare it with the second, and write the picture of the experts."""
    browser.run("""document.getElementById('open_experts').click();
        HTMLInputElement.prototype.click = () => {}""")  # no file dialog
    give_file(browser, files[0])
    wait_until(lambda: browser.run("return document.querySelectorAll('.answer').length") == 8)
    browser.run("""const $ = id => document.getElementById(id);
        $('whole').checked = true; $('whole').onchange();
        $('compare').value = 'file'; $('compare').onchange()""")
    give_file(browser, files[1])
    chosen = "return document.querySelector('#compare option:checked').textContent"
    wait_until(lambda: browser.run(chosen) == files[1].name)
    time.sleep(0.5)
    x, y, width = browser.run("""const box = document.getElementById('experts')
        .getBoundingClientRect(); return [box.x, box.y, box.width]""")
    bottom = browser.run("return document.getElementById('replay').getBoundingClientRect().top")
    clip = {"x": x, "y": y, "width": width, "height": bottom, "scale": 1}
    value = browser.devtools("Page.captureScreenshot", clip=clip)["data"]
    (path := folder / COMPARED).write_bytes(base64.b64decode(value))
    return path


def give_file(browser: Browser, path: Path) -> None:
    """Choose a file in the experts panel."""
    browser.run(f"""const files = new DataTransfer();
        files.items.add(new File([{json.dumps(path.read_text())}], {json.dumps(path.name)}));
        const input = document.getElementById('pick_routing');
        input.files = files.files;
        input.dispatchEvent(new Event('change'))""")


def build_parser() -> Parser:
    parser = Parser(
        "Take the pictures of the chat page in docs/.",
        (
            "python scripts/capture_page.py",
            "python scripts/capture_page.py --output_dir /tmp",
        ),
    )
    parser.add_argument("--output_dir", type=Path, default=ROOT / "docs", metavar="DIR")
    return parser


def run(options: argparse.Namespace) -> list[Path]:
    """Start server and browser, and write the pictures. Raises ValueError without a browser."""
    if not all(map(shutil.which, ("chromedriver", "chromium"))):
        raise ValueError("chromium or chromedriver is missing: apt-get install chromium-driver")
    with tempfile.TemporaryDirectory() as place, server("") as (url, _):
        browser = Browser(Path(place) / "browser")
        try:
            written = capture(browser, url, options.output_dir)
            (recorded := Path(place) / "recorded").mkdir()
            return [*written, compare(browser, record(recorded), options.output_dir)]
        finally:
            browser.close()


@command()
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    for path in run(build_parser().parse_args()):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
