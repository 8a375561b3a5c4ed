"""What splitting a batch changes in a model: forbidding it, or warning of it once.

BatchNorm normalises with the mean and variance of the rows it sees at once. Cut into microbatches
it sees fewer, so its output, its gradients and its running statistics are others than the whole
batch's. No weighting of losses can repair that; it can only be found and said.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from automicro.errors import (
    BatchNormWarning,
    BufferWarning,
    UnsplittableModelError,
    add_note,
    text_of,
    warn,
)
from automicro.modules import ModuleIndex, sees_the_batch
from automicro.policy.policy import Fixed, Policy
from automicro.transaction.buffers import Buffers

_NAMES_SHOWN = 5


def find_batchnorm(model: nn.Module) -> list[str]:
    """Return the names of the layers that would see a microbatch where they saw the batch.

    Found are BatchNorm in training mode (also synchronised, lazy and derived classes), and
    BatchNorm without running statistics in any mode. InstanceNorm normalises each row by itself:
    the running statistics that it may track are buffers that change. Parameters that require no
    gradient do not freeze statistics, ``eval()`` does. Names are those of
    ``model.named_modules()``, each layer once; if the model itself is such a layer, it goes by its
    class.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LayerNorm(8))
    >>> find_batchnorm(model), find_batchnorm(model.eval())
    (['1'], [])
    """
    return [name or type(layer).__name__ for name, layer in _layers(model, remove_duplicate=True)]


def batchnorm_buffers(model: nn.Module) -> set[str]:
    """Return the names, as in ``model.named_buffers()``, of the buffers of those layers.

    A layer that is shared has a name for each place where it stands.

    >>> sorted(batchnorm_buffers(nn.Sequential(nn.BatchNorm1d(8))))
    ['0.num_batches_tracked', '0.running_mean', '0.running_var']
    """
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in _layers(model, remove_duplicate=False)
        for name, _ in layer.named_buffers(recurse=False)
    }


def batchnorm_message(names: Sequence[str], rows_now: int, rows_full: int) -> str:
    """Return what a ``BatchNormWarning`` says: which layers, what they see, what to do.

    ``rows_now`` are the rows of the largest microbatch, ``rows_full`` those of the batch.

    >>> batchnorm_message(["bn1"], 64, 512)[:63]
    '1 layer averages over 64 rows at a time instead of 512: bn1. Gr'
    """
    count = "1 layer averages" if len(names) == 1 else f"{len(names)} layers average"
    listed = ", ".join(names[:_NAMES_SHOWN])
    if len(names) > _NAMES_SHOWN:
        listed += f" and {len(names) - _NAMES_SHOWN} more"
    return (
        f"{count} over {rows_now} rows at a time instead of {rows_full}: {listed}. "
        f"Gradients and running statistics are therefore not those of the whole batch. "
        f'To make them exact, say batchnorm="exact", which computes each row forward twice and '
        f"moves what waits to the host; or use GroupNorm or LayerNorm, or freeze the statistics "
        f"with .eval() on these layers; on several ranks SyncBatchNorm averages over one "
        f"microbatch of each. "
        f'Or say batchnorm="ignore" to accept it, "error" to refuse to split, '
        f'"disable" to train on whole batches only.'
    )


def needs_two_rows(exception: BaseException) -> bool:
    """Return whether BatchNorm refused an input with one value per channel.

    >>> import torch
    >>> try:
    ...     _ = nn.BatchNorm1d(8)(torch.zeros(1, 8))
    ... except ValueError as error:
    ...     print(needs_two_rows(error))
    True
    """
    return isinstance(exception, ValueError) and text_of(exception).startswith(
        "Expected more than 1 value per channel when training"
    )


def _layers(model: nn.Module, *, remove_duplicate: bool) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        if sees_the_batch(module):
            yield name, module


BATCHNORM_MODES = ("warn", "error", "disable", "ignore", "exact")


class SplitGuard:
    """Layers that average over the batch, and buffers that count microbatches.

    Args:
        index: of every module that takes part in the forward.
        mode: one of `BATCHNORM_MODES`.
    """

    def __init__(self, index: ModuleIndex, mode: str) -> None:
        self._index = index
        self._mode = mode
        self._has_warned = False
        self._named_buffers: set[str] = set()

    def allowed_policy(self, policy: Policy) -> Policy:
        """The policy, or whole batches only where BatchNorm disables splitting.

        Raises:
            UnsplittableModelError: BatchNorm forbids what the policy might propose.
        """
        if self._mode not in ("error", "disable", "exact"):
            return policy
        whole = Fixed(None)
        if policy.state_dict() == whole.state_dict():
            return policy
        names = self._batchnorm_names()
        if not names:
            return policy
        if self._mode != "error":  # "exact": the model itself cuts, stage by stage
            return whole
        raise UnsplittableModelError(
            f"batchnorm='error', and layers average over the batch: {', '.join(names[:5])}"
            f"{f' and {len(names) - 5} more' if len(names) > 5 else ''}. Replace them (GroupNorm) "
            "or freeze their statistics (.eval()), or train on whole batches only with "
            "microbatch_size=None or batchnorm='disable'"
        )

    def could_split(self, policy: Policy, rows: Sequence[int], *, by_cost: bool = False) -> bool:
        """Whether the policy, as `allowed_policy` gave it, might ever split batches of these rows.

        Several are split in any case, and so are rows with costs, to save padding. Called before
        each step, for layers are frozen and thawed: it keeps a policy from cutting a batch smaller
        only to measure, where layers average over it. Exploring is what the caller asked for, so
        that "ignore" allows it.
        """
        if policy.wants_to_measure:
            accepts = policy.explores and self._mode == "ignore"
            policy.may_measure = accepts or not self._batchnorm_names()
        if len(rows) != 1 or by_cost:
            return bool(rows)
        return policy.adapts or policy.propose(rows[0]) < rows[0]

    def explaining_memory(self) -> contextlib.AbstractContextManager[None]:
        """Add to an out-of-memory error that splitting was disabled, where it was."""
        return self._explaining() if self._mode == "disable" else contextlib.nullcontext()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            names = self._batchnorm_names()
            if names:
                add_note(
                    error,
                    f"automicro: batchnorm='disable' keeps batches whole because of {names[0]!r}"
                    f"{f' and {len(names) - 1} more layers' if len(names) > 1 else ''}; "
                    "batchnorm='warn' would split them, with statistics over fewer rows",
                )
            raise

    def warn(self, sizes: Sequence[int], buffers: Buffers) -> None:
        """Warn, the first time that a batch is really split, and of buffers that change later.

        Called inside the attempt: where warnings are errors, it is rolled back.

        Warns:
            BatchNormWarning, BufferWarning
        """
        if self._mode == "ignore":
            return
        if not self._has_warned:
            names = self._batchnorm_names()
            if names:
                warn(batchnorm_message(names, max(sizes), sum(sizes)), BatchNormWarning)
            self._warn_of_buffers(buffers.changed_names(), len(sizes))
            self._has_warned = True
            return
        moved = [name for name in buffers.moved_names() if name not in self._named_buffers]
        if moved:
            self._warn_of_buffers(moved, len(sizes))

    def _warn_of_buffers(self, changed: Sequence[str], num_microbatches: int) -> None:
        known = set(self._batchnorm_buffers())
        others = [name for name in changed if name not in known]
        if others:
            warn(_buffer_message(others, num_microbatches), BufferWarning)
        self._named_buffers |= {*changed, *known}

    def _batchnorm_names(self) -> list[str]:
        return [name for name, layer in self._index.batchnorms if sees_the_batch(layer)]

    def _batchnorm_buffers(self) -> list[str]:
        """By every name of layers that are shared, told apart as `Buffers` does."""
        return [
            prefix + name
            for prefix, root in self._index.roots.items()
            for name in batchnorm_buffers(root)
        ]


def _buffer_message(names: Sequence[str], num_microbatches: int) -> str:
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"the training forward changes buffers: {listed}. It now does so {num_microbatches} times "
        "for a batch, once per microbatch, so they depend on the microbatch size. Update them "
        "once per step outside the forward, or keep batches whole with microbatch_size=None; "
        "batchnorm='ignore' accepts it"
    )
