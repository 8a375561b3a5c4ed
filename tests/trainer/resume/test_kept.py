"""State of models, metrics, loaders and optimizers is restored when a run resumes."""

import random
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchmetrics import Metric, MetricCollection, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision
from torchmetrics.wrappers import Running

from automicro import Callback
from automicro.data import LengthBatchSampler
from automicro.errors import CheckpointWarning
from automicro.trainer.evaluators import Evaluator
from automicro.trainer.metrics import MetricSet
from tests.trainer.resume.runs import HoldsGenerator, Wrapped, check_resumes, linear, trainer
from tests.trainer.runs import CLASSES, FEATURES, ScheduleFree, make_loader

ROWS, BATCH_SIZE = 32, 16  # two batches per epoch, so checkpoints cover three epochs


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


class Keeping(Counting):
    """Has buffers of all kinds, and generators in an object, a list, a hook and of NumPy."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {"mean": torch.zeros(FEATURES), "norms": torch.ones(1)}.items():
            self.register_buffer(name, value, persistent=False)
        self.register_buffer("mask", torch.ones(1, FEATURES).expand(4, FEATURES))  # shares memory
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("view", self.linear.weight.data[:2])
        self.held, self.listed, hooked = HoldsGenerator(), [random.Random(4)], HoldsGenerator()
        self.old = np.random.RandomState(5)
        self.linear.register_forward_hook(lambda module, given, output: hooked(output))

    def forward(self, inputs: Tensor) -> Tensor:
        mean, mask = self.get_buffer("mean"), self.get_buffer("mask")
        if self.training:
            mean.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
            self.norms = torch.cat([self.get_buffer("norms"), inputs.detach().norm()[None]])
            mask[:1].mul_(0.9)
        inputs = (inputs - mean) * mask[0] / self.get_buffer("norms").mean()
        return super().forward(self.held(inputs) + self.listed[0].random() + self.old.rand())


class Plain(Wrapped):
    """Its state_dict is a plain dict of copies."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        return {name: value.clone() for name, value in state.items()}


class NoisyLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = HoldsGenerator()

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.noise(outputs), targets)


def accuracy() -> Metric:
    return MulticlassAccuracy(CLASSES)


class OwnMetric:
    """Counts in attributes of many types, and has no state_dict."""

    def __init__(self) -> None:
        self.threshold = 0.5
        self.reset()

    def reset(self) -> None:
        self.rows, self.sums, self.largest = 0, np.zeros(2), torch.zeros(())
        self.seen: Counter[int] = Counter()
        self.by_class: defaultdict[int, list[float]] = defaultdict(list)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        values = outputs.detach().amax(1)
        self.rows += len(outputs)
        self.sums += [values.sum().item(), 1.0]
        self.seen.update(targets.tolist())
        for target, value in zip(targets.tolist(), values.tolist(), strict=True):
            self.by_class[target].append(value)
        self.largest = torch.maximum(self.largest, values.max())

    def compute(self) -> dict[str, float]:
        mean = sum(self.by_class[1]) / len(self.by_class[1])
        found = {"rows": self.rows, "sum": self.sums[0], "first": self.seen[0], "mean": mean}
        return {**found, "largest": self.largest.item()}


def rows() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(ROWS, FEATURES, generator=draw)
    return TensorDataset(inputs, torch.randint(CLASSES, (ROWS,), generator=draw))


class Loader:
    """A loader that makes batches itself, and counts its passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        order = torch.tensor(random.Random(self.passes).sample(range(ROWS), ROWS))
        return (rows()[some] for some in order.split(BATCH_SIZE))

    def __len__(self) -> int:
        return ROWS // BATCH_SIZE


class OnlyAtStart(Callback):
    def rehearsal_end(self, run: Any, report: Any) -> None:
        assert run.state.batch == 0


def by_length(mode: str) -> DataLoader[Any]:
    """Return three or more batches per epoch, of rows sorted by length."""
    lengths = [1.0 + 7 * row % 11 / 2 for row in range(ROWS)]
    sampler = LengthBatchSampler(rows(), mode=mode, lengths=lengths, batch_length=40.0)
    return DataLoader(rows(), batch_sampler=sampler)


def evaluators() -> dict[str, Any]:
    """Return evaluators of the first rows of two orders."""
    orders: dict[str, dict[str, Any]] = {
        "own": {"generator": torch.Generator().manual_seed(5)},
        "shuffled": {},
    }
    return {
        name: Evaluator(
            dataloader=DataLoader(rows(), 16, shuffle=True, **order),
            metrics=None,
            max_batches=1,
            interval="1ba",
        )
        for name, order in orders.items()
    }


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "buffers, generators and metrics": (
        Keeping,
        lambda: {
            "train_dataloader": DataLoader(rows(), BATCH_SIZE, shuffle=True),
            "metrics": {
                "extremes": MinMaxMetric(accuracy()),
                "running": Running(accuracy(), window=2),
                "lists": MulticlassAUROC(CLASSES),
                "own": OwnMetric(),
            },
            "loss_fn": NoisyLoss(),
            "loss_average": "samples",
            "batchnorm": "ignore",
            "microbatch_size": None,
            "eval_dataloader": evaluators(),
        },
    ),
    "collection and loader of its own": (
        Plain,
        lambda: {
            "train_dataloader": Loader(),
            "metrics": MetricCollection([accuracy(), MulticlassPrecision(CLASSES)]),
            "eval_dataloader": Loader(),
        },
    ),
    "batches by length": (linear, lambda: {"train_dataloader": by_length("duration")}),
    "buckets": (linear, lambda: {"train_dataloader": by_length("1D-bucketing-dyn")}),
    "other weights for evaluation": (
        linear,
        lambda: {"optimizer": ScheduleFree, "eval_dataloader": make_loader()},
    ),
    "rehearsal": (linear, lambda: {"rehearse": "worst", "callbacks": [OnlyAtStart()]}),
}


@pytest.mark.parametrize(("make", "options"), KINDS.values(), ids=KINDS)
def test_saved_state_is_restored(make: Any, options: Any, tmp_path: Path) -> None:
    check_resumes(make, tmp_path, options=options)


class Annealed(Wrapped):
    """Counts its forwards in a plain attribute that affects the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.step += self.training
        return super().forward(inputs) * min(1.0, self.step / 10)


class Averaging(Wrapped):
    """Keeps an average in a tensor that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * inputs.detach().mean(0)
        return super().forward(inputs - self.average)


class Caching(Wrapped):
    """Keeps its last output, its duration, and a list of norms that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.norms: list[float] = []
        self.seconds = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        start = time.perf_counter()
        self.last = outputs = super().forward(inputs)
        self.norms.append(float(outputs.detach().norm()))
        self.seconds = time.perf_counter() - start
        return outputs


@pytest.mark.parametrize(
    ("make", "size", "name"),
    [
        (Annealed, None, "step"),
        (Averaging, 4, "average"),
        *((make, None, None) for make in (Counting, Keeping, Caching)),
    ],
)
def test_changing_attributes_outside_checkpoints_are_named(
    make: Any, size: int | None, name: str | None, tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(make(), tmp_path, probe=True, loss_average="samples", microbatch_size=size).fit()
    said = [str(each.message) for each in caught if each.category is CheckpointWarning]
    assert len(said) == (name is not None)
    assert all(f"each forward changes {name}, but no checkpoint holds" in each for each in said)


def test_metric_options_come_from_current_run() -> None:
    saved, other = (MetricSet({"own": OwnMetric()}, torch.device("cpu")) for _ in range(2))
    saved.metrics["own"].update(torch.ones(2, 3), torch.tensor([0, 1]))
    other.metrics["own"].threshold = 0.7
    other.load_state_dict(saved.state_dict())
    assert (other.metrics["own"].rows, other.metrics["own"].threshold) == (2, 0.7)


class Window(OwnMetric):
    """Keeps a value that checkpoints cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.last = deque([0.0], maxlen=3)


def test_metric_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.warns(CheckpointWarning, match=r"hold last \(a deque\) of the metric Window"):
        trainer(linear(), tmp_path, metrics={"w": Window()}, max_duration="2ba").fit()


class Forgetful(Sampler[int]):
    """Holds an iterator, and cannot load its own state."""

    def __init__(self) -> None:
        self.rest = iter(())

    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("rest")


def test_evaluation_whose_loader_refuses_its_state_is_named(tmp_path: Path) -> None:
    rows = TensorDataset(torch.randn(ROWS, FEATURES), torch.zeros(ROWS).long())

    def fit(duration: str) -> None:
        loader = DataLoader(rows, BATCH_SIZE, sampler=Forgetful())
        trainer(linear(), tmp_path, max_duration=duration, eval_dataloader=loader).fit()

    fit("1ba")
    with pytest.warns(CheckpointWarning, match=r"cannot be loaded \(KeyError: 'rest'\)"):
        fit("2ba")
