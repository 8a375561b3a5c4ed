"""`diagnose`: reads what a failure has left behind, and says why memory ran out on one page."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automicro.tools.doctor.causes import Cause, Device, Remedy, choose_remedies, find_causes
from automicro.tools.doctor.evidence import Holder, failed_request, find_holders, timeline_of
from automicro.tools.doctor.history import read_history
from automicro.tools.doctor.origins import (
    ACTIVATIONS,
    BATCH,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    TENSORS,
    told,
)
from automicro.tools.doctor.snapshot import Frame, Snapshot, UnreadableFailureError, read_snapshot
from automicro.tools.doctor.source import line_of
from automicro.tools.pictures import Picture, escape, html_grid, html_page, timeline
from automicro.units import format_bytes, parse_bytes

_MOST_TEXT = 64 << 20  # bytes of a log that are looked at, from its end
_MOST_HOLDERS = 12  # in the report
_AMOUNT = r"([\d.]+ ?(?:[KMGT]i?B|bytes?))"
_REQUEST = re.compile(rf"Tried to allocate {_AMOUNT}")
_CAPACITY = re.compile(rf"total capacity of {_AMOUNT}")
_FREE = re.compile(rf"of which {_AMOUNT} is free")
_OTHER = re.compile(rf"Process (\d+) has {_AMOUNT} memory in use")
_ALLOCATED = re.compile(
    rf"(?:Of the allocated memory|Live tensors hold) {_AMOUNT}(?: is allocated by PyTorch)?"
)
_UNUSED = re.compile(rf"{_AMOUNT} is reserved by PyTorch but unallocated")
_MESSAGE = re.compile(
    r"((?:CUDA|HIP|XPU|MPS backend|Simulated device) out of memory\.? [^\n]*)", re.I
)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why memory ran out.

    Attributes:
        source: the file that was read, and what it is.
        message: of the error; empty where the file has none.
        facts: more that the file says, by name.
        device: how full it was.
        holders: who held what, the largest first.
        causes: the likeliest first.
        remedies: three, that which gives most back first.
        samples: who held how much over time; empty where nothing was recorded.
        remarks: what could not be told, and how it could be.
    """

    source: str
    message: str
    facts: Mapping[str, str]
    device: Device
    holders: Sequence[Holder]
    causes: Sequence[Cause]
    remedies: Sequence[Remedy]
    samples: Sequence[tuple[float, Mapping[str, int]]] = ()
    remarks: Sequence[str] = ()

    @property
    def cause(self) -> Cause | None:
        """The likeliest; None where the file tells too little."""
        return self.causes[0] if self.causes else None

    def __str__(self) -> str:
        lines = [f"{self.source}", ""]
        if self.message:
            lines += [self.message, ""]
        cause = self.cause
        lines += [f"Likeliest cause: {_ended(cause.text)}" if cause else "No cause shows."]
        lines += [f"Also: {_ended(each.text)}" for each in self.causes[1:3]]
        lines += ["", "What helps most, by predicted bytes:"]
        lines += [
            f"  {number}. {format_bytes(each.saved_bytes):>12}  {each.text}"
            for number, each in enumerate(self.remedies, start=1)
        ] or ["  nothing that could be predicted"]
        if self.holders:
            lines += ["", "Who held what:"]
            lines += [f"  {row[1]:>12}  {' · '.join(row[2:3] + row[0:1])}" for row in self._rows()]
        lines += ["", *(f"{name}: {value}" for name, value in self._figures().items())]
        lines += ["", *self.remarks] if self.remarks else []
        return "\n".join(lines).rstrip()

    def to_dict(self) -> dict[str, Any]:
        """All of it as values for JSON."""
        return {
            "source": self.source,
            "message": self.message,
            "facts": dict(self.facts),
            "device": dataclasses.asdict(self.device),
            "causes": [dataclasses.asdict(cause) for cause in self.causes],
            "remedies": [dataclasses.asdict(each) for each in self.remedies],
            "holders": [
                {
                    "kind": each.kind,
                    "owner": each.owner,
                    "bytes": each.num_bytes,
                    "tensors": each.count,
                    "largest_bytes": each.largest_bytes,
                    "where": None if each.where is None else list(each.where),
                    "kept_bytes": each.kept_bytes,
                }
                for each in self.holders
            ],
            "remarks": list(self.remarks),
        }

    def picture(self) -> Picture | None:
        """The timeline before it; None where nothing was recorded."""
        if not self.samples:
            return None
        return timeline(
            self.samples,
            limit_bytes=self.device.capacity_bytes,
            title="Memory before it ran out",
            unit="allocations and releases",
        )

    def html(self) -> str:
        """A page that stands alone."""
        return html_page("Why memory ran out", self._repr_html_())

    def _repr_html_(self) -> str:
        picture = self.picture()
        parts = ["<h1>Why memory ran out</h1>", f"<p>{escape(self.source)}</p>"]
        if self.message:
            parts.append(f"<pre>{escape(self.message)}</pre>")
        if self.causes:
            parts.append(f"<p><strong>{escape(_sentence(self.causes[0].text))}</strong></p>")
            others = "".join(
                f"<li>{escape(_sentence(each.text))}</li>" for each in self.causes[1:4]
            )
            parts.append(f"<p>Also:</p><ul>{others}</ul>" if others else "")
        else:
            parts.append("<p>No cause shows.</p>")
        parts += ["<h2>What helps most</h2>"]
        parts.append(
            html_grid(
                ["remedy", "predicted to give back"],
                [(each.text, format_bytes(each.saved_bytes)) for each in self.remedies],
                caption="By predicted bytes",
            )
        )
        if picture is not None:
            parts += ["<h2>Before it</h2>", picture._repr_html_()]
        if self.holders:
            grid = html_grid(
                ["owner", "held", "what", "tensors", "largest", "made at"],
                self._rows(),
                caption="Who held what",
            )
            parts += ["<h2>Who held what</h2>", grid]
        parts += ["<h2>The device</h2>"]
        figures = list(self._figures().items())
        parts.append(html_grid(["figure", "value"], figures, caption="When memory ran out"))
        parts += [f"<p>{escape(each)}</p>" for each in self.remarks]
        return "".join(parts)

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            (
                holder.owner,
                format_bytes(holder.num_bytes),
                holder.kind,
                str(holder.count),
                format_bytes(holder.largest_bytes),
                "" if holder.where is None else f"{told(holder.where)} {line_of(holder.where)}",
            )
            for holder in self.holders[:_MOST_HOLDERS]
            if holder.num_bytes
        ]
        rest = self.holders[_MOST_HOLDERS:]
        if rest:
            held = format_bytes(sum(holder.num_bytes for holder in rest))
            rows.append((f"{len(rest)} others", held, "", "", "", ""))
        return rows

    def _figures(self) -> dict[str, str]:
        device = self.device
        amounts = {
            "asked for": device.requested_bytes,
            "capacity": device.capacity_bytes,
            "free": device.free_bytes,
            "reserved by this process": device.reserved_bytes,
            "held by tensors": device.allocated_bytes,
            "reserved and held by nobody": device.unused_bytes,
            "largest free piece": device.largest_free_bytes,
            "held by others": device.others_bytes,
        }
        told_amounts = {
            name: format_bytes(amount) for name, amount in amounts.items() if amount is not None
        }
        return dict(self.facts) | told_amounts


def diagnose(path: str | os.PathLike[str], *, memory: str | int | None = None) -> Diagnosis:
    """Say why memory ran out.

    Args:
        path: one of: ``oom-NNNN.json`` of an `OutOfMemoryReport` (with the snapshot beside it, if
            there is one); a memory snapshot of torch (``torch.cuda.memory._dump_snapshot``), of
            any program; text that holds the message of the error, such as a log.
        memory: of the device, where the file does not say it: bytes, or text such as ``"24GiB"``.

    Returns:
        A report: ``str`` for a terminal, ``html()``, ``to_dict()`` and ``picture()``.

    Raises:
        OSError: the file cannot be read.
        UnreadableFailureError: it says nothing of a failure, or is not to be trusted.

    Example:
        >>> import tempfile
        >>> log = Path(tempfile.mkdtemp()) / "train.log"
        >>> _ = log.write_text(
        ...     "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
        ...     "a total capacity of 24.00 GiB of which 1.00 GiB is free. Process 7 has 9.00 GiB "
        ...     "memory in use. Including non-PyTorch memory, this process has 14.00 GiB memory in "
        ...     "use. Of the allocated memory 13.00 GiB is allocated by PyTorch, and 500.00 MiB is "
        ...     "reserved by PyTorch but unallocated.")
        >>> diagnose(log).cause.text
        'others on the device hold 9.00 GiB (process 7: 9.00 GiB)'
    """
    source = Path(path)
    capacity = None if memory is None else parse_bytes(memory)
    with source.open("rb") as file:
        begin = file.read(512).lstrip()
    try:
        if begin.startswith(b"\x80"):
            return _of_snapshot(source, read_snapshot(source), capacity)
        if begin.startswith(b"{"):
            return _of_report(source, capacity)
        return _of_text(source, capacity)
    except UnreadableFailureError as error:
        raise UnreadableFailureError(f"{source} cannot be diagnosed: {error}") from error.__cause__


# A snapshot


def _of_snapshot(
    source: Path, snapshot: Snapshot, capacity: int | None, report: Mapping[str, Any] | None = None
) -> Diagnosis:
    history = read_history(snapshot)
    holders = find_holders(snapshot, history)
    failed = failed_request(snapshot)
    device = Device(
        capacity_bytes=capacity,
        reserved_bytes=snapshot.reserved,
        allocated_bytes=snapshot.allocated,
        largest_free_bytes=snapshot.largest_free,
        is_expandable=snapshot.expandable,
    )
    if failed is not None:
        device.requested_bytes, device.free_bytes = failed.size, failed.address
    message = ""
    facts = {"snapshot": f"device {snapshot.device}, {len(snapshot.blocks)} tensors held"}
    if report is not None:
        message = _message_of(report)
        facts |= _facts_of(report)
        _complete(device, _device_of(report))
    if capacity is not None:
        device.capacity_bytes = capacity
    _reckon_others(device)
    remarks = []
    if not snapshot.events:
        remarks.append(
            "The snapshot has no history, so there is no timeline, and what was kept from earlier "
            "steps does not show: call torch.cuda.memory._record_memory_history() before the "
            "model is made, or say OutOfMemoryReport(folder, history=100_000)."
        )
    elif not snapshot.has_stacks:
        remarks.append("Nothing in the snapshot says where it was made: record stacks, too.")
    return _diagnosis(
        f"{source.name}: a memory snapshot", message, facts, device, holders, remarks,
        timeline_of(snapshot),
    )  # fmt: skip


def _diagnosis(
    source: str,
    message: str,
    facts: Mapping[str, str],
    device: Device,
    holders: Sequence[Holder],
    remarks: Sequence[str],
    samples: Sequence[tuple[float, Mapping[str, int]]] = (),
) -> Diagnosis:
    causes = find_causes(holders, device)
    return Diagnosis(
        source=source,
        message=message,
        facts=facts,
        device=device,
        holders=holders,
        causes=causes,
        remedies=choose_remedies(causes, holders),
        samples=samples,
        remarks=remarks,
    )


def _complete(device: Device, known: Device) -> None:
    """Take what one source does not know from the other."""
    for each in dataclasses.fields(Device):
        if getattr(device, each.name) in (None, ()):
            setattr(device, each.name, getattr(known, each.name))


def _reckon_others(device: Device) -> None:
    if device.others_bytes is not None or device.capacity_bytes is None:
        return
    if device.free_bytes is not None and device.reserved_bytes is not None:
        rest = device.capacity_bytes - device.free_bytes - device.reserved_bytes
        device.others_bytes = max(rest, 0)


# Our own report


def _of_report(source: Path, capacity: int | None) -> Diagnosis:
    try:
        report = json.loads(source.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnreadableFailureError(
            f"it is no whole JSON ({str(error)[:80]}): give a report of OutOfMemoryReport"
        ) from error
    if not isinstance(report, dict) or not {"resident_bytes", "message"} <= report.keys():
        raise UnreadableFailureError(
            "it is no report of OutOfMemoryReport, which has 'message' and 'resident_bytes'"
        )
    snapshot = source.with_suffix(".pickle")
    try:
        if snapshot.exists():
            return _of_snapshot(snapshot, read_snapshot(snapshot), capacity, report)
        return _of_figures(source, report, capacity)
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadableFailureError(
            f"a part of the report is missing or odd ({type(error).__name__}: {str(error)[:80]})"
        ) from error


def _of_figures(source: Path, report: Mapping[str, Any], capacity: int | None) -> Diagnosis:
    device = _device_of(report)
    if capacity is not None:
        device.capacity_bytes = capacity
    remarks = []
    holders = _holders_of(report)
    if not any(holder.kind == ACTIVATIONS for holder in holders):
        remarks.append("The report does not say which modules held the activations.")
    samples = [
        (float(moment), {str(owner): int(held) for owner, held in each.items()})
        for moment, each in report.get("timeline") or []
    ]
    return _diagnosis(
        f"{source.name}: a report of OutOfMemoryReport", _message_of(report),
        _facts_of(report), device, holders, remarks, samples,
    )  # fmt: skip


def _facts_of(report: Mapping[str, Any]) -> dict[str, str]:
    where, sizes = report.get("where") or {}, report.get("microbatch_size") or {}
    facts = {}
    if where:
        facts["where"] = f"{where.get('phase')}, batch {where.get('batch')}"
    if sizes:
        then = "none that fits" if sizes.get("after") is None else sizes["after"]
        facts["microbatch size"] = f"{sizes.get('before')} rows; then {then}"
    if report.get("num_rows") is not None:
        facts["rows of the batch"] = str(report["num_rows"])
    inside = report.get("inside") or []
    if inside:
        facts["inside"] = " → ".join(str(each) for each in inside)
    return facts


def _device_of(report: Mapping[str, Any]) -> Device:
    device = _device_of_text(_message_of(report))
    resident = report["resident_bytes"]
    memory = report.get("device_memory") or {}
    known = Device(
        capacity_bytes=memory.get("total_bytes") or resident.get("limit"),
        free_bytes=memory.get("free_bytes"),
        reserved_bytes=memory.get("reserved_bytes"),
    )
    _complete(device, known)
    _reckon_others(device)
    return device


_RESIDENTS = {
    "parameters": PARAMETERS,
    "gradients": GRADIENTS,
    "optimizer_state": OPTIMIZER,
    "buffers": TENSORS,
}


def _holders_of(report: Mapping[str, Any]) -> list[Holder]:
    resident = report["resident_bytes"]
    holders = []
    for name, kind in _RESIDENTS.items():
        if resident.get(name):
            owner = {"optimizer_state": "the optimizer", "parameters": "the model"}.get(name, name)
            holders.append(Holder(kind=kind, owner=owner, num_bytes=int(resident[name]), count=1))
    largest = report.get("largest_parameters") or []
    for holder in holders:
        if holder.kind == PARAMETERS and largest:
            holder.count = len(largest)
            holder.largest_bytes = int(largest[0]["bytes"])
    batch = sum(_bytes_of(each) for each in report.get("batch") or [])
    if batch:
        holders.append(Holder(kind=BATCH, owner="the batch", num_bytes=batch, count=1))
    activations = report.get("activations") or {}
    sizes = report.get("microbatch_size") or {}
    measured = activations.get("microbatch_size")  # of another attempt, as like as not
    share = int(sizes["before"]) / int(measured) if measured and sizes.get("before") else 1.0
    for name, held in (activations.get("by_module") or {}).items():
        num_bytes, calls = round(int(held["bytes"]) * share), max(int(held["calls"]), 1)
        holders.append(
            Holder(
                kind=ACTIVATIONS,
                owner=str(name),
                num_bytes=num_bytes,
                count=calls,
                largest_bytes=num_bytes // calls,
            )
        )
    attributed = sum(holder.num_bytes for holder in holders)
    peak = report.get("peak_bytes")
    requested = _device_of_text(_message_of(report)).requested_bytes or 0
    rest = 0 if peak is None else int(peak) - attributed - requested
    inside = report.get("inside") or []
    if rest > 0 and not activations:
        owner = f"activations, up to {inside[-1]}" if inside else "activations"
        holders.append(Holder(kind=ACTIVATIONS, owner=owner, num_bytes=rest, count=1))
    elif rest > 0:
        holders.append(
            Holder(kind=TENSORS, owner="what nothing here accounts for", num_bytes=rest, count=1)
        )
    if inside:
        known = {holder.owner: holder for holder in holders}
        inner = known.get(inside[-1]) or Holder(kind=ACTIVATIONS, owner=str(inside[-1]))
        holders += [] if inner.owner in known else [inner]
        inner.failed_bytes = requested
        stack = report.get("stack") or []
        inner.where = inner.where or (Frame(*stack[0]) if stack else None)
    return sorted(holders, key=lambda holder: -holder.num_bytes)


_ITEMSIZE = {"64": 8, "32": 4, "16": 2, "8": 1, "bool": 1}


def _bytes_of(tensor: Mapping[str, Any]) -> int:
    if str(tensor["device"]) == "cpu":
        return 0
    size = next((each for end, each in _ITEMSIZE.items() if str(tensor["dtype"]).endswith(end)), 1)
    for length in tensor["shape"]:
        size *= int(length)
    return size


def _message_of(report: Mapping[str, Any]) -> str:
    return str(report.get("message") or "")


# The message of the error


def _of_text(source: Path, capacity: int | None) -> Diagnosis:
    with source.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - _MOST_TEXT, 0))
        text = file.read().decode("utf-8", errors="replace")
    found = _MESSAGE.findall(text)
    if not found:
        raise UnreadableFailureError(
            "it holds neither a memory snapshot, nor a report of OutOfMemoryReport, nor the "
            "message of an out-of-memory error: give one of these"
        )
    message = str(found[-1])
    device = _device_of_text(message)
    if capacity is not None:
        device.capacity_bytes = capacity
    _reckon_others(device)
    remark = (
        "A message does not say who held the memory of this process: write a snapshot "
        "(torch.cuda.memory._dump_snapshot), or train with callbacks=[OutOfMemoryReport(folder)]."
    )
    return _diagnosis(f"{source.name}: the message of an error", message, {}, device, [], [remark])


def _device_of_text(message: str) -> Device:
    """What torch's message says.

    >>> device = _device_of_text("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a "
    ...     "total capacity of 1.00 GiB of which 3.00 MiB is free.")
    >>> device.requested_bytes, device.capacity_bytes, device.others_bytes
    (20971520, 1073741824, None)
    """
    others = [(process, parse_bytes(amount)) for process, amount in _OTHER.findall(message)]
    allocated, unused = _amount(_ALLOCATED, message), _amount(_UNUSED, message)
    return Device(
        capacity_bytes=_amount(_CAPACITY, message),
        free_bytes=_amount(_FREE, message),
        reserved_bytes=None if allocated is None or unused is None else allocated + unused,
        allocated_bytes=allocated,
        requested_bytes=_amount(_REQUEST, message),
        others_bytes=sum(amount for _, amount in others) if others else None,
        others=[f"process {process}: {format_bytes(amount)}" for process, amount in others],
    )


def _amount(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    if found is None:
        return None
    text = re.sub(r" ?bytes?$", " B", found[1])
    try:
        return parse_bytes(text)
    except ValueError:
        return None


def _sentence(text: str) -> str:
    return text[:1].upper() + _ended(text[1:])


def _ended(text: str) -> str:
    return text.rstrip(".") + "."
