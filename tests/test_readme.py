"""The README and docs/: files and options exist, the example runs, figures are in the log."""

import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from models import FAMILIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "docs" / "commands.md").read_text()
LOG = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "log").glob("*.md")))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / folder / "README.md" for folder in ("ops", "tests", "experiments")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SCRIPTS = (
    "generate.py",
    "convert_hf_checkpoint.py",
    "checkpoint.py",
    "quantize.py",
    "eval.py",
    "benchmark.py",
    "serve.py",
    "scripts/download.py",
    "scripts/train_tiny_moe.py",
    "scripts/plot_roofline.py",
    "scripts/plot_speculation.py",
    "scripts/plot_timeline.py",
    "scripts/study_offload.py",
    "scripts/plot_experts.py",
    "scripts/compare_hf.py",
    "scripts/capture_page.py",
    "benchmarks/all_reduce.py",
)


def section(title: str) -> str:
    """Return a section of the README, without its title."""
    return re.split(r"^## ", README.split(f"\n## {title}\n")[1], flags=re.M)[0]


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def table(text: str) -> list[list[str]]:
    """Return the cells of the first table in a text, its header first."""
    rows = re.search(r"(^\|.*\n)+", text, flags=re.M)[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [cells[0], *cells[2:]]


def numbers(text: str) -> list[float]:
    """Return the numbers of a text, without those in names (int8) and in brackets."""
    text = re.sub(r"\([^)]*\)", "", text)
    return [float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", text)]


def is_logged(figure: float, *names: str) -> bool:
    """Whether a line of the log with all these names has the figure, before rounding."""
    lines = [line for line in LOG.splitlines() if all(name in line for name in names)]
    return any(abs(number - figure) <= 0.5 for line in lines for number in numbers(line))


def test_the_layout_is_complete():
    listed = [line for line in section("Layout").splitlines() if line.startswith("    ")]
    names = set(re.findall(r"[\w/-]+(?:\.py|/)(?=[\s,]|$)", "\n".join(listed)))
    for name in names:
        assert (ROOT / name).exists(), name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {f"{name}/" for name in project["packages"] if "." not in name}
    assert {path.name for path in ROOT.glob("*.py")} | packages <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


KERNELS = (ROOT / "ops" / "README.md").read_text()
GUIDES = (
    *("docs/adding_a_model.md", "docs/adding_a_format.md"),
    *("ops/README.md", "docs/kernels.md", "docs/parallel.md"),
)
# Names of what the reader writes, and of config.json's keys.
OF_THE_READER = {"int5", "check", "NAME", "python", "prints"}


def names_in(page: str) -> tuple[set[str], set[str]]:
    """Return the files and the other names that a page mentions in backticks, outside of blocks."""
    text = re.sub(r"^```.*?^```|^    .*?$", "", page, flags=re.S | re.M)
    spans = re.findall(r"`([^`\n]+)`", text)
    files = {span for span in spans if re.fullmatch(r"[\w/]+(?:\.py|/)", span)}
    spans = [re.sub(r"\"[^\"]*\"|--\w+|\(.*", "", span) for span in spans if span not in files]
    return files, {name for span in spans for name in re.findall(r"[A-Za-z_][\w.]{2,}", span)}


@cache
def sources() -> list[str]:
    """Return the text of each Python file."""
    folders = "models", "formats", "ops", "runtime", "parallel", "offload", "tests", "benchmarks"
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [path.read_text() for path in [*paths, *ROOT.glob("*.py")]]


@cache
def identifiers() -> set[str]:
    """Return all of them in `sources`; a search of the text for each name takes seconds."""
    return set(re.findall(r"\w+", "\n".join(sources())))


@pytest.mark.parametrize("guide", GUIDES)
def test_names_in_the_guides_exist(guide):
    files, names = names_in((ROOT / guide).read_text())
    own = {name for name in files if Path(name).stem in OF_THE_READER}
    for name in files - own:
        places = (ROOT, ROOT / "models", ROOT / "formats")
        assert any((place / name).exists() for place in places), name
    everything = "\n".join(sources())
    assert len(names) > 10
    for name in names:
        owner, _, member = name.rpartition(".")
        if OF_THE_READER & {owner, member}:
            continue
        where = everything
        if owner[:1].isupper():  # a class: the member is in its file
            where = "\n".join(s for s in sources() if re.search(rf"^class {owner}\b", s, re.M))
            member = rf"(def {member}\b|self\.{member}\b|^    {member}\b)"
        elif not member.startswith("_"):
            assert member in identifiers(), name
            continue
        assert re.search(rf"{member}\b", where, re.M), name


@pytest.mark.parametrize("page", ("ops/README.md", "docs/kernels.md", "docs/parallel.md"))
def test_kernels_that_a_page_names_exist(page):
    _, names = names_in((ROOT / page).read_text())
    kernels = {name for name in names if name.startswith("_") or name.endswith("_kernel")}
    texts = "\n".join(path.read_text() for path in (ROOT / "ops").rglob("*.py"))
    assert kernels and kernels <= set(re.findall(r"^def (\w+)\(", texts, flags=re.M))


def test_every_kernel_has_a_row():
    """In ops/README.md, with the file that has it; and no row is of another one."""
    rows = {}
    for row in table(KERNELS.split("\n## The kernels\n")[1])[1:]:
        rows[row[0].strip("`")] = row[1].strip("`")
    found = {}
    texts = {path: path.read_text() for path in (ROOT / "ops").rglob("*.py")}
    launched = re.findall(r"\blaunch\(\s*(\w+),", "\n".join(texts.values()))
    for path, text in texts.items():
        for name in set(launched) & set(re.findall(r"^def (\w+)\(", text, flags=re.M)):
            found[name] = str(path.relative_to(ROOT))
    assert rows == found and len(found) > 20


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_described_option_exists(script, build_parser):
    after = COMMANDS.split(f"**`{script}")[1]
    described = set(re.findall(r"--\w+", re.split(r"\n\*\*`", after)[0]))
    help_text = build_parser(script).format_help().split("\nexamples:")[0]
    options = set(re.findall(r"--\w+", help_text))
    assert described <= options
    if script == "generate.py":  # its table is complete
        assert options - described <= {"--help"} | set(re.findall(r"--\w+", COMMANDS))


@pytest.mark.parametrize(
    "page",
    [path for path in PAGES if path.parent.name != "log"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_commands_of_the_pages_exist(page, build_parser):
    """Scripts, modules, and the options of those that COMMANDS describes."""
    blocks = re.findall(r"^(?:    .*\n)+|^```sh\n.*?^```", page.read_text(), flags=re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    pattern = r"(?:python|nproc_per_node=\d+) (?:-m )?([\w/.]+)( .*|$)"
    for match in filter(None, (re.search(pattern, line) for line in lines)):
        script, rest = match[1], match[2].partition(" #")[0]
        if Path(script).stem in {"pytest", "pip", "COMMAND", *OF_THE_READER}:
            continue
        path = script if script.endswith(".py") else script.replace(".", "/") + ".py"
        assert (ROOT / path).is_file(), match[0]
        if path in SCRIPTS:
            options = set(re.findall(r"--\w+", build_parser(path).format_help()))
            assert set(re.findall(r"(?<!\S)--\w+", rest)) <= options, match[0]


def test_every_command_is_described_and_the_readme_is_short():
    described = set(re.findall(r"^\*\*`((?:\w+/)?\w+\.py)", COMMANDS, flags=re.M))
    assert described == set(SCRIPTS)
    commands = {path.name for path in ROOT.glob("*.py") if "\ndef main(" in path.read_text()}
    commands |= {f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py")}
    assert commands <= described
    assert "docs/commands.md" in README
    for script in described:
        if "/" not in script:
            assert script in README, script
    assert len(README.splitlines()) <= 150


def test_docs_list_the_models_of_every_family():
    pages = section("Models"), (ROOT / "docs" / "models.md").read_text()
    texts = [re.sub(r"[\W_]", "", page.lower()) for page in pages]
    names = {re.match("[a-z]+?(?=hybrid|[^a-z]|$)", row.name)[0] for row in FAMILIES.values()}
    assert len(names) > 15
    for text in texts:
        assert not {name for name in names if name not in text}


def test_the_python_example_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    (code,) = [block for block in blocks if "import" in block]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r" [\d.]+\n$", run.stdout) and len(run.stdout) > 50


def test_every_speed_is_in_the_log():
    """Of each engine in the first table, and of each format."""
    (_, *engines), *rows = table(README)
    assert len(rows) >= 3
    for model, *cells in rows:
        for engine, cell in zip(engines, cells, strict=True):
            for figure in numbers(cell):
                assert is_logged(figure, engine.split()[0]), (model, engine, figure)
    header, *rows = table(section("Weight formats"))
    column = header.index("tokens/s")
    for row in rows:
        formats = re.findall(r"`(\w+)`", row[0])
        for figure in numbers(row[column]):
            assert any(is_logged(figure, "Mixtral", name) for name in formats), row
