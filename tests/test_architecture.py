"""The import rules of docs/design.md, checked from the syntax tree."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
import transformers.utils.import_utils

from models import FAMILIES

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

# A unit is a root module or a package. A row lists the units that it may import.
LIBRARY = {
    "ops": set(),
    "host": set(),
    "cli": {"host"},
    "chat_template": set(),
    "tokenizer": {"chat_template"},
    "checkpoint": {"host", "cli", "tokenizer"},
    "model": {"ops"},
    "formats": {"ops", "host", "model", "checkpoint"},
    "models": {"ops", "model", "formats", "checkpoint", "tokenizer"},
    "parallel": {"ops", "cli"},
    "tp": {"ops", "model", "models", "formats", "parallel"},
    "gguf_files": {"host", "checkpoint", "model", "formats", "models"},
    "runtime": {
        *("ops", "host", "cli", "checkpoint", "model", "formats", "models"),
        *("gguf_files", "parallel", "tp"),
    },
    "offload": {"ops", "model", "formats", "runtime"},
    "hub": {
        *("host", "cli", "checkpoint", "tokenizer", "model", "formats", "models", "gguf_files")
    },
}
LIBRARY["tool_calls"] = {"runtime", "chat_template", "tokenizer"}
LIBRARY["memory"] = set(LIBRARY) - {"checkpoint", "tokenizer", "tool_calls"}
MAY_IMPORT = LIBRARY | {
    "generate": set(LIBRARY),
    "server": {
        *("host", "cli", "generate", "runtime", "parallel", "offload", "chat_template"),
        *("tokenizer", "tool_calls"),
    },
    "serve": {*LIBRARY, "generate", "server"},
    "convert_hf_checkpoint": {"cli", "models"},
    "quantize": {
        *("cli", "checkpoint", "formats", "gguf_files", "hub", "model", "models", "parallel")
    },
    "eval": {*LIBRARY, "generate"},
    "benchmark": {*LIBRARY, "generate", "benchmarks"},
    "benchmarks": {*LIBRARY, "generate", "eval", "server"},
}
# Single modules that may import less than their package.
NARROWER = {
    ("formats", "checkpoint"): {"formats.quantizer"},  # writes checkpoints
    ("formats", "host"): {"formats.quantizer"},  # its threads
    ("models", "checkpoint"): {
        "models.converter",
        "models.pieces",
        "models.published_tensors",
        "models.published_weights",
        "models.tensors",
    },
    ("models", "tokenizer"): {"models.converter", "models.tiktoken_file"},
    **{
        ("runtime", other): {"runtime.loading"}
        for other in ("cli", "checkpoint", "formats", "models", "gguf_files", "parallel", "tp")
    },
}
# Packages from outside of the standard library, for the units that may import few.
THIRD_PARTY = {
    "host": {"triton"},
    "cli": set(),
    "ops": {"torch", "triton"},
    "model": {"torch"},
    "formats": {"torch", "tqdm"},
    "models": {"torch", "tqdm"},
    "gguf_files": {"torch", "numpy", "gguf"},
    "runtime": {"torch", "tqdm"},
    "parallel": {"torch"},
    "tp": {"torch"},
    "offload": {"torch"},
    "hub": {"torch", "tqdm", "huggingface_hub"},
    "memory": {"torch"},
    "tool_calls": set(),
}
INDUCTOR_PRIVATE = {"ops/inductor.py", "ops/inductor_tuning.py"}
# Imports inside a function: file -> imported packages, and why.
SLOW = "importing it imports the compiler, which takes seconds"
OPTIONAL = "an optional package, named in the error if it is missing"
HIDDEN_IMPORTS = {
    "host/before_imports.py": (
        {"triton.runtime"},
        "a thread imports it while torch is imported; it may be missing",
    ),
    "ops/plain/attention.py": ({"torch.nn.attention.bias"}, SLOW),
    "models/__init__.py": ({"torch._decomp"}, "it takes 0.3 s; few commands need it"),
    "gguf_files/views.py": ({"gguf"}, "it takes 0.03 s; few files have types that need it"),
    "ops/inductor.py": (
        {
            "torch._dynamo.config",
            "torch._inductor.codecache",
            "torch._inductor.config",
            "torch._inductor.lowering",
            "torch._inductor.output_code",
            "torch._inductor.runtime.benchmarking",
            "torch._inductor.virtualized",
            "torch.fx.experimental._config",
        },
        SLOW,
    ),
    "ops/inductor_tuning.py": (
        {
            "torch._inductor.config",
            "torch._inductor.runtime.coordinate_descent_tuner",
            "torch._inductor.runtime.triton_heuristics",
        },
        SLOW,
    ),
    "generate.py": (
        {"hub.prepare", "hub.describe"},
        "imports the Hub's client, which --model alone needs",
    ),
    "hub/manage.py": ({"tokenizer"}, "it takes 0.04 s, for which --help would wait"),
    "benchmarks/cold_start.py": (
        {
            "benchmarks.decode_speed",
            "benchmarks.load_checkpoint",
            "models.random_weights",
            "runtime.sampling",
        },
        "it measures how long they are imported",
    ),
    "benchmarks/turns.py": (
        {"generate", "runtime.graphs"},
        "its chat starts as generate.py does, whose helper compiles meanwhile",
    ),
    "eval.py": ({"lm_eval", "lm_eval.api.model", "lm_eval.tasks", "lm_eval.utils"}, OPTIONAL),
    "serve.py": ({"server.app"}, "needs Starlette, " + OPTIONAL),
}


def modules_of(*folders: str) -> dict[str, Path]:
    """Map dotted names to the Python files in these folders ("." is not searched deeper)."""
    found = {}
    for folder in folders:
        pattern = "*.py" if folder == "." else "**/*.py"
        for path in sorted((ROOT / folder).glob(pattern)):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


PACKAGES = [name for name in SETUPTOOLS["packages"] if "." not in name]
MODULES = modules_of(".", *PACKAGES)
UNITS = {name.split(".")[0] for name in MODULES}
INSTALLED = {name: path for name, path in MODULES.items() if name.split(".")[0] != "benchmarks"}
SOURCES = MODULES | modules_of("scripts", "examples", "tests")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all statements within it. `ast.walk` takes seconds for expressions, too."""
    yield node
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        children = getattr(node, field, None)
        for child in children if isinstance(children, list) else ():
            yield from statements(child)


@cache
def imports(node: ast.AST) -> set[str]:
    """Return the modules that a syntax tree imports: dotted names, our submodules included."""
    names = set()
    for child in statements(node):
        if isinstance(child, ast.Import):
            names |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "imports are absolute"
            full = {f"{child.module}.{alias.name}" for alias in child.names}
            names |= {name if name in MODULES else child.module for name in full}
    return names


def unit(name: str) -> str:
    return name.split(".")[0]


def relative_names(modules: dict[str, Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in modules.values()]


def for_each(names: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Make one test of a check of each name: a test takes longer than such a check."""

    def decorate(check: Callable[[str], None]) -> Callable[[], None]:
        def test():
            wrong = {}
            for name in names:
                try:
                    check(name)
                except AssertionError as error:
                    wrong[name] = str(error)
            assert not wrong

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def files_with(pattern: str) -> Iterator[str]:
    """Yield the files whose text matches: the syntax trees of all take seconds."""
    for name in relative_names(SOURCES):
        if re.search(pattern, (ROOT / name).read_text(), re.M):
            yield name


INSTALLED_PATHS = set(relative_names(INSTALLED))

# Who imports whom ---------------------------------------------------------------------------------


@for_each(MODULES)
def test_a_module_imports_only_what_its_unit_may(name):
    assert unit(name) in MAY_IMPORT, f"{unit(name)} is new: add a row here and to docs/design.md"
    imported = {other for other in imports(tree(MODULES[name])) if unit(other) in UNITS}
    allowed = MAY_IMPORT[unit(name)] | {unit(name)}
    forbidden = {other for other in imported if unit(other) not in allowed}
    for other in map(unit, imported):
        if name not in NARROWER.get((unit(name), other), {name}):
            forbidden.add(other)
    assert not forbidden, f"{name} imports {sorted(forbidden)}"


def test_the_table_has_no_stale_row():
    assert set(MAY_IMPORT) == UNITS
    for name, row in MAY_IMPORT.items():
        assert row <= UNITS - {name}


def test_no_cycle_between_units():
    assert not cyclic(MAY_IMPORT), f"a cycle among {cyclic(MAY_IMPORT)}"


def test_no_cycle_between_modules():
    graph = {
        name: {other for other in imports(tree(path)) if other in MODULES and other != name}
        for name, path in MODULES.items()
    }
    assert not cyclic(graph), f"a cycle among {cyclic(graph)}"


def cyclic(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes of a graph that cannot be put in order."""
    left = dict(graph)
    while ready := [name for name, below in left.items() if not below & set(left)]:
        for name in ready:
            del left[name]
    return sorted(left)


@for_each([name for name in MODULES if unit(name) in THIRD_PARTY])
def test_a_library_imports_few_packages(name):
    packages = set(map(unit, imports(tree(MODULES[name])))) - set(sys.stdlib_module_names) - UNITS
    assert packages <= THIRD_PARTY[unit(name)]


def test_model_py_imports_only_torch_and_ops():
    imported = imports(tree(ROOT / "model.py"))
    assert {unit(name) for name in imported} - set(sys.stdlib_module_names) == {"torch", "ops"}


@for_each([name for name in MODULES if unit(name) == "runtime"])
def test_a_class_of_the_runtime_has_few_methods(name):
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    for node in tree(MODULES[name]).body:
        if isinstance(node, ast.ClassDef):
            methods = [child.name for child in node.body if isinstance(child, functions)]
            assert len(methods) <= 20, f"{node.name}: {methods}"


def test_families_never_import_each_other():
    files = {type(family).__module__ for family in FAMILIES.values()}
    assert len(files) >= 9
    for name in files:
        assert not (imports(tree(MODULES[name])) & files) - {name}, name
    registry = imports(tree(MODULES["models"]))
    for name in set(MODULES) - files - {"models"}:
        shared = imports(tree(MODULES[name])) & files
        assert not shared, f"{name} imports the family {sorted(shared)}"
    assert files <= registry


@for_each(relative_names(INSTALLED | modules_of("scripts", "examples")))
def test_private_inductor_stays_in_ops(path):
    if path not in INDUCTOR_PRIVATE:
        assert not re.search(r"torch\._(inductor|dynamo)", (ROOT / path).read_text())


# Kernels ------------------------------------------------------------------------------------------

# Folders of ops/; each may import those above it. "" has the files of ops/ itself.
FOLDERS = ("", "plain", "ranks", "products", "attention", "step")
OPS = {name: path for name, path in MODULES.items() if unit(name) == "ops"}
MAX_LINES, MAX_PARAMETERS = 500, 12  # a file's, and a kernel's or its helper's


def folder_of(module: str) -> str:
    _, *folders, _ = module.split(".") if module != "ops" else ("ops", "")
    return folders[0] if folders else ""


def test_ops_has_no_other_folder():
    assert {folder_of(name) for name in OPS if OPS[name].name != "__init__.py"} == set(FOLDERS)


@for_each([name for name, path in OPS.items() if path.stem != "__init__"])
def test_a_folder_of_ops_imports_only_those_above_it(name):
    above = FOLDERS[: FOLDERS.index(folder_of(name)) + 1]
    imported = {other for other in imports(tree(OPS[name])) if unit(other) == "ops"}
    assert {folder_of(other) for other in imported} <= set(above)


@for_each(relative_names(MODULES))
def test_no_private_name_of_ops_is_imported(path):
    for node in ast.walk(tree(ROOT / path)):
        if isinstance(node, ast.ImportFrom) and unit(node.module) == "ops":
            assert not [alias.name for alias in node.names if alias.name.startswith("_")]
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[1] != "_":
            modules = {full.split(".")[-1] for full in OPS}
            assert getattr(node.value, "id", "") not in modules - {"self"}, ast.unparse(node)


@for_each(OPS)
def test_a_file_of_ops_is_short(name):
    assert len(OPS[name].read_text().splitlines()) <= MAX_LINES


def kernels(module: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield the kernels of a module, and their helpers."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if any(text.split("(")[0] == "jit" for text in decorators):
                yield node


@for_each(OPS)
def test_kernels_have_few_parameters(name):
    for node in kernels(tree(OPS[name])):
        assert len(node.args.args) <= MAX_PARAMETERS, node.name


@for_each(OPS)
def test_no_kernel_unpacks_a_tuple_within_a_tuple(name):
    """Triton 3.6 cannot; the version that tests run can."""
    for node in kernels(tree(OPS[name])):
        tuples = [n for n in ast.walk(node) if isinstance(n, ast.Tuple)]
        targets = [n for n in tuples if isinstance(n.ctx, ast.Store)]
        nested = [n for n in targets if any(isinstance(part, ast.Tuple) for part in n.elts)]
        assert not nested, f"{node.name}, line {nested[0].lineno}"


@for_each(OPS)
def test_the_host_computes_sizes_without_triton(name):
    """`triton.cdiv` takes the host 4 us, as long as some launches; ops/sizes.py has others."""
    module = tree(OPS[name])
    compiled = {id(node) for kernel in kernels(module) for node in ast.walk(kernel)}
    attributes = [node for node in ast.walk(module) if isinstance(node, ast.Attribute)]
    sizes = [n for n in attributes if ast.unparse(n) in ("triton.cdiv", "triton.next_power_of_2")]
    assert not [node.lineno for node in sizes if id(node) not in compiled]


@for_each(("ops.products.fragments", "ops.products.few_x", "ops.products.units"))
def test_nothing_is_joined_before_a_product(name):
    """Triton 3.6 then takes other fragments, and moves both operands; newer versions do not."""
    calls = [n for n in ast.walk(tree(OPS[name])) if isinstance(n, ast.Attribute)]
    joins = [n.lineno for n in calls if n.attr in ("join", "interleave")]
    assert not joins, f"tl.join in lines {joins}"


def returns_a_value(statement: ast.stmt) -> bool:
    return any(isinstance(n, ast.Return) and n.value for n in ast.walk(statement))


@for_each(OPS)
def test_no_statement_follows_a_kernels_if_that_returns_a_value(name):
    """Triton compiles it, for the kinds that the `if` is for, too: `else` is for the others."""
    for node in kernels(tree(OPS[name])):
        early = [n for n in node.body[:-1] if isinstance(n, ast.If) and returns_a_value(n)]
        assert not early, f"{node.name}, line {early[0].lineno}"


# What happens at import ---------------------------------------------------------------------------


@for_each(chain(files_with(r"^[ \t]+(import|from)\s"), HIDDEN_IMPORTS))
def test_no_hidden_import(path):
    """Packages and root modules import at the top; the rest at least our own modules."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(tree(ROOT / path)) if isinstance(node, functions)]
    hidden = {name for node in nodes for name in imports(node)}
    allowed, _ = HIDDEN_IMPORTS.get(path, (set(), ""))
    if path not in INSTALLED_PATHS:
        hidden = {name for name in hidden if unit(name) in UNITS}
    assert hidden == allowed


def is_definition(node: ast.stmt) -> bool:
    """Whether a statement defines something: import, function, class, docstring, constant."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, ast.Import | ast.ImportFrom | functions | ast.ClassDef | ast.AnnAssign):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    if isinstance(node, ast.Try):  # a package that may be missing, and None in its place
        statements = (*node.body, *node.handlers[0].body)
        return all(isinstance(n, ast.Import | ast.ImportFrom | ast.Assign) for n in statements)
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "__name__ == '__main__'"
    return False


@for_each([name for name in relative_names(SOURCES) if not name.startswith("tests/")])
def test_an_import_only_defines(path):
    effects = [ast.unparse(node) for node in tree(ROOT / path).body if not is_definition(node)]
    assert not effects


@for_each(files_with(r"sys\.path"))
def test_sys_path_is_not_changed(path):
    for node in ast.walk(tree(ROOT / path)):
        if isinstance(node, ast.Attribute) and node.attr == "path":
            assert getattr(node.value, "id", "") != "sys"


@for_each(files_with(r"pickle|dill|joblib|torch\.(load|save)"))
def test_no_pickle(path):
    nodes = tree(ROOT / path)
    assert not set(map(unit, imports(nodes))) & {"pickle", "dill", "joblib"}
    for node in ast.walk(nodes):
        if isinstance(node, ast.Attribute) and node.attr in ("load", "save"):
            assert ast.unparse(node.value) != "torch"


# Installation and names ---------------------------------------------------------------------------


def test_pyproject_lists_every_package_and_root_module():
    """An installation, an editable one too, has only those that are listed."""
    assert set(SETUPTOOLS["py-modules"]) == {path.stem for path in ROOT.glob("*.py")}
    folders = {path.parent.relative_to(ROOT) for path in ROOT.glob("[a-z]*/**/__init__.py")}
    assert set(SETUPTOOLS["packages"]) == {".".join(folder.parts) for folder in folders}
    for package, patterns in SETUPTOOLS["package-data"].items():
        for pattern in patterns:
            assert list((ROOT / package.replace(".", "/")).glob(pattern)), pattern


def our_names() -> set[str]:
    """Return the names that the repository's root makes importable."""
    folders = (path for path in ROOT.iterdir() if path.is_dir() and path.name.isidentifier())
    return UNITS | {folder.name for folder in folders}


def test_no_name_is_a_librarys():
    """A folder or module of ours would hide the library while the root is on sys.path.

    transformers probes packages by name, installed or not: `kernels` and `datasets` are two.
    """
    source = Path(transformers.utils.import_utils.__file__).read_text()
    probed = set(re.findall(r'_is_package_available\(\s*"(\w+)"', source))
    assert {"kernels", "datasets"} <= probed
    others = {
        name for name, owners in packages_distributions().items() if set(owners) != {"moe-fast"}
    }
    hidden = our_names() & (others | probed | set(sys.stdlib_module_names) | {"distributed"})
    assert not hidden


@pytest.mark.parametrize("folder", ("scripts", "benchmarks", "examples", "tests"))
def test_no_script_hides_a_module(folder):
    """`python FOLDER/x.py` puts FOLDER first on sys.path."""
    names = {path.stem for path in (ROOT / folder).iterdir()} - {"__init__", "__pycache__"}
    assert not names & (our_names() | set(sys.stdlib_module_names))


@pytest.mark.slow
def test_transformers_imports_beside_ours(tmp_path):
    """Also if packages with the names of ours are installed, as far as their metadata says."""
    for name in our_names():
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    code = "from transformers import AutoConfig, MixtralForCausalLM"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
