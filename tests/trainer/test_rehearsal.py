"""Rehearsal of the worst batches: its findings, and that it affects only sizes."""

import copy
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torchmetrics.classification import MulticlassAccuracy

from automicro import Callback, Microbatcher, SampleTooLargeError
from automicro.callbacks import ExponentialMovingAverage
from automicro.checkpoints.rng import rng_state
from automicro.checkpoints.store import CheckpointConfig
from automicro.trainer.data.sharing import LoaderSharing
from automicro.trainer.processes import Process
from automicro.trainer.rehearsal import (
    CLASSES,
    COSTLIEST,
    RehearsalReport,
    find_costliest,
    undisturbed,
)
from automicro.values import same_values
from tests.trainer.rehearsals import (
    WORDS,
    Model,
    Texts,
    count_ooms,
    loader_of,
    log_normal,
    make_trainer,
    padded,
)
from tests.trainer.runs import assert_same, losses_of


def report_of(trainer: Any) -> RehearsalReport:
    assert trainer._fit.rehearsal.report is not None
    report: RehearsalReport = trainer._fit.rehearsal.report
    return report


def limit_for(lengths: list[int], *, rows: int) -> int:
    """Return the bytes in which so many of the longest rows fit, and one more may not."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    longest = torch.zeros(rows, max(lengths), dtype=torch.int64)
    microbatcher = Microbatcher(
        model, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, memory_limit="1GiB", probe=False
    )
    with microbatcher.rehearsing():
        peak = microbatcher.backward((longest, longest)).peak_bytes
    assert peak is not None
    return int(peak * 1.02)


class Cutting(Callback):
    """Cuts batches to random lengths."""

    def __init__(self) -> None:
        self.random = random.Random(2)

    def transform(self, run: Any, batch: Any) -> Any:
        keep = self.random.randint(2, 10)
        return batch[0][:, :keep], batch[1][:, :keep]


@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": [Cutting()]},
        {"precision": "fp16", "callbacks": [ExponentialMovingAverage(decay=0.9)]},
        pytest.param({"num_workers": 2, "accumulate_batches": 3}, marks=pytest.mark.sweep),
    ],
    ids=["transformed", "scaled", "workers"],
)
def test_rehearsal_leaves_run_bit_identical(options: dict[str, Any]) -> None:
    def train(rehearse: str | None) -> tuple[nn.Module, list[float], Any, list[float]]:
        given = copy.deepcopy(options)
        order = {"shuffle": True, "num_workers": given.pop("num_workers", 0)}
        model = Model(dropout=0.3)
        trainer = make_trainer(
            model,
            loader_of(log_normal(3, 60), generator=torch.Generator().manual_seed(4), **order),
            eval_dataloader={"a": loader_of(log_normal(4, 20)), "b": loader_of(log_normal(5, 20))},
            metrics={"accuracy": MulticlassAccuracy(WORDS, multidim_average="global")},
            max_duration="2ep",
            grad_clip_norm=1.0,
            rehearse=rehearse,
            **given,
        )
        losses = losses_of(trainer)
        summary = trainer.fit()
        return model, losses, dict(summary.eval_metrics), [*summary.train_metrics.values()]

    (one, *numbers), (other, *others) = train("worst"), train(None)
    states = rng_state()
    assert_same(one, other)
    assert numbers == others
    train(None)
    assert same_values(states, rng_state())  # the same state as after the second run


def test_rehearsal_with_ooms_matches_run_with_found_sizes() -> None:
    lengths = log_normal(6, 96)
    limit = limit_for(lengths, rows=3)

    class Keeping(Callback):
        found: Any = None

        def rehearsal_end(self, run: Any, report: RehearsalReport) -> None:
            self.found = rehearsed._microbatcher.state_dict()

    def trainer(model: nn.Module, **options: Any) -> Any:
        loader = loader_of(lengths, shuffle=True)
        return make_trainer(model, loader, memory_limit=limit, **options)

    keeping, model, other = Keeping(), Model(dropout=0.3), Model(dropout=0.3)
    rehearsed = trainer(model, callbacks=[keeping])
    summary = rehearsed.fit()
    assert report_of(rehearsed).ooms > 0
    assert summary.ooms == 0
    plain = trainer(other, rehearse=None)
    plain._microbatcher.load_state_dict(keeping.found)
    assert plain.fit().train_loss == summary.train_loss
    assert_same(model, other)
    # Without these sizes, the run itself runs out of memory.
    assert trainer(Model(), rehearse=None).fit().ooms > 0


@pytest.mark.sweep
def test_resumed_run_skips_rehearsal_and_is_bit_identical(tmp_path: Path) -> None:
    class Stopper(Callback):
        def batch_end(self, run: Any, result: Any) -> None:
            if run.state.batch == 3:
                run.stop("enough for now")

    def train(folder: str, *callbacks: Callback) -> Any:
        saved = CheckpointConfig(folder=tmp_path / folder, interval="1ba")
        options: dict[str, Any] = {"max_duration": "2ep", "memory_limit": limit_for([40], rows=3)}
        loader = loader_of(log_normal(7, 48), shuffle=True)
        trainer = make_trainer(
            Model(dropout=0.3), loader, callbacks=callbacks, checkpoint=saved, **options
        )
        trainer.fit()
        return trainer

    whole = train("one")
    assert train("two", Stopper()).state.batch == 3
    resumed = train("two")
    assert resumed._fit.rehearsal.report is None
    assert_same(whole._run.model, resumed._run.model)


def test_longest_batch_that_never_fits_fails_before_first_step() -> None:
    lengths = [6] * 72 + [5, 5, 5, 5, 5, 5, 5, 90]
    limit = limit_for([40], rows=1)
    steps: list[int] = []
    for rehearse in (None, "worst"):
        trainer = make_trainer(
            Model(), loader_of(lengths), memory_limit=limit, rehearse=rehearse, max_duration="2ep"
        )
        with pytest.raises(SampleTooLargeError) as caught:
            trainer.fit()
        steps.append(trainer.state.batch)
    assert steps == [9, 0]
    [where] = [note for note in caught.value.__notes__ if "rehearsal" in note]
    assert "batch 10 of train_dataloader (rows 72, 73, 74" in where
    assert "the costliest of all 10 batches" in where


class Stream(IterableDataset[Tensor]):
    """Rows without indices, which can be iterated only once or differ in each pass."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self.lengths, self.passes = lengths, 0
        self.once = (torch.full((length,), 3) for length in lengths)

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        if isinstance(self.lengths, Iterator):
            return self.once
        return (torch.full((length + self.passes,), 3) for length in self.lengths)


def streamed(lengths: Iterable[int]) -> DataLoader[Any]:
    return DataLoader(Stream(lengths), batch_size=2, collate_fn=padded)


def test_stream_without_indices_is_scanned() -> None:
    trainer = make_trainer(Model(), streamed([2, 8, 29, 3]))
    trainer.fit()
    worst = report_of(trainer).batches[0]
    assert worst.batch is not None
    assert (worst.batch.index, worst.batch.rows, worst.batch.cost) == (1, (), 2 * 2 * 30)
    assert trainer.state.batch == 2


def test_single_pass_data_is_refused_and_not_consumed() -> None:
    loader = streamed(iter((3, 5, 4, 7)))
    batches = iter([padded([torch.zeros(3, dtype=torch.int64)])])
    for data, name in ((loader, "Stream"), (batches, "list_iterator")):
        message = rf"train_dataloader \({name}\) can be iterated only once"
        with pytest.raises(ValueError, match=message):
            make_trainer(Model(), data).fit()
    assert len(list(loader)) == 2
    data = loader_of([3] * 8)
    summary = make_trainer(Model(), data, eval_dataloader=batches, eval_interval="1ep").fit()
    assert "eval_dataloader was not checked: it can be" in (summary.rehearsed or "")


def test_batch_beyond_duration_does_not_end_run() -> None:
    loader = loader_of([6] * 72 + [5, 5, 5, 5, 5, 5, 5, 90])
    options: dict[str, Any] = {"memory_limit": limit_for([40], rows=1), "accumulate_batches": 2}
    trainer = make_trainer(Model(), loader, max_duration="4ba", **options)
    trainer.fit()
    assert report_of(trainer).looked_at == {"train_dataloader": "all 8 batches"}
    with pytest.raises(SampleTooLargeError):
        make_trainer(Model(), loader, max_duration="5ba", **options).fit()


def test_oom_of_evaluation_is_found_beside_optimizer_state() -> None:
    lengths = [6] * 32
    trainer = make_trainer(
        Model(),
        loader_of(lengths),
        eval_dataloader=loader_of([40] * 64, batch_size=64),
        memory_limit=limit_for(lengths, rows=8) * 2,
    )
    summary = trainer.fit()
    [evaluated] = [each for each in report_of(trainer).batches if each.loader == "eval_dataloader"]
    assert evaluated.ooms > 0
    assert summary.eval_ooms == 0


def test_unchecked_batches_are_reported(mocker: Any) -> None:
    mocker.patch("automicro.trainer.rehearsal.SCANNED_BATCHES", 3)
    trainer = make_trainer(Model(), loader_of(log_normal(8, 80)))
    summary = trainer.fit()
    assert "of the first 3 of 10 batches of train_dataloader fit" in (summary.rehearsed or "")
    assert "unchecked batches of train_dataloader may be costlier" in (summary.rehearsed or "")


def test_rehearsal_of_accumulated_batches_keeps_earlier_gradients() -> None:
    """Without the gradients of the first wide batch, the second one would fit."""
    loader = [(torch.randn(32, 256), torch.zeros(32, dtype=torch.int64))] * 2
    peaks = {}
    for batches in (1, 2):
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 2))
        options: dict[str, Any] = {"accumulate_batches": batches, "memory_limit": "16MiB"}
        trainer = make_trainer(model, loader, optimizer=torch.optim.SGD, **options)
        summary = trainer.fit()
        worst = report_of(trainer).batches[0]
        assert str(worst.cut) == "1 × 32 of 32"
        assert worst.peak_bytes is not None
        assert summary.peak_memory_bytes is not None
        assert worst.peak_bytes == pytest.approx(summary.peak_memory_bytes, rel=0.01)
        peaks[batches] = worst.peak_bytes
    assert peaks[2] > peaks[1]


def test_optimizer_with_unpredictable_first_step_is_named() -> None:
    steps_of_all = torch.zeros(())

    class Counted(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            steps_of_all.add_(1)
            return super().step(closure)

    rehearsed = make_trainer(Model(), loader_of([5] * 16), optimizer=Counted).fit().rehearsed or ""
    assert "the optimizer's first step needs unknown memory" in rehearsed
    assert "a tensor that is neither a parameter nor state" in rehearsed
    assert steps_of_all == 2
    known = make_trainer(Model(), loader_of([5] * 16)).fit().rehearsed or ""
    assert "unknown" not in known


# The search for the costliest batches


class KnownCosts(Sampler[list[int]]):
    """Batches with known costs, so no row has to be loaded."""

    def __init__(self, costs: dict[tuple[int, ...], float]) -> None:
        self.costs = costs

    def __iter__(self) -> Iterator[list[int]]:
        return (list(rows) for rows in self.costs)

    def __len__(self) -> int:
        return len(self.costs)

    def batch_costs(self) -> list[float]:
        return list(self.costs.values())


def test_each_rank_finds_costs_of_its_own_batches() -> None:
    sampler = KnownCosts({(0,): 1.0, (1, 2): 9.0, (3, 4, 5): 2.0, (6,): 5.0})
    loader: Any = DataLoader([], batch_sampler=sampler)  # type: ignore[arg-type]
    found = []
    for rank in range(2):
        place = Process(rank=rank, world_size=2, local_rank=rank)
        shared = LoaderSharing(place, seed=3).share(loader, "train_dataloader")
        scan = find_costliest(shared, "train_dataloader")
        found.append([(each.index, each.cost, each.rows) for each in scan.batches])
    assert found == [[(1, 2.0, (3, 4, 5)), (0, 1.0, (0,))], [(0, 9.0, (1, 2)), (1, 5.0, (6,))]]


@pytest.mark.parametrize("seed", range(3))
def test_costliest_and_longest_batches_are_found(seed: int) -> None:
    source = random.Random(seed)
    lengths = log_normal(seed, 200, most=400)
    order = [sorted(source.sample(range(200), source.randint(1, 9))) for _ in range(60)]
    loader = DataLoader(Texts(lengths), batch_sampler=order, collate_fn=padded)
    scan = find_costliest(loader, "train_dataloader", rows_of=lambda batch: len(batch[0]))
    row_costs = [2 * max(lengths[row] for row in rows) for rows in order]
    costs = [len(rows) * cost for rows, cost in zip(order, row_costs, strict=True)]
    found = [each.index for each in scan.batches]
    assert [costs[index] for index in found[:COSTLIEST]] == sorted(costs)[: -COSTLIEST - 1 : -1]
    assert max(row_costs) in [row_costs[index] for index in found]
    assert len(found) == len(set(found)) <= COSTLIEST + 1 + CLASSES
    for each in scan.batches:
        again = each.make()
        assert (2 * again[0].numel(), each.rows) == (each.cost, tuple(order[each.index]))


def test_search_does_not_advance_pass_counter_of_stream() -> None:
    loader = streamed([0, 1, 2, 3, 4, 5])
    with undisturbed(loader):
        scan = find_costliest(loader, "train_dataloader")
    first, second, third = (batch[0].shape[1] for batch in loader)
    assert [each.cost for each in scan.batches[:3]] == [4 * third, 4 * second, 4 * first]
    assert scan.seen == scan.total == 3


def test_search_is_limited(mocker: Any) -> None:
    scan = find_costliest(loader_of([3, 3, 90, 90], 2), "eval_dataloader", most_batches=1)
    assert [each.index for each in scan.batches] == [0]
    assert str(scan) == "all 1 batches"
    mocker.patch("automicro.trainer.rehearsal.SCANNED_BATCHES", 4)
    scan = find_costliest(streamed([1] * 50), "train_dataloader")
    assert str(scan) == "the first 4 of an unknown number of batches"
    assert not scan.is_complete


# Whole runs


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(40, 80), marks=pytest.mark.sweep),
        pytest.param(range(200), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_rehearsed_runs_do_not_run_out_of_memory(seeds: range) -> None:
    assert any(count_ooms(seed, rehearse=None)[0] for seed in seeds[:3])
    assert [seed for seed in seeds if count_ooms(seed, rehearse="worst")[0]] == []
