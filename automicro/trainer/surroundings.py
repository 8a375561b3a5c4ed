"""The surroundings of a run: determinism, the memory limit, and notes on errors."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import nn

from automicro.errors import DeterminismWarning, add_note, warn
from automicro.memory.budget import limit_memory, track_residents
from automicro.memory.device import active_budget
from automicro.options import read_flag
from automicro.torch_private_execution import inductor_is_deterministic, set_inductor_deterministic
from automicro.trainer.context import RunContext
from automicro.trainer.processes import Process
from automicro.trainer.progress import Progress

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_VALUES = (":4096:8", ":16:8")


def prepare_cublas(device: torch.device | str) -> None:
    """Set the environment variable that makes cuBLAS deterministic."""
    # cuBLAS and torch read it once per process, so it stays set, and this must come before anything
    # is computed on the device.
    name = str(device).partition(":")[0]
    is_cuda = torch.cuda.is_available() if name == "auto" else name == "cuda"
    if not is_cuda or torch.version.cuda is None:
        return
    value = os.environ.get(CUBLAS_VARIABLE)
    if value in CUBLAS_VALUES:
        return
    remedy = (
        f"set {CUBLAS_VARIABLE}={CUBLAS_VALUES[0]} in the environment before Python starts, or "
        "leave deterministic out"
    )
    if value is not None:
        raise ValueError(f"{CUBLAS_VARIABLE}={value} is not deterministic; {remedy}")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        warn(
            f"{CUBLAS_VARIABLE} was set after CUDA was initialized. If matrices were multiplied "
            "before, cuBLAS ignores it, and runs may differ. Make the Trainer before anything "
            f"computes on the device, or {remedy}",
            DeterminismWarning,
        )
    os.environ[CUBLAS_VARIABLE] = CUBLAS_VALUES[0]


@contextlib.contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Use only deterministic algorithms in the block, and restore all settings afterwards."""
    # `fill_uninitialized_memory` is left as it is, which is True by default: without it, a model
    # that reads memory it never wrote would differ from run to run, unnoticed.
    prepare_cublas(device)
    cudnn = torch.backends.cudnn
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    compiled = inductor_is_deterministic()
    benchmark, cudnn_deterministic = cudnn.benchmark, cudnn.deterministic
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.benchmark = False
        cudnn.deterministic = True
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        set_inductor_deterministic(compiled)
        cudnn.benchmark = benchmark
        cudnn.deterministic = cudnn_deterministic


@dataclass(kw_only=True, eq=False)
class RunSurroundings:
    """Runs code under one memory limit, with all resident tensors counted, and with progress."""

    shows_progress: bool
    place: Process  # the first process shows progress for all
    memory_limit: str | int | float | None
    device: torch.device
    residents: Sequence[nn.Module | torch.optim.Optimizer]  # on the device all the time
    deterministic: bool
    console: Console | None = None
    _is_open: bool = False

    def __post_init__(self) -> None:
        read_flag("progress", self.shows_progress)
        if self.memory_limit is not None:
            limit_memory(self.memory_limit, self.device)  # raises an error if it is invalid

    @contextlib.contextmanager
    def open(self, context: RunContext) -> Iterator[None]:
        """Run the block in these surroundings and show the context's progress; reentrant."""
        if self._is_open:
            yield
            return
        with contextlib.ExitStack() as stack:
            if self.deterministic:
                stack.enter_context(deterministic_algorithms(self.device))
            if self.memory_limit is not None:
                stack.enter_context(limit_memory(self.memory_limit, self.device))
            budget = active_budget()
            if budget is not None and self.device.type == "cpu":
                track_residents(budget, self.residents)
            shows = self.shows_progress and self.place.is_first
            shown = Progress((self.console or Console()) if shows else None)
            context.progress, self._is_open = stack.enter_context(shown), True
            try:
                yield
            finally:
                context.progress, self._is_open = Progress(), False


@contextlib.contextmanager
def noting(describe: Callable[[], str]) -> Iterator[None]:
    """Add a note with the place to every exception in the block.

    >>> try:
    ...     with noting(lambda: "in epoch 2"):
    ...         raise KeyError("x")
    ... except KeyError as error:
    ...     error.__notes__
    ['automicro: in epoch 2']
    """
    try:
        yield
    except BaseException as error:
        add_note(error, f"automicro: {describe()}")
        raise
