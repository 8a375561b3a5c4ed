"""Training recovers when memory runs out late in a run, as rows grow or parts are unfrozen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Halving, Trainer
from automicro.batch.device import on_host
from automicro.callbacks import GrowthSchedule
from automicro.events.callback import Callback
from automicro.events.run import LoopState, Run
from automicro.step.results import StepResult
from tests.callbacks.runs import Scripted, Sizes, Unfreezing, assert_equal, copy_of, trainer_with
from tests.sweeps import mostly_in_sweeps
from tests.trainer.runs import CLASSES, FEATURES, make_loader, make_model

VOCABULARY, LENGTH = 11, 32


class Gradients(Callback):
    """Compares the gradient of every batch with that of the whole batch at once."""

    def __init__(self) -> None:
        self.errors: list[float] = []

    def batch_start(self, run: Run, batch: Any) -> None:
        self._batch = batch

    def gradients_ready(self, run: Run, result: StepResult) -> None:
        trained = [each for each in run.model.parameters() if each.requires_grad]
        with on_host():  # not counted
            loss = nn.functional.cross_entropy(run.model(self._batch[0]), self._batch[1])
            exact = torch.autograd.grad(loss, trained)
        for parameter, gradient in zip(trained, exact, strict=True):
            assert parameter.grad is not None
            self.errors.append(float((parameter.grad - gradient).norm() / gradient.norm()))


def test_late_unfreezing_reduces_microbatch_size() -> None:
    def train(model: nn.Module, *extra: Callback, **options: Any) -> Trainer:
        loader = make_loader(rows=1024, batch_size=256)
        options = {"train_dataloader": loader, "max_duration": "8ba", **options}
        return trainer_with(Unfreezing({"0": 3, "3": 3}), *extra, model=model, **options)

    model, sizes, gradients = make_model(), Sizes(), Gradients()
    summary = train(model, sizes, gradients, memory_limit="320KiB").fit()
    assert sizes.ooms[:3] == [0, 0, 0]
    assert sizes.ooms[3] > 0
    assert sizes.sizes[0] > sizes.sizes[-1]
    assert max(gradients.errors) < 1e-5
    assert summary.train_ooms == sum(sizes.ooms)
    # The same sizes without a limit give identical bits.
    expected = make_model()
    train(expected, microbatch_size=Scripted(sizes.sizes)).fit()
    assert_equal(copy_of(model), copy_of(expected))


def image_model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


def images() -> list[Any]:
    inputs = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    return [(each, each.mean((2, 3)).argmax(1)) for each in inputs.split(16)]


def token_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 16), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, VOCABULARY)
    )


def tokens() -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (64, LENGTH), generator=generator)
    return [(each, (each + 1) % VOCABULARY) for each in ids.split(16)]


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def resize_images(batch: Any, size: int) -> Any:
    return torch.nn.functional.interpolate(batch[0], (size, size), mode="bilinear"), batch[1]


def cut_tokens(batch: Any, size: int) -> Any:
    return tuple(each[:, :size] for each in batch)


GROWTH: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any], Any]] = {
    "images": (
        image_model,
        lambda: GrowthSchedule(4, 16, over="8ba", steps=4, resize=resize_images),
        {"max_duration": "12ba", "optimizer": torch.optim.SGD, "train_dataloader": images()},
        "360KiB",
    ),
    "sequences": (
        token_model,
        lambda: GrowthSchedule(4, LENGTH, over="6ba", multiple_of=4, resize=cut_tokens),
        {"max_duration": "10ba", "loss_fn": token_loss, "train_dataloader": tokens()},
        "300KiB",
    ),
}


@pytest.mark.parametrize("is_plain", mostly_in_sweeps([True, False], quick=[True]))
@pytest.mark.parametrize("kind", GROWTH)
def test_training_continues_when_growing_rows_exhaust_memory(kind: str, is_plain: bool) -> None:
    make, schedule, options, limit = GROWTH[kind]

    def train(model: nn.Module, *extra: Callback, **more: Any) -> Any:
        return trainer_with(schedule(), *extra, model=model, **options, **more).fit()

    model, sizes = make(), Sizes()
    size = Halving(refine=False) if is_plain else "auto"
    summary = train(model, sizes, memory_limit=limit, microbatch_size=size)
    assert sizes.ooms[0] == 0
    assert sizes.sizes[-1] < sizes.sizes[0]
    assert sum(sizes.ooms) == summary.train_ooms
    if is_plain:  # "auto" anticipates the growth
        assert summary.train_ooms > 0
        assert kind != "images" or next(n for n, ooms in enumerate(sizes.ooms) if ooms) >= 4
    expected = make()
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
