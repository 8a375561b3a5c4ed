"""Forms of batches: how each is made, and how the user's forward reads it."""

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from tests.oracle.contents import LATE, Content

Rows = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """Form ingredient. `make` gets the content and number of the batch; `read` returns rows.

    With `edits`, reading changes the batch, so it cannot be read twice.
    """

    make: Callable[[Content, int], Any]
    read: Callable[[Any], Rows]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    edits: bool = False


def plain_rows(content: Content, index: int) -> Rows:
    return dict(content.rows)


class Parts(NamedTuple):
    x: Any
    y: Any
    t: Any
    w: Any
    m: Any
    v: Any


@dataclasses.dataclass
class Record:
    x: Any
    y: Any
    t: Any
    w: Any
    m: Any
    v: Any
    note: Any = "as it came"


def _nested(content: Content, index: int) -> Any:
    rows = content.rows
    return {
        "inputs": {"views": [rows["x"], rows["v"]], "mode": "train"},
        "targets": (rows["y"], rows["t"]),
        "extra": {"w": rows["w"], "mask": {"m": rows["m"]}, "none": None},
    }


def _read_nested(batch: Any) -> Rows:
    x, v = batch["inputs"]["views"]
    y, t = batch["targets"]
    extra = batch["extra"]
    return {"x": x, "v": v, "y": y, "t": t, "w": extra["w"], "m": extra["mask"]["m"]}


def _samples(content: Content, index: int) -> list[Rows]:
    return [{n: v[i].clone() for n, v in content.rows.items()} for i in range(len(content))]


def _stacked(samples: Any) -> Rows:
    return {name: torch.stack([each[name] for each in samples]) for name in samples[0]}


def _texts(content: Content, index: int) -> Rows:
    return {**content.rows, "x": [json.dumps(each.tolist()) for each in content.rows["x"]]}


def _read_texts(batch: Any) -> Rows:
    like = batch["v"]
    return {**batch, "x": torch.tensor([json.loads(each) for each in batch["x"]], dtype=like.dtype)}


def _only_texts(content: Content, index: int) -> list[str]:
    kinds = {n: str(v.dtype).removeprefix("torch.") for n, v in content.rows.items()}
    return [
        json.dumps({n: [kinds[n], v[i].tolist()] for n, v in content.rows.items()})
        for i in range(len(content))
    ]


def _read_only_texts(batch: Any) -> Rows:
    read = [json.loads(each) for each in batch]
    return {
        name: torch.tensor([each[name][1] for each in read], dtype=getattr(torch, kind))
        for name, (kind, _) in read[0].items()
    }


def _arrays(content: Content, index: int) -> Rows:
    return {name: value.numpy().copy() for name, value in content.rows.items()}


def _from_arrays(batch: Any) -> Rows:
    return {name: torch.as_tensor(value) for name, value in batch.items()}


def _rows_in_lists(content: Content, index: int) -> Rows:
    return {**content.rows, "x": [each.clone() for each in content.rows["x"]]}


def _read_rows_in_lists(batch: Any) -> Rows:
    return {**batch, "x": torch.stack(list(batch["x"]))}


def _object_array(content: Content, index: int) -> Rows:
    names = np.array([f"row {i}" for i in range(len(content))], dtype=object)
    return {**content.rows, "names": names}


def _read_object_array(batch: Any) -> Rows:
    assert len(batch["names"]) == len(batch["w"])
    return {name: value for name, value in batch.items() if name != "names"}


def _fields(content: Content, index: int) -> list[Tensor]:
    return [content.rows[name] for name in Parts._fields]


def _read_fields(batch: Any) -> Rows:
    return dict(zip(Parts._fields, batch, strict=True))


def _edited(content: Content, index: int) -> Rows:
    return {**content.rows, "edits": index >= LATE}


def _halve_in_place(batch: Any) -> Rows:
    batch["t"].mul_(0.5)
    return dict(batch)


def _halve_late(batch: Any) -> Rows:
    if batch["edits"]:
        batch["t"].mul_(0.5)
    return dict(batch)


def _halve_array(batch: Any) -> Rows:
    batch["t"] *= 0.5
    return _from_arrays(batch)


def _replace(batch: Any) -> Rows:
    batch["t"] = batch["t"] * 0.5
    return dict(batch)


def _replace_late(batch: Any) -> Rows:
    if batch["edits"]:
        batch["t"] = batch["t"] * 0.5
    return dict(batch)


def _pop(batch: Any) -> Rows:
    return {name: batch.pop(name) for name in list(batch)}


def _pop_late(batch: Any) -> Rows:
    if batch["edits"]:
        return {name: batch.pop(name) for name in list(batch)}
    return dict(batch)


def _append(content: Content, index: int) -> Rows:
    return {**content.rows, "log": {"steps": []}}


def _read_append(batch: Any) -> Rows:
    batch["log"]["steps"].append(len(batch["w"]))
    shrink = 1.0 / len(batch["log"]["steps"])
    return {**batch, "t": batch["t"] * shrink}


def _twice(content: Content, index: int) -> Rows:
    return {**content.rows, "again": content.rows["t"], "deep": [content.rows["t"]]}


def _read_twice(batch: Any) -> Rows:
    batch["again"].mul_(0.5)  # the same tensor as t
    return dict(batch)


def _with_numbers(content: Content, index: int) -> Rows:
    return {**content.rows, "scale": 0.5, "heat": torch.tensor(2.0), "step": index}


def _read_with_numbers(batch: Any) -> Rows:
    return {**batch, "t": batch["t"] * batch["scale"] * batch["heat"]}


def _with_table(content: Content, index: int) -> Rows:
    return {**content.rows, "table": torch.linspace(0.5, 1.5, 3)}


def _read_with_table(batch: Any) -> Rows:
    assert len(batch["table"]) == 3
    return {**batch, "t": batch["t"] * batch["table"].mean().to(batch["t"].dtype)}


def _asking(batch: Any) -> Rows:
    batch["t"].requires_grad_(True)
    return dict(batch)


def _ragged(content: Content) -> list[Tensor]:
    """Return as many numbers per row as the row itself says."""
    lengths = [1 + int(10 * weight) % 3 for weight in content.rows["w"].tolist()]
    views = content.rows["t"].flatten(1)
    return [view[:length].clone() for view, length in zip(views, lengths, strict=True)]


def _with(pack: Callable[[list[Tensor]], Any]) -> Callable[[Content, int], Rows]:
    return lambda content, index: {**content.rows, "ragged": pack(_ragged(content))}


def _read_with(unpack: Callable[[Any], Any]) -> Callable[[Any], Rows]:
    def read(batch: Any) -> Rows:
        sums = torch.stack([each.sum() for each in unpack(batch["ragged"])])
        t = batch["t"]
        return {**batch, "t": t + sums.view(-1, *[1] * (t.dim() - 1))}

    return read


def _rows_second(content: Content, index: int) -> Rows:
    return {**content.rows, "t": content.rows["t"].movedim(0, 1).contiguous()}


def _read_rows_second(batch: Any) -> Rows:
    return {**batch, "t": batch["t"].movedim(1, 0)}


def _views(content: Content, index: int) -> Rows:
    """Return every other row of something larger: nothing is contiguous."""
    return {n: v.repeat_interleave(2, 0)[::2] for n, v in content.rows.items()}


FORMS = {
    "mapping": Form(make=plain_rows, read=dict),
    "tuple with names": Form(
        make=lambda content, index: Parts(**content.rows), read=lambda batch: batch._asdict()
    ),
    "tuple": Form(make=lambda content, index: tuple(_fields(content, index)), read=_read_fields),
    "list of parts": Form(
        make=_fields, read=_read_fields, options={"batch_layout": {"": "fields"}}
    ),
    "dataclass": Form(
        make=lambda content, index: Record(**{n: content.rows[n] for n in Parts._fields}),
        read=lambda batch: {name: getattr(batch, name) for name in Parts._fields},
    ),
    "UserDict": Form(
        make=lambda content, index: collections.UserDict(content.rows),
        read=lambda batch: dict(batch.data),
    ),
    "TensorDict": Form(
        make=lambda content, index: TensorDict(content.rows, batch_size=[len(content)]),
        read=lambda batch: {name: batch[name] for name in Parts._fields},
    ),
    "nested": Form(make=_nested, read=_read_nested),
    "list of samples": Form(make=_samples, read=_stacked),
    "texts": Form(make=_texts, read=_read_texts),
    "only texts": Form(make=_only_texts, read=_read_only_texts),
    "arrays": Form(make=_arrays, read=_from_arrays),
    "rows in a list": Form(make=_rows_in_lists, read=_read_rows_in_lists),
    "array of objects": Form(make=_object_array, read=_read_object_array),
    "views": Form(make=_views, read=dict),
    "tensors of several lengths": Form(
        make=_with(lambda ragged: [{"boxes": each} for each in ragged]),
        read=_read_with(lambda ragged: [each["boxes"] for each in ragged]),
    ),
    "packed sequences": Form(
        make=_with(lambda ragged: pack_sequence(ragged, enforce_sorted=False)),
        read=_read_with(unpack_sequence),
    ),
    "jagged": Form(
        make=_with(lambda ragged: torch.nested.nested_tensor(ragged, layout=torch.jagged)),
        read=_read_with(lambda ragged: ragged.unbind()),
    ),
    "rows in dimension 1": Form(
        make=_rows_second, read=_read_rows_second, options={"batch_layout": {"t": 1}}
    ),
    "numbers beside": Form(make=_with_numbers, read=_read_with_numbers),
    "a shared table": Form(
        make=_with_table, read=_read_with_table, options={"batch_layout": {"table": "shared"}}
    ),
    "one tensor twice": Form(make=_twice, read=_read_twice, edits=True),
    "halved in place": Form(make=plain_rows, read=_halve_in_place, edits=True),
    "halved in place, late": Form(make=_edited, read=_halve_late, edits=True),
    "array halved in place": Form(make=_arrays, read=_halve_array, edits=True),
    "entry replaced": Form(make=plain_rows, read=_replace, edits=True),
    "entry replaced, late": Form(make=_edited, read=_replace_late, edits=True),
    "popped": Form(make=plain_rows, read=_pop, edits=True),
    "popped, late": Form(make=_edited, read=_pop_late, edits=True),
    "appended to": Form(make=_append, read=_read_append, edits=True),
    "asks for gradients": Form(make=plain_rows, read=_asking, edits=True),
}


def pair_of(content: Content, target: str) -> tuple[Any, Any]:
    """Return ``(inputs, targets)`` as ``loss_fn`` takes them."""
    targets = dict(content.rows) if target == "all" else content.rows[target]
    return content.rows["x"], targets
