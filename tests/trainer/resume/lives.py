"""One life of a run: a forked process that trains until it ends or is killed, and its journal."""

import copy
import dataclasses
import functools
import gc
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from automicro.checkpoints.rng import rng_state
from automicro.errors import CheckpointWarning
from automicro.events.callback import Callback
from automicro.events.run import Run
from tests.processes import end, start
from tests.trainer.resume.points import Points, points_of_events
from tests.trainer.resume.subjects import Job, Subject


@dataclass(kw_only=True)
class Life:
    """Records of one process."""

    exit_code: int
    begun: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    resumed_at: int | None = None
    warned: list[str] = field(default_factory=list)
    passed: Mapping[str, int] = field(default_factory=dict)
    ending: Mapping[str, Any] = field(default_factory=dict)


class Journal(Callback):
    """Writes events to a file at once, so they survive the process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, what: str, value: object) -> None:
        os.write(self._descriptor, (json.dumps([what, value]) + "\n").encode())

    def fit_start(self, run: Run) -> None:
        self.note("resumed", run.state.batch)

    def batch_start(self, run: Run, batch: Any) -> None:
        gc.collect()  # free garbage of checkpoints, which affects what fits
        self.note("begun", run.state.batch + 1)

    def checkpoint_end(self, run: Run, path: Path) -> None:
        self.note("saved", run.state.batch)


def live(
    subject: Subject,
    folder: Path,
    *,
    name: str,
    at: tuple[str, int] | None = None,
    may_warn: bool = False,
) -> Life:
    """Run a process that trains until it ends, or is killed at a point."""
    journal, ending, log = (folder / f"{name}.{kind}" for kind in ("journal", "ending", "log"))

    def work() -> None:
        logging.getLogger("automicro").setLevel(logging.ERROR)
        warnings.simplefilter("error")
        gc.freeze()
        notes = Journal(journal)
        with warnings.catch_warnings(record=True) as caught:
            if may_warn:
                warnings.simplefilter("always", CheckpointWarning)
            points = Points(at)
            job = subject.make(folder, notes, points_of_events(points))
            points.install(job.optimizer)
            job.trainer.fit()
        for each in caught:
            notes.note("warned", str(each.message))
        torch.save({"passed": dict(points.passed), "ending": ending_of(job)}, ending)

    folder.mkdir(parents=True, exist_ok=True)
    code = end(start(work, log=log), log=log)
    life = Life(exit_code=code)
    for line in journal.read_text().splitlines():
        what, value = json.loads(line)
        if what == "resumed":
            life.resumed_at = value
        else:
            getattr(life, what).append(value)
    if code == 0:
        written = torch.load(ending, weights_only=False)  # this test wrote it
        life.passed, life.ending = written["passed"], written["ending"]
    elif code == 1:
        raise AssertionError(f"{subject}\nended with an error:\n{log.read_text()}")
    return life


def ending_of(job: Job) -> dict[str, Any]:
    """Return the complete final state of a run, except for times."""
    fit = job.trainer._fit
    assert fit is not None
    assert fit.checkpointer is not None
    gathered = fit.checkpointer._snapshot.gather()
    progress = dataclasses.asdict(copy.deepcopy(job.trainer.state))
    for phase in ("train", "eval"):
        del progress[phase]["seconds"]
    return {
        "rng": rng_state(),
        "model": job.model.state_dict(),
        "training": [module.training for module in job.model.modules()],
        "optimizer": job.optimizer.state_dict(),
        "scheduler": None if job.scheduler is None else job.scheduler.state_dict(),
        "callbacks": [callback.state_dict() for callback in job.own],
        "progress": progress,
        "parts": {
            name: _without_measurements(part) if name.startswith("sizes") else part
            for name, part in gathered["parts"].items()
        },
        "metrics": fit.step.metrics.compute(),
    }


def _without_measurements(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return found sizes without measured bytes, which differ between processes.

    Sizes depend on these bytes only when they are refined.
    """
    kept = copy.deepcopy(sizes)
    for phase in kept.values():
        learned = phase.get("policy", {}).get("learned")  # nested parts have their own sizes
        if learned is not None:
            del learned["room"]
            for point in [*learned["fits"], *learned["failures"]]:
                del point["need"], point["room"]
    return kept


@functools.cache
def warm_up() -> None:
    """Import modules once here, so that forked processes do not import them again."""
    with tempfile.TemporaryDirectory() as folder:
        state = torch.get_rng_state()
        Subject(seed=0, precision="fp16", memory_limit="1MiB").make(Path(folder)).trainer.fit()
        torch.set_rng_state(state)
