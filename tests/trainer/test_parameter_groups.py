"""Parameter groups: who is in which, and the message for each way to get them wrong."""

from typing import Any

import pytest
import torch
from torch import nn

from automicro.trainer.optimizer import check_group_options, group_parameters

FORM = "write mappings such as {'params': ['*.bias'], 'weight_decay': 0.0}"


class Tied(nn.Module):
    """An embedding whose weight is the output's, a block, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.block = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.output = nn.Linear(4, 5, bias=False)
        self.output.weight = self.embed.weight


def names(model: nn.Module, groups: Any) -> list[list[str]]:
    """Return the groups with names in place of parameters."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[by_id[id(p)] for p in group["params"]] for group in group_parameters(model, groups)]


def complaint(groups: Any, model: nn.Module | None = None) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        group_parameters(model or Tied(), groups)
    return str(caught.value)


def test_what_no_pattern_names_makes_a_first_group_without_options() -> None:
    model = Tied()
    groups = group_parameters(model, [{"params": ["*.bias", "norm.*"], "weight_decay": 0.0}])
    assert [sorted(group) for group in groups] == [["params"], ["params", "weight_decay"]]
    assert names(model, [{"params": ["*.bias", "norm.*"], "weight_decay": 0.0}]) == [
        ["embed.weight", "block.weight"],
        ["block.bias", "norm.weight", "norm.bias"],
    ]


def test_the_first_group_that_matches_takes_a_parameter() -> None:
    groups = [{"params": "norm.*", "lr": 0.1}, {"params": "*.bias", "lr": 0.2}]
    assert names(Tied(), groups) == [
        ["embed.weight", "block.weight"],
        ["norm.weight", "norm.bias"],
        ["block.bias"],
    ]
    assert names(Tied(), groups[::-1])[1:] == [["block.bias", "norm.bias"], ["norm.weight"]]


def test_no_empty_default_group_is_made() -> None:
    groups = group_parameters(Tied(), [{"params": "*", "lr": 0.5}])
    assert len(groups) == 1
    assert len(groups[0]["params"]) == 5


def test_without_groups_all_parameters_are_in_one() -> None:
    assert len(names(Tied(), [])[0]) == 5


@pytest.mark.parametrize("name", ["embed.weight", "output.weight"])
def test_tied_weights_go_by_either_name_and_are_there_once(name: str) -> None:
    model = Tied()
    assert names(model, [{"params": name, "lr": 0.1}])[1] == ["embed.weight"]
    groups = group_parameters(model, [{"params": ["embed.*", "output.*"], "lr": 0.1}])
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(ids) == sorted(id(parameter) for parameter in model.parameters())


def test_upper_and_lower_case_differ() -> None:
    assert "'Norm.*' matches no parameter" in complaint([{"params": "Norm.*"}])


def test_torch_trains_each_group_with_its_own_options() -> None:
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


def test_options_with_tuples_and_flags_are_handed_on() -> None:
    model = Tied()
    groups = [{"params": "norm.*", "betas": (0.5, 0.6), "amsgrad": True}]
    optimizer = torch.optim.AdamW(group_parameters(model, groups))
    check_group_options(optimizer, groups)
    first, second = optimizer.param_groups
    assert (first["betas"], first["amsgrad"]) == ((0.9, 0.999), False)
    assert (second["betas"], second["amsgrad"]) == ((0.5, 0.6), True)


WRONG: dict[str, tuple[Any, str]] = {
    "a mapping in place of a list": (
        {"params": "*"},
        f"parameter_groups is of type dict, not a list: {FORM}",
    ),
    "text": ("*.bias", f"parameter_groups is of type str, not a list: {FORM}"),
    "patterns without a mapping": (
        ["*.bias"],
        f"parameter_groups[0] is of type str, not a mapping: {FORM}",
    ),
    "no params": (
        [{"params": "*.bias"}, {"weight_decay": 0.0}],
        "parameter_groups[1] lacks 'params', so nothing says whose options these are: " + FORM,
    ),
    "a mistyped params": (
        [{"param": "*.bias", "lr": 0.1}],
        "parameter_groups[0] lacks 'params' and has 'param', so nothing says whose options these "
        f"are: {FORM}",
    ),
    "no names": (
        [{"params": []}],
        f"parameter_groups[0] names no parameters: {FORM}, or leave the group out",
    ),
    "a number for a name": (
        [{"params": 3}],
        "parameter_groups[0]: 'params' holds a value of type int, and parameters are named: "
        f"{FORM}, or give the Trainer an optimizer with groups of its own",
    ),
    "parameters themselves": (
        [{"params": nn.Linear(1, 1).parameters()}],
        "parameter_groups[0]: 'params' holds a value of type Parameter, and parameters are named: "
        f"{FORM}, or give the Trainer an optimizer with groups of its own",
    ),
    "one tensor": (
        [{"params": torch.zeros(2)}],
        "parameter_groups[0]: 'params' holds a value of type Tensor, and parameters are named: "
        f"{FORM}, or give the Trainer an optimizer with groups of its own",
    ),
    "a mistyped name": (
        [{"params": "norm.*"}, {"params": ["norm.bias", "blok.weight"]}],
        "parameter_groups[1]: 'blok.weight' matches no parameter of the model (did you mean "
        "'block.weight'?): correct it",
    ),
    "a mistyped pattern": (
        [{"params": "*.embd.*"}],
        "parameter_groups[0]: '*.embd.*' matches no parameter of the model (did you mean "
        "'embed.weight'?): correct it",
    ),
    "nothing like it": (
        [{"params": "*zzz*"}],
        "parameter_groups[0]: '*zzz*' matches no parameter of the model: use names such as "
        "'embed.weight', 'block.weight', 'block.bias', with * for any letters",
    ),
    "all taken": (
        [{"params": "*.bias", "lr": 0.1}, {"params": ["norm.bias"], "lr": 0.2}],
        "parameter_groups[1]: all that ['norm.bias'] match is in earlier groups, and the first "
        "that matches counts: put this group further up, or leave it out",
    ),
}


@pytest.mark.parametrize(("groups", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_with_its_place_and_remedy(groups: Any, message: str) -> None:
    assert complaint(groups) == message


def test_a_model_without_parameters_has_none_to_name() -> None:
    assert complaint([{"params": "*"}], nn.ReLU()) == (
        "parameter_groups[0]: '*' matches no parameter of the model, which has none: leave "
        "parameter_groups out"
    )


def test_an_option_that_the_optimizer_would_ignore_is_refused() -> None:
    groups = [{"params": "norm.*", "lr": 0.1}, {"params": "*.bias", "weight_decya": 0.0}]
    optimizer = torch.optim.SGD(group_parameters(Tied(), groups), lr=0.1)
    with pytest.raises(ValueError, match="weight_decya") as caught:
        check_group_options(optimizer, groups)
    message = str(caught.value)
    assert message.startswith(
        "parameter_groups[1] has the option 'weight_decya' (did you mean 'weight_decay'?), which "
        "SGD does not know and would ignore: use options of lr, momentum, dampening, weight_decay"
    )
