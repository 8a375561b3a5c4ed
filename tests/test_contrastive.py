"""Contrastive losses give the gradient of the whole batch, with encoders run in slices."""

import contextlib
import copy
import math
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import MemoryBudget, Microbatcher, Trainer
from automicro.contrastive import Contrastive, InfoNCE
from automicro.features import WhenTooLarge
from automicro.savers.recompute import find_blocks
from tests.sweeps import mostly_in_sweeps
from tests.torture.engine.subject import begin_at_level

ROWS, FEATURES, WORDS = 13, 6, 50
TEMPERATURE = float(torch.exp(-torch.tensor(-math.log(0.07)).double()))  # a float32 of the model


class Text(nn.Module):
    """Encodes text as the mean over unmasked tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.head = nn.Linear(16, FEATURES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.dropout(self.words(ids).tanh()) * mask[..., None]
        encoded: Tensor = self.head(hidden.sum(1) / mask.sum(1, keepdim=True))
        return encoded


class Image(nn.Module):
    """Encodes images with a convolution."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Dropout(dropout), nn.Flatten()
        )
        self.head = nn.Linear(8 * 25, FEATURES)

    def forward(self, pixels: Tensor) -> Tensor:
        encoded: Tensor = self.head(self.layers(pixels))
        return encoded


def batch_of(rows: int = ROWS) -> dict[str, Any]:
    torch.manual_seed(1)
    lengths = torch.randint(1, 8, (rows,))
    return {
        "text": {
            "ids": torch.randint(WORDS, (rows, 7)),
            "mask": (torch.arange(7) < lengths[:, None]).double(),
        },
        "image": torch.randn(rows, 1, 5, 5, dtype=torch.double),
    }


def towers(dropout: float = 0.0) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"text": Text(dropout).double(), "image": Image(dropout).double()}


def plain_loss(text: Tensor, image: Tensor, temperature: Any = TEMPERATURE) -> Tensor:
    """Return the loss as in the papers, from the full matrix of similarities."""
    similarities = F.normalize(text, dim=-1) @ F.normalize(image, dim=-1).T / temperature
    right = torch.arange(len(text))
    return (F.cross_entropy(similarities, right) + F.cross_entropy(similarities.T, right)) / 2


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, each in found.items():
        torch.testing.assert_close(each, wanted[name], rtol=1e-9, atol=1e-12, msg=name)


def contrastive(size: Any = "auto", dropout: float = 0.0, **options: Any) -> Contrastive:
    loss = InfoNCE(microbatch_size=options.pop("loss_size", size), **options).double()
    return Contrastive(towers(dropout), loss, microbatch_size=size)


def on_whole_batch() -> tuple[Tensor, dict[str, Tensor]]:
    whole = nn.ModuleDict(towers())
    batch = batch_of()
    loss = plain_loss(whole["text"](**batch["text"]), whole["image"](batch["image"]))
    loss.backward()
    return loss.detach(), gradients(whole)


def test_trained_temperature_gradient_matches_whole_batch() -> None:
    model = contrastive(3)
    model(**batch_of())["loss"].backward()
    found = gradients(model)["loss.log_scale"]
    assert isinstance(model.loss, InfoNCE)
    outputs = model(**batch_of())
    text, image = outputs["text"].detach(), outputs["image"].detach()
    log_scale = model.loss.log_scale.detach().clone().requires_grad_()
    plain_loss(text, image, temperature=torch.exp(-log_scale)).backward()
    torch.testing.assert_close(found, log_scale.grad, rtol=1e-9, atol=1e-12)
    assert model.loss.temperature == pytest.approx(0.07)


def test_dropout_is_replayed() -> None:
    model = contrastive(4, dropout=0.5)
    batch = batch_of()
    torch.manual_seed(5)
    outputs = model(**batch)
    outputs["loss"].backward()
    found = gradients(model.encoders)
    # The same slices in order, with all activations kept.
    whole = nn.ModuleDict(towers(0.5))
    sizes = model.sizes["text"]
    torch.manual_seed(5)
    ids, mask = (batch["text"][name].split(sizes) for name in ("ids", "mask"))
    text = torch.cat([whole["text"](*rows) for rows in zip(ids, mask, strict=True)])
    image = torch.cat([whole["image"](rows) for rows in batch["image"].split(sizes)])
    loss = plain_loss(text, image)
    loss.backward()
    torch.testing.assert_close(outputs["loss"].detach(), loss.detach(), rtol=1e-12, atol=0)
    assert_same(found, gradients(whole))


def test_one_encoder_may_have_two_names() -> None:
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    plain = copy.deepcopy(tower)
    loss = InfoNCE(trains_temperature=False).double()
    model = Contrastive({"one": tower, "other": tower}, loss, microbatch_size=2)
    one, other = torch.randn(2, 7, 5, dtype=torch.double)
    model(one=one, other=other)["loss"].backward()
    plain_loss(plain(one), plain(other)).backward()
    assert_same(gradients(tower), gradients(plain))


def test_negatives_are_candidates_only_for_anchors() -> None:
    torch.manual_seed(0)
    rows = [torch.randn(4, 3, dtype=torch.double) for _ in range(3)]
    loss = InfoNCE(0.5, is_symmetric=False).double()(*rows)
    anchors, positives, negatives = (F.normalize(each, dim=-1) for each in rows)
    among = anchors @ torch.cat([positives, negatives]).T / 0.5
    torch.testing.assert_close(loss, F.cross_entropy(among, torch.arange(4)))


def test_microbatcher_and_trainer_gradients_match_whole_batch() -> None:
    model = contrastive(4, trains_temperature=False)
    microbatcher = Microbatcher(
        model, microbatch_size=None, eval_microbatch_size=None, loss_average="samples"
    )
    result = microbatcher.backward(batch_of())
    loss, wanted = on_whole_batch()
    assert float(result.loss) == pytest.approx(float(loss), rel=1e-9)
    assert_same(gradients(model.encoders), wanted)
    before = copy.deepcopy(model.state_dict())
    Trainer(
        model,
        [batch_of()],
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        max_duration="1ba",
        microbatch_size=None,
        eval_microbatch_size=None,
        loss_average="samples",
        progress=False,
    ).fit()
    for name, each in model.encoders.named_parameters():
        moved = before[f"encoders.{name}"] - each.detach()
        torch.testing.assert_close(moved, wanted[name], rtol=1e-7, atol=1e-10)


def peak(rows: int, size: Any) -> int:
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(32, 2048), nn.GELU(), nn.Linear(2048, 8))
    model = Contrastive(
        {"one": tower, "other": tower}, InfoNCE(microbatch_size=8), microbatch_size=size
    )
    data = {"one": torch.randn(rows, 32), "other": torch.randn(rows, 32)}
    with MemoryBudget(None) as budget:
        model(**data)["loss"].backward()
    return budget.peak_bytes


def test_peak_memory_grows_only_with_representations() -> None:
    rows = (32, 64, 128)
    peaks = [peak(each, 8) for each in rows]
    # Each row adds two representations of 8 numbers, with gradients, copies and sums: far less
    # than its activations in the encoders, twice 2048 numbers in each of the two.
    grown = (peaks[-1] - peaks[0]) / (rows[-1] - rows[0])
    assert grown < 0.05 * 2 * 2 * 2048 * 4
    assert peaks[-1] < 1.5 * peaks[0]
    assert peak(128, None) > 4 * peaks[-1]


def test_oom_shrinks_only_slices_of_large_encoder() -> None:
    torch.manual_seed(0)
    small, large = (
        nn.Linear(32, 8),
        nn.Sequential(nn.Linear(32, 4096), nn.GELU(), nn.Linear(4096, 8)),
    )
    model = Contrastive({"small": small, "large": large})
    batch = {"small": torch.randn(256, 32), "large": torch.randn(256, 32)}
    microbatcher = Microbatcher(
        model,
        microbatch_size=None,
        eval_microbatch_size=None,
        loss_average="samples",
        memory_limit="4MiB",
    )
    result = microbatcher.backward(batch)
    assert result.num_microbatches == 1
    assert max(model.sizes["large"]) < 256
    assert model.sizes["small"] == [256]
    found = gradients(model)
    microbatcher = Microbatcher(
        model, microbatch_size=None, eval_microbatch_size=None, loss_average="samples"
    )
    microbatcher.backward(batch)
    for name, each in gradients(model).items():
        torch.testing.assert_close(found[name], each, rtol=1e-3, atol=1e-6)


WHOLE: Any = {
    "microbatch_size": None,
    "eval_microbatch_size": None,
    "loss_average": "samples",
}


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest error of any parameter, relative to its gradient."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - each).norm() / each.norm()) for name, each in wanted.items())


def compiled_towers(how: str) -> dict[str, nn.Module]:
    compiled: Any = towers()
    if how == "wrapped":
        wrapped: Any = torch.compile
        return {name: wrapped(each, backend="eager") for name, each in compiled.items()}
    for each in compiled.values():
        each.compile(backend="eager")
    return cast(dict[str, nn.Module], compiled)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
@pytest.mark.sweep
def test_encoders_may_be_compiled(how: str) -> None:
    loss = InfoNCE(microbatch_size=4, trains_temperature=False).double()
    model = Contrastive(compiled_towers(how), loss, microbatch_size=4)
    Microbatcher(model, **WHOLE).backward(batch_of())
    found = gradients(model.encoders)
    assert_same(
        {name.replace("_orig_mod.", ""): each for name, each in found.items()}, on_whole_batch()[1]
    )
    assert model.sizes["text"] == [4, 3, 3, 3]


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.narrow(self.dropout(F.gelu(self.dropout(self.wide(x)))))
        return out


def layered(size: Any, dropout: float) -> Contrastive:
    torch.manual_seed(0)
    encoders = {
        name: nn.Sequential(*(Layer(dropout) for _ in range(3)), nn.Linear(8, FEATURES))
        for name in ("one", "other")
    }
    return Contrastive(encoders, InfoNCE(microbatch_size=size), microbatch_size=size).double()


@pytest.mark.parametrize("level", mostly_in_sweeps([1, 2], quick=[2]))
@pytest.mark.parametrize("size", [4, None, "auto"])
def test_levels_give_identical_bits(size: Any, level: int) -> None:
    torch.manual_seed(1)
    batch = {name: torch.randn(ROWS, 8, dtype=torch.double) for name in ("one", "other")}
    found: list[Any] = []
    for climbs in (0, level):
        model = layered(size, dropout=0.4)
        microbatcher = Microbatcher(
            model, features=[WhenTooLarge(["recompute", "offload"])], **WHOLE
        )
        begin_at_level(microbatcher, climbs)
        torch.manual_seed(2)
        result = microbatcher.backward(batch)
        found.append((gradients(model), float(result.loss), torch.get_rng_state()))
    assert result.level == ["", "recompute", "recompute + offload"][level]
    (one, *rest), (other, *others) = found
    assert distance(one, other) == 0
    assert rest[0] == others[0]
    assert torch.equal(rest[1], others[1])


def test_recompute_applies_to_layers_within_encoders() -> None:
    model = layered(4, dropout=0.0)
    assert list(find_blocks([model])) == ["encoders.one", "encoders.other"]
    microbatcher = Microbatcher(model, features=[WhenTooLarge("recompute")], **WHOLE)
    begin_at_level(microbatcher, 1)
    with pytest.MonkeyPatch.context() as patch:
        seen: list[str] = []

        def replaced(block: Any, random: Any) -> contextlib.AbstractContextManager[None]:
            seen.append(block.name)
            return contextlib.nullcontext()

        patch.setattr("automicro.savers.recompute._replaced", replaced)
        microbatcher.backward(
            {name: torch.randn(ROWS, 8, dtype=torch.double) for name in ("one", "other")}
        )
    assert seen == [f"encoders.{name}.{at}" for name in ("one", "other") for at in range(3)]


class Embeddings(nn.Module):
    """Returns one output of a transformers encoder as a tensor."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, **inputs: Tensor) -> Tensor:
        found: Tensor = self.model(**inputs)[self.name]
        return found


@pytest.mark.parametrize("level", [0, 1])
def test_transformers_clip_gradient_matches_its_own_loss(level: int) -> None:
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = transformers.CLIPTextConfig(vocab_size=60, max_position_embeddings=8, **small)
    vision = transformers.CLIPVisionConfig(image_size=12, patch_size=6, **small)
    config = transformers.CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=FEATURES
    )
    torch.manual_seed(0)
    clip = transformers.CLIPModel(config).double()
    torch.manual_seed(1)
    words = {"input_ids": torch.randint(3, 60, (ROWS, 8))}
    images = {"pixel_values": torch.randn(ROWS, 3, 12, 12, dtype=torch.double)}
    clip(**words, **images, return_loss=True).loss.backward()
    wanted = gradients(clip)
    wanted["logit_scale"] = wanted["logit_scale"].view(1)
    encoders: dict[str, nn.Module] = {}
    for name, kind, each in (
        ("text", transformers.CLIPTextModelWithProjection, text),
        ("image", transformers.CLIPVisionModelWithProjection, vision),
    ):
        each.projection_dim = FEATURES
        encoder = kind(each).double()
        encoder.load_state_dict(clip.state_dict(), strict=False)
        encoders[name] = Embeddings(encoder, f"{name}_embeds")
    loss = InfoNCE(math.exp(-float(clip.logit_scale.detach())), microbatch_size=5).double()
    loss.log_scale.data.copy_(clip.logit_scale.data)
    model = Contrastive(encoders, loss, microbatch_size=4)
    microbatcher = Microbatcher(model, features=[WhenTooLarge("recompute")], **WHOLE)
    begin_at_level(microbatcher, level)
    result = microbatcher.backward({"text": words, "image": images})
    assert max(model.sizes["text"]) == max(model.sizes["image"]) == 4
    assert result.level == ["plain", "recompute"][level]
    found = {
        name.split(".model.", 1)[-1].replace("loss.log_scale", "logit_scale"): each
        for name, each in gradients(model).items()
    }
    assert_same(found, wanted)
