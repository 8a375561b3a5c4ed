"""Reading a summary that an earlier run left."""

import dataclasses
import json
import math

from automicro.events.run import GlobalBatch
from automicro.trainer.report import FitSummary


def read_summary(text: str) -> FitSummary:
    """Read a summary that was written as JSON. What is null there is NaN where it has to be.

    Raises:
        TypeError, ValueError: it is no summary.

    >>> read_summary("{}")
    Traceback (most recent call last):
        ...
    TypeError: ...
    """
    values = json.loads(text)
    if not isinstance(values, dict):
        raise TypeError(f"a {type(values).__name__} in place of a mapping")
    for each in dataclasses.fields(FitSummary):
        if each.type in (float, "float") and values.get(each.name, 0.0) is None:
            values[each.name] = math.nan
    for name in ("train_metrics", "eval_metrics"):
        found = values.get(name) or {}
        values[name] = {key: math.nan if each is None else each for key, each in found.items()}
    if isinstance(values.get("global_batch"), dict):
        values["global_batch"] = GlobalBatch(**values["global_batch"])
    return FitSummary(**values)
