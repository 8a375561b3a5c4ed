"""Rehearsal of the worst batches: its findings, and that it affects only sizes."""

import copy
import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from automicro import Callback, CheckpointConfig, Microbatcher, SampleTooLargeError
from automicro.callbacks import ExponentialMovingAverage
from automicro.checkpoints.rng import rng_state
from automicro.trainer.rehearsal import RehearsalReport
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


@pytest.mark.parametrize(
    "kind",
    [
        *("generator", "ema"),
        *(
            pytest.param(kind, marks=pytest.mark.sweep)
            for kind in ("plain", "shuffled", "workers", "bf16", "fp16", "accumulate")
        ),
    ],
)
def test_rehearsal_leaves_run_bit_identical(kind: str) -> None:
    def train(rehearse: str | None) -> tuple[nn.Module, list[float], Any, list[float]]:
        order: dict[str, Any] = {} if kind == "plain" else {"shuffle": True}
        if kind == "generator":
            order["generator"] = torch.Generator().manual_seed(4)
        if kind == "workers":
            order["num_workers"] = 2
        model = Model(dropout=0.3)
        trainer = make_trainer(
            model,
            loader_of(log_normal(3, 60), **order),
            eval_dataloader={"a": loader_of(log_normal(4, 20)), "b": loader_of(log_normal(5, 20))},
            metrics={"accuracy": MulticlassAccuracy(WORDS, multidim_average="global")},
            max_duration="2ep",
            grad_clip_norm=1.0,
            rehearse=rehearse,
            callbacks=[ExponentialMovingAverage(decay=0.9)] if kind == "ema" else [],
            precision=kind if kind in ("bf16", "fp16") else "fp32",
            accumulate_batches=3 if kind == "accumulate" else 1,
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
            self.found = self.sizes()

        sizes: Any = None

    keeping, model = Keeping(), Model(dropout=0.3)
    rehearsed = make_trainer(
        model, loader_of(lengths, shuffle=True), callbacks=[keeping], memory_limit=limit
    )
    keeping.sizes = rehearsed._microbatcher.state_dict
    summary = rehearsed.fit()
    assert report_of(rehearsed).ooms > 0
    assert summary.ooms == 0
    other = Model(dropout=0.3)
    plain = make_trainer(other, loader_of(lengths, shuffle=True), memory_limit=limit, rehearse=None)
    plain._microbatcher.load_state_dict(keeping.found)
    assert plain.fit().train_loss == summary.train_loss
    assert_same(model, other)
    # Without these sizes, the run itself runs out of memory.
    late = make_trainer(
        Model(), loader_of(lengths, shuffle=True), memory_limit=limit, rehearse=None
    )
    assert late.fit().ooms > 0


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


@pytest.mark.sweep
def test_resumed_run_skips_rehearsal_and_is_bit_identical(
    tmp_path: Path,
) -> None:
    lengths = log_normal(7, 48)
    limit = limit_for(lengths, rows=3)

    class Stopper(Callback):
        def batch_end(self, run: Any, result: Any) -> None:
            if run.state.batch == 3:
                run.stop("enough for now")

    def train(folder: str, *callbacks: Callback) -> tuple[nn.Module, Any]:
        model = Model(dropout=0.3)
        trainer = make_trainer(
            model,
            loader_of(lengths, shuffle=True),
            memory_limit=limit,
            max_duration="2ep",
            callbacks=callbacks,
            checkpoint=CheckpointConfig(folder=tmp_path / folder, interval="1ba"),
        )
        trainer.fit()
        return model, trainer

    whole, _ = train("one")
    _, stopped = train("two", Stopper())
    assert stopped.state.batch == 3
    resumed, trainer = train("two")
    assert trainer._fit.rehearsal.report is None
    assert_same(whole, resumed)


class Stream(IterableDataset[Tensor]):
    """Rows without indices."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Any:
        return (torch.full((length,), 3) for length in self.lengths)


def test_stream_without_indices_is_scanned() -> None:
    loader = DataLoader(Stream([3, 9, 30, 4]), batch_size=2, collate_fn=padded)
    trainer = make_trainer(Model(), loader)
    trainer.fit()
    worst = report_of(trainer).batches[0]
    assert worst.batch is not None
    assert (worst.batch.index, worst.batch.rows, worst.batch.cost) == (1, (), 2 * 2 * 30)
    assert trainer.state.batch == 2


class Once(IterableDataset[Tensor]):
    """Rows that can be iterated only once."""

    def __init__(self) -> None:
        self._rows = (torch.full((length,), 3) for length in (3, 5, 4, 7))

    def __iter__(self) -> Any:
        return self._rows


def test_single_pass_data_is_refused_and_not_consumed() -> None:
    dataset = Once()
    loader = DataLoader(dataset, batch_size=2, collate_fn=padded)
    with pytest.raises(ValueError, match=r"train_dataloader \(Once\) can be iterated only once"):
        make_trainer(Model(), loader).fit()
    assert len(list(dataset)) == 4
    batches = iter([padded([torch.zeros(3, dtype=torch.int64)])])
    with pytest.raises(ValueError, match=r"\(list_iterator\) can be iterated only once"):
        make_trainer(Model(), batches).fit()
    evaluated = make_trainer(
        Model(), loader_of([3] * 8), eval_dataloader=batches, eval_interval="1ep"
    )
    assert "eval_dataloader was not checked: it can be" in (evaluated.fit().rehearsed or "")


def test_batch_beyond_duration_does_not_end_run() -> None:
    lengths = [6] * 72 + [5, 5, 5, 5, 5, 5, 5, 90]
    limit = limit_for([40], rows=1)
    trainer = make_trainer(
        Model(), loader_of(lengths), memory_limit=limit, max_duration="4ba", accumulate_batches=2
    )
    trainer.fit()
    assert report_of(trainer).looked_at == {"train_dataloader": "all 8 batches"}
    with pytest.raises(SampleTooLargeError):
        make_trainer(
            Model(),
            loader_of(lengths),
            memory_limit=limit,
            max_duration="5ba",
            accumulate_batches=2,
        ).fit()


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


def test_callback_that_transforms_batches_is_unaffected() -> None:
    class Cutting(Callback):
        def __init__(self) -> None:
            self.calls, self.seen, self.random = 0, list[int](), random.Random(2)

        def transform(self, run: Any, batch: Any) -> Any:
            self.calls += 1
            self.seen.append(batch[0].shape[1])
            keep = self.random.randint(2, 10)
            return batch[0][:, :keep], batch[1][:, :keep]

    callbacks = [Cutting(), Cutting()]
    models = [Model(), Model()]
    for model, callback, rehearse in zip(models, callbacks, ("worst", None), strict=True):
        make_trainer(
            model, loader_of(log_normal(9, 40)), callbacks=[callback], rehearse=rehearse
        ).fit()
    assert_same(*models)
    assert callbacks[0].seen == callbacks[1].seen
    assert callbacks[0].calls == callbacks[1].calls


def test_rehearsal_of_accumulated_batches_keeps_earlier_gradients() -> None:
    """Without the gradients of the first wide batch, the second one would fit."""
    wide = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 2))
    rows = torch.utils.data.TensorDataset(torch.randn(64, 256), torch.zeros(64, dtype=torch.int64))
    loader = DataLoader(rows, batch_size=32)
    peaks = {}
    for batches in (1, 2):
        model = copy.deepcopy(wide)
        trainer = make_trainer(
            model,
            loader,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            accumulate_batches=batches,
            memory_limit="16MiB",
        )
        summary = trainer.fit()
        worst = report_of(trainer).batches[0]
        assert str(worst.cut) == "1 × 32 of 32"
        assert worst.peak_bytes is not None
        assert summary.peak_memory_bytes is not None
        assert worst.peak_bytes == pytest.approx(summary.peak_memory_bytes, rel=0.01)
        peaks[batches] = worst.peak_bytes
    assert peaks[2] > peaks[1]


steps_of_all = torch.zeros(())


class Counted(torch.optim.Adam):
    """Has a step with memory needs that cannot be predicted."""

    def step(self, closure: Any = None) -> Any:
        steps_of_all.add_(1)
        return super().step(closure)


def test_optimizer_with_unpredictable_first_step_is_named() -> None:
    trainer = make_trainer(Model(), loader_of([5] * 16), optimizer=Counted)
    rehearsed = trainer.fit().rehearsed or ""
    assert "the optimizer's first step needs unknown memory" in rehearsed
    assert "a tensor that is neither a parameter nor state" in rehearsed
    assert steps_of_all == 2
    known = make_trainer(Model(), loader_of([5] * 16)).fit().rehearsed or ""
    assert "unknown" not in known


class Named(nn.Module):
    """Takes texts by name, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        logits = self.model(input_ids)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def named(rows: list[Tensor]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": torch.where(mask == 1, tokens, -100),
    }


@pytest.mark.sweep
def test_token_slices_are_rehearsed_without_trace() -> None:
    lengths = [30, 28] * 44 + [60] * 8
    loader = DataLoader(Texts(lengths), batch_size=8, collate_fn=named)
    options: dict[str, Any] = {
        "microbatch_unit": "tokens",
        "loss_average": "tokens",
        "loss_fn": None,
        "max_duration": "2ep",
    }
    limit = limit_for(lengths, rows=3)
    trainer = make_trainer(Named(), loader, memory_limit=limit, **options)
    summary = trainer.fit()
    assert report_of(trainer).ooms > 0
    assert summary.ooms == 0
    assert {each.cut.unit for each in report_of(trainer).batches} == {"tokens"}
    assert " tokens or more, after " in (summary.rehearsed or "")
    models = [Named(), Named()]
    for model, rehearse in zip(models, ("worst", None), strict=True):
        make_trainer(model, loader, microbatch_size=200, rehearse=rehearse, **options).fit()
    assert_same(*models)


def count_late_ooms(seeds: range) -> tuple[int, list[int]]:
    """Return the OOMs of runs without a rehearsal, and the seeds that fail despite a rehearsal."""
    late = sum(count_ooms(seed, rehearse=None)[0] for seed in seeds[:3])
    return late, [seed for seed in seeds if count_ooms(seed, rehearse="worst")[0]]


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(40, 80), marks=pytest.mark.sweep),
        pytest.param(range(200), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_rehearsed_runs_do_not_run_out_of_memory(seeds: range) -> None:
    late, after = count_late_ooms(seeds)
    assert late > 0
    assert after == []
