"""More models under fault injection: typical user code, and unusual uses of torch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import MulticlassF1Score

from automicro.optimizer.step import GradientScaler
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


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, sequences: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(sequences)[0][:, -1])
        return out


class Checkpointed(nn.Module):
    """A model whose recomputation draws dropout again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if torch.is_grad_enabled():
            x = x + checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        else:
            x = x + self.block(x)
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


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.classes = nn.Linear(4, 3)
        self.values = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.body(x))
        return self.classes(x), self.values(x).squeeze(1)


def named_losses(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    inputs, targets = microbatch
    classes, numbers = model(inputs)
    return {
        "classes": nn.functional.cross_entropy(classes, targets),
        "values": nn.functional.mse_loss(numbers, targets.float()),
    }


class InPlace(nn.Module):
    """A model that writes into its input and its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5).sub_(0.1)
        hidden = self.first(x)
        hidden[:, 0] = 1.0
        out: Tensor = self.head(nn.functional.relu(hidden, inplace=True))
        return out


def perceptron(act: type[nn.Module] = nn.Tanh, width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), act(), nn.Linear(width, 3))


def of(make: Callable[[], nn.Module], *shape: int) -> MakeSubject:
    """A subject that classifies with a model that is made anew each time."""
    return lambda: classify(make(), *shape)


mlp = of(functools.partial(perceptron, nn.ReLU, 6), 4)


def groupnorm_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


def spectral() -> nn.Module:
    model = perceptron(nn.ReLU)
    spectral_norm(model[0])
    return model


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


def several_losses() -> Subject:
    model = TwoHeads()
    batches = [(torch.randn(ROWS, 4), torch.tensor([0, 1, 2, i % 3])) for i in range(BATCHES)]
    return Subject(
        model=model,
        optimizer=adamw(model.parameters()),
        batches=batches,
        options={
            "forward": named_losses,
            "loss_average": {"classes": "samples", "values": "samples"},
        },
    )


def half_precision() -> Subject:
    # The first step overflows and is skipped.
    scaler = GradientScaler(torch.device("cpu"), init_scale=2.0**18)
    subject = mlp()
    options = {**subject.options, "precision": "fp16", "backward": scaler.backward}
    return dataclasses.replace(subject, options=options, scaler=scaler)


def frozen_part() -> nn.Module:
    model = perceptron(nn.ReLU)
    model[0].requires_grad_(False)
    return model


def hooks() -> Subject:
    """Hooks of every kind, which receive the gradient of the whole batch, once."""
    subject = classify(perceptron(), 4)
    first, *others = subject.model.parameters()
    first.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    for parameter in others:
        parameter.register_post_accumulate_grad_hook(_halve)
    return dataclasses.replace(subject, keeps_gradient=True)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def attack() -> Subject:
    """A gradient in the forward, only of the inputs."""
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
    """A learned scale that is in no module, whose gradient is never cleared."""
    scale = torch.ones(3, requires_grad=True)

    def forward(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(microbatch[0]) * scale
        return nn.functional.cross_entropy(logits, microbatch[1]), logits

    subject = classify(perceptron(), 4)
    options = {"forward": forward, "batchnorm": "ignore"}
    return dataclasses.replace(subject, options=options, leaves=[scale])


def bf16() -> Subject:
    """Parameters in bf16, whose gradients add up in float32."""
    subject = classify(perceptron().bfloat16(), 4)
    batches = [(inputs.bfloat16(), targets) for inputs, targets in subject.batches]
    return dataclasses.replace(subject, batches=batches, keeps_gradient=True)


def gpt2() -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel  # imports slowly

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=4, n_embd=8, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return _language_model(GPT2LMHeadModel(config))


def bert() -> Subject:
    from transformers import BertConfig, BertForMaskedLM  # imports slowly

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=4, type_vocab_size=1,
    )  # fmt: skip
    return _language_model(BertForMaskedLM(config))


def _language_model(model: Any) -> Subject:
    model.train()
    batches = []
    for _ in range(BATCHES):
        tokens = torch.randint(1, VOCABULARY, (ROWS, 4))
        labels = tokens.clone()
        labels[1, 2:] = -100  # rows of different weight
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


def compute_groups() -> Subject:
    metrics = MetricCollection([accuracy(), MulticlassF1Score(3, validate_args=False)])
    return dataclasses.replace(classify(nn.Linear(4, 3), 4), metrics=metrics)


def by_cost() -> Subject:
    """Rows that are sorted by tokens and lose their padding; dropout draws in sorted order."""
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
    "CNN with GroupNorm": of(groupnorm_cnn, 1, 4, 4),
    "BatchNorm and dropout": batchnorm_and_dropout,
    "GRU": of(Recurrent, 3, 3),
    "GPT-2": gpt2,
    "BERT": bert,
    "tied weights": tied_weights,
    "state of every kind": state_of_every_kind,
    "spectral norm": of(spectral, 4),
    "checkpointing": of(functools.partial(Checkpointed, False), 4),
    "reentrant checkpointing": of(functools.partial(Checkpointed, True), 4),
    "double backward": double_backward,
    "several losses": several_losses,
    "fp16": half_precision,
    "frozen part": of(frozen_part, 4),
    "in-place forward": of(InPlace, 4),
    "hooks": hooks,
    "attack": attack,
    "leaf outside of the model": outside_leaf,
    "bf16": bf16,
    "slices by cost": by_cost,
    "compute groups": compute_groups,
    **smaller_subjects.SUBJECTS,
}
