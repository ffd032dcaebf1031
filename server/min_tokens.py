"""The field `min_tokens`: an answer's end tokens are masked until it is long enough."""

from collections.abc import Sequence

from torch import Tensor

from runtime.logit_edits import ALL, Constraint


class MinTokens:
    """Forbids end tokens among an answer's first `count` tokens.

    constraint: a grammar that the answer follows, too. If it allows the end alone, the answer ends.
    """

    def __init__(self, count: int, stop_ids: Sequence[int], constraint: Constraint | None):
        self.left, self.stop_ids, self.constraint = count, stop_ids, constraint

    def mask(self, row: Tensor) -> None:
        """Write the allowed next tokens to `row`, see runtime.logit_edits."""
        if self.constraint:
            self.constraint.mask(row)
        else:
            row.fill_(ALL)
        if self.left <= 0:
            return
        allowed = row.clone()
        for id in self.stop_ids:
            word, bit = divmod(id, 32)
            row[word] &= ~(1 << bit) if bit < 31 else (1 << 31) - 1
        if not row.any():
            row.copy_(allowed)

    def advance(self, token: int) -> None:
        self.left -= 1
        if self.constraint:
            self.constraint.advance(token)
