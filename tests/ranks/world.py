"""Real worlds: processes that run many cases and are never left behind."""

import contextlib
import datetime
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

PROGRESS_SECONDS = 90.0  # long, because shared machines can stall
GROUP_TIMEOUT = datetime.timedelta(minutes=30)


class WorldStuckError(AssertionError):
    """No rank of a world made progress in time."""


class World:
    """Processes with a gloo group that run the jobs they receive."""

    def __init__(self, size: int) -> None:
        # They fork from a server that has imported everything once per session.
        self._context = multiprocessing.get_context("forkserver")
        jobs = ("jobs", "checkpoint_runs", "trainer_jobs")
        self._context.set_forkserver_preload([f"tests.ranks.{name}" for name in jobs])
        self.size = size
        self._begin()

    def _begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        self._is_killed = False
        for rank in range(self.size):
            here, there = self._context.Pipe()
            arguments = (rank, self.size, self._folder.name, there)
            process = self._context.Process(target=work, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def start(self, job: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._is_killed:  # a failed test must not affect the next one
            self.close()
            self._begin()
        for pipe in self._pipes:
            pipe.send((job, args, kwargs))

    def results(self, *, within_seconds: float = PROGRESS_SECONDS) -> list[Any]:
        """Return the result of each rank, or an exception with its text if it raised or died."""
        results: list[Any] = [None] * self.size
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        end = time.monotonic() + within_seconds
        while waiting:
            seconds = max(0.0, end - time.monotonic())
            ready = cast(list[Connection], wait(list(waiting), timeout=seconds))
            if not ready:
                self.kill()
                raised = [each.text for each in results if isinstance(each, RaisedError)]
                stuck = f"ranks {sorted(waiting.values())} made no progress in {within_seconds} s"
                raise WorldStuckError("\n".join([stuck, *raised]))
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    results[rank] = EOFError(f"rank {rank} died")
        return results

    def run(self, job: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a job on every rank and return the results.

        Raises the errors of the ranks, after all ranks have ended.
        """
        self.start(job, *args, **kwargs)
        results = self.results()
        failures = [getattr(each, "text", str(each)) for each in results if is_error(each)]
        if failures:
            self.kill()
            raise AssertionError("\n".join(failures))
        return results

    def ends(self, job: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
        """Return the class and the text of the error on every rank, or empty strings."""
        self.start(job, *args, **kwargs)
        return [
            (each.kind, each.said) if isinstance(each, RaisedError) else ("", "")
            for each in self.results()
        ]

    def kill(self) -> None:
        self._is_killed = True
        for process in self._processes:
            process.kill()
            process.join()

    def close(self) -> None:
        self.kill()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def is_error(result: Any) -> bool:
    return isinstance(result, BaseException)


@contextlib.contextmanager
def world_of(size: int) -> Iterator[World]:
    world = World(size)
    try:
        yield world
    finally:
        world.close()


def work(rank: int, size: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # imported objects: collections after failures skip them
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=size,
        timeout=GROUP_TIMEOUT,
    )
    while True:
        try:
            job, args, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            result = job(*args, **kwargs)
            pipe.send(result)
            if isinstance(result, dict) and result.get("kind") == "PeerLostError":
                os._exit(1)  # end like a program, so waiting peers notice
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            said = "\n".join([str(error), *getattr(error, "__notes__", [])])
            pipe.send(RaisedError(error, text, said))


class RaisedError(AssertionError):
    """An exception of a rank, as text."""

    def __init__(self, error: BaseException | str, text: str, said: str) -> None:
        super().__init__(error, text, said)
        self.kind = type(error).__name__ if isinstance(error, BaseException) else error
        self.text, self.said = text, said
        self.args = (self.kind, text, said)


def on_ranks(size: int = 2) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on every rank of a world that the module shares (fixture `worlds`)."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(worlds: Callable[[int], World], **arguments: Any) -> None:
            worlds(size).run(run_body, body.__module__, body.__name__, arguments)

        # Pytest reads the fixtures and parameters to pass from this signature.
        world = inspect.Parameter("worlds", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        own = inspect.signature(body)
        given = own.replace(parameters=[world, *own.parameters.values()])
        vars(test).update(__signature__=given, body=body)
        return test

    return decorate


def run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    vars(getattr(importlib.import_module(module), name))["body"](**arguments)
