"""Classify errors as out of memory, and release the memory of a failed attempt.

Recognition is strict on both sides. A missed text ends a run that could have gone on; a wrong
match retries a bug at ever smaller sizes. So an error counts by its type where torch has one, and
otherwise only if its text *begins* like one that torch, a library or a driver writes.

Errors get wrapped. One that was raised ``from`` running out of memory stands for it; so does one
that was raised while that was handled and *quotes* it. Any other that follows is an error of its
own: of a fallback, say, that was tried in its place.
"""

import contextlib
import enum
import errno
import gc
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch

from automicro.errors import AutomicroError, RollbackError, add_note, text_of

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Failure(enum.Enum):
    """The meaning of an exception for the attempt that it ended."""

    RETRYABLE = "memory ran out: roll back and try again with fewer rows"
    CONTEXT_LOST = "the device or communicator is unusable until the process starts again"
    UNRELATED = "not an out-of-memory error that fewer rows can help"


class _Sign(NamedTuple):
    begins: str
    source: str
    means: Failure = Failure.RETRYABLE
    if_full: bool = False  # means nothing where the device has memory left


_LOST = (
    r"(an illegal memory access|an illegal instruction|a(n)? misaligned address|misaligned address"
    r"|device-side assert|unspecified launch failure|the launch timed out|unknown error"
    r"|uncorrectable (ECC|NVLink) error|hardware stack error|invalid program counter"
    r"|operation not supported on global/shared address space|context is destroyed"
    r"|an exception occurred on the device|driver shutting down"
    r"|[Ii]nvalid access of peer GPU memory)"
)

# The first row that fits decides. Patterns are anchored at the beginning of the text.
_SIGNS = (
    # Fewer rows do not help: the loader makes whole batches, in a process or thread of its own.
    _Sign(r"Caught \w+ in (DataLoader worker|pin memory)", "DataLoader", Failure.UNRELATED),
    # A communicator that failed on one rank hangs or fails on the others: no retry is safe.
    _Sign(r"(\[[^\]]*\]:? *)*(NCCL|RCCL) [Ee]rror\b", "NCCL, RCCL", Failure.CONTEXT_LOST),
    _Sign(r"nccl(UnhandledCuda|System|Internal)Error\b", "NCCL", Failure.CONTEXT_LOST),
    _Sign(rf"(CUDA|HIP)( driver)? error: {_LOST}", "CUDA, HIP", Failure.CONTEXT_LOST),
    _Sign(rf"Triton Error \[(CUDA|HIP)\]:.*?{_LOST}", "Triton", Failure.CONTEXT_LOST),
    _Sign(r".*\bUR_RESULT_ERROR_DEVICE_LOST\b", "XPU", Failure.CONTEXT_LOST),
    # Allocators.
    _Sign(
        r"(CUDA|HIP|XPU|NPU|MPS|MLU|HPU|MUSA|GCU|GPU|TPU|CPU) out of memory(\.|:|$)",
        "torch's allocators",
    ),
    _Sign(
        r"(CUDA|HIP)( driver| runtime)? [Ee]rror:? ?(\([^()\n]{0,200}\))?( at [^\n]{0,200}?)?"
        r"(: ?| )out of memory\b",
        "CUDA, HIP; flash-attention",
    ),
    _Sign(
        r"Allocation on device \d+ would exceed allowed memory\. \(out of memory\)",
        "cudaMallocAsync",
    ),
    # The allocator asks the driver who holds the memory before it reports, and on some machines
    # (MIG, containers) the driver does not answer. Nothing else comes this way.
    _Sign(
        r'NVML_SUCCESS == [^\n]{0,80}?INTERNAL ASSERT FAILED at "[^"\n]*CUDACachingAllocator',
        "CUDA without NVML",
    ),
    _Sign(r"(cuda|hip) runtime error \(2\) ?: out of memory", "CUDA, HIP"),
    _Sign(r"MPS backend out of memory\b", "MPS"),
    _Sign(
        r"(Native API failed|level_zero backend failed)\b.*?\b(UR_RESULT|PI)_ERROR_OUT_OF_"
        r"(DEVICE_MEMORY|HOST_MEMORY|RESOURCES)\b",
        "XPU",
    ),
    _Sign(
        r"(\[enforce fail at [^\]]*\][^\n]{0,80}?)?DefaultCPUAllocator: "
        r"(can't allocate|not enough) memory",
        "CPU (Linux, macOS; Windows)",
    ),
    _Sign(r"std::bad_alloc($|: out_of_memory\b)", "C++, RMM"),
    _Sign(r"unable to mmap [^\n]*: Cannot allocate memory \(12\)", "mmap"),
    _Sign(r"(could not create|failed to allocate) a memory( object)?\.?$", "oneDNN"),
    _Sign(r"MKL FFT error: [^\n]*\b([Mm]emory allocation failed|[Ii]nsufficient memory)", "MKL"),
    # Libraries that allocate workspace of their own.
    _Sign(
        r"(CUDA|HIP) error: (CU|HIP|ROC)(BLAS|SPARSE)_STATUS_(ALLOC_FAILED|INSUFFICIENT_RESOURCES)",
        "cuBLAS, cuSPARSE, hipBLAS, hipSPARSE",
    ),
    # With no memory left for a handle, cuBLAS often says that it was not initialised. So it does
    # after an assertion on the device, but then giving memory back raises that one.
    _Sign(
        r"(CUDA|HIP) error: (CU|HIP|ROC)(BLAS|SPARSE)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR),? "
        r"when calling `(cu|hip|roc)(blas|blasLt|sparse)(Create\(|_create_handle)",
        "cuBLAS, cuSPARSE, hipBLAS, hipSPARSE",
    ),
    _Sign(
        r"(cu|hip|roc)solver error: (CU|HIP|ROC)SOLVER_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR),? "
        r"when calling `(cu|hip|roc)solver(Dn|Sp)?Create\(",
        "cuSOLVER, hipSOLVER",
    ),
    _Sign(
        r"(CUDA|HIP) error: (insufficient resources|resource allocation failed) when calling",
        "cuSPARSE, in words",
    ),
    _Sign(
        r"(cu|hip|roc)solver error: (CU|HIP|ROC)SOLVER_STATUS_ALLOC_FAILED", "cuSOLVER, hipSOLVER"
    ),
    _Sign(r"(cu|hip)FFT error: (CU|HIP)FFT_ALLOC_FAILED", "cuFFT, hipFFT"),
    _Sign(
        r"cuDNN error: CUDNN_STATUS_(ALLOC_FAILED"
        r"|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED)",
        "cuDNN",
    ),
    # With no memory left for a handle or its code, cuDNN and cuFFT give no better reason.
    _Sign(
        r"cuDNN error: CUDNN_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\b",
        "cuDNN on a full device",
        if_full=True,
    ),
    _Sign(
        r"(cu|hip)FFT error: (CU|HIP)FFT_INTERNAL_ERROR",
        "cuFFT, hipFFT on a full device",
        if_full=True,
    ),
    # cuDNN says so when no algorithm's workspace fits; the input is contiguous after all.
    _Sign(
        r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\. This error may appear if you passed in a "
        r"non-contiguous input",
        "cuDNN",
    ),
    _Sign(r"Unable to find a valid cuDNN algorithm to run convolution", "cuDNN 7"),
    _Sign(r"(FIND|GET) was unable to find an engine to execute this computation", "cuDNN 8 and 9"),
    _Sign(
        r"(miopenStatusAllocFailed|MIOpen(\(HIP\))?:? [Ee]rror:? [^\n]*"
        r"(miopenStatusAllocFailed|\b[Oo]ut of memory\b))",
        "MIOpen",
    ),
    # Not Triton's OutOfResources: a kernel too large for shared memory is so at every size.
    _Sign(r"Triton Error \[(CUDA|HIP|ZE)\]:[^\n]*\bout of memory$", "Triton"),
    # Other libraries that share the device.
    _Sign(
        r"RESOURCE_EXHAUSTED: [^\n]*?(\b([Oo]ut|[Rr]an out) of memory\b|\bOOM\b"
        r"|\b[Ff]ailed to allocate\b|\ballocating \d)",
        "jax, XLA",
    ),
    _Sign(r"Error out of memory at line \d+ in file ", "bitsandbytes"),
    _Sign(r"[^\n]{0,300}?\bcuda (execution )?failed with error 2\b", "spconv, cumm"),
    # Names of the driver's own error, wherever a library puts them: cupy, thrust, numba, rmm …
    _Sign(
        r"[^\n]{0,300}?\b(CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
        r"|hipErrorOutOfMemory|hipErrorMemoryAllocation)(: out of memory|[.)\]'\"]|\s|$)",
        "CUDA, HIP by name",
    ),
    _Sign(r"cu\w+ failed: out of memory\b", "pycuda"),
)
_COMPILED = tuple((re.compile(sign.begins), sign) for sign in _SIGNS)

# Less than this share of a device is left where it counts as full.
_FULL = 0.01

# nn.DataParallel and TorchScript quote a traceback; the error itself follows it.
_QUOTED_TRACEBACK = re.compile(
    r"\A(Caught \w+ in replica \d+ on device "
    r"|The following operation failed in the TorchScript interpreter\.).*?^\w[\w.]*: ",
    re.S | re.M,
)

# Libraries whose errors on the device are no RuntimeError. Others' texts only quote.
_LIBRARIES = ("cupy", "cupy_backends", "jax", "jaxlib", "numba", "pycuda", "rmm", "tensorflow")

# Of what is raised while such an error is handled; by itself it says nothing.
_SPEAKS_OF_MEMORY = re.compile(r"\b(out|short) of memory\b|\bOOM\b|OutOfMemory|MemoryError", re.I)

# A text shorter than this may stand in another one by chance.
_LEAST_QUOTE = 8

_ACCELERATOR_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation and hipErrorOutOfMemory alike


def classify(exception: BaseException) -> Failure:
    """Tell whether memory ran out, the device was lost, or it is something else.

    Looks at the exception, at those that it was explicitly raised from (``__cause__``), and at
    those that it was raised while handling and quotes (``__context__``). A lost device anywhere
    in that chain wins: nothing can be retried on it. Errors of automicro itself are decisions
    already taken, so they are never retried, even when memory was their cause; nor is what is no
    ``Exception``, such as Ctrl-C. Of a group all members have to be out of memory.

    >>> classify(RuntimeError("CUDA error: out of memory"))
    <Failure.RETRYABLE: 'memory ran out: roll back and try again with fewer rows'>
    >>> classify(RuntimeError("CUDA graph pool is out of memory slots")).name
    'UNRELATED'
    >>> classify(RuntimeError("CUDA error: device-side assert triggered")).name
    'CONTEXT_LOST'
    """
    return _classify(exception, set())


def _classify(exception: BaseException, seen: set[int]) -> Failure:
    found = {_classify_one(error, seen) for error in _walk(exception, seen, _what_it_stands_for)}
    # Ctrl-C that came while memory ran out still means to stop.
    if not isinstance(exception, Exception):
        found.discard(Failure.RETRYABLE)
    order = Failure.CONTEXT_LOST, Failure.UNRELATED, Failure.RETRYABLE
    return next((each for each in order if each in found), Failure.UNRELATED)


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


@contextlib.contextmanager
def ignoring_errors() -> Iterator[None]:
    """Let a try that may fail for any reason fail, unless memory ran out: that is no answer.

    Raises:
        Exception: memory ran out, or the device was lost.

    >>> with ignoring_errors():
    ...     raise ValueError("it does not know this target")
    """
    try:
        yield
    except Exception as error:
        if classify(error) is not Failure.UNRELATED:
            raise


def first_line(error: BaseException) -> str:
    r"""The first line of an error's text.

    >>> first_line(RuntimeError("CUDA out of memory.\nGPU 0 has …")), first_line(MemoryError())
    ('CUDA out of memory.', 'MemoryError')
    """
    return next(iter(text_of(error).splitlines()), type(error).__name__)


def unquoted_shortage(exception: BaseException) -> BaseException | None:
    """An out-of-memory error that an unrelated one followed without standing for it, or None.

    >>> try:
    ...     try:
    ...         raise MemoryError
    ...     except MemoryError:
    ...         {}["the fallback"]
    ... except KeyError as error:
    ...     unquoted_shortage(error)
    MemoryError()
    """
    if isinstance(exception, AutomicroError) or classify(exception) is not Failure.UNRELATED:
        return None
    earlier = _walk(exception, set(), _what_came_before)
    return next((each for each in earlier if classify(each) is Failure.RETRYABLE), None)


def release(exception: BaseException, device: torch.device | str | None = None) -> None:
    """Give back the memory that a failed attempt still holds.

    Call it *outside* ``except``, in the thread that ran the attempt: inside, the interpreter
    still holds the frames of the failed forward, and with them its activations. Clears the locals
    of every finished frame that the exception, its causes and contexts passed through (tracebacks
    stay printable), makes autograd let go of a half-run backward, collects cycles, and empties
    the cache of ``device`` and of all others of its kind that this process has memory on.

    Raises:
        Exception: what the device says, if it is no longer usable.

    >>> failed = None
    >>> try:
    ...     raise torch.OutOfMemoryError("CUDA out of memory.")
    ... except torch.OutOfMemoryError as error:
    ...     failed = error
    >>> release(failed)
    """
    for error in _walk(exception, set(), _what_it_holds):
        traceback.clear_frames(error.__traceback__)
    device = torch.device("cpu" if device is None else device)
    # Each device has a queue of its own in autograd, the CPU included.
    _finish_backward(torch.device("cpu"))
    devices = _accelerators_in_use(device)
    for each in devices:
        _finish_backward(each)
        # What it still works on is done then, and what waits for that is free. Where the device
        # was lost meanwhile, it says so here.
        torch.get_device_module(each).synchronize(each)
    # Frames are not all: a recursive closure, or a graph node whose context refers to itself, is
    # a cycle that only the collector frees. This path is rare, so its time does not matter.
    gc.collect()
    for each in devices:
        empty_cache(each)


def caught(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """The result of work, or the error that it ended with.

    Inside ``except`` a traceback keeps the tensors of what failed alive, and no memory can be
    given back.

    >>> caught(lambda: 1 // 0)
    (None, ZeroDivisionError('integer division or modulo by zero'))
    """
    try:
        return work(), None
    except BaseException as error:
        return None, error


def surely(work: Callable[[], object]) -> None:
    """Do what must not be left half-done: where it fails, or Ctrl-C comes, do it once more.

    Raises:
        BaseException: of the second time; or what interrupted the first, unless memory ran out.

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
        if isinstance(first, RollbackError):  # it was one for something that has passed
            first = first.__cause__ or first
        if classify(first) is not Failure.RETRYABLE:
            raise first
    finally:
        del first  # it holds this frame: a cycle


def once_more(work: Callable[[], T], device: torch.device | str | None = None, *, doing: str) -> T:
    """Do what lies outside of attempts; where memory runs out, give some back and try once more.

    Raises:
        BaseException: what the work raised; where memory ran out, the second time.

    >>> once_more(lambda: 3, doing="counting")
    3
    """
    found, failure = caught(work)
    if failure is None:
        return cast(T, found)
    try:
        if classify(failure) is not Failure.RETRYABLE:
            raise failure
        logger.warning(
            "automicro: out of memory while %s (%s): memory is freed, and it is tried once more",
            doing,
            first_line(failure),
        )
        # Outside of any `except`, see `release`.
        release(failure, device)
    finally:
        del failure  # it holds this frame: a cycle
    try:
        return work()
    except Exception as error:
        if classify(error) is Failure.RETRYABLE:
            add_note(
                error,
                f"automicro: memory ran out while {doing}, also after all that could be had was "
                "given back. No smaller microbatch helps there; free memory, or hold the batch on "
                "the host",
            )
        raise


def empty_cache(device: torch.device | str) -> None:
    """Give memory that torch's allocator keeps for later back to the device. No-op on the CPU.

    >>> empty_cache("cpu")
    """
    device = torch.device(device)
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _accelerators_in_use(device: torch.device) -> list[torch.device]:
    """The device, unless it is the CPU, and all accelerators that this process has memory on."""
    found = [] if device.type == "cpu" else [device]
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return found
    for index in range(torch.accelerator.device_count()):
        other = torch.device(kind.type, index)
        try:
            # Nothing is made on a device by this question.
            is_used = other != device and torch.accelerator.memory_reserved(index) > 0
        except (NotImplementedError, RuntimeError):  # an allocator that does not count
            is_used = False
        if is_used:
            found.append(other)
    return found


def _classify_one(exception: BaseException, seen: set[int]) -> Failure | None:
    """Judge one exception without its chain; None where it says nothing about memory."""
    if isinstance(exception, AutomicroError):
        return Failure.UNRELATED
    if _is_backend_error(exception):
        return Failure.CONTEXT_LOST
    if isinstance(exception, BaseExceptionGroup):
        return _classify_group(exception, seen)
    if isinstance(exception, OSError) and exception.errno == errno.ENOMEM:
        return Failure.RETRYABLE
    # Whatever torch, Triton or a driver raises is one of these; a ValueError only quotes them.
    library = type(exception).__module__.partition(".")[0]
    if not isinstance(exception, RuntimeError | MemoryError) and library not in _LIBRARIES:
        return None
    text = _QUOTED_TRACEBACK.sub("", text_of(exception), count=1)
    # Texts before types: a DataLoader raises what its worker raised in the same type, and that must
    # not be retried.
    for pattern, sign in _COMPILED:
        if pattern.match(text) and (not sign.if_full or _is_full()):
            return sign.means
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return Failure.RETRYABLE
    # Its code speaks only where the text did not: a lost device has other codes.
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
    # Memory ran out for one member, and another one failed for a reason that stays.
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
    """Yield an exception and those it came from, each once, however they refer to each other."""
    waiting: list[BaseException | None] = [exception]
    while waiting:
        error = waiting.pop()
        # Contexts may form a cycle.
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        waiting.extend(follow(error))


def _what_it_stands_for(error: BaseException) -> list[BaseException | None]:
    """The exceptions that another one was raised in place of."""
    # Of a compiler that failed: torch raises its own error "from None" and keeps this one.
    inner = getattr(error, "inner_exception", None)
    found = [error.__cause__, inner if isinstance(inner, BaseException) else None]
    # As Python shows it: "from" hides what was being handled.
    if error.__cause__ is None and not error.__suppress_context__:
        handled = error.__context__
        found.append(handled if handled is not None and _quotes(error, handled) else None)
    return found


def _what_came_before(error: BaseException) -> list[BaseException | None]:
    shown = None if error.__suppress_context__ else error.__context__
    return [error.__cause__, shown]


def _what_it_holds(error: BaseException) -> list[BaseException | None]:
    # All that an error refers to holds frames, also what it does not stand for.
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [*_what_it_stands_for(error), error.__context__, *members]


def _quotes(error: BaseException, other: BaseException) -> bool:
    """Whether the text of one error repeats how that of another begins, or speaks of memory."""
    text, said = text_of(error), first_line(other).partition(". ")[0].rstrip(".")
    if len(said) >= _LEAST_QUOTE and said in text:
        return True
    return bool(_SPEAKS_OF_MEMORY.search(text)) and _classify_one(other, set()) is not None


def _finish_backward(device: torch.device) -> None:
    """Run an empty backward, because only the next one drops what a failed one left queued."""
    # After an exception in one branch of a graph, autograd's queue keeps the nodes of the other
    # branches, with their saved tensors, until this thread runs a backward again. Tensors of zero
    # elements make one that needs no memory.
    try:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.empty(0, device=device, requires_grad=True)
            gradient = torch.empty(0, device=device)
            torch.autograd.grad(leaf.view(0), leaf, gradient)
    except (RuntimeError, MemoryError) as error:
        if classify(error) is not Failure.RETRYABLE:
            raise
        logger.debug("No memory for an empty backward on %s: %s", device, text_of(error))
