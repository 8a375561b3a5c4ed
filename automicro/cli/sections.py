"""Keys that hold further keys: whether these are well formed, and what is read from them."""

from collections.abc import Mapping
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from automicro.cli.config import SECTIONS, CallConfig, EvaluatorConfig
from automicro.cli.keys import keys_inside, wrong_type
from automicro.cli.keys_meant import about
from automicro.cli.nodes import FORM, NODE_KEYS, check_node, is_interpolation, is_node, show
from automicro.cli.suggestions import did_you_mean
from automicro.errors import ConfigError
from automicro.trainer.evaluators import INHERITED

CHECKPOINT_FORM = (
    "write {interval: 500ba, keep_last: 2}, {} for the defaults, or null for no checkpoints"
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


def check_eval_data(value: object, key: str = "eval_data") -> None:
    """Refuse what is no node, no evaluation with options, and no mapping from names to these.

    Raises:
        ConfigError: names key, value and remedy.

    >>> check_eval_data({"seen": {"call": "a.b"}, "new": {"data": {"call": "a.b"}}})
    """
    if not _is_by_name(value):
        _check_evaluation(value, key)
        return
    for name, each in cast(Mapping[object, object], value).items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(
                f"{key} has the name {show(name)}: names are text without '/', because values are "
                f"logged as eval/name/loss"
            )
        if each is not None and not is_interpolation(each):
            with about(f"{key}.{name}"):
                _check_evaluation(each, f"{key}.{name}")


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
        known = "eval_data.microbatch_size" if key.startswith("eval_data") else key
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
            with about(f"{key}.{name}"):
                raise ConfigError(
                    f"{key} has an unknown key {name!r}{hint}: use some of {', '.join(known)}"
                )
    schema = OmegaConf.structured(SECTIONS[section])
    try:
        merged = OmegaConf.merge(schema, dict(values))
    except ValidationError as error:
        name = str(error.full_key)
        with about(f"{key}.{name}"):
            raise wrong_type(f"{key}.{name}", values.get(name), f"{section}.{name}") from error
    except OmegaConfBaseException as error:
        said = str(error).partition("\n")[0]
        raise ConfigError(
            f"{key}.{error.full_key}: {said}: correct it; an interpolation is written ${{name}}"
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


def read_eval_data(value: Any) -> Any:
    """Return a node, an evaluation with options, or a mapping from names to these, typed.

    Args:
        value: of ``eval_data``, interpolations resolved.

    >>> read_eval_data({"seen": {"data": {"call": "a.b"}, "interval": "2ep"}})["seen"].interval
    '2ep'
    """
    if value is None:
        return None
    if _is_by_name(value):
        return {name: read_eval_data(each) for name, each in value.items()}
    if is_node(value):
        return _call(value)
    values = read_section(value, "eval_data")
    if isinstance(values["metrics"], Mapping):
        metrics = {name: _call(each) for name, each in values["metrics"].items()}
    else:
        metrics = values["metrics"]
    return EvaluatorConfig(**{**values, "data": _call(values["data"]), "metrics": metrics})


def _call(node: Mapping[str, Any]) -> CallConfig:
    return CallConfig(call=node["call"], args=dict(node.get("args") or {}))


def _check_evaluation(value: object, key: str) -> None:
    known = keys_inside("eval_data")
    options = [name for name in known if isinstance(value, Mapping) and name in value]
    if not isinstance(value, Mapping) or is_node(value) or not options:
        check_node(value, key)
        return
    if "data" not in options:
        raise ConfigError(
            f"{key}.data is missing: write data: beside {', '.join(options)}, with a node that "
            f"makes what to evaluate on ({FORM.removeprefix('write ')})"
        )
    metrics = value.get("metrics", INHERITED)
    if metrics not in (None, INHERITED) and not is_interpolation(metrics):
        check_metrics(metrics, f"{key}.metrics")
    check_node(value["data"], f"{key}.data")
    check_size(value.get("microbatch_size"), f"{key}.microbatch_size")
    read_section(value, "eval_data", key)


def _is_by_name(value: object) -> bool:
    """Whether this maps names to evaluations, and is not one itself, mistyped perhaps."""
    if not isinstance(value, Mapping) or not value:
        return False
    if any(name in value for name in (*NODE_KEYS, *keys_inside("eval_data"))):
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
