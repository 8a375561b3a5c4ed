"""Handwritten digits: scikit-learn's 1797 images of 8×8 pixels, and a CNN that reads them.

The images come with scikit-learn, so nothing is downloaded.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES = 10
EVAL_ROWS = 360
BRIGHTEST = 16  # pixels are whole numbers from 0 to 16


def loader(
    split: str, *, batch_size: int, seed: int | None = 0, shuffle: bool | None = None
) -> "DataLoader[tuple[Tensor, ...]]":
    """Return batches of ``(images, targets)`` from one part of the digits.

    Images are float32 in [0, 1] of shape ``(rows, 1, 8, 8)``, targets int64 of shape ``(rows,)``.
    The parts never change: 1437 rows for ``"train"`` and 360 for ``"eval"``, with the same share of
    each digit in both. The last batch of an epoch may be smaller; no row is dropped.

    Args:
        split: ``"train"`` or ``"eval"``.
        batch_size: rows of an optimization batch.
        seed: decides the order, in a generator of the loader's own: the same whatever else is
            random. With None, torch's global generator decides.
        shuffle: whether each epoch has an order of its own; True for ``"train"`` unless given.

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
    datasets, model_selection = _import_sklearn()
    images, targets = datasets.load_digits(return_X_y=True)
    parts = model_selection.train_test_split(
        images, targets, test_size=EVAL_ROWS, stratify=targets, random_state=0
    )
    images, targets = (parts[0], parts[2]) if split == "train" else (parts[1], parts[3])
    pixels = torch.as_tensor(images, dtype=torch.float32) / BRIGHTEST
    return TensorDataset(pixels.reshape(-1, 1, 8, 8), torch.as_tensor(targets, dtype=torch.int64))


def _import_sklearn() -> tuple[Any, Any]:
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn, which is not installed: "
            "run pip install scikit-learn"
        ) from error
    return datasets, model_selection


class CNN(nn.Module):
    """A small convolutional network with GroupNorm, so a batch can be cut anywhere exactly.

    Images of shape ``(rows, 1, 8, 8)`` become logits of shape ``(rows, num_classes)``.

    Args:
        channels: feature maps of the first half; the second half has twice as many.
        dropout: share of the last features that training drops.
        num_classes: how many logits.

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
                f"channels={channels} cannot be normalised in 8 groups: give a multiple of 8"
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
