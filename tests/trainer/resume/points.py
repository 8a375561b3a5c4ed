"""Points in a run, counted by kind, at which the process can be killed."""

from collections import Counter
from collections.abc import Callable
from io import FileIO
from typing import Any

import torch

from automicro import files
from automicro.events.callback import Callback
from automicro.loggers import lines as append_file
from tests.checkpoints.faults import die, kill

DISK = {
    "write": "write",
    "sync": "fsync",
    "replace": "rename",
    "make_folder": "folder made",
    "open_new": "file opened",
    "remove_folder": "folder removed",
}
LOG_WRITE, STEP = "line logged", "optimizer step"


class Points:
    """Counts the points that a run passes, and kills the process at one of them."""

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
        """Watch the disk, the loggers and an optimizer until this process ends."""
        for name, kind in DISK.items():
            setattr(files, name, self._on_disk(name, kind, getattr(files, name)))
        append_file.FileIO = _watched(self)  # type: ignore[attr-defined]
        optimizer.register_step_pre_hook(lambda *_: self.at(STEP))
        optimizer.register_step_post_hook(lambda *_: self.at(STEP))

    def _on_disk(self, name: str, kind: str, original: Callable) -> Callable:
        def point(*args: Any) -> Any:
            if self.is_hit(kind):
                kill(name, original, args)
            return original(*args)

        return point


def _watched(points: Points) -> type[FileIO]:
    class Watched(FileIO):
        def write(self, data: Any) -> int:
            if points.is_hit(LOG_WRITE):
                super().write(bytes(data)[: len(data) // 2])
                die()
            return super().write(data)

    return Watched


EVENTS = {
    "batch_start": "batch start",
    "forward_end": "forward",
    "backward_end": "backward",
    "batch_end": "batch end",
    "epoch_start": "epoch start or end",
    "epoch_end": "epoch start or end",
    "eval_batch_end": "evaluation",
    "checkpoint_start": "checkpoint start or end",
    "checkpoint_end": "checkpoint start or end",
    "fit_end": "fit end",
}


def points_of_events(points: Points) -> Callback:
    """Return a callback that marks the events of a run as points between disk operations."""

    def passing(kind: str) -> Callable[..., None]:
        return lambda self, *given: points.at(kind)

    methods = {name: passing(kind) for name, kind in EVENTS.items()}
    passes: Callback = type("PassesPoints", (Callback,), methods)()
    return passes
