"""A checkpoint of another run is refused with what differs."""

import copy
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from automicro import ParameterGroups, Trainer
from automicro.callbacks import EarlyStopping
from automicro.checkpoints.manifest import MANIFEST
from automicro.checkpoints.store import CheckpointConfig
from automicro.checkpoints.writing import list_checkpoints
from automicro.errors import CheckpointError, CheckpointWarning
from automicro.events.callback import Callback
from automicro.events.run import Run
from tests.callbacks.runs import assert_equal, copy_of
from tests.trainer.runs import CLASSES, FEATURES, adam, make_loader, make_trainer


def model(*, width: int = 8, layers: int = 1) -> nn.Module:
    hidden = [nn.Linear(width, width) for _ in range(layers)]
    return nn.Sequential(nn.Linear(FEATURES, width), *hidden, nn.Linear(width, CLASSES))


def trainer(folder: Path, module: nn.Module | None = None, **options: Any) -> Trainer:
    settings = {"eval_dataloader": make_loader(), "max_duration": "2ba", **options}
    return make_trainer(
        module or model(), checkpoint=CheckpointConfig(folder=folder, interval="1ba"), **settings
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OTHERS: dict[str, tuple[Callable[[], nn.Module], Mapping[str, Any], str]] = {
    "a layer more": (
        lambda: model(layers=2),
        {},
        r"it lacks: modules\.0\.3\.weight, modules\.0\.3\.bias; shapes differ: modules\.0\.2\.w",
    ),
    "a layer less": (lambda: model(layers=0), {}, r"only it has: modules\.0\.2\.weight"),
    "another width": (
        lambda: model(width=16),
        {},
        r"shapes differ: modules\.0\.0\.weight \(8×12, here 16×12\)",
    ),
    "other groups": (
        model,
        {
            "optimizer": ParameterGroups(
                torch.optim.AdamW, [{"params": ["*.bias"], "weight_decay": 0.0}]
            )
        },
        r"groups of \[6\] parameters, but this one has \[3, 3\]",
    ),
    "a scheduler": (
        model,
        {"scheduler": lambda each: torch.optim.lr_scheduler.StepLR(each, 3)},
        r"a run with scheduler=None \(here StepLR\)",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(
    tmp_path: Path, other: str
) -> None:
    trainer(tmp_path).fit()
    before = sorted(path.name for path in list_checkpoints(tmp_path))
    make, options, message = OTHERS[other]
    module = make()
    weights = copy.deepcopy(module.state_dict())
    with pytest.raises(CheckpointError, match=message) as caught:
        trainer(tmp_path, module, max_duration="4ba", **options).fit()
    assert "resume='never'" in str(caught.value)
    assert_equal(copy_of(module), weights)
    assert sorted(path.name for path in list_checkpoints(tmp_path)) == before
    assert trainer(tmp_path, max_duration="4ba").fit().steps == 4


def test_a_callback_that_is_gone_is_named(tmp_path: Path) -> None:
    trainer(tmp_path, callbacks=[EarlyStopping()]).fit()
    with pytest.warns(CheckpointWarning, match="callback EarlyStopping.*it is dropped"):
        summary = trainer(tmp_path, max_duration="4ba").fit()
    assert summary.steps == 4


def test_a_callback_that_is_new_starts_fresh_and_is_named(tmp_path: Path) -> None:
    trainer(tmp_path).fit()
    stopping = EarlyStopping()
    with pytest.warns(CheckpointWarning, match="callback EarlyStopping, which starts anew"):
        trainer(tmp_path, max_duration="4ba", callbacks=[stopping]).fit()
    assert stopping.best is not None


class MakesItsStateLate(Callback):
    """Keeps what it counts in something that is there from ``fit_start`` on."""

    loaded: Mapping[str, Any] | None = None

    def fit_start(self, run: Run) -> None:
        self.counts = dict(self.loaded or {"batches": 0})

    def batch_end(self, run: Run, result: Any) -> None:
        self.counts["batches"] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.counts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state


def test_a_callback_that_makes_its_state_in_fit_start_goes_on(tmp_path: Path) -> None:
    trainer(tmp_path, callbacks=[MakesItsStateLate()]).fit()
    again = MakesItsStateLate()
    trainer(tmp_path, max_duration="4ba", callbacks=[again]).fit()
    assert again.counts == {"batches": 4}


def test_a_new_callback_that_makes_its_state_in_fit_start_is_named(tmp_path: Path) -> None:
    trainer(tmp_path).fit()
    with pytest.warns(CheckpointWarning, match="MakesItsStateLate, which starts anew"):
        trainer(tmp_path, max_duration="4ba", callbacks=[MakesItsStateLate()]).fit()


def test_an_error_of_a_callback_that_is_saved_names_it(tmp_path: Path) -> None:
    class Fails(Callback):
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        trainer(tmp_path, callbacks=[Fails()]).fit()
    assert "automicro: in the callback Fails, at state_dict" in caught.value.__notes__


class AddsAGroup(Callback):
    def batch_end(self, run: Run, result: Any) -> None:
        assert run.optimizer is not None
        if run.state.batch == 1:
            group = {"params": list(run.model[2].parameters()), "lr": 0.5}  # type: ignore[index]
            run.optimizer.add_param_group(group)


def test_a_group_that_was_added_in_the_middle_of_a_run_is_refused_with_the_way_out(
    tmp_path: Path,
) -> None:
    def start(duration: str) -> Trainer:
        module = model()
        optimizer = torch.optim.SGD(module[:2].parameters(), lr=0.1)  # type: ignore[index]
        return trainer(
            tmp_path, module, optimizer=optimizer, callbacks=[AddsAGroup()], max_duration=duration
        )

    start("2ba").fit()
    message = (
        r"has groups of \[4, 2\] parameters, but this one has \[4\].* Groups that a callback adds "
        r".*: use FreezeSchedule with all groups"
    )
    with pytest.raises(CheckpointError, match=message):
        start("4ba").fit()


@pytest.mark.parametrize("precisions", [("fp32", "fp16"), ("fp16", "fp32")])
def test_another_precision_is_allowed_and_said(tmp_path: Path, precisions: tuple[str, str]) -> None:
    trainer(tmp_path, precision=precisions[0]).fit()
    with pytest.warns(CheckpointWarning, match=r"of the part scaler, (but|which)"):
        summary = trainer(tmp_path, max_duration="4ba", precision=precisions[1]).fit()
    assert summary.steps == 4


def test_another_format_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).fit()
    path = list_checkpoints(tmp_path)[0] / MANIFEST
    content = json.loads(path.read_text())
    del content["crc32"]
    content["format"] += 1
    crc32 = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    path.write_text(json.dumps({"crc32": crc32} | content))
    with pytest.raises(CheckpointError, match="Use the version that wrote it"):
        trainer(tmp_path, max_duration="4ba").fit()


def test_a_run_that_a_callback_ended_stays_ended(tmp_path: Path) -> None:
    def stopping() -> Trainer:
        ends = EarlyStopping(patience=1, min_delta=100.0)
        return trainer(
            tmp_path, callbacks=[ends], eval_interval="1ba", max_duration="9ba", optimizer=adam
        )

    first = stopping()
    summary = first.fit()
    assert summary.steps == 2
    again = stopping()
    assert again.fit().steps == 2
    assert again.fit().steps > 2  # asked for once more, it trains on
