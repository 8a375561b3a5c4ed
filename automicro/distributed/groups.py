"""Small groups of processes that exchange a few numbers over gloo, never touching a device."""

import datetime
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from automicro.torch_private import without_modes
from automicro.torch_private_distributed import broadcast_on_host, gather_on_host


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
        self._group: dist.ProcessGroup = dist.new_group(
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
            numbers = torch.tensor(message, dtype=torch.float64)
            rows: list[list[float]] = gather_on_host(self._group, numbers).tolist()
            return rows

    def broadcast(self, message: list[float]) -> list[float]:
        with without_modes():
            numbers = torch.tensor(message, dtype=torch.float64)
            leaders: list[float] = broadcast_on_host(self._group, numbers).tolist()
            return leaders

    def gather_text(self, text: bytes) -> list[bytes]:
        with without_modes():
            return [_read(row) for row in gather_on_host(self._group, _padded(text)).tolist()]

    def broadcast_text(self, text: bytes) -> bytes:
        with without_modes():
            return _read(broadcast_on_host(self._group, _padded(text)).tolist())


def _padded(text: bytes) -> Tensor:
    return torch.tensor(list(text[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _read(codes: list[int]) -> bytes:
    return bytes(codes).rstrip(b"\0")
