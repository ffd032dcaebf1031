"""Automatic speculation: any number of drafts at any pass, from any source, changes no text."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES, HYBRID_CHECKPOINT
from test_speculate import GREEDY, PROMPT, chi_square, exact_answers, scramble, small_model

from generate import load_model
from runtime.draft_control import FIRST_STEPS, DraftControl
from runtime.drafters import LONG, MODEL, SHORT, DraftModel, FirstOf
from runtime.loading import load_head
from runtime.mtp import MTPDrafter
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation
from tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("few_threads")
LIMIT = 5
HELDOUT = (HYBRID_CHECKPOINT / "heldout.txt").read_text()[:40_000]
# Text that the greedy continuations repeat, so that long matches are found and refused.
REPEATED = PROMPT * 3
# The layers of these families remember tokens in a recurrent state, which cannot be cut.
RECURRENT = "qwen3_next", "qwen3_5_moe", "qwen4_exp"


class AnyNumber(DraftControl):
    """Asks for any number of drafts, at random; keeps what passes had."""

    def __init__(self, limit: int, seed: int = 0):
        super().__init__(limit)
        self.random, self.passes_made = random.Random(seed), []

    def choose(self, sources, limit: int | None = None) -> list[int]:
        most = min(limit or self.limit, self.limit)
        return [self.random.randint(0, most) if source else 0 for source in sources]

    def record(self, outcomes, seconds: float) -> None:
        self.passes_made.extend(outcomes)


@pytest.fixture(scope="module")
def plain(make_family):
    """(family, ids, count) -> greedy tokens of plain decoding, with an empty cache."""
    known = {}

    def tokens(name: str, ids: list[int], count: int) -> list[int]:
        key = name, tuple(ids), count
        if key not in known:
            session = Session(load_model(make_family(name).directory, "cpu"), 256)
            known[key] = list(session.stream(ids, count, GREEDY))
        return known[key]

    return tokens


def open_auto(directory, draft: str, overlaps: bool = False, **options) -> Speculation:
    """draft: "none"; "twin": the target's own weights; "other": random ones."""
    drafting = None if draft == "none" else load_model(directory, "cpu", torch.float32)
    if draft == "other":
        scramble(drafting)
    session = Session(load_model(directory, "cpu"), 256, SessionOptions(**options))
    speculation = Speculation(session, LIMIT, drafting, auto=True)
    speculation.overlaps = overlaps
    if drafting:  # random weights are never certain
        speculation.drafter.other.least = 0.0
    return speculation


@pytest.fixture(scope="module")
def hybrid_answers(hybrid_directory):
    """Prompts and the greedy answers of the embedded hybrid.

    Long answers repeat themselves, so that lookups serve them: the head drafts for short ones.
    """
    session = Session(load_model(hybrid_directory, "cpu", torch.float32), 512)
    ids = load_tokenizer(hybrid_directory).encode(HELDOUT)
    prompts = [ids[:1], ids[5000:5060] * 2, *(ids[at : at + 60] for at in range(0, 9000, 2250))]
    found = []
    for prompt in prompts:
        session.reset()
        found.append((prompt, list(session.stream(prompt, 36, GREEDY))))
    return found


def open_head(directory, vocab: int = 0, compiled: bool = False) -> Speculation:
    """Return an automatic speculation by a checkpoint's head, over `vocab` frequent ids; 0: all."""
    model = load_model(directory, "cpu", torch.float32)
    head = load_head(directory, model, torch.float32)
    ids = load_tokenizer(directory).frequent_ids(vocab)
    session = Session(model, 512, SessionOptions(compile=compiled))
    return Speculation(session, LIMIT, head=head, auto=True, draft_ids=ids)


@pytest.mark.parametrize("overlaps", (False, True))
@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("draft", ("none", "twin", "other"))
@pytest.mark.parametrize("name", ("mixtral", *RECURRENT))
def test_any_numbers_of_drafts_leave_greedy_text_as_it_is(
    name, draft, compiled, overlaps, make_family, plain, no_compiler
):
    """Plain steps follow passes that accepted none, some and all of their drafts."""
    speculation = open_auto(make_family(name).directory, draft, overlaps, compile=compiled)
    speculation.control = control = AnyNumber(LIMIT)
    seen = set()
    for ids in (REPEATED, PROMPT):
        expected = plain(name, ids, 40)
        assert list(speculation.stream(ids, 40, GREEDY)) == expected
        assert list(speculation.stream([*ids, *expected[:30]], 10, GREEDY)) == expected[30:]
    made = control.passes_made
    for (_, asked, accepted, _), after in itertools.pairwise(made):
        if asked and not after.asked:
            seen.add("none" if not accepted else "all" if accepted == asked else "some")
    assert seen, "no plain step came after drafts"
    assert draft != "twin" or "all" in seen
    assert draft != "other" or "none" in seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "compiled", "overlaps"), ((0, False, False), (0, True, True), (1000, True, False))
)
def test_any_numbers_of_drafts_by_a_head_leave_greedy_text_as_it_is(
    vocab, compiled, overlaps, hybrid_directory, hybrid_answers, no_compiler
):
    """The shipped head, and lookups of long matches before it; plain steps follow both.

    vocab: frequent ids that the head drafts; 0: all.
    """
    speculation = open_head(hybrid_directory, vocab, compiled)
    speculation.overlaps = speculation.follows = overlaps
    speculation.control = control = AnyNumber(LIMIT)
    assert isinstance(speculation.drafter.other, MTPDrafter)
    for prompt, expected in hybrid_answers:
        assert list(speculation.stream(prompt, 36, GREEDY)) == expected
        longer = [*prompt, *expected[:24]]  # continues from the cache
        assert list(speculation.stream(longer, 12, GREEDY)) == expected[24:]
    made = control.passes_made
    followed = {  # source, some or all accepted, of passes before a plain step
        (source, "all" if accepted == asked else "some" if accepted else "none")
        for (source, asked, accepted, _), after in itertools.pairwise(made)
        if asked and not after.asked
    }
    assert {(MODEL, "all"), (MODEL, "some"), (MODEL, "none"), (LONG, "all")} <= followed


@pytest.mark.slow
@pytest.mark.parametrize("cost", (1.0, 20.0))
def test_the_controller_drafts_by_a_head_where_that_pays(cost, hybrid_directory, hybrid_answers):
    """cost: of a pass, in plain steps. Both sources draft if it is 1, hardly if 20."""
    speculation = open_head(hybrid_directory)
    record, used = speculation.control.record, Counter()

    def with_cost(outcomes, seconds):
        used[outcomes[0].source] += 1
        record(outcomes, cost if outcomes[0].asked else 1.0)

    speculation.control.record = with_cost
    for prompt, expected in hybrid_answers:
        speculation.reset()
        assert list(speculation.stream(prompt, 36, GREEDY)) == expected
    tokens = sum(len(expected) - 1 for _, expected in hybrid_answers)
    if cost == 1.0:
        assert used[MODEL] > 15 and used[LONG] > 8 and used[None] >= FIRST_STEPS
        assert used.total() < tokens / 2
    else:
        assert used[MODEL] + used[LONG] < 10 and used[None] > tokens - 50


def test_families_are_known():
    assert set(RECURRENT) <= set(FAMILIES)


@pytest.mark.parametrize("draft", ("none", "twin"))
def test_the_controller_changes_no_greedy_text(draft, make_family, plain):
    """With the clock of this machine, whatever it chooses."""
    speculation = open_auto(make_family("mixtral").directory, draft)
    for ids in (REPEATED, PROMPT):
        assert list(speculation.stream(ids, 40, GREEDY)) == plain("mixtral", ids, 40)
    found = speculation.statistics()
    assert found["passes"] * found["tokens_per_pass"] == pytest.approx(39)


@pytest.mark.parametrize("draft", ("lookup", "model"))
@pytest.mark.parametrize("right", (True, False))
def test_sampled_text_keeps_its_distribution(draft, right, monkeypatch):
    """300 answers of 3 tokens, numbers of drafts at random; certain drafts taken for drawn fail.

    A long match comes before the draft model, so both kinds of drafts share the model's q.
    """
    sampling, total = Sampling(temperature=0.35, top_k=3, repetition_penalty=1.2), 300
    model = small_model(0)
    # The likeliest next token continues a long match.
    prompts = [[2, 0, 1, 2, 3, 4, token, 0, 1, 2, 3, 4] for token in range(8)]
    ids = max(prompts, key=lambda ids: exact_answers(model, ids, 1, sampling).get((ids[6],), 0))
    expected = exact_answers(model, ids, 3, sampling)
    other = small_model(1) if draft == "model" else None
    speculation = Speculation(Session(model, 32), 2, other, auto=True)
    speculation.control = control = AnyNumber(2)
    if not right:
        monkeypatch.setattr(
            "runtime.verification.verify_sampled",
            lambda logits, tokens, *_: (
                torch.tensor([[tokens.shape[1]]]),
                torch.cat((tokens[:, 1:], tokens[:, -1:]), dim=1),
            ),
        )
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(total):
        speculation.is_plain = lambda sampling: False
        found[tuple(speculation.stream(ids, 3, replace(sampling, seed=seed)))] += 1
    sources = Counter(outcome.source for outcome in control.passes_made if outcome.asked)
    assert sources[LONG] > 60 and sources[MODEL if other else SHORT] > 20
    try:
        off = chi_square(found, expected, total)
    except AssertionError:  # a token of probability 0
        off = 2.0
    assert (off <= 1) == right


@pytest.mark.parametrize("draft", (pytest.param("none", marks=pytest.mark.slow), "twin"))
def test_a_seed_gives_the_same_text_as_plain_decoding(draft, make_family):
    """When drafts are made depends on the clock, so a seeded answer has none."""
    directory = make_family("mixtral").directory
    speculation, sampling = open_auto(directory, draft), Sampling(1.2, seed=5)
    alone = list(Session(load_model(directory, "cpu"), 256).stream(REPEATED, 40, sampling))
    assert list(speculation.stream(REPEATED, 40, sampling)) == alone
    assert speculation.statistics() == {
        "passes": 39,
        "drafted": 0,
        "accepted": 0,
        "tokens_per_pass": 1.0,
    }
    assert len(list(speculation.stream(REPEATED, 40, Sampling(1.2)))) == 40


def test_what_speculation_lacks_takes_plain_steps(make_family):
    """Penalties that edit the logits, and watched answers, which report details."""
    directory = make_family("mixtral").directory
    speculation = open_auto(directory, "none")
    session = Session(load_model(directory, "cpu"), 256)
    edited = Sampling(0.0, frequency_penalty=1.5)
    expected = list(session.stream(REPEATED, 20, edited))
    assert list(speculation.stream(REPEATED, 20, edited)) == expected
    speculation.session.watch = True
    for _ in speculation.stream(REPEATED, 5, GREEDY):
        assert len(speculation.details[0].experts) == speculation.model.args.n_layer
    speculation.session.watch = False
    session.reset()
    plain = list(session.stream(REPEATED, 20, GREEDY))
    assert list(speculation.stream(REPEATED, 20, GREEDY)) == plain
    with pytest.raises(ValueError, match="no penalties"):
        list(Speculation(session, 3).stream(PROMPT, 5, edited))


def test_a_step_in_flight_is_the_next_token(make_family, plain):
    """A captured session launches the next plain step before it reads a token: here by hand."""
    speculation = open_auto(make_family("mixtral").directory, "none", overlaps=True)
    launched = []
    launch = speculation.launch
    speculation.launch = lambda *given: launched.append(len(speculation.ids[0])) or launch(*given)
    speculation.control.choose = lambda sources, limit: [0]
    ids = [7, 1, 130, 22]
    stream = speculation.stream(ids, 20, GREEDY)
    expected = plain("mixtral", ids, 20)
    assert [next(stream), next(stream)] == expected[:2]
    assert launched == [5, 5]  # two steps before the host knew the second token
    assert list(stream) == expected[2:] and len(launched) == 19  # none past the end
    stream = speculation.stream([*ids, *expected[:3]], 9, GREEDY)
    assert [next(stream), next(stream)] == expected[3:5]
    stream.close()  # with a step in flight
    again = [*ids, *expected[:4], 5]
    assert list(speculation.stream(again, 9, GREEDY)) == plain("mixtral", again, 9)


# Sources ------------------------------------------------------------------------------------------


def test_long_matches_come_before_the_model_and_shorter_ones_do_not(make_family):
    speculation = open_auto(make_family("mixtral").directory, "other")
    drafter, target = speculation.drafter, speculation.session
    assert isinstance(drafter, FirstOf)
    for ids, source in (
        ([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5], LONG),
        ([1, 2, 3, 4, 6, 9, 1, 2, 3, 4], MODEL),
        ([1, 2, 3], MODEL),
    ):
        target.start_prompts([ids], GREEDY)
        drafter.start_prompt(ids, GREEDY)
        assert drafter.source() == source
        assert drafter.lookup.source() == (LONG if source == LONG else SHORT if ids[3:] else None)
        assert drafter.propose(3) == 3
        if source == LONG:
            assert drafter.drafts[0, :3].tolist() == [6, 9, 1]


def test_a_drawn_and_a_certain_draft_have_proper_distributions(make_family):
    speculation = open_auto(make_family("mixtral").directory, "other")
    drafter, target, sampling = speculation.drafter, speculation.session, Sampling(1.0, seed=1)
    for ids in ([1, 2, 3], [1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5]):
        target.start_prompts([ids], sampling)
        drafter.start_prompt(ids, sampling)
        assert drafter.propose(4) == 4
        q = drafter.q[:4]
        torch.testing.assert_close(q.sum(dim=1), torch.ones(4))
        assert (q.gather(1, drafter.drafts[0, :4, None]) > 0).all()
    assert (q.amax(dim=1) == 1).all()


@pytest.mark.parametrize("sampling", (GREEDY, Sampling(1.0, seed=3)))
def test_drafting_stops_before_a_draft_below_the_threshold(sampling, make_family):
    """With the threshold at the probability of each draft in turn, and just above it."""
    directory = make_family("mixtral").directory
    target = Session(load_model(directory, "cpu"), 256)
    target.start_prompts([PROMPT], sampling)
    target.first_tokens()
    target.ids[0].append(int(target.token))
    drafter = DraftModel(load_model(directory, "cpu"), target, LIMIT, least=1e-9)
    drafter.start_prompt(PROMPT, sampling)
    assert drafter.propose(LIMIT) == LIMIT
    chances, drafts = drafter.written.certainty[:LIMIT].tolist(), drafter.drafts.tolist()
    assert all(0 < chance < 1 for chance in chances)
    for place, chance in enumerate(chances):
        least = chance * (1 + 1e-5)
        drafter.least = least
        stops = next(n for n, other in enumerate(chances) if other < least)
        assert drafter.propose(LIMIT) == stops <= place
        assert drafter.drafts[0, :stops].tolist() == drafts[0][:stops]
    drafter.least = min(chances) * (1 - 1e-5)
    assert drafter.propose(LIMIT) == LIMIT


def test_a_draft_model_drops_refused_drafts_when_others_drafted_since(make_family):
    """Its cache has drafts of its own that were refused; then lookups and plain steps follow."""
    directory = make_family("mixtral").directory
    speculation = open_auto(directory, "other")
    drafter = speculation.drafter.other
    speculation.control = AnyNumber(LIMIT)
    list(speculation.stream(REPEATED, 40, GREEDY))
    known = drafter.drop_refused()
    fresh = Session(scramble(load_model(directory, "cpu", torch.float32)), 256)
    ids = speculation.ids[0]
    list(fresh.prefill(0, ids[:known], 0))
    for own, other in zip(drafter.states, fresh.states, strict=True):
        got, want = own.kv[..., :known, :], other.kv[..., :known, :]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
