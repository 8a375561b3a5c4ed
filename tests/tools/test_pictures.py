"""Pictures: what stands on their axes, what is drawn, and where they are shown."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from automicro import Trainer
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.features import RememberSizes
from automicro.loggers import TensorBoardLogger
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
        features=[RememberSizes(False)],
        device="cpu",
    ).fit()
    assert [(name, step) for name, step, _ in images(tmp_path)] == [("a/picture", 2)]
