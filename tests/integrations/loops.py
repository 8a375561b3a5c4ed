"""Training loops from the pages of accelerate and Fabric; one line differs with automicro."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from automicro.batch.device import on_host
from automicro.integrations.accelerate import microbatcher as in_accelerate
from automicro.integrations.lightning import microbatcher as in_fabric
from automicro.memory.device import active_budget
from tests.ranks.wrapping import whole


@dataclass(frozen=True)
class Trained:
    """The results of a loop."""

    parameters: list[Tensor]
    logged: list[dict[str, Any]]
    ooms: int
    scale: float | None
    sizes: Any
    events: tuple[str, ...] = ()

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.logged if "loss" in row]


# Public examples: model, data and loss


@dataclass(frozen=True)
class Example:
    """A public example: its model, data and loss."""

    model: Callable[[float], nn.Module]
    data: Callable[[torch.dtype], tuple[Any, Any]]
    scheduler: Callable[[torch.optim.Optimizer, int], Any]
    loss_fn: Callable[[Any, Any], Tensor]
    batch_size: int
    average: str = "auto"


def warm_up(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)


def cnn(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(128, 10),
    )  # fmt: skip


def digits(dtype: torch.dtype) -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=dtype).reshape(-1, 1, 8, 8) / 16
    data = TensorDataset(inputs, torch.tensor(labels))
    rows = range(len(data))
    return [data[i] for i in rows[:350]], [data[i] for i in rows[350:450]]


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)


class Tagger(nn.Module):
    """A model whose loss counts valid targets, which are unequally many on each rank."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 24)
        self.inner = nn.Linear(24, 96)
        self.outer = nn.Linear(96, 8)

    def forward(self, words: Tensor) -> Tensor:
        outputs: Tensor = self.outer(torch.tanh(self.inner(self.embedding(words))))
        return outputs


def tagged(dtype: torch.dtype) -> tuple[Any, Any]:
    drawn = torch.Generator().manual_seed(3)
    words = torch.randint(32, (150, 48), generator=drawn)
    tags = torch.randint(8, (150, 48), generator=drawn)
    lengths = torch.randint(1, 49, (150, 1), generator=drawn)
    tags[torch.arange(48) >= lengths] = -100
    rows = list(zip(words, tags, strict=True))
    return rows[:126], rows[126:]


def tag_loss(outputs: Tensor, tags: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), tags.flatten())


CV = Example(cnn, digits, one_cycle, nn.functional.cross_entropy, 64)
TAGS = Example(Tagger, tagged, warm_up, tag_loss, 12, average="tokens")
EXAMPLES = {"cv": CV, "tags": TAGS}


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


# Hosts


def reset() -> None:
    """Reset the settings that accelerate shares between all accelerators of a process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class InAccelerate:
    """A training step as in the documentation of accelerate."""

    def __init__(
        self,
        precision: str,
        steps: int,
        scale: float | None,
        *,
        plugin: Any = None,
        is_sharded: bool = False,
        dataloader_config: Any = None,
    ) -> None:
        reset()
        how = {"gradient_accumulation_plugin": plugin} if plugin else {
            "gradient_accumulation_steps": steps
        }  # fmt: skip
        self.accelerator = accelerator = Accelerator(
            cpu=True,
            mixed_precision={"float32": None, "float64": None}.get(precision, precision),
            dataloader_config=dataloader_config,
            **how,
        )
        if is_sharded:
            shard_in_accelerate(accelerator)
        if scale is not None:  # accelerate does this for fp16 on a GPU
            accelerator.scaler = scaler_of(scale)
            accelerator.native_amp = True
        self.scaler = accelerator.scaler

    def prepare(self, model: nn.Module, kind: Any, loaders: Any, schedule: Any) -> Any:
        optimizer = kind(model.parameters(), lr=1e-2)
        self.model, self.optimizer, *loaders, self.scheduler = self.accelerator.prepare(
            model, optimizer, *loaders, schedule(optimizer)
        )
        return loaders

    def step(self, **options: Any) -> Any:
        step = in_accelerate(self.accelerator, self.model, self.optimizer, **options)
        self.accelerator.register_for_checkpointing(step)
        return step

    @contextlib.contextmanager
    def batch(self, index: int, is_last: bool) -> Iterator[None]:
        with self.accelerator.accumulate(self.model):
            yield

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def update(self) -> None:
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def gather(self, pair: tuple[Tensor, Tensor]) -> Any:
        return self.accelerator.gather_for_metrics(pair)

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
        is_sharded: bool = False,
        devices: int = 1,
    ) -> None:
        names = {"float32": "32-true", "float64": "64-true", "bf16": "bf16-mixed"}
        how: dict[str, Any] = {"precision": names.get(precision), "devices": devices}
        if scale is not None:
            mixed = MixedPrecision("16-mixed", "cpu", scaler=scaler_of(scale))
            how |= {"plugins": [mixed], "precision": None}
        if is_sharded:
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
        return loaders

    def step(self, **options: Any) -> Any:
        return in_fabric(self.fabric, self.model, self.optimizer, **options)

    @contextlib.contextmanager
    def batch(self, index: int, is_last: bool) -> Iterator[None]:
        self.accumulates = (index + 1) % self.steps != 0 and not is_last
        enabled = self.accumulates and self.fabric.world_size > 1
        with self.fabric.no_backward_sync(self.model, enabled=enabled):
            yield

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def update(self) -> None:
        if self.accumulates:
            return
        self.fabric.clip_gradients(
            self.model, self.optimizer, max_norm=1.0, error_if_nonfinite=False
        )
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def gather(self, pair: tuple[Tensor, Tensor]) -> Any:
        return pair

    def _state(self, step: Any) -> dict[str, Any]:
        optimizers = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        return {"model": self.model, **optimizers, "step": step}

    def save(self, folder: Path, step: Any) -> None:
        self.fabric.save(folder / "state", self._state(step))
        torch.save(torch.get_rng_state(), folder / "rng")

    def load(self, folder: Path, step: Any) -> None:
        self.fabric.load(folder / "state", self._state(step))
        torch.set_rng_state(torch.load(folder / "rng"))


HOSTS: dict[str, Any] = {"accelerate": InAccelerate, "fabric": InFabric}


def scaler_of(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=5)


def shard(model: Any, mesh: Any) -> Any:
    """Shard a model for the FSDP2 strategy of Fabric."""
    return fully_shard(model, mesh=mesh["data_parallel"])


def shard_in_accelerate(accelerator: Any) -> None:
    """Set up FSDP2 as accelerate does, which it skips without an accelerator device."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
    )
    plugin.cpu_ram_efficient_loading = False
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def train(
    example: Example,
    host: str,
    *,
    ours: bool,
    dropout: float = 0.0,
    precision: str = "float32",
    steps: int = 1,
    scale: float | None = None,
    epochs: int = 2,
    kind: Any = torch.optim.AdamW,
    saves: Path | None = None,
    loads: Path | None = None,
    how: dict[str, Any] | None = None,
    **options: Any,
) -> Trained:
    """Run the loop of the examples."""
    torch.manual_seed(42)
    made = HOSTS[host](precision, steps, scale, **(how or {}))
    dtype = torch.float64 if precision == "float64" else torch.float32
    with on_host():  # the limit applies to steps only
        train_rows, eval_rows = example.data(dtype)
        size = example.batch_size
        shuffled: Any = DataLoader(train_rows, size, shuffle=True)
        train_loader, eval_loader = made.prepare(
            example.model(dropout).to(dtype),
            kind,
            [shuffled, DataLoader(eval_rows, 2 * size)],
            lambda optimizer: example.scheduler(optimizer, 3 * len(shuffled) + 4),
        )
    model = made.model
    if (how or {}).get("is_sharded"):
        assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        options["probe"] = False
    options = {"loss_fn": example.loss_fn, "loss_average": example.average, **options}
    counted = made.step(**options) if ours or saves or loads else None
    step = counted if ours else None
    if loads is not None:
        made.load(loads, counted)
    logged: list[dict[str, Any]] = []
    ooms, budget = 0, active_budget()
    from_host = iter if budget is None else budget.from_host
    for _ in range(epochs):
        model.train()
        for index, batch in enumerate(from_host(train_loader)):
            with made.batch(index, index + 1 == len(train_loader)):
                if step is not None:
                    result = step.backward(batch)
                    loss, ooms = result.rank_loss, ooms + result.ooms
                else:
                    loss = loss_of(example, model, batch)[0]
                    made.backward(loss)
                made.update()
            logged.append({"loss": loss.item(), "rate": made.optimizer.param_groups[0]["lr"]})
            del batch, loss
        model.eval()
        seen = []
        for batch in from_host(eval_loader):
            if step is not None:
                outputs = step.evaluate(batch, return_outputs=True).outputs
            else:
                with torch.no_grad():
                    outputs = loss_of(example, model, batch)[1]
            seen.append(torch.stack(made.gather((outputs.argmax(dim=-1), batch[1]))))
        found = torch.cat(seen, dim=1)
        logged.append({"rows": found.shape[1], "hits": int((found[0] == found[1]).sum())})
    if saves is not None:
        made.save(saves, counted)
    return Trained(
        [whole(p).clone() for p in model.parameters()],
        logged,
        ooms,
        None if made.scaler is None else made.scaler.get_scale(),
        None if counted is None else counted.state_dict(),
    )


def running(example: Example, host: str, **case: Any) -> Callable[[Any], Trained]:
    """Make runs of an example, without automicro or with its options."""

    def run(options: Any) -> Trained:
        return train(example, host, ours=options is not None, **{**case, **(options or {})})

    return run


def loss_of(example: Example, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    inputs, targets = batch
    outputs = model(inputs)
    return example.loss_fn(outputs, targets), outputs
