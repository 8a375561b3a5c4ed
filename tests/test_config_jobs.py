"""Every config that is shipped is read, checked, and trains a few steps."""

from pathlib import Path

import pytest
import torch

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
    if summary.nested_sizes:
        assert min(summary.nested_sizes.values()) < summary.batch_size
    elif summary.rehearsed is None:
        assert summary.train_ooms >= 1
        assert summary.microbatch_size < summary.batch_size
    else:
        assert summary.train_ooms == 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_shipped_config_fits_in_whole_batches(path: Path) -> None:
    whole = ["microbatch_size=null", "microbatch_unit=rows", "rehearse=null", "max_duration=1ep"]
    whole += ["nested=null", *(["model.args.microbatch_size=null"] * (path.stem == "two_towers"))]
    quiet = ["eval_interval=null", "scheduler=null", "run_dir=null", "progress=false"]
    with pytest.raises(torch.OutOfMemoryError, match=r"microbatch size is fixed|out of memory"):
        build_trainer(load_config(path, [*whole, *quiet])).fit()


def test_there_are_configs_to_try() -> None:
    assert "digits" in {path.stem for path in CONFIGS}
