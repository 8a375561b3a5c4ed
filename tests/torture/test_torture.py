"""The torture of the user's own model: the function, and the command."""

from pathlib import Path

import pytest
import torch
from torch import nn

from automicro import Microbatcher
from automicro.cli import main
from automicro.torture.subject import Subject
from automicro.torture.torture import torture

MODULE = """\
import torch
from torch import nn
from automicro.torture import Subject

{classes}

def make_subject():
    model = {model}
    return Subject(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batches=[(torch.randn(4, 3), torch.randn(4, 2)) for _ in range({batches})],
        options={{"loss_fn": nn.MSELoss()}},
    )
"""

COUNTING = """\
import functools


@functools.cache
def hidden():  # where nobody can see it
    return [0]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        hidden()[0] += self.training
        return self.layer(x) * (1 + 0.1 * hidden()[0])
"""


def make_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, **parts: object) -> str:
    parts = {"classes": "", "model": "nn.Linear(3, 2)", "batches": 4, **parts}
    (tmp_path / f"{name}.py").write_text(MODULE.format(**parts), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return f"{name}.make_subject"


def linear(**changes: object) -> Subject:
    model = nn.Linear(3, 2)
    options: dict = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(4)],
        "options": {"loss_fn": nn.MSELoss()},
        **changes,
    }
    return Subject(**options)


def test_the_command_prints_the_table_and_ends_with_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_module(tmp_path, monkeypatch, "sound_subject")
    assert main(["torture", path, "--quick", "--calls", "clip,step"]) == 0
    out = capsys.readouterr().out
    assert "make_subject: clip, one out of memory" in out
    assert "recovered" in out.splitlines()[0]
    assert "half applied" in out


@pytest.mark.sweep
def test_the_command_finds_state_that_no_library_can_roll_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_module(
        tmp_path, monkeypatch, "counting_subject", classes=COUNTING, model="Counting()"
    )
    assert main(["torture", path, "--quick", "--calls", "backward"]) == 1
    assert "differs: gradient layer.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calls", "forward"], "choose some of backward,evaluate,unscale,clip,step"),
        (["more"], "torture takes one SUBJECT"),
        ([], "the subject has 3 batches"),
    ],
)
def test_wrong_uses_of_the_command_say_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    path = make_module(tmp_path, monkeypatch, "short_subject", batches=3)
    assert main(["torture", path, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.sweep
def test_a_seed_chooses_the_same_trials_again() -> None:
    one, again = (torture(linear, calls=["step"], most_plans=3, seed=5) for _ in range(2))
    assert one.rows == again.rows
    assert one.exit_code == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": [(torch.ones(4, 3), torch.ones(4, 2))] * 2}, "has 2 batches"),
        ({"options": {"microbatch_size": 2}}, "torture sets itself"),
        ({"first_size": 8}, "first_size=8"),
    ],
)
def test_a_subject_that_cannot_be_tortured_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        torture(lambda: linear(**changes), calls=["step"])


def test_what_is_no_subject_is_refused() -> None:
    with pytest.raises(TypeError, match=r"return an automicro\.torture\.Subject"):
        torture(lambda: Microbatcher(nn.Linear(3, 2), loss_fn=nn.MSELoss()))  # type: ignore[arg-type,return-value]


def test_unknown_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="choose some of backward, evaluate, unscale, clip, step"):
        torture(linear, calls=["forward"])
