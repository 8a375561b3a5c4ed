"""Run tests with the oldest supported versions, in a separate environment.

    python -m tests.oldest {hosts,libraries} [ARGUMENTS OF PYTEST]

The versions are the lower bounds of the requirements in ``pyproject.toml``. With ``hosts``, these
are the hosts, for tests of the integrations; with ``libraries``, torch and all other requirements,
for tests of the parts that use them. The current environment provides everything else.
"""

import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOSTS = ("accelerate", "keras", "lightning", "transformers")
# Other folders need FSDP2, newer losses, or messages of newer versions of YAML and rich.
LIBRARY_TESTS = (
    *("batch", "callbacks", "checkpoints", "data", "loss", "memory", "optimizer", "oracle"),
    *("policy", "remembered", "savers", "state", "step", "trainer", "transaction"),
)


def oldest(requirements: Sequence[str]) -> list[str]:
    """Return the first version of each requirement, for pip.

    >>> oldest(["keras>=3.7", "mkdocs>=1.6,<2"])
    ['keras==3.7', 'mkdocs==1.6']
    """
    first = [requirement.partition(",")[0] for requirement in requirements]
    return [each.replace(">=", "==") for each in dict.fromkeys(first)]


def make_environment(folder: Path, requirements: list[str]) -> str:
    """Return the Python of an environment with these versions, rebuilt only if they changed."""
    python = str(folder / "bin" / "python")
    wanted = "\n".join([sys.prefix, *requirements])
    stamp = folder / "requirements.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"installing {', '.join(requirements)} into {folder.name}", flush=True)
    venv.create(folder, clear=True, with_pip=True)
    ours = sysconfig.get_path("purelib")
    theirs = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    (Path(theirs) / "beneath.pth").write_text(ours + "\n", encoding="utf-8")
    # pip treats the lower environment as installed, and complains about its newer hosts.
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        sys.exit(installed.stdout + installed.stderr)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def main(what: str, *arguments: str) -> int:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    requirements, tests = {
        "hosts": ([each for name in HOSTS for each in extras[name]], ["integrations"]),
        "libraries": (project["dependencies"], LIBRARY_TESTS),
    }[what]
    python = make_environment(ROOT / f".venv-{what}", oldest(requirements))
    command = [python, "-m", "pytest", "-q", *(f"tests/{each}" for each in tests), *arguments]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
