"""Why a split is not exact: by experiment, holding one suspect still at a time."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from automicro.batchnorm import needs_two_rows
from automicro.errors import AutomicroError, describe_error
from automicro.forward import Convention, choose_convention
from automicro.oom import Failure, classify
from automicro.probe.averages import Candidate, candidates, expression
from automicro.probe.causes import Rows, fitting_candidate
from automicro.probe.measured import relative_errors
from automicro.verification import findings
from automicro.verification.culprits import modules_across_rows
from automicro.verification.laboratory import Conditions, Laboratory
from automicro.verification.observe import Observation
from automicro.verification.report import Finding
from automicro.verification.rows import choose, labels, measure, weights_in
from automicro.weighting import Average, read_average


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

    def _guilty_attributes(self, exact: Conditions) -> tuple[tuple[str, str], ...]:
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
        targets = self._convention.targets
        shown = ", ".join(f"{weight:.4g}" for weight in weights.tolist())
        batch = self._laboratory.batch()
        where = expression(batch, targets(batch))
        return Candidate(
            code=f"lambda batch: torch.tensor([{shown}])[{where}].sum()",
            value=lambda part: weights[targets(part).cpu()].sum(),
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
