"""A look at a few rows of a part: what it gives, and that slices of it are the same.

Nothing tells from outside what a part is. So before it is cut, a few rows go through it whole and
in two uneven pieces, without a trace: in evaluation mode, without gradients, with buffers and
random numbers put back.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from automicro.batch.device import on_host
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.batchnorm import sees_the_batch
from automicro.errors import (
    AutomicroError,
    LossAverageError,
    LossAverageWarning,
    UnsplittableModelError,
    add_note,
    warn,
)
from automicro.loss.averages import (
    IGNORED,
    REMEDY,
    Average,
    CutBatch,
    LossAverage,
    candidates,
    is_declared,
    read_average,
)
from automicro.loss.conventions import TARGET_KEYS
from automicro.loss.passes import extra_pass
from automicro.loss.weights import BatchWeights
from automicro.memory.oom import Failure, classify, ignoring_errors, release
from automicro.modules import evaluation_mode, runs_collectives
from automicro.nested.slices import Call, Unwritten, aliases_of, marked, tolerance_of
from automicro.sharding import num_ranks
from automicro.torch_private import AnyBatchNorm, uncheckpointed
from automicro.transaction.leaves import nodes_of
from automicro.values import same_values

ROWS = (4, 3, 2)
"""How many rows are looked at; fewer where memory runs out."""

_MOST_ENDS = 8
_FACTOR = 1024.0  # of gradients, which rounds nothing
_MORE_DRAWS = 6  # of numbers that may make no difference
_MOST_VARIED = 8  # masks and lengths
_TOO_FEW = 2  # rows, of which none may count for nothing
_ABSENT = (0.0, -1.0, -100.0, -999.0, float("nan"))  # what stands for a value that is not there
_NAMES = ("samples", "tokens", "none")
_NO_ROOM = (
    "there was memory to look at two rows of a part alone, which do not show whether its loss "
    "leaves rows or values out of its mean; declare what it averages over, with the loss_average "
    "of the part"
)


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What is known of a part.

    Attributes:
        averages: what its loss averages over; None where it gives outputs and no loss.
        is_sure: whether another look would show nothing new.
        ends: last targets of rows that were seen: one of them may stand for no target.
        shows_counts: whether there were rows enough to see what may count for nothing, or nobody
            can see that.
        is_proportional: whether its gradient grows as that from behind does. A hook that clamps
            gradients, or half precision inside of the part, has to know what comes from there.
    """

    averages: Mapping[str, Average] | None
    is_sure: bool
    ends: frozenset[int] = frozenset()
    shows_counts: bool = True
    is_proportional: bool = True

    def holds_for(self, num_rows: int) -> bool:
        """Whether a call of so many rows can show no more than those that were looked at."""
        return self.shows_counts or num_rows <= _TOO_FEW


def look(
    call: Call, modules: Sequence[nn.Module], declared: LossAverage, known: Looked | None
) -> Looked:
    """Look at a few rows of a call.

    Args:
        call: of the part.
        modules: of the part.
        declared: what its loss is said to average over, or ``"auto"``.
        known: from earlier calls.

    Raises:
        LossAverageError: the losses of slices do not add up as declared, or in no known way.
        UnsplittableModelError: slices give other outputs than the whole.
        BaseException: not even two rows fit without gradients.

    Warns:
        LossAverageWarning: it could not be seen that slices are the same.
    """
    num_rows = call.layout.num_rows(call.batch)
    if call.is_dry:  # only what a part gives can be seen; what slices count makes no difference
        with _without_trace(call):
            few = call.layout.take_rows(call.batch, list(range(min(2, num_rows))))
            gives_loss = _is_loss(call.compute(few, ()))
        averages = read_average(
            "samples", loss_fn=None, model=nn.Identity(), targets=targets_of, reads_model=False
        )
        return Looked(averages=averages if gives_loss else None, is_sure=False)
    counts = _counts(call.batch, num_rows)
    lengths = _lengths(call.batch, num_rows)
    ends = frozenset() if counts is None else _ends(call.batch)
    are_alike = all(each is None or len(set(each)) == 1 for each in (counts, lengths))
    if known is not None and are_alike and ends <= known.ends and known.holds_for(num_rows):
        return known  # these rows show nothing new
    ends |= frozenset() if known is None else known.ends
    differentiates = torch.is_grad_enabled()
    failure: BaseException | None = None
    for most in ROWS:
        trace = _Trace()
        try:
            with _without_trace(call, trace):
                rows = _telling(num_rows, most, lengths if counts is None else counts)
                looking = _Look(call, modules, rows, declared, ends)
                found = looking.judge(differentiates=differentiates)
                has_seen = lengths is None or len({lengths[row] for row in rows}) > 1
                is_loss = found.averages is not None
                shows_counts = num_rows > _TOO_FEW or not is_loss
                if is_loss and shows_counts and most <= _TOO_FEW and not is_declared(declared):
                    warn(_NO_ROOM, LossAverageWarning)
                return replace(
                    found,
                    ends=ends,
                    is_sure=found.is_sure and has_seen,
                    shows_counts=shows_counts,
                    is_proportional=looking.is_proportional,
                )
        except Exception as error:
            if classify(error) is not Failure.RETRYABLE:
                if not isinstance(error, AutomicroError):
                    add_note(
                        error,
                        "automicro: this was a look at a few rows of a part with a size of its "
                        "own; where an argument holds no rows, say so, as in "
                        "batch_layout={'mask': 'shared'}",
                    )
                raise
            # What could not be put back is the attempt's to undo.
            if most == ROWS[-1] or num_rows <= 2 or trace.is_left:
                raise
            failure = error
        try:
            release(failure, call.device)
        finally:
            failure = None  # it holds this frame: a cycle
    raise AssertionError


@dataclass
class _Trace:
    """Whether a look has left anything as it was not before."""

    is_left: bool = False


@contextlib.contextmanager
def _without_trace(call: Call, trace: _Trace | None = None) -> Iterator[None]:
    undo = call.undoing()
    undo.begin()
    trace = trace or _Trace()
    trace.is_left = True
    try:
        with extra_pass(), uncheckpointed(), torch.no_grad():
            yield
    finally:
        undo.roll_back()
        trace.is_left = False


class _Look:
    """The outputs for a few rows, whole and in two pieces."""

    def __init__(
        self,
        call: Call,
        modules: Sequence[nn.Module],
        indices: Sequence[int],
        declared: LossAverage,
        ends: Iterable[int],
    ) -> None:
        self._call, self._modules, self._declared = call, modules, declared
        self._ends = ends
        self.is_proportional = True
        self._class_weights: list[Tensor] = []
        self._knows_targets = True
        self._rows = call.layout.take_rows(call.batch, indices)
        self._needing = set(call.inputs())  # such are computed, and hold no absent values
        self._sizes = [1, len(indices) - 1]

    def judge(self, *, differentiates: bool) -> Looked:
        """What the part is.

        Args:
            differentiates: whether its gradients are wanted.

        Raises:
            LossAverageError, UnsplittableModelError: as `look`.
        """
        if num_ranks() > 1 and runs_collectives(self._modules):
            raise UnsplittableModelError(
                "a part with a size of its own communicates with other ranks in its forward "
                "(SyncBatchNorm, or sharded parameters), and ranks may cut it into different "
                "numbers of slices; let the part begin behind such layers, or end before them"
            )
        self._refuse_memory()
        if differentiates:
            self._read_graph()
        first, again, has_drawn = self._compute_twice()
        is_tail = _is_loss(first)
        averages_over_rows = any(isinstance(each, AnyBatchNorm) for each in self._all_modules())
        if averages_over_rows or has_drawn or not _is_same(first, again, tolerance=0.0):
            with evaluation_mode(self._modules), self._with_statistics():
                first, again, has_drawn = self._compute_twice()
                more = [self._compute(self._rows) for _ in range(_MORE_DRAWS * has_drawn)]
                # Parts inside may be cut otherwise the second time, which rounds otherwise.
                coarse = max((tolerance_of(leaf) for _, leaf in tensor_leaves(first)), default=0.0)
                is_same = all(_is_same(first, each, tolerance=coarse) for each in (again, *more))
                if _is_loss(first) != is_tail or not is_same:
                    return self._unseen(is_tail)
                return self._judge_loss() if is_tail else self._judge_outputs(first)
        return self._judge_loss() if is_tail else self._judge_outputs(first)

    def _refuse_memory(self) -> None:
        """Refuse a forward that reads what an earlier one wrote: slices would be further ones.

        Raises:
            UnsplittableModelError: it does, as that of spectral norm.
        """
        random = self._call.random()
        random.begin()
        with self._call.leaving_no_trace():
            before = self._call.state.take()
            first = self._compute(self._rows)
            changed = [path.partition(".")[2] for path in before.changed()]
            if not changed:
                return
            random.put_back()
            if _is_same(first, self._compute(self._rows), tolerance=0.0):
                return
        with self._call.leaving_no_trace():
            again = self._compute(self._rows)
        if not _is_same(first, again, tolerance=0.0):
            return  # other values each time, whatever stands there
        raise UnsplittableModelError(
            "a part with a size of its own reads what its own forward changes "
            f"({', '.join(changed[:4])}): each slice would change them once more; put layers with "
            "spectral norm into evaluation mode (.eval()), change such things outside of the "
            "part, or let it begin behind them"
        )

    def _read_graph(self) -> None:
        """See what the operations behind a loss know of targets: class weights, or their own rules.

        Raises:
            UnsplittableModelError: a gradient would be lost.
        """
        call = self._call
        with torch.inference_mode(False), torch.enable_grad():
            given = map_tensors(self._rows, lambda leaf: leaf.detach().clone())
            rows, leaves = marked(given, list(call.inputs()))
            aliases = aliases_of(call.parameters)
            output = call.compute(rows, aliases)
        if not _is_loss(output):
            return
        if output.requires_grad:
            wanted = leaves or [min(aliases, key=lambda each: each.numel())]
            self.is_proportional = _is_proportional(output, wanted)
        for node in nodes_of(output):
            weight = getattr(node, "_saved_weight", None)
            if node.name().startswith("NllLoss") and isinstance(weight, Tensor):
                self._class_weights.append(weight)
            if node.name().startswith("CtcLoss"):
                self._knows_targets = False  # it reads beyond its input for those it does not know

    def _all_modules(self) -> Iterator[nn.Module]:
        return (each for root in self._modules for each in root.modules())

    @contextlib.contextmanager
    def _with_statistics(self) -> Iterator[None]:
        """Some for each BatchNorm that has none, where slices do not change what it sees."""
        layers: list[Any] = []
        if self._call.is_exact:
            layers = [each for each in self._all_modules() if sees_the_batch(each)]
        for layer in layers:
            like = next(iter(layer.parameters()), torch.empty(0, device=self._call.device))
            layer.running_mean = like.new_zeros(layer.num_features)
            layer.running_var = like.new_ones(layer.num_features)
        try:
            yield
        finally:
            for layer in layers:
                layer.running_mean = layer.running_var = None

    def _compute(self, rows: Any) -> Any:
        given = map_tensors(rows, lambda leaf: leaf.detach().clone())
        inputs = Unwritten(given)
        output = self._call.compute(given, ())
        inputs.check()
        return output

    def _compute_twice(self) -> tuple[Any, Any, bool]:
        """Two outputs, and whether numbers were drawn: they may be the same by chance."""
        random = self._call.random()
        with on_host():
            random.begin()
        first = self._compute(self._rows)
        with on_host():
            has_drawn = random.has_moved
        return first, self._compute(self._rows), has_drawn

    def _averages(self, declared: LossAverage) -> Mapping[str, Average]:
        return read_average(
            declared, loss_fn=None, model=nn.Identity(), targets=targets_of, reads_model=False
        )

    def _unseen(self, is_tail: bool) -> Looked:
        if not is_tail:
            averages = None
        elif is_declared(self._declared):
            averages = self._averages(self._declared)
        else:
            raise LossAverageError(
                "what the loss of a part averages over cannot be seen: in evaluation mode it gives "
                f"no loss, or another one each time; {REMEDY}"
            )
        warn(
            "it could not be seen that slices of a part compute the same as the whole: in "
            "evaluation mode it gives something else than in training, or other values each time",
            LossAverageWarning,
        )
        return Looked(averages=averages, is_sure=True)

    def _judge_outputs(self, whole: Any) -> Looked:
        parts = [self._compute(rows) for rows in self._split(self._rows)]
        self._check_rest(whole, parts)
        pieces = [[leaf for _, leaf in tensor_leaves(part)] for part in parts]
        for (path, leaf), *cut in zip(tensor_leaves(whole), *pieces, strict=False):
            num_rows = self._call.layout.num_rows(self._rows)
            shape = f"a tensor of shape {tuple(leaf.shape)} for {num_rows} rows"
            if leaf.dim() == 0 or any(each.dim() != leaf.dim() for each in cut):
                self._refuse(path, shape)
            if any(each.shape[1:] != cut[0].shape[1:] for each in cut):
                self._refuse(path, shape)
            joined = torch.cat(cut)
            if not _is_same(leaf, joined, tolerance=tolerance_of(leaf)):
                values = "other values in slices than in the whole"
                self._refuse(path, values if len(leaf) == num_rows else shape)
        return Looked(averages=None, is_sure=True)

    def _check_rest(self, whole: Any, parts: Sequence[Any]) -> None:
        """Refuse outputs that cannot be put together again."""
        if not tensor_leaves(whole):
            self._refuse("", f"no tensor but {type(whole).__name__}")
        mark = torch.zeros(())
        rest = map_tensors(whole, lambda _: mark)
        for part in parts:
            if not same_values(rest, map_tensors(part, lambda _: mark)):
                self._refuse("", "beside tensors something that is another one for each slice")

    def _refuse(self, path: str, what: str) -> NoReturn:
        named = f" {path!r}" if path else ""
        raise UnsplittableModelError(
            f"a part with a size of its own gives{named} {what}, so it computes something over "
            "rows and cannot be cut; give a size to a part that computes each row by itself and "
            "gives rows in dimension 0 (the states of an LSTM have none there; a loss is a tensor "
            "without any dimension, and the only output)"
        )

    def _split(self, rows: Any) -> list[Any]:
        return self._call.layout.split(rows, self._sizes)

    def _judge_loss(self) -> Looked:
        losses = [self._losses(self._rows)]
        for changed in self._variants():
            with ignoring_errors():  # targets that it does not know
                losses.append(self._losses(changed))
        if not bool(torch.isfinite(losses[0][1])):
            declared = self._declared if is_declared(self._declared) else "tokens"
            return Looked(averages=self._averages(declared), is_sure=False)
        losses = [each for each in losses if bool(torch.isfinite(each[1]))]
        more = [] if callable(self._declared) else self._with_absent_values()
        if is_declared(self._declared):
            averages = self._averages(self._declared)
            if not self._adds_up(averages, [*losses, *more]):
                found = self._which(losses) if not self._adds_up(averages, losses) else None
                hint = f"; it is {found}" if found else f"; {REMEDY}"
                raise LossAverageError(
                    f"the losses of slices of a part do not add up to its loss with "
                    f"loss_average={self._declared!r}{hint}"
                )
            return Looked(averages=averages, is_sure=True)
        matching = [
            name
            for name in _NAMES
            if self._can(name) and self._adds_up(self._averages(name), losses)
        ]
        found = None if matching else self._which(losses)
        matching = [name for name in matching if self._adds_up(self._averages(name), more)]
        if not matching:
            hint = f"pass loss_average={found}" if found else REMEDY
            if more and not found:
                hint += " (it may leave values such as 0, -1 or NaN out of its mean)"
            raise LossAverageError(
                "the losses of slices of a part add up to its loss neither as a mean over samples "
                f"or targets nor as a sum, so that it cannot be cut as it is; {hint}"
            )
        name = "tokens" if "tokens" in matching else matching[0]
        return Looked(averages=self._averages(name), is_sure=len(matching) == 1)

    def _with_absent_values(self) -> list[tuple[Any, Tensor, Sequence[Tensor]]]:
        """Losses of rows of which one has numbers that often stand for a value that is not there.

        A loss may leave these out of its mean, and a batch without any does not show it.
        """
        losses: list[tuple[Any, Tensor, Sequence[Tensor]]] = []
        for changed in _with_absent(self._rows, self._needing):
            with ignoring_errors():  # values that it does not know
                each = self._losses(changed)
                if bool(torch.isfinite(each[1])):
                    losses.append(each)
        return losses

    def _variants(self) -> Iterator[Any]:
        yield from _with_other_counts(self._rows)
        yield from _with_other_weights(self._rows)
        if self._knows_targets:
            extremes = {int(at) for w in self._class_weights for at in (w.argmin(), w.argmax())}
            yield from _with_fewer_targets(self._rows, {*self._ends, *extremes})

    def _losses(self, rows: Any) -> tuple[Any, Tensor, Sequence[Tensor]]:
        """Rows, their loss, and those of their slices; all wait on the host, as there are many."""
        found = [self._compute(each).detach() for each in (rows, *self._split(rows))]
        with on_host():
            whole, *parts = map(_to_host, found)
            return rows if rows is self._rows else map_tensors(rows, _to_host), whole, parts

    def _can(self, name: str) -> bool:
        return name != "tokens" or _integers(self._rows) is not None

    def _which(self, losses: Sequence[tuple[Any, Tensor, Sequence[Tensor]]]) -> str | None:
        """What a user would declare, in code."""
        for candidate in candidates(self._rows, cast(Any, SimpleNamespace(targets=targets_of))):
            with ignoring_errors():  # one that does not apply
                if self._adds_up(self._averages(candidate.value), losses):
                    return candidate.code
        return None

    def _adds_up(
        self,
        averages: Mapping[str, Average],
        losses: Sequence[tuple[Any, Tensor, Sequence[Tensor]]],
    ) -> bool:
        for rows, whole, parts in losses:
            cut = CutBatch(batch=rows, microbatches=self._split(rows), sizes=self._sizes)
            try:
                weights = BatchWeights(averages, [cut])
                summed = [weights.apply(index, loss, {})[0] for index, loss in enumerate(parts)]
            except Exception as error:
                if rows is self._rows or classify(error) is not Failure.UNRELATED:
                    raise
                continue  # a count of the caller's that does not know a changed target
            if not _is_same(whole, torch.stack(summed).sum(), tolerance=tolerance_of(whole)):
                return False
        return True


def targets_of(batch: Mapping[str, Any]) -> Tensor:
    """The targets among the arguments of a tail: by name, else the last tensor of whole numbers.

    >>> targets_of({"hidden": torch.ones(2, 3), "target": torch.tensor([1, 2])}).tolist()
    [1, 2]
    """
    for name in TARGET_KEYS:
        if isinstance(batch.get(name), Tensor):
            return cast(Tensor, batch[name])
    integers = _integers(batch)
    if integers is not None:
        return integers
    leaves = tensor_leaves(batch)
    if not leaves:
        raise LossAverageError(f"a tail was given no tensor that could be its targets; {REMEDY}")
    return leaves[-1][1]


def _integers(batch: Any) -> Tensor | None:
    """The last tensor of whole numbers with the most dimensions: lengths have one."""
    found = [
        leaf
        for _, leaf in tensor_leaves(batch)
        if leaf.dim() and not leaf.is_floating_point() and leaf.dtype is not torch.bool
    ]
    most = max((leaf.dim() for leaf in found), default=0)
    return next((leaf for leaf in reversed(found) if leaf.dim() == most), None)


def _counts(batch: Any, num_rows: int) -> list[int] | None:
    """How many targets of each row count; None where there are none."""
    targets = targets_of(batch) if tensor_leaves(batch) else None
    if targets is None or targets.is_floating_point() or targets.shape[:1] != (num_rows,):
        return None
    counted: list[int] = (targets != IGNORED).reshape(num_rows, -1).sum(1).tolist()
    return counted


def _lengths(batch: Any, num_rows: int) -> list[int] | None:
    """Elements of the tensors that each row has in lists, such as boxes; None where there are none.

    Rows alike in them do not show whether a loss is a mean over them.
    """
    lists = [
        value
        for value in batch.values()
        if isinstance(value, list) and len(value) == num_rows and tensor_leaves(value)
    ]
    if not lists:
        return None
    return [
        sum(leaf.numel() for value in lists for _, leaf in tensor_leaves(value[row]))
        for row in range(num_rows)
    ]


def _telling(num_rows: int, most: int, counts: Sequence[int] | None) -> list[int]:
    """Rows of which as many differ as may be, the first in a piece of its own."""
    if counts is None:
        return list(range(min(num_rows, most)))
    order = sorted(range(num_rows), key=lambda row: counts[row])
    fewest = next((row for row in order if counts[row]), order[0])
    others = [row for row in reversed(order) if row != fewest]
    return [fewest, *others[: most - 1]]


def _with_fewer_targets(rows: Any, ends: Iterable[int]) -> Iterator[Any]:
    """The same rows, of which one has other targets, that may stand for none.

    On an accelerator a target that a loss does not know may end the process.
    """
    targets = _integers(rows)
    if targets is None or not targets.numel():
        return
    values = {*ends, *((0,) if targets.dim() > 1 else ())}
    if targets.device.type == "cpu":
        values |= {IGNORED, 0}
    for value in sorted(values):
        changed = targets.clone()
        if targets.dim() > 1:
            first = changed[0].reshape(-1)
            first[first.numel() // 2 :] = value
            changed[0] = first.reshape(changed[0].shape)
        else:
            changed[-1] = value
        yield map_tensors(rows, functools.partial(_in_place_of, targets, changed))


def _with_other_counts(rows: Any) -> Iterator[Any]:
    """The same rows, of which one has fewer ones in a mask, or a smaller length.

    A loss may be divided by them, and a batch in which all rows are alike does not show it.
    """
    targets = _integers(rows)
    leaves = [each for _, each in tensor_leaves(rows) if each.dim() and each is not targets]
    for leaf in leaves[:_MOST_VARIED]:
        changed = _fewer(leaf.detach())
        if changed is not None:
            yield map_tensors(rows, functools.partial(_in_place_of, leaf, changed))


def _with_other_weights(rows: Any) -> Iterator[Any]:
    """The same rows, of which one has smaller weights, where all rows have the same.

    A loss may be divided by the sum of them.
    """
    for _, leaf in tensor_leaves(rows):
        if not leaf.dim() or not leaf.is_floating_point() or len(leaf) <= _TOO_FEW:
            continue
        if bool((leaf == leaf.reshape(-1)[:1]).all()):
            changed = leaf.detach().clone()
            changed[-1] *= 0.5
            yield map_tensors(rows, functools.partial(_in_place_of, leaf, changed))


def _with_absent(rows: Any, needing: set[str]) -> Iterator[Any]:
    """The same rows, of which one has absent values in a tensor of numbers."""
    leaves = [
        leaf
        for path, leaf in tensor_leaves(rows)
        if leaf.dim() and leaf.is_floating_point() and leaf.numel() and path not in needing
    ]
    for leaf in leaves[:_MOST_VARIED]:
        for value in _ABSENT:
            changed = _with_less(leaf.detach(), value)
            if changed is None:
                break
            yield map_tensors(rows, functools.partial(_in_place_of, leaf, changed))


def _fewer(leaf: Tensor) -> Tensor | None:
    """A mask or lengths, with fewer for one row; None for what is neither."""
    if leaf.is_complex() or not leaf.numel():
        return None
    if leaf.is_floating_point() or leaf.dtype is torch.bool:
        if leaf.dtype is not torch.bool and not bool(((leaf == 0) | (leaf == 1)).all()):
            return None
        return _with_less(leaf, 0)
    changed = leaf.clone()
    changed[0] = torch.where(leaf[0] > 1, (leaf[0] + 1) // 2, leaf[0])
    return changed


def _with_less(leaf: Tensor, value: float) -> Tensor | None:
    """The same with a value in half of a row, or in a whole row; None for too few rows."""
    changed = leaf.clone()
    if leaf[0].numel() > 1:
        first = changed[0].reshape(-1)
        first[first.numel() // 2 :] = value
        changed[0] = first.reshape(changed[0].shape)
    elif len(leaf) > _TOO_FEW:
        changed[-1] = value
    else:
        return None
    return changed


def look_at_positions(
    call: Call, modules: Sequence[nn.Module], batch: Any, flatten: Callable[[Any], Any]
) -> None:
    """Refuse a part to which rows and positions are not one.

    Args:
        call: of tokens.
        modules: of the part.
        batch: of rows and positions.
        flatten: makes tokens of these.

    Raises:
        UnsplittableModelError: it computes something else with tokens.
    """
    rows = call.layout.take_rows(batch, list(range(min(2, call.layout.num_rows(batch)))))

    def compute(rows: Any) -> Any:
        return call.compute(map_tensors(rows, lambda leaf: leaf.detach().clone()), ())

    with _without_trace(call), evaluation_mode(modules):
        try:
            whole = compute(rows)
        except Exception as error:
            if classify(error) is Failure.RETRYABLE:
                raise
            return  # it takes nothing but tokens
        try:
            parts = compute(flatten(rows))
        except Exception as error:
            if classify(error) is not Failure.RETRYABLE:
                add_note(
                    error,
                    "automicro: microbatch_unit='tokens' calls the part with tensors of shape "
                    "(tokens, …), and it takes (rows, positions, …) alone; let it take both, as by "
                    "flatten(0, -2) for hidden states, or leave the unit out, which cuts rows",
                )
            raise
        if not _is_same(whole, compute(rows), tolerance=0.0):
            return  # other values each time
    flat = whole if _is_loss(whole) else flatten(whole)
    for (path, one), (_, other) in zip(tensor_leaves(flat), tensor_leaves(parts), strict=False):
        if _is_same(one, other, tolerance=tolerance_of(one)):
            continue
        named = f" {path!r}" if path else ""
        raise UnsplittableModelError(
            f"microbatch_unit='tokens': the part gives{named} other values for tokens of shape "
            "(tokens, …) than for (rows, positions, …), so it computes along positions (a shift, "
            "a sum over dimension 1, their number); leave the unit out, which cuts rows, or let "
            "what sees positions happen outside of the part"
        )


def _is_proportional(loss: Tensor, wanted: Sequence[Tensor]) -> bool:
    found = []
    try:
        for factor in (1.0, _FACTOR):
            gradient = torch.full_like(loss, factor)
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                loss, wanted, gradient, retain_graph=True, allow_unused=True
            )
            found.append([each / factor for each in gradients if each is not None])
    except Exception as error:
        if classify(error) is Failure.RETRYABLE:
            raise
        return True  # it has one backward alone
    one, other = found
    tolerance = max((tolerance_of(each) for each in one), default=0.0)
    return _is_same(one, other, tolerance=tolerance)


def _in_place_of(before: Tensor, after: Tensor, leaf: Tensor) -> Tensor:
    return after if leaf is before else leaf


def _ends(batch: Any) -> frozenset[int]:
    """Targets that may stand for none, a few of them.

    Padding lies last in a row. Other marks (-1, 255) are less or more than all classes.
    """
    targets = targets_of(batch)
    last = targets.flatten(1)[:, -1] if targets.dim() > 1 else targets
    values: list[int] = torch.unique(last).tolist()
    few = _MOST_ENDS // 2
    extremes: list[int] = torch.stack(targets.aminmax()).tolist() if targets.numel() else []
    return frozenset([*values[:few], *values[-few:], *extremes])


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _is_loss(output: Any) -> bool:
    return isinstance(output, Tensor) and output.dim() == 0


def _is_same(one: Any, other: Any, *, tolerance: float) -> bool:
    ones, others = tensor_leaves(one), tensor_leaves(other)
    if len(ones) != len(others):
        return False
    for (_, a), (_, b) in zip(ones, others, strict=True):
        if a.shape != b.shape:
            return False
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, b = a.to("cpu", wide), b.to("cpu", wide)
        if not torch.equal(a.isfinite(), b.isfinite()):
            return False
        a, b = a.where(a.isfinite(), 0), b.where(b.isfinite(), 0)
        difference, size = torch.linalg.vector_norm(a - b), torch.linalg.vector_norm(a)
        if float(difference) > tolerance * max(float(size), 1e-30):
            return False
    return True
