"""Pictures: what they hold, that they stand alone, and that both hands draw the same."""

import itertools
import random
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from automicro import Trainer
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.loggers import JSONLinesLogger, LoggerGroup, TensorBoardLogger
from automicro.tools.pictures import Picture, Point, Sample, speed_and_memory, timeline
from tests.models import Mlp, x, y

GIB = 1 << 30
POINTS: list[Point] = [
    (64, None, None, 38 * GIB),
    (1, 40.0, 1.0, 2 * GIB),
    (24, 251.0, 6.0, 15 * GIB),
    (16, 240.0, None, 10 * GIB),
]
SVG = "{http://www.w3.org/2000/svg}"


def step_of(count: int = 50) -> list[Sample]:
    """One step: parameters stay, activations of three modules rise and fall."""
    samples: list[Sample] = []
    for moment in range(count):
        share = min(moment, count - 1 - moment)
        held = {"head": share * 3000, "body": share * 5000, "stem": share * 1000}
        samples.append((float(moment), {"parameters": 40_000, **held}))
    return samples


PICTURES = {
    "speed": speed_and_memory(POINTS, limit_bytes=24 * GIB, chosen=24),
    "memory": speed_and_memory([(1, None, None, 100), (3, None, None, 300)]),
    "one size": speed_and_memory([(7, 3.5, 0.0, None)]),
    "timeline": timeline(step_of(), limit_bytes=500_000),
    "one moment": timeline([(3.0, {"parameters": 0})]),
}


def parse(page: str) -> ET.Element:
    """A page as a tree, which also says that it is well-formed."""
    return ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def texts(tree: ET.Element) -> str:
    return "\n".join(tree.itertext())


@pytest.mark.parametrize("name", PICTURES)
def test_a_page_is_well_formed_and_loads_nothing(name: str) -> None:
    page = PICTURES[name].html()
    tree = parse(page)
    assert tree.find("head/title") is not None
    assert not {"script", "link", "img", "iframe", "object"} & {each.tag for each in tree.iter()}
    addresses = set(re.findall(r"\w+://[^\s\"']*", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"url\(|@import|\bsrc=|\bhref=", page)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_said_in_words_and_in_a_table(name: str) -> None:
    picture = PICTURES[name]
    tree = parse(picture.html())
    (drawing,) = tree.iter(f"{SVG}svg")
    assert drawing.get("role") == "img"
    assert drawing.get("aria-label") == picture.summary
    assert picture.title in picture.summary
    (table,) = tree.iter("table")
    assert table.findtext("caption")
    cells = [[cell.text or "" for cell in row] for row in table.iterfind("tbody/tr")]
    assert cells == [list(row) for row in picture.rows]
    assert all(row[0].get("scope") == "row" for row in table.iterfind("tbody/tr"))


def test_speed_and_memory_hold_every_value() -> None:
    picture = PICTURES["speed"]
    assert picture.rows == [
        ("1", "40.0 ± 1.0", "2.00 GiB", ""),
        ("16", "240", "10.00 GiB", ""),
        ("24", "251 ± 6", "15.00 GiB", "chosen"),
        ("64", "—", "38.00 GiB", "does not fit"),
    ]
    speed, memory = picture.panels
    assert [(y, spread) for _, y, spread in speed.lines[0].points] == [(40, 1), (240, 0), (251, 6)]
    assert [y for _, y, _ in memory.lines[0].points] == [2, 10, 15, 38]
    assert memory.limit == (24, "limit 24.00 GiB")
    assert [y for _, y in memory.crosses] == [38]
    assert "chosen: 24 rows" in texts(parse(picture.html()))
    assert speed.y.label == "rows per second"
    assert memory.y.label == "peak memory (GiB)"


def heights(drawing: ET.Element) -> list[float]:
    return [float(each.get("cy", "")) for each in drawing.iter(f"{SVG}circle")]


def test_what_is_higher_is_drawn_higher_and_what_does_not_fit_above_the_limit() -> None:
    drawing = ET.fromstring(PICTURES["speed"].svg())
    one, sixteen, chosen, *memory = heights(drawing)
    assert chosen < sixteen < one  # y grows downwards
    assert memory == sorted(memory, reverse=True)
    (limit,) = (
        float(each.get("y1", ""))
        for each in drawing.iter(f"{SVG}line")
        if each.get("stroke-dasharray") == "7 4"
    )
    assert memory[3] < limit < memory[2]


def test_a_spread_is_a_bar_and_none_is_none() -> None:
    bars = [
        each
        for each in ET.fromstring(PICTURES["speed"].svg()).iter(f"{SVG}path")
        if "h8m-4" in each.get("d", "")
    ]
    assert len(bars) == 2  # of three speeds one has none


def test_labels_of_many_sizes_do_not_touch_and_the_chosen_one_stays() -> None:
    points: list[Point] = [(size, float(size), 0.0, size * 100) for size in range(1, 200)]
    axis = speed_and_memory(points, chosen=197).panels[0].x
    places = [axis.share(place) for place, _ in axis.ticks]
    assert "197" in [label for _, label in axis.ticks]
    assert min(after - before for before, after in itertools.pairwise(places)) > 0.05


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "none of 0 points"),
        ([(4, None, None, None)], "none of 1 points"),
        ([(4, 1.0, 0.0, 1), (4, 2.0, 0.0, 1)], "two points are of 4 rows"),
        ([(0, 1.0, 0.0, 1)], "has the size 0"),
    ],
)
def test_points_that_cannot_be_drawn_are_refused(points: list[Point], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speed_and_memory(points)


def test_a_timeline_stacks_its_owners_up_to_the_total() -> None:
    picture = PICTURES["timeline"]
    (panel,) = picture.panels
    assert [area.name for area in panel.areas] == ["parameters", "body", "head", "stem"]
    for below, above in itertools.pairwise(panel.areas):
        assert below.highs == above.lows
    totals = [sum(held.values()) / 1024 for _, held in step_of()]
    assert panel.areas[-1].highs == pytest.approx(totals)
    assert panel.y.label == "memory (KiB)"
    assert picture.rows[-1] == ("all", "250.00 KiB", "250.00 KiB")
    assert panel.peak is not None
    assert panel.peak[:2] == (24, max(totals))
    assert panel.limit is not None


def test_owners_beyond_those_that_are_named_are_drawn_together_and_stand_in_the_table() -> None:
    held = {f"layers.{number}": number * 1000 for number in range(1, 31)}
    picture = timeline([(0, held), (1, held)], most_owners=5)
    (panel,) = picture.panels
    assert [area.name for area in panel.areas] == [
        *(f"layers.{number}" for number in range(30, 25, -1)),
        "all others",
    ]
    assert panel.areas[-1].highs[0] == pytest.approx(sum(held.values()) / 1024)
    assert {row[0] for row in picture.rows} == {*held, "all"}


@given(st.integers(500, 1500), st.integers(0, 1 << 32))
def test_no_peak_is_lost_where_samples_are_too_many_to_be_seen(count: int, seed: int) -> None:
    draw = random.Random(seed)  # hypothesis takes seconds for as many numbers
    moments = itertools.accumulate(draw.randint(0, 50) for _ in range(count))
    samples = [(float(each), {"a": draw.getrandbits(40), "b": 1}) for each in moments]
    (panel,) = timeline(samples).panels
    area = panel.areas[-1]
    assert panel.peak is not None
    assert max(area.highs) == pytest.approx(panel.peak[1])
    assert len(area.highs) <= 400
    assert list(area.xs) == sorted(area.xs)


def test_moments_that_go_back_and_no_moments_are_refused() -> None:
    with pytest.raises(ValueError, match="go back from 2 to 1"):
        timeline([(2, {"a": 1}), (1, {"a": 1})])
    with pytest.raises(ValueError, match="at least one sample"):
        timeline([])


def test_names_are_text_and_never_markup() -> None:
    name = "<script>alert('1')</script>&\x00\ud800"
    picture = timeline([(0, {name: 4096})], title=name)
    page = picture.html()
    tree = parse(page)  # would not be well-formed
    assert "<script" not in page
    assert [row[0].text for row in tree.iterfind(".//tbody/tr")] == [
        "<script>alert('1')</script>&��",
        "all",
    ]
    page.encode("utf-8")


def test_a_notebook_is_given_the_drawing_and_no_whole_page() -> None:
    shown = PICTURES["timeline"]._repr_html_()
    assert shown.startswith("<figure")
    assert ET.fromstring(shown).find(f"{SVG}svg") is not None
    assert shown in PICTURES["timeline"].html()


@pytest.mark.parametrize("name", PICTURES)
def test_matplotlib_draws_the_same_axes_values_and_words(name: str) -> None:
    picture = PICTURES[name]
    figure = picture.figure()
    assert len(figure.axes) == len(picture.panels)
    for axes, panel in zip(figure.axes, picture.panels, strict=True):
        assert axes.get_xlabel() == panel.x.label
        assert axes.get_ylabel() == panel.y.label
        assert axes.get_xlim() == (panel.x.low, panel.x.high)
        assert [each.get_text() for each in axes.get_yticklabels()] == [
            label for _, label in panel.y.ticks
        ]
        drawn = [np.asarray(line.get_ydata()).tolist() for line in axes.lines]
        for line in panel.lines:
            assert [y for _, y, _ in line.points] in drawn
        assert len(axes.patches) == len(panel.areas)
        written = {each.get_text() for each in axes.texts}
        assert {each[-1] for each in (panel.limit, panel.choice, panel.peak) if each} <= written


@pytest.mark.parametrize("name", ["speed", "timeline"])
def test_a_picture_is_saved_by_its_ending(name: str, tmp_path: Path) -> None:
    picture = PICTURES[name]
    assert picture.save(tmp_path / "a.html").read_text(encoding="utf-8") == picture.html()
    assert picture.save(tmp_path / "a.svg").read_text(encoding="utf-8") == picture.svg()
    png = picture.save(str(tmp_path / "a.PNG")).read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    size = ET.fromstring(picture.svg())
    assert int.from_bytes(png[16:20], "big") == 2 * int(size.get("width", ""))
    assert int.from_bytes(png[20:24], "big") == 2 * int(size.get("height", ""))
    with pytest.raises(ValueError, match=r"a\.jpeg.*\.html"):
        picture.save(tmp_path / "a.jpeg")


def test_a_page_needs_no_matplotlib_and_a_figure_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = PICTURES["speed"]
    assert picture.save(tmp_path / "a.html").exists()
    with pytest.raises(ImportError, match=re.escape('pip install "automicro[pictures]"')):
        picture.png()


def images(folder: Path) -> list[tuple[str, int, bytes]]:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    found = EventAccumulator(str(folder)).Reload()
    return [
        (tag, event.step, event.encoded_image_string)
        for tag in found.Tags()["images"]
        for event in found.Images(tag)
    ]


def test_tensorboard_is_given_the_picture(tmp_path: Path) -> None:
    group = LoggerGroup([TensorBoardLogger(tmp_path), JSONLinesLogger(tmp_path / "a.jsonl")])
    group.start({})
    group.show("sizes", PICTURES["speed"], step=7)
    group.close()
    assert images(tmp_path) == [("sizes", 7, PICTURES["speed"].png())]


def test_a_picture_that_cannot_be_drawn_does_not_end_a_run(tmp_path: Path) -> None:
    class Broken:
        def png(self) -> bytes:
            raise OSError("no")

    group = LoggerGroup([TensorBoardLogger(tmp_path)])
    group.start({})
    with pytest.warns(UserWarning, match=r"could not show 'sizes' \(OSError: no\): the run goes"):
        group.show("sizes", Broken(), step=7)
    group.log({"loss": 0.5}, step=8)
    group.close()
    assert images(tmp_path) == []


class ShowsOnce(Callback):
    """Shows a picture at the second batch."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture

    def batch_end(self, run: Run, result: Any) -> None:
        if run.state.batch == 2:
            run.show("a/picture", self.picture)


def test_a_callback_shows_a_picture_at_the_batch_that_is_running(tmp_path: Path) -> None:
    Trainer(
        Mlp(),
        [(x(), y())] * 3,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW,
        loggers=[TensorBoardLogger(tmp_path)],
        callbacks=[ShowsOnce(PICTURES["timeline"])],
        progress=False,
        remember_sizes=False,
        device="cpu",
    ).fit()
    assert [(name, step) for name, step, _ in images(tmp_path)] == [("a/picture", 2)]
