"""Text to token ids and back: one class for `tokenizer.json` and sentencepiece's `tokenizer.model`.

In both, a token id stands for a fixed byte string, and text is the UTF-8 decoding of their
concatenation. So decoding is a join, and streaming is Python's incremental UTF-8 decoder: a
character split over several tokens waits until it is complete, and the cost of a token does not
grow with the text. (`tokenizers` and `sentencepiece` decode whole texts; the streaming decoder of
`tokenizers` covers one of the two kinds, and neither returns the bytes of a token.)

Control tokens spelled out in a user's text are text: `"</s>"` in a prompt is four characters, not
the end of the sequence. Only the chat template and `encode(..., special=True)` produce them.
"""

import codecs
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import sentencepiece
import tokenizers

from chat_template import (
    DEFAULT,
    MARKED,
    TEXT_MARK,
    TOOL_USE,
    ChatTemplate,
    any_of,
    one_line,
    read_sources,
    read_text,
)

# gpt-oss's control tokens, and those of them that end an answer whatever generation_config.json
# says: its first version lacked <|call|>, after which the model invents the tool's result.
HARMONY = "<|start|>", "<|channel|>", "<|message|>"
HARMONY_ENDS = "<|return|>", "<|call|>"
LAST_ID = 2**31 - 1  # that the libraries take
ADDED_TOKEN_FLAGS = "single_word", "lstrip", "rstrip", "normalized"
SPACE = "\u2581"  # sentencepiece writes it for a space
SPACES = {"Replace", "Metaspace", "Strip"}  # decoders that change characters


class Tokenizer:
    """The tokenizer of a checkpoint.

    Attributes:
        vocab_size: number of ids; the model's embedding may have more rows (padding), never fewer.
        bos_id: id of the beginning-of-sequence token, or None.
        stop_ids: ids that end an answer: those of generation_config.json, else of config.json, and
            the tokenizer's end token, if these name none or there is a chat template.
        has_chat_template: whether `chat` and `chat_text` can be called.
    """

    def __init__(self, vocabulary: "JsonVocabulary | SentencePieceVocabulary", directory: Path):
        self._vocabulary = vocabulary
        config = _read_json(directory / "special_tokens_map.json")
        config |= _read_json(directory / "tokenizer_config.json")
        self._special_names = _special_names(config)  # also variables of the chat template
        for key, default in (("bos_token", vocabulary.bos), ("eos_token", vocabulary.eos)):
            if key not in config and default is not None:
                self._special_names[key] = default
        eos_id = vocabulary.find(self._special_names.get("eos_token", ""))

        self.bos_id: int | None = vocabulary.find(self._special_names.get("bos_token", ""))
        self.stop_ids: tuple[int, ...] = (
            _eos_ids(directory / "generation_config.json")
            or _eos_ids(directory / "config.json")
            or (() if eos_id is None else (eos_id,))
        )
        ends = []
        if all(vocabulary.find(name) is not None for name in HARMONY):
            ends = [id for id in map(vocabulary.find, HARMONY_ENDS) if id is not None]
        add_bos = config.get("add_bos_token")
        if add_bos not in (True, False, None):
            fix = "make it true or false"
            raise ValueError(f"tokenizer_config.json: add_bos_token is {add_bos!r}; {fix}")
        self._prefix = [] if add_bos is False else vocabulary.prefix
        if add_bos and not self._prefix and self.bos_id is not None:
            self._prefix = [self.bos_id]

        self.templates = {
            name: ChatTemplate(source, self._special_names, vocabulary.control)
            for name, source in read_sources(directory, config).items()
        }
        self.has_chat_template: bool = bool(self.templates)
        # Models tuned for chats end a message by this token, and often have the generation_config
        # of their base model, which lacks it.
        if self.has_chat_template and eos_id is not None:
            ends.append(eos_id)
        self.stop_ids = tuple(dict.fromkeys([*self.stop_ids, *ends]))
        self._bytes: dict[int, bytes] = {}  # cache of token_bytes

    @cached_property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    def check(self, vocab_size: int) -> None:
        """Raise ValueError if an id is beyond the model's, or the chat template does not compile.

        vocab_size: rows of the embedding.
        """
        self.check_ids((*self._prefix, *self.encode("def f(x):\n    return 1")), vocab_size)
        for template in self.templates.values():
            try:
                _ = template.program
            except Exception as error:  # the template is a program of the checkpoint's author
                fix = "download it again"
                raise ValueError(
                    f"the chat template is damaged ({one_line(error)}); {fix}"
                ) from None

    def check_ids(self, ids: Iterable[int], vocab_size: int) -> None:
        """Raise ValueError if one of these ids, or of `stop_ids`, is beyond the model's.

        vocab_size: rows of the embedding.
        """
        largest = max((*self.stop_ids, *ids), default=0)
        if largest >= vocab_size:
            what = "eos_token_id or the tokenizer"
            raise ValueError(
                f"{what} has the id {largest}, beyond the model's {vocab_size} tokens; "
                "it belongs to another model: download both again"
            )

    def encode(self, text: str, bos: bool = True, *, special: bool = False) -> list[int]:
        """Return the ids of a text.

        bos: start with the prefix of the tokenizer's config, once (Llama: BOS; Qwen: none). An end
        token is never appended: a prompt is to be continued. special: control tokens in the text
        become their ids, for prompts formatted by hand. Added tokens that are no control tokens,
        such as Qwen's <think>, are recognized in any text.

        Raises ValueError for text that is not valid Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            cause = f"the text is not valid Unicode at character {error.start}"
            raise ValueError(f"{cause}; give it as UTF-8") from None
        ids = self._vocabulary.encode(text, special)
        has_prefix = ids[: len(self._prefix)] == self._prefix
        return self._prefix + ids if bos and not has_prefix else ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids.

        Control tokens and ids beyond the vocabulary are skipped. Bytes that are not UTF-8 become
        U+FFFD. The space that a Llama tokenizer prepends to a text is removed.
        """
        stream = self.stream()
        return "".join(map(stream.push, ids)) + stream.flush()

    def stream(self, prompt_ids: Iterable[int] = ()) -> "Stream":
        """Return a decoder that takes one id at a time.

        prompt_ids: of the prompt that the text continues. A leading space then belongs to the text,
        and `decode(prompt_ids)` + the streamed text is `decode` of all ids.
        """
        return Stream(self, prompt_ids)

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token; b"" for control tokens and ids beyond the vocabulary."""
        found = self._bytes.get(id)
        if found is None:
            found = self._vocabulary.token_bytes(id) if 0 <= id <= LAST_ID else b""
            if found:  # requests may have ids without an end that are no tokens
                self._bytes[id] = found
        return found

    def token_id(self, name: str) -> int | None:
        """Return the id of the token with this name, such as "<think>"; None if there is none."""
        return self._vocabulary.find(name)

    def frequent_ids(self, count: int) -> list[int]:
        """Return up to `count` ids, rising: the control tokens and the most frequent others.

        Byte-pair encoding merges what is frequent first; other vocabularies have scores.
        """
        control = sorted(set(self._vocabulary.control.values()))
        ranked = dict.fromkeys([*self.stop_ids, *control, *self._vocabulary.ranked()])
        return sorted(list(ranked)[:count])

    def template_has(self, text: str) -> bool:
        """Whether the source of a chat template has this text."""
        return any(text in template.source for template in self.templates.values())

    def template_variables(self) -> list[str]:
        """Return the names that chat templates read, such as Qwen3's `enable_thinking`."""
        return sorted(set().union(*(found.variables for found in self.templates.values())))

    def max_bytes_per_token(self) -> int:
        """Return how many bytes of text one token can stand for, at most."""
        longest = max(len(self.token_bytes(id)) for id in range(self.vocab_size))
        # A normalizer may shorten text: NFC joins three Hangul letters of 3 bytes each into one.
        return 3 * max(longest, 1)

    def chat_text(self, messages: list[dict], /, **variables) -> str:
        """Return a conversation as text, formatted by the checkpoint's chat template.

        messages: dicts with `role` and `content`. variables: names for the template, such as
        `tools`, `add_generation_prompt` (default: True), and Qwen3's `enable_thinking`. With
        `continue_final_message` the text ends inside of the last message. Raises ValueError if
        there is no template, or if the template rejects the messages.
        """
        return self._render(messages, variables).replace(TEXT_MARK, "")

    def chat(self, messages: list[dict], /, **variables) -> list[int]:
        """Return the ids of `chat_text`.

        Control tokens of the template become their ids; those spelled out in a message stay text.
        No BOS is added to the template's own.
        """
        text = self._render(messages, variables)
        ids = []
        for number, part in enumerate(MARKED.split(text)):  # odd parts are marked characters
            # Drop single marks: the template may have cut a marked text between character and mark.
            if plain := part.replace(TEXT_MARK, ""):
                ids += self.encode(plain, bos=False, special=number % 2 == 0)
        return ids

    def _render(self, messages, variables: dict) -> str:
        """Return the template's text, with the messages' control tokens marked as text."""
        if not self.has_chat_template:
            fix = "give a plain prompt, or use an instruct checkpoint"
            raise ValueError(f"this checkpoint has no chat template; {fix}")
        if not isinstance(messages, list | tuple) or not all(isinstance(m, dict) for m in messages):
            example = '{"role": "user", "content": "Hello"}'
            raise ValueError(f"a chat is a list of messages such as {example}")
        name = DEFAULT if variables.get("tools") is None else TOOL_USE
        template = self.templates.get(name) or next(iter(self.templates.values()))
        return template.render(messages, variables)


class Stream:
    """Decodes ids one at a time, see `Tokenizer.stream`."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int]):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer._vocabulary.strip  # until the first space is removed
        for id in prompt_ids:
            self.push(id)

    def push(self, id: int) -> str:
        """Return the text that this id completes; "" while a character is incomplete."""
        data = self._tokenizer.token_bytes(id)
        if data and self._strip:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """End the text: return U+FFFD if the last character is incomplete, else ""."""
        return self._utf8.decode(b"", final=True)


class JsonVocabulary:
    """`tokenizer.json`, run by `tokenizers`.

    This class and SentencePieceVocabulary have: `size`; `is_empty`; `control` {name: id}, the
    control tokens; `bos` and `eos`, names or None; `prefix`, the ids put before a text; `strip`,
    whether decoding removes one leading space; `add_tokens(tokens)`, `encode(text, special)`,
    `find(name)`, `token_bytes(id)`, and `ranked()`, the ids from the most frequent to the rarest.
    """

    def __init__(self, data: bytes):
        at = data.find(b'"continuing_subword_prefix"')
        if at >= 0 and re.match(rb'"\w+"\s*:\s*"[^"]', data[at : at + 99]):
            # The library cuts it off tokens, amid characters, and may then abort the process.
            raise ValueError("its tokens have a continuing_subword_prefix")
        self.library = tokenizers.Tokenizer.from_str(data.decode())
        self.library.no_truncation()  # some checkpoints carry their training's settings
        self.library.no_padding()
        self.control: dict[str, int] = {}
        self.is_empty = self.library.get_vocab_size(with_added_tokens=True) == 0
        self._read_added()
        self.prefix = self._find_prefix()
        self.bos = self.library.id_to_token(self.prefix[0]) if self.prefix else None
        self.eos = None
        self._read_decoder()

    def add_tokens(self, tokens: dict[int, dict]) -> None:
        """Add the tokens of Hugging Face's `added_tokens_decoder`, see `added_tokens`.

        As in transformers, their flags replace those of tokenizer.json, and a token that neither
        has gets the next free id.
        """
        found = []
        for _, token in sorted(tokens.items()):
            flags = {key: token[key] for key in ADDED_TOKEN_FLAGS if type(token.get(key)) is bool}
            is_special = bool(token.get("special"))
            found.append(tokenizers.AddedToken(token["content"], special=is_special, **flags))
        self.library.add_tokens(found)
        self._read_added()

    def _read_added(self) -> None:
        """Set the attributes that added tokens change."""
        added = self.library.get_added_tokens_decoder()
        # A token stays special in the library if it was once.
        self.control |= {token.content: id for id, token in added.items() if token.special}
        self._control_ids = set(self.control.values())

    @cached_property
    def size(self) -> int:
        """The largest id plus 1, when all tokens are added: 0.1 s for 150,000 tokens."""
        return max(self.library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _find_prefix(self) -> list[int]:
        """Return the ids that the post-processor puts before a text: BOS, or none."""
        plain = self.library.encode("a", add_special_tokens=False).ids
        full = self.library.encode("a", add_special_tokens=True).ids
        starts = (n for n in range(len(full)) if full[n : n + len(plain)] == plain)
        return full[: next(starts, 0)]

    def _read_decoder(self) -> None:
        """Set how tokens become bytes. Raises ValueError for an unknown decoder."""
        decoder = self.library.decoder
        settings = json.loads(decoder.__getstate__()) if decoder else {"decoders": []}
        steps = settings.get("decoders", [settings])
        kinds = [step["type"] for step in steps]
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._has_spaces = bool({"Replace", "Metaspace"} & set(kinds))
        are_known = [is_known_decoder(step, kinds[:n]) for n, step in enumerate(steps)]
        if not all(are_known) or (self._byte_level and SPACES & set(kinds)):
            names = " + ".join(kinds)
            raise ValueError(f"its decoder {names} is not of the byte-level or the Llama type")
        self._separator = "" if steps else " "  # tokens are words if there is no decoder
        self.strip = not steps or any(
            step.get("start", 0) > 0 or step.get("prepend_scheme", "never") != "never"
            for step in steps
        )

    def encode(self, text: str, special: bool) -> list[int]:
        # In `tokenizers` this property means: encode the names of control tokens as text.
        self.library.encode_special_tokens = not special
        try:
            return self.library.encode(text, add_special_tokens=False).ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a regex panics in Rust, which is not even an Exception
            cause = f"the tokenizer fails on this text ({one_line(error)})"
            raise ValueError(f"{cause}; shorten it, or download the tokenizer again") from None

    def ranked(self) -> list[int]:
        model = json.loads(self.library.to_str())["model"]
        ids = self.library.get_vocab(with_added_tokens=True)
        if model["type"] == "Unigram":
            order = {token: -score for token, score in model["vocab"]}
        else:  # tokens that no merge makes are bytes or characters
            pairs = (p.split(" ") if isinstance(p, str) else p for p in model.get("merges", ()))
            order = {a + b: rank for rank, (a, b) in enumerate(pairs, 1)}
        return [ids[token] for token in sorted(ids, key=lambda t: (order.get(t, 0), ids[t]))]

    def find(self, name: str) -> int | None:
        return self.library.token_to_id(name)

    def token_bytes(self, id: int) -> bytes:
        token = self.library.id_to_token(id)
        if token is None or id in self._control_ids:
            return b""
        if self._byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes.fromhex(token[3:5])
        if self._byte_level:  # added tokens are plain text, with characters outside the alphabet
            in_alphabet = all(c in BYTE_OF_CHARACTER for c in token)
            return bytes(map(BYTE_OF_CHARACTER.get, token)) if in_alphabet else token.encode()
        if self._has_spaces:
            token = token.replace(SPACE, " ")
        return (self._separator + token).encode()


def is_known_decoder(step: dict, before: list[str]) -> bool:
    """Whether `JsonVocabulary.token_bytes` does what a decoder does. before: types before it."""
    kind = step["type"]
    if kind == "Replace":
        return step["pattern"] == {"String": SPACE} and step["content"] == " "
    if kind == "Metaspace":
        return step["replacement"] == SPACE
    if kind == "Strip":  # after Fuse it sees the whole text
        is_first = step["start"] == 0 or (step["start"] == 1 and "Fuse" in before)
        return step["content"] == " " and step["stop"] == 0 and is_first
    return kind in ("ByteLevel", "ByteFallback", "Fuse")


class SentencePieceVocabulary:
    """`tokenizer.model`, run by `sentencepiece`, and the tokens that `add_tokens` adds to it."""

    def __init__(self, data: bytes):
        self.library = sentencepiece.SentencePieceProcessor()
        self.library.load_from_serialized_proto(data)
        self.size = self.library.get_piece_size()
        self.is_empty = self.size == 0
        names = {self.library.id_to_piece(id): id for id in range(self.size)}
        self.control = {name: id for name, id in names.items() if self.library.is_control(id)}
        self._added: dict[str, int] = {}  # no control tokens: recognized in any text, and decoded
        self._known_bytes = dict.fromkeys(self.control.values(), b"")  # not the library's
        ids = self.library.bos_id(), self.library.eos_id()
        self.bos, self.eos = (self.library.id_to_piece(id) if id >= 0 else None for id in ids)
        self.prefix = [ids[0]] if self.bos else []
        self.strip = self.library.encode("a", out_type=str)[0].startswith("▁")

    def add_tokens(self, tokens: dict[int, dict]) -> None:
        """Add the tokens of Hugging Face's `added_tokens_decoder`, see `added_tokens`."""
        for id, token in tokens.items():
            (self.control if token.get("special") else self._added)[token["content"]] = id
            self._known_bytes[id] = b"" if token.get("special") else token["content"].encode()
            self.size = max(self.size, id + 1)

    def encode(self, text: str, special: bool) -> list[int]:
        named = self._added | self.control if special else self._added
        ids = []
        # As in Llama's tokenizer.json, each part between named tokens is encoded as a text of its
        # own, with a leading space.
        for number, part in enumerate(re.split(f"({any_of(named)})", text)):
            ids += [named[part]] if number % 2 else self.library.encode(part)
        return ids

    def ranked(self) -> list[int]:
        # Byte-pair encoding puts characters, which no merge makes, after all merges.
        first = {id for id in map(self.library.piece_to_id, ["▁", *map(chr, range(128))])}
        ids = range(self.library.get_piece_size())  # bytes have the score 0, the largest
        return sorted(ids, key=lambda id: (id not in first, -self.library.get_score(id), id))

    def find(self, name: str) -> int | None:
        id = (self.control | self._added).get(name, self.library.piece_to_id(name))
        is_unknown = id == self.library.unk_id() and name != self.library.id_to_piece(id)
        return None if is_unknown else id

    def token_bytes(self, id: int) -> bytes:
        if id in self._known_bytes:
            return self._known_bytes[id]
        if id >= self.library.get_piece_size():
            return b""
        piece = self.library.id_to_piece(id)
        if self.library.is_byte(id):
            return bytes.fromhex(piece[3:5])
        return (" ⁇ " if self.library.is_unknown(id) else piece.replace("▁", " ")).encode()


loaded_ahead: dict[Path, Tokenizer] = {}  # by directory; the next `load_tokenizer` takes it


def start_library() -> None:
    """Have `tokenizers` allocate what each thread has once, and needs the loader's lock for.

    After this, `load_ahead` does not wait while another thread loads libraries.
    """
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    library.encode("a")


def load_ahead(directory: Path) -> None:
    """Load a tokenizer for the next `load_tokenizer`, which raises what is wrong with it."""
    with suppress(OSError, ValueError):
        loaded_ahead[directory] = load_tokenizer(directory)


def load_tokenizer(directory: str | Path, made: bytes | None = None) -> Tokenizer:
    """Load `tokenizer.json`, or else `tokenizer.model`, with the Hugging Face files beside it.

    made: a tokenizer.json that the directory lacks, made of its other files. Raises ValueError,
    one line, if neither exists or a file is invalid.
    """
    directory = Path(directory)
    if made is None and (found := loaded_ahead.pop(directory, None)):
        return found
    candidates = [directory / "tokenizer.json", directory / "tokenizer.model"]
    path = candidates[0] if made else next((each for each in candidates if each.is_file()), None)
    if path is None:
        fetch = "python scripts/download.py --repo_id OWNER/NAME"
        fix = f"copy it from the original, or fetch that again: {fetch}"
        raise ValueError(f"{directory} holds neither tokenizer.json nor tokenizer.model; {fix}")
    kind = JsonVocabulary if path.suffix == ".json" else SentencePieceVocabulary
    added = added_tokens(directory)
    try:
        vocabulary = kind(made or path.read_bytes())
        vocabulary.add_tokens(added)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic in Rust is not even an Exception
        cause = f"is not a tokenizer this program can read ({one_line(error)})"
        raise ValueError(f"{path} {cause}; download it again") from error
    if vocabulary.is_empty:
        raise ValueError(f"{path} has an empty vocabulary; download it again")
    return Tokenizer(vocabulary, directory)


def _byte_alphabet() -> dict[str, int]:
    """Return byte-level BPE's alphabet as {character: byte} (GPT-2, Radford et al. 2019).

    A printable byte is the Latin-1 character of that number; the other 68 bytes, in order, are the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


def added_tokens(directory: Path) -> dict[int, dict]:
    """Return the tokens that stand beside a vocabulary: {id: {"content": "<think>", ...}}.

    They are `added_tokens_decoder` of tokenizer_config.json, or without it added_tokens.json, whose
    tokens are special if a config names them as special. Raises ValueError for other values.
    """
    config = _read_json(directory / "tokenizer_config.json")
    tokens = config.get("added_tokens_decoder")
    if tokens is None:
        config = _read_json(directory / "special_tokens_map.json") | config
        special = set(_special_names(config).values())
        for key in ("additional_special_tokens", "extra_special_tokens"):
            named = config.get(key)
            special |= {_token_text(t, key) for t in (named if isinstance(named, list) else ())}
        named = _read_json(directory / "added_tokens.json")
        tokens = {str(id): {"content": t, "special": t in special} for t, id in named.items()}
    if not isinstance(tokens, dict) or not all(
        id.isascii() and id.isdecimal() and isinstance(token, dict) for id, token in tokens.items()
    ):
        cause = "added_tokens_decoder must map ids to tokens (added_tokens.json: tokens to ids)"
        raise ValueError(f"tokenizer_config.json: {cause}")
    return {
        int(id): token | {"content": _token_text(token, f"token {id}") or ""}
        for id, token in tokens.items()
    }


def _special_names(config: dict) -> dict[str, str]:
    """Return the special tokens of a Hugging Face config: {"bos_token": "<s>", ...}."""
    names = {
        key: _token_text(config[key], key) for key in config if re.fullmatch("[a-z]+_token", key)
    }
    return {key: name for key, name in names.items() if name is not None}


def _eos_ids(path: Path) -> tuple[int, ...]:
    """Return `eos_token_id` of a Hugging Face config, which is an id, a list, or missing."""
    value = _read_json(path).get("eos_token_id")
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(type(id) is int and id >= 0 for id in ids):
        raise ValueError(f"{path}: eos_token_id is {value!r}; make it an id or a list of ids")
    return ids


def _token_text(token, key: str) -> str | None:
    """Return the text of a token: Hugging Face writes a string, or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return None
    if not isinstance(text, str) or text != text.encode(errors="replace").decode():
        fix = "make it the token's text"
        raise ValueError(f"tokenizer_config.json: {key} is {token!r}; {fix}")
    return text


def _read_json(path: Path) -> dict:
    """Return the object in a JSON file; {} if there is no file."""
    if not path.is_file():
        return {}
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        cause = f"is not valid JSON ({one_line(error)})"
        raise ValueError(f"{path} {cause}; download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; download it again")
    return value
