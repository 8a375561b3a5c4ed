"""Random runs of the Trainer, and the same runs in a plain loop."""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from automicro import Trainer
from automicro.features import Optimization, RememberSizes
from automicro.policy.auto import Halving
from tests.oracle.contents import CLASSES, FEATURES, IGNORED
from tests.oracle.faults import out_of_memory


@dataclasses.dataclass(frozen=True)
class TrainerJob:
    seed: int
    num_rows: int
    batch_rows: int
    drops_last: bool
    accumulates: int
    clip: float | None
    optimizer: str
    scheduler: str | None
    duration: str
    interval: str | None
    precision: str
    size: int | str
    loss: str
    fails: tuple[int, ...]
    has_metric: bool


def draw_trainer_job(seed: int) -> TrainerJob:
    chance = random.Random(seed)
    size = chance.choice((1, 2, 3, "auto"))
    steps = chance.choice((3, 5, 9))
    return TrainerJob(
        seed=seed,
        num_rows=chance.randint(17, 41),
        batch_rows=chance.randint(4, 11),
        drops_last=chance.random() < 0.3,
        accumulates=chance.choice((1, 1, 2, 3)),
        clip=chance.choice((None, 0.05, 1.0)),
        optimizer=chance.choice(tuple(OPTIMIZERS)),
        scheduler=chance.choice((None, *SCHEDULERS)),
        duration=chance.choice(("1ep", "2ep", f"{steps}ba")),
        interval=chance.choice((None, "1ep", "2ba", "3ba")),
        precision=chance.choices(("fp32", "bf16"), (80, 20))[0],
        size=size,
        loss=chance.choice(tuple(LOSSES)),
        fails=tuple(chance.sample(range(1, 12), 2)) if size == "auto" else (),
        has_metric=chance.random() < 0.7,
    )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, eps=1e-3),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.05, eps=1e-3),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
}


def _own(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, ignore_index=IGNORED, reduction="none").mean()


LOSSES: dict[str, Callable[[], Any]] = {
    "CrossEntropyLoss": nn.CrossEntropyLoss,
    "weights": lambda: nn.CrossEntropyLoss(torch.tensor([0.25, 2.5, 1.0, 0.625]).double()),
    "own": lambda: _own,
}


class Failing(nn.Module):
    """Runs out of memory at the given forwards, if they have more than two rows."""

    def __init__(self, fails: tuple[int, ...]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, CLASSES)
        ).double()
        self.fails, self.forwards = set(fails), 0

    def forward(self, x: Tensor) -> Any:
        if self.training and len(x) > 2 and torch.is_grad_enabled():
            self.forwards += 1
            if self.forwards in self.fails:
                raise out_of_memory()
        return self.body(x)


@dataclasses.dataclass
class Ended:
    """Final state of a run."""

    parameters: list[Tensor]
    steps: int
    loss: float
    accuracy: float | None


class Setting:
    """New model, data, loss and metric of a job."""

    def __init__(self, job: TrainerJob, *, fails: bool) -> None:
        torch.manual_seed(job.seed)
        self.job = job
        self.model = Failing(job.fails if fails else ())
        draws = torch.Generator().manual_seed(job.seed)
        rows = torch.randn(job.num_rows, FEATURES, generator=draws, dtype=torch.float64)
        targets = torch.randint(CLASSES, (job.num_rows,), generator=draws)
        keeps = torch.rand(job.num_rows, generator=draws) < 0.8
        self.train = TensorDataset(rows, targets.where(keeps, IGNORED))
        self.test = TensorDataset(rows[:13] * 0.9, targets[:13])
        self.loss = LOSSES[job.loss]()

    def train_loader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=self.job.batch_rows, drop_last=self.job.drops_last)

    def test_loader(self) -> DataLoader[Any]:
        return DataLoader(self.test, batch_size=5)

    def metric(self) -> Metric:
        return MulticlassAccuracy(CLASSES, average="micro", ignore_index=IGNORED)


def by_trainer(job: TrainerJob) -> Ended:
    setting = Setting(job, fails=True)
    trainer = Trainer(
        setting.model,
        setting.train_loader(),
        eval_dataloader=setting.test_loader(),
        loss_fn=setting.loss,
        optimizer=OPTIMIZERS[job.optimizer],
        metrics={"accuracy": setting.metric()} if job.has_metric else None,
        max_duration=job.duration,
        eval_interval=job.interval,
        accumulate_batches=job.accumulates,
        precision=job.precision,
        microbatch_size=Halving() if job.size == "auto" else job.size,
        progress=False,
        device="cpu",
        features=[
            RememberSizes(False),
            Optimization(SCHEDULERS.get(job.scheduler or ""), "batch", job.clip),
        ],
    )
    summary = trainer.fit()
    final = trainer.eval(setting.test_loader())
    accuracy = float(final["accuracy"]) if job.has_metric else None
    parameters = [p.detach().clone() for p in setting.model.parameters()]
    return Ended(parameters, summary.steps, float(final["loss"]), accuracy)


def by_loop(job: TrainerJob) -> Ended:
    setting = Setting(job, fails=False)
    model, loss_fn = setting.model, setting.loss
    optimizer = OPTIMIZERS[job.optimizer](model.parameters())
    make = SCHEDULERS.get(job.scheduler or "")
    scheduler = make(optimizer) if make else None
    number, unit = int(job.duration[:-2]), job.duration[-2:]
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16")
    steps, epoch, is_over = 0, 0, False
    while not is_over:
        loaded = list(setting.train_loader())
        for start in range(0, len(loaded), job.accumulates):
            group = loaded[start : start + job.accumulates]
            x, y = (torch.cat(parts) for parts in zip(*group, strict=True))
            optimizer.zero_grad()
            with autocast:
                loss = loss_fn(model(x), y)
            loss.backward()
            if job.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            steps += 1
            is_over = unit == "ba" and steps >= number
            if is_over:
                break
        epoch += 1
        is_over |= unit == "ep" and epoch >= number
    model.eval()
    metric = setting.metric()
    total = count = 0.0
    with torch.no_grad(), autocast:
        for x, y in setting.test_loader():
            out = model(x)
            weight = denominator(job, y)
            total, count = total + float(loss_fn(out, y)) * weight, count + weight
            metric.update(out, y)
    accuracy = float(metric.compute()) if job.has_metric else None
    parameters = [p.detach().clone() for p in model.parameters()]
    return Ended(parameters, steps, total / count, accuracy)


def denominator(job: TrainerJob, y: Tensor) -> float:
    if job.loss == "weights":
        return float(torch.tensor([0.25, 2.5, 1.0, 0.625]).double()[y].sum())
    return float(len(y))
