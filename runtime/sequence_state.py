"""What a layer remembers of its sequences, as sessions, speculation and the server see it.

A layer's `attention.allocate` makes one such object. model.KVCache implements the protocol for
keys and values, models/layers/gated_delta_net.py for a recurrent state. The two differ in which
writes do no harm. A KV cache masks what stands past a sequence's length, so it may be written
there: a prompt's padding, warm-up of a captured graph, idle rows of a batch, refused drafts. A
recurrent state must not take these tokens in. Every call therefore tells which tokens are real:
`context.last` [B] is the index of each row's last real query, -1 for none.

The position of the next call tells which drafts of a pass were accepted. It is on the device. So
nothing runs in each layer after a pass, and the host does not wait. On a GPU all recurrent layers
take these drafts in by one kernel, while the host reads the tokens of the pass (`Settling`).
"""

from typing import Any, Protocol

from torch import Tensor, nn

from model import Context
from ops.attention.delta_state import layer_offsets
from runtime.sampling import StepState


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


class Settling:
    """Lets all recurrent layers take in what was accepted of the rows' last call, by one kernel.

    The next call would do that before its own tokens, layer by layer. It still does where there is
    no such kernel, or layers differ in size.
    """

    def __init__(self, model: nn.Module):
        """model: the tensors of its layers' states must keep their addresses."""
        found: list[Any] = [layer for layer in model.modules() if hasattr(layer, "settle")]
        has_kernel = found and found[0].has_kernels()
        layers = [layer.tensors() for layer in found] if has_kernel else []
        alike = {tuple((part.shape, part.dtype) for part in layer) for layer in layers}
        self.settle = found[0].settle if len(alike) == 1 else None
        if self.settle:
            self.first, self.offsets = layers[0], layer_offsets(layers)

    def __call__(self, rows: StepState, parts: int = 1) -> None:
        """Take in the tokens before the position of each of the rows, but of idle ones.

        parts: as many kernels, each of some of the layers, so that kernels beside them find free
        multiprocessors.
        """
        if self.settle:
            for offsets in self.offsets.chunk(parts):
                self.settle(self.first, offsets, rows.position, rows.last)
