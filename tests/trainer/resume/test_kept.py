"""State of models, metrics and loaders is restored when a run resumes."""

import itertools
import random
import time
import types
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset
from torchmetrics import Metric, MetricCollection, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision
from torchmetrics.wrappers import Running

from automicro.errors import CheckpointError, CheckpointWarning
from automicro.trainer.evaluators import Evaluator
from automicro.trainer.metrics import MetricSet
from tests.trainer.resume.runs import Wrapped, check_resumes, linear, trainer
from tests.trainer.runs import CLASSES, FEATURES

ROWS, BATCH_SIZE = 32, 16  # two batches per epoch, so checkpoints cover three epochs


class Remembering(Wrapped):
    """Has buffers that are not persistent: one is updated in place, and the other grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES), persistent=False)
        self.register_buffer("norms", torch.ones(1), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        if self.training:
            mean.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
            self.norms = torch.cat([self.get_buffer("norms"), inputs.detach().norm()[None]])
        return super().forward(inputs - mean) / self.get_buffer("norms").mean()


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
    """Its state_dict is a plain dict of copies."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        return {name: value.clone() for name, value in state.items()}


class Expanded(Counting):
    """Has extra state, and a buffer with rows that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, FEATURES).expand(4, FEATURES))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, inputs: Tensor) -> Tensor:
        mask = self.get_buffer("mask")
        if self.training:
            mask[:1].mul_(0.9)
        return super().forward(inputs * mask[0])


class Viewed(Wrapped):
    """Has a buffer that is a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("view", self.linear.weight.data[:2])


class HoldsGenerator:
    """An object with a generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, values: Tensor) -> Tensor:
        return values + 0.3 * torch.randn(values.shape, generator=self.generator)


class NoisyElsewhere(Wrapped):
    """Draws from generators in an object, a list and a hook, and from a legacy NumPy generator."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.listed, hooked = HoldsGenerator(), [random.Random(4)], HoldsGenerator()
        self.old = np.random.RandomState(5)
        self.linear.register_forward_hook(lambda module, given, output: hooked(output))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.held(inputs) + self.listed[0].random() + self.old.rand())


class NoisyLoss(nn.Module):
    """A loss that draws random numbers."""

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
        self.rows = 0
        self.sums = np.zeros(2)
        self.seen: Counter[int] = Counter()
        self.by_class: defaultdict[int, list[float]] = defaultdict(list)
        self.largest = torch.zeros(())

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        values = outputs.detach().amax(1)
        self.rows += len(outputs)
        self.sums += [values.sum().item(), 1.0]
        self.seen.update(targets.tolist())
        for target, value in zip(targets.tolist(), values.tolist(), strict=True):
            self.by_class[target].append(value)
        self.largest = torch.maximum(self.largest, values.max())

    def compute(self) -> dict[str, float]:
        return {
            "rows": self.rows,
            "sum": self.sums[0],
            "first": self.seen[0],
            "mean": sum(self.by_class[1]) / len(self.by_class[1]),
            "largest": self.largest.item(),
        }


METRICS: dict[str, Callable[[], Any]] = {
    "min and max": lambda: {"accuracy": MinMaxMetric(accuracy())},
    "running": lambda: {"accuracy": Running(accuracy(), window=2)},
    "collection": lambda: MetricCollection([accuracy(), MulticlassPrecision(CLASSES)]),
    "lists": lambda: {"auroc": MulticlassAUROC(CLASSES)},
    "own": lambda: {"own": OwnMetric()},
}


def rows() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(ROWS, FEATURES, generator=draw)
    return TensorDataset(inputs, torch.randint(CLASSES, (ROWS,), generator=draw))


class CountsPasses(Sampler[int]):
    """Counts its passes, and shuffles by their number."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(ROWS), ROWS))

    def __len__(self) -> int:
        return ROWS


class WrapsSampler(Sampler[int]):
    """Takes its order from another sampler; counts in a class, an object, a dict and a queue."""

    passes = 0

    def __init__(self) -> None:
        type(self).passes = 0  # as in a new process
        self.inner: dict[str, Any] = {"samplers": [CountsPasses()], "passes": 0}
        self.own = types.SimpleNamespace(rows=Counter(), recent=deque([0], 3), passes=np.int64(0))

    def __iter__(self) -> Iterator[int]:
        self.inner["passes"] += 1
        type(self).passes += 3
        self.own.passes += 1
        self.own.rows["passes"] += 1
        self.own.recent.append(sum(self.own.recent) + 1)
        turn = (
            self.own.recent[-1] + self.inner["passes"] + self.own.passes + self.own.rows["passes"]
        ) + self.passes
        rows = list(self.inner["samplers"][0])
        return iter([*rows[turn % ROWS :], *rows[: turn % ROWS]])

    def __len__(self) -> int:
        return ROWS


class Shuffling(CountsPasses):
    """Shuffles the order of the previous pass again."""

    def __init__(self, order: Any) -> None:
        super().__init__()
        self.order = order

    def __iter__(self) -> Iterator[int]:
        random.Random(5).shuffle(self.order)
        return iter([int(each) for each in self.order])


class CreatesOrder(CountsPasses):
    """Creates its order in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] | None = None

    def __iter__(self) -> Iterator[int]:
        self.order = [*range(ROWS)] if self.order is None else [*self.order[5:], *self.order[:5]]
        return iter(self.order)


class Batches(Sampler[list[int]]):
    """Shuffles its batches in place."""

    def __init__(self) -> None:
        self.batches = [[*range(first, first + 4)] for first in range(0, ROWS, 4)]

    def __iter__(self) -> Iterator[list[int]]:
        random.Random(5).shuffle(self.batches)
        for first in range(0, len(self.batches), 4):
            yield [*itertools.chain(*self.batches[first : first + 4])]

    def __len__(self) -> int:
        return ROWS // BATCH_SIZE


class Reading(Dataset[Any]):
    """Counts its reads, and returns rows that depend on the count."""

    def __init__(self) -> None:
        self.rows, self.reads = rows(), 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        inputs, target = self.rows[index]
        return inputs / self.reads, target


class Loader:
    """A loader that makes batches itself, and counts its passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        order = torch.tensor(random.Random(self.passes).sample(range(ROWS), ROWS))
        for some in order.split(BATCH_SIZE):
            yield rows()[some]

    def __len__(self) -> int:
        return ROWS // BATCH_SIZE


def loader_with(sampler: Sampler[int]) -> DataLoader[Any]:
    return DataLoader(rows(), BATCH_SIZE, sampler=sampler)


LOADERS: dict[str, Callable[[], Any]] = {
    "wrapped counter": lambda: loader_with(WrapsSampler()),
    "list": lambda: loader_with(Shuffling([*range(ROWS)])),
    "array": lambda: loader_with(Shuffling(np.arange(ROWS))),
    "created in a pass": lambda: loader_with(CreatesOrder()),
    "batches": lambda: DataLoader(rows(), batch_sampler=Batches()),
    "in batch sampler": lambda: DataLoader(
        rows(), batch_sampler=BatchSampler(CountsPasses(), BATCH_SIZE, drop_last=False)
    ),
    "dataset": lambda: DataLoader(Reading(), BATCH_SIZE),
    "workers": lambda: DataLoader(rows(), BATCH_SIZE, sampler=CountsPasses(), num_workers=1),
    "custom loader": Loader,
}


def evaluator(**options: Any) -> Evaluator:
    """Return an evaluator for the first rows of an order."""
    return Evaluator(dataloader=DataLoader(rows(), 16, **options), max_batches=1, interval="1ba")


MODELS: list[Any] = [Remembering, NoisyElsewhere, Expanded, Viewed, Plain]
KINDS = [
    pytest.param(*each, marks=pytest.mark.sweep if number > len(MODELS) else ())
    for number, each in enumerate(
        zip(LOADERS, itertools.cycle(MODELS), itertools.cycle(METRICS), strict=False)
    )
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("loader", "make", "metrics"), KINDS)
def test_saved_state_is_restored(loader: str, make: Any, metrics: str, tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {
            "train_dataloader": LOADERS[loader](),
            "metrics": METRICS[metrics](),
            "loss_fn": NoisyLoss(),
            "loss_average": "samples",
            "batchnorm": "ignore",
            "microbatch_size": None,
            "eval_dataloader": {
                "shuffled": evaluator(shuffle=True, generator=torch.Generator().manual_seed(5)),
                "counted": evaluator(sampler=CountsPasses()),
            },
        }

    check_resumes(make, tmp_path, options=options)


class CreatesGenerator(Wrapped):
    """Creates its generator in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.noise = self.noise or HoldsGenerator()
        return super().forward(self.noise(inputs))


def test_generator_missing_at_resume_is_named(tmp_path: Path) -> None:
    trainer(CreatesGenerator(), tmp_path, max_duration="3ba").fit()
    with pytest.warns(CheckpointWarning, match=r"\(noise\.generator\).*Make them before training"):
        trainer(CreatesGenerator(), tmp_path, max_duration="4ba").fit()


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
        outputs = super().forward(inputs)
        self.last = outputs
        self.norms.append(float(outputs.detach().norm()))
        self.seconds = time.perf_counter() - start
        return outputs


@pytest.mark.parametrize(("make", "name"), [(Annealed, "step"), (Averaging, "average")])
@pytest.mark.parametrize("size", [None, 4])
def test_changing_attributes_outside_checkpoints_are_named(
    make: Any, name: str, size: int | None, tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(make(), tmp_path, probe=True, loss_average="samples", microbatch_size=size).fit()
    said = [str(each.message) for each in caught if each.category is CheckpointWarning]
    assert len(said) == 1
    assert f"each forward changes {name}, but no checkpoint holds" in said[0]
    assert said[0].endswith("get_extra_state and set_extra_state")


@pytest.mark.parametrize("make", [Wrapped, Counting, Remembering, Caching, NoisyElsewhere])
def test_saved_or_irrelevant_attributes_are_not_named(make: Any, tmp_path: Path) -> None:
    trainer(make(), tmp_path, probe=True, microbatch_size=None).fit()


class Stubborn(Counting):
    """Refuses its own saved state."""

    def set_extra_state(self, state: dict[str, int]) -> None:
        raise KeyError("count")


class Forgetful(CountsPasses):
    """Holds an iterator, and cannot load its own state."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("rest")


def test_evaluation_whose_loader_refuses_its_state_is_named(tmp_path: Path) -> None:
    def fit(duration: str) -> None:
        loader = evaluator(sampler=Forgetful())
        trainer(Plain(), tmp_path, max_duration=duration, eval_dataloader=loader).fit()

    fit("1ba")
    with pytest.warns(CheckpointWarning, match=r"cannot be loaded \(KeyError: 'rest'\)"):
        fit("2ba")


def test_model_that_refuses_its_own_state_is_named(tmp_path: Path) -> None:
    trainer(Stubborn(), tmp_path, max_duration="1ba").fit()
    with pytest.raises(CheckpointError, match=r"Stubborn\.load_state_dict fails.*KeyError"):
        trainer(Stubborn(), tmp_path).fit()


class Unlike(Wrapped):
    """Has rows that differ when saved, but share memory when loaded."""

    def __init__(self, *, expanded: bool) -> None:
        super().__init__()
        rows = torch.ones(1, 2).expand(3, 2) if expanded else torch.arange(6.0).view(3, 2)
        self.register_buffer("rows", rows)


def test_rows_that_share_memory_refuse_different_values(tmp_path: Path) -> None:
    trainer(Unlike(expanded=False), tmp_path, max_duration="1ba").fit()
    with pytest.raises(CheckpointError, match=r"elements of rows share memory.*\.clone\(\)"):
        trainer(Unlike(expanded=True), tmp_path).fit()


def test_metric_options_come_from_current_run() -> None:
    device = torch.device("cpu")
    saved = MetricSet({"own": OwnMetric()}, device)
    saved.metrics["own"].update(torch.ones(2, 3), torch.tensor([0, 1]))
    changed = OwnMetric()
    changed.threshold = 0.7
    other = MetricSet({"own": changed}, device)
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
