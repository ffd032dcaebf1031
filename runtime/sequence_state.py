"""What a layer remembers of its sequences, as sessions, speculation and the server see it.

A layer's `attention.allocate` makes one such object. model.KVCache implements the protocol for
keys and values, models/layers/gated_delta_net.py for a recurrent state. The two differ in what they
forgive. A KV cache masks what stands past a sequence's length, so it may be written there: a
prompt's padding, warm-up of a captured graph, idle rows of a batch, refused drafts. A recurrent
state must not take these tokens in. Every call therefore tells which tokens are real:
`context.last` [B] is the index of each row's last real query, -1 for none.

The position of the next call tells which drafts of a pass were accepted. It is on the device. So
nothing runs in each layer after a pass, and the host does not wait.
"""

from typing import Protocol

from torch import Tensor

from model import Context


class SequenceState(Protocol):
    """Memory of `batch` sequences in one layer."""

    def append(self, values: Tensor, context: Context):
        """Take in the values [B, Q, ...] of the call's real tokens; return what the layer reads.

        B may be less than the rows; then the call is of the first rows.
        After a call of 2 to MAX_TENTATIVE tokens a row, the last ones may be refused: the row's
        next call begins at the position after those that were accepted. A call without real tokens
        tells nothing.
        """

    def row(self, row: int) -> list[Tensor]:
        """Return a row's memory, for `ops.step.rows.RowMemory`: views [..., S, N].

        S is positions, or 1 of a recurrent state. N: values of a position.
        """

    def recurrent(self, row: int) -> list[Tensor]:
        """Return views of a row's state that changes with each token, for `snapshots.Snapshots`.

        A KV cache has none: it can go back to any length.
        """

    def reset(self, row: int | None = None) -> None:
        """Forget a row's sequence, or all."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
