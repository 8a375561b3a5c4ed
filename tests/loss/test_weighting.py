"""Averages of losses (inferred, declared or counted), and the resulting weights."""

import functools
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from automicro import LossAverageWarning, LossError, MemoryBudget, Microbatcher
from automicro.loss.averages import (
    BatchWeights,
    Counted,
    CutBatch,
    Divisors,
    Samples,
    Sum,
    Tokens,
    read_average,
)
from automicro.ranks.interface import OneRank
from automicro.trainer.evaluation import LossMean
from tests.cases import count_targets, difference, gradients, masked_mean
from tests.models import IGNORED, ROWS, Encoder, Mlp, classes, tokens, with_ignored, x, y

NAN = float("nan")


def second(batch):
    return batch[1]


def cut(sizes: list[int], batch: Any = None, parts: Any = None) -> CutBatch:
    return CutBatch(batch=batch, microbatches=parts or [None] * len(sizes), sizes=sizes)


def weights_of(average: Any, batch: Any, parts: Any, sizes: list[int]) -> Any:
    return BatchWeights({"": average}, [cut(sizes, batch, parts)]).of_all


def read(loss_fn: Any, declared: Any = "auto", model: Any = None) -> Any:
    averages = read_average(
        declared,
        loss_fn=loss_fn,
        model=model or nn.Identity(),
        targets=second,
        reads_model=loss_fn is None,
    )
    return averages[""]


# Inference


class OwnForward(nn.CrossEntropyLoss):
    def forward(self, input, target):
        return super().forward(input, target) * 2


class OwnInit(nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__(ignore_index=7)


SUMMED = functools.partial(functools.partial(F.mse_loss, reduction="sum"))


# Those of torch are rows of `tests/oracle/losses.py`.
@pytest.mark.parametrize(
    ("loss_fn", "kind", "is_known"),
    [
        (OwnInit(), Tokens, True),
        (functools.partial(F.nll_loss, ignore_index=3), Tokens, True),
        (SUMMED, Sum, True),
        (functools.partial(SUMMED, reduction="mean"), Samples, True),
        (nn.CTCLoss(), Samples, True),
        (OwnForward(), Samples, False),
        (lambda outputs, targets: outputs.mean(), Samples, False),
        (functools.partial(lambda a, b, reduction: a.mean(), reduction="sum"), Samples, False),
        (nn.MSELoss(reduction="none"), Samples, False),
    ],
)
def test_average_is_inferred_from_loss(loss_fn, kind, is_known):
    average = read(loss_fn)
    assert isinstance(average, kind)
    assert average.is_known is is_known


@pytest.mark.parametrize(
    ("loss_type", "is_encoder_decoder", "counts"),
    [
        ("ForCausalLM", False, [1, 2]),
        ("ForConditionalGeneration", False, [1, 2]),
        ("ForConditionalGeneration", True, [2, 2]),
        ("ForMaskedLM", False, [2, 2]),
    ],
)
def test_label_shift_is_inferred_from_hugging_face_model(loss_type, is_encoder_decoder, counts):
    config = type("Config", (), {"is_encoder_decoder": is_encoder_decoder})
    more = {"config": config, "loss_type": loss_type, "loss_function": len}
    average = read(None, model=type("Model", (nn.Module,), more)())
    labels = torch.tensor([[1, 2, IGNORED], [IGNORED, 2, 3]])
    parts = [(None, labels[:1]), (None, labels[1:])]
    assert average.divisors([cut([1, 1], (None, labels), parts)]).each == counts


@pytest.mark.parametrize("declares", [False, True])
def test_unverifiable_loss_type_causes_warning(declares, monkeypatch):
    class Model(nn.Embedding):
        loss_type, loss_function = "ForCausalLM", len

        def forward(self, input_ids, labels):  # type: ignore[override]
            logits = super().forward(input_ids)[:, :-1]
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}

    monkeypatch.setattr(OneRank, "communicates_in_forward", True)
    average, ids = "model" if declares else "auto", torch.randint(5, (4, 6))
    microbatcher = Microbatcher(Model(5, 5), microbatch_size=2, loss_average=average)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        microbatcher.backward({"input_ids": ids, "labels": ids})
    said = [str(each.message) for each in caught if each.category is LossAverageWarning]
    assert len(said) == (0 if declares else 1)
    assert all("the assumption that the loss is a mean over the" in each for each in said)


def test_declaring_tokens_keeps_ignore_index_of_loss():
    average = read(nn.CrossEntropyLoss(ignore_index=7), "tokens")
    targets = torch.tensor([7, 1, IGNORED + 101])
    assert average.divisors([cut([3], (None, targets), [(None, targets)])]).whole == 2


@pytest.mark.parametrize("declared", [{}, {"": "samples"}, {1: "samples"}])
def test_mapping_must_name_losses(declared):
    with pytest.raises(ValueError, match="must name losses"):
        read(None, declared)


# Weights


def test_weights_are_fractions_of_full_batch_denominator():
    targets = torch.tensor([0, 1, IGNORED, 4, 4, IGNORED])
    parts = [(None, targets[:4]), (None, targets[4:])]
    assert weights_of(Tokens(second), (None, targets), parts, [4, 2]) == [0.75, 0.25]
    assert weights_of(Sum(), (None, targets), parts, [4, 2]) == [None, None]
    assert weights_of(Samples(), (None, targets), parts, [4, 2]) == [4 / 6, 2 / 6]


def test_row_dimension_is_inferred_from_cut():
    targets = with_ignored(classes(ROWS, ROWS)).T
    parts = [(None, part) for part in targets.split([6, 5], dim=1)]
    counts = Tokens(second).divisors([cut([6, 5], (None, targets), parts)]).each
    assert counts == [int((part != IGNORED).sum()) for _, part in parts]


class OnDevice(Samples):
    """Counts on a device: float64 tensors that are never read back."""

    def divisors(self, cuts):
        each = torch.tensor(cuts[0].sizes, dtype=torch.float64).unbind()
        return Divisors(each, torch.stack(each).sum())


def test_device_weights_ignore_microbatches_that_count_nothing():
    weights = BatchWeights({"": OnDevice()}, [cut([3, 1, 0])])
    assert not any(weights.is_nothing[index] for index in range(3))
    losses = [torch.tensor(value, requires_grad=True) for value in (4.0, 8.0, NAN)]
    totals = [weights.apply(index, loss, {})[0] for index, loss in enumerate(losses)]
    assert [float(total.detach()) for total in totals] == [3.0, 2.0, 0.0]
    torch.stack(totals).sum().backward()
    assert [float(loss.grad) for loss in losses if loss.grad is not None] == [0.75, 0.25, 0.0]
    assert totals[0].dtype == torch.float32
    weights = weights_of(OnDevice(), None, [None] * 2, [0, 0])
    assert [float(weight) for weight in weights] == [0.0, 0.0]


@pytest.mark.parametrize("wrong", [-1, NAN, float("inf"), None, "3", torch.ones(2)])
def test_invalid_count_raises_error(wrong):
    with pytest.raises(LossError, match="loss_average callable returned"):
        weights_of(Counted(lambda part: wrong), None, [None, None], [1, 1])


@pytest.mark.parametrize("targets", [None, [1, 2], torch.tensor(3)])
def test_uncountable_targets_raise_error_with_their_type(targets):
    with pytest.raises(LossError, match=rf"targets are {type(targets).__name__}, not a tensor"):
        weights_of(Tokens(second), (None, targets), [None, None], [1, 1])


def test_named_losses_must_match_declaration():
    weights = BatchWeights({"a": Samples(), "b": Sum()}, [cut([3, 1])])
    one = torch.tensor(1.0)
    total, parts = weights.apply(0, one, {"a": one, "b": one})
    assert (float(total), {n: float(p) for n, p in parts.items()}) == (1.75, {"a": 0.75, "b": 1.0})
    with pytest.raises(LossError, match=r"names the losses \['a', 'b'\], but .* returns \['a'\]"):
        weights.apply(0, one, {"a": one})
    with pytest.raises(LossError, match=r"returns \['a', 'b', 'loss'\]; .* no 'loss' next to them"):
        weights.apply(0, one, {"a": one, "b": one}, has_total=True)


# No targets


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("loss_average", ["tokens", count_targets])
def test_batch_with_all_targets_ignored_contributes_zero(loss_average, size):
    model, batch = Encoder(), (tokens(), torch.full_like(tokens(), IGNORED))
    microbatcher = Microbatcher(
        model, loss_fn=masked_mean, loss_average=loss_average, microbatch_size=size
    )
    with pytest.warns(LossAverageWarning, match="no target of this batch counts.*labels"):
        result = microbatcher.backward(batch)
    assert float(result.loss) == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert float(microbatcher.backward(batch).loss) == 0  # without a second warning


@pytest.mark.parametrize("size", [None, 3])
def test_batch_without_targets_keeps_earlier_gradients(size):
    model = Mlp()
    microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), microbatch_size=size)
    microbatcher.backward((x(), y()))
    before = gradients(model)
    with pytest.warns(LossAverageWarning, match="no target of this batch counts"):
        assert float(microbatcher.backward((x(), torch.full_like(y(), IGNORED))).loss) == 0
    assert difference(gradients(model), before) == 0


# Losses


@pytest.mark.parametrize("size", [3, 20])
def test_loss_parts_are_reported_for_full_batch(size):
    def forward(model, batch):
        logits = model(batch[0])
        parts = {"fit": F.cross_entropy(logits, batch[1]), "size": logits.square().mean()}
        return {"loss": parts["fit"] + 0.1 * parts["size"], **parts}

    model, batch = Mlp(), (x(), y())
    expected = {name: float(loss.detach()) for name, loss in forward(model, batch).items()}
    result = Microbatcher(model, forward=forward, microbatch_size=size).backward(batch)
    found = {"loss": result.loss, **result.losses}
    assert not any(loss.requires_grad for loss in found.values())
    assert {n: float(loss) for n, loss in found.items()} == pytest.approx(expected, abs=1e-9)


def test_mean_loss_weights_batches_by_count():
    mean, parts = LossMean(), {"a": torch.tensor(1.0), "b": torch.tensor(5.0)}
    mean.add(torch.tensor(6.0), parts, {"a": 1, "b": None})
    with pytest.raises(KeyError):
        mean.add(torch.tensor(2.0), {"c": torch.tensor(1.0)}, {"a": 10.0})
    mean = LossMean()
    mean.add(torch.tensor(6.0), parts, {"a": 1, "b": None})
    mean.add(
        torch.tensor(11.0), {"a": torch.tensor(4.0), "b": torch.tensor(7.0)}, {"a": 2, "b": None}
    )
    assert mean.compute() == {"loss": 15.0, "loss/a": 3.0, "loss/b": 12.0}


def test_batch_that_counts_nothing_does_not_affect_mean():
    mean = LossMean()
    assert mean.compute() == {}
    mean.add(torch.tensor(NAN), {}, {"": 0})
    assert math.isnan(mean.compute()["loss"])
    mean.add(torch.tensor(3.0), {}, {"": torch.tensor(2.0)})
    assert mean.compute() == {"loss": 3.0}


class WithScalars(Mlp):
    """A model with leaves that can be losses, or views of them."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.full((1,), 0.3))
        self.scalar = nn.Parameter(torch.tensor(0.2))
        self.bfloat16()


ADDED: dict[str, Any] = {
    "nothing": lambda _, loss: loss,
    "a view of a leaf": lambda model, loss: loss + model.one.squeeze(),
    "a view of a leaf alone": lambda model, _: model.one.squeeze(),
    "a leaf alone": lambda model, _: model.scalar,
    "parts": lambda model, loss: {"first": loss, "second": model.scalar * 2},
    "a total beside parts": lambda _, loss: {"loss": loss * 3, "first": loss},
}


@pytest.mark.parametrize("added", ADDED)
def test_weighted_backward_is_bit_identical_to_scaled_loss(added):
    model = WithScalars()

    def forward(model, batch):
        return ADDED[added](model, F.cross_entropy(model(batch[0]), batch[1]))

    def trained(**options):
        model.zero_grad()
        given = {"forward": forward, "loss_average": "samples", "microbatch_size": 3, **options}
        microbatcher = Microbatcher(model, **given)
        results = [microbatcher.backward((x().bfloat16(), y())) for _ in range(3)]
        found = [[each.loss, *each.losses.values()] for each in results]
        return [*found, [parameter.grad for parameter in model.parameters()]]

    begun, multiplied = trained(), trained(backward=lambda loss: loss.backward())
    torch.testing.assert_close(begun, multiplied, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_microbatch_losses_keep_no_other_tensors_alive(reduction):
    """A mean of squares is stored in the memory of the squares."""
    batch = torch.randn(64, 4), torch.zeros(64, 512)
    sizes: Any = {"microbatch_size": 4, "eval_microbatch_size": 4}
    loss_fn = nn.MSELoss(reduction=reduction)
    microbatcher = Microbatcher(nn.Linear(4, 512), loss_fn=loss_fn, **sizes, probe=False)
    for run in (microbatcher.backward, microbatcher.evaluate):
        with MemoryBudget(None) as budget:
            assert run(batch).num_microbatches == 16
        assert budget.peak_bytes < batch[1].nbytes  # which the losses would need together
