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

KINDS: dict[str, Any] = {
    "output": SequenceClassifierOutput,
    "dict": dict,
    "namespace": SimpleNamespace,
}


class Keyword(nn.Module):
    loss = nn.CrossEntropyLoss()  # a mere attribute, which is not Composer's interface

    def __init__(self, kind="output"):
        super().__init__()
        self.net, self.kind = Mlp(), KINDS[kind]

    def forward(self, inputs, labels=None):
        logits = self.net(inputs)
        return self.kind(loss=None if labels is None else self.loss(logits, labels), logits=logits)


def keywords() -> dict[str, Tensor]:
    return {"inputs": x(), "labels": y()}


def train(model: nn.Module, batch: Any, **options: Any) -> Any:
    result = Microbatcher(model, microbatch_size=3, **options).backward(batch)
    assert all(p.grad is not None for p in model.parameters())
    return pytest.approx(float(result.loss))


@pytest.mark.parametrize("kind", KINDS)
def test_mapping_batch_is_passed_as_keywords(kind):
    model = Keyword(kind)
    expected = float(F.cross_entropy(model.net(x()), y()).detach())
    assert expected == train(model, keywords())


def test_loss_function_may_return_named_losses():
    def loss_fn(outputs, targets):
        return {"fit": F.cross_entropy(outputs, targets), "size": outputs.square().mean()}

    model = Mlp()
    expected = sum(float(loss.detach()) for loss in loss_fn(model(x()), y()).values())
    assert expected == train(model, (x(), y()), loss_fn=loss_fn)


def test_detached_scalar_next_to_loss_is_an_output():
    def forward(model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), logits.detach().mean()

    train(Mlp(), (x(), y()), forward=forward)


def two_losses(outputs, targets):
    return F.cross_entropy(outputs, targets), outputs.square().mean()


def returning(result: Any) -> dict[str, Any]:
    return {"forward": lambda model, batch: result(F.cross_entropy(model(batch[0]), batch[1]))}


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (returning(lambda loss: None), "forward returned a NoneType"),
        (returning(lambda loss: [loss, loss]), "forward returned a list of length 2"),
        (returning(lambda loss: {}), r"mapping with the keys \[\]"),
        (returning(lambda loss: {"loss": loss.item()}), "the loss is of type float, not a tensor"),
        (returning(lambda loss: loss.detach()), "does not depend on any parameter"),
        ({"loss_fn": two_losses}, "a tuple of length 2 instead of a tensor to differentiate"),
        ({"forward": lambda m, b: two_losses(m(b[0]), b[1])}, "For two losses, return a mapping"),
    ],
)
def test_forward_without_usable_loss_raises_error_at_every_size(options, message, size):
    model = Mlp()
    with pytest.raises(LossError, match=message):
        Microbatcher(model, **options, microbatch_size=size).backward((x(), y()))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("work", ["backward", "evaluate"])
def test_error_shows_how_to_return_loss_first(work):
    class ComputesItsLoss(Mlp):
        def forward(self, inputs, targets):  # type: ignore[override]
            logits = super().forward(inputs)
            return logits, F.cross_entropy(logits, targets)

    model = ComputesItsLoss()
    asked = Microbatcher(model, forward=lambda model, batch: model(*batch))
    with pytest.raises(LossError, match=r"the loss comes first.*model\(\*batch\)\[::-1\]"):
        getattr(asked, work)((x(), y()))
    told = Microbatcher(model, forward=lambda model, batch: model(*batch)[::-1])
    torch.testing.assert_close(getattr(told, work)((x(), y())).loss, model(x(), y())[1])


class LossesByKeyword(Keyword):
    """A model with a detector's convention: only losses by name."""

    def __init__(self, **others: Any):
        super().__init__()
        self.others = others

    def forward(self, inputs, labels=None):
        logits = self.net(inputs)
        losses = {"cls": F.cross_entropy(logits, labels), "reg": logits.square().mean()}
        return losses | self.others


def test_named_losses_are_summed():
    model, batch = LossesByKeyword(), keywords()
    expected = {name: float(loss.detach()) for name, loss in model(**batch).items()}
    averages: Any
    for averages in ("auto", {"cls": "tokens", "reg": "samples"}):
        microbatcher = Microbatcher(model, loss_average=averages, microbatch_size=3)
        result = microbatcher.backward(batch)
        assert float(result.loss) == pytest.approx(sum(expected.values()))
        assert {n: float(v) for n, v in result.losses.items()} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (LossesByKeyword(logits=torch.ones(3)), keywords(), "without a loss"),
        (Mlp(), (x(), y()), r"a batch of type tuple; pass loss_fn=…"),
        (Keyword(), {"inputs": x()}, r"without a loss; the batch may lack 'labels'"),
    ],
)
def test_missing_loss_error_lists_options(model, batch, message):
    with pytest.raises(LossError, match=message):
        Microbatcher(model, microbatch_size=3).backward(batch)


@pytest.mark.parametrize("count", [None, lambda batch: float((batch["labels"] > 0).sum())])
def test_forward_receives_num_items_in_batch(count):
    def forward(model, batch, num_items_in_batch):
        losses = F.cross_entropy(model(batch["inputs"]), batch["labels"], reduction="none")
        return torch.where(batch["labels"] > 0, losses, 0).sum() / max(float(num_items_in_batch), 1)

    batch, model = keywords(), Mlp()
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
def test_evaluation_joins_outputs_without_loss(kind):
    model = Keyword(kind)
    for batch in (keywords(), {"inputs": x()}):
        result = evaluate(model, batch)
        assert (result.loss is None) is ("labels" not in batch)
        with torch.no_grad():
            assert torch.allclose(result.outputs["logits"], model.net(x()), rtol=0, atol=1e-12)
        assert list(result.outputs) == (["logits"] if "labels" in batch else [*model(**batch)])
        assert type(result.outputs) is type(model(x(), y()))


def both(kind: Any) -> Any:
    return lambda m, b: kind((logits := m(b[0])).mean(), logits)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Mlp, {"loss_fn": nn.CrossEntropyLoss()}),
        (Keyword, {}),
        (ComposerStyle, {}),
        (Mlp, {"forward": both(lambda loss, logits: (loss, logits))}),
        (Mlp, {"forward": both(lambda loss, logits: {"loss": loss, "logits": logits})}),
    ],
)
def test_metrics_get_outputs_and_targets_in_every_convention(model, options):
    module = model()
    metric: Any = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")
    evaluate(module, keywords() if model is Keyword else (x(), y()), metric, **options)
    net = getattr(module, "net", module)
    expected = float((net(x()).argmax(1) == y()).double().mean())
    assert float(metric.compute()) == pytest.approx(expected)
    assert int(metric.tp + metric.fn) == ROWS


@dataclasses.dataclass
class Batch:
    x: Tensor
    y: Tensor


def test_missing_targets_raise_error_with_remedy():
    batch, seen = Batch(x(), y()), list[int]()
    metric, forward = torchmetrics.MeanMetric(), lambda m, b: (m(b.x).mean(), b.y)
    with pytest.raises(LossError, match=r"targets cannot be found in a Batch; .*update_metric"):
        evaluate(Mlp(), batch, metric, forward=forward)
    update = lambda metric, outputs, each: seen.extend(each.y.tolist())  # noqa: E731
    evaluate(Mlp(), batch, metric, forward=forward, update_metric=update)
    assert seen == y().tolist()
