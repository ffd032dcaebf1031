"""benchmark.py, benchmarks/, and the plots of scripts/, for CPUs."""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from without_gpu import run_without_gpu

import benchmark
from benchmarks import decode_speed, layer_tuning, transformers_peer
from benchmarks.kernel_profile import kernel_table, known_reads, launch_lines, weight_reads
from benchmarks.transformers_peer import SETTINGS, hf_config, hf_model, measure_peer
from generate import load_model
from models import ARCHITECTURES, CONFIGS, args_from_hf, build_model
from models.random_weights import RandomWeights, architecture, first_layers, number_format
from ops.products import few_tokens
from ops.products.few_tokens import FewTiles
from ops.products.weights import packed_weight, plain_weight
from runtime.sampling import Sampling
from runtime.session import Session
from runtime.weights import bytes_per_token
from scripts import plot_speculation

ROOT = Path(__file__).parents[1]
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 300,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}
CPU = ("--device", "cpu", "--eager")


def write_config(directory: Path, **changes) -> str:
    """Write CONFIG with these changes; return the path."""
    path = directory / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return str(path)


def run_main(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process -> exit code, stdout, stderr. Does not measure bandwidth."""
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    monkeypatch.setattr(benchmark, "read_bandwidth", lambda device: 1e10)
    return benchmark.main(), *capsys.readouterr()


class OneProduct:
    """Stands for layers with a dense product of 8 tokens; programs of 32 rows have it wrong."""

    out = 2048

    def __init__(self):
        self.weight = plain_weight(torch.empty(2048, 2048, dtype=torch.bfloat16))
        self.model = SimpleNamespace(states=())

    def run(self, _=None) -> None:
        self.tiles = few_tokens.choose_few_tiles(self.weight, 8)
        y = torch.ones(8, self.out) * (2 if self.tiles.rows == 32 else 1)
        few_tokens.launch(few_tokens._down_few, (1,), None, None, None, None, y, None)

    def microseconds(self, warmups: int = 2) -> float:
        self.run()
        return 50 + cost(self.tiles) - self.tiles.rows


def cost(tiles: FewTiles) -> float:
    return tiles.depth - tiles.warps + tiles.x_depth / 100


def test_the_search_keeps_the_fastest_tiling_with_the_right_result(monkeypatch, capsys):
    monkeypatch.setenv("MOE_FAST_GPU", "sm_90")
    for module in (layer_tuning, few_tokens):
        monkeypatch.setattr(module, "launch", lambda *_, **options: None)
    layers, tuning = OneProduct(), layer_tuning.Tuning()
    with tuning.replaced():
        layers.run()
    ((place, today),) = tuning.today.items()
    assert (place.group, place.shape) == ("bf16 dense of 8", "2048x256")
    tried = layer_tuning.tilings_near(today, layers.weight, place, 8, 999)
    assert tried[0] == today and len(set(tried)) == len(tried) > 20
    assert {tiles.rows for tiles in tried} == {16, 32}
    found = layer_tuning.tune_layers(tuning, layers, {place: tried}, math.inf)
    assert found == {place: min((t for t in tried if t.rows == 16), key=cost)}
    assert "WRONG" in capsys.readouterr().out
    layers.run()
    assert layers.tiles == today  # as before the search


def test_the_search_takes_no_other_products_result(monkeypatch):
    monkeypatch.setenv("MOE_FAST_GPU", "sm_90")
    for module in (layer_tuning, few_tokens):
        monkeypatch.setattr(module, "launch", lambda *_, **options: None)
    layers, tuning = OneProduct(), layer_tuning.Tuning()
    layers.out = 4096
    with tuning.replaced(), pytest.raises(RuntimeError, match=r"\[8, 4096\] is no result of"):
        tuning.results(layers)


def test_the_search_tries_products_of_planes(monkeypatch):
    monkeypatch.setenv("MOE_FAST_GPU", "sm_90")
    parts = torch.empty(12288, 256, dtype=torch.int32), torch.empty(12288, 16)
    weight, tuning = packed_weight(list(parts), "int4", 128), layer_tuning.Tuning()
    with tuning.replaced():
        today = few_tokens.choose_plane_tiles(weight)
    ((place, seen),) = tuning.today.items()
    assert (place.group, place.shape, seen) == ("int4 planes of 4", "12288x64", today)
    tried = layer_tuning.tilings_near(today, weight, place, 4, 5)
    assert tried[0] == today and len(set(tried)) == len(tried) == 6
    tuning.chosen[place] = tried[1]
    with tuning.replaced():
        assert few_tokens.choose_plane_tiles(weight) == tried[1]


@pytest.mark.slow
def test_the_search_knows_who_chose_each_products_tilings():
    cases = "Qwen3.6-35B-A3B:int4", "Qwen3-30B-A3B:nvfp4", "gpt-oss-20b:mxfp4"
    found = run_without_gpu("tuning_without_gpu.py", *cases)
    assert not [wrong for case in found.values() for wrong in case["wrong"]]
    assert {"int4 1", "int4 2 of 4", "int4 planes of 4"} <= set(found[cases[0]]["groups"])


def last_json(output: str) -> dict:
    return json.loads(output.splitlines()[-1])


# Models -------------------------------------------------------------------------------------------


def test_architectures_match_published_configs():
    """Values are those of the published config.json files."""
    mixtral = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "vocab_size": 32000,
    }
    assert architecture("Mixtral-8x7B") == args_from_hf(mixtral)
    qwen = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "rope_theta": 1e6,
        "num_hidden_layers": 48,
        "max_position_embeddings": 40960,
        "norm_topk_prob": True,
    }
    assert architecture("Qwen3-30B-A3B") == args_from_hf(qwen)
    olmoe = {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "intermediate_size": 1024,
    }
    assert architecture("OLMoE-1B-7B") == args_from_hf(olmoe)


def test_random_weights_repeat_for_a_seed_and_keep_activations_near_one():
    args = args_from_hf(CONFIG)
    first, second = (
        load_model(RandomWeights(args, {"name": "fp32"}, seed=3), "cpu") for _ in range(2)
    )
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    first.setup_cache(1, 64)
    logits = first(torch.arange(20).unsqueeze(0), torch.arange(20).unsqueeze(0))
    assert logits.shape == (1, 300) and logits.isfinite().all() and 0.1 < logits.std() < 10
    assert len(set(Session(first, 64).stream([1, 2], 20, Sampling(seed=0)))) > 3


@pytest.mark.parametrize("mode", ("bf16", "int4", "fp8", "fp8b", "q4_k"))
def test_rows_of_a_large_table_repeat(mode, monkeypatch):
    args = dataclasses.replace(args_from_hf(CONFIG), vocab_size=700)
    monkeypatch.setattr("models.random_weights.DISTINCT_ROWS", 256)
    model = load_model(RandomWeights(args, number_format(mode, args)), "cpu")
    weight = model.embedding.weight
    assert torch.equal(weight[256:512], weight[:256]) and torch.equal(weight[512:], weight[:188])
    x = torch.randn(1, args.dim, dtype=torch.bfloat16)
    logits = model.head(x).view(-1)  # of int8, if the format packs it
    assert torch.equal(logits[512:], logits[:188]) and len(logits.unique()) > 100


def test_first_layers_are_those_of_the_model():
    args = ARCHITECTURES["gpt-oss-120b"]
    windows = [block.attention.window for block in build_model(args).layers]
    cut = build_model(first_layers(args, 4))
    assert [block.attention.window for block in cut.layers] == windows[:4]
    assert len(set(windows[:4])) == 2
    dense = dataclasses.replace(args, dense_layers=(0, 5), dense_intermediate=64)
    assert first_layers(dense, 3).dense_layers == (0,) and first_layers(dense, 36) == dense


# Measuring ----------------------------------------------------------------------------------------


def run_command(directory: Path, *more: str) -> dict:
    config = write_config(directory)
    arguments = ("--arch", config, *CPU, "--json", "--repeats", "2", "--new_tokens", "5")
    arguments += ("--layers", "1", "--mode", "int8", *more)
    line = [sys.executable, ROOT / "benchmark.py", *arguments]
    run = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return last_json(run.stdout)


def test_json_has_its_fields(tmp_path, monkeypatch, capsys):
    options = ("--arch", write_config(tmp_path), *CPU, "--repeats", "2", "--new_tokens", "5")
    options += ("--layers", "1", "--mode", "int8", "--json")
    code, out, err = run_main(monkeypatch, capsys, *options)
    assert code == 0, err
    result = last_json(out)
    names = "arch mode gpu tok_s ms bytes_per_token gb_s read_gb_s fraction kernels_per_layer"
    names += " peak_bytes compile_s"
    assert result["ttft_s"] > 0 and 0 < result["ttft_cold_s"] < result["compile_s"]
    assert set(names.split()) <= set(result)
    assert result["layers"] == 1 and len(result["tok_s_all"]) == 2
    assert result["fraction"] == pytest.approx(result["gb_s"] / result["read_gb_s"])
    assert result["gb_s"] == pytest.approx(result["bytes_per_step"] / result["ms"] / 1e6)
    assert result["bytes_per_step"] == result["bytes_per_token"] + result["cache_bytes"]
    assert result["bytes_per_step"] > result["bytes_per_token"]


@pytest.mark.parametrize("kv_cache", ("plain", "int8"))
@pytest.mark.parametrize("hybrid", (False, True), ids=("attention", "hybrid"))
def test_a_random_cache_takes_the_place_of_the_prompt(hybrid, kv_cache, tmp_path, monkeypatch):
    """The model runs the prompt's last token, then those that it makes, at the prompt's end."""
    sizes = dict(vocab_size=300, n_expert=8, n_active=2, max_position=1024)
    name = "Qwen3.6-35B-A3B" if hybrid else "OLMoE-1B-7B"
    args = dataclasses.replace(
        first_layers(architecture(name), 4), dim=64, intermediate=32, **sizes
    )
    line = f"--arch {name} --prompt_len 300 --new_tokens 4 --repeats 1 --random_cache --mode fp32"
    options = benchmark.build_parser().parse_args([*line.split(), "--kv_cache", kv_cache, *CPU])
    session = decode_speed.open_session(args, options, torch.device("cpu"))
    seen = []
    forward = session.model.forward
    monkeypatch.setattr(
        session.model,
        "forward",
        lambda x, *rest, **kw: (seen.append(x.shape), forward(x, *rest, **kw))[1],
    )
    decode_speed.time_answers(session, options)
    assert seen == [(1, 1)] * 6 and session.cached == [303] and session.prefilled == 1
    assert all(state.nbytes > 0 for state in session.states)


def test_a_batch_reads_each_distinct_expert_once(tmp_path, monkeypatch, capsys):
    options = ("--arch", write_config(tmp_path), *CPU, "--repeats", "1", "--prompt_len", "9")
    options += ("--new_tokens", "4", "--mode", "fp32", "--layers", "1", "--json")

    def measure(batch: str) -> dict:
        lengths = "--batch", batch, "--max_seq_len", "200"
        return last_json(run_main(monkeypatch, capsys, *options, *lengths)[1])

    one, many = measure("1"), measure("6")
    assert one["experts_read"] == 2 < many["experts_read"] <= 8 and many["max_seq_len"] == 200
    assert many["tok_s"] == pytest.approx(6e3 / many["ms"])
    assert many["cache_bytes"] == 6 * one["cache_bytes"]
    more = many["bytes_per_step"] - many["cache_bytes"] - many["bytes_per_token"]
    assert more == (many["experts_read"] - 2) * 4 * (3 * 64 * 32)


MIXTRAL = ("--arch", "Mixtral-8x7B")
MISTAKES = (
    (("--arch", "Mixtral-9x9B"), "The nearest: Mixtral-8x7B, "),
    (("--arch", "config.json"), "JSON"),
    ((*MIXTRAL, "--new_tokens", "1"), "--new_tokens 1"),
    ((*MIXTRAL, "--mode", "int5"), "--mode int5"),
    ((*MIXTRAL, "--kernels", "--device", "cpu"), "CUDA"),
    ((*MIXTRAL, "--peer", "hf", "--sweep", "experts"), "--peer and --sweep"),
    ((*MIXTRAL, "--peer", "hf", "--batch", "2"), "leave --batch out"),
    ((*MIXTRAL, "--decode_kernels", "fused", "--eager"), "leave one of them out"),
    ((*MIXTRAL, "--decode_kernels", "fused", "--device", "cpu"), "use auto"),
    ((*MIXTRAL, "--prompt_len", "100", "--max_seq_len", "299"), "exceed --max_seq_len, 299"),
    ((*MIXTRAL, "--max_seq_len", "32769"), "exceed the model's positions, 32768"),
    ((*MIXTRAL, "--prompt_len", "32768"), "exceed the model's positions, 32768"),
)


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_users_mistake_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main(monkeypatch, capsys, *arguments)
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and err.startswith("error: ")
    assert message in err


@pytest.fixture
def sweep_options(tmp_path) -> tuple[str, ...]:
    options = ("--arch", write_config(tmp_path, num_hidden_layers=6), *CPU, "--sweep", "experts")
    return (*options, "--repeats", "1", "--prompt_len", "1", "--new_tokens", "3", "--mode", "fp32")


@pytest.mark.slow
def test_a_sweep_measures_each_number_of_experts(sweep_options, monkeypatch, capsys):
    code, out, err = run_main(monkeypatch, capsys, *sweep_options, "--json")
    assert code == 0, err
    result = last_json(out)
    rows = {(row["n_expert"], row["n_active"]): row for row in result["sweep"]}
    assert list(rows) == [(8, 2), (16, 2), (32, 2), (64, 2), (128, 2), (8, 1), (8, 4), (8, 8)]
    assert result["layers"] == 4 and all(row["us"] > 0 for row in rows.values())
    for row in rows.values():
        assert row["fraction"] == pytest.approx(row["bytes_per_step"] / row["us"] * 1e6 / 1e10)
    size = {shape: row["bytes_per_token"] for shape, row in rows.items()}
    # Bytes of one expert over 4 layers in fp32: its row of the router, its weights.
    router, expert = 4 * 4 * 64, 4 * 4 * (3 * 64 * 32)
    assert size[128, 2] - size[8, 2] == 120 * router  # all that a token reads of an idle expert
    assert size[8, 8] - size[8, 2] == 6 * expert and size[8, 2] - size[8, 1] == expert


def test_a_sweep_skips_more_active_experts_than_there_are(sweep_options, monkeypatch, capsys):
    monkeypatch.setattr(decode_speed, "SWEEP_EXPERTS", (1, 128))  # 1 has no 2 active ones
    monkeypatch.setattr(decode_speed, "SWEEP_ACTIVE", (8,))
    code, out, _ = run_main(monkeypatch, capsys, *sweep_options, "--layers", "1")
    assert code == 0 and ", 1 layers" in out and "\n  128   2 " in out
    assert len(out.splitlines()) == 3 + 2


# Kernels ------------------------------------------------------------------------------------------
# The events are made up, since a CPU has none.

LAYER = [
    ("norm", 2.0),
    ("product", 12.0),
    ("scores", 5.0),
    ("product", 9.0),
    ("norm", 2.0),
    ("w13", 40.0),
    ("w2", 20.0),
]
HEAD = [("head", 30.0), ("sort", 35.0)]
GIGA = 1e9  # bytes/s at which one byte takes 1 ns


def make_events(steps: int, layers: int = 3, gap: float = 1.0) -> list[tuple[str, float, float]]:
    """Return the events of equal steps: `gap` us between kernels, 500 us more between steps."""
    events, now = [], 1000.0
    for step in range(steps):
        for name, duration in LAYER * layers + HEAD:
            duration += 0.1 * (step == 0)  # the first step is slower
            events.append((name, now, duration))
            now += duration + gap
        now += 500.0
    return events


def test_kernel_table_adds_up():
    table = kernel_table(make_events(3)[::-1], 3, 3, (), GIGA)  # events in any order
    total = 3 * 90.0 + 65.0
    assert table["kernels_us"] == pytest.approx(total)
    assert table["span_us"] == pytest.approx(total + 22)
    assert table["gaps"] == pytest.approx(22 / (total + 22))
    rows = {row["name"]: row for row in table["rows"]}
    assert list(rows) == ["w13", "product", "w2", "sort", "head", "scores", "norm"]
    norm, sort = rows["norm"], rows["sort"]
    assert (norm["per"], norm["launches"]) == ("layer", 2)
    assert (sort["per"], sort["launches"]) == ("token", 1)
    assert norm["us"] == pytest.approx(2) and norm["us_per"] == pytest.approx(4)
    assert rows["product"]["us"] == pytest.approx(10.5)
    added = [row["adds_us"] * (3 if row["per"] == "layer" else 1) for row in rows.values()]
    assert sum(added) == pytest.approx(table["span_us"])
    assert all(row["gb_s"] is None for row in rows.values())


def test_overlapping_kernels_count_no_gap_twice():
    table = kernel_table([("a", 0.0, 10.0), ("b", 2.0, 4.0), ("c", 15.0, 5.0)], 1, 1, (), GIGA)
    assert (table["span_us"], table["kernels_us"], table["gaps"]) == (20.0, 19.0, 0.25)
    assert {row["name"]: row["adds_us"] for row in table["rows"]} == {
        "a": 10.0,
        "b": 0.0,
        "c": 10.0,
    }


def test_launches_of_a_layer_are_in_order():
    events = [("head", 40.0, 1.0)]
    for layer in range(3):  # a is launched twice a layer, b once in all
        start = 12.0 * layer
        events += [("a", start, 2.0), ("b", start + 3, 1.0)][: 2 if layer == 1 else 1]
        events += [("a", start + 5, 4.0 + layer)]
    total, _, *rows = launch_lines(events[::-1], 3)
    assert total.startswith("  41.0 us") and "idle" in total
    found = [row.split() for row in rows]
    assert [(row[0], row[1], row[3]) for row in found] == [
        ("3", "2.00", "a"),
        ("3", "5.00", "a"),
        ("1", "1.00", "b"),
        ("1", "1.00", "head"),
    ]


@pytest.mark.parametrize(
    "damage", (lambda e: e[:-1], lambda e: [("other", *e[0][1:]), *e[1:]], lambda e: [])
)
def test_steps_that_differ_are_refused(damage):
    with pytest.raises(ValueError, match="run again"):
        kernel_table(damage(make_events(2)), 2, 3, (), GIGA)


def test_bytes_are_matched_only_where_one_kernel_can_have_read_them():
    """wqkv, wo, w13 and w2 follow from their order. "sort" may have read the head's weights."""
    reads = [11000, 8000, 36000, 18000] * 3 + [29000]
    table = kernel_table(make_events(2, gap=0), 2, 3, reads, GIGA)
    rows = {row["name"]: row["gb_s"] for row in table["rows"]}
    assert rows["w13"] == pytest.approx(36 / 40.05, rel=1e-3)
    assert rows["w2"] == pytest.approx(18 / 20.05, rel=1e-3)
    assert rows["product"] == pytest.approx(19 / 21.1, rel=1e-3)
    assert [rows[name] for name in ("head", "sort", "norm", "scores")] == [None] * 4
    times = [time for _, time in LAYER * 3 + HEAD]
    known = known_reads(times, reads, GIGA)
    # "head" may have read the last layer's w2.
    assert len(known) == 11 and 20 not in known and not {21, 22} & set(known)
    assert known_reads(times, [*reads, 10**6], GIGA) == {}  # no kernel is long enough for the last


@pytest.mark.parametrize("mode", ("bf16", "int8", "hqq4-hqq2"))
def test_weight_reads_are_the_bytes_of_a_token(mode):
    """All but norms and the token's row of the embedding, in the order in which they are read."""
    args = args_from_hf(CONFIG)
    model = load_model(RandomWeights(args, number_format(mode, args)), "cpu")
    reads, layers = weight_reads(model), args.n_layer
    norms = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name)
    assert sum(reads) == bytes_per_token(model) - norms - 2 * args.dim
    assert len(reads) == 5 * layers + 1 and reads[:5] == reads[5:10]
    router = 2 * args.n_expert * args.dim
    assert reads[2] == router and reads[3] > reads[4] > router and reads[0] > reads[1]


# The peer: transformers ---------------------------------------------------------------------------

VARIANTS = {
    "window": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "sliding_window": 16,
        "head_dim": 64,
    },
    "dense, biased, tied": {
        **CONFIG,
        "num_hidden_layers": 4,
        "mlp_only_layers": [1],
        "intermediate_size": 96,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "clipped": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "clip_qkv": 0.5,
        "rope_theta": 1e5,
    },
}


def quick_names() -> set[str]:
    """Return the variants, and one model of each family."""
    return {*VARIANTS, *{args.family: name for name, args in ARCHITECTURES.items()}.values()}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in quick_names() else pytest.mark.slow)
        for name in (*ARCHITECTURES, *VARIANTS)
    ],
)
def test_the_peers_config_gives_our_args_back(name):
    config = CONFIGS.get(name) or VARIANTS[name]
    args = args_from_hf(config)
    model = hf_model(config, args, torch.bfloat16, "meta")  # compares the number of weights
    assert args_from_hf(model.config.to_dict()) == args
    kept = tuple(model._keep_in_fp32_modules_strict or ())  # transformers': a router's weight
    dtypes = {p.dtype for name, p in model.named_parameters() if not name.endswith(kept)}
    assert dtypes == {torch.bfloat16}
    assert model.generation_config.eos_token_id is None  # or an answer could be short


# Layers of several kinds; a list of them is in the config or made of a rule.
SOME_LAYERS = (
    ("Flint-40B-A2.5B", 4),
    ("gpt-oss-20b", 3),
    ("Kimi-Linear-48B-A3B", 5),
    ("Nemotron-3-Nano-30B-A3B", 4),
    ("Laguna-XS-33B-A3B", 6),
    ("gemma-4-26B-A4B", 6),
)


@pytest.mark.parametrize(("name", "layers"), SOME_LAYERS)
def test_the_peer_has_the_first_layers(name, layers):
    config = hf_config(CONFIGS[name], first_layers(ARCHITECTURES[name], layers))
    assert args_from_hf(config.to_dict()).n_layer == layers


def test_a_whole_config_may_be_quantized_and_nested():
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": CONFIGS["Qwen3.5-35B-A3B"],
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    found = hf_config(config, first_layers(args_from_hf(config), 4))
    assert found.num_hidden_layers == 4 and not hasattr(found, "quantization_config")


def test_args_that_transformers_lacks_are_refused():
    config = CONFIGS["OLMoE-1B-7B"]
    olmoe = args_from_hf(config)
    with pytest.raises(ValueError, match="olmoe cannot have these args"):
        hf_config(config, dataclasses.replace(olmoe, sliding_window=64))
    config = config | {"head_dim": 64}
    with pytest.raises(ValueError, match="weights where ours has"):  # its norms are D wide
        hf_model(config, args_from_hf(config), torch.bfloat16, "meta")


def test_the_peer_has_weights_and_rope_frequencies():
    torch.manual_seed(0)
    args = args_from_hf(CONFIG)
    model = hf_model(CONFIG, args, torch.float32, "cpu")
    logits = model(torch.arange(20).unsqueeze(0)).logits
    assert logits.shape == (1, 20, 300) and logits.isfinite().all() and logits.std() > 0
    inv_freq = model.model.rotary_emb.inv_freq
    assert torch.allclose(inv_freq, args.rope_theta ** (-torch.arange(0, 16, 2) / 16))


@pytest.mark.slow
def test_the_peer_is_measured_in_every_setting(tmp_path):
    result = run_command(tmp_path, "--peer", "hf")
    peer = result["peer"]
    args = dataclasses.replace(args_from_hf(CONFIG), n_layer=1)
    settings = {f"{cache} cache, {experts} experts" for cache, experts in SETTINGS}
    assert set(peer["settings"]) == settings
    assert peer["tok_s"] == max(peer["settings"].values()) == peer["settings"][peer["setting"]] > 0
    assert peer["name"].startswith("transformers 5.")
    assert peer["dtype"] == "bf16" and peer["ttft_s"] > 0
    size = bytes_per_token(load_model(RandomWeights(args), "cpu"))
    assert peer["bytes_per_token"] == size > result["bytes_per_token"]
    text = benchmark.report(result | {"peer": peer | {"peak_bytes": 10**9}})
    assert f"{peer['name']} in bf16" in text
    assert f"ours / peer {result['tok_s'] / peer['tok_s']:.2f}" in text
    assert peer["setting"] in text and text.endswith("peak memory 1.0 GB")


def test_a_setting_that_fails_is_left_out_with_one_warning(monkeypatch, caplog, tmp_path):
    options = argparse.Namespace(device="cpu", mode="fp32", prompt_len=3, new_tokens=3)
    options.arch = write_config(tmp_path)
    args = args_from_hf(CONFIG)
    failing, working = ("dynamic", "no_such"), ("dynamic", "eager")
    monkeypatch.setattr(transformers_peer, "SETTINGS", (failing, working))
    assert list(measure_peer(args, options)["settings"]) == ["dynamic cache, eager experts"]
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "no_such experts fails" in warning and warning.endswith("left out")
    monkeypatch.setattr(transformers_peer, "SETTINGS", (failing,))
    with pytest.raises(ValueError, match="not one of its settings"):
        measure_peer(args, options)


def test_without_transformers_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(benchmark, "measure", lambda *_: pytest.fail("measured"))
    arguments = "--arch", "OLMoE-1B-7B", "--device", "cpu", "--peer", "hf"
    code, out, err = run_main(monkeypatch, capsys, *arguments)
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and "pip install" in err


def test_a_peer_that_fails_leaves_our_result(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(transformers_peer, "ProcessPoolExecutor", fail)
    options = ("--arch", write_config(tmp_path), *CPU, "--repeats", "1", "--new_tokens", "2")
    code, out, err = run_main(monkeypatch, capsys, *options, "--peer", "hf", "--json")
    result = last_json(out)
    assert code == 0 and result["tok_s"] > 0 and result["peer"] is None
    assert "hf: out of memory: no peer" in err
    assert "transformers" not in benchmark.report(result)


# scripts/plot_roofline.py -------------------------------------------------------------------------

RESULT = {
    "arch": "Mixtral-8x7B",
    "mode": "bf16",
    "gpu": "NVIDIA H200",
    "tok_s": 134.5,
    "bytes_per_token": 25.5e9,
    "read_gb_s": 4490.0,
    "fraction": 0.76,
}
PEER = {"name": "transformers 5.17.0", "dtype": "bf16", "tok_s": 44.0, "bytes_per_token": 25.5e9}
INT8 = RESULT | {
    "mode": "int8",
    "tok_s": 185.5,
    "bytes_per_token": 12.76e9,
    "fraction": 0.53,
    "peer": PEER,
}


def plot(
    *arguments: str | Path,
    stdin: str | None = None,
    path: str = str(ROOT),
    script: str = "plot_roofline.py",
) -> subprocess.CompletedProcess:
    """Run the script. path: PYTHONPATH."""
    script = [sys.executable, ROOT / "scripts" / script, *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(script, capture_output=True, text=True, input=stdin, env=environment)


@pytest.mark.slow
def test_the_roofline_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "one.json").write_text(json.dumps(RESULT | {"peer": None}, indent=1))
    png, svg, twin = tmp_path / "a.png", tmp_path / "a.svg", tmp_path / "b.svg"
    lines = f"{json.dumps(INT8)}\n\n{json.dumps(RESULT)}\n"
    run = plot(tmp_path / "one.json", "-", "--output", png, stdin=lines)
    assert run.returncode == 0 and run.stdout == f"{png}\n", run.stderr
    assert png.read_bytes().startswith(b"\x89PNG") and len(png.read_bytes()) > 20_000
    for path in (svg, twin):
        assert plot("-", "--output", path, stdin=json.dumps(INT8)).returncode == 0
    assert svg.read_bytes() == twin.read_bytes()
    texts = "Mixtral-8x7B int8", "186 (0.53)", "transformers 5.17.0 bf16", "44"
    for text in (*texts, "NVIDIA H200: 4,490 GB/s measured"):
        assert f"<!-- {text} -->" in svg.read_text(), text
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["a.png", "a.svg", "b.svg", "one.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("not JSON", "line 1"),
        (f"{json.dumps(RESULT)}\n{{", "line 2"),
        ("", "is empty"),
        ("[]", "not a result"),
        ("[" * 100_000, "is not JSON"),
        ('{"sweep": []}', "without --sweep"),
        (json.dumps(RESULT | {"tok_s": 0}), "not a result"),
        (json.dumps(RESULT | {"fraction": float("nan")}), "not a result"),
        (json.dumps(RESULT | {"peer": {"name": "x"}}), "not a result"),
    ),
)
def test_a_file_that_is_no_result_is_refused(text, message, tmp_path):
    run = plot("-", "--output", tmp_path / "a.png", stdin=text)
    assert run.returncode == 2 and run.stdout == "" and not list(tmp_path.iterdir())
    assert len(run.stderr.splitlines()) == 1 and run.stderr.startswith("error: ")
    assert message in run.stderr


def test_a_picture_that_cannot_be_drawn_is_refused(tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps(RESULT))
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    svg, jpg, png = (tmp_path / f"a.{suffix}" for suffix in ("svg", "jpg", "png"))
    missing = plot(one, "--output", svg, path=f"{tmp_path}:{ROOT}")
    for run, message in (
        (missing, "pip install 'moe-fast[plot]'"),
        (plot(one, "--output", jpg), ".png or .svg"),
        (plot(two, "--output", png), "No such file"),
    ):
        assert run.returncode == 2 and len(run.stderr.splitlines()) == 1 and message in run.stderr
    assert not list(tmp_path.glob("a.*"))


# scripts/plot_speculation.py ----------------------------------------------------------------------

PASSES = {"lookup": [{"drafts": 0, "ms": 1.0}, {"drafts": 1, "ms": 1.5}]}
DRAFTS = {"arch": "Qwen3.6-35B-A3B", "mode": "int4", "gpu": "NVIDIA H200", "passes": PASSES}


@pytest.mark.slow
def test_what_drafts_give_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    result, picture = tmp_path / "passes.json", tmp_path / "a.svg"
    result.write_text(json.dumps(DRAFTS))
    run = plot(result, "--output", picture, script="plot_speculation.py")
    assert run.returncode == 0 and run.stdout == f"{picture}\n", run.stderr
    for text in ("plain", "1 draft", "drafts: lookup", "Qwen3.6-35B-A3B int4, NVIDIA H200"):
        assert f"<!-- {text} -->" in picture.read_text(), text


@pytest.mark.parametrize(
    "text",
    (
        "not JSON",
        "[]",
        "[" * 100_000,
        json.dumps(DRAFTS | {"passes": {}}),
        json.dumps(DRAFTS | {"passes": {"lookup": [{"drafts": 0, "ms": 0}]}}),
        json.dumps(DRAFTS | {"passes": {"lookup": [{"drafts": 0, "ms": float("inf")}]}}),
        json.dumps(DRAFTS | {"passes": {"lookup": [{"drafts": 1e300, "ms": 1.0}]}}),
        json.dumps({"passes": PASSES}),
    ),
)
def test_a_file_that_has_no_passes_is_refused(text, tmp_path):
    path = tmp_path / "passes.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"benchmarks/speculation\.py --json"):
        plot_speculation.read_result(path)


# scripts/plot_timeline.py -------------------------------------------------------------------------


def timeline(**changes) -> dict:
    """Return a result as benchmarks/fused_decode.py writes it."""
    kernels = [
        ["_multiply_sum", 0.0, 6.0],
        ["_route", 5.5, 1.5],
        ["triton_poi_fused_add_0", 6.5, 2],
    ]
    way = {"us": 7.5, "kernels": kernels}
    texts = {"arch": "Qwen3-30B-A3B", "mode": "int4", "gpu": "NVIDIA H200"}
    return texts | {"inductor": way, "fused": way} | changes


@pytest.mark.slow
def test_the_timeline_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    result = tmp_path / "layer.json"
    result.write_text(json.dumps(timeline()))
    pictures = [tmp_path / name for name in ("a.svg", "b.svg", "c.png")]
    for picture in pictures:
        run = plot(result, "--output", picture, script="plot_timeline.py")
        assert run.returncode == 0 and run.stdout == f"{picture}\n", run.stderr
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert pictures[2].read_bytes().startswith(b"\x89PNG")
    svg = pictures[0].read_text()
    for text in ("norm, wqkv  6.0", "top-k  1.5", "add_0  2.0", "fused kernels: 7.5 us a layer"):
        assert f"<!-- {text} -->" in svg, text


@pytest.mark.parametrize(
    "text",
    (
        "not JSON",
        "[]",
        "[" * 100_000,
        json.dumps(timeline(arch=3)),
        json.dumps(timeline(fused={})),
        json.dumps(timeline(fused={"us": 1, "kernels": [["_multiply_sum", 0, 1]]})),
        json.dumps(timeline(fused={"us": 1, "kernels": [["_multiply_sum", 0, float("inf")]] * 2})),
        json.dumps(timeline(fused={"us": 1, "kernels": [["_multiply_sum", -1, 1]] * 2})),
    ),
)
def test_a_file_that_is_no_timeline_is_refused(text, tmp_path):
    result, picture = tmp_path / "layer.json", tmp_path / "a.svg"
    result.write_text(text)
    run = plot(result, "--output", picture, script="plot_timeline.py")
    assert run.returncode == 2 and not picture.exists()
    assert len(run.stderr.splitlines()) == 1 and "benchmarks/fused_decode.py --json" in run.stderr
