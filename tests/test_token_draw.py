"""The kernels that choose a token give the tokens of plain PyTorch, in Triton's interpreter."""

import pytest
from without_gpu import run_without_gpu

SETTINGS = (
    dict(seed=1),
    dict(seed=2, temperature=0.0),
    dict(seed=3, top_p=0.5),
    dict(seed=4, top_k=20, min_p=0.1, repetition_penalty=1.3),
    dict(seed=5, temperature=0.3, top_k=256, top_p=0.95),
)
QUICK = dict(logits="normal", V=300, groups=8, rows=SETTINGS[2:4], with_drafts=True)
# A row may have a top_k beyond what the kernels keep, or no limit, whatever the step was made for.
UNBOUNDED = tuple(
    dict(logits=logits, V=V, groups=16, rows=(dict(seed=1, top_k=top_k), dict(seed=2, top_k=None)))
    for logits, V, top_k in (("clustered", 700, 400), ("equal", 300, 257), ("normal", 40, 10**6))
)
# "damaged" has four rows that are not finite.
CASES = (
    dict(logits="normal", V=5000, groups=64, rows=SETTINGS, with_drafts=True),
    dict(logits="rounded", V=3000, groups=64, rows=SETTINGS, with_drafts=True),
    dict(logits="equal", V=300, groups=16, rows=SETTINGS),
    dict(logits="clustered", V=3000, groups=32, rows=SETTINGS),
    dict(logits="masked", V=3000, groups=32, rows=SETTINGS),
    dict(logits="damaged", V=300, groups=16, rows=(*SETTINGS[:2], *SETTINGS), with_drafts=True),
    dict(logits="normal", V=40, groups=16, rows=SETTINGS[:3]),
    dict(logits="normal", V=32000, groups=512, rows=SETTINGS[:1]),
)


# Several sequences: one idle, the others with any numbers of drafts.
SHARED = tuple(
    dict(logits=logits, V=V, groups=16, rows=rows, drafts=N, drawn=False)
    for logits, V, N, rows in (
        ("normal", 40, 1, (dict(temperature=0.0, repetition_penalty=1.4), dict(), dict(top_k=5))),
        ("normal", 700, 3, (dict(seed=1), dict(), dict(temperature=0.0), dict(top_p=0.6))),
        ("damaged", 300, 1, (dict(temperature=0.0), dict(), dict(repetition_penalty=1.2))),
        ("equal", 300, 2, (dict(temperature=0.0), dict())),
    )
)
PASSES = tuple(
    dict(logits=logits, V=V, groups=16, rows=[rows], drafts=N, drawn=drawn)
    for logits, V, N, drawn, rows in (
        ("normal", 700, 3, True, dict(seed=1)),
        ("normal", 700, 5, False, dict(top_p=0.7, repetition_penalty=1.4)),
        ("normal", 300, 15, True, dict(temperature=0.0, repetition_penalty=1.4)),
        ("clustered", 700, 2, True, dict(top_k=256)),
        ("equal", 300, 1, False, dict(temperature=0.0)),
        ("rounded", 40, 4, True, dict(temperature=0.5, top_k=12, min_p=0.1)),
        ("damaged", 300, 3, True, dict(seed=1)),
        ("damaged", 300, 4, False, dict(temperature=0.0)),
        ("masked", 700, 3, True, dict(temperature=0.9)),
    )
)


QUICK_PASSES = dict(SHARED[0], groups=8, passes=2), dict(PASSES[4], passes=2)


def results(*cases: dict) -> list[dict]:
    return run_without_gpu("token_draw_without_gpu.py", given=cases, TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def quick() -> list[dict]:
    """Return the results of `make test`: those of one process, which takes long to start."""
    return results(*QUICK_PASSES, QUICK, *UNBOUNDED)


def check_passes(cases: tuple[dict, ...], found: list[dict]) -> None:
    for case, result in zip(cases, found, strict=True):
        assert result["plain"] == result["fused"] and result["same"], (case, result)
    counts = set()
    for case, result in zip(cases, found, strict=True):
        width, rows = case["drafts"] + 3, len(case["rows"])
        counts |= {row[n * width] for row in result["plain"] for n in range(rows)}
    # No draft accepted, several; nothing for an idle sequence.
    assert 1 in counts and max(counts) > 1
    assert (0 in counts) == any(len(case["rows"]) > 1 for case in cases)


@pytest.mark.slow
def test_a_pass_accepts_what_plain_pytorch_does():
    check_passes(PASSES[:2], results(*PASSES[:2]))


def test_a_pass_of_several_sequences_accepts_what_plain_pytorch_does(quick):
    check_passes(QUICK_PASSES, quick[:2])


@pytest.mark.slow
def test_passes_of_several_sequences_for_every_kind_of_logits():
    check_passes(SHARED, results(*SHARED))


@pytest.mark.slow
def test_a_pass_accepts_what_plain_pytorch_does_for_every_kind_of_logits():
    check_passes(PASSES, results(*PASSES))


def check(cases: tuple[dict, ...], found: list[dict]) -> None:
    for case, result in zip(cases, found, strict=True):
        assert result["plain"] == result["fused"] and result["same"], (case, result)
        if case["logits"] == "damaged":
            assert result["plain"][:4] == [-1] * 4 and min(result["plain"][4:]) >= 0


def test_the_tokens_are_those_of_plain_pytorch(quick):
    check((QUICK, *UNBOUNDED), quick[2:])


@pytest.mark.slow
def test_the_tokens_are_those_of_plain_pytorch_for_every_kind_of_logits():
    check(CASES, results(*CASES))


@pytest.mark.slow
def test_they_compile_for_an_h200():
    found = run_without_gpu("token_draw_without_gpu.py", given=[])
    passes = {"_begin_pass", "_check_drafts", "_accept"}
    chosen = {"_find_best", "_rank", "_draw"}
    chain = "_begin_chain", "_join_pairs", "_keep_states"
    drafts = {f"{name} of a draft" for name in (*chosen, *chain)}
    assert set(found) == {"_edit_logits"} | chosen | drafts | passes
    # A few scalars of its search, which hardly ever runs.
    assert found["_check_drafts"].pop("spills") < 10
    assert all(
        counts == {"spills": 0, "waits": 1} for counts in found.values() if "spills" in counts
    )
    assert found["_check_drafts"] == {"waits": 1}
