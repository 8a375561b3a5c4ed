"""Losses that exactness is tested on, each by a name."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import count_targets, masked_mean, pair_case
from tests.models import (
    CLASS_WEIGHT,
    CLASSES,
    IMAGE,
    ROWS,
    ConvNet,
    Encoder,
    LogProbabilities,
    Mlp,
    classes,
    numbers,
    token_targets,
    tokens,
    with_ignored,
    x,
    y,
)


def _pixels() -> Tensor:
    return with_ignored(classes(ROWS, 6, 6))


def _probabilities() -> Tensor:
    return numbers(ROWS, CLASSES, seed=4).softmax(1)


def _log_softmax(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda logits, targets: loss_fn(logits.log_softmax(1), targets)


def _ignored_images() -> Any:
    return numbers(ROWS, *IMAGE), _pixels()


_per_pixel = functools.partial(ConvNet, per_pixel=True)


def _last_class_ignored() -> Any:
    return x(), with_ignored(y(), CLASSES - 1)


LOSSES = {
    "class weights": pair_case(Mlp, lambda: (x(), y()), nn.CrossEntropyLoss(CLASS_WEIGHT)),
    "ignored targets": pair_case(Mlp, lambda: (x(), with_ignored(y())), nn.CrossEntropyLoss()),
    "own ignore_index": pair_case(
        Mlp, _last_class_ignored, nn.CrossEntropyLoss(ignore_index=CLASSES - 1)
    ),
    "class weights and ignored targets": pair_case(
        Mlp, _last_class_ignored, nn.CrossEntropyLoss(CLASS_WEIGHT, ignore_index=CLASSES - 1)
    ),
    "a class of weight zero": pair_case(
        Mlp, lambda: (x(), y()), nn.CrossEntropyLoss(CLASS_WEIGHT * torch.tensor([1, 0, 0, 1, 1]))
    ),
    "label smoothing": pair_case(
        Mlp,
        _last_class_ignored,
        nn.CrossEntropyLoss(CLASS_WEIGHT, ignore_index=CLASSES - 1, label_smoothing=0.2),
    ),
    "label smoothing alone": pair_case(
        Mlp, lambda: (x(), with_ignored(y())), nn.CrossEntropyLoss(label_smoothing=0.2)
    ),
    "targets per pixel": pair_case(_per_pixel, _ignored_images, nn.CrossEntropyLoss(CLASS_WEIGHT)),
    "class probabilities": pair_case(
        Mlp, lambda: (x(), _probabilities()), nn.CrossEntropyLoss(CLASS_WEIGHT)
    ),
    "negative log-likelihood": pair_case(
        LogProbabilities, lambda: (x(), with_ignored(y())), nn.NLLLoss(CLASS_WEIGHT)
    ),
    "binary": pair_case(
        Mlp, lambda: (x(), _probabilities().round()), nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHT)
    ),
    "squares": pair_case(Mlp, lambda: (x(), numbers(ROWS, CLASSES)), nn.MSELoss()),
    "KL, batchmean": pair_case(
        LogProbabilities, lambda: (x(), _probabilities()), nn.KLDivLoss(reduction="batchmean")
    ),
    "a sum": pair_case(Mlp, lambda: (x(), with_ignored(y())), nn.CrossEntropyLoss(reduction="sum")),
    "a function of torch": pair_case(Mlp, lambda: (x(), with_ignored(y())), F.cross_entropy),
    "a partial": pair_case(
        Mlp,
        _last_class_ignored,
        functools.partial(F.cross_entropy, weight=CLASS_WEIGHT, ignore_index=CLASSES - 1),
    ),
    "a partial sum": pair_case(
        Mlp, lambda: (x(), y()), functools.partial(F.cross_entropy, reduction="sum")
    ),
    "own function, samples": pair_case(
        Mlp, lambda: (x(), y()), lambda logits, targets: F.cross_entropy(logits, targets) * 2
    ),
    "own function, declared sum": pair_case(
        Mlp,
        lambda: (x(), y()),
        lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum"),
        loss_average="none",
    ),
    "own masked mean, counted": pair_case(
        Encoder, lambda: (tokens(), token_targets()), masked_mean, loss_average=count_targets
    ),
    "own masked mean, tokens": pair_case(
        Encoder, lambda: (tokens(), token_targets()), masked_mean, loss_average="tokens"
    ),
    "own weights of rows": pair_case(
        Mlp,
        lambda: (x(), (y(), numbers(ROWS).abs())),
        lambda logits, targets: (
            (F.cross_entropy(logits, targets[0], reduction="none") * targets[1]).sum()
            / targets[1].sum()
        ),
        loss_average=lambda batch: batch[1][1].sum(),
    ),
}
