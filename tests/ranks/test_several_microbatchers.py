"""Several Microbatchers in one process group: named evaluations, adversaries, one after another."""

import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from automicro import BatchError, Halving
from automicro.errors import PeerFailedError
from tests.ranks.faulty_models import Fault, Faults, build, points
from tests.ranks.jobs import batch
from tests.ranks.steps import another, squared_error
from tests.ranks.test_recovery import require_recovered
from tests.ranks.world import World, world_of

pytestmark = pytest.mark.sweep


def count_threads(kind: str) -> tuple[int, int]:
    """Threads of this process with one Microbatcher, and with five more."""
    model = build(kind, [Faults()], {})
    kept = [another(model)]
    kept[0].backward(batch(0, dist.get_rank(), {}))
    before = len(os.listdir("/proc/self/task"))
    for step in range(1, 6):
        kept.append(another(model))
        kept[-1].backward(batch(step, dist.get_rank(), {}))
    return before, len(os.listdir("/proc/self/task"))


def forget(kind: str) -> tuple[list[bool], float]:
    """What is left of a model after its Microbatcher; before, the loss without the latter."""
    model = build(kind, [Faults()], {})
    microbatcher = another(model)
    for step in range(2):
        microbatcher.backward(batch(step, dist.get_rank(), {}))
    del microbatcher
    gc.collect()
    x, y = batch(2, dist.get_rank(), {})
    loss = squared_error(model(x), y)
    loss.backward()
    refs: list[weakref.ref[Any]] = [weakref.ref(each) for each in (model, *model.parameters())]
    value = loss.item()
    del model, loss
    gc.collect()
    return [ref() is not None for ref in refs], value


def go_on_after_errors(kind: str) -> list[str | int]:
    """Rank 1 has a batch that cannot be cut in the steps 1 and 3; all ranks go on."""
    microbatcher = another(build(kind, [Faults()], {}))
    found: list[str | int] = []
    for step in range(5):
        x, y = batch(step, dist.get_rank(), {"rows": [4 + step] * 2})
        if dist.get_rank() == 1 and step in (1, 3):
            y = y[:-1]
        try:
            found.append(microbatcher.backward((x, y)).num_global_samples)
        except (BatchError, PeerFailedError) as error:
            found.append(type(error).__name__)
    return found


def train_adversaries(fails: bool) -> list[Tensor]:
    """Gradients of two models, each stepped by a Microbatcher, one through the other."""
    torch.manual_seed(0)
    faults = Faults([Fault(1, "backward", step=2, layer=1)] if fails else ())
    judge = build("ddp", [faults], {"norm": False, "dtype": torch.float64})
    maker = DistributedDataParallel(nn.Linear(4, 4).double(), bucket_cap_mb=0.001)
    judge.eval()
    of_judge = another(judge, microbatch_size=Halving(initial=4))
    of_maker = another(
        maker,
        microbatch_size=Halving(initial=4),
        forward=lambda model, rows: squared_error(judge(model(rows[0])), rows[1]),
        modules=[judge],
    )
    found = []
    for step in range(4):
        x, y = batch(step, dist.get_rank(), {"rows": [8, 5]})
        rows = x.double(), y.double()
        faults.step = step
        faults.microbatch = 0
        for each in (of_judge, of_maker):
            each.backward(rows)
            gradients = [p.grad for p in (*judge.parameters(), *maker.parameters())]
            found += [gradient for gradient in gradients if gradient is not None]
            judge.zero_grad()
            maker.zero_grad()
    return found


def take_a_part() -> None:
    """A Microbatcher of a part of a model that another uses as a whole."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    another(model)
    another(model[0])


def ask_with_different_ones() -> None:
    """Rank 0 trains with the first Microbatcher while rank 1 trains with the second."""
    model = build("ddp", [Faults()], {})
    pair = another(model), another(model)
    pair[dist.get_rank()].backward(batch(0, dist.get_rank(), {}))


KINDS = ["ddp", "fsdp"]
POINTS = ["first batch", "last backward", "successive batches"]


@pytest.mark.parametrize(
    "point", [POINTS[0], *(pytest.param(p, marks=pytest.mark.slow) for p in POINTS[1:])]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_recovers_whichever_microbatcher_is_newer(
    world2: World, kind: str, point: str
) -> None:
    first, second = require_recovered(world2, kind, points(2)[point], beside=True)
    if kind == "ddp":  # which sends rank 0's before each step
        assert all(torch.equal(each, second["buffers"][n]) for n, each in first["buffers"].items())


@pytest.mark.parametrize("kind", KINDS)
def test_more_microbatchers_need_no_more_connections(world2: World, kind: str) -> None:
    for before, after in world2.run(count_threads, kind):
        assert after == before


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_keeps_a_model_whose_microbatcher_is_gone(world2: World, kind: str) -> None:
    for alive, loss in world2.run(forget, kind):
        assert loss > 0.0
        assert not any(alive)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_go_on_after_every_error_that_all_were_told_of(world2: World, kind: str) -> None:
    healthy, culprit = world2.run(go_on_after_errors, kind)
    assert healthy == [8, "PeerFailedError", 12, "PeerFailedError", 16]
    assert culprit == [8, "BatchError", 12, "BatchError", 16]


def test_two_models_one_trained_through_the_other_recover(world2: World) -> None:
    for found, expected in zip(
        world2.run(train_adversaries, True), world2.run(train_adversaries, False), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_part_of_a_model_that_is_guarded_whole_is_refused(world2: World) -> None:
    for kind, message in world2.ends(take_a_part):
        assert kind == "ValueError"
        assert "part of a model that another Microbatcher uses as a whole" in message
        assert "give every Microbatcher the same outermost module" in message


def test_ranks_that_train_with_different_ones_are_told_and_do_not_hang() -> None:
    with world_of(2) as world:  # it cannot go on
        for kind, message in world.ends(ask_with_different_ones):
            assert kind == "DesyncError"
            assert "Microbatcher 1" in message
            assert "Microbatcher 2" in message
