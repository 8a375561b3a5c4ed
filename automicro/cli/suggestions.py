"""What somebody who mistyped a name may have meant."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint to be put behind a wrong name, empty where nothing is near.

    Case is ignored, because it is the most frequent mistake in names of classes.

    >>> did_you_mean("optimzer", ["model", "optimizer"])
    " (did you mean 'optimizer'?)"
    >>> did_you_mean("colour", ["model", "optimizer"])
    ''
    """
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""
