"""Jobs whose ranks were given different things, or data of which some ranks get nothing."""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, SequentialSampler, TensorDataset

from automicro import Callback, CheckpointConfig, Microbatcher, Trainer
from automicro.callbacks import ExponentialMovingAverage, MemoryMonitor
from automicro.loggers import JSONLinesLogger
from tests.loaders import WholeBatches
from tests.ranks.trainer_jobs import CLASSES, FEATURES, make_data, make_loader, make_trainer


class Halver(Callback):
    """Trains on other batches."""

    def transform(self, run: Any, batch: Any) -> Any:
        return tuple(part[::2] for part in batch)


def _options(case: str, folder: str, *, is_first: bool) -> dict[str, Any]:
    """What a rank is given; another one is given something else."""
    accuracy = make_trainer_metrics()
    by_case: dict[str, tuple[Any, Any]] = {
        "accumulate_batches": (2, 1),
        "callbacks": ([Halver()], []),
        "checkpoint": (CheckpointConfig(folder=folder), None),
        "eval_dataloader": (make_loader(11, 3), None),
        "eval_interval": ("1ep", "2ep"),
        "grad_clip_norm": (1.0, None),
        "max_duration": ("2ep", "3ep"),
        "metrics": (accuracy, None),
        "microbatch_size": (4, "auto"),
        "optimizer": (torch.optim.SGD, torch.optim.AdamW),
        "precision": ("bf16", "fp32"),
        "train_dataloader": (make_loader(25, 6), make_loader(24, 6)),
    }
    name, case = ("callbacks", "average") if case == "average" else (case, case)
    if case == "named":
        return {"eval_dataloader": {"new": make_loader(11, 3)} if is_first else None}
    if case == "average":
        return {name: [ExponentialMovingAverage(decay=0.5)] if is_first else []}
    if case == "learning rate":
        lr = 0.1 if is_first else 0.2
        return {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=lr)}
    return {name: by_case[case][not is_first]}


def make_trainer_metrics() -> Any:
    from torchmetrics.classification import MulticlassAccuracy

    return {"accuracy": MulticlassAccuracy(CLASSES)}


def refuse(case: str, folder: str, parallel: str = "ddp") -> tuple[str, str]:
    """Make a trainer that is given something else on the first rank; what this rank raised."""
    options = _options(case, folder, is_first=dist.get_rank() == 0)
    return _raised(lambda: make_trainer(parallel=parallel, **options))


def refuse_other_model() -> tuple[str, str]:
    width = 8 + dist.get_rank()
    net = nn.Sequential(nn.Linear(FEATURES, width), nn.Linear(width, CLASSES))
    return _raised(lambda: Trainer(net, parallel="ddp", device="cpu", progress=False))


def refuse_other_evaluation() -> tuple[str, str]:
    """Evaluate on other data on each rank, then evaluate together."""
    trainer = make_trainer(parallel="ddp")
    rows = 8 + dist.get_rank()
    kind, text = _raised(lambda: trainer.eval(make_loader(rows, 4, shuffle=False)))
    assert trainer.eval(make_loader(8, 4, shuffle=False))["loss"] > 0
    return kind, text


def _raised(work: Any) -> tuple[str, str]:
    try:
        work()
    except Exception as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "", ""


def train_with_own_listeners(folder: str) -> int:
    """Loggers, monitors and a memory limit on the first rank only, and seeds of each rank's own."""
    rank = dist.get_rank()
    options: dict[str, Any] = {"seed": rank}
    if rank == 0:
        options |= {
            "loggers": [JSONLinesLogger(os.path.join(folder, "log.jsonl"))],
            "callbacks": [MemoryMonitor()],
            "memory_limit": "64MiB",
            "max_time": "1h",
        }
    return int(make_trainer(parallel="ddp", **options).fit().steps)


class Unseeded(Sampler[int]):
    """Draws from what nobody seeds."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(self._rows), key=lambda _: os.urandom(8)))


def refuse_other_order(argument: str) -> tuple[str, str, int]:
    """Draw another order on each rank; what was raised after how many batches."""
    loader = DataLoader(make_data(32), batch_size=4, sampler=Unseeded(32))
    trainer = make_trainer(parallel="ddp", **{argument: loader})
    return *_raised(trainer.fit), trainer.state.batch


def evaluate_little(kind: str, rows: int) -> dict[str, float]:
    """Evaluate on fewer rows, or on fewer batches of a sampler's own, than there are ranks."""
    data = make_data(rows)
    loader: DataLoader[Any] = DataLoader(data, batch_size=4)
    if kind == "batches":
        sampler = WholeBatches(SequentialSampler(range(rows)), rows, drop_last=False)
        loader = DataLoader(data, batch_sampler=sampler)
    trainer = make_trainer(
        parallel="ddp" if dist.is_initialized() else None, eval_dataloader=loader
    )
    trainer.fit()
    return dict(trainer.state.eval.metrics)


class Few(Sampler[int]):
    """Says that it has rows, and gives none."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(())


def refuse_no_batch(argument: str) -> tuple[str, str]:
    loader = DataLoader(make_data(8), batch_size=4, sampler=Few())
    return _raised(make_trainer(parallel="ddp", **{argument: loader}).fit)


def _with_batchnorm() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()


def train_batchnorm(rows: int, **options: Any) -> tuple[int, int]:
    """Train where the last batch has an odd number of rows; batches, and rows of all ranks."""
    trainer = Trainer(
        _with_batchnorm(),
        DataLoader(make_data(rows), batch_size=4),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        parallel="ddp",
        device="cpu",
        progress=False,
        seed=0,
        remember_sizes=False,
        **options,
    )
    summary = trainer.fit()
    return int(summary.steps), int(summary.samples)


def train_on_one_row() -> tuple[str, str]:
    """One row on the last rank, where BatchNorm needs two."""
    microbatcher = Microbatcher(
        DistributedDataParallel(_with_batchnorm()), loss_fn=nn.CrossEntropyLoss(), probe=False
    )
    rows = 4 - 3 * (dist.get_rank() == dist.get_world_size() - 1)
    data = TensorDataset(torch.randn(rows, FEATURES).double(), torch.zeros(rows, dtype=torch.long))
    return _raised(lambda: microbatcher.backward(data[:]))


class FailsOnLast(Callback):
    """Fails on the last rank at one event."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._fail)

    def _fail(self, run: Any, *_: Any) -> None:
        if run.rank == run.world_size - 1:
            raise KeyError("broken")


def fail_at(event: str) -> tuple[str, str]:
    options = {"callbacks": [FailsOnLast(event)], "parallel": "ddp"}
    return _raised(lambda: make_trainer(**options).fit())
