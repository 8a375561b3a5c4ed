"""Training in half precision: loss scaling, and steps skipped after overflows."""

import pytest
import torch
from torch import Tensor, nn

from automicro import NonFiniteLossError
from tests.outside import Unreached
from tests.trainer.runs import (
    FEATURES,
    adam,
    assert_same,
    make_loader,
    make_model,
    make_trainer,
    schedule,
)


def train_by_hand(model: nn.Module, *, clip: float | None = None) -> torch.amp.GradScaler:
    """Train with the loop of torch's documentation."""
    optimizer = adam(model.parameters())
    scheduler = schedule(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for inputs, targets in make_loader():
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= before:
            scheduler.step()
    return scaler


class Overflows(nn.Module):
    """A linear model with a finite loss whose gradient is infinite at some training forwards."""

    calls = Unreached()

    def __init__(self, *calls: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(FEATURES, 3)
        self.calls = 0
        self._at = calls

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.linear(inputs)
        if self.calls in self._at:
            outputs = outputs + (outputs * 0).abs().sqrt()  # zero, with an infinite slope
        return outputs


@pytest.mark.parametrize("clip", [None, 0.1])
def test_fp16_trains_like_loop_of_torch_documentation(clip: float | None) -> None:
    ours, theirs = make_model(), make_model()
    trainer = make_trainer(
        ours, precision="fp16", grad_clip_norm=clip, microbatch_size=None, scheduler=schedule
    )
    trainer.fit()
    train_by_hand(theirs, clip=clip)
    assert_same(ours, theirs)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_overflowing_gradients_are_skipped_like_in_torch_loop(
    clip: float | None, capfd: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = Overflows(2, 3), Overflows(2, 3)
    trainer = make_trainer(
        ours,
        precision="fp16",
        grad_clip_norm=clip,
        microbatch_size=None,
        scheduler=schedule,
        progress=True,
    )
    summary = trainer.fit()
    assert train_by_hand(theirs, clip=clip).get_scale() == 2.0**14
    assert_same(ours, theirs)
    assert (summary.steps, summary.skipped_steps) == (2, 2)
    assert (
        capfd.readouterr().out.count(
            "gradients overflowed, so the scale of the loss was lowered in epoch 1, batch"
        )
        == 2
    )


def test_gradients_that_always_overflow_end_run() -> None:
    trainer = make_trainer(
        Overflows(*range(100)), precision="fp16", microbatch_size=None, max_duration="99ba"
    )
    with pytest.raises(
        NonFiniteLossError, match=r"gradients overflowed.*50 skipped batches before it"
    ):
        trainer.fit()
