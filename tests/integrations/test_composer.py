"""The script of docs/integrations/composer.md, before and after: the same weights."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations" / "composer.md"


def run(fence: str) -> dict[str, Any]:
    text = PAGE.read_text(encoding="utf-8")
    [code] = re.findall(rf"^```{fence}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, str(PAGE), "exec"), found)
    return found


@pytest.mark.filterwarnings("ignore")  # Composer meets a newer torch than it asks for
def test_a_script_that_was_moved_over_ends_with_the_bits_of_composers() -> None:
    from benchmarks.sizes_of_peers import repair_torchvision

    repair_torchvision()
    pytest.importorskip("composer")
    before, after = run("py"), run("python")
    assert float(before["accuracy"]) == pytest.approx(after["accuracy"], abs=0)
    pairs = zip(before["model"].parameters(), after["model"].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert len(list(after["model"].parameters())) == 4


def test_the_lines_that_the_page_shows_as_changed_are_those_that_differ() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, after, diff = (
        re.findall(rf"^```{fence}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0].splitlines()
        for fence in ("py", "python", "diff")
    )
    assert [line[1:] for line in diff if line.startswith("-") and line[1:] not in before] == []
    assert [line[1:] for line in diff if line.startswith("+") and line[1:] not in after] == []
    gone = [line for line in before if line not in after]
    assert gone
    assert {f"-{line}" for line in gone} <= set(diff)
    assert {f"+{line}" for line in after if line not in before} <= set(diff)
