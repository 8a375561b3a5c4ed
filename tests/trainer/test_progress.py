"""Progress of a run: a live line in a terminal, plain lines elsewhere, and no output if off."""

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from automicro import FitSummary, Trainer
from automicro.events.run import GlobalBatch, LoopState
from automicro.trainer.progress import PLAIN_SECONDS, Progress, RecentSpeed


def make_console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=400, color_system=None), file


def make_run(
    loader: Any = None, *, progress: bool = True, limit: str | None = "256KiB", **options: Any
) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 3))
    batches = [(torch.randn(rows, 12), torch.randint(3, (rows,))) for rows in (256, 44)]
    whole = [(torch.randn(900, 12), torch.randint(3, (900,)))]
    settings: dict[str, Any] = {
        "eval_dataloader": whole,
        "metrics": {"accuracy": MulticlassAccuracy(3, average="micro")},
        "max_duration": "2ep",
        "optimizer": torch.optim.AdamW,
    }
    return Trainer(
        model,
        batches if loader is None else loader,
        loss_fn=nn.CrossEntropyLoss(),
        memory_limit=limit,
        device="cpu",
        progress=progress,
        **{**settings, **options},
    )


def test_run_reports_progress_in_plain_lines(capfd: pytest.CaptureFixture[str]) -> None:
    summary = make_run().fit()
    shown = capfd.readouterr()
    assert shown.err == ""  # no duplicate output from logging
    lines = shown.out.splitlines()
    assert lines[0] == (
        "training on a simulated 256.00 KiB device on the CPU · precision fp32 · microbatch size "
        "auto · 5,187 parameters · max_duration 2ep · 2 batches per epoch"
    )
    assert [line for line in lines if ": " in line and "rows (" in line] == [
        "train: out of memory at microbatch size 256: continued with 128 rows (2 × 128 of 256; 1 "
        "attempt rolled back)",
        "eval: out of memory at microbatch size 900: continued with 225 rows (4 × 225 of 900; 2 "
        "attempts rolled back)",
        "eval: more fits, microbatch size 225 → 300 rows (3 × 300 of 900)",
    ]
    evaluations = [line for line in lines if line.startswith("eval after")]
    assert len(evaluations) == 2
    assert evaluations[0].startswith("eval after epoch 1/2, batch 2: loss 1.")
    assert "accuracy 0." in evaluations[0]
    assert evaluations[0].endswith("900 samples · microbatches 4 × 225 of 900")
    status = next(line for line in lines if line.startswith("epoch 1/2, batch 1/2 · loss 1."))
    assert " · lr 0.001 · " in status
    assert shown.out.endswith("\n\n" + str(summary) + "\n")


def test_summary_aligns_its_values() -> None:
    summary = FitSummary(
        seconds=12.34,
        samples_per_second=1234.5,
        peak_memory_bytes=2**20,
        epochs=2,
        steps=6,
        skipped_steps=1,
        samples=3000,
        tokens=98765,
        tokens_per_second=8000.4,
        global_batch=GlobalBatch(
            rows_per_device=250, num_devices=2, accumulation=1.5, most_rows=1000
        ),
        train_ooms=0,
        eval_ooms=0,
        microbatch_size=1,
        num_microbatches=1,
        batch_size=1,
        eval_microbatch_size=None,
        train_loss=0.25,
        train_metrics={"accuracy": 0.5},
    )
    assert str(summary).splitlines() == [
        "time                         12.3 s",
        "samples per second           1,234",
        "tokens per second            8,000",
        "peak memory (of rank 0)      1.00 MiB",
        "epochs                       2",
        "optimizer steps              6",
        "skipped steps (not finite)   1",
        "samples                      3,000",
        "tokens                       98,765",
        "global batch                 1,000 rows; on average 250 rows per device × 2 devices × "
        "1.5 accumulated = 750 rows",
        "train loss (last batch)      0.2500",
        "loss average                 assumed to be over samples, not checked",
        "train accuracy (last epoch)  0.5000",
        "OOMs survived                0 (0 in train, 0 in eval)",
        "final microbatch size        1 row (1 × 1 of 1 on each device) in train",
    ]


def test_speed_covers_recent_seconds_only() -> None:
    speed, state = RecentSpeed(), LoopState()
    seen = []
    for seconds, samples in [(5.0, 5000), (10.0, 5500), (15.0, 6000), (15.0, 6000)]:
        state.train.seconds, state.samples = seconds, samples
        seen.append(speed.now(state)[0])
    assert seen == [1000.0, 100.0, 100.0, 100.0]


def test_live_line_is_overwritten_and_other_lines_stay() -> None:
    console, file = make_console(terminal=True)
    trainer = make_run(eval_dataloader=None)
    trainer._session.console = console
    trainer.fit()
    shown = file.getvalue()
    assert "\x1b[2K" in shown  # erases a line
    said = (
        "training on a simulated",
        # Slow phases before the first progress line are named.
        "waiting for the first batch of data …",
        "the first batch: checking a few rows, then finding a size …",
        "out of memory at microbatch size 256: retrying with 128 (2 microbatches of 128 rows) …",
        "· peak memory ",
        "OOMs survived",
    )
    places = [shown.index(each) for each in said]
    assert places == sorted(places)
    assert shown.count("waiting for the first batch") == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_status_text_is_computed_rarely(terminal: bool) -> None:
    console, _ = make_console(terminal=terminal)
    described: list[str] = []
    now = 0.0

    def describe() -> str:
        described.append("now")
        return "now"

    with Progress(console, clock=lambda: now) as progress:
        for _ in range(1000):
            progress.status(describe)
            now += PLAIN_SECONDS / 500
    assert 2 <= len(described) <= (101 if terminal else 2)


def test_run_without_epoch_length_reports_known_values(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Endless:
        def __iter__(self) -> Any:
            while True:
                yield torch.randn(8, 12), torch.randint(3, (8,))

    make_run(
        Endless(), limit=None, max_duration="3ba", eval_dataloader=None, microbatch_size=4
    ).fit()
    lines = capfd.readouterr().out.splitlines()
    assert "microbatch size 4 in train" in lines[0]
    assert lines[0].startswith("training on the CPU · precision")
    assert "per epoch" not in lines[0]
    assert lines[1].startswith("batch 1/3, epoch 1 · loss ")
    assert " · microbatches 2 × 4 · " in lines[1]
    assert lines[1].endswith("· global batch 8 · 33% done")
