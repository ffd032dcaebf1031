"""A Hub on the loopback interface for one repository: real HTTP for the real client."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPO = "someone/tiny-moe"
WORDS = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
TOKENIZER = {"tokenizer.json": json.dumps({"version": "1.0", "model": WORDS}).encode()}
FILES = {
    "config.json": b'{"model_type": "mixtral"}',
    "generation_config.json": b"{}",
    **TOKENIZER,
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": bytes(range(256)) * 8000,
    "model-00002-of-00002.safetensors": b"second" * 1000,
}
UNWANTED = {
    "README.md": b"# read me",
    "consolidated.safetensors": b"a second copy",
    "consolidated.00.pt": b"pickle",
    "pytorch_model-00001-of-00001.bin": b"pickle",
    "original/model.safetensors": b"a third copy",
    "onnx/config.json": b"{}",
    "training_args.bin": b"pickle",
}
COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """Serves one repository as the Hub does.

    requests: a log of (method, file, Range). fail: (method, file) -> (status, X-Error-Code).
    drops: how often the first shard's connection will still break off. stall: a file whose second
    half waits until `release` is set. damaged: file -> how often it will still come with a flipped
    bit. edit: changes an answer before it is sent: (name or "api", headers, body) -> body.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests, self.fail, self.drops = FILES | UNWANTED, [], {}, 0
        self.damaged, self.edit = {}, lambda name, headers, body: body
        self.stall, self.stalled, self.release = None, threading.Event(), threading.Event()
        self.handle_error = lambda *_: None  # a client has left
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body, written after its head, waits for 40 ms

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", headers=(), cut=None):
        headers = {"Content-Length": len(body), "X-Repo-Commit": COMMIT, **dict(headers)}
        body = self.server.edit(self.asked(), headers, body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        self.close_connection = self.close_connection or cut is not None

    def asked(self):
        """Return the requested file, or "api"."""
        file = re.fullmatch(f"/{REPO}/resolve/{COMMIT}/(.+)", self.path.partition("?")[0])
        return file[1] if file else "api"

    def do_GET(self):
        path = self.path.partition("?")[0]
        api = re.fullmatch(f"/api/models/{REPO}(/revision/([^/]+)|/tree/{COMMIT})?", path)
        name = self.asked()
        self.server.requests.append((self.command, name, self.headers.get("Range")))
        for (method, where), (status, code) in self.server.fail.items():
            if method == self.command and where == name:
                return self.answer(status, headers={"X-Error-Code": code} if code else {})
        if api:
            return self.answer_api(path, revision=api[2])
        if name not in self.server.files:
            code = "RepoNotFound" if name == "api" else "EntryNotFound"
            return self.answer(404, headers={"X-Error-Code": code})
        return self.answer_file(name)

    def answer_api(self, path, revision):
        if revision not in (None, "main", "v1", COMMIT):
            return self.answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        files = self.server.files
        if "/tree/" in path:
            return self.answer(200, json.dumps([self.entry(name) for name in files]).encode())
        siblings = [{"rfilename": name} | self.entry(name) for name in files]
        info = {"id": REPO, "sha": COMMIT, "siblings": siblings}
        return self.answer(200, json.dumps(info).encode())

    def answer_file(self, name):
        data, cut = self.server.files[name], None
        digest = digest_of(name, self.server.files[name])
        headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        first, _, last = self.headers.get("Range", "bytes=0-")[6:].partition("-")
        start, end = int(first), min(int(last or len(data)), len(data) - 1)
        partial = start > 0 or end < len(data) - 1
        if partial:
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        if self.command == "GET" and name.startswith("model-00001") and self.server.drops:
            self.server.drops -= 1
            cut = 500_000
        if self.command == "GET" and name == self.server.stall and "Range" not in self.headers:
            self.server.stalled.set()
            self.server.release.wait(60)
        if self.command == "GET" and end == len(data) - 1 and self.server.damaged.get(name, 0):
            self.server.damaged[name] -= 1
            data = data[:-1] + bytes((data[-1] ^ 1,))
        return self.answer(206 if partial else 200, data[start : end + 1], headers, cut)

    do_HEAD = do_GET

    def entry(self, name):
        data = self.server.files[name]
        digest = digest_of("", data)
        entry = {"type": "file", "path": name, "size": len(data), "oid": digest, "blobId": digest}
        if name.endswith(".safetensors"):
            digest = digest_of(name, data)
            entry["lfs"] = {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 130}
        return entry


def digest_of(name: str, data: bytes) -> str:
    """Return a file's ETag: the SHA-256 of a large file, git's SHA-1 of another."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def environment(hub, cwd: Path) -> dict[str, str]:
    """Return the environment of a process that uses the local Hub."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))
    }
    kept |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(cwd / "home"), "PYTHONPATH": str(ROOT)}
    kept |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return kept | {"TMPDIR": str(cwd)}  # where killed processes leave their files


def run_script(hub, *program, cwd: Path) -> subprocess.CompletedProcess:
    """Run a script in a process of its own, with the local Hub."""
    return subprocess.run(
        program,
        cwd=cwd,
        env=environment(hub, cwd),
        capture_output=True,
        text=True,
        timeout=200,
    )
