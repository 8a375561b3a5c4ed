"""Readers of logger output, and a simulated full disk."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    SCALARS,
    EventAccumulator,
)

from automicro.loggers import JSONLinesLogger, Logger, TensorBoardLogger

Rows = list[tuple[int, str, float]]


class Disk(FileIO):
    """A file on a nearly full disk: it writes as much as fits, then fails."""

    room: ClassVar[int | None] = None

    def __init__(self, path: Path, mode: str, *, buffering: int) -> None:
        super().__init__(path, mode.removesuffix("b"))

    def write(self, data: Any) -> int:
        if Disk.room is None:
            return super().write(data)
        if Disk.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(bytes(data)[: Disk.room])
        Disk.room -= written
        return written


@dataclass(frozen=True, kw_only=True)
class Format:
    """A logger and the reader of its output."""

    make: Callable[[Path], Logger]
    read: Callable[[Path], Rows]


def read_json_lines(path: Path) -> Rows:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    return [
        (line["step"], name, float(value))
        for line in lines
        for name, value in line.items()
        if "run" not in line and name not in ("step", "time")
    ]


def read_runs(path: Path) -> list[tuple[int, Any]]:
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["run"]) for line in lines if "run" in line]


def read_tensorboard(folder: Path) -> Rows:
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0}).Reload()
    rows = [
        (event.step, name, event.value)
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    ]
    return sorted(rows, key=lambda row: row[0])


def read_tensorboard_text(folder: Path, name: str) -> bytes:
    (shown,) = EventAccumulator(str(folder)).Reload().Tensors(name)
    text: bytes = shown.tensor_proto.string_val[0]
    return text


FORMATS = {
    "json": Format(make=JSONLinesLogger, read=read_json_lines),
    "tensorboard": Format(make=TensorBoardLogger, read=read_tensorboard),
}
