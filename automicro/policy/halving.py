"""Halve after running out of memory, and remember."""

from typing import Any

from automicro.policy.base import (
    Outcome,
    canonical_size,
    require_kind,
    require_rows,
    require_size,
)


class Halving:
    """Try the whole batch first; where it does not fit, half of what failed.

    What was learned is a number of rows and holds for every later batch, whatever its rows. If a
    slice fits exactly when it has at most ``c`` rows, the limit ends above ``c / 2``, after at
    most ``ceil(log2(rows of the largest batch))`` failures in the whole run. It never grows back.
    At one row it stays at one row: there is nothing smaller to propose.

    ``initial`` is a limit in rows to start from instead of the whole batch.

    Raises:
        TypeError: if ``initial`` is not an int or None.
        ValueError: if ``initial`` is below 1.

    >>> policy = Halving()
    >>> policy.propose(10)
    10
    >>> policy.record(Outcome(num_rows=10, microbatch_size=10, fits=False))
    >>> policy.propose(10), policy.propose(12), policy.propose(3)
    (5, 4, 3)
    """

    def __init__(self, *, initial: int | None = None) -> None:
        self._limit = None if initial is None else require_size(initial, name="initial")

    def __repr__(self) -> str:
        return f"Halving(initial={self._limit})"

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        """Return the largest slice of the coarsest balanced cut within the limit.

        Raises:
            ValueError: if the batch has no rows.
        """
        require_rows(num_rows)
        return num_rows if self._limit is None else canonical_size(num_rows, self._limit)

    def record(self, outcome: Outcome) -> None:
        """Lower the limit to half of a slice that did not fit."""
        if outcome.fits:
            return
        # Rounded up, half of a canonical size is canonical again: the pieces just double.
        half = -(-outcome.microbatch_size // 2)
        self._limit = half if self._limit is None else min(self._limit, half)

    def state_dict(self) -> dict[str, Any]:
        """Return the limit in rows, None while every batch went through whole."""
        return {"kind": "Halving", "limit": self._limit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a limit.

        Raises:
            TypeError: if the limit is not an int or None.
            ValueError: if another kind of policy wrote the state, or the limit is missing or
                below 1.
        """
        require_kind(state, self)
        if "limit" not in state:
            raise ValueError(
                f"the state {state!r} of a Halving policy has no 'limit': give what its "
                f"state_dict() returned"
            )
        limit = state["limit"]
        self._limit = None if limit is None else require_size(limit, name="limit")
