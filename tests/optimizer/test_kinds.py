"""Unusual optimizers: training matches a plain loop, whatever state they keep, and wherever."""

import itertools
import random
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
import transformers
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, TensorDataset

from automicro import Microbatcher, Trainer
from automicro.accepted_optimizers import check_optimizer, innermost_optimizer
from automicro.features import Optimization
from automicro.optimizer.reservation import OptimizerReservation, predict_step_memory

Make = Callable[[nn.Module], Any]
QUIET: dict[str, Any] = {"loss_fn": nn.MSELoss(), "progress": False, "device": "cpu"}


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


class WithAverage(torch.optim.AdamW):
    """Keeps an average of its weights in a list."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.average = [p.detach().clone() for p in parameters_of(self)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for mean, parameter in zip(self.average, parameters_of(self), strict=True):
            mean.lerp_(parameter, 0.1)


class Lookahead(torch.optim.Optimizer):
    """A common implementation, which shares its groups with the inner optimizer."""

    def __init__(self, base: torch.optim.Optimizer, *, k: int = 2) -> None:
        super().__init__([p for g in base.param_groups for p in g["params"]], {})
        self.optimizer, self.k, self.count = base, k, 0
        self.param_groups = base.param_groups
        self.slow = [p.detach().clone() for p in parameters_of(self)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for slow, parameter in zip(self.slow, parameters_of(self), strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class HalfBuilt(torch.optim.Optimizer):
    """A wrapper like timm's: it never calls the base class, so hooks on its step are not called."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._base_optimizer = base
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}

    def step(self, closure: Any = None) -> Any:
        return self._base_optimizer.step(closure)


def without_inner(model: nn.Module) -> torch.optim.Optimizer:
    """Return one without an inner optimizer; torch completes its class in `zero_grad`."""

    class WithoutInner(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.param_groups = [{"params": [*model.parameters()], "lr": 0.1}]
            self.defaults, self.state = {}, defaultdict(dict)
            self._optimizer_step_pre_hooks = OrderedDict()
            self._optimizer_step_post_hooks = OrderedDict()

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for parameter in parameters_of(self):
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)

    return WithoutInner()


class Momentum(torch.optim.Optimizer):
    """Keeps momentum in a dict by name, and several kinds of counters."""

    history: list[int] = []  # noqa: RUF012 (for all of the class, as people write it)

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.momenta: dict[int, Tensor] = {}
        self.counts = {"steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.counts["steps"] += 1
        self.history.append(self.counts["steps"])
        for number, parameter in enumerate(parameters_of(self)):
            if parameter.grad is None:
                continue
            momentum = self.momenta.setdefault(number, torch.zeros_like(parameter))
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_(momentum, alpha=0.1 / (1 + 0.1 * len(self.history)))


def decaying(kind: str) -> Make:
    """Return a maker of Adam whose learning rate depends on state outside the instance."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        calls, factor = list[int](), torch.ones(())

        class Decays(torch.optim.Adam):
            steps = 0

            def step(self, closure: Any = None) -> Any:
                if kind == "closure":
                    calls.append(1)
                elif kind == "class":
                    Decays.steps += 1
                scale = factor.mul_(0.5).item() if kind == "tensor" else 1.0
                for group in self.param_groups:
                    group["lr"] = 0.1 * scale / (1 + len(calls) + Decays.steps)
                return super().step(closure)

        return Decays(model.parameters())

    return make


class ByNumber(torch.optim.Optimizer):
    """Keeps its state under keys that are not parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        table: Any = self.state
        for number, parameter in enumerate(parameters_of(self)):
            if parameter.grad is not None:
                buffer = table[number].setdefault("buffer", torch.zeros_like(parameter))
                parameter.sub_(buffer.mul_(0.9).add_(parameter.grad), alpha=0.1)


class Communicates(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        torch.distributed.barrier()
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Draws from every generator."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.own = torch.Generator().manual_seed(3)
        self.python, self.numpy = random.Random(4), np.random.default_rng(5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        noise = random.random() + np.random.rand() + self.python.random() + self.numpy.random()
        for parameter in parameters_of(self):
            drawn = torch.randn(parameter.shape, generator=self.own, dtype=parameter.dtype)
            parameter.add_(drawn + torch.randn_like(parameter), alpha=0.01 * noise)


class Patched:
    """An optimizer whose step is replaced on the instance, as in many libraries."""

    def __new__(cls, model: nn.Module) -> Any:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        inner, slow = optimizer.step, [p.detach().clone() for p in model.parameters()]

        def step(closure: Any = None) -> Any:
            result = inner(closure)
            with torch.no_grad():
                for each, parameter in zip(slow, model.parameters(), strict=True):
                    parameter.copy_(each.lerp_(parameter, 0.5))
            return result

        optimizer.step = step  # type: ignore[method-assign]
        return optimizer


class Duck:
    """A wrapper that is not a torch optimizer, as in deepspeed and apex."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)


MAKE: dict[str, Make] = {
    "list": lambda m: WithAverage(m.parameters(), lr=0.1),
    "lookahead": lambda m: Lookahead(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
    "half built": lambda m: HalfBuilt(torch.optim.Adam(m.parameters(), lr=0.1)),
    "half built, alone": without_inner,
    "dict and counters": lambda m: Momentum(m.parameters()),
    "closure": decaying("closure"),
    "closure of a tensor": decaying("tensor"),
    "on its class": decaying("class"),
    "by number": lambda m: ByNumber(m.parameters()),
    "noise": lambda m: Noisy(m.parameters(), lr=0.1, momentum=0.9),
    "patched": Patched,
    "duck": lambda m: Duck(torch.optim.Adam(m.parameters(), lr=0.1)),
    "accelerate": lambda m: accelerate.Accelerator(cpu=True).prepare(
        torch.optim.AdamW(m.parameters(), lr=0.1)
    ),
    "adafactor": lambda m: transformers.Adafactor(m.parameters(), lr=0.01, relative_step=False),
    "tensor lr": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1), foreach=False),
}


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(4, 3), nn.Linear(4, 3)
        self.uses_late = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.late(x) if self.uses_late else out


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(8, 3, generator=generator, dtype=torch.float64)


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def attributes(optimizer: Any) -> list[Any]:
    """Return all attributes of an optimizer and its inner optimizers, as plain values."""
    found: list[Any] = []
    for _ in range(3):
        own = {k: v for k, v in vars(optimizer).items() if isinstance(v, int | list | dict)}
        own.pop("param_groups", None)
        text = re.sub(r"0x\w+|id=\d+|at \w+", "", repr(own))
        found.append(re.sub(r"_optimizer_step_pre_hooks.*", "", text))
        inside = innermost_optimizer(optimizer)
        if inside is None or inside is optimizer:
            return found
        optimizer = inside
    return found


def train(make: Make, *, ours: bool) -> tuple[list[Tensor], Any]:
    """Train a model with a branch that joins after some steps."""
    seed()
    Momentum.history.clear()
    model = TwoBranches().double()
    optimizer = make(model)
    loss_fn = nn.MSELoss()
    microbatcher = Microbatcher(model, loss_fn=loss_fn, optimizer=optimizer) if ours else None
    for number in range(6):
        model.uses_late = number >= 3
        if microbatcher is None:
            x, y = batch(number)
            loss_fn(model(x), y).backward()
        else:
            microbatcher.backward(batch(number))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], optimizer


UNKNOWN = {
    "closure of a tensor": "its step uses (aten.mul_.Tensor) a tensor that is neither a parameter",
    "list": "its step uses (aten.lerp_.Scalar) a tensor that is neither a parameter nor state",
    "adafactor": "_local_scalar_dense",
    "half built, alone": "its step calls no hooks",
}


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("name", MAKE)
def test_training_matches_plain_loop(name: str, caplog: pytest.LogCaptureFixture) -> None:
    plain, before = train(MAKE[name], ours=False)
    given, after = train(MAKE[name], ours=True)
    for one, other in zip(plain, given, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    if name != "accelerate":  # it holds a device and its own state
        assert attributes(before) == attributes(after)
    assert caplog.text.count("no memory is reserved") == (name in UNKNOWN)
    assert UNKNOWN.get(name, "") in caplog.text


def test_state_size_of_custom_optimizers_is_predicted() -> None:
    for name in [each for each in MAKE if each not in (*UNKNOWN, "lookahead")]:
        model = TwoBranches().double()
        optimizer = check_optimizer(MAKE[name](model), [model])
        assert optimizer is not None
        predicted = predict_step_memory(optimizer, list(model.parameters()))
        assert predicted.unknown is None
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        values = itertools.chain(*(state.values() for state in optimizer.state.values()))
        assert sum(predicted.state_bytes) == sum(v.nbytes for v in values if isinstance(v, Tensor))


def test_communicating_step_is_not_rehearsed(tmp_path: Path) -> None:
    model = TwoBranches().double()
    optimizer = Communicates(model.parameters(), lr=0.1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        predicted = predict_step_memory(optimizer, list(model.parameters()))
    finally:
        torch.distributed.destroy_process_group()
    assert predicted.unknown == "its step communicates with other processes"


def test_dry_run_calls_no_hooks() -> None:
    heard: list[str] = []
    model = TwoBranches().double()
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.1))
    everyone = [
        register_optimizer_step_pre_hook(lambda *_: heard.append("every pre")),
        register_optimizer_step_post_hook(lambda *_: heard.append("every post")),
    ]
    for each in (optimizer, optimizer.optimizer):
        each.register_step_pre_hook(lambda *_: heard.append("pre"))
        each.register_step_post_hook(lambda *_: heard.append("post"))
    try:
        Microbatcher(model, loss_fn=nn.MSELoss(), optimizer=optimizer).backward(batch(0))
        assert heard == []
        optimizer.step()
        assert len(heard) == 8
    finally:
        for handle in everyone:
            handle.remove()


@pytest.mark.parametrize(("wrap", "late"), [(LightningOptimizer, False), (None, True)])
def test_trainer_accepts_optimizer_wrappers_of_other_libraries(wrap: Any, late: bool) -> None:
    def fit(wrapped: bool) -> list[Tensor]:
        seed()
        model = nn.Linear(4, 3)

        def make(parameters: Any) -> Any:
            inner = torch.optim.AdamW(parameters, lr=0.1)
            if not wrapped:
                return inner
            return wrap(inner) if wrap else accelerate.Accelerator(cpu=True).prepare(inner)

        data = TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
        Trainer(
            model,
            DataLoader(data, 8),
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=make if late else make(list(model.parameters())),
            features=[Optimization(torch.optim.lr_scheduler.ConstantLR, "batch")],
            progress=False,
            device="cpu",
        ).fit()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, fit(False), fit(True)))


def test_scheduler_of_inner_optimizer_is_accepted_with_wrapper() -> None:
    model = nn.Linear(4, 3)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    accelerator = accelerate.Accelerator(cpu=True)
    scheduler = torch.optim.lr_scheduler.ConstantLR(inner)
    outer, wrapped = accelerator.prepare(inner, scheduler)
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 3)), 4)
    for each in (scheduler, wrapped):
        Trainer(model, data, optimizer=outer, features=[Optimization(each, "batch")], **QUIET)
    other = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        Trainer(model, data, optimizer=outer, features=[Optimization(other, "batch")], **QUIET)


MODEL, OTHER, BARE = nn.Linear(4, 3), nn.Linear(4, 2), nn.Parameter(torch.ones(3))
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a wrapper": (
        lambda: Trainer(MODEL, [], optimizer=duck_of(MODEL), **QUIET),
        r"a Duck around a Adam.*Pass the inner optimizer",
    ),
    "another model": (
        lambda: given(optimizer=duck_of(MODEL, OTHER)),
        r"2 of the optimizer's 4 .*\(2, 4\), \(2,\).*modules=",
    ),
    "a leaf": (
        lambda: given(
            optimizer=torch.optim.SGD([*MODEL.parameters(), torch.ones(1).requires_grad_()])
        ),
        r"nn\.ParameterList",
    ),
    "a parameter": (lambda: given(modules=BARE), "ParameterList"),
    "parameters": (lambda: given_to_trainer(modules=[BARE]), "ParameterList"),
    "a class": (lambda: given(modules=[nn.Linear]), "modules"),
    "a number": (lambda: given(modules=3), "modules"),
}


def duck_of(*modules: nn.Module) -> Any:
    return Duck(torch.optim.Adam(p for module in modules for p in module.parameters()))


def given(**options: Any) -> Microbatcher:
    return Microbatcher(MODEL, loss_fn=nn.MSELoss(), **options)


def given_to_trainer(**options: Any) -> Trainer:
    return Trainer(MODEL, [], **QUIET, **options)


def test_unsupported_optimizers_are_rejected_with_remedy() -> None:
    for name in REFUSED:
        make, words = REFUSED[name]
        with pytest.raises((TypeError, ValueError), match=words):
            make()


def test_step_that_fails_in_rehearsal_is_explained_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Asserts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert closure is not None

    model = nn.Linear(4, 3)
    reservation = OptimizerReservation(Asserts(model.parameters(), lr=0.1))
    reservation.begin()
    model.weight.requires_grad_(False)
    reservation.begin()
    assert caplog.text.count("no memory is reserved") == 1
    assert re.search(r"\(AssertionError(: \S| in step, .*py:\d+: assert closure)", caplog.text)
