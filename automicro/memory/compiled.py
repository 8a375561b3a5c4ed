"""Refusing compiled modules where they would silently run uncompiled."""

from torch import nn

from automicro.torch_private_compiler import is_compiled


def refuse_compiled(module: nn.Module) -> None:
    """Refuse a module that is compiled, or has a compiled part.

    A memory budget looks at operations through a dispatch mode, and under any dispatch mode torch
    runs compiled code as if it had not been compiled, without a word.

    Raises:
        ValueError: the module or a submodule is compiled. The message names them.

    >>> refuse_compiled(nn.Linear(2, 2))
    """
    names = [name for name, part in module.named_modules() if is_compiled(part)]
    if names:
        shown = ", ".join(name or type(module).__name__ for name in names[:5])
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(
            f"a simulated memory budget silently switches torch.compile off, and these modules "
            f"are compiled: {shown}{more}. Leave out either the memory limit or torch.compile"
        )
