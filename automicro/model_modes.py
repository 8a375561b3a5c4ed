"""Modules in evaluation mode for a while."""

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn


@contextlib.contextmanager
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules in evaluation mode, and every submodule back in its own mode afterwards.

    Modes change by calling ``eval()`` and ``train()``, because modules do more in them than set a
    flag: they merge weights, or keep layers frozen. Nothing is called where nothing would change.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
        >>> with evaluation_mode([model]):
        ...     model[0].training
        False
        >>> [module.training for module in model]
        [True, False]
    """
    before = [(each, each.training) for module in modules for each in module.modules()]
    if not any(training for _, training in before):
        yield
        return
    try:
        for module in modules:
            if any(each.training for each in module.modules()):
                module.eval()
        yield
    finally:
        _put_modes_back(before)


def _put_modes_back(before: Sequence[tuple[nn.Module, bool]]) -> None:
    """Parents come before their children, and take these along."""
    for _ in range(2):  # a module that stands in two places may be taken along by the second
        for each, training in before:
            if each.training != training:
                each.train(training)
    for each, training in before:
        if each.training != training:  # it overrides train() to stay as it is
            each.training = training
