"""The Lightning Trainer with one callback: identical without a limit, and correct within one."""

import csv
import gc
import logging
import os
import signal
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
)

from automicro import (
    LossAverageError,
    LossError,
    MemoryBudget,
    MetricWarning,
    Observing,
    RollbackError,
)
from automicro.integrations.lightning import AutoMicrobatch
from automicro.loss.passes import is_extra_pass
from automicro.reach import Reach
from automicro.state.capture import capture
from tests.integrations.hosts import HostTests, Ran, check, check_rows, max_diff, with_and_without
from tests.integrations.told_lightning import HOST
from tests.ranks.world import world_of
from tests.ranks.wrapping import local

# Host warnings about data loaders and changes in torch.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{said}")
    for said in (
        *("changes attributes or variables", "Trying to infer the `batch_size`"),
        *("LeafSpec", "does not have many workers", "smaller than the logging interval"),
        *("The value of", "litlogger", "exists and is not empty", "It is recommended to use"),
        *("You passed in a `val_dataloader`", "You defined a `validation_step`"),
        *("You are using the `dataloader_iter`", "No (positive|negative) samples in targets"),
        *("callbacks used to create the checkpoint", "resuming from a checkpoint that ended"),
        *("You called `self.log.*needs to be floating", "`training_step` returned `None`"),
    )
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hide messages of the host about devices and loggers."""
    told = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [each.level for each in told]
    for each in told:
        each.setLevel(logging.ERROR)
    yield
    for each, level in zip(told, levels, strict=True):
        each.setLevel(level)


# Modules

ROWS, BATCH = 110, 32  # an epoch has four batches, the last one with 14 rows
WIDTH, LAYERS = 512, 12  # the saved activations dominate the peak


class Small(pl.LightningModule):
    """A base for modules in the style of user code."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layers = nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3), nn.Dropout(dropout)
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]), {"labels": batch[1]}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def metrics(name: str) -> nn.ModuleDict:
    several: dict[str, Any] = {"mean": MeanMetric(), "sum": SumMetric()}
    of_values = MetricCollection(several, compute_groups=False, prefix=f"{name}/")
    made = {"accuracy": MulticlassAccuracy(3, average="micro"), "several": of_values}
    return nn.ModuleDict({**made, "matrix": MulticlassConfusionMatrix(3)})


class Module(Small):
    """A classifier that logs and keeps values in many ways."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        inner = [nn.Linear(4, WIDTH), *(nn.Tanh() for _ in range(LAYERS)), nn.Dropout(dropout)]
        self.net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), *inner, nn.Linear(WIDTH, 3))
        names = ("train", "val", "test")
        self.metrics = nn.ModuleDict({f"of_{name}": metrics(name) for name in names})
        self.kept: dict[str, list[Any]] = {"losses": [], "outputs": [], "hits": []}

    def step(self, batch: Any, name: str) -> Tensor:
        x, y = batch
        metrics: Any = self.metrics[f"of_{name}"]
        outputs = self.net(x)
        loss = F.cross_entropy(outputs, y)
        right = outputs.argmax(-1) == y
        self.log(f"{name}/loss", loss, on_step=name == "train", on_epoch=True, prog_bar=True)
        self.log(f"{name}/half", loss.detach() / 2, batch_size=len(x), on_epoch=True)
        self.log(f"{name}/right", right.float().sum(), reduce_fx="sum", on_epoch=True)
        self.log(f"{name}/most", x.max(), reduce_fx=torch.max, on_step=name == "train")
        self.log_dict({f"{name}/one": 1.0, f"{name}/first": x[:, 0].mean()}, on_epoch=True)
        metrics.accuracy(outputs, y)
        self.log(f"{name}/acc", metrics.accuracy, on_step=name == "train", on_epoch=True)
        metrics.several(outputs.detach().mean(1))
        self.log_dict(metrics.several, on_epoch=True)
        metrics.matrix.update(outputs, y)
        self.log(f"{name}/twice", loss)
        self.log(f"{name}/twice", right.float().mean())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch, "train")
        self.kept["losses"].append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch, "val")
        self.kept["outputs"].append(self.net(batch[0]).detach())
        self.kept["hits"].extend(batch[1].tolist())
        return {"loss": loss, "rows": len(batch[0]), "outputs": self.net(batch[0])}

    def on_validation_batch_end(self, outputs: Any, *rest: Any) -> None:
        self.kept["outputs"] += [outputs["loss"], outputs["outputs"], torch.tensor(outputs["rows"])]

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "test")

    def on_train_epoch_end(self) -> None:
        matrix: Any = self.metrics["of_train"]
        self.log("matrix", matrix.matrix.compute().float().trace())
        matrix.matrix.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]


def loader(dtype: torch.dtype = torch.float32, *, rows: int = ROWS, batch: int = BATCH) -> Any:
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, generator=drawn, dtype=dtype)
    return DataLoader(TensorDataset(x, torch.randint(3, (rows,), generator=drawn)), batch)


class Overriding(Small):
    """Override clipping, scheduling and stepping."""

    def configure_gradient_clipping(self, *given: Any, **named: Any) -> None:
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None
    ) -> None:
        if batch_idx % 2:
            self.log("of_closure", closure())  # no optimizer step
        else:
            optimizer.step(closure=closure)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Alternating(Small):
    """Train two parts alternately, with gradient noise."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)

    def on_after_backward(self) -> None:
        for parameter in self.net[2].parameters():
            assert parameter.grad is not None
            parameter.grad += 0.01 * self.global_step


class Measured(Small):
    """Log the return values of metrics, and row counts."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.metrics = MetricCollection([MulticlassAccuracy(3), MulticlassAUROC(3)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        self.log_dict(self.metrics(outputs, batch[1]), on_step=True, on_epoch=False)
        self.log("rows", len(batch[0]), on_step=True)
        return F.cross_entropy(outputs, batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("of_outputs", outputs["loss"])


class TokenMeans(Small):
    """A loss averaged over valid targets, whose number varies between rows."""

    returns = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels = batch["labels"]
        loss = F.cross_entropy(self.net(batch["x"]).flatten(0, 1), labels.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("again", loss.double(), on_step=True, batch_size=int((labels != -100).sum()))
        return loss if self.returns else None

    validation_step = training_step


def tokens() -> Any:
    drawn = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (16, 5), generator=drawn)
    for row in range(16):
        labels[row, 1 + row % 4 :] = -100
    rows: Any = [{"x": torch.randn(16, 5, 6, generator=drawn), "labels": labels}] * 3
    return DataLoader(rows, batch_size=None)


class Skipping(Module):
    """Skip every third batch after drawing random numbers and logging."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("noise", torch.rand(()), on_step=True)
        return None if batch_idx % 3 == 1 else loss


# Runs

# Events that see gradients: of the previous batch until zero_grad, then of this one.
WITH_GRADIENTS = (
    *("on_before_zero_grad", "optimizer_zero_grad", "on_after_backward"),
    *("on_before_optimizer_step", "configure_gradient_clipping"),
)


def events_of(kind: Any, *more: str) -> set[str]:
    names = {name for name in dir(kind) if name.startswith("on_") and "checkpoint" not in name}
    return {*names, *more} - {"on_exception", "on_gpu"}


class Recorder(pl.Callback):
    """Record the events of callbacks and of the module, with losses and gradients."""

    def __init__(self, module: Any = None) -> None:
        self.events: list[tuple[str, list[Tensor]]] = []
        more = "transfer_batch_to_device", "optimizer_step", "lr_scheduler_step", *WITH_GRADIENTS
        for name in sorted(events_of(pl.Callback)) if module else ():
            setattr(self, name, self._noting(name))
        for name in sorted(events_of(pl.LightningModule, *more)) if module else ():
            setattr(module, name, self._calling(name, module, getattr(module, name)))

    def _noting(self, name: str) -> Callable[..., None]:
        return lambda trainer, module, *given, **_: self._note(name, module, given)

    def _calling(self, name: str, module: Any, own: Any) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if not is_extra_pass():  # checks of a few rows are not part of the run
                self._note(name, module, given, "module.")
            return own(*given, **named)

        return call

    def _note(self, name: str, module: Any, given: Sequence[Any], place: str = "") -> None:
        told: list[Any] = []
        if name == "on_before_backward":
            told = [given[0].detach().clone()]
        elif name in WITH_GRADIENTS:
            told = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        elif name == "on_train_batch_end":
            told = [each.detach() for each in given[0].values()]
        self.events.append((place + name, told))


def trainer_of(folder: Path = Path("unused"), callbacks: Any = (), **options: Any) -> Any:
    given: dict[str, Any] = {
        "max_epochs": 3, "logger": str(folder) != "unused" and CSVLogger(folder, "", ""),
        "log_every_n_steps": 1, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "num_sanity_val_steps": 1, "accelerator": "cpu", **options,
    }  # fmt: skip
    return pl.Trainer(callbacks=list(callbacks), **given)


def fit(
    folder: Path = Path("unused"),
    callbacks: Sequence[Any] = (),
    *,
    make: Any = Module,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    train: Any = None,
    records: bool = False,
    scales: bool = False,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Ran:
    torch.manual_seed(0)
    module = make(dropout)
    recorder = Recorder(module if records else None)
    if dtype == torch.float64:
        options["precision"] = "64-true"
    if scales:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        options["plugins"] = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    lines: list[Any] = [each for each in callbacks if isinstance(each, AutoMicrobatch)]
    counts: list[int] = []
    count = pl.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_: counts.extend(e.result.num_microbatches for e in lines)
    )
    trainer = trainer_of(folder, [*callbacks, recorder, count], **options)
    own = None if train else loader(dtype, rows=40, batch=24)
    trainer.fit(module, train() if train else loader(dtype), own, ckpt_path=ckpt_path)
    kept = getattr(module, "kept", {"losses": [], "outputs": [], "hits": []})
    tensors = [*(each.detach() for each in module.parameters()), *kept["losses"], *kept["outputs"]]
    path, rows = folder / "metrics.csv", []
    if path.exists():
        with path.open() as file:
            rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return Ran(
        [*tensors, torch.tensor([0, *kept["hits"]])],
        rows,
        recorder.events,
        trainer,
        max(counts, default=0),
        trainer.precision_plugin.scaler.get_scale() if scales else None,
    )


# Setups that are refused


class Manual(Small):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.automatic_optimization = False


class Lbfgs(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Iterating(Small):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


class WritesParameters(Small):
    """Change parameters that the step uses in a hook before the backward."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            next(self.parameters()).mul_(0.9)


def fitting(make: Any = Small, size: Any = 5, *more: Any, **case: Any) -> Callable[[], Any]:
    return lambda: fit(callbacks=[AutoMicrobatch(microbatch_size=size), *more], make=make, **case)


def changed(change: Callable[[Any], None]) -> Callable[[], Any]:
    def wrong() -> None:
        trainer = trainer_of(callbacks=[AutoMicrobatch()])
        change(trainer)
        trainer.fit(Small(), loader())

    return wrong


def with_strategy(name: str) -> Callable[[], Any]:
    def change(trainer: Any) -> None:
        trainer.strategy.__class__ = type(name, (type(trainer.strategy),), {})

    return changed(change)


def with_batch_size_finder(trainer: Any) -> None:
    trainer.callbacks.append(pl.callbacks.BatchSizeFinder())


BASE: dict[str, Any] = {"make": Small}


class TestLightning(HostTests):
    CASES: ClassVar = {
        "default": {"records": True, "gradient_clip_val": 0.1},
        "accumulation": {"records": True, "accumulate_grad_batches": 4},
        "bf16": {"precision": "bf16-mixed"},
        "custom clipping, schedule and step": {
            "make": Overriding, "more": lambda: [pl.callbacks.LearningRateMonitor("step")],
        },
        "alternating parts with noise": {"make": Alternating},
        "returned metric values": {"make": Measured},
        "means over tokens": {
            "make": TokenMeans, "train": tokens, "declared": {"loss_average": "tokens"},
        },
        "weight averaging": {
            **BASE, "more": lambda: [pl.callbacks.StochasticWeightAveraging(1e-2, 1)],
        },
        "accumulation schedule": {
            **BASE, "more": lambda: [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]
        },
        "skipped steps": {"make": Skipping, "accumulate_grad_batches": 2},
    }  # fmt: skip
    WHOLE = ("bf16", "skipped steps")
    SIZES: ClassVar = {"microbatch_size": 5}
    TOLERANCES: ClassVar = {"means over tokens": 1e-6}
    MIXED = (({"precision": "bf16-mixed", "max_epochs": 1}, 1e-3),)
    LIMITED: ClassVar = {
        "limit_train_batches": 2, "accumulate_grad_batches": 2, "limit_val_batches": 1,
        "max_epochs": 1, "num_sanity_val_steps": 0,
    }  # fmt: skip
    FP16: ClassVar = {"scales": True, "gradient_clip_val": 1.0, "max_epochs": 2}
    MISSING = (
        (
            pl.loops.optimization.automatic._AutomaticOptimization,
            "_make_closure",
            None,
            r"lightning \d.*lacks .*_make_closure.*Use lightning 2",
        ),
    )
    TOLD = HOST
    REFUSED = (
        (fitting(Manual), ValueError, "backward=self.manual_backward"),
        (fitting(Lbfgs), ValueError, "LBFGS runs a batch several times"),
        (fitting(Iterating), ValueError, r"Change it to training_step\(batch, batch_idx\)"),
        (with_strategy("DeepSpeedStrategy"), ValueError, "DeepSpeedS.* its own gradients"),
        (with_strategy("FSDPStrategy"), ValueError, "FSDPStrategy is FSDP1"),
        (changed(with_batch_size_finder), ValueError, "searches the largest batch"),
        (fitting(Small, 5, AutoMicrobatch()), (ValueError, RuntimeError), "twice|more than one"),
        (fitting(WritesParameters), RollbackError, "on_before_zero_grad or .* writes to param"),
        (fitting(Skipping, 8, num_sanity_val_steps=0), LossError, "None for 8 of 32 rows"),
        (fitting(TokenMeans, train=tokens), LossAverageError, "splitting changes"),
        (lambda: AutoMicrobatch(optimizer=None), TypeError, "is set by the trainer"),
        (lambda: AutoMicrobatch(microbatchsize=3), TypeError, "is not known.*microbatch_size"),
    )

    def run(
        self, folder: Path, options: Any, *, more: Any = list, declared: Any = None, **case: Any
    ) -> Ran:
        line = [] if options is None else [AutoMicrobatch(**(declared or {}), **options)]
        return fit(folder, [*line, *more()], **case)

    def resumed(self, folder: Path, first: bool, second: bool) -> Ran:
        def seeded(trainer: Any, module: Any, *batch: Any) -> None:
            torch.manual_seed(trainer.global_step)

        case: dict[str, Any] = {"dropout": 0.1, "accumulate_grad_batches": 2}
        half = fit(callbacks=[AutoMicrobatch()] * first, max_steps=3, **case)
        half.host.save_checkpoint(folder / "half.ckpt")
        draws = pl.callbacks.LambdaCallback(on_train_batch_start=seeded)
        lines = [*[AutoMicrobatch()] * second, draws]
        return fit(callbacks=lines, ckpt_path=folder / "half.ckpt", **case)


class Failing(Module):
    """From the second epoch on, run out of memory in the backward after its hooks have run."""

    fails = True

    def backward(self, loss: Tensor, *given: Any, **named: Any) -> None:
        super().backward(loss, *given, **named)
        if self.fails and self.current_epoch and self.rows > 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows = len(batch[0])
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.hooks = getattr(self, "hooks", 0) + 1
        norms = [float(p.grad.norm()) for p in self.parameters() if p.grad is not None]
        self.log("norm", sum(norms) + self.hooks, on_step=True)

    def on_before_backward(self, loss: Tensor) -> None:
        self.kept["outputs"].append(loss.detach())


class Calm(Failing):
    fails = False


@pytest.mark.filterwarnings("ignore:.*self.rows changed in each microbatch")
@pytest.mark.parametrize("parts", [1, 4])
def test_hooks_of_failed_attempts_are_rolled_back(parts: int, tmp_path: Path) -> None:
    told: list[str] = []
    line = AutoMicrobatch(features=[Observing(lambda event, subject: told.append(event))])
    plain, ours = (
        fit(tmp_path / make.__name__, lines, make=make, records=True, num_sanity_val_steps=0,
            dtype=torch.float64, accumulate_grad_batches=parts)
        for make, lines in ((Calm, []), (Failing, [line]))
    )  # fmt: skip
    assert told.count("oom") >= 2
    check(ours, plain, close=1e-12)
    loops = [each.host.fit_loop.epoch_loop.automatic_optimization for each in (ours, plain)]
    progress = [each.optim_progress.state_dict() for each in loops]
    assert progress[0] == progress[1]


class Wide(Small):
    """A model whose gradients dominate memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 256))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()


def test_only_one_set_of_gradients_is_held() -> None:
    peaks = []
    for line in ([], [AutoMicrobatch(microbatch_size=None, probe=False)]):
        rows: Any = torch.randn(16, 256)
        with MemoryBudget(None) as budget:
            trainer_of(callbacks=line, max_epochs=1).fit(Wide(), DataLoader(rows, 4))
        peaks.append(budget.peak_bytes)
    assert peaks[1] - peaks[0] < 256 * 256 * 4 / 2


# Evaluation


@pytest.mark.parametrize("method", ["validate", "predict"])
def test_evaluation_below_peak_memory_matches_host(method: str) -> None:
    def run(*callbacks: Any) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        module = Module()
        given = {"verbose": False} if method == "validate" else {}
        rows = loader(rows=90, batch=64)
        found = getattr(trainer_of(callbacks=callbacks), method)(module, rows, **given)
        if method == "predict":
            return [], [each for out, rest in found for each in (out, rest["labels"])]
        return found, [*module.kept["outputs"], torch.tensor(module.kept["hits"])]

    with MemoryBudget(None) as budget:
        plain = run()
    with pytest.raises(torch.OutOfMemoryError), MemoryBudget(budget.peak_bytes * 6 // 10):
        run()
    with MemoryBudget(budget.peak_bytes * 6 // 10):
        ours = run(AutoMicrobatch())
    check_rows(ours[0], plain[0], 1e-5)
    assert max_diff(ours[1], plain[1]) < 1e-5


def test_train_mode_during_validation_is_kept() -> None:
    class Sampling(Small):
        def on_validation_model_eval(self) -> None:
            self.train()

    torch.manual_seed(0)
    module, found = Sampling(dropout=0.5), []
    for callbacks in ([], [AutoMicrobatch()]):
        torch.manual_seed(1)
        found += trainer_of(callbacks=callbacks).validate(module, loader(), verbose=False)
        assert module.net.training
    assert found[0] == found[1]


class Predicting(Small):
    """Return outputs that microbatches cannot reproduce."""

    gives = "centered"

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        return {
            "centered": outputs - outputs.mean(0),
            "similar": outputs @ outputs.T,
            "spread": {"outputs": outputs, "spread": outputs.std()},
        }[self.gives]


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ("centered", "the output of a row depends on the other rows"),
        ("similar", "the shape|is a Tensor in each microbatch"),
        ("spread", r"returns\['spread'\] is .* as a whole and .* combined from 4"),
    ],
)
def test_predictions_that_microbatches_cannot_reproduce_warn(gives: str, said: str) -> None:
    module = Predicting()
    module.gives = gives
    trainer = trainer_of(callbacks=[AutoMicrobatch(eval_microbatch_size=3)])
    with pytest.warns(MetricWarning, match=said):
        trainer.predict(module, loader(rows=10, batch=10))


@pytest.mark.parametrize("returns", [False, True])
def test_validation_token_mean_is_exact_or_warns(returns: bool) -> None:
    module = TokenMeans()
    module.returns = returns
    options: Any = {"eval_microbatch_size": 3, "loss_average": "tokens"}
    (plain,) = trainer_of().validate(module, tokens(), verbose=False)
    trainer = trainer_of(callbacks=[AutoMicrobatch(**options)])
    if returns:
        (found,) = trainer.validate(module, tokens(), verbose=False)
        assert found["loss_epoch"] == pytest.approx(plain["loss_epoch"], rel=1e-6)
        return
    with pytest.warns(MetricWarning, match=r"not means over rows: log\('loss'\) is"):
        trainer.validate(module, tokens(), verbose=False)


class LogitMetric(Small):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.accuracy = BinaryAccuracy()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.accuracy.update(batch[0][:, 0], batch[1] > 0)
        return F.cross_entropy(self.net(batch[0]), batch[1])


def test_metric_mistaking_logits_for_probabilities_warns_once() -> None:
    with pytest.warns(MetricWarning, match="BinaryAccuracy treats its numbers as prob") as told:
        fitting(LogitMetric, 1, max_steps=2, limit_val_batches=0)()
    assert sum("treats its numbers" in str(each.message) for each in told) == 1


# Sizes in checkpoints, the end of a run, and other parts


@pytest.mark.parametrize("size", ["auto", 8])
def test_sizes_are_restored_from_checkpoints_of_the_same_policy(size: Any, tmp_path: Path) -> None:
    gc.disable()  # the collector changes which sizes fit
    limit = "360KiB"
    first = AutoMicrobatch(microbatch_size=size, memory_limit=limit if size == "auto" else None)
    fit(callbacks=[first], max_epochs=1).host.save_checkpoint(tmp_path / "ours.ckpt")
    told: list[Any] = []
    features = [Observing(lambda event, subject: told.append(event))]
    again = AutoMicrobatch(memory_limit=limit, features=features)
    case: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, "train": loader}
    fit(callbacks=[again], ckpt_path=tmp_path / "ours.ckpt", **case)
    gc.enable()
    assert told.count("attempt_start") > 0
    # A run that goes on may try one larger size; a new one begins with the whole batch.
    assert (told.count("oom") < 2) == (size == "auto")


EVALUATIONS = ("validation_step", "test_step", "predict_step")


def check_restored(trainer: Any, module: Any) -> None:
    owners = trainer.fit_loop.epoch_loop.automatic_optimization, trainer.strategy
    replaced = {name for owner in owners for name in vars(owner)}
    assert not {"_make_closure", *EVALUATIONS} & replaced
    assert not {"on_before_backward", "on_after_backward", "forward"} & vars(module).keys()


def test_interrupt_restores_host_and_second_fit_works() -> None:
    class Interrupted(Module):
        interrupts = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.interrupts and batch_idx == 2:
                raise KeyboardInterrupt
            return loss

    module, line = Interrupted(), AutoMicrobatch(microbatch_size=8)
    trainer = trainer_of(callbacks=[line])
    held = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            trainer.fit(module, loader())
    finally:
        signal.signal(signal.SIGINT, held)  # the host leaves the signal ignored
    assert len(module.kept["losses"]) == 2  # the loss of the third batch was rolled back
    check_restored(trainer, module)
    assert line.microbatcher is None
    assert line.state_dict()
    module.interrupts = False
    again = trainer_of(callbacks=[line])
    again.fit(module, loader())
    assert again.global_step == 12
    assert line.microbatcher is None


def test_finished_run_leaves_no_references() -> None:
    run = fit(callbacks=[AutoMicrobatch()])  # the host keeps its module in callbacks
    check_restored(run.host, run.host.lightning_module)
    kept = weakref.ref(run.host.lightning_module)
    del run
    gc.collect()
    assert kept() is None


def test_nested_part_uses_own_size_and_is_restored(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Noting(Small):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            part: Any = self.net.__dict__.get("forward")
            sizes.extend(part.nested.sizes if part is not None else ())

    run = TestLightning().running(tmp_path, make=Noting, dtype=torch.float64)
    options = {"microbatch_size": 6, "nested": {"net": 3}}
    _, ours = with_and_without(run, options, close=1e-12)
    assert 0 < max(sizes) <= 3
    assert "forward" not in vars(ours.host.lightning_module.net)


def test_reach_and_capture_do_not_enter_trainer() -> None:
    module, teacher = Small(), nn.Linear(2, 2)
    trainer = trainer_of(callbacks=[pl.callbacks.LambdaCallback()])
    trainer.callbacks[0].teacher = teacher
    module.trainer = trainer
    assert all(each is not teacher for each in Reach({"module": module}).modules().values())
    captured = capture({"module": module})
    trainer.callbacks.append(None)
    captured.put_back()
    assert trainer.callbacks.pop() is None


# Several ranks


class Sharded(Module):
    """Shard the network with FSDP2, as Lightning does."""

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


def compare_on_ranks(kind: str, parts: int, folder: str) -> dict[str, Any]:
    """Run one rank: the host alone, then the callback with little memory on rank 1."""
    rank = dist.get_rank()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="localhost")
    told: list[str] = []
    strategy: Any = ModelParallelStrategy if kind == "fsdp2" else DDPStrategy
    module = Sharded if kind == "fsdp2" else Module

    class Short(module):  # type: ignore[misc, valid-type]
        def step(self, batch: Any, name: str) -> Tensor:
            if rank == 1 and len(batch[0]) > 9:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            found: Tensor = super().step(batch, name)
            return found

    def run(make: Any, *callbacks: Any) -> Ran:
        is_uneven = rank == 1 and kind == "uneven"
        return fit(
            Path(folder) / f"{make.__name__} {rank}", callbacks, make=make, devices=2,
            strategy=strategy(process_group_backend="gloo"), accumulate_grad_batches=parts,
            use_distributed_sampler=kind != "uneven",
            train=(lambda: loader(rows=48, batch=12)) if is_uneven else loader,
        )  # fmt: skip

    observing = Observing(lambda event, subject: told.append(event))
    plain, ours = run(module), run(Short, AutoMicrobatch(features=[observing]))
    check_rows(ours.logged, plain.logged, 1e-5)
    both = [each.host.lightning_module.parameters() for each in (ours, plain)]
    gap = max_diff(*([local(p.detach()) for p in parameters] for parameters in both))
    return {"ooms": told.count("oom"), "gap": gap}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "parts"), [("ddp", 1), ("ddp", 2), ("uneven", 1), ("fsdp2", 1)])
def test_two_ranks_match_host_when_one_runs_out_of_memory(
    kind: str, parts: int, tmp_path: Path
) -> None:
    with world_of(2) as world:
        for found in world.run(compare_on_ranks, kind, parts, str(tmp_path)):
            assert found["ooms"] > 0
            assert found["gap"] < 1e-6


# The other package

OTHER_PACKAGE = """
import sys, torch, pytorch_lightning as pl
import pytorch_lightning.demos.boring_classes
from automicro.integrations.lightning import AutoMicrobatch

class Module(pl.demos.boring_classes.BoringModel):
    def training_step(self, batch, batch_idx):
        self.log("loss", loss := self.layer(batch).square().mean())
        return loss

line = AutoMicrobatch(microbatch_size=24)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", callbacks=[line], limit_val_batches=0, **quiet
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(96, 32), 48))
found = f"{line.result.num_samples} rows in {line.result.num_microbatches}"
print(f"{found}, lightning imported: {'lightning.pytorch' in sys.modules}")
"""


def test_pytorch_lightning_package_is_supported() -> None:
    pytest.importorskip("pytorch_lightning")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OTHER_PACKAGE],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert "48 rows in 2, lightning imported: False" in done.stdout
