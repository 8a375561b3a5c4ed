"""Pictures of speed and memory, drawn by matplotlib (``pip install 'automicro[pictures]'``).

Each function returns a figure of matplotlib: a notebook shows it, ``run.show(name, figure)`` hands
it to the loggers, `save` writes it.
"""

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from automicro.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Point: TypeAlias = tuple[int, float | None, float | None, int | None]
"""Rows of a microbatch, rows per second, their spread, and the peak in bytes."""
Sample: TypeAlias = tuple[float, Mapping[str, int]]
"""A moment, and the bytes that each owner holds from then on."""

# Paul Tol's muted scheme, which color-blind people can tell apart.
_COLORS = ("#88ccee", "#ddcc77", "#44aa99", "#cc6677", "#117733", "#aa4499", "#999933", "#882255")
_STANDING = {  # at the bottom of a timeline, in this order and always in these colors
    "parameters": "#332288",
    "optimizer": "#6f5fc4",
    "gradients": "#b0a5e8",
    "buffers": "#5b6b7f",
    "batch": "#93a1b1",
}
_OTHERS, _LIMIT, _CHOICE, _PEAK = "#dddddd", "#b2182b", "#0a5a9c", "#117733"
_MOST_TICKS = 12


def new_figure(*, height: float = 5.0) -> "Figure":
    """An empty figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib, which is not installed: pip install 'automicro[pictures]'"
        ) from error
    # Not pyplot's, which keeps each figure alive until it is closed, and may open a window.
    return Figure(figsize=(9, height), dpi=96, layout="constrained")


def save(figure: "Figure", path: str | os.PathLike[str]) -> Path:
    """Write a figure, and return where it is.

    Args:
        figure: any figure of matplotlib.
        path: ends in ``.png``, ``.svg`` or another suffix that matplotlib knows.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the suffix.
    """
    check_name(path)
    figure.savefig(path, dpi=192)
    return Path(path)


def check_name(path: str | os.PathLike[str]) -> None:
    """Refuse what `save` would refuse, before a long measurement.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not know the suffix.
    """
    if Path(path).suffix.lower()[1:] not in new_figure().canvas.get_supported_filetypes():
        raise ValueError(
            f"a picture cannot be saved as {str(path)!r}: name a file that ends in .png or .svg"
        )


def speed_and_memory(
    points: Iterable[Point],
    *,
    limit_bytes: int | None = None,
    chosen: int | None = None,
    title: str = "Speed and memory by microbatch size",
    into: "SubFigure | None" = None,
) -> "Figure":
    """Draw rows per second, and the peak of memory, against the microbatch size.

    Args:
        points: one for each size: rows of a microbatch, rows per second, their spread (in the
            same unit, in both directions) and the peak in bytes; None for what is not known. A
            size above the limit is marked with a cross.
        limit_bytes: what the device holds; None for no line.
        chosen: the size to mark.
        title: of the picture.
        into: a part of a figure to draw into; None for a new figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing was measured of any size, or a size is below 1.
    """
    points = sorted(points, key=lambda point: point[0])
    speeds = [(size, speed, spread or 0.0) for size, speed, spread, _ in points if speed]
    peaks = [(size, peak) for size, *_, peak in points if peak is not None]
    count = bool(speeds) + bool(peaks)
    if not count or points[0][0] < 1:
        raise ValueError(
            f"{len(points)} points cannot be drawn: give sizes of at least 1 row, with the speed "
            "or the peak of one at least"
        )
    figure: Any = new_figure(height=0.6 + 2.4 * count) if into is None else into
    figure.suptitle(title)
    panels = list(figure.subplots(count, sharex=True, squeeze=False)[:, 0])
    if speeds:
        panels[0].errorbar(*zip(*speeds, strict=True), color=_CHOICE, marker="o", capsize=3)
        panels[0].set_ylabel("rows per second")
    if peaks:
        axes = panels[-1]
        scale = _bytes_axis(axes, "peak memory", [limit_bytes or 0, *(peak for _, peak in peaks)])
        heights = [(size, peak / scale) for size, peak in peaks]
        axes.plot(*zip(*heights, strict=True), color=_PEAK, marker="o")
        _draw_limit(axes, limit_bytes, scale)
        high = [each for each in heights if limit_bytes and each[1] > limit_bytes / scale]
        axes.plot([n for n, _ in high], [peak for _, peak in high], "x", color=_LIMIT, ms=12, mew=2)
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.4)
        if chosen is not None:
            axes.axvline(chosen, color=_CHOICE, linestyle=":", label=f"chosen: {chosen} rows")
    if chosen is not None:
        panels[0].legend(handles=panels[0].lines[-1:])
    sizes = [size for size, *_ in points]
    ticks = sorted({*sizes[:: -(-len(sizes) // _MOST_TICKS)], *([chosen] if chosen else [])})
    panels[-1].set_xscale("log", base=2)
    panels[-1].set_xticks(ticks, [str(each) for each in ticks])
    panels[-1].minorticks_off()
    panels[-1].set_xlabel("microbatch size (rows)")
    return figure  # type: ignore[no-any-return]


def timeline(
    samples: Iterable[Sample],
    *,
    limit_bytes: int | None = None,
    most_owners: int = 10,
    title: str = "Memory over time",
    unit: str = "operations",
    into: "SubFigure | None" = None,
) -> "Figure":
    """Draw who holds how much memory over time, stacked.

    Parameters, optimizer, gradients, buffers and the batch lie at the bottom, all others above
    them, the largest first; the smallest are drawn together.

    Args:
        samples: moments in order, each with the bytes of each owner from then on.
        limit_bytes: what the device holds; None for no line.
        most_owners: how many are drawn under their own names.
        title: of the picture.
        unit: of the moments, for the axis.
        into: a part of a figure to draw into; None for a new figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no sample, or the moments go back.
    """
    samples = list(samples)
    moments = [moment for moment, _ in samples]
    if not samples or moments != sorted(moments):
        raise ValueError(
            f"{len(samples)} samples cannot be drawn: give at least one, the earliest first"
        )
    width = (moments[-1] - moments[0]) / len(samples) or 1.0
    samples.append((moments[-1] + width, samples[-1][1]))  # the last one has a width, too
    names = _owners(samples, most_owners)
    bands = [[held.get(name, 0) for _, held in samples] for name in names]
    totals = [sum(held.values()) for _, held in samples]
    rest = [total - sum(each) for total, *each in zip(totals, *bands, strict=True)]
    figure: Any = new_figure() if into is None else into
    axes = figure.subplots()
    scale = _bytes_axis(axes, "memory", [*totals, limit_bytes or 0])
    bands, labels = ([*bands, rest], [*names, "all others"]) if any(rest) else (bands, [*names])
    heights = [[num_bytes / scale for num_bytes in band] for band in bands]
    colors = [*names.values(), _OTHERS]
    xs = [moment for moment, _ in samples]
    axes.stackplot(xs, heights, labels=labels, colors=colors, step="post")
    peak = max(totals)
    axes.plot(xs[totals.index(peak)], peak / scale, "ko", label=f"peak {format_bytes(peak)}")
    _draw_limit(axes, limit_bytes, scale)
    axes.set(title=title, xlabel=unit, xlim=(xs[0], xs[-1]), ylim=(0, None))
    handles, labels = axes.get_legend_handles_labels()
    # In the order in which the bands lie on one another, the uppermost first.
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    return figure  # type: ignore[no-any-return]


def _owners(samples: Sequence[Sample], most: int) -> dict[str, str]:
    """Names with their colors, from the bottom to the top."""
    held = {name: max(each.get(name, 0) for _, each in samples) for _, s in samples for name in s}
    standing = {name: color for name, color in _STANDING.items() if name in held}
    others = sorted(held.keys() - standing.keys(), key=lambda name: (-held[name], name))
    others = others[: max(most - len(standing), 1)]
    return standing | dict(zip(others, itertools.cycle(_COLORS), strict=False))


def _bytes_axis(axes: "Axes", label: str, amounts: Iterable[int]) -> int:
    """Label the axis, and return how many bytes its unit has."""
    most = max(amounts)
    names = {1 << 40: "TiB", 1 << 30: "GiB", 1 << 20: "MiB", 1 << 10: "KiB", 1: "bytes"}
    # At least two of a unit: below that an axis would be all fractions.
    scale = next(each for each in names if most >= 2 * each or each == 1)
    axes.set_ylabel(f"{label} ({names[scale]})")
    return scale


def _draw_limit(axes: "Axes", limit_bytes: int | None, scale: int) -> None:
    if limit_bytes is not None:
        text = f"limit {format_bytes(limit_bytes)}"
        axes.axhline(limit_bytes / scale, color=_LIMIT, linestyle="--")
        axes.annotate(text, (0, limit_bytes / scale), (4, 4), ("axes fraction", "data"),
                      "offset points", color=_LIMIT)  # fmt: skip
