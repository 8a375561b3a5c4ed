"""What loggers write is read back, after a resume, a torn line and a full disk too."""

import builtins
import json
import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
from pytest_mock import MockerFixture

from automicro.errors import LoggerWarning
from automicro.loggers import JSONLinesLogger, LoggerGroup, TensorBoardLogger
from automicro.loggers.lines import AppendFile
from tests.loggers.logged import (
    FORMATS,
    Disk,
    Format,
    Rows,
    read_json_lines,
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


@every_format
def test_every_value_is_read_back_with_columns_that_appear_later(
    form: Format, tmp_path: Path
) -> None:
    path = tmp_path / "new folder" / "log"
    logger = form.make(path)
    logger.start({}, resume_step=None)
    logger.log({"train/loss": 0.5, "train/microbatch_size": 16}, step=1)
    logger.log({"train/loss": 0.25, 'train/größe, "漢字"': -(2.0**-99)}, step=2)
    logger.log({"eval/accuracy": 0.75}, step=2)
    logger.close()
    read = {(step, name): value for step, name, value in form.read(path)}
    assert read == {
        (1, "train/loss"): 0.5,
        (1, "train/microbatch_size"): 16,
        (2, "train/loss"): 0.25,
        (2, 'train/größe, "漢字"'): -(2.0**-99),
        (2, "eval/accuracy"): 0.75,
    }


def test_numbers_in_text_lose_no_bit(tmp_path: Path) -> None:
    values = {"a": 0.1, "b": 1 / 3, "c": 5e-324, "d": float(2**53), "e": 2**53 - 1}
    logger = LINES.make(tmp_path / "log")
    logger.start({}, resume_step=None)
    logger.log(values, step=1)
    logger.close()
    assert {name: value for _, name, value in LINES.read(tmp_path / "log")} == values


@every_format
def test_values_that_are_not_finite_are_read_back(form: Format, tmp_path: Path) -> None:
    logger = form.make(tmp_path / "log")
    logger.start({"threshold": math.inf}, resume_step=None)
    logger.log({"nan": math.nan, "up": math.inf, "down": -math.inf}, step=1)
    logger.close()
    read = {name: value for _, name, value in form.read(tmp_path / "log")}
    assert math.isnan(read["nan"])
    assert (read["up"], read["down"]) == (math.inf, -math.inf)


def test_json_is_valid_whatever_is_in_it(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    logger = JSONLinesLogger(tmp_path / "log")
    logger.start({"nested": [{"lr": math.nan, 3: Path("data")}], "half": "\ud800", "ls": "\u2028"})
    logger.log({"loss": -math.inf}, step=1)
    logger.close()
    text = (tmp_path / "log").read_text(encoding="utf-8")
    first, second = (json.loads(line, parse_constant=refuse) for line in text.split("\n")[:-1])
    assert first["run"] == {
        "nested": [{"lr": "NaN", "3": "data"}],
        "half": "\ud800",
        "ls": "\u2028",
    }
    assert second["loss"] == "-Infinity"


@every_format
def test_a_resumed_run_leaves_each_value_once(form: Format, tmp_path: Path) -> None:
    path = tmp_path / "log"
    run(form, path, range(1, 11))
    run(form, path, range(7, 9), resume_step=6)
    run(form, path, range(8, 12), resume_step=7)
    assert form.read(path) == losses(*range(1, 12))


@every_format
def test_a_run_resumed_from_its_very_start_leaves_each_value_once(
    form: Format, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    run(form, path, range(1, 5))
    run(form, path, range(1, 3), resume_step=0)
    assert form.read(path) == losses(1, 2)


@every_format
def test_a_resumed_run_without_its_log_begins_one(form: Format, tmp_path: Path) -> None:
    run(form, tmp_path / "log", range(7, 9), resume_step=6)
    assert form.read(tmp_path / "log") == losses(7, 8)


def test_a_run_that_begins_anew_is_appended_and_its_resume_cuts_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "log"
    run(LINES, path, range(1, 10))
    run(LINES, path, range(1, 6))
    assert LINES.read(path) == losses(*range(1, 10), *range(1, 6))
    run(LINES, path, range(4, 5), resume_step=3)
    assert LINES.read(path) == losses(*range(1, 10), *range(1, 5))


def test_json_lines_tell_where_each_run_began(tmp_path: Path) -> None:
    form, path = FORMATS["json"], tmp_path / "log"
    run(form, path, range(1, 10))
    run(form, path, range(1, 6))
    run(form, path, range(4, 6), resume_step=3)
    assert read_runs(path) == [(0, {"seed": 0}), (0, {"seed": 0}), (3, {"seed": 0})]
    # Back over a start of its own, but not over one of another run.
    run(form, path, range(1, 2), resume_step=0)
    assert form.read(path) == losses(*range(1, 10), 1)


@pytest.mark.parametrize("resume_step", [None, 2, 9])
def test_a_torn_last_line_goes(tmp_path: Path, resume_step: int | None) -> None:
    path = tmp_path / "log"
    run(LINES, path, range(1, 4))
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for missing in range(1, last + 1):
        path.write_bytes(whole[: len(whole) - missing])
        run(LINES, path, range(5, 6), resume_step=resume_step)
        assert LINES.read(path) == losses(1, 2, 5), missing


def test_a_log_cut_short_anywhere_can_be_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "log"
    run(LINES, path, range(1, 3))
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        run(LINES, path, range(3, 4), resume_step=2)
        assert LINES.read(path)[-1:] == losses(3), length


@pytest.mark.parametrize(
    "content",
    [b"a diary\n", b"a diary", b'{\n  "learning_rate": 0.1\n}', b"\0\0", b"step;name;value\n"],
    ids=str,
)
@pytest.mark.parametrize("resume_step", [None, 0])
def test_the_file_of_another_program_is_left_as_it_is(
    content: bytes, resume_step: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"another program wrote it. Log to another path"):
        LINES.make(path).start({}, resume_step=resume_step)
    assert path.read_bytes() == content


def test_a_line_without_a_step_is_not_cut_away(tmp_path: Path) -> None:
    path = tmp_path / "log"
    run(LINES, path, range(1, 3))
    path.write_bytes(path.read_bytes() + b'{"note": "mine"}\n')
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"holds the line .*note.* without a step"):
        LINES.make(path).start({}, resume_step=1)
    assert path.read_bytes() == before


@every_format
def test_a_full_disk_costs_what_did_not_fit_and_nothing_else(
    form: Format, tmp_path: Path, mocker: MockerFixture
) -> None:
    mocker.patch("automicro.loggers.lines.open", Disk, create=True)
    for room in range(0, 300, 7):
        path = tmp_path / str(room)
        group = LoggerGroup([form.make(path)])
        mocker.patch.object(Disk, "room", None)
        group.start({"seed": 0})
        group.log({"train/loss": 0.5}, step=1)
        Disk.room = room
        step = 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            while not caught:
                step += 1
                group.log({"train/loss": 1 / 2**step}, step=step)
        (warning,) = caught
        assert warning.category is LoggerWarning
        assert "No space left on device" in str(warning.message)
        Disk.room = None
        group.log({"train/loss": 1 / 2**20}, step=20)
        group.close()
        rows = form.read(path)
        # The values of the one step that failed are missing.
        assert rows == losses(*range(1, step), 20), room


@every_format
def test_a_disk_that_is_full_from_the_start_is_tried_again(
    form: Format, tmp_path: Path, mocker: MockerFixture
) -> None:
    mocker.patch("automicro.loggers.lines.open", Disk, create=True)
    mocker.patch.object(Disk, "room", 5)
    group = LoggerGroup([form.make(tmp_path / "log")])
    with pytest.warns(LoggerWarning, match=r"could not start \(OSError: .* the run continues"):
        group.start({"seed": 0})
    Disk.room = None
    group.log({"train/loss": 0.5}, step=1)
    group.close()
    assert form.read(tmp_path / "log") == losses(1)


def test_half_a_record_that_cannot_be_taken_back_at_once_is_later(
    tmp_path: Path, mocker: MockerFixture
) -> None:
    mocker.patch("automicro.loggers.lines.open", Disk, create=True)
    mocker.patch.object(Disk, "room", None)
    file = AppendFile(tmp_path / "file")
    file.write(b"one\n")
    Disk.room = 2
    with pytest.raises(OSError, match="No space left"):
        file.write(b"two\n")
    assert (tmp_path / "file").read_bytes() == b"one\ntw"
    Disk.room = None
    file.write(b"three\n")
    Disk.room = 2
    with pytest.raises(OSError, match="No space left"):
        file.write(b"four\n")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"one\nthree\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@every_format
def test_what_was_logged_outlasts_the_death_of_the_process(form: Format, tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        logger = form.make(tmp_path / "log")
        logger.start({}, resume_step=None)
        for step in range(1, 50):
            logger.log({"train/loss": 1 / 2**step}, step=step)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert form.read(tmp_path / "log") == losses(*range(1, 50))


def test_tensorboard_shows_what_is_run(tmp_path: Path) -> None:
    run(FORMATS["tensorboard"], tmp_path, range(1, 2))
    assert b'"seed": 0' in read_tensorboard_text(tmp_path, "run/text_summary")


def test_without_tensorboard_the_logger_says_what_to_install(mocker: MockerFixture) -> None:
    mocker.patch("automicro.loggers.servers.importlib.util.find_spec", return_value=None)
    with pytest.raises(ImportError, match=r"pip install tensorboard$"):
        TensorBoardLogger("runs/one")


def test_loggers_load_no_tensorboard_until_they_write(mocker: MockerFixture) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        assert not name.startswith("tensorboard")
        return original(name, *args, **kwargs)

    mocker.patch("builtins.__import__", side_effect=refuse)
    TensorBoardLogger("runs/one")


@every_format
def test_a_logger_that_is_not_open_says_so(form: Format, tmp_path: Path) -> None:
    logger = form.make(tmp_path / "log")
    logger.close()
    with pytest.raises(RuntimeError, match=r"is not open. Call start\(\{\}\) before log"):
        logger.log({"train/loss": 0.5}, step=1)
    run(form, tmp_path / "log", range(1, 2))
    logger.start({}, resume_step=None)
    logger.close()
    logger.close()
    assert not (tmp_path / "log" / "log").exists()


def test_values_with_names_that_lines_need_are_refused(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path / "log")
    logger.start({})
    with pytest.raises(ValueError, match=r"cannot be called 'time', .* such as 'my/time'"):
        logger.log({"time": 1.0}, step=1)
    logger.close()
    assert read_json_lines(tmp_path / "log") == []


@pytest.mark.parametrize("make", [JSONLinesLogger, TensorBoardLogger])
def test_a_path_may_be_text(make: Any, tmp_path: Path) -> None:
    assert repr(make(str(tmp_path))) == f"{make.__name__}({str(tmp_path)!r})"
