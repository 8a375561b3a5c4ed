"""The example in docs/drop_in: three changed lines, one loop that dies and one that does not."""

import difflib
import importlib.util
import types
from pathlib import Path

import pytest
import torch

from automicro import MemoryBudget

DOCS = Path(__file__).resolve().parent.parent / "docs" / "drop_in"
LIMIT = "4MiB"


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code(name: str) -> list[str]:
    """The lines of code: no docstring, no blank lines."""
    lines = (DOCS / f"{name}.py").read_text(encoding="utf-8").splitlines()[1:]
    return [line for line in lines if line.strip()]


def test_three_lines_of_the_plain_loop_are_changed() -> None:
    diff = list(difflib.unified_diff(code("plain_loop"), code("microbatched_loop"), n=0))[2:]
    added = [line for line in diff if line.startswith("+")]
    removed = [line for line in diff if line.startswith("-")]
    assert len(added) == 3, added
    assert len(removed) == 2, removed


def test_the_page_shows_the_change_that_the_files_make() -> None:
    page = (DOCS.parent / "drop_in.md").read_text(encoding="utf-8")
    changed = set(code("microbatched_loop")) ^ set(code("plain_loop"))
    assert len(changed) == 5
    for line in changed:
        assert line.strip() in page
    assert LIMIT.replace("MiB", " MiB") in page


def test_the_plain_loop_dies_under_the_limit() -> None:
    with pytest.raises(torch.OutOfMemoryError), MemoryBudget(LIMIT):
        load("plain_loop").train()


def test_the_changed_loop_gives_the_same_losses_on_a_device_too_small() -> None:
    expected = load("plain_loop").train()
    with MemoryBudget(LIMIT) as budget:
        losses = load("microbatched_loop").train()
    assert budget.num_ooms >= 1
    assert len(losses) == len(expected) == 8
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def test_without_a_limit_the_losses_are_the_same_bit_for_bit() -> None:
    assert load("microbatched_loop").train() == load("plain_loop").train()
