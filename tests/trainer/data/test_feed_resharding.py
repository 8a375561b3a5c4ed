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


def feeds_of(world_size: int, make: Any, *, seed: int = 0, accumulate: int = 1) -> list[Feed]:
    """Return the feed of each rank."""
    feeds = []
    for rank in range(world_size):
        sharing = LoaderSharing(Process(rank=rank, world_size=world_size), seed=seed)
        loader = sharing.share(make(world_size), "train_dataloader")
        feeds.append(Feed(loader, "train_dataloader", accumulate_batches=accumulate))
    return feeds


def merge_rows(passes: Sequence[Iterator[Any]], count: int | None = None) -> list[list[int]]:
    """Return the rows of each batch over all ranks, in order."""
    taken = [itertools.islice(each, count) for each in passes]
    return [
        [row for part in parts if part is not None for row in part["row"].tolist()]
        for parts in itertools.zip_longest(*taken)
    ]


def begin(feeds: Sequence[Feed], epoch: int) -> list[Iterator[Any]]:
    return [feed.batches(epoch) for feed in feeds]


def states_of(feeds: Sequence[Feed]) -> list[dict[str, Any]]:
    return [feed.state_dict() for feed in feeds]


def resume(states: Sequence[Any], feeds: Sequence[Feed]) -> Sequence[Feed]:
    for rank, feed in enumerate(feeds):
        is_same = len(states) == len(feeds)
        feed.load_state_dict(states[rank] if is_same else feed.reshard(states, rank=rank))
    return feeds


@pytest.mark.sweep
@settings(max_examples=60, deadline=None)
@given(
    worlds=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    rows=st.integers(1, 3 * PER_BATCH + 3),
    taken=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    sampler=st.sampled_from(sorted(SAMPLERS)),
    drop_last=st.booleans(),
)
def test_remaining_rows_stay_in_their_batches_after_resharding(
    worlds: list[int], rows: int, taken: list[int], sampler: str, drop_last: bool
) -> None:
    check_rows(worlds, rows + PER_BATCH * drop_last, taken, sampler, drop_last=drop_last)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_remaining_rows_stay_in_their_batches_on_fewer_and_more_ranks(sampler: str) -> None:
    check_rows([3, 2, 4], 2 * PER_BATCH + 5, [1, 1], sampler)


def check_rows(
    worlds: list[int], rows: int, taken: list[int], sampler: str, **options: Any
) -> None:
    def make(world_size: int) -> DataLoader[Any]:
        return make_loader(rows, sampler, world_size=world_size, **options)

    whole = feeds_of(1, make)
    expected = [merge_rows(begin(whole, epoch)) for epoch in range(3)]
    feeds: Sequence[Feed] = feeds_of(worlds[0], make)
    assert merge_rows(begin(feeds, 0)) == expected[0]
    found: list[list[int]] = []
    passes = begin(feeds, 1)
    for world_size, count in zip(worlds[1:], taken, strict=False):
        found += merge_rows(passes, count)
        # The seed of the run stays in effect.
        feeds = resume(states_of(feeds), feeds_of(world_size, make, seed=7))
        passes = begin(feeds, 1)
    assert found + merge_rows(passes) == expected[1]
    assert merge_rows(begin(feeds, 2)) == expected[2]


def shuffled(rows: int = 40, sampler: str = "shuffled") -> Any:
    return lambda world_size: make_loader(rows, sampler, world_size=world_size)


class Stateful(DataLoader[Any]):
    """A loader that saves its own position."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def stateful(world_size: int) -> DataLoader[Any]:
    return Stateful([{"row": 0}] * 40, batch_size=12 // world_size)  # type: ignore[arg-type]


def whole(world_size: int) -> DataLoader[Any]:
    data: Any = [{"row": row} for row in range(40)]
    return DataLoader(data, batch_sampler=WholeBatches(range(40), 4, drop_last=False))


LENGTHS = [3 + 7 * row % 11 for row in range(60)]


def by_length(*, seed: int = 5, batch_length: float = 25.0, **options: Any) -> Any:
    """Return a function that makes a loader of batches of equal total length."""
    data: Any = [{"row": row} for row in range(60)]
    sampler = LengthBatchSampler(
        data, mode="duration", lengths=LENGTHS, batch_length=batch_length, seed=seed
    )
    return lambda world_size: DataLoader(data, batch_sampler=sampler, **options)


def alone(loader: Any) -> list[Feed]:
    return [Feed(loader, "train_dataloader")]


REFUSED: list[tuple[list[Feed], list[Feed], str]] = [
    (
        feeds_of(2, shuffled()),
        feeds_of(1, shuffled(39)),
        "entries=40 (here 39). Pass the same data",
    ),
    (
        feeds_of(2, shuffled()),
        feeds_of(1, shuffled(sampler="in order")),
        "sampler=RandomSampler (here SequentialSampler)",
    ),
    (
        feeds_of(2, shuffled()),
        alone(shuffled()(1)),
        "pass parallel='ddp' also in one process",
    ),
    (
        alone(shuffled()(1)),
        feeds_of(2, shuffled()),
        "no order that ranks share in the checkpoint",
    ),
    (
        feeds_of(2, stateful),
        feeds_of(3, stateful),
        "train_dataloader (Stateful) saves its position on each rank separately",
    ),
    (
        feeds_of(2, whole),
        feeds_of(4, whole),
        "entries_per_step=2 (here 4). Pass the same data and sampler, and let the DataLoader cut "
        "batches of 2 over all ranks",
    ),
    (
        feeds_of(4, by_length()),
        feeds_of(2, by_length()),
        "made of 4 batches of train_dataloader (ranks × accumulate_batches), but here it would be "
        "made of 2 × 1. Pass accumulate_batches=2",
    ),
    (feeds_of(4, by_length()), feeds_of(3, by_length()), "4 is not a multiple of 3 ranks"),
    (
        feeds_of(2, by_length()),
        feeds_of(1, by_length(batch_length=30.0), accumulate=2),
        "with other lengths or options",
    ),
    (feeds_of(2, shuffled()), feeds_of(1, by_length()), "now has one. Pass the same sampler"),
    (
        feeds_of(2, by_length()),
        feeds_of(1, shuffled()),
        "shared_by=LengthBatchSampler (here SharedBatchSampler)",
    ),
]


@pytest.mark.parametrize(("was", "now", "message"), REFUSED, ids=[each[2] for each in REFUSED])
def test_other_order_is_refused_with_remedy(was: list[Feed], now: list[Feed], message: str) -> None:
    merge_rows(begin(was, 0), 1)
    with pytest.raises(CheckpointError) as caught:
        resume(states_of(was), now)
    assert message in str(caught.value)


def test_order_that_differs_between_ranks_is_refused() -> None:
    was = feeds_of(2, shuffled(sampler="sampler with a generator"))
    merge_rows(begin(was, 0), 1)
    states = states_of(was)
    generators = states[1]["passes"][-1]["start"]["generators"]
    generators.update({place: torch.zeros_like(each) for place, each in generators.items()})
    with pytest.raises(CheckpointError, match="whose state differed between ranks"):
        resume(states, feeds_of(3, shuffled(sampler="sampler with a generator")))


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
@example(worlds=[4, 4, 4, 1], taken=[2, 2, 2])
@settings(max_examples=40, deadline=None)
def test_optimization_batches_by_length_keep_their_rows(
    worlds: list[int], taken: list[int]
) -> None:
    def planned(world_size: int, seed: int = 5) -> list[Feed]:
        return feeds_of(world_size, by_length(seed=seed), accumulate=4 // world_size)

    size = worlds[0]
    expected = [steps_of(begin(planned(size), epoch), 4 // size) for epoch in range(3)]
    for each in expected:
        assert sorted(itertools.chain(*each)) == list(range(60))
    feeds: Sequence[Feed] = planned(size)
    found: list[list[int]] = []
    passes = begin(feeds, 1)
    for later, count in zip(worlds[1:], taken, strict=False):
        found += steps_of(passes, 4 // size, count)
        feeds, size = resume(states_of(feeds), planned(later, seed=9)), later  # the old seed stays
        [number] = {feed.num_batches(1) for feed in feeds}
        passes = begin(feeds, 1)
    done = len(found)
    found += steps_of(passes, 4 // size)
    assert found[:-1] == expected[1][:-1]  # the last one is balanced over other ranks
    assert sorted(itertools.chain(*found)) == list(range(60))
    assert number is not None
    assert done <= len(found) == -(-number * size // 4)
    if size == worlds[0]:
        assert found == expected[1]
        assert steps_of(begin(feeds, 2), 4 // size) == expected[2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pass_over_length_batches_resumes_in_middle(num_workers: int) -> None:
    def make() -> Feed:
        workers = {"num_workers": num_workers, "persistent_workers": bool(num_workers)}
        [feed] = alone(by_length(**workers)(1))
        return feed

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
    [other] = alone([1])
    next(other.batches(0))
    with pytest.raises(CheckpointError, match="those of the checkpoint did not"):
        make().load_state_dict(other.state_dict() | {"persistent": bool(num_workers)})
