"""Microbatcher features for other trainers: additional state, averages, ranks, closures."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import LossAverageError, MemoryBudget, Microbatcher
from automicro.features import StepState
from tests.models import Mlp, pair
from tests.outside import Outside


class Host:
    """The state of a typical host: numbers, series by name, a tensor."""

    def __init__(self) -> None:
        self.calls, self.total = 0, torch.zeros(2)
        self.series: dict[str, list[float]] = {}

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        self.series.setdefault("loss", []).append(1.0)
        self.total += 1
        if len(batch[0]) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("call", ["backward", "evaluate"])
def test_failed_attempt_rolls_back_state_of_caller(call: str) -> None:
    host = Host()
    total = host.total
    step = Microbatcher(
        Mlp(),
        forward=lambda model, batch: host.forward(model, batch),
        loss_average="samples",
        features=[StepState([host])],
        probe=False,
    )
    result = getattr(step, call)(pair())
    assert result.ooms == 1
    assert host.calls == result.num_microbatches
    assert host.series == {"loss": [1.0] * result.num_microbatches}
    assert host.total is total
    assert total.tolist() == [result.num_microbatches] * 2


def test_probe_error_refuses_wrong_loss_average() -> None:
    model = Mlp()
    step = Microbatcher(
        model,
        forward=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
        microbatch_size=3,
        probe="error",
    )
    with pytest.raises(LossAverageError, match=r"the gradient of .* is off by"):
        step.backward(pair())
    assert all(each.grad is None for each in model.parameters())


def test_step_in_closure_can_use_reserved_memory() -> None:
    """The optimizer calls its closure after its hooks, and creates state during the call."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    step = Microbatcher(
        model, loss_fn=nn.MSELoss(), optimizer=optimizer, microbatch_size=4, probe=False
    )
    batch = torch.randn(4, 64), torch.randn(4, 64)

    def closure() -> float:
        loss = float(step.backward(batch).loss)
        if released:
            step.release_reservation()
        return loss

    weights = 64 * 65 * 4
    with MemoryBudget(6 * weights + weights // 2):
        released = False
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step(closure)
        step.release_reservation()
        optimizer.state.clear()
        model.zero_grad()
        released = True
        optimizer.step(closure)


@pytest.mark.parametrize("sets_to_none", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_forward_may_clear_released_gradients(sets_to_none: bool, fails: bool) -> None:
    model, kept = nn.Linear(4, 2), nn.Parameter(torch.ones(2))
    outside = Outside(rows=())

    def loss_of(batch: Tensor) -> Any:
        return (model(batch) * kept).square().mean()

    def forward(model: nn.Module, batch: Tensor) -> Any:
        loss = loss_of(batch)
        outside.rows += (len(batch),)
        if len(batch) == 6:
            model.zero_grad(set_to_none=sets_to_none)
        return loss

    def backward(loss: Tensor) -> None:
        if fails and outside.rows[-1] == 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss.backward()

    options: Any = {"backward": backward, "loss_average": "samples", "probe": False}
    step = Microbatcher(model, forward=forward, **options)
    for parameter in (*model.parameters(), kept):
        parameter.grad = torch.ones_like(parameter)
    batch = torch.randn(6, 4)
    expected = torch.autograd.grad(loss_of(batch), [model.weight, kept])
    step.release_gradients()
    step.backward(batch)
    assert outside.rows == ((6, 3, 3) if fails else (6,))
    torch.testing.assert_close(model.weight.grad, expected[0])
    torch.testing.assert_close(kept.grad, 1 + expected[1])
    step.backward(batch[:3])  # the release covered only one batch
    assert outside.rows[-1] == 3


def test_declared_average_of_model_works_with_custom_forward() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(20, (4, 6))
    labels = tokens.masked_fill(torch.rand(4, 6) < 0.4, -100)
    batch = {"input_ids": tokens, "labels": labels}
    whole = model(**batch).loss
    whole.backward()
    gradient = model.transformer.wte.weight.grad.clone()
    model.zero_grad()
    forward = lambda model, batch: model(**batch).loss  # noqa: E731
    step = Microbatcher(model, forward=forward, loss_average="model", microbatch_size=1)
    assert torch.allclose(step.backward(batch).loss, whole.detach())
    assert torch.allclose(model.transformer.wte.weight.grad, gradient, atol=1e-6)
    assert step.loss_average_is == "declared"
