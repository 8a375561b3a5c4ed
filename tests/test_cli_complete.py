"""Shell completion of commands, options and files by shtab."""

import subprocess
import sys
from pathlib import Path

import pytest

from automicro.cli import main
from automicro.cli.commands import COMMANDS
from automicro.cli.commands.complete import SHELLS


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_script_contains_every_command(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["complete", shell]) == 0
    script = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in script] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ev", ["eval"]),
        ("train --js", ["--json"]),
        ("train jo", ["job.yaml"]),
        ("doctor re", ["report.json"]),
        ("complete fi", ["fish"]),
    ],
)
def test_bash_completes_words(
    words: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("job.yaml", "report.json"):
        (tmp_path / name).touch()
    assert main(["complete", "bash"]) == 0
    script = f"""{capsys.readouterr().out}
COMP_WORDS=(automicro {words})
COMP_CWORD={len(words.split())}
_shtab_automicro 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    command = ["bash", "--norc", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == expected


def test_missing_shtab_error_names_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["complete", "bash"]) == 2
    assert 'not installed: pip install "automicro[completion]"' in capsys.readouterr().err
