"""Compiles the C++ code of tests against torch once and caches it in a folder."""

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

TORCH = Path(torch.__file__).parent
FLAGS = ["-std=c++20", "-O1", "-fPIC", f"-isystem{TORCH / 'include'}"]


def find_compiler() -> str | None:
    """Return the C++ compiler of this machine: $CXX, or the first of the usual names."""
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def compile_library(
    compiler: str, sources: Sequence[Path], folder: Path, libraries: Sequence[str]
) -> Path:
    """Return the library, and recompile it only if sources, torch or compiler changed."""
    folder.mkdir(parents=True, exist_ok=True)
    objects = [_name(compiler, [source], folder, ".o") for source in sources]
    library = _name(compiler, sources, folder, ".so")
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if not library.exists():
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                list(threads.map(functools.partial(_compile, compiler), sources, objects))
            _link(compiler, objects, library, libraries)
    return library


def _name(compiler: str, sources: Sequence[Path], folder: Path, suffix: str) -> Path:
    texts = [each.read_text() for source in sources for each in _with_headers(source)]
    identity = " ".join([torch.__version__, torch.__file__, compiler, *FLAGS, *texts])
    return (
        folder / f"{sources[0].stem}_{hashlib.sha256(identity.encode()).hexdigest()[:16]}{suffix}"
    )


def _with_headers(source: Path) -> list[Path]:
    """Return a file and the neighboring files that it includes."""
    names = re.findall(r'^#include "(.+)"$', source.read_text(), re.M)
    return [source, *(each for name in names for each in _with_headers(source.with_name(name)))]


def _compile(compiler: str, source: Path, target: Path) -> None:
    if not target.exists():
        unfinished = target.with_suffix(".unfinished")
        _run([compiler, *FLAGS, "-c", str(source), "-o", str(unfinished)])
        unfinished.rename(target)  # atomically


def _link(compiler: str, objects: Sequence[Path], library: Path, libraries: Sequence[str]) -> None:
    unfinished = library.with_suffix(".unfinished")
    link = [compiler, "-shared", *map(str, objects), "-o", str(unfinished), f"-L{TORCH / 'lib'}"]
    _run([*link, f"-Wl,-rpath,{TORCH / 'lib'}", *(f"-l{name}" for name in libraries)])
    unfinished.rename(library)


def _run(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stderr}")
