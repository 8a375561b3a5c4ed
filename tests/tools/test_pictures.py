"""Pictures: what stands on their axes, what is drawn, and where they are shown."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from automicro import Trainer
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.loggers import JSONLinesLogger, LoggerGroup, TensorBoardLogger
from automicro.tools.pictures import Point, Sample, save, speed_and_memory, timeline
from tests.models import Mlp, x, y

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 1 << 30
POINTS: list[Point] = [
    (64, None, None, 38 * GIB),
    (1, 40.0, 1.0, 2 * GIB),
    (24, 251.0, 6.0, 15 * GIB),
    (16, 240.0, None, 10 * GIB),
]


def step_of(count: int = 50) -> list[Sample]:
    """One step: parameters stay, activations of three modules rise and fall."""
    samples: list[Sample] = []
    for moment in range(count):
        share = min(moment, count - 1 - moment)
        held = {"head": share * 3000, "body": share * 5000, "stem": share * 1000}
        samples.append((float(moment), {"parameters": 40_000, **held}))
    return samples


def points_of(line: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def named_bands(figure: "Figure") -> dict[str, np.ndarray]:
    """The outline of what each owner holds, from the bottom to the top."""
    (axes,) = figure.axes
    return {
        str(band.get_label()): np.asarray(band.get_paths()[0].vertices) for band in axes.collections
    }


def test_speed_and_memory_have_every_point_the_limit_and_the_choice() -> None:
    figure = speed_and_memory(POINTS, limit_bytes=24 * GIB, chosen=24)
    speed, memory = figure.axes
    assert (speed.get_ylabel(), memory.get_ylabel()) == ("rows per second", "peak memory (GiB)")
    assert memory.get_xlabel() == "microbatch size (rows)"
    assert [each.get_text() for each in memory.get_xticklabels()] == ["1", "16", "24", "64"]
    assert points_of(speed.lines[0]) == [(1, 40), (16, 240), (24, 251)]
    (bars,) = (each for each in speed.collections if hasattr(each, "get_segments"))
    assert [tuple(bar[:, 1]) for bar in bars.get_segments()] == [(39, 41), (240, 240), (245, 257)]
    assert points_of(memory.lines[0]) == [(1, 2), (16, 10), (24, 15), (64, 38)]
    assert points_of(memory.lines[2]) == [(64, 38)]
    assert memory.lines[2].get_marker() == "x"
    assert [text.get_text() for text in memory.texts] == ["limit 24.00 GiB"]
    assert np.unique(memory.lines[1].get_ydata()) == [24]
    legend = speed.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["chosen: 24 rows"]
    assert np.unique(memory.lines[-1].get_xdata()) == [24]


@pytest.mark.parametrize(
    ("points", "label"),
    [
        ([(1, None, None, 100), (3, None, None, 300)], "peak memory (bytes)"),
        ([(7, 3.5, 0.0, None)], "rows per second"),
    ],
)
def test_what_was_not_measured_has_no_axes(points: list[Point], label: str) -> None:
    assert [each.get_ylabel() for each in speed_and_memory(points).axes] == [label]


def test_of_many_sizes_some_are_written_and_the_chosen_one_is() -> None:
    points: list[Point] = [(size, float(size), 0.0, None) for size in range(1, 200)]
    (axes,) = speed_and_memory(points, chosen=197).axes
    written = [each.get_text() for each in axes.get_xticklabels()]
    assert "197" in written
    assert len(written) <= 13


@pytest.mark.parametrize("points", [[], [(4, None, None, None)], [(0, 1.0, 0.0, 1)]])
def test_points_that_cannot_be_drawn_are_refused(points: list[Point]) -> None:
    with pytest.raises(ValueError, match=f"{len(points)} points cannot be drawn: give sizes"):
        speed_and_memory(points)


def test_a_timeline_stacks_its_owners_up_to_the_total() -> None:
    figure = timeline(step_of(), limit_bytes=500_000)
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("operations", "memory (KiB)")
    bands = named_bands(figure)
    assert list(bands) == ["parameters", "body", "head", "stem"]
    totals = [sum(held.values()) / 1024 for _, held in step_of()]
    assert bands["stem"][:, 1].max() == pytest.approx(max(totals))
    assert bands["parameters"][:, 1].max() == pytest.approx(40_000 / 1024)
    assert points_of(axes.lines[0]) == [(24, max(totals))]
    assert [text.get_text() for text in axes.texts] == ["limit 488.28 KiB"]
    (legend,) = figure.legends
    assert "peak 250.00 KiB" in [text.get_text() for text in legend.get_texts()]


def test_owners_beyond_those_that_are_named_are_drawn_together() -> None:
    held = {f"layers.{number}": number * 1000 for number in range(1, 31)}
    bands = named_bands(timeline([(0, held), (1, held)], most_owners=5))
    assert list(bands) == [*(f"layers.{number}" for number in range(30, 25, -1)), "all others"]
    assert bands["all others"][:, 1].max() == pytest.approx(sum(held.values()) / 1024)


def test_one_moment_is_drawn() -> None:
    assert list(named_bands(timeline([(3.0, {"parameters": 0})]))) == ["parameters"]


@pytest.mark.parametrize("samples", [[], [(2, {"a": 1}), (1, {"a": 1})]])
def test_moments_that_go_back_and_no_moments_are_refused(samples: list[Sample]) -> None:
    with pytest.raises(ValueError, match="samples cannot be drawn: give at least one"):
        timeline(samples)


def test_a_picture_is_saved_by_its_suffix(tmp_path: Path) -> None:
    figure = speed_and_memory(POINTS)
    png = save(figure, str(tmp_path / "a.PNG")).read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert "<svg" in save(figure, tmp_path / "a.svg").read_text()
    with pytest.raises(ValueError, match=r"'.*a\.html': name a file that ends in \.png or \.svg"):
        save(figure, tmp_path / "a.html")


def test_without_matplotlib_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'automicro[pictures]'")):
        timeline(step_of())


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
    group.show("sizes", speed_and_memory(POINTS), step=7)
    group.close()
    ((name, step, png),) = images(tmp_path)
    assert (name, step, png[:8]) == ("sizes", 7, b"\x89PNG\r\n\x1a\n")


def test_a_picture_that_cannot_be_drawn_does_not_end_a_run(tmp_path: Path) -> None:
    class Broken:
        def savefig(self, *_: object, **__: object) -> None:
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

    def batch_end(self, run: Run, result: Any) -> None:
        if run.state.batch == 2:
            run.show("a/picture", timeline(step_of()))


def test_a_callback_shows_a_picture_at_the_batch_that_is_running(tmp_path: Path) -> None:
    Trainer(
        Mlp(),
        [(x(), y())] * 3,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW,
        loggers=[TensorBoardLogger(tmp_path)],
        callbacks=[ShowsOnce()],
        progress=False,
        remember_sizes=False,
        device="cpu",
    ).fit()
    assert [(name, step) for name, step, _ in images(tmp_path)] == [("a/picture", 2)]
