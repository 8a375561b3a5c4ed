"""Training recovers when memory runs out late in a run, as rows grow or parts are unfrozen."""

from typing import Any

import pytest
import torch
from torch import nn

from automicro import Halving
from automicro.callbacks import GrowthSchedule
from automicro.events.callback import Callback
from automicro.events.run import LoopState, Run
from tests.callbacks.runs import Scripted, Sizes, Unfreezing, assert_equal, copy_of, trainer_with
from tests.sweeps import mostly_in_sweeps
from tests.trainer.runs import CLASSES, FEATURES, make_loader, make_model


def test_late_unfreezing_reduces_microbatch_size() -> None:
    def train(model: nn.Module, *extra: Callback, **options: Any) -> Any:
        loader = make_loader(rows=1024, batch_size=256)
        options = {"train_dataloader": loader, "max_duration": "8ba", **options}
        return trainer_with(Unfreezing({"0": 3, "3": 3}), *extra, model=model, **options).fit()

    model, expected, sizes = make_model(), make_model(), Sizes()
    summary = train(model, sizes, memory_limit="320KiB")
    assert sizes.ooms[:3] == [0, 0, 0]
    assert sizes.ooms[3] > 0
    assert sizes.sizes[0] > sizes.sizes[-1]
    assert summary.train_ooms == sum(sizes.ooms)
    # The same sizes without a limit give identical bits.
    train(expected, microbatch_size=Scripted(sizes.sizes))
    assert_equal(copy_of(model), copy_of(expected))


def image_model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


def images() -> list[Any]:
    inputs = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    return [(each, each.mean((2, 3)).argmax(1)) for each in inputs.split(16)]


def resize_images(batch: Any, size: int) -> Any:
    return torch.nn.functional.interpolate(batch[0], (size, size), mode="bilinear"), batch[1]


@pytest.mark.parametrize("is_plain", mostly_in_sweeps([True, False], quick=[True]))
def test_training_continues_when_growing_rows_exhaust_memory(is_plain: bool) -> None:
    def train(model: nn.Module, *extra: Callback, **more: Any) -> Any:
        schedule = GrowthSchedule(4, 16, over="8ba", steps=4, resize=resize_images)
        more |= {"max_duration": "12ba", "optimizer": torch.optim.SGD, "train_dataloader": images()}
        return trainer_with(schedule, *extra, model=model, **more).fit()

    model, expected, sizes = image_model(), image_model(), Sizes()
    size = Halving(refine=False) if is_plain else "auto"
    summary = train(model, sizes, memory_limit="360KiB", microbatch_size=size)
    assert sizes.ooms[:4] == [0, 0, 0, 0]
    assert sizes.sizes[-1] < sizes.sizes[0]
    assert sum(sizes.ooms) == summary.train_ooms
    assert summary.train_ooms > 0 or not is_plain  # "auto" anticipates the growth
    train(expected, microbatch_size=Scripted(sizes.sizes))
    assert_equal(copy_of(model), copy_of(expected))


def test_schedule_sizes_follow_steps_and_multiples() -> None:
    def sizes(**options: Any) -> list[int]:
        schedule = GrowthSchedule(10, 31, over="6ba", resize=lambda batch, size: batch, **options)
        return [schedule.size(LoopState(batch=batch)) for batch in range(8)]

    assert sizes() == [10, 13, 17, 20, 24, 27, 31, 31]
    assert sizes(multiple_of=8) == [10, 10, 16, 16, 24, 24, 31, 31]
    assert sizes(steps=3) == [10, 10, 17, 17, 24, 24, 31, 31]


def test_growth_schedule_resizes_batches_and_logs_size() -> None:
    widths: list[tuple[int, float]] = []

    class Shapes(Callback):
        def batch_start(self, run: Run, batch: Any) -> None:
            zeros = int((batch[0] == 0).all(0).sum())
            widths.append((FEATURES - zeros, run.values["train/size"]))

    def hide(batch: Any, size: int) -> Any:
        return batch[0] * (torch.arange(FEATURES) < size), batch[1]

    trainer_with(GrowthSchedule(4, FEATURES, over="4ba", resize=hide), Shapes()).fit()
    assert widths == [(4, 4), (6, 6), (8, 8), (10, 10)]
