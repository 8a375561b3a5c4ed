"""Pictures of speed and memory, drawn by matplotlib (``pip install 'automicro[pictures]'``).

Each function returns a matplotlib figure. A notebook displays it, ``run.show(name, figure)`` passes
it to the loggers, and `save` writes it to a file.
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

# Paul Tol's muted scheme, which color-blind people can distinguish.
_COLORS = ("#88ccee", "#ddcc77", "#44aa99", "#cc6677", "#117733", "#aa4499", "#999933", "#882255")
_STANDING = {  # at the bottom of a timeline, always in this order and these colors
    "parameters": "#332288",
    "optimizer": "#6f5fc4",
    "gradients": "#b0a5e8",
    "buffers": "#5b6b7f",
    "batch": "#93a1b1",
}
_OTHERS, _LIMIT, _CHOICE, _PEAK = "#dddddd", "#b2182b", "#0a5a9c", "#117733"
_MOST_TICKS = 12


def new_figure(*, height: float = 5.0) -> "Figure":
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


def speed_and_memory(
    points: Iterable[Point],
    *,
    limit_bytes: int | None = None,
    chosen: int | None = None,
    title: str = "Speed and memory by microbatch size",
    into: "SubFigure | None" = None,
) -> "Figure":
    """Draw rows per second and peak memory against the microbatch size.

    Args:
        points: one tuple per size: rows of a microbatch, rows per second, their spread (same unit,
            in both directions) and peak memory in bytes. Unknown values are None. A peak above the
            limit is marked with a cross.
        limit_bytes: memory of the device, or None to draw no limit.
        chosen: size to mark.
        title: title of the picture.
        into: subfigure to draw into, or None for a new figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no measurements, or a size is below 1.
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
    """Draw the memory of each owner over time, stacked.

    Parameters, optimizer, gradients, buffers and the batch are at the bottom. All other owners are
    above them, largest first, and the smallest are combined.

    Args:
        samples: moments in order, each with the bytes that each owner holds from then on.
        limit_bytes: memory of the device, or None to draw no limit.
        most_owners: number of owners to draw under their own names.
        title: title of the picture.
        unit: unit of the moments, for the axis.
        into: subfigure to draw into, or None for a new figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no sample, or the moments are out of order.
    """
    samples = list(samples)
    moments = [moment for moment, _ in samples]
    if not samples or moments != sorted(moments):
        raise ValueError(
            f"{len(samples)} samples cannot be drawn: give at least one, the earliest first"
        )
    width = (moments[-1] - moments[0]) / len(samples) or 1.0
    samples.append((moments[-1] + width, samples[-1][1]))  # gives the last sample a width
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
    # In the order of the bands, the uppermost first.
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    return figure  # type: ignore[no-any-return]


def _owners(samples: Sequence[Sample], most: int) -> dict[str, str]:
    """Return the names and colors of bands, from bottom to top."""
    held = {name: max(each.get(name, 0) for _, each in samples) for _, s in samples for name in s}
    standing = {name: color for name, color in _STANDING.items() if name in held}
    others = sorted(held.keys() - standing.keys(), key=lambda name: (-held[name], name))
    others = others[: max(most - len(standing), 1)]
    return standing | dict(zip(others, itertools.cycle(_COLORS), strict=False))


def _bytes_axis(axes: "Axes", label: str, amounts: Iterable[int]) -> int:
    """Label the axis, and return the number of bytes in its unit."""
    most = max(amounts)
    names = {1 << 40: "TiB", 1 << 30: "GiB", 1 << 20: "MiB", 1 << 10: "KiB", 1: "bytes"}
    # At least two of a unit, so that ticks are not all fractions.
    scale = next(each for each in names if most >= 2 * each or each == 1)
    axes.set_ylabel(f"{label} ({names[scale]})")
    return scale


def _draw_limit(axes: "Axes", limit_bytes: int | None, scale: int) -> None:
    if limit_bytes is not None:
        text = f"limit {format_bytes(limit_bytes)}"
        axes.axhline(limit_bytes / scale, color=_LIMIT, linestyle="--")
        axes.annotate(text, (0, limit_bytes / scale), (4, 4), ("axes fraction", "data"),
                      "offset points", color=_LIMIT)  # fmt: skip
