"""Each family of kernels in this process, under Triton's interpreter: to step through.

    TRITON_INTERPRET=1 python -m pytest tests/test_step_through.py -k experts --pdb

Put `breakpoint()` into a kernel, or a breakpoint of an editor: a kernel then is Python, which runs
its programs one after the other. Without TRITON_INTERPRET=1 all are skipped. The layers are small,
in fp16, and compared with the modules of model.py; other tests have more cases of each. With
CHECK_BOUNDS=1 every address is checked, too.
"""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 runs kernels as Python", allow_module_level=True)
pytest.importorskip("triton", reason="ops/ needs triton")

from formats import FORMATS
from model import Chunk, Context, KVCache
from models.layers.short_conv import ShortConv
from ops.declared import RELU_SQUARED, SWIGLU, Activation
from ops.products.fixed_join import NextNorm, fixed_join
from ops.products.join import NOTHING, Added
from ops.products.prompt_rows import PairResults, combine_rows, in_order
from ops.products.prompt_weights import PromptTile
from ops.step import cpu_share
from tests import interpreter
from tests import mamba_kernels_without_gpu as mamba
from tests.kernels_without_gpu import plain_error
from tests.moe_kernels_without_gpu import layer_errors
from tests.offload_without_gpu import ask_differences, place_differences
from tests.prompts_without_gpu import (
    attention_error,
    dense_error,
    groups_pairs,
    product_error,
    prompt_errors,
    reorders_rows,
    stores_in_ring,
)
from tests.token_draw_without_gpu import run as draw

interpreter.prepare()

UNPACKED_QUICKLY = "fp8b", "q6_k"
FORMAT = "fp8"  # its products need no inline assembly, which the interpreter has not


def check(family: str, format: str, **tokens) -> None:
    """Run the layers of runtime/fused_layer.py, and compare with `Block.forward`."""
    for errors in layer_errors(family, format, **tokens):
        assert errors["experts"] == errors["again"] == 0, errors
        assert max(errors["x"], errors["weights"]) < 2e-3 and errors["cache"] < 1e-3, errors


def test_experts_and_gqa_of_one_token():
    """Dense products, attention, norm with the router's scores, the choice, experts."""
    check("qwen3_moe", FORMAT, intermediate=32)


def test_experts_of_three_tokens():
    """Attention of several queries; experts sorted by tiles. The last token is padding.

    Each range of wqkv's rows is a launch of its own, into one result.
    """
    sizes = dict(queries=3, last=[1], intermediate=32, n_head=2, n_kv_head=1)
    check("qwen3_moe", FORMAT, ratios=(0,), ranges=True, **sizes)


def test_mla_of_two_sequences():
    """One token of each: attention takes them as it takes one, products as several tokens."""
    sizes = dict(n_head=2, n_active=1, intermediate=16, shared_intermediate=32)
    check("glm4_moe_lite", FORMAT, batch=2, ratios=(99,), **sizes)


def test_the_delta_rule_of_two_sequences():
    """A layer of Gated DeltaNet, and one of gated attention with a shared expert."""
    sizes = dict(n_active=1, intermediate=16, shared_intermediate=16, n_head=2, n_kv_head=1)
    sizes |= dict(delta_key_heads=1, delta_value_heads=2)
    check("qwen3_next", FORMAT, batch=2, ratios=(99,), **sizes)


@pytest.mark.parametrize(
    ("tokens", "length", "bias"), ((1, 256, False), (5, 256, True), (6, 16, False))
)
def test_a_short_convolution(tokens, length, bias):
    """Two sequences and an idle one: one at position 0, one with padding. Results and the ring."""
    torch.manual_seed(0)
    sizes = dict(dim=32, conv_channels=160, conv_width=3, conv_bias=bias)
    layer = ShortConv(SimpleNamespace(**sizes))
    cache = layer.allocate(4, length, KVCache, torch.zeros(1))
    cache.kv.normal_()
    for parameter in layer.parameters():
        parameter.normal_()
    projected, before = torch.randn(3, tokens, 480), cache.kv.clone()
    first = torch.tensor([[0], [length - tokens], [7]])
    last = torch.tensor([tokens - 1, tokens // 2, -1])
    context = Context(None, positions=first + torch.arange(tokens), last=last)
    want, after = layer.core(projected, context), cache.kv.clone()
    cache.kv.copy_(before)
    got = layer.fused_core(projected, context)
    assert not torch.equal(before, after) and torch.equal(before[:, 2:], after[:, 2:])
    torch.testing.assert_close(cache.kv, after, rtol=0, atol=1e-6)
    real = torch.arange(tokens) <= last.unsqueeze(1)
    torch.testing.assert_close(got[real], want[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("chunks", "length"), (((140, 1, 70), 512), ((1, 1, 2), 16)), ids=("ring", "whole")
)
def test_prompts_of_a_short_convolution(chunks, length):
    """Chunks of one row, longer and shorter than the ring; the last tokens are padding."""
    torch.manual_seed(0)
    sizes = dict(dim=32, conv_channels=160, conv_width=3, conv_bias=True)
    layer, end = ShortConv(SimpleNamespace(**sizes)), 0
    cache = layer.allocate(3, length, KVCache, torch.zeros(1))
    for parameter in (*layer.parameters(), cache.kv):
        parameter.normal_()
    for tokens in chunks:
        end += tokens
        projected, before = torch.randn(1, tokens, 480), cache.kv.clone()
        last = torch.tensor([tokens - 2 if tokens == chunks[-1] else tokens - 1])
        context = Context(None, chunk=Chunk(torch.tensor([1]), end), last=last)
        want, after = layer.core(projected, context), cache.kv.clone()
        cache.kv.copy_(before)
        got = layer.fused_core(projected, context)
        torch.testing.assert_close(cache.kv, after, rtol=0, atol=1e-6)
        real = slice(last.item() + 1)
        torch.testing.assert_close(got[:, real], want[:, real], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_shared_expert_in_another_format():
    """Its gate and up product, and its down product, are launches of their own."""
    check("qwen2_moe", f"{FORMAT}+fp8b")


@pytest.fixture
def with_nan():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ("fewer tokens than the window", "one token after drafts"))
def test_mamba_2_of_few_tokens(name, with_nan):
    """Sequences with drafts that were accepted, with padding, and an idle one."""
    assert max(mamba.case_errors(mamba.CASES[name])) < 2e-6


def test_a_prompt_of_mamba_2(with_nan):
    found = mamba.prompt_errors("a prompt shorter than a chunk", torch.float32)
    assert max(found) < 1e-5  # the order of sums of g differs


def test_paging_and_the_cpus_share_of_experts(monkeypatch):
    """Beside plain PyTorch."""
    monkeypatch.setattr(cpu_share, "post", cpu_share.post)  # undoes what a difference's test sets
    assert place_differences() == ask_differences() == 0


def test_the_draw_of_a_token():
    rows = [{"temperature": 0.7, "top_p": 0.9, "seed": 1}, {"temperature": 0.0}]
    found = draw({"logits": "normal", "V": 300, "groups": 4, "rows": rows})
    assert found["same"] and found["plain"] == found["fused"]


def test_the_grouped_product_of_a_prompt():
    """Rows of three experts, of which one has none."""
    assert plain_error((5, 0, 20), 40, 64, torch.float32) < 1e-5


@pytest.mark.parametrize(
    ("family", "format", "layers"),
    (
        pytest.param("qwen3_moe", FORMAT, 1, marks=pytest.mark.slow),  # norms of heads
        pytest.param("olmoe", FORMAT, 1, marks=pytest.mark.slow),  # norms over all heads, clip
        # Biases, sinks, another activation.
        pytest.param("gpt_oss", "mxfp4", 1, marks=pytest.mark.slow),
        ("qwen2_moe", "int4", 1),  # a shared expert with a gate
        pytest.param("qwen2_moe", "int4+fp8", 1, marks=pytest.mark.slow),
    ),
)
def test_two_chunks_of_a_long_prompt(family, format, layers):
    """Heads, norms, the choice, rows of pairs, the activation, sums."""
    found = prompt_errors(family, format, layers)
    assert found["logits"] < 3e-3 and found["states"] < 2e-3, found


@pytest.mark.parametrize(
    ("family", "positions"),
    (
        pytest.param("qwen3_moe", True, marks=pytest.mark.slow),
        ("qwen3_moe", False),
        ("gpt_oss", True),
    ),
)
def test_chunks_with_padding(family, positions):
    """No expert computes padding, and it changes nothing; also of a chunk at positions."""
    sizes = dict(intermediate=32, n_expert=6, n_active=2)
    found = prompt_errors(family, FORMAT, 1, positions=positions, padding=7, **sizes)
    assert found["logits"] < 3e-3 and found["states"] < 2e-3, found


@pytest.mark.parametrize(
    ("family", "format", "slots"),
    (
        ("gpt_oss", "mxfp4", 3),
        pytest.param("gpt_oss", "mxfp4", 7, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", FORMAT, 3, marks=pytest.mark.slow),
    ),
)
def test_two_chunks_of_a_long_prompt_over_slots(family, format, slots):
    """Experts come in waves; the router's choice is a kernel's."""
    found = prompt_errors(family, format, 1, slots=slots)
    assert found["logits"] < 3e-3 and found["states"] < 2e-3, found


@pytest.mark.parametrize(("T", "begin", "last"), ((5, 0, 3), (5, 77, None), (95, 7, 92)))
def test_a_chunk_is_stored_in_a_ring(T, begin, last):
    """The newest positions that are real, each in its slot of one row."""
    assert stores_in_ring(T, begin, last)


@pytest.mark.slow
def test_two_chunks_of_a_long_prompt_in_a_dense_layer():
    found = prompt_errors("qwen3_moe", FORMAT, 1, dense=True)
    assert found["logits"] < 3e-3 and found["states"] < 2e-3, found


@pytest.mark.parametrize("format", ("int8", "int4", "hqq3", "q4_k", "nvfp4"))
def test_rows_are_put_into_the_order_of_a_product(format):
    assert reorders_rows(format)


@pytest.mark.parametrize("D", (64, 80))
def test_a_norm_is_stored_in_the_order_of_its_reader(D):
    x, columns = torch.randn(1, 5, D), torch.randperm(D).int()
    after = NextNorm(torch.randn(D), None, 1e-5)
    with mock.patch("ops.products.fixed_join.can_launch", lambda x: True):
        _, normed, _ = fixed_join(x, Added(y=x), after, columns=columns)
    known, ordered = normed.ordered
    assert known is columns and ordered.equal(normed[0][:, columns])
    assert in_order(normed, columns) is ordered
    assert in_order(normed, columns.clone()).equal(ordered)


@pytest.mark.parametrize("shared", (False, True))
def test_pairs_are_combined_where_they_are_added(shared):
    """The same bits as the sum of pairs by a kernel of its own: with biases, or a shared expert."""
    T, A, D, E = 5, 2, 80, 3
    x, order = torch.randn(1, T, D).half(), torch.randperm(T * A).int()
    pairs = [torch.randn(T * A, D).half(), order, torch.randint(E, (T, A)), torch.rand(T, A)]
    if shared:
        pairs += [None, torch.randn(T, D).half(), (x[0], torch.randn(1, D).half() / 9)]
    else:
        pairs += [torch.randn(E, D).half()]
    after = NextNorm(torch.randn(D).half(), None, 1e-5)
    with mock.patch("ops.products.fixed_join.can_launch", lambda x: True):
        want = fixed_join(x, Added(y=combine_rows(*pairs).view_as(x)), after, scale=0.5)
        got = fixed_join(x, NOTHING, after, scale=0.5, pairs=PairResults(*pairs))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    ("format", "tile", "activation"),
    (
        ("int4", PromptTile(64, 64, 128, 4, near=2), None),  # half of a word of scales a step
        # Whole words.
        pytest.param("int4", PromptTile(16, 64, 256, 4), None, marks=pytest.mark.slow),
        # 41 rows: 32 and 9 more, and others that have one tile, or none.
        ("int4", PromptTile(32, 64, 128, 4, tail=16, merged=True), SWIGLU),
        ("q4_k", PromptTile(16, 64, 128, 4, tail=16, merged=True), None),  # too few to merge
        ("mxfp4", PromptTile(32, 32, 128, 4, near=3, tail=16), Activation("clamped", 7.0, 1.7)),
        ("plain", PromptTile(16, 32, 64, 4, near=1), SWIGLU),
        pytest.param("q4_k", PromptTile(32, 64, 128, 4, tail=16), SWIGLU, marks=pytest.mark.slow),
        ("q5_k", PromptTile(64, 64, 256, 4), None),  # a word of four words' bits above
        ("q6_k", PromptTile(32, 64, 128, 4, tail=16), None),
        ("iq4_xs", PromptTile(16, 64, 256, 4), None),  # words of four scales
        pytest.param("q5_1", PromptTile(16, 64, 128, 4), None, marks=pytest.mark.slow),
        ("q8_0", PromptTile(16, 64, 64, 4), None),
        ("nvfp4", PromptTile(16, 64, 128, 4), None),
        pytest.param("int8", PromptTile(64, 64, 128, 4), RELU_SQUARED, marks=pytest.mark.slow),
        pytest.param("fp8b", PromptTile(64, 64, 128, 4), SWIGLU, marks=pytest.mark.slow),
    ),
)
def test_a_prompts_product_of_tokens(format, tile, activation):
    """Rows of tokens, an expert's last rows, groups of outputs side by side of which some lack.

    The activation of gate and up, with their bias, in the order of the next product.
    """
    assert product_error(format, tile, activation) < 1e-3


@pytest.mark.parametrize(
    "format",
    [
        pytest.param(name, marks=() if name in UNPACKED_QUICKLY else pytest.mark.slow)
        for name, format in FORMATS.items()
        if format.kind
    ],
)
def test_a_dense_weight_is_unpacked_for_the_library(format):
    assert dense_error(format, "unpacked") < 1e-3


OWN_ORDER = "int4", "fp8b", "nvfp4", "hqq3", "hqq2", "q4_k", "q6_k", "q8_0", "int8", "mxfp4"


@pytest.mark.parametrize(
    ("format", "group"), (*((name, None) for name in OWN_ORDER), ("int4", 8), ("int4", 32))
)
def test_a_dense_weight_is_unpacked_in_the_order_of_x(format, group):
    assert dense_error(format, "own order", group=group) < 1e-3


@pytest.mark.parametrize("format", ("int4", "mxfp4", "nvfp4", "hqq4", "q4_k", "q6_k"))
def test_a_dense_weight_is_decoded_by_the_product(format):
    assert dense_error(format, "decoded") < 1e-3


@pytest.mark.parametrize(
    ("tokens", "active", "n_expert", "padding"),
    (
        (33, 1, 3, 0),
        (33, 1, 3, 32),
        (300, 8, 128, 77),  # counted by each program, in two reads
        # 44 chunks, whose counts are read in three parts; 32 pairs at once
        pytest.param(700, 8, 300, 0, marks=pytest.mark.slow),
        (700, 8, 300, 77),
        pytest.param(33000, 2, 4, 0, marks=pytest.mark.slow),  # chunks of more than 128 pairs
    ),
)
def test_pairs_are_grouped_by_expert(tokens, active, n_expert, padding):
    assert groups_pairs(tokens, active, n_expert, padding)


@pytest.mark.parametrize(
    ("Q", "S", "window", "sinks", "C"),
    (
        (73, 73, None, True, 64),
        (40, 300, 16, True, 32),
        (130, 130, 100, False, 16),
        (5, 200, None, True, 128),
        (70, 90, None, False, 64),
    ),
)
def test_attention_of_a_chunk(Q, S, window, sinks, C):
    assert attention_error(Q, S, window, sinks, C) < 1e-3
