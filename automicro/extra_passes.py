"""Forwards of automicro's own, beside those of a step: whoever counts calls can ask for them."""

import contextlib
from collections.abc import Iterator

_depth = 0


def is_extra_pass() -> bool:
    """Whether the forward that is running is an extra one, which counts for nothing.

    There are two kinds: a look at a few rows, at the first batches that might be split, and one
    row through a model with lazy layers. State that automicro can find is put back after them
    (parameters, buffers, attributes of modules, variables that ``loss_fn`` and ``forward`` get
    at). What lies elsewhere, such as a file that a forward writes to, can ask here.

    Example:
        >>> from automicro import is_extra_pass
        >>> is_extra_pass()
        False
    """
    return _depth > 0


@contextlib.contextmanager
def extra_pass() -> Iterator[None]:
    """Let `is_extra_pass` say so meanwhile."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
