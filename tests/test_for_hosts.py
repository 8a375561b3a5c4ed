"""Microbatcher features for other trainers: additional state, averages, ranks, closures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import LossAverageError, MemoryBudget, Microbatcher
from automicro.features import StepState
from tests import models
from tests.models import Mlp
from tests.outside import Outside

x, y = models.x(), models.y()


def limited(told: list[int], then: Callable[[], Any] = lambda: None) -> Callable[..., Tensor]:
    """Return a forward that records its rows, and runs out of memory with more than six."""

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        told.append(len(inputs))
        then()
        if len(inputs) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return F.cross_entropy(model(inputs), targets)

    return forward


class Host:
    """The state of a typical host: numbers, series by name, a tensor."""

    def __init__(self) -> None:
        self.calls = 0
        self.series: dict[str, list[float]] = {}
        self.total = torch.zeros(2)
        self.told: list[int] = []

    def count(self) -> None:
        self.calls += 1
        self.series.setdefault("loss", []).append(1.0)
        self.total += 1


@pytest.mark.parametrize("evaluates", [False, True])
def test_failed_attempt_rolls_back_state_of_caller(evaluates: bool) -> None:
    host = Host()
    total = host.total
    step = Microbatcher(
        Mlp(),
        forward=limited(host.told, host.count),
        loss_average="samples",
        microbatch_size="auto",
        eval_microbatch_size="auto",
        features=[StepState([host])],
        probe=False,
        batchnorm="ignore",
    )
    result = step.evaluate((x, y)) if evaluates else step.backward((x, y))
    assert result.ooms == 1
    assert host.calls == result.num_microbatches
    assert host.series == {"loss": [1.0] * result.num_microbatches}
    assert host.total is total
    assert total.tolist() == [result.num_microbatches] * 2


@pytest.mark.parametrize("within", [False, True])
def test_evaluation_in_inference_mode_gives_same_results(within: bool) -> None:
    model = Mlp()
    step = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), eval_microbatch_size=3)
    expected = step.evaluate((x, y), return_outputs=True)
    with torch.inference_mode():
        batch = (x.clone(), y.clone()) if within else (x, y)
        result = step.evaluate(batch, return_outputs=True)
    assert result.loss is not None
    assert expected.loss is not None
    assert torch.equal(result.loss, expected.loss)
    assert torch.equal(result.outputs, expected.outputs)
    # Tensors left by the evaluation can still be used in training.
    step.backward((x, y))


def test_inference_tensors_can_be_evaluated_on_simulated_device() -> None:
    model = Mlp()
    step = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), eval_microbatch_size=3)
    expected = step.evaluate((x, y), return_outputs=True)
    with torch.inference_mode(), MemoryBudget("64MiB"):
        result = step.evaluate((x.clone(), y.clone()), return_outputs=True)
    assert torch.equal(result.outputs, expected.outputs)


def test_probe_error_refuses_wrong_loss_average() -> None:
    step = Microbatcher(
        Mlp(),
        forward=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
        microbatch_size=3,
        probe="error",
    )
    with pytest.raises(LossAverageError, match=r"the gradient of .* is off by"):
        step.backward((x, y))
    assert all(each.grad is None for each in step._modules[0].parameters())


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
    model = nn.Linear(4, 2)
    kept = nn.Parameter(torch.ones(2))
    outside = Outside(rows=())

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = (model(batch) * kept).square().mean()
        outside.rows += (len(batch),)
        if len(batch) == 6:
            model.zero_grad(set_to_none=sets_to_none)
        return loss

    def backward(loss: Tensor) -> None:
        if fails and outside.rows[-1] == 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss.backward()

    step = Microbatcher(
        model, forward=forward, backward=backward, loss_average="samples", probe=False
    )
    for parameter in (*model.parameters(), kept):
        parameter.grad = torch.ones_like(parameter)
    batch = torch.randn(6, 4)
    expected = torch.autograd.grad((model(batch) * kept).square().mean(), [model.weight, kept])
    step.release_gradients()
    step.backward(batch)
    assert model.weight.grad is not None
    assert kept.grad is not None
    assert outside.rows == ((6, 3, 3) if fails else (6,))
    torch.testing.assert_close(model.weight.grad, expected[0])
    torch.testing.assert_close(kept.grad, 1 + expected[1])
    step.backward(batch[:3])  # the release covered only one batch
    assert outside.rows[-1] == 3


def test_declared_average_of_model_works_with_custom_forward() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(20, (4, 6))
    labels = tokens.masked_fill(torch.rand(4, 6) < 0.4, -100)
    batch = {"input_ids": tokens, "labels": labels}
    found = {}
    for size in (4, 1):
        model.zero_grad()
        step = Microbatcher(
            model.eval(),
            forward=lambda model, batch: model(**batch).loss,
            loss_average="model",
            microbatch_size=size,
        )
        loss = step.backward(batch).loss
        gradient = model.transformer.wte.weight.grad
        assert gradient is not None
        found[size] = loss, gradient.clone()
        assert step.loss_average_is == "declared"
    assert torch.allclose(found[1][0], found[4][0])
    assert torch.allclose(found[1][1], found[4][1], atol=1e-6)
