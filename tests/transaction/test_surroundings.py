"""What extra passes change beside tensors of modules: see also the looks, which use it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from automicro.transaction.surroundings import Surroundings, foreign_states


def test_states_of_generators_differ_by_one_number_however_few_are_printed() -> None:
    with np.printoptions(threshold=4):
        state: dict[str, Any] = np.random.get_state(legacy=False)
        before = foreign_states()
        assert foreign_states() == before
        state["state"]["key"][300] += 1
        np.random.set_state(state)
        assert foreign_states() != before


def test_memory_that_runs_out_over_a_copy_is_not_taken_for_what_cannot_be_copied() -> None:
    class WrittenError(Exception):
        """Its content lies in no attribute."""

        def __init__(self, failure: Exception) -> None:
            self.args = (failure,)

        def state_dict(self) -> Any:
            raise self.args[0]

        def load_state_dict(self, state: Any) -> None: ...

    module: Any = nn.Linear(2, 2)
    module.written = WrittenError(ValueError("not now"))
    Surroundings([module]).begin()
    module.written = WrittenError(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(torch.OutOfMemoryError):
        Surroundings([module]).begin()
