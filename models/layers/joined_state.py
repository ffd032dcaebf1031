"""Several sequence states of one layer as one: a layer may remember more than keys and values."""

from torch import Tensor, nn


class JoinedState(nn.Module):
    """The protocol of runtime/sequence_state.py; the layer calls `append` of each state itself."""

    def __init__(self, *states: nn.Module):
        super().__init__()
        self.states = nn.ModuleList(states)

    def row(self, row: int) -> list[Tensor]:
        """Return a row's memory as views [..., S, N]: that of one state after the other."""
        return [view for state in self.states for view in state.row(row)]

    def recurrent(self, row: int) -> list[Tensor]:
        """Return the part of a row's memory that cannot go back to any length."""
        return [view for state in self.states for view in state.recurrent(row)]

    def reset(self, row: int | None = None) -> None:
        """Forget a row's sequence, or all."""
        for state in self.states:
            state.reset(row)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)
