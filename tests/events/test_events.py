"""Callbacks receive every event in order, once per occurrence."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Callback, Evaluator, Microbatcher, Observing, Run, StepResult
from automicro.events.callback import EVENTS, STEP_EVENTS
from tests.trainer.runs import assert_same, make_loader, make_model, make_trainer

PER_MICROBATCH = (
    *("microbatch_start", "forward_start", "forward_end", "loss_start", "loss_end"),
    *("backward_start", "backward_end", "microbatch_end"),
)


class Noting(Callback):
    """Records every event and its subject."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        for event in EVENTS:
            setattr(self, event, self._note(event))

    def _note(self, event: str) -> Callable[..., None]:
        return lambda run, subject=None: self.told.append((event, subject))

    def of(self, event: str) -> list[Any]:
        return [subject for name, subject in self.told if name == event]


def noted(loader: Any = None, **options: Any) -> Noting:
    noting = Noting()
    make_trainer(make_model(), loader or make_loader(), callbacks=[noting], **options).fit()
    return noting


@pytest.mark.parametrize("size", [1, 3, 16, None])
def test_events_occur_expected_number_of_times(size: int | None) -> None:
    counts = Counter(event for event, _ in noted(microbatch_size=size, max_duration="2ep").told)
    microbatches = 2 * sum(-(-each // (size or each)) for each in (16, 16, 16, 2))
    batches = ("batch_start", "batch_end", "attempt_start", "attempt_end", "gradients_ready")
    expected = {**dict.fromkeys(PER_MICROBATCH, microbatches), **dict.fromkeys(batches, 8)}
    runs = {"epoch_start": 2, "epoch_end": 2, "fit_start": 1, "fit_end": 1}
    assert {event: counts[event] for event in expected | runs} == expected | runs
    assert (counts["oom"], counts["resize"]) == (0, 0)


def test_events_come_in_order() -> None:
    assert [event for event, _ in noted(make_loader(rows=4), microbatch_size=2).told] == [
        *("fit_start", "epoch_start", "batch_start", "attempt_start"),
        *PER_MICROBATCH,
        *PER_MICROBATCH,
        *("attempt_end", "gradients_ready", "batch_end", "epoch_end", "fit_end"),
    ]


def test_retries_are_separate_attempts_of_one_batch() -> None:
    noting = noted(make_loader(256, 256), memory_limit="200KiB")
    attempts = [(each.number, each.microbatch_size) for each in noting.of("attempt_start")]
    assert attempts == [(1, 256), (2, 128), (3, 64)]
    failures = noting.of("oom")
    assert [each.attempt.number for each in failures] == [1, 2]
    assert all("out of memory" in each.message for each in failures)
    assert [(each.before, each.after) for each in noting.of("resize")] == [(256, 128), (128, 64)]
    [batch] = noting.of("batch_start")
    assert len(batch[0]) == 256
    shares = [each.loss for each in noting.of("backward_end") if each.attempt.number == 3]
    assert len(shares) == 4
    [result] = noting.of("batch_end")
    torch.testing.assert_close(torch.stack(shares).sum(), result.loss)


def test_evaluation_emits_batch_and_attempt_events() -> None:
    noting = noted(eval_dataloader=make_loader(), eval_microbatch_size=3)
    assert len(noting.of("eval_batch_start")) == len(noting.of("eval_batch_end")) == 4
    assert len(noting.of("eval_start")) == len(noting.of("eval_end")) == 1
    for name in PER_MICROBATCH:
        count = sum(each.attempt.phase == "eval" for each in noting.of(name))
        assert count == (0 if name.startswith(("loss_", "backward_")) else 6 + 6 + 6 + 1)
    assert [list(values) for values in noting.of("eval_end")] == [["eval/loss"]]


def test_accumulated_batches_emit_one_batch_event() -> None:
    assert [len(each) for each in noted(accumulate_batches=3).of("batch_start")] == [3, 1]


@pytest.mark.parametrize("event", sorted({*STEP_EVENTS} - {"oom", "resize"}))
def test_exception_in_step_leaves_model_unchanged(event: str) -> None:
    model = make_model()

    def fail(run: Run, subject: Any) -> None:
        raise KeyError("mine")

    callback = Callback()
    setattr(callback, event, fail)
    with pytest.raises(KeyError) as raised:
        make_trainer(model, callbacks=[callback]).fit()
    assert raised.value.__notes__[0] == f"automicro: in the callback Callback, at {event}"
    assert_same(model, make_model())
    assert all(each.grad is None for each in model.parameters())


def test_callback_can_stop_run_and_log_values() -> None:
    class Stopping(Callback):
        def batch_end(self, run: Run, result: StepResult) -> None:
            run.log({"mine/rows": result.num_samples})
            assert run.values["train/loss"] == pytest.approx(float(result.loss))
            if run.state.batch == 3:
                run.stop("enough")

    trainer = make_trainer(make_model(), callbacks=[Stopping()], max_duration="5ep")
    assert not trainer._microbatcher._engine.features  # it listens to nothing inside of a step
    summary = trainer.fit()
    assert (summary.steps, summary.stop_reason) == (3, "enough")
    assert any(line.split() == ["stopped", "early", "enough"] for line in str(summary).splitlines())


def test_training_uses_batches_transformed_by_callbacks() -> None:
    class Halving(Callback):
        def transform(self, run: Run, batch: Any) -> Any:
            return tuple(each[::2] for each in batch)

    class Forgetful(Callback):
        def transform(self, run: Run, batch: Any) -> Any:
            return None

    assert make_trainer(make_model(), callbacks=[Halving(), Halving()]).fit().samples == 3 * 4 + 1
    with pytest.raises(TypeError, match="returned None instead of a batch; return the batch"):
        make_trainer(make_model(), callbacks=[Forgetful()]).fit()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *(
            ({"callbacks": [wrong]}, TypeError, r"is not an automicro\.Callback\. Pass instances")
            for wrong in (Callback, [Callback()])
        ),
        ({"eval_dataloader": {}}, ValueError, "eval_dataloader={} names no evaluation"),
        ({"eval_dataloader": {"a/b": [1]}}, ValueError, "names cannot contain '/'"),
        ({"eval_dataloader": {"a": 3}}, TypeError, r"\['a'\] is a int and cannot be iterated over"),
        ({"eval_dataloader": {"a": None}}, TypeError, r"\['a'\] is None; pass a loader"),
    ],
)
def test_invalid_callbacks_and_evaluators_are_refused(
    options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_trainer(make_model(), **options)


def test_evaluators_have_own_names_intervals_and_limits() -> None:
    noting, data = Noting(), make_loader()
    few = Evaluator(dataloader=data, max_batches=2, microbatch_size=4, interval="2ba")
    evaluations = {"all": data, "few": few, "never": Evaluator(dataloader=data, interval=None)}
    trainer = make_trainer(make_model(), eval_dataloader=evaluations, callbacks=[noting])
    assert set(trainer.fit().eval_metrics) == {"all/loss", "few/loss"}
    values = [list(subject) for subject in noting.of("eval_end")]
    assert values == [["eval/few/loss"], ["eval/few/loss"], ["eval/all/loss"]]
    found = trainer.eval()
    assert set(found) == {"all/loss", "few/loss", "never/loss"}
    assert found["all/loss"] == pytest.approx(found["never/loss"])
    assert found["few/loss"] != pytest.approx(found["all/loss"])


class PenaltyByHand(Callback):
    """Adds a penalty's gradient in a forward and backward of its own."""

    ooms = 0

    def batch_start(self, run: Run, batch: Any) -> None:
        self._batch = batch

    def gradients_ready(self, run: Run, result: StepResult) -> None:
        def forward(model: nn.Module, batch: Any) -> Tensor:
            outputs: Tensor = model(batch[0])
            return outputs.pow(2).mean()

        own = run.microbatcher(loss_fn=None, forward=forward, loss_average="samples")
        self.ooms += own.backward(self._batch).ooms


def test_callback_backward_recovers_from_oom() -> None:
    ours, theirs, penalty = make_model(), make_model(), PenaltyByHand()
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
    microbatcher.predict(inputs)
    each = ["microbatch_start", "forward_start", "forward_end", "microbatch_end"]
    assert told == ["attempt_start", *each, *each, "attempt_end"] * 2
