"""What somebody who mistyped a name may have meant."""

import difflib
import json
import shlex
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


def as_override(key: str, value: object) -> str:
    """Write a value as the command line takes it, to be copied.

    Args:
        key: dotted.
        value: of plain values; ``???`` and what is no plain value becomes ``VALUE``.

    >>> as_override("optimizer.args.lr", 0.1), as_override("seed", None)
    ('optimizer.args.lr=0.1', 'seed=null')
    >>> print(as_override("model.args.sizes", [1, "two"]))
    'model.args.sizes=[1, "two"]'
    """
    if isinstance(value, str) and value not in ("", "???"):
        return shlex.quote(f"{key}={value}")
    try:
        # JSON is YAML.
        text = "VALUE" if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = "VALUE"
    return shlex.quote(f"{key}={text}")
