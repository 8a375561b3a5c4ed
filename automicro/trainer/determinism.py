"""Deterministic algorithms for the whole of a run, and the settings from before afterwards."""

import contextlib
import os
from collections.abc import Iterator

import torch

from automicro.errors import DeterminismWarning, add_note, text_of
from automicro.torch_private_compiler import inductor_is_deterministic, set_inductor_deterministic
from automicro.warn import warn

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_VALUES = (":4096:8", ":16:8")

_SIGNS = (
    "does not have a deterministic implementation",
    "Deterministic behavior was enabled with either",  # cuBLAS without its variable
)


def prepare_cublas(device: torch.device | str) -> None:
    """Tell cuBLAS to be deterministic, which it asks for when it is first used.

    Sets the environment variable ``CUBLAS_WORKSPACE_CONFIG`` and leaves it set: cuBLAS and torch
    read it once in the life of a process. Call it before anything computes on the device, best
    before anything lies there. Nothing happens where the device has no cuBLAS.

    Args:
        device: where the model will compute; ``"auto"`` is CUDA where there is a GPU.

    Raises:
        ValueError: the variable has a value that is not deterministic.

    Warns:
        DeterminismWarning: CUDA is in use already, so cuBLAS may have asked.

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
        raise ValueError(
            f"deterministic=True, but the environment has {CUBLAS_VARIABLE}={value}, with which "
            f"cuBLAS is not deterministic; {remedy}"
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        warn(
            f"deterministic=True on {device} needs {CUBLAS_VARIABLE}, and CUDA is in use already "
            "(the model lies on the device, perhaps). It is set now; if matrices have been "
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
    reads what it never wrote would differ from run to run, and nobody would notice.

    Args:
        device: where the model computes. See `prepare_cublas`, which is called here, too.

    Raises:
        RuntimeError: an operation has no deterministic implementation. That is torch's own error,
            with a note that says what helps.

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
    except RuntimeError as error:
        if any(sign in text_of(error) for sign in _SIGNS):
            add_note(
                error,
                "automicro: deterministic=True asks for this error; replace the operation by one "
                "that is deterministic, or leave deterministic=True out",
            )
        raise
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        set_inductor_deterministic(compiled)
        cudnn.benchmark = benchmark
        cudnn.deterministic = cudnn_deterministic
