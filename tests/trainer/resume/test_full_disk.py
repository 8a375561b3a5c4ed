"""Full disks at every write of a run: training continues, and saved checkpoints stay intact."""

import errno
import os
import warnings
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

import pytest

from automicro.checkpoints.manifest import verify
from automicro.checkpoints.store import CheckpointStore
from automicro.checkpoints.writing import list_checkpoints
from automicro.errors import CheckpointWarning, LoggerWarning
from automicro.loggers import lines as append_file
from tests.checkpoints.faults import Faults, fail
from tests.loggers.logged import read_json_lines
from tests.trainer.resume.lives import ending_of
from tests.trainer.resume.subjects import Job, Subject
from tests.trainer.resume.trials import assert_same

pytestmark = pytest.mark.sweep

SUBJECT = Subject(seed=7, num_rows=32, max_duration="2ep", interval="1ba", evaluators=0)


def train(folder: Path) -> tuple[Job, list[Any]]:
    """Return a run, and the categories of its warnings."""
    job = SUBJECT.make(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.trainer.fit()
    return job, [each.category for each in caught]


def intact_steps(job: Job) -> list[int]:
    """Return the steps of the checkpoints, after each is verified and loaded."""
    paths = list_checkpoints(Path(job.config.folder))
    for path in paths:
        verify(path)
        CheckpointStore(job.config.folder).load(path)
    return sorted(int(path.name.rpartition("-")[2]) for path in paths)


def test_full_disk_loses_only_checkpoints_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch)
    faults.disarm()
    undisturbed, _ = train(tmp_path / "undisturbed")
    expected = ending_of(undisturbed)
    assert intact_steps(undisturbed) == [3, 4]
    writes = [index for index, name in enumerate(faults.seen) if name == "write"]
    assert len(writes) == 4 * 5
    for number, index in enumerate(writes):
        faults.arm(lambda at, n=index: at == n, fail)  # type: ignore[misc]
        job, caught = train(tmp_path / str(index))
        assert caught == [CheckpointWarning]
        assert_same(ending_of(job), expected)
        lost = 1 + number // 5
        assert intact_steps(job) == [step for step in (1, 2, 3, 4) if step != lost][-2:]

    faults.arm(lambda at: at >= writes[5], fail)  # the disk stays full
    job, caught = train(tmp_path / "full")
    assert {*caught} == {CheckpointWarning}
    assert intact_steps(job) == [1]
    assert_same(ending_of(job), expected)
    faults.disarm()
    again, caught = train(tmp_path / "full")
    assert caught == []
    assert_same(ending_of(again), expected)
    assert intact_steps(again) == [3, 4]


class FullDisk(FileIO):
    """A file on a disk that is full for a range of writes."""

    full: ClassVar[range] = range(0)
    writes: ClassVar[int] = 0

    def write(self, data: Any) -> int:
        FullDisk.writes += 1
        if FullDisk.writes in FullDisk.full:
            super().write(bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize("lasts", [1, 3, 1000])
def test_full_disk_in_logger_loses_only_log_lines(tmp_path: Path, mocker: Any, lasts: int) -> None:
    undisturbed, _ = train(tmp_path / "undisturbed")
    opened = mocker.patch.object(append_file, "open", create=True)
    opened.side_effect = lambda path, *_, **__: FullDisk(path, "a")
    for first in range(1, 8, 2):  # the run has seven writes
        mocker.patch.multiple(FullDisk, full=range(first, first + lasts), writes=0)
        job, caught = train(tmp_path / str(first))
        assert {*caught} == {LoggerWarning}
        assert_same(ending_of(job), ending_of(undisturbed))
        assert intact_steps(job) == [3, 4]
        # Lines must be complete and unique: the readers refuse anything else.
        rows = read_json_lines(job.log) if job.log.exists() and job.log.stat().st_size else []
        assert len({row[:2] for row in rows}) == len(rows)
        more = len(rows) - len(read_json_lines(undisturbed.log))
        assert more < 0 or (more == 0 and lasts < 1000)
