"""What a build adds to the metadata: the README as a package index shows it, and links.

A package index shows the README alone, so a link to a page beside it would lead nowhere. Where the
repository lies is told to the build, ``AUTOMICRO_REPOSITORY=https://… python -m build`` (``make
dist REPOSITORY=https://…``), and links lead there. Without it the pages are named and not linked,
and there are no project links. What is built from an sdist has those of the sdist.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "AUTOMICRO_REPOSITORY"
# Of the newest version, on the hosts that call it so: GitHub, GitLab and Forgejo do.
_PAGE, _IMAGE = "blob/HEAD", "raw/HEAD"

_CODE_OR_LINK = re.compile(
    r"^```.*?^```|(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)


class LinksHook(MetadataHookInterface):
    """Sets ``readme`` and ``urls``."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Write both into the metadata.

        Raises:
            ValueError: the repository is no address.
        """
        repository = read_repository(os.environ.get(VARIABLE, ""))
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": for_an_index(readme, repository),
        }
        if repository:
            metadata["urls"] = urls_of(repository)


def read_repository(text: str) -> str | None:
    """The address of the repository without a slash at its end; None where none was told.

    Raises:
        ValueError: it is no address that a browser opens.

    >>> read_repository("https://example.org/us/automicro/")
    'https://example.org/us/automicro'
    """
    text = text.strip()
    if text and not re.fullmatch(r"https://[\w.-]+(:\d+)?(/[\w.~-]+)+/?", text):
        raise ValueError(
            f"{VARIABLE}={text!r} is not the address of a repository: give one that a browser "
            "opens, such as https://HOST/OWNER/automicro, or leave it out for a README without "
            "links"
        )
    return text.removesuffix("/").removesuffix(".git") or None


def urls_of(repository: str) -> dict[str, str]:
    """What an index shows beside the README.

    >>> urls_of("https://example.org/us/automicro")["Issues"]
    'https://example.org/us/automicro/issues'
    """
    return {
        "Source": repository,
        "Documentation": f"{repository}/{_PAGE}/docs",
        "Changelog": f"{repository}/{_PAGE}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def for_an_index(readme: str, repository: str | None) -> str:
    """The README with links that lead somewhere from anywhere.

    Args:
        readme: in Markdown, with links relative to the root of the repository.
        repository: where it lies; None to name pages without a link, and leave images out.

    >>> for_an_index("[How](docs/sizes.md), [more](#tests)", None)
    'How (`docs/sizes.md`), more'
    >>> for_an_index("[How](docs/sizes.md)", "https://example.org/us/automicro")
    '[How](https://example.org/us/automicro/blob/HEAD/docs/sizes.md)'
    """

    def replace(link: re.Match[str]) -> str:
        image, text, target = link.group("image", "text", "target")
        if target is None or re.match(r"[a-z]+:", target):
            return link[0]
        if repository:
            page = f"README.md{target}" if target.startswith("#") else target
            return f"{image}[{text}]({repository}/{_IMAGE if image else _PAGE}/{page})"
        if image:
            return ""
        return text if target.startswith("#") or target in text else f"{text} (`{target}`)"

    return _CODE_OR_LINK.sub(replace, readme)
