"""The size of the package, limited by a table that `make shape` prints.

Each row of tests/budgets.toml has a budget and a goal. A figure above its budget fails; a budget
only falls. After a reduction, lower the table to the measured values:

    python -m tests.test_budgets --lower
"""

import argparse
import ast
import collections
import functools
import io
import tokenize
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.tree import MODULES, ROOT, SOURCES, loaded_by, nodes, parameters, parsed, unit

TABLE = Path(__file__).with_name("budgets.toml")
GOALS = "goals"
FILES = "package"
CONSTRUCTORS = {
    "parameters of Microbatcher": ("automicro.microbatcher", "Microbatcher"),
    "parameters of Trainer": ("automicro.trainer.trainer", "Trainer"),
}
AT_LEAST = "comments per 100 lines"  # the only row that should increase
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Lines(NamedTuple):
    """The kinds of lines in a file."""

    code: int
    docstring: int
    comment: int


@functools.cache
def lines_of(path: Path) -> Lines:
    """Count by tokens: a line of code has a token outside of comments and docstrings."""
    docstring: set[int] = set()
    for node in nodes(path):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstring |= {*range(first.lineno, (first.end_lineno or first.lineno) + 1)}
    code: set[int] = set()
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        comments += token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
        if token.type not in NO_CODE:
            code |= {*range(token.start[0], token.end[0] + 1)}
    return Lines(len(code - docstring), len(docstring), comments)


def constructor(module: str, name: str) -> ast.FunctionDef:
    [found] = (
        each
        for node in nodes(MODULES[module])
        if isinstance(node, ast.ClassDef) and node.name == name
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    )
    return found


def words_of_docs() -> int:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(page.read_text("utf-8").split()) for page in pages)


@functools.cache
def measured() -> dict[str, dict[str, float]]:
    """Return all figures, by the table's sections and rows."""
    lines = {path: lines_of(path) for path in SOURCES}
    code = sum(each.code for each in lines.values())
    public = [
        node
        for path in SOURCES
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    ]
    exempt = {name: constructor(*where) for name, where in CONSTRUCTORS.items()}
    functions = [
        node
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node not in exempt.values()
    ]
    comments = sum(each.comment for each in lines.values())
    loaded = {
        f"lines loaded by {name}": sum(lines[MODULES[each]].code for each in loaded_by(module))
        for name, module in (
            ("Microbatcher", "automicro.microbatcher"),
            ("Trainer", "automicro.trainer.trainer"),
        )
    }
    folders: collections.Counter[str] = collections.Counter()
    for module, path in MODULES.items():
        folders[unit(module) if path.parent != ROOT / "automicro" else "files beside"] += lines[
            path
        ].code
    return {
        FILES: {
            "lines of code": code,
            "files": len(SOURCES),
            "public classes and functions": len(public),
            **loaded,
            **{name: parameters(function) for name, function in exempt.items()},
            "parameters of any other function": max(map(parameters, functions)),
            "lines of docstrings": sum(each.docstring for each in lines.values()),
            AT_LEAST: round(100 * comments / code, 1),
            "lines of tests": sum(
                len(path.read_text("utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py")
            ),
            "words of docs": words_of_docs(),
        },
        "lines of code": dict(sorted(folders.items())),
    }


@functools.cache
def table() -> Mapping[str, Mapping[str, float]]:
    with TABLE.open("rb") as file:
        return tomllib.load(file)


@dataclass(frozen=True)
class Row:
    """One figure with its budget and its goal."""

    section: str
    name: str
    found: float
    budget: float | None
    goal: float | None

    @property
    def is_kept(self) -> bool:
        if self.budget is None:
            return False
        return self.found >= self.budget if self.name == AT_LEAST else self.found <= self.budget

    def __str__(self) -> str:
        shown = ("–" if each is None else f"{each:,}" for each in (self.budget, self.goal))
        budget, goal = shown
        mark = "" if self.is_kept else "  over its budget"
        return f"{self.name:34} {self.found:>10,} {budget:>10} {goal:>10}{mark}"


def rows() -> list[Row]:
    goals = table()[GOALS]
    return [
        Row(
            *(section, name, found, table().get(section, {}).get(name)),
            goals.get(name) if section == FILES else None,
        )
        for section, figures in measured().items()
        for name, found in figures.items()
    ]


def test_no_figure_exceeds_its_budget() -> None:
    above = [
        f"{row.section}: {row.name}: {row.found:,}, and its budget is {row.budget}"
        for row in rows()
        if not row.is_kept
    ]
    assert above == [], "budgets only fall: make room in the same change"
    there = {(row.section, row.name) for row in rows()}
    listed = {(section, name) for section, row in table().items() for name in row}
    gone = sorted(each for each in listed - there if each[0] != GOALS)
    assert not gone, f"gone, so take them out: {gone}"


def test_code_is_counted_without_docstrings_comments_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "counted.py"
    path.write_text(
        '"""Of two\nlines."""\n\n# why\nx = [\n    1,  # beside\n]\n\n\n'
        'def f():\n    "One."\n    return """\na"""\n'
    )
    assert lines_of(path) == Lines(code=6, docstring=3, comment=1)


def write_lower() -> None:
    """Write the table with each budget lowered to its measured value, if that is smaller."""
    found = measured()
    text = [
        "# What the package may measure at most (tests/test_budgets.py), and where it is to go.",
        "# Budgets only fall: after a reduction, python -m tests.test_budgets --lower",
    ]
    for section, figures in found.items():
        text += ["", f'["{section}"]']
        for name, value in figures.items():
            before = table().get(section, {}).get(name, value)
            keep = max(before, value) if name == AT_LEAST else min(before, value)
            text.append(f'"{name}" = {keep:g}' if name == AT_LEAST else f'"{name}" = {int(keep)}')
    text += ["", f"[{GOALS}]"]
    text += [f'"{name}" = {goal:g}' for name, goal in table()[GOALS].items()]
    TABLE.write_text("\n".join(text) + "\n", encoding="utf-8")


def main() -> None:
    """Print the table, or lower it."""
    parser = argparse.ArgumentParser(prog="python -m tests.test_budgets")
    parser.add_argument("--lower", action="store_true", help="write budgets down to the figures")
    if parser.parse_args().lower:
        write_lower()
        table.cache_clear()
    section = None
    for row in rows():
        if row.section != section:
            section = row.section
            print(f"\n{section:34} {'measured':>10} {'budget':>10} {'goal':>10}")
        print(row)


if __name__ == "__main__":
    main()
