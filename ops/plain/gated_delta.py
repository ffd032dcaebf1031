"""The gated delta rule in PyTorch (Yang et al. 2024, Gated Delta Networks, section 3).

A head's state S [Ck, Cv] maps keys to values. With each token it decays by exp(g), and what it
returns for the key k moves towards the value v by the share beta (equation 10):

    S <- exp(g) S;  S <- S + beta k (v - k S);  out = q S

g is one number a head, or one for each of its Ck channels, which are rows of S (Kimi Delta
Attention; Kimi Team 2025, Kimi Linear, section 3).

These functions are the reference for the kernels of ops/attention/delta.py (up to 16 tokens), of
ops/attention/delta_prompt.py and what it names (prompts). `gated_delta_step` computes one token,
`chunk_in_torch` a prompt by batched products.

Letters: B sequences, Q tokens, K key heads, H value heads, Ck and Cv their sizes, N channels of the
convolution, W its width. Key head i serves the value heads from i * (H / K).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.plain.mamba2 import split_chunks, time_steps
from ops.plain.short_conv import causal_conv

CHUNK = 64  # tokens that one triangular system covers
L2_EPS = 1e-6  # added before the root in the norm of queries and keys


def conv_silu_in_torch(
    x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Convolve each channel with its last W inputs, then apply SiLU: x [B, Q, N] -> same.

    window [B, W - 1, N]: the inputs before x, which stay as they are. weight [N, W], bias [N].
    """
    inputs = torch.cat((window, x), dim=1).float()
    return F.silu(causal_conv(inputs, weight, bias)).to(x.dtype)


def gates_in_torch(ba: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """ba [B, Q, H + G], b then a; a_log [H], dt_bias [G] -> g and beta, fp32 [B, Q, H].

    g = -exp(a_log) softplus(a + dt_bias) is the logarithm of the decay, beta = sigmoid(b). G is H;
    or H Ck, with a decay for each channel: then g is [B, Q, H, Ck].
    """
    H, G = len(a_log), len(dt_bias)
    b, a = ba.float().split((H, G), dim=-1)
    rate, a = a_log.float().exp(), F.softplus(a + dt_bias.float())
    if G > H:
        rate, a = rate.unsqueeze(-1), a.unflatten(-1, (H, -1))
    return -rate * a, b.sigmoid()


def masked_gates_in_torch(
    ba: Tensor, a_log: Tensor, dt_bias: Tensor, last: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return g and beta of `gates_in_torch`, with 0 for tokens past last [B]; None: for none.

    Such tokens change no state. ba may be the dt [B, Q, H] of Mamba-2: then beta is the step sizes
    of `time_steps`.
    """
    if ba.shape[-1] > len(dt_bias):
        g, beta = gates_in_torch(ba, a_log, dt_bias)
    else:
        beta, g = time_steps(ba, a_log, dt_bias)
    if last is None:
        return g, beta
    real = (torch.arange(ba.shape[1], device=ba.device) <= last.unsqueeze(1)).unsqueeze(-1)
    kept = real if g.dim() == real.dim() else real.unsqueeze(-1)
    return torch.where(kept, g, 0.0), torch.where(real, beta, 0.0)


def norm_in_torch(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu"
) -> Tensor:
    """RMS norm of x [..., Cv], times weight [Cv] and silu or sigmoid of its gate [..., Cv]."""
    y = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    factor = F.silu(gate.float()) if activation == "silu" else gate.float().sigmoid()
    return (y * factor).to(x.dtype)


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Take in one token and read: q, k [B, K, Ck], v [B, H, Cv] -> out [B, H, Cv], the new state.

    q and k are not normalized yet. g: logarithm of the decay, fp32 [B, H] or [B, H, Ck], and beta:
    share of the correction, fp32 [B, H]. state: fp32 [B, H, Ck, Cv], which stays as it is.
    """
    dtype = v.dtype
    q, k, v = _to_value_heads(q, k, v)
    state = state * _of_channels(g, beta).exp().unsqueeze(-1)
    correction = (v - (k.unsqueeze(-1) * state).sum(-2)) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * correction.unsqueeze(-2)
    return (q.unsqueeze(-1) * state).sum(-2).to(dtype), state


def chunk_in_torch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Take in a prompt -> out [B, Q, H, Cv], the state after it [B, H, Ck, Cv] (section 3.3).

    q, k [B, Q, K, Ck], v [B, Q, H, Cv], g [B, Q, H] or [B, Q, H, Ck], beta [B, Q, H]; else as
    `gated_delta_step`. A token with g = beta = 0, such as padding, leaves the state unchanged. The
    products are batched; the only loop is over chunks.

    Within a chunk, G is the sum of g so far. The corrections U [tokens, Cv] of its tokens solve a
    unit lower triangular system, for the state S at its begin:

        U_i = beta_i (v_i - exp(G_i) k_i S - sum over j < i of exp(G_i - G_j) (k_i . k_j) U_j)

    So U = solved_values - solved_keys S, where S appears in no system: all chunks are solved at
    once. The system is solved, not inverted by powers: for equal keys these grow to 1e18 and
    cancel. With a decay for each channel, exp(G_i - G_j) is a factor within the product of keys.
    """
    dtype, (B, Q, H, Cv), size = v.dtype, v.shape, min(CHUNK, q.shape[1])
    q, k, v = _to_value_heads(q, k, v)
    q, k, v, g, beta = (
        split_chunks(x, size) for x in (q, k, v, _of_channels(g, beta), beta.unsqueeze(-1))
    )
    total = g.cumsum(-2)  # G, [chunks, B, H, size, 1 or Ck]
    products, scores = _decayed_products(k, q, total)
    system = beta * products
    right = torch.cat((beta * v, beta * total.exp() * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    solved_values, solved_keys = solved.split((Cv, k.shape[-1]), dim=-1)
    q, k = q * total.exp(), k * (total[..., -1:, :] - total).exp()
    kept = total[..., -1:, :].exp().mT
    outs = []
    for n in range(len(q)):
        correction = solved_values[n] - solved_keys[n] @ state
        outs.append(q[n] @ state + scores[n] @ correction)
        state = kept[n] * state + k[n].mT @ correction
    out = torch.stack(outs).permute(1, 0, 3, 2, 4).reshape(B, -1, H, Cv)
    return out[:, :Q].to(dtype).contiguous(), state


def _decayed_products(k: Tensor, q: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return k_i . k_j and q_i . k_j, decayed since token j <= i: [..., size, size]; 0 for later j.

    k, q [..., size, Ck]; total [..., size, 1 or Ck]: the sum of g so far.
    """
    size = k.shape[-2]
    if total.shape[-1] == 1:
        later = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
        decay = (total - total.mT).masked_fill(later, float("-inf")).exp()
        return (k @ k.mT) * decay, (q @ k.mT) * decay
    # Row by row: all decays at once are `size` times as large as k. They are no product of
    # exp(G_i) and exp(-G_j), which overflows.
    rows, both = [], torch.stack((k, q), dim=-1)
    for i in range(size):
        decay = (total[..., i : i + 1, :] - total[..., : i + 1, :]).exp()
        row = (k[..., : i + 1, :] * decay) @ both[..., i, :, :]
        rows.append(F.pad(row, (0, 0, 0, size - 1 - i)))
    return torch.stack(rows, dim=-3).unbind(-1)


def _of_channels(g: Tensor, beta: Tensor) -> Tensor:
    """Return g with a last dimension of channels: one stands for all. beta: a number a head."""
    return g if g.dim() > beta.dim() else g.unsqueeze(-1)


def _to_value_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize q and k [..., K, Ck], scale q, and repeat both for the value heads; all in fp32."""
    repeats = v.shape[-2] // k.shape[-2]
    q, k = (x.float() for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    return q.repeat_interleave(repeats, -2), k.repeat_interleave(repeats, -2), v.float()
