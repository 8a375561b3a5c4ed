"""``automicro replay`` and rehearsals from a config report failures and the sizes that fit."""

import json
import re
from pathlib import Path

import pytest

from automicro.cli import main
from automicro.trainer.failed_batch import FailedBatch, save_batch
from tests.cli_jobs import enter_folder_with_job


@pytest.fixture(autouse=True)
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with_job(tmp_path, monkeypatch)


@pytest.fixture
def saved_batch(capsys: pytest.CaptureFixture[str]) -> Path:
    """Return the failed batch that a run saved."""
    limit = "memory_limit=14KiB"
    assert main(["train", "job.yaml", limit, "run_dir=runs/first", "rehearse=worst"]) == 1
    out, err = capsys.readouterr()
    path = Path("runs/first/failed-batch-0001.pt")
    assert f"automicro replay {path}" in err
    assert "in the rehearsal before the first step, batch 1 of train_dataloader" in err
    assert "rehearsal: the costliest of all 2 batches of train_dataloader\n" in out + err
    return path


def test_failed_batch_is_replayed_with_adjacent_config(
    saved_batch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(saved_batch)]) == 1
    out = capsys.readouterr().out
    assert "does not fit: not even 1 row of 12" in out
    # A refused allocation would have reached 15 KiB, above the limit of 14 KiB.
    assert "needed at least: 15.00 KiB of 14.00 KiB" in out
    assert "at any size: parameters 8.50 KiB" in out
    assert "peak" not in out
    assert main(["replay", str(saved_batch), "memory_limit=1MiB"]) == 0
    out = capsys.readouterr().out
    assert "fits now: 1 × 12 of 12 rows" in out
    assert re.search(r"\npeak: [\d.]+ KiB of 1.00 MiB\n", out)
    assert main(["replay", str(saved_batch), "job.yaml", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["fits"], report["rows"], report["failed"]["limit_bytes"]) == (True, 12, 14336)


def test_replay_errors_name_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*command: str) -> str:
        assert main(["replay", *command]) == 2
        return capsys.readouterr().err

    assert "there is no file 'none.pt': give the failed batch of a run" in fails("none.pt")
    Path("other.pt").write_text("something")
    assert "other.pt holds no batch that automicro has saved" in fails("other.pt", "job.yaml")
    alone = tmp_path / "alone"
    alone.mkdir()
    failed = FailedBatch(
        batches=[1], phase="train", message="", where="", device="cpu", limit_bytes=None
    )
    save_batch(alone / "batch.pt", failed)
    assert "there is no config.yaml next to" in fails(str(alone / "batch.pt"))
    assert "there is no file 'jib.yaml': did you mean 'job.yaml'?" in fails(
        str(alone / "batch.pt"), "jib.yaml"
    )
