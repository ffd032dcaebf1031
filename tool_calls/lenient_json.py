"""JSON as models write it: a scanner that streams valid JSON, and a repair of the rest.

Models write single quotes or none, Python's names, NaN and code fences, and forget commas and
brackets. A client must get JSON (RFC 8259), which has none of these.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from chat_template import HIGH, LOW

BRACKETS = {"{": "}", "[": "]"}
SPACE = re.compile(r"\s*")
# Two escapes are one character: a high and a low surrogate.
BEGUN_LOW = r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z"
UNICODE = rf"(?!{HIGH})\\u[0-9a-fA-F]{{4}}|{HIGH}(?:{LOW}|(?!{BEGUN_LOW}))"
# A piece of a text that is valid JSON. "<" and U+FDD1 may begin a closing tag.
PLAIN = re.compile(rf'(?:[^"\\<\ufdd1\x00-\x1f]++|\\["\\/bfnrt]|{UNICODE})+')
BEGUN_ESCAPE = re.compile(rf"\\(?:u[0-9a-fA-F]{{0,3}})?\Z|{HIGH}{BEGUN_LOW}")
ATOM = re.compile(r"(?:true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)(?=[\s,}\]])")
BEGUN_ATOM = re.compile(r"[\w.+-]{1,400}\Z")
NUMBER = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
LITERALS = {
    form: value
    for name, value in {"true": True, "false": False, "null": None, "none": None}.items()
    for form in {name, name.title(), name.upper()} - {"none"}  # Python writes None
}
WRONG = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\\'|["\\\x00-\x1f\ud800-\udfff]')
FENCE = re.compile(r"\s*```(?:json)?")


class Number(str):
    """A number as it is written: `1.10` stays so where a schema accepts a text only."""

    def value(self) -> int | float:
        """Return the number. Raises ValueError if JSON has none such."""
        if re.fullmatch(r"[+-]?\d+", self):
            return int(self)  # of 309 digits and more it has no float
        number = float(self)
        if not math.isfinite(number):
            raise ValueError(f"{self:.40} is not finite")
        return number


def finite(text: str) -> int | float:
    return Number(text).value()


def parse_json(text: str) -> Any:
    """Return a JSON value; None if the text is none. NaN and infinities are none."""
    try:
        return json.loads(text, parse_constant=finite, parse_float=finite)
    except (ValueError, RecursionError):
        return None


def parse_lenient(text: str) -> tuple[Any, int]:
    """Return the value of JSON that may need a repair, and where it ends; None if there is none."""
    fence = FENCE.match(text)
    start = fence.end() if fence else 0
    value = parse_json(text[start:])
    if value is not None:
        return value, len(text)
    repair = Repair(text[start:])
    return parse_json(repair.json()), start + repair.at


def to_json(value: Any) -> str:
    """Return a value as JSON. Lone surrogates become U+FFFD: UTF-8 has none."""
    return re.sub("[\ud800-\udfff]", "\ufffd", json.dumps(value, ensure_ascii=False))


def skip_space(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    return match.end() if match else at


class JsonScanner:
    """Finds how far a value that arrives in pieces is valid JSON.

    closer, opener: tags around calls. Inside of a text a closer ends the value only if an opener
    follows: the text may be about tags. Then, or if something else is not JSON, `broken` is set.
    `complete`: the value has ended. Otherwise more text is needed.
    """

    def __init__(self, closer: str = "", opener: str = ""):
        self.closer, self.opener = closer, opener
        self.open: list[str] = []  # brackets that close the containers, the innermost last
        self.expects = "value"  # or key, colon, next, text
        self.is_key = False  # the text is a key
        self.is_empty = False  # the container has just begun
        self.complete = self.broken = False

    def scan(self, text: str) -> int:
        """Return how many characters are certain. The next text begins after them."""
        at = 0
        while not (self.complete or self.broken):
            step = self.text if self.expects == "text" else self.token
            if (end := step(text, at)) == at:
                break
            at = end
        return at

    def text(self, text: str, at: int) -> int:
        """Return where the next piece inside of a text ends."""
        if match := PLAIN.match(text, at):
            return match.end()
        letter = text[at : at + 1]
        if letter == '"':
            if self.is_key:
                self.expects = "colon"
            else:
                self.end_value()
            return at + 1
        if letter and letter == self.closer[:1]:
            if not text.startswith(self.closer, at):
                return at if self.closer.startswith(text[at:]) else at + 1
            follows = skip_space(text, at + len(self.closer))
            self.broken = text.startswith(self.opener, follows)
            is_begun = self.opener.startswith(text[follows : follows + len(self.opener)])
            return at if self.broken or is_begun else at + 1
        if letter and letter in "<\ufdd1":
            return at + 1
        self.broken = bool(letter) and not BEGUN_ESCAPE.match(text, at)
        return at

    def token(self, text: str, at: int) -> int:
        """Return where the next token outside of texts ends."""
        if (start := skip_space(text, at)) > at:
            return start
        letter = text[at : at + 1]
        if letter == "," and self.expects == "next":
            return self.comma(text, at)
        if [letter] == self.open[-1:] and (self.expects == "next" or self.is_empty):
            self.open.pop()
            self.end_value()
        elif letter == ":" and self.expects == "colon":
            self.expects = "value"
        elif letter == '"' and self.expects in ("key", "value"):
            self.is_key, self.expects, self.is_empty = self.expects == "key", "text", False
        elif letter in BRACKETS and self.expects == "value":
            self.open.append(BRACKETS[letter])
            self.expects, self.is_empty = "key" if letter == "{" else "value", True
        else:
            return self.atom(text, at) if letter else at
        return at + 1

    def comma(self, text: str, at: int) -> int:
        """Return where the item after a comma begins. A repair drops a comma before a bracket."""
        item, is_object = skip_space(text, at + 1), self.open[-1] == "}"
        if item == len(text):
            return at
        self.broken = not re.match('"' if is_object else r'["\w{\[-]', text[item])
        if self.broken:
            return at
        self.expects = "key" if is_object else "value"
        return item

    def atom(self, text: str, at: int) -> int:
        """Return where a number or a name ends."""
        match = None
        if self.expects == "value":
            match = ATOM.match(text, at)
            if not match and BEGUN_ATOM.match(text, at):
                return at
        if not match or (parse_json(match[0]) is None and match[0] != "null"):
            self.broken = True
            return at
        self.is_empty = False
        self.end_value()
        return match.end()

    def end_value(self) -> None:
        self.expects, self.is_empty = "next", False
        self.complete = not self.open


class Repair:
    """Writes JSON for a whole text that is meant as JSON, or for the rest of one.

    scanner: its state is that where the text begins. quote: a further quote, around texts without
    escapes. Afterwards `at` is where the value ends, and `is_plausible` is False if a key has
    neither colon nor value.
    """

    def __init__(self, text: str, scanner: JsonScanner | None = None, quote: str = ""):
        self.text, self.quote, self.at = text, quote, 0
        self.open = list(scanner.open) if scanner else []
        self.expects = scanner.expects if scanner else "value"
        self.is_key = bool(scanner and scanner.is_key)
        self.out: list[str] = []
        self.comma, self.is_plausible = "", True
        quotes = "|".join(map(re.escape, filter(None, (quote, '"', "'"))))
        name = rf"(?:{quotes})(?:(?!{quotes})[^\n]){{1,100}}(?:{quotes})"
        bare = rf"(?:{quotes})?[\w.$/-]{{1,100}}(?:{quotes})?"
        colon = r"\s*(?:=>|:=|=|:(?!//))"
        self.quotes = re.compile(quotes)
        self.key = re.compile(rf"\s*(?:{name}(?:{colon}|\s*[{{\[])|{bare}{colon})")
        self.quoted_key = re.compile(rf"\s*{name}{colon}")
        self.key_end = re.compile(rf"\s*(?:=>|[:=,}}\]{{\[]|\Z|{quotes})")
        self.colon = re.compile(r"\s*(?:=>|:=|[:=])\s*")
        self.end = re.compile(r"\s*,?\s*(?:[}\]]|\Z)")
        self.item_end = re.compile(rf"\s*(?:[,\]}}]|\Z)|\s+(?:{quotes})")

    def json(self, close: bool = True) -> str:
        """Return the JSON. close: end the value. False: the answer was cut, so leave it open."""
        if self.expects == "text":
            self.write_text('"', close)
        while self.open or self.expects != "next":
            self.at = skip_space(self.text, self.at)
            if self.at == len(self.text):
                break
            self.step(self.text[self.at], close)
        self.is_plausible &= self.expects != "colon"
        if close:
            self.fill()
            self.out.extend(reversed(self.open))
        return "".join(self.out)

    def step(self, letter: str, close: bool) -> None:
        """Read the next token."""
        is_object = self.open[-1:] == ["}"]
        if letter in "}]":
            self.close(letter)
        elif self.expects == "next":
            self.at += letter == ","
            self.comma, self.expects = ", ", "key" if is_object else "value"
        elif self.expects == "colon":
            if letter == ",":
                self.is_plausible = False
                self.fill()
                return
            if match := self.colon.match(self.text, self.at):
                self.at = match.end()
            self.out.append(": ")
            self.expects = "value"
        elif letter == ",":
            if is_object and self.expects == "value":
                self.fill()
            self.at += 1
        elif match := self.quotes.match(self.text, self.at):
            self.is_key = self.expects == "key"
            self.put('"')
            self.at = match.end()
            self.write_text(match[0], close)
        elif self.expects == "key":
            self.bare_key()
        elif letter in BRACKETS:
            self.put(letter)
            self.at += 1
            self.open.append(BRACKETS[letter])
            self.expects = "key" if letter == "{" else "value"
        else:
            self.bare_value()

    def put(self, text: str) -> None:
        """Write the beginning of an item."""
        self.out.append(self.comma + text)
        self.comma = ""

    def fill(self) -> None:
        """Write null for a value that is missing."""
        if self.expects == "colon":
            self.out.append(": null")
            self.expects = "next"
        elif self.expects == "value" and self.open[-1:] != ["]"]:
            self.put("null")
            self.expects = "next"

    def close(self, bracket: str) -> None:
        """Close the containers up to one with this bracket; skip a bracket that closes none."""
        self.at += 1
        if bracket not in self.open:
            return
        self.is_plausible &= self.expects != "colon"
        self.fill()
        last = ""
        while last != bracket:
            last = self.open.pop()
            self.out.append(last)
        self.comma, self.expects = "", "next"

    def write_text(self, quote: str, close: bool) -> None:
        """Write a text whose first quote was read."""
        start = self.at
        found = self.key_ending(quote) if self.is_key else self.ending(quote)
        end, self.at = found or (self.rest_end() if close else len(self.text),) * 2
        text = self.text[start:end]
        if quote == self.quote:
            text = text.replace("\\", "\\\\").replace(quote, '"')
        is_cut = not (found or close)
        self.out.append(WRONG.sub(escape, text) + ("" if is_cut else '"'))
        self.expects = "colon" if self.is_key else "next"

    def rest_end(self) -> int:
        """Return where a text without its last quote ends: before the brackets around it."""
        end = len(self.text)
        brackets = len(self.open) + 1  # the call's own
        while end > self.at and (self.text[end - 1].isspace() or brackets):
            if not self.text[end - 1].isspace():
                if self.text[end - 1] not in "}]":
                    break
                brackets -= 1
            end -= 1
        return end

    def candidates(self, quote: str) -> Iterator[tuple[int, int]]:
        """Yield where a text may end: the places of its quote that are not escaped."""
        at = self.at
        while (found := self.text.find(quote, at)) >= 0:
            at = found + len(quote)
            before = found
            while quote != self.quote and before > self.at and self.text[before - 1] == "\\":
                before -= 1
            if (found - before) % 2 == 0:
                yield found, at

    def key_ending(self, quote: str) -> tuple[int, int] | None:
        """Return where a key and its quote end; where the key ends if its quote is missing."""
        start, end = next(self.candidates(quote), (len(self.text),) * 2)
        if start < end and self.key_end.match(self.text, end):
            return start, end
        colon = self.colon.search(self.text, self.at, start)
        return (colon.start(),) * 2 if colon else (start, end) if start < end else None

    def ending(self, quote: str) -> tuple[int, int] | None:
        """Return where a text and its quote end; where the text ends if its quote is missing."""
        for start, end in self.candidates(quote):
            before = self.text[max(self.at, start - 50) : start].rstrip()
            if before.endswith(",") and self.quoted_key.match(self.text, start):
                return (self.text.rindex(",", self.at, start),) * 2  # the quote begins a key
            if self.ends_text(end) or self.is_comma_missing(quote, start, end):
                return start, end
        return None

    def ends_text(self, at: int) -> bool:
        """Whether the text after a quote shows that the quote ends a value."""
        if not self.open:
            return skip_space(self.text, at) == len(self.text)
        if self.open[-1] == "]":
            return bool(self.item_end.match(self.text, at))
        if self.end.match(self.text, at):
            return True
        commas = re.compile(r"[\s,]*").match(self.text, at)
        return bool(commas and self.key.match(self.text, commas.end()))

    def is_comma_missing(self, quote: str, start: int, end: int) -> bool:
        """Whether a list's next text follows at once: two quotes between its items, not three."""
        if self.open[-1:] != ["]"] or not self.text.startswith(quote, end):
            return False
        is_third = self.text.endswith(quote, 0, start) or self.text.startswith(quote * 2, end)
        return not is_third and not self.item_end.match(self.text, end + len(quote))

    def bare_key(self) -> None:
        """Write a key without a first quote."""
        match = re.compile(r"[^:=,{}\[\]\n]+").match(self.text, self.at)
        if not match:
            self.at += 1
            return
        self.at = match.end()
        self.put(to_json(self.quotes.sub("", match[0].strip())))
        self.expects = "colon"

    def bare_value(self) -> None:
        """Write a number, a name, or a text without quotes."""
        end = self.bare_end()
        text = self.text[self.at : end].strip()
        self.at = max(end, self.at + 1)
        if (last := text[-1:]) in ('"', "'") and text.count(last) == 1:
            text = text[:-1]  # its first quote is missing
        text = text.removesuffix(self.quote)
        is_json = parse_json(text) is not None  # 1.10 stays as it is written
        self.put(text if is_json else to_json(bare_atom(text)))
        self.expects = "next"

    def bare_end(self) -> int:
        """Return where a value without quotes ends: before a bracket, a comma or a next key."""
        word = re.compile(r"[\w.+-]+(?=\s)").match(self.text, self.at)
        if word and self.key.match(self.text, word.end()) and is_atom(word[0]):
            return word.end()
        for nests in (True, False):  # brackets of the text may be unbalanced
            depth = 0
            for match in re.compile(r"[,\n{}\[\]]").finditer(self.text, self.at):
                letter, at = match[0], match.start()
                if nests and letter in BRACKETS:
                    depth += 1
                elif letter == "," and self.quoted_key.match(self.text, at + 1):
                    return at
                elif depth:
                    depth -= letter in "}]"
                elif self.ends_bare(letter, at):
                    return at
        return len(self.text)

    def ends_bare(self, letter: str, at: int) -> bool:
        """Whether a text without quotes ends at this bracket, comma or new line."""
        if letter in "}]":
            return letter in self.open
        if self.open[-1:] == ["]"] and letter == ",":
            return True
        follows = self.end.match(self.text, at) or self.key.match(self.text, at + 1)
        return bool(self.open and follows)


def is_atom(text: str) -> bool:
    return not isinstance(bare_atom(text), str)


def bare_atom(text: str) -> Any:
    """Return the value of a number or a name; another text is itself, NaN and infinities too."""
    if text in LITERALS:
        return LITERALS[text]
    try:
        return Number(text).value() if NUMBER.fullmatch(text) else text
    except ValueError:
        return text


def escape(match: re.Match) -> str:
    """Return one character or escape as JSON has it inside of a text."""
    found = match[0]
    if len(found) > 1:
        return "'" if found == "\\'" else found
    return to_json(found)[1:-1]
