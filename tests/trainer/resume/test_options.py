"""Other options at a resume: refused, said, or taken, and never without a word."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from automicro import Trainer
from automicro.checkpoints.writing import list_checkpoints
from automicro.errors import CheckpointError, CheckpointWarning
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.step.results import StepResult
from tests.trainer.resume.runs import linear, trainer
from tests.trainer.runs import make_loader

schedulers = torch.optim.lr_scheduler


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.StepLR(optimizer, 3)


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [schedulers.LinearLR(optimizer, 0.1), schedulers.CosineAnnealingLR(optimizer, 8)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[4])


OTHER_CLASSES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
    # Their groups have the same options.
    "optimizer": (
        {"optimizer": adam},
        {"optimizer": partial(torch.optim.AdamW, lr=0.01)},
        r"a run with optimizer=Adam \(here AdamW\)",
    ),
    "scheduler": (
        {"scheduler": step_lr},
        {"scheduler": lambda each: schedulers.ExponentialLR(each, 0.9)},
        r"a run with scheduler=StepLR \(here ExponentialLR\)",
    ),
    "made of others": (
        {"scheduler": sequential},
        {"scheduler": lambda each: schedulers.SequentialLR(each, [step_lr(each)], [])},
        r"SequentialLR\(LinearLR, CosineAnnealingLR\) \(here SequentialLR\(StepLR\)\)",
    ),
    "no scheduler": (
        {"scheduler": step_lr},
        {},
        r"a run with scheduler=StepLR \(here None\)",
    ),
}


@pytest.mark.parametrize("other", OTHER_CLASSES)
def test_another_class_is_refused_before_anything_is_overwritten(
    other: str, tmp_path: Path
) -> None:
    saved, here, message = OTHER_CLASSES[other]
    trainer(linear(), tmp_path, max_duration="2ba", **saved).fit()
    model = linear()
    again = trainer(model, tmp_path, **here)
    with pytest.raises(CheckpointError, match=message):
        again.fit()
    assert torch.equal(model.weight, linear().weight)
    assert again._run.optimizer is not None
    assert not again._run.optimizer.state


def cosine(length: int) -> Callable[..., Any]:
    return lambda optimizer: schedulers.CosineAnnealingLR(optimizer, length)


def one_cycle(length: int) -> Callable[..., Any]:
    return lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=length)


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (
            {"optimizer": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)},
            {"optimizer": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.2)},
            r"with lr=0\.01 \(here 0\.02\); weight_decay=0\.1 \(here 0\.2\), and the run cont",
        ),
        ({"scheduler": cosine(9)}, {"scheduler": cosine(12)}, r"T_max=9 \(here 12\)"),
        ({"scheduler": one_cycle(9)}, {"scheduler": one_cycle(12)}, r"total_steps=9 \(here 12\),"),
    ],
)
def test_other_options_are_said_and_those_of_the_checkpoint_stay(
    saved: Mapping[str, Any], here: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    def end(folder: str, *steps: Mapping[str, Any]) -> Trainer:
        for index, options in enumerate(steps):
            torch.manual_seed(3)
            duration = f"{2 + 2 * index}ba"
            made = trainer(linear(), tmp_path / folder, max_duration=duration, **options)
            made.fit()
        return made

    expected = end("same", saved, saved)
    trainer(linear(), tmp_path / "other", max_duration="2ba", **saved).fit()
    # Each time: what was given at first is what goes on.
    for duration in ("3ba", "4ba"):
        resumed = trainer(linear(), tmp_path / "other", max_duration=duration, **here)
        with pytest.warns(CheckpointWarning, match=message):
            resumed.fit()
    for one, other in zip(
        resumed._run.model.parameters(), expected._run.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sizes", [(4, "auto"), ("auto", 4), (4, None)])
@pytest.mark.parametrize("name", ["microbatch_size", "eval_microbatch_size"])
def test_another_way_to_find_sizes_is_taken(
    sizes: tuple[Any, Any], name: str, tmp_path: Path
) -> None:
    options = {"eval_dataloader": make_loader(rows=16)}
    trainer(linear(), tmp_path, max_duration="2ba", **{name: sizes[0]}, **options).fit()
    again = trainer(linear(), tmp_path, **{name: sizes[1]}, **options)
    if "auto" in sizes:
        with pytest.warns(CheckpointWarning, match="another policy .*which changes no result"):
            summary = again.fit()
    else:
        summary = again.fit()
    assert summary.steps == 5


@pytest.mark.parametrize("names", [("a", "ab"), ("ab", "a"), ("a", "b")])
def test_evaluators_come_and_go(names: tuple[str, str], tmp_path: Path) -> None:
    def data(which: str) -> dict[str, Any]:
        return {name: make_loader(rows=16) for name in which}

    trainer(linear(), tmp_path, max_duration="2ba", eval_dataloader=data(names[0])).fit()
    summary = trainer(linear(), tmp_path, eval_dataloader=data(names[1])).fit()
    assert summary.steps == 5


class Refusing(Callback):
    """Refuses the state that it gave."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise ValueError("not this one")


@pytest.mark.parametrize("what", ["callback", "data"])
def test_what_refuses_its_own_state_leaves_the_model_as_it_was(what: str, tmp_path: Path) -> None:
    trainer(linear(), tmp_path, max_duration="2ba", callbacks=[Refusing()]).fit()
    model = linear()
    options: dict[str, Any] = {"callbacks": [Refusing()]}
    if what == "data":  # three batches of which one is done, where there were more
        options = {"train_dataloader": make_loader(rows=48, batch_size=48), "callbacks": [Keeps()]}
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        trainer(model, tmp_path, **options).fit()
    assert torch.equal(model.weight, linear().weight)


class Keeps(Refusing):
    """Takes its state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


Keeps.__name__ = Keeps.__qualname__ = Refusing.__name__


class Unsavable(Callback):
    """Has a state that no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"history": np.array([object()])}


class Stateless:
    """A schedule without a state."""

    def __init__(self, optimizer: Any) -> None: ...

    def step(self) -> None: ...


class HoldsModule:
    """A factor of the learning rate that holds a module."""

    def __init__(self) -> None:
        self.module = nn.Linear(2, 2)

    def __call__(self, step: int) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": [Unsavable()]}, r"callbacks\.Unsavable\.history is of type ndarray"),
        ({"scheduler": Stateless}, "scheduler is a Stateless without state_dict and load"),
        (
            {"scheduler": lambda each: schedulers.LambdaLR(each, HoldsModule())},
            r"scheduler\.lr_lambdas\.0\.module is of type Linear",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_was_trained(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = linear()
    with pytest.raises(CheckpointError, match=message):
        trainer(model, tmp_path, **options).fit()
    assert torch.equal(model.weight, linear().weight)
    assert not list_checkpoints(tmp_path)


class Global(torch.optim.SGD):
    """Keeps state that is of no parameter."""

    def step(self, closure: Any = None) -> Any:
        steps = self.state.get("global", {}).get("steps", 0)  # type: ignore[call-overload]
        self.state["global"] = {"steps": steps + 1}  # type: ignore[index]
        return super().step(closure)


def test_state_of_an_optimizer_that_is_of_no_parameter_comes_back(tmp_path: Path) -> None:
    optimizer = partial(Global, lr=0.1)
    trainer(linear(), tmp_path, max_duration="2ba", optimizer=optimizer).fit()
    again = trainer(linear(), tmp_path, optimizer=optimizer)
    again.fit()
    assert again._run.optimizer is not None
    assert again._run.optimizer.state["global"] == {"steps": 5}  # type: ignore[index]


class Begins(Callback):
    """Notes the batches that are trained."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def batch_end(self, run: Run, result: StepResult) -> None:
        self.batches.append(run.state.batch)


def test_a_run_goes_on_with_its_own_checkpoint_before_the_one_it_began_with(tmp_path: Path) -> None:
    trainer(linear(), tmp_path / "first", max_duration="2ba").fit()
    batches = []
    for duration in ("4ba", "5ba"):  # the same command twice, cut off between
        begins = Begins()
        trainer(
            linear(),
            tmp_path / "second",
            resume=tmp_path / "first",
            max_duration=duration,
            callbacks=[begins],
        ).fit()
        batches.append(begins.batches)
    assert batches == [[3, 4], [5]]
