"""Warnings point to the caller's line and follow filters."""

import inspect
import warnings
from pathlib import Path

import pytest
from torch import nn

from automicro import BatchNormWarning, LossAverageWarning, Microbatcher
from tests.cases import contrastive
from tests.models import CLASSES, Mlp, x, y


def contrast() -> object:
    return Microbatcher(Mlp(), loss_fn=contrastive, microbatch_size=4).backward((x(), y()))


def normalise() -> object:
    model = nn.Sequential(Mlp(), nn.BatchNorm1d(CLASSES).double())
    microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), microbatch_size=5)
    return microbatcher.backward((x(), y()))


@pytest.mark.parametrize(
    ("run", "category"), [(contrast, LossAverageWarning), (normalise, BatchNormWarning)]
)
def test_warning_points_to_line_that_called_automicro(run: object, category: type[Warning]) -> None:
    assert inspect.isfunction(run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert [each.category for each in caught] == [category]
    lines, first = inspect.getsourcelines(run)
    assert Path(caught[0].filename) == Path(__file__)
    assert first <= caught[0].lineno < first + len(lines)


def test_warning_filters_apply() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=LossAverageWarning)
        contrast()
        warnings.filterwarnings("error", category=LossAverageWarning, module=__name__)
        with pytest.raises(LossAverageWarning):
            contrast()
