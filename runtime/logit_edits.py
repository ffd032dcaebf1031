"""Changes of the logits before a token is chosen: penalties, biases, masks of grammars.

A mask is packed: int32 [W], W = ceil(V / 32); bit i of word w allows the token 32 * w + i.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from runtime.sampling import Sampling, StepState
from runtime.transfers import send

ALL = -1  # a word of a mask that allows every token


class EditState(NamedTuple):
    """What `edit_logits` reads and writes in place, of each row."""

    counts: Tensor  # fp32 [B, V]: how often the answer has each token
    penalties: Tensor  # fp32 [B, 2]: frequency and presence penalty
    bias: Tensor  # fp32 [B, V], added to the logits
    allowed: Tensor  # int32 [B, W], masks


class Constraint(Protocol):
    """A grammar that an answer follows. server/constraints.py has one."""

    def mask(self, row: Tensor) -> None:
        """Write the mask of the next token to `row`, contiguous int32 [W] in host memory."""

    def advance(self, token: int) -> None:
        """Continue after the next token. Raises ValueError if the grammar does not allow it."""


def make_edit_state(rows: int, vocab_size: int, device: torch.device) -> EditState:
    """Return the state of rows that change nothing."""
    return EditState(
        counts=torch.zeros(rows, vocab_size, device=device),
        penalties=torch.zeros(rows, 2, device=device),
        bias=torch.zeros(rows, vocab_size, device=device),
        allowed=torch.full((rows, mask_words(vocab_size)), ALL, dtype=torch.int32, device=device),
    )


def set_edits(edits: EditState, row: int, sampling: Sampling) -> None:
    """Begin an answer: set a row's penalties and bias, allow every token."""
    device = edits.bias.device
    penalties = sampling.frequency_penalty, sampling.presence_penalty
    edits.penalties[row] = send(torch.tensor(penalties), device)
    edits.counts[row].fill_(0.0)
    edits.bias[row].fill_(0.0)
    edits.allowed[row].fill_(ALL)
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias.items(), strict=True)
        values = send(torch.tensor(values, dtype=edits.bias.dtype), device)
        edits.bias[row].index_copy_(0, send(torch.tensor(ids), device), values)


def edit_logits(edits: EditState, state: StepState, logits: Tensor) -> Tensor:
    """Return the edited logits fp32 [B, V]; count the newest token of each row that is not idle.

    logit - frequency penalty * count - presence penalty * (count > 0) + bias, as in OpenAI's API;
    -inf where the mask does not allow a token.
    """
    rows = torch.arange(len(logits), device=logits.device)
    token = state.token.squeeze(1).clamp(min=0)  # NOT_FINITE is no index
    counts = edits.counts.index_put((rows, token), (state.last + 1).float(), accumulate=True)
    edits.counts.copy_(counts)
    frequency, presence = edits.penalties.split(1, dim=1)
    logits = logits - frequency * counts - presence * (counts > 0) + edits.bias
    return mask_logits(logits, edits.allowed)


def mask_words(vocab_size: int) -> int:
    """Return W, the int32 words of a mask of `vocab_size` tokens."""
    return -(-vocab_size // 32)


def mask_logits(logits: Tensor, allowed: Tensor) -> Tensor:
    """logits fp32 [B, V], allowed int32 [B, W] -> logits, -inf where a token's bit is 0."""
    token = torch.arange(logits.shape[-1], device=logits.device)
    bit = (allowed[:, token >> 5] >> (token & 31).int()) & 1
    return torch.where(bit != 0, logits, float("-inf"))
