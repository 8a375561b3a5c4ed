"""Batches with rows sorted by cost, and the check of whether their padding can be cut."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from automicro.batch.device import on_host
from automicro.batch.tensors import Contents
from automicro.checking.bench import Bench, Conditions, Failed, tried
from automicro.checking.draws import CollectiveError, needs_other_ranks
from automicro.checking.reading import LOSS, Reading, gaps
from automicro.errors import AutomicroError, PaddingWarning, warn
from automicro.lengths.padding import Declared, Group, Padding, cut_padding
from automicro.lengths.unit import (
    Cost,
    CostUnit,
    check_unit,
    length_dims,
    refuse_inputs_with_gradients,
)
from automicro.loss.averages import CutBatch
from automicro.loss.passes import Computation, Mode
from automicro.memory.oom import Failure, once_more
from automicro.ranks.interface import Ranks
from automicro.step.feature import Feature
from automicro.step.plan import ROWS, ReadBatch
from automicro.step.setup import Setup, Sort

_UNKNOWN, _SAME, _OTHER = range(3)
"""Verdicts of a check of padding; of several ranks, the highest counts."""


class _Seen(NamedTuple):
    """The result of one check."""

    verdict: int = _UNKNOWN
    why: str = ""
    output_dims: Mapping[str, dict[int, str]] = MappingProxyType({})


def _padded_rows(groups: Sequence[Group]) -> list[int]:
    """Return the rows to check: the one with the most padding, and one with about half of it.

    >>> import numpy as np
    >>> stops = np.array([8, 1, 0, 5])
    >>> _padded_rows([Group("mask", 8, np.zeros(4, int), stops, {})])
    [1, 3]
    """
    if not groups:
        return []
    share = np.mean([group.lengths / group.padded for group in groups], axis=0)
    # An empty row has no loss or output to compare.
    is_empty = np.any([group.stops <= group.starts for group in groups], axis=0)
    candidates = np.flatnonzero((share < 1) & ~is_empty)
    if not candidates.size:
        return []
    shares = share[candidates]
    chosen = [candidates[shares.argmin()], candidates[np.abs(shares - 0.5).argmin()]]
    return list(dict.fromkeys(map(int, chosen)))


def _look_at_padding(
    computation: Computation, batch: Any, groups: Sequence[Group], mode: Mode
) -> _Seen:
    """Compare losses with and without padding, and outputs at the positions that rows use."""

    def look() -> _Seen:
        seen = [_look(computation, batch, groups, row, mode) for row in _padded_rows(groups)]
        # A difference outranks an equal result, which outranks no result.
        return max(seen, key=lambda each: each.verdict, default=_Seen())

    # A single failure, such as a short lack of memory, decides nothing.
    seen = tried(look, computation.device)
    if isinstance(seen, Failed):
        seen = tried(look, computation.device)
    if not isinstance(seen, Failed):
        return seen
    if issubclass(seen.error, CollectiveError):
        return _Seen(why=needs_other_ranks(seen.why.partition(": ")[2]))
    if issubclass(seen.error, AutomicroError):
        return _Seen()  # the step itself raises the error
    if seen.kind is Failure.RETRYABLE:
        return _Seen(why="there was not enough memory to check a padded row")
    return _Seen(_OTHER, f"a row without padding fails: {seen.why}")


def _look(
    computation: Computation, batch: Any, groups: Sequence[Group], row: int, mode: Mode
) -> _Seen:
    with on_host():
        padded = computation.layout.take_rows(batch, [row])
        cut = cut_padding(padded, groups, slice(row, row + 1))
    spans = {group.name: [(0, group.padded), group.window([row])] for group in groups}
    with Bench(computation, Conditions(mode=mode, wants="outputs")) as bench:
        one, other = (bench.read(CutBatch.whole(each, 1)) for each in (padded, cut))
        dims: dict[str, dict[int, str]] = {}
        for name, whole in one.outputs.items():
            part = other.outputs.get(name)
            if part is None or part.dim() != whole.dim() or not whole.is_floating_point():
                continue
            own = length_dims([whole, part], spans)
            sizes = enumerate(zip(whole.shape, part.shape, strict=True))
            # Outputs that differ in another dimension cannot be compared.
            if all(size == cut or dim in own for dim, (size, cut) in sizes):
                dims[name] = own
        other.outputs = {path: other.outputs[path] for path in dims}
        # Values in the padding are arbitrary and need not agree.
        one = _narrowed(one, dims, spans)
        shaken = (bench.read(CutBatch.whole(padded, 1), shake=shake) for shake in range(1, 7))
        finite = [name for name, value in one.numbers.items() if math.isfinite(value)]
        has_values = any(float(leaf.nan_to_num().abs().max()) for leaf in one.outputs.values())
        found = gaps(one, other, (_narrowed(each, dims, spans) for each in shaken))
    if LOSS in found and (finite or math.isfinite(other.numbers[LOSS])):
        before, after = one.numbers[LOSS], other.numbers[LOSS]
        why = f"the loss of a row is {before:.6g} with its padding and {after:.6g} without"
        return _Seen(_OTHER, why)
    path = next((path for path in found if path in dims), None)
    if path is not None:
        why = f"the output {path!r} of a row differs by {found[path]:.2g} without its padding"
        return _Seen(_OTHER, why)
    if not (finite or has_values):
        return _Seen(why="the forward returns neither a finite loss nor outputs for a row")
    return _Seen(_SAME, output_dims=dims)


def _narrowed(
    reading: Reading,
    dims: Mapping[str, Mapping[int, str]],
    spans: Mapping[str, Sequence[tuple[int, int]]],
) -> Reading:
    """Return the reading without the padding of its outputs."""
    outputs = {}
    for path, own in dims.items():
        leaf = reading.outputs[path]
        for dim, name in own.items():
            start, stop = spans[name][1]
            leaf = leaf.narrow(dim, start, stop - start)
        outputs[path] = leaf
    return dataclasses.replace(reading, outputs=outputs)


_PATIENCE = 4  # checks without a result
_DECLARE = "Pass cut_padding=True to cut it anyway, or cut_padding=False to silence this warning"


def check_cut_padding(value: object) -> None:
    """Refuse invalid values of ``cut_padding``.

    >>> check_cut_padding("auto")
    """
    if value != "auto" and not isinstance(value, bool):
        raise ValueError(
            f"cut_padding={value!r} is not known; use 'auto' (cut if a row computes the same "
            "without its padding), True or False"
        )


class MicrobatchUnit(Feature):
    """Counts microbatch sizes in tokens, seconds, or the cost of a row, instead of rows.

    The rows of a batch are sorted by cost and packed into microbatches whose cost, including
    padding, is at most the size. Padding is cut to the longest row of each microbatch.

    Args:
        unit: ``"tokens"``, ``"seconds"``, or a function from a batch of one row to its cost; or
            ``"rows"``, which changes nothing.
        padding: the source of lengths, if names do not show it: for the path of a tensor, the path
            of its lengths or mask, a pair of that path and the padded dimension, or None for a
            tensor that is never cut.
        cut_padding: ``"auto"`` cuts if a check shows that a row computes the same without padding,
            True always, False never.

    Raises:
        TypeError, ValueError: not a unit, or an option that does not fit it.

    Example:
        >>> import torch
        >>> from automicro import Microbatcher
        >>> model = torch.nn.Linear(1, 1)
        >>> def forward(model, batch):
        ...     return model(batch["input_ids"].float()[..., None]).mean()
        >>> microbatcher = Microbatcher(
        ...     model, forward=forward, loss_average="tokens", microbatch_size=4, probe=False,
        ...     features=[MicrobatchUnit("tokens", cut_padding=True)],
        ... )
        >>> ids = torch.tensor([[7, 0, 0], [4, 5, 6], [9, 0, 0]])
        >>> batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
        >>> batch["labels"] = torch.where(ids > 0, ids, -100)
        >>> result = microbatcher.backward(batch)
        >>> result.num_microbatches, result.microbatch_unit
        (2, 'tokens')
    """

    def __init__(
        self,
        unit: str | Cost,
        *,
        padding: Declared | None = None,
        cut_padding: bool | str = "auto",
    ) -> None:
        check_unit(unit)
        check_cut_padding(cut_padding)
        if unit == ROWS and padding is not None:
            raise ValueError(
                "padding=… says how to cut rows, but microbatch_unit='rows' never cuts them. Pass "
                "microbatch_unit='tokens', 'seconds' or a cost, or leave padding out"
            )
        self.unit, self._padding, self._cut_padding = unit, padding, cut_padding

    def attach(self, setup: Setup) -> None:
        if self.unit == ROWS:
            return
        ignore_index = getattr(setup.functions.get("loss_fn"), "ignore_index", -100)
        padding = Padding(self._padding, ignore_index=ignore_index)
        setup.unit = unit = CostUnit(self.unit, padding, setup.carrying.layout)

        def sorter(setup: Setup, computation: Computation) -> Sort:
            return _RowSorter(unit, computation, setup.ranks, self._cut_padding).sort

        setup.sorter = sorter


class _RowSorter:
    """Sorts rows of batches by cost, and cuts padding if a check finds no difference."""

    def __init__(
        self, unit: CostUnit, computation: Computation, ranks: Ranks, cut_padding: bool | str
    ) -> None:
        self._unit = unit
        self._computation = computation
        self._ranks = ranks
        # None until it is known.
        self._cuts: bool | None = cut_padding if isinstance(cut_padding, bool) else None
        self._fruitless = 0

    def sort(self, batches: Sequence[ReadBatch], mode: Mode) -> list[ReadBatch]:
        """Return the same batches with their rows sorted. All ranks call it."""
        device = self._computation.device
        # Outside of attempts, where smaller sizes do not help if memory runs out.
        read = once_more(
            lambda: [self._unit.groups(each.batch, each.num_rows) for each in batches],
            device,
            doing="reading the lengths of the rows",
        )
        if self._cuts is None:
            self._look(batches, read, mode)
        return once_more(
            lambda: [self._sorted(*each) for each in zip(batches, read, strict=True)],
            device,
            doing="sorting the rows of the batch",
        )

    def _sorted(self, batch: ReadBatch, groups: Sequence[Group]) -> ReadBatch:
        refuse_inputs_with_gradients(batch.batch)
        cuts = bool(self._cuts)
        packing = self._unit.packing(batch.batch, groups, batch.num_rows, cuts=cuts)
        with on_host():
            rows = self._computation.layout.take_rows(batch.batch, packing.order.tolist())
        return ReadBatch(
            batch=rows, num_rows=batch.num_rows, contents=Contents(rows), packing=packing
        )

    def _look(
        self, batches: Sequence[ReadBatch], read: Sequence[Sequence[Group]], mode: Mode
    ) -> None:
        seen = _Seen()
        padded = [
            (each.batch, groups)
            for each, groups in zip(batches, read, strict=True)
            if _padded_rows(groups)
        ]
        # Other ranks would have to run the forward as well, but might have no padded row.
        if padded and self._ranks.communicates_in_forward:
            seen = _Seen(why=needs_other_ranks())
            self._fruitless = _PATIENCE
        elif padded:
            with self._ranks.looking_alone():
                seen = _look_at_padding(self._computation, *padded[0], mode)
        # All ranks decide alike: if one of them found a difference, none cuts.
        verdict = int(self._ranks.most(float(seen.verdict)))
        self._unit.output_dims.update(seen.output_dims)
        self._fruitless += bool(seen.why) and verdict == _UNKNOWN
        gives_up = self._ranks.most(float(self._fruitless)) >= _PATIENCE
        if verdict == _UNKNOWN and not gives_up:
            return
        self._cuts = verdict == _SAME
        if seen.why and not self._cuts:
            warn(_message(verdict, seen.why), PaddingWarning)


def _message(verdict: int, why: str) -> str:
    if verdict == _UNKNOWN:
        return f"padding is not cut, because no check could compare results ({why}). {_DECLARE}"
    return (
        f"the model's results change without padding ({why}), so slices keep the batch's "
        "padding and save no time. Mask every operation along the length; for texts padded on "
        f"the left, also pass position_ids, and labels of -100 at the first word. {_DECLARE}"
    )
