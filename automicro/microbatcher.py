"""The primitive that turns a whole optimization batch into its exact gradient, in little memory.

``backward`` and ``evaluate`` share one shape: propose a size, cut the batch, attempt it inside a
transaction, commit or roll back, and try smaller slices after running out of memory.
"""

import contextlib
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import Tensor, nn

from automicro.batch.device import cost_of_row
from automicro.batch.layout import balanced_sizes, holds_itself
from automicro.batch.tensors import Contents
from automicro.loss.averages import LossAverage, is_declared, read_average
from automicro.loss.conventions import choose_convention
from automicro.loss.passes import Computation, Mode
from automicro.memory.device import OccupiedDevice
from automicro.memory.oom import once_more
from automicro.modules import comparing_rows, evaluation_mode, refuse_lazy
from automicro.options import (
    PRECISIONS,
    check_choice,
    check_model,
    check_modules,
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
from automicro.step.plan import Cut, ReadBatch, Step
from automicro.step.results import EvalResult, StepResult, Where
from automicro.step.setup import Setup
from automicro.step.split_guard import BATCHNORM_MODES, SplitGuard
from automicro.step.work import Engine, EvaluationWork, TrainingWork
from automicro.torch_private import compiler_is_loaded
from automicro.transaction.gradients import GradientHistory
from automicro.transaction.parameters import WrittenParameters

if TYPE_CHECKING:
    from automicro.memory.residents import ResidentMemory

P = ParamSpec("P")


def answering_unknown(construct: Callable[P, None]) -> Callable[P, None]:
    """Let an ``__init__`` answer an unknown argument with what to write instead."""
    known = inspect.signature(construct).parameters
    placed = [n for n, p in known.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    cls = construct.__qualname__.partition(".")[0]

    # `functools.wraps` keeps the constructor's own signature for help() and the config's schema.
    @functools.wraps(construct)
    def answering(*args: P.args, **kwargs: P.kwargs) -> None:
        if len(args) > len(placed) or not kwargs.keys() <= known.keys():
            from automicro.features import refuse_unknown

            refuse_unknown(cls, kwargs, known, placed)
        construct(*args, **kwargs)

    return answering


class Microbatcher:
    """Forward and backward of whole batches, exact, on a device that is too small for them.

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
        model: the model. If it is wrapped in ``DistributedDataParallel`` or by ``fully_shard``, all
            ranks train it together and must make the same calls in the same order.
        loss_fn: ``loss_fn(model(inputs), targets)`` on batches of ``(inputs, targets)``.
        forward: ``forward(model, microbatch)`` that returns the loss, ``(loss, outputs)`` or a
            mapping with ``"loss"``. If it has a parameter ``num_items_in_batch``, it receives the
            number of targets that count and divides its loss by it. Without ``loss_fn`` and
            ``forward``, the model has Composer's interface or is called as ``model(**batch).loss``.
        backward: replaces ``loss.backward()``, for loss scalers and other trainers.
        microbatch_size: rows: an int, ``"auto"``, ``"explore"`` (the fastest that fits), None (the
            whole batch), or a policy.
        eval_microbatch_size: the same for `evaluate`.
        loss_average: what the loss is a mean over: ``"samples"``, ``"tokens"``, ``"none"`` (a
            sum), a callable from a microbatch to the divisor of its loss, a mapping of these by
            the name of the loss, ``{"language": "tokens", "balance": "samples"}``, ``"auto"`` to
            infer it from the loss or the model, or ``"model"`` to infer it from a Hugging Face
            model whose loss ``forward`` returns.
        batchnorm: what to do when a batch is split although layers average over it: ``"warn"``,
            ``"error"``, ``"disable"`` (train on whole batches), ``"ignore"``; or ``"exact"``: use
            the statistics of the whole batch, at the price of a second forward, for models that
            ``torch.fx`` can trace (see ``docs/checks.md``).
        optimizer: memory for its state is reserved while sizes are found. Optimizers wrapped by
            accelerate or Lightning work, too. The caller calls the ``train()`` and ``eval()`` of
            schedule-free optimizers.
        modules: additional modules whose gradients and buffers a step changes.
        device: where the model computes; by default the device of its parameters.
        memory_limit: bytes or text such as ``"24MiB"``: a `MemoryBudget` on a CPU, the process's
            share of the device on CUDA, where ``"80%"`` or 0.8 work, too.
        precision: ``"fp32"``, or ``"bf16"`` or ``"fp16"`` for autocast of the forward and the
            loss. ``"fp16"`` needs a ``backward`` that scales the loss.
        batch_layout: which dimension holds the rows, and which parts are shared; see
            `split_batch`.
        probe: whether to check, on the first batches that could be split, that a few rows have the
            same gradient in one part and in two. ``"error"`` raises a `LossAverageError` instead
            of a warning if they show that the loss averages over something else.
        features: additions from `automicro.features` (nested parts, memory savers, sizes in
            tokens, remembered sizes, …), observers (`Observing`), or a `Feature` of your own.

    Attributes:
        wants_to_stop: set it on any rank to ask for the end of the run. The next batch is still
            trained, and its result reports the request on every rank.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names the remedy.
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
            everything.append(loss_fn)  # it might hold parameters and buffers
        sizes = {"microbatch_size": microbatch_size, "eval_microbatch_size": eval_microbatch_size}
        # Before anything is attached, so that a refused construction leaves the model as it was.
        _refuse_to_cut(everything, **sizes)
        refuse_lazy(everything)
        innermost = None
        if optimizer is not None:
            from automicro.accepted_optimizers import check_optimizer

            innermost = check_optimizer(optimizer, everything)
        ranks = find_ranks(everything)  # before anything that can fail on a single rank
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
            # It is an ordinary feature, so that the step needs no code for it.
            from automicro.features import exact_batchnorm

            asked.append(exact_batchnorm(microbatch_size))
        for feature in asked:
            feature.attach(setup)
        # Features may change the setup while they attach, so the unit is checked after them.
        setup.unit.check(setup)
        self._setup, self._model, self._modules = setup, model, everything
        self._ranks, self._device, self._index = ranks, setup.device, setup.index
        self._levels = levels = list(setup.levels(setup))
        # Parameters, as checks find them; weak, because the caller may replace them.
        written = weakref.WeakValueDictionary[int, Tensor]()
        setup.state.append(WrittenParameters(written))

        # Evaluation has its own phase: it keeps no activations, so far larger sizes fit.
        self._train = make_phase("train", microbatch_size, setup, levels)
        self._eval = make_phase("eval", eval_microbatch_size, setup)
        # CUDA graphs replay fixed addresses and shapes, so sizes must not change.
        if compiler_is_loaded():
            from automicro.compilation import refuse_cuda_graphs

            refuse_cuda_graphs(everything, sizes_change=self._train.adapts or self._eval.adapts)
        whole = self._train.policy
        if microbatch_size is not None:
            whole = leveled(Fixed(None), levels, setup)
        self._split_guard = SplitGuard(self._index, batchnorm, whole)

        # The caller's functions expect batches without the carried state.
        hiding = setup.carrying.hiding
        convention = choose_convention(
            setup.model,
            forward=forward,
            loss_fn=loss_fn,
            carries=setup.carrying.is_on,
            count=loss_average,
        )
        averages = read_average(
            hiding(loss_average),
            loss_fn=loss_fn,
            model=setup.model,
            targets=convention.targets,
            reads_model=convention.computes_loss_in_model,
            counts_items=convention.counts_items,
        )
        computation = Computation(
            modules=everything,
            convention=convention,
            averages=averages,
            layout=setup.carrying.layout,
            device=setup.device,
            roots=setup.roots,
            reach=setup.reach,
        )
        self._sort = None if setup.sorter is None else setup.sorter(setup, computation)
        update_metric = hiding(setup.functions.get("update_metric"))
        # If the model compares all rows, parts of a few rows have other gradients by design.
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
                "written": written if is_checked else None,
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

        In rows, or in the unit of `MicrobatchUnit`.
        """
        return self._train.size

    @property
    def eval_microbatch_size(self) -> int | None:
        """Size of the largest microbatch of the last evaluated batch; None before the first."""
        return self._eval.size

    def describe_level(self, level: str) -> str:
        """Describe a level that a result names.

        Example:
            >>> from automicro.features import WhenTooLarge
            >>> microbatcher = Microbatcher(
            ...     nn.Linear(8, 2), loss_fn=nn.MSELoss(), features=[WhenTooLarge("offload")]
            ... )
            >>> microbatcher.describe_level("offload")
            'tensors saved for the backward wait in host memory'
        """
        return next(each.describe() for each in self._levels if each.name == level)

    @property
    def loss_average_is(self) -> str:
        """How reliably the average of the loss is known; see `StepResult`."""
        return self._engine.checks.loss_average_is

    @property
    def ranks(self) -> Ranks:
        """The ranks that train together; a single one if the model has no wrapper for several."""
        return self._ranks

    @property
    def reach(self) -> Reach:
        """Modules and generators that the modules and functions of a step reach on their own."""
        return self._setup.reach

    def unsaved_state(self, batch: Any) -> list[str]:
        """Return names of attributes and variables that forwards change but no checkpoint holds.

        It runs a few forwards of two rows and rolls them back. The list is empty with
        ``probe=False`` and on several ranks.

        Args:
            batch: supplies the rows.
        """
        if not self._ranks.is_alone:
            return []
        with self._memory.limited():
            num_rows = self._setup.carrying.layout.num_rows(batch)
            return self._engine.checks.unsaved_state(batch, num_rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes found so far, as plain values."""
        state = {"train": self._train.state_dict(), "eval": self._eval.state_dict()}
        nested = self._setup.parts.state_dict()
        return state | ({"nested": nested} if nested else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from sizes that were found earlier.

        Raises:
            ValueError: the state belongs to other policies.
        """
        # Before anything is loaded: the state of something else leaves all sizes as they were.
        check_state(state, {"train": None, "eval": None})
        self._setup.parts.load_state_dict(state.get("nested", {}))
        self._train.load_state_dict(state["train"])
        self._eval.load_state_dict(state["eval"])

    def backward(
        self, batch: Any, metrics: Any = None, *, return_outputs: Where = False, carry: Any = None
    ) -> StepResult:
        """Run forward and backward of a whole batch and add its exact gradient to ``.grad``.

        Args:
            batch: the full optimization batch, on the host or on the device. Each of several ranks
                passes its own, of any number of rows, or None once its data have run out.
            metrics: torchmetrics to update with each row once.
            return_outputs: whether to return the outputs of all rows, detached, in order: True
                leaves them on the device of the batch, ``"host"`` and ``"device"`` put them there.
                They take memory there.
            carry: the state that the previous batch left, ``result.carry``, with the same number of
                rows; None at the start. It needs a `Carry`.

        Raises:
            SampleTooLargeError: the smallest microbatch does not fit.
            BatchError: the batch cannot be cut, or ``carry`` has another number of rows.
            LossError: the forward returns no usable loss, or no state to carry.

        After any exception except `RollbackError`, the state is as it was before the call.

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
        """Run forward and backward of several batches as if they were one.

        Their loss has one denominator, so the gradient equals that of all their rows in one batch,
        even if the batches differ in rows or tokens. They form one transaction.

        Args:
            batches: consecutive batches of a data loader, at least one. A rank whose data have run
                out passes an empty list while other ranks still have batches.
            metrics: torchmetrics to update with each row once.
            accept: receives the loss and returns whether to keep the step. After False, no gradient
                and no count in a metric or a BatchNorm remains; see `StepResult.is_committed`. The
                loss and its parts are copied to the host for it, in one transfer.
            return_outputs: as in `backward`, for all batches together.

        Raises:
            ValueError: there is no batch, or state is carried between them. Others as in
                `backward`.

        Example:
            >>> microbatcher = Microbatcher(nn.Linear(8, 2), loss_fn=nn.CrossEntropyLoss())
            >>> batches = [(torch.randn(n, 8), torch.randint(2, (n,))) for n in (4, 4, 3)]
            >>> microbatcher.accumulate(batches).num_samples
            11
        """
        try:
            with self._memory.limited():
                # A failure here comes before the ranks agree on anything: without an announcement
                # the other ranks would wait forever.
                with announcing_failure(self._ranks):
                    step = self._prepare(batches)
                where = return_outputs
                work = TrainingWork(self._engine, self._train, step, metrics, where, accept)
                finished = fit(step, work, self._train)
        finally:
            self._engine.gradients.are_released = False  # the release covers one batch only
        if finished.result is None:
            # No rank had any rows.
            nan = torch.tensor(math.nan)
            return StepResult(loss=nan, rank_loss=nan, is_committed=False, **finished.counts)
        loss, losses = finished.result
        # After a few steps, a warning names parts that were never called.
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
        """Run the forward of a whole batch in evaluation mode, without gradients.

        Its size is found separately from that of training. Training mode is restored afterwards.

        Args:
            batch: the full batch, on the host or on the device.
            metrics: torchmetrics to update with each row once.
            return_outputs: as in `backward`.
            carry: as in `backward`.
            compares_outputs: whether to check the outputs of a few rows when the batch is split, as
                ``return_outputs`` does, for a caller whose ``forward`` keeps them.

        Raises:
            SampleTooLargeError: the smallest microbatch does not fit.
            BatchError: the batch cannot be cut, or ``carry`` has another number of rows.

        After any exception except `RollbackError`, the state is as it was before the call.
        """
        batch = self._setup.carrying.beside(batch, carry)
        return self._without_gradients(
            batch, metrics, return_outputs, compares_outputs=compares_outputs
        )

    def predict(self, batch: Any, *, carry: Any = None) -> Any:
        """Return the model's outputs for all rows of a batch, in order; its targets may be missing.

        It shares the size of `evaluate`. With ``loss_fn``, a list of one or two elements is read as
        inputs and targets, and anything else as inputs.

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
        """Return a context of evaluation mode for several batches, which changes modes only once.

        Example:
            >>> microbatcher = Microbatcher(nn.Linear(8, 2), loss_fn=nn.CrossEntropyLoss())
            >>> with microbatcher.evaluating():
            ...     outputs = [microbatcher.predict(torch.randn(5, 8)) for _ in range(3)]
        """
        return evaluation_mode(self._modules)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Run the batches inside with the optimizer's first state reserved, and roll them back.

        Each batch is rolled back when it ends (gradients, buffers, random numbers, metrics); only
        the sizes learned are kept. Afterwards no size is tried that might not fit, unless a
        costlier batch comes. Observers are not notified, and no size is remembered for other runs.
        The result of each batch is not committed, and has a peak even if sizes are fixed.

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
        """Why no memory is reserved for the optimizer's first step; None if it is, or needs none.

        Available after the first batch.
        """
        reservation = self._engine.reservation
        return None if reservation is None else reservation.unknown

    def residents(self, *, training: bool) -> "ResidentMemory":
        """Return the memory held at any size, including what the optimizer's first step will add.

        Available after the first batch.
        """
        from automicro.memory.residents import measure

        upcoming_bytes = self._engine.upcoming_bytes
        return measure(self._memory, training=training, upcoming_bytes=upcoming_bytes)

    def hold_reservation(self) -> None:
        """Reserve memory for the optimizer's first step now, as each batch does while it runs."""
        if self._engine.reservation is not None:
            self._engine.reservation.begin()

    def release_reservation(self) -> None:
        """Free the memory reserved for the optimizer's first step.

        The optimizer's ``step`` does so on its own. Call this if the batch runs in a closure given
        to ``step``, which has then already passed the point at which it frees the memory.
        """
        if self._engine.reservation is not None:
            self._engine.reservation.roll_back()

    def release_gradients(self) -> None:
        """Release the gradients of earlier batches, if the next forward clears them.

        For hosts that call ``zero_grad`` between forward and backward: otherwise a copy would
        outlive the call, because a failed attempt restores the gradients that it cleared. It
        affects one batch, on one process. Gradients that the forward does not clear are added to,
        as usual.

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
        """Suppress the warning about attributes of the model that each microbatch changes.

        For hosts that correct these changes to what the whole batch would have caused.

        Args:
            names: of the attributes.

        Example:
            >>> microbatcher = Microbatcher(nn.Linear(8, 2), loss_fn=nn.CrossEntropyLoss())
            >>> microbatcher.know_state(["history"])
        """
        self._split_guard.know(names)

    def joinable(
        self, parts: Sequence[Any], *, fill: float = 0
    ) -> tuple[list[Any], list[int] | None]:
        """Prepare what a host kept of each microbatch of the last evaluation for joining.

        If sizes are not counted in rows, rows are sorted and each slice has its own length.

        Args:
            parts: one for each microbatch, in the order of their forwards.
            fill: the value that replaces removed padding.

        Returns:
            The parts padded to the length of their batch, and the place of each row of the batch
            among the rows of all parts; None if these are in order.

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
        from automicro.step.outputs import order_of, with_padding

        return with_padding(parts, self._evaluated, fill=fill), order_of(self._evaluated)

    def _prepare(self, batches: Sequence[Any]) -> Step:
        """Read the batches of a training step, and check a few rows if a check is due."""
        batches = check_step(batches, may_be_none=not self._ranks.is_alone)
        self._setup.carrying.refuse_several(batches)
        self._ranks.settle()  # otherwise the index finds whole parameters in place of shards
        self._index.refresh()
        self._ranks.settle(self._index.parameters)
        step = self._read(batches, self._split_guard.allowed(self._train.policy))
        self._split_guard.allow_measuring(step.policy)
        self._check_few(step, "train")
        return step

    def _check_few(self, step: Step, mode: Mode) -> None:
        """Compare a few rows of the first batch with parts of them, if it could be split."""
        policy, by_cost, checks = step.policy, self._sort is not None, self._engine.checks
        could_split = self._split_guard.could_split(policy, step.rows, by_cost=by_cost)
        if not could_split or checks.is_over(mode):
            return
        batch, rows, multiple = step.raw[0], step.rows[0], int(getattr(policy, "multiple_of", 1))
        sizes = [] if by_cost or policy.adapts else balanced_sizes(rows, policy.propose(rows))
        # No other rank runs this check, so a collective inside would never complete.
        with self._ranks.looking_alone():
            has_run = checks.few_rows(batch, rows, mode, multiple=multiple, sizes=sizes)
        if has_run:
            self._index.refresh()  # a forward might have created layers

    def _without_gradients(
        self,
        batch: Any,
        metrics: Any,
        return_outputs: Where,
        *,
        predicts: bool = False,
        compares_outputs: bool = False,
    ) -> EvalResult:
        # Not inference_mode(): the model might keep tensors, and no later backward could use
        # inference tensors.
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
        self._evaluated = finished.plan.cuts
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
        """Make a step of batches, each read once."""
        reading = functools.partial(self._read_once, batches)
        read = once_more(reading, self._device, doing="reading the structure of the batch")
        # A batch for `predict` might lack targets, so the form that the loss needs is not checked.
        if mode != "predict":
            self._passes.check_form(read)
        denominators: Mapping[str, float] = {}
        if not self._ranks.is_alone:
            denominators = self._passes.denominators(read)
        if self._sort is not None:
            read = list(self._sort(read, mode))
            self._index.refresh()  # sorting runs forwards, which might create layers
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
    """Refuse sizes for a model that declares that it compares all rows of a batch."""
    given = {name: size for name, size in sizes.items() if size is not None}
    module = comparing_rows(modules) if given else None
    if module is not None:
        told = " and ".join(f"{name}={size!r}" for name, size in given.items())
        instead = " and ".join(f"{name}=None" for name in given)
        raise ValueError(
            f"{told}, but {type(module).__name__} compares all rows of a batch, which has to stay "
            f"whole: give {instead}; its encoders run in slices of their own sizes"
        )
