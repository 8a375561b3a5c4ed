"""A part of a model with a size of its own: the class that users call, and the search for sizes."""

import contextlib
import copy
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from automicro.batch.device import cost_of_row
from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import Contents, tensor_leaves
from automicro.batchnorm import batchnorm_message, sees_the_batch
from automicro.errors import (
    BatchError,
    BatchNormWarning,
    BufferWarning,
    GradientWarning,
    UnsplittableModelError,
    add_note,
    facts_of,
    remember,
    warn,
)
from automicro.loss.averages import LossAverage
from automicro.loss.passes import is_extra_pass
from automicro.modules import ModuleIndex, refuse_lazy
from automicro.nested.batchnorm import Stages, refuse_exact, split_at_norms
from automicro.nested.check import Check, Checked
from automicro.nested.slices import (
    Call,
    NothingDrawn,
    naming,
    split_loss,
    split_outputs,
    storage_of,
)
from automicro.options import check_choice
from automicro.policy.policy import Outcome, Policy, make_policy, require_size
from automicro.reach import OF_EVERY_MODULE, Reach, captured_modules
from automicro.sharding import is_sharded
from automicro.state.part import Replay
from automicro.step.parts import attached_to, count_attachment, num_attachments
from automicro.torch_private import (
    FakeTensor,
    forward_of_class,
    has_forward_hooks,
    parameter_table,
)
from automicro.torch_private_execution import (
    in_backward,
    is_traced,
    is_transformed,
    uncompiled,
    without_parametrization_cache,
)
from automicro.transaction.leaves import leaves_of
from automicro.transaction.rng import RandomState, devices_of
from automicro.values import children, same_objects, walk

logger = logging.getLogger("automicro.attempts")

P = TypeVar("P", bound=Callable[..., Any])

BATCHNORM = ("warn", "exact")

_MOST_SIZES = 1024  # sizes kept until a backward

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes)
_WITHOUT_BATCHNORM = "Or let the part begin after these layers, or end before them."


class NestedSplit:
    """A part of a model that is computed in slices, each smaller than the microbatch.

    A transducer's joint network, or the logits of a language model, need far more memory per row
    than all layers before them. With a size of its own, such a part runs slice by slice, while the
    rest of the model runs on microbatches as large as fit. Loss, gradients and outputs are those of
    the part in one piece; only the activations of one slice are alive at a time.

    The output of a part decides how it is computed:

    - a *tail* returns the loss, a tensor without dimensions: ``tail(hidden, targets) -> loss``. The
      gradients of each slice are computed in the forward, so nothing is computed twice;
    - any other part returns tensors with rows in dimension 0. Its slices are recomputed in the
      backward, with the same random numbers. This pays off if the *output* of the part is much
      smaller than its intermediate results.

    If memory runs out inside, the attempt ends, and only the slices of this part become smaller.

    Args:
        part: a module, or a function that uses the parameters of ``modules``.
        microbatch_size: size of a slice: an int, ``"auto"``, None (the whole microbatch), or a
            policy.
        batch_split_factor: number of slices of a microbatch, instead of a size.
        loss_average: the average that a tail's loss is, as for `Microbatcher`; ``"auto"`` detects
            it if the loss ends in a mean or sum of torch's.
        batch_layout: the dimensions of rows in the arguments, by name; see `split_batch`.
        batchnorm: handling of BatchNorm, which gets a slice instead of the microbatch: ``"warn"``;
            or ``"exact"``, which passes all slices from one BatchNorm to the next, so that
            statistics cover all rows. This needs a module that ``torch.fx`` can trace.
        modules: modules whose parameters a function uses; by default those that it refers to.

    Raises:
        TypeError, ValueError: invalid arguments, with a remedy.

    Attributes:
        sizes: rows of each slice of the last call.
        ooms: number of times that memory ran out inside and slices became smaller.

    Example:
        >>> class Tail(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.head = nn.Linear(8, 1000)
        ...     def forward(self, hidden, targets):
        ...         return nn.functional.cross_entropy(self.head(hidden), targets)
        >>> tail = NestedSplit(Tail(), microbatch_size=4)
        >>> hidden = torch.randn(10, 8, requires_grad=True)
        >>> tail(hidden, torch.randint(1000, (10,))).backward()
        >>> hidden.grad.shape, tail.sizes
        (torch.Size([10, 8]), [4, 3, 3])
    """

    def __init__(
        self,
        part: Callable[..., Any],
        *,
        microbatch_size: int | str | Policy | None = "auto",
        batch_split_factor: int | None = None,
        loss_average: LossAverage = "auto",
        batch_layout: int | Mapping[str, Any] = 0,
        batchnorm: str = "warn",
        modules: Iterable[nn.Module] = (),
    ) -> None:
        if isinstance(part, type) or not callable(part):
            raise TypeError(f"{part!r} is not a module or function. Pass one, as in model.joint")
        own = forward_of_class(part) if isinstance(part, nn.Module) else part
        if own is None or (own is nn.Module.forward and "forward" not in vars(part)):
            raise TypeError(
                f"{type(part).__name__} is scripted or traced, or has no forward that could be "
                "cut. Give a size to the module that it was made of, or to modules in it"
            )
        if attached_to(part) is not None:
            raise ValueError(
                f"{type(part).__name__} already has a size. Remove it with .remove() first"
            )
        self._is_exact = check_choice("batchnorm", batchnorm, BATCHNORM) == "exact"
        if batch_split_factor is not None and microbatch_size != "auto":
            raise ValueError(
                f"microbatch_size={microbatch_size!r} and batch_split_factor={batch_split_factor} "
                "set the same value. Pass one of them"
            )
        self._part = part
        size = None if batch_split_factor is not None else microbatch_size
        self._policy = make_policy(size, may_explore=False)
        factor = 1 if batch_split_factor is None else batch_split_factor
        self._factor = require_size(factor, name="batch_split_factor")
        if self._policy.explores:
            raise ValueError(
                'microbatch_size="explore" applies only to the microbatches of a whole model. '
                'Give a part "auto" or an int'
            )
        self._layout = BatchLayout(batch_layout)
        self._modules = [part] if isinstance(part, nn.Module) else list(modules)
        if not self._modules:
            self._modules = captured_modules(part)
        refuse_lazy(self._modules)
        self._declared = loss_average
        self._policies: dict[int, Policy] = {}
        self._checks: dict[Any, Check] = {}
        self._fixed: dict[tuple[int, float, int], int] = {}  # sizes of calls, kept until a backward
        self._is_over = False  # whether a backward has begun since then
        self._about: _Known | None = None
        self._earlier: Any = None  # the forward attribute that the module had before
        self._last: _Sizer | None = None
        self._has_warned = False
        self._counting: Sequence[str] = ()  # state that depends on the number of slices
        self._named: set[str] = set()
        self._thread: int | None = None  # the thread that is computing a slice
        self.has_run = False
        self._in_backward = False
        self.has_shrunk = False
        self.name = getattr(part, "__name__", type(part).__name__)
        self.finer = 1  # divides each slice that fits, if smaller ones are faster
        self.sizes: list[int] = []
        self.ooms = 0

    def __getstate__(self) -> dict[str, Any]:
        # Not copied, because these refer to modules and calls of the original.
        return {**vars(self), "_about": None, "_last": None, "_fixed": {}, "_thread": None}

    def __repr__(self) -> str:
        return f"NestedSplit({self.name}, microbatch_size={self._policy!r})"

    @property
    def part(self) -> Callable[..., Any]:
        """The module or function, as passed to the constructor."""
        return self._part

    @property
    def adapts(self) -> bool:
        """Whether its sizes can change."""
        return self._policy.adapts

    def is_like(self, other: "NestedSplit") -> bool:
        """Whether another split would cut a part in the same way."""
        mine, others = (
            (repr(each._policy), each._factor, each._is_exact) for each in (self, other)
        )
        return mine == others

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes found so far, as plain values."""
        return {str(key): policy.state_dict() for key, policy in self._policies.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with sizes found earlier. A fixed size stays.

        Raises:
            ValueError: the state belongs to another policy.
        """
        if not self.adapts:
            return
        policies = {int(key): copy.deepcopy(self._policy) for key in state}
        for key, policy in policies.items():
            policy.load_state_dict(state[str(key)])
        self._policies, self._fixed = policies, {}

    def of(
        self, part: Callable[..., Any], modules: Sequence[nn.Module], average: LossAverage
    ) -> "NestedSplit":
        """Use the same sizes for a new function that computes the same with these modules."""
        self._part = part
        if not same_objects(modules, self._modules) or average is not self._declared:
            self._modules, self._about, self._declared = list(modules), None, average
            self._checks.clear()
        return self

    def attach(self) -> "NestedSplit":
        """Make the module run in slices wherever it is called. Its class and its names stay.

        Hooks of the module run once, around all slices.

        Raises:
            TypeError: the part is not a module.
        """
        part = self._part
        if not isinstance(part, nn.Module):
            raise TypeError("only a module can be attached to. Call what split() returned instead")
        if not self.is_attached:
            count_attachment()
            self._earlier = part.__dict__.get("forward")
            part.forward = _Forward(self)
        return self

    def remove(self) -> None:
        """Make the module run in one piece again."""
        if not self.is_attached:
            return
        count_attachment()
        del self._part.forward  # type: ignore[attr-defined]
        if self._earlier is not None:
            self._part.forward = self._earlier  # type: ignore[attr-defined]

    @property
    def is_attached(self) -> bool:
        """Whether the module runs in slices wherever it is called."""
        return attached_to(self._part) is self

    def took_shortage(self) -> bool:
        """Whether memory ran out inside since the last check, so that slices are smaller now."""
        # Errors in a backward name no slice, but hooks have recorded whether it was in this part.
        if self._in_backward and not self.has_shrunk and self._last is not None and self.sizes:
            self._last.failed(max(self.sizes))
        self._in_backward = False
        self._about = None  # it might refer to buffers that slices of the failed attempt created
        found, self.has_shrunk = self.has_shrunk, False
        return found

    def cut_what_was_whole(self) -> bool:
        """Use slices next time if the last call was in one piece, which keeps its activations."""
        # Each call counts once, because the next attempt might not reach this part.
        last, self._last = self._last, None
        if last is None or self.sizes != [last.num_rows] or not last.failed(last.num_rows):
            return False
        self.has_shrunk = False
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self._part, nn.Module):
            return self._run(args, kwargs)
        with contextlib.ExitStack() as stack:
            if not self.is_attached:
                stack.callback(self.attach().remove)
            return self._part(*args, **kwargs)

    def _forward(self) -> Callable[..., Any]:
        """Return the function that computes the part, without its hooks."""
        forward: Callable[..., Any] = self._part if self._earlier is None else self._earlier
        if isinstance(forward, nn.Module) and forward is self._part:
            forward = type(forward).forward.__get__(forward)
        return forward

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        forward = self._forward()
        self.has_run = True
        self._refuse_threads()
        # A call from inside one of its own slices is not cut again.
        if self._thread is not None or is_traced():
            return forward(*args, **kwargs)
        if is_transformed():
            raise UnsplittableModelError(
                f"{self.name} has its own size, which torch.func's transforms do not support. "
                "Remove it with .remove(), or differentiate with .backward()"
            )
        self._in_backward = False
        names = _names_of(forward, len(args))
        batch: dict[str, Any] = {**dict(zip(names, args, strict=True)), **kwargs}
        try:
            num_rows = self._layout.num_rows(batch)
        except BatchError:
            if any(not leaf.numel() for _, leaf in tensor_leaves(batch)):
                return forward(*args, **kwargs)  # there are no rows to cut
            raise
        sizer = self._last = _Sizer(self, num_rows, cost_of_row(Contents(batch), num_rows))
        call = self._call(forward, names, batch, sizer)
        # A single row is never cut, nor are outputs if all rows fit; a loss is always cut.
        if num_rows == 1:
            outputs = self._in_one_piece(call)
        else:
            call.check_inputs()
            stages = self._stages(batch)  # before any size is tried
            checked = self._check(call, stages)
            self._counting = checked.counting
            if checked.averages is not None:
                if stages is not None:
                    refuse_exact(self.name, "its loss exists before rows reach BatchNorm")
                # A gradient in fp16 might underflow before the loss scale is applied.
                recompute = _is_half(call) or not checked.is_proportional
                outputs = split_loss(checked.watch(call), checked.averages, recompute=recompute)
                self._note_backward(call, outputs)
            elif sizer.begin() >= num_rows:
                outputs = self._in_one_piece(call)
            else:
                outputs = split_outputs(call) if stages is None else split_at_norms(call, stages)
                self._note_backward(call, outputs)
        return outputs

    def _stages(self, batch: Mapping[str, Any]) -> Stages | None:
        """Return the stages of a part if its BatchNorms need the statistics of all rows."""
        if not self._is_exact or not self.batchnorms():
            return None
        if not isinstance(self._part, nn.Module) or self._earlier is not None:
            refuse_exact(self.name, "it is not a module, or does not use its class's forward")
        return self._known.stages(self._part, batch)

    def _refuse_threads(self) -> None:
        """Refuse a call while another thread computes a slice, with replaced parameters."""
        if self._thread not in (None, threading.get_ident()) and torch.is_grad_enabled():
            raise UnsplittableModelError(
                f"{self.name} has its own size, but two threads call it at the same time, so one "
                "would get the gradients of the other. Give each thread a copy"
            )

    def _call(
        self,
        forward: Callable[..., Any],
        names: Sequence[str],
        batch: Mapping[str, Any],
        sizer: "_Sizer",
    ) -> Call:
        known = self._known
        known.index.refresh()
        places = Places(known.index)
        is_new = True

        def compute_part(rows: Mapping[str, Any], tensors: Sequence[Tensor] | None) -> Any:
            nonlocal is_new
            args = [rows[name] for name in names]
            kwargs = {name: value for name, value in rows.items() if name not in names}
            self._refuse_threads()
            self._thread = threading.get_ident()
            try:
                with places.holding(tensors):
                    output = forward(*args, **kwargs)
            finally:
                self._thread = None
            if tensors is not None and torch.is_grad_enabled():
                are_apart = tensors and all(each.is_leaf for each in tensors)
                own = tensors if are_apart else [*tensors, *places.parameters]
                _refuse_strangers(output, rows, [*own, *places.frozen])
                # Once per call, because all its slices run the same code.
                if is_new:
                    _refuse_left_behind(known.index)
                is_new = False
            return output

        leaves = [leaf for _, leaf in tensor_leaves(batch)]
        is_dry = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        return Call(
            batch=batch,
            layout=self._layout,
            compute=compute_part,
            holding=places.holding,
            parameters=places.parameters,
            sizer=sizer,
            device=next((leaf.device for leaf in leaves), torch.device("cpu")),
            standing=known.standing,
            random=functools.partial(NothingDrawn, ()) if is_dry else known.random,
            min_rows=self._min_rows,
            is_dry=is_dry,
        )

    @property
    def _known(self) -> "_Known":
        if self._about is None:
            self._about = _Known(self._modules, [self._part])
        return self._about

    def _check(self, call: Call, stages: Stages | None) -> Checked:
        # Checked separately for evaluation, which might run other code.
        how = torch.is_grad_enabled(), *(each.training for each in self._modules)
        if how not in self._checks:
            self._checks[how] = Check(self._declared)
        return self._checks[how](call, stages)

    @property
    def _min_rows(self) -> int:
        """The fewest rows of a slice: BatchNorm needs two."""
        return 2 if self.batchnorms() and not self._is_exact else 1

    def _in_one_piece(self, call: Call) -> Any:
        """Run the usual forward, with hooks that record whether its backward is running."""
        num_rows = call.num_rows
        with naming(call.sizer, num_rows):
            output = call.compute(call.batch, None)
        self.sizes = [num_rows]
        self._note_backward(call, output)
        return output

    def _note_backward(self, call: Call, output: Any) -> None:
        if torch.is_grad_enabled():
            outputs = [leaf for _, leaf in tensor_leaves(output)]
            # Outputs get their gradients first and inputs last; in between, the backward is in this
            # part.
            for in_backward, leaves in ((True, outputs), (False, call.inputs().values())):
                for leaf in leaves:
                    # A hook on a leaf would never go away, and each call would add one.
                    if leaf.grad_fn is not None:
                        hook: Any = functools.partial(self._note, in_backward)
                        leaf.register_hook(hook)  # type: ignore[no-untyped-call]

    def _note(self, in_backward: bool, _: Tensor) -> None:
        self._in_backward = in_backward
        self._is_over = True

    def batchnorms(self) -> list[str]:
        """Return the names of layers that use statistics of a slice instead of the microbatch."""
        return [name for name, layer in self._known.index.batchnorms if sees_the_batch(layer)]

    def warn_of_slices(self, sizes: Sequence[int]) -> None:
        """Warn of what several slices change, the first time that there are several.

        Warns:
            BatchNormWarning: the part has BatchNorm in training mode.
            BufferWarning: each slice changes state, such as a counter.
            GradientWarning: forward hooks would run for each slice.
        """
        if len(sizes) < 2:
            return
        if counting := [name for name in self._counting if name not in self._named]:
            self._named.update(counting)
            warn(
                f"{self.name}, a part with its own size, changes {', '.join(counting[:4])} once "
                f"per slice, {len(sizes)} times for these rows. Change it once per step outside "
                "the part, or remove the size with .remove()",
                BufferWarning,
            )
        if self._has_warned:
            return
        self._has_warned = True
        owners = self._known.index.owners
        # Hooks of the part itself run once, around all slices.
        inside = [(name, each) for name, each in owners if each is not self._part]
        hooked = [name for name, each in inside if has_forward_hooks(each)]
        if hooked:
            warn(
                f"forward hooks inside {self.name}, a part with its own size, run for each slice "
                f"({', '.join(hooked[:4])}), and again in the backward. Let the forward return "
                "the values that they keep",
                GradientWarning,
            )
        names = self.batchnorms()
        if names and not self._is_exact:
            message = batchnorm_message(names, max(sizes), sum(sizes), remedy=_WITHOUT_BATCHNORM)
            warn(f"in {self.name}, a part with its own size, {message}", BatchNormWarning)


class _Sizer:
    """The sizes of the slices of one call."""

    def __init__(self, nested: NestedSplit, num_rows: int, cost: float) -> None:
        self.num_rows = num_rows
        self._nested, self._cost = nested, cost
        # Calls with similar numbers of rows share a policy: others leave more memory, or less.
        self._key, self._policy = (num_rows - 1).bit_length(), nested._policy
        if nested.adapts:
            if self._key not in nested._policies:
                nested._policies[self._key] = copy.deepcopy(nested._policy)
            self._policy = nested._policies[self._key]

    def begin(self) -> int:
        # Sizes are kept until a forward that follows a backward: a recomputation in the backward,
        # and a repeated call of an attempt, are cut in the same way.
        nested, fixed = self._nested, self._nested._fixed
        if nested._is_over and not in_backward():
            fixed.clear()
            nested._is_over = False
        key = self.num_rows, self._cost, nested.finer
        if key not in fixed:
            # In evaluation, no backward clears them.
            if len(fixed) > _MOST_SIZES:
                fixed.clear()
            proposed = self._policy.propose(self.num_rows, self._cost)
            fixed[key] = -(-proposed // (nested.finer * nested._factor))
        return fixed[key]

    def failed(self, size: int, error: BaseException | None = None) -> bool:
        # If a part inside this one is smaller now, that is enough. An extra pass must leave no
        # trace, so it teaches nothing.
        nested, policy = self._nested, self._policy
        is_told = error is not None and facts_of(error).part is not None
        if is_extra_pass() or is_told or not policy.adapts:
            return False
        policy.record(self._outcome(size, fits=False))
        # Lets the next call propose a new size although no backward ran in between.
        nested._is_over = True
        proposed = policy.propose(self.num_rows, self._cost or None)
        nested.has_shrunk = nested._min_rows <= proposed < size
        if not nested.has_shrunk:
            # Nothing smaller is left, which says nothing about other calls.
            nested._policies.pop(self._key, None)
            return False
        nested.ooms += 1
        text = (
            f"automicro: memory ran out in {nested.name} (a part with its own size), in a slice "
            f"of {size} of {self.num_rows} rows; the next slices have {proposed}"
        )
        logger.warning("%s", text)
        if error is not None:
            remember(error, part=nested.name)
            add_note(error, text)
        return True

    def end(self, sizes: Sequence[int]) -> None:
        nested = self._nested
        if not is_extra_pass():
            self._policy.record(self._outcome(max(sizes[-1], min(sizes)), fits=True))
        nested.sizes, nested.has_shrunk = list(sizes), False
        nested.warn_of_slices(sizes)

    def _outcome(self, size: int, *, fits: bool) -> Outcome:
        return Outcome(
            num_rows=self.num_rows, microbatch_size=size, fits=fits, cost=self._cost or None
        )


class _Known:
    """Facts about the modules of a part, which a copy of the part finds again."""

    def __init__(self, modules: Sequence[nn.Module], functions: Sequence[Any]) -> None:
        self.index = ModuleIndex(modules)
        self._devices = devices_of(modules, torch.device("cpu"))
        roots = {f"part {number}": each for number, each in enumerate([*modules, *functions])}
        self.standing = Replay(roots, large={})
        self._reach = Reach(roots)
        self._stages: tuple[Any, Stages] | None = None

    def random(self) -> RandomState:
        """Return a record of every generator that a slice might draw from."""
        return RandomState(self._devices, self._reach.generators)

    def stages(self, part: nn.Module, batch: Mapping[str, Any]) -> Stages:
        """Return the stages of a part with BatchNorm; trace it again if conditions have changed."""
        modes = [each.training for each in part.modules()]
        others = {name: each for name, each in batch.items() if not isinstance(each, Tensor)}
        key = modes, list(batch), others, num_attachments(), list(_constants_in(part))
        if self._stages is None or self._stages[0] != key:
            self._stages = key, Stages(part, batch, lambda each: attached_to(each) is not None)
        return self._stages[1]


def _constants_in(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield numbers, flags and strings that a part reaches, each with its path."""
    for path, value in walk({"": part}):
        if not isinstance(value, Tensor):
            for name, each in children(value):
                if type(each) in _CONSTANTS:
                    yield f"{path}{name}", each


class Places:
    """The places of the parameters of modules that need a gradient."""

    def __init__(self, index: ModuleIndex) -> None:
        tables = [parameter_table(module) for _, module in index.owners]
        held = [
            (table, name, each)
            for table in tables
            for name, each in table.items()
            if each is not None
        ]
        self._found = [place for place in held if place[2].requires_grad]
        # These need no gradient now, but might in the backward.
        self.frozen = [each for *_, each in held if not each.requires_grad]
        # A tied parameter has several places but one gradient.
        self.parameters = list({id(each): each for *_, each in self._found}.values())
        for _, name, each in self._found:
            if is_sharded(each):
                raise UnsplittableModelError(
                    f"the part's parameter {name!r} is sharded while it runs, so every slice "
                    "would communicate. Apply fully_shard to the part itself"
                )

    @contextlib.contextmanager
    def holding(self, tensors: Sequence[Tensor] | None) -> Iterator[None]:
        """Put other tensors in the places of the parameters, in their order, if there are any."""
        found = self._found if tensors else []
        others: dict[int, Any] = {}
        others.update(zip(map(id, self.parameters), tensors or (), strict=bool(tensors)))
        before = [table[name] for table, name, _ in found]
        # Copies that autocast caches in a slice have no gradient, or that of an alias.
        is_cached = torch.is_autocast_cache_enabled()
        try:
            torch.set_autocast_cache_enabled(False)
            for table, name, each in found:
                table[name] = others[id(each)]
            with without_parametrization_cache():
                yield
        finally:
            torch.set_autocast_cache_enabled(is_cached)
            for (table, name, _), parameter in zip(found, before, strict=True):
                table[name] = parameter


class _Forward:
    """A replacement for the forward attribute of a module."""

    # The compiler compiles the surrounding code and leaves this call out; the code inside can be
    # compiled.

    def __init__(self, nested: NestedSplit) -> None:
        self.nested = nested

    @uncompiled(
        "a part with its own size (automicro.split) is cut while it runs. Compile without "
        "fullgraph=True, or compile the parts of the model around it"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.nested._run(args, kwargs)


def _names_of(function: Callable[..., Any], num_given: int) -> list[str]:
    """Return the names of positional arguments.

    >>> _names_of(lambda x, y=1, *more, z: None, 4)
    ['x', 'y', 'more.0', 'more.1']
    """
    parameters = inspect.signature(function).parameters.values()
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in parameters if each.kind in by_place]
    rest = next((each.name for each in parameters if each.kind is each.VAR_POSITIONAL), "")
    # If there are too many, the call itself raises the error.
    return [*names[:num_given], *(f"{rest}.{at}" for at in range(num_given - len(names)))]


def split(part: P, **options: Any) -> NestedSplit:
    """Give a part of a model a size of its own, in place.

    From then on, a module runs in slices wherever it is called; the names of its parameters and its
    class stay, as with ``fully_shard``. For a function, call the object that this returns.

    Args:
        part: a module or a function.
        options: arguments of `NestedSplit`.

    Returns:
        The split: its ``sizes``, its state, and ``remove()``, which removes the size.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 64), nn.Sequential(nn.ReLU(), nn.Linear(64, 2)))
        >>> head = split(model[1], microbatch_size=2)
        >>> model(torch.randn(5, 4)).shape, head.sizes
        (torch.Size([5, 2]), [2, 2, 1])
    """
    if "microbatch_unit" in options:
        raise TypeError(
            "microbatch_unit applies only to the tail of a language model, not to other parts. "
            "Flatten rows and positions before the part: tail(x.flatten(0, 1), y.flatten())"
        )
    nested = NestedSplit(part, **options)
    return nested.attach() if isinstance(part, nn.Module) else nested


def _is_half(call: Call) -> bool:
    """Whether gradients might underflow before a loss scale is applied."""
    kind = call.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind) is torch.float16
    return any(each.dtype is torch.float16 for each in (*call.parameters, *call.inputs().values()))


def _refuse_strangers(output: Any, rows: Any, parameters: Sequence[Tensor]) -> None:
    """Refuse tensors that are neither inputs nor parameters: their gradients would be lost."""
    known = {id(each) for each in parameters}
    inputs = [given for _, given in tensor_leaves(rows)]
    known |= {id(leaf) for given in inputs for leaf in _leaves(given)}
    # A view of an input that the forward marks, for its checkpointing, loses no gradient.
    marked = {storage_of(given) for given in inputs if not given.requires_grad} - {None}
    for _, leaf in tensor_leaves(output):
        for found in _leaves(leaf):
            if id(found) not in known and storage_of(found) not in marked:
                raise UnsplittableModelError(
                    f"the part computes with a tensor of shape {tuple(found.shape)} that needs a "
                    "gradient and is neither an argument nor a parameter of its modules. Pass it "
                    "as an argument, or name the module that holds it: split(part, modules=[…])"
                )


def _refuse_left_behind(index: ModuleIndex) -> None:
    """Refuse attributes that keep tensors with a gradient: they would hold the last slice."""
    for name, module in index.owners:
        table = parameter_table(module)
        for key, value in vars(module).items():
            if key in OF_EVERY_MODULE or not isinstance(value, Tensor | list | tuple | dict):
                continue
            if f"{key}_orig" in table or f"{key}_v" in table:
                # Of pruning, spectral norm and weight norm, which compute it again in each forward.
                continue
            if any(leaf.grad_fn is not None for _, leaf in tensor_leaves(value)):
                raise UnsplittableModelError(
                    "a part with its own size keeps a tensor with a gradient in the attribute "
                    f"{key!r} of {name or 'itself'} ({type(module).__name__}), and that gradient "
                    "would be lost. Let the forward return it, or detach it"
                )


def _leaves(tensor: Tensor) -> list[Tensor]:
    return leaves_of(tensor) if tensor.requires_grad else []
