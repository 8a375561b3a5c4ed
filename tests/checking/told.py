"""Capture warnings about the loss average."""

import warnings
from typing import Any

from automicro import LossAverageWarning, Microbatcher


def warnings_of(microbatcher: Microbatcher, *batches: Any) -> list[str]:
    """Train on these batches and return the warnings about the loss average."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            microbatcher.backward(batch)
    return [str(each.message) for each in caught if each.category is LossAverageWarning]
