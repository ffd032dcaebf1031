"""A recurrent layer's state and pending tokens (models/layers/pending_state.py), in each family."""

import pytest
import torch
from chunks import prompt, run, run_chunks

from generate import load_model
from model import Chunk, Transformer
from models.layers.pending_state import PendingState, RecurrentLayer
from ops.plain.pending import MAX_SNAPSHOTS
from runtime.runner import CompiledRunner
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.snapshots import Snapshots
from runtime.speculation import Speculation

GREEDY = Sampling(temperature=0)


ANOTHER = pytest.param("granitemoehybrid", marks=pytest.mark.slow)  # Mamba-2, as Nemotron has


@pytest.fixture(params=("qwen3_next", "nemotron_h", ANOTHER, "kimi_linear", "qwen4_exp"))
def made(request, make_family):
    return make_family(request.param)


@pytest.fixture
def model(made) -> Transformer:
    return load_model(made.directory, "cpu")


def recurrent_states(model: Transformer, states: list | None = None) -> list[PendingState]:
    """Return those of the model's states, or of others, beside which a layer may have more."""
    found = (part for state in states or model.states for part in state.modules())
    return [part for part in found if isinstance(part, PendingState)]


def assert_same_state(model: Transformer, other: Transformer) -> None:
    for ours, theirs in zip(recurrent_states(model), recurrent_states(other), strict=True):
        torch.testing.assert_close(ours.state, theirs.state, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.window, theirs.window, rtol=1e-4, atol=1e-5)


def test_joined_projections_give_the_same(model):
    """On a GPU both products of a layer's input are one, if they are not packed."""
    tokens = prompt(20)
    model.setup_cache(1, 64)
    want = run(model, tokens)
    layers = [block.attention for block in model.layers]
    recurrent = [layer for layer in layers if isinstance(layer, RecurrentLayer)]
    for layer in recurrent:
        layer.join_projections()
    assert recurrent and all(layer.products()[1] is None for layer in recurrent)
    model.setup_cache(1, 64)
    # As beside transformers: some CPUs' products of one matrix and of two are 2e-5 apart.
    torch.testing.assert_close(run(model, tokens), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", ((300,), (64, 200, 36), (1, 2, 129, 168)))
def test_a_long_prompt_matches_transformers(made, model, sizes):
    """Several chunks of the layer, and several of the prompt."""
    tokens = prompt(300)
    want = made.peer(tokens).logits
    torch.testing.assert_close(run_chunks(model, tokens, *sizes), want, rtol=0, atol=1e-4)


def test_padding_and_idle_rows_leave_the_state(model):
    model.setup_cache(3, 64)
    tokens = prompt(20).expand(3, -1).contiguous()
    model(tokens, torch.arange(20).expand(3, -1), last=torch.tensor([19, 4, -1]))
    kept = model.states
    for state in recurrent_states(model):
        assert state.state[0].any() and state.window[0].any()
        assert not state.state[2].any() and not state.window[2].any()
    model.setup_cache(1, 64)
    for start in range(5):  # one by one
        run(model, tokens[:1, start : start + 1], start)
    alone = recurrent_states(model)
    for ours, theirs in zip(recurrent_states(model, kept), alone, strict=True):
        largest = theirs.state.abs().max().item()  # 3 to 100
        torch.testing.assert_close(ours.state[1:2], theirs.state, rtol=1e-4, atol=1e-6 * largest)
        torch.testing.assert_close(ours.window[1:2], theirs.window)


@pytest.mark.parametrize("after", (1, 2, 20))  # a step, a pass, a prompt
@pytest.mark.parametrize("count", (1, 2, 5, 7))
def test_a_call_after_accepted_drafts_is_as_if_they_had_run_alone(made, count, after):
    """The position of a call tells how many tokens of the call before were accepted."""
    model, other = load_model(made.directory, "cpu"), load_model(made.directory, "cpu")
    tokens, more = prompt(27), prompt(after + 1, 5)
    for each, drafts in ((model, tokens[:, 20:]), (other, tokens[:, 20 : 20 + count])):
        each.setup_cache(1, 64)
        run(each, tokens[:, :20])
        run(each, drafts, 20)
    found = [run(each, more[:, :after], 20 + count) for each in (model, other)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    for each in (model, other):  # a token more: now the states have taken all in
        run(each, more[:, after:], 20 + count + after)
    assert_same_state(model, other)


def test_a_warm_up_takes_nothing_in(model):
    """All its tokens are padding, also while tokens of a pass are pending."""
    model.setup_cache(1, 64)
    run(model, prompt(20))
    run(model, prompt(5), 20)
    before = [buffer.clone() for state in recurrent_states(model) for buffer in state.buffers()]
    for queries in (4, 1):
        positions = torch.arange(64 - queries, 64).unsqueeze(0)
        model(prompt(queries), positions, last=torch.tensor([-1]), all_positions=True)
    now = [buffer for state in recurrent_states(model) for buffer in state.buffers()]
    assert all(torch.equal(*pair) for pair in zip(now, before, strict=True))


@pytest.mark.slow
def test_a_compiled_step_after_a_pass_takes_in_what_was_accepted(made):
    """AOTAutograd copies a changed buffer last, so that an earlier read may get the new one."""
    model, other = load_model(made.directory, "cpu"), load_model(made.directory, "cpu")
    tokens, positions = prompt(24), torch.arange(20, 24).unsqueeze(0)
    for each, runner in ((model, None), (other, CompiledRunner(other))):
        each.setup_cache(1, 64)
        run(each, tokens[:, :20])
        options = dict(all_positions=True, runner=runner)
        each(tokens[:, 20:], positions, torch.tensor([3]), **options)
        each(tokens[:, 3:7], positions + 2, torch.tensor([3]), **options)
        for at in (25, 26):  # after three more, then plain
            each(tokens[:, :1], torch.tensor([[at]]), torch.tensor([0]), **options)
    assert_same_state(model, other)


def test_rows_and_snapshots_have_the_tokens_of_a_pass(model):
    """A row that is copied, exchanged or set back after a pass goes on with what was accepted."""
    session = Session(model, 100, SessionOptions(batch=3))
    tokens = prompt(20)
    run(model, tokens)
    run(model, prompt(5), 20)
    session.cached[0] = 23
    session.snapshots.take(0, 23)
    session.copy_row(0, 2, 23)
    session.swap_rows(2, 1)
    found = []
    for row in (0, 1, 0):
        if len(found) == 2:  # after other calls
            assert session.snapshots.go_back(0, 23) == 23
        for part in (tokens[:, :2], tokens[:, 2:3]):  # the second token is refused
            logits = model(part, Chunk(torch.tensor([row]), 25), all_positions=True)
        found.append(logits)
    for logits in found[1:]:
        torch.testing.assert_close(logits, found[0], rtol=1e-4, atol=1e-4)


def test_the_state_is_updated_in_place(model):
    """A captured step reads and writes fixed addresses."""
    model.setup_cache(1, 64)
    (first, *_) = recurrent_states(model)
    at = [buffer.data_ptr() for buffer in first.buffers()]
    run(model, prompt(20))
    run(model, prompt(4), 20)
    snapshots = Snapshots(model.states, 1)
    snapshots.take(0, 22)
    run(model, prompt(1), 22)
    snapshots.go_back(0, 22)
    first.reset()
    assert at == [buffer.data_ptr() for buffer in first.buffers()]
    assert not any(buffer.any() for buffer in first.buffers())


def test_a_prefix_is_reused_from_its_snapshot(made):
    def fresh(ids: list[int]) -> list[int]:
        return list(Session(load_model(made.directory, "cpu"), 256).stream(ids, 8, GREEDY))

    session = Session(load_model(made.directory, "cpu"), 256, SessionOptions(prefill_chunk=16))
    ids = prompt(40)[0].tolist()
    answer = list(session.stream(ids, 8, GREEDY))
    more = [*ids, *answer, 3, 4]
    assert list(session.stream(more, 8, GREEDY)) == fresh(more)
    assert session.prefilled == len(more) - len(ids)
    other = [*ids[:35], 7, 8, 9]
    assert list(session.stream(other, 8, GREEDY)) == fresh(other)
    assert session.prefilled == len(other) - 32


def test_speculation_gives_the_same_tokens(made):
    ids = prompt(6)[0].tolist() * 4
    plain = list(Session(load_model(made.directory, "cpu"), 256).stream(ids, 24, GREEDY))
    speculation = Speculation(Session(load_model(made.directory, "cpu"), 256), 5)
    assert list(speculation.stream(ids, 24, GREEDY)) == plain
    assert speculation.drafted > speculation.accepted


def test_snapshots_are_limited(model):
    """The first and the latest are kept, of all layers; their bytes are counted."""
    every = model.setup_cache(2, 64)
    states = recurrent_states(model)
    found, most = Snapshots(model.states, 2), MAX_SNAPSHOTS
    for length in range(1, most + 5):
        for n, state in enumerate(states):
            state.state.fill_(length + n)
        found.take(1, length)
    kept = [1, *range(6, most + 5)]
    assert sorted(found.taken[1]) == kept and not found.taken[0]
    assert found.nbytes == most * sum(t.nbytes for s in every for t in s.recurrent(0))
    found.assign({0: 1})
    for length, back in ((7, 7), (5, 1), (0, 0)):
        assert found.go_back(1, length) == back
        for n, state in enumerate(states):
            assert state.state[1].unique().item() == (back + n if back else 0)
    assert found.go_back(0, 9) == 9 and states[1].state[0].unique().item() == 10
    found.forget(0)
    assert found.go_back(0, 9) == 0 and not states[0].state[0].any()
