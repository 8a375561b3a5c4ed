"""Logger output is read back, also after a resume, a torn line or a full disk."""

import json
import math
import warnings
from pathlib import Path

import pytest
from pytest_mock import MockerFixture

from automicro.errors import LoggerWarning
from automicro.loggers import JSONLinesLogger, LoggerGroup
from tests.loggers.logged import (
    FORMATS,
    Disk,
    Format,
    Rows,
    read_runs,
    read_tensorboard_text,
)

every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
LINES = FORMATS["json"]


def run(form: Format, path: Path, steps: range, *, resume_step: int | None = None) -> None:
    logger = form.make(path)
    logger.start({"seed": 0}, resume_step=resume_step)
    for step in steps:
        logger.log({"train/loss": 1 / 2**step}, step=step)
    logger.close()


def losses(*steps: int) -> Rows:
    return [(step, "train/loss", 1 / 2**step) for step in steps]


@pytest.fixture
def disk(mocker: MockerFixture) -> type[Disk]:
    mocker.patch("automicro.loggers.lines.open", Disk, create=True)
    mocker.patch.object(Disk, "room", None)
    return Disk


@every_format
def test_all_values_are_read_back_including_late_columns(form: Format, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "log"
    logger = form.make(path)
    logger.start({"seed": 0}, resume_step=None)
    values = {"loss": 0.25, 'train/größe, "漢字"': -(2.0**-99), "up": math.inf, "down": -math.inf}
    logger.log({"loss": 0.5, "size": 16}, step=1)
    logger.log(values, step=2)
    logger.log({"nan": math.nan}, step=2)
    logger.close()
    read = {(step, name): value for step, name, value in form.read(path)}
    assert math.isnan(read.pop((2, "nan")))
    expected = {(1, "loss"): 0.5, (1, "size"): 16}
    assert read == {**expected, **{(2, name): value for name, value in values.items()}}
    if form is FORMATS["tensorboard"]:
        assert b'"seed": 0' in read_tensorboard_text(path, "run/text_summary")


def test_json_lines_are_valid_for_any_values(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    logger = JSONLinesLogger(tmp_path / "log")
    text = {"half": "\ud800", "ls": "\u2028"}
    logger.start({"nested": [{"lr": math.nan, 3: Path("data")}], **text})
    values = {"a": 0.1, "b": 1 / 3, "c": 5e-324, "d": float(2**53), "e": 2**53 - 1}
    logger.log({"loss": -math.inf, **values}, step=1)
    with pytest.raises(ValueError, match=r"cannot be called 'time', .* such as 'my/time'"):
        logger.log({"time": 1.0}, step=1)
    logger.close()
    written = (tmp_path / "log").read_text(encoding="utf-8")
    first, second = (json.loads(line, parse_constant=refuse) for line in written.split("\n")[:-1])
    assert first["run"] == {"nested": [{"lr": "NaN", "3": "data"}], **text}
    assert second["loss"] == "-Infinity"
    assert {name: second[name] for name in values} == values, "numbers in text lose no bit"


# Runs of one log, each with its steps and resume step; then the steps that the log contains.
HISTORIES: dict[str, tuple[list[tuple[range, int | None]], list[int]]] = {
    "resumed twice": ([(range(1, 11), None), (range(7, 9), 6), (range(8, 12), 7)], [*range(1, 12)]),
    "resumed from the start": ([(range(1, 5), None), (range(1, 3), 0)], [1, 2]),
    "log is missing": ([(range(7, 9), 6)], [7, 8]),
}


@every_format
@pytest.mark.parametrize(("runs", "steps"), HISTORIES.values(), ids=HISTORIES)
def test_resumed_run_logs_each_value_once(
    form: Format, runs: list[tuple[range, int | None]], steps: list[int], tmp_path: Path
) -> None:
    for logged, resume_step in runs:
        run(form, tmp_path / "log", logged, resume_step=resume_step)
    assert form.read(tmp_path / "log") == losses(*steps)


def test_new_run_is_appended_and_resume_cuts_only_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    run(LINES, path, range(1, 10))
    run(LINES, path, range(1, 6))
    assert LINES.read(path) == losses(*range(1, 10), *range(1, 6))
    run(LINES, path, range(4, 5), resume_step=3)
    assert LINES.read(path) == losses(*range(1, 10), *range(1, 5))
    assert read_runs(path) == [(0, {"seed": 0}), (0, {"seed": 0}), (3, {"seed": 0})]
    # A resume cuts past the run's own start, but not past that of another run.
    run(LINES, path, range(1, 2), resume_step=0)
    assert LINES.read(path) == losses(*range(1, 10), 1)


@pytest.mark.parametrize("resume_step", [None, 2])
def test_truncated_log_can_be_continued(tmp_path: Path, resume_step: int | None) -> None:
    path = tmp_path / "log"
    run(LINES, path, range(1, 4))
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        run(LINES, path, range(5, 6), resume_step=resume_step)
        complete = range(1, whole[:length].count(b"\n"))  # the first line describes the run
        kept = [step for step in complete if resume_step is None or step <= resume_step]
        assert LINES.read(path) == losses(*kept, 5), length


@pytest.mark.parametrize("resume_step", [None, 0])
def test_file_of_another_program_is_left_unchanged(resume_step: int | None, tmp_path: Path) -> None:
    path = tmp_path / "log"
    for content in (b"a diary", b'{\n  "learning_rate": 0.1\n}', b"\0\0"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"another program wrote it. Log to another path"):
            LINES.make(path).start({}, resume_step=resume_step)
        assert path.read_bytes() == content


def test_line_without_step_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    run(LINES, path, range(1, 3))
    path.write_bytes(path.read_bytes() + b'{"note": "mine"}\n')
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"holds the line .*note.* without a step"):
        LINES.make(path).start({}, resume_step=1)
    assert path.read_bytes() == before


@every_format
def test_full_disk_loses_only_values_that_do_not_fit(
    form: Format, tmp_path: Path, disk: type[Disk]
) -> None:
    for room in range(0, 300, 23):
        path = tmp_path / str(room)
        group = LoggerGroup([form.make(path)])
        disk.room = 5
        with pytest.warns(LoggerWarning, match=r"could not start \(OSError: .* the run continues"):
            group.start({"seed": 0})
        disk.room = None
        group.log({"train/loss": 0.5}, step=1)
        disk.room, step = room, 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            while not caught:
                step += 1
                group.log({"train/loss": 1 / 2**step}, step=step)
        assert [each.category for each in caught] == [LoggerWarning]
        assert "No space left on device" in str(caught[0].message)
        disk.room = None
        group.log({"train/loss": 1 / 2**20}, step=20)
        group.close()
        # Only the values of the failed step are missing.
        assert form.read(path) == losses(*range(1, step), 20), room
