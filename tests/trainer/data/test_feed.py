"""A pass over a loader can stop anywhere and resume with the same remaining batches."""

import enum
import itertools
import random
import types
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

from automicro.checkpoints.rng import restore_rng_state, rng_state
from automicro.checkpoints.state import put_together, take_apart
from automicro.errors import CheckpointWarning, DataLoaderError
from automicro.trainer.data.feed import Feed
from automicro.trainer.data.loading import Standing, fetch, find_generators, read_generators
from automicro.values import same_values
from tests.loaders import seeded_generator

ROWS, BATCH_SIZE = 8, 2
BATCHES = ROWS // BATCH_SIZE
PASSES = 2


def augmented(row: int) -> Tensor:
    """Return a row with noise from every generator of the process."""
    noise = (torch.rand(()).item(), random.random(), np.random.rand())
    return torch.tensor([float(row), *noise], dtype=torch.float64)


class Augmented(Dataset):
    """Draws from the generators of the process and from its own generator."""

    def __init__(self) -> None:
        self.noise = torch.Generator().manual_seed(11)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Tensor:
        return augmented(row) + torch.rand((), generator=self.noise)


class Streamed(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return map(augmented, range(ROWS))


class PlainShuffle:
    """A custom loader with generators that are not torch's."""

    def __init__(self) -> None:
        self.order = random.Random(3)
        self.noise = np.random.default_rng(4)

    def __iter__(self) -> Iterator[Tensor]:
        rows = list(range(ROWS))
        self.order.shuffle(rows)
        for start in range(0, ROWS, BATCH_SIZE):
            yield torch.tensor(rows[start : start + BATCH_SIZE]) + self.noise.random()


class Wrapping:
    """A loader that wraps another loader."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


class Ordered(Sampler[int]):
    """A sampler that wraps another sampler."""

    def __init__(self) -> None:
        self.base = RandomSampler(Augmented(), generator=seeded_generator())

    def __iter__(self) -> Iterator[int]:
        return iter(self.base)

    def __len__(self) -> int:
        return ROWS


class Drawing:
    """Draws from its own generator when called."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, value: Any) -> Any:
        return torch.as_tensor(value) + self.generator.random()


class Transformed(Augmented):
    """Draws from generators of its transforms, of its class and of its module."""

    mood = random.Random(0)

    def __init__(self) -> None:
        super().__init__()
        Transformed.mood.seed(2)
        GLOBAL_NOISE.seed(3)
        self.transforms = {"noise": [Drawing(np.random.RandomState(4))]}

    def __getitem__(self, row: int) -> Tensor:
        drawn = self.transforms["noise"][0](super().__getitem__(row))
        return torch.as_tensor(drawn + self.mood.random() + GLOBAL_NOISE.random())


GLOBAL_NOISE = random.Random(0)


def collating() -> Callable[[list[Tensor]], Tensor]:
    noise = Drawing(random.Random(5))
    return lambda rows: torch.as_tensor(noise(torch.stack(rows)))


class SavesPosition:
    """Has a state within a pass and after it, like StatefulDataLoader of torchdata."""

    def __init__(self) -> None:
        self.passes = self.position = 0
        self.loaded: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Tensor]:
        torch.rand(())  # DataLoader also draws a seed per pass
        loaded, self.loaded = self.loaded or {"position": 0}, None
        self.position = loaded["position"]
        return self._rest(loaded["position"])

    def _rest(self, start: int) -> Iterator[Tensor]:
        order = np.random.default_rng(self.passes).permutation(ROWS)
        for self.position in range(start + 1, BATCHES + 1):
            rows = order[BATCH_SIZE * (self.position - 1) : BATCH_SIZE * self.position]
            yield torch.from_numpy(rows) + torch.rand(BATCH_SIZE)
        self.passes, self.position = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.loaded = state["passes"], state


class Rotating(Sampler[int]):
    """Rotates its order by one more row in each pass, counted by an iterator."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)

    def __iter__(self) -> Iterator[int]:
        turn = next(self.numbers)
        return iter([*range(turn, ROWS), *range(turn)])

    def __len__(self) -> int:
        return ROWS


class SavesIterator(Rotating):
    """Saves its own iterator."""

    def state_dict(self) -> dict[str, int]:
        return {"next": int(repr(self.numbers).strip("count()"))}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.numbers = itertools.count(state["next"])


class Odd(enum.StrEnum):
    """An enumeration of text."""

    NO = "no"
    YES = "yes"


class Attributes(dict[str, int]):
    """A table by attributes, which raises KeyError for others."""

    def __getattr__(self, name: str) -> int:
        return self[name]


class Slotted:
    """A proxy without a dictionary of its own."""

    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Keeping(Rotating):
    """Keeps what decides its order in values and containers of many classes."""

    def __init__(self) -> None:
        self.odd, self.scale, self.day = Odd.NO, np.float32(1), np.datetime64("2020-01-01")
        self.used: set[Any] = set()
        self.proxies = [weakref.proxy(type(self)), Slotted(types.SimpleNamespace(a=1))]
        self.held = types.SimpleNamespace(
            last=deque([1], 2), seen=Counter[Any](), of=defaultdict[int, list[int]](list)
        )
        self.held.all = {"held": Attributes(a=1), "of": self.held.of, "last": self.held.last}

    def __iter__(self) -> Iterator[int]:
        self.odd = Odd.NO if self.odd is Odd.YES else Odd.YES
        self.scale = self.scale * np.float32(1.1)
        self.used.add(np.int64(len(self.used)))
        last, seen, of = self.held.last, self.held.seen, self.held.of
        last.append(sum(last))
        seen[np.int64(len(seen))] += 1
        of[len(of)].append(len(of))
        drawn = len(self.used) + len(seen) + len(of) + sum(last) + int(self.scale * 100)
        turn = (drawn + (self.odd is Odd.YES)) % ROWS
        return iter([*range(turn, ROWS), *range(turn)])


def load(**options: Any) -> DataLoader:
    settings: dict[str, Any] = {"batch_size": BATCH_SIZE} if "batch_sampler" not in options else {}
    return DataLoader(Augmented(), **settings, **options)


def random_batches() -> BatchSampler:
    # With replacement, the sampler draws from its generator during the whole pass.
    sampler = RandomSampler(Augmented(), replacement=True, generator=seeded_generator())
    return BatchSampler(sampler, BATCH_SIZE, drop_last=True)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle by the process": lambda: load(shuffle=True),
    "shuffle by its own generator": lambda: load(shuffle=True, generator=seeded_generator()),
    "sampler by epoch": lambda: load(
        sampler=DistributedSampler(Augmented(), num_replicas=1, rank=0, seed=7)
    ),
    "batch sampler": lambda: load(batch_sampler=random_batches()),
    "list": lambda: list(torch.arange(ROWS).split(BATCH_SIZE)),
    "iterable dataset": lambda: DataLoader(Streamed(), batch_size=BATCH_SIZE),
    "custom loader": PlainShuffle,
    "wrapped loader": lambda: Wrapping(load(shuffle=True, generator=seeded_generator())),
    "sampler of samplers": lambda: load(sampler=Ordered(), collate_fn=collating()),
    "transforms of joined data": lambda: DataLoader(
        ConcatDataset([Transformed(), Transformed()]), 2 * BATCH_SIZE, drop_last=True
    ),
    "saves its position": SavesPosition,
    "saves its iterator": lambda: load(sampler=SavesIterator()),
    "keeps values of many classes": lambda: load(sampler=Keeping()),
    "workers": lambda: load(shuffle=True, num_workers=2),
    "persistent workers": lambda: load(shuffle=True, num_workers=2, persistent_workers=True),
}


def train(feed: Feed, epoch: int, most: int = BATCHES + 1) -> list[Tensor]:
    """Return the batches of a pass up to a number, with random draws as in training steps."""
    seen: list[Tensor] = []
    if most == 0:
        return seen
    for batch in feed.batches(epoch):
        seen.append(batch)
        torch.rand(3), random.random(), np.random.rand()
        if len(seen) == most:
            break
    return seen


def state_of(loader: object) -> Any:
    return rng_state(), read_generators(find_generators(loader))


def assert_same(one: Any, other: Any) -> None:
    assert same_values(one, other)


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def undisturbed(make: Callable[[], Any]) -> tuple[list[list[Tensor]], Any]:
    seed(1)
    loader = make()
    feed = Feed(loader, "train_dataloader")
    passes = [train(feed, epoch) for epoch in range(PASSES)]
    return passes, state_of(loader)


def check_rest(name: str, cuts: Iterable[tuple[int, int]]) -> None:
    make = LOADERS[name]
    passes, end = undisturbed(make)
    for epoch, given in cuts:
        seed(1)
        feed = Feed(make(), "train_dataloader")
        for earlier in range(epoch):
            train(feed, earlier)
        assert_same(train(feed, epoch, given), passes[epoch][:given])
        structure, tensors = take_apart({"feed": feed.state_dict(), "rng": rng_state()})

        seed(2)  # simulates another process
        state = put_together(structure, tensors)
        loader = make()
        feed = Feed(loader, "train_dataloader")
        feed.load_state_dict(state["feed"])
        restore_rng_state(state["rng"])
        assert_same(train(feed, epoch), passes[epoch][given:])
        for later in range(epoch + 1, PASSES):
            assert_same(train(feed, later), passes[later])
        assert_same(state_of(loader), end)


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "workers"])
def test_remaining_batches_match_undisturbed_run(name: str) -> None:
    cuts = [(0, 1), (0, BATCHES), (1, 0), (1, 2)]
    check_rest(name, cuts[:1] if "workers" in name else cuts)


@pytest.mark.sweep
@pytest.mark.parametrize("name", LOADERS)
def test_remaining_batches_match_after_any_batch(name: str) -> None:
    check_rest(name, itertools.product(range(PASSES), [0, 1, 2, BATCHES]))


@pytest.mark.parametrize("name", ["shuffle by the process", "saves its position"])
def test_complete_pass_without_seen_end_continues_with_next_epoch(name: str) -> None:
    make = LOADERS[name]
    passes, _ = undisturbed(make)
    seed(1)
    feed = Feed(make(), "train_dataloader")
    train(feed, 0, BATCHES)
    position, numbers = feed.state_dict(), rng_state()
    feed = Feed(make(), "train_dataloader")
    feed.load_state_dict(position)
    restore_rng_state(numbers)
    assert_same(train(feed, 1), passes[1])


def test_same_loader_resumes_with_running_persistent_workers() -> None:
    make = LOADERS["persistent workers"]
    passes, _ = undisturbed(make)
    seed(1)
    loader = make()
    feed = Feed(loader, "train_dataloader")
    train(feed, 0)
    train(feed, 1, 2)
    position, numbers = feed.state_dict(), rng_state()
    feed = Feed(loader, "train_dataloader")
    feed.load_state_dict(position)
    restore_rng_state(numbers)
    assert_same(train(feed, 1), passes[1][2:])


@pytest.mark.parametrize("now", [2, 6])
def test_shorter_loader_is_refused_and_longer_one_warns(now: int) -> None:
    feed = Feed([1, 2, 3, 4], "train_dataloader")
    train(feed, 0, 3)
    later = Feed(list(range(1, now + 1)), "train_dataloader")
    message = rf"3 batches into the epoch: batches=4 \(here {now}\)"
    if now < 4:
        with pytest.raises(DataLoaderError, match=message):
            later.load_state_dict(feed.state_dict())
        return
    with pytest.warns(CheckpointWarning, match=message):
        later.load_state_dict(feed.state_dict())
    assert list(later.batches(0)) == [4, 5, 6]


@pytest.mark.parametrize("epoch", [0, 1])
def test_iterator_that_outlives_pass_is_named(epoch: int) -> None:
    feed = Feed(load(sampler=Rotating()), "train_dataloader")
    for earlier in range(epoch):
        train(feed, earlier)
    train(feed, epoch, 1)
    later = Feed(load(sampler=Rotating()), "train_dataloader")
    later.load_state_dict(feed.state_dict())
    if epoch == 0:  # the first pass starts at the first number anyway
        assert len(train(later, epoch)) == BATCHES - 1
        return
    with pytest.warns(CheckpointWarning, match=r"restored at (batch_)?sampler\.numbers, so its"):
        train(later, epoch)


def loader_of(number: int = ROWS, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(number)), **{"batch_size": BATCH_SIZE, **options})


OTHER_ROWS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "order": (
        lambda: loader_of(shuffle=True),
        loader_of,
        r"sampler=RandomSampler \(here SequentialSampler\)",
    ),
    "batch size, same number of batches": (
        lambda: loader_of(50, batch_size=16, shuffle=True),
        lambda: loader_of(50, batch_size=13, shuffle=True),
        r"batch_size=16 \(here 13\)",
    ),
    "data": (
        lambda: loader_of(7, shuffle=True),
        lambda: loader_of(8, shuffle=True),
        r"rows=7 \(here 8\)",
    ),
    "generator": (
        lambda: loader_of(shuffle=True, generator=seeded_generator()),
        lambda: loader_of(shuffle=True),
        r"has_generator=True \(here False\)",
    ),
    "workers of a stream": (
        lambda: DataLoader(Streamed(), batch_size=BATCH_SIZE),
        lambda: DataLoader(Streamed(), batch_size=BATCH_SIZE, num_workers=2),
        r"num_workers=0 \(here 2\)",
    ),
}


@pytest.mark.parametrize("what", OTHER_ROWS)
def test_changed_rows_warn_with_both_values(what: str) -> None:
    make, make_other, message = OTHER_ROWS[what]
    feed = Feed(make(), "train_dataloader")
    train(feed, 0, 1)
    with pytest.warns(CheckpointWarning, match=f"1 batches into the epoch: {message}. Rows may be"):
        Feed(make_other(), "train_dataloader").load_state_dict(feed.state_dict())
    # Between two passes, these changes do not matter.
    feed = Feed(make(), "train_dataloader")
    train(feed, 0)
    Feed(make_other(), "train_dataloader").load_state_dict(feed.state_dict())


class Endless:
    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


class Short(Endless):
    def __iter__(self) -> Iterator[int]:
        return iter([0, 1])


def test_loader_of_unknown_length_that_ends_early_is_refused() -> None:
    feed = Feed(Endless(), "train_dataloader")
    train(feed, 0, 3)
    later = Feed(Short(), "train_dataloader")
    later.load_state_dict(feed.state_dict())
    with pytest.raises(DataLoaderError, match="ended after 2 batches, but 3 batches of this epoch"):
        next(later.batches(0))


def test_exhausted_iterator_is_error() -> None:
    batches = iter([1, 2, 3])
    feed = Feed(batches, "train_dataloader")
    train(feed, 0, 2)
    position = feed.state_dict()
    later = Feed(batches, "train_dataloader")
    later.load_state_dict(position)
    with (
        pytest.warns(CheckpointWarning, match="is an iterator"),
        pytest.raises(DataLoaderError, match="ended after 1 batches"),
    ):
        next(later.batches(0))
    assert not list(Feed(batches, "train_dataloader").batches(0))


def test_different_kind_of_loader_is_refused() -> None:
    feed = Feed(SavesPosition(), "train_dataloader")
    train(feed, 0, 1)
    with pytest.raises(DataLoaderError, match="but this list has no load_state_dict"):
        Feed([1, 2], "train_dataloader").load_state_dict(feed.state_dict())

    feed = Feed(LOADERS["workers"](), "train_dataloader")
    train(feed, 0, 1)
    with pytest.raises(DataLoaderError, match=r"made with persistent_workers=False, without which"):
        Feed(LOADERS["persistent workers"](), "train_dataloader").load_state_dict(feed.state_dict())


def test_failed_resume_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed([1, 2, 3], "train_dataloader")
    train(feed, 0, 2)
    later = Feed([1, 2, 3], "train_dataloader")
    later.load_state_dict(feed.state_dict())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("automicro.trainer.data.loading.announce_epoch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(later.batches(0))
    assert list(later.batches(0)) == [3]


@pytest.mark.parametrize(("persistent", "moves"), [(True, False), (False, True)])
def test_evaluation_with_persistent_workers_keeps_random_state(
    persistent: bool, moves: bool
) -> None:
    """Otherwise, the first evaluation of a resumed run would draw once more."""
    loader = load(num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        before = torch.get_rng_state()
        assert len(list(fetch(loader))) == BATCHES
        assert torch.equal(torch.get_rng_state(), before) is not moves


@pytest.mark.parametrize("hold", [lambda rows: [{"x": rows}], lambda rows: PlainRows(rows)])
def test_rows_in_a_loader_are_not_copied(hold: Callable[[Tensor], Any]) -> None:
    standing = Standing(hold(rows := torch.zeros(2, 2**18)), "train_dataloader")
    rows.add_(1)
    assert not standing.read()["attributes"]


class PlainRows:
    """A loader around all rows."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = [rows]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)
