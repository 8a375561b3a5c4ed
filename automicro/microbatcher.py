"""The primitive: a whole optimization batch in, its exact gradient out, however little memory.

``backward`` and ``evaluate`` share one shape: propose a size, cut the batch, attempt it inside a
transaction, commit or roll back, and try smaller slices after running out of memory.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automicro.batch.device import cost_of_row
from automicro.batch.layout import balanced_sizes
from automicro.batch.reading import holds_itself
from automicro.batch.tensors import Contents
from automicro.compilation import refuse_cuda_graphs
from automicro.features import answering_unknown, exact_batchnorm
from automicro.loss.averages import LossAverage, is_declared, read_average
from automicro.loss.conventions import choose_convention
from automicro.loss.passes import Computation, Mode
from automicro.memory.oom import once_more
from automicro.memory.residents import OccupiedDevice, ResidentMemory
from automicro.modules import comparing_rows, evaluation_mode
from automicro.options import (
    PRECISIONS,
    check_choice,
    check_model,
    check_modules,
    check_optimizer,
    check_precision,
    check_probe,
    check_state,
    check_step,
    resolve_device,
    unwrapped,
)
from automicro.policy.policy import Fixed, Policy
from automicro.ranks.interface import (
    Ranks,
    announcing_failed_construction,
    announcing_failure,
    find_ranks,
)
from automicro.reach import Reach
from automicro.step.feature import Feature, check_features, takes_part
from automicro.step.fit import fit
from automicro.step.passes import Passes
from automicro.step.phase import leveled, make_phase
from automicro.step.plan import Cut, ReadBatch, Step, order_of, with_padding
from automicro.step.results import EvalResult, StepResult, Where
from automicro.step.setup import Setup
from automicro.step.split_guard import BATCHNORM_MODES, SplitGuard
from automicro.step.work import Engine, EvaluationWork, TrainingWork
from automicro.transaction.gradients import GradientHistory


class Microbatcher:
    """Runs forward and backward of whole batches on a device too small for them.

    Example:
        >>> import torch
        >>> from automicro import Microbatcher
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> microbatcher = Microbatcher(
        ...     model, loss_fn=torch.nn.CrossEntropyLoss(), optimizer=optimizer
        ... )
        >>> for batch in [(torch.randn(32, 8), torch.randint(2, (32,)))]:
        ...     result = microbatcher.backward(batch)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> result.num_samples, result.microbatch_size, result.num_microbatches
        (32, 32, 1)

    Args:
        model: the model. Wrapped in ``DistributedDataParallel`` or by ``fully_shard``, it is
            trained by all ranks together, which make the same calls in the same order.
        loss_fn: ``loss_fn(model(inputs), targets)`` on batches of ``(inputs, targets)``.
        forward: ``forward(model, microbatch)`` returning the loss, ``(loss, outputs)`` or a
            mapping with ``"loss"``. One that takes ``num_items_in_batch``, too, is told how many
            targets count, and divides its loss by them. Without ``loss_fn`` and ``forward``, the
            model has Composer's interface or is called as ``model(**batch).loss``.
        backward: replaces ``loss.backward()``, for loss scalers and other trainers.
        microbatch_size: rows: an int, ``"auto"``, ``"explore"`` (the fastest that fits), None (the
            whole batch), or a policy.
        eval_microbatch_size: the same for `evaluate`.
        loss_average: what the loss is a mean over: ``"samples"``, ``"tokens"``, ``"none"`` (a
            sum), a callable from a microbatch to what its loss was divided by, a mapping of these
            by the name of the loss, ``{"language": "tokens", "balance": "samples"}``,
            ``"auto"`` to read it off the loss or the model, or ``"model"`` to read it off a model
            of Hugging Face's whose loss ``forward`` hands on.
        batchnorm: what to do when a batch is split although layers average over it: ``"warn"``,
            ``"error"``, ``"disable"`` (train on whole batches), ``"ignore"``; or ``"exact"``: with
            the statistics of the whole batch, at the price of a second forward, for models that
            ``torch.fx`` can trace (see ``docs/checks.md``).
        optimizer: memory for its state is reserved while sizes are found. It may be wrapped, as
            accelerate and Lightning do. Its ``train()`` and ``eval()``, which schedule-free ones
            have, are the caller's to call.
        modules: further modules that take part, whose gradients and buffers change.
        device: where the model computes; its parameters' device unless given.
        memory_limit: bytes or text such as ``"24MiB"``: a `MemoryBudget` on a CPU, the process's
            share of the device on CUDA, where ``"80%"`` or 0.8 say it, too.
        precision: ``"fp32"``, or ``"bf16"`` or ``"fp16"`` for autocast of the forward and the
            loss. ``"fp16"`` needs a ``backward`` that scales the loss.
        batch_layout: which dimension holds the rows, and which parts are shared; see
            `split_batch`.
        probe: whether to compare, at the first batches that could be split, the gradient of a few
            rows with those of two parts of them.
        features: what stands beside the path of a batch: nested parts, memory savers, sizes in
            tokens, remembered sizes and more, of `automicro.features`; observers (`Observing`); or
            a `Feature` of yours.

    Attributes:
        wants_to_stop: set it on any rank to ask for the end of the run: the next batch is still
            trained, and its result says so on every rank.

    Raises:
        TypeError, ValueError: arguments that make no sense, each with its remedy.

    With ``probe="error"`` a look that shows another average than the loss was taken for is a
    `LossAverageError` of `backward` or `evaluate`, and not a warning.
    """

    @answering_unknown
    @announcing_failed_construction
    def __init__(
        self,
        model: nn.Module,
        *,
        loss_fn: Callable[..., Any] | None = None,
        forward: Callable[..., Any] | None = None,
        backward: Callable[[Tensor], Any] | None = None,
        microbatch_size: int | str | Policy | None = "auto",
        eval_microbatch_size: int | str | Policy | None = "auto",
        loss_average: LossAverage = "auto",
        batchnorm: str = "warn",
        optimizer: torch.optim.Optimizer | None = None,
        modules: Iterable[nn.Module] = (),
        device: torch.device | str | None = None,
        memory_limit: str | int | float | None = None,
        precision: str = "fp32",
        batch_layout: int | Mapping[str, Any] = 0,
        probe: bool | str = True,
        features: Iterable[Feature] = (),
    ) -> None:
        check_model(model)
        everything = [model, *check_modules(modules)]
        if isinstance(loss_fn, nn.Module) and loss_fn not in everything:
            everything.append(loss_fn)  # it may hold parameters and buffers of its own
        sizes = {"microbatch_size": microbatch_size, "eval_microbatch_size": eval_microbatch_size}
        # Before anything is attached, so that a refused construction leaves the model as it was.
        _refuse_to_cut(everything, **sizes)
        innermost = check_optimizer(optimizer, everything)
        ranks = find_ranks(everything)  # before all that may fail on one rank alone
        setup = Setup(
            model=unwrapped(model),
            modules=everything,
            ranks=ranks,
            device=resolve_device(device, model),
            batch_layout=batch_layout,
            functions={"forward": forward, "loss_fn": loss_fn, "backward": backward},
            optimizer=innermost,
            precision=check_precision(precision, backward),
        )
        asked = check_features(features)
        if check_choice("batchnorm", batchnorm, BATCHNORM_MODES) == "exact":
            # A feature like any other, so that the step needs to know nothing of it.
            asked.append(exact_batchnorm(microbatch_size))
        for feature in asked:
            feature.attach(setup)
        # Only now that each feature has said what it wants of the step.
        setup.unit.check(setup)
        self._setup, self._model, self._modules = setup, model, everything
        self._ranks, self._device, self._index = ranks, setup.device, setup.index
        self._levels = levels = list(setup.levels(setup))

        # Two phases, as an evaluation keeps no activations and finds a far larger size.
        self._train = make_phase("train", microbatch_size, setup, levels)
        self._eval = make_phase("eval", eval_microbatch_size, setup)
        # Graphs replay the addresses and shapes of their recording.
        refuse_cuda_graphs(everything, sizes_change=self._train.adapts or self._eval.adapts)
        whole = self._train.policy
        if microbatch_size is not None:
            whole = leveled(Fixed(None), levels, setup)
        self._split_guard = SplitGuard(self._index, batchnorm, whole)

        # The caller's functions were written without a state that is carried along.
        hiding = setup.carrying.hiding
        convention = choose_convention(
            setup.model,
            forward=forward,
            loss_fn=loss_fn,
            carries=setup.carrying.is_on,
            count=loss_average,
        )
        averages_of = functools.partial(
            read_average,
            loss_fn=loss_fn,
            model=setup.model,
            targets=convention.targets,
            reads_model=convention.computes_loss_in_model,
            counts_items=convention.counts_items,
        )
        averages = eval_averages = averages_of(hiding(loss_average))
        if setup.eval_loss_average is not None:
            eval_averages = averages_of(hiding(setup.eval_loss_average))
        computation = Computation(
            modules=everything,
            convention=convention,
            averages=averages,
            eval_averages=eval_averages,
            layout=setup.carrying.layout,
            device=setup.device,
            roots=setup.roots,
            reach=setup.reach,
        )
        self._sort = None if setup.sorter is None else setup.sorter(setup, computation)
        update_metric = hiding(setup.functions.get("update_metric"))
        # Where all rows are compared, parts of a few rows have another gradient by nature.
        is_checked = check_probe(probe) and comparing_rows(everything) is None
        reservation = None
        if setup.optimizer is not None:
            from automicro.optimizer.reservation import OptimizerReservation

            reservation = OptimizerReservation(setup.optimizer)
        self._engine = engine = Engine(
            passes=Passes(
                computation,
                autocast_dtype=PRECISIONS[precision],
                run_backward=Tensor.backward if backward is None else backward,
                ranks=ranks,
                scales_for_ranks=setup.scales_for_ranks,
            ),
            index=setup.index,
            spare=setup.spare,
            split_guard=self._split_guard,
            computation=computation,
            checking={
                "declared": is_declared(loss_average),
                "off": not is_checked or ranks.rank != 0,
                "refuses": probe == "error",
                "is_alone": not ranks.communicates_in_forward,
            },
            update_metric=update_metric or convention.update_metric,
            updates_by_caller=update_metric is not None or hasattr(setup.model, "update_metric"),
            random_state=self._train.random_state,
            carry_layout=setup.carrying.carry_layout,
            gradients=GradientHistory(
                everything,
                sums_in_float32=setup.sums_in_float32,
                is_alone=ranks.is_alone,
                can_look=not ranks.communicates_in_forward,
            ),
            memory=OccupiedDevice(
                setup.device,
                everything,
                setup.optimizer,
                memory_limit,
                sums_in_float32=setup.sums_in_float32 and ranks.is_alone,
            ),
            reservation=reservation,
            features=list(filter(takes_part, asked)),
        )
        self._passes, self._memory = engine.passes, engine.memory
        self._evaluated: Sequence[Cut] = ()  # how the last batch was cut
        self.wants_to_stop = False

    def __repr__(self) -> str:
        return f"Microbatcher({type(unwrapped(self._model)).__name__}, {self._train!r})"

    @property
    def microbatch_size(self) -> int | None:
        """Size of the largest microbatch of the last training batch; None before the first.

        In rows, or in the `MicrobatchUnit`.
        """
        return self._train.size

    @property
    def eval_microbatch_size(self) -> int | None:
        """The same of the last evaluated batch."""
        return self._eval.size

    def describe_level(self, level: str) -> str:
        """Describe the level that a result names.

        Example:
            >>> from automicro.features import WhenTooLarge
            >>> microbatcher = Microbatcher(
            ...     nn.Linear(8, 2), loss_fn=nn.MSELoss(), features=[WhenTooLarge("offload")]
            ... )
            >>> microbatcher.describe_level("offload")
            'what is saved for the backward waits in host memory'
        """
        return next(each.describe() for each in self._levels if each.name == level)

    @property
    def loss_average_is(self) -> str:
        """How sure it is what the loss averages over; see `StepResult`."""
        return self._engine.checks.loss_average_is

    @property
    def ranks(self) -> Ranks:
        """The ranks that train together; one where the model is not wrapped for several."""
        return self._ranks

    @property
    def reach(self) -> Reach:
        """Modules and generators that the modules and functions of a step get at by themselves."""
        return self._setup.reach

    def unsaved_state(self, batch: Any) -> list[str]:
        """Names of attributes and variables that forwards change, and no checkpoint holds.

        A few forwards of two rows, which leave no trace. None with ``probe=False``, or on several
        ranks.

        Args:
            batch: to take rows of.
        """
        if not self._ranks.is_alone:
            return []
        with self._memory.limited():
            num_rows = self._setup.carrying.layout.num_rows(batch)
            return self._engine.checks.unsaved_state(batch, num_rows)

    def state_dict(self) -> dict[str, Any]:
        """The sizes that were found, as plain values."""
        state = {"train": self._train.state_dict(), "eval": self._eval.state_dict()}
        nested = self._setup.parts.state_dict()
        return state | ({"nested": nested} if nested else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with sizes that were found earlier.

        Raises:
            ValueError: a state of other policies than these.
        """
        # Before anything is loaded: the state of something else leaves all sizes as they were.
        check_state(state, {"train": None, "eval": None})
        self._setup.parts.load_state_dict(state.get("nested", {}))
        self._train.load_state_dict(state["train"])
        self._eval.load_state_dict(state["eval"])

    def backward(
        self, batch: Any, metrics: Any = None, *, return_outputs: Where = False, carry: Any = None
    ) -> StepResult:
        """Forward and backward of a whole batch: its exact gradient is added to ``.grad``.

        Args:
            batch: the full optimization batch, on the host or on the device. Of several ranks,
                each brings its own, of any number of rows; None where its data have run out.
            metrics: torchmetrics to update, each row once.
            return_outputs: whether to give the outputs of all rows, detached, in order: True where
                the batch lies, ``"host"``, or ``"device"``. They take memory there.
            carry: the state that the batch before left, ``result.carry``, of as many rows; None at
                the start. It needs a `Carry`.

        Raises:
            SampleTooLargeError: the smallest microbatch does not fit.
            BatchError: the batch cannot be cut, or ``carry`` has other rows.
            LossError: the forward gives no usable loss, or no state to carry.

        After any exception but a `RollbackError` the state is as it was before the call.

        Example:
            >>> from automicro.features import Carry
            >>> lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)
            >>> def forward(model, batch, carry):
            ...     outputs, carry = model(batch, carry)
            ...     return {"loss": outputs.square().mean(), "carry": carry}
            >>> microbatcher = Microbatcher(
            ...     lstm, forward=forward, loss_average="samples", features=[Carry(1)]
            ... )
            >>> carry = None
            >>> for batch in torch.randn(6, 10, 3).split(5, dim=1):
            ...     result = microbatcher.backward(batch, carry=carry)
            ...     carry = result.carry
            >>> [tuple(state.shape) for state in carry]
            [(2, 6, 4), (2, 6, 4)]
        """
        batches = self._setup.spare.given(self._setup.carrying.beside(batch, carry))
        return self.accumulate(batches, metrics, return_outputs=return_outputs)

    def accumulate(
        self,
        batches: Sequence[Any],
        metrics: Any = None,
        *,
        accept: Callable[[Tensor], bool] | None = None,
        return_outputs: Where = False,
    ) -> StepResult:
        """Forward and backward of several batches as if they were one.

        Their loss has one denominator, so the gradient is that of all their rows in one batch,
        however many of them (or of their tokens) each batch has. They are one transaction.

        Args:
            batches: what a data loader gave, one after the other; at least one. A rank of several
                whose data have run out gives none, as long as others have some.
            metrics: torchmetrics to update, each row once.
            accept: given the loss, says whether to keep the step. False leaves no trace of it: no
                gradient, no count in a metric or a BatchNorm; see `StepResult.is_committed`. The
                loss and its parts come to the host for it, in one read.
            return_outputs: as `backward`, of all batches together.

        Raises:
            ValueError: no batch, or state is carried between them. Else as `backward`.

        Example:
            >>> microbatcher = Microbatcher(nn.Linear(8, 2), loss_fn=nn.CrossEntropyLoss())
            >>> batches = [(torch.randn(n, 8), torch.randint(2, (n,))) for n in (4, 4, 3)]
            >>> microbatcher.accumulate(batches).num_samples
            11
        """
        try:
            with self._memory.limited(), self._split_guard.explaining_memory():
                # What fails in here fails before the ranks agree on anything: unless told, the
                # others would wait.
                with announcing_failure(self._ranks):
                    step = self._prepare(batches)
                where = return_outputs
                work = TrainingWork(self._engine, self._train, step, metrics, where, accept)
                finished = fit(step, work, self._train)
        finally:
            self._engine.gradients.are_released = False  # it was so for this batch
        if finished.result is None:
            # Of a batch of which no rank had rows.
            nan = torch.tensor(math.nan)
            return StepResult(loss=nan, rank_loss=nan, is_committed=False, **finished.counts)
        loss, losses = finished.result
        # Parts that were never called are named after some steps.
        self._setup.parts.notice_step()
        return StepResult(
            loss=loss,
            losses=losses,
            is_committed=finished.is_committed,
            loss_average_is=self._engine.checks.loss_average_is,
            outputs=work.outputs,
            carry=work.carry,
            rank_loss=loss if work.rank_loss is None else work.rank_loss,
            **finished.counts,
        )

    def evaluate(
        self,
        batch: Any,
        metrics: Any = None,
        return_outputs: Where = False,
        *,
        carry: Any = None,
        compares_outputs: bool = False,
    ) -> EvalResult:
        """Forward of a whole batch in evaluation mode, without gradients.

        Its size is found apart from training's. Training mode is put back afterwards.

        Args:
            batch: the full batch, on the host or on the device.
            metrics: torchmetrics to update, each row once.
            return_outputs: as `backward`.
            carry: as `backward`.
            compares_outputs: whether outputs of a few rows are looked at where the batch is split,
                as they are with ``return_outputs``, for a caller whose ``forward`` keeps them.

        Raises:
            SampleTooLargeError: the smallest microbatch does not fit.
            BatchError: the batch cannot be cut, or ``carry`` has other rows.

        After any exception but a `RollbackError` the state is as it was before the call.
        """
        batch = self._setup.carrying.beside(batch, carry)
        return self._without_gradients(
            batch, metrics, return_outputs, compares_outputs=compares_outputs
        )

    def predict(self, batch: Any, *, carry: Any = None) -> Any:
        """The model's outputs for all rows of a batch, in order; its targets may be missing.

        As `evaluate`, which it shares the size with. With ``loss_fn``, a list of one or two is
        read as inputs and targets, and anything else as inputs.

        Example:
            >>> microbatcher = Microbatcher(nn.Linear(8, 2), loss_fn=nn.CrossEntropyLoss())
            >>> microbatcher.predict(torch.randn(5, 8)).shape
            torch.Size([5, 2])
        """
        batch = self._setup.carrying.beside(batch, carry)
        return self._without_gradients(batch, None, True, predicts=True).outputs

    def remove_parts(self) -> None:
        """Let the parts that `Nested` named run in one piece again, for later users of the model.

        Example:
            >>> from automicro.features import Nested
            >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
            >>> microbatcher = Microbatcher(
            ...     model, loss_fn=nn.MSELoss(), features=[Nested({"1": "auto"})]
            ... )
            >>> "forward" in vars(model[1])
            True
            >>> microbatcher.remove_parts()
            >>> "forward" in vars(model[1])
            False
        """
        self._setup.parts.remove()

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Evaluation mode for several batches, with one change of modes around all of them.

        Example:
            >>> microbatcher = Microbatcher(nn.Linear(8, 2), loss_fn=nn.CrossEntropyLoss())
            >>> with microbatcher.evaluating():
            ...     outputs = [microbatcher.predict(torch.randn(5, 8)) for _ in range(3)]
        """
        return evaluation_mode(self._modules)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Batches inside go through, with the optimizer's first state reserved, and leave no trace.

        Each is rolled back at its end: gradients, buffers, random numbers, metrics. What stays is
        what was learned of sizes; afterwards nothing is tried any more that may fail, unless a
        costlier batch comes. Observers are told nothing, and no size is remembered for other runs.
        The result of such a batch is not committed, and has its peak whatever the size.

        Example:
            >>> model = nn.Linear(8, 2)
            >>> microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss())
            >>> longest = torch.randn(64, 8), torch.randint(2, (64,))
            >>> with microbatcher.rehearsing():
            ...     result = microbatcher.backward(longest)
            >>> result.is_committed, model.weight.grad is None
            (False, True)
        """
        with self._train.rehearsing(), self._eval.rehearsing(), self._setup.spare.unchanged():
            yield

    @property
    def why_not_reserved(self) -> str | None:
        """Why no memory is held for the optimizer's first step; None where it is, as far as known.

        Known from the first batch on.
        """
        reservation = self._engine.reservation
        return None if reservation is None else reservation.unknown

    def residents(self, *, training: bool) -> ResidentMemory:
        """The memory held at any size, with what the optimizer's first step will add.

        Known from the first batch on.
        """
        return self._memory.measure(training=training, upcoming_bytes=self._engine.upcoming_bytes)

    def hold_reservation(self) -> None:
        """Hold memory for the optimizer's first step now, as a batch does while it runs."""
        if self._engine.reservation is not None:
            self._engine.reservation.begin()

    def release_reservation(self) -> None:
        """Give back the memory that is held for the optimizer's first step.

        Its ``step`` does so by itself. Call this where the batch runs in a closure that ``step``
        was given, which has passed the place where it would.
        """
        if self._engine.reservation is not None:
            self._engine.reservation.roll_back()

    def release_gradients(self) -> None:
        """Let go of the gradients of earlier batches where the next batch's forward clears them.

        For hosts that call ``zero_grad`` between forward and backward: without this, a copy would
        outlive it, because a failed attempt brings back what it cleared. It holds for one batch, on
        one process; gradients that the forward does not clear are added to, as ever.

        Example:
            >>> model = nn.Linear(8, 2)
            >>> def forward(model, batch):
            ...     loss = model(batch).square().mean()
            ...     model.zero_grad()
            ...     return loss
            >>> microbatcher = Microbatcher(
            ...     model, forward=forward, loss_average="samples", microbatch_size=None
            ... )
            >>> for batch in torch.randn(3, 6, 8):
            ...     microbatcher.release_gradients()
            ...     _ = microbatcher.backward(batch)
        """
        self._engine.gradients.are_released = True

    def know_state(self, names: Iterable[str]) -> None:
        """Do not warn of attributes of the model that each microbatch changes.

        For hosts that make of such changes what the whole batch would have changed.

        Args:
            names: of these attributes.

        Example:
            >>> microbatcher = Microbatcher(nn.Linear(8, 2), loss_fn=nn.CrossEntropyLoss())
            >>> microbatcher.know_state(["history"])
        """
        self._split_guard.know(names)

    def joinable(
        self, parts: Sequence[Any], *, fill: float = 0
    ) -> tuple[list[Any], list[int] | None]:
        """Join what a host kept of each microbatch of the last evaluation, as ``evaluate`` does.

        Rows are sorted where sizes are not counted in rows, and slices have lengths of their own.

        Args:
            parts: of each microbatch, in the order of their forwards.
            fill: what stands where padding was cut.

        Returns:
            The parts with the padding of their batch, and for each row of the batch, its place
            among the rows of all parts; None where these are in order.

        Example:
            >>> from automicro.features import MicrobatchUnit
            >>> kept = []
            >>> def forward(model, batch):
            ...     kept.append(batch["input_ids"])
            ...     return model(batch["input_ids"].double()[..., None]).mean()
            >>> microbatcher = Microbatcher(
            ...     nn.Linear(1, 1).double(), forward=forward, loss_average="samples",
            ...     eval_microbatch_size=3, probe=False,
            ...     features=[MicrobatchUnit("tokens", cut_padding=True)],
            ... )
            >>> ids = torch.tensor([[7, 0, 0], [4, 5, 6], [9, 0, 0]])
            >>> batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
            >>> _ = microbatcher.evaluate(batch)
            >>> [part.tolist() for part in kept]
            [[[4, 5, 6]], [[7], [9]]]
            >>> parts, order = microbatcher.joinable(kept)
            >>> torch.equal(torch.cat(parts)[order], ids)
            True
        """
        return with_padding(parts, self._evaluated, fill=fill), order_of(self._evaluated)

    def _prepare(self, batches: Sequence[Any]) -> Step:
        """Read the batches of a training step, and look at a few rows where that is due."""
        batches = check_step(batches, may_be_none=not self._ranks.is_alone)
        self._setup.carrying.refuse_several(batches)
        self._ranks.settle()  # else the index finds whole parameters in the place of shards
        self._index.refresh()
        self._ranks.settle(self._index.parameters)
        step = self._read(batches, self._split_guard.allowed(self._train.policy))
        self._split_guard.allow_measuring(step.policy)
        self._check_few(step, "train")
        return step

    def _check_few(self, step: Step, mode: Mode) -> None:
        """Compare a few rows of the first batch with parts of them, where it could be split."""
        policy, by_cost, checks = step.policy, self._sort is not None, self._engine.checks
        could_split = self._split_guard.could_split(policy, step.rows, by_cost=by_cost)
        if not could_split or checks.is_over(mode):
            return
        batch, rows, multiple = step.raw[0], step.rows[0], int(getattr(policy, "multiple_of", 1))
        sizes = [] if by_cost or policy.adapts else balanced_sizes(rows, policy.propose(rows))
        # A collective in here would meet no other rank.
        with self._ranks.looking_alone():
            has_run = checks.few_rows(batch, rows, mode, multiple=multiple, sizes=sizes)
        if has_run:
            self._index.refresh()  # a forward may have made layers

    def _without_gradients(
        self,
        batch: Any,
        metrics: Any,
        return_outputs: Where,
        *,
        predicts: bool = False,
        compares_outputs: bool = False,
    ) -> EvalResult:
        # Not inference_mode(): no later backward may use a tensor that was made in it, and a model
        # may keep some.
        with self._memory.limited(), evaluation_mode(self._modules), torch.no_grad():
            with announcing_failure(self._ranks):
                self._ranks.settle()
                self._index.refresh()
                batches = self._setup.spare.given(batch)
                policy = self._split_guard.allowed(self._eval.policy, evaluates=True)
                step = self._read(batches, policy, "predict" if predicts else "eval")
                self._split_guard.allow_measuring(policy)
                if not predicts:
                    self._check_few(step, "eval")
            work = EvaluationWork(
                self._engine,
                self._eval,
                step,
                metrics,
                return_outputs,
                predicts=predicts,
                compares_outputs=compares_outputs,
            )
            finished = fit(step, work, self._eval)
        self._evaluated = finished.cuts
        if finished.result is None:
            return EvalResult(loss=None, **finished.counts)
        loss, losses, denominators = finished.result
        return EvalResult(
            loss=loss,
            losses=losses,
            denominators=denominators,
            outputs=work.outputs,
            carry=work.carry,
            **finished.counts,
        )

    def _read(self, batches: Sequence[Any], policy: Policy, mode: Mode = "train") -> Step:
        """Batches as a step, each read once. Lazy modules take their shapes from the first."""
        reading = functools.partial(self._read_once, batches)
        read = once_more(reading, self._device, doing="reading the structure of the batch")
        # A batch to predict may lack its targets, which the loss would be asked for.
        if mode != "predict":
            self._passes.check_form(read)
        denominators: Mapping[str, float] = {}
        if not self._ranks.is_alone:
            denominators = self._passes.denominators(read)
        # Parameters must be there before gradients are set aside for them.
        elif self._index.is_lazy:
            with self._train.initializing():
                self._passes.materialize(batches[0], is_training=mode == "train")
            self._index.refresh()
        if self._sort is not None:
            read = list(self._sort(read, mode))
            self._index.refresh()  # a look may have made layers
        return Step(
            batches=read, policy=policy, denominators=denominators, wants_to_stop=self.wants_to_stop
        )

    def _read_once(self, batches: Sequence[Any]) -> list[ReadBatch]:
        found = []
        try:
            for batch, num_rows in zip(batches, self._setup.spare.rows_of(batches), strict=True):
                each = Contents(batch)
                cost = cost_of_row(each, num_rows)
                found.append(ReadBatch(batch=batch, num_rows=num_rows, cost=cost, contents=each))
        except RecursionError as error:
            raise holds_itself() from error
        return found


def _refuse_to_cut(modules: Iterable[nn.Module], **sizes: Any) -> None:
    """Refuse sizes for a model that says of itself that it compares all rows of a batch."""
    given = {name: size for name, size in sizes.items() if size is not None}
    module = comparing_rows(modules) if given else None
    if module is not None:
        told = " and ".join(f"{name}={size!r}" for name, size in given.items())
        instead = " and ".join(f"{name}=None" for name in given)
        raise ValueError(
            f"{told}, and {type(module).__name__} compares all rows of a batch, which has to stay "
            f"whole: give {instead}; its encoders have sizes of their own, and run in slices"
        )
