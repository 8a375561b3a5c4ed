"""Prediction of the largest microbatch that fits, before anything is allocated."""

import bisect
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from automicro.batch.layout import BatchLayout
from automicro.checking.verify import check_unwrapped
from automicro.errors import UntraceableModelError, suggestion
from automicro.memory.timeline import GRADIENTS, OPTIMIZER, PARAMETERS, Owner, Trace
from automicro.nested.parts import Nested
from automicro.options import (
    GRADIENT_SUMS,
    PRECISIONS,
    check_choice,
    check_model,
    check_modules,
    read_count,
)
from automicro.policy.policy import canonical_size
from automicro.savers.levels import NESTED, WhenTooLarge
from automicro.savers.offload import OFFLOAD
from automicro.savers.recompute import RECOMPUTE, repeated_blocks
from automicro.tools import Remedy
from automicro.tools.plan.devices import BEFORE_AMPERE, read_memory
from automicro.tools.plan.dry_run import Conditions, DryRun
from automicro.tools.plan.kernels import CASTS, GATHERED, STAYING, STEP
from automicro.tools.plan.report import LevelPlan, PlanReport

# Margins: first, shares of the bytes that come and go in a step, then shares of the peak.
_ERROR = 0.03
_ERROR_OF_LEVELS = 0.06  # fewer bytes come and go there, but the uncertainty stays the same
_FRAGMENTATION = 0.03  # of an accelerator
_KERNELS_OF_CPU = 0.20  # an LSTM's need the most, 16.5 % of the real peak
_LEAST_BYTES = 256 << 10
_SLICES = 8  # of a tail computed in slices
_FINEST = 40  # doublings of the number of slices: one row each, however many rows there are
_RANKS = (2, 8)  # for a model that is not sharded
_SHARDED = frozenset((PARAMETERS, GRADIENTS, OPTIMIZER, STEP))


@dataclass
class Planner:
    """Peaks by size, each computed once."""

    steps: DryRun
    conditions: Conditions
    num_ranks: int
    rows: int
    points: dict[int, tuple[int, int]] = field(default_factory=dict, init=False)
    """Peak and margin by size."""

    def otherwise(self, **changes: Any) -> "Planner":
        """Return a planner of the same steps under other conditions."""
        return dataclasses.replace(self, conditions=dataclasses.replace(self.conditions, **changes))

    @functools.cached_property
    def _gathered_bytes(self) -> int:
        """Bytes of other ranks' shards that a rank holds at a time."""
        model, dtype = self.steps.model, PRECISIONS[self.conditions.precision]
        blocks = [_bytes_of(block) for block in repeated_blocks(model).values()]
        block, rest = max(blocks, default=0), max(_bytes_of(model) - sum(blocks), 0)
        # Repeated blocks are gathered one after the other, the next one while one computes. The
        # rest of the model stays gathered. For a while, gathered data exist twice, as received and
        # as parameters, and so do gradients before they are reduced. The factors were measured.
        if self.conditions.train:
            gathered = 2 * rest + 5 * block if block else 3 * rest
        else:
            gathered = max(rest + 3 * block, 2 * rest + 2 * block)
        if dtype is None:
            return gathered
        # As with MixedPrecisionPolicy(param_dtype=torch.bfloat16).
        widest = max((parameter.itemsize for parameter in model.parameters()), default=4)
        return int(gathered * min(dtype.itemsize / widest, 1.0))

    def trace(self, size: int) -> Trace:
        """Return a step with microbatches of this many rows, as held by one rank."""
        trace = self.steps.step(size, splits=size < self.rows, conditions=self.conditions)

        def share(owner: Owner) -> float:
            if owner.kind == CASTS:  # gathered in this precision
                return 0.0
            return 1 / self.num_ranks if owner.kind in _SHARDED else 1.0

        if self.num_ranks == 1:
            return trace
        return trace.scaled(share).plus({Owner(GATHERED): self._gathered_bytes})

    def margin(self, trace: Trace) -> int:
        """Return the margin of a peak, so that at most one plan in fifty promises too much."""
        # Parameters, gradients and state are known exactly. The rest is not: kernels allocate their
        # own memory, most of all on a CPU, and an accelerator's allocator loses some between
        # blocks.
        held = trace.breakdown()
        moving = sum(num_bytes for owner, num_bytes in held.items() if owner.kind not in STAYING)
        share = _ERROR_OF_LEVELS if self.conditions.savers else _ERROR
        lost = _FRAGMENTATION if self.steps.on_accelerator else _KERNELS_OF_CPU
        return int(share * moving + lost * trace.peak_bytes) + _LEAST_BYTES

    def need(self, size: int) -> int:
        """Return the peak with its margin."""
        if size not in self.points:
            trace = self.trace(size)
            self.points[size] = trace.peak_bytes, self.margin(trace)
        return sum(self.points[size])

    def largest(self, limit_bytes: int) -> int:
        """Return the most rows, among sizes of balanced microbatches, that fit; 0 if none."""
        if self.need(self.rows) <= limit_bytes:
            return self.rows
        sizes = sorted({canonical_size(self.rows, size) for size in range(1, self.rows)})
        # Sizes before the position found have been checked, and fit.
        return [0, *sizes][bisect.bisect_right(sizes, limit_bytes, key=self.need)]

    def with_coarsest_slices(self, size: int, limit_bytes: int | None) -> "Planner":
        """Return a planner with the largest slices of parts with which a microbatch fits."""
        # The slices are halved, as when memory runs out.
        if not self.steps.has_adapting_parts or not self.slices(size):
            return self
        finer = [self.otherwise(finer=1 << doublings) for doublings in range(_FINEST + 1)]
        if limit_bytes is None:
            return finer[0]
        # The finest needs no check, because there is no alternative to it.
        return finer[
            bisect.bisect_left(
                finer, True, hi=_FINEST, key=lambda each: each.need(size) <= limit_bytes
            )
        ]

    def slices(self, size: int) -> Mapping[str, int]:
        """Return the rows of the largest slice of each part with its own size, by name."""
        return self.steps.slices(size, splits=size < self.rows, conditions=self.conditions)

    def level(self, name: str, size: int, limit_bytes: int | None) -> LevelPlan:
        """Return the plan of a level, for microbatches of a size."""
        needed_bytes = self.need(size)
        peak_bytes, margin = self.points[size]
        return LevelPlan(
            name=name,
            microbatch_size=size,
            num_microbatches=-(-self.rows // size),
            fits=limit_bytes is None or needed_bytes <= limit_bytes,
            peak_bytes=peak_bytes,
            margin_bytes=margin,
            nested_sizes=self.slices(size),
        )

    def remedies(self, size: int, limit_bytes: int | None) -> list[Remedy]:
        """Return the effect of each remedy at the same size, most helpful first."""
        found: list[Remedy] = []
        for text, planner in self._changed(size):
            # A remedy that cannot be planned must not prevent the plan.
            with contextlib.suppress(UntraceableModelError):
                needed = planner.need(size)
                saved, fits = self.need(size) - needed, limit_bytes is None or needed <= limit_bytes
                found.append(Remedy(text=text, saved_bytes=saved, fits=fits))
        helping = [each for each in found if each.saved_bytes > 0]
        return sorted(helping, key=lambda remedy: -remedy.saved_bytes)

    def _changed(self, size: int) -> Iterator[tuple[str, "Planner"]]:
        """Yield the changes that might help: a description, and the planner with the change."""
        savers = self.conditions.savers
        if self.conditions.train:
            for name in (RECOMPUTE, OFFLOAD):
                saver = self.steps.saver(name)
                if saver is not None and name not in savers:
                    how = f"{name}: {saver.describe()} (when_too_large={name!r})"
                    yield how, self.otherwise(savers=(*savers, name))
            if self.conditions.precision == "fp32":
                yield "bf16: precision='bf16'", self.otherwise(precision="bf16")
            if self.steps.saver(NESTED) is not None and not self.slices(size):
                # By tokens, because there might be fewer rows than slices.
                part = {"microbatch_size": "auto", "microbatch_unit": "tokens"}
                how = f"tail: compute the outputs and their loss in {_SLICES} slices"
                how = f"{how} (nested={ {'tail': part} })"
                yield how, self.otherwise(savers=(*savers, NESTED), finer=_SLICES)
        for num_ranks in (factor * self.num_ranks for factor in _RANKS):
            sharded = dataclasses.replace(self, num_ranks=num_ranks)
            how = "shard parameters, gradients and optimizer state (fully_shard)"
            yield f"{num_ranks} ranks: {how}", sharded


_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("loss_fn", "forward", "optimizer", "nested")),
    "modules": (),
    "batch_layout": 0,
    "precision": "fp32",
    "gradient_sums": "fp32",
    "when_too_large": "error",
}


def _bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def plan(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    memory: str | int | float | None = None,
    device: str = "cuda",
    rows: int | None = None,
    microbatch_size: int | None = None,
    ranks: int = 1,
    train: bool = True,
    **options: Any,
) -> PlanReport:
    """Predict the largest microbatch that fits a device, without the device.

    A copy of the model takes a step on tensors that have shapes but no data. Forward and backward
    run as in a `Microbatcher`, and each tensor is counted from creation to release. No memory is
    allocated: a model with seven billion parameters can be planned on a laptop.

    The forward runs about ten times on the copy, so printing and counting outside the model are
    visible (`is_extra_pass` identifies these passes). The model, the batch and random states stay
    unchanged.

    Args:
        model: the model on any device, including ``"meta"``, or a function that builds it, which is
            called on the meta device.
        batch: one batch, with any number of rows.
        memory: memory available to tensors, such as ``"24GiB"``. By default that of ``device``, if
            it is known by name.
        device: a name in `DEVICES` such as ``"a100-80gb"``, which determines the memory; ``"cuda"``
            for any other accelerator; or ``"cpu"``.
        rows: rows of the optimization batch on each rank; by default those of ``batch``.
        microbatch_size: size to report on, in rows, instead of the largest that fits.
        ranks: number of ranks that share parameters, gradients and optimizer state as shards
            (``fully_shard``, reduced in each microbatch). All figures are then for one rank.
        train: whether to plan a training step, or the forward of an evaluation.
        options: ``loss_fn``, ``forward``, ``modules``, ``batch_layout``, ``precision``,
            ``gradient_sums``, ``when_too_large`` and ``nested`` as in `Microbatcher`, and
            ``optimizer``: an optimizer of the model's parameters, or a function from parameters to
            one, such as ``torch.optim.AdamW``, whose state is counted. With ``when_too_large`` the
            report has the largest microbatch of each level, and describes the first level at which
            one fits. With parts that adapt (``nested``), a microbatch fits if it does with slices
            of one row; the report has the largest slices that fit.

    Raises:
        UntraceableModelError: the model reads its data while it runs (``.item()``, boolean masks);
            the message has the line.
        BatchError: the batch cannot be split, or ``loss_fn`` does not accept it.
        LossError: the loss is undefined or invalid.
        TypeError, ValueError: invalid arguments; the message has the remedy.

    Example:
        >>> import torch, automicro
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10)
        ... )
        >>> batch = torch.randn(512, 64), torch.randint(10, (512,))
        >>> report = automicro.plan(
        ...     model, batch, loss_fn=torch.nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW,
        ...     memory="16MiB",
        ... )
        >>> report.microbatch_size, report.num_microbatches, report.fits
        (171, 3, True)
    """
    limit_bytes, on_accelerator = read_memory(memory, device)
    if isinstance(model, nn.Module) or not callable(model):
        check_model(model)
        check_unwrapped(model)
    for name in options.keys() - _DEFAULTS.keys():
        known = [*inspect.signature(plan).parameters, *_DEFAULTS]
        known.remove("options")
        raise TypeError(
            f"plan() has no argument {name!r}{suggestion(name, known)}; its arguments are "
            f"{', '.join(known)}"
        )
    given: dict[str, Any] = {**_DEFAULTS, **options}
    conditions = Conditions(
        precision=check_choice("precision", given.pop("precision"), PRECISIONS),
        gradient_sums=check_choice("gradient_sums", given.pop("gradient_sums"), GRADIENT_SUMS),
        train=train,
        # A microbatch fits if it does with the finest slices; the coarsest that fit are found
        # afterwards.
        finer=1 << _FINEST,
    )
    WhenTooLarge(given["when_too_large"])
    Nested(given["nested"])
    given["modules"] = check_modules(given["modules"])
    if not train:
        given["when_too_large"] = "error"  # savers help the backward, and an evaluation has none
    num_ranks = read_count("ranks", ranks)
    layout = BatchLayout(given.pop("batch_layout"))
    steps = DryRun(
        model=model,
        batch=batch,
        layout=layout,
        on_accelerator=on_accelerator,
        before_ampere=device in BEFORE_AMPERE,
        **given,
    )
    num_rows = layout.num_rows(batch) if rows is None else read_count("rows", rows)
    asked = None if microbatch_size is None else read_count("microbatch_size", microbatch_size)

    found = []
    for level in steps.levels:
        savers = tuple(each.name for each in level.savers)
        at_level = dataclasses.replace(conditions, savers=savers)
        planner = Planner(steps, at_level, num_ranks, num_rows)
        if asked is not None or limit_bytes is None:
            size = canonical_size(num_rows, min(asked or num_rows, num_rows))
        else:
            size = planner.largest(limit_bytes) or 1
        planner = planner.with_coarsest_slices(size, limit_bytes)
        found.append((planner, planner.level(level.name, size, limit_bytes)))
    # The report is about the first level that fits.
    planner, level_plan = next((each for each in found if each[1].fits), found[0])
    size = level_plan.microbatch_size
    return PlanReport(
        **vars(level_plan),
        model=type(steps.model).__name__,
        device=device,
        limit_bytes=limit_bytes,
        num_rows=num_rows,
        points=tuple((each, planner.points[each][0]) for each in sorted(planner.points)),
        find_remedies=functools.partial(planner.remedies, size, limit_bytes),
        num_parameters=sum(p.numel() for p in steps.model.parameters()),
        ranks=num_ranks,
        precision=conditions.precision,
        train=train,
        levels=tuple(level_plan for _, level_plan in found),
        assumptions=tuple(sorted(steps.assumptions)),
        state_unknown=steps.step_memory.unknown or "",
        trace=planner.trace(size),
    )
