"""Computing a loss from a microbatch: four conventions, and their errors."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from automicro import LossError, Microbatcher
from automicro.features import with_features
from tests.models import CLASSES, ROWS, ComposerStyle, Mlp, x, y


class Keyword(nn.Module):
    """A model with Hugging Face's convention and an output of the requested kind."""

    def __init__(self, kind: str = "output") -> None:
        super().__init__()
        self.net = Mlp()
        self.kind = kind

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.net(inputs)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        if self.kind == "dict":
            return {"loss": loss, "logits": logits}
        if self.kind == "namespace":
            return SimpleNamespace(loss=loss, logits=logits)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class MereAttribute(Keyword):
    """A model with an attribute called ``loss``, which is not Composer's interface."""

    loss = nn.CrossEntropyLoss()


def train(model: nn.Module, batch: Any, **options: Any) -> float:
    microbatcher = Microbatcher(model, microbatch_size=3, **with_features(options))
    loss = float(microbatcher.backward(batch).loss)
    assert all(p.grad is not None for p in model.parameters())
    return loss


@pytest.mark.parametrize("kind", ["output", "dict", "namespace"])
@pytest.mark.parametrize("model_class", [Keyword, MereAttribute])
def test_mapping_batch_is_passed_as_keywords(model_class: type, kind: str) -> None:
    model = model_class(kind)
    expected = float(F.cross_entropy(model.net(x()), y()).detach())
    assert train(model, {"inputs": x(), "labels": y()}) == pytest.approx(expected)


def test_loss_function_may_return_named_losses() -> None:
    def loss_fn(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"fit": F.cross_entropy(outputs, targets), "size": outputs.square().mean()}

    model = Mlp()
    expected = sum(float(loss.detach()) for loss in loss_fn(model(x()), y()).values())
    assert train(model, (x(), y()), loss_fn=loss_fn) == pytest.approx(expected)


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda loss: None, "forward returned a NoneType"),
        (lambda loss: [loss, loss], "forward returned a list of length 2"),
        (lambda loss: {}, r"mapping with the keys \[\]"),
        (lambda loss: {"loss": loss.item()}, "the loss is of type float, not a tensor"),
        (lambda loss: loss.detach(), "does not depend on any parameter"),
    ],
)
def test_forward_without_usable_loss_raises_error_at_every_size(
    result: Any, message: str, size: int | None
) -> None:
    def forward(model: nn.Module, batch: Any) -> Any:
        return result(F.cross_entropy(model(batch[0]), batch[1]))

    model = Mlp()
    microbatcher = Microbatcher(model, forward=forward, microbatch_size=size)
    with pytest.raises(LossError, match=message):
        microbatcher.backward((x(), y()))
    assert all(parameter.grad is None for parameter in model.parameters())


def two_losses(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(outputs, targets), outputs.square().mean()


@pytest.mark.parametrize("size", ["auto", None, 3])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": two_losses}, "a tuple of length 2 instead of a tensor to differentiate"),
        ({"forward": lambda m, b: two_losses(m(b[0]), b[1])}, "For two losses, return a mapping"),
    ],
)
def test_tuple_of_several_losses_is_rejected(options: Any, message: str, size: Any) -> None:
    with pytest.raises(LossError, match=message):
        Microbatcher(Mlp(), **options, microbatch_size=size).backward((x(), y()))


@pytest.mark.parametrize("work", ["backward", "evaluate"])
def test_error_shows_how_to_return_loss_first(work: str) -> None:
    class ComputesItsLoss(nn.Sequential):
        def forward(self, inputs: Tensor, targets: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(inputs)
            return logits, F.cross_entropy(logits, targets)

    model = ComputesItsLoss(Mlp())
    asked = Microbatcher(model, forward=lambda model, batch: model(*batch))
    with pytest.raises(LossError, match=r"the loss comes first.*model\(\*batch\)\[::-1\]"):
        getattr(asked, work)((x(), y()))
    told = Microbatcher(model, forward=lambda model, batch: model(*batch)[::-1])
    torch.testing.assert_close(getattr(told, work)((x(), y())).loss, model(x(), y())[1])


def test_detached_scalar_next_to_loss_is_an_output() -> None:
    def forward(model: nn.Module, batch: Any) -> Any:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), logits.detach().mean()

    train(Mlp(), (x(), y()), forward=forward)


class LossesByKeyword(nn.Module):
    """A model with a detector's convention: only losses by name."""

    def __init__(self, *, others: bool = False) -> None:
        super().__init__()
        self.net = Mlp()
        self.others = others

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        logits = self.net(inputs)
        losses = {"cls": F.cross_entropy(logits, labels), "reg": logits.square().mean()}
        return {**losses, "logits": logits} if self.others else losses


def test_named_losses_are_summed() -> None:
    model = LossesByKeyword()
    batch = {"inputs": x(), "labels": y()}
    expected = {name: float(loss.detach()) for name, loss in model(**batch).items()}
    result = Microbatcher(model, microbatch_size=3).backward(batch)
    assert float(result.loss) == pytest.approx(sum(expected.values()))
    assert {n: float(v) for n, v in result.losses.items()} == pytest.approx(expected)
    averages = {"cls": "tokens", "reg": "samples"}
    named = Microbatcher(model, loss_average=averages, microbatch_size=3).backward(batch)
    assert float(named.loss) == pytest.approx(sum(expected.values()))


def test_losses_among_other_outputs_are_not_guessed() -> None:
    microbatcher = Microbatcher(LossesByKeyword(others=True), microbatch_size=3)
    with pytest.raises(LossError, match="without a loss"):
        microbatcher.backward({"inputs": x(), "labels": y()})


def test_missing_loss_error_lists_options() -> None:
    with pytest.raises(LossError, match=r"a batch of type tuple; pass loss_fn=…"):
        Microbatcher(Mlp()).backward((x(), y()))
    with pytest.raises(LossError, match=r"without a loss; the batch may lack 'labels'"):
        Microbatcher(Keyword()).backward({"inputs": x()})


@pytest.mark.parametrize("count", [None, lambda batch: float((batch["labels"] > 0).sum())])
def test_forward_receives_num_items_in_batch(count: Any) -> None:
    def forward(model: nn.Module, batch: Any, num_items_in_batch: Any) -> Tensor:
        losses = F.cross_entropy(model(batch["inputs"]), batch["labels"], reduction="none")
        return torch.where(batch["labels"] > 0, losses, 0).sum() / max(float(num_items_in_batch), 1)

    batch, model = {"inputs": x(), "labels": y()}, Mlp()
    batch["labels"][:4] = -100 if count is None else 0  # a microbatch without items
    items = (batch["labels"] != -100).sum() if count is None else (batch["labels"] > 0).sum()
    (wanted,) = torch.autograd.grad(forward(model, batch, items), [next(model.parameters())])
    average = {} if count is None else {"loss_average": count}
    Microbatcher(model, forward=forward, microbatch_size=3, **average).backward(batch)
    torch.testing.assert_close(next(model.parameters()).grad, wanted, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="takes num_items_in_batch, over which its loss"):
        Microbatcher(model, forward=forward, loss_average="samples")


# Evaluation


def evaluate(model: nn.Module, batch: Any, metric: Any = None, **options: Any) -> Any:
    microbatcher = Microbatcher(model, eval_microbatch_size=3, **with_features(options))
    return microbatcher.evaluate(batch, metrics=metric, return_outputs=True)


@pytest.mark.parametrize("kind", ["output", "dict"])
def test_evaluation_joins_outputs_without_loss(kind: str) -> None:
    model = Keyword(kind)
    result = evaluate(model, {"inputs": x(), "labels": y()})
    with torch.no_grad():
        assert torch.allclose(result.outputs["logits"], model.net(x()), rtol=0, atol=1e-12)
    assert list(result.outputs) == ["logits"]
    assert type(result.outputs) is type(model(x(), y()))


def test_batch_without_labels_is_evaluated_without_loss() -> None:
    result = evaluate(Keyword(), {"inputs": x()})
    assert result.loss is None
    assert result.outputs.logits.shape == (ROWS, CLASSES)


def test_metrics_get_outputs_and_targets_in_every_convention() -> None:
    cases: list[Any] = [
        (Mlp, (x(), y()), {"loss_fn": nn.CrossEntropyLoss()}),
        (Keyword, {"inputs": x(), "labels": y()}, {}),
        (ComposerStyle, (x(), y()), {}),
        (Mlp, (x(), y()), {"forward": lambda m, b: ((logits := m(b[0])).mean(), logits)}),
        (
            Mlp,
            (x(), y()),
            {"forward": lambda m, b: {"loss": (logits := m(b[0])).mean(), "logits": logits}},
        ),
    ]
    for model, batch, options in cases:
        module = model()
        metric = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")
        evaluate(module, batch, metric, **options)
        net = getattr(module, "net", module)
        expected = float((net(x()).argmax(1) == y()).double().mean())
        assert float(metric.compute()) == pytest.approx(expected)
        states: Any = metric
        assert int(states.tp + states.fn) == ROWS


def test_missing_targets_raise_error_with_remedy() -> None:
    @dataclasses.dataclass
    class Batch:
        x: Tensor
        y: Tensor

    forward = lambda model, batch: (model(batch.x).mean(), batch.y)  # noqa: E731
    with pytest.raises(LossError, match=r"targets cannot be found in a Batch; .*update_metric"):
        evaluate(Mlp(), Batch(x(), y()), torchmetrics.MeanMetric(), forward=forward)
    seen: list[int] = []

    def update(metric: Any, outputs: Any, microbatch: Batch) -> None:
        seen.extend(microbatch.y.tolist())

    evaluate(
        Mlp(), Batch(x(), y()), torchmetrics.MeanMetric(), forward=forward, update_metric=update
    )
    assert seen == y().tolist()
