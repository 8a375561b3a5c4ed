"""Runs of many kinds drawn by a seed: models, data, checkpoints and loggers."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from automicro import Halving, Trainer
from automicro.callbacks import EarlyStopping, ExponentialMovingAverage
from automicro.checkpoints.store import CheckpointConfig
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.features import Feature, MicrobatchUnit, Nested, Optimization, RememberSizes
from automicro.loggers import JSONLinesLogger
from automicro.step.results import StepResult
from automicro.trainer.evaluators import Evaluator

FEATURES, CLASSES, WIDTH = 12, 3, 64
BATCH_SIZE = 16
# Activations of a row need about 3 KiB, and row-independent memory about 30 KiB.
DEVICES = {"growing": "110KiB", "other": "72KiB"}


class Tally(Callback):
    """Has a state, and draws random numbers that affect the rest of the run."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    def batch_end(self, run: Run, result: StepResult) -> None:
        self.total += torch.rand(2) * result.num_samples

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total = state["total"].clone()


class Stream(IterableDataset):
    """Noisy rows without a known length."""

    def __init__(self, rows: TensorDataset) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self._rows)):
            inputs, target = self._rows[index]
            yield inputs + 0.1 * torch.rand(FEATURES), target


def rows(count: int, seed: int = 2) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def cost_of(row: tuple[Tensor, Tensor]) -> float:
    """Return almost equal costs, so rows are sorted but memory matches the costs."""
    return 8 + float(row[1]) / 1000


def growing() -> list[tuple[Tensor, Tensor]]:
    """Return batches of increasing size, so memory also runs out late in an epoch."""
    inputs, targets = rows(120).tensors
    sizes = [8, 16, 32, 64]
    return list(zip(inputs.split(sizes), targets.split(sizes), strict=True))


LOADERS: dict[str, Callable[[int], Any]] = {
    "shuffled": lambda count: DataLoader(rows(count), BATCH_SIZE, shuffle=True),
    "own generator": lambda count: DataLoader(
        rows(count), BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "growing": lambda _: growing(),
    "stream": lambda count: DataLoader(Stream(rows(count)), BATCH_SIZE),
    "persistent workers": lambda count: DataLoader(
        rows(count), BATCH_SIZE, shuffle=True, num_workers=2, persistent_workers=True
    ),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
SCHEDULERS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.02, total_steps=60
    ),
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A kind of run."""

    seed: int
    loader: str = "shuffled"
    num_rows: int = 60
    max_duration: str = "3ep"
    interval: str | None = "2ba"
    keep_last: int | None = 2
    keep_best: int = 0
    optimizer: str = "AdamW"
    scheduler: str = "StepLR"
    precision: str = "fp32"
    grad_clip_norm: float | None = 1.0
    accumulate_batches: int = 1
    batchnorm: bool = False
    memory_limit: str | None = None
    evaluators: int = 1
    average: bool = False
    stops_early: bool = False
    by_cost: bool = False
    when_too_large: Sequence[str] | str = "error"  # other values use a model of blocks
    nested: bool = False  # gives the last block its own size

    def make(self, folder: Path, *callbacks: Callback) -> "Job":
        """Return a fresh run of this kind, as a new process would make it."""
        return Job(self, folder, callbacks)


class Job:
    """A Trainer and its components."""

    def __init__(self, subject: Subject, folder: Path, callbacks: tuple[Callback, ...]) -> None:
        torch.manual_seed(subject.seed)
        is_deep = subject.nested or subject.when_too_large != "error"
        self.model = nn.Sequential(
            nn.Linear(FEATURES, WIDTH),
            nn.BatchNorm1d(WIDTH) if subject.batchnorm else nn.Identity(),
            nn.ReLU(),
            nn.Dropout(0.2),
            *(deep_blocks() if is_deep else (nn.Tanh() for _ in range(8))),
            nn.Linear(WIDTH, CLASSES),
        )
        self.optimizer = OPTIMIZERS[subject.optimizer](self.model.parameters())
        make_scheduler = SCHEDULERS[subject.scheduler]
        self.scheduler = None if make_scheduler is None else make_scheduler(self.optimizer)
        self.log = folder / "log.jsonl"
        self.config = CheckpointConfig(
            folder=folder / "checkpoints",
            interval=subject.interval,
            keep_last=subject.keep_last,
            keep_best=subject.keep_best,
        )
        self.own: list[Callback] = [Tally()]
        if subject.average:
            self.own.append(ExponentialMovingAverage(decay=0.9, update_interval="2ba"))
        if subject.stops_early:
            monitor = "eval/loss" if subject.evaluators == 1 else "eval/new/loss"
            self.own.append(EarlyStopping(monitor, patience=3, min_delta=100.0))
        self.trainer = Trainer(
            self.model,
            LOADERS[subject.loader](subject.num_rows),
            eval_dataloader=_evaluators(subject.evaluators),
            # Each life starts without remembered sizes, as the first one did.
            features=[RememberSizes(False), *_features(subject, self.scheduler)],
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=self.optimizer,
            metrics={"accuracy": MulticlassAccuracy(CLASSES)},
            max_duration=subject.max_duration,
            accumulate_batches=subject.accumulate_batches,
            # Refined sizes depend on measured memory, which varies slightly after a resume.
            # Halving depends only on failures.
            microbatch_size=(
                8 if is_deep else None if subject.batchnorm else Halving(refine=False)
            ),
            when_too_large=subject.when_too_large,
            eval_microbatch_size=Halving(refine=False),
            memory_limit=subject.memory_limit,
            precision=subject.precision,
            device="cpu",
            seed=subject.seed,
            progress=False,
            eval_interval="3ba" if subject.stops_early else "1ep",
            callbacks=[*self.own, *callbacks],
            loggers=[JSONLinesLogger(self.log)],
            checkpoint=self.config,
        )


def _features(subject: Subject, scheduler: Any) -> list[Feature]:
    found: list[Feature] = [Optimization(scheduler, "batch", subject.grad_clip_norm)]
    found += [Nested({"7": Halving(refine=False)})] if subject.nested else []
    return found + ([MicrobatchUnit(cost_of)] if subject.by_cost else [])


def deep_blocks() -> list[nn.Module]:
    """Return four blocks that save sixteen times the memory of their outputs."""
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), *(nn.Tanh() for _ in range(16)))
        for _ in range(4)
    ]


def _evaluators(count: int) -> Any:
    loader = DataLoader(rows(24, seed=3), batch_size=12)
    if count < 2:
        return loader if count else None
    shuffled = DataLoader(rows(40, seed=4), batch_size=40, shuffle=True)
    return {
        "seen": loader,
        "new": Evaluator(
            dataloader=shuffled, metrics=None, microbatch_size=16, max_batches=1, interval="2ba"
        ),
    }


def draw(seed: int) -> Subject:
    """Return the kind of run for a seed."""
    choose = random.Random(seed)
    loader = choose.choice(["shuffled"] * 4 + ["own generator"] * 4 + ["growing"] * 6 + ["stream"])
    if seed % 20 == 0:
        loader = "persistent workers"
    evaluators = choose.choice([0, 1, 1, 2, 2])
    is_small = loader == "growing" or choose.random() < 0.2
    drawn = Subject(
        seed=seed,
        loader=loader,
        num_rows=choose.choice([48, 60, 64, 70]),
        max_duration=choose.choice(["3ep", "10ba", "7ba", "150sp", "2ep"]),
        interval=choose.choice(["1ba", "2ba", "3ba", "5ba", "1ep", "2ep", "40sp", "100sp"]),
        keep_last=choose.choice([1, 2, 3, None]),
        keep_best=choose.choice([0, 1]) if evaluators == 1 else 0,
        optimizer=choose.choice(sorted(OPTIMIZERS)),
        scheduler=choose.choice(sorted(SCHEDULERS)),
        precision=choose.choice(["fp32", "fp32", "fp16", "bf16"]),
        grad_clip_norm=choose.choice([None, 1.0]),
        accumulate_batches=choose.choice([1, 1, 2, 3]),
        batchnorm=not is_small and choose.random() < 0.3,
        memory_limit=DEVICES.get(loader, DEVICES["other"]) if is_small else None,
        evaluators=evaluators,
        average=choose.random() < 0.3,
        stops_early=evaluators > 0 and choose.random() < 0.15,
    )
    return replace(drawn, by_cost=not drawn.batchnorm and choose.random() < 0.3)
