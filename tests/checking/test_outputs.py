"""Outputs of a few rows together and in two parts: what joining microbatches would get wrong."""

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

ROWS, SIZE = 12, 4


class Net(nn.Module):
    """Computes what it is told to; has a table, a counter and a linear layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.table = nn.Parameter(torch.randn(7, 3))
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


def stateful(net: Any, x: Tensor) -> Tensor:
    net.sum.add_(x.mean())
    return net.linear(x) + net.sum  # type: ignore[no-any-return]


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "centred": (lambda net, x: net.linear(x - x.mean(0)), "output of a row depends on the other"),
    "softmax": (lambda net, x: {"a": net.linear(x).softmax(0)}, "the output 'a' of a row depends"),
    "state": (stateful, "the output of a row depends on the other"),
    "similarity": (
        lambda net, x: net.linear(x) @ net.linear(x).T,
        r"the shape \(12, 12\) for 12 rows",
    ),
    "turned": (lambda net, x: net.linear(x).T, r"shape \(3, 12\) for 12 rows, and"),
    "table": (
        lambda net, x: {"a": net.linear(x), "b": net.table},
        r"'b' has the shape \(7, 3\) for 12 rows, and",
    ),
    "layers": (
        lambda net, x: {"b": [net.linear(x)] * 2},
        r"'b.0' has the shape \(12, 3\) for 12 rows",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_outputs_that_cannot_be_joined_are_named_once(name: str) -> None:
    function, named = WRONG[name]
    microbatcher = on(function)
    (message,) = told(microbatcher.predict, inputs())
    assert re.search(named, message)
    assert "eval_microbatch_size=None" in message
    assert told(microbatcher.predict, inputs(), inputs()) == []


def test_what_cannot_be_looked_at_is_predicted_all_the_same() -> None:
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


def test_with_little_memory_fewer_rows_are_compared() -> None:
    def centred(net: Any, x: Tensor) -> Tensor:
        if is_extra_pass() and len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return net.linear(x - x.mean(0))  # type: ignore[no-any-return]

    (message,) = told(on(centred).predict, inputs())
    assert "for 4 rows it is off" in message


def rounded(net: Any, x: Tensor) -> Tensor:
    """As fake quantisation does: rounding on an edge moves what comes out by a step."""
    return (net.linear(x) * 8).round() / 8  # type: ignore[no-any-return]


RIGHT: dict[str, Callable[..., Any]] = {
    "plain": lambda net, x: net.linear(x),
    "dropped": lambda net, x: F.dropout(net.linear(x), 0.5),
    "noisy": lambda net, x: net.linear(x + torch.randn_like(x)),
    "noise of Python": lambda net, x: net.linear(x) + random.random(),
    "rounded": rounded,
    "masked": lambda net, x: {"a": net.linear(x).masked_fill(x[:, :3] > 0, -torch.inf)},
    "nan": lambda net, x: net.linear(x).log(),
    "near zero": lambda net, x: net.linear(x) - (net.linear(x) * 3 / 3),
    "classes": lambda net, x: {"a": net.linear(x), "b": net.linear(x).argmax(1)},
    "lists": lambda net, x: [{"boxes": each[each > 0]} for each in net.linear(x)],
    "boxes": lambda net, x: net.linear(x)[net.linear(x)[:, 0] > 0],
    "four classes": lambda net, x: net.linear(x)[:, :1].expand(-1, SIZE),
    "flat": lambda net, x: net.linear(x).repeat_interleave(3, 0),
    "half": lambda net, x: net.linear(x).bfloat16(),
    "hidden": lambda net, x: (net.linear(x), (net.linear(x), x)),
    "sparse": lambda net, x: net.linear(x).to_sparse(),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_right_outputs_are_not_named(name: str, dtype: torch.dtype) -> None:
    microbatcher = on(RIGHT[name])
    microbatcher._model.to(dtype)
    assert told(microbatcher.predict, *(inputs(24).to(dtype) for _ in range(3))) == []
