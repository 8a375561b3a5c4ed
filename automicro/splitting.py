"""What splitting a batch changes in a model: forbidding it, or warning of it once."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from automicro.batchnorm import batchnorm_buffers, batchnorm_message, find_batchnorm
from automicro.errors import BatchNormWarning, BufferWarning, UnsplittableModelError, add_note
from automicro.policy import Fixed, Policy
from automicro.transaction import Buffers
from automicro.warn import warn

BATCHNORM_MODES = ("warn", "error", "disable", "ignore")


class SplitGuard:
    """Layers that average over the batch, and buffers that count microbatches.

    Args:
        modules: every module that takes part in the forward.
        mode: one of `BATCHNORM_MODES`.
        reached: gives modules by name that are not among them, but take part all the same.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mode: str,
        reached: Callable[[], Mapping[str, nn.Module]] = dict,
    ) -> None:
        self._modules = modules
        self._mode = mode
        self._reached = reached
        self._has_warned = False
        self._named_buffers: set[str] = set()

    def allowed_policy(self, policy: Policy) -> Policy:
        """The policy, or whole batches only where BatchNorm disables splitting.

        Raises:
            UnsplittableModelError: BatchNorm forbids what the policy might propose.
        """
        whole = Fixed(None)
        if self._mode not in ("error", "disable") or policy.state_dict() == whole.state_dict():
            return policy
        names = self._batchnorm_names()
        if not names:
            return policy
        if self._mode == "disable":
            return whole
        raise UnsplittableModelError(
            f"batchnorm='error', and layers average over the batch: {', '.join(names[:5])}"
            f"{f' and {len(names) - 5} more' if len(names) > 5 else ''}. Replace them (GroupNorm) "
            "or freeze their statistics (.eval()), or train on whole batches only with "
            "microbatch_size=None or batchnorm='disable'"
        )

    def could_split(self, policy: Policy, rows: Sequence[int]) -> bool:
        """Whether the policy, as `allowed_policy` gave it, might ever split batches of these rows.

        Several are split in any case. Called before each step, for layers are frozen and thawed: it
        keeps a policy from cutting a batch smaller only to measure, where layers average over it.
        """
        if policy.wants_to_measure:
            policy.may_measure = not self._batchnorm_names()
        if len(rows) != 1:
            return bool(rows)
        return policy.adapts or policy.propose(rows[0]) < rows[0]

    @contextlib.contextmanager
    def explaining_memory(self) -> Iterator[None]:
        """Add to an out-of-memory error that splitting was disabled, where it was."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            names = self._batchnorm_names() if self._mode == "disable" else []
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
                warn(batchnorm_message(names, sizes[0], sum(sizes)), BatchNormWarning)
            self._warn_of_buffers(buffers.changed_names(), len(sizes))
            self._has_warned = True
            return
        moved = [name for name in buffers.moved_names() if name not in self._named_buffers]
        if moved:
            self._warn_of_buffers(moved, len(sizes))

    def _warn_of_buffers(self, changed: Sequence[str], num_microbatches: int) -> None:
        known = set(self._named(batchnorm_buffers))
        others = [name for name in changed if name not in known]
        if others:
            warn(_buffer_message(others, num_microbatches), BufferWarning)
        self._named_buffers |= {*changed, *known}

    def _batchnorm_names(self) -> list[str]:
        return self._named(find_batchnorm)

    def _named(self, names_in: Callable[[nn.Module], Iterable[str]]) -> list[str]:
        """Names in all modules, those of further modules told apart as `Buffers` does."""
        roots = {
            "" if index == 0 else f"modules[{index - 1}].": root
            for index, root in enumerate(self._modules)
        }
        roots |= {f"{name}.": root for name, root in self._reached().items()}
        return [prefix + name for prefix, module in roots.items() for name in names_in(module)]


def _buffer_message(names: Sequence[str], num_microbatches: int) -> str:
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"the training forward changes buffers: {listed}. It now does so {num_microbatches} times "
        "for a batch, once per microbatch, so they depend on the microbatch size. Update them "
        "once per step outside the forward, or keep batches whole with microbatch_size=None; "
        "batchnorm='ignore' accepts it"
    )
