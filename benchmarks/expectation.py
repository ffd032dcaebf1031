"""What acceptance makes of a pass."""


def expected_tokens(drafts: int, acceptance: float) -> float:
    """Return the expected tokens of a pass: the model's own, and the drafts before a refusal.

    acceptance: the chance of each draft, if all before it are accepted.
    """
    return sum(acceptance**n for n in range(drafts + 1))
