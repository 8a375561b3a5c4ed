"""The code in the documentation runs and prints the shown output, and its links exist."""

import contextlib
import importlib
import inspect
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

import automicro
from automicro import callbacks

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# A snippet, and its output in a separate block or after a print.
CODE = re.compile(r"^```(python|output)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
REFERENCE = ROOT / "docs" / "reference.md"
# The reference lists these under shorter names.
REEXPORTED = {"features.Feature", "checkpoints.CheckpointConfig"}
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def snippets(text: str) -> list[tuple[str, list[str]]]:
    """Return each block of code of a page, and the lines shown as its output."""
    found: list[tuple[str, list[str]]] = []
    for kind, block in CODE.findall(text):
        if kind == "python":
            found.append((block, PRINTED.findall(block)))
        else:
            assert found, "output of what?"
            found[-1][1].extend(block.splitlines())
    return found


def blocks() -> list[tuple[str, str, list[str]]]:
    return [
        (f"{page.relative_to(ROOT)}-{index}", code, shown)
        for page in PAGES
        for index, (code, shown) in enumerate(snippets(page.read_text(encoding="utf-8")))
    ]


def run(name: str, code: str) -> list[str]:
    """Run a snippet and return its output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    return printed.getvalue().splitlines()


def not_printed(shown: list[str], printed: list[str]) -> list[str]:
    """Return the lines that were not printed, in order; … matches anything."""
    rest = iter(printed)
    wanted = [".*".join(map(re.escape, map(str.strip, line.split("…")))) for line in shown]
    return [line for line in wanted if not any(re.fullmatch(line, each.strip()) for each in rest)]


# Slow snippets; tests/integrations covers their content in less time.
LONG = {"docs/integrations/transformers.md-0"}


def cases() -> list[Any]:
    found = blocks()
    assert {name for name, _, _ in found} >= {*LONG, "README.md-0", "README.md-1"}
    assert sum(len(shown) for _, _, shown in found) >= 6
    return [
        pytest.param(*each, id=each[0], marks=pytest.mark.sweep if each[0] in LONG else ())
        for each in found
    ]


@pytest.mark.parametrize(("name", "code", "shown"), cases())
def test_documented_code_prints_shown_output(name: str, code: str, shown: list[str]) -> None:
    printed = run(name, code)
    assert not not_printed(shown, printed), "\n".join(printed)


def test_wrong_shown_output_is_detected() -> None:
    page = "```python\nprint(1 + 1)  # 2\nprint('a b c')  # a …\n```\nIt says\n```output\n2\n```\n"
    [(code, shown)] = snippets(page)
    assert shown == ["2", "a …", "2"]
    assert not_printed(shown, run("page", code)) == ["2"]  # it was printed only once
    assert not_printed(["3"], run("page", code)) == ["3"]


def test_links_point_to_existing_files() -> None:
    links = [
        (page, target)
        for page in PAGES
        for target, _ in LINK.findall(page.read_text(encoding="utf-8"))
        if not target.startswith("http")
    ]
    assert links
    assert [each for each in links if not (each[0].parent / each[1]).exists()] == []


def test_readme_commands_are_make_targets() -> None:
    readme, makefile = ((ROOT / name).read_text("utf-8") for name in ("README.md", "Makefile"))
    for target in ("train", "test"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_every_callback_has_a_row_and_an_example() -> None:
    page = (ROOT / "docs" / "trainer.md").read_text("utf-8")
    for name in callbacks.__all__:
        assert page.count(f"\n| `{name}(") == 1, name
        assert ">>>" in (inspect.getdoc(getattr(callbacks, name)) or ""), name


def test_every_public_name_is_in_reference() -> None:
    shown = set(re.findall(r"^::: automicro\.(\S+)$", REFERENCE.read_text("utf-8"), re.MULTILINE))
    # Adding or removing a name is a decision, so the page pins them.
    assert {name for name in shown if "." not in name} == set(automicro.__all__)
    for module in ("features", "callbacks", "loggers", "data", "checkpoints"):
        names = importlib.import_module(f"automicro.{module}").__all__
        assert shown >= {f"{module}.{name}" for name in names} - REEXPORTED
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for module, names in re.findall(r"^from automicro\.(\S+) import (.+)$", pages, re.MULTILINE):
        assert module == "demo" or shown >= {f"{module}.{name}" for name in names.split(", ")}


@pytest.mark.sweep
def test_notebook_runs_from_top_to_bottom() -> None:
    notebook = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(each["source"]) for each in notebook["cells"] if each["cell_type"] == "code"]
    printed = run("tour.ipynb", "\n".join(cells))
    assert "2 failures, then 4 microbatches of 128" in printed


def test_llms_txt_names_every_page() -> None:
    named = {target for target, _ in LINK.findall((ROOT / "docs/llms.txt").read_text("utf-8"))}
    assert named >= {path.name for path in ROOT.glob("docs/*.md")} - {"index.md"}
    assert all((ROOT / "docs" / target).exists() for target in named)
