"""Contrastive losses give the gradient of the whole batch, with encoders run in slices."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import MemoryBudget, Microbatcher
from automicro.contrastive import Contrastive, InfoNCE
from automicro.features import WhenTooLarge
from tests.cases import difference
from tests.cases import gradients as gradients_of
from tests.sweeps import mostly_in_sweeps
from tests.torture.engine.subject import begin_at_level

ROWS, FEATURES, WORDS = 13, 6, 50
TEMPERATURE = float(torch.exp(-torch.tensor(-math.log(0.07)).double()))  # a float32 of the model
WHOLE: Any = {"microbatch_size": None, "eval_microbatch_size": None, "loss_average": "samples"}


class Text(nn.Module):
    """Encodes text as the mean over unmasked tokens."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, FEATURES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        hidden = self.dropout(self.words(ids).tanh()) * mask[..., None]
        return self.head(hidden.sum(1) / mask.sum(1, keepdim=True))


def batch_of(rows: int = ROWS) -> dict[str, Any]:
    torch.manual_seed(1)
    mask = (torch.arange(7) < torch.randint(1, 8, (rows,))[:, None]).double()
    text = {"ids": torch.randint(WORDS, (rows, 7)), "mask": mask}
    return {"text": text, "image": torch.randn(rows, 1, 5, 5, dtype=torch.double)}


def towers(dropout: float = 0.0) -> nn.ModuleDict:
    torch.manual_seed(0)
    image = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Dropout(dropout), nn.Flatten()
    )
    image.append(nn.Linear(8 * 25, FEATURES))
    return nn.ModuleDict({"text": Text(dropout), "image": image}).double()


def plain_loss(text: Tensor, image: Tensor, temperature: Any = TEMPERATURE) -> Tensor:
    """Return the loss as in the papers, from the full matrix of similarities."""
    similarities = F.normalize(text, dim=-1) @ F.normalize(image, dim=-1).T / temperature
    right = torch.arange(len(text))
    return (F.cross_entropy(similarities, right) + F.cross_entropy(similarities.T, right)) / 2


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = gradients_of(model)
    model.zero_grad()
    return found


def contrastive(size: Any, dropout: float = 0.0, **options: Any) -> Contrastive:
    loss = InfoNCE(microbatch_size=size, **options).double()
    return Contrastive(dict(towers(dropout).items()), loss, microbatch_size=size)


def test_trained_temperature_gradient_matches_whole_batch() -> None:
    model = contrastive(3)
    assert isinstance(model.loss, InfoNCE)
    outputs = model(**batch_of())
    outputs["loss"].backward()
    text, image = outputs["text"].detach(), outputs["image"].detach()
    log_scale = model.loss.log_scale.detach().clone().requires_grad_()
    plain_loss(text, image, temperature=torch.exp(-log_scale)).backward()
    torch.testing.assert_close(model.loss.log_scale.grad, log_scale.grad, rtol=1e-9, atol=1e-12)
    assert model.loss.temperature == pytest.approx(0.07)


def test_dropout_is_replayed() -> None:
    model, batch = contrastive(4, dropout=0.5), batch_of()
    torch.manual_seed(5)
    outputs = model(**batch)
    outputs["loss"].backward()
    # The same slices in order, with all activations kept.
    whole: Any = towers(0.5)
    sizes = model.sizes["text"]
    torch.manual_seed(5)
    ids, mask = (batch["text"][name].split(sizes) for name in ("ids", "mask"))
    text = torch.cat([whole["text"](*rows) for rows in zip(ids, mask, strict=True)])
    image = torch.cat([whole["image"](rows) for rows in batch["image"].split(sizes)])
    loss = plain_loss(text, image)
    loss.backward()
    torch.testing.assert_close(outputs["loss"].detach(), loss.detach(), rtol=1e-12, atol=0)
    assert difference(gradients(model.encoders), gradients(whole)) < 1e-9


def test_negatives_are_candidates_only_for_anchors() -> None:
    rows = [torch.randn(4, 3, dtype=torch.double) for _ in range(3)]
    loss = InfoNCE(0.5, is_symmetric=False).double()(*rows)
    anchors, positives, negatives = (F.normalize(each, dim=-1) for each in rows)
    among = anchors @ torch.cat([positives, negatives]).T / 0.5
    torch.testing.assert_close(loss, F.cross_entropy(among, torch.arange(4)))


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_microbatcher_gradient_matches_whole_batch(compiles: bool) -> None:
    model, whole, batch = contrastive(4, trains_temperature=False), towers(), batch_of()
    if compiles:
        for each in model.encoders.values():
            each.compile(backend="eager")
    result = Microbatcher(model, **WHOLE).backward(batch)
    loss = plain_loss(whole["text"](**batch["text"]), whole["image"](batch["image"]))
    loss.backward()
    assert float(result.loss) == pytest.approx(float(loss.detach()), rel=1e-9)
    assert difference(gradients(model.encoders), gradients(whole)) < 1e-9
    assert model.sizes["text"] == [4, 3, 3, 3]


def peak(rows: int, size: Any) -> int:
    tower = nn.Sequential(nn.Linear(32, 2048), nn.GELU(), nn.Linear(2048, 8))
    loss = InfoNCE(microbatch_size=8)
    model = Contrastive({"one": tower, "other": tower}, loss, microbatch_size=size)
    data = {"one": torch.randn(rows, 32), "other": torch.randn(rows, 32)}
    with MemoryBudget(None) as budget:
        model(**data)["loss"].backward()
    return budget.peak_bytes


def test_peak_memory_grows_only_with_representations() -> None:
    few, many = peak(32, 8), peak(128, 8)
    # Each row adds two representations of 8 numbers, with gradients, copies and sums: far less
    # than its activations in the encoders, twice 2048 numbers in each of the two.
    assert (many - few) / (128 - 32) < 0.05 * 2 * 2 * 2048 * 4
    assert many < 1.5 * few
    assert peak(128, None) > 4 * many


def test_oom_shrinks_only_slices_of_large_encoder() -> None:
    large = nn.Sequential(nn.Linear(32, 4096), nn.GELU(), nn.Linear(4096, 8))
    model = Contrastive({"small": nn.Linear(32, 8), "large": large})
    batch = {"small": torch.randn(256, 32), "large": torch.randn(256, 32)}
    result = Microbatcher(model, memory_limit="4MiB", **WHOLE).backward(batch)
    assert result.num_microbatches == 1
    assert max(model.sizes["large"]) < 256
    assert model.sizes["small"] == [256]
    found = gradients(model)
    Microbatcher(model, **WHOLE).backward(batch)
    for name, each in gradients(model).items():
        torch.testing.assert_close(found[name], each, rtol=1e-3, atol=1e-6)


def layered(size: Any) -> Contrastive:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Dropout(0.4), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    encoders: dict[str, nn.Module] = {
        name: nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)), nn.Linear(8, FEATURES))
        for name in ("one", "other")
    }
    return Contrastive(encoders, InfoNCE(microbatch_size=size), microbatch_size=size).double()


@pytest.mark.parametrize("level", mostly_in_sweeps([1, 2], quick=[2]))
@pytest.mark.parametrize("size", [4, None, "auto"])
def test_levels_give_identical_bits(size: Any, level: int) -> None:
    batch = {name: torch.randn(ROWS, 8, dtype=torch.double) for name in ("one", "other")}
    found: list[Any] = []
    for climbs in (0, level):
        model = layered(size)
        levels = WhenTooLarge(["recompute", "offload"])
        microbatcher = Microbatcher(model, features=[levels], **WHOLE)
        begin_at_level(microbatcher, climbs)
        torch.manual_seed(2)
        result = microbatcher.backward(batch)
        found.append((gradients(model), float(result.loss), torch.get_rng_state()))
    assert result.level == ["", "recompute", "recompute + offload"][level]
    (one, *rest), (other, *others) = found
    assert difference(one, other) == 0
    assert rest[0] == others[0]
    assert torch.equal(rest[1], others[1])
