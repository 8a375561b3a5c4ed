"""From a seed to a combination that makes sense."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from tests.search.averages import per_batch
from tests.search.forms import FORMS
from tests.search.jobs import PAIRS, TWISTS, WIRINGS, Combination
from tests.search.losses import LOSSES
from tests.search.metrics import METRICS
from tests.search.models import MODELS

SIZES = (1, 2, 3, 5)
NO_FAULT = "none"
SIMPLE: dict[str, Any] = {
    "fault": NO_FAULT,
    "metric": None,
    "twist": "none",
    "late": "nothing",
    "dtype": "float64",
    "optimizer": "sgd",
    "declares": False,
    "form": "mapping",
    "wiring": "forward",
    "model": "mlp",
    "loss": "a mean",
}
FAULTS = (NO_FAULT, "oom at an operation", "error at an operation", "a budget")
OUTPUTS_NEEDED = (
    "Composer",
    "a parameter in a closure",
    "a tensor in a closure",
    "a module in a closure",
    "a module that is named",
    "modules that overlap",
)
TEACHERS = ("a teacher that trains its BatchNorm", "a moving-average teacher")


def draw(seed: int) -> Combination:
    """The combination of this seed. The same seed gives the same one for ever."""
    chance = random.Random(seed)
    while True:
        combination = _draw(seed, chance)
        if makes_sense(combination):
            return combination


def _draw(seed: int, chance: random.Random) -> Combination:
    wiring = "forward" if chance.random() < 0.3 else chance.choice(WIRINGS)
    size = chance.choice(SIZES)
    fault = NO_FAULT if chance.random() < 0.5 else chance.choice(FAULTS[1:])
    first = chance.choice((3, 4, 5, 99)) if fault != NO_FAULT else size
    usual = chance.random() < 0.4
    return Combination(
        seed=seed,
        model=chance.choice(("mlp", "dropout", "lstm")) if usual else chance.choice([*MODELS]),
        loss=chance.choice([*LOSSES]),
        declares=chance.random() < 0.4,
        wiring=wiring,
        twist="none" if chance.random() < 0.5 else chance.choice(TWISTS),
        form="mapping" if chance.random() < 0.3 else chance.choice([*FORMS]),
        late=chance.choice(("nothing", "nothing", "padding", "class")),
        metric=None if chance.random() < 0.6 else chance.choice([*METRICS]),
        size=first,
        second_size=chance.choice((1, 2)),
        num_rows=tuple(chance.randint(5, 13) for _ in range(4)),
        dtype=chance.choices(("float64", "float32", "bfloat16"), (85, 11, 4))[0],
        optimizer=chance.choice(("sgd", "momentum", "adam")),
        fault=fault,
        fault_batch=chance.randrange(4),
        fault_place=chance.random(),
    )


def simpler(one: Combination) -> Iterator[Combination]:
    """The same with one ingredient replaced by the simplest, for each that is not."""
    for axis, simple in SIMPLE.items():
        if getattr(one, axis) != simple:
            size = {"size": min(one.size, 3)} if axis == "fault" else {}
            candidate = dataclasses.replace(one, **{axis: simple, **size})
            if makes_sense(candidate):
                yield candidate


def makes_sense(one: Combination) -> bool:
    """Whether plain torch could run it, and whether what is drawn has a meaning there."""
    model, loss = MODELS[one.model], LOSSES[one.loss]
    if loss.shape not in (None, model.shape):
        return False
    if one.dtype != "float64" and (model.only_float64 or loss.only_float64):
        return False
    if one.wiring in (*PAIRS, "keywords", "Composer") and one.form != "mapping":
        return False  # a form of one's own needs a forward of one's own
    if (one.wiring in PAIRS or one.wiring == "Composer") and loss.is_program:
        return False
    if one.wiring in OUTPUTS_NEEDED and loss.is_program:
        return False
    if one.wiring in TEACHERS and (model.shape != "vectors" or one.model == "lazy"):
        return False
    if one.wiring == TEACHERS[1] and model.draws:
        return False
    if one.wiring == "modules that overlap" and one.model == "lazy":
        return False
    if one.metric is not None and (
        loss.is_program or (one.wiring in PAIRS and loss.target != "all")
    ):
        return False
    if one.metric is not None and FORMS[one.form].edits:
        return False
    if one.draws and not _draws_have_a_truth(one):
        return False
    if one.loss in ("weight decay and a sum", "weight decay in the loss") and one.model == "lazy":
        return False
    if one.loss == "router's balance" and one.model != "router":
        return False
    if one.model == "lazy" and one.twist in ("hooks that clamp", "hooks that scale"):
        return False
    if one.loss == "one inner step" and one.model.startswith("checkpointed"):
        return False
    return not (one.declares and loss.true is None)


def _draws_have_a_truth(one: Combination) -> bool:
    """Whether weighted pieces are the truth of a random loss: no part of it counts the pieces."""
    if one.loss in ("an inner backward", "an attack that clears"):
        return False
    if one.wiring == "loss_fn, which holds the model" and LOSSES[one.loss].true is per_batch:
        return False
    return one.twist != "evaluates between"
