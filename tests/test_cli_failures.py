"""Complete error messages for mistakes in the user's code, data and config."""

import re
import sys
import warnings
from pathlib import Path

import pytest

from automicro.cli import main
from automicro.errors import Stopped, facts_of, remember
from tests.cli_jobs import enter_folder_with_job

MODULE = """\
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(5, 2)

    def forward(self, x):
        return self.head(x)


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index > 13:
            raise ValueError(f"row {index} is broken")
        return torch.zeros(1024), 0


def broken(batch_size):
    return DataLoader(Rows(), batch_size=batch_size)


def rows():
    return TensorDataset(torch.zeros(24, 1024), torch.zeros(24, dtype=torch.long))


def none():
    return None


def count_tokens(batch):
    return batch[0].numel()


def func(x):
    return x


def high(batch_size):
    data = TensorDataset(torch.zeros(24, 1024), torch.arange(24))
    return DataLoader(data, batch_size=batch_size)


def careless():
    return {}["inputs"]
"""
ROOT = Path(__file__).resolve().parent.parent
HINT = "(--debug shows the traceback)"
FIRST_BATCH = "in training, epoch 1, batch 1 of the epoch (0 batches done)"
SHAPES = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (12x1024 and 5x2)"
BROKEN_LOADER = "train_dataloader={call: my_code.broken, args: {batch_size: 12}}"


@pytest.fixture(autouse=True)
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with_job(tmp_path, monkeypatch)
    for name in ("my_code", "slip", "typo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("LEARNING_RATE", "0.1")
    Path("my_code.py").write_text(MODULE, encoding="utf-8")
    Path("slip.py").write_text("import torch\n\n\nnumber = undefined\n", encoding="utf-8")
    Path("typo.py").write_text("def make(:\n    pass\n", encoding="utf-8")


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines on stderr, without line numbers in torch."""
    err = capsys.readouterr().err
    return re.sub(r"(at torch[\w/]*\.py):\d+", r"\1:…", err).splitlines()


FAILED = {
    ("train", "model={call: my_code.Net}"): (
        f"the run failed: {SHAPES}",
        FIRST_BATCH,
        "at my_code.py:11, in forward: return self.head(x)",
    ),
    ("verify", "model={call: my_code.Net}"): (
        f"the run failed: {SHAPES}",
        "while verifying, on the first batch of train_dataloader",
        "at my_code.py:11, in forward: return self.head(x)",
    ),
    ("eval", "model={call: my_code.Net}", "eval_dataloader=${train_dataloader}"): (
        f"the run failed: {SHAPES}",
        "in evaluation, batch 1",
        "at my_code.py:11, in forward: return self.head(x)",
    ),
    (
        "train",
        "train_dataloader={call: my_code.high, args: {batch_size: 12}}",
        "memory_limit=1MiB",
    ): (
        "the run failed: IndexError: Target 2 is out of bounds.",
        FIRST_BATCH,
    ),
    ("train", BROKEN_LOADER): (
        "the run failed: ValueError: row 14 is broken",
        "in training, epoch 1, batch 2 of the epoch (1 batch done)",
        "at my_code.py:20, in __getitem__",
    ),
    (
        "train",
        "scheduler={call: torch.optim.lr_scheduler.OneCycleLR, args: {max_lr: 1, total_steps: 2}}",
        "scheduler_interval=batch",
        "max_duration=1000sp",
    ): (
        "the run failed: ValueError: Tried to step 3 times. The specified number of total steps "
        "is 2",
        "in training, epoch 2, batch 2 of the epoch (3 batches done)",
    ),
    ("train", "max_duration=10000tok"): (
        "max_duration='10000tok' counts tokens, but their number in a batch of type "
        "list is unknown. Pass features=[CountData(tokens=…)] with a callable from a batch to its "
        "number of tokens, such as lambda batch: batch['input_ids'].numel(). In a config: "
        "count_tokens: {call: pkgutil.resolve_name, args: {name: my_data.count_tokens}}",
        FIRST_BATCH,
    ),
}


@pytest.mark.parametrize(("arguments", "lines"), FAILED.items(), ids=str)
def test_failed_run_reports_error_position_and_code_line(
    arguments: tuple[str, ...], lines: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *overrides = arguments
    quiet = ["progress=false", "probe=false"]
    assert main([command, "job.yaml", *quiet, *overrides]) == 1
    first, *rest = lines
    warned = "automicro: the model has its initial weights"
    err = [line for line in said(capsys) if not line.startswith(warned)]
    assert err == [f"automicro: {first}", *(f"  {line}" for line in rest), HINT]


MADE = {
    "model={call: slip.make}": (
        "NameError: name 'undefined' is not defined",
        "while importing model.call (slip.make)",
        "at slip.py:4: number = undefined",
        HINT,
    ),
    "model={call: typo.make}": (
        "SyntaxError: invalid syntax",
        "while importing model.call (typo.make)",
        "at typo.py:1: def make(:",
        HINT,
    ),
    "model={call: my_code.careless}": (
        "KeyError: 'inputs'",
        "while making model (my_code.careless)",
        'at my_code.py:50, in careless: return {}["inputs"]',
        HINT,
    ),
    "optimizer.args.lr=${oc.env:LEARNING_RATE}": (
        "TypeError: '<' not supported between instances of 'str' and 'float'",
        "while making optimizer (torch.optim.SGD)",
        HINT,
    ),
    "count_tokens={call: builtins.len}": (
        "count_tokens: builtins.len cannot be called like this (missing a required argument: "
        "'obj'): it takes no arguments; call has to return the function. To use builtins.len "
        "itself, write count_tokens: {call: pkgutil.resolve_name, args: {name: builtins.len}}",
    ),
    "loss_fn={call: builtins.list}": (
        "loss_fn=[] cannot be called; pass loss_fn=… for batches of (inputs, targets), or "
        "forward=… that takes (model, microbatch) and returns the loss",
    ),
    "train_dataloader={call: my_code.none}": (
        "train_dataloader: my_code.none returned None, which yields no batches: return a "
        "torch.utils.data.DataLoader",
    ),
    "eval_dataloader={new: {data: {call: my_code.rows}, interval: 1ep}}": (
        "eval_dataloader.new.data: my_code.rows returned a dataset, which yields no batches: "
        "return a torch.utils.data.DataLoader",
    ),
}


@pytest.mark.parametrize(("override", "lines"), MADE.items())
def test_construction_error_names_config_location(
    override: str, lines: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "job.yaml", override]) == 2
    first, *rest = lines
    expected = [line if line == HINT else f"  {line}" for line in rest]
    in_part = override.partition("=")[0].count(".") > 0  # the file has the rest of the section
    place = "job.yaml:4 + " * in_part + f"the override {override!r}"
    assert said(capsys) == [f"automicro: {place}: {first}", *expected]


def test_suggested_function_syntax_works(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokens = "{call: pkgutil.resolve_name, args: {name: my_code.count_tokens}}"
    loss = "{call: pkgutil.resolve_name, args: {name: torch.nn.functional.cross_entropy}}"
    arguments = [f"count_tokens={tokens}", f"loss_fn={loss}", "max_duration=20000tok"]
    assert main(["train", "job.yaml", *arguments]) == 0
    assert re.search(r"^tokens +24,576$", capsys.readouterr().out, re.MULTILINE)


def test_warnings_take_one_line_and_repeat_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = warnings.showwarning
    arguments = ["model={call: cli_job.with_batchnorm}", "microbatch_size=4", "progress=false"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        main(["train", "job.yaml", *arguments])
        err = said(capsys)
        main(["train", "job.yaml", "loss_fn.call=torch.nn.MSELoss", "progress=false"])
        of_torch = said(capsys)
    assert len(err) == 1
    assert err[0].startswith("automicro: warning: ")
    broadcast = [line for line in of_torch if "Using a target size" in line]
    assert len(broadcast) == 1
    assert re.search(r"^automicro: warning: UserWarning: .* \(torch/.*\.py:\d+\)$", broadcast[0])
    assert warnings.showwarning is before


def test_error_facts_are_kept_for_frozen_exceptions() -> None:
    class FrozenError(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError("frozen")

    error = FrozenError()
    remember(error, stopped=Stopped(by="Ctrl-C", where="after batch 3"))
    remember(error, is_told=True)
    assert facts_of(error).is_told
    assert str(facts_of(error).stopped) == "Ctrl-C: stopped after batch 3, without a checkpoint"
    with pytest.raises(TypeError):
        remember(error, is_tolled=True)


@pytest.mark.parametrize("command", ["train", "config"])
def test_help_works_as_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    wanted = capsys.readouterr().out
    assert main(["help", command]) == 0
    assert capsys.readouterr().out == wanted
    assert main(["help"]) == 0
    assert capsys.readouterr().out.startswith("usage: automicro [-h]")
