"""Reading prompts: from the command line, standard input, and files of one prompt a line."""

import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path


def read_prompts(texts: Iterable[str], file: Path | None) -> list[str]:
    """Return the texts, "-" replaced by standard input, then the prompts of a file.

    Raises ValueError for an empty prompt, and as `read_prompts_file`.
    """
    stdin = sys.stdin or io.StringIO()  # a process may have no stdin
    prompts = [stdin.read() if text == "-" else text for text in texts]
    if "" in prompts:
        fix = "give --prompt some text, or pipe some in with --prompt -"
        raise ValueError(f"the prompt is empty: {fix}")
    return prompts + (read_prompts_file(file) if file else [])


def read_prompts_file(path: Path) -> list[str]:
    """Return the prompts of a file, one a line; in a .jsonl each a string or an object's "prompt".

    Empty lines are skipped. Raises ValueError naming the option and the line.
    """
    where = f"--prompts_file {path}"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror}: give a file that can be read") from None
    except UnicodeDecodeError:
        raise ValueError(f"{where}: it is not UTF-8 text: convert it to UTF-8") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            is_json = path.suffix == ".jsonl"
            prompts.append(parse_prompt(line, f"{where}: line {number}") if is_json else line)
    if not prompts:
        raise ValueError(f"{where}: it holds no prompt")
    return prompts


def parse_prompt(line: str, where: str) -> str:
    """Return the prompt of one line of a .jsonl file."""
    try:
        prompt = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is not JSON") from None
    prompt = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'{where} is neither a text nor {{"prompt": a text}}')
    return prompt
