"""Loops as the public examples of accelerate write them, with one line changed."""

import copy
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from automicro import LossAverageError, MemoryBudget, SampleTooLargeError
from automicro.errors import PeerFailedError
from tests.ranks.world import World, world_of
from tests.step.texts import Reader, texts

pytest.importorskip("accelerate")

from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin

from automicro.integrations.accelerate import microbatcher


def forget() -> None:
    """Accelerate keeps what the first accelerator of a process was told, for all later ones."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _new_accelerate() -> Iterator[None]:
    forget()
    yield
    forget()


@dataclass(frozen=True)
class Trained:
    """What a loop leaves."""

    losses: list[float]
    weights: list[Tensor]
    metrics: list[float]
    rates: list[float]
    ooms: int
    scale: float | None
    peak: int

    def weights_differ_by(self, other: "Trained") -> float:
        pairs = zip(self.weights, other.weights, strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs)

    def losses_differ_by(self, other: "Trained") -> float:
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


@dataclass(frozen=True)
class Example:
    """A public example: its model, its data, its loss."""

    model: Callable[[float], nn.Module]
    data: Callable[[torch.dtype], tuple[Any, Any]]
    collate: Callable[[list[Any]], Any] | None
    scheduler: Callable[[torch.optim.Optimizer, int], Any]
    loss_fn: Callable[[Any, Any], Tensor] | None
    batch_size: int
    average: str = "auto"


def bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def sentences(dtype: torch.dtype) -> tuple[Any, Any]:
    drawn = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 30, (134,), generator=drawn).tolist()
    rows = [
        {"input_ids": torch.randint(1, 64, (n,), generator=drawn), "labels": torch.tensor(n % 2)}
        for n in lengths
    ]
    return rows[:86], rows[86:]


def pad(rows: list[Any]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.stack([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def warm_up(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(optimizer, 3, steps)


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
    """A loss over targets that are not ignored, of which ranks have different numbers."""

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


NLP = Example(bert, sentences, pad, warm_up, None, 16)
CV = Example(cnn, digits, None, one_cycle, nn.functional.cross_entropy, 64)
TAGS = Example(Tagger, tagged, None, warm_up, tag_loss, 12, average="tokens")
EXAMPLES = {"nlp": NLP, "cv": CV, "tags": TAGS}
each_example = pytest.mark.parametrize("name", EXAMPLES)


def train(
    example: Example,
    *,
    ours: bool,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    precision: str | None = None,
    steps: int = 1,
    plugin: Any = None,
    limit: int | None = None,
    epochs: int = 2,
    clip: bool = True,
    change: Callable[[Any], None] = lambda accelerator: None,
    dataloader_config: Any = None,
    optimizer_kind: Any = torch.optim.AdamW,
    **options: Any,
) -> Trained:
    """The loop of the examples; ``ours`` changes what stands in the comments' place."""
    forget()
    torch.manual_seed(42)
    how = {"gradient_accumulation_plugin": plugin} if plugin else {
        "gradient_accumulation_steps": steps
    }  # fmt: skip
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, dataloader_config=dataloader_config, **how
    )
    change(accelerator)
    model = example.model(dropout).to(dtype)
    optimizer = optimizer_kind(model.parameters(), lr=1e-2)
    train_rows, eval_rows = example.data(dtype)
    train_loader = DataLoader(
        train_rows, example.batch_size, shuffle=True, collate_fn=example.collate
    )
    eval_loader = DataLoader(eval_rows, 2 * example.batch_size, collate_fn=example.collate)
    scheduler = example.scheduler(optimizer, epochs * len(train_loader) + 4)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    loss_fn = example.loss_fn
    if change is sharded:
        assert accelerator.is_fsdp2
        assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    options = {"loss_fn": loss_fn, "loss_average": example.average, **options}
    step = microbatcher(accelerator, model, optimizer, **options) if ours else None
    losses, metrics, rates, ooms = [], [], [], 0
    budget = MemoryBudget("1GiB" if limit is None else limit)
    with budget:
        for _ in range(epochs):
            model.train()
            for batch in budget.from_host(train_loader):
                with accelerator.accumulate(model):
                    if step is not None:
                        result = step.backward(batch)
                        loss, ooms = result.rank_loss, ooms + result.ooms
                    else:
                        loss = loss_of(example, model, batch)[0]
                        accelerator.backward(loss)
                    if clip and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                rates.append(optimizer.param_groups[0]["lr"])
                del batch, loss
            model.eval()
            seen = []
            for batch in budget.from_host(eval_loader):
                if step is not None:
                    outputs = step.evaluate(batch, return_outputs=True).outputs
                else:
                    with torch.no_grad():
                        outputs = loss_of(example, model, batch)[1]
                labels = batch["labels"] if isinstance(batch, dict) else batch[1]
                predictions = getattr(outputs, "logits", outputs).argmax(dim=-1)
                found = accelerator.gather_for_metrics((predictions, labels))
                seen.append(torch.stack(found))
            counted = torch.cat(seen, dim=1)
            metrics += [float(counted.shape[1]), float((counted[0] == counted[1]).sum())]
    return Trained(
        losses,
        [full(p) for p in model.parameters()],
        metrics,
        rates,
        ooms,
        None if accelerator.scaler is None else accelerator.scaler.get_scale(),
        budget.peak_bytes,
    )


def full(parameter: Any) -> Tensor:
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    whole = whole.detach().clone()
    assert isinstance(whole, Tensor)
    return whole


def loss_of(example: Example, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    if example.loss_fn is None:
        outputs = model(**batch)
        return outputs.loss, outputs
    inputs, targets = batch
    outputs = model(inputs)
    return example.loss_fn(outputs, targets), outputs


def assert_same_bits(plain: Trained, ours: Trained) -> None:
    assert ours.losses == plain.losses
    assert all(map(torch.equal, ours.weights, plain.weights))
    assert ours.metrics == plain.metrics
    assert ours.rates == plain.rates
    assert ours.scale == plain.scale


@pytest.mark.parametrize("steps", [1, 4])
@each_example
def test_without_a_limit_every_bit_is_the_plain_loops(name: str, steps: int) -> None:
    plain, ours = (
        train(EXAMPLES[name], ours=which, dropout=0.1, steps=steps) for which in (False, True)
    )
    assert_same_bits(plain, ours)
    assert len(plain.losses) >= 10
    assert len(set(plain.rates)) > 2


@pytest.mark.parametrize(
    ("dtype", "precision", "of_loss", "of_weights"),
    [
        (torch.float32, None, 1e-6, None),
        (torch.float64, None, 1e-12, 1e-12),
        (torch.float32, "bf16", 1e-3, None),
    ],
    ids=["fp32", "fp64", "bf16"],
)
@each_example
def test_in_half_of_the_memory_the_plain_loop_dies_and_ours_gives_its_numbers(
    name: str, dtype: torch.dtype, precision: str | None, of_loss: float, of_weights: float | None
) -> None:
    example = EXAMPLES[name]
    how: dict[str, Any] = {"dtype": dtype, "precision": precision, "optimizer_kind": sgd}
    plain = train(example, ours=False, **how)
    limit = int(plain.peak * 0.5)
    with pytest.raises(torch.OutOfMemoryError):
        train(example, ours=False, limit=limit, **how)
    ours = train(example, ours=True, limit=limit, **how)
    assert ours.ooms >= 1
    assert ours.losses_differ_by(plain) < of_loss
    if of_weights is not None:
        assert ours.weights_differ_by(plain) < of_weights
        assert ours.metrics == plain.metrics


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def scaled(accelerator: Any) -> None:
    """What accelerate does for fp16 on a GPU, where there is none."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=5)
    accelerator.native_amp = True


def too_scaled(accelerator: Any) -> None:
    """A scale so large that the first steps overflow, and are skipped."""
    scaled(accelerator)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("change", [scaled, too_scaled])
def test_the_scaler_of_fp16_has_the_scale_of_the_plain_loop(change: Any, steps: int) -> None:
    how: dict[str, Any] = {"precision": "fp16", "change": change, "steps": steps}
    plain, ours = (train(CV, ours=which, **how) for which in (False, True))
    assert_same_bits(plain, ours)
    assert plain.scale != 2.0**15
    limited = train(CV, ours=True, limit=int(plain.peak * 0.5), **how)
    assert limited.ooms >= 1
    assert limited.scale == plain.scale
    assert limited.rates == plain.rates  # a step that is skipped is none of the scheduler's
    assert limited.losses_differ_by(plain) < 1e-2


@pytest.mark.sweep
def test_whatever_the_limit_nothing_comes_out_but_that_a_row_does_not_fit() -> None:
    example = replace(CV, data=lambda dtype: tuple(part[:130] for part in digits(dtype)))
    how: dict[str, Any] = {"epochs": 1, "optimizer_kind": sgd}
    plain = train(example, ours=False, **how)
    ended = 0
    for share in range(3, 25):
        try:
            ours = train(example, ours=True, limit=plain.peak * share // 25, **how)
        except SampleTooLargeError:
            assert not ended  # more memory never hurts
            continue
        ended += 1
        assert ours.losses_differ_by(plain) < 1e-6
        assert ours.metrics == plain.metrics
    assert 15 <= ended < 22


@pytest.mark.parametrize("saves_ours", [False, True])
@pytest.mark.parametrize("resumes_ours", [False, True])
def test_a_state_that_accelerate_saves_is_resumed_by_the_plain_loop_and_by_ours(
    tmp_path: Path, saves_ours: bool, resumes_ours: bool
) -> None:
    """With dropout and shuffled rows; sizes travel in it, where the step is registered."""
    folder = str(tmp_path)

    def job(ours: bool, batches: int, *, resumes: bool) -> Any:
        forget()
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = cnn(0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(digits(torch.float32)[0], 64, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        step = microbatcher(
            accelerator, model, optimizer, loss_fn=nn.functional.cross_entropy, probe=False
        )
        accelerator.register_for_checkpointing(step)
        if resumes:
            accelerator.load_state(folder)
        losses = []
        rest = accelerator.skip_first_batches(loader, 3) if resumes else loader
        for inputs, targets in itertools.islice(rest, batches):
            if ours:
                losses.append(step.backward((inputs, targets)).loss.item())
            else:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                losses.append(loss.item())
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if not resumes:
            accelerator.save_state(folder)
        return losses, [full(p) for p in model.parameters()], step.state_dict()

    losses, _, _ = job(False, 3, resumes=False)
    after, weights, _ = job(False, 3, resumes=True)
    again, _, saved = job(saves_ours, 3, resumes=False)
    resumed, ours, sizes = job(resumes_ours, 3, resumes=True)
    assert again == losses
    assert resumed == after
    assert all(map(torch.equal, ours, weights))
    assert resumes_ours or sizes == saved


def prepared(**how: Any) -> tuple[Any, Any, Any]:
    accelerator = Accelerator(cpu=True, **how)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def of_kind(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        accelerator, model, optimizer = prepared()
        accelerator.state.distributed_type = DistributedType[kind]
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
        return microbatcher(accelerator, model, optimizer)

    return make


def in_fp8() -> Any:
    accelerator, model, optimizer = prepared()
    accelerator.state._mixed_precision = "fp8"
    return microbatcher(accelerator, model, optimizer)


def with_lomo() -> Any:
    accelerator, model, optimizer = prepared()
    accelerator.has_lomo_optimizer = True
    return microbatcher(accelerator, model, optimizer)


def of_more_processes() -> Any:
    accelerator, model, optimizer = prepared()
    accelerator.state.num_processes = 2
    return microbatcher(accelerator, model, optimizer, loss_fn=nn.MSELoss())


def in_context_parallel() -> Any:
    accelerator, model, optimizer = prepared()

    class Config:
        cp_size = 2

    accelerator.state.parallelism_config = Config()
    return microbatcher(accelerator, model, optimizer)


def of_another_model() -> Any:
    accelerator, model, _ = prepared()
    other = accelerator.prepare(torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1))
    return microbatcher(accelerator, model, other, loss_fn=nn.MSELoss())


def not_prepared_model() -> Any:
    accelerator, _, optimizer = prepared()
    return microbatcher(accelerator, nn.Linear(4, 2), optimizer)


def not_prepared_optimizer() -> Any:
    accelerator, model, optimizer = prepared()
    return microbatcher(accelerator, model, optimizer.optimizer)


def several_batches_in_accumulation() -> Any:
    accelerator, model, optimizer = prepared(gradient_accumulation_steps=2)
    step = microbatcher(accelerator, model, optimizer, loss_fn=nn.MSELoss())
    batch = torch.randn(3, 4), torch.randn(3, 2)
    return step.accumulate([batch, batch])


def another_mean() -> Any:
    accelerator, model, optimizer = prepared()
    step = microbatcher(
        accelerator, model, optimizer, forward=lambda model, batch: model(batch).square().sum()
    )
    return step.backward(torch.randn(8, 4))


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (of_kind("DEEPSPEED"), ValueError, "DeepSpeed keeps gradients"),
        (of_kind("MEGATRON_LM"), ValueError, "Megatron-LM keeps gradients"),
        (of_kind("XLA"), ValueError, "torch_xla keeps gradients"),
        (of_kind("FSDP"), ValueError, "fsdp_version=2"),
        (in_fp8, ValueError, "mixed_precision='bf16'"),
        (with_lomo, ValueError, "LOMO changes parameters"),
        (in_context_parallel, ValueError, r"ParallelismConfig\(cp_size=2\)"),
        (of_more_processes, ValueError, "its gradients would not be averaged"),
        (of_another_model, ValueError, "parameters are not in the model"),
        (not_prepared_model, ValueError, "the Linear did not come out of accelerator.prepare"),
        (not_prepared_optimizer, ValueError, "the SGD did not come out of accelerator.prepare"),
        (several_batches_in_accumulation, ValueError, "gradient_accumulation_steps=2 once more"),
        (another_mean, LossAverageError, "splitting changes this batch"),
        (lambda: microbatcher(nn.Linear(2, 2), nn.Linear(2, 2)), TypeError, "not an accelerate"),
        (lambda: microbatcher(*prepared(), backward=print), TypeError, "that is accelerator.back"),
        (lambda: microbatcher(*prepared(), precision="bf16"), TypeError, "Accelerator.mixed"),
    ],
)
def test_what_would_be_wrong_without_a_word_is_refused(wrong: Any, kind: Any, says: str) -> None:
    with pytest.raises(kind, match=says):
        wrong()


def test_a_seam_that_is_gone_is_named_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer = prepared()
    monkeypatch.setattr(Accelerator, "backward", lambda self, value: None)
    with pytest.raises(ImportError, match=r"accelerate \d+.* lacks the parameter 'loss'"):
        microbatcher(accelerator, model, optimizer)


@pytest.mark.parametrize("host", ["accelerate", "keras"])
def test_a_host_that_is_missing_is_named_with_its_extra(host: str) -> None:
    hidden = f"import sys; sys.modules[{host!r}] = None; import automicro.integrations.{host}"
    ended = subprocess.run(
        [sys.executable, "-c", hidden], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert f"pip install 'automicro[{host}]'" in ended.stderr.splitlines()[-1]


def test_several_batches_are_one_step_where_the_accelerator_does_not_divide() -> None:
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


def on_ranks(job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run in a process of a world, as ``accelerate launch`` starts it."""
    import torch.distributed as dist

    rank = str(dist.get_rank())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    return job(int(rank), *args, **kwargs)


def compare(rank: int, name: str, share: float | None, **how: Any) -> dict[str, Any]:
    """The plain loop and ours, which on rank 1 alone has little memory."""
    plain = train(EXAMPLES[name], ours=False, **how)
    limit = int(plain.peak * share) if share is not None and rank == 1 else None
    ours = train(EXAMPLES[name], ours=True, limit=limit, **how)
    return {
        "ooms": ours.ooms,
        "losses": ours.losses_differ_by(plain),
        "weights": ours.weights_differ_by(plain),
        "metrics": (ours.metrics, plain.metrics),
        "rates": (ours.rates, plain.rates),
        "steps": len(plain.losses),
    }


def check(found: dict[str, Any], *, ooms: bool) -> None:
    assert (found["ooms"] > 0) == ooms
    assert found["losses"] < 1e-6
    assert found["weights"] < 1e-6
    assert found["metrics"][0] == found["metrics"][1]
    assert found["rates"][0] == found["rates"][1]


EVALUATED = {"nlp": 48, "cv": 100, "tags": 24}


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [1, 3])
@each_example
def test_two_ranks_are_plain_ddp_also_where_one_runs_out_of_memory(
    world: World, name: str, steps: int
) -> None:
    for share in (None, 0.5):
        for found in world.run(
            on_ranks, compare, name, share, steps=steps, optimizer_kind=sgd, epochs=3
        ):
            check(found, ooms=share is not None)
            assert found["metrics"][0][0] == EVALUATED[name]  # none twice


def compare_loaders(rank: int, share: float | None, config: dict[str, Any], **how: Any) -> Any:
    from accelerate import DataLoaderConfiguration

    how["dataloader_config"] = DataLoaderConfiguration(**config)
    return compare(rank, "tags", share, **how)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "config",
    [{}, {"split_batches": True}, {"dispatch_batches": True}, {"use_seedable_sampler": True}],
    ids=lambda config: "".join(config) or "default",
)
def test_ranks_with_other_numbers_of_tokens_have_the_means_of_plain_ddp(
    world: World, config: dict[str, Any]
) -> None:
    for share in (None, 0.6):
        for found in world.run(on_ranks, compare_loaders, share, config, optimizer_kind=sgd):
            check(found, ooms=share is not None)


@pytest.mark.sweep
def test_all_tokens_of_all_ranks_are_one_batch_where_that_is_asked_for(world: World) -> None:
    for found in world.run(
        on_ranks, compare_loaders, None, {}, optimizer_kind=sgd, scales_for_ranks=True
    ):
        assert found["weights"] > 1e-4


@pytest.mark.sweep
def test_ranks_may_run_dry_one_after_the_other(world: World) -> None:
    """``even_batches=False``: the rank that has no more batch goes on with None."""
    for found in world.run(on_ranks, run_dry):
        assert found == {"steps": 4, "own": [4, 4, 4, found["last"]], "last": found["last"]}


def run_dry(rank: int) -> dict[str, Any]:
    from accelerate import DataLoaderConfiguration

    forget()
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


def sharded(accelerator: Any) -> None:
    """FSDP2 as accelerate sets it up, which it itself does on accelerators only."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
    )
    plugin.cpu_ram_efficient_loading = False
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def compare_sharded(rank: int, share: float | None, **how: Any) -> dict[str, Any]:
    return compare(rank, "tags", share, change=sharded, probe=False, **how)


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [1, 2])
def test_two_ranks_of_fsdp2_are_plain_fsdp2(world: World, steps: int) -> None:
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_each_batch=True)
    for share in (None, 0.7):
        for found in world.run(on_ranks, compare_sharded, share, plugin=plugin, optimizer_kind=sgd):
            check(found, ooms=share is not None)


def accumulate_sharded(rank: int) -> str:
    with pytest.raises(ValueError, match="sync_each_batch=True") as caught:
        train(TAGS, ours=True, change=sharded, probe=False, steps=2)
    return str(caught.value)


@pytest.mark.sweep
def test_fsdp2_that_keeps_gradients_back_is_refused_by_name(world: World) -> None:
    for message in world.run(on_ranks, accumulate_sharded):
        assert "num_steps=2" in message


def join(rank: int) -> str:
    forget()
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(5, 3)
    rows = TensorDataset(torch.randn(28, 5), torch.randint(3, (28,)))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, 4)
    )
    step = microbatcher(accelerator, model, optimizer, loss_fn=nn.functional.cross_entropy)
    accelerator.state.distributed_type = DistributedType.MULTI_GPU  # elsewhere it does nothing

    def loop() -> None:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for batch in loader:
                step.backward(batch)

    with pytest.raises((ValueError, PeerFailedError)) as caught:
        loop()
    return str(caught.value)


@pytest.mark.sweep
def test_joining_uneven_inputs_is_refused_and_nobody_waits(world: World) -> None:
    for message in world.run(on_ranks, join):
        assert "backward(None)" in message


@pytest.mark.filterwarnings("ignore:the training forward changes attributes")
def test_slices_by_cost_have_the_gradient_of_the_whole_batch() -> None:
    model, batch = Reader(), texts([9, 3, 17, 5, 5, 12, 2, 8, 16, 4, 7])
    model(**batch)["loss"].backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    micro = microbatcher(
        accelerator,
        prepared,
        optimizer,
        microbatch_unit="tokens",
        microbatch_size=40,
        loss_average="tokens",
    )
    result = micro.backward(batch)
    assert result.num_microbatches > 1
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - gradient).abs().max() < 1e-12


def test_a_part_has_a_size_of_its_own() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 2)))
    model = copy.deepcopy(plain)
    accelerator = Accelerator(cpu=True)
    ours, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(8, 4), torch.randn(8, 2)
    micro = microbatcher(
        accelerator, ours, loss_fn=nn.MSELoss(), microbatch_size=4, nested={"1": 2}
    )
    micro.backward(batch)
    nn.MSELoss()(plain(batch[0]), batch[1]).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    part: Any = model[1]
    assert part.forward.nested.sizes == [2, 2]
    optimizer.step()
