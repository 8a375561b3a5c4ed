"""Results of a step beside its loss: outputs of all rows, state for the next batch."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from automicro.batch.device import on_host
from automicro.batch.joining import concat_rows
from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.errors import BatchError, Bystander, LossError, MetricWarning, blame, warn
from automicro.loss.conventions import outputs_with_rows
from automicro.memory.budget import active_budget
from automicro.step.feature import Attempt, Feature, MicrobatchRun
from automicro.step.plan import order_of, with_padding
from automicro.transaction.transaction import Part

_ALIKE = 3  # slices that show something: two may have as many boxes by chance
_EARLY = 10


class Kept(Feature):
    """The values that the caller asked for of every microbatch's forward.

    Args:
        where: outputs are kept.
        device: where the model computes, and where state for the next batch stays.
        carry_layout: where that has its rows; None where there is none.
        known: paths of outputs that were warned of, or found to be right, of all steps.
        is_early: whether this step is one of the first, in which slices that are alike are looked
            at, too.

    Attributes:
        outputs: of all rows in order, detached; None where they were not asked for, and before
            `join`.
        carry: state for the next batch, likewise.

    Raises:
        ValueError: ``where`` is none of those that there are.
    """

    def __init__(
        self,
        where: object,
        device: torch.device,
        carry_layout: BatchLayout | None,
        known: set[str] | None = None,
        *,
        is_early: bool = False,
    ) -> None:
        self._is_early = is_early
        self._known = set() if known is None else known
        if where not in (True, False, "host", "device"):
            raise ValueError(
                f"return_outputs={where!r}; say True for outputs where the batch lies, 'host', "
                "'device', or False"
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
        """Take note of outputs of which a look has shown whether they can be joined."""
        # They are warned of by the look, or fit: either way not again.
        self._known |= paths

    def parts(self) -> Sequence[Part]:
        return [_Forgotten(self._forget)]

    def _forget(self) -> None:
        self._outputs: list[Any] = []
        self._carries: list[Any] = []
        self._row_dims: Mapping[str, int] = {}
        self.outputs = self.carry = None

    def computed(self, run: MicrobatchRun) -> None:
        """Keep what is asked for of one microbatch.

        Raises:
            LossError: state for the next batch has other rows.
        """
        output = run.output
        assert output is not None
        self._is_training = run.loss is not None
        if self._where is not False:
            # Once for a step: all of its microbatches come from one place.
            if self._home is None:
                self._home = self._find_home(run.given)
            self._outputs.append(_bring(outputs_with_rows(output.outputs), self._home))
        if self._layout is not None:
            if output.carry is not None:
                self._read_carry(self._layout, output.carry, run.num_rows)
            # A copy: the state may be a view of something large, which it would keep alive.
            self._carries.append(map_tensors(output.carry, _copied))

    def end(self, attempt: Attempt) -> None:
        """Put all rows together, in the order of their batches.

        Raises:
            BatchError: what the forward gave cannot be joined.

        Warns:
            MetricWarning: it is joined, and shows that it is not one value per row.
        """
        cuts = attempt.cuts
        # In evaluation what has no rows, a number say, is taken from a batch that stayed whole.
        if not self._is_training and len(self._outputs) == 1 and cuts[0].packing is None:
            self.outputs, self._outputs = self._outputs[0], []
        self._warn_of_fixed_lengths([size for cut in cuts for size in cut.sizes])
        is_at_home = self._home is not None and self._home.type == "cpu"
        try:
            with on_host() if is_at_home else contextlib.nullcontext():
                if self._outputs:
                    whole = with_padding(self._outputs, cuts)
                    self.outputs = concat_rows(whole, order=order_of(cuts))
                    # Both at once would be twice the memory of all outputs.
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
        """Warn, once for each, of what is as long for every microbatch, whatever its rows."""
        if len(sizes) < 2 or len(sizes) != len(self._outputs):
            return
        least, most = min(sizes), max(sizes)
        if least == most and (len(sizes) < _ALIKE or not self._is_early):
            return
        # By path, as one output of several may be such a one.
        lengths: dict[str, set[int]] = {}
        for output in self._outputs:
            for path, leaf in tensor_leaves(output):
                lengths.setdefault(path, set()).add(leaf.size(0) if leaf.dim() else 0)
        for path, found in lengths.items():
            length = found.pop()
            # As long for slices that are alike may also be so many for each row.
            is_fixed = not found and length and (least < most or length % most)
            if is_fixed and path not in self._known:
                self._known.add(path)
                name = f"output {path!r}" if path else "the output"
                rows = f"of {least} and of {most} rows" if least < most else f"of {most} rows each"
                warn(
                    f"{name} has {length} entries for microbatches {rows}, so it is not one per "
                    "row (a confusion matrix, a histogram, attention by layers?), and joining it "
                    "end to end means nothing. Return what has its rows in the first dimension, "
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
                f"forward returned a carry that cannot be read by Carry(…): {error}"
            ) from error
        if found != num_rows:
            raise LossError(
                f"forward returned a carry of {found} rows for a microbatch of {num_rows}; return "
                "the state of its own rows, and let Carry(…) say in which dimension they lie"
            )
        self._row_dims = layout.row_dims(carry)


class _Forgotten(Part):
    """Lets what an attempt has kept go when it is rolled back."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget

    def begin(self) -> None:
        """Nothing is kept yet."""

    def prepare(self) -> None:
        """It is joined."""

    def commit(self) -> None:
        """The caller has it."""

    def roll_back(self) -> None:
        self._forget()


def _bring(outputs: Any, home: torch.device | None) -> Any:
    """Copies, so that nothing of the forward's memory is held; None is where they are."""
    if home is None:
        return map_tensors(outputs, _copied)
    if active_budget() is None:
        return map_tensors(outputs, lambda tensor: tensor.detach().to(home, copy=True))
    with on_host():
        return map_tensors(outputs, _copied)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


class Keeper:
    """Keeps what is asked for of the forwards of the steps that ask for something."""

    def __init__(self, device: torch.device, carry_layout: BatchLayout | None) -> None:
        self._device, self._carry_layout = device, carry_layout
        self._known: set[str] = set()
        self._steps = 0

    def keep(self, where: object) -> Kept:
        """Make the keeper of outputs and state of one step; see `Kept`."""
        self._steps += 1
        is_early = self._steps <= _EARLY
        return Kept(where, self._device, self._carry_layout, self._known, is_early=is_early)
