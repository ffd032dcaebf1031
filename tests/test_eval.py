"""eval.py: perplexity and lm-eval's requests against naive references; the command."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import eval as eval_command
from benchmarks.quality import measure
from checkpoint import Checkpoint
from eval import (
    encode_pair,
    generate_until,
    loglikelihood,
    loglikelihood_rolling,
    perplexity,
    prefix_id,
    score_windows,
    weight_size,
)
from generate import EMBEDDED, embedded_checkpoint, generate, load_model
from model import Transformer
from runtime.sampling import Sampling
from runtime.session import Session

ROOT = Path(__file__).parents[1]
HELDOUT = (EMBEDDED / "heldout.txt").read_text()
TASKS = ROOT / "tests" / "tasks"
PARAMETERS = 8_933_632  # the embedded model's


class ByteTokenizer:
    """Tokenizer of the random checkpoints (160 ids): BOS is 1, an ASCII character 3 + its code."""

    bos_id, stop_ids = 1, (2,)

    def __init__(self, adds_bos: bool = True):
        self.adds_bos = adds_bos

    def encode(self, text: str, bos: bool = True) -> list[int]:
        return [1] * (bos and self.adds_bos) + [3 + byte for byte in text.encode()]

    def token_bytes(self, id: int) -> bytes:
        return bytes([id - 3]) if id >= 3 else b""


@pytest.fixture(scope="session")
def tiny(directory):
    """Return the embedded model in fp32."""
    return load_model(directory, "cpu", torch.float32)


def peer_nats(family, ids: list[int]) -> float:
    """Return transformers' nats of the last id, given those before it."""
    with torch.no_grad():
        logits = family.peer(torch.tensor([ids[:-1]])).logits[0, -1]
    return F.cross_entropy(logits.double(), torch.tensor(ids[-1])).item()


def naive_score(model, ids: list[int], count: int) -> tuple[float, bool]:
    """`score_windows` for one window: one token and one empty cache at a time."""
    nats, greedy = 0.0, True
    for end in range(len(ids) - count, len(ids)):
        model.setup_cache(1, end)
        logits = model(torch.tensor([ids[:end]]), torch.arange(end).unsqueeze(0))[0]
        nats += F.cross_entropy(logits.double(), torch.tensor(ids[end])).item()
        greedy &= logits.argmax().item() == ids[end]
    return nats, greedy


# Perplexity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seq_len", "stride"),
    (
        (24, None),
        (25, 7),
        pytest.param(16, 16, marks=pytest.mark.slow),
        pytest.param(120, None, marks=pytest.mark.slow),
    ),
)
def test_perplexity_equals_one_window_per_token(family, seq_len, stride):
    """A token's context is that of its first window. Mixtral's sliding window is 16 here."""
    model = load_model(family.directory, "cpu")
    text = "the quick brown fox jumps over the lazy dog"
    ids, step = ByteTokenizer().encode(text), stride or seq_len // 2
    total = 0.0
    for n in range(1, len(ids)):
        start = step * max(0, math.ceil((n - seq_len) / step))
        assert n - start <= seq_len and (start == 0 or n - start > seq_len - step)
        total += peer_nats(family, ids[start : n + 1])
    result = perplexity(model, ByteTokenizer(), text, seq_len, stride, progress=False)
    assert result["tokens"] == len(text)
    assert (result["seq_len"], result["stride"]) == (seq_len, step)
    assert math.log(result["perplexity"]) == pytest.approx(total / len(text), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(total / len(text) / math.log(2), rel=1e-5)


def test_without_bos_the_first_token_and_its_bytes_do_not_count(make_family):
    family, text, plain = make_family("olmoe"), "xyz and so on", ByteTokenizer(adds_bos=False)
    model = load_model(family.directory, "cpu")
    result, ids = perplexity(model, plain, text, 64, progress=False), plain.encode(text)
    total = sum(peer_nats(family, ids[: n + 1]) for n in range(1, len(ids)))
    assert result["tokens"] == len(text) - 1
    assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / (len(text) - 1), rel=1e-5)


@pytest.mark.parametrize("positions", (1, 7, 30))
def test_computing_logits_in_parts_does_not_change_scores(family, positions, monkeypatch):
    model, sizes, encode = load_model(family.directory, "cpu"), [], ByteTokenizer().encode
    windows = [(encode("a text of some length"), 20), (encode("another"), 3)]
    whole = score_windows(model, windows)
    compute_logits = Transformer.logits

    def record(self, normed, last):
        sizes.append(normed.shape[1])
        return compute_logits(self, normed, last)

    monkeypatch.setattr(eval_command, "LOGIT_POSITIONS", positions)
    monkeypatch.setattr(Transformer, "logits", record)
    sliced = score_windows(model, windows)
    assert max(sizes) <= positions and sum(sizes) == 23  # only logits that are scored
    for (nats, greedy), (expected, expected_greedy) in zip(sliced, whole, strict=True):
        assert nats == pytest.approx(expected, rel=1e-6) and greedy == expected_greedy


def test_perplexity_equals_the_naive_loop_over_windows(tiny, tokenizer):
    """The loop of tests/test_tiny_moe.py, over a part of the held-out text."""
    text, window = HELDOUT[:2500], 256
    ids = torch.tensor(tokenizer.encode(text))
    positions, nats = torch.arange(window).unsqueeze(0), 0.0
    tiny.setup_cache(1, window)
    for start in range(0, len(ids) - 1 - window // 2, window // 2):
        part = ids[start : start + window + 1]
        fresh = slice(window // 2 if start else 0, None)
        logits = tiny(part[None, :-1], positions[:, : len(part) - 1], all_positions=True)
        nats += F.cross_entropy(logits[0, fresh], part[1:][fresh], reduction="sum").item()
    result = perplexity(tiny, tokenizer, text, window, progress=False)
    bits = nats / math.log(2) / len(text.encode())
    assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert result["tokens"] == len(ids) - 1


@pytest.mark.slow
def test_the_embedded_models_published_figures(directory):
    readme = (EMBEDDED / "README.md").read_text()
    bits = float(re.search(r"held-out bits per byte \| \*\*([\d.]+)\*\*", readme)[1])
    found = re.search(r"held-out perplexity \| ([\d.]+) a token \(([\d,]+) tokens", readme)
    cache = str(directory.parent / "cache")
    run = command("--dtype", "fp32", "--device", "cpu", "--json", XDG_CACHE_HOME=cache)
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["bits_per_byte"] == pytest.approx(bits, abs=1e-4)
    assert result["perplexity"] == pytest.approx(float(found[1]), abs=1e-3)
    assert result["tokens"] == int(found[2].replace(",", "")) and result["seq_len"] == 2048


def test_bits_per_weight(directory, family):
    model = load_model(directory, "cpu")
    assert weight_size(model) == {"bits_per_weight": 16.0, "bytes": 2 * PARAMETERS}
    fp32 = load_model(family.directory, "cpu")  # Qwen3's embeddings are tied here
    assert weight_size(fp32)["bits_per_weight"] == 32.0
    router = model.layers[0].ffn.router  # packed: two weights a byte, and a scale a row
    packed, scale = router.weight[:, ::2].to(torch.uint8), torch.ones(router.weight.shape[0], 1)
    stored = 2 * PARAMETERS - router.weight.nbytes + packed.nbytes + scale.nbytes
    router.weight = torch.nn.Parameter(packed, requires_grad=False)
    router.register_buffer("scale", scale)
    assert weight_size(model) == {"bits_per_weight": 8 * stored / PARAMETERS, "bytes": stored}


def test_output_that_is_not_finite_is_refused(make_family):
    model = load_model(make_family("olmoe").directory, "cpu")
    model.norm.weight.data.fill_(float("inf"))
    with pytest.raises(ValueError, match="not finite"):
        perplexity(model, ByteTokenizer(), "a text", 8, progress=False)


def test_ids_beyond_the_vocabulary_are_refused(make_family):
    model = load_model(make_family("olmoe").directory, "cpu")
    with pytest.raises(ValueError, match="below 160"):
        perplexity(model, ByteTokenizer(), "é" * 9, 8, progress=False)


def test_a_text_of_one_token_and_a_long_stride_are_refused(make_family):
    model = load_model(make_family("olmoe").directory, "cpu")
    plain = ByteTokenizer(adds_bos=False)
    with pytest.raises(ValueError, match="no token to predict"):
        perplexity(model, plain, "a", 8)
    with pytest.raises(ValueError, match="stride 9"):
        perplexity(model, plain, "abc", 8, 9)


# lm-eval's requests -------------------------------------------------------------------------------


def test_the_border_of_context_and_continuation(tokenizer):
    """Cases: spaces move over, no context, a token spans both, the last token only changes."""
    encode, text_of = tokenizer.encode, tokenizer.decode
    ids, count = encode_pair(tokenizer, "import os\n    ", "x = 1")
    assert ids == encode("import os\n    x = 1") and text_of(ids[:-count]) == "import os"
    for context in ("", " \n"):
        ids, count = encode_pair(tokenizer, context, "import os")
        assert ids == encode(context + "import os")
        assert ids[0] == tokenizer.bos_id and count == len(ids) - 1
    context, continuation = "for i in range(", "None is:"
    before, whole = encode(context), encode(context + continuation)
    assert whole[: len(before)] != before  # "(None" is one token
    after = whole[len(before) :]
    assert encode_pair(tokenizer, context, continuation) == (before + after, len(after))
    before, whole = encode("impor"), encode("import")
    assert len(whole) <= len(before)
    assert encode_pair(tokenizer, "impor", "t") == (whole, 1)
    assert encode_pair(tokenizer, "import os", "")[1] == 0


PAIRS = (
    ("import os\n\ndef main():\n", "    pass"),
    ("import sys\n", "sys.exit(main())"),
    ("", "import os"),
    ("if not isinstance(name, str):\n", "    raise TypeError"),
    ("while True:\n    ", "line = f.readline()\n"),
    ("import os", ""),
)


@pytest.mark.parametrize("max_length", (4096, 8))
def test_loglikelihood_equals_one_token_at_a_time(tiny, tokenizer, max_length, caplog):
    found = loglikelihood(tiny, tokenizer, PAIRS, max_length)
    cut = 0
    for (logprob, greedy), pair in zip(found, PAIRS, strict=True):
        ids, count = encode_pair(tokenizer, *pair)
        cut += len(ids) > max_length + 1
        nats, expected = naive_score(tiny, ids[-max_length - 1 :], count)
        assert logprob == pytest.approx(-nats, rel=1e-5) and greedy == expected
    assert ("contexts are cut" in caplog.text) == (cut > 0) == (max_length == 8)


def test_the_greedy_continuation_is_recognized(tiny, tokenizer):
    context = "import os\nimport sys\nimport"
    prompt, session = tokenizer.encode(context), Session(tiny, 64)
    ids = list(session.stream(prompt, 5, Sampling(temperature=0)))
    chosen = tokenizer.decode(prompt + ids)[len(context) :]
    assert encode_pair(tokenizer, context, chosen) == (prompt + ids, 5)
    other = chosen[:-1] + ("x" if chosen[-1] != "x" else "y")
    pairs = [(context, chosen), (context, other)]
    (right, is_greedy), (wrong, other_is) = loglikelihood(tiny, tokenizer, pairs, 4096)
    assert is_greedy and not other_is and right > wrong


def test_a_continuation_longer_than_the_window_is_refused(tiny, tokenizer):
    with pytest.raises(ValueError, match="--seq_len 4"):
        loglikelihood(tiny, tokenizer, [("a", "import os, sys, re, json, math")], 4)


@pytest.mark.parametrize("max_length", (4096, 10))
def test_rolling_loglikelihood_equals_one_token_at_a_time(tiny, tokenizer, max_length):
    """Windows follow each other. The last one is full, so its tokens have more context."""
    function = "import os\nimport sys\n\n\ndef main(path):\n    return os.listdir(path)\n"
    texts = (function, "x = 1", "")
    found = loglikelihood_rolling(tiny, tokenizer, [(text,) for text in texts], max_length)
    for logprob, text in zip(found, texts, strict=True):
        ids = [tokenizer.bos_id, *tokenizer.encode(text, bos=False)]
        total = 0.0
        for n in range(1, len(ids)):
            end = min(max_length * math.ceil(n / max_length), len(ids) - 1)
            total += naive_score(tiny, ids[max(0, end - max_length) : n + 1], 1)[0]
        assert logprob == pytest.approx(-total, rel=1e-5)


@pytest.mark.slow
def test_generate_until_equals_generate(tiny, tokenizer):
    context, n, greedily = "import os\nimport sys\n\nclass", 30, Sampling(temperature=0)
    session = Session(tiny, 128)
    greedy = generate(session, tokenizer, context, n, greedily, ignore_eos=True)["text"]
    stop = greedy[9:12]
    requests = [
        (context, {"until": [], "max_gen_toks": n, "num_beams": 1}),
        (context, {"until": [stop, ""], "max_gen_toks": n, "do_sample": False, "temperature": 1.0}),
        (context, {"until": stop, "max_new_tokens": n}),
        (context, {"max_gen_toks": 2}),
        (context, {"max_gen_toks": n, "temperature": 1.0}),
        (context, {"max_gen_toks": n, "do_sample": True}),
        ("", {"max_gen_toks": 5}),
    ]
    whole, cut, same, short, sampled, again, empty = generate_until(tiny, tokenizer, requests, 4096)
    assert whole == greedy and cut == same == greedy[: greedy.index(stop)]
    assert greedy.startswith(short) and len(short) < len(greedy)
    assert len({greedy, sampled, again}) == 3 and empty
    assert generate_until(tiny, tokenizer, requests, 4096)[4] == sampled
    ids = tokenizer.encode(context)
    (left,) = generate_until(tiny, tokenizer, requests[:1], len(ids) - 2 + n)
    expected = generate(Session(tiny, 128), tokenizer, ids[2:], n, greedily)
    assert left == expected["text"]


@pytest.mark.parametrize(
    ("settings", "message"),
    (({"max_gen_toks": 64}, "--seq_len 64"), ({"num_beams": 4, "until": []}, "num_beams")),
)
def test_unsupported_generation_settings_are_refused(tiny, tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        generate_until(tiny, tokenizer, [("a", settings)], 64)


def test_a_text_without_context_begins_with_bos_or_eos():
    with pytest.raises(ValueError, match="neither"):
        prefix_id(SimpleNamespace(bos_id=None, stop_ids=()))
    assert prefix_id(SimpleNamespace(bos_id=None, stop_ids=(7, 8))) == 7
    assert prefix_id(SimpleNamespace(bos_id=0, stop_ids=(7, 8))) == 0


# Command ------------------------------------------------------------------------------------------


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run eval.py as a user does."""
    environment = {**os.environ, **environment}
    line = [sys.executable, str(ROOT / "eval.py"), *arguments]
    return subprocess.run(
        line, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )


def run_main(monkeypatch, *arguments: str) -> int:
    """Run eval.py in this process, without the seconds that imports take."""
    monkeypatch.setattr(sys, "argv", ["eval.py", *arguments])
    return eval_command.main()


def test_json_has_its_fields(directory, tmp_path, tiny, tokenizer, monkeypatch, capsys):
    text = HELDOUT[:500].replace("\n", "\r\n")  # reading in text mode would change it
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())  # a byte order mark is no text
    arguments = ("--checkpoint_path", str(directory), "--text_file", str(file), "--seq_len", "64")
    assert run_main(monkeypatch, *arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    names = "perplexity bits_per_byte tokens bits_per_weight bytes seq_len stride seconds"
    assert set(names.split()) | {"tokens_per_second", "kv_cache"} == set(result)
    assert result["bits_per_weight"] == 16.0
    assert result["bytes"] == 2 * PARAMETERS and result["stride"] == 32
    assert run_main(monkeypatch, *arguments, "--json", "--dtype", "fp32") == 0
    fp32 = json.loads(capsys.readouterr().out)
    expected = perplexity(tiny, tokenizer, text, 64)["perplexity"]
    assert fp32["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert fp32["perplexity"] == pytest.approx(result["perplexity"], rel=0.02)
    assert fp32["bits_per_weight"] == 32.0
    assert run_main(monkeypatch, *arguments, "--dtype", "fp32") == 0
    out = capsys.readouterr().out
    assert f"perplexity {fp32['perplexity']:.4f}, {fp32['bits_per_byte']:.4f} bits/byte" in out
    assert "32 bits/weight" in out


TEXT = ("--text_file", "good.txt")
MISTAKES = {
    "an empty text": (("--text_file", "empty.txt"), "empty.txt is empty"),
    "a text that is not UTF-8": (("--text_file", "latin.txt"), "not UTF-8 at byte 3"),
    "a missing file": (("--text_file", "nowhere.txt"), "nowhere.txt: No such file"),
    "a folder instead of a file": (("--text_file", "."), "not a regular file"),
    "no text": (("--seq_len", "64"), "--text_file FILE or --tasks"),
    "a window of one": ((*TEXT, "--seq_len", "1"), "--seq_len 1"),
    "a window beyond the model": ((*TEXT, "--seq_len", "4097"), "4096 positions"),
    "no checkpoint": ((*TEXT, "--checkpoint_path", "nowhere"), "nowhere"),
    "a checkpoint that is not converted": (
        (*TEXT, "--checkpoint_path", str(EMBEDDED)),
        "convert_hf_checkpoint.py",
    ),
    "a text and tasks": ((*TEXT, "--tasks", "a"), "--text_file does not go with --tasks"),
    "an empty task name": (("--tasks", "a,,b"), "--tasks 'a,,b'"),
    "a limit of zero": (("--tasks", "a", "--limit", "0"), "--limit 0"),
    "a limit without tasks": ((*TEXT, "--limit", "2"), "--limit needs --tasks"),
    "negative few shots": (("--tasks", "a", "--num_fewshot", "-1"), "--num_fewshot -1"),
    "a missing folder of tasks": (
        ("--tasks", "a", "--include_path", "nowhere"),
        "--include_path nowhere",
    ),
}
if not torch.cuda.is_available():
    MISTAKES["a missing device"] = ((*TEXT, "--device", "cuda"), "--device cpu")


@pytest.fixture
def texts(tmp_path, monkeypatch) -> Path:
    """Make a folder with the texts of MISTAKES the current one."""
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 ")
    (tmp_path / "good.txt").write_bytes(b"import os\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", MISTAKES)
def test_a_users_mistake_is_one_line_before_weights_are_read(
    case, directory, texts, monkeypatch, capsys
):
    arguments, message = MISTAKES[case]
    path = () if "--checkpoint_path" in arguments else ("--checkpoint_path", str(directory))
    monkeypatch.setattr(Checkpoint, "read", lambda *_, **__: pytest.fail("a weight is read"))
    assert run_main(monkeypatch, *path, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1
    assert message in err


def test_a_users_mistake_through_the_command(directory, texts, monkeypatch, capsys):
    file = str(texts / "latin.txt")
    assert run_main(monkeypatch, "--checkpoint_path", str(directory), "--text_file", file) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.slow  # tests/test_startup.py has it before PyTorch is imported
def test_without_lm_eval_the_error_names_the_package(directory, tmp_path):
    (tmp_path / "lm_eval.py").write_text("raise ImportError('not here')")  # hides an installed one
    arguments = "--checkpoint_path", str(directory), "--tasks", "arc_easy"
    run = command(*arguments, PYTHONPATH=str(tmp_path))
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == "error: --tasks needs lm-eval: pip install 'moe-fast[eval]'\n"


# lm-eval ------------------------------------------------------------------------------------------


def documents(name: str) -> list[dict]:
    return [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def run_tasks(directory, tmp_path):
    """Run the command offline, without a model or data of Hugging Face."""
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'moe-fast[eval]'")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment = {"HF_HOME": str(tmp_path / "cache"), **offline}

    def run(tasks: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
        line = "--checkpoint_path", str(directory), "--tasks", tasks, "--include_path", str(folder)
        return command(*line, *arguments, **environment)

    return run


@pytest.mark.slow
def test_lm_evals_metrics_follow_from_our_answers(tiny, tokenizer, run_tasks):
    """Tasks from local files: multiple choice, a completion, a text's probability."""
    names = ("python_choice", "python_line", "python_text")
    run = run_tasks(",".join(names), TASKS, "--dtype", "fp32", "--seq_len", "64", "--json")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    choice, line, text = (result["results"][name] for name in names)

    right = 0
    for document in documents("python_choice"):
        pairs = [(document["code"], choice) for choice in document["choices"]]
        logprobs = [logprob for logprob, _ in loglikelihood(tiny, tokenizer, pairs, 64)]
        right += logprobs.index(max(logprobs)) == document["answer"]
    assert choice["acc,none"] == pytest.approx(right / len(documents("python_choice")))
    assert 0.5 < choice["acc,none"] < 1

    lines, settings = documents("python_line"), {"until": ["\n"], "max_gen_toks": 24}
    requests = [(document["code"], settings) for document in lines]
    texts = generate_until(tiny, tokenizer, requests, 64)
    pairs = zip(texts, lines, strict=True)
    right = sum(text == document["rest"] for text, document in pairs)
    assert line["exact_match,none"] == pytest.approx(right / len(texts)) and 0 < right < len(texts)

    codes = [document["code"] for document in documents("python_text")]
    nats = -sum(loglikelihood_rolling(tiny, tokenizer, [(code,) for code in codes], 64))
    bits = nats / math.log(2) / sum(len(code.encode()) for code in codes)
    assert text["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert result["bits_per_weight"] == 32.0 and result["n-shot"] == dict.fromkeys(names, 0)


@pytest.mark.slow
def test_limit_and_num_fewshot_reach_lm_eval(run_tasks):
    limits = "--limit", "4", "--num_fewshot", "2"
    run = run_tasks("python_choice", TASKS, "--dtype", "fp32", *limits)
    assert run.returncode == 0, run.stderr
    assert re.search(r"python_choice\|.*\| +2\|acc ", run.stdout), run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "message"), (("bad", "cannot be read"), ("no_such_task", "no such task"))
)
def test_a_task_that_cannot_run_is_refused_before_weights_are_read(
    task, message, tmp_path, run_tasks
):
    (tmp_path / "bad.yaml").write_text(
        "task: bad\ndataset_path: json\ndataset_kwargs: {data_files: none.jsonl}\n"
    )
    run = run_tasks(task, tmp_path)
    assert run.returncode == 2 and run.stdout == "" and message in run.stderr.splitlines()[-1]
    assert "loaded" not in run.stderr and "mapped" not in run.stderr


# Formats ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_quality_of_the_formats():
    """benchmarks/quality.py on a part of the held-out text.

    Bounds are those of the published tables, with a margin since it is only a part.
    """
    source, text = Checkpoint(embedded_checkpoint()), HELDOUT[:40_000]

    def of(attention: str, experts: str, iterations: int | None = None) -> float:
        row = measure(source, text, (attention, experts, iterations), 1024, torch.device("cpu"))
        return row["perplexity"]

    plain = of("bf16", "bf16")
    assert of("int8", "int8") < 1.005 * plain
    assert of("fp8", "fp8") < 1.01 * plain
    solved = [of(mode, mode) for mode in ("hqq4", "hqq3", "hqq2")]
    rounded = [of(mode, mode, 0) for mode in ("hqq4", "hqq3", "hqq2")]
    assert solved[0] < 1.003 * rounded[0] and solved[1] < rounded[1] and solved[2] < rounded[2]
    assert all(fewer > 0.997 * more for more, fewer in itertools.pairwise((plain, *solved)))
    assert of("bf16", "hqq4") < of("hqq4", "bf16")  # at four times the bytes saved
