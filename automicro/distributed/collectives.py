"""Collectives that a model runs itself: SyncBatchNorm, tensor parallelism, one's own."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from automicro.distributed.entrance import Call
from automicro.distributed.warm_up import Use
from automicro.torch_private_compiler import is_compiled


class CollectivesGuard:
    """Stands for collectives that come from no wrapper: a vote comes before each, see `entrance`.

    All ranks must run the same collectives in the same order, as they have to anyway.

    Args:
        modules: the model, and others that take part.

    Raises:
        ValueError: a module is compiled, and its collectives are out of sight.
    """

    has_strayed = False
    unused: Sequence[bool] = ()
    communicates_in_forward = True

    is_replaying = False

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        if any(is_compiled(module) for root in modules for module in root.modules()):
            raise ValueError(
                "the model is compiled and runs collectives of its own (SyncBatchNorm, tensor "
                "parallelism), which cannot be guarded inside compiled code; leave torch.compile "
                "out, or use a fixed microbatch size that fits on every rank"
            )

    def owns(self, call: Call) -> bool:
        """It has a vote before each."""
        return False

    def uses(self) -> list[Use]:
        """Nobody has told of them."""
        return []

    def stay_guarded(self) -> None:
        """It never replays."""

    def require_known(self, parameters: Sequence[Tensor]) -> None:
        """There is no wrapper."""

    def settle(self) -> None:
        """There is no wrapper."""

    def prepare(self) -> None:
        """Nothing is needed."""

    def meet(self, *, training: bool) -> None:
        """Nothing comes before the first forward."""

    def open(self, num_microbatches: int, *, training: bool) -> None:
        """Nothing is known in advance."""

    @contextlib.contextmanager
    def microbatch(self, index: int, *, weightless: bool = False) -> Iterator[None]:
        yield

    def commit(self, *, any_strayed: bool, unused: Sequence[bool]) -> None:
        """Nothing is learned."""

    def play_rest(self) -> None:
        """The peers' next collective begins with a vote."""

    def recover(self) -> None:
        """There is no wrapper."""
