"""Byte-level BPE: the known ways to split a text into words, and a tokenizer.json of one.

Names of the splits are llama.cpp's (`tokenizer.ggml.pre`). Patterns are those of the models' own
tokenizers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

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


def byte_level_json(words: Words, model: dict[str, Any], added: Sequence[dict]) -> dict[str, Any]:
    """Return tokenizer.json.

    model: its BPE, without `ignore_merges`. added: its tokens that are found in a text before all
    else.
    """
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in words.patterns
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "added_tokens": list(added),
        "normalizer": words.normal_form and {"type": words.normal_form},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, bytes_ | {"use_regex": False}],
        },
        "post_processor": None,
        "decoder": bytes_ | {"use_regex": False},
        "model": model | {"ignore_merges": words.whole},
    }
