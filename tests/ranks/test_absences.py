"""When one rank fails or differs, the error names it in time, and no rank hangs."""

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from automicro import Microbatcher, SampleTooLargeError, Trainer
from automicro.errors import DesyncError
from automicro.features import Carry
from automicro.policy.auto import Halving
from automicro.ranks.guards import guard
from tests.ranks.faulty_models import Fault
from tests.ranks.jobs import fail, run_steps
from tests.ranks.world import on_ranks, world_of
from tests.ranks.wrapping import gap, raised, require_told, wrapped


def batch(rows: int = 4, rank: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return torch.randn(rows, 4, generator=generator), torch.arange(rows) % 2


class UnreadableError(RuntimeError):
    def __str__(self) -> str:
        raise TypeError("no text")


# Errors, and the text that other ranks get.
ERRORS: dict[str, tuple[Exception, str]] = {
    "lone surrogate": (
        ValueError("cannot decode caf\udce9.jpg"),
        r"rank 1: ValueError: cannot decode caf\udce9.jpg",
    ),
    "text that raises": (UnreadableError(), "rank 1: UnreadableError: <its text cannot be read>"),
    "long text": (ValueError("é" * 5000), "rank 1: ValueError: éééé"),
}


class Broken(Dataset[Any]):
    """Raises an error at one row."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise copy.copy(self.error)
        return torch.ones(4), index % 2


def trainer(data: Any, **options: Any) -> Trainer:
    return Trainer(
        nn.Linear(4, 2),
        DataLoader(data, batch_size=4),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        **{"parallel": "ddp", "device": "cpu", "progress": False, "seed": 0, **options},
    )


def forget_peers() -> None:
    """Reset the meeting state, as before the first job of a process."""
    guard._opened = None


def linear(**options: Any) -> Microbatcher:
    model = DistributedDataParallel(nn.Linear(4, 2))
    loss: Any = {} if "forward" in options else {"loss_fn": nn.CrossEntropyLoss()}
    return Microbatcher(model, **loss, **options)


def failing_on_rank_1(error: Exception, **options: Any) -> Callable[[], object]:
    """Return a step whose forward fails on rank 1."""

    def forward(model: Any, batch: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise copy.copy(error)
        return F.cross_entropy(model(batch[0]), batch[1])

    found = linear(forward=forward, loss_average="samples", probe=False, **options)
    return lambda: found.backward(batch())


@pytest.mark.parametrize(
    ("name", "where"),
    [*((name, "fit") for name in ERRORS), ("lone surrogate", "forward"), ("long text", "eval")],
)
@on_ranks()
def test_error_on_one_rank_reaches_others_whatever_its_text(name: str, where: str) -> None:
    forget_peers()
    error, told = ERRORS[name]
    data = {
        "fit": lambda: trainer(Broken(error)),
        "eval": lambda: trainer(
            TensorDataset(*batch(8)), eval_dataloader={"b": DataLoader(Broken(error), batch_size=4)}
        ),
    }
    work = data[where]().fit if where in data else failing_on_rank_1(error)
    own = "this happened on rank 1 of 2" if name != "text that raises" else ""
    require_told(work, type(error).__name__, told=told, own=own)


@pytest.mark.parametrize(
    ("what", "options", "rank", "again"),
    [
        ("Microbatcher", {"batchnorm": "no"}, 0, False),
        ("Microbatcher", {"precision": "fp16"}, 1, True),
        ("Trainer", {"max_duration": "no"}, 0, False),
        ("Trainer", {"max_duration": "no"}, 1, True),
        ("Trainer", {"eval_interval": "no"}, 1, False),
    ],
    ids=str,
)
@on_ranks()
def test_failing_constructor_does_not_hang_other_ranks(
    what: str, options: dict[str, Any], rank: int, again: bool
) -> None:
    if not again:
        forget_peers()
    own = options if dist.get_rank() == rank else {}

    def work() -> None:
        if what == "Trainer":
            trainer(TensorDataset(*batch(8)), **own).fit()
        else:
            linear(**own).backward(batch())

    require_told(work, "ValueError", rank=rank, told=f"rank {rank}: ValueError: ")
    own = {}
    work()  # all ranks can continue


DDP, FSDP = "after it was wrapped in DistributedDataParallel", "after fully_shard was applied to it"


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        *(("ddp", change, DDP) for change in ("add", "replace", "thaw")),
        *(("fsdp", change, FSDP) for change in ("add", "replace")),
        ("fsdp", "thaw", ""),  # FSDP supports this
    ],
)
@on_ranks()
def test_layer_added_after_wrapping_is_refused(kind: str, change: str, said: str) -> None:
    forget_peers()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if change == "thaw":
        net[0].requires_grad_(False)
    found = Microbatcher(wrapped(kind, net), loss_fn=nn.CrossEntropyLoss())
    found.backward(batch())
    if change == "add":
        net.append(nn.Linear(2, 2))
    elif change == "replace":
        net[1] = nn.Linear(4, 2)
    elif change == "thaw":
        net[0].requires_grad_(True)
    error, text = raised(lambda: found.backward(batch()))
    assert error == ("ValueError" if said else "")
    assert said in text


@pytest.mark.parametrize("size", ["auto", 2, None])
@on_ranks()
def test_healthy_rank_names_rank_without_memory_for_one_row(size: Any) -> None:
    forget_peers()
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    work = failing_on_rank_1(error, microbatch_size=size)
    if dist.get_rank() == 0:
        with pytest.raises(SampleTooLargeError, match="rank 1"):
            work()
    else:
        with pytest.raises(torch.OutOfMemoryError):
            work()


@pytest.mark.parametrize(
    ("order", "unused"), [("before", False), ("twice", True), ("in inference", False)]
)
@on_ranks()
def test_no_grad_forward_combines_with_training_forward(order: str, unused: bool) -> None:
    def target_of(model: Any, x: Tensor) -> Tensor:
        with torch.inference_mode() if order == "in inference" else torch.no_grad():
            found = [model(x * 1.1) for _ in range(1 + (order == "twice"))]
        return torch.stack(found).mean(0).clone()

    def forward(model: Any, batch: Any) -> Tensor:
        x, y = batch
        target = target_of(model, x) if order == "before" else None
        outputs = model(x)
        target = target_of(model, x) if target is None else target
        loss: Tensor = F.cross_entropy(outputs, y) + (outputs - target).square().mean()
        return loss

    forget_peers()
    torch.manual_seed(0)
    net, rank = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2).eval()), dist.get_rank()
    plain, x = copy.deepcopy(net), torch.randn(8, 4)
    y = torch.arange(8) % 2
    model = DistributedDataParallel(net, find_unused_parameters=unused)
    found = Microbatcher(model, forward=forward, loss_average="samples", microbatch_size=2)
    for _ in range(3):
        net.zero_grad()
        plain.zero_grad()
        found.backward((x[4 * rank :][:4], y[4 * rank :][:4]))
        forward(plain, (x, y)).backward()
        assert gap(net, plain) < 1e-6


@on_ranks()
def test_evaluating_on_only_one_rank_is_named() -> None:
    forget_peers()
    found = linear()
    found.backward(batch())
    with pytest.raises(DesyncError) as caught:
        (found.evaluate if dist.get_rank() == 0 else found.backward)(batch())
    assert "beginning to evaluate a batch" in str(caught.value)
    assert "beginning to train on a batch" in str(caught.value)


class BreaksAfterAgreement(Halving):
    """Raises when ranks agree on sizes and read its unit."""

    @property
    def multiple_of(self) -> int:
        raise ValueError("no unit")

    @multiple_of.setter
    def multiple_of(self, unit: int) -> None: ...


@on_ranks()
def test_error_between_agreement_and_attempt_hangs_no_rank() -> None:
    """The model has buffers, which DDP broadcasts at this point."""
    forget_peers()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    policy = BreaksAfterAgreement() if dist.get_rank() == 0 else Halving()
    found = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), microbatch_size=policy)
    told = "rank 0: ValueError: no unit"
    require_told(lambda: found.backward(batch()), "ValueError", rank=0, told=told)


# Errors that a retry cannot fix: all ranks stop within seconds and name the cause


@pytest.mark.parametrize(
    ("kind", "where"), [("ddp", ("between", 1, 1)), ("fsdp", ("backward", 2, 1))]
)
@on_ranks()
def test_all_ranks_name_rank_with_user_error(kind: str, where: tuple[str, int, int]) -> None:
    name, step, microbatch = where
    plan = [Fault(1, name, step=step, microbatch=microbatch, layer=1, error=ValueError)]
    told = "rank 1: ValueError: a mistake of the user's"
    require_told(lambda: run_steps(kind, plan, {}), "ValueError", told=told, own="on rank 1 of 2")


@pytest.mark.parametrize(
    ("kind", "size", "victim", "step"),
    [
        ("fsdp", 2, 1, 1),
        *(
            pytest.param(kind, 3, victim, step, marks=pytest.mark.slow)
            for kind, victim, step in itertools.product(("ddp", "fsdp"), (0, 2), (0, 2))
        ),
    ],
)
def test_killed_peer_is_named(kind: str, size: int, victim: int, step: int) -> None:
    plan = [Fault(victim, "backward", step=step, microbatch=1, layer=1, error=SystemExit)]
    with world_of(size) as world:
        world.start(fail, kind, plan, roll_call_seconds=0.5 if size == 2 else None)
        survivors = world.results()
    assert isinstance(survivors.pop(victim), EOFError)
    for found in survivors:
        assert found["kind"] == "PeerLostError", found
        named = re.search(rf"ranks? ([\d, ]+) of {size} gone or stuck", found["text"])
        assert named is not None, found["text"]
        assert str(victim) in named[1].split(", ")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks()
def test_each_rank_keeps_outputs_and_state_of_its_rows(kind: str) -> None:
    torch.manual_seed(0)
    inner, rank = nn.GRU(3, 4, batch_first=True).double(), dist.get_rank()
    twin = copy.deepcopy(inner)

    def forward(model: Any, batch: Any, carry: Any) -> dict[str, Any]:
        outputs, carry = model(batch, carry)
        return {"loss": outputs.square().mean(), "outputs": outputs, "carry": carry}

    options: dict[str, Any] = {"loss_average": "samples", "features": [Carry(1)]}
    found = Microbatcher(wrapped(kind, inner), forward=forward, microbatch_size=2, **options)
    rows, carry, expected = (5, 3)[rank], None, None
    for has_rows in (True, True, rank == 0):
        given = torch.randn(rows, 6, 3).double() if has_rows else None
        result = found.backward(given, carry=carry, return_outputs=True)
        if given is not None:
            with torch.no_grad():
                outputs, expected = twin(given, expected)
            carry = result.carry
            assert carry.shape[1] == rows
            assert float((result.outputs["outputs"] - outputs).abs().max()) < 1e-12
            assert float((carry - expected).abs().max()) < 1e-12
