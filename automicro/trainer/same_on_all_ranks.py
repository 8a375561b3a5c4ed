"""Checks that ranks have the same arguments, and agreement among ranks between steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from automicro.callbacks import ExponentialMovingAverage
from automicro.errors import DesyncError
from automicro.events.callback import Callback
from automicro.features import WORDS
from automicro.ranks.interface import Ranks
from automicro.sharding import num_ranks
from automicro.showing import as_text
from automicro.step.feature import Feature
from automicro.torch_private import is_uninitialized
from automicro.trainer.data.sharing import describe_for_ranks, shared_sampler
from automicro.trainer.evaluators import Evaluator
from automicro.trainer.resume.optimizer import given_options

MAY_DIFFER = frozenset({"device", "loggers", "memory_limit", "probe", "progress"})
"""Arguments of the `Trainer` that only rank 0 uses, or that ranks agree on in the run."""

Outline: TypeAlias = Mapping[str, str]


def outline_options(given: Mapping[str, Any]) -> dict[str, str]:
    """Describe the arguments of a `Trainer` that must be equal on all ranks.

    >>> outline_options({"max_duration": "2ep", "optimizer": nn.Linear, "device": "cpu"})
    {'max_duration': "'2ep'", 'optimizer': 'Linear'}
    """
    found: dict[str, str] = {}
    for name, value in given.items():
        if name in ("model", "modules"):
            found |= _modules(name, value)
        elif name == "eval_dataloader":
            found |= outline_evaluations(name, value)
        elif name == "callbacks":  # others than these can be on a single rank
            changing = [type(each).__qualname__ for each in value if _changes_training(each)]
            label = f"{name} that change batches, gradients or weights"
            found[label] = ", ".join(changing) or "none"
        elif name not in MAY_DIFFER:
            found[name] = _DESCRIBE.get(name, as_text)(value)
    return found


def outline_given(optimizer: torch.optim.Optimizer | None, scheduler: object) -> dict[str, str]:
    """Describe the options of an unstepped optimizer and scheduler.

    >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    >>> outline_given(sgd, None)["lr"]
    '0.5'
    """
    if optimizer is None:
        return {}
    given = given_options(optimizer, scheduler)
    return {name: as_text(value) for each in given.values() for name, value in each.items()}


def outline_evaluations(name: str, given: Any) -> dict[str, str]:
    """Describe each evaluation and its data set.

    >>> outline_evaluations("eval_dataloader", {"seen": [1, 2]})
    {'eval_dataloader': "named 'seen'", "eval_dataloader['seen']": 'loader=list'}
    """
    if not isinstance(given, Mapping):
        return {name: _evaluation(given)}
    names = ", ".join(map(repr, given))
    each = {f"{name}[{key!r}]": _evaluation(value) for key, value in given.items()}
    return {name: f"named {names}", **each}


def _evaluation(given: Any) -> str:
    if not isinstance(given, Evaluator):
        return describe_for_ranks(given)
    options = {each.name: getattr(given, each.name) for each in fields(given)}
    loader, metrics = options.pop("dataloader"), options.pop("metrics")
    return f"{describe_for_ranks(loader)}, metrics={_metrics(metrics)}, {as_text(options)}"


def _metrics(given: Any) -> str:
    # A MetricCollection is not always a Mapping, so check for `items`.
    named = getattr(given, "items", None)
    return as_text(dict(named()) if callable(named) else given)


def _modules(name: str, given: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    modules = {name: given}
    if not isinstance(given, nn.Module):
        modules = {f"{name}[{index}]": each for index, each in enumerate(given)}
    for which, module in modules.items():
        found[which] = type(module).__qualname__
        for key, parameter in module.named_parameters():
            frozen = "" if parameter.requires_grad else ", frozen"
            found[f"parameter {key!r} of {which}"] = _form(parameter) + frozen
        for key, buffer in module.named_buffers():
            found[f"buffer {key!r} of {which}"] = _form(buffer)
    return found


def _form(tensor: Any) -> str:
    if is_uninitialized(tensor):
        return "without a shape"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def _features(given: Iterable[Feature]) -> str:
    """Describe the features that a config can name; others can be on a single rank."""
    compared = {word.feature for word in WORDS.values()}
    kinds = [(type(each).__name__, vars(each)) for each in given]
    return as_text({kind: held for kind, held in kinds if kind in compared})


def _changes_training(callback: Callback) -> bool:
    kind = type(callback)
    overrides = any(
        getattr(kind, name, None) is not getattr(Callback, name)
        for name in ("transform", "gradients_ready")
    )
    return overrides or isinstance(callback, ExponentialMovingAverage)


def _seed(given: int | None) -> str:
    # Its value can differ between ranks, but with a seed, sizes are found differently.
    return "None" if given is None else "a number"


_DESCRIBE: Mapping[str, Callable[[Any], str]] = {
    "features": _features,
    "metrics": _metrics,
    "seed": _seed,
    "train_dataloader": describe_for_ranks,
}


def any_rank(ranks: Ranks, *answers: bool) -> list[bool]:
    """Combine boolean answers over ranks with a logical or; all ranks must call this.

    >>> from automicro.ranks.interface import OneRank
    >>> any_rank(OneRank(), True, False)
    [True, False]
    """
    return [number > 0 for number in ranks.add_up(map(float, answers))]


def of_all_ranks(ranks: Ranks, value: Any, point: str) -> list[Any]:
    """Gather the values of all ranks in rank order; all ranks must call this."""
    if ranks.world_size == 1:
        return [value]
    ranks.ready(point)
    values: list[Any] = [None] * ranks.world_size
    with ranks.voted():
        dist.all_gather_object(values, value)
    return values


_SHOWN = 8
_SHORT = 300  # letters
_GIVE_THE_SAME = (
    "Give all ranks the same. They train, evaluate and save together, and only rank 0 shows and "
    "logs, so pass everything on each rank."
)


def require_same(outline: Callable[[], Outline], *, what: str = "options") -> None:
    """Raise an error if ranks were given different options; all ranks must call this."""
    if num_ranks() == 1:
        return
    from automicro.ranks.coordinated import wait_for_all
    from automicro.ranks.guards.collectives import own_collectives

    own = dict(outline())
    wait_for_all(f"comparing {what}")
    outlines: list[Outline] = [{}] * num_ranks()
    with own_collectives():
        dist.all_gather_object(outlines, own)
    lines = []
    for name in dict.fromkeys(name for each in outlines for name in each):
        values = [each.get(name, "there is none") for each in outlines]
        if len(set(values)) > 1:
            lines.append(f"  {name}: {_by_rank(values)}")
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"  and {len(lines) - _SHOWN} more"]
    if lines:
        heading = f"ranks were given different {what}:"
        raise DesyncError("\n".join([heading, *lines, _GIVE_THE_SAME]))


def _by_rank(values: Sequence[str]) -> str:
    """List values with the ranks that have them.

    >>> _by_rank(["a", "b", "a"])
    'a on ranks 0, 2; b on rank 1'
    """
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(
        f"{_shortened(value)} on rank{'s' * (len(each) > 1)} {_shortened(', '.join(each))}"
        for value, each in ranks.items()
    )


def require_same_order(ranks: Ranks, loader: object, name: str) -> None:
    """Compare the shared order of rows between ranks; all ranks must call this once per pass."""
    own = None if (sampler := shared_sampler(loader)) is None else sampler.checksum
    checksums: list[int | None] = of_all_ranks(ranks, own, f"comparing the order of {name}")
    known = [each for each in checksums if each is not None]
    if len(set(known)) < 2:
        return
    # Orders are numbered, because their checksums mean nothing to a user.
    letters = {each: f"order {number + 1}" for number, each in enumerate(dict.fromkeys(known))}
    found = _by_rank(["none" if each is None else letters[each] for each in checksums])
    raise DesyncError(
        f"the rows of {name} come in another order on some ranks ({found}), so some would be used "
        "twice and others never. Let its sampler draw from the global random numbers of torch, "
        "Python or NumPy, which are the same on all ranks, or give its generator a fixed seed"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[:_SHORT]} …"
