"""The random number generators of a process, as tensors and plain values."""

import contextlib
import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from automicro.errors import CheckpointError, CheckpointWarning, warn
from automicro.memory.budget import active_budget


def rng_state() -> dict[str, Any]:
    """Where Python's, NumPy's and torch's generators stand, and those of all accelerators.

    Example:
        >>> state = rng_state()
        >>> drawn = torch.rand(3)
        >>> restore_rng_state(state)
        >>> torch.equal(torch.rand(3), drawn)
        True
    """
    budget = active_budget()
    with contextlib.nullcontext() if budget is None else budget.host():
        return {
            "python": python_state_as_tensors(random),
            "numpy": numpy_state_as_tensors(np.random.get_state(legacy=False)),
            "torch": torch.get_rng_state(),
            "accelerators": [
                torch.get_device_module(device).get_rng_state(device) for device in _accelerators()
            ],
        }


def derived_rng_state(state: Mapping[str, Any], *, rank: int, world_size: int) -> dict[str, Any]:
    """Random numbers for a rank of a world of another size than the one that saved.

    The same every time, and others on each rank.

    Args:
        state: what `rng_state` gave on rank 0 of the world that saved.
        rank: of the world that goes on.
        world_size: of that world.

    Example:
        >>> one, two = (derived_rng_state(rng_state(), rank=r, world_size=2) for r in (0, 1))
        >>> torch.equal(one["torch"], two["torch"])
        False
    """
    seed = derived_seed(state["torch"], rank=rank, world_size=world_size)
    return {
        "python": python_state_as_tensors(random.Random(seed)),
        "numpy": numpy_state_as_tensors(
            np.random.RandomState(seed % 2**32).get_state(legacy=False)
        ),
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "accelerators": [
            torch.Generator(device).manual_seed(seed).get_state() for device in _accelerators()
        ],
    }


def derived_seed(state: torch.Tensor, *, rank: int, world_size: int) -> int:
    """A seed for a rank, from where a generator stood.

    >>> where = torch.Generator().manual_seed(3).get_state()
    >>> derived_seed(where, rank=0, world_size=2) == derived_seed(where, rank=1, world_size=2)
    False
    """
    digest = hashlib.sha256(state.cpu().numpy().tobytes())
    digest.update(f"rank {rank} of {world_size}".encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Put the generators back where `rng_state` found them.

    Args:
        state: what `rng_state` gave.

    Raises:
        CheckpointError: it is no such state.
    """
    try:
        python = python_state_of(state["python"])
        numpy, cpu, accelerators = state["numpy"], state["torch"], state["accelerators"]
        random.setstate(python)
        np.random.set_state(numpy_state_of(numpy))
        torch.set_rng_state(cpu.cpu())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the states of the random number generators cannot be read ({error}); give what "
            "rng_state() gave"
        ) from error
    devices = _accelerators()
    if len(devices) != len(accelerators):
        warn(
            f"random numbers were saved for {len(accelerators)} accelerators, and here are "
            f"{len(devices)}: the run will not draw the same ones on them",
            CheckpointWarning,
        )
    for device, each in zip(devices, accelerators, strict=False):
        torch.get_device_module(device).set_rng_state(each.cpu(), device)


def _accelerators() -> list[torch.device]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def python_state_as_tensors(generator: Any) -> dict[str, Any]:
    """Where a generator of Python's stands, or the module that has one.

    >>> state = python_state_as_tensors(random.Random(1))
    >>> python_state_of(state) == random.Random(1).getstate()
    True
    """
    version, words, gauss = generator.getstate()
    return {"version": version, "words": torch.tensor(words), "gauss": gauss}


def python_state_of(value: Mapping[str, Any]) -> tuple[Any, ...]:
    """Python's state again, from what `python_state_as_tensors` made of it."""
    return value["version"], tuple(value["words"].tolist()), value["gauss"]


def numpy_state_as_tensors(value: Any) -> Any:
    """NumPy's state, whatever its generator is. Its arrays are of unsigned integers.

    >>> state = numpy_state_as_tensors(np.random.default_rng(1).bit_generator.state)
    >>> numpy_state_of(state) == np.random.default_rng(1).bit_generator.state
    True
    """
    if isinstance(value, Mapping):
        return {key: numpy_state_as_tensors(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "array": torch.from_numpy(value.astype(np.int64))}
    return value.item() if isinstance(value, np.generic) else value


def numpy_state_of(value: Any) -> Any:
    """NumPy's state again, from what `numpy_state_as_tensors` made of it."""
    if isinstance(value, Mapping):
        if value.keys() == {"dtype", "array"}:
            return value["array"].cpu().numpy().astype(value["dtype"])
        return {key: numpy_state_of(each) for key, each in value.items()}
    return value
