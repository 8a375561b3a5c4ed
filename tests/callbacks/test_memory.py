"""Memory that grows deep into training, and passes of a callback's own: both are survived."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from automicro import Halving, Microbatcher, Trainer
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
        self._batch: Any = None

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


class Images(nn.Sequential):
    """Images of any size to classes."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, CLASSES),
        )


class Tokens(nn.Module):
    """Token ids to a loss over them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.hidden = nn.Linear(16, 64)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.relu(self.hidden(self.embedding(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def images() -> DataLoader:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(64, 3, 16, 16, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.mean((2, 3)).argmax(1)), batch_size=16)


def tokens() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (64, LENGTH), generator=generator)
    return [{"input_ids": each, "labels": (each + 1) % VOCABULARY} for each in ids.split(16)]


def test_layers_unfreeze_deep_into_training_and_need_more_memory() -> None:
    def train(model: nn.Module, *extra: Callback, **options: Any) -> Trainer:
        schedule = Unfreezing({"0": 3, "3": 3})
        loader = make_loader(rows=1024, batch_size=256)
        return trainer_with(
            schedule, *extra, model=model, train_dataloader=loader, max_duration="8ba", **options
        )

    model, sizes, gradients = make_model(), Sizes(), Gradients()
    summary = train(model, sizes, gradients, memory_limit="320KiB").fit()
    assert sizes.ooms[:3] == [0, 0, 0]
    assert sizes.ooms[3] > 0
    assert sizes.sizes[0] > sizes.sizes[-1]
    assert max(gradients.errors) < 1e-5
    assert summary.train_ooms == sum(sizes.ooms)
    # The same sizes without a limit: not a bit differs.
    expected = make_model()
    train(expected, microbatch_size=Scripted(sizes.sizes)).fit()
    assert_equal(copy_of(model), copy_of(expected))


def resize_images(batch: Any, size: int) -> Any:
    return torch.nn.functional.interpolate(batch[0], (size, size), mode="bilinear"), batch[1]


def cut_tokens(batch: Any, size: int) -> Any:
    return {key: each[:, :size] for key, each in batch.items()}


OF_IMAGES = {"max_duration": "12ba", "optimizer": torch.optim.SGD}
OF_TOKENS = {"max_duration": "10ba", "loss_fn": None}
GROWTH: dict[str, Any] = {
    "images": (Images, images, "360KiB", OF_IMAGES),
    "sequences": (Tokens, tokens, "300KiB", OF_TOKENS),
}


@pytest.mark.parametrize("is_plain", mostly_in_sweeps([True, False], quick=[True]))
@pytest.mark.parametrize("kind", GROWTH)
def test_rows_grow_until_memory_runs_out_and_training_goes_on(kind: str, is_plain: bool) -> None:
    make, loader, limit, options = GROWTH[kind]

    def train(model: nn.Module, *extra: Callback, **more: Any) -> Any:
        given = {"model": model, "train_dataloader": loader(), **options, **more}
        images = GrowthSchedule(4, 16, over="8ba", steps=4, resize=resize_images)
        words = GrowthSchedule(4, LENGTH, over="6ba", multiple_of=4, resize=cut_tokens)
        return trainer_with(images if make is Images else words, *extra, **given).fit()

    model, sizes = make(), Sizes()
    size = Halving(refine=False) if is_plain else "auto"
    summary = train(model, sizes, memory_limit=limit, microbatch_size=size)
    assert sizes.ooms[0] == 0
    assert sizes.sizes[-1] < sizes.sizes[0]
    assert sum(sizes.ooms) == summary.train_ooms
    if is_plain:  # "auto" sees it coming
        assert summary.train_ooms > 0
        assert kind != "images" or next(n for n, ooms in enumerate(sizes.ooms) if ooms) >= 4
    expected = make()
    train(expected, microbatch_size=Scripted(sizes.sizes))
    assert_equal(copy_of(model), copy_of(expected))


class SharpnessAware(Callback):
    """Trains on the gradient at the worst point nearby (Foret et al., 2020).

    Its own forward and backward runs out of memory as the trainer's does, and survives it.
    """

    def __init__(self, radius: float = 0.05, **options: Any) -> None:
        self.radius = radius
        self.options = options
        self.sizes: list[int] = []
        self.ooms = 0
        self._microbatcher: Microbatcher | None = None
        self._ascent: list[tuple[nn.Parameter, Tensor]] = []

    def fit_start(self, run: Run) -> None:
        self._microbatcher = run.microbatcher(**self.options)

    def batch_start(self, run: Run, batch: Any) -> None:
        assert self._microbatcher is not None
        result = self._microbatcher.backward(batch)
        self.ooms += result.ooms
        self.sizes.append(result.microbatch_size)
        parameters = [each for each in run.model.parameters() if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()  # type: ignore[union-attr]
        with torch.no_grad():
            self._ascent = [(each, each.grad * (self.radius / norm)) for each in parameters]
            for parameter, ascent in self._ascent:
                parameter.add_(ascent)
                parameter.grad = None

    def gradients_ready(self, run: Run, result: StepResult) -> None:
        with torch.no_grad():
            for parameter, ascent in self._ascent:
                parameter.sub_(ascent)
        self._ascent = []


def test_a_callback_that_runs_the_model_itself_survives_running_out_of_memory() -> None:
    def train(model: nn.Module, ascent: SharpnessAware, **options: Any) -> Sizes:
        sizes = Sizes()
        loader = make_loader(rows=512, batch_size=256)
        trainer_with(ascent, sizes, model=model, train_dataloader=loader, **options).fit()
        return sizes

    small, whole, ascent = make_model(), make_model(), SharpnessAware()
    sizes = train(small, ascent, memory_limit="256KiB")
    assert ascent.ooms > 0
    assert sum(sizes.ooms) > 0
    train(whole, SharpnessAware())
    for parameter, expected in zip(small.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)
    # At the same sizes without a limit there is not a bit of difference.
    same = make_model()
    scripted = SharpnessAware(microbatch_size=Scripted(ascent.sizes))
    train(same, scripted, microbatch_size=Scripted(sizes.sizes))
    assert scripted.ooms == 0
    assert_equal(copy_of(small), copy_of(same))


def test_sizes_grow_in_steps_and_by_multiples() -> None:
    def sizes(**options: Any) -> list[int]:
        schedule = GrowthSchedule(10, 31, over="6ba", resize=lambda batch, size: batch, **options)
        return [schedule.size(LoopState(batch=batch)) for batch in range(8)]

    assert sizes() == [10, 13, 17, 20, 24, 27, 31, 31]
    assert sizes(multiple_of=8) == [10, 10, 16, 16, 24, 24, 31, 31]
    assert sizes(steps=3) == [10, 10, 17, 17, 24, 24, 31, 31]


def test_a_schedule_may_have_a_function_of_ones_own() -> None:
    class Shapes(Callback):
        def __init__(self) -> None:
            self.widths: list[tuple[int, float]] = []

        def batch_start(self, run: Run, batch: Any) -> None:
            zeros = int((batch[0] == 0).all(0).sum())
            self.widths.append((FEATURES - zeros, run.values["train/size"]))

    def hide(batch: Any, size: int) -> Any:
        shown = torch.arange(FEATURES) < size
        return batch[0] * shown, batch[1]

    shapes = Shapes()
    trainer_with(GrowthSchedule(4, FEATURES, over="4ba", resize=hide), shapes).fit()
    assert shapes.widths == [(4, 4), (6, 6), (8, 8), (10, 10)]
