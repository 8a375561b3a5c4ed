"""What ranks were given differently is said on all of them, before any waits for another."""

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, SequentialSampler, TensorDataset

from automicro import Callback, CheckpointConfig, Microbatcher, Trainer
from automicro.callbacks import ExponentialMovingAverage, MemoryMonitor
from automicro.loggers import JSONLinesLogger
from automicro.trainer.same_on_all_ranks import MAY_DIFFER, outline_options
from automicro.values import as_text
from tests.loaders import WholeBatches
from tests.ranks.trainer_jobs import CLASSES, FEATURES, make_data, make_loader, make_trainer
from tests.ranks.world import World


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


SAID = {
    "accumulate_batches": "accumulate_batches: 2 on rank 0; 1 on rank 1",
    "average": "gradients or weights: ExponentialMovingAverage on rank 0; none on rank 1",
    "callbacks": "callbacks that change batches, gradients or weights: Halver on rank 0; none on",
    "checkpoint": "; None on rank 1",
    "eval_dataloader": "batch_size=3, drop_last=False on rank 0; None on rank 1",
    "eval_interval": "eval_interval: '1ep' on rank 0; '2ep' on rank 1",
    "grad_clip_norm": "grad_clip_norm: 1.0 on rank 0; None on rank 1",
    "learning rate": "lr: 0.1 on rank 0; 0.2 on rank 1",
    "max_duration": "max_duration: '2ep' on rank 0; '3ep' on rank 1",
    "metrics": "metrics: {'accuracy': MulticlassAccuracy} on rank 0; None on rank 1",
    "microbatch_size": "microbatch_size: 4 on rank 0; 'auto' on rank 1",
    "named": "eval_dataloader: named 'new' on rank 0; None on rank 1",
    "optimizer": "optimizer: SGD on rank 0; AdamW on rank 1",
    "precision": "precision: 'bf16' on rank 0; 'fp32' on rank 1",
    "train_dataloader": "dataset=TensorDataset, rows=24",
}


@pytest.mark.parametrize("case", SAID)
def test_what_differs_is_named_with_the_value_of_each_rank(
    world2: World, case: str, tmp_path: Path
) -> None:
    (kind, text), other = world2.run(refuse, case, str(tmp_path))
    assert other == (kind, text)
    assert kind == "DesyncError"
    assert SAID[case] in text
    assert "Give every rank the same" in text
    names = 2 if case == "named" else 1
    assert text.count("\n") == 1 + names, "a line for what differs, and no other"


@pytest.mark.parametrize("case", ["metrics", "max_duration"])
def test_so_it_is_where_the_model_is_to_be_sharded(
    world2: World, case: str, tmp_path: Path
) -> None:
    for kind, text in world2.run(refuse, case, str(tmp_path), parallel="fsdp"):
        assert kind == "DesyncError"
        assert SAID[case] in text


def test_models_of_different_shapes_are_named_by_their_parameters(world2: World) -> None:
    for kind, text in world2.run(refuse_other_model):
        assert kind == "DesyncError"
        assert (
            "parameter '0.weight' of model: float32 of shape [8, 6] on rank 0; "
            "float32 of shape [9, 6] on rank 1"
        ) in text


def test_evaluating_on_other_data_is_refused_and_all_can_go_on(world2: World) -> None:
    for kind, text in world2.run(refuse_other_evaluation):
        assert kind == "DesyncError"
        assert "rows=8" in text
        assert "rows=9" in text


def test_what_may_differ_does(world2: World, tmp_path: Path) -> None:
    assert world2.run(train_with_own_listeners, str(tmp_path)) == [6, 6]


def test_every_argument_of_the_trainer_is_compared_or_may_differ() -> None:
    arguments = {
        name: None if each.default is inspect.Parameter.empty else each.default
        for name, each in inspect.signature(Trainer.__init__).parameters.items()
        if name not in ("self", "model")
    }
    outline = outline_options(arguments)
    assert set(arguments) >= MAY_DIFFER
    for name in set(arguments) - MAY_DIFFER - {"modules"}:  # no modules, no line
        assert any(each.startswith(name) for each in outline), name


def test_values_have_a_text_without_what_differs_from_process_to_process() -> None:
    class Sampler:
        pass

    values: list[Any] = [Sampler(), lambda: 0, DataLoader(TensorDataset()), {"by": Sampler()}]
    for value in values:
        assert "0x" not in as_text(value)


@pytest.mark.parametrize("argument", ["train_dataloader", "eval_dataloader"])
def test_a_sampler_that_draws_from_what_nobody_seeds_is_refused(
    world2: World, argument: str
) -> None:
    for kind, text, batches in world2.run(refuse_other_order, argument):
        assert kind == "DesyncError"
        assert f"the rows of {argument} come in another order" in text
        assert "(order 1 on rank 0; order 2 on rank 1)" in text
        assert "give its generator a fixed seed" in text
        assert (batches == 0) is (argument == "train_dataloader")


@pytest.mark.parametrize(("kind", "rows"), [("rows", 1), ("batches", 8)])
def test_fewer_rows_or_batches_than_ranks_are_evaluated(
    world2: World, kind: str, rows: int
) -> None:
    first, second = world2.run(evaluate_little, kind, rows)
    assert first == second
    assert set(first) == {"loss", "accuracy"}


@pytest.mark.parametrize("argument", ["train_dataloader", "eval_dataloader"])
def test_data_that_give_no_rank_a_batch_are_an_error(world2: World, argument: str) -> None:
    for kind, text in world2.run(refuse_no_batch, argument):
        assert kind == "DataLoaderError"
        assert f"{argument} (DataLoader) gave no batch" in text


@pytest.mark.parametrize("rows", [10, 11, 13])
def test_no_rank_gets_a_single_row_for_batchnorm(world2: World, rows: int) -> None:
    # The last batch has 2, 3 or 5 rows for two ranks.
    assert world2.run(train_batchnorm, rows, batchnorm="ignore") == [(2, rows)] * 2


def test_a_single_row_of_a_rank_is_explained_with_its_remedy(world2: World) -> None:
    (kind, _), (own_kind, own) = world2.run(train_on_one_row)
    assert (kind, own_kind) == ("PeerFailedError", "ValueError")
    assert "of 5 rows of all ranks this one has no more; use drop_last=True" in own


@pytest.mark.parametrize("event", ["batch_end", "gradients_ready", "epoch_end"])
def test_a_rank_that_stops_between_batches_does_not_claim_to_be_as_before(
    world2: World, event: str
) -> None:
    (kind, text), (own_kind, _) = world2.run(fail_at, event)
    assert (kind, own_kind) == ("PeerFailedError", "KeyError")
    assert "rolled nothing back, so ranks may be one step apart" in text
    assert "as before" not in text


def test_a_rank_that_stops_inside_of_a_batch_says_that_it_was_rolled_back(world2: World) -> None:
    (kind, text), _ = world2.run(fail_at, "forward_start")
    assert kind == "PeerFailedError"
    assert "rolled back on this rank: the state is as before it" in text
