"""Choose how many drafts the next pass has, by measured acceptance and the measured time of passes.

The controller never touches the device. It gets each pass's seconds on the host's clock.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

FIRST_STEPS = 3  # plain steps that are timed before the first draft
WINDOW = 9  # times of one kind of pass that are remembered; their median counts
PLAIN_WINDOW = 5  # the same of plain steps
# Passes with drafts until a plain step is timed again: the first ones may have been slow by chance,
# which would flatter drafts.
PLAIN_EVERY = 32
MEMORY = 12  # about how many drafts at one position the acceptance remembers
UNSEEN_MEMORY = 48  # about how many passes that do not reach a position until it is forgotten
# Until drafts are verified and passes are timed:
EXPECTED_ACCEPTANCE = 0.6
EXPECTED_WEIGHT = 1.0  # verified drafts that the expectation counts for
EXPECTED_COST = 0.25  # plain steps that a draft of each sequence adds to a pass
# A probe remembers this number of verified drafts, so that two accepted ones are enough.
PROBE_MEMORY = 2.0
MIN_REST, MAX_REST = 8, 64  # tokens between two probes of a source that does not pay
LOSS = 0.015  # of plain decoding's time may be lost for good
MAX_DEBT = 2.0  # plain steps that may be lost beyond that
MAX_CREDIT = 8.0  # plain steps that were won earlier and may be lost again


class Outcome(NamedTuple):
    """What a pass, or a plain step, did for one sequence."""

    source: str | None = None  # the source of its drafts; None: it has none
    asked: int = 0  # drafts that the source was to propose; 0: it proposed none
    accepted: int = 0
    waited: bool = False  # the GPU waited for the host to launch a plain step, as after a pass


class DraftSource:
    """Whether drafts of one source, such as lookups of long matches, are accepted in one text.

    limit: most drafts of a pass.
    """

    def __init__(self, limit: int):
        self.accepted, self.tried = [0.0] * limit, [0.0] * limit  # by position, fading
        self.rest, self.next_rest = 0, MIN_REST  # tokens until the next probe
        self.is_probed = False  # the next pass has drafts even if they seem not to pay

    def verified(self, asked: int, accepted: int) -> None:
        """Count a pass. Drafts that the source did not propose count as not accepted."""
        for position in range(len(self.tried)):
            is_new = position < min(accepted + 1, asked)
            fade = 1 - 1 / (MEMORY if is_new else UNSEEN_MEMORY)
            self.tried[position] = fade * self.tried[position] + is_new
            self.accepted[position] = fade * self.accepted[position] + (position < accepted)

    def expected_tokens(self) -> list[float]:
        """Return the expected tokens of a pass with 0, 1, ... drafts.

        A position that was seldom reached is expected to be like the one before it.
        """
        chance, reached, tokens = EXPECTED_ACCEPTANCE, 1.0, [1.0]
        for accepted, tried in zip(self.accepted, self.tried, strict=True):
            chance = (accepted + EXPECTED_WEIGHT * chance) / (tried + EXPECTED_WEIGHT)
            reached *= chance
            tokens.append(tokens[-1] + reached)
        return tokens

    def begin_rest(self, tokens: int = 0) -> None:
        """Draft nothing for some tokens, at least `tokens`; each rest is longer than the last."""
        self.rest = max(tokens, self.next_rest)
        self.next_rest = min(2 * self.next_rest, MAX_REST)
        self.is_probed = False

    def pass_tokens(self, count: int) -> bool:
        """Come this many tokens closer to the next probe; return whether it is next.

        A source that is probed forgets most of its past.
        """
        if not self.rest:
            return False
        self.rest = max(0, self.rest - count)
        if self.rest:
            return False
        self.is_probed = True
        for n, tried in enumerate(self.tried):
            scale = min(1.0, PROBE_MEMORY / tried) if tried else 1.0
            self.tried[n], self.accepted[n] = tried * scale, self.accepted[n] * scale
        return True


class PassTimes:
    """Seconds of passes of one kind, by the number of drafts asked for.

    share: the part of the sequences that has drafts.
    """

    def __init__(self, share: float):
        self.share = share
        self.seconds: dict[int, deque[float]] = {}
        self.medians: dict[int, float] = {}  # of `seconds`
        self.met: set[int] = set()  # numbers that some pass had

    def expected(self, plain: float, limit: int) -> list[float]:
        """Return the expected seconds of a pass with 0 to `limit` drafts; plain: of a plain step.

        Numbers that were not timed are expected at the least slope between those that were, so
        that they are tried: a curve may jump, and be flat before and after it.
        """
        timed = {0: plain} | self.medians
        slopes = [(timed[b] - timed[a]) / (b - a) for a, b in pairwise(timed)]
        slope = max(0.0, min(slopes, default=EXPECTED_COST * self.share * plain))
        found: list[float] = []
        for n in range(limit + 1):
            found.append(timed[n] if n in timed else found[-1] + slope)
        for n in reversed(range(limit)):  # more drafts never take less
            if n not in timed:
                found[n] = min(found[n], found[n + 1])
        return found

    def add(self, asked: int, seconds: float, plain: float) -> float:
        """Remember the seconds of a pass; return what a pass like it is expected to take.

        The first of its kind does not count if it took far longer: it may have loaded kernels.
        """
        if asked not in self.met:
            self.met.add(asked)
            expected = self.expected(plain, asked)[asked]
            if seconds > 3 * expected:
                return expected
        if asked not in self.seconds:
            self.seconds[asked] = deque(maxlen=WINDOW)
        self.seconds[asked].append(seconds)
        self.note_median(asked)
        return self.medians[asked]

    def note_median(self, count: int) -> None:
        """Compute the median of a number's times anew. Numbers stay in rising order."""
        is_new = count not in self.medians
        self.medians[count] = median(self.seconds[count])
        if is_new:
            self.medians = dict(sorted(self.medians.items()))

    def forget_oldest(self) -> None:
        """Forget the oldest time of each number, so that one that was wrong by chance goes, too."""
        for n in list(self.seconds):
            self.seconds[n].popleft()
            if self.seconds[n]:
                self.note_median(n)
            else:
                del self.seconds[n], self.medians[n]


class PlainSteps:
    """The seconds of plain steps of some number of sequences."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=PLAIN_WINDOW)
        self.median = 0.0
        self.passes = 0  # with drafts, since the last plain step

    @property
    def is_due(self) -> bool:
        """Whether the next step is to be timed as a plain one."""
        return len(self.seconds) < FIRST_STEPS or self.passes >= PLAIN_EVERY

    def add(self, seconds: float) -> None:
        """Remember the seconds of a step."""
        self.seconds.append(seconds)
        self.median, self.passes = median(self.seconds), 0


class PassKind(NamedTuple):
    """Passes that take the same time with the same number of drafts."""

    rows: int  # sequences
    drafting: int  # those of them that have drafts
    source: str | None  # a lone sequence's, since a model's drafts take time; else None


class DraftControl:
    """Chooses the number of drafts of each pass, 0 to `limit`, as the text comes.

    The choice has the most expected tokens a second, if that is more than a plain step's. A source
    that does not pay rests, and is probed after 8, 16, 32, then each 64 tokens.

    A pass may be of several sequences. Each has an acceptance of its own; those that have drafts
    have the same number. A sequence has none without a source, while that rests, or if the others
    alone have more expected tokens a second.

    The loss is bounded. `debt` counts the plain steps by which passes with drafts took
    longer than plain steps for the same tokens, less LOSS of all tokens' time. Drafts are made only
    while it is at most MAX_DEBT. So all text takes at most (1 + LOSS) times the time of plain
    decoding, plus MAX_DEBT plain steps and one pass. Earlier wins lower the debt to -MAX_CREDIT at
    the least, so a stretch of text can lose that many more. Times are medians of those measured: a
    single slow pass makes no debt.
    """

    def __init__(self, limit: int):
        self.limit, self.debt = limit, 0.0
        self.plain: defaultdict[int, PlainSteps] = defaultdict(PlainSteps)  # by sequences
        self.times: dict[PassKind, PassTimes] = {}
        # By row; then by number of sequences and name: a source may pay for one and not for two.
        self.rows: defaultdict[int, dict[tuple[int, str], DraftSource]] = defaultdict(dict)

    def times_of(self, rows: int, drafting: int, source: str | None) -> PassTimes:
        """Return the times of passes of a number of sequences, of which some have drafts."""
        kind = PassKind(rows, drafting, source if rows == 1 else None)
        if kind not in self.times:
            self.times[kind] = PassTimes(drafting / rows)
        return self.times[kind]

    def source_of(self, row: int, rows: int, name: str) -> DraftSource:
        """Return what is known of a source of drafts in a row's text, beside `rows` - 1 others."""
        sources, key = self.rows[row], (rows, name)
        if key not in sources:
            sources[key] = DraftSource(self.limit)
        return sources[key]

    def exchange(self, a: int, b: int) -> None:
        """Exchange the texts of two rows."""
        self.rows[a], self.rows[b] = self.rows[b], self.rows[a]

    def choose(self, sources: Sequence[str | None], limit: int | None = None) -> list[int]:
        """Return how many drafts to ask each row's source for; all 0: take a plain step.

        sources: of the first rows; None: a row has none. limit: most drafts of this pass.
        """
        limit, plain = min(limit or self.limit, self.limit), self.plain[len(sources)]
        if all(source is None for source in sources) or plain.is_due:
            return [0] * len(sources)
        known = {
            row: self.source_of(row, len(sources), source)
            for row, source in enumerate(sources)
            if source is not None
        }
        ready = {row: drafts for row, drafts in known.items() if not drafts.rest}
        if self.debt > MAX_DEBT:
            for drafts in ready.values():
                drafts.begin_rest(math.ceil((self.debt - MAX_DEBT) / LOSS))
            return [0] * len(sources)
        count, chosen = self.find_best(sources, ready, limit) if ready else (0, [])
        for row in ready:
            if row not in chosen:
                ready[row].begin_rest()
        return [count if row in chosen else 0 for row in range(len(sources))]

    def find_best(
        self, sources: Sequence[str | None], ready: dict[int, DraftSource], limit: int
    ) -> tuple[int, list[int]]:
        """Return the number of drafts with the most expected tokens a second, and its rows.

        ready: sources by row. No rows: a plain step has the most, and no source is to be probed.
        """
        plain, rows = self.plain[len(sources)].median, len(sources)
        tokens = {row: drafts.expected_tokens() for row, drafts in ready.items()}
        probed = sum(drafts.is_probed for drafts in ready.values())
        # Rows whose drafts are seldom accepted may be left out: their experts take time, too.
        order = sorted(ready, key=lambda n: (ready[n].is_probed, tokens[n][limit]), reverse=True)
        rates: dict[tuple[int, int], float] = {}
        for drafting in range(max(1, probed), len(order) + 1):
            seconds = self.times_of(rows, drafting, sources[0]).expected(plain, limit)
            for n in range(1, limit + 1):
                found = sum(tokens[row][n] for row in order[:drafting]) + rows - drafting
                rates[drafting, n] = found / seconds[n]
        drafting, n = max(rates, key=lambda case: rates[case])
        pays = rates[drafting, n] > rows / plain or probed
        return n, order[:drafting] if pays else []

    def record(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Count a pass with drafts, or a plain step, of the first rows.

        seconds: from the tokens before it to its own, on the host's clock. A source that proposed
        nothing counts no draft, but looking may have cost time.
        """
        rows, plain, lost = len(outcomes), self.plain[len(outcomes)], 0.0
        mean = sum(outcome.accepted + 1 for outcome in outcomes) / rows
        asked = [outcome.asked for outcome in outcomes if outcome.asked]
        if asked:
            plain.passes += 1
            times = self.times_of(rows, len(asked), outcomes[0].source)
            spent = times.add(max(asked), seconds, plain.median)
            lost = spent / plain.median - mean
            self.count_accepted(outcomes, pays=lost < 0)
        elif not plain.is_due and any(outcome.source or outcome.waited for outcome in outcomes):
            lost = min(seconds / plain.median, MAX_DEBT) - mean
        else:
            plain.add(seconds)
        self.debt = max(-MAX_CREDIT, self.debt + lost - LOSS * mean)
        for row, outcome in enumerate(outcomes):
            for (count, name), drafts in self.rows[row].items():
                if drafts.pass_tokens(outcome.accepted + 1):
                    for kind, times in self.times.items():
                        if kind.rows == count and kind.source in (name, None):
                            times.forget_oldest()

    def count_accepted(self, outcomes: Sequence[Outcome], pays: bool) -> None:
        """Count the drafts of a pass. pays: it took less time than plain steps."""
        for row, outcome in enumerate(outcomes):
            if outcome.source is None or not outcome.asked:
                continue
            drafts = self.rows[row][len(outcomes), outcome.source]
            drafts.verified(outcome.asked, outcome.accepted)
            if pays and not drafts.is_probed:
                drafts.next_rest = MIN_REST
            drafts.is_probed = False


class FixedDrafts:
    """Asks for the same number of drafts at each pass, whatever that costs."""

    def __init__(self, limit: int):
        self.limit = limit

    def exchange(self, a: int, b: int) -> None:
        """Know nothing of rows."""

    def choose(self, sources: Sequence[str | None], limit: int | None = None) -> list[int]:
        """As `DraftControl.choose`."""
        most = min(limit or self.limit, self.limit)
        return [most if source else 0 for source in sources]

    def record(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Remember nothing."""
