"""A transducer in miniature: it reads letters of synthetic sounds, with a four-dimensional joint.

An encoder runs over frames, a prediction network over the letters so far, and the joint network
scores the next letter for each pair of both: (rows, frames, letters + 1, scores). That is far more
than all earlier activations, so `Joint`, which returns the loss, needs a size of its own.
The sounds are those of `sounds`; its ``loader`` returns the batches.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sounds import BLANK, LETTERS, MELS, LetterErrors

# Represents a probability of zero. An infinity would make the gradient of log(0 + 0) NaN.
_IMPOSSIBLE = -1e30
_MOST_IN_A_FRAME = 4  # letters, in decoding


def transducer_loss(
    logits: Tensor,
    targets: Tensor,
    time_lengths: Tensor,
    label_lengths: Tensor,
    *,
    blank: int = 0,
    reduction: str = "mean",
) -> Tensor:
    """Return the negative log-likelihood of labels, summed over all alignments (Graves, 2012).

    An alignment emits each label in some frame, and a blank to leave each frame, including the
    last one. The forward recursion runs over the diagonals of frames and labels, in log space; all
    labels and rows of a diagonal are computed at once. Values beyond the lengths of a row do not
    count.

    Args:
        logits: of (rows, frames, labels + 1, classes). Half precision is computed in float32.
        targets: int64 of (rows, labels), padded with any class.
        time_lengths: int64 of (rows,), frames of each row; at least 1.
        label_lengths: int64 of (rows,), labels of each row; 0 is allowed.
        blank: the class that leaves a frame.
        reduction: ``"mean"`` over rows, ``"sum"``, or ``"none"``: one loss per row.

    Raises:
        ValueError: shapes or lengths do not match, or the reduction is unknown.

    One frame and one label allow one alignment: the label, then a blank.

    >>> logits = torch.zeros(1, 1, 2, 4)
    >>> loss = transducer_loss(logits, torch.tensor([[3]]), torch.tensor([1]), torch.tensor([1]))
    >>> torch.allclose(loss, 2 * torch.tensor(4.0).log())
    True
    """
    _check(logits, targets, time_lengths, label_lengths, reduction)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    scores = logits.log_softmax(-1)
    leaving = scores[..., blank]
    labels = targets[:, None, :, None].expand(-1, scores.shape[1], -1, 1)
    emitting = scores[:, :, :-1].gather(-1, labels).squeeze(-1)
    losses = -_log_likelihoods(leaving, emitting, time_lengths, label_lengths)
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def _check(
    logits: Tensor, targets: Tensor, time_lengths: Tensor, label_lengths: Tensor, reduction: str
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is not known: say 'mean', 'sum' or 'none'")
    if logits.dim() != 4 or targets.shape != (logits.shape[0], logits.shape[2] - 1):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} and targets of shape {tuple(targets.shape)} do "
            "not go together: give (rows, frames, labels + 1, classes) and (rows, labels)"
        )
    for name, lengths, least, most in (
        ("time_lengths", time_lengths, 1, logits.shape[1]),
        ("label_lengths", label_lengths, 0, targets.shape[1]),
    ):
        found = lengths.tolist()
        if len(found) != len(logits) or min(found) < least or max(found) > most:
            raise ValueError(
                f"{name}={found} is not between {least} and {most} for each of {len(logits)} rows: "
                "give the number of a row's own, without padding"
            )


def _log_likelihoods(
    leaving: Tensor, emitting: Tensor, time_lengths: Tensor, label_lengths: Tensor
) -> Tensor:
    """Return the log-likelihood of each row.

    Args:
        leaving: log-probabilities of a blank, of (rows, frames, labels + 1).
        emitting: log-probabilities of the next label, of (rows, frames, labels).
        time_lengths: frames of each row.
        label_lengths: labels of each row.
    """
    num_rows, frames, _ = leaving.shape
    labels = emitting.shape[2]
    # Entry (n, u) of a diagonal layout is frame n - u after u labels.
    diagonals = torch.arange(frames + labels, device=leaving.device)[:, None]
    places = torch.arange(labels + 1, device=leaving.device)
    frame = diagonals - places
    is_there = (frame >= 0) & (frame < frames)
    frame = frame.clamp(0, frames - 1)
    leaving = leaving[:, frame, places].masked_fill(~is_there, _IMPOSSIBLE)
    emitting = emitting[:, frame[:, :-1], places[:-1]]
    emitting = emitting.masked_fill(~is_there[:, :-1], _IMPOSSIBLE)

    reached = leaving.new_full((num_rows, labels + 1), _IMPOSSIBLE)
    reached[:, 0] = 0.0
    found = [reached]
    for stay, move in zip(leaving.unbind(1)[:-1], emitting.unbind(1)[:-1], strict=True):
        moved = F.pad(reached[:, :-1] + move, (1, 0), value=_IMPOSSIBLE)
        reached = torch.logaddexp(reached + stay, moved)
        found.append(reached)
    rows = torch.arange(num_rows, device=leaving.device)
    last = time_lengths + label_lengths - 1
    return (torch.stack(found, 1) + leaving)[rows, last, label_lengths]


class Joint(nn.Module):
    """Scores of each letter and the blank for each frame and each number of letters, and the loss.

    Rows are cut to their longest, so a slice of short rows takes little memory.

    Args:
        width: features of encoder and prediction network.
        hidden: width for each pair of frame and letter.
        classes: letters and the blank.

    >>> joint = Joint(width=8, hidden=16)
    >>> joint.logits(torch.zeros(2, 5, 8), torch.zeros(2, 4, 8)).shape
    torch.Size([2, 5, 4, 9])
    """

    def __init__(self, width: int, hidden: int, classes: int = LETTERS + 1) -> None:
        super().__init__()
        self.from_frames = nn.Linear(width, hidden)
        self.from_letters = nn.Linear(width, hidden)
        self.head = nn.Linear(hidden, classes)

    def logits(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Return scores of (rows, frames, letters + 1, classes)."""
        pairs = self.from_frames(encoded)[:, :, None] + self.from_letters(predicted)[:, None]
        scores: Tensor = self.head(pairs.tanh())
        return scores

    def forward(
        self,
        encoded: Tensor,
        predicted: Tensor,
        targets: Tensor,
        time_lengths: Tensor,
        label_lengths: Tensor,
    ) -> Tensor:
        """Return the mean of the rows' losses.

        Args:
            encoded: of (rows, frames, width).
            predicted: of (rows, letters + 1, width).
            targets: of (rows, letters).
            time_lengths: frames of each row.
            label_lengths: letters of each row.
        """
        frames, letters = int(time_lengths.max()), int(label_lengths.max())
        logits = self.logits(encoded[:, :frames], predicted[:, : letters + 1])
        return transducer_loss(
            logits, targets[:, :letters], time_lengths, label_lengths, blank=BLANK
        )


class Transducer(nn.Module):
    """A model that reads letters from frames; see the module.

    In training it returns the loss, in nats per row, averaged over rows. In evaluation it also
    returns ``read``, the letters of (rows, most letters), padded with blanks: in each frame, the
    best letter is emitted until the best one is a blank.

    Args:
        width: of encoder and prediction network.
        layers: convolutions of the encoder.
        hidden: of the joint network.
        dropout: share of the encoder's and prediction network's features that training drops.

    >>> import sounds
    >>> batch = next(iter(sounds.loader("eval", batch_size=2, num_rows=2)))
    >>> outputs = Transducer(width=8, hidden=16)(**batch)
    >>> outputs["loss"].ndim, sorted(outputs)
    (0, ['loss'])
    """

    def __init__(
        self, width: int = 48, layers: int = 3, hidden: int = 96, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.stem = nn.Conv1d(MELS, width, 8, stride=4, padding=2)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(width, width, 5, padding=2) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.letters = nn.Embedding(LETTERS + 1, width)  # a blank marks the beginning
        self.prediction = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.joint = Joint(width, hidden)

    def forward(
        self,
        audio: Tensor,
        audio_lengths: Tensor,
        labels: Tensor,
        label_lengths: Tensor,
        **others: Any,
    ) -> dict[str, Tensor]:
        """Return the loss, and in evaluation the letters read; takes batches of `sounds.loader`."""
        encoded, time_lengths = self.encode(audio, audio_lengths)
        predicted, _ = self.prediction(self.letters(F.pad(labels, (1, 0), value=BLANK)))
        predicted = self.dropout(predicted)
        loss = self.joint(encoded, predicted, labels, time_lengths, label_lengths)
        if self.training:
            return {"loss": loss}
        return {"loss": loss, "read": self.read(encoded, time_lengths)}

    def encode(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return features of (rows, frames / 4, width), and how many of them belong to each row.

        Values beyond the end of a row are zero before every convolution, so padding changes
        nothing.
        """
        inside = _inside(audio.shape[1], audio_lengths)
        hidden = self.stem((audio * inside).transpose(1, 2)).transpose(1, 2)
        lengths = (audio_lengths // 4).clamp(min=1)
        inside = _inside(hidden.shape[1], lengths)
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            given = (norm(hidden) * inside).transpose(1, 2)
            hidden = hidden + F.gelu(convolution(given)).transpose(1, 2)
        return self.dropout(hidden), lengths

    @torch.no_grad()
    def read(self, encoded: Tensor, time_lengths: Tensor) -> Tensor:
        """Return the letters read, of (rows, most letters), padded with blanks."""
        rows = len(encoded)
        latest = torch.full((rows,), BLANK, device=encoded.device)
        predicted, state = self.prediction(self.letters(latest[:, None]))
        heard = []
        for frame in range(encoded.shape[1]):
            goes_on = frame < time_lengths
            for _ in range(_MOST_IN_A_FRAME):
                scores = self.joint.logits(encoded[:, frame : frame + 1], predicted)
                best = scores[:, 0, 0].argmax(-1).where(goes_on, BLANK)
                goes_on = best != BLANK
                if not goes_on.any():
                    break
                heard.append(best)
                next_predicted, next_state = self.prediction(self.letters(best[:, None]), state)
                predicted = next_predicted.where(goes_on[:, None, None], predicted)
                state = next_state.where(goes_on[None, :, None], state)
        if not heard:
            return latest[:, None]
        # Rows emit letters at different times, so move their letters to the front.
        letters = torch.stack(heard, 1)
        order = (letters == BLANK).int().argsort(dim=1, stable=True)
        return letters.gather(1, order)


def _inside(length: int, lengths: Tensor) -> Tensor:
    """Return which places belong to a row, of (rows, length, 1)."""
    return (torch.arange(length, device=lengths.device) < lengths[:, None])[..., None]


def update_letter_errors(metric: "LetterErrorRate", outputs: Any, batch: Any) -> None:
    """Update `LetterErrorRate` with a microbatch."""
    metric.update(outputs["read"], batch["labels"], batch["label_lengths"])


class LetterErrorRate(LetterErrors):
    """Letters to insert, remove or replace, per correct letter.

    >>> metric = LetterErrorRate()
    >>> metric.update(torch.tensor([[1, 2, 0]]), torch.tensor([[1, 3]]), torch.tensor([2]))
    >>> metric.compute()
    tensor(0.5000)
    """

    def update(self, read: Tensor, labels: Tensor, label_lengths: Tensor) -> None:
        """Count rows.

        Args:
            read: of (rows, letters), padded with blanks.
            labels: of (rows, letters).
            label_lengths: letters of each row.
        """
        for row, right, count in zip(
            read.tolist(), labels.cpu(), label_lengths.tolist(), strict=True
        ):
            self.count([each for each in row if each != BLANK], right[:count].tolist())
