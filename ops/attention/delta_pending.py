"""Pending tokens of Gated DeltaNet before a call that takes in none: prompts, and the plain form.

On a GPU the kernels of ops/attention/delta.py take them in. Letters are those of that file.
"""

import torch
from torch import Tensor

from ops.attention.delta import kernels_support, launch_several
from ops.attention.delta_prompt import gated_delta_chunk
from ops.attention.delta_state import DeltaSettings, DeltaWeights, Pending
from ops.plain.gated_delta import conv_silu_in_torch, gates_in_torch


def take_in(
    state: Tensor,
    pending: list[Tensor],
    weights: list[Tensor],
    position: Tensor,
    last: Tensor | None,
    row: Tensor | None,
    key_heads: int,
) -> None:
    """Take in each sequence's pending tokens before position [B, 1]; then none are pending.

    A sequence without a real token stays as it is (last: as of `delta_tokens`). row int64 [B]: the
    rows of the sequences; None: the first. The rest is as for `delta_tokens`.
    """
    W, (H, CK, CV), M = weights[0].shape[1], state.shape[1:], pending[1].shape[1]
    if kernels_support(state):
        s = DeltaSettings(key_heads, H, CK, CV, W, 0.0, False, M, 0, 0)
        own = Pending(*pending, row)
        launch_several(None, None, state, own, DeltaWeights(*weights), position, last, None, s)
        return
    inputs, ba, first = pending
    rows = torch.arange(len(position), device=state.device) if row is None else row
    begins = first[rows, 0]
    changes = (begins > 0) if last is None else (begins > 0) & (last >= 0)
    if state.device.type == "cpu" and not changes.any():  # as after each call of one token
        return
    accepted = (position[:, 0] + 1 - begins).clamp(0, M) * changes
    x, old = inputs[rows], state[rows]
    y = conv_silu_in_torch(x[:, W - 1 :], x[:, : W - 1], weights[0])
    q, k, v = y.split((key_heads * CK, key_heads * CK, H * CV), dim=-1)
    q, k = (part.unflatten(-1, (key_heads, CK)) for part in (q, k))
    g, beta = gates_in_torch(ba[rows], weights[1], weights[2])
    kept = (torch.arange(M, device=state.device) < accepted.unsqueeze(1)).unsqueeze(-1)
    g, beta = torch.where(kept, g, 0.0), torch.where(kept, beta, 0.0)
    new = gated_delta_chunk(q, k, v.unflatten(-1, (H, CV)), g, beta, old)[1]
    state.index_copy_(0, rows, torch.where(accepted.view(-1, 1, 1, 1) > 0, new, old))
    moved = torch.where(changes.view(-1, 1, 1), last_inputs(x, accepted, W - 1), x[:, : W - 1])
    inputs[:, : W - 1].index_copy_(0, rows, moved)
    first.index_copy_(0, rows, torch.where(changes.unsqueeze(1), 0, first[rows]))


_take_in = torch.library.custom_op(
    "moe_fast::delta_take_in", take_in, mutates_args=("state", "pending")
)


@_take_in.register_fake
def _(*_) -> None:
    return None


def take_in_pending(state: Tensor, *rest) -> None:
    """`take_in`, as an operator in compiled code."""
    (_take_in if torch.compiler.is_compiling() else take_in)(state, *rest)


def last_inputs(inputs: Tensor, count: Tensor, length: int) -> Tensor:
    """inputs [B, length + Q, N] -> the `length` of them that end after the first count [B] of Q."""
    index = count.unsqueeze(1) + torch.arange(length, device=inputs.device)
    return inputs.gather(1, index.unsqueeze(-1).expand(-1, -1, inputs.shape[-1]))
