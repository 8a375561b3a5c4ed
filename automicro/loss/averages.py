"""The average that a loss takes, and the weights with which losses of microbatches add up to it."""

import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro.errors import LossError
from automicro.loss.conventions import IGNORED as IGNORED
from automicro.loss.conventions import ITEMS
from automicro.torch_private import forward_of_class, version_of
from automicro.values import alone, read_scalars

Weight: TypeAlias = float | Tensor

REMEDY = (
    "pass loss_average='samples', 'tokens' or 'none' (a sum), or a callable that returns the "
    "divisor of a microbatch's loss"
)


class CutBatch(NamedTuple):
    """One batch and its cut."""

    batch: Any
    microbatches: Sequence[Any]
    sizes: Sequence[int]  # rows of each microbatch

    @classmethod
    def whole(cls, batch: Any, num_rows: int, *, times: int = 1) -> Self:
        """Return a batch in one piece, or several copies of it in a row."""
        return cls(batch=batch, microbatches=[batch] * times, sizes=[num_rows] * times)


class Divisors(NamedTuple):
    """Divisors of the losses of microbatches and of the whole."""

    each: Sequence[Weight]  # of every microbatch
    whole: Weight  # of all batches together, which may differ from the sum


def _add_counts(counts: Sequence[Weight]) -> Weight:
    """Return the sum of counts, as a tensor if one of them is on a device.

    >>> _add_counts([1, 2.5])
    3.5
    """
    # Tensors are not read here, because that would wait for the device.
    if any(issubclass(kind, Tensor) for kind in set(map(type, counts))):
        return torch.stack([torch.as_tensor(count) for count in counts]).sum()
    return math.fsum(counts)


def read_numbers(values: Sequence[Any]) -> list[Any]:
    """Replace tensors of one element by numbers, waiting for a device only once.

    >>> read_numbers([torch.ones(1), None, 2])
    [1.0, None, 2]
    """
    in_tensors = [isinstance(each, Tensor) and each.numel() == 1 for each in values]
    given = [each.reshape(()) for each in itertools.compress(values, in_tensors)]
    read = iter(read_scalars(given))
    return [next(read) if there else each for there, each in zip(in_tensors, values, strict=True)]


class Average(Protocol):
    """The average that one loss takes."""

    counts_rows: ClassVar[bool] = False  # whether weights depend only on numbers of rows
    is_known: bool = True  # whether it was declared or inferred, not assumed

    def describe(self) -> str:
        """Describe the assumed average, to complete "the loss is …"."""

    def divisors(self, cuts: Sequence[CutBatch]) -> Divisors | None:
        """Return the divisors of the losses of batches that count as one; None for a sum."""


class Samples(Average):
    """A mean over rows."""

    counts_rows = True

    def __init__(self, *, is_known: bool = True) -> None:
        self.is_known = is_known

    def describe(self) -> str:
        return "a mean over samples"

    def divisors(self, cuts: Sequence[CutBatch]) -> Divisors | None:
        # Plain numbers, for which the batch does not have to be read.
        sizes = [size for cut in cuts for size in cut.sizes]
        return Divisors(sizes, _add_counts(sizes))


class Sum(Average):
    """A sum: nothing was divided, so nothing needs a weight."""

    counts_rows = True

    def describe(self) -> str:
        return "a sum"

    def divisors(self, cuts: Sequence[CutBatch]) -> Divisors | None:
        return None


class Counted(Average):
    """A mean over the number that the caller's function counts in a microbatch."""

    def __init__(self, count: Callable[[Any], float | Tensor]) -> None:
        self._count = count

    def describe(self) -> str:
        return f"a mean over what {getattr(self._count, '__name__', self._count)!s} counts"

    def divisors(self, cuts: Sequence[CutBatch]) -> Divisors | None:
        parts = [each for cut in cuts for each in cut.microbatches]
        # If no batch was cut, the parts are the wholes, so they are counted only once.
        wholes = [cut.batch for cut in cuts if len(parts) > len(cuts)]
        # The caller's function may return tensors on a device, so all are read at once.
        counts = read_numbers([self._count(each) for each in (*parts, *wholes)])
        for count in counts:
            if not isinstance(count, Real) or not math.isfinite(count) or count < 0:
                raise LossError(
                    f"the loss_average callable returned {count!r} for a microbatch; it must "
                    "return one number of zero or more: the divisor of the microbatch's loss"
                )
        # The whole is counted separately, because counts of parts might not add up to it, as with
        # a maximum.
        each, whole = counts[: len(parts)], counts[len(parts) :]
        return Divisors(list(map(float, each)), math.fsum(whole or each))


@dataclass(eq=False)
class Tokens(Average):
    """A mean over the targets that are not ignored, weighted by class if the loss is."""

    targets: Callable[[Any], Any]  # from a batch to its targets, rows first
    _: KW_ONLY
    ignore_index: int = IGNORED
    class_weight: Tensor | None = None  # shape (classes,)
    shift: int = 0  # leading positions of each row without prediction; 1 for causal models
    # Whether to wait for counts on a device: the gradient of a mean over no target may be NaN, even
    # times zero, so a zero must be known.
    reads: bool = False
    is_claimed: bool = False  # read from a model's loss type, which its forward may not use
    _brought: tuple[Any, Tensor] | None = field(default=None, init=False)

    def describe(self) -> str:
        counted = "targets" if self.class_weight is None else "class weights of the targets"
        shifted = f", the first {self.shift} of each row left out" if self.shift else ""
        return f"a mean over the {counted} that are not {self.ignore_index}{shifted}"

    def divisors(self, cuts: Sequence[CutBatch]) -> Divisors:
        each = [count for cut in cuts for count in self._counts(cut)]
        return Divisors(each, _add_counts(each))

    def _counts(self, cut: CutBatch) -> Sequence[Weight]:
        targets, sizes = self.targets(cut.batch), cut.sizes
        if not isinstance(targets, Tensor) or targets.dim() == 0:
            raise LossError(
                "the loss is a mean over targets, but the batch's targets are "
                f"{type(targets).__name__}, not a tensor with a dimension; give them as one "
                f"(torch.from_numpy in the dataset or collate_fn), or {REMEDY}"
            )
        if targets.is_floating_point() or targets.is_complex():
            return sizes  # class probabilities or regression, where every row counts the same
        if self._has_rows_first(targets, cut):
            counts: Any = self._count(targets).reshape(len(targets), -1).sum(1)
        else:
            parts = [self._count(self.targets(part)).sum() for part in cut.microbatches]
            counts, sizes = torch.stack(parts), [1] * len(parts)
        add: Callable[[Any], Weight] = torch.sum
        if self.reads or counts.device.type == "cpu":
            counts, add = counts.tolist(), sum
        else:  # reading them would synchronize
            counts = counts.to(_float64(counts.device))
        ends = itertools.accumulate(sizes)
        return [add(counts[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    def _has_rows_first(self, targets: Tensor, cut: CutBatch) -> bool:
        if targets.is_nested or len(targets) != sum(cut.sizes):
            return False
        # The numbers of positions and rows may be equal: only a cut distinguishes the dimensions.
        return len(cut.sizes) == 1 or len(self.targets(cut.microbatches[0])) == cut.sizes[0]

    def _count(self, targets: Tensor) -> Tensor:
        if targets.is_nested:
            targets = targets.values()
        elif self.shift:
            targets = targets[..., self.shift :]
        counted = targets != self.ignore_index
        if self.class_weight is None:
            return counted
        # An ignored target such as -100 is not an index, so 0 replaces it below.
        weight = self._weight_on(targets.device, self.class_weight.detach())
        return torch.where(counted, weight[targets.where(counted, 0)], 0)

    def _weight_on(self, device: torch.device, weight: Tensor) -> Tensor:
        """Return the class weights on the device of the targets, copied only once."""
        if weight.device == device:
            return weight.to(_float64(device))
        # Weights may be written to in place between batches.
        version = device, version_of(weight)
        if self._brought is None or self._brought[0] != version:
            self._brought = version, weight.to(device, _float64(device))
        return self._brought[1]


def _float64(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


LossAverage: TypeAlias = str | Callable[[Any], float | Tensor] | Mapping[str, Any]


def read_average(
    loss_average: Any,
    *,
    loss_fn: Callable[..., Any] | None,
    model: nn.Module,
    targets: Callable[[Any], Any],
    reads_model: bool,
    counts_items: bool = False,
) -> dict[str, Average]:
    """Return the average of each loss: as declared, or as inferred from the loss or the model."""
    # One entry named "" stands for all losses.
    if counts_items and not callable(loss_average):
        if loss_average not in ("auto", "tokens"):
            raise ValueError(
                f"loss_average={loss_average!r}, but forward takes {ITEMS}, over which its loss is "
                "a mean; leave loss_average out, or give a function that counts the items of a "
                "microbatch"
            )
        return {"": Tokens(targets)}

    def read_off() -> Average | None:
        if loss_fn is not None:
            return _read_loss(loss_fn, targets)
        return read_declared() if reads_model else None

    def read_declared() -> Average | None:
        from automicro.loss.libraries import read_transformers

        return read_transformers(model, targets)

    def average_of(declared: Any) -> Average:
        match declared:
            case "samples":
                return Samples()
            case "none":
                return Sum()
            case "model":
                if (read := read_declared()) is not None:
                    return read
                raise ValueError(
                    f"loss_average='model' was given, but {type(model).__name__} declares no "
                    f"Hugging Face loss type with a known mean; {REMEDY}"
                )
            case "tokens":
                read = read_off()
                return read if isinstance(read, Tokens) else Tokens(targets, reads=True)
            case "auto":
                return read_off() or Samples(is_known=False)
            case str():
                raise ValueError(f"loss_average={declared!r} is not known; {REMEDY}")
        if callable(declared):
            return Counted(declared)
        raise TypeError(f"loss_average={declared!r} is of type {type(declared).__name__}; {REMEDY}")

    if not isinstance(loss_average, Mapping):
        return {"": average_of(loss_average)}
    if not loss_average or not all(isinstance(name, str) and name for name in loss_average):
        raise ValueError(
            f"loss_average={dict(loss_average)!r} must name losses, such as "
            "{'language': 'tokens', 'balance': 'samples'}; " + REMEDY
        )
    return {name: average_of(value) for name, value in loss_average.items()}


def is_declared(loss_average: Any) -> bool:
    """Whether the caller declared the average of every loss.

    >>> is_declared("tokens"), is_declared("auto"), is_declared({"a": "samples", "b": "auto"})
    (True, False, False)
    """
    if isinstance(loss_average, Mapping):
        return all(map(is_declared, loss_average.values()))
    return not (isinstance(loss_average, str) and loss_average == "auto")


def _read_loss(loss_fn: Callable[..., Any], targets: Callable[[Any], Any]) -> Average | None:
    """Infer the average from a loss module of torch or a torch.nn.functional function."""
    options: dict[str, Any] = {}
    # Options of the outer partial take precedence, as in a call.
    while isinstance(loss_fn, functools.partial):
        options = {**loss_fn.keywords, **options}
        loss_fn = loss_fn.func
    if isinstance(loss_fn, nn.Module):
        # An overridden forward, or a scripted one, may divide by anything.
        if getattr(forward_of_class(loss_fn), "__module__", None) != "torch.nn.modules.loss":
            return None
        names = ("reduction", "ignore_index", "weight")
        options = {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}
    elif getattr(F, getattr(loss_fn, "__name__", ""), None) is loss_fn:
        parameters = inspect.signature(loss_fn).parameters
        options = {name: each.default for name, each in parameters.items()} | options
    else:
        return None
    # The attribute of the module counts, not the default of its class.
    if options.get("reduction") == "sum":
        return Sum()
    if options.get("reduction") not in ("mean", "batchmean"):
        return None
    # Losses without classes divide by elements, whose number is the same in each row.
    if "ignore_index" not in options:
        return Samples()
    ignored = options["ignore_index"]
    # Without any target, the gradient of these is zero; that of other losses may be NaN.
    has_zeros = isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss)
    has_zeros = has_zeros or loss_fn in (F.cross_entropy, F.nll_loss)
    return Tokens(
        targets,
        ignore_index=IGNORED if ignored is None else ignored,
        class_weight=options.get("weight"),
        reads=not has_zeros,
    )


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
                divisors = Divisors(divisors.each, _add_counts(divisors.each))
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
