"""Who has given no sign of life for how long: a pure function of what was seen, and when."""

from collections.abc import Iterable, Mapping

ENDED = "ended"
"""The beat of a rank that ended in order."""

NEIGHBOURS = 2
_LATE_BEATS = 3
_BEATS_OF_A_GAP = 2


class Attendance:
    """What one rank knows of the others' beats, which are texts that differ from one to the next.

    Each rank watches the next two in a ring of those that have not ended, so what it asks for does
    not grow with the world. Where one of these is late it asks for all, to name everybody who went
    with it.

    Time counts only while this process runs and the store answers: one that was stopped itself,
    or cut off for a while, does not blame others for it. So nobody is accused whose beats reach
    the store within `timeout_seconds` of each other, however the watching rank is held up; and one
    that gives none any more is found two intervals after that, by a rank that is not held up.

    Args:
        rank: that watches.
        world_size: how many ranks there are.
        timeout_seconds: without a beat, after which a rank is lost.
        interval_seconds: between two looks.
        now: the time by any clock that does not go back.

    Example:
        >>> attendance = Attendance(
        ...     rank=0, world_size=3, timeout_seconds=6.0, interval_seconds=1.0, now=0.0
        ... )
        >>> for second in range(8):
        ...     attendance.note(float(second), {1: "1", 2: f"{second}"})
        >>> attendance.lost()
        [1]
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        interval_seconds: float,
        now: float,
    ) -> None:
        self._ring = [(rank + step) % world_size for step in range(1, world_size)]
        self._timeout_seconds = timeout_seconds
        self._late_seconds = _LATE_BEATS * interval_seconds
        self._longest_gap = _BEATS_OF_A_GAP * interval_seconds
        self._beats: dict[int, str] = {}
        # Seconds in which the store answered, and when each rank was heard by that clock.
        self._answered_seconds = 0.0
        self._heard_at: dict[int, float] = {}
        self._last_answer = now
        # Seconds without an answer in which this process ran.
        self._unanswered_seconds = 0.0
        self._last_wake = now

    def wanted(self) -> list[int]:
        """The ranks whose beats to ask for next, nearest first."""
        there = [rank for rank in self._ring if self._beats.get(rank) != ENDED]
        near = there[:NEIGHBOURS]
        return there if any(self._is_silent(rank, self._late_seconds) for rank in near) else near

    def note(self, now: float, beats: Mapping[int, str]) -> None:
        """Take down an answer of the store.

        Args:
            now: the time.
            beats: by rank.
        """
        self._answered_seconds += min(now - self._last_answer, self._longest_gap)
        self._last_answer = self._last_wake = now
        self._unanswered_seconds = 0.0
        for rank, beat in beats.items():
            if self._beats.get(rank) != beat:
                self._beats[rank] = beat
                self._heard_at[rank] = self._answered_seconds

    def wake(self, now: float) -> None:
        """Take down that this process runs, whether the store answers or not."""
        self._unanswered_seconds += min(now - self._last_wake, self._longest_gap)
        self._last_wake = now

    def lost(self) -> list[int]:
        """The ranks that are lost, in order; those too that fell silent with a lost one."""
        if not any(self._is_silent(rank, self._timeout_seconds) for rank in self._heard_at):
            return []
        # Those farther off are looked at only since a neighbour was late.
        return sorted(
            rank for rank in self._heard_at if self._is_silent(rank, self._timeout_seconds / 2)
        )

    @property
    def has_lost_store(self) -> bool:
        """Whether the store has not answered for the whole timeout."""
        return self._unanswered_seconds >= self._timeout_seconds

    def _is_silent(self, rank: int, seconds: float) -> bool:
        if self._beats.get(rank) == ENDED or rank not in self._heard_at:
            return False
        return self._answered_seconds - self._heard_at[rank] >= seconds


def interval_for(timeout_seconds: float) -> float:
    """How often to give a sign of life.

    >>> interval_for(60.0)
    5.0
    """
    return min(timeout_seconds / 12, 5.0)


def in_words(ranks: Iterable[int], world_size: int) -> str:
    """Ranks as a subject of a sentence.

    >>> in_words([2, 3], 4), in_words([1], 4)
    ('ranks 2, 3 of 4 are', 'rank 1 of 4 is')
    """
    names = list(map(str, ranks))
    several = len(names) > 1
    return f"rank{'s' * several} {', '.join(names)} of {world_size} {'are' if several else 'is'}"
