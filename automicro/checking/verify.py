"""Find why splitting changes a batch, by comparing again with one condition changed at a time."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from automicro.batch.device import on_host
from automicro.batch.layout import BatchLayout, balanced_sizes
from automicro.batch.tensors import map_tensors
from automicro.batch.types import Kind, kind_of
from automicro.batchnorm import find_batchnorm, needs_two_rows
from automicro.checking.bench import Bench, Conditions, cuts
from automicro.checking.draws import HeldDraws
from automicro.checking.reading import LOSS, gaps, relative_errors
from automicro.checking.report import (
    EXACT,
    NOT_EXACT,
    UNVERIFIABLE,
    Comparison,
    Finding,
    VerifyReport,
    finding,
)
from automicro.checking.rows import telling_rows
from automicro.errors import BatchError, LossError, RollbackError, describe_error, removed, text_of
from automicro.loss import averages as means
from automicro.loss.averages import Average, LossAverage
from automicro.loss.conventions import IGNORED, TARGET_KEYS, Carried, Convention, choose_convention
from automicro.loss.passes import Computation
from automicro.memory.oom import Failure, classify
from automicro.modules import is_rank_wrapper, unshaped
from automicro.options import check_model, read_count, resolve_device
from automicro.reach import Reach
from automicro.values import attributes_of, walk

_MOST_MICROBATCHES = 32
_STILL: Mapping[str, Any] = {"batchnorm": False, "carries": False}
_ONE_VALUE = "BatchNorm needs two values per channel"
_OTHER_IGNORED = (-1, 0, 255)
_ADDED = (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)  # added to the divisor of a loss


@dataclass(frozen=True)
class _Candidate:
    """One value of ``loss_average``."""

    code: str  # the value as a user would write it
    kind: str  # description of such a loss

    @functools.cached_property
    def value(self) -> Any:
        """The value, evaluated from the code so that the code shown is the code tried."""
        return eval(self.code, {"torch": torch})


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """Comparison of a whole batch with one way to split it."""

    row: Comparison
    found: Mapping[str, float]  # relative differences beyond chance, by name
    off: Mapping[str, float]  # the same without numbers: gradients and module outputs only
    by_chance: bool  # whether a difference appeared that chance explains
    state: Sequence[str]  # names of state that forwards change
    draws: HeldDraws  # record of held draws and of the lowest precision


class _Examination:
    """Examination of one model with one batch."""

    def __init__(
        self, roots: Mapping[str, Any], batch: Any, layout: BatchLayout, loss_average: Any
    ) -> None:
        self.batch, self.layout, self.num_rows = batch, layout, layout.num_rows(batch)
        self.model, self.loss_fn, forward = roots[""], roots["loss_fn"], roots["forward"]
        self.tops = [each for each in roots.values() if isinstance(each, nn.Module)]
        self.is_declared = means.is_declared(loss_average)
        self.convention = choose_convention(
            self.model, forward=forward, loss_fn=self.loss_fn, count=loss_average
        )
        averages = self.averages_of(loss_average)
        self.computation = Computation(
            modules=self.tops,
            convention=self.convention,
            averages=averages,
            layout=layout,
            device=resolve_device(None, self.model),
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
        own = "loss_fn" if self.loss_fn is not None else "the model's own loss"
        self.loss_name = own if forward is None else "forward"

    def averages_of(self, value: Any) -> dict[str, Average]:
        """Return the averages that a value of ``loss_average`` means."""
        return means.read_average(
            value,
            loss_fn=self.loss_fn,
            model=self.model,
            targets=self.convention.targets,
            reads_model=self.convention.computes_loss_in_model,
            counts_items=self.convention.counts_items,
        )

    def can_tell(self) -> bool:
        """Return whether this batch would reveal that an assumed average is wrong."""
        targets = None
        with _ignoring_errors():  # the caller's code might run here
            targets = self.convention.targets(self.batch)
        is_plain = isinstance(targets, Tensor) and not targets.is_nested
        if self.is_known or not is_plain or targets.is_floating_point() or targets.dim() < 2:
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
        computation = self.computation
        if value is not None:
            computation = replace(computation, averages=self.averages_of(value))
        given = Conditions(**{"batchnorm": True, "notes_state": True, **conditions})
        with Bench(computation, given) as bench:
            together, apart = cuts(self.layout, self.batch, sizes, rows)
            whole, parts = bench.read(together), bench.read(apart)
            errors = relative_errors(parts, whole)
            found, blind = bench.compare(together, whole, parts)
            worst = max(errors, key=lambda name: errors[name], default="")
            loss = whole.numbers[LOSS]
            row = Comparison(
                microbatch_size=max(sizes),
                num_microbatches=len(sizes),
                error=errors.get(worst, 0.0),
                worst=worst,
                # Near 0 a relative error of the loss would be meaningless.
                loss_error=abs(parts.numbers[LOSS] - loss) / max(0.05, abs(loss)),
            )
            return _Compared(
                row=row,
                found=found,
                # Gradients only: a loss can be reported incorrectly and still be trained correctly.
                off={name: size for name, size in found.items() if name not in whole.numbers},
                by_chance=not found and bool(blind),
                state=[place.name.removeprefix("→") for place, _ in parts.state.values()],
                draws=bench.draws,
            )

    # Causes

    def tried(self, sizes: Sequence[int], **conditions: Any) -> _Compared | str:
        """Compare under these conditions; return the error if this cut cannot run."""
        try:
            return self.compare(sizes, **conditions)
        except Exception as error:
            # These concern the batch or the model at any size.
            is_told = isinstance(error, BatchError | LossError | RollbackError)
            if is_told or classify(error) is not Failure.UNRELATED:
                raise
            return _ONE_VALUE if needs_two_rows(error) else describe_error(error)

    def gap(self, sizes: Sequence[int], **conditions: Any) -> Mapping[str, float]:
        """Return differing gradients under these conditions, or `{"": inf}` if parts fail."""
        found = self.tried(sizes, **conditions)
        # A failure under this condition also shows that the condition matters.
        return {"": math.inf} if isinstance(found, str) else found.off

    def diagnose(
        self, sizes: Sequence[int], state: Sequence[str]
    ) -> tuple[list[Finding], _Candidate | None]:
        """Hold all suspects still, find the right average, then release one suspect at a time."""
        # With everything else held still, the remaining difference comes from the loss.
        rest, causes, found = self.gap(sizes, **_STILL), list[Finding](), None
        if rest:
            found = self._average(sizes)
            if found is None:
                return self._unexplained(sizes), None
            shown = (
                f"with loss_average={found.code} nothing differs, on this batch and on a few of "
                f"its rows; without it the relative error of a gradient is {max(rest.values()):.1g}"
            )
            name, kind = [found.code], found.kind
            causes = [finding("loss average", name, shown, kind=kind, taken=self.taken)]
        value = None if found is None else found.value
        # One at a time: with two loose, both causes could look innocent, or both guilty.
        for kind, names, loose in (
            ("state", state, "carries"),
            ("batchnorm", self.layers, "batchnorm"),
        ):
            error = self.gap(sizes, value=value, **{**_STILL, loose: True}) if names else {}
            if error:
                shown = f"held still, nothing differs; else by {max(error.values()):.1g} of itself"
                causes.insert(0, finding(kind, names, shown))
        return causes or [finding("unknown")], found

    def _fits(self, candidate: _Candidate, sizes: Sequence[int]) -> bool:
        """Return whether an average makes this batch exact, and also some of its rows."""
        # On the whole batch alone an average might fit by chance, if all its counts are equal.
        few = telling_rows(self.layout, self.batch, self.num_rows)
        cut: Mapping[str, Any] = {"sizes": [*map(len, few)], "rows": [*few[0], *few[1]]}
        with _ignoring_errors():
            given: Sequence[Mapping[str, Any]] = ({"sizes": sizes}, cut)
            return not any(self.compare(**g, value=candidate.value, **_STILL).found for g in given)
        return False

    def _average(self, sizes: Sequence[int]) -> _Candidate | None:
        """Return the ``loss_average`` that makes the split exact, with one entry per loss."""
        with on_host():
            # On the host, because counts of a batch can be as large as the batch.
            every = list(_candidates(self.batch, self.convention))
        if self.losses:
            fitting: dict[str, _Candidate] = {}
            for each in every:
                value = dict.fromkeys(self.losses, each.value)
                with _ignoring_errors():
                    found = self.compare(sizes, value=value, **_STILL).found
                    fitting = {**dict.fromkeys(self.losses - found.keys(), each), **fitting}
            # Sorted, so that the code shown is the same in each run.
            fitting = dict(sorted(fitting.items()))
            every = [_named(fitting)] if fitting.keys() == self.losses else []
        return next((each for each in every if self._fits(each, sizes)), None)

    def _unexplained(self, sizes: Sequence[int]) -> list[Finding]:
        """Return the innermost modules with equal inputs and different outputs, or the loss."""
        every = [each for top in self.computation.reached for each in top.named_modules()]
        modules = {name or type(module).__name__ for name, module in every}
        off = self.gap(sizes, watches=True, **_STILL)
        # A module with different inputs is not where the difference starts.
        guilty = [n for n in off if n in modules and f"the input of {n}" not in off]
        inner = [n for n in guilty if not any(o.startswith(f"{n}.") for o in guilty)]
        # The whole model, which goes by the name of its class, differs wherever a module does.
        inner = [n for n in inner if n != type(self.model).__name__ or len(inner) == 1]
        cause = finding("across rows", inner)
        if not inner:
            cause = finding("compares rows", [self.loss_name])
        return [cause, *([finding("batchnorm", self.layers)] if self.layers else [])]

    # The report

    def why_incomparable(self) -> Finding | None:
        """Return why comparisons would be meaningless, or None."""
        together, _ = cuts(self.layout, self.batch, [self.num_rows])
        with Bench(self.computation, Conditions(batchnorm=True)) as bench:
            whole, again = bench.read(together), bench.read(together)
            loss, changes = whole.numbers[LOSS], gaps(whole, again, ())
            parts = whole.numbers.keys() - {LOSS} - whole.told
            self.losses = set() if whole.has_total else parts
            self.draws = bench.draws
            if not (math.isfinite(loss) and math.isfinite(whole.size)):
                return finding("batch: infinite", loss=loss)
            # Any split also has gradient 0, which would pass as exact.
            if not whole.gradients or whole.size == 0:
                return finding("batch: no gradient")
            if changes and not bench.draws.unheld:
                return finding("non-deterministic", error=max(changes.values()))
        return None

    def report(self, sizes: Sequence[int] | None, notes: Sequence[Finding]) -> VerifyReport:
        """Compare at each size and explain the largest difference."""
        cause = self.why_incomparable()
        if cause is not None:
            return _unverifiable(cause, self.num_rows)
        every, causes, comparisons = list[_Compared](), list[Finding](), list[Comparison]()
        for size in _cuts(self.num_rows, sizes):
            cut = balanced_sizes(self.num_rows, size)
            compared = self.tried(cut)
            if isinstance(compared, _Compared):
                every.append(compared)
                comparisons.append(compared.row)
                continue
            # Continue with other sizes, because a model might fail only on single rows.
            row = Comparison(microbatch_size=size, num_microbatches=len(cut), error=math.nan)
            comparisons.append(replace(row, failure=compared))
            if not causes and compared != _ONE_VALUE:
                name = [self.loss_name]
                causes = [finding("fails on fewer rows", name, size=size, failure=compared)]
        draws = every[0].draws if every else self.draws
        off, found, status = [each for each in every if each.off], None, NOT_EXACT
        if off:
            # Where the difference is largest, each cause stands out best from rounding.
            worst = max(off, key=lambda each: each.row.error)
            cut = balanced_sizes(self.num_rows, worst.row.microbatch_size)
            more, found = self.diagnose(cut, worst.state)
            causes += more
        elif not (every or causes):
            causes = [finding("batchnorm", self.layers)]
        elif draws.repeats and not causes:
            causes = [finding("random: repeated", sorted(draws.drawn))]
        elif draws.unheld and not causes and any(each.by_chance for each in every):
            causes, status = [finding("random", sorted(draws.unheld))], UNVERIFIABLE
        most = max((each.row.error for each in off or every), default=math.nan)
        precision = str(draws.lowest).removeprefix("torch.")
        if causes:
            more_text = f", and {len(causes) - 1} more below" if causes[1:] else ""
            error = f" (relative error {most:.2g})" if off else ""
            verdict = f"{status}: {causes[0].text}{error}{more_text}"
        else:
            status = EXACT
            verdict = (
                f"{status}: splitting does not change the gradient (max relative error "
                f"{most:.0e} in {precision})"
            )
        if found is not None and len(causes) == 1:
            verdict = (
                f"exact with loss_average={found.code} ({found.kind}); as configured "
                f"({self.taken}) the relative error is {most:.2g}"
            )
        sureness = "checked" if not causes and self.can_tell() else "unchecked"
        sureness = "declared" if self.is_declared else "read" if self.is_known else sureness
        return VerifyReport(
            status=status,
            verdict=verdict,
            loss_average="" if found is None else found.code,
            loss_average_is=sureness if found is None else "wrong",
            causes=tuple(causes),
            notes=(*notes, *self._notes(every, causes)),
            comparisons=tuple(comparisons),
            num_rows=self.num_rows,
            dtype=precision,
        )

    def _notes(self, every: Sequence[_Compared], causes: Sequence[Finding]) -> Iterator[Finding]:
        """Yield findings that change no gradient."""
        known = {each.kind for each in causes}
        for each in every[:1]:
            drawn = sorted(each.draws.drawn | each.draws.unheld)
            for key, names in (("random: held", drawn), ("state: not read", each.state)):
                if names and key.partition(":")[0] not in known:
                    yield finding(key, names)
        if not self.model.training:
            yield finding("mode")
        errors = [each.row.loss_error for each in every if LOSS in each.found]
        if errors and not causes:
            yield finding("loss value", error=max(errors))
        if not causes and not self.can_tell():
            yield finding("batch: even")
        modules = [each for top in self.tops for each in top.named_modules()]
        parts = [name for name, each in modules if hasattr(vars(each).get("forward"), "nested")]
        if parts:
            yield finding("parts", parts)


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


@removed(dtype="Cast the model and the batch: model.to(torch.float32)")
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
) -> VerifyReport:
    """Check whether splitting this batch changes this model's gradient, and why.

    Compares the whole batch's gradient with gradients from a `Microbatcher` at several sizes, with
    dropout disabled, and in float64 if the model supports it. If they differ, experiments find the
    cause by holding one suspect still at a time.

    Everything runs on the model itself, on its device, cast for this time. Afterwards model, batch,
    gradients and random generators are restored.

    Args:
        model: the model, in the mode in which it is trained.
        batch: one batch of at least two rows, which must fit in memory as a whole.
        loss_fn: as in `Microbatcher`.
        forward: as in `Microbatcher`.
        loss_average: as in `Microbatcher`.
        modules: as in `Microbatcher`.
        sizes: microbatch sizes in rows; by default half the batch, an uneven size and small sizes.
        batch_layout: as in `Microbatcher`.

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
    more = {f"modules[{index}]": each for index, each in enumerate(modules)}
    roots = {"": model, **more, "forward": forward, "loss_fn": loss_fn}
    wanted = None if sizes is None else [read_count("sizes", size) for size in sizes]
    layout, num_rows = BatchLayout(batch_layout), 0

    def report_in(dtype: torch.dtype | None, *notes: Finding) -> VerifyReport:
        with _in_precision(roots, dtype):
            rows = batch if dtype is None else _cast(batch, dtype)
            return _Examination(roots, rows, layout, loss_average).report(wanted, notes)

    try:
        num_rows = layout.num_rows(batch)
        if num_rows < 2:
            return _unverifiable(finding("batch: one row"), num_rows)
        if unshaped([e for e in roots.values() if isinstance(e, nn.Module)]) is not None:
            return _unverifiable(finding("lazy"), num_rows)
        try:
            # In float64 a true difference exceeds rounding by nine digits.
            return report_in(torch.float64)
        except Exception as error:
            if classify(error) is not Failure.UNRELATED or isinstance(error, BatchError):
                raise
            # Some models, such as those with custom kernels, run in one dtype only.
            failure = describe_error(error).splitlines()[0]
        return report_in(None, finding("dtype", failure=failure))
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
    verdict = f"{UNVERIFIABLE}: {cause.text}"
    return VerifyReport(status=UNVERIFIABLE, verdict=verdict, causes=(cause,), num_rows=num_rows)


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    def converted(each: Tensor) -> Tensor:
        if not each.is_floating_point():
            return each
        # A leaf must stay a leaf: a tensor with a graph cannot be split.
        return each.detach().to(dtype).requires_grad_(each.requires_grad)

    return map_tensors(batch, converted)


@contextlib.contextmanager
def _ignoring_errors() -> Iterator[None]:
    """Ignore any error of an optional attempt, unless memory ran out or the device was lost.

    >>> with _ignoring_errors():
    ...     raise ValueError("it does not know this target")
    """
    try:
        yield
    except Exception as error:
        if classify(error) is not Failure.UNRELATED:
            raise


def _candidates(batch: Any, convention: Convention) -> Iterator[_Candidate]:
    """Yield candidates for this batch, the most likely first."""
    yield _Candidate("'samples'", "a mean over samples")
    yield _Candidate("'none'", "a sum")
    yield _Candidate("'tokens'", "a mean over the targets that are not ignored")
    targets: Any = None
    with _ignoring_errors():  # the caller's code might run here
        targets = convention.targets(batch)
    # The caller's functions get the inner batch only.
    places = _places(batch.batch if isinstance(batch, Carried) else batch, "batch")
    leaves = [(code, each) for code, each in places if isinstance(each, Tensor) and each.dim()]
    leaves.sort(key=lambda leaf: leaf[1] is not targets)
    counts = [count for leaf in leaves for count in _counts(*leaf, is_target=leaf[1] is targets)]
    yield from (_Candidate(f"lambda batch: {code}", kind) for code, kind in counts)
    # Last because there are many: losses guard against division by 0 with a small constant.
    for (code, kind), added in itertools.product(counts, _ADDED):
        yield _Candidate(f"lambda batch: {code} + {added}", f"{kind}, {added} added to the divisor")


def _named(choice: Mapping[str, _Candidate]) -> _Candidate:
    """Merge one candidate for each loss name into a single candidate."""
    code = ", ".join(f"{name!r}: {each.code}" for name, each in choice.items())
    kind = ", ".join(f"{name!r} {each.kind}" for name, each in choice.items())
    return _Candidate(f"{{{code}}}", kind)


def _counts(where: str, leaf: Tensor, *, is_target: bool) -> Iterator[tuple[str, str]]:
    """Yield code that counts entries of a leaf, with the kind of loss."""
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_complex():
        return
    # Regression targets are not counted, because all of them count.
    if is_target and not leaf.is_floating_point():
        yield f"({where} != {IGNORED}).sum()", "a mean over the targets that are not ignored"
        if leaf.dim() > 1:
            shifted = "a mean over the targets that are not ignored, the labels shifted by one"
            yield f"({where}[..., 1:] != {IGNORED}).sum()", shifted
        # Only if one is in the batch: otherwise all candidates count the same.
        for ignored in _OTHER_IGNORED:
            if bool((leaf == ignored).any()):
                yield (
                    f"({where} != {ignored}).sum()",
                    f"a mean over the targets other than {ignored}",
                )
    # A divisor must be positive: masks, lengths and row weights are never negative.
    if not bool((leaf < 0).any()):
        yield f"{where}.sum()", f"a mean weighted by {where}"
    if not leaf.is_floating_point():
        yield f"({where} != 0).sum()", f"a mean over the nonzero entries of {where}"


def _places(value: Any, code: str) -> Iterator[tuple[str, Any]]:
    """Yield each part of a batch, with code that reads it."""
    yield code, value
    kind = kind_of(type(value))
    steps: dict[str, Any] = {}
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda key: key not in TARGET_KEYS)
        # The repr of other keys is not always valid code.
        steps = {f"[{key!r}]": value[key] for key in keys if type(key) in (str, int)}
    elif kind in (Kind.SEQUENCE, Kind.NAMED_TUPLE):
        steps = {f"[{index}]": part for index, part in enumerate(value)}
    elif kind in (Kind.RECORD, Kind.ROWS) and not isinstance(value, Tensor):
        # Generated code must not name hidden attributes.
        parts = attributes_of(value).items()
        steps = {f".{name}": part for name, part in parts if not name.startswith("_")}
    for step, part in steps.items():
        yield from _places(part, code + step)


def check_unwrapped(model: nn.Module) -> None:
    """Refuse a model wrapped for several ranks, for tools that run in one process."""
    for name, module in model.named_modules():
        if is_rank_wrapper(module):
            raise ValueError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}, but this tool "
                "runs in a single process. Pass the unwrapped module"
            )
