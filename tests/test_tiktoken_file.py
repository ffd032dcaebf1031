"""`tiktoken.model` gives the ids that BPE by ranks gives, and damage is one line."""

import base64
import json
import random
import re
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import tokenizers
from hub_server import REPO, TOKENIZER
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, trainers
from tokenizers.pre_tokenizers import ByteLevel

from cli.model_name import ModelName
from hub.client import download
from hub.prepare import Settings, prepare
from models.byte_level import KIMI
from models.converter import convert
from models.tiktoken_file import TIKTOKEN, tiktoken_json
from tokenizer import BYTE_OF_CHARACTER, Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[1]
KIMI_CLASS = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
}
WORD = regex.compile(f"(?V1){KIMI}")
TEXT = (
    "I've told 3 people, WE'LL see 1234567.50\r\n\r\n  a\t\tb \n\n\n   x = {'\u00e9': 1}  \n"
    "\u4f60\u597d\u4e16\u754c\uff0c\u4eca\u5929abc\u5929\u6c14 2026\u5e74\u3002 "
    "\u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4 \u041f\u0440\u0438\u0432\u0435\u0442 "
    "\U0001f999\U0001f680\ufe0f \U00020000\u3400 <|im_end|> [BOS]<think>\u2026!!??(){}  "
)
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 9: "<think>", 40: "[PAD]"}  # after the ranks


@cache
def trained_ranks() -> dict[bytes, int]:
    """Return the ranks of a small vocabulary."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator([(ROOT / "README.md").read_text(), TEXT * 20], trainer)
    names = library.get_vocab()
    return {bytes(map(BYTE_OF_CHARACTER.get, name)): rank for name, rank in names.items()}


def drawn_ranks(seed: int) -> dict[bytes, int]:
    """Return ranks in any order: of tokens that no merge makes, too."""
    rng = random.Random(seed)
    words = {bytes(rng.choices(b"abcd", k=rng.randint(2, 6))) for _ in range(rng.randint(5, 60))}
    tokens = [bytes([byte]) for byte in range(256)] + sorted(words)
    rng.shuffle(tokens)
    return {token: rank for rank, token in enumerate(tokens)}


def write(directory: Path, ranks: dict[bytes, int], **config) -> dict:
    """Write a tokenizer's files; return its config."""
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (directory / TIKTOKEN).write_bytes(b"".join(lines))
    named = {str(len(ranks) + n): {"content": name, "special": n < 9} for n, name in NAMED.items()}
    config = KIMI_CLASS | {"added_tokens_decoder": named, "eos_token": "[EOS]"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return config


def load(directory: Path, ranks: dict[bytes, int], **config) -> Tokenizer:
    made = tiktoken_json(directory, write(directory, ranks, **config), len(ranks) + 256)
    return load_tokenizer(directory, json.dumps(made).encode())


def encode(text: str, ranks: dict[bytes, int], names: dict[str, int]) -> list[int]:
    """Encode by the definition: in each word, merge the neighbors of the lowest rank."""
    ids = []
    for number, part in enumerate(re.split(f"({'|'.join(map(re.escape, names))})", text)):
        if number % 2:
            ids.append(names[part])
            continue
        for word in WORD.findall(part):
            parts = [bytes([byte]) for byte in word.encode()]
            while len(parts) > 1 and word.encode() not in ranks:
                pairs = [a + b for a, b in pairwise(parts)]
                best = min(pairs, key=lambda pair: ranks.get(pair, 1 << 60))
                if best not in ranks:
                    break
                parts[pairs.index(best) : pairs.index(best) + 2] = [best]
            ids += [ranks[word.encode()]] if word.encode() in ranks else [ranks[p] for p in parts]
    return ids


@pytest.fixture(scope="module")
def kimi(tmp_path_factory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("kimi"), trained_ranks())


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from(TEXT) | st.characters(exclude_categories=("Cs",)), max_size=40))
def test_ids_are_those_of_bpe_by_ranks(kimi, text):
    ranks = trained_ranks()
    control = {name: len(ranks) + n for n, name in NAMED.items()}
    for each in (text, TEXT + text):
        assert kimi.encode(each, special=True) == encode(each, ranks, control)
        plain = {"<think>": control["<think>"], "[PAD]": control["[PAD]"]}
        assert kimi.encode(each) == encode(each, ranks, plain)
        assert kimi.decode(kimi.encode(each)) == each


@pytest.mark.parametrize("seed", range(6))
def test_ranks_in_any_order(tmp_path, seed):
    ranks, rng = drawn_ranks(seed), random.Random(seed)
    tokenizer = load(tmp_path, ranks)
    for _ in range(30):
        text = "".join(rng.choices("abcd", k=rng.randint(1, 40)))
        assert tokenizer.encode(text) == encode(text, ranks, {"[PAD]": 0})


def test_added_tokens_have_their_ids(kimi):
    first = len(trained_ranks())
    assert kimi.vocab_size == first + 41
    assert kimi.stop_ids == (first + 1,) and kimi.token_id("[PAD]") == first + 40
    assert kimi.token_bytes(first + 9) == b"<think>" and kimi.token_bytes(first + 5) == b""
    assert kimi.decode([first + 2, *kimi.encode("a b"), first + 7]) == "a b"


@pytest.mark.parametrize(
    "config",
    [
        {"auto_map": {"AutoTokenizer": "tokenization_moonshot.TikTokenTokenizer"}},
        {"auto_map": {"AutoTokenizer": ["a/b--tokenization_kimi.TikTokenTokenizer", None]}},
        {"auto_map": None},
    ],
)
def test_known_classes(tmp_path, config):
    assert load(tmp_path, trained_ranks(), **config).encode("\u4f60\u597da")


@pytest.mark.parametrize(
    "config",
    [
        {"auto_map": {"AutoTokenizer": ["tokenization_other.OtherTokenizer", None]}},
        {"auto_map": {}, "tokenizer_class": "OtherTokenizer"},
        {"auto_map": [], "tokenizer_class": None},
        {"auto_map": {"AutoTokenizer": [{"x": 1}]}},
    ],
)
def test_an_unknown_split_is_refused_by_name(tmp_path, config):
    name = config["auto_map"] and config["auto_map"]["AutoTokenizer"][0]
    name = name or config.get("tokenizer_class")
    with pytest.raises(ValueError, match=re.escape(f"how the tokenizer {name!r} splits")):
        load(tmp_path, trained_ranks(), **config)


LINES = (b"AA== 0", b"YQ== 97", b"YWI=", b"YWI= 1 2", b"Y 7", b"YWI= -1", b"YWI= 1.5", b"= 300")
LINES += (b"\xff\xfe 3", b"YWI= \xc2\xb2", b"YWI= " + b"9" * 5000, base64.b64encode(b"a" * 2000))


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_line(tmp_path, line):
    config = write(tmp_path, trained_ranks())
    data = (tmp_path / TIKTOKEN).read_bytes()
    (tmp_path / TIKTOKEN).write_bytes(data + line + b"\n")
    count = data.count(b"\n") + 1
    with pytest.raises(ValueError, match=f"line {count} is not a new token") as error:
        tiktoken_json(tmp_path, config, 5000)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({b"a": 0, b"b": 1}, "no token for the byte 0 (of 254)"),
        ({bytes([n]): n for n in range(256)} | {b"ab": 258}, "ranks of 257 tokens are not 0 to"),
        ({bytes([n]): n for n in range(256)} | {b"ab": 0}, "ranks of 257 tokens are not 0 to"),
        ({}, "no token for the byte 0 (of 256)"),
    ],
)
def test_ranks_that_make_no_vocabulary(tmp_path, ranks, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path, ranks, added_tokens_decoder={})


@pytest.mark.parametrize(
    ("id", "name"), [(5, "x"), (257, ""), (258, "[A]"), (258, "a"), (258, "<|reserved_token_256|>")]
)
def test_added_tokens_that_do_not_fit(tmp_path, id, name):
    ranks = {bytes([n]): n for n in range(256)}
    named = {"257": {"content": "[A]"}, str(id): {"content": name}}
    with pytest.raises(ValueError, match=re.escape(f"the added token {id}, {name!r}")):
        load(tmp_path, ranks, added_tokens_decoder=named)
    with pytest.raises(ValueError, match="100000001 tokens for 512 rows"):
        load(tmp_path, ranks, added_tokens_decoder={"100000000": {"content": "far"}})


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bits_are_one_line(tmp_path, seed):
    rng = random.Random(seed)
    config = write(tmp_path, drawn_ranks(seed))
    data = bytearray((tmp_path / TIKTOKEN).read_bytes())
    for _ in range(rng.choice((1, 1, 3))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    (tmp_path / TIKTOKEN).write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
    try:
        tiktoken_json(tmp_path, config, 700)
    except ValueError as error:
        assert "\n" not in str(error)


# Checkpoints --------------------------------------------------------------------------------------


@pytest.fixture
def published(make_family, tmp_path) -> Path:
    """Return the directory of a small Kimi Linear, as it is published."""
    ranks = drawn_ranks(0)
    source = make_family("kimi_linear", vocab_size=len(ranks) + 41).hf_directory
    directory = shutil.copytree(source, tmp_path / "published")
    write(directory, ranks)
    return directory


def test_a_converted_checkpoint_has_a_tokenizer_json(published):
    output = convert(published, progress=False)
    names = {path.name for path in output.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json"} <= names and TIKTOKEN not in names
    ids = load_tokenizer(output).encode("abcd<|im_end|>", special=True)
    ranks = drawn_ranks(0)
    assert ids == encode("abcd<|im_end|>", ranks, {"<|im_end|>": len(ranks) + 2})
    assert not (published / "tokenizer.json").exists()


def test_a_tokenizer_json_is_preferred(published):
    (published / TIKTOKEN).write_text("damaged")
    with pytest.raises(ValueError, match="line 1 is not a new token"):
        convert(published, progress=False)
    (published / "tokenizer_config.json").unlink()
    (published / "tokenizer.json").write_bytes(TOKENIZER["tokenizer.json"])
    output = convert(published, progress=False)
    assert (output / "tokenizer.json").read_bytes() == TOKENIZER["tokenizer.json"]


def test_a_model_of_the_hub(hub, published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOE_FAST_CHECKPOINTS", raising=False)
    hub.files = {path.name: path.read_bytes() for path in published.iterdir() if path.is_file()}
    output = prepare(ModelName(REPO), Settings(progress=False))
    want = convert(published, progress=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (output / name).read_bytes() == (want / name).read_bytes()


@pytest.mark.parametrize("get", (prepare, download))
@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        (TIKTOKEN, b"damaged", "tiktoken.model: line 1 is not a new token"),
        ("tokenizer_config.json", b'{"tokenizer_class": "Odd"}', "how the tokenizer 'Odd' splits"),
        (TIKTOKEN, None, "no tokenizer that is read"),
    ],
)
def test_refused_before_the_weights(
    hub, published, tmp_path, monkeypatch, get, file, data, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOE_FAST_CHECKPOINTS", raising=False)
    hub.files = {path.name: path.read_bytes() for path in published.iterdir() if path.is_file()}
    hub.files = {k: v for k, v in (hub.files | {file: data}).items() if v is not None}
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        get(ModelName(REPO), Settings(progress=False)) if get is prepare else get(REPO)
    assert "\n" not in str(error.value) and "/tmp" not in str(error.value)
    is_header = [asked for _, name, asked in hub.requests if name.endswith(".safetensors")]
    assert all(asked is not None for asked in is_header)  # a range of bytes
