"""Callbacks receive every event in order, once per occurrence."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Callback, Evaluator, Microbatcher, Observing, Run, StepResult
from automicro.events.callback import EVENTS, STEP_EVENTS
from tests.trainer.runs import make_loader, make_model, make_trainer

PER_MICROBATCH = (
    "microbatch_start",
    "forward_start",
    "forward_end",
    "loss_start",
    "loss_end",
    "backward_start",
    "backward_end",
    "microbatch_end",
)


class Noting(Callback):
    """Records every event and its subject."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        for event in EVENTS:
            setattr(self, event, self._note(event))

    def _note(self, event: str) -> Callable[..., None]:
        def note(run: Run, subject: Any = None) -> None:
            self.told.append((event, subject))

        return note

    def count(self, phase: str = "train") -> Counter[str]:
        counts: Counter[str] = Counter()
        for event, subject in self.told:
            attempt = getattr(subject, "attempt", subject)
            if getattr(attempt, "phase", phase) == phase:
                counts[event] += 1
        return counts

    @property
    def events(self) -> list[str]:
        return [event for event, _ in self.told]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, None])
def test_events_occur_expected_number_of_times(size: int | None) -> None:
    noting = Noting()
    make_trainer(make_model(), callbacks=[noting], microbatch_size=size, max_duration="2ep").fit()
    counts = noting.count()
    rows = [16, 16, 16, 2]
    microbatches = 2 * sum(-(-each // (size or each)) for each in rows)
    assert {event: counts[event] for event in PER_MICROBATCH} == dict.fromkeys(
        PER_MICROBATCH, microbatches
    )
    for event in ("batch_start", "batch_end", "attempt_start", "attempt_end", "gradients_ready"):
        assert counts[event] == 8
    assert (counts["epoch_start"], counts["epoch_end"]) == (2, 2)
    assert (counts["fit_start"], counts["fit_end"]) == (1, 1)
    assert (counts["oom"], counts["resize"]) == (0, 0)


def test_events_come_in_order() -> None:
    noting = Noting()
    make_trainer(make_model(), make_loader(rows=4), callbacks=[noting], microbatch_size=2).fit()
    assert noting.events == [
        "fit_start",
        "epoch_start",
        "batch_start",
        "attempt_start",
        *PER_MICROBATCH,
        *PER_MICROBATCH,
        "attempt_end",
        "gradients_ready",
        "batch_end",
        "epoch_end",
        "fit_end",
    ]


def test_retries_are_separate_attempts_of_one_batch() -> None:
    noting = Noting()
    summary = make_trainer(
        make_model(), make_loader(300, 256), callbacks=[noting], memory_limit="200KiB"
    ).fit()
    assert summary.train_ooms == 2
    first = noting.told[: noting.events.index("batch_end") + 1]
    attempts = [subject for event, subject in first if event == "attempt_start"]
    assert [(each.number, each.microbatch_size) for each in attempts] == [
        (1, 256),
        (2, 128),
        (3, 64),
    ]
    failures = [subject for event, subject in first if event == "oom"]
    assert [each.attempt.number for each in failures] == [1, 2]
    assert all("out of memory" in each.message for each in failures)
    resizes = [subject for event, subject in first if event == "resize"]
    assert [(each.before, each.after) for each in resizes] == [(256, 128), (128, 64)]
    [batch] = [subject for event, subject in first if event == "batch_start"]
    assert len(batch[0]) == 256
    done = [subject for event, subject in first if event == "backward_end"]
    assert sum(each.attempt.number == 3 for each in done) == 4
    shares = [each.loss for each in done if each.attempt.number == 3]
    result = first[-1][1]
    torch.testing.assert_close(torch.stack(shares).sum(), result.loss)


def test_evaluation_emits_batch_and_attempt_events() -> None:
    noting = Noting()
    make_trainer(
        make_model(), eval_dataloader=make_loader(), eval_microbatch_size=3, callbacks=[noting]
    ).fit()
    counts = noting.count("eval")
    assert counts["eval_batch_start"] == counts["eval_batch_end"] == 4
    assert counts["forward_end"] == counts["microbatch_end"] == 6 + 6 + 6 + 1
    assert counts["eval_start"] == counts["eval_end"] == 1
    assert not any(
        subject.attempt.phase == "eval"
        for event, subject in noting.told
        if event.startswith(("loss_", "backward_"))
    )
    values = next(subject for event, subject in noting.told if event == "eval_end")
    assert list(values) == ["eval/loss"]


def test_accumulated_batches_emit_one_batch_event() -> None:
    noting = Noting()
    make_trainer(make_model(), accumulate_batches=3, callbacks=[noting]).fit()
    batches = [subject for event, subject in noting.told if event == "batch_start"]
    assert [len(each) for each in batches] == [3, 1]


@pytest.mark.parametrize("event", sorted({*STEP_EVENTS} - {"oom", "resize"}))
def test_exception_in_step_leaves_model_unchanged(event: str) -> None:
    model, before = make_model(), make_model()

    def fail(run: Run, subject: Any) -> None:
        raise KeyError("mine")

    callback = Callback()
    setattr(callback, event, fail)
    with pytest.raises(KeyError) as raised:
        make_trainer(model, callbacks=[callback]).fit()
    assert raised.value.__notes__[0] == f"automicro: in the callback Callback, at {event}"
    for mine, theirs in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.grad is None


def test_callback_can_stop_run_and_log_values() -> None:
    class Stopping(Callback):
        def batch_end(self, run: Run, result: StepResult) -> None:
            run.log({"mine/rows": result.num_samples})
            assert run.values["train/loss"] == pytest.approx(float(result.loss))
            if run.state.batch == 3:
                run.stop("enough")

    trainer = make_trainer(make_model(), callbacks=[Stopping()], max_duration="5ep")
    summary = trainer.fit()
    assert (summary.steps, summary.stop_reason) == (3, "enough")
    assert any(line.split() == ["stopped", "early", "enough"] for line in str(summary).splitlines())


def test_training_uses_batches_transformed_by_callbacks() -> None:
    class Halving(Callback):
        def transform(self, run: Run, batch: Any) -> Any:
            return tuple(each[::2] for each in batch)

    assert make_trainer(make_model(), callbacks=[Halving(), Halving()]).fit().samples == 3 * 4 + 1

    class Forgetful(Callback):
        def transform(self, run: Run, batch: Any) -> Any:
            return None

    with pytest.raises(TypeError, match="returned None instead of a batch; return the batch"):
        make_trainer(make_model(), callbacks=[Forgetful()]).fit()


def test_unused_step_events_add_no_observer() -> None:
    class Quiet(Callback):
        def fit_end(self, run: Run) -> None:
            """Listens to nothing inside a step."""

    trainer = make_trainer(make_model(), callbacks=[Quiet()])
    assert not trainer._microbatcher._engine.features


@pytest.mark.parametrize("wrong", [Callback, object(), [Callback()]])
def test_non_callbacks_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"is not an automicro\.Callback\. Pass instances"):
        make_trainer(make_model(), callbacks=[wrong])


def test_evaluators_have_own_names_intervals_and_limits() -> None:
    noting = Noting()
    trainer = make_trainer(
        make_model(),
        eval_dataloader={
            "all": make_loader(),
            "few": Evaluator(
                dataloader=make_loader(), max_batches=2, microbatch_size=4, interval="2ba"
            ),
            "never": Evaluator(dataloader=make_loader(), interval=None),
        },
        callbacks=[noting],
    )
    summary = trainer.fit()
    assert set(summary.eval_metrics) == {"all/loss", "few/loss"}
    values = [list(subject) for event, subject in noting.told if event == "eval_end"]
    assert values == [["eval/few/loss"], ["eval/few/loss"], ["eval/all/loss"]]
    found = trainer.eval()
    assert set(found) == {"all/loss", "few/loss", "never/loss"}
    assert found["all/loss"] == pytest.approx(found["never/loss"])
    assert found["few/loss"] != pytest.approx(found["all/loss"])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({}, ValueError, "eval_dataloader={} names no evaluation"),
        ({"a/b": [1]}, ValueError, "names cannot contain '/'"),
        ({"a": 3}, TypeError, r"eval_dataloader\['a'\] is a int and cannot be iterated over"),
        ({"a": None}, TypeError, r"eval_dataloader\['a'\] is None; pass a loader"),
    ],
)
def test_invalid_evaluators_are_refused(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_trainer(make_model(), eval_dataloader=wrong)


class PenaltyByHand(Callback):
    """Adds a penalty's gradient in a forward and backward of its own."""

    def __init__(self) -> None:
        self.ooms = 0
        self._batch: Any = None

    def batch_start(self, run: Run, batch: Any) -> None:
        self._batch = batch

    def gradients_ready(self, run: Run, result: StepResult) -> None:
        def forward(model: nn.Module, batch: Any) -> Tensor:
            outputs: Tensor = model(batch[0])
            return outputs.pow(2).mean()

        own = run.microbatcher(loss_fn=None, forward=forward, loss_average="samples")
        self.ooms += own.backward(self._batch).ooms


def test_callback_backward_recovers_from_oom() -> None:
    ours, theirs = make_model(), make_model()
    penalty = PenaltyByHand()
    data = make_loader(256, 256)
    limited = make_trainer(ours, data, callbacks=[penalty], memory_limit="220KiB")
    assert limited.fit().train_ooms > 0
    assert penalty.ooms > 0
    make_trainer(theirs, data, callbacks=[PenaltyByHand()]).fit()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_prediction_emits_same_events_as_evaluation() -> None:
    told: list[str] = []
    microbatcher = Microbatcher(
        nn.Linear(4, 3),
        loss_fn=nn.CrossEntropyLoss(),
        eval_microbatch_size=3,
        features=[Observing(lambda event, subject: told.append(event))],
    )
    inputs, targets = torch.randn(6, 4), torch.randint(3, (6,))
    microbatcher.evaluate((inputs, targets))
    evaluated = [*told]
    told.clear()
    microbatcher.predict(inputs)
    each = ["microbatch_start", "forward_start", "forward_end", "microbatch_end"]
    assert told == evaluated == ["attempt_start", *each, *each, "attempt_end"]
