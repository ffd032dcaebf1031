"""Choosing the next token on the device, without synchronization. Shapes are those of model.py.

Each row of a batch has its own controls. Its noise is a function of its seed and the token's
position, so that its tokens depend neither on its neighbors nor on the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ops.plain.topk import argmax, largest_by_rank, running_sum

MAX_CANDIDATES = 256  # likeliest tokens sampled from: one compiled step serves any smaller top_k
TOP_LOGPROBS = 20  # maximum `top_logprobs`
NOT_FINITE = -1  # the token of a row whose largest logit is NaN or infinite


class NotFiniteError(ValueError):
    """Says that a token was NOT_FINITE, with the causes and fixes."""

    def __init__(self):
        super().__init__(
            "the logits are not finite: a weight is damaged, or overflows its dtype; check it with "
            "python checkpoint.py DIR --verify, or use --dtype bf16"
        )


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Temperature 0 is greedy; top_k None keeps the whole vocabulary.

    Raises ValueError naming the option that is out of its range.
    """

    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    # Of runtime/logit_edits.py. logit_bias: {token id: number added to its logit}.
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self):
        limits = {
            "temperature": (self.temperature >= 0, "at least 0 (0 is greedy)"),
            "top_k": (
                self.top_k is None or self.top_k >= 1,
                "at least 1 (1 is greedy, a large one keeps every token)",
            ),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p < 1, "at least 0 and below 1"),
            # Logits that are divided or multiplied by more would not be finite.
            "repetition_penalty": (
                1e-9 <= self.repetition_penalty <= 1e9,
                "from 1e-9 to 1e9 (1 is none)",
            ),
            "seed": (
                self.seed is None or 0 <= self.seed < 2**63,
                "at least 0 and below 2 ** 63",
            ),
        }
        for name, (valid, rule) in limits.items():
            if not valid:
                raise ValueError(f"--{name} {getattr(self, name)}: it must be {rule}")

    @property
    def edits_logits(self) -> bool:
        """Whether steps need `edit_logits`."""
        return bool(self.frequency_penalty or self.presence_penalty or self.logit_bias)

    def with_seed(self, seed: int) -> "Sampling":
        """Return the same settings with this seed, modulo 2 ** 63."""
        return replace(self, seed=seed % 2**63)

    def controls(self, vocab_size: int) -> Tensor:
        """Return the `controls` of `shortlist`, fp32 [5]."""
        top_k = min(self.top_k or vocab_size, vocab_size) if self.temperature else 1
        top_p = self.top_p if self.top_p < 1 else 2.0  # a rounded sum may reach 1 before the end
        temperature = self.temperature or 1.0
        return torch.tensor((temperature, top_k, top_p, self.min_p, self.repetition_penalty))

    def candidates(self, vocab_size: int) -> int:
        """Return how many of the likeliest tokens a step samples from; 0 is greedy.

        There are few values, since each is another compiled step.
        """
        if self.temperature == 0:
            return 0
        few = self.top_k is not None and self.top_k <= MAX_CANDIDATES
        return min(MAX_CANDIDATES, vocab_size) if few else vocab_size


# Noise --------------------------------------------------------------------------------------------


def uniform(seeds: Tensor, position: Tensor, index: Tensor, stream: int = 0) -> Tensor:
    """Return fp32 [B, N] from the open interval (0, 1): a hash of seed, position and index.

    seeds int64 [B], position int64 [B, 1], index int64 [B, N] or [N]. stream: its numbers are those
    of another seed. The hash is SplitMix64's (Steele, Lea & Flood 2014, figure 15).
    """
    key = scramble(scramble(seeds.unsqueeze(1) ^ stream) + position * WEYL)
    # Xor: Inductor would compute index * WEYL as an address, which overflows.
    bits = shift_right(scramble(key ^ index), 32)
    # The largest fp32 below 1: half of the values near 1 would be rounded to it.
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def exponential(seeds: Tensor, position: Tensor, index: Tensor, stream: int = 0) -> Tensor:
    """Return standard exponential noise above 0, fp32 [B, N]. The rest is as in `uniform`."""
    return -torch.log1p(-uniform(seeds, position, index, stream))


class Noise(NamedTuple):
    """What a rule of sampling draws with: noise for any token of each row."""

    seeds: Tensor  # int64 [B]
    position: Tensor  # int64 [B, 1], that of the token before the drawn one
    candidates: int  # how many of the likeliest tokens a rule samples from

    def of(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B, N] -> standard exponential noise above 0, fp32 [B, N]."""
        return exponential(self.seeds, self.position, tokens)


# SplitMix64's constants, as signed numbers: 2 ** 64 / golden ratio, and two of its finalizer.
WEYL = 0x9E3779B97F4A7C15 - 2**64
FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def scramble(x: Tensor) -> Tensor:
    """int64 -> int64: every bit of the result depends on every bit of x."""
    x = (x ^ shift_right(x, 30)) * FACTORS[0]
    x = (x ^ shift_right(x, 27)) * FACTORS[1]
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, count: int) -> Tensor:
    """Shift as unsigned numbers."""
    return (x >> count) & ((1 << (64 - count)) - 1)


# Rules --------------------------------------------------------------------------------------------


def penalize(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Make tokens in `seen` (bool [B, V]) less likely: logits [B, V] (Keskar et al. 2019, 4.1).

    penalty [B, 1], or [1, 1] for all rows.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def shortlist(logits: Tensor, controls: Tensor, seen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """logits fp32 [B, V] -> the `count` likeliest tokens and their weights fp32 [B, count].

    controls fp32 [B, 5], or [1, 5] for all rows: temperature, top_k, top_p, min_p, repetition
    penalty (of tokens in `seen`, bool [B, V]). Weights are proportional to the probabilities;
    excluded tokens have 0. A row whose largest logit is not finite has NOT_FINITE as every token,
    so that every rule chooses that.
    """
    tokens, weights, finite = rank_candidates(logits, controls, seen, count)
    return torch.where(finite, tokens, NOT_FINITE), weights


def rank_candidates(
    logits: Tensor, controls: Tensor, seen: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `shortlist`, with valid tokens in every row, and whether it is finite, bool [B, 1]."""
    temperature, top_k, top_p, min_p, penalty = controls.split(1, dim=-1)
    # Ranks need comparable numbers above -inf: a NaN would give indices outside of the vocabulary.
    logits = penalize(logits, seen, penalty).nan_to_num(nan=float("inf"), posinf=float("inf"))
    values, tokens = (largest_by_rank if logits.is_cuda else torch.topk)(logits, count)
    among = torch.arange(count, device=logits.device) < top_k
    probabilities = torch.where(among, values / temperature, float("-inf")).softmax(dim=-1)
    likelier = running_sum(probabilities) - probabilities  # the mass before each candidate
    keep = among & (likelier < top_p) & (probabilities >= min_p * probabilities[:, :1])
    finite = values[:, :1].abs() < torch.finfo(values.dtype).max  # nan_to_num maps -inf to -max
    return tokens, torch.where(keep, probabilities, 0.0), finite


def sample(logits: Tensor, controls: Tensor, seen: Tensor, noise: Noise | None) -> Tensor:
    """logits fp32 [B, V] -> tokens [B, 1], NOT_FINITE for a row whose largest logit is not finite.

    controls and seen are those of `shortlist`.

    The candidate with the largest p / noise is a draw from p (Gumbel's trick, without the sum and
    search of `torch.multinomial`). noise None: greedy. The kernels of ops/step/token_draw.py draw
    the same tokens.
    """
    if noise is None:
        logits = penalize(logits, seen, controls[:, 4:])
        tokens = argmax(logits)  # NaN is the largest
        return torch.where(logits.gather(-1, tokens).isfinite(), tokens, NOT_FINITE)
    tokens, weights = shortlist(logits, controls, seen, noise.candidates)
    return tokens.gather(-1, argmax(weights / noise.of(tokens)))


# Steps --------------------------------------------------------------------------------------------


class StepState(NamedTuple):
    """What a step reads and writes in place, of each row."""

    token: Tensor  # int64 [B, 1], the newest
    position: Tensor  # int64 [B, 1], of `token`
    last: Tensor  # int64 [B]: 0; -1 for an idle row, which stays where it is
    seen: Tensor  # bool [B, V]: tokens of prompt and answer
    controls: Tensor  # fp32 [B, 5], of `shortlist`
    seeds: Tensor  # int64 [B]


def make_sample_step(rule: Callable) -> Callable:
    """Return (state, logits, count) -> None: `rule`, then `step_to`.

    rule: (logits, controls, seen, noise) -> tokens [B, 1], such as `sample`. count: candidates.
    """

    def sample_step(state: StepState, logits: Tensor, count: int) -> None:
        # The noise of a token is keyed by the position of the token before it.
        noise = Noise(state.seeds, state.position, count) if count else None
        step_to(state, rule(logits, state.controls, state.seen, noise))

    return sample_step


def step_to(state: StepState, chosen: Tensor) -> None:
    """Set `token` to the chosen one [B, 1], mark it in `seen`, increment `position`.

    NOT_FINITE marks the last token of the vocabulary, until the next prompt clears `seen`.
    """
    state.token.copy_(chosen)
    state.position.add_(state.last.unsqueeze(1) + 1)
    rows = torch.arange(len(state.seen), device=state.seen.device)
    # Index by `chosen`: with programmatic dependent launch, Inductor's kernel would read `token`
    # before the kernel that writes it has ended. True is a tensor: a bool would be copied from the
    # host.
    state.seen[rows, chosen.squeeze(1)] = torch.ones_like(rows, dtype=torch.bool)
