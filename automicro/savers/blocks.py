"""The blocks that a model repeats: a transformer's layers, the bottlenecks of a ResNet."""

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from automicro.errors import suggestion
from automicro.torch_private import is_compiled

# What wrappers put into the names of what they hold.
_OF_WRAPPERS = re.compile(
    r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_OF_ROOTS = ("module", "_orig_mod")


def _nothing(module: nn.Module) -> bool:
    return False


def repeated_blocks(
    model: nn.Module, *, but: Callable[[nn.Module], bool] = _nothing
) -> dict[str, nn.Module]:
    """The outermost modules of one class that stand in a row, by name: a transformer's layers.

    A row is what an ``nn.ModuleList``, an ``nn.Sequential`` or an ``nn.ModuleDict`` holds. Where
    its modules are of different shapes and hold rows themselves, they are stages (of a Swin
    transformer, a DenseNet), and the blocks are inside of them. So they are of modules that are
    none themselves, as ``but`` says.

    >>> blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)]
    >>> list(repeated_blocks(nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 2))))
    ['0.0', '0.1']
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        prefix, module = waiting.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        children = {
            f"{prefix}.{name}" if prefix else name: child for name, child in module.named_children()
        }
        row = {name: each for name, each in _row_of(module, children).items() if not but(each)}
        found.update({name: child for name, child in row.items() if id(child) not in seen})
        seen |= set(map(id, row.values()))
        waiting.extend((name, child) for name, child in children.items() if name not in row)
    return found


def _row_of(module: nn.Module, children: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The repeated blocks among a module's children, by name."""
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return {}
    kinds = Counter(_kind(child) for child in children.values())
    repeated = {
        name: child
        for name, child in children.items()
        if kinds[_kind(child)] > 1 and any(child.children()) and is_called(child)
    }
    if not repeated:
        return {}
    return {} if _are_stages(list(repeated.values())) else repeated


def is_called(module: nn.Module) -> bool:
    """Whether a module may be called itself: a list of layers has no forward.

    >>> is_called(nn.Linear(2, 2)), is_called(nn.ModuleList())
    (True, False)
    """
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or "forward" in vars(module):
        return True
    return type(module).forward is not nn.Module.forward


def _are_stages(modules: Sequence[nn.Module]) -> bool:
    """Whether modules hold the blocks, rather than being such, as those of a Swin transformer."""
    shapes = Counter(_shapes(module) for module in modules)
    if 2 * shapes.most_common(1)[0][1] > len(modules) or len(modules) == 2:
        return False
    inside = [list(repeated_blocks(module).values()) for module in modules]
    return all(blocks and all(map(_has_two_weights, blocks)) for blocks in inside)


def _has_two_weights(module: nn.Module) -> bool:
    """Whether it is more than one layer with its norm and its activation."""
    return sum(parameter.ndim > 1 for parameter in module.parameters()) > 1


def _kind(module: nn.Module) -> type:
    """Its class, inside of what ``torch.compile`` puts around it."""
    inside = getattr(module, "_orig_mod", module) if is_compiled(module) else module
    return type(inside)


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in module.parameters())


def named_blocks(modules: Sequence[nn.Module], patterns: Iterable[str]) -> dict[str, nn.Module]:
    """The outermost modules that patterns name; ``*`` stands for what is between two dots.

    >>> model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    >>> list(named_blocks([model], ["encoder.*"]))
    ['encoder.0', 'encoder.1']

    Raises:
        ValueError: a pattern names nothing. The message suggests the nearest.
    """
    names = _by_name(modules, nn.Module.named_modules)
    matched: dict[str, nn.Module] = {}
    for pattern in patterns:
        fitting = {name: module for name, module in names.items() if _matches(name, pattern)}
        if not fitting:
            rows = {re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names}
            raise ValueError(
                f"no module of the model is named {pattern!r}"
                f"{suggestion(pattern, sorted(rows | set(names)))}; name blocks as named_modules() "
                f"does, with * for one part of a name; the first are {', '.join([*names][:5])}"
            )
        matched.update(fitting)
    inner = {
        id(part) for module in matched.values() for part in module.modules() if part is not module
    }
    found: dict[int, str] = {}
    for name, module in matched.items():
        if id(module) not in inner:
            found.setdefault(id(module), name)
    return {name: matched[name] for name in found.values()}


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _by_name(
    modules: Sequence[nn.Module],
    find: Callable[[nn.Module], Iterable[tuple[str, nn.Module]]],
) -> dict[str, nn.Module]:
    """What is found in several modules, by names without those of wrappers."""
    return {
        (f"modules[{index - 1}]." if index else "") + shown: module
        for index, root in enumerate(modules)
        for name, module in find(root)
        if (shown := _plain_name(name)) and shown not in _OF_ROOTS
    }


def _plain_name(name: str) -> str:
    """A module's name without what DDP, FSDP and ``torch.compile`` add to it.

    >>> _plain_name("module._orig_mod.h.0")
    'h.0'
    """
    return _OF_WRAPPERS.sub("", name)


def find_blocks(
    modules: Sequence[nn.Module], *, but: Callable[[nn.Module], bool] = _nothing
) -> dict[str, nn.Module]:
    """The repeated blocks of several modules, by name; see `repeated_blocks`."""
    return _by_name(modules, lambda root: repeated_blocks(root, but=but).items())


def shown_blocks(names: Iterable[str]) -> str:
    """Repeated blocks in one word.

    >>> shown_blocks(["h.0", "h.1", "h.2"])
    'h.* (3)'
    """
    names = list(names)
    rows = dict.fromkeys(name.rpartition(".")[0] for name in names)
    shown = ", ".join(f"{row}.*" if row else "*" for row in rows)
    return f"{shown} ({len(names)})"
