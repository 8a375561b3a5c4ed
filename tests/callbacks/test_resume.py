"""Callbacks go on where they were when a run is resumed from a checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from automicro import Halving, Trainer
from automicro.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    GrowthSchedule,
    MemoryMonitor,
    OutOfMemoryReport,
    SpeedMonitor,
)
from automicro.checkpoints.store import CheckpointConfig
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.step.results import StepResult
from tests.callbacks.runs import Unfreezing, assert_equal, copy_of, trainer_with
from tests.sweeps import mostly_in_sweeps
from tests.trainer.runs import FEATURES, make_loader, make_model


class Dies(Callback):
    """Ends the run with an error after some batch."""

    def __init__(self, after: int) -> None:
        self.after = after

    def batch_end(self, run: Run, result: StepResult) -> None:
        if run.state.batch == self.after:
            raise ConnectionError("power failure")


class Job:
    """A run with every callback."""

    def __init__(self, folder: Path, *, dies_after: int = 0) -> None:
        self.model = make_model(dropout=0.1)
        self.stopping = EarlyStopping(patience=10, min_delta=100.0)
        self.average = ExponentialMovingAverage(decay=0.9, update_interval="2ba")
        self.trainer: Trainer = trainer_with(
            self.average,
            self.stopping,
            OutOfMemoryReport(folder / "oom"),
            Unfreezing({"0": 5}),
            GrowthSchedule(4, FEATURES, over="8ba", resize=hide),
            SpeedMonitor(),
            MemoryMonitor(),
            Dies(dies_after),
            model=self.model,
            train_dataloader=make_loader(rows=1024, batch_size=256),
            eval_dataloader=make_loader(rows=64, batch_size=64),
            eval_interval="1ba",
            max_duration="4ep",
            memory_limit="430KiB",
            # Sizes that follow from what failed: refined ones go by measured memory, of which a
            # resumed process holds a little more or less.
            microbatch_size=Halving(refine=False),
            eval_microbatch_size=Halving(refine=False),
            seed=4,
            checkpoint=CheckpointConfig(folder=folder / "checkpoints", interval="3ba"),
        )


def hide(batch: Any, size: int) -> Any:
    """The batch with fewer features."""
    inputs = batch[0].clone()
    inputs[:, size:] = 0
    return inputs, batch[1]


@pytest.mark.parametrize("dies_after", mostly_in_sweeps([4, 6, 9]))
def test_a_resumed_run_ends_as_the_undisturbed_one(tmp_path: Path, dies_after: int) -> None:
    undisturbed = Job(tmp_path / "undisturbed")
    summary = undisturbed.trainer.fit()
    assert summary.train_ooms > 0
    with pytest.raises(ConnectionError):
        Job(tmp_path / "disturbed", dies_after=dies_after).trainer.fit()
    resumed = Job(tmp_path / "disturbed")
    resumed.trainer.fit()
    assert resumed.trainer.state.batch == undisturbed.trainer.state.batch == 11  # stopped early
    assert_equal(copy_of(resumed.model), copy_of(undisturbed.model))
    assert_equal(resumed.average.average_state_dict(), undisturbed.average.average_state_dict())
    assert resumed.stopping.state_dict() == undisturbed.stopping.state_dict()
    for name in ("disturbed", "undisturbed"):
        assert list((tmp_path / name / "oom").iterdir())
