"""Every name that this package takes from torch's compiler without torch promising to keep it."""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "compile_in_place",
    "compile_modes",
    "compile_options",
    "compiler_config",
    "compiler_is_loaded",
    "compiler_is_used",
    "inductor_is_deterministic",
    "is_compiled",
    "mark_dynamic",
    "set_inductor_deterministic",
    "unmark",
]


def is_compiled(module: nn.Module) -> bool:
    """Tell whether ``torch.compile`` was applied to this module itself, in any of its three ways.

    >>> is_compiled(nn.Linear(2, 2))
    False
    """
    # Importing dynamo takes seconds, and without it nothing can have been compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    return (
        isinstance(module, dynamo.OptimizedModule)  # torch.compile(module)
        or getattr(module, "_compiled_call_impl", None) is not None  # module.compile()
        # module.forward = torch.compile(module.forward)
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def compiler_is_loaded() -> bool:
    """Tell whether something in this process could have been compiled by now.

    Whoever compiles has loaded torch's compiler; so have others, an optimizer for one.

    >>> isinstance(compiler_is_loaded(), bool)
    True
    """
    return "torch._dynamo.eval_frame" in sys.modules


def compiler_is_used() -> bool:
    """Tell whether anything was given to ``torch.compile`` in this process, called or not yet.

    Narrower than `compiler_is_loaded`, and forgetful: not since the compiler was last reset.

    >>> isinstance(compiler_is_used(), bool)
    True
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    # One backend for each way of compiling; what is only kept from being compiled has none.
    backends = getattr(dynamo, "cached_backends", None)
    return backends is None or any(map(callable, backends.values()))


def mark_dynamic(tensor: Tensor, dim: int) -> list[str]:
    """Ask the compiler, who is loaded, not to build one size of a dimension into its code.

    A wish: code that needs the one size is compiled for it without an error. Returns what
    `unmark` takes the mark away by.
    """
    table = vars(tensor)
    before = set(table)
    torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return [name for name in table if name not in before]


def unmark(tensor: Tensor, names: Iterable[str]) -> None:
    """Take a mark away again."""
    table = vars(tensor)
    for name in names:
        table.pop(name, None)


def compile_in_place(module: nn.Module, **keywords: Any) -> None:
    """Compile a module as ``module.compile`` does, also one whose ``forward`` is torch's own.

    The compiler skips functions that stand in torch's files until one of somebody else's calls
    them, so that ``nn.Sequential(…).compile()`` runs uncompiled for ever, without a word.
    """
    if type(module).forward.__module__.split(".")[0] != "torch":
        module.compile(**keywords)
        return
    call: Callable[..., Any] = module._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    run.__code__ = run.__code__.replace()  # compiled code is kept, and limited in number, per code
    module._compiled_call_impl = torch.compile(run, **keywords)


def compile_modes() -> dict[str, dict[str, Any]]:
    """What each mode of ``torch.compile`` stands for.

    >>> compile_modes()["reduce-overhead"]
    {'triton.cudagraphs': True}
    """
    import torch._inductor as inductor

    modes: dict[str, dict[str, Any]] = inductor.list_mode_options()
    return modes


def compile_options() -> list[str]:
    """Every option of ``torch.compile`` with its own backend.

    >>> "triton.cudagraphs" in compile_options()
    True
    """
    import torch._inductor as inductor

    return [*inductor.list_options(), "guard_filter_fn", "use_aoti"]  # the last two go elsewhere


def compiler_config(module: nn.Module) -> Mapping[str, Any] | None:
    """What torch's own backend was told where a module itself was compiled; else None.

    >>> compiler_config(nn.Linear(2, 2)) is None
    True
    """
    if not is_compiled(module):
        return None
    for where in (
        getattr(module, "_compiled_call_impl", None),
        module,
        vars(module).get("forward"),
    ):
        read = getattr(where, "get_compiler_config", None)
        if read is not None:
            config: Mapping[str, Any] | None = read()
            return config
    return None


def inductor_is_deterministic() -> bool:
    """Tell whether compiled code is to be deterministic, beside what is not compiled.

    >>> inductor_is_deterministic()
    False
    """
    import torch._inductor.config as config

    return bool(getattr(config, "deterministic", False))


def set_inductor_deterministic(value: bool) -> None:
    """Say whether compiled code is to be deterministic."""
    import torch._inductor.config as config

    if hasattr(config, "deterministic"):
        config.deterministic = value
