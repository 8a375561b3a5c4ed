"""State that depends on the number of calls: which warning names it, where, and how often."""

import contextlib
import random
import time
import types
import warnings
from collections import deque
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


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(8, n, generator=generator) for n in (4, 3))
    return inputs.double(), targets.double()


class Remembering(nn.Linear):
    """Keep a value in attributes, as an entry of `KEPT` does."""

    def __init__(self, keep: Any = None) -> None:
        super().__init__(4, 3, dtype=torch.float64)
        self.keep = keep
        self.step, self.mean, self.rows = 0, torch.zeros(4).double(), 0
        self.records: dict[str, list[float]] = {"loss": []}
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.last, self.mask, self.at = torch.zeros(1), None, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        return super().forward(x)


def setting(name: str, new: Any) -> Any:
    return lambda m, x: setattr(m, name, new(m, x))


def add_to_weight(m, share):
    m.weight.seen = getattr(m.weight, "seen", 0) + share


def duration(m, x):
    """Return the duration of a call on a busy machine."""
    now = time.perf_counter_ns()
    return (20_000 + now // 100 % 2 * 60_000 + now % 8_000) * 1e-9


KEPT: dict[str, tuple[str, Any]] = {
    # These depend on the number of calls and are named.
    "a counter": ("step", setting("step", lambda m, x: m.step + 1)),
    "a moving average": ("mean", setting("mean", lambda m, x: m.mean * 0.9 + x.mean(0) * 0.1)),
    "a record": ("records", lambda m, x: m.records["loss"].append(float(x.sum()))),
    "a queue": ("recent", lambda m, x: m.recent.append(x.mean(0))),
    "an average on a parameter": ("weight", lambda m, x: add_to_weight(m, x.mean(0))),
    # These do not, and are not named.
    "rows on a parameter": ("", lambda m, x: add_to_weight(m, len(x))),
    "rows that add up": ("", setting("rows", lambda m, x: m.rows + len(x))),
    "first-call value": ("", setting("mask", lambda m, x: m.mask or [1])),
    "the time": ("", setting("at", lambda m, x: time.perf_counter())),
    "a duration": ("", setting("at", duration)),
    "a random number": ("", setting("last", lambda m, x: torch.rand(2))),
}


@pytest.mark.parametrize("kind", KEPT)
def test_call_counting_state_is_named_when_batch_is_split(kind):
    name, keep = KEPT[kind]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        microbatcher = Microbatcher(Remembering(keep), loss_fn=nn.MSELoss(), microbatch_size=3)
        for seed in range(3):
            microbatcher.backward(data(seed))
    told = [str(each.message) for each in caught if each.category is BufferWarning]
    assert len(told) == bool(name)
    for message in told:
        assert message.startswith(f"the training forward changes attributes or variables: {name}.")
        assert "changes them 3 times" in message


class Counting:
    calls = 0

    def count(self, *_: Any) -> None:
        self.calls += 1


class CountingSGD(Counting, torch.optim.SGD):
    """An optimizer that keeps data from its own hooks, as K-FAC does."""


@pytest.mark.parametrize("kind", [Counting, CountingSGD])
def test_hook_owner_state_is_named_and_unchanged_by_check(kind):
    model = nn.Linear(4, 3).double()
    owner = kind() if kind is Counting else kind(model.parameters(), 0.1)
    model.register_forward_hook(owner.count)
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=4)
    with pytest.warns(BufferWarning, match=rf"attributes or variables: {kind.__name__}"):
        microbatcher.backward(data())
    assert owner.calls == 2


def test_call_durations_are_not_reported_as_unsaved_state():
    for _ in range(10):
        model = Remembering(KEPT["a duration"][1])
        assert Microbatcher(model, loss_fn=nn.MSELoss()).unsaved_state(data()) == []


def test_batchnorm_in_captured_module_is_named_with_its_path():
    teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().requires_grad_(False)
    microbatcher = Microbatcher(
        nn.Linear(4, 3).double(),
        forward=lambda m, b: nn.functional.mse_loss(m(b[0]), teacher(b[0])),
        microbatch_size=4,
        probe=False,
    )
    with pytest.warns(BatchNormWarning, match=r"teacher\.1"):
        microbatcher.backward(data())


def test_buffer_that_starts_changing_later_is_named():
    class Late(Remembering):
        warm = False
        queue: Tensor

        def forward(self, x: Tensor) -> Tensor:
            if self.warm:
                self.queue.mul_(0.5).add_(1)
            return super().forward(x)

    model = Late(KEPT["a counter"][1])
    model.register_buffer("queue", torch.zeros(3).double())
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=4)
    with pytest.warns(BufferWarning, match="attributes or variables: step"):
        microbatcher.backward(data())
    for step in range(1, 7):
        microbatcher.backward(data(step))
    model.warm = True
    with pytest.warns(BufferWarning, match="changes buffers: queue"):
        microbatcher.backward(data())
    microbatcher.backward(data())  # the warning is given once


@pytest.mark.parametrize("adds_up", [True, False])
def test_buffer_is_named_only_if_it_depends_on_number_of_calls(adds_up):
    class Counted(nn.Linear):
        def __init__(self):
            super().__init__(4, 3, dtype=torch.float64)
            self.register_buffer("used", torch.zeros(4))

        def forward(self, x):
            positive = (x > 0).double()
            self.used += positive.sum(0) if adds_up else positive.mean(0)
            return super().forward(x)

    mb = Microbatcher(Counted(), loss_fn=nn.MSELoss(), microbatch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            mb.backward(data(step))
    assert len(caught) == (not adds_up)


def test_instance_norm_is_exact_and_warns_about_statistics():
    model, x = nn.InstanceNorm1d(4, affine=True, track_running_stats=True).double(), data()[0]
    x = x[..., None] * torch.arange(5)
    model(x).pow(3).mean().backward()
    expected, model.weight.grad = model.weight.grad, None
    assert find_batchnorm(model) == []
    mb = Microbatcher(model, forward=lambda m, b: m(b).pow(3).mean(), microbatch_size=4)
    with pytest.warns(BufferWarning, match=r"running_mean") as caught:
        mb.backward(x)
    assert [each.category for each in caught] == [BufferWarning]
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-9, atol=1e-12)


# What is reached


def test_module_index_owners_include_reached_modules():
    extra = nn.BatchNorm1d(2)
    index = ModuleIndex([nn.Linear(2, 2)], lambda: {"teacher": extra})
    assert ("teacher", extra) in list(index.owners)


def test_each_reached_generator_has_unique_name():
    def make(noise: random.Random) -> Any:
        return lambda: noise.random()

    one, two, model = random.Random(1), random.Random(2), nn.Linear(1, 1)
    found = Reach({"": [make(one), make(two), make(one)]}).named_generators()
    assert found == {"noise": one, "noise (2)": two}
    vars(model)["own"] = types.SimpleNamespace(noise=random.Random(0))
    assert list(Reach({"": model}).named_generators()) == ["own.noise"]


def test_reach_scans_at_doubling_intervals():
    held: list[Any] = []
    reach, counts = Reach({"forward": lambda model, batch: held}), list[int]()
    for step in range(1, 9):
        held.append(random.Random(step))
        reach.step()
        counts.append(len(reach.generators()))
    assert counts == [0, 2, 2, 4, 4, 4, 4, 8]


# Evaluation


class Net(nn.Linear):
    def __init__(self, *fails_at: int) -> None:
        super().__init__(4, 3, dtype=torch.float64)
        self.outside = Outside(calls=0, fails_at=fails_at)

    def forward(self, x: Tensor) -> Tensor:
        self.outside.calls += not is_extra_pass()
        if self.outside.calls in self.outside.fails_at and not is_extra_pass():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


@pytest.mark.parametrize("inner", [True, False])
def test_evaluation_under_inference_mode_recovers_and_counts_metrics_once(inner):
    net, (metric, plain) = Net(2), (MulticlassAccuracy(3) for _ in range(2))
    model, ooms = nn.Sequential(net, nn.BatchNorm1d(3).double()), 0
    mb = Microbatcher(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        eval_microbatch_size=Halving(initial=4, refine=False),
    )
    with torch.inference_mode(inner):
        batches = [(data(seed)[0], torch.arange(8) % 3) for seed in range(3)]
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
        net.outside.fails_at = (net.outside.calls + 2,)
        assert mb.evaluate(batches[0], metric).ooms == 1
    plain.update(mb.predict(batches[0][0]), batches[0][1])
    assert metric.compute() == plain.compute()


@pytest.mark.parametrize("has_own_limit", [True, False])
def test_predictions_on_host_use_no_device_memory(has_own_limit):
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 256))
    batches = [torch.randn(64, 16) for _ in range(40)]  # 64 KiB of outputs each
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "progress": False, "device": "cpu"}
    limit: Any = {"memory_limit": "512KiB"} if has_own_limit else {}
    with contextlib.nullcontext() if has_own_limit else MemoryBudget("512KiB"):
        outputs = Trainer(model, **limit, **options).predict(batches)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(outputs), model(torch.cat(batches)))
