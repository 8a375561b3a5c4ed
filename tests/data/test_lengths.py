"""Lengths are read from every supported source, and errors explain invalid ones."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from automicro.data import read_lengths

ROWS = [{"seconds": 1.5, "ids": [1, 2, 3]}, {"seconds": 2.0, "ids": [1]}]


def test_lengths_are_read_from_numbers_columns_and_functions() -> None:
    for lengths in ([3, 1], (3.0, 1.0), np.array([3, 1]), torch.tensor([3, 1]), "ids"):
        found = read_lengths(lengths, ROWS)
        assert found.dtype == np.float64
        assert found.tolist() == [3.0, 1.0]
    assert read_lengths(lambda row: 2 * row["seconds"], ROWS).tolist() == [3.0, 4.0]


class Table:
    """Stores columns, like a data set of ``datasets``."""

    column_names = ("seconds", "ids")

    def __len__(self) -> int:
        return 2

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in ROWS]


def test_lengths_are_read_from_table_columns() -> None:
    assert read_lengths("seconds", Table()).tolist() == [1.5, 2.0]
    assert read_lengths("ids", Table()).tolist() == [3.0, 1.0]
    with pytest.raises(ValueError, match=r"not a column of the data set \(Table has seconds, ids;"):
        read_lengths("minutes", Table())


def test_lengths_are_read_from_files(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([3, 1], dtype=np.int16))
    (tmp_path / "lengths.txt").write_text("3\n1\n")
    (tmp_path / "one.csv").write_text("seconds\n3\n1\n")
    (tmp_path / "rows.csv").write_text("name,seconds\na,3\nb,1\n")
    (tmp_path / "rows.tsv").write_text("name\tseconds\na\t3\nb\t1\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("lengths.npy", "lengths.txt", "one.csv", "rows.csv:seconds", "rows.tsv:seconds"):
        assert read_lengths(str(tmp_path / name)).tolist() == [3.0, 1.0], name
    assert read_lengths(tmp_path / "lengths.npy").tolist() == [3.0, 1.0]
    assert read_lengths(f"{tmp_path}/rows.jsonl:ids").tolist() == [3.0, 1.0]
    for wrong, column in (("rows.csv", None), ("rows.csv:minutes", "minutes")):
        with pytest.raises(ValueError, match=rf"rows without the column {column!r}: .*:seconds"):
            read_lengths(f"{tmp_path}/{wrong}")
    assert read_lengths(f"{tmp_path}/rows.csv:name").tolist() == [1.0, 1.0]  # of text


WRONG: list[tuple[Any, Any, str]] = [
    ([1.0, -2.0], None, "has -2.0 at row 1 (one of 1 such rows)"),
    ([1.0, float("nan")], None, "has nan at row 1"),
    ([1.0], ROWS, "has 1 numbers, but the data set has 2 rows"),
    ([[1.0, 2.0]], None, "has the shape (1, 2)"),
    ("minutes", ROWS, "is not a column of the data set (list has rows without it"),
    ("minutes", None, "is a column's name: give the dataset"),
    (len, None, "is a function of a row: give the dataset"),
    ("no/such.npy", None, "cannot be read"),
    (Path("rows.parquet"), ROWS, "is not a column of the data set"),
]


def test_invalid_lengths_are_refused() -> None:
    for lengths, dataset, words in WRONG:
        with pytest.raises(ValueError, match=re.escape(words)):
            read_lengths(lengths, dataset, name="lengths")
    with pytest.raises(TypeError, match="lengths is a int"):
        read_lengths(5)  # type: ignore[arg-type]
