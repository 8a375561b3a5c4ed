"""Modules: their contents, their modes, and their wrappers.

Walking through a model's modules costs more than everything else that a batch needs of them. The
result depends only on three tables of each module. As long as these are the same tables with the
same keys and values, the last walk is still valid, and comparing them takes a tenth of a walk.
"""

import contextlib
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from automicro.sharding import is_sharded
from automicro.torch_private import (
    REGISTERED,
    AnyBatchNorm,
    buffer_table,
    is_uninitialized,
    module_tables,
)

_registered_in = operator.itemgetter(*REGISTERED)


def comparing_rows(modules: Iterable[nn.Module]) -> nn.Module | None:
    """Return the module that declares that it compares all rows of a batch, or None."""
    every = (each for root in modules for each in root.modules())
    return next((each for each in every if getattr(each, "compares_rows", False) is True), None)


class ModuleIndex:
    """Parameters, buffers and modules of some roots, each once, as of the last `refresh`.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> index = ModuleIndex([model])
        >>> len(index.parameters), [name for name, _, _ in index.buffer_tables]
        (4, ['1'])
        >>> index.refresh()
        False
        >>> model[0].register_buffer("scale", model[0].bias.detach())
        >>> index.refresh(), [name for name, _, _ in index.buffer_tables]
        (True, ['0', '1'])
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        reached: Callable[[], Mapping[str, nn.Module]] = dict,
    ) -> None:
        self._modules = list(modules)
        self._reached = reached
        self._walk(reached())

    def refresh(self) -> bool:
        """Walk again if anything has changed, and return whether it has."""
        reached = self._reached()
        if self._still_holds(reached):
            return False
        refuse_lazy(self.roots.values())  # before the walk, so that every later call refuses, too
        self._walk(reached)
        return True

    def names_of(self, parameters: Iterable[Tensor]) -> list[str]:
        """Return the names of parameters that have one."""
        wanted = {id(each) for each in parameters}
        return [
            f"{owner}.{name}".lstrip(".")
            for owner, module in self.owners
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in wanted
        ]

    def changed_buffers(self, changed: Container[int]) -> list[str]:
        """Return the names of buffers that were added, removed, replaced or listed as changed."""
        names = []
        before = {id(module): table for _, module, table in self.buffer_tables}
        for owner, module in self.owners:
            now, then = buffer_table(module), before.get(id(module), {})
            for name in {**then, **now} if now or then else ():
                buffer = now.get(name)
                if buffer is not then.get(name) or id(buffer) in changed:
                    names.append(f"{owner}.{name}".lstrip("."))
        return names

    def _walk(self, reached: Mapping[str, nn.Module]) -> None:
        self._last_reached = list(reached.items())
        # Roots by the prefix of the names inside them.
        self.roots = {
            "" if index == 0 else f"modules[{index - 1}].": root
            for index, root in enumerate(self._modules)
        }
        self.roots |= {f"{name}.": root for name, root in reached.items()}
        # Every module with its name, including reached ones.
        self.owners = list(
            {
                id(module): ((prefix + name).rstrip("."), module)
                for prefix, root in self.roots.items()
                for name, module in root.named_modules()
            }.values()
        )
        # Without the parameters of modules that are only reached.
        self.parameters: list[nn.Parameter] = list(
            dict.fromkeys(p for root in self._modules for p in root.parameters())
        )
        self.known: dict[int, Tensor] = {id(each): each for each in self.parameters}
        # Copies of the tables, to detect later changes.
        self.buffer_tables = [
            (name, module, dict(table))
            for name, module in self.owners
            if (table := buffer_table(module))
        ]
        self.batchnorms = [
            (name or type(module).__name__, module)
            for name, module in self.owners
            if isinstance(module, AnyBatchNorm)
        ]
        # The tables that `_still_holds` compares.
        found = [module_tables(module) for _, module in self.owners]
        usual = [tables for tables in found if tables is not None]
        self._is_usual = len(usual) == len(found)
        self._tables = list(chain.from_iterable(usual))
        self._spaces = [vars(module) for _, module in self.owners]
        self._full = [table for table in self._tables if table]
        # These have no keys to compare, but may be filled in place.
        self._empty = [table for table in self._tables if not table]
        self._keys = list(chain.from_iterable(self._full))
        self._values = list(chain.from_iterable(map(dict.values, self._full)))

    def _still_holds(self, reached: Mapping[str, nn.Module]) -> bool:
        """Whether a walk would return the same as the last one."""
        tables = chain.from_iterable(map(_registered_in, self._spaces))
        values = chain.from_iterable(map(dict.values, self._full))
        return (
            self._is_usual
            and list(reached.items()) == self._last_reached
            and not any(self._empty)
            and list(chain.from_iterable(self._full)) == self._keys
            and all(map(operator.is_, values, self._values))
            and all(map(operator.is_, tables, self._tables))
        )


def unshaped(modules: Iterable[nn.Module]) -> tuple[str, nn.Module] | None:
    """Return the first tensor that still waits for an input to take its shape, with its root.

    >>> unshaped([nn.Linear(2, 2)]), unshaped([nn.LazyLinear(2)])[0]
    (None, 'weight')
    """
    for root in modules:
        for name, tensor in chain(root.named_parameters(), root.named_buffers()):
            if is_uninitialized(tensor):
                return name, root
    return None


def refuse_lazy(modules: Iterable[nn.Module]) -> None:
    """Refuse modules whose weights do not exist before their first forward."""
    # Drawing them inside an attempt could not be rolled back, and happens only once.
    found = unshaped(modules)
    if found is not None:
        name, root = found
        raise ValueError(
            f"{name!r} of {type(root).__name__} takes its shape from the first input and has none "
            "yet. Run the model once first: with torch.no_grad(): model(inputs)"
        )


@contextlib.contextmanager
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Set modules to evaluation mode inside the context, and restore each submodule's own mode.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
        >>> with evaluation_mode([model]):
        ...     model[0].training
        False
        >>> [module.training for module in model]
        [True, False]
    """
    # Call `eval()` and `train()`, because some modules override them, to merge weights or to keep
    # layers frozen. Call nothing if nothing would change.
    before = [(each, each.training) for module in modules for each in module.modules()]
    if not any(training for _, training in before):
        yield
        return
    try:
        for module in modules:
            if any(each.training for each in module.modules()):
                module.eval()
        yield
    finally:
        # Parents come before their children, whose mode they also change.
        for _ in range(2):  # a second parent of a shared module may have changed it again
            for each, training in before:
                if each.training != training:
                    each.train(training)
        for each, training in before:
            if each.training != training:  # it overrides train() to keep its mode
                each.training = training


def is_parallel(modules: Sequence[nn.Module]) -> bool:
    """Whether modules communicate with other ranks."""
    return runs_collectives(modules) or any(
        is_rank_wrapper(module) for root in modules for module in root.modules()
    )


def is_rank_wrapper(module: nn.Module) -> bool:
    """Whether a module averages or shards parameters over ranks: DDP, FSDP and FSDP2."""
    from automicro.torch_private_distributed import is_fsdp_module, is_in_fsdp1

    is_ddp = isinstance(module, DistributedDataParallel)
    return is_ddp or is_fsdp_module(module) or is_in_fsdp1(module)


def runs_collectives(modules: Iterable[nn.Module]) -> bool:
    """Whether modules are known to communicate in forward or backward, apart from DDP and FSDP2."""
    from automicro.torch_private_distributed import is_fsdp_module, mesh_dims

    for root in modules:
        sharded: set[int] = set()
        for module in root.modules():
            if isinstance(module, nn.SyncBatchNorm):
                return True
            if is_fsdp_module(module):
                dims = mesh_dims(cast(Any, module))
                own: list[Any] = [p for p in module.parameters() if is_sharded(p)]
                # If the mesh has more dimensions than sharding and replicas use, the others belong
                # to tensor parallelism, which communicates within forward and backward.
                sharded |= {id(p) for p in own if p.device_mesh.ndim <= dims}
        if any(is_sharded(p) and id(p) not in sharded for p in root.parameters()):
            return True
    return False
