"""Examples in docstrings, ``>>> …``, as blocks of code in the reference: an extension of griffe."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*\n(?:\1.*\S.*\n?)*", re.MULTILINE)


class Fences(griffe.Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called for each module, class and function that is read."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)


def fenced(example: re.Match[str]) -> str:
    indent = example[1]
    return f"{indent}```pycon\n{example[0].rstrip()}\n{indent}```\n"
