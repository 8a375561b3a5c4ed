"""The weights with which the losses of microbatches add up to the whole batch's."""

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automicro.errors import LossError
from automicro.loss.averages import Average, Counted, Counts, Samples, Sum, Weight
from automicro.values import alone, read_scalars


def microbatch_weights(
    average: Average, batch: Any, microbatches: Sequence[Any], sizes: Sequence[int]
) -> list[Weight | None]:
    """The factor of each microbatch's loss; None stands for one, and costs no operation.

    Raises:
        LossError: the denominators cannot be counted.

    Example:
        >>> from automicro.loss.averages import Samples
        >>> microbatch_weights(Samples(), batch=None, microbatches=[None, None], sizes=[3, 1])
        [0.75, 0.25]
    """
    return _shares(average, average.denominators(batch, microbatches, sizes), len(sizes))


def _shares(
    average: Average,
    denominators: Sequence[Weight] | None,
    num_microbatches: int,
    total_of_all: float | None = None,
) -> list[Weight | None]:
    """What each microbatch is of the whole, also of that of all ranks; None stands for one."""
    if denominators is None:
        return [None] * num_microbatches
    if total_of_all is not None:
        return [each / total_of_all if total_of_all else 0.0 for each in denominators]
    if num_microbatches == 1 and isinstance(average, Samples):
        return [None]
    if _hold_tensors(denominators):
        # Also for one microbatch: asking whether every target is ignored would wait for the device.
        counts = torch.stack([torch.as_tensor(denominator) for denominator in denominators])
        return list((counts / counts.sum().clamp(min=torch.finfo(torch.float32).tiny)).unbind())
    total = _whole(denominators)
    if total == 0:
        return [0.0] * num_microbatches  # every target is ignored: nothing is contributed
    if num_microbatches == 1:
        return [None]
    return [denominator / total for denominator in denominators]


@dataclass(frozen=True, kw_only=True)
class CutBatch:
    """One batch and how it was cut.

    Attributes:
        batch: as a whole.
        microbatches: its slices, in order.
        sizes: rows of each slice.
    """

    batch: Any
    microbatches: Sequence[Any]
    sizes: Sequence[int]


class BatchWeights:
    """The weights of every microbatch, for one loss or for several by name.

    Args:
        averages: what each loss averages over.
        cuts: the batch, or several that count as one: their losses have one denominator.
        totals: what the losses of all ranks together are divided by, by name; None for one rank.
        copies: how many ranks have the same rows.

    Attributes:
        of_all: what each microbatch weighs, where all its losses weigh the same; else None, for
            one.
        is_nothing: whether each microbatch is known to contribute nothing, because it counts no
            target.
        are_plain: whether each is a number other than zero, for all losses of its microbatch.
            Backwards may then begin with the weights in place of ones (see `begin`), and the
            losses are weighted all at once (see `sum`).
    """

    def __init__(
        self,
        averages: Mapping[str, Average],
        cuts: Sequence[CutBatch],
        *,
        totals: Mapping[str, float] | None = None,
        copies: int = 1,
    ) -> None:
        num_microbatches = sum(len(cut.sizes) for cut in cuts)
        self._denominators = {
            name: _denominators(average, cuts) for name, average in averages.items()
        }
        self._weights = {
            name: _shares(
                average, self._denominators[name], num_microbatches, (totals or {}).get(name)
            )
            for name, average in averages.items()
        }
        if copies > 1:
            for name, denominators in self._denominators.items():
                if denominators is None:
                    self._weights[name] = [1 / copies] * num_microbatches
        self._totals = totals
        self._only = self._weights.get("")
        self.of_all = self._only or [None] * num_microbatches
        only = self._only or ()
        self.are_plain = bool(only) and all(type(each) is float and each for each in only)
        zeros = [[_is_zero(each) for each in weights] for weights in self._weights.values()]
        self.is_nothing = zeros[0] if len(zeros) == 1 else list(map(all, zip(*zeros, strict=True)))

    @property
    def totals(self) -> dict[str, Weight | None]:
        """What each loss of the whole was divided by, by name; None for a sum."""
        return {
            name: None if denominators is None else self._total(denominators)
            for name, denominators in self._denominators.items()
        }

    def _total(self, denominators: Sequence[Weight]) -> Weight:
        if _hold_tensors(denominators):
            return torch.stack([torch.as_tensor(each) for each in denominators]).sum()
        # Ranks have agreed on what whole batches count, and compare the sum with it.
        return math.fsum(denominators) if self._totals else _whole(denominators)

    @property
    def all_are_nothing(self) -> bool:
        """Whether the whole batch, of all ranks, is known to count no target."""
        if self._totals:
            return not any(self._totals.values()) and None not in self._denominators.values()
        return all(self.is_nothing)

    def apply(
        self, index: int, loss: Tensor, losses: Mapping[str, Tensor], *, has_total: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A microbatch's loss and its parts, weighted so that those of a batch add up.

        Args:
            index: of the microbatch.
            loss: the total.
            losses: its parts by name.
            has_total: whether the total was given and not summed from the parts.

        Raises:
            LossError: ``loss_average`` names other losses than the forward gives, or the forward
                gives a total beside them, which no weights of its parts can replace.
        """
        if self._only is not None:
            weight = self._only[index]
            if type(weight) is float and weight and not losses:  # the usual case, quickly
                return loss * weight, {}
            return _weigh(loss, weight), {n: _weigh(part, weight) for n, part in losses.items()}
        if has_total or losses.keys() != self._weights.keys():
            given = sorted([*losses, "loss"] if has_total else losses)
            raise LossError(
                f"loss_average names the losses {sorted(self._weights)}, but the forward gives "
                f"{given}; name the same losses, and give no 'loss' beside them"
            )
        weights = {name: self._weights[name][index] for name in losses}
        parts = {name: _weigh(part, weights[name]) for name, part in losses.items()}
        # The gradient of a mean over no target can be NaN, even times zero: it is left out.
        counted = [part for name, part in parts.items() if not _is_zero(weights[name])]
        return functools.reduce(operator.add, counted or parts.values()), parts

    def begin(
        self, index: int, loss: Tensor, losses: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What the backward of a microbatch's loss begins with, and the parts of that, weighted.

        For plain weights. Gradients have the same bits as those of the loss times its weight, which
        would be an operation more in the forward, and two in the backward.

        >>> cut = CutBatch(batch=None, microbatches=[None, None], sizes=[3, 1])
        >>> weights = BatchWeights({"": Samples()}, [cut])
        >>> loss = torch.ones((), requires_grad=True)
        >>> loss.backward(weights.begin(0, loss, {})[0])
        >>> loss.grad
        tensor(0.7500)
        """
        weight = self.of_all[index]
        assert isinstance(weight, float)
        # One of its own for each: where a leaf is a view of the loss, autograd makes it the leaf's
        # gradient, to which the next backwards add.
        gradient = (
            torch.full((), weight, dtype=loss.dtype, device=loss.device)
            if type(loss) is Tensor
            else torch.full_like(loss, weight)
        )
        return gradient, {name: part * weight for name, part in losses.items()} if losses else {}

    def report(self, loss: Tensor, parts: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """What is kept of a microbatch's loss and its parts: no graphs, and nothing beside them."""
        kept = alone if len(self.of_all) > 1 else Tensor.detach  # one is gone soon
        return kept(loss), {name: kept(part) for name, part in parts.items()} if parts else {}

    def sum(
        self, losses: Sequence[tuple[Tensor, Mapping[str, Tensor]]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `add_up`, where backwards have begun with the weights: losses are not weighted yet.

        Their parts are.
        """
        totals = [loss for loss, _ in losses]
        if any(type(loss) is not Tensor for loss in totals):
            return _sum(list(map(_weigh, totals, self.of_all))), _parts_of(losses)
        stacked = torch.stack(totals)
        # A number times each of them would be computed in no less than this.
        precision = torch.promote_types(stacked.dtype, torch.float32)
        weights = torch.tensor(self.of_all, dtype=precision, device="cpu")
        weighted = stacked * weights.to(stacked.device, non_blocking=True)
        return weighted.to(stacked.dtype).sum(), _parts_of(losses)


def add_up(
    losses: Sequence[tuple[Tensor, Mapping[str, Tensor]]],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The whole batch's loss and its parts, from those of its microbatches, weighted already."""
    if len(losses) == 1:
        total, parts = losses[0]
        return total, dict(parts)
    return _sum([loss for loss, _ in losses]), _parts_of(losses)


def _parts_of(losses: Sequence[tuple[Tensor, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    return {name: _sum([parts[name] for _, parts in losses]) for name in losses[0][1]}


def _denominators(average: Average, cuts: Sequence[CutBatch]) -> Counts | None:
    if isinstance(average, Sum):
        return None  # also where there is no batch to ask about
    gathered, wholes = Counts(), list[float]()
    for cut in cuts:
        each = average.denominators(cut.batch, cut.microbatches, cut.sizes)
        if each is None:
            return None
        gathered += each
        if isinstance(average, Counted):
            wholes.append(_whole(each))
    if wholes:
        gathered.whole = math.fsum(wholes)
    return gathered


def _whole(denominators: Sequence[Weight]) -> float:
    """What numbers on the host come to, as the whole batch counts."""
    whole = denominators.whole if isinstance(denominators, Counts) else None
    return math.fsum(denominators) if whole is None else float(whole)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum()


def _hold_tensors(weights: Sequence[Weight]) -> bool:
    return any(issubclass(kind, Tensor) for kind in set(map(type, weights)))


def _is_zero(weight: Weight | None) -> bool:
    return isinstance(weight, int | float) and weight == 0


def _weigh(loss: Tensor, weight: Weight | None) -> Tensor:
    if weight is None:
        return loss
    if isinstance(weight, Tensor):
        # A mean over no target is NaN; selecting first keeps it out of the sum.
        weight = weight.to(loss.device)
        return torch.where(weight > 0, loss, torch.zeros_like(loss)) * weight.to(loss.dtype)
    if weight == 0:
        return loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
    return loss * weight


_MOST_UNREAD = 100


class LossMean:
    """Gathers the losses of batches, each with what it was divided by.

    A mean of means would depend on how the data was cut into batches. Sums add up. What lies on a
    device is read late, a hundred batches at once.

    Example:
        >>> import torch
        >>> mean = LossMean()
        >>> mean.add(torch.tensor(1.0), {}, {"": 3})
        >>> mean.add(torch.tensor(5.0), {}, {"": 1})
        >>> mean.compute()
        {'loss': 2.0}
    """

    def __init__(self) -> None:
        self._gathered: dict[str, list[tuple[float, float | None]]] = {}
        self._unread: list[tuple[str, Tensor, Weight | None]] = []

    def add(
        self,
        loss: Tensor,
        losses: Mapping[str, Tensor],
        denominators: Mapping[str, Weight | None],
    ) -> None:
        """Take one batch's loss, its parts by name, and what they were divided by.

        Args:
            loss: the total.
            losses: its parts.
            denominators: by the name of the loss, or one for all under ``""``; None for a sum.
        """
        if "" in denominators:
            of_all = denominators[""]
            self._unread.append(("loss", loss, of_all))
            self._unread += [(f"loss/{name}", part, of_all) for name, part in losses.items()]
        else:
            for name, part in losses.items():
                self._unread.append((f"loss/{name}", part, denominators[name]))
        if len(self._unread) >= _MOST_UNREAD:
            self._read()

    def merge(self, other: "LossMean") -> None:
        """Take all that another one gathered, such as another rank's.

        >>> import torch
        >>> mine, others = LossMean(), LossMean()
        >>> mine.add(torch.tensor(1.0), {}, {"": 3})
        >>> others.add(torch.tensor(5.0), {}, {"": 1})
        >>> mine.merge(others)
        >>> mine.compute()
        {'loss': 2.0}
        """
        self._read()
        other._read()
        for name, values in other._gathered.items():
            self._gathered.setdefault(name, []).extend(values)

    def __getstate__(self) -> dict[str, Any]:
        self._read()
        return vars(self)

    def compute(self) -> dict[str, float]:
        """``"loss"``, and each part as ``"loss/name"``; empty where there were none."""
        self._read()
        means = {name: _mean(values) for name, values in self._gathered.items()}
        if means and "loss" not in means:
            # As in training, a part of which nothing counts is no part of the sum.
            parts = [means[name] for name, values in self._gathered.items() if _counts(values)]
            means = {"loss": math.fsum(parts) if parts else math.nan} | means
        return means

    def _read(self) -> None:
        """Read what is still where it was computed, all at once."""
        unread, self._unread = self._unread, []
        losses = read_scalars([loss for _, loss, _ in unread])
        counts = iter(read_scalars([n for _, _, n in unread if isinstance(n, Tensor)]))
        for (name, _, count), loss in zip(unread, losses, strict=True):
            denominator = next(counts) if isinstance(count, Tensor) else count
            self._gathered.setdefault(name, []).append((loss, denominator))


def _counts(values: list[tuple[float, float | None]]) -> bool:
    return any(denominator is None or denominator > 0 for _, denominator in values)


def _mean(values: list[tuple[float, float | None]]) -> float:
    if any(denominator is None for _, denominator in values):
        return math.fsum(loss for loss, _ in values)
    # A batch in which nothing counts has a loss that says nothing: it may be NaN.
    counted = [(loss, denominator) for loss, denominator in values if denominator]
    if not counted:
        return math.nan
    total = math.fsum(denominator for _, denominator in counted)
    return math.fsum(loss * denominator for loss, denominator in counted) / total
