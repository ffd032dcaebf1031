"""The tokenizer of a GGUF file, as the files that tokenizer.py reads.

`tokenizer.ggml.model` names the kind: "gpt2" is byte-level BPE, and `tokenizer.ggml.pre` names its
way to split a text into words; "gemma4" is BPE over characters; "llama" is sentencepiece. Patterns
are those of the models' own tokenizer.json.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

KEY = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # token types, sentencepiece's numbers

# Words -------------------------------------------------------------------------------------------

SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # endings of English words
GAPS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{GAPS}"
LLAMA3, QWEN2 = WORDS % r"\p{N}{1,3}", WORDS % r"\p{N}"
QWEN35 = (
    rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{GAPS}"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORT}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{GAPS}"
)
WESTERN = [f"[{letters[1:-1]}&&[^\\p{{Han}}]]" for letters in (UPPER, LOWER)]
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{WESTERN[0]}*{WESTERN[1]}+{SHORT}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{WESTERN[0]}+{WESTERN[1]}*{SHORT}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{GAPS}"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
CASED = (  # letters of scripts with two cases, as DeepSeek's tokenizers list them
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134"
    "\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
MARKS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + GAPS,
)


class Words(NamedTuple):
    """How a byte-level tokenizer splits a text into words, by one pattern after the other."""

    patterns: tuple[str, ...]
    normal_form: str | None = None  # Unicode's, of the text before
    whole: bool = False  # a word that is a token is not merged
    bos: bool = False  # texts begin with BOS if the file does not say


QWEN = Words((QWEN2,), "NFC")
LLAMA = Words((LLAMA3,), whole=True, bos=True)
GLM = Words((LLAMA3,), whole=True)
KNOWN: dict[str, Words] = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN),
    "qwen35": Words((QWEN35,), "NFC"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), LLAMA),
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe"), GLM),
    **dict.fromkeys(("gpt-4o", "llama4"), Words((O200K,))),
    "kimi-k2": Words((KIMI,), whole=True),
    "deepseek-llm": Words(("[\r\n]", rf"\s?[{CASED}]+", rf"\s?{MARKS}", r"\s+$", CJK, r"\p{N}+")),
    "deepseek-coder": Words(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}")),
    "deepseek-v3": Words(DEEPSEEK3),
    "refact": Words((r"\p{N}", GPT2)),  # Granite
    "olmo": Words((GPT2,), "NFC"),
    **dict.fromkeys(("gpt-2", "default"), Words((GPT2,))),
}

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
    kind, tokens = values.get(f"{KEY}model"), values.get(f"{KEY}tokens")
    if not isinstance(tokens, list) or not tokens or len(tokens) > vocab_size:
        count = len(tokens) if isinstance(tokens, list) else "no"
        raise ValueError(f"it has {count} tokens for {vocab_size} rows of the embedding")
    types = whole_numbers(values, "token_type", len(tokens))
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


def whole_numbers(values: Mapping[str, Any], key: str, count: int) -> list[int]:
    """Return an array with a number for each token; ones if the file has none."""
    found = values.get(KEY + key)
    if found is None:
        return [1] * count
    if not hasattr(found, "tolist") or len(found) != count:
        raise ValueError(f"its {KEY}{key} is not one number for each of {count} tokens")
    return [int(number) for number in found.tolist()]


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
    merges = values.get(f"{KEY}merges")
    if not isinstance(merges, list):
        raise ValueError(f"it lacks {KEY}merges")
    vocab = {token: id for id, token in enumerate(tokens) if types[id] != UNUSED}
    plain = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    pairs = [merge.split(" ", 1) for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            what = f"{' '.join(pair)!r:.60}, of which it has no tokens"
            raise ValueError(f"its {KEY}merges have {what}")
    return {"type": "BPE", "vocab": vocab, "merges": pairs} | plain | options


def byte_level(values: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[dict, bool]:
    """Return tokenizer.json of byte-level BPE, and whether texts begin with BOS by default."""
    name = values.get(f"{KEY}pre", "default")
    if name not in KNOWN:
        known = ", ".join(KNOWN)
        raise ValueError(f"its {KEY}pre = {name!r:.60} is not supported; supported are {known}")
    words = KNOWN[name]
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in words.patterns
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "added_tokens": added_tokens(tokens, types),
        "normalizer": words.normal_form and {"type": words.normal_form},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, bytes_ | {"use_regex": False}],
        },
        "post_processor": None,
        "decoder": bytes_ | {"use_regex": False},
        "model": bpe(values, tokens, types, unk_token=None, ignore_merges=words.whole),
    }, words.bos


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
            values,
            tokens,
            types,
            unk_token=None if unknown is None else tokens[unknown],
            **options,
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
    if not hasattr(scores, "tolist") or len(scores) != len(tokens):
        raise ValueError(f"its {KEY}scores are not one for each of {len(tokens)} tokens")
    pieces = b"".join(
        field(1, field(1, token.encode()) + field(2, score) + field(3, kind))
        for token, score, kind in zip(tokens, scores.tolist(), types, strict=True)
    )
    ids = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}
    trainer = field(3, 2) + field(35, int(6 in types))  # BPE; 6: the type of bytes
    for number, name in ids.items():
        id = token_id(values, name, len(tokens))
        trainer += field(number, -1 if id is None else id)
    normalizer = field(1, b"identity")
    for number, name, default in ((3, "add_space_prefix", 1), (4, "remove_extra_whitespaces", 0)):
        normalizer += field(number, int(values.get(KEY + name, default)))
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
