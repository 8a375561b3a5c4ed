"""Reads the sizes of earlier runs when a run starts, and writes its own for later runs."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import tensor_leaves
from automicro.errors import SizeCacheWarning, describe_error, warn
from automicro.memory.device import capacity_bytes, share_of, total_bytes
from automicro.options import read_flag
from automicro.policy.policy import Policy
from automicro.ranks.interface import Ranks, announcing_failure
from automicro.remembered.cache import RememberedSize, RunKey, SizeCache, digest_of
from automicro.step.feature import Feature
from automicro.step.plan import ROWS, Finished, ReadBatch
from automicro.step.setup import Setup
from automicro.torch_private import is_uninitialized
from automicro.torch_private_execution import is_compiled
from automicro.version import __version__

# If lengths vary, so do sizes: a remembered size is only replaced by one larger by this share.
CHANGE = 0.05


class RememberSizes(Feature):
    """``"auto"`` starts from the size that an earlier run of the same kind found.

    The run remembers its own size for later runs; see ``automicro cache``.

        >>> import torch
        >>> from automicro import Microbatcher
        >>> microbatcher = Microbatcher(
        ...     torch.nn.Linear(8, 2), loss_fn=torch.nn.MSELoss(), features=[RememberSizes()]
        ... )

    Args:
        wanted: False to switch it off, for example in a Trainer, which uses it by default.

    Raises:
        TypeError: the value is neither True nor False.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = read_flag("remember_sizes", wanted)

    def attach(self, setup: Setup) -> None:
        setup.recollect = Recollection if self.wanted else None


class Recollection:
    """Reads and writes the cache of sizes for one phase of a run."""

    # It never stops a run: an error becomes one `SizeCacheWarning`, and the run continues without
    # the cache.

    def __init__(self, setup: Setup, phase: str) -> None:
        self._setup, self._phase = setup, phase
        self._has_asked = False
        self._cache: SizeCache | None = None  # None if nothing is remembered
        self._key: RunKey
        self._known: RememberedSize | None = None  # as in its file

    def look_up(
        self, batch: ReadBatch | None, policy: Policy, *, is_new: bool, ranks: Ranks
    ) -> int | None:
        """Start a policy of a new run from a remembered size, and return its rows, or None."""
        if self._has_asked:
            return None
        with announcing_failure(ranks):
            found = [0.0, 0.0, 0.0]
            # Ranks might use different folders, so all start from the size of the first rank.
            if ranks.rank == 0 and batch is not None:
                with self._going_on():
                    found = self._recall(batch, policy.levels)
        size, cost, level = ranks.from_first(found)
        self._has_asked = True
        at = {"level": int(level)} if level else {}
        is_used = size and is_new and policy.suggest(int(size), cost or None, **at)
        return int(size) if is_used else None

    def _recall(self, batch: ReadBatch, levels: Sequence[str]) -> list[float]:
        """Return the remembered rows, cost of a row, and level; zeros if they are of no use."""
        shapes = describe_shapes(batch.batch, layout=self._setup.carrying.layout)
        self._key = describe_run(self._setup, shapes, rows=batch.num_rows, phase=self._phase)
        self._cache = SizeCache()
        found = self._known = self._cache.find(self._key)
        # The whole batch is tried first anyway, and longer rows might fit as well.
        if found is None or found.level not in levels:
            return [0.0, 0.0, 0.0]
        if found.level == levels[0] and not found.is_cut:
            return [0.0, 0.0, 0.0]
        at = levels.index(found.level)
        return [float(found.microbatch_size), found.cost_per_row or 0.0, float(at)]

    def take_down(self, finished: Finished[Any]) -> None:
        """Remember the size of a step if it is new information."""
        plan, measured = finished.plan, finished.measured
        if self._cache is None or not finished.is_committed or not finished.plan.cuts:
            return
        widest = max(finished.plan.cuts, key=lambda cut: cut.largest * (cut.row_cost or 1))
        # Batches of another number of rows, such as the last one of an epoch, have another key.
        if plan.is_measuring or plan.unit != ROWS or widest.num_rows != self._key["rows"]:
            return
        with self._going_on():
            size = RememberedSize(
                key=self._key,
                microbatch_size=widest.largest,
                cost_per_row=widest.row_cost or None,
                peak_bytes=None if measured is None else measured.peak_bytes,
                level=finished.level_name,
            )
            if self._known is None or _replaces(size, self._known, finished.failed_sizes):
                self._known = size
                self._cache.remember(size)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except SizeCacheWarning:  # the user has turned these warnings into errors
            raise
        except Exception as error:
            self._cache = None
            warn(
                f"microbatch sizes are not remembered in this run ({describe_error(error)}), so "
                "the run finds them itself. Pass remember_sizes=False to turn this off",
                SizeCacheWarning,
            )


def _replaces(size: RememberedSize, known: RememberedSize, failed: Sequence[int]) -> bool:
    """Whether a size says more: the largest counts until one of no more elements fails."""
    if size.is_cut != known.is_cut:
        return size.is_cut  # a batch that was not cut shows less than one that was
    if min(failed, default=math.inf) * (size.cost_per_row or 1.0) <= known.elements:
        return True
    # If lengths vary, each batch would otherwise be slightly larger.
    slack = 0.0 if size.cost_per_row == known.cost_per_row else CHANGE
    return size.elements > known.elements * (1 + slack)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def describe_run(
    setup: Setup, shapes: Mapping[str, str], *, rows: int, phase: str = "train"
) -> dict[str, Any]:
    """Return the key of a run. Call it inside the memory limit, which is part of the key."""
    modules, device, optimizer = setup.modules, setup.device, setup.optimizer
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return {
        # torch.compile returns an object of another class, which holds the model.
        "model": " + ".join(type(getattr(each, "_orig_mod", each)).__name__ for each in modules),
        "structure": digest_of(list(map(_structure, modules))),
        "parameters": sum(0 if is_uninitialized(p) else p.numel() for p in parameters.values()),
        "device": _device_name(device),
        "memory_bytes": usable_bytes(device),
        "precision": setup.precision,
        "phase": phase,
        "compiled": any(is_compiled(part) for module in modules for part in module.modules()),
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "rows": rows,  # of the batch
        "shapes": shapes,  # of its tensors by path, without the rows
        "world_size": setup.ranks.world_size,
        "automicro": __version__,
        "torch": str(torch.__version__),
    }


def describe_shapes(batch: Any, *, layout: BatchLayout | None = None) -> dict[str, str]:
    """Return dtype and dimensions of each tensor in a batch by path, without the number of rows.

    >>> describe_shapes({"ids": torch.zeros(4, 7), "scale": torch.tensor(2.0)})
    {'*.scale': 'float32[]', 'ids': 'float32[?]'}
    >>> describe_shapes([{"x": torch.zeros(n)} for n in (2, 3, 3)])
    {'*.x': 'float32[?]'}
    """
    # Lengths count as the cost of a row, which can differ in each batch. Rows that are not
    # collated, each with tensors of its own, are described together.
    row_dims = (layout or BatchLayout()).row_dims(batch)
    found: dict[str, set[str]] = {}
    for path, tensor in tensor_leaves(batch):
        has_rows = path in row_dims
        # A tensor that is not cut might belong to one of many rows: its number is not structure.
        name = path if has_rows else f"*.{_NUMBER.sub('*', path)}".replace("*.*", "*", 1)
        kind = str(tensor.dtype).removeprefix("torch.")
        found.setdefault(name, set()).add(f"{kind}[{', '.join('?' * (tensor.dim() - has_rows))}]")
    return {name: " or ".join(sorted(found[name])) for name in sorted(found)}


def _structure(module: nn.Module) -> list[Any]:
    """Return classes, which affect memory, and tensors, with tied ones under all their names."""
    content: list[Any] = [[name, type(part).__name__] for name, part in module.named_modules()]
    for of in (module.named_parameters, module.named_buffers):
        for name, tensor in of(remove_duplicate=False):
            shape = None if is_uninitialized(tensor) else list(tensor.shape)
            content.append([of.__name__, name, shape, str(tensor.dtype), tensor.requires_grad])
    return content


def _device_name(device: torch.device) -> str:
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type.upper() if get_name is None else str(get_name(device))


def usable_bytes(device: torch.device | str) -> int | None:
    """Return the total memory that this process may use on a device, or None if unknown."""
    device = torch.device(device)
    if device.type == "cpu":
        return capacity_bytes(device)
    total = total_bytes(device)
    return None if total is None else round(total * share_of(device))
