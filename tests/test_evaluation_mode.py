"""Evaluation mode is temporary: modules return to their modes, and merged weights still work."""

import pytest
import torch
from torch import Tensor, nn

from automicro import Trainer
from automicro.modules import evaluation_mode
from tests.step.test_named_state import data


class Merging(nn.Module):
    """A layer that merges its small weights into the large one in evaluation mode, like LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(3, 4).double(), requires_grad=False)
        self.small = nn.Parameter(torch.full((3, 4), 0.5).double())
        self.merged = False
        self.modes: list[bool] = []

    def train(self, mode: bool = True) -> "Merging":
        self.modes.append(mode)
        super().train(mode)
        if mode == self.merged:
            self.large.data += -self.small.data if mode else self.small.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.large if self.merged else self.large + self.small).T


def test_evaluation_of_many_batches_changes_mode_once() -> None:
    layer = Merging()
    batches = [data(seed) for seed in range(5)]
    trainer = Trainer(
        layer, eval_dataloader=batches, loss_fn=nn.MSELoss(), progress=False, device="cpu"
    )
    layer.modes.clear()
    trainer.eval()
    assert layer.modes == [False, True]
    trainer.predict(batches)
    assert layer.modes == [False, True] * 2


def test_modes_are_restored_after_failed_evaluation() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(4, 3).double().eval())
    with pytest.raises(RuntimeError, match="mine"), evaluation_mode([model]):
        raise RuntimeError("mine")
    assert [each.training for each in model.modules()] == [True, True, False]
