"""What a later config file does to an earlier one."""

from collections.abc import Mapping
from typing import Any


def merge(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return both: mappings are merged key by key, everything else of the later one wins.

    A node whose ``call`` is another one replaces the earlier node as a whole, because the
    arguments there belong to the other call. So does one that is no node any more.

    >>> base = {"optimizer": {"call": "torch.optim.SGD", "args": {"lr": 0.1, "momentum": 0.9}}}
    >>> merge(base, {"optimizer": {"args": {"lr": 0.2}}})["optimizer"]["args"]
    {'lr': 0.2, 'momentum': 0.9}
    >>> merge(base, {"optimizer": {"call": "torch.optim.Adam"}})["optimizer"]
    {'call': 'torch.optim.Adam'}
    """
    merged = dict(earlier)
    for key, value in later.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            merged[key] = dict(value) if _is_another(before, value) else merge(before, value)
        else:
            merged[key] = value
    return merged


def _is_another(before: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    if "call" in value and "call" in before:
        return bool(value["call"] != before["call"])
    # One evaluation, or several by name: neither has a place in the other.
    if "call" not in value and "call" not in before:
        return False
    return not any("args" in each or not each for each in (before, value) if "call" not in each)
