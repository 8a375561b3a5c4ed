"""Find why splitting changes a batch, by comparing again with one condition changed at a time."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from automicro.batch.device import on_host
from automicro.batch.layout import BatchLayout, balanced_sizes
from automicro.batch.tensors import map_tensors
from automicro.batchnorm import find_batchnorm, needs_two_rows
from automicro.checking import report as told
from automicro.checking.bench import Bench, Conditions, cuts
from automicro.checking.candidates import Candidate, candidates, expression, named
from automicro.checking.draws import HeldDraws
from automicro.checking.reading import LOSS, gaps, relative_errors
from automicro.checking.report import Comparison, Finding, VerifyReport, finding
from automicro.checking.rows import telling_rows
from automicro.errors import BatchError, LossError, RollbackError, describe_error, text_of
from automicro.loss import averages as means
from automicro.loss.averages import Average, LossAverage, Sum
from automicro.loss.conventions import choose_convention
from automicro.loss.passes import Computation
from automicro.memory.oom import Failure, classify, ignoring_errors
from automicro.modules import unshaped
from automicro.options import check_model, check_unwrapped, read_count, resolve_device
from automicro.reach import Reach
from automicro.values import walk

_MOST_MICROBATCHES = 32
_STILL: Mapping[str, Any] = {"batchnorm": False, "carries": False}
_ONE = "BatchNorm needs two values per channel"


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A model and the functions that compute its loss."""

    model: nn.Module
    modules: tuple[nn.Module, ...]
    loss_fn: Callable[..., Any] | None
    forward: Callable[..., Any] | None

    @property
    def roots(self) -> dict[str, Any]:
        """All participants by name."""
        more = {f"modules[{index}]": each for index, each in enumerate(self.modules)}
        return {"": self.model, **more, "forward": self.forward, "loss_fn": self.loss_fn}

    def tops(self) -> list[nn.Module]:
        """Return all modules, including a loss module."""
        return [each for each in self.roots.values() if isinstance(each, nn.Module)]

    @property
    def loss_name(self) -> str:
        """A name of the loss function that its author would recognize."""
        function = self.forward or self.loss_fn
        # The author knows the function by its own name, not as a partial.
        while isinstance(function, functools.partial):
            function = function.func
        if function is None:
            return f"{type(self.model).__name__}'s own loss"
        name = str(getattr(function, "__name__", type(function).__name__))
        return "the loss" if name == "<lambda>" else name


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """Comparison of a whole batch with one way to split it."""

    found: Mapping[str, float]  # relative differences beyond chance, by name
    off: Mapping[str, float]  # the same without numbers: gradients and module outputs only
    errors: Mapping[str, float]  # relative error of each parameter's gradient, including chance
    shown: Comparison  # the row of the report
    by_chance: bool  # whether a difference appeared that chance explains
    buffers: Sequence[str]  # names of buffers that forwards change
    attributes: Sequence[str]  # names of attributes and variables that forwards change
    written: Sequence[str]  # leaves of the batch that the forward wrote to
    draws: HeldDraws  # record of held draws and of the lowest precision
    unheld: Sequence[str]  # sources of draws that could not be held constant


class _Examination:
    """Examination of one model with one batch."""

    def __init__(
        self,
        subject: _Subject,
        batch: Any,
        layout: BatchLayout,
        device: torch.device,
        loss_average: Any,
    ) -> None:
        self.subject, self.batch, self.layout = subject, batch, layout
        self.num_rows = layout.num_rows(batch)
        self.is_declared = means.is_declared(loss_average)
        self.convention = choose_convention(
            subject.model, forward=subject.forward, loss_fn=subject.loss_fn, count=loss_average
        )
        roots, averages = subject.roots, self.averages_of(loss_average)
        self.computation = Computation(
            modules=subject.tops(),
            convention=self.convention,
            averages=averages,
            layout=layout,
            device=device,
            roots=roots,
            reach=Reach(roots),
        )
        self.is_known = all(average.is_known for average in averages.values())
        self.taken = " and ".join(dict.fromkeys(each.describe() for each in averages.values()))
        self.layers = [
            f"{prefix}.{name}".lstrip(".")
            for prefix, top in roots.items()
            if isinstance(top, nn.Module)
            for name in find_batchnorm(top)
        ]

    def averages_of(self, value: Any) -> dict[str, Average]:
        """Return the averages that a value of ``loss_average`` means."""
        return means.read_average(
            value,
            loss_fn=self.subject.loss_fn,
            model=self.subject.model,
            targets=self.convention.targets,
            reads_model=self.convention.computes_loss_in_model,
            counts_items=self.convention.counts_items,
        )

    def targets(self) -> Tensor | None:
        """Return integer targets (classes or tokens), or None if the batch has none."""
        with ignoring_errors():
            # The caller's code might run here, and its errors are not findings.
            found = self.convention.targets(self.batch)
            is_plain = isinstance(found, Tensor) and not found.is_nested
            return found if is_plain and not found.is_floating_point() else None
        return None

    def can_tell(self) -> bool:
        """Return whether this batch would reveal that an assumed average is wrong."""
        targets = self.targets()
        if self.is_known or targets is None or targets.dim() < 2:
            return True
        # If all rows have the same number of targets, a mean over targets is a mean over rows.
        counts = (targets != means.IGNORED).flatten(1).sum(1)
        return bool((counts != counts[0]).any())

    def compare(
        self,
        sizes: Sequence[int],
        *,
        value: Any = None,
        rows: Sequence[int] | None = None,
        **conditions: Any,
    ) -> _Compared:
        """Compare under these conditions, with a different average if given."""
        tried = self.computation
        if value is not None:
            tried = replace(tried, averages=self.averages_of(value))
        given = Conditions(**{"batchnorm": True, "notes_state": True, **conditions})
        with Bench(tried, given) as bench:
            together, apart = cuts(self.layout, self.batch, sizes, rows)
            whole, parts = bench.read(together), bench.read(apart)
            errors = relative_errors(parts, whole)
            found, blind = bench.compare(together, whole, parts)
            worst = max(errors, key=lambda name: errors[name], default="")
            loss = whole.numbers[LOSS]
            shown = Comparison(
                microbatch_size=max(sizes),
                num_microbatches=len(sizes),
                error=errors.get(worst, 0.0),
                worst=worst,
                # Near 0 a relative error of the loss would be meaningless.
                loss_error=abs(parts.numbers[LOSS] - loss) / max(0.05, abs(loss)),
            )
            places = [place for place, _ in parts.state.values()]
            return _Compared(
                found=found,
                # Gradients only: a loss can be reported incorrectly and still be trained correctly.
                off={name: size for name, size in found.items() if name not in whole.numbers},
                errors=errors,
                shown=shown,
                by_chance=not found and bool(blind),
                buffers=[each.name for each in places if each.is_buffer],
                attributes=[each.name.removeprefix("→") for each in places if not each.is_buffer],
                written=sorted(whole.written),
                draws=bench.draws,
                unheld=sorted(self._named(bench.draws.unheld)),
            )

    def _named(self, unheld: Iterable[str]) -> Iterator[str]:
        """Yield sources of random draws, with the caller's generators by their paths."""
        for name in unheld:
            own = self.computation.reach.named_generators() if "your own" in name else {}
            numbers = (path for path, each in own.items() if not isinstance(each, torch.Generator))
            yield from numbers if own else (name,)

    # Causes

    def gap(self, sizes: Sequence[int], **conditions: Any) -> Mapping[str, float]:
        """Return differing gradients under these conditions, or `{"": inf}` if parts fail."""
        try:
            return self.compare(sizes, **conditions).off
        except Exception as error:
            _refuse(error)
            # A failure under this condition also shows that the condition matters.
            return {"": math.inf}

    def diagnose(self, seen: _Compared) -> tuple[list[Finding], Candidate | None]:
        """Hold all suspects still, find the right average, then release one suspect at a time."""
        sizes = balanced_sizes(self.num_rows, seen.shown.microbatch_size)
        # With everything else held still, the remaining difference comes from the loss.
        rest, causes, found = self.gap(sizes, **_STILL), list[Finding](), None
        if rest:
            found = self._average(sizes)
            if found is None:
                weighted, found = self._weighted(sizes)
                if weighted is None:
                    return self._unexplained(sizes), None
                causes = [weighted]
            else:
                shown = (
                    f"with loss_average={found.code} nothing differs, on this batch and on a "
                    "few of its rows; without it the relative error of a gradient is "
                    f"{max(rest.values()):.1g}"
                )
                name, kind = [found.code], found.kind
                causes = [finding("loss average", name, shown, kind=kind, taken=self.taken)]
        value = None if found is None else found.value
        proven = []
        for kind, names, loose in (
            # One at a time: with two loose, both causes could look innocent, or both guilty.
            ("batchnorm", self.layers, "batchnorm"),
            ("buffers", seen.buffers, "carries"),
            ("attributes", seen.attributes, "carries"),
        ):
            error = self.gap(sizes, value=value, **{**_STILL, loose: True}) if names else {}
            if error:
                shown = f"held still, nothing differs; else by {max(error.values()):.1g} of itself"
                proven.append(finding(kind, names, shown))
        return [*proven, *causes] or [finding("unknown")], found

    def _fits(self, tried: Candidate, sizes: Sequence[int]) -> bool:
        """Return whether an average makes this batch exact, and also some of its rows."""
        # On the whole batch alone an average might fit by chance, if all its counts are equal.
        rows = telling_rows(self.layout, self.batch, self.num_rows)
        few = {"sizes": [*map(len, rows)], "rows": [*rows[0], *rows[1]]}
        with ignoring_errors():
            given = ({"sizes": sizes}, few)
            return not any(self.compare(**g, value=tried.value, **_STILL).found for g in given)
        return False

    def _average(self, sizes: Sequence[int]) -> Candidate | None:
        """Return the ``loss_average`` that makes the split exact, with one entry per loss."""
        with on_host():
            # On the host, because counts of a batch can be as large as the batch.
            tried = list(candidates(self.batch, self.convention))
        if self.losses:
            fitting: dict[str, Candidate] = {}
            for each in tried:
                value = dict.fromkeys(self.losses, each.value)
                with ignoring_errors():
                    found = self.compare(sizes, value=value, **_STILL).found
                    fitting = {**dict.fromkeys(self.losses - found.keys(), each), **fitting}
                if fitting.keys() == self.losses:
                    break
            # Sorted, so that the code shown is the same in each run.
            fitting = dict(sorted(fitting.items()))
            tried = [named(fitting)] if fitting.keys() == self.losses else []
        return next((each for each in tried if self._fits(each, sizes)), None)

    def _unexplained(self, sizes: Sequence[int]) -> list[Finding]:
        """Return the innermost modules with equal inputs and different outputs, or the loss."""
        modules = {
            name or type(module).__name__
            for top in self.computation.reached
            for name, module in top.named_modules()
        }
        off = self.gap(sizes, watches=True, **_STILL)
        # A module with different inputs is not where the difference starts.
        guilty = [each for each in off if each in modules and f"the input of {each}" not in off]
        inner = [n for n in guilty if not any(o.startswith(f"{n}.") for o in guilty)]
        model = type(self.subject.model).__name__
        inner = [name for name in inner if name != model or len(inner) == 1]
        cause = finding("across rows", inner)
        if not inner:
            cause = finding("compares rows", [self.subject.loss_name])
        return [cause, *([finding("batchnorm", self.layers)] if self.layers else [])]

    def _weighted(self, sizes: Sequence[int]) -> tuple[Finding | None, Candidate | None]:
        """Return the finding and candidate for a mean weighted by class or by unknown weights."""
        few = telling_rows(self.layout, self.batch, self.num_rows, most=12)
        rows = sorted([*few[0], *few[1]])
        sums = replace(
            self.computation, averages={name: Sum() for name in self.computation.averages}
        )
        vectors = []
        with ignoring_errors(), Bench(sums, Conditions(**_STILL)) as bench:
            for some in (rows, *([row] for row in rows)):
                reading = bench.read(cuts(self.layout, self.batch, [len(some)], some)[0])
                flat = [each.double().flatten() for _, each in sorted(reading.gradients.items())]
                # The loss is one more entry, because gradients alone might be linearly dependent.
                vectors.append(torch.cat([*flat, torch.tensor([reading.numbers[LOSS]])]))
            eps = bench.rounding[1]
        if len(vectors) <= len(rows) or len({each.shape for each in vectors}) > 1:
            return None, None
        whole, *alone = vectors
        # If the batch's gradient is a weighted sum of the rows' gradients, least squares finds the
        # weights.
        columns = torch.stack(alone, 1)
        # Normalized columns, because one row with a large gradient would dominate the others.
        scales = columns.norm(dim=0).clamp(min=1e-30)
        solved = torch.linalg.lstsq(columns / scales, whole[:, None], driver="gelsd").solution[:, 0]
        # Reject solutions that do not explain the whole or are not a mean.
        off = float((columns / scales @ solved - whole).norm() / whole.norm().clamp(min=1e-30))
        weights, slack = (solved / scales).tolist(), 100 * math.sqrt(eps)
        if off > slack or min(weights) < -slack / 100 or abs(sum(weights) - 1) > slack:
            return None, None
        name, targets, classes = self.subject.loss_name, self.targets(), dict[int, list[float]]()
        if targets is not None and targets.shape == (self.num_rows,):
            for label, weight in zip(targets[rows].tolist(), weights, strict=True):
                classes.setdefault(label, []).append(weight)
        are_equal = all(max(each) - min(each) <= slack * max(each) for each in classes.values())
        if targets is None or not (0 < len(classes) < len(rows) and are_equal):
            shown = ", ".join(f"{row}: {each:.3g}" for row, each in zip(rows, weights, strict=True))
            return finding("loss average: by row", [name], weights=shown), None
        # Only ratios are known, so the smallest weight is shown as 1.
        least = min(each[0] for each in classes.values() if each[0] > 0)
        table = {label: each[0] / least for label, each in sorted(classes.items())}
        found = None
        code = "… as a callable that sums the weights of a microbatch's targets"
        # The weights of classes missing from the few rows are unknown.
        if min(table) >= 0 and {*targets.tolist()} <= table.keys():
            digits = max(4, round(-math.log10(eps)) - 2)
            every = (table.get(label, 0.0) for label in range(max(table) + 1))
            shown = ", ".join(f"{each:.{digits}g}" for each in every)
            where = expression(self.batch, targets)
            tried = Candidate(
                code=f"lambda batch: torch.tensor([{shown}])[{where}].sum()",
                kind="a mean over the class weights of its targets",
            )
            if self._fits(tried, sizes):
                found, code = tried, tried.code
        shown = ", ".join(f"class {label}: {each:.4g}" for label, each in table.items())
        return finding("class weights", [name], weights=shown, code=code), found

    # The report

    def why_incomparable(self) -> Finding | None:
        """Return why comparisons would be meaningless, or None."""
        together, _ = cuts(self.layout, self.batch, [self.num_rows])
        with Bench(self.computation, Conditions(batchnorm=True)) as bench:
            whole, again = bench.read(together), bench.read(together)
            loss, changes = whole.numbers[LOSS], gaps(whole, again, ())
            parts = whole.numbers.keys() - {LOSS} - whole.told
            self.losses = set() if whole.has_total else parts
            self.lowest = bench.draws.lowest
            if not (math.isfinite(loss) and math.isfinite(whole.size)):
                return finding("batch: infinite", loss=loss)
            # Any split also has gradient 0, which would pass as exact.
            if not whole.gradients or whole.size == 0:
                return finding("batch: no gradient")
            if changes and not bench.draws.unheld:
                return finding("non-deterministic", error=max(changes.values()))
        return None

    def report(self, sizes: Sequence[int] | None, why: str) -> VerifyReport:
        """Compare at each size and explain the largest difference."""
        cause = self.why_incomparable()
        if cause is not None:
            return _unverifiable(cause, self.num_rows)
        every, broken, comparisons = list[_Compared](), list[Finding](), list[Comparison]()
        for size in _cuts(self.num_rows, sizes):
            cut = balanced_sizes(self.num_rows, size)
            try:
                every.append(self.compare(cut))
                comparisons.append(every[-1].shown)
            except Exception as error:
                _refuse(error)
                failure = _ONE if needs_two_rows(error) else describe_error(error)
                row = Comparison(microbatch_size=size, num_microbatches=len(cut), error=math.nan)
                # Continue with other sizes, because a model might fail only on single rows.
                comparisons.append(replace(row, failure=failure))
                if not needs_two_rows(error):
                    name = [self.subject.loss_name]
                    broken.append(finding("fails on fewer rows", name, size=size, failure=failure))
        first = every[0] if every else None
        names = dict.fromkeys(name for each in every for name in each.errors)
        errors = {name: max(each.errors.get(name, 0.0) for each in every) for name in names}
        causes, found = list[Finding](), None
        # All sizes failed, as BatchNorm does on a single row.
        if first is None and self.layers:
            causes = [finding("batchnorm", self.layers)]
        off = [each for each in every if each.off]
        if off:
            # Where the difference is largest, each cause stands out best from rounding.
            causes, found = self.diagnose(max(off, key=lambda each: each.shown.error))
        causes = [*broken[:1], *causes]
        is_random = False
        if first is not None and first.draws.repeats and not causes:
            shown = "microbatches draw from the same generator state as the whole batch"
            causes = [finding("random: repeated", sorted(first.draws.drawn), shown)]
        elif first is not None and first.unheld and not causes:
            is_random = any(each.by_chance for each in every)
            causes = [finding("random", first.unheld)] if is_random else []
        lowest = self.lowest if first is None else first.draws.lowest
        precision = str(lowest).removeprefix("torch.")
        known = {name for each in every for name in each.found}
        chance = (error for name, error in errors.items() if name not in known)
        # Chance can exceed rounding, and must not be called a difference below.
        tolerance = max([16 * torch.finfo(lowest).eps, *chance])
        most = max(errors.values(), default=math.nan)
        status = told.UNVERIFIABLE if is_random else told.NOT_EXACT
        text = causes[0].text if causes else ""
        if not causes:
            status, text = told.EXACT, "splitting does not change the gradient (max relative error "
            text += f"{most:.0e} in {precision})"
        elif not is_random:
            text += f" (relative error {most:.2g})" if most > tolerance else ""
            text += f", and {len(causes) - 1} more below" if causes[1:] else ""
        verdict = f"{status}: {text}"
        if found is not None and len(causes) == 1:
            verdict = (
                f"exact with loss_average={found.code} ({found.kind}); as configured "
                f"({self.taken}) the relative error is {most:.2g}"
            )
        if torch.get_default_dtype() is torch.float64 and lowest is not torch.float64:
            why = f"{why}; the model itself casts down to {precision}".lstrip("; ")
        loss_errors = [each.loss_error for each in comparisons if each.loss_error > tolerance]
        sureness = "checked" if not causes and self.can_tell() else "unchecked"
        sureness = "declared" if self.is_declared else "read" if self.is_known else sureness
        return VerifyReport(
            status=status,
            verdict=verdict,
            loss_average="" if found is None else found.code,
            loss_average_is=sureness if found is None else "wrong",
            causes=tuple(causes),
            notes=tuple(self._notes(first, causes, max(loss_errors, default=0.0))),
            comparisons=tuple(comparisons),
            parameter_errors=errors,
            num_rows=self.num_rows,
            dtype=precision,
            tolerance=tolerance,
            method=why,
        )

    def _notes(
        self, seen: _Compared | None, causes: Sequence[Finding], loss_error: float
    ) -> Iterator[Finding]:
        """Yield findings that change no gradient."""
        if seen is not None:
            drawn = [*sorted(seen.draws.drawn), *seen.unheld]
            for key, names in (
                ("random: held", drawn),
                ("input written", seen.written),
                ("mode", [] if self.subject.model.training else [""]),
                ("buffers: not read", seen.buffers),
                ("attributes: not read", seen.attributes),
            ):
                noted = finding(key, filter(None, names))
                if names and noted.kind not in {each.kind for each in causes}:
                    yield noted
        if loss_error and not causes:
            yield finding("loss value", error=loss_error)
        if not causes and not self.can_tell():
            yield finding("batch: even")
        modules = [each for top in self.subject.tops() for each in top.named_modules()]
        parts = [name for name, each in modules if hasattr(vars(each).get("forward"), "nested")]
        if parts:
            yield finding("parts", parts)


def _refuse(error: Exception) -> None:
    """Re-raise errors that do not show whether fewer rows can run."""
    # These errors concern the batch or the model at any size.
    is_told = isinstance(error, BatchError | LossError | RollbackError)
    if is_told or classify(error) is not Failure.UNRELATED:
        raise error


def _cuts(num_rows: int, sizes: Sequence[int] | None) -> list[int]:
    """Return the largest microbatch size of each distinct cut."""
    if sizes is None:
        # Equal parts would hide a mean of means.
        ragged = next((pieces for pieces in range(3, num_rows) if num_rows % pieces), 2)
        most = [-(-num_rows // 2), num_rows] if num_rows <= _MOST_MICROBATCHES else [16]
        sizes = [-(-num_rows // pieces) for pieces in (2, ragged, *most)]
    cuts = [balanced_sizes(num_rows, size)[0] for size in sizes if size < num_rows]
    if not cuts:
        raise ValueError(
            f"sizes={list(sizes)} leaves the batch of {num_rows} rows whole; give sizes below it"
        )
    return sorted(set(cuts), reverse=True)


def verify(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    loss_average: LossAverage = "auto",
    modules: Iterable[nn.Module] = (),
    sizes: Iterable[int] | None = None,
    batch_layout: int | Mapping[str, Any] = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str = "auto",
) -> VerifyReport:
    """Check whether splitting this batch changes this model's gradient, and why.

    Compares the whole batch's gradient with gradients from a `Microbatcher` at several sizes, with
    dropout disabled, and in float64 if the model supports it. If they differ, experiments find the
    cause by holding one suspect still at a time.

    Everything runs on the model itself, cast for this time. Afterwards model, batch, gradients and
    random generators are restored.

    Args:
        model: the model, in the mode in which it is trained.
        batch: one batch of at least two rows, which must fit in memory as a whole.
        loss_fn: as in `Microbatcher`.
        forward: as in `Microbatcher`.
        loss_average: as in `Microbatcher`.
        modules: as in `Microbatcher`.
        sizes: microbatch sizes in rows; by default half the batch, an uneven size and small sizes.
        batch_layout: as in `Microbatcher`.
        device: as in `Microbatcher`.
        dtype: dtype of the comparison. ``"auto"`` tries float64, then the model's own dtype.

    Returns:
        The report, with the verdict, causes and remedies.

    Raises:
        LossError: the forward returns no usable loss.
        TypeError, ValueError: invalid arguments; the message has a remedy.

    Any other error of the model on the whole batch passes through unchanged.

    Example:
        >>> import torch
        >>> from automicro import verify
        >>> batch = (torch.randn(8, 4), torch.randint(3, (8,)))
        >>> report = verify(torch.nn.Linear(4, 3), batch, loss_fn=torch.nn.CrossEntropyLoss())
        >>> report.verdict
        'exact: splitting does not change the gradient (max relative error ... in float64)'
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        >>> report = verify(model, batch, loss_fn=torch.nn.CrossEntropyLoss())
        >>> report.exit_code, report.causes[0].names
        (1, ('1',))
    """
    check_model(model)
    check_unwrapped(model)
    subject = _Subject(model=model, modules=tuple(modules), loss_fn=loss_fn, forward=forward)
    wanted_sizes = None if sizes is None else [read_count("sizes", size) for size in sizes]
    wanted = None if dtype == "auto" else _read_dtype(dtype)
    at, layout = resolve_device(device, model), BatchLayout(batch_layout)

    def report_in(dtype: torch.dtype | None, why: str = "") -> VerifyReport:
        with _in_precision(subject.roots, dtype):
            rows = batch if dtype is None else _cast(batch, dtype)
            return _Examination(subject, rows, layout, at, loss_average).report(wanted_sizes, why)

    num_rows = 0
    try:
        num_rows = layout.num_rows(batch)
        if isinstance(model, torch.jit.ScriptModule):
            return _unverifiable(finding("scripted"), num_rows)
        if num_rows < 2:
            return _unverifiable(finding("batch: one row"), num_rows)
        if unshaped(subject.tops()) is not None:
            return _unverifiable(finding("lazy"), num_rows)
        try:
            # In float64 a true difference exceeds rounding by nine digits.
            return report_in(wanted or torch.float64)
        except Exception as error:
            is_of_the_type = classify(error) is Failure.UNRELATED
            if wanted is not None or not is_of_the_type or isinstance(error, BatchError):
                raise
            # Some models, such as those with custom kernels, run in one dtype only.
            said = describe_error(error).splitlines()[0]
        return report_in(None, f"not in float64, because there the model fails ({said})")
    except (BatchError, RollbackError) as error:
        return _unverifiable(Finding(kind="batch", text=text_of(error)), num_rows)
    except torch.OutOfMemoryError as error:
        error.add_note("automicro: verify needs the whole batch at once; pass one with fewer rows")
        raise


@contextlib.contextmanager
def _in_precision(roots: Mapping[str, Any], dtype: torch.dtype | None) -> Iterator[None]:
    """Use this dtype for all existing floating point leaves and as the default dtype."""
    leaves = [
        each
        for _, each in (walk(roots) if dtype is not None else ())
        if isinstance(each, Tensor) and each.is_leaf and each.is_floating_point()
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype or torch.get_default_dtype())
        for leaf in leaves:
            stack.callback(setattr, leaf, "grad", leaf.grad)
            # The same storage is restored, for its bits and for tensors that share it.
            stack.callback(setattr, leaf, "data", leaf.data)
            leaf.grad = None
            leaf.data = leaf.data.to(dtype)
        yield


def _unverifiable(cause: Finding, num_rows: int) -> VerifyReport:
    verdict = f"{told.UNVERIFIABLE}: {cause.text}"
    return VerifyReport(
        status=told.UNVERIFIABLE, verdict=verdict, causes=(cause,), num_rows=num_rows
    )


def _read_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    raise ValueError(
        f"dtype={dtype!r} is not a floating point type; pass 'auto', or one such as torch.float64"
    )


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    def converted(each: Tensor) -> Tensor:
        if not each.is_floating_point():
            return each
        # A leaf must stay a leaf: a tensor with a graph cannot be split.
        return each.detach().to(dtype).requires_grad_(each.requires_grad)

    return map_tensors(batch, converted)
