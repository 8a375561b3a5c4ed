"""Where a test keeps what a failed attempt must not undo: its own triggers and counts."""

from contextvars import ContextVar
from typing import Any


class Outside:
    """Attributes in the default of a context variable, which no capture reaches.

    >>> trigger = Outside(left=1)
    >>> trigger.left -= 1
    >>> trigger.left
    0
    """

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_held", ContextVar("held", default=values))

    def __getattr__(self, name: str) -> Any:
        try:
            return self._held.get()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._held.get()[name] = value
