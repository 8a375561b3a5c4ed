"""Whether the loss of a whole batch is what its microbatches give together.

A few rows do not show everything: the 32 hardest rows of a batch are all rows of 16, and a quantile
may agree by coincidence. So where a batch is split, its loss is computed as a whole and in its
microbatches, draws held constant; nothing is kept for a backward.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from automicro.batch.device import on_host
from automicro.loss.averages import Average
from automicro.loss.causes import KEEP_WHOLE, taken_for
from automicro.loss.look import Values, limits_of
from automicro.loss.passes import Computation, ExtraPasses, Mode, keeping_nothing
from automicro.loss.weights import BatchWeights, CutBatch
from automicro.memory.oom import empty_cache
from automicro.values import read_scalars

_SHAKEN_BITS = (8, 12, 15)  # of a float32: about 1e-6 of it
_SHAKEN_BITS_LOW = (1 << 15, 1 << 16, 3 << 15)  # about the last that bfloat16 keeps
_LEAST_SCALE = 0.05  # a loss near zero may be the difference of numbers near one
_FRACTIONS = (1, 2, 4)
_MOST_NAMED = 5


def fewer_and_fewer(sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """The microbatches to compare: all, half of them, a quarter, two, for where there is no memory.

    The last are halves of the first one, which fits by itself.

    >>> list(fewer_and_fewer([4, 4, 4, 3, 3]))
    [[4, 4, 4, 3, 3], [4, 4], [2, 2]]
    """
    counts = [len(sizes) // fraction for fraction in _FRACTIONS] + [2]
    for count in dict.fromkeys(each for each in counts if each > 1):
        yield sizes[:count]
    if sizes[0] > 1:
        yield [sizes[0] - sizes[0] // 2, sizes[0] // 2]


def shaken_bits(used: set[torch.dtype]) -> tuple[int, ...]:
    """Last bits to shake parameters by, where these types are computed in."""
    is_low = not used.isdisjoint((torch.float16, torch.bfloat16))
    return _SHAKEN_BITS_LOW if is_low else _SHAKEN_BITS


def compare_whole(
    computation: Computation, batch: Any, sizes: Sequence[int], mode: Mode
) -> Mapping[str, Values] | None:
    """The loss of the rows of these microbatches, together and apart, from the state as it is.

    It is called ``""``, and finite numbers beside it by their names. None where that tells nothing:
    there is neither a loss nor a number, the loss is not finite, or something draws that cannot be
    held constant.

    Args:
        computation: model and loss.
        batch: as a whole.
        sizes: rows of its microbatches; the last ones may be left out.
        mode: which forward. Modules are in its mode.

    Raises:
        CollectiveError: the forward was about to communicate with other ranks.
        BaseException: whatever the forward raises on these rows.
    """
    averages = computation.eval_averages if mode == "eval" else computation.averages
    whole, parts = _cut(computation, batch, sizes)
    keeping = torch.no_grad() if mode == "eval" else keeping_nothing()
    with ExtraPasses(computation) as passes, keeping:
        losses = _Losses(passes, averages, mode)

        def of_all() -> dict[str, list[float]]:
            return losses.of(whole, [whole], [sum(sizes)])

        together, apart = of_all(), losses.of(whole, parts, sizes)
        if not (together and apart and math.isfinite(together.get("", [0.0])[0])):
            return None
        used, as_loss = passes.silence.dtypes, losses.as_loss or frozenset()
        values = {
            name: Values(
                together=value,
                apart=math.fsum(apart[name]),
                chance=0.0,
                tolerance=limits_of(used, computation.device).total,
                scale=max(_LEAST_SCALE, *map(abs, apart[name])),
                is_told=name in losses.told,
            )
            for name, (value,) in together.items()
            if name in apart and math.isfinite(value) and name not in as_loss
        }
        if not all(each.add_up for each in values.values()):
            others = [of_all()]
            for bits in shaken_bits(used):
                with passes.shaken(bits):
                    others.append(of_all())
            for name, value in values.items():
                chances = [abs(each[name][0] - value.together) for each in others if name in each]
                values[name] = dataclasses.replace(value, chance=max(chances, default=math.inf))
        is_chance = losses.drew_elsewhere or bool(passes.silence.unsilenced)
    if computation.device.type != "cpu":
        empty_cache(computation.device)  # blocks of a whole batch serve no microbatch
    return None if is_chance else values


def _cut(computation: Computation, batch: Any, sizes: Sequence[int]) -> tuple[Any, Sequence[Any]]:
    """The rows of these microbatches as one, and apart: views."""
    layout, num_rows = computation.layout, sum(sizes)
    with on_host():
        rest = layout.num_rows(batch) - num_rows
        whole = layout.split(batch, [num_rows, rest])[0] if rest else batch
        return whole, layout.split(whole, sizes)


class _Losses:
    """Computes losses, weighted as microbatches would be; notes what draws by itself."""

    def __init__(self, passes: ExtraPasses, averages: Mapping[str, Average], mode: Mode) -> None:
        self._passes, self._averages, self._mode = passes, averages, mode
        self.drew_elsewhere = False
        self.told: set[str] = set()  # names of numbers that a host was told of
        # Those that were the loss each time. Of a single row any mean, median or maximum is.
        self.as_loss: frozenset[str] | None = None

    def of(self, batch: Any, parts: Sequence[Any], sizes: Sequence[int]) -> dict[str, list[float]]:
        """Of each part of a batch, the loss and what is beside it; empty where there is neither."""
        with on_host():
            cut = CutBatch(batch=batch, microbatches=parts, sizes=sizes)
            weights = BatchWeights(self._averages, [cut])
        found: list[Mapping[str, Tensor]] = []
        told: list[Mapping[str, tuple[float, float]]] = []
        for index, part in enumerate(parts):
            output = self._passes.losses(part, mode=self._mode)
            self.drew_elsewhere |= bool(self._passes.foreign_draws())
            told.append(output.told)
            told_as_loss = output.told_as_loss
            self.as_loss = told_as_loss if self.as_loss is None else self.as_loss & told_as_loss
            loss = output.loss
            if loss is None and output.told:  # an evaluation that only tells of numbers
                found.append({})
                continue
            if not (isinstance(loss, Tensor) and loss.is_floating_point() and loss.dim() == 0):
                return {}  # the step itself says what is wrong with it
            loss, beside = weights.apply(index, loss, output.losses, has_total=output.has_total)
            found.append({**beside, "": loss})
        names = [name for name in found[0] if all(name in each for each in found)]
        read = read_scalars([each[name] for name in names for each in found])
        values = {name: read[at * len(found) :][: len(found)] for at, name in enumerate(names)}
        return values | self._told(told)

    def _told(self, told: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, list[float]]:
        """Each part's share of the means that a host makes of numbers."""
        names = [name for name in told[0] if all(name in each for each in told)]
        self.told.update(names)
        totals = {name: sum(each[name][1] for each in told) for name in names}
        return {
            name: [value * weight / totals[name] for value, weight in (each[name] for each in told)]
            for name in names
            if totals[name]
        }


def describe_whole(
    computation: Computation,
    values: Values,
    sizes: Sequence[int],
    mode: Mode,
    few_rows_add_up: bool,
) -> str:
    """That the loss of a whole batch is another one, and the remedy.

    Args:
        computation: model and loss.
        values: that were found.
        sizes: rows of its microbatches.
        mode: which forward.
        few_rows_add_up: whether a look at a few rows has shown that theirs add up.
    """
    averages = computation.eval_averages if mode == "eval" else computation.averages
    kind = "evaluation loss" if mode == "eval" else "loss"
    if not math.isfinite(values.apart):
        return (
            f"the {kind} of {sum(sizes)} rows is {values.together:.6g} as a whole, and "
            f"{values.apart} put together from {len(sizes)} microbatches: one of them has no "
            "finite loss, as a mean over some of the rows has where there are none of these. "
            "Declare what it averages over (loss_average=…, a function of a batch that counts "
            "these rows; a loss of several such parts gives each by a name), so that a microbatch "
            f"without any counts for nothing, or {KEEP_WHOLE}"
        )
    few_rows, cause = "and that of a few rows is", "it"
    if not few_rows_add_up:
        few_rows = "which no look at a few rows could check"
        cause = "it averages over something else (pass loss_average=…), or it"
    return (
        f"the {kind} was taken for {taken_for(averages)}, {few_rows}, but {sum(sizes)} rows have "
        f"a loss of {values.together:.6g} as a whole, and of {values.apart:.6g} put together from "
        f"{len(sizes)} microbatches (draws held constant): {cause} depends on how many rows are "
        "computed together, as the hardest rows of a batch do (topk), a quantile, a threshold or a "
        "scale of the batch. Compute what the whole batch has a part in before it is cut, and give "
        f"it along with the rows, or {KEEP_WHOLE}, or ask "
        "automicro.verify for the place"
    )


def describe_numbers(values: Mapping[str, Values], sizes: Sequence[int]) -> str:
    """That numbers beside a loss are not what their microbatches' come to, and the remedy."""
    listed, more = _listed({repr(name): each for name, each in values.items()})
    return (
        f"numbers that the forward gives beside its loss are weighted as the loss is, and some do "
        f"not come to what {sum(sizes)} rows give: {listed} from {len(sizes)} microbatches{more}. "
        "A sum, a maximum, a quantile or a ratio is no mean. Give the mean of what each row has, "
        "let a metric count it (metrics=…), or compute it from the outputs (return_outputs=True)"
    )


def describe_told(values: Mapping[str, Values], sizes: Sequence[int], mode: Mode) -> str:
    """That numbers that a host was told of are not the means of their microbatches'."""
    listed, more = _listed(values)
    size = "eval_microbatch_size" if mode == "eval" else "microbatch_size"
    return (
        "numbers that a step tells of are averaged over its microbatches, weighted by rows, and "
        f"some do not come to what {sum(sizes)} rows give: {listed} from {len(sizes)} "
        f"microbatches{more}. A sum, a maximum, a quantile, a ratio or a function of a mean is no "
        "mean over rows. Tell of the mean of what each row has, compute it from what the step gives"
        f" for each row, or keep batches whole with {size}=None"
    )


def _listed(values: Mapping[str, Values]) -> tuple[str, str]:
    listed = ", ".join(
        f"{name} is {each.together:.6g} as a whole and {each.apart:.6g} put together"
        for name, each in list(values.items())[:_MOST_NAMED]
    )
    more = f" (and {len(values) - _MOST_NAMED} more)" if len(values) > _MOST_NAMED else ""
    return listed, more
