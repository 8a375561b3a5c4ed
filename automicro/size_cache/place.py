"""Where the user's caches lie."""

import os
import sys
import tempfile
from pathlib import Path

VARIABLE = "AUTOMICRO_CACHE_DIR"


def sizes_folder() -> Path:
    """Return the folder of remembered sizes, which need not exist.

    It lies in ``$AUTOMICRO_CACHE_DIR``, else in ``$XDG_CACHE_HOME/automicro``, else where the
    system keeps the caches of a user: ``~/.cache/automicro`` on Linux.

    >>> sizes_folder().name
    'sizes'
    """
    return _cache_folder() / "sizes"


def _cache_folder() -> Path:
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own)
    # The specification of these variables wants relative paths ignored.
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():
        return shared / "automicro"
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / "automicro"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "automicro"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else home / "AppData" / "Local") / "automicro" / "Cache"
    return home / ".cache" / "automicro"
