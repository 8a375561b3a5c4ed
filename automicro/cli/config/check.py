"""Whether what stands under each key belongs there and means something. Nothing is made."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from pkgutil import resolve_name
from types import NoneType
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from automicro.checkpoints.store import CheckpointConfig
from automicro.cli.config.keys import (
    KEYS,
    OPTIONS,
    Option,
    as_override,
    mistake,
)
from automicro.cli.config.nodes import (
    FORM,
    NODE_KEYS,
    REFERENCE,
    CallConfig,
    check_node,
    is_interpolation,
    is_node,
    items_inside,
    leaves,
    show,
)
from automicro.cli.config.schema import (
    PLAIN,
    SECTIONS,
    EvaluatorConfig,
    RunConfig,
    SamplingConfig,
    alternatives,
    choices,
    defaults,
    keys_inside,
    one_of,
    wrong_type,
)
from automicro.compilation import check_compile
from automicro.errors import ConfigError, about, nearest, suggestion
from automicro.memory.oom import first_line
from automicro.options import check_choice
from automicro.policy.choose import make_policy
from automicro.trainer.device import choose_device
from automicro.units import duration_meant, parse_bytes, parse_share, parse_time

LOSS_AVERAGES = ("auto", "samples", "tokens", "none")
NO_KEYS_OF_ITS_OWN = (
    "a config has no keys of its own, and automicro config --keys lists all that there are; refer "
    "to a value where it stands, as ${model.args.width}, or take it from the environment with "
    "${oc.env:NAME}"
)
CHECKPOINT_FORM = (
    "write {interval: 500ba, keep_last: 2}, {} for the defaults, or null for no checkpoints"
)
SAMPLING_FORM = "write {mode: duration, lengths: seconds, batch_length: 600.0}, or fixed"


def read_typed(tree: Mapping[str, Any]) -> DictConfig:
    """Return the values of a config in the types of its keys, defaults filled in.

    Interpolations and ??? are left for later.

    >>> read_typed({"model": {"call": "torch.nn.Linear"}, "seed": "3"}).seed
    3
    """
    # Before OmegaConf looks, whose errors do not say what was meant.
    for key, value in tree.items():
        with about(key):
            if key not in KEYS:
                raise ConfigError(_unknown_key(key, tree))
            _check_shape(value, key, key)
    return _merge_into(RunConfig, tree)


def _merge_into(
    schema: type, values: Mapping[str, Any], key: str = "", kind: str = ""
) -> DictConfig:
    """Values in the types of a schema; what OmegaConf refuses, in words."""
    prefix, kinds = (f"{each}." if each else "" for each in (key, kind))
    try:
        return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(schema), dict(values)))
    except OmegaConfBaseException as error:
        name = str(getattr(error, "full_key", None) or "")
        where = f"{prefix}{name}"
        if isinstance(error, ValidationError) and name in values:
            raise wrong_type(where, values[name], f"{kinds}{name}") from error
        raise mistake(
            f"{where}: {first_line(error)}: correct it; an interpolation is written ${{name}}",
            *filter(None, [where]),
        ) from error


def _check_shape(value: Any, key: str, kind: str) -> None:
    """Refuse a value that is no node, list or mapping where one belongs, or one where none does."""
    found, option = alternatives(kind), OPTIONS.get(kind, Option())
    if is_interpolation(value) or value == "???" or _is_default(value, kind):
        return
    if value is None and not {NoneType, Any}.isdisjoint(found):
        return
    if kind in OF_SECTIONS:
        OF_SECTIONS[kind](value)
    elif option.made == "list":
        if not isinstance(value, list | tuple):
            raise ConfigError(
                f"{key}={show(value)} is not a list: write [{{call: dotted.path, args: {{name: "
                f"value}}}}], or [] for none"
            )
        for place, node in enumerate(value):
            check_node(node, f"{key}.{place}")
    elif option.made == "mapping":
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{key}={show(value)} is not a mapping: write {{name: {{call: dotted.path, args: "
                f"{{…}}}}}}, or {{}} for none"
            )
        for name, node in value.items():
            with about(f"{key}.{name}"):
                check_node(node, f"{key}.{name}")
    # A mapping is a node, unless the key may hold a plain one: there it is a node if it has call.
    elif set(found) <= {CallConfig, NoneType} or (
        CallConfig in found
        and isinstance(value, Mapping)
        and (is_node(value) or Mapping not in found)
    ):
        check_node(value, key)
    elif not _may_be(value, found):
        raise wrong_type(key, value, kind)


def _is_default(value: object, kind: str) -> bool:
    section, _, name = kind.rpartition(".")
    default = defaults(section).get(name, ...)
    # By type, too: for Python True is 1, and False is 0.
    return type(value) is type(default) and value == default


def _may_be(value: object, found: tuple[Any, ...]) -> bool:
    if Any in found or set(found) <= set(PLAIN):
        # Which plain value it may be is for OmegaConf to tell: it reads numbers as text, and so on.
        return Any in found or not isinstance(value, Mapping | list)
    # Python takes True for an int.
    if isinstance(value, bool):
        return bool in found
    return any(isinstance(value, kind) for kind in found)


def _unknown_key(key: str, tree: Mapping[str, Any]) -> str:
    value = tree[key]
    duration = duration_meant(value, str(key))
    below = ["max_duration"] if duration else _places_of(key, tree)
    below += [f"{each}.{key}" for each in SECTIONS if key in keys_inside(each)]
    if below:
        # An argument that only refers to a key is set by that key.
        other = REFERENCE.fullmatch(str(leaves(tree).get(below[0])))
        meant = other[1] if other else below[0]
        said = f"unknown key {key!r} (did you mean {meant!r}?)"
        return f"{said}: write {as_override(meant, duration or value)}"
    hint = suggestion(str(key), KEYS)
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


def _read_checkpoint(value: Any) -> dict[str, Any]:
    """Return every key of the checkpoints, typed."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"checkpoint={show(value)} is not a mapping: {CHECKPOINT_FORM}")
    typed = _read_section(value, "checkpoint", "checkpoint", may_lack=("folder",))
    return cast(dict[str, Any], OmegaConf.to_container(typed))


def _read_sampling(value: Any) -> DictConfig:
    """Return how rows are put into batches, typed.

    Args:
        value: the name of a mode, or a mapping of the keys.
    """
    if isinstance(value, str):
        value = {"mode": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"sampling_mode={show(value)} is no mode and no mapping: {SAMPLING_FORM}")
    return _read_section(value, "sampling_mode", "sampling_mode")


def _read_evaluations(value: Any, key: str = "eval_dataloader") -> Any:
    """Return a node, an evaluation with options, or a mapping from names to these, typed.

    >>> new = {"data": {"call": "a.b"}, "interval": "2ep"}
    >>> _read_evaluations({"seen": {"call": "a.b"}, "new": new})["new"].interval
    '2ep'
    """
    if is_interpolation(value):
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
                found[name] = _read_evaluations(each, f"{key}.{name}")
        return found
    known = keys_inside("eval_dataloader")
    if isinstance(value, Mapping) and not is_node(value) and any(name in value for name in known):
        return _read_section(value, "eval_dataloader", key)
    check_node(value, key)
    return _merge_into(CallConfig, value, key)


def _read_section(
    values: Mapping[str, Any], section: str, key: str, *, may_lack: Sequence[str] = ()
) -> DictConfig:
    """The values of a section in the types of its keys, defaults filled in."""
    known = keys_inside(section)
    for name, value in values.items():
        where = f"{key}.{name}"
        if name not in known:
            hint = suggestion(name, known)
            raise mistake(
                f"{key} has an unknown key {name!r}{hint}: use some of {', '.join(known)}", where
            )
        with about(where):
            _check_shape(value, where, f"{section}.{name}")
    for name in known:
        if name not in (*values, *may_lack, *defaults(section)):
            words = choices(f"{section}.{name}")
            remedy = one_of(words) if words else FORM.removeprefix("write ")
            raise ConfigError(f"{key}.{name} is missing: write {name}: {remedy}")
    return _merge_into(SECTIONS[section], values, key, section)


def _is_by_name(value: object) -> bool:
    """Whether this maps names to evaluations, and is not one itself, mistyped perhaps."""
    if not isinstance(value, Mapping) or not value:
        return False
    if any(name in value for name in (*NODE_KEYS, *keys_inside("eval_dataloader"))):
        return False
    # {clal: torch.nn.Linear} is a mistyped node, and no evaluation that is called clal.
    return all(isinstance(value[name], Mapping) or not nearest(name, NODE_KEYS) for name in value)


def check_values(config: RunConfig) -> None:
    """Refuse what the Trainer would refuse, without making one.

    >>> check_values(RunConfig(max_duration="2ep", microbatch_size=64))
    """
    for key in KEYS:
        _check_value(getattr(config, key), key, key)
    with _about("compile"):
        sizes = (config.microbatch_size, config.eval_microbatch_size)
        check_compile(
            config.compile,
            # A policy may change sizes. It is not made yet, so it cannot be asked.
            sizes_change=any(size in ("auto", "explore") or is_node(size) for size in sizes),
            device=choose_device(config.device),
            memory_limit=config.memory_limit,
        )


def _check_value(value: Any, key: str, kind: str) -> None:
    """Refuse a value that means nothing, there or in a section."""
    if isinstance(value, EvaluatorConfig | SamplingConfig):
        for name in keys_inside(kind):
            _check_value(getattr(value, name), f"{key}.{name}", f"{kind}.{name}")
    elif kind == "eval_dataloader" and isinstance(value, Mapping):
        for name, each in value.items():
            _check_value(each, f"{key}.{name}", kind)
    option = OPTIONS.get(kind, Option())
    if value is None or is_node(value) or _is_default(value, kind):
        return
    with _about(key):
        if option.choices:
            check_choice(key, value, choices(kind))
        elif option.read:
            read = resolve_name(option.read)
            is_named = next(iter(signature(read).parameters)) == "name"
            read(key, value) if is_named else read(value)


@contextlib.contextmanager
def _about(key: str) -> Iterator[None]:
    """Turn an error of misuse into a mistake in the config."""
    with about(key):
        try:
            yield
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error


def make_checkpoint(config: RunConfig) -> CheckpointConfig | None:
    """Return what the Trainer is told about checkpoints.

    >>> make_checkpoint(RunConfig()) is None
    True
    """
    values = config.checkpoint
    if values is None:
        return None
    folder = values["folder"]
    if folder is None:
        raise mistake(
            "checkpoint.folder is missing: give a folder such as checkpoints, or run_dir, where "
            "they lie in checkpoints then",
            "checkpoint",
        )
    for name, value in values.items():
        with about(f"checkpoint.{name}"):
            try:
                # One key at a time, so that an error is about the line of its own key.
                CheckpointConfig(**{"folder": folder, name: value})
            except ValueError as error:
                raise ConfigError(f"checkpoint.{error}") from error
    return CheckpointConfig(**values)


def _read_size(name: str, value: Any) -> None:
    """Refuse what is no microbatch size. A policy is a node here."""
    try:
        make_policy(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}={show(value)}: give a whole number of at least 1, auto (found by halving), "
            f"explore (the fastest number of rows) or null (the whole batch)"
        ) from error


def _read_limit(name: str, value: Any) -> None:
    """Refuse what is no amount of memory, and no share of a device."""
    try:
        if parse_share(value) is None:
            parse_bytes(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error


def _read_time(name: str, value: str) -> None:
    """Refuse what is no time."""
    try:
        parse_time(value)
    except ValueError as error:
        # YAML reads 1:30:00 as a number, counted in sixties.
        quote = "; in YAML, put quotes around colons" if value.isdecimal() else ""
        raise ConfigError(f"{name}: {error}{quote}") from error


def _read_loss_average(name: str, value: Any) -> None:
    """Refuse what says nothing of the loss, by the names of losses perhaps."""
    if isinstance(value, Mapping):
        for inner, each in value.items():
            if not is_node(each):
                _read_loss_average(f"{name}.{inner}", each)
        return
    try:
        check_choice(name, value, LOSS_AVERAGES)
    except ValueError as error:
        raise ConfigError(
            f"{error}, or a function of yours from a microbatch to what its loss was divided by: "
            "{call: pkgutil.resolve_name, args: {name: my_data.count}}"
        ) from None


OF_SECTIONS: Mapping[str, Callable[[Any], object]] = {
    "eval_dataloader": _read_evaluations,
    "checkpoint": _read_checkpoint,
    "sampling_mode": _read_sampling,
}
