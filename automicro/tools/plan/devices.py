"""Devices by name, and the bytes that a process can use on each.

The nominal size of a device is more than a process can use. The figures are those of the driver,
which torch reports as "total capacity" when memory runs out. They differ by a few tenths between
boards and drivers, and with ECC. They come from public reports of such failures, or are assumed
from the nominal size and similar devices. The memory that a process needs before its first tensor
(driver context, kernels and libraries) is subtracted; this amount is also assumed.
"""

from automicro.units import format_bytes, parse_bytes

_GIB = 1 << 30
CONTEXT_BYTES = 600 << 20
"""Assumed size of the driver's context, with kernels, cuBLAS and cuDNN loaded."""

BEFORE_AMPERE = ("t4", "v100-16gb", "v100-32gb")
"""These have neither flash attention nor attention in bfloat16."""
# For all others, public reports of failures show about these figures.
_ASSUMED = ("a10g", "l4", "a100-40gb", "h200-141gb", "mi250x", "mi300x")

DEVICES: dict[str, int] = {
    name: int(total_gib * _GIB) - CONTEXT_BYTES
    for name, total_gib in {
        "t4": 14.56,
        "v100-16gb": 15.77,
        "v100-32gb": 31.73,
        "a10g": 22.03,
        "l4": 22.03,
        "rtx-3090": 23.56,
        "rtx-4090": 23.52,
        "rtx-5090": 31.36,
        "a100-40gb": 39.38,
        "l40s": 44.34,
        "mi250x": 63.98,  # one of its two halves
        "a100-80gb": 79.14,
        "h100-80gb": 79.10,
        "h200-141gb": 139.72,
        "b200": 178.35,
        "mi300x": 191.45,
    }.items()
}
"""The bytes that tensors can take, by the device's name."""


def read_memory(memory: str | int | float | None, device: str) -> tuple[int | None, bool]:
    """Return the bytes available to tensors, and whether the device is an accelerator.

    >>> read_memory("24GiB", "cuda"), read_memory(None, "cpu"), read_memory(None, "t4")[0] >> 30
    ((25769803776, True), (None, False), 13)
    """
    usable = DEVICES.get(device)
    if usable is None and device not in ("cpu", "cuda"):
        raise ValueError(
            f"device={device!r} is not known: give one of {', '.join(DEVICES)}, 'cpu' or "
            "'cuda', or the memory of your device, as in memory='24GiB'"
        )
    if memory is None:
        return usable, device != "cpu"
    wanted = parse_bytes(memory)
    if usable is not None and wanted > usable:
        raise ValueError(
            f"memory={memory!r} exceeds the usable {format_bytes(usable)} of {device!r}. Leave "
            "out memory or device"
        )
    return wanted, device != "cpu"


def as_table() -> str:
    """Return a table of all devices with their usable memory, one per line.

    >>> as_table().splitlines()[0].split()
    ['t4', '13.97', 'GiB']
    """
    return "\n".join(
        f"{name:<12} {format_bytes(usable):>11}{' (assumed)' * (name in _ASSUMED)}"
        for name, usable in DEVICES.items()
    )
