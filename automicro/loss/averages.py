"""What one loss averages over: rows, targets, whatever a function counts, or nothing."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor, nn

from automicro.batch.structure import Kind, kind_of, open_container, state_of
from automicro.batch.tensors import tensor_leaves
from automicro.errors import LossError
from automicro.loss.conventions import TARGET_KEYS, Carried, Convention
from automicro.torch_private import forward_of_class, version_of

Weight: TypeAlias = float | Tensor

IGNORED = -100  # torch's and transformers' default `ignore_index`
REMEDY = (
    "pass loss_average='samples', 'tokens' or 'none' (a sum), or a callable that gives the number "
    "that a microbatch's loss was divided by"
)


class Average(Protocol):
    """What one loss averages over.

    Attributes:
        counts_rows: whether the weights of microbatches depend on nothing but their rows.
    """

    counts_rows: bool

    @property
    def is_known(self) -> bool:
        """Whether it was declared or read off, not assumed."""

    def describe(self) -> str:
        """What the loss is taken for, in words that complete "the loss is …"."""

    def denominators(
        self, batch: Any, microbatches: Sequence[Any], sizes: Sequence[int]
    ) -> Sequence[Weight] | None:
        """One denominator per microbatch, or None where the loss is a sum."""


class Samples:
    """A mean over rows."""

    counts_rows = True

    def __init__(self, *, is_known: bool = True) -> None:
        self.is_known = is_known

    def describe(self) -> str:
        return "a mean over samples"

    def denominators(
        self, batch: Any, microbatches: Sequence[Any], sizes: Sequence[int]
    ) -> Sequence[Weight] | None:
        return sizes


class Sum:
    """A sum: nothing was divided, so nothing needs a weight."""

    counts_rows = True
    is_known = True

    def describe(self) -> str:
        return "a sum"

    def denominators(
        self, batch: Any, microbatches: Sequence[Any], sizes: Sequence[int]
    ) -> Sequence[Weight] | None:
        return None


class Counts(list[Weight]):
    """What each microbatch counts, and what the whole batch does, which need not be their sum.

    Attributes:
        whole: None where that is the sum.
    """

    whole: Weight | None = None


class Counted:
    """A mean over whatever the caller's function counts in a microbatch.

    The whole batch is counted, too: of ``max(1, n)`` the counts of microbatches add up to more.
    """

    counts_rows = False
    is_known = True

    def __init__(self, count: Callable[[Any], float | Tensor]) -> None:
        self._count = count

    def describe(self) -> str:
        return f"a mean over what {getattr(self._count, '__name__', self._count)!s} counts"

    def denominators(
        self, batch: Any, microbatches: Sequence[Any], sizes: Sequence[int]
    ) -> Sequence[Weight] | None:
        counts: list[Any] = [self._count(microbatch) for microbatch in microbatches]
        if len(microbatches) > 1:
            counts.append(self._count(batch))
        if all(isinstance(count, Tensor) and count.numel() == 1 for count in counts):
            # One read for the whole batch, however many microbatches it is cut into.
            counts = torch.stack([count.detach().reshape(()) for count in counts]).tolist()
        elif any(isinstance(count, Tensor) for count in counts):
            counts = [
                count.item() if isinstance(count, Tensor) and count.numel() == 1 else count
                for count in counts
            ]
        for count in counts:
            if not isinstance(count, Real) or not math.isfinite(count) or count < 0:
                raise LossError(
                    f"the loss_average callable gave {count!r} for a microbatch; it must give one "
                    "number of zero or more: what the microbatch's loss was divided by"
                )
        found = Counts(count if isinstance(count, int) else float(count) for count in counts)
        if len(microbatches) > 1:
            found.whole = found.pop()
        return found


class Tokens:
    """A mean over the targets that are not ignored, weighted by class where the loss does so.

    Args:
        targets: finds the targets in a batch, a tensor of any shape with rows first.
        ignore_index: the target that does not count.
        class_weight: shape (classes,), the loss's ``weight``.
        shift: how many leading positions of each row have no prediction (1 for a causal language
            model that shifts its labels itself).
        reads: whether to wait for counts on a device. A zero has to be known where the gradient
            of a mean over no target is NaN, even times zero.

    Attributes:
        is_claimed: whether it was read off a model's loss type, which its forward may not use.
    """

    counts_rows = False
    is_known = True
    is_claimed = False

    def __init__(
        self,
        targets: Callable[[Any], Any],
        *,
        ignore_index: int = IGNORED,
        class_weight: Tensor | None = None,
        shift: int = 0,
        reads: bool = False,
    ) -> None:
        self._targets = targets
        self._reads = reads
        self._ignore_index = ignore_index
        self._class_weight = class_weight
        self._shift = shift
        self._weight_there: tuple[Tensor, torch.device, int] | None = None

    def describe(self) -> str:
        counted = "targets" if self._class_weight is None else "class weights of the targets"
        shifted = f", the first {self._shift} of each row left out" if self._shift else ""
        return f"a mean over the {counted} that are not {self._ignore_index}{shifted}"

    def denominators(
        self, batch: Any, microbatches: Sequence[Any], sizes: Sequence[int]
    ) -> Sequence[Weight] | None:
        targets = self._targets(batch)
        if isinstance(targets, ndarray):
            raise LossError(
                "the loss is a mean over targets, and the batch's targets are a NumPy array; "
                "convert to tensors in the dataset or the data loader's collate_fn "
                "(torch.from_numpy)"
            )
        if not isinstance(targets, Tensor) or targets.dim() == 0:
            raise LossError(
                "the loss is a mean over targets, but the batch's targets are "
                f"{type(targets).__name__}, not a tensor with a dimension; {REMEDY}"
            )
        if targets.is_floating_point() or targets.is_complex():
            return sizes  # class probabilities or regression: every row counts the same
        if targets.is_nested or not self._has_rows_first(targets, microbatches, sizes):
            return [self._number(self._count(self._targets(part)).sum()) for part in microbatches]
        per_row = self._count(targets).reshape(targets.shape[0], -1).sum(1)
        if self._reads or per_row.device.type == "cpu":
            counts = per_row.tolist()
            ends = itertools.accumulate(sizes)
            return [sum(counts[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        return [self._number(part.sum()) for part in torch.split(per_row, list(sizes))]

    def _number(self, count: Tensor) -> Weight:
        """As a Python number, or as a float64 tensor where reading it would synchronise."""
        if self._reads or count.device.type == "cpu":
            return count.item()
        return count.to(_float64(count.device))

    def _has_rows_first(
        self, targets: Tensor, microbatches: Sequence[Any], sizes: Sequence[int]
    ) -> bool:
        if targets.shape[0] != sum(sizes):
            return False
        # There may be as many positions as rows: only a cut tells these dimensions apart.
        return len(sizes) == 1 or self._targets(microbatches[0]).shape[0] == sizes[0]

    def _count(self, targets: Tensor) -> Tensor:
        if targets.is_nested:
            targets = targets.values()
        elif self._shift:
            targets = targets[..., self._shift :]
        counted = targets != self._ignore_index
        if self._class_weight is None:
            return counted
        weight = self._weight_on(targets.device, self._class_weight)
        return torch.where(counted, weight[targets.where(counted, 0)], 0)

    def _weight_on(self, device: torch.device, weight: Tensor) -> Tensor:
        """The class weights where the targets lie; brought there once, as that may wait."""
        if weight.device == device:
            return weight.detach().to(_float64(device))
        there, version = self._weight_there, version_of(weight)
        if there is None or there[1:] != (device, version):
            copy = weight.detach().to(device, _float64(device))
            there = self._weight_there = copy, device, version
        return there[0]


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
) -> dict[str, Average]:
    """What each loss averages over: as declared, or as the loss or the model says of itself.

    The result has one entry named ``""`` where one average holds for all.

    Args:
        loss_average: ``"auto"``, ``"model"``, ``"samples"``, ``"tokens"``, ``"none"``, a callable
            from a microbatch to its denominator, or a mapping of these by the loss's name.
        loss_fn: the loss function or module, where there is one.
        model: asked for its declared loss type where there is no ``loss_fn``.
        targets: finds the targets in a batch.
        reads_model: whether the model computes its own loss (Hugging Face's convention).

    Raises:
        TypeError, ValueError: a ``loss_average`` that is none of these.
    """
    if not isinstance(loss_average, Mapping):
        return {"": _declared_average(loss_average, loss_fn, model, targets, reads_model)}
    if not loss_average or not all(isinstance(name, str) and name for name in loss_average):
        raise ValueError(
            f"loss_average={dict(loss_average)!r} must name losses, such as "
            "{'language': 'tokens', 'balance': 'samples'}; " + REMEDY
        )
    return {
        name: _declared_average(value, loss_fn, model, targets, reads_model)
        for name, value in loss_average.items()
    }


def is_declared(loss_average: Any) -> bool:
    """Whether the caller said what every loss averages over.

    >>> is_declared("tokens"), is_declared("auto"), is_declared({"a": "samples", "b": "auto"})
    (True, False, False)
    """
    if isinstance(loss_average, Mapping):
        return all(map(is_declared, loss_average.values()))
    return not (isinstance(loss_average, str) and loss_average == "auto")


def _declared_average(
    declared: Any,
    loss_fn: Callable[..., Any] | None,
    model: nn.Module,
    targets: Callable[[Any], Any],
    reads_model: bool,
) -> Average:
    match declared:
        case "samples":
            return Samples()
        case "none":
            return Sum()
        case "model":
            read = _read_transformers(model, targets)
            if read is None:
                raise ValueError(
                    f"loss_average='model' was given, and {type(model).__name__} declares no loss "
                    f"type of Hugging Face's that is a known mean; {REMEDY}"
                )
            return read
        case "tokens":
            read = _read_off(loss_fn, model, targets) if loss_fn or reads_model else None
            return read if isinstance(read, Tokens) else Tokens(targets, reads=True)
        case "auto":
            read = _read_off(loss_fn, model, targets) if loss_fn or reads_model else None
            return read or Samples(is_known=False)
        case str():
            raise ValueError(f"loss_average={declared!r} is not known; {REMEDY}")
    if callable(declared):
        return Counted(declared)
    raise TypeError(f"loss_average={declared!r} is of type {type(declared).__name__}; {REMEDY}")


def _read_off(
    loss_fn: Callable[..., Any] | None, model: nn.Module, targets: Callable[[Any], Any]
) -> Average | None:
    if loss_fn is not None:
        return _read_loss(loss_fn, targets)
    return _read_transformers(model, targets)


def _read_loss(loss_fn: Callable[..., Any], targets: Callable[[Any], Any]) -> Average | None:
    """Read a loss module of torch or a function of torch.nn.functional, also in a partial."""
    options: dict[str, Any] = {}
    while isinstance(loss_fn, functools.partial):
        options = {**loss_fn.keywords, **options}
        loss_fn = loss_fn.func
    if isinstance(loss_fn, nn.Module):
        forward = forward_of_class(loss_fn)
        if getattr(forward, "__module__", None) != "torch.nn.modules.loss":
            return None  # a forward of its own, or a scripted one, may divide by anything
        names = ("reduction", "ignore_index", "weight")
        options = {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}
    else:
        if getattr(F, getattr(loss_fn, "__name__", ""), None) is not loss_fn:
            return None
        parameters = inspect.signature(loss_fn).parameters
        if "reduction" not in parameters:
            return None
        options = {name: each.default for name, each in parameters.items()} | options
    if options.get("reduction") == "sum":
        return Sum()
    if options.get("reduction") not in ("mean", "batchmean"):
        return None
    if "ignore_index" not in options:
        return Samples()
    ignored = options["ignore_index"]
    return Tokens(
        targets,
        ignore_index=IGNORED if ignored is None else ignored,
        class_weight=options.get("weight"),
        reads=not isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss)
        and loss_fn not in (F.cross_entropy, F.nll_loss),
    )


def _read_transformers(model: nn.Module, targets: Callable[[Any], Any]) -> Average | None:
    """Read the loss type that a Hugging Face model declares; looks find where its loss differs.

    A language model without one has the default, a causal loss, as transformers documents it.
    Causal models shift their labels by one, encoder-decoder models and token classifiers do not.
    """
    # Asked of the class first, because a model without a loss type logs when it is asked itself.
    if not (hasattr(type(model), "loss_function") or hasattr(model, "loss_function")):
        return None
    config = getattr(model, "config", None)
    loss_type = getattr(model, "loss_type", None)
    get_head: Any = getattr(model, "get_output_embeddings", None)
    if loss_type is None and isinstance(get_head and get_head(), nn.Module):
        loss_type = "ForConditionalGeneration"
    match loss_type:
        case "ForCausalLM":
            return _claimed(Tokens(targets, shift=1))
        case "ForConditionalGeneration":
            is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
            return _claimed(Tokens(targets, shift=0 if is_encoder_decoder else 1))
        case (
            "ForMaskedLM"
            | "ForTokenClassification"
            | "ForSequenceClassification"
            | "ForImageClassification"
            | "ForVideoClassification"
            | "ForAudioClassification"
        ):
            return Tokens(targets)
        case "ForSemanticSegmentation":
            return Tokens(targets, ignore_index=255)
        case "ForCTC":
            reduction = getattr(config, "ctc_loss_reduction", None)
            return Sum() if reduction == "sum" else Samples() if reduction == "mean" else None
    return None


def _claimed(average: Tokens) -> Tokens:
    average.is_claimed = True
    return average


_OTHER_IGNORED = (-1, 0, 255)
_ADDED = (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)  # to what a loss divides by


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One value for ``loss_average``.

    Attributes:
        code: the value as a user writes it.
        kind: what the loss would be, in words.
    """

    code: str
    kind: str

    @functools.cached_property
    def value(self) -> Any:
        """What the code stands for: what is tried is what is printed."""
        return eval(self.code, {"torch": torch})


def candidates(batch: Any, convention: Convention) -> Iterator[Candidate]:
    """What to try for this batch, the likeliest first."""
    yield Candidate(code="'samples'", kind="a mean over samples")
    yield Candidate(code="'none'", kind="a sum")
    yield Candidate(code="'tokens'", kind="a mean over the targets that are not ignored")
    counts = list(_target_counts(batch, convention))
    for path, leaf in tensor_leaves(batch):
        if not any(key.startswith("_") for key in path.split(".")):  # nobody's to write down
            counts += _leaf_counts(batch, path, leaf)
    yield from counts
    for count, added in itertools.product(counts, _ADDED):
        yield Candidate(
            code=f"{count.code} + {added}",
            kind=f"{count.kind}, {added} added to the divisor",
        )


def named(choice: Mapping[str, Candidate]) -> Candidate:
    """One candidate for each loss by name, as one for all."""
    code = ", ".join(f"{name!r}: {each.code}" for name, each in choice.items())
    kinds = ", ".join(f"{name!r} {each.kind}" for name, each in choice.items())
    return Candidate(code=f"{{{code}}}", kind=kinds)


def _target_counts(batch: Any, convention: Convention) -> Iterator[Candidate]:
    try:
        targets = convention.targets(batch)
    except (ValueError, IndexError):
        return
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_nested:
        return
    where = expression(batch, targets)
    yield Candidate(  # a model may say of itself that "tokens" are others
        code=f"lambda batch: ({where} != {IGNORED}).sum()",
        kind="a mean over the targets that are not ignored",
    )
    if targets.dim() > 1:
        yield Candidate(
            code=f"lambda batch: ({where}[..., 1:] != {IGNORED}).sum()",
            kind="a mean over the targets that are not ignored, the labels shifted by one",
        )
    for ignored in _OTHER_IGNORED:
        if bool((targets == ignored).any()):
            yield Candidate(
                code=f"lambda batch: ({where} != {ignored}).sum()",
                kind=f"a mean over the targets that are not {ignored}",
            )


def _leaf_counts(batch: Any, path: str, leaf: Tensor) -> Iterator[Candidate]:
    """Masks, lengths, weights of rows: whatever counts something and is not negative."""
    is_plain = leaf.layout is torch.strided and not leaf.is_nested
    if not is_plain or leaf.is_complex() or leaf.dim() == 0:
        return
    where = expression(batch, leaf)
    if not bool((leaf < 0).any()):
        yield Candidate(
            code=f"lambda batch: {where}.sum()",
            kind=f"a mean weighted by {path!r}",
        )
    if not leaf.is_floating_point():
        yield Candidate(
            code=f"lambda batch: ({where} != 0).sum()",
            kind=f"a mean over what is not zero in {path!r}",
        )


def expression(batch: Any, leaf: Tensor) -> str:
    """How to get at a leaf of a batch, in Python; ``batch`` where it does not lie in it.

    >>> labels = torch.ones(2)
    >>> expression({"inputs": [torch.zeros(2)], "labels": labels}, labels)
    "batch['labels']"
    """
    if isinstance(batch, Carried):
        batch = batch.batch  # the caller's functions get it alone
    return next((code for code, each in _places(batch, "batch") if each is leaf), "batch")


def _places(value: Any, code: str) -> Iterator[tuple[str, Any]]:
    """All that can be reached by opening containers, as `tensor_leaves` opens them."""
    yield code, value
    kind = kind_of(type(value))
    if isinstance(value, Mapping):
        for key in sorted(value, key=lambda key: key not in TARGET_KEYS):
            if type(key) in (str, int):  # others need not be what their text says
                yield from _places(value[key], f"{code}[{key!r}]")
    elif kind in (Kind.SEQUENCE, Kind.NAMED_TUPLE):
        for index, part in enumerate(value):
            yield from _places(part, f"{code}[{index}]")
    elif kind is Kind.RECORD or (kind is Kind.REGISTERED and not isinstance(value, Tensor)):
        opened = zip(*open_container(value), strict=True)
        for key, part in opened if kind is Kind.RECORD else state_of(value).items():
            yield from _places(part, f"{code}.{key}")
