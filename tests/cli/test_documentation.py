"""Every example of docs/configuration.md runs, and does what the page says."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from automicro.cli.command_line import EXIT_CODES
from automicro.cli.commands import COMMANDS
from automicro.cli.config.keys import KEYS
from tests.cli.conftest import ROOT, Command

PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
FILES = re.findall(r"^```(?:yaml|python)\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SHELL = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line.partition(" #")[0].partition(" > ")[0] for line in "".join(SHELL).splitlines()]
FILE_NAMES = ["job.yaml", "my_data.py", "small.yaml", "watched.yaml", "evaluations.yaml"]
MISTAKES = re.findall(r"^\$ automicro (.*)\n(automicro: .*(?:\n  .*)*)$", PAGE, re.MULTILINE)


@pytest.fixture(autouse=True)
def documented_files(job_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "my_data", raising=False)
    for name, text in FILES:
        Path(name).write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_every_command_succeeds(automicro: Command) -> None:
    assert len(LINES) >= 15
    for line in LINES:
        program, *arguments = shlex.split(line)
        assert program == "automicro"
        automicro(*arguments)


def test_documented_job_recovers_from_oom(automicro: Command) -> None:
    out = automicro("train", "job.yaml").out
    survived = re.search(r"OOMs survived +\d+ \((\d+) in train, (\d+) in eval\)", out)
    assert survived is not None
    assert int(survived[1]) >= 1
    assert int(survived[2]) >= 1


@pytest.mark.parametrize(("command", "message"), MISTAKES)
def test_every_mistake_gives_documented_message(
    command: str, message: str, automicro: Command
) -> None:
    err = automicro(*shlex.split(command), code=2).err.splitlines()
    for line, shown in zip(err, message.splitlines(), strict=True):
        assert line.startswith(shown.removesuffix("…").rstrip())


def test_page_shows_files_mistakes_commands_codes_and_keys() -> None:
    assert [name for name, _ in FILES] == FILE_NAMES
    assert len(MISTAKES) == 3
    for name in COMMANDS:
        assert f"\n| `{name}` | " in PAGE
    assert {*map(int, re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE))} == set(EXIT_CODES)
    for name in re.findall(r"`\$\{([a-z_]+)(?:\.[a-z_.]+)?\}`", PAGE):
        assert name in KEYS or name == "key"
