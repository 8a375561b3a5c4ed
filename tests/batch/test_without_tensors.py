"""Batches of texts, lists, arrays and objects: training, evaluation and prediction."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from automicro import BatchError, MemoryBudget, Microbatcher, Trainer
from automicro.batch.device import cost_of_row
from automicro.batch.tensors import Contents
from tests.batch.structures import Text

TEXTS = ["hello", "world", "a", "bb", "ccc", "dddd", "ee", "f", "gg", "hhh", "iiii"]
LABELS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]


class Letters(nn.Module):
    """A model from texts to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, 3).double()

    def forward(self, texts: Any) -> Tensor:
        rows = [self.letters(torch.tensor([ord(c) for c in text])).mean(0) for text in texts]
        return torch.stack(rows)


def test_prediction_accepts_any_number_of_texts() -> None:
    cases: list[Any] = [1, 2, 3, None, "auto"]
    for size in cases:
        model = Letters()
        microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), eval_microbatch_size=size)
        for count in (11, 3, 2, 1):
            assert torch.equal(microbatcher.predict(TEXTS[:count]), model(TEXTS[:count]))
        assert torch.equal(microbatcher.predict((TEXTS, torch.tensor(LABELS))), model(TEXTS))


def test_text_outputs_are_joined_in_order() -> None:
    class Upper(nn.Module):
        def forward(self, texts: Any) -> Any:
            return {
                "text": [text.upper() for text in texts],
                "length": np.array([*map(len, texts)]),
            }

    found = Microbatcher(Upper(), loss_fn=F.mse_loss, eval_microbatch_size=2).predict(TEXTS)
    assert found["text"] == [text.upper() for text in TEXTS]
    assert found["length"].tolist() == [len(text) for text in TEXTS]


def test_list_of_rows_is_rejected_as_pair() -> None:
    for count in [11, 2]:
        microbatcher = Microbatcher(Letters(), loss_fn=nn.CrossEntropyLoss(), microbatch_size=2)
        for call in (microbatcher.backward, microbatcher.evaluate):
            with pytest.raises(BatchError, match=rf"a pair .*read as {count} rows.*forward="):
                call(TEXTS[:count])


def test_cost_of_row_counts_elements_or_characters() -> None:
    cases: list[Any] = [
        (["ab", "cdef"], 2, 3.0),
        ([{"t": "ab", "n": 1}, {"t": "cdef", "n": 2}], 2, 4.0),
        ([None, None], 2, 1.0),
        (["", ""], 2, 1.0),
        (np.zeros((4, 5)), 4, 5.0),
        ({"x": np.zeros((4, 5)), "y": torch.zeros(4)}, 4, 6.0),
        ([object(), object()], 2, 1.0),
        ([Text("abc"), Text("a")], 2, 2.0),
        ([Text(torch.zeros(7)), Text(torch.zeros(1))], 2, 4.0),  # type: ignore[arg-type]
        (np.array(["ab", "cdef"], dtype=object), 2, 3.0),
        (list(range(10)), 10, 1.0),
        (torch.zeros(4, 0), 4, 1.0),
    ]
    for batch, rows, cost in cases:
        assert cost_of_row(Contents(batch), rows) == cost


def test_text_batch_is_split_after_oom() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, texts: Any) -> Any:
            lengths = torch.tensor([float(len(text)) for text in texts], dtype=torch.float64)
            return (lengths[:, None] * self.weight).expand(-1, 4096).clone().mean()

    model = Wide()
    with MemoryBudget("256KiB"):
        result = Microbatcher(model, forward=lambda m, b: m(b)).backward(TEXTS)
    assert result.num_microbatches > 1
    assert model.weight.grad is not None
    assert float(model.weight.grad) == pytest.approx(sum(map(len, TEXTS)) / len(TEXTS))


class Reviews(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> Any:
        return TEXTS[index], LABELS[index]


def test_trainer_fits_and_predicts_texts() -> None:
    loader = DataLoader(Reviews(), batch_size=6)
    model = Letters()
    trainer = Trainer(
        model,
        loader,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        microbatch_size=2,
        eval_microbatch_size=2,
        progress=False,
    )
    trainer.fit()
    found = torch.cat(trainer.predict(DataLoader(TEXTS, batch_size=6)))  # type: ignore[arg-type]
    assert torch.equal(found, model(TEXTS))


# OOM while a batch is read


class Table:
    """Rows that use memory when they are counted or split."""

    failures = 0

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def rows(self) -> int:
        self.fail("count")
        return len(self.x)

    def take(self, start: int, stop: int) -> "Table":
        self.fail("cut")
        return Table(self.x[start:stop])

    @classmethod
    def fail(cls, where: str) -> None:
        if cls.failures and where == cls.at:
            cls.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")

    at = "count"


@pytest.mark.parametrize("at", ["count", "cut"])
@pytest.mark.parametrize("failures", [1, 99])
def test_oom_while_reading_batch_is_retried_once(
    at: str, failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    from automicro import register_batch_type

    register_batch_type(Table, num_rows=Table.rows, take=Table.take)
    model = nn.Linear(2, 3).double()
    batch = Table(torch.rand(8, 2, dtype=torch.float64))
    microbatcher = Microbatcher(
        model, forward=lambda m, b: m(b.x).pow(2).mean(), microbatch_size=3, probe=False
    )
    what = {"count": "reading the structure of the batch", "cut": "cutting the batch"}[at]
    Table.at, Table.failures = at, failures
    try:
        with caplog.at_level(logging.WARNING):
            if failures == 1:
                assert microbatcher.backward(batch).num_microbatches == 3
            else:
                with pytest.raises(torch.OutOfMemoryError) as caught:
                    microbatcher.backward(batch)
                assert any(what in note for note in caught.value.__notes__)
                assert model.weight.grad is None
    finally:
        Table.failures = 0
    assert f"out of memory while {what}" in caplog.text
    assert "retrying once" in caplog.text
