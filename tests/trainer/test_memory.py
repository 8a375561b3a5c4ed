"""Memory that runs out in training, in callbacks, metrics and reports."""

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from automicro import (
    AutomicroWarning,
    Callback,
    CheckpointConfig,
    MemoryBudget,
    Microbatcher,
    Observing,
    OptimizerStepError,
    SampleTooLargeError,
    Trainer,
)
from automicro.callbacks import EarlyStopping, ExponentialMovingAverage, OutOfMemoryReport
from automicro.features import RememberSizes
from automicro.memory.oom import once_more
from tests.trainer.runs import (
    CLASSES,
    FEATURES,
    assert_same,
    losses_of,
    make_loader,
    make_model,
    make_trainer,
)


def under_limit(limit: str | None, **options: Any) -> tuple[Trainer, nn.Module]:
    model = make_model(dropout=0.2)
    trainer = make_trainer(
        model,
        make_loader(rows=300, batch_size=256),
        eval_dataloader=make_loader(rows=600, batch_size=600),
        metrics={"accuracy": MulticlassAccuracy(CLASSES, average="micro")},
        max_duration="2ep",
        seed=3,
        memory_limit=limit,
        **options,
    )
    return trainer, model


def test_run_recovers_from_out_of_memory_in_train_and_eval() -> None:
    small, model = under_limit("256KiB")
    losses = losses_of(small)
    summary = small.fit()
    assert summary.train_ooms >= 2
    assert summary.eval_ooms >= 1
    assert summary.eval_microbatch_size is not None
    assert summary.microbatch_size < summary.eval_microbatch_size < 600
    assert summary.peak_memory_bytes is not None
    assert summary.peak_memory_bytes <= 256 * 1024
    # Without a limit, a run at the same sizes must be bit-identical.
    large, expected = under_limit(
        None,
        microbatch_size=summary.microbatch_size,
        eval_microbatch_size=summary.eval_microbatch_size,
    )
    expected_losses = losses_of(large)
    unlimited = large.fit()
    assert losses == expected_losses
    assert_same(model, expected)
    assert summary.train_metrics == unlimited.train_metrics
    assert summary.eval_metrics == unlimited.eval_metrics
    assert (unlimited.train_ooms, unlimited.eval_ooms) == (0, 0)


def test_out_of_memory_in_accumulation_keeps_optimization_batch() -> None:
    ours, fixed = make_model(dropout=0.3), make_model(dropout=0.3)
    options: dict[str, Any] = {"accumulate_batches": 2, "max_duration": "2ep", "seed": 3}
    summary = make_trainer(ours, make_loader(300, 128), memory_limit="200KiB", **options).fit()
    assert (summary.train_ooms, summary.microbatch_size) == (1, 64)
    make_trainer(fixed, make_loader(300, 128), microbatch_size=64, **options).fit()
    assert_same(ours, fixed)


def test_memory_limit_includes_optimizer_step() -> None:
    class Hungry(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.zeros(2**16)
            return super().step(closure)

    model = make_model()
    with pytest.raises(OptimizerStepError, match="half applied") as raised:
        make_trainer(model, optimizer=Hungry, memory_limit="128KiB").fit()
    assert_same(model, make_model())
    assert "in training, epoch 1, batch 1 of the epoch" in raised.value.__notes__[-1]


def test_active_memory_budget_is_used() -> None:
    with MemoryBudget("200KiB") as budget:
        loader = make_loader(rows=512, batch_size=512)
        summary = make_trainer(make_model(), loader, probe=False).fit()  # checks run out, too
    assert summary.train_ooms == budget.num_ooms > 0


def test_trainer_memory_is_freed_when_unreferenced(tmp_path: Path) -> None:
    """Memory must be free at once: the next trainer of a search cannot wait for the collector."""

    def run(folder: str) -> tuple[weakref.ref[nn.Module], int]:
        trainer, model = under_limit(
            "192KiB",
            features=[RememberSizes(False)],  # so the second run also fails
            checkpoint=CheckpointConfig(folder=tmp_path / folder),
            callbacks=[ExponentialMovingAverage(decay=0.9), EarlyStopping()],
            precision="bf16",
            grad_clip_norm=1.0,
            progress=True,
        )
        return weakref.ref(model), trainer.fit().train_ooms

    run("first")  # lazy imports in torch keep references to the frames of the first run
    gc.collect()
    gc.disable()
    try:
        model, num_ooms = run("second")
        assert num_ooms
        assert model() is None
    finally:
        gc.enable()


# Outside of the model

STEP = ["attempt_start", "forward_start", "loss_end", "backward_end", "attempt_end"]
OUTSIDE = ["fit_start", "batch_start", "gradients_ready", "epoch_end"]


def oom() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def trainer_of(*callbacks: Callback, **options: Any) -> Trainer:
    return make_trainer(make_model(), callbacks=callbacks, **options)


def notes_of(*callbacks: Callback, **options: Any) -> str:
    """Return the message and the notes of the error."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer_of(*callbacks, **options).fit()
    return "\n".join([str(caught.value), *caught.value.__notes__])


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
def test_callback_inside_step_is_named_instead_of_rows(event: str) -> None:
    text = notes_of(Greedy(event))
    assert f"memory ran out in the callback Greedy, at {event}" in text
    assert "larger device" in text
    assert "does not fit" not in text
    assert "do not fit" not in text
    callback = Greedy(event, times=1)  # fits with fewer rows
    one, two = trainer_of(callback).fit(), trainer_of().fit()
    assert (callback.left, one.train_ooms) == (0, 1)
    assert one.train_loss == pytest.approx(two.train_loss, rel=1e-6)


@pytest.mark.parametrize("event", OUTSIDE)
def test_callback_outside_step_is_retried_once_and_then_named(event: str) -> None:
    is_called_again = event != "gradients_ready"  # a retry could change gradients twice
    if is_called_again:
        one, two = trainer_of(Greedy(event, times=1)).fit(), trainer_of().fit()
        assert (one.train_loss, one.train_ooms) == (two.train_loss, 0)
    callback = Greedy(event, times=1 + is_called_again)
    text = notes_of(callback)
    assert callback.left == 0
    assert f"automicro: in the callback Greedy, at {event}" in text
    assert "run.microbatcher()" in text


def test_observer_out_of_memory_is_named() -> None:
    def watch(event: str, subject: Any) -> None:
        if event == "forward_end":
            oom()

    microbatcher = Microbatcher(
        make_model(), loss_fn=nn.CrossEntropyLoss(), features=[Observing(watch)]
    )
    with pytest.raises(SampleTooLargeError, match=r"in the callback .*watch \(the observer\)"):
        microbatcher.backward((torch.randn(8, FEATURES), torch.randint(3, (8,))))


class Hoard(nn.Module):
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
    ("options", "said"),
    [
        ({"memory_limit": "4KiB"}, "the model and the optimizer's state alone exceed"),
        ({"metrics": {"hoard": Hoard("update")}}, "memory ran out in the metric 'hoard'"),
        ({"metrics": {"hoard": Hoard("")}}, "automicro: while computing the metric 'hoard'"),
    ],
    ids=["model", "update", "compute"],
)
def test_cause_is_named_instead_of_rows(options: dict[str, Any], said: str) -> None:
    assert said in notes_of(**options)


def test_transform_out_of_memory_is_named() -> None:
    class Doubles(Callback):
        def transform(self, run: Any, batch: Any) -> Any:
            oom()

    assert "in the callback Doubles, transform" in notes_of(Doubles())


def test_once_more_frees_memory_of_first_try() -> None:
    calls: list[int] = []
    with MemoryBudget("40KiB"):
        others: list[Tensor] = []

        def action() -> int:
            calls.append(1)
            mine = torch.zeros(4000)
            if len(calls) == 1:
                others.append(torch.zeros(5000))
                torch.zeros(5000)
            return len(mine)

        with pytest.raises(torch.OutOfMemoryError):
            action()
        calls.clear()
        others.clear()
        assert once_more(action, doing="trying") == 4000
    assert len(calls) == 2


class MuteShortageError(torch.OutOfMemoryError):
    def __str__(self) -> str:
        raise AttributeError("gone")


class MuteError(RuntimeError):
    __str__ = MuteShortageError.__str__


def mute() -> None:
    raise MuteShortageError


def test_report_survives_errors_without_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = OutOfMemoryReport(tmp_path)
    trainer_of(report, Greedy("forward_end", mute, times=1)).fit()
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr("automicro.callbacks.oom_report.describe_failure", lambda *_: mute())
    with pytest.warns(AutomicroWarning, match="could not be written"):
        trainer_of(report, Greedy("forward_end", times=1)).fit()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("error", [MuteError(), KeyError("x")], ids=repr)
def test_other_callback_errors_propagate_without_retry(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    caplog.set_level(logging.DEBUG)
    for event in ("batch_start", "forward_end", "batch_end"):
        with pytest.raises(type(error)) as caught:
            trainer_of(Greedy(event, fail, times=1)).fit()
        assert caught.value is error
    assert "microbatcher" not in "\n".join(getattr(error, "__notes__", []))


class UsesShared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + table.mean()
        return out


def test_shared_part_that_fills_device_is_named() -> None:
    microbatcher = Microbatcher(
        UsesShared(),
        forward=lambda m, b: nn.functional.cross_entropy(m(b["x"], b["table"]), b["y"]),
        batch_layout={"table": "shared"},
        loss_average="samples",
        memory_limit="64KiB",
    )
    batch = {"x": torch.randn(8, 4), "table": torch.randn(20_000), "y": torch.randint(3, (8,))}
    with pytest.raises(SampleTooLargeError) as caught:
        microbatcher.backward(batch)
    text = str(caught.value)
    assert "shared parts of the batch 78.50 KiB" in text
    assert "no size can" in text
    assert "smaller tensors in the parts of the batch that all rows share" in text
    assert "samples" not in text
