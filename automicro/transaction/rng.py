"""Random number generators: a retried attempt draws the numbers that the failed one drew."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn


class RandomState:
    """Python's, numpy's and torch's generators, the device's, and those that modules own.

    Args:
        device: its generator is included where it is an accelerator.
        generators: further generators, see `find_generators`.
    """

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator] = ()) -> None:
        self._device = device
        self._generators = list(generators)
        self._state: tuple[Any, ...] | None = None

    def begin(self) -> None:
        accelerator = None
        if self._device.type != "cpu":
            accelerator = torch.get_device_module(self._device).get_rng_state(self._device)
        self._state = (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            accelerator,
            [generator.get_state() for generator in self._generators],
        )

    def prepare(self) -> None:
        """Nothing here can fail."""

    def commit(self) -> None:
        self._state = None

    def roll_back(self) -> None:
        if self._state is None:
            return
        python, numpy, cpu, accelerator, own = self._state
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if accelerator is not None:
            torch.get_device_module(self._device).set_rng_state(accelerator, self._device)
        for generator, state in zip(self._generators, own, strict=True):
            generator.set_state(state)
        self._state = None


def find_generators(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    """The `torch.Generator` objects that modules keep as attributes, each once."""
    found = {
        id(value): value
        for root in modules
        for module in root.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Generator)
    }
    return list(found.values())
