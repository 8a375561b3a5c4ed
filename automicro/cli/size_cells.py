"""What tells one remembered size from another, in few enough letters for a line of a table."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from automicro.remembered.entry import Entry
from automicro.remembered.key import RunKey
from automicro.units import format_bytes

_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_DTYPE = re.compile(r"\b(bfloat|float|uint|int|complex)(?=\d)")
_MOST_SHAPES = 3
_HASH_LETTERS = 6

# What two sizes may differ in beyond the cells that every line has.
_BESIDES: Mapping[str, Callable[[RunKey], str]] = {
    "optimizer": lambda key: key.optimizer or "no optimizer",
    "shapes": lambda key: ", ".join(f"{name} {brief(each)}" for name, each in key.shapes.items()),
    "structure": lambda key: f"structure {key.structure[:_HASH_LETTERS]}",
    "torch": lambda key: f"torch {key.torch}",
    "automicro": lambda key: f"automicro {key.automicro}",
}


def brief(shape: str) -> str:
    """Write dtype and shape as people abbreviate them.

    >>> brief("float32[1, 28, 28]"), brief("int64[]"), brief("float32[2] or float32[3]")
    ('f32[1,28,28]', 'i64', 'f32[2] or f32[3]')
    """
    short = _DTYPE.sub(lambda found: _DTYPES[found[0]], shape)
    return short.replace(", ", ",").replace("[]", "")


def one_row(shapes: Mapping[str, str]) -> str:
    """What one row of a batch holds; tensors of one kind are counted.

    >>> one_row({"0": "float32[8]", "1": "int64[]"})
    'f32[8], i64'
    >>> one_row({"input_ids": "int64[128]", "labels": "int64[128]"})
    '2 × i64[128]'
    """
    counted = Counter(map(brief, shapes.values()))
    texts = [f"{count} × {each}" if count > 1 else each for each, count in counted.items()]
    more = len(texts) - _MOST_SHAPES
    return ", ".join([*texts[:_MOST_SHAPES], *([f"{more} more"] if more > 0 else [])])


def format_count(number: int) -> str:
    """Write how many parameters a model has.

    >>> format_count(950), format_count(34_100), format_count(124_439_808), format_count(7 * 10**9)
    ('950', '34.1k', '124.4M', '7.0B')
    """
    for scale, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return str(number)


def parameter_counts(entries: Sequence[Entry]) -> list[str]:
    """Write the parameters of each model: in full where two would look alike and are not.

    Args:
        entries: of one table.
    """
    exact: dict[tuple[str, str], set[int]] = defaultdict(set)
    for each in entries:
        exact[each.key.model, format_count(each.key.parameters)].add(each.key.parameters)
    texts = []
    for each in entries:
        short = format_count(each.key.parameters)
        is_clear = len(exact[each.key.model, short]) == 1
        texts.append(short if is_clear else f"{each.key.parameters:,}")
    return texts


def device_cell(key: RunKey) -> str:
    """Device, its memory, and how many there are."""
    memory = "" if key.memory_bytes is None else f", {format_bytes(key.memory_bytes)}"
    world = f" × {key.world_size}" if key.world_size > 1 else ""
    return f"{key.device}{memory}{world}"


def precision_cell(key: RunKey) -> str:
    """Precision, and whether anything is compiled."""
    return key.precision + (", compiled" if key.compiled else "")


def besides(entries: Sequence[Entry], seen: Sequence[tuple[str, ...]]) -> list[str]:
    """What else tells each size from those whose cells are the same; empty where none are.

    Args:
        entries: of one table.
        seen: the cells that say for what each was found.
    """
    alike: dict[tuple[str, ...], list[RunKey]] = defaultdict(list)
    for entry, cells in zip(entries, seen, strict=True):
        alike[cells].append(entry.key)
    return [
        ", ".join(
            say(entry.key) for say in _BESIDES.values() if len(set(map(say, alike[cells]))) > 1
        )
        for entry, cells in zip(entries, seen, strict=True)
    ]
