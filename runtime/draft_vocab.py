"""A head over a part of the vocabulary, for drafts: fewer bytes, and the target verifies with all.

A head of 151,936 rows is a large part of a small drafter's bytes. Most text has few of its tokens.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

DRAFT_VOCAB = 32_768  # ids that drafts are chosen from


class PartialHead(nn.Module):
    """x [..., D] -> logits [..., V]; those of ids that the part lacks are -inf.

    So their probabilities are 0, and those of the others sum to 1. rows: the head of the part's
    ids alone. ids: rising.
    """

    def __init__(self, rows: nn.Module, ids: Sequence[int], vocab_size: int, device: torch.device):
        super().__init__()
        self.rows = rows
        # Each id's row, or the one after the last: a gather is fused, a scatter is not.
        place = torch.full((vocab_size,), len(ids))
        place[torch.tensor(ids)] = torch.arange(len(ids))
        self.register_buffer("place", place.to(device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.rows(x)
        missing = torch.full_like(logits[..., :1], float("-inf"))
        return torch.cat((logits, missing), dim=-1).index_select(-1, self.place)


def part_of_head(head: nn.Module, ids: Sequence[int], vocab_size: int) -> nn.Module:
    """Return a PartialHead of these ids, in the head's number format; `head` stays as it is.

    A format whose scales are of several rows at once cannot be cut: then `head` is returned, and
    for a part that is the whole vocabulary.
    """
    parts = dict(head.named_parameters(recurse=False))
    by_row = all(part.shape[0] == vocab_size for part in parts.values())
    if len(ids) >= vocab_size or not parts or not by_row:
        return head
    device = next(iter(parts.values())).device
    chosen = torch.tensor(ids, device=device)
    rows = copy.deepcopy(head, {id(part): None for part in parts.values()})  # copies no weights
    for name, part in parts.items():
        rows.register_parameter(name, nn.Parameter(part[chosen], requires_grad=False))
    return PartialHead(rows, ids, vocab_size, device)
