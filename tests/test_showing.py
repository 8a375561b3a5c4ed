"""How things show themselves: in one line each, as tables of notebooks, as a bar in a terminal."""

import os
import pty
import re
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import automicro
from automicro import Callback, Fixed, Halving, Microbatcher, Trainer
from automicro.callbacks import EarlyStopping, MemoryMonitor
from automicro.trainer.progress import StatusLine, TimeLeft

STATUS = StatusLine(
    where="epoch 3/12, batch 1/3",
    words=["loss 0.5000", "microbatches 5 × 103", "64 samples/s", "peak memory 7.62 MiB", "lr 0.1"],
    share=0.25,
    seconds_left=75.0,
)
BATCH = torch.randn(32, 8), torch.randint(2, (32,))


def trainer(**options: Any) -> Trainer:
    return Trainer(
        nn.Linear(8, 2),
        [BATCH] * 3,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        device="cpu",
        **{"progress": False, "max_duration": "2ep", "seed": 0, **options},
    )


# In one line


def test_each_thing_shows_itself_in_one_line() -> None:
    run = trainer()
    microbatcher = Microbatcher(nn.Linear(8, 2), loss_fn=nn.CrossEntropyLoss())
    assert repr(run) == (
        "Trainer(Linear, 18 parameters, max_duration='2ep', device='cpu', 0 batches done)"
    )
    assert repr(microbatcher) == (
        "Microbatcher(Linear, microbatch_size=Halving(initial=None), device='cpu')"
    )
    step = microbatcher.backward(BATCH)
    assert re.fullmatch(r"StepResult\(loss=0\.\d+, 32 samples, 1 × 32 rows\)", repr(step))
    evaluated = microbatcher.evaluate(BATCH, return_outputs=True)
    assert re.fullmatch(
        r"EvalResult\(loss=0\.\d+, 32 samples, 1 × 32 rows, with outputs\)", repr(evaluated)
    )
    summary = run.fit()
    assert re.fullmatch(
        r"FitSummary\(6 steps, 192 samples, train_loss=0\.\d+, 0 OOMs survived, "
        r"microbatches 1 × 32 of 32\)",
        repr(summary),
    )
    report = automicro.verify(nn.Linear(8, 2), BATCH, loss_fn=nn.CrossEntropyLoss())
    assert repr(report).startswith("VerifyReport('exact', 32 rows, 'exact: ")
    everything = [run, microbatcher, step, evaluated, summary, report]
    assert not any("\n" in repr(each) for each in everything)


@pytest.mark.parametrize(
    ("subject", "shown"),
    [
        (EarlyStopping("eval/loss", patience=5), "EarlyStopping("),
        (MemoryMonitor(), "MemoryMonitor()"),
        (Halving(multiple_of=4), "Halving(initial=None, multiple_of=4)"),
        (Fixed(4), "Fixed(4)"),
        (Callback(), "Callback()"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_callbacks_and_policies_show_what_they_were_given(subject: Any, shown: str) -> None:
    assert repr(subject).startswith(shown)
    assert repr(subject).endswith(")")
    assert "\n" not in repr(subject)
    assert " at 0x" not in repr(subject)


def test_a_report_is_text_in_a_notebook() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    report = automicro.verify(model, BATCH, loss_fn=nn.CrossEntropyLoss())
    first, rest = ElementTree.fromstring(f"<page>{report._repr_html_()}</page>").itertext()
    assert first == report.verdict
    assert rest.strip() in str(report)


# The bar


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (
            110,
            "━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌  25% · 0:01:15 left · loss 0.5000 · "
            "microbatches 5 × 103 · 64 samples/s",
        ),
        (80, "━━━╌╌╌╌╌╌╌╌╌  25% · 0:01:15 left · loss 0.5000 · microbatches 5 × 103"),
        (50, "━╌╌╌╌╌  25% · 0:01:15 left · loss 0.5000"),
        (36, "25% · 0:01:15 left · loss 0.5000"),
        (20, "25% · 0:01:15 left"),
        (5, "25%"),
    ],
)
def test_a_window_shows_the_most_important_and_is_trimmed_from_the_right(
    columns: int, shown: str
) -> None:
    assert STATUS.in_window(columns).plain == shown
    assert len(shown) < columns


def test_a_terminal_that_has_no_other_letters_gets_those_that_it_has() -> None:
    assert STATUS.in_window(50, ascii_only=True).plain == "#-----  25% - 0:01:15 left - loss 0.5000"


def test_what_is_left_is_told_from_the_second_time_on_and_by_the_latest_start() -> None:
    now = [0.0]
    left = TimeLeft(clock=lambda: now[0])
    assert left.at(None) is None
    assert left.at(0.1) is None  # what came before was finding a size, say
    now[0] = 10.0
    assert left.at(0.2) == pytest.approx(80.0)
    assert left.at(0.05) is None  # another run
    assert left.at(1.0) == 0.0


# The command

JOB = """\
model: {call: torch.nn.Linear, args: {in_features: 8, out_features: 2}}
train_dataloader: {call: make.batches}
loss_fn: {call: torch.nn.CrossEntropyLoss}
optimizer: {call: torch.optim.SGD, args: {lr: 0.1}}
max_duration: 2ba
"""
MAKE = """\
import torch
def batches():
    return [(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))] * 2
"""


@pytest.mark.sweep
@pytest.mark.parametrize(("terminal", "is_erased"), [("xterm", True), ("dumb", False)])
def test_the_command_shows_what_takes_long(tmp_path: Any, terminal: str, is_erased: bool) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "make.py").write_text(MAKE)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": terminal, "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "automicro", "train", "job.yaml"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            more = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not more:
            break
        shown += more
    os.close(ours)
    assert process.wait(timeout=60) == 0
    text = shown.decode()
    # A terminal that cannot write over a line is left without what is only true meanwhile.
    assert ("\r\x1b[2K" in text) == is_erased
    assert text.index("training on") < text.index("OOMs survived")
