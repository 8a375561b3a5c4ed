"""Ingredients of the oracle as rows, each alone in the simplest combination."""

import dataclasses
from typing import Any

from tests.acceptance.rows import ALL, WIDE, Job, Row
from tests.oracle.averages import per_row, per_target
from tests.oracle.contents import make_contents
from tests.oracle.drawing import SIMPLE, makes_sense
from tests.oracle.jobs import DTYPES, Combination
from tests.oracle.jobs import Job as SearchJob
from tests.oracle.losses import LOSSES
from tests.oracle.models import MODELS

SIZE, ROWS, STEPS = 5, (16, 13, 16), 3
# The messages about these are true, but not about splitting.
SAYS = {
    "loss: a metric among the losses": "needs no gradient",  # it is added to the reported loss
    # No attempt may change parameters, because that cannot be rolled back (see the guarantees).
    "model: clamps its weight": "sets parameters",
    "model: max_norm": "changed parameters",
}


def combination(**changes: Any) -> Combination:
    return dataclasses.replace(SIMPLE, size=SIZE, num_rows=ROWS, **changes)


def made(one: Combination, seed: int, precision: str) -> Job:
    dtype = "float32" if precision == "autocast" else precision
    found = SearchJob(dataclasses.replace(one, seed=seed, dtype=dtype))
    more = {"precision": "bf16"} if precision == "autocast" else {}
    kind = one.parts[0]

    def batch(step: int) -> Any:
        contents = make_contents(seed, kind.shape, [*ROWS], "nothing", DTYPES[dtype])
        return found.make_batch(contents[step], step)

    return Job(
        model=found.model, batch=batch, options={**found.options, **more}, size=SIZE, steps=STEPS
    )


def row(name: str, one: Combination) -> Row:
    """Make a row, which is wrong if the ingredient's loss or model is declared so."""
    model, loss = one.parts
    counts_rows = loss.true is per_target and model.shape == "vectors"  # no target is ignored
    # A custom `index_add_` does not support autocast.
    dtypes = WIDE if one.model == "router" else ALL
    return Row(
        kind=f"the search's {'models' if one.loss == SIMPLE.loss else 'losses'}",
        is_wrong=not model.splits or (one.has_wrong_average and not counts_rows),
        make=lambda seed, precision: made(one, seed, precision),
        is_measured=not one.draws,
        dtypes=("float64",) if model.only_float64 or loss.only_float64 else dtypes,
        says=SAYS.get(name, ""),
    )


def rows() -> dict[str, Row]:
    found: dict[str, Combination] = {}
    for name, loss in LOSSES.items():
        model = "router" if name == "router's balance" else SIMPLE.model
        model = "lstm" if loss.shape == "tokens" else model
        one = combination(model=model, loss=name)
        found[f"loss: {name}"] = one
        if loss.true not in (None, per_row):
            found[f"loss: {name}, declared"] = dataclasses.replace(one, declares=True)
    for name in [name for name in MODELS if name != "an unused layer"]:  # torch cannot run it
        found[f"model: {name}"] = combination(model=name)
    return {name: row(name, one) for name, one in found.items() if makes_sense(one)}


SEARCHED = rows()
