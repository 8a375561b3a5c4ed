"""The moving average of the weights is exact and replaces them only during evaluations."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import MemoryBudget
from automicro.callbacks import ExponentialMovingAverage
from automicro.events.callback import Callback
from automicro.events.run import LoopState, Run
from automicro.step.results import StepResult
from tests.callbacks.runs import Weights, assert_equal, copy_of, trainer_with
from tests.trainer.runs import CLASSES, FEATURES, make_loader, make_model


class Evaluated(Callback):
    """Records the weights that each evaluation batch used, and fails once if asked."""

    def __init__(self, fails: bool = False) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.fails = fails

    def eval_batch_start(self, run: Run, batch: Any) -> None:
        self.weights.append(copy_of(run.model))

    def eval_batch_end(self, run: Run, result: object) -> None:
        if self.fails:
            self.fails = False
            raise KeyError("once")


def expected_average(start: dict[str, Tensor], steps: list[dict[str, Tensor]]) -> Any:
    average = {name: value.double() for name, value in start.items()}
    for weights in steps:
        for name, value in weights.items():
            average[name] = 0.9 * average[name] + 0.1 * value.double()
    return average


@pytest.mark.parametrize(
    ("options", "updated"),
    [
        ({}, slice(None)),
        ({"update_interval": "2ba"}, slice(1, None, 2)),
        ({"update_interval": "1ep"}, slice(3, None, 4)),
    ],
)
def test_average_matches_formula(options: dict[str, Any], updated: slice) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    start = copy_of(model)
    weights, average = Weights(), ExponentialMovingAverage(decay=0.9, **options)
    trainer_with(weights, average, model=model, max_duration="2ep").fit()
    found = average.average_state_dict()
    assert found["1.num_batches_tracked"] == 8, "what counts batches is not averaged"
    for name, value in expected_average(start, weights.steps[updated]).items():
        if found[name].is_floating_point():
            torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_evaluation_uses_average_without_changing_training(fails: bool) -> None:
    evaluated, average = Evaluated(fails), ExponentialMovingAverage(decay=0.9)
    model, plain = make_model(), make_model()
    options: dict[str, Any] = {"eval_interval": "4ba", "max_duration": "8ba"}
    options["eval_dataloader"] = make_loader(rows=16)
    trainer = trainer_with(average, evaluated, model=model, **options)
    if fails:  # the next event restores the weights of training
        with pytest.raises(KeyError):
            trainer.fit()
    trainer.fit()
    trainer_with(model=plain, **options).fit()
    assert trainer.state.batch == 8
    assert_equal(copy_of(model), copy_of(plain))
    assert_equal(evaluated.weights[-1], average.average_state_dict())
    assert not torch.equal(evaluated.weights[-1]["0.weight"], model.state_dict()["0.weight"])


def test_evaluate_false_uses_training_weights() -> None:
    evaluated, model = Evaluated(), make_model()
    average = ExponentialMovingAverage(decay=0.9, evaluate=False)
    trainer_with(average, evaluated, model=model, eval_dataloader=make_loader(rows=16)).fit()
    assert_equal(evaluated.weights[-1], copy_of(model))


def test_update_allocates_no_memory() -> None:
    class Peaks(Callback):
        """Updates the average and records the memory that this takes."""

        def __init__(self, budget: MemoryBudget) -> None:
            self.budget = budget
            self.average = ExponentialMovingAverage(decay=0.9)
            self.above: list[int] = []

        def fit_start(self, run: Run) -> None:
            self.average.fit_start(run)

        def batch_end(self, run: Run, result: StepResult) -> None:
            before = self.budget.allocated_bytes
            self.budget.reset_peak()
            self.average.batch_end(run, result)
            self.above.append(self.budget.peak_bytes - before)

    with MemoryBudget(None) as budget:
        peaks = Peaks(budget)
        trainer_with(peaks).fit()
    assert peaks.above == [0] * 4


def test_average_of_half_precision_weights_is_float32() -> None:
    model = make_model().bfloat16()
    evaluated, average = Evaluated(), ExponentialMovingAverage(decay=0.999)
    loader = [(x.bfloat16(), y) for x, y in make_loader(rows=16)]
    trainer_with(
        average, evaluated, model=model, train_dataloader=loader, eval_dataloader=loader
    ).fit()
    kept = average.state_dict()["average"]
    assert {value.dtype for value in kept.values()} == {torch.float32}
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert_equal(evaluated.weights[-1], {k: v.bfloat16() for k, v in kept.items()})


def test_average_resumes_from_state_dict() -> None:
    model, whole = make_model(), ExponentialMovingAverage(decay=0.9)
    state: dict[str, Any] = {}

    class Interrupt(Callback):
        def batch_end(self, run: Run, result: StepResult) -> None:
            if run.state.batch == 3:
                saved = whole.state_dict()
                state.update(saved, average={k: v.clone() for k, v in saved["average"].items()})

    trainer_with(whole, Interrupt(), model=model, max_duration="4ba").fit()
    resumed = ExponentialMovingAverage(decay=0.9)
    resumed.load_state_dict(state)
    run: Any = type("AfterTheFourthBatch", (), {"model": model, "state": LoopState(batch=4)})
    resumed.fit_start(run)
    resumed.batch_end(run, None)
    assert_equal(resumed.average_state_dict(), whole.average_state_dict())
    state["average"]["0.weight"].zero_()  # the average does not share memory with the loaded state
    assert_equal(resumed.average_state_dict(), whole.average_state_dict())


def test_average_of_another_model_is_refused() -> None:
    average = ExponentialMovingAverage()
    average.load_state_dict({"average": {"w": torch.ones(1)}, "updated_at": 1})
    with pytest.raises(ValueError, match=r"a model with other weights: they differ in .*0\.weight"):
        trainer_with(average).fit()
    used = ExponentialMovingAverage()
    trainer_with(used).fit()
    with pytest.raises(ValueError, match=r"another model\. Make a new one"):
        trainer_with(used).fit()


def test_tied_weights_are_averaged_once() -> None:
    model, again = make_model(), nn.Identity()
    again.register_parameter("again", next(model.parameters()))
    average = ExponentialMovingAverage(decay=0.5)
    trainer_with(average, model=nn.Sequential(model, again)).fit()
    state = average.average_state_dict()
    assert torch.equal(state["0.0.weight"], state["1.again"])
    assert "1.again" not in average.state_dict()["average"]
