"""Hugging Face trainers on tiny models and generated data, with and without automicro."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
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
from tests.integrations.both import Ran

VOCABULARY, LENGTH, ROWS = 50, 40, 44  # 44 rows: 5 batches of 8, and one of 4


class Scales(TrainerCallback):
    """Record the fp16 loss scale after each step, on a device without fp16."""

    def __init__(self, trainer: Any, start: float) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=2)
        self.seen: list[float] = []
        trainer.accelerator.scaler = self.scaler
        trainer.add_callback(self)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(self.scaler.get_scale())


def tokens(rows: int = ROWS, *, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return language model rows with different numbers of ignored targets."""
    drawn = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(rows):
        ids = torch.randint(2, VOCABULARY, (LENGTH,), generator=drawn)
        labels = ids.clone()
        labels[: int(torch.randint(0, LENGTH - 2, (), generator=drawn))] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def classes(rows: int = ROWS) -> list[dict[str, Tensor]]:
    return [{**row, "labels": row["input_ids"][0] % 3} for row in tokens(rows)]


def unlabeled(rows: int = ROWS) -> list[dict[str, Tensor]]:
    return [{"input_ids": row["input_ids"]} for row in tokens(rows)]


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


def bert(dropout: float) -> nn.Module:
    config = BertConfig(  # type: ignore[call-arg]
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, num_labels=3,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    model: nn.Module = BertForSequenceClassification(config)
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
        found = {"logits": logits}
        if labels is not None:
            found = {"loss": F.cross_entropy(logits, labels), **found}
        return found


class IgnoresItems(Own):
    """Accept ``num_items_in_batch`` but ignore it: still a mean over its targets."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        return super().forward(input_ids, labels)


class TwoLosses(Own):
    """Divide one loss by the number of items and add a second, undivided one."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        total = found["loss"] * len(input_ids) / kwargs["num_items_in_batch"]
        return {**found, "loss": total + 0.01 * found["logits"].square().mean()}


def peft_gpt2(dropout: float) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2, target_modules=["c_attn"], lora_dropout=dropout, task_type="CAUSAL_LM",
        fan_in_fan_out=True,
    )  # fmt: skip
    model: nn.Module = get_peft_model(gpt2(dropout), config)
    return model


def sum_over_items(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    summed = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    loss: Tensor = summed / num_items_in_batch
    return loss


def mean_of_rows(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs["logits"], labels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of trainer: its model, data and arguments."""

    model: Callable[[float], nn.Module] = gpt2
    data: Callable[..., list[Any]] = tokens
    kind: Any = Trainer
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # also of the trainer
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # options of `enable`


_NAMES = {each.name for each in dataclasses.fields(TrainingArguments)}
CHECKPOINTING = next(
    each for each in ("activation_checkpointing", "gradient_checkpointing") if each in _NAMES
)

CASES = {
    "causal": Case(),
    "accumulation 4": Case(arguments={
        "gradient_accumulation_steps": 4, "max_grad_norm": 0.05, "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
    }),
    "smoothing, accumulation": Case(
        arguments={"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}
    ),
    "gradient checkpointing": Case(arguments={CHECKPOINTING: True}),
    "encoder-decoder": Case(model=t5),
    "classifier": Case(model=bert, data=classes),
    "own module": Case(model=Own, data=classes, arguments={"gradient_accumulation_steps": 4}),
    "ignores num_items": Case(
        model=IgnoresItems, data=classes, arguments={"gradient_accumulation_steps": 2}
    ),
    "loss function, a sum": Case(
        arguments={"gradient_accumulation_steps": 2, "compute_loss_func": sum_over_items}
    ),
    "loss function, a mean": Case(
        model=Own, data=classes, arguments={"compute_loss_func": mean_of_rows}
    ),
    "frozen base": Case(model=peft_gpt2),
}  # fmt: skip


# TRL cases: the kind of trainer and its arguments.
OF_TRL: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("sft", {}),
    "SFT, accumulation": ("sft", {"gradient_accumulation_steps": 2}),
    "SFT, packed": ("sft", {"packing": True}),
    "SFT, without padding": ("sft", {"padding_free": True, "max_length": None}),
    "SFT, DFT": ("sft", {"loss_type": "dft"}),
    "DPO": ("dpo", {}),
    "Reward": ("reward", {}),
}


class Events(TrainerCallback):
    """Record the order of all callback events of a trainer."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: self.told.append(name)
        return super().__getattribute__(name)


def make(
    case: Case | str,
    folder: Path,
    *,
    with_us: bool = False,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    options: Mapping[str, Any] | None = None,
    kind: Any = None,
    **arguments: Any,
) -> Any:
    """Return a trainer of two epochs: 12 steps of at most 8 rows, the last of each epoch of 4.

    A string names a case of TRL.
    """
    if isinstance(case, str):
        from tests.integrations import trl_runs

        how: dict[str, Any] = {"dtype": dtype, "dropout": dropout, "options": options, **arguments}
        return trl_runs.make(case, folder, with_us=with_us, **how)
    torch.manual_seed(0)
    model = case.model(dropout).to(dtype)
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        **case.arguments,
        **arguments,
    }
    own = {name: given.pop(name) for name in list(given) if name not in _NAMES}
    trainer = (kind or case.kind)(
        model,
        TrainingArguments(**given),
        train_dataset=case.data(),
        eval_dataset=case.data(20),
        **own,
    )
    return enable(trainer, **{**case.options, **(options or {})}) if with_us else trainer


def run(trainer: Any) -> Ran:
    """Train to the end and return the results."""
    events = Events()
    trainer.add_callback(events)
    trainer.train()
    return Ran(parameters(trainer), logged(trainer), events.told, trainer)


def parameters(trainer: Any) -> list[Tensor]:
    """Return all parameters of a trainer's model, gathered from shards."""
    found = (each.detach() for each in trainer.model.parameters())
    return [
        each.full_tensor() if isinstance(each, DTensor) else copy.deepcopy(each) for each in found
    ]


def logged(trainer: Any) -> list[dict[str, Any]]:
    """Return all logs except timings."""
    return list(map(timeless, trainer.state.log_history))


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    clocks = ("runtime", "per_second", "flos", "_time")
    return {k: v for k, v in row.items() if not any(each in k for each in clocks)}


def losses(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(row["loss"]) for row in rows if "loss" in row]
