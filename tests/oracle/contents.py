"""Contents of batches before they get a form: tensors whose first dimension is rows."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

FEATURES = 6
CLASSES = 4
LENGTH = 5
VOCABULARY = 11
IGNORED = -100
IGNORED_CLASS = CLASSES - 1  # for a loss with its own ignore_index
CLASS_WEIGHT = (0.25, 2.5, 1.0, 0.625)  # exact in float32
LATE = 2  # index of the batch with contents that earlier batches lack


@dataclasses.dataclass(frozen=True)
class Content:
    """One batch: x inputs, y classes, t numbers, w row weights, m a mask, v another view of x.

    For ``"vectors"`` x is ``(rows, FEATURES)`` and y ``(rows,)``; for ``"tokens"`` x and y are
    ``(rows, LENGTH)``, with -100 in y after the end of a row.
    """

    shape: str
    rows: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.rows["w"])

    def take(self, start: int, stop: int) -> "Content":
        rows = {name: value[start:stop].clone() for name, value in self.rows.items()}
        return Content(self.shape, rows)

    def cut(self, sizes: list[int]) -> Iterator["Content"]:
        start = 0
        for size in sizes:
            yield self.take(start, start + size)
            start += size
        assert start == len(self)


def make_contents(
    seed: int, shape: str, num_rows: list[int], late: str, dtype: torch.dtype
) -> list[Content]:
    """Make batches of these sizes; `late` first appears in the third: padding, a class, nothing."""
    draws = torch.Generator().manual_seed(seed)
    contents = []
    for index, count in enumerate(num_rows):
        has_come = index >= LATE
        make = _vectors if shape == "vectors" else _tokens
        rows = make(draws, count, pads=late != "padding" or has_come)
        if late == "class" and not has_come:
            rows["y"] = rows["y"].where((rows["y"] < 0), torch.full_like(rows["y"], 2))
        rows["w"] = torch.rand(count, generator=draws, dtype=torch.float64) * 3 + 0.1
        floats = {name: v.to(dtype) if v.is_floating_point() else v for name, v in rows.items()}
        contents.append(Content(shape, floats))
    return contents


def _numbers(draws: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, generator=draws, dtype=torch.float64)


def _vectors(draws: torch.Generator, count: int, *, pads: bool) -> dict[str, Tensor]:
    x = _numbers(draws, count, FEATURES)
    lengths = torch.randint(1, CLASSES + 1, (count, 1), generator=draws)
    mask = torch.arange(CLASSES)[None] < lengths
    return {
        "x": x,
        "y": torch.randint(CLASSES, (count,), generator=draws),
        "t": _numbers(draws, count, CLASSES),
        "m": (mask if pads else torch.ones_like(mask)).double(),
        "v": x + 0.3 * _numbers(draws, count, FEATURES),
    }


def _tokens(draws: torch.Generator, count: int, *, pads: bool) -> dict[str, Tensor]:
    x = torch.randint(1, VOCABULARY, (count, LENGTH), generator=draws)
    v = torch.randint(1, VOCABULARY, (count, LENGTH), generator=draws)
    y = torch.randint(CLASSES, (count, LENGTH), generator=draws)
    lengths = torch.randint(1, LENGTH + 1, (count, 1), generator=draws)
    mask = torch.arange(LENGTH)[None] < lengths
    if not pads:
        mask = torch.ones_like(mask)
    return {
        "x": x.where(mask, 0),
        "y": y.where(mask, IGNORED),
        "t": _numbers(draws, count, LENGTH, CLASSES),
        "m": mask.double(),
        "v": v.where(mask, 0),
    }
