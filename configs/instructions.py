"""Instructions in miniature: prompts and answers of log-normal lengths; only answers count.

A prompt is an instruction, some words to be ignored and a first number; the answer counts on from
there in the steps that the instruction names. A model has to attend to the prompt to answer.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

NUMBERS = 32
STEPS = 4  # instructions: count on by 1, 2, 3 or 4
WORDS = 8
PADDING = NUMBERS + STEPS + WORDS
VOCABULARY = PADDING + 1
IGNORED = -100

Row = dict[str, Tensor]


class Instructions(Dataset[Row]):
    """Rows with ``input_ids`` and ``labels``, -100 in the prompt, both int64 of (length,).

    Args:
        num_rows: rows of the dataset.
        seed: determines the rows.
        longest: most tokens of a row.

    >>> row = Instructions(1, seed=0)[0]
    >>> answer = row["input_ids"][row["labels"] != IGNORED]
    >>> step = int(row["input_ids"][0]) - NUMBERS + 1
    >>> bool(((answer[1:] - answer[:-1]) % NUMBERS == step).all())
    True
    """

    def __init__(self, num_rows: int, *, seed: int, longest: int = 96) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.rows = [_row(drawn, longest) for _ in range(num_rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


def loader(
    split: str,
    *,
    batch_size: int = 64,
    num_rows: int | None = None,
    longest: int = 96,
    seed: int = 0,
) -> "DataLoader[dict[str, Tensor]]":
    """Return batches for a causal language model of transformers, padded on the right.

    Args:
        split: ``"train"`` or ``"eval"``.
        batch_size: rows of a batch.
        num_rows: rows of the dataset; by default 6,400 for training and 256 for evaluation.
        longest: most tokens of a row.
        seed: determines the order, by a generator of the loader.

    Raises:
        ValueError: an unknown split.

    >>> batch = next(iter(loader("eval", batch_size=4, num_rows=8)))
    >>> sorted(batch)
    ['attention_mask', 'input_ids', 'labels']
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split={split!r} is not known: say 'train' or 'eval'")
    is_train = split == "train"
    rows = num_rows if num_rows is not None else 6400 if is_train else 256
    return DataLoader(
        Instructions(rows, seed=1 if is_train else 2, longest=longest),
        batch_size=batch_size,
        shuffle=is_train,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(seed),
    )


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Join rows into one batch, padded to the longest; see `loader`."""
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=PADDING)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PADDING).long(),
        "labels": pad_sequence(
            [row["labels"] for row in rows], batch_first=True, padding_value=IGNORED
        ),
    }


def _row(drawn: torch.Generator, longest: int) -> Row:
    def length(middle: float) -> int:
        return round(math.exp(middle + 0.8 * float(torch.randn((), generator=drawn))))

    words = min(max(length(1.6), 0), longest // 3)
    answer = min(max(length(2.4), 2), longest - words - 2)
    step = int(torch.randint(1, STEPS + 1, (), generator=drawn))
    first = int(torch.randint(NUMBERS, (), generator=drawn))
    ignored = NUMBERS + STEPS + torch.randint(WORDS, (words,), generator=drawn)
    counted = (first + step * torch.arange(answer + 1)) % NUMBERS
    ids = torch.cat([torch.tensor([NUMBERS + step - 1]), ignored, counted])
    labels = ids.clone()
    labels[: words + 2] = IGNORED
    return {"input_ids": ids, "labels": labels}


class AnswerAccuracy(Metric):
    """The share of all tokens of answers that is predicted correctly.

    >>> metric = AnswerAccuracy()
    >>> metric.update(torch.eye(3)[None], torch.tensor([[IGNORED, 0, 2]]))
    >>> metric.compute()
    tensor(0.5000)
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False

    right: Tensor
    tokens: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("right", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count rows.

        Args:
            logits: of (rows, length, vocabulary); those at a position predict the next one.
            labels: of (rows, length), not shifted; -100 for tokens that are not predicted.
        """
        counts = labels[:, 1:] != IGNORED
        self.right += ((logits[:, :-1].argmax(-1) == labels[:, 1:]) & counts).sum()
        self.tokens += counts.sum()

    def compute(self) -> Tensor:
        """Return the share."""
        return self.right / self.tokens
