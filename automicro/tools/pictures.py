"""Pictures of speed and memory: one drawing as HTML that stands alone, as PNG and in notebooks.

A picture is plain data: panels with axes, marks in the units of those axes, and the table of the
figures that it shows. Two hands draw it. One writes SVG and needs nothing; the other makes a figure
of matplotlib, for PNG and TensorBoard (``pip install "automicro[pictures]"``).
"""

import html
import io
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from automicro.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point: TypeAlias = tuple[int, float | None, float | None, int | None]
"""Rows of a microbatch, rows per second, their spread, and the peak in bytes."""
Sample: TypeAlias = tuple[float, Mapping[str, int]]
"""A moment, and the bytes that each owner holds from then on."""

# Paul Tol's muted scheme, told apart by people who are colour-blind.
_COLOURS = ("#88ccee", "#ddcc77", "#44aa99", "#cc6677", "#117733", "#aa4499", "#999933", "#882255")
_STANDING = {  # at the bottom of a timeline, in this order and always in these colours
    "parameters": "#332288",
    "optimizer": "#6f5fc4",
    "gradients": "#b0a5e8",
    "buffers": "#5b6b7f",
    "batch": "#93a1b1",
}
_OTHERS = "#dddddd"
_INK, _FAINT, _LIMIT, _CHOICE = "#222222", "#e4e4e4", "#b2182b", "#0a5a9c"

_WIDTH, _LEGEND = 760, 250  # pixels, as all that follows
_LEFT, _TOP, _RIGHT, _BELOW = 84, 52, 32, 46
_GAP = 30
_LETTER = 6.4  # the width of one
_MOST_LETTERS = 34  # of a name beside a picture
_MOST_COLUMNS = 400  # of a timeline: finer ones could not be seen


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What is along one side of a panel.

    Attributes:
        label: with the unit.
        low: where it begins.
        high: where it ends.
        ticks: places and what is written there.
    """

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    def share(self, value: float) -> float:
        """Where a value lies between low and high, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, kw_only=True)
class Line:
    """Measured points and the line through them.

    Attributes:
        colour: of both.
        points: x, y and the spread of y in both directions (0 for none).
        tips: what each is, in words.
    """

    colour: str
    points: Sequence[tuple[float, float, float]]
    tips: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Area:
    """What one owner holds over time, on top of the others.

    Attributes:
        name: of the owner.
        colour: of the area.
        xs: moments, one more than values: each holds until the next.
        lows: where the area begins.
        highs: where it ends.
    """

    name: str
    colour: str
    xs: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        x: the axis below.
        y: the axis on the left.
        lines: of measured points.
        areas: from the bottom to the top.
        limit: a height and what is written on it.
        choice: a place on the x axis and what is written on it.
        crosses: places (x, y) of what does not fit.
        peak: a place (x, y) and what is written there.
        height: in pixels.
    """

    x: Axis
    y: Axis
    lines: Sequence[Line] = ()
    areas: Sequence[Area] = ()
    limit: tuple[float, str] | None = None
    choice: tuple[float, str] | None = None
    crosses: Sequence[tuple[float, float]] = ()
    peak: tuple[float, float, str] | None = None
    height: int = 200


@dataclass(frozen=True, kw_only=True, repr=False)
class Picture:
    """A picture that can be shown anywhere.

    A notebook shows it by itself, ``save`` writes it, and a `TensorBoardLogger` takes it
    (``show``). HTML needs no package and loads nothing; ``figure``, ``png`` and ``save("x.png")``
    need matplotlib.

    Attributes:
        title: what is drawn.
        summary: the same as a sentence or two, for whoever cannot see it.
        panels: from the top to the bottom.
        header: of the table below.
        rows: of the table below.

    >>> picture = speed_and_memory([(8, 100.0, 2.0, 1 << 30), (16, 120.0, 3.0, 2 << 30)], chosen=16)
    >>> picture
    Picture('Speed and memory by microbatch size')
    >>> "chosen: 16 rows" in picture.html()
    True
    """

    title: str
    summary: str
    panels: Sequence[Panel]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"

    def svg(self) -> str:
        """The drawing alone, as SVG."""
        return _svg(self)

    def html(self) -> str:
        """A page with the drawing and a table of its figures. It loads nothing from elsewhere."""
        return html_page(self.title, self._repr_html_())

    def _repr_html_(self) -> str:
        table = html_grid(self.header, self.rows, caption=f"Figures of: {self.title}")
        return (
            f'<figure style="margin:0 0 1.5em">{_svg(self)}'
            f'<figcaption class="automicro-summary">{escape(self.summary)}</figcaption>'
            f"{table}</figure>"
        )

    def figure(self) -> "Figure":
        """A figure of matplotlib, to be changed at will.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return _figure(self)

    def png(self) -> bytes:
        """The drawing as PNG, at twice the size in pixels.

        Raises:
            ImportError: matplotlib is not installed.
        """
        target = io.BytesIO()
        self.figure().savefig(target, format="png", dpi=192, facecolor="white")
        return target.getvalue()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture, and return where it is.

        Args:
            path: ends in ``.html``, ``.svg`` or ``.png``.

        Raises:
            ImportError: matplotlib is not installed, and a PNG was asked for.
            OSError: the file cannot be written.
            ValueError: the ending is another.
        """
        target = Path(path)
        kind = target.suffix.lower()
        if kind == ".png":
            target.write_bytes(self.png())
        elif kind in (".html", ".htm"):
            target.write_text(self.html(), encoding="utf-8")
        elif kind == ".svg":
            target.write_text(self.svg(), encoding="utf-8")
        else:
            raise ValueError(
                f"a picture cannot be saved as {str(path)!r}: give a name that ends in .html, "
                f".svg or .png"
            )
        return target


def speed_and_memory(
    points: Iterable[Point],
    *,
    limit_bytes: int | None = None,
    chosen: int | None = None,
    title: str = "Speed and memory by microbatch size",
) -> Picture:
    """Draw rows per second and the peak of memory against the microbatch size.

    Args:
        points: one for each size: rows of a microbatch, rows per second, their spread (in the
            same unit, in both directions) and the peak in bytes; None for what is not known. A
            size above the limit is marked with a cross.
        limit_bytes: what the device holds; None for no line.
        chosen: the size to mark.
        title: of the picture.

    Raises:
        ValueError: no point, two of one size, or nothing measured of any.

    >>> picture = speed_and_memory([(4, None, None, 600), (8, None, None, 1200)], limit_bytes=1000)
    >>> [panel.y.label for panel in picture.panels]
    ['peak memory (bytes)']
    >>> picture.rows[1]
    ('8', '—', '1.17 KiB', 'does not fit')
    """
    points = sorted(points, key=lambda point: point[0])
    _check_points(points)
    sizes = [size for size, *_ in points]
    x = _size_axis(sizes, chosen)
    choice = None
    if chosen is not None:
        choice = (_place_of(chosen), f"chosen: {_rows(chosen)}")
    panels = []
    speeds = [
        (size, speed, spread or 0.0) for size, speed, spread, _ in points if speed is not None
    ]
    if speeds:
        line = Line(
            colour=_CHOICE,
            points=[(_place_of(size), speed, spread) for size, speed, spread in speeds],
            tips=[
                f"{_rows(size)}: {_speed(speed, spread)} rows/s" for size, speed, spread in speeds
            ],
        )
        most = max(speed + spread for _, speed, spread in speeds)
        panels.append(
            Panel(x=x, y=_number_axis("rows per second", most * 1.08), lines=[line], choice=choice)
        )
    peaks = [(size, peak) for size, *_, peak in points if peak is not None]
    if peaks:
        most_bytes = max(max(peak for _, peak in peaks), limit_bytes or 0)
        y, unit = _bytes_axis("peak memory", most_bytes)
        too_large = [] if limit_bytes is None else [each for each in peaks if each[1] > limit_bytes]
        line = Line(
            colour="#117733",
            points=[(_place_of(size), peak / unit, 0.0) for size, peak in peaks],
            tips=[f"{_rows(size)}: {format_bytes(peak)}" for size, peak in peaks],
        )
        panels.append(
            Panel(
                x=x,
                y=y,
                lines=[line],
                limit=_limit(limit_bytes, unit),
                choice=choice if not speeds else (choice[0], "") if choice else None,
                crosses=[(_place_of(size), peak / unit) for size, peak in too_large],
            )
        )
    said = [f"{len(points)} sizes from {sizes[0]} to {_rows(sizes[-1])}"]
    said += [] if chosen is None else [f"chosen: {_rows(chosen)}"]
    said += [] if limit_bytes is None else [f"memory limit {format_bytes(limit_bytes)}"]
    return Picture(
        title=title,
        summary=f"{title}: {'; '.join(said)}.",
        panels=panels,
        header=("microbatch size (rows)", "rows per second", "peak memory", ""),
        rows=[_row(point, limit_bytes, chosen) for point in points],
    )


def timeline(
    samples: Iterable[Sample],
    *,
    limit_bytes: int | None = None,
    most_owners: int = 10,
    title: str = "Memory over time",
    unit: str = "operations",
) -> Picture:
    """Draw who holds how much memory over time, stacked.

    Parameters, optimizer, gradients, buffers and the batch lie at the bottom, all others above
    them, the largest first; the smallest are drawn together.

    Args:
        samples: moments in order, each with the bytes of each owner from then on.
        limit_bytes: what the device holds; None for no line.
        most_owners: how many are drawn by their own names.
        title: of the picture.
        unit: of the moments, for the axis.

    Raises:
        ValueError: no sample, or moments that go back.

    >>> picture = timeline([(0, {"parameters": 4096}), (1, {"parameters": 4096, "head": 8192})])
    >>> for row in picture.rows:
    ...     print(*row, sep=", ")
    head, 8.00 KiB, 8.00 KiB
    parameters, 4.00 KiB, 4.00 KiB
    all, 12.00 KiB, 12.00 KiB
    """
    samples = list(samples)
    if not samples:
        raise ValueError("a timeline has at least one sample, and there is none: give (0, {…})")
    for (before, _), (after, _) in itertools.pairwise(samples):
        if after < before:
            raise ValueError(f"samples go back from {before:g} to {after:g}: give them in order")
    at_peak, totals = _highest(samples)
    most: dict[str, int] = {}
    for _, held in samples:
        for owner, num_bytes in held.items():
            most[owner] = max(most.get(owner, 0), num_bytes)
    named = _named(most, most_owners)
    y, scale = _bytes_axis("memory", max(max(totals), limit_bytes or 0))
    columns = _columns(samples, totals)
    end = samples[-1][0]
    xs = [moment for moment, _ in columns]
    xs.append(end + max((end - xs[0]) / max(len(columns), 1), 1e-9 if end > xs[0] else 1.0))
    areas = _areas(columns, named, xs, scale)
    moment, held = samples[at_peak]
    peak = (moment, totals[at_peak] / scale, f"peak {format_bytes(totals[at_peak])}")
    said = f"peak {format_bytes(totals[at_peak])} at {moment:g} {unit}"
    limited = "" if limit_bytes is None else f"; memory limit {format_bytes(limit_bytes)}"
    order = [area.name for area in reversed(areas) if area.name in most]
    order += sorted(most.keys() - set(order), key=lambda owner: -most[owner])
    return Picture(
        title=title,
        summary=f"{title}: {said}{limited}.",
        panels=[
            Panel(
                x=_number_axis(unit, xs[-1], low=xs[0]),
                y=y,
                areas=areas,
                limit=_limit(limit_bytes, scale),
                peak=peak,
                height=300,
            )
        ],
        header=("owner", "at the peak", "at most"),
        rows=[
            *((each, format_bytes(held.get(each, 0)), format_bytes(most[each])) for each in order),
            ("all", format_bytes(totals[at_peak]), format_bytes(totals[at_peak])),
        ],
    )


def html_page(title: str, body: str) -> str:
    """A page that loads nothing: HTML that is XML as well.

    Args:
        title: plain text.
        body: HTML.
    """
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def html_grid(header: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str) -> str:
    """A table of plain text. The first cell of each row is its heading.

    >>> html_grid(["owner", "bytes"], [["<b>", "1.00 KiB"]], caption="who")[-68:]
    '<th scope="row">&lt;b&gt;</th><td>1.00 KiB</td></tr></tbody></table>'
    """
    heads = "".join(f'<th scope="col">{escape(each)}</th>' for each in header)
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(each)}</td>" for each in rest)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return (
        f'<table class="automicro-figures"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def escape(text: str) -> str:
    r"""Text as it stands in HTML and XML; what neither can hold becomes a question mark.

    >>> escape('<a>\x00 & "b"')
    '&lt;a&gt;� &amp; &quot;b&quot;'
    """
    kept = (each if each in "\t\n" or each.isprintable() else "�" for each in text)
    return html.escape("".join(kept))


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fff;margin:2em auto;max-width:64em;
padding:0 1.5em}svg{max-width:100%;height:auto}figcaption{color:#555;margin:.3em 0 .8em}
table{border-collapse:collapse;margin:.6em 0 1.6em;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.3em 0}th,td{padding:.25em .9em .25em 0;
text-align:left;border-bottom:1px solid #e4e4e4;vertical-align:top}tbody th{font-weight:normal}
code,pre{font:13px/1.45 ui-monospace,monospace}pre{overflow-x:auto;background:#f6f6f6;padding:.8em}
""".replace("\n", "")


# What is drawn


def _check_points(points: Sequence[Point]) -> None:
    if not any(speed is not None or peak is not None for _, speed, _, peak in points):
        raise ValueError(
            f"none of {len(points)} points has a speed or a peak, so there is nothing to draw: "
            f"give (size, rows per second, spread, peak bytes)"
        )
    sizes = [size for size, *_ in points]
    for before, after in itertools.pairwise(sizes):
        if before == after:
            raise ValueError(f"two points are of {_rows(after)}: give one for each size")
    if sizes[0] < 1:
        raise ValueError(f"a point has the size {sizes[0]}: give at least one row")


def _row(point: Point, limit_bytes: int | None, chosen: int | None) -> tuple[str, ...]:
    size, speed, spread, peak = point
    is_large = limit_bytes is not None and peak is not None and peak > limit_bytes
    remarks = ["chosen"] * (size == chosen) + ["does not fit"] * is_large
    return (
        str(size),
        "—" if speed is None else _speed(speed, spread or 0.0),
        "—" if peak is None else format_bytes(peak),
        ", ".join(remarks),
    )


def _rows(size: int) -> str:
    return f"{size} row{'' if size == 1 else 's'}"


def _speed(speed: float, spread: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(speed))) if speed > 0 else 0
    return f"{speed:,.{digits}f}" + (f" ± {spread:,.{digits}f}" if spread else "")


def _place_of(size: int) -> float:
    return math.log2(size)  # sizes are halves of each other


def _size_axis(sizes: Sequence[int], chosen: int | None) -> Axis:
    low, high = _place_of(sizes[0]), _place_of(sizes[-1])
    margin = max((high - low) * 0.05, 0.25)
    low, high = low - margin, high + margin
    apart = (high - low) * 0.055  # so that no two labels touch
    wanted = sizes if chosen is None else [chosen, *sizes]
    ticks: list[tuple[float, str]] = []
    for size in sorted(dict.fromkeys(wanted), key=lambda size: (size != chosen, -_evenness(size))):
        place = _place_of(size)
        if all(abs(place - other) >= apart for other, _ in ticks):
            ticks.append((place, str(size)))
    return Axis(label="microbatch size (rows)", low=low, high=high, ticks=sorted(ticks))


def _evenness(size: int) -> int:
    """How often a number can be halved: where labels are many, the rounder ones stay."""
    return (size & -size).bit_length()


def _number_axis(label: str, high: float, *, low: float = 0.0) -> Axis:
    high = high if high > low else low + 1.0
    step = _nice((high - low) / 6)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = [(number * step, f"{number * step:,.10g}") for number in range(first, last + 1)]
    return Axis(label=label, low=low, high=high, ticks=ticks)


def _bytes_axis(label: str, most_bytes: int) -> tuple[Axis, int]:
    """The axis, and how many bytes its unit has."""
    names = {0: "bytes", 10: "KiB", 20: "MiB", 30: "GiB", 40: "TiB"}
    power = max(each for each in names if most_bytes >= 2 << each or each == 0)
    unit = 1 << power
    return _number_axis(f"{label} ({names[power]})", most_bytes / unit * 1.1), unit


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= step * (1 - 1e-9))


def _limit(limit_bytes: int | None, unit: int) -> tuple[float, str] | None:
    return (
        None if limit_bytes is None else (limit_bytes / unit, f"limit {format_bytes(limit_bytes)}")
    )


def _highest(samples: Sequence[Sample]) -> tuple[int, list[int]]:
    totals = [sum(held.values()) for _, held in samples]
    return max(range(len(totals)), key=totals.__getitem__), totals


def _named(most: Mapping[str, int], count: int) -> dict[str, str]:
    """Owners with their colours, from the bottom to the top."""
    standing = {owner: colour for owner, colour in _STANDING.items() if most.get(owner)}
    rest = sorted((each for each in most if most[each] and each not in _STANDING), key=most.get)  # type: ignore[arg-type]
    rest.reverse()
    rest = rest[: max(count - len(standing), 1)]
    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(rest))]
    return standing | dict(zip(rest, colours, strict=True))


def _columns(samples: Sequence[Sample], totals: Sequence[int]) -> list[Sample]:
    """As many samples as can be seen: of those that fall together the fullest, so no peak goes."""
    if len(samples) <= _MOST_COLUMNS:
        return list(samples)
    first, last = samples[0][0], samples[-1][0]
    width = (last - first) / _MOST_COLUMNS or 1.0
    kept: dict[int, int] = {}
    for index, (moment, _) in enumerate(samples):
        column = min(int((moment - first) / width), _MOST_COLUMNS - 1)
        if column not in kept or totals[index] > totals[kept[column]]:
            kept[column] = index
    return [(first + column * width, samples[index][1]) for column, index in kept.items()]


def _areas(
    columns: Sequence[Sample], named: Mapping[str, str], xs: Sequence[float], scale: int
) -> list[Area]:
    lows = [0.0] * len(columns)
    areas = []
    held = [dict(each) for _, each in columns]
    for owner, colour in named.items():
        highs = [low + each.pop(owner, 0) / scale for low, each in zip(lows, held, strict=True)]
        areas.append(Area(name=owner, colour=colour, xs=xs, lows=lows, highs=highs))
        lows = highs
    highs = [low + sum(each.values()) / scale for low, each in zip(lows, held, strict=True)]
    if highs != lows:
        areas.append(Area(name="all others", colour=_OTHERS, xs=xs, lows=lows, highs=highs))
    return areas


def _corners(area: Area) -> list[tuple[float, float]]:
    """The outline of an area: each value holds until the next moment."""
    upper, lower = [], []
    for index, (low, high) in enumerate(zip(area.lows, area.highs, strict=True)):
        begin, end = area.xs[index], area.xs[index + 1]
        upper += [(begin, high), (end, high)]
        lower += [(begin, low), (end, low)]
    return [*upper, *reversed(lower)]


def _shortened(name: str) -> str:
    return name if len(name) <= _MOST_LETTERS else "…" + name[1 - _MOST_LETTERS :]


# The hand that draws SVG

_SEAM = 'stroke="#ffffff" stroke-width="3" paint-order="stroke"'  # round letters on colours


def _svg(picture: Picture) -> str:
    width = _width(picture)
    height = _height(picture)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(picture.summary)}"'
        f' width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui,sans-serif" font-size="12" fill="{_INK}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 24, picture.title, extra='font-size="15" font-weight="600"'),
    ]
    for panel, top in _placed(picture):
        parts += _svg_panel(panel, top)
    return "".join([*parts, "</svg>"])


def _width(picture: Picture) -> int:
    return _WIDTH + (_LEGEND if any(panel.areas for panel in picture.panels) else 0)


def _height(picture: Picture) -> int:
    last, top = _placed(picture)[-1]
    return top + last.height + _BELOW + 8


def _placed(picture: Picture) -> list[tuple[Panel, int]]:
    """Each panel, and how far down it begins."""
    placed, top = [], _TOP
    for panel in picture.panels:
        placed.append((panel, top))
        top += panel.height + _BELOW + _GAP
    return placed


def _svg_panel(panel: Panel, top: float) -> list[str]:
    across = _WIDTH - _LEFT - _RIGHT
    bottom = top + panel.height

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + panel.x.share(x) * across, bottom - panel.y.share(y) * panel.height

    parts = []
    for place, label in panel.y.ticks:
        y = at(panel.x.low, place)[1]
        parts.append(_segment((_LEFT, y), (_LEFT + across, y), _FAINT))
        parts.append(_text(_LEFT - 8, y + 4, label, anchor="end"))
    for area in panel.areas:
        corners = " ".join("{:.1f},{:.1f}".format(*at(*each)) for each in _corners(area))
        parts.append(
            f'<polygon points="{corners}" fill="{area.colour}" stroke="#ffffff" '
            f'stroke-width="0.4"><title>{escape(area.name)}</title></polygon>'
        )
    if panel.choice is not None:
        x = at(panel.choice[0], 0)[0]
        parts.append(_segment((x, top), (x, bottom), _CHOICE, extra='stroke-dasharray="2 3"'))
        parts.append(_label(x, top - 5, panel.choice[1], _CHOICE, across))
    for line in panel.lines:
        parts += _svg_line(line, panel, at)
    for x, y in itertools.starmap(at, panel.crosses):
        arms = f"M{x - 6:.1f} {y - 6:.1f}l12 12m0 -12l-12 12"
        parts.append(f'<path d="{arms}" stroke="{_LIMIT}" stroke-width="2" fill="none"/>')
    if panel.limit is not None:
        y = at(0, panel.limit[0])[1]
        dashes = 'stroke-width="1.5" stroke-dasharray="7 4"'
        parts.append(_segment((_LEFT, y), (_LEFT + across, y), _LIMIT, extra=dashes))
        parts.append(_text(_LEFT + 6, y - 5, panel.limit[1], extra=f'fill="{_LIMIT}" {_SEAM}'))
    if panel.peak is not None:
        x, y = at(*panel.peak[:2])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_INK}"/>')
        parts.append(_label(x, y - 7, panel.peak[2], _INK, across))
    parts.append(_segment((_LEFT, bottom), (_LEFT + across, bottom), _INK))
    for place, label in panel.x.ticks:
        x = at(place, 0)[0]
        parts.append(_segment((x, bottom), (x, bottom + 4), _INK))
        parts.append(_text(x, bottom + 18, label, anchor="middle"))
    parts.append(_text(_LEFT + across / 2, bottom + 38, panel.x.label, anchor="middle"))
    middle = top + panel.height / 2
    turned = f'transform="rotate(-90 30 {middle:g})"'
    parts.append(_text(30, middle, panel.y.label, anchor="middle", extra=turned))
    return parts + _svg_legend(panel.areas, top)


def _svg_line(line: Line, panel: Panel, at: Any) -> list[str]:
    path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y, _ in line.points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="1.5"/>']
    for (x, y, spread), tip in zip(line.points, line.tips, strict=True):
        if spread:
            left, high = at(x, y + spread)
            low = at(x, max(y - spread, panel.y.low))[1]
            bar = f"M{left - 4:.1f} {high:.1f}h8m-4 0V{low:.1f}m-4 0h8"
            parts.append(f'<path d="{bar}" stroke="{line.colour}" stroke-width="1.2" fill="none"/>')
        is_chosen = panel.choice is not None and panel.choice[0] == x
        size, fill = (6, line.colour) if is_chosen else (4, "#ffffff")
        across, down = at(x, y)
        parts.append(
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="{size}" fill="{fill}" '
            f'stroke="{line.colour}" stroke-width="1.5"><title>{escape(tip)}</title></circle>'
        )
    return parts


def _svg_legend(areas: Sequence[Area], top: float) -> list[str]:
    parts = []
    for number, area in enumerate(reversed(areas)):
        y = top + number * 18
        parts.append(f'<rect x="{_WIDTH}" y="{y}" width="12" height="12" fill="{area.colour}"/>')
        name = f"<title>{escape(area.name)}</title>"
        parts.append(_text(_WIDTH + 18, y + 10, _shortened(area.name), inside=name))
    return parts


def _segment(
    start: tuple[float, float], end: tuple[float, float], ink: str, extra: str = ""
) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{ink}" {extra}/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", extra: str = "", inside: str = ""
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {place} {extra}>{escape(text)}{inside}</text>"


def _label(x: float, y: float, text: str, ink: str, across: float) -> str:
    """Text centred at a place, as far as it stays within the panel; with a white seam."""
    half = len(text) * _LETTER / 2
    x = min(max(x, _LEFT + half), _LEFT + across - half)
    return _text(x, y, text, anchor="middle", extra=f'fill="{ink}" font-weight="600" {_SEAM}')


# The hand that draws with matplotlib


def _figure(picture: Picture) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a figure, and a PNG, need matplotlib, which is not installed: "
            'pip install "automicro[pictures]", or take .html(), which needs nothing'
        ) from error

    width, height = _width(picture), _height(picture)
    figure = Figure(figsize=(width / 96, height / 96), dpi=96)
    figure.text(_LEFT / width, 1 - 24 / height, picture.title, size=11.5, weight="bold", color=_INK)
    across = (_WIDTH - _LEFT - _RIGHT) / width
    for panel, top in _placed(picture):
        bottom = 1 - (top + panel.height) / height
        axes = figure.add_axes((_LEFT / width, bottom, across, panel.height / height))
        _draw_panel(panel, axes)
    return figure


def _draw_panel(panel: Panel, axes: "Axes") -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlim(panel.x.low, panel.x.high)
    axes.set_ylim(panel.y.low, panel.y.high)
    axes.set_xticks([place for place, _ in panel.x.ticks], [label for _, label in panel.x.ticks])
    axes.set_yticks([place for place, _ in panel.y.ticks], [label for _, label in panel.y.ticks])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelsize=9, colors=_INK)
    axes.set_xlabel(panel.x.label, size=9, color=_INK)
    axes.set_ylabel(panel.y.label, size=9, color=_INK)
    axes.grid(axis="y", color=_FAINT)
    axes.set_axisbelow(True)
    for area in panel.areas:
        corners = _corners(area)
        axes.fill(
            [x for x, _ in corners], [y for _, y in corners], color=area.colour,
            edgecolor="white", linewidth=0.3, label=area.name,
        )  # fmt: skip
    if panel.areas:
        handles, names = axes.get_legend_handles_labels()
        axes.legend(
            handles[::-1], [_shortened(name) for name in names[::-1]], loc="upper left",
            bbox_to_anchor=(1.02, 1.02), frameon=False, fontsize=9, handlelength=1, handleheight=1,
            borderaxespad=0, labelspacing=0.45,
        )  # fmt: skip
    if panel.choice is not None:
        place, label = panel.choice
        axes.axvline(place, color=_CHOICE, linewidth=1, linestyle=(0, (2, 3)), zorder=1.5)
        _write(axes, (place, panel.y.high), label, _CHOICE, lift=4)
    for line in panel.lines:
        _draw_line(line, panel, axes)
    if panel.crosses:
        xs, ys = zip(*panel.crosses, strict=True)
        axes.scatter(xs, ys, marker="x", s=70, color=_LIMIT, linewidths=2, zorder=4)
    if panel.limit is not None:
        height, label = panel.limit
        axes.axhline(height, color=_LIMIT, linewidth=1.3, linestyle=(0, (5, 3)))
        axes.annotate(
            label, (0, height), xycoords=("axes fraction", "data"), xytext=(4, 4),
            textcoords="offset points", size=9, color=_LIMIT,
        )  # fmt: skip
    if panel.peak is not None:
        x, y, label = panel.peak
        axes.plot([x], [y], marker="o", markersize=4, color=_INK, clip_on=False)
        _write(axes, (x, y), label, _INK, lift=5)


def _draw_line(line: Line, panel: Panel, axes: "Axes") -> None:
    xs, ys, spreads = zip(*line.points, strict=True)
    below = [min(spread, y - panel.y.low) for y, spread in zip(ys, spreads, strict=True)]
    bars = [below, spreads] if any(spreads) else None
    axes.errorbar(xs, ys, yerr=bars, color=line.colour, linewidth=1.3, capsize=3, elinewidth=1)
    for x, y, _ in line.points:
        is_chosen = panel.choice is not None and panel.choice[0] == x
        axes.plot(
            [x], [y], marker="o", markersize=8 if is_chosen else 5.5, markeredgecolor=line.colour,
            markerfacecolor=line.colour if is_chosen else "white", zorder=3,
        )  # fmt: skip


def _write(axes: "Axes", place: tuple[float, float], text: str, ink: str, *, lift: float) -> None:
    low, high = axes.get_xlim()
    share = (place[0] - low) / (high - low)
    side = "left" if share < 0.12 else "right" if share > 0.88 else "center"
    axes.annotate(
        text, place, xytext=(0, lift), textcoords="offset points", ha=side, size=9,
        weight="bold", color=ink, annotation_clip=False,
    )  # fmt: skip
