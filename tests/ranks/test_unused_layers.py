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
from automicro.trainer.parallel import find_blocks
from tests.ranks.faulty_models import Faults, Net, tied
from tests.ranks.steps import another, squared_error
from tests.ranks.world import on_ranks
from tests.ranks.wrapping import gap, raised, wrapped

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
    x[{"last": slice(8), "first": slice(4, 12), "none": slice(12)}.get(order, slice(0)), 0] *= -1
    return x, y


def plain_step(model: nn.Module, orders: Sequence[str]) -> None:
    """Take a step of one process that has the rows of all ranks."""
    parts = [rows_of(rank, order) for rank, order in enumerate(orders)]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    squared_error(model(x), y).backward()


DDP: dict[str, dict[str, Any]] = {
    "find unused": {"find_unused_parameters": True},
    "bucket views": {"gradient_as_bucket_view": True},
}


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
    net, plain = Choosing(reentrant=kind == "reentrant"), Choosing()
    if kind == "hooked":
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient * 1)
    model: Any
    if kind == "sharded":
        model = wrapped("fsdp", net, net.first)
        model.set_reduce_scatter_unused_params(True)  # so that unused layers reduce, too
    else:
        model = DistributedDataParallel(net, bucket_cap_mb=0.0001, **DDP.get(kind, {}))
    microbatcher = another(model, microbatch_size="auto" if halves else 4)
    if kind == "frozen later":
        net.never.requires_grad_(False)
    plain_step(plain, orders)
    rank, nones, ranks = dist.get_rank(), set[str](), microbatcher.ranks
    for step in range(steps):
        net.most_rows = 4 if step in fails_in and rank == 0 else 10**9
        before = ranks.num_votes  # type: ignore[attr-defined]
        microbatcher.backward(rows_of(rank, orders[rank]))
        votes = ranks.num_votes - before  # type: ignore[attr-defined]
        nones |= {name for name, each in net.named_parameters() if each.grad is None}
        assert gap(net, plain) <= 1e-12
        model.zero_grad()
    return nones, votes


# The position of rows that need the rare layer, for each rank.
ORDERS = [("first", "last"), ("first", "first"), ("none", "last"), ("none", "none")]
KINDS = ["plain", "bucket views", "hooked", "reentrant", "frozen later", "find unused", "sharded"]


@pytest.mark.parametrize("orders", ORDERS, ids=" and ".join)
@on_ranks()
def test_layer_unused_by_last_microbatch_is_trained_exactly(orders: tuple[str, str]) -> None:
    left_out = {"never.bias", "never.weight"}
    left_out |= {"rare.bias", "rare.weight"} if orders == ("none", "none") else set()
    assert require_exact("plain", orders)[0] == left_out, "as in one process"


@pytest.mark.slow
@pytest.mark.parametrize("orders", ORDERS, ids=" and ".join)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fails_in", [(), (0,), (1, 2)], ids=str)
@on_ranks(3)
def test_rare_layer_is_trained_exactly_in_each_wrapper(
    kind: str, orders: tuple[str, str], fails_in: tuple[int, ...]
) -> None:
    require_exact(kind, (*orders, "first"), fails_in=fails_in, halves=bool(fails_in))


@pytest.mark.parametrize("kind", KINDS[1:])
@on_ranks()
def test_rare_layer_is_trained_exactly_with_options(kind: str) -> None:
    require_exact(kind, ("first", "last"), steps=2, halves=True, fails_in=[1])


@on_ranks()
def test_only_globally_unused_parameter_costs_another_vote() -> None:
    kinds = ("frozen later", "plain", "find unused")
    votes = [require_exact(kind, ("last", "first"))[1] for kind in kinds]
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
    assert {(each.attempts, each.failed_sizes, each.microbatch_size) for each in results} == {
        (1, (), 6)
    }


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *((kind, case) for kind in ("ddp", "fsdp") for case in ("unknown", "known")),
        ("ddp", "frozen"),  # it does not communicate
    ],
)
@on_ranks()
def test_second_wrapped_model_must_be_declared(kind: str, case: str) -> None:
    """A declared model also recovers from running out of memory."""
    first, second = (wrapped(kind, nn.Linear(4, width).double()) for width in (4, 2))

    def forward(model: Any, microbatch: Any) -> Tensor:
        x, y = microbatch
        hidden = model(x)
        if case == "known" and dist.get_rank() == 1 and len(x) > 2:
            hidden.register_hook(run_out_of_memory)
        with torch.no_grad() if case == "frozen" else contextlib.nullcontext():
            output = second(hidden)
        return squared_error(output + hidden[:, :2], y)

    modules = [second] if case == "known" else []
    microbatcher = another(first, microbatch_size="auto", forward=forward, modules=modules)
    rows = rows_of(dist.get_rank(), "first")
    _, text = raised(lambda: [microbatcher.backward(rows) for _ in range(2)])
    assert "modules=[…]" in text if case == "unknown" else text == ""


def test_blocks_with_tied_weights_are_not_wrapped_separately() -> None:
    net = tied(Net([Faults()]))
    assert find_blocks(net) == [net.blocks[1]]


# The next test leaves this world unusable, so it comes last


@on_ranks()
def test_shard_unused_by_one_rank_is_named_without_waiting() -> None:
    (kind, text), results = skip_shard([1])
    assert kind == "DesyncError"
    assert "all-gather of 'rare'" in text
    assert "set_reduce_scatter_unused_params" in text
    assert [each.attempts for each in results] == [1, 1]
