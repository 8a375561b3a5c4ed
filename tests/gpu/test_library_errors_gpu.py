"""Any message of a library without memory for handles and workspaces is recognized."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import Record
from tests.gpu.device import GPU, only_cuda
from tests.gpu.full_device import LIBRARIES

pytestmark = [*GPU, only_cuda("these libraries")]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_error_on_full_device_counts_as_oom(library: str, record_property: Record) -> None:
    command = [sys.executable, "-m", "tests.gpu.full_device", library]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout.splitlines()[-1])
    text = {"where": f"{library}, no byte left", "type": found["error"], **found}
    record_property("texts", [text])
    assert found["means"] in ("RETRYABLE", ""), found
