"""Values that steps report inside Lightning, for `told`."""

import logging
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, Metric, MinMetric, SumMetric
from torchmetrics.wrappers import MetricTracker, Running

from automicro.integrations.lightning import AutoMicrobatch
from tests.integrations.told import (
    BATCH,
    KEEPING,
    SETTING,
    Kept,
    Net,
    Program,
    add,
    data,
    values_of,
)


class Each(Metric):
    """A custom metric: the mean over its updates, each of which is one number for some rows."""

    total: Tensor
    times: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")
        self.add_state("times", torch.zeros(()), "sum")

    def update(self, rows: Tensor) -> None:
        self.total += rows.double().square().mean().sqrt()
        self.times += 1

    def compute(self) -> Tensor:
        return self.total / self.times


METRICS = {"mean": MeanMetric, "sum": SumMetric, "max": MaxMetric, "min": MinMetric}
MAKES: dict[str, Any] = {
    **{f"{kind} metric": make for kind, make in METRICS.items()},
    "rows to a mean": MeanMetric,
    "running metric": lambda: Running(MeanMetric(), window=2),
    "rows to one of its own": Each,
    "tracked": lambda: MetricTracker(MeanMetric(), maximize=True),
}
# Names by which warnings refer to some ways.
CALLED = {
    "rows to one of its own": "Each",
    "read again": "callback_metrics",
    "written to a logger": "writes to the experiment",
}


class RecordingLogger(pl.loggers.logger.DummyLogger):
    """A logger that keeps all values."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def experiment(self) -> Any:
        return self.rows

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append({name: float(each) for name, each in metrics.items()})


WAYS: dict[str, Any] = {
    "log": lambda m, n, v: m.log(n, v, on_step=True, on_epoch=True),
    "log, max": lambda m, n, v: m.log(n, v, on_epoch=True, reduce_fx="max"),
    "log, torch.min": lambda m, n, v: m.log(n, v, on_epoch=True, reduce_fx=torch.min),
    "log, sum": lambda m, n, v: m.log(n, v, on_epoch=True, reduce_fx="sum"),
    "log, batch_size": lambda m, n, v: m.log(n, v, on_epoch=True, batch_size=m.rows),
    "log, batch_size=1": lambda m, n, v: m.log(n, v, on_epoch=True, batch_size=1),
    "log_dict": lambda m, n, v: m.log_dict({n: v, f"{n}/x": v * 2}, on_epoch=True),
    "logger": lambda m, n, v: m.logger.log_metrics({n: v}),
    "logger at times": lambda m, n, v: m.is_odd and m.logger.log_metrics({n: v}),
    "written to a logger": lambda m, n, v: m.logger.experiment.append({n: float(v)}),
    "added to the trainer": lambda m, n, v: add(m.trainer, n, v),
    **KEEPING,
    **SETTING,
    "returned": lambda m, n, v: m.returned.update({n: v}),
    "rows returned": lambda m, n, v: m.returned.update({n: v}),
    "rows to a mean": lambda m, n, v: getattr(m, n).update(v),
    **{f"{k} metric": lambda m, n, v: getattr(m, n).update(v) for k in METRICS},
    **{f"{k} metric called": lambda m, n, v: m.log(f"{n}", getattr(m, n)(v)) for k in METRICS},
    "running metric called": lambda m, n, v: m.log(n, getattr(m, n)(v)),
    "mean metric by name": lambda m, n, v: getattr(m, n).update(value=v),
    "mean metric with a weight": lambda m, n, v: getattr(m, n).update(v, weight=m.rows),
    "mean metric of one entry": lambda m, n, v: getattr(m, n).update(torch.as_tensor(v)[None]),
    "mean metric in a dict": lambda m, n, v: m.metrics[n].update(v),
    "rows to one of its own": lambda m, n, v: getattr(m, n).update(v),
    "tracked by steps": lambda m, n, v: (getattr(m, n).increment(), getattr(m, n).update(v)),
    "read again": lambda m, n, v: (
        m.log(n, v),
        getattr(m, n).append(float(m.trainer.callback_metrics.get(n, 0.0))),
    ),
    "mean metric called, logged": lambda m, n, v: (
        getattr(m, n)(v),
        m.log(n, getattr(m, n), on_step=True, on_epoch=True),
    ),
}


class Module(pl.LightningModule):
    """Run a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.net, self.program = Net(), program
        self.returned: dict[str, Any] = {}
        self.seen: dict[str, list[Any]] = {}
        for nth, each in enumerate(program.tellings):
            name, way = f"n{nth}", each.way
            for start, make in MAKES.items():
                if way.startswith(start):
                    setattr(self, name, make())
            if way == "mean metric in a dict":  # hides it from the modules of this one
                self.metrics = {**getattr(self, "metrics", {}), name: getattr(self, name)}
                delattr(self, name)

    def step(self, batch: Any, where: str) -> Any:
        values = values_of(batch[0], batch[1], self.net(batch[0]))
        self.rows, self.is_odd = len(batch[0]), float(batch[0][0, 0]) > 0
        self.returned = {}
        for nth, each in enumerate(self.program.tellings):
            if each.where == where:
                WAYS[each.way](self, f"n{nth}", each.of(values))
        return {"loss": values["loss"], **self.returned}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "fit")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "validate")

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.keep(outputs)

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.keep(outputs)

    def keep(self, outputs: Any) -> None:
        for name, value in outputs.items():
            if name != "loss":
                self.seen.setdefault(name, []).append(value)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Host:
    """The ``Trainer`` of Lightning."""

    WAYS, WHERE = WAYS, ("fit", "validate")
    CLOSE = 1e-6  # also for float64, which Lightning stores in fp32
    OF_ROWS = ("rows appended", "rows extended", "rows returned", "rows to a mean",
        "rows to one of its own")  # fmt: skip

    def names(self, program: Program, nth: int) -> list[str]:
        return [f"n{nth}", CALLED.get(program.tellings[nth].way, f"n{nth}")]

    def run(self, program: Program, *, ours: bool) -> dict[str, Any]:
        module, told = Module(program), RecordingLogger()
        kept = Kept(module, program)
        callbacks: list[Any] = []
        if ours:
            sizes = {"microbatch_size": 3, "eval_microbatch_size": 3}
            callbacks = [AutoMicrobatch(**(sizes if program.cut == "size" else {}))]
            module.net.most = 4 if program.cut == "oom" else None
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=2, logger=told, callbacks=callbacks,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            log_every_n_steps=1, num_sanity_val_steps=0, default_root_dir=tempfile.gettempdir(),
        )  # fmt: skip
        loader: Any = DataLoader(TensorDataset(*data()), BATCH)
        trainer.fit(module, loader, loader)
        found: dict[str, Any] = kept.found()
        for nth in range(len(program.tellings)):
            name = f"n{nth}"
            metric = getattr(module, name, getattr(module, "metrics", {}).get(name))
            if isinstance(metric, Metric):
                found[name] += [v for v in metric.metric_state.values() if isinstance(v, Tensor)]
            if isinstance(metric, MetricTracker):
                found[name] += [*metric.compute_all()] if metric.n_steps else []
            found[name] += [v for row in told.rows for k, v in row.items() if name in k]
            found[name] += [module.seen.get(name, []), getattr(trainer, name, [])]
        return found


HOST = Host()
