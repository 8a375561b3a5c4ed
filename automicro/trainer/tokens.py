"""How many tokens a batch has."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from automicro.duration import Duration
from automicro.transfer import on_host

CountTokens = Callable[[Any], int]

_HOW = (
    "pass count_tokens=…, a callable from a batch to its number of tokens, such as "
    "count_tokens=lambda batch: batch['input_ids'].numel()"
)


class TokenCounter:
    """Counts the tokens of whole batches, where they lie, by one reduction per batch.

    In this order: the callable, if there is one; the sum of ``attention_mask``; the elements of
    ``input_ids``. The batch is a mapping that has these, or a pair whose first part is one. A
    mask counts where it has one number per token, and not where it is added to attention scores.

    A batch that lies on a device is counted there, and the host waits for the sum once per batch.

    Args:
        count_tokens: from a batch to its number of tokens; None to read it off the batch.

    Raises:
        TypeError: ``count_tokens`` cannot be called.

    Example:
        >>> import torch
        >>> batch = {"input_ids": torch.zeros(2, 3), "attention_mask": torch.tensor([[1, 1, 0]])}
        >>> TokenCounter().count(batch)
        2
        >>> TokenCounter(lambda batch: 7).count(batch)
        7
    """

    def __init__(self, count_tokens: CountTokens | None = None) -> None:
        if count_tokens is not None and not callable(count_tokens):
            raise TypeError(f"count_tokens={count_tokens!r} cannot be called; {_HOW}")
        self._count_tokens = count_tokens

    def count(self, batch: Any) -> int | None:
        """The tokens of a batch; None where nothing says what they are.

        Raises:
            TypeError: ``count_tokens`` gave no whole number.
            ValueError: it gave one below 0.
        """
        with on_host():
            if self._count_tokens is not None:
                return _whole(self._count_tokens(batch))
            fields = _fields(batch)
            mask: Any = fields.get("attention_mask")
            if _is_per_token(mask):
                return int(mask.sum())
            return _size(fields.get("input_ids"))

    def require(self, batch: Any, *, name: str, duration: Duration) -> int:
        """The tokens of a batch, for a duration that counts them.

        Args:
            batch: the batch.
            name: the argument that holds the duration.
            duration: what it says.

        Raises:
            ValueError: nothing says what this batch's tokens are.
        """
        tokens = self.count(batch)
        if tokens is None:
            raise ValueError(f"{name}='{duration}' counts tokens, but {_describe(batch)}; {_HOW}")
        return tokens


def _whole(value: Any) -> int:
    number = value
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        number = value.item()
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(
            f"count_tokens gave {value!r} ({type(value).__name__}), not a whole number; return "
            "an int, such as batch['input_ids'].numel()"
        )
    if number < 0:
        raise ValueError(
            f"count_tokens gave {number}, and no batch has fewer than 0 tokens; return their number"
        )
    return int(number)


def _fields(batch: Any) -> Mapping[Any, Any]:
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2:
        batch = batch[0]
    return batch if isinstance(batch, Mapping) else {}


def _is_per_token(mask: Any) -> bool:
    if isinstance(mask, Tensor):
        is_number = not mask.is_floating_point() and not mask.is_complex()
        return mask.dim() <= 2 and is_number
    return isinstance(mask, np.ndarray) and mask.ndim <= 2 and mask.dtype.kind in "biu"


def _size(ids: Any) -> int | None:
    """The elements of a tensor or an array, or of all in a list of these."""
    if isinstance(ids, Tensor):
        return ids.numel()
    if isinstance(ids, np.ndarray):
        return ids.size
    if isinstance(ids, list | tuple) and ids:
        sizes = [_size(each) for each in ids]
        return None if None in sizes else sum(size for size in sizes if size is not None)
    return None


def _describe(batch: Any) -> str:
    fields = _fields(batch)
    if not fields:
        return f"nothing says how many a batch of type {type(batch).__name__} has"
    return (
        "this batch has neither attention_mask nor input_ids (it has "
        f"{', '.join(sorted(map(str, fields)))})"
    )
