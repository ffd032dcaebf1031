"""The number of drafts a pass has: scripted acceptance and costs, on a simulated clock."""

import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.draft_control import (
    LOSS,
    MAX_CREDIT,
    MAX_DEBT,
    MAX_REST,
    DraftControl,
    FixedDrafts,
    Outcome,
)

STEP = 1e-3  # seconds of a plain step
LIMIT = 7


def linear(slope: float):
    """Return the seconds of a pass with n drafts, each of which adds this part of a step."""
    return lambda n: STEP * (1 + slope * n)


def jump(n: int) -> float:
    """Cheap up to 3 drafts; the fourth needs another kernel."""
    return STEP * (1 + 0.1 * n + (1.5 if n >= 4 else 0.0))


def late(n: int) -> float:
    """The first draft costs most of a pass; more are nearly free."""
    return STEP * (1 + (0.8 if n else 0.0) + 0.02 * n)


class Text:
    """Text whose drafts are accepted with a chance that depends on the place."""

    def __init__(self, chance, seed: int = 0):
        self.chance, self.random = chance, random.Random(seed)

    def accept(self, at: int, asked: int) -> int:
        accepted = 0
        while accepted < asked and self.random.random() < self.chance(at + accepted):
            accepted += 1
        return accepted


def ask(control, source: str | None) -> int:
    """Return how many drafts a lone sequence is to have."""
    (asked,) = control.choose([source])
    return asked


def note(control, source: str | None, asked: int, accepted: int, seconds: float) -> None:
    """Record a pass of a lone sequence."""
    control.record([Outcome(source, asked, accepted)], seconds)


def decode(control, text: Text, cost, tokens: int, source="drafts") -> dict:
    """Decode tokens; return the seconds, and of each pass its place, drafts asked and accepted."""
    at, seconds, passes = 0, 0.0, []
    while at < tokens:
        asked = ask(control, source)
        accepted = text.accept(at, asked)
        note(control, source if asked else None, asked, accepted, cost(asked))
        seconds += cost(asked)
        passes.append((at, asked, accepted))
        at += accepted + 1
    return {"seconds": seconds, "tokens": at, "passes": passes}


def rate(found: dict) -> float:
    """Return tokens a plain step's time."""
    return found["tokens"] * STEP / found["seconds"]


def best_rate(chance: float, cost) -> float:
    """Return the most tokens a plain step's time of any fixed number of drafts."""
    tokens = [sum(chance**k for k in range(n + 1)) for n in range(LIMIT + 1)]
    return max(t * STEP / cost(n) for n, t in enumerate(tokens))


@pytest.mark.parametrize("cost", (linear(0.1), linear(0.25), linear(0.6), jump, late))
@pytest.mark.parametrize("chance", (0.0, 0.2, 0.5, 0.7, 0.85, 0.95, 1.0))
def test_it_finds_the_best_number(cost, chance):
    """Within 5 % of the best fixed number; where none pays, of plain decoding."""
    found = decode(DraftControl(LIMIT), Text(lambda at: chance), cost, 6000)
    assert rate(found) >= 0.95 * best_rate(chance, cost)
    assert rate(found) >= 0.97


def test_it_stops_before_a_jump_of_the_cost():
    found = decode(DraftControl(LIMIT), Text(lambda at: 0.9), jump, 4000)
    late_choices = [asked for at, asked, _ in found["passes"] if at > 1000 and asked]
    assert late_choices.count(3) > 0.9 * len(late_choices)


def test_random_text_costs_little_and_probes_grow_apart():
    control = DraftControl(LIMIT)
    found = decode(control, Text(lambda at: 0.01), linear(0.25), 3000)
    assert rate(found) > 0.985
    probes = [at for at, asked, _ in found["passes"] if asked]
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert gaps[-1] >= MAX_REST and max(gaps[:2]) < 16
    assert len(probes) > 3000 / MAX_REST / 2  # it never stops looking


@pytest.mark.parametrize("length", (100, 400))
@pytest.mark.parametrize("cost", (linear(0.1), linear(0.25), jump))
def test_alternating_text_is_followed(length, cost):
    """Drafts are accepted in every second stretch alone: most of what that allows is won."""

    def chance(at: int) -> float:
        return 0.95 if at // length % 2 else 0.02

    found = decode(DraftControl(LIMIT), Text(chance), cost, 40 * length)
    possible = 2 / (1 + 1 / best_rate(0.95, cost))  # an oracle knows the stretches
    won = (rate(found) - 1) / (possible - 1)
    assert won > (0.35 if length == 100 else 0.7)


def test_sources_rest_apart():
    """One source pays and the other does not: the one is used, the other seldom."""
    control, text = DraftControl(4), random.Random(1)
    asked_of = {"good": 0, "bad": 0}
    for n in range(2000):
        source = "good" if n % 2 else "bad"
        asked = ask(control, source)
        chance = 0.9 if source == "good" else 0.0
        accepted = next((k for k in range(asked) if text.random() > chance), asked)
        note(control, source if asked else None, asked, accepted, linear(0.2)(asked))
        asked_of[source] += asked > 0
    assert asked_of["good"] > 900 and asked_of["bad"] < 100


def test_a_slow_first_pass_and_a_hiccup_do_not_end_drafting():
    """The first pass of a kind loads kernels; later the host is busy for a moment."""
    control, seen = DraftControl(3), set()
    at, seconds, drafted = 0, 0.0, 0
    for number in range(1000):
        asked = ask(control, "drafts")
        spent = linear(0.1)(asked)
        if (asked and asked not in seen) or number == 500:
            spent *= 200
        seen.add(asked)
        note(control, "drafts" if asked else None, asked, asked, spent)
        at, drafted, seconds = at + asked + 1, drafted + (asked > 0), seconds + spent
    assert drafted > 950


def test_a_cost_that_falls_is_noticed():
    """Passes cost 4 steps while another program runs, then 1.3: drafting begins again."""
    control, text = DraftControl(3), Text(lambda at: 0.9)
    before = decode(control, text, lambda n: STEP * (4 if n else 1), 2000)
    after = decode(control, text, lambda n: STEP * (1 + 0.1 * n), 4000)
    assert rate(before) > 0.97
    assert rate(after) > 2


def test_a_source_that_proposes_nothing_is_asked_less_often():
    """Asking costs 0.2 steps and brings nothing; then drafts come, and pay at once."""
    control, asked = DraftControl(3), 0
    for _ in range(2000):
        wants = ask(control, "drafts") > 0
        note(control, "drafts" if wants else None, 0, 0, STEP * (1.2 if wants else 1))
        asked += wants
    assert 0.2 * asked < 2000 * LOSS + MAX_DEBT + 1
    found = decode(control, Text(lambda at: 0.9), linear(0.2), 2000)
    assert rate(found) > 1.6


def test_plain_steps_that_were_slow_at_first_do_not_flatter_drafts():
    control, text = DraftControl(3), Text(lambda at: 0.1)
    for _ in range(3):
        note(control, None, 0, 0, 3 * STEP)
    found = decode(control, text, linear(0.3), 6000)
    assert rate(found) > 0.97


@pytest.mark.parametrize("wait", (0.3, 1.0))
def test_a_step_for_which_the_gpu_waits_is_lost_time_and_no_measure(wait):
    """The first plain step after a pass is launched late: that is a cost of the pass."""
    control, seconds, accepted = DraftControl(LIMIT), 0.0, random.Random(0)
    tokens, waits, passes = 0, True, 0
    while tokens < 20_000:
        asked = ask(control, "drafts")
        spent = STEP * (1.4 if asked else 1 + wait * waits)
        taken = asked and int(accepted.random() < 0.3)
        control.record(
            [Outcome("drafts" if asked else None, asked, taken, not asked and waits)], spent
        )
        waits, passes = asked > 0, passes + (asked > 0)
        seconds, tokens = seconds + spent, tokens + taken + 1
    assert passes > 20 and control.plain[1].median == STEP
    assert seconds / STEP / tokens < 1 + LOSS + (MAX_DEBT + 3) / tokens


@given(
    accepted=st.lists(st.integers(0, LIMIT), min_size=1, max_size=400),
    costs=st.lists(st.floats(0.2, 6), min_size=LIMIT, max_size=LIMIT),
)
@example(accepted=[0, 0, 0], costs=[1.0, 0.5, 1.0, 1.0, 1.0, 2.0, 3.0])
@settings(max_examples=200, deadline=None)
def test_the_loss_is_bounded_over_every_stretch(accepted, costs):
    """The bound of DraftControl's docstring, for any acceptance, any costs, from any place on."""
    control, cost = DraftControl(LIMIT), (1.0, *costs)
    excess, lowest, worst, most_lost = 0.0, 0.0, 0.0, 0.0
    for most in accepted * 3:
        asked = ask(control, "drafts")
        taken = min(most, asked)
        note(control, "drafts" if asked else None, asked, taken, STEP * cost[asked])
        excess += cost[asked] - (1 + LOSS) * (taken + 1)
        lowest = min(lowest, excess)
        worst, most_lost = max(worst, excess - lowest), max(most_lost, excess)
    # The first pass of a kind that takes so long, beside one that may be faster than a plain step.
    uncounted = sum(c for c in costs if c > 3 * min(cost))
    bound = MAX_DEBT + max(cost) + uncounted + 1e-6
    assert most_lost <= bound and worst <= bound + MAX_CREDIT


def test_without_a_source_steps_are_plain_and_a_fixed_number_is_kept():
    control = DraftControl(4)
    for _ in range(20):
        assert ask(control, None) == 0
        note(control, None, 0, 0, STEP)
    assert ask(control, "drafts") > 0
    assert FixedDrafts(4).choose([None, "drafts"]) == [0, 4]


# Several sequences --------------------------------------------------------------------------------


def decode_rows(control, texts: list[Text], cost, passes: int, limit: int = 3) -> dict:
    """Decode texts side by side; return seconds, tokens, and the drafts asked for each in turn.

    cost: (drafts of each text) -> seconds.
    """
    at, seconds, asked_of = [0] * len(texts), 0.0, []
    for _ in range(passes):
        asked = control.choose(["drafts"] * len(texts), limit)
        assert max(asked) <= limit
        found = [text.accept(*place) for text, *place in zip(texts, at, asked, strict=True)]
        outcomes = [
            Outcome("drafts" if n else None, n, k) for n, k in zip(asked, found, strict=True)
        ]
        control.record(outcomes, cost(asked))
        seconds += cost(asked)
        asked_of.append(asked)
        at = [place + accepted + 1 for place, accepted in zip(at, found, strict=True)]
    return {"seconds": seconds, "tokens": sum(at), "asked": asked_of}


def by_rows(rows: int, slope: float = 0.25):
    """Return the cost of a pass: a draft of each row adds a part of a plain step."""
    return lambda asked: STEP * (1 + slope * sum(asked) / rows + 0.05 * (max(asked) > 0))


@pytest.mark.parametrize("chances", ((0.9, 0.9), (0.9, 0.0), (0.9, 0.0, 0.9), (0.0, 0.0, 0.0, 0.9)))
def test_each_row_has_an_acceptance_of_its_own(chances):
    """Rows whose drafts are never accepted are left out, and the others draft."""
    control, rows = DraftControl(LIMIT), len(chances)
    texts = [Text(lambda at, chance=chance: chance, n) for n, chance in enumerate(chances)]
    found = decode_rows(control, texts, by_rows(rows), 3000)
    asked = [sum(each[n] > 0 for each in found["asked"]) / 3000 for n in range(rows)]
    for chance, share in zip(chances, asked, strict=True):
        assert share > 0.85 if chance else share < 0.15
    # Of what an oracle wins, which drafts for the good rows alone, always three tokens.
    good = sum(chance > 0 for chance in chances)
    best = (rows + good * sum(0.9**k for k in (1, 2, 3))) / (1.05 + 0.75 * good / rows)
    won = found["tokens"] * STEP / found["seconds"] / rows - 1
    assert won > 0.8 * (best / rows - 1)


def test_rows_that_never_accept_cost_little():
    control = DraftControl(LIMIT)
    texts = [Text(lambda at: 0.01, n) for n in range(4)]
    found = decode_rows(control, texts, by_rows(4), 3000, limit=1)
    assert found["tokens"] * STEP / found["seconds"] / 4 > 0.98
    assert any(max(each) for each in found["asked"][-200:])  # it never stops looking


def test_rows_keep_their_acceptance_when_they_are_exchanged():
    control = DraftControl(LIMIT)
    texts = [Text(lambda at: 0.95, 0), Text(lambda at: 0.0, 1)]
    decode_rows(control, texts, by_rows(2), 400)
    control.exchange(0, 1)
    found = decode_rows(control, texts[::-1], by_rows(2), 100)
    asked = [sum(each[n] > 0 for each in found["asked"]) for n in range(2)]
    assert asked[0] < 20 and asked[1] > 80


def test_numbers_of_rows_have_times_of_their_own():
    """Passes of one row pay, those of two do not: each is found out, in turn."""
    control, asked = DraftControl(3), {1: 0, 2: 0}
    for n in range(4000):
        rows = 1 + n // 40 % 2
        texts = [Text(lambda at: 0.9, 10 * n + row) for row in range(rows)]
        cost = by_rows(rows) if rows == 1 else lambda asked: STEP * (4 if max(asked) else 1)
        found = decode_rows(control, texts, cost, 1)
        asked[rows] += max(found["asked"][0]) > 0
    assert asked[1] > 1700 and asked[2] < 150


@given(
    accepted=st.lists(
        st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=300
    ),
    costs=st.lists(st.floats(0.2, 6), min_size=9, max_size=9),
)
@settings(max_examples=100, deadline=None)
def test_the_loss_of_several_rows_is_bounded(accepted, costs):
    """In plain steps of all rows, for any acceptance of each and any cost of each kind of pass."""
    control, excess, lost = DraftControl(3), 0.0, 0.0
    for most in accepted * 3:
        asked = control.choose(["drafts"] * 3, 3)
        drafting = sum(n > 0 for n in asked)
        cost = costs[3 * (drafting - 1) + max(asked) - 1] if drafting else 1.0
        taken = [min(pair) for pair in zip(most, asked, strict=True)]
        outcomes = [
            Outcome("drafts" if n else None, n, k) for n, k in zip(asked, taken, strict=True)
        ]
        control.record(outcomes, STEP * cost)
        excess += cost - (1 + LOSS) * (1 + sum(taken) / 3)
        lost = max(lost, excess)
    uncounted = sum(cost for cost in costs if cost > 3)  # the first pass of a kind
    assert lost <= MAX_DEBT + max(1.0, *costs) + uncounted + 1e-6
