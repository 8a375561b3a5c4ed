"""A picture of speed and memory, drawn by matplotlib (``pip install 'automicro[pictures]'``).

It is a matplotlib figure. A notebook displays it, and `save` writes it to a file.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from automicro.errors import removed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point: TypeAlias = tuple[int, float | None, int | None]
"""Rows of a microbatch, rows per second, and the peak in bytes."""

_CHOICE, _PEAK = "#0a5a9c", "#117733"
_MOST_TICKS = 12


def new_figure(*, height: float = 3.0) -> "Figure":
    """Return an empty figure, or raise ImportError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib, which is not installed: pip install 'automicro[pictures]'"
        ) from error
    # Not a pyplot figure, which stays alive until it is closed and might open a window.
    return Figure(figsize=(9, height), dpi=96, layout="constrained")


def save(figure: "Figure", path: str | os.PathLike[str]) -> Path:
    """Write a figure to a file, and return the path.

    Args:
        figure: any matplotlib figure.
        path: path with the suffix ``.png``, ``.svg`` or another format that matplotlib supports.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not support the suffix.
    """
    check_name(path)
    figure.savefig(path, dpi=192)
    return Path(path)


def check_name(path: str | os.PathLike[str]) -> None:
    """Refuse paths that `save` would refuse, before a long measurement."""
    if Path(path).suffix.lower()[1:] not in new_figure().canvas.get_supported_filetypes():
        raise ValueError(
            f"a picture cannot be saved as {str(path)!r}: name a file that ends in .png or .svg"
        )


@removed(limit_bytes="Draw the line: speed_and_memory(…).axes[-1].axhline(limit)")
def speed_and_memory(points: Iterable[Point], *, chosen: int | None = None) -> "Figure":
    """Draw rows per second and peak memory against the microbatch size.

    Args:
        points: one tuple per size: rows of a microbatch, rows per second, and peak memory in
            bytes. Unknown values are None.
        chosen: size to mark.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no measurements, or a size is below 1.
    """
    points = sorted(points, key=lambda point: point[0])
    speeds = [(size, speed) for size, speed, _ in points if speed]
    peaks = [(size, peak) for size, *_, peak in points if peak is not None]
    count = bool(speeds) + bool(peaks)
    if not count or points[0][0] < 1:
        raise ValueError(
            f"{len(points)} points cannot be drawn: give sizes of at least 1 row, and the speed "
            "or the peak of at least one of them"
        )
    figure = new_figure(height=0.6 + 2.4 * count)
    figure.suptitle("Speed and memory by microbatch size")
    panels = list(figure.subplots(count, sharex=True, squeeze=False)[:, 0])
    if speeds:
        panels[0].plot(*zip(*speeds, strict=True), color=_CHOICE, marker="o")
        panels[0].set_ylabel("rows per second")
    if peaks:
        sizes, heights = zip(*peaks, strict=True)
        names = {1 << 40: "TiB", 1 << 30: "GiB", 1 << 20: "MiB", 1 << 10: "KiB", 1: "bytes"}
        # At least two of a unit, so that ticks are not all fractions.
        scale = next(each for each in names if max(heights) >= 2 * each or each == 1)
        panels[-1].plot(sizes, [each / scale for each in heights], color=_PEAK, marker="o")
        panels[-1].set_ylabel(f"peak memory ({names[scale]})")
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.4)
        if chosen is not None:
            axes.axvline(chosen, color=_CHOICE, linestyle=":", label=f"chosen: {chosen} rows")
    if chosen is not None:
        panels[0].legend(handles=panels[0].lines[-1:])
    rows = [size for size, *_ in points]
    ticks = sorted({*rows[:: -(-len(rows) // _MOST_TICKS)], *([chosen] if chosen else [])})
    panels[-1].set_xscale("log", base=2)
    panels[-1].set_xticks(ticks, [str(each) for each in ticks])
    panels[-1].minorticks_off()
    panels[-1].set_xlabel("microbatch size (rows)")
    return figure
