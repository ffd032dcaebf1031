"""Use moe-fast as a library: stream a text, continue it, and look at the experts of a token.

    python examples/generate_from_python.py [DIR]

Runs the embedded model on a CPU or a GPU in a few seconds. DIR: the directory of a
converted checkpoint.
"""

import argparse

from generate import embedded_checkpoint, generate
from runtime.loading import load_model
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from tokenizer import load_tokenizer

PROMPT = "import os\nimport sys\n\n\n"


def show(text: str) -> None:
    print(text, end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", metavar="DIR", help="a converted checkpoint")
    path = parser.parse_args().path or embedded_checkpoint()
    model, tokenizer = load_model(path), load_tokenizer(path)
    # A session holds the KV cache of its sequences. Compiling pays on a GPU, where the decode
    # step becomes a CUDA graph.
    on_gpu = model.norm.weight.is_cuda
    session = Session(model, max_seq_len=512, options=SessionOptions(compile=on_gpu))

    show(PROMPT)
    sampling = Sampling(temperature=0.7, seed=1)
    result = generate(session, tokenizer, PROMPT, 60, sampling, on_text=show)
    print(f"\n--- {result['decode_tok_s']:.0f} tokens/s, ended by {result['finish_reason']!r}")

    # The session remembers the sequence: a prompt that begins with it prefills only the rest.
    prompt = session.ids[0] + tokenizer.encode("\n\n\nclass ", bos=False)
    result = generate(session, tokenizer, prompt, 40, Sampling(temperature=0))
    print(f"class {result['text']}")
    print(f"--- {session.prefilled} of {len(prompt)} prompt tokens were not in the cache")

    # Token by token: ids, log-probabilities, and the experts of the pass that chose each token.
    session.watch = True
    for token in session.stream(prompt, 5, Sampling(temperature=0)):
        details = session.details[0]
        text, experts = tokenizer.decode([token]), details.experts[0]
        print(f"{text!r:12} logprob {details.logprob:6.2f}  experts of layer 0: {experts}")


if __name__ == "__main__":
    main()
