"""How long each row of a data set is, wherever that is written down."""

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
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
            return _read_file(Path(match["path"]), match["kind"], match["column"], name)
        if isinstance(lengths, Path):
            raise ValueError(f"{name}={str(lengths)!r} is of no kind that is read here: {_FORMS}")
        return _read_column(lengths, dataset, name)
    if isinstance(lengths, torch.Tensor):
        return lengths.detach().cpu().numpy().astype(np.float64)
    if isinstance(lengths, np.ndarray | Sequence):
        return _as_numbers(lengths, name)
    if callable(lengths):
        if dataset is None:
            raise ValueError(f"{name} is a function of a row: give the dataset whose rows it reads")
        each = (_length_of(lengths(dataset[row])) for row in range(len(dataset)))
        return _as_numbers(list(each), name)
    raise TypeError(f"{name} is a {type(lengths).__name__}: {_FORMS}")


def _read_column(column: str, dataset: Any, name: str) -> Array:
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
        values = dataset[column]
        return _as_numbers([_length_of(each) for each in values], name)
    try:
        each = [_length_of(dataset[row][column]) for row in range(len(dataset))]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{name}={column!r}: rows of the data set ({type(dataset).__name__}) have no such "
            f"column ({type(error).__name__}: {error}): {_FORMS}"
        ) from error
    return _as_numbers(each, name)


def _length_of(value: Any) -> Any:
    """A number as it is; of anything that has a length, that."""
    is_number = getattr(value, "ndim", 1) == 0 or not hasattr(value, "__len__")
    if is_number or (isinstance(value, str) and _is_number(value)):
        return value
    return len(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _as_numbers(values: Any, name: str) -> Array:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} holds what is no number ({error}): {_FORMS}") from None


def _read_file(path: Path, kind: str, column: str | None, name: str) -> Array:
    try:
        if kind == "npy":
            return _as_numbers(np.load(path, allow_pickle=False), name)
        with path.open(encoding="utf-8", newline="") as lines:
            if kind == "txt":
                return _as_numbers([line.strip() for line in lines if line.strip()], name)
            if kind == "jsonl":
                records = (json.loads(line) for line in lines if line.strip())
                return _from_records(records, column, path, name)
            delimiter = "\t" if kind == "tsv" else ","
            return _from_records(csv.DictReader(lines, delimiter=delimiter), column, path, name)
    except OSError as error:
        raise ValueError(f"{name}={str(path)!r} cannot be read ({error}): {_FORMS}") from error


def _from_records(records: Any, column: str | None, path: Path, name: str) -> Array:
    found = []
    for record in records:
        fields = record if isinstance(record, Mapping) else {"": record}
        if column is None and len(fields) == 1:
            column = next(iter(fields))
        if column is None or column not in fields:
            known = ", ".join(map(str, fields))
            wanted = "" if column is None else f" and no {column!r}"
            raise ValueError(
                f"{name}={str(path)!r} has the columns {known}{wanted}: name one of them, as in "
                f"{str(path) + ':' + str(next(iter(fields), 'seconds'))!r}"
            )
        found.append(_length_of(fields[column]))
    return _as_numbers(found, name)
