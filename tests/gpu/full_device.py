"""Print the error of a library on a full device. Runs in its own process, with the library's name.

Torch fills the device before the library creates its handle. The output is one line of JSON: the
error, or none.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from automicro.memory.oom import classify
from tests.gpu.device import DEVICE, MIB, accelerator


def _cublas() -> Callable[[], Any]:
    a = torch.ones(64, 64, device=DEVICE)
    return lambda: a @ a


def _cudnn() -> Callable[[], Any]:
    layer = torch.nn.Conv2d(3, 8, 3).to(DEVICE)
    x = torch.ones(1, 3, 32, 32, device=DEVICE)
    return lambda: layer(x)


def _cusolver() -> Callable[[], Any]:
    a = torch.eye(512, device=DEVICE)
    return lambda: torch.linalg.eigh(a)


def _cufft() -> Callable[[], Any]:
    x = torch.ones(2**22, device=DEVICE)
    return lambda: torch.fft.rfft(x)


def _cusparse() -> Callable[[], Any]:
    a = torch.eye(256, device=DEVICE).to_sparse_csr()
    b = torch.ones(256, 256, device=DEVICE)
    return lambda: a @ b


LIBRARIES = {
    "cuBLAS": _cublas,
    "cuDNN": _cudnn,
    "cuSOLVER": _cusolver,
    "cuFFT": _cufft,
    "cuSPARSE": _cusparse,
}


def fill() -> list[torch.Tensor]:
    """Allocate all free memory, in smaller and smaller pieces."""
    pieces = []
    for piece_mib in (8192, 512, 64, 2):
        while True:
            try:
                pieces.append(torch.empty(piece_mib * MIB, dtype=torch.uint8, device=DEVICE))
            except torch.OutOfMemoryError:
                break
    return pieces


def main() -> None:
    call = LIBRARIES[sys.argv[1]]()
    accelerator.synchronize()
    pieces = fill()
    found = {"error": "", "text": "", "means": ""}
    try:
        call()
        accelerator.synchronize()
    except Exception as error:
        found = {
            "error": type(error).__name__,
            "text": str(error).splitlines()[0],
            "means": classify(error).name,
        }
    del pieces
    print(json.dumps(found))


if __name__ == "__main__":
    main()
