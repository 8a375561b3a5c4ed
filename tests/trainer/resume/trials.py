"""A trial kills a run one or more times, and compares its end to the undisturbed run."""

import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automicro.checkpoints.manifest import verify
from automicro.checkpoints.writing import list_checkpoints
from automicro.values import same_values
from tests.loggers.logged import Rows, read_json_lines
from tests.processes import KILLED
from tests.trainer.resume.lives import live
from tests.trainer.resume.points import DISK, EVENTS, LOG_WRITE, STEP
from tests.trainer.resume.subjects import Subject, draw

# Times, and bytes since the start of the process, differ between processes.
MEASURED = ("per_second", "peak_memory_bytes", "/seconds")
MOST_LIVES = 4
KINDS = (*DISK.values(), LOG_WRITE, STEP, *dict.fromkeys(EVENTS.values()))


def kill_and_resume(seed: int, folder: Path, *, first_kind: str = "") -> list[str]:
    """Kill the run of a seed up to three times, compare its end, and return the kinds of damage."""
    subject, choose = draw(seed), random.Random(seed + 1)
    undisturbed = live(subject, folder / "undisturbed", name="only")
    steps = [0, *undisturbed.saved, undisturbed.begun[-1]]
    most = max(after - before for before, after in itertools.pairwise(steps))
    disturbed, damaged = folder / "disturbed", set[Path]()
    kinds: list[str] = []
    done = 0
    for number in range(MOST_LIVES):
        kind = first_kind if undisturbed.passed.get(first_kind) and number == 0 else ""
        kind = kind or choose.choice(sorted(undisturbed.passed))
        at = (kind, choose.randrange(undisturbed.passed[kind]))
        is_last = number == MOST_LIVES - 1 or (number > 0 and choose.random() < 0.5)
        name, good = f"life-{number}", [*_good(disturbed, damaged)]
        begins = _step_of(good[0]) if good else 0
        num_damaged = len(damaged & {*_newer(disturbed, begins)})
        assert done - begins <= most or num_damaged, (kinds, done, begins)
        life = live(
            subject, disturbed, name=name, at=None if is_last else at, may_warn=num_damaged > 0
        )
        assert life.resumed_at in (begins, None)  # None: killed before training resumed
        assert life.begun == list(range(begins + 1, begins + 1 + len(life.begun)))
        if life.exit_code == 0:
            assert len(life.warned) == num_damaged, life.warned
            assert all("Resuming from" in warning for warning in life.warned)
            break
        assert life.exit_code == KILLED, life
        kinds.append(kind)
        done = max([begins, *life.begun])
        good = [*_good(disturbed, damaged)]
        for path in good:
            verify(path)
        assert max([0, *map(_step_of, good)]) >= max([begins, *life.saved]), "a checkpoint is lost"
        if choose.random() < 0.2 and len(good) > 1:
            _cut_short(good[0], choose)
            damaged.add(good[0])
            kinds.append("cut short")
    assert_same(life.ending, undisturbed.ending)
    check_logs(subject, disturbed, folder / "undisturbed")
    return kinds


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _newer(folder: Path, step: int) -> list[Path]:
    return [path for path in list_checkpoints(folder / "checkpoints") if _step_of(path) > step]


def _good(folder: Path, damaged: set[Path]) -> list[Path]:
    """Return the intact checkpoints, newest first."""
    return [path for path in list_checkpoints(folder / "checkpoints") if path not in damaged]


def _cut_short(checkpoint: Path, choose: random.Random) -> None:
    """Damage a checkpoint like a disk without real fsync."""
    victim = choose.choice(sorted(path for path in checkpoint.iterdir() if path.stat().st_size))
    content = victim.read_bytes()
    victim.write_bytes(content[: choose.randrange(len(content))])


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
