"""Fixtures for the compiled allocator and reports of its trials."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.compiling import compile_library, find_compiler

Report: TypeAlias = dict[str, list[dict[str, Any]]]
ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("capped_allocator.cpp")


@pytest.fixture(scope="session")
def run_trials(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Report]:
    """Run the trials in a separate process, where the allocator stays installed."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler ($CXX, g++, c++, clang++), so no allocator with a budget")
    cache = getattr(pytestconfig, "cache", None)  # absent with `-p no:cacheprovider`
    folder = cache.mkdir("capped_allocator") if cache else tmp_path_factory.mktemp("build")
    library = compile_library(compiler, [SOURCE], folder, ["c10"])

    def run(*options: str) -> Report:
        path = tmp_path_factory.mktemp("report") / "report.json"
        command = [sys.executable, "-W", "error", "-m", "tests.real_memory", str(library)]
        finished = subprocess.run(
            [*command, str(path), *options], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert finished.returncode == 0, finished.stderr
        report: Report = json.loads(path.read_text())
        return report

    return functools.cache(run)


@pytest.fixture(scope="session", params=["sample", pytest.param("full", marks=pytest.mark.slow)])
def report(request: pytest.FixtureRequest, run_trials: Callable[..., Report]) -> Report:
    """Return the results of the trials, by part."""
    if request.param == "sample":
        return run_trials()
    found = run_trials("--full")
    trials = [row["trials"] for row in [*found["shrinking"], *found["faults"]]]
    print(f"\n{sum(trials)} trials")  # for `make torture`, which shows output
    return found
