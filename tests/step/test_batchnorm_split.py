"""Splitting models with BatchNorm and other buffers: warnings, errors, modes and minimum size."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def caught(microbatcher: Microbatcher, *batches: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batch in batches:
            microbatcher.backward(batch)
    return found


@pytest.mark.parametrize("size", [None, 20, "auto"])
def test_unsplit_batch_gives_no_warning(size: Any) -> None:
    assert caught(on(norm_model(), microbatch_size=size), pair()) == []


# The modes


def test_state_is_unchanged_when_warning_is_raised_as_error() -> None:
    model = norm_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BatchNormWarning):
        on(model, microbatch_size=4).backward(pair())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("size", ["auto", 4])
def test_error_mode_raises_before_forward_runs(size: Any) -> None:
    model = Memory(norm_model(), most=ROWS)
    with pytest.raises(UnsplittableModelError, match=r"batchnorm='error'.*net\.0.*GroupNorm"):
        on(model, microbatch_size=size, batchnorm="error").backward(pair())
    assert model.seen == []


def test_error_mode_allows_whole_batches_and_models_without_batchnorm() -> None:
    on(norm_model(), microbatch_size=None, batchnorm="error").backward(pair())
    assert on(Mlp(), microbatch_size=4, batchnorm="error").backward(pair()).num_microbatches == 3


@pytest.mark.parametrize("size", ["auto", 4])
def test_disable_mode_keeps_batches_whole_and_explains_oom(size: Any) -> None:
    fits = Memory(norm_model(), most=ROWS)
    assert on(fits, microbatch_size=size, batchnorm="disable").backward(pair()).attempts == 1
    assert fits.seen == [ROWS]
    tight = Memory(norm_model(), most=ROWS - 1)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        on(tight, microbatch_size=size, batchnorm="disable").backward(pair())
    assert tight.seen == [ROWS]
    notes = " ".join(raised.value.__notes__)
    assert "batchnorm keeps batches whole, and batchnorm='warn' splits" in notes
    assert not isinstance(raised.value, SampleTooLargeError)


def test_search_ends_at_two_rows_when_batchnorm_rejects_one() -> None:
    model = Memory(norm_model(), most=1)
    with pytest.raises(SampleTooLargeError, match="a microbatch of 2 of 8 rows does not fit"):
        on(model, batchnorm="ignore", probe=False).backward(pair(8))


def test_minimum_rows_are_saved_in_state_dict() -> None:
    def at_two_rows(model: nn.Module) -> Microbatcher:
        return on(model, microbatch_size=Scripted([2]), batchnorm="ignore", probe=False)

    microbatcher = at_two_rows(Memory(norm_model(), most=3))
    microbatcher.backward(pair())
    model = Memory(norm_model(), most=3)
    other = at_two_rows(model)
    other.load_state_dict(microbatcher.state_dict())
    assert other.backward(pair()).attempts == 1
    assert model.seen == [3, 2, 2, 2, 2]


class Observed(nn.Module):
    """A moving average in evaluation mode, as calibration observers keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp()
        self.norm = nn.BatchNorm1d(6).double()
        self.observes = True
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Any:
        if self.observes and not self.training:
            largest = self.get_buffer("largest")
            largest.lerp_(inputs.max(), 0.1)
        return self.net(self.norm(inputs))


@pytest.mark.parametrize("run", ["evaluate", "predict"])
def test_buffers_changed_by_split_evaluation_warn_once(run: str) -> None:
    def told(**options: Any) -> list[str]:
        microbatcher = on(Observed(), **options)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for batch in (pair(), pair()):
                getattr(microbatcher, run)(batch)
        return [str(each.message) for each in found if each.category is BufferWarning]

    (message,) = told(eval_microbatch_size=4)
    assert (
        "the forward in evaluation changes buffers: largest. A split batch changes them 3 times"
        in message
    )
    assert "eval_microbatch_size=None" in message
    assert told(eval_microbatch_size=None) == []
    assert told(eval_microbatch_size=4, batchnorm="ignore") == []


def test_buffers_that_start_changing_in_later_evaluation_are_reported() -> None:
    model = Observed()
    model.observes = False
    microbatcher = on(model, eval_microbatch_size=4)
    microbatcher.evaluate(pair())
    model.observes = True
    with pytest.warns(BufferWarning, match="changes buffers: largest"):
        microbatcher.evaluate(pair())


def test_fixed_size_leaving_single_row_raises_error_with_advice() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    microbatcher = Microbatcher(
        model, loss_fn=nn.CrossEntropyLoss(), microbatch_size=2, batchnorm="ignore"
    )
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        microbatcher.backward((torch.randn(5, 4), torch.zeros(5, dtype=torch.long)))
    assert "slices of at most 2 of 5 rows leave a single row" in raised.value.__notes__[0]
    assert all(parameter.grad is None for parameter in model.parameters())


class TestEvaluationWithoutRunningStatistics:
    """Layers without running statistics average over the batch in evaluation mode, too."""

    @staticmethod
    def evaluate(**options: Any) -> tuple[list[Any], list[warnings.WarningMessage]]:
        torch.manual_seed(0)
        layer = nn.BatchNorm1d(4, track_running_stats=False)
        model = nn.Sequential(nn.Linear(6, 4), layer, nn.Linear(4, 3)).double()
        batch = torch.randn(11, 6, dtype=torch.float64), torch.arange(11) % 3
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), **options)
            found = [microbatcher.evaluate(batch, return_outputs=True) for _ in range(2)]
        assert torch.equal(found[1].outputs, microbatcher.predict(batch))
        return found, caught

    def test_split_evaluation_warns_once_naming_layer(self) -> None:
        found, caught = self.evaluate(eval_microbatch_size=3)
        assert found[0].num_microbatches == 4
        assert [each.category for each in caught] == [BatchNormWarning]
        assert "over 3 rows at a time instead of 11: 1, in evaluation" in str(caught[0].message)
        assert self.evaluate(eval_microbatch_size=3, batchnorm="ignore")[1] == []
        assert self.evaluate(eval_microbatch_size=None)[1] == []

    @pytest.mark.parametrize("mode", ["disable", "exact"])
    def test_disable_and_exact_modes_keep_evaluation_batches_whole(self, mode: str) -> None:
        whole = self.evaluate(eval_microbatch_size=None)[0][0]
        found, caught = self.evaluate(eval_microbatch_size=3, microbatch_size=None, batchnorm=mode)
        assert caught == []
        assert found[0].num_microbatches == 1
        assert torch.equal(found[0].outputs, whole.outputs)
        assert torch.equal(found[0].loss, whole.loss)

    def test_error_mode_mentions_eval_microbatch_size(self) -> None:
        with pytest.raises(UnsplittableModelError, match=r"evaluation, too: 1.*eval_microbatch"):
            self.evaluate(eval_microbatch_size=3, microbatch_size=None, batchnorm="error")
