"""From a session's tokens to text: pieces as they become certain, where an answer ends, and what there is to say of it.

`generate` and `generate_all` are what commands, the server and a program that imports this call.
"""

import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

import offload
import world
from model import Transformer
from session import Sampling, Session
from speculate import Speculation
from tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 200


class _Answer:
    """The text of one sequence as its tokens arrive; `finish` says why it has ended, once it has."""

    def __init__(self, ids: Sequence[int], tokenizer: Tokenizer, stop: Sequence[str], ignore_eos: bool, reply: bool,
                 on_text: Callable[[str], None], on_token: Callable[[int, int], None]):  # fmt: skip
        self.prompt_tokens, self.stop, self.on_text, self.on_token = len(ids), stop, on_text, on_token
        self.stop_ids = () if ignore_eos else tokenizer.stop_ids
        self.pieces, self.text, self.shown = tokenizer.stream(() if reply else ids), "", 0
        self.times: list[float] = []
        self.finish: str | None = None

    def push(self, token: int) -> None:
        """Take the next token, and hand on what text has become certain."""
        self.times.append(time.perf_counter())
        if token in self.stop_ids:
            self.end("stop")
            return
        self.on_token(token, len(self.text))
        self.text += self.pieces.push(token)
        if (end := _find_stop(self.text, self.stop)) is not None:
            self.text = self.text[:end]
            self.end("stop")
            return
        self._show(len(self.text) - _held_back(self.text, self.stop))

    def end(self, finish: str) -> None:
        """End for this reason, unless ended already."""
        if self.finish is None:
            self.finish = finish
            if finish != "stop":
                self.text += self.pieces.flush()
            self._show(len(self.text))

    def _show(self, certain: int) -> None:
        self.on_text(self.text[self.shown : certain])
        self.shown = certain

    def result(self, start: float) -> dict:
        """What is known of it without the session; times are from `start`."""
        seconds = self.times[-1] - self.times[0] if len(self.times) > 1 else 0.0
        return {
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.times),
            "finish_reason": self.finish,
            "ttft_s": self.times[0] - start if self.times else None,
            "decode_tok_s": (len(self.times) - 1) / seconds if seconds else None,
        }


def generate(
    session: Session | Speculation,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    sampling: Sampling | None = None,
    *,
    on_text: Callable[[str], None] = lambda text: None,
    on_token: Callable[[int, int], None] = lambda token, begin: None,
    **options,
) -> dict:
    """`generate_all` for one prompt: text, or token ids. Returns its result; both functions get no number."""
    options |= {"on_text": lambda _, *text: on_text(*text), "on_token": lambda _, *token: on_token(*token)}
    return generate_all(session, tokenizer, [prompt], max_new_tokens, sampling, **options)[0]


def generate_all(
    session: Session | Speculation,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    sampling: Sampling | None = None,
    *,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    reply: bool = False,
    on_text: Callable[[int, str], None] = lambda number, text: None,
    on_token: Callable[[int, int, int], None] = lambda number, token, begin: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[dict]:
    """Continue each prompt, all at once, until EOS, a `stop` text (not part of the answer) or max_new_tokens.

    As many prompts as the session's batch, or fewer. reply: an answer is a text of its own, as in a chat, so that a
    tokenizer's leading space is no part of it. on_text is called with a prompt's number and each piece of its text as
    soon as it is certain; on_token before that with its number, each token that does not end it, and where in the text
    the token's begins; `interrupted` is asked after every step.
    Returns for each text, prompt_tokens, new_tokens, finish_reason ("stop", "length" or "interrupted"), ttft_s (from
    the call to the first token on the host), prefill_tok_s (of all tokens that the cache did not hold), decode_tok_s
    (None below two tokens), bytes_per_token (weights that one token reads, on all ranks), gb_s (of one sequence alone
    and one token a pass, else None), peak_bytes (of the device; on CPU of the process), of a Speculation its
    "speculation", and of a model with experts in host memory "offload" (see `moved`).
    Raises ValueError as `Session.stream_all`, and for an empty stop text.
    """
    stop = [stop] if isinstance(stop, str) else stop
    check_stop(stop)
    ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    answers = [
        _Answer(p, tokenizer, stop, ignore_eos, reply, partial(on_text, n), partial(on_token, n))
        for n, p in enumerate(ids)
    ]
    start, steps, counters = time.perf_counter(), 0, None
    for steps, tokens in enumerate(session.stream_all(ids, max_new_tokens, sampling or Sampling())):  # noqa: B007
        counters = counters or offload.counters(session.model)  # the prompt's copies are not counted
        for answer, token in zip(answers, tokens, strict=True):
            if answer.finish is None:
                answer.push(token)
        if all(answer.finish for answer in answers):
            break
        if interrupted():
            for answer in answers:
                answer.end("interrupted")
            break
    world.check_tokens(session.ids)
    results, size = [], world.total(session.model.bytes_per_token())
    speculation = {"speculation": session.statistics()} if isinstance(session, Speculation) else {}
    offloaded = {"offload": moved(session.model, counters, steps * len(ids))} if counters else {}
    for answer in answers:
        answer.end("length")
        result = answer.result(start)
        rate, ttft = result["decode_tok_s"], result["ttft_s"]
        results.append(result | {
            "prefill_tok_s": session.prefilled / ttft if ttft else None,
            "bytes_per_token": size,
            "gb_s": size * rate / 1e9 if rate and len(ids) == 1 and not speculation else None,
            "peak_bytes": peak_bytes(session.device),
            **speculation,
            **offloaded,
        })  # fmt: skip
    return results


def moved(model: Transformer, before: list[dict[str, int]], tokens: int) -> dict:
    """What happened since `offload.counters` was `before`, over all layers, in which so many tokens were made.

    hits, misses, speculative_hits (experts needed, once a layer and step), speculative_loads; hit_ratio, guessed_ratio:
    their share and the third's; bytes, bytes_moved_per_token: copied to the devices, of all ranks. Ratios are None
    where there was nothing.
    """
    after = offload.counters(model)
    found = {name: sum(a[name] - b[name] for a, b in zip(after, before, strict=True)) for name in offload.COUNTERS}
    found["bytes"] = world.total(found["bytes"])
    needed = found["hits"] + found["misses"] + found["speculative_hits"]
    return found | {
        "hit_ratio": found["hits"] / needed if needed else None,
        "guessed_ratio": found["speculative_hits"] / needed if needed else None,
        "bytes_moved_per_token": found["bytes"] / tokens if tokens else None,
    }


def check_stop(stop: Sequence[str]) -> None:
    """Raises ValueError for a stop text that every answer begins with."""
    if "" in stop:
        raise ValueError("--stop '' would end every answer before it begins: give it some text")


def _find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the first stop text begins."""
    return min((at for at in map(text.find, stop) if at >= 0), default=None)


def _held_back(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop text."""
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


def peak_bytes(device: torch.device) -> int:
    """The most memory used so far: of the device on CUDA, of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def statistics(result: dict) -> str:
    """The line that a run ends with."""
    number = lambda value, form: "-" if value is None else format(value, form)  # noqa: E731
    pace = ""
    if "speculation" in result:
        pace = f", {number(result['speculation']['tokens_per_pass'], '.2f')} tokens a pass"
    if "offload" in result:
        found = result["offload"]
        pace += f", hit ratio {number(found['hit_ratio'], '.2f')} and {number(found['guessed_ratio'], '.2f')} guessed, "
        copied = found["bytes_moved_per_token"]
        pace += f"{number(copied and copied / 1e6, '.4g')} MB a token copied"
    return (
        f"first token {number(result['ttft_s'], '.3f')} s, "
        f"prompt {result['prompt_tokens']} tokens at {number(result['prefill_tok_s'], '.1f')}/s, "
        f"new {result['new_tokens']} tokens at {number(result['decode_tok_s'], '.1f')}/s, "
        f"{result['bytes_per_token'] / 1e9:.4g} GB a token, {number(result['gb_s'], '.4g')} GB/s, "
        f"peak {result['peak_bytes'] / 1e9:.4g} GB{pace}"
    )
