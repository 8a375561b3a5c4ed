"""Whole batches compared with their microbatches: differences that a few rows do not show."""

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import (
    LossAverageError,
    LossAverageWarning,
    MetricWarning,
    Microbatcher,
    is_extra_pass,
)
from automicro.checking.check import Occasions
from tests.checking.told import warnings_of
from tests.outside import Outside

ROWS = 64


def net() -> Any:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6, dtype=torch.float64), torch.arange(rows) % 3


def each(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def hardest(model: Any, batch: Any) -> Tensor:
    """Online hard example mining, a plain mean for up to 16 rows."""
    losses = each(model, batch)
    return losses.topk(min(16, len(losses))).values.mean()


def test_difference_visible_only_in_many_rows_warns_or_raises() -> None:
    sizes: Any = {"microbatch_size": 16, "eval_microbatch_size": 16}
    microbatcher = Microbatcher(net(), forward=hardest, **sizes)
    (message,) = warnings_of(microbatcher, batch(), batch(), batch())
    assert "for 64 rows in 4 parts" in message
    assert "microbatch_size=None" in message
    assert microbatcher.loss_average_is == "wrong"
    with pytest.warns(LossAverageWarning, match=r"the loss is .* for 64 rows in 4 parts"):
        Microbatcher(net(), forward=hardest, **sizes).evaluate(batch())
    model = net()
    with pytest.raises(LossAverageError, match="for 64 rows in 4 parts"):
        Microbatcher(model, forward=hardest, probe="error", **sizes).backward(batch())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore::automicro.LossAverageWarning")
def test_interrupted_parameter_perturbation_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    flip = torch.Tensor.bitwise_xor_

    def interrupted(at: int | None, *, after: bool = False) -> int:
        torch.manual_seed(0)
        model, calls = net(), itertools.count()
        before = copy.deepcopy(model.state_dict())
        microbatcher = Microbatcher(model, forward=lambda *given: each(*given).sum())

        def flip_and_fail(tensor: Tensor, bits: int) -> None:
            is_due = next(calls) == at
            if not is_due or after:
                flip(tensor, bits)
            if is_due:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(torch.Tensor, "bitwise_xor_", flip_and_fail)
            microbatcher.backward(batch(8))
        assert all(before[name].equal(now) for name, now in model.state_dict().items())
        return next(calls)

    assert interrupted(None) >= 8
    for index, after in itertools.product((0, 3, 6), (False, True)):
        assert interrupted(index, after=after) > index


def test_smaller_part_is_compared_after_oom() -> None:
    def forward(model: Any, batch: Any) -> Any:
        if len(batch[0]) > (32 if is_extra_pass() else 8):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return hardest(model, batch)

    microbatcher = Microbatcher(net(), forward=forward)
    (message,) = warnings_of(microbatcher, batch(), batch())
    assert "for 32 rows in 4 parts" in message  # of 64 rows: half of the microbatches


@pytest.mark.parametrize("call", ["backward", "evaluate"])
def test_microbatch_with_nan_loss_warns(call: str) -> None:
    def forward(model: Any, batch: Any) -> Any:
        inputs, targets = batch
        there = targets > 0  # two of 64 rows, which no check of 16 rows draws
        outputs = model(inputs)[:, 0]
        return F.mse_loss(outputs, targets) + F.l1_loss(outputs[there], targets[there])

    targets = -torch.rand(ROWS, dtype=torch.float64)
    targets[[13, 38]] = 1.5
    microbatcher = Microbatcher(
        net(), forward=forward, microbatch_size=16, eval_microbatch_size=16, loss_average="samples"
    )
    with pytest.warns(LossAverageWarning, match="the loss is .* as a whole and nan combined"):
        result = getattr(microbatcher, call)((batch()[0], targets))
    assert result.loss.isnan()


def test_unsplit_batch_needs_no_extra_whole_pass() -> None:
    seen, model = Outside(rows=[]), net()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if is_extra_pass():
            seen.rows.append(len(args[0]))

    model.register_forward_hook(note)
    assert warnings_of(Microbatcher(model, forward=hardest), batch()) == []
    assert max(seen.rows) == 16


def metric_warnings(forward: Callable[..., Any], *batches: Any, **options: Any) -> list[str]:
    """Return the warnings about values next to a loss, in training and in evaluation."""
    microbatcher = Microbatcher(
        net().to(batches[0][0].dtype), forward=forward, loss_average="samples", **options
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in batches:
            microbatcher.backward(each)
            microbatcher.evaluate(each)
    assert microbatcher.loss_average_is == "declared"
    return [str(one.message) for one in caught if one.category is MetricWarning]


def test_values_that_are_not_means_warn_once() -> None:
    def forward(model: Any, batch: Any) -> Any:
        logits = model(batch[0])
        return {
            "loss": F.cross_entropy(logits, batch[1]),
            "total": logits.detach().abs().sum(),
            "top": logits.detach().max(),
            "accuracy": (logits.argmax(1) == batch[1]).double().mean(),
        }

    sizes: Any = {"microbatch_size": 16, "eval_microbatch_size": 16}
    (message,) = metric_warnings(forward, batch(), batch(), **sizes)
    assert "'total' is " in message
    assert "'top' is " in message
    assert "accuracy" not in message
    whole: Any = {"microbatch_size": None, "eval_microbatch_size": None}
    assert metric_warnings(forward, batch(), **whole) == []
    assert metric_warnings(forward, batch(), probe=False, **sizes) == []


@pytest.mark.sweep
def test_late_difference_is_found_at_next_power_of_ten() -> None:
    begins = False

    def forward(model: Any, batch: Any) -> Any:
        return hardest(model, batch) if begins else each(model, batch).mean()

    microbatcher = Microbatcher(net(), forward=forward, microbatch_size=16, loss_average="samples")
    assert not warnings_of(microbatcher, *(batch() for _ in range(100)))
    begins = True
    assert not warnings_of(microbatcher, *(batch() for _ in range(899)))
    assert len(warnings_of(microbatcher, batch())) == 1


def test_comparison_is_postponed_after_oom() -> None:
    def forward(model: Any, batch: Any) -> Any:
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss, "perplexity": loss.detach().exp()}

    microbatcher = Microbatcher(net(), forward=forward, loss_average="samples")
    with pytest.warns(MetricWarning, match="'perplexity' is .* combined"):
        results = [microbatcher.backward(batch()) for _ in range(4)]
    assert results[-1].num_microbatches == 32


def test_comparison_failing_without_oom_is_not_retried() -> None:
    def forward(model: Any, batch: Any) -> Any:
        inputs = batch[0].clone().requires_grad_()
        losses = each(model, (inputs, batch[1]))
        (slope,) = torch.autograd.grad(losses.sum(), inputs, create_graph=torch.is_grad_enabled())
        return losses.mean() + slope.square().sum(1).mean()

    model, seen = net(), Outside(extra=0)
    microbatcher = Microbatcher(model, forward=forward, microbatch_size=16)

    def count(*_: Any) -> None:
        seen.extra += is_extra_pass()

    model.register_forward_pre_hook(count)
    for _ in range(6):
        seen.extra = 0
        microbatcher.backward(batch())
    assert not seen.extra


def test_postponed_comparisons_back_off() -> None:
    splits, tried = Occasions(), []
    for number in range(1, 30):
        if splits.is_next():
            tried.append(number)
            splits.put_off()
    assert tried == [1, 2, 3, 4, 5, 6, 14]


def test_values_are_judged_when_only_one_microbatch_fits() -> None:
    """Half of each microbatch has no row that "of some" averages over."""

    def forward(model: Any, batch: Any) -> Any:
        if len(batch[0]) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        losses = each(model, batch)
        of_some = losses.detach()[batch[1] > 0].mean()
        return {"loss": losses.mean(), "of some": of_some, "exp": losses.detach().mean().exp()}

    x, y = batch()
    y = (torch.arange(ROWS) % 16 >= 8).long()
    sizes: Any = {"microbatch_size": 16, "eval_microbatch_size": 16}
    (message,) = metric_warnings(forward, (x, y), **sizes)
    assert "'exp' is " in message
    assert "'of some' is " not in message
