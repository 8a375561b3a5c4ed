"""Compiling the allocator against torch's headers."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("capped_allocator.cpp")


def find_compiler() -> str | None:
    """The C++ compiler of this machine: $CXX, or the first of the usual names."""
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def compile_allocator(compiler: str, folder: Path) -> Path:
    """The library, compiled anew only where source, torch or compiler are other ones.

    Raises:
        RuntimeError: it does not compile; with what the compiler said.
    """
    identity = f"{torch.__version__} {torch.__file__} {compiler} {SOURCE.read_text()}"
    library = folder / f"capped_{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    root = Path(torch.__file__).parent
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", str(SOURCE), "-o"]
    command += [str(unfinished), "-isystem", str(root / "include"), f"-L{root / 'lib'}", "-lc10"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stderr}")
    unfinished.rename(library)  # in one go: several test runs may share the folder
    return library
