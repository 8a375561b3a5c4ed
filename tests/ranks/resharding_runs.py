"""Runs that go on at another number of ranks, and note each row that they train on."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchmetrics import Metric
from torchmetrics.aggregation import CatMetric, MaxMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from automicro import Callback, CheckpointConfig, Microbatcher, Trainer
from automicro.data import LengthBatchSampler
from automicro.features import UpdateMetric
from tests.loaders import WholeBatches, seeded_generator
from tests.ranks.trainer_jobs import CLASSES, Net, make_data
from tests.ranks.wrapping import whole_gradients, whole_parameters, wrapped

PER_BATCH = 12
"""Rows of a batch over all ranks; a multiple of 1, 2, 3 and 4."""


class Rows(Dataset[Any]):
    """Rows that know their number."""

    def __init__(self, rows: int) -> None:
        self._data = make_data(rows)
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Any:
        inputs, target = self._data[index]
        return {"row": index, "inputs": inputs, "target": target}


SAMPLERS: dict[str, Callable[[Dataset[Any], int], dict[str, Any]]] = {
    "in order": lambda data, rows: {"sampler": SequentialSampler(data)},  # type: ignore[arg-type]
    "shuffled": lambda data, rows: {"shuffle": True},
    "shuffled by a generator": lambda data, rows: {
        "shuffle": True,
        "generator": seeded_generator(),
    },
    "sampler with a generator": lambda data, rows: {
        "sampler": RandomSampler(data, generator=seeded_generator())  # type: ignore[arg-type]
    },
    "weighted": lambda data, rows: {
        "sampler": WeightedRandomSampler([1.0 + each % 3 for each in range(rows)], rows)
    },
    "weighted by a generator": lambda data, rows: {
        "sampler": WeightedRandomSampler([1.0] * rows, rows, generator=seeded_generator())
    },
}


def make_loader(
    rows: int,
    sampler: str,
    *,
    per_batch: int = PER_BATCH,
    world_size: int | None = None,
    **options: Any,
) -> DataLoader[Any]:
    if world_size is None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
    data = Rows(rows)
    settings = {**SAMPLERS[sampler](data, rows), "batch_size": per_batch // world_size}
    return DataLoader(data, **{**settings, **options})


def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    logits = model(batch["inputs"])
    return nn.functional.cross_entropy(logits, batch["target"]), logits


def update_metric(metric: Any, logits: Tensor, batch: Any) -> None:
    if isinstance(metric, BinaryAUROC):
        metric.update(logits.softmax(1)[:, 0], (batch["target"] == 0).long())
    elif isinstance(metric, MulticlassAccuracy):
        metric.update(logits, batch["target"])
    else:
        metric.update(logits)


def make_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Such as add up, join and take the highest."""
    metrics = {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "area": BinaryAUROC(),
        "highest": MaxMetric(),
        "logits": CatMetric(),
    }
    return {name: metrics[name] for name in names}


class Notes(Callback):
    """The rows and the loss of every batch."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.losses: dict[int, float] = {}

    def batch_start(self, run: Any, batch: Any) -> None:
        batches = batch if isinstance(batch, list) else [batch]
        self.rows[run.state.batch] = [row for each in batches for row in each["row"].tolist()]

    def batch_end(self, run: Any, result: Any) -> None:
        self.losses[run.state.batch - 1] = result.loss.item()


def train(
    folder: Path | None,
    until: str,
    *,
    loader: DataLoader[Any],
    parallel: str | None = "ddp",
    metrics: Sequence[str] = ("accuracy", "area", "highest"),
    **options: Any,
) -> dict[str, Any]:
    """Train on from the newest checkpoint, save, and tell all."""
    notes = Notes()
    settings: dict[str, Any] = {
        "forward": forward,
        "loss_average": "samples",
        "optimizer": torch.optim.AdamW,
        "metrics": make_metrics(metrics),
        "features": [UpdateMetric(update_metric)],
        "device": "cpu",
        "progress": False,
        "seed": 0,
    }
    trainer = Trainer(
        Net(),
        loader,
        parallel=parallel,
        max_duration=until,
        callbacks=[notes],
        checkpoint=None if folder is None else CheckpointConfig(folder=folder),
        **{**settings, **options},
    )
    summary = trainer.fit()
    model = trainer._run.model
    return {
        "rows": notes.rows,
        "losses": notes.losses,
        "parameters": whole_parameters(model),
        "metrics": dict(summary.train_metrics) | dict(summary.eval_metrics),
        "state": (trainer.state.batch, trainer.state.epoch, trainer.state.samples),
    }


def train_on(folder: Path | None, until: str, rows: int, sampler: str, **options: Any) -> Any:
    drop_last = options.pop("drop_last", False)
    per_batch = options.pop("per_batch", PER_BATCH)
    loader = make_loader(rows, sampler, drop_last=drop_last, per_batch=per_batch)
    return train(folder, until, loader=loader, **options)


def train_planned(folder: Path | None, until: str, mode: str, **options: Any) -> Any:
    """Batches by length, of which two make up an optimization batch at any number of ranks."""
    data = Rows(61)
    lengths = [1 + 7 * row % 11 for row in range(61)]
    budget: Any = {"batch_size": 5} if mode == "fixed" else {"batch_length": 30.0}
    sampler = LengthBatchSampler(data, mode=mode, lengths=lengths, unit="seconds", **budget)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    settings: dict[str, Any] = {"accumulate_batches": 2 // world_size, **options}
    return train(folder, until, loader=DataLoader(data, batch_sampler=sampler), **settings)


def train_batch_sampled(folder: Path, until: str) -> Any:
    """Batches that the caller cut."""
    sampler = WholeBatches(range(61), 4, drop_last=False)
    return train(folder, until, loader=DataLoader(Rows(61), batch_sampler=sampler))


def evaluate_few(rows: int, parallel: str) -> dict[str, float]:
    """Evaluate on fewer rows than ranks, before anything else."""
    trainer = Trainer(
        Net(),
        eval_dataloader=make_loader(rows, "in order"),
        forward=forward,
        loss_average="samples",
        parallel=parallel,
        device="cpu",
        progress=False,
        seed=0,
    )
    return trainer.eval()


class Unsendable:
    """Something that no other process can have."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


def step_on(
    kind: str, rows: list[int], *, sendable: bool = True, limit: str | None = None
) -> tuple[list[int], list[Tensor]]:
    """A first step on so many rows of each rank; votes of it and a second one, and gradients."""
    torch.manual_seed(3)
    model: nn.Module = Net()
    model = wrapped(kind, model)
    rank = dist.get_rank() if kind != "plain" else 0
    data = make_data(sum(rows) if kind != "plain" else rows[0])
    loaded = [data[row] for row in range(sum(rows))]
    start = sum(rows[:rank])
    mine = loaded[start : start + rows[rank]]
    batch: Any = None
    if mine:
        inputs, targets = (torch.stack(each) for each in zip(*mine, strict=True))
        batch = {"inputs": inputs, "target": targets, "tag": ["x"] * len(mine)}
        if not sendable:
            batch["tag"] = [Unsendable() for _ in mine]
    microbatcher = Microbatcher(
        model, forward=forward, loss_average="samples", probe=False, memory_limit=limit
    )
    votes = []
    for _ in range(2):
        model.zero_grad()
        before = getattr(microbatcher.ranks, "num_votes", 0)
        microbatcher.backward(batch)
        votes.append(getattr(microbatcher.ranks, "num_votes", 0) - before)
    return votes, whole_gradients(model)
