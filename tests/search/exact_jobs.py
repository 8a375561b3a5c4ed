"""Jobs whose split is exact, as data: none of them may be warned about, in any precision."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

ROWS = 8
FEATURES = 6
CLASSES = 4
LENGTH = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactJob:
    """A model, what makes its batches from a seeded generator, and the options beside them."""

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    draws: bool = False
    tolerance: float = 1e-9
    lacks: tuple[str, ...] = ()  # precisions in which torch cannot run it


def mlp(*between: nn.Module, outputs: int = CLASSES) -> nn.Sequential:
    inside = between or (nn.Tanh(),)
    return nn.Sequential(nn.Linear(FEATURES, 8), *inside, nn.Linear(8, outputs))


def x(draws: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*(size or (ROWS, FEATURES)), generator=draws, dtype=torch.float64)


def classes(draws: torch.Generator, *size: int) -> Tensor:
    return torch.randint(CLASSES, size or (ROWS,), generator=draws)


def ignored(draws: torch.Generator, targets: Tensor) -> Tensor:
    """Uneven numbers of targets: of each row only the first few count."""
    if targets.dim() == 1:
        return targets.where(torch.rand(len(targets), generator=draws) < 0.7, -100)
    lengths = torch.randint(1, targets.shape[1] + 1, (len(targets), 1), generator=draws)
    lengths[0] = targets.shape[1]
    return targets.where(torch.arange(targets.shape[1])[None] < lengths, -100)


def pair(target: Callable[[torch.Generator], Any]) -> Callable[[torch.Generator], Any]:
    return lambda draws: (x(draws), target(draws))


def numbers(draws: torch.Generator) -> Tensor:
    return x(draws, ROWS, CLASSES)


def bits(draws: torch.Generator) -> Tensor:
    return (x(draws, ROWS, CLASSES) > 0).double()


def odds(draws: torch.Generator) -> Tensor:
    return x(draws, ROWS, CLASSES).softmax(1)


def weight() -> Tensor:
    return torch.tensor([0.25, 2.5, 1.0, 0.625])


def _loss(loss: Callable[..., Any], target: Any, **more: Any) -> ExactJob:
    model = more.pop("model", mlp)
    return ExactJob(
        model=model,
        batch=pair(target),
        options={"loss_fn": loss, **more.pop("options", {})},
        **more,
    )


def _layer(*between: Callable[[], nn.Module], **more: Any) -> ExactJob:
    return ExactJob(
        model=lambda: mlp(*(each() for each in between)),
        batch=pair(classes),
        options={"loss_fn": nn.CrossEntropyLoss()},
        **more,
    )


def _model(model: Callable[[], nn.Module], **more: Any) -> ExactJob:
    batch = more.pop("batch", pair(classes))
    return ExactJob(model=model, batch=batch, options={"loss_fn": nn.CrossEntropyLoss()}, **more)


def _forward(forward: Callable[[Any, Any], Any], **more: Any) -> ExactJob:
    options = {"forward": forward, **more.pop("options", {})}
    return ExactJob(
        model=more.pop("model", mlp),
        batch=more.pop("batch", pair(numbers)),
        options=options,
        **more,
    )


class LogOdds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, rows: Tensor) -> Any:
        return self.body(rows).log_softmax(-1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(FEATURES, FEATURES, bias=False)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, rows: Tensor) -> Any:
        return self.head(F.linear(torch.tanh(self.square(rows)), self.square.weight.T))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(FEATURES, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.head, self.reentrant = nn.Linear(8, CLASSES), reentrant

    def forward(self, rows: Tensor) -> Any:
        return self.head(checkpoint(self.body, self.stem(rows), use_reentrant=self.reentrant))


class Last(nn.Module):
    """The last step of a recurrent layer."""

    def __init__(self, body: nn.Module, hidden: int = 8) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(hidden, CLASSES)

    def forward(self, rows: Tensor) -> Any:
        out = self.body(rows)
        return self.head((out[0] if isinstance(out, tuple) else out)[:, -1])


def images(draws: torch.Generator) -> Any:
    return x(draws, ROWS, 3, 6, 6), classes(draws)


def sequences(draws: torch.Generator) -> Any:
    return x(draws, ROWS, LENGTH, FEATURES), classes(draws)


def conv(*between: nn.Module) -> nn.Sequential:
    ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *between, *ends)


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(FEATURES, 2, 12, batch_first=True, **options)


def _frozen_batchnorm() -> nn.Module:
    model = mlp(nn.BatchNorm1d(8), nn.Tanh())
    model[1].eval()
    return model


def _zero_head() -> nn.Module:
    model = mlp()
    for parameter in model[2].parameters():
        nn.init.zeros_(parameter)
    return model


def _low_rank() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def _per_pixel(draws: torch.Generator) -> Any:
    kept = ignored(draws, classes(draws, ROWS, 36)).view(ROWS, 6, 6)
    return x(draws, ROWS, 3, 6, 6), kept


def _decayed(model: nn.Module, batch: Any) -> Any:
    decay = sum((p**2).sum() for p in model.parameters())
    return F.mse_loss(model(batch[0]), batch[1]) + 0.01 * decay


def _gradient_penalty(model: nn.Module, batch: Any) -> Any:
    rows = batch[0].detach().requires_grad_(True)
    out = model(rows)
    (slope,) = torch.autograd.grad(out.sum(), rows, create_graph=True)
    return F.mse_loss(out, batch[1]) + (slope.norm(dim=1) - 1).square().mean()


def _advantage(model: nn.Module, batch: Any) -> Any:
    chosen = model(batch[0]).log_softmax(-1)[:, 0]
    return -(chosen * batch[1].sum(1) * 100).mean()


def _cancelling(model: nn.Module, batch: Any) -> Any:
    """A likelihood whose constant is far larger than what is learned."""
    return (0.5 * ((model(batch[0]) - batch[1]) / 10) ** 2 - 9.2).sum(1).mean()


def _two_views(model: nn.Module, batch: Any) -> Any:
    one, two = model(batch[0]), model(batch[0] * 0.9)
    return F.mse_loss(one, two.detach()) + F.mse_loss(one, batch[1])


def _named(model: nn.Module, batch: Any) -> Any:
    out = model(batch[0])
    return {"squares": F.mse_loss(out, batch[1]), "size": 0.1 * out.abs().mean()}


def _sampled_but_scaled(model: nn.Module, batch: Any) -> Any:
    out = model(batch[0])
    return F.mse_loss(out + 0.1 * torch.randn_like(out), batch[1])


def _triplets(model: nn.Module, batch: Any) -> Any:
    return F.triplet_margin_loss(model(batch[0]), model(batch[0] * 0.9), batch[1])


LOSSES: dict[str, ExactJob] = {
    "CrossEntropyLoss": _loss(nn.CrossEntropyLoss(), classes),
    "CrossEntropyLoss sum": _loss(nn.CrossEntropyLoss(reduction="sum"), classes),
    "CrossEntropyLoss smooth": _loss(nn.CrossEntropyLoss(label_smoothing=0.2), classes),
    "CrossEntropyLoss weights": _loss(nn.CrossEntropyLoss(weight()), classes),
    "CrossEntropyLoss ignored": _loss(
        nn.CrossEntropyLoss(), lambda draws: ignored(draws, classes(draws))
    ),
    "CrossEntropyLoss own index": _loss(nn.CrossEntropyLoss(ignore_index=3), classes),
    "CrossEntropyLoss odds": _loss(nn.CrossEntropyLoss(), odds),
    "CrossEntropyLoss pixels": ExactJob(
        model=lambda: nn.Conv2d(3, CLASSES, 3, padding=1),
        batch=_per_pixel,
        options={"loss_fn": nn.CrossEntropyLoss(weight())},
    ),
    "cross_entropy": _loss(F.cross_entropy, classes),
    "NLLLoss": _loss(nn.NLLLoss(), classes, model=LogOdds),
    "NLLLoss weights": _loss(nn.NLLLoss(weight()), classes, model=LogOdds),
    "KLDivLoss batchmean": _loss(nn.KLDivLoss(reduction="batchmean"), odds, model=LogOdds),
    "KLDivLoss sum": _loss(nn.KLDivLoss(reduction="sum"), odds, model=LogOdds),
    "MSELoss": _loss(nn.MSELoss(), numbers),
    "MSELoss sum": _loss(nn.MSELoss(reduction="sum"), numbers),
    "L1Loss": _loss(nn.L1Loss(), numbers),
    "HuberLoss": _loss(nn.HuberLoss(), numbers),
    "SmoothL1Loss": _loss(nn.SmoothL1Loss(beta=0.5), numbers),
    "SoftMarginLoss": _loss(nn.SoftMarginLoss(), lambda draws: numbers(draws).sign()),
    "PoissonNLLLoss": _loss(nn.PoissonNLLLoss(), bits),
    "MultiMarginLoss": _loss(nn.MultiMarginLoss(), classes, lacks=("bf16",)),
    "MultiLabelSoftMarginLoss": _loss(nn.MultiLabelSoftMarginLoss(), bits),
    "BCEWithLogitsLoss": _loss(nn.BCEWithLogitsLoss(), bits),
    "BCEWithLogitsLoss pos_weight": _loss(nn.BCEWithLogitsLoss(pos_weight=weight()), bits),
    "BCEWithLogitsLoss sum": _loss(nn.BCEWithLogitsLoss(reduction="sum"), bits),
    "own function": _loss(lambda out, y: 2 * F.cross_entropy(out.float(), y), classes),
    "own mean of rows": _loss(lambda out, y: ((out - y) ** 2).sum(1).mean(), numbers),
    "own sum, declared": _loss(
        lambda out, y: ((out - y) ** 2).sum(), numbers, options={"loss_average": "none"}
    ),
    "small": _loss(lambda out, y: 1e-6 * F.mse_loss(out, y), numbers),
    "large": _loss(lambda out, y: 1e6 * F.mse_loss(out, y), numbers),
    "triplets": _forward(_triplets),
    "weight decay": _forward(_decayed),
    "gradient penalty": _forward(_gradient_penalty),
    "advantage": _forward(_advantage),
    "cancelling": _forward(_cancelling),
    "consistency": _forward(_two_views),
    "several named": _forward(_named),
    "noise in the loss": _forward(_sampled_but_scaled, draws=True),
}

LAYERS: dict[str, ExactJob] = {
    "tied": _model(Tied),
    "checkpoint": _model(lambda: Checkpointed(reentrant=False)),
    "reentrant checkpoint": _model(lambda: Checkpointed(reentrant=True)),
    "frozen BatchNorm": _model(_frozen_batchnorm),
    "zero head": _model(_zero_head),
    "frozen layers": _model(_low_rank),
    "weight norm": _model(
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, 8)), mlp_head())
    ),
    "LayerNorm": _layer(lambda: nn.LayerNorm(8), nn.GELU),
    "RMSNorm": _layer(lambda: nn.RMSNorm(8), nn.SiLU),
    "inplace ReLU": _layer(lambda: nn.ReLU(inplace=True)),
    "dropout": _layer(nn.Tanh, lambda: nn.Dropout(0.3), draws=True),
    "alpha dropout": _layer(nn.SELU, lambda: nn.AlphaDropout(0.2), draws=True),
    "RReLU": _layer(nn.RReLU, draws=True),
    "deep tanh": _layer(
        *[layer for _ in range(12) for layer in (lambda: nn.Linear(8, 8), nn.Tanh)]
    ),
    "conv": _model(lambda: conv(nn.ReLU()), batch=images),
    "GroupNorm": _model(lambda: conv(nn.GroupNorm(2, 4), nn.ReLU()), batch=images),
    "InstanceNorm": _model(lambda: conv(nn.InstanceNorm2d(4), nn.ReLU()), batch=images),
    "InstanceNorm, affine": _model(
        lambda: conv(nn.InstanceNorm2d(4, affine=True), nn.ReLU()), batch=images
    ),
    "LocalResponseNorm": _model(
        lambda: conv(nn.LocalResponseNorm(2)), batch=images, lacks=("bf16",)
    ),
    "Dropout2d": _model(lambda: conv(nn.Dropout2d(0.3)), batch=images, draws=True),
    "lstm": _model(lambda: Last(nn.LSTM(FEATURES, 8, batch_first=True)), batch=sequences),
    "lstm with dropout": _model(
        lambda: Last(nn.LSTM(FEATURES, 8, 2, dropout=0.3, batch_first=True)),
        batch=sequences,
        draws=True,
    ),
    "gru": _model(lambda: Last(nn.GRU(FEATURES, 8, batch_first=True)), batch=sequences),
    "encoder layer": _model(lambda: Last(encoder(dropout=0.0), FEATURES), batch=sequences),
    "encoder layer with dropout": _model(
        lambda: Last(encoder(dropout=0.2), FEATURES), batch=sequences, draws=True
    ),
}


def mlp_head() -> nn.Module:
    return nn.Linear(8, CLASSES)


def in_precision(value: Any, dtype: torch.dtype) -> Any:
    """A batch whose floating-point tensors have this dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: in_precision(each, dtype) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(in_precision(each, dtype) for each in value)
    return value
