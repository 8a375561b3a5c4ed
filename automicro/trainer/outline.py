"""What a `Trainer` was given, in short texts that two processes of one program have alike."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from automicro.callbacks import ExponentialMovingAverage
from automicro.events import Callback
from automicro.torch_private import is_uninitialized
from automicro.trainer.evaluators import INHERITED, Evaluator
from automicro.trainer.given_options import GivenOptions
from automicro.trainer.loading import num_batches
from automicro.trainer.plain_text import as_text
from automicro.trainer.sharing import ITSELF

MAY_DIFFER = frozenset({"device", "loggers", "max_time", "memory_limit", "probe", "progress"})
"""Arguments of the `Trainer` that rank 0 alone uses, or that ranks agree on in the run."""

Outline: TypeAlias = Mapping[str, str]


def outline_options(given: Mapping[str, Any]) -> dict[str, str]:
    """What ranks must have alike of the arguments of a `Trainer`.

    Args:
        given: the arguments by name.

    >>> outline_options({"max_duration": "2ep", "optimizer": nn.Linear, "device": "cpu"})
    {'max_duration': "'2ep'", 'optimizer': 'Linear'}
    """
    found: dict[str, str] = {}
    for name, value in given.items():
        if name not in MAY_DIFFER:
            found |= _SPECIAL[name](name, value) if name in _SPECIAL else {name: as_text(value)}
    return found


def outline_given(optimizer: torch.optim.Optimizer | None, scheduler: object) -> dict[str, str]:
    """What ranks must have alike of an optimizer and a scheduler that have not stepped yet.

    >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    >>> outline_given(sgd, None)["lr"]
    '0.5'
    """
    if optimizer is None:
        return {}
    given = GivenOptions.of(optimizer, scheduler)
    return {name: as_text(value) for name, value in {**given.classes, **given.options}.items()}


def outline_evaluations(name: str, given: Any) -> dict[str, str]:
    """Each data set that is evaluated on, and how.

    Args:
        name: of the argument.
        given: a loader, an `Evaluator`, a mapping from names to these, or None.

    >>> outline_evaluations("eval_dataloader", {"seen": [1, 2]})
    {'eval_dataloader': "named 'seen'", "eval_dataloader['seen']": 'a list'}
    """
    if not isinstance(given, Mapping):
        return {name: _evaluation(given)}
    names = ", ".join(map(repr, given))
    each = {f"{name}[{key!r}]": _evaluation(value) for key, value in given.items()}
    return {name: f"named {names}", **each}


def _loader(name: str, loader: Any) -> dict[str, str]:
    return {name: _data(loader)}


def _data(loader: Any) -> str:
    """A loader, with the lengths that decide which rows each rank gets."""
    if loader is None:
        return "None"
    dataset = getattr(loader, "dataset", None)
    kind = f"a {type(loader).__name__}"
    if not isinstance(loader, DataLoader):
        return kind
    kind += f" over a {type(dataset).__name__}"
    has_own_rows = getattr(loader, ITSELF, False) or getattr(dataset, ITSELF, False)
    if has_own_rows or isinstance(dataset, IterableDataset):
        return kind
    parts = [f"{kind} of {num_batches(dataset)} rows"]
    batch_sampler = loader.batch_sampler
    for sampler in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            options = f"num_replicas={sampler.num_replicas}, shuffle={sampler.shuffle}"
            options += f", seed={sampler.seed}, drop_last={sampler.drop_last}"
            return f"{kind} of {num_batches(dataset)} rows, with a DistributedSampler({options})"
    if loader.batch_size is None:
        order = loader.sampler if batch_sampler is None else batch_sampler
        parts.append(f"{num_batches(order)} entries of a {type(order).__name__}")
    else:
        rows = num_batches(loader.sampler)
        parts.append(f"{rows} entries of a {type(loader.sampler).__name__}")
        parts.append(f"batch_size={loader.batch_size}, drop_last={loader.drop_last}")
    return ", ".join(parts)


def _evaluation(given: Any) -> str:
    if not isinstance(given, Evaluator):
        return _data(given)
    parts = [_data(given.dataloader)]
    for name in ("microbatch_size", "max_batches", "interval"):
        if (value := getattr(given, name)) not in (None, INHERITED):
            parts.append(f"{name}={as_text(value)}")
    if not (isinstance(given.metrics, str) and given.metrics == INHERITED):
        parts.append(f"metrics: {_names_of_metrics(given.metrics)}")
    return ", ".join(parts)


def _metrics(name: str, given: Any) -> dict[str, str]:
    return {name: _names_of_metrics(given)}


def _names_of_metrics(given: Any) -> str:
    if not isinstance(given, Mapping):  # a collection of torchmetrics may be one, or may not
        named = getattr(given, "items", None)
        if not callable(named):
            return as_text(given)
        given = dict(named())
    return ", ".join(f"{key}: {as_text(each)}" for key, each in given.items()) or "none"


def _seed(name: str, given: int | None) -> dict[str, str]:
    """Each rank may have its own; but with one, sizes are found in another way than without."""
    return {name: "None" if given is None else "a number"}


def _modules(name: str, given: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for index, module in enumerate([given] if isinstance(given, nn.Module) else given):
        which = name if isinstance(given, nn.Module) else f"{name}[{index}]"
        found[which] = type(module).__qualname__
        found |= {f"{each} of {which}": text for each, text in _structure(module)}
    return found


def _structure(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, parameter in module.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        yield f"parameter {name!r}", _form(parameter) + frozen
    for name, buffer in module.named_buffers():
        yield f"buffer {name!r}", _form(buffer)


def _form(tensor: Any) -> str:
    if is_uninitialized(tensor):
        return "without a shape"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def _callbacks(name: str, given: Iterable[Callback]) -> dict[str, str]:
    """Those that change what is trained or evaluated; others may listen on one rank alone."""
    changing = [type(each).__qualname__ for each in given if _changes_training(each)]
    return {f"{name} that change batches, gradients or weights": ", ".join(changing) or "none"}


def _changes_training(callback: Callback) -> bool:
    kind = type(callback)
    overrides = any(
        getattr(kind, name, None) is not getattr(Callback, name)
        for name in ("transform", "gradients_ready")
    )
    return overrides or isinstance(callback, ExponentialMovingAverage)


_SPECIAL: Mapping[str, Callable[[str, Any], dict[str, str]]] = {
    "callbacks": _callbacks,
    "eval_dataloader": outline_evaluations,
    "metrics": _metrics,
    "model": _modules,
    "modules": _modules,
    "seed": _seed,
    "train_dataloader": _loader,
}
