"""Gradient clipping matches torch, and a half-finished one is reported."""

import pytest
import torch
from torch import nn

from automicro import Trainer
from automicro.errors import OptimizerStepError
from automicro.features import Optimization
from automicro.optimizer.step import clip_gradients

CPU = torch.device("cpu")


def make_optimizer() -> torch.optim.Optimizer:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.grad.clone() for p in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_is_bit_identical_to_torch(max_norm: float) -> None:
    ours, theirs = make_optimizer(), make_optimizer()
    norm = clip_gradients(ours, max_norm, CPU)
    expected = nn.utils.clip_grad_norm_(theirs.param_groups[0]["params"], max_norm)
    assert norm.equal(expected)
    assert all(map(torch.equal, gradients(ours), gradients(theirs)))


def test_trainer_reports_half_clipped_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def clip_half(parameters: list[nn.Parameter], max_norm: float) -> None:
        assert parameters[0].grad is not None
        parameters[0].grad.mul_(0.5)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", clip_half)
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    batch = (torch.randn(4, 3), torch.randn(4, 2))
    trainer = Trainer(
        model,
        [batch],
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        features=[Optimization(grad_clip_norm=1.0)],
        progress=False,
    )
    with pytest.raises(OptimizerStepError, match="clear the gradients and skip this batch"):
        trainer.fit()
    assert model.weight.equal(before)
