"""What is particular to Laguna: heads and RoPE by layer, gates, its published layout and chat."""

import pytest
import torch
import transformers
from chunks import all_logits, prompt
from conftest import FAMILIES, randomize

from generate import load_model
from models import ARCHITECTURES, args_from_hf, build_model
from models.converter import convert
from runtime.reasoning import CLOSE, OPEN, ThinkSplitter, make_splitter
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from tool_calls.formats import GlmParser, find_format
from tp import local_args, shard_problem

GREEDY = Sampling(temperature=0)
KINDS = ["sliding_attention", "full_attention"]
ROPE = {
    KINDS[0]: {"rope_type": "default", "rope_theta": 1e4},
    KINDS[1]: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("sizes", ((), pytest.param((1, 2, 129), marks=pytest.mark.slow)))
@pytest.mark.parametrize("name", ("laguna", "flint", "mellum", "kolibri1"))
def test_a_long_prompt_matches_transformers(name, sizes, make_family):
    """Past the window and a ring's end."""
    family, tokens = make_family(name), prompt(300)
    got = all_logits(family.directory, tokens, *sizes)
    torch.testing.assert_close(got, family.peer(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    (
        {"gating": "per-element", "attention_bias": True},
        {"moe_router_logit_softcapping": 0.5, "shared_expert_intermediate_size": 48},
        {"layer_types": KINDS[1:] * 3, "num_attention_heads_per_layer": [8] * 3},  # as Laguna M
        {"layer_types": KINDS[:1] * 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    ids=("gates of elements, biases", "capped scores", "no windows", "no full layers"),
)
def test_other_models_of_the_family(changes, tmp_path):
    torch.manual_seed(0)
    config = FAMILIES["laguna"]().config.to_dict() | changes
    peer = transformers.LagunaForCausalLM(transformers.LagunaConfig.from_dict(config)).eval()
    randomize(peer)
    for layer in peer.model.layers:  # so large that a capped score differs
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.weight.data *= 4
    peer.save_pretrained(tmp_path / "hf")
    directory, tokens = convert(tmp_path / "hf", dtype="fp32", progress=False), prompt(40)
    want = peer(tokens).logits
    torch.testing.assert_close(all_logits(directory, tokens), want, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("laguna", "flint", "mellum", "kolibri1"))
def test_compiled_tokens_are_the_same(name, make_family):
    """The decode step, and the prompt's pass with padding."""
    directory, ids = make_family(name).directory, prompt(70)[0].tolist()
    plain = list(Session(load_model(directory, "cpu"), 160).stream(ids, 12, GREEDY))
    options = SessionOptions(compile=True, compile_prefill=True, prefill_chunk=64)
    session = Session(load_model(directory, "cpu"), 160, options)
    assert list(session.stream(ids, 12, GREEDY)) == plain


# Sizes --------------------------------------------------------------------------------------------

# As the model cards and the published files say; of each token's, without embeddings.
SIZES = {
    "Laguna-XS-33B-A3B": (33.44, 2.81),
    "Laguna-S-118B-A8B": (117.56, 8.14),
    "Flint-40B-A2.5B": (39.79, 2.52),
    "Mellum2-12B-A2.5B": (12.15, 2.21),
    "Kolibri-1-78B-A3.5B": (78.10, 3.46),
}


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name):
    args, (billions, active) = ARCHITECTURES[name], SIZES[name]
    sizes = {n: p.numel() / 1e9 for n, p in build_model(args).named_parameters()}
    experts = sum(size for n, size in sizes.items() if ".experts." in n)
    total = sum(sizes.values())
    assert total == pytest.approx(billions, abs=0.005)
    of_a_token = total - experts * (1 - args.n_active / args.n_expert) - sizes["embedding.weight"]
    assert of_a_token == pytest.approx(active, abs=0.005)
    if name.startswith("Laguna"):
        heads = {args.of_layer(n).n_head for n in args.full_layers}
        assert heads == {48} and args.layer_heads[:5] == (48, *3 * [args.n_head], 48)


# Refused ------------------------------------------------------------------------------------------


def ropes(kind: str, **changes) -> dict:
    return {"rope_parameters": ROPE | {kind: ROPE[kind] | changes}, "layer_types": KINDS * 20}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gating": False}, "gating = False.*'per-head'"),
        ({"gating": ["per-head"]}, r"gating = \['per-head'\]"),
        ({"num_attention_heads_per_layer": [48]}, r"per_layer = \[48\].*40 multiples of .* = 8"),
        ({"num_attention_heads_per_layer": [44] * 40}, "num_attention_heads_per_layer = "),
        ({"num_attention_heads_per_layer": [True] * 40}, "num_attention_heads_per_layer = "),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types = .*40 layers"),
        ({"mlp_layer_types": ["moe"] * 40}, "mlp_layer_types = "),
        ({"layer_types": ["linear_attention"] * 40}, "layer_types = "),
        ({"layer_types": KINDS * 20, "sliding_window": 0}, "sliding_window = 0"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input = True"),
        ({"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled = True"),
        ({"moe_router_logit_softcapping": -1.0}, "moe_router_logit_softcapping = -1.0"),
        ({"moe_router_logit_softcapping": None}, "moe_router_logit_softcapping = None"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling = .*rope_parameters are"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters = .*a set for full_attention"),
        ({"rope_parameters": ROPE | {KINDS[1]: None}}, "rope_parameters = .*a set for full"),
        ({"rope_parameters": {KINDS[1]: ROPE[KINDS[1]]}, "layer_types": KINDS * 20}, "for sliding"),
        (ropes(KINDS[0], rope_type="dynamic"), "rope_type = 'dynamic'"),
        (ropes(KINDS[1], rope_theta=None), "rope_parameters = .*rope_theta of full_attention"),
        (ropes(KINDS[1], partial_rotary_factor=0.3), "partial_rotary_factor = 0.3"),
        (ropes(KINDS[0]) | {"partial_rotary_factor": 0.5}, "the set for sliding_attention has non"),
    ],
)
def test_a_value_is_refused_by_its_key(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        args_from_hf({"model_type": "laguna", **changes})
    assert "\n" not in str(error.value)


def test_ranks_divide_the_heads_of_every_layer():
    args = ARCHITECTURES["Laguna-XS-33B-A3B"]
    assert set(local_args(args, 4, "tensor").layer_heads) == {12, 16}
    assert shard_problem(args, {}, 16, "tensor") is None
    assert shard_problem(args, {}, 32, "tensor") == (
        "48 (query heads of layer 0) cannot be divided by 32"
    )


# Chat ---------------------------------------------------------------------------------------------

# In the shape of poolside's: GLM's calls and <think>, other tags of turns.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{# a call: <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call> #}"
    "<assistant>{{ '<think>' if enable_thinking else '</think>' }}"
)


class LagunaTokenizer:
    """The parts of a tokenizer that the formats look at: markers are tokens of their own."""

    def token_id(self, text: str) -> int | None:
        return {OPEN: 18, CLOSE: 19}.get(text)

    def token_bytes(self, id: int) -> bytes:
        return b"a word"

    def template_has(self, text: str) -> bool:
        return text in TEMPLATE


def test_calls_and_reasoning_are_those_of_glm():
    tokenizer = LagunaTokenizer()
    assert find_format(tokenizer) is GlmParser
    splitter = make_splitter(tokenizer, [5, 18])  # the prompt has opened a block
    assert isinstance(splitter, ThinkSplitter) and splitter.kind == "reasoning"
    parts = [*splitter.push(7, "so"), *splitter.push(19, ""), *splitter.push(8, "yes")]
    assert parts + splitter.flush() == [("reasoning", "so"), ("answer", "yes")]
