"""What microbatches logged, returned and appended, told as of their whole batch."""

import contextlib
import copy
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from automicro.batch.cutting import concat_rows
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.errors import BatchError, LossError, MetricWarning, warn
from automicro.integrations.host import Replacements
from automicro.reach import OF_EVERY_MODULE
from automicro.transaction.metrics import Metrics
from automicro.transaction.remembering import CannotRememberError, Growth, Remembered

_MOST_BYTES = 2**18  # of an attribute that is copied before each batch


Source = tuple[int, str | None]


class Logged(NamedTuple):
    """One call of ``log``: in which microbatch, and how.

    Attributes:
        value: a tensor, or a metric.
        options: of the call.
        microbatch: its index.
        source: the metric whose call has returned the value; None for another value.
        number: the value, where it was a plain number.
    """

    value: Any
    options: dict[str, Any]
    microbatch: int
    source: Source | None = None
    number: float | None = None


class Joined:
    """Values of microbatches as the one that the whole batch would have given.

    Args:
        rows: of each microbatch.
        losses: of each, where the step gave any.
        dims: where tensors may have rows.
        sorted_by: what rows were sorted by the cost of, in the plural; None for rows in order.

    Raises:
        LossError: by `join` and `extends`: there is a value for each row, and rows were sorted.

    Example:
        >>> joined = Joined([2, 1], [None, None])
        >>> given = [{"n": 2, "rows": torch.ones(2)}, {"n": 1, "rows": torch.zeros(1)}]
        >>> joined.join("what the step returns", given)
        {'n': 3, 'rows': tensor([1., 1., 0.])}
    """

    def __init__(
        self,
        rows: Sequence[int],
        losses: Sequence[Tensor | None],
        dims: Sequence[int] = (0,),
        *,
        sorted_by: str | None = None,
    ) -> None:
        self._rows, self._losses, self._dims = rows, losses, dims
        self._sorted_by = sorted_by
        self._may_be_loss: list[tuple[Tensor, Tensor]] = []
        self.is_split = len(rows) > 1

    def has_rows(self, counts: Sequence[int]) -> bool:
        """Whether there is one of something for each row."""
        return list(counts) == list(self._rows)

    def extends(self, counts: Sequence[int]) -> bool:
        """Whether a list that got so many entries got one for each row."""
        is_one_each = self.has_rows(counts) and max(counts) > 1
        if is_one_each:
            self._refuse_rows("a list that the step appends to")
        return is_one_each

    def _refuse_rows(self, what: str) -> None:
        if self._sorted_by is not None:
            raise LossError(
                f"{what} has a value for each row, and microbatch_unit={self._sorted_by!r} sorts "
                "rows: they would come in another order; let it have none (a mean, or a metric), "
                "or count microbatch_unit='rows'"
            )

    def counts_microbatches(self, more: int) -> bool:
        """Whether there is one more of something for each microbatch."""
        return more == len(self._rows) < sum(self._rows)

    def settle(self, loss: Tensor) -> None:
        """Let values that were each microbatch's loss be the batch's.

        What a loss averages over need not be rows, so its mean over rows would be another number.
        """
        for value, is_loss in self._may_be_loss:
            value.copy_(torch.where(is_loss, loss.to(value), value))
        self._may_be_loss.clear()

    def logged(
        self, name: str, said: Sequence[Logged], value_of: Callable[[Source], Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Value and options of a call of ``log``, from those in each microbatch.

        Args:
            name: that it is logged under.
            said: of each.
            value_of: what a metric comes to for the whole batch.
        """
        value, options, _, source, _ = said[-1]
        if not self.is_split:
            return value, options
        indices = [each.microbatch for each in said]
        weights = [self._rows[index] for index in indices]
        given = [each.options.get("batch_size") for each in said]
        counts = [int(each) for each in given if each is not None]
        if len(counts) == len(said):
            if _is_constant(counts, weights):
                options = {**options, "batch_size": counts[0]}
            else:
                weights = counts
                options = {**options, "batch_size": sum(counts)}
        if not isinstance(value, Tensor):  # a metric, which counts by itself
            return value, options
        if source is not None and all(each.source == source for each in said):
            whole = value_of(source)
            if isinstance(whole, Tensor) and whole.shape == value.shape:
                return whole.to(value.dtype), options
        values = [each.value for each in said]
        kind = _name_of(options.get("reduce_fx", "mean"))
        if kind == "sum":
            return torch.stack(values).sum(0), options
        if kind in ("max", "min"):
            return getattr(torch.stack(values), f"a{kind}")(0), options
        if self._is_count(name, said, value):
            several = torch.stack(values)
            is_constant = (several == several[0]).all() & (said[0].number is None)
            return torch.where(is_constant, several[0], several.sum(0)), options
        return self._mean(values, weights, indices), options

    def _is_count(self, name: str, said: Sequence[Logged], value: Tensor) -> bool:
        """Whether a value that is logged as a mean counts something of its microbatch."""
        rows = [self._rows[each.microbatch] for each in said]
        if [each.number for each in said] == rows and max(rows) > 1:
            is_sure = len(set(rows)) > 1
            what = "the number of rows"
        elif value.is_floating_point() or value.dtype in (torch.bool, torch.complex64):
            return False
        else:
            is_sure, what = False, "a whole number"
        if not is_sure:
            warn(
                f"self.log({name!r}) is given {what} of each microbatch, and these are added up, "
                "as counts are, or kept where all whole tensors are the same; say reduce_fx='sum' "
                "where it is a count, and log a float of the step's own where it is none",
                MetricWarning,
            )
        return True

    def join(self, what: str, values: Sequence[Any]) -> Any:
        """Several values of one kind, one for each microbatch, as one.

        Args:
            what: they are, in words.
            values: as many as microbatches.

        Warns:
            MetricWarning: nobody can say how; the list of them is given.
        """
        if not values:
            return None
        first = values[0]
        if not self.is_split:
            if self._sorted_by is not None and _holds_rows(first, sum(self._rows)):
                self._refuse_rows(what)
            return first
        if all(each is None for each in values):
            return first
        if len(values) < len(self._rows) or any(type(e) is not type(first) for e in values):
            return self._as_they_are(what, values)
        if isinstance(first, Tensor):
            return self._join_tensors(what, values)
        if isinstance(first, float):
            total = sum(self._rows)
            return sum(value * rows for value, rows in zip(values, self._rows, strict=True)) / total
        if isinstance(first, int) and not isinstance(first, bool):
            if list(values) == list(self._rows):
                return sum(values)
            return first if _are_equal(values) else self._summed(what, values)
        if isinstance(first, Mapping) and all(each.keys() == first.keys() for each in values):
            joined = {
                key: self.join(f"{what}[{key!r}]", [each[key] for each in values]) for key in first
            }
            kind: Any = type(first)
            return joined if kind is dict else kind(**joined)
        if isinstance(first, list | tuple):
            return self._join_sequences(what, values)
        if isinstance(first, str | bytes | bool) and _are_equal(values):
            return first
        with contextlib.suppress(BatchError, TypeError):
            together = concat_rows(list(values))
            self._refuse_rows(what)
            return together
        return self._as_they_are(what, values)

    def _join_tensors(self, what: str, values: Sequence[Tensor]) -> Any:
        first = values[0]
        if first.dim() == 0:
            if first.is_floating_point():
                return self._mean(values, self._rows, range(len(values)))
            return self._summed(what, values)
        for dim in self._dims:
            if all(
                v.dim() > dim and v.shape[dim] == n for v, n in zip(values, self._rows, strict=True)
            ):
                self._refuse_rows(what)
                return torch.cat(list(values), dim)
        return self._as_they_are(what, values)

    def _join_sequences(self, what: str, values: Sequence[Any]) -> Any:
        first = values[0]
        if type(first) is list and all(
            len(v) == n for v, n in zip(values, self._rows, strict=True)
        ):
            self._refuse_rows(what)
            return [each for value in values for each in value]
        if not all(len(value) == len(first) for value in values):
            return self._as_they_are(what, values)
        parts = [
            self.join(f"{what}[{index}]", list(each))
            for index, each in enumerate(zip(*values, strict=True))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)

    def _mean(
        self, values: Sequence[Tensor], weights: Sequence[int], indices: Sequence[int]
    ) -> Tensor:
        first = values[0]
        wide = first.dtype if first.dtype is torch.float64 else torch.float32
        several = torch.stack(list(values)).to(wide)
        shares = torch.tensor(weights, dtype=wide).to(first.device) / sum(weights)
        mean = torch.where((several == several[0]).all(), several[0], (several * shares).sum(0))
        losses = [self._losses[index] for index in indices if index < len(self._losses)]
        known = [each for each in losses if each is not None]
        if len(known) == len(self._rows) and mean.dim() == 0:
            same = torch.stack([each.to(first.device, wide) for each in known]) == several
            self._may_be_loss.append((mean, same.all()))
        return mean

    def _summed(self, what: str, values: Sequence[Any]) -> Any:
        warn(
            f"{what} is a whole number in each microbatch, and they are added up, as counts are; "
            "where it is no count, return a float, which is averaged over rows, or a value for "
            "each row",
            MetricWarning,
        )
        return sum(values[1:], values[0])

    def _as_they_are(self, what: str, values: Sequence[Any]) -> Any:
        warn(
            f"{what} is a {type(values[0]).__name__} in each microbatch, and nothing says how the "
            f"{len(values)} of a batch become one: they are given as a list. Values with a row for "
            "each of the batch, and numbers, are joined; or keep batches whole with "
            "microbatch_size=None",
            MetricWarning,
        )
        return list(values)


def is_mean(reduction: Any) -> bool:
    """Whether values are averaged, and neither added up nor compared.

    >>> is_mean("avg"), is_mean(torch.mean), is_mean(max)
    (True, True, False)
    """
    return _name_of(reduction) not in ("sum", "max", "min")


def _name_of(reduction: Any) -> str:
    return str(getattr(reduction, "__name__", reduction)).lower()


def _holds_rows(value: Any, num_rows: int) -> bool:
    """Whether a value of one microbatch of several rows may have one thing for each of them."""
    if num_rows < 2:
        return False
    if isinstance(value, list) and len(value) == num_rows:
        return True
    return any(num_rows in tensor.shape for _, tensor in tensor_leaves(value))


def _is_constant(counts: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether ``batch_size=`` is the same number whatever a batch has, and counts nothing of it.

    >>> _is_constant([32, 32], [16, 16]), _is_constant([80, 40], [16, 8])
    (True, False)
    """
    if list(counts) == list(rows) or len(set(counts)) > 1:
        return False
    return counts[0] == sum(rows) or any(counts[0] % each for each in rows)


def _are_equal(values: Sequence[Any]) -> bool:
    return all(each == values[0] for each in values)


def detached(value: Any) -> Any:
    """Without the graph, which holds the memory of the forward."""
    if isinstance(value, Tensor):
        return value.detach()
    return map_tensors(value, Tensor.detach) if isinstance(value, Mapping | list | tuple) else value


class Kept:
    """What a step changes on its module beside tensors: attributes, lists, metrics.

    A failed attempt leaves all as it was. Of a batch in several microbatches a list gets one entry
    where each of them appended one, and a metric's value of the last step is that of the batch.

    Args:
        module: whose step it is.
        apart_from: attributes that are the host's own.

    Attributes:
        others: further objects whose attributes a step may change, such as callbacks.
    """

    def __init__(self, module: nn.Module, *, apart_from: Iterable[str] = ()) -> None:
        self._module = module
        self.others: Sequence[Any] = ()
        self._hosts = OF_EVERY_MODULE | frozenset(apart_from)
        self._growth = Growth()
        self._forgotten: set[tuple[int, str]] = set()
        self._warned: set[str] = set()
        self._clear()

    def _clear(self) -> None:
        self._remembered = Remembered(self._growth)
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._counted: Metrics | None = None
        self._lists: list[tuple[str, list[Any], int, list[int]]] = []
        self._shadows: list[tuple[Any, Any]] = []
        # By id of what a metric returned: that, as ids are used again, and whose it is.
        self._returned: dict[int, tuple[Any, Source]] = {}
        self._places = Replacements()

    def begin(self) -> None:
        self._clear()
        modules = list(self._module.modules())
        self._metrics = [each for each in modules if _is_metric(each)]
        inside = {id(each) for metric in self._metrics for each in metric.modules()}
        for module in modules:
            if id(module) not in inside and not _is_of_torch(module):
                self._begin_table(module)
        for other in self.others:
            self._begin_table(other)
        self._counted = Metrics(self._metrics, self._growth)
        self._counted.begin()
        for name, value in self._of_its_own(self._module):
            for key, each in value.items() if isinstance(value, dict) else [("", value)]:
                if type(each) is list:
                    label = f"{name}[{key!r}]" if key != "" else name
                    self._lists.append((label, each, len(each), []))

    def _begin_table(self, owner: Any) -> None:
        table = dict(self._of_its_own(owner))
        self._tables.append((vars(owner), table))
        for name, value in table.items():
            if (id(owner), name) in self._forgotten or isinstance(value, nn.Module):
                continue
            try:
                if _is_light(value):
                    self._remembered.add(value)
                elif type(value) is list:
                    self._remembered.add_growing(value)
            except CannotRememberError:  # what is large or foreign is no count
                self._forgotten.add((id(owner), name))

    def _of_its_own(self, owner: Any) -> list[tuple[str, Any]]:
        """The attributes that are the caller's, and neither torch's nor the host's."""
        return [(name, value) for name, value in vars(owner).items() if name not in self._hosts]

    def begin_microbatch(self, *, is_split: bool, is_first: bool) -> None:
        """The step of a microbatch begins."""
        if is_split and is_first:
            for metric in self._metrics:
                if hasattr(metric, "_forward_cache"):
                    self._shadow(metric)

    def _shadow(self, metric: Any) -> None:
        own, shadow = metric.forward, None

        def forward(*arguments: Any, **named: Any) -> Any:
            nonlocal shadow
            value = own(*arguments, **named)
            if shadow is None:
                shadow = _emptied(metric)
                self._shadows.append((metric, shadow))
            shadow.update(*arguments, **named)
            parts = value.items() if isinstance(value, Mapping) else [(None, value)]
            for key, part in parts:
                self._returned[id(part)] = part, (id(metric), key)
            return value

        self._places.put(metric, "forward", forward)

    def source_of(self, value: Any) -> Source | None:
        """The metric whose call in this microbatch has returned a value; None for another."""
        found = self._returned.get(id(value))
        return None if found is None or found[0] is not value else found[1]

    def value_of(self, source: Source) -> Any:
        """What a metric comes to for all microbatches."""
        number, key = source
        whole = next(shadow for metric, shadow in self._shadows if id(metric) == number).compute()
        return whole if key is None else whole[key]

    def end_microbatch(self) -> None:
        """The step of a microbatch is over."""
        self._returned.clear()
        for _, values, _, lengths in self._lists:
            lengths.append(len(values))

    def prepare(self, joined: Joined) -> None:
        self._places.undo()
        if joined.is_split:
            for metric, shadow in self._shadows:
                metric._forward_cache = shadow.compute()
            for name, values, start, lengths in self._lists:
                self._join_list(joined, name, values, [start, *lengths])
            self._warn_of_counters(joined)
        if self._counted is not None:
            self._counted.prepare()

    def _join_list(
        self, joined: Joined, name: str, values: list[Any], lengths: Sequence[int]
    ) -> None:
        pieces = [values[one:other] for one, other in itertools.pairwise(lengths)]
        counts = [len(each) for each in pieces]
        if len(values) != lengths[-1] or not any(counts) or joined.extends(counts):
            return
        if len(set(counts)) > 1:
            self._warn(name, f"got {counts} entries from the microbatches of one batch")
            return
        what = f"what the step appends to self.{name}"
        values[lengths[0] :] = [joined.join(what, list(each)) for each in zip(*pieces, strict=True)]

    def _warn_of_counters(self, joined: Joined) -> None:
        table, saved = next((now, then) for now, then in self._tables if now is vars(self._module))
        for name, then in saved.items():
            now = table.get(name)
            if type(then) is int and type(now) is int and joined.counts_microbatches(now - then):
                self._warn(name, "was counted up by each microbatch of one batch")

    def _warn(self, name: str, did: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warn(
                f"self.{name} {did}, so it depends on the microbatch size; change it in "
                "on_train_batch_end (or on_validation_batch_end), which runs once for each batch",
                MetricWarning,
            )

    def commit(self) -> None:
        if self._counted is not None:
            self._counted.commit()
        self._clear()

    def roll_back(self) -> None:
        self._places.undo()
        if self._counted is not None:
            self._counted.roll_back()
        self._remembered.put_back()
        for table, saved in self._tables:
            for name in [each for each in table if each not in saved and each not in self._hosts]:
                del table[name]
            table.update(saved)
        self._clear()


def _is_metric(module: nn.Module) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")  # whoever made one has imported it
    kinds = () if torchmetrics is None else (torchmetrics.Metric, torchmetrics.MetricCollection)
    return isinstance(module, kinds)


def _is_light(value: Any) -> bool:
    """Whether a copy of a value costs next to nothing: what is large is data, and no count.

    >>> _is_light([torch.zeros(3)]), _is_light(torch.zeros(2**20))
    (True, False)
    """
    parts = value if type(value) in (list, tuple) else [value]
    return sum(getattr(each, "nbytes", 0) for each in parts) <= _MOST_BYTES


def _is_of_torch(module: nn.Module) -> bool:
    """Whether a module's class is torch's, whose attributes say how it was made."""
    return type(module).__module__.startswith("torch.")


def _emptied(metric: Any) -> Any:
    """A metric like this one that has counted nothing; its states are not copied for that."""
    states = [getattr(metric, name) for name in metric._defaults]
    memo = {id(each): [] if isinstance(each, list) else each for each in states}
    shadow = copy.deepcopy(metric, memo)
    vars(shadow).pop("forward", None)
    shadow.reset()
    shadow._to_sync = metric.dist_sync_on_step  # as a forward's own value is computed
    return shadow
