"""Run and compile the kernels that choose tokens without a GPU; see kernels_without_gpu.py.

They are those of ops/step/token_draw.py and logit_edits.py, of draft_check.py for passes, and of
chain.py for drafts by a head.

    TRITON_INTERPRET=1 python tests/token_draw_without_gpu.py < INPUT    Triton's interpreter, CPU
    python tests/token_draw_without_gpu.py < INPUT    machine code for an H200, by Triton and ptxas

INPUT is a JSON list of cases: "logits" (a name in LOGITS), "V", "groups", and a list of the
arguments of `Sampling`, "rows"; "with_drafts": drafts of the first two rows, too. For a pass
"drafts", their number; "drawn": they have probabilities. The interpreter's process prints for each
case the tokens of plain PyTorch, those of the kernels, and whether the rest of the step's state is
the same; of several passes the results. The other prints counts of the machine code of each kernel.
"""

import json
import os
import sys
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.plain.topk import RANK_KERNEL_MAX
from ops.step import chain, draft_check, token_draw
from ops.step import logit_edits as step_edits
from ops.step.chain import PairInputs, Pairs
from ops.step.draft_check import MOST
from runtime import logit_edits, mtp, verification
from runtime.draft_choice import DRAFT_STREAM, VocabularyPart, choose_draft
from runtime.draft_vocab import rows_of_ids
from runtime.fused_decode import draw_draft
from runtime.logit_edits import EditState, make_edit_state, mask_words
from runtime.sampling import MAX_CANDIDATES, Sampling, StepState, make_sample_step, sample
from tests import interpreter
from tests.kernels_without_gpu import OnCuda
from tests.launched_code import launched_code

INF, NAN = float("inf"), float("nan")


def normal(B: int, V: int) -> Tensor:
    return 3 * torch.randn(B, V, generator=torch.Generator().manual_seed(V))


def rounded(B: int, V: int) -> Tensor:
    """Many ties."""
    return normal(B, V).round()


def equal(B: int, V: int) -> Tensor:
    return torch.full((B, V), -1.5)


def clustered(B: int, V: int) -> Tensor:
    """The likeliest tokens are neighbors, so that groups hold more of them than they keep."""
    return torch.where(torch.arange(V) // 40 % 5 == 2, 5.0, 0.0) + normal(B, V)


def masked(B: int, V: int) -> Tensor:
    """A grammar allows seven tokens."""
    return torch.where(torch.arange(V) % (V // 7) == 3, normal(B, V), -INF)


def damaged(B: int, V: int) -> Tensor:
    """A NaN, inf, -inf alone, and a NaN that is not the largest by its bits."""
    logits = normal(B, V)
    logits[0, 7], logits[1, 20], logits[2] = NAN, INF, -INF
    logits[3, 9] = -NAN
    return logits


LOGITS = {f.__name__: f for f in (normal, rounded, equal, clustered, masked, damaged)}


def run(case: dict, device: str = "cpu") -> dict:
    """Return the tokens of a case, and whether the states after the step are the same."""
    rows = [Sampling(**settings) for settings in case["rows"]]
    B, V = len(rows), case["V"]
    logits = LOGITS[case["logits"]](B, V).to(device)
    generator = torch.Generator().manual_seed(1)

    def state() -> StepState:
        parts = StepState(
            token=torch.full((B, 1), 5),
            position=torch.arange(B).unsqueeze(1) + 11,
            last=-(torch.arange(B) % 2),
            seen=torch.rand(B, V, generator=generator.manual_seed(1)) < 0.3,
            controls=torch.stack([row.controls(V) for row in rows]),
            seeds=torch.tensor([row.seed or 0 for row in rows]),
        )
        return StepState(*(part.to(device) for part in parts))

    plain, fused = state(), state()
    # As on a GPU: the lower of equal tokens comes first.
    given = logits if logits.is_cuda else logits.as_subclass(OnCuda)
    make_sample_step(sample)(plain, given, min(MAX_CANDIDATES, V))
    greedy = not any(row.temperature for row in rows)
    with mock.patch.object(token_draw, "GROUPS", case["groups"]):
        token_draw.draw_tokens(logits, fused, greedy=greedy)
    slots, count = torch.full((2, B + 1), 7), torch.tensor([3], device=device)
    if logits.is_cuda:
        slots = slots.pin_memory()
    for _ in range(2):
        token_draw.post_tokens(fused.token, count, slots)
        fused.token.neg_()
    posted = torch.stack((-fused.token.flatten(), fused.token.flatten())).cpu()
    same_posts = slots[:, :B].equal(posted) and slots[:, B].tolist() == [7, 7] and count.item() == 5
    others = zip(plain[1:], fused[1:], strict=True)
    same = same_posts and edits_are_same(logits, plain)
    same = same and plain.token.equal(fused.token) and all(a.equal(b) for a, b in others)
    if case.get("with_drafts"):
        same = same and (logits.is_cuda or pairs_are_same(V))
        same = same and all(
            drafts_are_same(logits[n], row, case["groups"]) for n, row in enumerate(rows[:2])
        )
    tokens = [s.token.flatten().tolist() for s in (plain, fused)]
    return {"plain": tokens[0], "fused": tokens[1], "same": same}


def drafts_are_same(logits: Tensor, sampling: Sampling, groups: int) -> bool:
    """Whether drafts from logits [V] are those of plain PyTorch, of all tokens and of a part."""
    V, device, found = len(logits), logits.device, []
    for of_part in (False, True):
        # Whole blocks of `largest_by_rank` come first, so that it takes the same of equal logits.
        before = 16 * -(-V // RANK_KERNEL_MAX)
        whole = before + V + 1 if of_part else V
        ids = torch.arange(V, device=device) + before
        part = VocabularyPart(ids, rows_of_ids(ids.tolist(), whole, device)) if of_part else None
        seen = torch.rand(1, whole, generator=torch.Generator().manual_seed(1)) < 0.3
        candidates = sampling.candidates(V) and min(MAX_CANDIDATES, V)
        for kernels in (False, True):
            state = StepState(
                token=torch.full((1, 1), 5),
                position=torch.full((1, 1), 11),
                last=torch.zeros(1, dtype=torch.int64),
                seen=seen.clone(),
                controls=sampling.controls(V).unsqueeze(0),
                seeds=torch.tensor([sampling.seed or 0]),
            )
            state = StepState(*(tensor.to(device) for tensor in state))
            drafts = token_draw.Drafts(
                token=torch.full((1, 3), 7, device=device),
                q=torch.full((3, whole), 0.5, device=device),
                certainty=torch.full((3,), 0.5, device=device),
                place=torch.tensor([1], device=device),
            )
            for _ in range(2):  # the second is the last place, after which the first follows
                if kernels:
                    with mock.patch.object(token_draw, "GROUPS", groups):
                        draw_draft(state, logits.unsqueeze(0), drafts, part, candidates, True)
                else:
                    given = logits.unsqueeze(0)
                    given = given if device.type == "cuda" else given.as_subclass(OnCuda)
                    choose_draft(state, given, drafts, part, candidates, True)
            # Plain PyTorch ranks blocks of a large vocabulary, so it takes others of equal logits.
            q = drafts.q if V <= RANK_KERNEL_MAX else drafts.q.sort().values
            found.append((*state, drafts.token, drafts.place, q, drafts.certainty))
    same = True
    for plain, fused in (found[:2], found[2:]):
        same &= all(a.equal(b) for a, b in zip(plain[:-2], fused[:-2], strict=True))
        same &= all(
            torch.allclose(a, b, 1e-5, 1e-7, equal_nan=True)
            for a, b in zip(plain[-2:], fused[-2:], strict=True)
        )
    return same


def pairs_are_same(V: int) -> bool:
    """Whether a chain begins as by plain PyTorch: its pairs, state and place, and the head's x."""
    ring = torch.randn(1, 20, 24, generator=torch.Generator().manual_seed(5))
    seen, found = torch.rand(1, V, generator=torch.Generator().manual_seed(6)) < 0.3, []
    for known, newest in ((1, 0), (3, 19), (4, 41)):
        numbers = torch.tensor([known, newest + 1, 8, 9, 10 if known < 4 else -1, 11])
        for begin in (mtp.begin_chain, chain.begin_chain):
            empty = torch.zeros(1, dtype=torch.int64)
            column = torch.zeros(1, 1, dtype=torch.int64)
            state = StepState(column, column.clone(), empty, ~seen, torch.ones(1, 5), empty)
            place = torch.tensor([2])
            pairs = begin(numbers, 4, ring, seen, state, place)
            found.append((*pairs, state.position, state.seen, place))
    pairs, inputs = Pairs(*found[-1][:4]), PairInputs(*torch.rand(4, 50, 24))
    inputs = inputs._replace(embedding_norm=torch.rand(24), hidden_norm=torch.rand(24))
    x, rope = chain.join_pairs(pairs.tokens, pairs.positions, pairs.hidden, inputs, 1e-5)
    rows = inputs.embedding[pairs.tokens.clamp(min=0)], pairs.hidden
    norms = inputs.embedding_norm, inputs.hidden_norm
    wanted = [F.rms_norm(row, (24,), norm, 1e-5) for row, norm in zip(rows, norms, strict=True)]
    torch.testing.assert_close(x, torch.cat(wanted, dim=-1))
    assert rope.equal(inputs.rope_table[pairs.positions].unsqueeze(2))
    rings = ring.clone(), ring.clone()
    for store, kept in zip((mtp.store_hidden, chain.store_hidden), rings, strict=True):
        store(kept, torch.tensor([[38]]), pairs.hidden)
    assert rings[0].equal(rings[1])
    both = zip(found[::2], found[1::2], strict=True)
    return all(all(map(torch.equal, plain, fused)) for plain, fused in both)


def edits_are_same(logits: Tensor, state: StepState) -> bool:
    """Whether the kernel edits logits, and counts tokens, as plain PyTorch does."""
    (B, V), generator = logits.shape, torch.Generator().manual_seed(3)
    made = EditState(
        counts=torch.randint(0, 3, (B, V), generator=generator).float(),
        penalties=torch.randn(B, 2, generator=generator),
        bias=torch.randn(B, V, generator=generator) * 10,
        allowed=torch.randint(-(2**31), 2**31, (B, mask_words(V)), generator=generator).int(),
    )
    state = state._replace(token=torch.arange(B).unsqueeze(1) * (V // B) - 1)  # one is NOT_FINITE
    state = StepState(*(part.to(logits.device) for part in state))
    plain, fused = (EditState(*(part.clone().to(logits.device) for part in made)) for _ in "ab")
    wanted = logit_edits.edit_logits(plain, state, logits)
    found = step_edits.edit_logits(fused, state, logits)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-5, equal_nan=True)
    return all(a.equal(b) for a, b in zip(plain, fused, strict=True))


def run_pass(case: dict, device: str = "cpu") -> dict:
    """Return the results of passes with likely and unlikely drafts, and whether states are same."""
    rows, N, V = [Sampling(**settings) for settings in case["rows"]], case["drafts"], case["V"]
    B, generator = len(rows), torch.Generator().manual_seed(2)
    logits = LOGITS[case["logits"]](B * (N + 1), V).view(B, N + 1, V)
    found, same = ([], []), True
    q = (logits + torch.randn(logits.shape, generator=generator)).nan_to_num(0.0, 0.0, 0.0)
    q = q.softmax(-1)[:, :N].to(device).contiguous() if case["drawn"] and N else None
    order = logits.nan_to_num().argsort(descending=True, stable=True)
    for seed in range(case.get("passes", 6)):
        ranks = torch.randint(0, 3, (B, N), generator=generator) * (seed % 3)  # 0: the likeliest
        drafts = order[:, :N].gather(2, ranks.unsqueeze(2)).squeeze(2)
        # One of several rows is idle, and the others have any numbers of drafts.
        last = -(torch.arange(B) == 1).long()
        if B > 1:
            counts = torch.randint(0 if seed else N, N + 1, (B, 1), generator=generator)
            drafts[torch.arange(N) >= counts] = draft_check.NO_DRAFT
        elif seed == 5 and N:
            drafts[0, N // 2] = -1  # a draft model's logits were not finite
        seen = torch.rand(B, V, generator=generator.manual_seed(seed)) < 0.3
        states = []
        for kernels in (False, True):
            state = StepState(
                token=torch.arange(B).unsqueeze(1) + 5,
                position=torch.arange(B).unsqueeze(1) + 11 + seed,
                last=last.clone(),
                seen=seen.clone(),
                controls=torch.stack([row.controls(V) for row in rows]),
                seeds=torch.arange(B) + seed,
            )
            state = StepState(*(part.to(device) for part in state))
            result = torch.full((max(MOST + 2, B * (N + 3)),), 7, device=device)
            begin = (draft_check if kernels else verification).begin_pass
            wide = torch.cat((drafts, drafts), dim=1).to(device)  # rows are far apart
            inputs = begin(state, wide[:, :N])
            tokens, _, ends = inputs
            candidates = max(row.candidates(V) for row in rows) and min(MAX_CANDIDATES, V)
            if kernels:
                with mock.patch.object(token_draw, "GROUPS", case["groups"]):
                    given = state, logits.to(device), tokens, ends, q if candidates else None
                    stream = verification.ACCEPT_STREAM
                    draft_check.verify_pass(*given, result, stream, candidates == 0)
            else:
                given = logits.as_subclass(OnCuda) if device == "cpu" else logits.to(device)
                verification.verify_pass(state, given, tokens, ends, q, candidates, result)
            idle = state.position[last < 0] - torch.arange(B)[last < 0].unsqueeze(1)
            same &= bool((idle == 11 + seed).all())
            states.append((*inputs, result, *state))
        for tokens, state in zip(found, states, strict=True):
            tokens.append(state[3].tolist())
        same &= all(a.equal(b) for a, b in zip(*states, strict=True))
    return {"plain": found[0], "fused": found[1], "same": same}


def counts() -> dict:
    """Return spills and waits of each kernel's machine code, of 8 rows of Qwen3."""
    B, V = 8, 151936
    whole, seen = torch.zeros(B, dtype=torch.int64), torch.empty(B, V, dtype=torch.bool)
    many, column = torch.empty(B, V), whole.view(-1, 1)
    state = StepState(column, column, whole, seen, torch.empty(B, 5), whole)
    two, result = StepState(*(part[:2] for part in state)), torch.zeros(MOST + 2, dtype=torch.int64)

    def launch_all() -> None:
        edits = make_edit_state(B, V, many.device)
        token_draw.draw_tokens(step_edits.edit_logits(edits, state, many), state)
        passed, _, last = draft_check.begin_pass(two, whole[:6].view(2, 3))
        q, logits = torch.empty(2, 3, V), many.view(2, 4, V)
        given = two, logits, passed, last, q, result
        draft_check.verify_pass(*given, verification.ACCEPT_STREAM)

    def draw_draft() -> None:
        one, ids = StepState(*(part[:1] for part in state)), torch.arange(2**15)
        drafts = token_draw.Drafts(column.view(1, -1), many, many[:, 0], whole[:1])
        for greedy in (True, False):
            token_draw.draw_tokens(many[:1, : 2**15], one, ids, drafts, greedy, True, DRAFT_STREAM)
        ring = many[None, :, :2048].contiguous()
        pairs = chain.begin_chain(whole, 4, ring, seen[:1], one, whole[:1])
        inputs = chain.PairInputs(ring[0], ring[0], ring[0, 0], ring[0, 0])
        chain.join_pairs(pairs.tokens, pairs.positions, pairs.hidden, inputs, 1e-6)
        chain.store_hidden(ring, column[:1], pairs.hidden)

    codes = launched_code(launch_all)
    codes |= {f"{name} of a draft": code for name, code in launched_code(draw_draft).items()}
    found = {}
    for name, code in codes.items():
        sass = code.asm["sass"]
        found[name] = {"spills": sass.count("STL"), "waits": sass.count("ACQBULK")}
    return found


def main() -> int:
    torch.set_num_threads(1)
    cases = json.load(sys.stdin)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        interpreter.prepare()
    result = [(run_pass if "drafts" in case else run)(case) for case in cases]
    print(json.dumps(result if interpreted else counts()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
