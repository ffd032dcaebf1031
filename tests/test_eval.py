"""Perplexity and lm-eval's questions, against references that run one token at a time, and the command."""

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

import eval as room
from answer import generate
from benchmarks.quality import measure
from checkpoint import Checkpoint
from eval import generate_until, join, loglikelihood, loglikelihood_rolling, perplexity, score_windows, weight_size
from generate import EMBEDDED, embedded_checkpoint, load_model
from model import Transformer
from session import Sampling, Session

ROOT = Path(__file__).parents[1]
HELDOUT = (EMBEDDED / "heldout.txt").read_text()
TASKS = ROOT / "tests" / "tasks"


class Letters:
    """A tokenizer for the random checkpoints of 160 ids: BOS is 1, a character of ASCII is 3 and its number."""

    bos_id, stop_ids = 1, (2,)

    def encode(self, text: str, bos: bool = True) -> list[int]:
        return [1] * bos + [3 + byte for byte in text.encode()]

    def token_bytes(self, id: int) -> bytes:
        return bytes([id - 3]) if id >= 3 else b""


@pytest.fixture(scope="session")
def tiny(directory):
    """The embedded model in fp32."""
    return load_model(directory, "cpu", torch.float32)


def peer_nats(family, ids: list[int]) -> float:
    """transformers' nats of the last id, given those before it."""
    with torch.no_grad():
        logits = family.peer(torch.tensor([ids[:-1]])).logits[0, -1]
    return F.cross_entropy(logits.double(), torch.tensor(ids[-1])).item()


def naive(model, ids: list[int], count: int) -> tuple[float, bool]:
    """What `score_windows` says of a window, one token and one empty cache at a time."""
    nats, greedy = 0.0, True
    for end in range(len(ids) - count, len(ids)):
        model.setup_cache(1, end)
        logits = model(torch.tensor([ids[:end]]), torch.arange(end).unsqueeze(0))[0]
        nats += F.cross_entropy(logits.double(), torch.tensor(ids[end])).item()
        greedy &= logits.argmax().item() == ids[end]
    return nats, greedy


# Perplexity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq_len", "stride"), ((24, None), (25, 7), (16, 16), (120, None)))
def test_perplexity_is_that_of_one_window_a_token(family, seq_len, stride):
    """Each token is given what the first window that holds it has before it; Mixtral's attention ends at 16."""
    model, text = load_model(family.directory, "cpu"), "the quick brown fox jumps over the lazy dog, twice and again"
    ids, step = Letters().encode(text), stride or seq_len // 2
    total = 0.0
    for n in range(1, len(ids)):
        start = step * max(0, math.ceil((n - seq_len) / step))
        assert n - start <= seq_len and (start == 0 or n - start > seq_len - step)
        total += peer_nats(family, ids[start : n + 1])
    result = perplexity(model, Letters(), text, seq_len, stride, progress=False)
    assert result["tokens"] == len(text) and (result["seq_len"], result["stride"]) == (seq_len, step)
    assert math.log(result["perplexity"]) == pytest.approx(total / len(text), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(total / len(text) / math.log(2), rel=1e-5)


def test_without_bos_the_first_token_counts_neither_as_token_nor_as_bytes(make_family):
    family, text = make_family("olmoe"), "xyz and so on"
    model, plain = load_model(family.directory, "cpu"), Letters()
    plain.encode = lambda text, bos=True: Letters().encode(text, bos=False)
    result, ids = perplexity(model, plain, text, 64, progress=False), plain.encode(text)
    total = sum(peer_nats(family, ids[: n + 1]) for n in range(1, len(ids)))
    assert result["tokens"] == len(text) - 1
    assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / (len(text) - 1), rel=1e-5)


@pytest.mark.parametrize("positions", (1, 7, 30))
def test_slices_of_the_logits_do_not_change_the_result(family, positions, monkeypatch):
    model, sizes = load_model(family.directory, "cpu"), []
    windows = [(Letters().encode("a text of some length"), 20), (Letters().encode("another"), 3)]
    whole = score_windows(model, windows)
    finish = Transformer.finish
    monkeypatch.setattr(room, "LOGIT_POSITIONS", positions)
    monkeypatch.setattr(
        Transformer, "finish", lambda self, x, last: (sizes.append(x.shape[1]), finish(self, x, last))[1]
    )
    sliced = score_windows(model, windows)
    assert max(sizes) <= positions and sum(sizes) == 23  # no logits but those that are scored
    for (nats, greedy), (wanted, wanted_greedy) in zip(sliced, whole, strict=True):
        assert nats == pytest.approx(wanted, rel=1e-6) and greedy == wanted_greedy


def test_a_part_of_the_held_out_text_by_hand(tiny, tokenizer):
    """The loop of tests/test_tiny_moe.py, on a few windows."""
    text, window = HELDOUT[:6000], 512
    ids = torch.tensor(tokenizer.encode(text))
    positions, nats = torch.arange(window).unsqueeze(0), 0.0
    tiny.setup_cache(1, window)
    for start in range(0, len(ids) - 1 - window // 2, window // 2):
        part = ids[start : start + window + 1]
        fresh = slice(window // 2 if start else 0, None)
        logits = tiny(part[None, :-1], positions[:, : len(part) - 1], all_positions=True)
        nats += F.cross_entropy(logits[0, fresh], part[1:][fresh], reduction="sum").item()
    result = perplexity(tiny, tokenizer, text, window, progress=False)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-6)
    assert result["tokens"] == len(ids) - 1


@pytest.mark.slow
def test_the_embedded_models_stated_figures(directory):
    stated = (EMBEDDED / "README.md").read_text()
    bits = float(re.search(r"held-out bits per byte \| \*\*([\d.]+)\*\*", stated)[1])
    found = re.search(r"held-out perplexity \| ([\d.]+) a token \(([\d,]+) tokens", stated)
    run = command("--dtype", "fp32", "--device", "cpu", "--json", XDG_CACHE_HOME=str(directory.parent / "cache"))
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["bits_per_byte"] == pytest.approx(bits, abs=1e-4)
    assert result["perplexity"] == pytest.approx(float(found[1]), abs=1e-3)
    assert result["tokens"] == int(found[2].replace(",", "")) and result["seq_len"] == 2048


def test_bits_per_weight(directory, family):
    model = load_model(directory, "cpu")
    assert weight_size(model) == {"bits_per_weight": 16.0, "bytes": 2 * 8_933_632}
    assert weight_size(load_model(family.directory, "cpu"))["bits_per_weight"] == 32.0  # Qwen3's here is tied
    router = model.layers[0].ffn.router  # two weights a byte, and a scale a row
    packed, scale = router.weight[:, ::2].to(torch.uint8), torch.ones(router.weight.shape[0], 1)
    stored = 2 * 8_933_632 - router.weight.nbytes + packed.nbytes + scale.nbytes
    router.weight = torch.nn.Parameter(packed, requires_grad=False)
    router.register_buffer("scale", scale)
    assert weight_size(model) == {"bits_per_weight": 8 * stored / 8_933_632, "bytes": stored}


def test_output_that_is_no_number_is_refused(make_family):
    model = load_model(make_family("olmoe").directory, "cpu")
    model.norm.weight.data.fill_(float("inf"))
    with pytest.raises(ValueError, match="not finite"):
        perplexity(model, Letters(), "a text", 8, progress=False)


def test_ids_of_another_vocabulary_are_refused(make_family):
    model = load_model(make_family("olmoe").directory, "cpu")
    with pytest.raises(ValueError, match="below 160"):
        perplexity(model, Letters(), "é" * 9, 8, progress=False)


# lm-eval's questions ------------------------------------------------------------------------------------------------


def test_where_context_and_continuation_meet(tokenizer):
    """The four cases: spaces move over, nothing precedes, a token spans both, and one is only changed."""
    encode, text_of = tokenizer.encode, tokenizer.decode
    ids, count = join(tokenizer, "import os\n    ", "x = 1")
    assert ids == encode("import os\n    x = 1") and text_of(ids[:-count]) == "import os"
    for context in ("", " \n"):
        ids, count = join(tokenizer, context, "import os")
        assert ids == encode(context + "import os") and ids[0] == tokenizer.bos_id and count == len(ids) - 1
    context, continuation = "for i in range(", "None is:"
    before, whole = encode(context), encode(context + continuation)
    assert whole[: len(before)] != before  # "(None" is one token
    assert join(tokenizer, context, continuation) == (before + whole[len(before) :], len(whole) - len(before))
    before, whole = encode("impor"), encode("import")
    assert len(whole) <= len(before)
    assert join(tokenizer, "impor", "t") == (whole, 1)
    assert join(tokenizer, "import os", "")[1] == 0


PAIRS = (
    ("import os\n\ndef main():\n", "    pass"),
    ("import sys\n", "sys.exit(main())"),
    ("", "import os"),
    ("if not isinstance(name, str):\n", "    raise TypeError"),
    ("while True:\n    ", "line = f.readline()\n"),
    ("import os", ""),
)


@pytest.mark.parametrize("max_length", (4096, 8))
def test_loglikelihood_is_that_of_one_token_at_a_time(tiny, tokenizer, max_length, capsys):
    found = loglikelihood(tiny, tokenizer, PAIRS, max_length)
    cut = 0
    for (logprob, greedy), pair in zip(found, PAIRS, strict=True):
        ids, count = join(tokenizer, *pair)
        cut += len(ids) > max_length + 1
        nats, wanted = naive(tiny, ids[-max_length - 1 :], count)
        assert logprob == pytest.approx(-nats, rel=1e-5) and greedy == wanted
    assert ("contexts are cut" in capsys.readouterr().err) == (cut > 0) == (max_length == 8)


def test_the_greedy_continuation_is_known_as_such(tiny, tokenizer):
    context = "import os\nimport sys\nimport"
    session = Session(tiny, 64)
    ids = list(session.stream(tokenizer.encode(context), 5, Sampling(temperature=0)))
    chosen = tokenizer.decode(tokenizer.encode(context) + ids)[len(context) :]
    assert join(tokenizer, context, chosen) == (tokenizer.encode(context) + ids, 5)
    other = chosen[:-1] + ("x" if chosen[-1] != "x" else "y")
    (right, is_greedy), (wrong, other_is) = loglikelihood(tiny, tokenizer, [(context, chosen), (context, other)], 4096)
    assert is_greedy and not other_is and right > wrong


def test_a_continuation_longer_than_the_window_is_refused(tiny, tokenizer):
    with pytest.raises(ValueError, match="--seq_len 4"):
        loglikelihood(tiny, tokenizer, [("a", "import os, sys, re, json, math")], 4)


@pytest.mark.parametrize("max_length", (4096, 10))
def test_rolling_loglikelihood_is_that_of_one_token_at_a_time(tiny, tokenizer, max_length):
    """Windows that follow each other; the last one is full, so the tokens in it are given more than is left over."""
    texts = ("import os\nimport sys\n\n\ndef main(path):\n    return os.listdir(path)\n", "x = 1", "")
    found = loglikelihood_rolling(tiny, tokenizer, [(text,) for text in texts], max_length)
    for logprob, text in zip(found, texts, strict=True):
        ids = [tokenizer.bos_id, *tokenizer.encode(text, bos=False)]
        total = 0.0
        for n in range(1, len(ids)):
            end = min(max_length * math.ceil(n / max_length), len(ids) - 1)
            total += naive(tiny, ids[max(0, end - max_length) : n + 1], 1)[0]
        assert logprob == pytest.approx(-total, rel=1e-5)


def test_generate_until_is_generate(tiny, tokenizer):
    context, n = "import os\nimport sys\n\nclass", 30
    greedy = generate(Session(tiny, 128), tokenizer, context, n, Sampling(temperature=0), ignore_eos=True)["text"]
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
    room_for = len(tokenizer.encode(context)) - 2
    (left,) = generate_until(tiny, tokenizer, requests[:1], room_for + n)
    wanted = generate(Session(tiny, 128), tokenizer, tokenizer.encode(context)[2:], n, Sampling(temperature=0))
    assert left == wanted["text"]


@pytest.mark.parametrize(
    ("settings", "words"), (({"max_gen_toks": 64}, "--seq_len 64"), ({"num_beams": 4, "until": []}, "num_beams"))
)
def test_generation_that_cannot_be_is_refused(tiny, tokenizer, settings, words):
    with pytest.raises(ValueError, match=words):
        generate_until(tiny, tokenizer, [("a", settings)], 64)


def test_a_text_that_nothing_precedes_begins_with_bos_or_eos():
    with pytest.raises(ValueError, match="neither"):
        room.prefix_id(SimpleNamespace(bos_id=None, stop_ids=()))
    assert room.prefix_id(SimpleNamespace(bos_id=None, stop_ids=(7, 8))) == 7
    assert room.prefix_id(SimpleNamespace(bos_id=0, stop_ids=(7, 8))) == 0


# Command ------------------------------------------------------------------------------------------------------------


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run eval.py as a user does."""
    environment = {**os.environ, **environment}
    line = [sys.executable, str(ROOT / "eval.py"), *arguments]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


def main(monkeypatch, *arguments: str) -> int:
    """The same in this process, without the seconds that importing takes."""
    monkeypatch.setattr(sys, "argv", ["eval.py", *arguments])
    return room.main()


def test_json_has_the_fields_of_the_design(directory, tmp_path, tiny, tokenizer, monkeypatch, capsys):
    text = HELDOUT[:500].replace("\n", "\r\n")  # which reading as text would change
    (tmp_path / "text.txt").write_bytes(text.encode())
    arguments = ("--checkpoint_path", str(directory), "--text_file", str(tmp_path / "text.txt"), "--seq_len", "64")
    run = command(*arguments, "--json")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    names = "perplexity bits_per_byte tokens bits_per_weight bytes seq_len stride seconds tokens_per_second kv_cache"
    assert set(names.split()) == set(result)
    assert result["bits_per_weight"] == 16.0 and result["bytes"] == 2 * 8_933_632 and result["stride"] == 32
    assert main(monkeypatch, *arguments, "--json", "--dtype", "fp32") == 0
    fp32 = json.loads(capsys.readouterr().out)
    assert fp32["perplexity"] == pytest.approx(perplexity(tiny, tokenizer, text, 64)["perplexity"], rel=1e-5)
    assert fp32["bits_per_weight"] == 32.0 and fp32["perplexity"] == pytest.approx(result["perplexity"], rel=0.02)
    assert main(monkeypatch, *arguments, "--dtype", "fp32") == 0
    out = capsys.readouterr().out
    assert f"perplexity {fp32['perplexity']:.4f}, {fp32['bits_per_byte']:.4f} bits a byte" in out
    assert "32 bits a weight" in out


BAD = {
    "an empty text": (("--text_file", "empty.txt"), "empty.txt is empty"),
    "a text that is not UTF-8": (("--text_file", "latin.txt"), "not UTF-8 at byte 3"),
    "a file that is not there": (("--text_file", "nowhere.txt"), "nowhere.txt: No such file"),
    "a folder for a file": (("--text_file", "."), "Is a directory"),
    "no text at all": (("--seq_len", "64"), "--text_file FILE or --tasks"),
    "a window of one": (("--text_file", "good.txt", "--seq_len", "1"), "--seq_len 1"),
    "a window beyond the model": (("--text_file", "good.txt", "--seq_len", "4097"), "4096 positions"),
    "no checkpoint": (("--text_file", "good.txt", "--checkpoint_path", "nowhere"), "nowhere"),
    "a layout that is not ours": (
        ("--text_file", "good.txt", "--checkpoint_path", str(EMBEDDED)), "convert_hf_checkpoint.py",
    ),
    "a text and tasks": (("--text_file", "good.txt", "--tasks", "a"), "--text_file does not go with --tasks"),
    "no task's name": (("--tasks", "a,,b"), "--tasks 'a,,b'"),
    "a limit of none": (("--tasks", "a", "--limit", "0"), "--limit 0"),
    "a limit without tasks": (("--text_file", "good.txt", "--limit", "2"), "--limit needs --tasks"),
    "few shots below none": (("--tasks", "a", "--num_fewshot", "-1"), "--num_fewshot -1"),
    "no such folder of tasks": (("--tasks", "a", "--include_path", "nowhere"), "--include_path nowhere"),
}  # fmt: skip
if not torch.cuda.is_available():
    BAD["a device that is not there"] = (("--text_file", "good.txt", "--device", "cuda"), "--device cpu")


@pytest.fixture
def texts(tmp_path, monkeypatch) -> Path:
    """A folder with the texts of BAD, in which the test runs."""
    for name, data in (("empty.txt", b""), ("latin.txt", b"caf\xe9 "), ("good.txt", b"import os\n")):
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", BAD)
def test_a_users_mistake_is_one_line_before_a_weight_is_read(case, directory, texts, monkeypatch, capsys):
    arguments, words = BAD[case]
    path = () if "--checkpoint_path" in arguments else ("--checkpoint_path", str(directory))
    monkeypatch.setattr(Checkpoint, "read", lambda *_, **__: pytest.fail("a weight is read"))
    assert main(monkeypatch, *path, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.startswith("error: ") and len(err.splitlines()) == 1


def test_a_users_mistake_through_the_command(directory, texts):
    run = command("--checkpoint_path", str(directory), "--text_file", str(texts / "latin.txt"))
    assert run.returncode == 2 and run.stdout == "" and len(run.stderr.splitlines()) == 1


def test_a_text_of_one_token_has_nothing_to_predict(make_family):
    model, plain = load_model(make_family("olmoe").directory, "cpu"), Letters()
    plain.encode = lambda text, bos=True: Letters().encode(text, bos=False)
    with pytest.raises(ValueError, match="no token to predict"):
        perplexity(model, plain, "a", 8)
    with pytest.raises(ValueError, match="stride 9"):
        perplexity(model, plain, "abc", 8, 9)


def test_without_lm_eval_the_tasks_say_how_to_get_it(directory, tmp_path):
    """A module of that name that cannot be imported stands in the way of an installed one."""
    (tmp_path / "lm_eval.py").write_text("raise ImportError('not here')")
    run = command("--checkpoint_path", str(directory), "--tasks", "arc_easy", PYTHONPATH=str(tmp_path))
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == "error: --tasks needs lm-eval: pip install 'moe-fast[eval]'\n"


# lm-eval itself -----------------------------------------------------------------------------------------------------


def documents(name: str) -> list[dict]:
    return [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_lm_evals_tasks_are_our_questions_in_its_words(directory, tiny, tokenizer, tmp_path):
    """A choice, a completion and a text's probability, from local files, without a transformers model."""
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'moe-fast[eval]'")
    environment = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    arguments = ("--checkpoint_path", str(directory), "--dtype", "fp32", "--include_path", str(TASKS))
    names = ("python_choice", "python_line", "python_text")
    run = command(*arguments, "--tasks", ",".join(names), "--seq_len", "64", "--json", **environment)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    choice, line, text = (result["results"][name] for name in names)

    right = 0
    for document in documents("python_choice"):
        pairs = [(document["code"], choice) for choice in document["choices"]]
        logprobs = [logprob for logprob, _ in loglikelihood(tiny, tokenizer, pairs, 64)]
        right += logprobs.index(max(logprobs)) == document["answer"]
    assert choice["acc,none"] == pytest.approx(right / len(documents("python_choice"))) and 0.5 < choice["acc,none"] < 1

    requests = [(document["code"], {"until": ["\n"], "max_gen_toks": 24}) for document in documents("python_line")]
    texts = generate_until(tiny, tokenizer, requests, 64)
    right = sum(text == document["rest"] for text, document in zip(texts, documents("python_line"), strict=True))
    assert line["exact_match,none"] == pytest.approx(right / len(texts)) and 0 < right < len(texts)

    codes = [document["code"] for document in documents("python_text")]
    nats = -sum(loglikelihood_rolling(tiny, tokenizer, [(code,) for code in codes], 64))
    bits = nats / math.log(2) / sum(len(code.encode()) for code in codes)
    assert text["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert result["bits_per_weight"] == 32.0 and result["n-shot"] == dict.fromkeys(names, 0)

    run = command(*arguments, "--tasks", "python_choice", "--limit", "4", "--num_fewshot", "2", **environment)
    assert run.returncode == 0 and re.search(r"python_choice\|.*\| +2\|acc ", run.stdout), run.stderr

    (tmp_path / "bad.yaml").write_text("task: bad\ndataset_path: json\ndataset_kwargs: {data_files: none.jsonl}\n")
    for task, words in (("bad", "cannot be read"), ("no_such_task", "no such task")):
        run = command(
            "--checkpoint_path", str(directory), "--tasks", task, "--include_path", str(tmp_path), **environment
        )
        assert run.returncode == 2 and run.stdout == "" and words in run.stderr.splitlines()[-1]
        assert "loaded" not in run.stderr and "mapped" not in run.stderr


# Formats


@pytest.mark.slow
def test_quality_of_the_formats():
    """benchmarks/quality.py on a part of the held-out text: what the README's tables claim, with room for the part."""
    source, text = Checkpoint(embedded_checkpoint()), (EMBEDDED / "heldout.txt").read_text()[:40_000]

    def of(attention: str, experts: str, iterations: int | None = None) -> float:
        return measure(source, text, attention, experts, iterations, 1024, torch.device("cpu"))["perplexity"]

    plain = of("bf16", "bf16")
    assert of("int8", "int8") < 1.005 * plain
    assert of("fp8", "fp8") < 1.01 * plain
    solved = [of(mode, mode) for mode in ("hqq4", "hqq3", "hqq2")]
    rounded = [of(mode, mode, 0) for mode in ("hqq4", "hqq3", "hqq2")]
    assert solved[0] < 1.003 * rounded[0] and solved[1] < rounded[1] and solved[2] < rounded[2]
    assert all(fewer > 0.997 * more for more, fewer in itertools.pairwise((plain, *solved)))
    assert of("bf16", "hqq4") < of("hqq4", "bf16")  # at four times the bytes saved
