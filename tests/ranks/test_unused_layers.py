"""Layers that not every microbatch uses: trained exactly, or refused; nobody waits."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from automicro.ranks.interface import Report
from automicro.ranks.votes import Votes
from automicro.trainer.parallel import find_blocks
from tests.ranks.faulty_models import points
from tests.ranks.simulated import SimulatedWorld
from tests.ranks.steps import another, squared_error
from tests.ranks.test_recovery import require_recovered
from tests.ranks.world import World, world_of
from tests.ranks.wrapping import furthest, raised, whole, whole_gradients, wrapped
from tests.sweeps import mostly_in_sweeps

ROWS = 12


class Choosing(nn.Module):
    """Has a layer for the rows that begin with a positive number, and one that nothing uses."""

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
    """A batch of a rank, where the layer is for every third row: sorted, or all, or none."""
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


def expected(orders: Sequence[str]) -> dict[str, Tensor | None]:
    """The gradients of one process that has the rows of all."""
    model = Choosing()
    parts = [rows_of(rank, order) for rank, order in enumerate(orders)]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    squared_error(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def train_where_a_layer_is_left_out(
    kind: str,
    orders: Sequence[str],
    *,
    halves: bool = False,
    fails_in: Sequence[int] = (),
    steps: int = 3,
) -> dict[str, Any]:
    """How far gradients are from those of one process, of steps where rank 0 may fail."""
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
    rank, wanted = dist.get_rank(), expected(orders)
    worst, nones, votes, attempts = 0.0, set(), [], []
    for step in range(steps):
        net.most_rows = 4 if step in fails_in and rank == 0 else 10**9
        before = microbatcher.ranks.num_votes  # type: ignore[attr-defined]
        attempts.append(microbatcher.backward(rows_of(rank, orders[rank])).attempts)
        votes.append(microbatcher.ranks.num_votes - before)  # type: ignore[attr-defined]
        for name, parameter in net.named_parameters():
            if parameter.grad is None:
                nones.add(name)
                continue
            want = wanted[name]
            found = whole(parameter.grad)
            worst = max(worst, float((found - (0 if want is None else want)).abs().max()))
        model.zero_grad()
    return {"worst": worst, "nones": sorted(nones), "votes": votes, "attempts": attempts}


def keep_an_earlier_gradient() -> list[bool]:
    """Whether a gradient from before outlives steps that do not use its parameter."""
    net = Choosing()
    model = DistributedDataParallel(net)
    microbatcher = another(model)
    earlier = net.never.weight.grad = torch.ones(4, 4, dtype=torch.float64)
    for _ in range(2):
        microbatcher.backward(rows_of(dist.get_rank(), "last"))
    return [
        net.never.weight.grad is earlier,
        bool((earlier == 1).all()),
        net.never.bias.grad is None,
    ]


def go_past_the_wrapper() -> list[str]:
    """What is said, and which parameters have a gradient then."""

    def forward(model: Any, microbatch: Any) -> Tensor:
        return squared_error(model.module(microbatch[0]), microbatch[1])

    model = DistributedDataParallel(Choosing())
    microbatcher = another(model, forward=forward)
    _, text = raised(lambda: microbatcher.backward(rows_of(dist.get_rank(), "first")))
    return [text, *(name for name, p in model.named_parameters() if p.grad is not None)]


def use_a_second_model(kind: str, *, known: bool, frozen: bool, fails: bool = False) -> str:
    """Train a model through a second one, which also has its own wrapper."""
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
    models: list[Any] = []
    for each in (first, second):
        models.append(wrapped(kind, each))

    def forward(model: Any, microbatch: Any) -> Tensor:
        x, y = microbatch
        hidden = model(x)
        if fails and dist.get_rank() == 1 and len(x) > 2:
            hidden.register_hook(run_out_of_memory)
        with torch.no_grad() if frozen else contextlib.nullcontext():
            output = models[1](hidden)
        return squared_error(output + hidden[:, :2], y)

    modules = [models[1]] if known else []
    microbatcher = another(models[0], microbatch_size="auto", forward=forward, modules=modules)

    def work() -> None:
        for _ in range(2):
            microbatcher.backward(rows_of(dist.get_rank(), "first"))

    return raised(work)[1]


def leave_a_shard_out(ranks: Sequence[int]) -> dict[str, Any]:
    """Three steps with a sharded layer; in the last some ranks' second microbatch lacks it."""
    net = Choosing()
    wrapped("fsdp", net, net.rare)
    microbatcher = another(net, microbatch_size=ROWS // 2)
    rank = dist.get_rank()
    results = []

    def work() -> None:
        for step in range(4):
            leaves_out = step >= 2 and rank in ranks
            x, y = rows_of(rank, "first" if leaves_out else "all")
            results.append(microbatcher.backward((x, y)))
            net.zero_grad()

    kind, text = raised(work)
    return {
        "kind": kind,
        "text": text,
        "attempts": [each.attempts for each in results],
        "failed_sizes": [each.failed_sizes for each in results],
        "sizes": [each.microbatch_size for each in results],
    }


def shard_tied_blocks() -> float:
    """How far gradients are from one process, of a model two blocks of which share a weight."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
        layers[2][0].weight = layers[0][0].weight
        return nn.Sequential(nn.ModuleList(layers), nn.Linear(4, 2)).double()

    class Run(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = build()

        def forward(self, x: Tensor) -> Tensor:
            layers: Any = self.parts[0]
            for layer in layers:
                x = layer(x)
            output: Tensor = self.parts[1](x)
            return output

    plain, model = Run(), Run()
    blocks = find_blocks(model)
    layers: Any = model.parts[0]
    assert blocks == [layers[1], layers[3]]
    wrapped("fsdp", model, *blocks)
    another(model).backward(rows_of(dist.get_rank(), "all"))
    parts = [rows_of(rank, "all") for rank in range(dist.get_world_size())]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    squared_error(plain(x), y).backward()
    plain_gradients = [each.grad for each in plain.parameters() if each.grad is not None]
    return furthest(whole_gradients(model), plain_gradients)


# Where the rows of each rank that need the layer stand.
ORDERS = [("first", "last"), ("first", "first"), ("none", "last"), ("none", "none")]
KINDS = ["plain", "bucket views", "hooked", "reentrant", "frozen later", "find unused"]


def require_exact(world: World, kind: str, orders: tuple[str, ...], **options: Any) -> list[Any]:
    results = world.run(train_where_a_layer_is_left_out, kind, orders, **options)
    for result in results:
        assert result["worst"] <= 1e-12
    return results


@pytest.mark.parametrize("orders", ORDERS, ids=" and ".join)
def test_a_layer_that_a_last_microbatch_leaves_out_is_trained_exactly(
    world2: World, orders: tuple[str, str]
) -> None:
    for result in require_exact(world2, "plain", orders):
        left_out = {"never.bias", "never.weight"}
        left_out |= {"rare.bias", "rare.weight"} if orders == ("none", "none") else set()
        assert set(result["nones"]) == left_out, "as in one process"


@pytest.mark.slow
@pytest.mark.parametrize("orders", ORDERS, ids=" and ".join)
@pytest.mark.parametrize("kind", [*KINDS, "sharded"])
@pytest.mark.parametrize("fails_in", [(), (0,), (1, 2)], ids=str)
def test_it_is_trained_exactly_however_it_is_wrapped(
    world3: World, kind: str, orders: tuple[str, str], fails_in: tuple[int, ...]
) -> None:
    require_exact(world3, kind, (*orders, "first"), fails_in=fails_in, halves=bool(fails_in))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_trained_exactly_with_options(world2: World, kind: str) -> None:
    require_exact(world2, kind, ("first", "last"), steps=2)


def test_a_sharded_layer_is_trained_exactly_where_torch_reduces_unused_ones(world2: World) -> None:
    require_exact(world2, "sharded", ("first", "last"))


@pytest.mark.parametrize("kind", mostly_in_sweeps(["ddp", "fsdp"], quick=["ddp"]))
def test_a_model_that_leaves_layers_out_recovers(world2: World, kind: str) -> None:
    require_recovered(world2, kind, points(2)["two ranks"], rare=True)


def test_only_a_parameter_that_no_rank_uses_costs_a_further_vote(world2: World) -> None:
    used = require_exact(world2, "frozen later", ("last", "first"))[0]["votes"]
    never = require_exact(world2, "plain", ("last", "first"))[0]["votes"]
    assert (used[-1], never[-1]) == (3, 3), "never is left out here by both"
    assert require_exact(world2, "find unused", ("last", "first"))[0]["votes"][-1] == 2


def test_an_earlier_gradient_outlives_steps_that_do_not_use_its_parameter(world2: World) -> None:
    assert world2.run(keep_an_earlier_gradient) == [[True, True, True]] * 2


def test_a_forward_past_the_wrapper_is_refused_in_the_first_step(world2: World) -> None:
    for text, *with_gradients in world2.run(go_past_the_wrapper):
        assert "model.module(…)" in text
        assert with_gradients == [], "rolled back"


def test_a_shard_that_a_rank_leaves_out_is_named_and_not_waited_for() -> None:
    with world_of(2) as world:  # it cannot go on
        for result in world.run(leave_a_shard_out, [1]):
            assert result["kind"] == "DesyncError"
            assert "all-gather of 'rare'" in result["text"]
            assert "set_reduce_scatter_unused_params" in result["text"]
            assert result["attempts"] == [1, 1]


def test_a_shard_that_all_ranks_leave_out_takes_no_smaller_microbatches(world2: World) -> None:
    for result in world2.run(leave_a_shard_out, [0, 1]):
        assert result["text"] == ""
        assert result["attempts"] == [1] * 4
        assert result["failed_sizes"] == [()] * 4
        assert result["sizes"] == [6] * 4


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_second_wrapped_model_has_to_be_known(world2: World, kind: str) -> None:
    for text in world2.run(use_a_second_model, kind, known=False, frozen=False):
        assert "modules=[…]" in text
    assert world2.run(use_a_second_model, kind, known=True, frozen=False, fails=True) == ["", ""]


def test_a_second_model_that_communicates_with_nobody_may_be_unknown(world2: World) -> None:
    assert world2.run(use_a_second_model, "ddp", known=False, frozen=True) == ["", ""]


def test_blocks_with_tied_weights_are_left_to_the_whole_model(world2: World) -> None:
    assert max(world2.run(shard_tied_blocks)) <= 1e-12


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_ranks_find_what_none_of_them_used(world_size: int) -> None:
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


def test_one_rank_that_used_all_settles_it_in_one_vote() -> None:
    world = SimulatedWorld(2)

    def work(rank: int) -> tuple[int, bool]:
        votes = Votes(world.exchange(rank))
        _, _, unused = votes.commit(Report(), flag=False, unused=[rank == 1] * 3)
        return votes.count, any(unused)

    assert world.run(work) == [(1, False)] * 2
