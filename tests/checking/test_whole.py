"""Whole batches beside their microbatches: what a few rows do not show."""

import contextlib
import copy
import itertools
import random
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
from tests.sweeps import mostly_in_sweeps
from tests.torture.engine.faults import Fault, FaultMode

ROWS = 64


def net() -> Any:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6, dtype=torch.float64), torch.arange(rows) % 3


def each(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def hardest(model: Any, batch: Any) -> Tensor:
    """Online hard example mining: of up to 16 rows a plain mean."""
    losses = each(model, batch)
    return losses.topk(min(16, len(losses))).values.mean()


def test_what_only_many_rows_show_is_named() -> None:
    microbatcher = Microbatcher(net(), forward=hardest, microbatch_size=16)
    (message,) = warnings_of(microbatcher, batch(), batch(), batch())
    assert "for 64 rows in 4 parts" in message
    assert "microbatch_size=None" in message
    assert microbatcher.loss_average_is == "wrong"


def test_it_is_refused_before_anything_has_changed() -> None:
    model = net()
    microbatcher = Microbatcher(model, forward=hardest, microbatch_size=16, probe="error")
    with pytest.raises(LossAverageError, match="for 64 rows in 4 parts"):
        microbatcher.backward(batch())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore::automicro.LossAverageWarning")
def test_what_interrupts_the_shaking_of_parameters_leaves_them_as_they_were() -> None:
    def interrupted(plan: list[Fault]) -> list[str]:
        torch.manual_seed(0)
        model, mode = net(), FaultMode(plan)
        before = copy.deepcopy(model.state_dict())
        microbatcher = Microbatcher(model, forward=lambda *given: each(*given).sum())
        with contextlib.suppress(KeyboardInterrupt), mode:
            microbatcher.backward(batch(8))
        assert all(before[name].equal(now) for name, now in model.state_dict().items())
        assert mode.raised_at == [fault.index for fault in plan]
        return mode.names

    turns = [index for index, name in enumerate(interrupted([])) if "bitwise_xor_" in name]
    assert len(turns) >= 8
    for index, after in itertools.product(turns[:8:3], (False, True)):
        interrupted([Fault(index, after, "interrupt")])


def test_after_running_out_of_memory_what_fits_without_gradients_is_compared() -> None:
    def forward(model: Any, batch: Any) -> Any:
        if len(batch[0]) > (32 if is_extra_pass() else 8):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return hardest(model, batch)

    microbatcher = Microbatcher(net(), forward=forward)
    (message,) = warnings_of(microbatcher, batch(), batch())
    assert "for 32 rows in 4 parts" in message  # of 64, half of the microbatches


def test_an_evaluation_loss_is_compared_by_itself() -> None:
    microbatcher = Microbatcher(net(), forward=hardest, eval_microbatch_size=16)
    with pytest.warns(LossAverageWarning, match=r"the loss is .* for 64 rows in 4 parts"):
        microbatcher.evaluate(batch())


@pytest.mark.parametrize("call", ["backward", "evaluate"])
def test_a_microbatch_without_a_finite_loss_is_named(call: str) -> None:
    def forward(model: Any, batch: Any) -> Any:
        inputs, targets = batch
        there = targets > 0  # of 64 rows two, which no look at 16 rows draws
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


@pytest.mark.sweep
def test_what_begins_late_is_named_at_the_next_power_of_ten() -> None:
    begins = False

    def forward(model: Any, batch: Any) -> Any:
        losses = each(model, batch)
        return losses.topk(min(16, len(losses))).values.mean() if begins else losses.mean()

    microbatcher = Microbatcher(net(), forward=forward, microbatch_size=16, loss_average="samples")
    assert not warnings_of(microbatcher, *(batch() for _ in range(100)))
    begins = True
    assert not warnings_of(microbatcher, *(batch() for _ in range(899)))
    assert len(warnings_of(microbatcher, batch())) == 1


def test_a_batch_that_stays_whole_costs_no_pass() -> None:
    seen = Outside(rows=[])

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if is_extra_pass():
            seen.rows.append(len(args[0]))

    microbatcher = Microbatcher(net(), forward=hardest)
    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        assert warnings_of(microbatcher, batch()) == []
    finally:
        handle.remove()
    assert max(seen.rows) == 16


def numbers_told(forward: Callable[..., Any], *batches: Any, **options: Any) -> list[str]:
    """What is said of numbers beside a loss, in training and in evaluation."""
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


def test_numbers_beside_a_loss_that_are_no_means_are_named_once() -> None:
    def forward(model: Any, batch: Any) -> Any:
        logits = model(batch[0])
        return {
            "loss": F.cross_entropy(logits, batch[1]),
            "total": logits.detach().abs().sum(),
            "top": logits.detach().max(),
            "accuracy": (logits.argmax(1) == batch[1]).double().mean(),
        }

    sizes: Any = {"microbatch_size": 16, "eval_microbatch_size": 16}
    (message,) = numbers_told(forward, batch(), batch(), **sizes)
    assert "'total' is " in message
    assert "'top' is " in message
    assert "accuracy" not in message
    whole: Any = {"microbatch_size": None, "eval_microbatch_size": None}
    assert numbers_told(forward, batch(), **whole) == []
    assert numbers_told(forward, batch(), probe=False, **sizes) == []


def test_numbers_are_named_where_no_more_than_a_microbatch_fits() -> None:
    def forward(model: Any, batch: Any) -> Any:
        if len(batch[0]) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        logits = model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return {"loss": loss, "mean": loss.detach(), "perplexity": loss.detach().exp()}

    (message,) = numbers_told(forward, batch(), microbatch_size=16, eval_microbatch_size=16)
    assert "'perplexity' is " in message
    assert "'mean' is " not in message


def test_a_batch_that_cannot_be_compared_is_not_the_one_that_was_due() -> None:
    """Memory runs out while a size is found; the next batches are compared then."""

    def forward(model: Any, batch: Any) -> Any:
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss, "perplexity": loss.detach().exp()}

    microbatcher = Microbatcher(net(), forward=forward, loss_average="samples")
    with pytest.warns(MetricWarning, match="'perplexity' is .* combined"):
        results = [microbatcher.backward(batch()) for _ in range(4)]
    assert results[-1].num_microbatches == 32


def test_what_fails_otherwise_is_not_tried_again_at_the_next_batch() -> None:
    """A forward that takes a gradient itself, where nothing is kept for one."""

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


def test_what_can_never_be_compared_is_not_tried_at_every_batch() -> None:
    splits, tried = Occasions(), []
    for number in range(1, 30):
        if splits.is_next():
            tried.append(number)
            splits.put_off()
    assert tried == [1, 2, 3, 4, 5, 6, 14]


def test_a_cut_that_no_batch_gets_names_nothing_for_want_of_rows() -> None:
    """One half of each microbatch has none of the rows that a number is the mean of."""

    def forward(model: Any, batch: Any) -> Any:
        if len(batch[0]) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        losses = each(model, batch)
        return {"loss": losses.mean(), "of some": losses.detach()[batch[1] > 0].mean()}

    x, y = batch()
    y[torch.arange(ROWS) % 16 < 8] = 0
    y[torch.arange(ROWS) % 16 >= 8] = 1
    assert numbers_told(forward, (x, y), microbatch_size=16, eval_microbatch_size=16) == []


@pytest.mark.parametrize("most", [ROWS, 16])
@pytest.mark.parametrize(
    "dtype", mostly_in_sweeps([torch.float64, torch.float32, torch.bfloat16], quick=[torch.float32])
)
def test_numbers_beside_a_loss_that_are_means_are_not_named(dtype: torch.dtype, most: int) -> None:
    def forward(model: Any, batch: Any) -> Any:
        if len(batch[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        logits = model(F.dropout(batch[0], 0.2))
        loss = F.cross_entropy(logits, batch[1])
        return {
            "loss": loss * 2,
            "half": loss.detach(),
            "confidence": logits.detach().softmax(1).amax(1).mean(),
            "accuracy": (logits.argmax(1) == batch[1]).float().mean(),
            "temperature": torch.tensor(0.07),
            "zero": logits.detach().sum() * 0,
            "chance": torch.tensor(random.random()) if model.training else torch.tensor(0.0),
            "nothing": logits.detach()[:0].mean(),
        }

    for rows in (64, 50):
        x, y = batch(rows)
        given = [(x.to(dtype), y), (-x.to(dtype), y)]
        assert numbers_told(forward, *given, microbatch_size=16, eval_microbatch_size=7) == []
