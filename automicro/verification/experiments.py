"""Why a split is not exact: by experiment, holding one suspect still at a time."""

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from automicro.batch.tensors import tensor_leaves
from automicro.batchnorm import needs_two_rows
from automicro.checking.reading import relative_errors
from automicro.errors import AutomicroError, describe_error
from automicro.loss.averages import Average, Candidate, candidates, expression, read_average
from automicro.loss.conventions import Convention, choose_convention
from automicro.memory.oom import Failure, classify
from automicro.verification import report as findings
from automicro.verification.causes import Rows, fitting_candidate
from automicro.verification.laboratory import (
    Conditions,
    Laboratory,
    choose,
    labels,
    measure,
    named_modules,
    weights_in,
)
from automicro.verification.observation import Observation
from automicro.verification.report import Finding

# By module and number of the call: tensors of the inputs, tensors of the output.
_Calls = dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]


def modules_across_rows(
    laboratory: Laboratory, conditions: Conditions, rows: Sequence[int], tolerance: float
) -> list[str]:
    """Names of the innermost modules that get the same rows, but make something else of them.

    A module can be judged where rows can be found in its outputs: the dimension in which the whole
    batch's differs from a part's.
    """
    half = len(rows) // 2
    parts = [rows[:half], rows[half:]]
    whole = _calls(laboratory, conditions, rows)
    pieces = [_calls(laboratory, conditions, part) for part in parts]
    guilty = []
    for key, (inputs, outputs) in whole.items():
        if any(key not in piece for piece in pieces):
            continue
        given = [_agree(inputs, [piece[key][0] for piece in pieces], tolerance)]
        made = _agree(outputs, [piece[key][1] for piece in pieces], tolerance)
        is_root = key[0] == ""
        if made is False and (given[0] is True or (is_root and given[0] is None)):
            guilty.append(key[0])
    names = list(dict.fromkeys(guilty))
    inner = [
        n for n in names if not any(o != n and (not n or o.startswith(f"{n}.")) for o in names)
    ]
    model = type(laboratory.subject.model).__name__
    return [name or model for name in inner]


def _calls(laboratory: Laboratory, conditions: Conditions, rows: Sequence[int]) -> _Calls:
    with laboratory.stage(conditions) as stage, _recording(stage.roots) as calls:
        laboratory.run_whole(stage, laboratory.on_device(laboratory.batch(rows)))
    return calls


@contextlib.contextmanager
def _recording(roots: dict[str, nn.Module]) -> Iterator[_Calls]:
    calls: _Calls = {}
    counts: dict[str, int] = defaultdict(int)
    handles = []

    def record(name: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            # Before the forward: it may write into its input.
            waiting.append(_tensors((args, kwargs)))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = waiting.pop()
            calls[name, counts[name]] = (inputs, _tensors(output))
            counts[name] += 1

        return before, after

    waiting: list[list[Tensor]] = []
    try:
        for name, module in named_modules(roots):
            before, after = record(name)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any) -> list[Tensor]:
    leaves = [leaf for _, leaf in tensor_leaves(value)]
    return [leaf.detach().to("cpu", copy=True) for leaf in leaves if not leaf.is_nested]


def _agree(
    whole: Sequence[Tensor], pieces: Sequence[Sequence[Tensor]], tolerance: float
) -> bool | None:
    """Whether all rows are the same; None where no rows can be found."""
    verdict: bool | None = None
    for index, tensor in enumerate(whole):
        if any(len(piece) != len(whole) for piece in pieces):
            return None
        parts = [piece[index] for piece in pieces]
        joined = _joined(tensor, parts)
        if joined is None:
            continue
        scale = tensor.abs().max() if tensor.is_floating_point() and tensor.numel() else 1
        gap = (joined.to(torch.float64) - tensor.to(torch.float64)).abs()
        if bool((gap > tolerance * scale).any()):
            return False
        verdict = True
    return verdict


def _joined(whole: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
    """The parts along the one dimension in which they are parts of the whole."""
    if whole.is_complex() or any(part.dim() != whole.dim() for part in parts):
        return None
    differing = [d for d in range(whole.dim()) if any(p.shape[d] != whole.shape[d] for p in parts)]
    if (
        len(differing) != 1
        or sum(p.shape[differing[0]] for p in parts) != whole.shape[differing[0]]
    ):
        return None
    return torch.cat(list(parts), differing[0])


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found out.

    Attributes:
        causes: why a split is not exact.
        loss_average: the value that makes it exact, alone or with the other causes removed.
        is_random: whether random draws hide the rest.
    """

    causes: Sequence[Finding] = field(default_factory=list)
    loss_average: Candidate | None = None
    is_random: bool = False


class Diagnosing:
    """The experiments on one model and one batch.

    Args:
        laboratory: where they run.
        conditions: as configured by the caller.
        seen: what a run of the whole batch changed.
        size: a microbatch size that is not exact.
        tolerance: relative errors up to this one count as rounding.
    """

    def __init__(
        self,
        laboratory: Laboratory,
        conditions: Conditions,
        seen: Observation,
        size: int,
        tolerance: float,
    ) -> None:
        self._laboratory = laboratory
        self._conditions = conditions
        self._seen = seen
        self._size = size
        self._tolerance = tolerance
        self._whole = functools.cache(
            lambda batchnorm: laboratory.whole(Conditions(batchnorm=batchnorm))
        )
        subject = laboratory.subject
        self._convention: Convention = choose_convention(
            subject.model, forward=subject.forward, loss_fn=subject.loss_fn
        )

    def run(self) -> Diagnosis:
        """Hold every suspect still; then find the right average; then let each loose again."""
        seen = self._seen
        still = self._conditions.but(
            batchnorm=bool(seen.batchnorm), buffers=bool(seen.buffers), attributes=seen.attributes
        )
        found: Candidate | None = None
        causes: list[Finding] = []
        if self._error(still) > self._tolerance:
            found, causes = self._search(still)
            if found is None:
                return self._unexplained(still, causes)
        exact = still if found is None else still.but(loss_average=found.value)
        return Diagnosis(causes=[*self._proven(exact), *causes], loss_average=found)

    def _error(self, conditions: Conditions) -> float:
        """The relative error of a split; infinite where it fails."""
        try:
            split = self._laboratory.split(conditions, self._size)
        except Exception as error:
            if classify(error) is not Failure.UNRELATED:
                raise
            return math.inf
        whole = self._whole(conditions.batchnorm)
        return max(relative_errors(split, whole).values(), default=0.0)

    def _proven(self, exact: Conditions) -> list[Finding]:
        """The suspects without which it is exact and with which it is not."""
        seen = self._seen
        suspects = []
        if seen.batchnorm:
            suspects.append((exact.but(batchnorm=False), findings.batchnorm(seen.batchnorm)))
        if seen.buffers:
            suspects.append((exact.but(buffers=False), findings.buffers(seen.buffers)))
        if seen.attributes:
            loose = exact.but(attributes=())
            guilty = seen.attributes
            if self._error(loose) > self._tolerance:
                guilty = self._guilty_attributes(exact) or seen.attributes
            suspects.append((loose, findings.attributes(guilty)))
        at_rest = self._error(exact)
        proven = []
        for loose, finding in suspects:
            error = self._error(loose)
            if error > self._tolerance:
                shown = f"held still, the relative error is {at_rest:.0e}, not {error:.1g}"
                proven.append(replace(finding, evidence=shown))
        if not proven and exact.loss_average is self._conditions.loss_average:
            return [finding for _, finding in suspects]
        return proven

    def _guilty_attributes(self, exact: Conditions) -> tuple[str, ...]:
        """Those attributes that matter, of many that may only be caches."""
        attributes = exact.attributes
        if len(attributes) > 16:
            return ()
        return tuple(
            key
            for key in attributes
            if self._error(exact.but(attributes=tuple(k for k in attributes if k != key)))
            > self._tolerance
        )

    def _search(self, still: Conditions) -> tuple[Candidate | None, list[Finding]]:
        """Another average that is exact, or else what kind of loss it is."""
        rows = measure(self._laboratory, still, sorted(choose(self._laboratory).rows))
        if isinstance(rows, str):
            return None, [failure_on_fewer_rows(self._laboratory, still, 1, rows)]
        found = self._fitting_candidate(still, rows)
        if found is not None:
            return found, [self._loss_average(still, found)]
        weights = rows.solve(math.sqrt(self._tolerance) * 1e-2)
        if weights is None or min(weights) < -math.sqrt(self._tolerance):
            return None, []
        return self._weighted(still, rows, weights)

    def _loss_average(self, still: Conditions, found: Candidate) -> Finding:
        before = self._error(still)
        after = self._error(still.but(loss_average=found.value))
        configured = self._averages(self._conditions.loss_average)
        described = " and ".join(dict.fromkeys(each.describe() for each in configured.values()))
        return findings.loss_average(found, described, before, after)

    def _fitting_candidate(self, still: Conditions, rows: Rows) -> Candidate | None:
        tried = list(candidates(self._laboratory.batch(), self._convention))

        def weights_of(candidate: Candidate) -> list[float] | None:
            return weights_in(self._averages(candidate.value)[""], self._laboratory, rows)

        return fitting_candidate(
            rows,
            tried,
            weights_of,
            self._tolerance,
            accepts=lambda candidate: self._is_exact(still, candidate),
        )

    def _is_exact(self, still: Conditions, candidate: Candidate) -> bool:
        return self._error(still.but(loss_average=candidate.value)) <= self._tolerance

    def _averages(self, loss_average: Any) -> dict[str, Average]:
        subject = self._laboratory.subject
        return read_average(
            loss_average,
            loss_fn=subject.loss_fn,
            model=subject.model,
            targets=self._convention.targets,
            reads_model=self._convention.computes_loss_in_model,
        )

    def _weighted(
        self, still: Conditions, rows: Rows, weights: Sequence[float]
    ) -> tuple[Candidate | None, list[Finding]]:
        """A mean with weights of its own: by class, or by something unknown."""
        laboratory, name = self._laboratory, self._laboratory.subject.loss_name
        batch = laboratory.batch()
        num_rows = laboratory.layout.num_rows(batch)
        each_row = laboratory.layout.split(batch, [1] * num_rows)
        classes = labels(each_row, self._convention)
        if any(len(part) > 1 for part in rows.parts):
            classes = []
        by_class: dict[int, list[float]] = {}
        for (row, *_), weight in zip(rows.parts, weights, strict=True):
            by_class.setdefault(classes[row] if classes else row, []).append(weight)
        slack = math.sqrt(self._tolerance)
        are_equal = all(max(w) - min(w) <= slack * max(w) for w in by_class.values())
        if not classes or not are_equal or len(by_class) == len(rows.parts):
            return None, [findings.other_weights(name, rows.parts, weights)]
        least = min(weight[0] for weight in by_class.values() if weight[0] > 0)
        table = {label: weight[0] / least for label, weight in by_class.items()}
        found = self._class_weighted(table, classes)
        if found is not None and not self._is_exact(still, found):
            found = None
        return found, [findings.class_weights(found, table, name)]

    def _class_weighted(self, table: dict[int, float], classes: Sequence[int]) -> Candidate | None:
        if not set(classes) <= table.keys() or min(table) < 0:
            return None
        weights = torch.tensor(
            [table.get(label, 0.0) for label in range(max(table) + 1)], dtype=torch.float64
        )
        digits = max(4, round(-math.log10(self._tolerance)))
        shown = ", ".join(f"{weight:.{digits}g}" for weight in weights.tolist())
        batch = self._laboratory.batch()
        where = expression(batch, self._convention.targets(batch))
        return Candidate(
            code=f"lambda batch: torch.tensor([{shown}])[{where}].sum()",
            kind="a mean over the class weights of its targets",
        )

    def _unexplained(self, still: Conditions, causes: list[Finding]) -> Diagnosis:
        """Computation across rows, in a module or in the loss."""
        seen, laboratory = self._seen, self._laboratory
        suspects = []
        if seen.batchnorm:
            suspects.append(findings.batchnorm(seen.batchnorm))
        if seen.buffers:
            suspects.append(findings.buffers(seen.buffers))
        if causes:
            return Diagnosis(causes=[*causes, *suspects])
        modules = self._modules_across_rows(still)
        if seen.generators or seen.unsilenced:
            return Diagnosis(
                causes=[findings.random_draws(seen, modules), *suspects], is_random=True
            )
        if modules:
            causes.append(findings.across_rows(modules))
        else:
            causes.append(findings.compares_rows(laboratory.subject.loss_name))
        return Diagnosis(causes=[*causes, *suspects])

    def _modules_across_rows(self, still: Conditions) -> list[str]:
        indices = sorted(choose(self._laboratory).rows)
        try:
            return modules_across_rows(self._laboratory, still, indices, self._tolerance)
        except AutomicroError:
            raise
        except Exception as error:
            if classify(error) is not Failure.UNRELATED:
                raise
            return []


def failure_on_fewer_rows(
    laboratory: Laboratory, conditions: Conditions, size: int, failure: str
) -> Finding:
    """Why a forward or a loss fails with fewer rows: the number, or that it is one.

    Args:
        laboratory: where to try one row and two.
        conditions: under which it failed.
        size: rows of the microbatches that failed, at most.
        failure: what it said.
    """
    name = laboratory.subject.loss_name
    if _failure_of(laboratory, conditions, [0, 1]) is None:
        alone = _failure_of(laboratory, conditions, [0])
        if alone is not None:
            return findings.fails_on_one_row(name, alone)
    return findings.fails_on_fewer_rows(name, size, failure)


def _failure_of(laboratory: Laboratory, conditions: Conditions, rows: Sequence[int]) -> str | None:
    try:
        laboratory.whole(conditions, rows)
    except Exception as error:
        if classify(error) is not Failure.UNRELATED:
            raise
        return None if needs_two_rows(error) else describe_error(error)
    return None
