"""State that is carried from batch to batch, such as that of a recurrent model."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from automicro.batch.layout import BatchLayout
from automicro.errors import BatchError
from automicro.loss.conventions import Carried
from automicro.step.feature import Feature
from automicro.step.setup import Carrying, Setup


class _CarriedLayout(BatchLayout):
    """The layout of a batch together with its state.

    >>> import torch
    >>> layout = _CarriedLayout(0, 1)
    >>> both = Carried(torch.zeros(4, 3), torch.zeros(2, 4, 8))
    >>> layout.num_rows(both), [tuple(each.carry.shape) for each in layout.split(both, [3, 1])]
    (4, [(2, 3, 8), (2, 1, 8)])
    """

    def __init__(
        self, batch_layout: int | Mapping[str, Any], carry_layout: int | Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._batch, self.carry = BatchLayout(batch_layout), BatchLayout(carry_layout)

    def num_rows(self, batch: Carried) -> int:
        num_rows = self._batch.num_rows(batch.batch)
        self.holds_rows = self._batch.holds_rows
        if batch.carry is None:
            return num_rows
        carried = self._about_carry(self.carry.num_rows, batch.carry)
        if carried != num_rows:
            raise BatchError(
                f"The rows of the carry and of the batch disagree: {carried} and {num_rows}. "
                "Pass the state of the same rows (drop_last=True makes all batches equal), or "
                "carry=None to start again. Carry(…) names the dimension of the rows in the state, "
                "and batch_layout=… in the batch: both are 1 if time comes first."
            )
        return num_rows

    def split(self, batch: Carried, sizes: Sequence[int]) -> list[Any]:
        batches = self._batch.split(batch.batch, sizes)
        carries = [None] * len(sizes)
        if batch.carry is not None:
            carries = self.carry.split(batch.carry, sizes)
        return list(map(Carried, batches, carries))

    def take_rows(self, batch: Carried, indices: Sequence[int]) -> Carried:
        carry = None if batch.carry is None else self.carry.take_rows(batch.carry, indices)
        return Carried(self._batch.take_rows(batch.batch, indices), carry)

    def row_dims(self, batch: Carried) -> dict[str, int]:
        found = {"batch": self._batch.row_dims(batch.batch)}
        if batch.carry is not None:
            found["carry"] = self.carry.row_dims(batch.carry)
        return {
            f"{name}.{path}" if path else name: dim
            for name, dims in found.items()
            for path, dim in dims.items()
        }

    @staticmethod
    def _about_carry(read: Callable[[Any], int], carry: Any) -> int:
        try:
            return read(carry)
        except BatchError as error:
            raise BatchError(f"In carry, whose layout Carry(…) declares: {error}") from error


class Carry(Feature):
    """State that is carried from batch to batch, such as that of a recurrent model.

    ``forward(model, microbatch, carry)`` receives the state of its rows, None at the start, and
    returns a mapping with ``"loss"`` and ``"carry"``; see `Microbatcher.backward`.

    Args:
        layout: the dimension of the state that holds the rows (1 for an ``nn.LSTM``), or a mapping
            as for ``batch_layout``.
    """

    def __init__(self, layout: int | Mapping[str, Any]) -> None:
        self._layout = layout

    def attach(self, setup: Setup) -> None:
        setup.carrying = _WithState(setup.batch_layout, self._layout)


class _WithState(Carrying):
    """Batches together with their state."""

    # Functions of the caller still receive batches without their state.
    is_on = True

    def __init__(
        self, batch_layout: int | Mapping[str, Any], carry_layout: int | Mapping[str, Any]
    ) -> None:
        layout = _CarriedLayout(batch_layout, carry_layout)
        super().__init__(layout)
        self.carry_layout = layout.carry

    def beside(self, batch: Any, carry: Any) -> Any:
        return None if batch is None else Carried(batch, carry)

    def refuse_several(self, batches: Iterable[Any]) -> None:
        if not all(isinstance(each, Carried) for each in batches):
            raise ValueError(
                "accumulate treats batches as one, but with Carry(…) each continues from the "
                "previous one; call backward for each of them before the optimizer's step, with "
                "carry=result.carry of the previous one"
            )

    def hiding(self, function: Any) -> Any:
        if isinstance(function, Mapping):
            return {name: self.hiding(each) for name, each in function.items()}
        if not callable(function):
            return function

        def told(*arguments: Any, **options: Any) -> Any:
            return function(*map(_without_carry, arguments), **options)

        # `updated=()`, because the attributes of a loss that is a module would be copied.
        return functools.update_wrapper(told, function, updated=())


def _without_carry(value: Any) -> Any:
    return value.batch if isinstance(value, Carried) else value
