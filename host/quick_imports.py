"""Imports of torch and of this project with a third less work.

    quicken     from now on
    finish      as ever from now on

A module does the same as ever once it is imported, and nothing here is necessary:

- `dataclasses` and `collections.namedtuple` compile a class's methods from text, 1,200 texts in
  all. They find the code in the compile cache now.
- `inspect.getmodule` compares a frame with the files of all modules, at each definition of an
  operator. A frame knows its module.
- torch's Python kernels for the meta device take a fifth of `import torch`. They are imported when
  the compiler is, or by `models.import_meta_kernels`: arithmetic on that device needs them,
  but models and caches do not.
"""

import argparse
import builtins
import collections
import dataclasses
import importlib
import inspect
import marshal
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from host.compile_cache import own_folder, prepare

KERNELS = "torch._meta_registrations"
NEED_KERNELS = {f"torch.{name}" for name in ("_decomp", "_dynamo", "_inductor", "_prims", "_refs")}
active = ExitStack()  # what `finish` undoes


def quicken(options: argparse.Namespace) -> None:
    """Let the imports up to `finish` do less. options: with --compile_cache."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, LateKernels())
    active.callback(setattr, inspect, "getmodule", inspect.getmodule)
    inspect.getmodule = partial(module_of, inspect.getmodule)
    with suppress(OSError, ValueError):  # `use_compile_cache` says why
        folder = (options.compile_cache or own_folder()).absolute()
        prepare(folder)
        name = f"texts-{Path(sys.argv[0]).stem}-{sys.implementation.cache_tag}"
        texts = CompiledTexts(folder / name)
        active.callback(texts.write)
        for module, kind in ((dataclasses, "exec"), (collections, "eval")):
            setattr(module, kind, partial(texts.run, kind))  # before the builtin function
            active.callback(delattr, module, kind)


def finish() -> None:
    active.close()


def module_of(find: Callable, object: Any, *rest) -> ModuleType | None:
    """`inspect.getmodule`. find: the original, for all but frames."""
    if isinstance(object, FrameType):
        return sys.modules.get(object.f_globals.get("__name__", ""))
    return find(object, *rest)


class CompiledTexts:
    """Code of texts that the last process compiled, in a file."""

    def __init__(self, path: Path):
        self.path = path
        self.found: dict[tuple[str, str], CodeType] = {}
        self.used: dict[tuple[str, str], CodeType] = {}
        with suppress(OSError, ValueError, EOFError, TypeError):  # there is none, or it is damaged
            self.found = dict(marshal.loads(path.read_bytes()))

    def run(self, kind: str, text: str, *namespaces: dict) -> Any:
        """`exec` or `eval` of a text, by kind."""
        code = self.found.get((kind, text)) or compile(text, "<string>", kind, dont_inherit=True)
        self.used[kind, text] = code
        return getattr(builtins, kind)(code, *namespaces)

    def write(self) -> None:
        """Keep the code that was used, unless it is what the file has."""
        if self.used.keys() == self.found.keys():
            return
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with suppress(OSError):
            part.write_bytes(marshal.dumps(self.used))
            part.replace(self.path)


class LateKernels(MetaPathFinder, Loader):
    """Finds an empty module in place of torch's Python kernels for the meta device.

    They are imported just before the first of `NEED_KERNELS`.
    """

    def __init__(self):
        self.is_postponed = False
        self.spec: ModuleSpec | None = None  # a module's that the kernels have imported

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        if name == KERNELS:
            self.is_postponed = True
            return ModuleSpec(name, self)
        if name not in NEED_KERNELS:
            return None
        sys.meta_path.remove(self)
        if self.is_postponed:
            del sys.modules[KERNELS]
            importlib.import_module(KERNELS)
        if name not in sys.modules:
            return None
        # Python loads a module that a finder has imported again, by its spec: here by this one.
        self.spec, spec = sys.modules[name].__spec__, ModuleSpec(name, self)
        sys.modules[name].__spec__ = spec
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return sys.modules.get(spec.name)  # of `NEED_KERNELS`: the kernels have imported it

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec or module.__spec__
