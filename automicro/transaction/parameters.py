"""Parameters: not copied, but watched, because an attempt must not change them."""

from collections.abc import Iterable

from torch import Tensor

from automicro.errors import RollbackError
from automicro.torch_private import all_versions


class Parameters:
    """Shows that forward and backward left the parameters alone.

    Copies would double the memory of the largest thing there is, and an attempt has no business
    changing parameters: the optimizer steps after the commit.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._versions: list[int] | None = None

    def begin(self) -> None:
        self._versions = all_versions(self._parameters)

    def prepare(self) -> None:
        self._require_unchanged()

    def commit(self) -> None:
        self._versions = None

    def roll_back(self) -> None:
        if self._versions is not None:
            self._require_unchanged()
        self._versions = None

    def _require_unchanged(self) -> None:
        if self._versions != all_versions(self._parameters):
            self._versions = None
            raise RollbackError(
                "the forward or backward changed parameters, and such a change cannot be rolled "
                "back; step the optimizer after backward() returns or, in one process, in a "
                "post-accumulate hook that cannot fail, and constrain parameters after the step"
            )
