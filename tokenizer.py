"""Text to ids and back: one class over `tokenizer.json` and sentencepiece's `tokenizer.model`.

Decoding rests on one fact: in both kinds an id stands for a few fixed bytes, and text is the UTF-8 reading of those
bytes in a row. So decoding is a join, and streaming is Python's incremental UTF-8 decoder: a character split over
several tokens waits until it is whole, and every token costs the same however long the text has grown.

User text is text: `"</s>"` in a prompt is four characters, not the end of the sequence. Only what a chat template
itself writes, or `encode(..., special=True)`, can name a control token.
"""

import codecs
import json
import re
from datetime import datetime
from functools import cached_property
from pathlib import Path

import jinja2
import sentencepiece
import tokenizers
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

# In a chat, a character followed by this one is text and never part of a control token (see `_shield`).
# It is a Unicode noncharacter, which no text that is meant for exchange contains.
TEXT_MARK = "\ufdd0"


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        vocab_size: every id is below it; the model's embedding may be longer (padded), never shorter.
        bos_id: the id of the beginning-of-sequence token, None where there is none.
        stop_ids: ids that end an answer.
        has_chat_template: whether `chat` and `chat_text` can be called.
    """

    def __init__(self, vocabulary, directory: Path):
        self._vocabulary = vocabulary
        config = _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")
        # HF names them bos_token, eos_token, pad_token ...; each a string, or an object that holds it, or null.
        self._names = {key: _content(config[key], key) for key in config if re.fullmatch("[a-z]+_token", key)}
        self._names = {key: name for key, name in self._names.items() if name is not None}
        for key, default in (("bos_token", vocabulary.bos), ("eos_token", vocabulary.eos)):
            if key not in config and default is not None:
                self._names[key] = default
        eos_id = vocabulary.find(self._names.get("eos_token", ""))

        self.vocab_size: int = vocabulary.size
        self.bos_id: int | None = vocabulary.find(self._names.get("bos_token", ""))
        self.stop_ids: tuple[int, ...] = (
            _eos_ids(directory / "generation_config.json")
            or _eos_ids(directory / "config.json")
            or (() if eos_id is None else (eos_id,))
        )
        add_bos = config.get("add_bos_token")
        if add_bos not in (True, False, None):
            raise ValueError(f"tokenizer_config.json: add_bos_token is {add_bos!r}; make it true or false")
        self._prefix = [] if add_bos is False else vocabulary.prefix
        if add_bos and not self._prefix and self.bos_id is not None:
            self._prefix = [self.bos_id]

        self._template_text = _template_text(directory, config)
        self.has_chat_template: bool = bool(self._template_text)

        self._control = re.compile(_any_of(vocabulary.control))
        self._bytes: dict[int, bytes] = {}  # what each id seen so far stands for

    def encode(self, text: str, bos: bool = True, *, special: bool = False) -> list[int]:
        """Ids of `text`. With `bos`, what the tokenizer's own config puts first is put first, once (Llama: BOS;
        Qwen: nothing); an end token is never appended, because a prompt is there to be continued. With `special`,
        control tokens written in the text become their ids, as in a prompt formatted by hand. (Tokens added to the
        vocabulary that are no control tokens, such as Qwen's <think>, are found in any text.)

        Raises ValueError for text that is not valid Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise ValueError(f"the text is not valid Unicode at character {e.start}; give it as UTF-8") from None
        ids = self._vocabulary.encode(text, special)
        return self._prefix + ids if bos and ids[: len(self._prefix)] != self._prefix else ids

    def decode(self, ids) -> str:
        """Text of `ids`, an iterable of int. Special tokens and ids beyond the vocabulary are skipped; bytes that are
        not UTF-8 read as U+FFFD; the space that a Llama-type tokenizer puts before a text is taken off again."""
        stream = self.stream()
        return "".join(map(stream.push, ids)) + stream.flush()

    def stream(self, prompt_ids=()) -> "Stream":
        """A decoder that takes one id at a time. For text that continues a prompt give the prompt's ids: a leading
        space then belongs to the text, and `decode(prompt_ids)` + the stream's text is `decode` of all the ids."""
        return Stream(self, prompt_ids)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of text that one id stands for; empty for special tokens and ids beyond the vocabulary."""
        if id not in self._bytes:
            self._bytes[id] = self._vocabulary.piece(id) if 0 <= id < self.vocab_size else b""
        return self._bytes[id]

    def chat_text(self, messages: list[dict], add_generation_prompt: bool = True, **variables) -> str:
        """The conversation as the checkpoint's template writes it. `messages` are dicts with `role` and `content`;
        `variables` are further names for the template (`tools`; Qwen3 knows `enable_thinking`).

        Raises ValueError where there is no template, or with what the template says against the messages.
        """
        return self._render(messages, add_generation_prompt, variables).replace(TEXT_MARK, "")

    def chat(self, messages: list[dict], add_generation_prompt: bool = True, **variables) -> list[int]:
        """Ids of `chat_text`: the template's control tokens as their ids, those spelt out in a message as plain text,
        and no BOS but the template's own."""
        text = self._render(messages, add_generation_prompt, variables)
        # Every second part is a run of marked characters; a mark left alone by the template's slicing is dropped.
        parts = re.split(f"((?:[^{TEXT_MARK}]{TEXT_MARK})+)", text)
        parts = [(part.replace(TEXT_MARK, ""), i % 2 == 0) for i, part in enumerate(parts)]
        return [id for part, special in parts if part for id in self.encode(part, bos=False, special=special)]

    def _render(self, messages, add_generation_prompt: bool, variables: dict) -> str:
        if not self.has_chat_template:
            raise ValueError("this checkpoint has no chat template; give a plain prompt, or use an instruct checkpoint")
        if not isinstance(messages, list | tuple) or not all(isinstance(m, dict) for m in messages):
            raise ValueError('a chat is a list of messages such as {"role": "user", "content": "Hello"}')
        context = {"messages": messages, "tools": None, "documents": None} | variables
        try:
            context = self._shield(context)
            return self._template.render(self._names | context, add_generation_prompt=add_generation_prompt)
        except Exception as e:  # the template is the checkpoint's own program: it may fail in any way
            raise ValueError(f"chat template: {_one_line(e)}") from None

    @cached_property
    def _template(self) -> jinja2.Template:
        # A template comes with a download, so it runs in jinja's sandbox. The names are those transformers gives it.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = _tojson
        return environment.from_string(self._template_text)

    def _shield(self, value):
        """`value` with every control token spelt out in one of its strings taken apart by marks."""
        if isinstance(value, str):
            value = value.replace(TEXT_MARK, "")
            return self._control.sub(lambda match: "".join(c + TEXT_MARK for c in match[0]), value)
        if isinstance(value, dict):
            return {self._shield(key): self._shield(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._shield(item) for item in value]
        return value


class Stream:
    """Text from ids one at a time, from `Tokenizer.stream`."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer._vocabulary.strip  # the first space is still to be taken off
        for id in prompt_ids:
            self.push(id)

    def push(self, id: int) -> str:
        """The text that is certain now and was not before: "" while a character is incomplete."""
        data = self._tokenizer.token_bytes(id)
        if data and self._strip:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole, else ""."""
        return self._utf8.decode(b"", final=True)


class _JsonVocabulary:
    """`tokenizer.json`, run by `tokenizers`.

    Both vocabularies have: `size`; `control` {name: id}; `bos` and `eos`, names or None; `prefix`, the ids put before a
    text; `strip`, whether decoding takes off one leading space; `encode(text, special)`, `find(name)`, `piece(id)`.
    """

    def __init__(self, data: bytes):
        self.library = tokenizers.Tokenizer.from_str(data.decode())
        self.library.no_truncation()  # a checkpoint may carry its training set-up's
        self.library.no_padding()
        self.size = max(self.library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = self.library.get_added_tokens_decoder()
        self.control = {token.content: id for id, token in added.items() if token.special}
        self.hidden = set(self.control.values())

        # What the post-processor puts before a text: BOS, for most that put anything.
        plain, full = (self.library.encode("a", add_special_tokens=special).ids for special in (False, True))
        self.prefix = full[: next((n for n in range(len(full)) if full[n : n + len(plain)] == plain), 0)]
        self.bos = self.library.id_to_token(self.prefix[0]) if self.prefix else None
        self.eos = None

        decoder = json.loads(self.library.decoder.__getstate__()) if self.library.decoder else {"decoders": []}
        steps = decoder.get("decoders", [decoder])
        kinds = {step["type"] for step in steps}
        if kinds - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            raise ValueError(f"its decoder {' + '.join(sorted(kinds))} is not of the byte-level or the Llama type")
        self.byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        self.joiner = "" if steps else " "  # without a decoder, tokens are words
        self.strip = not steps or any(
            step.get("start", 0) > 0 or step.get("prepend_scheme", "never") != "never" for step in steps
        )

    def encode(self, text: str, special: bool) -> list[int]:
        self.library.encode_special_tokens = not special  # the library's word for: encode their names as text
        return self.library.encode(text, add_special_tokens=False).ids

    def find(self, name: str) -> int | None:
        return self.library.token_to_id(name)

    def piece(self, id: int) -> bytes:
        token = self.library.id_to_token(id)
        if token is None or id in self.hidden:
            return b""
        if self.byte_level:  # added tokens are plain text, and may hold characters outside the alphabet
            return bytes(map(_BYTE_OF.get, token)) if all(c in _BYTE_OF for c in token) else token.encode()
        if self.byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes.fromhex(token[3:5])
        return (self.joiner + token.replace("▁", " ")).encode()


class _SentencePieceVocabulary:
    """`tokenizer.model`, run by `sentencepiece`, and the tokens that `tokenizer_config.json` adds to it."""

    def __init__(self, data: bytes):
        self.library = sentencepiece.SentencePieceProcessor()
        self.library.load_from_serialized_proto(data)
        self.size = self.library.get_piece_size()
        names = {self.library.id_to_piece(id): id for id in range(self.size)}
        self.control = {name: id for name, id in names.items() if self.library.is_control(id)}
        self.added: dict[str, int] = {}  # not special: named in any text, and shown
        self.fixed = dict.fromkeys(self.control.values(), b"")  # what `piece` knows without the library
        ids = self.library.bos_id(), self.library.eos_id()
        self.bos, self.eos = (self.library.id_to_piece(id) if id >= 0 else None for id in ids)
        self.prefix = [ids[0]] if self.bos else []
        self.strip = self.library.encode("a", out_type=str)[0].startswith("▁")

    def add(self, tokens: dict):
        """HF's `added_tokens_decoder`: {"32000": {"content": "<|im_end|>", "special": true}, ...}."""
        if not isinstance(tokens, dict) or not all(id.isdecimal() and isinstance(t, dict) for id, t in tokens.items()):
            raise ValueError("tokenizer_config.json: added_tokens_decoder must map ids to tokens")
        for key, token in tokens.items():
            id, name = int(key), _content(token, f"token {key}") or ""
            (self.control if token.get("special") else self.added)[name] = id
            self.fixed[id] = b"" if token.get("special") else name.encode()
            self.size = max(self.size, id + 1)

    def encode(self, text: str, special: bool) -> list[int]:
        # As Llama's tokenizer.json has it, each stretch between named tokens is a text of its own, leading space too.
        named = self.added | self.control if special else self.added
        parts = enumerate(re.split(f"({_any_of(named)})", text))
        return [id for i, part in parts for id in ([named[part]] if i % 2 else self.library.encode(part))]

    def find(self, name: str) -> int | None:
        id = (self.control | self.added).get(name, self.library.piece_to_id(name))
        return None if id == self.library.unk_id() and name != self.library.id_to_piece(id) else id

    def piece(self, id: int) -> bytes:
        if id in self.fixed:
            return self.fixed[id]
        if id >= self.library.get_piece_size():
            return b""
        if self.library.is_byte(id):
            return bytes.fromhex(self.library.id_to_piece(id)[3:5])
        return (" ⁇ " if self.library.is_unknown(id) else self.library.id_to_piece(id).replace("▁", " ")).encode()


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer in `directory`: `tokenizer.json`, else `tokenizer.model`, with the Hugging Face files beside it.

    Raises ValueError, one line, where there is neither or where a file is not what its name says.
    """
    directory = Path(directory)
    path = next((p for p in map(directory.joinpath, ("tokenizer.json", "tokenizer.model")) if p.is_file()), None)
    if path is None:
        fix = "copy it from the original, or fetch that again: python scripts/download.py --repo_id OWNER/NAME"
        raise ValueError(f"{directory} holds neither tokenizer.json nor tokenizer.model; {fix}")
    try:
        data = path.read_bytes()
        vocabulary = _JsonVocabulary(data) if path.suffix == ".json" else _SentencePieceVocabulary(data)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # bare Exception, RuntimeError, and a Rust panic, which is not even an Exception
        raise ValueError(f"{path} is not a tokenizer this program can read ({_one_line(e)}); download it again") from e
    if vocabulary.size == 0:
        raise ValueError(f"{path} has an empty vocabulary; download it again")
    if path.name == "tokenizer.model":
        vocabulary.add(_read_json(directory / "tokenizer_config.json").get("added_tokens_decoder") or {})
    return Tokenizer(vocabulary, directory)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet (Radford et al. 2019, GPT-2): printable bytes are the Latin-1 character of that number,
    the other 68 are the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class _Generation(Extension):
    """`{% generation %}` marks an answer's words for training; for us it is what stands inside it."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own protocol)

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja2's own filter escapes HTML, and a model was trained on JSON as it is.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _template_text(directory: Path, config: dict) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{directory / 'tokenizer_config.json'}: chat_template must be a text or named texts")
    return template


def _eos_ids(path: Path) -> tuple[int, ...]:
    """`eos_token_id` of an HF config: an id, several, or none."""
    value = _read_json(path).get("eos_token_id")
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(type(id) is int and id >= 0 for id in ids):
        raise ValueError(f"{path}: eos_token_id is {value!r}; make it an id or a list of ids")
    return ids


def _content(token, key: str) -> str | None:
    """A token's text: HF writes it as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and (not isinstance(text, str) or text != text.encode(errors="replace").decode()):
        raise ValueError(f"tokenizer_config.json: {key} is {token!r}; make it the token's text")
    return text


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"cannot read {path} ({_one_line(e)}); download it again") from None


def _read_json(path: Path) -> dict:
    """The object in a JSON file; empty where there is no file."""
    if not path.is_file():
        return {}
    text = _read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is not valid JSON ({_one_line(e)}); download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; download it again")
    return value


def _any_of(names) -> str:
    """A pattern that matches any of the names, the longest where several do."""
    return "|".join(map(re.escape, sorted(filter(None, names), key=len, reverse=True))) or "(?!)"  # (?!) never matches


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
