"""Breaking off what a process waits for, where its peers will never answer."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_INTERNET = (socket.AF_INET, socket.AF_INET6)


def shut_connections(*, except_port: int) -> int:
    """Shut the TCP connections of this process; how many there were.

    Nothing that torch offers ends a wait in gloo: its groups have no abort, and a timeout is set
    when a wait begins. A connection that is shut does: whoever waits for it gets an error at once.
    Those of gloo cannot be told from others, so all are shut but those of the store.

    Args:
        except_port: connections to and from it stay.

    >>> server = socket.create_server(("127.0.0.1", 0))
    >>> shut_connections(except_port=server.getsockname()[1])
    0
    >>> server.close()
    """
    count = 0
    for each in _connections():
        with each, contextlib.suppress(OSError):  # it was closed meanwhile, or never connected
            if except_port in (each.getpeername()[1], each.getsockname()[1]):
                continue
            each.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def _connections() -> Iterator[socket.socket]:
    """A second handle on every TCP socket of this process; none where they cannot be listed."""
    folder = next((each for each in map(Path, ("/proc/self/fd", "/dev/fd")) if each.is_dir()), None)
    for name in [] if folder is None else [path.name for path in folder.iterdir()]:
        with contextlib.suppress(OSError):  # the folder itself was open while it was read
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
            if found.family in _INTERNET and found.type == socket.SOCK_STREAM:
                yield found
            else:
                found.close()
