"""Wrapped out-of-memory errors, as opposed to other errors raised while handling them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Microbatcher
from automicro.errors import describe_error, text_of
from automicro.memory.oom import Failure, classify, first_line
from automicro.step.results import StepResult
from tests.cases import difference, gradients
from tests.outside import Unreached

NOTHING: dict[str, str] = {}


def oom() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")


Fail = Callable[[], None]


def raised_by(fail: Fail) -> Exception:
    try:
        fail()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def chained(first: Fail, then: Callable[[Any], Exception], cause: Any = ...) -> Fail:
    """Return a function that raises an error while handling another one, or from a cause."""

    def fail() -> None:
        try:
            first()
        except Exception as error:
            if cause is ...:
                raise then(error)  # noqa: B904
            raise then(error) from (error if cause == "it" else cause)

    return fail


def raising(make: Callable[[], Exception]) -> Fail:
    def fail() -> None:
        raise make()

    return fail


def in_inner_except_block() -> None:
    try:
        oom()
    except torch.OutOfMemoryError:
        try:
            NOTHING["fallback"]
        except KeyError as error:
            raise ValueError(f"no fallback: {error}")  # noqa: B904


from_it = chained(oom, lambda e: RuntimeError("layer 3 failed"), "it")
quoting_it = chained(oom, lambda e: RuntimeError(f"layer 3 failed: {e}"))
in_a_group = raising(
    lambda: ExceptionGroup("two", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.")])
)
STANDS_FOR_IT: dict[str, Fail] = {
    "from it": from_it,
    "quoting it": quoting_it,
    "quoting its beginning": chained(oom, lambda e: ValueError(f"layer 3: {str(e)[:40]}…")),
    "in words of its own": chained(oom, lambda e: RuntimeError("layer 3 ran out of memory")),
    "quoting twice": chained(quoting_it, lambda e: KeyError(f"block 2: {e}")),
    "quoting what came from it": chained(from_it, lambda e: RuntimeError(f"block 2: {e}")),
    "in a group": in_a_group,
    "in a nested group": chained(in_a_group, lambda e: ExceptionGroup("outer", [e])),
}
FOLLOWED_IT: dict[str, Fail] = {
    "of a fallback": chained(oom, lambda e: ValueError("the fallback takes no odd lengths")),
    "in an inner except block": in_inner_except_block,
    "from none": chained(oom, lambda e: RuntimeError(f"deliberately: {e}"), None),
    "from another": chained(oom, lambda e: RuntimeError(f"quotes {e}"), ValueError("of this")),
    "long after": raising(lambda: RuntimeError(f"no longer handled: {raised_by(oom)}")),
    "while another is handled": chained(
        raising(lambda: KeyError("row 3")),
        lambda e: ValueError("the replay buffer is out of memory slots"),
    ),
    "a name that is short": chained(
        raising(lambda: MemoryError("a")), lambda e: ValueError("a bug")
    ),
}


class FailsOnce(nn.Module):
    left = Unreached()

    def __init__(self, fail: Fail) -> None:
        super().__init__()
        self.linear, self.left, self.fail = nn.Linear(4, 3).double(), 1, fail

    def forward(self, x: Tensor) -> Tensor:
        if self.left:
            self.left -= 1
            self.fail()
        out: Tensor = self.linear(x)
        return out


def backward(model: nn.Module, data: tuple[Tensor, Tensor]) -> StepResult:
    return Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), probe=False).backward(data)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4).double(), torch.randint(3, (8,))


def test_error_caused_by_oom_is_retried_exactly() -> None:
    for fail in STANDS_FOR_IT.values():
        model, data = FailsOnce(fail), batch()
        plain = copy.deepcopy(model.linear)
        nn.CrossEntropyLoss()(plain(data[0]), data[1]).backward()
        assert backward(model, data).ooms == 1
        assert difference(gradients(model.linear), gradients(plain)) < 1e-12


def test_unrelated_error_after_oom_is_raised_unchanged() -> None:
    for fail in FOLLOWED_IT.values():
        model, expected = FailsOnce(fail), raised_by(fail)
        with pytest.raises(type(expected)) as caught:
            backward(model, batch())
        assert type(caught.value) is type(expected)
        assert caught.value.args == expected.args
        assert model.left == 0
        assert model.linear.weight.grad is None


def test_self_referencing_exception_group_is_classified() -> None:
    member = MemoryError()
    group = ExceptionGroup("round", [member])
    member.__cause__ = group
    assert classify(group) in Failure


class MuteError(RuntimeError):
    def __str__(self) -> str:
        raise AttributeError("its text needs what is gone")


class NoTextError(RuntimeError):
    def __str__(self) -> Any:
        return 3


def test_unusual_error_messages_are_quoted_as_encodable_text() -> None:
    name = "photo\udc80.png"
    for error in (MuteError(), NoTextError(), FileNotFoundError(2, "No such file", name)):
        for text in (text_of(error), describe_error(error), first_line(error)):
            assert text
            text.encode()


def test_oom_error_with_failing_str_is_retried() -> None:
    class MuteShortage(torch.OutOfMemoryError):
        __str__ = MuteError.__str__

    assert backward(FailsOnce(raising(MuteShortage)), batch()).ooms == 1
