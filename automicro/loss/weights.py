"""The weights with which the losses of microbatches add up to that of the whole batch."""

import functools
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from automicro.errors import LossError
from automicro.loss.averages import Average, CutBatch, Divisors, Weight, add_counts
from automicro.values import alone


def _shares(
    divisors: Divisors | None, num_microbatches: int, of_all: float | None, copies: int
) -> list[Weight | None]:
    """Return each microbatch's share of the whole, or of all ranks; None stands for one."""
    if divisors is None:
        return [None if copies == 1 else 1 / copies] * num_microbatches
    each, whole = divisors
    # Without any target on any rank each share is 0, to avoid dividing by 0.
    if of_all is not None:
        return [count / of_all if of_all else 0.0 for count in each]
    if isinstance(whole, Tensor):
        # Even for one microbatch: checking whether all targets are ignored would wait for the
        # device. Two kernels compute all shares, for any number of microbatches.
        counts = torch.stack([torch.as_tensor(count) for count in each])
        return list((counts / whole.clamp(min=torch.finfo(torch.float32).tiny)).unbind())
    # A batch that stays whole is not multiplied, so that its bits are those of plain torch.
    if len(each) == 1 and whole:
        return [None]
    return [count / whole if whole else 0.0 for count in each]  # 0 if every target is ignored


class BatchWeights:
    """The weights of every microbatch, for one loss or for several by name.

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
        self.totals: dict[str, Weight | None] = {}  # divisors of the whole, by name of the loss
        for name, average in averages.items():
            divisors, of_all = average.divisors(cuts), self._of_all_ranks.get(name)
            if divisors is not None and of_all is not None:
                # Ranks have agreed on the counts of whole batches, and compare the sum with them.
                divisors = Divisors(divisors.each, add_counts(divisors.each))
            self._weights[name] = _shares(divisors, num_microbatches, of_all, copies)
            self.totals[name] = None if divisors is None else divisors.whole
        # The weight of each microbatch, if all its losses have the same one.
        self.of_all = self._weights.get("") or [None] * num_microbatches
        # If all are nonzero numbers, a backward can start from them instead of one: gradients have
        # the same bits, and `add_up` weights all losses at once.
        self.are_plain = all(type(each) is float and each for each in self.of_all)
        every = zip(*self._weights.values(), strict=True)
        # Whether a microbatch counts no target and so contributes nothing, as far as known.
        self.is_nothing = [all(map(_is_zero, weights)) for weights in every]

    @property
    def all_are_nothing(self) -> bool:
        """Whether the whole batch of all ranks counts no target, as far as known."""
        if self._of_all_ranks:
            return not any(self._of_all_ranks.values()) and None not in self.totals.values()
        return all(self.is_nothing)

    def apply(
        self, index: int, loss: Tensor, losses: Mapping[str, Tensor], *, has_total: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Weight a microbatch's loss and its parts, so that those of a batch add up."""
        if "" in self._weights:
            weight = self.of_all[index]
            return _weigh(loss, weight), {n: _weigh(part, weight) for n, part in losses.items()}
        if has_total or losses.keys() != self._weights.keys():
            given = sorted([*losses, "loss"] if has_total else losses)
            raise LossError(
                f"loss_average names the losses {sorted(self._weights)}, but the forward returns "
                f"{given}; name the same losses, and return no 'loss' next to them"
            )
        weights = {name: self._weights[name][index] for name in losses}
        parts = {name: _weigh(part, weights[name]) for name, part in losses.items()}
        # Leave out means over no target, whose gradient can be NaN even times zero.
        counted = [part for name, part in parts.items() if not _is_zero(weights[name])]
        return functools.reduce(operator.add, counted or parts.values()), parts

    def report(self, loss: Tensor, parts: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a microbatch's loss and its parts without graphs, to be kept."""
        kept = alone if len(self.of_all) > 1 else Tensor.detach  # a single one is freed soon
        return kept(loss), {name: kept(part) for name, part in parts.items()}


def add_up(
    losses: Sequence[tuple[Tensor, dict[str, Tensor]]],
    weights: Sequence[Weight | None] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Add up the losses of microbatches, and their parts, to those of the whole batch."""
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
    # Multiplying each by a number would compute in at least this precision.
    precision = torch.promote_types(stacked.dtype, torch.float32)
    # Created on the host and copied without waiting.
    factors = torch.tensor(weights, dtype=precision, device="cpu")
    return (stacked * factors.to(stacked.device, non_blocking=True)).to(stacked.dtype).sum()


def _is_zero(weight: Weight | None) -> bool:
    return isinstance(weight, int | float) and weight == 0


def _weigh(loss: Tensor, weight: Weight | None) -> Tensor:
    if weight is None:
        return loss
    if isinstance(weight, Tensor):
        # A mean over no target is NaN; selecting first removes it from the sum.
        weight = weight.to(loss.device)
        return torch.where(weight > 0, loss, torch.zeros_like(loss)) * weight.to(loss.dtype)
    # A mean over no target is NaN, and so is zero times it. The product keeps the graph.
    if weight == 0:
        return loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
    return loss * weight
