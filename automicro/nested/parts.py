"""Parts of a model by their names: modules, and the tails of language models."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import map_tensors
from automicro.errors import UnsplittableModelError
from automicro.loss.averages import IGNORED
from automicro.loss.passes import extra_pass
from automicro.modules import evaluation_mode
from automicro.nested.split import NestedSplit, attached_parts, attached_to, num_attachments, split

NestedParts: TypeAlias = Mapping[str, Any] | Iterable[NestedSplit] | None

TAIL = "tail"
"""Stands for head and loss of a language model, unless a module is called so."""

# How far apart the loss of a language model may be with its tail in one piece and apart.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 3e-2


class NestedSizes:
    """The parts of a model that have sizes of their own.

    Args:
        nested: as `Microbatcher` has it.
        model: whose parts the names are of.
        modules: the model, and further ones that may hold parts.

    Raises:
        TypeError, ValueError: no such part, or a size that makes no sense.
    """

    def __init__(
        self, nested: NestedParts, *, model: nn.Module, modules: Sequence[nn.Module]
    ) -> None:
        self._modules = modules
        self._given: dict[str, NestedSplit] = {}
        self._tails: list[LanguageTail] = []
        self._attached: tuple[int, dict[str, NestedSplit]] | None = None
        if isinstance(nested, Mapping):
            for name, options in nested.items():
                self._attach(model, name, read_options(name, options))
        else:
            for index, each in enumerate(nested or ()):
                if not isinstance(each, NestedSplit):
                    raise TypeError(
                        f"nested holds {each!r}, which is no NestedSplit; give what split() "
                        "returned, or sizes by the names of modules: {'joint': 'auto'}"
                    )
                self._given[f"nested[{index}]"] = each

    def attach_model(self, model: nn.Module, microbatch_size: Any) -> None:
        """Give the model as a whole a size of its own, unless it has one."""
        if attached_to(model) is None:
            split(model, microbatch_size=microbatch_size, batchnorm="exact").name = "model"

    def _attach(self, model: nn.Module, name: str, options: Mapping[str, Any]) -> None:
        modules = dict(model.named_modules())
        if name in modules and name:
            if attached_to(modules[name]) is None:  # else it was given a size before
                split(modules[name], **options).name = name
            return
        language_model = find_language_model(model)
        if name == TAIL and language_model is not None:
            self.add(LanguageTail.of(language_model, options))
            return
        names = [TAIL, *filter(None, modules)] if language_model is not None else list(modules)[1:]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names[:8])}"
        raise ValueError(
            f"nested names {name!r}, and {type(model).__name__} has no module of that name{hint}"
        )

    def add(self, tail: "LanguageTail") -> None:
        """Count a language model's tail among the parts."""
        self._tails.append(tail)

    def parts(self) -> Iterable[NestedSplit]:
        """All of them."""
        return self._by_name().values()

    def _by_name(self) -> dict[str, NestedSplit]:
        tails = {name: part for tail in self._tails for name, part in tail.splits.items()}
        if self._attached is None or self._attached[0] != num_attachments():
            self._attached = num_attachments(), attached_parts(self._modules)
        return {**self._given, **tails, **self._attached[1]}

    def sizes(self) -> dict[str, list[int]]:
        """Rows of the slices of the last call of each part, by its name."""
        return {name: each.sizes for name, each in self._by_name().items() if each.sizes}

    def state_dict(self) -> dict[str, Any]:
        """The sizes that were found, as plain values."""
        return {name: each.state_dict() for name, each in self._by_name().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with sizes that were found earlier; those of parts that are gone are left out."""
        for name, each in self._by_name().items():
            if name in state:
                each.load_state_dict(state[name])


def read_options(name: str, options: Any) -> dict[str, Any]:
    """The arguments of a `NestedSplit`, from a size or a mapping.

    Raises:
        ValueError: an unknown argument.

    >>> read_options("joint", 8), read_options("joint", {"batch_split_factor": 4})
    ({'microbatch_size': 8}, {'batch_split_factor': 4})
    """
    if not isinstance(options, Mapping):
        return {"microbatch_size": options}
    known = [each for each in inspect.signature(NestedSplit).parameters if each != "part"]
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"nested[{name!r}] has {key!r}, and a part knows {', '.join(known)}{hint}"
            )
    return dict(options)


def check_nested(nested: Any) -> None:
    """Refuse sizes of parts that make no sense, before there is a model.

    Raises:
        TypeError, ValueError: each with its remedy.

    >>> check_nested({"joint": "auto", "tail": {"microbatch_unit": "tokens"}})
    """
    if nested is None:
        return
    if not isinstance(nested, Mapping):
        raise TypeError(
            f"nested={nested!r} is no mapping; give sizes by the names of modules, such as "
            "{'joint': 'auto'} or {'joint': {'batch_split_factor': 4}}"
        )
    for name, options in nested.items():
        NestedSplit(_nothing, **read_options(str(name), options))


def find_language_model(model: nn.Module) -> nn.Module | None:
    """The module of transformers' that turns hidden states into logits and these into a loss."""
    for module in model.modules():
        get_head: Any = getattr(module, "get_output_embeddings", None)
        if hasattr(type(module), "loss_function") and isinstance(
            get_head and get_head(), nn.Module
        ):
            return module
    return None


class LanguageTail:
    """Head and loss of a language model as a part with a size of its own, by its name alone.

    In training, where labels are given, the head hands the hidden states on to the loss function,
    which applies the head to one slice after the other. Logits of the whole microbatch are never
    there, so outputs are without them. Evaluation goes as ever.

    Args:
        model: of transformers'.
        options: arguments of a `NestedSplit`.

    Raises:
        ValueError: the model's forward does not use its loss function.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        if "loss_function" not in inspect.unwrap(type(model).forward).__code__.co_names:
            raise ValueError(
                f"the tail of {type(model).__name__} is not known by name: its forward computes "
                "its loss by itself; write head and loss as one function of hidden states and "
                "targets, and give it a size with automicro.split"
            )
        self._model, self._options = model, options
        self._is_checked = False
        self.splits: dict[str, NestedSplit] = {}
        self._earlier: Any = None
        self._forward: Callable[..., Any] = model.forward

    @classmethod
    def of(cls, model: nn.Module, options: Mapping[str, Any]) -> "LanguageTail":
        """That of a model, attached where it has none yet."""
        forward = vars(model).get("forward")
        if isinstance(forward, _TailForward):
            return forward.tail
        tail = cls(model, options)
        tail.attach()
        return tail

    def attach(self) -> None:
        """Let the model's forward take its head and loss apart, until `remove`."""
        self._earlier, self._forward = vars(self._model).get("forward"), self._model.forward
        vars(self._model)["forward"] = functools.wraps(self._forward)(_TailForward(self))

    def remove(self) -> None:
        """Let the model be as it was."""
        _put_back(self._model, self._earlier)

    @property
    def is_attached(self) -> bool:
        """Whether the model's forward is taken apart."""
        forward = vars(self._model).get("forward")
        return isinstance(forward, _TailForward) and forward.tail is self

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward."""
        bound = inspect.signature(self._forward).bind(*args, **kwargs).arguments
        if bound.get("labels") is None or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if not self._is_checked:
            self._check(bound)
            self._is_checked = True
        return _without_logits(self._apart(args, kwargs))

    def _apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        model: Any = self._model
        head = model.get_output_embeddings()
        compute_loss = model.loss_function
        had_own = "_loss_function" in vars(model)
        earlier = head.__dict__.get("forward")
        head.forward = _hand_on
        model.loss_function = functools.partial(self._loss, head, earlier, compute_loss)
        try:
            return self._forward(*args, **kwargs)
        finally:
            _put_back(head, earlier)
            if had_own:
                model.loss_function = compute_loss
            else:
                del model._loss_function

    def _loss(
        self,
        head: nn.Module,
        earlier: Any,
        compute_loss: Callable[..., Tensor],
        logits: Tensor,
        labels: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The loss, where the hidden states come in the place of logits."""
        handing_on = head.__dict__["forward"]
        _put_back(head, earlier)
        try:
            is_sum = kwargs.get("num_items_in_batch") is not None
            shifts = "shift_labels" in inspect.signature(compute_loss).parameters
            if shifts and kwargs.get("shift_labels") is None:
                padded = F.pad(labels, (0, 1), value=kwargs.get("ignore_index", IGNORED))
                kwargs["shift_labels"] = padded[..., 1:].contiguous()
            targets = kwargs.pop("shift_labels") if shifts else labels

            def tail(hidden: Tensor, targets: Tensor) -> Tensor:
                given = {"labels": None, "shift_labels": targets} if shifts else {"labels": targets}
                return compute_loss(head(hidden), *args, **given, **kwargs)

            part = self._split(is_sum=is_sum, head=head).of(tail)
            return cast(Tensor, part(logits, targets.to(logits.device)))
        finally:
            head.forward = handing_on

    def _split(self, *, is_sum: bool, head: nn.Module) -> NestedSplit:
        name = f"{TAIL} (sum)" if is_sum else TAIL
        if name not in self.splits:
            average = {"loss_average": "none" if is_sum else "tokens"}
            part = NestedSplit(_nothing, modules=[head], **{**average, **self._options})
            part.name = name
            self.splits[name] = part
        return self.splits[name]

    def _check(self, bound: Mapping[str, Any]) -> None:
        """Refuse a model that does something to its logits between head and loss.

        Raises:
            UnsplittableModelError: the loss of two rows is another one.
        """
        layout = BatchLayout()
        batch = {name: value for name, value in bound.items() if value is not None}
        kwargs = batch.pop("kwargs", {})
        batch |= kwargs
        rows = layout.take_rows(batch, list(range(min(2, layout.num_rows(batch)))))
        with extra_pass(), torch.no_grad(), evaluation_mode([self._model]):
            given = map_tensors(rows, torch.clone)
            whole = self._forward(**given)
            apart = self._apart((), map_tensors(rows, torch.clone))
        one, other = (
            found["loss"] if isinstance(found, Mapping) else found[0] for found in (whole, apart)
        )
        error = abs(float(one) - float(other))
        if not error <= _TOLERANCES.get(one.dtype, _COARSE) * abs(float(one)):
            raise UnsplittableModelError(
                f"{type(self._model).__name__} does something to its logits between its head and "
                f"its loss (two rows: {float(one):.6g}, by its tail alone {float(other):.6g}); "
                "write head and loss as one function of hidden states and targets, and give it a "
                "size with automicro.split"
            )


class _TailForward:
    """Stands in the place of a language model's forward."""

    def __init__(self, tail: LanguageTail) -> None:
        self.tail = tail

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tail.run(args, kwargs)


def _hand_on(hidden: Tensor) -> Tensor:
    return hidden


def _nothing(hidden: Tensor, targets: Tensor) -> Tensor:
    raise AssertionError


def _put_back(module: Any, forward: Any) -> None:
    if forward is None:
        del module.forward
    else:
        module.forward = forward


def _without_logits(output: Any) -> Any:
    if isinstance(output, Mapping):
        kept = {name: value for name, value in output.items() if name != "logits"}
        return type(output)(**kept)
    return (output[0], *output[2:])
