"""Small runs of the Lightning Trainer, with and without the callback."""

import csv
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from automicro import Observing
from automicro.integrations.lightning import AutoMicrobatch
from automicro.loss.passes import is_extra_pass
from tests.integrations.both import check_rows, max_diff
from tests.ranks.wrapping import local

ROWS, BATCH = 110, 32  # an epoch has four batches, the last one with 14 rows
WIDTH, LAYERS = 512, 12


class Module(pl.LightningModule):
    """A classifier that logs in every available way.

    Args:
        dropout: dropout rate before the last layer.
        dtype: data type of the input.
    """

    def __init__(self, *, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 4),
            nn.Tanh(),
            nn.Linear(4, WIDTH),
            *[nn.Tanh() for _ in range(LAYERS)],  # their saved activations dominate the peak
            nn.Dropout(dropout),
            nn.Linear(WIDTH, 3),
        )
        self.metrics = nn.ModuleDict(
            {
                f"of_{name}": nn.ModuleDict(
                    {
                        "accuracy": MulticlassAccuracy(3, average="micro"),
                        "several": MetricCollection(
                            {"mean": MeanMetric(), "sum": SumMetric()},
                            compute_groups=False,
                            prefix=f"{name}/",
                        ),
                        "matrix": MulticlassConfusionMatrix(3),
                    }
                )
                for name in ("train", "val", "test")
            }
        )
        self.losses: list[Tensor] = []
        self.kept: dict[str, list[Any]] = {"outputs": [], "hits": []}
        self.data_dtype = dtype

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
        self.log(f"{name}/least", x.min(), reduce_fx="min", on_epoch=True)
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
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch, "val")
        self.kept["outputs"].append(self.net(batch[0]))
        self.kept["hits"].extend(batch[1].tolist())
        return {"loss": loss, "rows": len(batch[0]), "outputs": self.net(batch[0])}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]), {"labels": batch[1]}

    def on_train_epoch_end(self) -> None:
        matrix: Any = self.metrics["of_train"]
        self.log("matrix", matrix.matrix.compute().float().trace())
        matrix.matrix.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": warm_up, "interval": "step"},
        }


def loader(dtype: torch.dtype = torch.float32, *, rows: int = ROWS, batch: int = BATCH) -> Any:
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, generator=drawn, dtype=dtype)
    return DataLoader(TensorDataset(x, torch.randint(3, (rows,), generator=drawn)), batch)


EVENTS = sorted(
    name
    for name in dir(pl.Callback)
    if name.startswith("on_") and "checkpoint" not in name and name != "on_exception"
)
MODULE_EVENTS = sorted(
    {
        name
        for name in dir(pl.LightningModule)
        if name.startswith("on_") and "checkpoint" not in name and name not in ("on_gpu",)
    }
    | {"training_step", "validation_step", "backward", "transfer_batch_to_device"}
    | {"optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"}
)
IN_PIECES = ("training_step", "validation_step", "backward")  # run for each microbatch


# Events that see gradients: of the previous batch until zero_grad, then of this one.
WITH_GRADIENTS = (
    *("training_step", "on_before_zero_grad", "optimizer_zero_grad", "on_after_backward"),
    *("on_before_optimizer_step", "configure_gradient_clipping"),
)


class Recorder(pl.Callback):
    """Record every event of callbacks and of the module, with some of their arguments."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        for name in EVENTS:
            setattr(self, name, self._noting(name))

    def _noting(self, name: str) -> Callable[..., None]:
        def note(trainer: Any, module: Any, *given: Any, **named: Any) -> None:
            self._note(name, module, given)

        return note

    def _note(self, name: str, module: Any, given: Sequence[Any], place: str = "") -> None:
        told: list[Any] = []
        if name in ("on_before_backward", "backward"):
            told = [given[0].detach().clone()]
        elif name in WITH_GRADIENTS:
            told = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        elif name == "on_train_batch_end":
            told = [each.detach() for each in given[0].values()]
        self.events.append((place + name, told))

    def watch(self, module: Any) -> None:
        for name in MODULE_EVENTS:
            own = getattr(module, name)

            def note(*given: Any, _name: str = name, _own: Any = own, **named: Any) -> Any:
                if not is_extra_pass():  # checks of a few rows are not part of the run
                    self._note(_name, module, given, "module.")
                return _own(*given, **named)

            setattr(module, name, note)

    @property
    def of_batches(self) -> list[Any]:
        """Return all events except those that run for each microbatch."""
        apart = [f"module.{name}" for name in IN_PIECES]
        return [(name, told) for name, told in self.events if name not in apart]


@dataclass
class Run:
    """One call of fit."""

    trainer: Any
    module: Any
    logged: list[dict[str, float]] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)

    @property
    def parameters(self) -> list[Tensor]:
        return [each.detach() for each in self.module.parameters()]

    @property
    def events(self) -> list[str]:
        return [name for name, _ in self.recorder.of_batches]


def trainer_of(folder: Path, callbacks: Sequence[Any] = (), **options: Any) -> Any:
    given: dict[str, Any] = {
        "max_epochs": 3,
        "logger": CSVLogger(folder, name="", version=""),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "accelerator": "cpu",
        "num_sanity_val_steps": 1,
        **options,
    }
    return pl.Trainer(callbacks=list(callbacks), **given)


def fit(
    folder: Path,
    callbacks: Sequence[Any] = (),
    *,
    make: Any = None,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    records: bool = False,
    ckpt_path: Path | None = None,
    train: Any = None,
    **options: Any,
) -> Run:
    torch.manual_seed(0)
    module = Module(dropout=dropout, dtype=dtype) if make is None else make()
    recorder = Recorder()
    if records:
        recorder.watch(module)
        callbacks = [*callbacks, recorder]
    trainer = trainer_of(folder, callbacks, **options)
    train = loader(dtype) if train is None else train
    given = train, loader(dtype, rows=40, batch=24)
    trainer.fit(module, *given, ckpt_path=ckpt_path)
    return Run(trainer, module, rows_of(folder), recorder)


def rows_of(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


class Sharded(Module):
    """Shard the network with FSDP2, as Lightning does."""

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


def compare_on_ranks(folder: str, kind: str, parts: int) -> dict[str, Any]:
    """Run one rank: the host alone, then the callback with little memory on rank 1.

    Args:
        folder: folder of the logs.
        kind: ``"ddp"``, ``"uneven"`` for ranks with batches of 32 and of 12 rows, or ``"fsdp2"``.
        parts: number of accumulated batches.
    """
    rank = dist.get_rank()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="localhost")
    told: list[str] = []

    def short(module: Module) -> Module:
        own = module.step

        def step(batch: Any, name: str) -> Tensor:
            if rank == 1 and len(batch[0]) > 9:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return own(batch, name)

        module.step = step  # type: ignore[method-assign]
        return module

    def observe(event: str, subject: Any) -> None:
        told.append(event)

    def run(place: str, callbacks: Sequence[Any], make: Callable[[], Any]) -> Run:
        return fit(
            Path(folder) / f"{place} {rank}",
            callbacks,
            make=make,
            strategy=strategy(process_group_backend="gloo"),
            devices=2,
            accumulate_grad_batches=parts,
            use_distributed_sampler=kind != "uneven",
            train=loader(rows=48, batch=12) if rank == 1 and kind == "uneven" else None,
        )

    strategy: Any = ModelParallelStrategy if kind == "fsdp2" else DDPStrategy
    module = Sharded if kind == "fsdp2" else Module
    plain = run("plain", [], module)
    ours = run("ours", [AutoMicrobatch(features=[Observing(observe)])], lambda: short(module()))
    check_rows(ours.logged, plain.logged, 1e-5)
    return {
        "ooms": told.count("oom"),
        "parameters": max_diff(*([local(p) for p in each.parameters] for each in (ours, plain))),
        "validated": abs(
            float(ours.trainer.callback_metrics["val/loss"])
            - float(plain.trainer.callback_metrics["val/loss"])
        ),
        "losses": len(ours.module.losses),
        "its losses": len(plain.module.losses),
    }
