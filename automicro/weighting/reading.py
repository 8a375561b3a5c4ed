"""Reading off a loss or a model what it averages over."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from automicro.weighting.averages import IGNORED, REMEDY, Average, Counted, Samples, Sum, Tokens

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
        loss_average: ``"auto"``, ``"samples"``, ``"tokens"``, ``"none"``, a callable from a
            microbatch to its denominator, or a mapping of these by the loss's name.
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
        case "tokens":
            read = _read_off(loss_fn, model, targets) if loss_fn or reads_model else None
            return read if isinstance(read, Tokens) else Tokens(targets)
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
        forward = type(loss_fn).forward
        if getattr(forward, "__module__", None) != "torch.nn.modules.loss":
            return None  # a subclass with a forward of its own may divide by anything
        names = ("reduction", "ignore_index", "weight")
        options = {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}
        counts_targets = isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss)
    else:
        if getattr(F, getattr(loss_fn, "__name__", ""), None) is not loss_fn:
            return None
        parameters = inspect.signature(loss_fn).parameters
        if "reduction" not in parameters:
            return None
        options = {"reduction": parameters["reduction"].default, **options}
        counts_targets = loss_fn in (F.cross_entropy, F.nll_loss)
    if options.get("reduction") == "sum":
        return Sum()
    if options.get("reduction") not in ("mean", "batchmean"):
        return None
    if not counts_targets:
        return Samples()
    return Tokens(
        targets,
        ignore_index=options.get("ignore_index", IGNORED),
        class_weight=options.get("weight"),
    )


def _read_transformers(model: nn.Module, targets: Callable[[Any], Any]) -> Average | None:
    """Read the loss type that a Hugging Face model declares.

    Causal models shift their labels by one, encoder-decoder models and token classifiers do not.
    """
    if not hasattr(model, "loss_function"):
        return None
    loss_type = getattr(model, "loss_type", None)
    if loss_type is None and type(model).__name__.endswith("LMHeadModel"):
        loss_type = "ForCausalLM"
    if loss_type == "ForConditionalGeneration":
        is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        loss_type = "ForMaskedLM" if is_encoder_decoder else "ForCausalLM"
    match loss_type:
        case "ForCausalLM":
            return Tokens(targets, shift=1)
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
    return None
