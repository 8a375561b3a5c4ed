"""The trainers of TRL with one line: pairs, padding-free rows, completions that are drawn."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("trl")

import datasets
import trl
from peft import LoraConfig, PromptTuningConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from automicro import BatchError, LossAverageError
from automicro.batch.layout import BatchLayout
from automicro.integrations.transformers import Pairs, enable
from tests.integrations.hosts import HostTests, Ran, check, check_rows, on_ranks, with_and_without
from tests.integrations.transformers_runs import compare_on_ranks, resumed, run
from tests.ranks.world import world_of

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of TRL, which change with each version
UNUSED = Path(tempfile.gettempdir())


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    yield
    capsys.readouterr()


WORDS = 46
SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}


def tokenizer() -> Any:
    known = {**SPECIAL, **{f"w{number}": number + len(SPECIAL) for number in range(WORDS)}}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def model(kind: Any = LlamaForCausalLM, *, dtype: Any = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    return kind(config).to(dtype)


@functools.cache
def texts(rows: int, names: tuple[str, ...], words: tuple[int, int]) -> Any:
    drawn = torch.Generator().manual_seed(0)

    def text() -> str:
        many = int(torch.randint(*words, (), generator=drawn))
        return " ".join(f"w{n}" for n in torch.randint(0, WORDS, (many,), generator=drawn).tolist())

    return datasets.Dataset.from_dict({name: [text() for _ in range(rows)] for name in names})


def make(
    folder: Path = UNUSED,
    options: Any = None,
    *,
    kind: str = "SFT",
    dtype: Any = torch.float64,
    dropout: float = 0.0,
    rows: int = 20,
    words: tuple[int, int] = (3, 13),
    peft_config: Any = None,
    declared: Any = None,
    **changed: Any,
) -> Any:
    """Return a trainer of one epoch: two steps of 8 rows and one of 4 by default."""
    trainer, config = (getattr(trl, kind + each) for each in ("Trainer", "Config"))
    columns, policies = {"SFT": ("text",), "DPO": ("chosen", "rejected")}, ("GRPO", "RLOO")
    fields = {each.name for each in dataclasses.fields(config)}
    given = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "num_train_epochs": 1,
        "per_device_eval_batch_size": 8, "learning_rate": 1e-3, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        "bf16": False, "max_length": 32, "activation_checkpointing": False, **changed,
    }  # fmt: skip
    kinds: dict[str, Any] = {"dtype": dtype, "attention_dropout": dropout}
    more: dict[str, Any] = {"ref_model": model(**kinds)} if kind == "DPO" else {}
    if kind == "Reward":
        kinds |= {"kind": LlamaForSequenceClassification, "num_labels": 1}
        columns["Reward"] = columns["DPO"]
    if kind in policies:  # the base weights without the adapter serve as the reference model
        peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        more["reward_funcs"], columns[kind] = reward, ("prompt",)
    if peft_config is not None:
        more["peft_config"] = peft_config
    made = trainer(
        model=model(**kinds),
        args=config(**{name: each for name, each in given.items() if name in fields}),
        train_dataset=texts(rows, columns[kind], words),
        eval_dataset=texts(rows // 2, columns[kind], words),
        processing_class=tokenizer(),
        **more,
    )
    return made if options is None else enable(made, **(declared or {}), **options)


def reward(completions: list[str], **_: Any) -> list[float]:
    words = [each.split() for each in completions]
    return [len(each) % 5 + 0.1 * len(set(each)) for each in words]


def across(loss_type: str) -> Callable[[], Any]:
    def wrong() -> None:
        trainer = make(kind="DPO")
        trainer.loss_types = [loss_type]
        enable(trainer, microbatch_size=None).automicro.disable()
        enable(trainer)

    return wrong


def building() -> None:
    trainer = make()
    bases = (type(trainer).__mro__[2],)
    trainer.__class__ = type("KTOTrainer", bases, {"__module__": "trl.trainer.kto"})
    enable(trainer)


# Ratios are 1 in the first of two passes over the same completions, and clipped in the second.
GRPO: dict[str, Any] = {
    "kind": "GRPO", "num_iterations": 2, "epsilon": 0.01, "beta": 0.1, "max_steps": 4,
    "num_generations": 4, "max_completion_length": 12, "learning_rate": 1e-2, "rows": 16,
    "words": (3, 7),
}  # fmt: skip


def policy(**changed: Any) -> Callable[[], Any]:
    return lambda: make(options={"microbatch_size": 3}, **GRPO, **changed).train()


SPLIT = "splitting changes this batch"


class TestTrl(HostTests):
    CASES: ClassVar = {
        "SFT, accumulation": {"gradient_accumulation_steps": 2},
        "SFT, packed": {"packing": True},
        "SFT, without padding": {"padding_free": True, "max_length": None},
        "SFT, DFT": {"loss_type": "dft"},
        "DPO": {"kind": "DPO"},
        "Reward": {"kind": "Reward"},
        "GRPO, sequences": {
            **GRPO, "epsilon": 0.001, "importance_sampling_level": "sequence", "loss_type": "grpo",
        },
        "GRPO, truncated completions masked": {  # its evaluation cannot be split
            **GRPO, "mask_truncated_completions": True, "evaluates": False,
        },
        "RLOO": {**GRPO, "kind": "RLOO"},
        "GRPO, means over tokens of a batch": {
            **GRPO, "loss_type": "bnpo",
            "declared": {"loss_average": lambda batch: batch["completion_mask"].sum()},
        },
    }  # fmt: skip
    # TRL accumulates head gradients and computes log probabilities in fp32.
    CLOSE = 1e-7
    TOLERANCES: ClassVar = {
        "any limit": 1e-6, "GRPO, means over tokens of a batch": 1e-5, "GRPO, sequences": 1e-12,
        "GRPO, truncated completions masked": 1e-12, "RLOO": 1e-12, "Reward": 1e-12,
    }  # fmt: skip
    LIMITED: ClassVar = {
        "padding_free": True, "max_length": None, "words": (60, 100), "rows": 12,
    }  # fmt: skip
    REFUSED = (
        (across("aot"), ValueError, "loss_type=aot compares the pairs .* whole with"),
        (building, ValueError, "TRL's KTOTrainer builds batches inside the step"),
        (policy(loss_type="bnpo"), LossAverageError, SPLIT),
        (policy(top_entropy_quantile=0.5), LossAverageError, SPLIT),  # over tokens of a batch
        (
            policy(entropy_coef=0.1),
            ValueError,
            "only in part",
        ),  # a mean over tokens next to a sum over items
    )

    def run(self, folder: Path, options: Any, *, evaluates: bool = True, **case: Any) -> Ran:
        return run(make(folder, options, **case), evaluates=evaluates)

    def resumed(self, folder: Path, first: bool, second: bool) -> Ran:
        return resumed(make, folder, first, second)


def test_pairs_are_split_together() -> None:
    batch = {"input_ids": torch.arange(8), "ref_chosen_logps": torch.arange(4), "name": "kept"}
    layout = BatchLayout(0)
    part = layout.split(Pairs.read(batch), [1, 2, 1])[1].flat()
    assert part["input_ids"].tolist() == [1, 2, 5, 6]
    assert part["ref_chosen_logps"].tolist() == [1, 2]
    assert part["name"] == "kept"
    with pytest.raises(BatchError, match="rows of the batch do not agree"):
        layout.num_rows(Pairs.read({**batch, "odd": torch.arange(3)}))


class Own(trl.SFTTrainer):  # type: ignore[name-defined]
    """A subclass whose loss is declared; its evaluation averages over shifted targets."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def own_loss(trainer: Any) -> None:
    trainer.__class__ = Own


def own_collator(trainer: Any) -> None:
    trainer.data_collator = functools.partial(trainer.data_collator)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ({"kind": "DPO"}, own_collator),
        ({"declared": {"loss_average": "tokens"}}, own_loss),
        (
            {"peft_config": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")},
            lambda trainer: None,
        ),
    ],
    ids=["own collator", "own loss", "prompt tuning"],
)
def test_changed_trainers_match_plain_ones(case: dict[str, Any], change: Any) -> None:
    def train(options: Any) -> Ran:
        declared = case.get("declared", {}) if options is not None else {}
        trainer = make(**{**case, "declared": None})
        change(trainer)
        return run(trainer if options is None else enable(trainer, **declared, **options))

    with_and_without(train, HostTests.SIZES, close=1e-7 if "kind" in case else 1e-6)


def test_completions_are_drawn_once_despite_retries() -> None:
    plain, trainer = run(make(**GRPO)), make(**GRPO)
    forward = trainer.model.forward

    def failing(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and len(input_ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(input_ids, *args, **kwargs)

    trainer.model.forward = failing
    ours = run(enable(trainer))
    assert trainer.automicro.microbatch_size <= 3
    assert trainer.automicro.last.ooms == 0, "the size was found in the first batch"
    check(ours, plain, close=1e-12)


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_two_ranks_match_wrapper_when_one_runs_out_of_memory(kind: str, tmp_path: Path) -> None:
    case = {"kind": kind, "gradient_accumulation_steps": 2, "rows": 44, "folder": tmp_path}
    with world_of(2) as world:
        results = world.run(on_ranks, compare_on_ranks, make, 8 if kind == "DPO" else 4, **case)
    for found in results:
        assert found["microbatch_size"] == 4
        assert found["gap"] < 1e-6
        check_rows(*found["logged"])
