"""pytest: does the model still fit? Peaks are planned on tensors without data, on any machine.

Three ways, for anybody's model: `assert_fits` in any test; ``@pytest.mark.fits("80GiB")`` on a test
that returns a model and a batch; the fixture ``fits_baseline``, which keeps peaks by module in a
file beside the tests and names the module that a change made larger. Loaded by pytest itself once
``automicro[pytest]`` is installed; torch is imported only in tests that use it.
"""

import functools
import inspect
import json
import sys
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from automicro.errors import AutomicroWarning, suggestion, warn

if TYPE_CHECKING:
    from automicro.tools.plan.baseline import Peaks
    from automicro.tools.plan.report import PlanReport

FILE = "fits_baseline.json"
_WRITTEN = pytest.StashKey[dict[Path, int]]()  # models by file, in this run
SHARE = 0.05  # that a module may grow by
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
    cut = _planned(model, batch, {**options, "remedies": False})
    most = f"at most {cut.largest_size}" if cut.fits else "not even one"
    rows = f"{most} of its {cut.num_rows} rows would"
    return report, f"the batch does not fit whole: {rows}, and whole=True asks for all\n{report}"


def _planned(model: Any, batch: Any, options: Mapping[str, Any]) -> "PlanReport":
    """What `automicro.plan` says; an error shows the lines of the model, and none of ours."""
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
    """The same error, whose traceback begins where somebody else's code does."""
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


class FitsBaseline:
    """Peaks by module of one test's models, compared with those that were written down.

    Args:
        path: of the file.
        test: whose they are.
        updates: whether to write them down in place of comparing.

    Attributes:
        written: how many were written down.
    """

    def __init__(self, path: Path, test: str, *, updates: bool) -> None:
        self._path, self._test, self._updates = path, test, updates
        self.written = 0
        self._names: set[str] = set()

    def check(
        self,
        model: Any,
        batch: Any,
        *,
        name: str = "model",
        share: float = SHARE,
        **options: Any,
    ) -> "PlanReport":
        """Fail where the peak, or a part's own peak, is larger than was written down.

        The step is that of the whole batch, unless there is a ``microbatch_size``. A module that
        has another name than in the file and holds no more passes with a warning.

        Args:
            model: as in `automicro.plan`, and so ``batch`` and ``options``.
            batch: see there.
            name: of this model in the test, where it has several.
            share: that each may have grown by; 0.05 is 5 %, and at least a MiB.
            options: see there.

        Raises:
            AssertionError: one has grown by more, or nothing is written down yet.
            TypeError, ValueError: arguments that make no sense, or a file that cannot be read.
        """
        from automicro.tools.plan.baseline import Peaks, compare

        __tracebackhide__ = True
        self._look_at(name, share, options)
        options = {"remedies": False, "microbatch_size": _WHOLE, **options}
        report = _planned(model, batch, options)
        known = self._read()
        key = f"{self._test}::{name}"
        if self._updates:
            known[key] = Peaks.of(report).entry()
            text = json.dumps(known, indent=1, sort_keys=True) + "\n"
            self._path.write_text(text, encoding="utf-8")
            self.written += 1
            return report
        if key not in known:
            raise AssertionError(
                f"{self._path.name} has no peaks of {key}; write them down with "
                "pytest --update-fits, and commit the file"
            )
        before = self._peaks(known, key)
        found = compare(before, Peaks.of(report, at_peak=before.is_at_peak), share)
        if found.grown:
            raise AssertionError(
                f"{report.model} holds more than {self._path.name} says, by more than "
                f"{share:.0%}:\n{found}\nIf that is meant: pytest --update-fits"
            )
        if found.renamed:
            warn(
                f"{self._path.name} has other names for modules of {key}, which hold no more than "
                f"before (renamed? {found.shown_renames}); write the new ones down with "
                "pytest --update-fits",
                AutomicroWarning,
            )
        if before.is_at_peak:
            warn(
                f"{self._path.name} was written by an older version: of {key} it knows the fullest "
                "moment alone, and what grows at another one is not seen; write it anew with "
                "pytest --update-fits",
                AutomicroWarning,
            )
        return report

    def _look_at(self, name: str, share: float, options: Mapping[str, Any]) -> None:
        """Refuse arguments that make no sense."""
        __tracebackhide__ = True
        known = ("name", "share")
        _refuse_unknown("fits_baseline.check() has no argument", options, also=known)
        if options.get("memory") is not None:
            raise TypeError(
                f"fits_baseline.check() compares peaks, whatever the memory: leave memory="
                f"{options['memory']!r} out, or ask assert_fits whether they fit"
            )
        if not 0 <= share <= 1:
            raise ValueError(f"share={share!r}: give a share from 0 to 1, such as 0.05 for 5 %")
        if name in self._names:
            raise ValueError(
                f"fits_baseline.check() has seen name={name!r} in this test before: give each "
                "model a name of its own, as in check(…, name='small')"
            )
        self._names.add(name)

    def _read(self) -> dict[str, Any]:
        __tracebackhide__ = True
        if not self._path.exists():
            return {}
        try:
            return dict(json.loads(self._path.read_text("utf-8")))
        except (TypeError, ValueError) as error:
            self._refuse(error)

    def _peaks(self, known: Mapping[str, Any], key: str) -> "Peaks":
        from automicro.tools.plan.baseline import Peaks

        __tracebackhide__ = True
        try:
            return Peaks.read(known[key])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._refuse(error, key)

    def _refuse(self, error: Exception, key: str = "") -> NoReturn:
        __tracebackhide__ = True
        what = f"of {key} in {self._path}" if key else f"in {self._path}"
        raise ValueError(
            f"what stands {what} is no baseline ({type(error).__name__}: {error}); take the file "
            "back from version control, or remove it and write it anew with pytest --update-fits"
        ) from None


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
def fits_baseline(request: pytest.FixtureRequest) -> Iterator[FitsBaseline]:
    """Compare peaks by module with those in a file beside the test: ``.check(model, batch)``."""
    updates = request.config.getoption("--update-fits")
    if updates and hasattr(request.config, "workerinput"):
        raise pytest.UsageError(
            "--update-fits writes one file, which several processes would overwrite for each "
            "other: run it without -n of pytest-xdist"
        )
    _, _, inside = request.node.nodeid.partition("::")
    test = f"{request.path.name}::{inside}"
    path = request.path.with_name(FILE)
    baseline = FitsBaseline(path, test, updates=updates)
    yield baseline
    if baseline.written:
        written = request.config.stash.setdefault(_WRITTEN, {})
        written[path] = written.get(path, 0) + baseline.written


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what ``--update-fits`` has written."""
    for path, number in config.stash.get(_WRITTEN, {}).items():
        models = "a model" if number == 1 else f"{number} models"
        terminalreporter.write_line(f"{path}: peaks of {models} written; commit it")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marked test whose return value nobody would see."""
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
    """What a mark says, by name."""
    __tracebackhide__ = True
    if len(marker.args) > 1:
        shown = ", ".join(map(repr, marker.args))
        raise TypeError(
            f"@pytest.mark.fits({shown}) on {test}: only the memory stands without a name; name "
            "the others, as in @pytest.mark.fits('24GiB', rows=32)"
        )
    if marker.args and "memory" in marker.kwargs:
        raise TypeError(
            f"@pytest.mark.fits on {test} names the memory twice, {marker.args[0]!r} and memory="
            f"{marker.kwargs['memory']!r}; leave one of the two out"
        )
    _refuse_unknown(f"@pytest.mark.fits on {test} has no option", marker.kwargs, also=["whole"])
    memory = {"memory": marker.args[0]} if marker.args else {}
    return {**memory, **marker.kwargs}
