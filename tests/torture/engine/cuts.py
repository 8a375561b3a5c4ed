"""How a call was cut in the end, to cut another one the same way without any fault.

A run that lost slices of a part, or attempts, is compared with one that never fails. That one needs
the same size, the same level, and the same slices in each call of a part, up to the backward that
computes them again. No option forces these, so they are noted and forced from outside.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import automicro.nested.batchnorm as batchnorm
import automicro.nested.slices as slices
import automicro.nested.split as split
import automicro.step.fit as fitting
from automicro.loss.passes import is_extra_pass
from automicro.nested.slices import Earlier

Slices: TypeAlias = tuple[tuple[int, ...], ...]
"""Rows of the slices of a call of a part: in its forward, and in each backward. None in one
piece."""

MOST_ATTEMPTS = 60  # of one call; a size halves, and levels are few


@dataclass(frozen=True)
class Cut:
    """How the attempt of a call was cut that was the last.

    Attributes:
        size: of a microbatch.
        level: at which microbatches were computed.
        parts: the slices of each call of a part, in order; None where they are as they come.
    """

    size: int
    level: int = 0
    parts: tuple[Slices, ...] | None = None


class Noting:
    """Notes how a call is cut, or forces it.

    Args:
        forced: the slices of each call of a part, in order; None for those that come.
        count: tells where in a run an attempt begins.

    Attributes:
        cut: of the last attempt; None before the first.
        begun_at: what `count` said at the begin of each attempt.
    """

    def __init__(
        self, forced: Sequence[Slices] | None = None, count: Callable[[], int] = lambda: 0
    ) -> None:
        self._forced, self._count = forced, count
        self.begun_at: list[int] = []
        self._last: tuple[int, int] | None = None
        self._is_attempt = False
        # Sizers hold no tensors; what walks through the rows does.
        self._calls: list[tuple[Any, list[tuple[int, ...]]]] = []

    @property
    def cut(self) -> Cut | None:
        if self._last is None:
            return None
        return Cut(*self._last, tuple(tuple(found) for _, found in self._calls))

    @contextlib.contextmanager
    def __call__(self) -> Iterator["Noting"]:
        seams: list[tuple[Any, str, Any]] = [
            (fitting, "attempt", self._attempt),
            (split._Sizer, "__init__", self._begin_call),
            (split._Sizer, "begin", self._begin_slices),
            (split.NestedSplit, "_if_it_fits", self._if_it_fits),
            (slices.Walk, "_cut", self._cut),
            (slices.Walk, "slices", self._slices),
            (slices.Walk, "shrink", self._shrink),
            (batchnorm._Pass, "_cut", self._cut_pass),
        ]
        before = [getattr(owner, name) for owner, name, _ in seams]
        for (owner, name, around), original in zip(seams, before, strict=True):
            setattr(owner, name, _around(original, around))
        try:
            yield self
        finally:
            for (owner, name, _), original in zip(seams, before, strict=True):
                setattr(owner, name, original)

    def _attempt(self, original: Any, work: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
        self._last = plan.size, plan.level
        self._calls.clear()
        self.begun_at.append(self._count())
        if len(self.begun_at) > MOST_ATTEMPTS:
            raise AssertionError(f"{MOST_ATTEMPTS} attempts, and no end")
        self._is_attempt = True
        try:
            return original(work, plan, *args, **kwargs)
        finally:
            self._is_attempt = False

    def _begin_call(self, original: Any, sizer: Any, *args: Any) -> None:
        original(sizer, *args)
        if self._is_attempt and not is_extra_pass():
            self._calls.append((sizer, []))

    def _begin_slices(self, original: Any, sizer: Any) -> int:
        forced = self._forced_of(sizer)
        if forced is None:
            size: int = original(sizer)
            return size
        return max(forced[0]) if forced else int(sizer.num_rows)

    def _if_it_fits(self, original: Any, part: Any, call: Any, sizer: Any) -> Any:
        found = original(part, call, sizer)
        if found is None:  # calls inside of it come again, in slices
            index = next((n for n, (each, _) in enumerate(self._calls) if each is sizer), None)
            if index is not None:
                del self._calls[index + 1 :]
        return found

    def _slices(self, original: Any, walk: Any) -> Iterator[Any]:
        for each in original(walk):
            walk._calls_before = len(self._calls)
            yield each

    def _shrink(self, original: Any, walk: Any, failure: BaseException) -> None:
        original(walk, failure)
        del self._calls[walk._calls_before :]  # those inside of the slice that failed

    def _cut(self, original: Any, walk: Any, sizes: Sequence[int]) -> None:
        sizer = walk._call.sizer
        found = next((found for each, found in self._calls if each is sizer), None)
        if found is not None:
            if not hasattr(walk, "_number"):
                walk._number = len(found)
                found.append(())
                forced = self._forced_of(sizer)
                if forced is not None and walk._number < len(forced):
                    sizes = forced[walk._number]
                    if walk._earlier is not None:
                        if list(sizes) != [each.size for each in walk._earlier]:
                            slices._num_shrunk += 1  # as where these did not fit
                        walk._earlier = _cut_again(walk._earlier, sizes)
            found[walk._number] = tuple(sizes)
        original(walk, sizes)

    def _cut_pass(self, original: Any, done: Any, sizes: Sequence[int]) -> None:
        """Of a part with BatchNorm, whose backward has the slices of its forward."""
        sizer = done.call.sizer
        for each, found in self._calls:
            if each is sizer:
                forced = self._forced_of(sizer)
                found[:] = [tuple(forced[0] if forced else sizes)]
                sizes = found[0]
        original(done, sizes)

    def _forced_of(self, sizer: Any) -> Slices | None:
        if self._forced is not None:
            for forced, (each, _) in zip(self._forced, self._calls, strict=False):
                if each is sizer:
                    return forced
        return None


def _around(original: Any, around: Callable[..., Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return call


def _cut_again(earlier: Sequence[Earlier], sizes: Sequence[int]) -> list[Earlier]:
    """Slices of an earlier walk, some of them cut smaller. Those that are not keep their numbers.

    >>> [each.size for each in _cut_again([Earlier(2), Earlier(2)], [1, 1, 2])]
    [1, 1, 2]
    """
    found: list[Earlier] = []
    waiting = iter(sizes)
    for each in earlier:
        parts = [next(waiting)]
        while sum(parts) < each.size:
            parts.append(next(waiting))
        found += [each] if len(parts) == 1 else map(Earlier, parts)
    return found
