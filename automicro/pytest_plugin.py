"""pytest: does the model still fit? Peaks are planned on tensors without data, on any machine.

Three ways, for anybody's model: `assert_fits` in any test; ``@pytest.mark.fits("80GiB")`` on a test
that returns a model and a batch; the fixture ``fits_baseline``, which keeps peaks by module in a
file beside the tests and names the module that a change made larger. Loaded by pytest itself once
``automicro[pytest]`` is installed; torch is imported only in tests that use it.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from automicro.planning.report import PlanReport

FILE = "fits_baseline.json"
SHARE = 0.05  # that a module may grow by
LEAST_BYTES = 1 << 20  # that it may grow by in any case
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

    Example:
        >>> import torch
        >>> model, batch = torch.nn.Linear(64, 8), torch.randn(32, 64)
        >>> def forward(model, batch):
        ...     return model(batch).square().mean()
        >>> assert_fits(model, batch, "1MiB", forward=forward).microbatch_size
        32
    """
    from automicro.planning.plan import plan

    __tracebackhide__ = True
    whole = options.pop("whole", False)
    report = plan(model, batch, memory=memory, **options)
    if report.limit_bytes is None:
        raise ValueError(
            "assert_fits needs to know how much memory there is; give it, as in "
            "assert_fits(model, batch, '24GiB'), or name a device: device='a100-80gb'"
        )
    if not report.fits or (whole and report.num_microbatches > 1):
        raise AssertionError(_too_large(report))
    return report


def _too_large(report: "PlanReport") -> str:
    if report.fits:
        return f"the batch does not fit whole, only {report.largest_size} rows of it\n{report}"
    return str(report)


class FitsBaseline:
    """Peaks by module of one test's models, compared with those that were written down.

    Args:
        path: of the file.
        test: whose they are.
        updates: whether to write them down in place of comparing.
    """

    def __init__(self, path: Path, test: str, *, updates: bool) -> None:
        self._path, self._test, self._updates = path, test, updates

    def check(
        self,
        model: Any,
        batch: Any,
        *,
        name: str = "model",
        share: float = SHARE,
        **options: Any,
    ) -> "PlanReport":
        """Fail where the peak, or a module's part of it, is larger than was written down.

        Args:
            model: as in `automicro.plan`, and so ``batch`` and ``options``.
            batch: see there.
            name: of this model in the test, where it has several.
            share: that each may have grown by; 0.05 is 5 %, and at least a MiB.
            options: see there.

        Raises:
            AssertionError: one has grown by more, or nothing is written down yet.
        """
        from automicro.planning.plan import plan
        from automicro.units import format_bytes

        __tracebackhide__ = True
        options = {"remedies": False, "device": "cuda", **options}
        report = plan(model, batch, **options)
        now = {"peak": report.peak_bytes, **_parts(report)}
        known = json.loads(self._path.read_text("utf-8")) if self._path.exists() else {}
        key = f"{self._test}::{name}"
        if self._updates:
            known[key] = now
            text = json.dumps(known, indent=1, sort_keys=True) + "\n"
            self._path.write_text(text, encoding="utf-8")
            return report
        if key not in known:
            raise AssertionError(
                f"{self._path.name} has no peaks of {key}; write them down with "
                "pytest --update-fits, and commit the file"
            )
        before: Mapping[str, int] = known[key]
        grown = {
            part: (before.get(part, 0), num_bytes)
            for part, num_bytes in now.items()
            if num_bytes > before.get(part, 0) * (1 + share) + (LEAST_BYTES if share else 0)
        }
        if grown:
            most = sorted(grown.items(), key=lambda item: item[1][0] - item[1][1])
            lines = [
                f"  {part}: {format_bytes(was)} -> {format_bytes(is_now)}"
                for part, (was, is_now) in most
            ]
            raise AssertionError(
                f"{report.model} holds more than {self._path.name} says, by more than "
                f"{share:.0%}:\n" + "\n".join(lines) + "\nIf that is meant: pytest --update-fits"
            )
        return report


def _parts(report: "PlanReport") -> dict[str, int]:
    """What the peak holds: activations by module, the rest by kind."""
    kinds = {
        kind: num_bytes for kind, num_bytes in report.breakdown.items() if kind != "activations"
    }
    return {**kinds, **{f"activations of {name}": n for name, n in report.modules.items()}}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--update-fits``."""
    parser.getgroup("automicro").addoption(
        "--update-fits",
        action="store_true",
        help=f"write the peaks of fits_baseline into {FILE} in place of comparing with it",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell of the marker."""
    config.addinivalue_line(
        "markers",
        "fits(memory=None, **options): the test returns a model and a batch, of which a training "
        "step has to fit, planned without a GPU; options are those of automicro.plan",
    )


@pytest.fixture
def fits_baseline(request: pytest.FixtureRequest) -> FitsBaseline:
    """Compare peaks by module with those in a file beside the test: ``.check(model, batch)``."""
    path = request.path.with_name(FILE)
    test = request.node.nodeid.rpartition("/")[2]
    return FitsBaseline(path, test, updates=request.config.getoption("--update-fits"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[Any]:
    """Judge what a marked test returns, before pytest complains that it returns something."""
    __tracebackhide__ = True
    marker = pyfuncitem.get_closest_marker("fits")
    if marker is not None:
        pyfuncitem.obj = _judged(pyfuncitem.obj, marker)
    return (yield)


def _judged(test: Callable[..., Any], marker: pytest.Mark) -> Callable[..., None]:
    @functools.wraps(test)
    def judge(*args: Any, **options: Any) -> None:
        __tracebackhide__ = True
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
            raise TypeError(
                f"{test.__name__} is marked with fits and returned {type(found).__name__}; {_HOW}"
            )
        given |= marker.kwargs
        memory = marker.args[0] if marker.args else given.pop("memory", None)
        assert_fits(given.pop("model"), given.pop("batch"), memory, **given)

    return judge
