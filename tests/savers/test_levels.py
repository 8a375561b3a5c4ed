"""The values of ``when_too_large``, and the levels that they mean."""

from typing import Any

import pytest
import torch
from torch import nn

from automicro.savers.levels import make_levels
from automicro.savers.recompute import repeated_blocks
from tests.savers.models import Block
from tests.savers.steps import CPU


def model() -> nn.Module:
    return nn.ModuleDict(
        {
            "encoder": nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])}),
            "head": nn.Linear(2, 2),
        }
    )


def test_levels_are_built_from_names() -> None:
    cases: list[Any] = [
        ("error", ["plain"]),
        ("recompute", ["plain", "recompute"]),
        ("offload", ["plain", "offload"]),
        (["offload", "recompute"], ["plain", "offload", "offload + recompute"]),
        ("auto", ["plain", "recompute", "offload", "recompute + offload"]),
        ({"auto": ["encoder.layers.*"]}, ["plain", "recompute", "offload", "recompute + offload"]),
        ({"recompute": "head", "offload": True}, ["plain", "recompute", "recompute + offload"]),
        ([{"recompute": ["head"]}, "offload"], ["plain", "recompute", "recompute + offload"]),
    ]
    for given, names in cases:
        levels = make_levels(given, [model()], CPU)
        assert [level.name for level in levels] == names


def test_invalid_values_raise_error_with_suggestion() -> None:
    cases: list[Any] = [
        ("recmpute", ValueError, r"'recmpute' is not known \(did you mean 'recompute'\?\)"),
        (["offlod"], ValueError, r"did you mean 'offload'\?"),
        (["error"], ValueError, "combines a name that must stand alone .*, or a list of recompute"),
        ([], ValueError, "is empty"),
        ({}, ValueError, "is empty"),
        (3, TypeError, "of type int. Use one of error, recompute, offload, nested, auto"),
        (True, TypeError, "of type bool"),
        ([3], TypeError, "3 is of type int"),
        ({"recompute": 3}, TypeError, "3 of type int names no blocks"),
        ({"offload": ["head"]}, TypeError, "names no blocks for 'offload'"),
        ({"auto": None, "offload": True}, ValueError, "combines a name that must stand alone"),
        ({"recompute": ["encoder.layer.*"]}, ValueError, r"did you mean 'encoder.layers.\*'\?"),
        ({"auto": ["haed"]}, ValueError, r"did you mean 'head'\?"),
        (
            {"recompute": ["encoder.layers"]},
            ValueError,
            r"never called .* as in 'encoder.layers.\*'",
        ),
    ]
    for given, kind, message in cases:
        with pytest.raises(kind, match=message):
            make_levels(given, [model()], CPU)


def test_model_without_repeated_blocks_cannot_recompute() -> None:
    lstm = nn.LSTM(2, 2, num_layers=3)
    with pytest.raises(ValueError, match=r"LSTM has no repeated blocks .*; name them, as in"):
        make_levels("recompute", [lstm], CPU)
    levels = make_levels("auto", [lstm], CPU)
    assert [level.name for level in levels] == ["plain", "offload"]


def test_model_compiled_as_a_whole_is_rejected() -> None:
    compiled = torch.compile(model(), backend="eager")
    with pytest.raises(ValueError, match=r"Compile each block instead \(block.compile\(\)\)"):
        make_levels("recompute", [compiled], CPU)  # type: ignore[list-item]
    assert len(make_levels("auto", [compiled], CPU)) == 2  # type: ignore[list-item]


def test_level_description() -> None:
    level = make_levels("auto", [model()], CPU)[3]
    assert level.describe() == (
        "encoder.layers.* (2) keep only their inputs and are recomputed in the backward, and "
        "tensors saved for the backward wait in host memory"
    )


class Stage(nn.Module):
    def __init__(self, width: int, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(blocks)
        )


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))


class Inverted(nn.Module):
    """A block with its own width, which contains sequences of single layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)) for _ in range(2)]
        )


def test_repeated_blocks_are_found() -> None:
    cases: list[Any] = [
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()), ""),
        (nn.Sequential(nn.Linear(10, 64), Block(), Block(), nn.Linear(64, 1)), "1 2"),
        (nn.ModuleList([Stage(2), Stage(4), Stage(8, 1)]), "0 1 2"),
        (
            nn.ModuleList([Stage(2), Stage(4), Stage(8)]),
            "0.blocks.0 0.blocks.1 1.blocks.0 1.blocks.1 2.blocks.0 2.blocks.1",
        ),
        (nn.ModuleList([Experts(), Experts()]), "0 1"),
        (nn.Sequential(Inverted(2), Inverted(4), Inverted(6)), "0 1 2"),
        (
            nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2)),  # never called
            "0.0 0.1 1.0 1.1",
        ),
        (
            nn.Transformer(8, 2, 2, 2, 8, batch_first=True),
            "encoder.layers.0 encoder.layers.1 decoder.layers.0 decoder.layers.1",
        ),
    ]
    for model, names in cases:
        assert " ".join(repeated_blocks(model)) == names


def test_block_names_omit_wrapper_prefix() -> None:
    inside = nn.ModuleDict({"module": model()})
    (saver,) = make_levels("recompute", [inside], CPU)[1].savers
    assert saver.describe().startswith("encoder.layers.* (2) keep")
    assert len(make_levels({"recompute": "encoder.layers.*"}, [inside], CPU)) == 2
