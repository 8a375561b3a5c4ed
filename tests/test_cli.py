"""The command line's output, streams and exit codes."""

import argparse
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import automicro
from automicro.cli import commands, main
from automicro.cli.commands import COMMANDS
from tests.cli_jobs import enter_folder_with_job

NEW_COMMAND = """\
'''Count.'''
EXAMPLES = ["automicro count"]


def run(arguments):
    return 3
"""


@pytest.fixture(autouse=True)
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with_job(tmp_path, monkeypatch)


def test_train_first_prints_set_config_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "job.yaml", "max_duration=1ba", "optimizer.args.lr=0.5"]) == 0
    shown = capsys.readouterr().out.partition("training on")[0].splitlines()
    assert "    lr: 0.5" in shown
    assert "max_duration: 1ba" in shown
    assert not any(line.startswith("seed") for line in shown)


def test_json_summary_is_only_output_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    talking = "loss_fn={call: cli_job.talking_loss}"
    assert main(["train", "job.yaml", "--json", "max_duration=2ba", talking]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    summary = json.loads(out)
    assert summary["steps"] == 2
    assert summary["microbatch_size"] == 12
    assert "a word from the user's code" in err
    assert "training on the CPU" in err


def test_config_path_may_contain_equals_sign(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lr=0.1").mkdir()
    Path("job.yaml").rename("lr=0.1/job.yaml")
    assert main(["train", "lr=0.1/job.yaml", "max_duration=1ba", "progress=false"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "first"),
    {"config --keys": "What is made\n", "train job.yaml max_duration=500ep": "model:\n"}.items(),
)
def test_closed_pipe_shows_no_traceback(command: str, first: str) -> None:
    command = f"{sys.executable} -m automicro {command} | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert done.stdout == first
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # 0 if everything was written before the pipe closed


def test_colors_follow_environment_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ["train", "job.yaml", "sede=1"]
    main(wrong)
    plain = capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")
    main(wrong)
    coloured = capsys.readouterr().err
    monkeypatch.setenv("NO_COLOR", "1")
    main(wrong)
    assert "\x1b[1;31mautomicro:" in coloured
    assert "\x1b" not in plain
    assert "\x1b[1;31m" not in capsys.readouterr().err


def test_modules_beside_config_take_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "cli_job.py").write_text("raise RuntimeError('the wrong one')", encoding="utf-8")
    monkeypatch.chdir(elsewhere)
    assert main(["train", str(tmp_path / "job.yaml")]) == 0
    assert capsys.readouterr().err == ""


def test_help_shows_every_command_with_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    for name, command in COMMANDS.items():
        assert re.search(rf"^    {name} +{re.escape(command.brief)}$", out, re.MULTILINE)
        assert f"\n  {command.examples[0]}\n" in out
    files = {path.stem for path in Path(commands.__file__).parent.glob("[!_]*.py")}
    assert set(COMMANDS) == files
    assert "automicro config --template > job.yaml" in out
    assert "  130  interrupted with Ctrl-C" in out
    assert err == ""


def test_command_help_shows_its_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, command in COMMANDS.items():
        assert main([name, "--help"]) == 0
        out = capsys.readouterr().out
        for example in command.examples:
            assert f"automicro {name}" in example
            assert f"\n  {example}\n" in out


def test_debug_shows_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "train", "job.yaml", "model={call: cli_job.bug}"]) == 2
    before = capsys.readouterr().err
    assert main(["train", "--debug", "job.yaml", "model={call: cli_job.bug}"]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-2:] == before.splitlines()[-2:]
    assert "Traceback (most recent call last)" in err
    assert "cli_job.py" in err
    assert err.splitlines()[-2] == "  while making model (cli_job.bug)"


def test_new_command_needs_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "count.py").write_text(NEW_COMMAND, encoding="utf-8")
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path / "more")])
    found = commands.find_commands()
    monkeypatch.delitem(sys.modules, "automicro.cli.commands.count")
    assert list(found) == [*commands.COMMANDS, "count"]
    assert found["count"].run(argparse.Namespace()) == 3


@pytest.mark.parametrize("remedy", ["microbatch_size=None", "batchnorm='disable'"])
def test_suggested_remedies_can_be_copied(remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    norm = "model={call: cli_job.with_batchnorm}"
    arguments = ["train", "job.yaml", norm, "batchnorm=error", "microbatch_size=4"]
    assert main(arguments) == 1
    assert remedy in capsys.readouterr().err
    assert main([*arguments, *shlex.split(remedy)]) == 0


def test_interruption_message_names_position_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loss = "loss_fn={call: cli_job.interrupting_loss}"
    assert main(["train", "job.yaml", loss, "probe=false", "max_duration=3ep"]) == 130
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("automicro: interrupted in training, epoch 2, batch 1 of the epoch")
    assert sum("interrupted" in line for line in err) == 1


def test_python_m_automicro_runs_same_command() -> None:
    command = [sys.executable, "-m", "automicro", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == f"automicro {automicro.__version__}\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_installed_command_trains_digits_and_reports_ooms() -> None:
    root = Path(__file__).resolve().parent.parent
    command = [str(Path(sys.executable).parent / "automicro"), "train", "configs/digits.yaml"]
    # On a busy machine, threads that wait for each other take several times as long.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    survived, sizes = done.stdout.splitlines()[-2:]
    assert survived.endswith(" 4 (3 in train, 1 in eval)")
    assert sizes.startswith("final microbatch size ")


DIGITS = str(Path(__file__).resolve().parent.parent / "configs" / "digits.yaml")


def test_verify_reports_whether_splitting_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["train_dataloader.args.batch_size=9", "model.args.channels=8"]
    assert main(["verify", DIGITS, *small]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("exact: splitting does not change the gradient")
    assert main(["verify", DIGITS, *small, "loss_average=none"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("exact with loss_average=")


def test_verify_of_one_row_is_inconclusive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", DIGITS, "train_dataloader.args.batch_size=1"]) == 3
    assert "cannot be verified" in capsys.readouterr().out


@pytest.mark.sweep
def test_plan_reports_largest_fitting_microbatch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from automicro.demo import digits

    make = digits.loader

    @functools.wraps(make)
    def printing_loader(*arguments: Any, **options: Any) -> Any:
        print("reading the digits")
        return make(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(digits, "loader", printing_loader)
        assert main(["plan", DIGITS, "--memory", "4MiB", "--json"]) == 0
    printed = capsys.readouterr()
    assert "reading the digits" in printed.err
    found = json.loads(printed.out)
    assert found["num_rows"] == 512
    assert found["needed_bytes"] <= found["limit_bytes"] == 4 << 20
    assert found["num_microbatches"] * found["microbatch_size"] >= found["num_rows"]
    assert main(["plan", DIGITS, "--memory", "256KiB"]) == 1
    assert "CNN does not fit: not even one row fits" in capsys.readouterr().out
    assert main(["plan", "--device", "help"]) == 0
    assert "a100-80gb" in capsys.readouterr().out
    assert main(["plan", DIGITS, "--device", "a1"]) == 2
    assert "is not known: give one of t4" in capsys.readouterr().err
    assert main(["plan", DIGITS, "--memory", "5parsecs"]) == 2
    assert "cannot read '5parsecs' as an amount of memory: write a" in capsys.readouterr().err
    assert main(["plan", DIGITS, "--rows", "0"]) == 2
    assert main(["plan", DIGITS, "--memory", "4MiB", "batchnorm=exact"]) == 0
    assert "batchnorm='exact', a batch needs different memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--max-steps=0", "--max-steps: 0 is below 1"),
        ("--max-rows=-3", "--max-rows: -3 is below 1"),
    ],
)
def test_explore_refuses_invalid_limits(
    option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explore", DIGITS, option]) == 2
    assert words in capsys.readouterr().err
