"""The embedded checkpoint: small, trained, experts balanced, and generate.py's default."""

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from checkpoint import Checkpoint
from generate import (
    EMBEDDED,
    build_parser,
    chat,
    embedded_checkpoint,
    generate,
    load_model,
    main,
)
from model import Chunk
from runtime.sampling import Sampling
from runtime.session import Session
from tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
WINDOW = 2048
LAST_LINE = (
    r"\d+ prompt tokens at [\d.,]+/s, first token after [\d.]+ m?s, "
    r"\d+ new tokens at [\d.,]+/s, reads [\d.]+ MB/token, [\d.,]+ [kMG]B/s, "
    r"peak memory [\d.]+ [MG]B"
)


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def command(
    cache: Path, *arguments: str, text: str = "", **environment: str
) -> subprocess.CompletedProcess:
    """Run generate.py in a process of its own; `cache` takes the place of ~/.cache."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    line = [sys.executable, str(ROOT / "generate.py"), *arguments]
    return subprocess.run(
        line, input=text, capture_output=True, text=True, env=environment, timeout=300
    )


PROMPT = "--prompt", "def main():\n", "--max_new_tokens", "20", "--seed"


@pytest.fixture(scope="session")
def first_run(cache) -> subprocess.CompletedProcess:
    """Run the command, which converts the checkpoint."""
    run = command(cache, *PROMPT, "3")
    assert run.returncode == 0, run.stderr
    return run


@pytest.fixture(scope="session")
def directory(cache, first_run) -> Path:
    """Return the converted checkpoint, made by the command's first run."""
    (found,) = cache.glob("moe-fast/tiny-moe-*/model_bf16")
    return found


def run_main(monkeypatch, capsys, cache: Path, *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process; return exit code, stdout, stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    return main(), *capsys.readouterr()


def test_it_is_small_and_sharded():
    files = [path for path in EMBEDDED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 20 * 2**20
    assert len(list(EMBEDDED.glob("*.safetensors"))) == 2
    assert 190_000 < (EMBEDDED / "heldout.txt").stat().st_size < 210_000
    assert not [path for path in files if path.suffix in (".pt", ".bin", ".pkl")]


def test_heldout_text_is_the_listed_modules():
    """Byte for byte, if this Python's version is that of the checkpoint."""
    readme = (EMBEDDED / "README.md").read_text()
    version = re.search(r"standard library of Python ([\d.]+):", readme)[1]
    if version != ".".join(map(str, sys.version_info[:3])):
        pytest.skip(f"the checkpoint is of Python {version}'s library")
    library = Path(os.__file__).parent
    listed = (ROOT / "scripts" / "tiny_moe_heldout.txt").read_text()
    listed = listed.split("[heldout]")[1].split("[validation]")[0]
    modules = [line.split()[0] for line in listed.splitlines() if line.split("#")[0].split()]
    assert len(modules) >= 50
    text = b"".join((library / module).read_bytes() for module in modules)
    assert text == (EMBEDDED / "heldout.txt").read_bytes()


@pytest.mark.parametrize(
    ("size", "stated"), ((4_000, 1.3017), pytest.param(None, None, marks=pytest.mark.slow))
)
def test_it_is_trained_and_its_experts_are_balanced(size, stated, directory):
    """Bits per byte of the held-out text (slow: all of it), and the load of every expert."""
    text = (EMBEDDED / "heldout.txt").read_text()[:size]
    model = load_model(directory, "cpu", torch.float32)
    tokenizer = load_tokenizer(directory)
    ids = torch.tensor(tokenizer.encode(text))
    model.setup_cache(1, WINDOW)
    nats, load = 0.0, torch.zeros(model.args.n_layer, model.args.n_expert)
    for start in range(0, len(ids) - 1 - WINDOW // 2, WINDOW // 2):
        part = ids[start : start + WINDOW + 1]
        fresh = slice(WINDOW // 2 if start else 0, None)
        chunk = Chunk(torch.zeros(1, dtype=torch.long), len(part) - 1)
        logits, experts, _ = model(part[None, :-1], chunk, all_positions=True, return_routing=True)
        targets = part[1:][fresh]
        nats += F.cross_entropy(logits[0, fresh], targets, reduction="sum").item()
        load += F.one_hot(experts[:, fresh], model.args.n_expert).sum((1, 2))
    bits = nats / math.log(2) / len(text.encode())
    readme = (EMBEDDED / "README.md").read_text()
    in_readme = re.search(r"held-out bits per byte \| \*\*([\d.]+)\*\*", readme)[1]
    assert bits == pytest.approx(stated or float(in_readme), abs=2e-4) and bits < 1.40
    share = load / load.sum(1, keepdim=True) * model.args.n_expert
    assert share.min() > 0.25


def test_the_command_needs_no_checkpoint(cache, first_run, directory, monkeypatch, capsys):
    assert len(first_run.stdout) > 20
    assert re.fullmatch(LAST_LINE, first_run.stderr.splitlines()[-1])
    assert run_main(monkeypatch, capsys, cache, *PROMPT, "3")[1] == first_run.stdout
    assert run_main(monkeypatch, capsys, cache, *PROMPT, "4")[1] != first_run.stdout
    Checkpoint(directory).verify(progress=False)


def test_json_is_one_object_with_the_documented_fields(cache, directory, monkeypatch, capsys):
    arguments = "--prompt import --max_new_tokens 5 --temperature 0 --ignore_eos --json"
    _, output, _ = run_main(monkeypatch, capsys, cache, *arguments.split())
    result = json.loads(output.splitlines()[-1])
    names = "text prompt_tokens new_tokens finish_reason ttft_s prefill_tok_s decode_tok_s"
    names += " bytes_per_token gb_s peak_bytes"
    assert set(names.split()) <= set(result)
    assert result["new_tokens"] == 5 and result["finish_reason"] == "length"
    arguments = "--prompt a --prompt b --num_samples 2 --max_new_tokens 3 --json"
    _, output, _ = run_main(monkeypatch, capsys, cache, *arguments.split())
    assert len(json.loads(output.splitlines()[-1])["results"]) == 4


@pytest.mark.slow
def test_stdin_and_stop_texts(cache, directory):
    arguments = ("--temperature", "0", "--max_new_tokens", "60")
    text = "class A:\n    def __init__(self"
    whole = command(cache, "--prompt", "-", *arguments, text=text).stdout
    stop = whole.strip()[4:9]
    cut = command(cache, "--prompt", "-", *arguments, "--stop", stop, text=text).stdout
    assert cut == whole[: whole.index(stop)] + "\n"


@pytest.mark.slow
def test_generation_ends_at_eos_without_ignore_eos(directory):
    model, tokenizer = load_model(directory, "cpu"), load_tokenizer(directory)
    prompt = tokenizer.encode("if __name__ == '__main__':\n    main()\n")
    session = Session(model, 512)
    sampling = Sampling(temperature=0, seed=0)
    ended = generate(session, tokenizer, prompt, 300, sampling)
    session.reset()
    went_on = generate(session, tokenizer, prompt, 300, sampling, ignore_eos=True)
    assert ended["finish_reason"] == "stop" and ended["new_tokens"] < 300
    assert went_on["new_tokens"] == 300 and went_on["text"].startswith(ended["text"])


def test_new_tokens_fill_a_short_cache_by_default(cache, directory, monkeypatch, capsys):
    arguments = "--prompt", "import os", "--max_seq_len", "20", "--ignore_eos", "--json"
    result = json.loads(run_main(monkeypatch, capsys, cache, *arguments)[1])
    assert result["prompt_tokens"] + result["new_tokens"] == 20


def test_interactive_keeps_and_forgets(cache, directory, monkeypatch, capsys):
    """The second line continues the first one's text; /reset forgets it."""
    arguments = ("--interactive", "--temperature", "0", "--max_new_tokens", "8", "--ignore_eos")
    found = []
    for lines in ("import os\nimport sys\n/reset\nimport os\n/exit\n", "import os\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        found.append(run_main(monkeypatch, capsys, cache, *arguments))
    (code, out, errors), (_, once, _) = found
    assert code == 0, errors
    used = [int(n) for n in re.findall(r"context (\d+) of", errors)]
    assert len(used) == 3 and used[1] > used[0] + 8 and used[2] == used[0]
    assert once and out.startswith(once) and out.endswith(once)


TEMPLATE = """{% for m in messages %}# {{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}# assistant:{% endif %}"""


SYSTEM = {"role": "system", "content": "Python"}
USER = {"role": "user", "content": "import os"}


@pytest.fixture(scope="session")
def chatty(directory, tmp_path_factory) -> Path:
    """Return the embedded model with a chat template added."""
    target = tmp_path_factory.mktemp("chatty") / "model_bf16"
    shutil.copytree(directory, target)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return target


def test_a_chat_goes_through_the_template_and_reuses_the_cache(chatty, cache, monkeypatch):
    """Two turns: prompts are the template's, and the first prompt is not recomputed.

    (An answer may be: the tokenizer can split the template's text into other tokens.)
    """
    model, tokenizer = load_model(chatty, "cpu"), load_tokenizer(chatty)
    session, prefilled, prompts = Session(model, 512), [], []
    real = session.prefill
    stream = session.stream_all

    def prefill(row: int, ids: list[int], start: int, chunk: int):
        prefilled.append((start, len(ids)))
        return real(row, ids, start, chunk)

    def stream_all(given: list[list[int]], *rest):
        prompts.append(tokenizer.decode(given[0]))
        return stream(given, *rest)

    session.prefill, session.stream_all = prefill, stream_all
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\nimport sys\n"))
    arguments = ["--interactive", "--system", SYSTEM["content"], "--max_new_tokens", "9"]
    options = build_parser().parse_args([*arguments, "--ignore_eos"])
    chat(session, tokenizer, options, Sampling(temperature=0))
    assert prompts[0] == "# system: Python\n# user: import os\n# assistant:"
    assert prompts[1].startswith(prompts[0])
    assert prompts[1].endswith("\n# user: import sys\n# assistant:")
    (first_start, first), (second_start, second) = prefilled
    assert first_start == 0 and second_start >= first == len(tokenizer.chat([SYSTEM, USER]))
    assert second_start + second == len(tokenizer.encode(prompts[1], bos=False))


@pytest.mark.slow
def test_a_system_message_puts_prompts_through_the_template(chatty, cache):
    arguments = ["--temperature", "0", "--max_new_tokens", "9", "--ignore_eos"]
    arguments += ["--checkpoint_path", str(chatty)]
    run = command(cache, *arguments, "--prompt", "import os", "--system", "Python")
    by_hand = "# system: Python\n# user: import os\n# assistant:"
    want = command(cache, *arguments, "--prompt", by_hand).stdout
    assert run.returncode == 0 and run.stdout == want
    assert by_hand in run.stderr


def test_ctrl_c_stops_the_answer_and_not_the_program(cache, directory):
    arguments = "--interactive --max_new_tokens 4000 --ignore_eos --temperature 0"
    process = subprocess.Popen(
        [sys.executable, ROOT / "generate.py", *arguments.split()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    try:
        process.stdin.write(b"import os\n")
        process.stdin.flush()
        assert process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(b"/exit\n", timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0
    (count,) = re.findall(rb"(\d+) tokens?(?: at [\d.,]+/s)?, context", errors)
    assert 0 < int(count) < 4000


PROMPTS = ["import os\nimport", "class Reader:", "def f(a, b, c):\n    return", "x"]


@pytest.mark.slow
def test_a_prompts_file_is_answered_in_order_as_if_alone(
    directory, cache, tmp_path, monkeypatch, capsys
):
    """Each answer ends at the stop text, at its own length."""

    def run(*arguments: str) -> tuple[dict, str]:
        common = "--max_new_tokens 40 --temperature 0 --dtype fp32 --stop : --json"
        _, out, err = run_main(monkeypatch, capsys, cache, *arguments, *common.split())
        return json.loads(out), err

    alone = [run("--prompt", prompt)[0] for prompt in PROMPTS]
    names = "text", "prompt_tokens", "new_tokens", "finish_reason"
    want = [[result[name] for name in names] for result in alone]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(
        "\n".join(json.dumps({"prompt": p} if p < "d" else p) for p in PROMPTS) + "\n\n"
    )
    for size in ("1", "3", "9"):
        together, err = run("--prompts_file", str(lines), "--batch_size", size)
        got = [[result[name] for name in names] for result in together["results"]]
        assert got == want
        assert ("sequences" in err) == (size != "1")
    assert len({r["new_tokens"] for r in alone}) > 2


def test_a_file_of_lines_and_a_prompt_beside_it(directory, cache, tmp_path, monkeypatch, capsys):
    lines = tmp_path / "prompts.txt"
    lines.write_text("import os\n\nclass A:\n")
    options = ["--prompt", "x = 1", "--prompts_file", str(lines)]
    options += ["--num_samples", "2", "--max_new_tokens", "3"]
    code, _, err = run_main(monkeypatch, capsys, cache, *options)
    assert code == 0 and err.count("first token") == 6 and "6 sequences, 18 new tokens" in err
    prompts = "x = 1", "import os", "class A:"
    want = [prompt for prompt in prompts for _ in range(2)]
    assert [line for line in err.splitlines() if line in prompts] == want


@pytest.mark.parametrize(
    ("name", "content", "words"),
    (
        ("empty.txt", b"\n \n", "it holds no prompt"),
        ("binary.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("broken.jsonl", b'"a"\n{"prompt": ', "line 2 is not JSON"),
        ("deep.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("other.jsonl", b'{"text": "a"}', "line 1 is neither a text nor"),
        ("number.jsonl", b"3", "line 1 is neither a text nor"),
        (".", None, "directory"),
        ("nowhere.txt", None, "No such file"),
    ),
)
def test_an_unreadable_prompts_file_is_one_line(
    name, content, words, cache, tmp_path, monkeypatch, capsys
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, out, err = run_main(monkeypatch, capsys, cache, "--prompts_file", str(tmp_path / name))
    assert code == 2 and out == "" and words in err and len(err.splitlines()) == 1


# Arguments, and words of the error.
BAD = {
    "a chunk of no tokens": (("--prompt", "a", "--prefill_chunk", "0"), "--prefill_chunk 0"),
    "a batch of no prompts": (("--prompt", "a", "--batch_size", "0"), "--batch_size 0"),
    "an empty prompt": (("--prompt", ""), "the prompt is empty"),
    "top_k 0": (("--prompt", "a", "--top_k", "0"), "--top_k 0"),
    "a prompt longer than the cache": (
        ("--prompt", "a b c d e f", "--max_seq_len", "3"),
        "--max_seq_len 3",
    ),
    "more than the model's positions": (
        ("--prompt", "a", "--max_new_tokens", "5000"),
        "4096 positions",
    ),
    "an unconverted checkpoint": (
        ("--checkpoint_path", str(EMBEDDED)),
        "convert_hf_checkpoint.py --checkpoint_dir",
    ),
    "no checkpoint at all": (("--checkpoint_path", "nowhere"), "nowhere"),
    "no such folder for the profile": (
        ("--prompt", "a", "--profile", "nowhere/x.json"),
        "--profile",
    ),
    "a system message without a template": (("--prompt", "a", "--system", "b"), "chat template"),
    "no new tokens": (("--prompt", "a", "--max_new_tokens", "0"), "--max_new_tokens 0"),
    "an empty stop text": (("--prompt", "a", "--stop", ""), "--stop ''"),
    "a seed out of range": (("--prompt", "a", "--seed", "99999999999999999999"), "--seed"),
    "a folder for the profile": (("--prompt", "a", "--profile", "."), "--profile"),
    "a prompt for a chat": (
        ("--prompt", "a", "--interactive"),
        "--prompt does not go with --interactive",
    ),
    "an empty standard input": (("--prompt", "-"), "the prompt is empty"),
    "a misspelt device": (("--prompt", "a", "--device", "gpu"), "gpu"),
}
if not torch.cuda.is_available():
    BAD["a missing device"] = (("--prompt", "a", "--device", "cuda"), "--device cpu")


@pytest.mark.parametrize("case", BAD)
def test_a_users_mistake_is_one_line_and_exit_code_2(case, directory, cache, monkeypatch, capsys):
    arguments, words = BAD[case]
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    try:
        code = main()
    except SystemExit as error:  # raised by the parser
        code = error.code
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    (line,) = err.splitlines()
    assert words in line


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(cache, directory):
    for arguments in ("--max_new_tokens 100 --ignore_eos", "--max_new_tokens 3 --json"):
        line = f"set -o pipefail; {sys.executable} {ROOT / 'generate.py'} {arguments} | true"
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        run = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)
        assert run.returncode == 141 and "rror" not in run.stderr


@pytest.mark.slow
def test_a_damaged_cache_folder_is_renewed(cache, directory, tmp_path):
    shutil.copytree(cache / "moe-fast", tmp_path / "moe-fast")
    (found,) = tmp_path.glob("moe-fast/*/model_bf16")
    (found / "rest.safetensors").write_bytes(b"")
    run = command(tmp_path, "--max_new_tokens", "2")
    assert run.returncode == 0 and Checkpoint(found).verify(progress=False) is None
    run = command(Path("/dev/null"), "--max_new_tokens", "2")
    assert (
        run.returncode == 2 and "XDG_CACHE_HOME" in run.stderr and len(run.stderr.splitlines()) == 1
    )


def test_a_checkpoint_that_another_process_made_stays(tmp_path, monkeypatch):
    """Another process may be reading it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def convert_after_another_process(source: Path, made: Path, **options) -> Path:
        found.append((convert(source, made) / "rest.safetensors").stat().st_ino)
        return convert(source, made, **options)

    module, found = sys.modules["generate"], []
    convert = module.convert
    monkeypatch.setattr(module, "convert", convert_after_another_process)
    target = embedded_checkpoint()
    assert (target / "rest.safetensors").stat().st_ino == found[0] and len(found) == 1
    assert [path.name for path in target.parent.iterdir()] == ["model_bf16"]


def edited(directory: Path, target: Path, file: str, change) -> Path:
    """Return a copy of the checkpoint with a JSON file changed, and without its checksum."""
    shutil.copytree(directory, target)
    index = json.loads((target / "index.json").read_text())
    del index["config_crc32"]
    (target / "index.json").write_text(json.dumps(index))
    content = json.loads((target / file).read_text())
    change(content)
    (target / file).write_text(json.dumps(content))
    return target


@pytest.mark.parametrize(
    ("file", "change", "words"),
    (
        ("config.json", lambda c: c["args"].update(dim=128), "embedding.weight is "),
        ("config.json", lambda c: c["args"].update(n_layer=9), "lacks layers.8."),
        ("config.json", lambda c: c["args"].update(novelty=1), "another version"),
        ("config.json", lambda c: c["args"].pop("dim"), "another version"),
        ("config.json", lambda c: c.update(format={"name": "int1"}), "int1"),
        ("index.json", lambda c: c["tensors"].pop("norm.weight"), "norm.weight"),
    ),
)
def test_a_tampered_checkpoint_is_a_value_error(directory, tmp_path, file, change, words):
    with pytest.raises(ValueError, match=words):
        load_model(edited(directory, tmp_path / "copy", file, change), "cpu")


@pytest.mark.slow
def test_a_profile_is_written(cache, directory, tmp_path):
    trace = tmp_path / "trace.json"
    run = command(cache, "--prompt", "a", "--max_new_tokens", "2", "--profile", str(trace))
    assert run.returncode == 0 and json.loads(trace.read_text())["traceEvents"]


@pytest.mark.slow
def test_the_command_compiled_gives_the_same_greedy_text(cache, directory):
    arguments = ["--prompt", "def main():\n", "--max_new_tokens", "30", "--temperature", "0"]
    arguments += ["--dtype", "fp32"]
    eager = command(cache, *arguments)
    fast = command(cache, *arguments, "--compile", "--compile_prefill")
    assert fast.returncode == 0, fast.stderr
    assert eager.stdout == fast.stdout
