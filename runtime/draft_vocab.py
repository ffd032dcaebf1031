"""A head over a part of the vocabulary, for drafts: fewer bytes, and the target verifies with all.

A head of 151,936 rows is a large part of a small drafter's bytes. Most text needs few of the rows.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

DRAFT_VOCAB = 32_768  # ids that drafts are chosen from


def part_of_head(head: nn.Module, ids: Sequence[int], vocab_size: int) -> nn.Module:
    """Return a head with the rows of these ids alone, in its number format; `head` stays as it is.

    Every runner multiplies by the part as by any head. The head itself is returned if it cannot be
    cut (a scale covers several rows, or ranks share it), or if the part is the whole vocabulary.
    """
    parts = dict(head.named_parameters(recurse=False))
    by_row = all(part.shape[0] == vocab_size for part in parts.values())
    if len(ids) >= vocab_size or not parts or not by_row:
        return head
    chosen = torch.tensor(ids, device=next(iter(parts.values())).device)
    rows = copy.deepcopy(head, {id(part): None for part in parts.values()})  # copies no weights
    for name, part in parts.items():
        rows.register_parameter(name, nn.Parameter(part[chosen], requires_grad=False))
    return rows


def rows_of_ids(ids: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Return each id's row in `part_of_head`, int64 [V]; len(ids) for an id that it lacks."""
    rows = torch.full((vocab_size,), len(ids))
    rows[torch.tensor(ids)] = torch.arange(len(ids))
    return rows.to(device)


def spread_logits(logits: Tensor, rows: Tensor) -> Tensor:
    """logits [B, N] of a part, rows of `rows_of_ids` -> logits [B, V]; of ids it lacks -inf.

    So their probabilities are 0, and those of the others sum to 1.
    """
    missing = torch.full_like(logits[:, :1], float("-inf"))
    # A gather by id is fused; a scatter by row is not.
    return torch.cat((logits, missing), dim=1).index_select(1, rows)
