"""Sequences that grow in training."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from automicro.callbacks.growth import GrowthSchedule, Resize
from automicro.duration import Duration
from automicro.transfer import on_host

_KEYS = (
    "input_ids",
    "attention_mask",
    "labels",
    "position_ids",
    "token_type_ids",
    "special_tokens_mask",
    "inputs_embeds",
)
_OWN = "pass resize=…, a function (batch, size) → batch of your own"


class SequenceLengthSchedule(GrowthSchedule):
    """Trains on the beginnings of sequences first.

    Cuts the dimension of tokens to the size: of the tensors of a mapping that are called
    ``input_ids``, ``attention_mask``, ``labels``, ``position_ids``, ``token_type_ids``,
    ``special_tokens_mask`` or ``inputs_embeds``; or of a pair of token ids and targets, the
    targets only where they are per token. A sequence that is shorter already stays as it is.

    Args:
        start: the first length, in tokens.
        end: the last one.
        over: how long it grows.
        steps: see `GrowthSchedule`.
        multiple_of: see `GrowthSchedule`.
        keys: of the mapping, in place of those above.
        resize: in place of all that: ``resize(batch, size)`` gives the batch.

    Raises:
        TypeError, ValueError: arguments that make no sense, or a batch without tokens. Without
            ``keys``, also one in which something else is as long as the tokens.

    Example:
        >>> import torch
        >>> schedule = SequenceLengthSchedule(64, 512, over="1000ba", multiple_of=64)
        >>> batch = {"input_ids": torch.ones(2, 8), "labels": torch.ones(2)}
        >>> {key: tuple(value.shape) for key, value in cut_tokens(batch, 4).items()}
        {'input_ids': (2, 4), 'labels': (2,)}
    """

    def __init__(
        self,
        start: int,
        end: int,
        *,
        over: str | Duration,
        steps: int | None = None,
        multiple_of: int = 1,
        keys: Sequence[str] | None = None,
        resize: Resize | None = None,
    ) -> None:
        if isinstance(keys, str):
            raise TypeError(f"keys={keys!r} is one string; pass a list: keys=[{keys!r}]")

        def by_default(batch: Any, size: int) -> Any:
            return cut_tokens(batch, size, keys=keys)

        super().__init__(
            start,
            end,
            over=over,
            resize=by_default if resize is None else resize,
            steps=steps,
            multiple_of=multiple_of,
            logged_as="train/sequence_length",
        )


def cut_tokens(batch: Any, size: int, *, keys: Sequence[str] | None = None) -> Any:
    """A batch with its sequences cut to a length; see `SequenceLengthSchedule`.

    Args:
        batch: token ids, a pair that begins with them or with a mapping, or a mapping.
        size: the most tokens of a sequence.
        keys: what to cut in a mapping.

    Raises:
        ValueError: there are no tokens, or it cannot be told what else is to be cut.

    >>> import torch
    >>> tokens, targets = cut_tokens((torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8)), 4)
    >>> tuple(tokens.shape), tuple(targets.shape)
    ((2, 4), (2, 4))
    """
    with on_host():
        if isinstance(batch, Mapping):
            return _cut_mapping(batch, size, keys)
        if isinstance(batch, tuple | list) and len(batch) == 2:
            inputs, targets = batch
            if isinstance(inputs, Mapping):
                length = _length(inputs, keys)
                parts = [_cut_mapping(inputs, size, keys), _cut(targets, size, length)]
            elif _is_tokens(inputs):
                length = inputs.shape[1]
                parts = [_cut(inputs, size, length), _cut(targets, size, length)]
            else:
                raise _no_tokens(batch)
            return _like(batch, parts)
        if _is_tokens(batch):
            return _cut(batch, size, batch.shape[1])
        raise _no_tokens(batch)


def _cut_mapping(
    batch: Mapping[str, Any], size: int, keys: Sequence[str] | None
) -> Mapping[str, Any]:
    length = _length(batch, keys)
    if length <= size:
        return batch
    known = _KEYS if keys is None else keys
    if keys is None:
        for key, value in batch.items():
            is_as_long = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
            if key not in _KEYS and is_as_long:
                raise ValueError(
                    f"{key!r} is as long as the tokens, {length}, and nothing says whether to cut "
                    "it; name all that are to be cut in keys=[…]"
                )
    return {
        key: _cut(value, size, length) if key in known else value for key, value in batch.items()
    }


def _length(batch: Mapping[str, Any], keys: Sequence[str] | None) -> int:
    known = _KEYS if keys is None else keys
    if keys is not None and (missing := [key for key in keys if key not in batch]):
        raise ValueError(
            f"the batch lacks {', '.join(missing)} of keys= (it has "
            f"{', '.join(sorted(map(str, batch)))}); leave them out"
        )
    for key in known:
        value = batch.get(key)
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value.shape[1]
    raise ValueError(
        f"there are no tokens to cut: the batch has none of {', '.join(known)} with at least two "
        f"dimensions (it has {', '.join(sorted(map(str, batch)))}); name them in keys=[…], or "
        f"{_OWN}"
    )


def _cut(value: Any, size: int, length: int) -> Any:
    """Cut what has the tokens' length in its second dimension, or in its last two."""
    if not isinstance(value, Tensor) or length <= size or value.dim() < 2:
        return value
    if value.dim() == 4 and value.shape[-1] == length:  # a mask of attention scores
        value = value[..., :size]
        return value[..., :size, :] if value.shape[-2] == length else value
    return value[:, :size] if value.shape[1] == length else value


def _like(batch: Any, parts: list[Any]) -> Any:
    """A list, a tuple or a named tuple like a given one."""
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _is_tokens(value: object) -> bool:
    is_number = isinstance(value, Tensor) and not value.is_floating_point()
    return is_number and isinstance(value, Tensor) and value.dim() == 2


def _no_tokens(batch: Any) -> ValueError:
    return ValueError(
        f"there are no tokens to cut in a batch of type {type(batch).__name__}: they would be a "
        "mapping with input_ids, or whole numbers of the shape (rows, tokens), alone or as the "
        f"first of a pair; {_OWN}"
    )
