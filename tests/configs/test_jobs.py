"""Every shipped config loads and trains a few steps, in less memory than a whole batch needs."""

import gc
from pathlib import Path

import pytest
import torch

import halves
from automicro import FitSummary
from automicro.demo import digits
from tests.config_jobs import build_trainer, load_config
from tests.sweeps import mostly_in_sweeps

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
DIGITS = [path for path in CONFIGS if path.stem == "digits"]
QUIET = ["eval_interval=null", "scheduler=null", "run_dir=null", "progress=false"]
shipped_configs = pytest.mark.parametrize(
    "path", mostly_in_sweeps(CONFIGS, quick=DIGITS), ids=lambda path: path.stem
)


def train(path: Path, *options: str) -> FitSummary:
    trainer = build_trainer(load_config(path, options))
    # Otherwise, the garbage collector would traverse all imports after each OOM.
    gc.freeze()
    return trainer.fit()


@shipped_configs
def test_shipped_config_trains_two_steps_in_little_memory(path: Path) -> None:
    summary = train(path, "max_duration=2ba", *QUIET)
    assert summary.steps == 2
    if summary.nested_sizes:
        assert min(summary.nested_sizes.values()) < summary.batch_size
    elif summary.rehearsed is None:
        assert summary.train_ooms >= 1
        assert summary.microbatch_size < summary.batch_size
    else:
        assert summary.train_ooms == 0
    whole = ["microbatch_size=null", "microbatch_unit=rows", "rehearse=null", "max_duration=1ep"]
    whole += ["nested=null", *(["model.args.microbatch_size=null"] * (path.stem == "two_towers"))]
    with pytest.raises(torch.OutOfMemoryError, match=r"microbatch size is fixed|out of memory"):
        train(path, *whole, *QUIET)


def test_two_halves_form_one_digit() -> None:
    batch = next(iter(halves.loader("eval", batch_size=360)))
    images, _ = next(iter(digits.loader("eval", batch_size=360)))
    assert torch.equal(torch.cat([batch["left"], batch["right"]], dim=3), images)
    assert [len(batch["left"]) for batch in halves.loader("train", batch_size=512)] == [512, 512]


@pytest.mark.sweep
def test_two_towers_learn_in_little_memory() -> None:
    config = CONFIGS[0].with_name("two_towers.yaml")
    summary = train(config, "max_duration=20ba", "eval_interval=20ba", "progress=false")
    assert summary.eval_metrics["found"] > 10 / 360  # by chance, one of them
    assert summary.microbatch_size == 512
    assert 1 <= summary.nested_sizes["left"] < 512
    assert summary.peak_memory_bytes is not None
    assert summary.peak_memory_bytes <= 8 * 2**20
