"""Handwritten digits: 1797 images of 8×8 pixels from scikit-learn, and a small CNN."""

import gzip
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES = 10
EVAL_ROWS = 360
BRIGHTEST = 16  # pixels are integers from 0 to 16


def loader(
    split: str, *, batch_size: int, seed: int | None = 0, shuffle: bool | None = None
) -> "DataLoader[tuple[Tensor, ...]]":
    """Return batches of ``(images, targets)`` from one part of the digits.

    Images are float32 in [0, 1] of shape ``(rows, 1, 8, 8)``, targets int64 of shape ``(rows,)``.
    The parts are fixed: 1437 rows for ``"train"`` and 360 for ``"eval"``, with the same proportions
    of digits. The last batch of an epoch can be smaller; no row is dropped.

    Args:
        split: ``"train"`` or ``"eval"``.
        batch_size: rows of an optimization batch.
        seed: seed of the loader's own generator, which decides the order; None for torch's global
            one.
        shuffle: whether to shuffle each epoch; by default True for ``"train"`` only.

    Raises:
        ValueError: an unknown split.
        ImportError: scikit-learn is not installed.

    >>> images, targets = next(iter(loader("eval", batch_size=360)))
    >>> images.shape, targets.shape
    (torch.Size([360, 1, 8, 8]), torch.Size([360]))
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split={split!r} is not a part of the digits: use 'train' or 'eval'")
    return DataLoader(
        _read(split),
        batch_size=batch_size,
        shuffle=split == "train" if shuffle is None else shuffle,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )


def _read(split: str) -> TensorDataset:
    images, targets = _images_and_targets()
    rows = _parts(targets)[split == "eval"]
    pixels = torch.as_tensor(images[rows], dtype=torch.float32) / BRIGHTEST
    digits = torch.as_tensor(targets[rows], dtype=torch.int64)
    return TensorDataset(pixels.reshape(-1, 1, 8, 8), digits)


def _images_and_targets() -> tuple[Any, Any]:
    """Return all images and their digits."""
    package = importlib.util.find_spec("sklearn")
    places = None if package is None else package.submodule_search_locations
    if not places:
        raise ImportError(
            "the digits come with scikit-learn, which is not installed: "
            "run pip install scikit-learn"
        )
    # Its own reader would import all of scikit-learn and SciPy, which takes as long as importing
    # torch.
    path = Path(places[0]) / "datasets" / "data" / "digits.csv.gz"
    if path.exists():
        with gzip.open(path, "rt", encoding="ascii") as lines:
            table = np.loadtxt(lines, delimiter=",")
        return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn import datasets

    return datasets.load_digits(return_X_y=True)  # type: ignore[no-any-return]


def _parts(targets: Any) -> tuple[Any, Any]:
    """Return the rows for training and evaluation, with the same proportions of digits."""
    # Draws the same numbers in the same order as scikit-learn's train_test_split(stratify=targets,
    # random_state=0), so the parts are the same.
    draw, counts = np.random.RandomState(0), np.bincount(targets)
    trained = _shared_out(len(targets) - EVAL_ROWS, counts, draw)
    held_out = _shared_out(EVAL_ROWS, counts - trained, draw)
    train: list[int] = []
    evaluation: list[int] = []
    for digit, (first, second) in enumerate(zip(trained, held_out, strict=True)):
        rows = draw.permutation(counts[digit])
        rows = np.flatnonzero(targets == digit)[rows]
        train.extend(rows[:first])
        evaluation.extend(rows[first : first + second])
    return draw.permutation(train), draw.permutation(evaluation)


def _shared_out(total: int, counts: Any, draw: np.random.RandomState) -> Any:
    """Return rows per digit, in proportion; the largest fractions round up, with random ties."""
    exact = total * counts / counts.sum()
    rows = np.floor(exact)
    fractions = exact - rows
    for fraction in np.unique(fractions)[::-1]:
        missing = int(total - rows.sum())
        if missing == 0:
            break
        tied = np.flatnonzero(fractions == fraction)
        rows[draw.choice(tied, size=min(len(tied), missing), replace=False)] += 1
    return rows.astype(int)


class CNN(nn.Module):
    """Small convolutional network with GroupNorm, so that batches can be split exactly.

    Images of shape ``(rows, 1, 8, 8)`` become logits of shape ``(rows, num_classes)``.

    Args:
        channels: feature maps of the first half; the second half has twice as many.
        dropout: dropout rate of the last features.
        num_classes: number of logits.

    Raises:
        ValueError: ``channels`` is not a positive multiple of 8, the number of norm groups.

    >>> CNN(channels=8)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self, *, channels: int = 32, dropout: float = 0.1, num_classes: int = NUM_CLASSES
    ) -> None:
        super().__init__()
        if channels < 8 or channels % 8:
            raise ValueError(
                f"channels={channels} cannot be normalized in 8 groups: give a multiple of 8"
            )
        self.features = nn.Sequential(
            _block(1, channels),
            _block(channels, channels),
            nn.MaxPool2d(2),
            _block(channels, 2 * channels),
            _block(2 * channels, 2 * channels),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Dropout(dropout), nn.Linear(8 * channels, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each image."""
        logits: Tensor = self.head(self.features(images))
        return logits


def _block(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(8, channels_out),
        nn.ReLU(),
    )
