"""The judge itself: it must see what is wrong, or the search proves nothing."""

import dataclasses
import warnings
from typing import Any

import pytest

from automicro import LossAverageWarning, Microbatcher
from automicro.state.part import State
from automicro.transaction.gradients import Gradients
from tests.search.drawing import SIMPLE, draw, makes_sense
from tests.search.jobs import Combination
from tests.search.losses import LOSSES
from tests.search.models import MODELS
from tests.search.oracle import Verdict, judge_combination
from tests.search.search import cause, simplified

pytestmark = pytest.mark.sweep


def combination(**changes: Any) -> Combination:
    simple: dict[str, Any] = {**SIMPLE, "size": 3, "second_size": 2, "num_rows": (7, 8, 5, 10)}
    found = dataclasses.replace(draw(0), **{**simple, **changes})
    assert makes_sense(found)
    return found


def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is found, nothing is said."""
    monkeypatch.setattr(warnings, "warn_explicit", lambda *args, **options: None)


def talkative(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Every step is warned about."""
    real = Microbatcher.backward

    def backward(self: Microbatcher, *args: Any) -> Any:
        warnings.warn(text, LossAverageWarning, stacklevel=2)
        return real(self, *args)

    monkeypatch.setattr(Microbatcher, "backward", backward)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("model", ["mlp", "dropout", "lstm", "GPT-2", "checkpointed"])
def test_a_mean_is_exact(model: str, size: int) -> None:
    judgement = judge_combination(combination(model=model, size=size))
    assert judgement.verdict is Verdict.EXACT, judgement


@pytest.mark.parametrize("loss", ["a sum", "a masked mean", "InfoNCE", "the hardest half"])
def test_a_wrong_average_is_named_or_silent(monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    one = combination(loss=loss)
    assert judge_combination(one).verdict is Verdict.NAMED
    deaf(monkeypatch)
    assert judge_combination(one).verdict is Verdict.SILENT


def test_a_warning_about_what_is_exact_is_a_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    talkative(monkeypatch, "something may be wrong")
    assert judge_combination(combination()).verdict is Verdict.FALSE_ALARM


def test_a_warning_that_nothing_could_be_checked_is_counted_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    talkative(monkeypatch, "the loss could not be checked")
    assert judge_combination(combination()).verdict is Verdict.UNCHECKED


@pytest.mark.parametrize("place", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("fault", ["oom at an operation", "error at an operation", "a budget"])
def test_a_fault_leaves_a_mean_exact(fault: str, place: float) -> None:
    one = combination(fault=fault, fault_batch=2, fault_place=place, size=4)
    assert judge_combination(one).verdict is Verdict.EXACT


@pytest.mark.parametrize("fault", ["oom at an operation", "error at an operation"])
@pytest.mark.parametrize("part", [Gradients, State])
def test_what_is_not_rolled_back_is_seen(
    monkeypatch: pytest.MonkeyPatch, part: type, fault: str
) -> None:
    one = combination(
        fault=fault,
        fault_batch=2,
        fault_place=0.99,
        size=4,
        twist="gradients are kept",
        model="mlp" if part is Gradients else "running mean",
    )
    monkeypatch.setattr(part, "roll_back", lambda self: None)
    assert judge_combination(one).verdict in (Verdict.SILENT, Verdict.CRASH)


def test_a_bad_combination_is_made_simpler(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf(monkeypatch)
    one = combination(loss="a sum", form="nested", wiring="forward with outputs", late="class")
    small = simplified(judge_combination(one))
    assert small.verdict is Verdict.SILENT
    assert cause(small) == "loss='a sum'"


def test_the_same_seed_gives_the_same_combination() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]


def test_the_search_reaches_every_ingredient() -> None:
    drawn = [draw(seed) for seed in range(2000)]
    assert {each.model for each in drawn} == set(MODELS)
    assert {each.loss for each in drawn} == set(LOSSES)
