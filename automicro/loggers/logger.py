"""What a logger is told, and what can be logged."""

import math
import numbers
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor


@runtime_checkable
class Logger(Protocol):
    """Takes down the numbers of a run.

    Write your own with these three methods. An exception in one of them becomes a warning and
    never stops the run, see `LoggerGroup`.

    One that can show pictures has a fourth, ``show(name, picture, *, step)``, where
    ``picture.png()`` gives the bytes of a PNG and ``picture.html()`` a page; others are not asked.

    There is no ``flush``: what was logged should survive the death of the process. A logger that
    buffers writes what it holds every few seconds, and in `close`.
    """

    def start(self, run: Mapping[str, Any], *, resume_step: int | None) -> None:
        """Begin, once per fit, or go on where an earlier run stopped.

        Args:
            run: what is run: settings, as text, numbers, lists and mappings.
            resume_step: the optimization batches done by the run that is resumed; what it logged
                at later steps will be logged again. None for a run that begins anew.
        """
        ...

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Take down values by name.

        Args:
            values: numbers, NaN and infinite ones too. New names may appear at any time.
            step: optimization batches done. It never decreases within a run, and comes more than
                once: after the batch, and after the evaluation that follows it.
        """
        ...

    def close(self) -> None:
        """Write what is still held, and let go of files and threads.

        Comes last, however the run ended, also after a `start` that failed, and perhaps twice.
        """
        ...


RESERVED_NAMES = frozenset({"run", "step", "time"})
"""What a line says besides values, so no value can be called that."""


def plain_values(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Values as Python numbers, and why some cannot be logged, both by name.

    A tensor on a device is waited for, once for all loggers. Whole numbers stay whole.

    Args:
        values: numbers, also of numpy, and tensors of one element.

    Example:
        >>> import torch
        >>> plain_values({"loss": torch.tensor(0.5), "rows": 16, "text": "abc"})
        ({'loss': 0.5, 'rows': 16}, {'text': "'abc' is not one number"})
    """
    plain: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, value in values.items():
        problem = _problem_of_name(name)
        number = None if problem else _number(value)
        if number is not None:
            plain[name] = number
        else:
            refused[str(name)] = problem or f"{_describe(value)} is not one number"
    return plain, refused


def not_started(logger: object) -> RuntimeError:
    """The error of a logger that was not started, or was closed."""
    return RuntimeError(f"{logger!r} is not open: call start({{}}) before log(…)")


def _number(value: object) -> float | None:
    if isinstance(value, Tensor | np.ndarray):
        has_value = not (isinstance(value, Tensor) and value.is_meta)
        if math.prod(value.shape) != 1 or not has_value:
            return None
        value = value.item()
    # True is an int that JSON and CSV would write as a word.
    if isinstance(value, numbers.Integral | np.bool_):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else None


def _describe(value: object) -> str:
    if isinstance(value, Tensor | np.ndarray):
        kind = type(value).__name__
        return f"a {kind} of the shape {tuple(value.shape)} and the type {value.dtype}"
    return repr(value)


def _problem_of_name(name: object) -> str | None:
    if not isinstance(name, str) or name.splitlines() != [name]:
        return "a name is one line of text"
    if name in RESERVED_NAMES:
        return f"{', '.join(sorted(RESERVED_NAMES))} have a meaning of their own in log files"
    return None
