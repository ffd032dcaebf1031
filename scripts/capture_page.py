"""Take the pictures of the chat page in docs/: python scripts/capture_page.py

It starts serve.py with the embedded model, opens the page in headless Chromium, and answers one
prompt. It needs chromium and chromedriver: apt-get install chromium-driver
"""

import argparse
import base64
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


def capture(browser: Browser, url: str, folder: Path) -> list[Path]:
    """Answer PROMPT on the page with its experts open, and write the pictures."""
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": PIXELS, "mobile": False}
    browser.devtools("Emulation.setDeviceMetricsOverride", **size)
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
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.devtools("Emulation.setEmulatedMedia", features=features)
        time.sleep(0.5)  # the colors fade
        (path := folder / name).write_bytes(browser.screenshot())
        written.append(path)
    return written


def build_parser() -> Parser:
    parser = Parser(
        "Take the pictures of the chat page in docs/.",
        (
            "python scripts/capture_page.py",
            "python scripts/capture_page.py --output_dir /tmp",
        ),
    )
    folder = Path(__file__).parents[1] / "docs"
    parser.add_argument("--output_dir", type=Path, default=folder, metavar="DIR")
    return parser


def run(options: argparse.Namespace) -> list[Path]:
    """Start server and browser, and write the pictures. Raises ValueError without a browser."""
    if not all(map(shutil.which, ("chromedriver", "chromium"))):
        raise ValueError("chromium or chromedriver is missing: apt-get install chromium-driver")
    with server("") as (url, _), tempfile.TemporaryDirectory() as folder:
        browser = Browser(Path(folder))
        try:
            return capture(browser, url, options.output_dir)
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
