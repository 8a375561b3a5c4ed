"""Splitting models with BatchNorm and other buffers: warnings, errors, modes and minimum size."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from automicro import (
    BatchNormWarning,
    BufferWarning,
    Microbatcher,
    SampleTooLargeError,
    UnsplittableModelError,
)
from tests.callbacks.runs import Scripted
from tests.models import ROWS, Memory, Mlp, norm_model, pair


def on(model: nn.Module, **options: Any) -> Microbatcher:
    return Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), **options)


def told(run: Any, *batches: Any) -> list[tuple[type, str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batch in batches:
            run(batch)
    return [(each.category, str(each.message)) for each in found]


@pytest.mark.parametrize("size", [None, 20, "auto"])
def test_unsplit_batch_gives_no_warning(size):
    assert told(on(norm_model(), microbatch_size=size).backward, pair()) == []


def test_state_is_unchanged_when_warning_is_raised_as_error():
    model = norm_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BatchNormWarning):
        on(model, microbatch_size=4).backward(pair())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("size", ["auto", 4])
def test_error_mode_raises_before_forward_runs(size):
    model = Memory(norm_model(), most=ROWS)
    with pytest.raises(UnsplittableModelError, match=r"batchnorm='error'.*net\.0.*GroupNorm"):
        on(model, microbatch_size=size, batchnorm="error").backward(pair())
    assert model.seen == []


def test_error_mode_allows_whole_batches_and_models_without_batchnorm():
    on(norm_model(), microbatch_size=None, batchnorm="error").backward(pair())
    assert on(Mlp(), microbatch_size=4, batchnorm="error").backward(pair()).num_microbatches == 3


@pytest.mark.parametrize("size", ["auto", 4])
def test_disable_mode_keeps_batches_whole_and_explains_oom(size):
    fits, tight = (Memory(norm_model(), most=most) for most in (ROWS, ROWS - 1))
    options = {"microbatch_size": size, "batchnorm": "disable"}
    assert on(fits, **options).backward(pair()).attempts == 1
    with pytest.raises(torch.OutOfMemoryError) as raised:
        on(tight, **options).backward(pair())
    assert fits.seen == tight.seen == [ROWS]
    notes = " ".join(raised.value.__notes__)
    assert "batchnorm keeps batches whole, and batchnorm='warn' splits" in notes
    assert not isinstance(raised.value, SampleTooLargeError)


def test_search_ends_at_two_rows_when_batchnorm_rejects_one():
    model = Memory(norm_model(), most=1)
    with pytest.raises(SampleTooLargeError, match="a microbatch of 2 of 8 rows does not fit"):
        on(model, batchnorm="ignore", probe=False).backward(pair(8))


def test_minimum_rows_are_saved_in_state_dict():
    models = [Memory(norm_model(), most=3) for _ in range(2)]
    one, other = (
        on(each, microbatch_size=Scripted([2]), batchnorm="ignore", probe=False) for each in models
    )
    one.backward(pair())
    other.load_state_dict(one.state_dict())
    assert other.backward(pair()).attempts == 1
    assert models[1].seen == [3, 2, 2, 2, 2]


def test_fixed_size_leaving_single_row_raises_error_with_advice():
    model = norm_model()
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        on(model, microbatch_size=2, batchnorm="ignore").backward(pair(5))
    assert "slices of at most 2 of 5 rows leave a single row" in raised.value.__notes__[0]
    assert all(parameter.grad is None for parameter in model.parameters())


# Evaluation


class Observed(nn.Module):
    """A moving average in evaluation mode, as calibration observers keep it."""

    largest: torch.Tensor
    observes = True

    def __init__(self):
        super().__init__()
        self.net = norm_model()
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs):
        if self.observes and not self.training:
            self.largest.lerp_(inputs.max(), 0.1)
        return self.net(inputs)


@pytest.mark.parametrize("run", ["evaluate", "predict"])
def test_buffers_changed_by_split_evaluation_warn_once(run):
    def warned(**options):
        return told(getattr(on(Observed(), **options), run), pair(), pair())

    ((kind, message),) = warned(eval_microbatch_size=4)
    assert kind is BufferWarning
    changes = "the forward in evaluation changes buffers: largest. A split batch changes them 3"
    assert changes in message
    assert "eval_microbatch_size=None" in message
    assert warned(eval_microbatch_size=None) == []
    assert warned(eval_microbatch_size=4, batchnorm="ignore") == []


def test_buffers_that_start_changing_in_later_evaluation_are_reported():
    model = Observed()
    model.observes = False
    microbatcher = on(model, eval_microbatch_size=4)
    microbatcher.evaluate(pair())
    model.observes = True
    with pytest.warns(BufferWarning, match="changes buffers: largest"):
        microbatcher.evaluate(pair())


def evaluated(size, **options: Any) -> tuple[Any, list[Any]]:
    """Evaluate with a layer without running statistics, which averages over the batch."""
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(4, track_running_stats=False)
    model, found = nn.Sequential(nn.Linear(6, 4), layer, nn.Linear(4, 5)).double(), list[Any]()
    microbatcher = on(model, eval_microbatch_size=size, **options)

    def run(batch):
        found.append(microbatcher.evaluate(batch, return_outputs=True))
        assert torch.equal(found[0].outputs, microbatcher.predict(batch))

    return found, told(run, pair(), pair())


def test_split_evaluation_without_running_statistics_warns_once_naming_layer():
    found, caught = evaluated(3)
    assert found[0].num_microbatches == 4
    assert [each for each, _ in caught] == [BatchNormWarning]
    assert "over 3 rows at a time instead of 11: 1, in evaluation" in caught[0][1]
    assert evaluated(3, batchnorm="ignore")[1] == evaluated(None)[1] == []
    for mode in ("disable", "exact"):
        (whole, _), _ = evaluated(None)
        (kept, _), caught = evaluated(3, microbatch_size=None, batchnorm=mode)
        assert (kept.num_microbatches, caught) == (1, [])
        assert torch.equal(kept.outputs, whole.outputs)
        assert torch.equal(kept.loss, whole.loss)
    with pytest.raises(UnsplittableModelError, match=r"evaluation, too: 1.*eval_microbatch"):
        evaluated(3, microbatch_size=None, batchnorm="error")
