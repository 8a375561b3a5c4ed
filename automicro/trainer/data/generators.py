"""The random number generators that a data loader or a model has of its own."""

import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

Generator: TypeAlias = torch.Generator | random.Random | np.random.Generator

_PARTS = ("dataset", "sampler", "batch_sampler")


def find_generators(loader: object) -> dict[str, Generator]:
    """Those of a loader and of its dataset and samplers, and theirs in turn, by their place.

    Args:
        loader: anything that gives batches.

    Example:
        >>> rows = torch.utils.data.TensorDataset(torch.zeros(4))
        >>> mine = torch.Generator()
        >>> list(find_generators(torch.utils.data.DataLoader(rows, generator=mine)))
        ['generator']
    """
    found: dict[str, Generator] = {}
    seen: set[int] = set()
    waiting = [("", loader)]
    while waiting:
        place, owner = waiting.pop(0)
        for name, value in sorted(getattr(owner, "__dict__", {}).items()):
            if id(value) in seen:
                continue
            if isinstance(value, Generator):
                found[place + name] = value
            elif name in _PARTS:
                waiting.append((f"{place}{name}.", value))
            else:
                continue
            seen.add(id(value))
    return found


def module_generators(module: nn.Module) -> dict[str, Generator]:
    """Those that a model and its submodules keep as attributes, by their place, each once.

    Args:
        module: the model.

    Example:
        >>> noisy = nn.Sequential(nn.Linear(2, 2))
        >>> noisy[0].noise = torch.Generator()
        >>> list(module_generators(noisy))
        ['0.noise']
    """
    found: dict[int, tuple[str, Generator]] = {}
    for owner, each in module.named_modules():
        for name, value in vars(each).items():
            if isinstance(value, Generator) and id(value) not in found:
                found[id(value)] = (f"{owner}.{name}".lstrip("."), value)
    return dict(found.values())


def read_generators(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Where they stand, as tensors and plain values.

    Args:
        generators: what `find_generators` or `module_generators` gave.

    Example:
        >>> generators = {"order": random.Random(3)}
        >>> states = read_generators(generators)
        >>> drawn = generators["order"].random()
        >>> write_generators(generators, states)
        >>> generators["order"].random() == drawn
        True
    """
    return {place: _read(each) for place, each in generators.items()}


def write_generators(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> None:
    """Put them back where `read_generators` found them.

    One that is not there, because a loader makes it when a pass begins, is left out.

    Args:
        generators: the same, or those of something that was made in the same way.
        states: what `read_generators` gave.
    """
    for place, each in generators.items():
        if place in states:
            _write(each, states[place])


def generator_states(loader: object) -> dict[str, Any]:
    """Where a loader's own stand, as tensors and plain values.

    Args:
        loader: anything that gives batches.

    Example:
        >>> class Loader:
        ...     order = None
        >>> generator_states(Loader())
        {}
    """
    return read_generators(find_generators(loader))


def restore_generators(loader: object, states: Mapping[str, Any]) -> None:
    """Put a loader's own back where `generator_states` found them.

    Args:
        loader: the same, or one that was made in the same way.
        states: what `generator_states` gave.
    """
    write_generators(find_generators(loader), states)


def _read(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": torch.tensor(words), "gauss": gauss}
    return _to_tensors(generator.bit_generator.state)


def _write(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    else:
        generator.bit_generator.state = _to_arrays(state)


def _to_tensors(value: Any) -> Any:
    """NumPy's state, whatever its generator is. Its arrays are of unsigned integers."""
    if isinstance(value, Mapping):
        return {key: _to_tensors(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "array": torch.from_numpy(value.astype(np.int64))}
    return value.item() if isinstance(value, np.generic) else value


def _to_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        if value.keys() == {"dtype", "array"}:
            return value["array"].cpu().numpy().astype(value["dtype"])
        return {key: _to_arrays(each) for key, each in value.items()}
    return value
