"""Two towers in miniature: match the right half of a handwritten digit to its left half.

One network encodes left halves, another one right halves, and matching halves must be more similar
than all other pairs in the batch, so a larger batch is harder. The images are those of
`automicro.demo.digits`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from automicro.demo import digits


def loader(split: str, *, batch_size: int, seed: int | None = 0) -> "DataLoader[Any]":
    """Return batches of ``left`` and ``right``, float32 of (rows, 1, 8, 4), like `digits.loader`.

    In training, rows that would not fill a batch are dropped: a smaller batch has fewer pairs to
    compare, which is another loss.

    Args:
        split: ``"train"`` or ``"eval"``.
        batch_size: rows of a batch.
        seed: determines the order.

    Raises:
        ValueError: an unknown split.

    >>> batch = next(iter(loader("eval", batch_size=360)))
    >>> batch["left"].shape, batch["right"].shape
    (torch.Size([360, 1, 8, 4]), torch.Size([360, 1, 8, 4]))
    """
    whole = digits.loader(split, batch_size=batch_size, seed=seed)
    is_train = split == "train"
    return DataLoader(
        whole.dataset,
        batch_size=batch_size,
        shuffle=is_train,
        drop_last=is_train,
        collate_fn=_collate,
        generator=whole.generator,
    )


def _collate(rows: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    left, right = torch.stack([row[0] for row in rows]).chunk(2, dim=3)
    return {"left": left, "right": right}


class Tower(nn.Module):
    """A network that encodes halves: (rows, 1, 8, 4) become (rows, features).

    Args:
        channels: of the convolutions; a multiple of 8.
        features: length of a representation.
        dropout: share of values that training drops before the last layer.

    >>> Tower(channels=8, features=5)(torch.zeros(3, 1, 8, 4)).shape
    torch.Size([3, 5])
    """

    def __init__(self, *, channels: int = 64, features: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
            nn.GELU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
            nn.GELU(),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Dropout(dropout), nn.Linear(8 * 4 * channels, features)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the representation of each image."""
        encoded: Tensor = self.head(self.convolutions(images))
        return encoded


def update_found(metric: "Found", outputs: Any, batch: Any) -> None:
    """Update `Found` with a batch."""
    metric.update(outputs["left"], outputs["right"])


class Found(Metric):
    """The share of left halves whose own right half is the most similar one in the batch.

    >>> metric = Found()
    >>> metric.update(torch.eye(3), torch.eye(3)[[0, 2, 1]])
    >>> metric.compute()
    tensor(0.3333)
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False

    found: Tensor
    rows: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("found", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, left: Tensor, right: Tensor) -> None:
        """Count the rows of a batch.

        Args:
            left: representations of (rows, features).
            right: representations of the same shape.
        """
        likeness = left @ nn.functional.normalize(right, dim=-1).T
        self.found += (likeness.argmax(1) == torch.arange(len(left), device=left.device)).sum()
        self.rows += len(left)

    def compute(self) -> Tensor:
        """Return the share."""
        return self.found / self.rows
