"""Compiled models: options of ``torch.compile``, and microbatch sizes that change.

Torch compiles a model for its first microbatch size, and once more for all others. Small forwards
outside training, such as checks, run uncompiled. Modes that capture CUDA graphs are refused: a
captured graph has one size, and its pool keeps the memory of sizes that failed.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from automicro.errors import about
from automicro.memory.device import active_budget
from automicro.torch_private import compiler_is_loaded
from automicro.torch_private_execution import (
    compile_in_place,
    compile_modes,
    compiler_config,
    is_compiled,
)

_CUDA_GRAPHS = "triton.cudagraphs"
_REMEDY = (
    "use mode 'max-autotune-no-cudagraphs', or fix both sizes (microbatch_size=8, "
    "eval_microbatch_size=8; None for whole batches)"
)
_WHY = (
    "a captured graph has one size, and its pool keeps the memory of sizes that failed, so a "
    "smaller size does not fit either"
)

CompileOptions = bool | Mapping[str, Any]
"""False, True, or the keyword arguments of ``torch.compile``."""


@about("compile")
def check_compile(
    options: CompileOptions,
    *,
    sizes_change: bool,
    device: torch.device,
    memory_limit: str | int | float | None = None,
) -> dict[str, Any] | None:
    """Return the keyword arguments for ``torch.compile``, or None if nothing is to be compiled.

    >>> check_compile({"mode": "max-autotune"}, sizes_change=False, device=torch.device("cpu"))
    {'mode': 'max-autotune'}
    """
    if options is False:
        return None
    if options is not True and not isinstance(options, Mapping):
        raise TypeError(
            f"compile={options!r} is neither True or False nor a mapping. Pass compile=True, or "
            "the keyword arguments of torch.compile, as in {'mode': 'max-autotune-no-cudagraphs'}"
        )
    keywords = {} if options is True else _copied(options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # loading the compiler warns of torch's own code
            # Torch itself refuses keys, modes, backends and options that it does not know.
            torch.compile(_nothing, **_copied(keywords))
    except Exception as error:
        raise ValueError(
            f"compile={options!r} is refused by torch: {str(error).split(', known options')[0]}. "
            "help(torch.compile) lists the arguments"
        ) from error
    capturing = _capturing(keywords)
    if capturing is not None and sizes_change:
        raise ValueError(
            f"compile with {capturing} captures CUDA graphs, but the microbatch size can change: "
            f"{_WHY}; {_REMEDY}"
        )
    if device.type == "cpu" and (memory_limit is not None or active_budget() is not None):
        limit = "a MemoryBudget" if memory_limit is None else f"memory_limit={memory_limit!r}"
        raise ValueError(
            f"compile={options!r} does not work with {limit} on the CPU: the simulated device "
            "intercepts every operation, so torch silently runs everything uncompiled. Leave out "
            "one of them"
        )
    return keywords


def _copied(keywords: Mapping[str, Any]) -> dict[str, Any]:
    # Torch removes entries from the options.
    return {k: dict(e) if isinstance(e, Mapping) else e for k, e in keywords.items()}


def _nothing() -> None:
    """Do nothing, compiled."""


def compile_model(model: nn.Module, options: CompileOptions, **conditions: Any) -> None:
    """Compile a model in place, which keeps the names in its state dict.

    >>> model = nn.Linear(2, 2)
    >>> compile_model(model, {"backend": "eager"}, sizes_change=True)
    >>> model(torch.ones(3, 2)).shape, list(model.state_dict())
    (torch.Size([3, 2]), ['weight', 'bias'])
    """
    # Compilation itself happens at the first forward, so the model is moved and its memory format
    # is changed before.
    home = next((each.device for each in model.parameters()), torch.device("cpu"))
    keywords = check_compile(options, **{"device": home, **conditions})
    if keywords is None:
        return
    if is_compiled(model):
        raise ValueError(
            f"compile={options!r}, but the model ({type(model).__name__}) is already compiled. "
            "Leave compile out, or pass the model from before torch.compile"
        )
    compile_in_place(model, **keywords)


def captures_cuda_graphs(modules: Iterable[nn.Module]) -> bool:
    """Return whether a module captures CUDA graphs, whose outputs the next run overwrites."""
    return next(_captured(modules), None) is not None


def _captured(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for module in modules:
        for name, part in module.named_modules():
            config = compiler_config(part)
            if config is not None and config.get(_CUDA_GRAPHS):
                yield name, part


def refuse_cuda_graphs(modules: Iterable[nn.Module], *, sizes_change: bool) -> None:
    """Refuse modules compiled to CUDA graphs if sizes can change."""
    if not sizes_change:
        return
    for name, part in _captured(modules):
        raise ValueError(
            f"{name or 'the model'} ({type(part).__name__}) was compiled with CUDA graphs (mode "
            f"'reduce-overhead' or 'max-autotune'), but the microbatch size can change: {_WHY}; "
            f"{_REMEDY}"
        )


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Return a context that runs everything uncompiled, for forwards of a few rows.

    >>> with uncompiled():
    ...     nn.Linear(2, 2)(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """
    # Entering a stance costs microseconds, and loading the compiler costs seconds.
    if not compiler_is_loaded():
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _capturing(keywords: Mapping[str, Any]) -> str | None:
    """Return the setting that requests CUDA graphs, if there is one."""
    if keywords.get("backend") == "cudagraphs":
        return "backend='cudagraphs'"
    if keywords.get("backend", "inductor") != "inductor":
        return None
    mode = keywords.get("mode")
    if mode is not None and compile_modes()[mode].get(_CUDA_GRAPHS):
        return f"mode={mode!r}"
    if (keywords.get("options") or {}).get(_CUDA_GRAPHS):
        return f"options={{{_CUDA_GRAPHS!r}: True}}"
    return None
