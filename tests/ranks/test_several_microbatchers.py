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
from automicro.errors import DesyncError, PeerFailedError
from tests.ranks.faulty_models import Fault, Faults, build, points
from tests.ranks.jobs import batch
from tests.ranks.steps import another, squared_error
from tests.ranks.test_recovery import require_recovered
from tests.ranks.world import World, on_ranks

pytestmark = pytest.mark.sweep


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
@on_ranks()
def test_more_microbatchers_need_no_more_connections(kind: str) -> None:
    model = build(kind, [Faults()], {})
    kept = []
    threads = set()
    for step in range(6):
        kept.append(another(model))
        kept[-1].backward(batch(step, dist.get_rank(), {}))
        threads.add(len(os.listdir("/proc/self/task")))
    assert len(threads) == 1


@pytest.mark.parametrize("kind", KINDS)
@on_ranks()
def test_nothing_keeps_a_model_whose_microbatcher_is_gone(kind: str) -> None:
    """Without it the model trains on, and goes."""
    model = build(kind, [Faults()], {})
    microbatcher = another(model)
    for step in range(2):
        microbatcher.backward(batch(step, dist.get_rank(), {}))
    del microbatcher
    gc.collect()
    x, y = batch(2, dist.get_rank(), {})
    loss = squared_error(model(x), y)
    loss.backward()
    assert loss.item() > 0
    refs: list[weakref.ref[Any]] = [weakref.ref(each) for each in (model, *model.parameters())]
    del model, loss
    gc.collect()
    assert not any(ref() is not None for ref in refs)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks()
def test_ranks_go_on_after_every_error_that_all_were_told_of(kind: str) -> None:
    """Rank 1 has a batch that cannot be cut in the steps 1 and 3."""
    microbatcher = another(build(kind, [Faults()], {}))
    for step in range(5):
        x, y = batch(step, dist.get_rank(), {"rows": [4 + step] * 2})
        if step not in (1, 3):
            assert microbatcher.backward((x, y)).num_global_samples == 8 + 2 * step
            continue
        given = (x, y[:-1] if dist.get_rank() == 1 else y)
        with pytest.raises(BatchError if dist.get_rank() == 1 else PeerFailedError):
            microbatcher.backward(given)


def test_two_models_one_trained_through_the_other_recover(world2: World) -> None:
    for found, expected in zip(
        world2.run(train_adversaries, True), world2.run(train_adversaries, False), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@on_ranks()
def test_a_part_of_a_model_that_is_guarded_whole_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    another(model)
    said = (
        "part of a model that another Microbatcher uses as a whole.*"
        "give every Microbatcher the same outermost module"
    )
    with pytest.raises(ValueError, match=f"(?is){said}"):
        another(model[0])


# Behind this one, this world cannot go on


@on_ranks()
def test_ranks_that_train_with_different_ones_are_told_and_do_not_hang() -> None:
    model = build("ddp", [Faults()], {})
    pair = another(model), another(model)
    with pytest.raises(DesyncError, match=r"(?s)Microbatcher (\d+)\b.*Microbatcher (?!\1\b)\d"):
        pair[dist.get_rank()].backward(batch(0, dist.get_rank(), {}))
