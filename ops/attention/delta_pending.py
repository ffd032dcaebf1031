"""Pending tokens of Gated DeltaNet before a call that takes in none: prompts, and the plain form.

On a GPU the kernels of ops/attention/delta.py take them in. Letters are those of that file.
"""

from torch import Tensor

from ops.attention.delta import kernels_support
from ops.attention.delta_many import launch_several
from ops.attention.delta_prompt import gated_delta_chunk
from ops.attention.delta_state import DeltaSettings, DeltaWeights, Memory, Pending
from ops.inductor import custom_op
from ops.plain.gated_delta import conv_silu_in_torch, gates_in_torch, mask_gates
from ops.plain.pending import take_in_plain


@custom_op("moe_fast::delta_take_in", mutates_args=("state", "pending"))
def take_in_pending(
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
        of_channels = len(weights[2]) > H
        s = DeltaSettings(key_heads, H, CK, CV, W, 0.0, False, M, 0, 0, channel_decay=of_channels)
        own = Pending(*pending, row), DeltaWeights(*weights)
        launch_several(None, None, Memory(state, *own, position, last), None, s)
        return

    def advance(x: Tensor, ba: Tensor, kept: Tensor, old: Tensor) -> Tensor:
        y = conv_silu_in_torch(x[:, W - 1 :], x[:, : W - 1], weights[0])
        q, k, v = y.split((key_heads * CK, key_heads * CK, H * CV), dim=-1)
        q, k = (part.unflatten(-1, (key_heads, CK)) for part in (q, k))
        g, beta = gates_in_torch(ba, weights[1], weights[2])
        g, beta = mask_gates(g, beta, kept)
        return gated_delta_chunk(q, k, v.unflatten(-1, (H, CV)), g, beta, old)[1]

    take_in_plain(state, pending, W, position, last, row, advance)
