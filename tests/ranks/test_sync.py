"""Collectives of a step, and equal gradients for early and late reductions."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from automicro.errors import SampleTooLargeError
from automicro.ranks.interface import Sync
from tests.ranks import test_recovery as recovery
from tests.ranks.faulty_models import Fault, Faults, build, points
from tests.ranks.jobs import compare
from tests.ranks.steps import Stepper, another, squared_error
from tests.ranks.world import World, on_ranks
from tests.ranks.wrapping import gap, wrapped
from tests.sweeps import mostly_in_sweeps

pytestmark = pytest.mark.sweep

MICROBATCHES = 4
MODULES = 4  # three blocks and the root

_KINDS = {
    "all_gather_single": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "all_reduce": "all-reduce",
}


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the collectives of wrappers by kind; votes bypass `torch.distributed`."""
    found: Counter[str] = Counter()

    def noting(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[_KINDS[name]] += 1
            return original(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with contextlib.ExitStack() as stack:
        for name in _KINDS:
            stack.enter_context(noting(name, getattr(dist, name)))
        yield found


# "each" reduces shards with each microbatch, and replicas with the last one.
@pytest.mark.parametrize("sync", ["each", "auto"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
@on_ranks(4)
def test_number_of_reductions_per_step(kind: str, sync: str) -> None:
    """Check three steps of four microbatches: guarded at first, then replayed."""
    # DDP has one bucket until torch orders parameters, and then one per module.
    expected = [{"all-reduce": 1}, {"all-reduce": MODULES}, {"all-reduce": MODULES}]
    if kind != "ddp":
        scattered = MODULES * (MICROBATCHES if sync == "each" else 1)
        replicas = {"all-reduce": MODULES} if kind == "hsdp" else {}
        expected = [{"all-gather": 28, "reduce-scatter": scattered, **replicas}] * 3
    faults = Faults()
    stepper = Stepper(build(kind, [faults], {"norm": False}), faults, size=2, sync=sync)
    for step in range(3):
        batch = torch.randn(2 * MICROBATCHES, 4), torch.randn(2 * MICROBATCHES, 2)
        with counting() as found:
            result = stepper.train(step, batch)
        assert result.num_microbatches == MICROBATCHES
        assert found == expected[step]


def test_late_ddp_reduction_tries_no_size_twice(world2: World) -> None:
    results = world2.run(compare, "ddp", points(2)["last backward"], {"sync": "auto"})
    assert results[0]["attempts"] == 5


class Choosing(nn.Module):
    """Each row uses one of two equally large layers; rows of a microbatch use the same one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(4, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.layers[int(x[0, 0] > 0)](x).tanh())
        return output


def choosing_batch(ranks: int) -> tuple[Tensor, Tensor]:
    """Return two microbatches of two rows per rank, each of which uses one layer."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(4 * ranks, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(4 * ranks, 1, generator=generator, dtype=torch.float64)
    x[:, 0] = torch.tensor([-1.0, -1.0, 1.0, 1.0]).repeat(ranks)
    return x, y


@pytest.mark.parametrize(
    "sharded", [[], ["layers.0", "layers.1"]], ids=["in one module", "each by itself"]
)
@on_ranks(4)
def test_microbatches_with_different_parameters_reduce_separately(sharded: list[str]) -> None:
    """Torch alone would add up gradients at the same position."""
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    model, plain = Choosing(), Choosing()
    wrapped("hsdp", model, *map(model.get_submodule, sharded))
    x, y = choosing_batch(4)
    for start in range(0, 16, 2):
        part = slice(start, start + 2)
        (squared_error(plain(x[part]), y[part]) / 8).backward()
    step = another(model, microbatch_size=2)
    for _ in range(2):
        model.zero_grad()
        with counting() as found:
            step.backward((x[mine], y[mine]))
        assert gap(model, plain) <= 1e-12
    assert found["all-reduce"] > 1 + len(sharded), "with each microbatch"


@pytest.mark.parametrize(("option", "count"), [("", 1), ("coarse sums", 2), ("hook", 2)])
@on_ranks(4)
def test_replicas_reduce_each_microbatch_when_order_matters(option: str, count: int) -> None:
    """Count in a second step with two microbatches of a model with one wrapped module."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if option == "coarse sums" else None)
    model = wrapped("hsdp", nn.Linear(4, 2), mp_policy=policy)
    if option == "hook":
        model.set_all_reduce_hook(lambda gradient: None)
    step = another(model, microbatch_size=2)
    for _ in range(2):
        with counting() as found:
            step.backward((torch.randn(4, 4), torch.randn(4, 2)))
    assert found["all-reduce"] == count


def require_recovered(world: World, kind: str, plan: Sequence[Fault], **options: Any) -> Any:
    results = recovery.require_recovered(world, kind, plan, sync="auto", **options)
    assert len({tuple(result["syncs"]) for result in results}) == 1
    return results[0]


@pytest.mark.parametrize(
    "point", mostly_in_sweeps(sorted(points(2).keys() - {"successive batches"}), few=4)
)
def test_whole_gradients_are_dropped_before_size_shrinks(world2: World, point: str) -> None:
    found = require_recovered(world2, "fsdp", points(2)[point])
    assert found["sizes"][:3] == [16, 16, 16], "the one to start from"
    assert (found["syncs"][2] is Sync.REPLICAS_LAST) is (point != "evaluation")
    assert found["attempts"] == 5


@pytest.mark.parametrize(("kind", "size"), [("fsdp", 2), ("hsdp", 4)])
def test_smaller_size_holds_whole_gradients_again(
    worlds: Callable[[int], World], kind: str, size: int
) -> None:
    plan = [
        Fault(1, "backward", step=1, microbatch=1, layer=1),
        Fault(1, "scatter", step=1, layer=1),  # occurs only in reductions per microbatch
        Fault(1, "backward", step=2, microbatch=2, layer=1),
    ]
    found = require_recovered(worlds(size), kind, plan)
    assert found["sizes"][:3] == [16, 8, 8]
    assert found["syncs"] == [Sync.LAST, Sync.LAST, Sync.REPLICAS_LAST]


HALF = {"bf16": True, "norm": False}


@pytest.mark.parametrize(
    ("option", "sync"),
    [
        (HALF, Sync.LAST),
        ({"rare": True}, Sync.LAST),
        # Unused parameters have zeros in bf16, and the others add up in fp32.
        ({**HALF, "rare": True}, Sync.EACH),
    ],
    ids=str,
)
def test_other_models_recover_with_whole_gradients(
    world2: World, option: dict[str, Any], sync: Sync
) -> None:
    found = require_recovered(world2, "fsdp", points(2)["last backward"], **option)
    assert found["syncs"][0] is sync


def masked_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """Without targets, the loss and its gradients are NaN."""
    counts = targets >= 0
    return ((outputs[:, 0] - targets).square() * counts).sum() / counts.sum()


@pytest.mark.parametrize("empty", [0, 2])
@on_ranks()
def test_nan_of_empty_microbatch_stays_out_of_whole_gradients(empty: int) -> None:
    """One microbatch of the last rank has no target."""
    rank = dist.get_rank()
    x, y = (torch.cat([each, each, each]) for each in choosing_batch(1))
    x[:, 0], y = x[:, 0].abs(), y[:, 0].abs()  # all of them use the second layer
    y[6 + 2 * empty :][:2] = -1
    model, plain = Choosing(), Choosing()
    wrapped("fsdp", model, *model.layers)
    masked_mean(plain(x), y).backward()
    step = another(
        model,
        loss_fn=masked_mean,
        loss_average=lambda batch: int((batch[1] >= 0).sum()),
        microbatch_size=2,
        sync="auto",
    )
    step.backward((x[6 * rank :][:6], y[6 * rank :][:6]))
    assert step.ranks.synced is Sync.LAST
    assert gap(model, plain) <= 1e-12


@on_ranks()
def test_whole_gradients_are_held_only_with_enough_memory() -> None:
    """Take two steps of two microbatches; whole gradients need 2 MiB, and shards half of it."""
    plenty, scarce = 6600 * 1024, 5600 * 1024
    state = None
    for limit_bytes, resumes, failed, sync in (
        (plenty, False, [], Sync.LAST),
        (scarce, False, [16], Sync.REPLICAS_LAST),  # a fixed size fits without them
        (plenty, True, [], Sync.REPLICAS_LAST),  # as in the saved run
    ):
        torch.manual_seed(0)
        layers = [nn.Linear(256, 256, bias=False) for _ in range(8)]
        model = wrapped("fsdp", nn.Sequential(*layers), *layers)
        step = another(model, microbatch_size=16, memory_limit=limit_bytes, sync="auto")
        if resumes:
            assert state is not None
            step.load_state_dict(state)
        found: list[int] = []
        for _ in range(2):
            result = step.backward((torch.randn(32, 256), torch.randn(32, 256)))
            found += result.failed_sizes
            model.zero_grad()
        assert (step.microbatch_size, found, step.ranks.synced) == (16, failed, sync)
        state = step.state_dict()


def test_unknown_sync_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sync='late' is not known"):
        another(nn.Linear(2, 2), sync="late")


@on_ranks()
def test_batch_that_cannot_fit_keeps_whole_gradients() -> None:
    """No row of the batch fits."""
    model = wrapped("fsdp", Choosing())
    impossible = torch.zeros(())

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        if impossible or len(outputs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return squared_error(outputs, targets)

    step = another(model, loss_fn=loss_fn, microbatch_size="auto", sync="auto")
    x, y = choosing_batch(1)
    impossible.fill_(1)
    with pytest.raises(SampleTooLargeError):
        step.backward((x, y))
    impossible.fill_(0)
    step.backward((x, y))
    assert step.ranks.synced is Sync.LAST
