"""Layers that some microbatches leave out: exact training or an error, and no rank hangs."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from automicro import StepResult
from automicro.ranks.interface import Report
from automicro.ranks.votes import Votes
from automicro.trainer.parallel import find_blocks
from tests.ranks.faulty_models import points
from tests.ranks.simulated import SimulatedWorld
from tests.ranks.steps import another, squared_error
from tests.ranks.test_recovery import require_recovered
from tests.ranks.world import World, on_ranks
from tests.ranks.wrapping import gap, raised, whole, wrapped
from tests.sweeps import mostly_in_sweeps

ROWS = 12


class Choosing(nn.Module):
    """Has a layer for rows that begin with a positive number, and a layer that is never used."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rare, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.reentrant = reentrant
        self.most_rows = 10**9
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x).tanh()
        is_rare = x[:, :1] > 0
        if is_rare.any():
            if self.reentrant:
                hidden = hidden + is_rare * checkpoint(self.rare, hidden, use_reentrant=True)
            else:
                hidden = hidden + is_rare * self.rare(hidden)
        if self.training and len(x) > self.most_rows:
            hidden.register_hook(run_out_of_memory)
        output: Tensor = self.last(hidden)
        return output


def run_out_of_memory(_: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


def rows_of(rank: int, order: str) -> tuple[Tensor, Tensor]:
    """Return a batch of a rank; the order tells which rows need the rare layer."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, 2, generator=generator, dtype=torch.float64)
    x[:, 0] = x[:, 0].abs() + 0.1
    if order == "last":
        x[: ROWS * 2 // 3, 0] *= -1
    elif order == "first":
        x[ROWS // 3 :, 0] *= -1
    elif order == "none":
        x[:, 0] *= -1
    return x, y


def options_for(kind: str) -> dict[str, Any]:
    return {
        "find unused": {"find_unused_parameters": True},
        "bucket views": {"gradient_as_bucket_view": True},
    }.get(kind, {})


def plain_gradients(orders: Sequence[str]) -> dict[str, Tensor | None]:
    """Return the gradients of one process that has the rows of all ranks."""
    model = Choosing()
    parts = [rows_of(rank, order) for rank, order in enumerate(orders)]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    squared_error(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def require_exact(
    kind: str,
    orders: Sequence[str],
    *,
    halves: bool = False,
    fails_in: Sequence[int] = (),
    steps: int = 3,
) -> tuple[set[str], int]:
    """Check gradients against one process, in steps where rank 0 may fail.

    Returns the parameters without a gradient, and the votes of the last step.
    """
    net = Choosing(reentrant=kind == "reentrant")
    if kind == "hooked":
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient * 1)
    model: Any
    if kind == "sharded":
        model = wrapped("fsdp", net, net.first)
        model.set_reduce_scatter_unused_params(True)
    else:
        model = DistributedDataParallel(net, bucket_cap_mb=0.0001, **options_for(kind))
    microbatcher = another(model, microbatch_size="auto" if halves else 4)
    if kind == "frozen later":
        net.never.requires_grad_(False)
    rank, wanted, nones = dist.get_rank(), plain_gradients(orders), set()
    ranks: Any = microbatcher.ranks
    for step in range(steps):
        net.most_rows = 4 if step in fails_in and rank == 0 else 10**9
        before = ranks.num_votes
        microbatcher.backward(rows_of(rank, orders[rank]))
        votes = ranks.num_votes - before
        for name, parameter in net.named_parameters():
            if parameter.grad is None:
                nones.add(name)
                continue
            want = wanted[name]
            gap = whole(parameter.grad) - (0 if want is None else want)
            assert float(gap.abs().max()) <= 1e-12
        model.zero_grad()
    return nones, votes


# The position of rows that need the rare layer, for each rank.
ORDERS = [("first", "last"), ("first", "first"), ("none", "last"), ("none", "none")]
KINDS = ["plain", "bucket views", "hooked", "reentrant", "frozen later", "find unused"]


@pytest.mark.parametrize("orders", ORDERS, ids=" and ".join)
@on_ranks()
def test_layer_unused_by_last_microbatch_is_trained_exactly(
    orders: tuple[str, str],
) -> None:
    left_out = {"never.bias", "never.weight"}
    left_out |= {"rare.bias", "rare.weight"} if orders == ("none", "none") else set()
    assert require_exact("plain", orders)[0] == left_out, "as in one process"


@pytest.mark.slow
@pytest.mark.parametrize("orders", ORDERS, ids=" and ".join)
@pytest.mark.parametrize("kind", [*KINDS, "sharded"])
@pytest.mark.parametrize("fails_in", [(), (0,), (1, 2)], ids=str)
@on_ranks(3)
def test_rare_layer_is_trained_exactly_in_each_wrapper(
    kind: str, orders: tuple[str, str], fails_in: tuple[int, ...]
) -> None:
    require_exact(kind, (*orders, "first"), fails_in=fails_in, halves=bool(fails_in))


# The sharded layer also reduces when it is unused.
@pytest.mark.parametrize("kind", [*KINDS, "sharded"])
@on_ranks()
def test_rare_layer_is_trained_exactly_with_options(kind: str) -> None:
    require_exact(kind, ("first", "last"), steps=2)


@pytest.mark.parametrize("kind", mostly_in_sweeps(["ddp", "fsdp"], quick=["ddp"]))
def test_model_with_unused_layers_recovers(world2: World, kind: str) -> None:
    require_recovered(world2, kind, points(2)["two ranks"], rare=True)


@on_ranks()
def test_only_globally_unused_parameter_costs_another_vote() -> None:
    votes = [
        require_exact(kind, ("last", "first"))[1]
        for kind in ("frozen later", "plain", "find unused")
    ]
    assert votes == [3, 3, 2], "never is left out by both of the first"


@on_ranks()
def test_earlier_gradient_of_unused_parameter_is_kept() -> None:
    net = Choosing()
    microbatcher = another(DistributedDataParallel(net))
    earlier = net.never.weight.grad = torch.ones(4, 4, dtype=torch.float64)
    for _ in range(2):
        microbatcher.backward(rows_of(dist.get_rank(), "last"))
    assert net.never.weight.grad is earlier
    assert bool((earlier == 1).all())
    assert net.never.bias.grad is None


@on_ranks()
def test_forward_that_bypasses_wrapper_is_refused_in_first_step() -> None:
    def forward(model: Any, microbatch: Any) -> Tensor:
        return squared_error(model.module(microbatch[0]), microbatch[1])

    model = DistributedDataParallel(Choosing())
    microbatcher = another(model, forward=forward)
    _, text = raised(lambda: microbatcher.backward(rows_of(dist.get_rank(), "first")))
    assert "model.module(…)" in text
    assert all(parameter.grad is None for parameter in model.parameters()), "rolled back"


def skip_shard(ranks: Sequence[int]) -> tuple[tuple[str, str], list[StepResult]]:
    """Take steps with a sharded layer; from the third on, given ranks skip it in one microbatch."""
    net = Choosing()
    wrapped("fsdp", net, net.rare)
    microbatcher = another(net, microbatch_size=ROWS // 2)
    rank = dist.get_rank()
    results: list[StepResult] = []

    def work() -> None:
        for step in range(4):
            leaves_out = step >= 2 and rank in ranks
            results.append(microbatcher.backward(rows_of(rank, "first" if leaves_out else "all")))
            net.zero_grad()

    return raised(work), results


@on_ranks()
def test_shard_unused_by_all_ranks_keeps_microbatch_size() -> None:
    error, results = skip_shard([0, 1])
    assert error == ("", "")
    found = [(each.attempts, each.failed_sizes, each.microbatch_size) for each in results]
    assert found == [(1, (), 6)] * 4


@pytest.mark.parametrize(
    ("kind", "is_known", "is_frozen"),
    [
        *((kind, is_known, False) for kind in ("ddp", "fsdp") for is_known in (False, True)),
        ("ddp", False, True),  # it does not communicate
    ],
)
@on_ranks()
def test_second_wrapped_model_must_be_declared(kind: str, is_known: bool, is_frozen: bool) -> None:
    """A declared model also recovers from running out of memory."""
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
    models: list[Any] = [wrapped(kind, each) for each in (first, second)]

    def forward(model: Any, microbatch: Any) -> Tensor:
        x, y = microbatch
        hidden = model(x)
        if is_known and dist.get_rank() == 1 and len(x) > 2:
            hidden.register_hook(run_out_of_memory)
        with torch.no_grad() if is_frozen else contextlib.nullcontext():
            output = models[1](hidden)
        return squared_error(output + hidden[:, :2], y)

    modules = [models[1]] if is_known else []
    microbatcher = another(models[0], microbatch_size="auto", forward=forward, modules=modules)

    def work() -> None:
        for _ in range(2):
            microbatcher.backward(rows_of(dist.get_rank(), "first"))

    _, text = raised(work)
    assert text == "" if is_known or is_frozen else "modules=[…]" in text


class Tied(nn.Module):
    """Has blocks, two of which share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.layers[2][0].weight = self.layers[0][0].weight  # type: ignore[index]
        self.last = nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.last(x)
        return output


@on_ranks()
def test_blocks_with_tied_weights_are_not_wrapped_separately() -> None:
    plain, model = Tied(), Tied()
    blocks = find_blocks(model)
    assert blocks == [model.layers[1], model.layers[3]]
    wrapped("fsdp", model, *blocks)
    another(model).backward(rows_of(dist.get_rank(), "all"))
    parts = [rows_of(rank, "all") for rank in range(dist.get_world_size())]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    squared_error(plain(x), y).backward()
    assert gap(model, plain) <= 1e-12


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_ranks_find_globally_unused_parameters(world_size: int) -> None:
    world = SimulatedWorld(world_size)
    everywhere = {3, 40, 77}

    def work(rank: int) -> tuple[int, list[int]]:
        unused = [place in everywhere or place % (world_size + 1) == rank for place in range(80)]
        votes = Votes(world.exchange(rank))
        _, _, found = votes.commit(Report(), flag=False, unused=unused)
        return votes.count, [place for place, is_unused in enumerate(found) if is_unused]

    for count, found in world.run(work):
        assert count > 1
        expected = everywhere if world_size > 1 else everywhere | set(range(0, 80, 2))
        assert found == sorted(expected)


def test_one_rank_that_used_all_settles_in_one_vote() -> None:
    world = SimulatedWorld(2)

    def work(rank: int) -> tuple[int, bool]:
        votes = Votes(world.exchange(rank))
        _, _, unused = votes.commit(Report(), flag=False, unused=[rank == 1] * 3)
        return votes.count, any(unused)

    assert world.run(work) == [(1, False)] * 2


# The next test leaves this world unusable, so it comes last


@on_ranks()
def test_shard_unused_by_one_rank_is_named_without_waiting() -> None:
    (kind, text), results = skip_shard([1])
    assert kind == "DesyncError"
    assert "all-gather of 'rare'" in text
    assert "set_reduce_scatter_unused_params" in text
    assert [each.attempts for each in results] == [1, 1]
