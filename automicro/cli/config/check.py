"""Whether what stands under each key belongs there and means something. Nothing is made."""

from collections.abc import Callable, Mapping
from functools import partial
from types import NoneType
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from automicro.batch.layout import BatchLayout
from automicro.checkpoints.store import CheckpointConfig
from automicro.cli.config.keys import (
    KEYS,
    LISTS,
    about,
    as_override,
    did_you_mean,
    mistake,
)
from automicro.cli.config.nodes import (
    FORM,
    NODE_KEYS,
    check_node,
    is_interpolation,
    is_node,
    items_inside,
    show,
)
from automicro.cli.config.schema import (
    LOSS_AVERAGES,
    SECTIONS,
    CallConfig,
    EvaluatorConfig,
    RunConfig,
    SamplingConfig,
    alternatives,
    keys_inside,
    one_of,
    wrong_type,
)
from automicro.compilation import check_compile
from automicro.data.plan import MODES
from automicro.errors import ConfigError
from automicro.lengths.padding import Padding
from automicro.lengths.sorting import check_cut_padding
from automicro.lengths.unit import check_unit
from automicro.memory.oom import first_line
from automicro.nested.parts import check_nested
from automicro.options import (
    GRADIENT_SUMS,
    PRECISIONS,
    SYNCS,
    check_choice,
    read_accumulation,
    read_amount,
    read_count,
    read_time,
)
from automicro.policy.choose import make_policy
from automicro.savers.levels import check_levels
from automicro.step.split_guard import BATCHNORM_MODES
from automicro.trainer.device import choose_device
from automicro.trainer.evaluators import INHERITED
from automicro.trainer.optimizer import SCHEDULER_INTERVALS
from automicro.trainer.parallel import read_parallel
from automicro.trainer.rehearsal import read_rehearsal
from automicro.trainer.step import NON_FINITE_MODES
from automicro.units import parse_bytes, parse_share, read_duration

OF_ANY_TYPE: Mapping[str, tuple[type, ...]] = {
    "batch_layout": (int, Mapping),
    "compile": (bool, Mapping),
    "cut_padding": (bool, str),
    "loss_average": (str, Mapping),
    "microbatch_unit": (str, Mapping),
    "nested": (Mapping, NoneType),
    "padding": (Mapping, NoneType),
    "when_too_large": (str, list, Mapping),
}
SIZES = ("microbatch_size", "eval_microbatch_size")

NO_KEYS_OF_ITS_OWN = (
    "a config has no keys of its own, and automicro config --keys lists all that there are; refer "
    "to a value where it stands, as ${model.args.width}, or take it from the environment with "
    "${oc.env:NAME}"
)
CHECKPOINT_FORM = (
    "write {interval: 500ba, keep_last: 2}, {} for the defaults, or null for no checkpoints"
)


SAMPLING_FORM = "write {mode: duration, lengths: seconds, batch_length: 600.0}, or fixed"


def check_shapes(tree: Mapping[str, Any]) -> None:
    """Refuse unknown keys, and values that are no nodes, lists or mappings where these belong.

    Interpolations and ??? are left for later.

    Raises:
        ConfigError: names key, value and remedy.

    >>> check_shapes({"model": {"call": "torch.nn.Linear"}, "compile": True})
    """
    for key, value in tree.items():
        with about(key):
            if key not in KEYS:
                raise ConfigError(_unknown_key(key, tree))
            _check_shape(value, key)


def _check_shape(value: Any, key: str) -> None:
    if isinstance(value, str) and ("${" in value or value == "???"):
        return
    if value is None and (NoneType in alternatives(key) or key in OF_SECTIONS):
        return
    if CallConfig in alternatives(key):
        check_node(value, key)
    elif key in SIZES:
        check_size(value, key)
    elif key == "metrics":
        check_metrics(value, key)
    elif key in LISTS:
        _check_list(value, key)
    elif key in OF_SECTIONS:
        OF_SECTIONS[key](value)
    elif key == "parameter_groups":
        _check_groups(value)
    elif not _may_be(value, key):
        raise wrong_type(key, value)


def _unknown_key(key: str, tree: Mapping[str, Any]) -> str:
    value = tree[key]
    below = [f"{each}.{key}" for each in OF_SECTIONS if key in keys_inside(each)]
    below = below or _places_of(key, tree)
    if below:
        said = f"unknown key {key!r} (did you mean {below[0]!r}?)"
        return f"{said}: write {as_override(below[0], value)}"
    hint = did_you_mean(str(key), KEYS)
    return f"unknown key {key!r}{hint}: {'correct it' if hint else NO_KEYS_OF_ITS_OWN}"


def _places_of(name: object, value: Any, way: str = "") -> list[str]:
    """Where a name stands among arguments: people write ``width`` for ``model.args.width``."""
    places = []
    for part, inner in items_inside(value):
        here = f"{way}.{part}" if way else str(part)
        if part == name and way.endswith("args"):
            places.append(here)
        places += _places_of(name, inner, here)
    return places


def _may_be(value: object, key: str) -> bool:
    if Any in alternatives(key):
        return isinstance(value, OF_ANY_TYPE[key])
    # Which plain value it may be is for OmegaConf to tell: it reads numbers as text, and so on.
    return not isinstance(value, Mapping | list)


def _check_list(nodes: object, key: str) -> None:
    if not isinstance(nodes, list | tuple):
        raise ConfigError(
            f"{key}={show(nodes)} is not a list: write [{{call: dotted.path, args: {{name: "
            f"value}}}}], or [] for none"
        )
    for place, node in enumerate(nodes):
        check_node(node, f"{key}.{place}")


def _check_groups(groups: object) -> None:
    form = "write {params: '*.bias', weight_decay: 0.0}: names of parameters, then options"
    if not isinstance(groups, list | tuple):
        raise ConfigError(
            f"parameter_groups={show(groups)} is not a list: write [] for none, or a list in "
            f"which each group is a mapping such as {{params: '*.bias', weight_decay: 0.0}}"
        )
    for place, group in enumerate(groups):
        key = f"parameter_groups.{place}"
        if not isinstance(group, Mapping):
            raise ConfigError(f"{key}={show(group)} is not a mapping: {form}")
        if "params" not in group:
            raise ConfigError(f"{key}={show(group)} has no params: {form}")
        params = group["params"]
        patterns = params if isinstance(params, list) else [params]
        if not patterns or not all(isinstance(each, str) and each for each in patterns):
            raise ConfigError(
                f"{key}.params={show(params)} is no pattern of names: write text such as "
                f"'*.bias', or a list of such"
            )


def check_checkpoint(value: object) -> None:
    """Refuse what is no mapping of the keys of a checkpoint.

    Raises:
        ConfigError: names key, value and remedy.

    >>> check_checkpoint({"interval": "500ba"})
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"checkpoint={show(value)} is not a mapping: {CHECKPOINT_FORM}")
    read_section(value, "checkpoint")


def read_sampling(value: Any) -> SamplingConfig | None:
    """Return how rows are put into batches, typed.

    Args:
        value: the name of a mode, a mapping of the keys, or null.

    Raises:
        ConfigError: none of these; names key, value and remedy.

    >>> read_sampling("fixed").mode, read_sampling({"mode": "fixed", "batch_size": 4}).batch_size
    ('fixed', 4)
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = {"mode": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"sampling_mode={show(value)} is no mode and no mapping: {SAMPLING_FORM}")
    if "mode" not in value:
        raise ConfigError(f"sampling_mode.mode is missing: write mode: {one_of(MODES)}")
    for name in ("lengths", "second_lengths", "cost"):
        if isinstance(value.get(name), Mapping):
            check_node(value[name], f"sampling_mode.{name}")
    values = read_section(value, "sampling_mode")
    mode = values["mode"]
    if not is_interpolation(mode) and mode not in MODES:
        raise mistake(
            f"sampling_mode.mode={show(mode)}{did_you_mean(mode, MODES)}: use {one_of(MODES)}",
            "sampling_mode.mode",
        )
    return SamplingConfig(**{**values, "cost": None if not values["cost"] else value["cost"]})


def read_evaluations(value: Any, key: str = "eval_dataloader") -> Any:
    """Return a node, an evaluation with options, or a mapping from names to these, typed.

    Args:
        value: what stands there; interpolations, and null, stay as they are.
        key: where.

    Raises:
        ConfigError: none of these; names key, value and remedy.

    >>> new = {"data": {"call": "a.b"}, "interval": "2ep"}
    >>> read_evaluations({"seen": {"call": "a.b"}, "new": new})["new"].interval
    '2ep'
    """
    if value is None or is_interpolation(value):
        return value
    if _is_by_name(value):
        found = {}
        for name, each in value.items():
            if not isinstance(name, str) or not name or "/" in name:
                raise mistake(
                    f"{key} has the name {show(name)}: names are text without '/', because values "
                    f"are logged as eval/name/loss",
                    key,
                )
            with about(f"{key}.{name}"):
                found[name] = read_evaluations(each, f"{key}.{name}")
        return found
    known = keys_inside("eval_dataloader")
    options = [name for name in known if isinstance(value, Mapping) and name in value]
    if not options or is_node(value):
        check_node(value, key)
        return _call(value)
    if "data" not in options:
        raise ConfigError(
            f"{key}.data is missing: write data: beside {', '.join(options)}, with a node that "
            f"makes what to evaluate on ({FORM.removeprefix('write ')})"
        )
    metrics = value.get("metrics", INHERITED)
    if metrics not in (None, INHERITED) and not is_interpolation(metrics):
        check_metrics(metrics, f"{key}.metrics")
        metrics = {name: _call(each) for name, each in metrics.items()}
    check_node(value["data"], f"{key}.data")
    check_size(value.get("microbatch_size"), f"{key}.microbatch_size")
    values = read_section(value, "eval_dataloader", key)
    return EvaluatorConfig(**{**values, "data": _call(value["data"]), "metrics": metrics})


def check_metrics(metrics: object, key: str) -> None:
    """Refuse what is no mapping from names to nodes.

    Raises:
        ConfigError: names key, value and remedy.

    >>> check_metrics({"accuracy": {"call": "a.B"}}, "metrics")
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"{key}={show(metrics)} is not a mapping: write {{name: {{call: dotted.path, args: "
            f"{{…}}}}}}, or {{}} for none"
        )
    for name, node in metrics.items():
        with about(f"{key}.{name}"):
            check_node(node, f"{key}.{name}")


def check_size(value: object, key: str) -> None:
    """Refuse what is no microbatch size and no node that makes a policy.

    Raises:
        ConfigError: names key, value and remedy.

    >>> check_size({"call": "automicro.Halving", "args": {"multiple_of": 8}}, "microbatch_size")
    """
    if isinstance(value, Mapping):
        check_node(value, key)
    elif isinstance(value, bool) or not isinstance(value, int | str | None):
        known = "eval_dataloader.microbatch_size" if key.startswith("eval_dataloader") else key
        raise wrong_type(key, value, known)


def read_section(values: Mapping[str, Any], section: str, key: str | None = None) -> dict[str, Any]:
    """Return the values of a section in the types of its keys, defaults filled in.

    Args:
        values: by key; interpolations stay as they are.
        section: which one.
        key: where in the config it stands; unless given, where its name says.

    Raises:
        ConfigError: an unknown key, or a value of another type.

    >>> read_section({"interval": "2ep"}, "checkpoint")["keep_last"]
    3
    """
    key = key or section
    known = keys_inside(section)
    for name in values:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise mistake(
                f"{key} has an unknown key {name!r}{hint}: use some of {', '.join(known)}",
                f"{key}.{name}",
            )
    schema = OmegaConf.structured(SECTIONS[section])
    try:
        merged = OmegaConf.merge(schema, dict(values))
    except ValidationError as error:
        name = str(error.full_key)
        raise wrong_type(f"{key}.{name}", values.get(name), f"{section}.{name}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{key}.{error.full_key}: {first_line(error)}: correct it; an interpolation is written "
            "${name}"
        ) from error
    return cast(dict[str, Any], OmegaConf.to_container(merged))


def read_checkpoint_section(value: Any, run_dir: str | None) -> dict[str, Any] | None:
    """Return every key of the checkpoints, in the folder of the run unless another is given.

    Args:
        value: of ``checkpoint``, interpolations resolved.
        run_dir: the folder of the run.

    >>> read_checkpoint_section({}, "runs/first")["folder"]
    'runs/first/checkpoints'
    """
    if value is None:
        return None
    values = read_section(value, "checkpoint")
    if values["folder"] == "???":
        values["folder"] = None if run_dir is None else f"{run_dir}/checkpoints"
    return values


def _call(node: Any) -> Any:
    if is_interpolation(node):
        return node
    return CallConfig(call=node["call"], args=dict(node.get("args") or {}))


def _is_by_name(value: object) -> bool:
    """Whether this maps names to evaluations, and is not one itself, mistyped perhaps."""
    if not isinstance(value, Mapping) or not value:
        return False
    if any(name in value for name in (*NODE_KEYS, *keys_inside("eval_dataloader"))):
        return False
    return all(isinstance(each, Mapping) for each in value.values()) or any(
        _is_meant_as_evaluation(each)
        and not (isinstance(each, str) and did_you_mean(name, NODE_KEYS))
        for name, each in value.items()
    )


def _is_meant_as_evaluation(value: object) -> bool:
    if isinstance(value, str):
        return is_interpolation(value) or "." in value
    return isinstance(value, Mapping) and (is_node(value) or "data" in value)


def check_values(config: RunConfig) -> None:
    """Refuse what the Trainer would refuse, without making one.

    Raises:
        ConfigError: names key, value and remedy, as a config has them.

    >>> check_values(RunConfig(max_duration="2ep", microbatch_size=64))
    """
    for key, read in _READERS.items():
        value = getattr(config, key)
        if value is not None:
            _check(key, value, read)
    _check("compile", config, _check_compile)
    _check_evaluations(config.eval_dataloader, "eval_dataloader")


def read_checkpoint(config: RunConfig) -> CheckpointConfig | None:
    """Return what the Trainer is told about checkpoints.

    Raises:
        ConfigError: names key, value and remedy; a folder is needed.

    >>> read_checkpoint(RunConfig()) is None
    True
    """
    values = config.checkpoint
    if values is None:
        return None
    if values["folder"] is None:
        raise mistake(
            "checkpoint.folder is missing: give a folder such as checkpoints, or run_dir, where "
            "they lie in checkpoints then",
            "checkpoint",
        )
    if values["interval"] is not None:
        _check("checkpoint.interval", values["interval"], _duration("checkpoint.interval"))
    try:
        return CheckpointConfig(**values)
    except ValueError as error:
        said = f"checkpoint.{error}"
        raise mistake(said, said.partition("=")[0]) from error


def _check(key: str, value: Any, read: Callable[[Any], object]) -> None:
    try:
        with about(key):
            read(value)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        text = str(error)
        if key.rpartition(".")[2] in SIZES:  # a policy is a node here
            text = (
                f"{key}={show(value)}: give a whole number of at least 1, auto (found by "
                f"halving), explore (the fastest number of rows) or null (the whole batch)"
            )
        raise mistake(text if text.startswith(key) else f"{key}: {text}", key) from error


def _check_evaluations(given: Any, key: str) -> None:
    if isinstance(given, Mapping):
        for name, each in given.items():
            _check_evaluations(each, f"{key}.{name}")
    if not isinstance(given, EvaluatorConfig):
        return
    readers: Mapping[str, Callable[[Any], object]] = {
        "microbatch_size": _check_size,
        "max_batches": partial(read_count, f"{key}.max_batches"),
        "interval": _duration(f"{key}.interval"),
    }
    for name, read in readers.items():
        value = getattr(given, name)
        if value not in (None, INHERITED):
            _check(f"{key}.{name}", value, read)


def _duration(key: str) -> Callable[[Any], object]:
    return partial(read_duration, key)


def _check_time(text: str) -> None:
    try:
        read_time("max_time", text)
    except ValueError as error:
        # YAML reads 1:30:00 as a number, counted in sixties.
        quote = "; in YAML, put quotes around colons" if text.isdecimal() else ""
        raise ValueError(f"{error}{quote}") from error


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed} is outside of 0 to {2**32 - 1}: give one such as 0")


def _check_unit(value: Any) -> None:
    if not is_node(value):
        check_unit(value)


def _check_loss_average(value: Any) -> None:
    if is_node(value):
        return
    if isinstance(value, Mapping):
        for name, each in value.items():
            if not is_node(each):
                _check_average(f"loss_average.{name}", each)
        return
    _check_average("loss_average", value)


def _check_average(name: str, value: Any) -> None:
    try:
        check_choice(name, value, LOSS_AVERAGES)
    except ValueError as error:
        raise ValueError(
            f"{error}, or a function of yours from a microbatch to what its loss was divided by: "
            "{call: pkgutil.resolve_name, args: {name: my_data.count}}"
        ) from None


def _check_size(value: Any) -> None:
    if not is_node(value):
        make_policy(value)


def _check_compile(config: RunConfig) -> None:
    check_compile(
        config.compile,
        sizes_change=any(
            size in ("auto", "explore") or is_node(size)
            for size in (config.microbatch_size, config.eval_microbatch_size)
        ),
        device=choose_device(config.device),
        memory_limit=config.memory_limit,
    )


def _check_limit(value: Any) -> None:
    if parse_share(value) is None:
        parse_bytes(value)


OF_SECTIONS: Mapping[str, Callable[[object], object]] = {
    "eval_dataloader": read_evaluations,
    "checkpoint": check_checkpoint,
    "sampling_mode": read_sampling,
}
# Where their own errors do not say which key they mean, the key is put before them.
_READERS: Mapping[str, Callable[[Any], object]] = {
    "max_duration": _duration("max_duration"),
    "max_time": _check_time,
    "eval_interval": _duration("eval_interval"),
    "scheduler_interval": lambda value: check_choice(
        "scheduler_interval", value, SCHEDULER_INTERVALS
    ),
    "accumulate_batches": read_accumulation,
    "batch_layout": BatchLayout,
    "microbatch_size": _check_size,
    "eval_microbatch_size": _check_size,
    "microbatch_unit": _check_unit,
    "nested": check_nested,
    "when_too_large": check_levels,
    "padding": Padding,
    "cut_padding": check_cut_padding,
    "memory_limit": _check_limit,
    "loss_average": _check_loss_average,
    "batchnorm": lambda value: check_choice("batchnorm", value, BATCHNORM_MODES),
    "precision": lambda value: check_choice("precision", value, PRECISIONS),
    "gradient_sums": lambda value: check_choice("gradient_sums", value, GRADIENT_SUMS),
    "sync": lambda value: check_choice("sync", value, SYNCS),
    "grad_clip_norm": partial(read_amount, "grad_clip_norm"),
    "non_finite": lambda value: check_choice("non_finite", value, NON_FINITE_MODES),
    "parallel": read_parallel,
    "device": choose_device,
    "rehearse": read_rehearsal,
    "seed": _check_seed,
}
