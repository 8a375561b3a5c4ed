"""Configs as YAML that reads back as the same values."""

import re
from collections.abc import Mapping
from typing import Any, cast

import yaml  # type: ignore[import-untyped]

_WIDTH = 100


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes no anchors, and quotes text that OmegaConf would read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> Any:
    # Other quotes leave line breaks of Unicode as they are, which are read as spaces.
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
# 1e-3 is text in YAML 1.1 and a number for OmegaConf.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9._]+[eE][-+]?[0-9]+$"), list("-+0123456789.")
)


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return values as YAML, with lists and mappings of plain values on one line each.

    >>> print(to_yaml({"model": {"call": "a.B", "args": {"width": 4}}, "name": "1e-3"}), end="")
    model:
      call: a.B
      args: {width: 4}
    name: '1e-3'
    """
    return "".join(_key_to_yaml(key, value) for key, value in values.items())


def escape(value: Any) -> Any:
    r"""Return a value in which nothing is an interpolation any more.

    >>> print(escape({"name": ["${seed}"]})["name"][0])
    \${seed}
    """
    if isinstance(value, Mapping):
        return {name: escape(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [escape(each) for each in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def _key_to_yaml(key: str, value: Any) -> str:
    text = yaml.dump(
        {key: value},
        Dumper=_Dumper,
        # None is one line for each collection of plain values, this outermost one included.
        default_flow_style=None if isinstance(value, dict | list) else False,
        sort_keys=False,
        width=_WIDTH,
        allow_unicode=True,
    )
    return cast(str, text)
