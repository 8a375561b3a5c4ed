"""Reservation of memory for future optimizer state."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import MemoryBudget, Microbatcher
from automicro.optimizer.reservation import OptimizerReservation, predict_step_memory

GRANULE = 512  # rounding of a budget
NAMES = ["AdamW", "Adam", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax", "Rprop"]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {"foreach": index % 2 == 0}) for index, name in enumerate([*NAMES, "ASGD"])),
    *((name, {"fused": True}) for name in ("AdamW", "Adagrad")),
    ("Adam", {"amsgrad": True, "foreach": False}),
    *(("SGD", {"momentum": 0.9, how: True}) for how in ("foreach", "fused")),
    ("SGD", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adafactor", {"foreach": False}),
]


def build(name: str, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 3))
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
        model.parameters(), lr=0.01, **options
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, optimizer


def rounded(sizes: list[int]) -> int:
    return sum(-(-size // GRANULE) * GRANULE for size in sizes)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_prediction_equals_allocation_of_first_step(name: str, options: dict[str, Any]) -> None:
    model, optimizer = build(name, options)
    stateless = [each for each in model.parameters() if each not in optimizer.state]
    before = [each.detach().clone() for each in model.parameters()]
    random_state = torch.get_rng_state()
    predicted = predict_step_memory(optimizer, stateless) if stateless else None
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(map(torch.equal, before, model.parameters()))
    assert len(optimizer.state) == len(before) - len(stateless)
    if name in ("ASGD", "Adafactor"):  # their steps read values back
        assert predicted is not None
        assert "_local_scalar_dense" in str(predicted.unknown)
        return
    budget = MemoryBudget(None).track(model, optimizer)
    resident_bytes = budget.allocated_bytes
    with budget:
        optimizer.step()
    gc.collect()
    grown_bytes = budget.allocated_bytes - resident_bytes
    assert grown_bytes == (rounded(predicted.state_bytes) if predicted else 0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128), nn.Dropout(0.1), nn.ReLU(), nn.Linear(128, 1))


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(512, 128), torch.randn(512, 1)) for _ in range(3)]


def train(limit_bytes: int | None, reserved: bool) -> tuple[list[int], list[Tensor]]:
    given = batches()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.MSELoss(),
        optimizer=optimizer if reserved else None,
    )
    ooms = []
    with MemoryBudget(limit_bytes).track(model):
        for batch in given:
            ooms.append(microbatcher.backward(batch).ooms)
            optimizer.step()
            optimizer.zero_grad()
    return ooms, [each.detach() for each in model.parameters()]


def test_reservation_moves_oom_from_second_batch_to_first() -> None:
    model, batch = network(), batches()[0]
    with MemoryBudget(None).track(model) as budget:
        Microbatcher(model, loss_fn=nn.MSELoss()).backward(batch)
    limit = budget.peak_bytes + 16 * 1024  # AdamW's state is 130 KiB
    assert train(limit, False)[0] == [0, 1, 0]
    assert train(limit, True)[0] == [1, 0, 0]
    assert all(map(torch.equal, train(None, True)[1], train(None, False)[1]))


def test_deleted_microbatcher_frees_its_placeholders() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), optimizer=optimizer)
    microbatcher.backward(batches()[0])
    reservation = microbatcher._engine.reservation
    assert reservation is not None
    placeholders = [weakref.ref(each) for each in reservation._placeholders]
    assert len(placeholders) > 0
    del microbatcher, reservation
    gc.collect()
    assert all(each() is None for each in placeholders)
    optimizer.step()


def two_heads() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, OptimizerReservation]:
    used, seldom = nn.Linear(64, 40), nn.Linear(64, 40)
    optimizer = torch.optim.Adam([*used.parameters(), *seldom.parameters()])
    return used, seldom, optimizer, OptimizerReservation(optimizer)


def run_batch(reservation: OptimizerReservation, *parts: nn.Module) -> int:
    """Reserve for one batch in which some parts get a gradient; return the reserved bytes."""
    reservation.begin()
    for part in parts:
        for parameter in part.parameters():
            parameter.grad = torch.ones_like(parameter)
    reservation.prepare()
    reservation.commit()
    return reservation.reserved_bytes


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def test_parameters_without_gradient_get_no_reservation() -> None:
    used, _, optimizer, reservation = two_heads()
    reservation.begin()
    assert len(reservation.upcoming_bytes) >= 2 * 4
    of_both = run_batch(reservation, used)
    step(optimizer)
    for _ in range(2):
        reservation.begin()
        assert reservation.reserved_bytes == 0
        assert reservation.upcoming_bytes == []
        assert run_batch(reservation, used) == 0
        step(optimizer)
    assert of_both == 2 * sum(
        value.nbytes
        for parameter in used.parameters()
        for value in optimizer.state[parameter].values()
    )


def test_late_first_gradient_is_reserved_for_at_commit() -> None:
    used, seldom, optimizer, reservation = two_heads()
    of_both = run_batch(reservation, used)
    step(optimizer)
    of_one = run_batch(reservation, used, seldom)
    assert of_one == of_both // 2
    # A second batch for the same step reserves nothing twice; a retry reserves from the start.
    assert run_batch(reservation, used, seldom) == of_one
    reservation.roll_back()
    reservation.begin()
    assert reservation.reserved_bytes == of_one
    step(optimizer)
    assert (reservation.reserved_bytes, reservation.upcoming_bytes) == (0, [])
    assert run_batch(reservation, used, seldom) == 0


def test_unused_part_gets_no_reservation() -> None:
    class WithUnusedPart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.unused = network(), nn.Linear(128, 512)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x)
            return out

    def peaks(model: nn.Module) -> list[int]:
        optimizer = torch.optim.AdamW(model.parameters())
        microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), optimizer=optimizer)
        found = []
        for batch in batches():
            with MemoryBudget(None).track(model, optimizer) as budget:
                microbatcher.backward(batch)
            found.append(budget.peak_bytes)
            step(optimizer)
        return found

    one, two = peaks(network()), peaks(WithUnusedPart())
    parameters_bytes = (128 + 1) * 512 * 4
    assert [b - a for a, b in zip(one, two, strict=True)] == [
        3 * parameters_bytes + 2 * GRANULE,  # with both moments, and each parameter's step count
        parameters_bytes,
        parameters_bytes,
    ]
