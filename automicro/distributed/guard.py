"""What keeps the collectives of a model's wrapper matched when a rank runs out of memory."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from automicro.distributed.entrance import Call
from automicro.distributed.warm_up import Use


class Guard(Protocol):
    """Stands between a wrapper (DDP, FSDP2) and its collectives.

    Either it votes before each collective (*guarded*), so that no rank enters one that another
    will not reach; or, once it knows which collectives an attempt has, it does not (*replay*), and
    a rank that failed plays those that its peers still wait for.
    """

    communicates_in_forward: bool
    """Whether a forward outside of a step needs all ranks."""

    def uses(self) -> list[Use]:
        """The collectives of the wrapper, in an order that is the same on all ranks."""

    def stay_guarded(self) -> None:
        """Never replay, because other collectives run in between."""

    def require_known(self, parameters: Sequence[Tensor]) -> None:
        """Refuse parameters to train that are inside the wrapper and that it does not know.

        Raises:
            ValueError: they came into the model, or were thawed, after it was wrapped.
        """

    def settle(self) -> None:
        """Between steps: undo what a forward outside of one has left."""

    def prepare(self) -> None:
        """Before the ranks agree: allocate what `meet` needs."""

    def meet(self, *, training: bool) -> None:
        """Right after the ranks agreed: run the collectives that come before an attempt.

        The agreement is the vote before them, so nothing may fail in between.
        """

    def open(self, num_microbatches: int, *, training: bool) -> None:
        """All ranks begin an attempt."""

    def microbatch(self, index: int, *, weightless: bool = False) -> AbstractContextManager[None]:
        """Around forward and backward of a microbatch. At its end it may vote.

        Args:
            index: of the microbatch.
            weightless: whether its gradient counts as zero.

        Raises:
            StrayedError: collectives are others than were known, and it did not run them.
            ValueError: gradients were computed that nothing reduces.
        """

    @property
    def is_replaying(self) -> bool:
        """Whether a rank that failed now would play collectives, and not vote right away."""

    def owns(self, call: Call) -> bool:
        """Whether a collective that is about to run is the wrapper's, and guarded as such."""

    @property
    def has_strayed(self) -> bool:
        """Whether the attempt's collectives were others than were known."""

    @property
    def unused(self) -> Sequence[bool]:
        """Of each parameter that it reduces, whether no microbatch of this rank used it."""

    def commit(self, *, any_strayed: bool, unused: Sequence[bool]) -> None:
        """All ranks ended the attempt well: learn from it.

        Args:
            any_strayed: whether a rank's collectives were others than were known.
            unused: of each parameter, whether no microbatch of any rank used it.
        """

    def play_rest(self) -> None:
        """After a failure here: run the collectives up to the peers' next vote."""

    def recover(self) -> None:
        """Put the wrapper back in order after an attempt that did not end. All ranks call it."""
