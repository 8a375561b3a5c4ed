"""More models under fault injection: typical user code, and unusual uses of torch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import CatMetric

from automicro.optimizer.step import GradientScaler
from tests.oracle.contents import Content
from tests.oracle.drawing import SIMPLE, makes_sense
from tests.oracle.jobs import Job
from tests.step.texts import Reader, texts
from tests.torture import smaller_subjects
from tests.torture.engine.subject import MakeSubject, Subject
from tests.torture.subjects import (
    BATCHES,
    ROWS,
    RowCounter,
    accuracy,
    adamw,
    batchnorm_and_dropout,
    classify,
    state_of_every_kind,
    tied_weights,
)

VOCABULARY = 8


class Reentrant(nn.Module):
    """A model whose recomputation draws dropout again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        # Without a gradient, torch warns about a checkpoint.
        needs_gradient = torch.is_grad_enabled()
        x = x + (checkpoint(self.block, x, use_reentrant=True) if needs_gradient else self.block(x))
        out: Tensor = self.head(x)
        return out


def penalized_forward(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    inputs, targets = microbatch
    if not torch.is_grad_enabled():
        outputs = model(inputs)
        return nn.functional.cross_entropy(outputs, targets), outputs
    inputs = inputs.detach().requires_grad_()
    outputs = model(inputs)
    (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    loss = nn.functional.cross_entropy(outputs, targets)
    return loss + 0.1 * slopes.square().sum(1).mean(), outputs


def perceptron(act: type[nn.Module] = nn.Tanh, width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), act(), nn.Linear(width, 3))


def of(make: Callable[[], nn.Module], *shape: int) -> MakeSubject:
    """Return a subject that classifies with a new model each time."""
    return lambda: classify(make(), *shape)


mlp = of(functools.partial(perceptron, nn.ReLU, 6), 4)


def similar(content: Content, index: int) -> Content:
    """Return different numbers with the same classes and lengths, to trigger no new checks."""
    rows = {
        name: value + index / 8 if name in "xt" and value.is_floating_point() else value.clone()
        for name, value in content.rows.items()
    }
    return dataclasses.replace(content, rows=rows)


def of_search(**ingredients: Any) -> MakeSubject:
    """Return a subject made of ingredients of the search."""
    one = dataclasses.replace(
        SIMPLE, declares=True, optimizer="adam", num_rows=(ROWS,) * BATCHES, **ingredients
    )
    assert makes_sense(one), one

    def make() -> Subject:
        job = Job(one)
        return Subject(
            model=job.model,
            optimizer=job.optimizer,
            batches=[job.make_batch(similar(job.contents[0], at), at) for at in range(BATCHES)],
            options={"batchnorm": "ignore", **job.options},
            metrics=job.metric,
            keeps_gradient=one.twist != "none",
        )

    return make


def double_backward() -> Subject:
    model = perceptron()
    batches = [(torch.randn(ROWS, 4), torch.tensor([0, 1, 2, i % 3])) for i in range(BATCHES)]
    return Subject(
        model=model,
        optimizer=adamw(model.parameters()),
        batches=batches,
        options={"forward": penalized_forward, "loss_average": "samples"},
        metrics=accuracy(),
    )


def half_precision() -> Subject:
    # The first step overflows and is skipped.
    scaler = GradientScaler(torch.device("cpu"), init_scale=2.0**18)
    subject = mlp()
    options = {**subject.options, "precision": "fp16", "backward": scaler.backward}
    return dataclasses.replace(subject, options=options, scaler=scaler)


def attack() -> Subject:
    """A subject that computes a gradient of only the inputs in its forward."""
    subject = classify(perceptron(), 4)
    return dataclasses.replace(subject, options={"forward": _attacked, "batchnorm": "ignore"})


def _attacked(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    inputs = microbatch[0]
    if torch.is_grad_enabled():
        inputs = inputs.detach().clone().requires_grad_()
        inner = nn.functional.cross_entropy(model(inputs), microbatch[1])
        (slope,) = torch.autograd.grad(inner, inputs)
        inputs = (inputs + 0.1 * slope.sign()).detach()
    logits = model(inputs)
    return nn.functional.cross_entropy(logits, microbatch[1]), logits


def outside_leaf() -> Subject:
    """A subject with a learned scale outside of all modules, whose gradient is never cleared."""
    scale = torch.ones(3, requires_grad=True)

    def forward(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(microbatch[0]) * scale
        return nn.functional.cross_entropy(logits, microbatch[1]), logits

    subject = classify(perceptron(), 4)
    options = {"forward": forward, "batchnorm": "ignore"}
    return dataclasses.replace(subject, options=options, leaves=[scale])


def gpt2() -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel  # a slow import

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=4, n_embd=8, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return _language_model(GPT2LMHeadModel(config))


def _language_model(model: Any) -> Subject:
    model.train()
    batches = []
    for _ in range(BATCHES):
        tokens = torch.randint(1, VOCABULARY, (ROWS, 4))
        labels = tokens.clone()
        labels[1, 2:] = -100  # so that rows have different weights
        batches.append(
            {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
        )
    return Subject(
        model=model,
        optimizer=adamw(model.parameters()),
        batches=batches,
        options={"update_metric": _count_rows},
        metrics=RowCounter(),
    )


def _count_rows(metric: RowCounter, outputs: Any, microbatch: Any) -> None:
    metric.update(outputs["logits"], microbatch["labels"])


def by_cost() -> Subject:
    """A subject whose rows are sorted by length and lose padding; dropout draws in sorted order."""
    model = Reader(dropout=0.3)
    # All batches have rows of the same lengths, so that one size cuts all of them equally.
    lengths = [[3, 4, 3, 4], [4, 3, 4, 3], [3, 3, 4, 4], [4, 4, 3, 3], [4, 3, 3, 4]]
    batches = []
    for each in lengths:
        batch = texts(each, padded=5)
        words = torch.randint(VOCABULARY, batch["input_ids"].shape)
        words[0, :2] = torch.tensor([0, VOCABULARY - 1])  # no later batch has a new word
        batches.append({**batch, "input_ids": words})
    return Subject(
        model=model,
        optimizer=adamw(model.parameters()),
        batches=batches,
        options={
            "microbatch_unit": "tokens",
            "loss_average": "tokens",
            "update_metric": lambda metric, outputs, microbatch: metric.update(outputs["pooled"]),
        },
        metrics=CatMetric(),
        first_size=8,
    )


SUBJECTS: dict[str, MakeSubject] = {
    "MLP": mlp,
    "CNN with GroupNorm": of_search(model="conv with GroupNorm"),
    "BatchNorm and dropout": batchnorm_and_dropout,
    "GRU": of_search(model="gru with dropout"),
    "GPT-2": gpt2,
    "BERT": of_search(model="BERT", loss="tokens, flat"),
    "tied weights": tied_weights,
    "state of every kind": state_of_every_kind,
    "spectral norm": of_search(model="spectral norm"),
    "checkpointing": of_search(model="dropout, checkpointed"),
    "reentrant checkpointing": of(Reentrant, 4),
    "double backward": double_backward,
    "several losses": of_search(loss="several named"),
    "fp16": half_precision,
    "frozen part": of_search(model="frozen but the head"),
    "in-place forward": of_search(model="inplace ReLU", form="halved in place"),
    "hooks before accumulation": of_search(twist="hooks that clamp"),
    "hooks after accumulation": of_search(twist="hooks after accumulation"),
    "attack": attack,
    "leaf outside of the model": outside_leaf,
    "bf16": of_search(dtype="bfloat16", twist="gradients are kept"),
    "slices by cost": by_cost,
    "compute groups": of_search(metric="a collection"),
    **smaller_subjects.SUBJECTS,
}
