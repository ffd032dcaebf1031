"""Grammars of forced calls: `tool_choice` is "required" or names a function.

The prompt has the beginning of the call. The grammar makes the arguments follow the schema.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

from server.constraints import OBJECT, arguments_schema, check_size, lark_text, marker
from tokenizer import Tokenizer
from tool_calls.arguments import Schema, members
from tool_calls.parser import ArgumentTags

# A Python text in single quotes. A quote ends it before a comma or a bracket.
QUOTED = r"/'([^'\\]|\\(.|\n)|'+[^',)\]])*'/"
ALTERNATIVES = {"allOf", "anyOf", "oneOf", "$ref"}
RESTRICTED = {"const", "pattern", "minLength", "maxLength", "format"} | ALTERNATIVES


def forced_call(
    tokenizer: Tokenizer,
    tools: Sequence[tuple[str, dict | None]],
    markers: tuple[str, str] | ArgumentTags,
    name: str | None,
    strict: Collection[str] = (),
) -> str:
    """Return the grammar of a call whose beginning the prompt has: tool_choice required or a name.

    tools: (name, schema of the arguments or None). markers: the texts between a name and its
    arguments, and after these; or the tags of arguments that are no JSON object. Those that are
    control tokens become their ids. name: of the function; None: the answer chooses it. strict:
    names of tools. If such a tool is forced by name and its schema is not supported, the schema is
    refused; other schemas are relaxed. Raises ValueError.
    """
    tags = markers if isinstance(markers, ArgumentTags) else None
    texts = (tags.after_name, tags.end) if tags else markers
    between, end = (marker(tokenizer, text, is_lenient=bool(tags)) for text in texts)
    rules, calls = [], []
    for number, (tool, schema) in enumerate(tools):
        if name in (None, tool):
            is_strict = name is not None and tool in strict
            if tags:
                rules.append(
                    _tagged_arguments(tokenizer, schema or OBJECT, tags, number, is_strict)
                )
            else:
                schema_text = json.dumps(arguments_schema(_object(schema), number, is_strict))
                rules.append(f"arguments{number}: %json {schema_text}\n")
            begin = "" if name else f"{lark_text(tool)} {between}"
            space = "" if tags else '" "?'
            calls.append(f"({begin} {space} arguments{number} {end})")
    if not calls:
        raise ValueError("tool_choice needs a tool, but tools is empty; give one")
    grammar = f"start: {' | '.join(calls)}\n{''.join(rules)}"
    check_size(grammar, "the tools' schemas are")
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})


def _object(schema: dict | None) -> dict:
    """Return a schema of arguments with the type that many leave out."""
    schema = schema or {}
    given = schema.get("type")
    is_open = given is None or (isinstance(given, list) and "object" in given)
    return {**schema, **OBJECT} if is_open else schema


def _tagged_arguments(
    tokenizer, schema: dict, tags: ArgumentTags, number: int, strict: bool
) -> str:
    """Return the rules of arguments in the order of their schema. Raises FieldError if `strict`.

    `argumentsN_I` are the arguments from the I-th on after none, `furtherN_I` after another one.
    """
    root, rules = Schema(schema), []
    found = {key: value for part in root.parts() for key, value in members(part).items()}
    required = {key for part in root.parts() for key in _listed(part, "required")}
    for index, (key, value) in enumerate(found.items()):
        one, rest = f"argument{number}_{index}", f"further{number}_{index + 1}"
        between = marker(tokenizer, tags.between.rstrip("\n"), is_lenient=True)
        separator = marker(tokenizer, tags.separator)
        if tags.between.endswith("\n"):  # a text would begin with it
            between += ' "\\n"'
        begin = marker(tokenizer, tags.before, is_lenient=True)
        head = f"{begin} {lark_text(key)} {between}"
        rules.append(f"{one}: {head} value{number}_{index}")
        rules.append(_tagged_value(tokenizer, value, root, tags, (number, index), strict))
        skip = [] if key in required else [f"arguments{number}_{index + 1}"]
        rules.append(f"arguments{number}_{index}: {' | '.join([f'{one} {rest}', *skip])}")
        skip = [] if key in required else [rest]
        rules.append(f"further{number}_{index}: {' | '.join([f'{separator} {one} {rest}', *skip])}")
    rules += [f'{name}{number}_{len(found)}: ""' for name in ("arguments", "further")]
    return "\n".join([f"arguments{number}: arguments{number}_0", *rules, ""])


def _tagged_value(
    tokenizer, schema: Any, root: Schema, tags: ArgumentTags, place: tuple[int, int], strict: bool
) -> str:
    """Return the rule of a value and of the text after it.

    place: the tool's number, and the argument's in it.
    """
    rule, after = "value{}_{}".format(*place), marker(tokenizer, tags.after, is_lenient=True)
    if tags.is_text and Schema(schema, root.root).accepts("", exact=False):
        listed = _listed(schema, "enum")
        if listed and all(isinstance(text, str) for text in listed):
            options = " | ".join(map(lark_text, listed))
            return f"{rule}: ({options}) {after}"
        end = tags.after.strip("\n")
        if marker(tokenizer, end).startswith("<"):  # a control token
            return f"{rule}: /(.|\\n)*/ {after}"
        rest = marker(tokenizer, tags.after.removeprefix("\n")[len(end) :], is_lenient=True)
        text = f"text{rule}[suffix={json.dumps(end)}]: /(.|\\n)*/"
        return f"{rule}: text{rule} {rest}\n{text}"
    named = {key: root.root[key] for key in ("$defs", "definitions") if key in root.root}
    schema = {**named, **schema} if isinstance(schema, dict) else schema
    checked = arguments_schema(schema, place[0], strict, other={})
    values = " | ".join([f"json{rule}", *_python_values(schema, root, quoted=not tags.is_text)])
    return f"{rule}: ({values}) {after}\njson{rule}: %json {json.dumps(checked)}"


def _python_values(schema: Any, root: Schema, quoted: bool) -> list[str]:
    """Return what a value may be beside JSON, as Lark: some templates write values as Python does.

    quoted: texts have quotes. A quote inside of a text need not be escaped, unless it could end
    the value.
    """
    part = Schema(schema, root.root)
    names = {"True": True, "False": False, "None": None}
    found = [json.dumps(name) for name, value in names.items() if part.accepts(value)]
    if quoted and isinstance(schema, dict):
        if listed := [value for value in _listed(schema, "enum") if isinstance(value, str)]:
            found += [lark_text(repr(text)) for text in listed]
        elif not schema.keys() & RESTRICTED and part.accepts("", exact=False):
            found.append(QUOTED)
    return found


def _listed(schema: Any, keyword: str) -> list:
    found = schema.get(keyword) if isinstance(schema, dict) else None
    return found if isinstance(found, list) else []
