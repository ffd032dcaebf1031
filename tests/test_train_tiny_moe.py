"""The training of the embedded checkpoint: its split, its tokenizer, its model, and a smoke run from end to end."""

import json
import math
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors import safe_open

from scripts import train_tiny_moe as tiny

ROOT = Path(__file__).resolve().parent.parent
STDLIB = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(scope="module")
def corpus():
    return tiny.split_corpus(tiny.read_library(STDLIB))


def command(*arguments):
    script = [sys.executable, "scripts/train_tiny_moe.py", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(script, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Two runs of the same command: (folder, summary) of each."""
    runs = []
    for name in ("first", "second"):
        folder = tmp_path_factory.mktemp("smoke") / name
        done = command("--smoke", "--output_dir", folder)
        assert done.returncode == 0, done.stderr
        runs.append((folder, json.loads(done.stdout.splitlines()[-1])))
    return runs


# ---------------------------------------------------------------------------------------------------------- the text


def test_the_list_names_at_least_fifty_modules_once():
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
    if not corpus.missing:  # another version of Python may lack modules, and be smaller
        assert 150_000 < sum(len(text.encode()) for text in corpus.heldout.values()) < 260_000


def test_tests_and_tables_of_held_out_modules_are_not_trained_on(corpus):
    for name in ("html/entities.py", "test/test_bisect.py", "test/test_fnmatch.py", "test/test_wsgiref.py"):
        assert name not in corpus.train
    assert not any(name.startswith(("_sysconfigdata", "site-packages", "encodings/cp1")) for name in corpus.train)
    assert "heapq.py" in corpus.train and "html/parser.py" in corpus.train


def test_no_held_out_text_is_trained_on(corpus):
    leaks = tiny.check_leaks(corpus)
    assert leaks["lines"] < 0.15 and leaks["stretches"] < 0.03


@pytest.mark.parametrize("change", [lambda t: t, lambda t: "# moved\n" + t.replace("import", "from __future__ import")])
def test_a_copy_under_another_name_is_refused(corpus, change):
    leaky = tiny.replace(corpus, train={**corpus.train, "idlelib/copy_of.py": change(corpus.heldout["bisect.py"])})
    with pytest.raises(ValueError, match=r"idlelib/copy_of.py is \d+% the held-out module bisect.py"):
        tiny.check_leaks(leaky)


def test_a_shared_stretch_is_counted(corpus):
    few = dict(list(corpus.train.items())[:3])
    clean = tiny.check_leaks(tiny.replace(corpus, train=few))["stretches"]
    quoted = (
        "\n".join(f"x{i} = {i} * the_quoting_module" for i in range(200)) + "\n" + corpus.heldout["sched.py"][-800:]
    )
    assert tiny.check_leaks(tiny.replace(corpus, train={**few, "quoting.py": quoted}))["stretches"] > clean


def test_reading_skips_packages_and_other_encodings_and_keeps_line_ends(tmp_path):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "a.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    (tmp_path / "b.py").write_bytes(b"x = 1\r\n\ty = 2\r\n")
    assert tiny.read_library(tmp_path) == {"b.py": "x = 1\r\n\ty = 2\r\n"}


# ----------------------------------------------------------------------------------------------------- the tokenizer


@pytest.fixture(scope="module")
def tokenizer(corpus):
    documents = tiny.smoke_corpus(corpus).train
    return sentencepiece.SentencePieceProcessor(model_proto=tiny.train_tokenizer(documents, 1024))


def test_every_text_round_trips(corpus, tokenizer):
    odd = ["", " ", "\t", "\n\n\n\n    x", "a\r\n\tb\r\n", "  two  spaces  ", "\U0001f600 é \u2028", "\n" + " " * 37]
    for text in [*odd, *list(corpus.train.values())[::40], *corpus.heldout.values()]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_line_break_and_an_indentation_are_one_token_each(tokenizer):
    ids = tokenizer.encode("x\n        y\n\n    z\n")
    assert [tokenizer.decode(i) for i in ids] == ["x", "\n", " " * 8, "y", "\n", "\n", " " * 4, "z", "\n"]
    assert (tokenizer.unk_id(), tokenizer.bos_id(), tokenizer.eos_id()) == (tiny.UNK, tiny.BOS, tiny.EOS)


# ------------------------------------------------------------------------------------------- the model, the training


def test_the_full_model_has_about_nine_million_parameters_and_fits_the_repository():
    with torch.device("meta"):
        parameters = sum(p.numel() for p in tiny.TinyMoE(tiny.Config()).parameters())
    assert 8.5e6 < parameters < 9.5e6
    assert 2 * parameters < 19 * 2**20


def test_the_dense_training_form_equals_a_loop_over_tokens():
    torch.manual_seed(0)
    layer = tiny.Experts(tiny.Config(dim=16, intermediate=8, n_head=2, n_kv_head=1))
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(2, 5, 16)
    y, balance, used = layer(x)
    share, mean = torch.zeros(8), torch.zeros(8)
    for b, s in ((b, s) for b in range(2) for s in range(5)):
        probs = layer.gate(x[b, s]).softmax(-1)
        chosen = probs.argsort(descending=True)[:2]
        expected = sum(
            probs[e] / probs[chosen].sum()
            * (layer.w2[e] @ (torch.nn.functional.silu(layer.w1[e] @ x[b, s]) * (layer.w3[e] @ x[b, s])))
            for e in chosen
        )  # fmt: skip
        torch.testing.assert_close(y[b, s], expected)
        assert used[b, s].nonzero().flatten().tolist() == sorted(chosen.tolist())
        share[chosen] += 1 / 20
        mean += probs / 10
    torch.testing.assert_close(balance, 8 * (share * mean).sum())


def test_orthogonal_brings_singular_values_near_one():
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(tiny.orthogonal(torch.randn(3, 32, 64)))
    assert singular.min() > 0.6 and singular.max() < 1.3


def test_muon_moves_each_matrix_by_the_promised_amount():
    torch.manual_seed(0)
    shapes = [(32, 64), (64, 32), (4, 32, 64), (4, 64, 32), (32, 32)]
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    tiny.Muon(params, lr=0.1, weight_decay=0.0).step()
    for p in params:
        assert (p * p.grad).sum() < 0  # downhill
        assert p.detach().pow(2).mean().sqrt().item() == pytest.approx(0.1 * 0.2, rel=0.3)


def test_an_epoch_draws_windows_of_its_documents_in_order():
    documents = [torch.arange(100 * i, 100 * i + 90) for i in range(8)]
    keep = torch.tensor([1.0] * 7 + [0.0])
    drawn = tiny.batches(documents, keep, batch=2, length=10, seed=0)
    first = [next(drawn) for _ in range(30)]
    for _, inputs, targets in first:
        assert inputs.shape == targets.shape == (2, 10)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert targets.max() < 700  # the last document is never kept
    assert first[0][0] == 0 and first[-1][0] == 0 and next(drawn)[0] in (0, 1)
    with pytest.raises(ValueError, match="less than one batch"):
        next(tiny.batches(documents, keep, batch=100, length=10, seed=0))


@pytest.mark.parametrize("length", [2, 9, 16, 17, 24, 25, 40])
def test_each_token_is_scored_once_with_its_context(length):
    torch.manual_seed(0)
    model = tiny.TinyMoE(tiny.Config(vocab_size=64, dim=32, intermediate=16, n_layer=2)).eval()
    torch.nn.init.normal_(model.embed_tokens.weight)
    ids = torch.randint(64, (length,)).tolist()
    nats, load = tiny.score(model, ids, window=16)
    expected = 0.0
    for target in range(1, length):
        start = max(0, math.ceil((target - 16) / 8) * 8)  # the first window that holds the target
        logits = model(torch.tensor([ids[start:target]]))[0][0, -1]
        expected -= logits.log_softmax(-1)[ids[target]].item()
    assert nats == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(load.sum(1), torch.ones(2, dtype=torch.float64))


# --------------------------------------------------------------------------------------------------------- the folder


def test_a_smoke_run_gives_the_same_bytes_twice(smoke):
    (first, _), (second, _) = smoke
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # no scratch folder is left


def test_the_layout_is_the_hub_s(smoke):
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
    experts = {f"model.layers.1.block_sparse_moe.experts.{e}.w{w}.weight" for e in range(8) for w in (1, 2, 3)}
    assert experts < set(seen) and "lm_head.weight" not in seen
    assert json.loads((folder / "tokenizer_config.json").read_text())["add_bos_token"] is True
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == tiny.EOS


def test_the_readme_and_the_summary_say_what_was_measured(smoke, corpus):
    folder, summary = smoke[0]
    readme = (folder / "README.md").read_text()
    for field in ("bits_per_byte", "unigram_bits_per_byte"):
        assert f"{summary[field]:.4f}" in readme
    for word in ("PSF-2.0", "held-out perplexity", "Expert load", "Temperature 0.8", f"{summary['steps']:,} steps"):
        assert word in readme
    assert str(STDLIB) not in readme
    heldout = (folder / "heldout.txt").read_bytes()
    assert heldout.decode() == "".join(tiny.smoke_corpus(corpus).heldout.values())
    assert len(heldout) == summary["bytes"]
    nats = summary["bits_per_byte"] * math.log(2) * summary["bytes"]
    assert summary["perplexity"] == pytest.approx(math.exp(nats / summary["tokens"]))
    assert summary["bits_per_byte"] < 0.9 * math.log2(1024) * summary["tokens"] / summary["bytes"]  # it did learn
    assert 0 <= summary["min_load"] <= 1 <= summary["max_load"]


def test_transformers_computes_the_same_logits(smoke):
    from transformers import AutoConfig, MixtralForCausalLM

    folder, _ = smoke[0]
    theirs = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert AutoConfig.from_pretrained(folder).num_local_experts == 8
    ours = tiny.load_hub(tiny.SMOKE_CONFIG, folder)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = [tiny.BOS, *tokenizer.encode((folder / "heldout.txt").read_text())][:100]
    with torch.inference_mode():
        expected, actual = theirs(torch.tensor([ids])).logits, ours(torch.tensor([ids]))[0]
    assert (actual - expected).norm() / expected.norm() < 1e-4


# ---------------------------------------------------------------------------------------------------- users' mistakes


def test_mistakes_are_one_line_and_leave_nothing(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "library").mkdir()
    cases = {
        ("--output_dir", tmp_path / "there"): "--force",
        ("--output_dir", tmp_path / "x", "--stdlib", tmp_path / "library"): "not Python's library",
        ("--output_dir", tmp_path / "x", "--tokenizer", tmp_path / "none.model"): "leave --tokenizer out",
        ("--output_dir", tmp_path / "x", "--steps", 0): "--steps must be at least 1",
    }
    for arguments, message in cases.items():
        with pytest.raises(ValueError, match=message):
            tiny.run(tiny.parse_options(["--smoke", *map(str, arguments)]))
    done = command("--smoke", "--output_dir", tmp_path / "there")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["library", "there"]
