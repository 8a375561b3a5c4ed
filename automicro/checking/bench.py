"""Forward and backward passes that leave no trace, with random draws held constant."""

import contextlib
import itertools
import math
import random
import traceback
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

from automicro.batch.device import on_device, on_host
from automicro.batch.joining import concat_rows, outputs_with_rows
from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import map_tensors, open_container, tensor_leaves
from automicro.batch.types import STRUCTURES, Kind, join_path, kind_of
from automicro.checking.draws import CollectiveError, HeldDraws, LossCollectiveError
from automicro.checking.reading import (
    LOSS,
    SEAM,
    Reading,
    gaps,
    has_fractions,
    is_blind,
    norm_of,
    profile,
)
from automicro.checking.state import Snapshot, changed_places
from automicro.compilation import uncompiled
from automicro.errors import (
    BatchError,
    LossError,
    RollbackError,
    StateWarning,
    describe_error,
    warn,
)
from automicro.loss.averages import BatchWeights, CutBatch
from automicro.loss.conventions import Output
from automicro.loss.passes import Computation, Mode, extra_pass
from automicro.memory.oom import Failure, caught, classify, release, surely
from automicro.modules import ModuleIndex
from automicro.options import ONE_GRAPH_EACH, check_loss
from automicro.state.capture import Captured, capture
from automicro.state.tensors import seen_version
from automicro.torch_private import AnyBatchNorm, with_hooks, without_modes
from automicro.torch_private_execution import is_older, num_nodes_made
from automicro.transaction.leaves import HeldHooks, leaves_of, nodes_of
from automicro.transaction.parameters import refused_writes
from automicro.transaction.rng import RandomState, devices_of
from automicro.values import read_scalars, state_of

T = TypeVar("T")
Wanted: TypeAlias = Literal["parameters", "seams", "numbers", "outputs"]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions of a bench; `verify` varies one at a time."""

    mode: Mode = "train"  # which forward runs
    # "parameters": parameter gradients, at the memory cost of a whole backward; "seams":
    # gradients by the outputs of the outermost modules with parameters, for which no activations
    # are kept; "numbers": losses and other numbers only; "outputs": these and the outputs.
    wants: Wanted = "parameters"
    batchnorm: bool = False  # whether BatchNorm averages over rows, as in training
    shakes_rows: bool = False  # whether chance includes the rounding of the rows
    carries: bool = True  # whether a part starts from the state that the part before it left
    watches: bool = False  # whether inputs and outputs of modules are recorded
    notes_state: bool = False  # whether changes to attributes and variables are recorded


def cuts(
    layout: BatchLayout, batch: Any, sizes: Sequence[int], rows: Sequence[int] | None = None
) -> tuple[CutBatch, CutBatch]:
    """Return rows of a batch (its first ones by default) as a whole and cut into these sizes."""
    with on_host():
        if rows is not None:
            batch = layout.take_rows(batch, rows)
        elif rest := layout.num_rows(batch) - sum(sizes):
            batch = layout.split(batch, [sum(sizes), rest])[0]
        parts = layout.split(batch, sizes) if len(sizes) > 1 else [batch]
    # Both come from one selection of rows, so they differ only by the cut.
    apart = CutBatch(batch=batch, microbatches=parts, sizes=sizes)
    return CutBatch.whole(batch, sum(sizes)), apart


def cuts_of(
    layout: BatchLayout, batch: Any, parts: Sequence[Sequence[int]]
) -> tuple[CutBatch, CutBatch]:
    """Return these rows of a batch as a whole and as these parts."""
    return cuts(layout, batch, list(map(len, parts)), [row for part in parts for row in part])


_CONTROLS = 6  # a limit
_STRETCHED = 1 / 12_345  # of the loss of a control: small enough for a hook that clamps gradients
_SUMS = 16  # times eps of the dtype of the sum
_TF32 = 2.0**-10
_ACCELERATED = 10  # sums run in a different order for each shape
_TURNED_OVER = 0.1  # of integer values, which rounding can change
_SEED = 0x5EED0000
_LOW = (torch.float16, torch.bfloat16)


class Bench:
    """Context for passes that leave no trace: leaving it restores everything."""

    def __init__(self, computation: Computation, conditions: Conditions | None = None) -> None:
        self.computation, self.conditions = computation, conditions or Conditions()
        roots = computation.reached
        self._index = ModuleIndex(roots)
        self._modules = list({id(m): m for root in roots for m in root.modules()}.values())
        every = {id(p): p for root in roots for p in root.parameters()}
        # By identity: tied parameters have one gradient.
        self._trained = {key: each for key, each in every.items() if each.requires_grad}
        # A model without trained parameters can still have a loss to compare.
        self._shaken = list((self._trained or every).values())
        self._names = computation.names()
        self._leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._known: Mapping[int, Any] | None = None
        self._num_readings = 0
        self._random = RandomState(
            devices_of(roots, computation.device), computation.reach.generators
        )
        self.draws = HeldDraws(every.values(), is_alone=True)  # record of the random draws
        self._stack = contextlib.ExitStack()
        self._captured: Captured | None = None

    def __enter__(self) -> "Bench":
        with self._stack as stack:
            # Captured first, because everything after it might change captured objects.
            self._captured = captured = capture(self.computation.roots)
            stack.callback(_restore, lambda: _put_back(captured, self.computation.left))
            stack.callback(_restore, self._random.roll_back)
            self._random.begin()
            stack.callback(_restore, self.draws.put_back)
            stack.callback(self._put_gradients_back)
            self._set_aside(self._trained.values())
            stack.enter_context(warnings.catch_warnings())
            # Raised by a pass over one row, which a batch of the caller might never have.
            warnings.filterwarnings("ignore", message=".*degrees of freedom", category=UserWarning)
            # Each thread numbers its own graph nodes, so this thread must create all of them.
            threads = torch.autograd.set_multithreading_enabled(False)
            for manager in (uncompiled(), threads, extra_pass()):
                stack.enter_context(manager)
            # If entering fails halfway, everything entered so far is left again.
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def compare(
        self, together: CutBatch, whole: Reading, parts: Reading
    ) -> tuple[dict[str, float], list[bool]]:
        """Return relative differences beyond chance, and whether each control run is blind."""
        # Controls measure chance and run only if something differs; a blind one would hide a
        # gradient twice as large. The tensors of the parts are freed.
        blind: list[bool] = []

        def controls() -> Iterator[Reading]:
            for shake in range(1, _CONTROLS + 1):
                control = self.read(together, shake=shake)
                blind.append(is_blind(whole, control))
                yield control
                # Otherwise its gradients would stay in memory next to those of the next control.
                del control

        return gaps(whole, parts, controls()), blind

    def read(self, cut: CutBatch, *, shake: int = 0) -> Reading:
        """Run the microbatches of a cut in order, starting from the captured state."""
        mode, wants = self.conditions.mode, self.conditions.wants
        weights: BatchWeights | None = None
        if wants != "outputs":  # a count function of the caller might change restored state
            weights = self._weights(cut)
        reading = Reading()
        kinds: dict[str, torch.dtype] = {}
        told: list[Mapping[str, tuple[float, float]]] = []
        outputs: list[Any] = []
        sums: dict[int, Tensor] = {}
        for index, part in enumerate(cut.microbatches):
            # Parts of one cut follow each other as microbatches do, unless state is held still.
            if index == 0 or not self.conditions.carries:
                self._begin_again()
            self.draws.number += 1
            first_node = num_nodes_made()
            # Each reading copies the rows, because a forward might have written into the last copy.
            apart = map_tensors(part, _without_graph)
            (moved,) = on_device([apart], self.computation.device, isolate=True)
            self._set_seeds(shake)
            before = self._foreign()
            shaking = self._shaking(shake, moved)
            with self._surroundings(), shaking, self.draws, self._seam() as given:
                output = self._compute(moved)
                if output.loss is not None and mode != "predict":
                    weights = weights or self._weights(cut)
                    reading.has_total |= output.has_total
                    # Weighted as in a step; otherwise the sum would not be the gradient of the
                    # batch.
                    loss = self._add(reading, kinds, output, weights, index)
                    # Rows without any target have a NaN loss and no share in the batch.
                    if loss.requires_grad and not weights.is_nothing[index]:
                        if wants in ("parameters", "seams"):
                            _check_own_graph(loss, first_node)
                        reading.seams.append([*self._backward(loss, shake, given, sums)])
            self._take(reading, sums)
            self._note_foreign(before)
            # The copies are new, so a version other than 0 means that the forward wrote to them.
            reading.written |= {path for path, leaf in tensor_leaves(moved) if seen_version(leaf)}
            told.append(output.told)
            known = reading.as_loss if index else output.told_as_loss
            reading.as_loss = known & output.told_as_loss
            if wants == "outputs":
                kept = outputs_with_rows(output.outputs)
                outputs.append(map_tensors(kept, lambda leaf: leaf.detach().clone()))
            del output, moved
        reading.gradients = {self._names_of_leaves()[key]: each for key, each in sums.items()}
        reading.outputs = _joined(outputs)
        _add_told(reading, told)
        self._set_floors(reading, kinds)
        if self.conditions.notes_state:
            assert self._captured is not None
            for place in changed_places(self.computation.roots, self._captured):
                if not isinstance(place.owner, AnyBatchNorm):  # which has its own warning
                    reading.state[place.identity] = place, Snapshot(place.read())
        return reading

    def _weights(self, cut: CutBatch) -> BatchWeights:
        with on_host():
            return BatchWeights(self.computation.averages, [cut])

    def _add(
        self,
        reading: Reading,
        kinds: dict[str, torch.dtype],
        output: Output,
        weights: BatchWeights,
        index: int,
    ) -> Tensor:
        """Add the losses of one part to the reading and return its weighted loss."""
        # A part without a gradient is valid: all of its targets can be ignored.
        given = output.loss
        is_constant = isinstance(given, Tensor) and not given.requires_grad
        if self.conditions.mode == "train" and not is_constant:
            check_loss(given)
        if not isinstance(given, Tensor) or given.dim():
            raise LossError("the loss is not one number")
        loss, beside = weights.apply(index, given, output.losses, has_total=output.has_total)
        named = {**beside, LOSS: loss}
        # One copy for all values, because each copy waits for the device.
        values = read_scalars([each.detach() for each in (given, *named.values())])
        reading.each.append(values[0])
        for (name, term), value in zip(named.items(), values[1:], strict=True):
            kinds[name] = term.dtype
            reading.numbers[name] = reading.numbers.get(name, 0.0) + value
            reading.raise_scale(name, value, reading.numbers[name])
        return loss

    def _set_floors(self, reading: Reading, kinds: Mapping[str, torch.dtype]) -> None:
        """Set the smallest rounding error: of values by the lowest dtype, of sums by a wide one."""
        for name, value in reading.outputs.items():
            reading.raise_scale(name, norm_of(value) if has_fractions(value) else 1.0)
        for name, given in itertools.chain(*reading.seams):
            size = 0.0 if given is None else norm_of(profile([given]))
            reading.scales[name] = reading.scales.get(name, 0.0) + size
        sums, values = self.rounding
        # A gradient much smaller than the others is rounded like them in sums over all gradients.
        total = math.hypot(*(reading.scales[name] for name in reading.gradients))
        for name, scale in reading.scales.items():
            if name in reading.numbers:
                kind = torch.finfo(kinds[name]).eps if name in kinds else 0.0
                reading.floors[name] = max(4 * kind, sums) * scale
            else:
                # Rows that are alike are rounded alike, in the whole and in the parts.
                floor = 2 * values * scale
                reading.floors[name] = floor + sums * total * (name in reading.gradients)
        for name, value in reading.outputs.items():
            if not has_fractions(value):
                reading.floors[name] = _TURNED_OVER

    @property
    def rounding(self) -> tuple[float, float]:
        """Relative rounding errors of sums and of values; values are stored in the lowest dtype."""
        lowest = self.draws.lowest
        wide = torch.float64 if lowest is torch.float64 else torch.float32
        sums = _SUMS * torch.finfo(wide).eps
        # On accelerators other shapes use other kernels, which sum in another order, perhaps in
        # TF32.
        if self.computation.device.type != "cpu" and lowest is not torch.float64:
            return sums * _ACCELERATED, max(torch.finfo(lowest).eps, _TF32)
        return sums, max(torch.finfo(lowest).eps, sums)

    # One pass

    def _begin_again(self) -> None:
        """Restore the captured state and seed generators differently from each earlier reading."""
        assert self._captured is not None
        self._num_readings += 1
        self.draws.begin_again()
        with contextlib.suppress(RollbackError):  # reported when the bench is left
            self._captured.put_back()
        # A new seed for each reading: results that depend on a draw must show up as chance.
        seed = _SEED + self._num_readings
        torch.manual_seed(seed)
        for generator in self.computation.reach.generators():
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)

    def _set_seeds(self, shake: int) -> None:
        """Seed generators outside torch: the same in each pass, but different in each control."""
        # So one draw per forward is held constant, and one draw per row shows up as chance.
        seed = _SEED + shake
        random.seed(seed)
        np.random.seed(seed)
        for generator in self.computation.reach.generators():
            if isinstance(generator, np.random.Generator):
                bits: Any = generator.bit_generator
                bits.state = type(bits)(seed).state
            elif not isinstance(generator, torch.Generator):
                generator.seed(seed)

    def _compute(self, rows: Any) -> Output:
        convention, model = self.computation.convention, self.computation.modules[0]
        try:
            with extra_pass():
                match self.conditions.mode:
                    case "train":
                        return convention.train(model, rows)
                    case "eval":
                        return convention.evaluate(model, rows)
                holds_rows = self.computation.layout.holds_rows
                return Output(None, {}, convention.predict(model, rows, holds_rows=holds_rows))
        except CollectiveError as error:
            callers = (f.f_locals.get("self") for f, _ in traceback.walk_tb(error.__traceback__))
            if {*map(id, model.modules())}.isdisjoint(map(id, callers)):
                raise LossCollectiveError(str(error)) from None
            raise

    def _backward(
        self, loss: Tensor, shake: int, given: list[tuple[str, Tensor]], sums: dict[int, Tensor]
    ) -> list[tuple[str, Tensor | None]]:
        """Add gradients to the leaves, or return the gradients by module outputs."""
        # A control's loss, which is a single part, is scaled down and its gradients are scaled
        # back. Cancelling terms are then rounded as they are when losses of parts are weighted.
        stretch = loss.new_tensor(1 - shake * _STRETCHED) if shake else None

        def made_up(each: Tensor | None) -> Tensor | None:
            return each if each is None or stretch is None else each / stretch

        if self.conditions.wants == "seams":
            wanted = [each for _, each in given if each.requires_grad]
            found: Sequence[Tensor | None] = ()
            if wanted:
                # Only up to the outputs of modules: this costs a fraction of a whole backward, and
                # no memory for gradients.
                found = torch.autograd.grad(loss, wanted, stretch, allow_unused=True)
            return [(SEAM, made_up(each)) for each in found]
        if self.conditions.wants == "parameters":
            self._set_aside(leaves_of(loss))
            for key, (leaf, _) in self._leaves.items():
                if key in sums and leaf.dtype not in _LOW:
                    # Autograd adds in place, so no third set of gradients is held.
                    total = sums.pop(key)
                    leaf.grad = total if leaf.grad is None else total + leaf.grad
            # Hooks of the caller might count or step, and a check is not a step.
            hooked = with_hooks([leaf for leaf, _ in self._leaves.values()])
            with HeldHooks(hooked).held():
                loss.backward(stretch)  # type: ignore[no-untyped-call]
            for leaf, _ in self._leaves.values() if shake else ():
                leaf.grad = made_up(leaf.grad)
        return list(given)

    def _take(self, reading: Reading, sums: dict[int, Tensor]) -> None:
        """Move gradients from the leaves into the sums."""
        names = self._names_of_leaves()
        for key, (leaf, _) in self._leaves.items():
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None and key in names:
                gradient = gradient.detach()
                # A step does not round between parts, so low-precision gradients are summed in
                # float32.
                gradient = gradient.float() if gradient.dtype in _LOW else gradient
                sums[key] = sums[key] + gradient if key in sums else gradient
            if key in sums and key in names:
                reading.raise_scale(names[key], norm_of(sums[key]))

    def _names_of_leaves(self) -> Mapping[int, str]:
        """Return names of leaves by id, without leaves that a forward created for itself."""
        # Leaves that only the graph reaches, such as a tensor in a closure.
        strangers = self._leaves.keys() - self._names.keys()
        if not strangers:
            return self._names
        if self._known is None:
            assert self._captured is not None
            self._known = self._captured.names()
        found = {key: self._known[key][0] or "a leaf" for key in strangers & self._known.keys()}
        return {**self._names, **found}

    def _set_aside(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            if id(leaf) not in self._leaves:
                self._leaves[id(leaf)] = leaf, leaf.grad
                leaf.grad = None

    def _put_gradients_back(self) -> None:
        for leaf, earlier in self._leaves.values():
            leaf.grad = earlier
        self._leaves.clear()

    # Around a pass

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        wants, is_training = self.conditions.wants, self.conditions.mode == "train"
        with contextlib.ExitStack() as stack:
            stack.enter_context(_alone(self._modules))
            if not self.conditions.batchnorm:
                stack.enter_context(_rows_apart(self._modules))
            stack.enter_context(torch.enable_grad() if is_training else torch.no_grad())
            # Without a backward no activations are kept, so a check takes less memory.
            if is_training and wants in ("numbers", "outputs"):
                stack.enter_context(saved_tensors_hooks(_keep_nothing, _refuse_backward))
            yield

    @contextlib.contextmanager
    def _shaking(self, shake: int, rows: Any) -> Iterator[None]:
        """Change parameters in their last bits, in place, and rows if the conditions say so."""
        # Bits are flipped, not numbers added, so flipping again restores them exactly.
        shaken: list[tuple[Tensor, Tensor, int]] = []  # with the first value of each
        leaves = tensor_leaves(rows) if self.conditions.shakes_rows else ()
        # Not masks, because a forward may compare them with 1.
        rows = [e for _, e in leaves if e.dtype in _INTEGERS and e.detach().frac().any()]
        for each in [*self._shaken, *rows] if shake else ():
            kind = _INTEGERS.get(each.dtype)
            # Bits of a subclass, such as a quantized tensor, might mean something else.
            is_plain = type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided
            if kind and is_plain and each.device.type != "meta":
                # Shaken by the rounding error of the computation, which might run in a lower dtype.
                steps = max(1, round(self.rounding[1] / torch.finfo(each.dtype).eps))
                view = each.data.view(kind)
                first = view.as_strided((min(1, view.numel()),), (1,))
                shaken.append((view, first.clone(), _pattern(steps, shake)))
        copies = dict(self.draws.copies)

        def put_back() -> None:
            self.draws.put_back()
            for view, first, bits in shaken:
                # Ctrl-C might arrive between any two of them.
                if not first.equal(view.as_strided(first.shape, (1,))):  # it was shaken
                    with without_modes():
                        view.bitwise_xor_(bits)
            self.draws.copies = copies  # further ones contain shaken values
            self.draws.put_back()

        try:
            # Unseen by a check around this one, which would take it for a write of the forward.
            with without_modes():
                for view, _, bits in shaken:
                    view.bitwise_xor_(bits)
            yield
        finally:
            if shaken:
                _restore(put_back)

    @contextlib.contextmanager
    def _seam(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Collect outputs of the outermost modules with parameters, or all values."""
        given: list[tuple[str, Tensor]] = []
        cuts, watches = self.conditions.wants == "seams", self.conditions.watches
        if not (cuts or watches):
            yield given
            return
        inside: list[nn.Module] = []
        every = itertools.chain(*(each.named_modules() for each in self.computation.reached))
        names = {id(m): n or type(m).__name__ for n, m in every}

        def before(module: nn.Module, inputs: Any) -> None:
            name = names.get(id(module))
            if watches and name:
                given.extend(
                    (f"the input of {name}", leaf.detach().clone())
                    for _, leaf in tensor_leaves(inputs)
                )
            if cuts and (inside or any(True for _ in module.parameters())):
                # No activations are kept inside the outermost module: the backward starts at its
                # output.
                torch.set_grad_enabled(False)
                inside.append(module)

        def after(module: nn.Module, _: Any, output: Any) -> Any:
            name = names.get(id(module))
            if watches and name:
                given.extend((name, leaf.detach().clone()) for _, leaf in tensor_leaves(output))
            if not inside:
                return None
            inside.pop()
            if inside:
                return None
            torch.set_grad_enabled(True)
            return map_tensors(output, leaf_of)

        def leaf_of(value: Tensor) -> Tensor:
            leaf = value.detach()
            vars(leaf).update(vars(value))  # such as a mask that the loss reads
            if leaf.is_floating_point() and leaf.dim():
                given.append((SEAM, leaf.requires_grad_()))
            return leaf

        handles = [
            # Global hooks, so that the order of the caller's own hooks stays the same.
            nn.modules.module.register_module_forward_pre_hook(before),
            nn.modules.module.register_module_forward_hook(after, always_call=True),
        ]
        try:
            yield given
        finally:
            for handle in handles:
                handle.remove()

    # Effects of a pass

    def check_writes(self) -> list[str]:
        """Return names of parameters set by the first forward only, as data-dependent layers do."""
        if moving := self.draws.changed(once=False):
            raise refused_writes(self._index.names_of(moving))
        return self._index.names_of(self.draws.changed(once=True))

    def counting(
        self,
        whole: Reading,
        parts: Reading,
        apart: CutBatch,
        *,
        known: set[tuple[int, str]],
        buffers: bool = False,
    ) -> list[str]:
        """Return names of state that depends on how many forwards process the same rows."""
        new = {
            key: (place, left)
            for key, (place, left) in parts.state.items()
            if key not in known and not place.is_of_metric and (buffers or not place.is_buffer)
            if key not in whole.state or not left.is_like(whole.state[key][1])
        }
        if not new:
            return []
        # Sums over rows, values that only the last call sets, and clock readings do not count.
        # Recorded before the extra forwards, so that each place costs them only once.
        known |= new.keys()
        end = CutBatch.whole(apart.microbatches[-1], apart.sizes[-1])
        alone, again = self.read(end).state, self.read(apart).state
        return [
            place.name
            for key, (place, left) in new.items()
            # A value that only the last call sets is the same after its rows alone.
            if not (key in alone and left.is_like(alone[key][1]))
            and key in again
            and again[key][1].repeats(left)
        ]

    def _foreign(self) -> dict[str, Any]:
        """Return the states of random generators outside torch."""
        python, numpy = foreign_states()
        own = self.computation.reach.generators()
        return {
            "Python's random": python,
            "NumPy's random": numpy,
            "a generator of your own": [
                repr(state_of(each)) for each in own if not isinstance(each, torch.Generator)
            ],
        }

    def _note_foreign(self, before: Mapping[str, Any]) -> None:
        now = self._foreign()
        self.draws.unheld |= {name for name, state in before.items() if now[name] != state}


_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def _pattern(steps: int, shake: int) -> int:
    """Return a mask of bits to flip, up to ``steps`` units in the last place, varying by shake."""
    high = 1 << (steps.bit_length() - 1)
    low = high >> 1 or 1
    return (high, low, high | high >> 1, high | high >> 2, high | high >> 1 | high >> 2)[
        (shake - 1) % 5
    ]


def _without_graph(tensor: Tensor) -> Tensor:
    # The backward of a check would continue into the caller's graph and free it.
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def _joined(outputs: Sequence[Any]) -> dict[str, Tensor]:
    """Join the outputs of all parts by row, or return nothing if they cannot be joined."""
    if not outputs or outputs[0] is None:
        return {}
    # The whole is a single part.
    if len(outputs) == 1:
        return _leaves(outputs[0])
    try:
        return _leaves(concat_rows(outputs))
    except BatchError:  # perhaps only these parts cannot be joined; try leaf by leaf
        first, *others = map(_leaves, outputs)
        found = {}
        for path, leaf in first.items():
            pieces = [leaf, *(each.get(path, leaf[..., :0]) for each in others)]
            are_alike = len({piece.shape[1:] for piece in pieces}) == 1 and leaf.dim() > 0
            found[path] = torch.cat(pieces) if are_alike else leaf
        return found


def _leaves(value: Any) -> dict[str, Tensor]:
    return dict(tensor_leaves(value)) | _texts(value)


def _texts(value: Any, path: str = "") -> dict[str, Tensor]:
    """Return lists of strings and integers by path, as hashes that can be compared."""
    kind = kind_of(type(value))
    if kind is not Kind.SEQUENCE and kind not in STRUCTURES:
        return {}
    keys, parts = open_container(value)
    if kind is Kind.SEQUENCE and parts and {str, int, bool}.issuperset(map(type, parts)):
        return {path: torch.tensor([zlib.crc32(repr(each).encode()) for each in parts])}
    found: dict[str, Tensor] = {}
    for key, part in zip(keys, parts, strict=True):
        found |= _texts(part, join_path(path, key))
    return found


def _add_told(reading: Reading, told: Sequence[Mapping[str, tuple[float, float]]]) -> None:
    """Average the numbers reported to a host, as the host does."""
    for name in told[0] if told else ():
        total = sum(each[name][1] for each in told if name in each)
        # A number that the host reports as the loss is compared as the loss.
        if total and all(name in each for each in told) and name not in reading.as_loss:
            terms = [value * weight / total for value, weight in (each[name] for each in told)]
            reading.numbers[name] = math.fsum(terms)
            reading.raise_scale(name, *terms)
            reading.told.add(name)


def _keep_nothing(_: Tensor) -> None:
    return None


def _refuse_backward(_: None) -> Tensor:
    raise RuntimeError("the forward calls backward itself, but a check keeps no activations")


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Failure of work outside a step."""

    kind: Failure  # out of memory, or an error of the work itself
    error: type[Exception]
    why: str  # its type and first line


def tried(
    work: Callable[[], T],
    device: torch.device | str | None = None,
    *,
    allowed: Collection[Failure] = (Failure.UNRELATED, Failure.RETRYABLE),
) -> T | Failed:
    """Do work outside a step; if it fails, free its memory and return why.

    Raises:
        Exception: a failure that is not allowed, such as a lost device.
        RollbackError: something could not be restored.

    >>> tried(lambda: 1 // 0)
    Failed(kind=<Failure.UNRELATED...>, error=<class 'ZeroDivisionError'>, why='ZeroDivisionError...
    """
    found, failure = caught(work)
    if failure is None:
        return cast(T, found)
    try:
        if isinstance(failure, RollbackError) or not isinstance(failure, Exception):
            raise failure  # state that was not restored is always reported
        kind = classify(failure)
        if kind not in allowed:
            raise failure
        why = next(iter(describe_error(failure).splitlines()))
        # Otherwise the next try would find the memory of this one taken.
        release(failure, device)
        return Failed(kind=kind, error=type(failure), why=why)
    finally:
        del failure  # break the reference cycle with this frame


def _restore(work: Callable[[], object]) -> None:
    """Restore what a check changed, or refuse to go on: a check that fails is passed over."""
    try:
        surely(work)
    except Exception as error:
        if classify(error) is not Failure.RETRYABLE:
            raise
        raise RollbackError(
            f"a check could not restore the state before it ({describe_error(error)}). Resume "
            "from a checkpoint"
        ) from error


def _put_back(captured: Captured, known: set[str]) -> None:
    """Restore everything, and warn once about anything that was not restored."""
    told = set[str]()
    try:
        captured.put_back()
    except RollbackError as error:
        told.add(str(error))
    # The position of an iterator cannot be read, and a forward that reaches one advances it.
    if iterators := [value for value, _ in captured.left_out if hasattr(value, "__next__")]:
        names = captured.names()
        told |= {f"{names[id(e)][0]}: a {type(e).__name__}, may have advanced" for e in iterators}
    if new := sorted(told - known):
        known |= told
        warn(
            f"a check of a few rows could not restore everything ({'; '.join(new)}). Keep state "
            "that a forward writes in buffers, or pass probe=False",
            StateWarning,
        )


@contextlib.contextmanager
def _alone(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let DistributedDataParallel modules, nested ones included, run without other ranks."""
    wrappers = [each for each in modules if isinstance(each, DistributedDataParallel)]
    for each in wrappers:
        # Bypass __setattr__, which would register the model as a submodule of this name.
        vars(each)["forward"] = each.module
    try:
        yield
    finally:
        for each in wrappers:
            del vars(each)["forward"]


@contextlib.contextmanager
def _rows_apart(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let BatchNorm use its running statistics, or pass its input through if it has none."""
    with contextlib.ExitStack() as stack:
        for layer in modules:
            # Averages over rows are known and have their own warning.
            if not isinstance(layer, AnyBatchNorm):
                continue
            # Without running statistics the layer has only those of its batch.
            if layer.running_mean is None:
                vars(layer)["forward"] = nn.Identity().forward
                stack.callback(vars(layer).pop, "forward")
            elif layer.training:
                layer.eval()
                stack.callback(layer.train)
        yield


def _check_own_graph(loss: Tensor, first_node: int) -> None:
    """Refuse a backward through a graph that the caller built before the forward."""
    older = next((node for node in nodes_of(loss) if is_older(node, first_node)), None)
    if older is not None:
        raise LossError(
            f"the loss depends on a graph that was built before the forward ({older.name()}), "
            f"which the backward of each microbatch would run through again; {ONE_GRAPH_EACH}"
        )


def foreign_states() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's generators, for comparison."""
    name, numbers, *rest = np.random.get_state()
    return random.getstate(), (name, np.asarray(numbers).tobytes(), *rest)
