"""`tiktoken.model`, the ranks of byte-level BPE, as a tokenizer.json.

A line of the file is a token in base64 and its rank, which is its id. BPE by ranks merges, of a
word's neighbors, those whose concatenation has the lowest rank, the leftmost first. The merges
inside of a token do not depend on the bytes around it, so its last two parts are those of its own
bytes: one merge for each token gives tokenizer.json the same ids.

The file does not tell how a text is split into words. The class of the tokenizer does, which
tokenizer_config.json names.
"""

import base64
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from models.byte_level import KNOWN, byte_level_json
from tokenizer import ADDED_TOKEN_FLAGS, BYTE_OF_CHARACTER, added_tokens

TIKTOKEN = "tiktoken.model"
MAX_TOKEN_BYTES = 1000  # finding a token's parts takes quadratic time; Kimi's are up to 256 long
SPLITS = {  # class of the tokenizer -> how it splits a text into words
    "tokenization_kimi.TikTokenTokenizer": "kimi-k2",
    "tokenization_moonshot.TikTokenTokenizer": "kimi-k2",
    "TikTokenTokenizer": "kimi-k2",
}
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
NO_RANK = 1 << 62


def tiktoken_json(directory: Path, config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return tokenizer.json of a directory with `tiktoken.model`.

    config: tokenizer_config.json. vocab_size: rows of the embedding. Raises ValueError for an
    unknown split into words, a damaged file, and tokens that do not fit each other.
    """
    words, path = KNOWN[split_name(config)], directory / TIKTOKEN
    ranks = read_ranks(path)
    names = {token: "".join(map(CHARACTER_OF_BYTE.__getitem__, token)) for token in ranks}
    added = named_tokens(added_tokens(directory), names.values(), vocab_size)
    merges = []
    for token in tqdm(sorted(ranks, key=ranks.__getitem__), desc="tokenizer", leave=False, delay=2):
        parts = merge_by_ranks(token, ranks)
        if len(parts) == 2:  # more: no merge makes the token, but a word may be the whole token
            merges.append(f"{names[parts[0]]} {names[parts[1]]}")
    vocab = {name: ranks[token] for token, name in names.items()}
    return byte_level_json(words, {"type": "BPE", "vocab": vocab, "merges": merges}, added)


def split_name(config: Mapping[str, Any]) -> str:
    """Return which of `KNOWN` a tokenizer's class splits a text into words by."""
    classes = config.get("auto_map")
    name = classes.get("AutoTokenizer") if isinstance(classes, dict) else None
    name = name[0] if isinstance(name, list) and name else name
    name = name or config.get("tokenizer_class")
    known = isinstance(name, str) and SPLITS.get(name.rpartition("--")[2])  # OWNER/NAME--MODULE
    if not known:
        what = f"{TIKTOKEN}: it is not known how the tokenizer {name!r:.80} splits a text"
        raise ValueError(f"{what}; take a repository with tokenizer.json, or a GGUF file")
    return known


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return {token: rank}.

    Raises ValueError unless ranks are whole numbers from 0 on, and every byte is a token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            code, rank = line.split()
            token = base64.b64decode(code, validate=True)
            fits = rank.isdigit() and 0 < len(token) <= MAX_TOKEN_BYTES and token not in ranks
            ranks[token] = int(rank)
        except ValueError:
            fits = False
        if not fits:
            what = f"line {number} is not a new token in base64 and its rank"
            raise ValueError(f"{path}: {what}; download it again")
    if sorted(ranks.values()) != list(range(len(ranks))):
        what = f"the ranks of {len(ranks)} tokens are not 0 to {len(ranks) - 1}"
        raise ValueError(f"{path}: {what}; download it again")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        what = f"it has no token for the byte {missing[0]} (of {len(missing)})"
        raise ValueError(f"{path}: {what}; download it again")
    return ranks


def merge_by_ranks(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Return the parts of a token before its last merge: two, or more if no merge makes it."""
    parts = [token[at : at + 1] for at in range(len(token))]
    costs = [ranks.get(token[at : at + 2], NO_RANK) for at in range(len(token) - 1)]
    while len(parts) > 2 and (cost := min(costs)) != NO_RANK:
        at = costs.index(cost)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del costs[at]
        for left in range(max(at - 1, 0), min(at + 1, len(costs))):
            costs[left] = ranks.get(parts[left] + parts[left + 1], NO_RANK)
    return parts


def named_tokens(
    added: Mapping[int, Mapping[str, Any]], names: Collection[str], vocab_size: int
) -> list[dict]:
    """Return tokenizer.json's added tokens. names: of the tokens with a rank.

    The library numbers added tokens on from the ranks, so that ids in between need a token, too.
    """
    first, end = len(names), max([len(names), *(id + 1 for id in added)])
    if end > vocab_size:
        what = f"the tokenizer has {end} tokens for {vocab_size} rows of the embedding"
        raise ValueError(f"{what}; it belongs to another model: download both again")
    plain = {"special": True} | dict.fromkeys(ADDED_TOKEN_FLAGS, False)
    tokens, found = [], {"", *names}
    for id in [*(id for id in added if id < first), *range(first, end)]:
        given = added.get(id, {})
        name = given.get("content", f"<|reserved_token_{id}|>")
        if id < first or name in found:
            what = f"tokenizer_config.json: the added token {id}, {name!r:.80}, has another's place"
            raise ValueError(f"{what}; download it and {TIKTOKEN} again")
        found.add(name)
        special = bool(given.get("special", not given))
        tokens.append(plain | {"id": id, "content": name, "special": special})
    return tokens
