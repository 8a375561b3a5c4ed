"""A run that saves after each batch, and resumes from each of its checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from automicro import Trainer
from automicro.checkpoints.store import CheckpointConfig
from automicro.checkpoints.writing import list_checkpoints
from tests.trainer.runs import CLASSES, FEATURES, make_loader, make_trainer


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(FEATURES, CLASSES)


class Wrapped(nn.Module):
    """A linear model, as a base for models with additional state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(inputs)
        return outputs


class HoldsGenerator:
    """Adds noise from its own generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, values: Tensor) -> Tensor:
        return values + 0.3 * torch.randn(values.shape, generator=self.generator)


def trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    """Return a trainer with three batches of 16 rows per epoch that saves after each batch."""
    checkpoint = CheckpointConfig(
        folder=folder, interval="1ba", keep_last=None, resume=options.pop("resume", "auto")
    )
    loader = options.pop("train_dataloader", None) or make_loader(rows=48)
    settings = {"max_duration": "5ba", "probe": False, **options}
    return make_trainer(model, loader, checkpoint=checkpoint, **settings)


def check_resumes(
    make: Callable[[], nn.Module], folder: Path, *, options: Callable[[], dict[str, Any]] = dict
) -> None:
    """Resume from each checkpoint, and compare the end to the undisturbed run."""
    torch.manual_seed(7)
    whole = trainer(make(), folder / "whole", **options())
    summary = whole.fit()
    checkpoints = list_checkpoints(folder / "whole")[::-1]
    assert len(checkpoints) == 5
    for checkpoint in checkpoints[:-1]:
        torch.manual_seed(99)
        again = trainer(make(), folder / checkpoint.name, resume=checkpoint, **options())
        resumed = again.fit()
        expected = list(whole._run.model.parameters())
        for one, other in zip(again._run.model.parameters(), expected, strict=True):
            assert torch.equal(one, other), checkpoint.name
        assert resumed.train_metrics == summary.train_metrics, checkpoint.name
        assert resumed.eval_metrics == summary.eval_metrics, checkpoint.name
        assert resumed.samples == summary.samples, checkpoint.name
