"""A batch that runs out of memory on its way: the same to the bit as with its last size at once.

``python -m tests.state.test_failed_attempts`` counts what ends otherwise, kind by kind.
"""

import dataclasses
import functools
import gc
import itertools
import logging
import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from automicro import BufferWarning, Halving, Microbatcher, Trainer
from tests.ranks.steps import local
from tests.state.kinds import (
    KINDS,
    OUTSIDE,
    PHASES,
    Net,
    Watch,
    kind_of,
    modes,
    modes_put_back,
    step_of,
)
from tests.sweeps import mostly_in_sweeps

ROWS, SIZE = 8, 4
WHERE = ("nowhere", *PHASES)
WHEN = tuple(itertools.product((True, False), (0, 2)))  # whether it looks, and the batch that fails
Trace = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """Kinds that a forward enters one after the other, and where an attempt fails."""

    kinds: tuple[str, ...]
    where: str
    probe: bool
    at: int

    def __str__(self) -> str:
        when = f"{self.where} of batch {self.at}, {'probe' if self.probe else 'no probe'}"
        return f"{'+'.join(self.kinds)}: {when}"


SINGLE = [
    Case((name,), where, *when) for name, where, when in itertools.product(KINDS, WHERE, WHEN)
]


def mixtures(count: int = 60) -> list[Case]:
    draw = random.Random(0)
    return [
        Case(
            tuple(draw.sample(list(KINDS), draw.randint(2, 6))),
            draw.choice(list(PHASES)),
            *draw.choice(WHEN),
        )
        for _ in range(count)
    ]


MIXTURES = mixtures()
# Of each kind one case of each phase, and one with looks, at one batch or the other.
QUICK = {
    Case((name,), phase, looks, (0, 2)[(index + number) % 2])
    for index, name in enumerate(KINDS)
    for number, phase in enumerate(PHASES)
    for looks in ((False, True) if index % len(PHASES) == number else (False,))
} | {*MIXTURES[::10]}


def batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(ROWS, 6, generator=generator)
    return x, torch.randint(3, (ROWS,), generator=generator)


class Run:
    """A model, what it computes, its optimizer, and what is seen of it."""

    def __init__(
        self, names: Sequence[str], watch: Watch, wrap: Callable[[Net], Any] = lambda net: net
    ) -> None:
        OUTSIDE.watch = watch
        torch.manual_seed(0)
        self.watch, self.net = watch, Net()
        self.kinds = [kind_of(name, self.net) for name in names]
        self.model = wrap(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.trace: Trace = {}
        step = step_of(self.kinds)
        self.forward = lambda model, batch: model(batch, step)

    def begin(self, index: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        self.watch.batch, self.watch.calls = index, 0
        self.optimizer.zero_grad()
        return batch(index + 100 * seed)

    def end(self, index: int, loss: Tensor) -> None:
        seen = {name: p.grad for name, p in self.net.named_parameters()}
        copies = {name: None if g is None else local(g).clone() for name, g in seen.items()}
        places = {f"place {n}": place() for n, (_, place) in enumerate(self.kinds)}
        found = {**copies, "loss": loss.detach(), **places, **modes(), "alive": self.watch.alive()}
        self.trace |= {f"batch {index}: {name}": value for name, value in found.items()}
        self.optimizer.step()


@functools.cache
def plainly(kinds: tuple[str, ...], at: int, *, is_halved: bool) -> Trace:
    """What plain torch gives, in microbatches of half the rows from batch `at` on, or never."""
    with modes_put_back():
        run = Run(kinds, Watch())
        for index in range(at + 2):
            x, y = run.begin(index)
            size = SIZE // 2 if is_halved and index >= at else SIZE
            loss = torch.zeros(())
            for part in zip(x.split(size), y.split(size), strict=True):
                each = run.forward(run.net, part) * (size / ROWS)  # a power of two: nothing rounds
                each.backward()
                loss = loss + each.detach()
                del each
            run.end(index, loss)
        return run.trace


def differences(case: Case) -> list[str]:
    """What is otherwise than in plain torch; what is raised, where something is."""
    fails = case.where in PHASES
    expected = plainly(case.kinds, case.at, is_halved=fails)
    with modes_put_back(), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", BufferWarning)  # the teacher's count microbatches
        watch = Watch(case.where, case.at)
        run = Run(case.kinds, watch)
        microbatcher = Microbatcher(
            run.net,
            forward=run.forward,
            loss_average="samples",
            microbatch_size=Halving(initial=SIZE, refine=False, grow=False),
            probe=case.probe,
        )
        for index in range(case.at + 2):
            try:
                result = microbatcher.backward(run.begin(index))
            except Exception as error:
                return [f"batch {index}: {type(error).__name__}: {error}"]
            run.end(index, result.loss)
    assert bool(watch.fired) == fails
    different = [name for name in expected if not same(run.trace[name], expected[name])]
    if watch.left_at_the_retry:
        different.append(f"{watch.left_at_the_retry} tensors are held when it is tried again")
    return different


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("case", mostly_in_sweeps(SINGLE + MIXTURES, quick=QUICK), ids=str)
def test_an_attempt_fails_and_all_is_as_in_plain_torch(case: Case) -> None:
    assert differences(case) == []


class Expert(nn.Module):
    """Hands its part of a balance loss on in a list, which the model clears."""

    def __init__(self, width: int, held: list[Tensor]) -> None:
        super().__init__()
        self.router, self.held = nn.Linear(width, 4), held
        self.layers = nn.Sequential(
            nn.Linear(width, 8 * width), nn.Tanh(), nn.Linear(8 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        self.held.append(share.square().sum(-1).mean())
        return x + self.layers(x) * share[:, :1]  # type: ignore[no-any-return]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[Tensor] = []
        self.experts = nn.Sequential(*(Expert(16, self.held) for _ in range(4)))
        self.head = nn.Linear(16, 3)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.head(self.experts(x)), y) + 0.5 * sum(self.held)
        self.held.clear()
        return loss


@pytest.mark.parametrize("probe", mostly_in_sweeps([True, False], quick=[True]))
def test_the_trainer_under_a_limit_ends_as_one_that_begins_with_the_size(probe: bool) -> None:
    def train(limit: str | None, size: Any) -> tuple[Any, Experts]:
        torch.manual_seed(0)
        rows = TensorDataset(torch.randn(128, 16), torch.randint(3, (128,)))
        model = Experts()
        trainer = Trainer(
            model,
            DataLoader(rows, batch_size=64),
            forward=lambda model, batch: model(batch),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loss_average="samples",
            max_duration="2ep",
            memory_limit=limit,
            microbatch_size=size,
            probe=probe,
            device="cpu",
            progress=False,
            seed=0,
        )
        return trainer.fit(), model

    summary, model = train("250KiB", Halving(refine=False, grow=False))
    assert summary.train_ooms == 2
    _, expected = train(None, summary.microbatch_size)
    assert model.held == []
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def main() -> None:
    logging.disable()
    gc.freeze()
    tried: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    first: dict[str, str] = {}
    for case in [*SINGLE, *MIXTURES]:
        kind = case.kinds[0] if len(case.kinds) == 1 else "mixtures"
        keys = kind, case.where, f"probe={case.probe}", f"batch {case.at}", "all"
        tried.update(keys)
        if found := differences(case):
            wrong.update(keys)
            where = str(case).rpartition(": ")[2]
            first.setdefault(kind, f"{where}: {found[0][:90]}; {len(found)} in all")
    print("how many end with other numbers or leave something behind; the first of them")
    for each in sorted(tried, key=lambda each: (each not in KINDS, each)):
        print(f"{each:26} {wrong[each]:3} of {tried[each]:3}  {first.get(each, '')}")


if __name__ == "__main__":
    main()
