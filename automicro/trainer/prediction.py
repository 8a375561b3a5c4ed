"""Outputs for all of a data set, in its order."""

from collections.abc import Iterable
from typing import Any

from torch.utils.data import (
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from automicro.microbatcher import Microbatcher
from automicro.trainer.lines import count_of
from automicro.trainer.loading import check_loader, fetch
from automicro.trainer.progress import Progress
from automicro.trainer.session import noting

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def predict_all(microbatcher: Microbatcher, loader: Iterable[Any], progress: Progress) -> list[Any]:
    """The outputs of each batch, in order.

    Raises:
        ValueError: the loader shuffles.
        DataLoaderError: there is not one batch.

    Example:
        >>> import torch
        >>> from automicro.trainer.progress import SilentProgress
        >>> identity = Microbatcher(torch.nn.Identity(), loss_fn=torch.nn.MSELoss())
        >>> predict_all(identity, [torch.ones(2), torch.zeros(1)], SilentProgress())
        [tensor([1., 1.]), tensor([0.])]
    """
    check_loader("dataloader", loader)
    samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    for sampler in (*samplers, getattr(samplers[1], "sampler", None)):
        if isinstance(sampler, _SHUFFLING):
            raise ValueError(
                f"the loader draws its rows at random ({type(sampler).__name__}), so predictions "
                "would come in no order that anybody knows; pass one with shuffle=False"
            )
    outputs: list[Any] = []
    where = noting(lambda: f"in prediction, batch {len(outputs) + 1} of the pass")
    with where, microbatcher.evaluating():
        for batch in fetch(loader, "dataloader"):
            outputs.append(microbatcher.predict(batch))
            done = f"predicting: {count_of(len(outputs), 'batch')} done"
            progress.status(lambda done=done: done)  # type: ignore[misc]
    return outputs
