"""The largest microbatch that will fit, before anything is allocated."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from automicro.batch.layout import BatchLayout, balanced_sizes
from automicro.errors import (
    BatchError,
    LossError,
    UntraceableModelError,
    describe_error,
    text_of,
)
from automicro.memory.timeline import BACKWARD, GRADIENTS, OPTIMIZER, PARAMETERS, Owner, Trace
from automicro.nested.parts import check_nested
from automicro.options import (
    GRADIENT_SUMS,
    PRECISIONS,
    SYNCS,
    check_choice,
    check_model,
    check_modules,
    check_unwrapped,
    read_count,
)
from automicro.savers.levels import (
    NESTED,
    OFFLOAD,
    RECOMPUTE,
    Level,
    Savers,
    check_levels,
)
from automicro.savers.recompute import repeated_blocks
from automicro.tools.plan.devices import find_device, read_memory
from automicro.tools.plan.dry_run import OPTIMIZER_STEP, Conditions, DryRun, Job
from automicro.tools.plan.kernels import CASTS, GATHERED, STAYING, STEP, TAIL
from automicro.tools.plan.report import (
    LevelPlan,
    PlanReport,
    Remedy,
    by_kind,
    by_module,
    samples_of,
)

# Of what comes and goes in a step, what a plan may be wrong by; then of all of it.
_ERROR = 0.03
_ERROR_OF_LEVELS = 0.06  # less comes and goes there, and what is not known stays the same
_MEASURED_ERROR = 0.10
_FRAGMENTATION = 0.03  # of an accelerator
_KERNELS_OF_CPU = 0.20  # an LSTM's takes most, 16.5 % of the real peak
_LEAST_BYTES = 256 << 10
_FEW = (2, 8)  # rows that are measured
_SLICES = 8  # of a tail computed in slices
_FINEST = 1 << 40  # slices of one row each, however many rows there are
_RANKS = (2, 8)  # for a model that is not sharded
_SHARDED = frozenset((PARAMETERS, GRADIENTS, OPTIMIZER, STEP))


def margin_bytes(
    trace: Trace, *, on_accelerator: bool, is_measured: bool, is_plain: bool = True
) -> int:
    """The margin of a peak, so that at most one plan in fifty promises too much.

    Parameters, gradients and state are known to the byte. What comes and goes is not: kernels take
    memory for themselves, on a CPU most. An accelerator's allocator loses some between its blocks.
    """
    held = trace.breakdown()
    moving = sum(num_bytes for owner, num_bytes in held.items() if owner.kind not in STAYING)
    share = _MEASURED_ERROR if is_measured else _ERROR if is_plain else _ERROR_OF_LEVELS
    lost = _FRAGMENTATION if on_accelerator else _KERNELS_OF_CPU
    return int(share * moving + lost * trace.peak_bytes) + _LEAST_BYTES


@dataclass(frozen=True)
class _Shards:
    """One rank's part of a model of which each rank holds a share, as ``fully_shard`` has it."""

    num_ranks: int
    block_bytes: int
    rest_bytes: int
    gathered_share: float

    @classmethod
    def of(cls, model: nn.Module, num_ranks: int, precision: str) -> "_Shards":
        def held(module: nn.Module) -> int:
            return sum(parameter.nbytes for parameter in module.parameters())

        blocks = [held(block) for block in repeated_blocks(model).values()]
        whole = held(model)
        dtype = PRECISIONS[precision]
        widest = max((parameter.itemsize for parameter in model.parameters()), default=4)
        return cls(
            num_ranks=num_ranks,
            block_bytes=max(blocks, default=0),
            rest_bytes=max(whole - sum(blocks), 0),
            # As with MixedPrecisionPolicy(param_dtype=torch.bfloat16).
            gathered_share=1.0 if dtype is None else min(dtype.itemsize / widest, 1.0),
        )

    def of_rank(self, trace: Trace, *, train: bool, defers: bool = False) -> Trace:
        """One rank's share of what one process would hold.

        Args:
            trace: of one process.
            train: whether there is a backward.
            defers: whether gradients of whole parameters wait for the last microbatch.
        """
        if self.num_ranks == 1:
            return trace
        # Repeated blocks are gathered one after the other, the next one while one computes; what
        # is left of the model stays gathered. What is gathered lies there twice for a while, as it
        # came and as parameters; so do gradients before they are reduced. Factors were measured.
        rest, block = self.rest_bytes, self.block_bytes
        if train:
            gathered = 2 * rest + 5 * block if block else 3 * rest
        else:
            gathered = max(rest + 3 * block, 2 * rest + 2 * block)

        def share(owner: Owner) -> float:
            if owner.kind == CASTS:  # gathered as such
                return 0.0
            if defers and owner.kind == GRADIENTS:
                return 1.0
            return 1 / self.num_ranks if owner.kind in _SHARDED else 1.0

        held = {Owner(GATHERED): int(gathered * self.gathered_share)}
        return trace.scaled(share).plus(held)


class _FewRows:
    """Steps of a few rows that really ran on the CPU, and lines through them for more rows."""

    def __init__(self, job: Job) -> None:
        self._dry_run = DryRun(job, is_fake=False)
        self.model, self.job, self.is_fake = self._dry_run.model, job, False
        self.assumptions = self._dry_run.assumptions
        self.step_memory = self._dry_run.step_memory
        self._run = self._dry_run.step
        self.levels, self.saver = self._dry_run.levels, self._dry_run.saver

    @property
    def has_parts(self) -> bool:
        """As `DryRun`, like the next."""
        return self._dry_run.has_parts

    @property
    def has_adapting_parts(self) -> bool:
        return self._dry_run.has_adapting_parts

    def slices(self, rows: int, *, splits: bool, conditions: Conditions) -> dict[str, int]:
        """As `DryRun.slices`; not known of many rows, which do not run."""
        if rows > _FEW[1]:
            return {}
        return self._dry_run.slices(rows, splits=splits, conditions=conditions)

    def step(self, rows: int, *, splits: bool, conditions: Conditions) -> Trace:
        """As `DryRun.step`; of many rows on lines through the steps of two smaller sizes."""
        few, more = _FEW
        if rows <= more:
            return self._run(rows, splits=splits, conditions=conditions)
        low, high = (self._run(each, splits=splits, conditions=conditions) for each in _FEW)
        times = (rows - more) / (more - few)
        found = high.on_line(low, times)
        if found is not None:
            return found
        # Their events do not match, so owners are extrapolated at the peaks alone. The optimizer's
        # step is left out, which the rows of a microbatch do not change.
        before, after = (each.until(OPTIMIZER_STEP).breakdown() for each in (low, high))
        held = {
            owner: max(round(num_bytes + (num_bytes - before.get(owner, 0)) * times), 0)
            for owner, num_bytes in after.items()
        }
        return Trace.still(held)


class Planner:
    """Peaks by size, each found once.

    Args:
        steps: runs them.
        conditions: of all steps.
        num_ranks: on which the model is sharded.
        rows: of the optimization batch.
    """

    def __init__(
        self, steps: DryRun | _FewRows, conditions: Conditions, num_ranks: int, rows: int
    ) -> None:
        self.steps, self.conditions, self.rows = steps, conditions, rows
        self.shards = _Shards.of(steps.model, num_ranks, conditions.precision)
        self.points: dict[int, tuple[int, int]] = {}  # peak and margin by size

    def otherwise(self, **changes: Any) -> "Planner":
        """Of the same steps under other conditions."""
        conditions = dataclasses.replace(self.conditions, **changes)
        return Planner(self.steps, conditions, self.shards.num_ranks, self.rows)

    def whole(self, size: int, conditions: Conditions) -> Trace:
        """The same of all shards together."""
        return self.steps.step(size, splits=size < self.rows, conditions=conditions)

    def trace(self, size: int) -> Trace:
        """A step whose microbatches have this many rows, as one rank holds it."""
        return self.shards.of_rank(self.whole(size, self.conditions), train=self.conditions.train)

    def margin(self, trace: Trace) -> int:
        return margin_bytes(
            trace,
            on_accelerator=self.steps.job.on_accelerator,
            is_measured=not self.steps.is_fake,
            is_plain=not self.conditions.savers,
        )

    def need(self, size: int) -> int:
        """The peak with its margin."""
        if size not in self.points:
            trace = self.trace(size)
            self.points[size] = trace.peak_bytes, self.margin(trace)
        return sum(self.points[size])

    def deferred_bytes(self, size: int) -> int | None:
        """The same where gradients of whole parameters wait for the last microbatch.

        None where nothing waits: on one rank, with one microbatch, without a backward.
        """
        if self.shards.num_ranks == 1 or size >= self.rows or not self.conditions.train:
            return None
        trace = self.shards.of_rank(self.whole(size, self.conditions), train=True, defers=True)
        return trace.peak_bytes + self.margin(trace)

    def largest(self, limit_bytes: int) -> int:
        """The most rows that fit; 0 where one does not.

        A peak is a maximum of lines in the rows, so it never grows slower than it has begun to:
        what lies above the line through two sizes fails without being looked at. The straight way
        between what fits and what fails never promises too much. What is returned was looked at.
        """
        if self.need(1) > limit_bytes:
            return 0
        fits, fails, size = 1, self.rows + 1, min(2, self.rows)
        if self.steps.has_parts:  # beyond the rows of one slice a peak grows slower
            while fails - fits > 1:
                size = (fits + fails) // 2
                fits, fails = (fits, size) if self.need(size) > limit_bytes else (size, fails)
            return fits
        while fits < size < fails:
            if self.need(size) > limit_bytes:
                fails = size
            else:
                before, fits = fits, size
                slope = (self.need(fits) - self.need(before)) / (fits - before)
                if slope > 0:
                    room = limit_bytes - self.need(fits)
                    fails = min(fails, fits + int(room / slope) + 1)
            if fails in self.points:
                # Both ends were looked at, and what the straight way between them allows surely
                # fits.
                slope = (self.need(fails) - self.need(fits)) / (fails - fits)
                guess = fits + int((limit_bytes - self.need(fits)) / slope) if slope > 0 else fits
                size = min(max(guess, fits + 1), fails - 1)
            else:
                # Not looked at yet: the most rows that the line through two sizes leaves are tried
                # first.
                size = fails - 1
        return fits

    def told(self, size: int) -> int:
        """Rows of the largest microbatch, where sizes are balanced. 0 is that one row is too many.

        It is looked at.
        """
        told = balanced_sizes(self.rows, size or 1)[0]
        self.need(told)
        return told

    def with_coarsest_slices(self, size: int, limit_bytes: int | None) -> "Planner":
        """The same with the largest slices of parts with which a microbatch fits.

        They halve, as where memory runs out.
        """
        if not self.steps.has_adapting_parts or (self.steps.is_fake and not self.slices(size)):
            return self
        finest = 0 if limit_bytes is None else (_FINEST - 1).bit_length()
        coarsest = 0
        found = self.otherwise(finer=1 << finest)
        while coarsest < finest:
            middle = (coarsest + finest) // 2
            tried = self.otherwise(finer=1 << middle)
            if limit_bytes is not None and tried.need(size) > limit_bytes:
                coarsest = middle + 1
            else:
                finest, found = middle, tried
        return found

    def slices(self, size: int) -> dict[str, int]:
        """Rows of the largest slice of each part with a size of its own, by its name."""
        return self.steps.slices(size, splits=size < self.rows, conditions=self.conditions)

    def remedies(self, size: int, limit_bytes: int | None) -> list[Remedy]:
        """The needs of the same size with each remedy, the most helpful first."""
        now = self.need(size)
        found: list[Remedy] = []

        def add(name: str, how: str, predict: Callable[[], Trace], **changes: Any) -> None:
            try:
                # A remedy that cannot be planned is no reason to plan nothing.
                trace = predict()
            except UntraceableModelError:
                return
            needed = trace.peak_bytes + self.otherwise(**changes).margin(trace)
            if needed < now:
                found.append(
                    Remedy(
                        name=name,
                        how=how,
                        peak_bytes=trace.peak_bytes,
                        saved_bytes=now - needed,
                        fits=limit_bytes is None or needed <= limit_bytes,
                    )
                )

        def otherwise(**changes: Any) -> Trace:
            return self.otherwise(**changes).trace(size)

        savers = self.conditions.savers

        def sharded(num_ranks: int) -> Trace:
            shards = _Shards.of(self.steps.model, num_ranks, self.conditions.precision)
            return shards.of_rank(self.whole(size, self.conditions), train=self.conditions.train)

        if self.conditions.train and self.steps.is_fake:
            for name in (RECOMPUTE, OFFLOAD):
                saver = self.steps.saver(name)
                if saver is not None and name not in savers:
                    how = f"{saver.describe()} (when_too_large={name!r})"
                    with_it: dict[str, Any] = {"savers": (*savers, name)}
                    add(name, how, functools.partial(otherwise, **with_it), **with_it)
            if self.conditions.precision == "fp32":
                add("bf16", "precision='bf16'", lambda: otherwise(precision="bf16"))
            how = f"compute the outputs and their loss in {_SLICES} slices"
            if self.slices(size):
                pass  # some part is in slices already
            elif self.steps.saver(NESTED) is not None:
                with_it = {"savers": (*savers, NESTED), "finer": _SLICES}
                # By tokens: there may be fewer rows than slices.
                options = {"microbatch_size": "auto", "microbatch_unit": "tokens"}
                how = f"{how} (nested={ {'tail': options} })"
                add("tail", how, functools.partial(otherwise, **with_it), **with_it)
            else:
                how += " (a function of their own, with a size of its own by automicro.split)"
                add("tail", how, lambda: self.trace(size).scaled(_slices_of_tail))
        for factor in _RANKS:
            num_ranks = factor * self.shards.num_ranks
            add(
                f"shards over {num_ranks} ranks",
                "shard parameters, gradients and optimizer state (fully_shard)",
                functools.partial(sharded, num_ranks),
            )
        return sorted(found, key=lambda remedy: -remedy.saved_bytes)


def _slices_of_tail(owner: Owner) -> float:
    is_tail = owner.kind == TAIL or owner == Owner(BACKWARD)
    return 1 / _SLICES if is_tail else 1.0


def plan(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    forward: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    memory: str | int | float | None = None,
    device: str = "cuda",
    rows: int | None = None,
    microbatch_size: int | None = None,
    ranks: int = 1,
    precision: str = "fp32",
    gradient_sums: str = "fp32",
    recompute: bool = False,
    when_too_large: Savers = "error",
    nested: Mapping[str, Any] | None = None,
    sync: str = "each",
    train: bool = True,
    modules: Iterable[nn.Module] = (),
    batch_layout: int | Mapping[str, Any] = 0,
    remedies: bool = True,
) -> PlanReport:
    """The largest microbatch that will fit a device, without the device.

    A copy of the model takes a step on tensors that have shapes but no data, forward and backward
    as a `Microbatcher` runs them, and every tensor's coming and going is counted. Nothing is
    allocated: a model of seven billion parameters is planned on a laptop. A model that reads its
    data while it runs (``.item()``, boolean masks) is measured instead, in a few rows on the CPU,
    and the report says so.

    The forward runs some ten times, on a copy: what it prints or counts outside of the model shows
    (`is_extra_pass` tells it). The model, the batch and random generators stay as they are.

    Args:
        model: the model, on any device, also on ``"meta"``; or a function that makes it, which is
            called on the meta device.
        batch: one batch of it, of any number of rows.
        loss_fn: as in `Microbatcher`, and so ``forward``, ``modules``, ``batch_layout``.
        forward: see there.
        optimizer: one of the model's parameters, or a function from parameters to one, such as
            ``torch.optim.AdamW``. Its state is counted; None for none.
        memory: what tensors may take, such as ``"24GiB"``; of a device of the table, that much.
        device: a name from `DEVICES` such as ``"a100-80gb"``, whose memory is then known;
            ``"cuda"`` for any other accelerator; ``"cpu"``.
        rows: of the optimization batch, on each rank; those of ``batch`` unless given.
        microbatch_size: tell of this size, in rows, in place of the largest that fits.
        ranks: on which parameters, gradients and optimizer state are sharded (``fully_shard``);
            all figures are then of one of them.
        precision: as in `Microbatcher`, and so ``gradient_sums``.
        gradient_sums: see there.
        recompute: whether repeated blocks are computed again in the backward, at every level.
        when_too_large: as in `Microbatcher`: the report has the largest microbatch of each level,
            and tells of the first at which one fits.
        nested: sizes of parts, as a mapping in `Microbatcher`. Where they adapt, a microbatch fits
            that does with slices of one row; told are the largest slices that fit then.
        sync: as in `Microbatcher`: with ``"auto"`` each level says what it needs where shards are
            reduced with the last microbatch alone. It is no reason for a smaller microbatch.
        train: a training step; False for the forward of an evaluation.
        modules: see there.
        batch_layout: see there.
        remedies: whether to predict what would help most, which takes a few runs more.

    Raises:
        UntraceableModelError: the model can be run neither without data nor on the CPU.
        BatchError: the batch cannot be cut, or is not what ``loss_fn`` takes.
        LossError: nothing says how to compute the loss, or it is none.
        TypeError, ValueError: arguments that make no sense, each with its remedy.

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
    if isinstance(model, nn.Module):
        check_model(model)
        check_unwrapped(model)
    # Refuses it in its own words.
    elif not callable(model):
        check_model(model)
    conditions = Conditions(
        precision=check_choice("precision", precision, PRECISIONS),
        gradient_sums=check_choice("gradient_sums", gradient_sums, GRADIENT_SUMS),
        train=train,
        savers=(RECOMPUTE,) if recompute else (),
        # A microbatch fits if it does with the finest slices; coarser ones are looked for
        # afterwards.
        finer=_FINEST,
    )
    check_levels(when_too_large)
    check_nested(nested)
    check_choice("sync", sync, SYNCS)
    num_ranks = read_count("ranks", ranks)
    job = Job(
        model=model,
        batch=batch,
        layout=BatchLayout(batch_layout),
        loss_fn=loss_fn,
        forward=forward,
        modules=check_modules(modules),
        optimizer=optimizer,
        on_accelerator=on_accelerator,
        before_ampere=device not in ("cpu", "cuda") and find_device(device).is_before_ampere,
        # Levels save memory of the backward, and an evaluation has none.
        when_too_large=when_too_large if train else "error",
        nested=nested,
    )
    num_rows = job.layout.num_rows(batch) if rows is None else read_count("rows", rows)
    given = None if microbatch_size is None else read_count("microbatch_size", microbatch_size)
    why = ""

    def planned(steps: DryRun | _FewRows) -> list[_Planned]:
        found = []
        for level in steps.levels:
            savers = (*conditions.savers, *(each.name for each in level.savers))
            at_level = dataclasses.replace(conditions, savers=tuple(dict.fromkeys(savers)))
            planner = Planner(steps, at_level, num_ranks, num_rows)
            if given is not None or limit_bytes is None:
                size = min(given or num_rows, num_rows)
            else:
                size = planner.largest(limit_bytes)
            told = planner.told(size)
            planner = planner.with_coarsest_slices(told, limit_bytes)
            # With other slices it is another planner, which has not looked at this size yet.
            planner.told(size)
            found.append(_Planned(planner, level, size, told, may_defer=sync == "auto"))
        return found

    try:
        found = planned(DryRun(job))
    except UntraceableModelError as error:
        why = text_of(error)
        try:
            found = planned(_FewRows(job))
        except (BatchError, LossError):
            raise
        except Exception as second:
            # The same on both ways: said once.
            if text_of(second) == why:
                raise
            raise UntraceableModelError(
                f"{why}. On the CPU a few rows fail, too: {describe_error(second)}"
            ) from second
    return _report(found, limit_bytes, device=device, why=why, remedies=remedies)


@dataclass(frozen=True)
class _Planned:
    """The plan of a level.

    Attributes:
        planner: of it, with the slices that are told.
        level: itself.
        size: the most rows that fit; 0 where one does not.
        told: rows of the largest microbatch of balanced ones.
        may_defer: whether gradients may be reduced with the last microbatch alone.
    """

    planner: Planner
    level: Level
    size: int
    told: int
    may_defer: bool

    def summary(self, limit_bytes: int | None) -> LevelPlan:
        """In bytes and words."""
        planner, told = self.planner, self.told
        peak_bytes, margin = planner.points[told]
        fits = self.size > 0 and (limit_bytes is None or peak_bytes + margin <= limit_bytes)
        return LevelPlan(
            name=self.level.name,
            how=self.level.describe(),
            largest_size=self.size,
            microbatch_size=told,
            num_microbatches=-(-planner.rows // told),
            fits=fits,
            peak_bytes=peak_bytes,
            margin_bytes=margin,
            nested_sizes=planner.slices(told),
            deferred_bytes=planner.deferred_bytes(told) if self.may_defer else None,
        )


def _report(
    found: Sequence[_Planned],
    limit_bytes: int | None,
    *,
    device: str,
    why: str,
    remedies: bool,
) -> PlanReport:
    """The report, in bytes and words, of the first level that fits."""
    levels = [each.summary(limit_bytes) for each in found]
    index = next((index for index, level in enumerate(levels) if level.fits), 0)
    planner, level = found[index].planner, levels[index]
    told, conditions = level.microbatch_size, planner.conditions
    trace = planner.trace(told)
    assumptions = tuple(sorted(planner.steps.assumptions))  # remedies may need others
    return PlanReport(
        model=type(planner.steps.model).__name__,
        device=device,
        limit_bytes=limit_bytes,
        num_rows=planner.rows,
        microbatch_size=told,
        num_microbatches=level.num_microbatches,
        largest_size=level.largest_size,
        fits=level.fits,
        peak_bytes=level.peak_bytes,
        margin_bytes=level.margin_bytes,
        breakdown=by_kind(trace.breakdown()),
        modules=by_module(trace.breakdown()),
        points=tuple((each, planner.points[each][0]) for each in sorted(planner.points)),
        remedies=tuple(planner.remedies(told, limit_bytes) if remedies else ()),
        num_parameters=sum(p.numel() for p in planner.steps.model.parameters()),
        ranks=planner.shards.num_ranks,
        precision=conditions.precision,
        train=conditions.train,
        recompute=RECOMPUTE in conditions.savers,
        level=level.name,
        levels=tuple(levels),
        nested_sizes=level.nested_sizes,
        is_measured=not planner.steps.is_fake,
        why_measured=why,
        assumptions=assumptions,
        state_unknown=planner.steps.step_memory().unknown or "",
        samples=samples_of(trace),
    )
