"""Reading prompts: from the command line, standard input, and files of one prompt a line."""

import io
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from host.files import read_regular

MAX_STDIN = 1 << 26  # characters; a million tokens have four million


def read_stdin() -> str:
    """Return all of standard input. Raises ValueError for more than MAX_STDIN: it may never end."""
    stream = sys.stdin or io.StringIO()  # a process may have no stdin
    text = stream.read(MAX_STDIN + 1)
    check_size(len(text))
    return text


def check_size(count: int) -> None:
    """Raise ValueError for more than MAX_STDIN characters of a prompt or a message."""
    if count > MAX_STDIN:
        raise ValueError(f"stdin has over {MAX_STDIN >> 20} million characters: give it less text")


def check_unicode(text: str, name: str) -> str:
    """Return a text. Raises ValueError with its name for one with bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        cause = f"{name} is not valid Unicode at character {error.start}"
        raise ValueError(f"{cause}; give it as UTF-8") from None
    return text


def read_prompts(texts: Iterable[str], file: Path | None) -> list[str]:
    """Return the texts, "-" replaced by standard input without a BOM, then the prompts of a file.

    Raises ValueError for an empty prompt, and as `read_stdin` and `read_prompts_file`.
    """
    prompts = [read_stdin().removeprefix("\ufeff") if text == "-" else text for text in texts]
    if "" in prompts:
        fix = "give --prompt some text, or pipe some in with --prompt -"
        raise ValueError(f"the prompt is empty: {fix}")
    return prompts + (read_prompts_file(file) if file else [])


def read_prompts_file(path: Path) -> list[str]:
    """Return the prompts of a file, one a line; in a .jsonl each a string or an object's "prompt".

    Lines end at "\\n" or "\\r\\n" alone: U+2028, U+0085 or a form feed may be part of a prompt. A
    BOM and empty lines are skipped. Raises ValueError naming the option and the line.
    """
    option = f"--prompts_file {path}"
    prompts = []
    try:
        text = read_regular(path)
    except OSError as error:
        cause = error.strerror or os.strerror(error.errno or 0)
        raise ValueError(f"{option}: {cause}: give a file that can be read") from None
    for number, data in enumerate(text.split(b"\n"), 1):
        where = f"{option}: line {number}"
        try:
            line = data.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{where}: it is not UTF-8 text: convert it to UTF-8") from None
        if line.strip():
            prompts.append(read_json_prompt(line, where) if path.suffix == ".jsonl" else line)
    if not prompts:
        raise ValueError(f"{option}: it holds no prompt")
    return prompts


def read_json_prompt(line: str, where: str) -> str:
    """Return the prompt of one line of a .jsonl file."""
    try:
        prompt = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is not JSON") from None
    prompt = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'{where} is neither a text nor {{"prompt": a text}}')
    return prompt
