"""Devices by name, and how many bytes a process can use on each.

The names on boxes promise more than a process gets. `total_bytes` is what the driver reports, which
torch quotes as "total capacity" when memory runs out; it differs by a few tenths between boards and
drivers, and with ECC. For some devices public reports of such failures show it. For the others it
is assumed, from the size on the box and devices that are like them. From it goes what a process
needs before its first tensor: the context of the driver, kernels and libraries; assumed, too.
"""

from dataclasses import dataclass

from automicro.units import format_bytes, parse_bytes

_GIB = 1 << 30
CONTEXT_BYTES = 600 << 20
"""Assumed, for the driver's context with kernels, cuBLAS and cuDNN loaded."""


_BEFORE_AMPERE = ("t4", "v100-16gb", "v100-32gb")
# Public reports of failures show about as much of all others.
_ASSUMED = ("a10g", "l4", "a100-40gb", "h200-141gb", "mi250x", "mi300x")


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        name: in a plan.
        what: it is, in words.
        total_bytes: what its driver reports.
    """

    name: str
    what: str
    total_bytes: int

    @property
    def is_before_ampere(self) -> bool:
        """Whether it has neither flash attention nor attention in bfloat16."""
        return self.name in _BEFORE_AMPERE

    @property
    def usable_bytes(self) -> int:
        """The bytes that tensors can take."""
        return self.total_bytes - CONTEXT_BYTES


DEVICES: dict[str, Device] = {
    name: Device(name, what, int(total_gib * _GIB))
    for name, what, total_gib in (
        ("t4", "NVIDIA T4, 16 GB", 14.56),
        ("v100-16gb", "NVIDIA V100, 16 GB", 15.77),
        ("v100-32gb", "NVIDIA V100, 32 GB", 31.73),
        ("a10g", "NVIDIA A10G, 24 GB", 22.03),
        ("l4", "NVIDIA L4, 24 GB", 22.03),
        ("rtx-3090", "NVIDIA GeForce RTX 3090, 24 GB", 23.56),
        ("rtx-4090", "NVIDIA GeForce RTX 4090, 24 GB", 23.52),
        ("rtx-5090", "NVIDIA GeForce RTX 5090, 32 GB", 31.36),
        ("a100-40gb", "NVIDIA A100, 40 GB", 39.38),
        ("l40s", "NVIDIA L40S, 48 GB", 44.34),
        ("mi250x", "AMD Instinct MI250X, one of its two halves, 64 GB", 63.98),
        ("a100-80gb", "NVIDIA A100, 80 GB", 79.14),
        ("h100-80gb", "NVIDIA H100, 80 GB", 79.10),
        ("h200-141gb", "NVIDIA H200, 141 GB", 139.72),
        ("b200", "NVIDIA B200, 192 GB", 178.35),
        ("mi300x", "AMD Instinct MI300X, 192 GB", 191.45),
    )
}


def find_device(name: str) -> Device:
    """A device by its name in any case.

    Raises:
        ValueError: there is none of that name.

    >>> find_device("A100-80GB").what
    'NVIDIA A100, 80 GB'
    """
    found = DEVICES.get(name.lower().replace("_", "-").replace(" ", "-"))
    if found is None:
        raise ValueError(
            f"device={name!r} is none of {', '.join(DEVICES)}; give one of these, 'cpu' or 'cuda', "
            "or the bytes of yours: memory='24GiB'"
        )
    return found


def read_memory(memory: str | int | float | None, device: str) -> tuple[int | None, bool]:
    """The bytes that tensors can take, and whether it is an accelerator.

    Raises:
        TypeError, ValueError: one of them cannot be read.

    >>> read_memory("24GiB", "cuda"), read_memory(None, "cpu"), read_memory(None, "t4")[0] >> 30
    ((25769803776, True), (None, False), 13)
    """
    usable = None if device in ("cpu", "cuda") else find_device(device).usable_bytes
    if memory is None:
        return usable, device != "cpu"
    wanted = parse_bytes(memory)
    if usable is not None and wanted > usable:
        raise ValueError(
            f"memory={memory!r} is more than the {format_bytes(usable)} that can be used of "
            f"{device!r}; leave one of the two out"
        )
    return wanted, device != "cpu"


def as_table() -> str:
    """All devices with what can be used of each, a line each.

    >>> as_table().splitlines()[0].split()[:3]
    ['t4', '13.97', 'GiB']
    """
    return "\n".join(
        f"{each.name:<12} {format_bytes(each.usable_bytes):>11}  {each.what}"
        f"{' (assumed)' * (each.name in _ASSUMED)}"
        for each in DEVICES.values()
    )
