"""A rank that is not like the others is named, soon, and keeps nobody waiting."""

import copy
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from automicro import Microbatcher, Trainer
from automicro.features import Carry
from automicro.policy.auto import Halving
from automicro.ranks.guards import guard
from tests.ranks.world import World
from tests.sweeps import mostly_in_sweeps


def end_of(work: Callable[[], object]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        work()
    except Exception as error:
        try:
            text = str(error)
        except Exception:
            text = "?"
        notes = getattr(error, "__notes__", [])
        end = {"kind": type(error).__name__, "text": "\n".join([text, *notes])}
    else:
        end = {"kind": "", "text": ""}
    # A lone surrogate cannot go home by a pipe.
    end["text"] = end["text"].encode(errors="backslashreplace").decode()
    return {**end, "seconds": time.perf_counter() - began}


def batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(rows, 4, generator=generator), torch.arange(rows) % 2


class UnreadableError(RuntimeError):
    def __str__(self) -> str:
        raise TypeError("no text")


ERRORS: dict[str, Exception] = {
    "a lone surrogate": ValueError("cannot decode caf\udce9.jpg"),
    "text that raises": UnreadableError(),
    "a long one": ValueError("é" * 5000),
}


class Broken(Dataset[Any]):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise self.error
        return torch.ones(4), index % 2


def trainer(data: Any, **options: Any) -> Trainer:
    return Trainer(
        nn.Linear(4, 2),
        DataLoader(data, batch_size=4),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        **{"parallel": "ddp", "device": "cpu", "progress": False, "seed": 0, **options},
    )


def fit_with_an_error(name: str) -> dict[str, Any]:
    guard._opened = None
    return end_of(lambda: trainer(Broken(copy.copy(ERRORS[name]))).fit())


def forward_with_an_error(name: str) -> dict[str, Any]:
    guard._opened = None
    model = DistributedDataParallel(nn.Linear(4, 2))

    def forward(model: Any, batch: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise copy.copy(ERRORS[name])
        return F.cross_entropy(model(batch[0]), batch[1])

    found = Microbatcher(model, forward=forward, loss_average="samples", probe=False)
    return end_of(lambda: found.backward(batch()))


def construct(what: str, options: dict[str, Any], *, rank: int, again: bool) -> dict[str, Any]:
    """A constructor that fails on one rank; the others go on to train.

    Args:
        what: ``"Microbatcher"`` or ``"Trainer"``.
        options: that one rank has.
        rank: which.
        again: whether ranks have met before.
    """
    if not again:
        guard._opened = None
    own = options if dist.get_rank() == rank else {}

    def work() -> None:
        if what == "Trainer":
            trainer(TensorDataset(*batch(8)), **own).fit()
        else:
            model = DistributedDataParallel(nn.Linear(4, 2))
            Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), **own).backward(batch())

    first = end_of(work)
    own = {}
    return {**first, "then": end_of(work)["kind"]}


def change_inside(kind: str, change: str) -> dict[str, Any]:
    """A model that changes after the first step, inside its wrapper."""
    guard._opened = None
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if change == "thaw":
        net[0].requires_grad_(False)
    model: Any = DistributedDataParallel(net) if kind == "ddp" else fully_shard(net)
    found = Microbatcher(model, loss_fn=nn.CrossEntropyLoss())
    found.backward(batch())
    if change == "add":
        net.append(nn.Linear(2, 2))
    elif change == "replace":
        net[1] = nn.Linear(4, 2)
    elif change == "thaw":
        net[0].requires_grad_(True)
    return end_of(lambda: found.backward(batch()))


def too_large(size: Any) -> dict[str, Any]:
    """One row does not fit on rank 1."""
    guard._opened = None
    model = DistributedDataParallel(nn.Linear(4, 2))

    def forward(model: Any, batch: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return F.cross_entropy(model(batch[0]), batch[1])

    found = Microbatcher(
        model, forward=forward, loss_average="samples", probe=False, microbatch_size=size
    )
    return end_of(lambda: found.backward(batch()))


def without_gradients(order: str, options: dict[str, Any], size: int) -> float:
    """A layer that batches do not use, and a forward without gradients; off one process's."""
    guard._opened = None
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.used(x)
            if x.sum() > 1e6:
                found = found + self.unused(x)
            return found

    net = Net()
    plain = copy.deepcopy(net)
    model = DistributedDataParallel(net, **options)

    def forward(model: Any, batch: Any) -> Tensor:
        x, y = batch
        if order == "before":
            with torch.no_grad():
                target = model(x * 1.1)
        outputs = model(x)
        if order == "after":
            with torch.no_grad():
                target = model(x * 1.1)
        if order == "twice":
            with torch.no_grad():
                target = (model(x * 1.1) + model(x * 1.1)) / 2
        if order == "in inference":
            with torch.inference_mode():
                target = model(x * 1.1)
            target = target.clone()
        loss: Tensor = F.cross_entropy(outputs, y) + (outputs - target.detach()).square().mean()
        return loss

    found = Microbatcher(model, forward=forward, loss_average="samples", microbatch_size=size)
    furthest = 0.0
    for _ in range(3):
        net.zero_grad()
        plain.zero_grad()
        found.backward(batch())
        rows = [
            torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
            for rank in range(dist.get_world_size())
        ]
        y = torch.arange(4).repeat(len(rows)) % 2
        forward(plain, (torch.cat(rows), y)).backward()
        gradient, expected = net.used.weight.grad, plain.used.weight.grad
        assert gradient is not None
        assert expected is not None
        furthest = max(furthest, float((gradient - expected).abs().max()))
        assert net.unused.weight.grad is None
    return furthest


def on_nodes(sizes: list[int]) -> int:
    """How many rows all ranks have, where each is told of another number of processes."""
    guard._opened = None
    os.environ["LOCAL_WORLD_SIZE"] = str(sizes[dist.get_rank()])
    try:
        model = DistributedDataParallel(nn.Linear(4, 2))
        found = Microbatcher(model, loss_fn=nn.CrossEntropyLoss())
        return found.backward(batch()).num_global_samples
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        guard._opened = None


def evaluate_alone() -> dict[str, Any]:
    """Rank 0 evaluates, and the others train on."""
    guard._opened = None
    model = DistributedDataParallel(nn.Linear(4, 2))
    found = Microbatcher(model, loss_fn=nn.CrossEntropyLoss())
    found.backward(batch())
    return end_of(lambda: (found.evaluate if dist.get_rank() == 0 else found.backward)(batch()))


class BreaksAfterAgreement(Halving):
    """A policy that cannot say its unit, which is asked for when sizes are agreed on."""

    @property
    def multiple_of(self) -> int:
        raise ValueError("no unit")

    @multiple_of.setter
    def multiple_of(self, unit: int) -> None: ...


def fail_after_agreement(rank: int) -> dict[str, Any]:
    """A rank fails between agreeing on a batch and its attempt; buffers have to be sent there."""
    guard._opened = None
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    policy = BreaksAfterAgreement() if dist.get_rank() == rank else Halving()
    found = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), microbatch_size=policy)
    return end_of(lambda: found.backward(batch()))


def carried_and_kept(kind: str) -> list[tuple[int, float, int]]:
    """Of three batches, the last of which one rank has none of: rows, difference, rows carried."""
    torch.manual_seed(0)
    inner = nn.GRU(3, 4, batch_first=True).double()
    twin = copy.deepcopy(inner)
    model: Any = DistributedDataParallel(inner) if kind == "ddp" else fully_shard(inner)

    def forward(model: Any, batch: Any, carry: Any) -> dict[str, Any]:
        outputs, carry = model(batch, carry)
        return {"loss": outputs.square().mean(), "outputs": outputs, "carry": carry}

    found = Microbatcher(
        model, forward=forward, loss_average="samples", features=[Carry(1)], microbatch_size=2
    )
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    carry = expected = None
    ends = []
    for last in (False, False, True):
        rows = (5, 3)[rank]
        given = torch.randn(rows, 6, 3, generator=generator).double()
        if last and rank == 1:
            found.backward(None)
            continue
        result = found.backward(given, carry=carry, return_outputs=True)
        with torch.no_grad():
            outputs, expected = twin(given, expected)
        difference = float((result.outputs["outputs"] - outputs).abs().max())
        carry = result.carry
        ends.append((len(result.outputs["outputs"]), difference, carry.shape[1]))
    return ends


@pytest.mark.parametrize("where", [fit_with_an_error, forward_with_an_error])
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_with_any_text_is_told(world2: World, name: str, where: Any) -> None:
    ends = world2.run(where, name)
    assert [end["kind"] for end in ends] == [
        "PeerFailedError",
        type(ERRORS[name]).__name__,
    ]
    said = {
        "a lone surrogate": r"rank 1: ValueError: cannot decode caf\udce9.jpg",
        "text that raises": "rank 1: UnreadableError: <its text cannot be read>",
        "a long one": "rank 1: ValueError: éééé",
    }
    assert said[name] in ends[0]["text"]


@pytest.mark.parametrize(
    "again", mostly_in_sweeps([False, True], quick=[False]), ids=["first", "again"]
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("Microbatcher", {"batchnorm": "no"}),
        ("Microbatcher", {"precision": "fp16"}),
        ("Trainer", {"max_duration": "no"}),
        ("Trainer", {"eval_interval": "no"}),
    ],
    ids=str,
)
def test_a_constructor_that_fails_keeps_nobody_waiting(
    world2: World, what: str, options: dict[str, Any], rank: int, again: bool
) -> None:
    ends = world2.run(construct, what, options, rank=rank, again=again)
    failed, other = ends[rank], ends[1 - rank]
    assert failed["kind"] == "ValueError"
    assert other["kind"] == "PeerFailedError"
    assert f"rank {rank}: ValueError: " in other["text"]
    assert [end["then"] for end in ends] == ["", ""], "they go on"
    assert max(end["seconds"] for end in ends) < 20


@pytest.mark.parametrize("change", ["add", "replace", "thaw"])
def test_a_layer_that_comes_into_ddp_later_is_refused(world2: World, change: str) -> None:
    for end in world2.run(change_inside, "ddp", change):
        assert end["kind"] == "ValueError"
        assert "after it was wrapped in DistributedDataParallel" in end["text"]


@pytest.mark.parametrize("change", ["add", "replace"])
def test_a_layer_that_comes_into_a_sharded_model_later_is_refused(
    world2: World, change: str
) -> None:
    for end in world2.run(change_inside, "fsdp", change):
        assert end["kind"] == "ValueError"
        assert "after fully_shard was applied to it" in end["text"]


def test_a_shard_may_be_thawed(world2: World) -> None:
    assert [end["kind"] for end in world2.run(change_inside, "fsdp", "thaw")] == ["", ""]


@pytest.mark.parametrize("size", ["auto", 2, None])
def test_a_healthy_rank_says_on_which_one_a_row_does_not_fit(world2: World, size: Any) -> None:
    ends = world2.run(too_large, size)
    assert ends[0]["kind"] == "SampleTooLargeError"
    assert "rank 1" in ends[0]["text"]


@pytest.mark.parametrize(
    ("order", "options"),
    mostly_in_sweeps(
        ["before", "after", "twice", "in inference"],
        [{}, {"find_unused_parameters": True}],
        quick=[("before", {}), ("twice", {"find_unused_parameters": True})],
    ),
    ids=str,
)
def test_a_forward_without_gradients_beside_one_with_them(
    world2: World, order: str, options: dict[str, Any]
) -> None:
    for size in (4, 2, 1):
        assert max(world2.run(without_gradients, order, options, size)) < 1e-6


@pytest.mark.parametrize(
    "sizes",
    mostly_in_sweeps(
        [[2, 2, 1], [1, 2, 2], [1, 1, 1], [3, 3, 3], [2, 2, 2]], quick=[[1, 2, 2], [3, 3, 3]]
    ),
    ids=str,
)
def test_nodes_of_any_sizes_meet(world3: World, sizes: list[int]) -> None:
    assert world3.run(on_nodes, sizes) == [12] * 3


def test_evaluating_on_one_rank_alone_is_named(world2: World) -> None:
    for end in world2.run(evaluate_alone):
        assert end["kind"] == "DesyncError"
        assert "beginning to evaluate a batch" in end["text"]
        assert "beginning to train on a batch" in end["text"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_between_agreement_and_attempt_keeps_nobody_waiting(
    world2: World, rank: int
) -> None:
    ends = world2.run(fail_after_agreement, rank)
    assert ends[rank]["kind"] == "ValueError"
    assert ends[1 - rank]["kind"] == "PeerFailedError"
    assert f"rank {rank}: ValueError: no unit" in ends[1 - rank]["text"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_rank_keeps_outputs_and_state_of_its_own_rows(world2: World, kind: str) -> None:
    first, second = world2.run(carried_and_kept, kind)
    assert [(rows, carried) for rows, _, carried in first] == [(5, 5)] * 3
    assert [(rows, carried) for rows, _, carried in second] == [(3, 3)] * 2
    assert max(difference for _, difference, _ in [*first, *second]) < 1e-12
