"""Speech in miniature: synthetic sounds of varying length, their letters, and a recognizer.

Each letter is a tone with its own pitch, held for a while and followed by a pause, under noise.
Rows have log-normal numbers of letters, so most of a batch is padding, as with speech.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

LETTERS = 8
BLANK = 0
SAMPLE_RATE = 4000  # samples per second
HOP = 80  # samples from one frame to the next
WINDOW = 256
MELS = 24
LONGEST = 24  # letters

Row = dict[str, Any]


class Sounds(Dataset[Row]):
    """Rows with ``frames`` (float32 log-mel energies of (length, 24)), ``letters``, ``seconds``.

    Args:
        num_rows: rows of the dataset.
        seed: determines the rows.

    >>> row = Sounds(4, seed=0)[0]
    >>> row["frames"].shape[1], round(len(row["frames"]) * HOP / SAMPLE_RATE - row["seconds"], 1)
    (24, 0.0)
    """

    def __init__(self, num_rows: int, *, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.rows = [_row(drawn) for _ in range(num_rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


def loader(
    split: str, *, batch_size: int = 32, num_rows: int | None = None, seed: int = 0
) -> "DataLoader[dict[str, Tensor]]":
    """Return batches for `Recognizer`.

    A batch maps ``audio`` to float32 of (rows, most frames, 24), ``audio_lengths`` to frames,
    ``labels`` to int64 of (rows, most letters), ``label_lengths`` to letters and ``seconds`` to
    float32, the last three and the lengths of shape (rows,) and the labels padded with 0.

    Args:
        split: ``"train"`` or ``"eval"``.
        batch_size: rows of a batch.
        num_rows: rows of the dataset; by default 640 for training and 96 for evaluation.
        seed: determines the order, by a generator of the loader.

    Raises:
        ValueError: an unknown split.

    >>> batch = next(iter(loader("eval", batch_size=4, num_rows=8)))
    >>> sorted(batch), batch["audio"].shape[::2]
    (['audio', 'audio_lengths', 'label_lengths', 'labels', 'seconds'], torch.Size([4, 24]))
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split={split!r} is not known: say 'train' or 'eval'")
    is_train = split == "train"
    rows = num_rows if num_rows is not None else 640 if is_train else 96
    return DataLoader(
        Sounds(rows, seed=1 if is_train else 2),
        batch_size=batch_size,
        shuffle=is_train,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(seed),
    )


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Join rows into one batch, padded to the longest; see `loader`."""
    return {
        "audio": pad_sequence([row["frames"] for row in rows], batch_first=True),
        "audio_lengths": torch.tensor([len(row["frames"]) for row in rows]),
        "labels": pad_sequence([row["letters"] for row in rows], batch_first=True),
        "label_lengths": torch.tensor([len(row["letters"]) for row in rows]),
        "seconds": torch.tensor([row["seconds"] for row in rows]),
    }


def count_seconds(batch: dict[str, Tensor]) -> float:
    """Return the seconds of sound in a batch.

    >>> count_seconds({"seconds": torch.tensor([1.5, 0.5])})
    2.0
    """
    return float(batch["seconds"].sum())


def _row(drawn: torch.Generator) -> Row:
    count = round(math.exp(1.55 + 0.75 * float(torch.randn((), generator=drawn))))
    count = min(max(count, 1), LONGEST)
    letters = torch.randint(1, LETTERS + 1, (count,), generator=drawn)
    sounds = []
    for letter in letters.tolist():
        held = int(SAMPLE_RATE * (0.10 + 0.10 * float(torch.rand((), generator=drawn))))
        pitch = 250.0 * 1.27**letter
        time = torch.arange(held) / SAMPLE_RATE
        sounds += [torch.sin(2 * math.pi * pitch * time), torch.zeros(int(0.05 * SAMPLE_RATE))]
    wave = torch.cat(sounds)
    wave = wave + 0.1 * torch.randn(len(wave), generator=drawn)
    return {"frames": _log_mel(wave), "letters": letters, "seconds": len(wave) / SAMPLE_RATE}


def _log_mel(wave: Tensor) -> Tensor:
    """Return log-mel energies of (frames, 24)."""
    spectrum = torch.stft(
        wave, WINDOW, HOP, window=torch.hann_window(WINDOW), center=True, return_complex=True
    )
    return (_filters() @ spectrum.abs().square()).clamp(min=1e-5).log().T.contiguous()


@functools.cache
def _filters() -> Tensor:
    """Return triangles of equal width in mel, of (24, frequencies)."""
    highest = 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, highest, MELS + 2) / 2595) - 1)
    at = torch.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1)
    rising = (at - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - at) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0)


class Recognizer(nn.Module):
    """Convolutions over frames, with a score of each letter for each frame.

    Values beyond the end of a row are zero before every convolution, so padding changes nothing.
    The loss is connectionist temporal classification (Graves et al., 2006), in nats per letter,
    averaged over rows.

    >>> batch = collate([Sounds(2, seed=0)[index] for index in range(2)])
    >>> outputs = Recognizer(width=16)(**batch)
    >>> outputs["loss"].ndim, outputs["logits"].shape[::2]
    (0, torch.Size([2, 9]))
    """

    def __init__(self, width: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(MELS, width)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(width, width, 5, padding=2) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, LETTERS + 1)

    def forward(
        self,
        audio: Tensor,
        audio_lengths: Tensor,
        labels: Tensor,
        label_lengths: Tensor,
        **others: Any,
    ) -> dict[str, Tensor]:
        """Return the loss, and logits of (rows, frames, letters and blank)."""
        places = torch.arange(audio.shape[1], device=audio.device)
        inside = (places < audio_lengths[:, None])[..., None]
        hidden = self.stem(audio)
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            given = (norm(hidden) * inside).transpose(1, 2)
            hidden = hidden + F.gelu(convolution(given)).transpose(1, 2)
        logits = self.head(hidden)
        losses = F.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1),
            labels,
            audio_lengths,
            label_lengths,
            blank=BLANK,
            reduction="none",
            zero_infinity=True,
        )
        return {"loss": (losses / label_lengths).mean(), "logits": logits * inside}


def update_letter_errors(metric: "LetterErrorRate", outputs: Any, batch: Any) -> None:
    """Update `LetterErrorRate` with a microbatch."""
    metric.update(
        outputs["logits"], batch["audio_lengths"], batch["labels"], batch["label_lengths"]
    )


class LetterErrors(Metric):
    """Letters to insert, remove or replace, per correct letter."""

    higher_is_better = False
    is_differentiable = False
    full_state_update = False

    errors: Tensor
    letters: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("errors", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("letters", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def count(self, read: Sequence[int], right: Sequence[int]) -> None:
        """Count one row."""
        self.errors += edit_distance(read, right)
        self.letters += len(right)

    def compute(self) -> Tensor:
        """Return errors per letter."""
        return self.errors / self.letters


class LetterErrorRate(LetterErrors):
    """Letters to insert, remove or replace, per correct letter.

    >>> metric = LetterErrorRate()
    >>> logits = F.one_hot(torch.tensor([[1, 1, 0, 2, 0]]), 9).float()
    >>> metric.update(logits, torch.tensor([5]), torch.tensor([[1, 3]]), torch.tensor([2]))
    >>> metric.compute()
    tensor(0.5000)
    """

    def update(
        self, logits: Tensor, audio_lengths: Tensor, labels: Tensor, label_lengths: Tensor
    ) -> None:
        """Count rows.

        Args:
            logits: of (rows, frames, letters and blank).
            audio_lengths: frames of each row.
            labels: of (rows, letters).
            label_lengths: letters of each row.
        """
        best = logits.argmax(-1).cpu()
        for row, frames, right, count in zip(
            best, audio_lengths.tolist(), labels.cpu(), label_lengths.tolist(), strict=True
        ):
            read = [each for each in row[:frames].unique_consecutive().tolist() if each != BLANK]
            self.count(read, right[:count].tolist())


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the fewest insertions, removals and replacements between two (Levenshtein, 1966).

    >>> edit_distance([1, 2, 3], [1, 3, 3, 4])
    2
    """
    row = list(range(len(other) + 1))
    for index, letter in enumerate(one, start=1):
        before, row[0] = row[0], index
        for place, right in enumerate(other, start=1):
            before, row[place] = (
                row[place],
                min(row[place] + 1, row[place - 1] + 1, before + (letter != right)),
            )
    return row[-1]
