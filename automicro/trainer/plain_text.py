"""Values as text that is the same in two processes."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from automicro.duration import Duration

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def as_text(value: Any) -> str:
    """A value as text without what is another in each process, such as an address.

    Args:
        value: anything; of what is no plain value, the name of its class or its own is taken.

    >>> as_text({"lr": [0.1, None]}), as_text(nn.MSELoss()), as_text(nn.functional.mse_loss)
    ("{'lr': [0.1, None]}", 'MSELoss', 'mse_loss')
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, Duration | Path):
        return repr(str(value))
    if isinstance(value, Mapping) and not isinstance(value, nn.Module):
        return "{" + ", ".join(f"{as_text(k)}: {as_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_text, value)) + "]"
    if isinstance(value, functools.partial):
        options = as_text(value.keywords) if value.keywords else ""
        return f"partial({', '.join([as_text(value.func), *map(as_text, value.args), options])})"
    if type(value).__module__.startswith("automicro."):
        return _ADDRESS.sub("", repr(value))
    name: str = getattr(value, "__qualname__", type(value).__qualname__)
    return name
