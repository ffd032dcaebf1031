"""Training the embedded checkpoint: corpus, tokenizer, model, optimizer, and a smoke run."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from argparse import Namespace
from pathlib import Path

import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from conftest import EMBEDDED, HYBRID_CHECKPOINT
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralForCausalLM

from scripts import train_tiny_moe as tiny

ROOT = Path(__file__).resolve().parent.parent
STDLIB = Path(sysconfig.get_path("stdlib"))
SMALL = {**tiny.SMOKE_SIZES, "vocab_size": 64}


@pytest.fixture(scope="module")
def corpus():
    return tiny.split_corpus(tiny.read_library(STDLIB))


def command(*arguments):
    script = [sys.executable, "scripts/train_tiny_moe.py", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(script, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Run the same command twice; return (folder, summary) of each run."""
    runs = []
    for _ in range(2):
        folder = tmp_path_factory.mktemp("smoke") / "own-name"
        done = command("--smoke", "--output_dir", folder)
        assert done.returncode == 0, done.stderr
        runs.append((folder, json.loads(done.stdout.splitlines()[-1])))
    return runs


# ------------------------------------------------------------------------------------------- corpus


def test_the_split_lists_at_least_fifty_modules_once():
    sections, _ = tiny.read_split()
    assert set(sections) == {"heldout", "validation", "unused"}
    assert len(sections["heldout"]) >= 50
    everything = sections["heldout"] + sections["validation"]
    assert len(everything) == len(set(everything))


def test_parts_share_nothing_and_the_text_is_whole(corpus):
    parts = [corpus.train, corpus.validation, corpus.heldout]
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert len(corpus.heldout) + len(corpus.missing) >= 50
    for name, text in corpus.heldout.items():
        assert text.encode() == (STDLIB / name).read_bytes()
    if not corpus.missing:  # the library of another Python may lack modules
        assert 150_000 < sum(len(text.encode()) for text in corpus.heldout.values()) < 260_000


def test_tests_and_tables_of_held_out_modules_are_not_trained_on(corpus):
    tests = "test/test_bisect.py", "test/test_fnmatch.py", "test/test_wsgiref.py"
    for name in ("html/entities.py", *tests):
        assert name not in corpus.train
    unused = "_sysconfigdata", "site-packages", "encodings/cp1"
    assert not any(name.startswith(unused) for name in corpus.train)
    assert "heapq.py" in corpus.train and "html/parser.py" in corpus.train


def test_no_held_out_text_is_trained_on(corpus):
    leaks = tiny.check_leaks(corpus)
    assert leaks["lines"] < 0.15 and leaks["stretches"] < 0.03


@pytest.mark.parametrize(
    "change",
    [lambda t: t, lambda t: "# moved\n" + t.replace("import", "from __future__ import")],
)
def test_a_copy_under_another_name_is_refused(corpus, change):
    near_copy = change(corpus.heldout["bisect.py"])
    few = dict(list(corpus.train.items())[:60])
    leaky = tiny.replace(corpus, train={**few, "idlelib/copy_of.py": near_copy})
    with pytest.raises(
        ValueError, match=r"idlelib/copy_of.py is \d+% the held-out module bisect.py"
    ):
        tiny.check_leaks(leaky)


def test_a_shared_substring_is_counted(corpus):
    few = dict(list(corpus.train.items())[:3])
    clean = tiny.check_leaks(tiny.replace(corpus, train=few))["stretches"]
    own = "".join(f"x{i} = {i} * the_quoting_module\n" for i in range(200))
    quoting = {**few, "quoting.py": own + corpus.heldout["sched.py"][-800:]}
    assert tiny.check_leaks(tiny.replace(corpus, train=quoting))["stretches"] > clean


def test_read_library_skips_packages_and_other_encodings_and_keeps_line_ends(tmp_path):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "a.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    (tmp_path / "b.py").write_bytes(b"x = 1\r\n\ty = 2\r\n")
    assert tiny.read_library(tmp_path) == {"b.py": "x = 1\r\n\ty = 2\r\n"}


# ---------------------------------------------------------------------------------------- tokenizer


@pytest.fixture(scope="module")
def tokenizer(corpus):
    documents = tiny.smoke_corpus(corpus).train
    return sentencepiece.SentencePieceProcessor(model_proto=tiny.train_tokenizer(documents, 1024))


def test_every_text_round_trips(corpus, tokenizer):
    odd = ["", " ", "\t", "\n\n\n\n    x", "a\r\n\tb\r\n", "  two  spaces  "]
    odd += ["\U0001f600 é \u2028", "\n" + " " * 37]
    for text in [*odd, *list(corpus.train.values())[::40], *corpus.heldout.values()]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_line_break_and_an_indentation_are_one_token_each(tokenizer):
    ids = tokenizer.encode("x\n        y\n\n    z\n")
    pieces = ["x", "\n", " " * 8, "y", "\n", "\n", " " * 4, "z", "\n"]
    assert [tokenizer.decode(i) for i in ids] == pieces
    assert (tokenizer.unk_id(), tokenizer.bos_id(), tokenizer.eos_id()) == (0, tiny.BOS, tiny.EOS)


# ------------------------------------------------------------------------------- model and training


def build(family="mixtral", dropout=0.0, **sizes):
    """Build a small model with random weights of a size that shows in its logits."""
    torch.manual_seed(0)
    try:
        model = tiny.build_model(family, dropout, **SMALL | sizes).eval()
        tiny.predict(model, torch.zeros(1, 2, dtype=torch.long))
    except ValueError as error:  # an older transformers
        pytest.skip(str(error))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_the_full_model_has_about_nine_million_parameters_and_fits_the_repository():
    with torch.device("meta"):
        parameters = sum(p.numel() for p in tiny.build_model("mixtral").parameters())
    assert 8.5e6 < parameters < 9.5e6
    assert 2 * parameters < 19 * 2**20


def test_the_hybrid_model_fits_in_six_mebibytes():
    with torch.device("meta"):
        model = tiny.build_model("qwen3_5_moe")
    assert 5.5 * 2**20 < 2 * sum(p.numel() for p in model.parameters()) < 6 * 2**20
    assert model.config.layer_types == (3 * ["linear_attention"] + ["full_attention"]) * 2


@pytest.mark.parametrize("family", ("gpt_oss", "qwen3_5_moe"))
def test_full_sizes_are_saved_as_two_equal_shards(family, tmp_path):
    """With experts that are saved as one stack, and with layers of two kinds."""
    tiny.save_model(tiny.build_model(family), tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = {name: (tmp_path / name).stat().st_size for name in index["weight_map"].values()}
    assert len(shards) == len(list(tmp_path.glob("*.safetensors"))) == 2
    assert max(shards.values()) < 1.3 * min(shards.values())


def test_the_balance_loss_equals_a_loop_over_tokens():
    model = build()
    tokens = torch.randint(64, (2, 5))
    _, balance, used = tiny.predict(model, tokens)
    scores = model(tokens, output_router_logits=True).router_logits
    expected = []
    for layer, logits in enumerate(scores):
        share, mean = torch.zeros(8), torch.zeros(8)
        for b, s in ((b, s) for b in range(2) for s in range(5)):
            probs = logits[5 * b + s].softmax(-1)
            chosen = probs.argsort(descending=True)[:2]
            assert used[layer, b, s].nonzero().flatten().tolist() == sorted(chosen.tolist())
            share[chosen] += 1 / 20
            mean += probs / 10
        expected.append(8 * (share * mean).sum())
    torch.testing.assert_close(balance, torch.stack(expected).mean())


def test_outputs_to_the_residual_stream_start_smaller():
    torch.manual_seed(0)
    for name, parameter in tiny.build_model("mixtral", num_hidden_layers=2).named_parameters():
        small = name.endswith(("o_proj.weight", "experts.down_proj"))
        if parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(0.01 if small else 0.02, rel=0.05)


def test_dropout_acts_on_each_branch_in_training_only():
    model, tokens = build(dropout=1.0), torch.randint(64, (2, 5))
    logits = tiny.predict(model, tokens)[0]
    assert logits.std() > 0.01 and torch.equal(logits, tiny.predict(model, tokens)[0])
    assert not tiny.predict(model.train(), tokens)[0].any()
    model.get_input_embeddings()._forward_hooks.clear()
    last = model.lm_head(model.model.norm(model.get_input_embeddings()(tokens)))
    torch.testing.assert_close(tiny.predict(model, tokens)[0], last)


@pytest.mark.slow  # `smoke` trains mixtral
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_learns_and_is_saved(family, tmp_path):
    model = build(family, dropout=0.1)
    options = Namespace(lr=5e-3, weight_decay=0.4)
    optimizers, losses = tiny.build_optimizers(model.train(), options), []
    tokens = torch.randint(64, (2, 33))
    for _ in range(8):
        logits, balance, _ = tiny.predict(model, tokens[:, :-1])
        losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        (losses[-1] + 0.05 * balance).backward()
        assert all(parameter.grad.any() for parameter in model.parameters())
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=False)
    assert losses[-1] < 0.8 * losses[0]
    tiny.save_model(model, tmp_path)
    shards = [path.stat() for path in tmp_path.glob("*.safetensors")]
    assert len(shards) == 2 and max(s.st_size for s in shards) < 2 * min(s.st_size for s in shards)
    assert all(shard.st_mode & 0o777 == 0o644 for shard in shards)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert saved.config.model_type == tiny.MODEL_TYPES.get(family, family)
    for parameter in model.eval().parameters():
        parameter.data = parameter.data.bfloat16().float()
    expected = tiny.predict(model, tokens)[0]
    torch.testing.assert_close(tiny.predict(saved, tokens)[0], expected)


@pytest.mark.parametrize("name", ["down_proj", "gate_up_proj"])
def test_muon_moves_each_matrix_by_the_promised_amount(name):
    torch.manual_seed(0)
    shapes = [(32, 64), (64, 32), (4, 32, 64), (4, 64, 32), (32, 32)]
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    stacks = [tiny.matrices(name, p) for p in params]
    count = sum(stack.shape[:-2].numel() for stack in stacks)
    assert count == (1 + 1 + 4 + 4 + 1) * (2 if name == "gate_up_proj" else 1)
    views = [view for stack in stacks for view in stack.reshape(-1, *stack.shape[-2:]).unbind()]
    optimizer = tiny.Muon(stacks, lr=0.1, weight_decay=0.0)
    optimizer.step()
    for p in params:
        assert (p * p.grad).sum() < 0  # downhill
        assert p.detach().pow(2).mean().sqrt().item() == pytest.approx(0.1 * 0.2, rel=0.3)
    for view in views:
        if view.shape[0] == view.shape[1]:  # a square random gradient can be nearly singular
            continue
        singular = torch.linalg.svdvals(view.detach()) / (0.1 * 0.2 * max(view.shape) ** 0.5)
        assert singular.min() > 0.6 and singular.max() < 1.3


def test_muon_is_torchs_for_each_matrix():
    torch.manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(3, 32, 64))
    alone = [torch.nn.Parameter(matrix.clone()) for matrix in stack.data]
    settings = {"lr": 0.1, "weight_decay": 0.4}
    ours = tiny.Muon([stack], **settings)
    theirs = torch.optim.Muon(alone, **settings, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        for matrix, grad in zip(alone, stack.grad, strict=True):
            matrix.grad = grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(stack.data, torch.stack([m.data for m in alone]), atol=0.02, rtol=0)


def test_an_epoch_draws_windows_of_its_documents_in_order():
    documents = [torch.arange(100 * i, 100 * i + 90) for i in range(8)]
    keep = torch.tensor([1.0] * 7 + [0.0])
    drawn = tiny.batches(documents, keep, batch=2, length=10, seed=0)
    first = [next(drawn) for _ in range(30)]
    for _, inputs, targets in first:
        assert inputs.shape == targets.shape == (2, 10)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert targets.max() < 700  # the last document has probability 0
    assert first[0][0] == 0 and first[-1][0] == 0 and next(drawn)[0] in (0, 1)
    with pytest.raises(ValueError, match="less than one batch"):
        next(tiny.batches(documents, keep, batch=100, length=10, seed=0))


@pytest.mark.parametrize("length", [2, 9, 16, 17, 24, 25, 40])
def test_each_token_is_scored_once_with_its_context(length):
    model = build()
    ids = torch.randint(64, (length,)).tolist()
    nats, load = tiny.score(model, ids, window=16)
    expected = 0.0
    for target in range(1, length):
        start = max(0, math.ceil((target - 16) / 8) * 8)  # the first window that holds the target
        logits = model(torch.tensor([ids[start:target]])).logits[0, -1]
        expected -= logits.log_softmax(-1)[ids[target]].item()
    assert nats == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(load.mean(1), torch.ones(2, dtype=torch.float64))


# --------------------------------------------------------------------------------------- checkpoint


@pytest.mark.slow
def test_a_smoke_run_gives_the_same_bytes_twice(smoke):
    (first, _), (second, _) = smoke
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    folders = [path.name for path in first.parent.iterdir()]
    assert folders == [first.name]  # no scratch folder is left


@pytest.mark.slow
def test_the_layout_is_that_of_the_hub(smoke):
    folder, summary = smoke[0]
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["MixtralForCausalLM"] and config["torch_dtype"] == "bfloat16"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    seen, parameters = {}, 0
    for shard in shards:
        with safe_open(folder / shard, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                seen[name] = shard
                parameters += tensors.get_tensor(name).numel()
                assert tensors.get_tensor(name).dtype == torch.bfloat16
    assert seen == index["weight_map"]
    assert parameters == summary["parameters"] and index["metadata"]["total_size"] == 2 * parameters
    assert 0.5 < (folder / shards[0]).stat().st_size / (folder / shards[1]).stat().st_size < 2
    prefix = "model.layers.1.block_sparse_moe.experts"
    experts = {f"{prefix}.{e}.w{w}.weight" for e in range(8) for w in (1, 2, 3)}
    assert experts < set(seen) and "lm_head.weight" not in seen
    assert json.loads((folder / "tokenizer_config.json").read_text())["add_bos_token"] is True
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == tiny.EOS


@pytest.mark.slow
def test_the_readme_and_the_summary_hold_the_measurements(smoke, corpus):
    folder, summary = smoke[0]
    readme = (folder / "README.md").read_text()
    for field in ("bits_per_byte", "unigram_bits_per_byte"):
        assert f"{summary[field]:.4f}" in readme
    words = "PSF-2.0", "held-out perplexity", "Expert load", "Temperature 0.8"
    for word in (*words, f"{summary['steps']:,} steps"):
        assert word in readme
    assert str(STDLIB) not in readme
    assert readme.startswith("# own-name\n")
    run = re.search(r"^    python scripts/train_tiny_moe.py (.+)", readme, re.MULTILINE)[1]
    options = tiny.parse_options(["--smoke", "--output_dir", "own-name"])
    assert vars(tiny.parse_options(run.split())) == vars(options)
    heldout = (folder / "heldout.txt").read_bytes()
    assert heldout.decode() == "".join(tiny.smoke_corpus(corpus).heldout.values())
    assert len(heldout) == summary["bytes"]
    nats = summary["bits_per_byte"] * math.log(2) * summary["bytes"]
    assert summary["perplexity"] == pytest.approx(math.exp(nats / summary["tokens"]))
    bits_untrained = math.log2(1024) * summary["tokens"] / summary["bytes"]
    assert summary["bits_per_byte"] < 0.9 * bits_untrained
    assert 0 <= summary["min_load"] <= 1 <= summary["max_load"]


@pytest.mark.slow
def test_the_saved_weights_have_the_measured_bits_per_byte(smoke):
    """Another implementation of attention and of the experts gives the same result."""
    folder, summary = smoke[0]
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings)
    assert AutoConfig.from_pretrained(folder).num_local_experts == 8
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = [tiny.BOS, *tokenizer.encode((folder / "heldout.txt").read_text())]
    nats, load = tiny.score(model, ids, window=128)
    bits = nats / math.log(2) / summary["bytes"]
    assert bits == pytest.approx(summary["bits_per_byte"], rel=1e-5)
    assert load.min().item() == pytest.approx(summary["min_load"], rel=1e-2)


# -------------------------------------------------------------------------------- a user's mistakes


def test_mistakes_are_one_line_and_leave_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "library").mkdir()
    new = "--output_dir", tmp_path / "x"
    cases = {
        ("--output_dir", tmp_path / "there"): "--force",
        (*new, "--stdlib", tmp_path / "library"): "not Python's library",
        (*new, "--tokenizer", tmp_path / "none.model"): "leave --tokenizer out",
        (*new, "--steps", 0): "--steps must be at least 1",
        ("--head", tmp_path / "none"): "name a folder",
        ("--head", EMBEDDED): "only qwen3_5_moe_text has",
    }
    for arguments, message in cases.items():
        with pytest.raises(ValueError, match=message):
            tiny.run(tiny.parse_options(["--smoke", *map(str, arguments)]))
    line = ["train_tiny_moe.py", "--smoke", "--output_dir", str(tmp_path / "there")]
    monkeypatch.setattr(sys, "argv", line)
    capsys.readouterr()  # progress of those above
    assert tiny.main() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["library", "there"]


# ------------------------------------------------------------------------------------------- head


@pytest.fixture(scope="module")
def headed(tmp_path_factory):
    """Train a head for a copy of the hybrid in a few steps; return the folder and the summary."""
    folder = tmp_path_factory.mktemp("head") / "tiny-hybrid"
    shutil.copytree(HYBRID_CHECKPOINT, folder)
    strip_head(folder)
    done = command("--head", folder, "--smoke", "--steps", 12, "--lr", 0.004)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


def strip_head(folder: Path) -> None:
    """Remove a head from a published folder."""
    (folder / tiny.HEAD_FILE).unlink(missing_ok=True)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    own = {name: file for name, file in index["weight_map"].items() if file != tiny.HEAD_FILE}
    path.write_text(json.dumps(index | {"weight_map": own}))


@pytest.mark.slow
def test_a_trained_head_is_added_and_the_rest_stays(headed):
    folder, _ = headed
    for path in HYBRID_CHECKPOINT.iterdir():
        if path.name not in ("model.safetensors.index.json", tiny.HEAD_FILE):
            assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    index, before = (
        json.loads((at / "model.safetensors.index.json").read_text())
        for at in (folder, HYBRID_CHECKPOINT)
    )
    assert index == before  # a head is shipped, under the same names
    head = load_file(folder / tiny.HEAD_FILE)
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight"} < head.keys()
    assert all(tensor.dtype == torch.bfloat16 for tensor in head.values())


@pytest.mark.slow
def test_training_makes_the_head_better(headed):
    """On held-out text, from the head that it begins with; for each draft of a chain."""
    folder, summary = headed
    assert len(summary["losses"]) == tiny.DEPTH
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    first, trained = tiny.Head(model), tiny.Head(model)
    layer, tensors = trained.layers[0], load_file(folder / tiny.HEAD_FILE)
    prefix = "mtp.layers.0."
    block = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    layer.mtp_block.load_state_dict(block)
    for module, name in (
        (layer.eh_proj, "fc"),
        (layer.enorm, "pre_fc_norm_embedding"),
        (layer.hnorm, "pre_fc_norm_hidden"),
        (layer.post_norm, "norm"),
    ):
        module.load_state_dict({"weight": tensors[f"mtp.{name}.weight"]})
    tokenizer = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    ids = torch.tensor([tokenizer.encode((folder / "heldout.txt").read_text()[:2000])])
    with torch.no_grad():
        before, after = (tiny.head_loss(model, head, ids) for head in (first, trained))
    assert all(b < 0.95 * a for a, b in zip(before, after, strict=True))


def test_a_head_sees_no_later_token():
    model = AutoModelForCausalLM.from_pretrained(HYBRID_CHECKPOINT, dtype=torch.float32)
    head, states = tiny.Head(model), torch.randn(1, 20, 128)
    tokens = torch.randint(0, 4000, (1, 20))
    changed = tokens.clone()
    changed[0, 15:] = 7
    with torch.no_grad():
        same = (head(states, tokens) - head(states, changed)).abs().amax(-1)[0] < 1e-4
    assert same.tolist() == [True] * 15 + [False] * 5
