"""The two-tower job matches the halves of digits, in whole batches."""

from pathlib import Path

import pytest
import torch

import halves
from automicro.demo import digits
from tests.config_jobs import build_trainer, load_config

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "two_towers.yaml"


def test_two_halves_form_one_digit() -> None:
    batch = next(iter(halves.loader("eval", batch_size=360)))
    images, _ = next(iter(digits.loader("eval", batch_size=360)))
    assert torch.equal(torch.cat([batch["left"], batch["right"]], dim=3), images)


def test_training_batches_are_full() -> None:
    assert [len(batch["left"]) for batch in halves.loader("train", batch_size=512)] == [512, 512]


@pytest.mark.sweep
def test_job_learns_in_little_memory() -> None:
    short = ["max_duration=20ba", "eval_interval=20ba", "progress=false"]
    summary = build_trainer(load_config(CONFIG, short)).fit()
    assert summary.eval_metrics["found"] > 10 / 360  # by chance, one of them
    assert summary.microbatch_size == 512
    assert 1 <= summary.nested_sizes["left"] < 512
    assert summary.peak_memory_bytes is not None
    assert summary.peak_memory_bytes <= 8 * 2**20
