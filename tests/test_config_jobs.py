"""Every config that is shipped is read, checked, and trains a few steps."""

from pathlib import Path

import pytest

from automicro.cli.config.build import build_trainer
from automicro.cli.config.load import load_config

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_trains_a_few_steps(path: Path) -> None:
    # Evaluation would take most of the time, and a schedule may need more steps than these.
    left_out = ["eval_interval=null", "scheduler=null", "run_dir=null"]
    short = ["max_duration=2ba", "progress=false", *left_out]
    summary = build_trainer(load_config(path, short)).fit()
    assert summary.steps == 2
    # They are there to show what happens when memory is short.
    assert summary.train_ooms >= 1
    assert summary.microbatch_size < summary.batch_size


def test_there_are_configs_to_try() -> None:
    assert "digits" in {path.stem for path in CONFIGS}
