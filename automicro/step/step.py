"""What one optimization batch brings to any attempt at it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from automicro.batch.tensors import Contents
from automicro.policy.policy import Policy


@dataclass(frozen=True, kw_only=True)
class ReadBatch:
    """One batch, read once.

    Attributes:
        batch: as the caller gave it.
        num_rows: of it.
        cost: elements of one row, on average; None where it is not known.
        contents: its tensors, and what else it is made of.
    """

    batch: Any
    num_rows: int
    cost: float | None = None
    contents: Contents = field(default_factory=lambda: Contents(()))


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one optimization batch brings to any attempt at it. It never changes.

    Attributes:
        batches: that count as one; none where this rank's data have run out.
        policy: proposes their sizes.
        denominators: of their losses by name, for several ranks.
        wants_to_stop: whether this rank asks for the end of the run.
        raw: the batches as the caller gave them.
        rows: of each batch.
        costs: of one row of each batch.
    """

    batches: Sequence[ReadBatch]
    policy: Policy
    denominators: Mapping[str, float] = field(default_factory=dict)
    wants_to_stop: bool = False

    raw: list[Any] = field(init=False)
    rows: list[int] = field(init=False)
    costs: list[float | None] = field(init=False)

    def __post_init__(self) -> None:
        batches = self.batches
        object.__setattr__(self, "raw", [each.batch for each in batches])
        object.__setattr__(self, "rows", [each.num_rows for each in batches])
        object.__setattr__(self, "costs", [each.cost for each in batches])
