"""What went is answered by name, and what is missing refuses every use."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from automicro import verify
from automicro.events.run import Run
from automicro.features import UpdateMetric
from automicro.integrations.host import check_options
from automicro.nested.parts import MissingLogits, MissingLogitsError
from automicro.tools.pictures import speed_and_memory


def import_it() -> None:
    from automicro import EvalLossAverage  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(
    ("use", "message"),
    {
        lambda: verify(nn.Linear(2, 2), torch.zeros(2, 2), dtype=torch.float32): (  # type: ignore[call-arg]
            "verify has no argument dtype. Cast the model"
        ),
        lambda: speed_and_memory([(1, 1.0, 1)], limit_bytes=3): (  # type: ignore[call-arg]
            "speed_and_memory has no argument limit_bytes. Draw the line"
        ),
        lambda: check_options("enable", {"eval_loss_average": "tokens"}, {}): (
            "enable.eval_loss_average=….* is not known: give loss_average a function"
        ),
        lambda: UpdateMetric(lambda metric, outputs, microbatch, name: None): (
            "missing a required argument: 'name'.* Pass a function .metric, outputs, microbatch."
        ),
        lambda: Run.show(None, "a", None): "loggers take no figures. Write them with",  # type: ignore[arg-type]
        import_it: "automicro has no EvalLossAverage. Give loss_average a function",
        lambda: importlib.import_module("automicro").EvalLossAverage: "has no EvalLossAverage",
    }.items(),
)
def test_what_went_is_answered_by_name(use: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ImportError), match=message):
        use()


@pytest.mark.parametrize(
    "use",
    [
        lambda logits: logits == 1,
        lambda logits: logits != logits,
        lambda logits: 1 - logits,
        lambda logits: float(logits),
        lambda logits: bool(logits),
        lambda logits: np.asarray(logits),
        lambda logits: np.ones(1) == logits,
        lambda logits: torch.ones(1) == logits,
        lambda logits: logits.shape,
    ],
)
def test_logits_that_are_missing_refuse_every_use(use: Callable[[Any], Any]) -> None:
    with pytest.raises(MissingLogitsError, match="Compute what needs them in evaluation"):
        use(MissingLogits())
