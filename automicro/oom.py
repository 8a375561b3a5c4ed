"""What counts as out of memory, and giving the memory of a failed attempt back.

Recognition is strict on both sides. A missed text ends a run that could have gone on; a wrong
match retries a bug at ever smaller sizes. So an error counts by its type where torch has one, and
otherwise only if its text *begins* like one that torch or a driver writes.
"""

import enum
import gc
import logging
import re
import traceback
from collections.abc import Iterator
from typing import NamedTuple

import torch

from automicro.errors import AutomicroError

logger = logging.getLogger(__name__)


class Failure(enum.Enum):
    """What an exception means for the attempt that it ended."""

    RETRYABLE = "memory ran out: roll back and try again with fewer rows"
    CONTEXT_LOST = "the device or communicator is unusable until the process starts again"
    UNRELATED = "not an out-of-memory error that fewer rows can help"


class _Sign(NamedTuple):
    begins: str
    means: Failure
    source: str


_LOST = (
    r"(an illegal memory access|an illegal instruction|a(n)? misaligned address|misaligned address"
    r"|device-side assert|unspecified launch failure|the launch timed out|unknown error"
    r"|uncorrectable (ECC|NVLink) error|hardware stack error|invalid program counter"
    r"|operation not supported on global/shared address space|context is destroyed)"
)

# The first row that fits decides. Patterns are anchored at the beginning of the text.
_SIGNS = (
    # Fewer rows do not help: the loader makes whole batches, in a process or thread of its own.
    _Sign(r"Caught \w+ in (DataLoader worker|pin memory)", Failure.UNRELATED, "DataLoader"),
    # A communicator that failed on one rank hangs or fails on the others: no retry is safe.
    _Sign(r"(\[[^\]]*\]:? *)*(NCCL|RCCL) [Ee]rror\b", Failure.CONTEXT_LOST, "NCCL, RCCL"),
    _Sign(r"nccl(UnhandledCuda|System|Internal)Error\b", Failure.CONTEXT_LOST, "NCCL"),
    _Sign(rf"(CUDA|HIP)( driver)? error: {_LOST}", Failure.CONTEXT_LOST, "CUDA, HIP"),
    _Sign(rf"Triton Error \[(CUDA|HIP)\]:.*?{_LOST}", Failure.CONTEXT_LOST, "Triton"),
    _Sign(r".*\bUR_RESULT_ERROR_DEVICE_LOST\b", Failure.CONTEXT_LOST, "XPU"),
    # Allocators.
    _Sign(r"[A-Z]{2,5} out of memory(\.|:|$)", Failure.RETRYABLE, "CUDA, HIP, XPU, NPU"),
    _Sign(r"(CUDA|HIP)( driver)? error: out of memory\b", Failure.RETRYABLE, "CUDA, HIP"),
    _Sign(r"(cuda|hip) runtime error \(2\) ?: out of memory", Failure.RETRYABLE, "CUDA, HIP"),
    _Sign(r"MPS backend out of memory\b", Failure.RETRYABLE, "MPS"),
    _Sign(
        r"(Native API failed|level_zero backend failed)\b.*?\b(UR_RESULT|PI)_ERROR_OUT_OF_"
        r"(DEVICE_MEMORY|HOST_MEMORY|RESOURCES)\b",
        Failure.RETRYABLE,
        "XPU",
    ),
    _Sign(
        r"(\[enforce fail at [^\]]*\][^\n]{0,80}?)?DefaultCPUAllocator: "
        r"(can't allocate|not enough) memory",
        Failure.RETRYABLE,
        "CPU (Linux, macOS; Windows)",
    ),
    _Sign(r"std::bad_alloc$", Failure.RETRYABLE, "C++"),
    # Libraries that allocate workspace of their own.
    _Sign(
        r"(CUDA|HIP) error: (CU|HIP|ROC)(BLAS|SPARSE)_STATUS_(ALLOC_FAILED|INSUFFICIENT_RESOURCES)",
        Failure.RETRYABLE,
        "cuBLAS, cuSPARSE, hipBLAS, hipSPARSE",
    ),
    # With no memory left for a handle, cuBLAS often says that it was not initialised. So it does
    # after an assertion on the device, but then giving memory back raises that one.
    _Sign(
        r"(CUDA|HIP) error: (CU|HIP|ROC)BLAS_STATUS_NOT_INITIALIZED when calling "
        r"`(cu|hip|roc)blas(Create|_create_handle)",
        Failure.RETRYABLE,
        "cuBLAS, hipBLAS",
    ),
    _Sign(
        r"(CUDA|HIP) error: (insufficient resources|resource allocation failed) when calling",
        Failure.RETRYABLE,
        "cuSPARSE, in words",
    ),
    _Sign(
        r"(cu|hip|roc)solver error: (CU|HIP|ROC)SOLVER_STATUS_ALLOC_FAILED",
        Failure.RETRYABLE,
        "cuSOLVER, hipSOLVER",
    ),
    _Sign(r"(cu|hip)FFT error: (CU|HIP)FFT_ALLOC_FAILED", Failure.RETRYABLE, "cuFFT, hipFFT"),
    _Sign(
        r"cuDNN error: CUDNN_STATUS_(ALLOC_FAILED"
        r"|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED)",
        Failure.RETRYABLE,
        "cuDNN",
    ),
    # cuDNN says so when no algorithm's workspace fits; the input is contiguous after all.
    _Sign(
        r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\. This error may appear if you passed in a "
        r"non-contiguous input",
        Failure.RETRYABLE,
        "cuDNN",
    ),
    _Sign(
        r"Unable to find a valid cuDNN algorithm to run convolution", Failure.RETRYABLE, "cuDNN 7"
    ),
    _Sign(
        r"(FIND|GET) was unable to find an engine to execute this computation",
        Failure.RETRYABLE,
        "cuDNN 8 and 9",
    ),
    _Sign(r"MIOpen [Ee]rror: miopenStatusAllocFailed", Failure.RETRYABLE, "MIOpen"),
    # Not Triton's OutOfResources: a kernel too large for shared memory is so at every size.
    _Sign(r"Triton Error \[(CUDA|HIP|ZE)\]:[^\n]*\bout of memory$", Failure.RETRYABLE, "Triton"),
)
_COMPILED = tuple((re.compile(sign.begins), sign.means) for sign in _SIGNS)

# nn.DataParallel quotes the traceback of a replica; the error itself follows it.
_REPLICA = re.compile(r"\ACaught \w+ in replica \d+ on device .*?^\w[\w.]*: ", re.S | re.M)

_ACCELERATOR_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation and hipErrorOutOfMemory alike


def classify(exception: BaseException) -> Failure:
    """Tell whether memory ran out, the device was lost, or it is something else.

    Looks at the exception and at those that it was explicitly raised from (``__cause__``). A lost
    device anywhere in that chain wins: nothing can be retried on it. Errors of automicro itself
    are decisions already taken, so they are never retried, even when memory was their cause.

    >>> classify(RuntimeError("CUDA error: out of memory"))
    <Failure.RETRYABLE: 'memory ran out: roll back and try again with fewer rows'>
    >>> classify(RuntimeError("CUDA graph pool is out of memory slots")).name
    'UNRELATED'
    >>> classify(RuntimeError("CUDA error: device-side assert triggered")).name
    'CONTEXT_LOST'
    """
    found = {_classify_one(error) for error in _walk(exception, causes_only=True)}
    for failure in (Failure.CONTEXT_LOST, Failure.UNRELATED, Failure.RETRYABLE):
        if failure in found:
            return failure
    return Failure.UNRELATED


def is_out_of_memory(exception: BaseException) -> bool:
    """Tell whether rolling back and trying again with fewer rows can help.

    False for a lost device, whatever it says about memory, for a failed DataLoader worker, and
    for automicro's own errors such as ``SampleTooLargeError``, which come after the last retry.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    True
    >>> is_out_of_memory(ValueError("the manual says: CUDA out of memory."))
    False
    """
    return classify(exception) is Failure.RETRYABLE


def first_line(error: BaseException) -> str:
    r"""What an error says, without what follows.

    >>> first_line(RuntimeError("CUDA out of memory.\nGPU 0 has …")), first_line(MemoryError())
    ('CUDA out of memory.', 'MemoryError')
    """
    return next(iter(text_of(error).splitlines()), type(error).__name__)


def text_of(error: BaseException) -> str:
    """An error's text, also where it cannot be made.

    >>> text_of(ValueError("a mistake"))
    'a mistake'
    """
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be made: {type(failure).__name__})"


def release(exception: BaseException, device: torch.device | str | None = None) -> None:
    """Give back the memory that a failed attempt still holds.

    Call it *outside* ``except``, in the thread that ran the attempt: inside, the interpreter
    still holds the frames of the failed forward, and with them its activations. Clears the locals
    of every finished frame that the exception, its causes and contexts passed through (tracebacks
    stay printable), makes autograd let go of a half-run backward, collects cycles, and empties
    the cache of ``device``.

    Raises:
        Exception: what the device says, if it is no longer usable.

    >>> failed = None
    >>> try:
    ...     raise torch.OutOfMemoryError("CUDA out of memory.")
    ... except torch.OutOfMemoryError as error:
    ...     failed = error
    >>> release(failed)
    """
    for error in _walk(exception, causes_only=False):
        traceback.clear_frames(error.__traceback__)
    device = torch.device("cpu" if device is None else device)
    _finish_backward(torch.device("cpu"))
    if device.type != "cpu":
        _finish_backward(device)
    # Frames are not all: a recursive closure, or a graph node whose context refers to itself, is
    # a cycle that only the collector frees. This path is rare, so its time does not matter.
    gc.collect()
    empty_cache(device)


def empty_cache(device: torch.device | str) -> None:
    """Give memory that torch's allocator keeps for later back to the device. No-op on the CPU.

    >>> empty_cache("cpu")
    """
    device = torch.device(device)
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _classify_one(exception: BaseException) -> Failure | None:
    """Judge one exception without its chain; None where it says nothing about memory."""
    if isinstance(exception, AutomicroError):
        return Failure.UNRELATED
    if _is_backend_error(exception):
        return Failure.CONTEXT_LOST
    # Whatever torch, Triton or a driver raises is one of these; a ValueError only quotes them.
    if not isinstance(exception, RuntimeError | MemoryError):
        return None
    text = _REPLICA.sub("", text_of(exception), count=1)
    for pattern, means in _COMPILED:
        if pattern.match(text):
            return means
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return Failure.RETRYABLE
    if isinstance(exception, torch.AcceleratorError):
        code = getattr(exception, "error_code", None)
        return Failure.RETRYABLE if code == _ACCELERATOR_OUT_OF_MEMORY else None
    return None


def _is_backend_error(exception: BaseException) -> bool:
    return torch.distributed.is_available() and isinstance(
        exception, torch.distributed.DistBackendError
    )


def _walk(exception: BaseException, *, causes_only: bool) -> Iterator[BaseException]:
    """Yield an exception and those it came from, each once, however they refer to each other."""
    waiting: list[BaseException | None] = [exception]
    seen: set[int] = set()
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        waiting.append(error.__cause__)
        # Of a compiler that failed: torch raises its own error "from None" and keeps this one.
        inner = getattr(error, "inner_exception", None)
        waiting.append(inner if isinstance(inner, BaseException) else None)
        if not causes_only:
            waiting.append(error.__context__)
            if isinstance(error, BaseExceptionGroup):
                waiting.extend(error.exceptions)


def _finish_backward(device: torch.device) -> None:
    """Run an empty backward, because only the next one drops what a failed one left queued.

    After an exception in one branch of a graph, autograd's queue keeps the nodes of the other
    branches, with their saved tensors, until this thread runs a backward again. Tensors of zero
    elements make one that needs no memory.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.empty(0, device=device, requires_grad=True)
            gradient = torch.empty(0, device=device)
            torch.autograd.grad(leaf.view(0), leaf, gradient)
    except (RuntimeError, MemoryError) as error:
        if classify(error) is not Failure.RETRYABLE:
            raise
        logger.debug("No memory for an empty backward on %s: %s", device, error)
