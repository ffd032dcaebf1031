"""Add a sampling rule: locally typical sampling (Meister et al. 2022, https://arxiv.org/abs/2202.00666).

    python examples/custom_sampling.py

A rule maps (logits [B, V], controls [B, 5], seen [B, V], noise or None) to tokens [B, 1].
It runs on the device in the compiled step, so it must not read a value on the host. A logit
bias is simpler: `lambda logits, *rest: sample(logits + bias, *rest)`.
"""

from collections.abc import Callable

from torch import Tensor

from generate import embedded_checkpoint, generate
from runtime.loading import load_model
from runtime.sampling import Noise, Sampling, sample, shortlist
from runtime.session import Session, SessionOptions
from tokenizer import load_tokenizer

PROMPT = "def read_lines(path):\n"


def typical(mass: float) -> Callable[..., Tensor]:
    """Return the rule that keeps the most typical candidates, up to `mass` in (0, 1].

    A token is typical if its surprise, -log p, is close to the entropy of the distribution.
    """

    def rule(logits: Tensor, controls: Tensor, seen: Tensor, noise: Noise | None) -> Tensor:
        if noise is None:  # temperature 0
            return sample(logits, controls, seen, noise)
        # The likeliest tokens after temperature, top_k, top_p, min_p and repetition penalty.
        tokens, weights = shortlist(logits, controls, seen, noise.candidates)
        p = weights / weights.sum(dim=-1, keepdim=True)
        surprise = -p.clamp_min(1e-30).log()
        entropy = (p * surprise).sum(dim=-1, keepdim=True)
        order = (surprise - entropy).abs().argsort(dim=-1)
        p, tokens = p.gather(-1, order), tokens.gather(-1, order)
        p = p.masked_fill(p.cumsum(dim=-1) - p >= mass, 0.0)
        # Gumbel's trick: the largest p / noise is a draw from p.
        return tokens.gather(-1, (p / noise.of(tokens)).argmax(dim=-1, keepdim=True))

    return rule


def main() -> None:
    path = embedded_checkpoint()
    model, tokenizer = load_model(path), load_tokenizer(path)
    for mass in (0.2, 0.95):
        session = Session(model, 256, SessionOptions(sample_rule=typical(mass)))
        result = generate(session, tokenizer, PROMPT, 60, Sampling(temperature=1.0, seed=1))
        print(f"--- typical, mass {mass}\n{PROMPT}{result['text']}")


if __name__ == "__main__":
    main()
