"""Sizes that earlier runs found, for a run that starts, and those of this run for later ones."""

import contextlib
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from automicro.batch.layout import BatchLayout
from automicro.errors import SizeCacheWarning, describe_error, warn
from automicro.memory.device import usable_bytes
from automicro.options import read_flag
from automicro.policy.policy import Policy
from automicro.ranks.interface import Ranks, announcing_failure
from automicro.remembered.cache import RememberedSize, RunKey, SizeCache, digest_of
from automicro.step.feature import Feature
from automicro.step.plan import ROWS, Finished, ReadBatch
from automicro.step.setup import Setup
from automicro.torch_private import is_compiled, is_uninitialized
from automicro.version import __version__

logger = logging.getLogger(__name__)

# Batches of varying length have a size each: what is remembered of them changes by this share.
CHANGE = 0.05


class RememberSizes(Feature):
    """``"auto"`` starts from the size that an earlier run of the same kind found.

    And leaves its own for the next; see ``automicro cache``.

    Example:
        >>> import torch
        >>> from automicro import Microbatcher
        >>> microbatcher = Microbatcher(
        ...     torch.nn.Linear(8, 2), loss_fn=torch.nn.MSELoss(), features=[RememberSizes()]
        ... )

    Args:
        wanted: False for not, where a Trainer would without asking.

    Raises:
        TypeError: neither True nor False.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = read_flag("remember_sizes", wanted)

    def attach(self, setup: Setup) -> None:
        setup.recollect = Recollection if self.wanted else None


class Recollection:
    """One phase's reads from the cache of sizes, and its writes.

    Nothing in it can stop a run: whatever goes wrong is one `SizeCacheWarning`, and the run goes
    on without remembering.
    """

    def __init__(self, setup: Setup, phase: str) -> None:
        self._setup, self._phase = setup, phase
        self._has_asked = False
        self._cache: SizeCache | None = None  # None where nothing is remembered
        self._key: RunKey
        self._varies = False  # batches of several shapes were seen
        # Rows, cost of a row and level as they are in the file. Where lengths vary, no cost is:
        # rows may be longer.
        self._written: tuple[object, ...] | None = None
        self._row_cost: float | None = None
        self._size: int | None = None
        # While lengths vary: the most elements of a microbatch that fitted, of batches that were
        # cut if any was.
        self._elements, self._has_cut = 0.0, False

    def look_up(
        self, batch: ReadBatch | None, policy: Policy, *, is_new: bool, ranks: Ranks
    ) -> int | None:
        """Let a policy start from what is remembered, at the first batch of a new run.

        Returns the rows that it starts from, None where nothing was recalled.
        """
        if self._has_asked:
            if batch is not None:
                self._see(batch)
            return None
        with announcing_failure(ranks):
            found = [0.0, 0.0, 0.0]
            # Ranks may have other folders: all start from what the first one has found.
            if ranks.rank == 0 and batch is not None:
                with self._going_on():
                    found = self._recall(batch, policy.levels)
        size, cost, level = found if ranks.is_alone else ranks.from_first(found)
        self._has_asked = True
        at = {"level": int(level)} if level else {}
        if not (size and is_new and policy.suggest(int(size), cost or None, **at)):
            return None
        logger.info(
            "starting from %d rows per microbatch%s, which an earlier run found; "
            '"automicro cache" lists what is remembered',
            int(size),
            f", {policy.levels[int(level)]}" if level else "",
        )
        return int(size)

    def _shapes(self, batch: ReadBatch) -> dict[str, str]:
        return describe_shapes(batch.batch, layout=self._setup.carrying.layout)

    def _see(self, batch: ReadBatch) -> None:
        """Notice that lengths vary. While rows cost the same, shapes are not read: that is slow."""
        is_same = batch.cost is not None and batch.cost == self._row_cost
        if self._cache is None or self._varies or is_same:
            return
        with self._going_on():
            self._varies = self._shapes(batch) != self._key.shapes
        if self._varies:
            self._key, self._written = self._key.with_any_shape(), None

    def _recall(self, batch: ReadBatch, levels: Sequence[str]) -> list[float]:
        """Rows, cost of a row and level that are remembered; zeros where nothing is of use."""
        setup, self._row_cost = self._setup, batch.cost
        self._key = describe_run(
            setup.modules,
            self._shapes(batch),
            rows=batch.num_rows,
            device=setup.device,
            optimizer=setup.optimizer,
            precision=setup.precision,
            phase=self._phase,
            world_size=setup.ranks.world_size,
        )
        self._cache = SizeCache()
        found = self._cache.find(self._key)
        if found is None:
            return [0.0, 0.0, 0.0]
        self._written = found.microbatch_size, found.cost_per_row, found.level
        # The whole batch comes first anyway, and longer rows may fit as well.
        is_whole = found.level == levels[0] and found.microbatch_size >= batch.num_rows
        if is_whole or found.level not in levels:
            return [0.0, 0.0, 0.0]
        level = levels.index(found.level)
        return [float(found.microbatch_size), found.cost_per_row or 0.0, float(level)]

    def take_down(self, finished: Finished[Any]) -> None:
        """Remember the size of a step, once it is settled.

        While all batches have one shape, two in a row had it. Where lengths vary, it is the
        largest that fitted, in elements, until one of no more than these fails.
        """
        before, self._size = self._size, finished.microbatch_size
        plan, measured = finished.plan, finished.measured
        if self._cache is None or not finished.is_committed or not finished.cuts:
            return
        if plan.is_measuring or plan.unit != ROWS:
            return
        widest = max(finished.cuts, key=lambda cut: cut.largest * (cut.row_cost or 1))
        is_news = before == self._size
        if self._varies:
            cost = widest.row_cost or 1.0
            failed = min(finished.failed_sizes, default=math.inf) * cost
            is_news = self._is_news(widest.largest * cost, failed, is_cut=widest.is_split)
        # Batches of other rows, such as the last one of an epoch, say nothing of this key.
        if not is_news or widest.num_rows != self._key.rows:
            return
        size, cost_per_row, level = widest.largest, widest.row_cost or None, finished.level_name
        content = size, None if self._varies else cost_per_row, level
        if content == self._written:
            return
        self._written = content
        with self._going_on():
            self._cache.remember(
                RememberedSize(
                    key=self._key,
                    microbatch_size=size,
                    cost_per_row=cost_per_row,
                    peak_bytes=None if measured is None else measured.peak_bytes,
                    level=level,
                )
            )

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except SizeCacheWarning:  # one of those that the user wants as errors
            raise
        except Exception as error:
            self._cache = None
            warn(
                f"microbatch sizes are not remembered in this run ({describe_error(error)}); it "
                "finds them by itself, and remember_sizes=False says nothing of it",
                SizeCacheWarning,
            )

    def _is_news(self, elements: float, failed: float, *, is_cut: bool) -> bool:
        if is_cut < self._has_cut:
            return False  # a batch that went whole tells less than one that did not
        if is_cut > self._has_cut or failed <= self._elements:
            self._has_cut, self._elements = is_cut, 0.0
        if elements <= self._elements * (1 + CHANGE):
            return False
        self._elements = elements
        return True


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def describe_run(
    modules: Sequence[nn.Module],
    shapes: Mapping[str, str],
    *,
    rows: int,
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "fp32",
    phase: str = "train",
    world_size: int = 1,
) -> RunKey:
    """Return the key of a run. Call it inside the memory limit: that is part of the key.

    >>> model, batch = nn.Linear(8, 2), (torch.zeros(64, 8), torch.zeros(64))
    >>> cpu = torch.device("cpu")
    >>> key = describe_run([model], describe_shapes(batch), rows=64, device=cpu)
    >>> key.model, key.parameters, dict(key.shapes)
    ('Linear', 18, {'0': 'float32[8]', '1': 'float32[]'})
    """
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return RunKey(
        # torch.compile returns another class, which holds the model.
        model=" + ".join(type(getattr(each, "_orig_mod", each)).__name__ for each in modules),
        structure=digest_of(list(map(_structure, modules))),
        parameters=sum(0 if is_uninitialized(p) else p.numel() for p in parameters.values()),
        device=_device_name(device),
        memory_bytes=usable_bytes(device),
        precision=precision,
        phase=phase,
        compiled=any(is_compiled(part) for module in modules for part in module.modules()),
        optimizer=None if optimizer is None else type(optimizer).__name__,
        rows=rows,
        shapes=shapes,
        world_size=world_size,
        automicro=__version__,
        torch=str(torch.__version__),
    )


def describe_shapes(batch: Any, *, layout: BatchLayout | None = None) -> dict[str, str]:
    """Return dtype and shape of each tensor in a batch by its path, without the rows.

    Rows that are not collated, each with tensors of its own, are described together.

    Raises:
        BatchError: the batch cannot be read.

    >>> describe_shapes({"ids": torch.zeros(4, 7), "scale": torch.tensor(2.0)})
    {'*.scale': 'float32[]', 'ids': 'float32[7]'}
    >>> describe_shapes([{"x": torch.zeros(n)} for n in (2, 3, 3)])
    {'*.x': 'float32[2] or float32[3]'}
    """
    layout = BatchLayout() if layout is None else layout
    row_dims = layout.row_dims(batch)
    found: dict[str, set[str]] = {}
    for path, tensor in layout.leaves(batch):
        dim = row_dims.get(path)
        # What is not cut along a dimension may be one row of many: its number is no structure.
        name = path if dim is not None else f"*.{_NUMBER.sub('*', path)}".replace("*.*", "*", 1)
        kind = str(tensor.dtype).removeprefix("torch.")
        text = f"nested {kind} of {tensor.dim()} dimensions"
        if not tensor.is_nested:  # else its shape may be unknown
            text = f"{kind}{[length for at, length in enumerate(tensor.shape) if at != dim]}"
        found.setdefault(name, set()).add(text)
    return {name: " or ".join(sorted(found[name])) for name in sorted(found)}


def _structure(module: nn.Module) -> list[Any]:
    """Classes, for some keep more for backward; tensors, tied ones under each of their names."""
    content: list[Any] = [[name, type(part).__name__] for name, part in module.named_modules()]
    for of in (module.named_parameters, module.named_buffers):
        for name, tensor in of(remove_duplicate=False):
            shape = None if is_uninitialized(tensor) else list(tensor.shape)
            content.append([of.__name__, name, shape, str(tensor.dtype), tensor.requires_grad])
    return content


def _device_name(device: torch.device) -> str:
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type.upper() if get_name is None else str(get_name(device))
