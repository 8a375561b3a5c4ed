"""Strategy that draws every meaningful combination of ingredients, simplest first."""

import dataclasses
from typing import Any

from hypothesis import strategies as st

from tests.oracle.averages import per_batch
from tests.oracle.forms import FORMS
from tests.oracle.jobs import PAIRS, TWISTS, WIRINGS, Combination
from tests.oracle.losses import LOSSES
from tests.oracle.metrics import METRICS
from tests.oracle.models import MODELS

NO_FAULT = "none"
FAULTS = (NO_FAULT, "oom at an operation", "error at an operation", "a budget")
SIMPLE = Combination(
    seed=0,
    model="mlp",
    loss="a mean",
    declares=False,
    wiring="forward",
    twist="none",
    form="mapping",
    late="nothing",
    metric=None,
    size=3,
    second_size=2,
    num_rows=(7, 8),
    dtype="float64",
    optimizer="sgd",
    fault=NO_FAULT,
    fault_batch=1,
    fault_place=0.6,
)
# Simplest first, because Hypothesis shrinks failures to these.
INGREDIENTS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "loss": ("a mean", *LOSSES),
    "declares": (False, True),
    "wiring": ("forward", *WIRINGS),
    "twist": TWISTS,
    "form": ("mapping", *FORMS),
    "late": ("nothing", "padding", "class"),
    "metric": (None, *METRICS),
    "dtype": ("float64", "float32", "bfloat16"),
    "optimizer": ("sgd", "momentum", "adam"),
    "fault": FAULTS,
}
# Half of all combinations use the simplest value of these.
OFTEN_SIMPLE = ("twist", "form", "late", "metric", "dtype", "fault")
OUTPUTS_NEEDED = (
    "Composer",
    "a parameter in a closure",
    "a tensor in a closure",
    "a module in a closure",
    "a module that is named",
    "modules that overlap",
)
TEACHERS = ("a teacher that trains its BatchNorm", "a moving-average teacher")


@st.composite
def combinations(draw: st.DrawFn) -> Combination:
    """Draw any meaningful combination."""
    one = SIMPLE
    for axis, values in INGREDIENTS.items():
        if axis in OFTEN_SIMPLE and not draw(st.booleans()):
            continue
        each = [dataclasses.replace(one, **{axis: value}) for value in values]
        one = draw(st.sampled_from([one for one in each if makes_sense(one)]))
    rows = st.integers(5, 13)
    return dataclasses.replace(
        one,
        seed=draw(st.integers(0, 9999)),
        size=draw(st.sampled_from((1, 2, 3, 5) if one.fault == NO_FAULT else (3, 4, 5, 99))),
        second_size=draw(st.sampled_from((1, 2))),
        num_rows=draw(st.tuples(rows, rows, rows, rows)),
        fault_batch=draw(st.integers(0, 3)),
        fault_place=draw(st.floats(0, 1, exclude_max=True)),
    )


def alone(axis: str, value: Any) -> Combination:
    """Return the simplest possible combination with this ingredient."""
    more: dict[str, Any] = {axis: value}
    if axis == "loss" and LOSSES[value].read is not None:
        more["wiring"] = "loss_fn"  # it is inferred only there
    if axis in ("late", "form"):
        more["num_rows"] = (7, 8, 5)
    each = (dataclasses.replace(SIMPLE, **{"model": model, **more}) for model in MODELS)
    return next(one for one in each if makes_sense(one))


def makes_sense(one: Combination) -> bool:
    """Return whether plain torch can run it, and its draws have a defined result."""
    model, loss = MODELS[one.model], LOSSES[one.loss]
    if loss.shape not in (None, model.shape):
        return False
    if one.dtype != "float64" and (model.only_float64 or loss.only_float64):
        return False
    if one.wiring in (*PAIRS, "keywords", "Composer") and one.form != "mapping":
        return False  # a custom form needs a custom forward
    if (one.wiring in PAIRS or one.wiring == "Composer") and loss.is_program:
        return False
    if one.wiring in OUTPUTS_NEEDED and loss.is_program:
        return False
    if one.wiring in TEACHERS and model.shape != "vectors":
        return False
    if one.wiring == TEACHERS[1] and model.draws:
        return False
    if one.metric is not None and (
        loss.is_program or (one.wiring in PAIRS and loss.target != "all")
    ):
        return False
    if one.metric is not None and FORMS[one.form].edits:
        return False
    if one.draws and not _draws_have_a_truth(one):
        return False
    if one.loss == "router's balance" and one.model != "router":
        return False
    if one.loss == "one inner step" and one.model.startswith("checkpointed"):
        return False
    return not (one.declares and loss.true is None)


def _draws_have_a_truth(one: Combination) -> bool:
    """Return whether weighted pieces define the truth of a random loss: nothing counts pieces."""
    if one.loss in ("an inner backward", "an attack that clears"):
        return False
    if one.wiring == "loss_fn, which holds the model" and LOSSES[one.loss].true is per_batch:
        return False
    return one.twist != "evaluates between"
