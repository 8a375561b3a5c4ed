"""The transducer's loss sums over all alignments, and its gradient matches the whole batch."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sounds
from automicro import Microbatcher
from automicro.features import MicrobatchUnit, Nested
from transducer import Transducer, transducer_loss

FRAMES, LABELS, CLASSES = 4, 3, 5


def over_all_alignments(logits: Tensor, targets: Tensor, frames: int, labels: int) -> Tensor:
    """Return the negative log of the sum over all alignments, each enumerated as a path."""
    scores = logits.log_softmax(-1)
    total = []
    # The positions of the labels among all steps but the last blank.
    for places in itertools.combinations(range(frames + labels - 1), labels):
        frame = label = 0
        score = torch.zeros((), dtype=logits.dtype)
        for step in range(frames + labels - 1):
            if step in places:
                score = score + scores[frame, label, targets[label]]
                label += 1
            else:
                score = score + scores[frame, label, 0]
                frame += 1
        total.append(score + scores[frame, label, 0])
    assert len(total) == math.comb(frames + labels - 1, labels)
    return -torch.stack(total).logsumexp(0)


def rows(lengths: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    logits = 3 * torch.randn(len(lengths), FRAMES, LABELS + 1, CLASSES, dtype=torch.double)
    targets = torch.randint(1, CLASSES, (len(lengths), LABELS))
    frames, labels = (torch.tensor(each) for each in zip(*lengths, strict=True))
    return logits.requires_grad_(), targets, frames, labels


RAGGED = [(4, 3), (1, 3), (4, 0), (1, 0), (3, 1), (2, 2), (4, 1)]


def test_loss_and_gradient_match_sum_over_all_alignments() -> None:
    logits, targets, frames, labels = rows(RAGGED)
    found = transducer_loss(logits, targets, frames, labels, reduction="none")
    expected = torch.stack(
        [over_all_alignments(logits[i], targets[i], *RAGGED[i]) for i in range(len(RAGGED))]
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for reduction, reduced in (("mean", expected.mean()), ("sum", expected.sum())):
        loss = transducer_loss(logits, targets, frames, labels, reduction=reduction)
        torch.testing.assert_close(loss, reduced, rtol=1e-12, atol=0)
    weights = torch.rand(len(RAGGED), dtype=torch.double)
    (slopes,) = torch.autograd.grad(found @ weights, logits)
    (wanted,) = torch.autograd.grad(expected @ weights, logits)
    torch.testing.assert_close(slopes, wanted, rtol=1e-10, atol=1e-12)
    assert bool((slopes[1, 1:] == 0).all()), "what lies behind a row's frames counts for nothing"
    assert bool((slopes[2, :, 1:] == 0).all()), "and what lies behind its letters"


def test_padding_values_do_not_change_loss() -> None:
    logits, targets, frames, labels = rows([(2, 1), (4, 3)])
    loss = transducer_loss(logits, targets, frames, labels)
    padded = logits.detach().clone()
    padded[0, 2:] = 1e4
    padded[0, :, 2:] = -1e4
    padded_targets = targets.clone()
    padded_targets[0, 1:] = 0
    again = transducer_loss(padded, padded_targets, frames, labels)
    assert float(again) == pytest.approx(float(loss.detach()), abs=1e-12)


def test_long_rows_in_single_and_half_precision_are_finite() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 200, 41, 9)
    targets = torch.randint(1, 9, (2, 40))
    lengths = torch.tensor([200, 150]), torch.tensor([40, 10])
    wide = transducer_loss(logits.double(), targets, *lengths)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        given = logits.to(dtype, copy=True).requires_grad_()
        loss = transducer_loss(given, targets, *lengths)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(float(wide), rel=tolerance)
        assert given.grad is not None
        assert bool(given.grad.isfinite().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "all"}, r"reduction='all' is not known: say 'mean', 'sum' or 'none'"),
        ({"time_lengths": torch.tensor([5, 1])}, r"time_lengths=\[5, 1\] is not between 1 and 4"),
        ({"time_lengths": torch.tensor([0, 1])}, r"time_lengths=\[0, 1\] is not between 1 and 4"),
        ({"label_lengths": torch.tensor([4, 1])}, r"label_lengths=\[4, 1\] is not between 0 and 3"),
        ({"label_lengths": torch.tensor([1])}, r"label_lengths=\[1\] is not .* each of 2 rows"),
        ({"targets": torch.ones(2, 4).long()}, r"\(2, 4, 4, 5\) and targets of shape \(2, 4\)"),
    ],
)
def test_inconsistent_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    logits, targets, frames, labels = rows([(4, 3), (2, 1)])
    given = {"targets": targets, "time_lengths": frames, "label_lengths": labels, **change}
    with pytest.raises(ValueError, match=message):
        transducer_loss(logits, **given)


def model_and_batch(**options: Any) -> tuple[Transducer, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Transducer(width=8, hidden=12, layers=2, **options).double()
    batch = next(iter(sounds.loader("train", batch_size=10, num_rows=10)))
    batch["audio"] = batch["audio"].double()
    return model, batch


def gradient(model: torch.nn.Module) -> Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("nested", "unit", "size"),
    [
        (None, "seconds", 10),
        ({"joint": 3}, "rows", None),
        pytest.param({"joint": 2}, "seconds", 10, marks=pytest.mark.sweep),
        pytest.param({"joint": {"batch_split_factor": 3}}, "rows", 4, marks=pytest.mark.sweep),
    ],
)
def test_gradient_matches_whole_batch(unit: str, nested: Any, size: int | None) -> None:
    model, batch = model_and_batch()
    whole = model(**batch)["loss"]
    whole.backward()
    expected = gradient(model)
    features = [MicrobatchUnit(unit), Nested(nested)]
    microbatcher = Microbatcher(
        model, microbatch_size=size, features=features, loss_average="samples"
    )
    result = microbatcher.backward(batch)
    assert (result.num_microbatches > 1) == (size is not None)
    assert (nested is None) == (result.nested_sizes == {})
    assert float(result.loss) == pytest.approx(float(whole.detach()), abs=1e-10)
    assert (gradient(model) - expected).abs().max() < 1e-9
