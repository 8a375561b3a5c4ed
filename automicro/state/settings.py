"""Settings of the thread or process that a forward may change: modes, context and environment."""

import contextlib
import contextvars
import functools
import os
from functools import partial
from typing import Any

import torch

from automicro.torch_private import BACKENDS, function_modes, pop_function_modes


class _Context:
    """The context variables of this thread, compared by identity."""

    def __init__(self) -> None:
        self.held = dict(contextvars.copy_context())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self._ids() == other._ids()

    def _ids(self) -> dict[Any, int]:
        return {variable: id(value) for variable, value in self.held.items()}


def _put_context(saved: _Context) -> None:
    for variable in {**contextvars.copy_context(), **saved.held}:
        # A variable cannot be unset, but an empty context knows its default. One without a default
        # keeps its value: libraries create theirs at the first use.
        with contextlib.suppress(LookupError):
            is_held = variable in saved.held
            value = saved.held[variable] if is_held else contextvars.Context().run(variable.get)
            variable.set(value)


def _environment() -> dict[Any, Any]:
    return dict(vars(os.environ)["_data"])  # os.environ.copy() decodes all, which takes 30 µs


def _put_environment(saved: dict[Any, Any]) -> None:
    now, decode = _environment(), os.environ.decodekey
    for key in now.keys() - saved.keys():
        del os.environ[decode(key)]
    for key in (key for key, value in saved.items() if now.get(key) != value):
        os.environ[decode(key)] = os.environ.decodevalue(saved[key])


def _directory() -> str:
    with contextlib.suppress(OSError):
        return os.getcwd()
    return "."  # it was removed


def _nesting() -> int:
    # Torch has no getter, and returns the nesting only when it changes.
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting


def _set_nesting(nesting: int) -> None:
    for _ in range(_nesting() - nesting):
        torch.autocast_decrement_nesting()


_CUDA, _ATTENTION = torch.backends.cuda, ("flash", "mem_efficient", "math", "cudnn")
_OWN: list[tuple[Any, Any]] = [  # one per device type
    (torch.is_autocast_enabled, torch.set_autocast_enabled),
    (torch.get_autocast_dtype, torch.set_autocast_dtype),
]
_SETTINGS: list[tuple[Any, Any]] = [
    (function_modes, pop_function_modes),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (_nesting, _set_nesting),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_num_threads, torch.set_num_threads),
    *BACKENDS,
    *((getattr(_CUDA, f"{e}_sdp_enabled"), getattr(_CUDA, f"enable_{e}_sdp")) for e in _ATTENTION),
    (_Context, _put_context),
    (_environment, _put_environment),
    (_directory, os.chdir),
]


@functools.cache
def _settings() -> list[tuple[Any, Any]]:
    types = ["cpu"]
    if torch.accelerator.is_available():
        types.append(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]
    own = [(partial(read, each), partial(write, each)) for each in types for read, write in _OWN]
    return [*_SETTINGS, *own]


def read_settings() -> list[Any]:
    """Return all settings of this thread and process."""
    return [read() for read, _ in _settings()]


def put_settings_back(saved: list[Any]) -> None:
    """Restore the settings that differ."""
    if read_settings() != saved:
        for (read, write), value in zip(_settings(), saved, strict=True):
            if read() != value:
                write(value)
        # It may hold casts of the failed attempt, whose graph was freed.
        torch.clear_autocast_cache()
