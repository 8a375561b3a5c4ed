"""State of the random number generators of a process, as tensors and plain values."""

import contextlib
import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from automicro.errors import CheckpointError, CheckpointWarning, warn
from automicro.memory.device import active_budget


def rng_state() -> dict[str, Any]:
    """Return the random number state of Python, NumPy, torch and all accelerators.

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
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "accelerators": [
                torch.get_device_module(device).get_rng_state(device) for device in _accelerators()
            ],
        }


def derived_rng_state(state: Mapping[str, Any], *, rank: int, world_size: int) -> dict[str, Any]:
    """Derive a random number state for a rank when the world size differs from the saved one.

    >>> one, two = (derived_rng_state(rng_state(), rank=r, world_size=2) for r in (0, 1))
    >>> torch.equal(one["torch"], two["torch"])
    False
    """
    # Deterministic, so that a run can be repeated, and different on each rank.
    seed = derived_seed(state["torch"], rank=rank, world_size=world_size)
    return {
        "python": random.Random(seed).getstate(),
        "numpy": np.random.RandomState(seed % 2**32).get_state(legacy=False),
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "accelerators": [
            torch.Generator(device).manual_seed(seed).get_state() for device in _accelerators()
        ],
    }


def derived_seed(state: torch.Tensor, *, rank: int, world_size: int) -> int:
    """Derive a seed for a rank from the state of a generator.

    >>> where = torch.Generator().manual_seed(3).get_state()
    >>> derived_seed(where, rank=0, world_size=2) == derived_seed(where, rank=1, world_size=2)
    False
    """
    digest = hashlib.sha256(state.cpu().numpy().tobytes())
    digest.update(f"rank {rank} of {world_size}".encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the random number generators.

    Args:
        state: the return value of `rng_state`.

    Raises:
        CheckpointError: the state cannot be read.
    """
    try:
        python, numpy = state["python"], state["numpy"]
        cpu, accelerators = state["torch"], state["accelerators"]
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu.cpu())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the states of the random number generators cannot be read ({error}); pass the result "
            "of rng_state()"
        ) from error
    devices = _accelerators()
    if len(devices) != len(accelerators):
        warn(
            f"random numbers were saved for {len(accelerators)} accelerators, but there are "
            f"{len(devices)} here, so the run will draw other numbers on them",
            CheckpointWarning,
        )
    for device, each in zip(devices, accelerators, strict=False):
        torch.get_device_module(device).set_rng_state(each.cpu(), device)


def _accelerators() -> list[torch.device]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]
