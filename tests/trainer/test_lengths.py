"""Rows of varying length in a Trainer: batches by length, seconds of data, and resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from automicro import Callback
from automicro.checkpoints.store import CheckpointConfig
from automicro.data import LengthBatchSampler
from automicro.events.run import Run
from automicro.features import CountData, with_features
from automicro.trainer.trainer import Trainer
from tests.trainer.runs import assert_same

SECONDS = [1.0 + 7 * row % 11 / 2 for row in range(40)]  # 1 s to 6 s
TOTAL = sum(SECONDS)


class Speech(Dataset[Any]):
    """Signals of different lengths, one per row."""

    def __len__(self) -> int:
        return len(SECONDS)

    def __getitem__(self, row: int) -> Any:
        return torch.full((int(2 * SECONDS[row]),), float(row % 5)), float(row % 3)


def collate(rows: list[Any]) -> Any:
    signals = nn.utils.rnn.pad_sequence([signal for signal, _ in rows], batch_first=True)
    return signals.sum(1, keepdim=True), torch.tensor([[target] for _, target in rows])


def make_trainer(**options: Any) -> Trainer:
    torch.manual_seed(0)
    sampling = {"mode": "duration", "lengths": SECONDS, "batch_length": 20.0, "unit": "seconds"}
    rows = Speech()
    sampler = LengthBatchSampler(rows, **(sampling | options.pop("sampling", {})))
    return Trainer(
        nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)),
        DataLoader(rows, batch_sampler=sampler, collate_fn=collate),
        loss_fn=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        device="cpu",
        probe=False,
        **with_features({"progress": False, **options}),
    )


def test_callable_counts_seconds_of_batch() -> None:
    trainer = make_trainer(
        sampling={"unit": None},
        max_duration="100sec",
        features=[CountData(seconds=lambda batch: 10.0 * len(batch[0]))],
    )
    assert trainer.fit().data_seconds == 10.0 * trainer.state.samples
    assert trainer.state.samples >= 10


@pytest.mark.parametrize("name", ["max_duration", "eval_interval"])
def test_uncounted_seconds_are_refused_with_hint_at_max_time(
    name: str,
) -> None:
    with pytest.raises(ValueError, match=rf"^{name}='2h' counts seconds of data.*max_time='2h30m'"):
        make_trainer(sampling={"unit": None}, **{name: "2h"})
    trainer = make_trainer(sampling={"unit": None})
    checkpoint = CheckpointConfig(folder="unused", interval="1h")
    with pytest.raises(ValueError, match=r"^checkpoint interval='1h' counts seconds of data"):
        make_trainer(sampling={"unit": None}, checkpoint=checkpoint)
    with pytest.raises(ValueError, match=r"^duration='2h' counts seconds of data"):
        trainer.fit(duration="2h")


@pytest.mark.parametrize("seconds", ["1", -1.0])
def test_invalid_seconds_are_refused(seconds: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="count_seconds gave"):
        make_trainer(features=[CountData(seconds=lambda batch: seconds)]).fit()
    with pytest.raises(TypeError, match="count_seconds=5 cannot be called"):
        make_trainer(features=[CountData(seconds=5)])  # type: ignore[arg-type]


def test_size_selects_fewest_batches_that_reach_it() -> None:
    fixed = {"mode": "fixed", "batch_length": None, "batch_size": 4}
    summary = make_trainer(sampling=fixed, accumulate_batches="10sp").fit()
    assert summary.global_batch.most_rows == 12
    summary = make_trainer(sampling=fixed, accumulate_batches="12sp").fit()
    assert summary.global_batch.most_rows == 12
    summary = make_trainer(sampling=fixed, accumulate_batches="13sp").fit()
    assert summary.global_batch.most_rows == 16
    sampler = LengthBatchSampler(mode="duration", lengths=SECONDS, batch_length=20.0)
    average = TOTAL / len(sampler)
    summary = make_trainer(accumulate_batches=f"{int(3 * average)}sec").fit()
    assert summary.steps == -(-len(sampler) // 3)
    summary = make_trainer(accumulate_batches=f"{int(3 * average) + 1}sec").fit()
    assert summary.steps == -(-len(sampler) // 4)


def test_unknown_or_invalid_batch_size_is_refused() -> None:
    with pytest.raises(ValueError, match="the number of tokens in a batch of train_dataloader"):
        make_trainer(accumulate_batches="1e6tok")
    with pytest.raises(
        ValueError, match="accumulate_batches='1ep' is not the size of a batch; give"
    ):
        make_trainer(accumulate_batches="1ep")
    with pytest.raises(ValueError, match="accumulate_batches='many' is not a duration"):
        make_trainer(accumulate_batches="many")
    assert make_trainer(accumulate_batches="3ba").fit().global_batch.accumulation > 2


def test_exploring_with_token_unit_is_refused_without_warning() -> None:
    with pytest.raises(ValueError, match="slices of tokens are packed"):  # and gives no warning
        make_trainer(seed=1, microbatch_unit="tokens", microbatch_size="explore")


def test_first_line_and_summary_report_average_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sampling = {"second_lengths": [5] * 40, "second_unit": "tokens"}
    make_trainer(sampling=sampling, accumulate_batches="1min", progress=True).fit()
    out = capsys.readouterr().out
    first = next(line for line in out.splitlines() if line.startswith("training on"))
    assert "accumulate_batches 4 (reaches '1min')" in first
    assert (
        "average batch 5 rows, 25 tokens, 17.6 s per device × 1 device × 4 accumulated = "
        "20 rows, 100 tokens, 1.2 min"
    ) in first
    assert "\ndata                     2.4 min\n" in out
    assert "\nglobal batch             5 rows, 17.6 s per device" in out


class StopAfter(Callback):
    """Ends a run like a kill would, except that the last batch is saved."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def batch_end(self, run: Run, result: Any) -> None:
        if run.state.batch == self._batches:
            run.stop("for the test")


@pytest.mark.parametrize(
    ("mode", "batches"),
    [
        ("duration", 3),
        ("1D-bucketing-dyn", 9),
        *(pytest.param("duration", at, marks=pytest.mark.sweep) for at in (8, 9, 11)),
        *(pytest.param("1D-bucketing-dyn", at, marks=pytest.mark.sweep) for at in (3, 8, 11)),
    ],
)
def test_run_resumed_in_epoch_is_bit_identical(tmp_path: Path, batches: int, mode: str) -> None:
    options: dict[str, Any] = {"max_duration": "3ep", "sampling": {"mode": mode}}
    whole = make_trainer(**options)
    expected = whole.fit()
    saved = CheckpointConfig(folder=tmp_path)
    make_trainer(**options, checkpoint=saved, callbacks=[StopAfter(batches)]).fit()
    later = make_trainer(**options, checkpoint=saved)
    assert later.fit().data_seconds == expected.data_seconds == 3 * TOTAL
    assert later.state.batch == whole.state.batch
    assert_same(later._run.model, whole._run.model)
