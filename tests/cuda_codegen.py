"""Count what fuses in Inductor's CUDA code for one decode step.

    python tests/cuda_codegen.py quick    the cases of `make test`
    python tests/cuda_codegen.py slow     the others, which `make test-all` needs

Nothing runs: tensors are fake (benchmarks/inductor_code.py), which patches torch for the whole
process, so tests run this in a process of its own. Dynamo and tuning are skipped: read a result as
"does this formulation fuse". It prints one JSON object. Each case has the number of Triton kernels,
the library calls left over, the elements of the largest buffer, roundings to bf16 that Inductor
cannot drop, integer dot products, running sums of long rows, and the kernels that use data too
early.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn

from benchmarks.inductor_code import (
    compiled_code,
    cuda_code,
    fake_empty,
    move_to_fake_gpu,
    pretend_gpu,
)
from formats import FORMATS
from formats.kv_cache import Int8KVCache
from formats.packed import PackedExpertLinear, PackedLinear
from model import Block, Context, ExpertLinear, KVCache, ModelArgs, RMSNorm
from models import ARCHITECTURES, build_model
from models.layers.hyper_connections import Streams
from models.layers.indexed_attention import IndexedAttention
from models.layers.ngram_embedding import NgramEmbedding
from models.random_weights import first_layers
from ops.inductor import any_size, configure_inductor, materialize
from ops.plain.attention import Mask, attend, attend_blocks, blocks_in_use
from runtime.fused_attention import fuse_decode_attention
from runtime.fused_decode import BEGIN_OPTIONS, before_ffn, begin_plainly, run_combine
from runtime.sampling import MAX_CANDIDATES, StepState, make_sample_step, sample
from tp import ModelShard

# Reading the code ---------------------------------------------------------------------------------


def summary(code: str) -> dict:
    """Return the figures of one case, see the top of this file."""
    shapes = re.findall(r"empty_strided_cuda\((\([^)]*\))", code)
    sizes = [math.prod(int(n) for n in re.findall(r"\d+", shape)) for shape in shapes]
    return {
        "triton": code.count("@triton.jit"),
        "extern": re.findall(r"extern_kernels\.\w+", code),
        "custom": re.findall(r" = torch\.ops\.moe_fast\.(\w+)", code),
        "largest_buffer": max(sizes, default=0),
        "rounded": code.count(".to(tl.bfloat16).to(tl.int16, bitcast=True)"),
        "integer_products": code.count("dp2a.lo"),
        # Templates, such as FlexAttention's, load from copies of their parameters.
        "split_scans": code.count("@triton_heuristics.split_scan("),
        "early": [] if "triton_tem_" in code else early_uses(code),
    }


def split_arguments(text: str) -> list[str]:
    """Split at commas that are not within brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def parse_kernels(code: str) -> dict[str, tuple]:
    """Return kernel -> its parameters, whether it waits, and the parameters it loads and stores.

    The last four: loads and stores before the wait, loads and stores in all.
    """
    kernels = {}
    pattern = r"\ndef (triton_\w+)\(([^)]*)\):\n((?:    .*\n|\n)+)"
    loads, stores = r"tl\.load\((\w+)", r"tl\.(?:store|atomic_\w+)\((\w+)"
    for name, parameters, body in re.findall(pattern, code):
        before, waits, _ = body.partition("gdc_wait()")
        if waits:
            assert "gdc_launch_dependents()" not in before, f"{name} launches, then waits"
        names = re.findall(r"(\w+)(?:\s*:[^,]*)?(?:,|$)", parameters)
        uses = [re.findall(use, text) for text in (before, body) for use in (loads, stores)]
        kernels[name] = names, bool(waits), *uses
    return kernels


def early_uses(code: str) -> list[str]:
    """Find kernels that use the previous kernel's data before they wait for it.

    They read what it writes, or write what it reads or writes: with programmatic dependent launch
    it may still be running. It has itself waited for the kernels before it, so a kernel that never
    waits is found too. In the text, a load in a loop precedes a wait after the loop, too.
    """
    kernels, early, renamed, read, written = parse_kernels(code), [], {}, set(), set()

    def buffer(argument: str) -> str:
        name = re.sub(r"reinterpret_tensor\((\w+).*", r"\1", argument)
        return buffer(renamed[name]) if name in renamed else name

    for line in map(str.strip, code[code.index("def call") :].splitlines()):
        if launch := re.match(r"(triton_\w+)\.run\((.*), stream=", line):
            names, waits, *uses = kernels[launch[1]]
            given = dict(zip(names, map(buffer, split_arguments(launch[2])), strict=False))
            early_read, early_written, now_read, now_written = (
                {given[parameter] for parameter in parameters} for parameters in uses
            )
            early += [] if waits else [f"{launch[1]} never waits"]
            early += [f"{launch[1]} reads {name}" for name in early_read & written]
            early += [f"{launch[1]} writes {name}" for name in early_written & (read | written)]
            read, written = now_read, now_written
        elif library := re.match(r"(?:extern_kernels\..*out=(\w+)|(\w+) = torch\.ops\.)", line):
            read, written = set(re.findall(r"\w+", line)), {buffer(library[1] or library[2])}
        elif alias := re.match(r"(\w+) = (\w+)(?:\[\d\])?(?:; del \2.*)?$", line):
            renamed[alias[1]] = alias[2]
    return early


# Cases: each returns a function and its arguments -------------------------------------------------


def routing(args: ModelArgs, tokens: int = 1) -> tuple[Tensor, Tensor]:
    shape = (tokens, args.n_active)
    return fake_empty(*shape, dtype=torch.int64), fake_empty(*shape, dtype=torch.float32)


def fake_block(args: ModelArgs, layer: int) -> Block:
    model = build_model(first_layers(args, layer + 1))
    move_to_fake_gpu(model)
    return model.layers[layer]


def experts(args: ModelArgs):
    """The gather path of one layer's experts, one token."""
    layer = fake_block(args, len(args.dense_layers)).ffn.experts
    return lambda *inputs: layer(*inputs), (fake_empty(1, args.dim), *routing(args))


def packed_experts(args: ModelArgs, format: str):
    """The gather path with packed weights."""
    layer = fake_block(args, 0).ffn.experts
    for name in ("w13", "w2"):
        plain = layer.get_submodule(name)
        layer.set_submodule(name, PackedExpertLinear(plain, format, FORMATS[format].group))
    return lambda *inputs: layer(*inputs), (fake_empty(1, args.dim), *routing(args))


def packed_linear(args: ModelArgs, format: str):
    """A dense packed weight: the attention's output."""
    plain = fake_block(args, 0).attention.wo
    linear = PackedLinear(plain, format, FORMATS[format].group)
    return lambda x: linear(x), (fake_empty(1, 1, args.n_head * args.head_dim),)


def several_tokens(args: ModelArgs, count: int):
    """The same for tokens of any number; `count` are those of the first call."""
    function, _ = packed_linear(args, "int4")
    x = fake_empty(1, count, args.n_head * args.head_dim)
    any_size(x, 1)
    return function, (x,)


class CopiedKVCache(Int8KVCache):
    """The cache to avoid: it dequantizes all codes to memory before attention reads one."""

    def append(self, kv: Tensor, context: Context) -> tuple[Tensor, ...]:
        return tuple(materialize(part) for part in super().append(kv, context))


def early_reader(args: ModelArgs):
    """The formulation to avoid: no kernel between the one that writes the cache and its reader."""
    shape = (1, args.n_kv_head, 1024, args.head_dim)
    cache = KVCache(shape, torch.bfloat16, torch.device("cuda"))

    def step(positions: Tensor, kv: Tensor, q: Tensor, bias: Tensor) -> Tensor:
        context = Context(rope=q, positions=positions)
        return attend(q, *cache.append(kv, context), bias)

    kv = fake_empty(1, 1, 2, args.n_kv_head, args.head_dim)
    q = fake_empty(1, 1, args.n_head, args.head_dim)
    return step, (fake_empty(1, 1, dtype=torch.int64), kv, q, fake_empty(1, 1, 1024))


def sampling(args: ModelArgs, count: int = MAX_CANDIDATES):
    """The choice of a token among `count` candidates, and the step to the next position."""
    rows, V = 1, args.vocab_size
    state = StepState(
        token=fake_empty(rows, 1, dtype=torch.int64),
        position=fake_empty(rows, 1, dtype=torch.int64),
        last=fake_empty(rows, dtype=torch.int64),
        seen=fake_empty(rows, V, dtype=torch.bool),
        controls=fake_empty(rows, 5, dtype=torch.float32),
        seeds=fake_empty(rows, dtype=torch.int64),
    )

    def step(logits: Tensor, *state: Tensor) -> None:
        make_sample_step(sample)(StepState(*state), logits, count)

    return step, (fake_empty(rows, V, dtype=torch.float32), *state)


def library_products(args: ModelArgs):
    """The formulation to avoid: with two rows a product, Inductor calls cuBLAS after the gather."""
    with torch.device("cuda"):
        w13 = ExpertLinear(args.n_expert, args.dim, 2 * args.intermediate)

    def product(x: Tensor, expert_indices: Tensor) -> Tensor:
        return torch.einsum("tani,taoi->tano", x, w13.weight[expert_indices])

    return product, (fake_empty(1, args.n_active, 2, args.dim), routing(args)[0])


def block(args: ModelArgs, length: int = 256, cache_class: type[KVCache] = KVCache, ranks: int = 1):
    """The first block with experts, one token, a cache of `length` positions; rank 0's shard."""
    shard = ModelShard(args, {}, "tensor", 0, ranks)
    model, layer = shard.model, len(args.dense_layers)
    move_to_fake_gpu(model)
    shard.insert_collectives()
    if ranks > 1:
        fuse_decode_attention(model)
    model.setup_cache(1, length, cache_class)
    window, rope_width = model.layers[layer].attention.window, model.rope_table.shape[-1]
    final_norm: RMSNorm | nn.LayerNorm = model.norm

    def step(x: Tensor, normed: Tensor, positions: Tensor, rope: Tensor, bias: Tensor):
        context = Context(rope, positions=positions, masks={window: Mask(bias)})
        return model.layers[layer](x, normed, context, final_norm)

    return step, (
        fake_empty(1, 1, args.dim),
        fake_empty(1, 1, args.dim),
        fake_empty(1, 1, dtype=torch.int64),
        fake_empty(1, 1, 1, rope_width, dtype=torch.float32),
        fake_empty(1, 1, length),
    )


def begin(args: ModelArgs, length: int = 256):
    """What comes before the layers, as the fused kernels' runner compiles it."""
    model = build_model(args)
    move_to_fake_gpu(model)
    model.setup_cache(1, length)

    def step(tokens: Tensor, positions: Tensor):
        x, context = begin_plainly(model, tokens, positions)
        return x, context.rope, *(mask.bias for mask in context.masks.values())

    return step, tuple(fake_empty(1, 1, dtype=torch.int64) for _ in range(2))


def long_attention(args: ModelArgs, queries: int):
    """Attention with few queries over a cache of 4,096 positions. It needs Dynamo."""
    H, K, C, length = args.n_head, args.n_kv_head, args.head_dim, 4096

    def step(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        blocks = blocks_in_use(positions, length, None)
        return attend_blocks(q, k, v, positions, blocks, None)

    keys, values = (fake_empty(1, K, length, C) for _ in range(2))
    positions = fake_empty(1, queries, dtype=torch.int64)
    return step, (fake_empty(1, queries, H, C), keys, values, positions)


def indexed_attention(args: ModelArgs, cache_class: type[KVCache], length: int = 32768):
    """Attention that gathers the positions an index chooses, one token. It needs Dynamo."""
    layer = IndexedAttention(args)
    move_to_fake_gpu(layer)
    layer.allocate(1, length, cache_class, fake_empty(1))

    def step(x: Tensor, positions: Tensor, rope: Tensor, bias: Tensor) -> Tensor:
        return layer(x, Context(rope, positions=positions, masks={None: Mask(bias)}))

    rope = fake_empty(1, 1, 1, 2 * args.head_dim, dtype=torch.float32)
    positions = fake_empty(1, 1, dtype=torch.int64)
    return step, (fake_empty(1, 1, args.dim), positions, rope, fake_empty(1, 1, length))


def ngrams(args: ModelArgs, format: str | None = None):
    """Embeddings of one token's n-grams. It needs Dynamo."""
    layer = NgramEmbedding(args, 0)
    if format:
        width = layer.table.weight.shape[1]
        layer.table = PackedLinear(layer.table, format, FORMATS[format].default_group(width))
    move_to_fake_gpu(layer)
    layer.allocate(1, 4096, fake_empty(1))

    def step(x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        layer.keep(tokens, positions)
        return layer(x, Context(x, positions=positions))

    tokens, positions = (fake_empty(1, 1, dtype=torch.int64) for _ in range(2))
    return step, (fake_empty(1, 1, args.streams, args.dim), tokens, positions)


def between_sublayers(args: ModelArgs):
    """What Inductor computes of residual streams for the experts, one token."""
    layer, S = fake_block(args, 0), args.streams

    def step(x: Tensor, parts: Tensor, y: Tensor, products: Tensor) -> tuple[tuple, Tensor]:
        streams, normed = before_ffn(layer, Streams(x, parts), y)
        return streams, run_combine(layer.ffn_mixer, normed, products)

    x, y, products = (
        fake_empty(1, 1, *shape) for shape in ((S, args.dim), (args.dim,), (S * args.dim,))
    )
    return step, (x, fake_empty(1, 1, S, S, dtype=torch.float32), y, products)


# All cases ----------------------------------------------------------------------------------------


ARCHES = ("Mixtral-8x7B", "Qwen3-30B-A3B")
Case = tuple[str, Callable, tuple]


def plain_cases(arch: str) -> Iterator[Case]:
    """Yield the cases of one architecture with plain weights and a plain cache."""
    args = first_layers(ARCHITECTURES[arch], 1)
    for case in (experts, library_products, early_reader):
        yield f"{arch} {case.__name__}", case, (args,)
    for count in (0, args.vocab_size):
        yield f"{arch} sampling {count and 'all'}", sampling, (args, count)
    yield f"{arch} block KVCache", block, (args, 1024, KVCache)


def packed_cases(arch: str, formats: Iterable[str]) -> Iterator[Case]:
    """Yield the cases of one architecture with packed weights."""
    args = first_layers(ARCHITECTURES[arch], 1)
    for format in formats:
        for case in (packed_experts, packed_linear):
            yield f"{arch} {case.__name__} {format}", case, (args, format)


def latent_cases(arch: str, layers: int, *caches: type[KVCache]) -> Iterator[Case]:
    """Yield the cases of one architecture with latent attention, over caches of these classes."""
    args = first_layers(ARCHITECTURES[arch], layers)
    yield f"{arch} experts", experts, (args,)
    for cache_class in caches:
        yield f"{arch} block {cache_class.__name__}", block, (args, 1024, cache_class)


# One format of each way to multiply, but for fp8b, which takes Inductor 3 s.
QUICK_FORMATS = "int8", "int4", "mxfp4", "hqq4", "q6_k", "q4_k"


def quick_cases() -> Iterator[Case]:
    """Yield the name of each case, the function that makes it, and the function's arguments.

    Every one of QUICK_FORMATS is there with one of two architectures.
    """
    gpt_oss = ARCHITECTURES["gpt-oss-20b"]  # biases, sinks, a clamped SwiGLU, a published format
    yield "gpt-oss-20b experts", experts, (gpt_oss,)
    yield "gpt-oss-20b begin", begin, (first_layers(gpt_oss, 2),)
    yield "gpt-oss-20b packed_experts mxfp4", packed_experts, (gpt_oss, "mxfp4")
    yield from latent_cases("DeepSeek-V2-Lite", 2, Int8KVCache)
    args = first_layers(ARCHITECTURES["Mixtral-8x7B"], 1)
    yield "Mixtral-8x7B block of 2", block, (args, 256, KVCache, 2)
    yield "long_attention 1", long_attention, (ARCHITECTURES[ARCHES[1]], 1)
    for count in (4, 17):
        yield f"tokens {count}", several_tokens, (ARCHITECTURES[ARCHES[1]], count)
    yield from plain_cases(ARCHES[0])
    for row, arch in enumerate(ARCHES):
        yield from packed_cases(arch, QUICK_FORMATS[row::2])


def slow_cases() -> Iterator[Case]:
    """Yield the other cases."""
    yield "gpt-oss-20b block", block, (first_layers(ARCHITECTURES["gpt-oss-20b"], 1),)
    args = first_layers(ARCHITECTURES["DeepSeek-V2-Lite"], 2)
    yield "DeepSeek-V2-Lite block KVCache", block, (args, 1024, KVCache)
    qwen4 = ARCHITECTURES["Qwen3.8-Flash-Next"]
    for cache_class in (KVCache, Int8KVCache):
        name = f"indexed_attention {cache_class.__name__}"
        yield name, indexed_attention, (qwen4, cache_class)
    for format in (None, "fp8"):
        yield f"ngrams {format}", ngrams, (qwen4, format)
    yield "between sublayers", between_sublayers, (qwen4,)
    yield from latent_cases("DeepSeek-V3", 4, KVCache, Int8KVCache)
    args = first_layers(ARCHITECTURES["OLMoE-1B-7B"], 1)  # it all-reduces in its attention, too
    yield "OLMoE-1B-7B block of 2", block, (args, 256, KVCache, 2)
    for queries in (16, 32):  # a draft, a short prompt
        yield f"long_attention {queries}", long_attention, (ARCHITECTURES[ARCHES[1]], queries)
    yield from plain_cases(ARCHES[1])
    for row, arch in enumerate(ARCHES):
        args = first_layers(ARCHITECTURES[arch], 1)
        for cache_class in (Int8KVCache, CopiedKVCache):
            yield f"{arch} block {cache_class.__name__}", block, (args, 1024, cache_class)
        yield f"{arch} sampling", sampling, (args,)
        quick = QUICK_FORMATS[row::2]
        yield from packed_cases(arch, (name for name in FORMATS if name not in quick))


WITH_DYNAMO = long_attention, indexed_attention, ngrams, between_sublayers, several_tokens


def main() -> int:
    cases = {"quick": quick_cases, "slow": slow_cases}[sys.argv[1]]
    pretend_gpu()
    configure_inductor()
    torch.set_default_dtype(torch.bfloat16)
    results = {}
    for name, case, arguments in cases():
        with_dynamo = case in WITH_DYNAMO
        generate = compiled_code if with_dynamo else cuda_code
        with inductor_config.patch(BEGIN_OPTIONS if case is begin else {}):
            code = generate(lambda case=case, arguments=arguments: case(*arguments))
        results[name] = summary(code)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
