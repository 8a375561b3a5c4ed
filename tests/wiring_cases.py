"""How models, losses and gradients are wired up: hooks, attacks, shared and foreign leaves.

A `Wired` is one training, made anew for plain torch and for a `Microbatcher`.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import ROWS, Mlp, numbers, x, y

__all__ = ["REFUSED_WHEN_SPLIT", "WIRINGS", "Wired"]

Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(kw_only=True)
class Wired:
    """A training, and all that it changes."""

    model: nn.Module
    forward: Callable[[Any, Any], Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    leaves: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    log: list[Any] = dataclasses.field(default_factory=list)
    batches: Sequence[Any] = dataclasses.field(default_factory=lambda: batches())
    clears: Sequence[int] = (2,)
    is_ordered: bool = True

    @property
    def all_leaves(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **self.leaves}


def batches() -> list[Batch]:
    return [(numbers(ROWS, 6, seed=seed), y().roll(seed)) for seed in range(4)]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def plain() -> Wired:
    return Wired(model=Mlp(), forward=loss_of)


def never_cleared() -> Wired:
    return Wired(model=Mlp(), forward=loss_of, clears=())


# Hooks


def clamp_and_note(wired: Wired, name: str, gradient: Tensor) -> Tensor:
    wired.log.append(name)
    return gradient.clamp(-0.01, 0.01)


def clamping_hooks() -> Wired:
    wired = plain()
    for name, parameter in wired.model.named_parameters():
        parameter.register_hook(functools.partial(clamp_and_note, wired, name))
    return wired


def hooks_after() -> Wired:
    wired = plain()

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
        wired.log.append(tuple(parameter.shape))

    for parameter in wired.model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    return wired


def hooks_of_both_kinds_on_one() -> Wired:
    wired = plain()
    weight = wired.model[0].weight  # type: ignore[index]
    weight.register_hook(lambda gradient: gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda p: wired.log.append(p.grad.sum().item()))
    return wired


def hooks_that_replace_the_gradient() -> Wired:
    wired = plain()

    def replace(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.sign()

    wired.model[0].weight.register_post_accumulate_grad_hook(replace)  # type: ignore[index]
    return wired


def hooks_on_all_together(mode: str) -> Callable[[], Wired]:
    def make() -> Wired:
        wired = plain()

        def note(gradients: Any) -> None:
            several = [gradients] if isinstance(gradients, Tensor) else gradients
            wired.log.append([each.norm().item() for each in several])

        torch.autograd.graph.register_multi_grad_hook(
            tuple(wired.model.parameters()),
            note,
            mode=mode,  # type: ignore[arg-type]
        )
        return wired

    return make


def optimizers_in_hooks() -> Wired:
    wired = plain()
    for parameter in wired.model.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=0.1)

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    return wired


def hooks_on_a_shared_parameter() -> Wired:
    first, second = nn.Linear(6, 6).double(), nn.Linear(6, 5).double()
    model = nn.Sequential(first, nn.Tanh(), first, second)
    wired = Wired(model=model, forward=loss_of)
    first.weight.register_hook(functools.partial(clamp_and_note, wired, "weight"))
    return wired


# A backward in the forward, and gradients that the forward clears


def attacked(batch: Batch, model: nn.Module, reduction: str = "sum") -> Batch:
    inputs = batch[0].detach().clone().requires_grad_()
    F.cross_entropy(model(inputs), batch[1], reduction=reduction).backward()
    assert inputs.grad is not None
    return (inputs + 0.1 * inputs.grad.sign()).detach(), batch[1]


def attack(clear: Callable[[nn.Module], Any]) -> Callable[[], Wired]:
    def forward(model: nn.Module, batch: Batch) -> Tensor:
        batch = attacked(batch, model)
        clear(model)
        return loss_of(model, batch)

    return lambda: Wired(model=Mlp(), forward=forward)


def attack_in_three_steps() -> Wired:
    def forward(model: nn.Module, batch: Batch) -> Tensor:
        inputs = batch[0].detach().clone()
        for _ in range(3):
            inputs.requires_grad_()
            model.zero_grad()
            F.cross_entropy(model(inputs), batch[1], reduction="sum").backward()
            assert inputs.grad is not None
            inputs = (inputs + 0.05 * inputs.grad.sign()).detach()
        model.zero_grad()
        return loss_of(model, (inputs, batch[1]))

    return Wired(model=Mlp(), forward=forward)


def cleared_without_a_backward() -> Wired:
    def forward(model: nn.Module, batch: Batch) -> Tensor:
        model.zero_grad()
        return loss_of(model, batch)

    return Wired(model=Mlp(), forward=forward, clears=())


def cleared_in_place_without_a_backward() -> Wired:
    def forward(model: nn.Module, batch: Batch) -> Tensor:
        model.zero_grad(set_to_none=False)
        return loss_of(model, batch)

    return Wired(model=Mlp(), forward=forward, clears=())


def one_parameter_cleared() -> Wired:
    def forward(model: nn.Module, batch: Batch) -> Tensor:
        model[2].bias.grad = None  # type: ignore[index]
        return loss_of(model, batch)

    return Wired(model=Mlp(), forward=forward)


def backward_that_stays() -> Wired:
    def forward(model: nn.Module, batch: Batch) -> Tensor:
        (0.1 * model(batch[0]).pow(2).sum(1).mean()).backward()
        return loss_of(model, batch)

    return Wired(model=Mlp(), forward=forward)


def cached_loss() -> Wired:
    """Goes backward itself, in a hook of a loss that has no graph."""

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            outputs = model(batch[0])
        outputs.requires_grad_()
        inner = F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))
        inner.backward()

        @torch.enable_grad()
        def again(gradient: Tensor) -> None:
            assert outputs.grad is not None
            (model(batch[0]) * outputs.grad * gradient).sum().backward()

        loss = inner.detach().requires_grad_()
        loss.register_hook(again)
        return loss

    return Wired(model=Mlp(), forward=forward)


def attack_under_hooks() -> Wired:
    wired = attack(lambda model: model.zero_grad())()
    for parameter in wired.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    return wired


def gradient_in_the_forward() -> Wired:
    """As for forces: a gradient with respect to the input is part of the loss."""

    def forward(model: nn.Module, batch: Batch) -> Any:
        inputs = batch[0].detach().requires_grad_()
        outputs = model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return F.cross_entropy(outputs, batch[1]) + (slope.norm(dim=1) - 1).pow(2).mean()

    return Wired(model=Mlp(), forward=forward)


def graph_of_the_backward() -> Wired:
    return Wired(
        model=Mlp(),
        forward=loss_of,
        options={"backward": lambda loss: loss.backward(create_graph=True)},
    )


# Leaves


def shared_modules() -> Wired:
    model = Mlp()
    return Wired(model=model, forward=loss_of, options={"modules": [model, model[0]]}, clears=())


class LossWithTheModel(nn.Module):
    """A loss that owns the model, for a penalty on its weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        penalty = sum(parameter.pow(2).sum() for parameter in self.model.parameters())
        return F.cross_entropy(outputs, targets) + 0.01 * penalty


def loss_with_the_model() -> Wired:
    model = Mlp()
    loss_fn = LossWithTheModel(model)
    return Wired(
        model=model,
        forward=lambda model, batch: loss_fn(model(batch[0]), batch[1]),
        options={"forward": None, "loss_fn": loss_fn},
        clears=(),
    )


def one_leaf_twice() -> Wired:
    inputs = x().requires_grad_()

    def forward(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch["a"]) + model(batch["b"] * 2), batch["y"])

    batch = {"a": inputs, "b": inputs, "y": y()}
    return Wired(
        model=Mlp(), forward=forward, leaves={"x": inputs}, batches=[batch] * 3, clears=(2,)
    )


def closure_parameters() -> Wired:
    scales, encoder = nn.Parameter(torch.zeros(2).double()), nn.Linear(6, 6).double()

    def forward(model: nn.Module, batch: Batch) -> Any:
        outputs = model(encoder(batch[0]))
        fit = F.cross_entropy(outputs, batch[1])
        size = outputs.pow(2).mean(1).mean()
        return (-scales[0]).exp() * fit + (-scales[1]).exp() * size + scales.sum()

    return Wired(
        model=Mlp(),
        forward=forward,
        leaves={"scales": scales, **dict(encoder.named_parameters())},
    )


def closure_parameters_with_hooks() -> Wired:
    wired = closure_parameters()
    for name, leaf in wired.leaves.items():
        leaf.register_hook(functools.partial(clamp_and_note, wired, name))
    return wired


def closure_parameters_and_an_attack() -> Wired:
    wired = closure_parameters()
    inner = wired.forward

    def forward(model: nn.Module, batch: Batch) -> Any:
        batch = attacked(batch, model)
        for leaf in [*model.parameters(), *wired.leaves.values()]:
            leaf.grad = None
        return inner(model, batch)

    return dataclasses.replace(wired, forward=forward)


def reentrant_checkpoints() -> Wired:
    """Parameters get their gradients in a backward inside of the backward, piece by piece."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Mlp(6, 6), Mlp(6, 6)
            self.head = nn.Linear(6, 5).double()

        def forward(self, inputs: Tensor) -> Any:
            inputs = inputs.requires_grad_()
            for part in (self.first, self.second, self.first):
                inputs = checkpoint(part, inputs, use_reentrant=True)
            return self.head(inputs)

    return Wired(model=Model(), forward=loss_of)


def parameters_of_some_rows() -> Wired:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.usual, self.rare, self.never = Mlp(), Mlp(), Mlp()

        def forward(self, inputs: Tensor) -> Any:
            rare = inputs[:, 0] > 0.5
            out = self.usual(inputs)
            return out.index_put((rare,), self.rare(inputs[rare])) if rare.any() else out

    wired = Wired(model=Model(), forward=loss_of, is_ordered=False)
    for name, parameter in wired.model.named_parameters():
        parameter.register_hook(functools.partial(clamp_and_note, wired, name))
    return wired


def sparse_gradients() -> Wired:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 6, sparse=True)
            self.body = Mlp()
            self.double()

        def forward(self, inputs: Tensor) -> Any:
            return self.body(inputs + self.embedding(inputs[:, 0].abs().long().clamp(max=4)))

    return Wired(model=Model(), forward=loss_of, clears=(1, 2, 3))


# State: each row is computed with what the rows before it have left


class Position(nn.Module):
    """Weighs rows by how many there were before, in a buffer and deep in an attribute."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()).double())
        self.held: dict[str, list[int]] = {"seen": [0]}

    def forward(self, inputs: Tensor) -> Any:
        places = (self.seen + self.held["seen"][0]) / 2 + torch.arange(len(inputs))
        self.seen += len(inputs)
        self.held["seen"][0] += len(inputs)
        return inputs * (1 + places[:, None] / 100)


def a_model_that_counts() -> Wired:
    model = nn.Sequential(Position(), Mlp())
    return Wired(model=model, forward=loss_of, options={"batchnorm": "ignore"})


def a_closure_that_counts() -> Wired:
    outer = Position()

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model, (outer(batch[0]), batch[1]))

    return Wired(model=Mlp(), forward=forward, options={"batchnorm": "ignore"})


def a_generator_of_its_own() -> Wired:
    class Noisy(Mlp):
        own = torch.Generator()

        def forward(self, inputs: Tensor) -> Any:
            noise = torch.rand(inputs.shape, generator=self.own, dtype=torch.float64)
            return super().forward(inputs + noise)

    Noisy.own.manual_seed(3)
    return Wired(model=Noisy(), forward=loss_of)


def a_model_that_writes_into_its_input() -> Wired:
    class Doubles(Mlp):
        def forward(self, inputs: Tensor) -> Any:
            return super().forward(inputs.mul_(2))

    return Wired(model=Doubles(), forward=loss_of)


def zero_where_nothing_counts() -> Wired:
    def forward(model: nn.Module, batch: Batch) -> Tensor:
        counts = batch[1] == 2
        if not counts.any():
            return torch.zeros(()).double()
        return F.cross_entropy(model(batch[0][counts]), batch[1][counts])

    return Wired(
        model=Mlp(),
        forward=forward,
        options={"loss_average": lambda batch: (batch[1] == 2).sum()},
    )


WIRINGS: dict[str, Callable[[], Wired]] = {
    "plain": plain,
    "never cleared": never_cleared,
    "clamping hooks": clamping_hooks,
    "hooks after accumulation": hooks_after,
    "hooks of both kinds on one parameter": hooks_of_both_kinds_on_one,
    "hooks that replace the gradient": hooks_that_replace_the_gradient,
    "a hook on all together": hooks_on_all_together("all"),
    "a hook on any": hooks_on_all_together("any"),
    "optimizers in hooks": optimizers_in_hooks,
    "hooks on a shared parameter": hooks_on_a_shared_parameter,
    "a gradient in the forward": gradient_in_the_forward,
    "a graph of the backward": graph_of_the_backward,
    "overlapping modules": shared_modules,
    "a loss that owns the model": loss_with_the_model,
    "one leaf twice in a batch": one_leaf_twice,
    "parameters in a closure": closure_parameters,
    "parameters in a closure with hooks": closure_parameters_with_hooks,
    "reentrant checkpoints": reentrant_checkpoints,
    "parameters of some rows, with hooks": parameters_of_some_rows,
    "sparse gradients": sparse_gradients,
    "a model that counts": a_model_that_counts,
    "a closure that counts": a_closure_that_counts,
    "a generator of its own": a_generator_of_its_own,
    "a model that writes into its input": a_model_that_writes_into_its_input,
    "a constant zero": zero_where_nothing_counts,
}

REFUSED_WHEN_SPLIT: dict[str, Callable[[], Wired]] = {
    "an attack that clears": attack(lambda model: model.zero_grad()),
    "an attack that zeroes": attack(lambda model: model.zero_grad(set_to_none=False)),
    "an attack in three steps": attack_in_three_steps,
    "an attack under hooks": attack_under_hooks,
    "cleared without a backward": cleared_without_a_backward,
    "zeroed without a backward": cleared_in_place_without_a_backward,
    "one parameter cleared": one_parameter_cleared,
    "a backward that stays": backward_that_stays,
    "parameters in a closure, attacked": closure_parameters_and_an_attack,
    "a cached loss": cached_loss,
}


def copied(batch: Any) -> Any:
    """A batch of its own, leaves with a gradient excepted."""
    return batch if isinstance(batch, dict) else copy.deepcopy(batch)
