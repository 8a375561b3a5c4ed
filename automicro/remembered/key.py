"""What a size was found for: all that decides how many rows fit, as plain values."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_DIMENSION = re.compile(r"(?<=[\[ ])\d+(?=[,\]])")


@dataclass(frozen=True, kw_only=True)
class RunKey:
    """The kind of run that a size was found in. Two runs with the same key share their sizes.

    Some of what decides about memory cannot be seen from outside, such as activation checkpointing
    inside a model. So a size that is found is a first proposal, and never more.

    Attributes:
        model: class names of all modules that take part.
        structure: hash of these modules: classes, parameters, buffers, with name, shape, dtype and
            whether they are trained.
        parameters: how many values all parameters have.
        device: its name.
        memory_bytes: what the run may use of it: the limit or else all; None where nobody says.
        precision: as the `Microbatcher` has it.
        phase: ``"train"`` or ``"eval"``.
        compiled: whether some module is compiled.
        optimizer: its class; None without one.
        rows: of the batch.
        shapes: of the batch's tensors by path, without the rows: ``{"0": "float32[1, 8, 8]"}``.
        world_size: processes that train together.
        automicro: its version.
        torch: its version.

    >>> key = RunKey(
    ...     model="Linear", structure="1f2e", parameters=18, device="CPU", memory_bytes=None,
    ...     precision="fp32", phase="train", compiled=False, optimizer="AdamW", rows=64,
    ...     shapes={"0": "float32[8]"}, world_size=1, automicro="0.1.0", torch="2.13.0",
    ... )
    >>> key.with_any_shape().shapes
    {'0': 'float32[?]'}
    >>> RunKey.from_content(key.content()) == key
    True
    """

    model: str
    structure: str
    parameters: int
    device: str
    memory_bytes: int | None
    precision: str
    phase: str
    compiled: bool
    optimizer: str | None
    rows: int
    shapes: Mapping[str, str] = field(hash=False)
    world_size: int
    automicro: str
    torch: str

    def content(self) -> dict[str, Any]:
        """The same as values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_content(cls, content: Any) -> "RunKey":
        """Read what `content` returned.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(content, dict) or content.keys() != _TYPES.keys():
            raise ValueError("its key has other fields")
        for name, types in _TYPES.items():
            # True is an int to Python, and no number of rows.
            if type(content[name]) not in types:
                raise ValueError(f"{name} of its key is {content[name]!r:.60}")
        if not all(isinstance(shape, str) for shape in content["shapes"].values()):
            raise ValueError("shapes of its key are no texts")
        if content["rows"] < 1:
            raise ValueError(f"rows of its key is {content['rows']}")
        return cls(**content)

    @property
    def digest(self) -> str:
        """SHA-256 of the content in one canonical spelling: the same on every machine."""
        return sha256_of(self.content())

    def with_any_shape(self) -> "RunKey":
        """The key of runs whose batches have other lengths each time: dtypes and dimensions stay.

        What a size is worth there depends on the cost of a row, which is remembered beside it.
        """
        shapes = {path: _DIMENSION.sub("?", shape) for path, shape in self.shapes.items()}
        return dataclasses.replace(self, shapes=shapes)


def sha256_of(content: Any) -> str:
    """Return the SHA-256 of values, whatever the order of their mappings.

    >>> sha256_of({"a": 1, "b": 2}) == sha256_of({"b": 2, "a": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


_TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "structure": (str,),
    "parameters": (int,),
    "device": (str,),
    "memory_bytes": (int, type(None)),
    "precision": (str,),
    "phase": (str,),
    "compiled": (bool,),
    "optimizer": (str, type(None)),
    "rows": (int,),
    "shapes": (dict,),
    "world_size": (int,),
    "automicro": (str,),
    "torch": (str,),
}
