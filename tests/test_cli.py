"""The command line: what it prints, where, and with which exit code it ends."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import automicro
from automicro.cli import main
from automicro.cli.command import EXIT_CODES
from automicro.trainer import Trainer

MODULE = """\
import torch
from torch.utils.data import DataLoader, TensorDataset


def loader(batch_size):
    rows = torch.randn(24, 1024, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows, rows[:, :2].argmax(1)), batch_size=batch_size)


def with_batchnorm():
    return torch.nn.Sequential(torch.nn.Linear(1024, 2), torch.nn.BatchNorm1d(2))


def nan_loss():
    return lambda outputs, targets: outputs.mean() * float("nan")


def bug():
    raise AttributeError("a bug in the user's code")


def late_bug():
    def loss(outputs, targets):
        raise KeyError("a bug while training")

    return loss


def loss_of_kind(kind, weight):
    raise ValueError("no such kind")


def interrupt():
    raise KeyboardInterrupt
"""

JOB = """\
model: {call: torch.nn.Linear, args: {in_features: 1024, out_features: 2}}
train_data: {call: cli_job.loader, args: {batch_size: 12}}
loss: {call: torch.nn.CrossEntropyLoss}
optimizer: {call: torch.optim.SGD, args: {lr: 0.1}}
device: cpu
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.delitem(sys.modules, "cli_job", raising=False)
    Path("cli_job.py").write_text(MODULE, encoding="utf-8")
    Path("job.yaml").write_text(JOB, encoding="utf-8")


def test_a_job_trains_and_ends_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.yaml"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("training on the CPU")
    assert lines[-2] == "OOMs survived: 0 (0 in train, 0 in eval)"
    assert lines[-1] == "final microbatch size: 12 rows (1 × 12 of 12) in train"
    assert err == ""


def test_running_out_of_memory_is_survived_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.yaml", "memory_limit=48KiB", "eval_data=${train_data}"]) == 0
    out = capsys.readouterr().out
    assert "training on a simulated 48.00 KiB device on the CPU" in out
    assert "train: out of memory" in out
    assert "OOMs survived: 0" not in out.splitlines()[-2]
    assert out.splitlines()[-1].endswith("rows (4 × 3 of 12) in train, 3 in eval")


def test_without_progress_only_the_summary_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.yaml", "progress=false"]) == 0
    assert capsys.readouterr().out.startswith("time ")


def test_overrides_change_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["max_duration=3ba", "microbatch_size=4", "optimizer.args.lr=1e-3"]
    assert main(["train", "job.yaml", *arguments]) == 0
    out = capsys.readouterr().out
    assert "max_duration 3ba" in out
    assert out.endswith("final microbatch size: 4 rows (3 × 4 of 12) in train\n")


def test_overrides_may_stand_behind_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.yaml", "seed=1", "--debug", "max_duration=1ba"]) == 0
    assert "max_duration 1ba" in capsys.readouterr().out


def test_modules_beside_the_config_are_found_from_anywhere_and_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "cli_job.py").write_text("raise RuntimeError('the wrong one')", encoding="utf-8")
    monkeypatch.chdir(elsewhere)
    assert main(["train", str(tmp_path / "job.yaml")]) == 0
    assert capsys.readouterr().err == ""


def test_the_folder_where_the_command_is_started_is_searched_only_meanwhile() -> None:
    before = list(sys.path)
    assert main(["train", "job.yaml", "progress=false"]) == 0
    assert sys.path == before


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_shows_examples_and_exit_codes(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "automicro train configs/digits.yaml max_duration=5ep memory_limit=4MiB" in out
    assert EXIT_CODES.strip() in out
    assert err == ""


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"automicro {automicro.__version__}\n"


WRONG_COMMANDS = {
    ("trian", "job.yaml"): "invalid choice: 'trian'",
    ("train",): "the following arguments are required: CONFIG",
    ("train", "job.yaml", "--debgu"): (
        "unknown option '--debgu' (did you mean '--debug'?); options of a config are key=value"
    ),
    ("--quiet",): "unknown option '--quiet'; options of a config are key=value",
}


@pytest.mark.parametrize(("arguments", "message"), WRONG_COMMANDS.items(), ids=str)
def test_a_wrong_command_ends_with_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


def test_without_a_command_the_usage_and_one_line_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: automicro")
    assert line == (
        "automicro: error: no command was given: say automicro train CONFIG or automicro verify "
        "CONFIG"
    )


MISTAKES = {
    "job2.yaml": "automicro: there is no file 'job2.yaml': did you mean 'job.yaml'?",
    "optimzer.call=x": (
        "automicro: job.yaml: unknown key 'optimzer' (did you mean 'optimizer'?): correct it"
    ),
    "model.call=torch.nn.Linaer": (
        "automicro: job.yaml: model.call='torch.nn.Linaer': 'torch.nn' exists, but has no 'Linaer' "
        "(did you mean 'Linear'?): correct the path"
    ),
    "optimizer.args.lr=-1": (
        "automicro: job.yaml: ValueError: Invalid learning rate: -1\n"
        "  while making optimizer (torch.optim.SGD) with lr=-1"
    ),
    "loss={call: cli_job.loss_of_kind, args: {kind: abc, weight: {call: torch.tensor, args: "
    "{data: 1}}}}": (
        "automicro: job.yaml: ValueError: no such kind\n"
        "  while making loss (cli_job.loss_of_kind) with kind='abc', weight=a Tensor"
    ),
    "batchnorm=wran": (
        "automicro: job.yaml: ValueError: batchnorm='wran' is not known (did you mean 'warn'?); "
        "use one of warn, error, disable, ignore"
    ),
    "model={call: cli_job.bug}": (
        "automicro: job.yaml: AttributeError: a bug in the user's code\n"
        "  while making model (cli_job.bug)"
    ),
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.items())
def test_a_mistake_ends_with_2_and_one_message(
    mistake: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [mistake] if mistake.endswith(".yaml") else ["job.yaml", mistake]
    assert main(["train", *arguments]) == 2
    out, err = capsys.readouterr()
    assert err == f"{message}\n(--debug shows the traceback)\n"
    assert out == ""


def test_debug_shows_the_traceback_of_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--debug", "job.yaml", "model={call: cli_job.bug}"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "cli_job.py" in err
    assert err.splitlines()[-1] == "  while making model (cli_job.bug)"


def test_a_run_that_fails_ends_with_1_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.yaml", "loss.call=cli_job.nan_loss"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("automicro: the loss is nan in epoch 1, batch 1 of the epoch")
    assert "Traceback" not in err


@pytest.mark.parametrize("size", ["auto", "null"])
def test_memory_that_does_not_suffice_ends_with_1_without_a_traceback(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["memory_limit=18KiB", f"microbatch_size={size}"]
    assert main(["train", "job.yaml", *limits]) == 1
    err = capsys.readouterr().err
    assert "not fit" in err
    assert "Traceback" not in err


def test_a_mistake_inside_a_metric_is_one_line_with_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    accuracy = "{call: torchmetrics.classification.MulticlassAccuracy, args: {num_classes: 3}}"
    arguments = ["train", "job.yaml", f"metrics.accuracy={accuracy}"]
    assert main(arguments) == 1
    first, *notes = capsys.readouterr().err.splitlines()
    assert first.startswith("automicro: the run failed: ValueError: ")
    assert notes == [
        "  while updating the metric 'accuracy'",
        "  in training, epoch 1, batch 1 of the epoch (0 batches done)",
        "(--debug shows the traceback)",
    ]
    assert main([*arguments, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_remedies_in_a_run_that_fails_are_written_as_yaml(
    capsys: pytest.CaptureFixture[str],
) -> None:
    norm = "model={call: cli_job.with_batchnorm}"
    arguments = [norm, "batchnorm=error", "microbatch_size=4"]
    assert main(["train", "job.yaml", *arguments]) == 1
    err = capsys.readouterr().err
    assert "microbatch_size=null" in err
    assert "None" not in err


def test_a_bug_while_training_ends_with_1_and_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "job.yaml", "loss.call=cli_job.late_bug"]) == 1
    err = capsys.readouterr().err
    assert "cli_job.py" in err
    assert "automicro: the run failed: KeyError: 'a bug while training'" in err


@pytest.mark.parametrize("where", ["while making", "while training"])
def test_an_interruption_ends_with_130(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(trainer: Trainer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "fit", interrupt)
    overrides = ["model={call: cli_job.interrupt}"] if where == "while making" else []
    assert main(["train", "job.yaml", *overrides]) == 130
    assert capsys.readouterr().err == "automicro: interrupted\n(--debug shows the traceback)\n"


def test_python_m_automicro_is_the_same_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["automicro", "--version"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("automicro", run_name="__main__")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"automicro {automicro.__version__}\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_installed_command_trains_the_digits_and_its_last_lines_say_what_it_survived() -> None:
    root = Path(__file__).resolve().parent.parent
    command = [str(Path(sys.executable).parent / "automicro"), "train", "configs/digits.yaml"]
    # On a busy machine, threads that wait for each other take several times as long.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    survived, sizes = done.stdout.splitlines()[-2:]
    assert survived == "OOMs survived: 4 (3 in train, 1 in eval)"
    assert sizes.startswith("final microbatch size: ")


DIGITS = str(Path(__file__).resolve().parent.parent / "configs" / "digits.yaml")


def test_verify_says_whether_splitting_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["train_data.args.batch_size=9", "model.args.channels=8"]
    assert main(["verify", DIGITS, *small]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("exact: splitting does not change the gradient")
    assert main(["verify", DIGITS, *small, "loss_average=none"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("exact with loss_average=")


def test_verify_of_one_row_cannot_tell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", DIGITS, "train_data.args.batch_size=1"]) == 3
    assert "cannot be verified" in capsys.readouterr().out
