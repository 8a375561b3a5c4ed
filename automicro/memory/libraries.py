"""First use of the libraries that allocate device memory outside torch's allocator.

cuBLAS and cuDNN do so when a thread first uses them: in the forward on the caller's thread, and in
the backward on a thread of autograd. If the first attempt has filled the device, their failures are
hard to distinguish from a broken device.
"""

import logging
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro.torch_private import without_modes

logger = logging.getLogger(__name__)

# Layers that cuDNN, or MIOpen on ROCm, might compute.
_CONVOLVING = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.RNNBase, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
)  # fmt: skip


_used: set[tuple[torch.device, str]] = set()


def use_libraries(devices: Iterable[torch.device], modules: Sequence[nn.Module]) -> None:
    """Use the libraries that modules will need, forward and backward, once on each accelerator."""
    # Errors are ignored here, because the step reports them with more context.
    for device in devices:
        if device.type == "cpu":
            continue
        _use(device, "products")
        if any(isinstance(each, _CONVOLVING) for root in modules for each in root.modules()):
            _use(device, "convolutions")


def _use(device: torch.device, library: str) -> None:
    if (device, library) in _used:
        return
    # Marked before the attempt, because a failure would otherwise be repeated in every step.
    _used.add((device, library))
    try:
        # The caller might be in inference mode or without gradients. The backward loads the
        # libraries on autograd's thread.
        with without_modes(), torch.inference_mode(False), torch.enable_grad():
            _WORK[library](device).sum().backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, MemoryError) as error:
        logger.debug("%s were not tried on %s: %s", library, device, error)


def _multiply(device: torch.device) -> Tensor:
    one = torch.ones(16, 16, device=device, requires_grad=True)
    return one @ one


def _convolve(device: torch.device) -> Tensor:
    weight = torch.ones(1, 1, 3, 3, device=device, requires_grad=True)
    return F.conv2d(torch.ones(1, 1, 8, 8, device=device), weight)


_WORK = {"products": _multiply, "convolutions": _convolve}
