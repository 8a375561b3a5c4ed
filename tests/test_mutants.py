"""Mutation tests report which mistakes are killed, which survive, and which are found again."""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mutants
from benchmarks.mutants import Verdict, find, measure, pick, read, table, write

CODE = """\
def within(rows, most):
    return rows <= most


def is_odd(rows):
    return rows % 2 == 1


def is_none(rows):
    return rows == 0


def never_called(rows):
    return not rows
"""
TESTS = """\
import os
from automicro.policy.limits import is_none, is_odd, within

def test_is_odd():
    is_odd(3)

def test_within():
    assert within(3, 3) and not within(4, 3)

def test_within_too():
    assert within(3, 3)

def test_is_none_in_another_process():
    process = os.fork()
    if not process:
        os.setsid()
        os._exit(is_none(0))
    assert os.waitpid(process, 0)[1] == 256
"""
MISTAKES = 4


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "automicro/__init__.py": "",
        "automicro/policy/__init__.py": "",
        "automicro/policy/limits.py": CODE,
        "test_limits.py": TESTS,
    }.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tree"


def by_line(found: list[Verdict]) -> dict[str, Verdict]:
    return {each.mutant.line: each for each in found}


def code_of(tree: Path) -> Path:
    return tree / "automicro" / "policy" / "limits.py"


def judged(tree: Path, **options: Any) -> list[Verdict]:
    drawn = pick(tree, seed=0, count=MISTAKES)
    return measure(drawn, ["."], **{"root": tree, "seconds": 10, "workers": 1, **options})


@pytest.mark.sweep
def test_detected_mistakes_are_killed_and_others_survive(tree: Path) -> None:
    verdicts = judged(tree, workers=2)
    assert {line: (each.outcome, each.reached) for line, each in by_line(verdicts).items()} == {
        "return rows <= most": ("killed", 2),
        "return rows % 2 == 1": ("survived", 1),
        "return rows == 0": ("killed", 1),
        "return not rows": ("survived", 0),
    }
    killers = {each.by.partition("::")[2] for each in verdicts}
    assert "test_is_none_in_another_process" in killers
    assert table(verdicts).endswith("2 killed, 2 survived")


@pytest.mark.slow
def test_interrupted_run_resumes_until_code_changes(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = tmp_path / "build" / "progress"
    whole = judged(tree, progress=progress)
    assert "tests run once" in capsys.readouterr().err
    lines = progress.read_text().splitlines(keepends=True)
    progress.write_text("".join(lines[:-1]) + lines[-1][:5])
    assert judged(tree, progress=progress) == whole
    err = capsys.readouterr().err
    assert "tests run once" not in err
    assert "mistakes judged: 1 of 1" in err
    code_of(tree).write_text("\n" + CODE)
    assert judged(tree, progress=progress) == whole
    assert "beginning anew" in capsys.readouterr().err


@pytest.mark.slow
def test_compare_allows_other_killers_but_no_new_survivors(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, now = tmp_path / "before.json", tmp_path / "now.json"
    write(before, judged(tree))
    killer = by_line(read(before))["return rows <= most"].by.partition("::")[2]
    options = ["--compare", str(before), "--json", str(now), "--root", str(tree)]
    monkeypatch.setattr(sys, "argv", ["mutants", *options, "--tests", ".", "--workers", "1"])
    capsys.readouterr()
    assert mutants.main() == 0
    assert "tests: tests run once" not in capsys.readouterr().err  # the former killers do
    assert by_line(read(now)).keys() == by_line(read(before)).keys()

    (tree / "test_limits.py").rename(tree / "test_moved.py")
    assert mutants.main() == 0
    assert "tests: tests run once" not in capsys.readouterr().err  # those of the same names do

    fewer = TESTS.replace(f"def {killer}()", f"def not_{killer}()")
    (tree / "test_moved.py").write_text(fewer)
    assert mutants.main() == 0
    other = by_line(read(now))["return rows <= most"].by.partition("::")[2]
    assert other.startswith("test_within")
    assert other != killer

    (tree / "test_moved.py").write_text(fewer.replace("def test_within", "def not_within"))
    assert mutants.main() == 1
    assert "1 mistakes survive that were killed before" in capsys.readouterr().out

    code_of(tree).write_text(CODE.replace("rows <= most", "most >= rows"))
    assert mutants.main() == 0
    assert by_line(read(now))["return rows <= most"].outcome == "gone"


def test_moved_lines_are_found_and_changed_lines_are_gone(tree: Path) -> None:
    drawn = pick(tree, seed=0, count=MISTAKES)
    assert len({mutant.line for mutant in drawn}) == MISTAKES
    path = code_of(tree)
    moved = CODE.replace("rows <= most", "most >= rows").replace("never_called", "is_empty")
    path.write_text("import math\n\n\n" + moved)
    path.rename(path.parents[1] / "bounds.py")
    places = dict(zip((mutant.line for mutant in drawn), find(tree, drawn), strict=True))
    assert places["return rows <= most"] is None
    numbers = {line: place.number for line, place in places.items() if place is not None}
    assert numbers == {"return rows % 2 == 1": 9, "return rows == 0": 13, "return not rows": 17}
