"""What other trainers call the options that are here: the one table for all hints.

Names are those of Lightning, of transformers, of Keras and of hand-written scripts. Composer's have
a table of their own in `automicro.trainer.composer`, for they are more and say more.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


def comes_from(value: object, *names: str) -> bool:
    """Whether a value is of a class, or of a subclass of one, that a library calls so.

    Args:
        value: any.
        names: of classes with the package that they are in: ``"torch.Tensor"``, wherever in it.

    >>> import fractions
    >>> comes_from(fractions.Fraction(1), "fractions.Fraction"), comes_from(1, "torch.Tensor")
    (True, False)
    """
    classes = type(value).__mro__
    homes = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in classes}
    return not homes.isdisjoint(names)


@dataclass(frozen=True, kw_only=True)
class Synonym:
    """What stands here for an option of another trainer.

    Attributes:
        key: of a config.
        config: how a config or a command line says it, with something to copy.
        argument: of the `Trainer`.
        python: how the `Trainer` is told.
        example: ``key=value`` to copy.
        value: what stands in these for the user's own: a number or ``PATH``; empty where none does.
        unit: what follows it there.
        choices: what others write, and what that is here, where there are few.
    """

    key: str
    config: str
    argument: str
    python: str
    example: str
    value: str = ""
    unit: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)

    def with_value(self, value: object) -> "Synonym":
        """The same with what somebody wrote in place of the example, where that can stand there.

        >>> synonym_of("epochs").with_value(30).example
        'max_duration=30ep'
        """
        text = str(value).strip()
        ours = self.choices.get(text.lower())
        if ours is not None:
            example = f"{self.key}={ours}"
            return replace(self, config=f"write {example}", python=repr(ours), example=example)
        if not self._takes(text):
            return self
        written = re.compile(rf"(?<![\w.]){re.escape(self.value + self.unit)}(?!\.?\w)")

        def mine(said: str) -> str:
            return written.sub(lambda _: text + self.unit, said)

        return replace(
            self, config=mine(self.config), python=mine(self.python), example=mine(self.example)
        )

    def _takes(self, text: str) -> bool:
        if not self.value or not text or text in ("???", "None"):
            return False
        if self.value.isdecimal():
            return text.isdecimal()
        return _is_number(text) if _is_number(self.value) else True


def synonym_of(name: object) -> Synonym | None:
    """Find what a name of another trainer stands for; None where nobody calls anything so.

    Args:
        name: as it was written, with hyphens or underscores.

    >>> synonym_of("max-epochs").example
    'max_duration=2ep'
    >>> synonym_of("colour") is None
    True
    """
    return _BY_NAME.get(str(name).replace("-", "_").lower())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


PRECISION_SYNONYMS: Mapping[str, str] = {
    "16": "fp16",
    "16-mixed": "fp16",
    "16-true": "fp16",
    "amp": "fp16",
    "amp_fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "amp_bf16": "bf16",
    "bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "32": "fp32",
    "32-true": "fp32",
    "float": "fp32",
    "float32": "fp32",
    "full": "fp32",
    "no": "fp32",
}
"""What others call a precision."""


def _of_optimizer(name: str, value: str) -> Synonym:
    return Synonym(
        key=f"optimizer.args.{name}",
        config=f"it is an argument of the optimizer: write optimizer.args.{name}={value}",
        argument="optimizer",
        python=f"functools.partial(torch.optim.AdamW, {name}={value}), or one that is made",
        example=f"optimizer.args.{name}={value}",
        value=value,
    )


_TRAIN_ROWS = Synonym(
    key="global_batch_size",
    config="write global_batch_size=512, with batch_size: ${global_batch_size} under "
    "train_dataloader.args; or train_dataloader.args.batch_size=512, the rows that one device "
    "loads",
    argument="train_dataloader",
    python="DataLoader(dataset, batch_size=512), the rows of a whole optimization batch: it is cut "
    "into microbatches that fit",
    example="global_batch_size=512",
    value="512",
)
_EVAL_ROWS = Synonym(
    key="eval_global_batch_size",
    config="write eval_global_batch_size=512, with batch_size: ${eval_global_batch_size} under "
    "eval_dataloader.args; or eval_dataloader.args.batch_size=512, the rows that one device loads",
    argument="eval_dataloader",
    python="DataLoader(dataset, batch_size=512), which is cut into microbatches that fit",
    example="eval_global_batch_size=512",
    value="512",
)
_EPOCHS = Synonym(
    key="max_duration",
    config="it has a unit, ep for epochs: write max_duration=2ep",
    argument="max_duration",
    python="text with a unit, 'ep' for epochs: '2ep'",
    example="max_duration=2ep",
    value="2",
    unit="ep",
)
_STEPS = Synonym(
    key="max_duration",
    config="it has a unit, ba for batches: write max_duration=500ba",
    argument="max_duration",
    python="text with a unit, 'ba' for batches: '500ba'",
    example="max_duration=500ba",
    value="500",
    unit="ba",
)
_ACCUMULATION = Synonym(
    key="microbatch_size",
    config="batches are cut into as many microbatches as memory asks for, so microbatch_size=auto "
    "is all it takes; to step once in several batches, write accumulate_batches=4",
    argument="microbatch_size",
    python="batches are cut into as many microbatches as memory asks for, so 'auto' is all it "
    "takes; to step once in several batches, pass accumulate_batches=4",
    example="microbatch_size=auto",
    value="4",
)
_ROWS_AT_A_TIME = Synonym(
    key="microbatch_size",
    config="write microbatch_size=8, or auto for as many rows as fit",
    argument="microbatch_size",
    python="rows such as 8, or 'auto' for as many as fit",
    example="microbatch_size=8",
    value="8",
)
_PROCESSES = Synonym(
    key="parallel",
    config="each process has one device, so start as many: torchrun --nproc-per-node 2 -m "
    "automicro train job.yaml parallel=ddp (or fsdp)",
    argument="parallel",
    python="'ddp' or 'fsdp'; each process has one device, so start as many: torchrun "
    "--nproc-per-node 2 train.py",
    example="parallel=ddp",
    value="2",
    choices={"ddp": "ddp", "fsdp": "fsdp", "fsdp2": "fsdp"},
)
_DEVICE = Synonym(
    key="device",
    config="write device=cuda, or leave it auto",
    argument="device",
    python="such as 'cuda', or leave it 'auto'",
    example="device=cuda",
    choices={"cuda": "cuda", "cpu": "cpu", "gpu": "cuda", "mps": "mps", "auto": "auto"},
)
_PRECISION = Synonym(
    key="precision",
    config="write precision=bf16, or fp16, which scales the loss by itself",
    argument="precision",
    python="'bf16', or 'fp16', which scales the loss by itself",
    example="precision=bf16",
    choices={**PRECISION_SYNONYMS, "fp16": "fp16", "bf16": "bf16", "fp32": "fp32"},
)
_RESUME = Synonym(
    key="checkpoint.resume",
    config="write checkpoint.resume=PATH, a checkpoint or a folder of them; a run with a run_dir "
    "and checkpoint={} goes on by itself when it is started again",
    argument="checkpoint",
    python="CheckpointConfig(folder=…, resume='PATH'); with the folder alone, a run goes on by "
    "itself when it is started again",
    example="checkpoint.resume=PATH",
    value="PATH",
)
_OUTPUT = Synonym(
    key="run_dir",
    config="write run_dir=runs/first: config, summary, weights and checkpoints go there",
    argument="checkpoint",
    python="CheckpointConfig(folder='runs/first')",
    example="run_dir=runs/first",
    value="runs/first",
)
_SAVING = Synonym(
    key="checkpoint.interval",
    config="write checkpoint.interval=500ba",
    argument="checkpoint",
    python="CheckpointConfig(folder=…, interval='500ba')",
    example="checkpoint.interval=500ba",
    value="500",
    unit="ba",
)
_EVALUATING = Synonym(
    key="eval_interval",
    config="it has a unit: write eval_interval=100ba or eval_interval=1ep",
    argument="eval_interval",
    python="text with a unit: '100ba' or '1ep'",
    example="eval_interval=100ba",
    value="100",
    unit="ba",
)
_CLIPPING = Synonym(
    key="grad_clip_norm",
    config="write grad_clip_norm=1.0",
    argument="grad_clip_norm",
    python="a number such as 1.0",
    example="grad_clip_norm=1.0",
    value="1.0",
)


def _warmup(value: str, unit: str = "") -> Synonym:
    return Synonym(
        key="scheduler",
        config="write scheduler={call: automicro.schedules.cosine_with_warmup, args: "
        f"{{warmup: {value}{unit}, total: 500ba}}}}",
        argument="scheduler",
        python="such as functools.partial(automicro.schedules.cosine_with_warmup, "
        f"warmup={repr(value + unit) if unit else value}, total='500ba')",
        example=f"scheduler.args.warmup={value}{unit}",
        value=value,
        unit=unit,
    )


_SCHEDULER = Synonym(
    key="scheduler",
    config="write scheduler={call: torch.optim.lr_scheduler.StepLR, args: {step_size: 100}}",
    argument="scheduler",
    python="such as functools.partial(torch.optim.lr_scheduler.StepLR, step_size=100)",
    example="scheduler.args.step_size=100",
)
_SEED = Synonym(
    key="seed",
    config="write seed=0",
    argument="seed",
    python="a whole number such as 0",
    example="seed=0",
    value="0",
)
_WORKERS = Synonym(
    key="train_dataloader.args.num_workers",
    config="it is an argument of the data: write train_dataloader.args.num_workers=4",
    argument="train_dataloader",
    python="DataLoader(dataset, num_workers=4)",
    example="train_dataloader.args.num_workers=4",
    value="4",
)
_COMPILE = Synonym(
    key="compile",
    config="write compile=true",
    argument="compile",
    python="True, or the keyword arguments of torch.compile",
    example="compile=true",
)

SYNONYMS: Sequence[tuple[Sequence[str], Synonym]] = (
    (("lr", "learning_rate", "base_lr"), _of_optimizer("lr", "0.001")),
    (("weight_decay", "wd"), _of_optimizer("weight_decay", "0.01")),
    (
        ("batch_size", "train_batch_size", "per_device_train_batch_size", "per_gpu_batch_size"),
        _TRAIN_ROWS,
    ),
    (("eval_batch_size", "per_device_eval_batch_size", "val_batch_size"), _EVAL_ROWS),
    (("epochs", "max_epochs", "num_epochs", "n_epochs", "num_train_epochs"), _EPOCHS),
    (("steps", "max_steps", "num_steps", "max_iters", "iterations"), _STEPS),
    (
        (
            "gradient_accumulation_steps",
            "accumulate_grad_batches",
            "accumulation_steps",
            "gradient_accumulation",
            "grad_accum",
        ),
        _ACCUMULATION,
    ),
    (("micro_batch_size", "microbatch", "device_train_microbatch_size"), _ROWS_AT_A_TIME),
    (
        (
            "gpus", "num_gpus", "n_gpus", "n_gpu", "devices", "num_devices", "num_nodes", "nnodes",
            "nproc_per_node", "num_processes", "world_size", "strategy", "distributed", "ddp",
            "fsdp", "dp",
        ),
        _PROCESSES,
    ),
    (("accelerator", "gpu", "use_cuda", "cuda"), _DEVICE),
    (("fp16", "bf16", "amp", "use_amp", "mixed_precision", "dtype", "half"), _PRECISION),
    (
        ("resume", "resume_from", "resume_from_checkpoint", "ckpt_path", "ckpt", "load_path"),
        _RESUME,
    ),
    (
        ("output_dir", "save_dir", "log_dir", "out_dir", "default_root_dir", "save_folder"),
        _OUTPUT,
    ),
    (("save_steps", "save_every", "save_interval", "checkpoint_interval"), _SAVING),
    (
        ("eval_steps", "eval_every", "eval_strategy", "evaluation_strategy", "val_check_interval"),
        _EVALUATING,
    ),
    (
        ("max_grad_norm", "gradient_clip_val", "clip_grad_norm", "grad_clip", "gradient_clipping"),
        _CLIPPING,
    ),
    (("warmup", "warmup_ratio"), _warmup("0.1")),
    (("warmup_steps", "num_warmup_steps"), _warmup("100", "ba")),
    (("lr_scheduler", "lr_scheduler_type", "schedule"), _SCHEDULER),
    (("random_seed", "manual_seed", "data_seed"), _SEED),
    (("num_workers", "dataloader_num_workers", "workers"), _WORKERS),
    (("torch_compile", "use_compile"), _COMPILE),
)  # fmt: skip
"""Names of others, and what stands for them here."""

_BY_NAME = {name: synonym for names, synonym in SYNONYMS for name in names}
