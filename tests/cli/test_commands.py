"""The commands beside train: their output, files and exit codes."""

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from automicro.cli.config.keys import KEYS
from automicro.cli.config.sources import read_file
from automicro.demo import digits
from automicro.remembered.cache import SizeCache
from automicro.trainer.failed_batch import FailedBatch, save_batch
from tests.cli.conftest import DIGITS, EVAL_DATA, Command
from tests.remembered.test_remembering import KEY, SIZE, size_of

# cache

NOW = 1_800_000_000.0
EVAL = {**KEY, "phase": "eval", "memory_bytes": None}


@pytest.fixture
def cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> SizeCache:
    """Return a cache with two sizes of different ages, and stop the clock."""
    cache = SizeCache()
    for size, age in {SIZE: 3 * 86400, size_of(64, EVAL): 59}.items():
        cache.remember(dataclasses.replace(size, written_at=NOW - age))
    monkeypatch.setattr(time, "time", lambda: NOW)
    return cache


def test_json_is_complete_and_table_is_abbreviated(own_cache: Path, automicro: Command) -> None:
    shapes = dict.fromkeys(("input_ids", "attention_mask", "labels", "a", "b"), "int64[128]")
    SizeCache().remember(size_of(16, {**KEY, "shapes": shapes, "model": "[red]\x1b[2J|Net"}))
    out = automicro("cache").out
    assert "int64[128], int64[128], int64[128], [...]" in out
    assert out.splitlines()[1].startswith("[red]?[2J|Net  "), "a file's text is escaped"
    assert json.loads(automicro("cache", "--json").out)[0]["key"]["shapes"] == shapes


def test_empty_cache_message_names_folder(own_cache: Path, automicro: Command) -> None:
    assert automicro("cache").out == (
        f"no size is remembered in {own_cache}/sizes: runs with microbatch_size=auto write there\n"
    )
    assert automicro("cache", "--json").out == "[]\n"
    assert automicro("cache", "--clear").out == f"removed 0 sizes from {own_cache}/sizes\n"
    assert not own_cache.exists()


# Tests turn warnings into errors; users do not.
@pytest.mark.filterwarnings("default::automicro.SizeCacheWarning")
def test_damaged_and_stuck_files_give_warnings(cache: SizeCache, automicro: Command) -> None:
    damaged = Path(cache.folder, f"{'0' * 64}.json")
    damaged.write_text("{", encoding="utf-8")
    out, err = automicro("cache", "--json")
    assert len(json.loads(out)) == 2
    assert err.startswith(f"automicro: warning: {damaged} holds no remembered size (")
    assert err.endswith("), so it is ignored. Run automicro cache --clear to remove it\n")
    assert automicro("cache", "--clear") == (f"removed 3 sizes from {cache.folder}\n", "")
    assert cache.entries() == []
    damaged.mkdir(parents=True)
    out, err = automicro("cache", "--clear", code=1)
    assert out == f"removed 0 sizes from {cache.folder}\n"
    assert err.startswith(f"automicro: warning: {damaged} cannot be removed (")


# eval

ACCURACY = "{call: torchmetrics.classification.MulticlassAccuracy, args: {num_classes: 2}}"
DATA = f"eval_dataloader={EVAL_DATA}"


def test_loss_and_metrics_are_printed_as_lines_or_json(automicro: Command) -> None:
    weight = torch.zeros(2, 1024)
    weight[0, 0] = weight[1, 1] = 100.0
    torch.save({"weight": weight, "bias": torch.zeros(2)}, "perfect.pt")
    command = ["eval", "job.yaml", DATA, f"metrics.accuracy={ACCURACY}", "weights=perfect.pt"]
    out, err = automicro(*command)
    values = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert list(values) == ["loss", "accuracy"]
    assert float(values["accuracy"]) == 1
    assert err == ""
    out = automicro(*command, "loss_fn.call=cli_job.nan_loss", "--json").out
    assert out.count("\n") == 1
    assert json.loads(out) == {"loss": None, "accuracy": 1}  # JSON has no NaN


def test_eval_ignores_training_keys_and_warns_of_initial_weights(automicro: Command) -> None:
    broken = ["optimizer.call=no.such", "scheduler={call: no.such}"]
    out, err = automicro("eval", "job.yaml", DATA, *broken, "train_dataloader.call=no.such")
    assert out.startswith("loss  ")
    assert err == (
        "automicro: the model has its initial weights: add weights=PATH to evaluate trained ones\n"
    )
    Path("small.yaml").write_text(
        "model: {call: torch.nn.Linear, args: {in_features: 1024, out_features: 2}}\n"
        "loss_fn: {call: torch.nn.CrossEntropyLoss}\n",
        encoding="utf-8",
    )
    automicro("eval", "small.yaml", DATA, "parameter_groups=[{params: '*.bias'}]")


def test_all_evaluations_are_printed_with_their_names(automicro: Command) -> None:
    first = f"{{data: {EVAL_DATA}, metrics: {{accuracy: {ACCURACY}}}, max_batches: 1}}"
    out = automicro("eval", "job.yaml", f"eval_dataloader={{first: {first}, all: {EVAL_DATA}}}").out
    names = [line.split()[0] for line in out.splitlines()]
    assert names == ["first/loss", "first/accuracy", "all/loss"]


# replay


def test_failed_batch_is_replayed_with_adjacent_config(automicro: Command) -> None:
    limit = ["memory_limit=14KiB", "run_dir=runs/first", "rehearse=worst"]
    out, err = automicro("train", "job.yaml", *limit, code=1)
    path = "runs/first/failed-batch-0001.pt"
    assert f"automicro replay {path}" in err
    assert "in the rehearsal before the first step, batch 1 of train_dataloader" in err
    assert "rehearsal: the costliest of all 2 batches of train_dataloader\n" in out + err
    out = automicro("replay", path, code=1).out
    assert "does not fit: not even 1 row of 12" in out
    # A refused allocation would have reached 15 KiB, above the limit of 14 KiB.
    assert "needed at least: 15.00 KiB of 14.00 KiB" in out
    assert "at any size: parameters 8.50 KiB" in out
    assert "peak" not in out
    out = automicro("replay", path, "memory_limit=1MiB").out
    assert "fits now: 1 × 12 of 12 rows" in out
    assert re.search(r"\npeak: [\d.]+ KiB of 1.00 MiB\n", out)
    report = json.loads(automicro("replay", path, "job.yaml", "--json").out)
    assert (report["fits"], report["rows"], report["failed"]["limit_bytes"]) == (True, 12, 14336)


def test_batch_without_config_is_not_replayed(automicro: Command) -> None:
    Path("alone").mkdir()
    failed = FailedBatch(
        batches=[1], phase="train", message="", where="", device="cpu", limit_bytes=None
    )
    save_batch(Path("alone/batch.pt"), failed)
    err = automicro("replay", "alone/batch.pt", code=2).err
    assert "there is no config.yaml next to" in err


# verify, plan and explore


@pytest.mark.sweep
def test_verify_reports_whether_splitting_is_exact(automicro: Command) -> None:
    small = ["train_dataloader.args.batch_size=9", "model.args.channels=8"]
    out = automicro("verify", DIGITS, *small).out
    assert out.startswith("exact: splitting does not change the gradient")
    out = automicro("verify", DIGITS, *small, "loss_average=none", code=1).out
    assert out.startswith("exact with loss_average=")
    out = automicro("verify", DIGITS, "train_dataloader.args.batch_size=1", code=3).out
    assert "cannot be verified" in out


@pytest.mark.sweep
def test_plan_reports_largest_fitting_microbatch(
    automicro: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = digits.loader

    def printing_loader(*arguments: Any, **options: Any) -> Any:
        print("reading the digits")
        return make(*arguments, **options)

    monkeypatch.setattr(digits, "loader", printing_loader)
    out, err = automicro("plan", DIGITS, "--memory", "4MiB", "--json")
    assert "reading the digits" in err
    found = json.loads(out)
    assert found["num_rows"] == 512
    assert found["needed_bytes"] <= found["limit_bytes"] == 4 << 20
    assert found["num_microbatches"] * found["microbatch_size"] >= found["num_rows"]
    out = automicro("plan", DIGITS, "--memory", "256KiB", code=1).out
    assert "CNN does not fit: not even one row fits" in out
    assert "a100-80gb" in automicro("plan", "--device", "help").out


# config


def test_set_option_prints_only_set_keys(automicro: Command) -> None:
    out, err = automicro("config", "job.yaml", "seed=3", "--set")
    Path("again.yaml").write_text(out, encoding="utf-8")
    assert set(read_file(Path("again.yaml"))[0]) == {
        *("model", "train_dataloader", "loss_fn", "optimizer", "device", "seed"),
    }
    assert err == ""


def test_config_reports_same_errors_as_train(automicro: Command) -> None:
    wrong = ["job.yaml", "model.call=torch.nn.Linaer"]
    assert automicro("config", *wrong, code=2) == automicro("train", *wrong, code=2)


def test_all_keys_are_listed_with_type_default_and_meaning(automicro: Command) -> None:
    out = automicro("config", "--keys").out
    for key in KEYS:
        assert out.count(f"\n{key}: ") == 1
    assert "\nseed: a whole number or null, default null\n    seed of" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("pattern", "keys"),
    {
        "*_dataloader": ["train_dataloader", "eval_dataloader"],
        "seed": ["sampling_mode.seed", "seed"],
        "checkpoint.keep": ["checkpoint.keep_last", "checkpoint.keep_best"],
    }.items(),
)
def test_keys_are_found_by_substring_or_pattern(
    pattern: str, keys: list[str], automicro: Command
) -> None:
    out = automicro("config", "--keys", pattern).out
    assert [line.split(":")[0] for line in out.splitlines() if line[:1].islower()] == keys


def test_completed_template_trains_user_module(automicro: Command) -> None:
    template = automicro("config", "--template").out
    assert len(template.splitlines()) < 45
    Path("mine.yaml").write_text(template, encoding="utf-8")
    assert automicro("train", "mine.yaml", code=2).err.splitlines()[0] == (
        "automicro: mine.yaml:10,14: model.call, train_dataloader.call: replace '???' by a "
        "value, or add model.call=VALUE train_dataloader.call=VALUE"
    )
    for name in ("model", "loader"):
        template = template.replace("call: ???", f"call: cli_job.{name}", 1)
    assert "???" not in template.replace("each ???", "")
    Path("mine.yaml").write_text(template, encoding="utf-8")
    for command in ("config", "verify", "train"):
        out = automicro(command, "mine.yaml").out
    assert "final microbatch size    24 rows (1 × 24 of 24) in train" in out
