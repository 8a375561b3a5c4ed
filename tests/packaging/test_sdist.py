"""The tests run from the sdist alone, with the packages that tests need."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(command: list[str], tree: Path) -> str:
    """Run a command in a tree, without importing this one, and return its output."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def test_sdist_collects_all_tests(unpacked: Path) -> None:
    ask = "import automicro, tests; print(automicro.__file__, tests.__file__)"
    found = run([sys.executable, "-c", ask], unpacked).split()
    assert all(each.startswith(str(unpacked)) for each in found)
    listed = run([sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0"], unpacked)
    number = re.search(r"^(\d+)/\d+ tests collected", listed, re.MULTILINE)
    assert number is not None, listed[-2000:]
    assert int(number[1]) > 2000


def test_quick_tests_pass_in_sdist(unpacked: Path) -> None:
    # Use the current environment, which is up to date.
    there = [f"BIN={Path(sys.executable).parent}", "-o", ".venv/.installed"]
    said = run(["make", "test-quick", *there], unpacked)
    number = re.search(r"(\d+) passed", said)
    assert number is not None, said[-2000:]
    assert int(number[1]) > 300
    assert " failed" not in said
