"""Parameters during an attempt, compared by version."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress

from torch import Tensor

from automicro.errors import RollbackError
from automicro.state.tensors import NO_COPIES, Copies
from automicro.torch_private import all_versions


class Parameters:
    """The check that forward and backward do not change the parameters."""

    # Copies would double the largest part of memory, and an attempt must not change parameters: the
    # optimizer steps after the commit.
    def __init__(
        self,
        parameters: Sequence[Tensor],
        names_of: Callable[[Iterable[Tensor]], Sequence[str]] = lambda _: (),
    ) -> None:
        self._parameters = parameters
        self._names_of = names_of
        self._versions: list[int] | None = None

    def begin(self) -> None:
        self._versions = all_versions(self._parameters)

    def prepare(self) -> None:
        before, now = self._versions, all_versions(self._parameters)
        if before != now:
            # Raised only once: the rollback after a failed `prepare` must not fail for it, too.
            self._versions = None
            moved = map(operator.ne, before or (), now)
            raise refused_writes(self._names_of(compress(self._parameters, moved)))

    def commit(self) -> None:
        self._versions = None

    def roll_back(self) -> None:
        if self._versions is not None:
            self.prepare()
        self._versions = None


class WrittenParameters:
    """Copies of parameters that forwards write to and restore, as through ``.data``."""

    # A check has seen the writes, which autograd does not count, so versions would miss them.
    def __init__(self, parameters: Mapping[int, Tensor]) -> None:
        self._parameters = parameters
        self._copies = NO_COPIES

    def begin(self) -> None:
        if self._parameters:  # most models have none
            self._copies = Copies([*self._parameters.values()], self._parameters)

    def prepare(self) -> None:
        """Do nothing, because nothing can fail."""

    def commit(self) -> None:
        self._copies = NO_COPIES

    def roll_back(self) -> None:
        list(self._copies.put_back())  # all are copied, because they count as buffers
        self.commit()


def refused_writes(names: Sequence[str]) -> RollbackError:
    """Return the error for parameters that a forward or backward changed."""
    listed = ", ".join(map(repr, names[:3])) + f" and {len(names) - 3} more" * (len(names) > 3)
    return RollbackError(
        f"the forward or backward changed parameters{listed and f' ({listed})'}, which cannot be "
        "rolled back. Call optimizer.step() after backward() returns (in a single process also in "
        "a post-accumulate hook that cannot fail). Update moving averages (a teacher, a key "
        "encoder) and constrain parameters after the step (an embedding with max_norm constrains "
        "itself in the forward). If layers initialize themselves, run a whole batch through them "
        "first, under torch.no_grad()"
    )
