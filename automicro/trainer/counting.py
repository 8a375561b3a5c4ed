"""Counting the tokens, or the seconds of data, of whole batches."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automicro.batch.device import on_host
from automicro.durations import Duration, Unit

_HOW = {
    Unit.TOKENS: (
        "Pass features=[CountData(tokens=…)] with a callable from a batch to its number of tokens, "
        "such as lambda batch: batch['input_ids'].numel(). In a config: count_tokens: "
        "{call: pkgutil.resolve_name, args: {name: my_data.count_tokens}}"
    ),
    Unit.SECONDS: (
        "Pass features=[CountData(seconds=…)] (count_seconds in a config) with a callable from a "
        "batch to its seconds, such as lambda batch: float(batch['seconds'].sum()), or a "
        "LengthBatchSampler with unit='seconds' (sampling_mode.unit in a config). For a limit in "
        "time, pass max_time='2h30m'"
    ),
}
_WORDS = {Unit.TOKENS: "tokens", Unit.SECONDS: "seconds of data"}


class Counter:
    """Counts the tokens of whole batches, or their seconds of data, such as speech.

    >>> import torch
    >>> batch = {"input_ids": torch.zeros(2, 3), "attention_mask": torch.tensor([[1, 1, 0]])}
    >>> Counter(Unit.TOKENS).count_all([batch])
    2
    >>> Counter(Unit.SECONDS, lambda batch: sum(batch)).count_all([[1.5, 2.0], [0.5]])
    4.0
    """

    # Without a callable, seconds come from the loader, and tokens are the sum of `attention_mask`
    # or the number of elements of `input_ids`, in a mapping or in the first part of a pair. A
    # mask that is added to attention scores does not count. A batch on a device is counted
    # there, so the host waits for the sum once per batch.

    def __init__(
        self,
        unit: Unit,
        count: Callable[[Any], float] | None = None,
        *,
        is_known: bool = False,
        **durations: Duration | None,
    ) -> None:
        self._unit, self._count = unit, count
        self._name = f"count_{unit.name.lower()}"
        if count is not None and not callable(count):
            raise TypeError(f"{self._name}={count!r} cannot be called. {_HOW[unit]}")
        # Whether batches have token counts is known only when the first one arrives.
        self._may_be_known = is_known or count is not None or unit is Unit.TOKENS
        self._wanted: dict[str, str] = {}  # the arguments that need the count, by name
        for name, duration in durations.items():
            if duration is not None:
                self.require_for(name, duration)

    def require_for(self, name: str, duration: Duration) -> None:
        """Require a count for every batch from now on, if a duration is measured in it."""
        self._wanted.pop(name, None)  # that of an earlier call
        if duration.unit is self._unit:
            self._wanted[name] = f"{name}='{duration}'"
            if not self._may_be_known:
                raise self._refusal("their number in a batch is unknown")

    def count_all(self, batches: Sequence[Any], *, known: float | None = None) -> Any:
        """Count several batches; None if the count is unknown."""
        if self._count is None and self._unit is Unit.SECONDS:
            return known
        amounts = [self._amount(batch) for batch in batches]
        if None in amounts:
            if self._wanted:
                batch = batches[amounts.index(None)]
                fields = ", ".join(sorted(map(str, _fields(batch))))
                raise self._refusal(
                    f"this batch has neither attention_mask nor input_ids (it has {fields})"
                    if fields
                    else f"their number in a batch of type {type(batch).__name__} is unknown"
                )
            return None
        total = math.fsum(each for each in amounts if each is not None)
        return int(total) if self._unit is Unit.TOKENS else total

    def _amount(self, batch: Any) -> float | None:
        with on_host():
            return _tokens_of(batch) if self._count is None else self._checked(self._count(batch))

    def _checked(self, value: Any) -> float:
        is_one = isinstance(value, Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1
        number: Any = value.item() if is_one else value
        is_whole = self._unit is Unit.TOKENS
        kinds: Any = Integral if is_whole else int | float
        is_number = isinstance(number, kinds) and not isinstance(number, bool)
        if not (is_number and math.isfinite(number) and number >= 0):
            kind = "a whole number from 0" if is_whole else "a number from 0"
            error = ValueError if is_number else TypeError
            raise error(
                f"{self._name} gave {value!r} ({type(value).__name__}), not {kind}. Return the "
                f"{_WORDS[self._unit]} of the batch"
            )
        return float(number)

    def _refusal(self, why: str) -> ValueError:
        wanted = next(iter(self._wanted.values()))
        return ValueError(f"{wanted} counts {_WORDS[self._unit]}, but {why}. {_HOW[self._unit]}")


def _tokens_of(batch: Any) -> int | None:
    fields = _fields(batch)
    mask = fields.get("attention_mask")
    if isinstance(mask, Tensor | np.ndarray) and mask.ndim <= 2:
        mask = torch.as_tensor(mask)
        if not (mask.is_floating_point() or mask.is_complex()):
            return int(mask.sum())
    return _size(fields.get("input_ids"))


def _fields(batch: Any) -> Mapping[Any, Any]:
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2:
        batch = batch[0]
    return batch if isinstance(batch, Mapping) else {}


def _size(ids: Any) -> int | None:
    """Count the elements of a tensor or an array, or of all of them in a list."""
    if isinstance(ids, Tensor | np.ndarray):
        return math.prod(ids.shape)
    if isinstance(ids, list | tuple) and ids:
        sizes: list[Any] = list(map(_size, ids))
        return None if None in sizes else sum(sizes)
    return None
