"""Steps of the optimizer: clipping, half precision and its scaler, and memory that runs out."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import MemoryBudget, Microbatcher, OptimizerStepError, Trainer
from automicro.features import Optimization
from automicro.optimizer.reservation import OptimizerReservation
from automicro.optimizer.step import GradientScaler, clip_gradients, step_optimizer
from tests.sweeps import mostly_in_sweeps
from tests.torture.engine.faults import Boom, Fault, FaultMode
from tests.torture.engine.subject import freeze

CPU = torch.device("cpu")
LOSS = nn.CrossEntropyLoss()
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"foreach": False}),
    ("Adam", {"fused": True}),
]
Batch = tuple[Tensor, Tensor]


def network(*, depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    if depth == 1:
        return nn.Sequential(nn.Linear(8, 3))
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def build(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
        model.parameters(), lr=0.1, **options
    )
    return optimizer


def batches(overflowing: int | None = None, rows: int = 8) -> list[Batch]:
    torch.manual_seed(1)
    given = [(torch.randn(rows, 8), torch.randint(3, (rows,))) for _ in range(4)]
    if overflowing is not None:
        given[overflowing][0].mul_(1000)  # the loss stays finite, its scaled gradient does not
    return given


def train_by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: list[Batch], max_norm: float | None
) -> torch.amp.GradScaler:
    """Run the loop of torch's documentation."""
    scaler = torch.amp.GradScaler("cpu")
    for inputs, targets in given:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = LOSS(model(inputs), targets)
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
    return scaler


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    given: list[Batch],
    max_norm: float | None = None,
    **options: Any,
) -> tuple[GradientScaler, list[bool]]:
    scaler, steps = GradientScaler(CPU), []
    backward: Any = {"loss_fn": LOSS, "precision": "fp16", "backward": scaler.backward}
    microbatcher = Microbatcher(model, optimizer=optimizer, **backward, **options)
    for batch in given:
        optimizer.zero_grad()
        microbatcher.backward(batch)
        if max_norm is not None:
            scaler.unscale(optimizer)
            clip_gradients(optimizer, max_norm, CPU)
        steps.append(step_optimizer(optimizer, CPU, scaler=scaler))
    return scaler, steps


def with_gradients(
    steps: int = 0, name: str = "AdamW", *, depth: int = 2, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, GradientScaler]:
    """Return a model with scaled gradients after some steps."""
    model = network(depth=depth)
    optimizer, scaler = build(name, model, **options), GradientScaler(CPU)
    for number, (inputs, targets) in enumerate(batches()[: steps + 1]):
        if number:
            step_optimizer(optimizer, CPU, scaler=scaler)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = LOSS(model(inputs), targets)
        scaler.backward(loss)
    return model, optimizer, scaler


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_is_bit_identical_to_torch(max_norm: float) -> None:
    (ours, optimizer, _), (theirs, _, _) = with_gradients(), with_gradients()
    norm = clip_gradients(optimizer, max_norm, CPU)
    assert norm.equal(nn.utils.clip_grad_norm_(theirs.parameters(), max_norm))
    gradients = [[p.grad for p in model.parameters()] for model in (ours, theirs)]
    assert freeze(gradients[0]) == freeze(gradients[1])


def test_trainer_reports_half_clipped_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def clip_half(parameters: list[nn.Parameter], max_norm: float) -> None:
        assert parameters[0].grad is not None
        parameters[0].grad.mul_(0.5)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", clip_half)
    model = network()
    before, clipping = freeze(model.state_dict()), [Optimization(grad_clip_norm=1.0)]
    trainer = Trainer(
        model, batches()[:1], loss_fn=LOSS, optimizer=torch.optim.SGD, features=clipping,
        progress=False,
    )  # fmt: skip
    with pytest.raises(OptimizerStepError, match="clear the gradients and skip this batch"):
        trainer.fit()
    assert freeze(model.state_dict()) == before


@pytest.mark.parametrize("overflowing", [0, 2])
@pytest.mark.parametrize("max_norm", mostly_in_sweeps([None, 0.1], quick=[0.1]))
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_steps_match_loop_with_torch_scaler(
    name: str, options: dict[str, Any], max_norm: float | None, overflowing: int
) -> None:
    ours, theirs = network(), network()
    our_optimizer, their_optimizer = build(name, ours, **options), build(name, theirs, **options)
    given = batches(overflowing)
    scaler, steps = train(ours, our_optimizer, given, max_norm, microbatch_size=None)
    their_scaler = train_by_hand(theirs, their_optimizer, given, max_norm)
    found = [[each.state_dict() for each in (ours, our_optimizer, scaler)]]
    found += [[each.state_dict() for each in (theirs, their_optimizer, their_scaler)]]
    assert freeze(found[0]) == freeze(found[1])
    assert steps == [index != overflowing for index in range(4)]
    assert scaler.scale == 2.0**15


def test_oom_in_attempt_changes_neither_bits_nor_scale() -> None:
    peaks, states, given = [], [], batches(rows=512)
    for size in (256, 512):
        model = network()
        with MemoryBudget(None).track(model) as budget:
            # Probes of the whole batch need memory, too.
            train(model, build("AdamW", model), given, 0.1, microbatch_size=size, probe=False)
        peaks.append(budget.peak_bytes)
        states.append(freeze(model.state_dict()))
    model = network()
    with MemoryBudget(sum(peaks) // 2).track(model) as budget:
        scaler, steps = train(model, build("AdamW", model), given, 0.1, probe=False)
    assert budget.num_ooms == 1
    assert (scaler.scale, all(steps)) == (2.0**16, True)
    assert freeze(model.state_dict()) == states[0] != states[1]


@pytest.mark.parametrize("steps", mostly_in_sweeps([0, 1], quick=[0]))
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_step_oom_raises_named_error_and_is_not_retried(
    name: str, options: dict[str, Any], steps: int
) -> None:
    for is_scaled in (False, True):
        if is_scaled and options != {"foreach": True}:
            continue

        def step(plan: list[Fault], is_scaled: bool = is_scaled) -> Any:
            _, optimizer, scaler = with_gradients(steps, name, depth=1, **options)
            begun: list[int] = []
            optimizer.register_step_pre_hook(lambda *_: begun.append(1))
            with FaultMode(plan) as mode:
                step_optimizer(optimizer, CPU, scaler=scaler if is_scaled else None)
            assert len(begun) <= 1
            return mode

        names = step([]).names
        assert (names[-1] == "aten._amp_update_scale_.default") is is_scaled
        for index, after in itertools.product(range(len(names)), (False, True)):
            is_last = is_scaled and index == len(names) - 1
            words = "updating the loss scale ran out of memory" if is_last else rf"^{name}\.step"
            words = words if is_last or not is_scaled else ""  # or dividing the gradients
            with pytest.raises(OptimizerStepError, match=f"{words}.*half applied"):
                step([Fault(index, after)])


@pytest.mark.parametrize("kind", ["boom", "interrupt"])
def test_other_errors_are_propagated(kind: str) -> None:
    _, optimizer, _ = with_gradients()
    with FaultMode([Fault(1, kind=kind)]) as mode, pytest.raises((Boom, KeyboardInterrupt)) as it:
        step_optimizer(optimizer, CPU)
    assert it.value is mode.foreign[0]


def test_training_continues_after_skipping_half_unscaled_batch() -> None:
    _, optimizer, scaler = with_gradients()
    with FaultMode() as mode:
        scaler.unscale(optimizer)
    model, optimizer, scaler = with_gradients()
    with (
        FaultMode([Fault(mode.num_operations - 1, after=True)]),
        pytest.raises(OptimizerStepError, match=r"half applied.*skip this batch"),
    ):
        scaler.unscale(optimizer)
    optimizer.zero_grad()
    scaler.forget()
    scaler.backward(LOSS(model(torch.ones(2, 8)), torch.tensor([0, 1])))
    assert step_optimizer(optimizer, CPU, scaler=scaler)


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_first_step_keeps_reservation(fused: bool) -> None:
    model = nn.Linear(8, 4, bias=False)
    optimizer, scaler = build("Adam", model, fused=fused), GradientScaler(CPU)
    reservation = OptimizerReservation(optimizer)
    held: list[tuple[int, int]] = []  # before and after each step
    for overflows in (True, True, False, False):
        reservation.begin()
        scaler.backward(model.weight.sum() * (float("inf") if overflows else 1))
        reservation.prepare()
        reservation.commit()
        before = reservation.reserved_bytes
        assert step_optimizer(optimizer, CPU, scaler=scaler) is not overflows
        optimizer.zero_grad()
        held.append((before, reservation.reserved_bytes))
    full = held[0][0]
    assert full > 2 * 8 * 4 * 4
    assert held == [(full, full), (full, full), (full, 0), (0, 0)]


def test_fused_step_oom_removes_scaler_attributes() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.Adam([weight], fused=True), GradientScaler(CPU)
    before = set(vars(optimizer))
    for plan in ([], [Fault(3)]):
        scaler.backward(weight.sum())
        scaler.unscale(optimizer)
        with FaultMode(plan) as mode, contextlib.suppress(OptimizerStepError):
            step_optimizer(optimizer, CPU, scaler=scaler)
    assert mode.names[3] == "aten._fused_adam_.default"
    assert set(vars(optimizer)) == before


def test_scaler_state_survives_a_skipped_batch_and_can_be_loaded() -> None:
    _, optimizer, scaler = with_gradients(steps=1)
    before = scaler.state_dict()
    assert before["_growth_tracker"] == 1
    scaler.unscale(optimizer)
    optimizer.zero_grad()
    scaler.forget()
    assert scaler.state_dict() == before
    other = GradientScaler(CPU, init_scale=1.0)
    other.load_state_dict(before)
    assert other.state_dict() == before
    with pytest.raises(ValueError, match=r"lacks \['_growth_tracker'.*Pass what GradientScaler"):
        other.load_state_dict({"scale": 2.0})


def test_step_without_gradients_has_no_effect() -> None:
    weight = nn.Parameter(torch.ones(2))
    scaler = GradientScaler(CPU)
    assert step_optimizer(torch.optim.SGD([weight]), CPU, scaler=scaler)
    assert (weight.tolist(), scaler.scale) == ([1.0, 1.0], 2.0**16)


def test_half_precision_needs_a_scaler_and_whole_parameters() -> None:
    with pytest.raises(ValueError, match=r"backward=lambda loss: scaler\.scale\(loss\)\.backward"):
        Microbatcher(network(), loss_fn=LOSS, precision="fp16")
    with pytest.raises(ValueError, match="precision='half' is not known; use one of fp32"):
        Microbatcher(network(), loss_fn=LOSS, precision="half")
    weight, scaler = nn.Parameter(torch.ones(2, dtype=torch.float16)), GradientScaler(CPU)
    scaler.backward(weight.sum())
    with pytest.raises(ValueError, match=r"Call model\.float\(\) before the optimizer is built"):
        scaler.unscale(torch.optim.SGD([weight]))
