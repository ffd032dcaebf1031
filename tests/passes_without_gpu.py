"""Passes with scripted drafts against decoding one by one, with the kernels; see test_passes.py.

    TRITON_INTERPRET=1 python tests/passes_without_gpu.py DIRECTORY    Triton's interpreter, CPU

DIRECTORY is a converted hybrid. It prints a JSON list: by way of sampling, the results of `drive`;
then that of `drive_several`.
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from generate import load_model
from models.layers.gated_delta_net import DeltaNet
from ops.attention import delta
from ops.step import draft_check, token_draw
from runtime.drafting_batch import DraftingBatch
from runtime.runner import EagerRunner
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation
from runtime.verification import ACCEPT_STREAM
from tests import interpreter

PROMPT = [5, 17, 3, 99, 42, 8, 120, 5, 17, 3, 99, 11, 5, 17, 60, 61, 62, 7, 9, 30]
# Drafts of each pass, and how many of them are right; 0 drafts are a plain step.
SCRIPT = (3, 3), (0, 0), (3, 0), (0, 0), (4, 2), (0, 0), (0, 0), (1, 1), (2, 1), (0, 0), (5, 4)
SHORT_SCRIPT = (1, 0), (0, 0), (3, 1), (0, 0), (2, 2), (0, 0)
LENGTH = 128


class ScriptedDrafter:
    """Drafts the continuation that it was given, and wrong tokens, as a script says."""

    q = None

    def __init__(
        self, target: Session, text: Sequence[int], script: Sequence[tuple[int, int]], row: int = 0
    ):
        self.target, self.text, self.script, self.row = target, list(text), list(script), row
        self.drafts = torch.zeros(1, 8, dtype=torch.int64, device=target.device)
        self.calls = 0

    def start_prompt(self, ids: Sequence[int], sampling: Sampling) -> None:
        self.calls = 0

    def reset(self) -> None:
        pass

    def exchange(self, other) -> None:
        for name in ("text", "script", "calls"):
            own = getattr(self, name)
            setattr(self, name, getattr(other, name))
            setattr(other, name, own)

    def next_pass(self) -> tuple[int, int]:
        """Return how many drafts the next pass has, and how many of them are right."""
        return self.script[self.calls % len(self.script)]

    def source(self) -> str | None:
        if self.next_pass()[0]:
            return "script"
        self.calls += 1
        return None

    def find(self, limit: int) -> list[int]:
        count, right = self.next_pass()
        self.calls += 1
        known, vocabulary = len(self.target.ids[self.row]), self.target.seen.shape[1]
        text = [*self.text, *[1] * 8][known : known + count]
        return (text[:right] + [(token + 1) % vocabulary for token in text[right:]])[:limit]

    def propose(self, limit: int) -> int:
        found = self.find(limit)
        self.drafts[:, : len(found)] = torch.tensor(found)
        return len(found)


def speculate(
    directory: Path,
    sampling: Sampling,
    text: Sequence[int],
    tokens: int,
    script: Sequence[tuple[int, int]] = SCRIPT,
    **options,
) -> tuple[Speculation, list[int], list[tuple[int, int]]]:
    """Return a speculation, its answer, and of each pass the drafts and how many were accepted."""
    session = Session(
        load_model(directory, "cpu", torch.float32), LENGTH, SessionOptions(**options)
    )
    speculation, found = Speculation(session, 5), []
    speculation.drafter = ScriptedDrafter(session, text, script)
    run_pass = speculation.run_pass

    def noting(candidates: int, left: int) -> list[int]:
        before = speculation.drafted
        new = run_pass(candidates, left)
        found.append((speculation.drafted - before, len(new) - 1))
        return new

    speculation.run_pass = noting
    return speculation, list(speculation.stream(PROMPT, tokens, sampling)), found


def logits_one_by_one(directory: Path, ids: Sequence[int]) -> Tensor:
    """Return the logits [V] after tokens that a fresh session has decoded one by one."""
    session = Session(load_model(directory, "cpu", torch.float32), LENGTH)
    for at, token in enumerate(ids):
        span = torch.tensor([[at]])
        logits = session.model(torch.tensor([[token]]), span, torch.tensor([0]))
    return logits[0]


def logits_next(speculation: Speculation) -> Tensor:
    """Return the logits [V] of the session's newest token, by a step of the model."""
    session = speculation.session
    return session.model(session.token, session.position, session.last)[0]


def drive(directory: Path, sampling: Sampling, tokens: int = 18, script=SCRIPT, **options) -> dict:
    """Return what passes gave, what plain decoding gives, and the error of the state after them."""
    plain = Session(load_model(directory, "cpu", torch.float32), LENGTH)
    answer = list(plain.stream(PROMPT, tokens + 10, sampling))
    speculation, found, passes = speculate(
        directory, sampling, PROMPT + answer, tokens, script, **options
    )
    session = speculation.session
    # The newest token may be past the answer, and its position past the text.
    known = int(session.position)
    ids = (PROMPT + found)[:known]
    error = 0.0
    if len(ids) == known:  # the answer did not end within a pass
        got = logits_next(speculation)
        want = logits_one_by_one(directory, [*ids, int(session.token)])
        error = ((got - want).norm() / want.norm()).item()
    return {
        "same": found == answer[:tokens],
        "passes": passes,
        "after": sorted({a for (n, a), (m, _) in itertools.pairwise(passes) if n and not m}),
        "error": error,
        "checked": len(ids) == known,
    }


def drive_several(directory: Path, rows: int, tokens: int) -> dict:
    """Return whether answers of shared passes are those of plain decoding, and passes by rows."""
    model = load_model(directory, "cpu", torch.float32)
    plain = Session(model, LENGTH)
    prompts = [[n, *PROMPT[: 5 + n]] for n in range(rows)]
    greedy, answers = Sampling(temperature=0), []
    for prompt in prompts:
        plain.reset()
        answers.append(list(plain.stream(prompt, tokens, greedy)))
    session = Session(model, LENGTH, SessionOptions(batch=rows))
    speculation = Speculation(session, 3)
    speculation.lookups = [
        ScriptedDrafter(session, prompts[row] + answers[row], SCRIPT[row:], row)
        for row in range(rows)
    ]
    speculation.drafter = speculation.lookups[0]
    batch, found, passes = DraftingBatch(speculation), {}, Counter()
    verify = speculation.verify
    speculation.verify = lambda size, *rest: (passes.update([size]), verify(size, *rest))
    sequences = [batch.start(prompt, tokens, greedy) for prompt in prompts]
    while batch.count:
        batch.prefill()
        for token in batch.step():
            found.setdefault(token.sequence, []).append(token.token)
        for sequence in sequences:
            if sequence.row is not None and not sequence.tokens_left:
                batch.end(sequence)
    return {"same": [found[one] for one in sequences] == answers, "passes": passes}


@contextmanager
def kernels_on_cpu():
    """Let eager sessions run the kernels of Gated DeltaNet and of passes."""

    def verify(state, logits, tokens, last, q, candidates, result) -> None:
        own = q if candidates else None
        draft_check.verify_pass(state, logits, tokens, last, own, result, ACCEPT_STREAM)

    steps = draft_check.begin_pass, verify
    with ExitStack() as stack:
        for holder, name in ((DeltaNet, "has_kernels"), (delta, "kernels_support")):
            stack.enter_context(mock.patch.object(holder, name, lambda _: True))
        stack.enter_context(mock.patch.object(DeltaNet, "mixes_by_kernels", DeltaNet.takes))
        stack.enter_context(mock.patch.object(token_draw, "GROUPS", 16))  # fewer programs
        stack.enter_context(mock.patch.object(EagerRunner, "pass_steps", lambda self: steps))
        yield


def main() -> int:
    torch.set_num_threads(1)
    interpreter.prepare()
    directory = Path(sys.argv[1])
    ways = Sampling(temperature=0), Sampling(temperature=0.4, top_k=5, seed=3)
    in_fp32 = mock.patch.dict(delta.CHUNK_PRECISION, {torch.float32: "tf32x3"})
    with torch.no_grad(), kernels_on_cpu():
        alone = [drive(directory, ways[0], 10, SHORT_SCRIPT)]
        with in_fp32, mock.patch.object(delta, "LEAST_CHUNK", 2):  # several tokens are one chunk
            alone.append(drive(directory, ways[1], 10, SHORT_SCRIPT))
            print(json.dumps([*alone, drive_several(directory, 2, 7)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
