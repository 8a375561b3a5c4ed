"""A pass over shared data goes on at another number of ranks, or says why it cannot."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Sampler

from automicro.errors import CheckpointError
from automicro.trainer.data.feed import Feed
from automicro.trainer.data.sharing import LoaderSharing
from automicro.trainer.processes import Process
from tests.loaders import WholeBatches
from tests.ranks.resharding_runs import PER_BATCH, SAMPLERS, make_loader

CPU = torch.device("cpu")


def feeds_of(world_size: int, make: Any, *, seed: int = 0) -> list[Feed]:
    """Of each rank."""
    return [
        Feed(
            LoaderSharing(Process(rank=rank, world_size=world_size), seed=seed, device=CPU).share(
                make(world_size), "train_dataloader"
            ),
            "train_dataloader",
            has_peers=world_size > 1,
        )
        for rank in range(world_size)
    ]


def together(passes: Sequence[Iterator[Any]], count: int | None = None) -> list[list[int]]:
    """The rows of each batch over all ranks, in their order in it."""
    taken = [itertools.islice(each, count) for each in passes]
    return [
        [row for part in parts if part is not None for row in part["row"].tolist()]
        for parts in itertools.zip_longest(*taken)
    ]


def begin(feeds: Sequence[Feed], epoch: int) -> list[Iterator[Any]]:
    return [feed.batches(epoch) for feed in feeds]


def go_on(states: Sequence[Any], feeds: Sequence[Feed]) -> None:
    for rank, feed in enumerate(feeds):
        feed.load_state_dict(feed.reshard(states, rank=rank))


def states_of(feeds: Sequence[Feed]) -> list[dict[str, Any]]:
    return [feed.state_dict() for feed in feeds]


WORLDS = st.integers(1, 4)


@given(
    worlds=st.lists(WORLDS, min_size=2, max_size=4),
    rows=st.integers(1, 3 * PER_BATCH + 3),
    taken=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    sampler=st.sampled_from(sorted(SAMPLERS)),
    drop_last=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_row_of_the_epoch_comes_once_in_the_batch_where_it_would_have(
    worlds: list[int], rows: int, taken: list[int], sampler: str, drop_last: bool
) -> None:
    if drop_last:
        rows += PER_BATCH

    def make(world_size: int) -> DataLoader[Any]:
        return make_loader(rows, sampler, world_size=world_size, drop_last=drop_last)

    whole = feeds_of(1, make)
    expected = [together(begin(whole, epoch)) for epoch in range(3)]
    feeds = feeds_of(worlds[0], make)
    assert together(begin(feeds, 0)) == expected[0]
    found: list[list[int]] = []
    passes = begin(feeds, 1)
    for world_size, count in zip(worlds[1:], taken, strict=False):
        found += together(passes, count)
        states = states_of(feeds)
        feeds = feeds_of(world_size, make, seed=7)  # that of the run goes on
        go_on(states, feeds)
        passes = begin(feeds, 1)
    assert found + together(passes) == expected[1]
    assert together(begin(feeds, 2)) == expected[2]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_make_no_difference(persistent: bool) -> None:
    def make(world_size: int) -> DataLoader[Any]:
        return make_loader(
            40, "shuffled", world_size=world_size, num_workers=2, persistent_workers=persistent
        )

    expected = together(begin(feeds_of(1, make), 0))
    feeds = feeds_of(3, make)
    found = together(begin(feeds, 0), 2)
    fewer = feeds_of(2, make)
    go_on(states_of(feeds), fewer)
    assert found + together(begin(fewer, 0)) == expected


class PythonOrder(Sampler[int]):
    """Shuffles as many do: by the generator of the process."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(20))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 20


def test_ranks_have_one_order_whatever_a_sampler_draws_from() -> None:
    data = [{"row": row} for row in range(20)]

    def make(world_size: int) -> DataLoader[Any]:
        return DataLoader(data, batch_size=12 // world_size, sampler=PythonOrder())  # type: ignore[arg-type]

    found = together(begin(feeds_of(3, make), 0))
    assert sorted(itertools.chain(*found)) == list(range(20))
    assert found == together(begin(feeds_of(2, make), 0))


def refusal(was: Sequence[Feed], now: Sequence[Feed]) -> str:
    together(begin(was, 0), 1)
    with pytest.raises(CheckpointError) as caught:
        go_on(states_of(was), now)
    return str(caught.value)


def shuffled(rows: int = 40, per_batch: int = PER_BATCH, **options: Any) -> Any:
    return lambda world_size: make_loader(
        rows, "shuffled", world_size=world_size, per_batch=per_batch, **options
    )


def test_another_batch_over_all_ranks_is_refused_with_both_numbers_and_the_batch_size() -> None:
    was = feeds_of(2, shuffled())
    text = refusal(was, feeds_of(3, shuffled(per_batch=18)))
    assert "had 12 rows over 2 ranks, and here it has 18 over 3 (batch_size=6)" in text
    assert "batch_size=4" in text
    assert "global_batch_size" in text
    text = refusal(was, feeds_of(5, shuffled(per_batch=15)))
    assert "12 rows are not a multiple of 5 ranks" in text


def test_other_data_or_another_order_is_refused() -> None:
    assert "has 39 rows, and had 40" in refusal(feeds_of(2, shuffled()), feeds_of(1, shuffled(39)))
    in_order = lambda size: make_loader(40, "in order", world_size=size)  # noqa: E731
    text = refusal(feeds_of(2, shuffled()), feeds_of(1, in_order))
    assert "SequentialSampler, and was by a RandomSampler" in text


def test_an_order_that_was_another_one_on_each_rank_is_refused() -> None:
    make = lambda size: make_loader(40, "sampler with a generator", world_size=size)  # noqa: E731
    was = feeds_of(2, make)
    together(begin(was, 0), 1)
    states = states_of(was)
    [(place, stood)] = states[1]["passes"][-1]["generators"].items()
    states[1]["passes"][-1]["generators"] = {place: torch.zeros_like(stood)}
    with pytest.raises(CheckpointError, match="stood at another place on each rank"):
        go_on(states, feeds_of(3, make))


def test_an_order_that_ranks_do_not_share_is_refused() -> None:
    alone = [Feed(make_loader(40, "shuffled", world_size=1), "train_dataloader")]
    assert "pass parallel='ddp' in one process, too" in refusal(feeds_of(2, shuffled()), alone)
    text = refusal(alone, feeds_of(2, shuffled()))
    assert "begin such a run with parallel='ddp'" in text
    listed = [Feed([1, 2, 3], "train_dataloader")]
    next(listed[0].batches(0))
    with pytest.raises(CheckpointError, match=r"train_dataloader \(list\) has no order that ranks"):
        go_on(states_of(listed), [Feed([1, 2, 3], "train_dataloader")])


class Stateful(DataLoader[Any]):
    """Keeps its position by itself."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def test_a_loader_with_a_position_of_its_own_is_refused() -> None:
    def make(world_size: int) -> DataLoader[Any]:
        return Stateful([{"row": 0}] * 40, batch_size=12 // world_size)  # type: ignore[arg-type]

    text = refusal(feeds_of(2, make), feeds_of(3, make))
    assert "train_dataloader (Stateful) keeps a position of its own on each rank" in text


def test_whole_batches_of_the_caller_are_refused() -> None:
    def make(world_size: int) -> DataLoader[Any]:
        data: Any = [{"row": row} for row in range(40)]
        return DataLoader(data, batch_sampler=WholeBatches(range(40), 4, drop_last=False))

    text = refusal(feeds_of(2, make), feeds_of(4, make))
    assert "2 batches at a time, one for each rank, were those" in text
    assert "here they would be 4" in text


def test_a_run_goes_on_in_the_order_that_it_began_with_whatever_its_seed_is_now() -> None:
    expected = together(begin(feeds_of(2, shuffled()), 0))
    was = feeds_of(2, shuffled())
    found = together(begin(was, 0), 1)
    now = feeds_of(2, shuffled(), seed=9)
    for state, feed in zip(states_of(was), now, strict=True):
        feed.load_state_dict(state)
    assert found + together(begin(now, 0)) == expected


def test_a_rank_without_a_row_in_the_whole_epoch_has_no_batch() -> None:
    few = feeds_of(3, shuffled(2))
    assert [len(list(feed.batches(0))) for feed in few] == [1, 0, 0]
    assert [len(list(feed.batches(1))) for feed in few] == [1, 0, 0]
