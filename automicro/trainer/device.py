"""The choice of the device, its description, and its random seed."""

import random

import numpy as np
import torch

from automicro.memory.budget import limit_bytes
from automicro.memory.device import active_budget
from automicro.memory.oom import first_line
from automicro.units import format_bytes


def choose_device(device: torch.device | str) -> torch.device:
    """Resolve a device with its index; ``"auto"`` chooses the accelerator if any, else the CPU.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if isinstance(device, str) and device == "auto":
        best = torch.accelerator.current_accelerator(check_available=True)
        device = "cpu" if best is None else best.type
    try:
        # A new tensor shows which index "cuda" currently has.
        found = torch.empty(0, device=device).device
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"device={str(device)!r} cannot be used here ({first_line(error)}); "
            "pass 'auto', 'cpu' or a device that torch finds, such as 'cuda'"
        ) from error
    if found.type == "meta":
        raise ValueError("device='meta' holds no data, so it cannot train. Pass 'auto'")
    return found


def describe_device(device: torch.device, memory_limit: str | int | float | None) -> str:
    """Describe the device and its memory limit, simulated or real.

    >>> describe_device(torch.device("cpu"), None)
    'the CPU'
    >>> from automicro import MemoryBudget
    >>> with MemoryBudget("24MiB"):
    ...     describe_device(torch.device("cpu"), None)
    'a simulated 24.00 MiB device on the CPU'
    """
    if device.type == "cpu":
        budget = active_budget()
        if budget is None or budget.limit_bytes is None:
            return "the CPU"
        return f"a simulated {format_bytes(budget.limit_bytes)} device on the CPU"
    name = str(device)
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    if name_of is not None:
        name += f" ({name_of(device)})"
    if memory_limit is not None:
        name += f" limited to {format_bytes(limit_bytes(memory_limit, device))}"
    return name


def check_seed(seed: object) -> None:
    """Raise an error for a seed that NumPy does not accept."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed is {seed!r}, not a whole number; pass an int such as 0, or None")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is not between 0 and {2**32 - 1}; pass an int such as 0")


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, and torch on all devices.

    >>> seed_everything(7)
    >>> random.random() == random.Random(7).random()
    True
    """
    check_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
