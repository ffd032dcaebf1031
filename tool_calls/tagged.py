"""Calls whose arguments stand between tags: the formats of Qwen3-Coder, MiniMax and GLM."""

import re
from typing import ClassVar

from tokenizer import Tokenizer
from tool_calls.parser import MARK, NAME, ArgumentTags, CallParser, Reader, ValueReader, beginnings

MAX_TAGS = 400  # characters of the tags that end a value


class TaggedParser(CallParser):
    """Calls whose arguments are texts between tags.

    A value ends at its own end tag, if a tag of the call follows it: the value may be about tags.
    If the end tag is missing, it ends at the next argument's tag, or at the end of the call.
    """

    value_end: ClassVar[str]
    call_end: ClassVar[str]  # ends a value without an end tag

    def value_stop(self) -> re.Pattern:
        """Return the pattern of a value's end. Its group `key` is that of a next argument."""
        raise NotImplementedError

    def value(self, key: str) -> ValueReader:
        """Read the value of a key; return None if the answer was cut inside of it."""
        pattern, start, value_end = self.value_stop(), 0, self.marker(self.value_end)
        given = {key, *self.arguments}

        def ends_value(match: re.Match) -> bool:
            """Whether the value ends here: a text may spell an argument that the function lacks."""
            if (following := match["key"]) is None:
                return True
            following, at = following.strip("\"' "), match.start()
            is_known = following in self.known or not self.known
            return following not in given and (is_known or self.buffer[at - 1 : at] == "\n")

        while True:
            found = filter(ends_value, pattern.finditer(self.buffer, start))
            if stop := next(found, None):
                break
            start = max(0, len(self.buffer) - MAX_TAGS)
            if not (yield from self.more()):
                break
        region = self.buffer[: stop.start()] if stop else self.buffer
        if stop and stop.end() > stop.start():  # the end tag
            self.buffer = self.buffer[stop.end() :]
            return region
        value, tag, rest = region.rpartition(value_end)
        if stop:
            self.buffer = self.buffer[stop.start() :]
            return value if tag else rest.rstrip()
        if tag:
            self.buffer = rest
            return value
        ends = [
            at for end in (self.call_end, self.closer) if (at := region.find(self.marker(end))) >= 0
        ]
        end = min(ends, default=len(region))
        self.buffer = region[end:]
        return None if self.is_cut and not ends else region[:end].rstrip()


class QwenCoderParser(TaggedParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    function, parameter: the beginnings of the tags of a call and of an argument. quote: around the
    names in both. line: between the tags of an argument and its value.
    """

    in_template = ("<function=",)
    tokens = ("<tool_call>", "</tool_call>")
    function: ClassVar[str] = "<function="
    parameter: ClassVar[str] = "<parameter="
    quote: ClassVar[str] = ""
    line: ClassVar[str] = "\n"
    openers = ("<tool_call>", "<function=")  # some answers lack the first
    closer = "</tool_call>"
    value_end = "</parameter>"
    call_end = "</function>"

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        begin = f"{cls.tokens[0]}\n{cls.function}{cls.quote}"
        return begin + (f"{name}{cls.quote}>\n" if name else "")

    @classmethod
    def argument_tags(cls) -> ArgumentTags:
        before, between = f"{cls.parameter}{cls.quote}", f"{cls.quote}>{cls.line}"
        after, end = f"{cls.line}{cls.value_end}\n", f"{cls.call_end}\n{cls.closer}"
        return ArgumentTags(f"{cls.quote}>\n", before, between, after, end)

    def value_stop(self) -> re.Pattern:
        opener, closer = (re.escape(self.marker(name)) for name in self.tokens)
        key, begin, end = rf"{self.parameter}[^>\n]{{1,200}}[>\n]", self.function, self.call_end
        return re.compile(
            rf"{self.value_end}(?=\s{{0,99}}(?:{end}|{key}|{closer}))"
            rf"|(?={self.parameter}(?P<key>[^>\n]{{1,200}})[>\n])"
            rf"|(?={end}\s{{0,99}}(?:{closer}|{opener}|{begin}))"
            rf"|(?={closer}\s{{0,99}}(?:{opener}|{begin}))|(?={opener}\s{{0,99}}{begin})"
        )

    def call(self) -> Reader:
        opener, closer = (self.marker(name) for name in self.tokens)
        start = self.function if self.opener == opener else ""
        if start and (yield from self.begins_with("{", "[")):
            return (yield from self.json_calls())
        # Some answers lack the bracket, or have quotes where the format has none.
        head = rf"\s*{start}[\"']?({NAME})[\"']?(?:>|[ \t]*(?=\n))\s*"
        follows = (self.parameter, self.call_end, closer, opener, self.function, "{")
        whole = rf"{head}(?:{beginnings(*follows)})?"
        match = yield from self.expect(
            rf"{head}(?={'|'.join(map(re.escape, follows))})",
            rf"\s*({beginnings(start) or '(?!)'}|{start}[\"']?(({NAME})[\"']?[ \t]*)?|{whole})?",
        )
        if not match and self.ended and re.fullmatch(whole, self.buffer):
            match = re.match(head, self.buffer)
        if not match:
            return False
        self.begin(match[1])
        self.buffer = self.buffer[match.end() :]
        if self.buffer.startswith("{"):
            complete = yield from self.json_arguments()
            yield from self.skip_closer(self.call_end)
        elif complete := (yield from self.parameters()):
            self.end_arguments()
        if complete:
            yield from self.skip_closer(closer)
        return True

    def ends(self) -> tuple[str, ...]:
        return self.call_end, *super().ends()

    def parameters(self) -> Reader:
        """Read parameters up to the function's end; return False if the text ends inside of one."""
        opener, closer = (self.marker(name) for name in self.tokens)
        start = rf"\s*{self.parameter}([^>\n]+)(?:>|(?=\n))"
        end = rf"\s*(?:{self.call_end}|(?={re.escape(closer)}))"
        tags = beginnings(self.parameter, self.call_end, opener, closer)
        while True:
            match = yield from self.expect(
                f"{start}|{end}", rf"\s*({self.parameter}[^>\n]*|{tags})?"
            )
            if not match:
                return self.ends_cleanly()
            self.buffer = self.buffer[match.end() :]
            if not match[1]:
                return True
            key = match[1].strip("\"' ")
            value = yield from self.value(key)
            if value is None:
                return False
            self.add_argument(key, value.removeprefix(self.line).removesuffix(self.line))


class MiniMaxParser(QwenCoderParser):
    """MiniMax-M2: `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`.

    One pair of `<minimax:tool_call>` tags is around all calls of an answer. Values have no lines of
    their tags: a new line at the end of a file's text is the text's own.
    """

    in_template = ("<minimax:tool_call>",)
    tokens = ("<minimax:tool_call>", "</minimax:tool_call>")
    function = "<invoke name="
    parameter = "<parameter name="
    quote, line = '"', ""
    openers = ("<minimax:tool_call>", "<invoke name=")
    closer = "</minimax:tool_call>"
    call_end = "</invoke>"


class GlmParser(TaggedParser):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM."""

    in_template = ("<arg_key>",)
    tokens = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    openers = ("<tool_call>",)
    closer = "</tool_call>"
    value_end = "</arg_value>"
    call_end = "</tool_call>"

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        return "<tool_call>" + (name or "")

    @classmethod
    def argument_tags(cls) -> ArgumentTags:
        tags = "\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"
        return ArgumentTags("", *tags, "\n</tool_call>")

    def value_stop(self) -> re.Pattern:
        opener, closer, key, key_end, value, value_end = self.tags()
        return re.compile(
            rf"{value_end}(?=\s{{0,99}}(?:{key}|{closer}|{opener}))"
            rf"|(?={key}\s{{0,99}}(?P<key>[^<{MARK}]{{1,200}}?)\s{{0,99}}(?:{key_end}|{value}))"
            rf"|(?={closer}\s{{0,99}}{opener})|(?={opener}\s{{0,99}}{NAME}\s{{0,99}}{key})"
        )

    def call(self) -> Reader:
        if (yield from self.begins_with("{", "[")):
            return (yield from self.json_calls())
        opener, closer, key = (self.marker(name) for name in self.tokens[:3])
        follows = beginnings(key, closer, opener, "{")
        match = yield from self.expect(
            rf"\s*({NAME})\s*(?={re.escape(key)}|{re.escape(closer)}|{re.escape(opener)}|\{{)",
            rf"\s*(({NAME})\s*({follows})?)?",
        )
        if not match and self.ended:
            match = re.fullmatch(rf"\s*({NAME})\s*", self.buffer)
        is_open = match and not self.buffer.startswith((key, closer), match.end())
        if not match or (is_open and match[1] not in self.schemas):
            return False
        self.begin(match[1])
        self.buffer = self.buffer[match.end() :]
        if self.buffer.startswith("{"):
            complete = yield from self.json_arguments()
        elif complete := (yield from self.pairs()):
            self.end_arguments()
        if complete:
            yield from self.skip_closer(closer)
        return True

    def pairs(self) -> Reader:
        """Read keys and values; return False if the text ends inside of one."""
        _, closer, key, key_end, value, _ = self.tags()
        start = rf"\s*{key}\s*([^<{MARK}]{{1,200}}?)\s*(?:{key_end})?\s*{value}"
        tags = beginnings(*map(self.marker, self.tokens[:3]))
        begun = beginnings(self.marker("<arg_value>"))
        ends = rf"{key_end}\s*({begun})?|{begun}|{beginnings(self.marker('</arg_key>'))}"
        while True:
            match = yield from self.expect(
                rf"{start}|\s*(?={closer})", rf"\s*({key}[^<{MARK}]*({ends})?|{tags})?"
            )
            if not match:
                return self.ends_cleanly()
            self.buffer = self.buffer[match.end() :]
            if match[1] is None:
                return True
            text = yield from self.value(match[1])
            if text is None:
                return False
            self.add_argument(match[1], text)
