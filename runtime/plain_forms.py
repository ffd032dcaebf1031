"""The functions of model.py that the fused kernels compute, as they were when that was tested.

Someone who changes one of these functions must see the change in decoded tokens. So if one differs
from its tested form, Inductor's kernels run: they are made from the functions. After a change that
the kernels follow, or that has no effect on numbers, write the new digest here:
`python -m runtime.plain_forms` prints all.
"""

import hashlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from typing import TypeVar

from torch import nn

import model

Additions = TypeVar("Additions")

# Function -> the digest of its tested source.
TESTED = {
    "swiglu": "8ab3aea689d6",
    "weighted_sum": "b97ccad0988b",
    "Linear.forward": "a2a2bb370dd2",
    "RMSNorm.forward": "d4e174129f68",
    "AddNorm.forward": "283bd0be0501",
    "ExpertLinear.gather": "1915251fa576",
    "ExpertLinear.gather_gated": "754cb3b6472f",
    "Experts.forward": "61e6725e7cda",
    "Experts.per_expert": "d7fb085d979f",
    "MoE.forward": "9849637a41cb",
    "MoE.expert_input": "7f62ea890c9d",
    "MoE.selection_scores": "9a65593f36cb",
    "MoE.route": "1bf20950e338",
    "MoE.merge": "924b2d9ba995",
    "FeedForward.forward": "be127d3cdcde",
    "Attention.forward": "9c835ae52658",
    "Attention.core": "37cde738edb8",
    "Attention.keys_and_values": "d8415812a269",
    "Attention.queries": "ddedfdfb36a1",
    "Attention.clip": "acbe3895ecac",
    "Attention.attend": "792d3460fe8f",
    "Block.forward": "254843635b8b",
    "Block.attend": "441b67112e6a",
}


def changed_forms() -> list[str]:
    """Return the names of functions that differ from the tested ones."""
    return [name for name, digest in digests() if digest and digest != TESTED[name]]


def digests() -> Iterator[tuple[str, str]]:
    """Yield each function's name and digest; "" where its source is not at hand."""
    for name in TESTED:
        form = model
        for part in name.split("."):
            form = getattr(form, part)
        yield name, digest_of_form(form)


@cache
def digest_of_form(form: Callable) -> str:
    """Return the digest of a function; "" if its source is not at hand. All take 10 ms."""
    try:
        return digest_of(textwrap.dedent(inspect.getsource(form)))
    except OSError:
        return ""


def digest_of(source: str) -> str:
    """Return a digest of a function's tokens, without its comments, docstring and line breaks.

    Python's versions agree on tokens, which they do not on the text of a syntax tree.
    """
    kept, in_body = [], False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and kept[-1:] == ["{"] and not in_body
        in_body = in_body or is_docstring or kept[-1:] == ["{"]
        if token.type == tokenize.INDENT:
            kept.append("{")
        elif token.type == tokenize.DEDENT:
            kept.append("}")
        elif token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
            kept += [] if is_docstring else [token.string]
    return hashlib.sha256(" ".join(kept).encode()).hexdigest()[:12]


def undeclared(module: nn.Module, plain: type) -> set[str]:
    """Return the methods that subclasses of `plain` change without a declaration for the kernels.

    A class declares what it changes by `fused_decode_settings`, or by `projections` that only its
    `core` is its own. Its bases are then known, and so is `plain`.
    """
    changed: set[str] = set()
    for kind in type(module).__mro__:
        if kind is plain or {"fused_decode_settings", "projections"} & vars(kind).keys():
            break
        changed |= {name for name, value in vars(kind).items() if callable(value)}
        changed.discard("__init__")
    return changed


def has_own_core(module: nn.Module) -> bool:
    """Whether the class that declares a module has `projections` alone: then `core` is its own."""
    names = {"fused_decode_settings", "projections"}
    declared = (names & vars(kind).keys() for kind in type(module).__mro__)
    return next(filter(None, declared), None) == {"projections"}


def settings_of(module: nn.Module, plain: type, kind: type[Additions]) -> Additions:
    """Return what the module adds to the plain class: its `fused_decode_settings`.

    kind: of ops/declared.py; its defaults are the plain class. Raises ValueError if no kernel
    computes the module, or a subclass changes more than it declares; TypeError for another kind.
    """
    declared = getattr(module, "fused_decode_settings", kind)
    added = None if undeclared(module, plain) else declared()
    if added is None:
        raise ValueError(f"no kernels for {type(module).__name__}")
    if not isinstance(added, kind):
        found = f"{type(module).__name__}.fused_decode_settings() is {added!r}"
        raise TypeError(f"{found}: return ops.declared.{kind.__name__}")
    return added


if __name__ == "__main__":
    for name, value in digests():
        print(f'    "{name}": "{value}",')
