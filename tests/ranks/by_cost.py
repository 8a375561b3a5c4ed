"""Jobs on rows of varying length, which ranks sort and pack by what they cost."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automicro import Microbatcher, PaddingWarning
from automicro.features import MicrobatchUnit
from tests.step.texts import IGNORED, Reader, texts

Lengths = Sequence[Sequence[int]]  # of the rows of each batch of a rank


def reader(kind: str | None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Reader(**options)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        fully_shard(model.mix)
        fully_shard(model)
    return model


def expected(
    ranks: Sequence[Lengths], *, padded: int | None = None, **options: Any
) -> list[Tensor]:
    """Loss and gradient of plain torch on all rows of all ranks, each batch with its padding."""
    model = reader(None, **options)
    batches = [texts(list(rows), padded=padded) for batches in ranks for rows in batches if rows]
    counts = [int((batch["labels"] != IGNORED).sum()) for batch in batches]
    losses = [model(**batch)["loss"] * n for batch, n in zip(batches, counts, strict=True)]
    loss: Tensor = sum(losses, torch.zeros((), dtype=torch.float64)) / sum(counts)
    loss.backward()
    return [loss.detach(), *_gradients(model)]


def train(
    kind: str,
    ranks: Sequence[Lengths],
    *,
    size: Any = 24,
    padded: int | None = None,
    steps: int = 1,
    fits: Sequence[int | None] = (None, None),
    declared: bool | str = "auto",
    sees_padding: bool = False,
) -> dict[str, Any]:
    """Steps on batches of these lengths, of which a rank fits only so many tokens at once."""
    model = reader(kind, sees_padding=sees_padding)
    rank = dist.get_rank()
    limit = fits[rank]
    ran: list[tuple[int, int]] = []

    def note(_: nn.Module, __: Any, given: dict[str, Tensor]) -> None:
        rows, length = given["input_ids"].shape
        ran.append((rows, length))
        if limit is not None and rows * length > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inner.register_forward_pre_hook(note, with_kwargs=True)
    microbatcher = Microbatcher(
        model,
        loss_average="tokens",
        microbatch_size=size,
        features=[MicrobatchUnit("tokens", cut_padding=declared)],
        probe=False,
    )
    batches = [texts(list(rows), padded=padded) for rows in ranks[rank] if rows]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ooms = 0
        for _ in range(steps):
            model.zero_grad()
            ran.clear()
            result = microbatcher.accumulate(batches)
            ooms += result.ooms
    return {
        "found": [result.loss, *_gradients(model)],
        "ran": ran[-result.num_microbatches :],
        "num_microbatches": result.num_microbatches,
        "size": result.microbatch_size,
        "ooms": ooms,
        "rows": (result.num_samples, result.num_global_samples),
        "warned": [str(each.message) for each in caught if each.category is PaddingWarning],
    }


def evaluate(kind: str, ranks: Sequence[Lengths], size: Any) -> dict[str, Any]:
    """Loss and outputs of an evaluation, and outputs of a prediction, beside plain ones."""
    model, rank = reader(kind), dist.get_rank()
    plain = reader(None).eval()
    microbatcher = Microbatcher(
        model,
        loss_average="tokens",
        eval_microbatch_size=size,
        features=[MicrobatchUnit("tokens", cut_padding=True if kind == "fsdp" else "auto")],
        probe=False,
    )
    [rows] = ranks[rank]
    batch = texts(list(rows)) if rows else None
    result = microbatcher.evaluate(batch, return_outputs=True)
    predicted = microbatcher.predict(batch)
    worst = 0.0
    if batch is not None:
        with torch.no_grad():
            alone = plain(**batch)
        real = batch["attention_mask"].bool()
        for outputs in (result.outputs, predicted):
            assert outputs["logits"].shape == alone["logits"].shape
            worst = max(
                worst,
                float((outputs["logits"][real] - alone["logits"][real]).abs().max()),
                float((outputs["pooled"] - alone["pooled"]).abs().max()),
            )
    return {"loss": result.loss, "worst": worst, "num_microbatches": result.num_microbatches}


def fail(kind: str) -> tuple[str, str]:
    """One rank has a batch whose lengths nothing tells."""
    model, rank = reader(kind), dist.get_rank()
    microbatcher = Microbatcher(
        model,
        loss_average="tokens",
        microbatch_size=24,
        features=[MicrobatchUnit("tokens")],
        probe=False,
    )
    batch: dict[str, Tensor] = texts([9, 3, 6])
    if rank == 1:
        batch["x_lengths"] = torch.ones(3, dtype=torch.int64)
    try:
        microbatcher.backward(batch)
    except Exception as error:
        told = type(error).__name__, str(error)
    else:
        told = "", ""
    model.zero_grad()
    microbatcher.backward(texts([9, 3, 6]))  # and they go on together
    return told


def _gradients(model: nn.Module) -> list[Tensor]:
    found = [each.grad for each in model.parameters() if each.grad is not None]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]
