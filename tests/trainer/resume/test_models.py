"""Whatever a model keeps comes back when a run is taken up again."""

import random
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from automicro.errors import CheckpointError, CheckpointWarning
from tests.trainer.resume.runs import Wrapped, check_resumes, trainer
from tests.trainer.runs import FEATURES


class Noisy(Wrapped):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            inputs = inputs + 0.3 * torch.randn(inputs.shape, generator=self.generator)
        return super().forward(inputs)


class Centred(Wrapped):
    """Keeps a mean in a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        if self.training:
            mean.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
        return super().forward(inputs - mean)


class Remembering(Wrapped):
    """Its buffer, which is not persistent, grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norms", torch.ones(1), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.norms = torch.cat([self.get_buffer("norms"), inputs.detach().norm()[None]])
        return super().forward(inputs) / self.get_buffer("norms").mean()


class Counting(Wrapped):
    """Counts forwards in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += self.training
        return super().forward(inputs) / (1 + self.count)


class Plain(Wrapped):
    """Its state_dict gives a plain dict."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return dict(super().state_dict(*args, **options))


class Copying(Wrapped):
    """Its state_dict gives copies."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        return type(state)((name, value.clone()) for name, value in state.items())


class Expanded(Wrapped):
    """Has a buffer whose rows share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, FEATURES).expand(4, FEATURES))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, inputs: Tensor) -> Tensor:
        mask = self.get_buffer("mask")
        if self.training:
            mask[:1].mul_(0.9)
        return super().forward(inputs * mask[0])


class ExpandedCounting(Counting, Expanded):
    """Extra state and rows that share memory at once."""


class Viewed(Wrapped):
    """Has a buffer that is a part of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("view", self.linear.weight.data[:2])


@pytest.mark.parametrize(
    "make",
    [
        *(Remembering, ExpandedCounting, Viewed, Plain),
        *(
            pytest.param(each, marks=pytest.mark.sweep)
            for each in (Noisy, Centred, Counting, Copying, Expanded)
        ),
    ],
)
def test_what_a_model_keeps_comes_back(make: Any, tmp_path: Path) -> None:
    options = {"batchnorm": "ignore", "microbatch_size": None}
    check_resumes(make, tmp_path, options=lambda: options)


class Held:
    """An object that keeps a generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, values: Tensor) -> Tensor:
        return values + 0.3 * torch.randn(values.shape, generator=self.generator)


class NoisyElsewhere(Wrapped):
    """Draws from generators in an object, in a list, in a hook, and from an old one of NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.listed, hooked = Held(), [random.Random(4)], Held()
        self.old = np.random.RandomState(5)
        self.linear.register_forward_hook(lambda module, given, output: hooked(output))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.held(inputs) + self.listed[0].random() + self.old.rand())


class NoisyLoss(nn.Module):
    """A loss that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Held()

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.noise(outputs), targets)


def test_generators_come_back_wherever_a_model_and_its_loss_get_at_them(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {"loss_fn": NoisyLoss(), "loss_average": "samples", "microbatch_size": None}

    check_resumes(NoisyElsewhere, tmp_path, options=options)


class Late(Wrapped):
    """Makes its generator when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.noise = self.noise or Held()
        return super().forward(self.noise(inputs))


def test_a_generator_that_is_not_there_when_a_run_is_taken_up_is_named(tmp_path: Path) -> None:
    trainer(Late(), tmp_path, max_duration="3ba").fit()
    with pytest.warns(CheckpointWarning, match=r"\(noise\.generator\).*Make them before training"):
        trainer(Late(), tmp_path, max_duration="4ba").fit()


class Annealed(Wrapped):
    """Counts its forwards in a plain attribute, and goes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.step += self.training
        return super().forward(inputs) * min(1.0, self.step / 10)


class Averaging(Wrapped):
    """Keeps an average in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * inputs.detach().mean(0)
        return super().forward(inputs - self.average)


class Caching(Wrapped):
    """Keeps its last output, how long it took, and a list for people."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.norms: list[float] = []
        self.seconds = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        start = time.perf_counter()
        outputs = super().forward(inputs)
        self.last = outputs
        self.norms.append(float(outputs.detach().norm()))
        self.seconds = time.perf_counter() - start
        return outputs


@pytest.mark.parametrize(("make", "name"), [(Annealed, "step"), (Averaging, "average")])
@pytest.mark.parametrize("size", [None, 4])
def test_attributes_that_no_checkpoint_holds_are_named(
    make: Any, name: str, size: int | None, tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(make(), tmp_path, probe=True, loss_average="samples", microbatch_size=size).fit()
    said = [str(each.message) for each in caught if each.category is CheckpointWarning]
    assert len(said) == 1
    assert f"each forward changes {name}, but no checkpoint holds" in said[0]
    assert said[0].endswith("get_extra_state and set_extra_state")


@pytest.mark.parametrize("make", [Wrapped, Counting, Centred, Remembering, Caching, Noisy])
def test_what_a_checkpoint_holds_and_what_does_not_matter_is_not_named(
    make: Any, tmp_path: Path
) -> None:
    trainer(make(), tmp_path, probe=True, microbatch_size=None).fit()


class Stubborn(Counting):
    """Refuses its own state."""

    def set_extra_state(self, state: dict[str, int]) -> None:
        raise KeyError("count")


def test_a_model_that_refuses_its_own_state_is_named(tmp_path: Path) -> None:
    trainer(Stubborn(), tmp_path, max_duration="1ba").fit()
    with pytest.raises(CheckpointError, match=r"Stubborn\.load_state_dict fails.*KeyError"):
        trainer(Stubborn(), tmp_path).fit()


class Unlike(Wrapped):
    """Its rows were different ones when it was saved, and share memory now."""

    def __init__(self, *, expanded: bool) -> None:
        super().__init__()
        rows = torch.ones(1, 2).expand(3, 2) if expanded else torch.arange(6.0).view(3, 2)
        self.register_buffer("rows", rows)


def test_rows_that_share_memory_take_no_different_values(tmp_path: Path) -> None:
    trainer(Unlike(expanded=False), tmp_path, max_duration="1ba").fit()
    with pytest.raises(CheckpointError, match=r"elements of rows share memory.*\.clone\(\)"):
        trainer(Unlike(expanded=True), tmp_path).fit()
