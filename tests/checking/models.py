"""Models and losses with something in them that matters when a batch is split."""

import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automicro import LossAverageWarning, Microbatcher
from tests.models import (
    CLASSES,
    LENGTH,
    ROWS,
    VOCABULARY,
    Mlp,
    token_targets,
    tokens,
)
from tests.outside import Outside

WEIGHT = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0])


# Losses


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum")


def by_class(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, WEIGHT.to(logits.dtype))


def over_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def over_later_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return over_tokens(logits[:, :-1], targets[:, 1:])


def without_padding(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=0)


def contrastive(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


def two_losses(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    logits = model(batch["tokens"])
    return {
        "language": over_tokens(logits, batch["labels"]),
        "size": logits.square().mean((1, 2)).sum(),
    }


def masked(model: nn.Module, batch: Any) -> Any:
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * batch["mask"]).sum() / batch["mask"].sum()


def masked_and_safe(model: nn.Module, batch: Any) -> Any:
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * batch["mask"]).sum() / (batch["mask"].sum() + 1e-8)


def refers_to_rows(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits @ logits.T, targets)


# Models


class Layered(nn.Module):
    """An `Mlp` between which something happens."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.middle = nn.Identity() if middle is None else middle
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.middle(self.first(x))))


class Centred(nn.Module):
    """Takes the mean over the rows away: a normalisation that nobody knows by name."""

    def forward(self, x: Tensor) -> Any:
        return x - x.mean(0)


class MyNorm(nn.Module):
    """Buffers that one forward writes and the next one reads."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        out = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return out


class Annealed(nn.Module):
    """Counts its forwards in a plain attribute, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.last_seen: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        self.last_seen = x.detach()
        return x / self.steps


class Smoothed(nn.Module):
    """Keeps a tensor in a plain attribute, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = {"of": torch.zeros(8)}

    def forward(self, x: Tensor) -> Any:
        out = x - self.mean["of"].to(x.dtype)
        self.mean["of"] = 0.5 * x.detach().mean(0)
        return out


class Counting(nn.Module):
    """Keeps statistics without computing with them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        return x


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.add_(1.0)


class FirstInPlace(Mlp):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mul_(0.5))


class NumpyNoise(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + torch.from_numpy(np.random.standard_normal(tuple(x.shape))).to(x.dtype)


class OwnNoise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Any:
        return x * torch.from_numpy(self.generator.random((len(x), 1))).to(x.dtype)


class Mixup(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


class LayerDrop(nn.Module):
    """Skips a layer for the whole batch, by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return x if random.random() < 0.1 else self.inner(x)


class Noisy(nn.Module):
    """Draws in all of torch's usual ways, for each row by itself."""

    def forward(self, x: Tensor) -> Any:
        x = x + x.std(1, keepdim=True) * torch.randn_like(x)
        x = x * torch.rand(len(x), 1).to(x.dtype)
        x = x + torch.distributions.Normal(x.detach(), x.exp().detach()).rsample()
        keep = x.new_empty(len(x), 1).bernoulli_(0.8)
        return F.gumbel_softmax(x * keep) + F.dropout(x, 0.3) + torch.bernoulli(x.sigmoid())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class FixedRows(nn.Module):
    """Somebody wrote the batch size out."""

    def forward(self, x: Tensor) -> Any:
        return x.view(ROWS, 2, 4).flatten(1)


class Single(nn.Module):
    """Computes in float32 and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        if self.weight.dtype is not torch.float32:
            raise RuntimeError("expected scalar type Float but found Double")
        return x * self.weight


def state_outside() -> Callable[[nn.Module, Any], Tensor]:
    """A forward that counts its calls where nothing reaches them."""
    outside = Outside(calls=0)

    def forward(model: nn.Module, batch: Any) -> Tensor:
        outside.calls += 1
        loss: Tensor = F.cross_entropy(model(batch[0]), batch[1]) * outside.calls
        return loss

    return forward


def counting_in_a_closure() -> Callable[[nn.Module, Any], Tensor]:
    """A forward that goes by how often it was called."""
    calls: list[int] = []

    def forward(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return F.cross_entropy(model(batch[0]), batch[1]) * len(calls)

    return forward


def distillation() -> Mapping[str, Any]:
    """A forward that gets at a module by its closure."""
    teacher = Layered(nn.BatchNorm1d(8).eval())

    def forward(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0].float()), teacher(batch[0].float()))

    return {"forward": forward, "modules": [teacher]}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def own_gpt2() -> nn.Module:
    """One whose forward averages over all labels that are not ignored, without a shift."""
    model: Any = gpt2()
    model.loss_function = lambda logits, labels, **_: over_tokens(logits, labels)
    return model  # type: ignore[no-any-return]


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config: Any = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
    )
    config.num_labels = CLASSES
    return BertForSequenceClassification(config)


def layered(middle: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Layered(middle())


def dropping_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), encoder, nn.Linear(8, VOCABULARY))


def token_batch() -> Any:
    return tokens(), token_targets()


class States(nn.Module):
    """A GRU with dropout between its layers, its states only."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 6, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.gru(x)[0]


def warnings_of(microbatcher: Microbatcher, *batches: Any) -> list[str]:
    """What is said of the loss's average while these batches are trained on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            microbatcher.backward(batch)
    return [str(each.message) for each in caught if each.category is LossAverageWarning]
