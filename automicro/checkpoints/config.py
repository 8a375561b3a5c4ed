"""What a `Trainer` is told about checkpoints."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from automicro.checkpoints.retention import Retention
from automicro.duration import read_duration

RESUME = ("auto", "never")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go, how often they are saved, which stay, and whether a run goes on.

    Args:
        folder: in which they lie; made by the first save.
        interval: a duration, such as ``"1ep"`` or ``"500ba"``; None for the end only.
        keep_last: how many of the newest stay; None keeps all.
        keep_best: how many stay besides, by the best value of a metric.
        best_metric: its name.
        best_mode: ``"min"`` where less is better, ``"max"`` where more is.
        asynchronous: write in the background, from a copy in the host's memory.
        resume: ``"auto"`` goes on from the newest good one in the folder where there is one,
            ``"never"`` starts anew, and a path does the same as ``"auto"`` but begins from that
            checkpoint, or from the newest good one in that folder. A path of a checkpoint in
            ``folder`` itself is taken in any case.

    Raises:
        TypeError: the interval is a bare number.
        ValueError: an option is not known, or a number is too small.

    >>> CheckpointConfig(folder="runs/a/checkpoints", interval="500ba").keep_last
    3
    """

    folder: Path | str
    interval: str | None = "1ep"
    keep_last: int | None = 3
    keep_best: int = 0
    best_metric: str = "eval/loss"
    best_mode: str = "min"
    asynchronous: bool = False
    resume: Path | str = "auto"

    def __post_init__(self) -> None:
        _check_folder("folder", self.folder)
        if self.interval is not None:
            read_duration("interval", self.interval)
        Retention(
            keep_last=self.keep_last,
            keep_best=self.keep_best,
            best_metric=self.best_metric,
            best_mode=self.best_mode,
        )
        _check_folder("resume", self.resume)
        # A word that is no folder is a mistyped one; whether a path exists is seen when it is read.
        if isinstance(self.resume, str) and self.resume not in RESUME:
            is_word = not any(sign and sign in self.resume for sign in (os.sep, os.altsep))
            if is_word and not Path(self.resume).exists():
                near = difflib.get_close_matches(self.resume.lower(), RESUME, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise ValueError(
                    f"resume={self.resume!r} is not known{hint}; use 'auto', 'never' or the "
                    "folder of a checkpoint"
                )


def _check_folder(name: str, value: object) -> None:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError(f"{name}={value!r} is no path; give the path of a folder")
