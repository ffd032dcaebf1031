"""The tokenizer of a GGUF file, as the files that tokenizer.py reads.

`tokenizer.ggml.model` names the kind: "gpt2" is byte-level BPE, and `tokenizer.ggml.pre` names its
way to split a text into words (models/byte_level.py); "gemma4" is BPE over characters; "llama" is
sentencepiece.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from models.byte_level import KNOWN, byte_level_json

KEY = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # token types, sentencepiece's numbers

# Tokens that end an answer in some model, if the file has them as control tokens.
ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<|return|>", "<|call|>", "<|observation|>", "<end_of_turn>", "<turn|>", "<|tool_response>"),
    *("<eos>", "<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)


# Files --------------------------------------------------------------------------------------------


def tokenizer_files(values: Mapping[str, Any], vocab_size: int) -> dict[str, bytes]:
    """Return the tokenizer's files by name. vocab_size: rows of the embedding.

    Raises ValueError for a kind of tokenizer that is not supported, and for values that make none.
    """
    kind, tokens = name_of(values, "model"), texts(values, "tokens")
    if not tokens or len(tokens) > vocab_size:
        raise ValueError(f"it has {len(tokens)} tokens for {vocab_size} rows of the embedding")
    types = token_types(values, len(tokens))
    if kind == "llama":
        files = {"tokenizer.model": sentencepiece_model(values, tokens, types)}
        bos = True
    elif kind in ("gpt2", "gemma4"):
        make = byte_level if kind == "gpt2" else character_level
        made, bos = make(values, tokens, types)
        files = {"tokenizer.json": json.dumps(made, ensure_ascii=False).encode()}
    else:
        known = "only gpt2, gemma4 and llama are"
        raise ValueError(f"its tokenizer {kind!r:.60} is not supported; {known}")
    config = tokenizer_config(values, tokens, bos)
    stops = stop_ids(values, tokens, types)
    for name, value in (
        ("tokenizer_config.json", config),
        ("generation_config.json", {"eos_token_id": stops} if stops else {}),
    ):
        files[name] = json.dumps(value, ensure_ascii=False, indent=1).encode()
    for name, key in (("chat_template", ""), ("tool_use", ".tool_use")):
        template = values.get(f"tokenizer.chat_template{key}")
        if isinstance(template, str) and template:
            files[f"{name}.jinja"] = template.encode()
    return files


def name_of(values: Mapping[str, Any], key: str, default: str = "") -> str:
    """Return a name; of a value that is no text, what no name is."""
    found = values.get(KEY + key, default)
    return found if isinstance(found, str) else repr(found)


def texts(values: Mapping[str, Any], key: str) -> list[str]:
    """Return an array of texts. Raises ValueError for one of other values, and without any."""
    found = values.get(KEY + key)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"it lacks {KEY}{key}, an array of texts")
    return found


def token_types(values: Mapping[str, Any], count: int) -> list[int]:
    """Return the type of each token; ones if the file has none."""
    found = values.get(f"{KEY}token_type")
    if found is None:
        return [1] * count
    if not hasattr(found, "dtype") or found.dtype.kind not in "iu" or len(found) != count:
        raise ValueError(f"its {KEY}token_type is not a whole number for each of {count} tokens")
    return found.tolist()


def token_id(values: Mapping[str, Any], name: str, count: int) -> int | None:
    """Return the id that the file gives to a role, such as bos; None: none, or none of the file."""
    id = values.get(f"{KEY}{name}_token_id")
    return id if type(id) is int and 0 <= id < count else None


def tokenizer_config(values: Mapping[str, Any], tokens: list[str], bos: bool) -> dict:
    """Return tokenizer_config.json. bos: whether texts begin with BOS, if the file does not say."""
    given = values.get(f"{KEY}add_bos_token")
    config: dict[str, Any] = {"add_bos_token": given if type(given) is bool else bos}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (id := token_id(values, name, len(tokens))) is not None:
            config[f"{role}_token"] = tokens[id]
    return config


def stop_ids(values: Mapping[str, Any], tokens: list[str], types: list[int]) -> list[int]:
    """Return the ids that end an answer: those of the file, and control tokens known for it."""
    given = [token_id(values, name, len(tokens)) for name in ("eos", "eot", "eom")]
    known = [
        id
        for id, token in enumerate(tokens)
        if token in ENDS and types[id] in (CONTROL, USER_DEFINED)
    ]
    return list(dict.fromkeys([id for id in given if id is not None] + known))


def added_tokens(tokens: list[str], types: list[int]) -> list[dict]:
    """Return tokenizer.json's tokens that are found in a text before all else."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": id, "content": token, "special": types[id] == CONTROL} | flags
        for id, token in enumerate(tokens)
        if types[id] in (CONTROL, USER_DEFINED) and token
    ]


def bpe(values: Mapping[str, Any], tokens: list[str], types: list[int], **options) -> dict:
    """Return tokenizer.json's model."""
    vocab = {token: id for id, token in enumerate(tokens) if types[id] != UNUSED}
    plain = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    pairs = [merge.split(" ", 1) for merge in texts(values, "merges")]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            what = f"{' '.join(pair)!r:.60}, of which it has no tokens"
            raise ValueError(f"its {KEY}merges have {what}")
    return {"type": "BPE", "vocab": vocab, "merges": pairs} | plain | options


def byte_level(values: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[dict, bool]:
    """Return tokenizer.json of byte-level BPE, and whether texts begin with BOS by default."""
    name = name_of(values, "pre", "default")
    if name not in KNOWN:
        known = ", ".join(KNOWN)
        raise ValueError(f"its {KEY}pre = {name!r:.60} is not supported; supported are {known}")
    words = KNOWN[name]
    model = bpe(values, tokens, types, unk_token=None)
    return byte_level_json(words, model, added_tokens(tokens, types)), words.bos


def character_level(
    values: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[dict, bool]:
    """Return tokenizer.json of Gemma's BPE: spaces are U+2581, unknown characters are bytes."""
    unknown = token_id(values, "unknown", len(tokens))
    options = {"fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    return {
        "version": "1.0",
        "added_tokens": added_tokens(tokens, types),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": bpe(
            values, tokens, types, unk_token=None if unknown is None else tokens[unknown], **options
        ),
    }, True


# sentencepiece's ModelProto -----------------------------------------------------------------------


def sentencepiece_model(
    values: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> bytes:
    """Return tokenizer.model, of sentencepiece_model.proto's messages.

    It has those of the trainer's settings that encoding reads: BPE, ids, whether there are bytes.
    """
    scores = values.get(f"{KEY}scores")
    if not hasattr(scores, "dtype") or len(scores) != len(tokens):
        raise ValueError(f"its {KEY}scores are not one for each of {len(tokens)} tokens")
    pieces = b"".join(
        field(1, field(1, token.encode()) + field(2, float(score)) + field(3, kind))
        for token, score, kind in zip(tokens, scores.tolist(), types, strict=True)
    )
    ids = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}
    trainer = field(3, 2) + field(35, int(6 in types))  # BPE; 6: the type of bytes
    for number, name in ids.items():
        id = token_id(values, name, len(tokens))
        trainer += field(number, -1 if id is None else id)
    normalizer = field(1, b"identity")
    for number, name, default in ((3, "add_space_prefix", 1), (4, "remove_extra_whitespaces", 0)):
        given = values.get(KEY + name)
        normalizer += field(number, int(given) if type(given) in (bool, int) else default)
    return pieces + field(2, trainer) + field(3, normalizer + field(5, 1))


def field(number: int, value: bytes | float | int) -> bytes:
    """Return a field of a protocol buffer: bytes, a float, or an integer."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value & (1 << 64) - 1)


def varint(value: int) -> bytes:
    """Return an integer seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
