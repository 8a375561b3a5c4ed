"""Subjects with separately sized parts, and subjects at further levels."""

import dataclasses
import functools
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from automicro.nested.split import split
from automicro.policy.auto import Halving
from tests.torture.engine.subject import MakeSubject, Subject
from tests.torture.subjects import BATCHES, ROWS, adamw, classify

WORDS, WIDTH, VOCABULARY = 3, 4, 6
LEVELS = ["recompute", "offload"]  # in order, because "auto" would choose by measured time


def halving(initial: int) -> Halving:
    """Return a policy for a part that starts from this many rows and only halves."""
    return Halving(initial=initial, refine=False)


class Tail(nn.Module):
    """Head and loss as one module; dropout draws in each slice."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.dropout(hidden)), targets)


class WithTail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.tail = Tail()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.tail(self.body(x), targets)
        return loss


class TiedTail(nn.Module):
    """Head and loss as a method of the model, per token; its weight is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.loss = split(self.tail, microbatch_size=halving(4), modules=[self.embedding])

    def tail(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(hidden @ self.embedding.weight.T, targets)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.embedding(tokens), 0.2, self.training)
        hidden = torch.tanh(self.body(hidden))
        loss: Tensor = self.loss(hidden.flatten(0, 1), targets.flatten())
        return loss


class Counting(nn.Module):
    """A part that counts in buffers (in place, without a new version, replaced) and in a number,
    and draws from its own generator and from Python's.
    """

    seen: Tensor
    size: Tensor
    mean: Tensor

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("size", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.own, self.calls = torch.Generator().manual_seed(7), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.size.data.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
            x = x + 0.01 * random.random() * torch.rand(x.shape, generator=self.own)
        out: Tensor = x + self.dropout(self.narrow(torch.relu(self.wide(x))))
        return out


class Remembering(Counting):
    """Uses its counts in the computation."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * (1 + self.size + 0.1 * self.calls) + 0.1 * self.mean / (1 + self.seen)


class Block(nn.Module):
    """A minimal transformer block: attention, a feed-forward part, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.dropout(self.wide(x))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x.mean(1))
        return out


class NormalizedBlock(nn.Module):
    """A block with BatchNorm, which must not count again in a recomputed forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(torch.relu(self.norm(self.linear(x))))
        return out


def residual(block: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Sequential(block(), block()), nn.Linear(WIDTH, 3)
    )


def with_options(subject: Subject, *, level: int = 0, **options: Any) -> Subject:
    return dataclasses.replace(subject, options={**subject.options, **options}, first_level=level)


def with_loss(model: nn.Module, batches: list[Any], **options: Any) -> Subject:
    """Return a subject whose model computes its own loss."""
    return Subject(
        model=model,
        optimizer=adamw(model.parameters()),
        batches=batches,
        options={"forward": _loss_of, "loss_average": "samples", **options},
        first_size=ROWS,
    )


def _loss_of(model: nn.Module, microbatch: Any) -> Any:
    if isinstance(microbatch, Mapping):
        return model(**microbatch)
    return model(*microbatch)


def classes() -> list[Any]:
    return [(torch.randn(ROWS, WIDTH), torch.tensor([0, 1, 2, i % 3])) for i in range(BATCHES)]


def nested_tail() -> Subject:
    return with_loss(WithTail(), classes(), nested={"tail": halving(2)})


def nested_tail_and_gradients() -> Subject:
    subject = nested_tail()
    momentum = torch.optim.SGD(subject.model.parameters(), lr=0.1, momentum=0.9)
    return dataclasses.replace(subject, optimizer=momentum, set_to_none=False, keeps_gradient=True)


def nested_tokens() -> Subject:
    batches = []
    for _ in range(BATCHES):
        tokens = torch.randint(VOCABULARY, (ROWS, WORDS))
        targets = tokens.roll(-1, 1)
        targets[1, 1:] = -100
        batches.append((tokens, targets))
    model = TiedTail()
    return with_loss(model, batches, nested=[model.loss], loss_average="tokens")


def with_part(part: nn.Module, size: Any) -> Subject:
    """Return a subject with a separately sized part between two layers."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, 3))
    return with_options(classify(model, WIDTH, first_size=ROWS), nested={"1": size})


def nested_middle() -> Subject:
    layers = nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, WIDTH)
    return with_part(nn.Sequential(*layers), halving(2))


def nested_buffers() -> Subject:
    return with_part(Counting(), halving(2))


def nested_as_it_comes() -> Subject:
    """A subject that starts with one whole slice, and shrinks it after a failure."""
    return with_part(Counting(0.0), "auto")


def gpt2(size: int, **unit: Any) -> Subject:
    from tests.torture.more_subjects import gpt2

    subject = gpt2()
    # Then, outputs contain no logits.
    options = {**subject.options, "nested": {"tail": {"microbatch_size": halving(size), **unit}}}
    options["update_metric"] = lambda metric, outputs, microbatch: None
    return dataclasses.replace(subject, options=options, metrics=None, first_size=ROWS)


def transformer(when: Any, level: int) -> Subject:
    return with_options(classify(Transformer(), WORDS, WIDTH), when_too_large=when, level=level)


def at_recompute(block: type[nn.Module], **options: Any) -> Subject:
    """Return a subject with two blocks that are recomputed in the backward."""
    return with_options(classify(residual(block), WIDTH), when_too_large=LEVELS, level=1, **options)


def nested_and_recompute(block: type[nn.Module], sizes: Any) -> Subject:
    """Return a subject with separately sized parts inside recomputed blocks."""
    subject = at_recompute(block, nested=sizes)
    return dataclasses.replace(subject, first_size=ROWS)


class Drawing(nn.Module):
    """A block whose part draws more than once, and whose backward needs the part's output."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(
            nn.Linear(WIDTH, 6), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.part(x))


def drawing_inside_recompute(size: Any) -> Subject:
    return nested_and_recompute(Drawing, {"1.0.part": size, "1.1.part": size})


def nested_inside_nested() -> Subject:
    subject = classify(residual(Drawing), WIDTH, first_size=ROWS)
    return with_options(subject, nested={"1": halving(2), "1.1.part": "auto"})


def nested_tail_and_levels() -> Subject:
    model = WithTail()
    model.body = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2))
    )
    return dataclasses.replace(
        with_loss(model, classes(), nested={"tail": halving(2)}, when_too_large=LEVELS),
        first_level=2,
    )


def exact_batchnorm_as_it_comes() -> Subject:
    subject = classify(residual(NormalizedBlock), WIDTH, first_size=ROWS)
    return with_options(subject, nested={"1": {"batchnorm": "exact"}})


def exact_batchnorm_of_a_part() -> Subject:
    """A subject in slices from the start, and at a further level."""
    subject = classify(residual(NormalizedBlock), WIDTH, first_size=ROWS)
    part = {"microbatch_size": halving(2), "batchnorm": "exact"}
    return with_options(subject, nested={"1": part}, when_too_large=LEVELS, level=2)


SUBJECTS: dict[str, MakeSubject] = {
    "nested tail": nested_tail,
    "nested tail, gradients kept": nested_tail_and_gradients,
    "nested tail of tokens": nested_tokens,
    "nested tail of GPT-2": functools.partial(gpt2, 2),
    "nested tail of GPT-2, tokens": functools.partial(gpt2, 6, microbatch_unit="tokens"),
    "nested middle": nested_middle,
    "nested buffers": nested_buffers,
    "nested, whole at first": nested_as_it_comes,
    "recompute": functools.partial(transformer, LEVELS, 1),
    "recompute BatchNorm": functools.partial(at_recompute, NormalizedBlock),
    "recompute buffers": functools.partial(at_recompute, Remembering),
    "offload": functools.partial(transformer, ["offload"], 1),
    "recompute + offload": functools.partial(transformer, LEVELS, 2),
    "every level": functools.partial(transformer, LEVELS, 0),
    "nested inside recompute": lambda: nested_and_recompute(Counting, {"1.0.wide": halving(2)}),
    "nested dropout inside recompute": lambda: drawing_inside_recompute(halving(2)),
    "nested, whole at first, inside recompute": functools.partial(drawing_inside_recompute, "auto"),
    "nested inside nested": nested_inside_nested,
    "exact BatchNorm of a part, whole at first": exact_batchnorm_as_it_comes,
    "exact BatchNorm of a part, recompute + offload": exact_batchnorm_of_a_part,
    "nested tail, recompute + offload": nested_tail_and_levels,
}
