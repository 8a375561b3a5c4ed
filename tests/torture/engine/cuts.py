"""Records how a call was finally cut, to cut another call in the same way without faults.

A run with failed attempts or failed slices of a part is compared with one that never fails. The
latter needs the same size, the same level, and the same slices in each call of a part, including
recomputation in the backward. No option forces these, so they are recorded and forced from outside.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import automicro.nested.split as split
import automicro.step.fit as fitting
from automicro.loss.passes import is_extra_pass

MOST_ATTEMPTS = 60  # of one call; sizes are halved, and there are few levels


@dataclass(frozen=True)
class Cut:
    """The cut of the last attempt of a call."""

    size: int
    level: int = 0
    parts: tuple[int, ...] | None = None


class CutRecorder:
    """Record how a call is cut, or force a cut."""

    def __init__(
        self, forced: Sequence[int] | None = None, count: Callable[[], int] = lambda: 0
    ) -> None:
        self._forced, self._count = forced, count
        self.begun_at: list[int] = []
        self._last: tuple[int, int] | None = None
        self._is_attempt = False
        self._calls: list[tuple[Any, int]] = []

    @property
    def cut(self) -> Cut | None:
        if self._last is None:
            return None
        return Cut(*self._last, tuple(size for _, size in self._calls))

    @contextlib.contextmanager
    def __call__(self) -> Iterator["CutRecorder"]:
        seams: list[tuple[Any, str, Any]] = [
            (fitting, "attempt", self._attempt),
            (split._Sizer, "begin", self._begin),
        ]
        before = [getattr(owner, name) for owner, name, _ in seams]
        for (owner, name, around), original in zip(seams, before, strict=True):
            setattr(owner, name, _around(original, around))
        try:
            yield self
        finally:
            for (owner, name, _), original in zip(seams, before, strict=True):
                setattr(owner, name, original)

    def _attempt(self, original: Any, transaction: Any, work: Any, plan: Any, *args: Any) -> Any:
        self._last = plan.size, plan.level
        self._calls.clear()
        self.begun_at.append(self._count())
        if len(self.begun_at) > MOST_ATTEMPTS:
            raise AssertionError(f"{MOST_ATTEMPTS} attempts, and no end")
        self._is_attempt = True
        try:
            return original(transaction, work, plan, *args)
        finally:
            self._is_attempt = False

    def _begin(self, original: Any, sizer: Any) -> int:
        size: int = original(sizer)
        if not self._is_attempt or is_extra_pass():
            return size
        for each, known in self._calls:
            if each is sizer:
                return known
        if self._forced is not None and len(self._calls) < len(self._forced):
            size = self._forced[len(self._calls)]
        self._calls.append((sizer, size))
        return size


def _around(original: Any, around: Callable[..., Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return call
