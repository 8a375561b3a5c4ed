"""The stand-in as a torch device: ``torch.standin``, with the names of ``torch.cuda``.

`install` compiles the backend, which takes half a minute the first time, and makes it the
accelerator of this process until it ends.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import backend_registration

from tests.compiling import compile_library, find_compiler

NAME = "standin"
NUM_DEVICES = 2  # as in csrc/streams.h
SOURCES = ["streams", "memory", "backend", "operators", "cells", "autocast", "gloo"]
_FOLDER = Path(__file__).with_name("csrc")

Device = torch.device | str | int | None


def install() -> None:
    """Make the stand-in the accelerator of this process.

    Raises:
        RuntimeError: there is no C++ compiler, or compilation fails.
    """
    if hasattr(torch, NAME):
        return
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError(
            "the stand-in device is written in C++, and there is no compiler ($CXX, g++, c++, "
            "clang++): install one, or leave these tests out with -m 'not standin'"
        )
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    sources = [_FOLDER / f"{name}.cpp" for name in SOURCES]
    library = compile_library(
        compiler, sources, caches / "automicro-tests", ["c10", "torch", "torch_cpu"]
    )
    torch.ops.load_library(library)
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)


def join(group: dist.ProcessGroup) -> None:
    """Make a gloo group exchange tensors of the stand-in as well."""
    torch.ops.standin.attach(group.group_name)


def is_available() -> bool:
    return True


is_initialized = is_bf16_supported = is_available


def init() -> None:
    """Do nothing, because `install` already started it."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return NUM_DEVICES


def _by_index(function: Callable[[int], Any]) -> Callable[..., Any]:
    """Let a function of torch take a device in any form; none is the current one."""
    return lambda device=None: function(_index(device))


current_device = torch.accelerator.current_device_index
empty_cache = torch.accelerator.empty_cache
set_device = _by_index(torch.accelerator.set_device_index)
synchronize = _by_index(torch.accelerator.synchronize)
current_stream = _by_index(torch.accelerator.current_stream)
memory_stats = _by_index(torch.accelerator.memory_stats)
memory_stats_as_nested_dict = _by_index(torch._C._accelerator_getDeviceStats)
memory_allocated = _by_index(torch.accelerator.memory_allocated)
max_memory_allocated = _by_index(torch.accelerator.max_memory_allocated)
memory_reserved = _by_index(torch.accelerator.memory_reserved)
max_memory_reserved = _by_index(torch.accelerator.max_memory_reserved)
reset_peak_memory_stats = _by_index(torch.accelerator.reset_peak_memory_stats)
reset_accumulated_memory_stats = _by_index(torch.accelerator.reset_accumulated_memory_stats)
mem_get_info = _by_index(torch.accelerator.get_memory_info)
get_per_process_memory_fraction = _by_index(lambda index: torch.ops.standin.memory_fraction(index))
get_rng_state = _by_index(lambda index: _generator(index).get_state())


@contextlib.contextmanager
def device(device: Device) -> Iterator[None]:
    with torch.accelerator.device_index(_index(device)):
        yield


def get_device_name(device: Device = None) -> str:
    return f"stand-in {_index(device)}"


class Properties(NamedTuple):
    """The device properties that the package reads."""

    name: str
    total_memory: int


def get_device_properties(device: Device = None) -> Properties:
    return Properties(get_device_name(device), torch.ops.standin.capacity(_index(device)))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def Stream(device: Device = None, priority: int = 0) -> torch.Stream:  # noqa: N802
    return torch.Stream(torch.device(NAME, _index(device)), priority=priority)


def Event(enable_timing: bool = False) -> torch.Event:  # noqa: N802
    return torch.Event(torch.device(NAME), enable_timing=enable_timing)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
    else:
        with stream:
            yield


def manual_seed(seed: int) -> None:
    _generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def set_rng_state(new_state: Tensor, device: Device = None) -> None:
    _generator(_index(device)).set_state(new_state)


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"a share of the device is from 0 to 1, not {fraction}")
    torch.ops.standin.set_memory_fraction(_index(device), fraction)


_SYNC_MODES = ("default", "warn", "error")


def set_sync_debug_mode(debug_mode: int | str) -> None:
    mode = _SYNC_MODES.index(debug_mode) if isinstance(debug_mode, str) else debug_mode
    torch.ops.standin.set_sync_debug_mode(mode)


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    index: int | None = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def _generator(index: int) -> torch.Generator:
    generator: torch.Generator = torch.ops.standin.default_generator(index)
    return generator
