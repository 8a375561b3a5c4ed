"""Run whole batches on any memory in Hugging Face's ``Trainer`` and TRL's trainers, with one line.

    trainer = Trainer(model, args, train_dataset=data)
    automicro.integrations.transformers.enable(trainer)
    trainer.train()

``Trainer.training_step`` runs for each microbatch and is intercepted before its backward, which a
`Microbatcher` runs instead. So a subclass keeps its loss, accelerate keeps its scaler, and the
training loop stays unchanged. Code that a subclass runs around this method runs once per batch.

Many models accept ``num_items_in_batch`` and ignore it. Therefore the loss of one row is computed
twice before training: with one item, and with a very large number of items. A divided sum then
vanishes, and a mean stays unchanged.
"""

import contextlib
import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import map_tensors
from automicro.errors import BatchError, LossError, PeerFailedError, describe_error
from automicro.integrations.host import (
    OURS,
    RETURNS,
    Recorded,
    Replacements,
    Results,
    StepMetrics,
    check_options,
    import_host,
    is_written_by,
    microbatcher_of,
    require_seam,
    weakly,
)
from automicro.loss.averages import IGNORED, CutBatch, Tokens, read_average
from automicro.loss.conventions import TARGET_KEYS
from automicro.loss.passes import extra_pass, is_extra_pass
from automicro.memory.oom import caught, is_out_of_memory
from automicro.microbatcher import Microbatcher
from automicro.modules import evaluation_mode
from automicro.state.part import State
from automicro.transaction.rng import RandomState, devices_of
from automicro.transaction.transaction import Transaction

import_host("transformers", extra="transformers")
from transformers import Trainer  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.trainer_callback import ExportableState, TrainerCallback  # noqa: E402
from transformers.trainer_pt_utils import nested_concat  # noqa: E402

from automicro.integrations.accelerate import check_kind  # noqa: E402

SUPPORTED = "transformers 5.0 or later"
_OWN = dict.fromkeys((*OURS, "modules"), "the trainer")
_LossOf = Callable[[nn.Module, Any, Any], Tensor]
_ITEMS = "num_items_in_batch"
_MANY = 10**18  # items; a sum divided by this number vanishes
_ASKED = 4  # rows tried at most, if the loss of the first ones is 0


def enable(trainer: Any, **options: Any) -> Any:
    """Let a trainer run its whole batches on any memory.

    Args:
        trainer: an instance of ``transformers.Trainer``, of TRL's ``SFTTrainer``, ``DPOTrainer``,
            ``RewardTrainer``, ``GRPOTrainer`` or ``RLOOTrainer``, or of a subclass of these. Call
            `enable` before ``train()``.
        options: options of `Microbatcher`: ``microbatch_size``, ``eval_microbatch_size``,
            ``loss_average`` (only if the loss is not divided by ``num_items_in_batch`` and its
            average cannot be read from the model), ``memory_limit``, ``batchnorm``,
            ``batch_layout``, ``gradient_sums``, ``remember_sizes``, ``repeatable``, ``probe``,
            ``features``.

    Returns:
        The same trainer. ``trainer.automicro`` holds the results and sizes: see `Enabled`.

    Raises:
        ValueError: if microbatches would give wrong results with this trainer; the message names
            the remedy.
        TypeError: if an option is unknown or set by the trainer itself, or if ``trainer`` is not a
            ``transformers.Trainer``.
        ImportError: if this version of transformers is not supported.
    """
    check_options("enable", options, _OWN)
    seam = {
        "training_step": ["model", "inputs", "num_items_in_batch"],
        "compute_loss": ["model", "inputs", "num_items_in_batch"],
        "prediction_step": ["model", "inputs", "prediction_loss_only", "ignore_keys"],
        "_get_num_items_in_batch": ["batch_samples"],
    }
    # Check the class, not the instance: a subclass may change these methods.
    for name, parameters in seam.items():
        require_seam(Trainer, name, parameters, host="transformers", supported=SUPPORTED)
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"enable takes a transformers.Trainer, not a {type(trainer).__name__}. For your own "
            "loop use automicro.Microbatcher"
        )
    splits = _splits(options, "train") or (_evaluates(trainer) and _splits(options, "eval"))
    _refuse(trainer, splits=splits)
    setattr(trainer, "automicro", Enabled(trainer, options))  # noqa: B010 - its class has none
    return trainer


_FLAVOURS = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")
_WITH_PAIRS = {"DPOTrainer", "RewardTrainer"}
_COMPARE_PAIRS = ("aot", "aot_unpaired", "aot_pair", "bco_pair", "sft")
_OF_OTHER_ROWS = ("MultipleNegatives", "GISTEmbed", "MegaBatch", "BatchHard", "BatchAllTriplet")
_KEEPS_WHOLE = "or keep batches whole with microbatch_size=None, eval_microbatch_size=None"
_SIZE_OF = {"train": "microbatch_size", "eval": "eval_microbatch_size"}


def _refuse(trainer: Any, *, splits: bool = True) -> None:
    """Raise ValueError, with the remedy, if microbatches would be wrong with this trainer."""
    args = trainer.args
    name = type(trainer).__name__
    of_trl = [each for each in type(trainer).__mro__ if each.__module__.startswith("trl.")]
    known = any(each.__name__ in _FLAVOURS for each in of_trl)
    losses = getattr(trainer, "loss_types", None) or [getattr(args, "loss_type", "")]
    across = sorted({str(each) for each in losses} & set(_COMPARE_PAIRS))
    why = ""
    if getattr(trainer, "automicro", None) is not None:
        why = "automicro is enabled for this trainer already. Call enable once"
    elif args.auto_find_batch_size:
        why = (
            "auto_find_batch_size=True restarts the training with a smaller batch when memory "
            "runs out, but automicro keeps the batch. Leave it out"
        )
    elif args.n_gpu > 1:
        why = (
            f"{args.n_gpu} devices in one process (DataParallel) each get their own rows. Start a "
            "process for each device: torchrun --nproc-per-node …"
        )
    elif str(args.optim).rpartition(".")[2].lower() in ("lomo", "adalomo") or "layerwise" in str(
        args.optim
    ):
        why = f"optim={args.optim} steps inside the backward, which cannot be undone. Use another"
    elif of_trl and not known:
        why = (
            f"TRL's {of_trl[0].__name__} builds batches inside the step, compares rows, or logs "
            "values of the whole batch. Use its gradient_accumulation_steps with a smaller "
            f"per_device_train_batch_size, or one of {', '.join(_FLAVOURS)}"
        )
    elif splits and of_trl and across and "DPOTrainer" in (each.__name__ for each in of_trl):
        why = (
            f"loss_type={', '.join(across)} compares the pairs of a batch with each other, or "
            f"counts tokens among them, so it cannot be split. Use another, {_KEEPS_WHOLE}"
        )
    elif splits and (comparing := _compares_rows(trainer)):
        why = (
            f"{comparing} compares each row with the others of its batch, so it cannot be split. "
            f"Train it in a loop with automicro.Contrastive, {_KEEPS_WHOLE}"
        )
    if why:
        raise ValueError(f"automicro cannot be enabled for this {name}: {why}")
    check_kind(trainer.accelerator, args.gradient_accumulation_steps)


def _compares_rows(trainer: Any) -> str:
    """The name of a sentence-transformers loss, even if nested, with other rows as negatives."""
    # A trainer may have a separate loss for each dataset.
    losses = getattr(trainer, "loss", None)
    for loss in losses.values() if isinstance(losses, dict) else [losses]:
        for each in loss.modules() if isinstance(loss, nn.Module) else ():
            if any(word in type(each).__name__ for word in _OF_OTHER_ROWS):
                return type(each).__name__
    return ""


def _splits(options: Mapping[str, Any], phase: str) -> bool:
    return options.get(_SIZE_OF[phase], "auto") is not None


def _evaluates(trainer: Any) -> bool:
    """Whether the trainer evaluates during training."""
    return trainer.eval_dataset is not None and trainer.args.eval_strategy != "no"


class Enabled(Results):
    """The replaced steps of one trainer, which `enable` stores in ``trainer.automicro``."""

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        # The trainer holds this object. A strong reference back would be a cycle, which keeps the
        # model's memory.
        self._options = options
        self._trainer: Any = weakref.proxy(trainer)
        self._replacements = Replacements()
        put = self._replacements.put
        own = put(self._trainer, "training_step", self.training_step)
        self._own_training_step = weakly(own)
        self._own_prediction_step = weakly(
            put(self._trainer, "prediction_step", self.prediction_step)
        )
        trainer.add_callback(Sizes(self))
        itself: Callable[[], Any] = weakref.ref(trainer)
        self._itself = itself
        self._base_step: Callable[..., Tensor] = Trainer.training_step
        self._is_plain = getattr(own, "__func__", own) is Trainer.training_step
        self._recorded = Recorded(
            functools.partial(_roots, itself),
            _is_of_a_user,
            _HOSTS,
            skip=lambda: [itself().state.log_history],  # grows with training; logs are deferred
            concat=_padded,
            fold_of=_fold_of,
        )
        self._metrics = StepMetrics(
            lambda: itself().model,
            self._recorded,
            lambda: RandomState(devices_of([itself().model], itself().args.device)),
        )
        self._layout = BatchLayout(self._options.get("batch_layout", 0))
        self._made: dict[str, _Made] = {}  # by phase: "train" and "eval"
        self._known: dict[str, Any] = {}  # sizes of discarded Microbatchers
        # State of the current batch.
        self._num_rows = 0
        self._num_items: Any = None
        self._arguments: tuple[Any, ...] = ()
        self._own_backward: Callable[..., Any] = _no_backward
        self._caught: list[Tensor] = []

    def disable(self) -> None:
        """Restore the trainer's own steps."""
        self._replacements.close()
        self._trainer.remove_callback(Sizes)
        self._trainer.automicro = None

    def sizes(self) -> dict[str, Any]:
        """The microbatch sizes found, as plain values, which checkpoints of the trainer include."""
        return self._known | {
            name: each.microbatcher.state_dict() for name, each in self._made.items()
        }

    def begin_run(self) -> None:
        """Discard all Microbatchers, because one of another model would keep device memory."""
        self._known, self._made = self.sizes(), {}

    # Training

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run the trainer's own forward and backward of a batch in microbatches."""
        if self._is_plain:
            return self._train(model, inputs, num_items_in_batch)
        with self._beneath():
            loss: Tensor = self._own_training_step(model, inputs, num_items_in_batch)
            return loss

    @contextlib.contextmanager
    def _beneath(self) -> Iterator[None]:
        """Replace ``Trainer.training_step`` under a subclass's step, which must call it."""
        trainer, ran = self._trainer, []

        def training_step(other: Any, *args: Any, **kwargs: Any) -> Tensor:
            if other is not self._itself():
                return self._base_step(other, *args, **kwargs)
            ran.append(True)
            return self._train(*args, **kwargs)

        def only_inside(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if ran:
                return own(*args, **kwargs)
            raise LossError(
                f"{trainer.__class__.__name__}.training_step computes its loss itself, so "
                "automicro cannot run it for each microbatch. Let it call "
                "super().training_step(model, inputs, num_items_in_batch), and override "
                "compute_loss"
            )

        with Replacements() as replacements:
            # Replace it on the class, where ``super().training_step`` of a subclass finds it.
            replacements.put(Trainer, "training_step", training_step)
            for owner, name in ((trainer, "compute_loss"), (trainer.accelerator, "backward")):
                own = weakly(getattr(owner, name))
                replacements.put(owner, name, functools.partial(only_inside, own))
            yield

    def _train(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        trainer = self._trainer
        # Before any state is captured, because schedule-free optimizers keep other weights for
        # evaluation and change the parameters here.
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        with self._prepared(inputs) as prepared:
            batch = self._read(prepared)
            # Each microbatch is divided by the number of items of the whole batch.
            self._num_items = num_items_in_batch
            with self._held_up(model):
                microbatcher = self._ready("train", model, trainer.optimizer, batch)
                self.last = microbatcher.backward(batch)
        self._recorded.tell(self.last.rank_loss)
        return self.last.rank_loss

    @contextlib.contextmanager
    def _prepared(self, inputs: Any) -> Iterator[Any]:
        """Prepare a batch once, with a subclass's method, which may draw random numbers."""
        trainer = self._trainer
        if trainer.__class__._prepare_inputs is Trainer._prepare_inputs:
            yield inputs
            return
        with Replacements() as replacements:
            prepare = functools.partial(Trainer._prepare_inputs, trainer)
            own = replacements.put(trainer, "_prepare_inputs", prepare)
            yield own(inputs)

    @contextlib.contextmanager
    def _held_up(self, model: nn.Module) -> Iterator[None]:
        """Intercept the backward and the logs of the trainer's steps."""
        trainer, own_train = self._trainer, weakly(model.train)

        def train(mode: bool = True) -> nn.Module:
            # A check runs in evaluation mode.
            if not is_extra_pass():
                own_train(mode)
            return model

        with Replacements() as replacements:
            try:
                self._own_backward = replacements.put(trainer.accelerator, "backward", self._catch)
                self._log = weakly(replacements.put(trainer, "log", self._note_log))
                replacements.put(model, "train", train)
                yield
            finally:
                self._own_backward = _no_backward

    def _catch(self, loss: Tensor) -> None:
        """Replace ``accelerator.backward``; only engines that are refused pass options to it."""
        # Collect all losses: a step with two backward calls is refused, not run in part.
        self._caught.append(loss)

    def _ready(self, name: str, model: nn.Module, optimizer: Any, batch: Any) -> Microbatcher:
        """The Microbatcher of a phase, for the current model and optimizer."""
        # A batch with an item count and one without need different averages.
        made = self._made.get(name)
        if made is None or made.key != (model, optimizer, self._num_items is not None):
            made = self._made[name] = self._make(name, model, batch)
        return made.microbatcher

    def _make(self, name: str, model: nn.Module, batch: Any) -> "_Made":
        """Create the Microbatcher of a phase at its first batch."""
        trainer, trains = self._trainer, name == "train"
        splits, has_items = _splits(self._options, name), self._num_items is not None
        flat = _as_batch(batch)
        # A batch of a policy trainer contains the number of items that its loss is divided by.
        counts = has_items or (isinstance(flat, MutableMapping) and _ITEMS in flat)
        loss_of = self._training_loss if trains else self._predicted_loss
        # A batch that is never split needs no check.
        divides = self._divides(model, batch, loss_of) if counts and splits else False
        declared = self._options.get("loss_average")
        own: dict[str, Any] = {"forward": weakly(self._forward if trains else self._predict)}
        if trains:
            own |= {"backward": weakly(self._backward), "optimizer": trainer.optimizer}
            # Read after a forward, which leaves the root module of FSDP2 with whole parameters.
            own["modules"] = self._further_modules(model)
            scaler = getattr(trainer.accelerator, "scaler", None)
            if scaler is not None and scaler.is_enabled():
                # The scale is created on first use, and an attempt that is rolled back would undo
                # that.
                scaler.scale(torch.zeros((), device=trainer.args.device))
        mean = "none" if divides else self._mean(model) if splits else declared or "auto"
        microbatcher = microbatcher_of(
            model,
            self._options,
            **own,
            recorded=self._recorded,
            state=[self._metrics],
            loss_average=mean,
        )
        self._recall(name, microbatcher)
        return _Made(
            (model, own.get("optimizer"), None if divides is None else has_items), microbatcher
        )

    def _further_modules(self, model: nn.Module) -> list[nn.Module]:
        """Modules with parameters of the optimizer that the model does not have."""
        own = {id(each) for each in model.parameters()}
        groups = getattr(self._trainer.optimizer, "param_groups", [])
        # sentence-transformers also passes the parameters of its loss to the optimizer.
        others = [each for group in groups for each in group["params"] if id(each) not in own]
        return [nn.ParameterList(others)] if others else []

    def _forward(self, model: nn.Module, microbatch: Any) -> Any:
        """Run the trainer's own step up to its backward."""
        flat = _as_batch(microbatch)
        with self._listening(flat, microbatch):
            loss = self._training_loss(model, flat, self._num_items)
            return self._recorded.came_to(loss) or loss

    def _listening(self, flat: Any, microbatch: Any) -> contextlib.AbstractContextManager[None]:
        rows = self._layout.num_rows(microbatch)
        return self._metrics.step(rows, self._num_rows, _tokens_of(self._trainer, flat))

    def _note_log(self, logs: Mapping[str, Any], *rest: Any, **named: Any) -> None:
        """Replace ``trainer.log``: defer the call until the batch is committed."""
        self._recorded.note_log("log", functools.partial(self._log, **named), logs, *rest)

    def _training_loss(self, model: nn.Module, flat: Any, num_items: Any) -> Tensor:
        trainer = self._trainer
        try:
            self._base_step(self._itself(), model, flat, num_items)
            if len(self._caught) != 1:
                raise LossError(
                    f"{trainer.__class__.__name__}.training_step called accelerator.backward "
                    f"{len(self._caught)} times, but a batch has one backward. Add up the losses "
                    "and call it once"
                )
            return self._caught[0]
        finally:
            self._caught.clear()

    def _backward(self, loss: Tensor) -> None:
        self._own_backward(loss)

    # Evaluation

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Run the trainer's own prediction step in microbatches: loss, logits and labels."""
        trainer = self._trainer
        with self._prepared(inputs) as prepared:
            batch = self._read(prepared)
            # Count once for the whole batch and all ranks: each microbatch is divided by this.
            self._num_items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
            self._arguments = (prediction_loss_only, ignore_keys)
            microbatcher = self._ready("eval", model, None, batch)
            result = self.last_evaluation = microbatcher.evaluate(
                batch, compares_outputs=not prediction_loss_only
            )
        collected = self._recorded.values(RETURNS)
        logits = labels = None
        if collected and not prediction_loss_only:
            parts, order = microbatcher.joinable(collected, fill=IGNORED)
            logits, labels = self._recorded.join(RETURNS, parts).values()
            if order is not None:
                logits, labels = (_in_order(each, order) for each in (logits, labels))
        self._recorded.tell(result.loss)
        return result.loss, logits, labels

    def _predict(self, model: nn.Module, microbatch: Any) -> Any:
        flat = _as_batch(microbatch)
        with self._listening(flat, microbatch):
            loss, logits, labels = self._prediction(model, flat, self._num_items)
            outputs = {"logits": logits, "label_ids": labels}
            return self._recorded.came_to(loss, outputs, is_kept=True) or (loss, None)

    def _prediction(self, model: nn.Module, flat: Any, num_items: Any) -> Any:
        with Replacements() as replacements:
            self._log = weakly(replacements.put(self._trainer, "log", self._note_log))
            replacements.put(
                self._trainer, "_get_num_items_in_batch", lambda *args, **kwargs: num_items
            )
            return self._own_prediction_step(model, flat, *self._arguments)

    def _predicted_loss(self, model: nn.Module, flat: Any, num_items: Any) -> Tensor:
        loss: Tensor | None = self._prediction(model, flat, num_items)[0]
        return torch.zeros(()) if loss is None else loss

    # The average of a loss

    def _divides(self, model: nn.Module, batch: Any, loss_of: _LossOf) -> bool | None:
        """Whether the loss is divided by the number of items; None if all losses tried are 0."""
        rows = self._rows_that_count(batch)
        for index in range(_ASKED):  # the same number of collectives on all ranks
            answers = self._ask_all_ranks(model, rows[index % len(rows)], loss_of)
            # Take the largest loss of all ranks, so that all ranks decide alike.
            real, rest = max(answers, key=lambda found: abs(found[0]))
            # A row whose targets are all ignored has a loss of 0 in both cases.
            if real == rest == 0:
                continue
            # A sum divided by 10^18 is indistinguishable from 0 in float32.
            if abs(rest) <= 1e-6 * abs(real):
                return True
            if abs(rest - real) <= 1e-3 * abs(real):
                return False
            name = type(self._inner(model)).__name__
            raise ValueError(
                f"the loss of {name} is divided by num_items_in_batch only in part: one row has a "
                f"loss of {real:.6g}, and {rest:.3g} of it does not depend on the number of items "
                "(is an auxiliary loss added?). Its parts average over different things, so leave "
                f"the auxiliary loss out, {_KEEPS_WHOLE}"
            )
        return None

    def _ask_all_ranks(self, model: nn.Module, row: Any, loss_of: _LossOf) -> list[list[float]]:
        """The results of `_ask` for one row on each rank."""
        found, failure = caught(functools.partial(self._ask, model, row, loss_of))
        if failure is not None and is_out_of_memory(failure):
            found, failure = [0.0, 0.0], None  # the step itself will report this
        every: list[Any] = [(found, failure is None)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            # A rank that failed takes part too, because the other ranks would wait forever.
            every *= dist.get_world_size()
            dist.all_gather_object(every, every[0])
        try:
            if failure is not None:
                raise LossError(
                    f"the loss of one row cannot be computed alone ({describe_error(failure)}), "
                    "so the batch cannot be split. Give each row everything that its loss needs, "
                    f"{_KEEPS_WHOLE}"
                ) from failure
        finally:
            failure = None  # break the reference cycle with the traceback
        if not all(is_well for _, is_well in every):
            raise PeerFailedError("another rank could not compute its rows: see its error")
        return [each for each, _ in every]

    def _ask(self, model: nn.Module, row: Any, loss_of: _LossOf) -> list[float]:
        """The loss of a row divided by one item, and by a very large number of items."""
        device = self._trainer.args.device
        # A gradient penalty needs a graph, but with a graph a wrapper for ranks waits for backward.
        is_alone = self._trainer.args.world_size == 1
        found = []
        for items in (1, _MANY):
            # Use a copy and the same random numbers each time: a loss may change its inputs.
            with (
                torch.set_grad_enabled(is_alone),
                _undone(self._itself, model),
                evaluation_mode([model]),
                extra_pass(),
            ):
                copied = _as_batch(map_tensors(row, Tensor.clone))
                many = torch.tensor(items, device=device)
                if isinstance(copied, MutableMapping) and _ITEMS in copied:
                    copied[_ITEMS] = many.to(copied[_ITEMS].dtype)
                found.append(float(loss_of(model, copied, many).detach()))
        return found

    def _rows_that_count(self, batch: Any) -> list[Any]:
        """Rows with a target that is not ignored, or the first row if there is none."""

        def counts(row: Any) -> bool:
            targets = _targets_in(_as_batch(row))
            return targets is None or bool((targets[..., 1:] != IGNORED).any())

        rows = self._layout.split(batch, [1] * self._layout.num_rows(batch))
        return list(itertools.islice(filter(counts, rows), _ASKED)) or rows[:1]

    def _mean(self, model: nn.Module) -> Any:
        """The ``loss_average`` of a loss that is a mean; ``"auto"`` if it is unknown."""
        declared = self._options.get("loss_average")
        if declared not in (None, "tokens"):
            return declared
        trainer, inner = self._trainer, self._inner(model)
        is_own = trainer.compute_loss_func is not None or _is_own(trainer, "compute_loss")
        # The model does not show the average of a custom loss, so a few rows are checked.
        if declared is None and is_own:
            return "auto"
        if trainer.label_smoother is not None:
            names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            average: Any = Tokens(_targets_in, shift=int(type(inner).__name__ in names))
        else:  # tokens of causal models are shifted, even if a subclass computes the loss
            targets = functools.partial(_targets_behind, _virtual_tokens(trainer))
            average = read_average(
                declared or "auto", loss_fn=None, model=inner, targets=targets, reads_model=True
            )[""]
        if not isinstance(average, Tokens):
            return "auto"
        return functools.partial(_count, average, self._layout)

    def _read(self, inputs: Any) -> Any:
        batch = _as_rows(self._trainer, inputs)
        with contextlib.suppress(BatchError):  # the step itself will report this
            # The whole batch resolves ambiguities of the layout that one microbatch might not.
            self._num_rows = self._layout.num_rows(batch)
        return batch

    def _inner(self, model: nn.Module) -> nn.Module:
        inner = self._trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        base = getattr(inner, "get_base_model", None)  # a model of peft
        found: nn.Module = base() if callable(base) else inner
        return found

    def _recall(self, name: str, microbatcher: Microbatcher) -> None:
        """Restore earlier sizes, or those of the checkpoint that the trainer resumed from."""
        state, sizes = self._trainer.state, self.sizes()
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, Sizes):
                callback.enabled = self  # a restored callback has no reference to this object
        # Before the first step, the state cannot contain sizes of a checkpoint.
        if name not in sizes and state.global_step:
            kept = state.stateful_callbacks.get(Sizes.__name__) or {}
            sizes = kept.get("attributes", {}).get("found", {})
        if name in sizes:
            with contextlib.suppress(ValueError):  # the sizes were found with other options
                microbatcher.load_state_dict(sizes[name])


class _Made(NamedTuple):
    """A Microbatcher with the key that it was created for."""

    # Model, optimizer, and whether items are counted; None (uncertain) matches no later batch.
    key: tuple[nn.Module, Any, bool | None]
    microbatcher: Microbatcher


class Sizes(TrainerCallback, ExportableState):
    """Save sizes in ``trainer_state.json``, so that a resumed run splits batches as before."""

    def __init__(self, enabled: Enabled | None = None) -> None:
        self.enabled = enabled
        self.found: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        found = self.found if self.enabled is None else self.enabled.sizes()
        return {"args": {}, "attributes": {"found": found}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A checkpoint from a run without automicro has no entry for this callback.
        state.stateful_callbacks.setdefault(type(self).__name__, {})
        if self.enabled is not None:
            self.enabled.begin_run()


# State of trainers


# Steps do not change these attributes, and some refer to everything. A Microbatcher captures the
# models itself.
_NOT_OF_A_STEP = (
    "train_dataset", "eval_dataset", "automicro", "data_collator", "processing_class",
    "compute_metrics", "model_init", "callback_handler", "model", "model_wrapped", "ref_model",
)  # fmt: skip
_HOSTS = ("transformers", "trl")
# A completion without a counted token gives NaN, which TRL excludes from minimum and maximum.
_FOLDS = {
    "_total_train_tokens": "sum",
    "clip_ratio/low_min": "nanmin",
    "clip_ratio/high_max": "nanmax",
}


def _fold_of(place: str) -> str | None:
    return next((fold for end, fold in _FOLDS.items() if place.endswith(end)), None)


def _roots(trainer: Callable[[], Any]) -> dict[str, Any]:
    return {type(trainer()).__name__: trainer()}


def _is_of_a_user(trainer: Any, name: str, value: Any) -> bool:
    return name not in _NOT_OF_A_STEP


@contextlib.contextmanager
def _undone(trainer: Callable[[], Any], model: nn.Module) -> Iterator[None]:
    """Roll back all effects of the block on the model, the trainer and random numbers."""
    skipped = [*map(vars(trainer()).get, _NOT_OF_A_STEP), trainer().state.log_history]
    beside = State(lambda: _roots(trainer), skip=lambda: skipped, is_held=False)
    devices = devices_of([model], trainer().args.device)
    state = Transaction([beside, State(lambda: {"model": model}), RandomState(devices)])
    state.begin()
    try:
        yield
    finally:
        state.roll_back()


def _no_backward(loss: Tensor, **options: Any) -> None:
    raise LossError("a backward was called outside the step of a batch. Call it inside one")


def _tokens_of(trainer: Any, flat: Any) -> dict[str, float]:
    """The numbers of tokens that TRL's means over tokens are computed over, by metric."""
    # Only TRL needs them, and counting synchronizes with the device.
    if not (hasattr(trainer, "_metrics") and isinstance(flat, Mapping)):
        return {}
    if "advantages" in flat:
        return dict.fromkeys(_means_over_tokens(trainer), float(_completion_mask(flat).sum()))
    # A DPO batch contains the chosen rows first, then the rejected ones.
    if "completion_mask" in flat:
        chosen, rejected = (float(e.sum()) for e in flat["completion_mask"][..., 1:].chunk(2))
        return {
            "entropy": chosen + rejected,
            "mean_token_accuracy": chosen,
            "logits/chosen": chosen,
            "logits/rejected": rejected,
        }
    targets = _targets_behind(_virtual_tokens(trainer), flat)
    if targets is None:
        return {}
    counted = float((targets[..., 1:] != IGNORED).sum())
    return dict.fromkeys(("entropy", "mean_token_accuracy"), counted)


def _completion_mask(flat: Mapping[str, Any]) -> Tensor:
    """The mask of tokens that count in the loss of a policy."""
    mask: Tensor = flat["completion_mask"]
    return mask * flat["tool_mask"] if "tool_mask" in flat else mask


def _means_over_tokens(trainer: Any) -> list[str]:
    """Metrics of a policy that are means over tokens; ratios of sequences are means over rows."""
    of_sequences = getattr(trainer, "importance_sampling_level", "sequence") == "sequence"
    ratios = ["low_mean", "high_mean", "region_mean"]
    of_tokens = [f"clip_ratio/{each}" for each in ratios] + ["cispo_clip_ratio"]
    return ["entropy", "kl", *([] if of_sequences else of_tokens)]


def _padded(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join outputs of microbatches like the trainer's own loop joins those of batches."""
    if dim:
        return torch.cat(list(parts), dim)
    joined: Tensor = functools.reduce(
        functools.partial(nested_concat, padding_index=IGNORED), parts
    )
    return joined


def _is_own(trainer: Any, name: str) -> bool:
    """Whether a method was defined outside of transformers and TRL."""
    return not is_written_by(_HOSTS, getattr(trainer.__class__, name))


def _count(average: Tokens, layout: BatchLayout, microbatch: Any) -> Any:
    flat = _as_batch(microbatch)
    targets = _targets_in(flat)
    if targets is None:  # a batch for prediction only
        return layout.num_rows(microbatch)
    return average.divisors([CutBatch.whole(flat, len(targets))]).whole


def _targets_in(batch: Any) -> Tensor | None:
    """The targets of a batch; None if it has none."""
    flat = _as_batch(batch)
    if not isinstance(flat, Mapping):
        return None
    return next((flat[key] for key in TARGET_KEYS if flat.get(key) is not None), None)


def _virtual_tokens(trainer: Any) -> int:
    """The number of virtual tokens that peft prepends to each row; none of them is a target."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    config = getattr(model, "active_peft_config", None)
    if config is None or not config.is_prompt_learning or "PREFIX" in str(config.peft_type):
        return 0
    return int(config.num_virtual_tokens)


def _targets_behind(virtual: int, batch: Any) -> Tensor | None:
    """The targets of a batch, padded for the virtual tokens that peft prepends."""
    targets = _targets_in(batch)
    if targets is None or not virtual:
        return targets
    return nn.functional.pad(targets, (virtual, 0), value=IGNORED)


def _in_order(joined: Any, order: Sequence[int]) -> Any:
    """Restore the batch's row order in outputs of sorted rows."""
    return map_tensors(joined, lambda each: each[order] if each.dim() else each)


# Batches whose rows are not the rows of their tensors


class Pairs(dict[str, Any]):
    """A batch of all preferred rows followed by all rejected rows; one row is a pair.

    >>> pairs = Pairs.read({"input_ids": torch.arange(6), "margin": torch.arange(3)})
    >>> pairs["pairs"]["input_ids"].tolist(), pairs.flat()["input_ids"].tolist()
    ([[0, 3], [1, 4], [2, 5]], [0, 1, 2, 3, 4, 5])
    """

    @classmethod
    def read(cls, batch: Mapping[str, Any]) -> "Pairs":
        """Put each row next to its partner, without which it has no loss."""
        both = {
            name: torch.stack(value.chunk(2), 1)
            for name, value in batch.items()
            if isinstance(value, Tensor) and value.shape[:1] == batch["input_ids"].shape[:1]
        }
        return cls(pairs=both, rest={k: each for k, each in batch.items() if k not in both})

    def flat(self) -> dict[str, Any]:
        pairs = {name: torch.cat(each.unbind(1)) for name, each in self["pairs"].items()}
        return {**self["rest"], **pairs}


_ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")


class Sequences(dict[str, Any]):
    """A batch that packs sequences into one row of tensors without padding; a sequence is a row.

    >>> places = torch.tensor([[0, 1, 0, 1, 2]])
    >>> batch = Sequences.read({"input_ids": torch.arange(5)[None], "position_ids": places})
    >>> [each["input_ids"].tolist() for each in batch["sequences"]]
    [[[0, 1]], [[2, 3, 4]]]
    """

    @classmethod
    def read(cls, batch: Mapping[str, Any]) -> "Sequences | None":
        """Read the sequences of a packed batch; None if it is not packed or cannot be split."""
        tokens, places = batch.get("input_ids"), batch.get("position_ids")
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or len(tokens) != 1:
            return None
        length = tokens.shape[1]
        # Flash attention's own fields are exact even if positions are ambiguous.
        if isinstance(batch.get(_ENDS[0]), Tensor):
            ends = batch[_ENDS[0]].tolist()
        elif isinstance(places, Tensor) and places.shape == tokens.shape and length:
            # Positions restart at each sequence, at 0 or at a padding offset.
            ends = [*(places[0] == places[0, 0]).nonzero().flatten().tolist(), length]
        else:
            return None
        # If a sequence's first target counts, the previous sequence predicts it as its next token.
        # Splitting would lose this prediction, so the batch stays whole.
        targets = batch.get("labels")
        if isinstance(targets, Tensor) and bool((targets[0, ends[1:-1]] != IGNORED).any()):
            return None
        if isinstance(batch.get("attention_mask"), Tensor):
            return None  # one mask covers all sequences
        lengths = [stop - start for start, stop in itertools.pairwise(ends)]
        cut = {
            name: torch.split(value, lengths, 1)
            for name, value in batch.items()
            if isinstance(value, Tensor) and value.shape[:2] == (1, length)
        }
        rows = [dict(zip(cut, row, strict=True)) for row in zip(*cut.values(), strict=True)]
        # These follow from the lengths, and are not rows.
        rest = {name: None if name in _ENDS else each for name, each in batch.items()}
        return cls(sequences=rows, rest={k: each for k, each in rest.items() if k not in cut})

    def flat(self) -> dict[str, Any]:
        rows, found = self["sequences"], dict(self["rest"])
        found |= {name: torch.cat([row[name] for row in rows], 1) for name in rows[0]}
        lengths, device = [row["input_ids"].shape[1] for row in rows], found["input_ids"].device
        ends = [0, *itertools.accumulate(lengths)]
        for name in found.keys() & {*_ENDS}:
            found[name] = torch.tensor(ends, dtype=torch.int32, device=device)
        found |= dict.fromkeys(found.keys() & {*_LONGEST}, max(lengths))
        if "seq_idx" in found:
            # Numbers start at 0 in each microbatch, because kernels use them as indices.
            numbers = torch.arange(len(lengths), dtype=found["seq_idx"].dtype, device=device)
            found["seq_idx"] = numbers.repeat_interleave(torch.tensor(lengths, device=device))[None]
        return found


def _as_rows(trainer: Any, inputs: Any) -> Any:
    """Convert a trainer's batch into one that is split by the rows of its loss."""
    if not isinstance(inputs, Mapping):
        return inputs
    if {each.__name__ for each in trainer.__class__.__mro__} & _WITH_PAIRS:
        return Pairs.read(inputs)
    return Sequences.read(inputs) or inputs


def _as_batch(batch: Any) -> Any:
    """Convert a result of `_as_rows`, or a slice of it, back into a copy of the trainer's batch."""
    if isinstance(batch, Pairs | Sequences):
        return batch.flat()
    return copy.copy(batch) if isinstance(batch, Mapping) else batch
