"""Everything that a step may change, as bytes that compare exactly."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.torture.subjects import Run


def freeze(value: Any) -> Any:
    """A value that is equal only to a bit-identical one, and does not change any more."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {key: freeze(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [freeze(each) for each in value]
    return value


def values(run: Run) -> dict[str, Any]:
    """Parameters, gradients, buffers, generators, optimizer, metrics and batches."""
    found: dict[str, Any] = {}
    for name, parameter in run.model.named_parameters():
        found[f"parameter {name}"] = freeze(parameter)
        found[f"gradient {name}"] = freeze(parameter.grad)
    for name, buffer in run.model.named_buffers():
        found[f"buffer {name}"] = freeze(buffer)
    for name, module in run.model.named_modules():
        found[f"mode {name}"] = module.training
    found["python"] = random.getstate()
    found["numpy"] = freeze(np.random.get_state())
    found["torch"] = freeze(torch.get_rng_state())
    if isinstance(own := getattr(run.model, "own", None), torch.Generator):
        found["own generator"] = freeze(own.get_state())
    found["optimizer"] = freeze(run.optimizer.state_dict())
    found["metrics"] = _freeze_metric(run.metrics)
    found["batches"] = freeze(run.batches)
    return found


def objects(run: Run) -> dict[str, object]:
    """The tensors whose identity others may rely on."""
    found: dict[str, object] = {
        f"gradient {name}": parameter.grad for name, parameter in run.model.named_parameters()
    }
    found.update({f"buffer {name}": buffer for name, buffer in run.model.named_buffers()})
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what differs."""
    return [name for name in {**one, **other} if one.get(name, ...) != other.get(name, ...)]


def replaced(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names of what existed and is another object now."""
    return [name for name, each in before.items() if each is not None and after[name] is not each]


def _freeze_metric(metric: Any) -> Any:
    if isinstance(metric, nn.Module):
        names = [*vars(metric)["_defaults"], "_update_count", "_computed"]
        return {name: freeze(getattr(metric, name)) for name in names}
    return freeze(dict(vars(metric)))
