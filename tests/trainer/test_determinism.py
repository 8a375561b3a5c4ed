"""Deterministic runs give the same bits, and restore the settings of the process."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from automicro import DeterminismWarning
from automicro.torch_private_execution import inductor_is_deterministic
from automicro.trainer.surroundings import CUBLAS_VARIABLE, deterministic_algorithms, prepare_cublas
from tests.trainer.runs import assert_same, make_loader, make_model, make_trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def settings() -> dict[str, Any]:
    return {
        "enabled": torch.are_deterministic_algorithms_enabled(),
        "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "compiled": inductor_is_deterministic(),
        "benchmark": torch.backends.cudnn.benchmark,
        "cudnn": torch.backends.cudnn.deterministic,
        "fill": getattr(torch.utils.deterministic, "fill_uninitialized_memory"),  # noqa: B009
    }


DETERMINISTIC = {
    "enabled": True,
    "warns": False,
    "compiled": True,
    "benchmark": False,
    "cudnn": True,
    "fill": True,
}


@pytest.fixture
def other_settings() -> Iterator[None]:
    """Settings that all differ from those of a deterministic run."""
    cudnn = torch.backends.cudnn
    before = (cudnn.benchmark, cudnn.deterministic)
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn.benchmark, cudnn.deterministic = True, False
    yield
    torch.use_deterministic_algorithms(False)
    cudnn.benchmark, cudnn.deterministic = before


def test_two_runs_are_bit_identical() -> None:
    models = []
    for _ in range(2):
        with deterministic_algorithms(CPU):
            trainer = make_trainer(
                make_model(dropout=0.5), make_loader(), seed=5, microbatch_size=4
            )
            trainer.fit()
        models.append(trainer._run.model)
    assert_same(*models)


def test_settings_are_restored_after_error(other_settings: None) -> None:
    def run() -> None:
        with deterministic_algorithms(CPU):
            assert settings() == DETERMINISTIC
            raise KeyboardInterrupt

    before = settings()
    with pytest.raises(KeyboardInterrupt):
        run()
    assert settings() == before


def test_nondeterministic_operation_raises_torch_error() -> None:
    zeros, first = torch.zeros(4), torch.tensor([0])
    with (
        pytest.raises(RuntimeError, match="put_ does not have a deterministic"),
        deterministic_algorithms(CPU),
    ):
        zeros.put_(first, torch.ones(1))


def test_uninitialized_memory_is_filled() -> None:
    with deterministic_algorithms(CPU):
        assert torch.empty(5).isnan().all()


# cuBLAS


@pytest.fixture
def untouched_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    before = os.environ.pop(CUBLAS_VARIABLE, None)
    yield
    os.environ.pop(CUBLAS_VARIABLE, None)
    if before is not None:
        os.environ[CUBLAS_VARIABLE] = before


def test_nondeterministic_cublas_setting_is_named(untouched_cuda: None) -> None:
    os.environ[CUBLAS_VARIABLE] = ":0:0"
    with pytest.raises(ValueError, match=r"^CUBLAS_WORKSPACE_CONFIG=:0:0 is not det.*; set "):
        prepare_cublas(CUDA)


def test_cublas_setting_after_cuda_start_warns(
    untouched_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = settings()
    with (
        pytest.warns(DeterminismWarning, match=r"^CUBLAS.*differ.*=:4096:8 in the env"),
        deterministic_algorithms(CUDA),
    ):
        assert os.environ[CUBLAS_VARIABLE] == ":4096:8"
    assert settings() == before


def test_trainer_sets_cublas_variable_before_using_device(
    untouched_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []

    class AskedError(Exception):
        pass

    def empty(*sizes: int, **options: Any) -> Any:
        told.append(os.environ.get(CUBLAS_VARIABLE) == ":4096:8")
        raise AskedError

    model, loader = make_model(), make_loader()
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(AskedError):
        make_trainer(model, loader, device="cuda", deterministic=True)
    assert told == [True]


@pytest.mark.parametrize("there", [True, False])
def test_auto_device_prepares_cublas_only_with_gpu(
    untouched_cuda: None, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    prepare_cublas("auto")
    assert (CUBLAS_VARIABLE in os.environ) == there
