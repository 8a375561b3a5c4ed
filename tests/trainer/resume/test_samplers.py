"""What samplers and loaders keep in plain attributes comes back when a run is taken up again."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset

from tests.trainer.resume.runs import Wrapped, check_resumes
from tests.trainer.runs import CLASSES, FEATURES

ROWS, BATCH_SIZE = 32, 16  # two batches an epoch, so checkpoints lie in three epochs


def rows() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(ROWS, FEATURES, generator=draw)
    return TensorDataset(inputs, torch.randint(CLASSES, (ROWS,), generator=draw))


class Counting(Sampler[int]):
    """Counts its passes by itself, and shuffles by their number."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(ROWS), ROWS))

    def __len__(self) -> int:
        return ROWS


class Shuffling(Counting):
    """Shuffles the order of the pass before once more."""

    def __init__(self, order: Any) -> None:
        super().__init__()
        self.order = order

    def __iter__(self) -> Iterator[int]:
        random.Random(5).shuffle(self.order)
        return iter([int(each) for each in self.order])


class Made(Counting):
    """Makes its order in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] | None = None

    def __iter__(self) -> Iterator[int]:
        self.order = [*range(ROWS)] if self.order is None else [*self.order[5:], *self.order[:5]]
        return iter(self.order)


class Batches(Sampler[list[int]]):
    """Shuffles its batches in place."""

    def __init__(self) -> None:
        self.batches = [[*range(first, first + 4)] for first in range(0, ROWS, 4)]

    def __iter__(self) -> Iterator[list[int]]:
        random.Random(5).shuffle(self.batches)
        for first in range(0, len(self.batches), 4):
            yield [*itertools.chain(*self.batches[first : first + 4])]

    def __len__(self) -> int:
        return ROWS // BATCH_SIZE


class Reading(Dataset[Any]):
    """Counts how often it was read, and goes by it."""

    def __init__(self) -> None:
        self.rows, self.reads = rows(), 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        inputs, target = self.rows[index]
        return inputs / self.reads, target


class Loader:
    """Gives batches by itself, and counts its passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        order = torch.tensor(random.Random(self.passes).sample(range(ROWS), ROWS))
        for some in order.split(BATCH_SIZE):
            yield rows()[some]

    def __len__(self) -> int:
        return ROWS // BATCH_SIZE


def by(sampler: Sampler[int]) -> DataLoader[Any]:
    return DataLoader(rows(), BATCH_SIZE, sampler=sampler)


LOADERS: dict[str, Callable[[], Any]] = {
    "a counter": lambda: by(Counting()),
    "a list": lambda: by(Shuffling([*range(ROWS)])),
    "an array": lambda: by(Shuffling(np.arange(ROWS))),
    "made in a pass": lambda: by(Made()),
    "batches": lambda: DataLoader(rows(), batch_sampler=Batches()),
    "in a batch sampler": lambda: DataLoader(
        rows(), batch_sampler=BatchSampler(Counting(), BATCH_SIZE, drop_last=False)
    ),
    "a dataset": lambda: DataLoader(Reading(), BATCH_SIZE),
    "workers": lambda: DataLoader(rows(), BATCH_SIZE, sampler=Counting(), num_workers=1),
    "a loader of one's own": Loader,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", LOADERS)
def test_what_passes_go_by_comes_back(kind: str, tmp_path: Any) -> None:
    check_resumes(Wrapped, tmp_path, options=lambda: {"train_dataloader": LOADERS[kind]()})
