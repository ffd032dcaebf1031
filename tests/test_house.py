"""The house's rules, read from the code itself: who may import whom, no cycles, no effects at import."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {path.stem for path in ROOT.glob("*.py")}
GROUND = set()
MODEL = {"args", "layers", "attention", "model"}
MAY_IMPORT = {
    "command": GROUND,
    "checkpoint": {"command"},
    "tokenizer": GROUND,
    "kernels": GROUND,
    "grouped_kernel": {"kernels"},
    "attention_kernels": {"kernels"},
    "recording": GROUND,
    "slots": {"kernels"},
    "collective": {"kernels"},
    "args": GROUND,
    "layers": {"args"},
    "attention": {"args", "layers", "attention_kernels"},
    "model": {"args", "layers", "attention", "grouped_kernel"},
    "compiling": {"layers"},
    "session": MODEL | {"compiling", "recording"},
    "speculate": MODEL | {"session"},
    "packing": {"layers", "grouped_kernel"},
    "quantize": MODEL | {"command", "checkpoint", "attention_kernels", "grouped_kernel", "kernels", "packing"},
    "world": {"checkpoint", "collective", "layers"},
    "tp": MODEL | {"packing", "quantize", "world", "collective"},
    "offload": MODEL | {"checkpoint", "packing", "quantize", "recording", "slots"},
    "families": {"args"},
    "recipes": {"args", "packing"},
    "convert_hf_checkpoint": {"command", "args", "checkpoint", "packing", "families", "recipes"},
}
MAY_IMPORT["answer"] = {"model", "offload", "session", "speculate", "tokenizer", "world"}
MAY_IMPORT["generate"] = set(MAY_IMPORT)
MAY_IMPORT["shapes"] = MODEL | {"families", "packing", "quantize"}
MAY_IMPORT["peer"] = MODEL | {"answer", "checkpoint", "families", "quantize", "session", "shapes", "world"}
MAY_IMPORT |= {name: set(MAY_IMPORT) for name in ("benchmark", "eval")}
MAY_IMPORT |= {
    "api": {"session", "tokenizer"},
    "desk": {"api", "answer", "offload", "session", "tokenizer", "world"},
    "serve": {"api", "desk", *MAY_IMPORT["generate"], "generate"},
}
SOURCES = [
    path
    for folder in (".", "scripts", "benchmarks", "tests")
    for path in sorted((ROOT / folder).glob("*.py"))
]  # fmt: skip


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(node: ast.AST) -> set[str]:
    names = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            names |= {alias.name.split(".")[0] for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            names.add((child.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_what_stands_below_it(room):
    assert room in MAY_IMPORT, f"{room}.py is a new room: give it a row in MAY_IMPORT and in docs/design.md"
    upward = (imports(tree(ROOT / f"{room}.py")) & ROOMS) - MAY_IMPORT[room]
    assert not upward, f"{room}.py imports {sorted(upward)}"


def test_the_table_has_no_cycle():
    order = []
    while len(order) < len(MAY_IMPORT):
        ready = [room for room, below in MAY_IMPORT.items() if room not in order and below <= set(order)]
        assert ready, f"a cycle among {sorted(set(MAY_IMPORT) - set(order))}"
        order += ready


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_room_is_imported_inside_a_function(path):
    functions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    hidden = {name for function in functions for name in imports(function) & ROOMS}
    assert not hidden, f"{path.name} imports {sorted(hidden)} inside a function"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_path_surgery(path):
    edits = [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr == "path" and getattr(node.value, "id", "") == "sys"
    ]
    assert not edits, f"{path.name} touches sys.path"


def is_definition(node: ast.stmt) -> bool:
    """Imports, functions, classes, docstrings, constants, and the guard of a command."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, ast.Import | ast.ImportFrom | functions | ast.ClassDef | ast.AnnAssign):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) for target in node.targets)
    if isinstance(node, ast.Try):  # an import that may fail, with a name in its place
        return all(isinstance(n, ast.Import | ast.Assign) for n in (*node.body, *node.handlers[0].body))
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "__name__ == '__main__'"
    return False


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_importing_a_room_only_defines(room):
    effects = [ast.unparse(node) for node in tree(ROOT / f"{room}.py").body if not is_definition(node)]
    assert not effects


def test_it_is_installed_whole():
    """An editable installation knows only the rooms that pyproject.toml lists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["setuptools"]["py-modules"]) == ROOMS


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_no_pickle(room):
    assert not imports(tree(ROOT / f"{room}.py")) & {"pickle", "dill", "joblib"}
    calls = [ast.unparse(n.func) for n in ast.walk(tree(ROOT / f"{room}.py")) if isinstance(n, ast.Call)]
    assert "torch.load" not in calls and "torch.save" not in calls


def test_a_room_is_not_a_library_of_ours():
    """No room hides a module of the standard library."""
    assert not ROOMS & set(sys.stdlib_module_names)
