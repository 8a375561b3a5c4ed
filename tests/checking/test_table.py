"""Rows of the table of checks, and the check of outputs that are joined from microbatches."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import MetricWarning, Microbatcher, is_extra_pass
from tests.acceptance.checks import judge, worse_and_better

ROWS, SIZE = 12, 4


class Net(nn.Module):
    """Compute a given function; has a counter and a linear layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("sum", torch.zeros(()))
        self.forward = functools.partial(function, self)


def inputs(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 5)


def on(function: Callable[..., Any]) -> Microbatcher:
    return Microbatcher(Net(function), loss_fn=nn.CrossEntropyLoss(), eval_microbatch_size=SIZE)


def told(run: Callable[..., Any], *batches: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            run(batch)
    return [str(each.message) for each in caught if each.category is MetricWarning]


# Wrong and named, or right and silent, each for another reason.
QUICK = [
    *("outputs: centred", "outputs: pairs of rows", "outputs: of the whole batch"),
    *("outputs: plain", "outputs: boxes", "outputs: infinite", "outputs: several of each row"),
    *("a number: a maximum", "a number: an exponential of a mean", "a number: a mean"),
    *("a number: a share", "a number: zero", "evaluated: the hardest 16", "evaluated: noise"),
    *("padding begins at batch 3", "a mean over tokens behind a head of zeros"),
    *(
        "loss: the hardest half",
        "loss: gradient penalty",
        "a gradient centred by an autograd function",
    ),
    *("draws from a seed of its own", "a projection from a seed", "dropout", "ReLUs on an edge"),
    *("large terms that cancel", "rounded", "a sparse embedding", "model: clamps its weight"),
    *("model: checkpointed", "loss: Python's noise", "model: dropout, checkpointed"),
]


@pytest.mark.parametrize("row", QUICK)
def test_row_of_table_is_judged_as_recorded(row: str) -> None:
    assert worse_and_better([judge(row, "float32")])[0] == []


def stateful(net: Any, x: Tensor) -> Tensor:
    net.sum.add_(x.mean())
    return net.linear(x) + net.sum  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (stateful, "the output of a row depends on the other"),
        (lambda net, x: {"a": net.linear(x).softmax(0)}, "the output 'a' of a row depends"),
        (lambda net, x: {"b": [net.linear(x)] * 2}, r"'b.0' has the shape \(12, 3\) for 12 rows"),
        (lambda net, x: net.linear(x).T, r"shape \(3, 12\) for 12 rows, and"),
    ],
)
def test_output_warning_is_given_once_with_remedy(function: Any, named: str) -> None:
    microbatcher = on(function)
    (message,) = told(microbatcher.predict, inputs())
    assert re.search(f"{named}.*eval_microbatch_size=None", message)
    assert told(microbatcher.predict, inputs(), inputs()) == []


def test_prediction_succeeds_when_check_fails() -> None:
    def few_rows_fail(net: Any, x: Tensor) -> Tensor:
        if is_extra_pass():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return net.linear(x)  # type: ignore[no-any-return]

    def fails(net: Any, x: Tensor) -> Tensor:
        return net.linear(x.view(SIZE, 5))  # type: ignore[no-any-return]

    for function in (few_rows_fail, fails):
        microbatcher, x = on(function), inputs()
        assert told(microbatcher.predict, x) == []
        assert torch.equal(microbatcher.predict(x), microbatcher.predict(x))


def test_fewer_rows_are_compared_under_low_memory() -> None:
    def centred(net: Any, x: Tensor) -> Tensor:
        if is_extra_pass() and len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return net.linear(x - x.mean(0))  # type: ignore[no-any-return]

    (message,) = told(on(centred).predict, inputs())
    assert "for 4 rows it is off" in message
