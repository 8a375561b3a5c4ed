"""pytest plugin that checks whether a model still fits, by planning its peak without a GPU.

There are two ways: call `assert_fits` in any test, or mark a test that returns a model and a batch
with ``@pytest.mark.fits("80GiB")``. pytest loads this plugin if ``automicro[pytest]`` is installed;
only tests that use it import torch.
"""

import functools
import inspect
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from automicro.tools.plan.report import PlanReport

_WHOLE = sys.maxsize  # rows of a microbatch that is never cut
_OURS = str(Path(__file__).parents[1])
_HOW = (
    "return (model, batch), or a mapping with 'model', 'batch' and other arguments of "
    "automicro.plan such as 'loss_fn' and 'optimizer'"
)


def assert_fits(model: Any, batch: Any, memory: Any = None, **options: Any) -> "PlanReport":
    """Fail unless a training step of this model fits in memory, in microbatches of one row.

    With ``whole=True``, the whole batch must fit in one microbatch.

    Args:
        model: as in `automicro.plan`.
        batch: as in `automicro.plan`.
        memory: as in `automicro.plan`; alternatively pass ``device="a100-80gb"``.
        options: other options of `automicro.plan`, and ``whole``.

    Raises:
        AssertionError: the model does not fit; the message is the whole report.
        TypeError, ValueError: invalid arguments; the message has the remedy.

    Example:
        >>> import torch
        >>> model, batch = torch.nn.Linear(64, 8), torch.randn(32, 64)
        >>> def forward(model, batch):
        ...     return model(batch).square().mean()
        >>> assert_fits(model, batch, "1MiB", forward=forward).microbatch_size
        32
    """
    # pytest hides frames with this variable, so the last frame shown is the caller's assertion.
    __tracebackhide__ = True
    from automicro.tools.plan.plan import plan

    if memory is None and options.get("device", "cuda") in ("cuda", "cpu"):
        raise ValueError(
            "the amount of memory is not known. Give it, as in memory='24GiB', or name a "
            "device, as in device='a100-80gb' (automicro plan --device help lists them)"
        )
    whole: dict[str, Any] = {"microbatch_size": _WHOLE} if options.pop("whole", False) else {}
    try:
        report = plan(model, batch, memory=memory, **whole, **options)
    except Exception as error:
        cause = error.__cause__
        if cause is not None:
            _without_our_lines(cause).__suppress_context__ = True  # hides earlier attempts
        raise _without_our_lines(error) from cause
    if not report.fits:
        raise AssertionError("the batch does not fit whole\n" * bool(whole) + str(report))
    return report


def _without_our_lines(error: BaseException) -> BaseException:
    """Return the same error with a traceback that starts at the user's code."""
    lines = error.__traceback__
    while lines is not None and lines.tb_frame.f_code.co_filename.startswith(_OURS):
        lines = lines.tb_next
    return error.with_traceback(lines)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    # With --strict-markers, pytest refuses markers that are not registered.
    config.addinivalue_line(
        "markers",
        "fits(memory=None, **options): check that a training step of the returned model and "
        "batch fits, planned without a GPU; options are those of automicro.plan",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse marked tests whose return value is lost."""
    cls = getattr(item, "cls", None)
    is_unittest = cls is not None and issubclass(cls, unittest.TestCase)
    if is_unittest and item.get_closest_marker("fits") is not None:
        raise pytest.UsageError(
            f"{item.nodeid} is marked with fits, but unittest drops the values that its tests "
            "return: make it a plain function, or call assert_fits in it"
        )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[Any]:
    """Check the return value of a marked test before pytest warns about it."""
    __tracebackhide__ = True
    marker = pyfuncitem.get_closest_marker("fits")
    if marker is None:
        return (yield)
    test = pyfuncitem.obj
    pyfuncitem.obj = _judging(test, marker)
    try:
        return (yield)
    finally:
        # A plugin that reruns the test would otherwise find it wrapped, and wrap it again.
        pyfuncitem.obj = test


def _judging(test: Callable[..., Any], marker: pytest.Mark) -> Callable[..., None]:
    @functools.wraps(test)
    def judge(*args: Any, **options: Any) -> None:
        __tracebackhide__ = True
        found = test(*args, **options)
        if inspect.isgenerator(found):
            found = next(found)
        if isinstance(found, tuple) and len(found) == 2:
            found = {"model": found[0], "batch": found[1]}
        if not isinstance(found, Mapping) or not {"model", "batch"} <= set(found):
            raise TypeError(
                f"{test.__name__} is marked with fits and returned {type(found).__name__}; {_HOW}"
            )
        given: dict[str, Any] = {**found, **marker.kwargs}
        assert_fits(given.pop("model"), given.pop("batch"), *marker.args, **given)

    return judge
