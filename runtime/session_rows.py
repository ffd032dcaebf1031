"""The rows of a session: the caches of their sequences, and the buffers that a step reads.

A captured step needs fixed addresses, so all of these tensors are allocated once and written in
place.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from model import KVCache, Transformer
from ops.step.rows import RowMemory
from runtime.logit_edits import EditState, make_edit_state
from runtime.sampling import Sampling, StepState
from runtime.snapshots import Snapshots
from runtime.transfers import integers, send


class SessionRows:
    """`batch` rows, each for one sequence of up to `cache_len` tokens.

    ids: the tokens of each sequence that the host knows; the cache has the first `cached` of them.
    """

    def __init__(self, model: Transformer, batch: int, cache_len: int, cache_class: type[KVCache]):
        self.model, self.batch, self.cache_len = model, batch, cache_len
        self.device = model.norm.weight.device
        self.states = model.setup_cache(batch, cache_len, cache_class)
        self.snapshots = Snapshots(self.states, batch)
        views = [[v for s in self.states for v in s.row(row)] for row in range(batch)]
        self.memory = RowMemory(views)
        vocabulary = model.args.vocab_size
        self.state = self.make_state(batch)
        self.token, self.position, self.last, self.seen, self.controls, self.seeds = self.state
        self.edited = False  # steps edit the logits
        self.edits = make_edit_state(batch, vocabulary, self.device)
        self.row_is_edited = [False] * batch  # its edits may change something
        # A sequence's first token is sampled for one row. A view of it would recompile.
        self.single = self.state, self.edits
        if batch > 1:
            self.single = self.make_state(1), make_edit_state(1, vocabulary, self.device)
        self.views = {batch: (self.state, self.edits)}  # by number of rows
        self.rows = torch.arange(batch, device=self.device)
        self.reset()

    def make_state(self, rows: int) -> StepState:
        """Allocate the inputs and outputs of a step."""
        device = self.device
        return StepState(
            token=torch.zeros(rows, 1, dtype=torch.int64, device=device),
            position=torch.zeros(rows, 1, dtype=torch.int64, device=device),
            last=torch.full((rows,), -1, device=device),
            seen=torch.zeros(rows, self.model.args.vocab_size, dtype=torch.bool, device=device),
            controls=torch.ones(rows, 5, device=device),
            seeds=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def first_rows(self, size: int) -> tuple[StepState, EditState]:
        """Return the state of the first rows: always the same tensors, as compiled code wants."""
        if size not in self.views:
            self.views[size] = self.view_rows(0, size)
        return self.views[size]

    def view_rows(self, start: int, end: int) -> tuple[StepState, EditState]:
        state, edits = ([t[start:end] for t in part] for part in (self.state, self.edits))
        return StepState(*state), EditState(*edits)

    def reset(self, row: int | None = None) -> None:
        """Forget the sequence of a row, or all."""
        for state in self.states:
            state.reset(row)
        self.snapshots.forget(row)
        if row is not None:
            self.ids[row], self.cached[row] = [], 0
            return
        # Tokens of each sequence that the host knows; the cache has the first `cached` of them.
        self.ids: list[list[int]] = [[] for _ in range(self.batch)]
        self.cached: list[int] = [0] * self.batch
        self.prefilled = 0  # prompt tokens that the last call had to compute

    def set_place(self, row: int, last: int, position: int) -> None:
        """Set the index of a row's last real query, -1 if it is idle, and its position."""
        self.last[row].fill_(last)
        self.position[row].fill_(position)

    def prepare_sampling(self, row: int, ids: Sequence[int], sampling: Sampling) -> None:
        """Set how a row samples, and that it has seen these tokens. No seed: a random one."""
        self.controls[row] = send(sampling.controls(self.seen.shape[1]), self.device)
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        self.seeds[row].fill_(seed)
        self.seen[row].fill_(False).index_fill_(0, send(integers(ids), self.device), True)

    def stop_row(self, row: int) -> None:
        """Make a row idle. A step may write past its tokens in the cache, and nowhere else."""
        self.set_place(row, last=-1, position=self.cached[row])

    def swap_rows(self, a: int, b: int) -> None:
        """Exchange two rows: their sequences and what is remembered of these."""
        self.note_lengths(a, b)
        self.memory.exchange(a, b, max(self.cached[a], self.cached[b]))
        self.snapshots.assign({a: b, b: a})
        for tensor in (*self.state, *self.edits):
            tensor[a], tensor[b] = tensor[b], tensor[a].clone()
        lists: tuple[list, ...] = self.ids, self.cached, self.row_is_edited
        for values in lists:
            values[a], values[b] = values[b], values[a]

    def note_lengths(self, *rows: int) -> None:
        """Tell the snapshots how many tokens these rows have taken in, before that changes."""
        for row in rows:
            self.snapshots.note(row, self.cached[row])

    @contextmanager
    def keeping(self, row: int, start: int, end: int) -> Iterator[None]:
        """Within, a call may write these positions of a row; at the end they are restored."""
        views = [
            view[..., start:end, :] if view.shape[-2] == self.cache_len else view  # a state, a ring
            for view in self.memory.views[row]
        ]
        kept = [view.clone() for view in views]
        try:
            yield
        finally:
            copy_all(kept, views)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make an idle row remember the first tokens of another row, at most `length`."""
        self.note_lengths(source)
        self.memory.copy(source, target, length)
        self.snapshots.assign({target: source})
        self.ids[target], self.cached[target] = self.ids[source][:length], length


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each tensor to the one in its place."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
