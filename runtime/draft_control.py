"""How many drafts the next pass has: from measured acceptance and the measured time of passes.

The controller never touches the device. It is given the host's clock around each pass.
"""

import math
from collections import deque
from itertools import pairwise
from statistics import median

FIRST_STEPS = 3  # plain steps that are timed before the first draft
WINDOW = 9  # times of one kind of pass that are remembered; their median counts
PLAIN_WINDOW = 5  # the same of plain steps, of which one follows PLAIN_EVERY passes with drafts:
PLAIN_EVERY = 32  # the first steps may have been slow by chance, which would flatter drafts
MEMORY = 12  # drafts at one position that acceptance remembers, about
UNSEEN_MEMORY = 48  # passes after which a position that they did not reach is forgotten, about
# Until drafts are verified and passes are timed:
EXPECTED_ACCEPTANCE = 0.6
EXPECTED_WEIGHT = 1.0  # verified drafts that the expectation counts for
EXPECTED_COST = 0.25  # plain steps that each draft adds to a pass
# A probe remembers this number of verified drafts, so that two accepted ones are enough.
PROBE_MEMORY = 2.0
MIN_REST, MAX_REST = 8, 64  # tokens between two probes of a source that does not pay
LOSS = 0.015  # of plain decoding's time may be lost for good
MAX_DEBT = 2.0  # plain steps that may be lost beyond that
MAX_CREDIT = 8.0  # plain steps won before that may be lost, too


class DraftSource:
    """What is known of the drafts of one source, such as lookups of long matches.

    limit: most drafts of a pass.
    """

    def __init__(self, limit: int):
        self.accepted, self.tried = [0.0] * limit, [0.0] * limit  # by position, fading
        self.seconds: dict[int, deque[float]] = {}  # of passes, by the number of drafts asked for
        self.met: set[int] = set()  # numbers that some pass had
        self.rest, self.next_rest = 0, MIN_REST  # tokens until the next probe
        self.is_probed = False  # the next pass has drafts even if they seem not to pay

    def verified(self, asked: int, accepted: int) -> None:
        """Count a pass. A draft that the source did not propose is one that was not accepted."""
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

    def expected_seconds(self, plain: float) -> list[float]:
        """Return the expected seconds of a pass with 0, 1, ... drafts; plain: of a plain step.

        Numbers that were not timed are expected at the least slope between those that were, so
        that they are tried: a curve may jump, and be flat before and after it.
        """
        timed = {0: plain} | {n: median(self.seconds[n]) for n in sorted(self.seconds)}
        slopes = [(timed[b] - timed[a]) / (b - a) for a, b in pairwise(timed)]
        slope = max(0.0, min(slopes, default=EXPECTED_COST * plain))
        found: list[float] = []
        for n in range(len(self.tried) + 1):
            found.append(timed[n] if n in timed else found[-1] + slope)
        for n in reversed(range(len(self.tried))):  # more drafts never take less
            if n not in timed:
                found[n] = min(found[n], found[n + 1])
        return found

    def time(self, asked: int, seconds: float, plain: float) -> float:
        """Remember the seconds of a pass; return what a pass like it is expected to take.

        The first of its kind does not count if it took far longer: it may have loaded kernels.
        """
        expected = self.expected_seconds(plain)[asked]
        if asked not in self.met and seconds > 3 * expected:
            self.met.add(asked)
            return expected
        self.met.add(asked)
        times = self.seconds.setdefault(asked, deque(maxlen=WINDOW))
        times.append(seconds)
        return median(times)

    def begin_rest(self, tokens: int = 0) -> None:
        """Draft nothing for some tokens, at least `tokens`; each rest is longer than the last."""
        self.rest = max(tokens, self.next_rest)
        self.next_rest = min(2 * self.next_rest, MAX_REST)
        self.is_probed = False

    def pass_tokens(self, count: int) -> None:
        """Come this many tokens closer to the next probe, which forgets most of the past."""
        if not self.rest:
            return
        self.rest = max(0, self.rest - count)
        if self.rest:
            return
        self.is_probed = True
        for n, tried in enumerate(self.tried):
            scale = min(1.0, PROBE_MEMORY / tried) if tried else 1.0
            self.tried[n], self.accepted[n] = tried * scale, self.accepted[n] * scale
        for n in list(self.seconds):  # a time that was wrong by chance is forgotten at last
            self.seconds[n].popleft()
            if not self.seconds[n]:
                del self.seconds[n]


class DraftControl:
    """Chooses the number of drafts of each pass, 0 to `limit`, as the text comes.

    The choice has the most expected tokens a second, if that is more than a plain step's. A source
    that does not pay rests, and is probed after 8, 16, 32, then each 64 tokens.

    The loss is bounded. `debt` counts the plain steps by which passes with drafts took
    longer than plain steps for the same tokens, less LOSS of all tokens' time. Drafts are made only
    while it is at most MAX_DEBT. So all text takes at most (1 + LOSS) times the time of plain
    decoding, plus MAX_DEBT plain steps and one pass. A win counts for MAX_CREDIT at most, so a
    stretch of text loses no more than that beside it. Times are medians of those measured: a single
    slow pass is no debt.
    """

    def __init__(self, limit: int):
        self.limit, self.debt = limit, 0.0
        self.plain: deque[float] = deque(maxlen=PLAIN_WINDOW)
        self.passes = 0  # with drafts, since the last plain step
        self.sources: dict[str, DraftSource] = {}

    def choose(self, source: str | None) -> int:
        """Return how many drafts to ask this source for; 0: take a plain step. None: no source."""
        is_due = len(self.plain) < FIRST_STEPS or self.passes >= PLAIN_EVERY
        if source is None or is_due:
            return 0
        drafts = self.sources.setdefault(source, DraftSource(self.limit))
        if drafts.rest:
            return 0
        if self.debt > MAX_DEBT:
            drafts.begin_rest(math.ceil((self.debt - MAX_DEBT) / LOSS))
            return 0
        tokens = drafts.expected_tokens()
        seconds = drafts.expected_seconds(median(self.plain))
        rates = [t / s for t, s in zip(tokens, seconds, strict=True)]
        best = max(range(1, self.limit + 1), key=lambda n: rates[n])
        if rates[best] <= rates[0] and not drafts.is_probed:
            drafts.begin_rest()
            return 0
        return best

    def record(self, source: str | None, asked: int, accepted: int, seconds: float) -> None:
        """Count a pass with drafts, or a plain step (source None).

        seconds: from the tokens before it to its own, on the host's clock. asked 0: the source was
        asked and proposed nothing, which tells of no draft and may cost time.
        """
        tokens, lost = accepted + 1, 0.0
        if source is None:
            self.plain.append(seconds)
            self.passes = 0
        elif not asked:
            lost = min(seconds / median(self.plain), MAX_DEBT) - tokens
        else:
            drafts, plain = self.sources[source], median(self.plain)
            self.passes += 1
            lost = drafts.time(asked, seconds, plain) / plain - tokens
            drafts.verified(asked, accepted)
            if lost < 0 and not drafts.is_probed:
                drafts.next_rest = MIN_REST
            drafts.is_probed = False
        self.debt = max(-MAX_CREDIT, self.debt + lost - LOSS * tokens)
        for drafts in self.sources.values():
            drafts.pass_tokens(tokens)


class FixedDrafts:
    """Asks for the same number of drafts at each pass, whatever that costs."""

    def __init__(self, limit: int):
        self.limit = limit

    def choose(self, source: str | None) -> int:
        return self.limit if source else 0

    def record(self, source: str | None, asked: int, accepted: int, seconds: float) -> None:
        """Remember nothing."""
