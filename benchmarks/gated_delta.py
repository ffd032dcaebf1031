"""Time of a Gated DeltaNet layer: fused decode against Inductor's kernels, and prompts.

    python benchmarks/gated_delta.py

Sizes of Qwen3.6-35B-A3B and Qwen3-Next. Every form is first compared with the plain one; the
command fails if a result is wrong. Decode: us of one layer without its projections, in a CUDA graph
of 16 layers, whose states do not fit into L2. Several tokens: the same, one after the other, as
chosen, and as one chunk, after a call of which some tokens were accepted. Prompt: one layer with
and without its projections, against causal SDPA of the same model. "apart" is the relative
difference to fp32 in PyTorch, or of both forms.
"""

import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cuda_timing import graph_seconds, require_gpu
from cli.parser import Parser
from models.layers.pending_state import MAX_TENTATIVE
from ops.attention import delta, delta_prompt
from ops.attention.delta import delta_tokens
from ops.attention.delta_prompt import delta_chunk_in_torch, gated_delta_chunk
from ops.attention.recurrent_parts import convolve_prompt, gated_rms_norm
from ops.inductor import configure_inductor
from ops.plain.gated_delta import gated_delta_step

D, K, H, C, W, EPS = 2048, 16, 32, 128, 4, 1e-6  # delta layer; Ck = Cv = C
N, VALUES = 2 * K * C + H * C, H * C
HEADS, KV_HEADS, HEAD_DIM = 16, 2, 256  # attention layer; its query has a gate as well
LAYERS = 16
# Tokens of a call, and how many of the call before were accepted.
# (most tokens at once in registers, fewest of a chunk, precision): first one after the other.
FEW_FORMS = ((0, MAX_TENTATIVE + 1, ""), (4, 5, "tf32"), (0, 2, "tf32"), (0, 2, "tf32x3"))
FEW = ((2, 0), (2, 2), (3, 0), (4, 0), (4, 4), (8, 0), (8, 4), (8, 8), (16, 0), (16, 8), (16, 16))
# (chunk, precision): how `launch_delta_chunk` may compute; the first is its default.
PROMPT_FORMS = ((64, "tf32"), (64, "tf32x3"), (32, "tf32"), (32, "tf32x3"))
LIMITS = {"tf32": 3e-4, "tf32x3": 1e-4}


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=dtype, device="cuda")


def difference(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def check(name: str, found: float, limit: float) -> float:
    """End the command if a result is too far from the plain form's; return the difference."""
    if not found <= limit:
        sys.exit(f"{name}: the relative difference is {found:.1e}, above {limit:.0e}")
    return found


# Decode -------------------------------------------------------------------------------------------


def random_layer(batch: int, tokens: int = 1) -> dict[str, Tensor]:
    """Return the tensors of one layer's decode step."""
    return {
        "qkvz": normal(batch, tokens, N + VALUES),
        "ba": normal(batch, tokens, 2 * H),
        "state": normal(batch, H, C, C, dtype=torch.float32, scale=0.1),
        "inputs": normal(batch, W - 1 + MAX_TENTATIVE, N),  # the window, then pending tokens
        "pending_ba": normal(batch, MAX_TENTATIVE, 2 * H),
        "first": torch.zeros(batch, H, dtype=torch.int64, device="cuda"),  # none is pending
        "conv": normal(N, W),
        "a_log": normal(H, dtype=torch.float32),
        "dt_bias": normal(H),
        "norm": normal(C),
        "positions": torch.arange(tokens, device="cuda").expand(batch, -1).contiguous(),
        "arrivals": torch.zeros(batch, K, dtype=torch.int32, device="cuda"),
    }


def fused_step(layer: dict[str, Tensor], last: Tensor | None = None) -> Tensor:
    qkvz, ba, state, *pending = list(layer.values())[:6]
    *weights, positions, arrivals = list(layer.values())[6:]
    qkv, gate = qkvz.split((N, VALUES), -1)
    gates = [*ba.chunk(2, -1), gate]
    return delta_tokens(qkv, gates, state, pending, weights, positions, last, arrivals, EPS)


def window_of(layer: dict[str, Tensor]) -> Tensor:
    return layer["inputs"][:, : W - 1]


def plain_step(layer: dict[str, Tensor]) -> Tensor:
    """Compute what `fused_step` does, in PyTorch."""
    qkvz, state, batch = layer["qkvz"], layer["state"], len(layer["ba"])
    window = window_of(layer)
    x, gate = qkvz.split((N, VALUES), -1)
    b, a = layer["ba"].float().squeeze(1).chunk(2, -1)
    g = -layer["a_log"].exp() * F.softplus(a + layer["dt_bias"].float())
    y = convolve_prompt(x, window, layer["conv"]).squeeze(1)
    q, k, v = y.split((K * C, K * C, VALUES), -1)
    q, k, v = q.view(batch, K, C), k.view(batch, K, C), v.view(batch, H, C)
    out, new = gated_delta_step(q, k, v, g, b.sigmoid(), state)
    state.copy_(new)
    y = gated_rms_norm(out, gate.reshape(batch, H, C), layer["norm"], EPS)
    return y.reshape(batch, 1, VALUES)


def decode_rows(batch: int) -> str:
    """Check and time a step -> one row of the table."""
    plain = torch.compile(plain_step, fullgraph=True, dynamic=False)
    fused = torch.compile(fused_step, fullgraph=True, dynamic=False)
    layer, results = random_layer(batch), []
    for form in (plain_step, plain, fused):
        copy = {name: tensor.clone() for name, tensor in layer.items()}
        for _ in range(3):
            y = form(copy)
        results.append((y, copy["state"], window_of(copy)))
    # bf16 may round otherwise after another order of sums, and Inductor leaves roundings out.
    limits = {"output": (2e-2, 1e-2), "state": (2e-2, 1e-3), "window": (0.0, 0.0)}
    for n, (name, allowed) in enumerate(limits.items()):
        for got, limit in zip(results[1:], allowed, strict=True):
            check(f"decode, {name}", difference(got[n], results[0][n]), limit)
    apart = difference(results[2][0], results[0][0])
    layers = [random_layer(batch) for _ in range(LAYERS)]
    times = [graph_seconds(form, layers) * 1e6 for form in (plain, fused)]
    gbs = 2 * batch * H * C * C * 4 / times[1] / 1e3
    return f"{batch:5}   {times[0]:9.2f}   {times[1]:8.2f}   {gbs:11.0f}   {apart:.1e}"


def few_row(tokens: int, accepted: int) -> str:
    """Check and time calls of several tokens, of which `accepted` were accepted -> a table's row.

    A layer's two calls are at positions that far apart: one follows `accepted` pending tokens, the
    other none.
    """
    layers, calls, times, results = [random_layer(1, tokens) for _ in range(LAYERS)], [], [], []
    for layer in layers:
        calls += [layer, layer | {"positions": layer["positions"] + accepted}]
    start = {name: tensor.clone() for name, tensor in layers[0].items()}
    for most, least, precision in FEW_FORMS:
        ours = {name: tensor.clone() for name, tensor in start.items()}
        exactness = mock.patch.dict(delta.CHUNK_PRECISION, {torch.bfloat16: precision})
        with mock.patch.multiple(delta, MOST_JOINT=most, LEAST_CHUNK=least), exactness:
            pair = [fused_step(ours | {"positions": call["positions"]}) for call in calls[:2]]
            times.append(graph_seconds(fused_step, calls) * 1e6)
        results.append((torch.cat(pair), ours["state"]))
    row = f"{tokens:6}   {accepted:8}   {times[0]:8.2f}"
    for us, found in zip(times[1:], results[1:], strict=True):
        y, state = (difference(*pair) for pair in zip(found, results[0], strict=True))
        check("several tokens", y, 1e-2)
        check("several tokens, state", state, 1e-3)
        row += f"   {us:6.2f}  {y:.1e}  {state:.1e}"
    return row


# Prompts ------------------------------------------------------------------------------------------


def delta_mix(qkvz: Tensor, ba: Tensor, layer: dict[str, Tensor], chunk: Callable) -> Tensor:
    """Compute all between a layer's projections for a prompt, as in eager code."""
    x, gate = qkvz.split((N, VALUES), -1)
    y = convolve_prompt(x, window_of(layer), layer["conv"])
    q, k, v = y.split((K * C, K * C, VALUES), -1)
    q, k, v = q.unflatten(-1, (K, C)), k.unflatten(-1, (K, C)), v.unflatten(-1, (H, C))
    out = chunk(q, k, v, ba, layer["a_log"], layer["dt_bias"], None, layer["state"], None)
    return gated_rms_norm(out, gate.unflatten(-1, (H, C)), layer["norm"], EPS).flatten(2)


def attention_mix(qkv: Tensor) -> Tensor:
    """Attend causally: qkv [B, Q, (2 HEADS + 2 KV_HEADS) HEAD_DIM], with a gate, without RoPE."""
    q, gate, k, v = qkv.split([n * HEAD_DIM for n in (HEADS, HEADS, KV_HEADS, KV_HEADS)], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2) * gate.sigmoid()


def print_row(name: str, tokens: int, layer: float, mix: float, apart: float | None) -> None:
    found = "" if apart is None else f"{apart:.1e}"
    print(f"{name:22}   {layer * 1e6:8.1f}   {mix * 1e6:6.1f}   {tokens / layer:12,.0f}   {found}")


def prompt_rows(tokens: int) -> None:
    """Check and time a prompt's layers, and print the table."""
    x, layer = normal(1, tokens, D), random_layer(1)
    wqkv = normal((2 * HEADS + 2 * KV_HEADS) * HEAD_DIM, D, scale=D**-0.5)
    wqkvz, wba = normal(N + VALUES, D, scale=D**-0.5), normal(2 * H, D, scale=D**-0.5)
    wo = normal(D, VALUES, scale=VALUES**-0.5)
    qkv, qkvz, ba = (F.linear(x, weight) for weight in (wqkv, wqkvz, wba))
    attention = partial(graph_seconds, arguments=[None] * 4)
    whole = attention(lambda _: F.linear(attention_mix(F.linear(x, wqkv)), wo))
    print_row("attention", tokens, whole, attention(lambda _: attention_mix(qkv)), None)
    start = {name: tensor.clone() for name, tensor in layer.items()}

    def mix(chunk: Callable) -> Tensor:
        own = {name: tensor.clone() for name, tensor in start.items()}
        return delta_mix(qkvz, ba, own, chunk)

    want = mix(delta_chunk_in_torch)

    def whole_delta(_) -> Tensor:
        y = delta_mix(F.linear(x, wqkvz), F.linear(x, wba), layer, gated_delta_chunk)
        return F.linear(y, wo)

    for size, precision in PROMPT_FORMS:
        with mock.patch.multiple(delta_prompt, CHUNK=size, PRECISION=precision):
            y = mix(gated_delta_chunk)
            check(f"prompt, {size}, {precision}", difference(y, want), 2e-2)
            apart = rule_difference(tokens, precision)
            times = (
                attention(whole_delta),
                attention(lambda _: delta_mix(qkvz, ba, layer, gated_delta_chunk)),
            )
        print_row(f"delta, {size}, {precision}", tokens, *times, apart)
    plain = attention(lambda _: delta_mix(qkvz, ba, layer, delta_chunk_in_torch))
    print(f"{'delta, PyTorch':22}   {'':8}   {plain * 1e6:6.1f}")


def rule_difference(tokens: int, precision: str) -> float:
    """Compare the final state with that of the plain form, for strongly and weakly decaying g."""
    q, k, v = normal(1, tokens, K, C), normal(1, tokens, K, C), normal(1, tokens, H, C)
    ba, zeros = normal(1, tokens, 2 * H, dtype=torch.float32) * 2, torch.zeros(H, device="cuda")
    state = normal(1, H, C, C, dtype=torch.float32)
    got, want = state.clone(), state
    for form, own in ((gated_delta_chunk, got), (delta_chunk_in_torch, want)):
        form(q, k, v, ba, zeros, zeros - 2, None, own, None)
    return check(f"state, {precision}", difference(got, want), LIMITS[precision])


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/gated_delta.py",
            "python benchmarks/gated_delta.py --tokens 512 --batch 1",
        ),
    )
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompt")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="rows of a step")
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    configure_inductor()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("batch   plain us   fused us   GB/s of it   apart")
    for batch in options.batch:
        print(decode_rows(batch), flush=True)
    print("tokens   accepted   serial us   chosen us, y, state apart; chunk; chunk in tf32x3")
    for tokens, accepted in FEW:
        print(few_row(tokens, accepted), flush=True)
    print(f"{options.tokens} tokens             layer us   mix us   tokens/s       apart")
    prompt_rows(options.tokens)


if __name__ == "__main__":
    main()
