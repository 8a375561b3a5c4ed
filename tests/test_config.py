"""Configs: what is read from them, and what is made of it."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from automicro import MemoryBudget
from automicro.cli.config.build import Recipe
from automicro.cli.config.nodes import CallConfig, prepare
from tests.config_jobs import JOB, args_of, build_trainer, job, load_config

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "configs" / "digits.yaml"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_nested_nodes_are_made_and_handed_over() -> None:
    node = {
        "call": "torch.nn.CrossEntropyLoss",
        "args": {"weight": {"call": "torch.tensor", "args": {"data": [1.0, 2.0]}}},
    }
    assert prepare(node, "loss_fn")().weight.tolist() == [1.0, 2.0]


def test_each_making_gives_values_of_its_own() -> None:
    make = prepare({"call": "types.SimpleNamespace", "args": {"values": [1]}}, "model")
    make().values.append(2)
    assert make().values == [1]


@pytest.mark.parametrize(
    ("written", "read"), {"auto": "auto", "64": 64, "null": None, "'auto'": "auto"}.items()
)
def test_a_microbatch_size_is_a_number_auto_or_null(written: str, read: object) -> None:
    config = job(text=f"{JOB}microbatch_size: {written}\neval_microbatch_size: {written}\n")
    assert config.microbatch_size == read
    assert config.eval_microbatch_size == read


def test_overrides_set_nested_keys_replace_mappings_and_pick_from_lists() -> None:
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
    assert config.scheduler is not None
    assert config.scheduler.call == "a.b"
    assert config.metrics["loss"].call == "c.d"
    assert args_of(config, "train_dataloader")["dataset"] == [1, 7, 3]
    assert config.max_duration == "4ep"


def test_null_removes_what_is_optional() -> None:
    assert job("loss_fn=null").loss_fn is None
    assert job("metrics.loss={call: a.b}", "metrics.loss=null").metrics == {}
    assert job("metrics={loss: {call: a.b}}", "metrics=null").metrics == {}
    config = job("optimizer.args=null", "optimizer.args.foreach=true")
    assert args_of(config, "optimizer") == {"foreach": True}


def test_the_seed_decides_the_initial_weights_and_nothing_before_it_does() -> None:
    def weights(seed: int) -> torch.Tensor:
        model: nn.Module = Recipe(job(f"seed={seed}")).make_model()
        return next(model.parameters()).detach().clone()

    first = weights(5)
    torch.rand(3)
    assert torch.equal(weights(5), first)
    assert not torch.equal(weights(6), first)


def test_a_node_can_make_the_loss_average() -> None:
    Path("averages.py").write_text("def by_rows():\n    return lambda batch: len(batch[0])\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(".")
        build_trainer(job("loss_average={call: averages.by_rows}"))


def test_the_digits_config_is_read() -> None:
    config = load_config(DIGITS)
    assert args_of(config, "train_dataloader") == {"split": "train", "batch_size": 512, "seed": 0}
    assert config.microbatch_size == "auto"


def test_the_schedule_of_the_digits_ends_with_the_training() -> None:
    config = load_config(DIGITS)
    assert config.max_duration == "40ep"
    assert args_of(config, "scheduler") == {"T_max": 40 * 3}


def test_the_digits_survive_running_out_of_memory_in_train_and_eval() -> None:
    summary = build_trainer(load_config(DIGITS, ["max_duration=2ba", "progress=false"])).fit()
    assert summary.steps == 2
    assert summary.train_ooms >= 2
    assert summary.eval_ooms >= 1
    assert summary.peak_memory_bytes is not None
    assert summary.peak_memory_bytes <= 8 * 2**20
    last_lines = str(summary).splitlines()[-2:]
    assert last_lines[0].startswith("OOMs survived ")
    assert "in train" in last_lines[1]


def test_the_peaks_that_explain_the_limit_are_those_measured() -> None:
    text = DIGITS.read_text(encoding="utf-8")
    train, evaluation = map(float, re.findall(r"batch peaks at ([0-9.]+) MiB", text))
    limit = re.search(r"^memory_limit: (\d+)MiB", text, re.MULTILINE)
    assert limit is not None
    assert min(train, evaluation) > float(limit[1])
    overrides = ["memory_limit=null", "max_duration=2ba", "eval_interval=null", "progress=false"]
    trainer = build_trainer(load_config(DIGITS, overrides))
    with MemoryBudget("1GiB") as budget:
        trainer.eval()
        assert budget.peak_bytes / 2**20 == pytest.approx(evaluation, abs=0.06)
        budget.reset_peak()
        trainer.fit()
        assert budget.peak_bytes / 2**20 == pytest.approx(train, abs=0.06)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_digits_end_above_97_percent() -> None:
    summary = build_trainer(load_config(DIGITS, ["progress=false"])).fit()
    assert summary.eval_metrics["accuracy"] > 0.97
    assert summary.train_ooms >= 2
    assert summary.eval_ooms >= 1
    assert summary.steps == 120
