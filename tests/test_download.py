"""scripts/download.py and prepare.sh against a local Hub: real client, HTTP and error classes."""

import errno
import io
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from hub_server import FILES, REPO, ROOT, TOKENIZER, UNWANTED, Handler, run_script
from huggingface_hub import close_session
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors.torch import load_file, save

import hub.client as script
from checkpoint import Checkpoint
from cli.model_name import check_hub_environment
from hub import shards, threads
from hub.client import list_files, wanted
from hub.shards import read_headers
from scripts.download import main


def command(hub, *arguments, cwd):
    script = str(ROOT / "scripts" / "download.py")
    return run_script(hub, sys.executable, script, "--repo_id", REPO, *arguments, cwd=cwd)


def contents(directory):
    """Return file -> bytes, without the client's own cache."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and ".cache" not in path.parts
    }


def fetched(hub):
    """Return the files requested so far, with their Range."""
    requests = [(name, part) for method, name, part in hub.requests if method == "GET"]
    return [(name, part) for name, part in requests if name != "api"]


def fails(capsys, *arguments):
    """Run the command in this process; it must end with code 2 and one line, which is returned."""
    assert main(["--repo_id", REPO, *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert out == "" and len(lines) == 1 and err.rstrip().endswith(lines[0])
    assert "Traceback" not in err
    return lines[0]


def test_only_needed_files_are_fetched(hub, tmp_path):
    result = command(hub, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    directory = tmp_path / "checkpoints" / REPO
    assert contents(directory) == FILES
    assert result.stdout == f"checkpoints/{REPO}\n"
    last = result.stderr.splitlines()[-1]
    assert last == f"next: python convert_hf_checkpoint.py --checkpoint_dir checkpoints/{REPO}"
    assert "%|" in result.stderr  # a progress bar

    again = ["--repo_id", REPO, "--output_dir", str(directory)]
    hub.requests.clear()  # everything is there, so nothing is fetched
    assert main([*again, "--revision", "v1"]) == 0
    assert fetched(hub) == []

    # Only missing and truncated files are fetched.
    (directory / "config.json").unlink()
    shard = directory / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    hub.requests.clear()
    assert main(again) == 0
    assert sorted(fetched(hub)) == [("config.json", None), (shard.name, None)]
    assert contents(directory) == FILES


@pytest.fixture
def at_once(monkeypatch):
    """Let the client resume at once. It waits for a second otherwise."""
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda _: None))


def test_a_dropped_connection_is_resumed(hub, tmp_path, monkeypatch, at_once):
    # The client writes whole chunks (10 MB by default).
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    hub.drops = 2
    assert main(["--repo_id", REPO, "--output_dir", str(tmp_path / "out")]) == 0
    assert contents(tmp_path / "out") == FILES
    ranges = [part for name, part in fetched(hub) if name.startswith("model-00001")]
    assert len(ranges) == 3 and ranges[0] is None
    starts = [int(part[6:-1]) for part in ranges[1:]]
    assert 0 < starts[0] < starts[1] <= 1_000_000


def test_an_interrupted_run_keeps_complete_files(hub, tmp_path, capsys):
    hub.fail["GET", "model-00001-of-00002.safetensors"] = (500, None)
    assert "HTTP status 500" in fails(capsys, "--output_dir", tmp_path / "out")
    assert "model-00001-of-00002.safetensors" not in contents(tmp_path / "out")
    done = set(contents(tmp_path / "out"))
    hub.fail.clear()
    hub.requests.clear()
    assert main(["--repo_id", REPO, "--output_dir", str(tmp_path / "out")]) == 0
    assert contents(tmp_path / "out") == FILES
    assert not done & {name for name, _ in fetched(hub)}


SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("name", (SHARD, "model-00002-of-00002.safetensors", "tokenizer.json"))
@pytest.mark.parametrize("times", (1, 2))
def test_a_damaged_file_is_fetched_again_or_refused(hub, tmp_path, capsys, name, times):
    output = "--output_dir", tmp_path / "out"
    hub.damaged[name] = times
    if times == 2:
        assert f"{name} differs from the Hub's digest" in fails(capsys, *output)
        assert name not in contents(tmp_path / "out")
    assert main(["--repo_id", REPO, *map(str, output)]) == 0
    assert contents(tmp_path / "out") == FILES


def test_a_file_that_changes_in_the_middle(hub, tmp_path, monkeypatch, at_once):
    """The rest of another version, of the same size and with another ETag, follows a break."""
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    hub.drops = 1

    def edit(name, headers, body):
        if name == SHARD and "Content-Range" in headers:
            headers["ETag"] = f'"{"1" * 64}"'
            return bytes(len(body))
        return body

    hub.edit = edit
    assert main(["--repo_id", REPO, "--output_dir", str(tmp_path / "out")]) == 0
    assert contents(tmp_path / "out") == FILES


@pytest.mark.parametrize("name", (SHARD, "config.json"))
def test_files_on_disk_are_compared_with_digests(hub, tmp_path, capsys, name):
    """A damaged one is fetched again; one that the client never recorded is the user's."""
    output = "--repo_id", REPO, "--output_dir", str(tmp_path / "out")
    assert main(output) == 0
    path = tmp_path / "out" / name
    swapped = bytes(reversed(FILES[name]))
    path.write_bytes(swapped)
    hub.requests.clear()
    assert main(output) == 0 and [file for file, _ in fetched(hub)] == [name]
    assert contents(tmp_path / "out") == FILES
    path.unlink()
    (tmp_path / "mine").write_bytes(swapped)
    path.symlink_to(tmp_path / "mine")
    assert main(output) == 0 and contents(tmp_path / "out") == FILES
    assert (tmp_path / "mine").read_bytes() == swapped
    shutil.rmtree(tmp_path / "out" / ".cache")
    path.write_bytes(swapped)
    capsys.readouterr()
    assert f"{name} is there and is not the Hub's; move it away" in fails(capsys, *output[2:])
    assert path.read_bytes() == swapped


MISSING = object()
VALUES = (None, -1, 10**400, True, "", "\x1b[31m", "../x", "\ud800", [], [1], {}, {"size": {}})
PLACES = (
    *((), ("sha",), ("siblings",), ("siblings", 0), ("siblings", 0, "rfilename")),
    *(("siblings", 5, key) for key in ("size", "blobId", "lfs", "rfilename")),
    *(("siblings", 5, "lfs", key) for key in ("size", "sha256")),
    *(("cardData",), ("lastModified",), ("safetensors",)),
)


def replaced(value, place, new):
    """Return a JSON value with another one at a place, or with that missing."""
    if not place:
        return None if new is MISSING else new
    key, *rest = place
    made = value.copy()
    if not rest and new is MISSING:
        made.pop(key, None)
    else:
        made[key] = replaced(made[key] if rest else None, rest, new)
    return made


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_listing_with_a_value_of_another_type(hub, tmp_path, capsys, place):
    """Each is refused in one line, or does not matter."""
    hub.files = {name: data[:100] for name, data in FILES.items()}
    for number, new in enumerate((*VALUES, MISSING)):

        def edit(name, headers, body, new=new):
            if name == "api" and body:
                body = json.dumps(replaced(json.loads(body), place, new)).encode()
                headers["Content-Length"] = len(body)
            return body

        hub.edit = edit
        output = tmp_path / str(number)
        if main(["--repo_id", REPO, "--output_dir", str(output)]) == 0:
            capsys.readouterr()
            assert set(contents(output)) <= set(FILES)
            continue
        lines = [part for part in capsys.readouterr().err.split("\n") if part.startswith("error: ")]
        assert len(lines) == 1 and lines[0].isprintable(), new
        assert not output.exists() or contents(output).keys() <= set(FILES)


PAGE = b"<html><body>Log in to this network</body></html>"


@pytest.mark.parametrize("name", ("api", "config.json", SHARD))
@pytest.mark.parametrize("page", (PAGE, b"", b"null", b"\xff", b"[" * 100_000), ids=lambda p: p[:5])
def test_a_page_in_place_of_an_answer(hub, tmp_path, capsys, name, page):
    """A captive portal answers with 200 and its own page."""

    def edit(asked, headers, body):
        if asked == name:
            headers |= {"Content-Length": len(page), "Content-Type": "text/html"}
            return page
        return body

    hub.edit = edit
    line = fails(capsys, "--output_dir", tmp_path / "out")
    assert name != "api" or "gave no answer of the Hub" in line
    assert name not in contents(tmp_path)


HEADERS = (
    *({"X-Repo-Commit": value} for value in ("", "main", "\x1b[31m")),
    *({"ETag": value} for value in ("", '"x"', "../../x", "x" * 5000)),
    *({"X-Linked-ETag": value} for value in ("", "../x", "\x1b[31m")),
    *({"X-Linked-Size": value} for value in ("", "-1", "x", "1" * 400)),
    *({"Content-Length": value} for value in ("", "-1", "x", "0", "1" * 400)),
    *({"Content-Encoding": value} for value in ("gzip", "x")),
    *({"Location": value} for value in ("", "http://[", "file:///etc/passwd")),
    *({"X-Xet-Hash": "x", "X-Xet-Refresh-Route": value} for value in ("", "\x1b")),
    *({"Content-Range": "bytes 9-3/x"}, {"Retry-After": "never"}, {"X-HF-Warning": "a;\x1b[2J"}),
)


@pytest.mark.parametrize("odd", HEADERS, ids=lambda h: str(h)[:40])
def test_an_odd_header(hub, tmp_path, capsys, caplog, odd):
    """It is refused in one line, or the files are whole."""

    def edit(name, headers, body):
        headers |= odd if name == "tokenizer.json" else {}
        return body

    hub.edit = edit
    if main(["--repo_id", REPO, "--output_dir", str(tmp_path / "out")]) == 0:
        assert contents(tmp_path / "out") == FILES
    else:
        assert "tokenizer.json" not in contents(tmp_path / "out")
    err = capsys.readouterr().err
    assert "Traceback" not in err and "\x1b" not in err and err.count("error: ") <= 1


def test_warnings_of_the_hub_drive_no_terminal(hub, tmp_path, monkeypatch, capsys):
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger = logging.getLogger("huggingface_hub")
    monkeypatch.setattr(logger, "handlers", [handler])
    hub.edit = lambda name, headers, body: headers.update({"X-HF-Warning": "x;\x1b[2J!"}) or body
    assert main(["--repo_id", REPO, "--output_dir", str(tmp_path / "out")]) == 0
    assert text.getvalue() == "\\x1b[2J!\n"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    (
        *(("ALL_PROXY", url, "") for url in ("http://[::1", "foo://x", "http://127.0.0.1:9")),
        ("ALL_PROXY", "socks5://127.0.0.1:9", "install it, or unset the proxy"),
        *(
            ("HF_ENDPOINT", url, "is no address of a Hub")
            for url in ("", "x", "http://[", "ftp://x")
        ),
        *(("HF_HUB_DOWNLOAD_TIMEOUT", text, "number of seconds") for text in ("", "x", "-1")),
        ("SSL_CERT_FILE", "/nowhere", "does not exist"),
    ),
)
def test_variables_that_the_client_cannot_use(
    hub, tmp_path, monkeypatch, capsys, variable, value, message
):
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("NO_PROXY", "")
    output = "--output_dir", str(tmp_path / "out")
    if variable == "ALL_PROXY":
        close_session()  # it has read the proxies
        assert message in fails(capsys, *output)
        close_session()
        return
    with pytest.raises(ValueError, match=message):
        check_hub_environment()


def test_ctrl_c_while_answers_stall(hub, tmp_path, monkeypatch, capsys):
    """It ends at once, and no thread keeps the process from its end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    running = set(threading.enumerate())

    presses = iter(range(2))

    def edit(name, headers, body):
        if name == SHARD and next(presses, None) is not None:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            hub.release.wait(30)
        return body

    hub.edit = edit
    for module in (threads, shards):  # the time that they wait for a client that stalls
        monkeypatch.setattr(module, "CANCEL_SECONDS", 0.2)
    start = time.monotonic()
    try:
        assert main(["--repo_id", REPO, "--output_dir", str(tmp_path / "out")]) == 130
        waiting = {t for t in threading.enumerate() if t.name.startswith("moe-fast")} - running
        assert waiting and all(thread.daemon for thread in waiting)
        with pytest.raises(KeyboardInterrupt):
            read_headers(list_files(REPO, None), [SHARD], False)
    finally:
        signal.signal(signal.SIGINT, before)
        hub.release.set()
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("where", "answer", "message"),
    [
        (("GET", "api"), (401, "RepoNotFound"), "no repository someone/tiny-moe"),
        (("GET", "api"), (404, "RepoNotFound"), "no repository someone/tiny-moe"),
        (("GET", "api"), (403, "GatedRepo"), "is gated: accept its terms at http"),
        (("HEAD", "config.json"), (403, "GatedRepo"), "is gated: accept its terms at http"),
        (("GET", "api"), (401, None), "HTTP status 401); check HF_TOKEN"),
        (("GET", "api"), (403, None), "HTTP status 403); check HF_TOKEN"),
        (("GET", "api"), (503, None), "HTTP status 503"),
    ],
)
def test_a_refusal_by_the_hub(hub, tmp_path, capsys, where, answer, message):
    hub.fail[where] = answer
    assert message in fails(capsys, "--output_dir", tmp_path / "out")
    assert not contents(tmp_path).get("out/config.json")


def test_an_unknown_revision(hub, tmp_path, capsys):
    line = fails(capsys, "--revision", "v9", "--output_dir", tmp_path / "out")
    assert "has no revision 'v9'" in line
    assert not (tmp_path / "out").exists()


def test_no_network(hub, tmp_path, capsys):
    hub.shutdown()
    hub.server_close()
    assert "check the network" in fails(capsys, "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "repo_id", ["a/b/c", "../x", "a--b/c", "", "name with space", "x" * 200, "/etc/passwd"]
)
def test_an_invalid_name(hub, tmp_path, monkeypatch, capsys, repo_id):
    monkeypatch.chdir(tmp_path)
    assert "give it as owner/name" in fails(capsys, "--repo_id", repo_id)
    assert list(tmp_path.iterdir()) == [] and hub.requests == []


@pytest.mark.parametrize(
    "error",
    [
        HTTPError("name resolution\nfailed"),
        OfflineModeIsEnabled("offline"),
        LocalEntryNotFoundError("cannot be found\nlocally"),
        RuntimeError("Data processing error: CAS service error"),
        OSError("Consistency check failed"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
    ],
)
def test_a_failed_transfer(hub, tmp_path, monkeypatch, capsys, error):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(script, "snapshot_download", broken)
    line = fails(capsys, "--output_dir", tmp_path / "out")
    assert "the download broke off" in line and "run the same command again" in line


def test_no_network_at_the_start_is_not_success(hub, tmp_path, monkeypatch, capsys):
    # The real client then returns the directory as it is, and warns.
    monkeypatch.setattr(script, "snapshot_download", lambda *_, local_dir, **__: str(local_dir))
    line = fails(capsys, "--output_dir", tmp_path / "out")
    assert "incomplete (model-00001-of-00002.safetensors and 6 more)" in line


def test_ctrl_c(hub, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "snapshot_download", interrupted)
    assert main(["--repo_id", REPO, "--output_dir", str(tmp_path / "out")]) == 130
    assert "run the same command again" in capsys.readouterr().err


def test_an_invalid_output_directory(hub, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "is a file" in fails(capsys, "--output_dir", tmp_path / "file")
    assert "cannot write" in fails(capsys, "--output_dir", tmp_path / "file" / "below")


def test_a_full_disk(hub, tmp_path, monkeypatch, capsys):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(script.shutil, "disk_usage", lambda path: usage)
    assert "more and 1 kB are free" in fails(capsys, "--output_dir", tmp_path / "out")
    assert fetched(hub) == []


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "pytorch_model.bin"], "only pickled weights"),
        (
            ["config.json", "model-00001-of-00002.pt", "original/model.safetensors"],
            "only pickled weights",
        ),
        (["model.Q4_K_M.gguf"], "only GGUF"),
        (["params.json", "consolidated.safetensors"], "Mistral's own layout"),
        (["adapter_model.safetensors", "adapter_config.json"], "only an adapter"),
        (["README.md"], "no weights"),
        ([], "no weights"),
        (["model.safetensors"], "no config.json"),
        (["model.safetensors", "config.json", "tekken.json"], "no tokenizer that is read"),
    ],
)
def test_a_repository_without_usable_weights(hub, tmp_path, capsys, names, message):
    hub.files = dict.fromkeys(names, b"x")
    assert message in fails(capsys, "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists() and fetched(hub) == []


def test_wanted():
    assert sorted(wanted([*FILES, *UNWANTED])) == sorted(FILES)
    names = ["model.safetensors", "config.json", "tiktoken.model"]
    assert wanted(names) == names


def test_the_token_reaches_the_hub(hub, tmp_path, monkeypatch):
    seen = []
    original = Handler.do_GET

    def do_GET(self):
        seen.append(self.headers["Authorization"])
        return original(self)

    monkeypatch.setattr(Handler, "do_GET", do_GET)
    output = str(tmp_path / "out")
    assert main(["--repo_id", REPO, "--output_dir", output, "--token", "hf_secret"]) == 0
    assert seen and set(seen) == {"Bearer hf_secret"}


# scripts/prepare.sh -------------------------------------------------------------------------------


def prepare(hub, *arguments, cwd):
    return run_script(hub, str(ROOT / "scripts" / "prepare.sh"), *arguments, cwd=cwd)


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.mark.slow
def test_prepare_quantizes_a_model_of_the_hub_and_resumes(hub, tmp_path, make_family):
    family = make_family("mixtral")
    hub.files = TOKENIZER | files_of(family.hf_directory)
    shard = next(name for name in hub.files if name.endswith(".safetensors"))
    hub.fail["GET", shard] = 403, None  # the first run fails
    broken = prepare(hub, REPO, "int8", cwd=tmp_path)
    assert broken.returncode == 2 and broken.stdout == "" and broken.stderr.count("error: ") == 1
    assert not list(tmp_path.glob("checkpoints/*/*/model_*"))
    hub.fail.clear()
    for mode in ("bf16", "int8"):
        run = prepare(hub, REPO, mode, cwd=tmp_path)
        directory = f"checkpoints/{REPO}/model_{mode}"
        assert run.returncode == 0 and run.stdout == directory + "\n", run.stderr
        assert Checkpoint(tmp_path / directory).format["name"] == mode
        hub.requests.clear()
    before = contents(tmp_path / "checkpoints")
    again = prepare(hub, REPO, "int8", cwd=tmp_path)
    assert again.stdout == directory + "\n" and "is there already" in again.stderr
    assert not hub.requests and contents(tmp_path / "checkpoints") == before
    shutil.rmtree(tmp_path / directory)  # a damaged source is not quantized
    damaged = tmp_path / "checkpoints" / REPO / "model_bf16/layer_00.safetensors"
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes((data[-1] ^ 1,)))
    refused = prepare(hub, REPO, "int8", cwd=tmp_path)
    assert refused.returncode == 2 and "checksum" in refused.stderr
    assert not (tmp_path / directory).exists() and not hub.requests


@pytest.mark.slow
def test_prepare_keeps_published_fp8(hub, tmp_path, fp8_directory):
    hub.files = TOKENIZER | files_of(fp8_directory)
    for message in (" to download, ", "is there already"):
        run = prepare(hub, REPO, cwd=tmp_path)
        assert run.stdout == f"checkpoints/{REPO}/model_fp8b\n", run.stderr
        assert message in run.stderr
        assert [path.name for path in tmp_path.glob("checkpoints/*/*/model_*")] == ["model_fp8b"]


@pytest.mark.slow
def test_prepare_keeps_published_mxfp4(hub, tmp_path, make_family):
    """The first run converts, the next ones find it; other formats are refused."""
    source = make_family("gpt_oss").hf_directory
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    tensors = {}
    for path in source.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                experts, width, rows = tensor.shape
                groups, dtype = (experts, rows, width // 32), torch.uint8
                tensors[f"{name}_blocks"] = torch.randint(256, (*groups, 16), dtype=dtype)
                tensors[f"{name}_scales"] = torch.full(groups, 124, dtype=dtype)
            else:
                tensors[name] = tensor
    files = {"model.safetensors": save(tensors), "config.json": json.dumps(config).encode()}
    hub.files = TOKENIZER | files
    directory = f"checkpoints/{REPO}/model_mxfp4"
    for mode in ((), ("mxfp4",), ()):
        run = prepare(hub, REPO, *mode, cwd=tmp_path)
        assert run.returncode == 0 and run.stdout == directory + "\n", run.stderr
    assert Checkpoint(tmp_path / directory).format["name"] == "mxfp4"
    assert "is there already" in run.stderr
    refused = prepare(hub, REPO, "int8", cwd=tmp_path)
    assert refused.returncode == 2 and "is quantized already (mxfp4)" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ((), "OWNER/NAME"),
        (("name",), "OWNER/NAME"),
        ((REPO, "int5"), "int5 is no number format; it must be one of bf16, int8, "),
        ((REPO, "int8", "x"), "too many"),
    ),
)
def test_prepare_checks_its_arguments(hub, tmp_path, arguments, message):
    run = prepare(hub, *arguments, cwd=tmp_path)
    assert run.returncode == 2 and run.stdout == "" and not hub.requests
    assert run.stderr.startswith("error: ") and message in run.stderr
    assert run.stderr.count("\n") == 1
    assert prepare(hub, "--help", cwd=tmp_path).stdout.startswith("usage: ")


@pytest.mark.parametrize(
    "format",  # of this project, which a mode names, and of llama.cpp
    (*(pytest.param(n, marks=pytest.mark.slow) for n in ("uint4", "nvfp4")), "q4_k"),
)
def test_prepare_takes_every_format_of_generate(hub, tmp_path, format):
    """Until the Hub, which has no such model."""
    run = prepare(hub, "nobody/none", format, cwd=tmp_path)
    assert run.returncode == 2 and hub.requests and "nobody/none" in run.stderr
