"""Custom loops with accelerate and Fabric, with one line changed."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from automicro import LossAverageError, MemoryBudget
from automicro.errors import PeerFailedError
from tests.ranks.world import World, world_of

pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from accelerate import Accelerator, DataLoaderConfiguration, DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from lightning.fabric import Fabric

from automicro.integrations.accelerate import microbatcher
from automicro.integrations.lightning import microbatcher as in_fabric
from tests.integrations.both import (
    at_any_limit,
    check,
    check_rows,
    in_less_memory,
    max_diff,
    on_ranks,
    with_and_without,
)
from tests.integrations.loops import CV, EXAMPLES, HOSTS, TAGS, digits, reset, running, sgd, train

each_host = pytest.mark.parametrize("host", HOSTS)


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    reset()
    yield
    reset()


@pytest.mark.parametrize(("name", "steps"), [("cv", 1), ("tags", 4)])
@each_host
def test_loop_without_limit_matches_plain_loop_bitwise(host: str, name: str, steps: int) -> None:
    plain, _ = with_and_without(running(EXAMPLES[name], host, dropout=0.1, steps=steps))
    assert len(plain.losses) >= 10
    assert len({row["rate"] for row in plain.logged if "rate" in row}) > 2


@pytest.mark.parametrize(
    ("name", "precision", "close"),
    [
        *(("cv", "float32", 1e-6), ("cv", "bf16", 1e-3)),
        *((name, "float64", 1e-12) for name in EXAMPLES),
    ],
)
@each_host
def test_loop_in_half_memory_matches_plain_loop(
    host: str, name: str, precision: str, close: float
) -> None:
    plain, ours = in_less_memory(running(EXAMPLES[name], host, precision=precision, kind=sgd))
    assert ours.ooms >= 1
    # Fabric returns outputs in float32, which rounds float64 values.
    is_rounded = host == "fabric" and precision == "float64"
    of_losses = 1e-6 if is_rounded else close
    assert ours.losses == pytest.approx(plain.losses, rel=of_losses, abs=of_losses)
    if precision == "float64":
        close = 1e-7 if is_rounded and name != "cv" else close
        check(ours, plain, close=close, logged=of_losses)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("scale", [2.0**15, 2.0**30])  # the larger one skips the first steps
@each_host
def test_fp16_loss_scale_matches_plain_loop(host: str, scale: float, steps: int) -> None:
    run = running(CV, host, precision="fp16", scale=scale, steps=steps)
    _, whole = with_and_without(run)
    plain, limited = in_less_memory(run)
    assert limited.ooms >= 1
    assert limited.scale == whole.scale == plain.scale != scale
    # The scheduler does not count a skipped step.
    check_rows(limited.logged, plain.logged, 1e-2)


@pytest.mark.sweep
@each_host
def test_loop_at_any_limit_matches_or_raises_sample_too_large(host: str) -> None:
    example = dataclasses.replace(
        CV, data=lambda dtype: tuple(part[:130] for part in digits(dtype))
    )
    at_any_limit(running(example, host, epochs=1, kind=sgd), close=1e-5, limits=25)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
@each_host
def test_saved_state_resumes_with_or_without_automicro(
    host: str, first: bool, second: bool, tmp_path: Path
) -> None:
    """Use dropout and shuffled rows; sizes are saved if the step is registered."""
    through = train(CV, host, ours=False, dropout=0.2)
    saved = train(CV, host, ours=first, dropout=0.2, epochs=1, saves=tmp_path)
    rest = train(CV, host, ours=second, dropout=0.2, epochs=1, loads=tmp_path)
    assert saved.losses + rest.losses == through.losses
    assert all(map(torch.equal, rest.parameters, through.parameters))
    assert second or rest.sizes == saved.sizes


def prepared(**how: Any) -> tuple[Any, Any, Any]:
    accelerator = Accelerator(cpu=True, **how)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def with_attributes(owner: str = "state", **attributes: Any) -> Callable[[], Any]:
    """Set attributes of an accelerator, or of its state, and create a microbatcher for it."""

    def make() -> Any:
        accelerator, model, optimizer = prepared()
        for name, value in attributes.items():
            setattr(getattr(accelerator, owner, accelerator), name, value)
        return microbatcher(accelerator, model, optimizer, loss_fn=nn.MSELoss())

    return make


def with_distributed_type(kind: str) -> Callable[[], Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    return with_attributes(distributed_type=DistributedType[kind], fsdp_plugin=plugin)


def optimizer_of_other_model() -> Any:
    accelerator, model, _ = prepared()
    other = accelerator.prepare(torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1))
    return microbatcher(accelerator, model, other, loss_fn=nn.MSELoss())


def unprepared_model() -> Any:
    accelerator, _, optimizer = prepared()
    return microbatcher(accelerator, nn.Linear(4, 2), optimizer)


def unprepared_optimizer() -> Any:
    accelerator, model, optimizer = prepared()
    return microbatcher(accelerator, model, optimizer.optimizer)


def accumulate_under_accumulation() -> Any:
    accelerator, model, optimizer = prepared(gradient_accumulation_steps=2)
    step = microbatcher(accelerator, model, optimizer, loss_fn=nn.MSELoss())
    batch = torch.randn(3, 4), torch.randn(3, 2)
    return step.accumulate([batch, batch])


def summed_loss() -> Any:
    accelerator, model, optimizer = prepared()
    step = microbatcher(
        accelerator, model, optimizer, forward=lambda model, batch: model(batch).square().sum()
    )
    return step.backward(torch.randn(8, 4))


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (with_distributed_type("DEEPSPEED"), ValueError, "DeepSpeed keeps its own gradients"),
        (with_distributed_type("MEGATRON_LM"), ValueError, "Megatron-LM keeps its own gradients"),
        (with_distributed_type("XLA"), ValueError, "torch_xla keeps its own gradients"),
        (with_distributed_type("FSDP"), ValueError, "fsdp_version=2"),
        (with_attributes(_mixed_precision="fp8"), ValueError, "mixed_precision='bf16'"),
        (with_attributes("", has_lomo_optimizer=True), ValueError, "LOMO changes parameters"),
        (
            with_attributes(parallelism_config=SimpleNamespace(cp_size=2)),
            ValueError,
            r"ParallelismConfig\(cp_size=2\)",
        ),
        (with_attributes(num_processes=2), ValueError, "its gradients would not be averaged"),
        (optimizer_of_other_model, ValueError, "parameters are not in the model"),
        (unprepared_model, ValueError, "prepare did not return this Linear"),
        (unprepared_optimizer, ValueError, "prepare did not return this SGD"),
        (
            accumulate_under_accumulation,
            ValueError,
            "also divides by gradient_accumulation_steps=2",
        ),
        (summed_loss, LossAverageError, "splitting changes this batch"),
        (lambda: microbatcher(nn.Linear(2, 2), nn.Linear(2, 2)), TypeError, "not an accelerate"),
        (
            lambda: microbatcher(*prepared(), backward=print),
            TypeError,
            "is set by accelerator.back",
        ),
        (lambda: microbatcher(*prepared(), precision="bf16"), TypeError, "Accelerator.mixed"),
    ],
)
def test_unsupported_setups_are_rejected(wrong: Any, kind: Any, says: str) -> None:
    with pytest.raises(kind, match=says):
        wrong()


def test_missing_host_method_error_names_version(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer = prepared()
    monkeypatch.setattr(Accelerator, "backward", lambda self, value: None)
    with pytest.raises(ImportError, match=r"accelerate \d+.* lacks the parameter 'loss'"):
        microbatcher(accelerator, model, optimizer)


@pytest.mark.parametrize("host", ["accelerate", "keras"])
def test_missing_host_error_names_extra(host: str) -> None:
    hidden = f"import sys; sys.modules[{host!r}] = None; import automicro.integrations.{host}"
    ended = subprocess.run(
        [sys.executable, "-c", hidden], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert f"pip install 'automicro[{host}]'" in ended.stderr.splitlines()[-1]


def test_accumulated_batches_match_one_batch_in_accelerate() -> None:
    accelerator, model, optimizer = prepared()
    step = microbatcher(accelerator, model, optimizer, loss_fn=nn.MSELoss())
    rows = [(torch.randn(n, 4), torch.randn(n, 2)) for n in (3, 5)]
    step.accumulate(rows)
    ours = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    inputs, targets = (torch.cat(each) for each in zip(*rows, strict=True))
    nn.MSELoss()(model(inputs), targets).backward()
    for mine, whole in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(mine, whole.grad)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(2) as two:
        yield two


def compare(
    rank: int, host: str, name: str, share: float | None, uneven: bool = False, **case: Any
) -> dict[str, Any]:
    """Run the plain loop, and one with automicro and little memory on rank 1."""
    example = EXAMPLES[name]
    if uneven and rank == 1:  # as many batches, with half of the rows
        example = dataclasses.replace(
            example,
            data=lambda dtype: tuple(part[: len(part) // 2] for part in EXAMPLES[name].data(dtype)),
            batch_size=example.batch_size // 2,
        )
    case = {"kind": sgd, **case}
    run = running(example, host, **case)
    with MemoryBudget("1GiB") as budget:
        plain = run(None)
    is_short = share is not None and rank == 1
    with MemoryBudget(int(budget.peak_bytes * share) if is_short and share else "1GiB"):
        ours = run({})
    gap = max_diff(ours.parameters, plain.parameters)
    return {"ooms": ours.ooms, "parameters": gap, "logged": (ours.logged, plain.logged)}


def check_rank(found: dict[str, Any], *, ooms: bool) -> None:
    assert (found["ooms"] > 0) == ooms
    assert found["parameters"] < 1e-6
    check_rows(*found["logged"])


EVALUATED = {"cv": 100, "tags": 24}


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "steps"), [("cv", 1), ("tags", 3)])
def test_two_ranks_match_ddp_when_one_runs_out_of_memory(
    world: World, name: str, steps: int
) -> None:
    for share in (None, 0.5):
        for found in world.run(on_ranks, compare, "accelerate", name, share, steps=steps, epochs=3):
            check_rank(found, ooms=share is not None)
            [rows, *_] = [each["rows"] for each in found["logged"][0] if "rows" in each]
            assert rows == EVALUATED[name]  # no row twice


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uneven", "is_sharded", "steps"),
    [(False, False, 1), (False, False, 2), (True, False, 1), (False, True, 1)],
)
def test_two_fabric_ranks_match_plain_loop(
    world: World, uneven: bool, is_sharded: bool, steps: int
) -> None:
    how = {"devices": 2, "is_sharded": is_sharded}
    for found in world.run(
        on_ranks, compare, "fabric", "tags", 0.6, uneven=uneven, steps=steps, how=how
    ):
        check_rank(found, ooms=True)


def compare_loaders(rank: int, share: float | None, config: dict[str, Any], **case: Any) -> Any:
    case["how"] = {"dataloader_config": DataLoaderConfiguration(**config)}
    return compare(rank, "accelerate", "tags", share, **case)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "config",
    [{}, {"split_batches": True}, {"dispatch_batches": True}, {"use_seedable_sampler": True}],
    ids=lambda config: "".join(config) or "default",
)
def test_ranks_with_unequal_token_counts_match_ddp(world: World, config: dict[str, Any]) -> None:
    for share in (None, 0.6):
        for found in world.run(on_ranks, compare_loaders, share, config):
            check_rank(found, ooms=share is not None)


@pytest.mark.sweep
def test_scales_for_ranks_weights_by_all_tokens(world: World) -> None:
    for found in world.run(on_ranks, compare_loaders, None, {}, scales_for_ranks=True):
        assert found["parameters"] > 1e-4


@pytest.mark.sweep
def test_ranks_may_run_out_of_batches_separately(world: World) -> None:
    """With ``even_batches=False``, a rank without further batches continues with None."""
    for found in world.run(on_ranks, run_out_of_batches):
        assert found == {"steps": 4, "own": [4, 4, 4, found["last"]], "last": found["last"]}


def run_out_of_batches(rank: int) -> dict[str, Any]:
    reset()
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    model = nn.Linear(5, 3)
    rows = TensorDataset(torch.randn(28, 5), torch.randint(3, (28,)))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, 4)
    )
    step = microbatcher(accelerator, model, optimizer, loss_fn=nn.functional.cross_entropy)
    own = []
    batches = iter(loader)
    while (result := step.backward(next(batches, None))).num_global_samples:
        own.append(result.num_samples)
        optimizer.step()
        optimizer.zero_grad()
    return {"steps": len(own), "own": own, "last": 4 if rank == 0 else 0}


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [1, 2])
def test_two_fsdp2_ranks_match_plain_fsdp2(world: World, steps: int) -> None:
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_each_batch=True)
    how = {"plugin": plugin, "is_sharded": True}
    for share in (None, 0.7):
        for found in world.run(on_ranks, compare, "accelerate", "tags", share, how=how):
            check_rank(found, ooms=share is not None)


def accumulate_sharded(rank: int) -> str:
    with pytest.raises(ValueError, match="sync_each_batch=True") as caught:
        train(TAGS, "accelerate", ours=True, steps=2, how={"is_sharded": True})
    return str(caught.value)


@pytest.mark.sweep
def test_fsdp2_without_sync_each_batch_is_rejected(world: World) -> None:
    for message in world.run(on_ranks, accumulate_sharded):
        assert "num_steps=2" in message


def join(rank: int) -> str:
    reset()
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(5, 3)
    rows = TensorDataset(torch.randn(28, 5), torch.randint(3, (28,)))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, 4)
    )
    step = microbatcher(accelerator, model, optimizer, loss_fn=nn.functional.cross_entropy)
    accelerator.state.distributed_type = DistributedType.MULTI_GPU  # else join does nothing

    def loop() -> None:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for batch in loader:
                step.backward(batch)

    with pytest.raises((ValueError, PeerFailedError)) as caught:
        loop()
    return str(caught.value)


@pytest.mark.sweep
def test_join_uneven_inputs_is_rejected_without_deadlock(world: World) -> None:
    for message in world.run(on_ranks, join):
        assert "backward(None)" in message


def test_model_without_fabric_setup_is_rejected() -> None:
    fabric, plain, loss_fn = Fabric(accelerator="cpu"), nn.Linear(6, 3), nn.CrossEntropyLoss()
    model, optimizer = fabric.setup(plain, torch.optim.Adam(plain.parameters()))
    with pytest.raises(ValueError, match=r"Pass what fabric\.setup"):
        in_fabric(fabric, plain, optimizer, loss_fn=loss_fn)
    with pytest.raises(TypeError, match=r"is set by Fabric\(precision=…\)\. Leave it out"):
        in_fabric(fabric, model, optimizer, loss_fn=loss_fn, precision="bf16")
