"""Changed options at resume are refused, reported or accepted, and never ignored."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
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
from tests.trainer.resume.runs import HoldsGenerator, Wrapped, linear, trainer
from tests.trainer.runs import CLASSES, FEATURES, adam, assert_same, make_loader

Options = Mapping[str, Any]


def layers(hidden: int) -> Options:
    torch.manual_seed(1)
    middle = [nn.Linear(8, 8) for _ in range(hidden)]
    return {"model": nn.Sequential(nn.Linear(FEATURES, 8), *middle, nn.Linear(8, CLASSES))}


def start(folder: Path, options: Options, duration: str) -> Trainer:
    given = copy.deepcopy({"model": linear(), **options})
    return trainer(given.pop("model"), folder, max_duration=duration, **given)


def case(name: str, *given: Any) -> Any:
    return pytest.param(*given, id=name)


def steps(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 3)


def in_sequence(*kinds: Any) -> Any:
    """Return a function that makes a scheduler of schedulers."""
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [kind(optimizer) for kind in kinds], milestones=[4][: len(kinds) - 1]
    )


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, 8)


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


class Stubborn(Wrapped):
    """Refuses its own saved state."""

    def get_extra_state(self) -> dict[str, int]:
        return {"count": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        raise KeyError("count")


class Unlike(Wrapped):
    """Has rows that differ when saved, but share memory when loaded."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)


class CreatesGenerator(Wrapped):
    """Creates its generator in the first forward."""

    noise: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.noise = self.noise or HoldsGenerator()
        return super().forward(self.noise(inputs))


def of_weight(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[:1], lr=0.1)


def metric(kind: Callable[..., Any], **options: Any) -> Options:
    return {"metrics": {"it": kind(CLASSES, **options)}}


def schedule(kind: Any, interval: str = "batch") -> Options:
    return {"scheduler": kind, "scheduler_interval": interval}


ADDED: Options = {"optimizer": of_weight, "callbacks": [AddsGroup()]}
STUBBORN: Options = {"model": Stubborn()}
REFUSES: Options = {"callbacks": [Refusing()]}
NO_DECAY = ParameterGroups(torch.optim.AdamW, [{"params": ["bias"], "weight_decay": 0.0}])
NO_DECAY_OF_BIAS: Options = {"optimizer": NO_DECAY}
ADAM: Options = {"optimizer": partial(torch.optim.Adam, lr=0.01)}  # groups as in AdamW
FEWER: Options = {"train_dataloader": make_loader(rows=48, batch_size=48)}
ACCURACY, CONFUSION = metric(MulticlassAccuracy), metric(MulticlassConfusionMatrix)
CURVES = [metric(MulticlassAUROC, thresholds=each) for each in (5, 7)]
STEPS, BY_EPOCH = schedule(steps), schedule(steps, "epoch")
SEQUENCES = schedule(in_sequence(steps, cosine)), schedule(in_sequence(steps))
LACKS = r"it lacks: modules\.0\.3\.weight, modules\.0\.3\.bias; shapes differ: modules\.0\.2\.w.*"
UNLIKE = [Unlike(torch.arange(6.0).view(3, 2)), Unlike(torch.ones(1, 2).expand(3, 2))]
SHARES = [{"model": each} for each in UNLIKE]
REFUSED = [
    case("added metric", {}, ACCURACY, r": it\."),
    case("other metric", ACCURACY, CONFUSION, r": it \(there a MulticlassAccuracy\)"),
    case("metric of other shape", *CURVES, r"confmat is a tensor of shape \(5, 3, 2, 2\)\)"),
    case("added layer", layers(1), layers(2), LACKS + r"\(3×8, here 8×8\).*resume='never'"),
    case("removed layer", layers(1), layers(0), r"only it has: modules\.0\.2\.weight"),
    case("refusing model", STUBBORN, STUBBORN, r"Stubborn\.load_state_dict fails.*KeyError"),
    case("shared memory", *SHARES, r"elements of rows share memory.*\.clone\(\)"),
    case(
        "other groups", {}, NO_DECAY_OF_BIAS, r"\[2\] parameters, but this one has \[1, 1\].*resume"
    ),
    case("later group", ADDED, ADDED, r"has \[1\].* Groups that a callback adds .*give the optim"),
    case("other optimizer", ADAM, {}, r"a run with optimizer=Adam \(here AdamW\).*resume='never'"),
    case("other schedulers", *SEQUENCES, r"Cosine\w+\) \(here SequentialLR\(StepLR\)\)"),
    case("removed scheduler", STEPS, {}, r"scheduler=StepLR \(here None\)"),
    case("other interval", STEPS, BY_EPOCH, r"=StepLR \(here StepLR, stepped after every epoch\)"),
    case("refusing callback", REFUSES, REFUSES, "state of Refusing in the checkpoint cannot be l"),
    case(
        "less data than was trained", {}, FEWER, "state of data in the checkpoint cannot be loaded"
    ),
]


@pytest.mark.parametrize(("saved", "here", "message"), REFUSED)
def test_mismatched_run_is_refused_before_model_is_overwritten(
    saved: Options, here: Options, message: str, tmp_path: Path
) -> None:
    start(tmp_path, saved, "2ba").fit()
    before = list_checkpoints(tmp_path)
    again = start(tmp_path, here, "4ba")
    model = copy.deepcopy(again._run.model)
    with pytest.raises(CheckpointError, match=message):
        again.fit()
    for one, other in zip(again._run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert list_checkpoints(tmp_path) == before


def evaluated(names: str, **options: Any) -> Options:
    return {"eval_dataloader": {name: make_loader(rows=16) for name in names}, **options}


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


COUNTS: Options = {"callbacks": [Counts()]}
FP16: Options = {"precision": "fp16"}
BY_COST: Options = {"microbatch_unit": lambda row: 2.0, "microbatch_size": "auto"}
IN_FOURS, WHOLE, AUTO = (evaluated("a", microbatch_size=size) for size in (4, None, "auto"))
EVAL_SIZES = [evaluated("a", eval_microbatch_size=size) for size in ("auto", 4)]
CREATES: Options = {"model": CreatesGenerator()}
# Changed in the middle of an epoch with a warning, or silently between two epochs.
ACCEPTED = [
    case("removed callback", COUNTS, {}, "callback Counts, but this run does not have it, so it"),
    case("added callback", {}, COUNTS, "Counts, which starts anew"),
    case("added scaling", {}, FP16, "of the part scaler, which"),
    case("removed scaling", FP16, {}, "of the part scaler, but"),
    case("removed metric", ACCURACY, {}, "counts of the metrics it, but this run does not"),
    case("different unit", BY_COST, {"microbatch_size": "auto"}, "are in units of cost"),
    case("size", IN_FOURS, AUTO, "another policy .*which changes no result"),
    case("eval size", *EVAL_SIZES, "another policy .*which changes no result"),
    case("generator", CREATES, CREATES, r"\(noise\.generator\).*Make them before training"),
    case("different evaluations", evaluated("ab"), evaluated("bc"), ""),
    case("no size", IN_FOURS, WHOLE, ""),
    case("added metric", {}, ACCURACY, ""),
    case("different metric", ACCURACY, CONFUSION, ""),
]


@pytest.mark.parametrize(("saved", "here", "message"), ACCEPTED)
def test_permitted_change_continues_run(
    saved: Options, here: Options, message: str, tmp_path: Path
) -> None:
    start(tmp_path, saved, "2ba" if message else "3ba").fit()
    again = start(tmp_path, here, "4ba")
    if message:
        with pytest.warns(CheckpointWarning, match=message):
            assert again.fit().steps == 4
    else:
        assert again.fit().steps == 4


def adamw(lr: float) -> Options:
    return {"optimizer": partial(torch.optim.AdamW, lr=lr, weight_decay=10 * lr)}


def one_cycle(length: int) -> Options:
    return schedule(lambda each: lr_scheduler.OneCycleLR(each, 0.1, total_steps=length))


DECAY = r"with lr=0\.01 \(here 0\.02\); weight_decay=0\.1 \(here 0\.2\), and the run cont"


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        case("optimizer", adamw(0.01), adamw(0.02), DECAY),
        case("scheduler", one_cycle(9), one_cycle(12), r"total_steps=9 \(here 12\),"),
    ],
)
def test_changed_hyperparameters_warn_and_saved_ones_stay(
    saved: Options, here: Options, message: str, tmp_path: Path
) -> None:
    whole = start(tmp_path / "whole", saved, "4ba")
    whole.fit()
    start(tmp_path / "other", saved, "2ba").fit()
    for duration in ("3ba", "4ba"):  # at each resume
        resumed = start(tmp_path / "other", here, duration)
        with pytest.warns(CheckpointWarning, match=message):
            resumed.fit()
    assert_same(resumed._run.model, whole._run.model)


class Unsavable(Callback):
    """Has a state that checkpoints cannot hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"history": np.array([object()])}


class Sharing(torch.optim.SGD):
    """An optimizer whose ranks have to exchange states before it returns them, like ZeRO."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("state has not been consolidated on this rank")


class Stateless:
    """A scheduler without a state."""

    def __init__(self, optimizer: Any) -> None: ...

    def step(self) -> None: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": [Unsavable()]}, r"callbacks\.Unsavable\.history is of type ndarray"),
        ({"optimizer": Sharing}, r"of Sharing cannot be saved \(RuntimeError: state has not"),
        ({"scheduler": Stateless}, "scheduler is a Stateless without state_dict and load"),
    ],
)
def test_unsavable_state_is_refused_before_training(
    options: Options, message: str, tmp_path: Path
) -> None:
    model = linear()
    with pytest.raises(CheckpointError, match=message):
        trainer(model, tmp_path, **options).fit()
    assert_same(model, linear())
    assert not list_checkpoints(tmp_path)


class Global(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        state: Any = self.state
        state["global"] = {"steps": state.get("global", {}).get("steps", 0) + 1}
        return super().step(closure)


def test_own_checkpoint_takes_precedence_over_initial_one(tmp_path: Path) -> None:
    optimizer = partial(Global, lr=0.1)
    start(tmp_path / "first", {"optimizer": optimizer, "callbacks": [Counts()]}, "2ba").fit()
    for duration in ("4ba", "5ba"):  # the same command twice, interrupted in between
        counts = Counts()
        resumed = trainer(
            linear(),
            tmp_path / "second",
            resume=tmp_path / "first",
            optimizer=optimizer,
            callbacks=[counts],
            max_duration=duration,
        )
        resumed.fit()
        state: Any = resumed._run.optimizer.state  # type: ignore[union-attr]
        assert state["global"]["steps"] == counts.counts["batches"] == resumed.state.batch
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
