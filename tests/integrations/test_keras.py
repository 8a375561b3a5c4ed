"""Keras on torch, in a separate process, because Keras reads its backend at import."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = "tests/integrations/keras_cases.py", "automicro/integrations/keras.py"

if importlib.util.find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)


def run(folder: Path, *arguments: str) -> None:
    there = {"KERAS_BACKEND": "torch", "KERAS_HOME": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ended = subprocess.run(
        [*command, *arguments, *FILES],
        cwd=ROOT,
        env={**os.environ, **there},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout


@pytest.mark.timeout(600)
def test_keras_matches_plain_runs(tmp_path: Path) -> None:
    run(tmp_path)


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_keras_matches_plain_runs_at_every_limit(tmp_path: Path) -> None:
    run(tmp_path, "-m", "sweep")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_keras_on_two_ranks(tmp_path: Path) -> None:
    run(tmp_path, "-m", "slow")


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is here")
def test_missing_backend_error_suggests_torch(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import automicro.integrations.keras"],
        cwd=ROOT,
        env={**os.environ, "KERAS_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "ImportError: Keras imports TensorFlow" in ended.stderr
    assert "KERAS_BACKEND=torch" in ended.stderr.splitlines()[-1]
