"""Everything that a step may change, as bytes that compare exactly."""

import dataclasses
import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro.reach import Reach, is_generator
from automicro.torture.subject import Run
from automicro.transaction import flatten_metrics, state_of


def freeze(value: Any) -> Any:
    """A value that is equal only to a bit-identical one, and does not change any more.

    Of objects of unknown kinds only the kind is compared.

    >>> freeze(torch.tensor([0.0])) == freeze(torch.tensor([-0.0]))
    False
    """
    if isinstance(value, Tensor):
        value = value.to_dense() if value.layout is not torch.strided else value
        whole = value.detach().cpu().contiguous().flatten()
        return value.dtype, tuple(value.shape), whole.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if is_generator(value):
        return freeze(state_of(value))
    if isinstance(value, Mapping):
        return {key: freeze(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple | deque):
        return [freeze(each) for each in value]
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)  # NaN is equal to itself here
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return freeze(vars(value))
    return type(value).__qualname__


def values(run: Run) -> dict[str, Any]:
    """Parameters, gradients, buffers, generators, optimizer, scaler, metrics and batches."""
    found: dict[str, Any] = {}
    for name, parameter in run.model.named_parameters():
        found[f"parameter {name}"] = freeze(parameter)
        found[f"gradient {name}"] = freeze(parameter.grad)
    for index, leaf in enumerate(run.leaves):
        found[f"gradient of leaf {index}"] = freeze(leaf.grad)
    for name, buffer in run.model.named_buffers():
        found[f"buffer {name}"] = freeze(buffer)
    for name, module in run.model.named_modules():
        found[f"mode {name}"] = module.training
    found["python"] = random.getstate()
    found["numpy"] = freeze(np.random.get_state())
    found["torch"] = freeze(torch.get_rng_state())
    reach = Reach({"": run.model, **run.options})
    for index, generator in enumerate(reach.generators()):
        found[f"own generator {index}"] = freeze(generator)
    for place, module in reach.modules().items():
        for name, buffer in module.named_buffers():
            found[f"buffer {place}.{name}"] = freeze(buffer)
    found["optimizer"] = freeze(run.optimizer.state_dict())
    if run.scaler is not None:
        found["scaler"] = freeze(run.scaler.state_dict())
    for index, metric in enumerate(flatten_metrics(run.metrics)):
        found[f"metric {index}"] = _freeze_metric(metric)
    found["batches"] = freeze(run.batches)
    return found


def objects(run: Run) -> dict[str, object]:
    """The tensors whose identity others may rely on."""
    found: dict[str, object] = {
        f"gradient {name}": parameter.grad for name, parameter in run.model.named_parameters()
    }
    found.update({f"buffer {name}": buffer for name, buffer in run.model.named_buffers()})
    return found


def result_values(result: Any) -> dict[str, Any]:
    """What a call gave: loss, losses and outputs, bit by bit."""
    if result is None:
        return {}
    found = {"result loss": freeze(result.loss), "result losses": freeze(result.losses)}
    if getattr(result, "outputs", None) is not None:
        found["result outputs"] = freeze(result.outputs)
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what differs."""
    return [name for name in {**one, **other} if one.get(name, ...) != other.get(name, ...)]


def replaced(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names of what existed and is another object now."""
    return [
        name for name, each in before.items() if each is not None and after.get(name) is not each
    ]


def _freeze_metric(metric: Any) -> Any:
    if isinstance(metric, nn.Module) and "_defaults" in vars(metric):
        own = [name for name in vars(metric) if not name.startswith("_")]
        names = [*vars(metric)["_defaults"], *own, "_update_count", "_computed"]
        return {name: freeze(getattr(metric, name)) for name in names}
    slots = [name for each in type(metric).__mro__ for name in vars(each).get("__slots__", ())]
    values = {name: getattr(metric, name, None) for name in slots if not name.startswith("__")}
    return freeze({**vars(metric), **values})
