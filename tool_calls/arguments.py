"""Values of tool calls: an argument that is written as text gets a type that its schema accepts."""

import math
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from tool_calls.lenient_json import Number, bare_atom, parse_json, parse_lenient

MAX_DEPTH = 32  # of combined schemas
MAX_STEPS = 2000  # subschemas read for one value; a schema may refer to itself
# Names of types that are not JSON Schema's, as tools' authors write them.
OTHER_NAMES = {
    "str": "string",
    "text": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "none": "null",
}
KINDS = (
    ("null", type(None)),
    ("boolean", bool),
    ("integer", int),
    ("number", int | float),
    ("string", str),
    ("array", list),
    ("object", dict),
)
# Keywords that restrict values of one type. A schema with them, but no type, means that type.
IMPLIED = {
    "string": {"pattern", "minLength", "maxLength", "format", "contentMediaType"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "object": {"properties", "required", "additionalProperties", "patternProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
}
ANY_TYPE = object()  # accepted only by a schema that restricts no type


class Schema:
    """A JSON schema of arguments, or a part of one, as far as types and listed values go."""

    def __init__(self, schema: Any, root: Any = None):
        self.schema = schema
        self.root = schema if root is None else root

    def at(self, key: str) -> "Schema":
        """Return the schema of a property."""
        found = [part["properties"][key] for part in self.parts() if key in members(part)]
        if not found:
            others = (part.get("additionalProperties") for part in self.parts())
            found = [other for other in others if isinstance(other, dict)]
        return Schema(found[0] if len(found) == 1 else {"anyOf": found} if found else {}, self.root)

    def items(self, index: int) -> "Schema":
        """Return the schema of a list's item."""
        for part in self.parts():
            firsts = part.get("prefixItems")
            if isinstance(firsts, list) and index < len(firsts):
                return Schema(firsts[index], self.root)
            if isinstance(part.get("items"), dict):
                return Schema(part["items"], self.root)
        return Schema({}, self.root)

    def names(self) -> set[str]:
        """Return the names of the properties."""
        return {name for part in self.parts() for name in members(part)}

    def parts(self) -> Iterator[dict]:
        """Yield the schema and those that it combines or refers to."""
        waiting = [self.schema]
        for _ in range(MAX_STEPS):
            if not waiting:
                return
            part = self.resolve(waiting.pop(0))
            if isinstance(part, dict):
                yield part
                for keyword in ("allOf", "anyOf", "oneOf"):
                    found = part.get(keyword)
                    waiting += found if isinstance(found, list) else []

    def resolve(self, schema: Any) -> Any:
        """Follow references within the document. An unresolvable one accepts everything."""
        for _ in range(20):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str):
                return schema
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            schema = find_pointer(self.root, reference, {})
            if rest.keys() - {"description", "title", "default", "examples", "deprecated"}:
                return {"allOf": [schema, rest]}
        return {}

    def accepts(self, value: Any, exact: bool = True) -> bool:
        """Whether the schema accepts a value, by types and, if `exact`, by the values it lists."""
        self.steps = MAX_STEPS
        return self.check(self.schema, value, exact, MAX_DEPTH)

    def check(self, schema: Any, value: Any, exact: bool, depth: int) -> bool:
        self.steps -= 1
        schema = self.resolve(schema)
        if self.steps < 0 or not depth or not isinstance(schema, dict):
            return schema is not False
        if value is None and schema.get("nullable") is True:
            return True
        for keyword, combine in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            options = schema.get(keyword)
            options = options if isinstance(options, list) and options else [True]
            if not combine(self.check(option, value, exact, depth - 1) for option in options):
                return False
        excluded = schema.get("not") if exact and value is not ANY_TYPE else None
        if isinstance(excluded, dict) and self.check(excluded, value, exact, depth - 1):
            return False
        listed = schema.get("enum")
        listed = [schema["const"]] if "const" in schema else listed
        if isinstance(listed, list):
            same = [
                type(entry) is type(value) and (not exact or entry == value) for entry in listed
            ]
            if not any(same):
                return False
        return value_has_type(value, schema)


def find_pointer(document: Any, reference: str, default: Any) -> Any:
    """Return the part of a JSON document at a pointer such as #/$defs/name."""
    if not re.match(r"#(/|$)", reference):
        return default
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        is_index = isinstance(document, list) and re.fullmatch("[0-9]{1,9}", step)
        if is_index and int(step) < len(document):
            document = document[int(step)]
        elif isinstance(document, dict) and step in document:
            document = document[step]
        else:
            return default
    return document


def members(schema: dict) -> dict:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def value_has_type(value: Any, schema: dict) -> bool:
    """Whether a value has a type that a schema names or implies."""
    names = schema.get("type")
    if names is None:
        names = [name for name, keywords in IMPLIED.items() if keywords & schema.keys()]
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names:
        return True
    lowered = [name.lower() for name in names if isinstance(name, str)]
    names = {OTHER_NAMES.get(name, name) for name in lowered}
    if "any" in names:
        return True
    found = {name for name, kind in KINDS if isinstance(value, kind)}
    if isinstance(value, bool):
        found = {"boolean"}
    if isinstance(value, float) and value.is_integer():
        found.add("integer")
    return bool(found & names)


def typed_value(text: str, schema: Schema) -> Any:
    """Return an argument's value: the text if the schema accepts it, else the value that it spells.

    A schema without types gets JSON if the text is JSON other than a text.
    """
    stripped = text.strip()
    if stripped in ("null", "None") and schema.accepts(None):
        return None
    if schema.accepts(ANY_TYPE):
        value = parse_json(stripped)
        value = bare_atom(stripped) if value is None else value
        return text if isinstance(value, str) else value
    if schema.accepts(text):
        return text
    readings = list(read(stripped))
    for exact in (True, False):
        for value in readings:
            if schema.accepts(value, exact):
                is_whole = isinstance(value, float) and value.is_integer()
                return int(value) if is_whole and not schema.accepts(0.5, False) else value
        if schema.accepts(text, exact=False):
            return text
    return None if is_infinite(stripped) and schema.accepts(None) else [*readings, text][0]


def read(text: str) -> Iterator[Any]:
    """Yield the values other than a text that a text may spell."""
    value = parse_json(text)
    value = bare_atom(text) if value is None else value
    if not isinstance(value, str):
        yield value
    elif value != text:  # JSON of a text, such as "5"
        yield from read(value.strip())
    elif text[:1] in ("{", "["):
        value, _ = parse_lenient(text)
        yield from () if value is None else (value,)
    else:
        try:
            yield int(text) if text.lstrip("+-").isdecimal() else Number(text).value()
        except ValueError:
            return


def is_infinite(text: str) -> bool:
    """Whether a text is a number that JSON lacks: NaN, Infinity, 1e999."""
    try:
        return not math.isfinite(float(text))
    except ValueError:
        return False


def conform(value: Any, schema: Schema) -> Any:
    """Return a value with the types of a schema, where its parts spell values of these types.

    The value's numbers are instances of Number.
    """
    if isinstance(value, dict):
        return {key: conform(part, schema.at(key)) for key, part in value.items()}
    if isinstance(value, list):
        return [conform(part, schema.items(index)) for index, part in enumerate(value)]
    if isinstance(value, Number):
        number = value.value()
        is_text = not schema.accepts(number) and schema.accepts(str(value))
        return str(value) if is_text else number
    if isinstance(value, str):
        return value if schema.accepts(value, exact=False) else typed_value(value, schema)
    if isinstance(value, bool) and not schema.accepts(value):
        text = str(value).lower()
        return text if schema.accepts(text) else value
    return value
