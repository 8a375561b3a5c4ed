"""Every example of docs/configuration.md runs, and does what the page says."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from automicro.cli import main
from automicro.cli.command_line import EXIT_CODES
from automicro.cli.commands import COMMANDS
from automicro.cli.config.keys import KEYS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
FILES = re.findall(r"^```(?:yaml|python)\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SHELL = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line.partition(" #")[0].partition(" > ")[0] for line in "".join(SHELL).splitlines()]
FILE_NAMES = ["job.yaml", "my_data.py", "small.yaml", "watched.yaml", "evaluations.yaml"]
MISTAKES = re.findall(r"^\$ automicro (.*)\n(automicro: .*(?:\n  .*)*)$", PAGE, re.MULTILINE)


@pytest.fixture(autouse=True)
def documented_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.delitem(sys.modules, "my_data", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, text in FILES:
        Path(name).write_text(text, encoding="utf-8")


def test_page_contains_expected_files() -> None:
    assert [name for name, _ in FILES] == FILE_NAMES


@pytest.mark.slow
def test_every_command_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(LINES) >= 15
    for line in LINES:
        program, *arguments = shlex.split(line)
        assert program == "automicro"
        assert main(arguments) == 0, f"{line}\n{capsys.readouterr().err}"


def test_documented_job_recovers_from_oom(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "job.yaml"]) == 0
    survived = re.search(
        r"OOMs survived +\d+ \((\d+) in train, (\d+) in eval\)", capsys.readouterr().out
    )
    assert survived is not None
    assert int(survived[1]) >= 1
    assert int(survived[2]) >= 1


@pytest.mark.parametrize(("command", "message"), MISTAKES)
def test_every_mistake_gives_documented_message(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)) == 2
    said = capsys.readouterr().err.splitlines()
    for line, shown in zip(said, message.splitlines(), strict=True):
        assert line.startswith(shown.removesuffix("…").rstrip())


def test_page_shows_three_mistakes_and_every_command() -> None:
    assert len(MISTAKES) == 3
    for name in COMMANDS:
        assert f"\n| `{name}` | " in PAGE


def test_documented_exit_codes_match_help() -> None:
    documented = set(map(int, re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)))
    assert documented == set(EXIT_CODES)


def test_referenced_keys_exist() -> None:
    for name in re.findall(r"`\$\{([a-z_]+)(?:\.[a-z_.]+)?\}`", PAGE):
        assert name in KEYS or name == "key"
