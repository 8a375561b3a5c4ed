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
    by_lower: dict[str, list[str]] = {}
    for each in known:
        by_lower.setdefault(each.lower(), []).append(each)
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    if not near:
        return ""
    # Modules are often called like the class in them.
    meant = difflib.get_close_matches(name, sorted(by_lower[near[0]]), n=1, cutoff=0.0)
    return f" (did you mean {meant[0]!r}?)"
