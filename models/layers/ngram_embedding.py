"""Embeddings of each token's n-grams, added to the residual before a layer (qwen4_exp's PLE).

Rows of a large table are looked up by hashes of the token and of those before it
(models/layers/ngram_hash.py). With S residual streams:

    e = the rows, joined          k_s = norm(wk e)_s          v = wv e
    a_s = k_s . norm(x)_s / sqrt(D)          u_s = sigmoid(sign(a_s) sqrt|a_s|) v
    x_s += u_s + silu(conv(norm(u)_s))

The convolution is causal and over each number by itself, of W inputs that are `order` positions
apart. The formulas are those of transformers' Qwen4ExpTextPLELayer.

The table is 48 GiB at the published size. So it stays in host memory (`IN_HOST_MEMORY`), and a
token's few rows, 2.5 KB, are read from there by the kernel that looks them up. It may be in any
format: a row is unpacked when it is looked up.

Token ids are kept by position, as keys and values are: ids past a sequence's end are overwritten
before they are read. The convolution's inputs are in a ring (models/layers/short_conv.py).

Letters: E numbers of a token's rows, N = S D channels of the convolution, W its width.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from formats import FORMATS
from formats.packed import Packed
from model import Chunk, Context, KVCache, Linear
from models.layers.hyper_connections import StreamBlock, StreamNorm, Streams
from models.layers.joined_state import JoinedState
from models.layers.ngram_hash import hash_multipliers, head_primes, ngram_rows, within_segment
from models.layers.pending_state import Convolution, call_place
from models.layers.short_conv import allocate_inputs
from models.tensors import WHOLE, Recipe, Recipes, conv_recipe, copy_of
from ops.declared import BlockAdditions
from ops.inductor import materialize
from ops.plain.short_conv import causal_conv

TABLE = "ple.ple_embedding.ngram_embedding"  # its published name
IN_HOST_MEMORY = ("ngrams.table",)  # modules whose parameters stay there: model.host_modules


class NgramSizes(NamedTuple):
    """What config.json says of n-grams."""

    order: int  # tokens of the longest n-gram
    heads: int  # of each n
    dim: int  # E
    base: int  # each head has a prime number of rows, of this size at least
    multiple: int  # the table's rows are a multiple of it
    seed: int
    vocab_size: int
    end: int  # token that ends a text: n-grams do not reach beyond it
    conv_width: int  # W

    @property
    def all_heads(self) -> int:
        return (self.order - 1) * self.heads

    @property
    def reach(self) -> int:
        """Positions that the convolution spans."""
        return (self.conv_width - 1) * self.order + 1

    def primes(self, number: int) -> tuple[int, ...]:
        """Return the rows of each head of the `number`-th layer with n-grams, from 0."""
        return head_primes(self.base, self.all_heads, number)

    def rows(self, number: int) -> int:
        """Return the rows of the layer's table."""
        return -(-sum(self.primes(number)) // self.multiple) * self.multiple


class NgramEmbedding(nn.Module):
    """Residual streams x [B, Q, S, D] -> what is added to them.

    args.ngram_sizes: an `NgramSizes`. number: of the layer among those with n-grams, from 0. Call
    `keep` with a call's tokens before the layers run.
    """

    def __init__(self, args, number: int):
        super().__init__()
        sizes, S, D = args.ngram_sizes, args.streams, args.dim
        self.sizes, self.number, self.shape = sizes, number, (S, D)
        # A Linear, so that formats know it: its rows are those of the table.
        self.table = Linear(sizes.dim // sizes.all_heads, sizes.rows(number))
        self.wkv = Linear(sizes.dim, (S + 1) * D)  # keys of all streams, then the value
        self.k_norm, self.q_norm, self.conv_norm = (StreamNorm(args) for _ in range(3))
        self.conv = Convolution(S * D, sizes.conv_width)

    def allocate(self, batch: int, length: int, like: Tensor) -> JoinedState:
        """Make this layer's state, on the device of `like`, and return it."""
        sizes, device = self.sizes, like.device
        primes = sizes.primes(self.number)
        multipliers = hash_multipliers(sizes.vocab_size, sizes.order, self.number, sizes.seed)
        begins = accumulate(primes[:-1], initial=0)
        hashing = {"multipliers": multipliers, "primes": primes, "begins": [*begins]}
        for name, values in hashing.items():
            self.register_buffer(name, torch.tensor(values).to(device), persistent=False)
        self.ids = KVCache((batch, 1, length, 1), torch.int64, device, parts=1)
        channels = len(self.conv.weight)
        self.inputs = allocate_inputs(batch, length, sizes.reach, channels, like)
        return JoinedState(self.ids, self.inputs)

    def keep(self, tokens: Tensor, span: Tensor | Chunk) -> None:
        """Store a call's tokens [B, Q] at their positions; span: as in `Transformer.begin`."""
        chunk, positions = (span, None) if isinstance(span, Chunk) else (None, span)
        context = Context(tokens, chunk, positions)
        values = tokens.clamp(min=0).view(*tokens.shape, 1, 1, 1)
        self.ids.write(self.ids.kv, values, context)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [B, Q, S, D] -> the same shape."""
        S, D = self.shape
        B, Q = x.shape[:2]
        rows, first = call_place(context, B, Q, x.device)
        e = self.look_up(rows, first + torch.arange(Q, device=x.device), x.dtype)
        k, v = self.wkv(materialize(e)).split((S * D, D), dim=-1)
        k, q = self.k_norm(k.unflatten(-1, (S, D))), self.q_norm(x)
        scores = (k.float() * q.float()).sum(dim=-1, keepdim=True) * D**-0.5
        scores = scores.abs().clamp(min=1e-6).sqrt() * scores.sign()
        u = (scores.sigmoid() * v.unsqueeze(-2)).to(x.dtype)
        return materialize(u + self.convolve(self.conv_norm(u), context))

    def look_up(self, rows: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of the table for tokens at positions [B, Q] of rows [B]: [B, Q, E]."""
        places = positions.unsqueeze(-1) - torch.arange(self.sizes.order, device=rows.device)
        ids = self.ids.kv[0, :, 0, :, 0][rows.view(-1, 1, 1), places.clamp(min=0)]
        ids = within_segment(torch.where(places < 0, self.sizes.end, ids), self.sizes.end)
        index = ngram_rows(ids, self.multipliers, self.primes, self.begins)
        return table_rows(self.table, index).to(dtype).flatten(-2)

    def convolve(self, x: Tensor, context: Context) -> Tensor:
        """x [B, Q, S, D] -> silu of the convolution, same shape."""
        sizes = self.sizes
        inputs = self.inputs.append(x.flatten(2), context)
        y = causal_conv(inputs, self.conv.weight, None, dilation=sizes.order)
        return F.silu(y).view_as(x)


class NgramBlock(StreamBlock):
    """A block before which n-grams' embeddings are added. number: as in `NgramEmbedding`."""

    def __init__(self, args, layer: int, number: int):
        super().__init__(args, layer)
        self.ngrams = NgramEmbedding(args, number)

    def allocate(
        self, batch: int, length: int, cache_class: type[KVCache], like: Tensor
    ) -> JoinedState:
        own = super().allocate(batch, length, cache_class, like)
        return JoinedState(own, self.ngrams.allocate(batch, length, like))

    def before_attention(
        self, x: Tensor, normed: Tensor, context: Context
    ) -> tuple[Streams, Tensor]:
        x = materialize(x + self.ngrams(x, context))
        return super().before_attention(x, materialize(self.attention_norm(x)), context)

    def fused_decode_settings(self) -> BlockAdditions:
        return super().fused_decode_settings()


def table_rows(table: nn.Module, index: Tensor) -> Tensor:
    """Return rows of a table, a Linear that may be packed: index int64 [...] -> [..., width]."""
    if isinstance(table, Packed):
        return FORMATS[table.format].unpack(table.parts(index), table.group)
    return table.weight[index]


def ngram_recipes(args, number: int, parts: int) -> Recipes:
    """A layer's n-gram embeddings. parts: tensors by which the table is published, 0: one."""
    sizes, S, D = args.ngram_sizes, args.streams, args.dim
    N, rows = S * D, sizes.rows(number)
    each = -(-rows // max(parts, 1))
    shards: dict[str, tuple] = {
        f"{TABLE}.shard_{n}.weight": (slice(begin, min(begin + each, rows)),)
        for n, begin in enumerate(range(0, rows, each))
    }
    if not parts:
        shards = {f"{TABLE}.weight": WHOLE}
    wkv: dict[str, tuple] = {
        "ple.key_proj.weight": (slice(0, N),),
        "ple.value_proj.weight": (slice(N, N + D),),
    }

    def norm(name: str) -> Recipe:
        def per_stream(weight: Tensor) -> Tensor:
            return weight.view(S, D) + 1

        return copy_of(f"ple.{name}.weight", N, transform=per_stream, dtype=torch.float32)

    return {
        "ngrams.table.weight": Recipe((rows, sizes.dim // sizes.all_heads), shards),
        "ngrams.wkv.weight": Recipe((N + D, sizes.dim), wkv),
        "ngrams.k_norm.weight": norm("norm_key"),
        "ngrams.q_norm.weight": norm("norm_query"),
        "ngrams.conv_norm.weight": norm("norm_conv"),
        "ngrams.conv.weight": conv_recipe("ple.conv1d.weight", N, sizes.conv_width),
    }
