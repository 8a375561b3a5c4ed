"""A pass over shared data resumes on another number of ranks, or fails with a reason."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from automicro.data import LengthBatchSampler
from automicro.errors import CheckpointError
from automicro.trainer.data.feed import Feed
from automicro.trainer.data.sharing import LoaderSharing
from automicro.trainer.processes import Process
from tests.loaders import WholeBatches
from tests.ranks.test_resharding import PER_BATCH, SAMPLERS, make_loader


def feeds_of(world_size: int, make: Any, *, seed: int = 0) -> list[Feed]:
    """Return the feed of each rank."""
    return [
        Feed(
            LoaderSharing(Process(rank=rank, world_size=world_size), seed=seed).share(
                make(world_size), "train_dataloader"
            ),
            "train_dataloader",
        )
        for rank in range(world_size)
    ]


def merge_rows(passes: Sequence[Iterator[Any]], count: int | None = None) -> list[list[int]]:
    """Return the rows of each batch over all ranks, in order."""
    taken = [itertools.islice(each, count) for each in passes]
    return [
        [row for part in parts if part is not None for row in part["row"].tolist()]
        for parts in itertools.zip_longest(*taken)
    ]


def begin(feeds: Sequence[Feed], epoch: int) -> list[Iterator[Any]]:
    return [feed.batches(epoch) for feed in feeds]


def resume(states: Sequence[Any], feeds: Sequence[Feed]) -> None:
    for rank, feed in enumerate(feeds):
        feed.load_state_dict(feed.reshard(states, rank=rank))


def states_of(feeds: Sequence[Feed]) -> list[dict[str, Any]]:
    return [feed.state_dict() for feed in feeds]


WORLDS = st.integers(1, 4)


RUNS: dict[str, Any] = {
    "worlds": st.lists(WORLDS, min_size=2, max_size=4),
    "rows": st.integers(1, 3 * PER_BATCH + 3),
    "taken": st.lists(st.integers(1, 2), min_size=3, max_size=3),
    "sampler": st.sampled_from(sorted(SAMPLERS)),
    "drop_last": st.booleans(),
}


@given(**RUNS)
@settings(max_examples=12, deadline=None)
def test_remaining_rows_stay_in_their_batches_after_resharding(**run: Any) -> None:
    require_every_row_once(**run)


@pytest.mark.sweep
@given(**RUNS)
@settings(max_examples=60, deadline=None)
def test_remaining_rows_stay_in_their_batches_in_more_runs(**run: Any) -> None:
    require_every_row_once(**run)


def require_every_row_once(
    worlds: list[int], rows: int, taken: list[int], sampler: str, drop_last: bool
) -> None:
    if drop_last:
        rows += PER_BATCH

    def make(world_size: int) -> DataLoader[Any]:
        return make_loader(rows, sampler, world_size=world_size, drop_last=drop_last)

    whole = feeds_of(1, make)
    expected = [merge_rows(begin(whole, epoch)) for epoch in range(3)]
    feeds = feeds_of(worlds[0], make)
    assert merge_rows(begin(feeds, 0)) == expected[0]
    found: list[list[int]] = []
    passes = begin(feeds, 1)
    for world_size, count in zip(worlds[1:], taken, strict=False):
        found += merge_rows(passes, count)
        states = states_of(feeds)
        feeds = feeds_of(world_size, make, seed=7)  # the seed of the run stays in effect
        resume(states, feeds)
        passes = begin(feeds, 1)
    assert found + merge_rows(passes) == expected[1]
    assert merge_rows(begin(feeds, 2)) == expected[2]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_do_not_change_resharded_rows(persistent: bool) -> None:
    def make(world_size: int) -> DataLoader[Any]:
        return make_loader(
            40, "shuffled", world_size=world_size, num_workers=2, persistent_workers=persistent
        )

    expected = merge_rows(begin(feeds_of(1, make), 0))
    feeds = feeds_of(3, make)
    found = merge_rows(begin(feeds, 0), 2)
    fewer = feeds_of(2, make)
    resume(states_of(feeds), fewer)
    assert found + merge_rows(begin(fewer, 0)) == expected


def refusal(was: Sequence[Feed], now: Sequence[Feed]) -> str:
    merge_rows(begin(was, 0), 1)
    with pytest.raises(CheckpointError) as caught:
        resume(states_of(was), now)
    return str(caught.value)


def shuffled(rows: int = 40, per_batch: int = PER_BATCH, **options: Any) -> Any:
    return lambda world_size: make_loader(
        rows, "shuffled", world_size=world_size, per_batch=per_batch, **options
    )


def test_changed_data_or_order_is_refused() -> None:
    assert "entries=40 (here 39). Pass the same data" in refusal(
        feeds_of(2, shuffled()), feeds_of(1, shuffled(39))
    )
    in_order = lambda size: make_loader(40, "in order", world_size=size)  # noqa: E731
    text = refusal(feeds_of(2, shuffled()), feeds_of(1, in_order))
    assert "sampler=RandomSampler (here SequentialSampler)" in text


def test_order_that_differs_between_ranks_is_refused() -> None:
    make = lambda size: make_loader(40, "sampler with a generator", world_size=size)  # noqa: E731
    was = feeds_of(2, make)
    merge_rows(begin(was, 0), 1)
    states = states_of(was)
    [(place, stood)] = states[1]["passes"][-1]["start"]["generators"].items()
    states[1]["passes"][-1]["start"]["generators"] = {place: torch.zeros_like(stood)}
    with pytest.raises(CheckpointError, match="whose state differed between ranks"):
        resume(states, feeds_of(3, make))


def test_order_that_ranks_do_not_share_is_refused() -> None:
    alone = [Feed(make_loader(40, "shuffled", world_size=1), "train_dataloader")]
    assert "pass parallel='ddp' also in one process" in refusal(feeds_of(2, shuffled()), alone)
    text = refusal(alone, feeds_of(2, shuffled()))
    assert "no order that ranks share in the checkpoint" in text
    listed = [Feed([1, 2, 3], "train_dataloader")]
    next(listed[0].batches(0))
    with pytest.raises(CheckpointError, match=r"train_dataloader \(list\) has no order that ranks"):
        resume(states_of(listed), [Feed([1, 2, 3], "train_dataloader")])


class Stateful(DataLoader[Any]):
    """A loader that saves its own position."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def test_loader_that_saves_its_own_position_is_refused() -> None:
    def make(world_size: int) -> DataLoader[Any]:
        return Stateful([{"row": 0}] * 40, batch_size=12 // world_size)  # type: ignore[arg-type]

    text = refusal(feeds_of(2, make), feeds_of(3, make))
    assert "train_dataloader (Stateful) saves its position on each rank separately" in text


def test_batches_from_batch_sampler_are_refused() -> None:
    def make(world_size: int) -> DataLoader[Any]:
        data: Any = [{"row": row} for row in range(40)]
        return DataLoader(data, batch_sampler=WholeBatches(range(40), 4, drop_last=False))

    text = refusal(feeds_of(2, make), feeds_of(4, make))
    assert "entries_per_step=2 (here 4). Pass the same data" in text
    assert "let the DataLoader cut batches of 2 over all ranks" in text


LENGTHS = [3 + 7 * row % 11 for row in range(60)]


def planned(world_size: int, *, accumulate: int = 1, seed: int = 5, **options: Any) -> list[Feed]:
    """Return the feed of each rank, over batches of equal total length."""
    given: dict[str, Any] = {"mode": "duration", "lengths": LENGTHS, "batch_length": 25.0}
    data = [{"row": row} for row in range(60)]
    feeds = []
    for rank in range(world_size):
        sampler = LengthBatchSampler(data, seed=seed, **(given | options))
        sharing = LoaderSharing(Process(rank=rank, world_size=world_size), seed=0)
        loader = sharing.share(DataLoader(data, batch_sampler=sampler), "train_dataloader")  # type: ignore[arg-type]
        feeds.append(Feed(loader, "train_dataloader", accumulate_batches=accumulate))
    return feeds


def steps_of(passes: Sequence[Iterator[Any]], accumulate: int, count: int | None = None) -> Any:
    """Return the rows of optimization batches over all ranks."""
    rounds = merge_rows(passes, None if count is None else count * accumulate)
    groups = [rounds[place : place + accumulate] for place in range(0, len(rounds), accumulate)]
    return [sorted(itertools.chain(*group)) for group in groups]


@given(
    # ranks × accumulate_batches is always 4
    worlds=st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=4),
    taken=st.lists(st.integers(1, 2), min_size=3, max_size=3),
)
@example(worlds=[1, 1, 1, 2], taken=[2, 2, 2])  # all rows were given, but the end was not seen
@example(worlds=[1, 1, 1, 4], taken=[2, 2, 2])
@example(worlds=[4, 4, 4, 1], taken=[2, 2, 2])
@settings(max_examples=40, deadline=None)
def test_optimization_batches_by_length_keep_their_rows(
    worlds: list[int], taken: list[int]
) -> None:
    def numbers(feeds: Sequence[Feed], epoch: int) -> set[int | None]:
        return {feed.num_batches(epoch) for feed in feeds}

    whole = planned(worlds[0], accumulate=4 // worlds[0])
    expected = [steps_of(begin(whole, epoch), 4 // worlds[0]) for epoch in range(3)]
    for each in expected:
        assert sorted(itertools.chain(*each)) == list(range(60))
    feeds = planned(worlds[0], accumulate=4 // worlds[0])
    assert steps_of(begin(feeds, 0), 4 // worlds[0]) == expected[0]
    found: list[list[int]] = []
    passes, world_size = begin(feeds, 1), worlds[0]
    for later, count in zip(worlds[1:], taken, strict=False):
        found += steps_of(passes, 4 // world_size, count)
        states, world_size = states_of(feeds), later
        feeds = planned(world_size, accumulate=4 // world_size, seed=9)  # the old seed stays
        if world_size == len(states):
            for feed, state in zip(feeds, states, strict=True):
                feed.load_state_dict(state)
        else:
            resume(states, feeds)
        [number] = numbers(feeds, 1)
        passes = begin(feeds, 1)
    done = len(found)
    found += steps_of(passes, 4 // world_size)
    assert found[:-1] == expected[1][:-1]  # the last one is balanced over other ranks
    assert sorted(itertools.chain(*found)) == list(range(60))
    assert number is not None
    assert done <= len(found) == -(-number * world_size // 4)
    if world_size == worlds[0]:
        assert found == expected[1]
        assert steps_of(begin(feeds, 2), 4 // world_size) == expected[2]


def test_changed_optimization_batches_are_refused_with_remedy() -> None:
    text = refusal(planned(4), planned(2))
    assert "made of 4 batches of train_dataloader" in text
    assert "here it would be made of 2 × 1. Pass accumulate_batches=2" in text
    assert "4 is not a multiple of 3 ranks" in refusal(planned(4), planned(3))
    text = refusal(planned(2), planned(1, accumulate=2, batch_length=30.0))
    assert "with other lengths or options" in text
    assert "now has one. Pass the same sampler" in refusal(feeds_of(2, shuffled()), planned(1))
    text = refusal(planned(2), feeds_of(1, shuffled()))
    assert "shared_by=LengthBatchSampler (here SharedBatchSampler)" in text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pass_over_length_batches_resumes_in_middle(num_workers: int) -> None:
    def make(**options: Any) -> Feed:
        data = [{"row": row} for row in range(60)]
        sampler = LengthBatchSampler(mode="duration", lengths=LENGTHS, batch_length=25.0)
        workers: dict[str, Any] = {"num_workers": num_workers}
        workers |= {"persistent_workers": True} if num_workers else {}
        return Feed(DataLoader(data, batch_sampler=sampler, **workers), "train_dataloader")  # type: ignore[arg-type]

    feed = make()
    expected = [merge_rows([feed.batches(epoch)]) for epoch in range(3)]
    assert len(set(map(len, expected))) > 1  # the number of batches varies between epochs
    assert [feed.num_batches(epoch) for epoch in range(3)] == list(map(len, expected))
    feed = make()
    assert merge_rows([feed.batches(0)]) == expected[0]
    found = merge_rows([feed.batches(1)], 4)
    later = make()
    later.load_state_dict(feed.state_dict())
    assert later.num_batches(1) == len(expected[1])
    assert found + merge_rows([later.batches(1)]) == expected[1]
    assert merge_rows([later.batches(2)]) == expected[2]
    fresh = Feed([1], "train_dataloader")
    next(fresh.batches(0))
    with pytest.raises(CheckpointError, match="those of the checkpoint did not"):
        make().load_state_dict(fresh.state_dict() | {"persistent": bool(num_workers)})
