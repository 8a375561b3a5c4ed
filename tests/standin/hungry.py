"""A small network that needs megabytes of memory."""

import threading
from typing import Any

import torch
from torch import Tensor, nn

from tests.standin import device as standin

MIB = 2**20
ROWS = 8


def leave(num_bytes: int, index: int = 0) -> None:
    """Leave a number of free bytes on a device, in addition to the memory in use."""
    standin.empty_cache()
    torch.ops.standin.set_capacity(index, standin.memory_reserved(index) + num_bytes)


class _Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_bytes: tuple[int, int], threads: set[int]) -> Tensor:
        ctx.row_bytes, ctx.threads = row_bytes, threads
        torch.empty(len(x) * row_bytes[0], dtype=torch.uint8, device=x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [gradient] = gradients
        ctx.threads.add(threading.get_ident())
        torch.empty(len(gradient) * ctx.row_bytes[1], dtype=torch.uint8, device=gradient.device)
        return gradient, None, None


class Hungry(nn.Module):
    """A model that allocates MiB per row in forward and backward, and frees them at once.

    Attributes:
        threads: those that ran its backward.
    """

    def __init__(self, forward_mib: int, backward_mib: int, *, batchnorm: bool = True) -> None:
        super().__init__()
        self.row_bytes = forward_mib * MIB, backward_mib * MIB
        self.threads: set[int] = set()
        norm = nn.BatchNorm1d(16) if batchnorm else nn.LayerNorm(16)
        self.body = nn.Sequential(nn.Linear(6, 16), norm, nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        out: Tensor = self.head(_Hungry.apply(x, self.row_bytes, self.threads))
        return out
