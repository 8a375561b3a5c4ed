"""Liveness is a function of observations and times, so tests simulate worlds of any size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automicro.ranks.heartbeat import ENDED, NEIGHBOURS, Liveness, interval_for

TIMEOUT = 60.0
INTERVAL = interval_for(TIMEOUT)


def attendance_of(rank: int, world_size: int) -> Liveness:
    return Liveness(
        rank=rank,
        world_size=world_size,
        timeout_seconds=TIMEOUT,
        interval_seconds=INTERVAL,
        now=0.0,
    )


def watch(
    liveness: Liveness, moments: list[float], last_beats: dict[int, float]
) -> tuple[float, list[int]] | None:
    """Return the time and the ranks of the first loss; ranks beat every second until their last."""
    for now in moments:
        beats = {rank: str(int(min(now, last_beats.get(rank, now)))) for rank in liveness.wanted()}
        liveness.note(now, beats)
        if liveness.lost():
            return now, liveness.lost()
    return None


def evenly(seconds: float) -> list[float]:
    return [step * INTERVAL for step in range(int(seconds / INTERVAL))]


@settings(max_examples=30)
@given(data=st.data(), world_size=st.integers(2, 1000))
def test_only_lost_ranks_are_found_in_time(data: st.DataObject, world_size: int) -> None:
    first = data.draw(st.integers(1, world_size - 1), label="first lost")
    lost = range(first, data.draw(st.integers(first + 1, world_size), label="behind the last lost"))
    gone_at = data.draw(st.floats(0.0, 100.0), label="gone at")
    found = watch(attendance_of(first - 1, world_size), evenly(200.0), dict.fromkeys(lost, gone_at))
    assert found is not None
    at, accused = found
    assert accused == list(lost)
    assert at <= gone_at + TIMEOUT + 2 * INTERVAL


@settings(max_examples=50)
@given(
    gaps=st.lists(st.floats(0.01, 500.0), max_size=60),
    lateness=st.lists(st.floats(0.1, TIMEOUT - 0.1), min_size=1, max_size=20),
)
def test_delayed_rank_accuses_no_peer(gaps: list[float], lateness: list[float]) -> None:
    liveness = attendance_of(0, 3)
    now, beat, next_beat, turn = 0.0, 0, 0.0, 0
    for gap in gaps:
        now += gap
        while next_beat <= now:
            beat, turn = beat + 1, turn + 1
            next_beat += lateness[turn % len(lateness)]
        liveness.wake(now)
        liveness.note(now, dict.fromkeys(liveness.wanted(), str(beat)))
        assert liveness.lost() == []
        assert not liveness.has_lost_store


@given(stopped_for=st.floats(TIMEOUT, 10_000.0))
def test_rank_that_was_stopped_accuses_no_peer_on_wakeup(stopped_for: float) -> None:
    liveness = attendance_of(0, 2)
    liveness.note(0.0, {1: "0"})
    liveness.wake(stopped_for)
    liveness.note(stopped_for, {1: "0"})  # the peer was stopped too and sent no beat yet
    assert liveness.lost() == []
    assert not liveness.has_lost_store


def test_unresponsive_store_is_found_in_time() -> None:
    liveness = attendance_of(0, 2)
    liveness.note(0.0, {1: "0"})
    found = []
    for now in evenly(100.0):
        liveness.wake(now)
        if liveness.has_lost_store:
            found.append(now)
    assert TIMEOUT <= found[0] <= TIMEOUT + INTERVAL


def test_ended_ranks_are_not_missed_and_next_ones_are_watched() -> None:
    liveness = attendance_of(0, 5)
    liveness.note(0.0, {1: "0", 2: "0"})
    liveness.note(1.0, {1: ENDED, 2: ENDED})
    assert liveness.wanted() == [3, 4]
    assert watch(liveness, evenly(300.0), {}) is None


@pytest.mark.parametrize("world_size", [2, 3, 1000])
def test_number_of_watched_peers_is_independent_of_world_size(world_size: int) -> None:
    liveness = attendance_of(0, world_size)
    assert watch(liveness, evenly(300.0), {}) is None
    assert len(liveness.wanted()) == min(world_size - 1, NEIGHBOURS)


@settings(max_examples=20)
@given(world_size=st.integers(2, 200))
def test_every_rank_is_watched(world_size: int) -> None:
    watched = {
        each for rank in range(world_size) for each in attendance_of(rank, world_size).wanted()
    }
    assert watched == set(range(world_size))
