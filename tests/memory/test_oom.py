"""Classification of out-of-memory errors, and release of everything in a failed attempt."""

import errno
import itertools
import weakref
from collections.abc import Callable

import pytest
import torch

from automicro.errors import OptimizerStepError, RollbackError, SampleTooLargeError
from automicro.memory.budget import MemoryBudget
from automicro.memory.oom import Failure, classify, empty_cache, is_out_of_memory, release

CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
CUDNN_NOT_SUPPORTED = (
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input."
)
CPU_LINUX = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)"
)
CPU_WINDOWS = (
    "[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried "
    "to allocate 4000000000 bytes."
)
XPU = "level_zero backend failed with error: {} (UR_RESULT_ERROR_OUT_OF_{}_MEMORY)"
IN_WORKER = (
    "Caught {} in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    '  File "worker.py", line 349, in _worker_loop\n    data = fetcher.fetch(index)\n'
)
IN_REPLICA = IN_WORKER.replace("DataLoader worker process 0", "replica 1 on device 1")


def made(module: str, name: str, base: type[Exception], text: str) -> Exception:
    """Return an error of a library that is not installed here."""
    error: Exception = type(name, (base,), {"__module__": module})(text)
    return error


XLA = "RESOURCE_EXHAUSTED: "
ASSERT = 'INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1016, please report'
SCRIPT = "The following operation failed in the TorchScript interpreter.\nTraceback of TorchScript "

RETRYABLE = [
    torch.OutOfMemoryError("whatever it says"),
    MemoryError(),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"),
    RuntimeError(
        "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 9.43 GiB\nRequested               : 640.00 MiB"
    ),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THC.cu:66"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError(XPU.format(39, "DEVICE")),
    RuntimeError("Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)"),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, max allowed: 9.07 GB)."),
    RuntimeError(CUBLAS),
    RuntimeError(CUBLAS.replace("ALLOC_FAILED", "NOT_INITIALIZED")),
    RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"),
    RuntimeError("CUDA error: insufficient resources when calling `cusparseSpMM(handle)`"),
    RuntimeError("CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling `cusparse`"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError(CUDNN_NOT_SUPPORTED),
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    RuntimeError("FIND was unable to find an engine to execute this computation"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("Triton Error [HIP]:  Code: 2, Messsage: out of memory"),
    RuntimeError(CPU_LINUX),
    RuntimeError(CPU_WINDOWS),
    RuntimeError("std::bad_alloc"),
    RuntimeError(IN_REPLICA.format("RuntimeError") + "RuntimeError: CUDA error: out of memory"),
    # Errors of other libraries.
    made("jaxlib.xla_extension", "XlaRuntimeError", RuntimeError, XLA + "Out of memory allocating"),
    RuntimeError(XLA + "Out of memory while trying to allocate 16 bytes."),
    RuntimeError(XLA + "Failed to allocate request for 2.0GiB (2147483648B) on device ordinal 0"),
    RuntimeError(XLA + "XLA:TPU compile permanent error. Ran out of memory in memory space hbm."),
    RuntimeError("INTERNAL: Failed to allocate 8 bytes: CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
    made(
        "tensorflow.python.framework.errors_impl",
        "ResourceExhaustedError",
        Exception,
        "{{function_node __wrapped__MatMul}} OOM when allocating tensor with shape[8]",
    ),
    RuntimeError("Error out of memory at line 384 in file /bnb/csrc/pythonInterface.c"),
    RuntimeError("/io/build/temp/spconv.cc 52\ncuda failed with error 2".replace("\n", " ")),
    RuntimeError("/io/build/x.cc(12) cuda execution failed with error 2 out of memory"),
    made("cupy.cuda.memory", "OutOfMemoryError", MemoryError, "Out of memory allocating 512 bytes"),
    RuntimeError("cudaErrorMemoryAllocation: out of memory"),
    made(
        "numba.cuda.cudadrv.driver",
        "CudaAPIError",
        Exception,
        "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
    ),
    made("pycuda._driver", "MemoryError", Exception, "cuMemAlloc failed: out of memory"),
    RuntimeError("CUDA error (/flash-attention/csrc/fwd_launch.h:88): out of memory"),
    RuntimeError(f"NVML_SUCCESS == r {ASSERT}"),
    RuntimeError("CUDA error: CUSPARSE_STATUS_NOT_INITIALIZED when calling `cusparseCreate(h)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(h)`"),
    RuntimeError(
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`. "
        "This error may appear if the input matrix contains NaN."
    ),
    RuntimeError("MIOpen Error: /src/handlehip.cpp:123: Hip error: out of memory"),
    RuntimeError("could not create a memory object"),
    RuntimeError("MKL FFT error: Intel MKL DFTI ERROR: Memory allocation failed"),
    RuntimeError("std::bad_alloc: out_of_memory: CUDA error at: /rmm/cuda_memory_resource.hpp"),
    RuntimeError("unable to mmap 4000 bytes from file </torch_1_2>: Cannot allocate memory (12)"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError(
        SCRIPT + '(most recent call last):\n  File "x.py", line 4, in forward\n    return x @ x\n'
        "           ~~~~~ <--- HERE\nRuntimeError: CUDA out of memory. Tried to allocate 2 GiB."
    ),
]

CONTEXT_LOST = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: unknown error"),
    RuntimeError("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
    RuntimeError("NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1234\nCuda failure 2 'out of memory'"),
    RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2"),
    torch.distributed.DistBackendError("NCCL error in: Cuda failure 2 'out of memory'"),
]

UNRELATED = [
    RuntimeError("CUDA graph pool is out of memory slots"),
    RuntimeError("docs say: out of memory"),
    RuntimeError("the driver said 'CUDA error: out of memory'"),
    RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu!"),
    RuntimeError("CUDA error: invalid device ordinal"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm`"),
    RuntimeError("out of resource: shared memory, Required: 196608, Hardware limit: 101376"),
    RuntimeError("Triton Error [CUDA]: out of memory slots for the kernel"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError(IN_WORKER.format("RuntimeError") + "RuntimeError: " + CPU_LINUX),
    RuntimeError(IN_WORKER.format("RuntimeError") + "RuntimeError: CUDA error: out of memory"),
    RuntimeError(IN_REPLICA.format("RuntimeError") + "RuntimeError: not my size"),
    torch.OutOfMemoryError(IN_WORKER.format("OutOfMemoryError") + "OutOfMemoryError: CUDA"),
    MemoryError(IN_WORKER.format("MemoryError") + "MemoryError"),
    ValueError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    KeyError("CUDA error: out of memory"),
    KeyboardInterrupt(),
    SampleTooLargeError("even one row does not fit"),
    RollbackError("CUDA out of memory."),
    # Similar, but unrelated errors.
    RuntimeError("LSTM out of memory: it has 4 cells"),
    RuntimeError("token OOM is not in the vocabulary"),
    RuntimeError("out of memory"),
    RuntimeError(XLA + "Received message larger than max (5 vs. 4)"),
    RuntimeError("the log said: RESOURCE_EXHAUSTED: Out of memory"),
    RuntimeError("cuda failed with error 21 something else"),
    ValueError("cudaErrorMemoryAllocation: out of memory"),
    RuntimeError("CUDA_ERROR_OUT_OF_MEMORY_SLOTS"),
    RuntimeError('r == 0 INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":10'),
    RuntimeError("could not create a primitive descriptor"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnXgesvd`"),
    OSError(errno.ENOENT, "No such file"),
    RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."),
    RuntimeError(SCRIPT + "(most recent call last):\nRuntimeError: it said: CUDA out of memory."),
    ExceptionGroup("both", [MemoryError(), ValueError("a bug")]),
    BaseExceptionGroup("stopped", [MemoryError(), KeyboardInterrupt()]),
    SystemExit("CUDA out of memory."),
]


def label(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def chain(*errors: BaseException) -> BaseException:
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]


MEANS = [
    *((error, Failure.RETRYABLE) for error in RETRYABLE),
    *((error, Failure.CONTEXT_LOST) for error in CONTEXT_LOST),
    *((error, Failure.UNRELATED) for error in UNRELATED),
    # Causes are considered, too.
    (chain(ValueError("x"), KeyError("y"), MemoryError()), Failure.RETRYABLE),
    (chain(MemoryError("m"), ValueError("x")), Failure.RETRYABLE),
    (chain(MemoryError("n"), RuntimeError("CUDA error: unknown error")), Failure.CONTEXT_LOST),
    (chain(RuntimeError("NCCL error in: x"), MemoryError()), Failure.CONTEXT_LOST),
    (chain(OptimizerStepError("half"), MemoryError()), Failure.UNRELATED),
    (chain(ValueError("z"), KeyError("y")), Failure.UNRELATED),
]


def test_errors_are_classified_correctly() -> None:
    found = [(label(error), classify(error), is_out_of_memory(error)) for error, _ in MEANS]
    assert found == [(label(each), means, means is Failure.RETRYABLE) for each, means in MEANS]


ON_A_FULL_DEVICE = [
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
]


def test_unexplained_library_error_is_oom_on_full_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without an accelerator, free memory is unknown.
    assert set(map(classify, ON_A_FULL_DEVICE)) == {Failure.UNRELATED}
    for free_bytes, expected in ((1 << 20, Failure.RETRYABLE), (1 << 30, Failure.UNRELATED)):
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (free_bytes, 16 << 30))  # noqa: B023
        assert set(map(classify, ON_A_FULL_DEVICE)) == {expected}


def test_accelerator_error_is_classified_by_error_code() -> None:
    for code, retry in ((2, True), (999, False), (1, False)):
        error = torch.AcceleratorError("something in another language")
        setattr(error, "error_code", code)  # noqa: B010 (as torch does; its stub lacks it)
        assert is_out_of_memory(error) is retry


def test_cpu_allocation_failure_is_recognized_as_oom() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.int8)
    assert is_out_of_memory(caught.value)


class RunsOutInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. (injected)")


Storages = list[weakref.ref[torch.UntypedStorage]]


def remember(storages: Storages, tensor: torch.Tensor) -> torch.Tensor:
    storages.append(weakref.ref(tensor.untyped_storage()))
    return tensor


def alive(storages: Storages) -> int:
    return sum(storage() is not None for storage in storages)


def fail(attempt: Callable[[Storages], None]) -> tuple[BaseException, Storages]:
    storages: Storages = []
    try:
        attempt(storages)
    except torch.OutOfMemoryError as error:
        failed = error
    assert storages
    return failed, storages


def fail_in_forward(storages: Storages) -> None:
    hidden = remember(storages, torch.ones(100, requires_grad=True).exp())
    raise torch.OutOfMemoryError(f"CUDA out of memory. {hidden.shape}")


def fail_in_backward(storages: Storages) -> None:
    x = torch.ones(100, requires_grad=True)
    branches = [remember(storages, x.exp()).sin() for _ in range(5)]
    loss = (RunsOutInBackward.apply(x) + sum(branches)).sum()
    loss.backward()


def fail_in_backward_reversed(storages: Storages) -> None:
    x = torch.ones(100, requires_grad=True)
    hidden = remember(storages, x.exp())
    (hidden.sin() + RunsOutInBackward.apply(hidden)).sum().backward()


def fail_with_a_cycle(storages: Storages) -> None:
    hidden = remember(storages, torch.ones(100))

    def again(depth: int) -> torch.Tensor:
        return hidden if depth == 0 else again(depth - 1)

    again(3)
    raise torch.OutOfMemoryError("CUDA out of memory.")


def fail_in_a_group(storages: Storages) -> None:
    try:
        fail_in_forward(storages)
    except torch.OutOfMemoryError as error:
        failed = error
    try:
        raise ExceptionGroup("several", [failed])
    except ExceptionGroup as group:
        raise torch.OutOfMemoryError("CUDA out of memory.") from group


@pytest.mark.parametrize(
    "attempt",
    [
        fail_in_forward,
        fail_in_backward,
        fail_in_backward_reversed,
        fail_with_a_cycle,
        fail_in_a_group,
    ],
)
def test_release_frees_all_tensors_of_failed_attempt(attempt: Callable[[Storages], None]) -> None:
    failed, storages = fail(attempt)
    assert alive(storages) == len(storages)
    release(failed)
    assert alive(storages) == 0


def test_release_allocates_no_memory() -> None:
    """The engine must release memory even on a completely full device."""
    budget = MemoryBudget("1KiB")
    with budget:
        full = torch.zeros(256)
        with budget.host():
            failed, storages = fail(fail_in_backward)
        release(failed)
    assert alive(storages) == 0
    assert budget.num_ooms == 0
    assert budget.allocated_bytes == full.nbytes


def test_release_tolerates_another_oom_but_not_a_lost_device(mocker) -> None:
    failed, storages = fail(fail_in_forward)
    mocker.patch("torch.autograd.grad", side_effect=torch.OutOfMemoryError("CUDA out of memory."))
    release(failed)
    assert alive(storages) == 0
    lost = RuntimeError("CUDA error: unspecified launch failure")
    mocker.patch("torch.autograd.grad", side_effect=lost)
    with pytest.raises(RuntimeError, match="launch failure"):
        release(failed)


def test_empty_cache_uses_given_device(mocker) -> None:
    modules = mocker.patch("torch.get_device_module")
    empty_cache("xpu")
    modules.assert_called_once_with(torch.device("xpu"))
    modules.return_value.empty_cache.assert_called_once_with()


def test_oom_inside_compiler_error_is_recognized() -> None:
    class CompilerError(RuntimeError):
        inner_exception = torch.OutOfMemoryError("CUDA out of memory.")

    assert is_out_of_memory(CompilerError("backend='inductor' raised:\nOutOfMemoryError"))
    CompilerError.inner_exception = KeyError("x")  # type: ignore[assignment]
    assert not is_out_of_memory(CompilerError("backend='inductor' raised:\nKeyError"))
