"""Jobs with a `Trainer` for each rank of a real world."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from automicro import ParameterGroups, Trainer
from automicro.features import with_features
from tests.ranks.wrapping import whole_parameters

FEATURES, CLASSES = 6, 3


class Block(nn.Module):
    """A block with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.inner(inputs))


class Net(nn.Module):
    """A model with a list of blocks, like a transformer; noise is dropout and statistics."""

    def __init__(self, *, noisy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        # 7 features and 3 classes, so shards are uneven, and some are empty.
        self.first, self.last = nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES)
        self.norm = nn.BatchNorm1d(7) if noisy else nn.Identity()
        self.drop = nn.Dropout(0.5 if noisy else 0.0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.double()

    def forward(self, hidden: Tensor) -> Tensor:
        for part in (self.first, self.norm, self.drop, *self.blocks, self.last):
            hidden = part(hidden)
        return hidden


def make_data(rows: int) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def make_loader(rows: int, batch_size: int, *, shuffle: bool = True) -> DataLoader[Any]:
    order = torch.Generator().manual_seed(5) if shuffle else None
    return DataLoader(make_data(rows), batch_size=batch_size, shuffle=shuffle, generator=order)


UNDECAYED = ParameterGroups(torch.optim.AdamW, [{"params": "*.bias", "weight_decay": 0.0}])


def make_trainer(model: nn.Module | None = None, **options: Any) -> Trainer:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    settings: dict[str, Any] = {
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW,
        "metrics": {"accuracy": MulticlassAccuracy(CLASSES, average="micro")},
        "device": "cpu",
        "progress": False,
        "seed": 0,
        "max_duration": "2ep",
        "train_dataloader": make_loader(25, 12 // world_size),
        "eval_dataloader": make_loader(11, 6 // world_size, shuffle=False),
    }
    return Trainer(Net() if model is None else model, **with_features({**settings, **options}))


def train(model: nn.Module | None = None, **options: Any) -> dict[str, Any]:
    """Train; return results that are equal on all ranks."""
    trainer = make_trainer(model, **options)
    summary = trainer.fit()
    return {
        "parameters": whole_parameters(trainer._run.model),
        "train_loss": summary.train_loss,
        "metrics": dict(summary.train_metrics) | dict(summary.eval_metrics),
        "samples": summary.samples,
        "steps": summary.steps,
        "ooms": summary.train_ooms,
        "microbatch_size": summary.microbatch_size,
        "num_devices": summary.global_batch.num_devices,
        "sharded": sum(isinstance(each, FSDPModule) for each in trainer._run.model.modules()),
        "stop_reason": summary.stop_reason,
        "state": (trainer.state.batch, trainer.state.epoch, trainer.state.samples),
    }
