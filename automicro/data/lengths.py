"""How long each row of a data set is, wherever that is written down."""

import contextlib
import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

Array: TypeAlias = np.ndarray[Any, Any]
Lengths: TypeAlias = str | Path | Callable[[Any], Any] | Sequence[float] | Array | torch.Tensor
"""What says how long rows are: numbers, a file, a column's name, or a function of a row."""

_FILE = re.compile(r"(?P<path>.*\.(?P<kind>npy|csv|tsv|jsonl|txt))(?::(?P<column>[^:]+))?", re.S)
_FORMS = (
    "give one number for each row, a column of the data set, a function of a row, or a file: "
    "lengths.npy, lengths.txt, rows.csv:seconds or rows.jsonl:seconds"
)


def read_lengths(lengths: Lengths, dataset: Any = None, *, name: str = "lengths") -> Array:
    """One number for each row of a data set, in double precision.

    Args:
        lengths: the numbers themselves, as a sequence, an array or a tensor of shape (rows,); the
            path of a file: ``.npy``, ``.txt`` with a number on each line, ``.csv``, ``.tsv`` or
            ``.jsonl`` with a column, such as ``"train.csv:seconds"``; the name of a column of the
            data set; or a function from a row of it to its length. What is no number but has a
            length itself, such as a row's ``input_ids``, counts as that length.
        dataset: has the rows. A function is called on each of them, so that all are read once; a
            column of one that keeps columns (``datasets``, ``pandas``) is read as a whole.
        name: of the argument, for errors.

    Raises:
        TypeError: what says nothing about lengths.
        ValueError: no such column or file, a length below 0 or not finite, or as many of them as
            the data set has not.

    Example:
        >>> read_lengths([3, 1, 2])
        array([3., 1., 2.])
        >>> read_lengths("ids", [{"ids": [5, 7]}, {"ids": [5]}])
        array([2., 1.])
        >>> read_lengths(len, ["a", "abc"])
        array([1., 3.])
    """
    found = _find(lengths, dataset, name)
    rows = None if dataset is None else len(dataset)
    if found.ndim != 1:
        raise ValueError(
            f"{name} has the shape {tuple(found.shape)}, and a length is one number for each row: "
            "give the shape (rows,)"
        )
    if rows is not None and rows != len(found):
        raise ValueError(
            f"{name} has {len(found):,} numbers, and the data set has {rows:,} rows: give one for "
            "each row, in the same order"
        )
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        raise ValueError(
            f"{name} has {found[wrong[0]]} at row {wrong[0]:,} ({len(wrong):,} rows are like "
            "that): a length is a finite number of at least 0"
        )
    return found


def _find(lengths: Lengths, dataset: Any, name: str) -> Array:
    if isinstance(lengths, Path | str):
        match = _FILE.fullmatch(str(lengths))
        if match is not None:
            try:
                return _as_numbers(_read_file(**match.groupdict(), name=name), name)
            except OSError as error:
                raise ValueError(
                    f"{name}={match['path']!r} cannot be read ({error}): {_FORMS}"
                ) from error
        if isinstance(lengths, Path):
            raise ValueError(f"{name}={str(lengths)!r} is of no kind that is read here: {_FORMS}")
        return _as_numbers(_read_column(lengths, dataset, name), name)
    if isinstance(lengths, torch.Tensor):
        return lengths.detach().cpu().numpy().astype(np.float64)
    if isinstance(lengths, np.ndarray | Sequence):
        return _as_numbers(lengths, name)
    if not callable(lengths):
        raise TypeError(f"{name} is a {type(lengths).__name__}: {_FORMS}")
    if dataset is None:
        raise ValueError(f"{name} is a function of a row: give the dataset whose rows it reads")
    rows = (dataset[row] for row in range(len(dataset)))
    return _as_numbers([_length_of(lengths(row)) for row in rows], name)


def _read_column(column: str, dataset: Any, name: str) -> list[Any]:
    if dataset is None:
        raise ValueError(f"{name}={column!r} is a column's name: give the dataset that has it")
    columns = getattr(dataset, "column_names", getattr(dataset, "columns", None))
    if columns is not None:
        if column not in list(columns):
            known = ", ".join(map(str, columns))
            raise ValueError(
                f"{name}={column!r} is no column of the data set (it has {known}): name one of "
                "these"
            )
        return list(map(_length_of, dataset[column]))
    try:
        return [_length_of(dataset[row][column]) for row in range(len(dataset))]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{name}={column!r}: rows of the data set ({type(dataset).__name__}) have no such "
            f"column ({type(error).__name__}: {error}): {_FORMS}"
        ) from error


def _length_of(value: Any) -> Any:
    """A number as it is, also as text; of anything that has a length, that."""
    if getattr(value, "ndim", 1) == 0 or not hasattr(value, "__len__"):
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return len(value)


def _as_numbers(values: Any, name: str) -> Array:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} holds what is no number ({error}): {_FORMS}") from None


def _read_file(path: str, kind: str, column: str | None, name: str) -> Any:
    if kind == "npy":
        return np.load(path, allow_pickle=False)
    with Path(path).open(encoding="utf-8", newline="") as lines:
        if kind == "txt":
            return [line.strip() for line in lines if line.strip()]
        if kind == "jsonl":
            records: Iterable[Any] = (json.loads(line) for line in lines if line.strip())
        else:
            records = csv.DictReader(lines, delimiter="\t" if kind == "tsv" else ",")
        found = []
        for record in records:
            fields = record if isinstance(record, Mapping) else {"": record}
            if column is None and len(fields) == 1:
                column = next(iter(fields))
            if column is None or column not in fields:
                known = ", ".join(map(str, fields))
                wanted = "" if column is None else f" and no {column!r}"
                example = f"{path}:{next(iter(fields), 'seconds')}"
                raise ValueError(
                    f"{name}={path!r} has the columns {known}{wanted}: name one of them, as in "
                    f"{example!r}"
                )
            found.append(_length_of(fields[column]))
        return found
