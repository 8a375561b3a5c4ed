"""Putting back what a run drew from generators of the caller's own."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from automicro.verification.state import state_of


class OwnGenerators:
    """Generators that are not torch's global one, put back. A part of a transaction."""

    def __init__(self, generators: Sequence[Any]) -> None:
        self._generators = generators
        self._states: list[Any] = []

    def begin(self) -> None:
        self._states = [state_of(generator) for generator in self._generators]

    def prepare(self) -> None:
        """Nothing here can fail."""

    def commit(self) -> None:
        self._states = []

    def roll_back(self) -> None:
        for generator, state in zip(self._generators, self._states, strict=False):
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            elif isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                generator.set_state(state)
        self._states = []
