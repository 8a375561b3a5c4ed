"""Runs that repeat their numbers: seeds, deterministic algorithms, and sizes by measured time."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Callback, DeterminismWarning, Explore, Halving, Microbatcher, Outcome, Trainer
from automicro.torch_private_execution import inductor_is_deterministic
from automicro.trainer.same_on_all_ranks import outline_options
from automicro.trainer.surroundings import CUBLAS_VARIABLE, deterministic_algorithms, prepare_cublas
from tests.trainer.runs import FEATURES, assert_same, make_loader, make_model, make_trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Normed(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        norm = [nn.BatchNorm1d(64), nn.Dropout(0.3), nn.ReLU()]
        super().__init__(nn.Linear(12, 64), *norm, nn.Linear(64, 64), nn.Linear(64, 3))


def test_frozen_batchnorm_allows_one_measurement() -> None:
    measured: list[bool] = []

    class Notes(Callback):
        def batch_end(self, run: Any, result: Any) -> None:
            measured.append(result.is_measuring)

    model = Normed()
    model[1].eval()
    options: dict[str, Any] = {"memory_limit": "170KiB", "max_duration": "4ep", "seed": 7}
    loader = make_loader(3 * 256, 256)
    make_trainer(model, loader, batchnorm="ignore", callbacks=[Notes()], **options).fit()
    assert sum(measured) == 1


class Recording(Halving):
    """Records the outcomes it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Outcome] = []

    def record(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        super().record(outcome)


@pytest.mark.parametrize(
    ("options", "is_timed"),
    [({"seed": 7}, False), ({}, True), ({"deterministic": True}, False)],
    ids=str,
)
def test_repeatable_runs_do_not_measure_time(options: dict[str, Any], is_timed: bool) -> None:
    policy = Recording()
    options |= {"microbatch_size": policy, "memory_limit": "256KiB"}
    make_trainer(make_model(), make_loader(700, 256), **options).fit()
    assert len(policy.outcomes) > 3
    assert {each.seconds is not None for each in policy.outcomes} == {is_timed}


def test_ranks_may_have_different_seeds_if_all_have_one() -> None:
    texts = [outline_options({"seed": seed})["seed"] for seed in (0, 3, None)]
    assert texts[0] == texts[1] != texts[2]


# Exploring


class Noting(Explore):
    """Explores, and records the sizes that fit."""

    def __init__(self) -> None:
        super().__init__(max_steps=12)
        self.sizes: set[int] = set()

    def record(self, outcome: Any) -> None:
        super().record(outcome)
        if outcome.fits:
            self.sizes.add(outcome.microbatch_size)


def explore(model: nn.Module, policy: Noting, **options: Any) -> Trainer:
    loader = make_loader(rows=128, batch_size=32)
    trainer = make_trainer(model, loader, microbatch_size=policy, probe=False, **options)
    trainer.fit()
    return trainer


def test_summary_reports_chosen_size_not_trial() -> None:
    policy = Noting()
    # Long enough for the exploration to end, however often it switches between sizes.
    trainer = explore(make_model(), policy, max_duration="60ba")
    assert trainer.state.train.cut is not None
    assert trainer.state.train.cut.microbatch_size == policy.propose(32)


def test_batchnorm_is_not_explored_unless_ignored() -> None:
    policy, accepted = Noting(), Noting()
    explore(Normed(), policy, max_duration="30ba")
    assert policy.sizes == {32}
    explore(Normed(), accepted, batchnorm="ignore", max_duration="30ba")
    assert len(accepted.sizes) > 1


def test_microbatcher_explores_and_reports_progress() -> None:
    model = make_model()
    microbatcher = Microbatcher(
        model, loss_fn=nn.CrossEntropyLoss(), microbatch_size="explore", probe=False
    )
    batch = tuple(next(iter(make_loader(rows=64, batch_size=64))))
    results = []
    for _ in range(70):
        results.append(microbatcher.backward(batch))
        model.zero_grad()
    told = [each.exploration for each in results if each.exploration is not None]
    assert told[-1].ended is not None
    assert results[-1].exploration is None
    assert not results[-1].is_measuring
    assert results[-1].microbatch_size == told[-1].microbatch_size
    assert any(each.is_measuring for each in results)


# Deterministic algorithms


def settings() -> list[Any]:
    cudnn = torch.backends.cudnn
    found = [torch.are_deterministic_algorithms_enabled(), inductor_is_deterministic()]
    found += [torch.is_deterministic_algorithms_warn_only_enabled(), cudnn.benchmark]
    fills = getattr(torch.utils.deterministic, "fill_uninitialized_memory")  # noqa: B009
    return [*found, cudnn.deterministic, fills]


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


def test_deterministic_runs_repeat_their_bits_and_restore_settings() -> None:
    seen, models = list[bool](), list[nn.Module]()

    class Watched(nn.Sequential):
        def forward(self, inputs: Tensor) -> Any:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().forward(inputs)

    for _ in range(2):
        models.append(Watched(make_model(dropout=0.5)))
        trainer = make_trainer(models[-1], deterministic=True, seed=5)
        assert not torch.are_deterministic_algorithms_enabled()
        trainer.fit()
        trainer.eval(make_loader())
        assert not torch.are_deterministic_algorithms_enabled()
    assert_same(*models)
    assert all(seen)


def test_settings_are_restored_after_error(other_settings: None) -> None:
    def run() -> None:
        with deterministic_algorithms(CPU):
            assert settings() == [True, True, False, False, True, True]
            assert torch.empty(5).isnan().all()
            torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))

    before = settings()
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic"):
        run()
    assert settings() == before


@pytest.fixture
def untouched_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    before = os.environ.pop(CUBLAS_VARIABLE, None)
    yield
    os.environ.pop(CUBLAS_VARIABLE, None)
    if before is not None:
        os.environ[CUBLAS_VARIABLE] = before


def test_cublas_is_prepared_only_with_gpu_and_without_other_setting(
    untouched_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        prepare_cublas("auto")
        assert (CUBLAS_VARIABLE in os.environ) == there
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
    told: list[str | None] = []

    class AskedError(Exception): ...

    def empty(*sizes: int, **options: Any) -> Any:
        told.append(os.environ.get(CUBLAS_VARIABLE))
        raise AskedError

    model, loader = nn.Linear(FEATURES, 3), make_loader()
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(AskedError):
        make_trainer(model, loader, device="cuda", deterministic=True)
    assert told == [":4096:8"]
