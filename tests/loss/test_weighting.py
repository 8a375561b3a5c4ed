"""Averages of losses (inferred, declared or counted), and the resulting weights."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from tests.sweeps import mostly_in_sweeps


def second(batch: Any) -> Any:
    return batch[1]


def cut(sizes: list[int], batch: Any = None, parts: Any = None) -> CutBatch:
    return CutBatch(batch=batch, microbatches=parts or [None] * len(sizes), sizes=sizes)


def microbatch_weights(average: Any, batch: Any, parts: Any, sizes: list[int]) -> Any:
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


class OwnForward(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) * 2


class OwnInit(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__(ignore_index=7)


# Inference


def test_average_is_inferred_from_loss() -> None:
    cases: list[Any] = [
        (nn.CrossEntropyLoss(), Tokens, True),
        (nn.NLLLoss(), Tokens, True),
        (OwnInit(), Tokens, True),
        (F.cross_entropy, Tokens, True),
        (functools.partial(F.nll_loss, ignore_index=3), Tokens, True),
        (nn.CrossEntropyLoss(reduction="sum"), Sum, True),
        (functools.partial(F.mse_loss, reduction="sum"), Sum, True),
        (functools.partial(functools.partial(F.mse_loss, reduction="sum")), Sum, True),
        (
            functools.partial(functools.partial(F.mse_loss, reduction="sum"), reduction="mean"),
            Samples,
            True,
        ),
        (nn.MSELoss(), Samples, True),
        (nn.BCEWithLogitsLoss(), Samples, True),
        (nn.KLDivLoss(reduction="batchmean"), Samples, True),
        (nn.CTCLoss(), Samples, True),
        (F.huber_loss, Samples, True),
        (OwnForward(), Samples, False),
        (lambda outputs, targets: outputs.mean(), Samples, False),
        (functools.partial(lambda a, b, reduction: a.mean(), reduction="sum"), Samples, False),
        (nn.MSELoss(reduction="none"), Samples, False),
    ]
    for loss_fn, kind, is_known in cases:
        average = read(loss_fn)
        assert isinstance(average, kind)
        assert read(loss_fn).is_known is is_known


@pytest.mark.parametrize(
    ("loss_type", "is_encoder_decoder", "shift"),
    [
        ("ForCausalLM", False, 1),
        ("ForConditionalGeneration", False, 1),
        ("ForConditionalGeneration", True, 0),
        ("ForMaskedLM", False, 0),
        ("ForTokenClassification", False, 0),
    ],
)
def test_label_shift_is_inferred_from_hugging_face_model(
    loss_type: str, is_encoder_decoder: bool, shift: int
) -> None:
    class Model(nn.Module):
        config = type("Config", (), {"is_encoder_decoder": is_encoder_decoder})

        def loss_function(self) -> None: ...

    model = Model()
    model.loss_type = loss_type  # type: ignore[assignment]
    average = read(None, model=model)
    labels = torch.tensor([[1, 2, IGNORED], [IGNORED, 2, 3]])
    parts = [(None, labels[:1]), (None, labels[1:])]
    assert average.divisors([cut([1, 1], (None, labels), parts)]).each == (
        [1, 2] if shift else [2, 2]
    )


@pytest.mark.parametrize("declares", [False, True])
def test_unverifiable_loss_type_causes_warning(
    declares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(nn.Module):
        loss_type = "ForCausalLM"

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 5)

        def loss_function(self) -> None: ...

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.embedding(input_ids)[:, :-1]
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}

    monkeypatch.setattr(OneRank, "communicates_in_forward", True)
    average = "model" if declares else "auto"
    microbatcher = Microbatcher(Model(), microbatch_size=2, loss_average=average)
    ids = torch.randint(5, (4, 6))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        microbatcher.backward({"input_ids": ids, "labels": ids})
    said = [str(each.message) for each in caught if each.category is LossAverageWarning]
    assert len(said) == (0 if declares else 1)
    assert all("the assumption that the loss is a mean over the" in each for each in said)


def test_declaring_tokens_keeps_ignore_index_of_loss() -> None:
    average = read(nn.CrossEntropyLoss(ignore_index=7), "tokens")
    targets = torch.tensor([7, 1, IGNORED + 101])
    assert average.divisors([cut([3], (None, targets), [(None, targets)])]).whole == 2


def test_mapping_must_name_losses() -> None:
    cases: list[Any] = [{}, {"": "samples"}, {1: "samples"}]
    for declared in cases:
        with pytest.raises(ValueError, match="must name losses"):
            read(None, declared)


def test_weights_are_fractions_of_full_batch_denominator() -> None:
    targets = torch.tensor([0, 1, IGNORED, 4, 4, IGNORED])
    parts = [(None, targets[:4]), (None, targets[4:])]
    assert microbatch_weights(Tokens(second), (None, targets), parts, [4, 2]) == [0.75, 0.25]
    assert microbatch_weights(Sum(), (None, targets), parts, [4, 2]) == [None, None]
    assert microbatch_weights(Samples(), (None, targets), parts, [4, 2]) == [4 / 6, 2 / 6]


# Weights


class OnDevice(Samples):
    """Counts on a device: float64 tensors that are never read back."""

    def divisors(self, cuts: Any) -> Divisors:
        each = torch.tensor(cuts[0].sizes, dtype=torch.float64).unbind()
        return Divisors(each, torch.stack(each).sum())


def test_device_weights_ignore_microbatches_that_count_nothing() -> None:
    weights = BatchWeights({"": OnDevice()}, [cut([3, 1, 0])])
    assert not any(weights.is_nothing[index] for index in range(3))
    losses = [torch.tensor(value, requires_grad=True) for value in (4.0, 8.0, float("nan"))]
    totals = [weights.apply(index, loss, {})[0] for index, loss in enumerate(losses)]
    assert [float(total.detach()) for total in totals] == [3.0, 2.0, 0.0]
    for total in totals:
        total.backward()
    assert [float(loss.grad) for loss in losses if loss.grad is not None] == [0.75, 0.25, 0.0]
    assert totals[0].dtype == torch.float32


def test_batch_that_counts_nothing_on_device_has_zero_weight() -> None:
    weights = microbatch_weights(OnDevice(), None, [None] * 2, [0, 0])
    assert [float(weight) for weight in weights if weight is not None] == [0.0, 0.0]


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), None, "3", torch.ones(2)])
def test_invalid_count_raises_error(wrong: Any) -> None:
    with pytest.raises(LossError, match="loss_average callable returned"):
        microbatch_weights(Counted(lambda part: wrong), None, [None, None], [1, 1])


def test_uncountable_targets_raise_error_with_their_type() -> None:
    cases: list[Any] = [None, [1, 2], torch.tensor(3)]
    for targets in cases:
        with pytest.raises(LossError, match=rf"targets are {type(targets).__name__}, not a tensor"):
            microbatch_weights(Tokens(second), (None, targets), [None, None], [1, 1])


def test_named_losses_must_match_declaration() -> None:
    weights = BatchWeights({"a": Samples(), "b": Sum()}, [cut([3, 1])])
    one = torch.tensor(1.0)
    total, parts = weights.apply(0, one, {"a": one, "b": one})
    assert (float(total), {n: float(p) for n, p in parts.items()}) == (1.75, {"a": 0.75, "b": 1.0})
    with pytest.raises(LossError, match=r"names the losses \['a', 'b'\], but .* returns \['a'\]"):
        weights.apply(0, one, {"a": one})
    with pytest.raises(LossError, match=r"returns \['a', 'b', 'loss'\]; .* no 'loss' next to them"):
        weights.apply(0, one, {"a": one, "b": one}, has_total=True)


# No targets


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("loss_average", ["tokens", count_targets])
def test_batch_with_all_targets_ignored_contributes_zero(
    loss_average: Any, size: int | None
) -> None:
    model = Encoder()
    batch = (tokens(), torch.full_like(tokens(), IGNORED))
    microbatcher = Microbatcher(
        model, loss_fn=masked_mean, loss_average=loss_average, microbatch_size=size
    )
    with pytest.warns(LossAverageWarning, match="no target of this batch counts.*labels"):
        result = microbatcher.backward(batch)
    assert float(result.loss) == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert float(microbatcher.backward(batch).loss) == 0  # without a second warning


def test_batch_without_targets_keeps_earlier_gradients() -> None:
    cases: list[Any] = [None, 1, 3]
    for size in cases:
        model = Mlp()
        microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), microbatch_size=size)
        microbatcher.backward((x(), y()))
        before = gradients(model)
        with pytest.warns(LossAverageWarning, match="no target of this batch counts"):
            assert float(microbatcher.backward((x(), torch.full_like(y(), IGNORED))).loss) == 0
        assert difference(gradients(model), before) == 0


def test_loss_parts_are_reported_for_full_batch() -> None:
    for size in [1, 3, 20]:

        def forward(model: nn.Module, batch: Any) -> dict[str, Tensor]:
            logits = model(batch[0])
            parts = {"fit": F.cross_entropy(logits, batch[1]), "size": logits.square().mean()}
            return {"loss": parts["fit"] + 0.1 * parts["size"], **parts}

        model, batch = Mlp(), (x(), y())
        expected = forward(model, batch)
        result = Microbatcher(model, forward=forward, microbatch_size=size).backward(batch)
        assert result.losses.keys() == {"fit", "size"}
        assert float(result.loss) == pytest.approx(float(expected["loss"].detach()), abs=1e-9)
        for name, loss in result.losses.items():
            assert not loss.requires_grad
            assert float(loss) == pytest.approx(float(expected[name].detach()), abs=1e-9)


def test_row_dimension_is_inferred_from_cut() -> None:
    targets = with_ignored(classes(ROWS, ROWS)).T
    parts = [(None, part) for part in targets.split([6, 5], dim=1)]
    counts = Tokens(second).divisors([cut([6, 5], (None, targets), parts)]).each
    assert counts == [int((part != IGNORED).sum()) for _, part in parts]


def test_mean_loss_weights_batches_by_count() -> None:
    mean = LossMean()
    mean.add(torch.tensor(2.0), {"a": torch.tensor(1.0)}, {"a": 10.0, "b": None})
    with pytest.raises(KeyError):
        mean.add(torch.tensor(2.0), {"c": torch.tensor(1.0)}, {"a": 10.0})
    mean = LossMean()
    for a, b, count in ((1.0, 5.0, 1), (4.0, 7.0, 2)):
        parts = {"a": torch.tensor(a), "b": torch.tensor(b)}
        mean.add(torch.tensor(a + b), parts, {"a": count, "b": None})
    assert mean.compute() == {"loss": 15.0, "loss/a": 3.0, "loss/b": 12.0}


def test_batch_that_counts_nothing_does_not_affect_mean() -> None:
    mean = LossMean()
    mean.add(torch.tensor(float("nan")), {}, {"": 0})
    assert math.isnan(mean.compute()["loss"])
    mean.add(torch.tensor(3.0), {}, {"": torch.tensor(2.0)})
    assert mean.compute() == {"loss": 3.0}
    assert LossMean().compute() == {}


class WithScalars(Mlp):
    """A model with leaves that can be losses, or views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.full((1,), 0.3))
        self.scalar = nn.Parameter(torch.tensor(0.2))


ADDED: dict[str, Callable[[WithScalars, Tensor], Any]] = {
    "nothing": lambda _, loss: loss,
    "a view of a leaf": lambda model, loss: loss + model.one.squeeze(),
    "a leaf": lambda model, loss: loss + model.scalar,
    "a view of a leaf alone": lambda model, _: model.one.squeeze(),
    "a leaf alone": lambda model, _: model.scalar,
    "parts": lambda model, loss: {"first": loss, "second": model.scalar * 2},
    "a total beside parts": lambda _, loss: {"loss": loss * 3, "first": loss},
}


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize(
    "dtype", mostly_in_sweeps([torch.float32, torch.bfloat16], quick=[torch.bfloat16])
)
def test_weighted_backward_is_bit_identical_to_scaled_loss(added: str, dtype: torch.dtype) -> None:
    model = WithScalars().to(dtype)

    def forward(model: Any, batch: Any) -> Any:
        return ADDED[added](model, F.cross_entropy(model(batch[0]), batch[1]))

    def trained(**options: Any) -> list[Any]:
        model.zero_grad()
        microbatcher = Microbatcher(
            model, forward=forward, loss_average="samples", microbatch_size=3, **options
        )
        results = [microbatcher.backward((x().to(dtype), y())) for _ in range(3)]
        found = [[each.loss, *each.losses.values()] for each in results]
        return [*found, [parameter.grad for parameter in model.parameters()]]

    begun, multiplied = trained(), trained(backward=lambda loss: loss.backward())
    for mine, theirs in zip(begun, multiplied, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_microbatch_losses_keep_no_other_tensors_alive(reduction: str) -> None:
    """A mean of squares is stored in the memory of the squares."""
    model = nn.Linear(4, 512)
    batch = torch.randn(64, 4), torch.zeros(64, 512)
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.MSELoss(reduction=reduction),
        microbatch_size=4,
        eval_microbatch_size=4,
        probe=False,
    )
    for run in (microbatcher.backward, microbatcher.evaluate):
        with MemoryBudget(None) as budget:
            result = run(batch)
        assert result.loss is not None
        assert result.num_microbatches == 16
        whole = batch[1].nbytes
        assert budget.peak_bytes < whole  # the losses of 16 microbatches would need that much
