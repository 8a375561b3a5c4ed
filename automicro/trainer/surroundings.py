"""The surroundings of a run: determinism, the memory limit, notes on errors."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import nn

from automicro.errors import DeterminismWarning, add_note, warn
from automicro.memory.budget import active_budget
from automicro.memory.device import limit_memory
from automicro.memory.residents import track_residents
from automicro.torch_private import (
    inductor_is_deterministic,
    is_uninitialized,
    set_inductor_deterministic,
)
from automicro.trainer.context import RunContext
from automicro.trainer.processes import Process
from automicro.trainer.progress import Progress, make_progress

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_VALUES = (":4096:8", ":16:8")


def prepare_cublas(device: torch.device | str) -> None:
    """Tell cuBLAS to be deterministic, which it asks for when it is first used.

    Sets the environment variable ``CUBLAS_WORKSPACE_CONFIG`` and leaves it set: cuBLAS and torch
    read it once in the life of a process. Call it before anything computes on the device, best
    before anything lies there. Nothing happens where the device has no cuBLAS.

    Example:
        >>> prepare_cublas("cpu")
    """
    name = str(device).partition(":")[0]
    is_cuda = torch.cuda.is_available() if name == "auto" else name == "cuda"
    if not is_cuda or torch.version.cuda is None:
        return
    value = os.environ.get(CUBLAS_VARIABLE)
    if value in CUBLAS_VALUES:
        return
    remedy = (
        f"set {CUBLAS_VARIABLE}={CUBLAS_VALUES[0]} in the environment before Python starts, or "
        "leave deterministic=True out"
    )
    if value is not None:
        raise ValueError(f"{CUBLAS_VARIABLE}={value} is not deterministic; {remedy}")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        warn(
            f"{CUBLAS_VARIABLE} is set while CUDA is in use already: if matrices have been "
            "multiplied on the device before, cuBLAS does not see it, and runs may differ. Make "
            f"the Trainer before anything computes there, or {remedy}",
            DeterminismWarning,
        )
    os.environ[CUBLAS_VARIABLE] = CUBLAS_VALUES[0]


@contextlib.contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Use deterministic algorithms only; all settings are put back afterwards.

    The same run on the same machine then gives the same bits. It does not seed: ``seed=`` does.
    Whether ``torch.empty`` fills its memory stays as it is (torch does it in this mode unless
    ``torch.utils.deterministic.fill_uninitialized_memory`` says otherwise): without, a model that
    reads what it never wrote would differ from run to run, unnoticed.

    Example:
        >>> with deterministic_algorithms(torch.device("cpu")):
        ...     torch.are_deterministic_algorithms_enabled()
        True
    """
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


def refuse_lazy(option: str, modules: Iterable[nn.Module]) -> None:
    """Refuse modules that have no shape yet, for an option that needs it before the first batch.

    >>> refuse_lazy("parallel='ddp'", [nn.Linear(2, 2)])
    """
    for module in modules:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if is_uninitialized(tensor):
                raise ValueError(
                    f"{option}, but {name!r} of {type(module).__name__} gets its shape from the "
                    "first batch and has none yet; run the model on one row before, give the layer "
                    "its shape, or leave the option out"
                )


@dataclass(kw_only=True, eq=False)
class RunSurroundings:
    """Runs under one memory limit, with everything resident counted, and progress shown.

    Attributes:
        shows_progress: whether to show how it goes.
        place: of this process: the first shows it for all.
        memory_limit: of the device; None for none.
        device: where it runs.
        residents: what lies there all the time.
        deterministic: whether to refuse algorithms that are not.
        console: where progress is shown; None for the usual one.
    """

    shows_progress: bool
    place: Process
    memory_limit: str | int | float | None
    device: torch.device
    residents: Sequence[nn.Module | torch.optim.Optimizer]
    deterministic: bool
    console: Console | None = None
    _is_open: bool = False

    def __post_init__(self) -> None:
        make_progress(self.shows_progress)  # refuses what is not True or False
        if self.memory_limit is not None:
            limit_memory(self.memory_limit, self.device)  # refuses what cannot be a limit

    @contextlib.contextmanager
    def open(self, context: RunContext) -> Iterator[None]:
        """Run inside; the context's progress is shown. Inside of itself it changes nothing."""
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
            shown = make_progress(self.shows_progress and self.place.is_first, self.console)
            context.progress, self._is_open = stack.enter_context(shown), True
            try:
                yield
            finally:
                context.progress, self._is_open = Progress(), False


@contextlib.contextmanager
def noting(describe: Callable[[], str]) -> Iterator[None]:
    """Add to every exception where it was raised.

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
