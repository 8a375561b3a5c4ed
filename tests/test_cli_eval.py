"""The command `automicro eval` with weights from a file."""

import json
from pathlib import Path

import pytest
import torch

from automicro.cli import main
from tests.cli_jobs import enter_folder_with_job

ACCURACY = "{call: torchmetrics.classification.MulticlassAccuracy, args: {num_classes: 2}}"
DATA = "eval_dataloader={call: cli_job.loader, args: {batch_size: 8}}"


@pytest.fixture(autouse=True)
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with_job(tmp_path, monkeypatch)


def test_loss_and_metrics_are_printed_as_lines_or_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    weight = torch.zeros(2, 1024)
    weight[0, 0] = weight[1, 1] = 100.0
    torch.save({"weight": weight, "bias": torch.zeros(2)}, "perfect.pt")
    command = ["eval", "job.yaml", DATA, f"metrics.accuracy={ACCURACY}", "weights=perfect.pt"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    values = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert list(values) == ["loss", "accuracy"]
    assert float(values["accuracy"]) == 1
    assert err == ""
    assert main([*command, "loss_fn.call=cli_job.nan_loss", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"loss": None, "accuracy": 1}  # JSON has no NaN


def test_initial_weights_give_warning_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "job.yaml", DATA]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("loss  ")
    assert err == (
        "automicro: the model has its initial weights: add weights=PATH to evaluate trained ones\n"
    )


def test_eval_ignores_training_keys() -> None:
    broken = [
        "optimizer.call=no.such",
        "scheduler={call: no.such}",
        "train_dataloader.call=no.such",
    ]
    assert main(["eval", "job.yaml", DATA, *broken]) == 0
    Path("small.yaml").write_text(
        "model: {call: torch.nn.Linear, args: {in_features: 1024, out_features: 2}}\n"
        "loss_fn: {call: torch.nn.CrossEntropyLoss}\n",
        encoding="utf-8",
    )
    groups = "parameter_groups=[{params: '*.bias'}]"
    assert main(["eval", "small.yaml", DATA, groups]) == 0
