"""BatchNorm: detection of layers that normalize slices instead of the batch, and messages.

BatchNorm normalizes with the mean and variance of the rows that it receives at once. With slices
these are fewer rows, so its output, gradients and running statistics differ from those of the whole
batch. No weighting of losses can correct that; it can only be detected and reported.
"""

from collections.abc import Iterator, Sequence

from torch import nn

from automicro.errors import text_of
from automicro.torch_private import AnyBatchNorm

_NAMES_SHOWN = 5
_REMEDY = (
    'Or set batchnorm="ignore" to accept it, "error" to refuse to split, "disable" to train on '
    "whole batches only."
)


def find_batchnorm(model: nn.Module) -> list[str]:
    """Return the names of the layers that would normalize a microbatch instead of the batch.

    These are BatchNorm in training mode (including synchronized, lazy and derived classes), and
    BatchNorm without running statistics in any mode. InstanceNorm is not included, because it
    normalizes each row separately; running statistics that it tracks count as changing buffers.
    ``eval()`` freezes statistics, ``requires_grad_(False)`` does not. Names are as in
    ``model.named_modules()``, each layer once; the model itself has the name of its class.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LayerNorm(8))
    >>> find_batchnorm(model), find_batchnorm(model.eval())
    (['1'], [])
    """
    return [name or type(layer).__name__ for name, layer in _layers(model, remove_duplicate=True)]


def batchnorm_buffers(model: nn.Module) -> set[str]:
    """Return the names of these layers' buffers, one for each place of a shared layer.

    >>> sorted(batchnorm_buffers(nn.Sequential(nn.BatchNorm1d(8))))
    ['0.num_batches_tracked', '0.running_mean', '0.running_var']
    """
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in _layers(model, remove_duplicate=False)
        for name, _ in layer.named_buffers(recurse=False)
    }


def batchnorm_message(
    names: Sequence[str], rows_now: int, rows_full: int, *, remedy: str = _REMEDY
) -> str:
    """Return the text of a ``BatchNormWarning``: the layers, the effect, the remedies.

    >>> batchnorm_message(["bn1"], 64, 512)[:63]
    '1 layer averages over 64 rows at a time instead of 512: bn1. Gr'
    """
    return (
        f"{_averages(names, rows_now, rows_full)}. "
        f"Gradients and running statistics are therefore not those of the whole batch. "
        f'To make them exact, set batchnorm="exact" (two forwards per row, and memory on the '
        f"host), use GroupNorm or LayerNorm, or freeze the statistics with .eval() on these "
        f"layers; on several ranks SyncBatchNorm averages over one microbatch of each. "
        f"{remedy}"
    )


def evaluation_message(names: Sequence[str], rows_now: int, rows_full: int) -> str:
    """Return the same for an evaluation, which affects only layers without running statistics.

    >>> evaluation_message(["bn1"], 64, 512)[:75]
    '1 layer averages over 64 rows at a time instead of 512: bn1, in evaluation '
    """
    return (
        f"{_averages(names, rows_now, rows_full)}, in evaluation as well, without running "
        "statistics. Outputs, losses and metrics are therefore not those of whole batches. "
        "Evaluate whole batches with eval_microbatch_size=None, use GroupNorm or LayerNorm, or "
        'train with track_running_stats=True; batchnorm="ignore" accepts it'
    )


def _averages(names: Sequence[str], rows_now: int, rows_full: int) -> str:
    count = "1 layer averages" if len(names) == 1 else f"{len(names)} layers average"
    listed = ", ".join(names[:_NAMES_SHOWN])
    if len(names) > _NAMES_SHOWN:
        listed += f" and {len(names) - _NAMES_SHOWN} more"
    return f"{count} over {rows_now} rows at a time instead of {rows_full}: {listed}"


def needs_two_rows(exception: BaseException) -> bool:
    """Whether BatchNorm refused an input with one value per channel.

    >>> import torch
    >>> try:
    ...     _ = nn.BatchNorm1d(8)(torch.zeros(1, 8))
    ... except ValueError as error:
    ...     print(needs_two_rows(error))
    True
    """
    # Torch has no class for this error, so only its text identifies it.
    return isinstance(exception, ValueError) and text_of(exception).startswith(
        "Expected more than 1 value per channel when training"
    )


def _layers(model: nn.Module, *, remove_duplicate: bool) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        if sees_the_batch(module):
            yield name, module


def sees_the_batch(module: nn.Module) -> bool:
    """Whether a layer normalizes with statistics of the rows that it receives at once.

    >>> sees_the_batch(nn.BatchNorm1d(2)), sees_the_batch(nn.BatchNorm1d(2).eval())
    (True, False)
    """
    if isinstance(module, AnyBatchNorm):
        # Without running statistics it normalizes with those of the batch, even in eval mode.
        return module.training or (module.running_mean is None and module.running_var is None)
    return False
