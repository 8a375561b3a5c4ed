"""Small groups of processes that exchange a few numbers over gloo, never touching a device."""

import datetime
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from automicro.torch_private import without_modes


class Group(Protocol):
    """Some ranks that can talk to each other."""

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def index(self) -> int:
        """This rank's number among them; 0 is their leader."""

    def gather(self, message: list[float]) -> list[list[float]]:
        """The messages of all, in order, on all of them."""

    def broadcast(self, message: list[float]) -> list[float]:
        """The leader's message on all of them."""

    def gather_text(self, text: bytes) -> list[bytes]:
        """As `gather`, for text of at most `TEXT_BYTES`."""

    def broadcast_text(self, text: bytes) -> bytes:
        """As `broadcast`, for text."""


TEXT_BYTES = 2048


class GlooGroup:
    """A process group of its own on the host, apart from those of the training.

    Args:
        ranks: the members, in order. All ranks of the world make the group, members or not, so
            that torch numbers its groups alike everywhere.
        timeout_seconds: how long one exchange may take, the slowest member's delay included.
    """

    def __init__(self, ranks: list[int], *, timeout_seconds: float) -> None:
        self._ranks = ranks
        self._group = dist.new_group(
            ranks,
            timeout=datetime.timedelta(seconds=timeout_seconds),
            backend="gloo",
        )

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def index(self) -> int:
        return self._ranks.index(dist.get_rank())

    def gather(self, message: list[float]) -> list[list[float]]:
        with without_modes():
            rows: list[list[float]] = self._gather(torch.tensor(message, dtype=torch.float64))
            return rows

    def broadcast(self, message: list[float]) -> list[float]:
        with without_modes():
            tensor = torch.tensor(message, dtype=torch.float64)
            dist.broadcast(tensor, self._ranks[0], group=self._group)
            numbers: list[float] = tensor.tolist()
            return numbers

    def gather_text(self, text: bytes) -> list[bytes]:
        with without_modes():
            return [_read(row) for row in self._gather(_padded(text))]

    def broadcast_text(self, text: bytes) -> bytes:
        with without_modes():
            tensor = _padded(text)
            dist.broadcast(tensor, self._ranks[0], group=self._group)
            return _read(tensor.tolist())

    def _gather(self, message: Tensor) -> list:  # type: ignore[type-arg]
        gathered = message.new_empty(self.size * message.numel())
        # The same under its older name before torch 2.13.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, message, group=self._group)
        return gathered.view(self.size, -1).tolist()


def _padded(text: bytes) -> Tensor:
    return torch.tensor(list(text[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _read(codes: list[int]) -> bytes:
    return bytes(codes).rstrip(b"\0")
