"""The command line's output, streams, exit codes, imports and reports of several processes."""

import argparse
import io
import json
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import automicro as package
from automicro.checkpoints.store import CheckpointConfig, CheckpointStore
from automicro.cli import commands
from automicro.cli.commands import COMMANDS
from automicro.cli.commands.complete import SHELLS
from automicro.cli.errors import show_failure
from automicro.cli.output import complain
from automicro.cli.run_dir import telling_how_to_go_on
from automicro.errors import (
    ConfigError,
    DesyncError,
    PeerFailedError,
    PeerLostError,
)
from tests.cli.conftest import Command

NEW_COMMAND = """\
'''Count.'''
EXAMPLES = ["automicro count"]


def run(arguments):
    return 3
"""


def test_train_first_prints_set_config_keys(automicro: Command) -> None:
    out, _ = automicro("train", "job.yaml", "max_duration=1ba", "optimizer.args.lr=0.5")
    shown = out.partition("training on")[0].splitlines()
    assert "    lr: 0.5" in shown
    assert "max_duration: 1ba" in shown
    assert not any(line.startswith("seed") for line in shown)


def test_json_summary_is_only_output_on_stdout(automicro: Command) -> None:
    talking = "loss_fn={call: cli_job.talking_loss}"
    out, err = automicro("train", "job.yaml", "--json", "max_duration=2ba", talking)
    assert out.count("\n") == 1
    summary = json.loads(out)
    assert (summary["steps"], summary["microbatch_size"]) == (2, 12)
    assert "a word from the user's code" in err
    assert "training on the CPU" in err


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
    assert (done.stdout, done.stderr) == (first, "")
    assert done.returncode in (0, 141)  # 0 if everything was written before the pipe closed


def test_colors_follow_environment_variables(
    automicro: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ["train", "job.yaml", "sede=1"]
    assert "\x1b" not in automicro(*wrong, code=2).err
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1;31mautomicro:" in automicro(*wrong, code=2).err
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;31m" not in automicro(*wrong, code=2).err


def test_modules_beside_config_take_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, automicro: Command
) -> None:
    folder = tmp_path / "lr=0.1"  # a path may contain an equals sign
    folder.mkdir()
    for name in ("job.yaml", "cli_job.py"):
        Path(name).rename(folder / name)
    Path("cli_job.py").write_text("raise RuntimeError('the wrong one')", encoding="utf-8")
    assert automicro("train", "lr=0.1/job.yaml").err == ""


def test_help_shows_every_command_with_its_examples(automicro: Command) -> None:
    out, err = automicro("--help")
    assert err == ""
    files = {path.stem for path in Path(commands.__file__).parent.glob("[!_]*.py")}
    assert set(COMMANDS) == files
    for name, command in COMMANDS.items():
        assert re.search(rf"^    {name} +{re.escape(command.brief)}$", out, re.MULTILINE)
        assert f"\n  {command.examples[0]}\n" in out
        own = automicro(name, "--help").out
        for example in command.examples:
            assert f"automicro {name}" in example
            assert f"\n  {example}\n" in own
        assert automicro("help", name).out == own
    assert "automicro config --template > job.yaml" in out
    assert "  130  interrupted with Ctrl-C" in out
    assert automicro("help").out.startswith("usage: automicro [-h]")


def test_debug_shows_traceback(automicro: Command) -> None:
    bug = ["job.yaml", "model={call: cli_job.bug}"]
    _, before = automicro("--debug", "train", *bug, code=2)
    _, err = automicro("train", "--debug", *bug, code=2)
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
def test_suggested_remedies_can_be_copied(remedy: str, automicro: Command) -> None:
    norm = "model={call: cli_job.with_batchnorm}"
    arguments = ["train", "job.yaml", norm, "batchnorm=error", "microbatch_size=4"]
    assert remedy in automicro(*arguments, code=1).err
    automicro(*arguments, *shlex.split(remedy))


def test_interruption_message_names_position_in_one_line(automicro: Command) -> None:
    loss = "loss_fn={call: cli_job.interrupting_loss}"
    _, err = automicro("train", "job.yaml", loss, "probe=false", "max_duration=3ep", code=130)
    last = err.splitlines()[-1]
    assert last.startswith("automicro: interrupted in training, epoch 2, batch 1 of the epoch")
    assert err.count("interrupted") == 1


def test_warnings_take_one_line_and_repeat_once(automicro: Command) -> None:
    before = warnings.showwarning
    norm = ["model={call: cli_job.with_batchnorm}", "microbatch_size=4", "progress=false"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        _, err = automicro("train", "job.yaml", *norm)
        mse = "loss_fn.call=torch.nn.MSELoss"
        of_torch = automicro("train", "job.yaml", mse, "progress=false", code=1).err
    assert err.count("\n") == 1
    assert err.startswith("automicro: warning: ")
    broadcast = [line for line in of_torch.splitlines() if "Using a target size" in line]
    assert len(broadcast) == 1
    assert re.search(r"^automicro: warning: UserWarning: .* \(torch/.*\.py:\d+\)$", broadcast[0])
    assert warnings.showwarning is before


def test_suggested_function_syntax_works(automicro: Command) -> None:
    Path("my_code.py").write_text("def count_tokens(batch):\n    return batch[0].numel()\n")
    tokens = "{call: pkgutil.resolve_name, args: {name: my_code.count_tokens}}"
    loss = "{call: pkgutil.resolve_name, args: {name: torch.nn.functional.cross_entropy}}"
    arguments = [f"count_tokens={tokens}", f"loss_fn={loss}", "max_duration=20000tok"]
    assert re.search(r"^tokens +24,576$", automicro("train", "job.yaml", *arguments).out, re.M)


def test_piped_error_follows_earlier_output(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(pipe, write_through=name == "stderr"))
    print("the config")
    complain("wrong")
    assert pipe.getvalue() == b"the config\nautomicro: wrong\n"


# Completion


def test_each_shell_script_contains_every_command(automicro: Command) -> None:
    for shell in SHELLS:
        script = automicro("complete", shell).out
        assert [name for name in COMMANDS if name not in script] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [("ev", "eval"), ("train --js", "--json"), ("train jo", "job.yaml"), ("complete fi", "fish")],
)
def test_bash_completes_words(words: str, expected: str, automicro: Command) -> None:
    script = f"""{automicro("complete", "bash").out}
COMP_WORDS=(automicro {words})
COMP_CWORD={len(words.split())}
_shtab_automicro 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    command = ["bash", "--norc", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected}\n"


def test_missing_shtab_error_names_install_command(
    monkeypatch: pytest.MonkeyPatch, automicro: Command
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    err = automicro("complete", "bash", code=2).err
    assert 'not installed: pip install "automicro[completion]"' in err


# Several processes


def test_several_processes_need_parallel(
    automicro: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    automicro("config", "job.yaml")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    err = automicro("train", "job.yaml", code=2).err
    assert "there are 2 processes (this is rank 0), but the model is not wrapped" in err
    assert "parallel='ddp'" in err


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Act as rank 0 of two processes under torchrun."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    return monkeypatch


def said(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    show_failure(error, debug=False)
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", [ConfigError, DesyncError])
def test_first_rank_reports_common_error_in_full(
    kind: type[Exception], torchrun: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "no model; " + "give one " * 60
    assert text in said(kind(text), capsys)
    torchrun.setenv("RANK", "1")
    line = said(kind(text), capsys)
    assert line.startswith("automicro: rank 1 of 2: no model; give one")
    assert len(line) < 400


@pytest.mark.parametrize(
    ("is_saved", "end"), [(True, "resumes from there"), (False, "starts over")]
)
def test_lost_rank_error_explains_how_to_resume(
    is_saved: bool, end: str, torchrun: object, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CheckpointConfig(folder="saved")
    if is_saved:
        CheckpointStore("saved").save({}, step=1)
    with (
        pytest.raises(PeerLostError) as caught,
        telling_how_to_go_on(config, run_dir=None, inputs=["job.yaml"]),
    ):
        raise PeerLostError("rank 1 is gone. Look into its log")
    text = said(caught.value, capsys)
    assert text == f"automicro: rank 1 is gone. Look into its log; the same command {end}\n"


def test_torchrun_error_file_contains_only_original_error(
    torchrun: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "error.json"
    torchrun.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    peer = PeerFailedError("rank 0 of 2 stops because another rank failed:\nrank 1: x")
    text = "automicro: rank 0 of 2 stops because another rank failed: rank 1: x\n"
    assert said(peer, capsys) == text
    assert not path.exists()  # torchrun would take the consequence for the cause
    said(RuntimeError("a mistake"), capsys)
    message = json.loads(path.read_text(encoding="utf-8"))["message"]
    assert message["message"] == "RuntimeError: a mistake"
    assert message["extraInfo"]["timestamp"].isdecimal()


# Imports: help and mistakes in a command line do not wait for torch.

HEAVY = ("torch", "torchmetrics", "numpy", "omegaconf", "yaml", "transformers", "matplotlib")
LIGHT = (
    *("--help", "--version", "", "trian job.yaml", "train job.yaml --learning-rate=1", "train"),
    *(f"{name} --help" for name in COMMANDS),
    *("train no-such-file.yaml seed=1", "eval no-such-file.yaml", "config no-such-file.yaml"),
    *("verify", "explore", "config --template", "cache", "cache --json", "cache --clear"),
)
# All commands share one process; each reports the heavy modules that it imports.
LIST_IMPORTS = """\
import contextlib, io, json, sys
heavy, commands = json.loads(sys.argv[1])
from automicro.cli import main
found = {}
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(command.split())
    found[command] = [name for name in heavy if sys.modules.pop(name, None)]
print(json.dumps({command: names for command, names in found.items() if names}))
"""


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.sweep
def test_help_errors_and_cache_import_nothing_heavy(own_cache: Path) -> None:
    assert run_python(LIST_IMPORTS, json.dumps([HEAVY, LIGHT])) == "{}\n"


@pytest.mark.sweep
def test_errors_import_torch_only_for_sample_too_large() -> None:
    code = """\
import sys, automicro.errors as e
assert e.ConfigError and 'torch' not in sys.modules
import pickle, torch, automicro
assert automicro.SampleTooLargeError is e.SampleTooLargeError
assert issubclass(e.SampleTooLargeError, (automicro.AutomicroError, torch.OutOfMemoryError))
print(repr(pickle.loads(pickle.dumps(e.SampleTooLargeError("one row")))))
automicro.Trainer, automicro.Microbatcher, automicro.verify
heavy = {"torch.distributed.fsdp", "torch.distributed.tensor", "torchmetrics", "matplotlib"}
assert not heavy & {*sys.modules}
"""
    assert run_python(code) == "SampleTooLargeError('one row')\n"
    with pytest.raises(AttributeError, match=r"'automicro\.errors' has no attribute 'torch_'"):
        getattr(package.errors, "torch_")  # noqa: B009
