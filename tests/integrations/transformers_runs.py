"""Hugging Face trainers on tiny models and generated data, with and without automicro."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from automicro.integrations.transformers import enable
from tests.integrations.hosts import Ran, max_diff

VOCABULARY, LENGTH, ROWS = 50, 40, 44  # 44 rows: 5 batches of 8, and one of 4
Rows = list[dict[str, Tensor]]


# Data


def tokens(rows: int = ROWS) -> Rows:
    """Return language model rows with different numbers of ignored targets."""
    drawn = torch.Generator().manual_seed(0)
    found = []
    for _ in range(rows):
        ids = torch.randint(2, VOCABULARY, (LENGTH,), generator=drawn)
        labels = ids.clone()
        labels[: int(torch.randint(0, LENGTH - 2, (), generator=drawn))] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def classes(rows: int = ROWS) -> Rows:
    return [{**row, "labels": row["input_ids"][0] % 3} for row in tokens(rows)]


def unlabeled(rows: int = ROWS) -> Rows:
    return [{"input_ids": row["input_ids"]} for row in tokens(rows)]


# Models


def gpt2(dropout: float) -> nn.Module:
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=VOCABULARY, n_positions=LENGTH,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def t5(dropout: float) -> nn.Module:
    config = T5Config(  # type: ignore[call-arg]
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2,
        dropout_rate=dropout, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model: nn.Module = T5ForConditionalGeneration(config)
    return model


def bert(dropout: float, kind: Any = BertForSequenceClassification) -> nn.Module:
    config = BertConfig(  # type: ignore[call-arg]
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, num_labels=3,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    model: nn.Module = kind(config)
    return model


class Own(nn.Module):
    """A user-defined module with an undeclared mean over samples."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(64, 3)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.body(self.embedding(input_ids)).mean(1))
        loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


class IgnoresItems(Own):
    """Accept ``num_items_in_batch`` but ignore it: still a mean over its targets."""

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        return super().forward(input_ids, labels)


# Runs


class Events(TrainerCallback):
    """Record the order of all callback events of a trainer."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[()]]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: self.told.append((name, ()))
        return super().__getattribute__(name)


_NAMES = {each.name for each in dataclasses.fields(TrainingArguments)}


def make(
    folder: Path,
    options: Mapping[str, Any] | None = None,
    *,
    model: Callable[[float], nn.Module] = gpt2,
    data: Callable[..., Any] = tokens,
    kind: Any = Trainer,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    declared: Any = None,
    **arguments: Any,
) -> Any:
    """Return a trainer of two epochs: 12 steps of at most 8 rows, the last of each epoch of 4.

    Without options, automicro is not enabled. `declared` is what they always contain.
    """
    torch.manual_seed(0)
    given = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "report_to": [], "seed": 3,
        "per_device_eval_batch_size": 8, "num_train_epochs": 2, "learning_rate": 1e-3,
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        **arguments,
    }  # fmt: skip
    own = {name: given.pop(name) for name in list(given) if name not in _NAMES}
    made, args = model(dropout).to(dtype), TrainingArguments(**given)
    trainer = kind(made, args, train_dataset=data(), eval_dataset=data(20), **own)
    return trainer if options is None else enable(trainer, **(declared or {}), **options)


def run(trainer: Any, *, evaluates: bool = True) -> Ran:
    """Train to the end, evaluate, and return the results."""
    events = Events()
    trainer.add_callback(events)
    trainer.train()
    if evaluates:
        trainer.evaluate()
    ours = getattr(trainer, "automicro", None)
    scaler = trainer.accelerator.scaler
    return Ran(
        parameters(trainer),
        logged(trainer),
        events.told,
        trainer,
        ours.last.num_microbatches if ours else 0,
        scaler and scaler.get_scale(),
    )


class Stop(TrainerCallback):
    """Evaluate at a step, and stop the training there."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.at
        control.should_evaluate = state.global_step == self.at


def resumed(make: Callable[..., Any], folder: Path, first: bool, second: bool) -> Ran:
    """Stop a run at its second step, and resume it, each with automicro or without."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "dropout": 0.1}
    stopped = make(folder, {} if first else None, **saving)
    stopped.add_callback(Stop(2))
    stopped.train()
    trainer = make(folder, {} if second else None, **saving)
    trainer.train(resume_from_checkpoint=True)
    assert stopped.state.global_step == 2 < trainer.state.global_step
    return Ran(parameters(trainer), logged(trainer))


def parameters(trainer: Any) -> list[Tensor]:
    """Return all parameters of a trainer's model, gathered from shards."""
    found = (each.detach() for each in trainer.model.parameters())
    return [e.full_tensor() if isinstance(e, DTensor) else copy.deepcopy(e) for e in found]


def logged(trainer: Any) -> list[dict[str, Any]]:
    """Return all logs except timings."""
    return list(map(timeless, trainer.state.log_history))


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    clocks = ("time", "per_second", "flos")
    return {k: v for k, v in row.items() if not any(each in k for each in clocks)}


# Ranks


def shard(trainer: Any) -> Any:
    """Set up FSDP2 as transformers does on accelerators; elsewhere it falls back to DDP."""
    from accelerate.state import DistributedType, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    accelerator = trainer.accelerator
    policy: dict[str, Any] = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100}
    if isinstance(trainer.model, GPT2LMHeadModel):
        blocks = {"transformer_cls_names_to_wrap": ["GPT2Block"]}
        policy = {"auto_wrap_policy": "transformer_based_wrap", **blocks}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **policy)
    plugin.cpu_ram_efficient_loading = False
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    trainer.is_fsdp_enabled = True
    return trainer


def compare_on_ranks(
    rank: int, make: Callable[..., Any], most: int, is_sharded: bool = False, **case: Any
) -> dict[str, Any]:
    """Run one rank; only rank 1 runs out of memory above a number of rows."""
    case |= {"dtype": torch.float64, "eval_on_start": True}
    if is_sharded:  # otherwise all but the last batch hold back whole gradients
        each = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        case["accelerator_config"] = each

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and len(kwargs["input_ids"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    alone, trainer = (make(**copy.deepcopy(case)) for _ in range(2))
    if is_sharded:
        alone, trainer = shard(alone), shard(trainer)
    plain = run(alone)
    enable(trainer, eval_microbatch_size=3)
    if rank == 1:
        trainer.model.register_forward_pre_hook(fail, with_kwargs=True)
    ours = run(trainer)
    return {
        "kind": type(alone.model_wrapped).__name__,
        "gap": max_diff(ours.tensors, plain.tensors),
        "logged": (ours.logged, plain.logged),
        "microbatch_size": trainer.automicro.microbatch_size,
    }
