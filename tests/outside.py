"""Test state that the rollback of a failed attempt must not undo, such as triggers and counts.

It is stored in defaults of context variables, which state capture does not reach.
"""

from contextvars import ContextVar
from typing import Any


class Outside:
    """Attributes that state capture does not reach.

    >>> trigger = Outside(left=1)
    >>> trigger.left -= 1
    >>> trigger.left
    0
    """

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_held", ContextVar("held", default=values))

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_held").get()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._held.get()[name] = value

    def __reduce__(self) -> Any:
        return _of, (self._held.get(),)


def _of(values: dict[str, Any]) -> Outside:
    return Outside(**values)


class Unreached:
    """An attribute that state capture does not reach, unlike the object's other attributes.

    >>> class Model:
    ...     calls = Unreached()
    ...     def __init__(self):
    ...         self.calls = 0
    >>> model = Model()
    >>> model.calls += 1
    >>> model.calls
    1
    """

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = f"_{name}_outside"

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else vars(owner)[self._name].value

    def __set__(self, owner: Any, value: Any) -> None:
        if self._name in vars(owner):
            vars(owner)[self._name].value = value
        else:
            vars(owner)[self._name] = Outside(value=value)
