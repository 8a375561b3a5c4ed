"""The folder of a run is complete, loadable and never overwritten."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from automicro.cli import main
from automicro.cli.run_dir import RunDir
from tests.cli_jobs import enter_folder_with_job
from tests.config_jobs import load_config

ANOTHER = "give another run_dir, such as 'runs/${now:%Y-%m-%d_%H-%M-%S}', or remove the folder"


@pytest.fixture(autouse=True)
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with_job(tmp_path, monkeypatch)


def train(*overrides: str) -> int:
    return main(["train", "job.yaml", "seed=0", "progress=false", *overrides])


def test_saved_config_reproduces_run() -> None:
    sizes = ["global_batch_size=8", "train_dataloader.args.batch_size=${global_batch_size}"]
    assert train("run_dir=a", *sizes, "accumulate_batches=2") == 0
    again = load_config("a/config.yaml")
    assert again.train_dataloader["args"] == {"batch_size": 4}
    assert main(["train", "a/config.yaml", "run_dir=b"]) == 0
    first, second = (
        torch.load(f"{name}/weights.pt", weights_only=True)["weight"] for name in ("a", "b")
    )
    assert torch.equal(first, second)


def error_of(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    capsys.readouterr()
    assert train(*overrides) == 2
    first = capsys.readouterr().err.splitlines()[0]
    return first.removeprefix(f"automicro: the override {overrides[0]!r}: ")


def test_error_lists_differences_from_existing_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("run_dir=a") == 0
    assert error_of(capsys, "run_dir=a", "optimizer.args={lr: 0.2, momentum: 0.9}", "seed=1") == (
        "run_dir='a' holds another run (optimizer.args.lr: 0.1 → 0.2, seed: 0 → 1, "
        f"optimizer.args.momentum: not set → 0.9): {ANOTHER}"
    )


def test_finished_run_of_same_config_is_not_overwritten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("run_dir=a") == 0
    written = {each: each.read_bytes() for each in Path("a").iterdir()}
    message = f"run_dir='a' holds the summary.json and the weights.pt of a run already: {ANOTHER}"
    assert error_of(capsys, "run_dir=a") == message
    # Another path to the same folder does not count as a difference.
    message = message.replace("'a'", f"'{Path('a').resolve()}'")
    assert error_of(capsys, f"run_dir={Path('a').resolve()}") == message
    assert {each: each.read_bytes() for each in Path("a").iterdir()} == written


def test_failed_write_leaves_no_partial_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_disk(state: object, file: object) -> None:
        raise OSError(28, "No space left on device")

    folder = RunDir("a", {"seed": 0})
    folder.begin()
    monkeypatch.setattr(torch, "save", run_out_of_disk)
    with pytest.raises(OSError, match="No space left"):
        folder.end(nn.Linear(1, 1).state_dict(), None)  # type: ignore[arg-type]
    assert os.listdir("a") == ["config.yaml"]


def test_files_are_synced_before_rename(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synced: list[int] = []
    real_sync, real_replace = os.fsync, os.replace
    order: list[str] = []

    def sync(number: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file")
        synced.append(number)
        real_sync(number)

    def replace(old: str, new: Path) -> None:
        order.append(new.name)
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    RunDir("a", {"seed": 0}).begin()
    assert order == ["file", "config.yaml", "folder"]


def test_folder_of_failed_run_can_be_reused() -> None:
    wrong = "model={call: torch.nn.Linear, args: {in_features: 7, out_features: 2}}"
    assert train("run_dir=a", wrong) == 1
    assert [each.name for each in Path("a").iterdir()] == ["config.yaml"]
    assert train("run_dir=a") == 0


def test_error_explains_how_to_extend_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run_dir=a", "checkpoint={}") == 0
    message = error_of(capsys, "run_dir=a", "checkpoint={}", "max_duration=9ep")
    more = "run_dir=a-2 checkpoint.resume=a/checkpoints"
    assert message.endswith(f"{ANOTHER}; to resume from it, add {more} to the same command")
    longer = ["run_dir=b", "checkpoint={resume: a/checkpoints}", "max_duration=9ep"]
    assert train(*longer) == 0
    assert json.loads(Path("b/summary.json").read_text())["epochs"] == 9
