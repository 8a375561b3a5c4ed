"""Changed options at resume are refused, reported or accepted, and never ignored."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
)

from automicro import ParameterGroups, Trainer
from automicro.callbacks import EarlyStopping
from automicro.checkpoints.writing import list_checkpoints
from automicro.errors import CheckpointError, CheckpointWarning
from automicro.events.callback import Callback
from automicro.events.run import Run
from tests.callbacks.runs import assert_equal, copy_of
from tests.trainer.resume.runs import linear, trainer
from tests.trainer.runs import CLASSES, FEATURES, adam, make_loader

Options = Mapping[str, Any]


def layers(*, width: int = 8, hidden: int = 1) -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.Linear(width, width) for _ in range(hidden)]
    return nn.Sequential(nn.Linear(FEATURES, width), *middle, nn.Linear(width, CLASSES))


def start(folder: Path, options: Options, duration: str) -> Trainer:
    """Return a trainer with options that differ from the defaults."""
    given = {"model": linear(), **options}
    return trainer(given.pop("model"), folder, max_duration=duration, **given)


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.CosineAnnealingLR(optimizer, 8)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 3)


def sequential_step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.SequentialLR(optimizer, [step_lr(optimizer)], [])


class Refusing(Callback):
    """Refuses the state that it saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise ValueError("not this one")


class AddsGroup(Callback):
    def batch_end(self, run: Run, result: Any) -> None:
        assert run.optimizer is not None
        if run.state.batch == 1:
            run.optimizer.add_param_group({"params": [run.model.bias], "lr": 0.5})


def sgd_of_weight(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[:1], lr=0.1)


def metrics(kind: Callable[..., Any], *args: Any, **options: Any) -> Options:
    return {"metrics": {"it": kind(CLASSES, *args, **options)}}


METRICS: dict[str, tuple[Callable[[], Options], Callable[[], Options], str]] = {
    "added metric": (dict, lambda: metrics(MulticlassAccuracy), r": it\."),
    "different metric": (
        lambda: metrics(MulticlassAccuracy),
        lambda: metrics(MulticlassConfusionMatrix),
        r": it \(there a MulticlassAccuracy\)",
    ),
    "metric of different shape": (
        lambda: metrics(MulticlassAUROC, thresholds=5),
        lambda: metrics(MulticlassAUROC, thresholds=7),
        r": it \(its state confmat is a tensor of shape \(5, 3, 2, 2\)\)",
    ),
}
NO_DECAY = ParameterGroups(torch.optim.AdamW, [{"params": ["bias"], "weight_decay": 0.0}])
REFUSED: dict[str, tuple[Callable[[], Options], Callable[[], Options], str]] = {
    "added layer": (
        lambda: {"model": layers()},
        lambda: {"model": layers(hidden=2)},
        r"it lacks: modules\.0\.3\.weight, modules\.0\.3\.bias; shapes differ: modules\.0\.2\.w"
        r".*resume='never'",
    ),
    "removed layer": (
        lambda: {"model": layers()},
        lambda: {"model": layers(hidden=0)},
        r"only it has: modules\.0\.2\.weight",
    ),
    "different width": (
        lambda: {"model": layers()},
        lambda: {"model": layers(width=16)},
        r"shapes differ: modules\.0\.0\.weight \(8×12, here 16×12\)",
    ),
    "different groups": (
        dict,
        lambda: {"optimizer": NO_DECAY},
        r"groups of \[2\] parameters, but this one has \[1, 1\].*resume='never'",
    ),
    "group added during training": (
        lambda: {"optimizer": sgd_of_weight, "callbacks": [AddsGroup()]},
        lambda: {"optimizer": sgd_of_weight, "callbacks": [AddsGroup()]},
        r"has groups of \[1, 1\] parameters, but this one has \[1\].* Groups that a callback adds "
        r".*so give the optimizer all groups",
    ),
    # Both optimizers have groups with the same options.
    "different optimizer": (
        lambda: {"optimizer": partial(torch.optim.Adam, lr=0.01)},
        dict,
        r"a run with optimizer=Adam \(here AdamW\).*resume='never'",
    ),
    "different scheduler": (
        lambda: {"scheduler": step_lr},
        lambda: {"scheduler": lambda each: lr_scheduler.ExponentialLR(each, 0.9)},
        r"a run with scheduler=StepLR \(here ExponentialLR\)",
    ),
    "different nested schedulers": (
        lambda: {"scheduler": sequential},
        lambda: {"scheduler": sequential_step_lr},
        r"SequentialLR\(LinearLR, CosineAnnealingLR\) \(here SequentialLR\(StepLR\)\)",
    ),
    "removed scheduler": (lambda: {"scheduler": step_lr}, dict, r"scheduler=StepLR \(here None\)"),
    "added scheduler": (dict, lambda: {"scheduler": step_lr}, r"=None \(here StepLR\)"),
    "refusing callback": (
        lambda: {"callbacks": [Refusing()]},
        lambda: {"callbacks": [Refusing()]},
        "state of Refusing in the checkpoint cannot be loaded",
    ),
    # One batch is left now, instead of more.
    "different data": (
        dict,
        lambda: {"train_dataloader": make_loader(rows=48, batch_size=48)},
        "state of data in the checkpoint cannot be loaded",
    ),
    **METRICS,
}


@pytest.mark.parametrize("other", REFUSED)
def test_mismatched_run_is_refused_before_model_is_overwritten(other: str, tmp_path: Path) -> None:
    saved, here, message = REFUSED[other]
    start(tmp_path, saved(), "2ba").fit()
    before = list_checkpoints(tmp_path)
    again = start(tmp_path, here(), "4ba")
    weights = copy_of(again._run.model)
    with pytest.raises(CheckpointError, match=message):
        again.fit()
    assert_equal(copy_of(again._run.model), weights)
    assert list_checkpoints(tmp_path) == before


SIZES = ("microbatch_size", "eval_microbatch_size")


def evaluated(names: str) -> Options:
    return {"eval_dataloader": {name: make_loader(rows=16) for name in names}}


def sized(name: str, size: Any) -> Options:
    return {name: size, **evaluated("a")}


WARNED: dict[str, tuple[Callable[[], Options], Callable[[], Options], str]] = {
    "removed callback": (
        lambda: {"callbacks": [Counts()]},
        dict,
        "callback Counts, but this run does not have it, so it is dropped",
    ),
    # Its state exists only after ``fit_start``.
    "added callback": (dict, lambda: {"callbacks": [Counts()]}, "Counts, which starts anew"),
    "added scaling": (dict, lambda: {"precision": "fp16"}, "of the part scaler, which"),
    "removed scaling": (lambda: {"precision": "fp16"}, dict, "of the part scaler, but"),
    "removed metric": (
        lambda: metrics(MulticlassAccuracy),
        dict,
        "counts of the metrics it, but this run does not",
    ),
    "different unit": (
        lambda: {"microbatch_unit": lambda row: 2.0, "microbatch_size": "auto"},
        lambda: {"microbatch_size": "auto"},
        "the sizes of this state are in units of cost",
    ),
    **{
        f"{name} {sizes[0]} to {sizes[1]}": (
            partial(sized, name, sizes[0]),
            partial(sized, name, sizes[1]),
            "another policy .*which changes no result",
        )
        for name in SIZES
        for sizes in ((4, "auto"), ("auto", 4))
    },
}


@pytest.mark.parametrize("other", WARNED)
def test_changed_option_warns_and_run_continues(other: str, tmp_path: Path) -> None:
    saved, here, message = WARNED[other]
    start(tmp_path, saved(), "2ba").fit()
    with pytest.warns(CheckpointWarning, match=message):
        assert start(tmp_path, here(), "4ba").fit().steps == 4


TAKEN: dict[str, tuple[Callable[[], Options], Callable[[], Options]]] = {
    "added evaluation": (lambda: evaluated("a"), lambda: evaluated("ab")),
    "removed evaluation": (lambda: evaluated("ab"), lambda: evaluated("a")),
    "different evaluation": (lambda: evaluated("a"), lambda: evaluated("b")),
    **{
        name: (
            partial(sized, name, 4),
            partial(sized, name, None),
        )
        for name in SIZES
    },
    **{name: (saved, here) for name, (saved, here, _) in METRICS.items()},  # between epochs
}


@pytest.mark.parametrize("other", TAKEN)
def test_permitted_change_is_accepted_silently(other: str, tmp_path: Path) -> None:
    saved, here = TAKEN[other]
    start(tmp_path, saved(), "3ba").fit()
    assert start(tmp_path, here(), "4ba").fit().steps == 4


def cosine(length: int) -> Options:
    return {"scheduler": lambda each: lr_scheduler.CosineAnnealingLR(each, length)}


def one_cycle(length: int) -> Options:
    return {"scheduler": lambda each: lr_scheduler.OneCycleLR(each, 0.1, total_steps=length)}


def adamw(lr: float, weight_decay: float) -> Options:
    return {"optimizer": partial(torch.optim.AdamW, lr=lr, weight_decay=weight_decay)}


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (
            adamw(0.01, 0.1),
            adamw(0.02, 0.2),
            r"with lr=0\.01 \(here 0\.02\); weight_decay=0\.1 \(here 0\.2\), and the run cont",
        ),
        (cosine(9), cosine(12), r"T_max=9 \(here 12\)"),
        (one_cycle(9), one_cycle(12), r"total_steps=9 \(here 12\),"),
    ],
)
def test_changed_hyperparameters_warn_and_saved_ones_stay(
    saved: Options, here: Options, message: str, tmp_path: Path
) -> None:
    whole = start(tmp_path / "whole", saved, "4ba")
    whole.fit()
    start(tmp_path / "other", saved, "2ba").fit()
    # The original options stay in effect at each resume.
    for duration in ("3ba", "4ba"):
        resumed = start(tmp_path / "other", here, duration)
        with pytest.warns(CheckpointWarning, match=message):
            resumed.fit()
    assert_equal(copy_of(resumed._run.model), copy_of(whole._run.model))


class Unsavable(Callback):
    """Has a state that checkpoints cannot hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"history": np.array([object()])}


class Failing(Callback):
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("mine")


class Stateless:
    """A scheduler without a state."""

    def __init__(self, optimizer: Any) -> None: ...

    def step(self) -> None: ...


class Sharing(torch.optim.SGD):
    """An optimizer whose ranks have to exchange states before it returns them, like ZeRO."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("state has not been consolidated on this rank")


class HoldsModule:
    """A learning rate factor that holds a module."""

    def __init__(self) -> None:
        self.module = nn.Linear(2, 2)

    def __call__(self, step: int) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": [Unsavable()]}, r"callbacks\.Unsavable\.history is of type ndarray"),
        ({"callbacks": [Failing()]}, r"'mine'"),
        ({"optimizer": Sharing}, r"of Sharing cannot be saved \(RuntimeError: state has not"),
        ({"scheduler": Stateless}, "scheduler is a Stateless without state_dict and load"),
        (
            {"scheduler": lambda each: lr_scheduler.LambdaLR(each, HoldsModule())},
            r"scheduler\.lr_lambdas\.0\.module is of type Linear",
        ),
    ],
)
def test_unsavable_state_is_refused_before_training(
    options: Options, message: str, tmp_path: Path
) -> None:
    model = linear()
    with pytest.raises((CheckpointError, KeyError), match=message) as caught:
        start(tmp_path, {"model": model, **options}, "5ba").fit()
    if isinstance(caught.value, KeyError):
        assert "automicro: in the callback Failing, at state_dict" in caught.value.__notes__
    assert torch.equal(model.weight, linear().weight)
    assert not list_checkpoints(tmp_path)


class Counts(Callback):
    """Counts in an attribute that exists only after ``fit_start``."""

    loaded: Mapping[str, Any] | None = None

    def fit_start(self, run: Run) -> None:
        self.counts = dict(self.loaded or {"batches": 0})

    def batch_end(self, run: Run, result: Any) -> None:
        self.counts["batches"] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.counts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state


class Global(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        steps = self.state.get("global", {}).get("steps", 0)  # type: ignore[call-overload]
        self.state["global"] = {"steps": steps + 1}  # type: ignore[index]
        return super().step(closure)


def test_own_checkpoint_takes_precedence_over_initial_one(tmp_path: Path) -> None:
    optimizer = partial(Global, lr=0.1)
    start(tmp_path / "first", {"optimizer": optimizer, "callbacks": [Counts()]}, "2ba").fit()
    for duration in ("4ba", "5ba"):  # the same command twice, interrupted in between
        counts = Counts()
        options = {"resume": tmp_path / "first", "optimizer": optimizer, "callbacks": [counts]}
        resumed = start(tmp_path / "second", options, duration)
        resumed.fit()
        assert resumed._run.optimizer is not None
        assert resumed._run.optimizer.state["global"]["steps"] == resumed.state.batch  # type: ignore[index]
        assert counts.counts == {"batches": resumed.state.batch}
    assert counts.loaded == {"batches": 4}


def test_run_stopped_by_callback_stays_stopped(tmp_path: Path) -> None:
    def stopping() -> Trainer:
        ends = EarlyStopping(patience=1, min_delta=100.0)
        options = {"callbacks": [ends], "eval_interval": "1ba", "optimizer": adam}
        return start(tmp_path, {**options, "eval_dataloader": make_loader()}, "9ba")

    assert stopping().fit().steps == 2
    again = stopping()
    assert again.fit().steps == 2
    assert again.fit().steps > 2  # another fit on the same trainer continues
