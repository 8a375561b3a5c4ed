"""All ranks report arguments that differ between ranks, before any rank waits for another."""

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from torchmetrics.classification import MulticlassAccuracy

from automicro import Callback, CheckpointConfig, Microbatcher, Trainer
from automicro.callbacks import ExponentialMovingAverage, MemoryMonitor
from automicro.errors import DesyncError
from automicro.features import Optimization
from automicro.loggers import JSONLinesLogger
from automicro.trainer.same_on_all_ranks import MAY_DIFFER, outline_options
from tests.loaders import WholeBatches
from tests.ranks.trainer_jobs import CLASSES, FEATURES, make_data, make_loader, make_trainer
from tests.ranks.world import on_ranks
from tests.ranks.wrapping import raised, require_alike, require_told


class Halver(Callback):
    """Trains on half of each batch."""

    def transform(self, run: Any, batch: Any) -> Any:
        return tuple(part[::2] for part in batch)


def sgd(lr: float) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


CHANGING = "callbacks that change batches, gradients or weights: "
# An argument, its values on two ranks, and the text of the error.
CASES: dict[str, tuple[str, Any, Any, str]] = {
    "average": (
        "callbacks",
        [ExponentialMovingAverage(decay=0.5)],
        [],
        CHANGING + "ExponentialMovingAverage on rank 0; none on rank 1",
    ),
    "callbacks": ("callbacks", [Halver()], [], CHANGING + "Halver on rank 0; none on rank 1"),
    "checkpoint": ("checkpoint", CheckpointConfig(folder="nowhere"), None, "; None on rank 1"),
    "features": (
        "features",
        [Optimization(grad_clip_norm=1.0)],
        [],
        "'grad_clip_norm': 1.0}} on rank 0; {} on rank 1",
    ),
    "learning rate": ("optimizer", sgd(0.1), sgd(0.2), "lr: 0.1 on rank 0; 0.2 on rank 1"),
    "max_duration": (
        *("max_duration", "2ep", "3ep"),
        "max_duration: '2ep' on rank 0; '3ep' on rank 1",
    ),
    "metrics": (
        "metrics",
        {"accuracy": MulticlassAccuracy(CLASSES)},
        None,
        "metrics: {'accuracy': MulticlassAccuracy} on rank 0; None on rank 1",
    ),
    "named": (
        "eval_dataloader",
        {"new": make_loader(11, 3)},
        None,
        "eval_dataloader: named 'new' on rank 0; None on rank 1",
    ),
    "optimizer": (
        *("optimizer", torch.optim.SGD, torch.optim.AdamW),
        "optimizer: SGD on rank 0; AdamW on rank 1",
    ),
    "train_dataloader": (
        *("train_dataloader", make_loader(25, 6), make_loader(24, 6)),
        "dataset=TensorDataset, rows=24",
    ),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks()
def test_difference_is_named_with_value_of_each_rank(case: str) -> None:
    argument, first, other, said = CASES[case]
    kind, text = raised(
        lambda: make_trainer(parallel="ddp", **{argument: [first, other][dist.get_rank()]})
    )
    assert kind == "DesyncError"
    assert said in text
    assert "Give all ranks the same" in text
    names = 2 if case == "named" else 1
    assert text.count("\n") == 1 + names, "a line for what differs, and no other"


@on_ranks()
def test_models_of_different_shapes_are_named_by_parameter() -> None:
    width = 8 + dist.get_rank()
    net = nn.Sequential(nn.Linear(FEATURES, width), nn.Linear(width, CLASSES))
    said = (
        "parameter '0.weight' of model: float32 of shape [8, 6] on rank 0; "
        "float32 of shape [9, 6] on rank 1"
    )
    with pytest.raises(DesyncError, match=re.escape(said)):
        Trainer(net, parallel="ddp", device="cpu", progress=False)


@on_ranks()
def test_evaluating_on_different_data_is_refused_and_ranks_continue() -> None:
    trainer = make_trainer(parallel="ddp")
    rows = 8 + dist.get_rank()
    with pytest.raises(DesyncError, match=r"(?s)rows=8.*rows=9"):
        trainer.eval(make_loader(rows, 4, shuffle=False))
    assert trainer.eval(make_loader(8, 4, shuffle=False))["loss"] > 0


@on_ranks()
def test_loggers_limits_and_seeds_may_differ_between_ranks(tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "loggers": [JSONLinesLogger(tmp_path / "log.jsonl")],
        "callbacks": [MemoryMonitor()],
        "memory_limit": "64MiB",
    }
    options = own if dist.get_rank() == 0 else {}
    assert make_trainer(parallel="ddp", seed=dist.get_rank(), **options).fit().steps == 6


def test_every_trainer_argument_is_compared_or_may_differ() -> None:
    arguments = {
        name: None if each.default is inspect.Parameter.empty else each.default
        for name, each in inspect.signature(Trainer.__init__).parameters.items()
        if name not in ("self", "model")
    }
    outline = outline_options(arguments)
    assert set(arguments) >= MAY_DIFFER
    for name in (
        set(arguments) - MAY_DIFFER - {"modules"}
    ):  # without modules there is no line for them
        assert any(each.startswith(name) for each in outline), name


class Unseeded(Sampler[int]):
    """Draws from an unseeded source, or yields no rows although it has a length."""

    def __init__(self, rows: int, *, gives: bool = True) -> None:
        self._rows, self._gives = rows, gives

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[int]:
        rows = range(self._rows) if self._gives else ()
        return iter(sorted(rows, key=lambda _: os.urandom(8)))


@pytest.mark.parametrize("gives", [True, False])
@pytest.mark.parametrize("argument", ["train_dataloader", "eval_dataloader"])
@on_ranks()
def test_unseeded_or_empty_sampler_is_refused(argument: str, gives: bool) -> None:
    loader: Any = DataLoader(make_data(32), batch_size=4, sampler=Unseeded(32, gives=gives))
    trainer = make_trainer(parallel="ddp", **{argument: loader})
    kind, text = raised(trainer.fit)
    if not gives:
        assert kind == "DataLoaderError"
        assert f"{argument} (DataLoader) gave no batch" in text
        return
    assert kind == "DesyncError"
    assert f"the rows of {argument} come in another order" in text
    assert "(order 1 on rank 0; order 2 on rank 1)" in text
    assert "give its generator a fixed seed" in text
    assert (trainer.state.batch == 0) is (argument == "train_dataloader")


@on_ranks()
def test_fewer_batches_than_ranks_are_evaluated() -> None:
    sampler = WholeBatches(SequentialSampler(range(8)), 8, drop_last=False)
    loader = DataLoader(make_data(8), batch_sampler=sampler)
    metrics = make_trainer(parallel="ddp").eval(loader)
    assert set(metrics) == {"loss", "accuracy"}
    require_alike(metrics)


def with_batchnorm() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()


@pytest.mark.parametrize("rows", [10, 13])
@on_ranks()
def test_no_rank_gets_single_row_for_batchnorm(rows: int) -> None:
    """The last batch has 2 or 5 rows for two ranks."""
    loader = DataLoader(make_data(rows), batch_size=4)
    options: dict[str, Any] = {"eval_dataloader": None, "max_duration": "1ep"}
    summary = make_trainer(
        with_batchnorm(), train_dataloader=loader, parallel="ddp", batchnorm="ignore", **options
    ).fit()
    assert (summary.steps, summary.samples) == (2, rows)


@on_ranks()
def test_single_row_on_rank_is_explained_with_remedy() -> None:
    microbatcher = Microbatcher(
        DistributedDataParallel(with_batchnorm()), loss_fn=nn.CrossEntropyLoss(), probe=False
    )
    rows = 4 - 3 * (dist.get_rank() == 1)
    batch = torch.randn(rows, FEATURES).double(), torch.zeros(rows, dtype=torch.long)
    own = "this rank has one of 5 rows. Use drop_last=True"
    require_told(lambda: microbatcher.backward(batch), "ValueError", told="", own=own)


BETWEEN = "rolled nothing back, so ranks may be one step apart"


@pytest.mark.parametrize(
    ("event", "said"),
    [
        *((event, BETWEEN) for event in ("batch_end", "gradients_ready", "epoch_end")),
        ("forward_start", "rolled back on this rank: the state is as before it"),
    ],
)
@on_ranks()
def test_error_says_whether_stopped_rank_was_rolled_back(event: str, said: str) -> None:
    def fail(run: Any, *_: Any) -> None:
        if run.rank == 1:
            raise KeyError("broken")

    callback = type("Fails", (Callback,), {event: lambda self, *args: fail(*args)})()
    work = make_trainer(callbacks=[callback], parallel="ddp").fit
    kind, text = raised(work)
    assert kind == ("PeerFailedError", "KeyError")[dist.get_rank()]
    if dist.get_rank() == 0:
        assert said in text
        assert said is not BETWEEN or "as before" not in text
