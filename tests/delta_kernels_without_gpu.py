"""Run and compile the kernels of ops/attention/delta*.py; see kernels_without_gpu.py.

    TRITON_INTERPRET=1 python tests/delta_kernels_without_gpu.py    Triton's interpreter, CPU
    python tests/delta_kernels_without_gpu.py    machine code for an H200, by Triton and ptxas

It prints one JSON object: by case, the relative error of each result, or counts of machine code.
"""

import itertools
import os
import sys
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from model import Context
from models.layers.gated_delta_net import DeltaNet, DeltaRuleLayer, DeltaSizes, DeltaState
from models.layers.kimi_delta import KimiDelta, KimiDeltaSizes
from ops.attention import delta, delta_prompt, recurrent_parts
from ops.attention.delta import delta_tokens
from ops.plain.attention import gate_heads
from ops.plain.gated_delta import (
    chunk_in_torch,
    conv_silu_in_torch,
    gated_delta_step,
    norm_in_torch,
)
from ops.plain.pending import MAX_TENTATIVE, convolve_plain, in_place
from ops.products.planes import GROUP, empty_planes
from tests.launched_code import launched_code
from tests.recurrent_without_gpu import (
    after_tokens,
    counts,
    from_gates,
    layer_errors,
    layer_prompt_errors,
    print_results,
    random_state,
    relative_error,
    settle_second,
)

PROMPTS = {  # B, Q, K, H, Ck, Cv
    "one token": (1, 1, 1, 1, 16, 16),
    "draft": (2, 5, 2, 4, 16, 32),
    "a part of a chunk": (1, 40, 1, 2, 32, 16),
    "half a chunk": (1, 32, 2, 4, 16, 16),
    "chunks, two blocks of columns": (2, 150, 2, 4, 16, 64),
    "equal keys": (1, 130, 1, 1, 16, 16),
}
STRENGTHS = 1.0, 8.0  # of decays for each channel; exp of the sums of the second is infinite
LAYER_PROMPTS = {  # as FEW, but more tokens than can be pending
    "a prompt, rows with padding": (3, 70, 2, 2, 16, 16, 4, (69, -1, 30), (2, 3, None)),
    "a prompt after drafts": (1, 33, 2, 2, 32, 32, 3, None, (5,)),
}
TOKENS = {  # B, K, H, Ck, Cv, W, last
    "one row": (1, 2, 4, 16, 16, 4, None),
    "rows without a token": (3, 1, 2, 32, 64, 4, (0, -1, 0)),
    "three value heads of a key head": (2, 4, 12, 64, 128, 3, (-1, 0)),
    "a key head of each value head": (2, 2, 2, 128, 16, 2, None),
    "published sizes of a head": (1, 1, 2, 128, 128, 4, (0,)),
}

FEW = {  # B, T, K, H, Ck, Cv, W, last, accepted tokens of the call before (None: it had one token)
    "drafts": (1, 5, 2, 4, 16, 16, 4, None, (None,)),
    "rows with padding": (3, 4, 1, 2, 32, 64, 4, (1, -1, 3), (2, 3, None)),
    "fewer tokens than the window": (2, 2, 4, 8, 16, 32, 4, (0, 1), (1, 0)),
    "as many as are kept": (1, MAX_TENTATIVE, 1, 1, 16, 16, 3, None, (MAX_TENTATIVE,)),
    "drafts after drafts": (2, 3, 2, 6, 16, 32, 4, None, (5, 1)),
    "four tokens, a key head of each": (2, 4, 2, 2, 16, 128, 2, (3, 1), (4, None)),
    "two tokens, published sizes of a head": (1, 2, 1, 2, 128, 128, 4, None, (3,)),
    "one token after drafts": (4, 1, 2, 4, 16, 16, 4, (0, -1, 0, 0), (3, 2, None, 16)),
    "one token after drafts, a key head of each": (2, 1, 2, 2, 128, 32, 3, None, (1, 2)),
    "one token after drafts, three value heads": (1, 1, 2, 6, 32, 64, 4, None, (4,)),
}
IN_PLANES = {  # as FEW
    "two tokens as planes": (2, 2, 1, 2, 16, 128, 4, (0, -1), (1, None)),
    "four tokens as planes": (1, 4, 1, 2, 128, 128, 4, (2,), (3,)),
}

# As FEW, in one chunk: all counts of tokens and of accepted ones, and padding.
CHUNK_SIZES = (2, 4, 16, 32, 4), (1, 2, 32, 16, 3), (2, 2, 128, 64, 4), (1, 3, 16, 128, 2)
CHUNKS = {}
for T in range(2, 17):
    last = (None, (T - 1, T // 2), (T // 2, -1))[T % 3]
    CHUNKS[f"chunk of {T}"] = (2, T, *CHUNK_SIZES[T % 4], last, (T, 16 - T))

KIMI = {  # B, T, H, C, W, last, accepted tokens of the call before: a decay for each channel
    "kimi, one token": (1, 1, 2, 128, 4, None, (None,)),
    "kimi, one token after drafts": (3, 1, 3, 16, 4, (0, -1, 0), (3, 2, None)),
    "kimi, drafts after drafts": (2, 3, 2, 32, 4, (2, 1), (4, 1)),
    "kimi, as many as are kept": (1, MAX_TENTATIVE, 2, 16, 3, None, (MAX_TENTATIVE,)),
}


def random_prompt(B: int, Q: int, K: int, H: int, Ck: int, Cv: int, dtype=torch.float32) -> tuple:
    """Return q, k, v as views of one tensor, as after the convolution; g, beta and a state."""
    generator = torch.Generator().manual_seed(Q)
    x = torch.randn(B, Q, 2 * K * Ck + H * Cv, generator=generator).to(dtype)
    q, k, v = x.split((K * Ck, K * Ck, H * Cv), -1)
    g = -torch.randn(B, Q, H, generator=generator).exp()
    beta = torch.rand(B, Q, H, generator=generator)
    state = torch.randn(B, H, Ck, Cv, generator=generator)
    return (
        q.unflatten(-1, (K, Ck)),
        k.unflatten(-1, (K, Ck)),
        v.unflatten(-1, (H, Cv)),
        g,
        beta,
        state,
    )


def random_token(
    B: int, K: int, H: int, Ck: int, Cv: int, W: int, last, dtype=torch.float32
) -> list:
    """Return the arguments of `delta_tokens` for one token."""
    generator, N = torch.Generator().manual_seed(N_SEED), 2 * K * Ck + H * Cv
    M = MAX_TENTATIVE

    def normal(*shape: int, dtype=dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    (qkv, gate), ba = normal(B, 1, N + H * Cv).split((N, H * Cv), -1), 5 * normal(B, 1, 2 * H)
    state, inputs = normal(B, H, Ck, Cv, dtype=torch.float32), normal(B, W - 1 + M, N)
    pending = [inputs, normal(B, M, 2 * H), torch.zeros(B, H, dtype=torch.int64)]
    weights = normal(N, W), normal(H, dtype=torch.float32), normal(H), normal(Cv)
    last = None if last is None else torch.tensor(last)
    arrivals = torch.zeros(B, K, dtype=torch.int32)
    positions = torch.full((B, 1), 7)
    gates = [*ba.chunk(2, -1), gate]
    return [qkv, gates, state, pending, list(weights), positions, last, arrivals, 1e-6]


def random_few(
    B: int,
    T: int,
    K: int,
    H: int,
    Ck: int,
    Cv: int,
    W: int,
    last,
    accepted,
    dtype=torch.float32,
    channel_decay: bool = False,
    delta_gate: str = "silu",
) -> tuple[DeltaNet | KimiDelta, Tensor, Context]:
    """Return a layer with a random state for B sequences and one more, projected tokens, context.

    accepted: how many pending tokens each sequence's call follows; None: there are none.
    """
    sizes = (KimiDeltaSizes if channel_decay else DeltaSizes)(K, H, Ck, Cv, W)
    args = SimpleNamespace(dim=16, delta_sizes=sizes, norm_eps=1e-6, values_by_place=False)
    args.delta_gate = delta_gate
    generator = torch.Generator().manual_seed(N_SEED)
    layer = KimiDelta(args) if channel_decay else DeltaNet(args)
    if channel_decay:  # products of x
        layer.wdecay.to(dtype), layer.wgate.to(dtype)
    layer.allocate(B + 1, 8, None, torch.zeros(1, dtype=dtype))
    for tensor in (*layer.parameters(), *layer.state.buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    width = sum(len(product.weight) for product in layer.products()[:2])
    projected = torch.randn(B, T, width, generator=generator)
    projected[..., -2 * H :] *= 5
    context = random_state(layer, T, last, accepted)
    return layer.requires_grad_(False), projected.to(dtype), context


def few_errors(case: tuple, **options) -> list[float]:
    """Return the errors of y, and of all that the state keeps. options: of `random_few`."""
    layer, *call = random_few(*case, **options)
    supports = mock.patch.object(type(layer), "mixes_by_kernels", lambda *_: True)

    def run(layer: DeltaNet | KimiDelta, *call) -> Tensor:
        with supports:
            return layer.core(*call)

    def take_in(state: DeltaState, position, last, row, by_kernel: bool) -> None:
        if by_kernel and row is None:
            settle_second(layer, state, position, last)
            return
        memory = state.state, state.pending(), [*layer.weights()]
        with mock.patch.object(delta, "kernels_support", lambda _: by_kernel):
            delta.take_in_pending(*memory, position, last, row, state.arrivals)

    return layer_errors(layer, *call, run, take_in)


def plane_error(layer: DeltaNet, projected: Tensor, context: Context) -> float:
    """Return the error of y that is stored as planes, by that of y; the states are equal."""
    other, (B, T), H = deepcopy(layer), projected.shape[:2], layer.sizes.value_heads
    y = layer.fused_core(projected, context).view(B * T, H, GROUP)
    planes = empty_planes(projected, H * GROUP, B * T)
    assert layer.stores_planes(T) and other.fused_core(projected, context, planes) is None
    for one, two in zip(layer.state.buffers(), other.state.buffers(), strict=True):
        assert one.equal(two)
    # Axes: head, half, token, byte of a number, t, first or second word of the half, even or odd
    # fields, byte of the word.
    numbers = planes.words.view(torch.int8).view(H, 2, B * T, 2, 4, 2, 2, 4).int()
    numbers = numbers[:, :, :, 0] * 256 + numbers[:, :, :, 1]
    numbers = numbers.permute(2, 0, 6, 5, 3, 1, 4).flatten(2)
    return relative_error(numbers * planes.units.T.unsqueeze(-1) * 16, y.float())


def chunk_errors(case: tuple, **options) -> list[float]:
    """`few_errors` as one chunk, whatever would be chosen."""
    in_fp32 = mock.patch.dict(delta.CHUNK_PRECISION, {torch.float32: "tf32x3"})
    with in_fp32, mock.patch.object(delta, "LEAST_CHUNK", 2):
        return few_errors(case, **options)


def expanded_error(T: int) -> float:
    """Return the error of all kernels of a layer with a decay for each channel, in bf16."""
    case = 2, T, 2, 2, 32, 32, 4, None, (3, None), torch.bfloat16
    layer, projected, context = random_few(*case, channel_decay=True)
    ours = deepcopy(layer)
    return relative_error(ours.fused_core(projected, context), layer.core(projected, context))


N_SEED = 3


def plain_token(x, gates, state, pending, weights, positions, last, arrivals, eps):
    """Compute `delta_tokens` of one token in PyTorch -> y, the new state and the new window."""
    (B, H, Ck, Cv), (conv_weight, a_log, dt_bias, norm) = state.shape, weights
    K = arrivals.shape[1]
    window = pending[0][:, : conv_weight.shape[1] - 1]
    b, a, gate = (part.float() for part in gates)
    g = -a_log.float().exp() * torch.nn.functional.softplus(a + dt_bias.float())
    y = conv_silu_in_torch(x, window, conv_weight).squeeze(1)
    q, k, v = y.split((K * Ck, K * Ck, H * Cv), -1)
    q, k, v = q.view(B, K, Ck), k.view(B, K, Ck), v.view(B, H, Cv)
    out, new = gated_delta_step(q, k, v, g.squeeze(1), b.sigmoid().squeeze(1), state)
    y = norm_in_torch(out, gate.view(B, H, Cv), norm, eps).to(x.dtype).view(B, 1, H * Cv)
    moved = torch.cat((window, x), 1)[:, 1:]
    if last is None:
        return y, new, moved
    kept = last >= 0
    return (
        y,
        torch.where(kept.view(B, 1, 1, 1), new, state),
        torch.where(kept.view(B, 1, 1), moved, window),
    )


def part_errors(v: Tensor) -> list[float]:
    """Return the errors of convolution and norm for tokens of v."""
    (B, Q, H, C), parts = v.shape, recurrent_parts
    x, weight = torch.randn(B, Q, 300), torch.randn(300, 4)
    found = []
    for bias, last, few in (
        (None, None, 0),
        (torch.randn(300), torch.arange(B).clamp(max=Q) - 1, Q),
    ):
        windows, row = [torch.randn(B + 2, 3, 300)] * 2, torch.arange(B).flip(0) + 1
        windows[1] = windows[0].clone()
        forms = zip((parts.launch_convolution, convolve_plain), windows, strict=True)
        with mock.patch.object(parts, "FEW_TOKENS", few):
            found.append(relative_error(*(f(x, own, weight, bias, last, row) for f, own in forms)))
        assert torch.equal(*windows)
    gate, scale = torch.cat((v, v), 2)[:, :, H:].sin(), torch.randn(C)
    norms = (f(v, gate, scale, 1e-6) for f in (parts.launch_norm_heads, norm_in_torch))
    found.append(relative_error(*norms))
    heads = v[0].flatten(1)
    gate = torch.cat((heads, heads.sin()), 1)[:, heads.shape[1] :]
    gated = (f(heads, gate, "sigmoid") for f in (parts.launch_head_gate, gate_heads))
    found.append(relative_error(*gated))
    return found


def rule_errors(name: str) -> list[float]:
    """Return the errors of the rule with both kinds of decay, and of what surrounds it."""
    q, k, v, g, beta, state = random_prompt(*PROMPTS[name])
    channels = -torch.randn(*g.shape, q.shape[-1]).exp()
    if name == "equal keys":
        k, g, beta = k[:, :1].expand_as(k).contiguous(), g * 0, beta * 0 + 1
    found = part_errors(v)
    for decay in (g, *(strength * channels for strength in STRENGTHS)):
        forms = from_gates(delta_prompt.launch_delta_chunk), in_place(chunk_in_torch)
        results = (after_tokens(f, q, k, v, decay, beta, state) for f in forms)
        found += [relative_error(*pair) for pair in zip(*results, strict=True)]
    return found


def token_errors(case: tuple) -> list[float]:
    found, arguments = [], random_token(*case)
    for _ in range(2):  # the second call finds the counter as the first has left it
        want = plain_token(*arguments)
        y = delta_tokens(*arguments)
        got = y, arguments[2], arguments[3][0][:, : case[5] - 1]
        found += [relative_error(*pair) for pair in zip(got, want, strict=True)]
        assert not arguments[7].any()  # arrivals
    return found


def prompt_errors(case: tuple, options: dict) -> list[float]:
    return layer_prompt_errors(*random_few(*case, **options))


def errors() -> dict[str, list[float]]:
    """Run the cases that CASES in the environment names, "NAME;NAME", or all."""
    cases = {name: partial(rule_errors, name) for name in PROMPTS}
    cases |= {name: partial(token_errors, case) for name, case in TOKENS.items()}
    # Of two sequences; more tokens take tensor cores, where the interpreter has no bf16.
    cases["kimi, with products"] = lambda: [expanded_error(T) for T in (1, 2)]
    for name, case in LAYER_PROMPTS.items():
        for kind, dtype in itertools.product(("", ", kimi"), (torch.float32, torch.bfloat16)):
            options = dict(dtype=dtype, channel_decay=bool(kind))
            half = ", bf16" if dtype == torch.bfloat16 else ""
            cases[f"{name}{kind}{half}"] = partial(prompt_errors, case, options)
    for name, (B, T, H, C, *rest) in KIMI.items():
        cases[name] = partial(few_errors, (B, T, H, H, C, C, *rest), channel_decay=True)
    cases |= {name: partial(few_errors, case) for name, case in FEW.items()}
    for name, case in IN_PLANES.items():
        cases[name] = lambda case=case: [plane_error(*random_few(*case))]
    cases |= {name: partial(chunk_errors, case) for name, case in CHUNKS.items()}
    for T, options in ((4, {"delta_gate": "sigmoid"}), (16, {})):
        options |= {"dtype": torch.bfloat16}
        cases[f"chunk of {T}, bf16"] = partial(chunk_errors, CHUNKS[f"chunk of {T}"], **options)
    for name in ("drafts", "drafts after drafts", "one token after drafts"):
        cases[f"{name}, sigmoid"] = partial(few_errors, FEW[name], delta_gate="sigmoid")
    names = os.environ.get("CASES", ";".join(cases)).split(";")
    return {name: cases[name]() for name in names}


def machine_code() -> dict[str, dict[str, int]]:
    """Compile each kernel at the sizes of Qwen3-Next and Qwen3.6-35B-A3B."""
    x, window, weight = (
        torch.zeros(*n).bfloat16() for n in ((1, 300, 8192), (1, 3, 8192), (8192, 4))
    )
    sizes = 16, 32, 128, 128
    prompt = random_prompt(1, 2048, *sizes, torch.bfloat16)
    v, norm = prompt[2], weight[:128, 0].contiguous()
    last = row = torch.zeros(1, dtype=torch.int64)
    *kimi, g, beta, state = random_prompt(1, 2048, 32, *sizes[1:], torch.bfloat16)
    kimi = *kimi, g.unsqueeze(-1).expand(*g.shape, 128), beta, state
    several = {T: random_few(1, T, *sizes, 4, None, (4,), torch.bfloat16) for T in (2, 4, 8, 16)}
    # Kimi Linear 48B-A3B.
    of_channels = {T: (1, T, 32, *sizes[1:], 4, None, (4,), torch.bfloat16) for T in (1, 8, 16)}

    launch_chunk = from_gates(delta_prompt.launch_delta_chunk)

    def launch_all() -> None:
        launch_chunk(*prompt, row)
        recurrent_parts.launch_convolution(x, window, weight, None, last, row)
        recurrent_parts.launch_norm_heads(v, v, norm, 1e-6)
        delta_tokens(*random_token(1, *sizes, 4, None, torch.bfloat16))

    with mock.patch.object(DeltaRuleLayer, "mixes_by_kernels", lambda *_: True):
        found = launched_code(launch_all)
        of_kimi = launched_code(partial(launch_chunk, *kimi, row))
        found |= {f"{name} of channels": code for name, code in of_kimi.items()}
        small = random_prompt(1, 256, 2, 4, 16, 16, torch.bfloat16)
        of_small = launched_code(partial(launch_chunk, *small, row))
        found |= {f"{name} of small heads": code for name, code in of_small.items()}
        for T, case in of_channels.items():
            layer, *call = random_few(*case, channel_decay=True)
            launched = launched_code(partial(layer.core, *call))
            found |= {f"{name} of channels, {T}": code for name, code in launched.items()}
        for T, (layer, *call) in several.items():
            form = "at once" if T <= delta.MOST_JOINT else "chunk"
            launched = launched_code(partial(layer.core, *call))
            found |= {f"{name} of {T}, {form}": code for name, code in launched.items()}
    return {name: counts(code) for name, code in found.items()}


if __name__ == "__main__":
    sys.exit(print_results(errors, machine_code))
