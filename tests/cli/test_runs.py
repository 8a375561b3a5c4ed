"""The folder of a run is complete and never overwritten, and runs resume with the same command."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from automicro import files
from automicro.cli.run_dir import RunDir
from automicro.trainer.report import TIME_IS_OVER
from tests.cli.conftest import EVAL_DATA, Command
from tests.config_jobs import load_config

# Sends a signal once, in the middle of a batch.
STOPPING = """

def stopping_loss(number, after):
    import os
    calls = []

    def loss(outputs, targets):
        calls.append(1)
        if len(calls) == after and os.path.exists("armed"):
            os.remove("armed")
            os.kill(os.getpid(), number)
        return torch.nn.functional.cross_entropy(outputs, targets)

    return loss
"""
JOB = ["train", "job.yaml", "seed=0", "progress=false", "max_duration=4ep", "probe=false"]
JOB += ["loss_average=samples"]
ANOTHER = "give another run_dir, such as 'runs/${now:%Y-%m-%d_%H-%M-%S}', or remove the folder"


@pytest.fixture(autouse=True)
def stopping_job(job_folder: None) -> None:
    with Path("cli_job.py").open("a", encoding="utf-8") as file:
        file.write(STOPPING)


def interrupted(*overrides: str, number: int = signal.SIGINT) -> list[str]:
    """Return a command that gets a signal in the fifth batch."""
    Path("armed").touch()
    node = f"loss_fn={{call: cli_job.stopping_loss, args: {{number: {int(number)}, after: 5}}}}"
    return [*JOB, node, *overrides]


def weights(path: str) -> torch.Tensor:
    weight: torch.Tensor = torch.load(path, weights_only=True)["weight"]
    return weight


def summary(path: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(Path(path, "summary.json").read_text())
    return found


# The folder


def test_saved_config_reproduces_run(automicro: Command) -> None:
    sizes = ["global_batch_size=8", "train_dataloader.args.batch_size=${global_batch_size}"]
    automicro(*JOB, "run_dir=a", *sizes, "accumulate_batches=2")
    assert load_config("a/config.yaml").train_dataloader["args"] == {"batch_size": 4}
    automicro("train", "a/config.yaml", "run_dir=b")
    assert torch.equal(weights("a/weights.pt"), weights("b/weights.pt"))


def error_of(automicro: Command, *overrides: str) -> str:
    first = automicro(*JOB, *overrides, code=2).err.splitlines()[0]
    return first.removeprefix(f"automicro: the override {overrides[0]!r}: ")


def test_existing_run_is_not_overwritten(automicro: Command) -> None:
    automicro(*JOB, "run_dir=a")
    written = {each: each.read_bytes() for each in Path("a").iterdir()}
    message = f"run_dir='a' holds the summary.json and the weights.pt of a run already: {ANOTHER}"
    assert error_of(automicro, "run_dir=a") == message
    # Another path to the same folder does not count as a difference.
    whole = str(Path("a").resolve())
    assert error_of(automicro, f"run_dir={whole}") == message.replace("'a'", f"'{whole}'")
    other = ["optimizer.args={lr: 0.2, momentum: 0.9}", "seed=1"]
    assert error_of(automicro, "run_dir=a", *other) == (
        "run_dir='a' holds another run (optimizer.args.lr: 0.1 → 0.2, seed: 0 → 1, "
        f"optimizer.args.momentum: not set → 0.9): {ANOTHER}"
    )
    assert {each: each.read_bytes() for each in Path("a").iterdir()} == written


def test_files_are_synced_before_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(files, "sync", lambda _: order.append("sync"))
    monkeypatch.setattr(files, "replace", lambda old, new: order.append(old.rename(new).name))
    RunDir("a", {"seed": 0}).begin()
    assert order == ["sync", "config.yaml", "sync"]


def test_folder_of_failed_run_can_be_reused(automicro: Command) -> None:
    wrong = "model={call: torch.nn.Linear, args: {in_features: 7, out_features: 2}}"
    automicro(*JOB, "run_dir=a", wrong, code=1)
    assert [each.name for each in Path("a").iterdir()] == ["config.yaml"]
    automicro(*JOB, "run_dir=a")


def test_error_explains_how_to_extend_run(automicro: Command) -> None:
    automicro(*JOB, "run_dir=a", "checkpoint={}")
    message = error_of(automicro, "run_dir=a", "checkpoint={}", "max_duration=9ep")
    more = "run_dir=a-2 checkpoint.resume=a/checkpoints"
    assert message.endswith(f"{ANOTHER}; to resume from it, add {more} to the same command")
    longer = ["run_dir=b", "checkpoint={resume: a/checkpoints}", "max_duration=9ep"]
    automicro(*JOB, *longer)
    assert summary("b")["epochs"] == 9


# Resuming


@pytest.mark.parametrize(
    ("number", "code", "name"),
    [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")],
)
def test_same_command_resumes_interrupted_run_to_same_weights(
    number: int, code: int, name: str, automicro: Command
) -> None:
    automicro(*JOB, "run_dir=whole")
    command = interrupted("run_dir=a", "checkpoint={}", number=number)
    assert automicro(*command, code=code).err.splitlines()[-1] == (
        f"automicro: {name}: stopped after batch 5, saved in a/checkpoints: the same command "
        "resumes from there"
    )
    assert sorted(os.listdir("a")) == ["checkpoints", "config.yaml"]
    assert "resumed from a/checkpoints/" in automicro(*command, "progress=true").out
    assert summary("a")["steps"] == 8
    assert torch.equal(weights("a/weights.pt"), weights("whole/weights.pt"))


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
    options: list[str], end: str, automicro: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_NAME", "b c")
    out, err = automicro(*interrupted(*options, "progress=true"), code=130)
    assert err.splitlines()[-1] == f"automicro: Ctrl-C: stopped after batch 5, {end}"
    assert (out + err).count("stopped after") == 1


def test_restarted_finished_run_prints_summary_without_training(automicro: Command) -> None:
    never_better = "{call: automicro.callbacks.EarlyStopping, args: {patience: 1, min_delta: 9.0}}"
    command = [*JOB, "run_dir=a", "checkpoint={}", f"eval_dataloader={EVAL_DATA}"]
    command.append(f"callbacks=[{never_better}]")
    assert automicro(*command).out.splitlines()[-1].startswith("wrote ")
    assert summary("a")["epochs"] == 2, "a callback ended it"
    before = {each: each.stat().st_mtime_ns for each in Path("a").rglob("*")}
    *again, last = automicro(*command).out.splitlines()
    assert again == Path("a/summary.json").read_text().splitlines()
    assert last == "a holds this run, which is complete: there is nothing to do"
    assert {each: each.stat().st_mtime_ns for each in Path("a").rglob("*")} == before
    out, err = automicro(*command, "--json")
    assert json.loads(out) == summary("a")
    assert "there is nothing to do" in err
    anew = [*JOB, "run_dir=b", "checkpoint={resume: never}"]
    automicro(*anew)
    err = automicro(*anew, code=2).err
    assert "holds the summary.json and the weights.pt of a run already" in err


def test_run_stopped_by_max_time_resumes(
    automicro: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*JOB, "run_dir=a", "checkpoint={}"]
    with monkeypatch.context() as patch:
        patch.setattr("automicro.trainer.trainer.parse_time", lambda text: 0.0)
        automicro(*command, "max_time=1h")
    assert (summary("a")["steps"], summary("a")["stop_reason"]) == (1, TIME_IS_OVER)
    automicro(*command)
    assert summary("a")["steps"] == 8


def test_checkpoint_overrides_weights_with_message(automicro: Command) -> None:
    automicro(*JOB, "run_dir=first")
    command = interrupted("run_dir=a", "checkpoint={}", "weights=first/weights.pt")
    assert "is not used" not in automicro(*command, code=130).err
    assert automicro(*command).err.splitlines() == [
        "automicro: weights='first/weights.pt' is not used: the run resumes from the checkpoints "
        "in a/checkpoints"
    ]


def test_checkpoints_can_be_evaluated(automicro: Command) -> None:
    data = f"eval_dataloader={EVAL_DATA}"
    out = automicro(*JOB, "run_dir=a", "checkpoint={}", data, "--json").out
    trained = json.loads(out)["eval_metrics"]["loss"]
    newest = max(Path("a/checkpoints").iterdir())
    # With the config of the run, and without the run_dir that saving a checkpoint would need.
    for job in (["a/config.yaml"], ["job.yaml", data, "checkpoint={}"]):
        for path in ("a/checkpoints", str(newest)):
            out = automicro("eval", *job, f"weights={path}", "--json").out
            assert json.loads(out)["loss"] == pytest.approx(trained, rel=1e-6)
    larger = ["eval", "job.yaml", "model.args.out_features=3", data, "weights=a/checkpoints"]
    err = automicro(*larger, code=2).err
    assert "weights='a/checkpoints' does not fit the Linear (" in err
    err = automicro(*JOB, "checkpoint={folder: a/checkpoints}", "model.args.bias=false", code=1).err
    assert "does not fit" in err
    assert "anew with resume='never'" in err
