"""What each rank of a real world does with a `Trainer`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from automicro import Callback, CheckpointConfig, ParameterGroups, Trainer
from automicro.callbacks import ExponentialMovingAverage, FreezeSchedule
from tests.ranks.steps import whole

FEATURES, CLASSES = 6, 3


class Block(nn.Module):
    """One of several equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.inner(inputs))


class Net(nn.Module):
    """Blocks in a list, as transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(FEATURES, 8, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(8, CLASSES, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.last(hidden)
        return logits


def make_data(rows: int) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def make_loader(rows: int, batch_size: int, *, shuffle: bool = True) -> DataLoader[Any]:
    order = torch.Generator().manual_seed(5) if shuffle else None
    return DataLoader(make_data(rows), batch_size=batch_size, shuffle=shuffle, generator=order)


UNDECAYED = ParameterGroups(torch.optim.AdamW, [{"params": "*.bias", "weight_decay": 0.0}])


def make_trainer(**options: Any) -> Trainer:
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
    return Trainer(Net(), **{**settings, **options})


def train(**options: Any) -> dict[str, Any]:
    """Train; what all ranks should have alike."""
    trainer = make_trainer(**options)
    summary = trainer.fit()
    model = trainer._run.model
    return {
        "parameters": {name: whole(each).clone() for name, each in model.named_parameters()},
        "train_loss": summary.train_loss,
        "metrics": dict(summary.train_metrics) | dict(summary.eval_metrics),
        "samples": summary.samples,
        "steps": summary.steps,
        "global_batch": summary.global_batch.rows,
        "num_devices": summary.global_batch.num_devices,
        "sharded": sum(isinstance(each, FSDPModule) for each in model.modules()),
        "stop_reason": summary.stop_reason,
        "state": (trainer.state.batch, trainer.state.epoch, trainer.state.samples),
    }


class Stopper(Callback):
    """Asks for the end on one rank."""

    def __init__(self, *, rank: int, after: int) -> None:
        self._rank = rank
        self._after = after

    def batch_end(self, run: Any, result: Any) -> None:
        if run.rank == self._rank and run.state.batch == self._after:
            run.stop("enough")


class WideNet(nn.Module):
    """Needs much more memory for rows than for parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(FEATURES, 512, dtype=torch.float64)
        self.last = nn.Linear(512, CLASSES, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.tanh(self.first(inputs)))
        return logits


def train_wide(*, limit_of_last: str | None, **options: Any) -> dict[str, Any]:
    """Train with a memory limit on the last rank only."""
    is_last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    trainer = Trainer(
        WideNet(),
        make_loader(200, 120 // world_size),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        max_duration="2ep",
        memory_limit=limit_of_last if is_last else None,
        device="cpu",
        progress=False,
        seed=0,
        **options,
    )
    summary = trainer.fit()
    model = trainer._run.model
    return {
        "parameters": {name: whole(each).clone() for name, each in model.named_parameters()},
        "train_loss": summary.train_loss,
        "ooms": summary.train_ooms,
        "microbatch_size": summary.microbatch_size,
    }


class BrokenRow(Dataset[Any]):
    """A row that only one rank reads cannot be read."""

    def __init__(self, *, rows: int, broken: int) -> None:
        self._data = make_data(rows)
        self._rows = rows
        self._broken = broken

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Any:
        if index == self._broken:
            raise KeyError(f"row {index} is broken")
        return self._data[index]


def fail(**options: Any) -> None:
    """Train on data that one rank cannot read."""
    loader = DataLoader(BrokenRow(rows=24, broken=10), batch_size=6)
    make_trainer(train_dataloader=loader, **options).fit()


def fail_in_evaluation(**options: Any) -> None:
    """The same in a named evaluation, which has a microbatcher of its own."""
    loader = DataLoader(BrokenRow(rows=24, broken=10), batch_size=6)
    make_trainer(eval_dataloader={"broken": loader}, **options).fit()


def stop_on_one_rank(**options: Any) -> dict[str, Any]:
    return train(callbacks=[Stopper(rank=1, after=2)], **options)


def average_weights(**options: Any) -> dict[str, Any]:
    """Evaluate with an average of the weights, and go on training with the weights."""
    return train(callbacks=[ExponentialMovingAverage(decay=0.5)], **options)


def draw(**options: Any) -> tuple[float, list[float]]:
    """A random number of this rank after the trainer is made, and its initial weights."""
    trainer = make_trainer(**options)
    model = trainer._run.model
    return torch.rand(()).item(), [whole(each).sum().item() for each in model.parameters()]


def freeze_in_the_course(**options: Any) -> None:
    train(callbacks=[FreezeSchedule({"first.*": "1ba"})], **options)


def train_wrapped_by_hand() -> dict[str, Any]:
    """A model that the caller put into DDP."""
    world_size = dist.get_world_size()
    trainer = Trainer(
        DistributedDataParallel(Net()),
        make_loader(25, 12 // world_size),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=UNDECAYED,
        max_duration="2ep",
        device="cpu",
        progress=False,
        seed=0,
    )
    trainer.fit()
    model = trainer._run.model
    return {"parameters": {n: whole(p).clone() for n, p in model.named_parameters()}}


def save_and_resume(folder: str, **options: Any) -> dict[str, Any]:
    """Stop in the middle of an epoch, and go on with another trainer."""
    checkpoint = CheckpointConfig(folder=folder)
    make_trainer(max_duration="1ba", checkpoint=checkpoint, **options).fit()
    return train(max_duration="2ep", checkpoint=checkpoint, **options)
