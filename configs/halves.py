"""Two towers in miniature: which right half belongs to which left half of a handwritten digit.

One network encodes left halves, another right ones, and what belongs together has to be more alike
than all else in the batch: a larger batch asks more. The images are those of
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
    """Batches of ``left`` and ``right``, float32 of (rows, 1, 8, 4), as `digits.loader` has them.

    Rows that would not fill a batch are left out in training: in a smaller batch there is less to
    compare with, which is another loss.

    Args:
        split: ``"train"`` or ``"eval"``.
        batch_size: rows of a batch.
        seed: decides the order.

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
    """Encodes halves: (rows, 1, 8, 4) become (rows, features).

    Args:
        channels: of the convolutions; a multiple of 8.
        features: of a representation.
        dropout: share of what training drops before the last layer.

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
        """The representation of each image."""
        encoded: Tensor = self.head(self.convolutions(images))
        return encoded


def update_found(metric: "Found", outputs: Any, batch: Any) -> None:
    """Feed `Found` with a batch."""
    metric.update(outputs["left"], outputs["right"])


class Found(Metric):
    """The share of left halves whose own right half is the most alike of all in the batch.

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
            right: the same.
        """
        likeness = left @ nn.functional.normalize(right, dim=-1).T
        self.found += (likeness.argmax(1) == torch.arange(len(left), device=left.device)).sum()
        self.rows += len(left)

    def compute(self) -> Tensor:
        """The share."""
        return self.found / self.rows
