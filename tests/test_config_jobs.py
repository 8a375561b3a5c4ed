"""Every shipped config loads and trains a few steps."""

import gc
from pathlib import Path

import pytest
import torch

from automicro import FitSummary
from tests.config_jobs import build_trainer, load_config
from tests.sweeps import mostly_in_sweeps

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.yaml"))


def shipped_configs(*quick: str) -> pytest.MarkDecorator:
    """Parametrize by every shipped config; make test runs the named ones."""
    paths = [path for path in CONFIGS if path.stem in quick]
    assert len(paths) == len(quick)
    return pytest.mark.parametrize(
        "path", mostly_in_sweeps(CONFIGS, quick=paths), ids=lambda path: path.stem
    )


def train(path: Path, options: list[str]) -> FitSummary:
    trainer = build_trainer(load_config(path, options))
    # Otherwise, the garbage collector would traverse all imports after each OOM.
    gc.freeze()
    return trainer.fit()


@shipped_configs("digits")
def test_shipped_config_trains_two_steps(path: Path) -> None:
    # Evaluation would take most of the time, and a schedule may need more steps than these.
    left_out = ["eval_interval=null", "scheduler=null", "run_dir=null"]
    short = ["max_duration=2ba", "progress=false", *left_out]
    summary = train(path, short)
    assert summary.steps == 2
    # The configs show training with too little memory for a whole batch.
    if summary.nested_sizes:
        assert min(summary.nested_sizes.values()) < summary.batch_size
    elif summary.rehearsed is None:
        assert summary.train_ooms >= 1
        assert summary.microbatch_size < summary.batch_size
    else:
        assert summary.train_ooms == 0


@shipped_configs("digits")
def test_whole_batches_of_shipped_config_do_not_fit(path: Path) -> None:
    whole = ["microbatch_size=null", "microbatch_unit=rows", "rehearse=null", "max_duration=1ep"]
    whole += ["nested=null", *(["model.args.microbatch_size=null"] * (path.stem == "two_towers"))]
    quiet = ["eval_interval=null", "scheduler=null", "run_dir=null", "progress=false"]
    with pytest.raises(torch.OutOfMemoryError, match=r"microbatch size is fixed|out of memory"):
        train(path, [*whole, *quiet])


def test_shipped_configs_include_digits() -> None:
    assert "digits" in {path.stem for path in CONFIGS}
