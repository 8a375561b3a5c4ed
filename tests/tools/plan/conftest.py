"""Fixtures to compare plans with real runs on a simulated device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from automicro import MemoryBudget, Microbatcher
from automicro.features import with_features


@pytest.fixture
def without_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan without kernel workspaces, which a simulated device does not see."""
    monkeypatch.setattr("automicro.tools.plan.kernels._workspace_bytes", lambda *_, **__: 0)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def real_peak(
    model: nn.Module, data: Any, size: int, *, loss_fn: Callable[..., Any] | None, **options: Any
) -> int:
    """Return the peak of the second batch at the last level, on a device without a limit."""
    optimizer = adam(model.parameters())
    with MemoryBudget(None) as budget:
        budget.track(model)
        microbatcher = Microbatcher(
            model, loss_fn=loss_fn, optimizer=optimizer, microbatch_size=size, probe=False,
            batchnorm="ignore", **with_features(options),
        )  # fmt: skip
        last = microbatcher._levels[-1]
        microbatcher._train.applying = lambda level: last.applied()  # type: ignore[method-assign]
        for _ in range(2):
            budget.reset_peak()
            microbatcher.backward(data)
            optimizer.step()
            optimizer.zero_grad()
        return budget.peak_bytes
