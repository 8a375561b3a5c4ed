"""Subjects of the torture: a model in training, built again for every trial."""

import contextlib
import dataclasses
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro.errors import AutomicroWarning
from automicro.features import with_features
from automicro.microbatcher import Microbatcher
from automicro.optimizer.step import GradientScaler, step_optimizer
from automicro.policy.policy import Policy
from automicro.reach import Reach
from automicro.step.metrics import flatten_metrics
from automicro.values import is_generator, state_of


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model in training, and everything that a step may change."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Sequence[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    metrics: Any = None
    set_to_none: bool = True
    keeps_gradient: bool = False
    first_size: int = 2
    clip_norm: float = 0.5
    scaler: GradientScaler | None = None
    leaves: Sequence[Tensor] = ()
    first_level: int = 0

    @property
    def can_be_smaller(self) -> bool:
        """Whether it has levels, or parts with their own sizes."""
        return bool(self.options.get("nested")) or "when_too_large" in self.options


MakeSubject = Callable[[], Subject]


@dataclass
class TortureRun:
    """A subject under a `Microbatcher`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    microbatcher: Microbatcher
    metrics: Any
    batches: Sequence[Any]
    set_to_none: bool = True
    keeps_gradient: bool = False
    clip_norm: float = 0.5
    scaler: GradientScaler | None = None
    leaves: Sequence[Tensor] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def step(self) -> bool:
        """Step the optimizer, and the scaler if there is one."""
        device = next(self.model.parameters()).device
        return step_optimizer(self.optimizer, device, scaler=self.scaler)

    def start_at(self, level: int) -> None:
        """Continue at a level of ``when_too_large``, as if no lower level fit."""
        begin_at_level(self.microbatcher, level)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        self.model.zero_grad(set_to_none=self.set_to_none)  # not all are in the optimizer


def build(make: MakeSubject, policy: Policy, eval_policy: Policy) -> TortureRun:
    """Make a reproducible run from a fixed seed."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    subject = make()
    microbatcher = Microbatcher(
        subject.model,
        optimizer=subject.optimizer,
        microbatch_size=policy,
        eval_microbatch_size=eval_policy,
        **with_features(subject.options),
    )
    names = {each.name for each in dataclasses.fields(TortureRun)} - {"microbatcher"}
    run = TortureRun(microbatcher=microbatcher, **{name: getattr(subject, name) for name in names})
    if subject.first_level:
        run.start_at(subject.first_level)
    return run


def begin_at_level(microbatcher: Microbatcher, level: int) -> None:
    """Let the next batch start at least at a level of ``when_too_large``."""
    policy = microbatcher._split_guard.allowed(microbatcher._train.policy)
    while (lowest := policy.level_for(1)) < level:
        policy.level = lowest
        policy.climb()


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Suppress automicro's warnings, which each trial would repeat."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutomicroWarning)
        yield


def freeze(value: Any) -> Any:
    """Return an immutable value that equals only a bit-identical one.

    Objects of unknown types are compared only by type.

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
        return repr(value)  # this way, NaN equals itself
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return freeze(vars(value))
    return type(value).__qualname__


def values(run: TortureRun) -> dict[str, Any]:
    """Return parameters, gradients, buffers, generators, optimizer, scaler, metrics and batches."""
    found: dict[str, Any] = {}
    for name, parameter in run.model.named_parameters():
        found[f"parameter {name}"] = freeze(parameter)
        found[f"gradient {name}"] = freeze(parameter.grad)
    for index, leaf in enumerate(run.leaves):
        found[f"gradient of leaf {index}"] = freeze(leaf.grad)
    for name, buffer in run.model.named_buffers():
        found[f"buffer {name}"] = freeze(buffer)
    for name, module in run.model.named_modules():
        attributes = {key: each for key, each in vars(module).items() if key[:1] != "_"}
        found[f"attributes {name}"] = freeze(attributes)
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


def objects(run: TortureRun) -> dict[str, object]:
    """Return the tensors whose identity other code may depend on."""
    found: dict[str, object] = {
        f"gradient {name}": parameter.grad for name, parameter in run.model.named_parameters()
    }
    found.update({f"buffer {name}": buffer for name, buffer in run.model.named_buffers()})
    return found


def result_values(result: Any) -> dict[str, Any]:
    """Return the results of a call: loss, losses and outputs, bit by bit."""
    if result is None:
        return {}
    found = {"result loss": freeze(result.loss), "result losses": freeze(result.losses)}
    if getattr(result, "outputs", None) is not None:
        found["result outputs"] = freeze(result.outputs)
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of values that differ."""
    return [name for name in {**one, **other} if one.get(name, ...) != other.get(name, ...)]


def replaced(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names of objects that were replaced."""
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
