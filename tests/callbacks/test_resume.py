"""Callbacks keep their state when a run resumes from a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from automicro import Halving
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
    """Raises an error after the given batch."""

    def __init__(self, after: int) -> None:
        self.after = after

    def batch_end(self, run: Run, result: StepResult) -> None:
        if run.state.batch == self.after:
            raise ConnectionError("power failure")


def hide(batch: Any, size: int) -> Any:
    """Return the batch with fewer features."""
    return batch[0] * (torch.arange(FEATURES) < size), batch[1]


def train(folder: Path, dies_after: int = 0) -> tuple[Any, ...]:
    """Run with every callback, and return its summary, batches and state."""
    model, stopping = make_model(dropout=0.1), EarlyStopping(patience=10, min_delta=100.0)
    average = ExponentialMovingAverage(decay=0.9, update_interval="2ba")
    trainer = trainer_with(
        *(average, stopping, OutOfMemoryReport(folder / "oom"), Unfreezing({"0": 5})),
        GrowthSchedule(4, FEATURES, over="8ba", resize=hide),
        *(SpeedMonitor(), MemoryMonitor(), Dies(dies_after)),
        model=model,
        train_dataloader=make_loader(rows=1024, batch_size=256),
        eval_dataloader=make_loader(rows=64, batch_size=64),
        eval_interval="1ba",
        max_duration="4ep",
        memory_limit="430KiB",
        # Sizes must depend on failures alone: refined sizes depend on measured memory, which
        # differs slightly in a resumed process.
        microbatch_size=Halving(refine=False),
        eval_microbatch_size=Halving(refine=False),
        seed=4,
        checkpoint=CheckpointConfig(folder=folder / "checkpoints", interval="3ba"),
    )
    summary = trainer.fit()
    assert list((folder / "oom").iterdir())
    state = copy_of(model), average.average_state_dict(), stopping.state_dict()
    return summary, trainer.state.batch, *state


@pytest.mark.parametrize("dies_after", mostly_in_sweeps([4, 6, 9]))
def test_resumed_run_matches_uninterrupted_run(tmp_path: Path, dies_after: int) -> None:
    summary, *expected, stopping = train(tmp_path / "uninterrupted")
    assert summary.train_ooms > 0
    with pytest.raises(ConnectionError):
        train(tmp_path / "interrupted", dies_after)
    _, batch, *found, resumed = train(tmp_path / "interrupted")
    assert (batch, expected.pop(0)) == (11, 11)  # stopped early
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)
    assert resumed == stopping
