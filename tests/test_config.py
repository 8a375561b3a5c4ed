"""Configs are read, and trainers are built from them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from automicro.cli.config.build import Recipe
from automicro.cli.config.nodes import CallConfig
from tests.config_jobs import args_of, build_trainer, job, load_config

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "configs" / "digits.yaml"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_overrides_set_nested_keys_mappings_and_list_items() -> None:
    config = job(
        "optimizer.args.lr=1e-3",
        "model={call: torch.nn.Bilinear}",
        "model.args.bias=false",
        "scheduler.call=a.b",
        "metrics.loss.call=c.d",
        "train_dataloader.args.dataset.1=7",
        "max_duration=3ep",
        "max_duration=4ep",
    )
    assert args_of(config, "optimizer") == {"lr": 0.001}
    assert config.model == CallConfig(call="torch.nn.Bilinear", args={"bias": False})
    assert config.scheduler["call"] == "a.b"
    assert config.metrics["loss"]["call"] == "c.d"
    assert args_of(config, "train_dataloader")["dataset"] == [1, 7, 3]
    assert config.max_duration == "4ep"


def test_seed_alone_determines_initial_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        model: nn.Module = Recipe(job(f"seed={seed}")).make_model()
        return next(model.parameters()).detach().clone()

    first = weights(5)
    torch.rand(3)
    assert torch.equal(weights(5), first)
    assert not torch.equal(weights(6), first)


def test_loss_average_can_come_from_node() -> None:
    Path("averages.py").write_text("def by_rows():\n    return lambda batch: len(batch[0])\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(".")
        build_trainer(job("loss_average={call: averages.by_rows}"))


def test_digits_recover_from_oom_in_train_and_eval() -> None:
    summary = build_trainer(load_config(DIGITS, ["max_duration=2ba", "progress=false"])).fit()
    assert summary.steps == 2
    assert summary.train_ooms >= 2
    assert summary.eval_ooms >= 1
    assert summary.peak_memory_bytes is not None
    assert summary.peak_memory_bytes <= 8 * 2**20
    last_lines = str(summary).splitlines()[-2:]
    assert last_lines[0].startswith("OOMs survived ")
    assert "in train" in last_lines[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_digits_accuracy_exceeds_97_percent() -> None:
    summary = build_trainer(load_config(DIGITS, ["progress=false"])).fit()
    assert summary.eval_metrics["accuracy"] > 0.97
    assert summary.train_ooms >= 2
    assert summary.eval_ooms >= 1
    assert summary.steps == 120
