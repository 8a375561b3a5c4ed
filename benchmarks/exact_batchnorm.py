"""BatchNorm with whole-batch statistics in microbatches: exactness and cost.

    python -m benchmarks.exact_batchnorm [resnet18 resnet50] [--image 64] [--json FILE]

Compares ``batchnorm="exact"`` with the whole batch, with and without recomputing blocks and
offloading to the host, and with ordinary microbatches, whose BatchNorms see fewer rows. Peaks are
those of a `MemoryBudget`, without parameters and gradients; forwards per row are counted in
multiplications; times are measured on a CPU, whose memory is also the host's. It also lists which
models can be split. Needs torchvision; with timm, more models are tried.
"""

import argparse
import contextlib
import copy
import functools
import gc
import importlib
import inspect
import json
import pathlib
import platform
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from automicro import MemoryBudget, Microbatcher, UnsplittableModelError, split
from automicro.batchnorm import sees_the_batch
from automicro.nested import batchnorm
from automicro.nested.batchnorm import Stages, to_device, to_host
from automicro.units import format_bytes
from benchmarks.sizes_of_peers import repair_torchvision


class Host:
    """Host memory for offloaded tensors.

    Attributes:
        peak_bytes: the largest amount held at once.
        moved_bytes: bytes moved to the host and back.
    """

    def __init__(self) -> None:
        self._values: dict[Any, tuple[Tensor, torch.device]] = {}
        self._bytes = self.peak_bytes = self.moved_bytes = 0

    def put(self, key: Any, value: Tensor) -> None:
        self._values[key] = self.to_host(value), value.device

    def get(self, key: Any) -> Tensor:
        return self.to_device(*self._values[key])

    def drop(self, key: Any) -> None:
        del self._values[key]

    def to_host(self, value: Tensor, **options: Any) -> Tensor:
        held = to_host(value, **options)
        self._count(held.nbytes)
        self.moved_bytes += held.nbytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(held, self._count, -held.nbytes)
        return held

    def to_device(self, held: Tensor, device: torch.device) -> Tensor:
        self.moved_bytes += held.nbytes
        return to_device(held, device)

    def _count(self, num_bytes: int) -> None:
        self._bytes += num_bytes


@contextlib.contextmanager
def counting(host: Host) -> Iterator[None]:
    """Offload tensors between stages to this host."""
    table = vars(batchnorm)
    table |= {"to_host": host.to_host, "to_device": host.to_device}
    try:
        yield
    finally:
        table |= {"to_host": to_host, "to_device": to_device}


# Alternatives to compare with


@dataclass(frozen=True)
class Job:
    """A model and one batch for it.

    Attributes:
        model: the model, in training mode.
        x: images.
        y: classes.
        microbatch_size: size for the ways that split.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    microbatch_size: int

    @classmethod
    def of(
        cls, name: str, image: int, rows: int, microbatch_size: int, dtype: torch.dtype
    ) -> "Job":
        torch.manual_seed(0)
        model = make_model(name).to(dtype)
        x = torch.randn(rows, 3, image, image, dtype=dtype)
        return cls(model, x, torch.randint(10, (rows,)), microbatch_size)


def make_model(name: str) -> nn.Module:
    """Return a torchvision model with random weights and without dropout."""
    repair_torchvision()
    models = importlib.import_module("torchvision.models")
    options: dict[str, Any] = {"weights": None, "num_classes": 10}
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": False}
    model: nn.Module = getattr(models, name)(**options).train()
    for layer in model.modules():
        if type(layer).__name__ == "StochasticDepth" or isinstance(layer, nn.Dropout):
            cast(Any, layer).p = 0.0
    return model


def whole(job: Job, host: Host) -> None:
    torch.autograd.backward(F.cross_entropy(job.model(job.x), job.y))


def whole_offloaded(job: Job, host: Host) -> None:
    """Offload tensors saved by autograd, each time they are saved."""
    keys = iter(range(10**9))

    def pack(tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or tensor.nbytes < 4096:
            return tensor
        key = next(keys)
        host.put(key, tensor)
        return key

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor: Tensor = host.get(packed)
        host.drop(packed)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        whole(job, host)


class _Waiting(torch.autograd.Function):
    """A block that is recomputed in the backward, from an input held on the host."""

    @staticmethod
    def forward(ctx: Any, block: Any, host: Host, x: Tensor, _: Tensor) -> Tensor:
        ctx.block, ctx.host, ctx.key = block, host, object()
        host.put(ctx.key, x)
        out: Tensor = block(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.host.get(ctx.key).detach().requires_grad_()
        ctx.host.drop(ctx.key)
        with torch.enable_grad():
            out = ctx.block(x)
        torch.autograd.backward([out], list(gradients))
        return None, None, x.grad, None


@contextlib.contextmanager
def recomputing(model: nn.Module, host: Host | None = None) -> Iterator[None]:
    """Recompute residual blocks in the backward; with a host, their inputs are held there."""
    blocks = [
        each for each in model.modules() if type(each).__name__ in ("BasicBlock", "Bottleneck")
    ]
    wanted = torch.zeros((), requires_grad=True)
    for block in blocks:
        forward = block.forward
        if host is None:
            block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
        else:
            block.forward = functools.partial(_wait, forward, host, wanted)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _wait(forward: Any, host: Host, wanted: Tensor, x: Tensor) -> Any:
    operation: Any = _Waiting
    return operation.apply(forward, host, x, wanted)


def whole_recomputed(job: Job, host: Host) -> None:
    with recomputing(job.model):
        whole(job, host)


def whole_both(job: Job, host: Host) -> None:
    """Recompute blocks and hold their inputs, and the stem's tensors, on the host."""
    with recomputing(job.model, host):
        whole_offloaded(job, host)


def microbatched(job: Job, host: Host) -> None:
    """Use ordinary BatchNorm, which is not exact."""
    Microbatcher(
        job.model,
        loss_fn=nn.CrossEntropyLoss(),
        microbatch_size=job.microbatch_size,
        batchnorm="ignore",
        probe=False,
        device="cpu",
    ).backward((job.x, job.y))


def microbatched_recomputed(job: Job, host: Host) -> None:
    with recomputing(job.model):
        microbatched(job, host)


def exact(job: Job, host: Host) -> None:
    """Run in slices a model that `prepare` was called for."""
    with counting(host):
        whole(job, host)


def prepare(way: "Way", job: Job) -> None:
    """Split a model and finish its check, which runs once."""
    if way is exact:
        split(job.model, microbatch_size=job.microbatch_size, batchnorm="exact")
        with torch.no_grad():
            job.model(torch.zeros_like(job.x[:1]).expand(2, -1, -1, -1))


Way = Callable[[Job, Host], None]
WAYS: dict[str, Way] = {
    "whole batch": whole,
    "whole, blocks recomputed": whole_recomputed,
    "whole, offloaded": whole_offloaded,
    "whole, recomputed + offloaded": whole_both,
    "microbatches": microbatched,
    "microbatches, recomputed": microbatched_recomputed,
    "exact": exact,
}
CUTS = {name for name in WAYS if not name.startswith("whole")}
EXACT = [name for name in WAYS if not name.startswith("microbatches")]


# Measurements


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def statistics_of(model: nn.Module) -> Tensor:
    return torch.cat([each.flatten().double() for each in model.buffers()])


def apart(found: Tensor, right: Tensor) -> float:
    """Return the distance of two vectors relative to the length of the right one."""
    return float((found - right).norm() / right.norm())


def measure_exactness(
    name: str, image: int, rows: int, sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Compare loss, gradient and running statistics with the whole batch, in float64."""
    found = []
    right = Job.of(name, image, rows, rows, torch.float64)
    loss = F.cross_entropy(right.model(right.x), right.y)
    torch.autograd.backward(loss)
    for size in sizes:
        job = Job.of(name, image, rows, size, torch.float64)
        split(job.model, microbatch_size=size, batchnorm="exact")
        found_loss = F.cross_entropy(job.model(job.x), job.y)
        torch.autograd.backward(found_loss)
        line = {
            "model": name,
            "rows": rows,
            "microbatch": size,
            "loss": abs(float((found_loss - loss).detach())),
            "gradient": apart(gradient_of(job.model), gradient_of(right.model)),
            "statistics": apart(statistics_of(job.model), statistics_of(right.model)),
        }
        if size > 1:
            plain = Job.of(name, image, rows, size, torch.float64)
            microbatched(plain, Host())
            line["gradient of ordinary BatchNorm"] = apart(
                gradient_of(plain.model), gradient_of(right.model)
            )
            line["statistics of ordinary BatchNorm"] = apart(
                statistics_of(plain.model), statistics_of(right.model)
            )
        found.append(line)
    return found


def _flops(way: Way, job: Job) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        way(job, Host())
    return counter.get_total_flops()


def measure_cost(
    name: str, image: int, rows: int, sizes: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Measure peaks under a budget, forwards per row, and seconds in turns."""
    cases = [(way, rows) for way in WAYS if way not in CUTS]
    cases += [(way, size) for size in sizes for way in WAYS if way in CUTS]
    right = Job.of(name, image, rows, rows, torch.float32)
    whole_flops = _flops(whole, right)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        right.model.eval()(right.x)
    forward_flops = counter.get_total_flops()
    lines = []
    for way, size in cases:
        job = Job.of(name, image, rows, size, torch.float32)
        prepare(WAYS[way], job)
        flops = _flops(WAYS[way], job)
        job.model.zero_grad()
        budget = MemoryBudget(None)
        host = Host()
        with budget, budget.host():
            x, y = job.x.clone(), job.y.clone()
        budget.track(job.model)
        resident_bytes = budget.allocated_bytes
        moved = Job(job.model, x, y, size)
        with budget:
            WAYS[way](moved, host)
        lines.append(
            {
                "model": name,
                "image": image,
                "rows": rows,
                "way": way,
                "microbatch": size if way in CUTS else None,
                "peak_bytes": budget.peak_bytes - 2 * resident_bytes,
                "host_bytes": host.peak_bytes,
                "moved_bytes_per_row": host.moved_bytes / rows,
                "forwards_per_row": 1 + (flops - whole_flops) / forward_flops,
                "seconds": [],
            }
        )
        del job, moved, x, y, host, budget
        gc.collect()
    jobs = [Job.of(name, image, rows, size, torch.float32) for _, size in cases]
    for (way, _), job in zip(cases, jobs, strict=True):
        prepare(WAYS[way], job)
    for turn in range(rounds + 1):
        for line, job in zip(lines, jobs, strict=True):
            job.model.zero_grad()
            start = time.process_time()
            WAYS[line["way"]](job, Host())
            if turn:
                line["seconds"].append(time.process_time() - start)
    for line in lines:
        line["times"] = statistics.median(
            mine / other for mine, other in zip(line["seconds"], lines[0]["seconds"], strict=True)
        )
    return lines


def measure_limit(
    name: str, image: int, limit: str, microbatch_size: int, most: int
) -> list[dict[str, Any]]:
    """Return the largest batch, a power of two, whose step fits into a limit."""
    found = []
    for way in EXACT:
        rows, fitted, host_bytes = microbatch_size, 0, 0
        while rows <= most:
            job = Job.of(name, image, 1, microbatch_size, torch.float32)
            prepare(WAYS[way], job)
            budget = MemoryBudget(limit).track(job.model)
            host = Host()
            with budget, budget.host():
                x, y = torch.randn(rows, 3, image, image), torch.randint(10, (rows,))
            try:
                with budget:
                    WAYS[way](Job(job.model, x, y, microbatch_size), host)
            except torch.OutOfMemoryError:
                break
            fitted, host_bytes = rows, host.peak_bytes
            rows *= 2
            del job, x, y, host
            gc.collect()
        found.append(
            {
                "model": name,
                "image": image,
                "limit": limit,
                "way": way,
                "microbatch": microbatch_size if way in CUTS else None,
                "rows": fitted,
                "is_more": fitted * 2 > most,
                "host_bytes": host_bytes,
            }
        )
    return found


TORCHVISION = (
    "resnet18 resnet50 resnext50_32x4d wide_resnet50_2 vgg11_bn densenet121 googlenet "
    "inception_v3 mobilenet_v2 mobilenet_v3_small mnasnet1_0 shufflenet_v2_x0_5 "
    "efficientnet_b0 efficientnet_v2_s regnet_y_400mf convnext_tiny vit_b_16 maxvit_t"
)
TIMM = (
    "resnet18 resnetv2_50 resnest14d efficientnet_b0 mobilenetv3_small_100 regnety_002 "
    "hrnet_w18 dpn68 cspresnet50 ghostnet_100 vovnet39a levit_128s"
)
OTHERS = {
    "torchvision.segmentation": ["deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large"],
    "torchvision.detection": ["fasterrcnn_resnet50_fpn", "retinanet_resnet50_fpn"],
}


def try_cutting(source: str, name: str) -> dict[str, Any]:
    """Return whether a model can be split, its stages, and whether a small step is exact."""
    torch.manual_seed(0)
    line: dict[str, Any] = {"source": source, "model": name}
    with contextlib.redirect_stderr(None):
        if source == "timm":
            model = importlib.import_module("timm").create_model(name, num_classes=10)
        elif source == "torchvision":
            model = make_model(name)
        else:
            models = importlib.import_module(f"torchvision.models.{source.rpartition('.')[2]}")
            model = getattr(models, name)(weights=None, weights_backbone=None)
    model = model.double().train()
    line["batchnorms"] = sum(sees_the_batch(each) for each in model.modules())
    if not line["batchnorms"]:
        return {**line, "result": "has no BatchNorm"}
    for layer in model.modules():
        for name_of_rate in ("drop_prob", "drop_rate"):
            if hasattr(layer, name_of_rate):
                setattr(layer, name_of_rate, 0.0)
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    image = {"inception_v3": 96, "levit_128s": 224, "maxvit_t": 224}.get(name, 64)
    x = torch.randn(4, 3, image, image, dtype=torch.float64)
    y = torch.randint(10, (4,))

    def loss_of(output: Any) -> Tensor:
        return F.cross_entropy(
            output["out"].mean((2, 3)) if isinstance(output, dict) else output, y
        )

    whole_model = copy.deepcopy(model)
    try:
        given = list(inspect.signature(type(model).forward).parameters)[1]
        line["stages"] = len(Stages(model, {given: x}).stages)
        torch.autograd.backward(loss_of(whole_model(x)))
        right = gradient_of(whole_model)
        split(model, microbatch_size=3, batchnorm="exact")
        torch.autograd.backward(loss_of(model(x)))
        line["gradient"] = apart(gradient_of(model), right)
        line["result"] = "exact" if line["gradient"] < 1e-9 else "differs"
    except UnsplittableModelError as error:
        line["result"] = f"refused{str(error).partition('cannot be told')[2].rpartition(';')[0]}"
    return line


# Tables


def table(lines: Sequence[Mapping[str, Any]], columns: Mapping[str, Callable[[Any], str]]) -> str:
    """Return a Markdown table; each column's function gets a line."""
    rows = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    rows += ["| " + " | ".join(show(line) for show in columns.values()) + " |" for line in lines]
    return "\n".join(rows)


def _number(key: str, form: str) -> Callable[[Any], str]:
    return lambda line: format(line[key], form) if line.get(key) is not None else ""


def _text(key: str) -> Callable[[Any], str]:
    return lambda line: str(line.get(key) if line.get(key) is not None else "")


def _bytes(key: str) -> Callable[[Any], str]:
    return lambda line: format_bytes(int(line[key]))


EXACTNESS = {
    "Model": _text("model"),
    "Rows": _text("rows"),
    "Microbatch": _text("microbatch"),
    "Loss": _number("loss", ".0e"),
    "Gradient": _number("gradient", ".0e"),
    "Running statistics": _number("statistics", ".0e"),
    "Gradient, ordinary": _number("gradient of ordinary BatchNorm", ".0e"),
    "Statistics, ordinary": _number("statistics of ordinary BatchNorm", ".0e"),
}
COST = {
    "Model": _text("model"),
    "Rows": _text("rows"),
    "Way": _text("way"),
    "Microbatch": _text("microbatch"),
    "Peak above parameters": _bytes("peak_bytes"),
    "Peak, host": _bytes("host_bytes"),
    "Moved per row": _bytes("moved_bytes_per_row"),
    "Forwards per row": _number("forwards_per_row", ".2f"),
    "Time": _number("times", ".2f"),
}
LIMIT = {
    "Model": _text("model"),
    "Limit": _text("limit"),
    "Way": _text("way"),
    "Microbatch": _text("microbatch"),
    "Largest batch": lambda line: f"{line['rows']}{' or more' if line['is_more'] else ''}",
    "Host": _bytes("host_bytes"),
}
CUTTABLE = {
    "Source": _text("source"),
    "Model": _text("model"),
    "BatchNorms": _text("batchnorms"),
    "Stages": _text("stages"),
    "Result": _text("result"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["resnet18", "resnet50"])
    parser.add_argument("--image", type=int, default=64, help="pixels of a side (64)")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32], help="batches (16 32)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 8], help="sizes (2 8)")
    parser.add_argument("--rounds", type=int, default=3, help="steps that are timed (3)")
    parser.add_argument("--limit", default="128MiB", help="for the largest batch (128MiB)")
    parser.add_argument("--most", type=int, default=256, help="largest batch that is tried (256)")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=["exactness", "cost", "limit", "cuttable"],
        default=["exactness", "cost", "limit", "cuttable"],
        help="what to measure (all)",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write raw figures there")
    arguments = parser.parse_args()
    image, rows = arguments.image, arguments.rows
    repair_torchvision()
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }

    def show(part: str, lines: list[dict[str, Any]], columns: Any) -> None:
        found[part] = lines
        print(f"\n## {part}\n\n{table(lines, columns)}", flush=True)

    if "exactness" in arguments.parts:
        lines = []
        for name in arguments.models:
            lines += measure_exactness(name, image, rows[0], [1, *arguments.microbatches])
        show("exactness", lines, EXACTNESS)
    if "cost" in arguments.parts:
        lines = []
        for name in arguments.models:
            for each in rows:
                lines += measure_cost(name, image, each, arguments.microbatches, arguments.rounds)
        show("cost", lines, COST)
    if "limit" in arguments.parts:
        lines = []
        for name in arguments.models:
            size = arguments.microbatches[0]
            lines += measure_limit(name, image, arguments.limit, size, arguments.most)
        show("limit", lines, LIMIT)
    if "cuttable" in arguments.parts:
        tried = [("torchvision", name) for name in TORCHVISION.split()]
        tried += [(source, name) for source, names in OTHERS.items() for name in names]
        with contextlib.suppress(ImportError):
            importlib.import_module("timm")
            tried += [("timm", name) for name in TIMM.split()]
        show("cuttable", [try_cutting(*each) for each in tried], CUTTABLE)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
