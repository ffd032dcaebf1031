"""What surrounds the recurrences of ops/attention/delta_prompt.py: convolution, gated norms.

Each is one kernel in eager code; in compiled code Inductor makes kernels of the plain forms. These
stand in ops/plain/gated_delta.py and ops/plain/mamba2.py, with formulas and letters.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ops.attention.delta_state import count_real, fit_tiles, with_even_rows
from ops.launch import can_launch, check_shapes, jit, launch, tl, try_kernels
from ops.plain.attention import gate_heads
from ops.plain.gated_delta import norm_in_torch
from ops.plain.mamba2 import gated_group_norm as group_norm_in_torch
from ops.plain.pending import convolve_plain
from ops.sizes import cdiv, pow2

# Short prompts have few programs, so each has fewer tokens. 200 tokens of 8,192 channels: 7.1 us,
# with 16 tokens a program 8.4.
FEW_TOKENS = 256


@dataclass(frozen=True)
class PartSettings:
    """Sizes that a kernel asks for, and how many of them a program has: s."""

    rows: int  # a program computes: tokens or heads
    columns: int = 1  # channels that it convolves
    channels: int = 1  # N
    width: int = 1  # W
    heads: int = 1  # a token has; the norm of groups: its groups
    head_dim: int = 1  # numbers that are normalized together
    eps: float = 0.0
    is_silu: bool = True  # the gate's activation; else sigmoid
    gates_first: bool = False  # the norm is of gated numbers, and each head has weights of its own

    padded = property(lambda s: pow2(s.head_dim))


def _in_eager_code(name: str, launch: Callable, plain: Callable) -> Callable:
    """Return `plain`, by the kernel of `launch` on a GPU where each operation would be a kernel."""

    def call(x: Tensor, *arguments):
        if can_launch(x) and not torch.compiler.is_compiling():
            return try_kernels(name, launch, plain, x, *arguments)
        return plain(x, *arguments)

    return call


# Grid [N / columns, Q / rows, B]. A lane has all tokens of its channels, so each is loaded once.
# Only the programs of the first tokens read the window, so these also move it.
@jit
def _convolve_prompt(
    x, window, weight, bias, last, row, y, Q, X_BATCH, X_TOKEN, WINDOW, s: tl.constexpr
):
    N: tl.constexpr = s.channels
    W: tl.constexpr = s.width
    channel = tl.program_id(0) * s.columns + tl.arange(0, s.columns)
    first = tl.full([s.columns], tl.program_id(1) * s.rows, tl.int32)
    sequence = tl.program_id(2).to(tl.int64)
    is_channel, taps, inputs = channel < N, (), ()
    x += sequence * X_BATCH + channel
    window += (tl.load(row + sequence) if row is not None else sequence) * WINDOW + channel
    y += sequence * Q * N + channel
    for n in tl.static_range(s.rows + W - 1):
        token = first + n - (W - 1)
        exists = is_channel & (token >= 0) & (token < Q)
        given = tl.load(x + token * X_TOKEN, mask=exists, other=0.0)
        if n < W - 1:
            past = window + (token + W - 1) * N
            given += tl.load(past, mask=is_channel & (token < 0), other=0.0)
        inputs = inputs + (given.to(tl.float32),)
    for n in tl.static_range(W):
        tap = tl.load(weight + channel * W + n, mask=is_channel, other=0.0)
        taps = taps + (tap.to(tl.float32),)
    start = tl.zeros([s.columns], tl.float32)
    if bias is not None:
        start += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    for number in tl.static_range(s.rows):
        total = start
        for n in tl.static_range(W):
            total += inputs[number + n] * taps[n]
        total *= tl.sigmoid(total)
        exists = is_channel & (first + number < Q)
        tl.store(y + (first + number) * N, total.to(y.dtype.element_ty), mask=exists)
    if tl.program_id(1) == 0:
        count, kept = tl.full([s.columns], count_real(last, sequence, Q), tl.int32), ()
        for n in tl.static_range(W - 1):
            token = count + n - (W - 1)  # negative: of the window
            new = tl.load(x + token * X_TOKEN, mask=is_channel & (token >= 0), other=0.0)
            past = window + (token + W - 1) * N
            kept = kept + (new + tl.load(past, mask=is_channel & (token < 0), other=0.0),)
        tl.debug_barrier()  # all threads have read the window
        for n in tl.static_range(W - 1):
            tl.store(window + n * N, kept[n], mask=is_channel)


def launch_convolution(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    last: Tensor | None = None,
    row: Tensor | None = None,
) -> Tensor:
    (B, Q, N), W = x.shape, weight.shape[1]
    s = PartSettings(8 if Q <= FEW_TOKENS else 16, 256, channels=N, width=W)
    check_shapes(window=(window, (len(window), W - 1, N)), weight=(weight, (N, W)))
    if window.stride()[1:] != (N, 1) or s.rows < W:
        raise ValueError(f"a window of {W - 1} inputs with strides {window.stride()}")
    x, y = x if x.stride(2) == 1 else x.contiguous(), x.new_empty(B, Q, N)
    grid = cdiv(N, s.columns), cdiv(Q, s.rows), B
    tensors, strides = (x, window, weight, bias, last, row, y), (*x.stride()[:2], window.stride(0))
    launch(_convolve_prompt, grid, *tensors, Q, *strides, settings=s, warps=1)
    return y


# Grid [COUNT / rows]: a program normalizes some of the COUNT = B Q H heads; without weights it only
# multiplies them by the sigmoid of their gate.
@jit
def _norm_heads(x, gate, weight, y, COUNT, GATE_TOKEN, s: tl.constexpr):
    DIM: tl.constexpr = s.head_dim
    row = tl.program_id(0).to(tl.int64) * s.rows + tl.arange(0, s.rows)[:, None]
    c, exists = tl.arange(0, s.padded)[None, :], row < COUNT
    if s.padded > DIM:
        exists = exists & (c < DIM)
    numbers = tl.load(x + row * DIM + c, mask=exists, other=0.0).to(tl.float32)
    gate += row // s.heads * GATE_TOKEN + row % s.heads * DIM + c
    gates = tl.load(gate, mask=exists, other=0.0).to(tl.float32)
    if weight is None:
        numbers *= tl.sigmoid(gates)
    else:
        if s.gates_first:
            numbers *= gates * tl.sigmoid(gates)
        numbers *= tl.rsqrt(tl.sum(numbers * numbers, 1, keep_dims=True) / DIM + s.eps)
        if s.gates_first:
            factor = tl.load(weight + row % s.heads * DIM + c, mask=exists, other=0.0)
            numbers *= factor.to(tl.float32)
        else:
            factor = tl.load(weight + c).to(tl.float32)
            if s.is_silu:
                factor *= gates
            numbers *= factor * tl.sigmoid(gates)
    tl.store(y + row * DIM + c, numbers.to(y.dtype.element_ty), mask=exists)


def launch_norm_heads(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu"
) -> Tensor:
    check_shapes(gate=(gate, x.shape), weight=(weight, x.shape[3:]))
    H, C = x.shape[2:]
    s = PartSettings(8, heads=H, head_dim=C, eps=eps, is_silu=activation == "silu")
    return _launch_norm(x, gate.flatten(2), weight, x.new_empty(x.shape), s)


def launch_group_norm(y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    check_shapes(gate=(gate, y.shape), weight=(weight, y.shape[2:]))
    dim = y.shape[2] // groups
    rows = max(1, 1024 // pow2(dim))
    s = PartSettings(rows, heads=groups, head_dim=dim, eps=eps, gates_first=True)
    return _launch_norm(y, gate, weight, gate.new_empty(gate.shape), s)


def launch_head_gate(heads: Tensor, gate: Tensor, activation: str = "sigmoid") -> Tensor:
    """`gate_heads` of heads and gate [T, N]. Any power of 2 that divides N serves as a head."""
    (T, N), dim = gate.shape, min(1024, gate.shape[1] & -gate.shape[1])
    s = PartSettings(1024 // dim, heads=N // dim, head_dim=dim)
    return _launch_norm(heads.view(T, N), gate.unsqueeze(0), None, heads.new_empty(T, N), s)


def _launch_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, y: Tensor, s: PartSettings
) -> Tensor:
    gate, count = with_even_rows(gate), x.numel() // s.head_dim
    tensors, grid = (x.contiguous(), gate, weight, y), (cdiv(count, s.rows),)
    launch(_norm_heads, grid, *tensors, count, gate.stride(1), settings=s)
    return y


convolve_prompt = _in_eager_code("convolution", launch_convolution, convolve_plain)
gated_group_norm = _in_eager_code("norm of groups", launch_group_norm, group_norm_in_torch)
_norm_heads_of_tokens = _in_eager_code("gated norm", launch_norm_heads, norm_in_torch)
_gate_numbers = _in_eager_code("gate of heads", launch_head_gate, gate_heads)


def gate_prompt_heads(heads: Tensor, gate: Tensor, activation: str) -> Tensor:
    """`gate_heads` of a chunk, heads [T, H C]: by one kernel if each number has a sigmoid."""
    is_plain = activation == "sigmoid" and gate.shape == heads.shape
    return (_gate_numbers if is_plain else gate_heads)(heads, gate, activation)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu"
) -> Tensor:
    """`norm_in_torch`, by one kernel in eager code on a GPU, for x [B, Q, H, Cv]."""
    has_tile = x.dim() == 4 and fit_tiles(x.shape[-1])
    norm = _norm_heads_of_tokens if has_tile else norm_in_torch
    return norm(x, gate, weight, eps, activation)
