"""Edits of a step's logits in one Triton kernel: `runtime.logit_edits.edit_logits`.

Inductor would compile it for each number of rows, and its import alone takes seconds: those of a
server's start. Every other kernel of a fused step is ours, too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.launch import await_previous, jit, launch, tl
from ops.sizes import cdiv


@dataclass(frozen=True)
class Edit:
    """Settings of the kernel."""

    V: int  # vocabulary
    block: int = 1024  # tokens of a program

    words = property(lambda s: cdiv(s.V, 32))  # int32 of a row's mask


# Grid [V / BLOCK, B]: a program is the only one that reads or writes its tokens' counts.
@jit
def _edit_logits(logits, state, edits, edited, s: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(1)
    token = tl.program_id(0) * s.block + tl.arange(0, s.block)
    inside, at = token < s.V, row * s.V + token
    frequency, presence = tl.load(edits.penalties + 2 * row), tl.load(edits.penalties + 2 * row + 1)
    bias = tl.load(edits.bias + at, mask=inside, other=0.0)
    await_previous(PDL)
    is_newest = token == tl.maximum(tl.load(state.token + row), 0)  # NOT_FINITE is no index
    count = tl.load(edits.counts + at, mask=inside, other=0.0)
    count += tl.where(is_newest, (tl.load(state.last + row) + 1).to(tl.float32), 0.0)
    tl.store(edits.counts + at, count, mask=inside & is_newest)
    x = tl.load(logits + at, mask=inside, other=0.0)
    x = x - frequency * count - tl.where(count > 0.0, presence, 0.0) + bias
    word = tl.load(edits.allowed + row * s.words + token // 32, mask=inside, other=0)
    allowed = (word >> token % 32 & 1) != 0
    tl.store(edited + at, tl.where(allowed, x, float("-inf")), mask=inside)


def edit_logits(edits: tuple, state: tuple, logits: Tensor) -> Tensor:
    """Return the edited logits fp32 [B, V]; count the newest token of each row that is not idle.

    edits: a `logit_edits.EditState`; state: a `sampling.StepState`.
    """
    B, V = logits.shape
    if edits.counts.shape != logits.shape or len(state.token) != B:
        raise ValueError(f"logits {list(logits.shape)} with counts {list(edits.counts.shape)}")
    s, logits = Edit(V), logits.contiguous()
    edited = torch.empty_like(logits)
    launch(_edit_logits, (cdiv(V, s.block), B), logits, state, edits, edited, settings=s)
    return edited
