"""Long prompts by `PromptRunner`: for tests/test_step_through.py, and on a GPU for test_cuda.py."""

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import torch

from formats import FORMATS
from formats.packed import column_order
from formats.quantizer import pack_weight
from model import Chunk
from ops.attention.prompt_attention import attend_prompt
from ops.declared import Activation
from ops.plain.attention import attend_chunk
from ops.products.prompt import grouped_gemm
from ops.products.prompt_rows import activate_rows, gather_rows
from ops.products.prompt_unpack import unpack_rows
from ops.products.prompt_weights import GateTensors, PromptTile
from runtime.fused_layer import fused_layers
from runtime.fused_prompt import PromptRunner
from tests.moe_kernels_without_gpu import as_on_a_gpu, relative, small_model


def prompt_errors(
    family: str, format: str, layers: int, device: str = "cpu", **changes
) -> dict[str, float]:
    """Compare two chunks of a prompt by `PromptRunner` with plain ones: logits, and caches.

    layers: how many of the model have kernels. device: on a CPU Triton's interpreter runs them.
    """
    model, found = small_model(family, format, **changes).to(device), []
    fused = {id(block): layer for block, layer in fused_layers(model).items()}
    with ExitStack() as stack:
        if device == "cpu":
            takes = lambda self, x, context: context.chunk is not None  # noqa: E731
            stack.enter_context(mock.patch.object(PromptRunner, "takes", takes))
            stack.enter_context(as_on_a_gpu())
        for runner in (None, PromptRunner(model, fused, None)):
            for state in model.states:
                state.reset()
            assert runner is None or len(runner.layers) == layers
            logits, row = [], torch.tensor([0], device=device)
            for begin, end in ((0, 40), (40, 73)):
                tokens = torch.arange(begin, end, device=device).unsqueeze(0) * 7 % 32
                options = dict(all_positions=True, runner=runner)
                logits.append(model(tokens, Chunk(row, end), **options)[0])
            buffers = [buffer.float() for state in model.states for buffer in state.buffers()]
            found.append((torch.cat(logits), [buffer.clone() for buffer in buffers]))
    (want, states), (got, own) = found
    pairs = zip(own, states, strict=True)
    return {"logits": relative(got, want), "states": max(relative(*pair) for pair in pairs)}


def reorders_rows(format: str) -> bool:
    """Whether `gather_rows` puts rows into the order of a format's grouped product."""
    x, pairs = torch.randn(5, 512).half(), torch.tensor([7, 0, 3, 9])
    group = FORMATS[format].default_group(512)
    columns = column_order(format, group, 512, x.device)
    want = FORMATS[format].grouped_order(x, group)
    some = gather_rows(x, pairs, 2, columns)
    return gather_rows(x, None, 1, columns).equal(want) and some.equal(want[pairs // 2])


def random_product(format: str, sizes: tuple[int, ...], out: int) -> tuple:
    """Return the arguments of `grouped_gemm` for random rows of experts, and unpacked weights.

    format: "plain", or the name of one. Weights are in the order of x.
    """
    ends, width = torch.tensor(sizes).cumsum(0).int(), 512
    x, weight = torch.randn(sum(sizes), width).half(), torch.randn(len(sizes), out, width)
    if format == "plain":
        return (x, ends, {"codes": weight.half()}, "plain", 16, 1), weight.half()
    own = FORMATS[format]
    group = own.default_group(width)
    spec = {"format": format, "group_size": group}
    parts = pack_weight(weight, spec, torch.device("cpu"))
    weight = own.unpack(parts, group)[..., column_order(format, group, width, x.device)]
    return (x, ends, parts, own.kind, own.bits, group), weight


def activation_errors(format: str, activation: Activation, tile: PromptTile) -> list[float]:
    """Compare activations in the product's epilogue, of tokens, with those of gathered rows."""
    sizes, out, active = (5, 0, 30), 96, 2
    given, _ = random_product(format, sizes, out)
    x, pairs = given[0], torch.randperm(sum(sizes))
    rows = gather_rows(x, pairs, active, None)
    both = grouped_gemm(rows, *given[1:], tile=replace(tile, tail=tile.rows, near=1))
    experts = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    columns, bias, found = torch.randperm(out // 2).int(), torch.randn(3, out).half(), []
    for gate in (GateTensors(), GateTensors(bias, columns)):
        options = dict(pairs=pairs, active=active, activation=activation, gate=gate, tile=tile)
        got = grouped_gemm(*given, **options)
        own = None if gate.bias is None else experts
        found.append(relative(got, activate_rows(both, activation, gate.bias, own, gate.columns)))
    return found


def unpacking_error(format: str) -> float:
    """Compare a weight that a kernel unpacks, with rows and numbers beside whole blocks."""
    (x, _, parts, *rest), weight = random_product(format, (1,), 40)
    return relative(unpack_rows(parts, *rest, x.shape[1], x.dtype), weight[0])


def attention_error(Q: int, S: int, window: int | None, has_sinks: bool, C: int) -> float:
    """Compare attention of the last Q of S positions of a longer cache with SDPA's."""
    q, sinks = torch.randn(Q, 4, C).half(), torch.randn(4).half() if has_sinks else None
    k, v = (torch.randn(2, S + 9, C).half()[:, :S] for _ in range(2))
    given = q, k, v, window, sinks
    return relative(attend_prompt(*given), attend_chunk(*given))
