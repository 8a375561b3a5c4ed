"""Plans of several ranks, which run the same number of microbatches."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from automicro.errors import BatchError
from automicro.ranks.interface import Agreement, Proposal, Ranks
from automicro.step.passes import Losses, like
from automicro.step.plan import ROWS, Cut, CutRule, Plan, Step, level_for, propose
from automicro.values import read_scalars, stack_scalars


def propose_to(step: Step, rule: CutRule, *, training: bool, lacks_rows: bool = False) -> Proposal:
    """Return this rank's proposal for an agreement."""
    step.policy.level = level_for(step)
    sizes = [propose(each, step.policy, rule) for each in step.batches]
    # A rank whose data have run out still takes part, without rows.
    largest = max([each.extent for each in step.batches], default=0)
    # A batch that stays whole must not limit the size of other ranks.
    cut = [size for size, each in zip(sizes, step.batches, strict=True) if size < each.extent]
    return Proposal(
        num_rows=sum(step.rows),
        microbatch_size=min(cut, default=max(largest, 1)),
        denominators=step.denominators,
        num_batches=len(step.batches),
        max_extent=largest,
        cost=max((each.cost for each in step.batches if each.cost is not None), default=None),
        wants_to_stop=step.wants_to_stop,
        training=training,
        lacks_rows=lacks_rows,
        level=step.policy.level,
    )


def plan_together(step: Step, rule: CutRule, agreement: Agreement, ranks: Ranks) -> Plan:
    """Return the plan of this rank, with the number of microbatches that all ranks run."""
    policy, size = step.policy, agreement.microbatch_size
    policy.level = agreement.level
    unit = policy.multiple_of
    if rule.strict_divisible and agreement.min_rows != agreement.num_batches * agreement.max_extent:
        raise BatchError(
            f"strict_divisible=True: ranks have from {agreement.min_rows} to "
            f"{agreement.max_extent} rows, so their microbatches cannot all be equal. Give every "
            "rank the same number of rows (drop_last=True in the data loader), or leave "
            "strict_divisible out: uneven rows are exact, too"
        )
    if agreement.num_batches <= 1 and rule.unit == ROWS:
        widest = rule.cut(agreement.max_extent, size, multiple_of=unit)
        size, count = widest[0], len(widest)
        # Balanced over the number of slices of the widest batch. Whole units may give fewer slices,
        # and then fillers replace the missing ones.
        if unit > 1 or rule.strict_divisible:
            slices = [rule.cut(rows, size, multiple_of=unit) for rows in step.rows]
        else:
            slices = [_balanced(rows, count, rule.min_rows) for rows in step.rows]
        cuts = list(map(Cut, slices, [each.cost for each in step.batches]))
    else:
        # With several batches, or costs, each rank must report its own number of slices.
        cuts = [rule.cut_batch(each, size, multiple_of=unit) for each in step.batches]
        count = int(ranks.most(sum(len(cut.sizes) for cut in cuts)))
        if rule.unit != ROWS:
            size = int(ranks.most(max((cut.largest for cut in cuts), default=1)))
    return Plan(
        cuts=cuts,
        size=size,
        num_microbatches=count,
        extent=max(agreement.max_extent, size),
        cost=agreement.cost,
        # Ranks that share the work on the same rows (`copies`) would count them several times.
        num_global_rows=agreement.num_rows // ranks.copies,
        stops=agreement.stops,
        unit=rule.unit,
        is_measuring=policy.is_measuring(agreement.max_extent, agreement.cost),
        agreement=agreement,
        proposed=agreement.microbatch_size,
        level=agreement.level,
        settings=policy.settings,
    )


def nothing_to_run(*, stops: bool) -> Plan:
    """Return the plan if no rank has any row.

    >>> nothing_to_run(stops=False).num_microbatches
    0
    """
    return Plan(
        cuts=[], size=0, num_microbatches=0, extent=0, cost=None, num_global_rows=0, stops=stops
    )


def _balanced(num_rows: int, count: int, min_rows: int) -> list[int]:
    return [size for size in rows_of_microbatches(num_rows, count, min_rows=min_rows) if size]


class GlobalLoss:
    """The sum of the losses of all ranks, each already divided by the denominator of all ranks."""

    def __init__(self, device: torch.device, *, at_once: bool, num_means: int = 1) -> None:
        self._device = device
        self._num_means = num_means
        # A vote carries a few numbers at no cost, but reading them from an accelerator waits for
        # it.
        self._votes = at_once or device.type == "cpu"
        self._own: Tensor | None = None  # on an accelerator

    def numbers(self, result: Losses) -> Sequence[float]:
        """Return the loss and its parts, if the vote carries them."""
        loss, parts = result
        if self._votes:
            return read_scalars([loss, *parts.values()])
        # Allocate before the vote: an out-of-memory error after it would leave other ranks waiting.
        self._own = stack_scalars([loss, *parts.values()]).to(self._device)
        return ()

    def together(self, result: Losses, sums: Sequence[float]) -> Losses:
        """Return the loss of all ranks and its parts."""
        stacked, self._own = self._own, None
        if stacked is None:
            summed = torch.tensor(sums, dtype=torch.float64, device="cpu")
            return like(result, summed / self._num_means)
        from automicro.ranks.guards.collectives import own_collectives

        with own_collectives():  # the vote to commit has just come before
            dist.all_reduce(stacked)
        return like(result, stacked / self._num_means)


def rows_of_microbatches(num_rows: int, num_microbatches: int, *, min_rows: int = 1) -> list[int]:
    """Return the rows of a rank's microbatches, balanced, the larger ones first.

    >>> rows_of_microbatches(5, 3), rows_of_microbatches(2, 3)
    ([2, 2, 1], [1, 1, 0])
    >>> rows_of_microbatches(5, 3, min_rows=2)
    [3, 2, 0]
    """
    # A 0 is a filler: a microbatch of any rows with zero weight, which runs because the peers'
    # collectives need it.
    # Fewer slices are better than one with a single row; fillers complete the number.
    pieces = min(num_microbatches, max(1, num_rows // min_rows)) if num_rows else 0
    sizes = [num_rows // pieces + (index < num_rows % pieces) for index in range(pieces)]
    return sizes + [0] * (num_microbatches - pieces)
