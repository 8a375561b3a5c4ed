"""The command `automicro config` shows configs and keys, and prints a template."""

from pathlib import Path

import pytest

from automicro.cli import main
from automicro.cli.config.keys import KEYS
from automicro.cli.config.sources import read_file
from tests.cli_jobs import enter_folder_with_job

EVALUATION = ("data", "metrics", "microbatch_size", "max_batches", "interval")


@pytest.fixture(autouse=True)
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with_job(tmp_path, monkeypatch)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["config", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_set_option_prints_only_set_keys(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "job.yaml", "seed=3", "--set")
    Path("again.yaml").write_text(out, encoding="utf-8")
    assert set(read_file(Path("again.yaml"))[0]) == {
        *("model", "train_dataloader", "loss_fn", "optimizer", "device", "seed"),
    }


@pytest.mark.parametrize("wrong", ["model.call=torch.nn.Linaer", "weights=none.pt"])
def test_config_reports_same_errors_as_train(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "job.yaml", wrong]) == 2
    by_train = capsys.readouterr()
    assert main(["config", "job.yaml", wrong]) == 2
    assert capsys.readouterr() == by_train


def test_all_keys_are_listed_with_type_default_and_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = printed(capsys, "--keys")
    for key in KEYS:
        assert out.count(f"\n{key}: ") == 1
    assert "\nseed: a whole number or null, default null\n    seed of" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("pattern", "keys"),
    {
        "eval_": [
            "eval_dataloader",
            *(f"eval_dataloader.{name}" for name in EVALUATION),
            "eval_global_batch_size",
            "eval_interval",
            "eval_microbatch_size",
        ],
        "*_dataloader": ["train_dataloader", "eval_dataloader"],
        "seed": ["sampling_mode.seed", "seed"],
        "checkpoint.keep": ["checkpoint.keep_last", "checkpoint.keep_best"],
    }.items(),
)
def test_keys_are_found_by_substring_or_pattern(
    pattern: str, keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, "--keys", pattern)
    assert [line.split(":")[0] for line in out.splitlines() if line[:1].islower()] == keys


MY_MODULE = """\
import torch
from torch.utils.data import DataLoader, TensorDataset


class MyModel(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
        )

    def forward(self, inputs):
        return self.layers(inputs)


def make_loader(batch_size):
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows, rows[:, :2].argmax(1)), batch_size=batch_size)
"""


def test_completed_template_trains_user_module(
    capsys: pytest.CaptureFixture[str],
) -> None:
    template = printed(capsys, "--template")
    assert len(template.splitlines()) < 45
    Path("mine.yaml").write_text(template, encoding="utf-8")
    assert main(["train", "mine.yaml"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == (
        "automicro: mine.yaml:10,14: model.call, train_dataloader.call: replace '???' by a "
        "value, or add model.call=VALUE train_dataloader.call=VALUE"
    )
    Path("template_module.py").write_text(MY_MODULE, encoding="utf-8")
    for name in ("MyModel", "make_loader"):
        template = template.replace("call: ???", f"call: template_module.{name}", 1)
    assert "???" not in template.replace("each ???", "")
    Path("mine.yaml").write_text(template, encoding="utf-8")
    for command in ("config", "verify", "train"):
        assert main([command, "mine.yaml"]) == 0
    assert "final microbatch size    32 rows (1 × 32 of 32) in train" in capsys.readouterr().out
