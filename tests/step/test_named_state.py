"""State that goes by the number of calls, and where it stands: named, as often as is right."""

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
    """Keeps something in attributes, as one of `KEPT` says."""

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


KEPT: dict[str, tuple[str, Callable[[Any, Tensor], object]]] = {
    # What depends on how many calls there are is named …
    "a counter": ("step", _set(step=lambda m, x: m.step + 1)),
    "a moving average": ("mean", _set(mean=lambda m, x: m.mean * 0.9 + x.detach().mean(0) * 0.1)),
    "one in place": ("mean", lambda m, x: m.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)),
    "a record": ("records", lambda m, x: m.records["loss"].append(float(x.sum()))),
    "a queue": ("recent", lambda m, x: m.recent.append(x.detach().mean(0))),
    # … and what does not is not.
    "rows that add up": ("", _set(rows=lambda m, x: m.rows + len(x))),
    "a sum over rows": ("", _set(mean=lambda m, x: m.mean + x.detach().sum(0))),
    "the last input": ("", _set(last=lambda m, x: x.detach())),
    "the largest": ("", _set(longest=lambda m, x: max(m.longest, x.shape[1]))),
    "what the first call makes": (
        "",
        _set(mask=lambda m, x: torch.ones(4) if m.mask is None else m.mask),
    ),
    "the time": ("", _set(at=lambda m, x: time.perf_counter())),
    "a random number": ("", _set(last=lambda m, x: torch.rand(2))),
}


@pytest.mark.parametrize("size", mostly_in_sweeps([3, "auto"], quick=[3]))
@pytest.mark.parametrize("kind", KEPT)
def test_state_that_depends_on_the_number_of_calls_is_named_where_a_batch_is_split(
    kind: str, size: Any
) -> None:
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
    """Counts the calls of a hook, from the first one on."""

    calls = 0

    def count(self, *_: Any) -> None:
        self.calls += 1


class CountingSGD(Counting, torch.optim.SGD):
    """Keeps what its own hooks see, as K-FAC does."""


@pytest.mark.parametrize("kind", [Counting, CountingSGD])
def test_what_the_owner_of_a_hook_counts_is_named_and_a_check_leaves_it(kind: Any) -> None:
    model = nn.Linear(4, 3).double()
    owner = kind() if kind is Counting else kind(model.parameters(), 0.1)
    model.register_forward_hook(owner.count)
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=4)
    with pytest.warns(BufferWarning, match=rf"attributes or variables: {kind.__name__}"):
        microbatcher.backward(data())
    assert owner.calls == 2


class Timing(nn.Module):
    """Keeps how long its last call took, by a clock on a machine with other work."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seconds = nn.Linear(4, 3).double(), 0.0

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x)
        now = time.perf_counter_ns()
        self.seconds = (20_000 + now // 100 % 2 * 60_000 + now % 8_000) * 1e-9
        return outputs


def test_how_long_a_call_took_is_never_taken_for_what_goes_on() -> None:
    batch = torch.randn(8, 4).double(), torch.randn(8, 3).double()
    for _ in range(10):
        microbatcher = Microbatcher(Timing(), loss_fn=nn.MSELoss(), microbatch_size=3)
        microbatcher.backward(batch)
        assert microbatcher.unsaved_state(batch) == []


def test_batchnorm_in_a_captured_module_is_named_where_it_stands() -> None:
    teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().requires_grad_(False)
    mb = Microbatcher(
        nn.Linear(4, 3).double(),
        forward=lambda m, b: nn.functional.mse_loss(m(b[0]), teacher(b[0])),
        microbatch_size=4,
        probe=False,
    )
    with pytest.warns(BatchNormWarning, match=r"teacher\.1"):
        mb.backward(data())


def test_a_buffer_that_begins_to_change_late_is_named_then() -> None:
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
    mb.backward(data())  # said once


def test_instance_norm_normalises_rows_and_only_its_statistics_are_buffers() -> None:
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


def test_reached_modules_are_among_the_owners_of_buffers() -> None:
    extra = nn.BatchNorm1d(2)
    index = ModuleIndex([nn.Linear(2, 2)], lambda: {"teacher": extra})
    assert ("teacher", extra) in list(index.owners)


def test_generators_in_a_namespace_are_reached() -> None:
    model: Any = nn.Linear(1, 1)
    model.own = types.SimpleNamespace(noise=random.Random(0))
    assert list(Reach({"": model}).named_generators()) == ["own.noise"]


def test_each_generator_has_a_name_of_its_own() -> None:
    def make(noise: random.Random) -> Callable[[], float]:
        return lambda: noise.random()

    one, two = random.Random(1), random.Random(2)
    found = Reach({"": [make(one), make(two), make(one)]}).named_generators()
    assert found == {"noise": one, "noise (2)": two}


def test_reaching_looks_at_batches_further_and_further_apart() -> None:
    held: list[Any] = []
    reach = Reach({"forward": lambda model, batch: held})
    counts = []
    for step in range(1, 9):
        held.append(random.Random(step))
        reach.step()
        counts.append(len(reach.generators()))
    assert counts == [0, 2, 2, 4, 4, 4, 4, 8]


class Net(nn.Linear):
    """Runs out of memory at some of its calls."""

    def __init__(self, *fails_at: int) -> None:
        super().__init__(4, 3, dtype=torch.float64)
        self.outside = Outside(calls=0, fails_at=fails_at)

    def forward(self, x: Tensor) -> Tensor:
        self.outside.calls += not is_extra_pass()
        if self.outside.calls in self.outside.fails_at and not is_extra_pass():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


@pytest.mark.parametrize("inner", [True, False])
def test_evaluation_under_inference_mode_recovers_and_counts_once(inner: bool) -> None:
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
    with torch.inference_mode():  # with the batch of inference tensors and the metric of before
        model[0].outside.fails_at = (model[0].outside.calls + 2,)
        assert mb.evaluate(batches[0], metric).ooms == 1
    plain.update(mb.predict(batches[0][0]), batches[0][1])
    assert metric.compute() == plain.compute()


@pytest.mark.parametrize("how", ["a budget outside", "a limit of its own"])
def test_predictions_that_came_home_take_no_room_of_the_device(how: str) -> None:
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
