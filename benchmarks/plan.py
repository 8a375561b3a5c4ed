"""Planned peaks against real ones: torch's CPU allocator with a counter, and other predictors.

    OMP_NUM_THREADS=1 python -m benchmarks.plan [--unseen] [--quick | --peers] [--json FILE]
    OMP_NUM_THREADS=1 python -m benchmarks.plan --ranks N [--only MODEL]

Twelve models, three sizes each, in fp32, under bf16 autocast, and with recomputed blocks, with
three optimizers. Each case is planned on tensors without data, then trained for real: two batches
of two microbatches in a `Microbatcher`, where a c10 allocator counts every byte that torch's CPU
kernels request, including temporary ones. A plan is *unsafe* if its peak with its margin is below
the real one. ``--unseen`` takes twelve other models. With ``--ranks`` the models are sharded over
this many processes, by block and as a whole with ``fully_shard``, and the first one's allocator
counts. It needs a C++ compiler, transformers and torchvision.
"""

import argparse
import gc
import importlib
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.sizes_of_peers import repair_torchvision

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("fp32", "bf16", "checkpointed")
OPTIMIZERS = ("SGD", "SGD momentum", "AdamW")


@dataclass(frozen=True)
class Subject:
    """A model, and its batch of any number of rows."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    sizes: tuple[int, int, int]
    loss_fn: Callable[..., Tensor] | None = None
    is_convolutional: bool = False


class Again(nn.Module):
    """Recomputes a block in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **options: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **options)


class Recurrent(nn.Module):
    """Tokens to a class, through an LSTM or a GRU."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.layers = kind(128, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0].mean(1))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """Multilayer perceptron of residual blocks."""

    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """torch's own transformer layers."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class UNet(nn.Module):
    """Images to images, at three scales."""

    def __init__(self) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            halves = ((before, after), (after, after))
            return nn.Sequential(
                *(
                    layer
                    for sizes in halves
                    for layer in (
                        nn.Conv2d(*sizes, 3, padding=1),
                        nn.GroupNorm(4, after),
                        nn.SiLU(),
                    )
                )
            )

        self.down = nn.ModuleList((block(3, 32), block(32, 64), block(64, 128)))
        self.up = nn.ModuleList(
            (nn.ConvTranspose2d(128, 64, 2, 2), nn.ConvTranspose2d(64, 32, 2, 2))
        )
        self.joined = nn.ModuleList((block(128, 64), block(64, 32)))
        self.head = nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        large = self.down[0](x)
        middle = self.down[1](nn.functional.max_pool2d(large, 2))
        x = self.down[2](nn.functional.max_pool2d(middle, 2))
        x = self.joined[0](torch.cat([middle, self.up[0](x)], 1))
        return self.head(self.joined[1](torch.cat([large, self.up[1](x)], 1)))  # type: ignore[no-any-return]


class Temporal(nn.Module):
    """Residual convolutions over time."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width), nn.GELU())
            for _ in range(6)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(2))  # type: ignore[no-any-return]


def tokens(rows: int, length: int = 128, vocabulary: int = 2000) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length))


def language(rows: int) -> dict[str, Tensor]:
    ids = tokens(rows)
    return {"input_ids": ids, "labels": ids}


def images(size: int, classes: int = 10) -> Callable[[int], Any]:
    return lambda rows: (torch.randn(rows, 3, size, size), torch.randint(0, classes, (rows,)))


def subjects() -> dict[str, Subject]:
    repair_torchvision()
    torchvision: Any = importlib.import_module("torchvision")
    transformers: Any = importlib.import_module("transformers")
    from automicro.demo import digits

    transformers.logging.set_verbosity_error()
    small: Any = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
    cross_entropy = nn.CrossEntropyLoss()
    return {
        "MLP": Subject(
            Blocks,
            lambda rows: (torch.randn(rows, 512), torch.randint(0, 10, (rows,))),
            (64, 256, 1024),
            cross_entropy,
        ),
        "GPT-2": Subject(
            lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    vocab_size=2000,
                    n_positions=128,
                    n_embd=128,
                    n_layer=4,
                    n_head=4,
                    use_cache=False,
                )
            ),
            language,
            (2, 5, 12),
        ),
        "BERT": Subject(
            lambda: transformers.BertForMaskedLM(
                transformers.BertConfig(vocab_size=2000, num_hidden_layers=4, **small)
            ),
            language,
            (2, 5, 12),
        ),
        "T5": Subject(
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    vocab_size=2000,
                    d_model=128,
                    d_kv=32,
                    d_ff=512,
                    num_layers=3,
                    num_heads=4,
                    decoder_start_token_id=0,
                    use_cache=False,
                )
            ),
            language,
            (2, 5, 12),
        ),
        "Llama": Subject(
            lambda: transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=2000, num_hidden_layers=4, use_cache=False, **small
                )
            ),
            language,
            (2, 5, 12),
        ),
        "ViT": Subject(
            lambda: transformers.ViTForImageClassification(
                transformers.ViTConfig(
                    **{"image_size": 64, "patch_size": 8, "num_hidden_layers": 4, **small}
                )
            ),
            lambda rows: {
                "pixel_values": torch.randn(rows, 3, 64, 64),
                "labels": torch.randint(0, 2, (rows,)),
            },
            (4, 12, 32),
        ),
        "encoder": Subject(
            Encoder,
            lambda rows: (torch.randn(rows, 64, 128), torch.randn(rows, 64, 128)),
            (4, 12, 32),
            nn.MSELoss(),
        ),
        "LSTM": Subject(
            Recurrent,
            lambda rows: (tokens(rows, 32, 1000), torch.randint(0, 10, (rows,))),
            (8, 24, 64),
            cross_entropy,
        ),
        "digits CNN": Subject(
            digits.CNN,
            lambda rows: (torch.randn(rows, 1, 8, 8), torch.randint(0, 10, (rows,))),
            (64, 256, 1024),
            cross_entropy,
            is_convolutional=True,
        ),
        "ResNet-18": Subject(
            torchvision.models.resnet18, images(64), (4, 10, 24), cross_entropy, True
        ),
        "ResNet-50": Subject(
            torchvision.models.resnet50, images(64), (4, 8, 16), cross_entropy, True
        ),
        "MobileNet": Subject(
            torchvision.models.mobilenet_v2, images(64), (4, 10, 24), cross_entropy, True
        ),
    }


def unseen() -> dict[str, Subject]:
    """Return models that no setting of the planner was tuned on."""
    repair_torchvision()
    vision: Any = importlib.import_module("torchvision").models
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    small: Any = {"vocab_size": 2000, "hidden_size": 128, "num_attention_heads": 4}
    cross_entropy, sizes = nn.CrossEntropyLoss(), (2, 5, 12)

    def text(name: str, head: str, **options: Any) -> Subject:
        config = getattr(transformers, f"{name}Config")(**options)
        return Subject(lambda: getattr(transformers, name + head)(config), language, sizes)

    def seen(make: Callable[..., nn.Module], *sizes: int, convolves: bool = True) -> Subject:
        return Subject(lambda: make(num_classes=10), images(64), sizes, cross_entropy, convolves)  # type: ignore[arg-type]

    return {
        "DistilBERT": text(
            "DistilBert", "ForMaskedLM", vocab_size=2000, dim=128, hidden_dim=512, n_layers=4,
            n_heads=4,
        ),
        "ELECTRA": text(
            "Electra", "ForMaskedLM", embedding_size=64, num_hidden_layers=4,
            intermediate_size=512, **small,
        ),
        "BART": text(
            "Bart", "ForConditionalGeneration", vocab_size=2000, d_model=128, encoder_layers=3,
            decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=512, decoder_ffn_dim=512, max_position_embeddings=128, use_cache=False,
        ),
        "Qwen2": text(
            "Qwen2", "ForCausalLM", num_hidden_layers=4, num_key_value_heads=2,
            intermediate_size=512, use_cache=False, **small,
        ),
        "OPT": text(
            "OPT", "ForCausalLM", ffn_dim=512, num_hidden_layers=4, max_position_embeddings=128,
            word_embed_proj_dim=128, use_cache=False, **small,
        ),
        "Swin": seen(vision.swin_t, 2, 6, 12, convolves=False),
        "GRU": Subject(
            lambda: Recurrent(nn.GRU),
            lambda rows: (tokens(rows, 32, 1000), torch.randint(0, 10, (rows,))),
            (8, 24, 64),
            cross_entropy,
        ),
        "U-Net": Subject(
            UNet,
            lambda rows: (torch.randn(rows, 3, 32, 32), torch.randn(rows, 3, 32, 32)),
            (4, 10, 24),
            nn.MSELoss(),
            is_convolutional=True,
        ),
        "temporal CNN": Subject(
            Temporal,
            lambda rows: (torch.randn(rows, 64, 256), torch.randint(0, 10, (rows,))),
            (4, 10, 24),
            cross_entropy,
            is_convolutional=True,
        ),
        "DenseNet-121": seen(vision.densenet121, 4, 8, 16),
        "EfficientNet": seen(vision.efficientnet_b0, 4, 8, 16),
        "ConvNeXt": seen(vision.convnext_tiny, 2, 5, 10),
    }  # fmt: skip


def checkpointed(model: nn.Module) -> nn.Module:
    """Return the model with its repeated blocks recomputed."""
    from automicro.savers.recompute import repeated_blocks

    for name, block in repeated_blocks(model).items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Again(block))
    return model


def optimizer_of(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    if name == "SGD":
        return lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    if name == "SGD momentum":
        return lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)


def measure(allocator: Any, subject: Subject, rows: int, way: str, optimizer: str) -> int:
    """Return the peak bytes of a device: two batches of two microbatches each."""
    from automicro import Microbatcher
    from automicro.batch.tensors import tensor_leaves

    torch.manual_seed(0)
    batch = subject.batch(2 * rows)
    gc.collect()
    base_bytes = allocator.used_bytes
    model = subject.make()
    if way == "checkpointed":
        model = checkpointed(model)
    step = optimizer_of(optimizer)(model.parameters())
    microbatcher = Microbatcher(
        model,
        loss_fn=subject.loss_fn,
        optimizer=step,
        microbatch_size=rows,
        precision="bf16" if way == "bf16" else "fp32",
        batchnorm="ignore",
        probe=False,
    )
    for _ in range(2):
        allocator.reset_peak()
        microbatcher.backward(batch)
        step.step()
        step.zero_grad()
    # The batch is in host memory, and a device gets copies of its microbatches.
    copied = {id(tensor): tensor for _, tensor in tensor_leaves(batch)}.values()
    peak_bytes: int = allocator.peak_bytes - base_bytes
    return peak_bytes + sum(tensor.nbytes // 2 for tensor in copied)


def plan_of(subject: Subject, rows: int, way: str, optimizer: str) -> Any:
    import automicro

    def make() -> nn.Module:
        return checkpointed(subject.make()) if way == "checkpointed" else subject.make()

    return automicro.plan(
        make(),
        subject.batch(2 * rows),
        loss_fn=subject.loss_fn,
        optimizer=optimizer_of(optimizer),
        precision="bf16" if way == "bf16" else "fp32",
        device="cpu",
        microbatch_size=rows,
    )


def compare(library: Path, name: str, *, quick: bool) -> list[dict[str, Any]]:
    """Plan and measure all cases of a subject."""
    from tests.real_memory.allocator import CappedAllocator

    subject = {**subjects(), **unseen()}[name]
    allocator = CappedAllocator(library)
    warnings.simplefilter("ignore")
    found = []
    for way in WAYS:
        for optimizer in ("AdamW",) if quick else OPTIMIZERS:
            for rows in subject.sizes:
                planned = plan_of(subject, rows, way, optimizer)
                real_bytes = measure(allocator, subject, rows, way, optimizer)
                found.append(
                    {
                        "model": name,
                        "is_convolutional": subject.is_convolutional,
                        "way": way,
                        "optimizer": optimizer,
                        "rows": rows,
                        "real_bytes": real_bytes,
                        "planned_bytes": planned.peak_bytes,
                        "margin_bytes": planned.margin_bytes,
                    }
                )
    return found


def sharded(library: Path, name: str, num_ranks: int) -> list[dict[str, Any]]:
    """Plan all cases of a subject on several ranks, and measure them on the first rank."""
    from torch.multiprocessing.spawn import spawn

    import automicro

    subject = subjects()[name]
    rows = subject.sizes[0]
    planned = automicro.plan(
        subject.make(),
        subject.batch(2 * rows),
        loss_fn=subject.loss_fn,
        optimizer=torch.optim.AdamW,
        device="cpu",
        microbatch_size=rows,
        ranks=num_ranks,
    )
    with tempfile.TemporaryDirectory() as folder:
        given = (library, name, rows, num_ranks, Path(folder))
        spawn(_measure_shard, given, nprocs=num_ranks)  # type: ignore[no-untyped-call]
        real_bytes = int((Path(folder) / "peak").read_text())
    return [
        {
            "model": name,
            "way": f"{num_ranks} ranks",
            "rows": rows,
            "real_bytes": real_bytes,
            "planned_bytes": planned.peak_bytes,
            "margin_bytes": planned.margin_bytes,
        }
    ]


def _measure_shard(
    rank: int, library: Path, name: str, rows: int, num_ranks: int, folder: Path
) -> None:
    """Write the first rank's peak in a batch of two microbatches."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from automicro import Microbatcher
    from automicro.batch.tensors import tensor_leaves
    from automicro.savers.recompute import repeated_blocks
    from tests.real_memory.allocator import CappedAllocator

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    allocator, subject = CappedAllocator(library), subjects()[name]
    torch.manual_seed(0)
    batch = subject.batch(2 * rows)
    gc.collect()
    base_bytes = allocator.used_bytes
    model = subject.make()
    for block in repeated_blocks(model).values():
        fully_shard(block)
    fully_shard(model)
    step = torch.optim.AdamW(model.parameters(), lr=1e-3)
    microbatcher = Microbatcher(
        model,
        loss_fn=subject.loss_fn,
        optimizer=step,
        microbatch_size=rows,
        batchnorm="ignore",
        probe=False,
    )
    for _ in range(3):
        gc.collect()
        allocator.reset_peak()
        microbatcher.backward(batch)
        step.step()
        step.zero_grad()
    if rank == 0:
        copied = {id(tensor): tensor for _, tensor in tensor_leaves(batch)}.values()
        peak_bytes = allocator.peak_bytes - base_bytes + sum(each.nbytes // 2 for each in copied)
        (folder / "peak").write_text(str(peak_bytes))
    dist.destroy_process_group()


def peers(library: Path, name: str) -> list[dict[str, Any]]:
    """Compare predictions of others for a whole fp32 batch with AdamW with the real peak."""
    from tests.real_memory.allocator import CappedAllocator

    subject, allocator = {**subjects(), **unseen()}[name], CappedAllocator(library)
    warnings.simplefilter("ignore")
    rows = subject.sizes[1]
    batch = subject.batch(rows)
    found: dict[str, Any] = {"model": name, "rows": rows}

    def predict(peer: str, predicted: Callable[[], int]) -> None:
        try:
            found[peer] = predicted()
        except Exception as error:
            found[peer] = f"{type(error).__name__}: {error}".splitlines()[0][:80]

    import automicro

    options: dict[str, Any] = {"loss_fn": subject.loss_fn, "optimizer": torch.optim.AdamW}
    options |= {"device": "cpu", "remedies": False}
    predict("automicro", lambda: automicro.plan(subject.make(), batch, **options).peak_bytes)
    predict("MemTracker", lambda: _mem_tracker(subject, rows))
    predict("accelerate", lambda: _accelerate(subject))
    predict("kitsune", lambda: _kitsune(subject, rows))
    gc.collect()
    base_bytes = allocator.used_bytes
    model = subject.make()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        allocator.reset_peak()
        _loss(model, subject, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    inputs = list(batch.values()) if isinstance(batch, dict) else batch
    copied = {id(tensor): tensor.nbytes for tensor in inputs}
    found["real_bytes"] = allocator.peak_bytes - base_bytes + sum(copied.values())
    return [found]


def _loss(model: nn.Module, subject: Subject, batch: Any) -> Tensor:
    if subject.loss_fn is None:
        loss: Tensor = model(**batch).loss
        return loss
    return subject.loss_fn(model(batch[0]), batch[1])


def _mem_tracker(subject: Subject, rows: int) -> int:
    """Return the prediction of torch's tracker, on fake tensors, at the second step."""
    mem_tracker: Any = importlib.import_module("torch.distributed._tools.mem_tracker")
    fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode():
        model, batch = subject.make(), subject.batch(rows)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            tracker = mem_tracker.MemTracker()
            inputs = list(batch.values()) if isinstance(batch, dict) else list(batch)
            tracker.track_external(model, optimizer, *inputs)
            with tracker:
                _loss(model, subject, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        found: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        return found


def _accelerate(subject: Subject) -> int:
    """Return the prediction of ``accelerate estimate-memory`` for Adam: a batch of one row."""
    estimate: Any = importlib.import_module("accelerate.commands.estimate")
    with torch.device("meta"):
        size, _ = estimate.calculate_maximum_sizes(subject.make())
    return int(max(estimate.estimate_training_usage(size, "float32").values()))


def _kitsune(subject: Subject, rows: int) -> int:
    kitsune: Any = importlib.import_module("kitsune")
    batch = subject.batch(rows)
    inputs = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    dtype = inputs.dtype if inputs.is_floating_point() else torch.float32
    result = kitsune.predict_memory(
        subject.make(), tuple(inputs.shape[1:]), batch_size=rows, dtype=dtype, optimizer="adamw"
    )
    return int(result.total_bytes)


def as_peers_table(rows: list[dict[str, Any]]) -> str:
    names = ("automicro", "MemTracker", "accelerate", "kitsune")
    lines = [f"| model | real | {' | '.join(names)} |", "|---|--:|" + "--:|" * len(names)]
    for row in rows:
        fields = [
            row[name] if isinstance(row[name], str) else f"{row[name] / row['real_bytes'] - 1:+.0%}"
            for name in names
        ]
        lines.append(f"| {row['model']} | {row['real_bytes'] >> 20} MiB | {' | '.join(fields)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one optimizer")
    parser.add_argument("--unseen", action="store_true", help="models that nothing was set on")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--peers", action="store_true", help="beside what others predict")
    parser.add_argument("--ranks", type=int, help="sharded over so many processes, by fully_shard")
    parser.add_argument("--only", help="one model")
    parser.add_argument("--child", nargs=2, metavar=("LIBRARY", "REPORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        library, report = map(Path, arguments.child)
        if arguments.peers:
            report.write_text(json.dumps(peers(library, arguments.only)))
        elif arguments.ranks:
            found = sharded(library, arguments.only, arguments.ranks)
            report.write_text(json.dumps(found))
        else:
            report.write_text(json.dumps(compare(library, arguments.only, quick=arguments.quick)))
        return
    from tests.compiling import compile_library, find_compiler

    compiler = find_compiler()
    if compiler is None:
        sys.exit("no C++ compiler ($CXX, g++, c++, clang++), so no allocator that counts")
    source = ROOT / "tests" / "real_memory" / "capped_allocator.cpp"
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(compiler, [source], Path(folder), ["c10"])
        rows: list[dict[str, Any]] = []
        names = list(unseen() if arguments.unseen else subjects())
        for name in [arguments.only] if arguments.only else names:
            report = Path(folder) / "report.json"
            command = [sys.executable, "-m", "benchmarks.plan", "--only", name]
            command += ["--quick"] if arguments.quick else []
            command += ["--peers"] if arguments.peers else []
            command += ["--ranks", str(arguments.ranks)] if arguments.ranks else []
            subprocess.run([*command, "--child", str(library), str(report)], cwd=ROOT, check=True)
            rows += json.loads(report.read_text())
            if not arguments.peers:
                new = rows[-len(json.loads(report.read_text())) :]
                print(as_table(new, by_case=arguments.quick), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.peers:
        print(as_peers_table(rows))
        return
    print(as_table(rows))
    unsafe = [row for row in rows if row["planned_bytes"] + row["margin_bytes"] < row["real_bytes"]]
    print(f"{len(rows)} cases, {len(unsafe)} unsafe ({len(unsafe) / len(rows):.1%})")


def as_table(rows: list[dict[str, Any]], *, by_case: bool = False) -> str:
    """Return relative errors of the planned peaks, by model and way."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["model"], row["way"])
        key += (row["rows"], row["real_bytes"] >> 20, row["planned_bytes"] >> 20) if by_case else ()
        groups.setdefault(key, []).append(row)
    lines = []
    for key, group in groups.items():
        errors = [row["planned_bytes"] / row["real_bytes"] - 1 for row in group]
        unsafe = sum(
            row["planned_bytes"] + row["margin_bytes"] < row["real_bytes"] for row in group
        )
        shown = " | ".join(map(str, key))
        lines.append(f"| {shown} | {min(errors):+.1%} | {max(errors):+.1%} | {unsafe} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
