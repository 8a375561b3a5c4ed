"""Warnings about the average of a loss."""

import warnings
from typing import Any

from automicro import LossAverageWarning, Microbatcher


def warnings_of(microbatcher: Microbatcher, *batches: Any) -> list[str]:
    """Return the messages about the average while these batches are trained on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            microbatcher.backward(batch)
    return [str(each.message) for each in caught if each.category is LossAverageWarning]
