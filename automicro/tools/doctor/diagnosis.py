"""`diagnose`: a one-page report of why memory ran out, from the files of a failure."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from automicro.tools import Remedy, table
from automicro.tools.doctor.causes import Cause, Device, choose_remedies, find_causes
from automicro.tools.doctor.holders import STEP, Holder, find_holders, read_snapshot
from automicro.units import format_bytes, parse_bytes

_MOST_TEXT = 64 << 20  # bytes to read from the end of a log
_MOST_HOLDERS = 12  # in the report
_MESSAGE = re.compile(r"(?:CUDA|HIP|XPU|MPS backend|Simulated device) out of memory[^\n]*", re.I)
_AMOUNT = r"([\d.]+ ?(?:[KMGT]i?B|bytes?))"
_NO_HISTORY = "To find what grew, record a history with torch.cuda.memory._record_memory_history()."
_NO_SNAPSHOT = "Gradients, optimizer state and modules are counted even if not allocated yet."
_NO_OWNERS = "To find what held memory, give a snapshot of torch or a file of OutOfMemoryReport."


class UnreadableFailureError(ValueError):
    """A file that describes no failure: damaged, of another kind, or unsafe."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why memory ran out. ``print(diagnosis)`` shows the report.

    Attributes:
        source: name of the file.
        message: message of the error, or empty if the file has none.
        where: where training failed, if the file says so.
        device: state of the device.
        holders: memory by owner, largest first.
        causes: causes, likeliest first.
        remedies: at most three remedies, the one that frees the most memory first.
        remark: information missing from the file and how to record it, or empty.
    """

    source: str
    message: str
    where: str
    device: Device
    holders: Sequence[Holder]
    causes: Sequence[Cause]
    remedies: Sequence[Remedy]
    remark: str

    def __str__(self) -> str:
        begins = ["Likeliest cause", *["Also"] * len(self.causes)]
        causes = [f"{name}: {each.text}." for name, each in zip(begins, self.causes, strict=False)]
        lines = [*filter(None, (self.source, self.where, self.message)), ""]
        lines += causes or ["No cause shows."]
        remedies = [(each.saved_bytes, each.text) for each in self.remedies]
        held = [(each.num_bytes, f"{each.kind}: {each.owner}") for each in self.holders]
        lines += _table("What would help, by predicted bytes:", remedies)
        lines += _table("What took memory:", [each for each in held if each[0]][:_MOST_HOLDERS])
        figures = [
            f"{name.removesuffix('_bytes').replace('_', ' ')}: {format_bytes(amount)}"
            for name, amount in dataclasses.asdict(self.device).items()
            if name.endswith("_bytes") and amount is not None
        ]
        return "\n".join([*lines, "", *figures, "", self.remark]).rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return dataclasses.asdict(self)


def _table(title: str, rows: Sequence[tuple[int, str]]) -> list[str]:
    return ["", title, *table(rows)] if rows else []


def diagnose(path: str | os.PathLike[str], *, memory: str | int | None = None) -> Diagnosis:
    """Find out why memory ran out.

    Args:
        path: the file ``oom-NNNN.json`` of an `OutOfMemoryReport` (a snapshot next to it is read as
            well); a memory snapshot of any program (``torch.cuda.memory._dump_snapshot``); or text
            with the message of the error, such as a log.
        memory: memory of the device, if the file does not contain it: bytes, or text such as
            ``"24GiB"``.

    Raises:
        OSError: the file cannot be read.
        UnreadableFailureError: the file describes no failure, or is unsafe to read.

    Example:
        >>> import tempfile
        >>> log = Path(tempfile.mkdtemp()) / "train.log"
        >>> _ = log.write_text(
        ...     "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
        ...     "a total capacity of 24.00 GiB of which 1.00 GiB is free. Process 7 has 9.00 GiB "
        ...     "memory in use. Including non-PyTorch memory, this process has 14.00 GiB memory in "
        ...     "use. Of the allocated memory 13.00 GiB is allocated by PyTorch, and 500.00 MiB is "
        ...     "reserved by PyTorch but unallocated.")
        >>> diagnose(log).causes[0].text
        'other processes, contexts and libraries held 9.51 GiB'
    """
    source, capacity = Path(path), None if memory is None else parse_bytes(memory)
    try:
        report, device, holders, remark = _read(source, capacity)
        where, sizes = report.get("where"), report.get("microbatch_size", {})
        inside = "".join(f", inside {each}" for each in report.get("inside", [])[-1:])
        at = where and f"{where['phase']}, batch {where['batch']}, {sizes['before']} rows{inside}"
    except OSError:
        raise
    except Exception as error:  # damaged files raise many kinds of errors
        raise UnreadableFailureError(
            f"{source} cannot be diagnosed ({type(error).__name__}: {str(error)[:160]}): give a "
            "memory snapshot of torch, a report of OutOfMemoryReport, or a log with the error"
        ) from error
    causes = find_causes(holders, device)
    return Diagnosis(
        source=source.name,
        message=str(report.get("message", "")),
        where=at or "",
        device=device,
        holders=holders,
        causes=causes,
        remedies=choose_remedies(causes, holders, can_halve=sizes.get("before") != 1),
        remark=remark,
    )


_Read: TypeAlias = tuple[Mapping[str, Any], Device, Sequence[Holder], str]
"""A report, which may be empty, the device, the holders, and a note on what the file lacks."""


def _read(source: Path, capacity: int | None) -> _Read:
    with source.open("rb") as file:
        # Pickles of protocol 2 and above start with \x80, and reports with a brace.
        begin = file.read(512).lstrip()[:1]
        file.seek(max(file.seek(0, os.SEEK_END) - _MOST_TEXT, 0))
        text = "" if begin == b"\x80" else file.read().decode("utf-8", errors="replace")
    if begin == b"\x80":
        return _of_snapshot(source, {}, capacity)
    if begin == b"{":
        report, snapshot = json.loads(text), source.with_suffix(".pickle")
        if snapshot.exists():
            return _of_snapshot(snapshot, report, capacity)
        device = _device_of(report, capacity)
        return report, device, _holders_of(report, device), _NO_SNAPSHOT
    messages = _MESSAGE.findall(text)
    if not messages:
        raise ValueError("it contains no out-of-memory error")
    # The run might have continued after earlier failures.
    report = {"message": messages[-1]}
    return report, _device_of(report, capacity), [], _NO_OWNERS


def _of_snapshot(path: Path, report: Mapping[str, Any], capacity: int | None) -> _Read:
    snapshot, device = read_snapshot(path), _device_of(report, capacity)
    device.reserved_bytes, device.largest_free_bytes = snapshot.reserved, snapshot.largest_free
    device.allocated_bytes = sum(block.size for block in snapshot.blocks)
    device.is_expandable = snapshot.is_expandable
    if snapshot.failed is not None:
        # For entries of kind oom, the allocator stores the free bytes of the device there.
        device.requested_bytes, device.free_bytes = snapshot.failed.size, snapshot.failed.address
    return report, device, find_holders(snapshot), "" if snapshot.events else _NO_HISTORY


def _holders_of(report: Mapping[str, Any], device: Device) -> list[Holder]:
    """Return the holders in the report, and one for the remaining allocated bytes."""
    holders = [Holder(**each) for each in report["held"]]
    for each in holders:
        if each.owner in report.get("inside", [])[-1:]:
            each.failed_bytes = device.requested_bytes or 0
            each.num_bytes = max(each.num_bytes - each.failed_bytes, 0)  # request was refused
    allocated = device.allocated_bytes or report["peak_bytes"] or 0
    rest = max(allocated - sum(each.num_bytes for each in holders), 0)
    # In a first attempt, the module of the request is not known yet.
    asked = 0 if any(each.failed_bytes for each in holders) else device.requested_bytes or 0
    step = Holder(kind=STEP, owner="the rest of the step", num_bytes=rest, failed_bytes=asked)
    return sorted([*holders, *[step] * (rest + asked > 0)], key=lambda each: -each.num_bytes)


def _device_of(report: Mapping[str, Any], capacity: int | None) -> Device:
    """Return the device from torch's message, completed from the report."""

    def amount(pattern: str) -> int | None:
        found = re.search(pattern, str(report.get("message", "")))
        return None if found is None else parse_bytes(re.sub(r" ?bytes?$", " B", found[1]))

    known = report.get("device_memory") or {"total_bytes": report.get("limit_bytes")}
    allocated = amount(rf"(?:Of the allocated memory|Live tensors hold) {_AMOUNT}")
    unallocated = amount(rf"{_AMOUNT} is reserved by PyTorch but unallocated")
    both = None if allocated is None or unallocated is None else allocated + unallocated
    return Device(
        requested_bytes=amount(f"Tried to allocate {_AMOUNT}"),
        capacity_bytes=capacity or amount(f"capacity of {_AMOUNT}") or known["total_bytes"],
        free_bytes=amount(f"of which {_AMOUNT} is free") or known.get("free_bytes"),
        reserved_bytes=known.get("reserved_bytes") if both is None else both,
        allocated_bytes=allocated,
    )
