"""Every config that is shipped is read, checked, and trains a few steps."""

import gc
from pathlib import Path

import pytest
import torch

from automicro import FitSummary
from tests.config_jobs import build_trainer, load_config
from tests.sweeps import mostly_in_sweeps

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.yaml"))


def these(*quick: str) -> pytest.MarkDecorator:
    """Every shipped config; make test tries those of these names."""
    paths = [path for path in CONFIGS if path.stem in quick]
    assert len(paths) == len(quick)
    return pytest.mark.parametrize(
        "path", mostly_in_sweeps(CONFIGS, quick=paths), ids=lambda path: path.stem
    )


def train(path: Path, options: list[str]) -> FitSummary:
    trainer = build_trainer(load_config(path, options))
    # What a config imports would be looked through whenever memory has run out.
    gc.freeze()
    return trainer.fit()


@these("digits")
def test_a_shipped_config_trains_a_few_steps(path: Path) -> None:
    # Evaluation would take most of the time, and a schedule may need more steps than these.
    left_out = ["eval_interval=null", "scheduler=null", "run_dir=null"]
    short = ["max_duration=2ba", "progress=false", *left_out]
    summary = train(path, short)
    assert summary.steps == 2
    # They are there to show what happens when memory is short.
    if summary.nested_sizes:
        assert min(summary.nested_sizes.values()) < summary.batch_size
    elif summary.rehearsed is None:
        assert summary.train_ooms >= 1
        assert summary.microbatch_size < summary.batch_size
    else:
        assert summary.train_ooms == 0


@these("digits")
def test_no_shipped_config_fits_in_whole_batches(path: Path) -> None:
    whole = ["microbatch_size=null", "microbatch_unit=rows", "rehearse=null", "max_duration=1ep"]
    whole += ["nested=null", *(["model.args.microbatch_size=null"] * (path.stem == "two_towers"))]
    quiet = ["eval_interval=null", "scheduler=null", "run_dir=null", "progress=false"]
    with pytest.raises(torch.OutOfMemoryError, match=r"microbatch size is fixed|out of memory"):
        train(path, [*whole, *quiet])


def test_there_are_configs_to_try() -> None:
    assert "digits" in {path.stem for path in CONFIGS}
