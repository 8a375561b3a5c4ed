"""Classify errors as out of memory, and release the memory of a failed attempt.

Recognition is strict in both directions. A missed text ends a run that could have continued, and a
wrong match retries a bug at ever smaller sizes. So an error counts by its type if torch has one,
and otherwise only if its text *begins* like one that torch, a library or a driver writes.

Errors are often wrapped. An error raised ``from`` an out-of-memory error stands for it. So does an
error that was raised while one was handled and *quotes* it. Any other error that follows is a
separate error, for example of a fallback that was tried instead.
"""

import enum
import errno
import gc
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch

from automicro.errors import AutomicroError, RollbackError, add_note, text_of

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Failure(enum.Enum):
    """The meaning of an exception for the attempt that it ended."""

    RETRYABLE = "memory ran out: roll back and try again with fewer rows"
    CONTEXT_LOST = "the device or communicator is unusable until the process starts again"
    UNRELATED = "not an out-of-memory error that fewer rows can help"


_LOST = (
    r"(an illegal memory access|an illegal instruction|a(n)? misaligned address|misaligned address"
    r"|device-side assert|unspecified launch failure|the launch timed out|unknown error"
    r"|uncorrectable (ECC|NVLink) error|hardware stack error|invalid program counter"
    r"|operation not supported on global/shared address space|context is destroyed"
    r"|an exception occurred on the device|driver shutting down"
    r"|[Ii]nvalid access of peer GPU memory)"
)

# Fewer rows do not help: the loader makes whole batches, in its own process or thread.
_UNRELATED = (r"Caught \w+ in (DataLoader worker|pin memory)",)

# A communicator that failed on one rank hangs or fails on the others: no retry is safe.
_CONTEXT_LOST = (
    r"(\[[^\]]*\]:? *)*(NCCL|RCCL) [Ee]rror\b",
    r"nccl(UnhandledCuda|System|Internal)Error\b",
    rf"(CUDA|HIP)( driver)? error: {_LOST}",
    rf"Triton Error \[(CUDA|HIP)\]:.*?{_LOST}",
    r".*\bUR_RESULT_ERROR_DEVICE_LOST\b",  # XPU
)

_RETRYABLE = (
    # Allocators: torch's, those of CUDA and HIP (also in flash-attention), cudaMallocAsync.
    r"(CUDA|HIP|XPU|NPU|MPS|MLU|HPU|MUSA|GCU|GPU|TPU|CPU) out of memory(\.|:|$)",
    r"(CUDA|HIP)( driver| runtime)? [Ee]rror:? ?(\([^()\n]{0,200}\))?( at [^\n]{0,200}?)?"
    r"(: ?| )out of memory\b",
    r"Allocation on device \d+ would exceed allowed memory\. \(out of memory\)",
    # The allocator asks the driver which processes hold memory before it reports the error. On some
    # machines (MIG, containers) the driver does not answer. Nothing else fails at this point.
    r'NVML_SUCCESS == [^\n]{0,80}?INTERNAL ASSERT FAILED at "[^"\n]*CUDACachingAllocator',
    r"(cuda|hip) runtime error \(2\) ?: out of memory",
    r"MPS backend out of memory\b",
    # XPU
    r"(Native API failed|level_zero backend failed)\b.*?\b(UR_RESULT|PI)_ERROR_OUT_OF_"
    r"(DEVICE_MEMORY|HOST_MEMORY|RESOURCES)\b",
    # The CPU, on Linux, macOS and Windows.
    r"(\[enforce fail at [^\]]*\][^\n]{0,80}?)?DefaultCPUAllocator: "
    r"(can't allocate|not enough) memory",
    r"std::bad_alloc($|: out_of_memory\b)",  # C++, RMM
    r"unable to mmap [^\n]*: Cannot allocate memory \(12\)",
    r"(could not create|failed to allocate) a memory( object)?\.?$",  # oneDNN
    r"MKL FFT error: [^\n]*\b([Mm]emory allocation failed|[Ii]nsufficient memory)",
    # Libraries that allocate workspace of their own.
    r"(CUDA|HIP) error: (CU|HIP|ROC)(BLAS|SPARSE)_STATUS_(ALLOC_FAILED|INSUFFICIENT_RESOURCES)",
    # If no memory is left for a handle, cuBLAS often reports that it was not initialized. It also
    # does so after an assertion on the device, but then releasing memory raises that assertion.
    r"(CUDA|HIP) error: (CU|HIP|ROC)(BLAS|SPARSE)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR),? "
    r"when calling `(cu|hip|roc)(blas|blasLt|sparse)(Create\(|_create_handle)",
    r"(cu|hip|roc)solver error: (CU|HIP|ROC)SOLVER_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR),? "
    r"when calling `(cu|hip|roc)solver(Dn|Sp)?Create\(",
    r"(CUDA|HIP) error: (insufficient resources|resource allocation failed) when calling",
    r"(cu|hip|roc)solver error: (CU|HIP|ROC)SOLVER_STATUS_ALLOC_FAILED",
    r"(cu|hip)FFT error: (CU|HIP)FFT_ALLOC_FAILED",
    r"cuDNN error: CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED)",
    # cuDNN reports this if no algorithm's workspace fits, even with contiguous inputs.
    r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\. This error may appear if you passed in a "
    r"non-contiguous input",
    r"Unable to find a valid cuDNN algorithm to run convolution",  # cuDNN 7
    r"(FIND|GET) was unable to find an engine to execute this computation",  # cuDNN 8 and 9
    r"(miopenStatusAllocFailed|MIOpen(\(HIP\))?:? [Ee]rror:? [^\n]*"
    r"(miopenStatusAllocFailed|\b[Oo]ut of memory\b))",
    # Triton's OutOfResources is excluded: its kernels are too large for shared memory at any size.
    r"Triton Error \[(CUDA|HIP|ZE)\]:[^\n]*\bout of memory$",
    # Other libraries that share the device: jax and XLA, bitsandbytes, spconv and cumm.
    r"RESOURCE_EXHAUSTED: [^\n]*?(\b([Oo]ut|[Rr]an out) of memory\b|\bOOM\b"
    r"|\b[Ff]ailed to allocate\b|\ballocating \d)",
    r"Error out of memory at line \d+ in file ",
    r"[^\n]{0,300}?\bcuda (execution )?failed with error 2\b",
    # Names of the driver's own error, in any position: cupy, thrust, numba, rmm …
    r"[^\n]{0,300}?\b(CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|hipErrorOutOfMemory|hipErrorMemoryAllocation)(: out of memory|[.)\]'\"]|\s|$)",
    r"cu\w+ failed: out of memory\b",  # pycuda
)

# If no memory is left for a handle or its code, cuDNN and cuFFT give no better reason.
_RETRYABLE_IF_FULL = (
    r"cuDNN error: CUDNN_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\b",
    r"(cu|hip)FFT error: (CU|HIP)FFT_INTERNAL_ERROR",
)

# The first match decides. Patterns are anchored at the beginning of the text.
_SIGNS = tuple(
    (re.compile(begins), means, signs is _RETRYABLE_IF_FULL)
    for signs, means in (
        (_UNRELATED, Failure.UNRELATED),
        (_CONTEXT_LOST, Failure.CONTEXT_LOST),
        (_RETRYABLE, Failure.RETRYABLE),
        (_RETRYABLE_IF_FULL, Failure.RETRYABLE),
    )
    for begins in signs
)

# A device with less than this share left counts as full.
_FULL = 0.01

# nn.DataParallel and TorchScript quote a traceback; the error itself follows it.
_QUOTED_TRACEBACK = re.compile(
    r"\A(Caught \w+ in replica \d+ on device "
    r"|The following operation failed in the TorchScript interpreter\.).*?^\w[\w.]*: ",
    re.S | re.M,
)

# Libraries whose device errors are not RuntimeErrors. Errors of all others only quote these texts.
_LIBRARIES = ("cupy", "cupy_backends", "jax", "jaxlib", "numba", "pycuda", "rmm", "tensorflow")

# Checked only in errors raised while an out-of-memory error was handled; alone it proves nothing.
_SPEAKS_OF_MEMORY = re.compile(r"\b(out|short) of memory\b|\bOOM\b|OutOfMemory|MemoryError", re.I)

# A shorter text might occur in another one by chance.
_LEAST_QUOTE = 8

_ACCELERATOR_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, hipErrorOutOfMemory


def classify(exception: BaseException) -> Failure:
    """Return whether memory ran out, the device was lost, or neither.

    >>> classify(RuntimeError("CUDA error: out of memory"))
    <Failure.RETRYABLE: 'memory ran out: roll back and try again with fewer rows'>
    >>> classify(RuntimeError("CUDA graph pool is out of memory slots")).name
    'UNRELATED'
    >>> classify(RuntimeError("CUDA error: device-side assert triggered")).name
    'CONTEXT_LOST'
    """
    # The exception itself counts, those that it was raised from (``__cause__``), and those that it
    # was raised while handling and quotes (``__context__``). A lost device anywhere in the chain
    # decides, because no retry is possible. Errors of automicro are final decisions and are never
    # retried, nor are exceptions such as Ctrl-C. All members of a group must be out of memory.
    return _classify(exception, set())


def _classify(exception: BaseException, seen: set[int]) -> Failure:
    found = {_classify_one(error, seen) for error in _walk(exception, seen, _what_it_stands_for)}
    # Ctrl-C is a request to stop, even if it came while memory ran out.
    if not isinstance(exception, Exception):
        found.discard(Failure.RETRYABLE)
    order = Failure.CONTEXT_LOST, Failure.UNRELATED, Failure.RETRYABLE
    return next((each for each in order if each in found), Failure.UNRELATED)


def is_out_of_memory(exception: BaseException) -> bool:
    """Return whether rolling back and retrying with fewer rows can help.

    Returns False for a lost device, even if the error mentions memory, for a failed DataLoader
    worker, and for errors of automicro such as ``SampleTooLargeError``, which follow the last
    retry.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    True
    >>> is_out_of_memory(ValueError("the manual says: CUDA out of memory."))
    False
    """
    return classify(exception) is Failure.RETRYABLE


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return next(iter(text_of(error).splitlines()), type(error).__name__)


def release(exception: BaseException, device: torch.device | str | None = None) -> None:
    """Release the memory of a failed attempt; call this in the same thread, outside ``except``.

    >>> failed = None
    >>> try:
    ...     raise torch.OutOfMemoryError("CUDA out of memory.")
    ... except torch.OutOfMemoryError as error:
    ...     failed = error
    >>> release(failed)
    """
    # Inside ``except``, the interpreter still holds the frames of the failed forward, and with them
    # its activations. Tracebacks stay printable after their frames are cleared.
    for error in _walk(exception, set(), _what_it_holds):
        traceback.clear_frames(error.__traceback__)
    device = torch.device("cpu" if device is None else device)
    # Each device, including the CPU, has its own queue in autograd.
    _finish_backward(torch.device("cpu"))
    devices = _accelerators_in_use(device)
    for each in devices:
        _finish_backward(each)
        # This completes pending work, whose memory is then free, and raises the error of a device
        # that was lost in the meantime.
        torch.get_device_module(each).synchronize(each)
    # Frames are not enough: a recursive closure, or a graph node whose context refers to itself, is
    # a cycle that only the collector frees. This path is rare, so its time does not matter.
    gc.collect()
    for each in devices:
        empty_cache(each)


def caught(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Return the result of work, or the error that it raised.

    >>> caught(lambda: 1 // 0)
    (None, ZeroDivisionError('integer division or modulo by zero'))
    """
    # Inside ``except``, the traceback keeps the tensors of a failed call alive, so no memory can be
    # released.
    try:
        return work(), None
    except BaseException as error:
        return None, error


def surely(work: Callable[[], object]) -> None:
    """Run work that must not stay half done: if it fails or Ctrl-C interrupts it, run it again.

    >>> left = ["half", "whole"]
    >>> def work():
    ...     if left.pop(0) == "half":
    ...         raise torch.OutOfMemoryError("CUDA out of memory.")
    >>> surely(work)
    >>> left
    []
    """
    _, first = caught(work)
    if first is None:
        return
    try:
        work()
        if isinstance(first, RollbackError):  # the second run has resolved it
            first = first.__cause__ or first
        if classify(first) is not Failure.RETRYABLE:
            raise first
    finally:
        del first  # break the reference cycle with the traceback


def once_more(work: Callable[[], T], device: torch.device | str | None = None, *, doing: str) -> T:
    """Run work outside attempts; if memory runs out, release some and run it once more."""
    found, failure = caught(work)
    if failure is None:
        return cast(T, found)
    try:
        if classify(failure) is not Failure.RETRYABLE:
            raise failure
        logger.warning(
            "automicro: out of memory while %s (%s): freeing memory and retrying once",
            doing,
            first_line(failure),
        )
        # Outside any `except`, see `release`.
        release(failure, device)
    finally:
        del failure  # break the reference cycle with the traceback
    try:
        return work()
    except Exception as error:
        if classify(error) is Failure.RETRYABLE:
            add_note(
                error,
                f"automicro: out of memory while {doing}, even after all free memory was "
                "released. A smaller microbatch does not help here; free memory, or keep the "
                "batch on the host",
            )
        raise


def empty_cache(device: torch.device | str) -> None:
    """Return cached memory of torch's allocator to the device; do nothing on the CPU."""
    device = torch.device(device)
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _accelerators_in_use(device: torch.device) -> list[torch.device]:
    """Return the device, unless it is the CPU, and all accelerators with memory of this process."""
    found = [] if device.type == "cpu" else [device]
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return found
    for index in range(torch.accelerator.device_count()):
        other = torch.device(kind.type, index)
        try:
            # This query allocates nothing on the device.
            is_used = other != device and torch.accelerator.memory_reserved(index) > 0
        except (NotImplementedError, RuntimeError):  # an allocator that does not count
            is_used = False
        if is_used:
            found.append(other)
    return found


def _classify_one(exception: BaseException, seen: set[int]) -> Failure | None:
    """Classify an exception without its chain; return None if it does not concern memory."""
    if isinstance(exception, AutomicroError):
        return Failure.UNRELATED
    if _is_backend_error(exception):
        return Failure.CONTEXT_LOST
    if isinstance(exception, BaseExceptionGroup):
        return _classify_group(exception, seen)
    if isinstance(exception, OSError) and exception.errno == errno.ENOMEM:
        return Failure.RETRYABLE
    # torch, Triton and drivers raise only these types; a ValueError only quotes them.
    library = type(exception).__module__.partition(".")[0]
    if not isinstance(exception, RuntimeError | MemoryError) and library not in _LIBRARIES:
        return None
    text = _QUOTED_TRACEBACK.sub("", text_of(exception), count=1)
    # Texts are checked before types, because a DataLoader raises its worker's errors in the same
    # type, and these must not be retried.
    for pattern, means, if_full in _SIGNS:
        if pattern.match(text) and (not if_full or _is_full()):
            return means
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return Failure.RETRYABLE
    # The error code is checked only if the text matched nothing: a lost device has other codes.
    if isinstance(exception, torch.AcceleratorError):
        code = getattr(exception, "error_code", None)
        return Failure.RETRYABLE if code == _ACCELERATOR_OUT_OF_MEMORY else None
    if library == "tensorflow" and type(exception).__name__ == "ResourceExhaustedError":
        return Failure.RETRYABLE
    return None


def _is_full() -> bool:
    """Whether the current device has no memory left; False if unknown."""
    try:
        free_bytes, total_bytes = torch.accelerator.get_memory_info()
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return free_bytes < _FULL * total_bytes


def _classify_group(group: BaseExceptionGroup[Any], seen: set[int]) -> Failure | None:
    members = {_classify(member, seen) for member in group.exceptions if id(member) not in seen}
    if Failure.CONTEXT_LOST in members:
        return Failure.CONTEXT_LOST
    if members == {Failure.RETRYABLE}:
        return Failure.RETRYABLE
    # Memory ran out for one member, but another failed for a reason that a retry does not remove.
    return Failure.UNRELATED if Failure.RETRYABLE in members else None


def _is_backend_error(exception: BaseException) -> bool:
    return torch.distributed.is_available() and isinstance(
        exception, torch.distributed.DistBackendError
    )


def _walk(
    exception: BaseException,
    seen: set[int],
    follow: Callable[[BaseException], Iterable[BaseException | None]],
) -> Iterator[BaseException]:
    """Yield an exception and those that it came from, each once, even if they form a cycle."""
    waiting: list[BaseException | None] = [exception]
    while waiting:
        error = waiting.pop()
        # Contexts can form a cycle.
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        waiting.extend(follow(error))


def _what_it_stands_for(error: BaseException) -> list[BaseException | None]:
    """Return the exceptions that an exception was raised instead of."""
    # When a compiler fails, torch raises its own error "from None" and keeps the original here.
    inner = getattr(error, "inner_exception", None)
    found = [error.__cause__, inner if isinstance(inner, BaseException) else None]
    # As in Python's own tracebacks, "from" hides the exception that was being handled.
    if error.__cause__ is None and not error.__suppress_context__:
        handled = error.__context__
        found.append(handled if handled is not None and _quotes(error, handled) else None)
    return found


def _what_it_holds(error: BaseException) -> list[BaseException | None]:
    # All errors that an error refers to hold frames, including those that it does not stand for.
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [*_what_it_stands_for(error), error.__context__, *members]


def _quotes(error: BaseException, other: BaseException) -> bool:
    """Whether an error quotes the beginning of another one's text, or mentions memory."""
    text, said = text_of(error), first_line(other).partition(". ")[0].rstrip(".")
    if len(said) >= _LEAST_QUOTE and said in text:
        return True
    return bool(_SPEAKS_OF_MEMORY.search(text)) and _classify_one(other, set()) is not None


def _finish_backward(device: torch.device) -> None:
    """Run an empty backward, because only the next one drops the nodes that a failed one queued."""
    # After an exception in one branch of a graph, autograd's queue keeps the nodes of the other
    # branches, with their saved tensors, until this thread runs another backward. Tensors without
    # elements need no memory for it.
    try:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.empty(0, device=device, requires_grad=True)
            gradient = torch.empty(0, device=device)
            torch.autograd.grad(leaf.view(0), leaf, gradient)
    except (RuntimeError, MemoryError) as error:
        if classify(error) is not Failure.RETRYABLE:
            raise
        logger.debug("No memory for an empty backward on %s: %s", device, text_of(error))
