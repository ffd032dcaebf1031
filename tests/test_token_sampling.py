"""The kernels of ops/token_sampling.py without a GPU: tokens, and machine code."""

import pytest
from without_gpu import run_without_gpu

SCRIPT = "sampling_kernels_without_gpu.py"
KINDS = (
    "normal",
    "equal",
    "many ties",
    "descending",
    "clustered",
    "a NaN",
    "an infinity",
    "half -inf",
    "all -inf",
)
SAMPLING = {"temperature": 0.8, "top_k": 200, "repetition_penalty": 1.3}


def check(cases: list[dict]) -> None:
    found = run_without_gpu(SCRIPT, given=cases, TRITON_INTERPRET="1")
    assert len(found) == len(cases)
    assert [case for case, right in zip(cases, found, strict=True) if not right] == []


def test_the_kernels_draw_what_the_plain_step_draws():
    shape = {"rows": 2, "vocabulary": 5000, "count": 256, "sampling": SAMPLING}
    check([shape | {"kind": kind} for kind in KINDS])


@pytest.mark.slow
def test_any_vocabulary_and_controls():
    cases = [
        {"rows": 1, "vocabulary": 160, "count": 160, "kind": "equal"},
        {"rows": 3, "vocabulary": 300, "count": 256},
        {"rows": 1, "vocabulary": 4096, "count": 256, "kind": "many ties"},
        {"rows": 1, "vocabulary": 32000, "count": 256, "kind": "clustered"},
        {"rows": 1, "vocabulary": 152064, "count": 256},
    ]
    cases = [case | {"sampling": SAMPLING} for case in cases]
    for n in range(20):
        sampling = {"temperature": 0.3 + n / 10, "top_k": 1 + 12 * n, "min_p": n / 200}
        sampling |= {"top_p": 0.3 + n / 30}
        cases.append({"rows": 2, "vocabulary": 1000, "count": 256, "seed": n, "sampling": sampling})
    check(cases)


@pytest.mark.slow
def test_the_machine_code_spills_nothing():
    for vocabulary in (32000, 262144):
        (found,) = run_without_gpu(
            SCRIPT, given=[{"rows": 1, "vocabulary": vocabulary, "count": 256}]
        )
        assert set(found) == {"_find_maxima", "_find_candidates", "_draw"}
        assert all(spills == 0 for _, spills in found.values()), found
