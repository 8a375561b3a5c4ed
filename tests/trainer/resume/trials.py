"""A trial kills a run one or more times, and compares its end to the undisturbed run."""

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automicro.checkpoints.manifest import verify
from automicro.checkpoints.writing import list_checkpoints
from automicro.values import same_values
from tests.loggers.logged import Rows, read_json_lines
from tests.processes import KILLED
from tests.trainer.resume.lives import Life, live
from tests.trainer.resume.points import DISK, EVENTS, LOG_WRITE, STEP
from tests.trainer.resume.subjects import Subject, draw

# Times, and bytes since the start of the process, differ between processes.
MEASURED = ("per_second", "peak_memory_bytes", "/seconds")
MOST_LIVES = 4
KINDS = (*DISK.values(), LOG_WRITE, STEP, *dict.fromkeys(EVENTS.values()))


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The cost of one kill."""

    kind: str  # kind of the point
    done: int  # batches begun before the kill
    resumed_at: int  # the batch after which the next process resumed
    is_damaged: bool  # whether the newest checkpoint was cut short before the resume

    @property
    def repeated(self) -> int:
        """Return the number of batches that had to be repeated."""
        return self.done - self.resumed_at


def kill_and_resume(seed: int, folder: Path, *, first_kind: str | None = None) -> list[Kill]:
    """Kill the run of a seed, resume it, and compare its end."""
    subject, choose = draw(seed), random.Random(seed + 1)
    undisturbed = live(subject, folder / "undisturbed", name="only")
    disturbed = folder / "disturbed"
    checkpoints = Checkpoints(disturbed / "checkpoints")
    most = _longest(undisturbed)
    kills: list[Kill] = []
    point = _choose_point(choose, undisturbed.passed, first_kind)
    life = live(subject, disturbed, name="life-0", at=point)
    while life.exit_code != 0:
        assert life.exit_code == KILLED, life
        kind, before = point[0], life
        checkpoints.check(before)
        is_damaged = choose.random() < 0.2 and checkpoints.cut_newest_short(choose)
        expected, num_damaged = checkpoints.newest_good()
        is_last = len(kills) + 1 >= MOST_LIVES or choose.random() < 0.5
        point = _choose_point(choose, undisturbed.passed, None)
        life = live(
            subject,
            disturbed,
            name=f"life-{len(kills) + 1}",
            at=None if is_last else point,
            may_warn=num_damaged > 0,
        )
        if life.resumed_at is None:  # killed before training resumed
            life.resumed_at = expected
        kill = Kill(
            kind=kind,
            done=max([before.resumed_at or 0, *before.begun]),
            resumed_at=life.resumed_at,
            is_damaged=is_damaged,
        )
        assert life.resumed_at == expected
        assert life.begun == list(range(expected + 1, expected + 1 + len(life.begun)))
        assert kill.repeated <= most or num_damaged, (kill, most)
        if life.exit_code == 0:
            assert len(life.warned) == num_damaged, life.warned
            assert all("Resuming from" in warning for warning in life.warned)
        kills.append(kill)
    assert_same(life.ending, undisturbed.ending)
    check_logs(subject, disturbed, folder / "undisturbed")
    return kills


class Checkpoints:
    """The checkpoints of a run that is killed repeatedly."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._damaged: set[Path] = set()

    def check(self, life: Life) -> None:
        """Check that the checkpoints of a killed process are intact and complete."""
        for path in set(list_checkpoints(self._folder)) - self._damaged:
            verify(path)
        step, _ = self.newest_good()
        assert step >= max([life.resumed_at or 0, *life.saved]), (
            "a checkpoint that was complete is lost"
        )

    def newest_good(self) -> tuple[int, int]:
        """Return the step of the newest intact checkpoint, and the number of newer damaged ones."""
        found = list_checkpoints(self._folder)
        for index, path in enumerate(found):
            if path not in self._damaged:
                return int(path.name.rpartition("-")[2]), index
        assert not found
        return 0, 0

    def cut_newest_short(self, choose: random.Random) -> bool:
        """Damage the newest checkpoint if another one is intact, like a disk without real fsync."""
        good = [path for path in list_checkpoints(self._folder) if path not in self._damaged]
        if len(good) < 2:
            return False
        victim = choose.choice(sorted(path for path in good[0].iterdir() if path.stat().st_size))
        content = victim.read_bytes()
        victim.write_bytes(content[: choose.randrange(len(content))])
        self._damaged.add(good[0])
        return True


def _longest(life: Life) -> int:
    """Return the largest number of batches between two checkpoints."""
    steps = [0, *life.saved, life.begun[-1]]
    return max(after - before for before, after in itertools.pairwise(steps))


def _choose_point(
    choose: random.Random, passed: Mapping[str, int], kind: str | None
) -> tuple[str, int]:
    if kind is None or not passed.get(kind):
        kind = choose.choice(sorted(passed))
    return kind, choose.randrange(passed[kind])


def check_logs(subject: Subject, disturbed: Path, undisturbed: Path) -> None:
    """Check that every value is logged once, bit for bit and in order."""
    logged = [read_json_lines(folder / "log.jsonl") for folder in (disturbed, undisturbed)]
    rows, expected = (
        _of_last_run([row for row in each if not row[1].endswith(MEASURED)]) for each in logged
    )
    if subject.loader == "stream":
        # The length is unknown, so the end of an epoch may be logged after the
        # checkpoint of its last batch, and then again.
        rows, expected = (list(dict.fromkeys(each)) for each in (rows, expected))
    pairs = itertools.zip_longest(rows, expected)
    assert [pair for pair in pairs if pair[0] != pair[1]][:1] == []


def _of_last_run(rows: Rows) -> Rows:
    """Drop rows of a run that was killed before its first checkpoint and started over."""
    batches = [(index, row[0]) for index, row in enumerate(rows) if row[1] == "train/loss"]
    begins = [index for index, step in batches if step == 1]
    return rows[begins[-1] :]


def assert_same(one: Any, other: Any, place: str = "") -> None:
    """Check that two states are bit-identical."""
    assert type(one) is type(other), place
    if isinstance(one, Mapping):
        assert list(one) == list(other), (place, list(one), list(other))
        for name in one:
            assert_same(one[name], other[name], f"{place}.{name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), (place, one, other)
        for index, (each, its) in enumerate(zip(one, other, strict=True)):
            assert_same(each, its, f"{place}.{index}")
    elif isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), place
        assert torch.equal(_bits(one), _bits(other)), place
    elif isinstance(one, float):
        assert one.hex() == other.hex(), (place, one, other)
    else:
        assert same_values(one, other), (place, one, other)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
