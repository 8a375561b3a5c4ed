"""Messages that users see after mistakes; tests/messages.md contains all of them.

After changing a message, rewrite the table with ``python -m tests.test_wrong_uses``. Then read
the difference as a user: each message names the mistake, the values and the remedy.
"""

import contextlib
import functools
import io
import itertools
import os
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from automicro import (
    Contrastive,
    Halving,
    MemoryBudget,
    Microbatcher,
    Trainer,
    callbacks,
    num_rows,
    register_batch_type,
    split,
    split_batch,
    verify,
)
from automicro.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    GrowthSchedule,
    OutOfMemoryReport,
)
from automicro.checkpoints.rng import restore_rng_state
from automicro.checkpoints.store import CheckpointConfig, CheckpointStore
from automicro.cli import main
from automicro.contrastive import InfoNCE
from automicro.demo.topics import loader, pieces, word_loader
from automicro.durations import Duration, Unit, parse_time, read_duration
from automicro.events.run import Run
from automicro.features import (
    Carry,
    GradientSums,
    MicrobatchUnit,
    StepState,
    UpdateMetric,
    with_features,
)
from automicro.integrations.host import check_options
from automicro.loggers import JSONLinesLogger, LoggerGroup, WandbLogger
from automicro.schedules import (
    constant_with_warmup,
    cosine_with_warmup,
    inverse_sqrt_with_warmup,
    linear_with_warmup,
)
from automicro.tools.pictures import speed_and_memory
from tests.cli_jobs import enter_folder_with_job
from tests.config_jobs import JOB, build_trainer, job

TABLE = Path(__file__).with_name("messages.md")

X = torch.zeros(6, 4)
Y = torch.zeros(6, dtype=torch.long)
MANY = (torch.zeros(64, 4), torch.zeros(64, dtype=torch.long))
LOSS = nn.CrossEntropyLoss()
ROWS: Any = list(zip(X, Y, strict=True))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


SHARED = model()


def backward(batch: object = (X, Y), module: nn.Module | None = None, **options: Any) -> object:
    options = {"loss_fn": LOSS, **options}
    return Microbatcher(module or model(), **with_features(options)).backward(batch)


def frozen() -> nn.Module:
    return model().requires_grad_(False)


def too_small(limit: str = "4KiB", module: nn.Module | None = None, **options: Any) -> object:
    module = module or model()
    with MemoryBudget(limit):
        return backward(MANY, module, **options)


def contrastive(**sizes: Any) -> object:
    sizes = {"microbatch_size": None, "eval_microbatch_size": None, **sizes}
    return Microbatcher(Contrastive({"a": nn.Linear(4, 4)}), loss_average="samples", **sizes)


class Opaque:
    pass


# The last process group. Dropping its last reference waits for its threads. DDP's reducer, which
# lives as long as the error, would do so while the threads wait for the interpreter.
WORLDS: list[object] = []


def in_process_group(use: Callable[[], object]) -> object:
    store = cast(Any, dist).HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    WORLDS[:] = [dist.group.WORLD]
    try:
        return use()
    finally:
        dist.destroy_process_group()


def wrapped_with_hook() -> object:
    wrapped = DistributedDataParallel(model())
    wrapped.register_comm_hook(None, allreduce_hook)
    return Microbatcher(wrapped)


PRIMITIVE: dict[str, Callable[[], object]] = {
    "size zero": lambda: backward(microbatch_size=0),
    "size negative": lambda: backward(microbatch_size=-1),
    "size fractional": lambda: backward(microbatch_size=1.5),
    "size True": lambda: backward(microbatch_size=True),
    "size a word": lambda: backward(microbatch_size="many"),
    "size a policy class": lambda: backward(microbatch_size=Halving),
    "eval size a word": lambda: backward(eval_microbatch_size="atuo"),
    "split size": lambda: split_batch((X, Y), 0),
    "outputs in a place that there is not": lambda: Microbatcher(model(), loss_fn=LOSS).backward(
        (X, Y), return_outputs=cast(Any, "gpu")
    ),
    "carry without a layout": lambda: Microbatcher(model(), loss_fn=LOSS).backward((X, Y), carry=X),
    "a word for a feature": lambda: Microbatcher(model(), nested={"0": 2}),  # type: ignore[call-arg]
    "an unknown argument": lambda: Microbatcher(model(), microbatchsize=4),  # type: ignore[call-arg]
    "a feature's class": lambda: backward(features=[Carry]),
    "a word and its feature": lambda: backward(
        microbatch_unit="tokens", features=[MicrobatchUnit("tokens")]
    ),
    "an argument that is gone": lambda: Halving(grow=False),  # type: ignore[call-arg]
    "carry without forward": lambda: backward(carry_layout=1),
    "forward without carry": lambda: Microbatcher(
        model(),
        forward=lambda model, batch, carry: LOSS(model(batch[0]), batch[1]),
        features=[Carry(1)],
    ).backward((X, Y)),
    "carry of other rows": lambda: Microbatcher(
        model(), forward=lambda model, batch, carry: {"loss": X.sum()}, features=[Carry(0)]
    ).backward((X, Y), carry=X[:1]),
    "carry from batch to batch that are one": lambda: Microbatcher(
        model(), forward=lambda model, batch, carry: {"loss": X.sum()}, features=[Carry(0)]
    ).accumulate([(X, Y)]),
    "model not a module": lambda: Microbatcher(cast("nn.Module", len)),
    "model in data parallel": lambda: Microbatcher(nn.DataParallel(model())),
    "wrapper with a static graph": lambda: in_process_group(
        lambda: Microbatcher(DistributedDataParallel(model(), static_graph=True))
    ),
    "wrapper with a communication hook": lambda: in_process_group(wrapped_with_hook),
    "parameters in no wrapper": lambda: in_process_group(
        lambda: Microbatcher(DistributedDataParallel(model()), modules=[model()])
    ),
    "verify a wrapped model": lambda: in_process_group(
        lambda: verify(DistributedDataParallel(model()), (X, Y), loss_fn=LOSS)
    ),
    "frozen model": lambda: backward(module=frozen()),
    "optimizer of another model": lambda: backward(optimizer=torch.optim.SGD(model().parameters())),
    "optimizer not one": lambda: backward(optimizer="adam"),
    "optimizer with a closure": lambda: backward(
        module=SHARED, optimizer=torch.optim.LBFGS(SHARED.parameters())
    ),
    "loss not callable": lambda: backward(loss_fn="cross_entropy"),
    "loss_fn and forward": lambda: backward(forward=lambda m, b: m(b)),
    "no loss": lambda: backward(loss_fn=None),
    "mapping without a loss": lambda: backward(
        loss_fn=None, forward=lambda m, b: {"logits": m(b[0])}
    ),
    "losses with their total": lambda: backward(
        loss_fn=lambda outputs, targets: {
            "total": LOSS(outputs, targets),
            "fit": LOSS(outputs, targets),
        }
    ),
    "loss not scalar": lambda: backward(loss_fn=nn.CrossEntropyLoss(reduction="none")),
    "loss behind the outputs": lambda: backward(
        loss_fn=None, forward=lambda m, b: (m(b[0]), m(b[0]).sum())
    ),
    "loss an item": lambda: backward(loss_fn=None, forward=lambda m, b: m(b[0]).sum().item()),
    "loss detached": lambda: backward(loss_fn=None, forward=lambda m, b: m(b[0]).sum().detach()),
    "loss integer": lambda: backward(loss_fn=None, forward=lambda m, b: m(b[0]).argmax()),
    "batch not a pair": lambda: backward((X, Y, Y)),
    "batch without rows": lambda: backward((X[:0], Y[:0])),
    "batch of nothing": lambda: backward({"a": 1}),
    "rows disagree": lambda: backward((X, Y[:5])),
    "one row beside many": lambda: backward(
        {"x": X, "w": torch.ones(1)}, loss_fn=None, forward=lambda m, b: m(b["x"]).sum()
    ),
    "rows in another dimension": lambda: backward((X.T, Y)),
    "unknown type": lambda: backward((X, Opaque())),
    "layout with a wrong path": lambda: backward(
        ({"x": X, "labels": Y}, Y), batch_layout={"0.lables": "shared"}
    ),
    "layout with a wrong word": lambda: backward(batch_layout={"0": "share"}),
    "two readings of a list": lambda: num_rows(
        {"images": [torch.zeros(3, 4, 4)] * 3, "y": torch.zeros(3)}
    ),
    "average unknown": lambda: backward(loss_average="token"),
    "average a number": lambda: backward(loss_average=3),
    "average negative": lambda: backward(loss_average=lambda batch: -1, microbatch_size=2),
    "tokens without targets": lambda: backward(
        {"x": X, "z": Y}, loss_fn=None, forward=lambda m, b: m(b["x"]).mean(), loss_average="tokens"
    ),
    "average names": lambda: backward(
        loss_fn=None, forward=lambda m, b: {"a": m(b[0]).mean()}, loss_average={"b": "samples"}
    ),
    "batchnorm mode": lambda: backward(batchnorm="warning"),
    "batchnorm error": lambda: backward(
        module=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), batchnorm="error"
    ),
    "precision": lambda: backward(precision="fp8"),
    "precision fp16": lambda: backward(precision="fp16"),
    "device elsewhere": lambda: backward(device="cuda:3"),
    "device of another kind": lambda: backward(device="cuda"),
    "meta device": lambda: backward(module=model().to("meta"), device=None),
    "memory limit": lambda: backward(memory_limit="24 parsecs"),
    "strict divisible": lambda: backward(microbatch_size=4, strict_divisible=True),
    "no grad": lambda: torch.no_grad()(backward)(),
    "not a metric": lambda: Microbatcher(model(), loss_fn=LOSS).backward((X, Y), metrics=3),
    "metrics without outputs": lambda: Microbatcher(
        model(), forward=lambda m, b: m(b[0]).sum()
    ).backward((X, Y), metrics=MeanMetric()),
    "state of something else": lambda: Microbatcher(model(), loss_fn=LOSS).load_state_dict(
        {"a": 1}
    ),
    "state of another policy": lambda: Microbatcher(
        model(), loss_fn=LOSS, microbatch_size=4
    ).load_state_dict(Microbatcher(model(), loss_fn=LOSS).state_dict()),
    "no row fits": lambda: too_small("5KiB"),
    "no row can fit": lambda: too_small(),
    "model does not fit": lambda: too_small(module=nn.Linear(4, 1000)),
    "register no class": lambda: register_batch_type(
        cast("type", 3), num_rows=len, take=lambda v, a, b: v[a:b]
    ),
    "compiled under a budget": lambda: backward(
        module=cast("nn.Module", torch.compile(model())), memory_limit="1MiB"
    ),
    "fixed does not fit": lambda: too_small(microbatch_size=16),
    "auto among levels": lambda: backward(when_too_large=["auto", "recompute"]),
    "part with a word that is no size": lambda: backward(nested={"0": "atuo"}),
    "contrastive with sizes": lambda: contrastive(microbatch_size="auto", eval_microbatch_size=4),
    "contrastive in microbatches": lambda: contrastive(microbatch_size="auto"),
    "contrastive in fours": lambda: contrastive(microbatch_size=4),
    "contrastive evaluated in microbatches": lambda: contrastive(eval_microbatch_size="auto"),
    "contrastive evaluated in fours": lambda: contrastive(eval_microbatch_size=4),
    "contrastive without encoders": lambda: Contrastive({}),
    "encoder not a module": lambda: Contrastive({"x": cast(Any, len)}),
    "contrastive of another batch": lambda: Contrastive({"a": nn.Linear(4, 4)})(b=X),
    "contrastive of unequal rows": lambda: Contrastive(
        {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    )(a=X, b=X[:5]),
    "contrastive loss of each row": lambda: Contrastive(
        {"a": nn.Linear(4, 4)}, lambda rows: rows.sum(1)
    )(a=X),
    "encoder without rows": lambda: Contrastive(
        {"a": nn.Flatten(0)}, lambda rows: rows.sum(), microbatch_size=None
    )(a=X),
    "temperature zero": lambda: InfoNCE(0),
    "gradient sums": lambda: backward(features=[GradientSums("fp64")]),
}


def fit(batches: Any = ((X, Y),), **options: Any) -> object:
    options = {"loss_fn": LOSS, "optimizer": torch.optim.SGD, "device": "cpu", **options}
    module, features = options.pop("module", None) or model(), with_features(options)
    return Trainer(module, batches, progress=False, **features).fit()


def fit_twice() -> object:
    trainer = Trainer(
        model(), [(X, Y)], loss_fn=LOSS, optimizer=torch.optim.SGD, device="cpu", progress=False
    )
    trainer.fit()
    return trainer.fit()


def fit_on_a_loader() -> object:
    loader: Any = [(X, Y)]
    return Trainer(model(), loss_fn=LOSS, device="cpu", progress=False).fit(loader)


def evaluate_nothing() -> object:
    return Trainer(model(), loss_fn=LOSS, device="cpu", progress=False).eval()


TRAINER: dict[str, Callable[[], object]] = {
    "empty loader": lambda: fit([]),
    "loader that runs dry": lambda: fit(iter([(X, Y)]), max_duration="2ba"),
    "iterator for two epochs": lambda: fit(iter([(X, Y)]), max_duration="2ep"),
    "loader of no batches": lambda: fit(3),
    "loader that changes structure": lambda: fit([(X, Y), X]),
    "loader that changes rows": lambda: fit([(X, Y), (X, Y[:4])]),
    "loader with an empty batch": lambda: fit([(X, Y), (X[:0], Y[:0])]),
    "loss not finite": lambda: fit([(X, Y), (X * float("nan"), Y)]),
    "no optimizer": lambda: fit(optimizer=None),
    "optimizer of another model in the trainer": lambda: fit(
        optimizer=torch.optim.SGD(SHARED.parameters())
    ),
    "scheduler per plateau": lambda: fit(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau),
    "interval of the scheduler": lambda: fit(scheduler_interval="step"),
    "what to rehearse": lambda: fit(rehearse="best"),
    "several loaders without names": lambda: fit(
        eval_dataloader=(DataLoader(ROWS), DataLoader(ROWS))
    ),
    "a loader for fit": fit_on_a_loader,
    "duration a number": lambda: fit(max_duration=5),
    "duration a word": lambda: fit(max_duration="ten"),
    "duration of nothing": lambda: fit(max_duration="0ep"),
    "duration in tokens": lambda: fit(max_duration="1e6tok"),
    "clip norm negative": lambda: fit(grad_clip_norm=-1),
    "device unknown": lambda: fit(device="gpu"),
    "precision of other trainers": lambda: fit(precision="16-mixed"),
    "limit below the model": lambda: fit(memory_limit="1KiB"),
    "optimizer state does not fit": lambda: fit(memory_limit="3KiB", optimizer=torch.optim.AdamW),
    "metric named loss": lambda: fit(metrics={"loss": MeanMetric()}),
    "fit twice": fit_twice,
    "eval without data": evaluate_nothing,
}

DATA = "{call: torch.utils.data.DataLoader, args: {dataset: [1]}}"
CALLBACKS = "automicro.callbacks"
STOPPING = f"{CALLBACKS}.EarlyStopping"
LINES = "automicro.loggers.JSONLinesLogger"
WORDS = """
optimzer.call=x epochs=3 1=2 lr=0.3 out_features=3 optimizer.lr=0.3 seed=many seed=1.5
grad_clip_norm=big strict_divisible=maybe device=[cpu] microbatch_size=1.5
eval_microbatch_size=true memory_limit=1.5 max_duration=2 microbatch_size=0 grad_clip_norm=-1
memory_limit=lots global_batch_size=0 eval_global_batch_size=0 eval_global_batch_size=many
accumulate_batches=0 accumulate_batches=null accumulate_batches=many rehearse=worse
scheduler_interval=epochs non_finite=halt precision=bf61 batchnorm=wran batchnorm=off
loss_average=sample channels_last=sometimes deterministic=1.5 probe=never compile=fast
compile=null eval_interval=0ep max_duration=10xp loss_average=3 batch_layout=rows seed=-1
weights=none.pt run_dir=[a] parameter_groups=null parameter_groups=[bias] model=torch.nn.Linear
model=null model.cal=x model.call=3 model.args=[1] metrics=[1] metrics.accuracy=high
count_tokens=len model.call=torch.nn.linear model.call=torch.optimm.AdamW
model.call=torhc.nn.Linear model.call=argprase.Net model.call=torch/nn model.call=dict
model.call=torch.nn optimizer.call=torch.optim.adamw optimizer.call=AdamW model.call=torch.pi
model.args.in_feature=3 model.args=null scheduler.call=torch.optim.lr_scheduler.StepLR
optimizer.args.params=[] train_dataloader.args.batch_size=${global_batch_size}
train_dataloader.args.batch_size=${global_batch} run_dir=${when:%Y} seed=${max_duration} model=???
model.args.bias=??? eval_dataloader=${model.args}
model.args.in_features=${train_data.args.batch_size} max_duration =3 seed= optimizer.args.lr.x=1
train_dataloader.args.dataset.3=1 max_time=1:30:00 max_time=[2h] loggers=[null] checkpoint={}
checkpoint=true checkpoint=runs/a checkpoint.intervall=3ep keep_last=3 checkpoint.keep_last=many
checkpoint.keep_best=null checkpoint.folder=[3] checkpoint.folder=${rundir}/a weights=.
sampling_mode=durations sampling_mode=[fixed]
"""
WRONG_OVERRIDES = (
    *WORDS.split(),
    "max_duration={a: 1}",
    "loss_average={language: token}",
    "parameter_groups=[{param: bias}]",
    "model={args: {}}",
    "model.args={1: 2}",
    "model.args.device={call: torch.device, arg: 1}",
    "optimizer={call: gc.collect_all}",
    "optimizer={call: time.get_clock_info.missing}",
    "optimizer={call: shutil.get_archive_formats}",
    "model.args={in_features: '???', out_features: '???'}",
    "optimizer.args={lr: [",
    "max_time=2 hours",
    f"callbacks={STOPPING}",
    f"loggers={{call: {LINES}}}",
    f"callbacks=[{STOPPING}]",
    f"callbacks=[{{call: {CALLBACKS}.EarlyStoping}}]",
    f"callbacks=[{{call: {STOPPING}, args: {{patient: 3}}}}]",
    f"callbacks=[{{call: {STOPPING}, patience: 3}}]",
    f"loggers=[{{call: {LINES}}}]",
    "callbacks=[{call: torch.nn.ReLU}]",
    "loggers=[{call: torch.nn.ReLU}]",
    "checkpoint={folder: a, interval: 3}",
    "checkpoint={folder: a, keep_last: 0}",
    "checkpoint={folder: a, best_mode: mni}",
    "checkpoint={folder: a, resume: atuo}",
    "eval_dataloader={cal: a.b}",
    "eval_dataloader={seen: {cal: a.b}}",
    "eval_dataloader={seen: a.b}",
    f"eval_dataloader={{seen: {DATA}, new: 3}}",
    f"eval_dataloader={{seen/all: {DATA}}}",
    "eval_dataloader={seen: {max_batches: 3}}",
    f"eval_dataloader={{data: {DATA}, max_batch: 3}}",
    f"eval_dataloader={{new: {{data: {DATA}, max_batches: all}}}}",
    f"eval_dataloader={{new: {{data: {DATA}, max_batches: 0}}}}",
    f"eval_dataloader={{new: {{data: {DATA}, interval: 3}}}}",
    f"eval_dataloader={{data: {DATA}, microbatch_size: 0}}",
    f"eval_dataloader={{new: {{data: {DATA}, metrics: [a]}}}}",
    "eval_dataloader={new: {data: {call: torch.utils.data.DataLoadr}}}",
    "compile={mode: reduce-overhead}",
    "sampling_mode={lengths: a}",
    "sampling_mode={mode: fixed, lenghts: a}",
    "sampling_mode={mode: fixed, shuffle: maybe}",
    "sampling_mode={mode: duration, lengths: {cal: a}}",
    "sampling_mode={mode: duration, lengths: {call: no.such}}",
)
WRONG_FILES = (
    "",
    "model: {call: a.b}\ntrain_dataloader: {call: a.b}",
    "model: [1\nseed: 2",
    "seed: 1\nseed: 2",
    "model:\n  call: ${\n",
    "- 1",
    "train",
)


def config_with(override: str = "seed=0", text: str = JOB) -> object:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return build_trainer(job(override, text=text))


CONFIGS: dict[str, Callable[[], object]] = {
    **{override: functools.partial(config_with, override) for override in WRONG_OVERRIDES},
    **{f"file {text!r}": functools.partial(config_with, text=text) for text in WRONG_FILES},
}

MY_CODE = {
    "my_code.py": """\
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(5, 2)

    def forward(self, x):
        return self.head(x)


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index > 13:
            raise ValueError(f"row {index} is broken")
        return torch.zeros(1024), 0


def broken(batch_size):
    return DataLoader(Rows(), batch_size=batch_size)


def rows():
    return TensorDataset(torch.zeros(24, 1024), torch.zeros(24, dtype=torch.long))


def none():
    return None


def high(batch_size):
    data = TensorDataset(torch.zeros(24, 1024), torch.arange(24))
    return DataLoader(data, batch_size=batch_size)


def careless():
    return {}["inputs"]
""",
    "slip.py": "import torch\n\n\nnumber = undefined\n",
    "typo.py": "def make(:\n    pass\n",
    "text.pt": "weights",
    "small.yaml": "model: {call: torch.nn.Linear}\n",
    "configs/digits.yaml": "",
}
QUIET = "progress=false probe=false"
NET = '"model={call: my_code.Net}"'
WEIGHT = "weight: {call: torch.tensor, args: {data: 1}}"
COMMANDS = (
    "",
    "trian a",
    "job.yaml",
    "--quiet",
    "train job.yaml --debgu",
    "train job.yaml --max-epochs=3",
    "train job.yaml --seed 1",
    "verify job.yaml --json",
    "cache all",
    "cache --clean",
    "cache --json --clear",
    "explore job.yaml --max-steps=0",
    "explore job.yaml --max-rows=-3",
    "plan job.yaml --device a1",
    "plan job.yaml --memory 5parsecs",
    "plan job.yaml --rows 0",
    "replay none.pt",
    "replay text.pt job.yaml",
    "replay text.pt jib.yaml",
    "train",
    "eval weights=weights.pt",
    "train job.yaml seed 1",
    "train jib.yaml",
    "train configs/digitz.yaml",
    "train nothing.txt",
    "train .",
    "config --keys optimzer",
    "eval job.yaml",
    "train job.yaml global_batch_size=8",
    "train job.yaml global_batch_size=7 accumulate_batches=2",
    "train job.yaml optimizer.args.lr=-1",
    f'train job.yaml "loss_fn={{call: cli_job.loss_of_kind, args: {{kind: a, {WEIGHT}}}}}"',
    "train job.yaml memory_limit=120%",
    "train job.yaml compile=true memory_limit=1MiB",
    'train job.yaml "model={call: cli_job.nan_loss}" weights=shape.pt',
    *(
        f"train job.yaml weights={name}.pt"
        for name in ("text", "code", "list", "checkpoint", "shape")
    ),
    "train job.yaml run_dir=job.yaml",
    f"train job.yaml {NET} {QUIET}",
    f"verify job.yaml {NET} {QUIET}",
    f'eval job.yaml {NET} {QUIET} "eval_dataloader=${{train_dataloader}}"',
    f'train job.yaml {QUIET} "train_dataloader={{call: my_code.high, args: {{batch_size: 12}}}}"',
    f'train job.yaml {QUIET} "train_dataloader={{call: my_code.broken, args: {{batch_size: 12}}}}"',
    f"train job.yaml {QUIET} scheduler_interval=batch max_duration=1000sp"
    ' "scheduler={call: torch.optim.lr_scheduler.OneCycleLR, args: {max_lr: 1, total_steps: 2}}"',
    f"train job.yaml {QUIET} max_duration=10000tok",
    'train job.yaml "model={call: slip.make}"',
    'train job.yaml "model={call: typo.make}"',
    'train job.yaml "model={call: my_code.careless}"',
    'train job.yaml "optimizer.args.lr=${oc.env:LEARNING_RATE}"',
    'train job.yaml "count_tokens={call: builtins.len}"',
    'train job.yaml "loss_fn={call: builtins.list}"',
    'train job.yaml "train_dataloader={call: my_code.none}"',
    'train job.yaml "eval_dataloader={new: {data: {call: my_code.rows}, interval: 1ep}}"',
)


def command(line: str) -> str:
    """Return the exit code and the last message of a command beside a job, its code and weights."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        enter_folder_with_job(Path(folder), patch)
        patch.setenv("LEARNING_RATE", "0.1")
        Path("configs").mkdir()
        for name, text in MY_CODE.items():
            Path(name).write_text(text, encoding="utf-8")
        linear = nn.Linear(1024, 2).state_dict()
        for name, weights in {
            "code": {"weight": os.system},
            "list": [1, 2],
            "checkpoint": {"model": linear, "epoch": 3},
            "shape": nn.Linear(8, 2).state_dict(),
        }.items():
            torch.save(weights, f"{name}.pt")
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            code = main(shlex.split(line))
    for name in ("my_code", "slip", "typo", "cli_job"):
        sys.modules.pop(name, None)
    last = re.split(r"\n(?=automicro)", printed.getvalue().rstrip())[-1]
    last = re.sub(r"(at torch\S*py):\d+", r"\1:…", last)
    return f"{last}\n(exit code {code})"


def rows_apart() -> object:
    step = Microbatcher(model(), forward=lambda m, b: m(b["a"]).mean(), loss_average="samples")
    return step.backward({"a": X, "b": X[:3]})


def import_removed_name() -> None:
    from automicro.callbacks import FreezeSchedule  # noqa: F401


RATES = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
DURATIONS = "0.0001h 0h 0ep -1ba 1.5ep 1.5tok 1.23e1sp 1e2ba 1e999999999tok 5min. 5m 2h30min ten ep"
TIMES = (90, True, None, "90", "", "1:30:00", "1.5h", "30m2h", "2h2h", "2ep", "-5m", "0s")
PIECES: dict[str, Callable[[], object]] = {
    "schedule in epochs": lambda: linear_with_warmup(RATES, warmup=1, total="40ep"),
    "warm-up in tokens": lambda: constant_with_warmup(RATES, warmup="1e6tok"),
    "warm-up without a unit": lambda: constant_with_warmup(RATES, warmup="50"),
    "warm-up a share of no total": lambda: constant_with_warmup(RATES, warmup=cast(Any, 0.1)),
    "warm-up a share of more than all": lambda: cosine_with_warmup(RATES, warmup=50.0, total=100),
    "schedule of no steps": lambda: linear_with_warmup(RATES, warmup=0, total=0),
    "root of no warm-up": lambda: inverse_sqrt_with_warmup(RATES, warmup=0),
    "warm-up longer than all": lambda: linear_with_warmup(RATES, warmup="50ba", total=40),
    **{
        f"final rate {final!r}": functools.partial(
            linear_with_warmup, RATES, warmup=0, total=5, final=final
        )
        for final in (1.5, float("nan"), cast(Any, "0.1"))
    },
    **{
        f"duration {text!r}": functools.partial(Duration.parse, cast(Any, text))
        for text in ("", None, True, 2.5, 5, "5", *DURATIONS.split())
    },
    **{
        f"duration of {value!r} epochs": functools.partial(
            Duration, value=cast(Any, value), unit=Unit.EPOCHS
        )
        for value in (1.0, True, "2")
    },
    **{
        f"max_duration {text!r}": functools.partial(read_duration, "max_duration", text)
        for text in ("5m", "5s", "2hours", "90 seconds")
    },
    **{f"time {text!r}": functools.partial(parse_time, cast(Any, text)) for text in TIMES},
    "time before the start": lambda: parse_time(timedelta(seconds=-1)),
    "sizes of no rows": lambda: verify(model(), (X, Y), loss_fn=LOSS, sizes=[0]),
    "sizes that split nothing": lambda: verify(model(), (X, Y), loss_fn=LOSS, sizes=[6, 20]),
    "average that verify does not know": lambda: verify(
        model(), (X, Y), loss_fn=LOSS, loss_average="rows"
    ),
    **{
        f"state {value!r}": functools.partial(backward, features=[StepState([value])])
        for value in (3, "name", None, len)
    },
    "state that only its object restores": lambda: backward(
        features=[StepState([itertools.count()])]
    ),
    "state that cannot be copied": lambda: backward(
        features=[StepState([{"rows": (each for each in range(3))}])]
    ),
    "probe": lambda: backward(probe="warn"),
    "average of a model that declares none": lambda: backward(
        loss_fn=None, forward=lambda m, b: m(b), loss_average="model"
    ),
    "rows that cannot be told apart": rows_apart,
    "part without a forward": lambda: split(nn.ModuleList([nn.Linear(2, 2)])),
    "part in tokens": lambda: split(nn.Linear(2, 2), microbatch_unit="tokens"),
    "part of a part in two keys": lambda: backward(
        module=nn.Sequential(model()), nested={"0": {"0": "auto"}}
    ),
    "part of the topics": lambda: loader("test", batch_size=8),
    "topics of no bytes": lambda: loader("eval", batch_size=8, max_length=1),
    "pieces of no bytes": lambda: pieces("eval", max_bytes=0),
    "words of no length": lambda: word_loader("eval", batch_size=8, max_length=1),
    "words of no vocabulary": lambda: word_loader("eval", batch_size=8, vocabulary=1),
    "dtype of verify": lambda: verify(model(), X, dtype=torch.float32),  # type: ignore[call-arg]
    "limit of a picture": lambda: speed_and_memory([(1, 1.0, 1)], limit_bytes=3),  # type: ignore[call-arg]
    "option of a host that is gone": lambda: check_options(
        "enable", {"eval_loss_average": "tokens"}, {}
    ),
    "metric function with four arguments": lambda: UpdateMetric(
        lambda metric, outputs, microbatch, name: None
    ),
    "figure for a logger": lambda: Run.show(cast(Any, None), "a", None),
    "import of a name that is gone": import_removed_name,
    **{
        f"import of {name}": functools.partial(getattr, callbacks, name)
        for name in (
            *("FreezeSchedule", "ImageSizeSchedule", "LearningRateMonitor"),
            "SequenceLengthSchedule",
        )
    },
}

GROWTH = {"start": 2, "end": 4, "over": "4ba", "resize": lambda batch, size: batch}


def save(step: Any) -> object:
    return CheckpointStore("checkpoints").save({}, step=step)


def closed_logger() -> None:
    JSONLinesLogger("log").log({"train/loss": 0.5}, step=1)


WRONG_ARGUMENTS: tuple[tuple[str, Callable[..., object], dict[str, Any]], ...] = (
    ("patience", EarlyStopping, {"patience": 0}),
    ("mode", EarlyStopping, {"mode": "mim"}),
    ("min_delta", EarlyStopping, {"min_delta": -1.0}),
    ("min_delta text", EarlyStopping, {"min_delta": "1"}),
    ("monitor", EarlyStopping, {"monitor": ""}),
    ("decay", ExponentialMovingAverage, {"decay": 1.0}),
    ("no decay", ExponentialMovingAverage, {"decay": None}),
    ("interval", ExponentialMovingAverage, {"update_interval": "5"}),
    ("half_life", ExponentialMovingAverage, {"half_life": "5ba"}),
    ("resize", GrowthSchedule, {**GROWTH, "resize": 3}),
    ("start", GrowthSchedule, {**GROWTH, "start": 8}),
    ("start zero", GrowthSchedule, {**GROWTH, "start": 0}),
    ("over", GrowthSchedule, {**GROWTH, "over": "0ba"}),
    ("steps", GrowthSchedule, {**GROWTH, "steps": 0}),
    ("history", OutOfMemoryReport, {"folder": "a", "history": 3}),
    ("one", LoggerGroup, {"loggers": JSONLinesLogger("a")}),
    ("class", LoggerGroup, {"loggers": [JSONLinesLogger]}),
    ("text", LoggerGroup, {"loggers": [JSONLinesLogger("a"), "csv"]}),
    ("number", LoggerGroup, {"loggers": 3}),
    ("id", WandbLogger, {"folder": "a", "id": "x"}),
    ("config", WandbLogger, {"folder": "a", "config": "x"}),
    ("closed", closed_logger, {}),
    *(
        (f"{name} {value!r}", CheckpointConfig, {"folder": "a", name: value})
        for name, value in (
            *(("keep_last", 0), ("keep_last", True), ("keep_best", -1), ("best_mode", "maximum")),
            *(("interval", "1 epoch"), ("interval", 100), ("folder", " ")),
            *(("resume", "Auto"), ("resume", "last"), ("resume", "")),
        )
    ),
    *((f"step {step!r}", save, {"step": step}) for step in (-1, 1.0, True, "3")),
    *((f"{state}", restore_rng_state, {"state": state}) for state in ({}, {"python": 3})),
)
PARTS: dict[str, Callable[[], object]] = {
    f"{function.__name__}: {name}": functools.partial(function, **options)
    for name, function, options in WRONG_ARGUMENTS
}

CASES: dict[str, dict[str, Callable[[], object]]] = {
    "The primitive": PRIMITIVE,
    "The trainer": TRAINER,
    "Configs": CONFIGS,
    "Durations, schedules and other pieces": PIECES,
    "Callbacks, loggers and checkpoints": PARTS,
    "The command line": {
        f"automicro {line}".rstrip(): functools.partial(command, line) for line in COMMANDS
    },
}


def message(use: Callable[[], object]) -> str:
    """Return the message at the end of the traceback, or that of a command."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            told = use()
    except Exception as error:
        lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
        text = re.sub(r"0x[0-9a-f]+", "0x…", "\n".join(lines))
        # The folder is a new temporary one.
        return re.sub(r"\S*/automicro-\w+/failed-batch-\d+", "…/failed-batch-0001", text)
    return told if isinstance(told, str) else "no error"


HEAD = """\
# What you see when something is wrong

Every message says what is wrong, with the values, and ends with what to do. This table
is written by `python -m tests.test_wrong_uses`, and a test holds it to the code.

"""


def section(title: str) -> str:
    rows = (f"**{name}**\n\n```text\n{message(use)}\n```\n" for name, use in CASES[title].items())
    return "\n".join([f"## {title}\n", *rows])


@pytest.mark.parametrize("title", CASES)
def test_wrong_uses_give_messages_of_table(title: str) -> None:
    found = section(title).splitlines()
    assert "no error" not in found
    written = TABLE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    assert found == [f"## {title}", *written.rstrip("\n").splitlines()]


if __name__ == "__main__":
    TABLE.write_text(HEAD + "\n".join(map(section, CASES)), encoding="utf-8")
