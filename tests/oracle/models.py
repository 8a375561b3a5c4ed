"""Models of the search: each maps the x of a batch to one row of outputs per row."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.oracle.contents import CLASSES, FEATURES, LENGTH, VOCABULARY

HIDDEN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Model ingredient: `build` makes a fresh one; `draws` marks random outputs.

    `splits` is False if outputs or buffers depend on the cut: weighted pieces are then not the
    truth, and a warning about it is never a false alarm.
    """

    build: Callable[[], nn.Module]
    shape: str = "vectors"
    draws: bool = False
    has_batchnorm: bool = False
    splits: bool = True
    only_float64: bool = False


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), *(between or (nn.Tanh(),)), nn.Linear(HIDDEN, CLASSES)
    )


class Around(nn.Module):
    """Layers before and after a function of the hidden rows, which also gets this module."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **members: Any) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.function = function
        for name, value in members.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.function(self, torch.tanh(self.stem(x))))


def around(
    function: Callable[[Any, Tensor], Tensor], **members: Callable[[], Any]
) -> Callable[[], nn.Module]:
    return lambda: Around(function, **{name: make() for name, make in members.items()})


class Tied(nn.Module):
    """The same matrix twice in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(F.linear(torch.tanh(self.square(x)), self.square.weight.T)))


class HeldTwice(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.same = self.body[0]

    def forward(self, x: Tensor) -> Any:
        return self.body(x) + 0.1 * self.same(x)[:, :CLASSES]


class Convolutions(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.lift = nn.Linear(FEATURES, 2 * 16)
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), norm, nn.ReLU())
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.lift(x).view(-1, 2, 4, 4)).mean((2, 3)))


class Carried(nn.Module):
    """Continues from the hidden state of the last call, if the number of rows is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden
        if hidden is not None:
            hidden = (
                hidden[: len(x)] if len(hidden) >= len(x) else hidden.mean(0).expand(len(x), -1)
            )
        out = self.cell(x, hidden)
        if self.training:
            self.hidden = out.detach()
        return self.head(out)


class Codebook(nn.Module):
    """Vector quantization with codes that are moving averages of their inputs."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.register_buffer("codes", torch.randn(3, HIDDEN))

    def forward(self, x: Tensor) -> Any:
        hidden = self.stem(x)
        chosen = torch.cdist(hidden.detach(), self.codes).argmin(1)
        if self.training:
            one_hot = F.one_hot(chosen, 3).to(hidden.dtype)
            sums, counts = one_hot.T @ hidden.detach(), one_hot.sum(0)[:, None]
            moved = 0.9 * self.codes + 0.1 * sums / counts.clamp(min=1)
            self.codes = torch.where(counts > 0, moved, self.codes)
        return self.head(hidden + (self.codes[chosen] - hidden).detach())


class Router(nn.Module):
    """Experts with a balance term over the batch, which a loss can add (`aux`)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 3)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))
        self.aux: Any = 0.0

    def forward(self, x: Tensor) -> Any:
        odds = self.gate(x).softmax(-1)
        best = odds.argmax(-1)
        self.aux = 0.01 * 3 * (odds.mean(0) * F.one_hot(best, 3).to(odds.dtype).mean(0)).sum()
        out = x.new_zeros(len(x), CLASSES)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * odds[rows, index, None])
        return out


class MergingLinear(nn.Linear):
    """Layer like loralib's: the low rank is merged into the weight in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(FEATURES, HIDDEN)
        self.down = nn.Parameter(torch.randn(2, FEATURES) * 0.3)
        self.up = nn.Parameter(torch.randn(HIDDEN, 2) * 0.3)
        self.weight.requires_grad_(False)
        self.merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode == self.merged:
            sign = -1 if mode else 1
            self.weight.data += sign * (self.up @ self.down).data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Any:
        out = F.linear(x, self.weight, self.bias)
        return out if self.merged else out + x @ self.down.T @ self.up.T


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool, drops: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, HIDDEN)
        self.body = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Dropout(0.3 * drops))
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return self.head(checkpoint(self.body, self.stem(x), use_reentrant=self.reentrant))


class Sequences(nn.Module):
    """A model from tokens to outputs per token, through a sequence layer."""

    def __init__(self, body: nn.Module, **embedding: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, **embedding)
        self.body = body
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Any:
        out = self.body(self.embedding(x))
        return self.head(out[0] if isinstance(out, tuple) else out)


class Transformers(nn.Module):
    """Tiny model of transformers, built from its configuration, as the body of a tagger."""

    def __init__(self, kind: str, config: str, **options: Any) -> None:
        super().__init__()
        import transformers

        ends = {"bos_token_id": 0, "eos_token_id": 0}
        made = getattr(transformers, config)(vocab_size=VOCABULARY, **ends, **options)
        self.body = getattr(transformers, kind)(made)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(input_ids=x).last_hidden_state)


def gpt2(dropout: float = 0.0) -> nn.Module:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"n_positions": 8, "n_embd": HIDDEN, "n_layer": 1, "n_head": 2}
    return Transformers("GPT2Model", "GPT2Config", use_cache=False, **sizes, **drops)


def bert(dropout: float = 0.0) -> nn.Module:
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2}
    drops = dict.fromkeys(names, dropout)
    more = {"intermediate_size": 12, "max_position_embeddings": 8}
    return Transformers("BertModel", "BertConfig", **sizes, **drops, **more)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, HIDDEN, mode="mean", padding_idx=0)
        self.head = nn.Linear(HIDDEN, LENGTH * CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.bag(x)).view(-1, LENGTH, CLASSES)


def encoder(dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(HIDDEN, 2, 12, dropout=dropout, batch_first=True)


def frozen_statistics() -> nn.Module:
    model = mlp(nn.BatchNorm1d(HIDDEN), nn.Tanh())
    model[1].eval()
    return model


def all_frozen_but_the_head() -> nn.Module:
    model = mlp(nn.BatchNorm1d(HIDDEN), nn.Tanh())
    model[:3].requires_grad_(False)
    model[1].eval()
    return model


def zero_head() -> nn.Module:
    model = mlp()
    for parameter in model[2].parameters():
        nn.init.zeros_(parameter)
    return model


def unused_layer() -> nn.Module:
    model = mlp()
    model.register_module("unused", None)
    model[0].spare = nn.Linear(2, 2)
    return model


def spectral() -> nn.Module:
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(FEATURES, HIDDEN)),
        nn.Tanh(),
        nn.Linear(HIDDEN, CLASSES),
    )


def weight_normed() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(FEATURES, HIDDEN)),
        nn.Tanh(),
        nn.Linear(HIDDEN, CLASSES),
    )


def with_forward_hook() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, out: out * 1.5)
    return model


# Functions of hidden rows, with arguments module and rows


def _running_mean(module: Any, hidden: Tensor) -> Any:
    if module.training:
        module.mean.mul_(0.8).add_(0.2 * hidden.detach().mean(0))
    return hidden - module.mean


def _calls(module: Any, hidden: Tensor) -> Any:
    if module.training:
        module.count += 1
    return hidden / (1 + 0.1 * module.count)


def _history(module: Any, hidden: Tensor) -> Any:
    if module.training:
        module.seen.append(float(hidden.detach().abs().mean()))
    return hidden / (1 + sum(module.seen[-3:]))


def _rows_seen(module: Any, hidden: Tensor) -> Any:
    if module.training:
        module.rows += len(hidden)
    return hidden


def _cached_positions(module: Any, hidden: Tensor) -> Any:
    if module.cache is None or len(module.cache) < len(hidden):
        module.cache = torch.ones(len(hidden), 1, dtype=hidden.dtype)
    return hidden * module.cache[: len(hidden)]


def _stochastic_depth(module: Any, hidden: Tensor) -> Any:
    if not module.training:
        return hidden
    keep = (torch.rand(len(hidden), 1) < 0.7).to(hidden.dtype)
    return hidden + keep / 0.7 * module.block(hidden)


def _some_rows(module: Any, hidden: Tensor) -> Tensor:
    """Apply a layer that many microbatches do not use, like a router's."""
    rare = hidden[:, 0] > 0.3
    return hidden.index_put((rare,), module.block(hidden[rare])) if rare.any() else hidden


def _layer_drop(module: Any, hidden: Tensor) -> Any:
    if module.training and random.random() < 0.4:
        return hidden
    return hidden + module.block(hidden)


def _numpy_noise(module: Any, hidden: Tensor) -> Any:
    noise = module.draws.standard_normal(tuple(hidden.shape))
    return hidden + 0.1 * torch.as_tensor(noise, dtype=hidden.dtype)


def _own_generator(module: Any, hidden: Tensor) -> Any:
    noise = torch.rand(hidden.shape, generator=module.draws, dtype=torch.float64)
    return hidden + noise.to(hidden.dtype)


def _python_draws(module: Any, hidden: Tensor) -> Any:
    return hidden * (1 + module.draws.random())


def _global_numpy(module: Any, hidden: Tensor) -> Any:
    return hidden + 0.1 * torch.as_tensor(np.random.rand(*hidden.shape), dtype=hidden.dtype)


def _clamped_weight(module: Any, hidden: Tensor) -> Any:
    module.head.weight.data.clamp_(-0.3, 0.3)
    return hidden


def _minmax(module: Any, hidden: Tensor) -> Any:
    if module.training:
        module.low = torch.minimum(module.low, hidden.detach().min())
        module.high = torch.maximum(module.high, hidden.detach().max())
    step = (module.high - module.low).clamp(min=1e-3) / 15
    return hidden + ((hidden / step).round() * step - hidden).detach()


def _count_buffer(module: Any, hidden: Tensor) -> Any:
    if module.training:
        module.batches += 1
    return hidden


def block() -> nn.Module:
    return nn.Linear(HIDDEN, HIDDEN)


MODELS = {
    "mlp": Model(build=mlp),
    "tied weights": Model(build=Tied),
    "one layer under two names": Model(build=HeldTwice),
    "a zero head": Model(build=zero_head),
    "an unused layer": Model(build=unused_layer),
    "frozen but the head": Model(build=all_frozen_but_the_head),
    "frozen BatchNorm": Model(build=frozen_statistics),
    "BatchNorm": Model(
        splits=False, build=lambda: mlp(nn.BatchNorm1d(HIDDEN), nn.Tanh()), has_batchnorm=True
    ),
    "conv with BatchNorm": Model(
        splits=False, build=lambda: Convolutions(nn.BatchNorm2d(4)), has_batchnorm=True
    ),
    "BatchNorm without statistics": Model(
        splits=False,
        build=lambda: Convolutions(nn.BatchNorm2d(4, track_running_stats=False)),
        has_batchnorm=True,
    ),
    "conv with GroupNorm": Model(build=lambda: Convolutions(nn.GroupNorm(2, 4))),
    "conv with InstanceNorm": Model(build=lambda: Convolutions(nn.InstanceNorm2d(4))),
    "LayerNorm": Model(build=lambda: mlp(nn.LayerNorm(HIDDEN), nn.GELU())),
    "RMSNorm": Model(build=lambda: mlp(nn.RMSNorm(HIDDEN), nn.SiLU())),
    "inplace ReLU": Model(build=lambda: mlp(nn.ReLU(inplace=True))),
    "PReLU": Model(build=lambda: mlp(nn.PReLU())),
    "weight norm": Model(build=weight_normed),
    "spectral norm": Model(splits=False, build=spectral),
    "a forward hook": Model(build=with_forward_hook),
    "checkpointed": Model(build=lambda: Checkpointed(reentrant=False)),
    "checkpointed, reentrant": Model(build=lambda: Checkpointed(reentrant=True)),
    "merging low rank": Model(
        build=lambda: nn.Sequential(MergingLinear(), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    ),
    "router": Model(build=Router),
    "a layer for some rows": Model(build=around(_some_rows, block=block)),
    "codebook": Model(splits=False, build=Codebook),
    "carried state": Model(splits=False, build=Carried),
    "running mean": Model(
        splits=False, build=around(_running_mean, mean=lambda: torch.zeros(HIDDEN))
    ),
    "counted calls": Model(splits=False, build=around(_calls, count=lambda: 0)),
    "a history in a list": Model(splits=False, build=around(_history, seen=list)),
    "rows counted": Model(build=around(_rows_seen, rows=lambda: 0)),
    "cached by the largest batch": Model(build=around(_cached_positions, cache=lambda: None)),
    "clamps its weight": Model(build=around(_clamped_weight)),
    "observes the range": Model(
        splits=False,
        build=around(_minmax, low=lambda: torch.tensor(0.0), high=lambda: torch.tensor(0.0)),
    ),
    "a buffer that counts": Model(
        splits=False, build=around(_count_buffer, batches=lambda: torch.tensor(0))
    ),
    "centred over the batch": Model(splits=False, build=around(lambda module, h: h - h.mean(0))),
    "spread over the batch": Model(
        splits=False, build=around(lambda module, h: h * (1 + h.var(0, unbiased=False)))
    ),
    "attention over rows": Model(
        splits=False, build=around(lambda module, h: (h @ h.T).softmax(-1) @ h)
    ),
    "a neighbour's row": Model(
        splits=False, build=around(lambda module, h: h + 0.1 * h.roll(1, 0))
    ),
    "dropout": Model(build=lambda: mlp(nn.Tanh(), nn.Dropout(0.3)), draws=True),
    "dropout, checkpointed": Model(
        build=lambda: Checkpointed(reentrant=False, drops=True), draws=True
    ),
    "functional dropout": Model(build=around(lambda module, h: F.dropout(h, 0.2)), draws=True),
    "alpha dropout": Model(build=lambda: mlp(nn.SELU(), nn.AlphaDropout(0.2)), draws=True),
    "RReLU": Model(build=lambda: mlp(nn.RReLU()), draws=True),
    "normal noise": Model(
        build=around(lambda module, h: h + 0.1 * torch.randn_like(h)), draws=True
    ),
    "gumbel": Model(build=around(lambda module, h: h * F.gumbel_softmax(h)), draws=True),
    "bernoulli": Model(
        build=around(lambda module, h: h * torch.bernoulli(torch.full_like(h, 0.8))), draws=True
    ),
    "stochastic depth": Model(build=around(_stochastic_depth, block=block), draws=True),
    "layer drop": Model(build=around(_layer_drop, block=block), draws=True),
    "NumPy's generator": Model(
        build=around(_numpy_noise, draws=lambda: np.random.default_rng(5)), draws=True
    ),
    "an own generator": Model(
        build=around(_own_generator, draws=lambda: torch.Generator().manual_seed(5)), draws=True
    ),
    "Python's generator": Model(
        build=around(_python_draws, draws=lambda: random.Random(5)), draws=True
    ),
    "NumPy's global draws": Model(build=around(_global_numpy), draws=True),
    "lstm": Model(
        build=lambda: Sequences(nn.LSTM(HIDDEN, HIDDEN, batch_first=True)), shape="tokens"
    ),
    "gru with dropout": Model(
        build=lambda: Sequences(nn.GRU(HIDDEN, HIDDEN, 2, dropout=0.3, batch_first=True)),
        shape="tokens",
        draws=True,
    ),
    "encoder layer": Model(build=lambda: Sequences(encoder()), shape="tokens"),
    "encoder layer with dropout": Model(
        build=lambda: Sequences(encoder(0.2)), shape="tokens", draws=True
    ),
    "padding_idx": Model(build=lambda: Sequences(nn.Tanh(), padding_idx=0), shape="tokens"),
    "max_norm": Model(build=lambda: Sequences(nn.Tanh(), max_norm=1.5), shape="tokens"),
    "sparse embedding": Model(build=lambda: Sequences(nn.Tanh(), sparse=True), shape="tokens"),
    "frequency-scaled embedding": Model(
        splits=False, build=lambda: Sequences(nn.Tanh(), scale_grad_by_freq=True), shape="tokens"
    ),
    "bags": Model(build=Bags, shape="tokens"),
    "conv over time": Model(
        build=lambda: Sequences(nn.Sequential(nn.Conv1d(LENGTH, LENGTH, 3, padding=1), nn.GELU())),
        shape="tokens",
    ),
    "GPT-2": Model(build=gpt2, shape="tokens", only_float64=True),
    "BERT": Model(build=bert, shape="tokens", only_float64=True),
    "GPT-2 with dropout": Model(
        build=lambda: gpt2(0.2), shape="tokens", draws=True, only_float64=True
    ),
}
