"""A group of loggers: each receives every value, and none can stop the run."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from automicro.errors import LoggerWarning
from automicro.loggers import JSONLinesLogger, Logger, LoggerGroup, TensorBoardLogger
from tests.loggers.logged import read_json_lines


class Noting:
    """Records its calls, and fails at the given ones."""

    def __init__(self, *failing: object, error: BaseException | None = None) -> None:
        self.told: list[Any] = []
        self.failing = set(failing)
        self.error = error or ConnectionError("the server is gone")

    def __repr__(self) -> str:
        return "Noting()"

    def start(self, run: Mapping[str, Any], *, resume_step: int | None) -> None:
        self._take("start", (dict(run), resume_step))

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._take(step, (step, dict(values)))

    def close(self) -> None:
        self._take("close", "close")

    def _take(self, what: object, told: Any) -> None:
        if what in self.failing:
            raise self.error
        self.told.append(told)


def play(group: LoggerGroup, steps: range) -> list[str]:
    """Log a run, and return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group.start({"seed": 0})
        for step in steps:
            group.log({"loss": float(step)}, step=step)
        group.close()
    assert {each.category for each in caught} <= {LoggerWarning}
    return [str(each.message) for each in caught]


def whole(steps: range) -> list[Any]:
    return [({"seed": 0}, None), *((step, {"loss": float(step)}) for step in steps), "close"]


def test_failing_logger_warns_once_and_continues() -> None:
    first, failing, last = Noting(), Noting(3, "close"), Noting()
    messages = play(LoggerGroup([first, failing, last]), range(1, 6))
    assert messages[0] == (
        "Noting() could not log step 3 (ConnectionError: the server is gone): the run continues, "
        "but values may be missing in this logger. It is switched off after 3 failures in a row; "
        "check the disk space, the rights and the server"
    )
    assert messages[1].startswith("Noting() could not close (ConnectionError: the server is gone)")
    assert len(messages) == 2
    assert first.told == last.told == whole(range(1, 6))
    assert [told for told in whole(range(1, 6))[:-1] if told[0] != 3] == failing.told


@pytest.mark.parametrize(
    ("failing_at", "logged"), {(2, 3, 4): [1], (1, 2, 4, 5, 7, 8): [3, 6, 9]}.items()
)
def test_three_consecutive_failures_disable_logger_until_next_fit(
    failing_at: tuple[int, ...], logged: list[int]
) -> None:
    failing, other = Noting(*failing_at), Noting()
    group = LoggerGroup([failing, other])
    assert len(play(group, range(1, 10))) == max(len(logged), 1)
    assert [told[0] for told in failing.told[1:-1]] == logged
    assert failing.told[-1] == "close"
    assert other.told == whole(range(1, 10))
    failing.failing, failing.told = set(), []
    assert play(group, range(9, 11)) == []
    assert failing.told == whole(range(9, 11))


def test_failed_start_is_retried_at_next_log() -> None:
    failing = Noting("start")
    group = LoggerGroup([failing])
    with pytest.warns(LoggerWarning, match="could not start"):
        group.start({"seed": 0}, resume_step=4)
    failing.failing.clear()
    group.log({"loss": 0.5}, step=5)
    group.log({"loss": 0.25}, step=6)
    assert failing.told == [({"seed": 0}, 4), (5, {"loss": 0.5}), (6, {"loss": 0.25})]
    never = Noting("start")
    assert len(play(LoggerGroup([never]), range(1, 9))) == 1
    assert never.told == ["close"]


@pytest.mark.parametrize("what", ["start", 2, "close"])
def test_exit_exceptions_propagate(what: object) -> None:
    for error in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)):
            play(LoggerGroup([Noting(what, error=error)]), range(1, 4))


def test_warnings_as_errors_skip_no_logger() -> None:
    failing, other = Noting(1), Noting()
    group = LoggerGroup([failing, other])
    group.start({})
    with warnings.catch_warnings():
        warnings.simplefilter("error", LoggerWarning)
        with pytest.raises(LoggerWarning):
            group.log({"loss": 0.5}, step=1)
    assert other.told[-1] == (1, {"loss": 0.5})


def test_loggers_that_cannot_write_warn_once_each(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("in the way")
    failing: list[Logger] = [
        JSONLinesLogger(tmp_path),
        JSONLinesLogger(tmp_path / "a file" / "log"),
        TensorBoardLogger(tmp_path / "a file"),
    ]
    group = LoggerGroup([*failing, JSONLinesLogger(tmp_path / "log.jsonl")])
    assert len(play(group, range(1, 6))) == len(failing)
    rows = read_json_lines(tmp_path / "log.jsonl")
    assert rows == [(step, "loss", float(step)) for step in range(1, 6)]


def test_tensors_and_numpy_values_become_python_numbers() -> None:
    noting = Noting()
    group = LoggerGroup([noting])
    group.start({})
    given = {
        "loss": torch.tensor(0.5, requires_grad=True),
        "bf16": torch.tensor([1.5], dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "numpy": np.float32(0.25),
        "array": np.array(3),
        "flag": True,
        "nan": math.nan,
    }
    group.log(given, step=1)
    values = noting.told[-1][1]
    assert math.isnan(values.pop("nan"))
    assert values == {"loss": 0.5, "bf16": 1.5, "count": 7, "numpy": 0.25, "array": 3, "flag": 1}
    assert [type(value) for value in values.values()] == [float, float, int, float, int, int]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("curve", torch.zeros(3)),
        ("meta", torch.zeros((), device="meta")),
        ("complex", torch.tensor(1j)),
        ("text", "abc"),
        ("nothing", None),
        ("step", 0.5),
        ("end\n", 0.5),
        ("", 0.5),
        (3, 0.5),
    ],
    ids=repr,
)
def test_invalid_values_are_skipped_with_one_warning(name: Any, value: Any) -> None:
    noting = Noting()
    group = LoggerGroup([noting])
    group.start({})
    kind = type(value).__name__
    with pytest.warns(LoggerWarning, match=f"is not logged.*this is a {kind}.*'my/value'"):
        group.log({name: value, "loss": 0.5}, step=1)
    group.log({name: value, "loss": 0.5}, step=2)  # a second warning would be an error
    assert noting.told[1:] == [(step, {"loss": 0.5}) for step in (1, 2)]


def test_group_without_loggers_ignores_values() -> None:
    assert play(LoggerGroup(), range(1, 3)) == []
    LoggerGroup().log({"loss": "not a number"}, step=1)
