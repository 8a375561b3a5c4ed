"""Padded texts and sounds of varying length, and models whose results ignore padding."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 23
IGNORED = -100


class Reader(nn.Module):
    """A causal model of texts with the interface of transformers: each word sees earlier ones."""

    def __init__(self, *, dropout: float = 0.0, sees_padding: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.place = nn.Embedding(64, 8)
        self.mix = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, WORDS)
        self.sees_padding = sees_padding
        self.seen: list[tuple[int, int]] = []
        self.double()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> dict[str, Tensor]:
        self.seen.append((input_ids.shape[0], input_ids.shape[1]))
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length).expand_as(input_ids)
        hidden = self.embed(input_ids) + self.place(position_ids)
        mask = attention_mask[..., None].double()
        past = (hidden * mask).cumsum(1) / mask.cumsum(1).clamp(min=1)
        hidden = hidden + self.dropout(torch.tanh(self.mix(past)))
        if self.sees_padding:
            hidden = hidden + hidden.mean(1, keepdim=True)
        logits = self.head(hidden)
        found = {"logits": logits, "pooled": (hidden * mask).sum(1)}
        if labels is None:
            return found
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return {"loss": loss, **found}


def texts(
    lengths: list[int], *, padded: int | None = None, left: bool = False
) -> dict[str, Tensor]:
    """Return a batch of texts of these lengths."""
    padded = max(lengths) if padded is None else padded
    drawn = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(WORDS, (len(lengths), padded), generator=drawn)
    places = torch.arange(padded).flip(0) if left else torch.arange(padded)
    mask = (places < torch.tensor(lengths)[:, None]).long()
    labels = torch.where(mask == 1, ids.roll(-1, 1), IGNORED)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if left:
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return batch


class Listener(nn.Module):
    """Map sounds of (rows, frames, 5) and their lengths to a class for each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
        self.double()

    def forward(self, audio: Tensor, audio_lengths: Tensor) -> Tensor:
        logits: Tensor = self.layers(audio)
        inside = torch.arange(audio.shape[1]) < audio_lengths[:, None]
        return logits * inside[..., None]


def sounds(lengths: list[int]) -> dict[str, Tensor]:
    """Return a batch of sounds with these frame counts, each with half as many letters."""
    drawn = torch.Generator().manual_seed(sum(lengths))
    letters = [max(1, length // 2) for length in lengths]
    return {
        "audio": torch.randn(len(lengths), max(lengths), 5, dtype=torch.float64, generator=drawn),
        "audio_lengths": torch.tensor(lengths),
        "labels": torch.randint(1, 6, (len(lengths), max(letters)), generator=drawn),
        "label_lengths": torch.tensor(letters),
    }


def transcribe(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    logits = model(batch["audio"], batch["audio_lengths"])
    loss = F.ctc_loss(
        logits.log_softmax(-1).transpose(0, 1),
        batch["labels"],
        batch["audio_lengths"],
        batch["label_lengths"],
        reduction="none",
        zero_infinity=True,
    ).mean()
    return loss, logits
