"""The count of mistakes that tests notice: what is caught, what survives, what is found again."""

from pathlib import Path

import pytest

from benchmarks.mutants import Mutant, find, measure, pick, table

CODE = """\
def within(rows, most):
    return rows <= most


def is_odd(rows):
    return rows % 2 == 1


def never_called(rows):
    return not rows
"""
TESTS = """\
from automicro.policy.limits import is_odd, within

def test_within():
    assert within(3, 3) and not within(4, 3)

def test_is_odd():
    is_odd(3)
"""


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


def lines(mutants: list[Mutant]) -> list[str]:
    return [mutant.line for mutant in mutants]


@pytest.mark.sweep
def test_a_mistake_that_a_test_sees_is_caught_and_others_survive(tree: Path) -> None:
    verdicts = measure(pick(tree, seed=0, count=9), ["."], root=tree, seconds=10)
    found = {(each.mutant.line, each.outcome, each.reached) for each in verdicts}
    assert found == {
        ("return rows <= most", "caught", 1),
        ("return rows % 2 == 1", "survived", 1),
        ("return not rows", "survived", 0),
    }
    assert table(verdicts).endswith("1 caught, 2 survived")


def test_a_line_is_found_again_where_it_went_and_is_gone_where_it_changed(tree: Path) -> None:
    mutants = pick(tree, seed=0, count=9)
    assert len(mutants) == len(set(lines(mutants))) == 3
    path = tree / "automicro" / "policy" / "limits.py"
    path.write_text("import math\n\n\n" + CODE.replace("rows <= most", "most >= rows"))
    path.rename(path.with_name("bounds.py"))
    places = dict(zip(lines(mutants), find(tree, mutants), strict=True))
    assert places["return rows <= most"] is None
    moved = places["return not rows"]
    assert moved is not None
    assert moved.number == 13


def test_the_same_seed_picks_the_same_mistakes(tree: Path) -> None:
    assert pick(tree, seed=1, count=2) == pick(tree, seed=1, count=2)
