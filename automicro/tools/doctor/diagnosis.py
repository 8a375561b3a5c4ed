"""`diagnose`: reads what a failure has left behind, and says why memory ran out on one page."""

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

_MOST_TEXT = 64 << 20  # bytes of a log that are read, from its end
_MOST_HOLDERS = 12  # on the page
_MESSAGE = re.compile(r"(?:CUDA|HIP|XPU|MPS backend|Simulated device) out of memory[^\n]*", re.I)
_AMOUNT = r"([\d.]+ ?(?:[KMGT]i?B|bytes?))"
_NO_HISTORY = "What grew shows in a history: torch.cuda.memory._record_memory_history()."
_NO_SNAPSHOT = "Gradients, optimizer state and modules count whether they were there yet or not."
_NO_OWNERS = "What held memory shows in a snapshot of torch, and in files of OutOfMemoryReport."


class UnreadableFailureError(ValueError):
    """A file that tells of no failure: damaged, of another kind, or not to be trusted."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why memory ran out. ``print(diagnosis)`` shows the page.

    Attributes:
        source: the file that was read, and what it is.
        message: of the error; empty where the file has none.
        where: in training it happened, where the file says so.
        device: how full it was.
        holders: who held what, the largest first.
        causes: the likeliest first.
        remedies: at most three, the one that gives most back first.
        remark: what the file does not tell, and how it would; or empty.
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
        """All of it as values for JSON."""
        return dataclasses.asdict(self)


def _table(title: str, rows: Sequence[tuple[int, str]]) -> list[str]:
    return ["", title, *table(rows)] if rows else []


def diagnose(path: str | os.PathLike[str], *, memory: str | int | None = None) -> Diagnosis:
    """Say why memory ran out.

    Args:
        path: one of: ``oom-NNNN.json`` of an `OutOfMemoryReport` (with the snapshot beside it, if
            there is one); a memory snapshot of torch (``torch.cuda.memory._dump_snapshot``), of
            any program; text that holds the message of the error, such as a log.
        memory: of the device, where the file does not say it: bytes, or text such as ``"24GiB"``.

    Raises:
        OSError: the file cannot be read.
        UnreadableFailureError: the file tells of no failure, or is not to be trusted.

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
    except Exception as error:  # damaged bytes raise errors of many kinds
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
"""A report, which may be empty, the device, the holders, and what the file does not tell."""


def _read(source: Path, capacity: int | None) -> _Read:
    with source.open("rb") as file:
        # Pickles of protocol 2 and above begin with \x80, reports with a brace; all else is text.
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
        raise ValueError("it holds no message of an out-of-memory error")
    # The run may have gone on after earlier ones.
    report = {"message": messages[-1]}
    return report, _device_of(report, capacity), [], _NO_OWNERS


def _of_snapshot(path: Path, report: Mapping[str, Any], capacity: int | None) -> _Read:
    snapshot, device = read_snapshot(path), _device_of(report, capacity)
    device.reserved_bytes, device.largest_free_bytes = snapshot.reserved, snapshot.largest_free
    device.allocated_bytes = sum(block.size for block in snapshot.blocks)
    device.is_expandable = snapshot.is_expandable
    if snapshot.failed is not None:
        # In an entry of the kind oom the allocator puts there what the device had free.
        device.requested_bytes, device.free_bytes = snapshot.failed.size, snapshot.failed.address
    return report, device, find_holders(snapshot), "" if snapshot.events else _NO_HISTORY


def _holders_of(report: Mapping[str, Any], device: Device) -> list[Holder]:
    """The holders in the report, and the rest of the allocated bytes."""
    holders = [Holder(**each) for each in report["held"]]
    for each in holders:
        if each.owner in report.get("inside", [])[-1:]:
            each.failed_bytes = device.requested_bytes or 0
            each.num_bytes = max(each.num_bytes - each.failed_bytes, 0)  # it did not get that
    allocated = device.allocated_bytes or report["peak_bytes"] or 0
    rest = max(allocated - sum(each.num_bytes for each in holders), 0)
    # In a first attempt no module is known yet that asked.
    asked = 0 if any(each.failed_bytes for each in holders) else device.requested_bytes or 0
    step = Holder(kind=STEP, owner="the rest of the step", num_bytes=rest, failed_bytes=asked)
    return sorted([*holders, *[step] * (rest + asked > 0)], key=lambda each: -each.num_bytes)


def _device_of(report: Mapping[str, Any], capacity: int | None) -> Device:
    """The device in torch's message, completed from the report."""

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
