"""A small model with data and a trainer, and a standard training loop."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from automicro import Callback, Run, Trainer, is_extra_pass
from automicro.features import with_features
from tests.outside import Unreached

FEATURES, CLASSES, ROWS = 12, 3, 50

adam = functools.partial(torch.optim.AdamW, lr=0.01)


def make_model(*, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(FEATURES, 64),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


class Rows(TensorDataset):
    """Splits rows only once, because splitting for each batch takes longer than training."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self._rows = list(zip(*(each.unbind() for each in tensors), strict=True))

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        return [self._rows[index] for index in indices]


def make_data(rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Dataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(rows, FEATURES, generator=generator, dtype=dtype)
    return Rows(inputs, inputs[:, :CLASSES].argmax(1))


def make_loader(rows: int = ROWS, batch_size: int = 16, **options: Any) -> DataLoader:
    return DataLoader(make_data(rows, **options), batch_size=batch_size)


def make_trainer(model: nn.Module, loader: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": adam,
        "device": "cpu",
        "progress": False,
        "scheduler_interval": "batch",
    }
    data = loader if loader is not None else make_loader()
    return Trainer(model, data, **with_features({**settings, **options}))


def train_by_hand(
    model: nn.Module,
    loader: DataLoader,
    *,
    epochs: int,
    clip: float | None = None,
    schedule: Callable[[Any], Any] | None = None,
) -> list[float]:
    """Train with a standard loop."""
    optimizer = adam(model.parameters())
    scheduler = schedule(optimizer) if schedule else None
    loss_fn = nn.CrossEntropyLoss()
    losses = []
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            losses.append(loss.item())
    return losses


def losses_of(trainer: Trainer) -> list[float]:
    """Return a list that collects the loss of every batch while the trainer runs."""
    losses: list[float] = []

    def note(*_: Any) -> None:
        assert trainer.state.loss is not None
        losses.append(trainer.state.loss)

    assert trainer._run.optimizer is not None
    trainer._run.optimizer.register_step_post_hook(note)
    return losses


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, value), expected in zip(
        one.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(value, expected), name


class Scripted(nn.Module):
    """A linear model that can fail or return NaN at a given forward."""

    calls = Unreached()

    def __init__(self, at_call: int, action: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.calls = 0
        self._at_call = at_call
        self._action = action

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(inputs)
        if is_extra_pass():
            return outputs
        self.calls += 1
        return self._action(outputs) if self.calls == self._at_call else outputs


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


class StopAfter(Callback):
    """Ends a run like a kill would, except that the last batch is saved."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def batch_end(self, run: Run, result: Any) -> None:
        if run.state.batch == self._batches:
            run.stop("for the test")


class ScheduleFree(torch.optim.Optimizer):
    """Trains other weights than it evaluates, like schedule-free SGD."""

    def __init__(self, parameters: Any, lr: float = 0.5, beta: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "is_training": False})

    @torch.no_grad()
    def _change(self, is_training: bool, share: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["is_training"] != is_training:
                for each in group["params"]:
                    if "z" in self.state[each]:
                        each.lerp_(self.state[each]["z"], share(group["beta"]))
            group["is_training"] = is_training

    def train(self) -> None:
        self._change(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._change(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["is_training"]
            group["k"] += 1
            share = 1 / group["k"]
            for each in group["params"]:
                z = self.state[each].setdefault("z", each.clone())
                each.lerp_(z, share)
                each.add_(each.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(each.grad, alpha=group["lr"])
