"""Liveness is a function of observations and times, so tests simulate worlds of any size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automicro.ranks.heartbeat import ENDED, NEIGHBOURS, Liveness, interval_for

TIMEOUT = 60.0
INTERVAL = interval_for(TIMEOUT)


def liveness_of(rank: int, world_size: int) -> Liveness:
    seconds = {"timeout_seconds": TIMEOUT, "interval_seconds": INTERVAL, "now": 0.0}
    return Liveness(rank=rank, world_size=world_size, **seconds)


def watch(
    liveness: Liveness, seconds: float, last_beats: dict[int, float]
) -> tuple[float, list[int]] | None:
    """Return the time and the ranks of the first loss; ranks beat every second until their last."""
    for step in range(int(seconds / INTERVAL)):
        now = step * INTERVAL
        beats = {rank: str(int(min(now, last_beats.get(rank, now)))) for rank in liveness.wanted()}
        liveness.note(now, beats)
        if liveness.lost():
            return now, liveness.lost()
    return None


@settings(max_examples=30)
@given(data=st.data(), world_size=st.integers(2, 1000))
def test_only_lost_ranks_are_found_in_time(data: st.DataObject, world_size: int) -> None:
    first = data.draw(st.integers(1, world_size - 1), label="first lost")
    lost = range(first, data.draw(st.integers(first + 1, world_size), label="behind the last lost"))
    gone_at = data.draw(st.floats(0.0, 100.0), label="gone at")
    found = watch(liveness_of(first - 1, world_size), 200.0, dict.fromkeys(lost, gone_at))
    assert found is not None
    assert found[1] == list(lost)
    assert found[0] <= gone_at + TIMEOUT + 2 * INTERVAL


@settings(max_examples=50)
@given(
    gaps=st.lists(st.floats(0.01, 10_000.0), max_size=60),
    lateness=st.lists(st.floats(0.1, TIMEOUT - 0.1), min_size=1, max_size=20),
)
def test_rank_that_was_delayed_or_stopped_accuses_no_peer(
    gaps: list[float], lateness: list[float]
) -> None:
    liveness = liveness_of(0, 3)
    now, beat, next_beat = 0.0, 0, 0.0
    for gap in gaps:
        now += gap
        liveness.wake(now)
        liveness.note(now, dict.fromkeys(liveness.wanted(), str(beat)))  # they were stopped, too
        assert liveness.lost() == []
        while next_beat <= now:
            beat += 1
            next_beat += lateness[beat % len(lateness)]
        liveness.note(now, dict.fromkeys(liveness.wanted(), str(beat)))
        assert liveness.lost() == []
        assert not liveness.has_lost_store


def test_unresponsive_store_is_found_in_time() -> None:
    liveness = liveness_of(0, 2)
    liveness.note(0.0, {1: "0"})
    now = 0.0
    while not liveness.has_lost_store:
        now += INTERVAL
        liveness.wake(now)
    assert TIMEOUT <= now <= TIMEOUT + INTERVAL


def test_ended_ranks_are_not_missed_and_next_ones_are_watched() -> None:
    liveness = liveness_of(0, 5)
    liveness.note(0.0, {1: "0", 2: "0"})
    liveness.note(1.0, {1: ENDED, 2: ENDED})
    assert liveness.wanted() == [3, 4]
    assert watch(liveness, 300.0, {}) is None


@pytest.mark.parametrize("world_size", [2, 1000])
def test_every_rank_is_watched_by_few(world_size: int) -> None:
    watched = set[int]()
    for rank in range(world_size):
        wanted = liveness_of(rank, world_size).wanted()
        assert len(wanted) == min(world_size - 1, NEIGHBOURS)
        watched |= set(wanted)
    assert watched == set(range(world_size))
