"""What extra passes change beside tensors of modules: see also the looks, which use it."""

from typing import Any

import numpy as np

from automicro.transaction.surroundings import foreign_states


def test_states_of_generators_differ_by_one_number_however_few_are_printed() -> None:
    with np.printoptions(threshold=4):
        state: dict[str, Any] = np.random.get_state(legacy=False)
        before = foreign_states()
        assert foreign_states() == before
        state["state"]["key"][300] += 1
        np.random.set_state(state)
        assert foreign_states() != before
