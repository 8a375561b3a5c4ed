"""A check that slices of a part compute the same as the whole. It also reads the loss average."""

# A few rows go through the part in one piece and in two, on the same `Bench` as any computation:
# without a trace, with random draws and BatchNorm held fixed. Differences larger than noise are
# refused by name.

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from automicro.batch.tensors import tensor_leaves
from automicro.checking.bench import Bench, Conditions, Failed, cuts_of, tried
from automicro.checking.draws import CollectiveError
from automicro.checking.reading import LOSS, Reading, relative_errors
from automicro.checking.rows import Forms, telling_rows
from automicro.errors import (
    AutomicroError,
    LossAverageError,
    LossAverageWarning,
    UnsplittableModelError,
    add_note,
    describe_error,
    warn,
)
from automicro.loss.averages import (
    REMEDY,
    Average,
    CutBatch,
    LossAverage,
    Samples,
    Sum,
    Tokens,
    is_declared,
    read_average,
)
from automicro.loss.conventions import TARGET_KEYS, Convention, Output
from automicro.loss.passes import Computation, extra_pass
from automicro.memory.oom import Failure, classify
from automicro.modules import runs_collectives
from automicro.nested.batchnorm import Stages, through_stages
from automicro.nested.slices import Call, aliases_of, marked, refuse_outputs, rows_of
from automicro.reach import Reach
from automicro.sharding import num_ranks
from automicro.torch_private_execution import in_backward, reduction_of, uncheckpointed
from automicro.values import same_values

_ROWS = (4, 2)  # rows of one comparison; fewer if memory runs out
_NOISE = 1e-2  # relative to the value: noise of this size hides differences between slices
_ROUNDINGS = 32
_FACTOR = 1024.0  # for gradients; a power of two, so it causes no rounding
_SLACK = 1e-2
_STAGED = 1e-3  # stages lose fewer digits of large means than the forward


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Facts about a part, found by comparing its slices with the whole."""

    # The average of its loss; None if the part returns outputs.
    averages: Mapping[str, Average] | None = None
    is_told: bool = False  # whether the average was read from torch's own reduction
    # Whether its gradients scale with the incoming gradient. Hooks that clamp gradients, and half
    # precision inside the part, depend on the size of the incoming gradient.
    is_proportional: bool = True
    is_over: bool = True  # whether rows were compared
    # Names of state that depends on the number of slices.
    counting: Sequence[str] = ()

    def watch(self, call: Call) -> Call:
        """Return the call with a check that each slice reduces its loss as the checked rows did."""
        if self.averages is None or not self.is_told:
            return call
        average = self.averages[""]

        def watched(rows: Mapping[str, Any], tensors: Sequence[Tensor] | None) -> Any:
            loss = call.compute(rows, tensors)
            if loss.requires_grad:
                now = _told(loss, rows, call.layout.num_rows(rows))
                if now is None or not _is_like(now, average):
                    raise LossAverageError(
                        f"the loss of a part was {average.describe()} but that of this slice is "
                        f"not, so slices do not add up; {REMEDY}"
                    )
            return loss

        return replace(call, compute=watched)


class Check:
    """Compares rows of a part at calls 1, 2, 4, 8 …, and when arguments have a new form."""

    def __init__(self, declared: LossAverage) -> None:
        self._declared = declared
        self._forms = Forms()
        self._known: Checked | None = None
        self._is_due = False

    def __call__(self, call: Call, stages: Stages | None = None) -> Checked:
        """Compare a few rows of a call if a comparison is due, and return the known facts."""
        if call.is_dry:
            return _dry(call)
        known = self._known
        if known is not None and in_backward():
            return known  # a recomputation in the backward
        is_new = stages is not None and not stages.is_checked
        # Stays due after an error, because a check around this call might have caught it.
        self._is_due |= self._forms.is_due(call.batch) or is_new
        # Rows without a finite loss prove nothing, so the next call is checked, too.
        if known is not None and known.is_over and not self._is_due:
            return known
        for most in _ROWS:
            is_allowed = known is not None or most > _ROWS[-1]
            found = tried(
                functools.partial(self._compare, call, stages, most),
                call.device,
                allowed=(Failure.RETRYABLE,) if is_allowed else (),
            )
            if not isinstance(found, Failed):
                known = self._known = found
                break
        assert known is not None
        self._is_due = False
        return known

    def _compare(self, call: Call, stages: Stages | None, most: int) -> Checked:
        part = _Part(call, self._declared)
        if num_ranks() > 1 and runs_collectives(part.modules):
            raise UnsplittableModelError(_COLLECTIVE)
        pieces = telling_rows(call.layout, call.batch, call.num_rows, most=most)
        try:
            # With gradients also in evaluation, because the graph shows what a loss averages over.
            with uncheckpointed(), torch.inference_mode(False):
                together, apart = cuts_of(call.layout, call.batch, pieces)
                checked = part.compare(together, apart)
                if stages is not None and checked.averages is None:
                    part.compare_stages(together, stages)
                return checked
        except CollectiveError:
            raise UnsplittableModelError(_COLLECTIVE) from None
        except Exception as error:
            if classify(error) is Failure.UNRELATED and not isinstance(error, AutomicroError):
                add_note(error, _HINT)
            raise


def _dry(call: Call) -> Checked:
    """Return the facts for tensors without data, which have no values to compare."""
    still = call.standing.leaving_no_trace()
    with still, extra_pass(), uncheckpointed(), torch.no_grad():
        output = call.compute(call.layout.take_rows(call.batch, [0, 1]), ())
    return Checked(averages=_averages("samples") if is_loss(output) else None)


class _Part(Convention):
    """The convention that turns rows into a part's loss, so that a bench can compare slices."""

    def __init__(self, call: Call, declared: LossAverage) -> None:
        self._sliced, self._declared = call, declared
        self._gives_loss, self._has_read, self._is_proportional = False, False, True
        self._told: Average | None = None  # read from the last operation of its loss
        self._counting: Sequence[str] = ()
        roots = call.standing.roots
        self.modules = [each for each in roots.values() if isinstance(each, nn.Module)]

    def _bench(self, conditions: Conditions, convention: Convention | None = None) -> Bench:
        call, averages = self._sliced, _averages("none")
        # Not stored, because it holds this convention: a reference cycle would keep the batch and
        # its graph alive.
        computation = Computation(
            modules=self.modules or [nn.Identity()],
            convention=convention or self,
            averages=averages,
            layout=call.layout,
            device=call.device,
            roots=call.standing.roots,
            reach=Reach(call.standing.roots),
        )
        return Bench(computation, conditions)

    def train(self, model: nn.Module, microbatch: Any) -> Output:
        """Read the average of the loss from its graph, and release the graph."""
        leaves = tensor_leaves(microbatch)
        real = [path for path, leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
        # Real inputs require gradients, so that the loss has a graph even if all layers are frozen.
        rows, inputs = marked(microbatch, real)
        aliases = aliases_of(self._sliced.parameters)
        loss = self._sliced.compute(rows, aliases)
        if loss.requires_grad and not self._has_read:
            self._has_read = True
            needing = set(self._sliced.inputs())
            wanted = [leaf for path, leaf in zip(real, inputs, strict=True) if path in needing]
            # If no input needs a gradient, the smallest parameter reveals the graph as well.
            wanted = wanted or [min(aliases or inputs, key=Tensor.numel)]
            self._is_proportional = _is_proportional(loss, wanted)
            self._told = _told(loss, microbatch, self._sliced.layout.num_rows(microbatch))
        return Output(loss.detach(), {}, None)

    def predict(self, model: nn.Module, microbatch: Any, **_: Any) -> Any:
        output = self._sliced.compute(microbatch, ())
        self._gives_loss = is_loss(output)
        if not self._gives_loss:
            rows_of(output, self._sliced.layout.num_rows(microbatch))
        return {path: e if e.dim() else e[None] for path, e in tensor_leaves(output)}

    def targets(self, batch: Any) -> Any:
        return _targets_of(batch)

    def compare(self, together: CutBatch, apart: CutBatch) -> Checked:
        """Compare outputs of some rows, or losses weighted by what they average over."""
        with self._bench(Conditions(mode="predict", wants="outputs", notes_state=True)) as bench:
            whole = bench.read(together)
            if whole.written:
                raise UnsplittableModelError(
                    f"a part with its own size writes into its input {min(whole.written)!r}, so a "
                    "slice can neither be rolled back nor recomputed. Let it compute a new "
                    "tensor: relu(x) and not relu_(x), nn.ReLU() and not nn.ReLU(inplace=True) as "
                    "its first layer"
                )
            if self._gives_loss:
                bench.conditions = Conditions(notes_state=True)
                return self._compare_losses(bench, together, apart)
            if self._is_hidden(bench, together, whole):
                warn(_HIDDEN, LossAverageWarning)
            elif found := self._differences(bench, together, apart, whole):
                refuse_outputs(next(iter(found)), "other values in slices than as a whole")
            return Checked(counting=self._counting)

    def compare_stages(self, together: CutBatch, stages: Stages) -> None:
        """Refuse stages that differ from the forward that they were traced from."""
        traced = _Traced(self._sliced, stages)
        # BatchNorm turns rows that differ by little into differences that are mostly rounding.
        given = Conditions(batchnorm=True, shakes_rows=True, notes_state=True)
        with self._bench(given, traced) as bench:
            try:
                staged = bench.read(together)
            except Exception as error:
                if classify(error) is not Failure.UNRELATED or isinstance(error, AutomicroError):
                    raise
                stages.refuse(f"its trace by torch.fx fails ({describe_error(error)})")
            traced.stages = None  # the forward also measures chance
            drawn, bench.draws.drawn = bench.draws.drawn, set()
            whole = bench.read(together)
            for key, (place, left) in whole.state.items():
                if key not in staged.state or not left.is_like(staged.state[key][1]):
                    stages.refuse(f"its forward changes {place.name!r}, and a trace does not")
            found, blind = bench.compare(together, whole, staged)
            # BatchNorm over two values turns rounding into other gradients.
            is_off = max(found.values(), default=0.0) > _STAGED and not any(blind)
            if is_off or bench.draws.drawn != drawn:
                kind = "dropout" if not is_off else "result" if LOSS in found else "gradient"
                stages.refuse(
                    f"its trace by torch.fx gives another {kind} than its forward. A trace leaves "
                    "out torch.no_grad(), autocast, and attributes that are set for a while, such "
                    "as a mode of a layer"
                )
        stages.is_checked = True

    def _compare_losses(self, bench: Bench, together: CutBatch, apart: CutBatch) -> Checked:
        whole, is_given = bench.read(together), is_declared(self._declared)
        told = None if is_given else self._told
        averages = _averages(self._declared) if told is None else {"": told}
        is_known = is_given or told is not None
        is_finite = math.isfinite(whole.numbers[LOSS])
        if is_finite and self._is_hidden(bench, together, whole):
            if not is_known:
                raise LossAverageError(f"{_HIDDEN}; {REMEDY}")
            warn(_HIDDEN, LossAverageWarning)
        elif not is_known:
            raise LossAverageError(
                "the loss of a part does not end in torch's mean or sum over its rows or targets, "
                f"so it is unknown how the losses of slices add up; {REMEDY}"
            )
        elif is_finite and not self._fits(bench, together, apart, averages):
            named = f" with loss_average={self._declared!r}" * is_given
            raise LossAverageError(
                f"the losses of slices of a part do not add up to its loss{named}; {REMEDY}"
            )
        return Checked(
            averages=averages,
            is_told=told is not None,
            is_proportional=self._is_proportional,
            is_over=is_finite,
            counting=self._counting,
        )

    def _is_hidden(self, bench: Bench, together: CutBatch, whole: Reading) -> bool:
        """Whether random noise is large enough to hide differences."""
        noise = whole.distances(bench.read(together, shake=1))
        most = max(_NOISE, _ROUNDINGS * bench.rounding[1])
        return any(gap > most * whole.scales.get(name, 0.0) for name, gap in noise.items())

    def _fits(
        self, bench: Bench, together: CutBatch, apart: CutBatch, averages: Mapping[str, Average]
    ) -> bool:
        """Whether the losses of slices add up with these weights."""
        bench.computation = replace(bench.computation, averages=averages)
        whole = bench.read(together)
        # An average that counts nothing would turn any loss into zero, and zeros always add up.
        is_there = math.isclose(whole.numbers[LOSS], whole.each[0], rel_tol=0.1)
        return is_there and not self._differences(bench, together, apart, whole)

    def _differences(
        self, bench: Bench, together: CutBatch, apart: CutBatch, whole: Reading
    ) -> dict[str, float]:
        """Return what differs in slices, after noting the state that counts them."""
        parts = bench.read(apart)
        self._counting = bench.counting(whole, parts, apart, known=set(), buffers=True)
        return bench.compare(together, whole, parts)[0]


class _Traced(Convention):
    """The convention that makes a loss of a part's outputs, computed by its forward or stages."""

    def __init__(self, call: Call, stages: Stages | None) -> None:
        self._sliced, self.stages = call, stages

    def train(self, model: nn.Module, microbatch: Any) -> Output:
        call = self._sliced
        if self.stages is None:
            output = call.compute(microbatch, ())
        else:
            num_rows = call.layout.num_rows(microbatch)
            halves = num_rows - num_rows // 2, num_rows // 2
            output = through_stages(replace(call, batch=microbatch), self.stages, halves)
        leaves = [leaf for _, leaf in tensor_leaves(output) if leaf.is_floating_point()]
        # Weighted, because BatchNorm gives a plain sum no gradient.
        weights = (torch.linspace(1, 2, each.numel(), device=each.device) for each in leaves)
        terms = [(each.flatten() * w).sum() for each, w in zip(leaves, weights, strict=True)]
        return Output(torch.stack(terms).sum(), {}, None)


def _targets_of(batch: Mapping[str, Any]) -> Tensor:
    """Return the targets among the arguments of a tail: by name, or else the last integer tensor.

    >>> _targets_of({"hidden": torch.ones(2, 3), "target": torch.tensor([1, 2])}).tolist()
    [1, 2]
    """
    leaves = tensor_leaves(batch)
    if not leaves:
        raise LossAverageError(f"a tail got no tensor that could be its targets; {REMEDY}")
    for name in TARGET_KEYS:
        if isinstance(batch.get(name), Tensor):
            return cast(Tensor, batch[name])
    # Among integer tensors, those with the most dimensions: lengths have only one.
    whole = [each for _, each in leaves if each.dim() and _is_whole(each)]
    most = max((each.dim() for each in whole), default=0)
    return next((each for each in reversed(whole) if each.dim() == most), leaves[-1][1])


def _is_whole(leaf: Tensor) -> bool:
    return not leaf.is_floating_point() and leaf.dtype is not torch.bool


def _averages(declared: LossAverage) -> Mapping[str, Average]:
    return read_average(
        declared, loss_fn=None, model=nn.Identity(), targets=_targets_of, reads_model=False
    )


def is_loss(output: Any) -> bool:
    """Whether an output is a tensor without dimensions."""
    return isinstance(output, Tensor) and output.dim() == 0


def _is_proportional(loss: Tensor, wanted: Sequence[Tensor]) -> bool:
    found = []
    try:
        for factor in (1.0, _FACTOR):
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                loss, wanted, loss.new_tensor(factor), retain_graph=True, allow_unused=True
            )
            named = {str(at): e / factor for at, e in enumerate(gradients) if e is not None}
            found.append(Reading(gradients=named))
    except Exception as error:
        if classify(error) is Failure.RETRYABLE:
            raise
        return True  # the graph allows only one backward
    return max(relative_errors(found[1], found[0]).values(), default=0.0) <= _SLACK


def _told(loss: Tensor, rows: Mapping[str, Any], num_rows: int) -> Average | None:
    """Return the average that torch's own reduction computed, if the loss is one."""
    reduction = reduction_of(loss)
    if reduction is None:
        return None
    if reduction.kind == "sum":
        return Sum()
    if reduction.targets is None:
        return Samples() if reduction.shape[:1] == (num_rows,) else None
    given = _targets_of(rows)
    if given.is_floating_point() or not _holds_same(reduction.targets, given):
        return None
    ignored, weight = reduction.ignore_index, reduction.class_weight
    return Tokens(_targets_of, ignore_index=ignored, class_weight=weight, reads=True)


def _is_like(one: Average, other: Average) -> bool:
    names = "ignore_index", "class_weight"
    facts = [[type(each), *(getattr(each, e, None) for e in names)] for each in (one, other)]
    return same_values(*facts)


def _holds_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values in order; shared memory is not read."""
    if one.numel() != other.numel():
        return False
    is_view = one.data_ptr() == other.data_ptr() and one.is_contiguous() and other.is_contiguous()
    return is_view or torch.equal(one.flatten(), other.flatten().to(one))


_HINT = (
    "automicro: this was a check of a few rows of a part with its own size. If an argument holds "
    "no rows, declare it, as in batch_layout={'mask': 'shared'}"
)
_HIDDEN = (
    "automicro could not check that slices of a part compute the same as the whole: the same rows "
    "give different values each time"
)
_COLLECTIVE = (
    "a part with its own size communicates with other ranks in its forward (SyncBatchNorm, or "
    "sharded parameters), but ranks may cut it into different numbers of slices. Let the part "
    "begin after such layers, or end before them"
)
