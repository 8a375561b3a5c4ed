"""A pass over a loader can stop anywhere and resume with the same remaining batches."""

import enum
import itertools
import random
import types
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
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
    """Draws from all generators and its own, and counts its reads."""

    def __init__(self) -> None:
        self.noise = torch.Generator().manual_seed(11)
        self.reads = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Tensor:
        self.reads += 1
        return augmented(row) / self.reads + torch.rand((), generator=self.noise)


class Streamed(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return map(augmented, range(ROWS))


class PlainShuffle:
    """A custom loader with generators that are not torch's, which counts its passes."""

    def __init__(self) -> None:
        self.order, self.noise, self.passes = random.Random(3), np.random.default_rng(4), 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        rows = torch.tensor(self.order.sample(range(ROWS), ROWS)) + self.passes
        return (some + self.noise.random() for some in rows.split(BATCH_SIZE))


class Wrapping:
    """A loader or a sampler that wraps another one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class Ordered(Wrapping, Sampler[int]): ...


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
    """Keeps what decides its order in values, containers and samplers of many classes."""

    def __init__(self) -> None:
        self.odd, self.scale, self.day = Odd.NO, np.float32(1), np.datetime64("2020-01-01")
        self.used: set[Any] = set()
        self.proxies = [weakref.proxy(type(self)), Slotted(types.SimpleNamespace(a=1))]
        self.held = types.SimpleNamespace(
            last=deque([1], 2), seen=Counter[Any](), of=defaultdict[int, list[int]](list)
        )
        self.held.all = {"held": Attributes(a=1), "of": self.held.of, "last": self.held.last}
        self.inner: dict[str, Any] = {"samplers": [CountsPasses()], "passes": 0}
        self.orders: list[Any] = [[*range(ROWS)], np.arange(ROWS)]
        self.batches = [[0, 1], [2, 3], [4, 5], [6, 7]]
        self.made: list[int] | None = None

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
        for each in (*self.orders, self.batches):
            random.Random(5).shuffle(each)
        self.made = [*range(ROWS)] if self.made is None else [*self.made[5:], *self.made[:5]]
        inner, rows = next(iter(self.inner["samplers"])), [*range(turn, ROWS), *range(turn)]
        for order in (*self.orders, [*itertools.chain(*self.batches)], self.made, [*inner]):
            rows = [rows[place] for place in order]
        return iter(rows)


class CountsPasses(Rotating):
    """Shuffles by the number of its passes, counted in itself and in its class."""

    passes = 0

    def __init__(self) -> None:
        self.epoch = type(self).passes = 0  # as in a new process

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        type(self).passes += 3
        return iter(random.Random(self.epoch + self.passes).sample(range(ROWS), ROWS))


def load(**options: Any) -> DataLoader:
    settings: dict[str, Any] = {"batch_size": BATCH_SIZE} if "batch_sampler" not in options else {}
    return DataLoader(Augmented(), **settings, **options)


def own_order(**options: Any) -> RandomSampler:
    return RandomSampler(Augmented(), generator=seeded_generator(), **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle by the process": lambda: load(shuffle=True),
    "sampler by epoch": lambda: load(
        sampler=DistributedSampler(Augmented(), num_replicas=1, rank=0, seed=7)
    ),
    # With replacement, the sampler draws from its generator during the whole pass.
    "batch sampler": lambda: load(
        batch_sampler=BatchSampler(own_order(replacement=True), BATCH_SIZE, drop_last=True)
    ),
    "list": lambda: list(torch.arange(ROWS).split(BATCH_SIZE)),
    "iterable dataset": lambda: DataLoader(Streamed(), batch_size=BATCH_SIZE),
    "custom loader": PlainShuffle,
    "wrapped loader": lambda: Wrapping(load(shuffle=True, generator=seeded_generator())),
    "sampler of samplers": lambda: load(sampler=Ordered(own_order()), collate_fn=collating()),
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


def feed_of(loader: Any, seed: int = 1) -> Feed:
    """Return the feed of a new process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return Feed(loader, "train_dataloader")


def resumed(feed: Feed, make: Callable[[], Any]) -> Feed:
    """Return the feed of another process that loads the state of a feed."""
    state = put_together(*take_apart({"feed": feed.state_dict(), "rng": rng_state()}))
    later = feed_of(make(), seed=2)
    later.load_state_dict(state["feed"])
    restore_rng_state(state["rng"])
    return later


def undisturbed(make: Callable[[], Any]) -> tuple[list[list[Tensor]], Any]:
    feed = feed_of(make())
    return [train(feed, epoch) for epoch in range(PASSES)], state_of(feed.loader)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.sweep] * ("workers" in each)) for each in LOADERS],
)
def test_remaining_batches_match_undisturbed_run(name: str) -> None:
    make = LOADERS[name]
    passes, end = undisturbed(make)
    for epoch, given in itertools.product(range(PASSES), [0, 1, 2, BATCHES]):
        feed = feed_of(make())
        for earlier in range(epoch):
            train(feed, earlier)
        assert_same(train(feed, epoch, given), passes[epoch][:given])
        later = resumed(feed, make)
        assert_same(train(later, epoch), passes[epoch][given:])
        for each in range(epoch + 1, PASSES):
            assert_same(train(later, each), passes[each])
        assert_same(state_of(later.loader), end)


@pytest.mark.parametrize("name", ["shuffle by the process", "saves its position"])
def test_complete_pass_without_seen_end_continues_with_next_epoch(name: str) -> None:
    passes, _ = undisturbed(LOADERS[name])
    feed = feed_of(LOADERS[name]())
    train(feed, 0, BATCHES)
    assert_same(train(resumed(feed, LOADERS[name]), 1), passes[1])


def test_same_loader_resumes_with_running_persistent_workers() -> None:
    passes, _ = undisturbed(LOADERS["persistent workers"])
    feed = feed_of(LOADERS["persistent workers"]())
    train(feed, 0)
    train(feed, 1, 2)
    assert_same(train(resumed(feed, lambda: feed.loader), 1), passes[1][2:])


@pytest.mark.parametrize("now", [2, 6])
def test_shorter_loader_is_refused_and_longer_one_warns(now: int) -> None:
    feed = feed_of([1, 2, 3, 4])
    train(feed, 0, 3)
    message = rf"3 batches into the epoch: batches=4 \(here {now}\)"
    if now < 4:
        with pytest.raises(DataLoaderError, match=message):
            resumed(feed, lambda: [1, 2])
        return
    with pytest.warns(CheckpointWarning, match=message):
        later = resumed(feed, lambda: [1, 2, 3, 4, 5, 6])
    assert list(later.batches(0)) == [4, 5, 6]


@pytest.mark.parametrize("epoch", [0, 1])
def test_iterator_that_outlives_pass_is_named(epoch: int) -> None:
    feed = feed_of(load(sampler=Rotating()))
    for earlier in range(epoch):
        train(feed, earlier)
    train(feed, epoch, 1)
    later = resumed(feed, lambda: load(sampler=Rotating()))
    if epoch == 0:  # the first pass starts at the first number anyway
        assert len(train(later, epoch)) == BATCHES - 1
        return
    with pytest.warns(CheckpointWarning, match=r"restored at (batch_)?sampler\.numbers, so its"):
        train(later, epoch)


def shuffled(number: int = ROWS, **options: Any) -> DataLoader:
    given: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, **options}
    return DataLoader(TensorDataset(torch.arange(number)), **given)


def streamed(num_workers: int) -> DataLoader:
    return DataLoader(Streamed(), batch_size=BATCH_SIZE, num_workers=num_workers)


@pytest.mark.parametrize(
    ("loader", "other", "message"),
    [
        (shuffled(), shuffled(shuffle=False), "sampler=RandomSampler (here SequentialSampler)"),
        (shuffled(50, batch_size=16), shuffled(50, batch_size=13), "batch_size=16 (here 13)"),
        (shuffled(7), shuffled(8), "rows=7 (here 8)"),
        (shuffled(generator=seeded_generator()), shuffled(), "has_generator=True (here False)"),
        (streamed(0), streamed(2), "num_workers=0 (here 2)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_changed_rows_warn_with_both_values(loader: Any, other: Any, message: str) -> None:
    feed = feed_of(loader)
    train(feed, 0, 1)
    with pytest.warns(CheckpointWarning, match="1 batches into the epoch") as caught:
        resumed(feed, lambda: other)
    assert f"{message}. Rows may be" in str(caught[0].message)
    # Between two passes, these changes do not matter.
    feed = feed_of(loader)
    train(feed, 0)
    resumed(feed, lambda: other)


class Unsized:
    """A loader of some numbers, without a length."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.most))


def test_loader_of_unknown_length_that_ends_early_is_refused() -> None:
    feed = feed_of(Unsized(9))
    train(feed, 0, 3)
    with pytest.raises(DataLoaderError, match="ended after 2 batches, but 3 batches of this epoch"):
        next(resumed(feed, lambda: Unsized(2)).batches(0))


def test_exhausted_iterator_is_error() -> None:
    batches = iter([1, 2, 3])
    feed = feed_of(batches)
    train(feed, 0, 2)
    later = resumed(feed, lambda: batches)
    with (
        pytest.warns(CheckpointWarning, match="is an iterator"),
        pytest.raises(DataLoaderError, match="ended after 1 batches"),
    ):
        next(later.batches(0))
    assert not list(feed_of(batches).batches(0))


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("saves its position", "list", "but this list has no load_state_dict"),
        ("workers", "persistent workers", "made with persistent_workers=False, without which"),
    ],
)
def test_different_kind_of_loader_is_refused(name: str, other: str, message: str) -> None:
    feed = feed_of(LOADERS[name]())
    train(feed, 0, 1)
    with pytest.raises(DataLoaderError, match=message):
        resumed(feed, LOADERS[other])


def test_failed_resume_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = feed_of([1, 2, 3])
    train(feed, 0, 2)
    later = resumed(feed, lambda: [1, 2, 3])

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


@pytest.mark.parametrize("wrap", [lambda rows: [{"x": rows}], lambda rows: Wrapping([rows])])
def test_rows_in_a_loader_are_not_copied(wrap: Callable[[Tensor], Any]) -> None:
    standing = Standing(wrap(rows := torch.zeros(2, 2**18)), "train_dataloader")
    rows.add_(1)
    assert not standing.read()["attributes"]
