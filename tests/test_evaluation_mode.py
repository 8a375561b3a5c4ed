"""Evaluation mode for a while: each module has its own mode again, and merged weights go on."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Microbatcher, Trainer
from automicro.modules import evaluation_mode
from tests.step.test_named_state import data


class Merging(nn.Module):
    """Adds its small weights to the large one in evaluation mode, as LoRA does."""

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


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda m: nn.ModuleDict({"it": m})])
@pytest.mark.parametrize("before", ["evaluate", "predict", "probe", "nothing"])
def test_weights_that_are_merged_go_on_learning(before: str, wrap: Any) -> None:
    layer = Merging()
    model = wrap(layer)
    forward = lambda m, b: nn.functional.mse_loss(layer(b[0]), b[1])  # noqa: E731
    x, y = data()
    nn.functional.mse_loss(layer(x), y).backward()
    expected, layer.small.grad = layer.small.grad, None
    options: dict[str, Any] = {"forward": forward}
    mb = Microbatcher(model, probe=before == "probe", microbatch_size=4, **options)
    if before in ("evaluate", "predict") and isinstance(model, nn.Sequential):
        mb.evaluate((x, y))
    mb.backward((x, y))
    assert not layer.merged
    assert layer.training
    torch.testing.assert_close(layer.small.grad, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(layer.large.data, torch.ones(3, 4).double(), rtol=0, atol=0)


def test_nothing_is_called_where_no_mode_changes() -> None:
    layer = Merging()
    layer.eval()
    calls = len(layer.modes)
    with evaluation_mode([layer]):
        assert layer.merged
    assert len(layer.modes) == calls
    with evaluation_mode([nn.Sequential(layer)]):
        pass
    assert layer.merged


def test_an_evaluation_of_many_batches_changes_modes_once() -> None:
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


class KeepsFrozen(nn.Sequential):
    """Overrides train(), as many do for BatchNorm."""

    def train(self, mode: bool = True) -> "KeepsFrozen":
        super().train(mode)
        self[0].eval()
        return self


def test_mixed_modes_come_back_exactly() -> None:
    shared = nn.Dropout()
    model: Any = nn.Sequential(
        KeepsFrozen(nn.BatchNorm1d(2), shared),
        nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), shared)),
        Merging(),
    )
    model[1].eval()
    model[1][1].train()
    model[0][0].training = True  # by hand, past the override
    shared.eval()
    before = [each.training for each in model.modules()]
    for _ in range(2):
        with evaluation_mode([model]):
            assert not model[0][0].training
            assert not shared.training
        assert [each.training for each in model.modules()] == before


def test_modes_come_back_where_an_evaluation_fails() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(4, 3).double().eval())
    with pytest.raises(RuntimeError, match="mine"), evaluation_mode([model]):
        raise RuntimeError("mine")
    assert [each.training for each in model.modules()] == [True, True, False]
