"""Out of memory outside the model: in callbacks, metrics, checkpoints, loggers and reports."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from automicro import (
    AutomicroWarning,
    Callback,
    MemoryBudget,
    Microbatcher,
    Observing,
    SampleTooLargeError,
    Trainer,
)
from automicro.callbacks import OutOfMemoryReport
from automicro.memory.oom import once_more
from tests.sweeps import mostly_in_sweeps

STEP = ["attempt_start", "microbatch_start", "forward_start", "forward_end", "loss_end"]
STEP += ["backward_start", "backward_end", "microbatch_end", "attempt_end"]
OUTSIDE = ["fit_start", "epoch_start", "batch_start", "batch_end", "gradients_ready", "epoch_end"]


def oom() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
    given: dict[str, Any] = {
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW,
        "progress": False,
        "device": "cpu",
        "callbacks": callbacks,
    }
    return Trainer(nn.Linear(4, 3), DataLoader(data, 8), **{**given, **options})


class Greedy(Callback):
    """Runs out of memory at one event."""

    def __init__(self, event: str, fail: Callable[[], None] = oom, *, times: int = 10**9) -> None:
        self.left = times

        def listen(*_: Any) -> None:
            if self.left:
                self.left -= 1
                fail()

        setattr(self, event, listen)


@pytest.mark.parametrize("event", STEP)
@pytest.mark.parametrize("microbatch_size", mostly_in_sweeps(["auto", 4], quick=["auto"]))
def test_callback_inside_step_is_named_instead_of_rows(event: str, microbatch_size: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(Greedy(event), microbatch_size=microbatch_size).fit()
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert f"memory ran out in the callback Greedy, at {event}" in text
    assert "larger device" in text
    assert "does not fit" not in text
    assert "do not fit" not in text


def test_callback_that_fits_with_fewer_rows_is_retried() -> None:
    callback = Greedy("forward_end", times=1)
    one, two = trainer(callback).fit(), trainer().fit()
    assert callback.left == 0
    assert one.train_ooms == 1
    assert one.train_loss == pytest.approx(two.train_loss, rel=1e-6)


def test_observer_out_of_memory_is_named() -> None:
    def watch(event: str, subject: Any) -> None:
        if event == "forward_end":
            oom()

    microbatcher = Microbatcher(
        nn.Linear(4, 3), loss_fn=nn.CrossEntropyLoss(), features=[Observing(watch)]
    )
    with pytest.raises(SampleTooLargeError, match=r"in the callback .*watch \(the observer\)"):
        microbatcher.backward((torch.randn(8, 4), torch.randint(3, (8,))))


class HoardingMetric(nn.Module):
    """A metric that runs out of memory in one of its methods."""

    def __init__(self, fails_at: str) -> None:
        super().__init__()
        self.fails_at = fails_at

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        if self.fails_at == "update":
            oom()

    def compute(self) -> float:
        oom()
        return 0.0

    def reset(self) -> None: ...


@pytest.mark.parametrize(
    ("fails_at", "said"),
    [
        ("update", "memory ran out in the metric 'hoard'"),
        ("compute", "automicro: while computing the metric 'hoard'"),
    ],
)
def test_metric_is_named_instead_of_rows(fails_at: str, said: str) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(metrics={"hoard": HoardingMetric(fails_at)}).fit()
    assert said in "\n".join([str(caught.value), *caught.value.__notes__])


@pytest.mark.parametrize("event", OUTSIDE)
def test_callback_outside_step_is_retried_once_and_then_named(event: str) -> None:
    is_called_again = event != "gradients_ready"  # a retry could change gradients twice
    if is_called_again:
        one, two = trainer(Greedy(event, times=1)).fit(), trainer().fit()
        assert (one.train_loss, one.train_ooms) == (two.train_loss, 0)
    callback = Greedy(event, times=1 + is_called_again)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(callback).fit()
    assert callback.left == 0
    notes = "\n".join(caught.value.__notes__)
    assert f"automicro: in the callback Greedy, at {event}" in notes
    assert "run.microbatcher()" in notes


def test_other_callback_errors_do_not_mention_memory() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:  # raised by the first call, without a retry
        trainer(Greedy("batch_end", fail, times=1)).fit()
    assert "microbatcher" not in "\n".join(caught.value.__notes__)


def test_transform_out_of_memory_is_named() -> None:
    class Doubles(Callback):
        def transform(self, run: Any, batch: Any) -> Any:
            oom()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(Doubles()).fit()
    assert "in the callback Doubles, transform" in "\n".join(caught.value.__notes__)


def test_once_more_frees_memory_of_first_try() -> None:
    calls: list[int] = []
    with MemoryBudget("40KiB") as budget:
        others: list[Tensor] = []

        def action() -> int:
            calls.append(1)
            mine = torch.zeros(4000)
            if len(calls) == 1:
                others.append(torch.zeros(5000))
                torch.zeros(5000)
            return len(mine) + budget.allocated_bytes * 0

        with pytest.raises(torch.OutOfMemoryError):
            action()
        calls.clear()
        others.clear()
        assert once_more(action, doing="trying") == 4000
    assert len(calls) == 2


class MuteShortageError(torch.OutOfMemoryError):
    def __str__(self) -> str:
        raise AttributeError("gone")


def test_report_survives_errors_without_text(tmp_path: Path) -> None:
    def fail() -> None:
        raise MuteShortageError

    report = OutOfMemoryReport(tmp_path)
    trainer(report, Greedy("forward_end", fail, times=1)).fit()
    assert len(list(tmp_path.iterdir())) == 1


def test_failed_report_does_not_end_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MuteShortageError

    monkeypatch.setattr("automicro.callbacks.oom_report.describe_failure", fail)
    report = OutOfMemoryReport(tmp_path)
    with pytest.warns(AutomicroWarning, match="could not be written"):
        trainer(report, Greedy("forward_end", times=1)).fit()
    assert not list(tmp_path.iterdir())


def test_error_without_text_propagates_unchanged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class MuteError(RuntimeError):
        __str__ = MuteShortageError.__str__

    error = MuteError()

    def fail() -> None:
        raise error

    caplog.set_level(logging.DEBUG)
    for event in ("batch_start", "forward_end", "batch_end"):
        with pytest.raises(MuteError) as caught:
            trainer(Greedy(event, fail)).fit()
        assert caught.value is error


class UsesShared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + table.mean()
        return out


def run_shared(limit: str, table: int) -> str:
    batch = {"x": torch.randn(8, 4), "table": torch.randn(table), "y": torch.randint(3, (8,))}
    microbatcher = Microbatcher(
        UsesShared(),
        forward=lambda m, b: nn.functional.cross_entropy(m(b["x"], b["table"]), b["y"]),
        batch_layout={"table": "shared"},
        loss_average="samples",
        memory_limit=limit,
    )
    with pytest.raises(SampleTooLargeError) as caught:
        microbatcher.backward(batch)
    return str(caught.value)


def test_shared_part_that_fills_device_is_named() -> None:
    text = run_shared("64KiB", 20_000)
    assert "shared parts of the batch 78.50 KiB" in text
    assert "no size can" in text
    assert "smaller tensors in the parts of the batch that all rows share" in text
    assert "samples" not in text


def test_batches_without_shared_parts_report_none() -> None:
    from automicro.batch.layout import BatchLayout

    rows = [{"x": torch.randn(2), "w": torch.randn(3)} for _ in range(4)]
    assert BatchLayout().shared((torch.randn(4, 3), torch.randn(4))) == []
    assert BatchLayout().shared(rows) == []
    assert BatchLayout({"w": "shared"}).shared({"x": torch.randn(1, 2), "w": torch.randn(3)}) == []
