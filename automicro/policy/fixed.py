"""The size that was asked for, whatever happens."""

from typing import Any

from automicro.policy.base import Policy, require_rows, require_size


class Fixed(Policy):
    """Propose always the same size; None stands for the whole batch.

    Never adapts, so running out of memory is final.

    Raises:
        TypeError: if the size is not an int or None.
        ValueError: if the size is below 1.

    >>> Fixed(4).propose(10), Fixed(4).propose(3), Fixed(None).propose(10)
    (4, 3, 10)
    """

    adapts = False

    def __init__(self, microbatch_size: int | None) -> None:
        self._microbatch_size = (
            None
            if microbatch_size is None
            else require_size(microbatch_size, name="microbatch_size")
        )

    def __repr__(self) -> str:
        return f"Fixed({self._microbatch_size})"

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        """Return the fixed size, or ``num_rows`` where the batch is smaller.

        Raises:
            ValueError: if the batch has no rows.
        """
        require_rows(num_rows)
        return num_rows if self._microbatch_size is None else min(self._microbatch_size, num_rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the size, for whoever reads the state.

        It is a setting and nothing learned: a run that is resumed with another one means it.
        """
        return {"kind": "Fixed", "microbatch_size": self._microbatch_size}
