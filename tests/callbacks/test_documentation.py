"""The page about callbacks says what the code says."""

import inspect
import re
from pathlib import Path

import automicro.callbacks
from automicro.events.callback import EVENTS, Callback
from automicro.events.run import Run

FIELD = re.compile(r"^    (?P<name>\w+): (?P<text>.+(?:\n     .+)*)", re.M)
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "callbacks.md").read_text("utf-8")


def first_sentences(value: object) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).replace("``", "`")


def event_rows() -> list[str]:
    rows = []
    for event in EVENTS:
        method = getattr(Callback, event)
        handed_over = ", ".join(list(inspect.signature(method).parameters)[2:])
        subject = f"`{handed_over}`" if handed_over else ""
        rows.append(f"| `{event}` | {subject} | {first_sentences(method)} |")
    return rows


def run_rows() -> list[str]:
    listed = (inspect.getdoc(Run) or "").partition("Attributes:")[2]
    told = {each["name"]: " ".join(each["text"].split()) for each in FIELD.finditer(listed)}
    rows = [f"| `run.{name}` | {text[0].upper()}{text[1:]} |" for name, text in told.items()]
    rows = [each for each in rows if "For the trainer" not in each]
    for name, value in vars(Run).items():
        if name.startswith("_") or name in told:
            continue
        call = "(…)" if inspect.isfunction(value) else ""
        rows.append(f"| `run.{name}{call}` | {first_sentences(value)} |")
    return rows


def test_every_event_is_listed_with_what_it_means() -> None:
    listed = [line for line in PAGE.splitlines() if line.startswith("| `")]
    rows = event_rows()
    assert [line for line in listed if line in rows] == rows, "\n".join(rows)


def test_all_that_a_callback_may_read_and_ask_for_is_listed() -> None:
    rows = run_rows()
    assert [line for line in PAGE.splitlines() if line.startswith("| `run.")] == rows, "\n".join(
        rows
    )


def test_every_callback_that_comes_along_is_listed() -> None:
    listed = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for name in automicro.callbacks.__all__:
        assert sum(line.startswith(f"| `{name}(") for line in listed) == 1, name


def test_every_callback_says_what_it_does_and_shows_it() -> None:
    for name in automicro.callbacks.__all__:
        docstring = inspect.getdoc(getattr(automicro.callbacks, name)) or ""
        assert ">>>" in docstring, name
