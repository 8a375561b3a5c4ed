"""Whether a smaller microbatch is faster than one that makes the allocator try again.

Near the limit of a device the allocator frees its cache and asks again, which takes time. Smaller
microbatches take time too (Composer's PR 1632 found them slower), so both are measured.
"""

import statistics
from typing import Any

# Batches at the smaller size, and at most as many before, that are compared. A median of three
# forgives one that was disturbed.
TRIAL = 3
# So many of the last TRIAL batches at one size have to have retries. The first batch at a size does
# not count: what is cached for another size is given back once, and is no sign of anything.
SIGNS = 2
# The smaller size is kept if it takes less than this share of the time.
FASTER = 0.95
# The sign is ignored for so many batches after a trial that did not pay, then for twice as many.
FIRST_PAUSE = 32


class Thrash:
    """Tries one microbatch more after allocator retries; keeps it where it is faster.

    ``most_elements`` is the most rows × cost that a microbatch may have for now, None where
    nothing is limited.

    >>> thrash = Thrash()
    >>> for _ in range(3):
    ...     thrash.observe(seconds=2.0, elements=8.0, retries=1, smaller=4.0)
    >>> thrash.most_elements
    4.0
    >>> for _ in range(3):
    ...     thrash.observe(seconds=1.0, elements=4.0, retries=0, smaller=2.0)
    >>> thrash.most_elements  # kept
    4.0
    """

    def __init__(self) -> None:
        self.most_elements: float | None = None
        self.is_pressed = False  # whether the last attempt that fitted had retries
        self._kept: float | None = None
        self._elements = 0.0
        self._before: list[float] = []
        self._signs: list[bool] = []
        self._trial: list[float] | None = None
        self._pause = FIRST_PAUSE
        self._ignored = 0

    @property
    def compares(self) -> bool:
        """Whether the seconds of the next attempt are compared with others."""
        return self._trial is not None or (
            not self._ignored and (self.is_pressed or any(self._signs))
        )

    def observe(
        self, *, seconds: float, elements: float, retries: int, smaller: float | None
    ) -> None:
        """Learn from an attempt that fitted.

        Args:
            seconds: per row × cost of the whole batch; they count where this `compares`.
            elements: rows × cost of the microbatch.
            retries: of the allocator.
            smaller: rows × cost of the next smaller microbatch, None where there is none.
        """
        is_timed = self.compares
        self.is_pressed = retries > 0
        if self._trial is not None:
            assert self.most_elements is not None
            if elements <= self.most_elements * (1 + 1e-9):
                self._trial.append(seconds)
                if len(self._trial) == TRIAL:
                    self._decide(elements)
            return
        if elements != self._elements:
            self._elements, self._before, self._signs = elements, [], []
            return
        if self._ignored:
            self._ignored -= 1
            return
        if is_timed:
            self._before = [*self._before[1 - TRIAL :], seconds]
        self._signs = [*self._signs[1 - TRIAL :], retries > 0]
        if sum(self._signs) >= SIGNS and self._before and smaller is not None:
            self.most_elements, self._trial, self._signs = smaller, [], []

    def _decide(self, elements: float) -> None:
        assert self._trial is not None
        if statistics.median(self._trial) < FASTER * statistics.median(self._before):
            self._kept, self._elements, self._before = self.most_elements, elements, self._trial
        else:
            self.most_elements = self._kept
            self._ignored, self._pause = self._pause, 2 * self._pause
        self._trial, self._signs = None, []

    def forget(self) -> None:
        """Lift the limit: memory is not what it was. What was ignored stays so."""
        self.most_elements = self._kept = self._trial = None
        self._before, self._signs = [], []

    def state_dict(self) -> dict[str, Any]:
        """Return all that was measured and decided."""
        return {
            "most_elements": self.most_elements,
            "kept": self._kept,
            "elements": self._elements,
            "before": list(self._before),
            "signs": list(self._signs),
            "trial": None if self._trial is None else list(self._trial),
            "pause": self._pause,
            "ignored": self._ignored,
            "pressed": self.is_pressed,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Thrash":
        """Return what ``state_dict`` described."""
        thrash = cls()
        thrash.most_elements, thrash._kept = state["most_elements"], state["kept"]
        thrash._elements, thrash._before = state["elements"], list(state["before"])
        thrash._signs = list(state.get("signs", ()))  # not of an older automicro
        thrash._trial = None if state["trial"] is None else list(state["trial"])
        thrash._pause, thrash._ignored = int(state["pause"]), int(state["ignored"])
        thrash.is_pressed = bool(state.get("pressed", False))
        return thrash
