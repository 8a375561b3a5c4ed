"""Counting the tokens of a batch: what is counted, by whom, and what cannot be."""

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from automicro.trainer.counting import Counter
from automicro.units import Duration, Unit

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
def test_tokens_are_those_that_the_mask_keeps_or_all_ids(batch: Any, tokens: int | None) -> None:
    assert Counter(Unit.TOKENS).count_all([batch]) == tokens


@pytest.mark.parametrize("given", [5, np.int64(5), torch.tensor(5), np.array(5)], ids=repr)
def test_the_callers_own_count_goes_first(given: Any) -> None:
    count = Counter(Unit.TOKENS, lambda batch: given).count_all([{"input_ids": IDS}])
    assert (count, type(count)) == (5, int)


@pytest.mark.parametrize("given", [1.5, None, True, "7", -3, torch.tensor([1, 2])], ids=repr)
def test_a_count_that_is_no_whole_number_is_named(given: Any) -> None:
    message = r"count_tokens gave .* not a whole number from 0\. Return"
    with pytest.raises((TypeError, ValueError), match=message):
        Counter(Unit.TOKENS, lambda batch: given).count_all([IDS])


def test_something_that_cannot_be_called_is_named() -> None:
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
def test_a_duration_in_tokens_that_cannot_be_counted_is_explained(batch: Any, message: str) -> None:
    duration = Duration.parse("1e6tok")
    with pytest.raises(ValueError, match=rf"^max_duration='1000000tok' counts tokens.*{message}"):
        Counter(Unit.TOKENS, max_duration=duration).count_all([batch])
    assert Counter(Unit.TOKENS, lambda batch: 4, max_duration=duration).count_all([batch]) == 4
