"""The ways to turn a microbatch into a loss: four conventions, one interface.

In order of precedence:

1. the caller's ``forward(model, microbatch)``, which may return ``(None, outputs)`` in evaluation,
   and receives the number of targets that count if it takes ``num_items_in_batch``;
2. ``loss_fn`` and batches of ``(inputs, targets)``;
3. a model with Composer's interface: ``forward(batch)``, ``loss(outputs, batch)``, which may return
   several losses by name or in a list, and ``eval_forward(batch, outputs)``;
4. a model called with the batch as keyword arguments, whose output holds ``loss`` (Hugging Face),
   or is a mapping of only scalar losses, which are summed (detectors).
"""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from automicro.batch.layout import reading_of
from automicro.errors import BatchError, LossError, about
from automicro.torch_private import FakeTensor

TARGET_KEYS = ("labels", "label", "targets", "target")
ITEMS = "num_items_in_batch"
IGNORED = -100  # torch's and transformers' default `ignore_index`
HOW_TO_GIVE_A_LOSS = (
    "pass loss_fn=… for batches of (inputs, targets), or forward=… that takes (model, microbatch) "
    "and returns the loss"
)


class Carried(NamedTuple):
    """A batch and the state that the previous batch left, to be cut by rows together."""

    batch: Any
    carry: Any  # None at the start


@dataclasses.dataclass(slots=True)
class Output:
    """The output of one microbatch's forward."""

    loss: Tensor | None  # the total
    losses: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)  # its parts
    outputs: Any = None  # of the model
    has_total: bool = False  # whether the total was returned with its parts, and not summed
    carry: Any = None  # state for the next batch
    # Numbers that a host logs as means over microbatches, by description, each with its weight; and
    # the names of those that are the loss itself.
    told: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    told_as_loss: frozenset[str] = frozenset()


class Convention:
    """One way from a microbatch to a loss, outputs, targets and metrics."""

    # Defaults, so that a convention defines only its differences: whether the model's outputs hold
    # the loss, a batch must be (inputs, targets), metrics use another forward than training, and
    # the loss is divided by a number that the forward receives.
    computes_loss_in_model = needs_pairs = has_eval_forward = counts_items = False

    def call(self, model: nn.Module, microbatch: Any) -> Any:
        """Run the model."""
        return _call(model, microbatch)

    def _read(self, given: Any) -> Output:
        """Read the loss from the result of the call."""
        return _read_result(given)

    def _explain_missing(self, model: nn.Module, output: Output, microbatch: Any) -> str:
        return _no_loss_in(None)

    def train(self, model: nn.Module, microbatch: Any) -> Output:
        """Run the forward for training; the loss is required."""
        return self.loss_of(self.call(model, microbatch), model, microbatch)

    def loss_of(self, given: Any, model: nn.Module, microbatch: Any) -> Output:
        """Read the result of the call, which must have a loss, or compute the loss from it."""
        output = self._read(given)
        if output.loss is None:
            raise LossError(self._explain_missing(model, output, microbatch))
        return output

    def evaluate(self, model: nn.Module, microbatch: Any) -> Output:
        """Run the forward for evaluation; the loss may be missing."""
        return self._read(self.call(model, microbatch))

    def predict(self, model: nn.Module, microbatch: Any, *, holds_rows: bool = False) -> Any:
        """Return only the model's outputs; the batch may lack targets."""
        # `holds_rows`: the batch is a list of rows, and not a pair of inputs and targets.
        return _call(model, microbatch)

    def eval_forward(self, microbatch: Any, outputs: Any) -> Any:
        """Return the input of metrics in training, from the outputs of a forward."""
        return outputs

    def targets(self, batch: Any) -> Any:
        """Return the targets in a batch, for counting and for metrics."""
        return _find_targets(batch)

    def update_metric(self, metric: Any, outputs: Any, microbatch: Any) -> None:
        """Update one metric."""
        metric.update(_predictions(outputs), _find_targets(microbatch))


def choose_convention(
    model: nn.Module,
    *,
    forward: Callable[..., Any] | None,
    loss_fn: Callable[..., Any] | None,
    carries: bool = False,
    count: Any = None,
) -> Convention:
    """Choose the convention of a model; see the module's docstring for the order."""
    for name, function in (("forward", forward), ("loss_fn", loss_fn)):
        with about(name):
            if function is not None and not callable(function):
                raise TypeError(f"{name}={function!r} cannot be called; {HOW_TO_GIVE_A_LOSS}")
            # loss_fn=CrossEntropyLoss is callable, but returns a module instead of a loss.
            if isinstance(function, type) and issubclass(function, nn.Module):
                raise TypeError(f"{name} is the class {function.__name__}; make an instance of it")
    if forward is not None and loss_fn is not None:
        raise ValueError(
            "both forward and loss_fn were given, but only one can compute the loss; call the "
            "loss function inside forward and leave loss_fn out"
        )
    # No other convention can pass the state.
    if carries and forward is None:
        raise ValueError(
            "Carry(…) was given without forward=…, which is needed to pass the state in and out; "
            "pass a forward that takes (model, microbatch, carry) and returns a mapping with "
            "'loss' and 'carry'"
        )
    if forward is not None:
        return (_CarryingForward if carries else _OwnForward)(forward, count)
    if loss_fn is not None:
        return _LossFunction(loss_fn)
    # The forward of Composer models takes the batch as its only argument, so they must be
    # recognized before keyword models.
    if all(callable(getattr(model, name, None)) for name in ("loss", "eval_forward")):
        from automicro.loss.libraries import ComposerModel

        return ComposerModel(model)
    return _KeywordModel()


class _OwnForward(Convention):
    """The caller's ``forward(model, microbatch)``."""

    def __init__(self, forward: Callable[..., Any], count: Any = None) -> None:
        self._forward = forward
        # A declared count also defines num_items_in_batch.
        self._count = count if callable(count) else _count_targets
        self.counts_items = _takes(forward, ITEMS)

    def _told(self, microbatch: Any) -> dict[str, Any]:
        # The count of its own rows: weighted by it, losses add up to the mean over all items.
        return {ITEMS: self._count(microbatch)} if self.counts_items else {}

    def call(self, model: nn.Module, microbatch: Any) -> Any:
        return self._forward(model, microbatch, **self._told(microbatch))

    def predict(self, model: nn.Module, microbatch: Any, *, holds_rows: bool = False) -> Any:
        outputs = self.evaluate(model, microbatch).outputs
        if outputs is None:
            raise LossError(
                "forward returned only the loss, but predictions need outputs; return "
                "(loss, outputs)"
            )
        return outputs

    def update_metric(self, metric: Any, outputs: Any, microbatch: Any) -> None:
        if outputs is None:
            raise LossError(
                "metrics need the model's outputs, but forward returned only the loss; return "
                "(loss, outputs), or pass update_metric=… that takes (metric, outputs, microbatch)"
            )
        super().update_metric(metric, outputs, microbatch)


class _CarryingForward(_OwnForward):
    """The caller's ``forward(model, microbatch, carry)``; batches are `Carried`."""

    def call(self, model: nn.Module, microbatch: Any) -> Any:
        return self._forward(model, *microbatch, **self._told(microbatch.batch))

    def _read(self, given: Any) -> Output:
        if not isinstance(given, Mapping) or "carry" not in given:
            raise LossError(
                f"forward returned {named(given)}, but with Carry(…) it has to return a mapping "
                "with 'loss' and 'carry', the state for the next batch (or None)"
            )
        # The state is neither a loss nor an output, and dimension 0 may not hold its rows.
        rest = {name: value for name, value in given.items() if name != "carry"}
        return dataclasses.replace(_read_result(rest), carry=given["carry"])


class _LossFunction(Convention):
    """``loss_fn(model(inputs), targets)`` on batches of ``(inputs, targets)``."""

    needs_pairs = True

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self._loss_fn = loss_fn

    def call(self, model: nn.Module, microbatch: Any) -> Any:
        inputs, targets = _pair(microbatch)
        return _call(model, inputs), targets

    def _read(self, given: Any) -> Output:
        outputs, targets = given
        result = self._loss_fn(outputs, targets)
        if isinstance(result, Tensor):  # the fast path
            return Output(result, {}, outputs)
        if isinstance(result, Mapping):
            return dataclasses.replace(_read_result(result), outputs=outputs)
        raise LossError(  # unlike a forward, a loss function cannot return (loss, outputs)
            f"the loss function returned {named(result)} instead of a tensor to differentiate; "
            "return one scalar tensor (no .item()), or a mapping of scalar losses, which are summed"
        )

    def predict(self, model: nn.Module, microbatch: Any, *, holds_rows: bool = False) -> Any:
        # Batches of a dataset are lists of one part without targets, and pairs with targets.
        is_short = isinstance(microbatch, tuple | list) and len(microbatch) in (1, 2)
        return _call(model, microbatch[0] if is_short and not holds_rows else microbatch)

    def targets(self, batch: Any) -> Any:
        return _pair(batch)[1]

    def update_metric(self, metric: Any, outputs: Any, microbatch: Any) -> None:
        metric.update(outputs, self.targets(microbatch))


class _KeywordModel(Convention):
    """``model(**batch)`` whose output holds ``loss`` (Hugging Face's convention)."""

    computes_loss_in_model = True

    def call(self, model: nn.Module, microbatch: Any) -> Any:
        if not isinstance(microbatch, Mapping):
            raise LossError(
                f"nothing says how to compute a loss from a batch of type "
                f"{type(microbatch).__name__}; {HOW_TO_GIVE_A_LOSS}"
            )
        return super().call(model, microbatch)

    def _read(self, given: Any) -> Output:
        if not isinstance(given, Mapping):
            return Output(getattr(given, "loss", None), outputs=given)
        # In training, detectors of torchvision return only named losses.
        losses = {} if given.get("loss") is not None else _scalar_losses(given)
        if losses and len(losses) == len(given):
            return summed(losses, given)
        return Output(given.get("loss"), outputs=given)

    def _explain_missing(self, model: nn.Module, output: Output, microbatch: Any) -> str:
        return (
            f"{type(model).__name__} returned {named(output.outputs)} without a loss; the "
            f"batch may lack 'labels' (it has {sorted(map(str, microbatch))}), or "
            f"{HOW_TO_GIVE_A_LOSS}"
        )

    def targets(self, batch: Any) -> Any:
        if isinstance(batch, Mapping) and batch.get("shift_labels") is not None:
            raise LossError(
                "the batch holds 'shift_labels', so the targets that the loss counts are unknown; "
                "pass loss_average=… as a callable that counts them in a microbatch"
            )
        return super().targets(batch)


def _call(model: nn.Module, inputs: Any) -> Any:
    # Pass every mapping as keywords, not only dicts: a BatchEncoding is a UserDict.
    is_named = type(inputs) is not Tensor and isinstance(inputs, Mapping)
    return model(**inputs) if is_named else model(inputs)


def _read_result(result: Any) -> Output:
    """Read ``loss``, ``(loss, outputs)`` or ``{"loss": …}``, or return an `Output` as it is."""
    if isinstance(result, Output):
        return result
    if isinstance(result, Tensor):
        return Output(result)
    if isinstance(result, Mapping):
        losses = _scalar_losses(result)
        total = result.get("loss")
        if total is not None:
            losses.pop("loss", None)
            return Output(total, losses, result, has_total=True)
        if losses and len(losses) == len(result):
            return summed(losses, result)
        raise LossError(
            f"forward returned a mapping with the keys {sorted(map(str, result))}: it needs "
            "'loss', or only scalar losses, which are summed"
        )
    if not (isinstance(result, tuple) and len(result) == 2):
        raise LossError(_no_loss_in(result))
    loss, outputs = result
    if loss is None:  # as in evaluation
        return Output(None, outputs=outputs)
    # A pair of numbers is most likely a swapped pair or two losses, of which the wrong one would be
    # trained on.
    if isinstance(outputs, Tensor) and outputs.dim() == 0:
        if isinstance(loss, Tensor) and loss.numel() > 1:
            raise LossError(
                f"forward returned a tensor of shape {tuple(loss.shape)} followed by one number, "
                "but the loss comes first: (loss, outputs). If a model returns (outputs, loss), "
                "swap them: forward=lambda model, batch: model(*batch)[::-1]"
            )
        if outputs.requires_grad:
            raise LossError(
                "forward returned (loss, outputs) whose outputs are one number with a gradient, "
                "but only the first would be trained on. For two losses, return a mapping from "
                "names to losses, which are summed; for a number to log, .detach() it"
            )
    return dataclasses.replace(_read_result(loss), outputs=outputs)


def _no_loss_in(result: Any) -> str:
    return (
        f"forward returned {named(result)}, which contains no loss; return the loss, "
        "(loss, outputs), or a mapping with the key 'loss'"
    )


def _scalar_losses(given: Mapping[Any, Any]) -> dict[str, Tensor]:
    # Names may be other objects, but are shown and logged as text.
    return {
        str(name): each
        for name, each in given.items()
        if isinstance(each, Tensor) and each.dim() == 0 and each.is_floating_point()
    }


def summed(losses: Mapping[str, Tensor], outputs: Any) -> Output:
    """Return the output whose loss is the sum of losses by name."""
    if "total" in losses and len(losses) > 1:
        raise LossError(
            f"the losses {', '.join(map(repr, losses))} would be added up, but 'total' may already "
            "be their sum; name the total 'loss', so that only it is trained on, or give the part "
            "'total' another name"
        )
    return Output(functools.reduce(operator.add, losses.values()), losses, outputs)


def _pair(batch: Any) -> tuple[Any, Any]:
    is_text = isinstance(batch, str)
    is_row = isinstance(batch, tuple) or (isinstance(batch, Sequence) and not is_text)
    if is_row and len(batch) == 2:
        return batch[0], batch[1]
    raise BatchError(
        f"with loss_fn a batch is a pair (inputs, targets), but this one is {named(batch)}; "
        "yield pairs from the data loader, or pass forward=… that takes (model, microbatch)"
    )


def _find_targets(batch: Any) -> Any:
    if isinstance(batch, Carried):
        batch = batch.batch
    if isinstance(batch, Mapping):
        for key in TARGET_KEYS:
            if batch.get(key) is not None:
                return batch[key]
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2
    if is_pair and reading_of(batch, is_root=True) != "items":  # not two samples
        return batch[1]
    raise LossError(
        f"the targets cannot be found in {named(batch)}; name them "
        f"{' or '.join(repr(key) for key in TARGET_KEYS[:3])} in a mapping, use a pair "
        "(inputs, targets), or pass loss_average=… (and update_metric=…) as a callable"
    )


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return False


def _count_targets(batch: Any) -> Any:
    targets = _find_targets(batch)
    if targets.is_floating_point():
        return len(targets)
    return (targets != IGNORED).sum().clamp(min=1)  # without targets, a zero loss and not NaN


def _predictions(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def named(value: Any) -> str:
    """Name a value briefly: its type, with the keys or the length of a container."""
    name = "Tensor" if isinstance(value, FakeTensor) else type(value).__name__
    if isinstance(value, Mapping):
        return f"a {name} with the keys {sorted(map(str, value))}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {name} of length {len(value)}"
    return f"a {name}"
