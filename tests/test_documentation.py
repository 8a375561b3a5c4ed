"""What the documentation shows runs, and what it links to exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def blocks() -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}-{index}", code)
        for page in PAGES
        for index, code in enumerate(CODE.findall(page.read_text(encoding="utf-8")))
    ]


@pytest.mark.parametrize(("name", "code"), blocks(), ids=[name for name, _ in blocks()])
def test_the_code_in_the_documentation_runs(name: str, code: str) -> None:
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


def test_the_readme_shows_code() -> None:
    assert sum(name.startswith("README") for name, _ in blocks()) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("command", ["make train", "make test"])
def test_the_two_commands_of_the_readme_are_targets(command: str) -> None:
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
    target = command.removeprefix("make ")
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
