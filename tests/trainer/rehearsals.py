"""Texts of varying length, and runs over them with and without a rehearsal."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from automicro import Callback, MemoryBudget, Microbatcher, Trainer
from automicro.features import with_features

WORDS = 32


class Texts(Dataset[Tensor]):
    """Rows of given lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Tensor:
        generator = torch.Generator().manual_seed(row)
        return torch.randint(WORDS, (self.lengths[row],), generator=generator)


class Model(nn.Module):
    """Needs much more memory for rows than for parameters."""

    def __init__(self, *, dropout: float = 0.0, attends: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(WORDS, 8)
        self.dropout = nn.Dropout(dropout)
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, WORDS)
        self.attends = attends

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if self.attends:
            hidden = hidden + torch.softmax(hidden @ hidden.transpose(1, 2), -1) @ hidden
        logits: Tensor = self.outer(self.dropout(torch.relu(self.inner(hidden))))
        return logits.transpose(1, 2)


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return tokens, tokens


def log_normal(seed: int, rows: int, *, most: int = 96) -> list[int]:
    """Return lengths distributed like those of texts."""
    source = random.Random(seed)
    centre, spread = source.uniform(2.0, 3.5), source.uniform(0.3, 1.0)
    return [max(2, min(most, round(source.lognormvariate(centre, spread)))) for _ in range(rows)]


def loader_of(lengths: Sequence[int], batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(Texts(lengths), batch_size=batch_size, collate_fn=padded, **options)


def make_trainer(model: nn.Module, loader: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW,
        "device": "cpu",
        "progress": False,
        "probe": False,
        "seed": 0,
        "rehearse": "worst",
    }
    return Trainer(model, loader, **with_features({**settings, **options}))


def count_ooms(seed: int, *, rehearse: str | None) -> tuple[int, int]:
    """Return the OOMs and the microbatches of a run; the seed selects texts, model and device.

    In a third of the runs the longest batch comes last; in another third batches differ in rows.
    """
    source = random.Random(seed)
    rows = source.choice((6, 8, 12))
    lengths = log_normal(seed, 12 * rows, most=source.choice((48, 96)))
    attends = bool(seed % 2)
    if seed % 3 == 0:
        lengths.sort()
    order: Any = [list(range(start, start + rows)) for start in range(0, len(lengths), rows)]
    if seed % 3 == 1:
        order = [batch[: source.randint(1, rows)] for batch in order]
    loader = DataLoader(Texts(lengths), batch_sampler=order, collate_fn=padded)
    costs = [(len(batch), max(lengths[row] for row in batch)) for batch in order]
    longest = max(length for _, length in costs)
    least = _peak(rows, longest, attends, microbatch_size=1)
    most = max(_peak(*each, attends) for each in sorted(costs, key=_elements)[-2:])
    limit = int(least * 1.05 + source.random() ** 1.5 * (most - least))
    microbatches = 0

    class Counting(Callback):
        def batch_end(self, run: Any, result: Any) -> None:
            nonlocal microbatches
            microbatches += result.num_microbatches

    trainer = make_trainer(
        Model(attends=attends),
        loader,
        memory_limit=max(limit, int(least * 1.05)),
        rehearse=rehearse,
        max_duration="2ep",
        callbacks=[Counting()],
    )
    return trainer.fit().ooms, microbatches


def _elements(batch: tuple[int, int]) -> int:
    return batch[0] * batch[1]


def _peak(rows: int, length: int, attends: bool, *, microbatch_size: int | None = None) -> int:
    """Return the bytes that a batch needs, including the first state of the optimizer."""
    model = Model(attends=attends)
    optimizer = torch.optim.AdamW(model.parameters())
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        microbatch_size=microbatch_size,
        probe=False,
    )
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    with MemoryBudget(None), microbatcher.rehearsing():
        peak = microbatcher.backward((tokens, tokens)).peak_bytes
    assert peak is not None
    return peak
