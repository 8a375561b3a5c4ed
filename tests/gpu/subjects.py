"""Models with megabytes of activations, far more than everything else."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from automicro import Microbatcher
from automicro.features import with_features
from tests.gpu.device import DEVICE, MIB, SECOND, differences

ROWS = 16
CLASSES = 4
# On CUDA half a MiB per row, with about 20 MiB of activations; an eighth of that on a CPU.
SHAPE = (512 if DEVICE.type == "cuda" else 64, 256)


class Blocks(nn.Module):
    """Wide layers with dropout for many activations, and a BatchNorm for a changing buffer."""

    def __init__(self, *hungry: nn.Module, batchnorm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(SHAPE[0]) if batchnorm else nn.Identity()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256))
            for _ in range(3)
        )
        self.hungry = nn.Sequential(*hungry)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(self.hungry(x).mean(1))
        return out


class _Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_bytes: tuple[int, int]) -> Tensor:
        ctx.row_bytes = row_bytes
        torch.empty(len(x) * row_bytes[0], dtype=torch.uint8, device=x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [gradient] = gradients
        torch.empty(len(gradient) * ctx.row_bytes[1], dtype=torch.uint8, device=gradient.device)
        return gradient, None


class Hungry(nn.Module):
    """A model that allocates MiB per row in forward and backward, and frees them at once."""

    def __init__(self, forward_mib: int, backward_mib: int) -> None:
        super().__init__()
        self.row_bytes = forward_mib * MIB, backward_mib * MIB

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Hungry.apply(x, self.row_bytes)
        return out


class OnTwoDevices(nn.Module):
    """A model whose halves are on two devices, as with a device map."""

    def __init__(self, *hungry: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1)).to(DEVICE)
        self.second = nn.Sequential(nn.Dropout(0.1), *hungry, nn.Linear(1024, CLASSES)).to(SECOND)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).to(SECOND)).mean(1).to(DEVICE)
        return out


# A row needs 64 MiB: the whole batch 1 GiB, half of it 512 MiB.
PHASES = {"forward": Hungry(64, 0), "backward": Hungry(0, 64)}
ROOM, PLENTY = 900 * MIB, 64 * 1024 * MIB
HALF = ROWS // 2


def model(*hungry: nn.Module, batchnorm: bool = False) -> Blocks:
    """Return a model with the same parameters each time."""
    torch.manual_seed(1)
    return Blocks(*hungry, batchnorm=batchnorm).to(DEVICE)


def batch(rows: int = ROWS, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Return rows on the host."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, *SHAPE, generator=generator)
    return inputs, torch.randint(CLASSES, (rows,), generator=generator)


def require_same_bits(run: Callable[[Any, int], dict[str, Tensor]], limit: int = ROOM) -> None:
    """Compare a run of half batches that fit with one that runs out of memory before it."""
    assert differences(run(HALF, PLENTY), run("auto", limit)) == []


def microbatcher(net: nn.Module, size: Any = "auto", **options: Any) -> Microbatcher:
    """Make a Microbatcher for batches of ``(inputs, targets)``."""
    return Microbatcher(
        net,
        loss_fn=nn.CrossEntropyLoss(),
        microbatch_size=size,
        eval_microbatch_size=size,
        batchnorm="ignore",
        **with_features(options),
    )
