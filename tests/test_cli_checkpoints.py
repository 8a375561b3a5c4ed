"""Runs resume with the same command, and weights load from their checkpoints."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from automicro.cli import main
from automicro.trainer.report import TIME_IS_OVER
from tests.cli_jobs import enter_folder_with_job

# Sends a signal once, in the middle of a batch.
STOPPING = """

def stopping_loss(number, after):
    import os
    calls = []

    def loss(outputs, targets):
        calls.append(1)
        if len(calls) == after and os.path.exists("armed"):
            os.remove("armed")
            for _ in range(1 + os.path.exists("impatient")):
                os.kill(os.getpid(), number)
        return torch.nn.functional.cross_entropy(outputs, targets)

    return loss
"""
JOB = ["train", "job.yaml", "seed=0", "progress=false", "max_duration=4ep", "probe=false"]
JOB += ["loss_average=samples"]
EVAL_DATA = "{call: cli_job.loader, args: {batch_size: 8}}"


@pytest.fixture(autouse=True)
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with_job(tmp_path, monkeypatch)
    with Path("cli_job.py").open("a", encoding="utf-8") as file:
        file.write(STOPPING)


def train(*overrides: str) -> int:
    return main([*JOB, *overrides])


def interrupted(*overrides: str, number: int = signal.SIGINT) -> tuple[int, list[str]]:
    """Train until a signal in the fifth batch; return the exit code and the command."""
    Path("armed").touch()
    node = f"loss_fn={{call: cli_job.stopping_loss, args: {{number: {int(number)}, after: 5}}}}"
    command = [node, *overrides]
    return train(*command), command


def weights(path: str) -> torch.Tensor:
    weight: torch.Tensor = torch.load(path, weights_only=True)["weight"]
    return weight


@pytest.mark.parametrize(
    ("number", "code", "name"),
    [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")],
)
def test_same_command_resumes_interrupted_run_to_same_weights(
    number: int, code: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run_dir=whole") == 0
    ended, command = interrupted("run_dir=a", "checkpoint={}", number=number)
    assert ended == code
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"automicro: {name}: stopped after batch 5, saved in a/checkpoints: the same command "
        "resumes from there"
    )
    assert sorted(os.listdir("a")) == ["checkpoints", "config.yaml"]
    assert train(*command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 8
    assert torch.equal(weights("a/weights.pt"), weights("whole/weights.pt"))


def test_second_signal_in_batch_explains_how_to_resume(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("impatient").touch()
    assert interrupted("run_dir=a", "checkpoint={interval: 2ba}")[0] == 130
    assert capsys.readouterr().err.splitlines()[-1].endswith("the same command resumes from there")


RESUME_HINTS: dict[str, tuple[list[str], str]] = {
    "no folder": (
        [],
        "without a checkpoint: the same command starts over; with run_dir=runs/first "
        "checkpoint={} it can resume",
    ),
    "folder named by interpolation": (
        ["run_dir=${oc.env:A_NAME}", "checkpoint={}"],
        "saved in b c/checkpoints: the same command with 'run_dir=b c' resumes from there",
    ),
    "checkpoint folder only": (
        ["checkpoint={folder: saved}"],
        "saved in saved: the same command resumes from there",
    ),
    "resume is never": (
        ["run_dir=a", "checkpoint={resume: never}"],
        "saved in a/checkpoints: the same command with checkpoint.resume=auto resumes from there",
    ),
    "run folder without checkpoints": (
        ["run_dir=a"],
        "without a checkpoint: the same command starts over; with checkpoint={} it can resume",
    ),
}


@pytest.mark.parametrize(("options", "end"), RESUME_HINTS.values(), ids=RESUME_HINTS)
def test_ctrl_c_message_explains_how_to_resume(
    options: list[str],
    end: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_NAME", "b c")
    assert interrupted(*options, "progress=true")[0] == 130
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == f"automicro: Ctrl-C: stopped after batch 5, {end}"
    assert (out + err).count("stopped after") == 1


def test_restarted_finished_run_prints_summary_without_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    never_better = "{call: automicro.callbacks.EarlyStopping, args: {patience: 1, min_delta: 9.0}}"
    command = ["run_dir=a", "checkpoint={}", f"eval_dataloader={EVAL_DATA}"]
    command.append(f"callbacks=[{never_better}]")
    assert train(*command) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("wrote ")
    assert json.loads(Path("a/summary.json").read_text())["epochs"] == 2, "a callback ended it"
    before = {each: each.stat().st_mtime_ns for each in Path("a").rglob("*")}
    assert train(*command) == 0
    *again, last = capsys.readouterr().out.splitlines()
    assert again == Path("a/summary.json").read_text().splitlines()
    assert last == "a holds this run, which is complete: there is nothing to do"
    assert {each: each.stat().st_mtime_ns for each in Path("a").rglob("*")} == before
    assert train(*command, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(Path("a/summary.json").read_text())
    assert "there is nothing to do" in err
    for code in (0, 2):
        assert train("run_dir=b", "checkpoint={resume: never}") == code
    assert "holds the summary.json and the weights.pt of a run already" in capsys.readouterr().err


def test_run_stopped_by_max_time_resumes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["run_dir=a", "checkpoint={}", "--json"]
    with monkeypatch.context() as patch:
        patch.setattr("automicro.trainer.trainer.parse_time", lambda text: 0.0)
        assert train(*command, "max_time=1h") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["steps"], summary["stop_reason"]) == (1, TIME_IS_OVER)
    assert train(*command) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 8
    assert json.loads(Path("a/summary.json").read_text())["steps"] == 8


def test_longer_run_resumes_from_other_then_own_checkpoints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("run_dir=short", "checkpoint={}", "max_duration=2ep") == 0
    longer = ["run_dir=a", "checkpoint={resume: short/checkpoints}"]
    ended, command = interrupted(*longer, "max_duration=6ep")
    assert ended == 130
    assert "stopped after batch 9, saved in a/checkpoints" in capsys.readouterr().err
    assert train(*command, "progress=true") == 0
    out = capsys.readouterr().out
    assert "resumed from a/checkpoints/" in out
    assert "after batch 9\n" in out


def test_checkpoint_overrides_weights_with_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("run_dir=first") == 0
    ended, command = interrupted("run_dir=a", "checkpoint={}", "weights=first/weights.pt")
    assert ended == 130
    assert "is not used" not in capsys.readouterr().err
    assert train(*command) == 0
    assert capsys.readouterr().err.splitlines() == [
        "automicro: weights='first/weights.pt' is not used: the run resumes from the checkpoints "
        "in a/checkpoints"
    ]


def test_checkpoints_can_be_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run_dir=a", "checkpoint={}", f"eval_dataloader={EVAL_DATA}", "--json"]
    assert train(*command) == 0
    trained = json.loads(capsys.readouterr().out)["eval_metrics"]["loss"]
    newest = max(Path("a/checkpoints").iterdir())
    # With the config of the run, and without the run_dir that saving a checkpoint would need.
    for job in (["a/config.yaml"], ["job.yaml", f"eval_dataloader={EVAL_DATA}", "checkpoint={}"]):
        for path in ("a/checkpoints", str(newest)):
            assert main(["eval", *job, f"weights={path}", "--json"]) == 0
            loss = json.loads(capsys.readouterr().out)["loss"]
            assert loss == pytest.approx(trained, rel=1e-6)


def test_checkpoint_of_another_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run_dir=a", "checkpoint={}") == 0
    larger = ["model.args.out_features=3", f"eval_dataloader={EVAL_DATA}"]
    assert main(["eval", "job.yaml", *larger, "weights=a/checkpoints"]) == 2
    assert "weights='a/checkpoints' does not fit the Linear (" in capsys.readouterr().err
    assert train("checkpoint={folder: a/checkpoints}", "model.args.bias=false") == 1
    err = capsys.readouterr().err
    assert "does not fit" in err
    assert "anew with resume='never'" in err


def test_all_evaluations_are_printed_with_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    metric = "{call: torchmetrics.classification.MulticlassAccuracy, args: {num_classes: 2}}"
    first = f"{{data: {EVAL_DATA}, metrics: {{accuracy: {metric}}}, max_batches: 1}}"
    assert main(["eval", "job.yaml", f"eval_dataloader={{first: {first}, all: {EVAL_DATA}}}"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["first/loss", "first/accuracy", "all/loss"]
