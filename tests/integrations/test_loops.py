"""Custom loops with accelerate and Fabric, as on their pages; one line differs with automicro."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from accelerate import Accelerator, DataLoaderConfiguration, DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

from automicro import LossAverageError, MemoryBudget
from automicro.batch.device import on_host
from automicro.errors import PeerFailedError
from automicro.integrations.accelerate import microbatcher
from automicro.integrations.lightning import microbatcher as in_fabric
from automicro.memory.device import active_budget
from tests.integrations.hosts import HostTests, Ran, check_rows, max_diff, on_ranks
from tests.ranks.world import World, world_of
from tests.ranks.wrapping import whole

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")


def reset() -> None:
    """Reset the settings that accelerate shares between all accelerators of a process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    reset()
    yield
    reset()


# Examples


@dataclass(frozen=True)
class Example:
    """Data, rows of a batch, and what the loss averages over."""

    model: Callable[[float], nn.Module]
    data: Callable[[], TensorDataset]
    batch_size: int
    loss_fn: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy
    average: str = "auto"


def cnn(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(128, 10),
    )  # fmt: skip


def digits() -> TensorDataset:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(inputs[:450], torch.tensor(labels)[:450])


def tagger(dropout: float) -> nn.Module:
    layers = nn.Embedding(32, 24), nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 8)
    return nn.Sequential(*layers)


def tagged() -> TensorDataset:
    """Return rows with unequally many targets, also on each rank."""
    drawn = torch.Generator().manual_seed(3)
    words = torch.randint(32, (150, 48), generator=drawn)
    tags = torch.randint(8, (150, 48), generator=drawn)
    tags[torch.arange(48) >= torch.randint(1, 49, (150, 1), generator=drawn)] = -100
    return TensorDataset(words, tags)


def of_tags(outputs: Tensor, tags: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), tags.flatten())


EXAMPLES = {
    "cv": Example(cnn, digits, 64),
    "tags": Example(tagger, tagged, 12, of_tags, average="tokens"),
}


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


# Hosts


class InAccelerate:
    """A training step as in the documentation of accelerate."""

    def __init__(
        self, precision: str, steps: int, scale: float | None, *, sharded: bool = False, **how: Any
    ) -> None:
        reset()
        how = {"gradient_accumulation_steps": steps, **how}
        mixed = "fp16" if scale else precision
        self.accelerator = accelerator = Accelerator(
            cpu=True, mixed_precision=mixed if mixed in ("bf16", "fp16") else None, **how
        )
        if sharded:  # as accelerate does, which skips it without an accelerator device
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
            )
            plugin.cpu_ram_efficient_loading = False
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            accelerator.state.distributed_type = DistributedType.FSDP
            accelerator.state.fsdp_plugin = plugin
        if scale is not None:  # accelerate does this for fp16 on a GPU
            accelerator.scaler, accelerator.native_amp = scaler_of(scale), True
        self.scaler = accelerator.scaler

    def prepare(self, model: nn.Module, kind: Any, loaders: Any, schedule: Any) -> Any:
        optimizer = kind(model.parameters(), lr=1e-2)
        self.model, self.optimizer, *loaders, self.scheduler = self.accelerator.prepare(
            model, optimizer, *loaders, schedule(optimizer)
        )
        self.backward = self.accelerator.backward
        return loaders

    def step(self, **options: Any) -> Any:
        step = microbatcher(self.accelerator, self.model, self.optimizer, **options)
        self.accelerator.register_for_checkpointing(step)
        return step

    def batch(self, index: int, is_last: bool) -> Any:
        return self.accelerator.accumulate(self.model)

    def update(self) -> None:
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, step: Any) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path, step: Any) -> None:
        self.accelerator.load_state(str(folder))


class InFabric:
    """A training step as in the documentation of Fabric."""

    def __init__(
        self,
        precision: str,
        steps: int,
        scale: float | None,
        *,
        sharded: bool = False,
        devices: int = 1,
    ) -> None:
        names = {"float32": "32-true", "float64": "64-true", "bf16": "bf16-mixed"}
        how: dict[str, Any] = {"precision": names[precision], "devices": devices}
        if scale is not None:
            mixed = MixedPrecision("16-mixed", "cpu", scaler=scaler_of(scale))
            how |= {"plugins": [mixed], "precision": None}
        if sharded:
            how["strategy"] = ModelParallelStrategy(shard, process_group_backend="gloo")
        elif devices > 1:
            how["strategy"] = DDPStrategy(process_group_backend="gloo")
        self.fabric, self.steps = Fabric(accelerator="cpu", **how), steps
        self.fabric.launch()
        self.scaler = getattr(self.fabric.strategy.precision, "scaler", None)

    def prepare(self, model: nn.Module, kind: Any, loaders: Any, schedule: Any) -> Any:
        self.model = self.fabric.setup_module(model)
        optimizer = kind(self.model.parameters(), lr=1e-2)  # sharded parameters, if there are any
        self.scheduler = schedule(optimizer)
        self.optimizer: Any = self.fabric.setup_optimizers(optimizer)
        self.backward = self.fabric.backward
        return loaders

    def step(self, **options: Any) -> Any:
        return in_fabric(self.fabric, self.model, self.optimizer, **options)

    def batch(self, index: int, is_last: bool) -> Any:
        self.accumulates = (index + 1) % self.steps != 0 and not is_last
        enabled = self.accumulates and self.fabric.world_size > 1
        return self.fabric.no_backward_sync(self.model, enabled=enabled)

    def update(self) -> None:
        if self.accumulates:
            return
        self.fabric.clip_gradients(
            self.model, self.optimizer, max_norm=1.0, error_if_nonfinite=False
        )
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def _state(self, step: Any) -> dict[str, Any]:
        optimizers = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        return {"model": self.model, **optimizers, "step": step}

    def save(self, folder: Path, step: Any) -> None:
        self.fabric.save(folder / "state", self._state(step))
        torch.save(torch.get_rng_state(), folder / "rng")

    def load(self, folder: Path, step: Any) -> None:
        self.fabric.load(folder / "state", self._state(step))
        torch.set_rng_state(torch.load(folder / "rng"))


def shard(model: Any, mesh: Any) -> Any:
    """Shard a model for the FSDP2 strategy of Fabric."""
    return fully_shard(model, mesh=mesh["data_parallel"])


def scaler_of(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=5)


def train(
    host: Any,
    options: Any,
    *,
    name: str = "cv",
    dropout: float = 0.0,
    precision: str = "float32",
    steps: int = 1,
    scale: float | None = None,
    epochs: int = 2,
    kind: Any = torch.optim.AdamW,
    take: slice = slice(None),
    shrink: int = 1,
    saves: Path | None = None,
    loads: Path | None = None,
    **how: Any,
) -> Ran:
    """Run the loop of the examples."""
    torch.manual_seed(42)
    example, made = EXAMPLES[name], host(precision, steps, scale, **how)
    dtype = torch.float64 if precision == "float64" else torch.float32
    with on_host():  # the limit applies to steps only
        every, size = example.data()[take], example.batch_size // shrink
        every = [each.to(dtype) if each.is_floating_point() else each for each in every]
        kept = len(every[0]) * 4 // 5
        sets = [
            TensorDataset(*parts)
            for parts in zip(*(each.split(kept) for each in every), strict=True)
        ]
        train_loader, eval_loader = made.prepare(
            example.model(dropout).to(dtype),
            kind,
            [DataLoader(sets[0], size, shuffle=True), DataLoader(sets[1], 2 * size)],
            lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=1e-2, total_steps=3 * kept // size + 8
            ),
        )
    model: Any = made.model
    options = None if options is None else dict(options)
    if how.get("sharded"):
        assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    given = {"loss_fn": example.loss_fn, "loss_average": example.average, **(options or {})}
    given |= {"probe": False} if how.get("sharded") else {}
    step: Any = made.step(**given) if options is not None or saves or loads else None
    if loads is not None:
        made.load(loads, step)
    logged: list[dict[str, Any]] = []
    ooms, budget = 0, active_budget()
    from_host = iter if budget is None else budget.from_host
    for _ in range(epochs):
        model.train()
        for index, batch in enumerate(from_host(train_loader)):
            with made.batch(index, index + 1 == len(train_loader)):
                if options is not None:
                    result = step.backward(batch)
                    loss, ooms = result.rank_loss, ooms + result.ooms
                else:
                    loss = example.loss_fn(model(batch[0]), batch[1])
                    made.backward(loss)
                made.update()
            logged.append({"loss": loss.item(), "rate": made.optimizer.param_groups[0]["lr"]})
            del batch, loss
        model.eval()
        for batch in from_host(eval_loader):
            if options is not None:
                outputs = step.evaluate(batch, return_outputs=True).outputs
            else:
                with torch.no_grad():
                    outputs = model(batch[0])
            logged.append({"hits": int((outputs.argmax(dim=-1) == batch[1]).sum())})
    if saves is not None:
        made.save(saves, step)
    return Ran(
        [whole(p).clone() for p in model.parameters()],
        logged,
        host=SimpleNamespace(ooms=ooms, sizes=None if step is None else step.state_dict()),
        microbatches=0 if options is None else result.num_microbatches,
        scale=None if made.scaler is None else made.scaler.get_scale(),
    )


# Setups that are refused


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


def with_type(kind: str) -> Callable[[], Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    return with_attributes(distributed_type=DistributedType[kind], fsdp_plugin=plugin)


def unprepared(model: bool = False, optimizer: bool = False) -> Any:
    accelerator, wrapped, steps = prepared()
    given = nn.Linear(4, 2) if model else wrapped, steps.optimizer if optimizer else steps
    return microbatcher(accelerator, *given)


def optimizer_of_other_model() -> Any:
    accelerator, model, _ = prepared()
    other = accelerator.prepare(torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1))
    return microbatcher(accelerator, model, other, loss_fn=nn.MSELoss())


def accumulate_under_accumulation() -> Any:
    step = microbatcher(*prepared(gradient_accumulation_steps=2), loss_fn=nn.MSELoss())
    return step.accumulate([(torch.randn(3, 4), torch.randn(3, 2))] * 2)


def summed_loss() -> Any:
    step = microbatcher(*prepared(), forward=lambda model, batch: model(batch).square().sum())
    return step.backward(torch.randn(8, 4))


def fabric_step(is_set_up: bool, **options: Any) -> Any:
    fabric, plain = Fabric(accelerator="cpu"), nn.Linear(6, 3)
    model, optimizer = fabric.setup(plain, torch.optim.Adam(plain.parameters()))
    return in_fabric(fabric, model if is_set_up else plain, optimizer, loss_fn=of_tags, **options)


def is_missing(host: str) -> None:
    hidden = f"import sys; sys.modules[{host!r}] = None; import automicro.integrations.{host}"
    ended = subprocess.run(
        [sys.executable, "-c", hidden], capture_output=True, text=True, timeout=120
    )
    raise ImportError(ended.stderr.splitlines()[-1])


class InLoops(HostTests):
    """A loop of one of the hosts."""

    HOST: ClassVar[Any]
    CASES: ClassVar = {"cv": {}, "tags": {"name": "tags", "steps": 4}}
    EXACT: ClassVar = {"precision": "float64", "kind": sgd}
    MIXED = (
        ({"precision": "bf16", "kind": sgd}, 1e-3),
        ({"scale": 2.0**30, "steps": 2}, 1e-2),  # skips the first steps
    )
    LIMITED: ClassVar = {"epochs": 1, "take": slice(200)}
    FP16: ClassVar = {"scale": 2.0**15}

    def run(self, folder: Path, options: Any, **case: Any) -> Ran:
        return train(self.HOST, options, **case)

    def resumed(self, folder: Path, first: bool, second: bool) -> Ran:
        folder.mkdir()
        case: dict[str, Any] = {"dropout": 0.2, "epochs": 1}  # and shuffled rows
        saved = self.run(folder, {} if first else None, saves=folder, **case)
        rest = self.run(folder, {} if second else None, loads=folder, **case)
        assert second or rest.host.sizes == saved.host.sizes
        return rest._replace(logged=saved.logged + rest.logged)


class TestAccelerate(InLoops):
    HOST = InAccelerate
    MISSING = ((Accelerator, "backward", print, r"accelerate \d+.* lacks the parameter 'loss'"),)
    REFUSED = (
        (with_type("DEEPSPEED"), ValueError, "DeepSpeed keeps its own gradients"),
        (with_type("FSDP"), ValueError, "fsdp_version=2"),
        (with_attributes(_mixed_precision="fp8"), ValueError, "mixed_precision='bf16'"),
        (with_attributes("", has_lomo_optimizer=True), ValueError, "LOMO changes parameters"),
        (
            with_attributes(parallelism_config=SimpleNamespace(cp_size=2)),
            ValueError,
            r"ParallelismConfig\(cp_size=2\)",
        ),
        (with_attributes(num_processes=2), ValueError, "its gradients would not be averaged"),
        (optimizer_of_other_model, ValueError, "parameters are not in the model"),
        (lambda: unprepared(model=True), ValueError, "prepare did not return this Linear"),
        (lambda: unprepared(optimizer=True), ValueError, "prepare did not return this SGD"),
        (accumulate_under_accumulation, ValueError, "divides by gradient_accumulation_steps=2"),
        (summed_loss, LossAverageError, "splitting changes this batch"),
        (lambda: microbatcher(nn.Linear(2, 2), nn.Linear(2, 2)), TypeError, "not an accelerate"),
        (lambda: microbatcher(*prepared(), backward=print), TypeError, "set by accelerator.back"),
        (lambda: microbatcher(*prepared(), precision="bf16"), TypeError, "Accelerator.mixed"),
        (lambda: is_missing("accelerate"), ImportError, r"pip install 'automicro\[accelerate\]'"),
        (lambda: is_missing("keras"), ImportError, r"pip install 'automicro\[keras\]'"),
    )

    def test_accumulated_batches_match_one_batch(self) -> None:
        accelerator, model, optimizer = prepared()
        step = microbatcher(accelerator, model, optimizer, loss_fn=nn.MSELoss())
        rows = [(torch.randn(n, 4), torch.randn(n, 2)) for n in (3, 5)]
        step.accumulate(rows)
        ours = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        inputs, targets = (torch.cat(each) for each in zip(*rows, strict=True))
        nn.MSELoss()(model(inputs), targets).backward()
        assert max_diff(ours, [p.grad for p in model.parameters()]) < 1e-6


class TestFabric(InLoops):
    HOST = InFabric
    TOLERANCES: ClassVar = {"tags": 1e-7}  # Fabric returns outputs in float32
    REFUSED = (
        (lambda: fabric_step(False), ValueError, r"Pass what fabric\.setup"),
        (
            lambda: fabric_step(True, precision="bf16"),
            TypeError,
            r"is set by Fabric\(precision=…\)\. Leave it out",
        ),
    )


# Several ranks


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(2) as two:
        yield two


def compare(rank: int, host: Any, share: float | None, *, uneven: bool = False, **case: Any) -> Any:
    """Run the plain loop, and one with automicro and little memory on rank 1."""
    if uneven and rank == 1:  # as many batches, with half of the rows
        case |= {"take": slice(75), "shrink": 2}
    options = case.pop("options", {})
    case = {"kind": sgd, "name": "tags", **case}
    with MemoryBudget("1GiB") as budget:
        plain = train(host, None, **case)
    with MemoryBudget(int(budget.peak_bytes * share) if share and rank == 1 else "1GiB"):
        ours = train(host, options, **case)
    gap = max_diff(ours.tensors, plain.tensors)
    return {"ooms": ours.host.ooms, "gap": gap, "logged": (ours.logged, plain.logged)}


def check_ranks(world: World, share: float | None, host: Any, **case: Any) -> None:
    for found in world.run(on_ranks, compare, host, share, **case):
        assert (found["ooms"] > 0) == (share is not None)
        assert found["gap"] < 1e-6
        check_rows(*found["logged"])


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "steps"), [("cv", 1), ("tags", 3)])
def test_two_ranks_match_ddp_when_one_runs_out_of_memory(
    world: World, name: str, steps: int
) -> None:
    for share in (None, 0.5):
        check_ranks(world, share, InAccelerate, name=name, steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uneven", "sharded", "steps"),
    [(False, False, 2), (True, False, 1), (False, True, 1)],
)
def test_two_fabric_ranks_match_plain_loop(
    world: World, uneven: bool, sharded: bool, steps: int
) -> None:
    how = {"devices": 2, "sharded": sharded}
    check_ranks(world, 0.6, InFabric, uneven=uneven, steps=steps, **how)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "config",
    [{"split_batches": True}, {"dispatch_batches": True}],
    ids=lambda config: "".join(config),
)
def test_ranks_with_unequal_token_counts_match_ddp(world: World, config: dict[str, Any]) -> None:
    how = {"dataloader_config": DataLoaderConfiguration(**config)}
    for share in (None, 0.6):
        check_ranks(world, share, InAccelerate, **how)


@pytest.mark.sweep
def test_two_fsdp2_ranks_match_plain_fsdp2(world: World) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    how = {"gradient_accumulation_plugin": plugin, "steps": 1, "sharded": True}
    for share in (None, 0.7):
        check_ranks(world, share, InAccelerate, **how)


@pytest.mark.sweep
def test_scales_for_ranks_weights_by_all_tokens(world: World) -> None:
    options = {"scales_for_ranks": True}
    for found in world.run(on_ranks, compare, InAccelerate, None, options=options):
        assert found["gap"] > 1e-4


def linear(**how: Any) -> tuple[Any, Any, Any, Any, Any]:
    reset()
    accelerator, model = Accelerator(cpu=True, **how), nn.Linear(5, 3)
    rows = TensorDataset(torch.randn(28, 5), torch.randint(3, (28,)))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, 4)
    )
    step = microbatcher(accelerator, model, optimizer, loss_fn=nn.functional.cross_entropy)
    return accelerator, model, optimizer, loader, step


def run_out_of_batches(rank: int) -> list[int]:
    config = DataLoaderConfiguration(even_batches=False)
    _, _, optimizer, loader, step = linear(dataloader_config=config)
    own, batches = [], iter(loader)
    while (result := step.backward(next(batches, None))).num_global_samples:
        own.append(result.num_samples)
        optimizer.step()
        optimizer.zero_grad()
    return own


@pytest.mark.sweep
def test_ranks_may_run_out_of_batches_separately(world: World) -> None:
    """With ``even_batches=False``, a rank without further batches continues with None."""
    assert world.run(on_ranks, run_out_of_batches) == [[4, 4, 4, 4], [4, 4, 4, 0]]


def accumulate_sharded(rank: int) -> str:
    with pytest.raises(ValueError, match="sync_each_batch=True") as caught:
        train(InAccelerate, {}, name="tags", steps=2, sharded=True)
    return str(caught.value)


def join(rank: int) -> str:
    accelerator, model, _, loader, step = linear()
    accelerator.state.distributed_type = DistributedType.MULTI_GPU  # else join does nothing
    try:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for batch in loader:
                step.backward(batch)
    except (ValueError, PeerFailedError) as error:
        return str(error)
    return ""


@pytest.mark.sweep
@pytest.mark.parametrize(("job", "says"), [(accumulate_sharded, "num_steps=2"), (join, "(None)")])
def test_setups_of_ranks_are_rejected_without_deadlock(world: World, job: Any, says: str) -> None:
    for message in world.run(on_ranks, job):
        assert says in message
