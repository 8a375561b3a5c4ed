"""Models with a planted cause, and clean ones, for `automicro.verify`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from automicro.checking.report import VerifyReport
from automicro.checking.verify import verify
from tests.checking.models import (
    WEIGHT,
    Annealed,
    Centred,
    Checkpointed,
    Counting,
    FirstInPlace,
    FixedRows,
    InPlace,
    LayerDrop,
    Layered,
    Mixup,
    MyNorm,
    Noisy,
    NumpyNoise,
    OwnNoise,
    Single,
    Smoothed,
    States,
    bert,
    by_class,
    contrastive,
    counting_in_a_closure,
    distillation,
    dropping_encoder,
    gpt2,
    layered,
    masked,
    masked_and_safe,
    over_later_tokens,
    over_tokens,
    own_gpt2,
    refers_to_rows,
    state_outside,
    summed,
    token_batch,
    two_losses,
    without_padding,
)
from tests.models import (
    CLASSES,
    IMAGE,
    LENGTH,
    ROWS,
    ComposerStyle,
    ConvNet,
    Encoder,
    Mlp,
    Recurrent,
    classes,
    numbers,
    token_targets,
    tokens,
    with_ignored,
    x,
    y,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planted:
    """A model whose cause is known."""

    kind: str
    names: str  # a part of one of the finding's names
    model: Callable[[], nn.Module] = Mlp
    batch: Callable[[], Any] = lambda: (x(), y())
    options: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {"loss_fn": nn.CrossEntropyLoss()}
    )
    exit_code: int = 1
    loss_average: str = ""

    def report(self) -> VerifyReport:
        return verify(self.model(), self.batch(), **self.options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clean:
    """A model whose batches can be split."""

    model: Callable[[], nn.Module] = Mlp
    batch: Callable[[], Any] = lambda: (x(), y())
    options: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {"loss_fn": nn.CrossEntropyLoss()}
    )
    dtype: str = "float64"
    note: str = ""  # the kind of a note that must be there

    def report(self) -> VerifyReport:
        return verify(self.model(), self.batch(), **self.options)


PLANTED = {
    "BatchNorm": Planted(
        kind="batchnorm", names="middle", model=layered(lambda: nn.BatchNorm1d(8))
    ),
    "BatchNorm without statistics": Planted(
        kind="batchnorm",
        names="norm",
        model=lambda: ConvNet(nn.BatchNorm2d(4, track_running_stats=False)),
        batch=lambda: (numbers(ROWS, *IMAGE), y()),
    ),
    "a sum": Planted(
        kind="loss average", names="none", options={"loss_fn": summed}, loss_average="'none'"
    ),
    "a mean over tokens": Planted(
        kind="loss average",
        names="tokens",
        model=Encoder,
        batch=token_batch,
        options={"loss_fn": over_tokens},
        loss_average="'tokens'",
    ),
    "shifted tokens": Planted(
        kind="loss average",
        names="1:",
        model=Encoder,
        batch=token_batch,
        options={"loss_fn": over_later_tokens},
        loss_average="lambda batch: (batch[1][..., 1:] != -100).sum()",
    ),
    "another ignore_index": Planted(
        kind="loss average",
        names="!= 0",
        model=Encoder,
        batch=lambda: (tokens(), with_ignored(token_targets().clamp(min=1), 0)),
        options={"loss_fn": without_padding},
        loss_average="lambda batch: (batch[1] != 0).sum()",
    ),
    "a model of transformers with a loss of its own": Planted(
        kind="loss average",
        names="labels",
        model=own_gpt2,
        batch=lambda: {"input_ids": tokens(), "labels": with_ignored(tokens())},
        options={},
        loss_average="lambda batch: (batch['labels'] != -100).sum()",
    ),
    "a mask": Planted(
        kind="loss average",
        names="mask",
        batch=lambda: {"x": x(), "y": y(), "mask": (torch.arange(ROWS) % 3 > 0).double()},
        options={"forward": masked},
        loss_average="lambda batch: batch['mask'].sum()",
    ),
    "a mask, and a little added to the divisor": Planted(
        kind="loss average",
        names="mask",
        batch=lambda: {"x": x(), "y": y(), "mask": (torch.arange(ROWS) % 3 > 0).double()},
        options={"forward": masked_and_safe},
        loss_average="lambda batch: batch['mask'].sum() + 1e-08",
    ),
    "several losses by name": Planted(
        kind="loss average",
        names="language",
        model=Encoder,
        batch=lambda: {"tokens": tokens(), "labels": token_targets()},
        options={"forward": two_losses},
        loss_average="{'language': 'tokens', 'size': 'none'}",
    ),
    "class weights": Planted(kind="compares rows", names="by_class", options={"loss_fn": by_class}),
    "a contrastive loss": Planted(
        kind="compares rows", names="contrastive", options={"loss_fn": contrastive}
    ),
    "a module across rows": Planted(kind="across rows", names="middle", model=layered(Centred)),
    "rows across a model's own forward": Planted(
        kind="across rows",
        names="2.middle",
        model=lambda: nn.Sequential(nn.Identity(), nn.Identity(), Layered(Centred())),
    ),
    "state in a plain counter": Planted(
        kind="state", names="middle.steps", model=layered(Annealed)
    ),
    "state in a plain tensor": Planted(kind="state", names="middle.mean", model=layered(Smoothed)),
    "spectral norm": Planted(
        kind="state", names="_u", model=layered(lambda: spectral_norm(nn.Linear(8, 8)))
    ),
    "a codebook": Planted(kind="state", names="middle.mean", model=layered(MyNorm)),
    "non-determinism": Planted(
        kind="non-deterministic", names="", options={"forward": state_outside()}, exit_code=3
    ),
    "a counter in a closure": Planted(
        kind="state", names="calls", options={"forward": counting_in_a_closure()}
    ),
    "numpy's generator": Planted(
        kind="random", names="NumPy", model=layered(NumpyNoise), exit_code=3
    ),
    "a generator of its own": Planted(
        kind="random", names="a generator of your own", model=layered(OwnNoise), exit_code=3
    ),
    "mixup": Planted(kind="across rows", names="middle", model=layered(Mixup)),
    "a written-out batch size": Planted(
        kind="fails on fewer rows", names="CrossEntropyLoss", model=layered(FixedRows)
    ),
    "targets that are row numbers": Planted(
        kind="fails on fewer rows",
        names="refers_to_rows",
        batch=lambda: (x(), torch.arange(ROWS)),
        options={"loss_fn": refers_to_rows},
    ),
    "an ambiguous batch": Planted(
        kind="batch",
        names="",
        batch=lambda: (x(), y(), torch.ones(1, 4)),
        options={"forward": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])},
        exit_code=3,
    ),
    "one row": Planted(kind="batch", names="", batch=lambda: (x()[:1], y()[:1]), exit_code=3),
    "no target": Planted(
        kind="batch", names="", batch=lambda: (x(), torch.full((ROWS,), -100)), exit_code=3
    ),
}

CLEAN = {
    "mlp": Clean(),
    "cnn with GroupNorm": Clean(model=ConvNet, batch=lambda: (numbers(ROWS, *IMAGE), y())),
    "frozen BatchNorm": Clean(model=layered(lambda: nn.BatchNorm1d(8).eval())),
    "gru with dropout": Clean(
        model=lambda: nn.Sequential(States(), nn.Linear(6, CLASSES)),
        batch=lambda: (numbers(ROWS, LENGTH, 4), with_ignored(classes(ROWS, LENGTH))),
        options={"loss_fn": over_tokens, "loss_average": "tokens"},
        note="random",
    ),
    "rows in dimension 1": Clean(
        model=lambda: Recurrent(batch_first=False),
        batch=lambda: (numbers(LENGTH, ROWS, 4), classes(LENGTH, ROWS)),
        options={"loss_fn": over_tokens, "batch_layout": 1},
    ),
    "transformer encoder with dropout": Clean(
        model=dropping_encoder,
        batch=token_batch,
        options={"loss_fn": over_tokens, "loss_average": "tokens"},
        note="random",
    ),
    "tied weights": Clean(
        model=functools.partial(Encoder, tied=True),
        batch=token_batch,
        options={"loss_fn": over_tokens, "loss_average": "tokens"},
    ),
    "GPT-2": Clean(
        model=gpt2,
        batch=lambda: {
            "input_ids": tokens(),
            "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long),
            "labels": with_ignored(tokens()),
        },
        options={},
        dtype="float32",
        note="random",
    ),
    "BERT": Clean(model=bert, batch=lambda: {"input_ids": tokens(), "labels": y()}, options={}),
    "weighted cross entropy": Clean(options={"loss_fn": nn.CrossEntropyLoss(weight=WEIGHT)}),
    "weighted cross entropy in a partial": Clean(
        options={"loss_fn": functools.partial(F.cross_entropy, weight=WEIGHT)}
    ),
    "ignore_index": Clean(
        batch=lambda: (x(), with_ignored(y(), 2)),
        options={"loss_fn": nn.CrossEntropyLoss(ignore_index=2)},
    ),
    "a mask, counted": Clean(
        batch=PLANTED["a mask"].batch,
        options={"forward": masked, "loss_average": lambda batch: batch["mask"].sum()},
    ),
    "Composer's interface": Clean(model=ComposerStyle, options={}),
    "several losses, each with its average": Clean(
        model=Encoder,
        batch=PLANTED["several losses by name"].batch,
        options={
            "forward": two_losses,
            "loss_average": {"language": "tokens", "size": "none"},
        },
    ),
    "an input changed in place": Clean(model=FirstInPlace),
    "a module changed in place": Clean(model=layered(InPlace)),
    "all kinds of noise": Clean(model=layered(Noisy), note="random"),
    "Python's generator, once per batch": Clean(model=layered(LayerDrop), note="random"),
    "activation checkpointing with dropout": Clean(model=layered(Checkpointed), note="random"),
    "a counter that nobody reads": Clean(model=layered(Counting), note="state"),
    "float32 only": Clean(model=layered(Single), batch=lambda: (x().float(), y()), dtype="float32"),
    "a captured teacher": Clean(
        model=Layered, batch=lambda: (x().float(), y()), options=distillation(), dtype="float32"
    ),
    "evaluation mode": Clean(model=lambda: Layered(nn.BatchNorm1d(8)).eval(), note="mode"),
}
