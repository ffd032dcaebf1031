"""The tokenizer of a GGUF file has the ids of the original's, its template and its stop ids."""

import json
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
from conftest import any_text
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from gguf_files.vocabulary import KNOWN, tokenizer_files
from tokenizer import JsonVocabulary, load_tokenizer

ROOT = Path(__file__).parents[1]
TINY = ROOT / "checkpoints" / "tiny-moe"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
HARD = (
    "I've 'told he's there, 'RE you SURE? WE'LL see\r\n\r\n  a\t\tb \n\n\n   x=3333 33 1234567.50 "
    "\u0663\u0664 def f(x):\n    return {'\u00e9': \"e\u0301\u0301\", 'k': x/2}  \n\u4f60\u597d"
    "\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4 \u041f\u0440\u0438"
    "\u0432\u0435\u0442 \u039a\u03cc\u03c3\u03bc\u03b5 \U0001f999\U0001f680\ufe0f <|im_end|> "
    "<think>\u2026!!??(){}  "
)
# The splits of the original repositories' tokenizer.json, where transformers has no class for it.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPLITS = {
    "llama-bpe": (LLAMA3,),
    "glm4": (LLAMA3,),
    "gpt-4o": (O200K,),
    "deepseek-v3": DEEPSEEK3,
    "deepseek-llm": (  # the letters that occur in HARD, and the other steps as they are
        "[\r\n]",
        "\\s?[A-Za-z\u0386-\u03ff\u0400-\u0481\u00c0-\u00d6\u00d8-\u00f6]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        "\\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        "\\p{N}+",
    ),
}
WHOLE = "llama-bpe", "glm4"  # a word that is a token is not merged
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
OWN_SPLIT = {  # the steps of Granite's and OLMoE's tokenizer.json
    "refact": (
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    ),
    "olmo": (normalizers.NFC(), GPT2),
}
ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]


def byte_level(splits: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(Regex(each), "isolated") for each in splits]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, last])


@cache
def trained(name: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges of a small BPE made with a name's split."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if name == "gemma4":
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        alphabet = [chr(c) for c in range(33, 127)]
    else:
        splits = SPLITS.get(name, (LLAMA3,))
        tokenizer.pre_tokenizer = byte_level(splits)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    text = (ROOT / "README.md").read_text() + HARD * 20
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def original(name: str) -> tuple[tokenizers.Tokenizer, list[str], list[int]]:
    """Return the original tokenizer, and the tokens and types that the converter writes of it."""
    vocab, merges = trained(name)
    count = len(vocab)
    if name == "gemma4":
        special = ["<pad>", "<eos>", "<bos>", "<unk>"]
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        vocab = {t: n for n, t in enumerate(dict.fromkeys([*special, *bytes_, *vocab]))}
        peer = GemmaTokenizer(vocab=vocab, merges=merges, mask_token="<pad>")
        peer.add_tokens([tokenizers.AddedToken("<|turn>", special=True)])
        tokens = [*vocab, "<|turn>"]
        types = [CONTROL if t in (*special, "<|turn>") else 6 if t in bytes_ else 1 for t in tokens]
        return peer.backend_tokenizer, tokens, types
    if name in ("qwen2", "qwen35"):
        kind = Qwen2Tokenizer if name == "qwen2" else Qwen3_5Tokenizer
        library = kind(vocab=vocab, merges=merges).backend_tokenizer
    else:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=name in WHOLE)
        library = tokenizers.Tokenizer(model)
        if name in OWN_SPLIT:
            library.normalizer, library.pre_tokenizer = OWN_SPLIT[name]
        else:
            library.pre_tokenizer = byte_level(SPLITS[name])
    for token in ADDED:
        special = token.startswith("<|")
        library.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False)])
    types = [CONTROL if t.startswith("<|") else USER_DEFINED for t in ADDED]
    ids = [library.token_to_id(token) for token in ADDED]
    assert ids == list(range(count, count + len(ADDED)))
    tokens = sorted(vocab, key=vocab.get) + ADDED + ["[PAD1]", "[PAD2]"]
    return library, tokens, [NORMAL] * count + types + [UNUSED] * 2


def loaded(name: str, directory: Path, **more):
    """Return the original, and our tokenizer of the file's values."""
    library, tokens, types = original(name)
    kind = {"gemma4": "gemma4", "llama": "llama"}.get(name, "gpt2")
    values = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": as_array(types),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in trained(name)[1]],
        "tokenizer.ggml.eos_token_id": tokens.index(
            "<eos>" if name == "gemma4" else "<|endoftext|>"
        ),
    } | {f"tokenizer.{key}": value for key, value in more.items()}
    for file, data in tokenizer_files(values, len(tokens)).items():
        (directory / file).write_bytes(data)
    return library, load_tokenizer(directory)


def as_array(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, np.int32)


NAMES = "qwen2", "qwen35", *SPLITS, *OWN_SPLIT, "gemma4"


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_original(name, tmp_path):
    library, ours = loaded(name, tmp_path, **{"ggml.add_bos_token": False})
    library.encode_special_tokens = True  # names of control tokens in a text are text here
    for text in (HARD, *HARD.split(" "), (ROOT / "docs" / "design.md").read_text()):
        ids = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids, text
    assert ours.decode(ours.encode("a b  c\n")) == "a b  c\n"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Return the original and our tokenizer by name."""
    without = {"ggml.add_bos_token": False}
    names = "qwen2", "gpt-4o", "deepseek-v3", "gemma4"
    return {name: loaded(name, tmp_path_factory.mktemp(name), **without) for name in names}


@settings(max_examples=60, deadline=None)
@given(any_text(), st.sampled_from(("qwen2", "gpt-4o", "deepseek-v3", "gemma4")))
def test_ids_of_any_text_are_those_of_the_original(pairs, text, name):
    library, ours = pairs[name]
    library.encode_special_tokens = True
    assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_every_name_of_a_split_makes_a_tokenizer():
    vocab, merges = trained("llama-bpe")
    for name in KNOWN:
        values = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": name,
            "tokenizer.ggml.tokens": sorted(vocab, key=vocab.get),
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        }
        made = JsonVocabulary(tokenizer_files(values, len(vocab))["tokenizer.json"])
        text = "".join(made.token_bytes(id).decode() for id in made.encode(HARD[:80], False))
        assert text == HARD[:80]


def test_added_tokens_stop_ids_and_templates(tmp_path):
    _, ours = loaded(
        "qwen2",
        tmp_path,
        **{
            "ggml.bos_token_id": 1,
            "chat_template": "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}",
            "chat_template.tool_use": "tools",
        },
    )
    tokens = original("qwen2")[1]
    names = {name: tokens.index(name) for name in ADDED}
    # The end of a turn is known by its name, beside the file's own end of a text.
    assert ours.stop_ids == (names["<|endoftext|>"], names["<|im_end|>"])
    assert ours.encode("a")[0] != 1, "qwen2 has no BOS by default"
    assert names["<think>"] in ours.encode("<think>")
    assert names["<|im_end|>"] not in ours.encode("<|im_end|>")
    assert names["<|im_end|>"] in ours.chat([{"role": "user", "content": "hi"}])
    assert set(ours.templates) == {"default", "tool_use"}


def test_sentencepiece_has_the_ids_of_tokenizer_model(tmp_path):
    """The embedded model's tokenizer, through the values that the converter writes of it."""
    values = sentencepiece_values(TINY)
    for file, data in tokenizer_files(values, 4096).items():
        (tmp_path / file).write_bytes(data)
    ours, theirs = load_tokenizer(tmp_path), load_tokenizer(TINY)
    for text in (HARD, (ROOT / "generate.py").read_text(), " a  b", ""):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.stop_ids == theirs.stop_ids and ours.bos_id == theirs.bos_id


def sentencepiece_values(directory: Path) -> dict:
    """Return the values that the converter writes for a tokenizer.model."""
    library = sentencepiece.SentencePieceProcessor(str(directory / "tokenizer.model"))
    ids, defined = range(library.get_piece_size()), sentencepiece_defined(library)
    checks = {2: library.is_unknown, 3: library.is_control, 6: library.is_byte}
    checks[4] = defined.__contains__
    kinds = [next((kind for kind, check in checks.items() if check(id)), 1) for id in ids]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [library.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": np.array([library.get_score(id) for id in ids], np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": library.bos_id(),
        "tokenizer.ggml.eos_token_id": library.eos_id(),
        "tokenizer.ggml.unknown_token_id": library.unk_id(),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": library.encode("a", out_type=str)[0] == "\u2581a",
    }


def sentencepiece_defined(library) -> set[int]:
    """Return the ids of user-defined tokens: those with the score 0 that are no control tokens."""
    ids = range(library.get_piece_size())
    return {
        id
        for id in ids
        if library.get_score(id) == 0
        and not (library.is_control(id) or library.is_unknown(id) or library.is_byte(id))
        and len(library.id_to_piece(id)) > 0
        and library.id_to_piece(id).strip("\u2581\n") == ""
    }


@pytest.mark.parametrize(
    "change, why",
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.pre": "odd"}, "pre = 'odd' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "lacks tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": []}, "0 tokens for 3 rows"),
        ({"tokenizer.ggml.tokens": [["a"], ["b"]]}, "tokenizer.ggml.tokens, an array of texts"),
        ({"tokenizer.ggml.merges": [["a"]]}, "tokenizer.ggml.merges, an array of texts"),
        ({"tokenizer.ggml.pre": as_array([1, 2])}, "pre = 'array.*is not supported"),
        ({"tokenizer.ggml.model": as_array([1, 2])}, "tokenizer 'array.*is not supported"),
        ({"tokenizer.ggml.token_type": np.full(2, np.inf)}, "not a whole number for each of 2"),
        ({"tokenizer.ggml.tokens": ["a"] * 9}, "9 tokens for 3 rows"),
        ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges have 'ab', of which it has no tokens"),
        ({"tokenizer.ggml.merges": ["a b"]}, "merges have 'a b', of which it has no tokens"),
        ({"tokenizer.ggml.token_type": as_array([1])}, "not a whole number for each of 2"),
        ({"tokenizer.ggml.model": "llama"}, "scores are not one for each"),
    ],
)
def test_what_makes_no_tokenizer_is_refused_by_name(change, why):
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(ValueError, match=why):
        tokenizer_files(values | change, 3)


@pytest.mark.parametrize("kind", ("gpt2", "gemma4", "llama"))
def test_a_value_of_another_type_is_one_line(kind):
    tokens = ["<unk>", "a", "b", "ab"]
    numbers = {"scores": np.zeros(4, np.float32), "token_type": as_array([2, 1, 1, 1])}
    values = {"model": kind, "pre": "qwen2", "tokens": tokens, "merges": ["a b"], **numbers}
    values |= dict.fromkeys(("bos_token_id", "unknown_token_id"), 0)
    values |= dict.fromkeys(("add_bos_token", "add_space_prefix"), True)
    values = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    assert tokenizer_files(values, 4)
    for key, value in values.items():
        count = len(value) if hasattr(value, "__len__") else 2
        for other in (True, -1, 1.5, float("inf"), "x", [], ["x"], [["x"]] * count):
            for odd in (other, np.full(count, np.inf), np.full(count, 9), np.full(count, True)):
                try:
                    tokenizer_files(values | {key: odd}, 4)
                except ValueError as error:
                    assert "\n" not in str(error) and len(str(error)) < 300


def test_token_types_are_those_of_gguf():
    kinds = gguf.TokenType
    assert (kinds.NORMAL, kinds.CONTROL, kinds.USER_DEFINED, kinds.UNUSED) == (1, 3, 4, 5)
