"""Hashes of n-grams of token ids -> rows of a table (qwen4_exp's per-layer embedding).

An n-gram is a token and the n - 1 tokens before it. Its hash is the XOR of each id times an odd
multiplier; each head takes it modulo a prime of its own, and has that many rows of the table.

Everything follows from a few numbers of config.json. The multipliers are those of transformers:
outputs of SplitMix64 (Steele et al. 2014, figure 9), small enough that no product exceeds 63 bits.
"""

import math
from collections.abc import Iterator
from itertools import count, islice

import torch
from torch import Tensor

BITS = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # what SplitMix64 adds to its state for each output
LAYER_STEP = 10007  # distance of the seeds of two layers


def mix_bits(state: int) -> int:
    """Return the output of SplitMix64 of a state, 64 bits."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & BITS
    state = (state ^ state >> 27) * 0x94D049BB133111EB & BITS
    return state ^ state >> 31


def hash_multipliers(vocab_size: int, order: int, number: int, seed: int) -> list[int]:
    """Return the multipliers of a token and of the order - 1 tokens before it.

    number: of the layer among those with n-grams, from 0.
    """
    bound = max(1, ((1 << 63) - 1) // max(vocab_size, 1) // 2)
    first = seed + LAYER_STEP * number
    # The generator adds GOLDEN to its state before each output; here the state has one more.
    states = ((first + GOLDEN * (n + 2)) & BITS for n in range(order))
    return [2 * (mix_bits(state) % bound) + 1 for state in states]


def primes_from(start: int) -> Iterator[int]:
    """Yield the primes from `start` on, in rising order."""
    for n in count(max(start, 2)):
        if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)):
            yield n


def head_primes(base: int, heads: int, number: int) -> tuple[int, ...]:
    """Return the rows of each of a layer's heads: the primes from `base` on that are its own.

    number: of the layer, from 0; each has the primes after those of the layer before.
    """
    return tuple(islice(primes_from(base), heads * number, heads * (number + 1)))


def ngram_rows(ids: Tensor, multipliers: Tensor, primes: Tensor, begins: Tensor) -> Tensor:
    """Return the rows of each token's n-grams, for n from 2 on: ids [..., n] -> int64 [..., heads].

    ids: a token, then those before it, the nearest first; multipliers int64 [n]. primes, begins
    int64 [heads]: the rows of each head and where they begin. Heads of shorter n-grams come first.
    """
    heads = len(primes) // (ids.shape[-1] - 1)
    products = (ids * multipliers).unbind(-1)
    mixed, rows = products[0], []
    for product, sizes in zip(products[1:], primes.split(heads), strict=True):
        mixed = mixed ^ product
        rows.append(mixed.unsqueeze(-1) % sizes)
    return torch.cat(rows, dim=-1) + begins


def within_segment(ids: Tensor, end: int) -> Tensor:
    """Replace what is before the last `end` before a token by `end`: ids [..., n] -> same.

    ids: a token, then those before it, the nearest first.
    """
    own, *before = ids.unbind(-1)
    kept, is_over = [own], torch.zeros_like(own, dtype=torch.bool)
    for token in before:
        is_over = is_over | (token == end)
        kept.append(torch.where(is_over, end, token))
    return torch.stack(kept, dim=-1)
