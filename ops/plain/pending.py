"""Pending tokens of a recurrent layer in PyTorch (models/layers/pending_state.py).

Letters: B sequences, M tokens that may be pending, N channels of the convolution, W its width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ops.plain.gated_delta import conv_silu_in_torch

MAX_TENTATIVE = 16  # tokens of one call that can still be refused
MAX_SNAPSHOTS = 8  # most copies of a sequence's recurrent states, or rings, that are kept


def take_in_plain(
    state: Tensor,
    pending: list[Tensor],
    weights: Any,
    position: Tensor,
    last: Tensor | None,
    row: Tensor | None,
    advance: Callable[[Tensor, Tensor, Tensor, Tensor], object],
) -> None:
    """Take in each sequence's pending tokens before position [B, 1]; then none are pending.

    A sequence without a real token stays as it is. pending: inputs [.., W - 1 + M, N], what gives
    the gates [.., M, ..], first [.., H]. row int64 [B]: the rows of the sequences; None: the first.
    weights: have conv [N, W], a_log, dt_bias, and conv_bias or none. advance: takes the result
    [B, M, N] of the convolution, what gives its tokens' gates, their `last` and a state, and
    updates this.
    """
    inputs, gates, first = pending
    rows = torch.arange(len(position), device=state.device) if row is None else row
    begins = first[:, 0][rows]
    changes = (begins > 0) if last is None else (begins > 0) & (last >= 0)
    if state.device.type == "cpu" and not changes.any():  # as after each call of one token
        return
    M, past = gates.shape[1], weights.conv.shape[1] - 1
    accepted = (position[:, 0] + 1 - begins).clamp(0, M) * changes
    x, new = inputs[rows], state[rows]
    bias = getattr(weights, "conv_bias", None)
    y = conv_silu_in_torch(x[:, past:], x[:, :past], weights.conv, bias)
    advance(y, gates[rows], accepted - 1, new)
    state.index_copy_(0, rows, torch.where(accepted.view(-1, 1, 1, 1) > 0, new, state[rows]))
    moved = last_inputs(x[:, :past], x[:, past:], accepted)
    moved = torch.where(changes.view(-1, 1, 1), moved, x[:, :past])
    inputs[:, :past].index_copy_(0, rows, moved)
    first.index_copy_(0, rows, torch.where(changes.unsqueeze(1), 0, first[rows]))


def convolve_plain(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    last: Tensor | None = None,
    row: Tensor | None = None,
) -> Tensor:
    """`conv_silu_in_torch` of a call's tokens, which then moves their window in place.

    window [.., W - 1, N]: of the sequences in rows int64 [B]; None: of each. It takes in the real
    tokens of x, up to index last [B]; None: all.
    """
    given, (B, Q, _) = rows_of(window, row), x.shape
    y = conv_silu_in_torch(x, given, weight, bias)
    count = torch.full((B,), Q, device=x.device) if last is None else last + 1
    put_rows(window, row, last_inputs(given, x, count))
    return y


def in_place(form: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Let a form (*tokens, state) -> (y, the state after them) update the state in given rows.

    The function returned takes (*tokens, state, row), the rows as for `convolve_plain`.
    """

    def call(*arguments) -> Tensor:
        *tokens, state, row = arguments
        y, after = form(*tokens, rows_of(state, row))
        put_rows(state, row, after)
        return y

    return call


def rows_of(memory: Tensor, row: Tensor | None) -> Tensor:
    """Return rows of a memory; None: all, as a view."""
    return memory if row is None else memory[row]


def put_rows(memory: Tensor, row: Tensor | None, value: Tensor) -> None:
    """Set rows of a memory; None: all."""
    memory.copy_(value) if row is None else memory.index_copy_(0, row, value)


def last_inputs(window: Tensor, x: Tensor, count: Tensor) -> Tensor:
    """Return the last inputs, as many as `window` [B, W - 1, N], after count [B] of x [B, Q, N].

    They are not taken from both joined: that would copy a whole prompt.
    """
    width = window.shape[1]
    index = count.unsqueeze(1) + torch.arange(-width, 0, device=x.device)  # negative: of `window`
    index = index.unsqueeze(-1).expand(-1, -1, x.shape[-1])
    old, new = window.gather(1, index % width), x.gather(1, index.clamp(min=0))
    return torch.where(index < 0, old, new)
