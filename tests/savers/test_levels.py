"""The values of ``when_too_large``, and the levels that they mean."""

from typing import Any

import pytest
import torch
from torch import nn

from automicro.savers.levels import make_levels
from automicro.savers.recompute import repeated_blocks
from tests.savers.steps import CPU, Block


def model() -> Any:
    encoder = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])})
    return nn.ModuleDict({"encoder": encoder, "head": nn.Linear(2, 2)})


def names_of(given, model) -> list[str]:
    return [level.name for level in make_levels(given, [model], CPU)]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("error", "plain"),
        ("recompute", "plain, recompute"),
        (["offload", "recompute"], "plain, offload, offload + recompute"),
        ({"auto": ["encoder.layers.*"]}, "plain, recompute, offload, recompute + offload"),
        ({"recompute": "head", "offload": True}, "plain, recompute, recompute + offload"),
        ([{"recompute": ["head"]}, "offload"], "plain, recompute, recompute + offload"),
    ],
)
def test_levels_are_built_from_names(given, names):
    assert ", ".join(names_of(given, model())) == names


ALONE = "combines a name that must stand alone .*, or a list of recompute"
INVALID: list[Any] = [
    ("recmpute", ValueError, r"'recmpute' is not known \(did you mean 'recompute'\?\)"),
    (["error"], ValueError, ALONE),
    ({}, ValueError, "is empty"),
    (3, TypeError, "of type int. Use one of error, recompute, offload, nested, auto"),
    (True, TypeError, "of type bool"),
    ([3], TypeError, "3 is of type int"),
    ({"recompute": 3}, TypeError, "3 of type int names no blocks"),
    ({"offload": ["head"]}, TypeError, "names no blocks for 'offload'"),
    ({"auto": None, "offload": True}, ValueError, ALONE),
    ({"auto": ["haed"]}, ValueError, r"did you mean 'head'\?"),
    ({"recompute": ["encoder.layers"]}, ValueError, r"never called .* as in 'encoder.layers.\*'"),
]


@pytest.mark.parametrize(("given", "kind", "message"), INVALID)
def test_invalid_values_raise_error_with_suggestion(given, kind, message):
    with pytest.raises(kind, match=message):
        make_levels(given, [model()], CPU)


def test_model_without_repeated_blocks_cannot_recompute():
    lstm = nn.LSTM(2, 2, num_layers=3)
    with pytest.raises(ValueError, match=r"LSTM has no repeated blocks .*; name them, as in"):
        make_levels("recompute", [lstm], CPU)
    assert names_of("auto", lstm) == ["plain", "offload"]


def test_model_compiled_as_a_whole_is_rejected():
    compiled: Any = torch.compile(model(), backend="eager")
    with pytest.raises(ValueError, match=r"Compile each block instead \(block.compile\(\)\)"):
        make_levels("recompute", [compiled], CPU)
    assert names_of("auto", compiled) == ["plain", "offload"]


def test_level_description():
    level = make_levels("auto", [model()], CPU)[3]
    assert level.describe() == (
        "encoder.layers.* (2) keep only their inputs and are recomputed in the backward, and "
        "tensors saved for the backward wait in host memory"
    )


class Stage(nn.Module):
    def __init__(self, width, blocks=2):
        super().__init__()
        layers = [nn.Linear(width, width), nn.Linear(width, width)]
        self.blocks = nn.ModuleList(nn.Sequential(*layers) for _ in range(blocks))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))


class Inverted(nn.Module):
    def __init__(self, width):
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)) for _ in "ab"]
        self.conv = nn.Sequential(*layers)


REPEATED: list[Any] = [
    (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()), ""),
    (nn.Sequential(nn.Linear(10, 64), Block(), Block(), nn.Linear(64, 1)), "1 2"),
    (nn.ModuleList([Stage(2), Stage(4), Stage(8, 1)]), "0 1 2"),
    (
        nn.ModuleList([Stage(2), Stage(4), Stage(8)]),
        "0.blocks.0 0.blocks.1 1.blocks.0 1.blocks.1 2.blocks.0 2.blocks.1",
    ),
    (nn.ModuleList([Experts(), Experts()]), "0 1"),
    (nn.Sequential(Inverted(2), Inverted(4), Inverted(6)), "0 1 2"),
    # Lists are never called.
    (nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2)), "0.0 0.1 1.0 1.1"),
    (
        nn.Transformer(8, 2, 2, 2, 8, batch_first=True),
        "encoder.layers.0 encoder.layers.1 decoder.layers.0 decoder.layers.1",
    ),
]


@pytest.mark.parametrize(("model", "names"), REPEATED)
def test_repeated_blocks_are_found(model, names):
    assert " ".join(repeated_blocks(model)) == names


def test_block_names_omit_wrapper_prefix():
    inside = nn.ModuleDict({"module": model()})
    whens: list[Any] = ["recompute", {"recompute": "encoder.layers.*"}]
    for when in whens:
        (saver,) = make_levels(when, [inside], CPU)[1].savers
        assert saver.describe().startswith("encoder.layers.* (2) keep")
