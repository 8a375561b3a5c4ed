"""Several ranks as one: agreeing, voting and stopping, with the model's wrappers guarded."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor

from automicro.errors import (
    PeerFailedError,
    PeerLostError,
    PeerStoppedError,
    RankError,
    describe_error,
)
from automicro.memory.oom import Failure, classify
from automicro.ranks.guards.collectives import (
    Call,
    keep_in_step,
    keeping_between_steps,
    own_collectives,
)
from automicro.ranks.guards.guard import Guard
from automicro.ranks.interface import TOLD, Agreement, Proposal, Report, Status, StrayedError
from automicro.ranks.votes import Votes
from automicro.ranks.warm_up import WarmUp

_CANNOT_TAKE_BACK = (
    "automicro: at that point messages of one rank to another (send, isend) had not been received, "
    "and a second attempt would take them for its own; exchange with all_to_all or all_gather "
    "instead, or use a fixed microbatch_size that fits on every rank"
)

logger = logging.getLogger(__name__)


class CoordinatedRanks:
    """Implements `automicro.ranks.interface.Ranks` for several processes.

    Args:
        votes: among all ranks.
        guards: of the wrappers that the model is made of.
        warm_up: connects what they use, before the first attempt.
        copies: how many ranks have the same rows, as tensor parallel ones do.
        name: tells it from others with the same votes.

    Example:
        >>> from automicro.ranks.simulated import SimulatedWorld
        >>> world = SimulatedWorld(2)
        >>> def step(rank: int) -> int:
        ...     ranks = CoordinatedRanks(Votes(world.exchange(rank)))
        ...     agreement = ranks.agree(Proposal(num_rows=6 - rank, microbatch_size=4 - rank))
        ...     ranks.begin(agreement.num_microbatches)
        ...     _ = ranks.vote()
        ...     return agreement.num_microbatches
        >>> world.run(step)
        [2, 2]
    """

    def __init__(
        self,
        votes: Votes,
        guards: Sequence[Guard] = (),
        *,
        warm_up: WarmUp | None = None,
        copies: int = 1,
        name: str = "",
    ) -> None:
        self._votes = votes
        self._guards = guards
        self._warm_up = warm_up or WarmUp([], set())
        self.rank = votes.rank
        self.world_size = votes.world_size
        self.copies = copies
        self._name = name
        self._looks_alone = False
        self._trained: list[int] = []  # the parameters, by identity
        self._strayed: StrayedError | None = None  # in this attempt, at a collective

    @property
    def is_alone(self) -> bool:
        return False

    @property
    def communicates_in_forward(self) -> bool:
        return any(guard.communicates_in_forward for guard in self._guards)

    @property
    def communication_share(self) -> float:
        return self._warm_up.share

    @property
    def told(self) -> Sequence[float]:
        return self._votes.told

    @property
    def num_votes(self) -> int:
        """How many exchanges there were, agreements included."""
        return self._votes.count

    def agree(self, proposal: Proposal) -> Agreement:
        self._begin_anew()
        try:
            self._warm_up.prepare()
            for guard in self._guards:
                guard.prepare()
        except BaseException as error:
            self.fail(error)
            raise
        with self._between_steps():
            agreement = self._votes.agree(proposal, asker=f"{self._name}{self._warm_up}")
        try:
            if agreement.max_rows:
                with own_collectives():
                    self._warm_up.run()
                    for guard in self._guards:
                        guard.meet(training=proposal.training)
        except BaseException as error:
            self.fail(error)
            raise
        return agreement

    def settle(self, parameters: Sequence[Tensor] = ()) -> None:
        trained = [id(each) for each in parameters if each.requires_grad]
        if trained and trained != self._trained:
            for guard in self._guards:
                guard.require_known(parameters)
            self._trained = trained
        for guard in self._guards:
            guard.settle()

    def begin(self, num_microbatches: int, *, training: bool = True) -> None:
        try:
            for guard in self._guards:
                guard.open(num_microbatches, training=training)
        except BaseException as error:
            self.fail(error)
            raise
        self._votes.is_in_attempt = True
        self._strayed = None
        keep_in_step(self)

    def microbatch(self, index: int, *, weightless: bool = False) -> AbstractContextManager[None]:
        if len(self._guards) == 1:
            return self._guards[0].microbatch(index, weightless=weightless)
        return self._guarded_by_all(index, weightless)

    @contextlib.contextmanager
    def _guarded_by_all(self, index: int, weightless: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for guard in self._guards:
                stack.enter_context(guard.microbatch(index, weightless=weightless))
            yield

    def before(self, call: Call) -> None:
        """Vote before a collective that is not ours: a model's, a loss's, a callback's.

        Raises:
            RankError: a peer is not well, or does not come to it.
            StrayedError: peers would not expect a vote.
            ValueError: it cannot be voted on.
        """
        if any(guard.owns(call) for guard in self._guards):
            return
        if self._looks_alone:
            raise ValueError(f"{call}: this rank alone looks at the loss, and no other comes to it")
        if call.name == "recv_any_source":
            raise ValueError(
                "a message from any rank (recv without src) cannot be voted on, so where memory "
                "ran out on its sender this rank would wait for ever; say src=…"
            )
        if not self._votes.is_in_attempt:
            with self._between_steps():
                self._votes.collective(call, where="between batches")
            return
        if any(guard.is_replaying for guard in self._guards):
            self._strayed = StrayedError(f"{call} was not known")
            raise self._strayed
        for guard in self._guards:
            guard.stay_guarded()  # what is played must be all that peers wait for
        self._votes.collective(call, where="in a step")

    @contextlib.contextmanager
    def looking_alone(self) -> Iterator[None]:
        self._looks_alone = True
        try:
            yield
        finally:
            self._looks_alone = False

    def voted(self) -> AbstractContextManager[None]:
        return own_collectives()

    def guarding_calls(self) -> AbstractContextManager[None]:
        return keeping_between_steps(self)

    def _leave(self) -> None:
        """The attempt is over on this rank."""
        self._votes.is_in_attempt = False
        keep_in_step(None)

    def vote(self, report: Report = Report()) -> Report:  # noqa: B008 (it is frozen)
        if self._strayed is not None:
            raise self._strayed  # a user's code has caught it
        strayed = any(guard.has_strayed for guard in self._guards)
        self._leave()
        own = [each for guard in self._guards for each in guard.unused]
        any_strayed, together, unused = self._votes.commit(report, flag=strayed, unused=own)
        for guard in self._guards:
            count = len(guard.unused)
            guard.commit(any_strayed=any_strayed, unused=unused[:count])
            unused = unused[count:]
        return together

    def stop(self, failure: BaseException, status: Status, highs: Sequence[float] = ()) -> Status:
        self._leave()
        self._strayed = None
        if isinstance(failure, RankError) and not isinstance(failure, PeerStoppedError):
            return Status.FATAL  # there is nobody left to vote with
        is_first_to_know = self._votes.stopped is None
        if is_first_to_know:
            if self._votes.messages.are_under_way and status is not Status.FATAL:
                failure.add_note(_CANNOT_TAKE_BACK)
                status = Status.FATAL
            self._play_rest()
        has_strayed = isinstance(failure, StrayedError)
        together = self._votes.report(status, highs, strayed=has_strayed)
        trouble = self._recover()
        self._votes.clear()
        if together is Status.FATAL:
            is_culprit = is_first_to_know and status is Status.FATAL
            self._raise_reasons(failure if is_culprit else None, rolls_back=True)
        elif trouble is not None:
            self.fail(trouble)
            raise trouble
        elif is_first_to_know:
            logger.debug("rank %d ended the attempt: %s", self.rank, failure)
        return together

    def _recover(self) -> Exception | None:
        try:
            with own_collectives():
                for guard in self._guards:
                    if self._votes.any_strayed:
                        # Such collectives depend on the input: they cannot be foretold.
                        guard.stay_guarded()
                    guard.recover()
        except Exception as error:
            return error
        return None

    def _play_rest(self) -> None:
        try:
            for guard in self._guards:
                guard.play_rest()
        except Exception as error:
            if classify(error) is not Failure.RETRYABLE:
                self._votes.give_up(error, "the collectives of a batch")
            raise RankError(
                f"rank {self.rank} ran out of memory again while it took part in the collectives "
                "that its peers still wait for, so they cannot be told; start again from the last "
                "checkpoint with a smaller microbatch_size"
            ) from error

    def fail(self, failure: BaseException) -> None:
        if isinstance(failure, PeerLostError):
            self._votes.require_hosts(failure)
        if self._votes.is_over or isinstance(failure, RankError):
            return  # all ranks know
        self._votes.report(Status.FATAL)
        self._raise_reasons(failure)

    def ready(self, point: str) -> None:
        with self._between_steps():
            self._votes.cast(point)

    def from_first(self, values: Iterable[float]) -> list[float]:
        with self._between_steps():
            return self._votes.from_first(values)

    def from_rank(self, rank: int, message: bytes) -> bytes:
        point = f"a message of rank {rank}"
        self.ready(point)
        sent = [message]
        try:
            with own_collectives():
                dist.broadcast_object_list(sent, rank)
        except RuntimeError as error:
            self._votes.give_up(error, point)
        return sent[0]

    def add_up(self, values: Iterable[float]) -> list[float]:
        with self._between_steps():
            return self._votes.add_up(list(values))

    def most(self, value: float) -> float:
        with self._between_steps():
            return self._votes.most(value)

    @contextlib.contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Where a peer stops outside an attempt, it has failed for good."""
        self._begin_anew()
        try:
            yield
        except PeerStoppedError:
            self._raise_reasons(None)
            raise

    def _begin_anew(self) -> None:
        """After an error that all were told of, they may go on together."""
        if self._votes.is_over:
            self._votes.is_over = False
            self._votes.clear()

    def _raise_reasons(self, own: BaseException | None, *, rolls_back: bool = False) -> None:
        """Let all ranks know who failed, and why; raise where it was not this one."""
        self._votes.is_over = True
        reasons = self._votes.explain(None if own is None else describe_error(own))
        if own is None:
            raise PeerFailedError(
                f"rank {self.rank} stops because another rank failed:\n{reasons}\n"
                f"{self._votes.state_here(rolls_back=rolls_back)} Mend the cause on that rank (its "
                "log has the traceback), and start again from the last checkpoint."
            )
        own.add_note(f"{TOLD} {self.rank} of {self.world_size}; the others were told and stop too")
