"""User code compared with plain torch: exact, named or refused, and never silently wrong.

`make test` judges each ingredient alone, `make sweeps` twenty combinations, `make search` two
thousand. Hypothesis simplifies failures; ``judge(Combination(…))`` repeats one.
"""

import collections
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings

from automicro import LossAverageWarning, Microbatcher
from automicro.state.part import State
from automicro.transaction.gradients import Gradients
from tests.oracle.drawing import INGREDIENTS, SIMPLE, alone, combinations, makes_sense
from tests.oracle.jobs import Combination
from tests.oracle.judging import BAD, Verdict, judge
from tests.torture.engine.sweep import quiet

ALONE = {
    f"{axis}: {value}": alone(axis, value)
    for axis, values in INGREDIENTS.items()
    for value in dict.fromkeys(values)
    if value != getattr(SIMPLE, axis)
}
ALONE |= {
    f"{name}, declared": dataclasses.replace(one, declares=True)
    for name, one in ALONE.items()
    if one.has_wrong_average and one.parts[1].true is not None
}
# Twists and wirings, combined with first attempts that run out of memory.
ALONE |= {
    f"{name}, out of memory": dataclasses.replace(one, fault="oom at an operation", size=4)
    for name, one in ALONE.items()
    if name.startswith(("twist: ", "wiring: "))
}
HOOKED = ("tied weights", "a layer for some rows", "checkpointed", "running mean")
ALONE |= {
    f"model: {model}, {twist}": dataclasses.replace(alone("model", model), twist=twist)
    for model in HOOKED
    for twist in ("hooks that clamp", "hooks on all together")
}
ALONE |= {
    f"wiring: {wiring}, hooks that clamp": dataclasses.replace(
        alone("wiring", wiring), twist="hooks that clamp"
    )
    for wiring in ("a parameter in a closure", "a module in a closure")
}
# Plain torch cannot train on these alone.
INVALID = {"model: an unused layer", "loss: positives or a constant"}
# Not exact, although the pieces add up to the whole; the judge decides about all others.
NOT_EXACT = {
    "model: clamps its weight": Verdict.NAMED,
    "model: max_norm": Verdict.REFUSED,
    "model: NumPy's generator": Verdict.UNCHECKED,
    "model: NumPy's global draws": Verdict.UNCHECKED,
    "loss: an attack that clears": Verdict.REFUSED,
    "loss: an inner backward": Verdict.REFUSED,
    "loss: NumPy noise in a closure": Verdict.UNCHECKED,
    "loss: a metric among the losses": Verdict.NAMED,
    "metric: a running window": Verdict.NAMED,
    "wiring: a teacher that trains its BatchNorm": Verdict.NAMED,
    "wiring: a teacher that trains its BatchNorm, out of memory": Verdict.NAMED,
}


@pytest.fixture(autouse=True, scope="module")
def without_logs() -> Iterator[None]:
    with quiet():
        yield


def combination(**changes: Any) -> Combination:
    found = dataclasses.replace(SIMPLE, **changes)
    assert makes_sense(found)
    return found


@pytest.mark.parametrize("name", sorted(ALONE.keys() - INVALID))
def test_single_ingredient_is_exact_or_named(name: str) -> None:
    one = ALONE[name]
    found = judge(one)
    if name in NOT_EXACT:
        assert found.verdict is NOT_EXACT[name], found
    elif one.parts[0].splits and not one.has_wrong_average:
        assert found.verdict is Verdict.EXACT, found
    else:
        assert found.verdict in (Verdict.NAMED, Verdict.EXACT), found


def judge_drawn(one: Combination) -> Verdict:
    found = judge(one)
    assume(found.verdict is not Verdict.INVALID)
    assert found.verdict not in BAD, found
    return found.verdict


EXPLAINED: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.sweep
@settings(max_examples=20, **EXPLAINED)
@given(combinations())
def test_sampled_combinations_are_exact_or_named(one: Combination) -> None:
    judge_drawn(one)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_combinations_are_exact_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts: collections.Counter[Verdict] = collections.Counter()

    @settings(max_examples=2000, **EXPLAINED)
    @given(combinations())
    def search(one: Combination) -> None:
        verdicts[judge_drawn(one)] += 1

    search()
    with capsys.disabled():
        print("\n" + "\n".join(f"{n:7d}  {verdict.value}" for verdict, n in verdicts.items()))


# Tests of the judge itself, which must detect errors


def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suppress every warning about findings."""
    monkeypatch.setattr(warnings, "warn_explicit", lambda *args, **options: None)


@pytest.mark.parametrize("loss", ["a sum", "a masked mean", "InfoNCE", "the hardest half"])
def test_a_wrong_average_is_named_or_silent(monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    one = combination(loss=loss)
    assert judge(one).verdict is Verdict.NAMED
    deaf(monkeypatch)
    assert judge(one).verdict is Verdict.SILENT


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("something may be wrong", Verdict.FALSE_ALARM),
        ("the loss could not be checked", Verdict.UNCHECKED),
    ],
)
def test_warning_about_exact_job_is_not_accepted(
    monkeypatch: pytest.MonkeyPatch, text: str, verdict: Verdict
) -> None:
    real = Microbatcher.backward

    def backward(self: Microbatcher, *args: Any) -> Any:
        warnings.warn(text, LossAverageWarning, stacklevel=2)
        return real(self, *args)

    monkeypatch.setattr(Microbatcher, "backward", backward)
    assert judge(combination()).verdict is verdict


@pytest.mark.parametrize("fault", ["oom at an operation", "error at an operation"])
@pytest.mark.parametrize("part", [Gradients, State])
def test_judge_detects_missing_rollback(
    monkeypatch: pytest.MonkeyPatch, part: type, fault: str
) -> None:
    model = "mlp" if part is Gradients else "running mean"
    one = combination(
        fault=fault,
        fault_batch=2,
        fault_place=0.99,
        size=4,
        num_rows=(7, 8, 5),
        twist="gradients are kept",
        model=model,
    )
    monkeypatch.setattr(part, "roll_back", lambda self: None)
    assert judge(one).verdict in (Verdict.SILENT, Verdict.CRASH)
