"""Runs that resume within an epoch on another number of ranks, even before its last batch."""

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
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

from automicro import Callback, CheckpointConfig, CheckpointError, Microbatcher, Trainer
from automicro.data import LengthBatchSampler
from automicro.features import UpdateMetric
from tests.loaders import WholeBatches, seeded_generator
from tests.ranks.test_trainer import differ
from tests.ranks.trainer_jobs import CLASSES, Net, make_data
from tests.ranks.world import World, on_ranks
from tests.ranks.wrapping import (
    furthest,
    require_alike,
    require_told,
    whole_gradients,
    whole_parameters,
    wrapped,
)

pytestmark = pytest.mark.sweep

PER_BATCH = 12
"""Rows of a batch over all ranks; a multiple of 1, 2, 3 and 4."""


class Rows(Dataset[Any]):
    """Rows with their indices."""

    def __init__(self, rows: int) -> None:
        self._data = make_data(rows)
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Any:
        inputs, target = self._data[index]
        return {"row": index, "inputs": inputs, "target": target}


SAMPLERS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "in order": lambda data, rows: {"sampler": SequentialSampler(data)},
    "shuffled": lambda data, rows: {"shuffle": True},
    "shuffled by a generator": lambda data, rows: {
        "shuffle": True,
        "generator": seeded_generator(),
    },
    "sampler with a generator": lambda data, rows: {
        "sampler": RandomSampler(data, generator=seeded_generator())
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


# Metrics with different reductions: sum, concatenation and maximum.
METRICS: dict[str, Callable[[], Metric]] = {
    "accuracy": lambda: MulticlassAccuracy(CLASSES, average="micro"),
    "area": BinaryAUROC,
    "highest": MaxMetric,
    "logits": CatMetric,
}


class Notes(Callback):
    """Records the rows and the loss of every batch."""

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
    loader: DataLoader[Any],
    *,
    metrics: Sequence[str] = ("accuracy", "area", "highest"),
    **options: Any,
) -> dict[str, Any]:
    """Resume from the newest checkpoint, train, save, and return all results."""
    notes = Notes()
    settings: dict[str, Any] = {
        "forward": forward,
        "loss_average": "samples",
        "optimizer": torch.optim.AdamW,
        "metrics": {name: METRICS[name]() for name in metrics},
        "features": [UpdateMetric(update_metric)],
        "parallel": "ddp",
        "device": "cpu",
        "progress": False,
        "seed": 0,
        "max_duration": until,
        "callbacks": [notes],
        "checkpoint": None if folder is None else CheckpointConfig(folder=folder),
    }
    trainer = Trainer(Net(), loader, **{**settings, **options})
    summary = trainer.fit()
    return {
        "rows": notes.rows,
        "losses": notes.losses,
        "parameters": whole_parameters(trainer._run.model),
        "metrics": dict(summary.train_metrics) | dict(summary.eval_metrics),
        "state": (trainer.state.batch, trainer.state.epoch, trainer.state.samples),
    }


def train_from(folder: Path | None, until: str, rows: int, sampler: str, **options: Any) -> Any:
    drop_last = options.pop("drop_last", False)
    per_batch = options.pop("per_batch", PER_BATCH)
    loader = make_loader(rows, sampler, drop_last=drop_last, per_batch=per_batch)
    return train(folder, until, loader, **options)


def train_planned(folder: Path | None, until: str, mode: str, **options: Any) -> Any:
    """Train on batches by length; two make up an optimization batch at any number of ranks."""
    data = Rows(61)
    lengths = [1 + 7 * row % 11 for row in range(61)]
    budget: Any = {"batch_size": 5} if mode == "fixed" else {"batch_length": 30.0}
    sampler = LengthBatchSampler(data, mode=mode, lengths=lengths, unit="seconds", **budget)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    settings: dict[str, Any] = {"accumulate_batches": 2 // world_size, **options}
    return train(folder, until, DataLoader(data, batch_sampler=sampler), **settings)


def train_batch_sampled(folder: Path, until: str) -> Any:
    """Train on batches that the caller's batch sampler cuts."""
    sampler = WholeBatches(range(61), 4, drop_last=False)
    return train(folder, until, DataLoader(Rows(61), batch_sampler=sampler))


class Unsendable:
    """Cannot be sent to another process."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


def take_steps(
    kind: str | None, rows: list[int], *, tag: Any = "x", limit: str | None = None
) -> tuple[list[int], list[Tensor]]:
    """Take two steps on so many rows of each rank; return their votes, and the gradients."""
    model = wrapped(kind, Net())
    rank = dist.get_rank() if kind else 0
    data = make_data(sum(rows))
    mine = [data[sum(rows[:rank]) + row] for row in range(rows[rank])]
    batch: Any = None
    if mine:
        inputs, targets = (torch.stack(each) for each in zip(*mine, strict=True))
        batch = {"inputs": inputs, "target": targets, "tag": [tag] * len(mine)}
    microbatcher = Microbatcher(
        model, forward=forward, loss_average="samples", probe=False, memory_limit=limit
    )
    votes = [0]
    for _ in range(2):
        model.zero_grad()
        microbatcher.backward(batch)
        votes.append(getattr(microbatcher.ranks, "num_votes", 0))
    return votes, whole_gradients(model)


ROWS = 3 * PER_BATCH + 1  # one row in the last batch
KINDS = ["ddp", "fsdp"]


def merged(results: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return the rows of all ranks, keyed by batch number."""
    batches = {batch for result in results for batch in result["rows"]}
    return {
        batch: sorted(row for result in results for row in result["rows"].get(batch, []))
        for batch in sorted(batches)
    }


def check_chain(worlds: list[World], folder: Path, sampler: str, **options: Any) -> None:
    """Each world trains on one batch, and the last world until the end."""
    rows = options.pop("rows", ROWS)
    [expected, *_] = results = worlds[0].run(train_from, None, "2ep", rows, sampler, **options)
    wanted = merged(results)
    seen: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    for number, world in enumerate(worlds, start=1):
        until = "2ep" if number == len(worlds) else f"{number}ba"
        results = world.run(train_from, folder, until, rows, sampler, **options)
        assert not seen.keys() & merged(results).keys()
        seen |= merged(results)
        losses |= results[0]["losses"]
    assert seen == wanted
    assert losses == pytest.approx(expected["losses"], abs=1e-9)
    require_same(results, expected)


def require_same(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert differ(results, expected) < 1e-9
    for result in results:
        assert result["metrics"] == pytest.approx(expected["metrics"], abs=1e-6)
        assert result["state"] == expected["state"]


@pytest.mark.parametrize(
    ("kind", "sampler"), [("ddp", "shuffled"), ("fsdp", "shuffled by a generator")]
)
def test_each_row_is_trained_once_at_any_world_size(
    world2: World, world3: World, tmp_path: Path, kind: str, sampler: str
) -> None:
    # The last world resumes right before the batch with one row.
    check_chain([world2, world3, world2, world3], tmp_path, sampler, parallel=kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_runs_resume_between_one_and_four_ranks(
    worlds: Callable[[int], World], tmp_path: Path, kind: str, sampler: str
) -> None:
    # The last batch has three rows, so one of four ranks has none.
    options = {"rows": 5 * PER_BATCH + 3, "parallel": kind}
    chain = [worlds(size) for size in (4, 1, 3, 2, 4, 3)]
    check_chain(chain, tmp_path / "all", sampler, **options)
    check_chain(chain[:1] + chain[3:4], tmp_path / "dropped", sampler, drop_last=True, **options)
    options = {"rows": 7 * PER_BATCH + 1, "accumulate_batches": 2, "parallel": kind}
    check_chain(chain[2:4] * 2, tmp_path / "accumulated", sampler, **options)


@pytest.mark.parametrize(
    ("kind", "mode"), [("ddp", "duration"), ("fsdp", "fixed"), ("ddp", "1D-bucketing-dyn")]
)
def test_batches_by_length_keep_rows_after_resharding(
    world1: World, world2: World, tmp_path: Path, kind: str, mode: str
) -> None:
    # Buckets are dealt to the number of ranks that began the epoch.
    is_dealt = mode == "1D-bucketing-dyn"
    worlds = [world2, world1] if is_dealt else [world2, world1, world2, world1]
    last = "1ep" if is_dealt else "2ep"
    expected = worlds[0].run(train_planned, None, "2ep", mode, parallel=kind)
    seen: dict[int, list[int]] = {}
    for number, world in enumerate(worlds, start=1):
        until = last if number == len(worlds) else f"{number}ba"
        results = world.run(train_planned, tmp_path, until, mode, parallel=kind)
        seen |= merged(results)
    assert seen == {batch: rows for batch, rows in merged(expected).items() if batch in seen}
    rows = sorted(itertools.chain.from_iterable(seen.values()))
    assert rows == sorted([*range(61)] * int(last[0]))
    if not is_dealt:
        assert differ(results, expected[0]) < 1e-9
        assert results[0]["state"] == expected[0]["state"]


@pytest.mark.parametrize(
    ("work", "arguments", "options", "said"),
    [
        (
            train_from,
            (ROWS, "shuffled"),
            {"per_batch": 18},
            [
                "2 ranks saved it after 1 batches",
                "entries_per_step=12 (here 18). Pass the same data",
                "resume with 2 ranks, or from a checkpoint of the end of an epoch",
            ],
        ),
        (
            train_planned,
            ("duration",),
            {"accumulate_batches": 1},
            [
                "made of 2 batches of train_dataloader (ranks × accumulate_batches)",
                "2 is not a multiple of 3 ranks",
            ],
        ),
        (train_batch_sampled, (), {}, ["let the DataLoader cut batches of "]),
    ],
    ids=["rows", "lengths", "batch sampler"],
)
def test_other_optimization_batch_is_refused_without_changes(
    worlds: Callable[[int], World],
    tmp_path: Path,
    work: Callable[..., Any],
    arguments: Any,
    options: dict[str, Any],
    said: list[str],
) -> None:
    worlds(2).run(work, tmp_path, "1ba", *arguments)
    for kind, error in worlds(3).ends(work, tmp_path, "2ep", *arguments, **options):
        assert kind == "CheckpointError"
        assert all(each in error for each in said), error
    assert worlds(2).run(work, tmp_path, "1ep", *arguments)[0]["state"][1] == 1


def test_single_process_with_unshared_order_is_refused(world2: World, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    here = {"parallel": None, "seed": None}
    world2.run(train_from, tmp_path / "two", "1ba", ROWS, "shuffled")
    with pytest.raises(CheckpointError, match="pass parallel='ddp' also in one process"):
        train_from(tmp_path / "two", "2ep", ROWS, "shuffled", **here)
    train_from(tmp_path / "one", "1ba", ROWS, "shuffled", **here)
    torch.set_rng_state(state)
    for _, error in world2.ends(train_from, tmp_path / "one", "2ep", ROWS, "shuffled"):
        assert "pass parallel='ddp' also in one process" in error


# Fewer rows than ranks before a rank has received any row


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_on_single_row(world2: World, kind: str) -> None:
    metrics = ("accuracy", "logits")
    arguments: Any = (None, "2ep", 1, "in order")
    first, second = world2.run(train_from, *arguments, parallel=kind, metrics=metrics)
    assert (first["rows"], second["rows"]) == ({0: [0], 1: [0]}, {})
    alone = train_from(*arguments, parallel=None, seed=None, metrics=metrics)
    assert first["losses"] == second["losses"] == pytest.approx(alone["losses"], abs=1e-9)
    require_same([first, second], alone)


@on_ranks()
def test_two_ranks_evaluate_single_row() -> None:
    loader = make_loader(1, "in order")
    options: Any = {"forward": forward, "loss_average": "samples", "parallel": "fsdp"}
    trainer = Trainer(Net(), eval_dataloader=loader, device="cpu", progress=False, **options)
    found = trainer.eval()
    assert found["loss"] > 0
    require_alike(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[5, 0], [0, 5]])
@on_ranks()
def test_rows_are_lent_once_without_cost_in_settled_steps(kind: str, rows: list[int]) -> None:
    full, _ = take_steps(kind, [3, 2], limit="64MiB")
    votes, gradients = take_steps(kind, rows, limit="64MiB")
    assert votes[2] - votes[1] == full[2] - full[1]
    assert furthest(gradients, take_steps(None, [5])[1]) < 1e-9


@on_ranks()
def test_unsendable_rows_end_all_ranks_with_reason() -> None:
    said = "another rank has no rows, and a batch of rank 1"
    work = functools.partial(take_steps, "ddp", [0, 5], tag=Unsendable())
    require_told(work, "BatchError", told="stays here", own=said)
