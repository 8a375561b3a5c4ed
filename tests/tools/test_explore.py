"""Measuring the fastest microbatch size before a run, without side effects."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from automicro import ExploreReport, SampleTooLargeError, explore
from automicro.cli import main
from automicro.tools.explore import MeasuredSize
from tests.cli_jobs import enter_folder_with_job
from tests.outside import Outside
from tests.state.undone import picture

ROWS, FEATURES = 16, 12
LOSS = nn.CrossEntropyLoss()


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 3)
    )


def make_loader(*, rows: int = 8 * ROWS, generator: torch.Generator | None = None) -> DataLoader:
    data = TensorDataset(torch.randn(rows, FEATURES), torch.randint(3, (rows,)))
    return DataLoader(data, batch_size=ROWS, shuffle=True, generator=generator)


class Clock:
    """A fake clock that models advance."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("automicro.memory.device.time", clock)
    return clock


class TimedModel(nn.Module):
    """A model whose forward takes a given number of seconds for its rows."""

    def __init__(self, clock: Clock, seconds: Callable[[int], float]) -> None:
        super().__init__()
        self.linear, self.outside = nn.Linear(FEATURES, 3), Outside(rows=[])
        self.clock, self.seconds = clock, seconds

    @property
    def rows(self) -> list[int]:
        found: list[int] = self.outside.rows
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        self.rows.append(len(inputs))
        # No two steps take the same time.
        self.clock.seconds += self.seconds(len(inputs)) * (1 + 0.01 * (len(self.rows) % 3))
        outputs: Tensor = self.linear(inputs)
        return outputs


@pytest.mark.parametrize("evaluate", [False, True])
def test_explore_leaves_all_state_unchanged(evaluate: bool) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    order = torch.Generator().manual_seed(4)
    loader = make_loader(generator=order)
    LOSS(model(torch.randn(4, FEATURES)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
    model[2].eval()
    gradients = [each.grad for each in model.parameters()]

    def complete_state() -> Any:
        generators = torch.get_rng_state(), order.get_state(), random.getstate()
        own = str(np.random.get_state())
        return picture([model, gradients, optimizer.state_dict(), *generators, own])

    before = complete_state()
    options: Any = {"optimizer": optimizer, "evaluate": evaluate, "max_steps": 12}
    notes = explore(model, loader, loss_fn=LOSS, **options).notes
    assert ["averages over the rows of a microbatch (BatchNorm)" in each for each in notes] == (
        [] if evaluate else [True]
    )
    assert complete_state() == before
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("evaluate", [False, True])
def test_explore_finds_clearly_fastest_size(clock: Clock, evaluate: bool) -> None:
    """Each row takes twice as long above eight rows; each pass has a fixed cost."""
    model = TimedModel(clock, lambda rows: rows * (1 if rows <= 8 else 2) + 4)
    report = explore(model, make_loader(), loss_fn=LOSS, evaluate=evaluate, max_rows=ROWS)
    assert report.microbatch_size == 8
    assert report.confidence >= 95
    assert report.base == ROWS
    assert report.speedup == pytest.approx((2 + 4 / 16) / (1 + 4 / 8), rel=0.02)
    assert report.global_batch == 16
    assert report.phase == ("eval" if evaluate else "train")


def test_sizes_may_exceed_batch_of_loader(clock: Clock) -> None:
    """A pass takes the same time for any number of rows: four batches together are the fastest."""
    model = TimedModel(clock, lambda rows: 64)
    report = explore(model, make_loader(), loss_fn=LOSS)
    assert report.microbatch_size == 4 * ROWS
    assert report.batch_rows == ROWS
    assert report.global_batch == 4 * ROWS
    assert max(model.rows) == 4 * ROWS
    assert explore(model, make_loader(), loss_fn=LOSS, max_rows=ROWS).microbatch_size == ROWS


def test_size_that_does_not_fit_is_tried_once_and_reported() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 3))
    report = explore(
        model, make_loader(), loss_fn=LOSS, memory_limit="48KiB", max_steps=20, device="cpu"
    )
    assert report.too_large
    assert len(set(report.too_large)) == len(report.too_large)
    assert max(each.microbatch_size for each in report.measured) < min(report.too_large)
    assert all((each.peak_bytes or 0) <= 48 * 1024 for each in report.measured)
    assert f"{max(report.too_large):>6}  does not fit" in str(report)
    with pytest.raises(SampleTooLargeError, match="1 of"):
        explore(nn.Linear(FEATURES, 3), make_loader(), loss_fn=LOSS, memory_limit="1.5KiB")


def test_measured_size_may_run_out_of_memory_later(clock: Clock) -> None:
    class Fills(TimedModel):
        def forward(self, inputs: Tensor) -> Tensor:
            if len(inputs) == ROWS and self.rows.count(ROWS) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(inputs)

    report = explore(Fills(clock, lambda rows: rows), make_loader(), loss_fn=LOSS, max_rows=ROWS)
    assert report.too_large == (ROWS,)
    assert report.base == report.measured[-1].microbatch_size < ROWS


def test_batches_of_different_lengths_are_not_pooled() -> None:
    batches = [(torch.randn(4, length), torch.zeros(4)) for length in (5, 7)]
    report = explore(
        nn.Linear(5, 1),
        batches,
        forward=lambda model, batch: model(batch[0]).mean(),
        loss_average="samples",
        max_steps=6,
    )
    assert report.microbatch_size <= 4
    assert "cannot be pooled" in report.notes[0]
    assert "no size above 4 rows" in report.notes[0]


def test_interrupt_returns_best_size_so_far(clock: Clock) -> None:
    class Interrupted(TimedModel):
        def forward(self, inputs: Tensor) -> Tensor:
            if len(self.rows) > 6:
                raise KeyboardInterrupt
            return super().forward(inputs)

    report = explore(Interrupted(clock, lambda _: 1), make_loader(), loss_fn=LOSS)
    assert report.ended == "interrupted"
    assert report.measured

    class AtOnce(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # there is nothing to report
        explore(nn.Sequential(AtOnce(), nn.Linear(FEATURES, 3)), make_loader(), loss_fn=LOSS)


def report_of(**options: Any) -> ExploreReport:
    measured = MeasuredSize(
        microbatch_size=48, steps=4, rows_per_second=100.0, peak_bytes=2048, speedup=1.2
    )
    settings: dict[str, Any] = {
        "phase": "train",
        "microbatch_size": 48,
        "speedup": 1.2,
        "confidence": 83,
        "base": 64,
        "batch_rows": 64,
        "global_batch": 48,
        "measured": (measured,),
        "too_large": (128,),
        "steps": 9,
        "seconds": 1.0,
        "ended": "sure enough",
    }
    return ExploreReport(**{**settings, **options})


def test_report_recommends_nearest_global_batch() -> None:
    text = str(report_of())
    assert "microbatch_size: 48  (1.20x base of 64 rows, confidence 83, sure enough" in text
    assert "it does not divide 64 rows; the nearest multiple of it is 48" in text
    assert "global batch: it divides 96 rows" in str(report_of(batch_rows=96))
    assert "eval_microbatch_size: 48" in str(report_of(phase="eval"))
    speed, memory = report_of().picture().axes
    assert (speed.get_ylabel(), memory.get_ylabel()) == ("rows per second", "peak memory (KiB)")
    assert json.loads(json.dumps(report_of().to_dict()))["measured"][0]["peak_bytes"] == 2048


def test_invalid_options_are_rejected() -> None:
    cases: list[Any] = [
        ({"max_steps": 0}, ValueError, "max_steps"),
        ({"max_minutes": 1}, TypeError, "no argument max_minutes. Limit it by max_steps"),
        ({"max_rows": 0}, ValueError, "max_rows"),
        ({"microbatch_size": 4}, TypeError, "leave microbatch_size out"),
        ({"when_too_large": "auto"}, TypeError, "leave when_too_large out. To find"),
        ({"nonsense": 4}, TypeError, "nonsense"),
    ]
    for options, error, said in cases:
        with pytest.raises(error, match=said):
            explore(nn.Linear(FEATURES, 3), make_loader(), loss_fn=LOSS, **options)
    with pytest.raises(ValueError, match="there is no batch to measure: give a data loader"):
        explore(nn.Linear(FEATURES, 3), [], loss_fn=LOSS)


EVAL_DATA = "eval_dataloader={call: cli_job.loader, args: {batch_size: 8}}"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with_job(tmp_path, monkeypatch)


@pytest.mark.usefixtures("job")
def test_command_prints_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "job.yaml", "--max-steps", "6"]) == 0
    out, told = capsys.readouterr()
    assert re.search(r"^exploring: \d+ rows?, \d\.\d\dx base, confidence \d+$", told, re.M)
    assert out.splitlines()[0].split() == ["rows", "rows/s", "peak", "speed", "steps"]
    assert "\nmicrobatch_size: " in out
    assert "\nglobal batch: it " in out
    options = ["--eval", "--json", "--max-steps", "6", "--picture", "a.svg"]
    assert main(["explore", "job.yaml", EVAL_DATA, *options]) == 0
    assert "<svg" in Path("a.svg").read_text()
    found = json.loads(capsys.readouterr().out)
    assert (found["phase"], found["batch_rows"]) == ("eval", 8)


@pytest.mark.usefixtures("job")
def test_command_rejects_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    for option, said in [
        ("--picture=a.html", "name a file that ends in .png or .svg"),
        ("microbatch_unit=tokens", "or explore with microbatch_unit=rows"),
    ]:
        assert main(["explore", "job.yaml", option]) == 2
        assert said in capsys.readouterr().err
