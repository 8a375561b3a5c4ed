"""Optimizers, parameter groups and schedulers, given or built from the model on its device."""

import contextlib
import fnmatch
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from automicro.accepted_optimizers import check_optimizer, innermost_optimizer
from automicro.errors import suggestion, warn
from automicro.optimizer.step import GradientScaler, clip_gradients, step_optimizer
from automicro.options import check_modules
from automicro.ranks.interface import Ranks
from automicro.showing import as_text
from automicro.values import comes_from, read_scalars

FORM = "write mappings such as {'params': ['*.bias'], 'weight_decay': 0.0}"


class ParameterGroups:
    """Builds an optimizer with separate options for some parameters, selected by name.

    Args:
        optimizer: a callable that builds the optimizer, as for the `Trainer`.
        groups: mappings such as ``{"params": ["*.bias", "*norm*"], "weight_decay": 0.0}``, with
            ``*``, ``?`` and ``[…]`` as in `fnmatch`. A parameter is in the first group that
            matches its name.

    Raises:
        TypeError, ValueError: the groups are invalid, or the optimizer is already built.

    >>> groups = [{"params": "bias", "weight_decay": 0.0}]
    >>> built = ParameterGroups(torch.optim.AdamW, groups).build(nn.Linear(2, 2))
    >>> [group["weight_decay"] for group in built.param_groups]
    [0.01, 0.0]
    """

    def __init__(self, optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> None:
        read_patterns(groups)
        if isinstance(optimizer, Optimizer) or not callable(optimizer):
            raise ValueError(
                "parameter_groups needs an optimizer that is not built yet. Pass optimizer= as a "
                "callable, such as torch.optim.AdamW"
            )
        self._optimizer, self._groups = optimizer, groups

    def __repr__(self) -> str:
        return f"ParameterGroups({as_text(self._optimizer)}, {as_text(self._groups)})"

    def build(self, model: nn.Module) -> Any:
        """Build the optimizer for a model's parameters."""
        made = self._optimizer(group_parameters(model, self._groups))
        known = [name for name in getattr(made, "defaults", ()) if name != "params"]
        for index, group in enumerate(self._groups):
            # torch stores options that the optimizer lacks, and never reads them.
            for name in sorted(group.keys() - {"params", *known} if known else ()):
                raise ValueError(
                    f"parameter_groups[{index}] has the option {name!r}{suggestion(name, known)}, "
                    f"which {type(made).__name__} does not know and would ignore. Use options of "
                    f"{', '.join(known)}"
                )
        return made


def group_parameters(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sort a model's parameters into groups for an optimizer of torch.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> rest, undecayed = group_parameters(model, [{"params": "1.*", "weight_decay": 0.0}])
    >>> len(rest["params"]), len(undecayed["params"]), undecayed["weight_decay"]
    (2, 2, 0.0)
    """
    # Each parameter is in the first group that matches one of its names (tied weights have
    # several). Unmatched parameters form a group without options, in front of the others.
    named = list(model.named_parameters(remove_duplicate=False))
    left = {id(parameter): parameter for _, parameter in named}
    grouped = []
    for index, (group, patterns) in enumerate(zip(groups, read_patterns(groups), strict=True)):
        found = set[int]()
        for pattern in patterns:
            matching = {id(each) for name, each in named if fnmatch.fnmatchcase(name, pattern)}
            if not matching:
                names = [name for name, _ in named]
                hint = suggestion(pattern.strip("*?."), names)
                raise ValueError(
                    f"parameter_groups[{index}]: {pattern!r} matches no parameter of the "
                    f"model{hint}. Use names such as {', '.join(map(repr, names[:3]))}, with * for "
                    "any letters"
                )
            found |= matching
        members = [left.pop(key) for key in list(left) if key in found]
        if not members:
            raise ValueError(
                f"parameter_groups[{index}] has no parameters: all that {patterns} match are in "
                "earlier groups. Move this group before them, or leave it out"
            )
        grouped.append({**group, "params": members})
    return [*([{"params": list(left.values())}] if left else []), *grouped]


def read_patterns(groups: object) -> list[list[str]]:
    """Read the name patterns of each group.

    >>> read_patterns([{"params": "*.bias", "weight_decay": 0.0}])
    [['*.bias']]
    """
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise TypeError(f"parameter_groups is of type {type(groups).__name__}, not a list: {FORM}")
    found = []
    for index, group in enumerate(groups):
        params = group.get("params") if isinstance(group, Mapping) else None
        names: Any = [params] if isinstance(params, str) else params
        is_listed = isinstance(names, list | tuple) and len(names) > 0
        if not is_listed or not all(isinstance(each, str) for each in names):
            raise TypeError(
                f"parameter_groups[{index}] is {group!r:.60}, without names in 'params': {FORM}"
            )
        found.append(list(names))
    return found


OptimizerOrFactory: TypeAlias = Optimizer | ParameterGroups | Callable[[list[Any]], Optimizer]


def gather_modules(
    model: nn.Module, modules: Iterable[nn.Module], loss_fn: object
) -> list[nn.Module]:
    """List the model, additional modules, and the loss if it is a module with tensors.

    >>> len(gather_modules(nn.Linear(2, 2), [], nn.CrossEntropyLoss(weight=torch.ones(2))))
    2
    """
    gathered = [model, *check_modules(modules)]
    if isinstance(loss_fn, nn.Module) and not any(loss_fn is each for each in gathered):
        holds = next(itertools.chain(loss_fn.parameters(), loss_fn.buffers()), None)
        gathered += [] if holds is None else [loss_fn]
    return gathered


def build_optimizer(
    optimizer: OptimizerOrFactory | None,
    model: nn.Module,
    modules: list[nn.Module],
    loss_fn: object = None,
) -> Optimizer | None:
    """Return the optimizer, built from the model's parameters if a callable was given.

    >>> model = nn.Linear(2, 2)
    >>> type(build_optimizer(torch.optim.AdamW, model, [model])).__name__
    'AdamW'
    """
    made: Any = optimizer
    if isinstance(optimizer, ParameterGroups):
        made = optimizer.build(model)
    elif callable(optimizer) and not isinstance(optimizer, Optimizer):
        made = optimizer(list(model.parameters()))
    innermost = check_optimizer(made, modules)
    # The steps of these wrappers of other trainers add nothing in this loop.
    if comes_from(
        made,
        "accelerate.AcceleratedOptimizer",
        "lightning.LightningOptimizer",
        "pytorch_lightning.LightningOptimizer",
    ):
        made = innermost
    if made is not None and not isinstance(made, Optimizer):
        raise TypeError(
            f"optimizer is a {type(made).__name__} around a {type(innermost).__name__}, but the "
            "Trainer steps and saves a torch.optim.Optimizer. Pass the inner optimizer"
        )
    if isinstance(made, Optimizer) and isinstance(loss_fn, nn.Module):
        _warn_of_untrained(loss_fn, made)
    built: Optimizer | None = made
    return built


def _warn_of_untrained(loss_fn: nn.Module, optimizer: Optimizer) -> None:
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    left_out = [
        name
        for name, each in loss_fn.named_parameters()
        if each.requires_grad and id(each) not in trained
    ]
    if left_out:
        warn(
            f"{type(loss_fn).__name__} has parameters that the optimizer does not have: "
            f"{', '.join(left_out[:5])}{', …' * (len(left_out) > 5)}. To train them, build the "
            "optimizer from [*model.parameters(), *loss_fn.parameters()] and pass it; otherwise "
            "freeze them with loss_fn.requires_grad_(False)",
            UserWarning,
        )


def build_scheduler(scheduler: Any, optimizer: Optimizer | None) -> Any:
    """Return the scheduler, built from the optimizer if a callable was given.

    >>> optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    >>> build_scheduler(torch.optim.lr_scheduler.ConstantLR, optimizer).get_last_lr()
    [0.000333...]
    """
    if scheduler is None:
        return None
    if optimizer is None:
        raise ValueError("a scheduler was given, but no optimizer. Pass optimizer=…")
    is_made = callable(getattr(scheduler, "step", None)) and not isinstance(scheduler, type)
    if callable(scheduler) and not is_made:
        scheduler = scheduler(optimizer)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau steps on a measured value, but the Trainer steps the scheduler "
            "after each optimizer step, without a value. Use another scheduler, such as "
            "CosineAnnealingLR, or step it in a callback's eval_end with values['eval/loss']"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"scheduler is a {type(scheduler).__name__} without a step method. Pass one of "
            "torch.optim.lr_scheduler, or a callable that makes one from the optimizer"
        )
    # A wrapper, such as accelerate's, holds the scheduler and several optimizers.
    inner = getattr(scheduler, "scheduler", scheduler)
    scheduled = getattr(inner, "optimizer", optimizer)
    if innermost_optimizer(scheduled) is not innermost_optimizer(optimizer):
        raise ValueError(
            "the scheduler belongs to another optimizer. Build it from the one passed as "
            "optimizer=…, or pass a callable that takes the optimizer"
        )
    return scheduler


def read_scheduler_interval(scheduler: object, given: str | None) -> str:
    """Read the interval of the scheduler, ``"batch"`` or ``"epoch"``."""
    name, own = type(scheduler).__name__, getattr(scheduler, "scheduler_interval", None)
    if own is None and given is None and scheduler is not None:
        raise ValueError(
            f"{name} does not declare its unit. Pass scheduler_interval='batch' to step it after "
            "each optimizer step, or 'epoch' to step it after each epoch"
        )
    if own is not None and given not in (None, own):
        raise ValueError(
            f"scheduler_interval={given!r} does not fit {name}, which is stepped after every "
            f"{own}. Leave scheduler_interval out"
        )
    return given or own or "batch"


class OptimizerMode:
    """Calls ``train()`` and ``eval()`` of an optimizer that has both (schedule-free ones)."""

    # Such an optimizer trains at other weights than the ones for inference. Between two fits, the
    # model has the weights for inference.

    def __init__(self, optimizer: Optimizer | None) -> None:
        has_both = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
        self._optimizer: Any = optimizer if has_both else None
        self._is_training = False

    def train(self) -> None:
        """Switch to the weights for training."""
        self._is_training = True
        if self._optimizer is not None:
            self._optimizer.train()

    def eval(self) -> None:
        """Switch to the weights for inference and checkpoints."""
        self._is_training = False
        if self._optimizer is not None:
            self._optimizer.eval()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Use the weights for inference in the block, then those for training if it continues."""
        was_training = self._is_training
        self.eval()
        try:
            yield
        finally:
            if was_training:
                self.train()


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """Updates the parameters: unscale, clip, step, clear the gradients, step the scheduler."""

    optimizer: Optimizer
    modules: Sequence[nn.Module]
    scaler: GradientScaler | None
    grad_clip_norm: float | None
    scheduler: Any
    scheduler_interval: str
    device: torch.device
    ranks: Ranks

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Learning rates of the next step, one for each parameter group."""
        return tuple(float(g["lr"]) for g in self.optimizer.param_groups if "lr" in g)

    def unscale(self) -> None:
        """Unscale the gradients, if the loss is scaled."""
        if self.scaler is not None:
            self.scaler.unscale(self.optimizer)

    def clip(self) -> Tensor | None:
        """Unscale and clip the gradients; return their norm before clipping, None without."""
        if self.grad_clip_norm is None:
            return None
        self.unscale()
        return clip_gradients(self.optimizer, self.grad_clip_norm, self.device, ranks=self.ranks)

    def read(self, numbers: Sequence[Tensor]) -> list[float]:
        """Read numbers from the device at once, because each read waits for it."""
        if self.scaler is None:
            return read_scalars(numbers)
        return self.scaler.read(self.optimizer, numbers)

    def step(self) -> bool:
        """Step the optimizer; return False if gradients overflowed."""
        return step_optimizer(self.optimizer, self.device, scaler=self.scaler)

    def clear(self) -> None:
        """Clear all gradients."""
        # Also those of parameters without an optimizer, which would otherwise accumulate.
        self.optimizer.zero_grad(set_to_none=True)
        for module in self.modules:
            module.zero_grad(set_to_none=True)
        if self.scaler is not None:
            self.scaler.forget()  # the state of a skipped or interrupted batch

    def end(self, interval: str) -> None:
        """Step the scheduler if its interval, ``"batch"`` or ``"epoch"``, has ended."""
        if self.scheduler is not None and self.scheduler_interval == interval:
            self.scheduler.step()
