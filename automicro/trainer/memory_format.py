"""Convolutions with the channels last in memory."""

import torch
from torch import Tensor, nn

from automicro.torch_private import is_uninitialized

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def to_channels_last(*modules: nn.Module) -> None:
    """Give every 4-D and 5-D parameter and buffer the memory format with the channels last.

    Values, shapes and the parameters themselves stay, so an optimizer may have them already.
    Inputs need not be converted: a convolution takes the format from its weight, and hands it on
    to the layers behind it; the gradients and the optimizer's state have it, too. Do it after the
    model was moved and before it is compiled.

    Args:
        modules: the model, then further modules that take part.

    Raises:
        ValueError: nothing in them has four or five dimensions, or a lazy layer has no shape yet.

    Example:
        >>> model = nn.Conv2d(3, 8, 3)
        >>> to_channels_last(model)
        >>> model.weight.is_contiguous(memory_format=torch.channels_last)
        True
        >>> model(torch.zeros(2, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)
        True
    """
    tensors = [each for module in modules for each in [*module.parameters(), *module.buffers()]]
    for module in modules:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if is_uninitialized(tensor):
                raise ValueError(
                    f"channels_last=True, but {name!r} gets its shape from the first batch and "
                    "has none yet; run the model on one row before, or give the layer its shape"
                )
    found = [tensor for tensor in tensors if _has_channels(tensor)]
    if not found:
        dims = sorted({tensor.dim() for tensor in tensors})
        raise ValueError(
            "channels_last=True needs parameters of 4 or 5 dimensions, which convolutions over "
            f"images or volumes have, and {type(modules[0]).__name__} has only ones of "
            f"{', '.join(map(str, dims)) or 'no'} dimensions; leave channels_last out"
        )
    for tensor in found:
        tensor.data = tensor.data.to(memory_format=FORMATS[tensor.dim()])


def _has_channels(tensor: Tensor) -> bool:
    return tensor.dim() in FORMATS and tensor.layout is torch.strided
