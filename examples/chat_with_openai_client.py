"""Chat with a running server through OpenAI's client (`pip install openai`).

    python serve.py &
    python examples/chat_with_openai_client.py [URL]

Reads one message a line from stdin until its end. URL: the server's API, by default
http://127.0.0.1:8000/v1. OPENAI_API_KEY holds the server's key if it has one.
"""

import argparse
import os
import sys

import openai

URL = "http://127.0.0.1:8000/v1"


def answer(client: openai.OpenAI, messages: list[dict]) -> str:
    """Stream the answer to stdout and return it; print the token counts to stderr."""
    stream = client.chat.completions.create(
        model="any",  # the server has one model and accepts any name
        messages=messages,
        max_tokens=200,
        temperature=0.7,
        extra_body={"top_k": 50},  # beyond OpenAI's API: top_k, min_p, repetition_penalty, routing
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = []
    for chunk in stream:
        if chunk.choices:
            pieces.append(chunk.choices[0].delta.content or "")
            print(pieces[-1], end="", flush=True)
        if chunk.usage:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            counts = f"{chunk.usage.prompt_tokens} prompt tokens, {cached} of them cached"
            print(f"\n--- {counts}, {chunk.usage.completion_tokens} new ones", file=sys.stderr)
    return "".join(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", default=URL, metavar="URL", help=f"default: {URL}")
    url = parser.parse_args().url
    client = openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    messages: list[dict] = []
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.strip()})
        try:
            text = answer(client, messages)
        except openai.APIConnectionError:
            sys.exit(f"error: no server at {url}: start one with `python serve.py`")
        except openai.APIError as error:  # a wrong key, a full context
            sys.exit(f"error: {error}")
        # The server's cache holds the conversation so far, so sending it again costs no prefill.
        messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main()
