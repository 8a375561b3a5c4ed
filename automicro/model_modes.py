"""Modules in evaluation mode for a while; lazy modules that have yet to see an input."""

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from automicro.torch_private import is_uninitialized


@contextlib.contextmanager
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules in evaluation mode, and every submodule back in its own mode afterwards.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
        >>> with evaluation_mode([model]):
        ...     model[0].training
        False
        >>> [module.training for module in model]
        [True, False]
    """
    before = [(each, each.training) for module in modules for each in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for each, training in before:
            each.training = training


def is_lazy(modules: Sequence[nn.Module]) -> bool:
    """Whether some parameter or buffer gets its shape from the first input."""
    return any(
        is_uninitialized(tensor)
        for module in modules
        for tensor in [*module.parameters(), *module.buffers()]
    )
