"""What is particular to LFM2-MoE: the ring of a short convolution, sizes, keys of older files."""

import pytest
import torch
from chunks import prompt, run, run_chunks

import tp
from benchmarks.decode_speed import cache_in_use
from formats.kv_cache import KV_CACHES
from generate import load_model
from model import KVCache, Transformer
from models import ARCHITECTURES, args_from_hf, build_model
from models.layers.short_conv import ConvCache
from models.lfm2_moe import Lfm2MoeArgs
from ops.plain.pending import MAX_TENTATIVE
from ops.plain.ring import RING_SPARE, Ring
from runtime.runner import CompiledRunner
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation

GREEDY = Sampling(temperature=0)
LONG, SESSION = 512, 256  # positions, of which the ring has a part


@pytest.fixture
def model(make_family) -> Transformer:
    return load_model(make_family("lfm2_moe").directory, "cpu")


def rings(model: Transformer) -> list[ConvCache]:
    return [state for state in model.states if isinstance(state, ConvCache)]


# Arithmetic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", ((300,), (64, 200, 36), (1, 2, 129, 168), (1,) * 140))
def test_a_long_prompt_matches_transformers(make_family, model, sizes):
    """Also token by token, until the ring is full."""
    tokens = prompt(sum(sizes))
    want = make_family("lfm2_moe").peer(tokens).logits
    got = run_chunks(model, tokens, *sizes, length=LONG)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "billions"), (("LFM2.5-8B-A1B", 8.47), ("LFM2-24B-A2B", 23.84)))
def test_published_sizes(name, billions):
    """The head is the embedding's. The 24B model has 10 attention layers of 40, says its maker."""
    args = ARCHITECTURES[name]
    named = build_model(args).named_parameters()
    assert sum(p.numel() for _, p in named) / 1e9 == pytest.approx(billions, abs=0.005)
    assert len(args.full_layers) * 4 == args.n_layer


@pytest.mark.parametrize("own", (True, False))
def test_the_older_key_of_tied_embeddings_wins(own):
    config = {"model_type": "lfm2_moe", "num_hidden_layers": 1, "layer_types": ["conv"]}
    assert args_from_hf(config | {"tie_embedding": own}).tied_embeddings == own
    assert args_from_hf(config).tied_embeddings


# The ring -----------------------------------------------------------------------------------------


def test_the_ring_holds_a_calls_tokens_and_their_window(model):
    """The kernel reads and writes it without a wait between its programs."""
    model.setup_cache(1, LONG)
    assert RING_SPARE >= MAX_TENTATIVE
    for state in rings(model):
        assert (
            isinstance(state, Ring) and state.kv.shape[3] >= RING_SPARE + model.args.conv_width - 1
        )
    model.setup_cache(1, 40)  # as many slots as positions
    assert not any(isinstance(state, Ring) for state in rings(model))


def test_an_int8_cache_leaves_the_ring_as_it_is(model):
    model.setup_cache(1, LONG)
    want = run(model, prompt(20))[:, 0]  # the first token reads no other's keys
    model.setup_cache(1, LONG, KV_CACHES["int8"])
    assert {state.kv.dtype for state in rings(model)} == {torch.float32}
    assert isinstance(model.states[1], KVCache)
    torch.testing.assert_close(run(model, prompt(20))[:, 0], want, rtol=0.1, atol=0.1)


def test_padding_and_idle_rows_leave_the_ring(model):
    model.setup_cache(3, LONG)
    tokens, positions = prompt(20).expand(3, -1).contiguous(), torch.arange(20).expand(3, -1)
    model(tokens, positions, last=torch.tensor([19, 4, -1]))
    for state in rings(model):
        found = state.kv[0, :, 0]
        assert found[0, :20].all() and not found[0, 20:].any()
        assert torch.equal(found[1, :5], found[0, :5]) and not found[1, 5:].any()
        assert not found[2].any()


@pytest.mark.parametrize("real", (1, 3, 140, 299))
def test_a_chunk_may_have_more_padding_than_the_ring_has_slots(model, real):
    """The tokens before the padding stay, and so does what the ring had before."""
    tokens, more = prompt(300), prompt(5, seed=2)
    found = []
    for padded in (True, False):
        model.setup_cache(1, LONG)
        run(model, prompt(6, seed=3))
        if padded:
            run(model, tokens, 6, last=torch.tensor([real - 1]))
        else:
            run(model, tokens[:, :real], 6)
        found.append(run(model, more, 6 + real))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("after", (1, 2, 20, 200))  # a step, a pass, prompts
@pytest.mark.parametrize("count", (1, 5, 7))
def test_a_call_after_accepted_drafts_is_as_if_they_had_run_alone(model, count, after):
    tokens, more, found = prompt(27), prompt(after, 5), []
    for drafts in (7, count):
        model.setup_cache(1, LONG)
        run(model, tokens[:, :20])
        run(model, tokens[:, 20 : 20 + drafts], 20)
        found.append(run(model, more, 20 + count))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_warm_up_takes_nothing_in(model):
    model.setup_cache(1, LONG)
    run(model, prompt(20))
    before = [state.kv.clone() for state in rings(model)]
    for queries in (4, 1):
        positions = torch.arange(LONG - queries, LONG).unsqueeze(0)
        model(prompt(queries), positions, last=torch.tensor([-1]), all_positions=True)
    assert all(torch.equal(s.kv, old) for s, old in zip(rings(model), before, strict=True))


@pytest.mark.slow
def test_compiled_passes_and_steps_are_the_eager_ones(make_family):
    """AOTAutograd copies a changed buffer last, so that an earlier read may get the new one."""
    directory, found = make_family("lfm2_moe").directory, []
    for compiled in (False, True):
        model = load_model(directory, "cpu")
        model.setup_cache(1, LONG)
        options = dict(all_positions=True, runner=CompiledRunner(model) if compiled else None)
        run(model, prompt(125))
        parts = []
        for begin, queries in ((125, 4), (127, 4), (130, 1), (131, 1), (132, 1)):
            positions = torch.arange(begin, begin + queries).unsqueeze(0)
            last = torch.tensor([queries - 1])
            parts.append(model(prompt(queries, begin), positions, last, **options))
        found.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_prefix_is_reused(make_family):
    """A ring goes back by a few tokens without a copy, and further to a snapshot."""
    directory = make_family("lfm2_moe").directory

    def fresh(ids: list[int]) -> list[int]:
        return list(Session(load_model(directory, "cpu"), SESSION).stream(ids, 8, GREEDY))

    session = Session(load_model(directory, "cpu"), SESSION, SessionOptions(prefill_chunk=64))
    ids = prompt(200)[0].tolist()
    answer = list(session.stream(ids, 8, GREEDY))
    for kept, reused in (([*ids, *answer], 208), (ids[:190], 190), (ids[:100], 64)):
        more = [*kept, 3, 4, 5]
        assert list(session.stream(more, 8, GREEDY)) == fresh(more)
        assert session.prefilled >= len(more) - reused


def test_speculation_gives_the_same_tokens(make_family):
    directory, ids = make_family("lfm2_moe").directory, prompt(6)[0].tolist() * 4
    plain = list(Session(load_model(directory, "cpu"), SESSION).stream(ids, 40, GREEDY))
    speculation = Speculation(Session(load_model(directory, "cpu"), SESSION), 5)
    assert list(speculation.stream(ids, 40, GREEDY)) == plain
    assert speculation.drafted > speculation.accepted


def test_the_bytes_in_use_are_those_of_the_window(model):
    session = Session(model, SESSION)
    attention = 2 * 2 * 8 * 4  # keys and values of 2 heads of 8 numbers
    for position in (1, 100, 240):
        used = cache_in_use(session, position) - position * attention
        assert used == 2 * min(position, 3) * 64 * 4


# Several processes --------------------------------------------------------------------------------


def test_channels_that_ranks_cannot_share_are_refused():
    sizes = dict(dim=64, n_layer=1, n_head=4, n_kv_head=2, head_dim=16, intermediate=64)
    sizes |= dict(n_expert=4, n_active=2, vocab_size=160, max_position=64, qk_norm="head")
    args = Lfm2MoeArgs("lfm2_moe", **sizes, conv_channels=66)
    why = tp.shard_refusal(args, {}, 4, "tensor")
    assert why.endswith("66 (channels of the convolution) cannot be divided by 4: start 1, 2")
    assert tp.local_args(args, 2, "tensor").conv_channels == 33
