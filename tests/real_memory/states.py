"""A run, and everything in it that a step may change, as bytes that compare exactly."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro import Microbatcher


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model in training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    microbatcher: Microbatcher
    metrics: Any
    batches: list[Any]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def values(run: Run) -> dict[str, Any]:
    """Parameters, gradients, buffers, generators, optimizer, metrics and batches."""
    found: dict[str, Any] = {}
    for name, parameter in run.model.named_parameters():
        found[f"parameter {name}"] = _freeze(parameter)
        found[f"gradient {name}"] = _freeze(parameter.grad)
    for name, buffer in run.model.named_buffers():
        found[f"buffer {name}"] = _freeze(buffer)
    for name, module in run.model.named_modules():
        found[f"mode {name}"] = module.training
    found["python"] = random.getstate()
    found["numpy"] = _freeze(np.random.get_state())
    found["torch"] = _freeze(torch.get_rng_state())
    found["optimizer"] = _freeze(run.optimizer.state_dict())
    found["batches"] = _freeze(run.batches)
    names = [*getattr(run.metrics, "_defaults", {}), "_update_count", "rows"]
    found["metrics"] = {name: _freeze(getattr(run.metrics, name, None)) for name in names}
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what differs."""
    return [name for name in {**one, **other} if one.get(name, ...) != other.get(name, ...)]


def _freeze(value: Any) -> Any:
    """A value that is equal only to a bit-identical one, and does not change any more."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {key: _freeze(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_freeze(each) for each in value]
    return value
