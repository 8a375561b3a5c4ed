"""Durations in every unit, accumulated batches, and batches with non-finite losses."""

import math
from collections import UserDict
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from automicro import NonFiniteLossError
from automicro.durations import Duration, Unit
from automicro.features import NonFinite
from automicro.trainer.counting import Counter
from tests.trainer.runs import (
    FEATURES,
    ROWS,
    Scripted,
    assert_same,
    losses_of,
    make_data,
    make_loader,
    make_model,
    make_trainer,
    schedule,
    train_by_hand,
)

# An epoch has four batches, with 16, 16, 16 and 2 rows.


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("accumulate", [2, 3, 4, 9])
def test_accumulated_batches_train_like_larger_batches(accumulate: int, size: int | None) -> None:
    ours, theirs = make_model().double(), make_model().double()
    loader = make_loader(dtype=torch.float64)
    options = {"scheduler": schedule, "grad_clip_norm": 0.5, "max_duration": "3ep"}
    trainer = make_trainer(
        ours, loader, accumulate_batches=accumulate, microbatch_size=size, **options
    )
    losses = losses_of(trainer)
    summary = trainer.fit()
    whole = DataLoader(make_data(dtype=torch.float64), batch_size=16 * accumulate)
    expected = train_by_hand(theirs, whole, epochs=3, clip=0.5, schedule=schedule)
    assert losses == pytest.approx(expected, rel=1e-9)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-10)
    assert summary.steps == 3 * len(whole)
    assert summary.samples == 3 * ROWS
    assert summary.global_batch.rows == pytest.approx(ROWS / len(whole))
    assert summary.global_batch.rows_per_device == ROWS / 4
    assert summary.global_batch.accumulation == 4 / len(whole)


def test_out_of_memory_in_accumulation_keeps_optimization_batch() -> None:
    ours, fixed = make_model(dropout=0.3), make_model(dropout=0.3)
    options: dict[str, Any] = {"accumulate_batches": 2, "max_duration": "2ep", "seed": 3}
    trainer = make_trainer(ours, make_loader(300, 128), memory_limit="200KiB", **options)
    summary = trainer.fit()
    assert summary.train_ooms == 1
    assert summary.microbatch_size == 64
    make_trainer(fixed, make_loader(300, 128), microbatch_size=64, **options).fit()
    assert_same(ours, fixed)


def scripted(at: int) -> Scripted:
    torch.manual_seed(0)
    return Scripted(at, lambda outputs: outputs * math.nan)


def test_non_finite_batch_can_be_ignored() -> None:
    model = scripted(2)
    summary = make_trainer(model, microbatch_size=None, features=[NonFinite("ignore")]).fit()
    assert summary.steps == 4
    assert math.isnan(summary.train_loss)
    assert not torch.isfinite(model.linear.weight).any()


def test_run_stops_after_too_many_skipped_batches() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.linear(inputs)
            return outputs * math.nan

    trainer = make_trainer(
        Broken(), features=[NonFinite("skip")], max_duration="99ba", microbatch_size=None
    )
    with pytest.raises(NonFiniteLossError, match="50 skipped batches before it"):
        trainer.fit()
    assert trainer.state.skipped == 50


def test_max_time_ends_training_after_at_least_one_batch() -> None:
    trainer = make_trainer(make_model(), max_duration="9999ep")
    with pytest.raises(ValueError, match="is not a time"):
        trainer.fit(max_time="soon")
    summary = trainer.fit(max_time=timedelta(seconds=0.05))
    assert summary.stop_reason == "max_time is over"
    before = summary.steps
    assert before >= 1
    assert trainer.fit(max_time=timedelta(microseconds=1)).steps == before + 1


# Token counts of a batch

IDS = torch.arange(12).reshape(3, 4)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": IDS, "attention_mask": MASK}, 7),
        ({"input_ids": IDS, "attention_mask": MASK.bool()}, 7),
        ({"attention_mask": MASK}, 7),
        ({"input_ids": IDS.numpy(), "attention_mask": MASK.numpy()}, 7),
        ({"input_ids": IDS}, 12),
        ({"input_ids": IDS.numpy()}, 12),
        ({"input_ids": [IDS[0], IDS[1, :2]]}, 6),
        (UserDict({"input_ids": IDS, "attention_mask": MASK}), 7),
        (({"input_ids": IDS, "attention_mask": MASK}, torch.zeros(3)), 7),
        ({"input_ids": IDS, "attention_mask": torch.zeros(3, 4)}, 12),
        ({"input_ids": IDS, "attention_mask": torch.ones(3, 1, 4, 4, dtype=torch.bool)}, 12),
        ({"input_ids": IDS, "attention_mask": None}, 12),
        ({"pixels": IDS}, None),
        ({"input_ids": [[1, 2], [3]]}, None),
        ((IDS, IDS), None),
        (IDS, None),
        ("ab", None),
    ],
    ids=str,
)
def test_tokens_are_counted_from_mask_or_ids(batch: Any, tokens: int | None) -> None:
    assert Counter(Unit.TOKENS).count_all([batch]) == tokens


@pytest.mark.parametrize("given", [5, np.int64(5), torch.tensor(5), np.array(5)], ids=repr)
def test_custom_token_count_takes_precedence(given: Any) -> None:
    count = Counter(Unit.TOKENS, lambda batch: given).count_all([{"input_ids": IDS}])
    assert (count, type(count)) == (5, int)


@pytest.mark.parametrize("given", [1.5, None, True, "7", -3, torch.tensor([1, 2])], ids=repr)
def test_invalid_token_count_is_named(given: Any) -> None:
    message = r"count_tokens gave .* not a whole number from 0\. Return"
    with pytest.raises((TypeError, ValueError), match=message):
        Counter(Unit.TOKENS, lambda batch: given).count_all([IDS])


def test_token_counter_must_be_callable() -> None:
    with pytest.raises(TypeError, match=r"count_tokens='input_ids' cannot be called\. Pass"):
        Counter(Unit.TOKENS, "input_ids")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"pixels": IDS, "labels": IDS},
            r"nor input_ids \(it has labels, pixels\)\. Pass .*CountData",
        ),
        (IDS, "their number in a batch of type Tensor is unknown. Pass .*CountData"),
    ],
)
def test_uncountable_duration_in_tokens_is_explained(batch: Any, message: str) -> None:
    duration = Duration.parse("1e6tok")
    with pytest.raises(ValueError, match=rf"^max_duration='1000000tok' counts tokens.*{message}"):
        Counter(Unit.TOKENS, max_duration=duration).count_all([batch])
    assert Counter(Unit.TOKENS, lambda batch: 4, max_duration=duration).count_all([batch]) == 4
