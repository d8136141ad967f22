"""Builds C source text for the host with the system's compiler."""

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path


@cache
def build(source: str, *flags: str) -> ctypes.CDLL:
    """Compile C source with -O3 and the flags; return its functions as a shared library."""
    compiler = os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder, "source.c"), Path(folder, "library.so")
        file.write_text(source)
        command = [compiler, "-O3", *flags, "-shared", "-fPIC", "-o", str(library), str(file)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))  # the library stays loaded after its file is deleted


def pointers(*arrays):
    """Return the addresses of NumPy arrays as arguments of a C function."""
    return [ctypes.c_void_p(array.ctypes.data) for array in arrays]
