"""Objects are shown in one line, as notebook tables, and as a progress bar in a terminal."""

import re
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


def test_objects_have_one_line_repr() -> None:
    loss_fn = nn.CrossEntropyLoss()
    options: Any = {"loss_fn": loss_fn, "optimizer": torch.optim.SGD, "progress": False}
    run = Trainer(nn.Linear(8, 2), [BATCH] * 3, max_duration="2ep", device="cpu", **options)
    step = Microbatcher(nn.Linear(8, 2), loss_fn=loss_fn)
    report = automicro.verify(nn.Linear(8, 2), BATCH, loss_fn=loss_fn)
    for subject, shown in (
        (
            run,
            r"Trainer\(Linear, 18 parameters, max_duration='2ep', device='cpu', 6 batches done\)",
        ),
        (step, r"Microbatcher\(Linear, .*=Halving\(initial=None\), last 32 rows, device='cpu'\)"),
        (step.backward(BATCH), r"StepResult\(loss=0\.\d+, 32 samples, 1 × 32 rows\)"),
        (
            step.evaluate(BATCH, return_outputs=True),
            r"EvalResult\(loss=0\.\d+, 32 samples, 1 × 32 rows, with outputs\)",
        ),
        (
            run.fit(),
            r"FitSummary\(6 steps, 192 samples, train_loss=0\.\d+, 0 OOMs survived, "
            r"microbatches 1 × 32 of 32\)",
        ),
        (report, r"VerifyReport\('exact', 32 rows, 'exact: .*"),
        (EarlyStopping("eval/loss", patience=5), r"EarlyStopping\(patience=5\)"),
        (MemoryMonitor(), r"MemoryMonitor\(\)"),
        (Halving(multiple_of=4), r"Halving\(initial=None, multiple_of=4\)"),
        (Fixed(4), r"Fixed\(4\)"),
        (Callback(), r"Callback\(\)"),
    ):
        assert re.fullmatch(shown, repr(subject)), repr(subject)


def test_report_has_html_for_notebooks() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    report = automicro.verify(model, BATCH, loss_fn=nn.CrossEntropyLoss())
    first, rest = ElementTree.fromstring(f"<page>{report._repr_html_()}</page>").itertext()
    assert first == report.verdict
    assert rest.strip() in str(report)


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
        (5, "25%"),
    ],
)
def test_status_line_is_trimmed_to_window_width(columns: int, shown: str) -> None:
    assert STATUS.in_window(columns).plain == shown
    assert len(shown) < columns


def test_time_left_needs_two_updates_of_one_run() -> None:
    now = [0.0]
    left = TimeLeft(clock=lambda: now[0])
    assert left.at(None) is None
    assert left.at(0.1) is None  # earlier time may include the search for a size
    now[0] = 10.0
    assert left.at(0.2) == pytest.approx(80.0)
    assert left.at(0.05) is None  # a new run
    assert left.at(1.0) == 0.0
