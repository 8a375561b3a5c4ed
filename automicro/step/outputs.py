"""Results of a step besides its loss: outputs of all rows, state for the next batch."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from automicro.batch.device import on_host
from automicro.batch.joining import concat_rows, outputs_with_rows
from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.errors import BatchError, Bystander, LossError, MetricWarning, blame, warn
from automicro.memory.device import active_budget
from automicro.step.feature import Attempt, Feature, MicrobatchRun
from automicro.step.plan import Cut
from automicro.transaction.transaction import Part


def order_of(cuts: Sequence[Cut]) -> list[int] | None:
    """Return the place of each row among the rows of all slices; None if they are in order."""
    if all(cut.packing is None for cut in cuts):
        return None
    order: list[int] = []
    for cut in cuts:
        assert cut.packing is not None
        before = len(order)
        order += [place + before for place in cut.packing.places()]
    return order


def with_padding(outputs: Sequence[Any], cuts: Sequence[Cut], *, fill: float = 0) -> list[Any]:
    """Pad the outputs of all slices to the lengths that the whole batch would have given."""
    found, remaining = [], list(outputs)
    for cut in cuts:
        own, remaining = remaining[: len(cut.sizes)], remaining[len(cut.sizes) :]
        packing = cut.packing
        found += own if packing is None else packing.restored(own, cut.sizes, fill=fill)
    return found


_ALIKE = 3  # slices of one size that are conclusive


class Kept(Feature):
    """The requested results of every microbatch's forward in one step."""

    def __init__(
        self, where: object, device: torch.device, carry_layout: BatchLayout | None, known: set[str]
    ) -> None:
        self._known = known  # shared by all steps
        if where not in (True, False, "host", "device"):
            raise ValueError(
                f"return_outputs={where!r} is invalid. Pass True (the device of the batch), "
                "'host', 'device', or False"
            )
        self._where = where
        self._device = device
        self._layout = carry_layout
        self._home: torch.device | None = None
        self.outputs: Any = None
        self.carry: Any = None
        self._is_training = True
        self._forget()

    def know(self, paths: frozenset[str]) -> None:
        """Record outputs whose joining was already checked."""
        # The check has warned of them or found them correct, so they need no second warning.
        self._known |= paths

    def parts(self) -> Sequence[Part]:
        return [_Forgotten(self._forget)]

    def _forget(self) -> None:
        self._outputs: list[Any] = []
        self._carries: list[Any] = []
        self._row_dims: Mapping[str, int] = {}
        self.outputs = self.carry = None

    def computed(self, run: MicrobatchRun) -> None:
        """Keep the requested results of one microbatch."""
        output = run.output
        assert output is not None
        self._is_training = run.loss is not None
        if self._where is not False:
            # Found once per step: all of its microbatches come from one device.
            if self._home is None:
                self._home = self._find_home(run.given)
            self._outputs.append(_bring(outputs_with_rows(output.outputs), self._home))
        if self._layout is not None:
            if output.carry is not None:
                self._read_carry(self._layout, output.carry, run.num_rows)
            # Copied, because the state may be a view that would keep a large tensor alive.
            self._carries.append(map_tensors(output.carry, _copied))

    def end(self, attempt: Attempt) -> None:
        """Join all rows, in the order of their batches."""
        cuts = attempt.cuts
        # In evaluation, outputs without rows, such as a number, are valid for a whole batch.
        if not self._is_training and len(self._outputs) == 1 and cuts[0].packing is None:
            self.outputs, self._outputs = self._outputs[0], []
        self._warn_of_fixed_lengths([size for cut in cuts for size in cut.sizes])
        is_at_home = self._home is not None and self._home.type == "cpu"
        try:
            with on_host() if is_at_home else contextlib.nullcontext():
                if self._outputs:
                    whole = with_padding(self._outputs, cuts)
                    self.outputs = concat_rows(whole, order=order_of(cuts))
                    # Keeping both would need twice the memory of all outputs.
                    del whole
        except Exception as error:
            if not is_at_home:
                what = "outputs of all rows (return_outputs='host')"
                blame(error, Bystander(kind="joining of", name=what), f"while joining {what}")
            raise
        if self._carries:
            self.carry = concat_rows(self._carries, self._row_dims, order=order_of(cuts))
        self._outputs, self._carries = [], []

    def _warn_of_fixed_lengths(self, sizes: Sequence[int]) -> None:
        """Warn once of each output whose length is the same for microbatches of any size."""
        least, most = min(sizes, default=0), max(sizes, default=0)
        is_alike = least == most  # then a fixed length may also be a fixed number per row
        # Two slices of one size may have an output of the same length by chance.
        if len(sizes) != len(self._outputs) or (is_alike and len(sizes) < _ALIKE):
            return
        # By path, because only one of several outputs may be affected.
        lengths: dict[str, set[int]] = {}
        for output in self._outputs:
            for path, leaf in tensor_leaves(output):
                lengths.setdefault(path, set()).add(leaf.size(0) if leaf.dim() else 0)
        for path, found in lengths.items():
            length = found.pop()
            is_fixed = length and not found and not (is_alike and length % most == 0)
            if is_fixed and path not in self._known:
                self._known.add(path)
                name = f"output {path!r}" if path else "the output"
                rows = f"{most} rows each" if is_alike else f"{least} and of {most} rows"
                warn(
                    f"{name} has {length} entries for microbatches of {rows}. It does not have "
                    "one entry per row (a confusion matrix, a histogram, attention by layers?), "
                    "so it cannot be joined. Return tensors with rows in the first dimension, "
                    "leave it out of the outputs, or let a metric count it",
                    MetricWarning,
                )

    def _find_home(self, batch: Any) -> torch.device | None:
        if self._where == "device":
            return None
        if self._where == "host":
            return torch.device("cpu")
        return next((tensor.device for _, tensor in tensor_leaves(batch)), self._device)

    def _read_carry(self, layout: BatchLayout, carry: Any, num_rows: int) -> None:
        try:
            found = layout.num_rows(carry)
        except BatchError as error:
            raise LossError(
                f"forward returned a carry that Carry(…) cannot read: {error}"
            ) from error
        if found != num_rows:
            raise LossError(
                f"forward returned a carry of {found} rows for a microbatch of {num_rows}. Return "
                "the state of exactly these rows, and name their dimension in Carry(…)"
            )
        self._row_dims = layout.row_dims(carry)


class _Forgotten(Part):
    """The part that releases what an attempt has kept when it is rolled back."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget

    def begin(self) -> None:
        """Do nothing, because nothing is kept yet."""

    def prepare(self) -> None:
        """Do nothing, because outputs are already joined."""

    def commit(self) -> None:
        """Do nothing, because the caller has the outputs."""

    def roll_back(self) -> None:
        self._forget()


def _bring(outputs: Any, home: torch.device | None) -> Any:
    """Copy outputs, so that no memory of the forward is kept; None leaves them on their device."""
    if home is None:
        return map_tensors(outputs, _copied)
    if active_budget() is None:
        return map_tensors(outputs, lambda tensor: tensor.detach().to(home, copy=True))
    with on_host():
        return map_tensors(outputs, _copied)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
