"""Which keys of a config an error is about."""

import contextlib
import re
from collections.abc import Iterator

from automicro.cli.key_names import KEYS

ABOUT = "__automicro_keys__"


@contextlib.contextmanager
def about(*keys: object) -> Iterator[None]:
    """Remember of each error which keys of the config it is about; what lies inside knows better.

    >>> from automicro.errors import ConfigError
    >>> try:
    ...     with about("model"), about("model.args"):
    ...         raise ConfigError("no such argument")
    ... except ConfigError as error:
    ...     keys_of(error)
    ('model.args',)
    """
    try:
        yield
    except Exception as error:
        if not keys_of(error):
            with contextlib.suppress(Exception):  # some refuse to be changed
                setattr(error, ABOUT, tuple(map(str, keys)))
        raise


def keys_of(error: BaseException) -> tuple[str, ...]:
    """The keys that an error is about, dotted; none where nobody knows.

    >>> keys_of(ValueError())
    ()
    """
    keys: tuple[str, ...] = getattr(error, ABOUT, ())
    return keys


def key_in(text: str) -> tuple[str, ...]:
    """The key with which a message begins, as most do.

    >>> key_in("scheduler needs an optimizer"), key_in("Trainer needs a model")
    (('scheduler',), ())
    """
    first = re.match(r"\w+", text)
    return (first[0],) if first and first[0] in KEYS else ()
