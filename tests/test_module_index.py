"""After any change, the index of modules matches a walk over them."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from automicro.modules import ModuleIndex


def net() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), inner, nn.LSTM(4, 4))


def overwrite(model: nn.Module) -> None:
    future = torch.__future__
    before = future.get_overwrite_module_params_on_conversion()
    future.set_overwrite_module_params_on_conversion(True)
    model.to(torch.float64)
    future.set_overwrite_module_params_on_conversion(before)


def rename(model: Any) -> None:
    model[0]._parameters["renamed"] = model[0]._parameters.pop("weight")


def reorder(model: Any) -> None:
    model[0]._parameters["weight"] = model[0]._parameters.pop("weight")


def other_table(model: Any) -> None:
    model[0]._parameters = {"weight": nn.Parameter(torch.ones(4, 4)), "bias": None}


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "a parameter is added": lambda m: m[0].register_parameter("more", nn.Parameter(torch.ones(1))),
    "a table is written to": lambda m: m[0]._parameters.__setitem__(
        "weight", nn.Parameter(torch.ones(4, 4))
    ),
    "a parameter is deleted": lambda m: delattr(m[0], "bias"),
    "a parameter is set to None": lambda m: setattr(m[0], "bias", None),
    "a buffer is added": lambda m: m[2].register_buffer("later", torch.zeros(1)),
    "a buffer is replaced": lambda m: setattr(m[1], "running_mean", torch.ones(4)),
    "a buffer is set to None": lambda m: setattr(m[1], "running_mean", None),
    "a module is added to a leaf": lambda m: m[0].add_module("lora", nn.Linear(4, 1)),
    "a module is deleted": lambda m: m.__delitem__(3),
    "a child is swapped for another of its kind": lambda m: m.__setitem__(2, copy.deepcopy(m[2])),
    "two weights are tied": lambda m: setattr(m[2][0], "weight", m[0].weight),
    "a parameter is frozen": lambda m: m[0].weight.requires_grad_(False),
    "the model moves to another device": lambda m: m.to("meta"),
    "the dtype changes with new parameters": overwrite,
    "weight norm": lambda m: parametrizations.weight_norm(m[0]),
    "pruning": lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
    "a table is replaced": other_table,
    "a key is renamed": rename,
    "a key moves to the end": reorder,
}


def walked(model: nn.Module) -> tuple[list[Any], ...]:
    return (
        [id(each) for each in dict.fromkeys(model.parameters())],
        [(name, id(module)) for name, module in model.named_modules()],
        [(name, id(buffer)) for name, buffer in model.named_buffers()],
    )


def indexed(index: ModuleIndex) -> tuple[list[Any], ...]:
    seen: dict[int, str] = {}
    for name, _, table in index.buffer_tables:
        for key, buffer in table.items():
            if buffer is not None:
                seen.setdefault(id(buffer), f"{name}.{key}".lstrip("."))
    return (
        [id(each) for each in index.parameters],
        [(name, id(module)) for name, module in index.owners],
        [(name, number) for number, name in seen.items()],
    )


@pytest.mark.parametrize("name", CHANGES)
def test_index_matches_walk_after_change(name: str) -> None:
    model = net()
    index = ModuleIndex([model])
    before = walked(model)
    CHANGES[name](model)
    has_changed = index.refresh()
    assert indexed(index) == walked(model)
    assert has_changed or walked(model) == before
    assert not index.refresh()


def test_unchanged_modules_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    index = ModuleIndex([model])
    monkeypatch.delattr(nn.Module, "named_modules")
    for _ in range(3):
        assert not index.refresh()


class OwnWalk(nn.Module):
    """A module that shows its child only to some walks."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = True
        self.child = nn.Linear(2, 2)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        found = super().named_modules(*args, **kwargs)
        return (each for each in found if self.shown or each[1] is not self.child)


def test_module_with_custom_walk_is_walked_each_time() -> None:
    inner = OwnWalk()
    model = nn.Sequential(inner)
    index = ModuleIndex([model])
    assert len(index.parameters) == 2
    inner.shown = False
    assert index.refresh()
    assert index.parameters == []


def test_reached_modules_are_owners_without_parameters() -> None:
    teachers: dict[str, nn.Module] = {}
    index = ModuleIndex([net()], lambda: teachers)
    parameters = list(index.parameters)
    teachers["teacher"] = nn.BatchNorm1d(2)
    assert index.refresh()
    assert index.owners[-1][0] == "teacher"
    assert index.parameters == parameters


@pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning")
def test_scripted_module_is_walked_each_time() -> None:
    index = ModuleIndex([torch.jit.script(nn.Linear(2, 2))])
    index.refresh()
    assert len(index.parameters) == 2
