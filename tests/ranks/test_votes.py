"""The protocol of votes, with many ranks as threads of one process."""

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automicro.errors import DesyncError, PeerFailedError, PeerLostError, PeerStoppedError
from automicro.ranks.coordinated import CoordinatedRanks
from automicro.ranks.exchange import FAN_OUT, Ballot, failed, fold, healthy
from automicro.ranks.guards.collectives import Call
from automicro.ranks.interface import Proposal, Report, Status
from automicro.ranks.votes import Votes
from automicro.step.agreement import rows_of_microbatches
from tests.ranks.simulated import SimulatedWorld

# Number of ranks, and ranks per node.
WORLDS = pytest.mark.parametrize(("size", "local"), [(2, 2), (24, 3)])
OOM = Status.OUT_OF_MEMORY


def run(size: int, work: Callable[[CoordinatedRanks], Any], local: int | None = None) -> list[Any]:
    """Run work on every rank; return its results or exceptions."""
    world = SimulatedWorld(size, local_world_size=local)

    def on_rank(rank: int) -> Any:
        try:
            return work(CoordinatedRanks(Votes(world.exchange(rank))))
        except Exception as error:
            return error

    return list(world.run(on_rank))


def proposal(rank: int = 0, **changes: Any) -> Proposal:
    values = {"num_rows": 8 + rank % 3, "microbatch_size": 4, "denominators": {"": 0.1 * rank}}
    return Proposal(**{**values, **changes})


@pytest.mark.parametrize(("size", "local"), [(1, 1), (5, 2), (24, 3)])
def test_agreement_is_equal_on_all_ranks(size: int, local: int) -> None:
    first, *others = run(size, lambda ranks: ranks.agree(proposal(ranks.rank)), local)
    assert all(each == first for each in others)
    rows = [8 + rank % 3 for rank in range(size)]
    assert (first.num_rows, first.max_extent, first.min_rows) == (sum(rows), max(rows), min(rows))
    assert first.denominators[""] == pytest.approx(0.1 * sum(range(size)), abs=1e-12)
    assert first.num_microbatches == -(-max(rows) // 4)


# Rows, size and level of each rank, and the agreed level and size.
AGREED = [
    ([(2, 2, 0), (8, 4, 0), (8, 5, 0)], (0, 4)),
    ([(9, 2, 0), (9, 6, 0), (9, 4, 0)], (0, 2)),
    ([(9, 2, 0), (9, 6, 1), (9, 4, 1)], (1, 4)),
    ([(9, 2, 1), (9, 6, 1), (9, 4, 2)], (2, 4)),
    ([(8, 8, 0), (8, 8, 1), (8, 8, 0)], (1, 8)),
]


def test_smallest_size_of_highest_level_wins_except_for_complete_batches() -> None:
    def work(ranks: CoordinatedRanks) -> list[tuple[int, int]]:
        found = []
        for proposed, _ in AGREED:
            rows, size, level = [*proposed, (0, 1, 0)][ranks.rank]
            given = proposal(num_rows=rows, microbatch_size=size, level=level)
            agreement = ranks.agree(given)
            found.append((agreement.level, agreement.microbatch_size))
        return found

    assert run(4, work) == [[expected for _, expected in AGREED]] * 4


def test_values_of_ranks_are_summed_maximized_or_sent_by_first() -> None:
    names = [f"loss {index}" for index in range(19)]  # more than a ballot has

    def work(ranks: CoordinatedRanks) -> Any:
        mine = {name: float(index) for index, name in enumerate(names)}
        agreement = ranks.agree(proposal(denominators=mine, wants_to_stop=ranks.rank == 2))
        assert agreement.denominators == {name: 3 * value for name, value in mine.items()}
        assert agreement.stops
        highs = [-float(ranks.rank), 3.0 * ranks.rank]
        told = ranks.vote(Report(sums=[float(ranks.rank)] * 19, highs=highs))
        assert ranks.most(ranks.rank) == 2
        assert ranks.add_up([1.0, ranks.rank]) == [3.0, 3.0]
        assert ranks.from_first([10.0 + ranks.rank, 2.0]) == [10.0, 2.0]
        return told.sums, list(told.highs[:2])

    assert run(3, work) == [([3.0] * 19, [0.0, 6.0])] * 3


@WORLDS
@pytest.mark.parametrize("status", [Status.TWO_ROWS, OOM])
def test_one_rank_stops_attempt_on_all_ranks(size: int, local: int, status: Status) -> None:
    def work(ranks: CoordinatedRanks) -> tuple[Status, int]:
        ranks.agree(proposal(ranks.rank))
        failure: BaseException = MemoryError()
        is_culprit = ranks.rank == size - 1
        if not is_culprit:
            for _ in range(2):  # a model that swallows the stop receives it again
                with pytest.raises(PeerStoppedError) as caught:
                    ranks.vote()
                failure = caught.value
        together = ranks.stop(failure, status if is_culprit else Status.FATAL)
        # The next attempt starts from the beginning on all ranks.
        ranks.agree(proposal(ranks.rank))
        ranks.vote()
        return together, ranks.num_votes

    assert run(size, work, local) == [(status, 4)] * size


def test_worst_status_and_measurements_of_failed_rank_reach_all() -> None:
    def work(ranks: CoordinatedRanks) -> Any:
        ranks.agree(proposal())
        if ranks.rank < 2:
            told = ranks.stop(MemoryError(), [OOM, Status.TWO_ROWS][ranks.rank], [7.0])
        else:
            with pytest.raises(PeerStoppedError) as caught:
                ranks.vote(Report(highs=[5.0, 1.0]))
            told = ranks.stop(caught.value, Status.FATAL)
        return told, list(ranks.told[:3])

    assert run(3, work) == [(OOM, [7.0, 1.0, -math.inf])] * 3


@WORLDS
def test_fatal_error_is_named_on_every_rank(size: int, local: int) -> None:
    def work(ranks: CoordinatedRanks) -> Any:
        ranks.agree(proposal(ranks.rank))
        if ranks.rank == 1:
            error = ValueError("wrong")
            assert ranks.stop(error, Status.FATAL) is Status.FATAL
            return error.__notes__
        if ranks.rank == 0:
            return ranks.stop(MemoryError(), OOM)  # is not blamed
        try:
            ranks.vote()
        except PeerStoppedError as stopped:
            return ranks.stop(stopped, Status.FATAL)

    results = run(size, work, local)
    assert f"on rank 1 of {size}" in results.pop(1)[0]
    for result in results:
        assert isinstance(result, PeerFailedError)
        assert "rank 1: ValueError: wrong" in str(result)
        assert "MemoryError" not in str(result)


@pytest.mark.parametrize("meets", ["agree", "agree after a retry", "ready"])
def test_error_outside_attempt_reaches_next_request_of_peers(meets: str) -> None:
    def work(ranks: CoordinatedRanks) -> Any:
        if "retry" in meets:
            ranks.agree(proposal())
            ranks.stop(MemoryError(), OOM)
        if ranks.rank == 1:
            ranks.fail(OSError("disk full"))
            ranks.fail(OSError("again, on its way out"))
            return "told"
        return ranks.ready("clipping") if meets == "ready" else ranks.agree(proposal())

    error, told = run(2, work)
    assert told == "told"
    assert isinstance(error, PeerFailedError)
    assert "rank 1: OSError: disk full" in str(error)


@WORLDS
def test_ranks_at_different_points_are_told_where_they_are(size: int, local: int) -> None:
    def work(ranks: CoordinatedRanks) -> Any:
        return ranks.vote() if ranks.rank == 1 else ranks.agree(proposal())

    for error in run(size, work, local):
        assert isinstance(error, DesyncError)
        assert "rank 0: beginning to train on a batch" in str(error)
        assert "rank 1: being done with a batch, after 0 attempts to train on a batch" in str(error)


def test_skipped_step_on_one_rank_is_detected() -> None:
    def work(ranks: CoordinatedRanks) -> None:
        ranks.agree(proposal())
        ranks._votes._agreements += ranks.rank
        ranks.vote()

    assert all(isinstance(error, DesyncError) for error in run(2, work))


def test_vote_times_out_on_missing_peer_and_stays_failed() -> None:
    world = SimulatedWorld(3, timeout_seconds=0.2)

    def work(rank: int) -> list[str]:
        ranks = CoordinatedRanks(Votes(world.exchange(rank)))
        if rank == 2:
            return []
        texts = []
        for _ in range(2):
            with pytest.raises(PeerLostError, match="checkpoint") as caught:
                ranks.agree(proposal())
            texts.append(str(caught.value))
        assert ranks.stop(caught.value, Status.FATAL) is Status.FATAL
        ranks.fail(caught.value)  # returns at once: no peer can be told
        return texts

    first, second, _ = world.run(work)
    assert len(set(first)) == len(set(second)) == 1


def test_peer_lost_during_explanation_is_reported() -> None:
    votes = Votes(SimulatedWorld(2, timeout_seconds=0.2).exchange(0))
    with pytest.raises(PeerLostError, match="could not go on at 'exchanging") as caught:
        votes.explain("OSError: disk full")
    assert "start again from the last checkpoint" in str(caught.value)


@pytest.mark.parametrize("nodes", [2, 64])
def test_messages_per_vote_are_bounded_for_many_ranks(nodes: int) -> None:
    world = SimulatedWorld(4 * nodes, local_world_size=4)
    world.run(lambda rank: world.exchange(rank).ballots(healthy("here", 1)))
    most = max(map(world.messages, range(world.world_size)))
    assert most <= len(world.levels) * 2 * (FAN_OUT - 1)
    assert world.messages(world.world_size - 1) == 3  # a leaf sends messages only to its node
    assert threading.active_count() < 8


@given(size=st.integers(1, 700), local=st.integers(1, 16))
@settings(max_examples=60, deadline=None)
def test_tree_reaches_each_rank_once(size: int, local: int) -> None:
    there = list(range(size))
    for blocks in SimulatedWorld(size, local_world_size=local).levels:
        assert sorted(rank for block in blocks for rank in block) == there
        there = [block[0] for block in blocks]  # only the first of a group continues
    assert there == [0]


@given(order=st.permutations(range(6)), cut=st.integers(1, 5))
def test_ballots_can_be_counted_in_any_grouping(order: list[int], cut: int) -> None:
    ballots = [healthy("here", 1), failed(OOM, 1), healthy("here", 1)]
    ballots += [failed(Status.FATAL, 4), failed(Status.FATAL, 3), Ballot(sums=(1.0,) * 8)]
    mixed = [ballots[index] for index in order]
    assert fold([fold(mixed[:cut]), fold(mixed[cut:])]) == fold(ballots)
    assert fold(ballots).culprit == 3.0


@given(num_rows=st.integers(0, 50), count=st.integers(1, 20), least=st.integers(1, 2))
def test_rows_are_divided_over_microbatches_with_fillers(
    num_rows: int, count: int, least: int
) -> None:
    sizes = rows_of_microbatches(num_rows, count, min_rows=least)
    assert (len(sizes), sum(sizes)) == (count, num_rows)
    filled = [size for size in sizes if size]
    assert sizes == sorted(sizes, reverse=True)
    assert not filled or max(filled) - min(filled) <= 1
    assert all(size >= least for size in filled) or num_rows < least


# Unused parameters, and messages from rank to rank


@pytest.mark.parametrize("size", [1, 2, 9])
def test_ranks_find_globally_unused_parameters(size: int) -> None:
    world, everywhere = SimulatedWorld(size), {3, 40, 77}

    def work(rank: int) -> tuple[int, list[int]]:
        unused = [place in everywhere or place % (size + 1) == rank for place in range(80)]
        votes = Votes(world.exchange(rank))
        _, _, found = votes.commit(Report(), flag=False, unused=unused)
        return votes.count, [place for place, is_unused in enumerate(found) if is_unused]

    expected = everywhere if size > 1 else everywhere | set(range(0, 80, 2))
    for count, found in world.run(work):
        assert count > 1
        assert found == sorted(expected)


def transfer(votes: Votes, step: int, shape: str, *, sends: bool) -> None:
    """Send a message some ranks on, or receive one from there."""
    name, peer = "isend" if sends else "irecv", (votes.rank + step) % 3
    call = Call(name=name, members=(0, 1, 2), peer=peer, sends=sends, shape=shape)
    votes.collective(call, where="in the forward")


@pytest.mark.parametrize("num_sent", [1, 40])
def test_pending_messages_do_not_hide_wrong_ones(num_sent: int) -> None:
    world = SimulatedWorld(3, local_world_size=2)

    def on_rank(rank: int) -> None:
        for step, shape in [(-1, "9 others"), (1, "0"), (-1, str(num_sent))]:
            votes = Votes(world.exchange(rank))
            for number in range(num_sent):
                transfer(votes, 1, str(number), sends=True)
            with pytest.raises(DesyncError):
                transfer(votes, step, shape, sends=False)

    world.run(on_rank)


def test_any_number_of_equal_messages_may_be_pending() -> None:
    world = SimulatedWorld(3, local_world_size=2)

    def on_rank(rank: int) -> None:
        votes = Votes(world.exchange(rank))
        for sends in (True, False):
            for _ in range(100):
                transfer(votes, 1 if sends else -1, "3", sends=sends)
            assert votes.has_messages_under_way is sends

    world.run(on_rank)


def test_failure_between_send_and_receive_ends_all_ranks() -> None:
    def work(ranks: CoordinatedRanks) -> Any:
        ranks.agree(proposal())
        transfer(ranks._votes, 1, "3", sends=True)
        if ranks.rank == 1:
            error = MemoryError()
            assert ranks.stop(error, OOM) is Status.FATAL
            return error.__notes__[0]
        with pytest.raises(PeerStoppedError) as stopped:
            ranks.vote()
        with pytest.raises(PeerFailedError, match="rank 1: MemoryError"):
            ranks.stop(stopped.value, Status.FATAL)
        return None

    assert "a second attempt would mistake them" in run(3, work)[1]
