"""A folder of files somewhere else, behind a URL that fsspec reads: one object for each key.

It has the few methods of `pathlib.Path` that the cache uses. Whatever goes wrong there is an
`OSError`, like what goes wrong on a disk, and nothing is waited for longer than some seconds: a
bucket that does not answer may cost a run its memory of sizes, and not its time.
"""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

T = TypeVar("T")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_SECRET = re.compile(r"(?<=://)[^/@]*@")
SECONDS = 15.0  # that an answer may take


class RemotePath:
    """A folder or a file behind a URL.

    Args:
        url: such as ``s3://bucket/sizes``.

    >>> folder = RemotePath("memory://team/sizes")
    >>> (folder / "1f2e.json").write(b"{}")
    >>> [path.name for path in folder.iterdir()], (folder / "1f2e.json").read(10)
    (['1f2e.json'], b'{}')
    >>> RemotePath("s3://key:secret@bucket/sizes")
    RemotePath('s3://…@bucket/sizes')
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def __str__(self) -> str:
        return _SECRET.sub("…@", self._url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self._url}/{name}")

    def __lt__(self, other: "RemotePath") -> bool:
        return self._url < other._url

    @property
    def name(self) -> str:
        """The last part."""
        return PurePosixPath(self._url).name

    @property
    def stem(self) -> str:
        """The name without its ending."""
        return PurePosixPath(self._url).stem

    def iterdir(self) -> Iterator["RemotePath"]:
        """What lies in it.

        Raises:
            FileNotFoundError: there is no such folder.
            OSError: it cannot be asked.
        """
        found = self._do(lambda fs, path: fs.ls(path, detail=False, refresh=True))
        yield from (self / PurePosixPath(str(each)).name for each in found)

    def read(self, most_bytes: int) -> bytes:
        """Its content, cut off behind so many bytes.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be read.
        """
        return bytes(self._do(lambda fs, path: fs.cat_file(path, start=0, end=most_bytes)))

    def write(self, content: bytes) -> None:
        """Put it there as a whole, as object stores do, in place of what was there.

        Raises:
            OSError: it cannot be written.
        """

        def put(fs: Any, path: str) -> None:
            folder = path.rpartition("/")[0]
            if folder:
                fs.makedirs(folder, exist_ok=True)
            fs.pipe_file(path, content)

        self._do(put)

    def unlink(self) -> None:
        """Remove it.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be removed.
        """
        self._do(lambda fs, path: fs.rm_file(path))

    def _do(self, work: Callable[[Any, str], T]) -> T:
        try:
            import fsspec
        except ImportError:
            raise OSError(
                0, 'a URL needs fsspec, which is not installed: pip install "automicro[cache]"'
            ) from None

        def ask() -> T:
            fs, path = fsspec.core.url_to_fs(self._url)
            return work(fs, path)

        return _within(ask, SECONDS)


def _within(work: Callable[[], T], seconds: float) -> T:
    """Do something that may never come back, and turn what it raises into an OSError.

    Raises:
        OSError: it failed, or took longer.
    """
    results: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # of any library behind fsspec
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True, name="automicro-cache")
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    if not failures:
        raise TimeoutError(0, f"no answer within {seconds:g} seconds")
    (error,) = failures
    if isinstance(error, FileNotFoundError):
        raise error
    text = " ".join(str(error).split())[:200]
    missing = isinstance(error, ImportError)
    remedy = ": install what fsspec needs for it" if missing else ""
    raise OSError(0, f"{type(error).__name__}: {_SECRET.sub('…@', text)}{remedy}") from error


def place_of(text: str) -> Path | RemotePath:
    """A folder, or what lies behind a URL; ``file://`` is a folder.

    >>> place_of("/data/cache"), place_of("file:///data/cache"), place_of("s3://bucket/a")
    (PosixPath('/data/cache'), PosixPath('/data/cache'), RemotePath('s3://bucket/a'))
    """
    if not _URL.match(text):
        return Path(text).expanduser()
    scheme, _, rest = text.partition("://")
    # Renamed in one step there, which fsspec does not.
    return Path(rest) if scheme.lower() in ("file", "local") else RemotePath(text)
