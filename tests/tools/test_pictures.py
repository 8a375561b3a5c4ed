"""Pictures: axis labels, drawn points, and file formats."""

from pathlib import Path

import numpy as np
import pytest

from automicro.tools.pictures import Point, save, speed_and_memory

GIB = 1 << 30
POINTS: list[Point] = [
    (64, None, 38 * GIB),
    (1, 40.0, 2 * GIB),
    (24, 251.0, 15 * GIB),
    (16, 240.0, 10 * GIB),
]


def test_plot_shows_all_points_and_chosen_size() -> None:
    figure = speed_and_memory(POINTS, chosen=24)
    speed, memory = figure.axes
    assert (speed.get_ylabel(), memory.get_ylabel()) == ("rows per second", "peak memory (GiB)")
    assert memory.get_xlabel() == "microbatch size (rows)"
    assert [each.get_text() for each in memory.get_xticklabels()] == ["1", "16", "24", "64"]
    assert np.asarray(speed.lines[0].get_xydata()).tolist() == [[1, 40], [16, 240], [24, 251]]
    assert np.asarray(memory.lines[0].get_xydata()).tolist() == [
        [1, 2],
        [16, 10],
        [24, 15],
        [64, 38],
    ]
    legend = speed.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["chosen: 24 rows"]
    assert np.unique(memory.lines[-1].get_xdata()) == [24]


def test_picture_format_follows_file_suffix(tmp_path: Path) -> None:
    figure = speed_and_memory(POINTS)
    png = save(figure, str(tmp_path / "a.PNG")).read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert "<svg" in save(figure, tmp_path / "a.svg").read_text()
    with pytest.raises(ValueError, match=r"'.*a\.html': name a file that ends in \.png or \.svg"):
        save(figure, tmp_path / "a.html")
