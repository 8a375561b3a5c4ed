"""pytest: does the model still fit? Peaks are planned on tensors without data, on any machine.

Two ways, for any model: `assert_fits` in any test, and ``@pytest.mark.fits("80GiB")`` on a test
that returns a model and a batch. Loaded by pytest itself once ``automicro[pytest]`` is installed;
torch is imported only in tests that use it.
"""

import functools
import inspect
import sys
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from automicro.errors import suggestion

if TYPE_CHECKING:
    from automicro.tools.plan.report import PlanReport

_WHOLE = sys.maxsize  # rows of a microbatch that is never cut
_OURS = str(Path(__file__).parents[1])
_HOW = (
    "return (model, batch), or a mapping with 'model', 'batch' and further arguments of "
    "automicro.plan such as 'loss_fn' and 'optimizer'"
)


def assert_fits(model: Any, batch: Any, memory: Any = None, **options: Any) -> "PlanReport":
    """Fail unless a training step of this model fits this memory, in microbatches of one row.

    With ``whole=True`` the whole batch has to fit, in one microbatch.

    Args:
        model: as in `automicro.plan`, and so all others.
        batch: see there.
        memory: see there; or give ``device="a100-80gb"``.
        options: see there; and ``whole``.

    Raises:
        AssertionError: it does not fit; the message is the whole report.
        TypeError, ValueError: arguments that make no sense, each with its remedy.

    Example:
        >>> import torch
        >>> model, batch = torch.nn.Linear(64, 8), torch.randn(32, 64)
        >>> def forward(model, batch):
        ...     return model(batch).square().mean()
        >>> assert_fits(model, batch, "1MiB", forward=forward).microbatch_size
        32
    """
    # pytest leaves frames out that say so: the last one that it shows is the caller's assertion.
    __tracebackhide__ = True
    _refuse_unknown("assert_fits() has no argument", options, also=["whole"])
    options = {"memory": memory, **options}
    report, lack = _judged(model, batch, options, 'assert_fits(…, "24GiB")')
    if lack:
        raise AssertionError(lack)
    return report


def _judged(
    model: Any, batch: Any, options: Mapping[str, Any], example: str
) -> tuple["PlanReport", str]:
    """The plan of a step, and in words why it does not fit; ``example`` names the memory."""
    __tracebackhide__ = True
    options = dict(options)
    whole = options.pop("whole", False)
    if options.get("memory") is None and options.get("device", "cuda") in ("cuda", "cpu"):
        raise ValueError(
            f"nothing says how much memory there is; give it, as in {example}, or name a device "
            "in its place, as in device='a100-80gb' (automicro plan --device help lists them)"
        )
    if not whole:
        report = _planned(model, batch, options)
        return report, "" if report.fits else str(report)
    if options.get("microbatch_size") is not None:
        raise TypeError(
            f"whole=True asks for the whole batch in one microbatch, and microbatch_size="
            f"{options['microbatch_size']!r} for several; leave one of the two out"
        )
    report = _planned(model, batch, {**options, "microbatch_size": _WHOLE})
    if report.fits:
        return report, ""
    # For its size alone: what is shown is the report of the whole batch.
    cut = _planned(model, batch, {**options, "remedies": False})
    most = f"at most {cut.microbatch_size}" if cut.fits else "not even one"
    rows = f"{most} of its {cut.num_rows} rows would"
    return report, f"the batch does not fit whole: {rows}, and whole=True asks for all\n{report}"


def _planned(model: Any, batch: Any, options: Mapping[str, Any]) -> "PlanReport":
    """Call `automicro.plan`; an error shows the lines of the model, and none of ours."""
    from automicro.tools.plan.plan import plan

    __tracebackhide__ = True
    try:
        return plan(model, batch, **options)
    except Exception as error:
        cause = error.__cause__
        if cause is not None:
            _without_our_lines(cause).__suppress_context__ = True  # what was tried before
        raise _without_our_lines(error) from cause


def _without_our_lines(error: BaseException) -> BaseException:
    """The same error, whose traceback begins where the user's code does."""
    lines = error.__traceback__
    while lines is not None and lines.tb_frame.f_code.co_filename.startswith(_OURS):
        lines = lines.tb_next
    return error.with_traceback(lines)


def _refuse_unknown(who: str, given: Iterable[str], *, also: Iterable[str] = ()) -> None:
    """Refuse what `automicro.plan` does not take, in the words of the caller."""
    from automicro.tools.plan.plan import plan

    __tracebackhide__ = True
    known = [*inspect.signature(plan).parameters, *also]
    for name in given:
        if name not in known:
            raise TypeError(
                f"{who} {name!r}{suggestion(name, known)}; there are {', '.join(known)}"
            )


def pytest_configure(config: pytest.Config) -> None:
    """Tell of the marker."""
    # With --strict-markers pytest refuses a marker that it was not told of.
    config.addinivalue_line(
        "markers",
        "fits(memory=None, **options): the test returns a model and a batch, of which a training "
        "step has to fit, planned without a GPU; options are those of automicro.plan",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marked test whose return value is not seen."""
    cls = getattr(item, "cls", None)
    is_unittest = cls is not None and issubclass(cls, unittest.TestCase)
    if is_unittest and item.get_closest_marker("fits") is not None:
        raise pytest.UsageError(
            f"{item.nodeid} is marked with fits, and unittest drops what its tests return: make "
            "it a function of its own, or call assert_fits in it"
        )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[Any]:
    """Judge what a marked test returns, before pytest complains that it returns something."""
    __tracebackhide__ = True
    marker = pyfuncitem.get_closest_marker("fits")
    if marker is None:
        return (yield)
    test = pyfuncitem.obj
    pyfuncitem.obj = _judging(test, marker)
    try:
        return (yield)
    finally:
        # A plugin that runs a test again would find it wrapped, and have it wrapped once more.
        pyfuncitem.obj = test


def _judging(test: Callable[..., Any], marker: pytest.Mark) -> Callable[..., None]:
    @functools.wraps(test)
    def judge(*args: Any, **options: Any) -> None:
        __tracebackhide__ = True
        wanted = _read_marker(marker, test.__name__)
        found = test(*args, **options)
        if inspect.isgenerator(found):
            found = next(found)
        if isinstance(found, Mapping):
            given = dict(found)
        elif isinstance(found, tuple) and len(found) == 2:
            given = {"model": found[0], "batch": found[1]}
        else:
            given = {}
        if not {"model", "batch"} <= set(given):
            keys = f" with {', '.join(map(repr, given))}" if given else ""
            raise TypeError(
                f"{test.__name__} is marked with fits and returned {type(found).__name__}{keys}; "
                f"{_HOW}"
            )
        _refuse_unknown(
            f"{test.__name__} returned, and a plan has no use for,", given, also=["whole"]
        )
        given |= wanted
        model, batch = given.pop("model"), given.pop("batch")
        _, lack = _judged(model, batch, given, '@pytest.mark.fits("24GiB")')
        if lack:
            __tracebackhide__ = False  # pytrace=False hides it, and pytest says nothing of it
            pytest.fail(lack, pytrace=False)

    return judge


def _read_marker(marker: pytest.Mark, test: str) -> dict[str, Any]:
    """The arguments of a mark, by name."""
    __tracebackhide__ = True
    _refuse_unknown(f"@pytest.mark.fits on {test} has no option", marker.kwargs, also=["whole"])
    if len(marker.args) + ("memory" in marker.kwargs) > 1:
        shown = ", ".join([*map(repr, marker.args), *marker.kwargs])
        raise TypeError(
            f"@pytest.mark.fits({shown}) on {test}: only the memory stands without a name, and "
            "once; name the others, as in @pytest.mark.fits('24GiB', rows=32)"
        )
    return {**dict(zip(["memory"], marker.args, strict=False)), **marker.kwargs}
