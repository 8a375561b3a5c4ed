"""Random runs of the Trainer match a hand-written loop."""

import warnings

import pytest
import torch

from tests.oracle.trainer_jobs import TrainerJob, by_loop, by_trainer, draw_trainer_job
from tests.sweeps import mostly_in_sweeps
from tests.torture.engine.sweep import quiet

pytestmark = pytest.mark.sweep

JOBS = [draw_trainer_job(seed) for seed in range(40)]


@pytest.mark.parametrize("job", mostly_in_sweeps(JOBS, few=16), ids=lambda job: str(job.seed))
def test_trainer_run_matches_hand_written_loop(job: TrainerJob) -> None:
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the training forward changes attributes.*: forwards")
        ours = by_trainer(job)
    theirs = by_loop(job)
    # Autocast rounds to eight bits, separately in each microbatch.
    rtol, atol = (1e-9, 1e-9) if job.precision == "fp32" else (0.1, 0.05)
    for one, other in zip(ours.parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    assert ours.steps == theirs.steps
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6 if job.precision == "fp32" else 0.1)
    if job.precision == "fp32":
        assert ours.accuracy == pytest.approx(theirs.accuracy)


def test_jobs_cover_every_option() -> None:
    for name in ("accumulates", "clip", "optimizer", "scheduler", "interval", "precision", "size"):
        assert len({getattr(job, name) for job in JOBS}) > 1, name
    assert any(job.fails for job in JOBS)
