"""Parameters during an attempt, compared by version."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress

from torch import Tensor

from automicro.errors import RollbackError, StateWarning, warn
from automicro.state.tensors import Copies
from automicro.torch_private import all_versions


class Parameters:
    """The check that forward and backward do not change the parameters."""

    # Copies would double the largest part of memory, and an attempt must not change parameters: the
    # optimizer steps after the commit.
    def __init__(
        self,
        parameters: Sequence[Tensor],
        names_of: Callable[[Iterable[Tensor]], Sequence[str]] = lambda _: (),
        *,
        is_training: bool = True,
    ) -> None:
        self._parameters, self._names_of = parameters, names_of
        self._is_training = is_training
        self._versions: list[int] | None = None

    def begin(self) -> None:
        self._versions = all_versions(self._parameters)

    def prepare(self) -> None:
        if self._is_training:
            self._refuse_changes()

    def commit(self) -> None:
        self._versions = None

    def roll_back(self) -> None:
        self._refuse_changes()
        self._versions = None

    def _refuse_changes(self) -> None:
        before, now = self._versions, all_versions(self._parameters)
        if before is None or before == now:
            return
        # Only once: the rollback after a failed `prepare` must not fail for them, too.
        self._versions = None
        names = self._names_of(compress(self._parameters, map(operator.ne, before, now)))
        if self._is_training:
            raise refused_writes(names)
        # The forward may have restored them itself, in a finally block.
        warn(
            f"a failed attempt of an evaluation changed parameters{_listed(names)}, which cannot "
            "be rolled back. If a forward changes parameters for a while, restore them in a "
            "finally block",
            StateWarning,
        )


class WrittenParameters:
    """Copies of parameters that forwards write to and restore, as through ``.data``."""

    # A check has seen the writes, which autograd does not count, so versions would miss them.
    def __init__(self, parameters: Mapping[int, Tensor]) -> None:
        self._parameters = parameters
        self._copies: Copies | None = None

    def begin(self) -> None:
        self._copies = Copies([*self._parameters.values()], self._parameters)

    def prepare(self) -> None:
        """Do nothing, because nothing can fail."""

    def commit(self) -> None:
        self._copies = None

    def roll_back(self) -> None:
        if self._copies is not None:
            list(self._copies.put_back())  # all are copied, because they count as buffers
        self._copies = None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" * (len(names) > 3)
    return f" ({', '.join(map(repr, names[:3]))}{more})" if names else ""


def refused_writes(names: Sequence[str]) -> RollbackError:
    """Return the error for parameters that a forward or backward changed."""
    return RollbackError(
        f"the forward or backward changed parameters{_listed(names)}, which cannot be "
        "rolled back. Call optimizer.step() after backward() returns (in a single process also in "
        "a post-accumulate hook that cannot fail). Update moving averages (a teacher, a key "
        "encoder) and constrain parameters after the step (an embedding with max_norm constrains "
        "itself in the forward). If layers initialize themselves, run a whole batch through them "
        "first, under torch.no_grad()"
    )
