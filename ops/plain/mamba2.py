"""Mamba-2 in PyTorch: state space duality (Dao & Gu 2024, Transformers are SSMs, section 6).

A head's state S [P, N] decays with each token, and takes in its x [P] along B [N]:

    S <- exp(dt A) S + dt x B^T;  y = S C + D x

dt = softplus(dt + bias) > 0 and A = -exp(a_log) < 0. B and C are those of the head's group, as keys
and queries. There is no lower limit of dt, as in the models' own step; transformers has one
(`time_step_min`) in prompts alone.

These functions are the reference for the kernels of ops/attention/mamba.py (up to 16 tokens) and
ops/attention/delta_prompt.py (prompts). `ssm_step` computes one
token, `ssm_chunk` a prompt by batched products.

Letters: B sequences, Q tokens, H heads of P numbers, G groups, N numbers of a state's row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens whose products are batched


def time_steps(dt: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """dt [B, Q, H], a_log, dt_bias [H] -> step sizes, and logarithms of the decay; fp32."""
    dt = F.softplus(dt.float() + dt_bias.float())
    return dt, -a_log.float().exp() * dt


def ssm_step(
    x: Tensor, b: Tensor, c: Tensor, dt: Tensor, g: Tensor, skip: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Take in one token and read: x [B, H, P], b, c [B, G, N] -> y [B, H, P], the new state.

    dt, g: as in `time_steps`, [B, H]. skip: D [H]. state: fp32 [B, H, P, N], which stays as it is.
    y is fp32.
    """
    x, (b, c) = x.float(), (to_heads(each, x.shape[-2]) for each in (b, c))
    added = (x * dt.unsqueeze(-1)).unsqueeze(-1) * b.unsqueeze(-2)
    state = state * g.exp()[..., None, None] + added
    return (state * c.unsqueeze(-2)).sum(-1) + x * skip.float().unsqueeze(-1), state


def ssm_chunk(
    x: Tensor, b: Tensor, c: Tensor, dt: Tensor, g: Tensor, skip: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Take in a prompt -> y [B, Q, H, P], the state after it [B, H, P, N].

    x [B, Q, H, P], b, c [B, Q, G, N], dt, g [B, Q, H]; else as `ssm_step`. A token with dt = g = 0,
    such as padding, leaves the state unchanged. Within a chunk, G is the sum of g so far:

        y_i = exp(G_i) S C_i + sum over j <= i of exp(G_i - G_j) (C_i . B_j) dt_j x_j

    Only the states at the chunks' begins are computed one after the other.
    """
    B, Q, H, P = x.shape
    size = min(CHUNK, Q)
    x = x.float()
    added = split_chunks(x * dt.unsqueeze(-1), size)  # [chunks, B, H, size, P]
    b, c = (split_chunks(each.float(), size) for each in (b, c))  # [chunks, B, G, size, N]
    total = split_chunks(g.unsqueeze(-1), size).cumsum(-2)  # G, [chunks, B, H, size, 1]
    later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    decay = (total - total.mT).masked_fill(later, float("-inf")).exp()
    scores = to_heads(c @ b.mT, H, -3) * decay
    b, c = (to_heads(each, H, -3) for each in (b, c))
    end = total[..., -1:, :]
    gained = (added * (end - total).exp()).mT @ b  # [chunks, B, H, P, N]
    begins = []
    for n in range(len(gained)):
        begins.append(state)
        state = state * end[n].exp() + gained[n]
    y = scores @ added + (c @ torch.stack(begins).mT) * total.exp()
    y = y.permute(1, 0, 3, 2, 4).reshape(B, -1, H, P)[:, :Q]
    return (y + x * skip.float().unsqueeze(-1)).contiguous(), state


def gated_group_norm(y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Normalize y * silu(gate), fp32 and [..., H P], over each of the groups; times weight."""
    return group_norm(y.float() * F.silu(gate.float()), weight, groups, eps).to(gate.dtype)


def group_norm(y: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Normalize y [..., H P] over each of the groups; times weight."""
    parts = y.float().unflatten(-1, (groups, -1))
    parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    return (parts.flatten(-2) * weight.float()).to(y.dtype)


def to_heads(x: Tensor, heads: int, axis: int = -2) -> Tensor:
    """x of groups along an axis -> the same for each head, fp32."""
    return x.float().repeat_interleave(heads // x.shape[axis], axis)


def split_chunks(x: Tensor, size: int) -> Tensor:
    """x [B, Q, H, C] -> [chunks, B, H, size, C], padded by zeros."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return x.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4)
