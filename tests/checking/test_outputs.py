"""Outputs of a few rows, computed together and in two parts: errors of joined microbatches."""

import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import MetricWarning, Microbatcher, is_extra_pass
from tests.acceptance.checks import TABLE, judge, worse_and_better
from tests.sweeps import mostly_in_sweeps

ROWS, SIZE = 12, 4


class Net(nn.Module):
    """Compute a given function; has a counter and a linear layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("sum", torch.zeros(()))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def inputs(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 5)


def on(function: Callable[..., Any], **options: Any) -> Microbatcher:
    options = {"eval_microbatch_size": SIZE, **options}
    return Microbatcher(Net(function), loss_fn=nn.CrossEntropyLoss(), **options)


def told(run: Callable[..., Any], *batches: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            run(batch, **options)
    return [str(each.message) for each in caught if each.category is MetricWarning]


OUTPUTS = [name for name in TABLE if name.startswith("outputs: ")]


@pytest.mark.parametrize("row", mostly_in_sweeps(OUTPUTS, quick=OUTPUTS[::3]))
def test_only_outputs_that_cannot_be_joined_warn(row: str) -> None:
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


RIGHT: dict[str, Callable[..., Any]] = {
    "dropped": lambda net, x: F.dropout(net.linear(x), 0.5),
    "noise of Python": lambda net, x: net.linear(x) + random.random(),
    # As in fake quantization: rounding at an edge moves an output by one step.
    "rounded": lambda net, x: (net.linear(x) * 8).round() / 8,
    "nan": lambda net, x: net.linear(x).log(),
    "near zero": lambda net, x: net.linear(x) - (net.linear(x) * 3 / 3),
    "classes": lambda net, x: {"a": net.linear(x), "b": net.linear(x).argmax(1)},
    "half": lambda net, x: net.linear(x).bfloat16(),
    "sparse": lambda net, x: net.linear(x).to_sparse(),
}


@pytest.mark.parametrize("name", RIGHT)
def test_correct_outputs_give_no_warning_in_any_precision(name: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        microbatcher = on(RIGHT[name])
        microbatcher._model.to(dtype)
        assert told(microbatcher.predict, *(inputs(24).to(dtype) for _ in range(3))) == [], dtype
