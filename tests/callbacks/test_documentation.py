"""The documentation of callbacks matches the code."""

import inspect
from pathlib import Path

import automicro.callbacks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "trainer.md").read_text("utf-8")


def test_every_builtin_callback_is_listed() -> None:
    listed = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for name in automicro.callbacks.__all__:
        assert sum(line.startswith(f"| `{name}(") for line in listed) == 1, name


def test_every_callback_docstring_has_example() -> None:
    for name in automicro.callbacks.__all__:
        docstring = inspect.getdoc(getattr(automicro.callbacks, name)) or ""
        assert ">>>" in docstring, name
