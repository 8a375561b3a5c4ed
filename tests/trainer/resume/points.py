"""Program points of a run, counted by kind, at any of which the process can be killed."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from automicro import files
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.loggers import lines as append_file
from automicro.step.events import Microbatch
from automicro.step.results import EvalResult, StepResult

DISK = {
    "write": "write",
    "sync": "fsync",
    "replace": "rename",
    "make_folder": "folder made",
    "open_new": "file opened",
    "remove_folder": "folder removed",
}
LOG_WRITE, STEP = "line logged", "optimizer step"


def die() -> None:
    """End this process as a power failure would: nothing more is run."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


class Points:
    """Counts the points that are passed, and kills the process at one of them.

    Args:
        at: the kind of the point and how many of its kind come before it; None for no kill.
    """

    def __init__(self, at: tuple[str, int] | None = None) -> None:
        self.passed: Counter[str] = Counter()
        self._at = at

    def is_hit(self, kind: str) -> bool:
        self.passed[kind] += 1
        return self._at == (kind, self.passed[kind] - 1)

    def at(self, kind: str) -> None:
        if self.is_hit(kind):
            die()

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch the disk, the loggers and an optimizer, for the life of this process."""
        for name, kind in DISK.items():
            setattr(files, name, self._on_disk(name, kind, getattr(files, name)))
        append_file.FileIO = _watched(self)  # type: ignore[attr-defined]
        optimizer.register_step_pre_hook(lambda *_: self.at(STEP))
        optimizer.register_step_post_hook(lambda *_: self.at(STEP))

    def _on_disk(self, name: str, kind: str, original: Callable) -> Callable:
        def point(*args: Any) -> Any:
            if self.is_hit(kind):
                do_half(name, original, args)
                die()
            return original(*args)

        return point


def do_half(name: str, original: Callable, args: tuple) -> None:
    """Do what can be done in part, in part."""
    if name == "write":
        data = memoryview(args[1])
        original(args[0], data[: len(data) // 2])
    if name == "remove_folder":
        for path in sorted(Path(args[0]).iterdir())[:2]:
            path.unlink()


def _watched(points: Points) -> type[FileIO]:
    class Watched(FileIO):
        def write(self, data: Any) -> int:
            if points.is_hit(LOG_WRITE):
                super().write(bytes(data)[: len(data) // 2])
                die()
            return super().write(data)

    return Watched


class PointsOfEvents(Callback):
    """The points between those of the disk: the events of the run.

    Args:
        points: are passed.
    """

    def __init__(self, points: Points) -> None:
        self._points = points

    def batch_start(self, run: Run, batch: Any) -> None:
        self._points.at("batch start")

    def forward_end(self, run: Run, microbatch: Microbatch) -> None:
        self._points.at("forward")

    def backward_end(self, run: Run, microbatch: Microbatch) -> None:
        self._points.at("backward")

    def batch_end(self, run: Run, result: StepResult) -> None:
        self._points.at("batch end")

    def epoch_start(self, run: Run) -> None:
        self._points.at("epoch start or end")

    def epoch_end(self, run: Run) -> None:
        self._points.at("epoch start or end")

    def eval_batch_end(self, run: Run, result: EvalResult) -> None:
        self._points.at("evaluation")

    def checkpoint_start(self, run: Run) -> None:
        self._points.at("checkpoint start or end")

    def checkpoint_end(self, run: Run, path: Path) -> None:
        self._points.at("checkpoint start or end")

    def fit_end(self, run: Run) -> None:
        self._points.at("fit end")
