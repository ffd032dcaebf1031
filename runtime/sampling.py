"""Choosing the next token on the device, without synchronisation. Shapes are those of model.py."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ops.topk import largest_by_rank

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

    def __post_init__(self):
        limits = {
            "temperature": (self.temperature >= 0, "at least 0 (0 is greedy)"),
            "top_k": (
                self.top_k is None or self.top_k >= 1,
                "at least 1 (1 is greedy, a large one keeps every token)",
            ),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p < 1, "at least 0 and below 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0 (1 is none)"),
            "seed": (
                self.seed is None or 0 <= self.seed < 2**63,
                "at least 0 and below 2 ** 63",
            ),
        }
        for name, (valid, rule) in limits.items():
            if not valid:
                raise ValueError(f"--{name} {getattr(self, name)}: it must be {rule}")

    def controls(self, vocab_size: int) -> Tensor:
        """Return the `controls` of `shortlist`, fp32 [5]."""
        top_k = min(self.top_k or vocab_size, vocab_size)
        top_p = self.top_p if self.top_p < 1 else 2.0  # a rounded sum may reach 1 before the end
        temperature = self.temperature or 1.0
        return torch.tensor((temperature, top_k, top_p, self.min_p, self.repetition_penalty))

    def candidates(self, vocab_size: int) -> int:
        """Return among how many of the likeliest tokens a step chooses; 0 is greedy."""
        if self.temperature == 0:
            return 0
        return min(max(self.top_k or vocab_size, MAX_CANDIDATES), vocab_size)


def penalize(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Make tokens in `seen` (bool [B, V]) less likely: logits [B, V] (Keskar et al. 2019, 4.1)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def shortlist(logits: Tensor, controls: Tensor, seen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """logits fp32 [B, V] -> the `count` likeliest tokens and their weights fp32 [B, count].

    controls fp32 [5]: temperature, top_k, top_p, min_p, repetition penalty (of tokens in `seen`,
    bool [B, V]). Weights are proportional to the probabilities; excluded tokens have 0. A row whose
    largest logit is not finite has NOT_FINITE as every token, so that every rule chooses that.
    """
    tokens, weights, finite = rank_candidates(logits, controls, seen, count)
    return torch.where(finite, tokens, NOT_FINITE), weights


def rank_candidates(
    logits: Tensor, controls: Tensor, seen: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `shortlist`, with valid tokens in every row, and whether it is finite, bool [B, 1]."""
    temperature, top_k, top_p, min_p, penalty = controls.unbind()
    # Ranks need comparable numbers above -inf: a NaN would give indices outside of the vocabulary.
    logits = penalize(logits, seen, penalty).nan_to_num(nan=float("inf"), posinf=float("inf"))
    values, tokens = (largest_by_rank if logits.is_cuda else torch.topk)(logits, count)
    among = torch.arange(count, device=logits.device) < top_k
    probabilities = torch.where(among, values / temperature, float("-inf")).softmax(dim=-1)
    likelier = probabilities.cumsum(dim=-1) - probabilities  # the mass before each candidate
    keep = among & (likelier < top_p) & (probabilities >= min_p * probabilities[:, :1])
    finite = values[:, :1].abs() < torch.finfo(values.dtype).max  # nan_to_num maps -inf to -max
    return tokens, torch.where(keep, probabilities, 0.0), finite


def sample(logits: Tensor, controls: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    """logits fp32 [B, V] -> tokens [B, 1], NOT_FINITE for a row whose largest logit is not finite.

    controls and seen are those of `shortlist`.

    noise [B, N]: standard exponential, above 0. The largest p / noise among the N likeliest
    tokens is a draw from p (Gumbel's trick, without the sum and search of `torch.multinomial`).
    None: greedy.
    """
    if noise is None:
        logits = penalize(logits, seen, controls[4])
        tokens = logits.argmax(dim=-1, keepdim=True)  # argmax takes a NaN for the largest
        return torch.where(logits.gather(-1, tokens).isfinite(), tokens, NOT_FINITE)
    tokens, weights = shortlist(logits, controls, seen, noise.shape[-1])
    return tokens.gather(-1, (weights / noise).argmax(dim=-1, keepdim=True))


def make_sample_step(rule: Callable) -> Callable:
    """Return (token, position, seen, logits, controls, noise) -> None: `rule`, then `step_to`.

    rule: (logits, controls, seen, noise) -> tokens [B, 1], such as `sample`.
    """

    def sample_step(
        token: Tensor,
        position: Tensor,
        seen: Tensor,
        logits: Tensor,
        controls: Tensor,
        noise: Tensor | None,
    ) -> None:
        step_to(token, position, seen, rule(logits, controls, seen, noise))

    return sample_step


def step_to(token: Tensor, position: Tensor, seen: Tensor, chosen: Tensor) -> None:
    """Set `token` [B, 1] to the chosen one, increment `position` [B, 1], mark it in `seen`.

    NOT_FINITE marks the last token of the vocabulary, until the next prompt clears `seen`.
    """
    token.copy_(chosen)
    position.add_(1)
    rows = torch.arange(len(seen), device=seen.device)
    # Index by `chosen`: with programmatic dependent launch, Inductor's kernel would read `token`
    # before the kernel that writes it has ended. True is a tensor: a bool would be copied from the
    # host.
    seen[rows, chosen.squeeze(1)] = torch.ones_like(rows, dtype=torch.bool)
