"""Parameter groups: their members, and the message for each kind of mistake."""

from typing import Any

import pytest
import torch
from torch import nn

from automicro.trainer.optimizer import group_parameters

FORM = "write mappings such as {'params': ['*.bias'], 'weight_decay': 0.0}"


class Tied(nn.Module):
    """Has an embedding and an output with one weight, a block, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.block = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.output = nn.Linear(4, 5, bias=False)
        self.output.weight = self.embed.weight


def names(model: nn.Module, groups: Any) -> list[list[str]]:
    """Return the groups with names instead of parameters."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[by_id[id(p)] for p in group["params"]] for group in group_parameters(model, groups)]


def error_of(groups: Any, model: nn.Module | None = None) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        group_parameters(model or Tied(), groups)
    return str(caught.value)


@pytest.mark.parametrize("name", ["embed.weight", "output.weight"])
def test_tied_weights_match_either_name_and_occur_once(name: str) -> None:
    model = Tied()
    assert names(model, [{"params": name, "lr": 0.1}])[1] == ["embed.weight"]
    groups = group_parameters(model, [{"params": ["embed.*", "output.*"], "lr": 0.1}])
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(ids) == sorted(id(parameter) for parameter in model.parameters())


def test_parameter_names_are_case_sensitive() -> None:
    assert "'Norm.*' matches no parameter" in error_of([{"params": "Norm.*"}])


def test_torch_trains_each_group_with_its_options() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(
        group_parameters(model, [{"params": "block.weight", "lr": 0.0}]), lr=0.5
    )
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        moved = 0.0 if name == "block.weight" else 0.5
        assert torch.equal(parameter, before[name] - moved), name


UNNAMED = f"without names in 'params': {FORM}"
WRONG: dict[str, tuple[Any, str]] = {
    "mapping instead of list": (
        {"params": "*"},
        f"parameter_groups is of type dict, not a list: {FORM}",
    ),
    "text": ("*.bias", f"parameter_groups is of type str, not a list: {FORM}"),
    "no names": ([{"params": []}], f"parameter_groups[0] is {{'params': []}}, {UNNAMED}"),
    "number as name": (
        [{"params": [3]}],
        f"parameter_groups[0] is {{'params': [3]}}, {UNNAMED}",
    ),
    "one tensor": (
        [{"params": torch.zeros(2)}],
        f"parameter_groups[0] is {{'params': tensor([0., 0.])}}, {UNNAMED}",
    ),
    "mistyped name": (
        [{"params": "norm.*"}, {"params": ["norm.bias", "blok.weight"]}],
        "parameter_groups[1]: 'blok.weight' matches no parameter of the model (did you mean "
        "'block.weight'?). Use names such as 'embed.weight', 'block.weight', 'block.bias', with * "
        "for any letters",
    ),
    "no similar name": (
        [{"params": "*zzz*"}],
        "parameter_groups[0]: '*zzz*' matches no parameter of the model. Use names such as "
        "'embed.weight', 'block.weight', 'block.bias', with * for any letters",
    ),
    "all in earlier groups": (
        [{"params": "*.bias", "lr": 0.1}, {"params": ["norm.bias"], "lr": 0.2}],
        "parameter_groups[1] has no parameters: all that ['norm.bias'] match are in earlier "
        "groups. Move this group before them, or leave it out",
    ),
}


@pytest.mark.parametrize(("groups", "message"), WRONG.values(), ids=WRONG)
def test_invalid_group_is_named_with_position_and_remedy(groups: Any, message: str) -> None:
    assert error_of(groups) == message
