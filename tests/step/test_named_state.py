"""State that depends on the number of calls: which warning names it, where, and how often."""

import random
import time
import types
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from automicro import (
    BatchNormWarning,
    BufferWarning,
    Halving,
    MemoryBudget,
    Microbatcher,
    Trainer,
    find_batchnorm,
    is_extra_pass,
)
from automicro.modules import ModuleIndex
from automicro.reach import Reach
from tests.outside import Outside
from tests.sweeps import mostly_in_sweeps


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator).double(), torch.randn(
        8, 3, generator=generator
    ).double()


class Remembering(nn.Module):
    """Keep a value in attributes, as an entry of `KEPT` does."""

    def __init__(self, keep: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.net, self.keep = nn.Linear(4, 3).double(), keep
        self.step, self.mean, self.rows, self.longest = 0, torch.zeros(4).double(), 0, 0
        self.records: dict[str, list[float]] = {"loss": []}
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.last, self.mask, self.at = torch.zeros(1), None, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        outputs: Tensor = self.net(x)
        return outputs


def _set(**how: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], object]:
    def keep(model: Any, x: Tensor) -> None:
        for name, new in how.items():
            setattr(model, name, new(model, x))

    return keep


def _add_to_weight(model: Any, share: Tensor) -> None:
    weight = model.net.weight
    weight.seen = getattr(weight, "seen", 0) + share


KEPT: dict[str, tuple[str, Callable[[Any, Tensor], object]]] = {
    # These depend on the number of calls and are named.
    "a counter": ("step", _set(step=lambda m, x: m.step + 1)),
    "a moving average": ("mean", _set(mean=lambda m, x: m.mean * 0.9 + x.detach().mean(0) * 0.1)),
    "one in place": ("mean", lambda m, x: m.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)),
    "a record": ("records", lambda m, x: m.records["loss"].append(float(x.sum()))),
    "a queue": ("recent", lambda m, x: m.recent.append(x.detach().mean(0))),
    "an average on a parameter": ("net.weight", lambda m, x: _add_to_weight(m, x.detach().mean(0))),
    # These do not, and are not named.
    "rows on a parameter": ("", lambda m, x: _add_to_weight(m, torch.tensor(len(x)))),
    "rows that add up": ("", _set(rows=lambda m, x: m.rows + len(x))),
    "a sum over rows": ("", _set(mean=lambda m, x: m.mean + x.detach().sum(0))),
    "the last input": ("", _set(last=lambda m, x: x.detach())),
    "the largest": ("", _set(longest=lambda m, x: max(m.longest, x.shape[1]))),
    "first-call value": (
        "",
        _set(mask=lambda m, x: torch.ones(4) if m.mask is None else m.mask),
    ),
    "the time": ("", _set(at=lambda m, x: time.perf_counter())),
    "a random number": ("", _set(last=lambda m, x: torch.rand(2))),
}


@pytest.mark.parametrize("size", mostly_in_sweeps([3, "auto"], quick=[3]))
@pytest.mark.parametrize("kind", KEPT)
def test_call_counting_state_is_named_when_batch_is_split(kind: str, size: Any) -> None:
    name, keep = KEPT[kind]
    model = Remembering(keep)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=size)
        for _ in range(3):
            microbatcher.backward((torch.randn(8, 4).double(), torch.randn(8, 3).double()))
    told = [str(each.message) for each in caught if each.category is BufferWarning]
    if not name or size != 3:
        assert told == []
    else:
        (message,) = told
        assert message.startswith(f"the training forward changes attributes or variables: {name}.")
        assert "changes them 3 times" in message


class Counting:
    """Count the calls of a hook."""

    calls = 0

    def count(self, *_: Any) -> None:
        self.calls += 1


class CountingSGD(Counting, torch.optim.SGD):
    """An optimizer that keeps data from its own hooks, as K-FAC does."""


@pytest.mark.parametrize("kind", [Counting, CountingSGD])
def test_hook_owner_state_is_named_and_unchanged_by_check(kind: Any) -> None:
    model = nn.Linear(4, 3).double()
    owner = kind() if kind is Counting else kind(model.parameters(), 0.1)
    model.register_forward_hook(owner.count)
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=4)
    with pytest.warns(BufferWarning, match=rf"attributes or variables: {kind.__name__}"):
        microbatcher.backward(data())
    assert owner.calls == 2


class Timing(nn.Module):
    """Keep the duration of the last call on a busy machine."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seconds = nn.Linear(4, 3).double(), 0.0

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x)
        now = time.perf_counter_ns()
        self.seconds = (20_000 + now // 100 % 2 * 60_000 + now % 8_000) * 1e-9
        return outputs


def test_call_durations_are_not_reported_as_state() -> None:
    batch = torch.randn(8, 4).double(), torch.randn(8, 3).double()
    for _ in range(10):
        microbatcher = Microbatcher(Timing(), loss_fn=nn.MSELoss(), microbatch_size=3)
        microbatcher.backward(batch)
        assert microbatcher.unsaved_state(batch) == []


def test_batchnorm_in_captured_module_is_named_with_its_path() -> None:
    teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().requires_grad_(False)
    mb = Microbatcher(
        nn.Linear(4, 3).double(),
        forward=lambda m, b: nn.functional.mse_loss(m(b[0]), teacher(b[0])),
        microbatch_size=4,
        probe=False,
    )
    with pytest.warns(BatchNormWarning, match=r"teacher\.1"):
        mb.backward(data())


def test_buffer_that_starts_changing_later_is_named() -> None:
    class Late(nn.Linear):
        warm = False
        queue: Tensor

        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("queue", torch.zeros(3).double())
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.warm:
                self.queue.mul_(0.5).add_(1)
            return super().forward(x)

    model = Late().double()
    mb = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=4)
    with pytest.warns(BufferWarning, match="attributes or variables: calls"):
        mb.backward(data())
    for step in range(1, 7):
        mb.backward(data(step))
    model.warm = True
    with pytest.warns(BufferWarning, match="changes buffers: queue"):
        mb.backward(data())
    mb.backward(data())  # the warning is given once


@pytest.mark.parametrize("adds_up", [True, False])
def test_buffer_is_named_only_if_it_depends_on_the_number_of_calls(adds_up: bool) -> None:
    class Counted(nn.Linear):
        used: Tensor

        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("used", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            positive = (x > 0).double()
            self.used += positive.sum(0) if adds_up else positive.mean(0)
            return super().forward(x)

    mb = Microbatcher(Counted().double(), loss_fn=nn.MSELoss(), microbatch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            mb.backward(data(step))
    assert len(caught) == (not adds_up)


def test_instance_norm_is_exact_and_warns_about_statistics() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)).double()
    x = torch.randn(6, 4, 5).double()
    model(x).pow(3).mean().backward()
    parameter = next(model.parameters())
    expected, parameter.grad = parameter.grad, None
    assert find_batchnorm(model) == []
    mb = Microbatcher(model, forward=lambda m, b: m(b).pow(3).mean(), microbatch_size=4)
    with pytest.warns(BufferWarning, match=r"0\.running_mean") as caught:
        mb.backward(x)
    assert [each.category for each in caught] == [BufferWarning]
    torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12)


def test_module_index_owners_include_reached_modules() -> None:
    extra = nn.BatchNorm1d(2)
    index = ModuleIndex([nn.Linear(2, 2)], lambda: {"teacher": extra})
    assert ("teacher", extra) in list(index.owners)


def test_generators_in_namespace_are_reached() -> None:
    model: Any = nn.Linear(1, 1)
    model.own = types.SimpleNamespace(noise=random.Random(0))
    assert list(Reach({"": model}).named_generators()) == ["own.noise"]


def test_each_generator_has_unique_name() -> None:
    def make(noise: random.Random) -> Callable[[], float]:
        return lambda: noise.random()

    one, two = random.Random(1), random.Random(2)
    found = Reach({"": [make(one), make(two), make(one)]}).named_generators()
    assert found == {"noise": one, "noise (2)": two}


def test_reach_scans_at_doubling_intervals() -> None:
    held: list[Any] = []
    reach = Reach({"forward": lambda model, batch: held})
    counts = []
    for step in range(1, 9):
        held.append(random.Random(step))
        reach.step()
        counts.append(len(reach.generators()))
    assert counts == [0, 2, 2, 4, 4, 4, 4, 8]


class Net(nn.Linear):
    """Run out of memory at given calls."""

    def __init__(self, *fails_at: int) -> None:
        super().__init__(4, 3, dtype=torch.float64)
        self.outside = Outside(calls=0, fails_at=fails_at)

    def forward(self, x: Tensor) -> Tensor:
        self.outside.calls += not is_extra_pass()
        if self.outside.calls in self.outside.fails_at and not is_extra_pass():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


@pytest.mark.parametrize("inner", [True, False])
def test_evaluation_under_inference_mode_recovers_and_counts_metrics_once(inner: bool) -> None:
    model: Any = nn.Sequential(Net(2), nn.BatchNorm1d(3).double())
    metric, plain = MulticlassAccuracy(3), MulticlassAccuracy(3)
    mb = Microbatcher(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        eval_microbatch_size=Halving(initial=4, refine=False),
    )
    with torch.inference_mode(inner):
        batches = [(data(seed)[0], torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])) for seed in range(3)]
    ooms = 0
    for batch in batches:
        with torch.inference_mode(inner):
            result = mb.evaluate(batch, metric, return_outputs=True)
        ooms += result.ooms
        plain.update(result.outputs, batch[1])
        with torch.inference_mode():
            assert torch.allclose(mb.predict(batch[0]), result.outputs)
    assert ooms == 1
    assert metric.compute() == plain.compute()
    assert all(each.training for each in model.modules())
    with torch.inference_mode():  # reuse the earlier batch of inference tensors and metric
        model[0].outside.fails_at = (model[0].outside.calls + 2,)
        assert mb.evaluate(batches[0], metric).ooms == 1
    plain.update(mb.predict(batches[0][0]), batches[0][1])
    assert metric.compute() == plain.compute()


@pytest.mark.parametrize("how", ["a budget outside", "a limit of its own"])
def test_predictions_on_host_use_no_device_memory(how: str) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 256))
    batches = [torch.randn(64, 16) for _ in range(40)]  # 64 KiB of outputs each
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "progress": False, "device": "cpu"}
    if how == "a budget outside":
        with MemoryBudget("512KiB"):
            outputs = Trainer(model, **options).predict(batches)
    else:
        outputs = Trainer(model, memory_limit="512KiB", **options).predict(batches)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(outputs), model(torch.cat(batches)))
