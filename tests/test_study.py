"""The study tools: the picture of a prompt's experts, and the comparison with transformers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from generate import load_model
from scripts import compare_hf, plot_experts
from scripts.compare_hf import compare
from scripts.plot_experts import study

ROOT = Path(__file__).parents[1]
IDS = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95, 2, 88]
NO_MATPLOTLIB = "pictures need matplotlib: pip install 'moe-fast[plot]'"
pytestmark = pytest.mark.usefixtures("few_threads")


def run_script(script: str, *arguments: str):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "scripts" / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


# compare_hf.py ------------------------------------------------------------------------------------


def first_difference(model, peer, tolerance: float = 1e-4) -> tuple:
    """Return layer and operator of the first place that differs."""
    for place in compare(model, peer, IDS):
        if place["error"] > (0 if place["operator"] == "chosen experts" else tolerance):
            return place["layer"], place["operator"]
    return ()


def test_no_place_differs_in_any_family(family):
    model = load_model(family.directory, "cpu")
    places = compare(model, family.peer, IDS)
    assert max(place["error"] for place in places) < 1e-5
    args = model.args
    alone = len(getattr(args, "mixer_layers", ()))  # layers without an FFN
    sparse_layers = args.n_layer - len(args.dense_layers) - alone
    assert len(places) == 3 + 6 * args.n_layer - 3 * alone + 3 * sparse_layers
    assert [places[0]["operator"], places[-1]["operator"]] == ["embedding", "logits"]


@pytest.mark.parametrize(
    ("path", "place"),
    (
        ("embedding", ("", "embedding")),
        ("layers.1.attention_norm", ("layer 1", "attention norm")),
        ("layers.2.attention.wqkv", ("layer 2", "attention")),
        ("layers.1.attention.wo", ("layer 1", "attention")),
        ("layers.0.ffn_norm", ("layer 0", "ffn norm")),
        ("layers.2.ffn.router", ("layer 2", "router logits")),
        ("layers.1.ffn.experts.w13", ("layer 1", "sum of experts")),
        ("layers.0.ffn.experts.w2", ("layer 0", "sum of experts")),
        ("norm", ("", "last norm")),
        ("head", ("", "logits")),
    ),
)
def test_a_broken_weight_is_located(make_family, path, place):
    family = make_family("mixtral")
    model = load_model(family.directory, "cpu")
    model.get_submodule(path).weight.data *= 1.01
    assert first_difference(model, family.peer) == place


def test_a_router_with_two_rows_exchanged_is_located(make_family):
    """Logits and choices differ in that layer, and nothing before it."""
    family = make_family("olmoe")
    model = load_model(family.directory, "cpu")
    weight = model.layers[1].ffn.router.weight.data
    weight[[0, 1]] = weight[[1, 0]]
    places = compare(model, family.peer, IDS)
    errors = {(place["layer"], place["operator"]): place["error"] for place in places}
    assert first_difference(model, family.peer) == ("layer 1", "router logits")
    assert errors["layer 1", "chosen experts"] > 0 and errors["layer 1", "ffn norm"] < 1e-5


@pytest.mark.slow
def test_the_command_compares_and_continues(make_family):
    directory, tokens = str(make_family("mixtral").directory), ",".join(map(str, IDS))
    common = "compare_hf.py", directory, "--tokens", tokens
    run = run_script(*common, "--new_tokens", "8", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["parts_at"] is None and found["same_tokens"] == 8
    assert found["tokens"] == found["peer_tokens"]
    assert found["ms"] > 0 and found["peer_ms"] > 0
    strict = run_script(*common, "--new_tokens", "2", "--tolerance", "0")
    assert strict.returncode == 1 and strict.stdout.startswith("they part at ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("--hf_dir", "/nowhere"), "--hf_dir"),
        (("--tokens", "1,x"), "give numbers with commas"),
        (("--tokens", "5"), "give at least 2"),
        (("--tokens", "5,9999"), "below 160"),
        (("--tokens", "5,6", "--new_tokens", "999"), "256 tokens"),
    ),
)
def test_a_mistake_is_one_line(make_family, capsys, monkeypatch, arguments, message):
    directory = str(make_family("mixtral").directory)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["compare_hf.py", directory, *arguments])
    assert compare_hf.main() == 2
    output, errors = capsys.readouterr()
    assert output == "" and message in errors
    assert errors.startswith("error: ") and errors.count("\n") == 1


# plot_experts.py ----------------------------------------------------------------------------------


def test_load_and_entropy_by_hand():
    """One layer has even choices, in the other all tokens choose experts 0 and 1."""
    experts = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [1, 0]]])
    weights = torch.tensor([[[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.75, 0.25]]])
    found = study(experts, weights, 4)
    assert found["load"] == [[0.25] * 4, [0.5, 0.5, 0, 0]]
    assert found["load_entropy"] == pytest.approx([2, 1])
    quarter = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert found["weight_entropy"] == pytest.approx([1, quarter / 2])


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ("png", "svg"))
def test_the_picture_and_its_numbers(directory, tmp_path, suffix):
    pytest.importorskip("matplotlib", reason=NO_MATPLOTLIB)
    output = tmp_path / f"experts.{suffix}"
    options = "--checkpoint_path", str(directory), "--prompt", "def f($x):\n    return"
    options += "--output", str(output), "--layers", "0,5", "--json"
    run = run_script("plot_experts.py", *options)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["layers"] == list(range(8)) and found["tokens"] > 4
    assert all(sum(load) == pytest.approx(1, abs=1e-5) for load in found["load"])
    assert all(0 < bits <= 3.001 for bits in found["load_entropy"])
    data = output.read_bytes()
    assert data.startswith(b"\x89PNG" if suffix == "png" else b"<?xml") and len(data) > 5000
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("--layers", "8"), "layers with experts are 0, 1"),
        (("--layers", "a"), "give numbers with commas"),
        (("--output", "x.pdf"), "must end in .png or .svg"),
        (("--prompt", "x " * 600), "give from 1 to 512"),
        (("--output", "/nowhere/x.png"), "a file that can be written"),
    ),
)
def test_a_mistake_about_a_picture_is_one_line(directory, capsys, monkeypatch, arguments, message):
    pytest.importorskip("matplotlib", reason=NO_MATPLOTLIB)
    line = ["plot_experts.py", "--checkpoint_path", str(directory), *arguments]
    monkeypatch.setattr(sys, "argv", line)
    assert plot_experts.main() == 2
    output, errors = capsys.readouterr()
    error = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert output == "" and len(error) == 1 and message in error[0]
