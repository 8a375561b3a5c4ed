"""Run whole batches on any memory in Keras' ``fit``, ``evaluate`` and ``predict``, on torch.

    model.compile(optimizer, loss, metrics)
    automicro.integrations.keras.enable(model)
    model.fit(x, y, batch_size=4096)

Keras stores variables without gradients (moving averages, seeds) as torch parameters, and a forward
changes them. So the `Microbatcher` gets a module in which they are buffers. The divisor of a loss
is read from its ``reduction``.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro.batchnorm import find_batchnorm
from automicro.errors import BatchNormWarning, LossError, warn
from automicro.integrations.host import (
    OURS,
    Recorded,
    Replacements,
    Results,
    check_options,
    import_host,
    is_number,
    is_written_by,
    microbatcher_of,
    require_seam,
)
from automicro.loss.passes import is_extra_pass
from automicro.microbatcher import Microbatcher
from automicro.sharding import is_sharded
from automicro.step.results import EvalResult, StepResult

try:
    keras = import_host("keras", extra="keras")
except ModuleNotFoundError as error:
    # Without KERAS_BACKEND, importing Keras also imports TensorFlow, its default backend.
    if error.name != "tensorflow":
        raise
    raise ImportError(
        "Keras imports TensorFlow, its default backend, which is not installed. Set the "
        "environment variable KERAS_BACKEND=torch before Keras is imported",
        name="tensorflow",
    ) from error

_global_state = import_host("keras.src.backend.common.global_state", extra="keras")

SUPPORTED = "Keras 3.7 or later"
_OWN = dict.fromkeys(
    (*OURS, "modules", "batch_layout", "microbatch_unit", "padding", "cut_padding"), "Keras"
) | {"batchnorm": "microbatch_size=None, which keeps batches whole, or a filter of warnings"}
_HOSTS = ("keras",)
_MEANS = ("sum_over_batch_size", "mean")
_SEED = "global_seed_generator"
# Given names, because automatic ones would change those of the user's layers.
_OF_EVERY_LAYER = frozenset(vars(keras.Layer(name="automicro")))
_input = keras.Input((1,), name="automicro")
_empty = keras.Model(_input, _input, name="automicro")
_empty.compile()
_OF_EVERY_MODEL = frozenset({"automicro", "history", *vars(_empty)})
_JIT = (
    "jit_compile=True, which compiles forward, backward and step into one program, so automicro "
    "cannot run code between them. Compile with jit_compile=False"
)
_COMPUTED = "what compute_metrics returns"


def enable(model: Any, **options: Any) -> Any:
    """Let a compiled model run its whole batches on any memory.

    Args:
        model: a compiled ``keras.Model`` on Keras' torch backend.
        options: options of `Microbatcher`: ``microbatch_size``, ``eval_microbatch_size``,
            ``loss_average`` (only if the loss's ``reduction`` does not show it: ``"samples"``,
            ``"none"``, or a callable from ``(x, y, sample_weight)`` to the divisor of the loss),
            ``memory_limit``, ``gradient_sums``, ``remember_sizes``, ``repeatable``,
            ``probe``, ``features``.

    Returns:
        The same model. ``model.automicro`` holds the results and sizes: see `Enabled`.

    Raises:
        ValueError: if microbatches would give wrong results with this model; the message names the
            remedy.
        TypeError: if ``model`` is not a ``keras.Model``, or if an option is unknown or one that
            Keras sets.
        ImportError: if Keras is missing or its version is not supported.
    """
    check_options("enable", options, _OWN)
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"enable takes a keras.Model, not a {type(model).__name__}. For your own loop use "
            "automicro.Microbatcher"
        )
    seams = {
        "train_step": ["data"],
        "test_step": ["data"],
        "predict_step": ["data"],
        "compute_metrics": ["x", "y", "y_pred", "sample_weight"],
        "_compute_loss": ["x", "y", "y_pred", "sample_weight", "training"],
    }
    for name, parameters in seams.items():
        require_seam(keras.Model, name, parameters, host="keras", supported=SUPPORTED)
    _refuse(model)
    model.automicro = Enabled(model, options)
    return model


def _refuse(model: Any) -> None:
    """Raise ValueError, with the remedy, if microbatches would be wrong with this model."""
    own = [
        name
        for name in ("train_step", "test_step")
        # Check the instance as well, because it may have a method that replaces the class's.
        if name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name)
    ]
    why = ""
    if keras.backend.backend() != "torch":
        why = (
            f"Keras runs on {keras.backend.backend()}, but automicro needs torch. Set the "
            "environment variable KERAS_BACKEND=torch before Keras is imported"
        )
    elif getattr(model, "automicro", None) is not None:
        why = "automicro is enabled for this model already. Call enable once"
    elif not model.compiled:
        why = "it has no loss and no optimizer yet. Call model.compile(…) first"
    elif own:
        why = (
            f"it has its own {own[0]}, and automicro cannot find the backward in it. Override "
            "compute_loss and compute_metrics instead, or use automicro.Microbatcher"
        )
    elif model.jit_compile:
        why = _JIT
    elif shared := _shared_by_ranks(model):
        why = (
            f"{shared} belongs to several ranks, which would not run out of memory together, but "
            "Keras trains the rest on each rank alone. Give Keras the plain module, with an "
            "optimizer whose apply() averages gradients over ranks, or use automicro.Microbatcher "
            "with DistributedDataParallel around the whole model"
        )
    if why:
        raise ValueError(f"automicro cannot be enabled for this {type(model).__name__}: {why}")


class Enabled(Results):
    """The replaced steps of one model, which `enable` stores in ``model.automicro``."""

    def __init__(self, model: Any, options: Mapping[str, Any]) -> None:
        self._model = model
        self._options = {**options}
        self._average = self._options.pop("loss_average", "auto")
        self._has_warned = False  # of batch normalization
        self._made: _Made | None = None
        self._returned: list[str] = []  # names of values from an overridden compute_metrics
        self._recorded = Recorded(
            self._beside,
            self._is_of_a_user,
            _HOSTS,
            # A metric's own list has one entry per update, and the metric combines these itself.
            fold_of=self._fold_of,
        )
        read_average(model, self._average)  # raise errors now rather than at the first batch
        self._replacements = Replacements()
        put = self._replacements.put
        self._own_train_step = put(model, "train_step", self._train_step)
        put(model, "test_step", self._test_step)
        self._own_predict_step = put(model, "predict_step", self._predict_step)
        self._forget_functions()

    def disable(self) -> None:
        """Restore the model's own steps."""
        self._replacements.close()
        self._forget_functions()
        del self._model.automicro

    def _forget_functions(self) -> None:
        """Discard the functions that Keras builds from the steps and caches."""
        self._model.train_function = self._model.test_function = None
        self._model.predict_function = None

    def _train_step(self, data: Any) -> Any:
        model = self._model
        # Without trainable weights there is no backward, and Keras' own step warns of this.
        if not model.trainable_weights:
            return self._own_train_step(data)
        made = self._ready(data, "train")
        model.zero_grad()
        result = self.last = made.microbatcher.backward(made.flat)
        if result.num_microbatches > 1:
            self._warn_of_batchnorm(result)
        # Read the list once, because Keras builds a new list at each access.
        trained = model.trainable_weights[:]
        with torch.no_grad():
            model.optimizer.apply([each.value.grad for each in trained], trained)
        return self._told(result)

    def _test_step(self, data: Any) -> Any:
        made = self._ready(data, "test")
        result = self.last_evaluation = made.microbatcher.evaluate(made.flat)
        return self._told(result)

    def _predict_step(self, data: Any) -> Any:
        made = self._ready(data, "predict")
        return made.microbatcher.predict(made.flat)

    def _told(self, result: StepResult | EvalResult) -> Any:
        """The values that a step returns: all metrics, or the values of ``compute_metrics``."""
        model, recorded = self._model, self._recorded
        others = recorded.told(_COMPUTED, result.loss)
        # The values of a whole batch are exactly those that Keras would have returned.
        if others and recorded.is_split:
            recorded.name_once(
                _COMPUTED,
                f"compute_metrics returns {', '.join(others)}, which belongs to no metric, so "
                "automicro averages the values of microbatches. The average is wrong if the value "
                "comes from a metric's result(). Let a keras.metrics.Mean count it",
            )
        recorded.tell(result.loss)
        # Update once with the weight of all rows; updates per microbatch give a mean of means.
        model._loss_tracker.update_state(result.loss, sample_weight=result.num_samples)
        now = model.get_metrics_result()
        if not self._has_own_metrics():
            return now
        return {name: now[name] if name in now else others[name] for name in self._returned}

    def _has_own_metrics(self) -> bool:
        return type(self._model).compute_metrics is not keras.Model.compute_metrics

    def _ready(self, data: Any, phase: str) -> "_Made":
        """The Microbatcher for a batch, created again if the model was compiled or has changed."""
        model, made = self._model, self._made
        variables = _variables_of(model)
        # Everything that a Microbatcher reads only once. Compiling, adding a layer or loading a
        # model changes it.
        key = (model._compile_loss, model.optimizer, *map(id, variables))
        if made is None or made.key != key:
            if model.jit_compile:
                raise ValueError(f"the model was compiled again with {_JIT}")
            earlier, made = made, self._made_for(key, variables)
            if earlier is not None:
                # A new loss hardly changes the memory per row.
                made.microbatcher.load_state_dict(earlier.microbatcher.state_dict())
            self._made = made
        made.flat, made.pack = flatten(data)
        made.phase = phase
        return made

    def _made_for(self, key: tuple[Any, ...], variables: list[Any]) -> "_Made":
        average = read_average(self._model, self._average)
        counts = average if callable(average) else None
        new = _Made(key=key, is_sum=average == "none")
        new.microbatcher = microbatcher_of(
            _Variables(self._model, variables),
            self._options,
            forward=lambda _, flat: self._recording(new, flat),
            backward=self._backward,
            loss_average=average if counts is None else lambda flat: counts(new.pack(flat)),
            modules=list(_of_torch(self._model).values()),
            batchnorm="ignore",  # `_warn_of_batchnorm` covers the layers of Keras and torch
            recorded=self._recorded,
            state=[*filter(_is_own, metrics_of(self._model))],
        )
        return new

    def _recording(self, made: "_Made", flat: Mapping[str, Any]) -> Any:
        """Run a forward and update the metrics, recording their values for the batch or a check."""
        recorded, data, rows = self._recorded, made.pack(flat), _rows_of(flat)
        if made.phase == "predict":
            return None, self._own_predict_step(data)
        with recorded.step(rows), self._listening(is_extra_pass() or rows < _rows_of(made.flat)):
            loss, outputs, masks = self._forward(made, data)
            with torch.no_grad():
                self._update(outputs, masks, data)
            return recorded.came_to(loss, outputs if is_extra_pass() else None) or (loss, outputs)

    @contextlib.contextmanager
    def _listening(self, listens: bool) -> Iterator[None]:
        """Record updates of metrics with values without rows, which a batch would make once."""
        kinds = dict.fromkeys(
            kind
            for metric in metrics_of(self._model) * listens
            # A subclass calls its parent's method, and either call may pass a number without rows.
            for kind in type(metric).__mro__
            if "update_state" in vars(kind)
        )
        with Replacements() as places:
            for kind in kinds:
                note = functools.partial(self._note, vars(kind)["update_state"])
                places.put(kind, "update_state", note)
            yield

    def _note(self, own: Callable[..., Any], metric: Any, *given: Any, **named: Any) -> Any:
        """Replace a metric's ``update_state``: defer updates with a single number."""
        weight = named.get("sample_weight", given[1] if len(given) == 2 else None)
        if not given or not is_number(given[0]) or not (weight is None or is_number(weight)):
            return own(metric, *given, **named)

        def tell(joined: Any, weight: Any) -> None:
            own(metric, joined, *([] if weight is None else [weight]))

        reduce = "sum" if isinstance(metric, keras.metrics.Sum) else "mean"
        what = f"{type(metric).__name__} ({metric.name})"
        return self._recorded.note(what, given[0], weight=weight, reduce=reduce, tell=tell)

    def _forward(self, made: "_Made", data: Any) -> tuple[Tensor, Any, list[Any]]:
        model = self._model
        # A check of a few rows runs in inference mode: no random numbers, no batch statistics.
        trains = made.phase == "train" and not is_extra_pass()
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        # Like Keras, pass `training` only if the model's call accepts it.
        outputs = model(x, training=trains) if model._call_has_training_arg else model(x)
        # Read the masks before the loss, which removes them.
        masks = [getattr(each, "_keras_mask", None) for each in keras.tree.flatten(outputs)]
        if self._average == "auto" and any(each is not None for each in masks):
            raise LossError(
                "the outputs have a mask (mask_zero=True or a Masking layer), so the loss is "
                "divided by the number of unmasked steps, which is unknown before the forward. "
                "Pass enable(model, loss_average=lambda data: …), which gets (x, y, "
                "sample_weight), such as lambda data: (data[0] != 0).sum()"
            )
        loss = model._compute_loss(
            x=x, y=y, y_pred=outputs, sample_weight=weight, training=made.phase == "train"
        )
        # Check after the forward, which adds these losses.
        if made.is_sum and model.losses:
            raise LossError(
                "the loss is a sum over rows, and losses that the model adds (regularizers, "
                "add_loss) would count once for each microbatch. Compile with "
                "reduction='sum_over_batch_size'"
            )
        return loss, outputs, masks

    def _backward(self, loss: Tensor) -> None:
        # Always call it: without a loss scale it returns the loss, and the model may get a
        # LossScaleOptimizer later.
        scaled = self._model.optimizer.scale_loss(loss)
        scaled.backward()

    def _is_of_a_user(self, owner: Any, name: str, value: Any) -> bool:
        """Whether an attribute is neither a part of a model or layer nor one that all have."""
        known = _OF_EVERY_MODEL if isinstance(owner, keras.Model) else _OF_EVERY_LAYER
        is_part = isinstance(value, keras.Layer | keras.Variable | keras.metrics.Metric | nn.Module)
        return not isinstance(owner, keras.Layer) or not (is_part or name in known)

    def _fold_of(self, place: str) -> str | None:
        is_entry = place.endswith("]") and place[-2:-1].isdigit()
        names = [each.name for each in metrics_of(self._model)] if is_entry else []
        return "sum" if place.partition(".")[0] in names else None

    def _beside(self) -> dict[str, Any]:
        """The model, and its custom layers and metrics with what they update."""
        found = {"model": self._model}
        layers = filter(_is_own, self._model._flatten_layers(include_self=False))
        parts = [(each, each._non_trainable_variables) for each in layers]
        parts += [(each, each.variables) for each in filter(_is_own, metrics_of(self._model))]
        for part, variables in parts:
            name = part.name if part.name not in found else f"{part.name}_{len(found)}"
            # A capture only compares variables, which are parameters to torch.
            values = {each.name: each.value.detach() for each in variables}
            found |= {name: part, f"{name}_variables": values}
        return found

    def _update(self, outputs: Any, masks: Sequence[Any], data: Any) -> None:
        """Update the metrics with a microbatch."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        outputs = keras.tree.map_structure(Tensor.detach, outputs)
        for each, mask in zip(keras.tree.flatten(outputs), masks, strict=True):
            if mask is not None:
                each._keras_mask = mask  # the loss removed it
        if self._has_own_metrics():
            told = self._model.compute_metrics(x, y, outputs, sample_weight=weight)
            metrics = self._model.get_metrics_result()
            self._returned = list(told)
            others = {name: value for name, value in told.items() if name not in metrics}
            self._recorded.note(_COMPUTED, others)
        elif self._model._compile_metrics is not None:
            self._model._compile_metrics.update_state(y, outputs, weight)

    def _warn_of_batchnorm(self, result: StepResult) -> None:
        # A Microbatcher only recognizes the batch norm layers of torch.
        names = [] if self._has_warned else self._batchnorms()
        if names:
            self._has_warned = True
            warn(
                f"{len(names)} BatchNormalization layer(s) ({', '.join(names[:5])}) now average "
                f"over {result.microbatch_size} rows at a time instead of {result.num_samples}, "
                "so gradients and moving averages differ from those of the whole batch. Use "
                "GroupNormalization or LayerNormalization, freeze the layers (layer.trainable = "
                "False), or keep batches whole with microbatch_size=None",
                BatchNormWarning,
            )

    def _batchnorms(self) -> list[str]:
        found = [
            layer.name
            for layer in self._model._flatten_layers()
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        ]
        for name, module in _of_torch(self._model).items():
            found += [f"{name}.{inner}" for inner in find_batchnorm(module)]
        return found


class _Variables(nn.Module):
    """A model's variables as torch parameters and as buffers, which a forward may change."""

    def __init__(self, model: Any, variables: list[Any]) -> None:
        super().__init__()
        weights = {id(v) for each in model._flatten_layers() for v in each._trainable_variables}
        for index, variable in enumerate(variables):
            # Paths may repeat, and torch does not allow dots in names.
            name = f"{index}:{variable.path}".replace(".", "_")
            if id(variable) in weights:  # frozen weights, too: they are checked but not copied
                self.register_parameter(name, variable.value)
            else:
                self.register_buffer(name, variable.value)


@dataclass(kw_only=True, eq=False)
class _Made:
    """A Microbatcher for the model in its current state, and the batch that it runs."""

    key: tuple[Any, ...]  # a different key needs a new Microbatcher
    is_sum: bool  # whether the loss is a sum over rows
    microbatcher: Microbatcher = field(init=False)
    flat: dict[str, Any] = field(default_factory=dict)  # tensors of the batch, by number
    pack: Callable[[Any], Any] = field(default=lambda flat: flat)  # restores Keras' structure
    phase: str = "train"  # "train", "test" or "predict"


def read_average(model: Any, given: Any) -> Any:
    """The ``loss_average`` of a model's loss; a callable gets data in Keras' structure."""
    if given != "auto":
        if callable(given) or given in ("samples", "none"):
            return given
        raise ValueError(
            f"loss_average={given!r} is not known. Use 'samples', 'none' (a sum), or a callable "
            "from (x, y, sample_weight) to the divisor of the loss"
        )
    losses = [each for each in keras.tree.flatten(model.loss) if each is not None]
    kinds = {getattr(each, "reduction", _MEANS[0]) for each in losses}
    # These divide by the number of values, with or without sample weights.
    if kinds <= set(_MEANS):
        is_own = type(model).compute_loss is not keras.Model.compute_loss
        return "auto" if is_own or any(map(_may_compare, losses)) else "samples"
    if len(losses) > 1:
        raise ValueError(
            f"the model has {len(losses)} losses with the reductions "
            f"{', '.join(sorted(map(repr, kinds)))}, which add up over microbatches in different "
            "ways. Compile all of them with reduction='sum_over_batch_size'"
        )
    [kind] = kinds
    if kind == "sum":
        return "none"
    if kind == "mean_with_sample_weight":
        return _sum_of_weights
    raise ValueError(
        f"the loss has reduction={kind!r}, but training needs one number. Compile it with "
        "reduction='sum_over_batch_size'"
    )


def _may_compare(loss: Any) -> bool:
    """Whether a loss may compare rows: a custom loss, or Keras' ``Circle``."""
    function = keras.losses.get(loss)
    function = getattr(function, "fn", function)
    name = getattr(function, "__name__", type(function).__name__)
    return name.lower() == "circle" or not is_written_by(_HOSTS, function)


def _sum_of_weights(data: Any) -> Any:
    x, _, weight = keras.utils.unpack_x_y_sample_weight(data)
    if weight is None:
        return len(next(each for each in keras.tree.flatten(x) if each is not None))
    return weight.sum()


def flatten(data: Any) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Flatten a Keras batch into numbered tensors; also return a function that packs rows again.

    Example:
        >>> flat, pack = flatten(([torch.ones(3, 2), np.zeros(3)], torch.arange(3), None))
        >>> sorted(flat), [type(each).__name__ for each in flat.values()]
        (['0', '1', '2'], ['Tensor', 'Tensor', 'Tensor'])
        >>> x, y, weight = pack({name: each[:1] for name, each in flat.items()})
        >>> len(x), y, weight
        (2, tensor([0]), None)
    """
    leaves = keras.tree.flatten(data)
    flat = {
        str(index): torch.as_tensor(each) if isinstance(each, np.ndarray) else each
        for index, each in enumerate(leaves)
        if each is not None
    }

    def pack(rows: Mapping[str, Any]) -> Any:
        return keras.tree.pack_sequence_as(data, [rows.get(str(i)) for i in range(len(leaves))])

    return flat, pack


def _of_torch(model: Any) -> dict[str, nn.Module]:
    """The torch modules inside layers, whose buffers Keras does not know, by layer name."""
    return {
        layer.name: layer.module
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.TorchModuleWrapper)
    }


def _shared_by_ranks(model: Any) -> str:
    """The first part of a model that is wrapped for several ranks or sharded, in words."""
    # A distribution of Keras acts on variables at their creation.
    for name, module in _of_torch(model).items():
        for each in module.modules():
            is_wrapped = isinstance(each, nn.parallel.DistributedDataParallel)
            if is_wrapped or any(map(is_sharded, each.parameters(recurse=False))):
                return f"the {type(each).__name__} in the layer {name!r}"
    sharded = (each.path for each in model.variables if is_sharded(each.value))
    return next((f"the variable {path!r}" for path in sharded), "")


def _variables_of(model: Any) -> list[Any]:
    """All variables of a model, of its metrics, and of Keras' global seed, without duplicates."""
    found = {id(each): each for each in model.variables}
    for metric in model.metrics:
        found |= {id(each): each for each in metric.variables}
    # Dropout draws from the global seed, which does not belong to any model.
    seed = _global_state.get_global_attribute(_SEED)
    if seed is not None:
        found[id(seed.state)] = seed.state
    return list(found.values())


def metrics_of(model: Any) -> list[Any]:
    """The metrics that a model was compiled with, and those in its attributes."""
    return [each for metric in model.metrics for each in getattr(metric, "metrics", [metric])]


def _is_own(part: Any) -> bool:
    """Whether a metric or layer is custom, so that it may keep state in plain attributes."""
    return not is_written_by(_HOSTS, type(part))


def _rows_of(flat: Mapping[str, Any]) -> int:
    return len(next(iter(flat.values())))
