"""One watch over the hosts of all ranks for each process group, begun by whoever needs it first."""

import datetime
import math
import os
import uuid
from dataclasses import dataclass

import torch.distributed as dist

from automicro.distributed.exchange import Exchange
from automicro.distributed.heartbeat import Heartbeat, NoWatch, StoreAddress, Watch
from automicro.torch_private_distributed import PrefixStore, Store, TCPStore, default_tcp_store

VARIABLE = "AUTOMICRO_PEER_TIMEOUT"
DEFAULT_SECONDS = 60.0
_ANSWER = datetime.timedelta(seconds=5)


@dataclass(frozen=True, kw_only=True)
class _Begun:
    group: object
    watch: Watch


_begun: _Begun | None = None


def watch_peers(exchange: Exchange) -> Watch:
    """The watch of this process group, which begins with the first call. All ranks call it.

    Rank 0's ``AUTOMICRO_PEER_TIMEOUT`` counts for all. Nobody watches a single process, or where
    the processes met in something else than a TCPStore.

    Args:
        exchange: reaches all ranks.

    Raises:
        ValueError: the variable is no number of seconds.

    >>> from automicro.distributed.exchange import AloneExchange
    >>> type(watch_peers(AloneExchange())).__name__
    'NoWatch'
    """
    global _begun
    if exchange.world_size == 1:
        return NoWatch()
    group = dist.group.WORLD
    if _begun is not None and _begun.group is group:
        return _begun.watch
    watch = _begin(exchange, group)
    _begun = _Begun(group=group, watch=watch)
    return watch


def timeout_from_environment() -> float:
    """Seconds without a sign of life, after which a rank is lost; 0 where nobody is to watch.

    Raises:
        ValueError: the variable is no number of seconds.

    >>> timeout_from_environment()
    60.0
    """
    text = os.environ.get(VARIABLE, "").strip()
    try:
        seconds = float(text) if text else DEFAULT_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"the environment has {VARIABLE}={text!r}, which is no number of seconds; set it to "
            f"how long a host may be silent, such as {DEFAULT_SECONDS:g}, to 0 for any time, or "
            "unset it"
        )
    return seconds


def _begin(exchange: Exchange, group: object) -> Watch:
    own_timeout = timeout_from_environment()
    server = default_tcp_store()
    if server is None:
        return NoWatch()
    # A name of its own: the store may outlive this group and have the beats of an earlier one.
    told = exchange.texts(f"{uuid.uuid4().hex} {own_timeout}" if exchange.rank == 0 else "")
    name, timeout = told.split()
    timeout_seconds = float(timeout)
    if timeout_seconds == 0:
        return NoWatch()
    host, port = server.host, server.port
    uses_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)

    def connect() -> Store:
        store = TCPStore(host, port, None, False, _ANSWER, wait_for_workers=False)
        return PrefixStore(f"automicro/watch {name}", store)

    heartbeat = Heartbeat(
        connect,
        address=StoreAddress(host=host, port=port, outlives_ranks=uses_agent),
        rank=exchange.rank,
        world_size=exchange.world_size,
        timeout_seconds=timeout_seconds,
        is_over=lambda: not dist.is_initialized() or dist.group.WORLD is not group,
    )
    heartbeat.sign_in()
    exchange.texts("")  # all have signed in
    heartbeat.start()
    return heartbeat
