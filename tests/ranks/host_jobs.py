"""What ranks run whose hosts go away."""

import datetime
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from automicro import Microbatcher
from automicro.ranks.coordinated import open_exchange
from automicro.ranks.heartbeat import watch_peers
from automicro.torch_private_distributed import TCPStore

GROUP_TIMEOUT = datetime.timedelta(minutes=30)


def step_for_ever(
    rank: int, world_size: int, port: int, seconds: str, kind: str, pipe: Connection
) -> None:
    """Take steps until one fails; tell of the first, and of the failure."""
    torch.set_num_threads(1)
    os.environ["AUTOMICRO_PEER_TIMEOUT"] = seconds
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
    )
    microbatcher = Microbatcher(
        _wrapped(kind),
        loss_fn=torch.nn.MSELoss(),
        microbatch_size=2,
    )
    batch = (torch.ones(4, 8), torch.zeros(4, 8))
    for _ in range(3):
        microbatcher.backward(batch)
    pipe.send("steps")
    said: Any = None
    try:
        while True:
            microbatcher.backward(batch)
    except BaseException as error:
        said = (type(error).__name__, str(error))
    pipe.send(said)
    os._exit(0)


def wait_for_a_lost_peer(
    rank: int, world_size: int, port: int, seconds: str, kind: str, pipe: Connection
) -> None:
    """Sign in and wait in a place that nothing ends."""
    os.environ["AUTOMICRO_PEER_TIMEOUT"] = seconds
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
    )
    watch_peers(open_exchange())
    pipe.send("waits")
    while True:
        time.sleep(1.0)


def _wrapped(kind: str) -> nn.Module:
    model = nn.Linear(8, 8)
    if kind == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model)
    return model
