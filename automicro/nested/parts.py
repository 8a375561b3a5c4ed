"""Sizes for parts of a model by name: modules, and the tails of language models."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import map_tensors
from automicro.errors import UnsplittableModelError, suggestion
from automicro.loss.averages import IGNORED
from automicro.loss.passes import extra_pass
from automicro.modules import evaluation_mode
from automicro.nested.slices import replaced_forward, tolerance_of
from automicro.nested.split import NestedSplit, split
from automicro.options import check_choice
from automicro.step.feature import Feature
from automicro.step.parts import SizedParts, attached_to
from automicro.step.setup import Setup
from automicro.torch_private import FakeTensor
from automicro.torch_private_execution import uncompiled

NestedParts: TypeAlias = Mapping[str, Any] | Iterable[NestedSplit] | None

UNITS = ("rows", "tokens")
"""For slices of a language model's tail: tokens are rows × positions, in one dimension."""
TAIL = "tail"
"""Names the head and loss of a language model, unless a module has this name."""

_LARGEST = 1000.0  # the size of logits when a check looks for operations on them


class Nested(Feature):
    """Gives parts of the model sizes of their own, for parts that need much smaller slices.

    Args:
        parts: for each part, by its name in the model: ``"auto"``, an int, or a mapping of
            `NestedSplit`'s arguments. ``"tail"`` is the head and loss of a language model. Or a
            list of splits of functions, as returned by `split`.

    Raises:
        TypeError, ValueError: invalid sizes; in ``attach``, a name that the model does not have.

    Example:
        >>> from automicro import Microbatcher
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        >>> microbatcher = Microbatcher(
        ...     model, loss_fn=nn.MSELoss(), features=[Nested({"1": 2})], microbatch_size=None
        ... )
        >>> microbatcher.backward((torch.randn(6, 8), torch.randn(6, 2))).nested_sizes
        {'1': 2}
    """

    def __init__(self, parts: NestedParts) -> None:
        self._named: dict[str, dict[str, Any]] = {}
        self._given: list[NestedSplit] = []
        given: Any = parts
        if isinstance(given, str | nn.Module) or not isinstance(given, Iterable | None):
            raise TypeError(
                f"nested={parts!r} names no size. Give sizes by the names of modules: {{'joint': "
                "'auto'}, or pass a list of what split() returned"
            )
        if isinstance(parts, Mapping):
            self._named = {name: check_options(name, each) for name, each in parts.items()}
            return
        for each in parts or ():
            if not isinstance(each, NestedSplit):
                raise TypeError(
                    f"nested holds {each!r}, which is no NestedSplit. Pass what split() returned, "
                    "or sizes by the names of modules: {'joint': 'auto'}"
                )
            self._given.append(each)

    def attach(self, setup: Setup) -> None:
        self.attach_to(setup.model, setup.parts)

    def attach_to(self, model: nn.Module, parts: SizedParts) -> SizedParts:
        """Give parts of a model their sizes, and register them.

        Raises:
            ValueError: the model has no such part, or the part already has another size.
        """
        for index, each in enumerate(self._given):
            parts.give(f"nested[{index}]", each)
        for name, options in self._named.items():
            _attach(model, name, options, parts)
        return parts


class ExactBatchNorm(Feature):
    """Runs the whole model in slices with BatchNorm over all rows, unless it already has a size."""

    def __init__(self, microbatch_size: Any) -> None:
        self._size = microbatch_size

    def attach(self, setup: Setup) -> None:
        if attached_to(setup.model) is None:
            options = {"microbatch_size": self._size, "batchnorm": "exact"}
            setup.parts.own(_attached("model", setup.model, options))


def _attach(model: nn.Module, name: str, options: Mapping[str, Any], parts: SizedParts) -> None:
    modules = dict(model.named_modules())
    if name in modules and name:
        there = attached_to(modules[name])
        if there is None:
            parts.own(_attached(name, modules[name], options), is_named=True)
        elif not there.is_like(NestedSplit(_nothing, **options)):
            raise ValueError(
                f"nested gives {name!r} the options {dict(options)}, but it already has its own "
                f"size: {there!r}. Give the size once, or remove the first one with .remove()"
            )
        return
    language_model = find_language_model(model)
    if name == TAIL and language_model is not None:
        tail = LanguageTail.of(language_model)
        if tail is None:
            tail = LanguageTail(language_model, options)
            tail.attach()
            parts.own(tail, is_named=True)
        parts.give(TAIL, tail.split)
        return
    names = [TAIL, *filter(None, modules)] if language_model is not None else list(modules)[1:]
    hint = suggestion(name, names) or f"; there are {', '.join(names[:8])}"
    raise ValueError(
        f"nested names {name!r}, but {type(model).__name__} has no module of that name{hint}"
    )


def _attached(name: str, module: nn.Module, options: Mapping[str, Any]) -> NestedSplit:
    part = split(module, **options)
    part.name = name
    return part


def check_options(name: str, options: Any) -> dict[str, Any]:
    """Return the arguments of a `NestedSplit`, from a size or a mapping.

    >>> check_options("joint", 8), check_options("joint", {"batch_split_factor": 4})
    ({'microbatch_size': 8}, {'batch_split_factor': 4})
    """
    found = dict(options) if isinstance(options, Mapping) else {"microbatch_size": options}
    known = [each for each in inspect.signature(NestedSplit).parameters if each != "part"]
    known += ["microbatch_unit"] if name == TAIL else []
    for key in found.keys() - set(known):
        hint = suggestion(key, known) or f"; for a module, use one key: {f'{name}.{key}'!r}"
        raise ValueError(f"nested[{name!r}] has {key!r}, but a part takes {', '.join(known)}{hint}")
    given = {key: each for key, each in found.items() if key != "microbatch_unit"}
    try:
        check_choice("microbatch_unit", found.get("microbatch_unit", "rows"), UNITS)
        NestedSplit(_nothing, **given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"nested[{name!r}]: {error}") from None
    return found


def find_language_model(model: nn.Module) -> nn.Module | None:
    """Return the module of transformers that computes logits from hidden states, and the loss."""
    for module in model.modules():
        get_head: Any = getattr(module, "get_output_embeddings", None)
        if hasattr(type(module), "loss_function") and isinstance(
            get_head and get_head(), nn.Module
        ):
            return module
    return None


class LanguageTail:
    """The head and loss of a language model, as a part with a size of its own."""

    # In training with labels, the head passes the hidden states on to the loss function, which
    # applies the head to one slice after the other. Logits of the whole microbatch never exist: the
    # outputs hold a `MissingLogits` instead. Evaluation is unchanged.

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        if "loss_function" not in inspect.unwrap(type(model).forward).__code__.co_names:
            raise ValueError(
                f"{type(model).__name__} has no known tail: its forward computes its loss itself. "
                "Write head and loss as one function of hidden states and targets, and give it a "
                "size with automicro.split"
            )
        given = dict(options)
        self._model = cast(Any, model)
        self._by_tokens = given.pop("microbatch_unit", "rows") == "tokens"
        self._average = given.pop("loss_average", None)
        self._is_checked = False
        self._earlier: Any = None
        self._forward: Callable[..., Any] = model.forward
        self.split = NestedSplit(_nothing, modules=[self._model.get_output_embeddings()], **given)
        self.split.name = TAIL

    @classmethod
    def of(cls, model: nn.Module) -> "LanguageTail | None":
        """Return the tail of a model, or None."""
        forward = vars(model).get("forward")
        return forward if isinstance(forward, LanguageTail) else None

    @property
    def name(self) -> str:
        """The name under which users give it a size."""
        return TAIL

    @property
    def has_run(self) -> bool:
        """Whether it has been called."""
        return self.split.has_run

    def attach(self) -> None:
        """Replace the model's forward by this object, until `remove`."""
        self._earlier, self._forward = vars(self._model).get("forward"), self._model.forward
        self.__wrapped__ = self._forward  # shows the signature of the model's forward
        vars(self._model)["forward"] = self

    def remove(self) -> None:
        """Restore the model's forward."""
        if self._earlier is None:
            del self._model.forward
        else:
            self._model.forward = self._earlier

    @property
    def is_attached(self) -> bool:
        """Whether it replaces the model's forward."""
        return vars(self._model).get("forward") is self

    @uncompiled(
        "head and loss of a language model are cut while its forward runs (nested={'tail': …}). "
        "Compile the inner model, as in model.model.compile(), or leave out fullgraph=True"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, with head and loss in slices."""
        bound = inspect.signature(self._forward).bind(*args, **kwargs).arguments
        # In evaluation logits are needed, and without a backward no activations are kept.
        if bound.get("labels") is None or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # Tensors without data have no values to compare.
        if not self._is_checked and not isinstance(bound["labels"], FakeTensor):
            self._check(bound)
            self._is_checked = True
        return _without_logits(self._apart(*args, **kwargs))

    def _apart(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        head = model.get_output_embeddings()
        compute, compute_loss = head.forward, model.loss_function
        had_own = "_loss_function" in vars(model)
        handed: list[torch.dtype] = []

        # The forward calls the head and then the loss function. If the head returns its input, the
        # loss function receives hidden states in place of logits.
        def hand_on(hidden: Tensor) -> Tensor:
            handed.append(hidden.dtype)
            return hidden

        def loss(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            bound = inspect.signature(compute_loss).bind_partial(None, *args, **kwargs)
            given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
            given = {name: given[name] for name in list(given)[1:] if name != "kwargs"}
            # From here on the slices call the head themselves, so it must be the real one.
            with replaced_forward(head, compute):
                return self._loss(head, compute_loss, logits, handed[-1], given)

        model.loss_function = loss
        try:
            with replaced_forward(head, hand_on):
                return self._forward(*args, **kwargs)
        finally:
            # Setting the property `loss_function` created the attribute `_loss_function`.
            if had_own:
                model.loss_function = compute_loss
            else:
                del model._loss_function

    def _loss(
        self,
        head: nn.Module,
        compute_loss: Callable[..., Tensor],
        hidden: Tensor,
        dtype: torch.dtype,
        given: dict[str, Any],
    ) -> Tensor:
        """Return the loss, from the hidden states that arrive in place of logits."""
        labels = given.pop("labels", None)
        # With this number the loss is a sum divided by it, so losses of slices simply add up.
        is_sum = given.get("num_items_in_batch") is not None
        shifts = "shift_labels" in inspect.signature(compute_loss).parameters
        # Before the cut, because a slice lacks the label that follows its last position.
        if shifts and given.get("shift_labels") is None:
            padded = F.pad(labels, (0, 1), value=given.get("ignore_index", IGNORED))
            given["shift_labels"] = padded[..., 1:].contiguous()
        targets = given.pop("shift_labels") if shifts else labels

        def tail(hidden: Tensor, targets: Tensor) -> Tensor:
            each = {"labels": None, "shift_labels": targets} if shifts else {"labels": targets}
            return compute_loss(head(hidden.to(dtype)), **each, **given)

        targets = targets.to(hidden.device)
        if self._by_tokens:
            # So a single row that is too long can be cut, too.
            hidden, targets = hidden.flatten(0, 1), targets.flatten(0, 1)
        average = self._average or ("none" if is_sum else "tokens")
        try:
            return cast(Tensor, self.split.of(tail, [head], average)(hidden, targets))
        finally:
            # Copies and files of the model must hold nothing of this call.
            self.split.of(_nothing, [head], average)

    def _check(self, bound: Mapping[str, Any]) -> None:
        """Refuse a model that changes its logits between head and loss."""
        layout = BatchLayout()
        batch = {name: value for name, value in bound.items() if value is not None}
        batch |= batch.pop("kwargs", {})
        rows = layout.take_rows(batch, list(range(min(2, layout.num_rows(batch)))))
        model = self._model
        head = model.get_output_embeddings()
        compute, factor = head.forward, list[Tensor]()

        # The effect of such a change on small logits can be too small to show in a loss (as with a
        # soft cap), and grow in training.
        def enlarged(hidden: Tensor) -> Tensor:
            logits: Tensor = compute(hidden)
            if not factor:
                factor.append(_LARGEST / logits.abs().amax().clamp(min=1e-6))
            return logits * factor[0].to(logits.dtype)

        losses = []
        large = replaced_forward(head, enlarged)
        with extra_pass(), torch.no_grad(), evaluation_mode([model]), large:
            for forward in (self._forward, self._apart):
                # Clones, because a forward might write into its inputs.
                found = forward(**map_tensors(rows, torch.clone))
                losses.append(found["loss"] if isinstance(found, Mapping) else found[0])
        one, other = map(float, losses)
        if abs(one - other) > tolerance_of(losses[0]) * abs(one):
            raise UnsplittableModelError(
                f"{type(model).__name__} changes its logits between its head and its loss (with "
                f"large logits the loss is {one:.6g}, but its tail alone gives {other:.6g}). "
                "Write head and loss as one function of hidden states and targets, and give it a "
                "size with automicro.split"
            )


def _nothing(hidden: Tensor, targets: Tensor) -> Tensor:
    raise AssertionError


class MissingLogitsError(UnsplittableModelError, AttributeError):
    """Raised on access to logits that were not computed."""


class MissingLogits:
    """A placeholder for logits of a microbatch, which are never computed as a whole."""

    def __repr__(self) -> str:
        return "MissingLogits()"

    @classmethod
    def _refuse(cls, *_: Any, **__: Any) -> NoReturn:
        raise MissingLogitsError(
            "a training forward has no complete logits, because the tail of the model has its own "
            f"size (nested={{{TAIL!r}: …}}). Compute what needs them in evaluation, or leave that "
            "size out"
        )

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        cls._refuse()

    # Without these, Python would compare it by identity, and NumPy would make an array of it.
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __array__ = _refuse
    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = __neg__ = __abs__ = _refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __matmul__ = __pow__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = _refuse
    __hash__ = object.__hash__


def _without_logits(output: Any) -> Any:
    if isinstance(output, Mapping):
        return type(output)(**{**output, "logits": MissingLogits()})
    return (output[0], MissingLogits(), *output[2:])
