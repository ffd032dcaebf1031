"""The embedded checkpoint through the project's own code: it is trained, balanced, small, and the command's default."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from checkpoint import Checkpoint
from generate import EMBEDDED, generate, load_model
from session import Sampling, Session
from tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
WINDOW = 2048
LAST_LINE = ["first token", "prompt", "new", "GB a token", "GB/s", "peak"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def command(cache: Path, *arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess:
    """Run generate.py as a user does, with a cache folder of its own."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    line = [sys.executable, str(ROOT / "generate.py"), *arguments]
    return subprocess.run(line, input=text, capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture(scope="session")
def directory(cache) -> Path:
    """The converted checkpoint, made by the command's first run."""
    run = command(cache, "--prompt", "import os", "--max_new_tokens", "1")
    assert run.returncode == 0, run.stderr
    (found,) = cache.glob("moe-fast/tiny-moe-*/model_bf16")
    return found


def test_it_is_small_and_sharded():
    files = [path for path in EMBEDDED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 20 * 2**20
    assert len(list(EMBEDDED.glob("*.safetensors"))) == 2
    assert 190_000 < (EMBEDDED / "heldout.txt").stat().st_size < 210_000
    assert not [path for path in files if path.suffix in (".pt", ".bin", ".pkl")]


def test_heldout_text_is_what_the_list_names():
    """Where this Python is the one of the checkpoint, the text is its modules' own, byte for byte."""
    version = re.search(r"standard library of Python ([\d.]+):", (EMBEDDED / "README.md").read_text())[1]
    if version != ".".join(map(str, sys.version_info[:3])):
        pytest.skip(f"the checkpoint is of Python {version}'s library")
    library = Path(os.__file__).parent
    lines = (ROOT / "scripts" / "tiny_moe_heldout.txt").read_text().split("[heldout]")[1].split("[validation]")[0]
    modules = [line.split()[0] for line in lines.splitlines() if line.split("#")[0].split()]
    assert len(modules) >= 50
    text = b"".join((library / module).read_bytes() for module in modules)
    assert text == (EMBEDDED / "heldout.txt").read_bytes()


def test_it_is_trained_and_its_experts_are_all_at_work(directory):
    """Bits per byte on the held-out text as the checkpoint's README states them, and the load of every expert."""
    text = (EMBEDDED / "heldout.txt").read_text()
    model, tokenizer = load_model(directory, "cpu", torch.float32), load_tokenizer(directory)
    ids = torch.tensor(tokenizer.encode(text))
    positions = torch.arange(WINDOW).unsqueeze(0)
    model.setup_cache(1, WINDOW)
    nats, load = 0.0, torch.zeros(model.args.n_layer, model.args.n_expert)
    for start in range(0, len(ids) - 1 - WINDOW // 2, WINDOW // 2):
        part = ids[start : start + WINDOW + 1]
        fresh = slice(WINDOW // 2 if start else 0, None)
        logits, experts, _ = model(part[None, :-1], positions[:, : len(part) - 1], return_routing=True)
        nats += F.cross_entropy(logits[0, fresh], part[1:][fresh], reduction="sum").item()
        load += F.one_hot(experts[:, fresh], model.args.n_expert).sum((1, 2))
    bits = nats / math.log(2) / len(text.encode())
    stated = re.search(r"held-out bits per byte \| \*\*([\d.]+)\*\*", (EMBEDDED / "README.md").read_text())[1]
    assert bits == pytest.approx(float(stated), abs=2e-4) and bits < 1.40
    share = load / load.sum(1, keepdim=True) * model.args.n_expert
    assert share.min() > 0.25


def test_the_command_needs_no_checkpoint(cache, directory):
    arguments = ("--prompt", "def main():\n", "--max_new_tokens", "20", "--seed", "3")
    first, second = command(cache, *arguments), command(cache, *arguments)
    assert first.returncode == 0 and first.stdout == second.stdout and len(first.stdout) > 20
    assert all(word in first.stderr.splitlines()[-1] for word in LAST_LINE)
    assert command(cache, *arguments[:-1], "4").stdout != first.stdout
    Checkpoint(directory).verify(progress=False)


def test_json_is_one_object_with_the_fields_of_the_design(cache, directory):
    run = command(cache, "--prompt", "import", "--max_new_tokens", "5", "--temperature", "0", "--ignore_eos", "--json")
    result = json.loads(run.stdout.splitlines()[-1])
    names = (
        "text prompt_tokens new_tokens finish_reason ttft_s prefill_tok_s decode_tok_s bytes_per_token gb_s peak_bytes"
    )
    assert {*names.split(), "peak_bytes"} <= set(result)
    assert result["new_tokens"] == 5 and result["finish_reason"] == "length"
    run = command(cache, "--prompt", "a", "--prompt", "b", "--num_samples", "2", "--max_new_tokens", "3", "--json")
    assert len(json.loads(run.stdout.splitlines()[-1])["results"]) == 4


def test_stdin_and_stop_texts(cache, directory):
    arguments = ("--temperature", "0", "--max_new_tokens", "60")
    whole = command(cache, "--prompt", "-", *arguments, text="class A:\n    def __init__(self").stdout
    stop = whole.strip()[4:9]
    cut = command(cache, "--prompt", "-", *arguments, "--stop", stop, text="class A:\n    def __init__(self").stdout
    assert cut == whole[: whole.index(stop)] + "\n"


def test_it_ends_at_end_of_text_unless_told_not_to(directory):
    model, tokenizer = load_model(directory, "cpu"), load_tokenizer(directory)
    prompt = tokenizer.encode("if __name__ == '__main__':\n    main()\n")
    session = Session(model, 512)
    ended = generate(session, tokenizer, prompt, 300, Sampling(temperature=0, seed=0))
    session.reset()
    went_on = generate(session, tokenizer, prompt, 300, Sampling(temperature=0, seed=0), ignore_eos=True)
    assert ended["finish_reason"] == "stop" and ended["new_tokens"] < 300
    assert went_on["new_tokens"] == 300 and went_on["text"].startswith(ended["text"])


def test_interactive_keeps_and_forgets(cache, directory):
    """The second line continues the first one's text; after /reset the same line gives the same answer again."""
    arguments = ("--interactive", "--temperature", "0", "--max_new_tokens", "8", "--ignore_eos")
    run = command(cache, *arguments, text="import os\nimport sys\n/reset\nimport os\n/exit\n")
    assert run.returncode == 0, run.stderr
    prompts = [int(n) for n in re.findall(r"prompt (\d+) tokens", run.stderr)]
    assert len(prompts) == 3 and prompts[1] > prompts[0] + 8 and prompts[2] == prompts[0]
    once = command(cache, *arguments, text="import os\n").stdout
    assert run.stdout.startswith(once) and run.stdout.endswith(once)


BAD = {
    "an empty prompt": (("--prompt", ""), "the prompt is empty"),
    "top_k 0": (("--prompt", "a", "--top_k", "0"), "--top_k 0"),
    "a prompt longer than the cache": (("--prompt", "a b c d e f", "--max_seq_len", "3"), "--max_seq_len 3"),
    "more than the model's positions": (("--prompt", "a", "--max_new_tokens", "5000"), "4096 positions"),
    "a layout that is not ours": (("--checkpoint_path", str(EMBEDDED)), "convert_hf_checkpoint.py --checkpoint_dir"),
    "no checkpoint at all": (("--checkpoint_path", "nowhere"), "nowhere"),
    "no such folder for the profile": (("--prompt", "a", "--profile", "nowhere/x.json"), "--profile"),
    "a system message without a template": (("--prompt", "a", "--system", "b"), "chat template"),
    "no tokens wanted": (("--prompt", "a", "--max_new_tokens", "0"), "--max_new_tokens 0"),
    "a misspelt device": (("--prompt", "a", "--device", "gpu"), "gpu"),
}
if not torch.cuda.is_available():
    BAD["a device that is not there"] = (("--prompt", "a", "--device", "cuda"), "--device cpu")


@pytest.mark.parametrize("case", BAD)
def test_a_users_mistake_is_one_line_and_exit_code_2(case, cache, directory):
    arguments, words = BAD[case]
    run = command(cache, *arguments)
    assert run.returncode == 2 and run.stdout == ""
    assert words in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr
    if "usage:" not in run.stderr:  # argparse prints its usage first
        assert len(run.stderr.splitlines()) == 1


def test_a_profile_is_written(cache, directory, tmp_path):
    run = command(cache, "--prompt", "a", "--max_new_tokens", "2", "--profile", str(tmp_path / "trace.json"))
    assert run.returncode == 0 and json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_the_command_compiled_gives_the_same_greedy_text(cache, directory):
    arguments = ("--prompt", "def main():\n", "--max_new_tokens", "30", "--temperature", "0", "--dtype", "fp32")
    eager, fast = command(cache, *arguments), command(cache, *arguments, "--compile", "--compile_prefill")
    assert fast.returncode == 0, fast.stderr
    assert eager.stdout == fast.stdout
