"""What ranks were given differently is said on all of them, before any waits for another."""

import inspect
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, SequentialSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from automicro import Callback, CheckpointConfig, Microbatcher, Trainer
from automicro.callbacks import ExponentialMovingAverage, MemoryMonitor
from automicro.features import Optimization
from automicro.loggers import JSONLinesLogger
from automicro.trainer.same_on_all_ranks import MAY_DIFFER, outline_options
from automicro.values import as_text
from tests.loaders import WholeBatches
from tests.ranks.trainer_jobs import CLASSES, FEATURES, make_data, make_loader, make_trainer
from tests.ranks.world import World
from tests.ranks.wrapping import raised


class Halver(Callback):
    """Trains on other batches."""

    def transform(self, run: Any, batch: Any) -> Any:
        return tuple(part[::2] for part in batch)


def sgd(lr: float) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


# An argument, what two ranks are given for it, and what is said.
CASES: dict[str, tuple[str, Any, Any, str]] = {
    "accumulate_batches": ("accumulate_batches", 2, 1, ": 2 on rank 0; 1 on rank 1"),
    "average": (
        "callbacks",
        [ExponentialMovingAverage(decay=0.5)],
        [],
        " that change batches, gradients or weights: ExponentialMovingAverage on rank 0; none on",
    ),
    "callbacks": (
        "callbacks",
        [Halver()],
        [],
        " that change batches, gradients or weights: Halver on rank 0; none on rank 1",
    ),
    "checkpoint": ("checkpoint", CheckpointConfig(folder="nowhere"), None, "; None on rank 1"),
    "eval_dataloader": (
        "eval_dataloader",
        make_loader(11, 3),
        None,
        "batch_size=3, drop_last=False on rank 0; None on rank 1",
    ),
    "eval_interval": ("eval_interval", "1ep", "2ep", ": '1ep' on rank 0; '2ep' on rank 1"),
    "grad_clip_norm": (
        "features",
        [Optimization(grad_clip_norm=1.0)],
        [],
        "'grad_clip_norm': 1.0}} on rank 0; {} on rank 1",
    ),
    "learning rate": ("optimizer", sgd(0.1), sgd(0.2), "lr: 0.1 on rank 0; 0.2 on rank 1"),
    "max_duration": ("max_duration", "2ep", "3ep", ": '2ep' on rank 0; '3ep' on rank 1"),
    "metrics": (
        "metrics",
        {"accuracy": MulticlassAccuracy(CLASSES)},
        None,
        ": {'accuracy': MulticlassAccuracy} on rank 0; None on rank 1",
    ),
    "microbatch_size": ("microbatch_size", 4, "auto", ": 4 on rank 0; 'auto' on rank 1"),
    "named": (
        "eval_dataloader",
        {"new": make_loader(11, 3)},
        None,
        ": named 'new' on rank 0; None on rank 1",
    ),
    "optimizer": (
        "optimizer",
        torch.optim.SGD,
        torch.optim.AdamW,
        ": SGD on rank 0; AdamW on rank 1",
    ),
    "precision": ("precision", "bf16", "fp32", ": 'bf16' on rank 0; 'fp32' on rank 1"),
    "train_dataloader": (
        "train_dataloader",
        make_loader(25, 6),
        make_loader(24, 6),
        "dataset=TensorDataset, rows=24",
    ),
}
# Where the argument's name is not followed by what is said.
WITHIN = ("checkpoint", "eval_dataloader", "grad_clip_norm", "learning rate", "train_dataloader")


def refuse(case: str, parallel: str = "ddp") -> None:
    """Make a trainer that is given something else on the first rank."""
    argument, first, other, _ = CASES[case]
    make_trainer(parallel=parallel, **{argument: other if dist.get_rank() else first})


def refuse_other_model() -> None:
    width = 8 + dist.get_rank()
    net = nn.Sequential(nn.Linear(FEATURES, width), nn.Linear(width, CLASSES))
    Trainer(net, parallel="ddp", device="cpu", progress=False)


def refuse_other_evaluation() -> tuple[str, str]:
    """Evaluate on other data on each rank, then evaluate together."""
    trainer = make_trainer(parallel="ddp")
    rows = 8 + dist.get_rank()
    found = raised(lambda: trainer.eval(make_loader(rows, 4, shuffle=False)))
    assert trainer.eval(make_loader(8, 4, shuffle=False))["loss"] > 0
    return found


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
    """Draws from what nobody seeds; or has no rows, and says that it has."""

    def __init__(self, rows: int, *, gives: bool = True) -> None:
        self._rows, self._gives = rows, gives

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[int]:
        rows = range(self._rows) if self._gives else ()
        return iter(sorted(rows, key=lambda _: os.urandom(8)))


def refuse_sampler(argument: str, *, gives: bool) -> tuple[str, str, int]:
    """Draw another order on each rank, or none; what was raised after how many batches."""
    loader: Any = DataLoader(make_data(32), batch_size=4, sampler=Unseeded(32, gives=gives))
    trainer = make_trainer(parallel="ddp", **{argument: loader})
    return *raised(trainer.fit), trainer.state.batch


def evaluate_little(kind: str, rows: int) -> dict[str, float]:
    """Evaluate on fewer rows, or on fewer batches of a sampler's own, than there are ranks."""
    data = make_data(rows)
    loader: DataLoader[Any] = DataLoader(data, batch_size=4)
    if kind == "batches":
        sampler = WholeBatches(SequentialSampler(range(rows)), rows, drop_last=False)
        loader = DataLoader(data, batch_sampler=sampler)
    trainer = make_trainer(parallel="ddp", eval_dataloader=loader)
    trainer.fit()
    return dict(trainer.state.eval.metrics)


def with_batchnorm() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()


def train_batchnorm(rows: int) -> tuple[int, int]:
    """Train where the last batch has an odd number of rows; batches, and rows of all ranks."""
    loader = DataLoader(make_data(rows), batch_size=4)
    options: dict[str, Any] = {"eval_dataloader": None, "max_duration": "1ep"}
    trainer = make_trainer(
        with_batchnorm(), train_dataloader=loader, parallel="ddp", batchnorm="ignore", **options
    )
    summary = trainer.fit()
    return int(summary.steps), int(summary.samples)


def train_on_one_row() -> None:
    """One row on the last rank, where BatchNorm needs two."""
    microbatcher = Microbatcher(
        DistributedDataParallel(with_batchnorm()), loss_fn=nn.CrossEntropyLoss(), probe=False
    )
    rows = 4 - 3 * (dist.get_rank() == dist.get_world_size() - 1)
    data = TensorDataset(torch.randn(rows, FEATURES).double(), torch.zeros(rows, dtype=torch.long))
    microbatcher.backward(data[:])


class FailsOnLast(Callback):
    """Fails on the last rank at one event."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._fail)

    def _fail(self, run: Any, *_: Any) -> None:
        if run.rank == run.world_size - 1:
            raise KeyError("broken")


def fail_at(event: str) -> None:
    make_trainer(callbacks=[FailsOnLast(event)], parallel="ddp").fit()


@pytest.mark.parametrize(
    ("case", "parallel"),
    [*((case, "ddp") for case in CASES), ("metrics", "fsdp"), ("max_duration", "fsdp")],
)
def test_what_differs_is_named_with_the_value_of_each_rank(
    world2: World, case: str, parallel: str
) -> None:
    (kind, text), other = world2.ends(refuse, case, parallel)
    assert other == (kind, text)
    assert kind == "DesyncError"
    argument, _, _, said = CASES[case]
    assert ("" if case in WITHIN else argument) + said in text
    assert "Give all ranks the same" in text
    names = 2 if case == "named" else 1
    assert text.count("\n") == 1 + names, "a line for what differs, and no other"


def test_models_of_different_shapes_are_named_by_their_parameters(world2: World) -> None:
    for kind, text in world2.ends(refuse_other_model):
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


def test_what_may_differ_does(world2: World, tmp_path: Any) -> None:
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
    for kind, text, batches in world2.run(refuse_sampler, argument, gives=True):
        assert kind == "DesyncError"
        assert f"the rows of {argument} come in another order" in text
        assert "(order 1 on rank 0; order 2 on rank 1)" in text
        assert "give its generator a fixed seed" in text
        assert (batches == 0) is (argument == "train_dataloader")


@pytest.mark.parametrize("argument", ["train_dataloader", "eval_dataloader"])
def test_data_that_give_no_rank_a_batch_are_an_error(world2: World, argument: str) -> None:
    for kind, text, _ in world2.run(refuse_sampler, argument, gives=False):
        assert kind == "DataLoaderError"
        assert f"{argument} (DataLoader) gave no batch" in text


@pytest.mark.parametrize(("kind", "rows"), [("rows", 1), ("batches", 8)])
def test_fewer_rows_or_batches_than_ranks_are_evaluated(
    world2: World, kind: str, rows: int
) -> None:
    first, second = world2.run(evaluate_little, kind, rows)
    assert first == second
    assert set(first) == {"loss", "accuracy"}


@pytest.mark.parametrize("rows", [10, 11, 13])
def test_no_rank_gets_a_single_row_for_batchnorm(world2: World, rows: int) -> None:
    # The last batch has 2, 3 or 5 rows for two ranks.
    assert world2.run(train_batchnorm, rows) == [(2, rows)] * 2


def test_a_single_row_of_a_rank_is_explained_with_its_remedy(world2: World) -> None:
    (kind, _), (own_kind, own) = world2.ends(train_on_one_row)
    assert (kind, own_kind) == ("PeerFailedError", "ValueError")
    assert "this rank has one of 5 rows. Use drop_last=True" in own


BETWEEN = "rolled nothing back, so ranks may be one step apart"


@pytest.mark.parametrize(
    ("event", "said"),
    [
        *((event, BETWEEN) for event in ("batch_end", "gradients_ready", "epoch_end")),
        ("forward_start", "rolled back on this rank: the state is as before it"),
    ],
)
def test_a_rank_that_stops_says_whether_it_is_as_before(
    world2: World, event: str, said: str
) -> None:
    (kind, text), (own_kind, _) = world2.ends(fail_at, event)
    assert (kind, own_kind) == ("PeerFailedError", "KeyError")
    assert said in text
    assert said is not BETWEEN or "as before" not in text
