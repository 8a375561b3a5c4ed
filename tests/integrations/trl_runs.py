"""TRL trainers on tiny Llama models and generated text."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from automicro.integrations.transformers import enable
from tests.integrations.transformers_runs import OF_TRL

WORDS = 46
SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}


def tokenizer() -> Any:
    known = {**SPECIAL, **{f"w{number}": number + len(SPECIAL) for number in range(WORDS)}}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def model(kind: Any = LlamaForCausalLM, *, dtype: Any = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    return kind(config).to(dtype)


@functools.cache
def texts(rows: int, *, pairs: bool, words: tuple[int, int]) -> Any:
    drawn = torch.Generator().manual_seed(0)

    def text() -> str:
        many = int(torch.randint(*words, (), generator=drawn))
        return " ".join(f"w{n}" for n in torch.randint(0, WORDS, (many,), generator=drawn).tolist())

    names = ("chosen", "rejected") if pairs else ("text",)
    return Dataset.from_dict({name: [text() for _ in range(rows)] for name in names})


ON_THE_CPU: dict[str, Any] = {
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
}
_NAMES = {"sft": "SFT", "dpo": "DPO", "reward": "Reward"}


def make(
    name: str,
    folder: Path,
    *,
    with_us: bool = False,
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    options: Mapping[str, Any] | None = None,
    peft_config: Any = None,
    rows: int = 20,
    words: tuple[int, int] = (3, 13),
    **changed: Any,
) -> Any:
    """Return a trainer of one epoch: two steps of 8 rows and one of 4 by default."""
    kind, arguments = OF_TRL[name]
    trainer, config = (getattr(trl, _NAMES[kind] + each) for each in ("Trainer", "Config"))
    fields = {each.name for each in dataclasses.fields(config)}
    recomputing = [each for each in fields if each.endswith("_checkpointing")]
    args = config(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 8,
            "num_train_epochs": 1,
            "learning_rate": 1e-3,
            **ON_THE_CPU,
            "max_length": 32,
            **{each: False for each in recomputing if each == "activation_checkpointing"},
            **arguments,
            **changed,
        }
    )
    kinds: dict[str, Any] = {"dtype": dtype, "attention_dropout": dropout}
    more: dict[str, Any] = {"ref_model": model(**kinds)} if kind == "dpo" else {}
    if kind == "reward":
        kinds |= {"kind": LlamaForSequenceClassification, "num_labels": 1}
    own = model(**kinds)
    if peft_config is not None:
        more["peft_config"] = peft_config
    made = trainer(
        model=own,
        args=args,
        train_dataset=texts(rows, pairs=kind != "sft", words=words),
        eval_dataset=texts(rows // 2, pairs=kind != "sft", words=words),
        processing_class=tokenizer(),
        **more,
    )
    return enable(made, **(options or {})) if with_us else made
