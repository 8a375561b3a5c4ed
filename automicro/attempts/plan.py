"""What one attempt will run: the slices of each batch, agreed on with the other ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from automicro.attempts.cut_rule import CutRule
from automicro.errors import BatchError
from automicro.policy import Policy
from automicro.ranks import Agreement, Proposal, Ranks, rows_of_microbatches


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one attempt will run.

    Attributes:
        cuts: rows of each slice of each batch of this rank.
        size: rows of the largest slice, of any rank.
        num_microbatches: that every rank runs.
        num_rows: of the batch that speaks for the step: the one with the largest slice, or of
            several ranks, the largest batch.
        cost: of one row of it; None where it is not known.
        num_global_rows: of the batches of all ranks.
        stops: whether any rank asks for the end of the run.
        is_measuring: whether it is smaller than fits, and only there to measure what rows need.
        agreement: with the other ranks; None where there are none.
    """

    cuts: list[list[int]]
    size: int
    num_microbatches: int
    num_rows: int
    cost: float | None
    num_global_rows: int
    stops: bool
    is_measuring: bool = False
    agreement: Agreement | None = None

    @property
    def num_fillers(self) -> int:
        """Microbatches without any weight, which this rank runs because others have more."""
        return self.num_microbatches - sum(map(len, self.cuts))

    @property
    def totals(self) -> Mapping[str, float] | None:
        """What the losses of all ranks are divided by; None where there is one rank."""
        return None if self.agreement is None else self.agreement.denominators


@dataclass(frozen=True, kw_only=True)
class Bid:
    """What this rank brings to a step, at any size.

    Attributes:
        rows: of each batch.
        costs: of one row of each, None where they are not known.
        denominators: of the batches, by the name of the loss.
        wants_to_stop: whether this rank asks for the end of the run.
        training: whether gradients are computed.
    """

    rows: Sequence[int]
    costs: Sequence[float | None]
    denominators: Mapping[str, float] = field(default_factory=dict)
    wants_to_stop: bool = False
    training: bool = True


def plan_alone(bid: Bid, policy: Policy, rule: CutRule) -> Plan:
    """The plan of one process.

    Raises:
        BatchError: as `CutRule.cut`.
    """
    cuts = [
        rule.cut(num_rows, _propose(policy, rule, num_rows, cost), multiple_of=policy.multiple_of)
        for num_rows, cost in zip(bid.rows, bid.costs, strict=True)
    ]
    # The batch with the largest slice, in elements, speaks for the step.
    sizes, cost = max(
        zip(cuts, bid.costs, strict=True),
        key=lambda each: (each[0][0] * (each[1] or 1), sum(each[0])),
    )
    return Plan(
        cuts=cuts,
        size=max(sizes[0] for sizes in cuts),
        num_microbatches=sum(map(len, cuts)),
        num_rows=sum(sizes),
        cost=cost,
        num_global_rows=sum(bid.rows),
        stops=bid.wants_to_stop,
        is_measuring=any(map(policy.is_measuring, bid.rows, bid.costs)),
    )


def propose_to(bid: Bid, policy: Policy, rule: CutRule, *, lacks_rows: bool = False) -> Proposal:
    """What this rank brings to an agreement.

    Args:
        bid: at any size.
        policy: proposes one.
        rule: turns it into slices.
        lacks_rows: whether it has no rows, not even for fillers.
    """
    sizes = [
        _propose(policy, rule, num_rows, cost)
        for num_rows, cost in zip(bid.rows, bid.costs, strict=True)
    ]
    largest = max(bid.rows, default=0)
    # A batch that goes whole says nothing of the size of others.
    cut = [size for size, rows in zip(sizes, bid.rows, strict=True) if size < rows]
    return Proposal(
        num_rows=sum(bid.rows),
        microbatch_size=min(cut, default=max(largest, 1)),
        denominators=bid.denominators,
        num_batches=len(bid.rows),
        max_rows=largest,
        cost=max((cost for cost in bid.costs if cost is not None), default=None),
        wants_to_stop=bid.wants_to_stop,
        training=bid.training,
        lacks_rows=lacks_rows,
    )


def plan_together(
    bid: Bid, agreement: Agreement, ranks: Ranks, policy: Policy, rule: CutRule
) -> Plan:
    """The plan of this rank: as many microbatches as every other one runs.

    Raises:
        BatchError: ``strict_divisible`` is set, and ranks have batches of different rows.
    """
    size, unit = agreement.microbatch_size, policy.multiple_of
    if rule.strict_divisible and agreement.min_rows != agreement.num_batches * agreement.max_rows:
        raise BatchError(
            f"strict_divisible=True: ranks have from {agreement.min_rows} to {agreement.max_rows} "
            "rows, so their microbatches cannot all be alike; give every rank as many rows "
            "(drop_last=True in the data loader), or leave strict_divisible out: uneven rows are "
            "exact"
        )
    if agreement.num_batches <= 1:
        widest = rule.cut(agreement.max_rows, size, multiple_of=unit)
        size, count = widest[0], len(widest)
        if unit > 1 or rule.strict_divisible:
            cuts = [rule.cut(rows, size, multiple_of=unit) for rows in bid.rows]
        else:
            cuts = [_balanced(rows, count, rule.min_rows) for rows in bid.rows]
    else:
        cuts = [rule.cut(rows, size, multiple_of=unit) for rows in bid.rows]
        count = int(ranks.most(sum(map(len, cuts))))
    return Plan(
        cuts=cuts,
        size=size,
        num_microbatches=count,
        num_rows=agreement.max_rows,
        cost=agreement.cost,
        num_global_rows=agreement.num_rows // ranks.copies,
        stops=agreement.stops,
        is_measuring=policy.is_measuring(agreement.max_rows, agreement.cost),
        agreement=agreement,
    )


def _balanced(num_rows: int, count: int, min_rows: int) -> list[int]:
    return [size for size in rows_of_microbatches(num_rows, count, min_rows=min_rows) if size]


def _propose(policy: Policy, rule: CutRule, num_rows: int, cost: float | None) -> int:
    size = policy.propose(num_rows) if cost is None else policy.propose(num_rows, cost)
    if not size >= 1:
        raise ValueError(f"{policy!r} proposed {size} rows; a policy must propose at least one")
    if rule.strict_divisible and policy.adapts:
        size = rule.largest_divisor(num_rows, min(size, num_rows))
    return size
