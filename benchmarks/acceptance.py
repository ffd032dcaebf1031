"""Accepted drafts on text that a model was not trained on, by source of drafts.

    python benchmarks/acceptance.py --checkpoint_path DIR --text_file FILE [--compile]

Passages of the file, evenly spread, are continued. For prompt lookup and for the checkpoint's head
for multi-token prediction: tokens a pass, how often each draft is accepted if all before it are,
and tokens/s. Greedy answers are compared with those of plain decoding, so that an error in a
refusal cannot look like acceptance.
"""

import itertools
import time
from collections import Counter
from pathlib import Path

import torch

from cli.parser import Parser
from formats.quantizer import DTYPES
from generate import load_model
from parallel.device import pick_device
from runtime.loading import load_head
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation
from tokenizer import load_tokenizer

PROMPT_TOKENS, NEW_TOKENS = 200, 100


def passages(ids: list[int], count: int) -> list[list[int]]:
    """Return prompts that begin at evenly spread tokens of a text."""
    stride = (len(ids) - PROMPT_TOKENS) // count
    return [ids[n * stride : n * stride + PROMPT_TOKENS] for n in range(count)]


def run(session: Session | Speculation, prompts: list[list[int]], sampling: Sampling) -> dict:
    """Continue all prompts; return the answers, tokens/s, and the tokens of each pass.

    The last pass of an answer is left out: the answer may end within it.
    """
    answers, seconds, lengths = [], 0.0, []
    for number, prompt in enumerate(prompts):
        session.reset()
        stream = session.stream(prompt, NEW_TOKENS, sampling.with_seed(number))
        answer, start, tokens = [next(stream)], time.perf_counter(), Counter()
        for token in stream:
            answer.append(token)
            tokens[getattr(session, "passes", 0)] += 1
        seconds += time.perf_counter() - start
        answers.append(answer)
        lengths += [tokens[n] for n in range(1, max(tokens))]
    total = len(prompts) * (NEW_TOKENS - 1)
    return {"answers": answers, "rate": total / seconds, "lengths": lengths}


def describe(found: dict, drafts: int) -> str:
    """Return tokens a pass, and the chance of each draft if all before it are accepted."""
    lengths = found["lengths"]
    reached = [sum(length > n for length in lengths) for n in range(drafts + 1)]
    chances = (f"{100 * b / max(1, a):.0f}" for a, b in itertools.pairwise(reached))
    mean = sum(lengths) / len(lengths)
    return f"{mean:.2f} tokens a pass, accepted {' '.join(chances)} %"


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/acceptance.py --checkpoint_path DIR --text_file FILE --compile",
            "python benchmarks/acceptance.py --checkpoint_path DIR --text_file FILE --drafts 3",
        ),
    )
    add = parser.add_argument
    add("--checkpoint_path", type=Path, required=True, help="a converted checkpoint with a head")
    add("--text_file", type=Path, required=True, help="the text that is continued")
    add("--passages", type=int, default=32, help="prompts of 200 tokens")
    add("--drafts", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    vocab = "the head drafts this many frequent ids, 0: all"
    add("--draft_vocab", type=int, nargs="+", default=[0], help=vocab)
    add("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    add("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_flag("--compile", "compile the steps")
    return parser


def main() -> None:
    options = build_parser().parse_args()
    device, dtype = pick_device("auto"), DTYPES[options.dtype]
    torch.manual_seed(0)
    tokenizer = load_tokenizer(options.checkpoint_path)
    prompts = passages(tokenizer.encode(options.text_file.read_text()), options.passages)
    model = load_model(options.checkpoint_path, device, dtype)
    head = load_head(options.checkpoint_path, model, dtype)
    settings = SessionOptions(compile=options.compile)

    def make(drafts: int, vocab: int | None) -> Session | Speculation:
        """vocab: ids that the head drafts, 0: all; None: drafts are looked up."""
        session = Session(model, PROMPT_TOKENS + NEW_TOKENS, settings)
        if not drafts:
            return session
        if vocab is None:
            return Speculation(session, drafts)
        return Speculation(session, drafts, head=head, draft_ids=tokenizer.frequent_ids(vocab))

    for temperature in options.temperature:
        sampling = Sampling(temperature, top_k=None, seed=0)
        plain = run(make(0, None), prompts, sampling)
        print(
            f"temperature {temperature}: plain decoding, {plain['rate']:.0f} tokens/s", flush=True
        )
        for vocab in (None, *options.draft_vocab):
            source = "lookup" if vocab is None else f"mtp of {vocab} ids" if vocab else "mtp"
            for drafts in options.drafts:
                found = run(make(drafts, vocab), prompts, sampling)
                same = "" if temperature else f", same text: {found['answers'] == plain['answers']}"
                rates = f"{describe(found, drafts)}, {found['rate']:.0f} tokens/s"
                print(f"  {source}, {drafts} drafts: {rates}{same}", flush=True)


if __name__ == "__main__":
    main()
