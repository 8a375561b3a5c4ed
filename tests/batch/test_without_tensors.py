"""Batches of texts, lists, arrays and objects, and memory that runs out while they are read."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from automicro import BatchError, Microbatcher, Trainer, register_batch_type
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


@pytest.mark.parametrize("size", [1, 3, None, "auto"])
def test_prediction_accepts_any_number_of_texts(size: Any) -> None:
    model = Letters()
    microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), eval_microbatch_size=size)
    for count in (11, 3, 2, 1):
        assert torch.equal(microbatcher.predict(TEXTS[:count]), model(TEXTS[:count]))
    assert torch.equal(microbatcher.predict((TEXTS, torch.tensor(LABELS))), model(TEXTS))


def test_trainer_fits_and_predicts_texts() -> None:
    model = Letters()
    loader: Any = DataLoader([*zip(TEXTS, LABELS, strict=True)], batch_size=6)  # type: ignore[arg-type]
    trainer = Trainer(
        model, loader, loss_fn=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD,
        microbatch_size=2, eval_microbatch_size=2, progress=False,
    )  # fmt: skip
    trainer.fit()
    found = torch.cat(trainer.predict(DataLoader(TEXTS, batch_size=6)))  # type: ignore[arg-type]
    assert torch.equal(found, model(TEXTS))


def test_text_outputs_are_joined_in_order() -> None:
    class Upper(nn.Module):
        def forward(self, texts: Any) -> Any:
            return {"text": [each.upper() for each in texts], "n": np.array([*map(len, texts)])}

    found = Microbatcher(Upper(), loss_fn=F.mse_loss, eval_microbatch_size=2).predict(TEXTS)
    assert found["text"] == [text.upper() for text in TEXTS]
    assert found["n"].tolist() == [len(text) for text in TEXTS]


@pytest.mark.parametrize("count", [11, 2])
def test_list_of_rows_is_rejected_as_pair(count: int) -> None:
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


class Table:
    """Rows that use memory when they are counted or split."""

    failures, at = 0, "count"

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


@pytest.mark.parametrize(
    ("at", "what"), [("count", "reading the structure of the batch"), ("cut", "cutting the batch")]
)
@pytest.mark.parametrize("failures", [1, 99])
def test_oom_while_reading_batch_is_retried_once(
    at: str, what: str, failures: int, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    register_batch_type(Table, num_rows=Table.rows, take=Table.take)
    model = nn.Linear(2, 3).double()
    batch = Table(torch.rand(8, 2, dtype=torch.float64))
    microbatcher = Microbatcher(
        model, forward=lambda m, b: m(b.x).pow(2).mean(), microbatch_size=3, probe=False
    )
    monkeypatch.setattr(Table, "at", at)
    monkeypatch.setattr(Table, "failures", failures)
    caplog.set_level(logging.WARNING)
    if failures == 1:
        assert microbatcher.backward(batch).num_microbatches == 3
    else:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            microbatcher.backward(batch)
        assert any(what in note for note in caught.value.__notes__)
        assert model.weight.grad is None
    assert f"out of memory while {what}" in caplog.text
    assert "retrying once" in caplog.text
