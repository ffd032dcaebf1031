"""Figures of a run in words, for the terminal."""


def in_bytes(count: float) -> str:
    """Return a number of bytes in GB, MB or kB (powers of 1000), with three digits."""
    if count >= 0.9995e9:
        return f"{count / 1e9:,.0f} GB" if count >= 99.95e9 else f"{count / 1e9:.3g} GB"
    if count >= 0.9995e6:
        return f"{count / 1e6:.0f} MB" if count >= 99.95e6 else f"{count / 1e6:.3g} MB"
    return f"{count / 1e3:.0f} kB"


def in_seconds(seconds: float) -> str:
    """Return a time in s or ms."""
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def in_tokens(count: int) -> str:
    """Return a number of tokens."""
    return counted(count, "token")


def counted(count: int, what: str) -> str:
    """Return a number of things. what: the name of one."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def per_second(rate: float | None) -> str:
    """Return " at N/s"; "" if there is no rate."""
    if rate is None:
        return ""
    return f" at {rate:,.1f}/s" if rate < 1000 else f" at {rate:,.0f}/s"


def format_statistics(result: dict) -> str:
    """Return the line that a run ends with, from a result of `generate.generate`."""
    prompt = f"{result['prompt_tokens']:,} prompt tokens{per_second(result['prefill_tok_s'])}"
    answer = f"{result['new_tokens']:,} new tokens{per_second(result['decode_tok_s'])}"
    parts = [
        prompt,
        first_token(result),
        answer,
        f"reads {in_bytes(result['bytes_per_token'])}/token",
    ]
    if result["gb_s"] is not None:
        parts.append(f"{in_bytes(result['gb_s'] * 1e9)}/s")
    parts.append(f"peak memory {in_bytes(result['peak_bytes'])}")
    accepted = result.get("speculation", {}).get("tokens_per_pass")
    if accepted is not None:
        parts.append(f"{accepted:.2f} tokens/pass")
    return ", ".join(filter(None, (*parts, *expert_traffic(result.get("offload", {})))))


def expert_traffic(found: dict) -> list[str]:
    """Return figures of the expert cache, as far as there are any."""
    parts = []
    if found.get("hit_ratio") is not None:
        parts.append(f"expert cache hits {found['hit_ratio']:.0%}")
        parts.append(f"CPU multiplies {found['cpu_ratio']:.0%}")
    if found.get("bytes_moved_per_token") is not None:
        parts.append(f"copies {in_bytes(found['bytes_moved_per_token'])}/token")
    return parts


def first_token(result: dict) -> str:
    """Return the time to the first token; "" without one."""
    seconds = result["ttft_s"]
    return "" if seconds is None else f"first token after {in_seconds(seconds)}"


def format_turn(result: dict, used: int, length: int) -> str:
    """Return the line after a chat's answer. used: positions of the context of `length`."""
    answer = f"{in_tokens(result['new_tokens'])}{per_second(result['decode_tok_s'])}"
    context = f"context {used:,} of {length:,}"
    return ", ".join(filter(None, (answer, context, first_token(result))))
