"""The published files have one version, valid links and everything that tests need."""

import email
import email.message
import re
import zipfile
from pathlib import Path

import pytest

import automicro
import hatch_build
from tests.packaging.conftest import ROOT

REPOSITORY = "https://example.org/us/automicro"
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Folders of the tree that an sdist includes completely.
FOLDERS = ("automicro", "benchmarks", "configs", "docs", "tests")


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def tree_files(*folders: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.sweep
def test_version_has_one_source(wheel: Path) -> None:
    assert metadata(wheel)["Version"] == automicro.__version__
    written = [
        path.relative_to(ROOT).as_posix()
        for path in (*ROOT.glob("*.py"), *ROOT.glob("*.toml"), *ROOT.glob("automicro/**/*.py"))
        if re.search(r"^(__version__|version) *= *\"", path.read_text(encoding="utf-8"), re.M)
    ]
    assert written == ["automicro/version.py"]


@pytest.mark.sweep
def test_wheel_contains_only_package(wheel: Path) -> None:
    names = {each for each in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in each}
    assert names == tree_files("automicro")
    assert "automicro/py.typed" in names


@pytest.mark.sweep
def test_sdist_contains_files_that_tests_read(unpacked: Path) -> None:
    expected = tree_files(*FOLDERS) | {
        *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "conftest.py"),
        *("constraints.txt", "hatch_build.py", "pyproject.toml"),
    }
    assert [each for each in sorted(expected) if not (unpacked / each).is_file()] == []


@pytest.mark.sweep
def test_readme_without_repository_has_no_relative_links(wheel: Path) -> None:
    shown = metadata(wheel).get_payload()
    assert isinstance(shown, str)
    assert shown.lstrip().startswith("# automicro")
    assert [target for target in LINK.findall(shown) if not target.startswith("https://")] == []
    assert "`docs/guarantees.md`" in shown


def test_readme_and_project_links_point_into_repository(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(hatch_build.VARIABLE, f"{REPOSITORY}/")
    found: dict[str, object] = {}
    hatch_build.LinksHook(str(ROOT), {}).update(found)
    readme, urls = found["readme"], found["urls"]
    assert isinstance(readme, dict)
    assert isinstance(urls, dict)
    assert urls.keys() == {"Source", "Documentation", "Changelog", "Issues"}
    own = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    targets = LINK.findall(readme["text"])
    assert len(targets) == len(own) > 20
    for target in (*targets, urls["Documentation"], urls["Changelog"]):
        assert target.startswith((f"{REPOSITORY}/blob/HEAD/", f"{REPOSITORY}/raw/HEAD/")), target
        page = target.partition("/HEAD/")[2].partition("#")[0]
        assert (ROOT / page).exists(), target


@pytest.mark.parametrize(
    "text", ["automicro", "git@example.org:us/automicro.git", "https://me:secret@example.org/a/b"]
)
def test_invalid_repository_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not the address of a repository: give one that a br"):
        hatch_build.read_repository(text)
