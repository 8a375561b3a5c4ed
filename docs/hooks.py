"""What `make docs` adds to the pages: the README, generated parts, and links out of the site.

A comment such as ``<!-- generated: every_key -->`` in a page is replaced by what the function of
that name gives.
"""

import json
import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure_recipes

from automicro.cli.commands.config import describe_keys
from benchmarks.beside_composer import table

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def readme() -> str:
    return LINK.sub(r"[\1](../\2\3)", (ROOT / "README.md").read_text(encoding="utf-8"))


def every_key() -> str:
    """A section with a table for each group of keys."""
    parts = [
        "## Every key\n\nAs `automicro config --keys` prints them. A node is\n"
        "`{call: dotted.path, args: {name: value}}`.\n"
    ]
    for group, keys in describe_keys().items():
        parts += [f"\n### {group}\n", "| Key | Type | Default | What it is |", "|---|---|---|---|"]
        for name, (kind, default, meaning) in keys.items():
            word, _, value = default.partition(" ")
            shown = f"`{value}`" if word == "default" else default.partition(",")[0]
            meaning = meaning.replace("|", r"\|")
            parts.append(f"| `{name}` | {kind} | {shown} | {meaning} |")
    return "\n".join(parts) + "\n"


def changed_lines() -> str:
    return "\n".join(map(measure_recipes.section, measure_recipes.RECIPES))


def beside_composer() -> str:
    *_, newest = sorted((ROOT / "benchmarks" / "results").glob("*-beside-composer.json"))
    return table(json.loads(newest.read_text(encoding="utf-8")))


GENERATED: dict[str, Callable[[], str]] = {
    each.__name__: each for each in (readme, every_key, changed_lines, beside_composer)
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    markdown = MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)
    return LINK.sub(lambda link: within(folder, link[1], link[2], link[3] or ""), markdown)


def within(folder: str, text: str, target: str, anchor: str) -> str:
    """A link to a page of the site, or to the repository where that is known.

    >>> within("docs/integrations", "Explore", "../sizes.md", "#explore")
    '[Explore](../sizes.md#explore)'
    """
    path = posixpath.normpath(posixpath.join(folder, target))
    if path.startswith("docs/"):
        return f"[{text}]({posixpath.relpath(path, folder)}{anchor})"
    repository = os.environ.get("AUTOMICRO_REPOSITORY", "").rstrip("/")
    if repository:
        return f"[{text}]({repository}/blob/HEAD/{path}{anchor})"
    return text if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
