"""Losses that compare all rows of a batch, at a batch size that does not fit.

A contrastive loss cannot be cut along rows: each row is compared with all others. But encoders
compute each row by itself, and what they give is small. So the whole batch is *encoded* slice by
slice without keeping activations, the loss sees the representations of all rows, and each slice is
encoded again, with the same random numbers, for the gradient of its representations (Gao et al.,
2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"). Gradients are
those of the whole batch. What grows with the batch are representations and their gradients.

Encoders are parts with sizes of their own (`automicro.split`): memory that runs out while a slice
is encoded shrinks the slices of that encoder alone.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from automicro.errors import BatchError, LossError
from automicro.nested.split import split
from automicro.policy.policy import Policy
from automicro.step.parts import attached_to

Size: TypeAlias = int | str | Policy | None


class Contrastive(nn.Module):
    """Encoders, and a loss over the representations of all rows.

    Give whole batches: ``microbatch_size=None`` and ``eval_microbatch_size=None`` in a
    `Microbatcher` or a `Trainer`. Encoders have sizes of their own.

    Args:
        encoders: by the names that batches have for what they encode. Each gives a tensor of
            (rows, features). One may be there under several names. One that has a size of its own
            already keeps it.
        loss: of the representations, in the order of the encoders: ``loss(queries, documents)``;
            `InfoNCE` unless given. A module's parameters, such as a temperature, are trained.
        microbatch_size: rows of an encoder's slice: ``"auto"``, an int, a policy, or None for the
            whole batch. In evaluation, too.

    Raises:
        TypeError, ValueError: no encoders, or what is none.

    Over ranks no one may be without rows: leave an incomplete last batch out (``drop_last=True``).

    Example:
        >>> towers = {"query": nn.Linear(8, 4), "document": nn.Linear(6, 4)}
        >>> model = Contrastive(towers, microbatch_size=2)
        >>> outputs = model(query=torch.randn(5, 8), document=torch.randn(5, 6))
        >>> outputs["loss"].backward()
        >>> outputs["query"].shape, model.sizes
        (torch.Size([5, 4]), {'query': [2, 2, 1], 'document': [2, 2, 1]})
    """

    compares_rows = True
    """Tells a `Microbatcher` that the batch has to stay whole."""

    def __init__(
        self,
        encoders: Mapping[str, nn.Module],
        loss: Callable[..., Tensor] | None = None,
        *,
        microbatch_size: Size = "auto",
    ) -> None:
        super().__init__()
        if not encoders:
            raise ValueError("encoders is empty; give modules by name: {'query': model.query}")
        for name, encoder in encoders.items():
            if not isinstance(encoder, nn.Module):
                raise TypeError(
                    f"the encoder {name!r} is {encoder!r}, and not a module; write one whose "
                    "forward gives the representations"
                )
        self.encoders = nn.ModuleDict(encoders)
        self.loss = InfoNCE() if loss is None else loss
        # After all were looked at: an error must not leave some of the caller's encoders split.
        for name, encoder in encoders.items():
            if attached_to(encoder) is None:
                split(encoder, microbatch_size=microbatch_size).name = name

    @property
    def sizes(self) -> dict[str, list[int]]:
        """Rows of the slices in which each encoder ran last."""
        found = ((name, attached_to(encoder)) for name, encoder in self.encoders.items())
        return {name: nested.sizes for name, nested in found if nested is not None}

    def forward(self, **inputs: Any) -> dict[str, Tensor]:
        """The loss, and the representations of the rows by the names of the encoders.

        Args:
            inputs: of each encoder by its name: a tensor, a tuple of arguments, or a mapping of
                arguments by name (token numbers and a mask).

        Raises:
            BatchError: there is none for an encoder, or encoders gave unlike rows.
        """
        if set(inputs) != set(self.encoders):
            raise BatchError(
                f"the batch has {', '.join(sorted(inputs)) or 'nothing'}, and the encoders are "
                f"{', '.join(sorted(self.encoders))}; name what each of them encodes"
            )
        encoded = {
            name: _encode(name, encoder, inputs[name]) for name, encoder in self.encoders.items()
        }
        counts = {name: len(each) for name, each in encoded.items()}
        if len({*counts.values()}) > 1:
            raise BatchError(f"the encoders give {counts} rows; row by row they belong together")
        loss = self.loss(*encoded.values())
        if loss.dim():
            raise LossError(
                f"the loss has the shape {tuple(loss.shape)}; give one number for all rows, such "
                "as its mean"
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
        f"the encoder {name!r} gives {what}; give one tensor of (rows, features), such as the "
        "mean over positions"
    )


class InfoNCE(nn.Module):
    """Each row's anchor has to find its own positive among those of all rows, of all ranks.

    The cross-entropy of similarities, which are cosines divided by a temperature (van den Oord et
    al., 2018); in both directions, as CLIP has it (Radford et al., 2021), averaged. Similarities
    are computed for some rows at a time, too, so the square of the batch is never there.

    Over ranks each one compares its own rows with those of all, and gives the mean over its own.
    The mean of all ranks' losses, weighted by their rows, is that of one process with all rows, and
    so is its gradient: declare ``loss_average="samples"``.

    Args:
        temperature: divides similarities; trained, unless ``trains_temperature`` is False.
        trains_temperature: whether its logarithm is a parameter.
        is_symmetric: whether positives have to find their anchors, too.
        microbatch_size: anchors whose similarities are computed at a time.

    Raises:
        ValueError: a temperature that is not positive.

    Rows that are alike in nothing else find their positives at a low temperature.

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
        # So written, it refuses NaN, too.
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} is not positive; 0.07 is usual")
        log_scale = torch.tensor([-math.log(temperature)])  # fully_shard takes no scalars
        if trains_temperature:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)
        self.is_symmetric = is_symmetric
        self.similarities = _Similarities()
        split(
            self.similarities,
            microbatch_size=microbatch_size,
            loss_average="tokens",  # the mean over targets, of which each row has one
            batch_layout={"candidates": "shared", "scale": "shared"},
        ).name = "similarities"

    @property
    def temperature(self) -> float:
        """As it is now."""
        return math.exp(-float(self.log_scale.detach()))

    def forward(self, anchors: Tensor, positives: Tensor, *negatives: Tensor) -> Tensor:
        """The loss.

        Args:
            anchors: of (rows, features).
            positives: the same of what belongs to each.
            negatives: the same of what does not; any number. They are compared with anchors alone.
        """
        anchors, positives, *others = (
            F.normalize(each, dim=-1) for each in (anchors, positives, *negatives)
        )
        scale = self.log_scale.exp().to(anchors.device)  # encoders may have been moved without it
        among, first = gather_rows(positives)
        # Rows of lower ranks come before this one's among those of all.
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
    """The rows of all ranks, in their order, with their gradients; and which of them is ours.

    Ranks may have different numbers of rows. The gradient of a row is the sum of what all ranks
    have for it. Without a process group these are the rows themselves.

    Args:
        rows: of (rows, …), with the same dimensions behind the rows on all ranks.

    Returns:
        The rows of all ranks, and the number of the first of this one.

    >>> gather_rows(torch.ones(3, 2))[1]
    0
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows, 0
    from torch.distributed.nn.functional import all_gather

    # Ranks exchange their numbers of rows first, because all_gather() takes tensors of one size:
    # rows are padded to the most that a rank has.
    own = torch.tensor([len(rows)], device=rows.device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    counts = torch.cat(every).tolist()
    padded = torch.cat([rows, rows.new_zeros((max(counts) - len(rows), *rows.shape[1:]))])
    gathered = zip(all_gather(padded), counts, strict=True)  # type: ignore[no-untyped-call]
    return torch.cat([each[:count] for each, count in gathered]), sum(counts[: dist.get_rank()])
