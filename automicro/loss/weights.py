"""The weights with which the losses of microbatches add up to the whole batch's."""

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from automicro.errors import LossError
from automicro.loss.averages import Average, CutBatch, Divisors, Weight, add_counts, read_numbers
from automicro.values import alone


def _shares(
    divisors: Divisors | None, num_microbatches: int, of_all: float | None, copies: int
) -> list[Weight | None]:
    """Each microbatch's share of the whole, also of that of all ranks; None stands for one."""
    if divisors is None:
        return [None if copies == 1 else 1 / copies] * num_microbatches
    each, whole = divisors
    # Without any target on any rank each share is 0, and nothing is divided by 0.
    if of_all is not None:
        return [count / of_all if of_all else 0.0 for count in each]
    if isinstance(whole, Tensor):
        # Also for one microbatch: asking whether every target is ignored would wait for the device.
        # All shares in two kernels, however many microbatches.
        counts = torch.stack([torch.as_tensor(count) for count in each])
        return list((counts / whole.clamp(min=torch.finfo(torch.float32).tiny)).unbind())
    # A batch that stays whole is multiplied by nothing, so that its bits are those of plain torch.
    if len(each) == 1 and whole:
        return [None]
    return [count / whole if whole else 0.0 for count in each]  # 0: every target is ignored


class BatchWeights:
    """The weights of every microbatch, for one loss or for several by name.

    Attributes:
        of_all: what each microbatch weighs, where all its losses weigh the same; else None, for
            one.
        is_nothing: whether each microbatch is known to contribute nothing, because it counts no
            target.
        are_plain: whether each is a number other than zero, for all losses of its microbatch. A
            backward may then begin with it in place of one: gradients have the same bits, and
            losses are weighted all at once, by `add_up`.
        totals: what each loss of the whole was divided by, by name; None for a sum.

    Example:
        >>> from automicro.loss.averages import Samples
        >>> cut = CutBatch(batch=None, microbatches=[None, None], sizes=[3, 1])
        >>> BatchWeights({"": Samples()}, [cut]).of_all
        [0.75, 0.25]
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
        self._of_all_ranks = totals or {}
        self._weights: dict[str, list[Weight | None]] = {}
        self.totals: dict[str, Weight | None] = {}
        for name, average in averages.items():
            divisors, of_all = average.divisors(cuts), self._of_all_ranks.get(name)
            if divisors is not None and of_all is not None:
                # Ranks have agreed on what whole batches count, and compare the sum with it.
                divisors = Divisors(divisors.each, add_counts(divisors.each))
            self._weights[name] = _shares(divisors, num_microbatches, of_all, copies)
            self.totals[name] = None if divisors is None else divisors.whole
        self.of_all = self._weights.get("") or [None] * num_microbatches
        self.are_plain = all(type(each) is float and each for each in self.of_all)
        every = zip(*self._weights.values(), strict=True)
        self.is_nothing = [all(map(_is_zero, weights)) for weights in every]

    @property
    def all_are_nothing(self) -> bool:
        """Whether the whole batch, of all ranks, is known to count no target."""
        if self._of_all_ranks:
            return not any(self._of_all_ranks.values()) and None not in self.totals.values()
        return all(self.is_nothing)

    def apply(
        self, index: int, loss: Tensor, losses: Mapping[str, Tensor], *, has_total: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A microbatch's loss and its parts, weighted so that those of a batch add up.

        Raises:
            LossError: ``loss_average`` names other losses than the forward gives, or the forward
                gives a total beside them, which no weights of its parts can replace.
        """
        if "" in self._weights:
            weight = self.of_all[index]
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

    def report(self, loss: Tensor, parts: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """A microbatch's loss and its parts as they are kept, without graphs."""
        kept = alone if len(self.of_all) > 1 else Tensor.detach  # one is gone soon
        return kept(loss), {name: kept(part) for name, part in parts.items()}


def add_up(
    losses: Sequence[tuple[Tensor, dict[str, Tensor]]],
    weights: Sequence[Weight | None] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The whole batch's loss and its parts, from those of its microbatches."""
    if len(losses) == 1 and weights is None:
        return losses[0]
    parts = {name: _sum([each[name] for _, each in losses], weights) for name in losses[0][1]}
    return _sum([loss for loss, _ in losses], weights), parts


def _sum(losses: Sequence[Tensor], weights: Sequence[Weight | None] | None) -> Tensor:
    if weights is None:
        return torch.stack(list(losses)).sum()
    if any(type(loss) is not Tensor for loss in losses):
        return _sum(list(map(_weigh, losses, weights)), None)
    stacked = torch.stack(list(losses))
    # A number times each of them would be computed in no less than this.
    precision = torch.promote_types(stacked.dtype, torch.float32)
    # Made on the host and sent without waiting.
    factors = torch.tensor(weights, dtype=precision, device="cpu")
    return (stacked * factors.to(stacked.device, non_blocking=True)).to(stacked.dtype).sum()


def _is_zero(weight: Weight | None) -> bool:
    return isinstance(weight, int | float) and weight == 0


def _weigh(loss: Tensor, weight: Weight | None) -> Tensor:
    if weight is None:
        return loss
    if isinstance(weight, Tensor):
        # A mean over no target is NaN; selecting first keeps it out of the sum.
        weight = weight.to(loss.device)
        return torch.where(weight > 0, loss, torch.zeros_like(loss)) * weight.to(loss.dtype)
    # A mean over no target is NaN, and so is zero times it. The product keeps the graph.
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
        self._gathered: list[tuple[str, float, float | None]] = []  # name, loss, denominator
        self._unread: list[tuple[str, Tensor, Weight | None]] = []

    def add(
        self,
        loss: Tensor,
        losses: Mapping[str, Tensor],
        denominators: Mapping[str, Weight | None],
    ) -> None:
        """Take one batch's loss, its parts by name, and what they were divided by."""
        is_one = "" in denominators
        if is_one:
            self._unread.append(("loss", loss, denominators[""]))
        for name, part in losses.items():
            self._unread.append((f"loss/{name}", part, denominators["" if is_one else name]))
        # Held on the device until then: reading each would wait for each.
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
        self._gathered += other._gathered

    def __getstate__(self) -> dict[str, Any]:
        # What is unread may lie on a device that the reader of this state does not have.
        self._read()
        return vars(self)

    def compute(self) -> dict[str, float]:
        """``"loss"``, and each part as ``"loss/name"``; empty where there were none."""
        self._read()
        gathered = defaultdict[str, list[tuple[float, float | None]]](list)
        for name, loss, count in self._gathered:
            gathered[name].append((loss, count))
        means = {name: _mean(values) for name, values in gathered.items()}
        if means and "loss" not in means:
            # As in training, a part of which nothing counts is no part of the sum.
            counted = [mean for mean in means.values() if mean is not None]
            means = {"loss": math.fsum(counted) if counted else None} | means
        return {name: math.nan if mean is None else mean for name, mean in means.items()}

    def _read(self) -> None:
        """Read what is still where it was computed, all at once."""
        unread, self._unread = self._unread, []
        values = read_numbers([value for _, *pair in unread for value in pair])
        names = [name for name, *_ in unread]
        self._gathered += zip(names, values[::2], values[1::2], strict=True)


def _mean(values: list[tuple[float, float | None]]) -> float | None:
    """None where nothing counts: the losses of such batches say nothing, and may be NaN."""
    # Sums add up and have no denominator.
    if any(count is None for _, count in values):
        return math.fsum(loss for loss, _ in values)
    counted = [(loss, count) for loss, count in values if count]
    # fsum, as an evaluation may add up millions of losses.
    total = math.fsum(count for _, count in counted)
    return math.fsum(loss * count for loss, count in counted) / total if counted else None
