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
from automicro.ranks.exchange import FAN_OUT, Ballot, failed, fold, healthy, plan_levels
from automicro.ranks.guards.collectives import Call
from automicro.ranks.interface import Agreement, OneRank, Proposal, Report, Status
from automicro.ranks.votes import Votes
from automicro.step.agreement import rows_of_microbatches
from tests.ranks.simulated import SimulatedWorld

# Number of ranks, and ranks per node.
WORLDS = [(1, 1), (2, 2), (5, 2), (24, 3)]


def run(
    world_size: int, work: Callable[[CoordinatedRanks], Any], local_world_size: int | None = None
) -> list[Any]:
    """Run work on every rank; return its results or exceptions."""
    world = SimulatedWorld(world_size, local_world_size=local_world_size)

    def on_rank(rank: int) -> Any:
        try:
            return work(CoordinatedRanks(Votes(world.exchange(rank))))
        except Exception as error:
            return error

    return list(world.run(on_rank))


def proposal(rank: int, **changes: Any) -> Proposal:
    values = {"num_rows": 8 + rank % 3, "microbatch_size": 4, "denominators": {"": 0.1 * rank}}
    return Proposal(**{**values, **changes})


@pytest.mark.parametrize(("world_size", "local"), WORLDS)
def test_agreement_is_equal_on_all_ranks(world_size: int, local: int) -> None:
    agreements = run(world_size, lambda ranks: ranks.agree(proposal(ranks.rank)), local)
    assert all(agreement == agreements[0] for agreement in agreements)
    agreement: Agreement = agreements[0]
    rows = [8 + rank % 3 for rank in range(world_size)]
    assert agreement.num_rows == sum(rows)
    assert (agreement.max_extent, agreement.min_rows) == (max(rows), min(rows))
    assert agreement.denominators[""] == pytest.approx(0.1 * sum(range(world_size)), abs=1e-12)
    assert agreement.num_microbatches == -(-max(rows) // 4)


def test_smallest_size_wins_except_for_complete_batches() -> None:
    def work(ranks: CoordinatedRanks) -> int:
        num_rows, size = [(2, 2), (8, 4), (8, 5), (0, 1)][ranks.rank]
        agreement = ranks.agree(proposal(0, num_rows=num_rows, microbatch_size=size))
        return agreement.microbatch_size

    assert run(4, work) == [4, 4, 4, 4]


def test_highest_level_and_any_stop_request_win() -> None:
    def work(ranks: CoordinatedRanks) -> list[tuple[int, int]]:
        found = []
        for levels in ([0, 0, 0], [0, 1, 1], [1, 1, 2], [0, 0, 2]):
            size = [2, 6, 4][ranks.rank]
            proposed = proposal(0, num_rows=9, microbatch_size=size, level=levels[ranks.rank])
            agreement = ranks.agree(proposed)
            found.append((agreement.level, agreement.microbatch_size))
        whole = ranks.agree(proposal(0, microbatch_size=8, level=int(ranks.rank == 1)))
        assert ranks.agree(proposal(0, wants_to_stop=ranks.rank == 2)).stops
        assert ranks.from_first([10.0 + ranks.rank, 2.0]) == [10.0, 2.0]
        return [*found, (whole.level, whole.microbatch_size)]

    assert run(3, work) == [[(0, 2), (1, 4), (2, 4), (2, 4), (1, 8)]] * 3


def test_losses_may_exceed_ballot_size() -> None:
    names = [f"loss {index}" for index in range(19)]

    def work(ranks: CoordinatedRanks) -> dict[str, float]:
        mine = {name: float(index) for index, name in enumerate(names)}
        return dict(ranks.agree(proposal(0, denominators=mine)).denominators)

    assert run(2, work) == [{name: 2.0 * index for index, name in enumerate(names)}] * 2


@pytest.mark.parametrize(("world_size", "local"), WORLDS[1:])
@pytest.mark.parametrize("status", [Status.TWO_ROWS, Status.OUT_OF_MEMORY])
def test_one_rank_stops_attempt_on_all_ranks(world_size: int, local: int, status: Status) -> None:
    culprit = world_size - 1

    def work(ranks: CoordinatedRanks) -> tuple[Status, int]:
        ranks.agree(proposal(ranks.rank))
        failure: BaseException = MemoryError()
        if ranks.rank != culprit:
            with pytest.raises(PeerStoppedError) as caught:
                ranks.vote()
            failure = caught.value
        together = ranks.stop(failure, status if ranks.rank == culprit else Status.FATAL)
        # The next attempt starts from the beginning on all ranks.
        ranks.agree(proposal(ranks.rank))
        ranks.vote()
        return together, ranks.num_votes

    assert run(world_size, work, local) == [(status, 4)] * world_size


def test_worst_status_wins() -> None:
    def work(ranks: CoordinatedRanks) -> Status:
        ranks.agree(proposal(0))
        return ranks.stop(MemoryError(), [Status.TWO_ROWS, Status.OUT_OF_MEMORY][ranks.rank])

    assert run(2, work) == [Status.OUT_OF_MEMORY] * 2


@pytest.mark.parametrize(("world_size", "local"), WORLDS[1:])
def test_fatal_error_is_named_on_every_rank(world_size: int, local: int) -> None:
    def work(ranks: CoordinatedRanks) -> Any:
        ranks.agree(proposal(ranks.rank))
        if ranks.rank == 1:
            error = ValueError("wrong")
            assert ranks.stop(error, Status.FATAL) is Status.FATAL
            return error.__notes__
        try:
            ranks.vote()
        except PeerStoppedError as stopped:
            return ranks.stop(stopped, Status.FATAL)

    results = run(world_size, work, local)
    assert f"on rank 1 of {world_size}" in results.pop(1)[0]
    for result in results:
        assert isinstance(result, PeerFailedError)
        assert "rank 1: ValueError: wrong" in str(result)


def test_rank_out_of_memory_is_not_blamed_for_fatal_error() -> None:
    def work(ranks: CoordinatedRanks) -> Status:
        ranks.agree(proposal(0))
        if ranks.rank == 0:
            return ranks.stop(MemoryError(), Status.OUT_OF_MEMORY)
        return ranks.stop(ValueError("wrong"), Status.FATAL)

    first, second = run(2, work)
    assert isinstance(first, PeerFailedError)
    assert "MemoryError" not in str(first)
    assert second is Status.FATAL


@pytest.mark.parametrize("meets", ["agree", "agree after a retry", "ready"])
def test_error_outside_attempt_reaches_next_request_of_peers(meets: str) -> None:
    def work(ranks: CoordinatedRanks) -> Any:
        if "retry" in meets:
            ranks.agree(proposal(0))
            ranks.stop(MemoryError(), Status.OUT_OF_MEMORY)
        if ranks.rank == 1:
            ranks.fail(OSError("disk full"))
            ranks.fail(OSError("again, on its way out"))
            return "told"
        return ranks.ready("clipping") if meets == "ready" else ranks.agree(proposal(0))

    error, told = run(2, work)
    assert told == "told"
    assert isinstance(error, PeerFailedError)
    assert "rank 1: OSError: disk full" in str(error)


def test_model_that_swallows_stop_receives_it_again() -> None:
    def work(ranks: CoordinatedRanks) -> int:
        ranks.agree(proposal(0))
        failure: BaseException = MemoryError()
        if ranks.rank == 0:
            for _ in range(3):
                with pytest.raises(PeerStoppedError) as caught:
                    ranks.vote()
                failure = caught.value
        ranks.stop(failure, Status.OUT_OF_MEMORY)
        return ranks.num_votes

    assert run(2, work) == [2, 2]


@pytest.mark.parametrize(("world_size", "local"), WORLDS[1:])
def test_ranks_at_different_points_are_told_where_they_are(world_size: int, local: int) -> None:
    def work(ranks: CoordinatedRanks) -> Any:
        return ranks.vote() if ranks.rank == 1 else ranks.agree(proposal(0))

    for error in run(world_size, work, local):
        assert isinstance(error, DesyncError)
        assert "rank 0: beginning to train on a batch" in str(error)
        assert "rank 1: being done with a batch, after 0 attempts to train on a batch" in str(error)


def test_skipped_step_on_one_rank_is_detected() -> None:
    def work(ranks: CoordinatedRanks) -> None:
        ranks.agree(proposal(0))
        votes = ranks._votes
        votes._agreements += ranks.rank
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
                ranks.agree(proposal(0))
            texts.append(str(caught.value))
        assert ranks.stop(caught.value, Status.FATAL) is Status.FATAL
        ranks.fail(caught.value)  # returns at once: no peer can be told
        return texts

    first, second, _ = world.run(work)
    assert len(set(first)) == len(set(second)) == 1


def test_peer_lost_during_explanation_is_reported() -> None:
    world = SimulatedWorld(2, timeout_seconds=0.2)

    def work(rank: int) -> str:
        votes = Votes(world.exchange(rank))
        if rank == 1:
            return ""
        with pytest.raises(PeerLostError, match="could not go on at 'exchanging") as caught:
            votes.explain("OSError: disk full")
        return str(caught.value)

    assert "start again from the last checkpoint" in world.run(work)[0]


@pytest.mark.parametrize("nodes", [2, 9, 16, 64])
def test_messages_per_vote_are_bounded_for_many_ranks(nodes: int) -> None:
    world = SimulatedWorld(4 * nodes, local_world_size=4)
    world.run(lambda rank: world.exchange(rank).ballots(healthy("here", 1)))
    most = max(map(world.messages, range(world.world_size)))
    levels = len(levels_of(4 * nodes, 4))
    assert most <= levels * 2 * (FAN_OUT - 1)
    # A leaf has sent messages only to its node.
    assert world.messages(world.world_size - 1) == 3
    assert threading.active_count() < 8


def levels_of(world_size: int, local_world_size: int) -> list[list[list[int]]]:
    ranks = list(range(world_size))
    nodes = [ranks[at : at + local_world_size] for at in ranks[::local_world_size]]
    return plan_levels(nodes)


@given(world_size=st.integers(1, 700), local_world_size=st.integers(1, 16))
@settings(max_examples=60, deadline=None)
def test_tree_reaches_each_rank_once(world_size: int, local_world_size: int) -> None:
    levels = levels_of(world_size, local_world_size)
    there = list(range(world_size))
    for blocks in levels:
        assert sorted(rank for block in blocks for rank in block) == there
        there = [block[0] for block in blocks]  # only the first of a group continues
    assert there == [0]


@given(order=st.permutations(range(6)), cut=st.integers(1, 5))
def test_ballots_can_be_counted_in_any_grouping(order: list[int], cut: int) -> None:
    ballots = [healthy("here", 1), failed(Status.OUT_OF_MEMORY, 1), healthy("here", 1)]
    ballots += [failed(Status.FATAL, 4), failed(Status.FATAL, 3), Ballot(sums=(1.0,) * 8)]
    mixed = [ballots[index] for index in order]
    assert fold([fold(mixed[:cut]), fold(mixed[cut:])]) == fold(ballots)
    assert fold(ballots).culprit == 3.0


@given(num_rows=st.integers(0, 50), count=st.integers(1, 20), min_rows=st.integers(1, 2))
def test_rows_are_divided_over_microbatches_with_fillers(
    num_rows: int, count: int, min_rows: int
) -> None:
    sizes = rows_of_microbatches(num_rows, count, min_rows=min_rows)
    assert len(sizes) == count
    assert sum(sizes) == num_rows
    filled = [size for size in sizes if size]
    assert sizes == sorted(sizes, reverse=True)
    assert not filled or max(filled) - min(filled) <= 1
    assert all(size >= min_rows for size in filled) or num_rows < min_rows


def test_reports_are_summed_or_maximized_over_ranks() -> None:
    def work(ranks: CoordinatedRanks) -> Any:
        ranks.agree(proposal(0))
        mine = [float(ranks.rank)] * 19
        told = ranks.vote(Report(sums=mine, highs=[-float(ranks.rank), 3.0 * ranks.rank]))
        assert ranks.most(ranks.rank) == 2
        assert ranks.add_up([1.0, ranks.rank]) == [3.0, 3.0]
        return told.sums, list(told.highs[:2])

    assert run(3, work) == [([3.0] * 19, [0.0, 6.0])] * 3


def test_measurements_of_failed_rank_reach_all_ranks() -> None:
    def work(ranks: CoordinatedRanks) -> Any:
        ranks.agree(proposal(0))
        if ranks.rank == 1:
            ranks.stop(MemoryError(), Status.OUT_OF_MEMORY, [7.0])
        else:
            with pytest.raises(PeerStoppedError) as caught:
                ranks.vote(Report(highs=[5.0, 1.0]))
            ranks.stop(caught.value, Status.FATAL)
        return list(ranks.told[:3])

    assert run(2, work) == [[7.0, 1.0, -math.inf]] * 2


def test_one_rank_agrees_without_communication() -> None:
    alone = OneRank()
    agreement = alone.agree(proposal(0, num_rows=9, microbatch_size=4))
    assert agreement.num_microbatches == 3
    with alone.microbatch(0):
        alone.vote()
    assert alone.stop(MemoryError(), Status.OUT_OF_MEMORY) is Status.OUT_OF_MEMORY


def message(peer: int, shape: str, *, sends: bool) -> Call:
    name = "isend" if sends else "irecv"
    return Call(name=name, members=(0, 1, 2), peer=peer, sends=sends, shape=shape)


@pytest.mark.parametrize("num_sent", [1, 9, 40])
def test_pending_messages_do_not_hide_wrong_ones(num_sent: int) -> None:
    world = SimulatedWorld(3, local_world_size=2)

    def on_rank(rank: int) -> None:
        right, left = (rank + 1) % 3, (rank - 1) % 3
        for wrong in [(left, "9 others"), (right, "0"), (left, str(num_sent))]:
            votes = Votes(world.exchange(rank))
            for number in range(num_sent):
                votes.collective(message(right, str(number), sends=True), where="in the forward")
            with pytest.raises(DesyncError):
                votes.collective(message(*wrong, sends=False), where="in the forward")

    world.run(on_rank)


def test_any_number_of_equal_messages_may_be_pending() -> None:
    world = SimulatedWorld(3, local_world_size=2)

    def on_rank(rank: int) -> None:
        votes = Votes(world.exchange(rank))
        for is_first in (True, False):
            for _ in range(600):
                peer = (rank + 1 if is_first else rank - 1) % 3
                votes.collective(message(peer, "3", sends=is_first), where="in the forward")
            assert votes.has_messages_under_way is is_first

    world.run(on_rank)


def test_failure_between_send_and_receive_ends_all_ranks() -> None:
    def work(ranks: CoordinatedRanks) -> Any:
        ranks.agree(proposal(0))
        sent = message((ranks.rank + 1) % 3, "3", sends=True)
        ranks._votes.collective(sent, where="in the forward")
        if ranks.rank == 1:
            error = MemoryError()
            assert ranks.stop(error, Status.OUT_OF_MEMORY) is Status.FATAL
            return error.__notes__[0]
        with pytest.raises(PeerStoppedError) as stopped:
            ranks.vote()
        with pytest.raises(PeerFailedError, match="rank 1: MemoryError") as failed:
            ranks.stop(stopped.value, Status.FATAL)
        return str(failed.value)

    assert "a second attempt would mistake them" in run(3, work)[1]
