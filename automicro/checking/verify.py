"""Why splitting changes a batch: the same comparison under one changed condition after another."""

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from automicro.batch.device import on_device, on_host
from automicro.batch.layout import BatchLayout, balanced_sizes, check_microbatch_size
from automicro.batch.tensors import map_tensors
from automicro.batchnorm import find_batchnorm, needs_two_rows
from automicro.checking import report as findings
from automicro.checking.bench import Bench, Conditions
from automicro.checking.reading import LOSS, Reading, gaps
from automicro.checking.report import (
    EXACT,
    NOT_EXACT,
    UNVERIFIABLE,
    Comparison,
    Finding,
    VerifyReport,
)
from automicro.checking.rows import telling_rows
from automicro.errors import BatchError, LossError, RollbackError, describe_error, text_of
from automicro.loss.averages import (
    Average,
    Candidate,
    LossAverage,
    Sum,
    candidates,
    expression,
    is_declared,
    named,
    read_average,
)
from automicro.loss.conventions import Convention, choose_convention
from automicro.loss.passes import Computation
from automicro.loss.weights import CutBatch
from automicro.memory.oom import Failure, classify, ignoring_errors
from automicro.modules import ModuleIndex
from automicro.options import check_model, check_unwrapped, resolve_device
from automicro.reach import Reach, captured_modules
from automicro.transaction.rng import RandomState, devices_of

_MOST_MICROBATCHES = 32
_MOST_CANDIDATES = 24
_CONTROLS = 6
_LEAST = 1e-2  # of the whole gradient: what each parameter's error is measured against
_ONE = "BatchNorm needs two values per channel"


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A model and what computes its loss."""

    model: nn.Module
    modules: tuple[nn.Module, ...]
    loss_fn: Callable[..., Any] | None
    forward: Callable[..., Any] | None

    @property
    def roots(self) -> dict[str, Any]:
        """All that takes part, by name."""
        found: dict[str, Any] = {"": self.model}
        found |= {f"modules[{index}]": each for index, each in enumerate(self.modules)}
        return found | {"forward": self.forward, "loss_fn": self.loss_fn}

    def tops(self) -> list[nn.Module]:
        """Its modules, the loss among them."""
        return [each for each in self.roots.values() if isinstance(each, nn.Module)]

    @property
    def loss_name(self) -> str:
        """What computes the loss, by a name that its author knows."""
        function = self.forward or self.loss_fn
        while isinstance(function, functools.partial):
            function = function.func
        if function is None:
            return f"{type(self.model).__name__}'s own loss"
        name = str(getattr(function, "__name__", type(function).__name__))
        return "the loss" if name == "<lambda>" else name

    def why_not_copied(self) -> str:
        """Why a copy cannot stand for the originals; empty where it can."""
        for name, function in (("forward", self.forward), ("loss_fn", self.loss_fn)):
            captured = [] if isinstance(function, nn.Module) else captured_modules(function)
            if captured:
                return f"{name} uses a {type(captured[0]).__name__} past its arguments"
        try:
            self.copy(None)
        except Exception as error:
            first = text_of(error).partition(". ")[0].partition("\n")[0]
            return f"the model cannot be copied ({type(error).__name__}: {first.rstrip('.')})"
        return ""

    def copy(self, dtype: torch.dtype | None) -> "_Subject":
        """A deep copy, its floating point tensors of this type if given."""
        model, modules, loss_fn, forward = copy.deepcopy(
            (self.model, self.modules, self.loss_fn, self.forward)
        )
        twin = _Subject(model=model, modules=modules, loss_fn=loss_fn, forward=forward)
        for top in twin.tops() if dtype is not None else ():
            assert dtype is not None
            top.to(dtype)
            for module in top.modules():
                _convert(module, dtype)
        if dtype is not None:
            loss_fn, forward = (_converted(each, dtype) for each in (loss_fn, forward))
        return replace(twin, loss_fn=loss_fn, forward=forward)

    def lowest(self) -> torch.dtype:
        """The least precise floating point type of its parameters and buffers."""
        every = (each for top in self.tops() for each in (*top.parameters(), *top.buffers()))
        found = {each.dtype for each in every if each.dtype.is_floating_point}
        return min(found, key=lambda each: each.itemsize, default=torch.get_default_dtype())


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def converted(each: Tensor) -> Tensor:
        if not each.is_floating_point():
            return each
        new = each.detach().to(dtype)  # a leaf stays one: what hangs on a graph cannot be split
        return new.requires_grad_() if each.requires_grad else new

    return map_tensors(value, converted)


def _convert(owner: Any, dtype: torch.dtype) -> None:
    for name, value in vars(owner).items():
        if isinstance(value, Tensor):
            vars(owner)[name] = _cast(value, dtype)


def _converted(function: Any, dtype: torch.dtype) -> Any:
    if isinstance(function, functools.partial):
        keywords: Mapping[str, Any] = _cast(dict(function.keywords), dtype)
        return functools.partial(function.func, *_cast(function.args, dtype), **keywords)
    is_function = function is None or hasattr(function, "__code__")
    if not is_function and not isinstance(function, nn.Module) and hasattr(function, "__dict__"):
        _convert(function, dtype)
    return function


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """A whole batch beside one way to split it.

    Attributes:
        found: what differs beyond chance, by how much of itself.
        errors: of each parameter's gradient, chance included.
        loss_error: of the loss.
        whole: the reading of the batch, without its tensors.
        by_chance: whether something else differed, and chance explains it.
        state: places of buffers, attributes and variables that forwards change.
        written: leaves of the batch that the forward wrote into.
        unheld: what drew, and could not be held constant.
        drawn: what was held constant.
        repeats: whether the forward sets the seed of its draws.
        lowest: type that was computed in.
        cast_to: type that something in float64 was cast to.
    """

    found: Mapping[str, float]
    errors: Mapping[str, float]
    loss_error: float
    whole: Reading
    by_chance: bool
    state: Sequence[Any]
    written: Sequence[str]
    unheld: Sequence[str]
    drawn: Sequence[str]
    repeats: bool
    lowest: torch.dtype
    cast_to: torch.dtype | None


class _Examination:
    """One model and batch.

    Args:
        subject: the caller's, or a copy of it.
        batch: in its precision.
        layout: of the batch.
        device: where the model computes.
        loss_average: as the caller gave it.
    """

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
        self.convention: Convention = choose_convention(
            subject.model, forward=subject.forward, loss_fn=subject.loss_fn
        )
        roots = subject.roots
        averages = self.averages_of(loss_average)
        self.computation = Computation(
            modules=subject.tops(),
            convention=self.convention,
            averages=averages,
            averages_of=self.averages_of,
            eval_averages=averages,
            layout=layout,
            device=device,
            roots=roots,
            reach=Reach(roots),
        )
        self.layers = [
            f"{prefix}.{name}".lstrip(".")
            for prefix, top in roots.items()
            if isinstance(top, nn.Module)
            for name in find_batchnorm(top)
        ]

    def averages_of(self, value: Any) -> dict[str, Average]:
        """What ``loss_average`` stands for."""
        return read_average(
            value,
            loss_fn=self.subject.loss_fn,
            model=self.subject.model,
            targets=self.convention.targets,
            reads_model=self.convention.computes_loss_in_model,
        )

    def cuts(
        self, sizes: Sequence[int], rows: Sequence[int] | None = None
    ) -> tuple[CutBatch, CutBatch]:
        """The batch, or some rows of it, whole and in parts."""
        with on_host():
            batch = self.batch if rows is None else self.layout.take_rows(self.batch, rows)
            parts = self.layout.split(batch, sizes)
        whole = CutBatch(batch=batch, microbatches=[batch], sizes=[sum(sizes)])
        return whole, CutBatch(batch=batch, microbatches=parts, sizes=sizes)

    def compare(
        self,
        sizes: Sequence[int],
        *,
        value: Any = None,
        rows: Sequence[int] | None = None,
        **conditions: Any,
    ) -> _Compared:
        """The same comparison under these conditions, with another average if given."""
        tried = self.computation
        if value is not None:
            tried = replace(tried, averages=self.averages_of(value))
        given = {"batchnorm": True, "notes_state": True, **conditions}
        together, apart = self.cuts(sizes, rows)
        with Bench(tried, Conditions(**given)) as bench:
            whole, parts = bench.read(together), bench.read(apart)
            distances = whole.distances(parts)
            asked = list[int]()

            def shaken() -> Iterator[Reading]:
                for shake in range(1, _CONTROLS + 1):
                    asked.append(shake)
                    yield bench.read(together, shake=shake)

            found = gaps(whole, parts, shaken())
            least = _LEAST * whole.size or 1.0
            errors = {
                name: distances[name] / max(whole.scales[name], least) for name in whole.gradients
            }
            whole.gradients = {name: torch.empty(0) for name in whole.gradients}
            loss = abs(parts.numbers[LOSS] - whole.numbers[LOSS])
            return _Compared(
                found=found,
                errors=errors,
                loss_error=loss / max(0.05, abs(whole.numbers[LOSS])),
                whole=whole,
                by_chance=bool(asked) and not found,
                state=[place for place, _ in parts.state.values()],
                written=sorted(whole.written),
                unheld=sorted(self._named(bench.draws.unheld)),
                drawn=sorted(bench.draws.drawn),
                repeats=bench.draws.repeats,
                lowest=bench.draws.lowest,
                cast_to=bench.draws.cast_to,
            )

    def _named(self, unheld: Iterable[str]) -> Iterator[str]:
        """What drew, generators of the caller's by their paths."""
        for name in unheld:
            own = self.computation.reach.named_generators() if "your own" in name else {}
            numbers = (path for path, each in own.items() if not isinstance(each, torch.Generator))
            yield from numbers if own else (name,)

    # Causes

    def gap(
        self, sizes: Sequence[int], *, value: Any = None, **conditions: Any
    ) -> dict[str, float]:
        """Which gradients differ under these conditions; `{"": inf}` where parts fail."""
        try:
            found = self.compare(sizes, value=value, **conditions)
        except (LossError, RollbackError):
            raise
        except Exception as error:
            if classify(error) is not Failure.UNRELATED:
                raise
            return {"": math.inf}
        return {name: size for name, size in found.found.items() if name not in found.whole.numbers}

    def diagnose(
        self, sizes: Sequence[int], seen: _Compared
    ) -> tuple[list[Finding], Candidate | None]:
        """Hold every suspect still; find the right average; then let each loose again."""
        still: dict[str, Any] = {"batchnorm": False, "carries": False}
        rest, causes, found = self.gap(sizes, **still), list[Finding](), None
        if rest:
            found = self._average(sizes, still)
            if found is None:
                weighted, found = self._weighted(sizes, still)
                if weighted is None:
                    return self._unexplained(sizes, still), None
                causes.append(weighted)
            taken = " and ".join(
                dict.fromkeys(each.describe() for each in self.computation.averages.values())
            )
            if found is not None and not causes:
                causes.append(findings.loss_average(found, taken, max(rest.values())))
        value = None if found is None else found.value
        suspects = [
            (self.layers, {"batchnorm": True}, findings.batchnorm),
            (_names(seen.state, buffers=True), {"carries": True}, findings.buffers),
            (_names(seen.state, buffers=False), {"carries": True}, findings.attributes),
        ]
        proven = []
        for names, loose, describe in suspects:
            error = self.gap(sizes, value=value, **{**still, **loose}) if names else {}
            if error:
                shown = f"held still, nothing differs; else by {max(error.values()):.1g} of itself"
                proven.append(replace(describe(names), evidence=shown))
        return [*proven, *causes], found

    def _average(self, sizes: Sequence[int], still: Mapping[str, Any]) -> Candidate | None:
        """What makes it exact as ``loss_average``, on this batch and on some rows of it."""
        fitting: dict[str, Candidate] = {}
        names = self.parts_of_loss()
        with on_host():
            tried = list(candidates(self.batch, self.convention))
        rows = telling_rows(self.layout, self.batch, self.num_rows)

        def fits(each: Candidate) -> bool:
            with ignoring_errors():
                if self.compare(sizes, value=each.value, **still).found:
                    return False
                others = self.compare(
                    list(map(len, rows)), value=each.value, rows=[*rows[0], *rows[1]], **still
                )
                return not others.found
            return False

        for each in tried:
            if names:
                with ignoring_errors():
                    found = self.compare(
                        sizes, value=dict.fromkeys(names, each.value), **still
                    ).found
                    for name in names - found.keys() - fitting.keys():
                        fitting[name] = each
                if fitting.keys() == names:
                    break
            elif fits(each):
                return each
        if names and fitting.keys() == names:
            together = named({name: fitting[name] for name in sorted(names)})
            return together if fits(together) else None
        return None

    def parts_of_loss(self) -> set[str]:
        """Names of the losses, where the forward gives several that are added up."""
        together, _ = self.cuts([self.num_rows])
        with Bench(self.computation, Conditions(wants="numbers", batchnorm=True)) as bench:
            output = bench.read(together)
        return set() if output.has_total else output.numbers.keys() - {LOSS} - output.told

    def _unexplained(self, sizes: Sequence[int], still: Mapping[str, Any]) -> list[Finding]:
        suspects = [findings.batchnorm(self.layers)] if self.layers else []
        off = self.gap(sizes, watches=True, **still)
        guilty = [
            name
            for name in off
            if f"the input of {name}" not in off and name in self.module_names()
        ]
        inner = [n for n in guilty if not any(o != n and o.startswith(f"{n}.") for o in guilty)]
        model = type(self.subject.model).__name__
        inner = [name for name in inner if name != model or len(inner) == 1]
        if inner:
            return [findings.across_rows(inner), *suspects]
        return [findings.compares_rows(self.subject.loss_name), *suspects]

    def module_names(self) -> set[str]:
        """As a bench names what modules give."""
        return {
            name or type(module).__name__
            for top in self.computation.reached
            for name, module in top.named_modules()
        }

    def _weighted(
        self, sizes: Sequence[int], still: Mapping[str, Any]
    ) -> tuple[Finding | None, Candidate | None]:
        """A mean with weights of its own: by class, or by something unknown."""
        parts = telling_rows(self.layout, self.batch, self.num_rows, most=12)
        rows = sorted([*parts[0], *parts[1]])
        sums = replace(
            self.computation, averages={name: Sum() for name in self.computation.averages}
        )
        vectors = []
        with ignoring_errors(), Bench(sums, Conditions(**still)) as bench:
            for some in (rows, *([row] for row in rows)):
                cut, _ = self.cuts([len(some)], some)
                reading = bench.read(cut)
                flat = [each.double().flatten() for _, each in sorted(reading.gradients.items())]
                vectors.append(torch.cat([*flat, torch.tensor([reading.numbers[LOSS]])]))
            eps = bench.rounding[1]
        if len(vectors) <= len(rows) or len({each.shape for each in vectors}) > 1:
            return None, None
        whole, *alone = vectors
        columns = torch.stack(alone, 1)
        scales = columns.norm(dim=0).clamp(min=1e-30)
        solved = torch.linalg.lstsq(columns / scales, whole[:, None], driver="gelsd").solution[:, 0]
        off = float((columns / scales @ solved - whole).norm() / whole.norm().clamp(min=1e-30))
        weights = (solved / scales).tolist()
        slack = math.sqrt(eps)
        if off > 100 * slack or min(weights) < -slack or abs(sum(weights) - 1) > 100 * slack:
            return None, None
        name, table = self.subject.loss_name, self._by_class(rows, weights, 100 * slack)
        if not table:
            return findings.other_weights(name, [[row] for row in rows], weights), None
        found = self._class_weighted(table, eps)
        with ignoring_errors():
            if found is not None and self.compare(sizes, value=found.value, **still).found:
                found = None
        return findings.class_weights(found, table, name), found

    def _class_weighted(self, table: Mapping[int, float], eps: float) -> Candidate | None:
        targets = self.convention.targets(self.batch)
        if min(table) < 0 or not {*targets.tolist()} <= table.keys():
            return None
        digits = max(4, round(-math.log10(eps)) - 2)
        weights = (table.get(label, 0.0) for label in range(max(table) + 1))
        shown = ", ".join(f"{weight:.{digits}g}" for weight in weights)
        return Candidate(
            code=f"lambda batch: torch.tensor([{shown}])[{expression(self.batch, targets)}].sum()",
            kind="a mean over the class weights of its targets",
        )

    def _by_class(
        self, rows: Sequence[int], weights: Sequence[float], slack: float
    ) -> dict[int, float]:
        """What rows of each class weigh, where these weigh the same; else nothing."""
        try:
            targets = self.convention.targets(self.batch)
        except (ValueError, IndexError):
            return {}
        is_class = isinstance(targets, Tensor) and targets.dim() == 1
        if not is_class or targets.is_floating_point() or len(targets) != self.num_rows:
            return {}
        by_class: dict[int, list[float]] = {}
        for row, weight in zip(rows, weights, strict=True):
            by_class.setdefault(int(targets[row]), []).append(weight)
        are_equal = all(max(w) - min(w) <= slack * max(w) for w in by_class.values())
        if not are_equal or len(by_class) == len(rows):
            return {}
        least = min(weight[0] for weight in by_class.values() if weight[0] > 0)
        return {label: weight[0] / least for label, weight in by_class.items()}

    # The report

    def failure(self, size: int, error: BaseException) -> Finding:
        """Why a forward or a loss fails with fewer rows: the number, or that it is one."""
        name = self.subject.loss_name
        if self._fails([0, 1]) is None:
            alone = self._fails([0])
            if alone is not None:
                return findings.fails_on_one_row(name, alone)
        return findings.fails_on_fewer_rows(name, size, describe_error(error))

    def _fails(self, rows: Sequence[int]) -> str | None:
        together, _ = self.cuts([len(rows)], rows)
        try:
            with Bench(self.computation, Conditions(wants="numbers", batchnorm=True)) as bench:
                bench.read(together)
        except Exception as error:
            if classify(error) is not Failure.UNRELATED:
                raise
            return None if needs_two_rows(error) else describe_error(error)
        return None

    def why_incomparable(self) -> Finding | None:
        """Why no comparison would say anything; None where one does."""
        together, _ = self.cuts([self.num_rows])
        with Bench(self.computation, Conditions(batchnorm=True)) as bench:
            whole = bench.read(together)
            loss = whole.numbers[LOSS]
            if not (math.isfinite(loss) and math.isfinite(whole.size)):
                return Finding(
                    kind="batch",
                    text=f"the loss of the whole batch is {loss}, or its gradient is not finite",
                    remedy="pass a batch on which the model trains, with targets that are not "
                    "ignored",
                )
            if not whole.gradients or whole.size == 0:
                return Finding(
                    kind="batch",
                    text="the gradient of the whole batch is zero, and so would any split's be",
                    remedy="pass a batch and a model with a gradient",
                )
            again = gaps(whole, bench.read(together), ())
            if again and not bench.draws.unheld:
                return findings.non_deterministic(max(again.values()))
        return None

    def can_tell(self) -> bool:
        """Whether this batch would show that an assumed average is wrong."""
        if all(average.is_known for average in self.computation.averages.values()):
            return True
        with ignoring_errors():
            targets = self.convention.targets(self.batch)
            is_counted = isinstance(targets, Tensor) and not targets.is_floating_point()
            if is_counted and targets.dim() > 1 and not targets.is_nested:
                counts = (targets != -100).flatten(1).sum(1)
                return bool((counts != counts[0]).any())
        return True


def _names(places: Sequence[Any], *, buffers: bool) -> tuple[str, ...]:
    return tuple(each.name for each in places if each.is_buffer is buffers)


def _cuts(num_rows: int, sizes: Sequence[int] | None) -> list[int]:
    """Sizes of the largest microbatch, each cut once.

    Raises:
        ValueError: none of the sizes splits the batch.
    """
    if sizes is None:
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
    """Whether splitting this batch changes this model's gradient, and why.

    The whole batch's gradient is compared with those of a `Microbatcher` at several sizes, dropout
    silenced, in float64 where the model can compute in it. Where they differ, experiments find
    the cause: one suspect at a time is held still.

    Everything runs on deep copies. Where a copy cannot stand for the original (``forward`` uses a
    module by a name of its own), it runs on the original, in its own precision, inside a
    transaction that is rolled back; the report says so. Model, batch, gradients and random
    generators are afterwards as they were.

    Args:
        model: the model, in the mode in which it is trained.
        batch: one batch of at least two rows; it has to fit whole.
        loss_fn: as in `Microbatcher`, and so ``forward``, ``loss_average``, ``modules``,
            ``batch_layout``, ``device``.
        forward: see there.
        loss_average: see there.
        modules: see there.
        sizes: microbatch sizes in rows; a half, a ragged one and small ones unless given.
        batch_layout: see there.
        device: see there.
        dtype: of the comparison: ``"auto"`` tries float64 and falls back on the model's own type.

    Raises:
        LossError: the forward gives no usable loss.
        TypeError, ValueError: arguments that make no sense, each with its remedy.

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
    wanted_sizes = None if sizes is None else [check_microbatch_size(size) for size in sizes]
    wanted, at = _read_dtype(dtype), resolve_device(device, model)
    layout, why_in_place = BatchLayout(batch_layout), subject.why_not_copied()
    num_rows = 0
    try:
        num_rows = layout.num_rows(batch)
        if isinstance(model, torch.jit.ScriptModule):
            return _unverifiable(findings.scripted(), num_rows)
        if num_rows < 2:
            return _unverifiable(findings.one_row(), num_rows)
        why = ""
        tried = None if why_in_place else wanted or torch.float64
        if ModuleIndex(subject.tops()).is_lazy:
            subject = _materialized(subject, batch, at, why_in_place)
        try:
            with _default_dtype(tried):
                examination, cause = _begin(subject, batch, layout, at, loss_average, tried)
                report = _examined(examination, cause, wanted_sizes, is_declared(loss_average), why)
        except Exception as error:
            recoverable = classify(error) is Failure.UNRELATED and not isinstance(error, BatchError)
            if not (wanted is None and recoverable and tried is not None):
                raise
            said = describe_error(error).splitlines()[0]
            why = f"; not in float64, because there the model fails ({said})"
            examination, cause = _begin(subject, batch, layout, at, loss_average, None, copies=True)
            report = _examined(examination, cause, wanted_sizes, is_declared(loss_average), why)
        how = (
            f"on the model itself in its own precision, rolled back, because {why_in_place}"
            if why_in_place
            else "on a copy"
        )
        return replace(report, method=f"{how}{report.method}")
    except (BatchError, RollbackError) as error:
        return _unverifiable(Finding(kind="batch", text=text_of(error)), num_rows)
    except torch.OutOfMemoryError as error:
        error.add_note("automicro: verify needs the whole batch at once; pass one with fewer rows")
        raise


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _materialized(
    subject: _Subject, batch: Any, device: torch.device, why_in_place: str
) -> _Subject:
    """A copy whose lazy modules have taken their shapes."""
    if why_in_place:
        raise ValueError(
            f"the model has lazy modules without a shape yet, and {why_in_place}; run one forward "
            "first"
        )
    subject = subject.copy(None)
    random_state = RandomState(devices_of(subject.tops(), device))
    random_state.begin()
    convention = choose_convention(subject.model, forward=subject.forward, loss_fn=subject.loss_fn)
    try:
        (moved,) = on_device([batch], device, isolate=True)
        with torch.no_grad():
            convention.train(subject.model, moved)
    finally:
        random_state.roll_back()
    return subject


def _begin(
    subject: _Subject,
    batch: Any,
    layout: BatchLayout,
    device: torch.device,
    loss_average: Any,
    dtype: torch.dtype | None,
    *,
    copies: bool = False,
) -> tuple[_Examination, Finding | None]:
    """The examination of a copy in this precision, or of the model itself; and why it ends here."""
    if dtype is not None or copies:
        subject = subject.copy(dtype)
    if dtype is not None:
        batch = _cast(batch, dtype)
    examination = _Examination(subject, batch, layout, device, loss_average)
    return examination, examination.why_incomparable()


def _examined(
    examination: _Examination,
    cause: Finding | None,
    sizes: Sequence[int] | None,
    declared: bool,
    why: str,
) -> VerifyReport:
    if cause is not None:
        return _unverifiable(cause, examination.num_rows)
    num_rows = examination.num_rows
    compared: dict[int, _Compared] = {}
    comparisons, broken = [], dict[int, Exception]()
    for size in _cuts(num_rows, sizes):
        cut = balanced_sizes(num_rows, size)
        try:
            seen = compared[size] = examination.compare(cut)
        except (BatchError, LossError, RollbackError):
            raise
        except Exception as error:
            if classify(error) is not Failure.UNRELATED:
                raise
            text = _ONE if needs_two_rows(error) else describe_error(error)
            if not needs_two_rows(error):
                broken[size] = error
            comparisons.append(
                Comparison(
                    microbatch_size=size,
                    num_microbatches=len(cut),
                    error=math.nan,
                    failure=text,
                )
            )
            continue
        worst = max(seen.errors, key=lambda name: seen.errors[name])
        comparisons.append(
            Comparison(
                microbatch_size=size,
                num_microbatches=len(cut),
                error=seen.errors[worst],
                worst=worst,
                loss_error=seen.loss_error,
            )
        )
    names = dict.fromkeys(name for each in compared.values() for name in each.errors)
    errors = {name: max(each.errors.get(name, 0.0) for each in compared.values()) for name in names}
    off = {
        size: [name for name in each.found if name not in each.whole.numbers]
        for size, each in compared.items()
    }
    wrong = max(
        (size for size in off if off[size]),
        key=lambda size: max(compared[size].errors.values()),
        default=None,
    )
    causes, found = list[Finding](), None
    if not compared:
        causes = [findings.batchnorm(examination.layers)] if examination.layers else []
    if wrong is not None:
        causes, found = examination.diagnose(balanced_sizes(num_rows, wrong), compared[wrong])
        causes = causes or [findings.unknown()]
    for size, reason in itertools.islice(broken.items(), 1):
        failure = examination.failure(size, reason)
        causes = [failure, *(each for each in causes if each.kind != failure.kind)]
    first = next(iter(compared.values()), None)
    is_random = False
    if first is not None and first.repeats and not causes:
        causes = [findings.repeated_draws(first.drawn)]
    elif (
        first is not None
        and first.unheld
        and not causes
        and any(each.by_chance for each in compared.values())
    ):
        causes, is_random = [findings.random_draws(first.unheld)], True
    known = {name for each in compared.values() for name in each.found}
    tolerance = max((error for name, error in errors.items() if name not in known), default=0.0)
    lowest = first.lowest if first is not None else examination.subject.lowest()
    tolerance = max(tolerance, 16 * torch.finfo(lowest).eps)
    precision = str(lowest).removeprefix("torch.")
    status, verdict = _verdict(examination, causes, found, errors, tolerance, precision, is_random)
    notes = _notes(examination, first, causes, status, comparisons, tolerance)
    if first is not None and first.cast_to is not None and lowest is not torch.float64:
        why += f"; the model itself casts down to {precision}"
    sureness = "declared" if declared else "unchecked"
    if status == NOT_EXACT and found is not None:
        sureness = "wrong"
    elif not declared and all(each.is_known for each in examination.computation.averages.values()):
        sureness = "read"
    elif not declared and status == EXACT and examination.can_tell():
        sureness = "checked"
    return VerifyReport(
        status=status,
        verdict=verdict,
        loss_average="" if found is None else found.code,
        loss_average_is=sureness,
        causes=tuple(causes),
        notes=tuple(notes),
        comparisons=tuple(comparisons),
        parameter_errors=errors,
        num_rows=num_rows,
        dtype=precision,
        tolerance=tolerance,
        method=why,
    )


def _verdict(
    examination: _Examination,
    causes: Sequence[Finding],
    found: Candidate | None,
    errors: Mapping[str, float],
    tolerance: float,
    precision: str,
    is_random: bool,
) -> tuple[str, str]:
    error = max(errors.values(), default=math.nan)
    if not causes:
        return EXACT, (
            f"{EXACT}: splitting does not change the gradient (max relative error {error:.0e} in "
            f"{precision})"
        )
    first, *others = causes
    if is_random:
        return UNVERIFIABLE, f"{UNVERIFIABLE}: {first.text}"
    if found is not None and not others:
        averages = examination.computation.averages.values()
        taken_for = " and ".join(dict.fromkeys(each.describe() for each in averages))
        return NOT_EXACT, (
            f"exact with loss_average={found.code} ({found.kind}); as configured ({taken_for}) the "
            f"relative error is {error:.2g}"
        )
    more = f", and {len(others)} more below" if others else ""
    size = f" (relative error {error:.2g})" if error > tolerance else ""
    return NOT_EXACT, f"{NOT_EXACT}: {first.text}{size}{more}"


def _notes(
    examination: _Examination,
    seen: _Compared | None,
    causes: Sequence[Finding],
    status: str,
    comparisons: Sequence[Comparison],
    tolerance: float,
) -> list[Finding]:
    kinds = {each.kind for each in causes}
    notes: list[Finding] = []
    if seen is not None:
        drawn = (*seen.drawn, *seen.unheld)
        states = {
            kind: _names(seen.state, buffers=kind == "buffers")
            for kind in ("buffers", "attributes")
        }
        notes = findings.notes(
            drawn if "random" not in kinds else (),
            seen.written,
            examination.subject.model.training,
            {kind: names for kind, names in states.items() if names and kind not in kinds},
        )
    wrong = [each.loss_error for each in comparisons if each.loss_error > tolerance]
    if wrong and status == EXACT:
        text = f"the loss itself differs (relative error {max(wrong):.1g}), without a gradient"
        notes.append(Finding(kind="loss value", text=text))
    if status == EXACT and not examination.can_tell():
        notes.append(findings.even_batch())
    parts = tuple(
        name
        for top in examination.subject.tops()
        for name, module in top.named_modules()
        if hasattr(vars(module).get("forward"), "nested")
    )
    if parts:
        notes.append(findings.parts_in_slices(parts))
    return notes


def _unverifiable(cause: Finding, num_rows: int = 0) -> VerifyReport:
    return VerifyReport(
        status=UNVERIFIABLE,
        verdict=f"{UNVERIFIABLE}: {cause.text}",
        causes=(cause,),
        num_rows=num_rows,
    )


def _read_dtype(dtype: torch.dtype | str) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype == "auto" or (isinstance(found, torch.dtype) and found.is_floating_point):
        return None if dtype == "auto" else found
    raise ValueError(
        f"dtype={dtype!r} is no floating point type; pass 'auto', or one such as torch.float64"
    )
