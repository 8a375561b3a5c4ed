"""Every name that this package takes from torch without torch promising to keep it."""

import sys

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensorMode", "TorchDispatchMode", "is_compiled", "is_uninitialized", "is_wrapper"]


def is_compiled(module: nn.Module) -> bool:
    """Tell whether ``torch.compile`` was applied to this module itself, in any of its three ways.

    >>> is_compiled(nn.Linear(2, 2))
    False
    """
    # Importing dynamo takes seconds, and without it nothing can have been compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    return (
        isinstance(module, dynamo.OptimizedModule)  # torch.compile(module)
        or getattr(module, "_compiled_call_impl", None) is not None  # module.compile()
        # module.forward = torch.compile(module.forward)
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Tell whether a lazy module's tensor still waits for its shape.

    >>> is_uninitialized(nn.LazyLinear(2).weight), is_uninitialized(nn.Linear(2, 2).weight)
    (True, False)
    """
    return isinstance(tensor, UninitializedTensorMixin)


def is_wrapper(tensor_type: type) -> bool:
    """Tell whether tensors of a type hold other tensors: jagged, distributed, quantized ones.

    >>> is_wrapper(torch.Tensor)
    False
    """
    return hasattr(tensor_type, "__tensor_flatten__")
