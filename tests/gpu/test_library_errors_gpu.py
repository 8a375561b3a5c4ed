"""Any message of a library without memory for handles and workspaces is recognized."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from automicro.memory.oom import classify
from tests.gpu.conftest import Record
from tests.gpu.device import DEVICE, GPU, MIB, accelerator, only_cuda

pytestmark = [*GPU, only_cuda("these libraries")]

ROOT = Path(__file__).resolve().parents[2]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=DEVICE)


def convolution() -> Callable[[], Any]:
    layer, x = torch.nn.Conv2d(3, 8, 3).to(DEVICE), ones(1, 3, 32, 32)
    return lambda: layer(x)


def of(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


# By library: makes the arguments, and returns the call.
LIBRARIES: dict[str, Callable[[], Callable[[], Any]]] = {
    "cuBLAS": lambda: of(torch.mm, ones(64, 64), ones(64, 64)),
    "cuDNN": convolution,
    "cuSOLVER": lambda: of(torch.linalg.eigh, ones(512, 512)),
    "cuFFT": lambda: of(torch.fft.rfft, ones(2**22)),
    "cuSPARSE": lambda: of(torch.mm, ones(256, 256).to_sparse_csr(), ones(256, 256)),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_error_on_full_device_counts_as_oom(library: str, record_property: Record) -> None:
    """A process of its own fills the device before the library creates its handle."""
    command = [sys.executable, "-m", "tests.gpu.test_library_errors_gpu", library]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout.splitlines()[-1])
    text = {"where": f"{library}, no byte left", "type": found["error"], **found}
    record_property("texts", [text])
    assert found["means"] in ("RETRYABLE", ""), found


def main(library: str) -> None:
    """Print the error of a library on a full device as a line of JSON, or none."""
    call = LIBRARIES[library]()
    accelerator.synchronize()
    pieces = []
    for piece_mib in (8192, 512, 64, 2):
        while True:
            try:
                pieces.append(torch.empty(piece_mib * MIB, dtype=torch.uint8, device=DEVICE))
            except torch.OutOfMemoryError:
                break
    found = {"error": "", "text": "", "means": ""}
    try:
        call()
        accelerator.synchronize()
    except Exception as error:
        text = str(error).splitlines()[0]
        found = {"error": type(error).__name__, "text": text, "means": classify(error).name}
    del pieces
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
