"""Run the tests of the integrations with the oldest hosts that are supported.

    python -m tests.integrations.oldest [ARGUMENTS OF PYTEST]

The versions are those from which the extras in ``pyproject.toml`` begin. They come into an
environment of their own, ``.venv-hosts``; all that they do not bring is that of the environment
which runs this.
"""

import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-hosts"
EXTRAS = ("accelerate", "keras", "lightning", "transformers")


def oldest(extras: dict[str, list[str]]) -> list[str]:
    """The first version of each host, as pip is told it.

    >>> oldest({"keras": ["keras>=3.7"], "docs": ["matplotlib>=3.8"]})
    ['keras==3.7']
    """
    found = [extras[name] for name in EXTRAS if name in extras]
    named = dict.fromkeys(requirement for each in found for requirement in each)
    return [requirement.replace(">=", "==") for requirement in named]


def make_environment(requirements: list[str]) -> str:
    """An environment with these, made anew where they are others than before; its Python."""
    python = str(FOLDER / "bin" / "python")
    wanted = "\n".join([sys.prefix, *requirements])
    stamp = FOLDER / "requirements.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"installing {', '.join(requirements)} into {FOLDER.name}", flush=True)
    venv.create(FOLDER, clear=True, with_pip=True)
    ours = sysconfig.get_path("purelib")
    theirs = sysconfig.get_path("purelib", vars={"base": str(FOLDER), "platbase": str(FOLDER)})
    (Path(theirs) / "beneath.pth").write_text(ours + "\n", encoding="utf-8")
    # pip counts what lies beneath as installed, and tells what does not fit it: newer hosts.
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        sys.exit(installed.stdout + installed.stderr)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def main(arguments: list[str]) -> int:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    python = make_environment(oldest(extras))
    command = [python, "-m", "pytest", "-q", "tests/integrations", *arguments]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
