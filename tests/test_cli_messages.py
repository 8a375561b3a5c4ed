"""Complete error messages for wrong command lines and wrong configs."""

import io
import os
import sys
from pathlib import Path

import pytest
import torch

from automicro.cli import main
from automicro.cli.config.build import SAVE
from automicro.cli.config.sources import name_override
from automicro.cli.output import complain
from tests.cli_jobs import enter_folder_with_job

ALL = "train, eval, plan, explore, verify, config, doctor, replay, cache, complete"
DEBUG = "(--debug shows the traceback)"


@pytest.fixture(autouse=True)
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with_job(tmp_path, monkeypatch)


WRONG_COMMANDS = {
    (): f"no command was given: give one of {ALL}, such as automicro train job.yaml",
    ("trian", "a"): f"there is no command 'trian' (did you mean 'train'?): give one of {ALL}",
    ("job.yaml",): f"there is no command 'job.yaml': give one of {ALL}",
    ("--quiet",): (
        "unknown option '--quiet': use --version, --debug, or key=value for a key of the config"
    ),
    ("train", "job.yaml", "--debgu"): (
        "unknown option '--debgu' (did you mean '--debug'?): use --json, --debug, or "
        "key=value for a key of the config"
    ),
    ("train", "job.yaml", "--max-epochs=3"): (
        "unknown option '--max-epochs=3' (did you mean 'max_duration=3ep'?): use --json, "
        "--debug, or key=value for a key of the config"
    ),
    ("train", "job.yaml", "--seed", "1"): (
        "unknown option '--seed' (did you mean 'seed=1'?): use --json, --debug, or key=value "
        "for a key of the config"
    ),
    ("verify", "job.yaml", "--json"): (
        "unknown option '--json': use --debug, or key=value for a key of the config"
    ),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG_COMMANDS.items(), ids=str)
def test_wrong_command_line_prints_usage_and_one_error_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    usage, line = err.rstrip().rsplit("\n", 1)
    assert usage.startswith("usage: automicro")
    who, _, said = line.partition(": error: ")
    assert who in ("automicro", f"automicro {' '.join(arguments[:1])}")
    assert said == message
    assert out == ""


def needs_config(command: str) -> str:
    return (
        f"{command} needs a CONFIG: name a YAML file, as in automicro {command} job.yaml; "
        "automicro config --template prints one to start with"
    )


WRONG_USES: dict[tuple[str, ...], str] = {
    ("train",): needs_config("train"),
    ("eval", "weights=weights.pt"): needs_config("eval"),
    ("train", "job.yaml", "seed", "1"): (
        "there is no file 'seed': to set the key, write seed=VALUE"
    ),
    ("train", "job2.yaml"): "there is no file 'job2.yaml': did you mean 'job.yaml'?",
    ("config", "--keys", "optimzer"): (
        "no key matches 'optimzer' (did you mean 'optimizer'?): give part of a name, a pattern "
        "such as '*_size', or none for all keys"
    ),
    ("eval", "job.yaml"): (
        "job.yaml: eval_dataloader is missing: write at the top level eval_dataloader: {call: "
        "my_package.make_loader, args: {batch_size: 512}}"
    ),
    ("train", "job.yaml", "global_batch_size=8"): (
        "job.yaml:2 + {override}: global_batch_size=8 needs batches of 8 rows on each device, "
        "but train_dataloader loads 12. Write batch_size: ${global_batch_size} among its args, or "
        "leave global_batch_size out"
    ),
    ("train", "job.yaml", "optimizer.args.lr=-1"): (
        "job.yaml:4 + {override}: ValueError: Invalid learning rate: -1\n"
        "  while making optimizer (torch.optim.SGD)"
    ),
    (
        "train",
        "job.yaml",
        "loss_fn={call: cli_job.loss_of_kind, args: {kind: abc, weight: {call: torch.tensor, args: "
        "{data: 1}}}}",
    ): (
        "{override}: ValueError: no such kind\n"
        "  while making loss_fn (cli_job.loss_of_kind)\n"
        "  at cli_job.py:23, in loss_of_kind"
    ),
    ("train", "job.yaml", "memory_limit=120%"): (
        "{override}: memory_limit: '120%' is not a share of a device: give one such as '80%' or 0.8"
    ),
    ("train", "job.yaml", "model={call: cli_job.nan_loss}", "weights=good.pt"): (
        "{override}: model is of type function, not a torch.nn.Module; pass the module itself"
    ),
    **{
        ("train", "job.yaml", f"weights={name}.pt"): (
            f"{{override}}: weights='{name}.pt' is damaged, or holds objects that could run code "
            f"when they are loaded: {SAVE}"
        )
        for name in ("text", "code")
    },
    **{
        ("train", "job.yaml", f"weights={name}.pt"): (
            f"{{override}}: weights='{name}.pt' does not fit the Linear ({why}): give weights of "
            f"the same model; {SAVE}"
        )
        for name, why in {
            "list": "Expected state_dict to be dict-like, got <class 'list'>.",
            "checkpoint": 'Missing key(s) in state_dict: "weight", "bias". Unexpected key(s) in '
            'state_dict: "model", "epoch".',
            "shape": "size mismatch for weight: copying a param with shape torch.Size([2, 8]) from "
            "checkpoint, the shape in current model is torch.Size([2, 1024]).",
        }.items()
    },
    ("train", "job.yaml", "run_dir=job.yaml"): (
        "{override}: run_dir='job.yaml' cannot be written ([Errno 17] File exists: 'job.yaml'): "
        "give a folder that can"
    ),
}


@pytest.fixture
def weight_files() -> None:
    linear = torch.nn.Linear(1024, 2).state_dict()
    torch.save(linear, "good.pt")
    Path("text.pt").write_text("weights", encoding="utf-8")
    torch.save({"weight": os.system}, "code.pt")
    torch.save([1, 2], "list.pt")
    torch.save({"model": linear, "epoch": 3}, "checkpoint.pt")
    torch.save(torch.nn.Linear(8, 2).state_dict(), "shape.pt")


@pytest.mark.usefixtures("weight_files")
@pytest.mark.parametrize(("arguments", "message"), WRONG_USES.items(), ids=str)
def test_wrong_use_gives_exit_code_2_and_message(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    hint = f"{DEBUG}\n" if "\n  while " in message else ""
    overrides = [name_override(each) for each in arguments if "=" in each]
    told = message.replace("{override}", overrides[0] if overrides else "")
    assert err == f"automicro: {told}\n{hint}"
    assert out == ""


@pytest.mark.parametrize(
    ("line", "message"),
    {
        "model: {call: torch.nn.Linear, args: {in_featurs: 8}}": (
            "model: torch.nn.Linear takes no argument 'in_featurs'"
        ),
        "max_time: ${sede}": "max_time=${sede}: Interpolation key 'sede' not found",
        "loss_fn: {call: nn.CrossEntropyLoss}": "loss_fn.call='nn.CrossEntropyLoss': there is no",
        "metrics: {accuracy: {cal: a.B}}": "metrics.accuracy has an unknown key 'cal'",
        "metrics: {a: {call: torchmetrics.M}}": "metrics.a.call='torchmetrics.M': 'torchmetrics' ",
        "max_durations: 3": "unknown key 'max_durations'",
        "seed: many": "seed='many' (text): expected a whole number or null",
        "precision: bf61": "precision='bf61' is not known",
    }.items(),
)
def test_config_error_names_its_source(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("also.yaml").write_text(f"# more\n{line}\n", encoding="utf-8")
    key, value = line.split(": ", 1)
    for inputs, place in (
        (["also.yaml"], "also.yaml:2"),
        ([f"{key}={value}"], f"the override '{key}={value}'"),
    ):
        assert main(["config", "job.yaml", *inputs]) == 2
        assert capsys.readouterr().err.startswith(f"automicro: {place}: {message}")
    # A later override can correct an error.
    assert main(["config", "job.yaml", "seed=many", "seed=1"]) == 0


def test_piped_error_follows_earlier_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(pipe, write_through=name == "stderr"))
    print("the config")
    complain("wrong")
    assert pipe.getvalue() == b"the config\nautomicro: wrong\n"


def test_several_processes_without_parallel_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "job.yaml"]) == 2
    error = capsys.readouterr().err
    assert "there are 2 processes (this is rank 0), but the model is not wrapped" in error
    assert "parallel='ddp'" in error


def test_single_torchrun_process_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["config", "job.yaml"]) == 0
