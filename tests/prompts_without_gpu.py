"""Long prompts by `PromptRunner`: for tests/test_step_through.py, and on a GPU for test_cuda.py."""

from contextlib import ExitStack
from unittest import mock

import torch
import torch.nn.functional as F

from formats import FORMATS
from formats.packed import column_order
from formats.quantizer import pack_weight
from model import Chunk, KVCache, group_by_expert, rope_frequencies, rope_table
from offload.runner import FusedOffloadRunner
from ops.attention.gqa import AttentionSettings
from ops.attention.prompts import Places, attend_prompt, prompt_heads
from ops.declared import Activation
from ops.plain.attention import attend_chunk
from ops.plain.ring import append_chunk
from ops.products import fixed_join
from ops.products.prompt import grouped_gemm
from ops.products.prompt_rows import activate_rows, gather_rows, group_pairs
from ops.products.prompt_weights import PromptTile, multiply_unpacked
from runtime.fused_layer import FusedLayer, fused_layers
from runtime.fused_prompt import PromptRunner
from tests.moe_kernels_without_gpu import as_on_a_gpu, relative, small_model
from tests.offload_without_gpu import offload_model


def prompt_errors(
    family: str,
    format: str,
    layers: int,
    device: str = "cpu",
    slots: int = 0,
    positions: bool = False,
    padding: int = 0,
    **changes,
) -> dict[str, float]:
    """Compare two chunks of a prompt by `PromptRunner` with plain ones: logits, and caches.

    layers: how many of the model have kernels. device: on a CPU Triton's interpreter runs them.
    slots: of offloaded experts, with `PromptRunner`; 0: they are resident. positions: its chunks
    are tokens at positions. padding: tokens behind each of its chunks.
    """
    model, found = small_model(family, format, **changes).to(device), []
    model.setup_cache(1, 256)  # a window's is a ring
    with ExitStack() as stack:
        if device == "cpu":
            takes = lambda self, x, context: True  # noqa: E731
            stack.enter_context(mock.patch.object(PromptRunner, "takes", takes))
            torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
            stack.callback(torch.use_deterministic_algorithms, False)
            stack.enter_context(as_on_a_gpu())
            stack.enter_context(mock.patch.object(fixed_join, "can_launch", lambda x: True))
        for by_kernels in (False, True):
            for state in model.states:
                state.reset()
            runner = None
            if by_kernels:
                if slots:
                    offload_model(model, slots)
                make = FusedOffloadRunner.make_layer if slots else FusedLayer
                fused = {id(block): layer for block, layer in fused_layers(model, make).items()}
                runner = PromptRunner(model, fused, None)
                assert len(runner.layers) == layers
                own = runner.layers.values()
                assert not positions or all(layer.takes_positions for layer in own)
            logits, row = [], torch.tensor([0], device=device)
            # On a GPU dense packed weights of the second chunk are unpacked (`unpacks_first`).
            for begin, end in ((0, 40), (40, 73 if device == "cpu" else 121)):
                tokens = torch.arange(begin, end, device=device).unsqueeze(0) * 7 % 32
                options, count = dict(all_positions=True, runner=runner), end - begin
                behind = padding if by_kernels else 0
                if behind:
                    tokens = F.pad(tokens, (0, behind))
                    options["last"] = row + count - 1
                span = Chunk(row, end + behind)
                if by_kernels and positions:
                    span = torch.arange(begin, end + behind, device=device).unsqueeze(0)
                logits.append(model(tokens, span, **options)[0, :count])
            for state in model.states if padding else ():
                if type(state) is KVCache:  # later tokens replace padding
                    state.kv[..., end:, :] = 0
            buffers = [buffer.float() for state in model.states for buffer in state.buffers()]
            found.append((torch.cat(logits), [buffer.clone() for buffer in buffers]))
    (want, states), (got, own) = found
    pairs = zip(own, states, strict=True)
    return {"logits": relative(got, want), "states": max(relative(*pair) for pair in pairs)}


def stores_in_ring(T: int, begin: int, last: int | None) -> bool:
    """Whether heads that are stored in a ring of 80 slots are those that `append_chunk` stores.

    last: of T tokens from position `begin` on, the last that is real.
    """
    H, K, C, sequences = 4, 2, 16, 3
    layer = AttentionSettings(H, K, C, C, C**-0.5)
    qkv, row = torch.randn(T, layer.projected).half(), torch.tensor([1])
    rope = rope_table(rope_frequencies(C, 1e4, qkv.device), T)[None, :, None]
    end = None if last is None else torch.tensor([last])
    ring = torch.randn(2, sequences, K, 80, C).half()
    want, kv = ring.clone(), qkv.new_empty(T, 2, K, C)
    q = prompt_heads(qkv, rope, None, None, layer.encoded(), Places(kv, ring, row, end), begin)
    append_chunk(want, kv.unsqueeze(0), row, begin + T, end)
    values = qkv[:, layer.first_value * C :].view(T, K, C)
    return q.shape == (T, H, C) and kv[:, 1].equal(values) and ring.equal(want)


def reorders_rows(format: str) -> bool:
    """Whether `gather_rows` puts rows into the order of a format's grouped product."""
    x, pairs = torch.randn(5, 512).half(), torch.tensor([7, 0, 3, 9])
    group = FORMATS[format].default_group(512)
    columns = column_order(format, group, 512, x.device)
    want = FORMATS[format].grouped_order(x, group)
    some = gather_rows(x, pairs, 2, columns)
    return gather_rows(x, None, 1, columns).equal(want) and some.equal(want[pairs // 2])


def dense_error(
    format: str, form: str, dtype: torch.dtype = torch.float16, group: int | None = None
) -> float:
    """Compare the product of a packed dense weight with one of `Format.unpack`.

    form: "decoded" by `_grouped`; "unpacked" by `_unpack`, or "own order", with x as it is.
    """
    out, width, own = 40, 768, FORMATS[format]
    group = own.choose_group(width, group)
    spec = {"format": format, "group_size": group}
    parts = pack_weight(torch.randn(1, out, width), spec, torch.device("cpu"))
    x = torch.randn(70, width).to(dtype)  # rows of two tiles
    own_order = form == "own order"
    ordered, weight = x if own_order else own.grouped_order(x, group), (own.kind, own.bits, group)
    if form == "decoded":
        got = grouped_gemm(ordered, None, parts, *weight)
    else:
        got = multiply_unpacked(ordered, parts, *weight, own_order)
    want = x.double() @ own.unpack(parts, group)[0].double().T
    return ((got.double() - want).norm() / want.norm()).item()


def groups_pairs(tokens: int, active: int, n_expert: int, padding: int = 0) -> bool:
    """Whether `group_pairs` is `group_by_expert`, where the last expert has no pair.

    padding: how many of the tokens are some. Their pairs are rows of no expert, in their order,
    and are read from row 0.
    """
    scores = torch.randn(tokens, n_expert - 1)
    indices, real = scores.topk(active).indices, tokens - padding
    found = group_pairs(indices, n_expert, torch.tensor([real - 1]) if padding else None)
    order, places, ends = group_by_expert(indices[:real], n_expert)
    rest = torch.arange(real * active, tokens * active)
    want = torch.cat((order, rest)), torch.cat((places, 0 * rest)), ends
    return all(map(torch.equal, found, (t.int() for t in want)))


def product_error(format: str, tile: PromptTile, activation: Activation | None = None) -> float:
    """Compare a product of experts' rows, taken from tokens, with one of unpacked weights.

    format: "plain", or the name of one. activation: of the outputs with a bias, its results in
    another order.
    """
    sizes, out, width, active = (5, 0, 41), 200, 512, 2
    ends, pairs = torch.tensor(sizes).cumsum(0).int(), torch.randperm(sum(sizes))
    x = torch.randn(sum(sizes), width).half()
    weight = torch.randn(len(sizes), out, width) / width**0.5
    product = {"codes": weight.half()}, "plain", 16, 1
    if format != "plain":
        own, group = FORMATS[format], FORMATS[format].default_group(width)
        spec = {"format": format, "group_size": group}
        parts = pack_weight(weight, spec, torch.device("cpu"))
        weight = own.unpack(parts, group)[..., column_order(format, group, width, x.device)]
        product = parts, own.kind, own.bits, group
    results, bias = {}, torch.zeros(len(sizes), out)
    if activation:
        bias = torch.randn(len(sizes), out).half()
        columns = torch.randperm(out // 2 if activation.gated else out).int()
        results = dict(activation=activation, bias=bias, columns=columns)
    got = grouped_gemm(x, ends, *product, pairs=pairs, active=active, tile=tile, **results)
    rows = x[pairs // active].float().split(sizes)
    want = [rows @ w.float().T for rows, w in zip(rows, weight, strict=True)]
    want = torch.cat([y + own for y, own in zip(want, bias.float(), strict=True)])
    if activation:
        want = activate_rows(want, activation, columns=columns)
    return relative(got, want)


def attention_error(Q: int, S: int, window: int | None, has_sinks: bool, C: int) -> float:
    """Compare attention of the last Q of S positions of a longer cache with SDPA's."""
    q, sinks = torch.randn(Q, 4, C).half(), torch.randn(4).half() if has_sinks else None
    k, v = (torch.randn(2, S + 9, C).half()[:, :S] for _ in range(2))
    given = q, k, v, window, sinks
    return relative(attend_prompt(*given), attend_chunk(*given))
