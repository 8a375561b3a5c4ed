"""Losses that compare all rows of a batch, at batch sizes that do not fit into memory."""

# A contrastive loss cannot be cut along rows, because each row is compared with all others. But
# encoders compute each row independently, and their outputs are small. So the whole batch is
# *encoded* slice by slice without keeping activations, and the loss is computed from the
# representations of all rows. Then each slice is encoded again, with the same random numbers, for
# the gradient of its representations (Gao et al., 2021, "Scaling Deep Contrastive Learning Batch
# Size under Memory Limited Setup"). Gradients are those of the whole batch. Only representations
# and their gradients grow with the batch.
#
# Encoders are parts with a size of their own (`automicro.split`). If memory runs out while a slice
# is encoded, only the slices of that encoder shrink.

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from automicro.errors import BatchError, LossError, removed
from automicro.nested.split import split
from automicro.policy.policy import Policy
from automicro.step.parts import attached_to

Size: TypeAlias = int | str | Policy | None


class Contrastive(nn.Module):
    """Encoders, and a loss that compares the representations of all rows.

    Give it whole batches: ``microbatch_size=None`` and ``eval_microbatch_size=None`` in a
    `Microbatcher` or a `Trainer`. The encoders have sizes of their own.

    Args:
        encoders: modules by the names of their inputs in a batch. Each returns a tensor of (rows,
            features). A module can appear under several names. An encoder that already has a size
            of its own keeps it.
        loss: a function of the representations, in the order of the encoders:
            ``loss(queries, documents)``; `InfoNCE` by default. If it is a module, its parameters,
            such as a temperature, are trained.
        microbatch_size: rows of a slice of an encoder, also in evaluation: ``"auto"``, an int, a
            policy, or None for the whole batch.

    Raises:
        TypeError, ValueError: there are no encoders, or one is not a module.

    On several ranks, every rank needs rows: drop an incomplete last batch (``drop_last=True``).

    Example:
        >>> towers = {"query": nn.Linear(8, 4), "document": nn.Linear(6, 4)}
        >>> model = Contrastive(towers, microbatch_size=2)
        >>> outputs = model(query=torch.randn(5, 8), document=torch.randn(5, 6))
        >>> outputs["loss"].backward()
        >>> outputs["query"].shape, model.sizes
        (torch.Size([5, 4]), {'query': [2, 2, 1], 'document': [2, 2, 1]})
    """

    compares_rows = True
    """Tells a `Microbatcher` not to split the batch."""

    def __init__(
        self,
        encoders: Mapping[str, nn.Module],
        loss: Callable[..., Tensor] | None = None,
        *,
        microbatch_size: Size = "auto",
    ) -> None:
        super().__init__()
        if not encoders:
            raise ValueError("encoders is empty. Give modules by name: {'query': model.query}")
        for name, encoder in encoders.items():
            if not isinstance(encoder, nn.Module):
                raise TypeError(
                    f"the encoder {name!r} is {encoder!r}, not a module. Write a module whose "
                    "forward returns the representations"
                )
        self.encoders = nn.ModuleDict(encoders)
        self.loss = InfoNCE() if loss is None else loss
        # Only after all checks, because an error must not leave some encoders split.
        for name, encoder in encoders.items():
            if attached_to(encoder) is None:
                split(encoder, microbatch_size=microbatch_size).name = name

    @property
    def sizes(self) -> dict[str, list[int]]:
        """Rows of each slice in the last run of each encoder."""
        found = ((name, attached_to(encoder)) for name, encoder in self.encoders.items())
        return {name: nested.sizes for name, nested in found if nested is not None}

    def forward(self, **inputs: Any) -> dict[str, Tensor]:
        """Return the loss, and the representations of the rows by the names of the encoders.

        Args:
            inputs: the input of each encoder by its name: a tensor, a tuple of arguments, or a
                mapping of arguments by name (such as token ids and a mask).

        Raises:
            BatchError: an encoder has no input, or the encoders return different numbers of rows.
        """
        if set(inputs) != set(self.encoders):
            raise BatchError(
                f"the batch has {', '.join(sorted(inputs)) or 'nothing'}, but the encoders are "
                f"{', '.join(sorted(self.encoders))}. Name the input of each encoder in the batch"
            )
        encoded = {
            name: _encode(name, encoder, inputs[name]) for name, encoder in self.encoders.items()
        }
        counts = {name: len(each) for name, each in encoded.items()}
        if len({*counts.values()}) > 1:
            raise BatchError(f"the encoders return {counts} rows, but the numbers must be equal")
        loss = self.loss(*encoded.values())
        if loss.dim():
            raise LossError(
                f"the loss has the shape {tuple(loss.shape)}. Return one number for all rows, "
                "such as its mean"
            )
        return {"loss": loss, **encoded}


def _encode(name: str, encoder: nn.Module, given: Any) -> Tensor:
    if isinstance(given, Mapping):
        output = encoder(**given)
    else:
        output = encoder(*given) if isinstance(given, tuple | list) else encoder(given)
    if isinstance(output, Tensor) and output.dim() >= 2:
        return output
    what = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output)
    raise BatchError(
        f"the encoder {name!r} returns {what}. Return one tensor of (rows, features), such as the "
        "mean over positions"
    )


@removed(gathers="Leave it out: the loss compares the rows of all ranks")
class InfoNCE(nn.Module):
    """A loss in which each anchor must find its own positive among those of all rows and ranks.

    The loss is the cross-entropy of similarities, which are cosines divided by a temperature (van
    den Oord et al., 2018), by default averaged over both directions as in CLIP (Radford et al.,
    2021). Similarities are computed for some rows at a time, so the square matrix of the batch
    never exists.

    Each rank compares its own rows with those of all ranks and returns the mean over its own rows.
    The mean of all ranks' losses, weighted by their rows, equals the loss of one process with all
    rows, and so does its gradient: declare ``loss_average="samples"``.

    Args:
        temperature: divides the similarities; trained, unless ``trains_temperature`` is False.
        trains_temperature: whether the logarithm of the temperature is a parameter.
        is_symmetric: whether positives must find their anchors, too.
        microbatch_size: number of anchors whose similarities are computed at a time.

    Raises:
        ValueError: the temperature is not positive.

    Rows that are orthogonal to each other find their positives at a low temperature.

    >>> rows = torch.eye(4)
    >>> float(InfoNCE(temperature=0.05)(rows, rows).detach()) < 1e-6
    True
    """

    def __init__(
        self,
        temperature: float = 0.07,
        *,
        trains_temperature: bool = True,
        is_symmetric: bool = True,
        microbatch_size: Size = "auto",
    ) -> None:
        super().__init__()
        # Written in this way, the condition refuses NaN, too.
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} is not positive. Pass 0.07, for example")
        log_scale = torch.tensor([-math.log(temperature)])  # fully_shard does not accept scalars
        if trains_temperature:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)
        self.is_symmetric = is_symmetric
        self.similarities = _Similarities()
        split(
            self.similarities,
            microbatch_size=microbatch_size,
            loss_average="tokens",  # the mean over targets, one for each row
            batch_layout={"candidates": "shared", "scale": "shared"},
        ).name = "similarities"

    @property
    def temperature(self) -> float:
        """The current temperature."""
        return math.exp(-float(self.log_scale.detach()))

    def forward(self, anchors: Tensor, positives: Tensor, *negatives: Tensor) -> Tensor:
        """Return the loss.

        Args:
            anchors: representations of shape (rows, features).
            positives: the match of each anchor, in the same shape.
            negatives: any number of tensors of that shape without a match, which are only compared
                with anchors.
        """
        anchors, positives, *others = (
            F.normalize(each, dim=-1) for each in (anchors, positives, *negatives)
        )
        # Encoders might have been moved without this module.
        scale = self.log_scale.exp().to(anchors.device)
        among, first = gather_rows(positives)
        # Rows of lower ranks come before those of this rank.
        targets = first + torch.arange(len(anchors), device=anchors.device)
        among = torch.cat([among, *(gather_rows(each)[0] for each in others)])
        loss: Tensor = self.similarities(anchors, among, scale, targets)
        if self.is_symmetric:
            among, _ = gather_rows(anchors)
            loss = (loss + self.similarities(positives, among, scale, targets)) / 2
        return loss


class _Similarities(nn.Module):
    """Cross-entropy of some anchors among all candidates."""

    def forward(self, anchors: Tensor, candidates: Tensor, scale: Tensor, targets: Tensor) -> Any:
        return F.cross_entropy(scale * anchors @ candidates.T, targets)


def gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all ranks, with gradients, and the index of the first row of this rank.

    Ranks can have different numbers of rows; their order is that of the ranks. The gradient of a
    row is the sum of its gradients on all ranks. Without a process group, the rows are returned
    unchanged.

    Args:
        rows: a tensor of (rows, …), with the same further dimensions on all ranks.

    Returns:
        The rows of all ranks, and the index of the first row of this rank among them.

    >>> gather_rows(torch.ones(3, 2))[1]
    0
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows, 0
    from torch.distributed.nn.functional import all_gather

    # Ranks exchange their numbers of rows first, because all_gather() needs tensors of one size:
    # rows are padded to the largest number.
    own = torch.tensor([len(rows)], device=rows.device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    counts = torch.cat(every).tolist()
    padded = torch.cat([rows, rows.new_zeros((max(counts) - len(rows), *rows.shape[1:]))])
    gathered = zip(all_gather(padded), counts, strict=True)  # type: ignore[no-untyped-call]
    return torch.cat([each[:count] for each, count in gathered]), sum(counts[: dist.get_rank()])
