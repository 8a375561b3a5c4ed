"""Runs that resume within an epoch on another number of ranks, even before its last batch."""

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
from tests.ranks.world import RaisedError, World, world_of
from tests.ranks.wrapping import furthest, whole_gradients, whole_parameters, wrapped

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


SAMPLERS: dict[str, Callable[[Dataset[Any], int], dict[str, Any]]] = {
    "in order": lambda data, rows: {"sampler": SequentialSampler(data)},  # type: ignore[arg-type]
    "shuffled": lambda data, rows: {"shuffle": True},
    "shuffled by a generator": lambda data, rows: {
        "shuffle": True,
        "generator": seeded_generator(),
    },
    "sampler with a generator": lambda data, rows: {
        "sampler": RandomSampler(data, generator=seeded_generator())  # type: ignore[arg-type]
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


def make_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Make metrics with different reductions: sum, concatenation and maximum."""
    metrics = {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "area": BinaryAUROC(),
        "highest": MaxMetric(),
        "logits": CatMetric(),
    }
    return {name: metrics[name] for name in names}


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
    *,
    loader: DataLoader[Any],
    parallel: str | None = "ddp",
    metrics: Sequence[str] = ("accuracy", "area", "highest"),
    **options: Any,
) -> dict[str, Any]:
    """Resume from the newest checkpoint, train, save, and return all results."""
    notes = Notes()
    settings: dict[str, Any] = {
        "forward": forward,
        "loss_average": "samples",
        "optimizer": torch.optim.AdamW,
        "metrics": make_metrics(metrics),
        "features": [UpdateMetric(update_metric)],
        "device": "cpu",
        "progress": False,
        "seed": 0,
    }
    trainer = Trainer(
        Net(),
        loader,
        parallel=parallel,
        max_duration=until,
        callbacks=[notes],
        checkpoint=None if folder is None else CheckpointConfig(folder=folder),
        **{**settings, **options},
    )
    summary = trainer.fit()
    model = trainer._run.model
    return {
        "rows": notes.rows,
        "losses": notes.losses,
        "parameters": whole_parameters(model),
        "metrics": dict(summary.train_metrics) | dict(summary.eval_metrics),
        "state": (trainer.state.batch, trainer.state.epoch, trainer.state.samples),
    }


def train_from(folder: Path | None, until: str, rows: int, sampler: str, **options: Any) -> Any:
    drop_last = options.pop("drop_last", False)
    per_batch = options.pop("per_batch", PER_BATCH)
    loader = make_loader(rows, sampler, drop_last=drop_last, per_batch=per_batch)
    return train(folder, until, loader=loader, **options)


def train_planned(folder: Path | None, until: str, mode: str, **options: Any) -> Any:
    """Train on batches by length; two make up an optimization batch at any number of ranks."""
    data = Rows(61)
    lengths = [1 + 7 * row % 11 for row in range(61)]
    budget: Any = {"batch_size": 5} if mode == "fixed" else {"batch_length": 30.0}
    sampler = LengthBatchSampler(data, mode=mode, lengths=lengths, unit="seconds", **budget)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    settings: dict[str, Any] = {"accumulate_batches": 2 // world_size, **options}
    return train(folder, until, loader=DataLoader(data, batch_sampler=sampler), **settings)


def train_batch_sampled(folder: Path, until: str) -> Any:
    """Train on batches that the caller's batch sampler cuts."""
    sampler = WholeBatches(range(61), 4, drop_last=False)
    return train(folder, until, loader=DataLoader(Rows(61), batch_sampler=sampler))


def evaluate_few(rows: int, parallel: str) -> dict[str, float]:
    """Evaluate on fewer rows than ranks, as the first action of a trainer."""
    trainer = Trainer(
        Net(),
        eval_dataloader=make_loader(rows, "in order"),
        forward=forward,
        loss_average="samples",
        parallel=parallel,
        device="cpu",
        progress=False,
        seed=0,
    )
    return trainer.eval()


class Unsendable:
    """Cannot be sent to another process."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


def take_steps(
    kind: str, rows: list[int], *, sendable: bool = True, limit: str | None = None
) -> tuple[list[int], list[Tensor]]:
    """Take two steps on so many rows of each rank; return their votes, and the gradients."""
    torch.manual_seed(3)
    model: nn.Module = Net()
    model = wrapped(kind, model)
    rank = dist.get_rank() if kind != "plain" else 0
    data = make_data(sum(rows) if kind != "plain" else rows[0])
    loaded = [data[row] for row in range(sum(rows))]
    start = sum(rows[:rank])
    mine = loaded[start : start + rows[rank]]
    batch: Any = None
    if mine:
        inputs, targets = (torch.stack(each) for each in zip(*mine, strict=True))
        batch = {"inputs": inputs, "target": targets, "tag": ["x"] * len(mine)}
        if not sendable:
            batch["tag"] = [Unsendable() for _ in mine]
    microbatcher = Microbatcher(
        model, forward=forward, loss_average="samples", probe=False, memory_limit=limit
    )
    votes = []
    for _ in range(2):
        model.zero_grad()
        before = getattr(microbatcher.ranks, "num_votes", 0)
        microbatcher.backward(batch)
        votes.append(getattr(microbatcher.ranks, "num_votes", 0) - before)
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
    expected = worlds[0].run(train_from, None, "2ep", rows, sampler, **options)
    seen: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    for number, world in enumerate(worlds, start=1):
        until = "2ep" if number == len(worlds) else f"{number}ba"
        results = world.run(train_from, folder, until, rows, sampler, **options)
        assert not seen.keys() & merged(results).keys()
        seen |= merged(results)
        losses |= results[0]["losses"]
    assert seen == merged(expected)
    assert losses == pytest.approx(expected[0]["losses"], abs=1e-9)
    assert differ(results, expected[0]) < 1e-9
    for result in results:
        assert result["metrics"] == pytest.approx(expected[0]["metrics"], abs=1e-6)
        assert result["state"] == expected[0]["state"]


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
    world1: World,
    world2: World,
    world3: World,
    world4: World,
    tmp_path: Path,
    kind: str,
    sampler: str,
) -> None:
    # The last batch has three rows, so one of four ranks has none.
    options = {"rows": 5 * PER_BATCH + 3, "parallel": kind}
    worlds = [world4, world1, world3, world2, world4, world3]
    check_chain(worlds, tmp_path / "all", sampler, **options)
    worlds = [world1, world4, world2]
    check_chain(worlds, tmp_path / "dropped", sampler, drop_last=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_batches_keep_rows_after_resharding(
    world2: World, world3: World, tmp_path: Path, kind: str
) -> None:
    options = {"rows": 7 * PER_BATCH + 1, "accumulate_batches": 2, "parallel": kind}
    check_chain([world2, world3, world2, world3], tmp_path, "shuffled", **options)


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
    first = {batch: rows for batch, rows in merged(expected).items() if batch in seen}
    assert seen == first
    rows = sorted(itertools.chain.from_iterable(seen.values()))
    assert rows == sorted(list(range(61)) * (1 + (last == "2ep")))
    if last == "2ep":
        assert differ(results, expected[0]) < 1e-9
        assert results[0]["state"] == expected[0]["state"]


def test_changed_optimization_batch_by_length_is_refused(
    world2: World, world3: World, tmp_path: Path
) -> None:
    world2.run(train_planned, tmp_path, "1ba", "duration")
    arguments = (train_planned, tmp_path, "2ep", "duration")
    for _, error in world3.ends(*arguments, accumulate_batches=1):
        assert "made of 2 batches of train_dataloader (ranks × accumulate_batches)" in error
        assert "2 is not a multiple of 3 ranks" in error


def test_changed_global_batch_is_refused_without_changes(
    world2: World, world3: World, tmp_path: Path
) -> None:
    options: Any = {"parallel": "ddp"}
    world2.run(train_from, tmp_path, "1ba", ROWS, "shuffled", **options)
    arguments = (train_from, tmp_path, "2ep", ROWS, "shuffled")
    for kind, error in world3.ends(*arguments, per_batch=18, **options):
        assert kind == "CheckpointError"
        assert error.startswith("2 ranks saved it after 1 batches")
        assert "entries_per_step=12 (here 18). Pass the same data" in error
        assert "resume with 2 ranks, or from a checkpoint of the end of an epoch" in error
    results = world3.run(train_from, tmp_path, "2ep", ROWS, "shuffled", **options)
    assert results[0]["state"] == (8, 2, 2 * ROWS)


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


def test_batches_from_batch_sampler_are_refused(
    world2: World, world3: World, tmp_path: Path
) -> None:
    world2.run(train_batch_sampled, tmp_path, "1ba")
    for _, error in world3.ends(train_batch_sampled, tmp_path, "2ep"):
        assert "let the DataLoader cut batches of " in error


# Fewer rows than ranks before a rank has received any row


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_on_single_row(world2: World, kind: str) -> None:
    metrics = ("accuracy", "logits")
    arguments: Any = (None, "2ep", 1, "in order")
    first, second = world2.run(train_from, *arguments, parallel=kind, metrics=metrics)
    assert (first["rows"], second["rows"]) == ({0: [0], 1: [0]}, {})
    alone = train_from(*arguments, parallel=None, seed=None, metrics=metrics)
    for result in (first, second):
        assert result["losses"] == pytest.approx(alone["losses"], abs=1e-9)
        assert result["metrics"] == pytest.approx(alone["metrics"], abs=1e-6)
        assert result["state"] == (2, 2, 2)
    assert differ([first, second], alone) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_evaluate_single_row(world2: World, kind: str) -> None:
    first, second = world2.run(evaluate_few, 1, kind)
    assert first == second
    assert first["loss"] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[5, 0], [0, 5]])
def test_rows_are_lent_once_without_cost_in_settled_steps(
    world2: World, kind: str, rows: list[int]
) -> None:
    results = world2.run(take_steps, kind, rows, limit="64MiB")
    [_, settled] = world2.run(take_steps, kind, [3, 2], limit="64MiB")[0][0]
    _, expected = take_steps("plain", [5])
    for votes, gradients in results:
        assert votes[1] == settled
        assert furthest(gradients, expected) < 1e-9


def test_unsendable_rows_end_all_ranks_with_reason() -> None:
    with world_of(2) as world:
        world.start(take_steps, "ddp", [0, 5], sendable=False)
        other, owner = world.results()
    assert isinstance(other, RaisedError)
    assert isinstance(owner, RaisedError)
    assert (other.kind, owner.kind) == ("PeerFailedError", "BatchError")
    assert "another rank has no rows, and a batch of rank 1" in owner.text
    assert "stays here" in other.text
