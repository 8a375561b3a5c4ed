"""Cases for exactness tests: models, batch structures and losses, each by name.

A `Case` says what a user would write twice: once for plain torch on the whole batch (`loss`), once
for a `Microbatcher` (`options`).
"""

import dataclasses
import functools
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from automicro import Microbatcher
from automicro.features import with_features
from tests.models import (
    IGNORED,
    IMAGE,
    LENGTH,
    ROWS,
    ComposerStyle,
    ConvNet,
    Detector,
    Encoder,
    Keywords,
    Mlp,
    Pair,
    Record,
    Recurrent,
    classes,
    lengths,
    numbers,
    token_targets,
    tokens,
    with_ignored,
    x,
    y,
)

Loss = Callable[[nn.Module, Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train: a model, a batch, the plain torch loss, and the Microbatcher's options."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Loss
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tolerance: float = 1e-9

    def microbatcher(self, model: nn.Module, size: Any, **options: Any) -> Microbatcher:
        return Microbatcher(
            model, microbatch_size=size, **with_features({**self.options, **options})
        )


def gradients(*modules: nn.Module) -> dict[str, Tensor | None]:
    return {
        f"{index}.{name}": None if p.grad is None else p.grad.detach().clone()
        for index, module in enumerate(modules)
        for name, p in module.named_parameters()
    }


def difference(one: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> float:
    """Return the largest absolute difference; infinite for NaN or if only one has a gradient."""
    assert one.keys() == other.keys()
    worst = 0.0
    for name, first in one.items():
        second = other[name]
        if (first is None) is not (second is None):
            return float("inf")
        if first is not None and second is not None:
            gap = float((first.to_dense() - second.to_dense()).abs().max())
            worst = max(worst, gap if gap == gap else float("inf"))
    return worst


# Losses


def mean_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def masked_mean(logits: Tensor, targets: Tensor) -> Any:
    """A typical mean in user code: zero divided by zero if every target is ignored."""
    mask = targets != IGNORED
    each = F.cross_entropy(logits.movedim(-1, 1), targets.where(mask, 0), reduction="none")
    return (each * mask).sum() / mask.sum()


def contrastive(embeddings: Tensor, _: Any) -> Any:
    """A loss within the batch: every row is compared with all others."""
    return F.cross_entropy(embeddings @ embeddings.T, torch.arange(len(embeddings)))


def count_targets(batch: Any) -> Any:
    return (batch[1] != IGNORED).sum()


def on_pairs(loss_fn: Callable[..., Any]) -> Loss:
    return lambda model, batch: loss_fn(model(batch[0]), batch[1])


def pair_case(
    model: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss_fn: Callable[..., Any],
    **options: Any,
) -> Case:
    """Make a case of ``loss_fn`` on batches of ``(inputs, targets)``."""
    return Case(
        model=model, batch=batch, loss=on_pairs(loss_fn), options=dict(options, loss_fn=loss_fn)
    )


def forward_case(batch: Callable[[], Any], forward: Loss, **options: Any) -> Case:
    """Make a case of a custom ``forward`` on an `Mlp`."""
    return Case(model=Mlp, batch=batch, loss=forward, options=dict(options, forward=forward))


MODELS = {
    "mlp": pair_case(Mlp, lambda: (x(), y()), nn.CrossEntropyLoss()),
    "cnn with GroupNorm": pair_case(
        ConvNet, lambda: (numbers(ROWS, *IMAGE), y()), nn.CrossEntropyLoss()
    ),
    "gru": pair_case(
        Recurrent,
        lambda: (numbers(ROWS, LENGTH, 4), with_ignored(classes(ROWS, LENGTH))),
        mean_of_tokens,
        loss_average="tokens",
    ),
    "transformer": pair_case(
        Encoder, lambda: (tokens(), token_targets()), mean_of_tokens, loss_average="tokens"
    ),
    "tied weights": pair_case(
        functools.partial(Encoder, tied=True),
        lambda: (tokens(), token_targets()),
        mean_of_tokens,
        loss_average="tokens",
    ),
    "Composer's interface": Case(
        model=ComposerStyle,
        batch=lambda: (x(), y()),
        loss=lambda model, batch: F.cross_entropy(model(batch), batch[1]),
    ),
}

_cross_entropy = nn.CrossEntropyLoss()


def _dict_forward(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _deep_forward(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["inputs"]["views"][0]) + model(batch["inputs"]["views"][1])
    return F.cross_entropy(logits / batch["temperature"], batch["targets"][0])


def _record_forward(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y)


def _beside_forward(model: nn.Module, batch: Any) -> Tensor:
    assert batch["mode"] == "train"
    assert batch["extra"] is None
    assert len(batch["names"]) == len(batch["x"])
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _samples_forward(model: nn.Module, batch: Any) -> Tensor:
    logits = torch.cat([model(sample["parts"]).mean(0, keepdim=True) for sample in batch])
    return F.cross_entropy(logits, torch.stack([sample["y"] for sample in batch]))


def _mean_of_rows(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean over all vectors of ragged rows, in any container."""
    sequences, targets = batch
    values = sequences.values() if isinstance(sequences, Tensor) else sequences.data
    goals = targets.values() if isinstance(targets, Tensor) else targets.data
    return F.cross_entropy(model(values), goals)


def _ragged(width: int, seed: int = 0) -> list[Tensor]:
    return list(numbers(sum(lengths()), width, seed=seed).split(lengths()))


def _ragged_targets() -> list[Tensor]:
    return list(classes(sum(lengths())).split(lengths()))


def detection_batch() -> Any:
    images = [numbers(3, 4 + row % 3, 5, seed=row) for row in range(ROWS)]
    targets = [{"boxes": numbers(lengths()[row], 4, seed=row)} for row in range(ROWS)]
    return images, targets


def detection_forward(model: nn.Module, batch: Any) -> Any:
    return model(*batch)


def count_boxes(batch: Any) -> int:
    return sum(len(target["boxes"]) for target in batch[1])


def packed_batch() -> Any:
    return pack_sequence(_ragged(4), enforce_sorted=False), y()


def jagged_batch() -> Any:
    inputs: Any = torch.nested.nested_tensor(_ragged(6), layout=torch.jagged)
    targets = torch.cat(_ragged_targets())
    return inputs, torch.nested.nested_tensor_from_jagged(targets, inputs.offsets())


def packed_pairs() -> Any:
    return (
        pack_sequence(_ragged(6), enforce_sorted=False),
        pack_sequence(_ragged_targets(), enforce_sorted=False),
    )


def _time_first_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.movedim(-1, 1), targets)


STRUCTURES = {
    "tuple": MODELS["mlp"],
    "list": pair_case(Mlp, lambda: [x(), y()], _cross_entropy),
    "named tuple": pair_case(Mlp, lambda: Pair(x(), y()), _cross_entropy),
    "dict": forward_case(lambda: {"x": x(), "y": y()}, _dict_forward),
    "user dict": forward_case(lambda: UserDict({"x": x(), "y": y()}), _dict_forward),
    "nested": forward_case(
        lambda: {
            "inputs": {"views": [x(), x() + 1]},
            "targets": (y(),),
            "temperature": 0.5,
        },
        _deep_forward,
    ),
    "inputs by keyword": Case(
        model=Keywords,
        batch=lambda: ({"x": x(), "scale": torch.tensor(2.0)}, y()),
        loss=lambda model, batch: _cross_entropy(model(**batch[0]), batch[1]),
        options={"loss_fn": _cross_entropy},
    ),
    "dataclass": forward_case(lambda: Record(x(), y()), _record_forward),
    "texts and None beside": forward_case(
        lambda: {
            "x": x(),
            "y": y(),
            "names": [f"row {row}" for row in range(ROWS)],
            "mode": "train",
            "extra": None,
        },
        _beside_forward,
    ),
    "samples that were not collated": forward_case(
        lambda: [
            {"parts": part, "y": target} for part, target in zip(_ragged(6), y(), strict=True)
        ],
        _samples_forward,
    ),
    "packed sequences": pair_case(Recurrent, packed_batch, _cross_entropy),
    "packed inputs and targets": forward_case(
        packed_pairs, _mean_of_rows, loss_average=lambda batch: len(batch[1].data)
    ),
    "jagged": forward_case(
        jagged_batch, _mean_of_rows, loss_average=lambda batch: batch[1].values().numel()
    ),
    "jagged tokens": forward_case(jagged_batch, _mean_of_rows, loss_average="tokens"),
    "detection": Case(
        model=Detector,
        batch=detection_batch,
        loss=lambda model, batch: sum(model(*batch).values()),
        options={
            "forward": detection_forward,
            "loss_average": {"boxes": count_boxes, "size": "samples"},
        },
    ),
    "rows in dimension 1": pair_case(
        functools.partial(Recurrent, batch_first=False),
        lambda: (numbers(LENGTH, ROWS, 4), with_ignored(classes(ROWS, LENGTH)).T),
        _time_first_loss,
        loss_average="tokens",
        batch_layout=1,
    ),
    "as many positions as rows, in dimension 1": pair_case(
        functools.partial(Recurrent, batch_first=False),
        lambda: (numbers(ROWS, ROWS, 4), with_ignored(classes(ROWS, ROWS)).T),
        _time_first_loss,
        loss_average="tokens",
        batch_layout=1,
    ),
}
